"""``kvshelf gc``: deletes what a shelf need not keep; shows it first.

Owns the options, the table and the JSON. :mod:`kvshelf.capacity.collect` chooses what is deleted,
and :mod:`kvshelf.capacity.deletion` checks it again and deletes it; engines use both too.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Annotated, Any, Final

import typer

from kvshelf.backends.guard import GuardedBackend
from kvshelf.capacity.collect import Plan, plan
from kvshelf.capacity.deletion import Outcome, carry_out
from kvshelf.capacity.files import Total
from kvshelf.capacity.inventory import Scan
from kvshelf.capacity.marks import Marks
from kvshelf.capacity.pins import Pins
from kvshelf.capacity.rules import KEEP_TAILS, Rule, Rules
from kvshelf.capacity.uses import resolution
from kvshelf.cli.common import (
    JsonOption,
    ShelfArgument,
    YesOption,
    configuration,
    message,
    open_found,
    size_text,
    write_json,
)
from kvshelf.cli.progress import Display
from kvshelf.cli.values import MaxAgeOption, MaxBytesOption, bounds, bounds_given_by

#: Bounds of the configuration that options replace.
_BOUNDS: Final = ("max_bytes", "max_age", "group_max_bytes")
_WHY: Final = {
    Rule.TEMPORARY: "temporaries of killed writers",
    Rule.QUARANTINE: "bad objects that were moved aside long ago",
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
    max_age: MaxAgeOption = None,
    group_max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most bytes of each salt group of a namespace; default: the configured capacity.",
            show_default=False,
        ),
    ] = None,
    orphans: Annotated[
        bool | None,
        typer.Option(
            "--orphans/--no-orphans",
            help="Look for chunks whose parent is gone: that reads the beginning of one object of"
            " each chunk; default: only where the latency of the storage is low.",
            show_default=False,
        ),
    ] = None,
    yes: YesOption = False,
    names: Annotated[
        bool, typer.Option("--names", help="Write the name of each file to delete.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete leftovers, and chunks above the bounds that are given; a dry run unless --yes."""
    given = bounds(max_bytes=max_bytes, max_age=max_age, group_max_bytes=group_max_bytes)
    rules = _rules(shelf, given)
    acting = _acting(rules, given)
    with open_found(shelf, change=yes) as opened:
        shown = opened.url
        with Display("deleting", as_json=as_json) as display:
            found = _plan(opened.backend, rules, orphans, display)
        _write_names(found, names, as_json)
        if found.problem is not None:
            message(found.problem, error=False)
        display = Display("deleting", as_json=as_json)
        outcome = Outcome() if yes else None
        display.run(
            lambda: _carry_out(opened.backend, found, display, outcome),
            row=lambda: _json(shown, found, outcome) | {"bounds": acting},
            summary=lambda: _text(shown, found, outcome, acting),
            complete=lambda: found.problem is None and not (outcome and outcome.failed),
        )


def _rules(shelf: str | None, given: dict[str, Any]) -> Rules:
    """Return the rules with the configured bounds, those of the command line in their place."""
    config = configuration(shelf)
    # What lies on a shelf shows its groups, whatever engines started here would do.
    capacity = config.capacity.model_copy(update=given)
    return Rules(
        **{name: getattr(capacity, name) for name in _BOUNDS}, markers=KEEP_TAILS, tails=KEEP_TAILS
    )


def _acting(rules: Rules, given: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the bounds that act, and where each comes from."""
    configured = bounds_given_by()
    return {
        name: {
            "value": value,
            "from": f"--{name.replace('_', '-')}" if name in given else configured,
        }
        for name in _BOUNDS
        if (value := getattr(rules, name)) is not None
    }


def _plan(backend: GuardedBackend, rules: Rules, orphans: bool | None, display: Display) -> Plan:
    low_latency = not backend.properties.high_latency
    scan = Scan(backend, parents=low_latency if orphans is None else orphans)
    inventory = scan.run(pace=display.listed)
    assert inventory is not None, "nothing stops it"
    return plan(
        inventory,
        rules,
        pins=Pins.load(backend, inventory.aged_at),
        marks=Marks.read(backend),
        resolution=resolution(rules.max_age),
    )


def _carry_out(
    backend: GuardedBackend, found: Plan, display: Display, outcome: Outcome | None
) -> None:
    if outcome is None:
        return
    total = len(found.leftovers) + int(found.counts().sum())
    carry_out(
        backend,
        found,
        on_progress=lambda now: display.show(now.done, total, now.nbytes),
        outcome=outcome,
    )
    if outcome.finished:
        max_age = found.rules.max_age
        Marks.compact(backend, max_age=max_age, resolution=resolution(max_age))
    if outcome.failed:
        message(f"{outcome.failed} files could not be deleted, the first of them: {outcome.error}")
    elif outcome.error is not None:
        raise outcome.error


def _write_names(found: Plan, names: bool, as_json: bool) -> None:
    for name, reason in found.names() if names else ():
        why = reason.name.lower()
        if as_json:
            write_json({"name": name, "reason": why})
        else:
            sys.stdout.write(f"{name}  ({why})\n")


def _json(url: str, found: Plan, outcome: Outcome | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "shelf": url,
        "dry_run": outcome is None,
        "objects": len(found.inventory),
        "bytes": found.before,
        "bytes_after": found.after,
        "pinned_bytes": found.pinned.nbytes,
        "chosen": _totals(found.totals()),
        "problem": found.problem,
    }
    if outcome is not None:
        row |= {
            "deleted": _totals(outcome.deleted),
            "bytes_after": found.before - outcome.nbytes,
            "kept": {"files": outcome.kept.count, "bytes": outcome.kept.nbytes},
            "gone": outcome.gone,
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


def _text(url: str, found: Plan, outcome: Outcome | None, bounds: dict[str, dict[str, Any]]) -> str:
    totals = found.totals() if outcome is None else outcome.deleted
    lines = [f"{url}: {len(found.inventory)} objects, {size_text(found.before)} in all"]
    for name, bound in bounds.items():
        value = f"{bound['value']:g} s" if name == "max_age" else size_text(bound["value"])
        lines.append(f"{name} {value} ({bound['from']})")
    if totals:
        lines.append(f"{'FILES':>10}  {'SIZE':>10}  {'WOULD GO' if outcome is None else 'DELETED'}")
    for reason in sorted(totals):
        total = totals[reason]
        lines.append(f"{total.count:>10}  {size_text(total.nbytes):>10}  {_WHY[reason]}")
    count = sum(total.count for total in totals.values())
    nbytes = sum(total.nbytes for total in totals.values())
    if outcome is None:
        left = size_text(found.after)
        lines.append(f"{count} files, {size_text(nbytes)}, would be deleted: {left} would stay")
        if count:
            lines.append("this was a dry run: --yes deletes them")
    else:
        lines.append(f"{count} files, {size_text(nbytes)}, were deleted")
        if outcome.kept.count:
            lines.append(f"{outcome.kept.count} files stay: they were used or changed meanwhile")
        if outcome.gone:
            lines.append(f"{outcome.gone} files had been deleted by others")
    return "\n".join(lines) + "\n"
