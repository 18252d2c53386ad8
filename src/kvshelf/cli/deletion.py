"""What ``kvshelf gc`` and ``kvshelf rm`` do with their plans: show them, and carry them out.

Owns the table and the JSON. :mod:`kvshelf.tools.plans` makes plans, and
:mod:`kvshelf.capacity.sweep` deletes, as for engines.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Final

from kvshelf.capacity.sweep import REASONS_OF_UNITS, Outcome, Reason, Total
from kvshelf.capacity.sweep import delete as delete_picked
from kvshelf.cli.codes import write_out
from kvshelf.cli.common import columns, message, summary, tell_skipped, time_text, told
from kvshelf.cli.progress import Display
from kvshelf.errors import printable, size_text
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.listing import storage_time
from kvshelf.tools.plans import Plan, make, pick

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
        message(f"the pin {name} pins nothing: {printable(problem)}")
    if plan.problem is not None:
        message(plan.problem)
    tell_skipped(plan.skipped)
    if not as_json:
        write_out(_table(shelf.url, plan))
    display, outcome = Display("deleting", as_json=as_json), Outcome()

    def work() -> None:
        if yes and plan.files:
            delete_picked(
                shelf.backend,
                pick(shelf, plan),
                now=plan.now,
                on_progress=lambda outcome: display.show(outcome.done, plan.files),
                outcome=outcome,
            )
            if outcome.error is not None:
                first = told(outcome.error)
                message(f"{outcome.failed} files could not be deleted, the first of them: {first}")

    display.run(
        work,
        row=lambda: {"shelf": shelf.url, "dry_run": not yes} | _json(plan, outcome, yes),
        summary=lambda: _summary(plan, outcome) if yes else _would(plan),
        complete=lambda: plan.problem is None and not (plan.skipped or outcome.failed),
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


def _would(plan: Plan) -> str:
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
