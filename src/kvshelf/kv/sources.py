"""The sources of KV: the three forms in which a program may hold the KV of a prompt.

Owns the translation of these forms into the arguments of the copy code (caches, a layout of
strides, a slot for each token), the checks that they fit a namespace, and helpers that
convert one form into another:

* :class:`PagedKV`: paged caches, one or a pair of K and V for each layer, with a slot mapping;
* :class:`TupleKV`: K and V of each layer as two tensors, as in Hugging Face
  transformers;
* :class:`BlobKV`: one tensor ``[2, layers, tokens, hidden]``.

Contracts
---------
* KV is never copied to be checked: all three forms are strides over the caller's memory.
* A form that does not fit the namespace in layers, heads, sizes or dtype, and caches that end
  before their layout does, are refused with a ValueError before anything is read or written.
* Tuples, blobs and paged pairs are always in the canonical layout; a namespace of another layout
  refuses them.
* Pure functions, safe on any thread; the memory belongs to a gather or scatter while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import native_block_size, required_field
from kvshelf.kv import ops
from kvshelf.kv.caches import HostKVCache, KVCache, LayerCall, LayerRun, layer_calls
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.topology import ShardPlan

#: Order of a tuple's dimensions: ``HTD`` = [heads, tokens, head size], as in transformers;
#: ``THD`` = [tokens, heads, head size].
Order: TypeAlias = Literal["HTD", "THD"]

#: Paged caches of all layers: one for K and V, or a pair of these.
PagedCaches: TypeAlias = "Sequence[Tensor] | Sequence[tuple[Tensor, Tensor]]"

#: torch dtype of each dtype that stored KV may have.
TORCH_DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class BoundKV:
    """A source that was checked against a namespace.

    Attributes
    ----------
    memory : KVCache
        Gathers and scatters the source's KV.
    tokens : int
        Number of tokens that it can hold.
    slots : Callable[[int, int], Tensor]
        Slots of tokens [start, end), whole chunks, as `memory` takes them.
    """

    memory: KVCache
    tokens: int
    slots: Callable[[int, int], Tensor]


class KVSource(Protocol):
    """KV of one prompt, in the form in which a program holds it."""

    def open(self, fmt: ObjectFormat) -> BoundKV:
        """Check that the source fits a namespace.

        Raises
        ------
        ValueError
            If it does not.
        """


class PagedKV:
    """Paged caches and the slot of each token.

    Parameters
    ----------
    caches : Sequence of Tensor or of (Tensor, Tensor)
        The paged cache of each layer, in the order of the namespace's layers. A pair is the cache
        of K and the cache of V, each ``[blocks, block size, heads, head size]``.
    layout : PagedLayout
        How a block lies in each of them. With :meth:`PagedLayout.native_blocks` blocks are
        copied as they are; the namespace must name a native layout then. Pairs need none: their
        dimensions say it.
    slot_mapping : Tensor
        int64 [tokens], CPU: block id × block size + offset of each token of the prompt
        from position 0 on. −1: not in the cache; such a token is skipped by loads and
        cannot be stored.

    Raises
    ------
    ValueError
        If something is missing, or the slot mapping is not of this kind.
    """

    def __init__(
        self,
        caches: PagedCaches | None = None,
        layout: PagedLayout | None = None,
        slot_mapping: Tensor | None = None,
    ) -> None:
        given = None if caches is None else _listed(caches)
        missing = [
            name
            for name, value in (
                ("caches", given),
                ("layout", layout if given is None or not _in_pairs(given) else True),
                ("slot_mapping", slot_mapping),
            )
            if value is None
        ]
        if missing:
            raise ValueError(f"a paged KV cache needs {' and '.join(missing)}, which is missing")
        assert given is not None and slot_mapping is not None
        self.caches: PagedCaches = given
        self.layout = layout
        self.slot_mapping = host_slot_mapping(slot_mapping)

    def open(self, fmt: ObjectFormat) -> BoundKV:
        """See :class:`KVSource`."""
        memory, num_slots = paged_memory(fmt, self.caches, self.layout)
        return with_slots(fmt, memory, self.slot_mapping, num_slots)


class TupleKV:
    """K and V of each layer as separate tensors.

    Parameters
    ----------
    layers : Sequence of (Tensor, Tensor)
        K and V of each layer, ``[heads, tokens, head size]`` or in the other order, with or
        without a batch dimension of one in front; or ``[tokens, heads × head size]``. For layers
        with a single content (MLA) one tensor ``[tokens, content]`` in place of the pair.
    order : {"HTD", "THD"}
        Order of their dimensions, where they are three.

    Raises
    ------
    ValueError
        If the tensors are not of this form.
    """

    def __init__(
        self, layers: Sequence[tuple[Tensor, Tensor] | Tensor], *, order: Order = "HTD"
    ) -> None:
        if order not in ("HTD", "THD"):
            raise ValueError(f"order is {order!r}; expected HTD or THD")
        self.layers = [
            (_one_sequence(layer, 2, f"layers[{i}]"),)
            if isinstance(layer, Tensor)
            else tuple(
                tensor if tensor.dim() == 2 else _one_sequence(tensor, 3, f"layers[{i}]")
                for tensor in _tensors(layer, f"layers[{i}]")
            )
            for i, layer in enumerate(_given(layers))
        ]
        self.order: Order = order
        counts = {self._count(tensor) for tensors in self.layers for tensor in tensors}
        if len(counts) != 1:
            raise ValueError(
                f"the layers hold {sorted(counts)} tokens; expected the same number in all of them"
            )
        [self.tokens] = counts

    def _count(self, tensor: Tensor) -> int:
        return tensor.shape[1 if self.order == "HTD" and tensor.dim() == 3 else 0]

    def open(self, fmt: ObjectFormat) -> BoundKV:
        """See :class:`KVSource`."""
        swap = self.order == "HTD"
        layers = [
            [t.transpose(0, 1) if swap and t.dim() == 3 else t for t in tensors]
            for tensors in self.layers
        ]
        for tensors, spec in zip(layers, _specs(fmt), strict=False):
            if spec.heads:
                # [tokens, hidden]
                tensors[:] = [
                    t.view(t.shape[0], *spec.shape)
                    if t.dim() == 2 and t.shape[1] == math.prod(spec.shape)
                    else t
                    for t in tensors
                ]
        names = [f"layers[{i}]" for i in range(len(layers))]
        return _open_dense(fmt, layers, names, self.tokens)


class BlobKV:
    """The KV of all layers in one tensor.

    Parameters
    ----------
    blob : Tensor
        ``[2, layers, tokens, hidden]``, K then V, with hidden = heads × head size; for MLA
        ``[1, layers, tokens, content]``.

    Raises
    ------
    ValueError
        If the tensor is not of this form.
    """

    def __init__(self, blob: Tensor) -> None:
        if blob.dim() != 4 or blob.shape[0] not in (1, 2):
            raise ValueError(
                f"the blob has shape {list(blob.shape)}; expected [2, layers, tokens, hidden]"
            )
        self.blob = blob

    def open(self, fmt: ObjectFormat) -> BoundKV:
        """See :class:`KVSource`."""
        kv_planes, layers, tokens, hidden = self.blob.shape
        spec = _one_kind(_specs(fmt))
        if (kv_planes, hidden) != (2 if spec.heads else 1, math.prod(spec.shape)):
            raise ValueError(
                f"the blob has shape {list(self.blob.shape)}; expected [{2 if spec.heads else 1}, "
                f"layers, tokens, {math.prod(spec.shape)}] in this namespace"
            )
        split = self.blob.view(kv_planes, layers, tokens, *spec.shape)
        names = [f"blob[:, {layer}]" for layer in range(layers)]
        parts = [[split[kv, layer] for kv in range(kv_planes)] for layer in range(layers)]
        return _open_dense(fmt, parts, names, tokens)


# ------------------------------------------------------------------------- conversions


def empty_tuples(
    fmt: ObjectFormat, tokens: int, *, order: Order = "HTD", batch: bool = True
) -> list[tuple[Tensor, Tensor]]:
    """Return zeroed K and V tensors for all layers of a namespace, to load into.

    Parameters
    ----------
    fmt : ObjectFormat
        Of the namespace: the attribute ``fmt`` of a cache.
    tokens : int
        Tokens that they can hold.
    order : {"HTD", "THD"}
        ``[heads, tokens, head size]`` or ``[tokens, heads, head size]``.
    batch : bool
        Put a batch dimension of one in front.
    """
    result = []
    for spec in _specs(fmt):
        if not spec.heads:
            raise ValueError(f"layer {spec.name} keeps a single content, no K and V")
        shape = [spec.heads, tokens] if order == "HTD" else [tokens, spec.heads]
        shape = [*([1] if batch else []), *shape, spec.width]
        dtype = TORCH_DTYPES[spec.dtype]
        result.append((torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)))
    return result


def empty_blob(fmt: ObjectFormat, tokens: int) -> Tensor:
    """Return a zeroed blob for all layers of a namespace, to load into.

    Raises
    ------
    ValueError
        If the layers are not alike.
    """
    specs = _specs(fmt)
    spec = _one_kind(specs)
    shape = (2 if spec.heads else 1, len(specs), tokens, math.prod(spec.shape))
    return torch.zeros(shape, dtype=TORCH_DTYPES[spec.dtype])


def tuples_of_blob(
    blob: Tensor, kv_heads: int, *, order: Order = "HTD", batch: bool = True
) -> list[tuple[Tensor, Tensor]]:
    """Return K and V of each layer of a blob, as views of it.

    Parameters
    ----------
    blob : Tensor
        ``[2, layers, tokens, hidden]``.
    kv_heads : int
        KV heads of each layer.
    order, batch
        As for :func:`empty_tuples`.

    Raises
    ------
    ValueError
        If the blob is not of this form.
    """
    if blob.dim() != 4 or blob.shape[0] != 2 or blob.shape[3] % kv_heads:
        raise ValueError(
            f"the blob has shape {list(blob.shape)}; expected [2, layers, tokens, hidden] with "
            f"hidden a multiple of {kv_heads} heads"
        )
    split = blob.view(*blob.shape[:3], kv_heads, blob.shape[3] // kv_heads)
    if order == "HTD":
        split = split.transpose(2, 3)
    if batch:
        split = split.unsqueeze(2)
    return [(split[0, layer], split[1, layer]) for layer in range(blob.shape[1])]


def blob_of_tuples(layers: Sequence[tuple[Tensor, Tensor]], *, order: Order = "HTD") -> Tensor:
    """Return a new blob ``[2, layers, tokens, hidden]`` with a copy of K and V of each layer.

    Raises
    ------
    ValueError
        If the layers are not alike.
    """
    form = TupleKV(layers, order=order)
    shapes = {tuple(tensor.shape) for tensors in form.layers for tensor in tensors}
    if len(shapes) != 1:
        raise ValueError(f"the layers have shapes {sorted(shapes)}; a blob needs one for all")
    both = torch.stack([torch.stack([tensors[kv] for tensors in form.layers]) for kv in range(2)])
    if both.dim() == 4:
        return both
    if order == "HTD":
        both = both.transpose(2, 3)
    return both.flatten(3).contiguous()


# ---------------------------------------------------------------------------- inside


def host_slot_mapping(slot_mapping: Tensor) -> Tensor:
    """Return a copy of a slot mapping as contiguous int64 [tokens] on the CPU.

    Raises
    ------
    ValueError
        If it is not one-dimensional or holds no integers.
    """
    if not isinstance(slot_mapping, Tensor):
        raise ValueError(
            f"slot_mapping is a {type(slot_mapping).__name__}; expected a tensor, int64 [tokens]"
        )
    if (
        slot_mapping.dim() != 1
        or slot_mapping.is_floating_point()
        or slot_mapping.dtype == torch.bool
    ):
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {list(slot_mapping.shape)}; expected one "
            "integer for each token, int64 [tokens]"
        )
    return slot_mapping.to("cpu", torch.int64, copy=True).contiguous()


def paged_memory(
    fmt: ObjectFormat, caches: PagedCaches, layout: PagedLayout | None
) -> tuple[KVCache, int]:
    """Return a program's paged caches as the objects of a namespace see them, and their slots.

    Parameters
    ----------
    fmt : ObjectFormat
    caches, layout
        As for :class:`PagedKV`.

    Raises
    ------
    ValueError
        If they do not fit the namespace, or each other.
    """
    given = _listed(caches)
    if _in_pairs(given):
        if layout is not None:
            raise ValueError(
                "layout describes one cache for K and V of a layer; pairs are"
                " [blocks, block size, heads, head size] each: leave layout out"
            )
        return _open_pairs(fmt, [_tensors(pair, f"caches[{i}]") for i, pair in enumerate(given)])
    tensors = _tensors(given, "caches")
    if not isinstance(layout, PagedLayout | PermutedLayout):
        raise ValueError(
            f"layout is a {type(layout).__name__}; expected how a block lies in the caches, for"
            " example PagedLayout.from_bhnc(cache, head_size)"
        )
    return open_paged(fmt, [LayerRun(0, tensors, layout)]), count_slots(fmt, layout)


def open_paged(
    fmt: ObjectFormat, runs: Sequence[LayerRun], plan: ShardPlan | None = None
) -> KVCache:
    """Return paged caches as the objects of a namespace see them, dtypes and sizes checked.

    Parameters
    ----------
    fmt : ObjectFormat
    runs : Sequence[LayerRun]
        All tensors of an object.
    plan : ShardPlan, optional
        The shards whose heads the caches hold; all of them when absent.

    Raises
    ------
    ValueError
        If they do not fit the namespace.
    """
    shards = ShardPlan.whole(fmt.shards).shards if plan is None else plan.shards
    calls = layer_calls(fmt, runs, plan)
    slots = fmt.chunk_size // _block_size(fmt)
    specs, numbers = fmt.tensors(shards[0]), fmt.layer_numbers(shards[0])
    dtypes = required_field(fmt.namespace.record, "layer_dtypes")
    for run in runs:
        size = run.layout.chunk_bytes(slots, run.layout.heads // len(shards))
        for position, cache in enumerate(run.caches, run.first_layer):
            spec = specs[position]
            _check_tensor(cache, f"caches[{position}]", dtypes[numbers[position]])
            if size != spec.nbytes and not (plan and plan.divided):
                raise ConfigError(
                    f"a chunk of layer {spec.name} takes {spec.nbytes} bytes a shard in this"
                    f" namespace, but {size} in the cache: layout, heads or head size are not"
                    " those of the namespace"
                )
        ops.check_caches(run.caches, run.layout)
    return _memory_of(calls)


def count_slots(fmt: ObjectFormat, layout: PagedLayout | PermutedLayout) -> int:
    """Return the number of token slots in caches of a layout."""
    return layout.num_slots * _block_size(fmt)


def with_slots(
    fmt: ObjectFormat, memory: KVCache, slot_mapping: Tensor, num_slots: int | None = None
) -> BoundKV:
    """Join paged caches with the slots of one prompt's tokens.

    Parameters
    ----------
    fmt : ObjectFormat
    memory : KVCache
    slot_mapping : Tensor
        As :func:`host_slot_mapping` returns it.
    num_slots : int, optional
        Slots in the caches, where that is known.

    Raises
    ------
    ValueError
        If there is no such slot.
    """
    if num_slots is not None and slot_mapping.numel():
        low, high = (int(bound) for bound in torch.aminmax(slot_mapping))
        if low < -1 or high >= num_slots:
            raise ValueError(
                f"slot_mapping holds {low if low < -1 else high}; expected −1 (skip) or 0 …"
                f" {num_slots - 1}"
            )
    size = _block_size(fmt)

    def slots(start: int, end: int) -> Tensor:
        part = slot_mapping[start:end]
        return part if size == 1 else _blocks_of(part, size, start)

    return BoundKV(memory, slot_mapping.numel(), slots)


def _blocks_of(slots: Tensor, size: int, start: int) -> Tensor:
    """Return the block ids of the slots of whole blocks; −1 where all slots are."""
    rows = slots.view(-1, size)
    first = rows[:, 0]
    skipped = (rows == -1).all(1)
    is_whole = (rows == first.unsqueeze(1) + torch.arange(size)).all(1) & (first % size == 0)
    wrong = ~(is_whole | skipped)
    if bool(wrong.any()):
        token = start + int(wrong.nonzero()[0]) * size
        raise ValueError(
            f"the slots of tokens {token} … {token + size - 1} are not one whole block of {size};"
            " this namespace stores blocks as they are: give the slots of whole blocks, or use the"
            " canonical layout"
        )
    return torch.where(skipped, -1, first // size)


def _layouts(fmt: ObjectFormat) -> list[str]:
    """Return the layouts in the record of the layers of the format's kind."""
    numbers = {number for shard in range(fmt.shards) for number in fmt.layer_numbers(shard)}
    values = required_field(fmt.namespace.record, "layouts")
    return [str(values[number]) for number in sorted(numbers)]


def _split(fmt: ObjectFormat) -> int:
    """Return the number of shards of a stage."""
    return fmt.shards // len({fmt.layer_numbers(shard) for shard in range(fmt.shards)})


def _block_size(fmt: ObjectFormat) -> int:
    """Return the tokens in a stored block of a native namespace, 1 for canonical ones."""
    sizes = set()
    for layout in _layouts(fmt):
        size = native_block_size(layout)
        if size is None and layout != "canonical":
            raise UnsupportedError(
                f"layout {layout} is known only to the engine that has it: its KV cannot be "
                "stored or loaded from outside"
            )
        sizes.add(size or 1)
    if len(sizes) != 1:
        raise UnsupportedError(
            f"this namespace stores blocks of several sizes ({sorted(sizes)}); expected one"
        )
    return sizes.pop()


@dataclass(frozen=True, slots=True)
class _LayerSpec:
    """One layer of a canonical namespace: a content of `width` elements where `heads` is 0."""

    name: str
    heads: int
    width: int
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one token."""
        return (self.heads, self.width) if self.heads else (self.width,)


def _specs(fmt: ObjectFormat) -> list[_LayerSpec]:
    """Return all layers of a canonical namespace, with all heads."""
    for layout in _layouts(fmt):
        if layout != "canonical":
            raise ConfigError(
                f"this namespace stores blocks as they lie in an engine (layout {layout}); tuples,"
                " blobs and pairs of paged caches need one with the canonical layout"
            )
    split = _split(fmt)
    return [
        _LayerSpec(
            spec.name,
            split * spec.shape[2] if len(spec.shape) == 4 else 0,
            spec.shape[-1],
            spec.dtype,
        )
        for shard in range(0, fmt.shards, split)
        for spec in fmt.tensors(shard)
    ]


def _one_kind(specs: Sequence[_LayerSpec]) -> _LayerSpec:
    """Return the spec that all layers share; raise if they differ."""
    first = specs[0]
    for spec in specs:
        if (spec.shape, spec.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"layers {first.name} and {spec.name} differ in heads, size or dtype: a blob "
                "cannot hold both, use tuples"
            )
    return first


def _one_sequence(tensor: Tensor, dimensions: int, where: str) -> Tensor:
    """Remove a batch dimension of one."""
    if tensor.dim() == dimensions + 1 and tensor.shape[0] == 1:
        return tensor[0]
    if tensor.dim() != dimensions:
        raise ValueError(
            f"{where} has shape {list(tensor.shape)}; expected {dimensions} dimensions, with or "
            "without a batch dimension of 1 in front: one sequence at a time"
        )
    return tensor


def _listed(caches: Any) -> list[Any]:
    """Return the caches of layers as a list; raise unless there are any."""
    try:
        return list(caches)
    except TypeError:
        raise ValueError(
            f"caches is a {type(caches).__name__}; expected the paged cache of each layer, or a"
            " pair of K and V of each"
        ) from None


def _in_pairs(caches: Sequence[Any]) -> bool:
    """Whether paged caches are pairs of K and V."""
    return any(isinstance(cache, tuple | list) for cache in caches)


def _given(value: object) -> Sequence[Any]:
    """Return what should be the KV of layers; raise unless it has entries."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(
            f"the KV is a {type(value).__name__}; expected (K, V) of each layer, a tensor"
            " [2, layers, tokens, hidden], or PagedKV"
        )
    return value


def _tensors(value: object, where: str) -> list[Tensor]:
    """Return a list of tensors; raise unless `value` is a sequence of these."""
    values: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    for tensor in values:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{where} holds a {type(tensor).__name__}; expected tensors")
    return values


def _check_tensor(tensor: Tensor, where: str, dtype: str) -> None:
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"{where} lies on {tensor.device}; this version copies KV on CPUs and CUDA devices: "
            "pass it on one of them"
        )
    expected = TORCH_DTYPES[dtype]
    # vLLM keeps 8-bit floats in caches of uint8.
    if tensor.dtype != expected and (tensor.dtype, expected.itemsize) != (torch.uint8, 1):
        raise ConfigError(f"{where} is {tensor.dtype}; expected {expected}, as in the namespace")


def _open_dense(
    fmt: ObjectFormat, layers: Sequence[Sequence[Tensor]], names: Sequence[str], tokens: int
) -> BoundKV:
    """Make one form of the tensors of all layers, each ``[tokens, heads, size]`` or content."""
    calls = _plane_calls(fmt, layers, names, {"tokens": tokens}, _dense_layout)
    return BoundKV(_memory_of(calls if tokens else {}), tokens, torch.arange)


def _open_pairs(fmt: ObjectFormat, pairs: Sequence[Sequence[Tensor]]) -> tuple[KVCache, int]:
    """Make one memory of the paged caches of K and of V, and count its slots."""
    names = [f"caches[{i}]" for i in range(len(pairs))]
    blocks, size = pairs[0][0].shape[:2] if pairs[0] and pairs[0][0].dim() == 4 else (0, 0)
    leading = {"blocks": blocks, "block size": size}
    calls = _plane_calls(fmt, pairs, names, leading, lambda cache, _: PagedLayout.from_bnhd(cache))
    for of_shard in calls.values():
        for call in of_shard:
            ops.check_caches(call.caches, call.layout)
    return _memory_of(calls), blocks * size


def _plane_calls(
    fmt: ObjectFormat,
    layers: Sequence[Sequence[Tensor]],
    names: Sequence[str],
    leading: Mapping[str, int],
    layout_of: Callable[[Tensor, str], PagedLayout],
) -> dict[int, list[LayerCall]]:
    """Return the copy calls for layers that have K and V in tensors of their own.

    `leading` are the dimensions in front of those of a token.
    """
    specs = _specs(fmt)
    if len(layers) != len(specs):
        raise ValueError(f"KV of {len(layers)} layers was given; this namespace has {len(specs)}")
    for tensors, spec, name in zip(layers, specs, names, strict=True):
        if len(tensors) != (2 if spec.heads else 1):
            raise ValueError(
                f"{name} holds {len(tensors)} tensors; layer {spec.name} keeps "
                + ("K and V" if spec.heads else "a single content")
            )
        for tensor in tensors:
            if tuple(tensor.shape) != (*leading.values(), *spec.shape):
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, as [{', '.join(leading)}, …]; "
                    f"expected {[*leading.values(), *spec.shape]} for layer {spec.name}"
                )
            _check_tensor(tensor, name, spec.dtype)
    number = {spec.name: i for i, spec in enumerate(specs)}
    split = _split(fmt)
    calls: dict[int, list[LayerCall]] = {}
    for shard in range(fmt.shards if all(leading.values()) else 0):
        calls[shard] = []
        for stored in fmt.tensors(shard):
            i = number[stored.name]
            heads = max(1, specs[i].heads // split)
            size = stored.nbytes // len(layers[i])
            for kv, tensor in enumerate(layers[i]):
                layout = layout_of(tensor, names[i])
                start = stored.offset + kv * size
                first_head = shard % split * heads
                _append(
                    calls[shard],
                    LayerCall([tensor], layout, start, start + size, heads, first_head),
                )
    return calls


def _memory_of(calls: Mapping[int, Sequence[LayerCall]]) -> KVCache:
    """Return the KV in the tensors of copy calls, which are all on one device."""
    tensors = [cache for of_shard in calls.values() for call in of_shard for cache in call.caches]
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise UnsupportedError(
            f"the tensors lie on {' and '.join(devices)}; pass the KV of one call on one device"
        )
    return HostKVCache(calls) if devices in ([], ["cpu"]) else DeviceKVCache(calls)


def _append(calls: list[LayerCall], call: LayerCall) -> None:
    """Append a call for one tensor, or join it with the last one where one call can do both."""
    last = calls[-1] if calls else None
    if (
        last is not None
        and (last.layout, last.heads) == (call.layout, call.heads)
        and last.caches[0].stride() == call.caches[0].stride()
        and last.caches[0].dtype == call.caches[0].dtype
    ):
        last.caches.extend(call.caches)
        calls[-1] = replace(last, end=call.end)
    else:
        calls.append(call)


def _dense_layout(tensor: Tensor, where: str) -> PagedLayout:
    """Describe a tensor [tokens, heads, size] or [tokens, content] as a cache of one block."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"the elements of a row of {where} are {tensor.stride(-1)} elements apart; expected a "
            "last dimension that is contiguous"
        )
    return PagedLayout.of_form(tensor, "NHD" if tensor.dim() == 3 else "NC")
