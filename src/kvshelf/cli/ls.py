"""``kvshelf ls``: what is on a shelf: its namespaces, their space, what bounds it, and pins.

Owns the breakdowns of a shelf's objects (:func:`measure`), the tables and the JSON.
:mod:`kvshelf.capacity.keepers` knows the bounds.

Contracts
---------
* Only names, sizes and times are read.
* Each object is in exactly one row. Bytes are those that bounds of a shelf are compared with.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from kvshelf.backends import Backend, Space
from kvshelf.capacity import keepers
from kvshelf.capacity.limits import ALIVE_SECONDS, DAY, HOUR
from kvshelf.capacity.sweep import KEEPERS, Total, Unit
from kvshelf.cli.common import (
    PROBLEM,
    JsonOption,
    age_text,
    columns,
    count_text,
    time_text,
    warn,
    warn_of_skipped,
    write_json,
    write_out,
)
from kvshelf.cli.listing import Row, list_parts
from kvshelf.cli.progress import Display
from kvshelf.cli.shelves import NamespacesOption, ShelfArgument, find_folders, open_found
from kvshelf.errors import StorageError, printable, size_text
from kvshelf.shelf.pins import PINS, Pins
from kvshelf.shelf.shelf import NamespaceInfo

#: Ends of the ages of a row, in seconds since the last use, and names of the rows.
_AGES: Final = (HOUR, DAY, 7 * DAY, 30 * DAY)
_AGE_NAMES: Final = ("under 1 hour", "1 to 24 hours", "1 to 7 days", "7 to 30 days", "over 30 days")


class By(StrEnum):
    """The breakdowns."""

    NAMESPACE = "namespace"
    GROUP = "group"
    AGE = "age"


#: From a unit, and the time, to the name of its row.
ROW_NAMES: Final[dict[By, Callable[[Unit, float], str]]] = {
    By.NAMESPACE: lambda unit, now: unit.space,
    By.GROUP: lambda unit, now: unit.where,
    By.AGE: lambda unit, now: _AGE_NAMES[bisect(_AGES, now - unit.used)],
}


@dataclass(slots=True)
class Usage:
    """The space that a shelf takes.

    Attributes
    ----------
    by : By
    rows : list of Row
    objects, bytes : int
        All objects.
    others : dict of str and Total
        Other files, by sort.
    space : Space or None
        Of the storage; None where it does not report it.
    skipped : dict of str and StorageError
        Folders that could not be listed.
    """

    by: By
    rows: list[Row] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0
    others: dict[str, Total] = field(default_factory=dict)
    space: Space | None = None
    skipped: dict[str, StorageError] = field(default_factory=dict)


def measure(
    backend: Backend,
    folders: Collection[str] | None = None,
    *,
    by: By = By.NAMESPACE,
    on_listed: Callable[[int], None] = lambda files: None,
) -> Usage:
    """List a shelf, and count.

    Parameters
    ----------
    backend : Backend
    folders : Collection of str, optional
        Only these namespace folders; all when absent.
    by : By
    on_listed : Callable
        Called with numbers of files that were listed.

    Raises
    ------
    StorageError
        If the shelf cannot be listed.
    """
    usage, now, row_name = Usage(by), time.time(), ROW_NAMES[by]
    rows: dict[str, Row] = {}
    for part in list_parts(backend, folders, now, usage.skipped, on_listed=on_listed):
        for unit in part.units:
            name = row_name(unit, now)
            rows.setdefault(name, Row(name)).add(unit)
        for sort, total in part.others.items():
            usage.others.setdefault(sort, Total()).add(total.nbytes, total.count)
    if by is By.AGE:
        usage.rows = [rows[name] for name in _AGE_NAMES if name in rows]
    else:
        usage.rows = sorted(rows.values(), key=lambda row: (-row.bytes, row.name))
    usage.objects = sum(row.objects for row in usage.rows)
    usage.bytes = sum(row.bytes for row in usage.rows)
    with contextlib.suppress(StorageError):
        usage.space = backend.space()
    return usage


# ----------------------------------------------------------------------------- the command


@dataclass(frozen=True, slots=True)
class KeeperSummary:
    """What the keepers of a shelf say: how many they are, the latest sweep, and the bounds."""

    keepers: int
    last_sweep: float | None
    bounds: dict[str, float]


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
            usage = measure(opened.backend, folders, by=by, on_listed=display.listed)
        infos = [info for info in opened.namespaces() if folders is None or info.folder in folders]
        url, statements, pins = opened.url, dict[str, dict[str, Any]](), Pins()
        try:
            statements = keepers.read(opened.backend)
        except StorageError as error:
            usage.skipped[KEEPERS] = error
        try:
            pins = Pins.read(opened.backend)
        except StorageError as error:
            usage.skipped[PINS] = error
    warn_of_skipped(usage.skipped)
    for name, problem in pins.unreadable.items():
        warn(f"the pin {name} pins nothing: {problem}")
    if pins.problem is not None:
        warn(pins.problem)
    keeper_summary = KeeperSummary(
        len(statements),
        max((statement["at"] for statement in statements.values()), default=None),
        keepers.bounds(statements),
    )
    if as_json:
        write_json(_json(url, usage, infos, keeper_summary, pins))
    else:
        write_out(_table(usage, infos) + "\n" + _closing(url, usage, keeper_summary, pins))
    if usage.skipped:
        raise typer.Exit(PROBLEM)


def _json(
    url: str, usage: Usage, infos: list[NamespaceInfo], keeper_summary: KeeperSummary, pins: Pins
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
        **asdict(keeper_summary),
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


_row = columns(10, 10, 5, -16, 0)


def _table(usage: Usage, infos: list[NamespaceInfo]) -> str:
    """Return the rows of a breakdown; namespaces without objects are the last rows."""
    rows, notes = list(usage.rows), dict[str, str]()
    if usage.by is By.NAMESPACE:
        if not infos:
            return "no namespaces yet\n"
        with_objects = {row.name for row in rows}
        rows += (Row(info.folder) for info in infos if info.folder not in with_objects)
        notes = {info.folder: f"  ({printable(info.problem)})" for info in infos if info.problem}
    lines = [_row("OBJECTS", "SIZE", "SHARE", "LAST USED", usage.by.upper())]
    for row in rows:
        share = f"{100 * row.bytes / max(usage.bytes, 1):.0f}%"
        used = time_text(row.last_used) if row.objects else "-"
        name = row.name + notes.get(row.name, "")
        lines.append(_row(row.objects, size_text(row.bytes), share, used, name))
    return "".join(lines)


def _closing(url: str, usage: Usage, keeper_summary: KeeperSummary, pins: Pins) -> str:
    """Return a line each about the whole shelf, its bounds and the pins, as far as known."""
    parts = [f"{url}: {count_text(usage.objects, 'object')}, {size_text(usage.bytes)}"]
    parts += [
        f"{count_text(total.count, f'{name} file')}: {size_text(total.nbytes)}"
        for name, total in sorted(usage.others.items())
    ]
    if usage.space is not None:
        free, total = size_text(usage.space.free), size_text(usage.space.total)
        parts.append(f"{free} of {total} free on the storage")
    lines, now = ["; ".join(parts)], time.time()
    if keeper_summary.last_sweep is not None:
        bounds = [
            f"{name} {age_text(value) if name == 'max_age' else size_text(int(value))}"
            for name, value in keeper_summary.bounds.items()
        ]
        idle = age_text(max(0.0, now - keeper_summary.last_sweep))
        alive = f"{ALIVE_SECONDS / 60:.0f} minutes, the last sweep {idle} ago"
        swept = f"{count_text(keeper_summary.keepers, 'keeper')} in the last {alive}"
        lines.append("; ".join([swept, *bounds]))
    for name, pin in pins.all.items():
        keys = ", all chunks" if pin.keys is None else f", {count_text(len(pin.keys), 'chunk')}"
        place = f"{pin.namespace or 'all namespaces'}/{pin.group or '*'}"
        until = "" if pin.until is None else f", until {time_text(pin.until)}"
        expired = " (expired)" if pin.expired(now) else ""
        lines.append(f"pin {name}: {place}{keys}{until}{expired}")
    return "\n".join(lines) + "\n"
