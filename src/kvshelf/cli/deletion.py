"""What ``kvshelf gc`` and ``kvshelf rm`` do: plan a deletion, show it, carry it out.

Owns where the files of a plan are looked for, the scores from which on bounds delete chunks, the
counts, the table and the JSON. The rules are those of engines (:mod:`kvshelf.capacity.sweep`).

A plan holds numbers and no names: a shelf is listed once to make it (:func:`make`), and once
more to carry it out (:func:`pick`). Both decide alike by the same time, so an object that is not
used in between is deleted as planned.

Contracts
---------
* A choice selects only objects; a choice of whole namespaces also selects markers.
* Objects of prompts are found by name: nothing is listed.
* A folder that cannot be listed is left out, and named (:attr:`Plan.skipped`).
"""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, repeat
from typing import Any, Final

from kvshelf.capacity.keepers import NEVER_OLD, time_for_ages
from kvshelf.capacity.limits import HOUR, LOW
from kvshelf.capacity.order import aged, same_age, score, score_to_free
from kvshelf.capacity.parallel import in_parallel, threads_for_calls
from kvshelf.capacity.sweep import (
    REASONS_OF_UNITS,
    Leftover,
    Outcome,
    Part,
    Picked,
    Reason,
    Rules,
    Total,
    Unit,
    is_old,
    reason_to_delete,
)
from kvshelf.capacity.sweep import delete as delete_picked
from kvshelf.cli.common import (
    columns,
    error_text,
    summary,
    time_text,
    warn,
    warn_of_skipped,
    write_out,
)
from kvshelf.cli.listing import Row, formats_of, list_parts, storage_time
from kvshelf.cli.progress import Display
from kvshelf.cli.prompts import prompt_chunks, stored_objects
from kvshelf.errors import StorageError, printable, size_text
from kvshelf.prompts import TokenPrompt
from kvshelf.shelf.pins import Pins
from kvshelf.shelf.shelf import Shelf

_WHY: Final = {
    Reason.TEMPORARY: "temporaries, and what was set aside",
    Reason.MARKER: "markers of old hand-overs",
    Reason.TAIL: "tails of old hand-overs",
    Reason.RESERVED: "old files in reserved folders",
    Reason.EMPTY: "empty folders",
    Reason.AGE: "not used for max_age",
    Reason.GROUP: "used longest ago in a salt group above its bound",
    Reason.SIZE: "used longest ago of all, above max_bytes",
}


@dataclass(slots=True)
class Plan:
    """A deletion from a shelf: what is asked for, and what was listed.

    Attributes
    ----------
    rules : Rules
        With a choice, or for the whole shelf.
    max_bytes, group_max_bytes : int or None
        Bounds of the shelf, and of each salt group of a namespace.
    folders : Collection of str or None
        Only of these namespace folders.
    prompts : Sequence of TokenPrompt, optional
        Only the chunks and tails of these prompts.
    before, pinned : Total
        All objects that were listed, and those that stay because they are pinned.
    chosen : dict of Reason and Total
        Files to delete.
    freed : int
        Bytes of the objects among them.
    rows : dict of str and Row
        The objects that a choice selects, by folders of salt groups.
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
    prompts: Sequence[TokenPrompt] | None = None
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

    def is_pinned(self, unit: Unit) -> bool:
        """Whether a unit is pinned."""
        return bool(self.pins) and self.pins.covers(unit.space, unit.group, unit.key)

    def choose(self, reason: Reason, nbytes: int, count: int = 1) -> None:
        """Count files that are deleted."""
        self.chosen.setdefault(reason, Total()).add(nbytes, count)
        if reason in REASONS_OF_UNITS:
            self.freed += nbytes


@dataclass(slots=True)
class _Candidates:
    """The units of a group that a bound may delete, packed: a shelf may have millions.

    Attributes
    ----------
    aged, place, nbytes, files : array
        Of each unit, see :func:`kvshelf.capacity.order.score`.
    group_bytes : int
        Bytes of all units of the group, also of those that a bound may not delete.
    scores : array
        Of each unit, once all units are known.
    """

    aged: array[float] = field(default_factory=lambda: array("d"))
    place: array[float] = field(default_factory=lambda: array("d"))
    nbytes: array[int] = field(default_factory=lambda: array("q"))
    files: array[int] = field(default_factory=lambda: array("I"))
    group_bytes: int = 0
    scores: array[float] = field(default_factory=lambda: array("d"))


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
    ignoring_pins = plan.rules
    if plan.rules.choice is not None:
        ignoring_pins = replace(plan.rules, choice=replace(plan.rules.choice, pinned=True))
    groups: dict[str, _Candidates] = {}
    for item, reason in _decide(shelf, plan, on_listed):
        if isinstance(item, Leftover):
            if reason is not None:
                plan.choose(reason, item.nbytes)
            continue
        files, folder = len(item.names), item.where
        plan.before.add(item.nbytes, files)
        if reason is not None:
            plan.choose(reason, item.nbytes, files)
            if reason is Reason.CHOSEN:
                plan.rows.setdefault(folder, Row(folder)).add(item)
            continue
        is_pinned = plan.is_pinned(item)
        if is_pinned and (plan.rules.choice is None or _reason(plan, item, ignoring_pins)):
            plan.pinned.add(item.nbytes, files)
        if bounded:
            group = groups.setdefault(folder if plan.group_max_bytes else "", _Candidates())
            group.group_bytes += item.nbytes
            if not is_pinned:
                group.aged.append(aged(item, now))
                group.place.append(item.place)
                group.nbytes.append(item.nbytes)
                group.files.append(files)
    _set_cuts(plan, groups)


def pick(shelf: Shelf, plan: Plan) -> Iterator[Picked]:
    """List the shelf once more; yield what a plan deletes, and why."""
    for item, reason in _decide(shelf, plan):
        if reason is not None:
            yield item, reason


def _decide(
    shelf: Shelf, plan: Plan, on_listed: Callable[[int], None] = lambda files: None
) -> Iterator[tuple[Unit | Leftover, Reason | None]]:
    """Yield the units and leftovers in the range of a plan, and why they are deleted; None: not."""
    # A pin ends by the clock that is behind.
    plan.pins = Pins.read(shelf.backend, plan.now if plan.old_at == NEVER_OLD else plan.old_at)
    if plan.prompts is not None:
        parts = _parts_of_prompts(shelf, plan.folders, plan.prompts, plan.now)
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
    return reason_to_delete(
        unit, rules, plan.cuts, scored, plan.old_at, pinned=plan.is_pinned(unit)
    )


def _parts_of_prompts(
    shelf: Shelf,
    folders: Collection[str] | None,
    prompts: Sequence[TokenPrompt],
    now: float,
) -> Iterator[Part]:
    """Yield the stored objects of prompts, a namespace at a time."""
    backend = shelf.backend
    for folder, fmt in formats_of(shelf, folders):
        chunks = prompt_chunks(fmt, prompts, tails=True)
        names = (stored.name for stored in stored_objects(backend, folder, fmt, chunks))
        infos = in_parallel(backend.info, names, threads_for_calls(backend))
        part, rows = Part(), (info for _, info in infos if info is not None)
        part.add_rows(rows, now, shared=backend.properties.shared)
        yield part


def _set_cuts(plan: Plan, groups: dict[str, _Candidates]) -> None:
    """Set the scores from which on bounds delete units, and count these units."""
    ages = [*chain.from_iterable(group.aged for group in groups.values())]
    if not ages:
        return
    plan.same = same_age(statistics.median(ages), HOUR)
    all_below_quota = _Candidates()
    for folder, group in groups.items():
        group.scores.extend(map(score, group.aged, group.place, repeat(plan.same)))
        if plan.group_max_bytes is not None and not folder.endswith("/_"):
            free = group.group_bytes - LOW * plan.group_max_bytes
            _cut(plan, folder, Reason.GROUP, group, free)
        cut = plan.cuts.get(folder, math.inf)
        for unit_score, nbytes, files in zip(group.scores, group.nbytes, group.files, strict=True):
            if unit_score < cut:
                all_below_quota.scores.append(unit_score)
                all_below_quota.nbytes.append(nbytes)
                all_below_quota.files.append(files)
    if plan.max_bytes is not None:
        _cut(plan, "", Reason.SIZE, all_below_quota, plan.after - LOW * plan.max_bytes)


def _cut(plan: Plan, folder: str, reason: Reason, group: _Candidates, free: float) -> None:
    """Choose the units of a group with the largest scores, until they have `free` bytes."""
    order = sorted(range(len(group.scores)), key=group.scores.__getitem__, reverse=True)
    cut = score_to_free(((group.scores[i], group.nbytes[i]) for i in order), free)
    for index in order:
        if group.scores[index] < cut:
            break
        plan.choose(reason, group.nbytes[index], group.files[index])
    plan.cuts[folder] = cut


# --------------------------------------------------------------------- show and carry out


def delete(shelf: Shelf, plan: Plan, *, yes: bool, as_json: bool) -> None:
    """Show what a plan deletes, and with `yes` delete it.

    Parameters
    ----------
    shelf : Shelf
        Writable if `yes`.
    plan : Plan
        What is to be deleted, and nothing found yet.
    yes, as_json : bool
    """
    with Display("listing", as_json=as_json) as listing:
        now = storage_time(shelf.backend) if yes else time.time()
        make(shelf, plan, now, listing.listed)
    for name, problem in plan.pins.unreadable.items():
        warn(f"the pin {name} pins nothing: {printable(problem)}")
    if plan.problem is not None:
        warn(plan.problem)
    warn_of_skipped(plan.skipped)
    if not as_json:
        write_out(_table(shelf.url, plan))
    display, outcome = Display("deleting", as_json=as_json), Outcome()
    with display.working():
        if yes and plan.files:
            delete_picked(
                shelf.backend,
                pick(shelf, plan),
                now=plan.now,
                on_progress=lambda outcome: display.show(outcome.done, plan.files),
                outcome=outcome,
            )
            if outcome.error is not None:
                first = error_text(outcome.error)
                warn(f"{outcome.failed} files could not be deleted, the first of them: {first}")
    display.finish(
        {"shelf": shelf.url, "dry_run": not yes} | _json(plan, outcome, yes),
        _summary(plan, outcome) if yes else _prediction(plan),
        complete=plan.problem is None and not (plan.skipped or outcome.failed),
    )


_by_group = columns(10, 10, -16, 0)
_by_reason = columns(10, 10, 0)


def _table(url: str, plan: Plan) -> str:
    looked_at = "" if plan.rules.choice is None else "looked at "
    before = f"{plan.before.count} objects, {size_text(plan.before.nbytes)}"
    lines = [f"{url}: {looked_at}{before}\n"]
    if plan.rows:
        lines.append(_by_group("OBJECTS", "SIZE", "LAST USED", "NAMESPACE/GROUP"))
    for row in plan.rows.values():
        used = time_text(row.last_used)
        lines.append(_by_group(row.objects, size_text(row.bytes), used, row.name))
    totals = [(why, plan.chosen[reason]) for reason, why in _WHY.items() if reason in plan.chosen]
    if totals:
        lines.append(_by_reason("FILES", "SIZE", "WHY"))
    lines += (_by_reason(total.count, size_text(total.nbytes), why) for why, total in totals)
    return "".join(lines)


def _json(plan: Plan, outcome: Outcome, yes: bool) -> dict[str, Any]:
    freed = sum(outcome.nbytes[reason] for reason in REASONS_OF_UNITS) if yes else plan.freed
    return {
        "objects": plan.before.count,
        "bytes": plan.before.nbytes,
        "bytes_after": plan.before.nbytes - freed,
        "pinned": _total(plan.pinned),
        "rows": [asdict(row) for row in plan.rows.values()],
        "chosen": {reason.value: _total(total) for reason, total in plan.chosen.items()},
        "deleted": {
            reason.value: {"files": files, "bytes": outcome.nbytes[reason]}
            for reason, files in outcome.deleted.items()
        },
        "kept": outcome.kept,
        "gone": outcome.gone,
        "failed": outcome.failed,
        "problem": plan.problem,
    }


def _total(total: Total) -> dict[str, int]:
    return {"files": total.count, "bytes": total.nbytes}


def _prediction(plan: Plan) -> str:
    freed = size_text(sum(total.nbytes for total in plan.chosen.values()))
    text = f"would delete {plan.files} files, {freed}"
    if plan.rules.choice is None:
        text += f"; {size_text(plan.after)} would stay"
    return summary([text, "--yes deletes"] if plan.files else [text], *_pinned(plan))


def _summary(plan: Plan, outcome: Outcome) -> str:
    nbytes = outcome.nbytes.total()
    return summary(
        [f"deleted {outcome.deleted.total()} of {plan.files} files, {size_text(nbytes)}"],
        (outcome.kept, "used or changed meanwhile, left"),
        (outcome.gone, "gone meanwhile"),
        (outcome.failed, "failed"),
        *_pinned(plan),
    )


def _pinned(plan: Plan) -> list[tuple[int, str]]:
    if plan.rules.choice is None:
        return []
    return [(plan.pinned.count, f"({size_text(plan.pinned.nbytes)}) pinned, left")]
