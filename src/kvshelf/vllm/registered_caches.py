"""Describes the KV caches that an engine registers: their layers, layout and namespace fields.

Owns the choice of the layers that are stored, the checks that kvshelf can serve their caches, and
the worker's report (:class:`~kvshelf.vllm.metadata.WorkerReport`). The layouts are learned by
:mod:`kvshelf.vllm.layout_discovery`. Runs on the worker's step thread.
"""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm

from kvshelf.config import Config
from kvshelf.errors import UnsupportedError
from kvshelf.kv.caches import LayerRun
from kvshelf.kv.layout_learning import LearnedLayout
from kvshelf.vllm.layout_discovery import (
    LayerCache,
    StoredLayout,
    choose_layout,
    discover_layouts,
    same_form,
)
from kvshelf.vllm.metadata import WorkerReport
from kvshelf.vllm.namespace import context_ranks, kv_scales, layer_kv_heads, rank_block_size
from kvshelf.vllm.speculation import draft_layers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RegisteredCaches:
    """The caches of a worker's layers and how they are stored.

    Attributes
    ----------
    names : tuple of str
        The layers with a cache of their own, in model order.
    bound : list of Tensor
        What each of these layers reads and writes: a view of the cache registered for it.
    runs : tuple of LayerRun
    unit_tokens : int
        Number of tokens for each entry of a slot mapping, see :class:`StoredLayout`.
    report : WorkerReport
        Without the weights.
    """

    names: tuple[str, ...]
    bound: list[torch.Tensor]
    runs: tuple[LayerRun, ...]
    unit_tokens: int
    report: WorkerReport

    @property
    def device(self) -> torch.device:
        """The device of all caches."""
        return self.runs[0].caches[0].device

    def rebind(self, layers: Mapping[str, Any]) -> bool:
        """Use the memory that the layers are bound to now.

        Parameters
        ----------
        layers : Mapping[str, object]
            vLLM's layers by name (``static_forward_context``).

        Returns
        -------
        bool
            False if shape, strides, dtype or device of a layer's cache are not those of which
            the layout was learned. Nothing has changed then.
        """
        found = [getattr(layers.get(name), "kv_cache", None) for name in self.names]
        bound = [cache for cache in found if isinstance(cache, torch.Tensor)]
        if len(bound) < len(found) or not all(map(same_form, self.bound, bound)):
            return False
        self.bound[:] = bound
        memory = iter(bound)
        for run in self.runs:
            run.caches[:] = [_in_memory_of(next(memory), cache) for cache in run.caches]
        return True


def describe_caches(
    kv_caches: Mapping[str, torch.Tensor],
    vllm_config: Any,
    config: Config,
    kv_cache_config: Any,
    *,
    of_drafter: bool = False,
) -> RegisteredCaches:
    """Learn the layout of the caches of an engine's model, or of its drafter.

    Parameters
    ----------
    kv_caches : Mapping[str, Tensor]
        As vLLM registers them, by layer.
    vllm_config : VllmConfig
    config : Config
    kv_cache_config : KVCacheConfig or None
    of_drafter : bool

    Raises
    ------
    UnsupportedError
        If kvshelf does not support a cache of this kind.
    ConfigError
        If the chunk size or the option `layout` does not fit the layout.
    """
    drafts = draft_layers(vllm_config)
    names = [
        name
        for name in cached_layers(kv_caches, vllm_config, kv_cache_config)
        if (name in drafts) is of_drafter
    ]
    context = vllm_config.compilation_config.static_forward_context
    _check_layers(names, context, kv_caches)
    cache_config = vllm_config.cache_config
    block_size = rank_block_size(vllm_config, kv_cache_config)
    num_blocks = getattr(kv_cache_config, "num_blocks", None)
    num_blocks = int(num_blocks or getattr(cache_config, "num_gpu_blocks", 0) or 0)
    layers = discover_layouts(
        context,
        kv_caches,
        names,
        num_blocks=num_blocks,
        block_size=block_size,
        cache_dtype=str(cache_config.cache_dtype),
        compute_dtype=vllm_config.model_config.dtype,
    )
    logger.info(
        "layouts learned from %d writes to %d layers in %.0f ms: %s",
        sum(layer.learned.writes for layer in layers),
        len(layers),
        sum(layer.seconds for layer in layers) * 1e3,
        ", ".join(sorted({layer.learned.kind for layer in layers})),
    )
    layers, kv_heads = _kv_heads(layers, vllm_config)
    parallel = vllm_config.parallel_config
    stored = choose_layout(
        layers,
        config.layout,
        chunk_size=config.chunk_size,
        block_size=block_size,
        engine={
            **_device_facts(context[names[0]].kv_cache.device),
            "num_blocks": num_blocks,
            "block_size": block_size,
            "vllm": vllm.__version__,
            "cache_dtype": cache_config.cache_dtype,
            "compute_dtype": vllm_config.model_config.dtype,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
        },
        kv_heads=kv_heads,
        replicated=_are_replicated(names, kv_cache_config),
        context_ranks=context_ranks(vllm_config, kv_cache_config),
    )
    report = _report(layers, stored, context, str(cache_config.cache_dtype))
    bound = [context[name].kv_cache for name in names]
    return RegisteredCaches(tuple(names), bound, stored.runs, stored.unit_tokens, report)


def _kv_heads(layers: Sequence[LayerCache], vllm_config: Any) -> tuple[list[LayerCache], list[int]]:
    """Return the layers, and the KV heads of each in the whole model.

    The layout of a layer counts as unknown where its heads are: its blocks are stored whole then.
    """
    told, kv_heads = [], []
    for layer in layers:
        heads: int | None = layer.heads
        if layer.kv_planes == 2 and layer.learned.layout is not None:
            heads = layer_kv_heads(vllm_config, layer.name, layer.heads)
        if heads is None:
            reason = "a rank holds one KV head, and vLLM's configuration does not state which"
            layer = replace(layer, learned=LearnedLayout(None, reason), dtype="U8")
        told.append(layer)
        kv_heads.append(heads or 0)
    return told, kv_heads


def _are_replicated(names: Sequence[str], kv_cache_config: Any) -> bool:
    """Whether vLLM states of each layer that all tensor-parallel ranks hold the same KV.

    It does of the latent KV of MLA and of sparse indexers, by the field `max_tp_shards` of
    ``AttentionSpec`` in vllm/v1/kv_cache_interface.py.
    """
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    if not groups:
        return False
    spec = groups[0].kv_cache_spec
    # Layers with blocks of different bytes keep their own specs.
    specs = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(names, spec)
    return all(getattr(specs.get(name), "max_tp_shards", None) == 1 for name in names)


def _in_memory_of(bound: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return a view of the form of `cache` that begins where `bound` does."""
    if bound.data_ptr() == cache.data_ptr():
        return cache
    offset = bound.storage_offset() * bound.element_size() // cache.element_size()
    view = torch.empty(0, dtype=cache.dtype, device=cache.device)
    return view.set_(bound.untyped_storage(), offset, cache.shape, cache.stride())


def cached_layers(
    kv_caches: Mapping[str, torch.Tensor], vllm_config: Any, kv_cache_config: Any
) -> list[str]:
    """Return the names of layers with a cache of their own, in model order."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    layers = vllm_config.compilation_config.static_forward_context
    return sorted(
        (
            name
            for name in (groups[0].layer_names if groups else kv_caches)
            if name in kv_caches
            and not getattr(layers.get(name), "kv_sharing_target_layer_name", None)
        ),
        key=natural_order,
    )


def natural_order(name: str) -> list[str | int]:
    """Return a sort key that puts layer 10 behind layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _check_layers(
    names: Sequence[str], context: Mapping[str, Any], kv_caches: Mapping[str, torch.Tensor]
) -> None:
    for name in names:
        if name not in context:
            raise UnsupportedError(
                f"a KV cache is registered for layer {name}, which the model does not have;"
                " remove --kv-transfer-config for this model"
            )
        kind = getattr(getattr(context[name], "impl", None), "attn_type", "decoder")
        kind = str(getattr(kind, "value", kind))
        if kind != "decoder":
            raise UnsupportedError(
                f"layer {name} has attention of kind {kind!r}, whose KV is not a function of"
                " the tokens before it; remove --kv-transfer-config for this model"
            )
        device, first = kv_caches[name].device, kv_caches[names[0]].device
        if device.type not in ("cpu", "cuda") or device != first:
            raise UnsupportedError(
                f"layer {name} keeps its KV on {device}, layer {names[0]} on {first}; kvshelf"
                " serves workers whose caches are all in host memory or all on one GPU. Remove"
                " --kv-transfer-config"
            )


def _content_kind(layer: LayerCache, layout: str) -> str:
    return "mla" if layer.kv_planes == 1 or layout.startswith("replicated-") else "full"


def _device_facts(device: torch.device) -> dict[str, object]:
    """Return the properties of the processor or GPU on which a layout could depend."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_capability(device)}
    return {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }


def _report(
    layers: Sequence[LayerCache],
    stored: StoredLayout,
    context: Mapping[str, Any],
    cache_dtype: str,
) -> WorkerReport:
    windows, kinds, head_sizes = [], [], []
    for layer, layout in zip(layers, stored.ids, strict=True):
        # The layer's own attribute: attention backends convert the window.
        window = getattr(context[layer.name], "sliding_window", None)
        windows.append(-1 if window is None else int(window))
        kind = _content_kind(layer, layout)
        kinds.append("sliding" if kind == "full" and windows[-1] >= 0 else kind)
        # An indexer has a cache and no heads.
        size = layer.head_size or getattr(context[layer.name], "head_size", None)
        head_sizes.append(int(size or context[layer.name].kv_cache.shape[-1]))
    names = tuple(layer.name for layer in layers)
    scaled = "fp8" in cache_dtype or any(layer.dtype.startswith("F8") for layer in layers)
    return WorkerReport(
        names,
        stored.shapes,
        stored.dtypes,
        stored.ids,
        tuple(kinds),
        tuple(head_sizes),
        tuple(windows),
        kv_scales=kv_scales(context, names) if scaled else (),
    )
