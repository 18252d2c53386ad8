"""The operators ``kvshelf::gather_kv`` and ``scatter_kv``: their registration and their calls.

:mod:`kvshelf.kv.ops` states their contracts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.ops import kernel, library
from kvshelf.kv.ops.checks import checked, known_caches_of
from kvshelf.kv.ops.compiled import run_compiled
from kvshelf.kv.ops.kernel import run_kernel
from kvshelf.kv.ops.torch_copy import copy_torch

Implementation: TypeAlias = Literal["cuda", "cpp", "torch"]


def gather_kv(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    out: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int = 0,
    num_heads: int | None = None,
    starts: Sequence[int] = (),
) -> None:
    """Copy the KV of tokens out of paged caches into buffers.

    Parameters
    ----------
    caches : sequence of Tensor
        One paged cache for each layer; all of the same shape, strides, dtype and device.
    slot_mapping : Tensor
        int64 [tokens], CPU, contiguous; each −1 or ``0 <= slot < layout.num_slots``.
    out : Tensor
        uint8 [bytes] or [shards, bytes] with bytes = layers × kv_planes × tokens × num_heads ×
        row_bytes, each buffer contiguous, on the caches' device. Every byte is written; those of
        −1 slots become zero.
    layout : PagedLayout or PermutedLayout
        How rows lie in each cache.
    first_head : int, optional
        The first KV head to copy; it belongs to the first shard.
    num_heads : int, optional
        KV heads of each shard; when absent, all heads from ``first_head`` on.
    starts : sequence of int, optional
        The first byte of each layer in a buffer, which may hold more than these layers. When
        absent, the layers follow each other, and fill it.

    Raises
    ------
    ValueError
        If an argument does not fit; nothing has been written then.
    RuntimeError
        If the GPU or its driver fails.
    """
    _call(True, caches, slot_mapping, out, layout, first_head, num_heads, starts)


def scatter_kv(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    chunk: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int = 0,
    num_heads: int | None = None,
    starts: Sequence[int] = (),
) -> None:
    """Copy the KV of tokens from buffers into paged caches.

    Parameters
    ----------
    caches, layout, first_head, num_heads, starts
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
    _call(False, caches, slot_mapping, chunk, layout, first_head, num_heads, starts)


def _call(
    gather: bool,
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    buffers: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int,
    num_heads: int | None,
    starts: Sequence[int],
) -> None:
    heads = _heads_of_a_shard(layout, buffers, first_head, num_heads)
    if isinstance(layout, PermutedLayout):
        _copy(gather, caches, slot_mapping, buffers, layout, first_head, heads)
    elif _unwatched(buffers):
        _copy(gather, caches, slot_mapping, buffers, layout.as_ints(), first_head, heads, starts)
    else:
        operators = torch.ops.kvshelf
        operator = operators.gather_kv if gather else operators.scatter_kv
        operator(caches, slot_mapping, buffers, layout.as_ints(), first_head, heads, starts)


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


def implementation(device: torch.device | str = "cpu") -> Implementation:
    """Return the implementation that is used for caches on a device now.

    Parameters
    ----------
    device : torch.device or str
        ``cpu``, ``cuda``, ``cuda:1``, …

    Raises
    ------
    ConfigError
        If ``KVSHELF_OPS`` has an unknown value, or names an implementation that is missing.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return "torch" if library.compiled_library() is None else "cpp"
    return "torch" if kernel.kernel_problem(device) else "cuda"


def prepare(caches: Sequence[Tensor], layout: PagedLayout) -> None:
    """Check caches, and begin to compile the kernel for their device.

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
    ConfigError
        If ``KVSHELF_OPS`` is ``cuda``, and the kernel cannot be used on their device.
    """
    kernel.prepare(known_caches_of(caches, layout.as_ints()).device)


def _heads_of_a_shard(
    layout: PagedLayout | PermutedLayout, buffers: Tensor, first_head: int, num_heads: int | None
) -> int:
    if num_heads is not None:
        return num_heads
    if buffers.dim() != 2:
        return layout.heads - first_head
    shards = buffers.shape[0]
    heads = layout.heads - first_head
    if shards < 1 or heads % shards:
        raise ValueError(
            f"the buffers have {shards} shards, which do not divide the {heads} heads from head "
            f"{first_head} on; pass num_heads, the heads of each shard"
        )
    return heads // shards


def _copy(
    gather: bool,
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    buffers: Tensor,
    layout: Sequence[int] | PermutedLayout,
    first_head: int,
    num_heads: int,
    starts: Sequence[int] = (),
) -> None:
    call = checked(
        caches, slot_mapping, buffers, layout, first_head, num_heads, starts, gather=gather
    )
    if call.known.on_cpu:
        if run_compiled(call, gather=gather):
            return
    elif isinstance(call.layout, PagedLayout) and run_kernel(call, gather=gather):
        return
    copy_torch(call, gather=gather)


_LAYOUT: Final = "int[] layout, int first_head, int num_heads, int[] starts) -> ()"
# The layout argument contains the caches' strides, so a compiler must pass the caches on with
# exactly these strides.
_TAGS: Final = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)


@torch.library.custom_op(
    "kvshelf::gather_kv",
    mutates_args=("out",),
    schema=f"(Tensor[] caches, Tensor slot_mapping, Tensor(a!) out, {_LAYOUT}",
    tags=_TAGS,
)
def _gather(*arguments: Any) -> None:
    _copy(True, *arguments)


@torch.library.custom_op(
    "kvshelf::scatter_kv",
    mutates_args=("caches",),
    schema=f"(Tensor(a!)[] caches, Tensor slot_mapping, Tensor chunk, {_LAYOUT}",
    tags=_TAGS,
)
def _scatter(*arguments: Any) -> None:
    _copy(False, *arguments)


# They return nothing and only write.
for _operator in (_gather, _scatter):
    _operator.register_fake(lambda *_: None)
