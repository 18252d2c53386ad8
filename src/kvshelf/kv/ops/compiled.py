"""Gather and scatter on CPUs, by the compiled library.

Passes the fields of a checked call as plain addresses. The library releases the GIL while it
copies. Safe to call from any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final

from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.ops import library
from kvshelf.kv.ops.checks import CopyCall, bad_slot_error
from kvshelf.kv.ops.permuted import units_of

#: Indexes that are kept for each cache.
_MAX_INDEXES: Final = 64


def run_compiled(call: CopyCall[Any], *, gather: bool) -> bool:
    """Execute a call in host memory; return False where the library cannot.

    It takes no places of layers.

    Raises
    ------
    ValueError
        If a slot is not in the cache.
    """
    functions = library.compiled_library()
    if functions is None or call.starts:
        return False
    if isinstance(call.layout, PermutedLayout):
        bad = _copy_permuted(
            functions.gather_permuted if gather else functions.scatter_permuted, call
        )
    else:
        index = _index_of(call)  # kept while the library reads it
        bad = (functions.gather if gather else functions.scatter)(
            index.buffer_info()[0],
            call.known.addresses.buffer_info()[0],
            call.slots.data_ptr(),
            call.buffers.data_ptr(),
        )
    if bad >= 0:
        raise bad_slot_error(int(call.slots[bad]), bad, call.layout)
    return True


def _index_of(call: CopyCall[PagedLayout]) -> array[int]:
    """Return the fields of kvshelf::PagedIndex, in the order of their declaration."""
    indexes, layout = call.known.indexes, call.layout
    key = (call.first_head, call.tokens, call.shards, call.num_heads, call.shard_stride)
    index = indexes.get(key)
    if index is None:
        fields = (
            *(layout.num_blocks, layout.block_size, layout.block_stride, layout.token_stride),
            *(layout.kv_stride, layout.head_stride, call.first_head, len(call.known.addresses)),
            *(call.tokens, call.shards, call.num_heads, layout.kv_planes, layout.row_bytes),
            call.shard_stride,
        )
        index = array("q", fields)
        if len(indexes) >= _MAX_INDEXES:
            indexes.clear()
        indexes[key] = index
    return index


def _copy_permuted(function: Callable[..., int], call: CopyCall[PermutedLayout]) -> int:
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
