"""Rows ``capacity/*``: an engine that keeps its shelf within bounds, and one that does not.

Both are real vLLM engines with a shelf each. The bound is so small that every 16 prompts a sweep
deletes others: far more often than on any shelf of use. The floor has ``min_free: 0`` and records
no uses, so nothing of :mod:`kvshelf.capacity` runs in it. What the floor writes makes the same
filesystem fuller, so it counts for the bounded engine until that lists its shelf.

An engine may be some percent faster than another one for as long as it runs, which is more than
what is measured here. So each half of the pairs is of two new engines.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.child import Child, ChildError
from benchmarks.engine import (
    HIT_TOKENS,
    PROMPT_TOKENS,
    QUIET_SECONDS,
    EngineRun,
    cold,
    find_model,
    guarded,
    warm_up,
)
from benchmarks.measure import Goal, Row
from benchmarks.settings import Settings

Times = tuple[list[float], list[float]]

_BURST = 3
#: Size of the bound, in prompts, and what is there from the beginning: what is in use all the time,
#: and what goes first. Between the bytes at which a sweep begins and the bound there is room for
#: what both engines write until it ends, so that no store is dropped.
_BOUND_PROMPTS = 160
_KEPT_PROMPTS = 100
_OLD_PROMPTS = 38
#: Objects that are kept, which each sweep lists.
_KEPT_OBJECTS = 5000
_OLD_BYTES = 1 << 20
_STORE_SECONDS = 60.0
_HALF_A_DAY = 43200.0
_WARM_UP_PAIRS = 2
_SETS = 2
#: What an engine logs when it drops a store for want of room.
_NO_ROOM = "nothing is stored"

_SINGLE = Row(
    "capacity/cold",
    f"cold TTFT, {PROMPT_TOKENS} tokens, with max_bytes, max_age and sweeps",
    "kvshelf without capacity",
    goal=Goal(1.02),
)
_BURSTS = Row(
    "capacity/cold-burst",
    f"{_BURST} cold prompts back to back, with max_bytes, max_age and sweeps",
    "kvshelf without capacity",
    goal=Goal(1.02),
    note="holds the stores and sweeps of all but the last prompt",
)
_WARM = Row(
    "capacity/warm",
    f"warm TTFT, {HIT_TOKENS} of {PROMPT_TOKENS} tokens from the shelf, uses recorded",
    "kvshelf without capacity",
    goal=Goal(1.02),
)


def bench_capacity(settings: Settings) -> Iterator[Row]:
    """Measure what bounds cost an engine, in alternating pairs of distinct prompts."""
    yield from guarded(settings, [_SINGLE, _BURSTS, _WARM], _rows)


def _rows(settings: Settings) -> Iterator[Row]:
    run = EngineRun(settings, find_model(settings), "capacity")
    times: dict[str, Times] = {row.name: ([], []) for row in (_SINGLE, _BURSTS, _WARM)}
    dropped = False
    for number in range(_SETS):
        dropped |= _cold_set(settings, run, number, times)
        _warm_set(settings, run, number, times[_WARM.name])
    for row in (_SINGLE, _BURSTS, _WARM):
        ours, floors = times[row.name]
        if dropped and row is not _WARM:
            row = replace(row, note="Stores were dropped for want of room, which takes no time.")
        yield replace(row, ours=ours, floors=floors)


def _cold_set(settings: Settings, run: EngineRun, number: int, times: dict[str, Times]) -> bool:
    """Measure cold prompts with two new engines; tell whether stores were dropped."""
    bounded = settings.folder(f"capacity-bounded-{number}")
    free = settings.folder(f"capacity-free-{number}")
    _put_kept(bounded, _KEPT_PROMPTS * run.prompt_bytes())
    _put_old(bounded, _OLD_PROMPTS * run.prompt_bytes())
    capacity = {
        "max_bytes": _BOUND_PROMPTS * run.prompt_bytes(),
        "max_age": "1d",
        "min_free": 1,
    }
    settings.progress("starting two engines")
    with (
        _engine(run, f"bounded {number}", bounded, capacity) as ours,
        _engine(run, f"free {number}", free, {"min_free": 0, "uses": "off"}) as floor,
    ):
        pair = (ours, floor)
        for engine in pair:
            engine.wait_ready()
        settings.progress("warming up")
        for engine, shelf in zip(pair, (bounded, free), strict=True):
            warm_up(engine, run)
            _settle(shelf)
        for row, prompts, count in (
            (_SINGLE, 1, _share(settings.pairs(21), number)),
            (_BURSTS, _BURST, _share(settings.pairs(15), number)),
        ):
            for done in range(count):
                settings.progress(f"{row.work}: pair {done + 1} of {count}")
                for side in (0, 1) if done % 2 else (1, 0):
                    times[row.name][side].append(cold(pair[side], run, prompts)["seconds"])
                    _settle((bounded, free)[side])
        dropped = ours.said(_NO_ROOM)
    for shelf in (bounded, free):
        shutil.rmtree(shelf)
    return dropped


def _warm_set(settings: Settings, run: EngineRun, number: int, times: Times) -> None:
    """Load the same stored prompts with two new engines on one shelf, one of which is bounded."""
    count = _share(settings.pairs(21), number)
    prompts = [run.prompt() for _ in range(count + _WARM_UP_PAIRS)]
    with _engine(run, f"storing {number}", run.shelf, {}) as storing:
        settings.progress("storing prompts for the warm engines")
        for prompt in prompts:
            storing.call("generate", prompts=[prompt])
            _settle(run.shelf)
    bounds = {"max_bytes": "1TiB", "max_age": "7d", "min_free": 1}
    with (
        _engine(run, f"warm bounded {number}", run.shelf, bounds) as ours,
        _engine(run, f"warm free {number}", run.shelf, {"min_free": 0, "uses": "off"}) as floor,
    ):
        pair = (ours, floor)
        for done, prompt in enumerate(prompts):
            settings.progress(f"{_WARM.work}: pair {done + 1} of {len(prompts)}")
            for side in (0, 1) if done % 2 else (1, 0):
                reply = pair[side].call("generate", prompts=[prompt])
                if reply["cached"] != [HIT_TOKENS]:
                    raise ChildError(f"{reply['cached']} tokens were loaded, not {HIT_TOKENS}")
                if done >= _WARM_UP_PAIRS:
                    times[side].append(reply["seconds"])
                time.sleep(QUIET_SECONDS)


def _share(pairs: int, number: int) -> int:
    """Return how many of the pairs are of the engines of this number."""
    return (pairs + number) // _SETS


def _engine(run: EngineRun, name: str, shelf: Path, capacity: dict[str, Any]) -> Child:
    return run.engine(name, options={"shared_storage_path": str(shelf), "capacity": capacity})


def _put_kept(shelf: Path, nbytes: int) -> None:
    """Put objects of another namespace on a shelf that sweeps list and leave alone."""
    later = time.time() + _HALF_A_DAY
    for number in range(_KEPT_OBJECTS):
        path = _object(shelf / "kept-0123456789abcdef", number)
        path.touch()
        os.truncate(path, nbytes // _KEPT_OBJECTS)
        os.utime(path, (later, later))


def _put_old(shelf: Path, nbytes: int) -> None:
    """Put objects on a shelf that go first."""
    before = time.time() - _HALF_A_DAY
    data = bytes(_OLD_BYTES)
    for number in range(nbytes // _OLD_BYTES):
        path = _object(shelf / "old-0123456789abcdef", number)
        path.write_bytes(data)
        os.utime(path, (before, before))


def _object(namespace: Path, number: int) -> Path:
    key = f"{number:04x}".ljust(64, "0")
    folder = namespace / "_" / key[:2]
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{key}-{number}-0of1.safetensors"


def _settle(shelf: Path) -> None:
    """Wait until nothing is being written, and the engine sleeps."""
    begin = time.monotonic()
    time.sleep(QUIET_SECONDS)
    while list(shelf.glob("*/*/*/.*.tmp")):
        if time.monotonic() - begin > _STORE_SECONDS:
            raise ChildError(f"stores had not ended after {_STORE_SECONDS:g} s")
        time.sleep(0.02)
