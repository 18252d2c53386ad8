"""``kvshelf gc``: deletes what a shelf need not keep, see :mod:`kvshelf.cli.deletion`."""

from __future__ import annotations

from typing import Annotated

from kvshelf.capacity.sweep import Rules
from kvshelf.cli.common import JsonOption, YesOption, option
from kvshelf.cli.deletion import delete
from kvshelf.cli.shelves import ShelfArgument, open_found
from kvshelf.cli.values import MaxAgeOption, MaxBytesOption, max_age, size
from kvshelf.tools.plans import Plan


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
