"""Records which chunks are used, so that the chunks that nobody uses are deleted first.

A hit uses all that it needs, from the beginning of the prompt: what of it the engine has in memory
already would be read by the next engine. Owns the thread that records uses (``kvshelf-uses``), how
often a use is recorded, and in which way:

============  ======================================================================================
way           what is done
============  ======================================================================================
``auto``      the access time of each object is set (:meth:`~kvshelf.backends.Backend.touch`); where
              the storage refuses that for an object, its chunk is marked
``marks``     chunks are marked (:mod:`kvshelf.capacity.marks`)
``rewrite``   the access time is set; where that is refused, the object is written anew with its
              own, verified bytes when it is older than half the age at which it would be deleted.
              So a bucket's lifecycle rule, which knows no other age, keeps what is used
``off``       nothing
============  ======================================================================================

Contracts
---------
* Best effort: a use that is lost has a chunk deleted early, which costs a miss. Nothing is recorded
  while a circuit breaker is open, unless it is open because the storage is full, or where the
  storage is read-only.
* A use of an object that was recorded less than :attr:`Uses.resolution` ago is not recorded again
  by this process. All ages are by the storage's clock.
* :meth:`Uses.hit` and :meth:`Uses.used` may be called on any thread and never block. What waits
  to be recorded is bounded; the oldest is dropped.
* No thread is started before the first use.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvshelf.backends import Touched
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.trials import try_to_start
from kvshelf.capacity import marks
from kvshelf.capacity.marks import KEY_BYTES, Batch, Marks
from kvshelf.config import Config
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    NoSpaceStorageError,
    NotRegularError,
    ObjectMissingError,
    StorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import Kind
from kvshelf.format.names import parse_path
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.pacing import GilPace
from kvshelf.shelf.view import ObjectRef, ShelfView

__all__ = ["How", "Marks", "Uses", "resolution"]

logger = logging.getLogger(__name__)

#: How uses are recorded.
How: TypeAlias = Literal["auto", "marks", "rewrite", "off"]
_Keys: TypeAlias = dict[tuple[str, Kind], set[bytes]]
#: Returns one whole, verified object by its name; None if it cannot.
Read: TypeAlias = Callable[[str], memoryview | None]

#: Bounds of :func:`resolution`.
_FINEST: Final = 60.0
_COARSEST: Final = 3600.0
#: Most hits that wait to be recorded, and most uses and marks that are remembered.
_MOST_HITS: Final = 1024
_MOST_USES: Final = 1 << 17
_MOST_MARKS: Final = 1 << 16
#: Seconds after a hit before its uses are recorded: its loads go first.
_DELAY_SECONDS: Final = 1.0
#: Parts of :attr:`Uses.resolution` after which marks are written.
_MARK_PARTS: Final = 4
#: Part of the times that marks are written after which they are merged.
_MERGE_PART: Final = 1 / 16
#: Seconds for which nothing is marked where marks were refused.
_REFUSED_SECONDS: Final = 3600.0
#: Seconds for which a storage's clock is known.
_CLOCK_SECONDS: Final = 3600.0
#: Seconds that :meth:`Uses.close` waits for the thread.
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
class _Hit:
    """Chunks of one kind."""

    view: ShelfView
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class _Named:
    """Objects by their names."""

    backend: GuardedBackend
    names: Iterable[str]
    read: Read | None


class Uses:
    """The uses that one process records.

    Parameters
    ----------
    counters : Counters
        Gets what is recorded: ``touched_objects``, ``marked_chunks``, ``rewritten_objects`` and
        ``rewritten_bytes``.
    resolution : float
        Seconds, see :func:`resolution`.
    how : str
        ``auto``, ``marks``, ``rewrite`` or ``off``.
    max_age : float, optional
        Seconds at which objects that are not written anew are deleted; needed for ``rewrite``.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.
    clock : Callable
        Seconds.

    Attributes
    ----------
    resolution : float

    Raises
    ------
    ConfigError
        If `how` is ``rewrite`` and `max_age` is absent.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        resolution: float = _COARSEST,
        how: How = "auto",
        max_age: float | None = None,
        on_thread_start: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if how == "rewrite" and max_age is None:
            raise ConfigError(
                "capacity.uses is rewrite and capacity.max_age is not set: objects are written anew"
                " at half of that age; set it to the age at which the bucket's rule deletes them"
            )
        self.resolution = resolution
        self._counters = counters
        self._how = how
        self._max_age = max_age
        #: The storage whose marks are merged next.
        self._to_merge: GuardedBackend | None = None
        self._rewrite_age = math.inf if max_age is None else max_age / 2
        self._on_thread_start = on_thread_start
        self._clock = clock
        self._log = RateLimitedLog(logger)
        self._queue: deque[_Hit | _Named | threading.Event] = deque(maxlen=_MOST_HITS)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wake = threading.Event()
        #: Nobody waits for loads to go first.
        self._hurry = threading.Event()
        #: When the use of a chunk, or of an object, is recorded again; the oldest first.
        self._due: OrderedDict[object, float] = OrderedDict()
        #: Keys to be marked, by storage, namespace folder and kind, and when they are written.
        self._marks: dict[GuardedBackend, _Keys] = {}
        self._marked = 0
        self._marks_due = math.inf
        #: Until when nothing is marked, by storage.
        self._refused: dict[GuardedBackend, float] = {}
        #: The difference between each storage's clock and ours, and when that was learned.
        self._offsets: dict[GuardedBackend, tuple[float, float]] = {}

    @classmethod
    def of(
        cls,
        config: Config,
        counters: Counters,
        *,
        on_thread_start: Callable[[], None] | None = None,
    ) -> Uses:
        """Return what records uses as a configuration says.

        Parameters
        ----------
        config : Config
            With `read_only` nothing is recorded. A client of a node server tells the server, which
            knows the age of chunks.
        counters, on_thread_start
            As for the class.

        Raises
        ------
        ConfigError
            As for the class.
        """
        capacity = config.capacity
        return cls(
            counters,
            resolution=_FINEST if config.server is not None else resolution(capacity.max_age),
            how="off" if config.read_only else capacity.uses,
            max_age=capacity.max_age,
            on_thread_start=on_thread_start,
        )

    # ------------------------------------------------------------- any thread

    def hit(self, view: ShelfView, chunks: Sequence[Chunk]) -> None:
        """Record that chunks were hit: what a hit needs of one kind, from the prompt's beginning.

        Parameters
        ----------
        view : ShelfView
            The objects of the kind. All shards are used.
        chunks : Sequence of Chunk
            It must not change.
        """
        if chunks:
            self._add(_Hit(view, chunks))

    def used(self, backend: GuardedBackend, names: Iterable[str], read: Read | None = None) -> None:
        """Record that objects were used, by their names.

        Parameters
        ----------
        backend : GuardedBackend
        names : Iterable of str
            Iterated over on the thread; it must not change.
        read : Callable, optional
            Returns a whole, verified object, to be written anew. Called on the thread; may block
            and raise StorageError. Without it objects are not written anew.
        """
        self._add(_Named(backend, names, read))

    def _add(self, item: _Hit | _Named) -> None:
        if self._how == "off" or self._closed:
            return
        self._queue.append(item)
        if not self._wake.is_set():
            self._wake.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._closed:
                return
            thread = threading.Thread(target=self._run, name="kvshelf-uses", daemon=True)
            # Where the system allows no thread now, the next hit tries again.
            if try_to_start(thread):
                self._thread = thread

    def flush(self, seconds: float) -> bool:
        """Record what waits, marks included; return whether that was done in time."""
        if self._thread is None and not self._queue:
            return True
        self._start()
        done = threading.Event()
        self._queue.append(done)
        self._hurry.set()
        self._wake.set()
        return done.wait(seconds)

    def close(self) -> None:
        """Record what waits, for at most a second, and end the thread. Idempotent."""
        if self._closed:
            return
        self.flush(_CLOSE_SECONDS)
        self._closed = True
        self._hurry.set()
        self._wake.set()

    # ------------------------------------------------------------- its thread

    def _run(self) -> None:
        if self._on_thread_start is not None:
            self._on_thread_start()
        while not self._closed:
            left = self._marks_due - self._clock()
            if self._wake.wait(None if left == math.inf else max(0.0, left)):
                self._hurry.wait(_DELAY_SECONDS)
            self._wake.clear()
            self._hurry.clear()
            try:
                self._work()
                self._merge_marks()
            except Exception as error:  # noqa: BLE001 - the thread must go on
                self._log.error("uses of chunks were not recorded", exc_info=error)

    def _work(self) -> None:
        """Record what waits, and write the marks that are due."""
        waiting: list[threading.Event] = []
        try:
            while self._queue and not self._closed:
                item = self._queue.popleft()
                if isinstance(item, threading.Event):
                    waiting.append(item)
                    continue
                try:
                    self._record(item)
                except StorageError as error:
                    logger.debug("uses were not recorded: %s", error)
            if waiting or self._clock() >= self._marks_due or self._marked >= _MOST_MARKS:
                self._write_marks()
        finally:
            for done in waiting:
                done.set()

    def _record(self, item: _Hit | _Named) -> None:
        if isinstance(item, _Named):
            self._record_named(item)
            return
        view = item.view.on_storage
        backend = view.backend
        if not _records(backend):
            return
        pace = GilPace()
        for chunk in item.chunks:
            pace.rest()
            key = view, chunk.key
            if self._closed:
                return
            if self._is_recent(key):
                continue
            refs = [ObjectRef(chunk, shard) for shard in range(view.fmt.shards)]
            names = [name for ref in refs for name in view.names(ref)]
            refused = self._touch(backend, names, pace)
            if refused and self._how == "rewrite":
                for ref in refs:
                    self._rewrite(backend, view.name(ref), _reader_of(item.view, ref))
            elif refused:
                self._mark(backend, view.folder(), view.fmt.kind, chunk.key)
            self._remember(key, self.resolution)

    def _record_named(self, item: _Named) -> None:
        backend = item.backend
        if not _records(backend):
            return
        pace = GilPace()
        for name in item.names:
            pace.rest()
            key = backend, name
            if self._closed:
                return
            if self._is_recent(key):
                continue
            refused = self._touch(backend, [name], pace)
            parsed = parse_path(name) if refused else None
            if parsed is not None and self._how != "rewrite":
                self._mark(backend, name.partition("/")[0], parsed.kind, parsed.key)
            elif parsed is not None and item.read is not None:
                self._rewrite(backend, name, item.read)
            self._remember(key, self.resolution)

    def _is_recent(self, key: object) -> bool:
        return self._clock() < self._due.get(key, -math.inf)

    def _remember(self, key: object, seconds: float) -> None:
        self._due[key] = self._clock() + seconds
        self._due.move_to_end(key)
        if len(self._due) > _MOST_USES:
            self._due.popitem(last=False)

    def _touch(self, backend: GuardedBackend, names: Sequence[str], pace: GilPace) -> bool:
        """Set access times; return whether another way is needed."""
        if self._how == "marks":
            return True
        touched = 0
        for name in names:
            touched += backend.touch(name) is Touched.TOUCHED
            pace.rest()
        if touched:
            self._counters.add("touched_objects", touched)
        return touched < len(names)

    # ------------------------------------------------------------- marks

    def _mark(self, backend: GuardedBackend, folder: str, kind: Kind, key: bytes) -> None:
        refused = self._clock() < self._refused.get(backend, -math.inf)
        if refused or self._marked >= _MOST_MARKS:
            return
        found = self._marks.setdefault(backend, {}).setdefault((folder, kind), set())
        short = key[:KEY_BYTES]
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
                        " early: %s. Allow this user to write below %s, or set capacity.uses to"
                        " off",
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
        """Now and then bound the number of files: perhaps nobody sweeps this shelf."""
        backend, self._to_merge = self._to_merge, None
        if backend is None or self._closed:
            return
        try:
            Marks.compact(backend, max_age=self._max_age, resolution=self.resolution)
        except StorageError as error:
            logger.debug("marks of used chunks were not merged: %s", error)

    # ------------------------------------------------------------- rewriting

    def _rewrite(self, backend: GuardedBackend, name: str, read: Read) -> None:
        """Write an object anew if it is old enough."""
        key = backend, "rewritten", name
        if self._is_recent(key):
            return
        info = backend.info(name)
        if info is None:
            return
        young = self._rewrite_age - (self._now(backend) - info.mtime)
        if young > 0:
            self._remember(key, young)
            return
        begin = time.monotonic()
        try:
            image = read(name)
        except (BadObjectError, NotRegularError, ObjectMissingError) as error:
            logger.debug("%s is not written anew: %s", name, error)
            return
        if image is None:
            return
        try:
            backend.write(name, [image], "replace")
        except StorageError as error:
            if error.retryable:
                raise
            self._remember(key, self.resolution)
            self._log.warning(
                "objects that are in use are not written anew, so they are deleted at the age that"
                " the storage's rule says: %s. Allow this engine to replace objects, or set"
                " capacity.uses to auto",
                error,
            )
            return
        self._remember(key, self._rewrite_age)
        self._counters.add("rewritten_objects")
        self._counters.add("rewritten_bytes", image.nbytes)
        # At most half of the bandwidth of one connection.
        self._hurry.wait(time.monotonic() - begin)

    def _now(self, backend: GuardedBackend) -> float:
        """Return the time by the storage's clock, which is asked now and then."""
        here = self._clock()
        known = self._offsets.get(backend)
        if known is None or here >= known[1] + _CLOCK_SECONDS:
            there = backend.now()
            known = (time.time() if there is None else there) - here, here
            self._offsets[backend] = known
        return known[0] + here


def _records(backend: GuardedBackend) -> bool:
    """Whether uses can be recorded at present: on a full storage they can."""
    return backend.touches and not backend.inner.properties.read_only


def _reader_of(view: ShelfView, ref: ObjectRef) -> Read:
    """Return what reads one object through a view, from a tier if one has it."""

    def read(_: str) -> memoryview:
        image = memoryview(bytearray(view.fmt.object_size(ref.shard, ref.chunk.tokens)))
        view.load(ref, image)
        return image

    return read
