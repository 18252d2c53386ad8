"""``kvshelf gc``: deletes what a shelf need not keep; shows it first.

Owns the options, the table and the JSON; see :mod:`kvshelf.cli.deletion`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from kvshelf.capacity.collect import Plan
from kvshelf.capacity.deletion import Outcome
from kvshelf.capacity.files import Total
from kvshelf.capacity.rules import Rule, Rules
from kvshelf.cli.common import JsonOption, YesOption, age_text, columns, option
from kvshelf.cli.deletion import delete
from kvshelf.cli.shelves import ShelfArgument, open_found
from kvshelf.cli.values import MaxAgeOption, MaxBytesOption, max_age, size
from kvshelf.errors import size_text

_WHY: Final = {
    Rule.TEMPORARY: "temporaries, and what was set aside",
    Rule.MARKER: "markers of old hand-overs",
    Rule.TAIL: "tails of old hand-overs",
    Rule.ORPHAN: "chunks behind one that is gone",
    Rule.AGE: "not used for max_age",
    Rule.GROUP: "used longest ago in a salt group above its bound",
    Rule.SIZE: "used longest ago of all, above max_bytes",
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
    bounds = {
        "max_bytes": size(max_bytes, "--max-bytes"),
        "max_age": max_age(age),
        "group_max_bytes": size(group_max_bytes, "--group-max-bytes"),
    }
    rules = Rules(**bounds)  # type: ignore[arg-type]
    given = {name: value for name, value in bounds.items() if value is not None}
    with open_found(shelf, change=yes) as opened:
        delete(
            opened,
            rules,
            yes=yes,
            as_json=as_json,
            table=lambda found: _table(opened.url, found, given),
            row=lambda found, outcome: _json(found, outcome, yes) | {"bounds": given},
        )


_row = columns(10, 10, 0)


def _table(url: str, found: Plan, bounds: dict[str, float]) -> str:
    lines = [f"{url}: {len(found.inventory)} objects, {size_text(found.before)} in all\n"]
    for name, value in bounds.items():
        text = age_text(value) if name == "max_age" else size_text(int(value))
        lines.append(f"{name} {text}\n")
    totals = found.totals()
    if totals:
        lines.append(_row("FILES", "SIZE", "WHY"))
    lines += [_row(totals[why].count, size_text(totals[why].nbytes), _WHY[why]) for why in totals]
    return "".join(lines)


def _json(found: Plan, outcome: Outcome, yes: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "objects": len(found.inventory),
        "bytes": found.before,
        "bytes_after": found.before - outcome.nbytes if yes else found.after,
        "pinned_bytes": found.pinned.nbytes,
        "chosen": _totals(found.totals()),
        "problem": found.problem,
    }
    if yes:
        row |= {
            "deleted": _totals(outcome.deleted),
            "kept": {"files": outcome.kept.count, "bytes": outcome.kept.nbytes},
            "gone": outcome.gone.count,
            "failed": outcome.failed,
            "error": None if outcome.error is None else str(outcome.error),
            "finished": outcome.finished,
        }
    return row


def _totals(totals: dict[Rule, Total]) -> dict[str, dict[str, int]]:
    return {
        reason.name.lower(): {"files": total.count, "bytes": total.nbytes}
        for reason, total in totals.items()
    }
