"""The disk tier: a directory on this machine with copies of the objects of a high-latency shelf.

Owns the directory, which is a shelf itself: its objects have the names that they have on the
shelf. It is filled with the objects that loads have fetched and verified, and with those that are
stored. An evictor bounds it (:mod:`kvshelf.capacity.evictor`). Any number of processes may share
it.

Contracts
---------
* What is read from the tier is verified like any object. A bad copy is removed; the shelf serves
  the load, which brings a new copy.
* One thread of the tier writes to it. Objects queue for it in the memory in which they lie, each
  once; an object whose memory cannot be held is not copied. Neither loads nor stores wait.
* A directory that fails or takes no writes has a circuit breaker of its own. While it is open only
  the copies are missing. A thread that is stuck in the directory counts as stuck in the shelf
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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from kvshelf.backends import Backend, BytesLike, WriteResult
from kvshelf.backends.base import delete_one
from kvshelf.backends.breaker import DEFAULT_BACKOFF, Backoff
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.capacity.evictor import Evictor
from kvshelf.capacity.uses import Uses
from kvshelf.config import CapacityConfig
from kvshelf.errors import (
    BadObjectError,
    BoundReachedError,
    ConfigError,
    NoSpaceStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import Kind
from kvshelf.format.names import ParsedName
from kvshelf.format.objects import ObjectFormat
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.opening import START_SECONDS, Opening
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.threads import StorageThreads
from kvshelf.shelf.view import Hold, ObjectRef, Presence
from kvshelf.tiers.directories import mark, share_files, take_directory

__all__ = ["DiskTier"]

logger = logging.getLogger(__name__)

#: Seconds after which a use of the same copy is recorded again.
_USE_SECONDS: Final = 0.5
#: Seconds for which queued copies are written at the end.
_CLOSE_SECONDS: Final = 1.0
#: What log lines say while the circuit breakers of the directory are open.
_WITHOUT_READS: Final = (
    "the disk tier is not used, objects are loaded from the shelf; it is retried in the background"
)
_WITHOUT_WRITES: Final = (
    "no objects are copied to the disk tier until a write succeeds again; loads from it continue"
)

#: An object: its chunk's key, its kind and shard.
_Key: TypeAlias = "tuple[bytes, Kind, int]"


@dataclass(frozen=True, slots=True)
class _Copy:
    """An object that waits to be written to the tier."""

    fmt: ObjectFormat
    ref: ObjectRef
    buffer: BytesLike
    #: Ends the hold of the buffer.
    release: Callable[[], None]


def _key(fmt: ObjectFormat, ref: ObjectRef) -> _Key:
    return ref.chunk.key, fmt.kind, ref.shard


class DiskTier:
    """A local directory with copies of a shelf's objects.

    It is opened on a thread of its own. The tier is not used while it is not open.

    Parameters
    ----------
    path : str or os.PathLike
        A directory on this machine; made when it is missing.
    max_bytes : int
        Most bytes of all objects there, of all processes.
    counters : Counters, optional
        Counts what is done.
    open_seconds : float or None
        How long to wait for the directory to be open, in seconds, 5 by default; None: until
        :meth:`wait_open` is called.
    backoff : Backoff
        How long its circuit breaker stays open.
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
        open_seconds: float | None = START_SECONDS,
        backoff: Backoff = DEFAULT_BACKOFF,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.max_bytes = max_bytes
        self._counters = Counters() if counters is None else counters
        self._backoff = backoff
        self._on_thread_start = on_thread_start
        self._work = threading.Condition()
        self._copies: OrderedDict[_Key, _Copy] = OrderedDict()
        #: Copies that are being written: several where a stuck thread has been replaced.
        self._writing: list[_Key] = []
        # Its metrics are those of the shelf.
        self._uses = Uses(Counters(), every=_USE_SECONDS, on_thread_start=on_thread_start)
        self._log = RateLimitedLog(logger)
        #: Replaced, never changed. Weak, since a tier may outlive many shelves.
        self._before: list[weakref.ref[GuardedBackend]] = []
        #: Shelves to compare the directory with when it is open.
        self._shelves: list[Backend] = []
        self._refused = False
        self._threads: StorageThreads | None = None
        self._directory: PosixBackend | None = None
        self._evictor: Evictor | None = None
        self._closing = threading.Event()
        self._opening = Opening(
            f"the disk tier {self.path}",
            self._open,
            passes=lambda error: isinstance(error, StorageError),
        )
        if open_seconds is not None:
            self.wait_open(open_seconds)

    # ---------------------------------------------------------------------------------- opening

    def wait_open(self, seconds: float) -> bool:
        """Wait for the first attempt to open the directory; return whether it is open.

        Raises
        ------
        ConfigError
            If the path is something other than a directory.
        """
        return self._opening.first(seconds, "it is not used") is not None

    def _open(self) -> Shelf:
        directory = PosixBackend(self.path)
        take_directory(directory)
        with self._work:
            shelves, self._shelves = self._shelves, []
            self._directory = directory
        for shelf in shelves:
            self.check_disjoint(shelf)
        guard = GuardedBackend(directory, backoff=self._backoff)
        guard.without_reads = _WITHOUT_READS
        guard.without_writes = _WITHOUT_WRITES
        guard.count_into(self._count)
        guard.watch(self)
        self._evictor = Evictor(
            guard,
            CapacityConfig(max_bytes=self.max_bytes),
            self._counters,
            prefix="disk_tier_",
            on_thread_start=self._on_thread_start,
        )
        return Shelf(guard)

    def check_disjoint(self, backend: Backend) -> None:
        """Refuse a shelf that has files in common with this directory.

        They would be taken for copies, and evicted when there are too many. A directory that is
        not open yet is checked once it is. May block on both.

        Raises
        ------
        ConfigError
            If one is the other or lies in it. The tier is not used from then on.
        """
        with self._work:
            directory = self._directory
            if directory is None:
                self._shelves.append(backend)
                return
        if share_files(directory, backend):
            with self._work:
                self._refused = True
            raise ConfigError(
                f"the disk tier {self.path} and the shelf {backend.url} are one directory, or one"
                " is inside the other, perhaps by a link or a mount: a disk tier evicts"
                " objects when it is full. Give disk_tier.path a directory of its own"
            )

    def _count(self, name: str) -> None:
        if name == "breaker_opens":
            self._counters.add("disk_tier_breaker_opens")

    def attach(self, guard: GuardedBackend) -> None:
        """Report to the watchers of `guard` which of their threads are stuck in this directory."""
        with self._work:
            guards = [reference for reference in self._before if reference() not in (None, guard)]
            self._before = [*guards, weakref.ref(guard)]

    def on_late_call(self, thread: int) -> bool:
        """Tell the watchers of all attached guards that one of their threads may be stuck here."""
        guards = [guard for reference in self._before if (guard := reference()) is not None]
        # Notify every watcher, also after one has answered yes.
        late = [watcher.on_late_call(thread) for guard in guards for watcher in guard.watchers]
        return any(late)

    def on_reads_open(self) -> None:
        """Do nothing: objects are loaded from the shelf."""

    # ------------------------------------------------------------------------------------ loads

    @property
    def available(self) -> bool:
        """Whether the tier is open and its circuit breaker is not."""
        return self._available() is not None

    def _available(self) -> Shelf | None:
        shelf = self.usable
        return shelf if shelf is not None and shelf.available else None

    @property
    def usable(self) -> Shelf | None:
        """The directory as a shelf; None while it is not open, or if it must not be used."""
        return None if self._refused else self._opening.get()

    def holds(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> list[bool]:
        """Return of which objects there are copies of the right size."""
        shelf = self._available()
        if shelf is None:
            return [False] * len(refs)
        return [presence is Presence.PRESENT for presence in shelf.view(fmt).probe(refs)]

    def load(self, fmt: ObjectFormat, ref: ObjectRef, buffer: memoryview) -> bool:
        """Read and verify a copy. A bad one is removed, and counts as none."""
        return self._load(fmt, ref, buffer) is not None

    def load_named(self, fmt: ObjectFormat, parsed: ParsedName, buffer: memoryview) -> Chunk | None:
        """Read and verify a copy of which only the name is known; None if there is no good one.

        See :meth:`kvshelf.shelf.view.NamespaceView.load_named`.
        """
        ref = ObjectRef(fmt.named_chunk(parsed), parsed.shard)
        # Folders have other names in the tier.
        return self._load(fmt, ref, buffer, replace(parsed, namespace=None))

    def _load(
        self, fmt: ObjectFormat, ref: ObjectRef, buffer: memoryview, name: ParsedName | None = None
    ) -> Chunk | None:
        shelf, chunk = self._available(), ref.chunk
        if shelf is None:
            return None
        view = shelf.view(fmt)
        try:
            if name is None:
                view.load(ref, buffer)
            else:
                chunk = view.load_named(name, buffer)
        except BadObjectError as error:
            self._counters.add("disk_tier_bad_objects")
            text = "a copy in the disk tier %s was bad and is removed: %s"
            self._log.warning(text, self.path, error)
            with suppress(StorageError):
                delete_one(view.backend, view.name(ref))
            return None
        except StorageError as error:
            logger.debug("a copy could not be read: %s", error)
            return None
        self._counters.add("disk_tier_loaded_objects")
        self._counters.add("disk_tier_loaded_bytes", len(buffer))
        self._uses.note(view.backend, [view.name(ref)])
        return chunk

    # ----------------------------------------------------------------------------------- copies

    def is_queued(self, fmt: ObjectFormat, ref: ObjectRef) -> bool:
        """Whether a copy of an object waits to be written, or is being written."""
        key = _key(fmt, ref)
        with self._work:
            return key in self._copies or key in self._writing

    def remove(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> int:
        """Remove copies, also those that wait to be written; return of how many objects.

        Raises
        ------
        StorageError
            If the directory failed, or does not take a copy that is being written in time.
        """
        shelf = self.usable
        return 0 if shelf is None else sum(self._remove(shelf, fmt, ref) for ref in refs)

    def _remove(self, shelf: Shelf, fmt: ObjectFormat, ref: ObjectRef) -> bool:
        key, seconds = _key(fmt, ref), shelf.backend.deadlines.write
        with self._work:
            waiting = self._copies.pop(key, None)
            self._work.notify_all()
            if not self._work.wait_for(lambda: key not in self._writing, seconds):
                text = "a copy is being written and cannot be removed"
                raise TransientStorageError(errno.ETIMEDOUT, text, self.path)
        if waiting is not None:
            waiting.release()
        return shelf.view(fmt).delete(ref) or waiting is not None

    def keep(self, fmt: ObjectFormat, ref: ObjectRef, buffer: BytesLike, hold: Hold) -> None:
        """Queue an object to be written, unless it is in the queue or its memory cannot be held."""
        key = _key(fmt, ref)
        with self._work:
            if key in self._copies or key in self._writing:
                return
            shelf = self._available()
            takes = shelf is not None and not shelf.read_only and not self._closing.is_set()
            release = hold() if takes and self._start_thread() else None
            if release is not None:
                self._copies[key] = _Copy(fmt, ref, buffer, release)
                self._work.notify_all()
                return
        self._counters.add("disk_tier_dropped_objects")

    def _start_thread(self) -> bool:
        """Start the thread if needed; return whether there is one. The caller holds the lock."""
        if self._threads is None:
            shelf, evictor = self._opening.get(), self._evictor
            assert shelf is not None and evictor is not None
            # Not before it is known that this is no shelf.
            evictor.start()
            stuck, on_start = partial(self._counters.add, "stuck_threads"), self._on_thread_start
            self._threads = StorageThreads(
                "kvshelf-tier",
                1,
                self._run,
                shelf.backend,
                count_stuck=stuck,
                on_thread_start=on_start,
            )
            try:
                self._threads.start()
            except RuntimeError as error:
                # A missing copy must not fail a load or a store; the next one tries again.
                logger.debug("nothing is copied to the disk tier: %s", error)
                self._threads = None
                return False
        return self._threads.ready()

    def _next(self) -> _Copy | None:
        """Wait for a copy to write; None at the end."""
        with self._work:
            self._work.wait_for(lambda: self._copies or self._closing.is_set())
            if not self._copies:
                return None
            key, copy = self._copies.popitem(last=False)
            self._writing.append(key)
            return copy

    def _run(self) -> None:
        shelf = self._opening.get()
        assert self._threads is not None and shelf is not None
        while not self._threads.replaced() and (item := self._next()) is not None:
            try:
                if (size := memoryview(item.buffer).nbytes) > self.max_bytes or self._refused:
                    self._counters.add("disk_tier_dropped_objects")
                    continue
                mark(shelf.backend)
                if shelf.view(item.fmt).publish(item.ref, item.buffer) is not WriteResult.EXISTED:
                    self._counters.add("disk_tier_stored_bytes", size)
            except StorageError as error:
                # The guard logs it where the whole directory takes no writes or fails.
                refusals = BoundReachedError | NoSpaceStorageError | ReadOnlyStorageError
                if not (error.retryable or isinstance(error, refusals)):
                    self._log.warning("the disk tier %s was not written to: %s", self.path, error)
                self._counters.add("disk_tier_dropped_objects")
            except Exception as error:
                logger.error("the disk tier was not written to", exc_info=error)
            finally:
                with self._work:
                    self._writing.remove(_key(item.fmt, item.ref))
                    self._work.notify_all()
                item.release()

    # ---------------------------------------------------------------------------------- the end

    def drain(self, seconds: float) -> bool:
        """Wait until all copies are written and all uses recorded; return whether they were."""
        end = time.monotonic() + seconds
        with self._work:
            written = self._work.wait_for(lambda: not (self._copies or self._writing), seconds)
        return self._uses.flush(max(0.0, end - time.monotonic())) and written

    def close(self) -> None:
        """Write queued copies for at most a second, stop the thread. Idempotent."""
        if self._closing.is_set():
            return
        if self.available:
            self.drain(_CLOSE_SECONDS)
        self._uses.close(0.0)
        self._closing.set()
        with self._work:
            for copy in self._copies.values():
                copy.release()
            self._copies.clear()
            self._work.notify_all()
        if self._threads is not None:
            self._threads.close()
            self._threads.join(_CLOSE_SECONDS)
        if self._evictor is not None:
            self._evictor.close()
        self._opening.close()
