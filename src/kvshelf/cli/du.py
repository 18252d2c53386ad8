"""``kvshelf du``: what takes the room of a shelf.

Owns the command's options and tables; :mod:`kvshelf.tools.du` counts.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer

from kvshelf.cli.common import (
    JsonOption,
    ShelfArgument,
    ShelfOption,
    find_shelf,
    open_to_look,
    size_text,
    time_text,
    write_json,
)
from kvshelf.cli.namespaces import NamespacesOption, find_folders
from kvshelf.cli.progress import Display
from kvshelf.tools.du import Usage, measure


class By(str, Enum):
    """The breakdowns of :mod:`kvshelf.tools.du`."""

    NAMESPACE = "namespace"
    GROUP = "group"
    AGE = "age"
    DEPTH = "depth"
    KIND = "kind"


def du(
    shelf: ShelfArgument = None,
    shelf_option: ShelfOption = None,
    by: Annotated[
        list[By] | None,
        typer.Option(
            "--by", help="What to break the room down by. Repeatable.", show_default=False
        ),
    ] = None,
    namespaces: NamespacesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what takes the room: by namespace, salt group, age, depth in the prompt, or kind."""
    url, options = find_shelf(shelf, shelf_option)
    chosen = tuple(dict.fromkeys(one.value for one in by or ())) or ("namespace",)
    with open_to_look(url, options) as opened:
        folders = find_folders(opened, namespaces)
        with Display("counting", as_json=as_json) as display:
            usage = measure(opened.backend, folders, by=chosen, on_listed=display.listed)
        shown = opened.url
    if as_json:
        write_json({"shelf": shown} | asdict(usage))
        return
    for name in chosen:
        sys.stdout.write(_table(usage, name))
    sys.stdout.write(_summary(usage, shown))


def _table(usage: Usage, by: str) -> str:
    lines = [f"{'OBJECTS':>10}  {'SIZE':>10}  {'SHARE':>5}  {'LAST USED':<16}  {by.upper()}"]
    for row in usage.by[by]:
        share = 100 * row.bytes / usage.bytes if usage.bytes else 0.0
        used = time_text(row.last_used)
        lines.append(
            f"{row.objects:>10}  {size_text(row.bytes):>10}  {share:>4.0f}%  {used:<16}  {row.name}"
        )
    return "\n".join(lines) + "\n\n"


def _summary(usage: Usage, url: str) -> str:
    parts = [f"{url}: {usage.objects} objects, {size_text(usage.bytes)}"]
    parts += [
        f"{name} {total.files}: {size_text(total.bytes)}"
        for name, total in usage.others.items()
        if total.files
    ]
    text = "; ".join(parts)
    if usage.free is not None and usage.total is not None:
        text += f"; {size_text(usage.free)} of {size_text(usage.total)} free on the storage"
    return text + "\n"
