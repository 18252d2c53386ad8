"""When an evictor sweeps the next slice of a shelf.

==================  ====================================================================
a sweep is due      when
==================  ====================================================================
for ``max_bytes``   half of the credit is used up, or the shelf is above 97 % of its bound
for ages            a part of the least age has passed: all keepers together sweep all of
                    the shelf in an eighth of ``max_age``, in an hour at most
for quotas          a twentieth of the slice's share of a quota was written, or a minute
                    passed
for a full disk     a write found no space, for one round
to pay              stores are paid for, and one was refused or the next ones would be
for stale files     a process stored within three hours: as for ages, all of it in an hour
==================  ====================================================================

Sweeps take 1 % of a core; where stores have used up half of the credit, a quarter at most, and
where they are refused nine tenths. Nothing here knows a clock, a thread or a storage: the caller
says the time (monotonic, seconds).
"""

from __future__ import annotations

import math

from kvshelf.capacity import limits
from kvshelf.capacity.budget import StoreBudget


class Schedule:
    """When one evictor sweeps.

    Parameters
    ----------
    max_age, group_max_bytes : float or None
        Bounds of the shelf.

    Attributes
    ----------
    width : int
        Fan-out folders of a slice, as the last sweep had them.
    full_folders : int
        Folders to sweep because a write found no space.
    folders_without_gain : int
        Folders swept since the last one that freed anything, while stores have no room.
    blocked_until, leaves_until : float
        When sweeps are possible again, and until when this process may leave stale files.
    ended_at : float
        When the last sweep ended; 0: none has.
    """

    def __init__(self, max_age: float | None, group_max_bytes: int | None) -> None:
        self._max_age, self._quota = max_age, group_max_bytes
        self.width = 1
        self.full_folders = self.folders_without_gain = 0
        self.blocked_until = self.ended_at = 0.0
        self.leaves_until = -math.inf
        self._full_again_at = self._listed_at = 0.0
        #: Seconds that the last sweep worked, and took.
        self._cost = self._wall = 0.0

    def found_full(self, now: float) -> None:
        """Note that a write found no space: a round is due, one in ten minutes."""
        if not self.full_folders and now >= self._full_again_at:
            self.full_folders = limits.FANS

    def listed(self, folders: int, chunks: int, now: float) -> None:
        """Note what the slice of a sweep had."""
        self.width = min(limits.FANS, max(1, -(-folders * limits.SLICE // max(chunks, 1))))
        self._listed_at = now
        self.full_folders = max(0, self.full_folders - folders)
        if not self.full_folders:
            self._full_again_at = now + limits.FULL_SECONDS

    def ended(self, begun_at: float, now: float, cost: float) -> None:
        """Note that a sweep has ended, and the seconds of a processor that it took."""
        self.ended_at, self._wall, self._cost = now, now - begun_at, cost

    @property
    def may_free(self) -> bool:
        """Whether a sweep may free anything: there was no whole round that did not."""
        return self.folders_without_gain < limits.FANS

    def seconds_to_sweep(self, now: float, budget: StoreBudget) -> float:
        """Return the seconds until the next sweep; 0 or less: it is due."""
        since_last = now - self.ended_at
        # Sweeps that nobody waits for.
        idle = self._cost * limits.REST - since_last
        # Where whole rounds found nothing to delete for stores, they wait for ages and for others,
        # longer with each round.
        urgent = self._cost * (limits.RUSH if budget.refused else limits.HURRY) - since_last
        if not self.may_free:
            pause = min(self.folders_without_gain / limits.FANS, limits.IDLE_SECONDS)
            urgent = max(idle, pause - since_last)
        causes = [math.inf]
        slice_share = self.width / limits.FANS
        during_sweep = budget.written / max(since_last, limits.LEAST_PAUSE) * self._wall
        if budget.max_bytes is not None:
            if budget.needs_sweep(now, during_sweep):
                causes.append(max(urgent, -budget.turn_left(now)))
            elif not self.ended_at or budget.used_bytes > limits.HIGH * budget.max_bytes:
                causes.append(idle)
        pays_for_stores = budget.written > 0 and budget.pays_ahead
        if self.full_folders or pays_for_stores or (budget.pays and budget.refused):
            causes.append(urgent)
        if self._max_age is not None or now < self.leaves_until:
            age = math.inf if self._max_age is None else max(self._max_age / 8, 60.0)
            # All keepers together sweep all of the shelf in a period.
            keepers = min(budget.keepers, limits.MOST_SHARING)
            period = min(limits.HOUR, age) * slice_share * keepers
            causes.append(max(idle, self._listed_at + period - now))
        if self._quota is not None and budget.written:
            is_due = budget.written >= limits.STEP * self._quota * slice_share
            causes.append(idle if is_due else max(idle, limits.IDLE_SECONDS - since_last))
        return max(min(causes), self.blocked_until - now)
