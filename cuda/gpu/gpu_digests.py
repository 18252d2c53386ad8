"""Group ``digests`` of the part ``design``: what verifying objects on the GPU would cost.

The kernels are those of cuda/include/kvshelf/xxh3.h, which only the library of nvcc has. They
compute the list ``xxh3`` of each object, as docs/format.md has it, from a buffer of loads.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
import xxhash
from gpu_decisions import DIGESTS_SHARE
from gpu_groups import Context, Timing
from gpu_measure import (
    DEEPSEEK,
    LLAMA,
    Clock,
    copies,
    new_stream,
    on_stream,
    random_bytes,
    sized,
)
from torch import Tensor

from kvshelf.kv.ops import library as native

#: Blocks of threads at once, each of which may have a multiprocessor for itself.
PROCESSORS: Final = (8, 16)
DIGEST: Final = 16
_KIB: Final = 1024
#: Sizes of tensors that are hashed in ways of their own, and of whole and broken blocks.
_SMALL: Final = (*range(20), 32, 33, 64, 65, 96, 97, 128, 129, 144, 160, 239, 240, 241, 256)
_LARGE: Final = (1023, 1024, 1025, 1040, 2048, 128 * _KIB - 1, 128 * _KIB, 129 * _KIB, 300 * _KIB)


def functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """Return the library's functions that hash, and that tell how much room this needs."""
    import tvm_ffi

    library = native.kernels(None)
    assert library is not None
    module = tvm_ffi.load_module(library.path)
    return module.get_function("design_hash"), module.get_function("design_hash_room")


class Digests:
    """Hashes the tensors of the objects of a chunk.

    Parameters
    ----------
    ctx : Context
    sizes : Sequence[int]
        Bytes of each tensor of an object, which lie one after another.
    shards : int
    """

    def __init__(self, ctx: Context, sizes: Sequence[int], shards: int) -> None:
        self._ctx = ctx
        self._hash, room = functions()
        self._starts = array("q", itertools.accumulate(sizes, initial=0))
        self._shards = shards
        sums = room(self._starts.buffer_info()[0], len(sizes)) * shards
        options: dict[str, Any] = {"dtype": torch.uint8, "device": ctx.device}
        self._sums = torch.empty(max(16, sums), **options)
        #: uint8 [shards, tensors, 16], canonical.
        self.found = torch.empty(shards, len(sizes), DIGEST, **options)

    def enqueue(self, payloads: Tensor, blocks: int) -> None:
        """Hash uint8 [shards, bytes] on the current stream, by at most `blocks` blocks."""
        cuda = self._ctx.cuda
        self._hash(
            self._ctx.device.index or 0,
            torch.cuda.current_stream(self._ctx.device).cuda_stream if cuda else 0,
            *(payloads.data_ptr(), payloads.stride(0), self._shards),
            *(self._starts.buffer_info()[0], len(self._starts) - 1),
            *(self._sums.data_ptr(), self.found.data_ptr(), blocks),
        )

    def expected(self, payloads: Tensor) -> Tensor:
        """What :attr:`found` has to be, by the package xxhash."""
        rows = [row.numpy().tobytes() for row in payloads.cpu()]
        digests = b"".join(
            xxhash.xxh3_128_digest(row[start:end])
            for row in rows
            for start, end in itertools.pairwise(self._starts)
        )
        return torch.frombuffer(bytearray(digests), dtype=torch.uint8).view_as(self.found)


def _compare(ctx: Context, sizes: Sequence[int], shards: int, skew: int = 0) -> None:
    """Compare digests of random bytes, then of the same with one bit flipped at a time."""
    digests = Digests(ctx, sizes, shards)
    size = sum(sizes)
    room = -(-size // 16) * 16 + skew
    payloads = random_bytes(shards * room + skew, ctx.device)[skew:].view(shards, room)[:, :size]
    what = f"digests of {shards} x {len(sizes)} tensors, {size} bytes, skew {skew}"
    for blocks in PROCESSORS:
        digests.found.zero_()
        digests.enqueue(payloads, blocks)
        ctx.equal(digests.found, digests.expected(payloads), what)
    for bit in torch.randint(0, 8 * shards * size, (4 if ctx.small else 12,)).tolist():
        shard, byte = divmod(bit // 8, size)
        payloads[shard, byte] ^= 1 << bit % 8
        digests.enqueue(payloads, PROCESSORS[0])
        ctx.equal(digests.found, digests.expected(payloads), f"{what}, bit {bit} flipped")


@contextlib.contextmanager
def copying(ctx: Context, to: Tensor, source: Sequence[Tensor]) -> Iterator[list[int]]:
    """Copy to the device at full rate; yields a list with the bytes that have arrived."""
    ends = threading.Event()
    stream = new_stream(ctx)
    arrived = [0]
    pieces = list(zip(to, source, strict=True))

    def work() -> None:
        pending: list[Any] = []
        with on_stream(stream):
            while not ends.is_set():
                for target, piece in pieces:
                    target.copy_(piece, non_blocking=True)
                if stream is None:
                    ends.wait(0.001)
                else:
                    pending.append(stream.record_event())
                    # One round waits while another is copied.
                    if len(pending) > 1:
                        pending.pop(0).synchronize()
                arrived[0] += to.numel()

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(work)
        try:
            yield arrived
        finally:
            ends.set()
            busy.result()
    if stream is not None:
        stream.synchronize()


def _cost(ctx: Context, name: str, sizes: Sequence[int], shards: int) -> dict[str, Any]:
    """Seconds of the digests of a chunk beside copies, by the number of blocks; of its copies."""
    clock = Clock(ctx, samples=15)
    digests = Digests(ctx, sizes, shards)
    size = sum(sizes)
    # Several chunks in turn, so that none is in the L2 cache, where a small ring would have it.
    chunks = random_bytes(4 * shards * size, ctx.device).view(4, shards, size)
    target = torch.empty_like(chunks[0])
    with ctx.staging(shards, size) as staging:
        for piece in staging:
            piece.random_(0, 256)
        least = copies(clock, list(target), staging)
        took: dict[int, float] = {}
        rates: dict[int, float] = {}
        for blocks in PROCESSORS:
            works = [
                lambda chunk=chunk, blocks=blocks: digests.enqueue(chunk, blocks)
                for chunk in chunks
            ]
            with copying(ctx, target, staging) as arrived:
                began, before = time.perf_counter(), arrived[0]
                timing = clock.enqueued(works)
                rates[blocks] = (arrived[0] - before) / (time.perf_counter() - began) / 1e9
            took[blocks] = timing.seconds
            ctx.row(
                f"digests of a chunk of {name} on {blocks} SMs, beside copies",
                timing,
                "a quarter of its copies",
                Timing(DIGESTS_SHARE * least.seconds, least.spread),
                shards * size,
                1.0,
            )
    return {"seconds": took, "seconds of its copies": least.seconds, "GB/s copied": rates}


def digests(ctx: Context) -> None:
    """Digests as xxhash computes them, and what those of a chunk cost beside copies."""
    large = [size for size in _LARGE if not ctx.small or size < 256 * _KIB]
    _compare(ctx, _SMALL, 2)
    _compare(ctx, large, 3, skew=1)
    _compare(ctx, [-(-size // 16) * 16 for size in (*_SMALL, *large)], 2)
    _compare(ctx, [_KIB + 16] * 300, 2)
    found: dict[str, Any] = {}
    for name, shape in (("8 objects", LLAMA), ("MLA", DEEPSEEK)):
        shape = sized(ctx, shape)
        sizes = [shape.object_bytes // shape.layers] * shape.layers
        if not ctx.small:
            _compare(ctx, sizes, shape.shards)
        found[name] = _cost(ctx, name, sizes, shape.shards)
        rates = ", ".join(f"{rate:.1f}" for rate in found[name]["GB/s copied"].values())
        ctx.fact("cost", found, f"copied beside digests of {name}: {rates} GB/s")
