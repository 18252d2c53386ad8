"""Rows ``copy/*``: gather and scatter of contiguous blocks on CPU against copies of the same bytes.

Owns the measured paged caches: that of vLLM's CPU backend (each (block, head) unchanged), and
[2, blocks, tokens, heads, size] of strided backends. The copied blocks are consecutive, in the
middle of a larger cache.

Rows ``copy/*/canonical-<packing>/*`` compare the layout ``canonical`` on CPU, where elements are
permuted inside each (block, head), with ``native``, which copies blocks unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measure import Goal, Row, Work, measure_pairs
from benchmarks.samples import BLOCK_TOKENS, CHUNK_TOKENS, LARGE, SMALL, TINY, Shape
from benchmarks.settings import Settings
from kvshelf.kv import ops
from kvshelf.kv.layout import PagedLayout, PermutedLayout, packed_positions, permutation_bytes
from kvshelf.transfer.staging import StagingPool

_CHUNKS_IN_CACHE = 4


@dataclass(frozen=True, slots=True)
class _Paged:
    """One kind of paged cache with its layout and slots."""

    label: str
    caches: list[torch.Tensor]
    layout: PagedLayout
    slots: torch.Tensor


def _native(shape: Shape) -> _Paged:
    blocks = CHUNK_TOKENS // BLOCK_TOKENS
    total = _CHUNKS_IN_CACHE * blocks
    caches = [
        torch.zeros(total, shape.kv_heads, BLOCK_TOKENS, 2 * shape.head_size, dtype=torch.bfloat16)
        for _ in range(shape.layers)
    ]
    slots = torch.arange(blocks, 2 * blocks, dtype=torch.int64)
    return _Paged("native", caches, PagedLayout.native_blocks(caches[0]), slots)


def _permuted(shape: Shape, native: _Paged, packing: str) -> PermutedLayout:
    """Return the layout of the native caches if their blocks have this packing."""
    positions = packed_positions(packing, BLOCK_TOKENS, shape.head_size, 2)
    assert positions is not None
    return PermutedLayout(
        block_size=BLOCK_TOKENS,
        block_stride=native.layout.block_stride,
        head_stride=native.layout.head_stride,
        kv_planes=2,
        heads=shape.kv_heads,
        head_size=shape.head_size,
        item_bytes=2,
        num_blocks=native.layout.num_blocks,
        permutation=permutation_bytes(positions),
    )


def _canonical(shape: Shape) -> _Paged:
    tokens = 16
    blocks = _CHUNKS_IN_CACHE * CHUNK_TOKENS // tokens
    caches = [
        torch.zeros(2, blocks, tokens, shape.kv_heads, shape.head_size, dtype=torch.bfloat16)
        for _ in range(shape.layers)
    ]
    slots = torch.arange(CHUNK_TOKENS, 2 * CHUNK_TOKENS, dtype=torch.int64)
    return _Paged("canonical", caches, PagedLayout.from_2bnhd(caches[0]), slots)


def _index_copy(paged: _Paged, chunk: torch.Tensor) -> Callable[[], None]:
    """Return torch's own scatter of the chunk: one index_copy_ for each layer, K and V."""
    words = [
        cache.view(2, -1, cache.shape[-2] * cache.shape[-1]).view(torch.int64)
        for cache in paged.caches
    ]
    pieces = chunk.view(torch.int64).view(len(words), 2, len(paged.slots), -1)

    def run() -> None:
        for layer, cache in enumerate(words):
            cache[0].index_copy_(0, paged.slots, pieces[layer, 0])
            cache[1].index_copy_(0, paged.slots, pieces[layer, 1])

    return run


def bench_copy(settings: Settings) -> Iterator[Row]:
    """Measure gather and scatter of one chunk, all heads and one shard of the heads."""
    threads = torch.get_num_threads()
    # One thread on both sides: kvshelf uses none of the model's threads.
    torch.set_num_threads(1)
    try:
        shapes = [(SMALL, "3 MiB"), (LARGE, "32 MiB")]
        for shape, label in [(TINY, "0.25 MiB")] if settings.quick else shapes:
            yield from _copy_rows(settings, shape, label)
    finally:
        torch.set_num_threads(threads)


def _copy_rows(settings: Settings, shape: Shape, label: str) -> Iterator[Row]:
    size = shape.chunk_bytes()
    pool = StagingPool(8 * size, size)
    buffers = pool.acquire_for_load(2)
    assert buffers is not None
    chunk, staged = buffers[0].tensor[:size], buffers[1].tensor[:size]
    # The floors copy between the same kinds of memory: a tensor's, and staging's huge pages.
    flat = torch.empty(size, dtype=torch.uint8)
    # Memory that was never written is one shared page of zeros, which is too fast to read.
    for tensor in (chunk, staged, flat):
        tensor.fill_(1)
    for paged in (_native(shape), _canonical(shape)):
        for cache in paged.caches:
            cache.fill_(1.0)
        # One head of a canonical cache consists of short rows, not of contiguous blocks.
        for heads in (paged.layout.heads, 1) if paged.label == "native" else (paged.layout.heads,):
            yield from _both_ways(settings, paged, heads, label, chunk, staged, flat)
        if paged.label == "native":
            for packing in ("vec", "amx"):
                layout = _permuted(shape, paged, packing)
                for heads in (shape.kv_heads, 1):
                    yield from _against_native(
                        settings, paged, layout, packing, heads, label, chunk
                    )
        else:
            times = measure_pairs(
                Work(partial(ops.scatter_kv, paged.caches, paged.slots, chunk, paged.layout)),
                Work(_index_copy(paged, chunk)),
                settings.pairs(51),
            )
            yield Row(
                f"copy/{label.replace(' ', '')}/scatter/index_copy",
                f"scatter, canonical, all heads, {label}",
                "index_copy_",
                *times,
                goal=Goal(0.5),
                extra={"bytes": size, "implementation": ops.implementation()},
            )


def _against_native(
    settings: Settings,
    paged: _Paged,
    layout: PermutedLayout,
    packing: str,
    heads: int,
    label: str,
    chunk: torch.Tensor,
) -> Iterator[Row]:
    size = len(chunk) * heads // layout.heads
    piece = chunk[:size]
    slots = torch.arange(CHUNK_TOKENS, 2 * CHUNK_TOKENS, dtype=torch.int64)
    for verb, copy in (("gather", ops.gather_kv), ("scatter", ops.scatter_kv)):
        times = measure_pairs(
            Work(partial(copy, paged.caches, slots, piece, layout, 0, heads)),
            Work(partial(copy, paged.caches, paged.slots, piece, paged.layout, 0, heads)),
            settings.pairs(51),
        )
        yield Row(
            f"copy/{label.replace(' ', '')}/{verb}/canonical-{packing}/{heads}",
            f"{verb}, canonical from {packing}, {_heads(heads, layout.heads)}, {label}",
            "native",
            *times,
            extra={"bytes": size, "implementation": ops.implementation()},
        )


def _heads(heads: int, of: int) -> str:
    return "all heads" if heads == of else f"{heads} of {of} heads"


def _both_ways(
    settings: Settings,
    paged: _Paged,
    heads: int,
    label: str,
    chunk: torch.Tensor,
    staged: torch.Tensor,
    flat: torch.Tensor,
) -> Iterator[Row]:
    size = len(chunk) * heads // paged.layout.heads
    what = _heads(heads, paged.layout.heads)
    arguments = (paged.caches, paged.slots, chunk[:size], paged.layout, 0, heads)
    for verb, run, floor in (
        ("gather", partial(ops.gather_kv, *arguments), partial(staged[:size].copy_, flat[:size])),
        ("scatter", partial(ops.scatter_kv, *arguments), partial(flat[:size].copy_, staged[:size])),
    ):
        times = measure_pairs(Work(run), Work(floor), settings.pairs(51))
        yield Row(
            f"copy/{label.replace(' ', '')}/{verb}/{paged.label}/{heads}",
            f"{verb}, {paged.label}, {what}, {label}",
            "memcpy",
            *times,
            goal=Goal(1.2),
            extra={"bytes": size, "implementation": ops.implementation()},
        )
