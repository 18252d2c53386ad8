"""Cache writers of libraries that engines use: FlashInfer and flash-attn.

Each writes K and V of single tokens into a paged cache, as if every token were the newest of a
sequence of its own. Importing this module imports neither library; making a writer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

#: Writes [K, V] of tokens, each [tokens, heads, elements], to slots (int64, on the device) of
#: views of K and V [blocks, slots of a block, heads, elements].
Writer: TypeAlias = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor]], None]


def flashinfer_writer() -> Writer:
    """Return a writer by ``flashinfer.append_paged_kv_cache``.

    Raises
    ------
    ImportError
        If FlashInfer is not installed.
    """
    import flashinfer

    def write(rows: Sequence[Tensor], slots: Tensor, contents: Sequence[Tensor]) -> None:
        tokens, size = slots.numel(), rows[0].shape[1]
        numbers = torch.arange(tokens + 1, dtype=torch.int32, device=slots.device)
        offsets = (slots % size).int()
        flashinfer.append_paged_kv_cache(
            contents[0].contiguous(),
            contents[1].contiguous(),
            numbers[:-1],
            offsets,
            (rows[0], rows[1]),
            (slots // size).int(),
            numbers,
            offsets + 1,
            kv_layout="NHD",
        )

    return write


def flash_attn_writer() -> Writer:
    """Return a writer by ``flash_attn.flash_attn_with_kvcache``.

    Raises
    ------
    ImportError
        If flash-attn is not installed.
    """
    import flash_attn

    def write(rows: Sequence[Tensor], slots: Tensor, contents: Sequence[Tensor]) -> None:
        size = rows[0].shape[1]
        key, value = (content.unsqueeze(1).contiguous() for content in contents)
        flash_attn.flash_attn_with_kvcache(
            torch.zeros_like(key),
            rows[0],
            rows[1],
            key,
            value,
            cache_seqlens=(slots % size).int(),
            block_table=(slots // size).int().unsqueeze(1),
        )

    return write
