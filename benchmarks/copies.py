"""Rows ``copy/*``: gather and scatter of one chunk on CPU against torch's copies by index.

Owns the measured paged caches: that of vLLM's CPU backend (each (block, head) unchanged), and
[2, blocks, tokens, heads, size] of strided backends. The copied blocks are consecutive, in the
middle of a larger cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.measure import Goal, Row, Work, measure_pairs
from benchmarks.samples import BLOCK_TOKENS, CHUNK_TOKENS, LARGE, SMALL, TINY, Shape
from benchmarks.settings import Settings
from kvshelf.kv import ops
from kvshelf.kv.layout import PagedLayout
from kvshelf.memory.arena import Arena

_CHUNKS_IN_CACHE = 4


def bench_copy(settings: Settings) -> Iterator[Row]:
    """Measure gather and scatter of one chunk of all heads."""
    threads = torch.get_num_threads()
    # One thread on both sides: kvshelf uses none of the model's threads.
    torch.set_num_threads(1)
    try:
        shapes = [(SMALL, "3 MiB"), (LARGE, "32 MiB")]
        for shape, label in [(TINY, "0.25 MiB")] if settings.quick else shapes:
            size = shape.chunk_bytes()
            # Memory that was never written is one shared page of zeros, which is too fast to read.
            chunk = Arena(size, lazy=True).tensor.fill_(1)
            yield from _rows(settings, "native", label, chunk, *_native(shape))
            yield from _rows(settings, "canonical", label, chunk, *_canonical(shape))
    finally:
        torch.set_num_threads(threads)


def _native(shape: Shape) -> tuple[list[torch.Tensor], PagedLayout, torch.Tensor]:
    blocks = CHUNK_TOKENS // BLOCK_TOKENS
    size = (_CHUNKS_IN_CACHE * blocks, shape.kv_heads, BLOCK_TOKENS, 2 * shape.head_size)
    caches = [torch.ones(size, dtype=torch.bfloat16) for _ in range(shape.layers)]
    return caches, PagedLayout.native_blocks(caches[0]), torch.arange(blocks, 2 * blocks)


def _canonical(shape: Shape) -> tuple[list[torch.Tensor], PagedLayout, torch.Tensor]:
    blocks = _CHUNKS_IN_CACHE * CHUNK_TOKENS // 16
    size = (2, blocks, 16, shape.kv_heads, shape.head_size)
    caches = [torch.ones(size, dtype=torch.bfloat16) for _ in range(shape.layers)]
    slots = torch.arange(CHUNK_TOKENS, 2 * CHUNK_TOKENS)
    return caches, PagedLayout.from_2bnhd(caches[0]), slots


def _rows(
    settings: Settings,
    kind: str,
    label: str,
    chunk: torch.Tensor,
    caches: list[torch.Tensor],
    layout: PagedLayout,
    slots: torch.Tensor,
) -> Iterator[Row]:
    floors = _by_index(kind, caches, slots, chunk)
    for (verb, floor), run in zip(floors.items(), (ops.gather_kv, ops.scatter_kv), strict=True):
        yield Row(
            f"copy/{label.replace(' ', '')}/{verb}/{kind}",
            f"{verb}, {kind}, all heads, {label}",
            "index_select" if verb == "gather" else "index_copy_",
            *measure_pairs(
                Work(partial(run, caches, slots, chunk, layout)), Work(floor), settings.pairs(51)
            ),
            goal=Goal(0.5) if (verb, kind) == ("scatter", "canonical") else None,
            extra={"bytes": len(chunk), "implementation": ops.implementation()},
        )


def _by_index(
    kind: str, caches: list[torch.Tensor], slots: torch.Tensor, chunk: torch.Tensor
) -> dict[str, Callable[[], None]]:
    """Return torch's gather and scatter of the chunk, in words of eight bytes."""
    words = [cache.flatten(-2).view(torch.int64) for cache in caches]
    if kind == "canonical":
        # Slots of K, and of V.
        views = [plane.flatten(0, 1) for word in words for plane in word]
    else:
        views = [word.flatten(1) for word in words]
    pieces = chunk.view(torch.int64).view(len(views), len(slots), -1)

    def gather() -> None:
        for view, piece in zip(views, pieces, strict=True):
            torch.index_select(view, 0, slots, out=piece)

    def scatter() -> None:
        for view, piece in zip(views, pieces, strict=True):
            view.index_copy_(0, slots, piece)

    return {"gather": gather, "scatter": scatter}
