"""What ``kvshelf gc`` and ``kvshelf rm`` delete: the plan of a shelf, or of a part of it.

Owns where the files of a plan are looked for, the scores from which on bounds delete chunks, and
the counts. The rules are those of engines (:mod:`kvshelf.capacity.visit`).

A plan holds numbers and no names: a shelf is listed once to make it (:func:`plan_for`), and once
more to carry it out (:func:`pick`). Both decide alike by the same time, so what is not used in
between is deleted as planned.

Contracts
---------
* Of what a choice selects only objects are in a plan; of whole namespaces also markers.
* Objects of prompts are found by name: nothing is listed.
* A folder that cannot be listed is left out, and named (:attr:`Plan.skipped`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvshelf.backends.base import NEVER_OLD, time_for_ages
from kvshelf.capacity.keeper import LOW
from kvshelf.capacity.parallel import in_parallel, threads_for_calls
from kvshelf.capacity.visit import (
    HOUR,
    Part,
    Picked,
    Reason,
    Rules,
    Total,
    Unit,
    aged,
    is_old,
    reason_to_delete,
    score,
)
from kvshelf.errors import StorageError, size_text
from kvshelf.shelf.pins import Pins
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.listing import list_parts
from kvshelf.tools.prompt_objects import known_formats, prompt_objects
from kvshelf.tools.prompts import Prompt, TokenPrompt

#: Part of the median age within which ages count as equal, and bounds of that in seconds.
_SAME_PART: Final = 1 / 32
_LEAST_SAME: Final = 1.0
_MOST_SAME: Final = HOUR


@dataclass(frozen=True, slots=True)
class Selection:
    """What a command deletes, and where it looks for that.

    Attributes
    ----------
    rules : Rules
        With a choice, or for the whole shelf.
    max_bytes, group_max_bytes : int or None
        Bounds of the shelf, and of each salt group of a namespace.
    folders : Collection of str or None
        Only of these namespace folders.
    prompts : Sequence of Prompt or TokenPrompt, optional
        Only the chunks and tails of these prompts, which are token ids.
    """

    rules: Rules
    max_bytes: int | None = None
    group_max_bytes: int | None = None
    folders: Collection[str] | None = None
    prompts: Sequence[Prompt | TokenPrompt] | None = None


@dataclass(slots=True)
class GroupPart:
    """What is in a plan of one salt group of one namespace folder.

    Attributes
    ----------
    namespace, group : str
    objects, bytes : int
    last_used : float
        Latest use of any of the objects, seconds since the epoch.
    """

    namespace: str
    group: str
    objects: int = 0
    bytes: int = 0
    last_used: float = 0.0


@dataclass(slots=True)
class Plan:
    """What a selection deletes from a shelf.

    Attributes
    ----------
    selection : Selection
    now, old_at : float
        The time at which it was made, and by which ages count, in seconds since the epoch.
    pins : Pins
    before : Total
        All objects that were listed.
    chosen : dict of Reason and Total
        Files to delete.
    pinned : Total
        Objects that stay because they are pinned.
    freed : int
        Bytes of the objects to delete.
    parts : dict of (str, str) and GroupPart
        What a choice selects, by namespace folder and salt group.
    skipped : dict of str and StorageError
        Folders that could not be listed.
    same : float
        See :func:`kvshelf.capacity.visit.score`.
    cuts : dict of str and float
        Scores from which on bounds delete, see :data:`kvshelf.capacity.visit.Cuts`.
    """

    selection: Selection
    now: float
    old_at: float
    pins: Pins
    before: Total = field(default_factory=Total)
    chosen: dict[Reason, Total] = field(default_factory=dict)
    pinned: Total = field(default_factory=Total)
    freed: int = 0
    parts: dict[tuple[str, str], GroupPart] = field(default_factory=dict)
    skipped: dict[str, StorageError] = field(default_factory=dict)
    same: float = _LEAST_SAME
    cuts: dict[str, float] = field(default_factory=dict)

    @property
    def files(self) -> int:
        """Number of files to delete."""
        return sum(total.count for total in self.chosen.values())

    @property
    def problem(self) -> str | None:
        """Why more stays than was asked for; None if it does not."""
        bound, after = self.selection.max_bytes, self.before.nbytes - self.freed
        if self.pins.problem is not None or bound is None or after <= bound:
            return self.pins.problem
        return (
            f"{size_text(after)} would stay, more than {size_text(bound)}: there are no other"
            f" chunks that may be deleted; {size_text(self.pinned.nbytes)} are pinned"
        )

    def reason(self, unit: Unit, scored: float = 0.0) -> Reason | None:
        """Return why a unit of a score is deleted, see :func:`reason_to_delete`."""
        return reason_to_delete(
            unit, self.selection.rules, self.cuts, scored, self.old_at, pinned=self.pins_it(unit)
        )

    def pins_it(self, unit: Unit) -> bool:
        """Whether a unit is pinned."""
        return bool(self.pins) and self.pins.covers(unit.space, unit.group, unit.key)

    def choose(self, reason: Reason, nbytes: int, count: int = 1) -> None:
        """Count files that are deleted."""
        self.chosen.setdefault(reason, Total()).add(nbytes, count)


@dataclass(slots=True)
class _Group:
    """The units that a bound may delete, and the bytes that count against it.

    Attributes
    ----------
    aged, index, nbytes, files : array
        Of each unit, see :func:`kvshelf.capacity.visit.score`.
    held : int
        Bytes of all units, also of those that it may not delete.
    """

    aged: array[float] = field(default_factory=lambda: array("d"))
    index: array[int] = field(default_factory=lambda: array("I"))
    nbytes: array[int] = field(default_factory=lambda: array("q"))
    files: array[int] = field(default_factory=lambda: array("I"))
    held: int = 0

    def add(self, unit: Unit, now: float) -> None:
        self.aged.append(aged(unit, now))
        self.index.append(unit.index)
        self.nbytes.append(unit.nbytes)
        self.files.append(len(unit.names))


def plan_for(
    shelf: Shelf,
    selection: Selection,
    now: float,
    *,
    on_listed: Callable[[int], None] = lambda files: None,
) -> Plan:
    """Return what is deleted from a shelf; change nothing.

    Parameters
    ----------
    shelf : Shelf
    selection : Selection
    now : float
        The storage's time, or this machine's, in seconds since the epoch.
    on_listed : Callable
        Called with numbers of files that were listed.

    Raises
    ------
    ConfigError
        If a chosen namespace has no usable description, and prompts are chosen.
    StorageError
        If the shelf or its pins cannot be read.
    """
    old_at = time_for_ages(now, shelf.url)
    plan = Plan(selection, now, old_at, _pins(shelf, now, old_at))
    bounded = selection.max_bytes is not None or selection.group_max_bytes is not None
    groups: dict[str, _Group] = {}
    for part in _parts(shelf, plan, on_listed):
        for leftover in part.leftovers:
            if is_old(leftover, selection.rules, old_at):
                plan.choose(leftover.reason, leftover.nbytes)
        for unit in part.units:
            plan.before.add(unit.nbytes, len(unit.names))
            reason = plan.reason(unit)
            if reason is not None:
                _choose(plan, unit, reason)
                continue
            pinned = plan.pins_it(unit)
            if pinned and _would_go(plan, unit):
                plan.pinned.add(unit.nbytes, len(unit.names))
            if bounded:
                quota = selection.group_max_bytes is not None
                where = f"{unit.space}/{unit.group}" if quota else ""
                group = groups.setdefault(where, _Group())
                group.held += unit.nbytes
                if not pinned:
                    group.add(unit, now)
    if bounded:
        _cut(plan, groups)
    return plan


def pick(shelf: Shelf, plan: Plan) -> Iterator[Picked]:
    """List what a plan was made for once more; yield what it deletes."""
    plan.pins = _pins(shelf, plan.now, plan.old_at)
    for part in _parts(shelf, plan):
        for leftover in part.leftovers:
            if is_old(leftover, plan.selection.rules, plan.old_at):
                yield leftover, leftover.reason
        for unit in part.units:
            reason = plan.reason(unit, score(aged(unit, plan.now), unit.index, plan.same))
            if reason is not None:
                yield unit, reason


def _pins(shelf: Shelf, now: float, old_at: float) -> Pins:
    # A pin ends by the clock that is behind.
    return Pins.read(shelf.backend, now if old_at == NEVER_OLD else old_at)


def _parts(
    shelf: Shelf, plan: Plan, on_listed: Callable[[int], None] = lambda files: None
) -> Iterator[Part]:
    """Yield what lies where a plan is made for."""
    selection = plan.selection
    if selection.prompts is not None:
        yield from _of_prompts(shelf, selection.folders, selection.prompts, plan.now)
        return
    group = None if selection.rules.choice is None else selection.rules.choice.group
    yield from list_parts(
        shelf.backend,
        selection.folders,
        plan.now,
        plan.skipped,
        group=group,
        on_listed=on_listed,
    )


def _of_prompts(
    shelf: Shelf,
    folders: Collection[str] | None,
    prompts: Sequence[Prompt | TokenPrompt],
    now: float,
) -> Iterator[Part]:
    """Yield the objects that prompts have, a namespace at a time."""
    backend = shelf.backend
    for folder, fmt in known_formats(shelf, folders):
        found = prompt_objects(backend, folder, fmt, prompts, tails=True)
        names = (each.name for each in found)
        infos = in_parallel(backend.info, names, threads_for_calls(backend))
        part = Part()
        rows = (info for _, info in infos if info is not None)
        part.add_rows(rows, now, shared=backend.properties.shared)
        yield part


def _choose(plan: Plan, unit: Unit, reason: Reason) -> None:
    plan.choose(reason, unit.nbytes, len(unit.names))
    plan.freed += unit.nbytes
    if reason is Reason.CHOSEN:
        at = unit.space, unit.group
        part = plan.parts.setdefault(at, GroupPart(*at))
        part.objects += len(unit.names)
        part.bytes += unit.nbytes
        part.last_used = max(part.last_used, unit.used)


def _would_go(plan: Plan, unit: Unit) -> bool:
    """Whether a bound or a choice may delete a unit if it is not pinned."""
    rules = plan.selection.rules
    return (
        rules.choice is None
        or reason_to_delete(unit, rules, {}, 0.0, plan.old_at, pinned=False) is not None
    )


# ------------------------------------------------------------------------- bounds

#: Scores, bytes and files of units.
_Columns = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


def _cut(plan: Plan, groups: dict[str, _Group]) -> None:
    """Set from which scores on bounds delete, and count what that is."""
    ages = np.concatenate([np.empty(0), *(np.asarray(one.aged) for one in groups.values())])
    if not len(ages):
        return
    plan.same = min(max(_LEAST_SAME, float(np.median(ages)) * _SAME_PART), _MOST_SAME)
    bound, quota = plan.selection.max_bytes, plan.selection.group_max_bytes
    left: list[_Columns] = []
    for where, one in groups.items():
        scores = np.fromiter(map(score, one.aged, one.index, repeat(plan.same)), float)
        columns = scores, np.asarray(one.nbytes), np.asarray(one.files)
        if quota is not None and not where.endswith("/_"):
            columns = _take(plan, where, Reason.GROUP, columns, one.held - LOW * quota)
        left.append(columns)
    if bound is not None:
        free = plan.before.nbytes - plan.freed - LOW * bound
        scores, nbytes, files = map(np.concatenate, zip(*left, strict=True))
        _take(plan, "", Reason.SIZE, (scores, nbytes, files), free)


def _take(plan: Plan, where: str, reason: Reason, columns: _Columns, free: float) -> _Columns:
    """Set the score from which on units have so many bytes; return the units that are left.

    Parameters
    ----------
    plan : Plan
    where : str
        The folder of a salt group; "" for the shelf.
    reason : Reason
    columns : tuple of array
    free : float
        Where they have fewer bytes, all go.
    """
    scores, nbytes, files = columns
    if free <= 0 or not len(scores):
        return columns
    order = np.argsort(scores)[::-1]
    last = int(np.searchsorted(np.cumsum(nbytes[order]), free))
    plan.cuts[where] = cut = float(scores[order[min(last, len(order) - 1)]])
    taken, freed = scores >= cut, int(nbytes[scores >= cut].sum())
    plan.choose(reason, freed, int(files[taken].sum()))
    plan.freed += freed
    return scores[~taken], nbytes[~taken], files[~taken]
