"""Keeps a shelf within its bounds, on a thread of its own (``kvshelf-capacity``).

Owns when a shelf is listed and swept, and what stores are told of its room
(:class:`~kvshelf.capacity.room.Room`). What goes, and in which order, is
:mod:`kvshelf.capacity.collect`'s.

Every process that stores to a shelf has one; of an engine's ranks one sweeps, the others only read
how much there is. A sweep lists the whole shelf, makes a plan and carries it out. It begins when
the estimate of the shelf's bytes comes to 90 % of ``max_bytes``, or leaves no room for a chunk;
when it is time to look for chunks above ``max_age``; and where nothing tells what others write
(S3), again and again. The lease and the findings of :mod:`kvshelf.capacity.lease` keep engines from
doing the same work twice.

Contracts
---------
* No chunk is deleted without ``max_bytes``, ``max_age`` or ``group_max_bytes``: without them the
  shelf is not even listed. What is deleted follows from one listing, never from an estimate.
* Orphans are removed when less than ``min_free`` is free, with or without bounds: then no store
  comes to the storage any more, and finds it full.
* A sweep takes at most 1 % of a core over time, and a fifth of one while it runs: after a sweep
  that took so many seconds of processor time the next one begins a hundred times as long after it.
  It begins no earlier than a minute after the last one either, unless room is short, and no later
  than an hour after one because of what that took.
* The record that other processes write decides what is stored here, never what is deleted: a sweep
  keeps to this process's own bounds.
* No other thread waits for this one. It calls the storage without the deadlines of loads and
  stores, which a slow listing would miss: its trouble opens no circuit breaker. While that for
  reads is open it leaves the storage alone.
* Where listing or deleting is not allowed, one log line says so. It is tried again every hour. So
  is a sweep that failed because of an error of its own; ``min_free`` and the last estimate bound
  stores meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from kvshelf.backends import Backend
from kvshelf.backends.base import Space
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.trials import try_to_start
from kvshelf.capacity.collect import Limits, Outcome, Plan, carry_out, plan
from kvshelf.capacity.inventory import Inventory
from kvshelf.capacity.lease import Finding, Lease, Record
from kvshelf.capacity.pins import Pins
from kvshelf.capacity.room import Room, least_free
from kvshelf.capacity.uses import Marks, resolution
from kvshelf.config import CapacityConfig
from kvshelf.errors import StorageError
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.eviction import FULL_BIT
from kvshelf.shelf.orphans import Orphans

logger = logging.getLogger(__name__)

#: Part of a core that sweeps take over time.
CORE_PART: Final = 0.01
#: Least seconds from one sweep to the next, and the same when room is short.
SWEEP_SECONDS: Final = 60.0
_SHORT_SECONDS: Final = 1.0
#: Seconds after which a shelf is listed anew where the filesystem tells what others write.
RELIST_SECONDS: Final = 3600.0
#: Part of a core that a sweep takes while it runs.
_RUNNING_PART: Final = 0.2
#: Processor time after which a sweep rests for a moment: as long it may keep the GIL.
_WORK_SECONDS: Final = 0.5e-3

#: Seconds from one look at the storage to the next: while stores come, at least, and else.
_LOOK_SECONDS: Final = 1.0
_LEAST_SECONDS: Final = 0.1
_IDLE_SECONDS: Final = 60.0
#: The same for the record of the last sweep of any engine.
_RECORD_SECONDS: Final = 10.0
#: After trouble of the storage.
_TROUBLE_SECONDS: Final = 30.0
#: After a listing, or all deletions, were not allowed.
_REFUSED_SECONDS: Final = 3600.0
#: Seconds for which the difference of two clocks is believed.
_CLOCK_SECONDS: Final = 300.0
#: Seconds that the end of a process waits for the thread.
_JOIN_SECONDS: Final = 0.5
#: Seconds after which a lease is renewed.
_RENEW_SECONDS: Final = 20.0


class HasBackend(Protocol):
    """A shelf, with or without tiers in front of it."""

    @property
    def backend(self) -> GuardedBackend:
        """Its storage."""


class Sweeper:
    """What keeps one shelf within its bounds, as far as one process sees to it.

    Parameters
    ----------
    shelf : HasBackend
        Its stores ask :attr:`room` from :meth:`start` on, through its backend.
    capacity : CapacityConfig
    counters : Counters
        Gets ``sweeps``, ``sweep_seconds``, ``shelf_evicted_objects``, ``shelf_evicted_bytes``, and
        the gauges of :class:`~kvshelf.capacity.room.Room`.
    sweeps : bool
        Whether this process lists and deletes. False: it only knows how much room there is.
    keep_tails : float or None
        Age in seconds at which tails and markers go in a sweep; None: they do not.
    on_evicted : Callable, optional
        Called with chunk key and chunk index of each chunk of which something was deleted.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.

    Attributes
    ----------
    room : Room
    """

    def __init__(
        self,
        shelf: HasBackend,
        capacity: CapacityConfig,
        counters: Counters,
        *,
        sweeps: bool = True,
        keep_tails: float | None = None,
        on_evicted: Callable[[bytes, int], None] | None = None,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._guard = shelf.backend
        self._capacity = capacity
        self._counters = counters
        self._bounded = _has_bounds(capacity)
        self._sweeps = sweeps and self._bounded
        self._orphans = Orphans(self._guard.inner) if sweeps else None
        self._keep_tails = keep_tails
        self._on_evicted = on_evicted
        self._on_thread_start = on_thread_start
        self._resolution = resolution(capacity.max_age)
        self.room = Room(capacity, counters, self._guard.url)
        self._log = RateLimitedLog(logger)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._lease: Lease | None = None
        self._record = Record()
        self._read_at = -_RECORD_SECONDS
        #: The storage's time less this process's, and when that was asked.
        self._ahead = 0.0
        self._asked_at = -_CLOCK_SECONDS
        #: When the record may be read again.
        self._not_read_before = 0.0
        #: When this process may sweep again.
        self._not_before = 0.0
        self._renewed_at = 0.0
        #: For the parents of chunks, which need not be read again.
        self._before: Inventory | None = None
        self._pace = _Pace(_RUNNING_PART)

    def start(self) -> None:
        """Begin, unless nothing is bounded. Never blocks. Idempotent."""
        if self._thread is not None or not (self._bounded or self._capacity.min_free != 0):
            return
        thread = threading.Thread(target=self._run, name="kvshelf-capacity", daemon=True)
        # Where the system allows no thread now, the next call tries again.
        if try_to_start(thread):
            self._thread = thread
            self._guard.bound = self.room

    def close(self) -> None:
        """Bound nothing any more, and end the thread, unless it waits for the storage."""
        self._closed.set()
        if self._guard.bound is self.room:
            self._guard.bound = None
        self.room.wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            # A thread that is inside compiled code when Python ends would crash the process.
            self._thread.join(_JOIN_SECONDS)

    # ------------------------------------------------------------- its thread

    def _run(self) -> None:
        if self._on_thread_start is not None:
            self._on_thread_start()
        while not self._closed.is_set():
            self.room.wake.clear()
            self.room.wake.wait(self.step())
            # Stores may wake it each time they are refused.
            self._closed.wait(_LEAST_SECONDS)

    def step(self) -> float:
        """Look at the storage, and sweep if it is time; return the seconds to the next look."""
        try:
            pause = self._look() if self._guard.reads.is_closed else _IDLE_SECONDS
            return min(pause, _LOOK_SECONDS if self.room.take_asked() else _IDLE_SECONDS)
        except StorageError as error:
            logger.debug("%s: its room is not known: %s", self._guard.url, error)
            return _TROUBLE_SECONDS
        except Exception as error:  # noqa: BLE001  logged and counted
            self._note_error(error)
            return _TROUBLE_SECONDS

    def _look(self) -> float:
        """Tell stores of the room, after a sweep if one is due; return the seconds to the next."""
        storage = self._guard.inner
        space = storage.space()
        if self._orphans is not None and self._is_full(space) and self._orphans.remove():
            space = storage.space()
        self.room.look(space)
        pause, now = _IDLE_SECONDS, None
        if self._bounded and time.monotonic() >= self._not_read_before:
            try:
                now = self._now(storage)
                self._read_record(storage, space, now)
                if self._sweeps and self._due_in(space, now) == 0:
                    # Stores go on during the sweep.
                    self._tell(space, now)
                    freed = self._sweep(storage, space)
                    space, now = storage.space(), self._now(storage)
                    self.room.look(space, freed)
                if self._sweeps:
                    pause = max(_LOOK_SECONDS, self._due_in(space, now))
            except StorageError as error:
                now = None
                self._not_read_before = time.monotonic() + self._handle("read", error)
        self._tell(space, now)
        return pause

    def _tell(self, space: Space | None, now: float | None) -> None:
        """Tell stores of the room; of the storage's alone if its time is not known."""
        used = limit = None
        if now is not None:
            limit = self._limit(now)
            if self._record.finding is not None:
                used = self.room.estimate(self._record.finding, space, now)
        self.room.update(space, used, limit)

    def _is_full(self, space: Space | None) -> bool:
        """Whether less is free than stores leave."""
        return space is not None and space.free < least_free(space, self._capacity.min_free)

    def _now(self, storage: Backend) -> float:
        """Return the storage's time; this machine's where the storage does not tell it."""
        if time.monotonic() >= self._asked_at + _CLOCK_SECONDS:
            now = storage.now()
            # Time passes in the call: the storage's time is rather too late than too early.
            self._ahead = 0.0 if now is None else now - time.time()
            self._asked_at = time.monotonic()
        return time.time() + self._ahead

    def _read_record(self, storage: Backend, space: Space | None, now: float) -> None:
        """Learn what engines found lately: where room is short, at each look."""
        if self._lease is None:
            self._lease = Lease(storage)
        if time.monotonic() >= self._read_at + _RECORD_SECONDS or self.room.is_short:
            self._record = self._lease.read(now).believed(space)
            self._read_at = time.monotonic()

    def _limit(self, now: float) -> int | None:
        """Return the ``max_bytes`` that bounds the stores of this engine."""
        own = self._capacity.max_bytes
        return None if own is None else self._record.bound(int(own), now)

    # ------------------------------------------------------------- sweeps

    def _due_in(self, space: Space | None, now: float) -> float:
        """Return the seconds until a sweep is due, as far as is known now; 0: it is due."""
        pause = max(0.0, self._not_before - time.monotonic())
        finding, limit = self._record.finding, self._own_limit
        if finding is None:
            return pause
        limits, age = self._limits(), now - finding.at
        used = self.room.estimate(finding, space, now)
        over = limits.to_free(used, limit) > 0
        # After a sweep that could not make room another one cannot either: all is pinned, or young.
        in_vain = limits.to_free(finding.nbytes, limit) > 0
        least = _SHORT_SECONDS if over and not in_vain else SWEEP_SECONDS
        pause = max(pause, least - age, _rest(finding.seconds) - age)
        max_age, group = self._capacity.max_age, self._capacity.group_max_bytes
        if over:
            return pause
        if max_age is not None and (finding.max_age is None or finding.max_age > max_age):
            # It was the sweep of an engine that keeps chunks for longer.
            return pause
        unknown = space is None or finding.free is None
        if limit is not None and unknown:
            # Nothing tells what others write.
            return pause
        if group is not None and (unknown or used > finding.nbytes):
            return pause
        return max(pause, (RELIST_SECONDS if max_age is None else self._resolution) - age)

    @property
    def _own_limit(self) -> int | None:
        own = self._capacity.max_bytes
        return None if own is None else int(own)

    def _limits(self) -> Limits:
        capacity = self._capacity
        group = capacity.group_max_bytes
        return Limits(
            max_bytes=self._own_limit,
            max_age=capacity.max_age,
            group_max_bytes=None if group is None else int(group),
            keep_tails=self._keep_tails,
            largest=self.room.largest,
        )

    def _sweep(self, storage: Backend, space: Space | None) -> int:
        """List the shelf, and delete what goes, unless another process is at it.

        Returns
        -------
        int
            The bytes that were deleted.
        """
        assert self._lease is not None
        self._asked_at = -_CLOCK_SECONDS
        now = self._now(storage)
        self._record = self._lease.read(now).believed(space)
        self._read_at = self._renewed_at = time.monotonic()
        if self._due_in(space, now) > 0:
            # Another engine has just swept.
            return 0
        taken = self._lease.take(self._record, now)
        if taken is None:
            self._not_before = self._renewed_at + _SHORT_SECONDS
            return 0
        self._record = taken
        self._pace = _Pace(_RUNNING_PART)
        begin, record = time.thread_time(), taken
        pause, freed = _SHORT_SECONDS, 0
        try:
            found = self._list_and_delete(storage, self._limits())
        except StorageError as error:
            found, pause = None, self._handle("list", error)
        except Exception as error:  # noqa: BLE001  logged and counted
            # Nothing that somebody can put onto a shelf may lift its bounds.
            found, pause = None, self._note_error(error)
        # On remote storage the work is done on several threads.
        seconds = max(time.thread_time() - begin, self._pace.spent)
        self._counters.add("sweep_seconds", seconds)
        if found is not None:
            nbytes, freed, trouble = found
            if trouble is not None:
                pause = self._handle("delete", trouble)
            finding = Finding(
                now,
                nbytes,
                seconds,
                None if space is None else space.free + freed,
                self._capacity.max_age,
            )
            record = Record(record.owner, 0.0, finding, record.max_bytes, record.max_bytes_at)
            record = record.bounded_by(self._own_limit, now)
            self._counters.add("sweeps")
        self._not_before = time.monotonic() + max(pause, _rest(seconds))
        self._record = self._lease.release(record)
        return freed

    def _list_and_delete(
        self, storage: Backend, limits: Limits
    ) -> tuple[int, int, StorageError | None] | None:
        """Return the bytes that are left on the shelf, those that were deleted, and trouble.

        None if the sweep was ended.
        """
        inventory = Inventory.scan(storage, before=self._before, stop=self._stops, pace=self._rests)
        if inventory is None:
            return None
        several = any(space.kinds & ~FULL_BIT for space in inventory.namespaces)
        self._before = inventory if several else None
        planned = plan(
            inventory,
            limits,
            pins=Pins.load(storage, inventory.aged_at),
            marks=Marks.read(storage),
            resolution=self._resolution,
        )
        outcome = carry_out(
            storage,
            planned,
            stop=self._stops,
            pace=self._rests,
            on_deleted=self._on_evicted,
        )
        freed = outcome.nbytes
        self._counters.add("shelf_evicted_objects", outcome.count)
        self._counters.add("shelf_evicted_bytes", freed)
        self._say(planned, outcome)
        try:
            Marks.compact(storage, max_age=limits.max_age, resolution=self._resolution)
        except StorageError as error:
            logger.debug("%s: marks were not merged: %s", self._guard.url, error)
        # Some files may belong to others.
        failed = outcome.error is not None and (outcome.error.retryable or not outcome.count)
        return planned.before - freed, freed, outcome.error if failed else None

    def _stops(self) -> bool:
        return self._closed.is_set() or not self._guard.reads.is_closed

    def _rests(self) -> None:
        """Sleep if the sweep has worked for long enough; keep the lease meanwhile."""
        self._pace()
        now = time.monotonic()
        mine = threading.current_thread() is self._thread
        if mine and self._lease is not None and now >= self._renewed_at + _RENEW_SECONDS:
            self._renewed_at = now
            self._record = self._lease.renew(self._record, time.time() + self._ahead)

    def _say(self, planned: Plan, outcome: Outcome) -> None:
        if planned.problem is not None:
            self._log.warning("%s: %s", self._guard.url, planned.problem, about="problem")
        if outcome.count:
            logger.info(
                "%s: deleted %d objects, %d bytes; %d bytes are left",
                self._guard.url,
                outcome.count,
                outcome.nbytes,
                planned.before - outcome.nbytes,
            )

    def _note_error(self, error: Exception) -> float:
        """Log and count an error of its own; return how long to pause."""
        self._counters.add("sweep_errors")
        self._not_before = time.monotonic() + _REFUSED_SECONDS
        self._log.error(
            "%s: a sweep ended because of an error in kvshelf, and is tried again in an hour."
            " Stores keep to min_free and to what is known of the shelf",
            self._guard.url,
            exc_info=error,
            about=repr(error),
        )
        return _REFUSED_SECONDS

    def _handle(self, what: str, error: StorageError) -> float:
        """Handle that the storage failed, or does not allow a sweep; return how long to pause."""
        if error.retryable:
            logger.debug("%s: a sweep was ended: %s", self._guard.url, error)
            return _TROUBLE_SECONDS
        self._log.warning(
            "%s: this process keeps the shelf within no bounds, because the storage does not allow"
            " it to %s (%s). Allow that, or bound the shelf from elsewhere, for instance with"
            " `kvshelf gc`, and remove max_bytes and max_age here",
            self._guard.url,
            what,
            error,
            about=what,
        )
        return _REFUSED_SECONDS


class _Pace:
    """Lets threads work for a part of their time only.

    Parameters
    ----------
    part : float
        The part.

    Attributes
    ----------
    spent : float
        Seconds of processor time of all threads, roughly.
    """

    def __init__(self, part: float) -> None:
        self.spent = 0.0
        self._rest = 1 / part - 1
        self._local = threading.local()

    def __call__(self) -> None:
        """Sleep if the calling thread has worked for long enough; for each piece of its work."""
        worked = time.thread_time()
        spent = worked - getattr(self._local, "slept_at", worked)
        if spent > _WORK_SECONDS:
            self.spent += spent
            time.sleep(min(spent * self._rest, 1.0))
            self._local.slept_at = time.thread_time()
        elif not hasattr(self._local, "slept_at"):
            self._local.slept_at = worked


def _rest(seconds: float) -> float:
    """Return the seconds to the next sweep after one that took `seconds` of processor time."""
    return min(seconds / CORE_PART, RELIST_SECONDS)


def _has_bounds(capacity: CapacityConfig) -> bool:
    bounds = capacity.max_bytes, capacity.max_age, capacity.group_max_bytes
    return any(bound is not None for bound in bounds)
