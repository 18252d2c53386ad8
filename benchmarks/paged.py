"""Paged caches of a model, for measurements without an engine."""

from __future__ import annotations

import torch

from benchmarks.samples import BLOCK_TOKENS, Shape
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.sources import PagedKV


def paged_kv(shape: Shape, tokens: int) -> PagedKV:
    """Return caches as vLLM lays them out on CPUs, with room for `tokens` tokens in whole blocks.

    All values are 1, so that all pages are in memory.
    """
    blocks = tokens // BLOCK_TOKENS
    caches = [
        torch.ones(blocks, shape.kv_heads, BLOCK_TOKENS, 2 * shape.head_size, dtype=torch.bfloat16)
        for _ in range(shape.layers)
    ]
    return PagedKV(caches, PagedLayout.native_blocks(caches[0]), torch.arange(tokens))
