"""Records which chunks are used, so that those that no request needs are deleted first.

A hit uses all chunks from the beginning of the prompt, also those that the engine has in memory
already: the next engine would read them. Owns the thread that records uses (``kvshelf-uses``), how
often a use is recorded, and in which way:

============  ======================================================================================
way           what is done
============  ======================================================================================
``auto``      the access time of each object is set (:meth:`~kvshelf.backends.Backend.touch`); where
              the storage refuses that for an object, its chunk is marked
              (:mod:`kvshelf.capacity.marks`)
``touch``     the access time is set, and where that is refused nothing is done: a disk tier, of
              which no program reads marks
``off``       nothing
============  ======================================================================================

Of tails only access times are set: no program reads marks of them, and they are not worth a write.

Contracts
---------
* Best effort: after a lost use a chunk may be deleted early, which costs a miss. Nothing is
  recorded while a circuit breaker is open, unless it is open because the storage is full, or where
  the storage is read-only.
* A use of an object that was recorded less than :attr:`Uses.resolution` ago is not recorded again
  by this process; of a tail, less than a minute ago at most. All ages are by the storage's clock.
* :meth:`Uses.note` and :meth:`Uses.note_names` may be called on any thread and never block. The
  queue is bounded; its oldest entries are dropped.
* No thread is started before the first use.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

from kvshelf.backends import Touched
from kvshelf.backends.guard import GuardedBackend
from kvshelf.background import Background
from kvshelf.capacity import marks
from kvshelf.capacity.marks import KEY_BYTES, Batch, Marks
from kvshelf.capacity.rules import KEEP_TAILS
from kvshelf.config import Config
from kvshelf.errors import (
    NoSpaceStorageError,
    StorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import Kind
from kvshelf.format.names import ParsedName, parse_path
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.pacing import GilPace
from kvshelf.shelf.view import ObjectRef, ShelfView

logger = logging.getLogger(__name__)

#: How uses are recorded.
How: TypeAlias = Literal["auto", "touch", "off"]
_Keys: TypeAlias = dict[tuple[str, Kind], set[bytes]]

#: Bounds of :func:`resolution`.
_FINEST: Final = 60.0
_COARSEST: Final = 3600.0
#: Least number of uses of a tail that are recorded within its age, if that many are noted.
_TAIL_PARTS: Final = 4
#: Most chunks and names that wait to be recorded, and most uses and marks that are remembered.
_MOST_WAITING: Final = 1 << 17
_MOST_USES: Final = 1 << 17
_MOST_MARKS: Final = 1 << 16
#: Seconds after a hit before its uses are recorded: its loads come first.
_DELAY_SECONDS: Final = 0.5
#: Parts of :attr:`Uses.resolution` after which marks are written.
_MARK_PARTS: Final = 4
#: Part of the times that marks are written after which they are merged.
_MERGE_PART: Final = 1 / 16
#: Seconds for which nothing is marked where marks were refused.
_REFUSED_SECONDS: Final = 3600.0
#: Seconds that :meth:`Uses.close` waits for the thread by default.
_CLOSE_SECONDS: Final = 1.0


def resolution(max_age: float | None) -> float:
    """Return how exactly the last use of a chunk is recorded, in seconds.

    Parameters
    ----------
    max_age : float or None
        Seconds after its last use at which a chunk is deleted; None: it is not.
    """
    return _COARSEST if max_age is None else max(_FINEST, min(max_age / 8, _COARSEST))


@dataclass(frozen=True, slots=True)
class _Noted:
    """What was used at one time.

    Attributes
    ----------
    backend : GuardedBackend
    uses : Iterator
        What each use is remembered by, and what returns the names of its objects.
    count : int
        How many they are.
    """

    backend: GuardedBackend
    uses: Iterator[tuple[object, Callable[[], Sequence[str]]]]
    count: int


class Uses:
    """The uses that one process records.

    Parameters
    ----------
    counters : Counters
        Gets what is recorded: ``touched_objects`` and ``marked_chunks``.
    resolution : float
        Seconds, see :func:`resolution`.
    how : str
        ``auto``, ``touch`` or ``off``.
    max_age : float, optional
        Seconds at which chunks that are not used are deleted.
    keep_tails : float, optional
        Seconds after its last use at which a tail is deleted.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.
    clock : Callable
        Seconds.

    Attributes
    ----------
    resolution : float
    """

    def __init__(
        self,
        counters: Counters,
        *,
        resolution: float = _COARSEST,
        how: How = "auto",
        max_age: float | None = None,
        keep_tails: float | None = None,
        on_thread_start: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resolution = resolution
        self._of_tails = min(resolution, _FINEST, (keep_tails or math.inf) / _TAIL_PARTS)
        self._counters = counters
        self._how = how
        self._max_age = max_age
        #: The storage whose marks are merged next.
        self._to_merge: GuardedBackend | None = None
        self._clock = clock
        self._log = RateLimitedLog(logger)
        self._thread = Background("kvshelf-uses", self._step, on_start=on_thread_start)
        self._lock = threading.Lock()
        self._queue: deque[_Noted] = deque()
        #: How many chunks and names wait in the queue, and since when.
        self._waiting = 0
        self._waits_since = 0.0
        #: Set when all uses noted before are recorded.
        self._flushes: list[threading.Event] = []
        #: Set by flush and close: uses are recorded now, without the delay that lets loads go
        #: first.
        self._hurry = threading.Event()
        #: When the use of a chunk, or of an object, is recorded again; the oldest first.
        self._due: OrderedDict[object, float] = OrderedDict()
        #: Keys to be marked, by storage, namespace folder and kind, and when they are written.
        self._marks: dict[GuardedBackend, _Keys] = {}
        self._marked = 0
        self._marks_due = math.inf
        #: Until when nothing is marked, by storage.
        self._refused: dict[GuardedBackend, float] = {}

    @classmethod
    def of(
        cls,
        config: Config,
        counters: Counters,
        *,
        on_thread_start: Callable[[], None] | None = None,
    ) -> Uses:
        """Return the recorder of uses for a configuration.

        Parameters
        ----------
        config : Config
            With `read_only` nothing is recorded. A client of a node server reports to the server,
            which knows the age of chunks.
        counters, on_thread_start
            As for the class.
        """
        capacity = config.capacity
        return cls(
            counters,
            resolution=_FINEST if config.server is not None else resolution(capacity.max_age),
            how="off" if config.read_only else "auto",
            max_age=capacity.max_age,
            keep_tails=KEEP_TAILS,
            on_thread_start=on_thread_start,
        )

    # ------------------------------------------------------------- any thread

    def note(self, view: ShelfView, chunks: Sequence[Chunk]) -> None:
        """Note that chunks were used: what a hit needs of one kind, from the prompt's beginning.

        Parameters
        ----------
        view : ShelfView
            The objects of the kind. All shards are used.
        chunks : Sequence of Chunk
            It must not change.
        """
        found = view.on_storage
        uses = (((found, chunk.key), partial(_names_of, view, chunk)) for chunk in chunks)
        self._add(_Noted(found.backend, uses, len(chunks)))

    def note_names(self, backend: GuardedBackend, names: Sequence[str]) -> None:
        """Note that objects were used, by their names.

        Parameters
        ----------
        backend : GuardedBackend
        names : Sequence of str
            It must not change. Names of other things are left out.
        """
        uses = (((backend, name), lambda name=name: [name]) for name in names)
        self._add(_Noted(backend, uses, len(names)))

    def _add(self, noted: _Noted) -> None:
        if self._how == "off" or self.closed or not noted.count:
            return
        with self._lock:
            first = not self._queue
            if first:
                self._waits_since = time.monotonic()
            self._queue.append(noted)
            self._waiting += noted.count
            while self._waiting > _MOST_WAITING and len(self._queue) > 1:
                self._waiting -= self._queue.popleft().count
        # Where the system allows no thread now, the next use tries again.
        if first or not self._thread.running:
            self._thread.start()
            self._thread.wake()

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._thread.closed

    def flush(self, seconds: float) -> bool:
        """Record all queued uses, marks included; return whether that was done in time."""
        if not self._queue and not self._thread.running:
            return True
        done = threading.Event()
        with self._lock:
            self._flushes.append(done)
        self._hurry.set()
        self._thread.start()
        self._thread.wake()
        return done.wait(seconds)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Record queued uses, for a limited time, and end the thread. Idempotent."""
        if not self.closed:
            self.flush(seconds)
            self._thread.close()
            self._hurry.set()

    # ------------------------------------------------------------- its thread

    def _step(self) -> float | None:
        """Record queued uses; return the seconds until the next step."""
        early = self._waits_since + _DELAY_SECONDS - time.monotonic() if self._queue else 0.0
        if early > 0 and not self._hurry.is_set():
            return early
        self._hurry.clear()
        try:
            self._work()
            self._merge_marks()
        except Exception as error:  # noqa: BLE001 - the thread must go on
            self._log.error("uses of chunks were not recorded", exc_info=error)
        left = self._marks_due - self._clock()
        return None if left == math.inf else max(0.0, left)

    def _work(self) -> None:
        """Record queued uses, and write the marks that are due."""
        with self._lock:
            flushes, self._flushes = self._flushes, []
        try:
            while not self.closed and (noted := self._next()) is not None:
                try:
                    self._record(noted)
                except StorageError as error:
                    logger.debug("uses were not recorded: %s", error)
            if flushes or self._clock() >= self._marks_due or self._marked >= _MOST_MARKS:
                self._write_marks()
        finally:
            for done in flushes:
                done.set()

    def _next(self) -> _Noted | None:
        with self._lock:
            if not self._queue:
                return None
            noted = self._queue.popleft()
            self._waiting -= noted.count
            return noted

    def _record(self, noted: _Noted) -> None:
        backend = noted.backend
        if not _records(backend):
            return
        pace = GilPace()
        for key, find in noted.uses:
            pace.rest()
            if self.closed:
                return
            if self._is_recent(key):
                continue
            names = find()
            parsed = parse_path(names[0])
            if parsed is None:
                continue
            is_tail = parsed.tail_tokens is not None
            if self._touch(backend, names, pace) and not is_tail and self._how != "touch":
                self._mark(backend, parsed)
            self._remember(key, self._of_tails if is_tail else self.resolution)

    def _is_recent(self, key: object) -> bool:
        return self._clock() < self._due.get(key, -math.inf)

    def _remember(self, key: object, seconds: float) -> None:
        now, due = self._clock(), self._due
        due[key] = now + seconds
        due.move_to_end(key)
        while len(due) > _MOST_USES or (due and next(iter(due.values())) <= now):
            due.popitem(last=False)

    def _touch(self, backend: GuardedBackend, names: Sequence[str], pace: GilPace) -> bool:
        """Set access times; return whether that is refused."""
        touched = 0
        for name in names:
            touched += backend.touch(name) is Touched.TOUCHED
            pace.rest()
        if touched:
            self._counters.add("touched_objects", touched)
        return touched < len(names)

    # ------------------------------------------------------------- marks

    def _mark(self, backend: GuardedBackend, parsed: ParsedName) -> None:
        refused = self._clock() < self._refused.get(backend, -math.inf)
        if refused or self._marked >= _MOST_MARKS:
            return
        assert parsed.namespace is not None
        chunks = self._marks.setdefault(backend, {})
        found = chunks.setdefault((parsed.namespace, parsed.kind), set())
        short = parsed.key[:KEY_BYTES]
        if short in found:
            return
        found.add(short)
        self._marked += 1
        self._marks_due = min(self._marks_due, self._clock() + self.resolution / _MARK_PARTS)

    def _write_marks(self) -> None:
        left: dict[GuardedBackend, _Keys] = {}
        for backend, chunks in self._marks.items():
            batches = [
                Batch(folder, 0.0, b"".join(keys), kind) for (folder, kind), keys in chunks.items()
            ]
            try:
                marks.write(backend, batches)
            except StorageError as error:
                if error.retryable or isinstance(error, NoSpaceStorageError):
                    left[backend] = chunks
                    logger.debug("marks of used chunks were not written: %s", error)
                else:
                    self._refused[backend] = self._clock() + _REFUSED_SECONDS
                    self._log.warning(
                        "uses of chunks on %s are not recorded, so chunks in use may be deleted"
                        " early: %s. Allow this user to write below %s",
                        backend.url,
                        error,
                        marks.MARKS,
                    )
                continue
            self._counters.add("marked_chunks", sum(map(len, chunks.values())))
            if random.random() < _MERGE_PART:  # noqa: S311 - no secret
                self._to_merge = backend
        self._marks = left
        self._marked = sum(len(keys) for chunks in left.values() for keys in chunks.values())
        self._marks_due = self._clock() + self.resolution / _MARK_PARTS if left else math.inf

    def _merge_marks(self) -> None:
        """Now and then bound the number of files: perhaps no process sweeps this shelf."""
        backend, self._to_merge = self._to_merge, None
        if backend is None or self.closed:
            return
        try:
            Marks.compact(backend, max_age=self._max_age, resolution=self.resolution)
        except StorageError as error:
            logger.debug("marks of used chunks were not merged: %s", error)


def _records(backend: GuardedBackend) -> bool:
    """Whether uses can be recorded at present: on a full storage they can."""
    return backend.touches and not backend.inner.properties.read_only


def _names_of(view: ShelfView, chunk: Chunk) -> list[str]:
    """Return the names of a chunk's objects."""
    refs = [ObjectRef(chunk, shard) for shard in range(view.fmt.shards)]
    return [name for ref in refs for name in view.on_storage.names(ref)]
