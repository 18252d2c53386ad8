"""Learns the layouts of vLLM's KV caches, and decides how chunks of them are stored.

Owns :func:`discover_layouts`, which lets :mod:`kvshelf.kv.layout_learning` write patterns through
each layer's own cache update, and :func:`choose_layout`, which derives one :class:`StoredLayout`
for the layers of one cache group from the learned layouts, the option ``layout`` and the chunk
size.

Contracts
---------
* Runs when caches are registered: bound to their layers, empty, before any graph is
  captured, on the worker's step thread. Afterwards the caches have their former content.
* A layer is written to only if its class and the first parameters of its cache update are one of
  the two known ones, further parameters have defaults, its dtype is neither packed nor scaled
  inline, and it does not share the cache of another layer. All other layouts are *unknown*, and
  nothing is written; a layer that uses other memory than what is registered for it is refused.
* Nothing is concluded from a name or a private function of vLLM: a layout that is stored as
  `canonical` or under a packing's name has been read back from this very cache.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.kv.caches import LayerRun
from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.layout_learning import (
    CacheShape,
    LearnedLayout,
    WritePattern,
    confirm_layout,
    learn_layout,
)
from kvshelf.vllm.namespace import stored_dtype

logger = logging.getLogger(__name__)

Kind = Literal["canonical", "native", "opaque"]

_TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
#: The arguments with which the cache updates are called, by position.
ATTENTION_UPDATE: Final[tuple[str, ...]] = ("layer", "key", "value", "kv_cache", "slot_mapping")
MLA_UPDATE: Final[tuple[str, ...]] = (
    "kv_c_normed",
    "k_pe",
    "kv_cache",
    "slot_mapping",
    "kv_cache_dtype",
    "k_scale",
)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache and its learned layout.

    Attributes
    ----------
    name : str
    cache : Tensor
        As registered.
    learned : LearnedLayout
    dtype : str
        safetensors dtype of the elements; ``U8`` where it is not known.
    kv_planes, heads, head_size : int
        2, KV heads in this cache and elements of K (and of V) for each; for MLA 1, 1 and
        the elements of the content; 0 where they are not known.
    backend : str
        Class of the layer's attention implementation; of a composite's part that writes.
    """

    name: str
    cache: Tensor
    learned: LearnedLayout
    dtype: str
    kv_planes: int
    heads: int
    head_size: int
    backend: str


class _UnknownLayoutError(Exception):
    """The layer is not of a kind that may be written to; the message says why."""


def discover_layouts(
    layers: Mapping[str, Any],
    kv_caches: Mapping[str, Tensor],
    names: Sequence[str],
    *,
    num_blocks: int,
    block_size: int,
    cache_dtype: str,
    compute_dtype: torch.dtype,
) -> list[LayerCache]:
    """Learn the layouts of layers' caches.

    Parameters
    ----------
    layers : Mapping[str, object]
        vLLM's layers by name (``static_forward_context``).
    kv_caches : Mapping[str, Tensor]
        The registered caches.
    names : Sequence[str]
        The layers whose layout to learn, each with a cache of its own.
    num_blocks, block_size : int
        Blocks of the cache manager, and the tokens in each.
    cache_dtype : str
        vLLM's ``--kv-cache-dtype``, for layers that do not name theirs.
    compute_dtype : torch.dtype
        Dtype in which the model computes K and V.

    Returns
    -------
    list of LayerCache
        In the order of `names`.

    Raises
    ------
    UnsupportedError
        If a layer uses other memory than the cache registered for it.
    """
    layout_of_form: dict[object, PagedLayout | PermutedLayout] = {}
    layouts = []
    for name in names:
        layer, cache = layers[name], kv_caches[name]
        bound = getattr(layer, "kv_cache", None)
        if not isinstance(bound, Tensor) or not _same_memory(bound, cache):
            raise UnsupportedError(
                f"the KV cache that is registered for layer {name} is not the one that is bound to"
                " it, so that nothing could be stored or loaded; remove --kv-transfer-config for"
                " this model"
            )
        dtype_name = str(getattr(layer, "kv_cache_dtype", None) or cache_dtype)
        backend = type(_implementation(layer))
        dtype, kv_planes, heads, head_size = "U8", 0, 0, 0
        try:
            dtype = _stored_dtype(dtype_name, cache)
            kv_planes, heads, head_size, write, scales = _writer(layer, dtype_name, compute_dtype)
            shape = CacheShape(
                num_blocks, block_size, heads, head_size, kv_planes, _TORCH_DTYPES[dtype], scales
            )
            kind = (
                backend,
                replace(shape, scales=(1.0, 1.0)),
                cache.shape,
                cache.stride(),
                cache.device,
                getattr(layer, "isa", None),
            )
            learned = _learn(cache, shape, write, layout_of_form.get(kind))
            if isinstance(learned.layout, PermutedLayout) and cache.device.type != "cpu":
                raise _UnknownLayoutError(
                    "its elements are permuted inside blocks, which no GPU kernel supports"
                )
            if learned.layout is not None:
                layout_of_form[kind] = learned.layout
        except _UnknownLayoutError as unknown:
            learned = LearnedLayout(None, str(unknown))
        except Exception as error:  # noqa: BLE001  a layer may lack expected attributes
            learned = LearnedLayout(None, f"{type(error).__name__}: {error}")
        if learned.layout is None:
            dtype = "U8"
        layouts.append(
            LayerCache(
                name,
                cache,
                learned,
                dtype,
                kv_planes,
                heads,
                head_size,
                f"{backend.__module__}.{backend.__qualname__}",
            )
        )
    return layouts


def _learn(
    cache: Tensor,
    shape: CacheShape,
    write: WritePattern,
    known: PagedLayout | PermutedLayout | None,
) -> LearnedLayout:
    try:
        if known is not None:
            confirmed = confirm_layout(cache, shape, write, known)
            if confirmed.layout is not None:
                return confirmed
        return learn_layout(cache, shape, write)
    except Exception as error:  # noqa: BLE001  whatever an engine's operator raises
        raise _UnknownLayoutError(f"its cache update failed: {error}") from None


def _stored_dtype(dtype_name: str, cache: Tensor) -> str:
    try:
        return stored_dtype(dtype_name, str(cache.dtype))
    except UnsupportedError as error:
        raise _UnknownLayoutError(str(error)) from None


def takes(signature: inspect.Signature, expected: Sequence[str]) -> bool:
    """Whether a cache update can be called with these arguments, and means them.

    Its first parameters have these names and can be given by position; further ones have
    defaults, which are what the method did before it had them.
    """
    parameters = list(signature.parameters.values())
    first, further = parameters[: len(expected)], parameters[len(expected) :]
    return (
        [parameter.name for parameter in first] == list(expected)
        and all(parameter.kind in _BY_POSITION for parameter in first)
        and all(parameter.default is not parameter.empty for parameter in further)
    )


_BY_POSITION: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def fused_writer(layer: Any) -> str:
    """Return why a kernel other than a layer's cache update may write its cache; empty if none.

    vLLM 0.33 has two of them: models that write KV before they call attention
    (``Attention.kv_cache_update_bypass``), and a compiler pass on ROCm after which an
    implementation interleaves V (``AttentionImpl.set_interleaved_v_cache``).
    """
    from vllm.v1.attention.backend import AttentionImpl

    if getattr(layer, "kv_cache_update_bypass", False):
        return "its model writes its cache before it calls attention"
    of_all = getattr(AttentionImpl, "set_interleaved_v_cache", None)
    # The pass may run after the caches are registered.
    if getattr(type(_implementation(layer)), "set_interleaved_v_cache", None) is not of_all:
        return "a compiler pass may interleave its V"
    return ""


def _implementation(layer: Any) -> Any:
    """Return the object that writes to a layer's cache."""
    impl = getattr(layer, "impl", layer)
    # The methods of a composite take any arguments; its first part writes.
    return getattr(impl, "general_impl", impl)


def _writer(
    layer: Any, dtype_name: str, compute_dtype: torch.dtype
) -> tuple[int, int, int, WritePattern, tuple[float, float]]:
    """Return KV planes, heads, head size, the write function and the scales of one layer.

    Raises
    ------
    _UnknownLayoutError
        If the layer must not be written to.
    """
    from vllm.v1.attention.backend import AttentionImpl, MLAAttentionImpl

    impl = _implementation(layer)
    if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
        raise _UnknownLayoutError("it shares another layer's cache")
    if fused := fused_writer(layer):
        raise _UnknownLayoutError(fused)
    bound: Tensor = layer.kv_cache
    if isinstance(impl, AttentionImpl):
        expected = ATTENTION_UPDATE
        if getattr(layer.attn_backend, "forward_includes_kv_cache_update", True):
            raise _UnknownLayoutError("it updates its cache inside attention")
        if int(getattr(layer, "head_size_v", layer.head_size)) != int(layer.head_size):
            raise _UnknownLayoutError("its K and V have different sizes")
    elif isinstance(impl, MLAAttentionImpl):
        expected = MLA_UPDATE
        if getattr(layer, "hisparse_cache", None) is not None:
            raise _UnknownLayoutError("its cache is one of two tiers")
    else:
        raise _UnknownLayoutError(f"{type(impl).__name__} is not a known kind of attention")
    update = getattr(impl, "do_kv_cache_update", None)
    signature = inspect.signature(update) if callable(update) else inspect.Signature()
    if update is None or not takes(signature, expected):
        raise _UnknownLayoutError(
            f"its cache update takes ({', '.join(signature.parameters)}), expected"
            f" ({', '.join(expected)}) and defaults for further ones"
        )
    mla = expected is MLA_UPDATE
    scales, factors = _scales(layer, 1 if mla else int(layer.num_kv_heads), "fp8" in dtype_name)
    device = bound.device

    def moved(rows: Tensor) -> Tensor:
        return rows.to(device=device, dtype=compute_dtype)

    if not mla:

        def write(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
            assert value is not None
            rows = moved(key * factors[0]), moved(value * factors[1])
            update(layer, *rows, bound, slots.to(device))
            _finish(device)

        return 2, int(layer.num_kv_heads), int(layer.head_size), write, scales

    rank = int(layer.kv_lora_rank)
    content = rank + int(layer.qk_rope_head_dim)

    def write_content(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        rows = moved(key)
        latent, rope = rows[:, 0, :rank].contiguous(), rows[:, :, rank:].contiguous()
        update(latent, rope, bound, slots.to(device), dtype_name, layer._k_scale)
        _finish(device)

    return 1, 1, content, write_content, scales


def _scales(layer: Any, heads: int, scaled: bool) -> tuple[tuple[float, float], list[Tensor]]:
    """Return one scale of K and of V, and the factors by which the heads' scales differ from it.

    The factors are float32 [1, heads, 1].

    Raises
    ------
    _UnknownLayoutError
        If the layer's scales are of another form.
    """
    chosen, factors = [1.0, 1.0], [torch.ones(1, heads, 1)] * 2
    for kv, name in enumerate(("_k_scale", "_v_scale") if scaled else ()):
        of_heads = getattr(layer, name, None)
        if of_heads is None or of_heads.numel() == 1:
            scales = [float(getattr(layer, f"{name}_float"))]
        else:
            scales = of_heads.flatten().tolist()
        if len(scales) not in (1, heads) or min(scales) <= 0:
            raise _UnknownLayoutError(
                f"its scales are {scales}, expected positive ones for all or each of {heads} heads"
            )
        # Preferably not a power of two: with such a scale exact values are expected.
        chosen[kv] = max(scales, key=lambda scale: math.frexp(scale)[0])
        factors[kv] = torch.tensor(scales).view(1, -1, 1) / chosen[kv]
    return (chosen[0], chosen[1]), factors


def _same_memory(bound: Tensor, registered: Tensor) -> bool:
    return (
        bound.device == registered.device
        and bound.untyped_storage().data_ptr() == registered.untyped_storage().data_ptr()
        and bound.data_ptr() == registered.data_ptr()
        and bound.nbytes == registered.nbytes
    )


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# --------------------------------------------------------------------------- the choice


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """How the layers of a worker that belong to one cache group are stored.

    Attributes
    ----------
    kind : str
        ``canonical``: token by token; ``native``: each (block, head) as bytes;
        ``opaque``: each block as bytes.
    unit_tokens : int
        Number of tokens for each entry of a slot mapping: 1 for canonical, else the block
        size of the cache tensors.
    runs : tuple of LayerRun
    ids, shapes, dtypes : tuple of str
        The namespace fields `layouts`, `layer_shapes` and `layer_dtypes` of each layer.
    """

    kind: Kind
    unit_tokens: int
    runs: tuple[LayerRun, ...]
    ids: tuple[str, ...]
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]


def choose_layout(
    layers: Sequence[LayerCache],
    option: str,
    *,
    chunk_size: int,
    block_size: int,
    engine: Mapping[str, object],
    kv_heads: Sequence[int],
    replicated: bool = False,
    context_ranks: int = 1,
    alike: Sequence[LayerCache] = (),
    places: Sequence[int] | None = None,
) -> StoredLayout:
    """Decide how the layers of a worker that belong to one cache group are stored.

    Parameters
    ----------
    layers : Sequence of LayerCache
        In model order.
    option : str
        The option ``layout``: auto or canonical.
    chunk_size, block_size : int
        Tokens in a chunk, and slots of a block in the caches of this worker.
    engine : Mapping
        Facts on which an unknown layout could depend, see :func:`opaque_id`.
    kv_heads : Sequence of int
        KV heads of each layer in the whole model. Shapes are those of the whole model, except for
        unknown layouts.
    replicated : bool
        All ranks of a stage hold the same in all layers.
    context_ranks : int
        Number of ranks over which the tokens of a block are spread. More than one store
        canonically, since a rank's block is not a block of neighbouring tokens.
    alike : Sequence of LayerCache
        The layers of other groups whose KV is stored in the same objects. Where the layout of one
        of them is unknown, whole blocks are stored of all.
    places : Sequence of int, optional
        Index of each layer among those whose KV is stored in the same objects; the layers follow
        each other from the first on when absent.

    Raises
    ------
    ConfigError
        If `option` or the chunk size does not fit the layouts, or an unknown layout is spread over
        ranks.
    UnsupportedError
        If an unknown layout cannot be copied block by block either.
    """
    every = (*layers, *alike)
    unknown = next((layer for layer in every if layer.learned.layout is None), None)
    places = range(len(layers)) if places is None else places
    if unknown is not None:
        _check_opaque(unknown, option, chunk_size, block_size, context_ranks)
        logger.warning(
            "%s. Whole blocks are stored instead, which only engines exactly like this one%s can"
            " load",
            _unknown_text(unknown),
            ", with any number of tensor-parallel ranks," if replicated else "",
        )
        return _opaque(layers, chunk_size, block_size, engine, replicated, places)
    layouts = [layer.learned.layout for layer in layers if layer.learned.layout is not None]
    stored = StoredLayout(
        "canonical",
        1,
        _runs(layers, layouts, kv_heads, places),
        ("canonical",) * len(layers),
        tuple(map(_shape, layers, kv_heads)),
        tuple(layer.dtype for layer in layers),
    )
    native = option == "auto" and _may_be_native(layers, chunk_size, context_ranks)
    return _native(stored) if native else stored


def _check_opaque(
    layer: LayerCache, option: str, chunk_size: int, block_size: int, context_ranks: int
) -> None:
    reason = _unknown_text(layer)
    if option != "auto":
        raise ConfigError(f"layout={option} cannot be used: {reason}. Set layout to auto")
    if context_ranks > 1:
        raise ConfigError(
            f"{reason}. So only whole blocks can be stored, but decode context parallelism spreads"
            f" the tokens of a block over {context_ranks} ranks: set decode_context_parallel_size"
            " to 1, or use an attention backend whose layout kvshelf knows"
        )
    if chunk_size % block_size:
        raise ConfigError(
            f"{reason}. So only whole blocks can be stored, but chunk_size={chunk_size} is not a"
            f" multiple of the block size {block_size}: set chunk_size to a multiple"
        )


def _unknown_text(layer: LayerCache) -> str:
    return f"the layout of layer {layer.name} ({layer.backend}) is unknown: {layer.learned.reason}"


def _may_be_native(layers: Sequence[LayerCache], chunk_size: int, context_ranks: int) -> bool:
    """Whether whole blocks can be stored as they are, and are copied faster so."""
    if context_ranks > 1 or any(layer.cache.device.type != "cpu" for layer in layers):
        return False
    sizes = set()
    for layer in layers:
        layout = layer.learned.layout
        if not isinstance(layout, PermutedLayout) or layout.kv_planes != 2:
            return False
        sizes.add(layout.block_size)
    return len(sizes) == 1 and chunk_size % max(sizes) == 0


def _native(canonical: StoredLayout) -> StoredLayout:
    """Return how layers are stored block by block whose elements are permuted inside blocks."""
    runs: list[LayerRun] = []
    ids: list[str] = []
    dtypes = iter(canonical.dtypes)
    block_size = 0
    for run in canonical.runs:
        layout = run.layout
        assert isinstance(layout, PermutedLayout)
        block_size = layout.block_size
        runs.append(replace(run, layout=layout.as_blocks(), token_layout=layout))
        ids += [f"cpu-{layout.packing}-{next(dtypes).lower()}-b{block_size}" for _ in run.caches]
    return replace(
        canonical, kind="native", unit_tokens=block_size, runs=tuple(runs), ids=tuple(ids)
    )


def _shape(layer: LayerCache, kv_heads: int) -> str:
    if layer.kv_planes == 1:
        return f"*,{layer.head_size}"
    return f"2,*,{kv_heads},{layer.head_size}"


def _opaque(
    layers: Sequence[LayerCache],
    chunk_size: int,
    block_size: int,
    engine: Mapping[str, object],
    replicated: bool,
    places: Sequence[int],
) -> StoredLayout:
    layouts, ids, shapes = [], [], []
    units = set()
    for layer in layers:
        cache = layer.cache
        block_dim = _block_dimension(cache)
        try:
            layout = PagedLayout.whole_blocks(cache, block_dim)
        except ValueError as error:
            raise UnsupportedError(
                f"the KV cache of layer {layer.name} cannot be stored: {error}. Remove"
                " --kv-transfer-config for this model"
            ) from None
        slots = int(engine["num_blocks"]) * block_size  # type: ignore[call-overload]
        unit, remainder = divmod(slots, cache.shape[block_dim])
        if remainder or not unit or block_size % unit:
            raise UnsupportedError(
                f"the KV cache of layer {layer.name} has shape {list(cache.shape)}, which cannot"
                f" be divided into blocks of a divisor of {block_size} tokens; remove"
                " --kv-transfer-config for this model"
            )
        units.add(unit)
        layouts.append(layout)
        ids.append(opaque_id(layer, block_dim, engine, replicated=replicated))
        shapes.append(f"{chunk_size // unit},{layout.heads * layout.row_bytes}")
    if len(units) > 1:
        raise UnsupportedError(
            f"layers have blocks of different size, {sorted(units)} tokens, and an unknown layout;"
            " remove --kv-transfer-config for this model"
        )
    return StoredLayout(
        "opaque",
        units.pop(),
        _runs(layers, layouts, [0] * len(layers), places),
        tuple(ids),
        tuple(shapes),
        ("U8",) * len(layers),
    )


def _block_dimension(cache: Tensor) -> int:
    return 1 if cache.dim() == 5 and cache.shape[0] == 2 else 0


def opaque_id(
    layer: LayerCache, block_dim: int, engine: Mapping[str, object], *, replicated: bool = False
) -> str:
    """Return the layout id of a cache whose layout is unknown.

    It is a digest of everything on which the meaning of a block's bytes could depend: `engine`
    (versions, parallelism, block sizes, dtypes, instruction set), the attention implementation,
    and shape and order of the cache's dimensions, but not the number of blocks. Where the
    cache is `replicated` on all ranks, their number is left out.
    """
    ignored = {"num_blocks", "tensor_parallel_size"} if replicated else {"num_blocks"}
    cache = layer.cache
    inside = [dimension for dimension in range(cache.dim()) if dimension != block_dim]
    block_stride = cache.stride(block_dim)
    described = {
        "backend": layer.backend,
        "dtype": str(cache.dtype),
        "shape": [cache.shape[dimension] for dimension in inside],
        # Strides above the block's depend on the number of blocks; their order is in `order`.
        "strides": [
            cache.stride(dimension) if cache.stride(dimension) < block_stride else -1
            for dimension in inside
        ],
        "order": sorted(range(cache.dim()), key=lambda dimension: -cache.stride()[dimension]),
        "engine": {name: str(value) for name, value in engine.items() if name not in ignored},
    }
    text = json.dumps(described, sort_keys=True)
    kind = "replicated-" if replicated else "opaque-"
    return kind + hashlib.sha256(text.encode()).hexdigest()[:16]


def _runs(
    layers: Sequence[LayerCache],
    layouts: Sequence[PagedLayout | PermutedLayout],
    kv_heads: Sequence[int],
    places: Sequence[int],
) -> tuple[LayerRun, ...]:
    """Join neighbouring layers with as many KV heads and caches of the same layout and form.

    Caches of one form can hold one of many heads of one layer, and one of few of another.
    """
    runs: list[LayerRun] = []
    for number, (layer, layout) in enumerate(zip(layers, layouts, strict=True)):
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.first_layer + len(last.caches) == places[number]
            and last.layout == layout
            and same_form(last.caches[0], layer.cache)
            and kv_heads[number - 1] == kv_heads[number]
        ):
            runs[-1] = LayerRun(last.first_layer, [*last.caches, layer.cache], layout)
        else:
            runs.append(LayerRun(places[number], [layer.cache], layout))
    return tuple(runs)


def same_form(a: Tensor, b: Tensor) -> bool:
    """Whether two caches have the same shape, strides, dtype and device."""
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
    )
