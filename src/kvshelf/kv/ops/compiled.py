"""Gather and scatter by the compiled library.

Passes the fields of a checked call as plain addresses. The library releases the GIL while it
copies. Safe to call from any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

from torch import Tensor

from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops import library
from kvshelf.kv.ops.checks import Call, bad_slot_error
from kvshelf.kv.ops.permuted import PermutedSizes

#: Indexes that are kept for each cache.
_MAX_INDEXES: Final = 64


def run_compiled(call: Call[PagedLayout], *, gather: bool) -> bool:
    """Execute a call of one chunk; return False if the library does not support it."""
    if not call.known.kernels:
        compiled = library.compiled_library() if call.known.on_cpu else None
        if compiled is None:
            return False
        _call_host(compiled.gather if gather else compiled.scatter, call)
        return True
    compiled = library.kernels(call.known.device.index)
    if compiled is None or compiled.device is None:
        return False
    return _call_kernel(compiled.device.gather if gather else compiled.device.scatter, call)


def paged_index(
    layout: PagedLayout,
    layers: int,
    first_head: int,
    tokens: int,
    shards: int,
    heads: int,
    shard_stride: int = 0,
) -> tuple[int, ...]:
    """Return the fields of kvshelf::PagedIndex, in order of declaration.

    Parameters
    ----------
    layout : PagedLayout
    layers : int
        Number of caches.
    first_head, heads : int
        The first head and the number of heads of the first shard.
    tokens, shards : int
        Numbers of slots and of shards.
    shard_stride : int
        Bytes from one shard's buffer to the next one's; 0 where there is one only.
    """
    return (
        layout.num_blocks,
        layout.block_size,
        layout.block_stride,
        layout.token_stride,
        layout.kv_stride,
        layout.head_stride,
        first_head,
        layers,
        tokens,
        shards,
        heads,
        layout.kv_planes,
        layout.row_bytes,
        shard_stride,
    )


def _index_of(call: Call[PagedLayout]) -> array[int]:
    layout, indexes = call.layout, call.known.indexes
    key = (call.first_head, call.tokens, call.shards, call.num_heads, call.shard_stride)
    index = indexes.get(key)
    if index is not None:
        return index
    index = array("q", paged_index(layout, len(call.known.addresses), *key))
    if len(indexes) >= _MAX_INDEXES:
        indexes.clear()
    indexes[key] = index
    return index


def _call_host(function: Callable[..., int], call: Call[PagedLayout]) -> None:
    index = _index_of(call)
    position = function(
        index.buffer_info()[0],
        call.known.addresses.buffer_info()[0],
        call.slots.data_ptr(),
        call.buffers.data_ptr(),
    )
    if position >= 0:
        raise bad_slot_error(int(call.slots.view(-1)[position]), position, call.layout)


def _call_kernel(function: Callable[..., int], call: Call[PagedLayout]) -> bool:
    index = _index_of(call)
    answer = function(
        call.known.anchor,
        index.buffer_info()[0],
        call.known.addresses.buffer_info()[0],
        call.slots.data_ptr(),
        call.buffers.data_ptr(),
    )
    if answer < -1:
        position = -2 - answer
        raise bad_slot_error(int(call.slots.view(-1)[position]), position, call.layout)
    return answer >= 0


def run_compiled_permuted(
    function: Callable[..., int], call: Call[PermutedSizes], tables: Tensor
) -> None:
    """Execute a call on permuted caches by a function of the compiled library."""
    sizes = call.layout
    position = function(
        call.known.addresses.buffer_info()[0],
        call.slots.data_ptr(),
        call.buffers.data_ptr(),
        tables.data_ptr(),
        len(call.known.addresses),
        call.tokens,
        sizes.num_blocks,
        sizes.block_size,
        sizes.block_stride,
        sizes.head_stride,
        sizes.kv_planes,
        call.first_head,
        call.num_heads,
        sizes.row_bytes,
        sizes.unit_k,
        sizes.unit_v,
    )
    if position >= 0:
        raise bad_slot_error(int(call.slots[position]), position, sizes)
