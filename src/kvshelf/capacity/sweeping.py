"""One sweep: what a listing of a shelf found, and what is deleted because of it while it is fresh.

Owns how a listing is made (:class:`Begun`) and used (:class:`Listed`), and what a sweep does all
the time (:class:`Running`): it rests, keeps its lease, and ends when it should.

A listing is used for ten minutes. When space is short again, a part of the shelf is listed anew,
which shows how much the shelf has grown; then the next objects of the plan are deleted. So a shelf
to which much is written need not be listed each time. A listing that was interrupted continues in
the next sweep, if that begins within ten minutes.

Contracts
---------
* What is deleted follows from listings alone, never from what other processes say.
* A plan ends ten minutes after its listing, when the lease was lost, and when a step took longer
  than a lease lasts: then the process, or the machine, was paused.

Threads
-------
All functions block on the storage. :meth:`Running.rests` may be called on any thread, all else is
used by one.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields, replace
from typing import Any, Final

import numpy as np

from kvshelf.backends import Backend
from kvshelf.capacity.bound import HURRIED_SECONDS, LOOK_SECONDS, ShelfBound
from kvshelf.capacity.collect import Plan, plan
from kvshelf.capacity.deletion import Outcome, carry_out, steady
from kvshelf.capacity.inventory import Inventory, Parents, Scan
from kvshelf.capacity.lease import LEASE_SECONDS, Finding, Lease
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.rules import Rule, Rules
from kvshelf.errors import StorageError
from kvshelf.format.kinds import FULL_BIT
from kvshelf.shelf.pins import Pins

#: Seconds for which a listing is used; in the last ones no sweep begins because of it, so that the
#: next listing is there in time.
PLAN_SECONDS: Final = 600.0
_LAST_SECONDS: Final = 60.0
#: Part of the shelf that is left in a plan when it is used again: as much as a sweep deletes.
_LEAST_LEFT: Final = 0.1
#: Smaller shelves are listed anew each time.
_LEAST_OBJECTS: Final = 1 << 13
#: Most units that are chosen for later.
_MOST_SPARE: Final = 1 << 22
#: Folders with objects of a salt group. As many of them show how much the shelf has grown as have
#: so many objects, and at least this part, in so many groups at most.
_FOLDERS: Final = 256
_SAMPLED: Final = 2048
_LEAST_PART: Final = 1 / 32
_MOST_GROUPS: Final = 64
#: Seconds after which a lease is renewed.
_RENEW_SECONDS: Final = 20.0
#: Processor time after which a sweep pauses for a moment: the longest time it may keep the GIL.
_WORK_SECONDS: Final = 0.5e-3


@dataclass(eq=False)
class Running:
    """The recurring work of a sweep: pauses, its lease, its end.

    Parameters
    ----------
    lease : Lease
        Which this process holds.
    bound : ShelfBound
    now : Callable
        Returns the storage's time.
    finding : Callable
        Returns what is published to other processes whenever the lease is renewed.
    may_continue : Callable
        Whether the sweep may continue.
    look : Callable
        Called about once a second: updates what stores may write, and returns the part of a core
        that the sweep may take.
    earlier : float
        Seconds that its listing has taken in sweeps before it.

    Attributes
    ----------
    lost : bool
        The lease was lost, or the process was paused during deletions.
    """

    lease: Lease
    bound: ShelfBound
    _: KW_ONLY
    now: Callable[[], float]
    finding: Callable[[], Finding | None]
    may_continue: Callable[[], bool]
    look: Callable[[], float]
    earlier: float = 0.0
    lost: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._began = time.thread_time()
        self._spent = 0.0
        self._part = self.look()
        self._local = threading.local()
        self._stepped = self._renewed = self._looked = steady()
        #: When the current plan ends.
        self._end: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of processor time of all threads, roughly, and those of earlier sweeps."""
        # On remote storage the work is done on several threads.
        return self.earlier + max(time.thread_time() - self._began, self._spent)

    def until(self, end: float) -> None:
        """Carry out a plan that ends at `end`, by :func:`steady`."""
        self._end = end

    def stops(self) -> bool:
        """Whether the sweep must end now; on its own thread, after each piece of work."""
        now = steady()
        paused, self._stepped = now > self._stepped + LEASE_SECONDS, now
        if paused or now >= self._renewed + _RENEW_SECONDS:
            self._renew(now)
        self.lost |= paused and self._end is not None
        if now >= self._looked + (HURRIED_SECONDS if self.bound.is_urgent else LOOK_SECONDS):
            self._looked, self._part = now, self.look()
        return self.lost or not self.may_continue() or (self._end is not None and now >= self._end)

    def rests(self) -> None:
        """Sleep if the calling thread has worked for long enough; for each piece of its work."""
        worked = time.thread_time()
        spent = worked - getattr(self._local, "slept_at", worked)
        if spent > _WORK_SECONDS:
            self._spent += spent
            time.sleep(min(spent * (1 / self._part - 1), 1.0))
            self._local.slept_at = time.thread_time()
        elif not hasattr(self._local, "slept_at"):
            self._local.slept_at = worked

    def _renew(self, now: float) -> None:
        try:
            self.lost |= self.lease.renew(self.now(), self.finding()) is None
            self._renewed = now
        except StorageError:
            # It is tried again until the lease has ended by itself.
            self.lost |= now > self._renewed + LEASE_SECONDS


@dataclass(eq=False)
class Begun:
    """A listing that can continue where it was interrupted.

    Parameters
    ----------
    storage : Backend
    begin : Finding
        What is known of the shelf at its begin.
    before : Parents or None
        What an earlier listing knew.

    Attributes
    ----------
    seconds : float
        Seconds of processor time of the sweeps that it has taken.
    end : float
        When it is too old to continue, by :func:`steady`.
    """

    storage: Backend
    begin: Finding
    before: InitVar[Parents | None]
    seconds: float = field(default=0.0, init=False)
    end: float = field(default=math.inf, init=False)

    def __post_init__(self, before: Parents | None) -> None:
        self._scan = Scan(self.storage, before=before, in_part=True)

    def complete(self, rules: Rules, running: Running, resolution: float) -> Listed | None:
        """List the rest, and choose what to delete; None if the sweep was ended.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        try:
            inventory = self._scan.run(running.stops, running.rests)
            if inventory is None:
                return None
            bound, large = rules.max_bytes, len(inventory) >= _LEAST_OBJECTS
            # A sweep may begin before the shelf is full.
            if bound is not None and large and inventory.nbytes > rules.low * bound:
                spare = bound * min(1.0, _MOST_SPARE / len(inventory))
                rules = replace(rules, spare=int(spare))
            pins = Pins.load(self.storage, inventory.aged_at)
            marks = Marks.read(self.storage)
        finally:
            self.end = steady() + PLAN_SECONDS
        return Listed(plan(inventory, rules, pins=pins, marks=marks, resolution=resolution))


class Listed:
    """The findings of a listing, and the part of its plan that is left.

    Attributes
    ----------
    plan : Plan
        What is left to delete, in order. Deletions that free space are chosen for later as well.
    end : float
        When the listing is no longer used, by :func:`steady`.
    parents : Parents or None
        For the next listing, which need not read them again.
    """

    def __init__(self, planned: Plan) -> None:
        self.plan = planned
        self.end = steady() + PLAN_SECONDS
        several = any(space.rule.mask & ~FULL_BIT for space in planned.inventory.namespaces)
        self.parents = planned.inventory.parents if several else None
        self._folders = _folders(planned.inventory)
        #: Bytes of what is left.
        self._left = int(planned.nbytes.sum())

    def held_at(self, now: float) -> int:
        """Return the bytes of what was on the shelf when the listing began, at `now`."""
        inventory = self.plan.inventory
        return self.plan.before - int(inventory.size[inventory.born >= now].sum())

    @property
    def is_fresh(self) -> bool:
        """Whether another sweep may begin because of it."""
        worthwhile = (
            len(self.plan.inventory) >= _LEAST_OBJECTS and len(self._folders) <= _MOST_GROUPS
        )
        enough = self._left >= _LEAST_LEFT * self.plan.before
        return worthwhile and enough and steady() < self.end - _LAST_SECONDS

    def measure(self, storage: Backend, running: Running, estimate: int) -> int | None:
        """Return the bytes on the shelf now, by a part of it; None if the sweep was ended.

        Parameters
        ----------
        storage : Backend
        running : Running
        estimate : int
            By the numbers of other processes. It counts as far as the part confirms it.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        inventory = self.plan.inventory
        part = min(max(_SAMPLED / len(inventory), _LEAST_PART), 1.0)
        chosen = random.SystemRandom().sample(range(_FOLDERS), round(part * _FOLDERS))
        among = np.isin(inventory.key[:, 0], chosen)
        before, count = int(inventory.size[among].sum()), int(among.sum())
        now = 0
        for folder in self._folders:
            for byte in chosen:
                for info in storage.list(f"{folder}/{byte:02x}"):
                    now += info.size
                    running.rests()
                if running.stops():
                    return None
        # Twice the standard deviation, if all objects had changed.
        error = 2 * math.sqrt(2 * count * (1 - part)) * before / max(1, count)
        most = inventory.nbytes + (now - before + error) * (_FOLDERS / len(chosen))
        return max(0, min(estimate, int(most)))

    def take(self, rules: Rules, held: int) -> Plan:
        """Take from the plan what to delete now, of a shelf that holds so many bytes."""
        planned = self.plan
        # Deletions that free space come last.
        by_size = planned.reasons == Rule.SIZE
        first = int(by_size.argmax()) if by_size.any() else len(planned.units)
        held -= int(planned.nbytes[:first].sum())
        held -= sum(leftover.size for leftover, _ in planned.leftovers)
        free = rules.to_free(held, rules.max_bytes)
        freed = np.cumsum(planned.nbytes[first:]) - planned.nbytes[first:]
        end = first + int(np.searchsorted(freed, free))
        self.plan = _rows(replace(planned, leftovers=[]), slice(end, None))
        self._left = int(self.plan.nbytes.sum())
        return _rows(planned, slice(end))

    def delete(
        self,
        storage: Backend,
        rules: Rules,
        held: int,
        running: Running,
        *,
        on_freed: Callable[[int, int], None],
    ) -> Iterator[Outcome]:
        """Delete from a shelf that holds so many bytes; yield what was done, in pieces.

        Parameters
        ----------
        storage : Backend
        rules : Rules
        held : int
        running : Running
        on_freed : Callable
            Called with number and bytes of the files of each deletion.
        """
        running.until(self.end)
        while True:
            taken = self.take(rules, held)
            if not len(taken.units) and not taken.leftovers:
                return
            count = freed = 0

            def note(outcome: Outcome) -> None:
                nonlocal count, freed
                on_freed(outcome.count - count, outcome.nbytes - freed)
                count, freed = outcome.count, outcome.nbytes

            outcome = carry_out(
                storage, taken, stop=running.stops, pace=running.rests, on_progress=note
            )
            yield outcome
            if not outcome.finished:
                return
            # Some stay, because they were used since: deletions continue until enough is free.
            held, rules = held - freed - outcome.gone.nbytes, replace(rules, high=rules.low)


def _folders(inventory: Inventory) -> list[str]:
    """Return the folders of salt groups of namespaces; some more than are looked at, at most."""
    places = np.unique(inventory.namespace.astype(np.int64) << 32 | inventory.group)
    return [
        f"{inventory.namespaces[place >> 32].name}/{inventory.groups[place & 0xFFFFFFFF]}"
        for place in places[: _MOST_GROUPS + 1].tolist()
    ]


def _rows(planned: Plan, rows: slice) -> Plan:
    """Return some of the units of a plan."""
    columns: dict[str, Any] = {
        column.name: values[rows]
        for column in fields(planned)
        if isinstance(values := getattr(planned, column.name), np.ndarray)
    }
    return replace(planned, **columns)
