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
* :meth:`Uses.note` and :meth:`Uses.note_names` may be called on any thread and never block. The
  queue is bounded; its oldest entries are dropped.
* No thread is started before the first use.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from kvshelf.backends import Touched
from kvshelf.backends.guard import GuardedBackend
from kvshelf.background import Background
from kvshelf.capacity import keepers
from kvshelf.capacity.parallel import PatientBackend
from kvshelf.capacity.visit import KEEPERS
from kvshelf.config import Config
from kvshelf.errors import StorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.names import parse_path
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.pacing import GilPace
from kvshelf.shelf.view import ObjectRef, ShelfView

logger = logging.getLogger(__name__)

#: Bounds of :func:`resolution`.
_FINEST: Final = 60.0
_COARSEST: Final = 3600.0
#: Parts of the age of eviction after which a use is recorded, and an object copied.
_PARTS: Final = 8
_ANEW_PART: Final = 0.5
#: Seconds from one question of what keepers say to the next.
_ASK_SECONDS: Final = 60.0
#: Most chunks and names that wait to be recorded, and most uses that are remembered.
_MOST_WAITING: Final = 1 << 17
_MOST_USES: Final = 1 << 17
#: Seconds after a hit before its uses are recorded: its loads come first.
_DELAY_SECONDS: Final = 0.5
#: Seconds that :meth:`Uses.close` waits for the thread by default.
_CLOSE_SECONDS: Final = 1.0


def resolution(age: float | None) -> float:
    """Return how exactly the last use of a chunk is recorded, in seconds.

    Parameters
    ----------
    age : float or None
        Seconds after its last use at which a chunk is deleted; None: it is not.
    """
    return _COARSEST if age is None else max(_FINEST, min(age / _PARTS, _COARSEST))


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
        return cls(
            counters,
            max_age=config.capacity.max_age,
            every=_FINEST if config.server is not None else None,
            off=config.read_only,
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
        if self._off or self.closed or not noted.count:
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
        """Record all queued uses; return whether that was done in time."""
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
        with self._lock:
            flushes, self._flushes = self._flushes, []
        try:
            while not self.closed and (noted := self._next()) is not None:
                self._record(noted)
        except Exception as error:  # noqa: BLE001 - the thread must go on
            self._log.error("uses of chunks were not recorded", exc_info=error)
        finally:
            for done in flushes:
                done.set()
        return None

    def _next(self) -> _Noted | None:
        with self._lock:
            if not self._queue:
                return None
            noted = self._queue.popleft()
            self._waiting -= noted.count
            return noted

    def _record(self, noted: _Noted) -> None:
        backend, properties = noted.backend, noted.backend.inner.properties
        # On a full storage uses can be recorded.
        if properties.read_only or not backend.touches:
            return
        patient = self._patient.setdefault(backend, PatientBackend(backend.inner))
        self._ask_keepers(patient)
        if properties.renews and self._age is None:
            return
        before = time.time() - (self._age or 0.0) * _ANEW_PART
        pace = GilPace()
        for key, find in noted.uses:
            pace.rest()
            if self.closed:
                return
            if time.monotonic() < self._due.get(key, -math.inf):
                continue
            touched, failed, names = 0, False, find()
            parsed = parse_path(names[0])
            if parsed is None:
                continue
            for name in names:
                try:
                    touch = partial(backend.touch, name, before)
                    touched += patient.make(name, touch) is Touched.TOUCHED
                except StorageError as error:
                    # It takes the use of no other object with it.
                    logger.debug("a use was not recorded: %s", error)
                    failed = True
                pace.rest()
            if touched:
                self._counters.add("touched_objects", touched)
            if not failed:
                self._remember(key, self.resolution if parsed.tail_tokens is None else _FINEST)

    def _ask_keepers(self, patient: PatientBackend) -> None:
        """Learn at which age chunks are deleted."""
        now = time.monotonic()
        if not self._asks or now < self._ask_at:
            return
        self._ask_at = now + _ASK_SECONDS
        with suppress(StorageError):
            asked = patient.make(KEEPERS, partial(keepers.evicts_after, patient.inner))
            ages = (self._max_age, asked)
            self._age = min((age for age in ages if age is not None), default=None)
            self.resolution = resolution(self._age)

    def _remember(self, key: object, seconds: float) -> None:
        now, due = time.monotonic(), self._due
        due[key] = now + seconds
        due.move_to_end(key)
        while len(due) > _MOST_USES or (due and next(iter(due.values())) <= now):
            due.popitem(last=False)


def _names_of(view: ShelfView, chunk: Chunk) -> list[str]:
    """Return the names of a chunk's objects."""
    refs = [ObjectRef(chunk, shard) for shard in range(view.fmt.shards)]
    return [name for ref in refs for name in view.on_storage.names(ref)]
