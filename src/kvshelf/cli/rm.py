"""``kvshelf rm`` and ``kvshelf gc``: the options of the two commands that delete.

:mod:`kvshelf.cli.deletion` makes the plan, shows it and carries it out.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvshelf.capacity.sweep import Choice, Rules
from kvshelf.cli.common import JsonOption, YesOption, option
from kvshelf.cli.deletion import Plan, delete
from kvshelf.cli.prompts import GroupOption, ModelOption, PromptsOption, check_group, token_prompts
from kvshelf.cli.shelves import NamespacesOption, ShelfArgument, find_folders, open_found
from kvshelf.cli.values import MaxAgeOption, MaxBytesOption, age, max_age, size
from kvshelf.errors import ConfigError


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
    salt_group = check_group(group)
    unused = age(unused_for, "--unused-for")
    if unused == 0:
        raise ConfigError(
            f"--unused-for: found {unused_for}, which chooses everything; expected an age above"
            " zero, or no --unused-for to choose without regard to age"
        )
    selected = None if prompts is None else token_prompts(prompts, model)
    if not namespaces and salt_group is None and selected is None and unused is None:
        raise ConfigError(
            "found nothing to select by; give --namespace, --group, --prompts or --unused-for"
        )
    with open_found(shelf, change=yes) as opened:
        folders = find_folders(opened, namespaces)
        # Objects that engines use in the meantime are deleted too, unless an age was given.
        is_whole = salt_group is None and selected is None and unused is None
        choice = Choice(salt_group, unused, pinned, leftovers=is_whole)
        plan = Plan(Rules(leftovers=None, choice=choice), folders=folders, prompts=selected)
        delete(opened, plan, yes=yes, as_json=as_json)


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
    plan = Plan(
        Rules(max_age=max_age(age)),
        size(max_bytes, "--max-bytes"),
        size(group_max_bytes, "--group-max-bytes"),
    )
    with open_found(shelf, change=yes) as opened:
        delete(opened, plan, yes=yes, as_json=as_json)
