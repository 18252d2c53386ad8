"""``kvshelf status``: how full a shelf is, what bounds it, who sweeps it, and what is pinned.

Owns the options, the tables and the JSON; :mod:`kvshelf.tools.status` looks.
"""

from __future__ import annotations

from typing import Any

import typer

from kvshelf.capacity.lease import Finding
from kvshelf.capacity.pins import Pin
from kvshelf.cli.common import (
    PROBLEM,
    JsonOption,
    ShelfArgument,
    columns,
    configuration,
    message,
    open_found,
    size_text,
    time_text,
    write,
)
from kvshelf.cli.values import bounds_given_by
from kvshelf.errors import printable
from kvshelf.tools.status import Bound, Status, look


def status(shelf: ShelfArgument = None, as_json: JsonOption = False) -> None:
    """Show how full a shelf is, what bounds and sweeps it, and what is pinned; lists no objects."""
    capacity = configuration(shelf).capacity
    with open_found(shelf) as opened:
        found = look(opened.backend, capacity, bounds_given_by())
        shown = opened.url
    problems = _problems(found)
    for problem in problems:
        message(problem["problem"], error=False)
    write(as_json, lambda: _json(shown, found, problems), lambda: _text(shown, found))
    if problems:
        raise typer.Exit(PROBLEM)


def _problems(found: Status) -> list[dict[str, Any]]:
    """Return what is wrong, as the JSON has it in ``errors``."""
    rows: list[dict[str, Any]] = []
    acting = found.acting
    if acting is not None and acting.room is not None and acting.room <= 0:
        rows.append(
            {"name": None, "problem": f"{acting.name} is reached, and nothing is stored now"}
        )
    for name, problem in found.problems:
        rows.append({"name": name, "problem": f"{name}: {problem}"})
    for name, problem in found.pins.unreadable.items():
        rows.append({"name": name, "problem": f"the pin {name} pins nothing: {problem}"})
    if found.pins.problem is not None:
        rows.append({"name": next(iter(found.pins.unknown)), "problem": found.pins.problem})
    return rows


# ---------------------------------------------------------------------------------- JSON


def _json(url: str, found: Status, problems: list[dict[str, Any]]) -> dict[str, Any]:
    acting, sweeping = found.acting, found.sweeping
    return {
        "shelf": url,
        "namespaces": found.namespaces,
        "bytes": found.used,
        "free": found.free,
        "total": found.total,
        "bounds": {
            bound.name: {"value": bound.value, "from": bound.given_by, "room": bound.room}
            for bound in found.bounds
        },
        "acts": None if acting is None else acting.name,
        "sweep": None if found.finding is None else _sweep(found.finding),
        "sweeping": None if sweeping is None else {"by": sweeping.owner, "until": sweeping.until},
        "pins": [_pin(name, pin, found) for name, pin in found.pins.all.items()],
        "unknown": list(found.unknown),
        "problems": problems,
    }


def _sweep(finding: Finding) -> dict[str, Any]:
    return {
        "at": finding.at,
        "by": finding.by or None,
        "deleted_files": finding.deleted_files,
        "deleted_bytes": finding.deleted_bytes,
        "bytes_after": finding.nbytes,
    }


def _pin(name: str, pin: Pin, found: Status) -> dict[str, Any]:
    return {
        "pin": name,
        "namespace": pin.namespace,
        "group": pin.group,
        "chunks": None if pin.keys is None else len(pin.keys),
        "bytes_if_stored": found.pin_bytes[name],
        "until": pin.until,
        "expired": pin.expired(found.now),
    }


# ---------------------------------------------------------------------------------- text

_bound_row = columns(-15, 10, 10, -5, 0)
_pin_row = columns(7, 10, -16, -24, 0)


def _text(url: str, found: Status) -> str:
    lines = [f"{url}: {_fullness(found)}\n"]
    if found.bounds:
        lines.append(_bound_row("BOUND", "VALUE", "ROOM", "ACTS", "GIVEN BY"))
        lines += [_bound_line(bound, found.acting) for bound in found.bounds]
    lines.append(f"last sweep: {_sweep_text(found)}\n")
    sweeping = found.sweeping
    who = "no process" if sweeping is None else printable(sweeping.owner)
    lines.append(f"sweeps now: {who}\n")
    if found.pins.all:
        lines.append(_pin_row("CHUNKS", "IF STORED", "UNTIL", "PIN", "NAMESPACE"))
        lines += [_pin_line(name, pin, found) for name, pin in found.pins.all.items()]
    else:
        lines.append("pins: none\n")
    lines += [f"not known: {printable(sentence, 500)}\n" for sentence in found.unknown]
    return "".join(lines)


def _fullness(found: Status) -> str:
    spaces = f"{found.namespaces} namespace" + ("" if found.namespaces == 1 else "s")
    parts = [spaces if found.used is None else f"about {size_text(found.used)} in {spaces}"]
    most = next((bound.value for bound in found.bounds if bound.name == "max_bytes"), None)
    if most is not None and found.used is not None:
        parts.append(f"{100 * found.used / most:.0f}% of max_bytes")
    if found.free is not None and found.total is not None:
        parts.append(f"{size_text(found.free)} of {size_text(found.total)} free on the storage")
    return "; ".join(parts)


def _bound_line(bound: Bound, acting: Bound | None) -> str:
    value = f"{bound.value:g} s" if bound.name == "max_age" else size_text(int(bound.value))
    room = "-" if bound.room is None else size_text(max(0, bound.room))
    acts = "first" if bound is acting else ""
    return _bound_row(bound.name, value, room, acts, bound.given_by)


def _sweep_text(found: Status) -> str:
    finding = found.finding
    if finding is None:
        return "none is known"
    parts = [time_text(finding.at)]
    if finding.by:
        parts.append(f"by {printable(finding.by)}")
    if finding.deleted_files is not None and finding.deleted_bytes is not None:
        count = finding.deleted_files
        parts.append(f"deleted {count} files, {size_text(finding.deleted_bytes)}")
    parts.append(f"left {size_text(finding.nbytes)}")
    if found.sweeping is not None and found.sweeping.owner == finding.by:
        parts.append("not over yet")
    return ", ".join(parts)


def _pin_line(name: str, pin: Pin, found: Status) -> str:
    chunks = "all" if pin.keys is None else str(len(pin.keys))
    nbytes = found.pin_bytes[name]
    size = "-" if nbytes is None else size_text(nbytes)
    until = "-" if pin.until is None else time_text(pin.until)
    until = "expired" if pin.expired(found.now) else until
    where = pin.namespace or "all"
    return _pin_row(
        chunks, size, until, name, where if pin.group is None else f"{where}/{pin.group}"
    )
