"""Gather and scatter by the compiled library.

Passes the fields of a checked call as plain addresses. The library releases the GIL while it
copies. Safe to call from any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final

from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.ops import library
from kvshelf.kv.ops.checks import Call, bad_slot_error
from kvshelf.kv.ops.permuted import units_of

#: Indexes that are kept for each cache.
_MAX_INDEXES: Final = 64
#: The answer if no kernel supports the call. Below it: -2 minus the position of a bad slot.
_TOO_LARGE: Final = -1


def run_compiled(call: Call[Any], *, gather: bool) -> bool:
    """Execute a call of one chunk; return False if the library does not support it."""
    known = call.known
    if not known.kernels and not known.on_cpu:
        return False
    found = library.kernels(known.device.index) if known.kernels else library.compiled_library()
    if found is None:
        return False
    if isinstance(call.layout, PermutedLayout):
        answer = _copy_permuted(found.gather_permuted if gather else found.scatter_permuted, call)
    else:
        index = _index_of(call)  # kept while the library reads it
        pointers = (
            index.buffer_info()[0],
            known.addresses.buffer_info()[0],
            call.slots.data_ptr(),
            call.buffers.data_ptr(),
        )
        if not known.kernels:
            answer = (found.gather if gather else found.scatter)(*pointers)
        elif found.device is None:
            return False
        else:
            functions = found.device
            answer = (functions.gather if gather else functions.scatter)(known.anchor, *pointers)
            if answer == _TOO_LARGE:
                return False
            answer = -2 - answer
    if answer >= 0:
        raise bad_slot_error(int(call.slots.view(-1)[answer]), answer, call.layout)
    return True


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
    indexes = call.known.indexes
    key = (call.first_head, call.tokens, call.shards, call.num_heads, call.shard_stride)
    index = indexes.get(key)
    if index is None:
        index = array("q", paged_index(call.layout, len(call.known.addresses), *key))
        if len(indexes) >= _MAX_INDEXES:
            indexes.clear()
        indexes[key] = index
    return index


def _copy_permuted(function: Callable[..., int], call: Call[PermutedLayout]) -> int:
    layout, units = call.layout, units_of(call.layout)
    return function(
        call.known.addresses.buffer_info()[0],
        call.slots.data_ptr(),
        call.buffers.data_ptr(),
        units.tables.data_ptr(),
        len(call.known.addresses),
        call.tokens,
        layout.num_blocks,
        layout.block_size,
        layout.block_stride,
        layout.head_stride,
        layout.kv_planes,
        call.first_head,
        call.num_heads,
        layout.row_bytes,
        units.sizes[0],
        units.sizes[1] if layout.kv_planes == 2 else 0,
    )
