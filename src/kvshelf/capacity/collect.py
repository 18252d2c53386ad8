"""What is deleted from a shelf: a plan from an inventory and limits, and its execution.

Owns which leftovers are old enough to go, when chunks go, and how much at once. In which order
chunks go is :mod:`kvshelf.shelf.eviction`'s. Engines and ``kvshelf gc`` make the same plans:

==============  ================================================================================
reason          what goes
==============  ================================================================================
temporary       temporaries that nothing has changed for an hour
quarantine      bad objects a week after they were moved aside, or an hour if room is needed
marker, tail    markers and tails of hand-overs at the age `Limits.keep_tails`
orphan          chunks whose parent is gone, a day after their last use
age             what was not used for `Limits.max_age`
group           the oldest chunks of a salt group above `Limits.group_max_bytes`
size            the oldest chunks of all while the shelf holds more than `Limits.max_bytes`
==============  ================================================================================

A bound in bytes acts when 90 % of it are used, and makes room until 80 % are. What goes because of
its age goes by the earlier of the storage's clock and this machine's. While these are more than an
hour apart only bounds in bytes act.

Contracts
---------
* :func:`plan` is pure. Pinned chunks are in no plan, whatever their age. Tails are no chunks: they
  go at their own age, and pins only keep younger ones.
* :func:`carry_out` looks at each object again, and leaves a unit alone of which an object has been
  used or replaced since the inventory. What others have deleted meanwhile is not an error.
* Each unit goes whole, or the kinds of it that no hit can use. A process that is killed in between
  leaves what costs a miss, at most.
* Nothing is deleted that the inventory did not find in its place: an object, or a file that kvshelf
  itself leaves behind.

Threads
-------
:func:`carry_out` blocks on the storage. Where the latency is high it deletes on threads of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np

from kvshelf.backends import Backend
from kvshelf.backends.base import NEVER_OLD
from kvshelf.capacity.inventory import (
    Flags,
    Integers,
    Inventory,
    Leftover,
    Masks,
    Sort,
    Total,
    changed_at,
    last_use,
)
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.parallel import in_parallel, threads_for
from kvshelf.capacity.pins import Pins
from kvshelf.errors import StorageError
from kvshelf.format.kinds import KINDS
from kvshelf.shelf.eviction import FULL_BIT, GONE, UNKNOWN, Units, choose
from kvshelf.shelf.orphans import TEMPORARY_SECONDS

#: A bad object leaves quarantine at this age, in seconds.
QUARANTINE_SECONDS: Final = 7 * 86400.0
#: The same where room is needed.
_CROWDED_QUARANTINE_SECONDS: Final = 3600.0
#: A chunk whose parent is gone goes when it was not used for so long: the parent may come back.
ORPHAN_SECONDS: Final = 86400.0
#: After so many deletions that the storage refuses, and none that it allows, no more are tried.
_MOST_REFUSED: Final = 64

#: A leftover, or rows of the inventory that go together; and why.
_Task: TypeAlias = "tuple[Leftover | Integers, Reason]"


def _never() -> bool:
    return False


def _do_nothing() -> None:
    pass


class Reason(IntEnum):
    """Why something is deleted, see the module."""

    TEMPORARY = 0
    QUARANTINE = 1
    MARKER = 2
    TAIL = 3
    ORPHAN = 4
    AGE = 5
    GROUP = 6
    SIZE = 7


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a shelf.

    Attributes
    ----------
    max_bytes : int or None
        Most bytes of the whole shelf.
    max_age : float or None
        Seconds after its last use at which a chunk goes.
    group_max_bytes : int or None
        Most bytes of each salt group of a namespace. Requests without a salt are in none.
    keep_tails : float or None
        Age in seconds at which tails and markers go; None: never.
    largest : int
        Bytes of the largest chunk that is stored at present: a bound in bytes leaves room for it.
    high, low : float
        Shares of a bound in bytes at which deletions begin, and end, unless that is too little.
    """

    max_bytes: int | None = None
    max_age: float | None = None
    group_max_bytes: int | None = None
    keep_tails: float | None = 3600.0
    largest: int = 0
    high: float = 0.9
    low: float = 0.8

    def to_free(self, held: int, bound: int | None) -> int:
        """Return how many of `held` bytes must go because of a bound in bytes."""
        if bound is None:
            return 0
        # What is larger than the bound is not stored, whatever goes.
        most = bound - self.largest if self.largest <= bound else bound
        return held - min(int(self.low * bound), most) if held > min(self.high * bound, most) else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be deleted, in order: leftovers first, then units or kinds of them.

    Attributes
    ----------
    inventory : Inventory
    leftovers : list of (Leftover, Reason)
    units : int64 array [n]
        Numbers of units.
    kinds : uint8 array [n]
        The kinds of each that go, as bits, see :mod:`kvshelf.shelf.eviction`.
    reasons : uint8 array [n]
        A :class:`Reason` for each.
    nbytes : int64 array [n]
        Bytes of each.
    before : int
        Bytes on the shelf that count against its bound.
    pinned : int
        Bytes of pinned chunks.
    problem : str or None
        Why the shelf, or a salt group, stays above its bound, or so near it that nothing can be
        stored.
    """

    inventory: Inventory
    leftovers: list[tuple[Leftover, Reason]]
    units: Integers
    kinds: Masks
    reasons: Masks
    nbytes: Integers
    before: int
    pinned: int
    problem: str | None

    @property
    def after(self) -> int:
        """Bytes that stay."""
        return self.before - int(self.nbytes.sum()) - sum(left.size for left, _ in self.leftovers)

    def totals(self) -> dict[Reason, Total]:
        """Return the number and bytes of the files that go, by reason; only reasons that occur."""
        found = {reason: Total() for reason in Reason}
        for leftover, reason in self.leftovers:
            found[reason].add(leftover.size)
        bits = (self.kinds[:, None] >> np.arange(len(KINDS), dtype=np.uint8)) & 1
        counts = (self.inventory.object_counts()[self.units] * bits).sum(axis=1)
        for reason in Reason:
            there = self.reasons == reason
            found[reason].add(int(self.nbytes[there].sum()), int(counts[there].sum()))
        return {reason: total for reason, total in found.items() if total.count}

    def victims(self) -> Iterator[tuple[Integers, Reason]]:
        """Yield the objects that go together, as rows of the inventory, and why; in order."""
        kind = self.inventory.kind
        for unit, kinds, reason in zip(self.units, self.kinds, self.reasons, strict=True):
            rows = self.inventory.members(int(unit))
            yield rows[(kinds >> kind[rows]) & 1 == 1], Reason(reason)

    def names(self) -> Iterator[tuple[str, Reason]]:
        """Yield the names of all that goes, relative to the root, and why; in order."""
        yield from ((leftover.name, reason) for leftover, reason in self.leftovers)
        for rows, reason in self.victims():
            yield from ((self.inventory.name(row), reason) for row in rows.tolist())


def plan(
    inventory: Inventory,
    limits: Limits,
    *,
    pins: Pins | None = None,
    marks: Marks | None = None,
    resolution: float = 3600.0,
) -> Plan:
    """Return what is to be deleted so that a shelf keeps to its limits.

    Parameters
    ----------
    inventory : Inventory
    limits : Limits
    pins : Pins, optional
    marks : Marks, optional
        Uses that the objects' times do not show.
    resolution : float
        Seconds in which uses are recorded once, see :func:`kvshelf.capacity.uses.resolution`.
    """
    now = inventory.aged_at
    if now == NEVER_OLD:
        limits = replace(limits, max_age=None)
    held = inventory.nbytes
    choice = _Choice(inventory, limits, now, resolution, marks, pins)
    crowded = limits.to_free(held, limits.max_bytes) > 0
    leftovers = _leftovers(inventory, limits, now, crowded)
    held -= sum(leftover.size for leftover, _ in leftovers)
    choice.take_old_tails()
    choice.take_orphans()
    if limits.group_max_bytes is not None:
        choice.take_above_group_bounds()
    choice.take_above_bound(held)
    units, kinds, reasons, nbytes = choice.columns()
    pinned = int(choice.sizes[:, choice.units.pinned].sum())
    return Plan(
        inventory,
        leftovers,
        units,
        kinds,
        reasons,
        nbytes,
        before=inventory.nbytes,
        pinned=pinned,
        problem=_problem(limits, held - int(nbytes.sum()), pinned, choice.pinned_groups),
    )


def _problem(
    limits: Limits, left: int, pinned: int, pinned_groups: list[tuple[str, int]]
) -> str | None:
    bound = limits.max_bytes
    if bound is not None and min(left, pinned) > limits.high * bound:
        return (
            f"pinned chunks alone have {pinned} bytes of max_bytes = {bound}, and no deletion can"
            " make room for others: remove pins, or raise the bound"
        )
    if bound is not None and left > bound:
        return (
            f"{left} bytes stay, more than max_bytes = {bound}: {pinned} of them are pinned, and"
            " the others are no chunks that may go"
        )
    if pinned_groups:
        (name, nbytes), *others = pinned_groups
        more = f", and {len(others)} other groups" if others else ""
        return (
            f"pinned chunks alone have {nbytes} bytes in the salt group {name}{more}, more than"
            f" group_max_bytes = {limits.group_max_bytes}: remove pins, or raise the bound"
        )
    return None


def _leftovers(
    inventory: Inventory, limits: Limits, now: float, crowded: bool
) -> list[tuple[Leftover, Reason]]:
    """Return the leftovers that are old enough to go."""
    rules = {
        Sort.TEMPORARY: (Reason.TEMPORARY, TEMPORARY_SECONDS),
        Sort.QUARANTINED: (
            Reason.QUARANTINE,
            _CROWDED_QUARANTINE_SECONDS if crowded else QUARANTINE_SECONDS,
        ),
        Sort.MARKER: (Reason.MARKER, limits.keep_tails),
    }
    found = []
    for leftover in inventory.leftovers:
        reason, age = rules[leftover.sort]
        if age is not None and leftover.changed < now - age:
            found.append((leftover, reason))
    return found


class _Choice:
    """What goes of the units of an inventory, chosen reason by reason."""

    def __init__(
        self,
        inventory: Inventory,
        limits: Limits,
        now: float,
        resolution: float,
        marks: Marks | None,
        pins: Pins | None,
    ) -> None:
        units = inventory.units(marks=marks, pins=pins)
        self._inventory = inventory
        self._limits = limits
        self._now = now
        self._resolution = resolution
        #: Bytes of each kind of each unit that are not chosen, int64 [kinds, units]; zeros take no
        #: memory. `units` has the same arrays.
        self.sizes = np.zeros((len(KINDS), len(units)), np.int64)
        for sizes, of_kind in zip(self.sizes, (units.full, units.window, units.state), strict=True):
            if of_kind.any():
                sizes[:] = of_kind
        full, window, state = self.sizes
        self.units = replace(units, full=full, window=window, state=state)
        self._reach = inventory.window_chunks() if window.any() else None
        self._parts: list[tuple[Integers, Masks, Masks, Integers]] = []
        #: Salt groups whose pinned chunks alone exceed their bound, and bytes of these.
        self.pinned_groups: list[tuple[str, int]] = []

    def columns(self) -> tuple[Integers, Masks, Masks, Integers]:
        """Return units, kinds, reasons and bytes of all that is chosen."""
        if not self._parts:
            return (
                np.empty(0, np.int64),
                np.empty(0, np.uint8),
                np.empty(0, np.uint8),
                np.empty(0, np.int64),
            )
        units, kinds, reasons, nbytes = (
            np.concatenate(column) for column in zip(*self._parts, strict=True)
        )
        return units, kinds, reasons, nbytes

    def _add(self, units: Integers, kinds: Masks, reasons: Masks) -> None:
        nbytes = np.zeros(len(units), np.int64)
        # A unit may come more than once, with different kinds.
        for number, sizes in enumerate(self.sizes):
            of_kind = (kinds >> number) & 1 == 1
            if sizes.any():
                nbytes[of_kind] += sizes[units[of_kind]]
                sizes[units[of_kind]] = 0
        self._parts.append((units, kinds, reasons, nbytes))

    def _take(self, wanted: Flags, reason: Reason) -> None:
        """Choose whole units, those deepest in their prompts first."""
        there = self.sizes.any(axis=0)
        units = np.flatnonzero(wanted & there)
        units = units[np.argsort(self.units.index[units], kind="stable")[::-1]]
        every = np.full(len(units), (1 << len(KINDS)) - 1, np.uint8)
        self._add(units, every, np.full(len(units), reason, np.uint8))

    def take_old_tails(self) -> None:
        """Choose tails by their own age."""
        keep = self._limits.keep_tails
        if keep is not None:
            tails = self._inventory.tail[self._inventory.first_rows] > 0
            self._take(tails & (self.units.used < self._now - keep), Reason.TAIL)

    def take_orphans(self) -> None:
        """Choose what comes behind a chunk that is gone."""
        units = self.units
        needs_full = np.ones(len(units), np.bool_)
        if units.needs is not None:
            needs_full = (units.needs & FULL_BIT) != 0
        is_there = units.full > 0
        cut = needs_full & (units.index > 0) & (units.parent == GONE)
        followed = units.parent >= 0
        cut[followed] |= needs_full[followed] & ~is_there[units.parent[followed]]
        # In each step the unit that is looked at is twice as far away.
        above = np.where(followed, units.parent, np.arange(len(units)))
        for _ in range(len(units).bit_length() + 1):
            further = above[above]
            more = cut | cut[above]
            if (more == cut).all() and (further == above).all():
                break
            cut, above = more, further
        cut &= ~units.pinned & (units.used < self._now - ORPHAN_SECONDS)
        self._take(cut, Reason.ORPHAN)

    def take_above_group_bounds(self) -> None:
        """Choose the oldest units of each salt group of a namespace that holds too much."""
        inventory = self._inventory
        groups = inventory.group[inventory.first_rows].astype(np.int64)
        place = inventory.unit_tags() * np.int64(len(inventory.groups)) + groups
        salted = np.array([name != "_" for name in inventory.groups], np.bool_)
        order = np.argsort(place, kind="stable")
        order = order[salted[groups[order]]]
        for units in np.split(order, np.flatnonzero(np.diff(place[order])) + 1):
            held = int(self.sizes[:, units].sum())
            free = self._limits.to_free(held, self._limits.group_max_bytes)
            if free:
                self._evict(units, free, Reason.GROUP)
                self._note_pinned(units)

    def _note_pinned(self, units: Integers) -> None:
        """Note a salt group whose pinned chunks alone exceed its bound."""
        inventory, bound = self._inventory, self._limits.group_max_bytes
        pinned = units[self.units.pinned[units]]
        nbytes = int(self.sizes[:, pinned].sum())
        if bound is not None and nbytes > bound:
            row = inventory.first_rows[pinned[0]]
            folder = inventory.namespaces[inventory.namespace[row]].name
            group = inventory.groups[inventory.group[row]]
            self.pinned_groups.append((f"{folder}/{group}", nbytes))

    def take_above_bound(self, held: int) -> None:
        """Choose what is too old, and the oldest units of all if `held` bytes are too many."""
        held -= sum(int(nbytes.sum()) for *_, nbytes in self._parts)
        free = self._limits.to_free(held, self._limits.max_bytes)
        if free or self._limits.max_age is not None:
            self._evict(None, free, Reason.SIZE)

    def _evict(self, among: Integers | None, free: int, reason: Reason) -> None:
        """Choose units among some or all, in the order of eviction."""
        units = self.units if among is None else _part(self.units, among)
        reach = self._reach if among is None or self._reach is None else self._reach[among]
        max_age = self._limits.max_age
        victims = choose(
            units,
            free=free,
            now=self._inventory.now if self._now == NEVER_OLD else self._now,
            resolution=self._resolution,
            max_age=max_age,
            window_chunks=0 if reach is None else reach,
        )
        reasons = np.full(len(victims.rows), reason, np.uint8)
        if max_age is not None:
            reasons[units.used[victims.rows] < self._now - max_age] = Reason.AGE
        rows = victims.rows if among is None else among[victims.rows]
        self._add(rows, victims.kinds, reasons)


def _part(units: Units, rows: Integers) -> Units:
    """Return some units as units of their own; a parent that is not among them is unknown."""
    places = np.full(len(units), UNKNOWN, np.int64)
    places[rows] = np.arange(len(rows))
    parent = units.parent[rows]
    there = parent >= 0
    parent[there] = places[parent[there]]
    columns: dict[str, Any] = {
        column.name: values[rows]
        for column in fields(Units)
        if (values := getattr(units, column.name)) is not None
    }
    columns["parent"] = parent
    return Units(**columns)


# ----------------------------------------------------------------------------------- execution


@dataclass(slots=True)
class Outcome:
    """What a plan's execution did.

    Attributes
    ----------
    deleted : dict of Reason and Total
        Files that were deleted, by reason.
    kept : Total
        Files that stay, because they were used, replaced or changed meanwhile.
    gone : int
        Files that somebody else had deleted.
    failed : int
        Files that the storage did not allow to delete.
    error : StorageError or None
        The first such refusal, or the trouble of the storage that ended the execution.
    finished : bool
        Whether all of the plan was tried.
    """

    deleted: dict[Reason, Total] = field(default_factory=dict)
    kept: Total = field(default_factory=Total)
    gone: int = 0
    failed: int = 0
    error: StorageError | None = None
    finished: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that were deleted."""
        return sum(total.nbytes for total in self.deleted.values())

    @property
    def count(self) -> int:
        """Number of files that were deleted."""
        return sum(total.count for total in self.deleted.values())


def carry_out(
    backend: Backend,
    plan: Plan,
    *,
    stop: Callable[[], bool] = _never,
    pace: Callable[[], None] = _do_nothing,
    seconds: float | None = None,
    on_deleted: Callable[[bytes, int], None] | None = None,
) -> Outcome:
    """Delete what a plan says, in its order.

    Parameters
    ----------
    backend : Backend
    plan : Plan
    stop : Callable
        Asked after each deletion; True ends the execution.
    pace : Callable
        Called for each deletion, on any thread; may sleep.
    seconds : float, optional
        Time after which the execution ends.
    on_deleted : Callable, optional
        Called on the caller's thread with chunk key and chunk index of each unit of which something
        was deleted.

    Returns
    -------
    Outcome
        Also what was done before trouble of the storage, which is in it and is not raised.
    """
    outcome = Outcome()
    end = None if seconds is None else time.monotonic() + seconds
    inventory = plan.inventory

    def work(task: _Task) -> _Done:
        pace()
        what, _ = task
        if isinstance(what, Leftover):
            return _delete_leftover(backend, what)
        return _delete_objects(backend, inventory, what)

    tasks: Iterator[_Task] = chain(plan.leftovers, plan.victims())
    try:
        for (what, reason), done in in_parallel(work, tasks, threads_for(backend)):
            if done.count:
                outcome.deleted.setdefault(reason, Total()).add(done.nbytes, done.count)
                if on_deleted is not None and not isinstance(what, Leftover):
                    row = what[0]
                    on_deleted(inventory.key[row].tobytes(), int(inventory.index[row]))
            outcome.kept.add(done.kept_bytes, done.kept)
            outcome.gone += done.gone
            outcome.failed += done.failed
            outcome.error = outcome.error or done.error
            if outcome.failed >= _MOST_REFUSED and not outcome.count:
                return outcome
            if stop() or (end is not None and time.monotonic() > end):
                return outcome
    except StorageError as error:
        outcome.error = error
        return outcome
    outcome.finished = True
    return outcome


@dataclass(slots=True)
class _Done:
    """What became of one leftover, or of the objects that go together."""

    count: int = 0
    nbytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    gone: int = 0
    failed: int = 0
    error: StorageError | None = None

    def delete(self, backend: Backend, name: str, nbytes: int) -> None:
        """Delete one file; raise what may pass by itself."""
        try:
            deleted = backend.delete(name)
        except StorageError as error:
            if error.retryable:
                raise
            self.failed += 1
            self.error = self.error or error
            return
        self.count += deleted
        self.nbytes += nbytes * deleted
        self.gone += not deleted


def _delete_leftover(backend: Backend, leftover: Leftover) -> _Done:
    done = _Done()
    info = backend.info(leftover.name)
    if info is None:
        done.gone = 1
    elif changed_at(info) > leftover.changed:
        done.kept, done.kept_bytes = 1, leftover.size
    else:
        done.delete(backend, leftover.name, info.size)
    return done


def _delete_objects(backend: Backend, inventory: Inventory, rows: Integers) -> _Done:
    """Delete objects of one unit, unless one of them was used or replaced since the inventory."""
    done = _Done()
    found: list[tuple[str, int]] = []
    for row in rows.tolist():
        name = inventory.name(row)
        info = backend.info(name)
        if info is None:
            done.gone += 1
        elif last_use(info, inventory.now) > inventory.used[row]:
            return _Done(kept=len(rows), kept_bytes=int(inventory.size[rows].sum()))
        else:
            found.append((name, info.size))
    for name, nbytes in found:
        done.delete(backend, name, nbytes)
    return done
