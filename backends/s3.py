"""Objects in a bucket of S3 or of a store that speaks its protocol, by the obstore library.

Owns the translation between S3 and the backend interface, and between the options that
users of s3fs know and those of obstore, and what a store's answers mean, whoever asks. Where
obstore is not installed, or an option is given that only s3fs knows, :func:`open_s3` opens the
bucket through s3fs instead (:class:`S3fsBackend`).

Contracts
---------
* One request for each probe (HEAD) and load (GET of the whole object, read as it arrives). Of a
  large object parts are asked for at once where one connection is seen to be slow and few
  requests are under way, unless the server does not know ranges. A publication is a PUT, with
  ``If-None-Match: *`` where nothing may be replaced. A store that ignores the condition would
  overwrite: whether it does is learned once, from a small object that is written a second time
  with the same bytes, and unless the store is known to heed it a HEAD goes before each PUT. A
  body that nobody reads to its end is dropped, not fetched.
* Stores that ignore ``If-None-Match`` may tell two writers CREATED. Equal names hold equal
  bytes, so the later one does no harm.
* obstore repeats what may pass (time-outs, 5xx, 429), with jitter, within a few seconds;
  what still fails is one typed error that says what to do.
* Neither ``url``, ``repr`` nor messages show keys, secrets or tokens.

Probes of many names, and parts of an object, are asked for at once on an event loop in a thread of
the backend's own, started with the first of them. Everything else runs on the caller's thread,
outside of the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from typing import Any, Final
from urllib.parse import urlsplit

from kvshelf.backends.base import (
    Backend,
    Buffer,
    Deadlines,
    ObjectInfo,
    Properties,
    Reader,
    StatResult,
    StatResults,
    WriteMode,
    WriteResult,
    check_name,
)
from kvshelf.backends.generic import GenericBackend
from kvshelf.backends.guard import THREAD_LIMIT, try_to_start

from kvshelf.errors import (
    ConfigError,
    NoSpaceStorageError,
    ObjectMissingError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.urls import shown_url

#: Options in s3fs's words that are understood here; any other one is for s3fs itself.
_OPTIONS: Final = frozenset(
    (
        "anon",
        "key",
        "secret",
        "token",
        "profile",
        "endpoint_url",
        "use_ssl",
        "requester_pays",
        "client_kwargs",
        "config_kwargs",
    )
)
_CLIENT_OPTIONS: Final = frozenset(("endpoint_url", "region_name", "verify"))
_CONFIG_OPTIONS: Final = frozenset(
    ("region_name", "connect_timeout", "read_timeout", "s3", "signature_version")
)
_PROBES_AT_ONCE: Final = 64
_CONNECT_SECONDS: Final = 3.0
_READ_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 3.0
_RETRIES: Final = 5
#: A body arrives in pieces of about this size.
_STREAM_BYTES: Final = 1 << 20
#: Objects so large may be fetched in parts of about that size, ...
_LARGE_BYTES: Final = 16 << 20
_PART_BYTES: Final = 8 << 20
#: ... where a connection delivers fewer bytes in a second than this. A near server delivers
#: more, and several requests for one object only cost it time.
_SLOW_RATE: Final = 150e6
#: Most requests for bodies at once that are made by cutting objects.
_BODIES_AT_ONCE: Final = 16
#: Fewer bytes say little of a connection's rate.
_RATE_BYTES: Final = 1 << 20
_CONFLICTS: Final = 4
#: What may be written twice to learn how the store takes that.
_SMALL_BYTES: Final = 64 << 10
_REFRESH: Final = timedelta(minutes=5)

_PART_ALIGNMENT: Final = 1 << 20
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_REGION: Final = re.compile(r"<Region>([\w-]+)</Region>|expecting '([\w-]+)'")
_BAD_KEYS: Final = frozenset(
    (
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "InvalidToken",
        "ExpiredToken",
        "TokenRefreshRequired",
        "AuthFailure",
        "InvalidSecurity",
    )
)
_OTHER_REGION: Final = frozenset(
    (
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "TemporaryRedirect",
    )
)
_FULL: Final = frozenset(
    ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageFull", "507")
)
_PASSING: Final = frozenset(
    (
        "SlowDown",
        "ServiceUnavailable",
        "InternalError",
        "RequestTimeout",
        "ThrottlingException",
        "OperationAborted",
        "408",
        "409",
        "429",
        "500",
        "502",
        "503",
        "504",
    )
)
_NO_CREDENTIALS: Final = (
    "no AWS credentials were found: set key and secret in storage_options, or AWS_ACCESS_KEY_ID"
    " and AWS_SECRET_ACCESS_KEY, a profile or a role; for a public bucket set anon: true"
)
_RIGHTS: Final = (
    "allow s3:ListBucket on the bucket, s3:GetObject and, for engines that store, s3:PutObject"
    " on its objects"
)


def open_s3(url: str, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """Open ``s3://bucket/prefix``.

    Parameters
    ----------
    url : str
    storage_options : Mapping, optional
        Those of s3fs, and ``client``: ``obstore``, ``s3fs`` or ``auto`` (obstore where it is
        installed and knows all options), ``checksum`` (bool: send a SHA-256 of each object, so
        that a store which checks refuses damaged uploads; True by default).

    Raises
    ------
    ConfigError
        If the options cannot be used, or there are no credentials.
    StorageError
        If the bucket cannot be used; says why.
    """
    options = dict(storage_options or {})
    client = options.pop("client", "auto")
    checksum = options.pop("checksum", True)
    if client not in ("auto", "obstore", "s3fs") or not isinstance(checksum, bool):
        raise ConfigError(
            "storage_options: client is auto, obstore or s3fs, and checksum is true or false"
        )
    unknown = _unknown_options(options)
    if client == "obstore" and unknown:
        raise ConfigError(
            f"storage_options: {', '.join(unknown)} can be used with client: s3fs only; obstore"
            f" takes {', '.join(sorted(_OPTIONS))}"
        )
    if client == "s3fs" or (client == "auto" and (unknown or not _installed("obstore"))):
        return S3fsBackend(url, options)
    return S3Backend(url, options, checksum=checksum)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _unknown_options(options: Mapping[str, Any]) -> list[str]:
    found = set(options) - _OPTIONS
    found |= {f"client_kwargs.{name}" for name in _mapping(options, "client_kwargs")} - {
        f"client_kwargs.{name}" for name in _CLIENT_OPTIONS
    }
    config = _mapping(options, "config_kwargs")
    found |= {f"config_kwargs.{name}" for name in set(config) - _CONFIG_OPTIONS}
    found |= {
        f"config_kwargs.s3.{name}" for name in set(_mapping(config, "s3")) - {"addressing_style"}
    }
    return sorted(found)


def _mapping(options: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = options.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"storage_options: {name} is {type(value).__name__}; expected a mapping")
    return value


class _StreamReader(Reader):
    """Hands on the body of one GET as it arrives."""

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
                    # The connection ended early: the caller finds too few bytes.
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
    """Hands on an object whose parts were asked for at once."""

    def __init__(
        self,
        backend: S3Backend,
        name: str,
        size: int,
        first: memoryview,
        later: Sequence[tuple[int, Future[tuple[int, memoryview]]]],
    ) -> None:
        self.size = size
        self._backend = backend
        self._name = name
        #: Parts that have come, and those that will, each with its first byte.
        self._part = (0, first)
        self._later = deque(later)
        self._bodies = 1 + len(later)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        view = buffer.cast("B")
        done = 0
        try:
            while done < len(view):
                start, data = self._part
                inside = offset + done - start
                if inside == len(data) and self._later:
                    start, part = self._later.popleft()
                    self._part = start, part.result()[1]
                    continue
                piece = data[inside : inside + len(view) - done] if inside >= 0 else data[:0]
                if not len(piece):
                    # The object's end, or a part that came short.
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
        self._part = 0, memoryview(b"")
        bodies, self._bodies = self._bodies, 0
        self._backend._note_bodies(-bodies)


class S3Backend(Backend):
    """Objects below ``s3://bucket/prefix``, by obstore.

    Parameters
    ----------
    url : str
    storage_options : Mapping, optional
        See :func:`open_s3`.
    checksum : bool
        Send a SHA-256 of each object.

    Raises
    ------
    ConfigError
        If the options cannot be used, or there are no credentials.
    StorageError
        If the bucket cannot be used; says why.
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
        self._endpoint = _endpoint(options)
        self._store = _make_store(self._bucket, prefix, options, self._endpoint, checksum)
        self._conditional = True
        self._knows_ranges = True
        #: Bytes that one connection delivers in a second, and bodies under way.
        self._rate = 0.0
        self._bodies = 0
        #: Whether the store heeds If-None-Match; None while that is not known.
        self._heeds: bool | None = None
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
            atomic_publish=True,
            # A store that ignores the condition does not say so.
            conditional_create=False,
            concurrency=_PROBES_AT_ONCE,
            probes_at_once=_PROBES_AT_ONCE,
            part_bytes=_LARGE_BYTES,
            probe_cost=10e-3,
            # Opening a connection, and obstore's own retries, take their time.
            deadlines=Deadlines(probe=5.0, read=15.0, write=15.0),
        )

    def _check(self) -> None:
        """Find out at the start what would fail at every call."""
        try:
            for _ in self._store.list(chunk_size=1):
                break
        except Exception as exc:
            raise self._translate(exc, "opening the shelf", "") from exc

    # ------------------------------------------------------------------------------------ errors

    def _translate(
        self, exc: Exception, what: str, name: str, *, writing: bool = False
    ) -> StorageError:
        """Typed error for what obstore raised."""
        path = f"{self.url}/{name}" if name else self.url
        text = str(exc).partition("\n\nDebug source")[0].strip() or type(exc).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        status = _STATUS.search(text)
        words = _statuses(text)
        kind = type(exc).__name__
        short = _shorten(text)

        def error(make: type[StorageError], number: int, hint: str = "") -> StorageError:
            return make(number, f"{what} failed: {short}{'; ' + hint if hint else ''}", path)

        if "NoSuchBucket" not in words and isinstance(exc, FileNotFoundError):
            return ObjectMissingError(errno.ENOENT, f"{what} failed: no such object", path)
        if status is not None and status[1] in ("301", "307"):
            words |= _OTHER_REGION
        if kind in ("PermissionDeniedError", "UnauthenticatedError"):
            words |= {"403"}
        known = _meaning(words, text, self._bucket, self._endpoint, writing=writing)
        if known is not None:
            return error(*known)
        if kind == "PreconditionError":
            return error(TransientStorageError, errno.ESTALE, "the object was replaced meanwhile")
        if words & _PASSING or status is None:
            # Without an answer: no connection, a time-out, a body that ended early.
            hint = "" if words else _unreachable(self._endpoint)
            return error(TransientStorageError, errno.EIO, hint)
        return error(PermanentStorageError, errno.EIO)

    # ------------------------------------------------------------------------------------ probes

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names at once, one HEAD for each."""
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
        except Exception as exc:  # noqa: BLE001 - an answer, not the end of all probes
            return exc

    async def _head_all(self, names: Sequence[str]) -> list[Any]:
        free = asyncio.Semaphore(_PROBES_AT_ONCE)

        async def head(name: str) -> Any:
            async with free:
                return await self._store.head_async(name)

        return await asyncio.gather(*map(head, names), return_exceptions=True)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the backend's own thread.

        Raises
        ------
        TransientStorageError
            If the thread cannot be started.
        """
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                # A daemon: a server that never answers must not keep the process alive.
                thread = threading.Thread(
                    target=_serve, args=(loop,), name="kvshelf-s3", daemon=True
                )
                if not try_to_start(thread):
                    loop.close()
                    raise TransientStorageError(
                        errno.EAGAIN,
                        f"not asked: no thread can be started, {THREAD_LIMIT}",
                        self.url,
                    )
                self._loop = loop
            return self._loop

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
        """Ask for one object; its body is fetched as it is read."""
        check_name(name)
        try:
            found = self._store.get(name)
        except Exception as exc:
            raise self._translate(exc, "opening", name) from exc
        self._note_bodies(1)
        return _StreamReader(self, name, found)

    def open_large(self, name: str, size: int) -> Reader:
        """Ask for parts of one object at once, where that is faster."""
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
                # Some servers answer with the whole object. So be it, from now on. Otherwise
                # it has another size than it should have, which its reader finds out.
                self._knows_ranges = "non-partial" not in str(exc)
                return self.open(name)
            raise self._translate(exc, "opening", name) from exc
        return _PartsReader(self, name, found, first, list(zip(starts, parts, strict=True))[1:])

    async def _get_part(self, name: str, start: int, end: int) -> tuple[int, memoryview]:
        """Return the size of an object, and some of its bytes."""
        found = await self._store.get_async(name, options={"range": (start, end)})
        begin = time.monotonic()
        data = memoryview(await found.buffer_async()).cast("B")
        self._note_rate(len(data), time.monotonic() - begin)
        return int(found.meta["size"]), data

    def _note_bodies(self, more: int) -> None:
        with self._lock:
            self._bodies += more

    def _note_rate(self, nbytes: int, seconds: float) -> None:
        """Learn what a connection delivers."""
        if nbytes >= _RATE_BYTES:
            found = nbytes / max(seconds, 1e-6)
            known = self._rate or found
            # The middle of rates that differ widely is that of the times.
            self._rate = 1 / (0.75 / known + 0.25 / found)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Read a part of one object, and only that."""
        if not offset:
            return super().read_into(name, buffer, offset)
        view = buffer.cast("B")
        answer = self.stat([name])[0]
        if isinstance(answer, StorageError):
            raise answer
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
            return memoryview(self._store.get(name, options=options).buffer()).cast("B")
        except Exception as exc:
            if "range" not in str(exc).lower():
                raise self._translate(exc, "reading", name) from exc
        # Some servers answer a range with the whole object.
        try:
            whole = self._store.get(name, options={"if_match": etag} if etag else {})
            return memoryview(whole.buffer()).cast("B")[offset : offset + length]
        except Exception as exc:
            raise self._translate(exc, "reading", name) from exc

    # ------------------------------------------------------------------------------------ writes

    def write(
        self, name: str, buffers: Sequence[Buffer], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish with one PUT."""
        check_name(name)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        data: Any = views[0] if len(views) == 1 else b"".join(views)
        if mode == "create":
            return self._create(name, data)
        existed = self.stat([name])[0]
        if isinstance(existed, StorageError):
            raise existed
        self._put(name, data, "overwrite")
        return WriteResult.CREATED if existed is None else WriteResult.REPLACED

    def _learn(self, name: str, data: Any) -> None:
        """Write once more what is there already, if small: who heeds the condition refuses."""
        if self._heeds is not None or len(data) > _SMALL_BYTES:
            return
        if not self._learning.acquire(blocking=False):
            return
        try:
            self._store.put(name, data, mode="create", use_multipart=False)
            self._heeds = False
        except Exception as exc:  # noqa: BLE001 - it is only not known then
            if type(exc).__name__ == "AlreadyExistsError" and "409" not in _statuses(str(exc)):
                self._heeds = True
        finally:
            self._learning.release()

    def _is_there(self, name: str, data: Any) -> bool:
        """Look before a create, and learn from an object that is what it should be."""
        existed = self.stat([name])[0]
        if isinstance(existed, StorageError):
            raise existed
        if self._heeds is None and existed == len(data) <= _SMALL_BYTES:
            found = bytearray(len(data))
            with contextlib.suppress(StorageError):
                if self.read_into(name, memoryview(found)) == len(data) and found == data:
                    self._learn(name, data)
        return existed is not None

    def _create(self, name: str, data: Any) -> WriteResult:
        if not self._heeds and self._is_there(name, data):
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
                if kind == "AlreadyExistsError" and "409" not in _statuses(text):
                    return WriteResult.EXISTED
                if kind == "NotSupportedError" or _statuses(text) & {"501", "NotImplemented"}:
                    self._conditional = False
                    self._put(name, data, "overwrite")
                    return WriteResult.CREATED
                if kind != "AlreadyExistsError":
                    raise self._translate(exc, "writing", name, writing=True) from exc
            # 409: another writer of the same name is at it. Either it wins, or we try again.
            if self.stat([name])[0] is not None:
                return WriteResult.EXISTED
        raise TransientStorageError(
            errno.EBUSY, "writing failed: others write the same object", f"{self.url}/{name}"
        )

    def _put(self, name: str, data: Any, mode: str) -> None:
        try:
            self._store.put(name, data, mode=mode, use_multipart=False)
        except Exception as exc:
            raise self._translate(exc, "writing", name, writing=True) from exc

    # ---------------------------------------------------------------------------------- listings

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream all objects below `prefix`, a thousand with each request."""
        folder = check_name(prefix) + "/" if prefix else ""
        try:
            for rows in self._store.list(prefix or None, chunk_size=1000):
                for row in rows:
                    name = str(row["path"])
                    inside = name[len(folder) :]
                    if name.startswith(folder) and _is_listed(inside):
                        yield _object_info(name, row)
        except Exception as exc:
            raise self._translate(exc, "listing", prefix) from exc

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        if prefix:
            check_name(prefix)
        try:
            found = self._store.list_with_delimiter(prefix or None)["common_prefixes"]
        except Exception as exc:
            raise self._translate(exc, "listing", prefix) from exc
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return sorted(name for name in names if name and name[0] != "." and name.isascii())

    # ------------------------------------------------------------------------------ other changes

    def delete(self, name: str) -> bool:
        """Remove one object."""
        answer = self.stat([name])[0]
        if isinstance(answer, StorageError):
            raise answer
        if answer is None:
            return False
        try:
            self._store.delete(name)
        except FileNotFoundError:
            return False
        except Exception as exc:
            raise self._translate(exc, "deleting", name, writing=True) from exc
        return True

    def set_aside(self, name: str, target: str) -> bool:
        """Delete the object: S3 moves only by copying."""
        check_name(target)
        return self.delete(name)

    def touch(self, name: str) -> None:
        """Do nothing: S3 has no access times."""
        check_name(name)

    def close(self) -> None:
        """Stop the thread for probes."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


class S3fsBackend(GenericBackend):
    """Objects below ``s3://bucket/prefix``, by s3fs.

    Parameters
    ----------
    url : str
    storage_options : Mapping, optional
        Passed to s3fs, with time-outs where there are none.

    Raises
    ------
    ConfigError
        If the options cannot be used.
    StorageError
        If the bucket cannot be used; says why.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        options = dict(storage_options or {})
        self._bucket = urlsplit(url).netloc.rpartition("@")[2]
        self._endpoint = _endpoint(options)
        options["config_kwargs"] = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            # Objects are verified by their own hashes. A store that kept the checksum of an
            # upload that was damaged on its way would make it an error, never to be repaired.
            "response_checksum_validation": "when_required",
            **_mapping(options, "config_kwargs"),
        }
        super().__init__(url, options)
        self._check()

    def _check(self) -> None:
        """Find out at the start what would fail at every call."""
        prefix = self._root.partition("/")[2]
        try:
            self._fs.call_s3("list_objects_v2", Bucket=self._bucket, Prefix=prefix, MaxKeys=1)
        except Exception as exc:
            raise self._translate(exc, "opening the shelf", "") from exc

    def _translate(
        self, exc: Exception, what: str, name: str, *, writing: bool = False
    ) -> StorageError:
        """Typed error by what the store answered, where it did."""
        path = f"{self.url}/{name}" if name else self.url
        answer = getattr(exc.__cause__ or exc, "response", None)
        if not isinstance(answer, Mapping):
            if type(exc).__name__ == "NoCredentialsError":
                raise ConfigError(_NO_CREDENTIALS) from exc
            error = super()._translate(exc, what, name, writing=writing)
            if isinstance(error, TransientStorageError) and "endpoint" in str(exc):
                hint = _unreachable(self._endpoint)
                return TransientStorageError(errno.EIO, f"{what} failed: {hint}", path)
            return error
        said = answer.get("Error", {})
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        words = {str(said.get("Code", "")), str(status)}
        text = self._clean(f"{said.get('Code', '')}: {said.get('Message', '')}")
        known = _meaning(words, text, self._bucket, self._endpoint, writing=writing)
        if known is not None:
            make, number, hint = known
            return make(number, f"{what} failed: {text}; {hint}", path)
        if words & _PASSING:
            return TransientStorageError(errno.EIO, f"{what} failed: {text}", path)
        return super()._translate(exc, what, name, writing=writing)


# --------------------------------------------------------------------------------------- helpers


def _meaning(
    words: set[str], text: str, bucket: str, endpoint: str | None, *, writing: bool
) -> tuple[type[StorageError], int, str] | None:
    """Say what an answer by a store means and what to do, where somebody has to do something.

    Parameters
    ----------
    words : set of str
        The answer's status and code.
    text : str
        What the store said.
    """
    if "NoSuchBucket" in words:
        at = f" at {endpoint}" if endpoint else ""
        return (
            PermanentStorageError,
            errno.ENOENT,
            f"there is no bucket {bucket!r}{at}: create it, or correct the URL",
        )
    if words & _OTHER_REGION:
        region = _REGION.search(text)
        found = f", {region[1] or region[2]}," if region is not None else ""
        return (
            PermanentStorageError,
            errno.EINVAL,
            f"the bucket is in another region{found}: set client_kwargs.region_name in"
            " storage_options, or AWS_REGION",
        )
    if words & _BAD_KEYS:
        return (
            PermanentStorageError,
            errno.EACCES,
            "the access key, its secret or its token is not accepted: correct key, secret and"
            " token in storage_options, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    if words & {"403", "401"}:
        refused = ReadOnlyStorageError if writing else PermanentStorageError
        return refused, errno.EACCES, _RIGHTS
    if words & _FULL:
        return NoSpaceStorageError, errno.ENOSPC, "free some space or raise the quota"
    return None


def _unreachable(endpoint: str | None) -> str:
    return f"is {endpoint or 'the endpoint of S3'} up and reachable?"


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_drop_tasks())
    finally:
        loop.close()


async def _drop_tasks() -> None:
    """End what nobody waits for any more."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _shorten(text: str) -> str:
    """Return what the server said, without the request and the XML around it."""
    code = _CODE.search(text)
    said = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if code is not None:
        return f"{code[1]}: {said[1].strip()}" if said is not None and said[1] else code[1]
    status = re.search(r"status code: (\d{3}[ \w]*)", text)
    if status is not None:
        return status[1].strip()
    return text.splitlines()[0][-300:]


def _statuses(text: str) -> set[str]:
    return {found[1] for found in (_CODE.search(text), _STATUS.search(text)) if found is not None}


def _is_listed(name: str) -> bool:
    return (
        bool(name)
        and name.isascii()
        and not any(part in ("", "..") or part[0] == "." for part in name.split("/"))
    )


def _object_info(name: str, row: Any) -> ObjectInfo:
    return ObjectInfo(name, int(row["size"]), row["last_modified"].timestamp())


def _endpoint(options: Mapping[str, Any]) -> str | None:
    found = (
        options.get("endpoint_url")
        or _mapping(options, "client_kwargs").get("endpoint_url")
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
    )
    if found is None:
        return None
    if urlsplit(str(found)).scheme not in ("http", "https"):
        raise ConfigError(f"storage_options: endpoint_url is {found!r}; expected http(s)://host")
    return str(found).rstrip("/")


def _make_store(
    bucket: str, prefix: str, options: Mapping[str, Any], endpoint: str | None, checksum: bool
) -> Any:
    try:
        from obstore.store import S3Store
    except ImportError as exc:
        raise ConfigError("s3:// needs obstore or s3fs: pip install 'kvshelf[s3]'") from exc

    client_kwargs = _mapping(options, "client_kwargs")
    config_kwargs = _mapping(options, "config_kwargs")
    config: dict[str, Any] = {}
    client: dict[str, Any] = {
        "connect_timeout": timedelta(
            seconds=float(config_kwargs.get("connect_timeout", _CONNECT_SECONDS))
        ),
        "read_timeout": timedelta(seconds=float(config_kwargs.get("read_timeout", _READ_SECONDS))),
        # Bodies are read as they arrive, as long as they do.
        "timeout": timedelta(hours=1),
    }
    if endpoint is not None:
        config["endpoint"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    style = _mapping(config_kwargs, "s3").get("addressing_style", "auto")
    if style not in ("auto", "path", "virtual"):
        raise ConfigError(
            f"storage_options: addressing_style is {style!r}; expected auto, path or virtual"
        )
    if style == "virtual":
        config["virtual_hosted_style_request"] = True
        if endpoint is not None:
            scheme, _, host = endpoint.partition("://")
            config["endpoint"] = f"{scheme}://{bucket}.{host}"
    verify = client_kwargs.get("verify", os.environ.get("AWS_CA_BUNDLE"))
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, (str, os.PathLike)):
        try:
            with open(verify, "rb") as file:
                client["root_certificate"] = file.read()
        except OSError as exc:
            raise ConfigError(
                f"the CA bundle {os.fspath(verify)} cannot be read ({exc.strerror}): correct"
                " client_kwargs.verify in storage_options, or AWS_CA_BUNDLE"
            ) from exc
    if checksum:
        config["checksum_algorithm"] = "SHA256"
    if options.get("requester_pays"):
        config["request_payer"] = True
    session = _botocore_session(options.get("profile"))
    config["region"] = (
        client_kwargs.get("region_name")
        or config_kwargs.get("region_name")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or (session.get_config_variable("region") if session is not None else None)
        or "us-east-1"
    )
    provider = None
    if options.get("anon") or config_kwargs.get("signature_version") == "unsigned":
        config["skip_signature"] = True
    elif options.get("key") or options.get("secret"):
        if not (options.get("key") and options.get("secret")):
            raise ConfigError("storage_options: key and secret belong together; found one of them")
        config["access_key_id"] = options["key"]
        config["secret_access_key"] = options["secret"]
        if options.get("token"):
            config["session_token"] = options["token"]
    elif session is not None:
        provider = _credentials(session)
    try:
        # Its options are typed dictionaries, ours are what users wrote.
        make: Any = S3Store
        return make(
            bucket,
            prefix=prefix or None,
            config=config,
            client_options=client,
            credential_provider=provider,
            retry_config={
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
        )
    except Exception as exc:
        raise ConfigError(f"s3://{bucket} cannot be opened: {_shorten(str(exc))}") from exc


def _botocore_session(profile: Any) -> Any:
    """Return botocore's session, which knows configuration files, roles and single sign-on."""
    if not _installed("botocore"):
        if profile:
            raise ConfigError("storage_options: profile needs botocore: pip install botocore")
        return None
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        session = Session(profile=profile)
        # Looks the profile up.
        session.get_scoped_config()
    except BotoCoreError as exc:
        raise ConfigError(f"AWS configuration: {exc}") from exc
    return session


def _credentials(session: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that gives credentials from botocore's usual chain, and renews them."""
    from botocore.exceptions import BotoCoreError

    try:
        found = session.get_credentials()
    except BotoCoreError as exc:
        # The chain ends at the network, where a role would be asked for.
        raise ConfigError(f"{_NO_CREDENTIALS} ({type(exc).__name__})") from exc
    if found is None:
        raise ConfigError(_NO_CREDENTIALS)

    def provide() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(timezone.utc) + _REFRESH,
        }

    return provide
