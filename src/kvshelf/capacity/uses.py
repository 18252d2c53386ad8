"""Records which chunks are used, so that those that no request needs are deleted first.

A hit uses all chunks from the beginning of the prompt, also those that the engine has in memory
already: the next engine would read them. Owns the thread that records uses (``kvshelf-uses``), and
how often a use is recorded; how is the storage's concern
(:meth:`kvshelf.backends.base.Backend.touch`): by the access time, by the change of an entry, or by
a copy of the object onto itself.

A storage that only knows copies (S3) copies an object that was last written longer ago than half of
the age at which keepers delete chunks; where none deletes any, nothing is copied.

Contracts
---------
* Best effort: after a lost use a chunk may be deleted early, which costs a miss. Nothing is
  recorded while a circuit breaker is open, unless it is open because the storage is full, or where
  the storage is read-only.
* A use of an object that was recorded less than :attr:`Uses.resolution` ago is not recorded again
  by this process; of a tail, less than a minute ago at most.
* :meth:`Uses.note` may be called on any thread and never blocks. The queue is bounded; its oldest
  entries are dropped.
* No thread is started before the first use.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

from kvshelf.backends import Touched
from kvshelf.backends.guard import GuardedBackend
from kvshelf.background import Background, GilPace
from kvshelf.capacity import keepers, limits
from kvshelf.capacity.parallel import PatientBackend
from kvshelf.capacity.sweep import KEEPERS
from kvshelf.errors import StorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.names import parse_path
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.view import NamespaceView, ObjectRef, ShelfView

logger = logging.getLogger(__name__)

_Place = NamespaceView | GuardedBackend


def resolution(age: float | None) -> float:
    """Return how exactly the last use of a chunk is recorded, in seconds.

    Parameters
    ----------
    age : float or None
        Seconds after its last use at which a chunk is deleted; None: it is not.
    """
    parts = math.inf if age is None else age / limits.USE_PARTS
    return max(limits.FINEST, min(parts, limits.COARSEST))


class Uses:
    """The uses that one process records.

    Parameters
    ----------
    counters : Counters
        Gets ``touched_objects``.
    max_age : float, optional
        Seconds at which chunks that are not used are deleted by this process.
    every : float, optional
        Seconds after which a use is recorded again, whatever keepers say.
    off : bool
        Record nothing.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.

    Attributes
    ----------
    resolution : float
        Seconds, see :func:`resolution`; as exact as what keepers say requires.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        max_age: float | None = None,
        every: float | None = None,
        off: bool = False,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self.resolution = resolution(max_age) if every is None else every
        self._counters = counters
        self._max_age = max_age
        self._asks = every is None
        self._off = off
        #: The age at which chunks are deleted, and when keepers may be asked again.
        self._age = max_age
        self._ask_at = -math.inf
        self._log = RateLimitedLog(logger)
        self._thread = Background("kvshelf-uses", self._step, on_start=on_thread_start)
        self._patient = WeakKeyDictionary[GuardedBackend, PatientBackend]()
        self._lock = threading.Lock()
        self._queue: deque[tuple[_Place, Sequence[Chunk] | Sequence[str]]] = deque()
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

    # ------------------------------------------------------------- any thread

    def note(
        self, place: ShelfView | GuardedBackend, used: Sequence[Chunk] | Sequence[str]
    ) -> None:
        """Note that chunks were used: what a hit needs of one kind, from the prompt's beginning.

        Parameters
        ----------
        place : ShelfView or GuardedBackend
            The objects of the kind, of which all shards are used; or the storage of named objects.
        used : Sequence of Chunk or str
            Chunks of the view, or names on the storage, of which those of other things are left
            out. It must not change.
        """
        if self._off or self.closed or not used:
            return
        place = place.on_storage if isinstance(place, ShelfView) else place
        with self._lock:
            first = not self._queue
            if first:
                self._waits_since = time.monotonic()
            self._queue.append((place, used))
            self._waiting += len(used)
            while self._waiting > limits.MOST_WAITING and len(self._queue) > 1:
                self._waiting -= len(self._queue.popleft()[1])
        # Where the system allows no thread now, the next use tries again.
        if first or not self._thread.running:
            self._thread.start()
            self._thread.wake()

    @property
    def closed(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._thread.closed

    def flush(self, seconds: float) -> bool:
        """Record all queued uses; return whether that was done in time."""
        if not self._queue and not self._thread.running:
            return True
        flushed = threading.Event()
        with self._lock:
            self._flushes.append(flushed)
        self._hurry.set()
        self._thread.start()
        self._thread.wake()
        return flushed.wait(seconds)

    def close(self, seconds: float = limits.CLOSE_SECONDS) -> None:
        """Record queued uses, for a limited time, and end the thread. Idempotent."""
        if not self.closed:
            self.flush(seconds)
            self._thread.close()
            self._hurry.set()

    # ------------------------------------------------------------- its thread

    def _step(self) -> float | None:
        """Record queued uses; return the seconds until the next step."""
        early = self._waits_since + limits.DELAY_SECONDS - time.monotonic() if self._queue else 0.0
        if early > 0 and not self._hurry.is_set():
            return early
        self._hurry.clear()
        with self._lock:
            flushes, self._flushes = self._flushes, []
        try:
            while not self.closed and self._queue:
                with self._lock:
                    storage, used = self._queue.popleft()
                    self._waiting -= len(used)
                self._record(storage, used)
        except Exception as error:  # noqa: BLE001 - the thread must go on
            self._log.error("uses of chunks were not recorded", exc_info=error)
        finally:
            for flushed in flushes:
                flushed.set()
        return None

    def _record(self, place: _Place, used: Sequence[Chunk] | Sequence[str]) -> None:
        backend = place.backend if isinstance(place, NamespaceView) else place
        # On a full storage uses can be recorded.
        if backend.inner.properties.read_only or not backend.touches:
            return
        patient = self._patient.setdefault(backend, PatientBackend(backend.inner))
        self._ask_keepers(patient)
        if backend.inner.properties.renews and self._age is None:
            return
        touched_before = time.time() - (self._age or 0.0) * limits.COPY_PART
        pace = GilPace()
        for item in used:
            pace.rest()
            key = place, item if isinstance(item, str) else item.key
            if self.closed:
                return
            if time.monotonic() < self._due.get(key, -math.inf):
                continue
            names = _names_of(place, item)
            parsed = parse_path(names[0])
            if parsed is None:
                continue
            touched, failed = 0, False
            for name in names:
                try:
                    touch = partial(backend.touch, name, touched_before)
                    touched += patient.make(name, touch) is Touched.TOUCHED
                except StorageError as error:
                    # It takes the use of no other object with it.
                    logger.debug("a use was not recorded: %s", error)
                    failed = True
                pace.rest()
            if touched:
                self._counters.add("touched_objects", touched)
            if not failed:
                is_tail = parsed.tail_tokens is not None
                self._remember(key, limits.FINEST if is_tail else self.resolution)

    def _ask_keepers(self, patient: PatientBackend) -> None:
        """Learn at which age chunks are deleted."""
        now = time.monotonic()
        if not self._asks or now < self._ask_at:
            return
        self._ask_at = now + limits.ASK_SECONDS
        with suppress(StorageError):
            bound_age = patient.make(KEEPERS, partial(keepers.evicts_after, patient.inner))
            ages = (self._max_age, bound_age)
            self._age = min((age for age in ages if age is not None), default=None)
            self.resolution = resolution(self._age)

    def _remember(self, key: object, seconds: float) -> None:
        now, due_at = time.monotonic(), self._due
        due_at[key] = now + seconds
        due_at.move_to_end(key)
        while len(due_at) > limits.MOST_USES or (due_at and next(iter(due_at.values())) <= now):
            due_at.popitem(last=False)


def _names_of(place: _Place, item: Chunk | str) -> list[str]:
    """Return the names of a chunk's objects, or that of an object."""
    if isinstance(item, str):
        return [item]
    assert isinstance(place, NamespaceView)
    refs = [ObjectRef(item, shard) for shard in range(place.fmt.shards)]
    return [name for ref in refs for name in place.names(ref)]
