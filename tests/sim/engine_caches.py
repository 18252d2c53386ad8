"""What an engine model has of vLLM beside its scheduler: configuration, layers and paged caches.

Caches are laid out as vLLM does it: the first layers of all groups are at one address, the second
ones at another, and so on. A block belongs to one group at a time, and is as large as the largest
page. Configurations have what the connector reads, and no more.
"""

from __future__ import annotations

import copy
import math
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic.fields import FieldInfo
from torch import Tensor

from kvshelf.kv.layout import packed_positions
from tests.support import constants

with warnings.catch_warnings():
    # Importing vLLM warns of what torch and others deprecate.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheConfig
    from vllm.config.model_arch import ModelArchitectureConfig
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.attention.backend import AttentionImpl
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

# Tensors here are small: threads of torch would cost more than they save.
torch.set_num_threads(1)

#: KV heads of a plain model, elements of a head, and layers.
HEADS, SIZE, LAYERS = 2, 16, 2
#: Heads of keys and of values of a gated delta net, and the elements of each.
KEYS, VALUES, WIDTH = 2, 4, 8
#: Layouts by which engines differ. Of "odd" nothing can be learned.
FORMS = ("NHD", "HND", "2BNHD", "vec", "amx")
#: The folder with the configuration of models that have no files.
PUBLISHED = Path(__file__).parents[1] / "vllm" / "published"


# ------------------------------------------------------------------------- configuration


def model_config(**options: Any) -> SimpleNamespace:
    """What the connector reads of a ``ModelConfig``."""
    values = {
        "is_encoder_decoder": False,
        "is_diffusion": False,
        "is_prefix_caching_supported": True,
        "use_mla": False,
        "dtype": torch.bfloat16,
        "quantization": None,
        "model": "mini",
        "hf_config_path": str(PUBLISHED),
        "served_model_name": None,
        "max_model_len": 4096,
        "hf_text_config": SimpleNamespace(rope_theta=10000.0),
        "get_total_num_kv_heads": lambda: HEADS,
    }
    return SimpleNamespace(**values | options)


def stated_heads(heads: Sequence[int]) -> ModelArchitectureConfig:
    """What vLLM's configuration states of a model whose layers have these KV heads."""
    layers = [
        ModelArchitectureConfig(
            architectures=["Simulated"],
            model_type="simulated",
            text_model_type=None,
            hidden_size=64,
            total_num_hidden_layers=len(heads),
            total_num_attention_heads=max(heads),
            head_size=SIZE,
            vocab_size=1000,
            total_num_kv_heads=count,
            num_experts=0,
            num_experts_per_token=0,
            quantization_config=None,
            is_deepseek_mla=False,
            is_mm_prefix_lm=False,
            rswa_window=None,
            derived_max_model_len_and_key=(4096.0, None),
        )
        for count in heads
    ]
    return ModelArchitectureConfig.from_layers(layers)


def parallel_config(**options: Any) -> SimpleNamespace:
    """What the connector reads of a ``ParallelConfig``."""
    values = {
        "rank": 0,
        "world_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    return SimpleNamespace(**values | options)


def speculation(method: str, **options: Any) -> SimpleNamespace:
    """What the connector reads of a ``SpeculativeConfig``."""
    values = {
        "method": method,
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": None,
        "draft_model_config": None,
        "draft_parallel_config": None,
        "draft_load_config": None,
        "kv_cache_dtype": None,
    }
    return SimpleNamespace(**values | options)


def drafter(drafts: int = 3, **options: Any) -> SimpleNamespace:
    """What vLLM's scheduler reads besides: an MTP drafter, whose layers are in the checkpoint."""
    values = {
        "num_speculative_tokens": drafts,
        "max_num_new_slots_for_drafting": 0,
        "draft_model_config": model_config(),
        "use_eagle": lambda: True,
        "use_eagle_block_drop": lambda: True,
        "use_dspark": lambda: False,
        "use_dflash": lambda: False,
        "use_multi_module_mtp": lambda: False,
        "uses_draft_model": lambda: False,
    }
    return speculation(**{"method": "mtp"} | values | options)


def guesser(drafts: int) -> SimpleNamespace:
    """What vLLM's scheduler reads of a method without KV."""
    never = {"use_eagle": lambda: False, "use_eagle_block_drop": lambda: False}
    return drafter(drafts, method="ngram", draft_model_config=None, **never)


def transfer_config(shelf: str, role: str = "kv_both", **options: Any) -> SimpleNamespace:
    """What vLLM's scheduler and the connector read of a ``KVTransferConfig``.

    `options` are kvshelf's; with a `server` among them it has the shelf itself.
    """
    extra = {
        **({} if "server" in options else {"shared_storage_path": shelf}),
        "chunk_size": 8,
        "weights": "name:test",
        **constants.taken({"memory_bytes": 8 << 20, **options}),
    }
    return SimpleNamespace(
        kv_connector="SharedStorageConnector",
        kv_connector_module_path="kvshelf.vllm.connector",
        engine_id=uuid.uuid4().hex,
        kv_connector_extra_config=extra,
        kv_load_failure_policy="recompute",
        kv_role=role,
        is_kv_transfer_instance=True,
        is_kv_producer=role in ("kv_both", "kv_producer"),
        is_kv_consumer=role in ("kv_both", "kv_consumer"),
    )


def vllm_config(
    layers: Mapping[str, Any], *, block_size: int = 4, blocks: int = 64, **options: Any
) -> SimpleNamespace:
    """What the connector reads of a ``VllmConfig`` of an engine with these layers."""
    values = {
        "model_config": model_config(),
        "parallel_config": parallel_config(),
        "cache_config": SimpleNamespace(
            block_size=block_size,
            cache_dtype="auto",
            num_gpu_blocks=blocks,
            enable_prefix_caching=True,
        ),
        "scheduler_config": SimpleNamespace(
            enable_chunked_prefill=True, max_num_batched_tokens=2048
        ),
        "speculative_config": None,
        "num_speculative_tokens": 0,
        "num_lookahead_tokens": 0,
        "lora_config": None,
        "compilation_config": SimpleNamespace(static_forward_context=layers),
        "load_config": SimpleNamespace(load_format="auto", download_dir=None),
    }
    return SimpleNamespace(**values | options)


def scheduler_config(
    model: SimpleNamespace,
    *,
    block_size: int,
    blocks: int,
    budget: int,
    requests: int,
    asynchronous: bool,
    prefix_caching: bool,
    second_runner: bool,
    **options: Any,
) -> Any:
    """What vLLM's scheduler and the connector read of a ``VllmConfig``."""
    kind: Any = type("Config", (VllmConfig,), {"use_v2_model_runner": second_runner})
    config = object.__new__(kind)
    for field in fields(VllmConfig):
        if field.name not in ("model_config", "scheduler_config", "cache_config", "device_config"):
            object.__setattr__(config, field.name, _default_of(field))
    values = {
        "is_mm_prefix_lm": False,
        "is_multimodal_model": False,
        "multimodal_config": None,
        "uses_mrope": False,
        "runner_type": "generate",
        "supports_multimodal_inputs": False,
        "return_sampling_mask": False,
    }
    config.model_config = SimpleNamespace(**values | vars(model))
    for name, value in options.items():
        object.__setattr__(config, name, value)
    config.scheduler_config = SchedulerConfig(
        max_model_len=16384,
        is_encoder_decoder=False,
        max_num_batched_tokens=budget,
        max_num_seqs=min(requests, budget),
        enable_chunked_prefill=True,
        async_scheduling=asynchronous,
        disable_hybrid_kv_cache_manager=False,
        watermark=0.0,
    )
    config.cache_config = CacheConfig(
        block_size=block_size, enable_prefix_caching=prefix_caching, mamba_cache_mode="align"
    )
    config.cache_config.num_gpu_blocks = blocks
    config.device_config = SimpleNamespace(device_type="cpu")
    return config


def _default_of(field: Any) -> Any:
    """The default of a field of a pydantic dataclass."""
    # Set by pydantic, if the field has constraints.
    made = field.default if isinstance(field.default, FieldInfo) else field
    return made.default_factory() if callable(made.default_factory) else made.default


# ------------------------------------------------------------------------- layers


class Writing(AttentionImpl):  # type: ignore[type-arg]
    """An attention implementation that writes to one kind of cache.

    Parameters
    ----------
    form : str
        One of :data:`FORMS`, or ``odd``.
    block_size, heads : int
    window : int
        Tokens that a token attends to; −1 for all.
    """

    sliding_window: int | tuple[int, int]

    def __init__(self, form: str, block_size: int, heads: int = HEADS, window: int = -1) -> None:
        self.form, self.block_size, self.heads = form, block_size, heads
        # vLLM's implementation for CPUs has a number, others the tokens on both sides.
        packed = form in ("vec", "amx")
        self.sliding_window = window if packed else (-1, -1) if window < 0 else (window - 1, 0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.form != "odd":
            self.put(kv_cache, slot_mapping, torch.stack((key, value)))

    def _places(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Any]:
        """A view of the cache and the index of ``[tokens, kv_planes, heads, size]``."""
        block, token = slots // self.block_size, slots % self.block_size
        if self.form in ("vec", "amx"):
            order = packed_positions(self.form, self.block_size, SIZE, cache.element_size())
            assert order is not None
            flat = cache.view(cache.shape[0], self.heads, -1)
            inner = order.long()[:, token].movedim(0, 1).unsqueeze(2)
            heads = torch.arange(self.heads).view(1, 1, -1, 1)
            return flat, (block.view(-1, 1, 1, 1), heads, inner)
        if self.form == "2BNHD":
            return cache.permute(1, 2, 0, 3, 4), (block, token)
        return cache.unflatten(-1, (2, SIZE)).permute(0, 2, 3, 1, 4), (block, token)

    def put(self, cache: Tensor, slots: Tensor, values: Tensor) -> None:
        """Write ``[kv_planes, tokens, heads, size]``."""
        view, index = self._places(cache, slots)
        view[index] = values.movedim(1, 0).to(cache.dtype)

    def get(self, cache: Tensor, slots: Tensor) -> Tensor:
        """Read ``[kv_planes, tokens, heads, size]``."""
        view, index = self._places(cache, slots)
        return view[index].movedim(0, 1)


def names(group: str, count: int, first: int = 0, step: int = 1) -> tuple[str, ...]:
    """Names of layers that take turns with those of other groups."""
    return tuple(f"model.layers.{first + step * number}.{group}" for number in range(count))


@dataclass(frozen=True)
class Layers:
    """One KV cache group of a model: what its layers are, and how many.

    Attributes
    ----------
    kind : str
        ``full``, ``window``, ``local``, ``ring``, ``latent`` or the name of one of vLLM's backends
        for states.
    names : tuple of str
    block_size : int
    heads : tuple of int
        KV heads of each layer, or of all.
    drafts : tuple of str
        The layers of a drafter in this group, which come last.
    drafted : int
        States have room for so many drafts.
    reach : int
        Tokens that a window has, or a part of local attention; where it is 0, 4 more than a block,
        or two blocks.
    """

    kind: str
    names: tuple[str, ...]
    block_size: int = 8
    heads: tuple[int, ...] = (4,)
    drafts: tuple[str, ...] = ()
    drafted: int = 0
    reach: int = 0

    @property
    def window(self) -> int:
        """Tokens that a token attends to; −1 for all."""
        return (self.reach or self.block_size + 4) if self.kind == "window" else -1

    @property
    def part(self) -> int:
        """Tokens of a part within which tokens attend to each other, of kind local."""
        return self.reach or 2 * self.block_size

    @property
    def is_state(self) -> bool:
        """Whether its layers are recurrent."""
        return self.kind not in ("full", "window", "local", "ring", "latent")

    @property
    def rows(self) -> int:
        """The last tokens of which the first part of a state has a row each."""
        return {"GDN_ATTN": 3, "SHORT_CONV": 2}.get(self.kind, 0)

    def heads_of(self, index: int) -> int:
        """The KV heads of a layer on all ranks."""
        return self.heads[index % len(self.heads)]

    def layer_spec(self, index: int, ranks: int = 1, page: int | None = None) -> Any:
        """vLLM's specification of a layer on one of `ranks` ranks."""
        common: dict[str, Any] = {"block_size": self.block_size, "page_size_padded": page}
        if self.kind in ("full", "window", "local", "ring"):
            common |= {
                "num_kv_heads": max(1, self.heads_of(index) // ranks),
                "head_size": SIZE,
                "dtype": torch.bfloat16,
            }
        if self.kind == "full":
            return FullAttentionSpec(**common)
        if self.kind == "local":
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.part)
        if self.kind == "window":
            return SlidingWindowSpec(**common, sliding_window=self.window)
        if self.kind == "ring":
            return CircularBufferSpec(**common)
        if self.kind == "latent":
            # Some layers have larger ones; all ranks hold the same.
            return MLAAttentionSpec(
                block_size=self.block_size,
                num_kv_heads=1,
                head_size=SIZE * (index + 1),
                dtype=torch.uint8,
                max_tp_shards=1,
            )
        shapes, dtypes = _state(self.kind, ranks)
        if self.drafted and self.rows:
            tokens, channels = shapes[0]
            shapes = ((tokens + self.drafted, channels), *shapes[1:])
        return MambaSpec(
            **common,
            shapes=shapes,
            dtypes=dtypes,
            mamba_type=MambaAttentionBackendEnum[self.kind],
            mamba_cache_mode="align",
            num_speculative_blocks=self.drafted,
        )

    def spec(self, ranks: int = 1, page: int | None = None) -> Any:
        """vLLM's specification of the group."""
        layers = (*self.names, *self.drafts)
        specs = {name: self.layer_spec(i, ranks, page) for i, name in enumerate(layers)}
        first, *others = specs.values()
        if all(spec == first for spec in others):
            return first
        return UniformTypeKVCacheSpecs(block_size=self.block_size, kv_cache_specs=specs)


def _state(kind: str, ranks: int) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    if kind == "GDN_ATTN":
        channels = (2 * KEYS + VALUES) * WIDTH // ranks
        shapes = ((3, channels), (VALUES // ranks, WIDTH, WIDTH))
        return shapes, (torch.bfloat16, torch.float32)
    if kind == "SHORT_CONV":
        return ((2, 16 // ranks),), (torch.bfloat16,)
    # Nothing tells how its tensors are divided.
    return ((VALUES // ranks, 3), (5,)), (torch.bfloat16, torch.float32)


#: A model whose layers are all alike.
PLAIN = (Layers("full", names("self_attn.attn", LAYERS), 4, (HEADS,)),)
#: Groups of models, in small.
MODELS: Mapping[str, tuple[Layers, ...]] = {
    "gemma": (
        Layers("window", names("attn", 2, 0, 3)),
        Layers("window", names("attn", 2, 1, 3)),
        Layers("full", names("attn", 2, 2, 3)),
    ),
    "qwen": (
        Layers("GDN_ATTN", names("linear_attn", 2, 0, 3)),
        Layers("GDN_ATTN", names("linear_attn", 2, 1, 3)),
        Layers("full", names("self_attn.attn", 2, 2, 3)),
    ),
    "three kinds": (
        Layers("SHORT_CONV", names("conv", 2, 0, 4)),
        Layers("full", names("attn", 2, 1, 4), 16),
        Layers("window", names("attn", 2, 2, 4)),
        Layers("GDN_ATTN", names("linear_attn", 2, 3, 4)),
    ),
    "undivided": (
        Layers("LINEAR", names("mixer", 2, 0, 2)),
        Layers("full", names("attn", 2, 1, 2)),
    ),
    "states only": (Layers("GDN_ATTN", names("mixer", 3)),),
    "llama 4": (Layers("local", names("attn", 2, 0, 2)), Layers("full", names("attn", 2, 1, 2))),
    # Layers that compress several tokens into one, and hold those of which a part is to come.
    "rings": (
        Layers("ring", names("ring", 2, 0, 4)),
        Layers("full", names("attn", 2, 1, 4)),
        Layers("window", names("attn", 2, 2, 4)),
        Layers("ring", names("ring", 2, 3, 4), 4),
    ),
    # Windows of two sizes in blocks of two sizes, and no full attention.
    "two windows": (
        Layers("window", names("attn", 2, 0, 3), 16),
        Layers("window", names("attn", 2, 1, 3)),
    ),
}


def model_groups(*groups: tuple[str, int] | tuple[str, int, int]) -> tuple[Layers, ...]:
    """Groups of a layer each: kinds, tokens of a block, and the reach of windows."""
    return tuple(
        Layers(kind, names("attn", 1, number), size, (1,), reach=reach[0] if reach else 0)
        for number, (kind, size, *reach) in enumerate(groups)
    )


#: Groups that vLLM 0.32 makes for models, with small blocks and few layers.
PUBLISHED_MODELS: Mapping[str, tuple[Layers, ...]] = {
    "plain": model_groups(("full", 8)),
    "gpt-oss": model_groups(("window", 8, 16), ("full", 8)),
    # A model of Mamba2 layers only has one group.
    "Mamba2": model_groups(("GDN_ATTN", 16)),
    # Seven layers with states for each layer of attention.
    "Jamba": model_groups(("full", 16), *[("GDN_ATTN", 16)] * 3),
    "Nemotron-H": model_groups(("GDN_ATTN", 16), ("GDN_ATTN", 16), ("full", 16)),
    # Layers with pages of two sizes, beside sliding windows with smaller blocks.
    "DeepSeek V4": (
        Layers("full", names("attn", 2), 32, (2, 1)),
        *model_groups(("full", 8), ("full", 8), ("window", 8, 16), ("window", 16, 24))[2:],
    ),
    "Gemma 3": model_groups(("window", 8, 24), ("window", 8, 24), ("full", 8)),
    "Qwen3-Next": model_groups(*[("GDN_ATTN", 16)] * 3, ("full", 16)),
    "LFM2": model_groups(("SHORT_CONV", 8), ("SHORT_CONV", 8), ("full", 8)),
    # Windows of two sizes, and none that is full.
    "two windows": model_groups(("window", 8, 12), ("window", 4, 20)),
    "Llama 4": model_groups(("local", 8, 32), ("full", 8)),
    # Rings beside one group, beside states and beside windows.
    "GLM-5-next": model_groups(("full", 16), ("ring", 8)),
    "Qwen4-exp": model_groups(("ring", 8), ("GDN_ATTN", 16), ("full", 16)),
    "ring and windows": model_groups(("window", 8, 24), ("ring", 8), ("full", 8), ("ring", 8)),
}


def held_heads(heads: int, rank: int, ranks: int) -> slice:
    """The heads that vLLM gives a tensor-parallel rank."""
    first = rank * heads // ranks
    return slice(first, first + max(1, heads // ranks))


def held_slots(
    table: Sequence[int], start: int, end: int, block_size: int, place: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """The tokens of ``[start, end)`` that a rank holds, from 0, and their slots.

    `place` is which of how many ranks that share the tokens of each block, and how many tokens each
    has in turn.
    """
    positions = torch.arange(start, end)
    number, ranks, run = place
    inside = positions % (block_size * ranks)
    turn = inside // run
    held = (turn % ranks == number).nonzero().flatten()
    blocks = torch.tensor(table, dtype=torch.int64)[positions // (block_size * ranks)]
    return held, (blocks * block_size + turn // ranks * run + inside % run)[held]


class PagedCaches:
    """The layers of one worker and their caches.

    Parameters
    ----------
    groups : sequence of Layers
    blocks : int
    form : str
        See :class:`Writing`; caches of ``2BNHD`` have memory of their own.
    rank, ranks : int
        The tensor-parallel rank, and their number.
    held : sequence of int, optional
        The groups whose layers this worker's pipeline stage has.
    odd : int, optional
        Nothing can be learned of this group's caches.
    """

    def __init__(
        self,
        groups: Sequence[Layers],
        blocks: int,
        form: str = "vec",
        *,
        rank: int = 0,
        ranks: int = 1,
        held: Sequence[int] | None = None,
        odd: int | None = None,
        seed: int = 0,
    ) -> None:
        self.groups, self.blocks, self.form, self.seed = groups, blocks, form, seed
        stage = range(len(groups)) if held is None else held
        #: For each group the names of its layers here.
        self.names = [
            (*group.names, *group.drafts) if n in stage else () for n, group in enumerate(groups)
        ]
        # Of latent KV vLLM's specification tells less than these caches have.
        least = max(group.block_size * max(1, group.heads_of(0) // ranks) for group in groups)
        self.page = max(
            least * 4 * SIZE if len(groups) == 1 else 0,
            *(
                group.layer_spec(i, ranks).page_size_bytes
                for group in groups
                for i in range(len(group.names + group.drafts))
            ),
        )
        padded = self.page if len(groups) > 1 else None
        self.specs = [group.spec(ranks, padded) for group in groups]
        self.config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(list(layers), spec, is_eagle_group=bool(group.drafts))
                for layers, spec, group in zip(self.names, self.specs, groups, strict=True)
            ],
        )
        self.layers: dict[str, Any] = {}
        #: For each layer its group, its specification, and its heads here.
        self.group_of: dict[str, int] = {}
        self.spec_of: dict[str, Any] = {}
        self.heads: dict[str, slice] = {}
        for n, (layers, group) in enumerate(zip(self.names, groups, strict=True)):
            for i, name in enumerate(layers):
                spec = self.spec_of[name] = group.layer_spec(i, ranks, padded)
                self.group_of[name] = n
                self.heads[name] = held_heads(group.heads_of(i), rank, ranks)
                self.layers[name] = self._layer(spec, "odd" if n == odd else form, group.window)
                if name in group.drafts:
                    self.layers[name].is_draft_layer = True
        self.allocate()

    def _layer(self, spec: Any, form: str, window: int) -> Any:
        if isinstance(spec, MambaSpec):
            return SimpleNamespace(kv_cache=(), num_spec=spec.num_speculative_blocks)
        if isinstance(spec, CircularBufferSpec):
            return SimpleNamespace(kv_cache=torch.tensor([]))
        heads = int(spec.num_kv_heads)
        return SimpleNamespace(
            impl=Writing(form, int(spec.block_size), heads, window),
            sliding_window=None if window < 0 else window,
            num_kv_heads=heads,
            head_size=SIZE,
            attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
            kv_cache=torch.tensor([]),
        )

    def allocate(self) -> None:
        """Make the memory of all caches, full of what was there before, and bind the layers."""
        generator = torch.Generator().manual_seed(self.seed)
        self.memory = [
            torch.randint(1, 100, (self.blocks * self.page,), dtype=torch.int8, generator=generator)
            for _ in range(max(map(len, self.names)))
        ]
        self.bind(
            {
                name: self._view(memory, self.spec_of[name])
                for layers in self.names
                for memory, name in zip(self.memory, layers, strict=False)
            }
        )
        for name in self.caches:
            self.block(name, 0).zero_()

    def bind(self, caches: Mapping[str, Tensor]) -> None:
        """Give each layer its cache, as vLLM does before it registers them."""
        self.caches = dict(caches)
        for name, cache in self.caches.items():
            layer = self.layers[name]
            is_state = isinstance(layer.kv_cache, tuple)
            layer.kv_cache = self._parts(name) if is_state else cache

    def _view(self, memory: Tensor, spec: Any) -> Tensor:
        blocks, page = self.blocks, self.page
        content = int(spec.state_content_size_bytes)
        if isinstance(spec, MambaSpec):
            return memory.as_strided((blocks, 1, 1, content), (page, content, content, 1))
        heads, size = int(spec.num_kv_heads), int(spec.block_size)
        if isinstance(spec, MLAAttentionSpec):
            content = 4 * SIZE
        if self.form == "2BNHD":
            halves = memory[: blocks * size * heads * content].view(torch.bfloat16)
            return halves.view(2, blocks, size, heads, SIZE)
        if self.form == "NHD":
            rows = (page, heads * content, content, 1)
            view = memory.as_strided((blocks, size, heads, content), rows)
            return view.view(torch.bfloat16).transpose(1, 2)
        rows = (page, size * content, content, 1)
        return memory.as_strided((blocks, heads, size, content), rows).view(torch.bfloat16)

    def _parts(self, name: str) -> tuple[Tensor, ...]:
        """Views of the parts of a state, as ``MambaBase.bind_kv_cache`` makes them."""
        spec = self.spec_of[name]
        pages, offset, parts = self.caches[name].squeeze((1, 2)), 0, []
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            end = offset + math.prod(shape) * dtype.itemsize
            parts.append(pages[:, offset:end].view(dtype).view(-1, *shape))
            offset = end
        return tuple(parts)

    def block(self, name: str, block: int) -> Tensor:
        """A block of a layer."""
        cache = self.caches[name]
        return cache[:, block] if self.form == "2BNHD" else cache[block]

    def rank_config(self, config: Any, **parallel: Any) -> Any:
        """The configuration of the engine as this worker has it."""
        made = copy.copy(config)
        compilation = SimpleNamespace(static_forward_context=self.layers)
        object.__setattr__(made, "compilation_config", compilation)
        merged = parallel_config(**vars(config.parallel_config) | parallel)
        object.__setattr__(made, "parallel_config", merged)
        return made


def attention_layers(caches: PagedCaches) -> Iterator[tuple[int, str, Writing, Tensor]]:
    """The group, name, implementation and cache of each layer with attention."""
    for name, cache in caches.caches.items():
        if hasattr(caches.layers[name], "impl"):
            yield caches.group_of[name], name, caches.layers[name].impl, cache


def make_config(
    shelf: str,
    *,
    block_size: int = 4,
    blocks: int = 64,
    role: str = "kv_both",
    window: int = -1,
    **options: Any,
) -> SimpleNamespace:
    """What the connector reads of a ``VllmConfig`` of an engine whose layers are all alike.

    `options` are kvshelf's; with a `server` among them it has the shelf itself.
    """
    layers = {
        name: SimpleNamespace(
            impl=Writing("vec", block_size, HEADS, window),
            sliding_window=None if window < 0 else window,
            num_kv_heads=HEADS,
            head_size=SIZE,
            attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
            kv_cache=torch.tensor([]),
        )
        for name in PLAIN[0].names
    }
    transfer = transfer_config(shelf, role, **options)
    return vllm_config(layers, block_size=block_size, blocks=blocks, kv_transfer_config=transfer)


def make_groups(
    config: SimpleNamespace, count: int = 1, blocks: int | None = None
) -> SimpleNamespace:
    """What the connector reads of a ``KVCacheConfig``."""
    layers = config.compilation_config.static_forward_context
    sizes = {
        "block_size": config.cache_config.block_size,
        "num_kv_heads": HEADS,
        "head_size": SIZE,
        "dtype": torch.bfloat16,
    }
    windows = {getattr(layer, "sliding_window", None) for layer in layers.values()} - {None}
    spec: Any = (
        SlidingWindowSpec(**sizes, sliding_window=max(windows))
        if windows
        else FullAttentionSpec(**sizes)
    )
    names = list(layers)
    group = SimpleNamespace(layer_names=names, kv_cache_spec=spec)
    return SimpleNamespace(
        kv_cache_groups=[group] * count,
        num_blocks=blocks or config.cache_config.num_gpu_blocks,
        prefix_cacheable_group_ids=tuple(range(count)),
    )


def make_caches(blocks: int, block_size: int) -> dict[str, Tensor]:
    """Empty caches of :func:`make_config`'s layers."""
    shape = (blocks, HEADS, block_size, 2 * SIZE)
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name in PLAIN[0].names}


def bind(config: SimpleNamespace, caches: Mapping[str, Tensor]) -> None:
    """Give each layer its cache, as vLLM does before it registers them."""
    for name, cache in caches.items():
        config.compilation_config.static_forward_context[name].kv_cache = cache
