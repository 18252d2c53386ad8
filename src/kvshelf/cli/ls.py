"""``kvshelf ls``: what is on a shelf: its namespaces, their space, what bounds it, and pins.

Owns the options, the tables and the JSON; :mod:`kvshelf.tools.usage` counts,
:mod:`kvshelf.capacity.keepers` knows the bounds.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvshelf.capacity import keepers
from kvshelf.capacity.limits import ALIVE_SECONDS
from kvshelf.capacity.sweep import KEEPERS
from kvshelf.cli.codes import PROBLEM, write_out
from kvshelf.cli.common import (
    JsonOption,
    age_text,
    columns,
    message,
    number,
    tell_skipped,
    time_text,
    write_json,
)
from kvshelf.cli.progress import Display
from kvshelf.cli.shelves import NamespacesOption, ShelfArgument, find_folders, open_found
from kvshelf.errors import StorageError, printable, size_text
from kvshelf.shelf.pins import PINS, Pins
from kvshelf.shelf.shelf import NamespaceInfo
from kvshelf.tools.usage import Row, Usage, measure


@dataclass(frozen=True, slots=True)
class Kept:
    """What the keepers of a shelf say: how many they are, the latest sweep, and the bounds."""

    keepers: int
    last_sweep: float | None
    bounds: dict[str, float]


class By(StrEnum):
    """The breakdowns of :mod:`kvshelf.tools.usage`."""

    NAMESPACE = "namespace"
    GROUP = "group"
    AGE = "age"


def ls(
    shelf: ShelfArgument = None,
    namespaces: NamespacesOption = None,
    by: Annotated[By, typer.Option("--by", help="What a row is.")] = By.NAMESPACE,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces of a shelf with their space and last use, its bounds and pins."""
    with open_found(shelf) as opened:
        folders = find_folders(opened, namespaces)
        with Display("counting", as_json=as_json) as display:
            usage = measure(opened.backend, folders, by=by.value, on_listed=display.listed)
        infos = [info for info in opened.namespaces() if folders is None or info.folder in folders]
        url, said, pins = opened.url, dict[str, dict[str, Any]](), Pins()
        try:
            said = keepers.read(opened.backend)
        except StorageError as error:
            usage.skipped[KEEPERS] = error
        try:
            pins = Pins.read(opened.backend)
        except StorageError as error:
            usage.skipped[PINS] = error
    tell_skipped(usage.skipped)
    for name, problem in pins.unreadable.items():
        message(f"the pin {name} pins nothing: {problem}")
    if pins.problem is not None:
        message(pins.problem)
    kept = Kept(
        len(said),
        max((one["at"] for one in said.values()), default=None),
        keepers.bounds(said),
    )
    if as_json:
        write_json(_json(url, usage, infos, kept, pins))
    else:
        write_out(_table(usage, infos) + "\n" + _closing(url, usage, kept, pins))
    if usage.skipped:
        raise typer.Exit(PROBLEM)


# ---------------------------------------------------------------------------------- JSON


def _json(
    url: str, usage: Usage, infos: list[NamespaceInfo], kept: Kept, pins: Pins
) -> dict[str, Any]:
    now, space = time.time(), usage.space
    return {
        "shelf": url,
        "namespaces": [_namespace_json(info) for info in infos],
        "objects": usage.objects,
        "bytes": usage.bytes,
        "by": {usage.by: [asdict(row) for row in usage.rows]},
        "others": {
            name: {"files": total.count, "bytes": total.nbytes}
            for name, total in usage.others.items()
        },
        "free": None if space is None else space.free,
        "total": None if space is None else space.total,
        **asdict(kept),
        "pins": [
            {
                "pin": name,
                "namespace": pin.namespace,
                "group": pin.group,
                "chunks": None if pin.keys is None else len(pin.keys),
                "until": pin.until,
                "expired": pin.expired(now),
            }
            for name, pin in pins.all.items()
        ],
        "problems": [
            {"name": info.folder, "problem": info.problem} for info in infos if info.problem
        ],
    }


def _namespace_json(info: NamespaceInfo) -> dict[str, Any]:
    row: dict[str, Any] = {"namespace": info.folder, "problem": info.problem}
    if info.namespace is not None:
        row["digest"] = info.namespace.digest.hex()
        row["record"] = dict(info.namespace.record)
    return row


# ---------------------------------------------------------------------------------- text

_row = columns(10, 10, 5, -16, 0)


def _table(usage: Usage, infos: list[NamespaceInfo]) -> str:
    """Return the rows of a breakdown; namespaces without objects are the last of theirs."""
    rows, notes = list(usage.rows), dict[str, str]()
    if usage.by == By.NAMESPACE:
        if not infos:
            return "no namespaces yet\n"
        known = {row.name for row in rows}
        rows += (Row(info.folder) for info in infos if info.folder not in known)
        notes = {one.folder: f"  ({printable(one.problem)})" for one in infos if one.problem}
    lines = [_row("OBJECTS", "SIZE", "SHARE", "LAST USED", usage.by.upper())]
    for row in rows:
        share = f"{100 * row.bytes / max(usage.bytes, 1):.0f}%"
        used = time_text(row.last_used) if row.objects else "-"
        name = row.name + notes.get(row.name, "")
        lines.append(_row(row.objects, size_text(row.bytes), share, used, name))
    return "".join(lines)


def _closing(url: str, usage: Usage, kept: Kept, pins: Pins) -> str:
    """Return a line each about the whole shelf, its bounds and the pins, as far as known."""
    parts = [f"{url}: {number(usage.objects, 'object')}, {size_text(usage.bytes)}"]
    parts += [
        f"{number(total.count, f'{name} file')}: {size_text(total.nbytes)}"
        for name, total in sorted(usage.others.items())
    ]
    if usage.space is not None:
        free, total = size_text(usage.space.free), size_text(usage.space.total)
        parts.append(f"{free} of {total} free on the storage")
    lines, now = ["; ".join(parts)], time.time()
    if kept.last_sweep is not None:
        bounds = [
            f"{name} {age_text(value) if name == 'max_age' else size_text(int(value))}"
            for name, value in kept.bounds.items()
        ]
        idle = age_text(max(0.0, now - kept.last_sweep))
        alive = f"{ALIVE_SECONDS / 60:.0f} minutes, the last sweep {idle} ago"
        swept = f"{number(kept.keepers, 'keeper')} in the last {alive}"
        lines.append("; ".join([swept, *bounds]))
    for name, pin in pins.all.items():
        keys = ", all chunks" if pin.keys is None else f", {number(len(pin.keys), 'chunk')}"
        where = f"{pin.namespace or 'all namespaces'}/{pin.group or '*'}"
        until = "" if pin.until is None else f", until {time_text(pin.until)}"
        expired = " (expired)" if pin.expired(now) else ""
        lines.append(f"pin {name}: {where}{keys}{until}{expired}")
    return "\n".join(lines) + "\n"
