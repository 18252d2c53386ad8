"""What is measured on, and how it is timed: shapes of caches, clocks, copies as floors.

Inputs rotate, so that no figure is one of the L2 cache; all bytes are random. On an emulated
device everything is tiny, and its figures mean nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from gpu_groups import Context, Timing
from torch import Tensor

from kvshelf.kv.caches import LayerCall
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shape:
    """Caches of one model in bf16, and its chunks.

    Attributes
    ----------
    form : str
        NHD, HND, ``K in front of V``, MLA, or ``MLA in blocks``: the layers inside the blocks.
    layers, heads, head_size : int
        With MLA one head of `head_size` elements, which is both K and V.
    block, tokens : int
        Slots of a block; tokens of a chunk.
    shards : int
        Objects of a chunk.
    chunks : int
        Chunks that the caches hold, and that are moved in one measurement.
    """

    form: str
    layers: int = 32
    heads: int = 8
    head_size: int = 128
    block: int = 16
    tokens: int = 256
    shards: int = 8
    chunks: int = 64

    @property
    def mla(self) -> bool:
        return self.form.startswith("MLA")

    @property
    def row(self) -> int:
        """Bytes of a token in one layer."""
        return 2 * self.heads * self.head_size * (1 if self.mla else 2)

    @property
    def chunk_bytes(self) -> int:
        return self.layers * self.tokens * self.row

    @property
    def object_bytes(self) -> int:
        return self.chunk_bytes // self.shards


#: Llama 3 8B: a chunk is 32 MiB, 8 shards of 4 MiB.
LLAMA = Shape("NHD")
#: DeepSeek V3: a chunk is 18 MB; a block and layer 18 KiB, 72 KiB with blocks of 64 tokens.
DEEPSEEK = Shape("MLA in blocks", layers=61, heads=1, head_size=576, shards=1)


def sized(ctx: Context, shape: Shape) -> Shape:
    """Return a shape as it is, or a tiny one of the same form."""
    if not ctx.small:
        return shape
    heads = 1 if shape.mla else 4
    shards = min(shape.shards, 2)
    tiny = {"layers": 3, "heads": heads, "head_size": 16, "shards": shards, "chunks": 4}
    return replace(shape, tokens=2 * shape.block, **tiny)


@dataclass
class Caches:
    """The paged caches of all layers, filled with random bytes."""

    shape: Shape
    views: list[Tensor]
    layout: PagedLayout
    order: Tensor  # all blocks, shuffled

    def slots(self, chunk: int) -> Tensor:
        """int64 [tokens] of a chunk in random blocks."""
        shape = self.shape
        blocks = shape.tokens // shape.block
        ids = self.order[chunk % shape.chunks * blocks :][:blocks]
        return (ids.view(-1, 1) * shape.block + torch.arange(shape.block)).view(-1)

    def on_device(self, ctx: Context, **options: Any) -> DeviceKVCache:
        """Return the path between these caches and the host."""
        shape = self.shape
        heads = self.layout.heads // shape.shards
        calls = {
            shard: [LayerCall(self.views, self.layout, 0, shape.object_bytes, heads, shard * heads)]
            for shard in range(shape.shards)
        }
        return ctx.device_caches(calls, **options)


def random_bytes(count: int, device: torch.device) -> Tensor:
    """uint8 [count] of random bytes."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)


def make_caches(shape: Shape, device: torch.device) -> Caches:
    """Make caches for all chunks of a shape."""
    blocks = shape.chunks * (shape.tokens // shape.block)
    heads, size, layers, block = shape.heads, shape.head_size, shape.layers, shape.block
    backing = random_bytes(shape.chunks * shape.chunk_bytes, device).view(torch.bfloat16)
    if shape.form == "MLA in blocks":
        views = list(backing.view(blocks, layers, block, size).unbind(1))
    elif shape.form == "MLA":
        views = list(backing.view(layers, blocks, block, size).unbind(0))
    elif shape.form == "NHD":
        whole = backing.view(layers, blocks, block, heads, 2 * size)
        views = [view.transpose(1, 2) for view in whole.unbind(0)]
    elif shape.form == "HND":
        views = list(backing.view(layers, blocks, heads, block, 2 * size).unbind(0))
    else:
        views = list(backing.view(layers, 2, blocks, block, heads, size).unbind(0))
    if shape.mla:
        layout = PagedLayout.from_mla(views[0])
    elif shape.form in ("NHD", "HND"):
        layout = PagedLayout.from_bhnc(views[0], size)
    else:
        layout = PagedLayout.from_2bnhd(views[0])
    return Caches(shape, views, layout, torch.randperm(blocks))


def timing_of(samples: Sequence[float]) -> Timing:
    """Return the median of samples and its spread."""
    middle = statistics.median(samples)
    if len(samples) < 3 or middle <= 0:
        return Timing(middle)
    low, _, high = statistics.quantiles(samples, n=4)
    return Timing(middle, (high - low) / middle)


class Clock:
    """Times work on a device."""

    def __init__(self, ctx: Context, samples: int = 7) -> None:
        self.ctx = ctx
        self.samples = 2 if ctx.small else samples

    def synchronize(self) -> None:
        """Wait for all enqueued work."""
        if self.ctx.cuda:
            torch.cuda.synchronize(self.ctx.device)

    def wall(self, work: Callable[[], object]) -> Timing:
        """Seconds from the start of `work` to the end of all that it enqueued."""
        work()
        times = []
        for _ in range(self.samples):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - start)
        return timing_of(times)

    def launches(self, works: Sequence[Callable[[], object]]) -> Timing:
        """Seconds of one of `works`, run one after another without gaps between them.

        On a GPU they are captured in one graph, so that it is not the host that is timed.
        """
        for work in works:
            work()
        if not self.ctx.cuda:
            return self.wall(lambda: [work() for work in works]).times(1 / len(works))
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in works:
                work()
        graph.replay()
        return self._between_events(graph.replay, len(works))

    def enqueued(self, works: Sequence[Callable[[], object]]) -> Timing:
        """Seconds of one of `works`, each of which takes longer than to enqueue it.

        Other threads may use the device meanwhile, which the capture of a graph forbids.
        """

        def all_of_them() -> None:
            for work in works:
                work()

        all_of_them()
        if not self.ctx.cuda:
            return self.wall(all_of_them).times(1 / len(works))
        return self._between_events(all_of_them, len(works))

    def _between_events(self, work: Callable[[], object], count: int) -> Timing:
        times = []
        for _ in range(self.samples):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / count)
        return timing_of(times)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Use a stream, if there is one."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def new_stream(ctx: Context) -> Any:
    """Return a stream beside the current one; None where there are no streams."""
    return torch.cuda.Stream(ctx.device) if ctx.cuda else None


def copies(clock: Clock, to: Sequence[Tensor], source: Sequence[Tensor]) -> Timing:
    """Seconds of plain copies of the same pieces, one after another on one stream."""

    def copy() -> None:
        for target, piece in zip(to, source, strict=True):
            target.copy_(piece, non_blocking=True)

    return clock.wall(copy)


def spread(threads: int, items: Iterable[Item], work: Callable[[int, Item], object]) -> None:
    """Do `work` for each item on several threads, each of which has a number."""
    numbers = iter(items)
    lock = threading.Lock()
    problems: list[BaseException] = []

    def run(worker: int) -> None:
        try:
            while not problems:
                with lock:
                    item = next(numbers)
                work(worker, item)
        except StopIteration:
            pass
        except BaseException as error:
            problems.append(error)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if problems:
        raise problems[0]


def store_all(path: DeviceKVCache, caches: Caches, staging: Sequence[Tensor]) -> None:
    """Gather all chunks as fast as device buffers become free, and wait for the last."""
    shards = caches.shape.shards
    under_way = []
    for chunk in range(len(staging) // shards):
        payloads = staging[chunk * shards : (chunk + 1) * shards]
        slots = caches.slots(chunk)
        while (copied := path.gather(slots, payloads)) is None:
            time.sleep(20e-6)
        under_way.append(copied)
    for copied in under_way:
        copied.wait()


def load_all(path: DeviceKVCache, caches: Caches, staging: Sequence[Tensor], threads: int) -> None:
    """Scatter all chunks, each with all its objects at once, from several threads."""
    fence, shards = path.fence(), caches.shape.shards

    def load(_: int, chunk: int) -> None:
        payloads = staging[chunk * shards : (chunk + 1) * shards]
        path.scatter_chunk(range(shards), caches.slots(chunk), payloads, fence)

    spread(threads, range(len(staging) // shards), load)
