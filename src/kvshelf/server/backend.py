"""The storage of an engine is its node server: a backend, and a shelf over it.

Owns what an engine asks of the server and how: objects are borrowed where they lie in the server's
memory, and stored from the client's own segment, to which they are copied if they were not made
there; everything else is a call of the server's storage. The connection is
:mod:`kvshelf.server.channel`. Above :class:`ServedShelf` everything is as on any other shelf:
deadlines, circuit breakers, lookups, waits, verification.

Two questions look alike and are not. :meth:`ServedBackend.stat` asks the storage, because a store
must know what is there. Lookups ask for what can be loaded, from memory or from the storage
(:meth:`ServedBackend.find`). So an object that was deleted from the storage is found until it is
gone from the server's memory as well, as with any tier.

Contracts
---------
* While the server is gone, every call fails at once with UnavailableStorageError, so that the
  circuit breaker opens. When the connection is back, the namespaces are registered anew and the
  breakers try sooner.
* A server that hangs is noticed by the deadlines of :mod:`kvshelf.backends.guard`; the call returns
  when the server answers or its connection ends.
* What was expected and is not borrowed is given back after :data:`EXPECTED_SECONDS`, or half the
  time of a lease if that is less.

Threads
-------
Any thread may call anything. :meth:`ServedBackend.expect` and :meth:`ServedShelf.view` do not
block. The thread `kvshelf-expected` gives back what nobody has borrowed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from kvshelf.backends.base import (
    NOT_REGULAR,
    Backend,
    BytesLike,
    Deadlines,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResult,
    StatResults,
    Touched,
    WriteMode,
    WriteResult,
    check_name,
)
from kvshelf.backends.notices import Notices
from kvshelf.backends.wrappers import ReadOnlyBackend
from kvshelf.errors import (
    NoSpaceStorageError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnavailableStorageError,
)
from kvshelf.format.names import parse_path
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import copy_bytes
from kvshelf.metrics import Counters
from kvshelf.server import messages
from kvshelf.server.channel import Channel, Leased
from kvshelf.server.segment import Room, Segment
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import NamespaceView

if TYPE_CHECKING:
    import torch

_Reply = TypeVar("_Reply", bound=messages.Message)

#: Seconds for which what was expected is kept for whoever borrows it.
EXPECTED_SECONDS: Final = 10.0
#: Part of the server's arena that one client's expectations may take; a server has many clients.
_EXPECTED_SHARE: Final = 1 / 8
#: Most objects that one message asks for ahead. An engine's step thread sends the first.
_ASKED_AT_ONCE: Final = 32
#: Seconds for one message to the server and its answer. A probe of many names takes little longer.
_MESSAGE_SECONDS: Final = 150e-6
_NAMES_AT_ONCE: Final = 256
#: Threads of a client where the server's storage is near.
_NEAR_CONCURRENCY: Final = 2
#: Seconds by which deadlines of a client are later than those of the server.
_LATER: Final = 1.0
#: How long the first connection may take.
CONNECT_SECONDS: Final = 3.0
#: Default size of a client's segment.
SEGMENT_BYTES: Final = 256 << 20
#: The leases of this client are ended one by one.
_SESSION: Final = ""


class ServedBackend(Backend):
    """A storage that a node server calls.

    Parameters
    ----------
    channel : Channel
        Has been connected once; closed together with the backend.
    lends : bool
        Lend objects in place. Otherwise they are copied from the server's memory, unless that is
        page-locked (:meth:`Channel.page_lock`): then a GPU copies from it.
    """

    def __init__(self, channel: Channel, *, lends: bool = True) -> None:
        assert channel.welcome is not None
        self.url = channel.url
        self._channel = channel
        self._welcome = channel.welcome
        self._lends = lends
        self._records: list[bytes] = []
        self._notices: ServedNotices | None = None
        #: Notified when room in the segment is given back.
        self._freed = threading.Condition()
        self._wake = threading.Condition()
        self._closed = False
        #: What is expected and not asked for yet: the bytes, and until when that is of use.
        self._later: OrderedDict[str, tuple[int, float]] = OrderedDict()
        #: Objects that were asked for ahead: the answer, the bytes, when they are given back.
        self._expected: OrderedDict[str, tuple[Future[Leased], int, float]] = OrderedDict()
        self._expected_bytes = 0
        self._thread = threading.Thread(
            target=self._give_back_unused, name="kvshelf-expected", daemon=True
        )
        self._thread.start()
        channel.on_notice(self._noticed)
        channel.on_connect(self._connected)

    def __repr__(self) -> str:
        return f"ServedBackend({self.url!r})"

    @property
    def properties(self) -> Properties:
        """Those of the server's storage; a probe takes a message at least."""
        facts = self._welcome.facts
        lends = self._lends or self._channel.page_locked
        near = facts.probe_cost < _MESSAGE_SECONDS
        return Properties(
            filesystem=f"{facts.filesystem} through a node server",
            atomic_publish=facts.atomic_publish,
            conditional_create=facts.conditional_create,
            # What other clients of the server store is always told; notices say which folders are
            # watched for the writes of everybody.
            notifications=True,
            cache_seconds=facts.cache_seconds,
            links=facts.links,
            concurrency=_NEAR_CONCURRENCY if near else facts.concurrency,
            probes_at_once=_NAMES_AT_ONCE,
            probe_cost=max(_MESSAGE_SECONDS, facts.probe_cost),
            read_only=facts.read_only,
            can_quarantine=facts.can_quarantine,
            # The server removes those of killed writers.
            temporaries=False,
            lends=lends,
            # Any object is opened by its size, so that it can come from the server's memory.
            part_bytes=0 if lends else 1,
            # The server says itself that its storage is late, if it can.
            deadlines=Deadlines(
                probe=facts.probe_seconds + _LATER,
                read=facts.read_seconds + _LATER,
                write=facts.write_seconds + _LATER,
                bytes_per_second=facts.bytes_per_second,
            ),
        )

    # ------------------------------------------------------------------------------- probes

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe the storage, past the server's memory."""
        return self._probe(
            names, [messages.Call("stat", [part]) for part in _parts(list(map(check_name, names)))]
        )

    def find(self, names: Sequence[str], sizes: Sequence[int]) -> StatResults:
        """Probe the server's memory, and the storage for what is not there."""
        return self._probe(
            names,
            [
                messages.Find(part, of_part)
                for part, of_part in zip(_parts(names), _parts(sizes), strict=True)
            ],
        )

    def _probe(
        self, names: Sequence[str], questions: Sequence[messages.Call | messages.Find]
    ) -> StatResults:
        answers: StatResults = []
        try:
            for future in [self._channel.request(question) for question in questions]:
                found = _answer(future, messages.Found)
                unknown: Exception | None = None if found.fault is None else found.fault.error()
                if not isinstance(unknown, StorageError):
                    unknown = TransientStorageError(errno.EIO, str(unknown), self.url)
                answers += [_stat_result(answer, unknown) for answer in found.answers]
        except StorageError as error:
            return [error] * len(names)
        return answers

    def info(self, name: str) -> ObjectInfo | None:
        """Ask the storage for size and times of one entry."""
        row = self._call("info", check_name(name))
        return None if row is None else ObjectInfo(*row)

    # -------------------------------------------------------------------------------- reads

    def open(self, name: str, size: int | None = None) -> Reader:
        """Open an object in the server's memory if its size is given, and that has room for it.

        Otherwise, past that memory, its bytes come in messages. What is read often is borrowed, see
        :meth:`borrow`.
        """
        leased = None if size is None else self.borrow(name, size)
        if leased is not None:
            return _LeasedReader(self, name, leased)
        return _ServedReader(self, check_name(name))

    def read(self, name: str, offset: int, nbytes: int) -> tuple[int, bytes]:
        """Return the size of an object, and at most `nbytes` of its bytes.

        Raises
        ------
        ObjectMissingError, NotRegularError, StorageError
            As :meth:`open`.
        """
        size, data = self._call("read", name, offset, nbytes)
        return size, data

    def expect(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Have the server read objects and lease them to this client.

        Few messages serve a load of many objects: the first of them are asked for now, and more
        when these are borrowed.
        """
        until = time.monotonic() + self._keep_seconds
        with self._wake:
            if self._closed:
                return
            for name, size in zip(names, sizes, strict=True):
                if len(self._later) == messages.MAX_NAMES:
                    break
                if name not in self._expected:
                    self._later[name] = size, until
            self._ask_ahead()

    @property
    def _keep_seconds(self) -> float:
        return min(EXPECTED_SECONDS, self._welcome.lease_seconds / 2)

    @property
    def _most_expected(self) -> int:
        return int(self._welcome.arena_bytes * _EXPECTED_SHARE)

    def _ask_ahead(self) -> None:
        """Ask for some of what is expected, as far as there is room. The lock is held."""
        now = time.monotonic()
        room = self._most_expected - self._expected_bytes
        names: list[str] = []
        sizes: list[int] = []
        while self._later and len(names) < _ASKED_AT_ONCE:
            name, (size, until) = next(iter(self._later.items()))
            if until > now:
                room -= size
                if room < 0:
                    break
                names.append(name)
                sizes.append(size)
            del self._later[name]
        if not names:
            return
        futures = self._channel.fetch(_SESSION, names, sizes)
        until = now + self._keep_seconds
        for name, size, future in zip(names, sizes, futures, strict=True):
            self._expected[name] = future, size, until
            self._expected_bytes += size
        self._wake.notify()

    def borrow(self, name: str, size: int) -> Leased | None:
        """Lease an object in the server's memory, read or not yet."""
        check_name(name)
        with self._wake:
            self._later.pop(name, None)
            future, nbytes, _ = self._expected.pop(name, (None, 0, 0.0))
            self._expected_bytes -= nbytes
        if future is not None and nbytes != size:
            _give_back(future)
            future = None
        if future is None:
            if size > self._welcome.arena_bytes // 2:
                # More than one client may hold.
                return None
            [future] = self._channel.fetch(_SESSION, [name], [size])
        if (
            self._later
            and len(self._expected) <= _ASKED_AT_ONCE // 2
            and self._expected_bytes <= self._most_expected // 2
        ):
            with self._wake:
                self._ask_ahead()
        # Past this the server has no room for it now: it would have said that its storage is late.
        seconds = self.properties.deadlines.to_read(size) - _LATER / 2
        try:
            return future.result(seconds)
        except NoSpaceStorageError:
            return None
        except FutureTimeoutError:
            if future.cancel():
                return None
            return future.result()

    def _give_back_unused(self) -> None:
        """Release what was expected and not borrowed in time; runs on a thread."""
        while True:
            with self._wake:
                while not self._closed and not self._expected:
                    self._wake.wait()
                first = next(iter(self._expected.values()), None)
                if first is None:
                    return
                late = self._closed or first[2] <= time.monotonic()
                if not late:
                    self._wake.wait(first[2] - time.monotonic())
                    continue
                _, (future, nbytes, _) = self._expected.popitem(last=False)
                self._expected_bytes -= nbytes
            _give_back(future)

    # ------------------------------------------------------------------------------- writes

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Have the server verify an object and publish it; anything else has to be small."""
        check_name(name)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        size = sum(view.nbytes for view in views)
        if parse_path(name) is None:
            if size > messages.MAX_INLINE:
                raise PermanentStorageError(
                    errno.EFBIG,
                    f"{size} bytes that are no object of the format: a node server writes"
                    f" {messages.MAX_INLINE} at most",
                    f"{self.url}/{name}",
                )
            return WriteResult(self._call("write", name, mode, data=b"".join(views)))
        segment = self._channel.segment
        if segment is not None and len(views) == 1 and size:
            offset = segment.offset_of(views[0])
            if offset is not None:
                return self._store(name, offset, size, mode)
        room = self._take_room(name, size)
        try:
            start = 0
            for view in filter(len, views):
                copy_bytes(room.view[start : start + view.nbytes], view)
                start += view.nbytes
            return self._store(name, room.offset, size, mode)
        finally:
            with self._freed:
                room.release()
                self._freed.notify_all()

    def _store(self, name: str, offset: int, nbytes: int, mode: WriteMode) -> WriteResult:
        stored = self._channel.request(messages.Store(name, offset, nbytes, mode))
        return WriteResult(_answer(stored, messages.Stored).result)

    def _take_room(self, name: str, nbytes: int) -> Room:
        segment = self._channel.segment
        if segment is None:
            raise PermanentStorageError(errno.ENOBUFS, "this client stores nothing", name)
        until = time.monotonic() + self.properties.deadlines.to_write(nbytes)
        with self._freed:
            while (room := segment.reserve(nbytes)) is None:
                if nbytes > segment.nbytes or not self._freed.wait(until - time.monotonic()):
                    raise TransientStorageError(
                        errno.ENOBUFS,
                        f"no room for {nbytes} bytes in the {segment.nbytes} bytes through which"
                        " objects are stored: set staging_bytes higher",
                        f"{self.url}/{name}",
                    )
        return room

    def write_marker(self, name: str) -> WriteResult:
        """Create an empty object."""
        return WriteResult(self._call("write_marker", check_name(name)))

    def delete(self, name: str) -> bool:
        """Delete from the storage and from the server's memory."""
        return bool(self._call("delete", check_name(name)))

    def quarantine(self, name: str, target: str) -> bool:
        """Move an entry, which is gone from the server's memory as well."""
        return bool(self._call("quarantine", check_name(name), check_name(target)))

    def trim(self, folder: str, max_count: int, max_bytes: int) -> None:
        """Remove the first entries of a folder."""
        self._call("trim", folder, max_count, max_bytes)

    def touch(self, name: str) -> Touched:
        """Record a use, with the rights of the server."""
        return Touched(self._call("touch", check_name(name)))

    def space(self) -> Space | None:
        """Ask for the room on the server's storage."""
        found = self._call("space")
        return None if found is None else Space(*found)

    def now(self) -> float | None:
        """Ask for the clock of the server's storage."""
        found: float | None = self._call("now")
        return found

    # ----------------------------------------------------------------------------- listings

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream the storage's listing, in pages."""
        return self._rows("list", prefix)

    def entries(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream the listing of all files of the storage, in pages."""
        return self._rows("entries", prefix)

    def _rows(self, method: Literal["list", "entries"], prefix: str) -> Iterator[ObjectInfo]:
        if prefix:
            check_name(prefix)
        rows, number = self._call(method, prefix, None)
        while True:
            yield from itertools.starmap(ObjectInfo, rows)
            if number is None:
                return
            rows, number = self._call(method, prefix, number)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """List folders of the storage."""
        if prefix:
            check_name(prefix)
        found: Sequence[str] = self._call("folders", prefix)
        return found

    # ------------------------------------------------------------------------------- others

    def register(self, record: bytes) -> None:
        """Tell the server of a namespace, now and after each reconnection. Does not block.

        Parameters
        ----------
        record : bytes
            The bytes of its ``namespace.json``.
        """
        with self._wake:
            if record in self._records:
                return
            self._records.append(record)
        self._channel.request(messages.Register(record))

    def _connected(self, welcome: messages.Welcome) -> None:
        """Tell a server that may have just started what it must know."""
        self._welcome = welcome
        with self._wake:
            # These have failed with the old connection.
            self._expected.clear()
            self._expected_bytes = 0
            records, notices = list(self._records), self._notices
        for record in records:
            self._channel.request(messages.Register(record))
        if notices is not None:
            notices.lose()

    def notices(self) -> Notices | None:
        """Return what says which objects appear in chosen folders; one reader at a time."""
        with self._wake:
            if self._notices is not None or self._closed:
                return None
            self._notices = ServedNotices(self)
            return self._notices

    def watch(self, folders: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Have the server tell what appears in these folders, and in no others.

        Returns
        -------
        fresh, unwatched : Sequence of str
            As of :meth:`kvshelf.backends.notices.Notices.watch`.
        """
        fresh, unwatched = self._call("watch", list(folders))
        return fresh, unwatched

    def end_notices(self, notices: ServedNotices) -> None:
        """Have the server tell nothing more."""
        with self._wake:
            if self._notices is not notices:
                return
            self._notices = None
        self._channel.request(messages.Call("unwatch", []))

    def _noticed(self, notice: messages.Appeared | messages.Draining) -> None:
        notices = self._notices
        if notices is not None and isinstance(notice, messages.Appeared):
            # Without names anything may have appeared in the folder.
            notices.tell(notice.names or [f"{notice.folder}/"])

    def close(self) -> None:
        """Give back what was expected, end the connection. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._channel.close()

    def _call(self, method: messages.Method, *args: Any, data: bytes = b"") -> Any:
        future = self._channel.request(messages.Call(method, [*args], data))
        return _answer(future, messages.Result).value


class _ServedReader(Reader):
    """Reads an object of the server's storage by messages.

    What is larger than a message may be replaced between two of them by an object of the same size.
    Loads verify what they have read.

    Parameters
    ----------
    backend : ServedBackend
    name : str
    """

    def __init__(self, backend: ServedBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        # One version of most of what is read like this.
        self.size, self._beginning = backend.read(name, 0, messages.MAX_INLINE)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        target = buffer.cast("B")
        count = 0
        while count < target.nbytes and offset + count < self.size:
            data = self._piece(offset + count, target.nbytes - count)
            if not data:
                break
            target[count : count + len(data)] = data
            count += len(data)
        return count

    def _piece(self, offset: int, nbytes: int) -> memoryview | bytes:
        beginning = memoryview(self._beginning)[offset : offset + nbytes]
        if beginning:
            return beginning
        size, data = self._backend.read(
            self._name, offset, min(nbytes, self.size - offset, messages.MAX_INLINE)
        )
        if size != self.size:
            raise TransientStorageError(
                errno.ESTALE,
                f"the object had {self.size} bytes when it was opened, and has {size} now",
                f"{self._backend.url}/{self._name}",
            )
        return data

    def close(self) -> None:
        self._beginning = b""


class _LeasedReader(Reader):
    """Copies from an object in the server's memory.

    Parameters
    ----------
    backend : ServedBackend
    name : str
    leased : Leased
        Given back when the reader is closed.
    """

    def __init__(self, backend: ServedBackend, name: str, leased: Leased) -> None:
        self._place = f"{backend.url}/{name}"
        self._leased = leased
        self.size = leased.view.nbytes

    def read_into(self, buffer: memoryview, offset: int) -> int:
        target = buffer.cast("B")
        count = max(0, min(target.nbytes, self.size - offset))
        if count:
            copy_bytes(target[:count], self._leased.view[offset : offset + count])
        if not self._leased.valid():
            raise TransientStorageError(
                errno.ESTALE, "the server took the memory back while it was read", self._place
            )
        return count

    def close(self) -> None:
        self._leased.release()


class ServedNotices:
    """Says what appears in folders of the server's storage.

    See :class:`kvshelf.backends.notices.Notices`.

    What is stored through this server is told on any storage; a folder counts as watched where the
    storage tells of the writes of everybody.

    Parameters
    ----------
    backend : ServedBackend
    """

    def __init__(self, backend: ServedBackend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._names: set[str] = set()
        self._lost = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when something has appeared."""
        return self._fd

    def watch(self, folders: Iterable[str]) -> tuple[set[str], set[str]]:
        """Watch these folders; blocks on the server."""
        fresh, unwatched = self._backend.watch(sorted(folders))
        return set(fresh), set(unwatched)

    def appeared(self) -> set[str] | None:
        """Return what has appeared since the last call."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
            names, lost = self._names, self._lost
            self._names, self._lost = set(), False
        return None if lost else names

    def tell(self, names: Iterable[str]) -> None:
        """Note what has appeared, on any thread."""
        self._note(names, lost=False)

    def lose(self) -> None:
        """Note that anything may have appeared, and that nothing is watched any more."""
        self._note((), lost=True)

    def _note(self, names: Iterable[str], *, lost: bool) -> None:
        with self._lock:
            if self._fd >= 0:
                self._names.update(names)
                self._lost |= lost
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            self._backend.end_notices(self)


class ServedShelf(Shelf):
    """A shelf whose storage is a node server.

    Parameters
    ----------
    channel : Channel
        Connected; closed together with the shelf.
    counters : Counters, optional
        As for :class:`~kvshelf.shelf.shelf.Shelf`.
    read_only : bool
        This client changes nothing.
    lends : bool
        As for :class:`ServedBackend`.
    deadlines : Mapping, optional
        Fields of :class:`~kvshelf.backends.Deadlines` that replace those of the server.
    """

    def __init__(
        self,
        channel: Channel,
        counters: Counters | None = None,
        *,
        read_only: bool = False,
        lends: bool = True,
        deadlines: Mapping[str, float] | None = None,
    ) -> None:
        served = ServedBackend(channel, lends=lends)
        wanted = replace(served.properties.deadlines, **(deadlines or {}))
        backend: Backend = ReadOnlyBackend(served) if read_only else served
        super().__init__(backend, counters, deadlines=wanted)
        self._served = served
        # After the backend's own: by then the server knows the namespaces.
        channel.on_connect(self._connected)

    def view(self, fmt: ObjectFormat) -> NamespaceView:
        """Return the objects of one kind, after telling the server of their namespace.

        Does not block.
        """
        self._served.register(fmt.namespace.encoded)
        return super().view(fmt)

    def _connected(self, _: messages.Welcome) -> None:
        for breaker in (self.backend.reads, self.backend.writes):
            breaker.retry_soon()


def connect(url: str, *, segment_bytes: int = 0, segment: Segment | None = None) -> Channel:
    """Return a connected channel to the node server at `url`. May block for some seconds.

    Parameters
    ----------
    url : str
        ``ipc://`` and the path of the server's socket.
    segment_bytes : int
        Most bytes of objects that are being stored at the same time; at least those of the
        largest. The memory is taken as it is used.
    segment : Segment, optional
        That memory. The caller closes it, after the channel.

    Raises
    ------
    ConfigError
        If the URL is none of a server, or its folder is not this user's alone.
    StorageError
        If something else than a server of this user and version is there; if there is none, or it
        does not answer, an UnavailableStorageError.
    """
    channel = Channel(url, segment_bytes=segment_bytes, segment=segment)
    if not channel.wait_connected(CONNECT_SECONDS):
        channel.close()
        raise channel.problem or UnavailableStorageError(
            errno.EAGAIN, "the node server does not answer", url
        )
    return channel


def open_served(
    url: str,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    segment: Segment | None = None,
    read_only: bool = False,
    lends: bool = True,
    device: torch.device | None = None,
    counters: Counters | None = None,
    deadlines: Mapping[str, float] | None = None,
) -> ServedShelf:
    """Return the shelf behind the node server at `url`. May block for some seconds.

    Parameters
    ----------
    url, segment_bytes, segment
        As for :func:`connect`.
    read_only, lends, counters, deadlines
        As for :class:`ServedShelf`.
    device : torch.device, optional
        The GPU of the caches, for which the server's memory is page-locked.

    Raises
    ------
    ConfigError, StorageError
        As for :func:`connect`.
    """
    channel = connect(url, segment_bytes=segment_bytes, segment=segment)
    if device is not None:
        channel.page_lock(device)
    try:
        return ServedShelf(channel, counters, read_only=read_only, lends=lends, deadlines=deadlines)
    except BaseException:
        channel.close()
        raise


def _parts(items: Sequence[Any]) -> list[list[Any]]:
    """Split what is too long for one message; at least one part."""
    most = messages.MAX_NAMES
    return [list(items[begin : begin + most]) for begin in range(0, max(1, len(items)), most)]


def _answer(future: Future[messages.Reply], kind: type[_Reply]) -> _Reply:
    """Wait for the answer to a request; raise what the server says instead of it."""
    reply = future.result()
    if not isinstance(reply, kind):
        raise StorageError(errno.EPROTO, f"the node server answered {type(reply).__name__}")
    return reply


def _stat_result(answer: int, unknown: StorageError) -> StatResult:
    if answer >= 0:
        return answer
    if answer == messages.MISSING:
        return None
    return NOT_REGULAR if answer == messages.NOT_REGULAR else unknown


def _give_back(future: Future[Leased]) -> None:
    """Release what a future brings, whenever that is."""

    def release(done: Future[Leased]) -> None:
        if done.exception() is None:
            done.result().release()

    future.add_done_callback(release)
