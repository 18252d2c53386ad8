"""What ``kvshelf gc`` and ``kvshelf rm`` delete: the plan of a shelf, or of a part of it.

Owns where the files of a plan are looked for, the scores from which on bounds delete chunks, and
the counts. The rules are those of engines (:mod:`kvshelf.capacity.sweep`).

A plan holds numbers and no names: a shelf is listed once to make it (:func:`make`), and once
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
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kvshelf.capacity.keepers import NEVER_OLD, time_for_ages
from kvshelf.capacity.limits import HOUR, LOW
from kvshelf.capacity.order import aged, same_age, score
from kvshelf.capacity.parallel import in_parallel, threads_for_calls
from kvshelf.capacity.sweep import (
    REASONS_OF_UNITS,
    Leftover,
    Part,
    Picked,
    Reason,
    Rules,
    Total,
    Unit,
    is_old,
    reason_to_delete,
)
from kvshelf.errors import StorageError, size_text
from kvshelf.prompts import Prompt, TokenPrompt
from kvshelf.shelf.pins import Pins
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.listing import list_parts
from kvshelf.tools.prompt_objects import known_formats, prompt_objects
from kvshelf.tools.usage import Row


@dataclass(slots=True)
class Plan:
    """What is deleted from a shelf.

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
    before, pinned : Total
        All objects that were listed, and those that stay because they are pinned.
    chosen : dict of Reason and Total
        Files to delete.
    freed : int
        Bytes of the objects among them.
    rows : dict of str and Row
        What a choice selects, by folders of salt groups.
    skipped : dict of str and StorageError
        Folders that could not be listed.
    pins : Pins
    now, old_at : float
        When it was made, and the time by which ages count, in seconds since the epoch.
    same : float
        See :func:`kvshelf.capacity.order.score`.
    cuts : dict of str and float
        Scores from which on bounds delete, see :data:`kvshelf.capacity.sweep.Cuts`.
    """

    rules: Rules
    max_bytes: int | None = None
    group_max_bytes: int | None = None
    folders: Collection[str] | None = None
    prompts: Sequence[Prompt | TokenPrompt] | None = None
    before: Total = field(default_factory=Total)
    pinned: Total = field(default_factory=Total)
    chosen: dict[Reason, Total] = field(default_factory=dict)
    freed: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    skipped: dict[str, StorageError] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    now: float = 0.0
    old_at: float = 0.0
    same: float = 1.0
    cuts: dict[str, float] = field(default_factory=dict)

    @property
    def files(self) -> int:
        """Number of files to delete."""
        return sum(total.count for total in self.chosen.values())

    @property
    def after(self) -> int:
        """Bytes of the objects that stay."""
        return self.before.nbytes - self.freed

    @property
    def problem(self) -> str | None:
        """Why more stays than was asked for; None if it does not."""
        if self.pins.problem is not None or self.after <= (self.max_bytes or self.after):
            return self.pins.problem
        return (
            f"{size_text(self.after)} stay, more than max_bytes: there are no other chunks that may"
            f" be deleted; {size_text(self.pinned.nbytes)} are pinned"
        )

    def pins_it(self, unit: Unit) -> bool:
        """Whether a unit is pinned."""
        return bool(self.pins) and self.pins.covers(unit.space, unit.group, unit.key)

    def choose(self, reason: Reason, nbytes: int, count: int = 1) -> None:
        """Count files that are deleted."""
        self.chosen.setdefault(reason, Total()).add(nbytes, count)
        if reason in REASONS_OF_UNITS:
            self.freed += nbytes


@dataclass(slots=True)
class _Group:
    """The units that a bound may delete, and the bytes that count against it.

    Attributes
    ----------
    aged, place, nbytes, files : array
        Of each unit, see :func:`kvshelf.capacity.order.score`.
    held : int
        Bytes of all units, also of those that it may not delete.
    """

    aged: array[float] = field(default_factory=lambda: array("d"))
    place: array[float] = field(default_factory=lambda: array("d"))
    nbytes: array[int] = field(default_factory=lambda: array("q"))
    files: array[int] = field(default_factory=lambda: array("I"))
    held: int = 0

    def add(self, unit: Unit, now: float) -> None:
        self.aged.append(aged(unit, now))
        self.place.append(unit.place)
        self.nbytes.append(unit.nbytes)
        self.files.append(len(unit.names))


def make(
    shelf: Shelf, plan: Plan, now: float, on_listed: Callable[[int], None] = lambda files: None
) -> None:
    """Find what a plan deletes from a shelf; change nothing.

    Parameters
    ----------
    shelf : Shelf
    plan : Plan
        What is to be deleted, and nothing found yet.
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
    plan.now, plan.old_at = now, time_for_ages(now, shelf.url)
    bounded = plan.max_bytes is not None or plan.group_max_bytes is not None
    # The same without pins.
    bare = replace(plan.rules.choice, pinned=True) if plan.rules.choice else None
    groups: dict[str, _Group] = {}
    for what, reason in _decide(shelf, plan, on_listed):
        if isinstance(what, Leftover):
            if reason is not None:
                plan.choose(reason, what.nbytes)
            continue
        count, where = len(what.names), what.where
        plan.before.add(what.nbytes, count)
        if reason is not None:
            plan.choose(reason, what.nbytes, count)
            if reason is Reason.CHOSEN:
                plan.rows.setdefault(where, Row(where)).add(what)
            continue
        pinned = plan.pins_it(what)
        if pinned and (bare is None or _reason(plan, what, replace(plan.rules, choice=bare))):
            plan.pinned.add(what.nbytes, count)
        if bounded:
            group = groups.setdefault(where if plan.group_max_bytes else "", _Group())
            group.held += what.nbytes
            if not pinned:
                group.add(what, now)
    if groups:
        _cut(plan, groups)


def pick(shelf: Shelf, plan: Plan) -> Iterator[Picked]:
    """List what a plan was made for once more; yield what it deletes."""
    for what, reason in _decide(shelf, plan):
        if reason is not None:
            yield what, reason


def _decide(
    shelf: Shelf, plan: Plan, on_listed: Callable[[int], None] = lambda files: None
) -> Iterator[tuple[Unit | Leftover, Reason | None]]:
    """Yield what lies where a plan is made for, and why it is deleted; None: it stays."""
    # A pin ends by the clock that is behind.
    plan.pins = Pins.read(shelf.backend, plan.now if plan.old_at == NEVER_OLD else plan.old_at)
    if plan.prompts is not None:
        parts = _of_prompts(shelf, plan.folders, plan.prompts, plan.now)
    else:
        group = None if plan.rules.choice is None else plan.rules.choice.group
        parts = list_parts(
            shelf.backend, plan.folders, plan.now, plan.skipped, group=group, on_listed=on_listed
        )
    for part in parts:
        for leftover in part.leftovers:
            old = is_old(leftover, plan.rules, plan.old_at)
            yield leftover, leftover.reason if old else None
        for unit in part.units:
            yield unit, _reason(plan, unit, plan.rules)


def _reason(plan: Plan, unit: Unit, rules: Rules) -> Reason | None:
    scored = score(aged(unit, plan.now), unit.place, plan.same)
    return reason_to_delete(unit, rules, plan.cuts, scored, plan.old_at, pinned=plan.pins_it(unit))


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
        part, rows = Part(), (info for _, info in infos if info is not None)
        part.add_rows(rows, now, shared=backend.properties.shared)
        yield part


# ------------------------------------------------------------------------- bounds

#: Scores, bytes and files of units.
_Columns = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


def _cut(plan: Plan, groups: dict[str, _Group]) -> None:
    """Set from which scores on bounds delete, and count what that is."""
    ages = np.concatenate([np.empty(0), *(np.asarray(one.aged) for one in groups.values())])
    if not len(ages):
        return
    plan.same = same_age(float(np.median(ages)), HOUR)
    bound, quota = plan.max_bytes, plan.group_max_bytes
    left: list[_Columns] = []
    for where, one in groups.items():
        scores = np.fromiter(map(score, one.aged, one.place, repeat(plan.same)), float)
        columns = scores, np.asarray(one.nbytes), np.asarray(one.files)
        if quota is not None and not where.endswith("/_"):
            columns = _take(plan, where, Reason.GROUP, columns, one.held - LOW * quota)
        left.append(columns)
    if bound is not None:
        free = plan.after - LOW * bound
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
    taken = scores >= cut
    plan.choose(reason, int(nbytes[taken].sum()), int(files[taken].sum()))
    return scores[~taken], nbytes[~taken], files[~taken]
