"""What a hit must do with its bytes at least: read them, hash them, and copy them once.

Owns the floors of hits that add this to a hit in vLLM's own prefix cache, which moves no bytes.
Runs on the calling thread and two of its own, while the engine is idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import xxhash

from benchmarks.measure import Goal, Row
from kvshelf.memory.arena import copy_bytes

_THREADS = 2


def bytes_row(row: Row, name: str, goal: float, *, read: bool) -> Row:
    """Return the row, without figures, that compares what `row` does with the least work.

    Parameters
    ----------
    row : Row
        Compares hits with hits in vLLM's memory.
    name : str
    goal : float
        The largest ratio that meets the goal.
    read : bool
        The bytes come from files: they are read and hashed before they are copied.
    """
    work = ", one read and hash of the bytes" if read else ""
    return replace(
        row, name=name, floor=f"{row.floor}{work}, one copy by {_THREADS} threads", goal=Goal(goal)
    )


def with_bytes(row: Row, measured: Row, files: Sequence[Path], *, read: bool) -> Row:
    """Fill a row of :func:`bytes_row`.

    Parameters
    ----------
    row, measured : Row
    files : Sequence of Path
        As many bytes as a hit has.
    read : bool
        As for :func:`bytes_row`.
    """
    source = [memoryview(bytearray(path.stat().st_size)) for path in files]
    target = [memoryview(bytearray(len(view))) for view in source]
    raws: list[float] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in range(-1, len(measured.floors)):
            begin = time.perf_counter()
            if read:
                for path, view in zip(files, source, strict=True):
                    _read(path, view)
                    xxhash.xxh3_128_digest(view)
            for _ in pool.map(copy_bytes, target, source):
                pass
            raws.append(time.perf_counter() - begin)
    return replace(
        row,
        ours=measured.ours,
        floors=[floor + raw for floor, raw in zip(measured.floors, raws[1:], strict=True)],
        extra={"bytes": sum(map(len, source)), "byte_seconds": raws[1:]},
    )


def _read(path: Path, view: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        if os.preadv(fd, [view], 0) != len(view):
            raise OSError(f"{path} was not read as a whole")
    finally:
        os.close(fd)
