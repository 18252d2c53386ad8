"""The registration of a worker's KV caches: from ``register_kv_caches`` to a namespace.

Owns the described caches, this worker's report to the scheduler, the thread that fingerprints the
weights, the memory through which KV moves, how it moves (a :class:`TransferMemory` for each kind),
and whether the worker is disabled.

States
------
========== =============================================== ===================================
state      means                                           next
========== =============================================== ===================================
unknown    no caches are registered                        ``register`` → reporting
reporting  each step's metadata carries the report; rank   ``open`` → serving, once the
           0 adds the weights fingerprint when it is known  scheduler has sent a namespace
serving    the namespace is known, KV moves                ``leave`` → reporting, when the
                                                           weights have another namespace
disabled   nothing is loaded or stored any more; a fact    none: the engine must be restarted
           tells the scheduler why
========== =============================================== ===================================

Memory is allocated when caches are registered: vLLM captures CUDA graphs next, and while it does
no thread may allocate on the device; and how much is free afterwards is not known. An engine with
pipeline stages knows the sizes only when all stages are known, and allocates in its first step.

Contracts
---------
* All methods run on the worker's step thread, except :meth:`Registration.disable`, which any
  thread may call, and ``_weights_known``, which runs on the fingerprinting thread.
  `_lock` guards the reason why the worker is disabled.
* A configuration that does not fit the engine is refused in :meth:`Registration.register`.
* On a device only the step thread allocates.
* While the engine sleeps nothing touches the caches.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from vllm.distributed.parallel_state import get_dcp_group, model_parallel_is_initialized

from kvshelf.backends import Properties
from kvshelf.config import DEFAULT_MEMORY
from kvshelf.errors import ConfigError, UnsupportedError, size_text
from kvshelf.format.kinds import DRAFT, STATE, Kind
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv import ops
from kvshelf.kv.caches import HostKVCache, KVCache, layer_calls
from kvshelf.kv.device import DEFAULT_RING, DeviceKVCache
from kvshelf.kv.streams import Streams
from kvshelf.kv.topology import ShardPlan, shard_plans
from kvshelf.memory.chunk_memory import ChunkMemory, ChunkPlaces
from kvshelf.memory.ring import rounded
from kvshelf.metrics import Counters
from kvshelf.pages import memory_limit
from kvshelf.transfer.context import STATE_SHARE
from kvshelf.transfer.transfers import default_io_threads
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.metadata import WorkerReport
from kvshelf.vllm.namespace import (
    WeightsIdentity,
    build_namespace,
    config_overrides,
    local_ranks,
    make_topologies,
    stage_ranks,
    topologies_of,
)
from kvshelf.vllm.published import Published, attention_temperature
from kvshelf.vllm.worker.engine import WorkerEngine
from kvshelf.vllm.worker.precision import precision
from kvshelf.vllm.worker.registered_caches import RegisteredCaches, describe_caches
from kvshelf.vllm.worker.slots import GroupSlots, TokenSlots

logger = logging.getLogger(__name__)

# Most threads that load beside a GPU, where cores are idle.
_MOST_IDLE_CORES = 8
# Steps whose chunks the memory holds by default. Stores have half of it: one step is gathered while
# another is being published.
_STEPS = 4
# At most one part in this many of the memory that the process may use is taken by default.
_MEMORY_SHARE = 16
# Takes the place of the fingerprint while it is not known: sizes do not depend on it.
_ANY_WEIGHTS = "sha256:" + "0" * 64


@dataclass(frozen=True, slots=True)
class TransferMemory:
    """How KV of one kind of one namespace moves. Its owner closes it.

    Attributes
    ----------
    fmt : ObjectFormat
    cache : KVCache
        The registered caches.
    places : ChunkPlaces
        How chunks lie in the worker's memory.
    plan : ShardPlan
        The shards whose heads this worker holds.
    slots : tuple of GroupSlots
        How chunks lie in the blocks of the cache groups.
    """

    fmt: ObjectFormat
    cache: KVCache
    places: ChunkPlaces
    plan: ShardPlan
    slots: tuple[GroupSlots, ...]

    def fits(self, fmt: ObjectFormat) -> bool:
        """Whether objects of another namespace have the same tensors."""
        return fmt.shards == self.fmt.shards and all(
            fmt.tensors(shard) == self.fmt.tensors(shard)
            and fmt.object_size(shard) == self.fmt.object_size(shard)
            for shard in self.plan.shards
        )


#: The memory of a namespace, for each kind of KV that the worker has.
Memories: TypeAlias = Mapping[Kind, TransferMemory]


def close_all(memories: Memories) -> None:
    """Free the buffers of all kinds."""
    for memory in memories.values():
        memory.cache.close()


class Registration:
    """A worker's caches and their way to a namespace.

    Parameters
    ----------
    engine : WorkerEngine
    counters : Counters
        Gets what is in the memory.
    model : Registration, optional
        That of the model's layers, for a drafter: its KV moves through the same memory.

    Attributes
    ----------
    host : ChunkMemory or None
        The memory through which KV moves; None while its size is not known.
    caches : RegisteredCaches or None
    memories : Mapping of Kind to TransferMemory
        What transfers use; empty while its size is not known.
    namespace : Namespace or None
        The one whose KV moves; None unless there is one.
    disabled_reason : str
        Empty unless disabled.
    """

    def __init__(
        self, engine: WorkerEngine, counters: Counters, model: Registration | None = None
    ) -> None:
        self._engine = engine
        self._counters = counters
        self._model = model
        self.host: ChunkMemory | None = None
        self._vllm_config = engine.vllm_config
        self._config = engine.config
        self._lock = threading.Lock()
        self.caches: RegisteredCaches | None = None
        self.memories: Memories = {}
        self.namespace: Namespace | None = None
        self.disabled_reason = ""
        #: The reason, until a fact for the scheduler has it, and whether it is logged already.
        self._untold: list[tuple[str, bool]] = []
        self._report: WorkerReport | None = None
        self._identity: WeightsIdentity | None = None

    @property
    def serves(self) -> bool:
        """Whether KV moves: the registration is serving, see the module."""
        return self.namespace is not None and not self.disabled_reason

    # ------------------------------------------------------------- caches and weights

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], modules: Iterable[torch.nn.Module] = ()
    ) -> torch.device:
        """Describe the engine's caches, allocate memory, start to fingerprint the weights.

        Parameters
        ----------
        kv_caches : Mapping
        modules : Iterable of Module
            Of the loaded model.

        Returns
        -------
        device
            That of all caches.

        Raises
        ------
        UnsupportedError
            If kvshelf does not support a cache of this kind.
        ConfigError
            If the configuration does not fit the caches or the engine.
        """
        # Loads the compiled code now, so that no step has to.
        ops.implementation()
        modules = list(modules)
        found = describe_caches(kv_caches, self._engine)
        self._report = report = replace(
            found.report,
            attention_temperature=attention_temperature(modules),
            # A drafter changes no answer.
            precision=() if self._engine.of_drafter else precision(self._vllm_config, modules),
        )
        self.caches = found
        ops.check_served(found.device)
        self._check_fit(report)
        if not self._engine.rank:
            # Rank 0 fingerprints the weights for all ranks.
            self._identity = WeightsIdentity(
                self._vllm_config,
                self._config,
                on_known=self._weights_known,
                on_problem=self.disable,
                modules=modules,
            )
            self._identity.start()
        return found.device

    def _check_fit(self, report: WorkerReport) -> None:
        """Refuse a configuration that does not fit; allocate where sizes are known."""
        stages = self._vllm_config.parallel_config.pipeline_parallel_size
        if stages == 1:
            namespace = build_namespace(self._vllm_config, self._config, [report], _ANY_WEIGHTS)
            fmt = ObjectFormat(namespace)
            self._check_bound(fmt)
            if self._model is None or self._model.host is not None:
                self.memories = self._allocate(fmt)
        else:
            # The other stages' layers are not known here.
            config_overrides(self._vllm_config.model_config, self._config)
            make_topologies(
                self._vllm_config,
                [report] * stages,
                decode_context=self._engine.context_ranks,
            )

    def _check_bound(self, fmt: ObjectFormat) -> None:
        """Refuse a bound of the shelf that two chunks exceed; warn of one that a prompt exceeds."""
        bound = self._config.capacity.max_bytes
        if bound is None or self._config.read_only or self._engine.rank or self._engine.of_drafter:
            return
        formats = [fmt.of(kind) for kind in fmt.kinds]
        chunk = sum(one.object_size(shard) for one in formats for shard in range(one.shards))
        if bound < 2 * chunk:
            raise ConfigError(
                f"capacity.max_bytes is {size_text(bound)}, and a chunk of this model has"
                f" {size_text(chunk)}: expected at least {size_text(2 * chunk)}, for two chunks"
            )
        tokens = int(self._vllm_config.model_config.max_model_len)
        if bound < (needed := tokens // fmt.chunk_size * chunk):
            logger.warning(
                "capacity.max_bytes is %s, and a prompt of %d tokens (--max-model-len) needs %s:"
                " of such prompts only a part is stored. Give more, or set --max-model-len lower",
                size_text(bound),
                tokens,
                size_text(needed),
            )

    def cancel_weights(self) -> None:
        """Stop fingerprinting; a running thread reports nothing any more."""
        if self._identity is not None:
            self._identity.cancel()

    def _weights_known(self, weights: str, published: Published) -> None:
        """Complete the report."""
        assert self._report is not None
        self._report = replace(
            self._report, weights=weights, config=published.config, code=published.code
        )

    # ------------------------------------------------------------- scheduler

    def disable(self, reason: str, *, already_logged: bool = False) -> None:
        """Load and store nothing any more. Any thread; the first reason counts."""
        with self._lock:
            if not self.disabled_reason:
                self.disabled_reason = reason
                self._untold.append((reason, already_logged))

    def take_disabled(self) -> list[tuple[str, bool]]:
        """Return what :attr:`Facts.disabled` tells the scheduler; empty from the next call on."""
        for memory in self.memories.values():
            if memory.cache.problem:
                # The device's own code has logged its failure.
                self.disable(memory.cache.problem, already_logged=True)
        with self._lock:
            untold, self._untold = self._untold, []
        return untold

    def report(self) -> WorkerReport | None:
        """Return the report, which each step sends until the worker serves or is disabled."""
        return None if self.namespace is not None or self.disabled_reason else self._report

    def open(self, encoded: bytes, slug: str) -> bool:
        """Provide memory for a namespace in `memories`; False if there can be none.

        No transfer may use what is there, which is kept where it fits.
        """
        try:
            namespace = Namespace.from_bytes(encoded, slug)
            self.memories = self._memory_for(ObjectFormat(namespace))
        except (ValueError, RuntimeError) as error:
            self.disable(str(error))
            return False
        self.namespace = namespace
        return True

    def leave(self) -> None:
        """Note that no transfer uses the memory any more; the next namespace may."""
        self.namespace = None

    # ------------------------------------------------------------- sleep

    def pause(self) -> None:
        """Wait for running copies and begin no more: the caches' memory is about to be freed."""
        for memory in self.memories.values():
            memory.cache.pause()

    def resume(self) -> None:
        """Use the caches again after the engine slept. Idempotent.

        Nothing is written to them: only shapes, strides, dtypes and devices of the caches that
        the layers are bound to are compared with those that were learned.
        """
        if self.caches is not None and not self.caches.rebind(self._engine.layers):
            self.disable(
                "the engine's KV caches came back from sleep in another layout; nothing is stored"
                " or loaded until the engine is restarted"
            )
        if not self.disabled_reason:
            for memory in self.memories.values():
                memory.cache.resume()

    # ------------------------------------------------------------- memory

    @property
    def on_device(self) -> bool:
        """Whether the caches are on a device, or used as if they were."""
        assert self.caches is not None
        return self.caches.device.type != "cpu" or self._streams() is not None

    def _streams(self) -> Streams | None:
        assert self.caches is not None
        return self._engine.streams(self.caches.device)

    def io_threads(self, properties: Properties | None = None) -> tuple[int, int]:
        """Return how many threads load and store; the least numbers for an unknown storage."""
        loads, stores = (1, 1) if properties is None else default_io_threads(properties)
        if not self.on_device:
            return loads, stores
        # Most cores beside a GPU are idle. Assumes that all ranks of a stage share this machine.
        ranks = stage_ranks(self._vllm_config)
        idle = min(_MOST_IDLE_CORES, len(os.sched_getaffinity(0)) // (2 * ranks))
        return max(2, loads, idle), max(1, stores, idle // 2)

    def _ring(self, kind: Kind) -> int:
        """Return how many chunks may be on their way from the device at once.

        A step's chunks are gathered at once, much faster than they reach the host. If a step
        completes more chunks than this, some are not stored. A step stores few states, which are
        many times as large as a chunk's KV.
        """
        return DEFAULT_RING if kind == STATE else max(DEFAULT_RING, self._chunks_per_step())

    def _chunks_per_step(self) -> int:
        """Return how many chunks a step may complete; 0 if that is not known."""
        tokens = int(getattr(self._vllm_config.scheduler_config, "max_num_batched_tokens", 0) or 0)
        return -(-tokens // self._config.chunk_size)

    def _take_host(self, places: Mapping[Kind, tuple[ObjectFormat, ShardPlan]]) -> ChunkMemory:
        """Take the memory through which chunks of all kinds move, once.

        Raises
        ------
        ConfigError
            If there is not so much free memory.
        """
        if self._model is not None:
            # The drafter opens after the model: the memory is there.
            assert self._model.host is not None
            return self._model.host
        if self.host is not None:
            return self.host
        assert self.caches is not None
        chunks = self._chunks_per_step()
        step = sum(
            math.ceil(chunks * (STATE_SHARE if kind == STATE else 1)) * _slot_bytes(fmt, plan)
            for kind, (fmt, plan) in places.items()
        )
        keeps = self._config.memory_bytes > 0
        chunk = sum(_slot_bytes(fmt, plan) for fmt, plan in places.values())
        # The threads of an unknown storage: of others there are more, as far as memory allows.
        spares = (self.io_threads()[0] + 1) * chunk
        if keeps:
            # That of this rank: the connector has divided it.
            total = self._config.memory_bytes
        else:
            most = memory_limit() // _MEMORY_SHARE // local_ranks(self._vllm_config)
            total = max(DEFAULT_MEMORY, min(_STEPS * step + spares, most), spares + 3 * chunk)
        for_stores = (total - min(spares, total // 2)) // 2
        if chunks and for_stores < step and not self._engine.rank:
            logger.warning(
                "stores have %d bytes of memory, too few for the %d chunks that one step of %d"
                " tokens may complete: chunks of full attention are stored in later steps while"
                " their requests run, and the rest of such a step is not stored. It all takes %d"
                " bytes: give the engine twice as much memory, or set --max-num-batched-tokens"
                " lower",
                for_stores,
                chunks,
                self._vllm_config.scheduler_config.max_num_batched_tokens,
                step,
            )
        self.host = ChunkMemory(
            total,
            keeps=keeps,
            first_bytes=2 * step,
            device=self.caches.device if self.on_device else None,
            regions=self._engine.regions,
            counters=self._counters,
            on_thread_start=widen_cpu_affinity,
        )
        return self.host

    def _memory_for(self, fmt: ObjectFormat) -> Memories:
        """Use the memory that is there; close it and allocate other memory if it does not fit."""
        ready = self.memories
        formats = {kind: fmt.of(kind) for kind in fmt.kinds}
        if ready and all(kind in formats and ready[kind].fits(formats[kind]) for kind in ready):
            return {kind: replace(memory, fmt=formats[kind]) for kind, memory in ready.items()}
        close_all(ready)
        return self._allocate(fmt)

    def _allocate(self, fmt: ObjectFormat) -> Memories:
        """Allocate memory for a namespace."""
        assert self.caches is not None
        record: Mapping[str, Any] = fmt.namespace.record
        topologies = topologies_of(
            self._vllm_config, record, decode_context=self._engine.context_ranks
        )
        plans = shard_plans(record, topologies, self._engine.rank)
        formats = {kind: fmt.of(kind) for kind in plans}
        host = self._take_host({kind: (formats[kind], plan) for kind, plan in plans.items()})
        memories: dict[Kind, TransferMemory] = {}
        try:
            for kind, plan in plans.items():
                memories[kind] = self._allocate_kind(formats[kind], plan, host)
        except Exception:
            close_all(memories)
            raise
        return memories

    def _allocate_kind(
        self, fmt: ObjectFormat, plan: ShardPlan, host: ChunkMemory
    ) -> TransferMemory:
        """Make what moves one kind between the caches and memory."""
        assert self.caches is not None
        caches = self.caches.kinds.get(fmt.kind)
        if caches is None:
            raise ConfigError(
                f"the namespace has layers of kind {fmt.kind} in this stage, and none are"
                " registered: the engine's model does not match the namespace"
            )
        caches.divide(len(plan.shards))
        slots = caches.slots
        if plan.context_ranks > 1:
            _check_context_group(plan)
            parallel = self._vllm_config.parallel_config
            interleave = int(getattr(parallel, "cp_kv_cache_interleave_size", 1))
            slots = tuple(
                one.of_rank(plan, interleave) for one in slots if isinstance(one, TokenSlots)
            )
        on_device = self.on_device
        places = ChunkPlaces(host, fmt, plan.shards)
        kind = DRAFT if self._engine.of_drafter else fmt.kind
        host.serve((None, kind), self.io_threads()[0] + 1, places.slot_bytes)
        calls = layer_calls(fmt, caches.runs, plan)
        cache: KVCache
        if not on_device:
            cache = HostKVCache(calls)
        else:
            cache = DeviceKVCache(
                calls,
                # A worker with parts of shards never gathers.
                ring=1 if plan.divided else self._ring(fmt.kind),
                loads=self.io_threads()[0],
                pinned=host.is_page_locked,
                streams=self._streams(),
            )
        return TransferMemory(fmt, cache, places, plan, slots)

    def close(self) -> None:
        """Free the memory, and stop the thread."""
        self.cancel_weights()
        close_all(self.memories)
        if self.host is not None:
            self.host.close()


def _slot_bytes(fmt: ObjectFormat, plan: ShardPlan) -> int:
    """Return the bytes of a chunk of one kind in memory."""
    return sum(rounded(fmt.object_size(shard)) for shard in plan.shards)


def _check_context_group(plan: ShardPlan) -> None:
    """Compare a worker's place in its context-parallel group with vLLM's own group.

    Raises
    ------
    UnsupportedError
        If vLLM spreads tokens otherwise, so that their slots are not known.
    """
    if not model_parallel_is_initialized():
        return
    group = get_dcp_group()
    found = int(group.world_size), int(group.rank_in_group)
    expected = plan.context_ranks, plan.context_rank
    if found != expected:
        raise UnsupportedError(
            f"this vLLM version makes the worker rank {found[1]} of {found[0]} of its group for"
            f" decode context parallelism, kvshelf expects rank {expected[1]} of {expected[0]}: set"
            " decode_context_parallel_size to 1"
        )
