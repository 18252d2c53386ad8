"""Gather and scatter of permuted caches by plain torch. Safe to call from any thread."""

from __future__ import annotations

import torch
from torch import Tensor

from kvshelf.kv.ops.checks import Call, check_slot_values
from kvshelf.kv.ops.permuted import PermutedSizes
from kvshelf.kv.ops.torch_strided import WORDS


def gather_permuted_torch(call: Call[PermutedSizes], tables: Tensor) -> None:
    """Execute a checked gather."""
    with torch.inference_mode():
        skipped = _skipped(call)
        if call.tokens == 0:
            return
        if skipped is not None and skipped.numel() == call.tokens:
            call.buffers.zero_()
            return
        width, pieces = _permuted_chunk_view(call, tables)
        places = _permuted_places(call, tables, width, call.slots.clamp(min=0))
        for layer, cache in enumerate(call.caches):
            flat = _flat_view(call, cache, width)
            for kv, of_kv in enumerate(places):
                torch.index_select(flat, 0, of_kv.view(-1), out=pieces[layer, kv].view(-1))
        if skipped is not None:
            pieces.index_fill_(2, skipped.to(pieces.device), 0)


def scatter_permuted_torch(call: Call[PermutedSizes], tables: Tensor) -> None:
    """Execute a checked scatter."""
    with torch.inference_mode():
        skipped = _skipped(call)
        if call.tokens == 0:
            return
        width, pieces = _permuted_chunk_view(call, tables)
        slots = call.slots
        if skipped is not None:
            kept = (slots >= 0).nonzero().view(-1)
            if kept.numel() == 0:
                return
            slots = slots.index_select(0, kept)
            pieces = pieces.index_select(2, kept.to(pieces.device))
        places = _permuted_places(call, tables, width, slots)
        for layer, cache in enumerate(call.caches):
            flat = _flat_view(call, cache, width)
            for kv, of_kv in enumerate(places):
                flat.index_copy_(0, of_kv.view(-1), pieces[layer, kv].reshape(-1))


def _skipped(call: Call[PermutedSizes]) -> Tensor | None:
    """Check the slots' values; return the positions of −1 slots, None when there are none."""
    check_slot_values(call.slots, call.layout)
    skipped = (call.slots < 0).nonzero().view(-1)
    return skipped if skipped.numel() else None


def _permuted_chunk_view(call: Call[PermutedSizes], tables: Tensor) -> tuple[int, Tensor]:
    """Return the bytes of the widest word that divides all sizes and offsets, and a buffer's view.

    The view of the chunk buffer is [layers, kv_planes, tokens, heads, words].
    """
    sizes = call.layout
    steps = sizes.block_stride | sizes.head_stride | sizes.row_bytes | sizes.unit_k | sizes.unit_v
    steps |= int(call.buffers.storage_offset()) | call.buffers.data_ptr()
    for cache in call.caches:
        steps |= int(cache.storage_offset()) * cache.element_size() | cache.data_ptr()
    width, word = next(
        (width, word)
        for width, word in WORDS
        if steps % width == 0 and not (tables & (width - 1)).any()
    )
    shape = (len(call.caches), sizes.kv_planes, call.tokens, call.num_heads, -1)
    return width, call.buffers.view(word).view(shape)


def _permuted_places(
    call: Call[PermutedSizes], tables: Tensor, width: int, slots: Tensor
) -> list[Tensor]:
    """Return the indexes into :func:`_flat_view` of each plane: int64 [tokens, heads, words]."""
    sizes = call.layout
    blocks = torch.div(slots, sizes.block_size, rounding_mode="floor")
    offsets = slots - blocks * sizes.block_size
    heads = torch.arange(call.first_head, call.first_head + call.num_heads) * sizes.head_stride
    starts = (blocks * sizes.block_stride).view(-1, 1) + heads
    places = []
    first = 0
    for unit in sizes.units:
        count = sizes.block_size * (sizes.row_bytes // unit)
        table = tables[first : first + count].view(sizes.block_size, -1, 1).long()
        words = (table + torch.arange(0, unit, width)).view(sizes.block_size, 1, -1)
        of_kv = (starts.unsqueeze(-1) + words.index_select(0, offsets)) // width
        places.append(of_kv.to(call.buffers.device))
        first += count
    return places


def _flat_view(call: Call[PermutedSizes], cache: Tensor, width: int) -> Tensor:
    """Return a one-dimensional view, in words, of the bytes of a cache that the layout uses."""
    word = next(word for bytes_, word in WORDS if bytes_ == width)
    start = int(cache.storage_offset()) * cache.element_size()
    return torch.empty(0, dtype=word, device=cache.device).set_(
        cache.untyped_storage(), start // width, (call.layout.extent // width,), (1,)
    )
