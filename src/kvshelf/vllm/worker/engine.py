"""What a worker knows of its engine before caches are registered. Immutable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvshelf.config import Config
from kvshelf.kv.streams import Streams
from kvshelf.memory.chunk_memory import Regions
from kvshelf.vllm.namespace import context_ranks, manager_block_size


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """The engine of a worker, or of the worker's drafter.

    Attributes
    ----------
    vllm_config : VllmConfig
        Of a drafter what :func:`kvshelf.vllm.speculation.draft_engine` returns.
    config : Config
    kv_cache_config : KVCacheConfig or None
        The cache groups; layer names come from the registered caches without it.
    rank : int
        Of a drafter that in its pipeline stage.
    streams : Callable[[torch.device], Streams or None]
        Returns the streams to use on a device; its own where the answer is None.
    regions : Callable, optional
        Takes memory for chunks, see :class:`~kvshelf.memory.chunk_memory.ChunkMemory`.
    of_drafter : bool
        The layers are those of the drafter, not of the model.
    """

    vllm_config: Any
    config: Config
    kv_cache_config: Any = None
    rank: int = 0
    streams: Callable[[torch.device], Streams | None] = lambda device: None
    regions: Regions | None = None
    of_drafter: bool = False

    @property
    def layers(self) -> Mapping[str, Any]:
        """The layers of vLLM by name."""
        layers: Mapping[str, Any] = self.vllm_config.compilation_config.static_forward_context
        return layers

    @property
    def context_ranks(self) -> int:
        """Over how many ranks the tokens of a block are spread."""
        return context_ranks(self.vllm_config, self.kv_cache_config)

    @property
    def block_size(self) -> int:
        """Tokens in a block of the cache manager, where there is one group."""
        return manager_block_size(self.vllm_config, self.kv_cache_config)
