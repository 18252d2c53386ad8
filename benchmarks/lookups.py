"""Rows ``lookup/*``: finding 131,072 stored tokens, 512 chunks of 8 shards.

Owns these measurements. In a local directory: the duration of a lookup in the background; the
duration of the calls on the engine's step thread meanwhile (in a child process, because that code
imports vLLM); how late another Python thread wakes up while lookups run one after another; and the
effect of a hundred thousand other objects. On a real S3 server, with and without latency: the
duration of a lookup without remembered results, and the calls on the step thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.child import Child, ChildError, MissingEngineError
from benchmarks.measure import Goal, Row, Work, measure_pairs, percentile
from benchmarks.proxy import DelayingProxy
from benchmarks.samples import (
    LARGE,
    TINY,
    make_chunks,
    make_format,
    make_hollow_objects,
    make_prompt,
)
from benchmarks.servers import BUCKET, MissingServerError, S3Server
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.format.keys import KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef

_TICK_SECONDS = 1e-3
_DELAY_SECONDS = 20e-3


class _Searches:
    """Lookups of one prompt, without remembered results."""

    def __init__(self, root: Path, fmt: ObjectFormat, chunks: int) -> None:
        self.chunks = chunks
        self._fmt = fmt
        self._prompt = make_prompt(chunks * fmt.chunk_size)
        self.paths = make_hollow_objects(root, fmt, make_chunks(fmt, chunks))
        self._shelf = Shelf(open_backend(str(root)))
        self._service = LookupService(
            self._shelf.view(fmt), failed=FailedKeys(), counters=Counters()
        )

    def search(self) -> None:
        """Run one lookup and wait for it."""
        _search(self._service, self._fmt, self._prompt, self.chunks)

    def stat_all(self) -> None:
        """Probe the same files with only the system call."""
        for path in self.paths:
            os.stat(path)

    def close(self) -> None:
        self._service.close()
        self._shelf.close()


def bench_lookup(settings: Settings) -> Iterator[Row]:
    """Measure lookups in the background, on the step thread, and their effect on other threads."""
    chunks, shape, shards = (4, TINY, 2) if settings.quick else (512, LARGE, 8)
    what = f"lookup of {chunks} chunks × {shards} shards"
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
            "99th percentile of a thread's lateness, lookups running",
            "no lookups running",
            *late,
            goal=Goal(1e-3, "difference"),
            note=f"a thread that sleeps 1 ms at a time for {seconds:g} s a sample",
        )
    finally:
        searches.close()
    yield _step_thread(settings, chunks)
    yield _many_objects(settings)
    yield from _far(settings, chunks, make_format(shape, shards), what)


def _delays(seconds: float, work: Callable[[], None] | None) -> list[float]:
    """Return the lateness of a thread that sleeps in short steps, while `work` runs in a loop."""
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


def _many_objects(settings: Settings) -> Row:
    """Compare a shelf with 100,000 objects with one of 100."""
    fmt = make_format(LARGE, 8)
    few, many = 12, 125 if settings.quick else 12_500
    settings.progress(f"a shelf of {many * fmt.shards} objects")
    small, large = settings.folder("lookup-few"), settings.folder("lookup-many")
    make_hollow_objects(small, fmt, make_chunks(fmt, few))
    make_hollow_objects(large, fmt, make_chunks(fmt, few))
    others = [replace(chunk, index=0) for chunk in make_chunks(fmt, many - few, seed=1)]
    make_hollow_objects(large, fmt, others)
    prompt = make_prompt(few * fmt.chunk_size)

    def open_and_look_up(root: Path) -> None:
        with Shelf(open_backend(str(root))) as shelf:
            service = LookupService(shelf.view(fmt), failed=FailedKeys(), counters=Counters())
            _search(service, fmt, prompt, few)
            service.close()

    times = measure_pairs(
        Work(lambda: open_and_look_up(large)),
        Work(lambda: open_and_look_up(small)),
        settings.pairs(51),
        warm_up=3,
    )
    return Row(
        "lookup/objects",
        f"opening a shelf of {many * fmt.shards:,} objects, lookup of {few} chunks",
        f"a shelf of {few * fmt.shards} objects",
        *times,
        goal=Goal(1.1),
    )


def _search(service: LookupService, fmt: ObjectFormat, prompt: list[int], chunks: int) -> None:
    """Run one lookup and wait for it."""
    lookup = service.submit(prompt, lambda: KeyChain(fmt.namespace.digest, fmt.chunk_size))
    if not lookup.wait(60.0) or lookup.hit_chunks != chunks:
        raise RuntimeError(f"the lookup found {lookup.hit_chunks} of {chunks} chunks")


def _far(settings: Settings, chunks: int, fmt: ObjectFormat, what: str) -> Iterator[Row]:
    """Measure lookups on an S3 server, near and behind a delay."""
    settings.progress(f"{what}: S3")
    try:
        with S3Server(settings.folder("lookup-s3")) as server:
            stored = make_chunks(fmt, chunks)
            make_hollow_objects(server.bucket / "whole", fmt, stored)
            make_hollow_objects(server.bucket / "part", fmt, stored[: chunks * 5 // 8])
            for delay in (0.0, _DELAY_SECONDS):
                with DelayingProxy("127.0.0.1", server.port, delay) as proxy:
                    options = server.options(proxy.port)
                    for part, found in (("whole", chunks), ("part", chunks * 5 // 8)):
                        yield _far_row(settings, fmt, chunks, found, part, delay, proxy, options)
            if not settings.quick:
                with DelayingProxy("127.0.0.1", server.port, _DELAY_SECONDS) as proxy:
                    yield _step_thread(settings, chunks, server, server.options(proxy.port))
    except MissingServerError as error:
        yield Row("lookup/s3", f"{what}: S3", skipped=str(error))


def _far_row(
    settings: Settings,
    fmt: ObjectFormat,
    chunks: int,
    found: int,
    part: str,
    delay: float,
    proxy: DelayingProxy,
    options: dict[str, Any],
) -> Row:
    prompt = make_prompt(chunks * fmt.chunk_size)
    counters = Counters()
    backend = open_backend(f"s3://{BUCKET}/{part}", storage_options=options)
    with Shelf(backend, counters) as shelf:
        service = LookupService(shelf.view(fmt), failed=FailedKeys(), counters=Counters())
        name = shelf.view(fmt).name(ObjectRef(make_chunks(fmt, 1)[0], 0))

        def ask_once() -> None:
            if shelf.backend.stat([name])[0] != fmt.object_size(0):
                raise RuntimeError(f"{name} was not found")

        def search() -> None:
            service.forget()
            _search(service, fmt, prompt, found)

        pairs = settings.pairs(15 if delay else 31)
        times = measure_pairs(Work(search), Work(ask_once), pairs, warm_up=3)
        counters.take()
        before = proxy.counts()["requests"]["HEAD"]
        search()
        heads = proxy.counts()["requests"]["HEAD"] - before
        rounds = round(sum(counters.take()["probe"][:-1]))
        service.close()
    return Row(
        f"lookup/s3/{delay * 1e3:g}ms/{part}",
        f"lookup on S3 at {delay * 1e3:g} ms: {found} of {chunks} chunks × {fmt.shards} shards",
        "one HEAD",
        *times,
        # Each round trip takes what one HEAD does.
        goal=Goal(4.0) if delay else None,
        note=f"nothing remembered; {heads} HEADs in {rounds} rounds",
        extra={"heads": heads, "rounds": rounds},
    )


def _step_thread(
    settings: Settings,
    chunks: int,
    server: S3Server | None = None,
    options: dict[str, Any] | None = None,
) -> Row:
    name, text = "lookup/step", "step thread: all calls for one request until it has its answer"
    goal = Goal(0.2e-3, "seconds")
    if server is not None:
        name, goal = "lookup/step/s3", Goal(1e-3, "seconds")
        text = f"step thread, S3 at {_DELAY_SECONDS * 1e3:g} ms: the longest call for one request"
    if settings.quick:
        return Row(name, text, goal=goal, skipped="not with --quick")
    settings.progress("step thread (imports vLLM)")
    root = settings.folder("lookup-step-shelf") if server is None else server.bucket / "step"
    try:
        with Child("scheduler", settings.folder(name.replace("/", "-")) / "log.txt") as child:
            reply = child.call(
                "look_up",
                root=str(root),
                chunks=chunks,
                requests=settings.pairs(51),
                url=None if server is None else f"s3://{BUCKET}/step",
                storage_options=options,
            )
    except MissingEngineError as error:
        return Row(name, text, goal=goal, skipped=str(error))
    except ChildError as error:
        return Row(name, text, goal=goal, skipped=f"failed: {error}")
    return Row(
        name,
        text,
        ours=[(sum if server is None else max)(calls) for calls in reply["calls"]],
        goal=goal,
        note="new_request and each matched_tokens, engine busy, steps of 20 ms",
        extra={
            "calls_for_a_request": max(len(calls) for calls in reply["calls"]),
            "longest_call_seconds": [max(calls) for calls in reply["calls"]],
        },
    )
