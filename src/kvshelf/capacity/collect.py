"""What is deleted from a shelf: a plan, made from an inventory and rules.

Owns the choice of the files to delete. :mod:`kvshelf.capacity.rules` has the rules,
:mod:`kvshelf.capacity.eviction` the order of chunks, and :mod:`kvshelf.capacity.deletion` carries
plans out. Engines and commands make the same plans.

Contracts
---------
* :func:`plan` is pure. Pinned chunks are in no plan, whatever their age, unless a command chose
  them as well. Tails have an age of their own: that of the rules, or the one for which the engines
  of their namespace say that they keep them. Only in the latter case do pins keep older ones.
* Each unit is deleted whole, or only the kinds of it that no hit can use.
* Nothing is in a plan that the inventory did not find in its place: an object, or a file that
  kvshelf itself leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvshelf.backends.base import NEVER_OLD
from kvshelf.capacity.eviction import Units, Victims, choose
from kvshelf.capacity.files import Leftover, Sort, Total
from kvshelf.capacity.inventory import Floats, Inventory
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.rules import Rule, Rules
from kvshelf.errors import size_text
from kvshelf.format.forest import GONE, UNKNOWN, Flags, Integers, Masks
from kvshelf.format.kinds import FULL_BIT, KINDS
from kvshelf.shelf.pins import Pins


@dataclass(frozen=True, slots=True)
class Plan:
    """The files to delete, in order: leftovers first, then units or kinds of them.

    Attributes
    ----------
    inventory : Inventory
    rules : Rules
    leftovers : list of (Leftover, Rule)
    units : int64 array [n]
        Numbers of units.
    kinds : uint8 array [n]
        The kinds of each that are deleted, as bits, see :mod:`kvshelf.capacity.eviction`.
    reasons : uint8 array [n]
        A :class:`Rule` for each.
    nbytes : int64 array [n]
        Bytes of each.
    used : float64 array [n]
        Last use of each, seconds since the epoch.
    before : int
        Bytes on the shelf that count against its bound.
    pinned : Total
        Objects of pinned chunks, of those that are chosen if a command chose some.
    heeds_pins : bool
        Pins and marks keep what they name, also those that are made before it is carried out.
    problem : str or None
        Why the shelf, or a salt group, stays above its bound, or so close to it that nothing can be
        stored; or why it is not known what is pinned.
    """

    inventory: Inventory
    rules: Rules
    leftovers: list[tuple[Leftover, Rule]]
    units: Integers
    kinds: Masks
    reasons: Masks
    nbytes: Integers
    used: Floats
    before: int
    pinned: Total
    heeds_pins: bool
    problem: str | None

    @property
    def after(self) -> int:
        """Bytes that stay."""
        return self.before - int(self.nbytes.sum()) - sum(left.size for left, _ in self.leftovers)

    def totals(self) -> dict[Rule, Total]:
        """Return number and bytes of the files to delete, by reason; only reasons that occur."""
        found = {reason: Total() for reason in Rule}
        for leftover, reason in self.leftovers:
            found[reason].add(leftover.size)
        counts = self.counts()
        for reason in Rule:
            there = self.reasons == reason
            found[reason].add(int(self.nbytes[there].sum()), int(counts[there].sum()))
        return {reason: total for reason, total in found.items() if total.count}

    def counts(self) -> Integers:
        """Return the number of objects to delete of each unit, int64 [n]."""
        bits = (self.kinds[:, None] >> np.arange(len(KINDS), dtype=np.uint8)) & 1
        counts: Integers = (self.inventory.object_counts()[self.units] * bits).sum(axis=1)
        return counts

    def victims(self) -> Iterator[tuple[list[int], Rule]]:
        """Yield the objects to delete together, as rows of the inventory, and why; in order."""
        kind = self.inventory.kind
        several = bool(kind.any())
        columns = (column.tolist() for column in (self.units, self.kinds, self.reasons))
        for unit, kinds, reason in zip(*columns, strict=True):
            rows = self.inventory.members(unit)
            if several:
                rows = rows[(kinds >> kind[rows]) & 1 == 1]
            yield rows.tolist(), Rule(reason)

    def names(self) -> Iterator[tuple[str, Rule]]:
        """Yield the names of all files to delete, relative to the root, and why; in order."""
        yield from ((leftover.name, reason) for leftover, reason in self.leftovers)
        for rows, reason in self.victims():
            yield from ((self.inventory.name(row), reason) for row in rows)


def plan(
    inventory: Inventory,
    rules: Rules,
    *,
    pins: Pins | None = None,
    marks: Marks | None = None,
    resolution: float = 3600.0,
) -> Plan:
    """Return the plan of deletions by some rules.

    Parameters
    ----------
    inventory : Inventory
    rules : Rules
    pins : Pins, optional
        None: pins that are made later keep nothing either. For a shelf only where no pin may keep
        what the rules delete.
    marks : Marks, optional
        Uses that the objects' times do not show.
    resolution : float
        Seconds in which uses are recorded once, see :func:`kvshelf.capacity.uses.resolution`.
    """
    now = inventory.aged_at
    if now == NEVER_OLD:
        rules = replace(rules, max_age=None)
    held = inventory.nbytes
    picks = _Picks(inventory, rules, now, resolution, marks, pins)
    leftovers = _leftovers(inventory, rules, now)
    held -= sum(leftover.size for leftover, _ in leftovers)
    picks.take_chosen()
    picks.take_old_tails()
    picks.take_orphans()
    picks.take_above_group_bounds()
    picks.take_above_bound(held)
    units, kinds, reasons, nbytes = picks.columns()
    problem = None if pins is None else pins.problem
    return Plan(
        inventory,
        rules,
        leftovers,
        units,
        kinds,
        reasons,
        nbytes,
        picks.units.used[units],
        before=inventory.nbytes,
        pinned=picks.pinned,
        heeds_pins=pins is not None,
        problem=problem
        or _problem(rules, held - int(nbytes.sum()), picks.pinned.nbytes, picks.pinned_groups),
    )


def _problem(
    rules: Rules, left: int, pinned: int, pinned_groups: list[tuple[str, int]]
) -> str | None:
    bound = rules.max_bytes
    if bound is not None and min(left, pinned) > rules.high * bound:
        return (
            f"pinned chunks alone have {size_text(pinned)} of max_bytes, {size_text(bound)}, and no"
            " deletion can free space for others: remove pins, or raise the bound"
        )
    if bound is not None and left > bound:
        return (
            f"{size_text(left)} stay, more than max_bytes, {size_text(bound)}: {size_text(pinned)}"
            " of that are pinned, and the others are no chunks that may be deleted"
        )
    if pinned_groups:
        (name, nbytes), *others = pinned_groups
        more = f", and {len(others)} other groups" if others else ""
        return (
            f"pinned chunks alone have {size_text(nbytes)} in the salt group {name}{more}, more"
            f" than group_max_bytes, {size_text(rules.group_max_bytes or 0)}: remove pins"
        )
    return None


def _leftovers(inventory: Inventory, rules: Rules, now: float) -> list[tuple[Leftover, Rule]]:
    """Return the leftovers to delete."""
    ages = {
        Sort.TEMPORARY: (Rule.TEMPORARY, rules.temporaries),
        Sort.MARKER: (Rule.MARKER, rules.markers),
    }
    chosen = rules.choice is not None and rules.choice.leftovers
    found = []
    for leftover in inventory.leftovers:
        reason, age = ages[leftover.sort]
        if chosen and leftover.sort is not Sort.TEMPORARY:
            found.append((leftover, Rule.CHOSEN))
        elif age is not None and leftover.changed < now - age:
            found.append((leftover, reason))
    return found


class _Picks:
    """The units of an inventory to delete, picked rule by rule."""

    def __init__(
        self,
        inventory: Inventory,
        rules: Rules,
        now: float,
        resolution: float,
        marks: Marks | None,
        pins: Pins | None,
    ) -> None:
        units = inventory.units(marks=marks, pins=pins)
        self._inventory = inventory
        self._rules = rules
        self._now = now
        self._resolution = resolution
        self.units = units
        #: Bytes of each kind of each unit that are not picked, int64 [units] each.
        self.sizes = units.full, units.window, units.state
        self._reach = inventory.reach() if units.window.any() else None
        nothing, no_kinds = np.empty(0, np.int64), np.empty(0, np.uint8)
        self._parts = [(nothing, no_kinds, no_kinds, nothing)]
        #: Salt groups whose pinned chunks alone exceed their bound, and bytes of these.
        self.pinned_groups: list[tuple[str, int]] = []
        self.pinned = self._total(units.pinned)

    def _total(self, wanted: Flags) -> Total:
        """Return the number and bytes of the objects of some units."""
        if not wanted.any():
            return Total()
        counts = self._inventory.object_counts()
        return Total(int(counts[wanted].sum()), sum(int(of[wanted].sum()) for of in self.sizes))

    def columns(self) -> tuple[Integers, Masks, Masks, Integers]:
        """Return units, kinds, reasons and bytes of all that is picked."""
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

    def _take(self, wanted: Flags, reason: Rule) -> None:
        """Pick whole units, those deepest in their prompts first."""
        full, window, state = self.sizes
        units = np.flatnonzero(wanted & ((full > 0) | (window > 0) | (state > 0)))
        units = units[np.argsort(self.units.index[units], kind="stable")[::-1]]
        every = np.full(len(units), (1 << len(KINDS)) - 1, np.uint8)
        self._add(units, every, np.full(len(units), reason, np.uint8))

    def take_chosen(self) -> None:
        """Pick what a command chose."""
        choice = self._rules.choice
        if choice is None:
            return
        wanted = np.ones(len(self.units), np.bool_)
        if choice.group is not None:
            named = np.array([name == choice.group for name in self._inventory.groups], np.bool_)
            wanted &= named[self._inventory.group[self._inventory.first_rows]]
        if choice.unused_for is not None:
            wanted &= self.units.used < self._now - choice.unused_for
        pinned = wanted & self.units.pinned & (not choice.pinned)
        self.pinned = self._total(pinned)
        self._take(wanted & ~pinned, Rule.CHOSEN)

    def take_old_tails(self) -> None:
        """Pick tails by their own age."""
        keep = self._rules.tails
        if keep is None or not self._inventory.tail.any():
            return
        tails = self._inventory.tail[self._inventory.first_rows] > 0
        self._take(tails & (self.units.used < self._now - keep), Rule.TAIL)

    def take_orphans(self) -> None:
        """Pick the chunks behind one that is gone."""
        if self._rules.orphans is None:
            return
        units = self.units
        needs_full = np.ones(len(units), np.bool_)
        if units.needs is not None:
            needs_full = (units.needs & FULL_BIT) != 0
        is_there = units.full > 0
        cut = needs_full & (units.index > 0) & (units.parent == GONE)
        followed = units.parent >= 0
        cut[followed] |= needs_full[followed] & ~is_there[units.parent[followed]]
        if not cut.any():
            return
        # Each step checks a unit twice as far away as the one before.
        above = np.where(followed, units.parent, np.arange(len(units)))
        for _ in range(len(units).bit_length() + 1):
            further = above[above]
            more = cut | cut[above]
            if (more == cut).all() and (further == above).all():
                break
            cut, above = more, further
        cut &= ~units.pinned & (units.used < self._now - self._rules.orphans)
        self._take(cut, Rule.ORPHAN)

    def take_above_group_bounds(self) -> None:
        """Pick the oldest units of each salt group of a namespace that holds too much."""
        bound = self._rules.group_max_bytes
        if bound is None:
            return
        inventory = self._inventory
        groups = inventory.group[inventory.first_rows].astype(np.int64)
        tags = inventory.unit_tags().astype(np.int64)
        _, any_unit, place = np.unique(
            tags * len(inventory.groups) + groups, return_index=True, return_inverse=True
        )
        salted = np.array([name != "_" for name in inventory.groups], np.bool_)[groups]
        nbytes = np.where(salted, sum(self.sizes), 0)
        held, pinned = np.zeros((2, len(any_unit)), np.int64)
        np.add.at(held, place, nbytes)
        np.add.at(pinned, place, nbytes * self.units.pinned)
        free = np.array([self._rules.to_free(of_group, bound) for of_group in held.tolist()], int)
        units = np.flatnonzero(salted & (free[place] > 0))
        # All of them in the order of eviction, of which each group gives its beginning.
        victims = self._order(units, int(nbytes[units].sum()))
        rows = units[victims.rows]
        order = np.argsort(place[rows], kind="stable")
        first = np.flatnonzero(np.diff(place[rows[order]], prepend=-1))
        before = np.cumsum(victims.nbytes[order]) - victims.nbytes[order]
        before -= np.repeat(before[first], np.diff(first, append=len(order)))
        taken = np.sort(order[before < free[place[rows[order]]]])
        self._add(rows[taken], victims.kinds[taken], self._why(rows[taken], Rule.GROUP))
        for crowded in np.flatnonzero(pinned > bound).tolist():
            group = inventory.group_of(inventory.first_rows[any_unit[crowded]])
            self.pinned_groups.append((group, int(pinned[crowded])))

    def take_above_bound(self, held: int) -> None:
        """Pick what is too old, and the oldest units of all if `held` bytes are too many."""
        held -= sum(int(nbytes.sum()) for *_, nbytes in self._parts)
        free = self._rules.to_free(held, self._rules.max_bytes)
        free += self._rules.spare
        if free or self._rules.max_age is not None:
            victims = self._order(None, free)
            self._add(victims.rows, victims.kinds, self._why(victims.rows, Rule.SIZE))

    def _order(self, among: Integers | None, free: int) -> Victims:
        """Return what to delete of some units or all, in the order of eviction."""
        units = self.units if among is None else _part(self.units, among)
        reach = self._reach if among is None or self._reach is None else self._reach[among]
        return choose(
            units,
            free=free,
            now=self._inventory.now if self._now == NEVER_OLD else self._now,
            resolution=self._resolution,
            max_age=self._rules.max_age,
            reach=0 if reach is None else reach,
        )

    def _why(self, units: Integers, reason: Rule) -> Masks:
        """Return the reasons for units deleted because of a bound in bytes, or of their age."""
        reasons = np.full(len(units), reason, np.uint8)
        if self._rules.max_age is not None:
            reasons[self.units.used[units] < self._now - self._rules.max_age] = Rule.AGE
        return reasons


def _part(units: Units, rows: Integers) -> Units:
    """Return some units as units of their own; a parent that is not among them is unknown."""
    places = np.full(len(units), UNKNOWN, np.int64)
    places[rows] = np.arange(len(rows))
    part = units.part(rows)
    there = part.parent >= 0
    part.parent[there] = places[part.parent[there]]
    return part
