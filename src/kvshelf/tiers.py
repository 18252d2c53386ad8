"""Tiers: faster copies in front of a shelf.

Owns the shape of a tier (:class:`Tier`), the shelves that look into tiers first
(:class:`LoadsFromTiers`, :class:`FindsInTiers`), and the disk tier: a directory on this machine
in front of a shelf that is farther away, which may also be opened later (:func:`open_behind`). The
memory tier is :mod:`kvshelf.prefetch`.

The disk tier is filled with what loads have fetched and verified, and with what is stored. Its
objects have the names that they have on the shelf, so that it is a shelf itself. It is bounded
(:mod:`kvshelf.bounded`), and any number of processes may share it.

Contracts
---------
* The shelf decides what is stored: stores ask it alone, and what it did not take does not get
  into a tier. Loads and look-ups ask the tiers first, and ask the shelf only for what is in none
  of them. So what was deleted from the shelf is found until it is gone from the tiers as well.
* What is read from a disk tier is verified like any object. A bad copy is removed; the load goes
  on from the shelf, and brings a new copy.
* The disk tier is written to by a thread of its own. What waits for it takes a bounded amount of
  memory; what finds no room there is not copied. Neither loads nor stores wait for it.
* A directory that fails or takes no writes is given a rest of its own, with one line in the log;
  nothing but the copies is missing then. A thread that it keeps counts as kept by the shelf
  behind, whose watchers replace it.
* All methods may be called from any thread but an engine's step thread.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch

from kvshelf.backends import (
    Backend,
    Buffer,
    Deadlines,
    Properties,
    WriteMode,
    WriteResult,
    open_backend,
)
from kvshelf.backends.base import StatResults
from kvshelf.backends.guard import Backoff, GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.bounded import LEDGER, BoundedBackend, FullError, share_files
from kvshelf.buffers import Buffer as PoolBuffer
from kvshelf.buffers import BufferPool
from kvshelf.chunkfile import ObjectFormat
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    NoSpaceStorageError,
    ObjectMissingError,
    ReadOnlyStorageError,
    StorageError,
    UnavailableStorageError,
)
from kvshelf.identity import Chunk
from kvshelf.metrics import Counters
from kvshelf.shelf import Presence, Shelf
from kvshelf.threads import StorageThreads
from kvshelf.urls import shown_url

logger = logging.getLogger(__name__)

#: Most host memory for objects on their way to a disk tier.
QUEUE_BYTES: Final = 256 << 20
#: Most uses of objects that wait to be noted.
_QUEUED_USES: Final = 4096
_NOTE_SECONDS: Final = 0.5
_BACKOFF: Final = Backoff()
_OPEN_SECONDS: Final = 5.0
#: Less than the start of an engine waits for its shelf: what is in the tier can be had then.
_SHELF_SECONDS: Final = 4.0
_RETRY_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 1.0


class Tier(Protocol):
    """Something in front of a shelf that has copies of some of its objects."""

    @property
    def available(self) -> bool:
        """Whether anything can be had from it."""

    def holds(self, fmt: ObjectFormat, items: Sequence[tuple[Chunk, int]]) -> list[bool]:
        """Tell of which (chunk, shard) pairs the objects are here."""

    def load(self, fmt: ObjectFormat, chunk: Chunk, shard: int, image: memoryview) -> bool:
        """Fill `image`, or at least its payload, with what is right; False when it is not here."""

    def keep(self, fmt: ObjectFormat, chunk: Chunk, shard: int, buffers: Sequence[Buffer]) -> None:
        """Take a copy of an object that is on the shelf, if there is room. Never waits."""

    def stand_before(self, guard: GuardedBackend) -> None:
        """Hear what keeps the threads that work in the storage behind."""

    def close(self) -> None:
        """Release what it holds. Idempotent."""


class _InFront(Shelf):
    """A shelf with tiers in front of it; closes them all.

    Parameters
    ----------
    shelf : Shelf
    tiers : Sequence of Tier
        The nearest first.
    """

    def __init__(self, shelf: Shelf, tiers: Sequence[Tier]) -> None:
        super().__init__(shelf.backend)
        self._shelf = shelf
        self._tiers = list(tiers)
        for tier in self._tiers:
            tier.stand_before(shelf.backend)

    @property
    def available(self) -> bool:
        """Whether anything can be had from a tier or from the shelf."""
        return any(tier.available for tier in self._tiers) or self._shelf.available

    def close(self) -> None:
        """Close the tiers and the shelf. Idempotent."""
        for tier in self._tiers:
            tier.close()
        self._shelf.close()


class LoadsFromTiers(_InFront):
    """A shelf whose loads look into tiers first, and whose objects get into them."""

    def load(self, fmt: ObjectFormat, chunk: Chunk, shard: int, image: memoryview) -> None:
        """Read and verify one object, see :meth:`kvshelf.shelf.Shelf.load`.

        From some tiers the payload comes without the header.
        """
        for tier in self._tiers:
            if tier.load(fmt, chunk, shard, image):
                return
        self._shelf.load(fmt, chunk, shard, image)
        for tier in self._tiers:
            tier.keep(fmt, chunk, shard, [image])

    def probe(self, fmt: ObjectFormat, items: Sequence[tuple[Chunk, int]]) -> list[Presence]:
        """Ask the shelf alone: stores want to know what is there."""
        return self._shelf.probe(fmt, items)

    def write(
        self,
        fmt: ObjectFormat,
        chunk: Chunk,
        shard: int,
        buffers: Sequence[Buffer],
        *,
        mode: WriteMode = "create",
    ) -> WriteResult:
        """Write to the shelf, then to the tiers."""
        result = self._shelf.write(fmt, chunk, shard, buffers, mode=mode)
        for tier in self._tiers:
            tier.keep(fmt, chunk, shard, buffers)
        return result

    def repair(
        self, fmt: ObjectFormat, chunk: Chunk, shard: int, buffers: Sequence[Buffer]
    ) -> WriteResult:
        """Repair on the shelf; what is in a tier is verified when it is read."""
        return self._shelf.repair(fmt, chunk, shard, buffers)


class FindsInTiers(_InFront):
    """A shelf on which everything is that is in a tier.

    Parameters
    ----------
    shelf : Shelf
    tiers : Sequence of Tier
        The nearest first.
    ask_shelf : bool
        False: only what is in the tiers is there.
    """

    def __init__(self, shelf: Shelf, tiers: Sequence[Tier], *, ask_shelf: bool = True) -> None:
        super().__init__(shelf, tiers)
        self._ask_shelf = ask_shelf

    def probe(self, fmt: ObjectFormat, items: Sequence[tuple[Chunk, int]]) -> list[Presence]:
        """Ask each tier for what those before it do not have, and the shelf for the rest."""
        answers = [Presence.MISSING] * len(items)
        asked: Sequence[int] = range(len(items))
        for tier in self._tiers:
            if not asked:
                return answers
            held = tier.holds(fmt, [items[i] for i in asked])
            for i, here in zip(asked, held, strict=True):
                if here:
                    answers[i] = Presence.PRESENT
            asked = [i for i, here in zip(asked, held, strict=True) if not here]
        if asked and self._ask_shelf:
            found = self._shelf.probe(fmt, [items[i] for i in asked])
            for i, answer in zip(asked, found, strict=True):
                answers[i] = answer
        return answers


# ------------------------------------------------------------------------------------ disk tier


class _TierGuard(GuardedBackend):
    """Says what a rest of a tier means."""

    without_reads = (
        "the disk tier is not used, everything comes from the shelf; it is tried again now and then"
    )
    without_writes = (
        "nothing more is copied to this disk tier, what is there is used; it is tried again now and"
        " then"
    )


@dataclass(frozen=True, slots=True)
class _Copy:
    """An object on its way to the tier."""

    fmt: ObjectFormat
    chunk: Chunk
    shard: int
    buffer: PoolBuffer


class _PassOn:
    """Tells the watchers of the storages behind a tier which threads the tier keeps."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    def thread_late(self, thread: int) -> bool:
        guards = [guard for known in self._tier._before if (guard := known()) is not None]
        # Each of them, also behind one that says yes.
        late = [watcher.thread_late(thread) for guard in guards for watcher in guard.watchers]
        return any(late)

    def reads_stopped(self) -> None:
        """Nobody minds: there is the shelf behind."""


class DiskTier:
    """A directory that keeps copies of a shelf's objects near.

    It is opened on a thread of its own. While that is not possible the tier is not used.

    Parameters
    ----------
    path : str or os.PathLike
        A directory on this machine; made when it is missing.
    max_bytes : int
        Most bytes of all objects there, whoever wrote them.
    counters : Counters, optional
    queue_bytes : int
        Most host memory for objects on their way to it.
    open_seconds : float
        How long to wait for the directory to be open.
    backoff : Backoff
        For how long it is given a rest.
    on_thread_start : Callable, optional
        Called first on its thread, to set its processors.

    Raises
    ------
    ConfigError
        If `path` is something other than a directory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int,
        *,
        counters: Counters | None = None,
        queue_bytes: int = QUEUE_BYTES,
        open_seconds: float = _OPEN_SECONDS,
        backoff: Backoff = _BACKOFF,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.max_bytes = max_bytes
        self._counters = Counters() if counters is None else counters
        self._backoff = backoff
        self._on_thread_start = on_thread_start
        self._pool = BufferPool(queue_bytes)
        self._work = threading.Condition()
        self._copies: deque[_Copy] = deque()
        #: Objects whose use is to be noted, all at once and not before a moment has passed: a
        #: thread that wakes after each load takes the GIL from the next.
        self._uses: dict[tuple[bytes, int], tuple[ObjectFormat, Chunk, int]] = {}
        self._note_at = 0.0
        self._busy = 0
        self._next_log = 0.0
        #: Replaced, never changed. Weak, since a tier may outlive many shelves.
        self._before: list[weakref.ref[GuardedBackend]] = []
        #: Shelves to compare the directory with when it is open.
        self._shelves: list[Backend] = []
        self._refused = False
        self._threads: StorageThreads | None = None
        self._bounded: BoundedBackend | None = None
        self._shelf: Shelf | None = None
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._awaited = True
        tried = threading.Event()
        # A daemon: a disk that never answers must not keep the process alive.
        threading.Thread(
            target=self._open, args=(tried,), name="kvshelf-open-tier", daemon=True
        ).start()
        tried.wait(open_seconds)
        with self._work:
            self._awaited = False
            answered = tried.is_set()
        if not answered:
            logger.warning(
                "the disk tier %s has not answered for %g s; it is used as soon as it does",
                self.path,
                open_seconds,
            )
        else:
            self._raise_mistakes()

    def __repr__(self) -> str:
        return f"DiskTier({self.path!r}, {self.max_bytes})"

    # ---------------------------------------------------------------------------------- opening

    def _open(self, tried: threading.Event) -> None:
        while not self._closing.is_set():
            try:
                self._opened(BoundedBackend(PosixBackend(self.path), self.max_bytes))
            except Exception as error:  # noqa: BLE001 - raised by the constructor, or logged
                with self._work:
                    late = not self._awaited
                    first, self._error = self._error is None, error
                    tried.set()
                if not isinstance(error, StorageError):
                    if late:
                        logger.error("the disk tier %s is not used: %s", self.path, error)
                    return
                if first:
                    logger.warning(
                        "the disk tier %s cannot be opened (%s); it is tried again every %g s",
                        self.path,
                        error,
                        _RETRY_SECONDS,
                    )
                self._closing.wait(_RETRY_SECONDS)
            else:
                tried.set()
                return

    def _raise_mistakes(self) -> None:
        if self._error is not None and not isinstance(self._error, StorageError):
            raise self._error

    def _opened(self, bounded: BoundedBackend) -> None:
        with self._work:
            shelves, self._shelves = self._shelves, []
            self._bounded = bounded
        for shelf in shelves:
            self.keep_apart(shelf)
        guard = _TierGuard(bounded, backoff=self._backoff)
        guard.count_into(self._count)
        with self._work:
            closed = self._closing.is_set()
            if not closed:
                self._shelf = Shelf(guard)
                guard.watch(_PassOn(self))
        if closed:
            guard.close()

    def keep_apart(self, backend: Backend) -> None:
        """Refuse to stand before a shelf that has files in common with this directory.

        They would be taken for copies, and removed when there are too many. A directory that is
        not open yet is looked at when it is. May block on both.

        Raises
        ------
        ConfigError
            If one is the other or lies in it. The tier is not used from then on.
        """
        with self._work:
            bounded = self._bounded
            if bounded is None:
                self._shelves.append(backend)
                return
        if share_files(bounded, backend):
            with self._work:
                self._refused = True
            raise ConfigError(
                f"the disk tier {self.path} and the shelf {backend.url} are one directory, or one"
                " is inside the other, perhaps by a link or a mount: a disk tier removes what it"
                " has no room for. Give disk_tier.path a directory of its own"
            )

    def _count(self, name: str) -> None:
        if name == "breaker_opened":
            self._counters.add("disk_tier_rests")

    def stand_before(self, guard: GuardedBackend) -> None:
        """Tell the watchers of `guard` which of their threads this directory keeps.

        Raises
        ------
        ConfigError
            See :meth:`keep_apart`.
        """
        self.keep_apart(guard)
        with self._work:
            others = [known for known in self._before if known() not in (None, guard)]
            self._before = [*others, weakref.ref(guard)]

    # ------------------------------------------------------------------------------------ loads

    @property
    def available(self) -> bool:
        """Whether it is open and not given a rest."""
        shelf = self._usable
        return shelf is not None and shelf.available

    @property
    def _usable(self) -> Shelf | None:
        return None if self._refused else self._shelf

    @property
    def guard(self) -> GuardedBackend | None:
        """What all calls of the directory go through; None while it is not open."""
        return None if self._shelf is None else self._shelf.backend

    def holds(self, fmt: ObjectFormat, items: Sequence[tuple[Chunk, int]]) -> list[bool]:
        """Tell of which (chunk, shard) pairs there are copies of the right size."""
        shelf = self._usable
        if shelf is None or not shelf.available:
            return [False] * len(items)
        return [answer is Presence.PRESENT for answer in shelf.probe(fmt, items)]

    def load(self, fmt: ObjectFormat, chunk: Chunk, shard: int, image: memoryview) -> bool:
        """Read and verify a copy. A bad one is removed, and counts as none."""
        shelf = self._usable
        if shelf is None or not shelf.available:
            return False
        try:
            shelf.load(fmt, chunk, shard, image)
        except ObjectMissingError:
            return False
        except BadObjectError as error:
            self._drop(shelf, fmt, chunk, shard, error)
            return False
        except StorageError as error:
            logger.debug("a copy could not be read: %s", error)
            return False
        self._counters.add("disk_tier_objects")
        self._counters.add("disk_tier_loaded_bytes", len(image))
        self._note_use(fmt, chunk, shard)
        return True

    def _note_use(self, fmt: ObjectFormat, chunk: Chunk, shard: int) -> None:
        with self._work:
            if len(self._uses) >= _QUEUED_USES or self._closing.is_set():
                return
            if not self._uses:
                if not self._start_thread():
                    return
                self._note_at = time.monotonic() + _NOTE_SECONDS
                self._work.notify_all()
            self._uses[chunk.key, shard] = fmt, chunk, shard

    def _drop(
        self, shelf: Shelf, fmt: ObjectFormat, chunk: Chunk, shard: int, error: BadObjectError
    ) -> None:
        self._counters.add("disk_tier_bad")
        self._log("a copy in the disk tier %s was bad and is removed: %s", self.path, error)
        try:
            shelf.backend.delete(shelf.name(fmt, chunk, shard))
        except StorageError as failure:
            logger.debug("a bad copy could not be removed: %s", failure)

    def _log(self, text: str, *values: object) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + 60.0
            logger.warning(text, *values)

    # ----------------------------------------------------------------------------------- copies

    def keep(self, fmt: ObjectFormat, chunk: Chunk, shard: int, buffers: Sequence[Buffer]) -> None:
        """Copy an object into the queue of what is to be written, if there is room."""
        shelf = self._usable
        if shelf is None or not shelf.available or shelf.read_only or self._closing.is_set():
            self._counters.add("disk_tier_dropped")
            return
        views = [memoryview(buffer) for buffer in buffers]
        copy = self._pool.allocate(sum(view.nbytes for view in views))
        if copy is None:
            self._counters.add("disk_tier_dropped")
            return
        at = 0
        for view in views:
            end = at + view.nbytes
            if view.readonly:
                copy.view[at:end] = view.cast("B")
            else:
                # By torch, which gives the GIL up meanwhile.
                copy.tensor[at:end].copy_(torch.frombuffer(view, dtype=torch.uint8))
            at = end
        with self._work:
            if not self._closing.is_set() and self._start_thread():
                self._copies.append(_Copy(fmt, chunk, shard, copy))
                self._work.notify_all()
                return
        copy.release()
        self._counters.add("disk_tier_dropped")

    def _start_thread(self) -> bool:
        """Start the thread when it is needed; whether there is one. Holds the lock."""
        if self._threads is None:
            assert self._shelf is not None
            self._threads = StorageThreads(
                "kvshelf-tier",
                1,
                self._run,
                self._shelf.backend,
                count_kept=lambda: self._counters.add("kept_threads"),
                on_thread_start=self._on_thread_start,
            )
            try:
                self._threads.start()
            except RuntimeError as error:
                # Copies are not worth a load or a store; the next one tries again.
                logger.debug("nothing is copied to the disk tier: %s", error)
                self._threads = None
                return False
        return self._threads.ready()

    def _next(self) -> _Copy | list[tuple[ObjectFormat, Chunk, int]] | None:
        """Wait for a copy to write or for uses to note; None at the end."""
        with self._work:
            while True:
                if self._copies:
                    self._busy += 1
                    return self._copies.popleft()
                if self._closing.is_set():
                    return None
                left = self._note_at - time.monotonic()
                if self._uses and left <= 0:
                    self._busy += 1
                    uses, self._uses = list(self._uses.values()), {}
                    return uses
                self._work.wait(left if self._uses else None)

    def _run(self) -> None:
        assert self._threads is not None and self._shelf is not None
        while not self._threads.replaced() and (item := self._next()) is not None:
            try:
                if isinstance(item, _Copy):
                    self._write(self._shelf, item)
                else:
                    for use in item:
                        self._shelf.backend.touch(self._shelf.name(*use))
            except StorageError as error:
                # The guard says so where the whole directory takes no writes or fails.
                spoken_of = error.retryable or isinstance(
                    error, FullError | NoSpaceStorageError | ReadOnlyStorageError
                )
                if spoken_of:
                    logger.debug("the disk tier was not written to: %s", error)
                else:
                    self._log("the disk tier %s was not written to: %s", self.path, error)
                if isinstance(item, _Copy):
                    self._counters.add("disk_tier_dropped")
            except Exception as error:
                logger.error("the disk tier was not written to", exc_info=error)
            finally:
                if isinstance(item, _Copy):
                    item.buffer.release()
                with self._work:
                    self._busy -= 1
                    self._work.notify_all()

    def _write(self, shelf: Shelf, item: _Copy) -> None:
        bounded = self._bounded
        assert bounded is not None
        size = len(item.buffer)
        if size > self.max_bytes or self._refused:
            self._counters.add("disk_tier_dropped")
            return
        with shelf.backend.noting(LEDGER):
            lately = bounded.counted_lately
        if not lately:
            self._make_room(shelf, bounded, size)
        try:
            result = shelf.write(item.fmt, item.chunk, item.shard, [item.buffer.view])
        except FullError:
            self._make_room(shelf, bounded, size)
            result = shelf.write(item.fmt, item.chunk, item.shard, [item.buffer.view])
        if result is not WriteResult.EXISTED:
            self._counters.add("disk_tier_written_bytes", size)
        with shelf.backend.noting(LEDGER):
            use = bounded.ledger.read()
        if use is not None:
            self._counters.set_gauge("disk_tier_bytes", use.used)

    def _make_room(self, shelf: Shelf, bounded: BoundedBackend, size: int) -> None:
        guard = shelf.backend
        removed, freed = bounded.make_room(size, guard, lambda: guard.noting(LEDGER))
        if removed:
            self._counters.add("disk_tier_evicted_objects", removed)
            self._counters.add("disk_tier_evicted_bytes", freed)

    # ---------------------------------------------------------------------------------- the end

    def drain(self, seconds: float) -> bool:
        """Wait until all copies are written and all uses noted; whether it was in time."""
        with self._work:
            self._note_at = 0.0
            self._work.notify_all()
            return self._work.wait_for(
                lambda: not (self._copies or self._uses or self._busy), seconds
            )

    def close(self) -> None:
        """Write what waits for at most a second, stop the thread. Idempotent."""
        if self._closing.is_set():
            return
        if self.available:
            self.drain(_CLOSE_SECONDS)
        self._closing.set()
        with self._work:
            for copy in self._copies:
                copy.buffer.release()
            self._copies.clear()
            self._work.notify_all()
        if self._threads is not None:
            self._threads.close()
            self._threads.join(_CLOSE_SECONDS)
        self._pool.close()
        if self._shelf is not None:
            self._shelf.close()


# --------------------------------------------------------------------------- a shelf that is away


class _LateBackend(WrappedBackend):
    """A storage that is opened when it answers.

    Until then nothing can be had from it, and it counts as far.

    Parameters
    ----------
    url : str
        For log lines.
    make : Callable
        Opens it; called on a thread of its own.
    """

    def __init__(self, url: str, make: Callable[[], Backend]) -> None:
        self.url = url
        self._make = make
        self._lock = threading.Lock()
        self._opened: Backend | None = None
        self._error: Exception | None = None
        self._awaited = True
        self._tried = threading.Event()
        self._closing = threading.Event()
        # A daemon: a storage that never answers must not keep the process alive.
        threading.Thread(target=self._open, name="kvshelf-open-late", daemon=True).start()

    def first(self, seconds: float, meanwhile: str) -> Backend | None:
        """Wait for the first attempt; return the storage, None if it is not open.

        Parameters
        ----------
        seconds : float
        meanwhile : str
            What there is without it, for the log.

        Raises
        ------
        Exception
            That of the attempt, where waiting would not help.
        """
        self._tried.wait(seconds)
        with self._lock:
            self._awaited = False
            opened, error = self._opened, self._error
        if opened is not None:
            return opened
        if error is None:
            logger.warning(
                "%s has not answered for %g s: for now there is only %s; it is used as soon as it"
                " answers",
                self.url,
                seconds,
                meanwhile,
            )
        elif _passes(error):
            logger.warning(
                "%s cannot be opened now (%s): for now there is only %s; it is tried again every"
                " %g s",
                self.url,
                error,
                meanwhile,
                _RETRY_SECONDS,
            )
        else:
            raise error
        return None

    @property
    def inner(self) -> Backend:  # type: ignore[override]
        """The storage.

        Raises
        ------
        UnavailableStorageError
            If it is not open.
        """
        if self._opened is None:
            raise UnavailableStorageError(errno.EAGAIN, "it has not answered yet", self.url)
        return self._opened

    @property
    def properties(self) -> Properties:
        """Those of the storage, or what holds for any that is far."""
        if self._opened is None:
            return Properties(
                filesystem="unknown",
                probe_cost=20e-3,
                concurrency=32,
                deadlines=Deadlines(probe=5.0, read=15.0, write=15.0),
            )
        return self._opened.properties

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names at once."""
        try:
            return self.inner.stat(names)
        except UnavailableStorageError as error:
            return [error] * len(names)

    def close(self) -> None:
        """Try no more, close the storage."""
        with self._lock:
            self._closing.set()
            opened = self._opened
        if opened is not None:
            opened.close()

    def _open(self) -> None:
        while not self._closing.is_set():
            try:
                opened = self._make()
            except Exception as error:  # noqa: BLE001 - raised by `first`, or logged
                with self._lock:
                    self._error = error
                    late = not self._awaited
                    self._tried.set()
                if not _passes(error):
                    if late:
                        logger.error("%s cannot be used: %s", self.url, error)
                    return
                self._closing.wait(_RETRY_SECONDS)
            else:
                with self._lock:
                    self._opened = opened
                    late, closed = not self._awaited, self._closing.is_set()
                    self._tried.set()
                if closed:
                    opened.close()
                elif late:
                    logger.info("%s is open", self.url)
                return


def _passes(error: Exception) -> bool:
    """Whether the trouble may pass by itself."""
    return isinstance(error, StorageError) and error.retryable


def open_behind(
    tier: DiskTier,
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    read_only: bool = False,
    counters: Counters | None = None,
    deadlines: Mapping[str, float] | None = None,
    open_seconds: float = _SHELF_SECONDS,
) -> Shelf:
    """Open the shelf behind a disk tier, also when it does not answer now.

    What is in the tier can be had meanwhile.

    Parameters
    ----------
    tier : DiskTier
    url, storage_options, read_only, counters, deadlines
        As for :func:`kvshelf.shelf.open_shelf`.
    open_seconds : float
        How long to wait for it.

    Raises
    ------
    ConfigError, StorageError
        If the shelf cannot be opened, and waiting would not help.
    """

    def make() -> Backend:
        opened = open_backend(url, storage_options=storage_options, read_only=read_only)
        try:
            tier.keep_apart(opened)
        except BaseException:
            opened.close()
            raise
        return opened

    late = _LateBackend(shown_url(url), make)
    backend = late.first(open_seconds, f"what the disk tier {tier.path} has") or late
    wanted = replace(backend.properties.deadlines, **(deadlines or {}))
    return Shelf(backend, counters, deadlines=wanted)
