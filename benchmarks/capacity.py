"""Rows ``capacity/*``: ``kvshelf gc`` over a shelf of a million small objects.

Owns the shelf, which is made without kvshelf, and the measurement: the time of each command, and
the most memory that its process had. The objects are 300 bytes, so their number counts, not their
size; the folder should be on tmpfs, where they take 5 GiB.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.measure import Goal, Row
from benchmarks.samples import TINY, make_format
from benchmarks.settings import Settings

_OBJECTS: Final = 1_000_000
_QUICK_OBJECTS: Final = 2_000
_PROMPT_CHUNKS: Final = 40
_GOAL: Final = Goal(120.0, "seconds")
#: Runs a command and says how many KiB it had at most: ``ru_maxrss`` would be that of its parent.
_PROGRAM: Final = """
from kvshelf.cli import main
try:
    main()
finally:
    print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0], flush=True)
"""
_CHECKOUT: Final = Path(__file__).resolve().parents[1]


def _fill(root: Path, count: int) -> int:
    """Make objects with true names and beginnings; return all bytes."""
    fmt = make_format(TINY, 1)
    folder = root / fmt.namespace.folder
    for fan in range(256):
        (folder / "_" / f"{fan:02x}").mkdir(parents=True)
    (folder / "namespace.json").write_bytes(fmt.namespace.encoded)
    begin = (
        (fmt.data_offset - 8).to_bytes(8, "little")
        + b'{"__metadata__":{"format":"kvshelf/1","namespace":"%s",'
        % fmt.namespace.digest.hex().encode()
    )
    base, key, held = str(folder / "_"), b"", 0
    for number in range(count):
        index = number % _PROMPT_CHUNKS
        parent = key if index else number.to_bytes(32, "little")
        key = hashlib.sha256(parent).digest()
        text = key.hex()
        data = begin + f'"key":"{text}","parent":"{parent.hex()}","chunk":"{index}"'.encode()
        path = f"{base}/{text[:2]}/{text}-{index}-0of1.safetensors"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        held += os.write(file, data)
        os.close(file)
    return held


def _run(*arguments: str) -> tuple[float, int]:
    """Run ``kvshelf gc``; return its seconds and the most bytes that it had in memory."""
    begin = time.monotonic()
    done = subprocess.run(  # noqa: S603  our own module
        [sys.executable, "-c", _PROGRAM, "gc", *arguments],
        cwd=_CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")},
    )
    return time.monotonic() - begin, int(done.stdout.split()[-1]) << 10


def bench_capacity(settings: Settings) -> Iterator[Row]:
    """Measure a dry run, and the deletion of a half."""
    count = _QUICK_OBJECTS if settings.quick else _OBJECTS
    root = settings.folder("capacity")
    settings.progress(f"capacity: making {count} objects")
    bound = f"--max-bytes={_fill(root, count) // 2}B"
    for name, what, more in (
        ("plan", "a dry run", ()),
        ("delete", "the deletion of the older half", ("--yes",)),
    ):
        settings.progress(f"capacity: {what}")
        seconds, nbytes = _run(str(root), bound, *more)
        yield Row(
            f"capacity/{name}",
            f"`kvshelf gc` of {count:,} objects: {what}, with {nbytes >> 20} MiB at most",
            ours=[seconds],
            goal=_GOAL,
            extra={"objects": count, "resident_bytes": nbytes},
        )
