"""Measure gather, scatter and the ways to and from the host on a GPU.

Each figure stands beside a floor that was measured in the same run on the same bytes: a plain copy
on the device, one large copy to or from page-locked memory, a verified read. Inputs rotate, so
that no figure is one of the L2 cache; all bytes are random.

The device is an option, so that the logic can be tried on a CPU (``--tiny``); figures of a CPU mean
nothing. Run by ``make gpu``; prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvshelf.backends import open_backend
from torch import Tensor

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.namespace import FORMAT, Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv import ops
from kvshelf.kv.caches import LayerCall
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops import compiled
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef

BLOCK = 16


@dataclass(frozen=True)
class Sizes:
    """What is measured on.

    Attributes
    ----------
    layers, heads, head_size, tokens : int
        A chunk; that of Llama 3 8B in bf16 is 32 MiB.
    pool : int
        Chunks that the paged cache holds.
    chunks : int
        Chunks that are stored and loaded in one measurement.
    samples : int
        Repetitions; the median counts.
    rotate : int
        Different inputs of one sample.
    """

    layers: int = 32
    heads: int = 8
    head_size: int = 128
    tokens: int = 256
    pool: int = 128
    chunks: int = 64
    samples: int = 11
    rotate: int = 16

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk in bf16."""
        return 4 * self.layers * self.heads * self.head_size * self.tokens


TINY = Sizes(layers=3, heads=2, head_size=32, tokens=32, pool=8, chunks=4, samples=3, rotate=2)


@dataclass
class Row:
    """One figure.

    Attributes
    ----------
    name, floor : str
        What was measured, and what it is compared with.
    seconds, floor_seconds : float
        Medians of the same amount of work.
    ratio : float
        ``floor_seconds / seconds``: 1 = as fast as the floor.
    gb_per_s : float
        Payload bytes per second (not counting that each is read and written).
    goal : float or None
        Smallest ratio that meets the goal.
    """

    name: str
    floor: str
    seconds: float
    floor_seconds: float
    ratio: float
    gb_per_s: float
    goal: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; None without one."""
        return None if self.goal is None else self.ratio >= self.goal


@dataclass
class Results:
    """All rows and further results."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        name: str,
        floor: str,
        seconds: float,
        floor_seconds: float,
        payload: int,
        goal: float | None = None,
        note: str = "",
    ) -> None:
        """Add a row and print it."""
        row = Row(
            name,
            floor,
            seconds,
            floor_seconds,
            floor_seconds / seconds,
            payload / seconds / 1e9,
            goal,
            note,
        )
        self.rows.append(row)
        print(line_of(row), flush=True)


def line_of(row: Row) -> str:
    """Return a row of the table."""
    goal = "" if row.goal is None else f"≥ {row.goal:.2f} {'ok' if row.met else 'MISSED'}"
    return (
        f"  {row.name:44} {row.seconds * 1e6:11.1f} µs {row.gb_per_s:8.1f} GB/s "
        f"{row.ratio:6.2f} × {row.floor:28} {goal:13} {row.note}"
    )


# --- timing ------------------------------------------------------------------------


class Clock:
    """Times work on a device; on a CPU by the wall clock."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        #: Plain torch cannot be captured.
        self.graphs = self.cuda and ops.implementation(device) == "cuda"
        self.samples = sizes.samples

    def synchronize(self) -> None:
        """Wait for all enqueued work."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def wall(self, work: Callable[[], object], samples: int | None = None) -> float:
        """Median seconds from the start of `work` to the end of its enqueued work."""
        work()
        times = []
        for _ in range(samples or self.samples):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def launches(self, works: Sequence[Callable[[], object]]) -> float:
        """Median seconds of one of `works`, run one after another without gaps between them.

        On a GPU they are captured in one graph, so that it is not the host that is timed.
        """
        for work in works:
            work()
        if not self.graphs:
            return self.wall(lambda: [work() for work in works]) / len(works)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in works:
                work()
        graph.replay()
        times = []
        for _ in range(self.samples):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times) / len(works)


# --- what is measured on -----------------------------------------------------------


@dataclass
class Cache:
    """A paged cache of all layers, filled with random bytes."""

    caches: list[Tensor]
    layout: PagedLayout
    order: Tensor  # all blocks, shuffled
    sizes: Sizes

    def slots(self, chunk: int) -> Tensor:
        """int64 [tokens] of a chunk in random blocks."""
        blocks = self.sizes.tokens // BLOCK
        start = chunk * blocks % (len(self.order) // blocks * blocks)
        ids = self.order[start : start + blocks]
        return (ids.view(-1, 1) * BLOCK + torch.arange(BLOCK)).view(-1)


def random_bytes(count: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """uint8 [count] of random bytes."""
    result = torch.empty(count, dtype=torch.uint8, device=device, pin_memory=pinned)
    piece = 1 << 28
    for start in range(0, count, piece):
        part = result[start : start + piece]
        part.random_(0, 256)
    return result


def make_cache(form: str, sizes: Sizes, device: torch.device) -> Cache:
    """Make a cache; all layers of a form that is not block-outermost in one allocation."""
    blocks = sizes.pool * sizes.tokens // BLOCK
    heads, size = sizes.heads, sizes.head_size
    shape = {
        "NHD": (blocks, BLOCK, heads, 2 * size),
        "HND": (blocks, heads, BLOCK, 2 * size),
        "K in front of V": (2, blocks, BLOCK, heads, size),
        "MLA": (blocks, BLOCK, 2 * heads * size),
        "MLA, layers inside blocks": (blocks, sizes.layers, BLOCK, 2 * heads * size),
    }[form]
    count = 2 * blocks * BLOCK * heads * size
    backing = random_bytes(sizes.layers * count * 2, device).view(torch.bfloat16)
    if form == "MLA, layers inside blocks":
        views = list(backing.view(shape).unbind(1))
    else:
        views = [backing[i * count : (i + 1) * count].view(shape) for i in range(sizes.layers)]
    if form == "NHD":
        views = [view.transpose(1, 2) for view in views]
    if form in ("NHD", "HND"):
        layout = PagedLayout.from_bhnc(views[0], size)
    elif form.startswith("MLA"):
        layout = PagedLayout.from_mla(views[0])
    else:
        layout = PagedLayout.from_2bnhd(views[0])
    return Cache(views, layout, torch.randperm(blocks), sizes)


def pool_that_fits(sizes: Sizes, device: torch.device) -> Sizes:
    """Reduce the chunks in the cache if the device has little memory."""
    if device.type != "cuda":
        return sizes
    free, _ = torch.cuda.mem_get_info(device)
    fits = int(free * 0.5) // sizes.chunk_bytes
    if fits >= sizes.pool:
        return sizes
    return Sizes(pool=max(32, fits), chunks=min(sizes.chunks, max(16, fits // 2)))


# --- on the device -----------------------------------------------------------------


def copies_on_the_device(clock: Clock, sizes: Sizes, device: torch.device) -> float:
    """Seconds of a plain copy of a chunk's bytes on the device."""
    sources = [random_bytes(sizes.chunk_bytes, device) for _ in range(sizes.rotate)]
    targets = [torch.empty_like(source) for source in sources]
    pairs = list(zip(sources, targets, strict=True))
    return clock.launches([lambda s=s, t=t: t.copy_(s) for s, t in pairs])


def calls(
    cache: Cache,
    device: torch.device,
    *,
    gather: bool,
    together: int = 1,
    shards: int = 1,
) -> list[Callable[[], object]]:
    """Calls over different chunks, each of `together` chunks."""
    sizes, layout = cache.sizes, cache.layout
    heads = layout.heads // shards
    size = sizes.layers * layout.chunk_bytes(sizes.tokens, heads)
    works = []
    operate = ops.gather_kv if gather else ops.scatter_kv
    for i in range(max(2, sizes.rotate // together)):
        chunks = range(i * together, (i + 1) * together)
        slots = torch.stack([cache.slots(chunk) for chunk in chunks])
        buffers = random_bytes(together * shards * size, device).view(together, shards, size)
        works.append(
            lambda slots=slots, buffers=buffers: operate(
                cache.caches, slots, buffers, layout, 0, heads
            )
        )
    return works


def on_the_device(results: Results, clock: Clock, sizes: Sizes, device: torch.device) -> None:
    """Gather and scatter against a copy on the device."""
    plain = copies_on_the_device(clock, sizes, device)
    results.facts["device copy, one chunk"] = {
        "seconds": plain,
        "GB/s read + written": 2 * sizes.chunk_bytes / plain / 1e9,
    }
    print(f"  device copy of a chunk: {plain * 1e6:.1f} µs, ", end="")
    print(f"{2 * sizes.chunk_bytes / plain / 1e12:.2f} TB/s read + written", flush=True)
    for form in ("NHD", "HND", "K in front of V", "MLA"):
        cache = make_cache(form, sizes, device)
        main = form in ("NHD", "HND")
        for gather in (True, False):
            name = "gather" if gather else "scatter"
            variants = ((1, 1), (8, 1), (1, cache.layout.heads)) if main else ((1, 1),)
            for together, shards in variants:
                works = calls(cache, device, gather=gather, together=together, shards=shards)
                seconds = clock.launches(works)
                what = f"{name}, {form}"
                goal = None
                if together > 1:
                    what += f", {together} chunks a call"
                    goal = 0.9
                elif shards > 1:
                    what += f", {shards} shards"
                elif main:
                    goal = 0.85
                payload = together * sizes.chunk_bytes
                results.add(what, "device copy", seconds, together * plain, payload, goal)
        if form == "NHD":
            steps_of_threads(results, clock, cache, device, plain)
            other_ways(results, clock, cache, device)
            time_on_the_host(results, cache, device)
        del cache


def steps_of_threads(
    results: Results, clock: Clock, cache: Cache, device: torch.device, plain: float
) -> None:
    """Tokens copied by each thread: the library's choice, and each alternative."""
    found: dict[str, float] = {}
    for together in (1, 8):
        for steps in (0, 4, 8, 16, 32):
            compiled.KERNEL_STEPS = steps
            try:
                works = calls(cache, device, gather=True, together=together)
                found[f"{together} chunks, {steps or 'chosen'}"] = clock.launches(works)
            finally:
                compiled.KERNEL_STEPS = 0
    results.facts["tokens of a thread"] = {
        key: {"seconds": value, "of a device copy": int(key.split()[0]) * plain / value}
        for key, value in found.items()
    }


def other_ways(results: Results, clock: Clock, cache: Cache, device: torch.device) -> None:
    """Gather by index_select for each layer, and by a copy for each block."""
    sizes = cache.sizes
    works = calls(cache, device, gather=True)
    ours = clock.launches(works)
    slots = [cache.slots(i).to(device) for i in range(len(works))]
    out = torch.empty(
        *(len(works), sizes.layers, sizes.tokens, sizes.heads, 2 * sizes.head_size),
        dtype=torch.bfloat16,
        device=device,
    )
    # Without the separation of K and V, which a gather of ours does as well.
    rows = [cache_.transpose(1, 2).flatten(0, 1) for cache_ in cache.caches]

    def select(i: int) -> None:
        for layer, row in enumerate(rows):
            torch.index_select(row, 0, slots[i], out=out[i, layer])

    def store_back(i: int) -> None:
        for layer, row in enumerate(rows):
            row.index_copy_(0, slots[i], out[i, layer])

    def block_by_block(i: int) -> None:
        ids = cache.order[i * (sizes.tokens // BLOCK) :][: sizes.tokens // BLOCK].tolist()
        for layer, cache_ in enumerate(cache.caches):
            for place, block in enumerate(ids):
                target = out[i, layer, place * BLOCK : (place + 1) * BLOCK]
                target.copy_(cache_[block].transpose(0, 1))

    count = len(works)
    for name, work, times in (
        ("gather, NHD", select, "index_select for each layer"),
        ("scatter, NHD", store_back, "index_copy_ for each layer"),
        ("gather, NHD", block_by_block, "a copy for each block"),
    ):
        other = clock.launches([lambda i=i, work=work: work(i) for i in range(min(4, count))])
        results.add(name, times, ours, other, sizes.chunk_bytes, note="× as fast")


def time_on_the_host(results: Results, cache: Cache, device: torch.device) -> None:
    """Duration of a call on the calling thread."""
    works = calls(cache, device, gather=True)
    times = []
    for _ in range(20):
        for work in works[:2]:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    results.facts["call on the host"] = {"seconds": statistics.median(times)}


# --- between device and host -------------------------------------------------------


@dataclass
class Host:
    """Page-locked memory for all chunks, and the time of one large copy each way."""

    memory: Tensor
    on_device: Tensor
    size: int  # of a chunk

    def payload(self, chunk: int) -> Tensor:
        return self.memory[chunk * self.size : (chunk + 1) * self.size]


def large_copies(
    results: Results, clock: Clock, sizes: Sizes, device: torch.device
) -> tuple[Host, dict[str, float]]:
    """One large copy out, in, and both at once."""
    total = sizes.chunks * sizes.chunk_bytes
    memory = random_bytes(total, torch.device("cpu"), pinned=clock.cuda)
    on_device = random_bytes(total, device)
    seconds = {
        "out": clock.wall(lambda: memory.copy_(on_device, non_blocking=True)),
        "in": clock.wall(lambda: on_device.copy_(memory, non_blocking=True)),
    }
    half = total // 2
    streams = [torch.cuda.Stream(device) for _ in range(2)] if clock.cuda else []

    def both() -> None:
        with use(streams, 0):
            memory[:half].copy_(on_device[:half], non_blocking=True)
        with use(streams, 1):
            on_device[half:].copy_(memory[half:], non_blocking=True)

    seconds["both"] = 2 * clock.wall(both)
    results.facts["large copies"] = {
        f"{key}, GB/s": (2 if key == "both" else 1) * total / value / 1e9
        for key, value in seconds.items()
    }
    print(f"  large copies: {results.facts['large copies']}", flush=True)
    return Host(memory, on_device, sizes.chunk_bytes), seconds


def use(streams: Sequence[Any], index: int) -> contextlib.AbstractContextManager[Any]:
    """Use a stream, if there is one."""
    return torch.cuda.stream(streams[index]) if streams else contextlib.nullcontext()


def store_all(path: DeviceKVCache, cache: Cache, host: Host, chunks: range) -> None:
    """Gather chunks as fast as device buffers become free, and wait for the last."""
    under_way = []
    for chunk in chunks:
        slots, payload = cache.slots(chunk), [host.payload(chunk)]
        while (copied := path.gather(slots, payload)) is None:
            time.sleep(20e-6)
        under_way.append(copied)
    for copied in under_way:
        copied.wait()


def load_all(
    path: DeviceKVCache, cache: Cache, host: Host, chunks: range, threads: int = 4
) -> None:
    """Scatter chunks from several threads."""
    fence = path.fence()
    numbers = iter(chunks)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                chunk = next(numbers, None)
            if chunk is None:
                return
            path.scatter(0, cache.slots(chunk), host.payload(chunk), fence)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def between_device_and_host(
    results: Results, clock: Clock, sizes: Sizes, device: torch.device
) -> dict[str, float]:
    """Stores and loads, by each path."""
    host, large = large_copies(results, clock, sizes, device)
    # Each has a cache of its own, for which there is room when that before it is gone.
    for part in (over_the_ring, block_outermost, layers_inside_blocks):
        part(results, clock, sizes, device, host, large)
    return large


def over_the_ring(
    results: Results,
    clock: Clock,
    sizes: Sizes,
    device: torch.device,
    host: Host,
    large: dict[str, float],
) -> None:
    """Store and load over device buffers; both at once; beside a compute load."""
    cache = make_cache("NHD", sizes, device)
    call = LayerCall(cache.caches, cache.layout, 0, sizes.chunk_bytes, sizes.heads)
    path = DeviceKVCache({0: [call]}, ring=4, loads=4)
    every, total = range(sizes.chunks), sizes.chunks * sizes.chunk_bytes
    samples = min(5, sizes.samples)

    def store(chunks: range) -> None:
        store_all(path, cache, host, chunks)

    def load(chunks: range) -> None:
        load_all(path, cache, host, chunks)

    what = f"{sizes.chunks} chunks"
    floor = "one large copy"
    seconds = clock.wall(lambda: store(every), samples)
    results.add(f"store, paged → page-locked, {what}", floor, seconds, large["out"], total, 0.95)
    seconds = clock.wall(lambda: load(every), samples)
    results.add(f"load, page-locked → paged, {what}", floor, seconds, large["in"], total, 0.95)

    half = sizes.chunks // 2

    def both() -> None:
        loading = threading.Thread(target=load, args=(range(half, sizes.chunks),))
        loading.start()
        store(range(half))
        loading.join()

    seconds = clock.wall(both, samples)
    floor = "two large copies at once"
    results.add(f"store and load at once, {what}", floor, seconds, large["both"] / 2, total, 0.9)
    beside_compute(results, clock, path, cache, host, device)
    path.close()


def beside_compute(
    results: Results,
    clock: Clock,
    path: DeviceKVCache,
    cache: Cache,
    host: Host,
    device: torch.device,
) -> None:
    """A matmul loop on the compute stream, alone and while storing at full rate."""
    edge = 4096 if clock.cuda else 64
    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    rounds = 64 if clock.cuda else 4

    def products(between: Callable[[], None]) -> None:
        for _ in range(rounds):
            torch.mm(a, b, out=c)
            between()

    alone = clock.wall(lambda: products(lambda: None))
    stored = [0]
    pending: list[Any] = []

    def store_one() -> None:
        chunk = stored[0] % cache.sizes.chunks
        copied = path.gather(cache.slots(chunk), [host.payload(chunk)])
        if copied is not None:
            stored[0] += 1
            pending.append(copied)

    samples: list[tuple[float, int]] = []
    for _ in range(5):
        clock.synchronize()
        for copied in pending:
            copied.wait()
        pending.clear()
        stored[0] = 0
        start = time.perf_counter()
        products(store_one)
        if clock.cuda:
            torch.cuda.current_stream(device).synchronize()
        samples.append((time.perf_counter() - start, stored[0]))
    for copied in pending:
        copied.wait()
    seconds, chunks = sorted(samples)[len(samples) // 2]
    rate = chunks * cache.sizes.chunk_bytes / seconds / 1e9
    results.add(
        "matmul loop while storing",
        "the same loop alone",
        seconds,
        alone,
        chunks * cache.sizes.chunk_bytes,
        0.95,
        note=f"stored {rate:.1f} GB/s",
    )


def block_outermost(
    results: Results,
    clock: Clock,
    sizes: Sizes,
    device: torch.device,
    host: Host,
    large: dict[str, float],
) -> None:
    """Blocks that hold all layers: a list of copies, no kernel and no device buffer."""
    if not clock.cuda:
        results.skipped["block-outermost"] = "needs a device that is apart from the host"
        return
    blocks = sizes.pool * sizes.tokens // BLOCK
    row = sizes.chunk_bytes * BLOCK // sizes.tokens
    whole = random_bytes(blocks * row, device).view(blocks, 1, 1, row)
    layout = PagedLayout.native_blocks(whole)
    order = torch.randperm(blocks)[: sizes.chunks * (sizes.tokens // BLOCK)].view(sizes.chunks, -1)
    buffers = host.memory.view(sizes.chunks, -1)
    stream = torch.cuda.Stream(device)

    def load() -> None:
        with torch.cuda.stream(stream):
            ops.scatter_kv([whole], order, buffers, layout)

    total = sizes.chunks * sizes.chunk_bytes
    what = "load, blocks of all layers, copy list"
    results.add(what, "one large copy", clock.wall(load, 5), large["in"], total)


def layers_inside_blocks(
    results: Results,
    clock: Clock,
    sizes: Sizes,
    device: torch.device,
    host: Host,
    large: dict[str, float],
) -> None:
    """Loads of a cache whose blocks hold all layers, by both paths."""
    total = sizes.chunks * sizes.chunk_bytes
    cache = make_cache("MLA, layers inside blocks", sizes, device)
    call = LayerCall(cache.caches, cache.layout, 0, sizes.chunk_bytes, 1)
    for pinned, what in ((True, "copy list"), (False, "device buffers")):
        path = DeviceKVCache({0: [call]}, loads=4, pinned=pinned)
        seconds = clock.wall(lambda path=path: load_all(path, cache, host, range(sizes.chunks)), 5)
        results.add(
            f"load, MLA, layers inside blocks, {what}",
            "one large copy",
            seconds,
            large["in"],
            total,
        )
        path.close()


# --- from files --------------------------------------------------------------------


def make_format(sizes: Sizes) -> ObjectFormat:
    """Objects of a model of these sizes, one shard."""
    record: dict[str, Any] = {
        "format": FORMAT,
        "weights": "user:bench",
        "layers": sizes.layers,
        "kv_heads": sizes.heads,
        "head_sizes": [sizes.head_size] * sizes.layers,
        "attention": ["full"] * sizes.layers,
        "compute_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "chunk_size": sizes.tokens,
        "shards": 1,
        "stages": [sizes.layers],
        "layouts": ["canonical"] * sizes.layers,
        "layer_names": [f"model.layers.{layer}.self_attn.attn" for layer in range(sizes.layers)],
        "layer_shapes": [f"2,*,{sizes.heads},{sizes.head_size}"] * sizes.layers,
        "layer_dtypes": ["BF16"] * sizes.layers,
    }
    record["data_offset"] = ObjectFormat.required_data_offset(record)
    return ObjectFormat(Namespace(record, "bench"))


def from_files(
    results: Results,
    clock: Clock,
    sizes: Sizes,
    device: torch.device,
    large: dict[str, float],
    folder: Path,
    threads: int,
) -> None:
    """Objects in the page cache → verified → paged cache."""
    fmt = make_format(sizes)
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    chunks = chain.extend(list(range(sizes.chunks * sizes.tokens)))
    size, offset = fmt.object_size(0), fmt.data_offset
    room = -(-size // 4096) * 4096
    pool = random_bytes(threads * room, torch.device("cpu"), pinned=clock.cuda)
    images = [pool[i * room : i * room + size] for i in range(threads)]
    views = [memoryview(image.numpy()) for image in images]
    cache = make_cache("NHD", sizes, device)
    call = LayerCall(cache.caches, cache.layout, 0, size - offset, sizes.heads)
    path = DeviceKVCache({0: [call]}, loads=threads)
    with Shelf(open_backend(str(folder))) as shelf:
        view = shelf.view(fmt)
        for chunk in chunks:
            copied = path.gather(cache.slots(chunk.index), [images[0][offset:]])
            while copied is None:
                copied = path.gather(cache.slots(chunk.index), [images[0][offset:]])
            copied.wait()
            fmt.seal(views[0], chunk, 0)
            view.publish(ObjectRef(chunk, 0), views[0])
        before = [part.clone() for part in cache.caches[:1]]

        def read(worker: int, chunk: Chunk) -> None:
            view.load(ObjectRef(chunk, 0), views[worker])

        def read_and_scatter(worker: int, chunk: Chunk) -> None:
            view.load(ObjectRef(chunk, 0), views[worker])
            path.scatter(0, cache.slots(chunk.index), images[worker][offset:], None)

        reading = clock.wall(lambda: spread(threads, chunks, read), 3)
        loading = clock.wall(lambda: spread(threads, chunks, read_and_scatter), 3)
        for part, old in zip(cache.caches, before, strict=False):
            assert torch.equal(part.view(torch.int16), old.view(torch.int16)), "other bytes"
    floor = max(reading, large["in"] * len(chunks) / sizes.chunks)
    results.add(
        f"files → paged, verified, {len(chunks)} chunks",
        "slower of read, large copy",
        loading,
        floor,
        len(chunks) * size,
        0.9,
        note=f"{threads} threads, read alone {len(chunks) * size / reading / 1e9:.1f} GB/s",
    )
    path.close()


def spread(threads: int, chunks: Sequence[Chunk], work: Callable[[int, Chunk], None]) -> None:
    """Do `work` for each chunk on several threads."""
    numbers: Iterator[Chunk] = iter(chunks)
    lock = threading.Lock()
    problems: list[BaseException] = []

    def run(worker: int) -> None:
        try:
            while True:
                with lock:
                    chunk = next(numbers, None)
                if chunk is None:
                    return
                work(worker, chunk)
        except BaseException as error:
            problems.append(error)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if problems:
        raise problems[0]


# --- all of it ---------------------------------------------------------------------


def run_bench(
    device: torch.device, sizes: Sizes, *, seconds: float, folder: Path, threads: int = 8
) -> Results:
    """Measure everything; rows that would begin after `seconds` are skipped and named."""
    results = Results()
    sizes = pool_that_fits(sizes, device)
    clock = Clock(device, sizes)
    began = time.monotonic()
    torch.manual_seed(0)
    large: dict[str, float] = {}
    parts: tuple[tuple[str, Callable[[], object]], ...] = (
        ("on the device", lambda: on_the_device(results, clock, sizes, device)),
        (
            "between device and host",
            lambda: large.update(between_device_and_host(results, clock, sizes, device)),
        ),
        (
            "from files",
            lambda: from_files(results, clock, sizes, device, large, folder, threads),
        ),
    )
    for name, part in parts:
        if time.monotonic() - began > seconds:
            results.skipped[name] = f"{seconds:.0f} s have passed"
            continue
        if name == "from files" and not large:
            results.skipped[name] = "the large copies were not measured"
            continue
        try:
            part()
        except torch.OutOfMemoryError as error:
            results.skipped[name] = f"out of memory: {error}"
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results.facts["sizes"] = asdict(sizes)
    return results


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying the program out")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--threads", type=int, default=8, help="that read files")
    parser.add_argument("--folder", type=Path, help="where files are written; default: temporary")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = run_bench(
            device,
            TINY if options.tiny else Sizes(),
            seconds=options.seconds,
            folder=Path(folder),
            threads=options.threads,
        )
    for name, reason in results.skipped.items():
        print(f"  {name}: not measured, {reason}")
    if options.json is not None:
        rows = [asdict(row) | {"met": row.met} for row in results.rows]
        found = {"rows": rows, "skipped": results.skipped, "facts": results.facts}
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
