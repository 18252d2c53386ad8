"""What ``kvshelf gc`` and ``kvshelf rm`` do with their plans: show them, and carry them out.

:mod:`kvshelf.tools.plans` makes plans, and :mod:`kvshelf.capacity.visit` deletes, as for engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvshelf.capacity.parallel import PAUSES
from kvshelf.capacity.visit import Outcome
from kvshelf.capacity.visit import delete as delete_picked
from kvshelf.cli.codes import write_out
from kvshelf.cli.common import message, summary, tell_skipped, told
from kvshelf.cli.progress import Display
from kvshelf.errors import printable, size_text
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.listing import storage_time
from kvshelf.tools.plans import Plan, make, pick


def delete(
    shelf: Shelf,
    plan: Plan,
    *,
    yes: bool,
    as_json: bool,
    table: Callable[[Plan], str],
    row: Callable[[Plan, Outcome], dict[str, Any]],
) -> None:
    """Show what a plan deletes, and with `yes` delete it.

    Parameters
    ----------
    shelf : Shelf
        Writable if `yes`.
    plan : Plan
        What is to be deleted, and nothing found yet.
    yes, as_json : bool
    table : Callable
        Returns the text about a plan that is written before it is carried out.
    row : Callable
        Returns the fields of the JSON object that only this command has.
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
        write_out(table(plan))
    display, outcome = Display("deleting", as_json=as_json), Outcome()

    def work() -> None:
        if yes and plan.files:
            _carry_out(shelf, plan, lambda: display.show(outcome.done, plan.files), outcome)

    display.run(
        work,
        row=lambda: {"shelf": shelf.url, "dry_run": not yes} | row(plan, outcome),
        summary=lambda: _summary(plan, outcome) if yes else _would(plan),
        complete=lambda: plan.problem is None and not (plan.skipped or outcome.failed),
    )


def _carry_out(shelf: Shelf, plan: Plan, on_progress: Callable[[], None], outcome: Outcome) -> None:
    delete_picked(
        shelf.backend,
        pick(shelf, plan),
        now=plan.now,
        pauses=PAUSES,
        on_progress=lambda _: on_progress(),
        outcome=outcome,
    )
    if outcome.failed and outcome.error is not None:
        first = told(outcome.error)
        message(f"{outcome.failed} files could not be deleted, the first of them: {first}")
    elif outcome.error is not None:
        raise outcome.error


def _would(plan: Plan) -> str:
    freed = size_text(sum(total.nbytes for total in plan.chosen.values()))
    text = f"would delete {plan.files} files, {freed}"
    text += f"; {size_text(plan.after)} would stay"
    return summary([text, "--yes deletes"] if plan.files else [text], *_pinned(plan))


def _summary(plan: Plan, outcome: Outcome) -> str:
    return summary(
        [f"deleted {outcome.count} of {plan.files} files, {size_text(outcome.nbytes)}"],
        (outcome.kept.count, "used or changed meanwhile, left"),
        (outcome.gone.count, "gone meanwhile"),
        (outcome.failed, "failed"),
        *_pinned(plan),
    )


def _pinned(plan: Plan) -> list[tuple[int, str]]:
    if plan.rules.choice is None:
        return []
    return [(plan.pinned.count, f"({size_text(plan.pinned.nbytes)}) pinned, left")]
