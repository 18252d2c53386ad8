"""Objects in a bucket of S3 or of an S3-compatible store.

Owns the translation between S3 and the backend interface. The requests are made through obstore
(:mod:`kvshelf.backends.s3_client`). :mod:`kvshelf.backends.s3_errors` says what answers mean. With
the storage option ``client: s3fs`` a bucket is opened like any other fsspec filesystem.

Contracts
---------
* A probe is one HEAD request. A load fetches all objects of a chunk at once, each by one GET. A
  large one is fetched as several ranges in parallel if one connection was measured to be slow, few
  requests are in flight and the server supports ranges.
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
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from kvshelf.backends import s3_quirks
from kvshelf.backends.base import (
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
from kvshelf.backends.s3_client import (
    DELETES_AT_ONCE,
    PROBES_AT_ONCE,
    Client,
    Put,
    RangeError,
    Span,
)
from kvshelf.backends.s3_errors import is_panic
from kvshelf.backends.s3_settings import check_options, resolve
from kvshelf.errors import (
    ConfigError,
    ObjectMissingError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.urls import shown_url

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
#: Seconds for all folders in one place, and for the request that opens a shelf, beyond those for
#: which the client waits for one answer: whatever takes longer has had answers. The client collects
#: them in memory.
_MORE_SECONDS: Final = 1.0

_PART_ALIGNMENT: Final = 1 << 20
#: The folder of what is written to learn what the store honours. Visits remove what a killed
#: process leaves there.
_RESERVED: Final = ".kvshelf"
_LESS_THAN_SLASH: Final = re.compile(r"[\0-.]")
#: An object that is older than this is younger after a copy, whatever clocks say.
_SURELY_OLD_SECONDS: Final = 60.0
#: What is wrong with one object, or with how it was asked for, and says nothing about the others.
_OF_ONE_OBJECT: Final = (FileNotFoundError, RangeError, ValueError)


def open_s3(url: str, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """Open ``s3://bucket/prefix``.

    Parameters
    ----------
    url : str
    storage_options : Mapping, optional
        Those that :data:`kvshelf.backends.s3_settings.OPTIONS` lists, and ``client``: ``obstore``
        (the default) or ``s3fs``, which takes its other options as well, or ``checksum`` (bool:
        send a SHA-256 of each object, so that a store which checks it refuses damaged uploads;
        default True) and ``quirks`` (of :data:`kvshelf.backends.s3_quirks.QUIRKS`), for obstore.

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
    bucket, prefix = _place(url)
    for package in (client, "botocore"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{shown_url(url)} needs {package}: pip install {client} botocore")
    if client == "s3fs":
        from kvshelf.backends.s3_s3fs import open_with_s3fs

        return open_with_s3fs(url, options)
    check_options(options)
    shown = f"s3://{bucket}/{prefix}".rstrip("/")
    return S3Backend(shown, Client(bucket, prefix, options, resolve(options)))


def _place(url: str) -> tuple[str, str]:
    """Return bucket and prefix of a URL."""
    parts = urlsplit(url)
    if not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{shown_url(url)} is not a bucket:"
            " expected s3://bucket/prefix; keys and endpoints go into storage_options"
        )
    return parts.netloc, parts.path.strip("/")


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
            found = nbytes / max(seconds, 1e-6)
            known = self.bytes_per_second or found
            # The harmonic mean, which one fast body hardly changes.
            self.bytes_per_second = 1 / (0.75 / known + 0.25 / found)


class S3Backend(Backend):
    """Objects below a prefix of a bucket.

    Parameters
    ----------
    url : str
        ``s3://bucket/prefix``.
    client : Client
        Closed together with the backend.

    Attributes
    ----------
    client : Client
    rate : Rate

    Raises
    ------
    StorageError
        If the bucket cannot be used.
    """

    def __init__(self, url: str, client: Client) -> None:
        self.url = url
        self.client = client
        self.rate = Rate()
        self._knows_ranges = True
        #: Requests for bodies in flight.
        self._bodies = 0
        #: Whether the store heeds If-None-Match; None while that is unknown.
        self._heeds_create: bool | None = None
        #: Whether this user may copy objects; False once that was refused.
        self._may_renew = True
        #: Whether a copy was seen to change an object's time.
        self._renews = False
        self._learning = threading.Lock()
        self._lock = threading.Lock()
        try:
            seconds = client.answer_seconds + _MORE_SECONDS
            with self._errors("opening the shelf", "", seconds=seconds):
                self.client.check(seconds)
        except BaseException:
            client.close()
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
            renews=s3_quirks.NO_SELF_COPY not in self.client.quirks,
            versions=self.client.versions,
        )

    # ------------------------------------------------------------------------------------ errors

    @contextlib.contextmanager
    def _errors(
        self, what: str, name: str, *, writing: bool = False, seconds: float = 0.0
    ) -> Iterator[None]:
        """Make errors of the client typed ones; `seconds` after which a listing is dropped."""
        try:
            yield
        except StorageError:
            raise
        except BaseException as exc:
            if not isinstance(exc, Exception) and not is_panic(exc):
                raise
            if seconds and isinstance(exc, TimeoutError):
                path = f"{self.url}/{name}" if name else self.url
                text = f"{what} failed: {endless_listing(seconds)}"
                raise PermanentStorageError(errno.EOVERFLOW, text, path) from exc
            raise self.client.error(exc, what, name, writing=writing) from exc

    # ------------------------------------------------------------------------------------ probes

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names in parallel, with one HEAD request each."""
        for name in names:
            check_name(name)
        try:
            found = self.client.heads(names)
        except StorageError as error:
            return [error] * len(names)
        return [self._answer(name, result) for name, result in zip(names, found, strict=True)]

    def _answer(self, name: str, found: ObjectInfo | BaseException) -> StatResult:
        if isinstance(found, FileNotFoundError):
            return None
        if isinstance(found, BaseException):
            if not isinstance(found, Exception) and not is_panic(found):
                raise found
            return self.client.error(found, "probing", name)
        return found.size

    def info(self, name: str) -> ObjectInfo | None:
        """Size and time of one object."""
        (found,) = self.client.heads([check_name(name)])
        answer = self._answer(name, found)
        if isinstance(answer, StorageError):
            raise answer
        return found if isinstance(found, ObjectInfo) else None

    # ------------------------------------------------------------------------------------- reads

    def open(self, name: str) -> Reader:
        """Probe one object; the first read fetches it."""
        size = probe(self, name)
        if size is None:
            text = "opening failed: no such object"
            raise ObjectMissingError(errno.ENOENT, text, f"{self.url}/{name}")
        assert isinstance(size, int), "a bucket has nothing but objects"
        return WholeReader(size, lambda: self._fetch(name, size))

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
        begin, spans = time.monotonic(), []
        owners: list[int] = []
        for number, (whole, buffer) in enumerate(zip(wholes, buffers, strict=True)):
            name, size = check_name(start + whole.end), whole.borders[-1]
            if buffer.readonly or not buffer.c_contiguous or buffer.nbytes != size:
                raise ValueError(f"expected a writable contiguous buffer of {size} bytes")
            step = self._step(size, len(wholes))
            found = [Span(name, size, at, buffer[at : at + step]) for at in range(0, size, step)]
            spans += found
            owners += [number] * len(found)
        self._note_bodies(len(spans))
        try:
            outcomes = self.client.fill(spans, seconds)
        except TimeoutError:
            return Checked([False] * len(wholes), time.monotonic() - begin, 0.0)
        finally:
            self._note_bodies(-len(spans))
        failed: dict[int, BaseException] = {}
        for owner, span, outcome in zip(owners, spans, outcomes, strict=True):
            if isinstance(outcome, float):
                self.rate.note(len(span.buffer), outcome)
                continue
            failed[owner] = outcome
            if isinstance(outcome, RangeError):
                self._knows_ranges = not outcome.whole
        told = [one for one in failed.values() if not isinstance(one, _OF_ONE_OBJECT)]
        if len(told) == len(wholes):
            with self._errors("reading", spans[0].name):
                raise told[0]
        fetched = time.monotonic()
        pairs = enumerate(zip(wholes, buffers, strict=True))
        done = [i not in failed and is_whole(whole, text, buffer) for i, (whole, buffer) in pairs]
        return Checked(done, fetched - begin, time.monotonic() - fetched)

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

    def _fetch(self, name: str, size: int) -> BytesLike:
        """Return the bytes of an object of this size."""
        with self._errors("reading", name):
            found: BytesLike | None = self.client.get(name, size)
        if found is None:
            text = "reading failed: the object was replaced meanwhile"
            raise TransientStorageError(errno.ESTALE, text, f"{self.url}/{name}")
        return found

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

    def _learn(self, name: str, data: Any) -> None:
        """Learn whether the store heeds If-None-Match, by a small object of this client's own.

        It is its own since some stores take one write a second for each name. Where it could not be
        deleted again the client writes the object `name`, which has the bytes `data`, once more.
        """
        if not self._learning.acquire(blocking=False):
            return
        own = f"{_RESERVED}/{temporary_name('condition')}"
        deletes = self._may_delete(own)
        try:
            if deletes:
                name, data = own, b"1"
                self._put(name, data, create=False)
            # A store that takes one write a second shows it later.
            self._heeds_create = self._put(name, data, create=True) is Put.EXISTS
        finally:
            if deletes:
                self._may_delete(own)
            self._learning.release()

    def _may_delete(self, name: str) -> bool:
        """Remove an object, whether it is there or not; False where that is refused or fails."""
        with contextlib.suppress(StorageError), self._errors("deleting", name, writing=True):
            self.client.delete([name])
            return True
        return False

    def _create(self, name: str, data: Any) -> WriteResult:
        if not self._heeds_create and probe(self, name) is not None:
            return WriteResult.EXISTED
        for _ in range(_CONFLICTS):
            put = self._put(name, data, create=True)
            if put is Put.DONE:
                if self._heeds_create is None:
                    # Otherwise it stays unknown.
                    with contextlib.suppress(StorageError):
                        self._learn(name, data)
                return WriteResult.CREATED
            if put is Put.EXISTS:
                self._heeds_create = True
                return WriteResult.EXISTED
            # Another writer is creating the same name. Either it succeeds, or we retry.
            if probe(self, name) is not None:
                return WriteResult.EXISTED
        raise TransientStorageError(
            errno.EBUSY,
            "writing failed: other writers are creating the same object",
            f"{self.url}/{name}",
        )

    def _put(self, name: str, data: Any, *, create: bool) -> Put:
        with self._errors("writing", name, writing=True):
            return self.client.put(name, data, create=create)

    # ---------------------------------------------------------------------------------- listings

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        between: tuple[str, str] | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """Stream all objects below `prefix`, a thousand per request.

        Folders with neighbouring names are one range of keys, unless the store lists in any order.
        Raises :class:`~kvshelf.errors.PermanentStorageError` if no rows arrive for a minute or
        rows are repeated: such a listing may have no end.
        """
        is_listed = is_name if hidden else _is_listed
        folder = check_name(prefix) + "/" if prefix else ""
        for row in self._rows(prefix, folder + _just_before(between[0]) if between else None):
            name = row.name[len(folder) :]
            if not row.name.startswith(folder):
                continue
            if between is not None:
                part = name.partition("/")[0]
                if not between[0] <= part <= between[1]:
                    # Before what is in a folder come those whose names go on with a lesser sign.
                    behind = _LESS_THAN_SLASH.split(part, maxsplit=1)[0] > between[1]
                    if behind and s3_quirks.ANY_ORDER not in self.client.quirks:
                        return
                    continue
            if is_listed(name) and not (flat and "/" in name):
                yield row

    def _rows(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        """Yield what the store lists; where the order is not that of names, each name once."""
        pages = self.client.rows(prefix, _ROWS, _ROWS_SECONDS, after)
        last = previous = ""
        seen, markers = set[str](), set[str]()
        while True:
            with self._errors("listing", prefix, seconds=_ROWS_SECONDS):
                rows = next(pages, None)
            if rows is None:
                return
            # Empty ones may be markers of folders: without its slash a key has another place, where
            # an object may be.
            for row in rows:
                names = seen if row.size else markers
                if row.name <= (last if row.size else previous) or (row.size and seen):
                    if row.name in names:
                        raise PermanentStorageError(
                            errno.ELOOP,
                            "listing failed: the server lists the same objects again and again",
                            f"{self.url}/{prefix}" if prefix else self.url,
                        )
                    names.add(row.name)
                    if row.size:
                        self.client.learn(s3_quirks.ANY_ORDER)
                last = row.name if row.size else last
                previous = row.name
            # Only now: the end of a range shows where the order is that of names.
            yield from rows

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        check_folder(prefix)
        seconds = self.client.answer_seconds + _MORE_SECONDS
        with self._errors("listing", prefix, seconds=seconds):
            names = self.client.folders(prefix, seconds)
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
                with self._errors("deleting", some[0], writing=True):
                    self.client.delete(some)
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
            with self._errors("deleting", name, writing=True):
                self.client.delete([name])
        except ObjectMissingError:
            return False
        return True

    def touch(self, name: str, before: float = math.inf) -> Touched:
        """Have the store copy the object onto itself if it was last changed before `before`.

        An object that is deleted or replaced meanwhile is not brought back.
        """
        check_name(name)
        if self._may_renew and s3_quirks.NO_SELF_COPY not in self.client.quirks:
            try:
                self._renew(name, before)
            except ObjectMissingError:
                return Touched.TOUCHED
            except ReadOnlyStorageError:
                self._may_renew = False
        refused = not self._may_renew or s3_quirks.NO_SELF_COPY in self.client.quirks
        return Touched.REFUSED if refused else Touched.TOUCHED

    def _renew(self, name: str, before: float) -> None:
        info = self.info(name)
        if info is None or info.mtime >= before:
            return
        with self._errors("recording a use", name, writing=True):
            is_copied = self.client.renew(name)
        # Some stores say that they copy and do nothing. Times are whole seconds.
        if is_copied and not self._renews and time.time() - info.mtime > _SURELY_OLD_SECONDS:
            after = self.info(name)
            self._renews = after is not None and after.mtime > info.mtime
            if after is not None and not self._renews:
                self.client.learn(s3_quirks.NO_SELF_COPY)

    def close(self) -> None:
        """Close the client."""
        self.client.close()


def _just_before(first: str) -> str:
    """Return a key behind which a listing begins that has the folder `first`, and few before it.

    SeaweedFS leaves out a folder whose name is that key.
    """
    before = chr(ord(first[-1]) - 1)
    # A slash would make it the key of a folder.
    return f"{first[:-1]}{'.' if before == '/' else before}~"


def _is_listed(name: str) -> bool:
    return is_name(name) and not any(part[0] == "." for part in name.split("/"))
