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

from benchmarks.admission import bench_admission, bench_tails
from benchmarks.busy import bench_busy
from benchmarks.capacity import bench_capacity
from benchmarks.copies import bench_copy
from benchmarks.engine import bench_engine, bench_startup
from benchmarks.far import bench_far
from benchmarks.fs_tier import bench_fs_tier
from benchmarks.gc import bench_gc
from benchmarks.gil import bench_gil
from benchmarks.handover import bench_handover
from benchmarks.hybrid import bench_hybrid
from benchmarks.lengths import bench_lengths
from benchmarks.lookups import bench_lookup
from benchmarks.measure import Row
from benchmarks.memory import bench_memory
from benchmarks.near import bench_tier
from benchmarks.objects import bench_load, bench_publish
from benchmarks.peers import bench_peers
from benchmarks.remote import bench_s3
from benchmarks.replicas import bench_replicas
from benchmarks.report import describe_machine, make_report, markdown, print_report
from benchmarks.saturated import bench_saturated
from benchmarks.scale import bench_scale
from benchmarks.served import bench_server
from benchmarks.settings import Settings
from benchmarks.together import bench_together
from benchmarks.waits import bench_waits

GROUPS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "load": bench_load,
    "gil": bench_gil,
    "publish": bench_publish,
    "tier": bench_tier,
    "memory": bench_memory,
    "far": bench_far,
    "copy": bench_copy,
    "lookup": bench_lookup,
    "s3": bench_s3,
    "waits": bench_waits,
    "engine": bench_engine,
    "lengths": bench_lengths,
    "hybrid": bench_hybrid,
    "server": bench_server,
    "admission": bench_admission,
    "tails": bench_tails,
    "fs-tier": bench_fs_tier,
    "peers": bench_peers,
    "scale": bench_scale,
    "together": bench_together,
    "replicas": bench_replicas,
    "busy": bench_busy,
    "saturated": bench_saturated,
    "handover": bench_handover,
    "capacity": bench_capacity,
    "gc": bench_gc,
    "startup": bench_startup,
}
_ONLY_WHEN_ASKED = (
    *("waits", "lengths", "hybrid", "server", "admission", "tails", "fs-tier", "peers"),
    *("scale", "together", "replicas", "busy", "saturated", "handover", "capacity", "gc"),
    "startup",
)
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
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to FILE")
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help="pairs for each row; by default 51 for short work, 7 to 31 for the rest",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, no vLLM: only checks that everything runs"
    )
    parser.add_argument(
        "--with-startup", action="store_true", help="also time the start of engines (minutes)"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="folder on the filesystem to measure; default: the system's for temporary files",
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
    names = list(options.names) or [name for name in GROUPS if name not in _ONLY_WHEN_ASKED]
    if options.with_startup and "startup" not in names:
        names.append("startup")
    errors = Console(stderr=True)
    machine = describe_machine(options.dir or Path(tempfile.gettempdir()))
    scratch = Path(tempfile.mkdtemp(prefix="kvshelf-bench-", dir=options.dir))
    rows: list[Row] = []
    code = 0
    try:
        with errors.status("measuring") as status:
            settings = Settings(scratch, options.pairs, options.quick, options.model, status.update)
            for name in names:
                status.update(name)
                for row in GROUPS[name](settings):
                    # Goals apply to real sizes only.
                    rows.append(replace(row, goal=None) if options.quick else row)
                    status.update(f"{name}: {row.work}")
    except KeyboardInterrupt:
        errors.print("stopped; the rows measured so far:", style="yellow")
        code = _INTERRUPTED
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    given = sys.argv[1:] if arguments is None else arguments
    report = make_report(rows, machine, ["python", "-m", "benchmarks", *given])
    # A file or a pipe has no width; a truncated table is useless.
    width = None if sys.stdout.isatty() else 170
    print_report(Console(width=width, highlight=False), rows, machine)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows))
    return code


if __name__ == "__main__":
    # Engines and shelves are cleaned up by `finally`, which the default action would skip.
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
