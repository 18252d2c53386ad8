"""Rows ``memory/*``: hits in the memory tier of a process, and of an engine.

Owns the floors: the scatter of the same chunks from the same memory, by as many threads; and a hit
of the same length in vLLM's own prefix cache, in the same engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import torch

from benchmarks.engine import (
    HIT_TOKENS,
    PROMPT_TOKENS,
    WARM_UP_PAIRS,
    EngineRun,
    cold,
    find_model,
    guarded,
    hits_beside_memory,
    warm,
    warm_up,
)
from benchmarks.far import Nowhere, RepeatedLoads, store
from benchmarks.least_bytes import bytes_row, with_bytes
from benchmarks.measure import Goal, Row, Work, measure_pairs, sample
from benchmarks.paged import paged_kv
from benchmarks.samples import (
    CHUNK_TOKENS,
    LARGE,
    TINY,
    Shape,
    make_chunks,
    make_format,
    make_prompt,
)
from benchmarks.settings import Settings
from kvshelf.backends import Reader, open_backend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.cache import ChunkCache
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import TieredShelf, TieredView
from kvshelf.transfer.context import ChunkSlots, bytes_at
from kvshelf.transfer.prefetch import KindMemory

_CHUNKS = 16
_THREADS = 2
_PAIRS = 31
_SEED = 3_000_000
#: The engine stores a prompt in less.
_STORE_SECONDS = 3.0
_READ_SECONDS = 0.25
_ENGINE = Row(
    "memory/engine",
    f"warm TTFT, {HIT_TOKENS} of {PROMPT_TOKENS} tokens from the memory tier in process",
    "vLLM's in-memory prefix cache",
    goal=Goal(1.15),
)
_ENGINE_BYTES = bytes_row(_ENGINE, "memory/engine-bytes", 1.05, read=False)


def bench_memory(settings: Settings) -> Iterator[Row]:
    """Measure hits in the memory tier: of ``ChunkCache``, and of an engine."""
    yield _retrieve_row(settings, TINY if settings.quick else LARGE)
    yield _beside_row(settings, TINY if settings.quick else LARGE)
    yield from guarded(settings, [_ENGINE, _ENGINE_BYTES], _engine_rows)


def _retrieve_row(settings: Settings, shape: Shape) -> Row:
    """Compare ``retrieve``, search and keys included, with the scatter alone."""
    fmt = make_format(shape, 1)
    tokens = make_prompt(_CHUNKS * CHUNK_TOKENS)
    kv = paged_kv(shape, len(tokens))
    with ExitStack() as stack:
        tier = stack.enter_context(closing(MemoryTier(2 * _CHUNKS * fmt.object_size(0))))
        shelf = stack.enter_context(Shelf(open_backend(str(settings.folder("memory")))))
        cache = stack.enter_context(
            ChunkCache(shelf, fmt, memory_tier=tier, io_threads=_THREADS, timeout_s=60.0)
        )
        if not cache.store(tokens, kv=kv).complete:
            raise RuntimeError("the prompt was not stored")
        if cache.lookup(tokens, tiers=["memory"]) != len(tokens):
            raise RuntimeError("the memory tier does not hold what was stored")
        opened = kv.open(fmt)
        pieces = []
        for chunk in make_chunks(fmt, _CHUNKS):
            lent = tier.pin(fmt, ObjectRef(chunk, 0))
            assert lent is not None
            stack.callback(lent.release)
            start = chunk.index * CHUNK_TOKENS
            slots = opened.slots(start, start + CHUNK_TOKENS)
            pieces.append((slots, bytes_at(lent.view)[fmt.data_offset :]))
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS))

        def scatter() -> None:
            done = [pool.submit(opened.memory.scatter, 0, slots, data) for slots, data in pieces]
            for each in done:
                each.result()

        def retrieve() -> None:
            if not bool(cache.retrieve(tokens, kv=kv).all()):
                raise RuntimeError("a prompt in memory was not retrieved")

        times = measure_pairs(Work(retrieve), Work(scatter), settings.pairs(_PAIRS), warm_up=2)
        return Row(
            "memory/retrieve",
            f"retrieve of {len(tokens)} tokens from the memory tier in process",
            "scatter alone from that memory",
            *times,
            goal=Goal(1.1),
            extra={"bytes": _CHUNKS * fmt.object_size(0)},
        )


class _SlowBackend(WrappedBackend):
    def open(self, name: str, size: int | None = None) -> Reader:
        time.sleep(_READ_SECONDS)
        return self.inner.open(name, size)


def _beside_row(settings: Settings, shape: Shape) -> Row:
    """Time hits in memory, each beside a load that is read one chunk at a time."""
    fmt = make_format(shape, 1)
    kept, others, times = make_chunks(fmt, 4), make_chunks(fmt, 2, 1), []
    items = [ChunkSlots(chunk, torch.empty(0, dtype=torch.int64), Nowhere()) for chunk in others]
    with ExitStack() as stack:
        tier = stack.enter_context(closing(MemoryTier(8 * fmt.object_size(0), lazy=True)))
        folder = settings.folder("slow")
        shelf = stack.enter_context(Shelf(_SlowBackend(open_backend(str(folder)))))
        store(TieredShelf(shelf, [tier]), fmt, kept)
        store(shelf, fmt, others)
        memory = KindMemory(tier, fmt, Counters(), keeps=False)
        hits = RepeatedLoads(TieredView(shelf.view(fmt), [memory]), kept, _THREADS)
        stack.callback(hits.transfer.close)
        for _ in range(settings.pairs(_PAIRS)):
            slow = hits.transfer.load("slow", {fmt.kind: items}, at_once=1)
            while slow.pieces[fmt.kind].started is None:
                time.sleep(1e-3)
            times.append(sample(Work(hits.load, lambda: hits.transfer.poll(60.0)), 1))
    return Row(
        "memory/beside-slow",
        f"load of {len(kept)} chunks of {fmt.object_size(0) / 2**20:.3g} MiB from the memory tier,"
        f" beside a load that is read one chunk at a time, {_READ_SECONDS:g} s each",
        ours=times,
        goal=Goal(0.1, "seconds"),
    )


def _wait_stored(run: EngineRun) -> int:
    """Wait until no further object is stored; return how many there are."""
    found = -1
    while found != (now := len(run.objects())):
        found = now
        time.sleep(_STORE_SECONDS)
    return found


def _engine_rows(settings: Settings) -> Iterator[Row]:
    run = EngineRun(settings, find_model(settings), "memory")
    pairs = settings.pairs(_PAIRS)
    options = {
        "shared_storage_path": str(run.shelf),
        "memory_tier": {"max_bytes": (pairs + WARM_UP_PAIRS + 16) * run.prompt_bytes()},
    }
    settings.progress("starting an engine with a memory tier")
    with run.engine("memory", options=options) as engine:
        engine.wait_ready()
        settings.progress("storing prompts")
        run.seed = _SEED
        for _ in range(pairs + WARM_UP_PAIRS + 1):
            cold(engine, run, 1)
        # vLLM's own cache has none of these after so many others.
        run.seed = 2 * _SEED
        warm_up(engine, run)
        objects = _wait_stored(run)
        # Sizes stay, contents do not: only the memory tier has these objects now.
        for path in run.objects():
            path.write_bytes(bytes(path.stat().st_size))
        run.seed = _SEED
        before = run.prompt()
        warm(engine, before, HIT_TOKENS)
        measured = hits_beside_memory(settings, run, engine, _ENGINE, before, pairs)
    row = replace(measured, extra={"objects": objects})
    yield row
    yield with_bytes(_ENGINE_BYTES, row, run.objects(), _CHUNKS, read=False)
