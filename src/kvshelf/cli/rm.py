"""``kvshelf rm``: deletes chosen objects of a shelf, see :mod:`kvshelf.cli.deletion`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvshelf.capacity.sweep import Choice, Rules
from kvshelf.cli.common import JsonOption, YesOption, option
from kvshelf.cli.deletion import delete
from kvshelf.cli.prompts import GroupOption, ModelOption, PromptsOption, check_group, token_prompts
from kvshelf.cli.shelves import NamespacesOption, ShelfArgument, find_folders, open_found
from kvshelf.cli.values import age
from kvshelf.errors import ConfigError
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
        plan = Plan(Rules(leftovers=None, choice=choice), folders=folders, prompts=wanted)
        delete(opened, plan, yes=yes, as_json=as_json)
