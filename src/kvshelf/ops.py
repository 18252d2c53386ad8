"""Gather and scatter between paged KV caches and chunk buffers.

Owns the torch.library operators ``kvshelf::gather_kv`` and ``kvshelf::scatter_kv`` for
strided caches, ``kvshelf::gather_permuted_kv`` and ``kvshelf::scatter_permuted_kv`` for
caches whose elements are permuted inside each (block, head), all their checks, and the
choice of what carries them out: CUDA kernels for strided caches on GPUs and the compiled
CPU twin for caches in host memory where they are installed, else plain torch.

One call copies one or several chunks of equally many tokens, and of each chunk one or
several shards of equally many heads. Each (chunk, shard) has a *buffer*: uint8 and
contiguous, for each layer [kvs, tokens, heads, row_bytes], layers one after another,
which is the payload of a shard's safetensors file. The buffers of a call are one tensor:
``[bytes]``, ``[chunks, bytes]`` or ``[chunks, shards, bytes]``. For permuted caches a call
copies one chunk into one buffer.

Contracts
---------
* Everything is checked before anything is touched: after a ``ValueError`` neither
  caches nor buffers have changed, whatever implementation is in use.
* Slot −1 means "skip this token": its place in the buffer of a gather becomes zero, a
  scatter writes nothing for it.
* Slot mappings are CPU tensors and are checked with all else. With ``bad_slot`` they lie
  on the caches' device, where they can only be checked while they are used: a slot that
  is not in the cache is treated as −1, and ``bad_slot`` says so.
* A slot that occurs twice in a scatter gets the row of one of its tokens, which one
  (or which mixture of them) is not defined; nothing else is harmed.
* The caches, the slot mapping and the buffers must not share memory.
* On a GPU a call is enqueued on torch's current stream, waits for nothing, allocates
  nothing there, and can be captured in a CUDA graph (:func:`prepare` first, outside the
  capture). A slot mapping on the CPU is part of what is enqueued: it may change
  afterwards, and a captured graph keeps it. Plain torch on a GPU may wait and allocate,
  and cannot be captured.
* For caches on a GPU the buffers may lie in page-locked host memory where a block is
  contiguous: then the copy engine carries the call out, without a kernel. They belong to
  the call until the stream has passed it.
* Any thread may call. Shared are only the choice of implementation and a bounded record
  of which caches have passed the checks; neither keeps a cache alive. The compiled
  implementations release the GIL while they copy.
* Importing this module loads no compiler, no CUDA and not the compiled library;
  :func:`implementation` or the first call loads the latter.

The environment variable ``KVSHELF_OPS`` (``auto``, ``cpp``, ``cuda``, ``torch``)
overrides the choice; it is read once.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from kvshelf.errors import ConfigError
from kvshelf.layout import PagedLayout, PermutedLayout

logger = logging.getLogger(__name__)

Implementation: TypeAlias = Literal["cuda", "cpp", "torch"]

#: Version of the functions that the compiled library exports. A library of another
#: version (left behind by an older install) is not used.
_LIBRARY_VERSION: Final = 3
_LIBRARY_NAME: Final = "libkvshelf_ops.so"

_NO_FLAG: Final = "bad_slot is not for permuted caches: their slot mappings lie on the CPU"

#: Types of devices that the kernels serve.
_KERNEL_DEVICES: frozenset[str] = frozenset({"cuda"})

#: Tokens of each thread of a kernel; 0: the library chooses.
_KERNEL_STEPS: int = 0

_LIBRARY: Final = cast(Any, torch.library).Library("kvshelf", "DEF")


def gather_kv(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    out: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int = 0,
    num_heads: int | None = None,
    *,
    bad_slot: Tensor | None = None,
) -> None:
    """Copy the KV of tokens out of paged caches into buffers.

    Parameters
    ----------
    caches : sequence of Tensor
        One paged cache for each layer; all of the same shape, strides, dtype and device.
    slot_mapping : Tensor
        int64 [tokens] or [chunks, tokens], contiguous; each −1 or
        ``0 <= slot < layout.num_slots``. On the CPU; with ``bad_slot`` on the caches'
        device.
    out : Tensor
        uint8 [bytes], [chunks, bytes] or [chunks, shards, bytes] with bytes = layers ×
        kvs × tokens × num_heads × row_bytes, each buffer contiguous, on the caches'
        device, or, where a block is contiguous, in page-locked host memory. Every byte
        is written; those of −1 slots become zero.
    layout : PagedLayout or PermutedLayout
        How rows lie in each cache.
    first_head : int, optional
        The first KV head to copy; it goes to the first shard.
    num_heads : int, optional
        KV heads of each shard; when absent, all heads from ``first_head`` on.
    bad_slot : Tensor, optional
        int64 [1] on the caches' device; not for permuted caches. Set to 1 + the
        position, in the flattened slot mapping, of one of the slots that are not in the
        cache; untouched when all are.

    Raises
    ------
    ValueError
        If an argument does not fit; nothing has been written then.
    RuntimeError
        If the GPU or its driver fails.
    """
    heads = _heads_of_a_shard(layout, out, first_head, num_heads)
    if isinstance(layout, PermutedLayout):
        if bad_slot is not None:
            raise ValueError(_NO_FLAG)
        sizes, tables = permuted_tables(layout)
        torch.ops.kvshelf.gather_permuted_kv.default(
            caches, slot_mapping, out, tables, sizes, first_head, heads
        )
        return
    gather = _gather if _unwatched(out) else torch.ops.kvshelf.gather_kv.default
    gather(caches, slot_mapping, out, layout.as_ints(), first_head, heads, bad_slot)


def scatter_kv(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    chunk: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int = 0,
    num_heads: int | None = None,
    *,
    bad_slot: Tensor | None = None,
) -> None:
    """Copy the KV of tokens from buffers into paged caches.

    Parameters
    ----------
    caches : sequence of Tensor
        One paged cache for each layer; all of the same shape, strides, dtype and device.
    slot_mapping : Tensor
        int64 [tokens] or [chunks, tokens], contiguous; each −1 (skip) or ``0 <= slot <
        layout.num_slots``. On the CPU; with ``bad_slot`` on the caches' device. What a
        slot that occurs twice receives is not defined.
    chunk : Tensor
        uint8 [bytes], [chunks, bytes] or [chunks, shards, bytes] with bytes = layers ×
        kvs × tokens × num_heads × row_bytes, each buffer contiguous, on the caches'
        device, or, where a block is contiguous, in page-locked host memory.
    layout : PagedLayout or PermutedLayout
        How rows lie in each cache.
    first_head : int, optional
        The first KV head to copy; it comes from the first shard.
    num_heads : int, optional
        KV heads of each shard; when absent, all heads from ``first_head`` on.
    bad_slot : Tensor, optional
        int64 [1] on the caches' device; not for permuted caches. Set to 1 + the
        position, in the flattened slot mapping, of one of the slots that are not in the
        cache; untouched when all are.

    Raises
    ------
    ValueError
        If an argument does not fit; nothing has been written then.
    RuntimeError
        If the GPU or its driver fails.
    """
    heads = _heads_of_a_shard(layout, chunk, first_head, num_heads)
    if isinstance(layout, PermutedLayout):
        if bad_slot is not None:
            raise ValueError(_NO_FLAG)
        sizes, tables = permuted_tables(layout)
        torch.ops.kvshelf.scatter_permuted_kv.default(
            caches, slot_mapping, chunk, tables, sizes, first_head, heads
        )
        return
    scatter = _scatter if _unwatched(chunk) else torch.ops.kvshelf.scatter_kv.default
    scatter(caches, slot_mapping, chunk, layout.as_ints(), first_head, heads, bad_slot)


def _unwatched(chunk: Tensor) -> bool:
    """Whether neither a compiler nor a mode nor a subclass wants to see the operator.

    Then it is called without torch's dispatcher, which takes as long as copying 100 KB.
    """
    return (
        type(chunk) is Tensor
        and chunk.is_cpu
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
    )


@functools.lru_cache(maxsize=64)
def permuted_tables(layout: PermutedLayout) -> tuple[tuple[int, ...], Tensor]:
    """Return what the operators for permuted caches take in place of a layout.

    Returns
    -------
    sizes : tuple of int
        block_size, block_stride, head_stride, kvs, heads, row_bytes, num_blocks,
        region_bytes, unit_k, unit_v; strides and units in bytes, unit_v 0 where there is
        no V.
    tables : Tensor
        int32, one-dimensional. For each kv [block_size, row_bytes / unit], how many bytes
        behind the first one of its (block, head) each unit of a token's row starts. A unit
        is as long as neighbours in a row are neighbours in the cache as well.
    """
    units = [0, 0]
    tables = []
    with torch.inference_mode(False):
        for kv, rows in enumerate(layout.positions()):
            elements = next(
                count
                for count in range(layout.head_size, 0, -1)
                if layout.head_size % count == 0 and _in_runs(rows, count)
            )
            units[kv] = elements * layout.item_bytes
            tables.append((rows[:, ::elements] * layout.item_bytes).reshape(-1))
        joined = torch.cat(tables)
    return (
        layout.block_size,
        layout.block_stride,
        layout.head_stride,
        layout.kvs,
        layout.heads,
        layout.row_bytes,
        layout.num_blocks,
        layout.region_bytes,
        units[0],
        units[1],
    ), joined


def _in_runs(rows: Tensor, count: int) -> bool:
    runs = rows.view(rows.shape[0], -1, count)
    return torch.equal(runs, runs[:, :, :1] + torch.arange(count, dtype=runs.dtype))


def implementation(device: torch.device | str = "cpu") -> Implementation:
    """Tell what carries out calls on caches of a device.

    Parameters
    ----------
    device : torch.device or str
        ``cpu``, ``cuda``, ``cuda:1``, …

    Raises
    ------
    ConfigError
        If ``KVSHELF_OPS`` has an unknown value, or asks for what is not there.
    """
    device = torch.device(device)
    if device.type in _KERNEL_DEVICES:
        return "torch" if _kernels(device.index) is None else "cuda"
    if device.type == "cpu":
        return "torch" if _library() is None else "cpp"
    return "torch"


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """What the kernels for GPUs in the compiled library were built with and for.

    Attributes
    ----------
    toolkit : str
        Version of CUDA, as ``13.0``.
    architectures : str
        As ``80-real 90-real 100``: machine code for compute capability 8.0 to 10.0,
        and PTX of 10.0 for what comes after.
    """

    toolkit: str
    architectures: str


def kernel_build() -> KernelBuild | None:
    """Tell how the kernels were built; None where there are none.

    Raises
    ------
    ConfigError
        If ``KVSHELF_OPS`` has an unknown value, or asks for what is not there.
    """
    library = _library()
    if library is None or library.device is None:
        return None
    version = library.device.toolkit()
    return KernelBuild(f"{version // 1000}.{version % 1000 // 10}", library.device.architectures())


def kernel_problem(device: torch.device | str = "cuda") -> str | None:
    """Tell why the kernels do not serve a device, in words; None when they do."""
    _kernels(torch.device(device).index)
    return _kernel_problems.get(_kernel_device(torch.device(device).index))


def check_slots(slot_mapping: Tensor, layout: PagedLayout) -> None:
    """Check the slots of a mapping on the CPU, as every call without ``bad_slot`` does.

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
        raise ValueError(f"slot_mapping is {_describe(slot_mapping)}; expected an int64 CPU tensor")
    slots = slot_mapping.contiguous()
    library = _library()
    if library is not None:
        position = library.check_slots(slots.data_ptr(), slots.numel(), layout.num_slots)
    else:
        bad = ((slots < -1) | (slots >= layout.num_slots)).view(-1)
        position = int(bad.nonzero()[0]) if bad.any() else -1
    if position >= 0:
        raise _bad_slot(int(slots.view(-1)[position]), position, layout)


def blocks_in_one_piece(layout: PagedLayout, num_heads: int) -> bool:
    """Tell whether K and V of `num_heads` heads of a block each lie in one piece in the cache.

    Then buffers may lie in page-locked host memory while the caches are on a GPU.
    """
    return (num_heads == 1 or layout.head_stride == layout.row_bytes) and (
        layout.block_size == 1 or layout.token_stride == num_heads * layout.row_bytes
    )


def prepare(caches: Sequence[Tensor], layout: PagedLayout) -> None:
    """Check caches and load what serves them, so that the next call has only to copy.

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
    known = _known(caches, layout.as_ints(), PagedLayout.from_ints)
    if known.kernels:
        _kernels(known.device.index)
    else:
        _library()


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


# --- checks ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PermutedSizes:
    """The `sizes` of :func:`permuted_tables`, checked."""

    block_size: int
    block_stride: int
    head_stride: int
    kvs: int
    heads: int
    row_bytes: int
    num_blocks: int
    region_bytes: int
    unit_k: int
    unit_v: int

    @classmethod
    def from_ints(cls, values: Sequence[int]) -> _PermutedSizes:
        if len(values) != len(_PERMUTED_SIZES):
            raise ValueError(
                f"sizes are {len(_PERMUTED_SIZES)} integers ({', '.join(_PERMUTED_SIZES)}), found "
                f"{len(values)}: pass those of permuted_tables()"
            )
        sizes = cls(*values)
        units = (sizes.unit_k, sizes.unit_v)[: sizes.kvs]
        if (
            min(sizes.block_size, sizes.heads, sizes.row_bytes, sizes.region_bytes, *units) < 1
            or sizes.kvs not in (1, 2)
            or min(sizes.num_blocks, sizes.block_stride, sizes.head_stride) < 0
            or any(sizes.row_bytes % unit for unit in units)
        ):
            raise ValueError(
                f"{sizes} do not describe a permuted cache: pass those of permuted_tables()"
            )
        return sizes

    @property
    def units(self) -> tuple[int, ...]:
        return (self.unit_k, self.unit_v)[: self.kvs]

    @property
    def table_entries(self) -> int:
        return sum(self.block_size * (self.row_bytes // unit) for unit in self.units)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def extent(self) -> int:
        if self.num_blocks == 0:
            return 0
        last = (self.num_blocks - 1) * self.block_stride + (self.heads - 1) * self.head_stride
        return last + self.region_bytes

    def chunk_bytes(self, tokens: int, num_heads: int) -> int:
        return self.kvs * tokens * num_heads * self.row_bytes


_Layout = TypeVar("_Layout", PagedLayout, _PermutedSizes)
_PERMUTED_SIZES: Final = tuple(_PermutedSizes.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class _Caches(Generic[_Layout]):
    """Paged caches that have passed :func:`_check_caches` together with a layout.

    Holds no strong reference to them.
    """

    layout: _Layout
    addresses: array[int]
    device: torch.device
    on_cpu: bool
    kernels: bool  # kernels serve such caches on their device
    indexes: dict[tuple[int, ...], array[int]]  # of earlier calls, by what differs between calls
    anchor: Tensor  # empty, on their device
    references: tuple[weakref.ref[Tensor], ...]


@dataclass(eq=False, slots=True)  # not frozen: that alone would take 2 µs of each call
class _Call(Generic[_Layout]):
    """A checked call, except for the slots' values. Never changed."""

    caches: Sequence[Tensor]
    slots: Tensor
    buffers: Tensor
    bad_slot: Tensor | None
    chunks: int
    tokens: int
    shards: int
    chunk_stride: int
    shard_stride: int
    layout: _Layout
    known: _Caches[_Layout]
    first_head: int
    num_heads: int
    to_host: bool  # the caches are on a GPU, the buffers in host memory

    def buffer(self, chunk: int, shard: int) -> Tensor:
        """Return the one-dimensional buffer of a chunk and a shard."""
        if self.buffers.dim() == 1:
            return self.buffers
        of_chunk = self.buffers[chunk]
        return of_chunk if of_chunk.dim() == 1 else of_chunk[shard]


#: Caches that were checked before, by the ids of the tensors and the layout's integers. An entry
#: goes when the first of its tensors does, so the ids are those of the same living objects; the
#: addresses are compared as well, which leaves nothing that could have shrunk meanwhile.
_known_caches: Final[dict[tuple[tuple[int, ...], tuple[int, ...]], _Caches[Any]]] = {}
_MAX_KNOWN: Final = 64


def _known(
    caches: Sequence[Tensor],
    layout_ints: Sequence[int],
    parse: Callable[[Sequence[int]], _Layout],
) -> _Caches[_Layout]:
    key = (tuple(map(id, caches)), tuple(layout_ints))
    addresses = array("q", [cache.data_ptr() for cache in caches])
    known: _Caches[_Layout] | None = _known_caches.get(key)
    if known is None or known.addresses != addresses:
        known = _check_caches(caches, addresses, key, parse)
    return known


def _checked(
    caches: Sequence[Tensor],
    slots: Tensor,
    buffers: Tensor,
    name: str,
    layout_ints: Sequence[int],
    first_head: int,
    num_heads: int,
    bad_slot: Tensor | None,
    parse: Callable[[Sequence[int]], _Layout],
) -> _Call[_Layout]:
    known = _known(caches, layout_ints, parse)
    layout = known.layout

    if bad_slot is None:
        if not slots.is_cpu or slots.dtype != torch.int64 or slots.dim() not in (1, 2):
            raise ValueError(
                f"slot_mapping is {_describe(slots)}; expected an int64 CPU tensor [tokens] or "
                "[chunks, tokens]; to use one on a device, pass bad_slot"
            )
    else:
        for tensor, what in ((slots, "slot_mapping"), (bad_slot, "bad_slot")):
            if tensor.device != known.device or tensor.dtype != torch.int64:
                raise ValueError(
                    f"{what} is {_describe(tensor)}; with bad_slot, both are int64 tensors on "
                    f"{known.device}, where the caches are"
                )
        if slots.dim() not in (1, 2) or bad_slot.numel() != 1:
            raise ValueError(
                f"slot_mapping is {_describe(slots)} and bad_slot {_describe(bad_slot)}; expected "
                "[tokens] or [chunks, tokens], and [1]"
            )
    if not slots.is_contiguous():
        raise ValueError(
            f"slot_mapping has strides {list(slots.stride())}; expected a contiguous tensor: "
            "pass slot_mapping.contiguous()"
        )
    to_host = known.kernels and _in_host_memory(buffers, known)
    shape = buffers.shape
    dimensions = len(shape)
    if (
        not (to_host or buffers.device == known.device)
        or buffers.dtype != torch.uint8
        or not 1 <= dimensions <= 3
    ):
        raise ValueError(
            f"{name} is {_describe(buffers)}; expected a uint8 tensor [bytes], [chunks, bytes] or "
            f"[chunks, shards, bytes] on {known.device}, where the caches are"
        )
    chunks, tokens = (1, slots.numel()) if slots.dim() == 1 else slots.shape
    shards = shape[1] if dimensions == 3 else 1
    if (shape[0] if dimensions > 1 else 1) != chunks:
        raise ValueError(
            f"{name} is {_describe(buffers)}, but slot_mapping is {_describe(slots)}: there is one "
            f"buffer for each chunk, so expected {chunks} of them"
        )
    if first_head < 0 or num_heads < 1 or first_head + shards * num_heads > layout.heads:
        raise ValueError(
            f"{_heads_text(shards, num_heads)} from head {first_head} on asked for, but the cache "
            f"has heads 0 … {layout.heads - 1}; first_head and num_heads must name at least one of "
            "them"
        )
    expected = len(caches) * layout.chunk_bytes(tokens, num_heads)
    if shape[-1] != expected:
        raise ValueError(
            f"{name} has {shape[-1]} bytes; expected {expected} = {len(caches)} layers × "
            f"{layout.kvs} kvs × {tokens} tokens × {num_heads} heads × {layout.row_bytes} bytes"
        )
    if dimensions == 1 and buffers.is_contiguous():
        chunk_stride = shard_stride = 0
    else:
        chunk_stride, shard_stride = _check_buffers(buffers, name, expected)
    if to_host and isinstance(layout, PagedLayout):
        _check_host_buffers(buffers, name, layout, num_heads, bad_slot)
    return _Call(
        caches,
        slots,
        buffers,
        bad_slot,
        chunks,
        tokens,
        shards,
        chunk_stride,
        shard_stride,
        layout,
        known,
        first_head,
        num_heads,
        to_host,
    )


def _in_host_memory(buffers: Tensor, known: _Caches[Any]) -> bool:
    return buffers.is_cpu and known.device.type != "cpu"


def _heads_text(shards: int, num_heads: int) -> str:
    return f"{num_heads} heads" if shards == 1 else f"{shards} shards of {num_heads} heads"


def _check_buffers(buffers: Tensor, name: str, size: int) -> tuple[int, int]:
    """Check that buffers are contiguous and apart; return the strides of chunks and shards."""
    strides = buffers.stride()
    if buffers.shape[-1] > 1 and strides[-1] != 1:
        raise ValueError(
            f"{name} has strides {list(strides)}; expected contiguous buffers: allocate them "
            "with torch.empty(shape, dtype=torch.uint8)"
        )
    if buffers.dim() == 1:
        return 0, 0
    end = size
    for stride, count in sorted(zip(strides[:-1], buffers.shape[:-1], strict=True)):
        if count > 1 and stride < end:
            raise ValueError(
                f"{name} has strides {list(strides)}, so that buffers of {size} bytes overlap; "
                "pass a tensor in which each buffer has its own memory"
            )
        end += max(0, count - 1) * stride
    return (strides[0], 0) if buffers.dim() == 2 else (strides[0], strides[1])


def _check_host_buffers(
    buffers: Tensor, name: str, layout: PagedLayout, num_heads: int, bad_slot: Tensor | None
) -> None:
    if not blocks_in_one_piece(layout, num_heads):
        raise ValueError(
            f"{name} is in host memory, but what is copied of a block is not contiguous in the "
            "cache: gather into a buffer on the device and copy that, or the other way round"
        )
    if bad_slot is not None:
        raise ValueError(
            f"{name} is in host memory: copies are planned on the host, so slot_mapping must be "
            "there as well and bad_slot absent"
        )
    if not buffers.is_pinned():
        raise ValueError(
            f"{name} is in host memory that is not page-locked, so copies would not run beside "
            "anything else: allocate it with pin_memory=True"
        )


def _check_caches(
    caches: Sequence[Tensor],
    addresses: array[int],
    key: tuple[tuple[int, ...], tuple[int, ...]],
    parse: Callable[[Sequence[int]], _Layout],
) -> _Caches[_Layout]:
    """Check that all caches are of one kind and hold all that the layout reaches."""
    layout = parse(key[1])
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
            f"({_describe(first)} with strides {list(strides)}); make the layout from these caches"
        )
    for index, cache in enumerate(caches):
        if (
            cache.shape != shape
            or cache.dtype != dtype
            or cache.device != device
            or cache.stride() != strides
        ):
            raise ValueError(
                f"caches[{index}] is {_describe(cache)} with strides {list(cache.stride())}, but "
                f"caches[0] is {_describe(first)} with strides {list(strides)}; one call takes "
                "layers of one kind: call once for each kind"
            )
        start = cache.storage_offset() * item
        size = cache.untyped_storage().nbytes()
        if start + extent > size:
            raise ValueError(
                f"caches[{index}] reaches from byte {start} to {start + extent} of a storage of "
                f"only {size} bytes; its memory has been given back, bind the caches anew"
            )

    def forget(_: object) -> None:
        _known_caches.pop(key, None)

    references = tuple(weakref.ref(cache, forget) for cache in caches)
    kernels = device.type in _KERNEL_DEVICES and not isinstance(layout, _PermutedSizes)
    anchor = torch.empty(0, dtype=torch.uint8, device=device)
    known = _Caches(layout, addresses, device, first.is_cpu, kernels, {}, anchor, references)
    if len(_known_caches) >= _MAX_KNOWN:
        _known_caches.clear()
    _known_caches[key] = known
    return known


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _bad_slot(slot: int, position: int, layout: PagedLayout | _PermutedSizes) -> ValueError:
    return ValueError(
        f"slot_mapping[{position}] is {slot}; expected −1 (skip) or 0 … {layout.num_slots - 1}: "
        f"the cache has {layout.num_blocks} blocks of {layout.block_size} slots"
    )


# --- the operators -----------------------------------------------------------------


def _gather(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    out: Tensor,
    layout: Sequence[int],
    first_head: int,
    num_heads: int,
    bad_slot: Tensor | None = None,
) -> None:
    call = _checked(
        caches,
        slot_mapping,
        out,
        "out",
        layout,
        first_head,
        num_heads,
        bad_slot,
        PagedLayout.from_ints,
    )
    if not _run_compiled(call, gather=True):
        _gather_torch(call)


def _scatter(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    chunk: Tensor,
    layout: Sequence[int],
    first_head: int,
    num_heads: int,
    bad_slot: Tensor | None = None,
) -> None:
    call = _checked(
        caches,
        slot_mapping,
        chunk,
        "chunk",
        layout,
        first_head,
        num_heads,
        bad_slot,
        PagedLayout.from_ints,
    )
    if not _run_compiled(call, gather=False):
        _scatter_torch(call)


def _gather_permuted(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    out: Tensor,
    tables: Tensor,
    sizes: Sequence[int],
    first_head: int,
    num_heads: int,
) -> None:
    call = _checked_permuted(caches, slot_mapping, out, "out", tables, sizes, first_head, num_heads)
    library = _library() if call.known.on_cpu else None
    if library is not None:
        _call_library_permuted(library.gather_permuted, call, tables)
    else:
        _gather_permuted_torch(call, tables)


def _scatter_permuted(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    chunk: Tensor,
    tables: Tensor,
    sizes: Sequence[int],
    first_head: int,
    num_heads: int,
) -> None:
    call = _checked_permuted(
        caches, slot_mapping, chunk, "chunk", tables, sizes, first_head, num_heads
    )
    library = _library() if call.known.on_cpu else None
    if library is not None:
        _call_library_permuted(library.scatter_permuted, call, tables)
    else:
        _scatter_permuted_torch(call, tables)


def _checked_permuted(
    caches: Sequence[Tensor],
    slots: Tensor,
    buffer: Tensor,
    name: str,
    tables: Tensor,
    sizes: Sequence[int],
    first_head: int,
    num_heads: int,
) -> _Call[_PermutedSizes]:
    for tensor, what, dtype in ((slots, "slot_mapping", torch.int64), (buffer, name, torch.uint8)):
        if tensor.dim() != 1 or tensor.dtype != dtype:
            raise ValueError(
                f"{what} is {_describe(tensor)}; permuted caches take one chunk and one shard a "
                f"call: expected a one-dimensional {str(dtype)[6:]} tensor"
            )
    parse = _PermutedSizes.from_ints
    call = _checked(caches, slots, buffer, name, sizes, first_head, num_heads, None, parse)
    _check_tables(tables, call.layout)
    return call


def _check_tables(tables: Tensor, sizes: _PermutedSizes) -> None:
    """Check that a permutation's tables have their form and stay inside a (block, head)."""
    if not tables.is_cpu or tables.dtype != torch.int32 or tables.dim() != 1:
        raise ValueError(
            f"tables is {_describe(tables)}; expected a one-dimensional int32 CPU tensor: pass "
            "that of permuted_tables()"
        )
    if not tables.is_contiguous() or tables.numel() != sizes.table_entries:
        raise ValueError(
            f"tables has {tables.numel()} entries with stride {tables.stride(0)}; expected "
            f"{sizes.table_entries} contiguous ones: pass that of permuted_tables()"
        )
    first = 0
    for unit in sizes.units:
        count = sizes.block_size * (sizes.row_bytes // unit)
        low, high = torch.aminmax(tables[first : first + count])
        if int(low) < 0 or int(high) + unit > sizes.region_bytes:
            raise ValueError(
                f"tables reach from byte {int(low)} to {int(high) + unit} of a (block, head) of "
                f"{sizes.region_bytes} bytes: pass that of permuted_tables()"
            )
        first += count


def _fake_permuted(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    chunk: Tensor,
    tables: Tensor,
    sizes: Sequence[int],
    first_head: int,
    num_heads: int,
) -> None:
    """Shape function of both operators: they return nothing and only write."""


def _fake(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    chunk: Tensor,
    layout: Sequence[int],
    first_head: int,
    num_heads: int,
    bad_slot: Tensor | None = None,
) -> None:
    """Shape function of both operators: they return nothing and only write."""


# The layout argument holds the caches' strides, so a compiler must hand the caches over
# exactly as it got them.
_TAGS: Final = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)
_LIBRARY.define(
    "gather_kv(Tensor[] caches, Tensor slot_mapping, Tensor(a!) out, int[] layout, "
    "int first_head, int num_heads, Tensor(b!)? bad_slot=None) -> ()",
    tags=_TAGS,
)
_LIBRARY.define(
    "scatter_kv(Tensor(a!)[] caches, Tensor slot_mapping, Tensor chunk, int[] layout, "
    "int first_head, int num_heads, Tensor(b!)? bad_slot=None) -> ()",
    tags=_TAGS,
)
_LIBRARY.define(
    "gather_permuted_kv(Tensor[] caches, Tensor slot_mapping, Tensor(a!) out, Tensor tables, "
    "int[] sizes, int first_head, int num_heads) -> ()",
    tags=_TAGS,
)
_LIBRARY.define(
    "scatter_permuted_kv(Tensor(a!)[] caches, Tensor slot_mapping, Tensor chunk, Tensor tables, "
    "int[] sizes, int first_head, int num_heads) -> ()",
    tags=_TAGS,
)
_LIBRARY.impl("gather_kv", _gather, "CompositeExplicitAutograd")
_LIBRARY.impl("scatter_kv", _scatter, "CompositeExplicitAutograd")
_LIBRARY.impl("gather_permuted_kv", _gather_permuted, "CompositeExplicitAutograd")
_LIBRARY.impl("scatter_permuted_kv", _scatter_permuted, "CompositeExplicitAutograd")
# As kernels of the meta device these serve fake tensors like ``torch.library.register_fake``,
# which would look through all loaded modules for the source of each: 10 ms apiece at import.
_LIBRARY.impl("gather_kv", _fake, "Meta")
_LIBRARY.impl("scatter_kv", _fake, "Meta")
_LIBRARY.impl("gather_permuted_kv", _fake_permuted, "Meta")
_LIBRARY.impl("scatter_permuted_kv", _fake_permuted, "Meta")


# --- the compiled library ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DeviceFunctions:
    """Functions for caches on a device; see cuda/src/binding_device.cc for their arguments."""

    gather: Callable[..., int]
    scatter: Callable[..., int]
    copy_out: Callable[..., int]
    copy_in: Callable[..., int]
    count: Callable[[], int]
    kernel: Callable[[int, bool, int, int], int]
    toolkit: Callable[[], int]
    architectures: Callable[[], str]


@dataclass(frozen=True, slots=True)
class _Library:
    """Functions of the compiled library; see cuda/src/binding.cc for their arguments."""

    path: Path
    gather: Callable[..., int]
    scatter: Callable[..., int]
    gather_permuted: Callable[..., int]
    scatter_permuted: Callable[..., int]
    check_slots: Callable[[int, int, int], int]
    device: _DeviceFunctions | None


def _choice() -> str:
    choice = os.environ.get("KVSHELF_OPS", "auto") or "auto"
    if choice not in ("auto", "cpp", "cuda", "torch"):
        raise ConfigError(f"KVSHELF_OPS is {choice!r}; expected auto, cpp, cuda or torch")
    return choice


@functools.lru_cache(maxsize=1)
def _library() -> _Library | None:
    choice = _choice()
    if choice == "torch":
        logger.info("gather and scatter on cpu: torch, by KVSHELF_OPS")
        return None
    problem = "it is not installed (no C++ compiler was found when kvshelf was installed)"
    for path in _library_paths():
        try:
            library = _load_library(path)
        except Exception as error:  # noqa: BLE001  whatever a broken library raises, torch can do it
            problem = f"{path} cannot be used: {error}"
            if choice == "auto":
                warnings.warn(
                    f"kvshelf's compiled copy functions {problem}; using plain torch, which is "
                    "slower. Reinstall kvshelf to rebuild them, or set KVSHELF_OPS=torch to "
                    "silence this",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None
        else:
            logger.info("gather and scatter on cpu: cpp, %s", path)
            return library
    if choice != "auto":
        raise ConfigError(
            f"KVSHELF_OPS={choice} asks for kvshelf's compiled library, but {problem}; reinstall "
            "kvshelf where a C++ compiler is, or unset KVSHELF_OPS"
        )
    logger.info("gather and scatter on cpu: torch, the compiled library is not installed")
    return None


def _library_paths() -> list[Path]:
    # In an editable install the Python files lie in the repository and the library in
    # site-packages; the package's __path__ names both.
    import kvshelf

    paths = [Path(entry) / _LIBRARY_NAME for entry in kvshelf.__path__]
    return [path for path in paths if path.is_file()]


def _load_library(path: Path) -> _Library:
    import tvm_ffi

    module = tvm_ffi.load_module(path)
    version = module.get_function("version")()
    if version != _LIBRARY_VERSION:
        raise RuntimeError(f"it has version {version}, expected {_LIBRARY_VERSION}")
    function = module.get_function
    device = None
    if module.implements_function("device_gather"):
        device = _DeviceFunctions(
            gather=function("device_gather"),
            scatter=function("device_scatter"),
            copy_out=function("device_copy_out"),
            copy_in=function("device_copy_in"),
            count=function("device_count"),
            kernel=function("device_kernel"),
            toolkit=function("device_toolkit"),
            architectures=function("device_architectures"),
        )
    return _Library(
        path,
        function("gather"),
        function("scatter"),
        function("gather_permuted"),
        function("scatter_permuted"),
        function("check_slots"),
        device,
    )


#: Why the kernels do not serve a device, by its index.
_kernel_problems: Final[dict[int, str]] = {}
_WIDTHS: Final = (16, 8, 4, 2, 1)


def _kernel_device(index: int | None) -> int:
    if index is not None:
        return index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _kernels(index: int | None) -> _Library | None:
    """Return the library if its kernels serve this device; the first call loads them."""
    return _load_kernels(_kernel_device(index))


@functools.cache
def _load_kernels(index: int) -> _Library | None:
    library = _library()
    choice = _choice()
    name = f"cuda:{index}"
    if library is None:
        problem = "the compiled library is not used"
    elif library.device is None:
        problem = "the compiled library was built without a CUDA compiler"
    else:
        try:
            if index >= library.device.count():
                raise RuntimeError("there is no such device")
            for gather in (True, False):
                for width in _WIDTHS:
                    code = library.device.kernel(index, gather, width, 3)
        except RuntimeError as error:
            problem = str(error).strip()
        else:
            logger.info(
                "gather and scatter on %s: cuda, machine code of sm_%d, built for %s",
                name,
                code,
                library.device.architectures(),
            )
            return library
    _kernel_problems[index] = problem
    if choice == "cuda":
        raise ConfigError(
            f"KVSHELF_OPS=cuda asks for kvshelf's kernels, but they cannot be used on {name}: "
            f"{problem}; reinstall kvshelf where a CUDA compiler is, or unset KVSHELF_OPS"
        )
    logger.info("gather and scatter on %s: torch, %s", name, problem)
    return None


def _run_compiled(call: _Call[PagedLayout], *, gather: bool) -> bool:
    """Carry a call out by the compiled library; False when that is not for the library."""
    if not call.known.kernels:
        library = _library() if call.known.on_cpu else None
        if library is None:
            return False
        _call_cpu(library.gather if gather else library.scatter, call)
        return True
    library = _kernels(call.known.device.index)
    if library is None or library.device is None:
        return False
    if call.to_host:
        _call_copies(library.device.copy_out if gather else library.device.copy_in, call)
        return True
    return _call_kernel(library.device.gather if gather else library.device.scatter, call)


def _index_of(call: _Call[PagedLayout]) -> array[int]:
    """Return the fields of kvshelf::PagedIndex, in the order of their declaration."""
    layout, indexes = call.layout, call.known.indexes
    key = (
        call.first_head,
        call.chunks,
        call.tokens,
        call.shards,
        call.num_heads,
        call.chunk_stride,
        call.shard_stride,
    )
    index = indexes.get(key)
    if index is not None:
        return index
    index = array(
        "q",
        (
            layout.num_blocks,
            layout.block_size,
            layout.block_stride,
            layout.token_stride,
            layout.kv_stride,
            layout.head_stride,
            call.first_head,
            len(call.known.addresses),
            call.chunks,
            call.tokens,
            call.shards,
            call.num_heads,
            layout.kvs,
            layout.row_bytes,
            call.chunk_stride,
            call.shard_stride,
        ),
    )
    if len(indexes) >= _MAX_KNOWN:
        indexes.clear()
    indexes[key] = index
    return index


def _call_cpu(function: Callable[..., int], call: _Call[PagedLayout]) -> None:
    index = _index_of(call)
    position = function(
        index.buffer_info()[0],
        call.known.addresses.buffer_info()[0],
        call.slots.data_ptr(),
        call.buffers.data_ptr(),
        0 if call.bad_slot is None else call.bad_slot.data_ptr(),
    )
    if position >= 0:
        raise _bad_slot(int(call.slots.view(-1)[position]), position, call.layout)


def _call_copies(function: Callable[..., int], call: _Call[PagedLayout]) -> None:
    index = _index_of(call)
    position = function(
        call.known.anchor,
        index.buffer_info()[0],
        call.known.addresses.buffer_info()[0],
        call.slots.data_ptr(),
        call.buffers.data_ptr(),
        0,
    )
    if position >= 0:
        raise _bad_slot(int(call.slots.view(-1)[position]), position, call.layout)


def _call_kernel(function: Callable[..., int], call: _Call[PagedLayout]) -> bool:
    on_device = call.bad_slot is not None
    index = _index_of(call)
    answer = function(
        call.known.anchor,
        index.buffer_info()[0],
        call.known.addresses.buffer_info()[0],
        call.slots.data_ptr(),
        on_device,
        call.buffers.data_ptr(),
        0 if call.bad_slot is None else call.bad_slot.data_ptr(),
        _KERNEL_STEPS,
    )
    if answer < -1:
        position = -2 - answer
        raise _bad_slot(int(call.slots.view(-1)[position]), position, call.layout)
    return answer >= 0


def _call_library_permuted(
    function: Callable[..., int], call: _Call[_PermutedSizes], tables: Tensor
) -> None:
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
        sizes.kvs,
        call.first_head,
        call.num_heads,
        sizes.row_bytes,
        sizes.unit_k,
        sizes.unit_v,
    )
    if position >= 0:
        raise _bad_slot(int(call.slots[position]), position, sizes)


# --- plain torch -------------------------------------------------------------------

_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def _gather_torch(call: _Call[PagedLayout]) -> None:
    with torch.inference_mode():
        for part, skipped, index in _parts(call):
            buffer = part.buffers
            if call.to_host:
                part = replace(part, buffers=torch.empty_like(buffer, device=call.known.device))
            pieces = _chunk_view(part)
            if skipped is not None and skipped.numel() == call.tokens:
                pieces.zero_()
            else:
                for layer, cache in enumerate(call.caches):
                    view = _paged_view(part, cache, pieces.dtype)
                    for kv in range(call.layout.kvs):
                        torch.index_select(view[kv], 0, index, out=pieces[layer, kv])
                if skipped is not None:
                    pieces.index_fill_(2, _sent(skipped, pieces.device), 0)
            if call.to_host:
                buffer.copy_(part.buffers, non_blocking=True)


def _scatter_torch(call: _Call[PagedLayout]) -> None:
    with torch.inference_mode():
        for part, skipped, index in _parts(call):
            if call.to_host:
                on_device = part.buffers.to(call.known.device, non_blocking=True)
                part = replace(part, buffers=on_device)
            pieces = _chunk_view(part)
            if skipped is not None:
                kept = _sent((part.slots >= 0).nonzero().view(-1), pieces.device)
                if kept.numel() == 0:
                    continue
                index = index.index_select(0, kept)
                pieces = pieces.index_select(2, kept)
            for layer, cache in enumerate(call.caches):
                view = _paged_view(part, cache, pieces.dtype)
                for kv in range(call.layout.kvs):
                    view[kv].index_copy_(0, index, pieces[layer, kv])


def _parts(
    call: _Call[PagedLayout],
) -> Iterator[tuple[_Call[PagedLayout], Tensor | None, Tensor]]:
    """Check the slots' values, then split a call into one for each (chunk, shard) with tokens.

    Their slots are CPU tensors without bad slots. Beside each is what :func:`_index_slots`
    makes of them.
    """
    slots = call.slots.view(call.chunks, call.tokens).cpu()
    if slots.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(slots))
    if low < -1 or high >= call.layout.num_slots:
        bad = (slots < -1) | (slots >= call.layout.num_slots)
        position = int(bad.view(-1).nonzero()[0])
        if call.bad_slot is None:
            raise _bad_slot(int(slots.view(-1)[position]), position, call.layout)
        call.bad_slot.fill_(position + 1)
        slots = slots.masked_fill(bad, -1)
    for chunk in range(call.chunks):
        skipped, index = _index_slots(call, slots[chunk])
        for shard in range(call.shards):
            part = replace(
                call,
                slots=slots[chunk],
                buffers=call.buffer(chunk, shard),
                first_head=call.first_head + shard * call.num_heads,
            )
            yield part, skipped, index


def _index_slots(call: _Call[PagedLayout], slots: Tensor) -> tuple[Tensor | None, Tensor]:
    """Turn slots of a chunk into indexes.

    Returns
    -------
    skipped : Tensor or None
        Positions of −1 slots, int64 CPU; None when there are none.
    index : Tensor
        For each token its index into :func:`_paged_view`, int64 on the caches' device;
        0 for skipped tokens.
    """
    layout = call.layout
    skipped = (slots < 0).nonzero().view(-1)
    if skipped.numel():
        slots = slots.clamp(min=0)
    unit = _unit(layout)
    if layout.block_size * layout.token_stride != layout.block_stride or layout.block_size == 1:
        blocks = torch.div(slots, layout.block_size, rounding_mode="floor")
        slots = blocks * (layout.block_stride // unit) + (slots - blocks * layout.block_size) * (
            layout.token_stride // unit
        )
    return (skipped if skipped.numel() else None), _sent(slots, call.known.device)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to a device, in the order of the current stream."""
    if device.type == "cuda":
        # A copy from ordinary memory waits for the stream: on a step thread for the forward
        # pass. torch keeps page-locked memory until the copies from it are done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _unit(layout: PagedLayout) -> int:
    # The largest step in bytes that reaches every token of every block, so that one
    # index dimension covers both, whatever lies between blocks.
    if layout.block_size * layout.token_stride == layout.block_stride:
        return layout.token_stride or 1
    return math.gcd(layout.block_stride, layout.token_stride) or 1


def _paged_view(part: _Call[PagedLayout], cache: Tensor, word: torch.dtype) -> Tensor:
    """[kvs, indexes, heads, words] view of the heads to copy; see :func:`_index_slots`."""
    layout, width = part.layout, word.itemsize
    unit = _unit(layout)
    reach = (layout.num_blocks - 1) * layout.block_stride
    reach += (layout.block_size - 1) * layout.token_stride
    start = int(cache.storage_offset()) * cache.element_size()
    start += part.first_head * layout.head_stride
    return torch.empty(0, dtype=word, device=cache.device).set_(
        cache.untyped_storage(),
        start // width,
        (layout.kvs, reach // unit + 1, part.num_heads, layout.row_bytes // width),
        (layout.kv_stride // width, unit // width, layout.head_stride // width, 1),
    )


def _chunk_view(part: _Call[PagedLayout]) -> Tensor:
    """[layers, kvs, tokens, heads, words] view of the chunk buffer, words as wide as may be."""
    layout = part.layout
    steps = layout.block_stride | layout.token_stride | layout.kv_stride | layout.head_stride
    steps |= layout.row_bytes | int(part.buffers.storage_offset()) | part.buffers.data_ptr()
    for cache in part.caches:
        steps |= int(cache.storage_offset()) * cache.element_size() | cache.data_ptr()
    word = next(dtype for width, dtype in _WORDS if steps % width == 0)
    return part.buffers.view(word).view(
        len(part.caches), layout.kvs, part.tokens, part.num_heads, -1
    )


def _gather_permuted_torch(call: _Call[_PermutedSizes], tables: Tensor) -> None:
    with torch.inference_mode():
        skipped = _check_slots_permuted(call)
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


def _scatter_permuted_torch(call: _Call[_PermutedSizes], tables: Tensor) -> None:
    with torch.inference_mode():
        skipped = _check_slots_permuted(call)
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


def _check_slots_permuted(call: _Call[_PermutedSizes]) -> Tensor | None:
    """Check the slots' values; return the positions of −1 slots, None when there are none."""
    slots, sizes = call.slots, call.layout
    if slots.numel() == 0:
        return None
    low, high = (int(bound) for bound in torch.aminmax(slots))
    if low < -1 or high >= sizes.num_slots:
        position = int(((slots < -1) | (slots >= sizes.num_slots)).nonzero()[0])
        raise _bad_slot(int(slots[position]), position, sizes)
    return (slots < 0).nonzero().view(-1) if low == -1 else None


def _permuted_chunk_view(call: _Call[_PermutedSizes], tables: Tensor) -> tuple[int, Tensor]:
    """Return the widest word that everything is a multiple of, and the chunk buffer in words.

    Returns
    -------
    width : int
        Bytes of a word.
    pieces : Tensor
        [layers, kvs, tokens, heads, words] view of the chunk buffer.
    """
    sizes = call.layout
    steps = sizes.block_stride | sizes.head_stride | sizes.row_bytes | sizes.unit_k | sizes.unit_v
    steps |= int(call.buffers.storage_offset()) | call.buffers.data_ptr()
    for cache in call.caches:
        steps |= int(cache.storage_offset()) * cache.element_size() | cache.data_ptr()
    width, word = next(
        (width, word)
        for width, word in _WORDS
        if steps % width == 0 and not (tables & (width - 1)).any()
    )
    shape = (len(call.caches), sizes.kvs, call.tokens, call.num_heads, -1)
    return width, call.buffers.view(word).view(shape)


def _permuted_places(
    call: _Call[_PermutedSizes], tables: Tensor, width: int, slots: Tensor
) -> list[Tensor]:
    """For each kv the index into :func:`_flat_view` of each word: int64 [tokens, heads, words]."""
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


def _flat_view(call: _Call[_PermutedSizes], cache: Tensor, width: int) -> Tensor:
    """One-dimensional view, in words, of all that the layout reaches of a cache."""
    word = next(word for bytes_, word in _WORDS if bytes_ == width)
    start = int(cache.storage_offset()) * cache.element_size()
    return torch.empty(0, dtype=word, device=cache.device).set_(
        cache.untyped_storage(), start // width, (call.layout.extent // width,), (1,)
    )
