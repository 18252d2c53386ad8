"""``kvshelf du``: what takes the space of a shelf.

Owns the command's options and tables; :mod:`kvshelf.tools.du` counts.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from kvshelf.cli.common import (
    JsonOption,
    ShelfArgument,
    columns,
    open_found,
    size_text,
    time_text,
    write,
)
from kvshelf.cli.namespaces import NamespacesOption, find_folders
from kvshelf.cli.progress import Display
from kvshelf.tools.du import Usage, measure


class By(StrEnum):
    """The breakdowns of :mod:`kvshelf.tools.du`."""

    NAMESPACE = "namespace"
    GROUP = "group"
    AGE = "age"
    DEPTH = "depth"
    KIND = "kind"


def du(
    shelf: ShelfArgument = None,
    by: Annotated[
        list[By] | None,
        typer.Option(
            "--by", help="What to break the space down by. Repeatable.", show_default=False
        ),
    ] = None,
    namespaces: NamespacesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what takes the space: by namespace, salt group, age, depth in the prompt, or kind."""
    chosen = tuple(dict.fromkeys(one.value for one in by or ())) or ("namespace",)
    with open_found(shelf) as opened:
        folders = find_folders(opened, namespaces)
        with Display("counting", as_json=as_json) as display:
            usage = measure(opened.backend, folders, by=chosen, on_listed=display.listed)
        shown = opened.url
    write(
        as_json,
        lambda: {"shelf": shown} | asdict(usage),
        lambda: "".join(_table(usage, name) for name in chosen) + _summary(usage, shown),
    )


_row = columns(10, 10, 5, -16, 0)


def _table(usage: Usage, by: str) -> str:
    lines = [_row("OBJECTS", "SIZE", "SHARE", "LAST USED", by.upper())]
    for row in usage.by[by]:
        share = f"{100 * row.bytes / usage.bytes if usage.bytes else 0.0:.0f}%"
        used = time_text(row.last_used)
        lines.append(_row(row.objects, size_text(row.bytes), share, used, row.name))
    return "".join(lines) + "\n"


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
