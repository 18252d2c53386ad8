"""Gather and scatter between paged KV caches and chunk buffers.

Owns the torch.library operators ``kvshelf::gather_kv`` and ``kvshelf::scatter_kv`` for
strided caches, ``kvshelf::gather_permuted_kv`` and ``kvshelf::scatter_permuted_kv`` for
caches whose elements are permuted inside each (block, head), all their checks, and the
choice of what carries them out: the compiled CPU twin where it is installed, else plain
torch.

A *chunk buffer* is uint8, one-dimensional and contiguous: for each layer
[kvs, tokens, heads, row_bytes], layers one after another, which is the payload of a
shard's safetensors file.

Contracts
---------
* Everything is checked before anything is touched: after a ``ValueError`` neither
  caches nor chunk buffer have changed, whatever implementation is in use.
* Slot mappings are CPU tensors; slot −1 means "skip this token": its place in the
  buffer of a gather becomes zero, a scatter writes nothing for it.
* A slot that occurs twice in a scatter gets the row of one of its tokens, which one
  (or which mixture of them) is not defined; nothing else is harmed.
* The caches, the slot mapping and the buffer must not share memory.
* Any thread may call. Shared are only the choice of implementation and a bounded record
  of which caches have passed the checks; neither keeps a cache alive. The compiled
  implementation releases the GIL while it copies.
* Importing this module loads no compiler, no CUDA and not the compiled library;
  :func:`implementation` or the first call loads the latter.

The environment variable ``KVSHELF_OPS`` (``auto``, ``cpp``, ``torch``) overrides the
choice; it is read once.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from kvshelf.errors import ConfigError
from kvshelf.layout import PagedLayout, PermutedLayout

Implementation: TypeAlias = Literal["cpp", "torch"]

#: Version of the functions that the compiled library exports. A library of another
#: version (left behind by an older install) is not used.
_LIBRARY_VERSION: Final = 2
_LIBRARY_NAME: Final = "libkvshelf_ops.so"

_LIBRARY: Final = cast(Any, torch.library).Library("kvshelf", "DEF")


def gather_kv(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    out: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int = 0,
    num_heads: int | None = None,
) -> None:
    """Copy the KV of tokens out of paged caches into a chunk buffer.

    Parameters
    ----------
    caches : sequence of Tensor
        One paged cache for each layer; all of the same shape, strides, dtype and device.
    slot_mapping : Tensor
        int64 [tokens], CPU, contiguous; each −1 or ``0 <= slot < layout.num_slots``.
    out : Tensor
        uint8 [layers × kvs × tokens × num_heads × row_bytes], contiguous, on the
        caches' device. Every byte is written; those of −1 slots become zero.
    layout : PagedLayout or PermutedLayout
        How rows lie in each cache.
    first_head, num_heads : int, optional
        The KV heads to copy; all heads from ``first_head`` on when ``num_heads`` is absent.

    Raises
    ------
    ValueError
        If an argument does not fit; nothing has been written then.
    """
    heads = layout.heads - first_head if num_heads is None else num_heads
    if isinstance(layout, PermutedLayout):
        sizes, tables = permuted_tables(layout)
        torch.ops.kvshelf.gather_permuted_kv.default(
            caches, slot_mapping, out, tables, sizes, first_head, heads
        )
        return
    gather = _gather if _unwatched(out) else torch.ops.kvshelf.gather_kv.default
    gather(caches, slot_mapping, out, layout.as_ints(), first_head, heads)


def scatter_kv(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    chunk: Tensor,
    layout: PagedLayout | PermutedLayout,
    first_head: int = 0,
    num_heads: int | None = None,
) -> None:
    """Copy the KV of tokens from a chunk buffer into paged caches.

    Parameters
    ----------
    caches : sequence of Tensor
        One paged cache for each layer; all of the same shape, strides, dtype and device.
    slot_mapping : Tensor
        int64 [tokens], CPU, contiguous; each −1 (skip) or ``0 <= slot <
        layout.num_slots``. What a slot that occurs twice receives is not defined.
    chunk : Tensor
        uint8 [layers × kvs × tokens × num_heads × row_bytes], contiguous, on the
        caches' device.
    layout : PagedLayout or PermutedLayout
        How rows lie in each cache.
    first_head, num_heads : int, optional
        The KV heads to copy; all heads from ``first_head`` on when ``num_heads`` is absent.

    Raises
    ------
    ValueError
        If an argument does not fit; nothing has been written then.
    """
    heads = layout.heads - first_head if num_heads is None else num_heads
    if isinstance(layout, PermutedLayout):
        sizes, tables = permuted_tables(layout)
        torch.ops.kvshelf.scatter_permuted_kv.default(
            caches, slot_mapping, chunk, tables, sizes, first_head, heads
        )
        return
    scatter = _scatter if _unwatched(chunk) else torch.ops.kvshelf.scatter_kv.default
    scatter(caches, slot_mapping, chunk, layout.as_ints(), first_head, heads)


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


def implementation() -> Implementation:
    """Tell what carries out calls on CPU tensors: the compiled library or plain torch.

    Raises
    ------
    ConfigError
        If ``KVSHELF_OPS`` has an unknown value, or asks for a library that is not there.
    """
    return "torch" if _library() is None else "cpp"


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
    references: tuple[weakref.ref[Tensor], ...]


@dataclass(frozen=True, slots=True)
class _Call(Generic[_Layout]):
    """A checked call, except for the slots' values."""

    caches: Sequence[Tensor]
    slots: Tensor
    chunk: Tensor
    tokens: int
    layout: _Layout
    addresses: array[int]
    first_head: int
    num_heads: int
    on_cpu: bool


#: Caches that were checked before, by the ids of the tensors and the layout's integers. An entry
#: goes when the first of its tensors does, so the ids are those of the same living objects; the
#: addresses are compared as well, which leaves nothing that could have shrunk meanwhile.
_known_caches: Final[dict[tuple[tuple[int, ...], tuple[int, ...]], _Caches[Any]]] = {}
_MAX_KNOWN: Final = 64


def _checked(
    caches: Sequence[Tensor],
    slots: Tensor,
    chunk: Tensor,
    chunk_name: str,
    layout_ints: Sequence[int],
    first_head: int,
    num_heads: int,
    parse: Callable[[Sequence[int]], _Layout],
) -> _Call[_Layout]:
    key = (tuple(map(id, caches)), tuple(layout_ints))
    addresses = array("q", [cache.data_ptr() for cache in caches])
    known: _Caches[_Layout] | None = _known_caches.get(key)
    if known is None or known.addresses != addresses:
        known = _check_caches(caches, addresses, key, parse)
    layout = known.layout

    if first_head < 0 or num_heads < 1 or first_head + num_heads > layout.heads:
        raise ValueError(
            f"{num_heads} heads from head {first_head} on asked for, but the cache has heads "
            f"0 … {layout.heads - 1}; first_head and num_heads must name at least one of them"
        )
    if not slots.is_cpu or slots.dtype != torch.int64 or slots.dim() != 1:
        raise ValueError(
            f"slot_mapping is {_describe(slots)}; expected a one-dimensional int64 CPU tensor"
        )
    if not slots.is_contiguous():
        raise ValueError(
            f"slot_mapping has stride {slots.stride(0)}; expected a contiguous tensor: "
            "pass slot_mapping.contiguous()"
        )
    same_device = chunk.is_cpu if known.on_cpu else chunk.device == known.device
    if not same_device or chunk.dtype != torch.uint8 or chunk.dim() != 1:
        raise ValueError(
            f"{chunk_name} is {_describe(chunk)}; expected a one-dimensional uint8 tensor on "
            f"{known.device}, where the caches are"
        )
    tokens = slots.numel()
    expected = len(caches) * layout.chunk_bytes(tokens, num_heads)
    if chunk.numel() != expected:
        raise ValueError(
            f"{chunk_name} has {chunk.numel()} bytes; expected {expected} = {len(caches)} layers × "
            f"{layout.kvs} kvs × {tokens} tokens × {num_heads} heads × {layout.row_bytes} bytes"
        )
    if not chunk.is_contiguous():
        raise ValueError(
            f"{chunk_name} has stride {chunk.stride(0)}; expected a contiguous tensor: allocate it "
            "with torch.empty(size, dtype=torch.uint8)"
        )
    return _Call(
        caches,
        slots,
        chunk,
        tokens,
        layout,
        known.addresses,
        first_head,
        num_heads,
        known.on_cpu,
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
    known = _Caches(layout, addresses, device, first.is_cpu, references)
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
) -> None:
    call = _checked(
        caches, slot_mapping, out, "out", layout, first_head, num_heads, PagedLayout.from_ints
    )
    library = _library() if call.on_cpu else None
    if library is not None:
        _call_library(library.gather, call)
    else:
        _gather_torch(call)


def _scatter(
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    chunk: Tensor,
    layout: Sequence[int],
    first_head: int,
    num_heads: int,
) -> None:
    call = _checked(
        caches, slot_mapping, chunk, "chunk", layout, first_head, num_heads, PagedLayout.from_ints
    )
    library = _library() if call.on_cpu else None
    if library is not None:
        _call_library(library.scatter, call)
    else:
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
    call = _checked(
        caches, slot_mapping, out, "out", sizes, first_head, num_heads, _PermutedSizes.from_ints
    )
    _check_tables(tables, call.layout)
    library = _library() if call.on_cpu else None
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
    call = _checked(
        caches, slot_mapping, chunk, "chunk", sizes, first_head, num_heads, _PermutedSizes.from_ints
    )
    _check_tables(tables, call.layout)
    library = _library() if call.on_cpu else None
    if library is not None:
        _call_library_permuted(library.scatter_permuted, call, tables)
    else:
        _scatter_permuted_torch(call, tables)


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
    "int first_head, int num_heads) -> ()",
    tags=_TAGS,
)
_LIBRARY.define(
    "scatter_kv(Tensor(a!)[] caches, Tensor slot_mapping, Tensor chunk, int[] layout, "
    "int first_head, int num_heads) -> ()",
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
class _Library:
    """Functions of the compiled library; see cuda/src/binding.cc for their arguments."""

    path: Path
    gather: Callable[..., int]
    scatter: Callable[..., int]
    gather_permuted: Callable[..., int]
    scatter_permuted: Callable[..., int]


@functools.lru_cache(maxsize=1)
def _library() -> _Library | None:
    choice = os.environ.get("KVSHELF_OPS", "auto") or "auto"
    if choice == "torch":
        return None
    if choice not in ("auto", "cpp"):
        raise ConfigError(f"KVSHELF_OPS is {choice!r}; expected auto, cpp or torch")
    problem = "it is not installed (no C++ compiler was found when kvshelf was installed)"
    for path in _library_paths():
        try:
            return _load_library(path)
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
    if choice == "cpp":
        raise ConfigError(
            f"KVSHELF_OPS=cpp asks for kvshelf's compiled library, but {problem}; reinstall "
            "kvshelf where a C++ compiler is, or unset KVSHELF_OPS"
        )
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
    return _Library(
        path,
        module.get_function("gather"),
        module.get_function("scatter"),
        module.get_function("gather_permuted"),
        module.get_function("scatter_permuted"),
    )


def _call_library(function: Callable[..., int], call: _Call[PagedLayout]) -> None:
    layout = call.layout
    position = function(
        call.addresses.buffer_info()[0],
        call.slots.data_ptr(),
        call.chunk.data_ptr(),
        len(call.addresses),
        call.tokens,
        layout.num_blocks,
        layout.block_size,
        layout.block_stride,
        layout.token_stride,
        layout.kv_stride,
        layout.head_stride,
        layout.kvs,
        call.first_head,
        call.num_heads,
        layout.row_bytes,
    )
    if position >= 0:
        raise _bad_slot(int(call.slots[position]), position, layout)


def _call_library_permuted(
    function: Callable[..., int], call: _Call[_PermutedSizes], tables: Tensor
) -> None:
    sizes = call.layout
    position = function(
        call.addresses.buffer_info()[0],
        call.slots.data_ptr(),
        call.chunk.data_ptr(),
        tables.data_ptr(),
        len(call.addresses),
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
        skipped, index = _check_slots(call)
        if call.tokens == 0:
            return
        if skipped is not None and skipped.numel() == call.tokens:
            call.chunk.zero_()
            return
        pieces = _chunk_view(call)
        for layer, cache in enumerate(call.caches):
            view = _paged_view(call, cache, pieces.dtype)
            for kv in range(call.layout.kvs):
                torch.index_select(view[kv], 0, index, out=pieces[layer, kv])
        if skipped is not None:
            pieces.index_fill_(2, skipped.to(pieces.device), 0)


def _scatter_torch(call: _Call[PagedLayout]) -> None:
    with torch.inference_mode():
        skipped, index = _check_slots(call)
        if call.tokens == 0:
            return
        pieces = _chunk_view(call)
        if skipped is not None:
            kept = (call.slots >= 0).nonzero().view(-1).to(pieces.device)
            if kept.numel() == 0:
                return
            index = index.index_select(0, kept)
            pieces = pieces.index_select(2, kept)
        for layer, cache in enumerate(call.caches):
            view = _paged_view(call, cache, pieces.dtype)
            for kv in range(call.layout.kvs):
                view[kv].index_copy_(0, index, pieces[layer, kv])


def _check_slots(call: _Call[PagedLayout]) -> tuple[Tensor | None, Tensor]:
    """Check the slots' values.

    Returns
    -------
    skipped : Tensor or None
        Positions of −1 slots, int64 CPU; None when there are none.
    index : Tensor
        For each token its index into :func:`_paged_view`, int64 on the caches' device;
        0 for skipped tokens.
    """
    slots, layout = call.slots, call.layout
    skipped = None
    if slots.numel():
        low, high = (int(bound) for bound in torch.aminmax(slots))
        if low < -1 or high >= layout.num_slots:
            position = int(((slots < -1) | (slots >= layout.num_slots)).nonzero()[0])
            raise _bad_slot(int(slots[position]), position, layout)
        if low == -1:
            skipped = (slots < 0).nonzero().view(-1)
            slots = slots.clamp(min=0)
    unit = _unit(layout)
    if layout.block_size * layout.token_stride != layout.block_stride or layout.block_size == 1:
        blocks = torch.div(slots, layout.block_size, rounding_mode="floor")
        slots = blocks * (layout.block_stride // unit) + (slots - blocks * layout.block_size) * (
            layout.token_stride // unit
        )
    return skipped, slots.to(call.chunk.device)


def _unit(layout: PagedLayout) -> int:
    # The largest step in bytes that reaches every token of every block, so that one
    # index dimension covers both, whatever lies between blocks.
    if layout.block_size * layout.token_stride == layout.block_stride:
        return layout.token_stride or 1
    return math.gcd(layout.block_stride, layout.token_stride) or 1


def _paged_view(call: _Call[PagedLayout], cache: Tensor, word: torch.dtype) -> Tensor:
    """[kvs, indexes, heads, words] view of the heads to copy; see :func:`_check_slots`."""
    layout, width = call.layout, word.itemsize
    unit = _unit(layout)
    reach = (layout.num_blocks - 1) * layout.block_stride
    reach += (layout.block_size - 1) * layout.token_stride
    start = int(cache.storage_offset()) * cache.element_size()
    start += call.first_head * layout.head_stride
    return torch.empty(0, dtype=word, device=cache.device).set_(
        cache.untyped_storage(),
        start // width,
        (layout.kvs, reach // unit + 1, call.num_heads, layout.row_bytes // width),
        (layout.kv_stride // width, unit // width, layout.head_stride // width, 1),
    )


def _chunk_view(call: _Call[PagedLayout]) -> Tensor:
    """[layers, kvs, tokens, heads, words] view of the chunk buffer, words as wide as may be."""
    layout = call.layout
    steps = layout.block_stride | layout.token_stride | layout.kv_stride | layout.head_stride
    steps |= layout.row_bytes | int(call.chunk.storage_offset()) | call.chunk.data_ptr()
    for cache in call.caches:
        steps |= int(cache.storage_offset()) * cache.element_size() | cache.data_ptr()
    word = next(dtype for width, dtype in _WORDS if steps % width == 0)
    return call.chunk.view(word).view(len(call.caches), layout.kvs, call.tokens, call.num_heads, -1)


def _gather_permuted_torch(call: _Call[_PermutedSizes], tables: Tensor) -> None:
    with torch.inference_mode():
        skipped = _check_slots_permuted(call)
        if call.tokens == 0:
            return
        if skipped is not None and skipped.numel() == call.tokens:
            call.chunk.zero_()
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
    steps |= int(call.chunk.storage_offset()) | call.chunk.data_ptr()
    for cache in call.caches:
        steps |= int(cache.storage_offset()) * cache.element_size() | cache.data_ptr()
    width, word = next(
        (width, word)
        for width, word in _WORDS
        if steps % width == 0 and not (tables & (width - 1)).any()
    )
    shape = (len(call.caches), sizes.kvs, call.tokens, call.num_heads, -1)
    return width, call.chunk.view(word).view(shape)


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
        places.append(of_kv.to(call.chunk.device))
        first += count
    return places


def _flat_view(call: _Call[_PermutedSizes], cache: Tensor, width: int) -> Tensor:
    """One-dimensional view, in words, of all that the layout reaches of a cache."""
    word = next(word for bytes_, word in _WORDS if bytes_ == width)
    start = int(cache.storage_offset()) * cache.element_size()
    return torch.empty(0, dtype=word, device=cache.device).set_(
        cache.untyped_storage(), start // width, (call.layout.extent // width,), (1,)
    )
