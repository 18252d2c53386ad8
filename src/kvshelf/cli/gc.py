"""``kvshelf gc``: deletes what a shelf need not keep; shows it first.

Owns the options, the table and the JSON; see :mod:`kvshelf.cli.deletion`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from kvshelf.capacity.visit import Outcome, Reason, Rules, Total
from kvshelf.cli.common import JsonOption, YesOption, age_text, columns, option
from kvshelf.cli.deletion import delete
from kvshelf.cli.shelves import ShelfArgument, open_found
from kvshelf.cli.values import MaxAgeOption, MaxBytesOption, max_age, size
from kvshelf.errors import size_text
from kvshelf.tools.plans import Plan

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


def gc(
    shelf: ShelfArgument = None,
    max_bytes: MaxBytesOption = None,
    age: MaxAgeOption = None,
    group_max_bytes: Annotated[
        str | None,
        option("--group-max-bytes", "SIZE", "Most bytes of each salt group of a namespace."),
    ] = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete leftovers, and chunks above the bounds that are given; first only say which."""
    most, of_group = size(max_bytes, "--max-bytes"), size(group_max_bytes, "--group-max-bytes")
    oldest = max_age(age)
    named = {"max_bytes": most, "max_age": oldest, "group_max_bytes": of_group}
    bounds = {name: value for name, value in named.items() if value is not None}
    with open_found(shelf, change=yes) as opened:
        delete(
            opened,
            Plan(Rules(max_age=oldest), most, of_group),
            yes=yes,
            as_json=as_json,
            table=lambda plan: _table(opened.url, plan, bounds),
            row=lambda plan, outcome: _json(plan, outcome, yes) | {"bounds": bounds},
        )


_row = columns(10, 10, 0)


def _table(url: str, plan: Plan, bounds: dict[str, float]) -> str:
    lines = [f"{url}: {plan.before.count} objects, {size_text(plan.before.nbytes)} in all\n"]
    for name, value in bounds.items():
        text = age_text(value) if name == "max_age" else size_text(int(value))
        lines.append(f"{name} {text}\n")
    if plan.chosen:
        lines.append(_row("FILES", "SIZE", "WHY"))
    for reason, why in _WHY.items():
        if (total := plan.chosen.get(reason)) is not None:
            lines.append(_row(total.count, size_text(total.nbytes), why))
    return "".join(lines)


def _json(plan: Plan, outcome: Outcome, yes: bool) -> dict[str, Any]:
    freed = sum(lost.nbytes for lost in outcome.lost.values()) if yes else plan.freed
    row: dict[str, Any] = {
        "objects": plan.before.count,
        "bytes": plan.before.nbytes,
        "bytes_after": plan.before.nbytes - freed,
        "pinned_bytes": plan.pinned.nbytes,
        "chosen": _totals(plan.chosen),
        "problem": plan.problem,
    }
    if yes:
        row |= {
            "deleted": _totals(outcome.deleted),
            "kept": {"files": outcome.kept.count, "bytes": outcome.kept.nbytes},
            "gone": outcome.gone.count,
            "failed": outcome.failed,
            "error": None if outcome.error is None else str(outcome.error),
            "finished": outcome.finished or not plan.files,
        }
    return row


def _totals(totals: dict[Reason, Total]) -> dict[str, dict[str, int]]:
    return {
        reason.value: {"files": total.count, "bytes": total.nbytes}
        for reason, total in totals.items()
    }
