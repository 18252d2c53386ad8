"""Keeps a shelf within its bounds, on a thread of its own (``kvshelf-capacity``).

Owns the thread, and the bound of the stores (:class:`~kvshelf.capacity.bound.ShelfBound`).
:mod:`kvshelf.capacity.due` decides when a sweep is due, :mod:`kvshelf.capacity.sweeping` has its
steps, and :mod:`kvshelf.capacity.collect` chooses what is deleted, and in which order.

Every process that stores to a shelf has one; of an engine's ranks one sweeps, the others only read
how much there is. The lease and the findings of :mod:`kvshelf.capacity.lease` keep engines from
doing the same work twice. The same thread looks for what hand-overs and killed writers leave behind
(:mod:`kvshelf.capacity.walk`).

Contracts
---------
* No chunk is deleted without ``max_bytes``, ``max_age`` or ``group_max_bytes``: without them the
  shelf is not even listed.
* When less is free than stores leave, with or without bounds, the walk frees space: stores, which
  would notice that the storage is full, do not reach it then.
* The record and the files that other processes write decide what is stored here, never what is
  deleted: a sweep keeps to this process's own bounds.
* No file is read more than once a second while space is short, and once in ten seconds else, also
  where the process does not sweep. While another engine sweeps a shelf for the first time, this
  process looks for its finding after one second, two, four, eight, and then every ten.
* No other thread waits for this one. It calls the storage without the deadlines of loads and
  stores, which a slow listing would miss: its errors open no circuit breaker. While the one for
  reads is open it leaves the storage alone.
* Where listing or deleting is not allowed, one log line says so. It is tried again every hour. So
  is a sweep that failed because of an error of its own; free space and the last estimate bound
  stores meanwhile.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from kvshelf.backends.base import Space
from kvshelf.backends.clock import StorageClock
from kvshelf.backends.guard import GuardedBackend
from kvshelf.background import Background
from kvshelf.capacity.bound import HURRIED_SECONDS, LOOK_SECONDS, ShelfBound
from kvshelf.capacity.deletion import Outcome, steady
from kvshelf.capacity.due import Allowance, Growth, due_in, pressure, running_part
from kvshelf.capacity.inventory import Parents
from kvshelf.capacity.lease import Finding, Lease, Record
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.rules import Rule, Rules
from kvshelf.capacity.sweeping import Begun, Listed, Running
from kvshelf.capacity.uses import resolution
from kvshelf.capacity.walk import Walk
from kvshelf.capacity.written import Written
from kvshelf.config import CapacityConfig
from kvshelf.errors import StorageError
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters

logger = logging.getLogger(__name__)

#: Seconds from one look at the storage to the next while nothing is stored.
_IDLE_SECONDS: Final = 60.0
#: The same for the record of the last sweep of any engine.
_RECORD_SECONDS: Final = 10.0
#: About this long after another engine had the lease; engines that lose it together try again at
#: different times.
_LOST_SECONDS: Final = 10.0
#: Pause after an error of the storage.
_TROUBLE_SECONDS: Final = 30.0
#: Pause after a listing, or all deletions, were not allowed.
_REFUSED_SECONDS: Final = 3600.0
#: Groups that lost objects, of which the log line of a sweep tells.
_MOST_GROUPS: Final = 32
_WHY: Final = {Rule.AGE: "max_age", Rule.GROUP: "group_max_bytes", Rule.SIZE: "max_bytes"}
#: Seconds that the end of a process waits for the thread.
_JOIN_SECONDS: Final = 0.5


class HasBackend(Protocol):
    """A shelf, with or without tiers in front of it."""

    @property
    def backend(self) -> GuardedBackend:
        """Its storage."""


class Sweeper:
    """One process's part in keeping a shelf within its bounds.

    Parameters
    ----------
    shelf : HasBackend
        Its stores ask :attr:`bound` from :meth:`start` on, through its backend.
    capacity : CapacityConfig
    counters : Counters
        Gets ``sweeps``, ``sweep_seconds``, ``sweep_errors``, ``shelf_evicted_objects``,
        ``shelf_evicted_bytes``, and the gauges ``clock_difference_seconds`` and of
        :class:`~kvshelf.capacity.bound.ShelfBound`.
    sweeps : bool
        Whether this process lists and deletes. False: it only knows how much may be stored.
    walk : Walk, optional
        Is given steps on the thread.
    keep_tails : float or None
        Age in seconds at which a sweep deletes tails and markers; None: it does not.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.

    Attributes
    ----------
    bound : ShelfBound
    """

    def __init__(
        self,
        shelf: HasBackend,
        capacity: CapacityConfig,
        counters: Counters,
        *,
        sweeps: bool = True,
        walk: Walk | None = None,
        keep_tails: float | None = None,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._guard = shelf.backend
        self._counters = counters
        self._rules = Rules(
            max_bytes=_whole(capacity.max_bytes),
            max_age=capacity.max_age,
            group_max_bytes=_whole(capacity.group_max_bytes),
            markers=keep_tails,
            tails=keep_tails,
        )
        bounds = self._rules.max_bytes, self._rules.max_age, self._rules.group_max_bytes
        self._bounded = any(bound is not None for bound in bounds)
        self._resolution = resolution(self._rules.max_age)
        self._sweeps = sweeps
        self._walk = walk
        self._thread = Background("kvshelf-capacity", self._turn, on_start=on_thread_start)
        self.bound = ShelfBound(capacity, counters, self._guard.url, self._thread.wake)
        self._log = RateLimitedLog(logger)
        self._clock = StorageClock(self._guard.inner.now, steady)
        self._lease = Lease(self._guard.inner)
        self._written = Written(self._guard.inner)
        self._record = Record()
        #: When to look, when the record may be read again, and when this process may sweep again.
        self._look_at = self._read_at = self._sweep_at = 0.0
        #: Seconds to the next look for a finding while there is none.
        self._unknown = LOOK_SECONDS
        self._allowance = Allowance()
        #: A listing that was interrupted, and the last complete one, while they are usable; the
        #: parents that it knew, for the next one.
        self._begun: Begun | None = None
        self._listed: Listed | None = None
        self._before: Parents | None = None
        self._growth = Growth()
        #: Seconds that the last listing took.
        self._took = 0.0
        #: Whether the last sweep listed the shelf and finished its plan.
        self._finished = True
        #: Set when the thread has finished.
        self._end: threading.Event | None = None

    def start(self) -> None:
        """Begin. Never blocks. Idempotent."""
        if self._walk is not None:
            self._walk.wake = self._thread.wake
        # Where the system allows no thread now, the next call tries again.
        if self._thread.start():
            self._guard.bound = self.bound

    def close(self) -> None:
        """Lift the bounds, and end the thread, unless it waits for the storage."""
        if self._walk is not None:
            self._walk.close()
        if self._guard.bound is self.bound:
            self._guard.bound = None
        if self._thread.running and self._end is None:
            self._end = threading.Event()
            self._thread.wake()
            self._end.wait(_JOIN_SECONDS)
        # A thread that is inside compiled code when Python ends would crash the process.
        self._thread.close(_JOIN_SECONDS)

    # ------------------------------------------------------------- its thread

    def _turn(self) -> float | None:
        """Do what is due; return the seconds to the next call."""
        if self._end is not None:
            if self._published is not None:
                self._written.publish(self.bound.written)
            self._end.set()
            return None
        now = time.monotonic()
        if self.bound.is_urgent or self.bound.asked:
            pause = HURRIED_SECONDS if self.bound.is_urgent else LOOK_SECONDS
            self._look_at = min(self._look_at, now + pause)
        if now >= self._look_at:
            pause = self.step()
            self._look_at = time.monotonic() + pause
        pause = self._look_at - time.monotonic()
        if self._walk is not None:
            pause = min(pause, self._walk.step())
        return max(0.0, pause)

    def step(self) -> float:
        """Look at the storage, and sweep if it is time; return the seconds to the next look."""
        if self._listed is not None and not self._listed.is_fresh:
            self._listed = None
        if self._begun is not None and steady() >= self._begun.end:
            self._begun = None
        try:
            pause = self._look() if self._guard.reads.is_closed else _IDLE_SECONDS
            return min(pause, LOOK_SECONDS if self.bound.take_asked() else _IDLE_SECONDS)
        except StorageError as error:
            logger.debug("%s: its free space is not known: %s", self._guard.url, error)
            return _TROUBLE_SECONDS
        except Exception as error:  # noqa: BLE001  logged and counted
            self._note_error(error)
            return _TROUBLE_SECONDS

    def _look(self) -> float:
        """Update what stores may write, after a sweep if due; return the seconds to the next."""
        storage = self._guard.inner
        space = storage.space()
        if self._walk is not None and self.bound.is_full(space) and self._walk.free_space():
            space = storage.space()
        self.bound.look(space)
        pause = _IDLE_SECONDS
        if self._bounded:
            try:
                self._read_record(space)
                if self._sweeps and self._due_in(space) == 0:
                    self._sweep(space)
                    space = storage.space()
                    self.bound.look(space)
                if self._sweeps:
                    pause = max(LOOK_SECONDS, self._due_in(space))
            except StorageError as error:
                self._read_at = self._sweep_at = time.monotonic() + self._handle("read", error)
        self._update_bound(space)
        return pause

    def _read_record(self, space: Space | None) -> None:
        """Read what other engines found and wrote, if that was not done recently."""
        now = time.monotonic()
        if now < self._read_at:
            return
        often = self._sweeps and self.bound.is_short
        self._read_at = now + (LOOK_SECONDS if often else _RECORD_SECONDS)
        self._record = self._lease.read(self._clock.now()).believed(space)
        # The time of some storages is in whole seconds.
        apart = round(abs(self._clock.last() - time.time()))
        self._counters.set_gauge("clock_difference_seconds", apart)
        if self._record.finding is not None:
            self._unknown = LOOK_SECONDS
        elif self._unknown < _RECORD_SECONDS:
            # Until the first listing ends nothing bounds stores. That of a small shelf ends soon.
            self._read_at = now + self._unknown
            self._unknown *= 2
        self._exchange(space)

    def _exchange(self, space: Space | None, *, at_once: bool = False) -> None:
        """Publish this process's writes, and read those of others, unless free space shows them."""
        if space is None and self._rules.max_bytes is not None:
            bound, now = self.bound, self._clock.last()
            self._written.exchange(bound.written, bound.left, now, at_once=at_once)

    @property
    def _published(self) -> int | None:
        """The bytes that all writers have written, as far as they publish them."""
        return self._written.total(self.bound.written) if self._written.is_used else None

    def _used(self, space: Space | None) -> int | None:
        """Return the estimate of the bytes on the shelf."""
        finding = self._record.finding
        if finding is None:
            return None
        return self.bound.estimate(finding, space, self._clock.last(), self._published)

    def _update_bound(self, space: Space | None) -> None:
        """Update what stores may write."""
        own = self._rules.max_bytes
        limit = None if own is None else self._record.bound(own, self._clock.last())
        used = self._used(space)
        self._growth.note(used, time.monotonic())
        self.bound.update(space, used, limit)

    # ------------------------------------------------------------- sweeps

    def _expected(self, space: Space | None) -> int | None:
        """Return the estimate for when this process knows what to delete.

        A listing of a large shelf takes as long as a fleet needs to fill the space that is left.
        """
        used = self._used(space)
        if used is None or self._listed is not None:
            return used
        return used + int(self._growth.per_second * self._took)

    def _pressure(self, space: Space | None) -> float:
        return pressure(self._expected(space), self._rules.max_bytes, self.bound.refuses)

    def _due_in(self, space: Space | None) -> float:
        """Return the seconds until a sweep is due, as far as is known now; 0: it is due."""
        now, finding, lease = self._clock.last(), self._record.finding, self._lease
        pause = max(0.0, self._sweep_at - time.monotonic())
        pause = max(pause, self._allowance.pause(self._pressure(space), time.monotonic()))
        if lease.is_others(self._record, now):
            pause = max(pause, LOOK_SECONDS)
        if finding is None:
            return pause
        rules = replace(self._rules, largest=self.bound.largest)
        used = self._expected(space) or 0
        ours = self._record.owner == lease.owner
        age, finished = now - finding.at, self._finished or not ours
        due = due_in(finding, rules, used, age, self._resolution, ours=ours, finished=finished)
        return max(pause, due)

    def _sweep(self, space: Space | None) -> None:
        """Sweep, unless another engine does or has just done so."""
        now = self._clock.ask()
        self._record = self._lease.read(now).believed(space)
        if self._due_in(space) > 0:
            # Another engine has just swept, or sweeps now.
            return
        taken = self._lease.take(self._record, now)
        if taken is None:
            chance = random.SystemRandom().uniform(0.5, 1.5)
            self._sweep_at = time.monotonic() + _LOST_SECONDS * chance
            return
        self._record = taken
        begun, finding = self._begun, taken.finding
        if begun is not None and finding is not None and finding.at > begun.begin.at:
            # The interrupted listing has files that another engine may have deleted since.
            begun = self._begun = None
        earlier = 0.0 if begun is None else begun.seconds
        running = Running(
            self._lease,
            self.bound,
            now=self._clock.last,
            finding=lambda: self._record.finding,
            may_continue=lambda: self._end is None and self._guard.reads.is_closed,
            look=self._look_meanwhile,
            earlier=earlier,
        )
        pause, failed = LOOK_SECONDS, False
        try:
            trouble = self._list_and_delete(space, now, running)
        except StorageError as error:
            failed, pause = True, self._handle("list", error)
        except Exception as error:  # noqa: BLE001  logged and counted
            # No file on a shelf, whatever wrote it, may lift the shelf's bounds.
            failed, pause = True, self._note_error(error)
            self._begun = None
        else:
            if trouble is not None:
                pause = self._handle("delete", trouble)
        seconds = running.seconds
        self._counters.add("sweep_seconds", seconds - earlier)
        if running.lost:
            self._begun = self._listed = None
        if self._begun is not None:
            # It counts once the listing is complete.
            self._begun.seconds = seconds
        elif not failed:
            self._allowance.take(seconds)
        self._sweep_at = time.monotonic() + pause
        self._record = self._lease.release(self._record, self._clock.last())

    def _list_and_delete(
        self, space: Space | None, now: float, running: Running
    ) -> StorageError | None:
        """List the shelf, or a part of it, and delete; return the first error of a deletion."""
        storage, rules = self._guard.inner, replace(self._rules, largest=self.bound.largest)
        self._exchange(space, at_once=True)
        before, listed = self._record.finding, self._listed
        free = None if space is None else space.free
        finding = Finding(now, 0, 0.0, free, None, self._published, self._lease.owner, 0, 0)
        if listed is None or before is None:
            self._begun = begun = self._begun or Begun(storage, finding, self._before)
            listed, before, finding = self._list(begun, rules, running), None, begun.begin
            held = None if listed is None else listed.plan.before
            # The estimate includes what was written meanwhile, seen or not.
            found = None if listed is None else listed.held_at(finding.at)
        else:
            held = found = listed.measure(storage, running, self._used(space) or 0)
            finding = replace(finding, seconds=before.seconds, max_age=before.max_age)
        if listed is None or held is None or found is None:
            return None
        finding = replace(finding, nbytes=found)
        self._record = replace(self._record, finding=finding).bounded_by(rules.max_bytes, now)
        trouble, finished = None, True
        for outcome in listed.delete(storage, rules, held, running, on_freed=self._note_freed):
            if outcome.gone.count:
                finding = self._record.finding or finding
                left = max(0, finding.nbytes - outcome.gone.nbytes)
                self._record = replace(self._record, finding=replace(finding, nbytes=left))
            if outcome.count or outcome.gone.count:
                self._say(outcome)
            # Some files may belong to others.
            if outcome.error is not None and (outcome.error.retryable or not outcome.count):
                trouble = outcome.error
            finished = finished and outcome.finished
        self._finished = trouble is not None or (finished and before is None)
        if before is None:
            self._after_listing(rules, finished, running.seconds)
        return trouble

    def _list(self, begun: Begun, rules: Rules, running: Running) -> Listed | None:
        """List the rest of the shelf; None if the sweep was ended."""
        self._listed, begin = None, steady()
        listed = begun.complete(rules, running, self._resolution)
        if listed is not None:
            self._begun, self._listed, self._before = None, listed, listed.parents
            self._took = steady() - begin
            if listed.plan.problem is not None:
                self._log.warning("%s: %s", self._guard.url, listed.plan.problem, about="problem")
        return listed

    def _after_listing(self, rules: Rules, finished: bool, seconds: float) -> None:
        """Complete the finding, and delete old files by which processes inform each other."""
        self._counters.add("sweeps")
        storage, finding = self._guard.inner, self._record.finding
        assert finding is not None
        published = finding.written
        if published is not None:
            published -= self._written.remove_old()
        self._record = replace(
            self._record,
            finding=replace(
                finding,
                seconds=seconds,
                max_age=rules.max_age if finished else None,
                written=published,
            ),
        )
        try:
            Marks.compact(storage, max_age=rules.max_age, resolution=self._resolution)
        except StorageError as error:
            logger.debug("%s: marks were not merged: %s", self._guard.url, error)

    def _say(self, outcome: Outcome) -> None:
        """Log what was deleted, of which namespaces and salt groups, and why."""
        now, finding = self._clock.last(), self._record.finding
        assert finding is not None
        lost = [
            f"; {group}: {one.count} objects, {one.nbytes} bytes, the oldest unused for"
            f" {now - one.oldest:.0f} s ({_WHY.get(rule, rule.name.lower())})"
            for (group, rule), one in outcome.lost.items()
        ]
        if len(lost) > _MOST_GROUPS:
            lost[_MOST_GROUPS:] = [f"; and {len(lost) - _MOST_GROUPS} more"]
        if outcome.gone.count:
            gone = f"{outcome.gone.count} files, {outcome.gone.nbytes} bytes"
            lost.append(f"; {gone}, are listed but gone: others deleted them, or listings are old")
        done = outcome.count, outcome.nbytes, finding.nbytes, "".join(lost)
        logger.info("%s: deleted %d files, %d bytes; %d bytes are left%s", self._guard.url, *done)

    def _note_freed(self, count: int, nbytes: int) -> None:
        """Count what a sweep has just deleted: stores may use that space at once."""
        self._counters.add("shelf_evicted_objects", count)
        self._counters.add("shelf_evicted_bytes", nbytes)
        self.bound.free(nbytes)
        if self._record.finding is not None:
            self._record = replace(self._record, finding=self._record.finding.less(nbytes, count))

    def _look_meanwhile(self) -> float:
        """Update what stores may write; return the part of a core that a sweep may take."""
        try:
            space = self._guard.inner.space()
            self._exchange(space)
        except StorageError as error:
            logger.debug("%s: its free space is not known: %s", self._guard.url, error)
            return running_part(0.0)
        self.bound.look(space)
        self._update_bound(space)
        return running_part(self._pressure(space))

    def _note_error(self, error: Exception) -> float:
        """Log and count an error of its own; return how long to pause."""
        self._counters.add("sweep_errors")
        self._sweep_at = time.monotonic() + _REFUSED_SECONDS
        self._log.error(
            "%s: a sweep ended because of an error in kvshelf, and is tried again in an hour."
            " Stores keep to the free space and to what is known of the shelf",
            self._guard.url,
            exc_info=error,
            about=repr(error),
        )
        return _REFUSED_SECONDS

    def _handle(self, what: str, error: StorageError) -> float:
        """Handle a storage that failed, or does not allow a sweep; return how long to pause."""
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


def _whole(nbytes: float | None) -> int | None:
    return None if nbytes is None else int(nbytes)
