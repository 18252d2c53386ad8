"""Gather and scatter of strided caches by plain torch. Safe to call from any thread."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops.checks import Call, check_slot_values

#: Widths of words in bytes, the widest first.
WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def gather_torch(call: Call[PagedLayout]) -> None:
    """Execute a checked gather of one chunk."""
    check_slot_values(call.slots, call.layout)
    if call.tokens == 0:
        return
    with torch.inference_mode():
        skipped, index = _index_slots(call)
        pieces = _chunk_view(call, call.shard_buffers)
        if skipped is not None and skipped.numel() == call.tokens:
            pieces.zero_()
            return
        for layer, cache in enumerate(call.caches):
            view = _paged_view(call, cache, pieces.dtype)
            for kv in range(call.layout.kv_planes):
                torch.index_select(view[kv], 0, index, out=pieces[layer, kv])
        if skipped is not None:
            pieces.index_fill_(2, sent(skipped, pieces.device), 0)


def scatter_torch(call: Call[PagedLayout]) -> None:
    """Execute a checked scatter of one chunk."""
    check_slot_values(call.slots, call.layout)
    if call.tokens == 0:
        return
    with torch.inference_mode():
        skipped, index = _index_slots(call)
        pieces = _chunk_view(call, call.shard_buffers)
        if skipped is not None:
            kept = sent((call.slots.view(-1) >= 0).nonzero().view(-1), pieces.device)
            if kept.numel() == 0:
                return
            index = index.index_select(0, kept)
            pieces = pieces.index_select(2, kept)
        for layer, cache in enumerate(call.caches):
            view = _paged_view(call, cache, pieces.dtype)
            for kv in range(call.layout.kv_planes):
                view[kv].index_copy_(0, index, pieces[layer, kv])


def _index_slots(call: Call[PagedLayout]) -> tuple[Tensor | None, Tensor]:
    """Return the positions of −1 slots, int64 CPU, None without; and each token's index.

    The index is one into :func:`_paged_view`, int64 on the caches' device; 0 for skipped tokens.
    """
    layout, slots = call.layout, call.slots.view(-1)
    skipped = (slots < 0).nonzero().view(-1)
    if skipped.numel():
        slots = slots.clamp(min=0)
    unit = _unit(layout)
    if layout.block_size * layout.token_stride != layout.block_stride or layout.block_size == 1:
        blocks = torch.div(slots, layout.block_size, rounding_mode="floor")
        slots = blocks * (layout.block_stride // unit) + (slots - blocks * layout.block_size) * (
            layout.token_stride // unit
        )
    return (skipped if skipped.numel() else None), sent(slots, call.known.device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to a device, in the order of the current stream."""
    if device.type != "cpu":
        # A copy from pageable memory waits for the stream, on a step thread for the forward pass.
        # torch keeps page-locked memory until the copies from it are done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _unit(layout: PagedLayout) -> int:
    # The largest step in bytes that divides the strides of blocks and tokens, so that one index
    # dimension covers both.
    if layout.block_size * layout.token_stride == layout.block_stride:
        return layout.token_stride or 1
    return math.gcd(layout.block_stride, layout.token_stride) or 1


def _paged_view(call: Call[PagedLayout], cache: Tensor, word: torch.dtype) -> Tensor:
    """[kv_planes, indexes, shards, heads, words] view of what to copy; see :func:`_index_slots`."""
    layout, width = call.layout, word.itemsize
    unit = _unit(layout)
    reach = (layout.num_blocks - 1) * layout.block_stride
    reach += (layout.block_size - 1) * layout.token_stride
    start = int(cache.storage_offset()) * cache.element_size()
    start += call.first_head * layout.head_stride
    head = layout.head_stride // width
    counts = (call.shards, call.num_heads, layout.row_bytes // width)
    return torch.empty(0, dtype=word, device=cache.device).set_(
        cache.untyped_storage(),
        start // width,
        (layout.kv_planes, reach // unit + 1, *counts),
        (layout.kv_stride // width, unit // width, call.num_heads * head, head, 1),
    )


def _chunk_view(call: Call[PagedLayout], buffers: Tensor) -> Tensor:
    """[layers, kv_planes, tokens, shards, heads, words] view of buffers [shards, bytes]."""
    word = widest_word(call, buffers)
    shape = (call.shards, len(call.caches), call.layout.kv_planes, call.tokens, call.num_heads, -1)
    return buffers.view(word).view(shape).permute(1, 2, 3, 0, 4, 5)


def widest_word(call: Call[PagedLayout], buffers: Tensor) -> torch.dtype:
    """Return the widest word that divides the strides and addresses of a call."""
    layout = call.layout
    steps = layout.block_stride | layout.token_stride | layout.kv_stride | layout.head_stride
    steps |= layout.row_bytes | int(buffers.storage_offset()) | buffers.data_ptr()
    for stride in buffers.stride()[:-1]:
        steps |= stride
    for cache in call.caches:
        steps |= int(cache.storage_offset()) * cache.element_size() | cache.data_ptr()
    return next(dtype for width, dtype in WORDS if steps % width == 0)
