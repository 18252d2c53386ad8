"""Objects in a bucket of S3 or of an S3-compatible store.

Owns the translation between S3 and the backend interface. :mod:`kvshelf.backends.s3_requests` makes
the obstore client and runs the event loop, :mod:`kvshelf.backends.s3_errors` says what answers
mean. With the storage option ``client: s3fs`` a bucket is opened like any other fsspec filesystem.

Contracts
---------
* A probe is one HEAD request. Calls that ask for a name while it is probed share the answer, unless
  this backend has changed the object meanwhile.
* A load fetches all objects of a chunk at once, each by one GET. A large one is fetched as several
  ranges in parallel if one connection was measured to be slow, few requests are in flight and the
  server supports ranges.
* Objects are deleted a thousand by one request, where so many are.
* A publication is one PUT, with ``If-None-Match: *`` unless the object may be replaced. A store
  that ignores the condition would overwrite. Whether it heeds the condition is learned once, by
  writing a small object of one's own twice. Until the store is known to do so, a HEAD precedes each
  PUT.
* A store that ignores ``If-None-Match`` may answer CREATED to two writers. Equal names hold equal
  bytes, so the second write does no harm.
* The store records a use: it copies the object onto itself. No bytes pass through this process.
* The client retries timeouts, 5xx and 429 for a few seconds. A request that still fails becomes
  one typed error that says what to do.
* Of a body no more bytes are taken than the object had when it was probed, whatever the server
  sends.
* A server cannot keep a listing going for ever without rows, nor repeat itself for ever; see
  :meth:`S3Backend.list` and :meth:`S3Backend.folders`.
* Neither ``url``, ``repr`` nor messages show keys, secrets or tokens.

Probes, bodies and listings are awaited on the backend's event loop, all other requests on the
caller's thread, without the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from kvshelf.backends import s3_errors
from kvshelf.backends.base import (
    BEYOND_NAMES,
    Backend,
    BytesLike,
    Checked,
    Deadlines,
    DeleteResults,
    ObjectInfo,
    Properties,
    Reader,
    StatResult,
    StatResults,
    Touched,
    Whole,
    WholeReader,
    WriteMode,
    WriteResult,
    check_folder,
    check_name,
    delete_each,
    endless_listing,
    is_name,
    is_whole,
    probe,
    temporary_name,
)
from kvshelf.backends.s3_errors import shows
from kvshelf.backends.s3_requests import RequestLoop, limits_of, make_store
from kvshelf.backends.s3_settings import Settings, check_options, resolve
from kvshelf.errors import (
    ConfigError,
    ObjectMissingError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.urls import shown_url

logger = logging.getLogger(__name__)

PROBES_AT_ONCE: Final = 64
#: Most objects that one request removes.
DELETES_AT_ONCE: Final = 1000
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
_PART_ALIGNMENT: Final = 1 << 20
#: A probe that has been under way for longer may hang, and is not shared.
_SHARED_SECONDS: Final = 0.5
#: A body arrives in pieces of about this size.
_STREAM_BYTES: Final = 1 << 20
_CONFLICTS: Final = 4
#: Rows of a listing that arrive together, and seconds within which they must: empty pages of a
#: bucket with many delete markers are legitimate.
_ROWS: Final = 1000
_ROWS_SECONDS: Final = 60.0
#: Seconds for all folders in one place, and for the request that opens a shelf, beyond those for
#: which the client waits for one answer: whatever takes longer has had answers. The client collects
#: them in memory.
_MORE_SECONDS: Final = 1.0
#: The folder of what is written to learn what the store honours. Sweeps remove what a killed
#: process leaves there.
_RESERVED: Final = ".kvshelf"
_LESS_THAN_SLASH: Final = re.compile(r"[\0-.]")
#: An object that is older than this is younger after a copy, whatever clocks say.
_SURELY_OLD_SECONDS: Final = 60.0
#: Shorter keys and secrets are parts of many words, and no store's: they are not masked.
_SHORT_KEY: Final = 3


def open_s3(url: str, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """Open ``s3://bucket/prefix``.

    Parameters
    ----------
    url : str
    storage_options : Mapping, optional
        Those that :data:`kvshelf.backends.s3_settings.OPTIONS` lists, and ``client``: ``obstore``
        (the default) or ``s3fs``, which takes its other options as well, or ``checksum`` (bool:
        send a SHA-256 of each object, so that a store which checks it refuses damaged uploads;
        default True) and ``quirks`` (of :data:`kvshelf.backends.s3_errors.QUIRKS`), for obstore.

    Raises
    ------
    ConfigError
        If the options cannot be used, or there are no credentials.
    StorageError
        If the bucket cannot be used.
    """
    options = dict(storage_options or {})
    client = options.pop("client", "obstore")
    if client not in ("obstore", "s3fs") or not isinstance(options.get("checksum", True), bool):
        raise ConfigError(
            "storage_options: client is obstore or s3fs, and checksum is true or false"
        )
    parts = urlsplit(url)
    if not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{shown_url(url)} is not a bucket:"
            " expected s3://bucket/prefix; keys and endpoints go into storage_options"
        )
    for package in (client, "botocore"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{shown_url(url)} needs {package}: pip install {client} botocore")
    if client == "s3fs":
        from kvshelf.backends.s3_s3fs import open_with_s3fs

        return open_with_s3fs(url, options)
    check_options(options)
    return S3Backend(parts.netloc, parts.path.strip("/"), options, resolve(options))


class Rate:
    """How many bytes per second one connection delivers, as measured by large bodies."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether it is known, and so low that several connections deliver more."""
        return 0 < self.bytes_per_second < _SLOW_RATE

    def note(self, nbytes: int, seconds: float) -> None:
        """Take note of a body."""
        if nbytes >= _RATE_BYTES:
            measured = nbytes / max(seconds, 1e-6)
            rate = self.bytes_per_second or measured
            # The harmonic mean, which one fast body hardly changes.
            self.bytes_per_second = 1 / (0.75 / rate + 0.25 / measured)


class Put(Enum):
    """Result of a PUT. CONFLICT: another writer is creating the same name."""

    DONE = auto()
    EXISTS = auto()
    CONFLICT = auto()


class Span(NamedTuple):
    """What one request fetches: the bytes of an object from `begin` on, into `buffer`."""

    name: str
    size: int
    begin: int
    buffer: memoryview


class RangeError(Exception):
    """A request for a range was not answered with that range."""


#: What is wrong with one object, or with how it was asked for, and says nothing about the others.
_OF_ONE_OBJECT: Final = (FileNotFoundError, RangeError, ValueError)


class S3Backend(Backend):
    """Objects below a prefix of a bucket.

    Parameters
    ----------
    bucket, prefix : str
    options : Mapping
        See :func:`open_s3`.
    settings : Settings
        What these options mean.

    Attributes
    ----------
    rate : Rate

    Raises
    ------
    ConfigError
        If the options cannot be used.
    StorageError
        If the bucket cannot be used.
    """

    def __init__(
        self, bucket: str, prefix: str, options: Mapping[str, Any], settings: Settings
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.rate = Rate()
        self._bucket = bucket
        self._settings = settings
        keys = (str(options.get(name) or "") for name in ("key", "secret", "token"))
        self._secrets = [key for key in keys if len(key) > _SHORT_KEY]
        #: A request waits for an answer for so many seconds at most.
        self._answer_seconds = sum(limits_of(options))
        for quirk in options.get("quirks") or ():
            s3_errors.learn(settings.endpoint, bucket, quirk, math.inf)
        self._make_store = partial(make_store, bucket, prefix, options, settings)
        #: The quirks that the client was made for; None where it has to be made again.
        self._made_for: frozenset[str] | None = self.quirks
        self._made = self._make_store(self._made_for)
        self._requests = RequestLoop(self.url)
        #: Single flight: when each probe that is under way began, and its answer.
        self._flights: dict[str, tuple[float, asyncio.Future[ObjectInfo | BaseException]]] = {}
        self._knows_ranges = True
        #: Requests for bodies in flight.
        self._bodies = 0
        #: Whether the store heeds If-None-Match; None while that is unknown.
        self._heeds_create: bool | None = None
        #: Whether this user may copy objects; False once that was refused.
        self._may_renew = True
        #: Whether a copy was seen to change an object's time.
        self._renews = False
        #: Whether the answer to the last PUT named a version: the bucket keeps what is replaced.
        self._versions = False
        self._learning = threading.Lock()
        self._lock = threading.Lock()
        try:
            with self._errors("opening the shelf", "", seconds=self._listing_seconds):
                self._check()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"S3Backend({self.url!r})"

    @property
    def properties(self) -> Properties:
        """What callers may rely on."""
        return Properties(
            filesystem="s3",
            concurrency=PROBES_AT_ONCE,
            deletes_at_once=DELETES_AT_ONCE,
            probe_cost=10e-3,
            # Includes the time to open a connection and the client's own retries.
            deadlines=Deadlines(probe=5.0, read=15.0, write=15.0),
            renews=s3_errors.NO_SELF_COPY not in self.quirks,
            versions=self._versions,
        )

    # ------------------------------------------------------------------ the store and its answers

    @property
    def quirks(self) -> frozenset[str]:
        """What the store is known to lack."""
        return s3_errors.quirks_of(self._settings.endpoint, self._bucket)

    def _learn(self, quirk: str, seconds: float = s3_errors.LEARNED_SECONDS) -> None:
        """Do without what the store lacks, for some time."""
        if quirk not in self.quirks:
            logger.info("%s: %s: %s", self.url, quirk, s3_errors.QUIRKS[quirk])
            s3_errors.learn(self._settings.endpoint, self._bucket, quirk, seconds)

    @property
    def _store(self) -> Any:
        """The client of obstore, made again when other quirks are known."""
        quirks = self.quirks
        with self._lock:
            if quirks != self._made_for:
                self._made, self._made_for = self._make_store(quirks), quirks
            return self._made

    @property
    def _listing_seconds(self) -> float:
        return self._answer_seconds + _MORE_SECONDS

    @contextlib.contextmanager
    def _errors(
        self, what: str, *names: str, writing: bool = False, seconds: float = 0.0
    ) -> Iterator[None]:
        """Make errors of a request typed ones; `seconds` after which a listing is dropped.

        With `writing`, the request changes the objects `names`.
        """
        try:
            yield
        except BaseException as exc:
            error = self._error(exc, what, names[0], writing=writing, seconds=seconds)
            if error is exc:
                raise
            raise error from exc
        finally:
            for name in names if writing else ():
                # A probe that is under way may have been answered before the change.
                self._flights.pop(name, None)

    def _error(
        self,
        exc: BaseException,
        what: str,
        name: str,
        *,
        writing: bool = False,
        seconds: float = 0.0,
    ) -> StorageError:
        """Return the typed error for an exception of obstore; raise what is none."""
        if isinstance(exc, StorageError):
            return exc
        if not isinstance(exc, Exception) and not s3_errors.is_panic(exc):
            raise exc
        path = f"{self.url}/{name}" if name else self.url
        if seconds and isinstance(exc, TimeoutError):
            text = f"{what} failed: {endless_listing(seconds)}"
            return PermanentStorageError(errno.EOVERFLOW, text, path)
        text = str(exc)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        settings = self._settings
        if settings.keys is not None and s3_errors.refuses_keys(exc) and settings.keys.reread():
            with self._lock:
                # obstore keeps keys for minutes. A new client asks for them.
                self._made_for = None
        endpoint = None if settings.is_aws else shown_url(settings.endpoint)
        at = self._bucket, endpoint, settings.rows["keys"][1]
        return s3_errors.obstore_error(exc, text, what, path, at, writing=writing)

    def _adapting(self, call: Callable[[], object], *quirks: str) -> None:
        """Make a call; again for each of `quirks` that its refusal shows."""
        # A quirk that is known by now may have been learned while the call was made.
        remaining = list(quirks)
        while True:
            try:
                call()
                return
            except Exception as exc:
                shown = next((quirk for quirk in remaining if shows(exc, quirk)), None)
                if shown is None:
                    raise
                remaining.remove(shown)
                self._learn(shown)

    def _check(self) -> None:
        """Fail now if every later call would fail; TimeoutError after some seconds."""
        quirk = s3_errors.ENDPOINT_HAS_BUCKET
        begins = urlsplit(self._settings.endpoint).netloc.startswith(f"{self._bucket}.")
        try:
            next(self._pages("", 1, self._listing_seconds), None)
        except Exception as exc:
            if not begins or quirk in self.quirks or not shows(exc, quirk):
                raise
            # For good: with a path of the bucket every later request would be a miss.
            self._learn(quirk, math.inf)
            try:
                next(self._pages("", 1, self._listing_seconds), None)
            except Exception:  # noqa: BLE001 - the host is only called like the bucket
                s3_errors.learn(self._settings.endpoint, self._bucket, quirk, 0.0)
                raise exc from None

    # ------------------------------------------------------------------------------------ probes

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names in parallel, with one HEAD request each."""
        for name in names:
            check_name(name)
        try:
            answers = self._heads(names)
        except StorageError as error:
            return [error] * len(names)
        return [self._size(name, answer) for name, answer in zip(names, answers, strict=True)]

    def info(self, name: str) -> ObjectInfo | None:
        """Size and time of one object."""
        (answer,) = self._heads([check_name(name)])
        size = self._size(name, answer)
        if isinstance(size, StorageError):
            raise size
        return answer if isinstance(answer, ObjectInfo) else None

    def _size(self, name: str, answer: ObjectInfo | BaseException) -> StatResult:
        if isinstance(answer, ObjectInfo):
            return answer.size
        if isinstance(answer, FileNotFoundError):
            return None
        return self._error(answer, "probing", name)

    def _heads(self, names: Sequence[str]) -> Sequence[ObjectInfo | BaseException]:
        """Probe objects in parallel. A name that is being probed is not probed once more."""
        free = asyncio.Semaphore(PROBES_AT_ONCE)

        async def probe_once(name: str) -> ObjectInfo | BaseException:
            async with free:
                now = time.monotonic()
                began, flight = self._flights.get(name, (-math.inf, None))
                if flight is not None and now - began < _SHARED_SECONDS:
                    return await asyncio.shield(flight)
                flight = asyncio.get_running_loop().create_future()
                started = self._flights[name] = now, flight
                try:
                    answer: ObjectInfo | BaseException = await self._head(name)
                except BaseException as exc:  # noqa: BLE001 - a panic is an answer too
                    answer = exc
                if self._flights.get(name) is started:
                    del self._flights[name]
                flight.set_result(answer)
                return answer

        async def probe_all() -> Sequence[ObjectInfo | BaseException]:
            return await asyncio.gather(*map(probe_once, names))

        return self._requests.request(probe_all)

    async def _head(self, name: str) -> ObjectInfo:
        if s3_errors.NO_HEAD_LENGTH not in self.quirks:
            try:
                return _info(name, await self._store.head_async(name))
            except Exception as exc:
                if not shows(exc, s3_errors.NO_HEAD_LENGTH):
                    raise
                self._learn(s3_errors.NO_HEAD_LENGTH)
        try:
            body = await self._store.get_async(name, options={"range": (0, 1)})
        except FileNotFoundError:
            raise
        except Exception:  # noqa: BLE001 - an empty object has no first byte
            body = await self._store.get_async(name)
        return _info(name, body.meta)

    # ------------------------------------------------------------------------------------- reads

    def open(self, name: str) -> Reader:
        """Probe one object; the first read fetches it."""
        size = probe(self, name)
        if size is None:
            text = "opening failed: no such object"
            raise ObjectMissingError(errno.ENOENT, text, f"{self.url}/{name}")
        assert isinstance(size, int), "a bucket has nothing but objects"
        return WholeReader(size, lambda: self._fetch(name, size))

    def _fetch(self, name: str, size: int) -> BytesLike:
        """Return the bytes of an object of this size."""
        with self._errors("reading", name):
            body = self._store.get(name)
            if int(body.meta["size"]) == size:
                data: BytesLike = body.bytes()
                return data
        text = "reading failed: the object was replaced meanwhile"
        raise TransientStorageError(errno.ESTALE, text, f"{self.url}/{name}")

    @property
    def reads_whole(self) -> bool:
        """Always."""
        return True

    def read_whole(
        self,
        start: str,
        text: bytes,
        wholes: Sequence[Whole],
        buffers: Sequence[memoryview],
        seconds: float = math.inf,
    ) -> Checked | None:
        """Fetch all objects at once, a large one in ranges where connections are slow."""
        begin, spans = time.monotonic(), list[Span]()
        for expected, buffer in zip(wholes, buffers, strict=True):
            name, size = check_name(start + expected.end), expected.borders[-1]
            if buffer.readonly or not buffer.c_contiguous or buffer.nbytes != size:
                raise ValueError(f"expected a writable contiguous buffer of {size} bytes")
            step = self._step(size, len(wholes))
            spans += [Span(name, size, at, buffer[at : at + step]) for at in range(0, size, step)]
        self._note_bodies(len(spans))
        try:
            outcomes = self._fill(spans, seconds)
        except TimeoutError:
            return Checked([False] * len(wholes), time.monotonic() - begin, 0.0)
        finally:
            self._note_bodies(-len(spans))
        failed: dict[str, BaseException] = {}
        for span, outcome in zip(spans, outcomes, strict=True):
            if isinstance(outcome, float):
                self.rate.note(len(span.buffer), outcome)
            else:
                failed[span.name] = outcome
        errors = [error for error in failed.values() if not isinstance(error, _OF_ONE_OBJECT)]
        if len(errors) == len(wholes):
            with self._errors("reading", spans[0].name):
                raise errors[0]
        fetched = time.monotonic()
        are_read = [
            start + expected.end not in failed and is_whole(expected, text, buffer)
            for expected, buffer in zip(wholes, buffers, strict=True)
        ]
        return Checked(are_read, fetched - begin, time.monotonic() - fetched)

    def _step(self, size: int, objects: int) -> int:
        """Return how many bytes of an object one request fetches."""
        free = (_BODIES_AT_ONCE - self._bodies) // objects
        if size < _LARGE_BYTES or free < 2 or not (self._knows_ranges and self.rate.is_slow):
            return size
        step = -(-size // min(-(-size // _PART_BYTES), free))
        return step + -step % _PART_ALIGNMENT

    def _note_bodies(self, more: int) -> None:
        with self._lock:
            self._bodies += more

    def _fill(self, spans: Sequence[Span], seconds: float) -> Sequence[float | BaseException]:
        """Fetch spans in parallel; for each the seconds of its body, or why it did not come.

        TimeoutError after `seconds`. Nothing is written to a buffer after the call.
        """

        async def fill_all() -> Sequence[float | BaseException]:
            return await asyncio.gather(*map(self._fill_one, spans), return_exceptions=True)

        return self._requests.request(fill_all, None if math.isinf(seconds) else seconds)

    async def _fill_one(self, span: Span) -> float:
        end = span.begin + len(span.buffer)
        is_part = len(span.buffer) < span.size
        options: Any = {"range": (span.begin, end)} if is_part else {}
        try:
            body = await self._store.get_async(span.name, options=options)
        except Exception as exc:
            if is_part and "range" in str(exc).lower():
                # Answered with the whole object: the server knows no ranges.
                self._knows_ranges = "non-partial" not in str(exc)
                raise RangeError from exc
            raise
        begin, offset = time.monotonic(), 0
        if int(body.meta["size"]) != span.size:
            raise ValueError(f"it has {body.meta['size']} bytes")
        async for piece in body.stream(min_chunk_size=_STREAM_BYTES):
            view = memoryview(piece).cast("B")
            span.buffer[offset : offset + len(view)] = view
            offset += len(view)
        if offset != len(span.buffer):
            raise ValueError(f"{offset} bytes came")
        return time.monotonic() - begin

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
        existed = probe(self, name)
        self._put(name, data, create=False)
        return WriteResult.CREATED if existed is None else WriteResult.REPLACED

    def _create(self, name: str, data: Any) -> WriteResult:
        if not self._heeds_create and probe(self, name) is not None:
            return WriteResult.EXISTED
        for _ in range(_CONFLICTS):
            put = self._put(name, data, create=True)
            if put is Put.DONE:
                if self._heeds_create is None:
                    # Otherwise it stays unknown.
                    with contextlib.suppress(StorageError):
                        self._learn_conditions(name, data)
                return WriteResult.CREATED
            if put is Put.EXISTS:
                self._heeds_create = True
                return WriteResult.EXISTED
            # Another writer is creating the same name. Either it succeeds, or we retry.
            if probe(self, name) is not None:
                return WriteResult.EXISTED
        text = "writing failed: other writers are creating the same object"
        raise TransientStorageError(errno.EBUSY, text, f"{self.url}/{name}")

    def _learn_conditions(self, name: str, data: Any) -> None:
        """Learn whether the store heeds If-None-Match, by a small object of this client's own.

        It is its own since some stores take one write a second for each name. Where it could not be
        deleted again the client writes the object `name`, which has the bytes `data`, once more.
        """
        if not self._learning.acquire(blocking=False):
            return
        probe_name = f"{_RESERVED}/{temporary_name('condition')}"
        deletes = self._may_delete(probe_name)
        try:
            if deletes:
                name, data = probe_name, b"1"
                self._put(name, data, create=False)
            # A store that takes one write a second shows it later.
            self._heeds_create = self._put(name, data, create=True) is Put.EXISTS
        finally:
            if deletes:
                self._may_delete(probe_name)
            self._learning.release()

    def _may_delete(self, name: str) -> bool:
        """Remove an object, whether it is there or not; False where that is refused or fails."""
        with contextlib.suppress(StorageError):
            self._remove([name])
            return True
        return False

    def _put(self, name: str, data: Any, *, create: bool) -> Put:
        """Write an object; `create`: on the condition that there is none, if the store has such."""

        def write() -> None:
            has_condition = create and s3_errors.NO_CONDITIONS not in self.quirks
            mode = "create" if has_condition else "overwrite"
            result = self._store.put(name, data, mode=mode, use_multipart=False)
            self._versions = result["version"] not in (None, "null")

        conditions = [s3_errors.NO_CONDITIONS] if create else []
        with self._errors("writing", name, writing=True):
            try:
                self._adapting(write, *conditions, s3_errors.NO_CHECKSUMS)
            except Exception as exc:
                refused = _refused_put(exc) if create else None
                if refused is None:
                    raise
                return refused
        return Put.DONE

    # ---------------------------------------------------------------------------------- listings

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        start: str | None = None,
        end: str | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """Stream all objects below `prefix`, a thousand per request.

        Folders with neighbouring names are one range of keys, unless the store lists in any order.
        Raises :class:`~kvshelf.errors.PermanentStorageError` if no rows arrive for a minute or
        rows are repeated: such a listing may have no end.
        """
        is_listed = is_name if hidden else _is_listed
        folder = check_name(prefix) + "/" if prefix else ""
        first, last = start or "", end or BEYOND_NAMES
        for row in self._rows(prefix, folder + _just_before(first) if first else None):
            name = row.name[len(folder) :]
            if not row.name.startswith(folder):
                continue
            if (start or end) and not first <= (part := name.partition("/")[0]) <= last:
                # Before what is in a folder come those whose names go on with a lesser sign.
                behind = _LESS_THAN_SLASH.split(part, maxsplit=1)[0] > last
                if behind and s3_errors.UNSORTED_LISTINGS not in self.quirks:
                    return
                continue
            if is_listed(name) and not (flat and "/" in name):
                yield row

    def _rows(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        """Yield what the store lists; where the order is not that of names, each name once."""
        pages = self._pages(prefix, _ROWS, _ROWS_SECONDS, after)
        last = previous = ""
        object_names, markers = set[str](), set[str]()
        while True:
            with self._errors("listing", prefix, seconds=_ROWS_SECONDS):
                rows = next(pages, None)
            if rows is None:
                return
            # Empty ones may be markers of folders: without its slash a key has another place, where
            # an object may be.
            for row in rows:
                names = object_names if row.size else markers
                if row.name <= (last if row.size else previous) or (row.size and object_names):
                    if row.name in names:
                        raise PermanentStorageError(
                            errno.ELOOP,
                            "listing failed: the server lists the same objects again and again",
                            f"{self.url}/{prefix}" if prefix else self.url,
                        )
                    names.add(row.name)
                    if row.size:
                        self._learn(s3_errors.UNSORTED_LISTINGS)
                last = row.name if row.size else last
                previous = row.name
            # Only now: the end of a range shows where the order is that of names.
            yield from rows

    def _pages(
        self, prefix: str, count: int, seconds: float, after: str | None = None
    ) -> Iterator[Sequence[ObjectInfo]]:
        """List objects behind `after`, `count` at once; TimeoutError if the next take `seconds`."""
        stream = self._store.list(prefix or None, offset=after, chunk_size=count)

        async def following() -> Sequence[ObjectInfo]:
            rows = await anext(stream, None)
            return [_info(str(row["path"]), row) for row in rows or ()]

        while rows := self._requests.request(following, seconds):
            yield rows

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        check_folder(prefix)

        async def list_folders() -> Sequence[str]:
            answer = await self._store.list_with_delimiter_async(prefix or None)
            return [str(path).rstrip("/").rpartition("/")[2] for path in answer["common_prefixes"]]

        seconds = self._listing_seconds
        with self._errors("listing", prefix, seconds=seconds):
            names = self._requests.request(list_folders, seconds)
        return sorted(filter(_is_listed, names))

    # ------------------------------------------------------------------------------ other changes

    def delete(self, names: Sequence[str]) -> DeleteResults:
        """Remove objects, a thousand by one request, which does not say which were there."""
        if len(names) == 1:
            return delete_each(names, self._delete)
        for name in names:
            check_name(name)
        answers: DeleteResults = []
        for begin in range(0, len(names), DELETES_AT_ONCE):
            some = names[begin : begin + DELETES_AT_ONCE]
            try:
                self._remove(some)
                answers += [True] * len(some)
            except StorageError as error:
                if error.retryable:
                    return answers + [error] * (len(names) - len(answers))
                # Which of them stay is known one by one.
                answers += delete_each(some, self._delete)
        return answers

    def _delete(self, name: str) -> bool:
        if probe(self, name) is None:
            return False
        try:
            self._remove([name])
        except ObjectMissingError:
            return False
        return True

    def _remove(self, names: Sequence[str]) -> None:
        """Remove objects by one request, whether they are there or not; raise if one stays."""
        with self._errors("deleting", *names, writing=True):
            self._adapting(lambda: self._store.delete(list(names)), s3_errors.NO_DELETE_OBJECTS)

    def touch(self, name: str, before: float = math.inf) -> Touched:
        """Have the store copy the object onto itself if it was last changed before `before`.

        An object that is deleted or replaced meanwhile is not brought back.
        """
        check_name(name)
        if self._may_renew and s3_errors.NO_SELF_COPY not in self.quirks:
            try:
                self._renew(name, before)
            except ObjectMissingError:
                return Touched.TOUCHED
            except ReadOnlyStorageError:
                self._may_renew = False
        refused = not self._may_renew or s3_errors.NO_SELF_COPY in self.quirks
        return Touched.REFUSED if refused else Touched.TOUCHED

    def _renew(self, name: str, before: float) -> None:
        info = self.info(name)
        if info is None or info.mtime >= before:
            return
        is_copied = True
        with self._errors("recording a use", name, writing=True):
            try:
                # Of such a copy alone obstore sends the header that `make_store` names. The copy
                # does replace: the header is no condition.
                self._store.copy(name, name, overwrite=False)
            except Exception as exc:
                is_copied = False
                if shows(exc, s3_errors.NO_SELF_COPY):
                    self._learn(s3_errors.NO_SELF_COPY)
                # Another client may be writing it, and records the use.
                elif _refused_put(exc) is None:
                    raise
        # Some stores say that they copy and do nothing. Times are whole seconds.
        if is_copied and not self._renews and time.time() - info.mtime > _SURELY_OLD_SECONDS:
            after = self.info(name)
            self._renews = after is not None and after.mtime > info.mtime
            if after is not None and not self._renews:
                self._learn(s3_errors.NO_SELF_COPY)

    def close(self) -> None:
        """Stop the event loop. Idempotent."""
        self._flights.clear()
        self._requests.close()


def _refused_put(exc: Exception) -> Put | None:
    """Return what the answer to a conditional PUT means; None for an error."""
    codes = s3_errors.codes_of(exc)
    # 429: some stores take one write a second for each name.
    if codes & {"409", "429"}:
        return Put.CONFLICT
    return Put.EXISTS if codes & s3_errors.ALREADY_THERE else None


def _info(name: str, row: Any) -> ObjectInfo:
    size = int(row["size"])
    return ObjectInfo(name, size, row["last_modified"].timestamp(), held=size)


def _just_before(first: str) -> str:
    """Return a key behind which a listing begins that has the folder `first`, and few before it.

    SeaweedFS leaves out a folder whose name is that key.
    """
    character = chr(ord(first[-1]) - 1)
    # A slash would make it the key of a folder.
    return f"{first[:-1]}{'.' if character == '/' else character}~"


def _is_listed(name: str) -> bool:
    return is_name(name) and not any(part[0] == "." for part in name.split("/"))
