"""Objects in a bucket of S3 or of an S3-compatible store, through the obstore library.

Owns the translation between S3 and the backend interface. :mod:`kvshelf.backends.s3_client` makes
the client from the user's options, :mod:`kvshelf.backends.s3_errors` says what answers mean. If
obstore is not installed, or an option needs s3fs, :func:`open_s3` opens the bucket through s3fs
instead (:class:`S3fsBackend`).

Contracts
---------
* A probe is one HEAD request. A load is one GET of the whole object, read as it arrives. A large
  object is fetched as several parts in parallel if one connection was measured to be slow, few
  requests are in flight and the server supports ranges. A body that is not read to its end is
  dropped.
* A publication is one PUT, with ``If-None-Match: *`` unless the object may be replaced. A store
  that ignores the condition would overwrite. Whether it honours the condition is learned once, by
  writing a small object a second time with the same bytes. Until the store is known to honour the
  condition, a HEAD precedes each PUT.
* A store that ignores ``If-None-Match`` may tell two writers CREATED. Equal names hold equal bytes,
  so the second write does no harm.
* obstore retries timeouts, 5xx and 429, with jitter, for a few seconds. A request that still fails
  becomes one typed error that says what to do.
* Of a body no more bytes are taken than were asked for, whatever the server sends.
* A server cannot keep a listing going for ever without rows, nor repeat itself for ever; see
  :meth:`S3Backend.list` and :meth:`S3Backend.folders`.
* Neither ``url``, ``repr`` nor messages show keys, secrets or tokens.

Batches of probes, the parts of an object, and listings run on an event loop in one thread of the
backend, started when first needed. Everything else runs on the caller's thread, without the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final
from urllib.parse import urlsplit

from kvshelf.backends.base import (
    Backend,
    BytesLike,
    Deadlines,
    ObjectInfo,
    Properties,
    Reader,
    StatResult,
    StatResults,
    Touched,
    WriteMode,
    WriteResult,
    check_name,
    endless_listing,
)
from kvshelf.backends.generic import GenericBackend
from kvshelf.backends.guard import THREAD_LIMIT, try_to_start
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.s3_client import (
    CONNECT_SECONDS,
    OPTIONS,
    READ_SECONDS,
    endpoint_of,
    is_installed,
    make_store,
    mapping_of,
    unknown_options,
)
from kvshelf.backends.s3_clock import Clock, time_of
from kvshelf.backends.s3_errors import (
    NO_CREDENTIALS,
    RETRYABLE,
    codes_of,
    explain,
    obstore_error,
    unreachable_hint,
)

from kvshelf.errors import (
    ConfigError,
    ObjectMissingError,
    PermanentStorageError,
    ProcessLimitError,
    StorageError,
    TransientStorageError,
)
from kvshelf.urls import shown_url

_PROBES_AT_ONCE: Final = 64
#: A body arrives in pieces of about this size.
_STREAM_BYTES: Final = 1 << 20
#: Objects of at least this size may be fetched in parts of about that size, ...
_LARGE_BYTES: Final = 16 << 20
_PART_BYTES: Final = 8 << 20
#: ... if a connection delivers fewer bytes per second than this. A server in the same network
#: delivers more, and several requests for one object only take longer.
_SLOW_RATE: Final = 150e6
#: Objects are fetched in parts only up to so many concurrent requests for bodies.
_BODIES_AT_ONCE: Final = 16
#: Smaller bodies are not used to measure a connection's rate.
_RATE_BYTES: Final = 1 << 20
_CONFLICTS: Final = 4
#: Rows of a listing that arrive together, and seconds within which they must: empty pages of a
#: bucket with many delete markers are legitimate.
_ROWS: Final = 1000
_ROWS_SECONDS: Final = 60.0
#: Seconds for all folders in one place, which are as many as 50 000 entries, and for the request
#: that opens a shelf. Until then the client collects them in memory.
_FOLDERS_SECONDS: Final = 8.0
#: Largest object that is written twice to learn whether the store honours If-None-Match.
_SMALL_BYTES: Final = 64 << 10

_PART_ALIGNMENT: Final = 1 << 20


def open_s3(url: str, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """Open ``s3://bucket/prefix``.

    Parameters
    ----------
    url : str
    storage_options : Mapping, optional
        The options of s3fs, and ``client``: ``obstore``, ``s3fs`` or ``auto`` (obstore if it is
        installed and knows all options), ``checksum`` (bool: send a SHA-256 of each object, so
        that a store which checks it refuses damaged uploads; default True).

    Raises
    ------
    ConfigError
        If the options cannot be used, or there are no credentials.
    StorageError
        If the bucket cannot be used.
    """
    options = dict(storage_options or {})
    client = options.pop("client", "auto")
    checksum = options.pop("checksum", True)
    if client not in ("auto", "obstore", "s3fs") or not isinstance(checksum, bool):
        raise ConfigError(
            "storage_options: client is auto, obstore or s3fs, and checksum is true or false"
        )
    unknown = unknown_options(options)
    if client == "obstore" and unknown:
        raise ConfigError(
            f"storage_options: {', '.join(unknown)} can be used with client: s3fs only; obstore"
            f" takes {', '.join(sorted(OPTIONS))}"
        )
    if client == "s3fs" or (client == "auto" and (unknown or not is_installed("obstore"))):
        return S3fsBackend(url, options)
    return S3Backend(url, options, checksum=checksum)


class _StreamReader(Reader):
    """Reads the body of one GET as it arrives."""

    def __init__(self, backend: S3Backend, name: str, result: Any) -> None:
        meta = result.meta
        self.size = int(meta["size"])
        self._backend = backend
        self._name = name
        self._etag = meta.get("e_tag")
        self._result: Any = result
        self._body: Iterator[Any] | None = None
        self._rest = memoryview(b"")
        self._position = 0
        self._waited = 0.0
        self._open = True

    def read_into(self, buffer: memoryview, offset: int) -> int:
        view = buffer.cast("B")
        wanted = max(0, min(len(view), self.size - offset))
        if not wanted:
            return 0
        try:
            if offset != self._position or self._result is None:
                return self._read_range(view[:wanted], offset)
            return self._read_on(view[:wanted])
        except StorageError:
            raise
        except Exception as exc:
            raise self._backend._translate(exc, "reading", self._name) from exc

    def _read_on(self, view: memoryview) -> int:
        if self._body is None:
            self._body = iter(self._result.stream(min_chunk_size=_STREAM_BYTES))
        done = 0
        while done < len(view):
            if not self._rest:
                begin = time.monotonic()
                piece = next(self._body, None)
                self._waited += time.monotonic() - begin
                if piece is None:
                    # The connection ended early: the caller sees too few bytes.
                    break
                self._rest = memoryview(piece).cast("B")
                continue
            part = self._rest[: len(view) - done]
            view[done : done + len(part)] = part
            self._rest = self._rest[len(part) :]
            done += len(part)
        self._position += done
        return done

    def _read_range(self, view: memoryview, offset: int) -> int:
        data = self._backend._fetch(self._name, offset, len(view), self._etag)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._backend._note_bodies(-1)
            self._backend._note_rate(self._position, self._waited)
        # Dropping the body closes its connection.
        self._result = self._body = None
        self._rest = memoryview(b"")


class _PartsReader(Reader):
    """Reads an object whose parts are fetched in parallel."""

    def __init__(
        self,
        backend: S3Backend,
        name: str,
        size: int,
        first: Sequence[memoryview],
        later: Sequence[tuple[int, Future[tuple[int, Sequence[memoryview]]]]],
    ) -> None:
        self.size = size
        self._backend = backend
        self._name = name
        #: The current piece of the current part, the pieces that follow it, and the later parts;
        #: each with the offset of its first byte.
        self._piece = (0, memoryview(b""))
        self._pieces = deque(_placed(0, first))
        self._later = deque(later)
        self._bodies = 1 + len(later)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        view = buffer.cast("B")
        done = 0
        try:
            while done < len(view):
                start, data = self._piece
                inside = offset + done - start
                if inside == len(data) and self._pieces:
                    self._piece = self._pieces.popleft()
                    continue
                if inside == len(data) and self._later:
                    start, part = self._later.popleft()
                    self._pieces.extend(_placed(start, part.result()[1]))
                    continue
                piece = data[inside : inside + len(view) - done] if inside >= 0 else data[:0]
                if not len(piece):
                    # The object's end, or a part with too few bytes.
                    break
                view[done : done + len(piece)] = piece
                done += len(piece)
        except Exception as exc:
            raise self._backend._translate(exc, "reading", self._name) from exc
        return done

    def close(self) -> None:
        for _, part in self._later:
            part.cancel()
        self._later.clear()
        self._pieces.clear()
        self._piece = 0, memoryview(b"")
        bodies, self._bodies = self._bodies, 0
        self._backend._note_bodies(-bodies)


class S3Backend(Backend):
    """Objects below ``s3://bucket/prefix``, through obstore.

    Parameters
    ----------
    url, storage_options, checksum
        See :func:`open_s3`.

    Raises
    ------
    ConfigError, StorageError
        As :func:`open_s3`.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        checksum: bool = True,
    ) -> None:
        options = dict(storage_options or {})
        parts = urlsplit(url)
        self._bucket = parts.netloc
        if not self._bucket or "@" in self._bucket or parts.query or parts.fragment:
            raise ConfigError(
                f"{shown_url(url)} is not a bucket:"
                " expected s3://bucket/prefix; keys and endpoints go into storage_options"
            )
        prefix = parts.path.strip("/")
        self.url = f"s3://{self._bucket}/{prefix}".rstrip("/")
        self._secrets = [
            str(options[name]) for name in ("key", "secret", "token") if options.get(name)
        ]
        self._endpoint = endpoint_of(options)
        self._store = make_store(self._bucket, prefix, options, self._endpoint, checksum)
        config = self._store.config
        server = config.get("endpoint") or f"https://s3.{config['region']}.amazonaws.com"
        self._clock = Clock(server, options)
        self._conditional = True
        self._knows_ranges = True
        #: Bytes per second that one connection delivers, and requests for bodies in flight.
        self._rate = 0.0
        self._bodies = 0
        #: Whether the store honours If-None-Match; None while that is unknown.
        self._honours_condition: bool | None = None
        self._learning = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._check()

    def __repr__(self) -> str:
        return f"S3Backend({self.url!r})"

    @property
    def properties(self) -> Properties:
        """What callers may rely on."""
        return Properties(
            filesystem="s3",
            # A store that ignores If-None-Match does not say so.
            conditional_create=False,
            concurrency=_PROBES_AT_ONCE,
            probes_at_once=_PROBES_AT_ONCE,
            part_bytes=_LARGE_BYTES,
            probe_cost=10e-3,
            # Includes the time to open a connection and obstore's own retries.
            deadlines=Deadlines(probe=5.0, read=15.0, write=15.0),
        )

    def _check(self) -> None:
        """Fail now if every later call would fail."""
        rows = self._store.list(chunk_size=1)
        self._ask(lambda: _next(rows), _FOLDERS_SECONDS, "opening the shelf", "")

    # ------------------------------------------------------------------------------------ errors

    def _translate(
        self, exc: Exception, what: str, name: str, *, writing: bool = False
    ) -> StorageError:
        """Return the typed error for an exception of obstore."""
        text = str(exc)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return obstore_error(
            exc,
            text,
            what,
            f"{self.url}/{name}" if name else self.url,
            bucket=self._bucket,
            endpoint=self._endpoint,
            writing=writing,
        )

    # ------------------------------------------------------------------------------------ probes

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names in parallel, with one HEAD request each."""
        for name in names:
            check_name(name)
        if len(names) == 1:
            return [self._answer(names[0], self._head(names[0]))]
        try:
            loop = self._running_loop()
        except TransientStorageError as error:
            return [error] * len(names)
        found = asyncio.run_coroutine_threadsafe(self._head_all(names), loop).result()
        return [self._answer(name, result) for name, result in zip(names, found, strict=True)]

    def _head(self, name: str) -> Any:
        try:
            return self._store.head(name)
        except Exception as exc:  # noqa: BLE001 - the answer for this name only
            return exc

    async def _head_all(self, names: Sequence[str]) -> list[Any]:
        free = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def head(name: str) -> Any:
            async with free:
                return await self._store.head_async(name)

        return await asyncio.gather(*map(head, names), return_exceptions=True)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the backend's own thread."""
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                # A daemon, so that a server which never answers cannot keep the process alive.
                thread = threading.Thread(
                    target=_serve, args=(loop,), name="kvshelf-s3", daemon=True
                )
                if not try_to_start(thread):
                    loop.close()
                    raise TransientStorageError(
                        errno.EAGAIN,
                        f"not tried: no thread could be started, {THREAD_LIMIT}",
                        self.url,
                    )
                self._loop = loop
            return self._loop

    def _ask(
        self, request: Callable[[], Awaitable[Any]], seconds: float, what: str, name: str
    ) -> Any:
        """Make a request whose answer can be of many pages, and drop it after `seconds`."""
        loop = self._running_loop()

        async def ask() -> Any:
            return await asyncio.wait_for(request(), seconds)

        try:
            return asyncio.run_coroutine_threadsafe(ask(), loop).result()
        except (TimeoutError, asyncio.TimeoutError) as exc:
            raise PermanentStorageError(
                errno.EOVERFLOW,
                f"{what} failed: {endless_listing(seconds)}",
                f"{self.url}/{name}" if name else self.url,
            ) from exc
        except Exception as exc:
            raise self._translate(exc, what, name) from exc

    def _answer(self, name: str, found: Any) -> StatResult:
        if isinstance(found, FileNotFoundError):
            return None
        if isinstance(found, Exception):
            return self._translate(found, "probing", name)
        if isinstance(found, BaseException):
            raise found
        return int(found["size"])

    def info(self, name: str) -> ObjectInfo | None:
        """Size and time of one object."""
        found = self._head(check_name(name))
        answer = self._answer(name, found)
        if isinstance(answer, StorageError):
            raise answer
        return None if answer is None else _object_info(name, found)

    # ------------------------------------------------------------------------------------- reads

    def open(self, name: str) -> Reader:
        """Request one object; its body is fetched as it is read."""
        check_name(name)
        try:
            found = self._store.get(name)
        except Exception as exc:
            raise self._translate(exc, "opening", name) from exc
        self._note_bodies(1)
        return _StreamReader(self, name, found)

    def open_large(self, name: str, size: int) -> Reader:
        """Request the parts of one object in parallel if that is faster."""
        check_name(name)
        count = min(-(-size // _PART_BYTES), _BODIES_AT_ONCE - self._bodies)
        if count < 2 or not self._knows_ranges or not 0 < self._rate < _SLOW_RATE:
            return self.open(name)
        step = -(-size // count)
        step += -step % _PART_ALIGNMENT
        starts = range(0, size, step)
        loop = self._running_loop()
        self._note_bodies(len(starts))
        parts = [
            asyncio.run_coroutine_threadsafe(
                self._get_part(name, start, min(start + step, size)), loop
            )
            for start in starts
        ]
        try:
            found, first = parts[0].result()
        except BaseException as exc:
            for part in parts:
                part.cancel()
            self._note_bodies(-len(parts))
            if not isinstance(exc, Exception):
                raise
            if "range" in str(exc).lower():
                # A server that answers with the whole object does not support ranges: stop using
                # them. Any other range error means the size is wrong; the reader will detect it.
                self._knows_ranges = "non-partial" not in str(exc)
                return self.open(name)
            raise self._translate(exc, "opening", name) from exc
        return _PartsReader(self, name, found, first, list(zip(starts, parts, strict=True))[1:])

    async def _get_part(self, name: str, start: int, end: int) -> tuple[int, Sequence[memoryview]]:
        """Return the size of an object and the bytes of one part, in pieces."""
        found = await self._store.get_async(name, options={"range": (start, end)})
        begin = time.monotonic()
        pieces = []
        left = end - start
        async for piece in found.stream(min_chunk_size=_STREAM_BYTES):
            pieces.append(memoryview(piece).cast("B")[:left])
            left -= len(pieces[-1])
            if not left:
                break
        self._note_rate(end - start - left, time.monotonic() - begin)
        return int(found.meta["size"]), pieces

    def _note_bodies(self, more: int) -> None:
        with self._lock:
            self._bodies += more

    def _note_rate(self, nbytes: int, seconds: float) -> None:
        """Update the measured rate of one connection."""
        if nbytes >= _RATE_BYTES:
            found = nbytes / max(seconds, 1e-6)
            known = self._rate or found
            # The harmonic mean, which one fast body hardly changes.
            self._rate = 1 / (0.75 / known + 0.25 / found)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Read part of one object, without fetching the rest."""
        if not offset:
            return super().read_into(name, buffer, offset)
        view = buffer.cast("B")
        answer = self.probe(name)
        if answer is None:
            raise ObjectMissingError(
                errno.ENOENT, "reading failed: no such object", f"{self.url}/{name}"
            )
        assert isinstance(answer, int)
        data = self._fetch(name, offset, max(0, min(len(view), answer - offset)))
        view[: len(data)] = data
        return len(data)

    def _fetch(self, name: str, offset: int, length: int, etag: str | None = None) -> memoryview:
        if not length:
            return memoryview(b"")
        options: dict[str, Any] = {"range": (offset, offset + length)}
        if etag:
            options["if_match"] = etag
        try:
            return _body(self._store.get(name, options=options), 0, length)
        except Exception as exc:
            if "range" not in str(exc).lower():
                raise self._translate(exc, "reading", name) from exc
        # Some servers answer a range request with the whole object.
        try:
            whole = self._store.get(name, options={"if_match": etag} if etag else {})
            return _body(whole, offset, length)
        except Exception as exc:
            raise self._translate(exc, "reading", name) from exc

    # ------------------------------------------------------------------------------------ writes

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish with one PUT."""
        check_name(name)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        data: Any = views[0] if len(views) == 1 else b"".join(views)
        if mode == "create":
            return self._create(name, data)
        existed = self.probe(name)
        self._put(name, data, "overwrite")
        return WriteResult.CREATED if existed is None else WriteResult.REPLACED

    def _learn(self, name: str, data: Any) -> None:
        """Rewrite a small existing object: a store that honours If-None-Match rejects it."""
        if self._honours_condition is not None or len(data) > _SMALL_BYTES:
            return
        if not self._learning.acquire(blocking=False):
            return
        try:
            self._store.put(name, data, mode="create", use_multipart=False)
            self._honours_condition = False
        except Exception as exc:  # noqa: BLE001 - it stays unknown
            if type(exc).__name__ == "AlreadyExistsError" and "409" not in codes_of(str(exc)):
                self._honours_condition = True
        finally:
            self._learning.release()

    def _is_there(self, name: str, data: Any) -> bool:
        """Probe before a create; learn about the condition from an object with equal bytes."""
        existed = self.probe(name)
        if self._honours_condition is None and existed == len(data) <= _SMALL_BYTES:
            found = bytearray(len(data))
            with contextlib.suppress(StorageError):
                if self.read_into(name, memoryview(found)) == len(data) and found == data:
                    self._learn(name, data)
        return existed is not None

    def _create(self, name: str, data: Any) -> WriteResult:
        if not self._honours_condition and self._is_there(name, data):
            return WriteResult.EXISTED
        if not self._conditional:
            self._put(name, data, "overwrite")
            return WriteResult.CREATED
        for _ in range(_CONFLICTS):
            try:
                self._store.put(name, data, mode="create", use_multipart=False)
                self._learn(name, data)
                return WriteResult.CREATED
            except Exception as exc:
                kind, text = type(exc).__name__, str(exc)
                if kind == "AlreadyExistsError" and "409" not in codes_of(text):
                    return WriteResult.EXISTED
                if kind == "NotSupportedError" or codes_of(text) & {"501", "NotImplemented"}:
                    self._conditional = False
                    self._put(name, data, "overwrite")
                    return WriteResult.CREATED
                if kind != "AlreadyExistsError":
                    raise self._translate(exc, "writing", name, writing=True) from exc
            # 409: another writer is creating the same name. Either it succeeds, or we retry.
            if self.stat([name])[0] is not None:
                return WriteResult.EXISTED
        raise TransientStorageError(
            errno.EBUSY,
            "writing failed: other writers are creating the same object",
            f"{self.url}/{name}",
        )

    def _put(self, name: str, data: Any, mode: str) -> None:
        try:
            self._store.put(name, data, mode=mode, use_multipart=False)
        except Exception as exc:
            raise self._translate(exc, "writing", name, writing=True) from exc

    # ---------------------------------------------------------------------------------- listings

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream all objects below `prefix`, a thousand per request.

        Raises :class:`~kvshelf.errors.PermanentStorageError` if no rows arrive for a minute or
        rows are repeated: such a listing may have no end.
        """
        return self._rows(prefix, _is_listed)

    def entries(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream everything below `prefix`, a thousand per request; raises as :meth:`list`."""
        return self._rows(prefix, _is_name)

    def _rows(self, prefix: str, wanted: Callable[[str], bool]) -> Iterator[ObjectInfo]:
        folder = check_name(prefix) + "/" if prefix else ""
        stream = self._store.list(prefix or None, chunk_size=_ROWS)
        cycle = _Cycle()
        while rows := self._ask(lambda: _next(stream), _ROWS_SECONDS, "listing", prefix):
            for row in rows:
                name = str(row["path"])
                if cycle.closes(name):
                    raise PermanentStorageError(
                        errno.ELOOP,
                        "listing failed: the server lists the same objects again and again",
                        f"{self.url}/{prefix}" if prefix else self.url,
                    )
                inside = name[len(folder) :]
                if name.startswith(folder) and wanted(inside):
                    yield _object_info(name, row)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        if prefix:
            check_name(prefix)
        found = self._ask(
            lambda: self._store.list_with_delimiter_async(prefix or None),
            _FOLDERS_SECONDS,
            "listing",
            prefix,
        )
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])
        return sorted(name for name in names if name and name[0] != "." and name.isascii())

    # ------------------------------------------------------------------------------ other changes

    def delete(self, name: str) -> bool:
        """Remove one object."""
        if self.probe(name) is None:
            return False
        try:
            self._store.delete(name)
        except FileNotFoundError:
            return False
        except Exception as exc:
            raise self._translate(exc, "deleting", name, writing=True) from exc
        return True

    def quarantine(self, name: str, target: str) -> bool:
        """Delete the object: S3 can move only by copying."""
        check_name(target)
        return self.delete(name)

    def touch(self, name: str) -> Touched:
        """Do nothing: S3 has no access times."""
        check_name(name)
        return Touched.REFUSED

    def now(self) -> float | None:
        """Return the time at which the server answers a request."""
        try:
            return self._clock.now()
        except OSError as exc:
            raise storage_error(exc, "asking for the time", self.url) from exc

    def close(self) -> None:
        """Stop the event loop's thread."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


class S3fsBackend(GenericBackend):
    """Objects below ``s3://bucket/prefix``, through s3fs.

    Parameters
    ----------
    url : str
    storage_options : Mapping, optional
        Passed to s3fs, with default timeouts.

    Raises
    ------
    ConfigError, StorageError
        As :func:`open_s3`.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        options = dict(storage_options or {})
        self._bucket = urlsplit(url).netloc.rpartition("@")[2]
        self._endpoint = endpoint_of(options)
        options["config_kwargs"] = {
            "connect_timeout": CONNECT_SECONDS,
            "read_timeout": READ_SECONDS,
            # Loads verify objects by their own hashes. Checking the store's checksum as well would
            # turn a damaged object into a storage error, and such an object is never repaired.
            "response_checksum_validation": "when_required",
            **mapping_of(options, "config_kwargs"),
        }
        super().__init__(url, options)
        self._check()

    def _check(self) -> None:
        """Fail now if every later call would fail."""
        prefix = self._root.partition("/")[2]
        try:
            self._fs.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=prefix, MaxKeys=1)
        except Exception as exc:
            raise self._translate(exc, "opening the shelf", "") from exc

    def now(self) -> float | None:
        """Return the time at which the server answers a request."""
        prefix = self._root.partition("/")[2]
        try:
            answer = self._fs.call_s3(
                "list_objects_v2", Bucket=self._bucket, Prefix=prefix, MaxKeys=1
            )
        except Exception as exc:
            raise self._translate(exc, "asking for the time", "") from exc
        return time_of(answer["ResponseMetadata"]["HTTPHeaders"].get("date"))

    def _translate(
        self, exc: Exception, what: str, name: str, *, writing: bool = False
    ) -> StorageError:
        """Return the typed error for the store's answer, if there was one."""
        path = f"{self.url}/{name}" if name else self.url
        answer = getattr(exc.__cause__ or exc, "response", None)
        if not isinstance(answer, Mapping):
            if type(exc).__name__ == "NoCredentialsError":
                raise ConfigError(NO_CREDENTIALS) from exc
            error = super()._translate(exc, what, name, writing=writing)
            unreachable = isinstance(error, TransientStorageError) and "endpoint" in str(exc)
            if unreachable and not isinstance(error, ProcessLimitError):
                hint = unreachable_hint(self._endpoint)
                return TransientStorageError(errno.EIO, f"{what} failed: {hint}", path)
            return error
        said = answer.get("Error", {})
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        codes = {str(said.get("Code", "")), str(status)}
        text = self._clean(f"{said.get('Code', '')}: {said.get('Message', '')}")
        known = explain(codes, text, self._bucket, self._endpoint, writing=writing)
        if known is not None:
            make, number, hint = known
            return make(number, f"{what} failed: {text}; {hint}", path)
        if codes & RETRYABLE:
            return TransientStorageError(errno.EIO, f"{what} failed: {text}", path)
        return super()._translate(exc, what, name, writing=writing)


# --------------------------------------------------------------------------------------- helpers


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_drop_tasks())
    finally:
        loop.close()


async def _drop_tasks() -> None:
    """Cancel the tasks that are left when the backend is closed."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _placed(start: int, pieces: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Yield pieces that follow one another with the offset of each."""
    for piece in pieces:
        yield start, piece
        start += len(piece)


def _body(result: Any, skip: int, length: int) -> memoryview:
    """Return `length` bytes of a body behind `skip` others, fewer at its end; read no more."""
    data = memoryview(bytearray(length))
    done = 0
    for piece in result.stream(min_chunk_size=_STREAM_BYTES):
        view = memoryview(piece).cast("B")
        part = view[skip : skip + length - done]
        skip = max(0, skip - len(view))
        data[done : done + len(part)] = part
        done += len(part)
        if done == length:
            break
    return data[:done]


async def _next(stream: Any) -> Any:
    """Return the next rows of a listing, None at its end."""
    return await anext(stream, None)


class _Cycle:
    """Notices that a sequence of names repeats itself, by remembering one of them.

    The remembered name is replaced after 1, 2, 4, … names, so a cycle of any length is noticed
    after at most three times its length and what precedes it.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._left = self._power = 1

    def closes(self, name: str) -> bool:
        """Take the next name; return whether the sequence repeats itself."""
        if name == self._name:
            return True
        self._left -= 1
        if not self._left:
            self._name = name
            self._power *= 2
            self._left = self._power
        return False


def _is_listed(name: str) -> bool:
    return _is_name(name) and not any(part[0] == "." for part in name.split("/"))


def _is_name(name: str) -> bool:
    return name.isascii() and not any(part in ("", ".", "..") for part in name.split("/"))


def _object_info(name: str, row: Any) -> ObjectInfo:
    return ObjectInfo(name, int(row["size"]), row["last_modified"].timestamp())
