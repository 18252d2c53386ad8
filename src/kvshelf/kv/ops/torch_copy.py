"""Gather and scatter by plain torch, of strided and of permuted caches.

Each KV plane of a cache is a view whose first dimension is indexed: the tokens of strided caches,
the single words of permuted ones. Safe to call from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.ops.checks import CopyCall, check_slot_values
from kvshelf.kv.ops.permuted import units_of

#: Widths of words in bytes, the widest first.
WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def copy_torch(call: CopyCall[Any], *, gather: bool) -> None:
    """Execute a checked call.

    Raises
    ------
    ValueError
        If a slot is not in the cache.
    """
    slots, device = call.slots, call.known.device
    check_slot_values(slots, call.layout)
    if call.tokens == 0:
        return
    with torch.inference_mode():
        word = widest_word(call, call.shard_buffers)
        layers = _rows_of_layers(call, word)
        # What is sent to the device is sent once for all layers.
        copied: Tensor | None = None
        skipped = (slots < 0).nonzero().view(-1)
        if skipped.numel() == call.tokens:
            for rows in layers if gather else ():
                rows.zero_()
            return
        if skipped.numel() and gather:
            slots = slots.clamp(min=0)
            skipped = sent(skipped, device)
        elif skipped.numel():
            tokens = (slots >= 0).nonzero().view(-1)
            slots = slots.index_select(0, tokens)
            copied = sent(tokens, device)
        is_permuted = isinstance(call.layout, PermutedLayout)
        indexes, views = (_permuted if is_permuted else _strided)(call, slots, word)
        for cache, rows in zip(call.caches, layers, strict=True):
            taken = rows if copied is None else rows.index_select(1, copied)
            planes = taken.view(len(taken), -1) if is_permuted else taken
            for index, paged, plane in zip(indexes, views(cache), planes, strict=True):
                if gather:
                    torch.index_select(paged, 0, index, out=plane)
                else:
                    paged.index_copy_(0, index, plane)
            if skipped.numel() and gather:
                rows.index_fill_(1, skipped, 0)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to a device, in the order of the current stream."""
    if device.type != "cpu":
        # A copy from pageable memory waits for the stream, on a step thread for the forward pass.
        # torch keeps page-locked memory until the copies from it are done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _rows_of_layers(call: CopyCall[Any], word: torch.dtype) -> list[Tensor]:
    """[kv_planes, tokens, shards, heads, words] view of the buffers for each layer."""
    nbytes = call.layout.chunk_bytes(call.tokens, call.num_heads)
    starts = call.starts or range(0, nbytes * len(call.caches), nbytes)
    shape = (call.shards, call.layout.kv_planes, call.tokens, call.num_heads, -1)
    return [
        call.shard_buffers[:, start : start + nbytes].view(word).view(shape).permute(1, 2, 0, 3, 4)
        for start in starts
    ]


def widest_word(call: CopyCall[Any], buffers: Tensor) -> torch.dtype:
    """Return the widest word that divides the strides and addresses of a call."""
    layout = call.layout
    steps = layout.block_stride | layout.head_stride | layout.row_bytes
    if isinstance(layout, PermutedLayout):
        steps |= units_of(layout).step
    else:
        steps |= layout.token_stride | layout.kv_stride
    steps |= int(buffers.storage_offset()) | buffers.data_ptr()
    for step in (*buffers.stride()[:-1], *call.starts):
        steps |= step
    for cache in call.caches:
        steps |= int(cache.storage_offset()) * cache.element_size() | cache.data_ptr()
    return next(dtype for width, dtype in WORDS if steps % width == 0)


#: The index of each KV plane, int64 on the caches' device, and the views of the planes of a cache.
_Plan = tuple[Sequence[Tensor], Callable[[Tensor], Sequence[Tensor]]]


def _strided(call: CopyCall[PagedLayout], slots: Tensor, word: torch.dtype) -> _Plan:
    """Index tokens, in views [indexes, shards, heads, words]."""
    layout, width = call.layout, word.itemsize
    is_dense = layout.block_size * layout.token_stride == layout.block_stride
    # The largest step in bytes that divides the strides of blocks and tokens, so that one index
    # dimension covers both.
    unit = layout.token_stride if is_dense else math.gcd(layout.block_stride, layout.token_stride)
    unit = unit or 1
    if not is_dense or layout.block_size == 1:
        blocks = torch.div(slots, layout.block_size, rounding_mode="floor")
        slots = blocks * (layout.block_stride // unit) + (slots - blocks * layout.block_size) * (
            layout.token_stride // unit
        )
    reach = (layout.num_blocks - 1) * layout.block_stride
    reach += (layout.block_size - 1) * layout.token_stride
    head = layout.head_stride // width
    counts = (call.shards, call.num_heads, layout.row_bytes // width)

    def views(cache: Tensor) -> Sequence[Tensor]:
        return _words(
            cache,
            word,
            call.first_head * layout.head_stride,
            (layout.kv_planes, reach // unit + 1, *counts),
            (layout.kv_stride // width, unit // width, call.num_heads * head, head, 1),
        ).unbind()

    return [sent(slots, call.known.device)] * layout.kv_planes, views


def _permuted(call: CopyCall[PermutedLayout], slots: Tensor, word: torch.dtype) -> _Plan:
    """Index words, in one-dimensional views of all bytes that the layout uses."""
    layout, width = call.layout, word.itemsize
    blocks = torch.div(slots, layout.block_size, rounding_mode="floor")
    offsets = slots - blocks * layout.block_size
    heads = torch.arange(call.first_head, call.first_head + call.num_heads) * layout.head_stride
    starts = (blocks * layout.block_stride).view(-1, 1) + heads
    indexes = []
    units = units_of(layout)
    for unit, table in zip(units.sizes, units.offsets, strict=True):
        words = table.long().unsqueeze(-1) + torch.arange(0, unit, width)
        words = words.view(layout.block_size, 1, -1)
        index = (starts.unsqueeze(-1) + words.index_select(0, offsets)) // width
        indexes.append(sent(index.view(-1), call.known.device))

    def views(cache: Tensor) -> Sequence[Tensor]:
        return [_words(cache, word, 0, (layout.extent // width,), (1,))] * layout.kv_planes

    return indexes, views


def _words(
    cache: Tensor, word: torch.dtype, skip: int, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    """View the memory of a cache from byte `skip` on as words."""
    start = int(cache.storage_offset()) * cache.element_size() + skip
    return torch.empty(0, dtype=word, device=cache.device).set_(
        cache.untyped_storage(), start // word.itemsize, shape, strides
    )
