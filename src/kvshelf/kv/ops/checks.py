"""The checks of a call, before any memory is touched.

Owns :class:`CopyCall`, a checked call, and the bounded record of caches that have passed their
checks, which keeps no cache alive. Safe to call from any thread.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.ops import library

Layout = TypeVar("Layout", PagedLayout, PermutedLayout)


@dataclass(frozen=True, slots=True)
class Caches(Generic[Layout]):
    """Paged caches that have passed :func:`_check_caches` with a layout.

    Holds no strong references to the caches.
    """

    layout: Layout
    addresses: array[int]
    device: torch.device
    on_cpu: bool
    #: What the CPU's and the GPU's copies keep of earlier calls, by what differs between calls.
    indexes: dict[tuple[int, ...], array[int]]
    plans: dict[tuple[object, ...], object]
    references: tuple[weakref.ref[Tensor], ...]


@dataclass(eq=False, slots=True)  # not frozen: that would cost 2 µs per call
class CopyCall(Generic[Layout]):
    """A checked call, except for the slots' values. Never changed."""

    caches: Sequence[Tensor]
    slots: Tensor
    buffers: Tensor
    tokens: int
    shards: int
    shard_stride: int
    layout: Layout
    known: Caches[Layout]
    first_head: int
    num_heads: int
    starts: Sequence[int] = ()

    @property
    def shard_buffers(self) -> Tensor:
        """The buffers: [shards, bytes]."""
        return self.buffers if self.buffers.dim() == 2 else self.buffers.unsqueeze(0)


#: The ids of tensors; the integers of their layout, or it itself if it is a permuted one.
_Key: TypeAlias = tuple[tuple[int, ...], tuple[int, ...] | PermutedLayout]
#: Caches that were checked before. An entry is
#: removed when the first of its tensors is freed, so the ids are those of the same live objects.
#: The addresses are compared too, so a cache that was resized is checked again.
_known_caches: Final[dict[_Key, Caches[Any]]] = {}
#: The states of a model have several calls for each layer.
MAX_KNOWN: Final = 1024


def known_caches_of(
    caches: Sequence[Tensor], layout: Sequence[int] | PermutedLayout
) -> Caches[Any]:
    """Return caches with their layout, given as integers or permuted; check them once.

    Raises
    ------
    ValueError
        If they do not fit.
    """
    form = layout if isinstance(layout, PermutedLayout) else tuple(layout)
    key = (tuple(map(id, caches)), form)
    addresses = array("Q", [cache.data_ptr() for cache in caches])
    checked_caches = _known_caches.get(key)
    if checked_caches is None or checked_caches.addresses != addresses:
        checked_caches = _check_caches(caches, addresses, key)
    return checked_caches


def check_caches(caches: Sequence[Tensor], layout: PagedLayout | PermutedLayout) -> None:
    """Check, as every call does, that caches are of one kind and hold all that a layout reaches.

    Raises
    ------
    ValueError
        If they do not.
    """
    known_caches_of(caches, layout.as_ints() if isinstance(layout, PagedLayout) else layout)


def checked(
    caches: Sequence[Tensor],
    slots: Tensor,
    buffers: Tensor,
    form: Sequence[int] | PermutedLayout,
    first_head: int,
    num_heads: int,
    starts: Sequence[int] = (),
    *,
    gather: bool,
) -> CopyCall[Any]:
    """Check a call except for its slots' values; `form` is the layout, as integers or permuted.

    `starts` is empty, or has the first byte of each layer in a buffer.

    Raises
    ------
    ValueError
        If an argument does not fit.
    """
    name = "out" if gather else "chunk"
    if isinstance(form, PermutedLayout):
        _check_permuted(slots, buffers, name)
    known = known_caches_of(caches, form)
    layout = known.layout

    if not slots.is_cpu or slots.dtype != torch.int64 or slots.dim() != 1:
        raise ValueError(
            f"slot_mapping is {describe(slots)}; expected an int64 CPU tensor [tokens]"
        )
    if not slots.is_contiguous():
        raise ValueError(
            f"slot_mapping has strides {list(slots.stride())}; expected a contiguous tensor: "
            "pass slot_mapping.contiguous()"
        )
    shape = buffers.shape
    dimensions = len(shape)
    if buffers.device != known.device or buffers.dtype != torch.uint8 or not 1 <= dimensions <= 2:
        raise ValueError(
            f"{name} is {describe(buffers)}; expected a uint8 tensor [bytes] or [shards, bytes] on"
            f" {known.device}, where the caches are"
        )
    tokens, shards = slots.numel(), shape[0] if dimensions == 2 else 1
    if first_head < 0 or num_heads < 1 or first_head + shards * num_heads > layout.heads:
        raise ValueError(
            f"{_heads_text(shards, num_heads)} from head {first_head} on requested, but the cache "
            f"has heads 0 … {layout.heads - 1}; first_head and num_heads must name at least one of "
            "them"
        )
    of_layer = layout.chunk_bytes(tokens, num_heads)
    expected = len(caches) * of_layer
    if starts:
        expected = shape[-1]
        if len(starts) != len(caches) or min(starts) < 0 or max(starts) + of_layer > expected:
            raise ValueError(
                f"layers of {of_layer} bytes begin at {list(starts)} of {name}; expected one place"
                f" for each of {len(caches)} layers, within {expected} bytes"
            )
    elif shape[-1] != expected:
        raise ValueError(
            f"{name} has {shape[-1]} bytes; expected {expected} = {len(caches)} layers × "
            f"{layout.kv_planes} KV planes × {tokens} tokens × {num_heads} heads × "
            f"{layout.row_bytes} bytes"
        )
    if dimensions == 1 and buffers.is_contiguous():
        shard_stride = 0
    else:
        shard_stride = _check_buffers(buffers, name, expected)
    return CopyCall(
        caches,
        slots,
        buffers,
        tokens,
        shards,
        shard_stride,
        layout,
        known,
        first_head,
        num_heads,
        starts,
    )


def _heads_text(shards: int, num_heads: int) -> str:
    return f"{num_heads} heads" if shards == 1 else f"{shards} shards of {num_heads} heads"


def _check_buffers(buffers: Tensor, name: str, size: int) -> int:
    """Check that buffers are contiguous and disjoint; return the stride of shards."""
    strides = buffers.stride()
    if buffers.shape[-1] > 1 and strides[-1] != 1:
        raise ValueError(
            f"{name} has strides {list(strides)}; expected contiguous buffers: allocate them "
            "with torch.empty(shape, dtype=torch.uint8)"
        )
    if buffers.dim() == 1:
        return 0
    if buffers.shape[0] > 1 and strides[0] < size:
        raise ValueError(
            f"{name} has strides {list(strides)}, so that buffers of {size} bytes overlap; "
            "pass a tensor in which each buffer has its own memory"
        )
    return strides[0]


def _check_caches(
    caches: Sequence[Tensor],
    addresses: array[int],
    key: _Key,
) -> Caches[Any]:
    """Check that all caches are of one kind and contain all bytes that the layout uses."""
    form = key[1]
    layout: Any = form if isinstance(form, PermutedLayout) else PagedLayout.from_ints(form)
    if not caches:
        raise ValueError("caches is empty; expected the paged cache of at least one layer")
    first = caches[0]
    shape, strides, dtype, device = first.shape, first.stride(), first.dtype, first.device
    item = first.element_size()
    length = 0
    if first.numel():
        length = item * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
    extent = layout.extent
    if extent > length:
        raise ValueError(
            f"the layout reaches {extent} bytes into each cache, but they are {length} bytes long "
            f"({describe(first)} with strides {list(strides)}); make the layout from these caches"
        )
    for index, cache in enumerate(caches):
        if (
            cache.shape != shape
            or cache.dtype != dtype
            or cache.device != device
            or cache.stride() != strides
        ):
            raise ValueError(
                f"caches[{index}] is {describe(cache)} with strides {list(cache.stride())}, but "
                f"caches[0] is {describe(first)} with strides {list(strides)}; one call takes "
                "layers of one kind: call once for each kind"
            )
        start = cache.storage_offset() * item
        size = cache.untyped_storage().nbytes()
        if start + extent > size:
            raise ValueError(
                f"caches[{index}] reaches from byte {start} to {start + extent} of a storage of "
                f"only {size} bytes; its memory was released: bind the caches again"
            )

    def forget(_: object) -> None:
        _known_caches.pop(key, None)

    references = tuple(weakref.ref(cache, forget) for cache in caches)
    checked_caches = Caches(layout, addresses, device, first.is_cpu, {}, {}, references)
    if len(_known_caches) >= MAX_KNOWN:
        _known_caches.clear()
    _known_caches[key] = checked_caches
    return checked_caches


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype, shape and device as text."""
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def bad_slot_error(slot: int, position: int, layout: PagedLayout | PermutedLayout) -> ValueError:
    """Return the error about a slot that is not in the cache."""
    return ValueError(
        f"slot_mapping[{position}] is {slot}; expected −1 (skip) or 0 … {layout.num_slots - 1}: "
        f"the cache has {layout.num_blocks} blocks of {layout.block_size} slots"
    )


def check_slot_values(slots: Tensor, layout: PagedLayout | PermutedLayout) -> None:
    """Check by plain torch that each slot is −1 or one of the layout's."""
    bad = ((slots < -1) | (slots >= layout.num_slots)).nonzero()
    if len(bad):
        position = int(bad[0])
        raise bad_slot_error(int(slots[position]), position, layout)


def check_slots(slot_mapping: Tensor, layout: PagedLayout) -> None:
    """Check the slots of a mapping on the CPU, as every call does.

    Parameters
    ----------
    slot_mapping : Tensor
        int64, CPU, contiguous.
    layout : PagedLayout
        Of the caches that the slots are meant for.

    Raises
    ------
    ValueError
        If a slot is neither −1 nor one of the layout's slots.
    """
    if not slot_mapping.is_cpu or slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping is {describe(slot_mapping)}; expected an int64 CPU tensor")
    slots = slot_mapping.contiguous()
    compiled = library.compiled_library()
    if compiled is None:
        check_slot_values(slots, layout)
        return
    position = compiled.check_slots(slots.data_ptr(), slots.numel(), layout.num_slots)
    if position >= 0:
        raise bad_slot_error(int(slots.view(-1)[position]), position, layout)


def _check_permuted(slots: Tensor, buffer: Tensor, name: str) -> None:
    for tensor, argument, dtype in (
        (slots, "slot_mapping", torch.int64),
        (buffer, name, torch.uint8),
    ):
        if tensor.dim() != 1 or tensor.dtype != dtype:
            raise ValueError(
                f"{argument} is {describe(tensor)}; permuted caches take one chunk and one shard a "
                f"call: expected a one-dimensional {str(dtype)[6:]} tensor"
            )
