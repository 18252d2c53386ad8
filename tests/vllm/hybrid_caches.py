"""Workers of hybrid models without a model: caches of several groups in one memory.

As vLLM lays them out: the first layers of all groups are at one address, the second ones at
another, and so on. A block belongs to one group at a time, and is as large as the largest page.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    from kvshelf.vllm.metadata import StepMetadata, WorkerMetadata
    from kvshelf.vllm.namespace import build_namespace
    from kvshelf.vllm.worker.engine import WorkerEngine
    from kvshelf.vllm.worker.side import WorkerSide
    from tests.vllm.replay import (
        HEAD_SIZE,
        CPUAttentionBackendImpl,
        StridedAttentionImpl,
        speculation,
    )

from kvshelf.assembly import Assembly
from kvshelf.config import Config
from kvshelf.format.kinds import STATE, Kind
from kvshelf.format.namespace import Namespace
from kvshelf.metrics import Counters
from kvshelf.tiers.tiered import AnyShelf
from tests.support import constants
from tests.vllm.configs import model_config, parallel_config, vllm_config

CHUNK, HEADS, BLOCKS = 16, 4, 40
#: Heads of keys and of values of a gated delta net, and the elements of each.
KEYS, VALUES, WIDTH = 2, 4, 8


@dataclass(frozen=True)
class Layers:
    """One group of a model: what its layers are, and how many.

    Attributes
    ----------
    kind : str
        ``full``, ``window``, ``local``, ``ring`` or the name of one of vLLM's backends for states.
    names : tuple of str
    block_size : int
    drafts : tuple of str
        The layers of a drafter in this group, which come last.
    drafted : int
        States have room for so many drafts.
    """

    kind: str
    names: tuple[str, ...]
    block_size: int = 8
    drafts: tuple[str, ...] = ()
    drafted: int = 0

    def spec(self, ranks: int, page: int | None = None) -> Any:
        """vLLM's specification of a layer on one of `ranks` ranks."""
        common = {"block_size": self.block_size, "page_size_padded": page}
        if self.kind in ("full", "window", "local", "ring"):
            common |= {
                "num_kv_heads": max(1, HEADS // ranks),
                "head_size": HEAD_SIZE,
                "dtype": torch.bfloat16,
            }
        if self.kind == "full":
            return FullAttentionSpec(**common)
        if self.kind == "local":
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=2 * self.block_size)
        if self.kind == "window":
            return SlidingWindowSpec(**common, sliding_window=self.block_size + 4)
        if self.kind == "ring":
            return CircularBufferSpec(**common)
        shapes, dtypes = _state(self.kind, ranks)
        if self.drafted:
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


def _state(kind: str, ranks: int) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    if kind == "GDN_ATTN":
        channels = (2 * KEYS + VALUES) * WIDTH // ranks
        shapes = ((3, channels), (VALUES // ranks, WIDTH, WIDTH))
        return shapes, (torch.bfloat16, torch.float32)
    if kind == "SHORT_CONV":
        return ((2, 16 // ranks),), (torch.bfloat16,)
    # Nothing tells how its tensors are divided.
    return ((VALUES // ranks, 3), (5,)), (torch.bfloat16, torch.float32)


def names(group: str, count: int, first: int, step: int) -> tuple[str, ...]:
    """Names of layers that take turns with those of other groups."""
    return tuple(f"model.layers.{first + step * number}.{group}" for number in range(count))


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
    "states only": (Layers("GDN_ATTN", names("mixer", 3, 0, 1)),),
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


class OfUnknownLayout(CPUAttentionBackendImpl):
    """Writes nothing, so that nothing can be learned."""

    def do_kv_cache_update(self, *args: Any) -> None:
        pass


class HybridWorker:
    """One worker of a hybrid engine on a shelf.

    Parameters
    ----------
    shelf : AnyShelf
    model : str or sequence of Layers
        One of :data:`MODELS`, or its groups.
    ranks, rank : int
        Tensor-parallel ranks of a stage; the worker's number over all stages.
    stages : sequence of sequence of int, optional
        For each pipeline stage, the groups whose layers it has.
    native : bool
        The attention backend permutes elements inside blocks, as CPUs do.
    unknown : int, optional
        The layout of this group's caches cannot be learned.
    streams : Any
        The streams of the device on which the caches are.
    others_fill : bool
        Another connector fills free blocks without waiting for the engine's stream.
    **options
        kvshelf's configuration.

    Attributes
    ----------
    namespace_open : Namespace
        The namespace that was announced to it last.
    """

    namespace_open: Namespace

    def __init__(
        self,
        shelf: AnyShelf,
        model: str | Sequence[Layers],
        *,
        ranks: int = 1,
        rank: int = 0,
        stages: Sequence[Sequence[int]] | None = None,
        native: bool = True,
        unknown: int | None = None,
        streams: Any = None,
        others_fill: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.groups = MODELS[model] if isinstance(model, str) else model
        stages = stages or [range(len(self.groups))]
        held = stages[rank // ranks]
        self.names = [
            (*one.names, *one.drafts) if n in held else () for n, one in enumerate(self.groups)
        ]
        specs = [one.spec(ranks) for one in self.groups]
        self.page = max(spec.page_size_bytes for spec in specs)
        self.specs = [one.spec(ranks, self.page) for one in self.groups]
        self.config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(list(layers), spec)
                for layers, spec in zip(self.names, self.specs, strict=True)
            ],
        )
        impl = CPUAttentionBackendImpl if native else StridedAttentionImpl
        self.layers: dict[str, Any] = {}
        for group, (layers, spec) in enumerate(zip(self.names, self.specs, strict=True)):
            for name in layers:
                own = OfUnknownLayout if group == unknown else impl
                self.layers[name] = self._layer(spec, own)
        self.vllm_config = _vllm_config(self.layers, ranks, len(stages), rank)
        drafts = [name for one in self.groups for name in one.drafts]
        if drafts or any(one.drafted for one in self.groups):
            drafter = self.vllm_config.model_config
            self.vllm_config.speculative_config = speculation("mtp", draft_model_config=drafter)
        for name in drafts:
            self.layers[name].is_draft_layer = True
        self.seed = seed
        self.allocate()
        config = Config(
            shared_storage_path="/nowhere",
            weights="name:test",
            chunk_size=CHUNK,
            **constants.taken({"staging_bytes": 8 << 20, **options}),
        )
        self.options = config
        self.side = WorkerSide(
            WorkerEngine(self.vllm_config, config, self.config, rank, lambda device: streams),
            Assembly(config, Counters(), lambda: shelf),
            others_fill=others_fill,
        )
        self.side.register(self.caches)
        self.registered = self.side.model.registration.caches

    def _layer(self, spec: Any, impl: Any) -> Any:
        if isinstance(spec, MambaSpec):
            return SimpleNamespace(kv_cache=(), num_spec=spec.num_speculative_blocks)
        if isinstance(spec, CircularBufferSpec):
            return SimpleNamespace(kv_cache=torch.tensor([]))
        window = getattr(spec, "sliding_window", None)
        return SimpleNamespace(
            impl=impl(-1 if window is None else window),
            sliding_window=window,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            attn_backend=SimpleNamespace(forward_includes_kv_cache_update=False),
            kv_cache=torch.tensor([]),
        )

    def allocate(self) -> None:
        """Make the memory of all caches, full of what was there before, and bind the layers."""
        most = max(map(len, self.names))
        generator = torch.Generator().manual_seed(self.seed)
        size = BLOCKS * self.page
        self.memory = [
            torch.randint(1, 100, (size,), dtype=torch.int8, generator=generator)
            for _ in range(most)
        ]
        self.caches: dict[str, Tensor] = {}
        for layers, spec in zip(self.names, self.specs, strict=True):
            for memory, name in zip(self.memory, layers, strict=False):
                self.caches[name] = self._view(memory, spec)
        for name, cache in self.caches.items():
            layer = self.layers[name]
            is_state = isinstance(layer.kv_cache, tuple)
            layer.kv_cache = self._parts(name) if is_state else cache

    def _view(self, memory: Tensor, spec: Any) -> Tensor:
        content = spec.state_content_size_bytes
        if isinstance(spec, MambaSpec):
            return memory.as_strided((BLOCKS, 1, 1, content), (self.page, content, content, 1))
        shape = (BLOCKS, spec.num_kv_heads, spec.block_size, content)
        inner = spec.block_size * content
        view = memory.as_strided(shape, (self.page, inner, content, 1))
        return view.view(torch.bfloat16)

    def _parts(self, name: str) -> tuple[Tensor, ...]:
        """Views of the parts of a state, as ``MambaBase.bind_kv_cache`` makes them."""
        spec = next(s for names, s in zip(self.names, self.specs, strict=True) if name in names)
        pages, offset, parts = self.caches[name].squeeze((1, 2)), 0, []
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            end = offset + math.prod(shape) * dtype.itemsize
            parts.append(pages[:, offset:end].view(dtype).view(-1, *shape))
            offset = end
        return tuple(parts)

    def of(self, kind: Kind) -> list[int]:
        """The numbers of the groups of a kind."""
        return [n for n, one in enumerate(self.groups) if _kind(one) == kind]

    def content(self, group: int, block: int) -> list[Tensor]:
        """The bytes of a block in each layer of a group."""
        return [self.caches[name][block].clone() for name in self.names[group]]

    def namespace(self, *others: HybridWorker, weights: str = "user:test") -> Namespace:
        """The namespace of an engine; `others` are the first workers of its other stages."""
        workers = (self, *others)
        reports = [worker.registered.report for worker in workers if worker.registered]
        return build_namespace(self.vllm_config, self.options, reports, weights)

    def step(self, meta: StepMetadata) -> tuple[set[str], set[str], WorkerMetadata | None]:
        """One step; returns the requests whose loads are over, those to compute, and the rest."""
        self.side.bind(meta)
        self.side.loads.start()
        self.side.stores.save()
        ended = self.side.loads.take_ended()
        assert not ended.bad_blocks
        reported = self.side.worker_metadata()
        self.side.clear(meta)
        return ended.finished, ended.failed, reported


def _kind(layers: Layers) -> Kind | None:
    kinds: Mapping[str, Kind | None] = {
        "full": "full",
        "window": "window",
        "local": "window",
        "ring": None,
    }
    return kinds.get(layers.kind, STATE)


def _vllm_config(layers: Mapping[str, Any], ranks: int, stages: int, rank: int) -> Any:
    return vllm_config(
        layers,
        block_size=8,
        blocks=BLOCKS,
        parallel_config=parallel_config(
            rank=rank,
            world_size=ranks * stages,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=stages,
        ),
        model_config=model_config(get_total_num_kv_heads=lambda: HEADS),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
