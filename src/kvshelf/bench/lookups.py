"""Rows ``lookup/*``: finding 131,072 stored tokens, 512 chunks of 8 shards, in a local directory.

Owns three measurements: how long a look-up takes in the background, how long the calls on the
engine's step thread take meanwhile (in a child process, since that code imports vLLM), and how
much later than usual another Python thread wakes up while look-ups run one after the other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvshelf.backends import open_backend
from kvshelf.bench.child import Child, ChildError, MissingEngineError
from kvshelf.bench.measure import Goal, Row, Work, measure_pairs, percentile
from kvshelf.bench.samples import (
    LARGE,
    TINY,
    make_chunks,
    make_format,
    make_hollow_objects,
    make_prompt,
)
from kvshelf.bench.settings import Settings
from kvshelf.chunkfile import ObjectFormat
from kvshelf.identity import KeyChain
from kvshelf.metrics import Counters
from kvshelf.probe import FailedKeys, LookupService
from kvshelf.shelf import Shelf

_TICK_SECONDS = 1e-3


class _Searches:
    """Look-ups of one prompt, every one from scratch."""

    def __init__(self, root: Path, fmt: ObjectFormat, chunks: int) -> None:
        self.chunks = chunks
        self._fmt = fmt
        self._prompt = make_prompt(chunks * fmt.chunk_size)
        self.paths = make_hollow_objects(root, fmt, make_chunks(fmt, chunks))
        self._shelf = Shelf(open_backend(str(root)))
        self._service = LookupService(self._shelf, fmt, failed=FailedKeys(), counters=Counters())

    def search(self) -> None:
        """Run one look-up and wait for it."""
        lookup = self._service.submit(
            self._prompt, lambda: KeyChain(self._fmt.namespace.digest, self._fmt.chunk_size)
        )
        if not lookup.wait(60.0) or lookup.hit_chunks != self.chunks:
            raise RuntimeError(
                f"the look-up found {lookup.hit_chunks} of {self.chunks} chunks that are there"
            )

    def stat_all(self) -> None:
        """Probe the same files with nothing but the system call."""
        for path in self.paths:
            os.stat(path)

    def close(self) -> None:
        self._service.close()
        self._shelf.close()


def bench_lookup(settings: Settings) -> Iterator[Row]:
    """Measure look-ups in the background, on the step thread, and what others feel of them."""
    chunks, shape, shards = (4, TINY, 2) if settings.quick else (512, LARGE, 8)
    what = f"look-up of {chunks} chunks × {shards} shards"
    searches = _Searches(settings.folder("lookup"), make_format(shape, shards), chunks)
    try:
        times = measure_pairs(
            Work(searches.search), Work(searches.stat_all), settings.pairs(31), warm_up=3
        )
        yield Row(
            "lookup/background",
            f"{what}: keys, search, confirmation",
            f"os.stat of the {len(searches.paths)} files",
            *times,
            goal=Goal(25e-3, "seconds"),
        )
        settings.progress(f"{what}: other threads")
        seconds = 0.05 if settings.quick else 1.5
        late: tuple[list[float], list[float]] = ([], [])
        for pair in range(settings.pairs(15)):
            for side in (0, 1) if pair % 2 else (1, 0):
                delays = _delays(seconds, searches.search if side == 0 else None)
                late[side].append(percentile(delays, 0.99))
        yield Row(
            "lookup/gil",
            "99th percentile of a thread's lateness, look-ups running",
            "no look-ups running",
            *late,
            goal=Goal(1e-3, "difference"),
            note=f"a thread that sleeps 1 ms at a time for {seconds:g} s a sample",
        )
    finally:
        searches.close()
    yield _step_thread(settings, chunks)


def _delays(seconds: float, work: Callable[[], None] | None) -> list[float]:
    """Return how late a thread wakes up that sleeps in short steps, with `work` looping."""
    delays: list[float] = []
    stop = threading.Event()

    def sleeper() -> None:
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            time.sleep(_TICK_SECONDS)
            delays.append(time.perf_counter() - now - _TICK_SECONDS)
        stop.set()

    thread = threading.Thread(target=sleeper, name="kvshelf-bench-sleeper")
    thread.start()
    while work is not None and not stop.is_set():
        work()
    thread.join()
    return delays


def _step_thread(settings: Settings, chunks: int) -> Row:
    name, text = "lookup/step", "step thread: all calls for one request until it has its answer"
    goal = Goal(0.2e-3, "seconds")
    if settings.quick:
        return Row(name, text, goal=goal, skipped="not with --quick")
    settings.progress("step thread (imports vLLM)")
    try:
        with Child("scheduler", settings.folder("lookup-step") / "log.txt") as child:
            reply = child.call(
                "look_up",
                root=str(settings.folder("lookup-step-shelf")),
                chunks=chunks,
                requests=settings.pairs(51),
            )
    except MissingEngineError as error:
        return Row(name, text, goal=goal, skipped=str(error))
    except ChildError as error:
        return Row(name, text, goal=goal, skipped=f"failed: {error}")
    return Row(
        name,
        text,
        ours=[sum(calls) for calls in reply["calls"]],
        goal=goal,
        note="new_request and each matched_tokens, engine busy, steps of 20 ms",
        extra={
            "calls_for_a_request": max(len(calls) for calls in reply["calls"]),
            "longest_call_seconds": [max(calls) for calls in reply["calls"]],
        },
    )
