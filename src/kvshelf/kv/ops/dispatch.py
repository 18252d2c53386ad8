"""The operators ``kvshelf::gather_kv`` and ``scatter_kv``: their registration and their calls.

:mod:`kvshelf.kv.ops` states their contracts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.ops.checks import Call, check_slot_values, checked, known_caches_of
from kvshelf.kv.ops.choice import implementation, triton_copy
from kvshelf.kv.ops.compiled import run_compiled
from kvshelf.kv.ops.torch_copy import copy_torch

_LIBRARY: Final = cast(Any, torch.library).Library("kvshelf", "DEF")


def gather_kv(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    out: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int = 0,
    num_heads: int | None = None,
) -> None:
    """Copy the KV of tokens out of paged caches into buffers.

    Parameters
    ----------
    caches : sequence of Tensor
        One paged cache for each layer; all of the same shape, strides, dtype and device.
    slot_mapping : Tensor
        int64 [tokens] or [chunks, tokens], contiguous; each −1 or
        ``0 <= slot < layout.num_slots``. On the CPU.
    out : Tensor
        uint8 [bytes], [chunks, bytes] or [chunks, shards, bytes] with bytes = layers ×
        kv_planes × tokens × num_heads × row_bytes, each buffer contiguous, on the caches'
        device. Every byte is written; those of −1 slots become zero.
    layout : PagedLayout or PermutedLayout
        How rows lie in each cache.
    first_head : int, optional
        The first KV head to copy; it belongs to the first shard.
    num_heads : int, optional
        KV heads of each shard; when absent, all heads from ``first_head`` on.

    Raises
    ------
    ValueError
        If an argument does not fit; nothing has been written then.
    RuntimeError
        If the GPU or its driver fails.
    """
    _call(True, caches, slot_mapping, out, layout, first_head, num_heads)


def scatter_kv(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    chunk: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int = 0,
    num_heads: int | None = None,
) -> None:
    """Copy the KV of tokens from buffers into paged caches.

    Parameters
    ----------
    caches, layout, first_head, num_heads
        As for :func:`gather_kv`.
    slot_mapping : Tensor
        As for :func:`gather_kv`; −1 = skip. What a slot that occurs twice receives is not
        defined.
    chunk : Tensor
        As the buffers of :func:`gather_kv`.

    Raises
    ------
    ValueError, RuntimeError
        As for :func:`gather_kv`.
    """
    _call(False, caches, slot_mapping, chunk, layout, first_head, num_heads)


def _call(
    gather: bool,
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    buffers: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int,
    num_heads: int | None,
) -> None:
    heads = _heads_of_a_shard(layout, buffers, first_head, num_heads)
    if isinstance(layout, PermutedLayout):
        _copy(gather, caches, slot_mapping, buffers, layout, first_head, heads)
    elif _unwatched(buffers):
        _copy(gather, caches, slot_mapping, buffers, layout.as_ints(), first_head, heads)
    else:
        operators = torch.ops.kvshelf
        operator = operators.gather_kv if gather else operators.scatter_kv
        operator.default(caches, slot_mapping, buffers, layout.as_ints(), first_head, heads)


def _unwatched(chunk: Tensor) -> bool:
    """Whether no compiler, dispatch mode or tensor subclass observes the operator.

    Then it is called without torch's dispatcher, which takes as long as copying 100 KB, and
    longer for many caches on a GPU.
    """
    return (
        type(chunk) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
    )


def prepare(caches: Sequence[Tensor], layout: PagedLayout) -> None:
    """Check caches and load their implementation, so that the next call only copies.

    Parameters
    ----------
    caches : sequence of Tensor
        As for :func:`gather_kv`.
    layout : PagedLayout
        How rows lie in each cache.

    Raises
    ------
    ValueError
        If the caches are not of one kind or the layout reaches beyond them.
    """
    implementation(known_caches_of(caches, layout.as_ints()).device)


def _heads_of_a_shard(
    layout: PagedLayout | PermutedLayout, buffers: Tensor, first_head: int, num_heads: int | None
) -> int:
    if num_heads is not None:
        return num_heads
    if buffers.dim() != 3:
        return layout.heads - first_head
    shards = buffers.shape[1]
    left = layout.heads - first_head
    if shards < 1 or left % shards:
        raise ValueError(
            f"the buffers have {shards} shards, which do not divide the {left} heads from head "
            f"{first_head} on; pass num_heads, the heads of each shard"
        )
    return left // shards


def _copy(
    gather: bool,
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    buffers: Tensor,
    layout: Sequence[int] | PermutedLayout,
    first_head: int,
    num_heads: int,
) -> None:
    call = checked(caches, slot_mapping, buffers, layout, first_head, num_heads, gather=gather)
    if call.chunks == 1:
        _copy_chunk(gather, call)
        return
    # A bad slot of any chunk is found before anything is copied.
    check_slot_values(call.slots, call.layout)
    for part in call.parts():
        _copy_chunk(gather, part)


def _copy_chunk(gather: bool, call: Call[Any]) -> None:
    if run_compiled(call, gather=gather):
        return
    strided = isinstance(call.layout, PagedLayout)
    by_triton = triton_copy(call.known.device) if strided else None
    (copy_torch if by_triton is None else by_triton)(call, gather=gather)


def _fake(*_: object) -> None:
    """Shape function of both operators: they return nothing and only write."""


# The layout argument contains the caches' strides, so a compiler must pass the caches on with
# exactly these strides.
_TAGS: Final = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


for _gather, _form in (
    (True, "gather_kv(Tensor[] caches, Tensor slot_mapping, Tensor(a!) out"),
    (False, "scatter_kv(Tensor(a!)[] caches, Tensor slot_mapping, Tensor chunk"),
):
    _operator = _LIBRARY.define(
        f"{_form}, int[] layout, int first_head, int num_heads) -> ()", tags=_TAGS
    )
    _LIBRARY.impl(_operator, functools.partial(_copy, _gather), "CompositeExplicitAutograd")
    # Kernels of the meta device serve fake tensors, like ``torch.library.register_fake``, which
    # searches all loaded modules for the source of each function: 10 ms each at import.
    _LIBRARY.impl(_operator, _fake, "Meta")
