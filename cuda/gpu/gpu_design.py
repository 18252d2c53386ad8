"""Groups of the part ``design``: what decides between ways of moving KV; see gpu_decisions.py."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

import torch
from gpu_figures import RING, THREADS
from gpu_groups import Context, NotRun, Timing
from gpu_measure import (
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
    timing_of,
)
from torch import Tensor

from kvshelf.kv import device
from kvshelf.kv.caches import LayerCall
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.native_copier import NativeCopier

KIB: Final = 1024
#: Bytes of a piece: powers of two, and those of MLA with blocks of 16 and 64 tokens.
PIECES: Final = tuple(n * KIB for n in (4, 8, 16, 18, 32, 64, 72, 128, 256, 512, 1024))
_TINY_PIECES: Final = (KIB, 64 * KIB)
#: cudaMemcpySrcAccessOrder and cudaMemcpyFlags.
_ORDERS: Final = {"stream": 1, "any": 3}
_FLAGS: Final = {"default": 0, "overlap": 1}
ATTRIBUTES: Final = tuple(f"{order}, {flag}" for order in _ORDERS for flag in _FLAGS)


# --- batches of copies -------------------------------------------------------------


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes of CUDA 13."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


def batch_function() -> Callable[..., int]:
    """Return cudaMemcpyBatchAsync of the runtime that torch uses.

    Raises
    ------
    NotRun
        If it is another runtime than CUDA 13.
    """
    try:
        return ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
    except (OSError, AttributeError) as error:
        raise NotRun(f"no cudaMemcpyBatchAsync of CUDA 13: {error}") from None


def attributes_now(piece: int) -> str:
    """Return the attributes that the library passes for copies of pieces to the device."""
    return "any, overlap" if piece <= 128 * KIB else "any, default"


class Batch:
    """Copies of equally large pieces, from addresses to others, as one batch."""

    def __init__(self, ctx: Context, to: array[int], source: array[int], piece: int) -> None:
        self._piece = piece
        self.count = len(to)
        self._to, self._from = to, source
        self._sizes = array("Q", [piece]) * self.count
        self._function = batch_function() if ctx.cuda else None

    @classmethod
    def shuffled(cls, ctx: Context, to: Tensor, source: Tensor, piece: int) -> Batch:
        """Copies between random places of two pieces of memory."""

        def places(memory: Tensor) -> array[int]:
            start, order = memory.data_ptr(), torch.randperm(memory.numel() // piece).tolist()
            return array("Q", [start + place * piece for place in order])

        return cls(ctx, places(to), places(source), piece)

    def enqueue(self, attributes: str, stream: Any) -> None:
        """Enqueue the copies on a stream, which is not the default one: that takes no batches."""
        if self._function is None:
            for to, source in zip(self._to, self._from, strict=True):
                ctypes.memmove(to, source, self._piece)
            return
        order, _, flag = attributes.partition(", ")
        record = _Attributes(order=_ORDERS[order], flags=_FLAGS[flag])
        first = ctypes.c_size_t(0)
        tables = (self._to, self._from, self._sizes)
        code = self._function(
            *(ctypes.c_void_p(table.buffer_info()[0]) for table in tables),
            ctypes.c_size_t(self.count),
            *(ctypes.byref(record), ctypes.byref(first), ctypes.c_size_t(1)),
            ctypes.c_void_p(stream.cuda_stream),
        )
        if code:
            raise RuntimeError(f"cudaMemcpyBatchAsync failed with error {code}")


def copies_by_piece(ctx: Context) -> None:
    """(a) Batched copies to and from the device, by the size of a piece and by attributes."""
    total = 128 * KIB if ctx.small else 64 << 20
    on_device = random_bytes(total, ctx.device)
    clock, stream = Clock(ctx, samples=5), new_stream(ctx)
    with ctx.staging(1, total) as (host,):
        host.random_(0, 256)
        for way, (to, source) in {"in": (on_device, host), "out": (host, on_device)}.items():
            seconds = copies(clock, [to], [source]).seconds
            ctx.fact(
                f"one copy {way}", seconds, f"one copy {way}: {total / seconds / 1e9:.1f} GB/s"
            )
            found: dict[int, dict[str, float]] = {}
            for piece in _TINY_PIECES if ctx.small else PIECES:
                size = total // piece * piece
                batch = Batch.shuffled(ctx, to[:size], source[:size], piece)
                found[piece] = {
                    name: clock.wall(functools.partial(batch.enqueue, name, stream)).seconds
                    for name in ATTRIBUTES
                }
                rates = (f"{name} {size / took / 1e9:.1f}" for name, took in found[piece].items())
                ctx.fact(way, found, f"{way}, pieces of {piece} bytes, GB/s: {', '.join(rates)}")
    ctx.fact("attributes now", {piece: attributes_now(piece) for piece in found})


@contextlib.contextmanager
def products(ctx: Context) -> Iterator[None]:
    """Keep the device busy with matrix products, as a prefill does."""
    edge = 4096 if ctx.cuda else 16
    a, b = (torch.randn(edge, edge, device=ctx.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    ends = threading.Event()
    stream = new_stream(ctx)

    def work() -> None:
        with on_stream(stream):
            while not ends.is_set():
                for _ in range(4):
                    torch.mm(a, b, out=out)
                if stream is None:
                    ends.wait(0.001)
                else:
                    # A few under way at once, so that the queue never runs dry.
                    pending.append(stream.record_event())
                    if len(pending) > 4:
                        pending.pop(0).synchronize()

    pending: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(work)
        try:
            yield
        finally:
            ends.set()
            busy.result()
    if stream is not None:
        stream.synchronize()


def direct_loads(ctx: Context) -> None:
    """Loads directly into blocks, and over a device buffer, by the size of a piece."""
    found: dict[int, dict[str, list[float]]] = {}
    for piece in _TINY_PIECES if ctx.small else PIECES:
        found[piece] = {}
        for name, seconds, rates in _both_loads(ctx, piece):
            found[piece][name] = seconds
            ctx.fact("loads", found, f"loads in pieces of {piece} bytes, {name}, GB/s: {rates}")


def _both_loads(ctx: Context, piece: int) -> Iterator[tuple[str, list[float], str]]:
    """Yield the seconds of direct loads and of those over buffers, alone and beside products."""
    clock = Clock(ctx, samples=5)
    block, blocks, chunks = (4, 2, 2) if ctx.small else (16, 16, 2 * THREADS)
    # Chunks of about 18 MB, whatever the piece.
    layers = 2 if ctx.small else max(2, min(128, (18 << 20) // (piece * blocks)))
    payload = layers * blocks * piece
    backing = random_bytes(chunks * payload, ctx.device)
    caches = list(backing.view(chunks * blocks, layers, block, piece // block).unbind(1))
    layout = PagedLayout.from_mla(caches[0])
    order = torch.randperm(chunks * blocks).view(chunks, blocks, 1)
    slots = (order * block + torch.arange(block)).view(chunks, -1)
    call = LayerCall(caches, layout, 0, payload, 1)
    # Whatever the size of a piece is from which on the product loads directly.
    with mock.patch.object(device, "DIRECT_BYTES", 1):
        assert device._in_blocks(call, layout)
        direct = ctx.device_caches({0: [call]}, loads=THREADS, pinned=True)
    over_buffers = ctx.device_caches({0: [call]}, loads=THREADS, pinned=False)
    clock.synchronize()
    with ctx.staging(chunks, payload) as staging:

        def load(path: DeviceKVCache) -> None:
            fence = path.fence()
            spread(
                *(THREADS, range(chunks)),
                lambda _, chunk: path.scatter(0, slots[chunk], staging[chunk], fence),
            )

        for name, beside in (
            ("alone", contextlib.nullcontext()),
            ("beside products", products(ctx)),
        ):
            with beside:
                seconds = [
                    _threaded(clock, functools.partial(load, path)).seconds
                    for path in (direct, over_buffers)
                ]
            rates = [f"{chunks * payload / took / 1e9:.1f}" for took in seconds]
            yield name, seconds, f"direct {rates[0]}, over buffers {rates[1]}"
    direct.close()
    over_buffers.close()


def _threaded(clock: Clock, work: Callable[[], None]) -> Timing:
    """Time work that waits for its own end, beside work of others that goes on."""
    work()
    times = []
    for _ in range(clock.samples):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return timing_of(times)


def loads_beside_products(ctx: Context) -> None:
    """How long the load of one chunk takes whose kernels wait for those of a prefill."""
    shape = sized(ctx, replace(LLAMA, chunks=16))
    caches, clock = make_caches(shape, ctx.device), Clock(ctx, samples=15)
    path = caches.on_device(ctx, ring=1, loads=1, pinned=True)
    shards = range(shape.shards)
    chunks = itertools.cycle(range(shape.chunks))
    with ctx.staging(shape.shards, shape.object_bytes) as staging:

        def load() -> None:
            path.scatter_chunk(shards, caches.slots(next(chunks)), staging)

        alone = _threaded(clock, load)
        with products(ctx):
            beside = _threaded(clock, load)
    name = f"load of a chunk of {shape.shards} objects beside matrix products"
    ctx.row(name, beside, "alone", alone, shape.chunk_bytes)
    path.close()


# --- a step's stores ---------------------------------------------------------------


def step_of_stores(ctx: Context) -> None:
    """(b) What the gathers of a step of 8192 tokens take the step thread; and a chunk's load."""
    shape = sized(ctx, replace(LLAMA, chunks=RING))
    caches = make_caches(shape, ctx.device)
    path = caches.on_device(ctx, ring=shape.chunks, loads=THREADS, pinned=True)
    count = shape.chunks * shape.shards
    clock = Clock(ctx, samples=5)
    with ctx.staging(count, shape.object_bytes) as staging:
        times = []
        for _ in range(clock.samples + 1):
            clock.synchronize()
            start = time.perf_counter()
            pending = [
                path.gather(caches.slots(chunk), staging[chunk * shape.shards :][: shape.shards])
                for chunk in range(shape.chunks)
            ]
            times.append(time.perf_counter() - start)
            for copied in pending:
                assert copied is not None
                copied.wait()
        step = timing_of(times[1:])
        what = f"{shape.chunks} chunks of {shape.shards} objects, {ctx.serves}"
        total = shape.chunks * shape.chunk_bytes
        floor = "10 % of a prefill of 200 ms"
        ctx.row(f"step thread, store of {what}", step, floor, Timing(0.020), total)
        pieces = list(random_bytes(total, ctx.device).view(count, -1))
        least = copies(clock, pieces, staging)
        took = clock.wall(lambda: load_all(path, caches, staging, THREADS))
        ctx.row(f"load of {what}", took, "copies of the same pieces", least, total)
    ctx.fact("seconds of a step", step.seconds)
    path.close()


# --- the engine's steps ------------------------------------------------------------


class Step:
    """A decode step: a small copy in, a graph that streams 4 GiB of weights, a small copy out."""

    def __init__(self, ctx: Context) -> None:
        layers, rows, columns = (64, 4096, 8192) if ctx.cuda else (2, 8, 8)
        options = {"device": ctx.device, "dtype": torch.bfloat16}
        self._weights = [torch.randn(rows, columns, **options) for _ in range(layers)]
        self._x, self._y = torch.randn(columns, 1, **options), torch.empty(rows, 1, **options)
        self._in = [torch.zeros(8 * KIB, dtype=torch.uint8, pin_memory=ctx.cuda) for _ in "io"]
        self._on_device = torch.zeros(8 * KIB, dtype=torch.uint8, device=ctx.device)
        self._ctx = ctx
        self.weight_bytes = layers * rows * columns * 2
        self._layers()
        self._forward: Callable[[], object] = self._layers
        if ctx.cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._layers()
            self._forward = graph.replay

    def _layers(self) -> None:
        for weights in self._weights:
            torch.mm(weights, self._x, out=self._y)

    def run(self) -> float:
        """Run one; return its seconds."""
        start = time.perf_counter()
        self._on_device.copy_(self._in[0], non_blocking=True)
        self._forward()
        self._in[1][: 4 * KIB].copy_(self._on_device[: 4 * KIB], non_blocking=True)
        if self._ctx.cuda:
            torch.cuda.current_stream(self._ctx.device).synchronize()
        return time.perf_counter() - start


@dataclass
class Loading:
    """Loads of all objects, again and again.

    Attributes
    ----------
    rounds : int
    seconds : float
        That these took.
    """

    rounds: int = 0
    seconds: float = 0.0

    def gigabytes(self, chunks: int, shape: Shape) -> float:
        """GB/s, where a round has so many chunks."""
        return self.rounds * chunks * shape.chunk_bytes / max(self.seconds, 1e-9) / 1e9


@contextlib.contextmanager
def loads_at_full_rate(
    path: DeviceKVCache, caches: Caches, staging: Sequence[Tensor]
) -> Iterator[Loading]:
    """Load all objects again and again; at the end it is known how fast that was."""
    ends = threading.Event()
    done = Loading()

    def work() -> None:
        began = time.perf_counter()
        while not ends.is_set():
            load_all(path, caches, staging, THREADS)
            done.rounds += 1
            done.seconds = time.perf_counter() - began

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(work)
        try:
            yield done
        finally:
            ends.set()
            loading.result()


def steps(ctx: Context) -> None:
    """(c) A decode-like step alone, beside loads, behind bursts of stores, and beside both."""
    shape = sized(ctx, replace(LLAMA, chunks=RING))
    caches = make_caches(shape, ctx.device)
    path = caches.on_device(ctx, ring=shape.chunks, loads=THREADS, pinned=True)
    count = shape.chunks * shape.shards
    step = Step(ctx)
    many, bursts = (4, 1) if ctx.small else (400, 8)
    with (
        ctx.staging(count, shape.object_bytes) as stored,
        ctx.staging(count, shape.object_bytes) as loaded,
    ):

        def plain() -> list[float]:
            return [step.run() for _ in range(many)]

        def behind_bursts() -> list[float]:
            times = []
            for _ in range(bursts):
                pending = [
                    path.gather(caches.slots(chunk), stored[chunk * shape.shards :][: shape.shards])
                    for chunk in range(shape.chunks)
                ]
                if ctx.cuda:
                    # The gathers belong to the step that ends here; their copies go on.
                    torch.cuda.current_stream(ctx.device).synchronize()
                with ThreadPoolExecutor(1) as pool:
                    # The store thread waits, as it does in an engine.
                    waiting = pool.submit(lambda: [p.wait() for p in pending if p is not None])  # noqa: B023
                    while not waiting.done() or not times:
                        times.append(step.run())
                    waiting.result()
            return times

        for _ in range(20 if ctx.cuda else 1):
            step.run()
        alone = plain()
        floor, longest_alone = timing_of(alone), max(alone)
        streamed = step.weight_bytes / floor.seconds
        ctx.fact("bytes of weights per second", streamed, f"weights: {streamed / 1e9:.0f} GB/s")

        def compare(name: str, times: list[float]) -> None:
            ctx.row(
                f"step {name}, median of {len(times)}",
                timing_of(times),
                "alone",
                floor,
                0,
                1 / 1.03,
            )
            ctx.row(
                f"longest step {name}",
                *(Timing(max(times)), "longest alone + 1 ms", Timing(longest_alone + 1e-3)),
                goal=1.0,
            )

        with loads_at_full_rate(path, caches, loaded) as loading:
            beside = plain()
        rate = loading.gigabytes(shape.chunks, shape)
        compare("beside loads", beside)
        ctx.fact("GB/s loaded beside steps", rate, f"loaded beside steps: {rate:.1f} GB/s")
        compare("behind stores", behind_bursts())
        with loads_at_full_rate(path, caches, loaded):
            times = behind_bursts()
        compare("beside loads, behind stores", times)
    path.close()


#: Ways of loading: shards at once (None: those of a chunk), and most blocks of a scatter (0: any
#: number). The first is the default; what differs less from it comes earlier.
WAYS: Final = tuple((shards, blocks) for shards in (None, 1) for blocks in (0, 32, 16, 8))


def name_of_way(shards: int | None, blocks: int) -> str:
    """Return the name of a way in reports."""
    return f"{'chunks' if shards is None else 'objects'}, {blocks or 'all'} blocks"


def ways_of_loading(ctx: Context) -> None:
    """(e) A decode-like step beside loads, by the ring of loads and by a limit of their grids."""
    shape = sized(ctx, replace(LLAMA, chunks=RING))
    caches, step = make_caches(shape, ctx.device), Step(ctx)
    rounds, many = (1, 2) if ctx.small else (3, 200)
    times: dict[str, list[float]] = {"alone": []}
    loaded: dict[str, Loading] = {}
    with (
        contextlib.ExitStack() as stack,
        ctx.staging(shape.chunks * shape.shards, shape.object_bytes) as staging,
    ):
        paths: dict[str, DeviceKVCache] = {}
        for shards, blocks in WAYS:
            path = caches.on_device(ctx, ring=1, loads=THREADS, pinned=True, load_shards=shards)
            stack.callback(path.close)
            native = path._copier
            assert isinstance(native, NativeCopier)
            native.limit(blocks)
            paths[name_of_way(shards, blocks)] = path
        for name, path in paths.items():
            _check_loads(ctx, path, caches, staging, name)
        for _ in range(20 if ctx.cuda else 1):
            step.run()
        # In turns, so that no way has another clock of the GPU than the others.
        for _ in range(rounds):
            times["alone"] += [step.run() for _ in range(many)]
            for name, path in paths.items():
                with loads_at_full_rate(path, caches, staging) as loading:
                    times.setdefault(name, []).extend(step.run() for _ in range(many))
                total = loaded.setdefault(name, Loading())
                total.rounds += loading.rounds
                total.seconds += loading.seconds
    floor = timing_of(times.pop("alone"))
    found: dict[str, dict[str, float]] = {}
    for name, taken in times.items():
        rate = loaded[name].gigabytes(shape.chunks, shape)
        found[name] = {
            "median": statistics.median(taken),
            "99 %": statistics.quantiles(taken, n=100)[98],
            "GB/s": rate,
        }
        note = f"loads of {rate:.1f} GB/s"
        ctx.row(f"step beside {name}", timing_of(taken), "alone", floor, 0, 1 / 1.03, note)
    ctx.fact("alone", floor.seconds)
    ctx.fact("ways", found)


def _check_loads(
    ctx: Context, path: DeviceKVCache, caches: Caches, staging: Sequence[Tensor], name: str
) -> None:
    """Compare what one way loads with what a gather finds in the blocks."""
    shape = caches.shape
    shards = range(shape.shards)
    slots, payloads = caches.slots(0), staging[: shape.shards]
    with ctx.staging(shape.shards, shape.object_bytes) as found:
        for payload in payloads:
            payload.random_(0, 256)
        path.scatter_chunk(shards, slots, payloads, path.fence())
        copied = path.gather(slots, found)
        assert copied is not None
        copied.wait()
        for got, want in zip(found, payloads, strict=True):
            ctx.equal(got, want, f"loaded by {name}")


def registered_memory(ctx: Context) -> None:
    """(d) Copies from and to registered staging, and memory that CUDA allocated."""
    clock = Clock(ctx, samples=7)
    count, size = (4, 4096) if ctx.small else (64, 4 << 20)
    pieces = list(random_bytes(count * size, ctx.device).view(count, -1))
    whole = torch.empty(count * size, dtype=torch.uint8, pin_memory=ctx.cuda).random_(0, 256)
    allocated = list(whole.view(count, -1))
    began = time.perf_counter()
    with ctx.staging(count, size) as registered:
        took = time.perf_counter() - began
        ctx.fact("seconds to register", took, f"registering {count * size >> 20} MiB: {took:.3f} s")
        for piece in registered:
            piece.random_(0, 256)
        total = count * size
        out = copies(clock, registered, pieces), copies(clock, allocated, pieces)
        inward = copies(clock, pieces, registered), copies(clock, pieces, allocated)
        for name, (ours, theirs) in {"out": out, "in": inward}.items():
            ctx.row(
                f"copies {name}, registered", ours, "memory of cudaHostAlloc", theirs, total, 0.97
            )
