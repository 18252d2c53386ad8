"""What ``kvshelf gc`` and ``kvshelf rm`` do with their plans: show them, and carry them out.

:mod:`kvshelf.tools.plans` makes plans, and :mod:`kvshelf.capacity.deletion` checks what is in them
again and deletes it; engines use the latter too.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvshelf.capacity.collect import Plan
from kvshelf.capacity.deletion import Outcome, carry_out
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.parallel import PAUSES
from kvshelf.capacity.rules import Rules
from kvshelf.capacity.uses import resolution
from kvshelf.cli.codes import write_out
from kvshelf.cli.common import message, summary, told
from kvshelf.cli.progress import Display
from kvshelf.errors import ReadOnlyStorageError, printable, size_text
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.plans import plan_for
from kvshelf.tools.prompts import Prompt, TokenPrompt


def delete(
    shelf: Shelf,
    rules: Rules,
    folders: Collection[str] | None = None,
    prompts: Sequence[Prompt | TokenPrompt] | None = None,
    *,
    yes: bool,
    as_json: bool,
    table: Callable[[Plan], str],
    row: Callable[[Plan, Outcome], dict[str, Any]],
) -> None:
    """Show what rules delete, and with `yes` delete it.

    Parameters
    ----------
    shelf : Shelf
        Writable if `yes`.
    rules, folders, prompts
        See :func:`kvshelf.tools.plans.plan_for`.
    yes, as_json : bool
    table : Callable
        Returns the text about a plan that is written before it is carried out.
    row : Callable
        Returns the fields of the JSON object that only this command has.
    """
    with Display("listing", as_json=as_json) as listing:
        found, pins = plan_for(shelf, rules, folders, prompts, on_listed=listing.listed)
    for name, problem in pins.unreadable.items():
        message(f"the pin {name} pins nothing: {printable(problem)}")
    if found.problem is not None:
        message(found.problem)
    if not as_json:
        write_out(table(found))
    display, outcome = Display("deleting", as_json=as_json), Outcome()
    files = sum(total.count for total in found.totals().values())

    def work() -> None:
        if yes:
            _carry_out(shelf, found, lambda: display.show(outcome.done, files), outcome)

    display.run(
        work,
        row=lambda: {"shelf": shelf.url, "dry_run": not yes} | row(found, outcome),
        summary=lambda: _summary(found, outcome, files) if yes else _would(found, files),
        complete=lambda: found.problem is None and not outcome.failed,
    )


def _carry_out(
    shelf: Shelf, found: Plan, on_progress: Callable[[], None], outcome: Outcome
) -> None:
    if shelf.read_only:
        raise ReadOnlyStorageError(errno.EACCES, "it may not be changed", shelf.url)
    carry_out(
        shelf.backend,
        found,
        pauses=PAUSES,
        on_progress=lambda _: on_progress(),
        outcome=outcome,
    )
    age = found.rules.max_age
    if outcome.finished and found.rules.choice is None:
        Marks.compact(shelf.backend, max_age=age, resolution=resolution(age))
    if outcome.failed and outcome.error is not None:
        first = told(outcome.error)
        message(f"{outcome.failed} files could not be deleted, the first of them: {first}")
    elif outcome.error is not None:
        raise outcome.error


def _would(found: Plan, files: int) -> str:
    size = size_text(found.before - found.after)
    text = f"would delete {files} files, {size}; {size_text(found.after)} would stay"
    return summary([text, "--yes deletes"] if files else [text], *_pinned(found))


def _summary(found: Plan, outcome: Outcome, files: int) -> str:
    return summary(
        [f"deleted {outcome.count} of {files} files, {size_text(outcome.nbytes)}"],
        (outcome.kept.count, "used or changed meanwhile, left"),
        (outcome.gone.count, "gone meanwhile"),
        (outcome.failed, "failed"),
        *_pinned(found),
    )


def _pinned(found: Plan) -> list[tuple[int, str]]:
    pinned = found.pinned if found.rules.choice is not None else None
    return [(pinned.count, f"({size_text(pinned.nbytes)}) pinned, left")] if pinned else []
