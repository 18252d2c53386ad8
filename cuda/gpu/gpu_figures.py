"""Groups of the part ``figures``: gather, scatter, stores and loads beside their floors.

A floor is measured in the same run on the same bytes: a plain copy on the device, copies of the
same pieces to or from staging, a verified read.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_groups import Context, Timing
from gpu_measure import (
    DEEPSEEK,
    LLAMA,
    Caches,
    Clock,
    Shape,
    copies,
    load_all,
    make_caches,
    new_stream,
    on_stream,
    random_bytes,
    sized,
    spread,
    store_all,
    timing_of,
)

from kvshelf.backends import open_backend
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.namespace import FORMAT, Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv import ops
from kvshelf.kv.topology import ShardPlan
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, ShelfView
from kvshelf.transfer.context import ChunkSlots, TransferContext
from kvshelf.transfer.load import Piece
from kvshelf.transfer.staging import StagingPool
from kvshelf.transfer.transfers import Transfers

#: Wanted: gather and scatter against a copy on the device, stores and loads against copies.
KERNEL_GOAL = 0.85
COPY_GOAL = 0.95
#: Threads that load, and device buffers of stores: as for an engine on a machine with 16 cores.
THREADS = 8
RING = 31
_ROTATE = 16


def calls(caches: Caches, device: torch.device, *, gather: bool) -> list[Callable[[], object]]:
    """Calls over different chunks, each of one chunk and all its shards."""
    shape, layout = caches.shape, caches.layout
    heads = layout.heads // shape.shards
    operate = ops.gather_kv if gather else ops.scatter_kv
    works: list[Callable[[], object]] = []
    for chunk in range(min(_ROTATE, shape.chunks)):
        slots = caches.slots(chunk).unsqueeze(0)
        buffers = random_bytes(shape.chunk_bytes, device).view(1, shape.shards, -1)
        works.append(
            lambda slots=slots, buffers=buffers: operate(
                caches.views, slots, buffers, layout, 0, heads
            )
        )
    return works


def device_copy(clock: Clock, shape: Shape, device: torch.device) -> Timing:
    """Seconds of a plain copy of a chunk's bytes on the device."""
    count = min(_ROTATE, shape.chunks)
    sources = [random_bytes(shape.chunk_bytes, device) for _ in range(count)]
    targets = [torch.empty_like(source) for source in sources]
    pairs = list(zip(sources, targets, strict=True))
    return clock.launches([lambda s=s, t=t: t.copy_(s) for s, t in pairs])


def on_the_device(ctx: Context) -> None:
    """Gather and scatter against a copy on the device."""
    clock = Clock(ctx, samples=11)
    for shape in (
        LLAMA,
        replace(LLAMA, form="HND"),
        replace(LLAMA, form="K in front of V"),
        replace(LLAMA, shards=1),
        replace(DEEPSEEK, form="MLA"),
        DEEPSEEK,
    ):
        shape = sized(ctx, shape)
        floor = device_copy(clock, shape, ctx.device)
        caches = make_caches(shape, ctx.device)
        for gather in (True, False):
            took = clock.launches(calls(caches, ctx.device, gather=gather))
            name = f"{'gather' if gather else 'scatter'}, {shape.form}, {shape.shards} shards"
            ctx.row(name, took, "device copy", floor, shape.chunk_bytes, KERNEL_GOAL)
        del caches
        if ctx.cuda:
            torch.cuda.empty_cache()


def on_the_host(ctx: Context) -> None:
    """What one call costs the thread that makes it, waiting not included."""
    caches = make_caches(sized(ctx, LLAMA), ctx.device)
    shape = caches.shape
    path = caches.on_device(ctx, ring=RING, loads=THREADS, pinned=True)
    clock = Clock(ctx)
    rounds = 2 if ctx.small else 200
    found: dict[str, float] = {}
    with ctx.staging(shape.shards, shape.object_bytes) as staging:

        def load() -> None:
            path.scatter_chunk(range(shape.shards), caches.slots(0), staging, path.fence())

        def store() -> Any:
            return path.gather(caches.slots(0), staging)

        for name, work in (("store, step thread", store), ("load, load thread", load)):
            used, wall = [], []
            for _ in range(rounds):
                start, began = time.thread_time(), time.perf_counter()
                copied = work()
                used.append(time.thread_time() - start)
                wall.append(time.perf_counter() - began)
                if copied is not None:
                    copied.wait()
            clock.synchronize()
            took = timing_of(used)
            found[name] = took.seconds
            least = Timing(shape.chunk_bytes / 55e9)
            ctx.row(
                f"processor time of a chunk of {shape.shards} objects, {name}",
                *(took, "55 GB/s", least, shape.chunk_bytes),
                note=f"wall {timing_of(wall).seconds * 1e3:.3f} ms",
            )
    ctx.fact("thread seconds of a chunk", found)
    path.close()


def store_and_load(ctx: Context) -> None:
    """Chunks of 8 objects of 4 MiB: stores, loads, and both at once."""
    caches = make_caches(sized(ctx, LLAMA), ctx.device)
    shape, clock = caches.shape, Clock(ctx, samples=5)
    path = caches.on_device(ctx, ring=RING, loads=THREADS, pinned=True)
    count, total = shape.chunks * shape.shards, shape.chunks * shape.chunk_bytes
    pieces = list(random_bytes(total, ctx.device).view(count, -1))
    with ctx.staging(count, shape.object_bytes) as staging:
        out = copies(clock, staging, pieces)
        inward = copies(clock, pieces, staging)
        what = f"{shape.chunks} chunks of {shape.shards} objects"
        floor = "copies of the same pieces"
        took = clock.wall(lambda: store_all(path, caches, staging))
        ctx.row(f"store {what}", took, floor, out, total, COPY_GOAL)
        took = clock.wall(lambda: load_all(path, caches, staging, THREADS))
        ctx.row(f"load {what}", took, floor, inward, total, COPY_GOAL)

        half = count // 2 // shape.shards * shape.shards
        beside = new_stream(ctx)

        def copy_both() -> None:
            with on_stream(beside):
                for target, piece in zip(pieces[:half], staging[:half], strict=True):
                    target.copy_(piece, non_blocking=True)
            for target, piece in zip(staging[half:], pieces[half:], strict=True):
                target.copy_(piece, non_blocking=True)

        def both() -> None:
            with ThreadPoolExecutor(1) as pool:
                loading = pool.submit(load_all, path, caches, staging[:half], THREADS)
                store_all(path, caches, staging[half:])
                loading.result()

        least = clock.wall(copy_both)
        floor = "copies both ways at once"
        ctx.row(f"store and load at once, {what}", clock.wall(both), floor, least, total, 0.9)
    path.close()


def mla(ctx: Context) -> None:
    """MLA with blocks of 16 and 64 tokens, its layers inside the blocks."""
    for block in (16, 64):
        _mla(ctx, sized(ctx, replace(DEEPSEEK, block=block)))
        if ctx.cuda:
            torch.cuda.empty_cache()


def _mla(ctx: Context, shape: Shape) -> None:
    caches, clock = make_caches(shape, ctx.device), Clock(ctx, samples=5)
    total = shape.chunks * shape.chunk_bytes
    pieces = list(random_bytes(total, ctx.device).view(shape.chunks, -1))
    path = caches.on_device(ctx, ring=RING, loads=THREADS, pinned=True)
    with ctx.staging(shape.chunks, shape.object_bytes) as staging:
        out, inward = copies(clock, staging, pieces), copies(clock, pieces, staging)
        what = f"{shape.chunks} chunks of MLA, pieces of {shape.block * shape.row / 1024:.0f} KiB"
        floor = "copies of whole objects"
        took = clock.wall(lambda: store_all(path, caches, staging))
        ctx.row(f"store {what}", took, floor, out, total, COPY_GOAL)
        took = clock.wall(lambda: load_all(path, caches, staging, THREADS))
        ctx.row(f"load {what}", took, floor, inward, total, COPY_GOAL)
    path.close()


def make_format(shape: Shape) -> ObjectFormat:
    """Objects of a model of this shape."""
    record: dict[str, Any] = {
        "format": FORMAT,
        "weights": "user:figures",
        "layers": shape.layers,
        "kv_heads": shape.heads,
        "head_sizes": [shape.head_size] * shape.layers,
        "attention": ["full"] * shape.layers,
        "compute_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "chunk_size": shape.tokens,
        "shards": shape.shards,
        "stages": [shape.layers],
        "layouts": ["canonical"] * shape.layers,
        "layer_names": [f"model.layers.{layer}.self_attn.attn" for layer in range(shape.layers)],
        "layer_shapes": [f"2,*,{shape.heads},{shape.head_size}"] * shape.layers,
        "layer_dtypes": ["BF16"] * shape.layers,
    }
    record["data_offset"] = ObjectFormat.required_data_offset(record)
    return ObjectFormat(Namespace(record, "figures"))


def from_files(ctx: Context) -> None:
    """Objects in the page cache → verified → paged cache, by a transfer's own threads."""
    caches = make_caches(sized(ctx, replace(LLAMA, chunks=32)), ctx.device)
    shape = caches.shape
    fmt = make_format(shape)
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    chunks = chain.extend(list(range(shape.chunks * shape.tokens)))
    with tempfile.TemporaryDirectory() as folder, Shelf(open_backend(folder)) as shelf:
        view = shelf.view(fmt)
        _publish(ctx, caches, view, chunks)
        files = [
            path
            for path in Path(folder).rglob("*")
            if path.is_file() and path.stat().st_size == fmt.object_size(0)
        ]
        assert len(files) == shape.chunks * shape.shards
        for threads in (2,) if ctx.small else (4, 8, 16):
            _from_files(ctx, caches, view, chunks, files, threads)


def _publish(ctx: Context, caches: Caches, view: ShelfView, chunks: Sequence[Chunk]) -> None:
    fmt, shape = view.fmt, caches.shape
    path = caches.on_device(ctx, ring=2, loads=1, pinned=True)
    with ctx.staging(shape.shards, fmt.object_size(0)) as staging:
        images = [memoryview(image.numpy()) for image in staging]
        for chunk in chunks:
            payloads = [image[fmt.data_offset :] for image in staging]
            copied = path.gather(caches.slots(chunk.index), payloads)
            assert copied is not None
            copied.wait()
            for shard, image in enumerate(images):
                fmt.seal(image, chunk, shard)
                view.publish(ObjectRef(chunk, shard), image)
    path.close()


def _from_files(
    ctx: Context,
    caches: Caches,
    view: ShelfView,
    chunks: Sequence[Chunk],
    files: Sequence[Path],
    threads: int,
) -> None:
    shape, clock, size = caches.shape, Clock(ctx, samples=3), view.fmt.object_size(0)
    floors = _file_floors(ctx, clock, files, threads, size)
    path = caches.on_device(ctx, ring=1, loads=threads, pinned=True)
    pool = StagingPool(
        max(threads, 4) * shape.shards * (size + 4096),
        size,
        together=shape.shards,
        pinned=ctx.cuda,
        device=ctx.device if ctx.cuda else None,
    )
    if pool.pinned is not ctx.cuda:
        raise AssertionError("staging is not page-locked")
    plan = ShardPlan.whole(shape.shards)
    context = TransferContext(view, path, pool, Counters(), plan, load_threads=threads)
    transfer = Transfers([context])
    loads = transfer.loads[view.fmt.kind]
    items = [ChunkSlots(chunk, caches.slots(chunk.index)) for chunk in chunks]
    used: list[float] = []

    def begin() -> threading.Event:
        over = threading.Event()

        ended[:] = [loads.load(items, on_done=lambda _: over.set())]
        return over

    ended: list[Piece] = []

    def load() -> None:
        began = time.process_time()
        done = begin().wait(60)
        used.append(time.process_time() - began)
        if not done or ended[0].failed_at is not None:
            raise AssertionError(f"a load of existing objects failed: {ended}")

    before = [cache.clone() for cache in caches.views]
    for cache in caches.views:
        cache.zero_()
    took = clock.wall(load)
    for number, (cache, old) in enumerate(zip(caches.views, before, strict=True)):
        ctx.equal(cache.view(torch.int16), old.view(torch.int16), f"layer {number} from files")
    share = gil_share(begin, rounds=1 if ctx.small else 4)
    floor = max(floors, key=lambda name: floors[name].seconds)
    ctx.row(
        f"files → paged, verified, {shape.chunks} chunks, {threads} threads",
        *(took, floor, floors[floor], shape.chunks * shape.chunk_bytes, 0.9),
        note=f"{statistics.median(used) / took.seconds:.1f} cores, {share:.0%} of the GIL",
    )
    ctx.fact(f"share of the GIL, {threads} threads", share)
    transfer.close()


def _file_floors(
    ctx: Context, clock: Clock, files: Sequence[Path], threads: int, size: int
) -> dict[str, Timing]:
    """Seconds of copies of the same bytes, and of reading them without looking at them."""
    with ctx.staging(threads, size) as staging:
        views = [memoryview(piece.numpy()) for piece in staging]

        def read(worker: int, path: Path) -> None:
            file = os.open(path, os.O_RDONLY)
            try:
                if os.preadv(file, [views[worker]], 0) != size:
                    raise AssertionError(f"{path} is shorter than {size} bytes")
            finally:
                os.close(file)

        device = random_bytes(threads * size, ctx.device).view(threads, size)
        pairs = [number % threads for number in range(len(files))]
        link = copies(clock, [device[i] for i in pairs], [staging[i] for i in pairs])
        reading = clock.wall(lambda: spread(threads, files, read))
    return {"copies from staging": link, f"preadv by {threads} threads": reading}


def gil_share(begin: Callable[[], threading.Event], rounds: int) -> float:
    """The share of the time for which threads of Python keep the GIL.

    A thread that wakes up now and then needs it: if another one has it, it comes late.

    Parameters
    ----------
    begin : Callable
        Starts work on other threads, and returns an event that is set when it ends.
    rounds : int
    """

    def late(ends: threading.Event) -> list[float]:
        found = []
        while not ends.is_set():
            start = time.perf_counter()
            time.sleep(100e-6)
            found.append(time.perf_counter() - start)
        return found

    quiet = threading.Event()
    timer = threading.Timer(0.25, quiet.set)
    timer.start()
    limit = sorted(alone := late(quiet))[int(0.95 * len(alone))] + 5e-6
    beside = [one for _ in range(rounds) for one in late(begin())]
    share = sum(one > limit for one in beside) / max(1, len(beside))
    return max(0.0, (share - 0.05) / 0.95)


def under_ncu(ctx: Context) -> None:
    """A few launches of production's shapes for the profiler."""
    for shape in (LLAMA, replace(DEEPSEEK, form="MLA")):
        caches = make_caches(sized(ctx, replace(shape, chunks=4)), ctx.device)
        for gather in (True, False):
            for work in calls(caches, ctx.device, gather=gather)[:2]:
                work()
