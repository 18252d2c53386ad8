"""What a hit must do with its bytes at least: read them, hash them, and copy them once.

Owns the floors of hits that add this to a hit in vLLM's own prefix cache, which moves no bytes.
Runs on the calling thread and two of its own, while the engine is idle. Like a hit's, the bytes of
each time are others than those of the times before: a processor's caches do not have them.
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
#: Prompts whose bytes are copied in turn, and places in a KV cache for them: as in an engine.
_PROMPTS = 24
_PLACES = 6


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


def with_bytes(row: Row, measured: Row, files: Sequence[Path], count: int, *, read: bool) -> Row:
    """Fill a row of :func:`bytes_row`.

    Parameters
    ----------
    row, measured : Row
    files : Sequence of Path
        Those of several hits, of equal size.
    count : int
        How many of them a hit has.
    read : bool
        As for :func:`bytes_row`.
    """
    hits = [files[at : at + count] for at in range(0, len(files) - count + 1, count)][:_PROMPTS]
    sizes = [path.stat().st_size for path in hits[0]]
    sources = [[memoryview(bytearray(b"\1" * size)) for size in sizes] for _ in hits]
    targets = [[memoryview(bytearray(b"\1" * size)) for size in sizes] for _ in range(_PLACES)]
    raws: list[float] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for turn in range(-1, len(measured.floors)):
            source, target = sources[turn % len(sources)], targets[turn % len(targets)]
            begin = time.perf_counter()
            if read:
                for path, view in zip(hits[turn % len(hits)], source, strict=True):
                    _read(path, view)
                    xxhash.xxh3_128_digest(view)
            for _ in pool.map(copy_bytes, target, source):
                pass
            raws.append(time.perf_counter() - begin)
    return replace(
        row,
        ours=measured.ours,
        floors=[floor + raw for floor, raw in zip(measured.floors, raws[1:], strict=True)],
        extra={"bytes": sum(sizes), "byte_seconds": raws[1:]},
    )


def _read(path: Path, view: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        if os.preadv(fd, [view], 0) != len(view):
            raise OSError(f"{path} was not read as a whole")
    finally:
        os.close(fd)
