"""``kvshelf rm``: deletes chosen objects of a shelf; without ``--yes`` it only says which.

Owns the command's options, the table and the JSON; see :mod:`kvshelf.cli.deletion`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvshelf.capacity.visit import Choice, Outcome, Reason, Rules, Total
from kvshelf.cli.common import JsonOption, YesOption, columns, option, time_text
from kvshelf.cli.deletion import delete
from kvshelf.cli.prompts import (
    GroupOption,
    ModelOption,
    PromptsOption,
    check_group,
    token_prompts,
)
from kvshelf.cli.shelves import NamespacesOption, ShelfArgument, find_folders, open_found
from kvshelf.cli.values import age
from kvshelf.errors import ConfigError, size_text
from kvshelf.tools.plans import Plan


def rm(
    shelf: ShelfArgument = None,
    namespaces: NamespacesOption = None,
    group: GroupOption = None,
    prompts: PromptsOption = None,
    model: ModelOption = None,
    unused_for: Annotated[
        str | None,
        option("--unused-for", "AGE", "Only what was neither stored nor used for so long (7d)."),
    ] = None,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Also what is pinned; otherwise it stays.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete objects of namespaces, a salt group, prompts or an age; first only say which."""
    chosen = check_group(group)
    unused = age(unused_for, "--unused-for")
    if unused == 0:
        raise ConfigError(
            f"--unused-for: found {unused_for}, which chooses everything; expected an age above"
            " zero, or no --unused-for to choose without regard to age"
        )
    wanted = None if prompts is None else token_prompts(prompts, model)
    if not namespaces and chosen is None and wanted is None and unused is None:
        raise ConfigError(
            "found nothing to select by; give --namespace, --group, --prompts or --unused-for"
        )
    with open_found(shelf, change=yes) as opened:
        folders = find_folders(opened, namespaces)
        # What engines use meanwhile is deleted as well, unless an age was given.
        whole = chosen is None and wanted is None and unused is None
        choice = Choice(chosen, unused, pinned, leftovers=whole)
        rules = Rules(leftovers=None, choice=choice)
        delete(
            opened,
            Plan(rules, folders=folders, prompts=wanted),
            yes=yes,
            as_json=as_json,
            table=_table,
            row=_json,
        )


_row = columns(10, 10, -16, 0)


def _table(plan: Plan) -> str:
    lines = [_row("OBJECTS", "SIZE", "LAST USED", "NAMESPACE/GROUP")] if plan.rows else []
    for row in plan.rows.values():
        used = time_text(row.last_used)
        lines.append(_row(row.objects, size_text(row.bytes), used, row.name))
    return "".join(lines)


def _json(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    chosen = plan.chosen.get(Reason.CHOSEN, Total())
    return {
        "objects": chosen.count,
        "bytes": chosen.nbytes,
        "leftovers": plan.files - chosen.count,
        "pinned": plan.pinned.count,
        "pinned_bytes": plan.pinned.nbytes,
        "rows": [asdict(row) for row in plan.rows.values()],
        "deleted": {
            "removed": outcome.count,
            "bytes": outcome.nbytes,
            "kept": outcome.kept.count,
            "gone": outcome.gone.count,
            "failed": outcome.failed,
        },
    }
