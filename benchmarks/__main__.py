"""``python -m benchmarks``: measure, print a table, write JSON.

Owns the command line. The exit code does not depend on the figures: goals are reported, not
asserted. After Ctrl-C or SIGTERM the rows measured so far are printed, and the exit code is 130.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.admission import bench_admission
from benchmarks.capacity import bench_capacity
from benchmarks.copies import bench_copy
from benchmarks.engine import bench_engine
from benchmarks.lookups import bench_lookup
from benchmarks.measure import Row
from benchmarks.objects import bench_load, bench_publish
from benchmarks.peers import bench_peers
from benchmarks.report import describe_machine, make_report, print_report
from benchmarks.settings import Settings

GROUPS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "load": bench_load,
    "publish": bench_publish,
    "copy": bench_copy,
    "lookup": bench_lookup,
    "engine": bench_engine,
    "admission": bench_admission,
    "capacity": bench_capacity,
    "peers": bench_peers,
}
_ONLY_WHEN_ASKED = ("admission", "capacity", "peers")
_INTERRUPTED = 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure kvshelf on this machine, in alternating pairs against floors.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="GROUP",
        help=f"groups of rows: {', '.join(GROUPS)}; default: all but {', '.join(_ONLY_WHEN_ASKED)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--pairs", type=int, metavar="N", help="pairs for each row")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, no engines: checks that everything runs"
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="folder on the filesystem to measure"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint for the rows with engines"
    )
    return parser


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in GROUPS]
    if unknown:
        parser.error(f"unknown group: {', '.join(unknown)}; expected some of {', '.join(GROUPS)}")
    if options.pairs is not None and options.pairs < 1:
        parser.error("--pairs must be at least 1")
    machine = describe_machine(options.dir or Path(tempfile.gettempdir()))
    scratch = Path(tempfile.mkdtemp(prefix="kvshelf-bench-", dir=options.dir))
    rows: list[Row] = []
    code = 0
    try:
        with Console(stderr=True).status("measuring") as status:
            settings = Settings(scratch, options.pairs, options.quick, options.model, status.update)
            for name in options.names or [one for one in GROUPS if one not in _ONLY_WHEN_ASKED]:
                status.update(name)
                rows.extend(GROUPS[name](settings))
    except KeyboardInterrupt:
        code = _INTERRUPTED
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.quick:
        # Goals apply to real sizes only.
        rows = [replace(row, goal=None) for row in rows]
    given = sys.argv[1:] if arguments is None else arguments
    report = make_report(rows, machine, ["python", "-m", "benchmarks", *given])
    # A file or a pipe has no width; a truncated table is useless.
    width = None if sys.stdout.isatty() else 170
    print_report(Console(width=width, highlight=False), rows, machine)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return code


if __name__ == "__main__":
    # Engines and shelves are cleaned up by `finally`, which the default action would skip.
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
