"""How much memory and how many threads move the KV of a worker.

The memory is taken when caches are registered: vLLM captures CUDA graphs next, and while it does no
thread may allocate on the device; and how much is free afterwards is not known. An engine with
pipeline stages knows the sizes only when all stages are known, and takes it in its first step.

Runs on the worker's step thread.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvshelf.backends import Properties
from kvshelf.config import DEFAULT_MEMORY, Config
from kvshelf.format.kinds import STATE, Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.topology import ShardPlan
from kvshelf.memory.arena import Arena
from kvshelf.memory.chunk_memory import ChunkMemory
from kvshelf.memory.pages import memory_limit
from kvshelf.memory.ring import rounded
from kvshelf.metrics import Counters
from kvshelf.transfer.context import STATE_SHARE
from kvshelf.transfer.transfers import default_io_threads
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.namespace import local_ranks, stage_ranks

logger = logging.getLogger(__name__)

# Most threads that load beside a GPU, where cores are idle.
_MOST_IDLE_CORES = 8
# Steps whose chunks the memory holds by default. Stores have half of it: one step is gathered while
# another is being published.
_STEPS = 4
# At most one part in this many of the memory that the process may use is taken by default.
_MEMORY_SHARE = 16


def io_threads(
    vllm_config: Any, on_device: bool, properties: Properties | None = None
) -> tuple[int, int]:
    """Return how many threads load and store; the least numbers for an unknown storage."""
    loads, stores = (1, 1) if properties is None else default_io_threads(properties)
    if not on_device:
        return loads, stores
    # Most cores beside a GPU are idle. Assumes that all ranks of a stage share this machine.
    ranks = stage_ranks(vllm_config)
    idle = min(_MOST_IDLE_CORES, len(os.sched_getaffinity(0)) // (2 * ranks))
    return max(2, loads, idle), max(1, stores, idle // 2)


def take_memory(
    vllm_config: Any,
    config: Config,
    kinds: Mapping[Kind, tuple[ObjectFormat, ShardPlan]],
    *,
    threads: int,
    rank: int = 0,
    device: torch.device | None = None,
    share: Callable[[Arena], None] | None = None,
    counters: Counters | None = None,
) -> ChunkMemory:
    """Take the memory through which chunks of all kinds move.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    kinds : Mapping
        The objects of each kind, and the shards that this worker holds.
    threads : int
        Threads that load from an unknown storage, and have a spare slot of each kind. For other
        storages there are more, as far as memory allows.
    rank, device, share, counters
        As for :class:`~kvshelf.memory.chunk_memory.ChunkMemory`; rank 0 warns for all.

    Raises
    ------
    ConfigError
        If there is not so much free memory.
    """
    chunks = _chunks_per_step(vllm_config, config)
    slot_bytes = {
        kind: sum(rounded(fmt.object_size(shard)) for shard in plan.shards)
        for kind, (fmt, plan) in kinds.items()
    }
    step = sum(
        math.ceil(chunks * (STATE_SHARE if kind == STATE else 1)) * nbytes
        for kind, nbytes in slot_bytes.items()
    )
    chunk = sum(slot_bytes.values())
    spares = threads * chunk
    if config.memory_bytes > 0:
        # That of this rank: the connector has divided it.
        total = config.memory_bytes
    else:
        allowed_bytes = memory_limit() // _MEMORY_SHARE // local_ranks(vllm_config)
        total = max(DEFAULT_MEMORY, min(_STEPS * step + spares, allowed_bytes), spares + 3 * chunk)
    for_stores = (total - min(spares, total // 2)) // 2
    if chunks and for_stores < step and not rank:
        logger.warning(
            "stores have %d bytes of memory, too few for the %d chunks that one step of %d"
            " tokens may complete: chunks of full attention are stored in later steps while"
            " their requests run, and the rest of such a step is not stored. It all takes %d"
            " bytes: give the engine twice as much memory, or set --max-num-batched-tokens"
            " lower",
            for_stores,
            chunks,
            vllm_config.scheduler_config.max_num_batched_tokens,
            step,
        )
    return ChunkMemory(
        total,
        keeps=config.memory_bytes > 0,
        first_bytes=2 * step,
        device=device,
        share=share,
        counters=counters,
        on_thread_start=widen_cpu_affinity,
    )


def _chunks_per_step(vllm_config: Any, config: Config) -> int:
    """Return how many chunks a step may complete; 0 if that is not known."""
    tokens = int(getattr(vllm_config.scheduler_config, "max_num_batched_tokens", 0) or 0)
    return -(-tokens // config.chunk_size)
