"""Rows ``saturated/*``: what storing costs an engine that always has more to compute.

Owns the comparison of kvshelf's connector with one that does nothing, in turn within one engine
process, so that both have the same memory, processors and compiled code. The shelf is on a local
disk; and behind a filesystem that takes fewer bytes than the engine computes, which needs FUSE and
a source checkout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.child import Child, ChildError
from benchmarks.engine import EngineRun, find_model, guarded
from benchmarks.fault_mount import require_faultfs
from benchmarks.measure import Goal, Row, median
from benchmarks.samples import CHUNK_TOKENS
from benchmarks.settings import Settings

_PROMPTS, _TOKENS, _ANSWER = 16, 1056, 16
_CHUNKS = _PROMPTS * (_TOKENS // CHUNK_TOKENS)
_PAIRS = 31
#: Pairs that are not counted.
_WARM_UP_PAIRS = 2
#: How long each write of a slow storage takes, of 128 KiB or less.
_WRITE_SECONDS = 30e-3
_ROW = Row(
    "saturated/stores",
    f"{_PROMPTS} cold prompts of {_TOKENS} tokens at once, {_ANSWER} tokens for each,"
    " until the last answer has ended",
    "inert connector, in the same process",
    goal=Goal(1.03),
)
_SLOW = replace(
    _ROW, name="saturated/slow-stores", work=f"{_ROW.work}, storage slower than the engine"
)


def bench_saturated(settings: Settings) -> Iterator[Row]:
    """Measure an engine that stores all that it computes, beside one that stores nothing."""
    yield from guarded(settings, [_ROW, _SLOW], _rows)


def _rows(settings: Settings) -> Iterator[Row]:
    run = EngineRun(settings, find_model(settings), "saturated")
    yield _measure(settings, run, _ROW, run.shelf)
    try:
        faultfs = require_faultfs()
    except ChildError as error:
        yield replace(_SLOW, skipped=str(error))
        return
    with ExitStack() as stack:
        mount = faultfs.FaultMount(settings.folder("saturated-mount"), source=run.shelf)
        stack.callback(mount.close)
        mount.add("write", "*", seconds=_WRITE_SECONDS)
        yield _measure(settings, run, _SLOW, mount.path, mount.pid)


def _measure(
    settings: Settings, run: EngineRun, row: Row, shelf: Path, filesystem: int | None = None
) -> Row:
    pairs = settings.pairs(_PAIRS)
    times: tuple[list[float], list[float]] = ([], [])
    replies: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    stored = []
    settings.progress("starting an engine")
    with run.engine(
        row.name.rpartition("/")[2], mode="stepped", options={"shared_storage_path": str(shelf)}
    ) as engine:
        engine.wait_ready()
        for pair in range(-_WARM_UP_PAIRS, pairs):
            settings.progress(f"{row.work}: pair {pair + 1} of {pairs}")
            for side in (0, 1) if pair % 2 else (1, 0):
                reply = _fill(engine, run, filesystem, inert=bool(side))
                count = len(run.objects())
                if side and count:
                    raise ChildError(f"the inert connector stored {count} objects")
                run.empty()
                if pair < 0:
                    continue
                times[side].append(reply["seconds"])
                replies[side].append(reply)
                if not side:
                    stored.append(count)
    share = sum(stored) / (len(stored) * _CHUNKS)
    engines, filesystems = (
        [median([reply["processor_seconds"][which] for reply in side]) for side in replies]
        for which in (0, -1)
    )
    note = (
        f"{share:.0%} of the chunks were stored; processor time of the engine {engines[0]:.2f} s,"
        f" inert {engines[1]:.2f} s"
    )
    if filesystem is not None:
        note += f"; of the filesystem {filesystems[0]:.2f} s, inert {filesystems[1]:.2f} s"
    return replace(
        row,
        ours=times[0],
        floors=times[1],
        note=note,
        extra={"stored_chunks": stored, "storing": replies[0], "inert": replies[1]},
    )


def _fill(engine: Child, run: EngineRun, filesystem: int | None, *, inert: bool) -> dict[str, Any]:
    prompts = [run.prompt(_TOKENS) for _ in range(_PROMPTS)]
    return engine.call("fill", prompts=prompts, tokens=_ANSWER, inert=inert, filesystem=filesystem)
