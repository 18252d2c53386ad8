"""``kvshelf rm``: deletes chosen objects of a shelf; without ``--yes`` it only says which.

Owns the command's options, the table and the JSON; see :mod:`kvshelf.cli.deletion`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvshelf.capacity.visit import Choice, Outcome, Reason, Rules
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
from kvshelf.tools.plans import Plan, Selection


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
            Selection(rules, folders=folders, prompts=wanted),
            yes=yes,
            as_json=as_json,
            table=_table,
            row=_json,
        )


_row = columns(10, 10, -16, 0)


def _table(plan: Plan) -> str:
    lines = []
    for part in plan.parts.values():
        used, where = time_text(part.last_used), f"{part.namespace}/{part.group}"
        lines.append(_row(part.objects, size_text(part.bytes), used, where))
    return "".join(
        [_row("OBJECTS", "SIZE", "LAST USED", "NAMESPACE/GROUP"), *lines] if lines else []
    )


def _json(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    parts = plan.parts.values()
    return {
        "objects": sum(part.objects for part in parts),
        "bytes": sum(part.bytes for part in parts),
        "leftovers": plan.chosen[Reason.MARKER].count if Reason.MARKER in plan.chosen else 0,
        "pinned": plan.pinned.count,
        "pinned_bytes": plan.pinned.nbytes,
        "parts": [asdict(part) for part in parts],
        "deleted": {
            "removed": outcome.count,
            "bytes": outcome.nbytes,
            "kept": outcome.kept.count,
            "gone": outcome.gone.count,
            "failed": outcome.failed,
        },
    }
