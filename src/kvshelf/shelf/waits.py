"""Waits: requests that wait until named objects are on the shelf.

One engine stores the KV of a prompt while another waits for it. The waiting side names the
*pieces* that it needs, in their order: one kind of KV of one chunk or tail each. Owns the thread
that probes the storage for the pieces of all waits, and how often it does.

A piece is there when its objects of all shards have the right sizes. Nothing is remembered but
which pieces were seen: no misses, and no failed loads. A piece that vanishes after it was seen
still counts as seen; the load finds out.

All waits are probed together, each object once. Of each wait only the next missing object is; when
it appears, more and more of those behind it. The pause between two rounds follows from their cost:
rounds take a bounded share of one core, a smaller one when nothing has appeared for a while, except
on a storage of low latency, where the pause is 20 milliseconds at most. Now and then the markers of
producers that gave up are probed too.

On a local filesystem the thread is woken when the last object of a wait appears
(:mod:`kvshelf.shelf.notices`). While it expects that of all waits, it probes every
:data:`_NOTICED` seconds only: for what comes before, and for what the system fails to tell.

Contracts
---------
* :class:`Wait` and :class:`WaitService` are used on an engine's step thread: their calls take
  microseconds and never touch the storage. A wait's state is written by the background thread.
* A storage error or an open circuit breaker means "not yet". Only its caller ends a wait that takes
  too long (:meth:`Wait.cancel`).
* A thread that is stuck in the storage is replaced (:mod:`kvshelf.shelf.threads`). The new thread
  continues all waits.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from kvshelf.background import GilPace
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import Kind, kind_key
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.threads import StorageThreads
from kvshelf.shelf.view import ObjectRef, Presence, ShelfView, find_pieces

if TYPE_CHECKING:
    from kvshelf.shelf.notices import Notice

logger = logging.getLogger(__name__)

#: One kind of KV of one chunk or tail.
AwaitedPiece: TypeAlias = "tuple[Kind, Chunk]"
#: One shard of a piece.
_Object: TypeAlias = "tuple[Kind, Chunk, range]"

#: Share of one core that rounds may take, the smaller one when no piece has appeared for a while.
_SHARE: Final = 0.1
_QUIET_SHARE: Final = 0.03
_QUIET_SECONDS: Final = 1.0
#: Bounds of the pause between two rounds. On a storage of high latency the shortest is the longest
#: of others.
_SHORTEST: Final = 2e-3
_LONGEST: Final = 20e-3
#: The pause while notices are expected.
_NOTICED: Final = 0.1
#: The pause after an error.
_AFTER_ERROR: Final = 0.1
#: Least cost of one probe of a high-latency storage: other threads and a server work on it as well.
_HIGH_LATENCY_COST: Final = 0.2e-3
#: Time between two looks for markers.
_MARKER_SECONDS: Final = 0.5
#: Most objects of one wait in one round.
_MOST_AHEAD: Final = 256
#: Objects of a low-latency storage between two pauses for other threads.
_BATCH: Final = 32


@dataclass(eq=False, repr=False)
class Wait:
    """One request that waits; made by :meth:`WaitService.submit`.

    Attributes
    ----------
    complete : bool
        All pieces were seen.
    gave_up : bool
        The producer's marker was seen, and not all pieces were.
    seen : int
        Number of leading pieces that were seen.
    """

    _service: WaitService
    _pieces: Sequence[AwaitedPiece]
    _attempt: str
    complete: bool = False
    gave_up: bool = False
    seen: int = 0
    #: Objects that were seen, and how many to probe in the next round; 0: one.
    _found: int = 0
    _ahead: int = 0
    #: Whether the marker was seen: it counts if the pieces, probed once more, are missing.
    _lost: bool = False

    @property
    def ended(self) -> bool:
        """Whether the wait is complete or failed."""
        return self.complete or self.gave_up

    def cancel(self) -> None:
        """Wait no longer; the state stays what it is."""
        self._service._forget(self)

    @functools.cached_property
    def _objects(self) -> list[_Object]:
        """The objects of all pieces, in order."""
        shards = self._service._shards
        return [
            (kind, chunk, range(shard, shard + 1))
            for kind, chunk in self._pieces
            for shard in range(shards[kind])
        ]

    def _take(self, objects: Sequence[_Object], there: Sequence[bool]) -> int:
        """Use the answers to what was probed; return how many pieces were seen by them."""
        count = there.index(False) if False in there else len(there)
        self._found += count
        self._ahead = min(4 * self._ahead + 4, _MOST_AHEAD) if count == len(there) else 0
        return sum(of.stop == self._service._shards[kind] for kind, _, of in objects[:count])


class WaitService:
    """Probes one shelf for the pieces of all waits.

    Parameters
    ----------
    views : Mapping[Kind, ShelfView]
        The objects of each kind of one namespace.
    counters : Counters
    on_thread_start : Callable, optional
        Called first on each thread, to set its processors.

    Raises
    ------
    RuntimeError
        If the system allows no thread.
    """

    def __init__(
        self,
        views: Mapping[Kind, ShelfView],
        *,
        counters: Counters,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._views = dict(views)
        self._shards = {kind: view.fmt.shards for kind, view in self._views.items()}
        self._backend = next(iter(self._views.values())).backend
        self._counters = counters
        self._log = RateLimitedLog(logger)
        self._lock = threading.Lock()
        self._waits: dict[Wait, None] = {}
        #: The notice of each wait's last object; None where there is none. Of the thread alone.
        self._notices: dict[Wait, Notice | None] = {}
        self._closed = False
        #: Wakes the thread that probes, and sleeping steps.
        self._wake = threading.Event()
        self._progress = threading.Event()
        self._progress_at = time.monotonic()
        self._markers_due = 0.0
        self._threads = StorageThreads(
            "kvshelf-wait",
            1,
            self._run,
            self._backend,
            count_stuck=lambda: counters.add("stuck_threads"),
            on_thread_start=on_thread_start,
        )
        self._threads.start()

    # ------------------------------------------------------------------------ on the step thread

    def submit(self, pieces: Sequence[AwaitedPiece], attempt: str) -> Wait:
        """Begin to wait; returns at once.

        Parameters
        ----------
        pieces : Sequence of (Kind, Chunk)
            What to wait for, of kinds that the namespace has, in the order in which it is needed.
            Must not be changed afterwards.
        attempt : str
            Id of the producer's attempt, 32 hex digits, whose marker ends the wait; empty: none.

        Returns
        -------
        Wait
            Complete if there are no pieces. After :meth:`close` it never ends.
        """
        wait = Wait(self, pieces, attempt, complete=not pieces)
        if pieces:
            with self._lock:
                if not self._closed:
                    self._waits[wait] = None
            self._threads.ready()
            self._wake.set()
        return wait

    def sleep(self, seconds: float) -> bool:
        """Sleep until any wait makes progress, for at most `seconds`.

        Returns
        -------
        bool
            Whether a piece was seen, or a wait has ended, since the last call that returned True.
        """
        # A thread that could not be started before may start now.
        self._threads.ready()
        if not self._progress.wait(seconds):
            return False
        self._progress.clear()
        return True

    def close(self) -> None:
        """Forget all waits, and stop the threads. Idempotent."""
        self._threads.close()
        with self._lock:
            self._closed = True
            self._waits.clear()
        self._wake.set()

    def _forget(self, wait: Wait) -> None:
        with self._lock:
            self._waits.pop(wait, None)

    # ---------------------------------------------------------------------- on background threads

    def _run(self) -> None:
        while True:
            # What is done before a wake-up is looked at behind this.
            self._wake.clear()
            if self._threads.replaced():
                # The wake-up may have been another thread's.
                self._wake.set()
                return
            with self._lock:
                waits, closed = list(self._waits), self._closed
            pause = self._poll(waits) if waits else None
            for wait in [wait for wait in self._notices if wait not in self._waits]:
                notice = self._notices.pop(wait)
                if notice is not None:
                    notice.close()
            if closed:
                self._wake.set()
                return
            self._wake.wait(pause)

    def _poll(self, waits: Sequence[Wait]) -> float:
        """Probe for all waits; return the pause behind that, in seconds."""
        high_latency = self._backend.properties.high_latency
        shortest = _LONGEST if high_latency else _SHORTEST
        cost = len(waits) * _HIGH_LATENCY_COST if high_latency else 0.0
        try:
            # Before all others.
            hopeful = [wait for wait, notice in self._notices.items() if notice and notice.came]
            while hopeful:
                hopeful = self._round(hopeful)
            used = time.thread_time()
            hopeful = self._round(waits)
            cost = max(cost, time.thread_time() - used)
            while hopeful:
                hopeful = self._round(hopeful)
            if time.monotonic() >= self._markers_due:
                self._look_for_markers(waits)
            quiet = time.monotonic() - self._progress_at > _QUIET_SECONDS
            # A high-latency storage is spared also beyond the longest pause.
            longest = math.inf if high_latency else _LONGEST
            pause = max(shortest, min(cost / (_QUIET_SHARE if quiet else _SHARE), longest))
            return max(pause, _NOTICED) if self._expects_notices(waits) else pause
        except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
            self._counters.add("probe_errors")
            self._log.error("waiting for objects failed; it is tried again", exc_info=error)
            return _AFTER_ERROR

    def _expects_notices(self, waits: Sequence[Wait]) -> bool:
        """Return whether notices of all waits are to come; ask for those of new waits."""
        root = self._backend.properties.local_path
        if not root or self._threads.replaced():
            return False
        new = [wait for wait in waits if wait not in self._notices and not wait.ended]
        for wait in new:
            self._notices[wait] = self._notice_of(wait, root)
        notices = [self._notices[wait] for wait in waits if not wait.ended]
        # What came before it was watched for is probed soon.
        return not new and all(notice is not None and not notice.came for notice in notices)

    def _notice_of(self, wait: Wait, root: str) -> Notice | None:
        kind, chunk, shard = wait._objects[-1]
        name = self._views[kind].on_storage.name(ObjectRef(chunk, shard.start))
        try:
            from kvshelf.shelf.notices import Notice

            return Notice(os.path.join(root, name), self._wake.set)
        except FileNotFoundError:
            # The folder has no object yet.
            return None
        except (OSError, RuntimeError) as error:
            self._log.warning(
                "no notice of new files in %s (%s), so requests that wait for objects probe for"
                " them more often: raise fs.inotify.max_user_watches and max_user_instances",
                *(root, error),
                about=root,
            )
            return None

    def _round(self, waits: Sequence[Wait]) -> list[Wait]:
        """Probe what these waits need next; return those of which more may be there."""
        objects_of = [
            (wait, wait._objects[wait._found : wait._found + max(1, wait._ahead)]) for wait in waits
        ]
        there = self._find([item for _, objects in objects_of for item in objects])
        if self._threads.replaced():
            # Another thread probes the same.
            return []
        progress = [
            (wait, wait._take(objects, [there[_name(item)] for item in objects]))
            for wait, objects in objects_of
        ]
        with self._lock:
            for wait, new_objects in progress:
                if wait not in self._waits:
                    continue
                wait.seen += new_objects
                wait.complete = wait.seen == len(wait._pieces)
                wait.gave_up = wait._lost and not wait.complete and not wait._ahead
                if wait.ended:
                    del self._waits[wait]
                if new_objects or wait.ended:
                    self._progress_at = time.monotonic()
                    self._progress.set()
        return [wait for wait in waits if wait._ahead and wait in self._waits]

    def _find(self, objects: Sequence[_Object]) -> dict[tuple[bytes, range], bool]:
        """Return which objects are there.

        In one call of a high-latency storage, else in batches.
        """
        object_of = {_name(item): item for item in objects}
        names, there = list(object_of), dict[tuple[bytes, range], bool]()
        step = len(names) if self._backend.properties.high_latency else _BATCH
        pace = GilPace()
        for begin in range(0, len(names), step):
            batch = names[begin : begin + step]
            answers = find_pieces(self._views, [object_of[name] for name in batch])
            self._counters.add("probes", len(answers))
            self._counters.add("probe_errors", answers.count([Presence.ERROR]))
            there |= zip(batch, [answer == [Presence.PRESENT] for answer in answers], strict=True)
            pace.rest()
        return there

    def _look_for_markers(self, waits: Sequence[Wait]) -> None:
        self._markers_due = time.monotonic() + _MARKER_SECONDS
        waits = [wait for wait in waits if wait._attempt and not wait.ended]
        view = next(iter(self._views.values())).on_storage
        for wait, lost in zip(waits, view.gave_up([w._attempt for w in waits]), strict=True):
            # A piece may have appeared before the marker: probed once more, pieces win.
            wait._lost = wait._lost or lost


def _name(one: _Object) -> tuple[bytes, range]:
    kind, chunk, shard = one
    return kind_key(chunk.key, kind), shard
