"""``kvshelf ls``: what is on a shelf: its namespaces, their space, the last sweep, and pins.

Owns the options, the tables and the JSON; :mod:`kvshelf.tools.usage` counts, and
:mod:`kvshelf.capacity` has the record of sweeps and the pins.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvshelf.backends import Backend
from kvshelf.capacity import lease
from kvshelf.capacity.files import time_of
from kvshelf.capacity.lease import Finding, Lease, Record
from kvshelf.cli.codes import write_out
from kvshelf.cli.common import (
    JsonOption,
    age_text,
    columns,
    message,
    number,
    time_text,
    write_json,
)
from kvshelf.cli.progress import Display
from kvshelf.cli.shelves import NamespacesOption, ShelfArgument, find_folders, open_found
from kvshelf.errors import printable, size_text
from kvshelf.shelf.pins import Pins
from kvshelf.shelf.shelf import NamespaceInfo
from kvshelf.tools.usage import Row, Usage, measure


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
    """List the namespaces of a shelf with their space and last use, its last sweep and pins."""
    with open_found(shelf) as opened:
        folders = find_folders(opened, namespaces)
        with Display("counting", as_json=as_json) as display:
            usage = measure(opened.backend, folders, by=by.value, on_listed=display.listed)
        infos = [info for info in opened.namespaces() if folders is None or info.folder in folders]
        url, now = opened.url, time_of(opened.backend)
        record, sweeping = _sweeps(opened.backend, now)
        pins = Pins.read(opened.backend, now)
    for name, problem in pins.unreadable.items():
        message(f"the pin {name} pins nothing: {problem}")
    if pins.problem is not None:
        message(pins.problem)
    if as_json:
        write_json(_json(url, usage, infos, record, sweeping, pins, now))
    else:
        shown = _namespaces(usage, infos) if by is By.NAMESPACE else _table(usage, by.value)
        write_out(shown + "\n" + _closing(url, usage, record, sweeping, pins, now))


def _sweeps(backend: Backend, now: float) -> tuple[Record, str | None]:
    """Return what is known of the sweeps of a shelf, and which process sweeps it now."""
    written = backend.info(lease.SWEEP)
    # A storage that is read only does not tell its time, but that of a file is by its clock.
    now = max(now, 0.0 if written is None else written.mtime)
    own = Lease(backend)
    record = own.read(now).believed(backend.space())
    if (problem := lease.problem_of(backend)) is not None:
        message(f"{lease.SWEEP}: {problem}")
    return record, record.owner if own.is_others(record, now) else None


# ---------------------------------------------------------------------------------- JSON


def _json(
    url: str,
    usage: Usage,
    infos: list[NamespaceInfo],
    record: Record,
    sweeping: str | None,
    pins: Pins,
    now: float,
) -> dict[str, Any]:
    return {
        "shelf": url,
        "namespaces": [_namespace_json(info) for info in infos],
        **asdict(usage),
        "bounds": record.bounds(now),
        "sweep": None if record.finding is None else _sweep_json(record.finding),
        "sweeping": sweeping,
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


def _sweep_json(finding: Finding) -> dict[str, Any]:
    return {
        "at": finding.at,
        "by": finding.by or None,
        "deleted_files": finding.deleted_files,
        "deleted_bytes": finding.deleted_bytes,
        "bytes_after": finding.nbytes,
    }


# ---------------------------------------------------------------------------------- text

_row = columns(10, 10, 5, -16, 0)


def _cells(row: Row, usage: Usage, name: str) -> str:
    share = f"{100 * row.bytes / usage.bytes if usage.bytes else 0.0:.0f}%"
    used = time_text(row.last_used) if row.objects else "-"
    return _row(row.objects, size_text(row.bytes), share, used, name)


def _head(name: str) -> str:
    return _row("OBJECTS", "SIZE", "SHARE", "LAST USED", name)


def _table(usage: Usage, by: str) -> str:
    return _head(by.upper()) + "".join(_cells(row, usage, row.name) for row in usage.by[by])


def _namespaces(usage: Usage, infos: list[NamespaceInfo]) -> str:
    """Return the table of namespaces, those without objects last."""
    if not infos:
        return "no namespaces yet\n"
    rows = {row.name: row for row in usage.by["namespace"]}
    order = {name: place for place, name in enumerate(rows)}
    lines = [_head("NAMESPACE")]
    for info in sorted(infos, key=lambda one: order.get(one.folder, len(order))):
        name = info.folder + (f"  ({printable(info.problem)})" if info.problem else "")
        lines.append(_cells(rows.get(info.folder, Row(info.folder, 0, 0, 0.0)), usage, name))
    return "".join(lines)


def _closing(
    url: str, usage: Usage, record: Record, sweeping: str | None, pins: Pins, now: float
) -> str:
    """Return a line each about the whole shelf, the last sweep and the pins, as far as known."""
    parts = [f"{url}: {number(usage.objects, 'object')}, {size_text(usage.bytes)}"]
    parts += [
        f"{name} {total.files}: {size_text(total.bytes)}"
        for name, total in usage.others.items()
        if total.files
    ]
    if usage.free is not None and usage.total is not None:
        parts.append(f"{size_text(usage.free)} of {size_text(usage.total)} free on the storage")
    lines = ["; ".join(parts)]
    if sweeps := [*_sweep_parts(record, now), *([f"{sweeping} sweeps now"] if sweeping else [])]:
        lines.append(f"last sweep: {printable('; '.join(sweeps), 500)}")
    for name, pin in pins.all.items():
        keys = ", all chunks" if pin.keys is None else f", {number(len(pin.keys), 'chunk')}"
        where = f"{pin.namespace or 'all namespaces'}/{pin.group or '*'}"
        until = "" if pin.until is None else f", until {time_text(pin.until)}"
        expired = " (expired)" if pin.expired(now) else ""
        lines.append(f"pin {name}: {where}{keys}{until}{expired}")
    return "\n".join(lines) + "\n"


def _sweep_parts(record: Record, now: float) -> list[str]:
    parts = []
    if (finding := record.finding) is not None:
        text = time_text(finding.at) + (f" by {finding.by}" if finding.by else "")
        if finding.deleted_files is not None and finding.deleted_bytes is not None:
            deleted = size_text(finding.deleted_bytes)
            text += f", deleted {number(finding.deleted_files, 'file')}, {deleted}"
        parts.append(f"{text}, left {size_text(finding.nbytes)}")
    parts += [
        f"{name} {age_text(value)}" if name == "max_age" else f"{name} {size_text(int(value))}"
        for name, value in record.bounds(now).items()
    ]
    return parts
