"""Keeps a shelf within its bounds, on a thread of its own (``kvshelf-capacity``).

Every process that stores to a shelf has an :class:`Evictor`, and each pays for what it stores: it
may write a part of what is left below ``max_bytes`` (:mod:`kvshelf.capacity.budget`), and then
*sweeps* the next slice of the shelf: lists it, and deletes from it (:mod:`kvshelf.capacity.sweep`,
:mod:`kvshelf.capacity.order`). :mod:`kvshelf.capacity.schedule` says when a sweep is due. Nothing
that a sweep lists is kept but a few numbers: how many bytes each group has, and at which age chunks
are deleted. A write without credit waits for the next sweep.

Contracts
---------
* Each sweep takes as long as a slice with :data:`~kvshelf.capacity.limits.SLICE` chunks needs.
* Nothing is deleted because of its age while the storage's clock, by the time of the own heartbeat,
  and this machine's differ by more than an hour.
* Threads that write wait for this one, for a few seconds, and so does :meth:`Evictor.close`, for
  half a second. It calls the storage without the deadlines of loads and stores: its errors open
  no circuit breaker. While the one for reads is open it leaves the storage alone.
* :meth:`Evictor.allows` and :meth:`Evictor.end` may be called on any thread, and never block.
* An error ends a sweep, is logged, and the next begins later. Where deleting is not allowed, one
  log line an hour says so.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from kvshelf.backends.guard import GuardedBackend
from kvshelf.background import Background, GilPace
from kvshelf.capacity import keepers, limits
from kvshelf.capacity.budget import UNKNOWN_SPACE, StoreBudget
from kvshelf.capacity.keepers import NEVER_OLD, time_for_ages
from kvshelf.capacity.limits import FANS, HOUR
from kvshelf.capacity.order import EvictionOrder, aged, same_age, score
from kvshelf.capacity.parallel import PatientBackend
from kvshelf.capacity.schedule import Schedule
from kvshelf.capacity.sweep import (
    KEEPERS,
    REASONS_OF_UNITS,
    Lister,
    Outcome,
    Part,
    Picked,
    Reason,
    Rules,
    delete,
    is_old,
    reason_to_delete,
)
from kvshelf.capacity.uses import resolution
from kvshelf.config import CapacityConfig
from kvshelf.errors import NoSpaceStorageError, StorageError, printable
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.pins import PINS, Pins

logger = logging.getLogger(__name__)


class Evictor:
    """One process's part in keeping a shelf within its bounds.

    Parameters
    ----------
    guard : GuardedBackend
        Of the shelf. Its writes ask the evictor from :meth:`start` on.
    capacity : CapacityConfig
    counters : Counters
        Gets ``sweeps``, ``sweep_seconds``, ``sweep_errors``, ``shelf_evicted_objects``,
        ``shelf_evicted_bytes``, ``leftovers_deleted``, and the gauges ``shelf_used_bytes``,
        ``shelf_limit_bytes``, ``storage_free_bytes``, ``unlisted_folders`` and
        ``clock_difference_seconds``.
    prefix : str
        In place of ``shelf_`` in these names. A tier counts nothing else.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.

    Attributes
    ----------
    budget : StoreBudget
    schedule : Schedule
    order : EvictionOrder
    """

    def __init__(
        self,
        guard: GuardedBackend,
        capacity: CapacityConfig,
        counters: Counters,
        *,
        prefix: str = "shelf_",
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._guard, self._capacity, self._prefix = guard, capacity, prefix
        self._eviction_counters = counters
        # A tier counts nothing but what it evicts.
        self._counters = counters if prefix == "shelf_" else Counters()
        self.budget = StoreBudget(capacity.max_bytes)
        self.schedule = Schedule(capacity.max_age, capacity.group_max_bytes)
        self.order = EvictionOrder(capacity.max_bytes, capacity.group_max_bytes)
        self._rules = Rules(max_age=capacity.max_age)
        self._log = RateLimitedLog(logger, seconds=HOUR)
        #: Guards the budget.
        self._changed = threading.Condition()
        self._thread = Background("kvshelf-capacity", self._turn, on_start=on_thread_start)
        self._end: threading.Event | None = None
        self._name = secrets.token_hex(8)
        self._storage = PatientBackend(guard.inner)
        pace = GilPace().rest
        self._lister = Lister(self._storage, stop=self._stops, pace=pace, samples=True)
        self._next = secrets.randbelow(FANS)
        self._heartbeat_at = self._looked_at = -math.inf
        self._heartbeat_seconds = 0.1
        self._knows_time = False
        self._pins: Pins | None = None
        #: Names of files that could not be deleted, and until when that is not tried again.
        self._stuck: set[str] = set()
        self._stuck_until = 0.0
        if capacity.max_bytes is not None:
            self._counters.set_gauge("shelf_limit_bytes", capacity.max_bytes)

    def start(self) -> None:
        """Begin. Never blocks. Idempotent."""
        # Where the system allows no thread now, the next call tries again.
        if self._thread.start():
            self._guard.bound = self
            self._guard.on_full = self.found_full

    def close(self) -> None:
        """Lift the bounds, and end the thread, unless it waits for the storage. Idempotent."""
        if self._guard.bound is self:
            self._guard.bound = None
        if self._thread.running and self._end is None:
            self._end = threading.Event()
            self._thread.wake()
            self._end.wait(limits.JOIN_SECONDS)
        # A thread that is inside compiled code when Python ends would crash the process.
        self._thread.close(limits.JOIN_SECONDS)

    # ------------------------------------------------------------- stores

    def allows(self, nbytes: int) -> bool:
        """Whether `nbytes` may be stored now, or once the next sweep has made room. Never blocks.

        The log says why not, once an hour for each cause.
        """
        return self._ask(nbytes, take=False)

    def begin(self, nbytes: int) -> bool:
        """Reserve space for a write that begins now, and wait for it if sweeps may make room.

        Returns False, and reserves nothing, where there is none.
        """
        return self._ask(nbytes, take=True)

    def end(self, nbytes: int, written: bool) -> None:
        """Note that a write has ended, and whether it wrote anything."""
        with self._changed:
            self.budget.end(nbytes, written)

    def found_full(self, error: NoSpaceStorageError) -> None:
        """Note that a write found the storage full, and of what."""
        now = time.monotonic()
        with self._changed:
            if error.short_of != "bytes":
                self.budget.run_short(error.short_of, now)
            self.schedule.found_full(now)
        self._looked_at = -math.inf
        self._thread.wake()

    def hands_over(self) -> None:
        """Note that tails and markers of hand-overs are stored: they are to be deleted."""
        leaves_until = time.monotonic() + limits.LEAVES_SECONDS
        if self.schedule.leaves_until < leaves_until - limits.IDLE_SECONDS:
            self.schedule.leaves_until = leaves_until
            self._thread.wake()

    def _ask(self, nbytes: int, take: bool) -> bool:
        budget, schedule = self.budget, self.schedule
        deadline = time.monotonic() + limits.WAIT_SECONDS
        with self._changed:
            while not (allowed := budget.allows(nbytes, now := time.monotonic())):
                # Each sweep begins with what was refused.
                self._thread.wake()
                works = self._end is None and now >= schedule.blocked_until and schedule.may_free
                soon = works and budget.can_wait(nbytes)
                if not (soon and take and now < deadline):
                    break
                self._changed.wait(min(deadline - now, limits.LOOK_SECONDS))
            if allowed and take:
                budget.begin(nbytes)
            if budget.pays_ahead or budget.needs_sweep(now):
                self._thread.wake()
            about, text = budget.refusal
        if allowed or (soon and not take):
            return True
        if about:
            self._warn(about, text)
        return False

    # ------------------------------------------------------------- its thread

    def _stops(self) -> bool:
        return self._end is not None or not self._guard.reads.is_closed

    def _turn(self) -> float | None:
        """Do what is due; return the seconds to the next call."""
        if self._end is not None:
            if self._heartbeat_at > -math.inf:
                with suppress(StorageError):
                    self._storage.delete([f"{KEEPERS}/{self._name}"])
            self._end.set()
            return None
        if self._stops():
            return limits.TROUBLE_SECONDS
        try:
            self._look_at_space()
            self._renew_heartbeat()
            while (pause := self._seconds_to_sweep()) <= 0 and not self._stops():
                self.sweep()
                self._look_at_space()
            pause = min(pause, self._seconds_to_look(), self._renew_heartbeat())
            return max(limits.LEAST_PAUSE, pause)
        except Exception as error:  # noqa: BLE001  no file on a shelf may lift its bounds
            passes = isinstance(error, StorageError) and error.retryable
            pause = limits.TROUBLE_SECONDS if passes else limits.REFUSED_SECONDS
            if passes:
                logger.debug("%s: a sweep failed: %s", self._guard.url, error)
            elif not isinstance(error, StorageError):
                self._log.error("%s: a sweep failed", self._guard.url, exc_info=error)
            else:
                self._warn(
                    "refused",
                    f"a sweep failed ({error}): this process does not keep the bounds, and tries"
                    " again in an hour. Where listing or deleting is not allowed, allow it, or run"
                    " `kvshelf gc` as a user who may",
                )
        self._counters.add("sweep_errors")
        self.schedule.blocked_until = time.monotonic() + pause
        return self._seconds_to_look()

    def _seconds_to_sweep(self) -> float:
        now = time.monotonic()
        if self._guard.written:
            self._guard.written.clear()
            if self._guard.inner.properties.temporaries:
                self.schedule.leaves_until = now + limits.LEAVES_SECONDS
        with self._changed:
            return self.schedule.seconds_to_sweep(now, self.budget)

    def _warn(self, about: str, text: str) -> None:
        """Log a warning, one an hour about each subject."""
        self._log.warning("%s: %s", self._guard.url, text, about=about)

    # ------------------------------------------------------------- free space, time

    def _seconds_to_look(self) -> float:
        """Return the seconds to the next look at the free space."""
        seconds = limits.LOOK_SECONDS if self.budget.asked else limits.IDLE_SECONDS
        return max(0.0, self._looked_at + seconds - time.monotonic())

    def _look_at_space(self, *, at_once: bool = False) -> None:
        """Update what stores may write because of free space, if it is time."""
        if self._seconds_to_look() > 0 and not at_once:
            return
        self._looked_at = now = time.monotonic()
        try:
            space = self._storage.make("", self._guard.inner.space) or UNKNOWN_SPACE
        except StorageError as error:
            self.budget.asked = False
            logger.debug("%s: its free space is not known: %s", self._guard.url, error)
            return
        if space.total:
            self._counters.set_gauge("storage_free_bytes", space.free)
        with self._changed:
            why = self.budget.look(space, now, is_full=self.schedule.full_folders > 0)
        if why is not None:
            self._warn(
                "pays",
                f"{why}: each store deletes as many bytes of the chunks that were used longest ago."
                " capacity.max_bytes bounds the shelf",
            )

    def _storage_time(self) -> float:
        """Return the storage's time; write this keeper's heartbeat if that was not done lately."""
        budget, now = self.budget, time.monotonic()
        if now >= self._heartbeat_at + self._heartbeat_seconds:
            # Those that begin together soon know each other.
            self._heartbeat_seconds = min(2 * self._heartbeat_seconds, limits.HEARTBEAT_SECONDS)
            heartbeat = {
                "by": f"{socket.gethostname()[:80]} {os.getpid()}",
                "bytes": int(budget.used_bytes),
                "evicts_after": self.order.evicts_after,
                **self._capacity.model_dump(),
            }
            self._heartbeat_at, self._knows_time = now, True
            try:
                say = partial(keepers.say, self._guard.inner, self._name, heartbeat)
                at, budget.rank, budget.keepers = self._storage.make(KEEPERS, say)
            except StorageError as error:
                at = time.time()
                self._knows_time = bool(self._guard.inner.properties.local_path)
                if not self._knows_time:
                    refused = isinstance(error, PermissionError)
                    advice = f". Allow this user to write below {KEEPERS}" if refused else ""
                    self._warn(
                        "time",
                        "the time of the storage is not known, and nothing is deleted because of"
                        f" its age: {error}{advice}",
                    )
            budget.unknown //= limits.KNOWN_PART
            budget.clock_ahead = at - now
            self._counters.set_gauge("clock_difference_seconds", round(abs(at - time.time())))
        return time.monotonic() + budget.clock_ahead

    def _renew_heartbeat(self) -> float:
        """Write the heartbeat if it is time, where no sweep did; return the seconds until it is."""
        begins = self._heartbeat_seconds < limits.FIRST_HEARTBEATS_SECONDS
        if not self.schedule.ended_at or not (begins or self.budget.written):
            return math.inf
        pause = self._heartbeat_seconds if begins else limits.ALIVE_SECONDS / 2
        seconds = self._heartbeat_at + pause - time.monotonic()
        if seconds <= 0:
            self._storage_time()
        return max(seconds, limits.LEAST_PAUSE)

    # ------------------------------------------------------------- a sweep

    def sweep(self) -> None:
        """List the next slice, and delete from it."""
        worked, begun_at = time.thread_time() + self._storage.cpu_seconds, time.monotonic()
        try:
            self._sweep_next()
        finally:
            cost = time.thread_time() + self._storage.cpu_seconds - worked
            self.schedule.ended(begun_at, time.monotonic(), cost)
            self._counters.add("sweep_seconds", cost)
        self._counters.add("sweeps")

    def _sweep_next(self) -> None:
        budget, schedule, now = self.budget, self.schedule, self._storage_time()
        if time.monotonic() >= self._stuck_until:
            self._stuck, self._stuck_until = set(), time.monotonic() + HOUR
        with self._changed:
            budget.begin_sweep()
            largest = budget.largest
        first = self._next
        # What fails is not met again at once.
        self._next = (first + schedule.width) % FANS
        part, listed = self._lister.sweep(first, schedule.width, limits.SLICE, now)
        self._next = (first + listed) % FANS
        if self._stops():
            return
        schedule.listed(listed, part.chunks, time.monotonic())
        self._counters.set_gauge("unlisted_folders", len(part.skipped))
        for folder, error in list(part.skipped.items())[:1]:
            text = f"the folder {printable(folder)} cannot be listed, and nothing in it is deleted"
            self._warn(folder, f"{text}: {error}")
        # What the storage says is used lacks what was written since it was asked.
        self._look_at_space(at_once=True)
        weight = max(listed / FANS, 1 / limits.SMOOTH)
        shares = {where: share for where, (share, _) in part.seen.items()}
        groups = (
            f"{space}/{group}" for space, names in self._lister.groups.items() for group in names
        )
        budget.listed_bytes = self.order.note(part.units, shares, groups)
        if shares:
            budget.unlisted_bytes *= 1 - weight
        # Stores need not wait for the deletion.
        self._grant()
        outcome = self._evict(part, shares, now, weight, largest)
        self._grant()
        # No sweep gives back what others took of the storage.
        if budget.has_room or outcome.nbytes.total():
            schedule.folders_without_gain = 0
        else:
            schedule.folders_without_gain += listed
        if outcome.error is not None:
            if outcome.is_refused:
                raise outcome.error
            text = f"{outcome.failed} files could not be deleted, which is tried again in an hour"
            self._warn("stuck", f"{text}: {outcome.error}")

    def _grant(self) -> None:
        with self._changed:
            self.budget.grant(time.monotonic(), self.schedule.width / FANS)
            self._changed.notify_all()
        used_bytes = self.budget.used_bytes
        self._eviction_counters.set_gauge(f"{self._prefix}used_bytes", used_bytes)

    def _evict(
        self, part: Part, shares: dict[str, float], now: float, weight: float, largest: int
    ) -> Outcome:
        """Delete from a slice what the rules say."""
        budget, rules = self.budget, self._rules
        old_at = time_for_ages(now, self._guard.url) if self._knows_time else NEVER_OLD
        # Without the pins nothing may be deleted but stale files.
        pins_at = old_at if old_at != NEVER_OLD else now
        load = partial(Pins.load, self._guard.inner, pins_at, self._pins)
        pins = self._pins = self._storage.make(PINS, load, limits.PINS_SECONDS)
        if pins.problem is not None:
            self._warn("pins", pins.problem)
        # Where the oldest cannot be deleted, the next ones are.
        part.units = [unit for unit in part.units if self._stuck.isdisjoint(unit.names)]
        same = same_age(self.order.evicts_after or HOUR, resolution(rules.max_age))
        scored = [
            (
                score(aged(unit, now), unit.place, same),
                unit,
                bool(pins) and pins.covers(unit.space, unit.group, unit.key),
            )
            for unit in part.units
        ]
        scored.sort(key=lambda row: row[0], reverse=True)
        cuts = self.order.thresholds(
            [(unit_score, unit) for unit_score, unit, pinned in scored if not pinned],
            shares,
            shelf_share=sum(unit.nbytes for unit in part.units) / max(budget.used_bytes, 1.0),
            used_bytes=budget.used_bytes,
            bytes_to_free=budget.bytes_to_free,
            largest=largest,
            weight=weight,
            now=now,
        )
        picked: list[Picked] = []
        for unit_score, unit, pinned in scored:
            why = reason_to_delete(unit, rules, cuts, unit_score, old_at, pinned=pinned)
            # What pays for stores was not used within an hour.
            frees_disk_space = why is Reason.SIZE and budget.max_bytes is None
            if why is not None and not (frees_disk_space and unit.used >= now - HOUR):
                picked.append((unit, why))
        picked += (
            (leftover, leftover.reason)
            for leftover in part.leftovers
            if is_old(leftover, rules, old_at) and leftover.name not in self._stuck
        )
        outcome = delete(self._storage, picked, now=now, stop=self._stops, pace=GilPace().rest)
        self._stuck |= outcome.stuck
        if outcome.deleted:
            self._note_deletion(outcome)
        return outcome

    def _note_deletion(self, outcome: Outcome) -> None:
        """Count and log what was deleted, and let stores write as much where they are paid for."""
        budget, nbytes = self.budget, outcome.nbytes.total()
        for reason, files in outcome.deleted.items():
            if reason in (Reason.AGE, Reason.GROUP, Reason.SIZE):
                nbytes_of_reason = outcome.nbytes[reason]
                self._eviction_counters.add(f"{self._prefix}evicted_objects", files)
                self._eviction_counters.add(f"{self._prefix}evicted_bytes", nbytes_of_reason)
            else:
                self._counters.add("leftovers_deleted", files)
        budget.unlisted_bytes -= sum(outcome.nbytes[reason] for reason in REASONS_OF_UNITS)
        if budget.pays and nbytes:
            space_before = budget.space
            self._look_at_space(at_once=True)
            with self._changed:
                budget.pay(nbytes, space_before, time.monotonic())
                self._changed.notify_all()
        reasons = ", ".join(f"{reason.value} {files}" for reason, files in outcome.deleted.items())
        text = "%s: deleted %d files, %d bytes (%s); about %.0f bytes are left"
        files = outcome.deleted.total()
        logger.info(text, self._guard.url, files, nbytes, reasons, budget.used_bytes)
