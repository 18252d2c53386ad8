"""Describes the KV caches that an engine registers: their layers, layouts and namespace fields.

Owns the choice of the layers that are stored, the checks that kvshelf can serve their caches, and
the worker's report (:class:`~kvshelf.vllm.metadata.WorkerReport`). The layouts of attention layers
are learned by :mod:`kvshelf.vllm.layout_discovery`; where the parts of states lie is known
(:mod:`kvshelf.kv.states`), and checked. Runs on the worker's step thread.
"""

from __future__ import annotations

import itertools
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import torch
import vllm
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform

from kvshelf.config import Config
from kvshelf.errors import UnsupportedError
from kvshelf.format.kinds import FULL, KINDS, STATE, WINDOW, Kind
from kvshelf.kv.caches import LayerRun
from kvshelf.kv.interleave import InterleavedBlocks
from kvshelf.kv.layout_learning import LearnedLayout
from kvshelf.kv.states import StateLayer, StateParts, can_divide, split_state, state_runs
from kvshelf.vllm.groups import CacheGroup, CacheGroups
from kvshelf.vllm.layout_discovery import (
    LayerCache,
    StoredLayout,
    choose_layout,
    discover_layouts,
    fused_writer,
    same_form,
)
from kvshelf.vllm.metadata import WorkerReport
from kvshelf.vllm.namespace import context_ranks, kv_scales, layer_kv_heads
from kvshelf.vllm.published import attention_temperature
from kvshelf.vllm.speculation import draft_layers
from kvshelf.vllm.worker.precision import precision
from kvshelf.vllm.worker.slots import GroupSlots, StateBlocks, TokenSlots

#: Names that models use for the number of groups of B and C of Mamba 2.
_FIELDS_OF_GROUPS: Final = ("n_groups", "mamba_n_groups", "mamba_ngroups")


@dataclass(slots=True)
class KindCaches:
    """The caches of a worker's layers of one kind.

    Attributes
    ----------
    owners : tuple of str
        The layer of each cache of the runs, in their order.
    runs : tuple of LayerRun
        Of states known from :meth:`divide` on.
    slots : tuple of GroupSlots
        How chunks lie in the blocks of each cache group that has some of these layers, in the order
        of the runs' first slots. Of states known from :meth:`divide` on.
    states : dict of str to StateLayer
        The layers where they are of kind state, in the order of `owners`.
    block_sizes : dict of int to int
        Tokens in a block of each group with states.
    """

    owners: tuple[str, ...]
    runs: tuple[LayerRun, ...] = ()
    slots: tuple[GroupSlots, ...] = ()
    states: dict[str, StateLayer] = field(default_factory=dict)
    block_sizes: dict[int, int] = field(default_factory=dict)

    def divide(self, shards: int) -> None:
        """Divide the states among the shards that the worker holds."""
        if not self.states:
            return
        self.runs, units = state_runs(list(self.states.values()), shards)
        self.slots = tuple(
            StateBlocks(group, of_group, self.block_sizes[group])
            for group, of_group in units.items()
        )


@dataclass(frozen=True, slots=True)
class RegisteredCaches:
    """The caches of a worker's layers and how they are stored.

    Attributes
    ----------
    bound : dict of str to tuple of Tensor
        What each layer with a cache of its own reads and writes, in model order: a view of the
        cache registered for it; of a state a view of each part.
    kinds : dict of Kind to KindCaches
        Only full where the model has one group without states, and of a drafter.
    report : WorkerReport
        Without the weights.
    """

    bound: dict[str, tuple[torch.Tensor, ...]]
    kinds: dict[Kind, KindCaches]
    report: WorkerReport

    @property
    def device(self) -> torch.device:
        """The device of all caches."""
        return next(iter(self.bound.values()))[0].device

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
        bound_now = {name: bound_caches(layers.get(name)) for name in self.bound}
        for name, caches in self.bound.items():
            now = bound_now[name]
            if len(now) != len(caches) or not all(map(same_form, caches, now)):
                return False
        for kind in self.kinds.values():
            owners = iter(kind.owners)
            for run in kind.runs:
                run.caches[:] = [
                    self._moved(cache, bound_now, next(owners)) for cache in run.caches
                ]
            for name, state in kind.states.items():
                cache = self._moved(state.cache, bound_now, name)
                kind.states[name] = replace(state, cache=cache)
        self.bound.update(bound_now)
        return True

    def _moved(
        self,
        cache: torch.Tensor,
        bound_now: Mapping[str, tuple[torch.Tensor, ...]],
        name: str,
    ) -> torch.Tensor:
        """Return a view of the form of `cache` in the memory that a layer is bound to now."""
        old, new = self.bound[name][0], bound_now[name][0]
        if new.data_ptr() == old.data_ptr():
            return cache
        behind = cache.data_ptr() - old.data_ptr()
        start = new.storage_offset() * new.element_size() + behind
        view = torch.empty(0, dtype=cache.dtype, device=cache.device)
        return view.set_(
            new.untyped_storage(), start // cache.element_size(), cache.shape, cache.stride()
        )


def bound_caches(layer: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors that a layer reads and writes; none if it is bound to no cache.

    Layers with states are bound to a view of each part of the state (``MambaBase.bind_kv_cache`` in
    vllm/model_executor/layers/mamba/abstract.py).
    """
    bound = getattr(layer, "kv_cache", None)
    parts = bound if isinstance(bound, tuple) else (bound,)
    return parts if all(isinstance(part, torch.Tensor) for part in parts) else ()


class _Fields(NamedTuple):
    """What the namespace record says of one layer, in the order of :class:`WorkerReport`."""

    shape: str
    dtype: str
    layout: str
    attention: str
    head_size: int
    window: int


def describe_caches(
    kv_caches: Mapping[str, torch.Tensor],
    vllm_config: Any,
    config: Config,
    kv_cache_config: Any,
    modules: Sequence[torch.nn.Module],
    *,
    of_drafter: bool,
) -> RegisteredCaches:
    """Learn the layout of the caches of an engine's model, or of its drafter.

    Parameters
    ----------
    kv_caches : Mapping[str, Tensor]
        As vLLM registers them, by layer.
    vllm_config, config, kv_cache_config, of_drafter
        As for :class:`~kvshelf.vllm.worker.layers.StoredLayers`.
    modules : Sequence of Module
        Of the loaded model.

    Raises
    ------
    UnsupportedError
        If kvshelf does not support a cache of this kind.
    ConfigError
        If the chunk size or the option `layout` does not fit the layout.
    """
    drafts = draft_layers(vllm_config)
    groups = CacheGroups(vllm_config, kv_cache_config)
    has_groups = getattr(kv_cache_config, "kv_cache_groups", None)
    of_vllm: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
    cached = {
        group.index: []
        if group.index in groups.scratch
        else cached_layers(kv_caches, of_vllm, group.layer_names if has_groups else kv_caches)
        for group in groups
    }
    if drafts:
        groups.narrow(set(itertools.chain.from_iterable(cached.values())) - drafts)
    names_of = {
        index: [name for name in names if (name in drafts) is of_drafter]
        for index, names in cached.items()
    }
    if of_drafter:
        _check_full(groups, names_of)
    names = sorted(itertools.chain.from_iterable(names_of.values()), key=natural_order)
    _check_layers(names, of_vllm, kv_caches)
    ranks = context_ranks(vllm_config, kv_cache_config)
    layers = _Layers(kv_caches, vllm_config, config, kv_cache_config, of_vllm, ranks, names_of)
    kinds: dict[Kind, KindCaches] = {}
    for kind in KINDS:
        of_kind = [group for group in groups if group.kind == kind and names_of[group.index]]
        if of_kind:
            describe = layers.describe_states if kind == STATE else layers.describe_attention
            kinds[kind] = describe(of_kind)
        # Otherwise the layers of this kind are in other pipeline stages, or not of this model.
    fields_of = [layers.fields[name] for name in names]
    columns: Any = zip(*fields_of, strict=True)
    shapes, dtypes, layouts, attention, head_sizes, windows = columns
    scaled = "fp8" in layers.cache_dtype or any(field.dtype.startswith("F8") for field in fields_of)
    kind_of = {name: group.kind for group in groups for name in names_of[group.index]}
    of_kinds = groups.mixed and not of_drafter
    report = WorkerReport(
        tuple(names),
        shapes,
        dtypes,
        layouts,
        attention,
        head_sizes,
        windows,
        kv_scales=kv_scales(layers.modules, names) if scaled else (),
        kinds=tuple(kind_of[name] for name in names) if of_kinds else (),
        attention_temperature=attention_temperature(modules),
        # A drafter changes no answer.
        precision=() if of_drafter else precision(vllm_config, modules),
    )
    return RegisteredCaches({name: bound_caches(of_vllm[name]) for name in names}, kinds, report)


def _check_full(groups: CacheGroups, names_of: Mapping[int, Sequence[str]]) -> None:
    """Refuse a drafter's KV that cannot be stored with the full chunks of its model.

    Raises
    ------
    UnsupportedError
    """
    if any(names_of[group.index] and group.kind != FULL for group in groups):
        raise UnsupportedError("the drafter has sliding windows, or states")
    if FULL not in groups.kinds:
        raise UnsupportedError("the model has sliding windows or states in all of its layers")


@dataclass(frozen=True, slots=True)
class _Layers:
    """Describes the layers of one engine, kind by kind; adds to `fields` what the record says.

    `modules` are vLLM's layers by name, and `names_of` has the names of the layers of each group,
    in model order.
    """

    kv_caches: Mapping[str, torch.Tensor]
    vllm_config: Any
    config: Config
    kv_cache_config: Any
    modules: Mapping[str, Any]
    context_ranks: int
    names_of: Mapping[int, Sequence[str]]
    fields: dict[str, _Fields] = field(default_factory=dict)

    @property
    def cache_dtype(self) -> str:
        """The option `kv_cache_dtype`."""
        return str(self.vllm_config.cache_config.cache_dtype)

    @property
    def _num_blocks(self) -> int:
        stated = getattr(self.kv_cache_config, "num_blocks", None)
        of_cache = getattr(self.vllm_config.cache_config, "num_gpu_blocks", None)
        return int(stated or of_cache or 0)

    @property
    def _specs(self) -> dict[str, Any]:
        return layer_specs(self.kv_cache_config)

    def describe_attention(self, groups: Sequence[CacheGroup]) -> KindCaches:
        """Learn the layouts of the layers of one kind's groups, and choose how they are stored."""
        learned = {group.index: self._learn(group) for group in groups}
        every = [layer for layers, _ in learned.values() for layer in layers]
        order = sorted((layer.name for layer in every), key=natural_order)
        runs: list[LayerRun] = []
        slots: list[TokenSlots] = []
        first_slot = 0
        for group in groups:
            layers, kv_heads = learned[group.index]
            stored = self._choose(group, layers, kv_heads, order, every)
            blocks = InterleavedBlocks(self._block_size(group))
            slots.append(TokenSlots(group.index, blocks, stored.unit_tokens))
            runs += [replace(run, first_slot=first_slot) for run in stored.runs]
            first_slot += slots[-1].entries(self.config.chunk_size)
            for layer, layout, shape, dtype in zip(
                layers, stored.ids, stored.shapes, stored.dtypes, strict=True
            ):
                self._add_fields(group, layer, layout, shape, dtype)
        runs.sort(key=lambda run: run.first_layer)
        owners = [name for run in runs for name in order[run.first_layer :][: len(run.caches)]]
        return KindCaches(tuple(owners), tuple(runs), tuple(slots))

    def _block_size(self, group: CacheGroup) -> int:
        """Return the number of slots of a block in the caches of this worker."""
        return group.block_size // self.context_ranks

    def _learn(self, group: CacheGroup) -> tuple[list[LayerCache], list[int]]:
        """Return the layers of a group with their layouts, and the KV heads of each."""
        layers = discover_layouts(
            self.modules,
            self.kv_caches,
            self.names_of[group.index],
            num_blocks=self._num_blocks,
            block_size=self._block_size(group),
            cache_dtype=self.cache_dtype,
            compute_dtype=self.vllm_config.model_config.dtype,
        )
        return _kv_heads(layers, self.vllm_config)

    def _choose(
        self,
        group: CacheGroup,
        layers: Sequence[LayerCache],
        kv_heads: Sequence[int],
        order: Sequence[str],
        every: Sequence[LayerCache],
    ) -> StoredLayout:
        vllm_config, config = self.vllm_config, self.config
        size = self._block_size(group)
        facts: dict[str, object] = {
            **_device_facts(layers[0].cache.device),
            "num_blocks": self._num_blocks,
            "block_size": size,
            "vllm": vllm.__version__,
            "cache_dtype": vllm_config.cache_config.cache_dtype,
            "compute_dtype": vllm_config.model_config.dtype,
            "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
            "pipeline_parallel_size": vllm_config.parallel_config.pipeline_parallel_size,
        }
        writers = {fused_writer(self.modules[layer.name]) for layer in every}
        if fused := sorted(filter(None, writers)):
            facts["fused_writers"] = fused
            facts["pass_config"] = getattr(vllm_config.compilation_config, "pass_config", None)
        return choose_layout(
            layers,
            config.layout,
            chunk_size=config.chunk_size,
            block_size=size,
            engine=facts,
            kv_heads=kv_heads,
            replicated=_are_replicated(order, self._specs),
            context_ranks=self.context_ranks,
            alike=every,
            places=[order.index(layer.name) for layer in layers],
        )

    def _add_fields(
        self, group: CacheGroup, layer: LayerCache, layout: str, shape: str, dtype: str
    ) -> None:
        context = self.modules[layer.name]
        # The layer's own attribute: attention backends convert the window.
        window = getattr(context, "sliding_window", None)
        latent = layer.kv_planes == 1 or layout.startswith("replicated-")
        attention = "mla" if latent else "full"
        if group.kind == WINDOW and window is None:
            window = getattr(self._specs[layer.name], "sliding_window", None)
            attention = "chunked" if window is None else attention
        window = -1 if window is None else int(window)
        if attention == "full" and window >= 0:
            attention = "sliding"
        # An indexer has a cache and no heads.
        size = layer.head_size or getattr(context, "head_size", None)
        size = int(size or context.kv_cache.shape[-1])
        self.fields[layer.name] = _Fields(shape, dtype, layout, attention, size, window)

    def describe_states(self, groups: Sequence[CacheGroup]) -> KindCaches:
        """Find the parts of the states of some groups' layers."""
        group_of = {name: group for group in groups for name in self.names_of[group.index]}
        names = sorted(group_of, key=natural_order)
        specs = self._specs
        for name in names:
            _check_state(name, self.kv_caches[name], self.modules[name], specs[name])
        states = self._split_states(names, specs, divide=True)
        if not can_divide(states.values()):
            states = self._split_states(names, specs, divide=False)
        for name, state in states.items():
            shape, dtype = state.fields
            kind = _state_type(specs[name])
            self.fields[name] = _Fields(shape, dtype, state.layout, kind, 0, -1)
        return KindCaches(
            tuple(name for name in names for _ in states[name].parts),
            states={
                name: StateLayer(self.kv_caches[name], states[name], group_of[name].index)
                for name in names
            },
            block_sizes={group.index: group.block_size for group in groups},
        )

    def _split_states(
        self, names: Sequence[str], specs: Mapping[str, Any], *, divide: bool
    ) -> dict[str, StateParts]:
        model = getattr(self.vllm_config.model_config, "hf_text_config", None)
        stated = (getattr(model, name, None) for name in _FIELDS_OF_GROUPS)
        groups = next((int(count) for count in stated if count), None)
        return {
            name: split_state(
                specs[name].mamba_type.name.lower(),
                specs[name].shapes,
                specs[name].dtypes,
                int(self.vllm_config.parallel_config.tensor_parallel_size),
                is_conv_state_dim_first(),
                groups=groups,
                divide=divide and not specs[name].tp_replicated,
                drafts=self._drafts_of(name, specs[name]),
            )
            for name in names
        }

    def _drafts_of(self, name: str, spec: Any) -> int:
        """Return how many drafts of a step a layer's state can hold."""
        drafts = int(getattr(spec, "num_speculative_blocks", 0))
        if int(getattr(self.modules[name], "num_spec", 0)) != drafts:
            raise UnsupportedError(
                f"vLLM does not tell what drafts add to the state of layer {name}: remove"
                " --speculative-config or --kv-transfer-config"
            )
        return drafts


def _state_type(spec: Any) -> str:
    """Return the type of a state, and the platform whose kernels keep it.

    The order of the numbers in a state is a convention of the kernels, which its shape does not
    tell: those for CPUs keep the state of a gated delta net as [heads, key, value], those for GPUs
    as [heads, value, key] (vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py).
    """
    return f"{spec.mamba_type.name.lower()}@{current_platform.device_name}"


def _check_state(name: str, cache: torch.Tensor, layer: Any, spec: Any) -> None:
    """Check that the parts of a state lie in the registered cache one after the other.

    Raises
    ------
    UnsupportedError
        If they do not.
    """
    bound = bound_caches(layer)
    offset = 0
    fits = len(bound) == len(spec.shapes)
    for part, shape, dtype in zip(bound, spec.shapes, spec.dtypes, strict=False):
        fits = (
            fits
            and part.dtype == dtype
            and tuple(part.shape) == (cache.shape[0], *shape)
            and part[0].is_contiguous()
            and part.stride(0) * part.element_size() == cache.stride(0) * cache.element_size()
            and part.data_ptr() - cache.data_ptr() == offset
        )
        offset += math.prod(shape) * dtype.itemsize
    if not fits:
        raise UnsupportedError(
            f"the state of layer {name} does not lie in the cache that is registered for it as"
            " kvshelf expects, so that nothing could be stored or loaded; remove"
            " --kv-transfer-config for this model"
        )


def _kv_heads(layers: Sequence[LayerCache], vllm_config: Any) -> tuple[list[LayerCache], list[int]]:
    """Return the layers, and the KV heads of each in the whole model.

    The layout of a layer counts as unknown where its heads are: its blocks are stored whole then.
    """
    described, kv_heads = [], []
    for layer in layers:
        heads: int | None = layer.heads
        if layer.kv_planes == 2 and layer.learned.layout is not None:
            heads = layer_kv_heads(vllm_config, layer.name, layer.heads)
        if heads is None:
            reason = "a rank holds one KV head, and vLLM's configuration does not state which"
            layer = replace(layer, learned=LearnedLayout(None, reason), dtype="U8")
        described.append(layer)
        kv_heads.append(heads or 0)
    return described, kv_heads


def _are_replicated(names: Sequence[str], specs: Mapping[str, Any]) -> bool:
    """Whether vLLM states of each layer that all tensor-parallel ranks hold the same KV.

    It does of the latent KV of MLA and of sparse indexers, by the field `max_tp_shards` of
    ``AttentionSpec`` in vllm/v1/kv_cache_interface.py.
    """
    return all(getattr(specs.get(name), "max_tp_shards", None) == 1 for name in names)


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """Return vLLM's specification of each layer's cache; empty without a configuration."""
    specs: dict[str, Any] = {}
    for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
        spec = group.kv_cache_spec
        # Layers with blocks of different bytes keep their own specs.
        spec_of_layer = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(
            group.layer_names, spec
        )
        specs |= spec_of_layer
    return specs


def cached_layers(
    kv_caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any], names: Iterable[str]
) -> list[str]:
    """Return those of some layers that have a cache of their own, in model order."""
    owners = (
        name
        for name in names
        if name in kv_caches and not getattr(layers.get(name), "kv_sharing_target_layer_name", None)
    )
    return sorted(owners, key=natural_order)


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


def _device_facts(device: torch.device) -> dict[str, object]:
    """Return the properties of the processor or GPU on which a layout could depend."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_capability(device)}
    return {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
    }
