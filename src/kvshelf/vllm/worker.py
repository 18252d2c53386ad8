"""The worker side of the connector: moves KV between the paged cache and the shelf.

Owns the registered KV caches, this worker's part of the namespace, the
:class:`~kvshelf.transfer.Transfer` that runs its stores and loads, and the memory for what is
read for requests that wait.

A slot mapping has one entry for each token where chunks are stored canonically, and one
for each block where blocks are stored whole; vLLM's blocks and kvshelf's chunks need not
end together. Tokens that a load must not touch, because vLLM has them already or the hit
ends before them, are −1.

The device that holds the caches is a parameter: chunks go between caches in host memory
and staging at once, between those on a GPU and staging by :mod:`kvshelf.device`. What that
takes, page-locked staging and buffers on the device, is allocated when caches are
registered: while vLLM captures CUDA graphs, which it does next, no thread may allocate,
and what is free afterwards is not known. An engine with pipeline stages knows the sizes only
when all stages are known, and allocates in its first step.

Contracts
---------
* All methods run on the worker's step thread and never touch storage.
* Nothing waits for a device. Loads start in ``start_load_kv``: a load writes to its blocks
  after all that was enqueued on the engine's stream until then, zeroing of new blocks
  included. Stores are enqueued on that stream after the forward pass, so that no later
  step, preemption or new owner of a block can be faster; and CUDA graphs do not matter.
* From the moment that an engine sleeps until it is awake nothing touches the caches. A
  device that failed is used no more: the engine goes on as with no cache.
* The layout of a cache is learned by :mod:`kvshelf.vllm.layout_probe` when caches are
  registered, never guessed. A configuration that cannot work is refused then.
* A block counts as loaded only when all of its tokens that the hit covers are.
* Every load that the scheduler planned is reported finished, in one way or another, and
  the blocks that it left without KV no later than that.
* Where a sliding window leaves blocks out of a hit, a load is good as a whole or not at all:
  what is computed behind a part of it would look at blocks that are not there.
* What a failed step left in the cache is never stored.
* Once weights have changed in place nothing is loaded or stored any more, from that very
  moment on: keys name the weights that were loaded from files.
* On CPUs the engine's threads are bound to cores of their own; kvshelf's threads may use
  those that no rank has bound as well. The scheduler has no such binding.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import vllm

from kvshelf import ops
from kvshelf.backends import Properties
from kvshelf.backends.guard import BreakerState, try_to_start
from kvshelf.chunkfile import ObjectFormat
from kvshelf.config import Config
from kvshelf.device import DEFAULT_RING, Streams
from kvshelf.errors import UnsupportedError
from kvshelf.identity import Namespace
from kvshelf.layout import native_slots_of
from kvshelf.metrics import Counters
from kvshelf.prefetch import Prefetcher, PrefetchMemory
from kvshelf.shelf import Shelf
from kvshelf.staging import StagingPool
from kvshelf.tiers import LoadsFromTiers
from kvshelf.topology import ShardPlan, Topology, head_groups
from kvshelf.transfer import (
    ChunkSlots,
    DeviceKVCache,
    Failure,
    LayerRun,
    Load,
    PagedKVCache,
    Transfer,
    useful_threads,
)
from kvshelf.vllm import weight_changes
from kvshelf.vllm.adapters import LoadedAdapters, adapter_settings
from kvshelf.vllm.layout_probe import LayerCache, StoredLayout, choose_layout, probe_layers
from kvshelf.vllm.metadata import (
    NULL_BLOCK,
    LoadFailure,
    LoadOp,
    StepMetadata,
    WorkerMetadata,
    WorkerPart,
)
from kvshelf.vllm.namespace import (
    WeightsIdentity,
    build_namespace,
    config_overrides,
    kv_scales,
    make_topology,
    manager_block_size,
    total_kv_heads,
)
from kvshelf.vllm.processors import spread_out

logger = logging.getLogger(__name__)

# How long a step that computes nothing waits for a load: a further such step would cost it
# 2 to 3 ms. A new request that arrives meanwhile waits as long.
_IDLE_WAIT_SECONDS = 10e-3
_WARM_BYTES = 256 << 20
# Of those beside a GPU, for threads that load.
_MOST_IDLE_CORES = 8
# Buffers on a device, for the chunks that one step completes; a larger step loses some.
_RING_BYTES = 1 << 30
# As numbers, for metrics.
_STATES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_WARM_JOIN_SECONDS = 1.0
_WEIGHTS_CHANGED = (
    "the engine's weights are changed in place ({}), so KV from now on is not that of the weight"
    " files; start the engine anew, with a `version` of its own or from the new weights' files"
)


def natural_order(name: str) -> list[str | int]:
    """Sort key that puts layer 10 behind layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _of_one_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
    )


class WorkerSide:
    """Worker half of :class:`kvshelf.vllm.connector.SharedStorageConnector`.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    shelf : Callable[[], Shelf or None]
        Returns the shelf, None while it is not open.
    kv_cache_config : KVCacheConfig, optional
        The cache groups; layer names come from the registered caches without it.
    rank : int
    counters : Counters, optional
        Where to count; the side's own when absent.
    streams : Callable[[torch.device], Streams or None], optional
        Streams of the caches' device; its own where the answer is None.

    Attributes
    ----------
    rank : int
    counters : Counters
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        shelf: Callable[[], Shelf | None],
        *,
        kv_cache_config: Any = None,
        rank: int = 0,
        counters: Counters | None = None,
        streams: Callable[[torch.device], Streams | None] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._shelf = shelf
        self._kv_cache_config = kv_cache_config
        self.rank = rank
        self.counters = Counters() if counters is None else counters
        self._block_size = manager_block_size(vllm_config, kv_cache_config)
        self._unit_tokens = 1
        self._runs: list[LayerRun] = []
        self._names: list[str] = []
        self._part: WorkerPart | None = None
        self._part_lock = threading.Lock()
        #: Counts registrations of caches; what a thread made for an earlier one is not used.
        self._registration = 0
        self._part_sent = False
        self._weights: WeightsIdentity | None = None
        #: What changed the weights in place, if anything did.
        self._changed_by = ""
        self._namespace: Namespace | None = None
        self._transfer: Transfer | None = None
        self._prefetcher: Prefetcher | None = None
        self._prefetched: PrefetchMemory | None = None
        self._staging: StagingPool | None = None
        self._streams_of = streams
        #: The caches are not in host memory, or not used as if they were.
        self._on_device = False
        #: What was allocated at registration, until a namespace takes it.
        self._allocated: _Memory | None = None
        self._memory: _Memory | None = None
        self._failed_device = False
        #: They came back from sleep as others.
        self._caches_lost = False
        self._prepared: _Prepared | None = None
        self._warming: tuple[threading.Thread, StagingPool] | None = None
        self._meta: StepMetadata | None = None
        self._loads_started = False
        self._ops: dict[Load, LoadOp] = {}
        #: Of them, those whose KV is not good whatever their transfer says.
        self._spoilt: set[Load] = set()
        self._refused: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._useless: set[str] = set()
        self._failures: list[LoadFailure] = []
        self._adapters = LoadedAdapters(adapter_settings(vllm_config))
        #: What the scheduler was told last.
        self._resting: bool | None = False

    # ------------------------------------------------------------- caches

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's caches, learn their layout, begin to name the weights.

        Raises
        ------
        UnsupportedError
            If a cache is of a kind that this version does not serve.
        ConfigError
            If the chunk size or the option ``layout`` do not fit the layout.
        """
        # Loads the compiled code now, so that no step has to; it says itself what it is.
        ops.implementation()
        self._forget_caches()
        weight_changes.watch(self)
        if getattr(self._vllm_config, "lora_config", None) and not self._adapters.watch():
            logger.warning(
                "this version of vLLM does not let it be seen which LoRA adapters it loads, so"
                " requests with one are not stored"
            )
        self._names = self._cached_layers(kv_caches)
        layers = self._learn(kv_caches)
        stored = choose_layout(
            layers,
            self._config.layout,
            chunk_size=self._config.chunk_size,
            block_size=self._block_size,
            engine=self._engine_facts(),
            head_groups=self._head_groups(layers),
        )
        self._runs = list(stored.runs)
        device = self._runs[0].caches[0].device
        ops.implementation(device)
        self._on_device = device.type != "cpu" or self._streams() is not None
        self._unit_tokens = stored.unit_tokens
        part = self._describe(layers, stored)
        self._check_fit(part)
        with self._part_lock:
            self._part = part
        if self._changed_by:
            self._problem(_WEIGHTS_CHANGED.format(self._changed_by))
            return
        if self.rank:
            # The weights are named once, by rank 0.
            return
        self._weights = WeightsIdentity(
            self._vllm_config,
            self._config,
            on_known=functools.partial(self._weights_known, self._registration),
            on_problem=self._problem,
            on_thread_start=spread_out,
        )
        self._weights.start()

    def _check_fit(self, part: WorkerPart) -> None:
        """Refuse a configuration that does not fit now, not when the weights are known."""
        stages = self._vllm_config.parallel_config.pipeline_parallel_size
        if stages == 1:
            # Sizes do not depend on the weights, whose name is not known yet.
            self._allocated = self._allocate(
                ObjectFormat(
                    build_namespace(self._vllm_config, self._config, [part], "sha256:" + "0" * 64)
                )
            )
        else:
            # The other stages' layers are not known here.
            config_overrides(self._vllm_config.model_config, self._config)
            make_topology(self._vllm_config, self._config, stages, part.layouts, part.attention)

    def weights_changed(self, how: str) -> None:
        """Load and store nothing any more: `how` changes the weights, or throws them away.

        What was gathered before is still good, and published.
        """
        if not self._changed_by:
            self._changed_by = how
            self._spoil_loads()
            if self._prefetcher is not None:
                self._prefetcher.all_over()
            self._problem(_WEIGHTS_CHANGED.format(how))

    def fall_asleep(self) -> None:
        """Publish what is staged, and leave the caches alone: their memory goes away. Idempotent.

        What is being copied at this moment is waited for; a load that comes later fails, and
        so does one that is not reported yet.
        """
        self._spoil_loads()
        self.drain(self._config.shutdown_drain_s)
        cache = self._memory.cache if self._memory is not None else None
        if isinstance(cache, DeviceKVCache):
            cache.pause()

    def _spoil_loads(self) -> None:
        """Fail all loads that are not reported: what they have scattered is good no more."""
        for load in self._ops:
            if not load.cancelled:
                self._spoilt.add(load)
                if self._transfer is not None:
                    self._transfer.cancel(load.request_id)

    def wake_up(self, kv_caches: Mapping[str, torch.Tensor] | None = None) -> None:
        """Take the caches as they are after the engine slept. Idempotent.

        Nothing is written to them: only shapes, strides and dtypes are compared with
        those that were learned.
        """
        if kv_caches is not None and not self._take_back(kv_caches):
            self._caches_lost = True
            self._problem(
                "the engine's KV caches came back from sleep in another layout; nothing is"
                " stored or loaded until the engine is restarted"
            )
        if self._caches_lost:
            return
        cache = self._memory.cache if self._memory is not None else None
        if isinstance(cache, DeviceKVCache):
            cache.resume()

    def _take_back(self, kv_caches: Mapping[str, torch.Tensor]) -> bool:
        caches = iter([kv_caches.get(name) for name in self._names])
        for run in self._runs:
            for number, old in enumerate(run.caches):
                new = next(caches)
                if new is None or not _of_one_kind(old, new):
                    return False
                run.caches[number] = new
        return True

    def _forget_caches(self) -> None:
        """Give up everything that concerns the caches registered before, if any."""
        self._give_up_weights()
        if self._transfer is not None:
            self._close_transfer(0.0)
        for op in self._ops.values():
            self._refuse(op)
        self._ops.clear()
        self._spoilt.clear()
        self._give_up_memory()
        self._namespace = None
        self._part_sent = False

    def _give_up_weights(self) -> None:
        """Let the thread that names the weights leave nothing behind."""
        with self._part_lock:
            self._registration += 1
        if self._weights is not None:
            self._weights.cancel()

    def _give_up_memory(self) -> None:
        """Give back what no transfer has taken."""
        prepared = None if self._prepared is None else self._prepared.memory
        for memory in (self._allocated, prepared):
            if memory is not None:
                memory.close()
        self._allocated = self._prepared = self._memory = None

    def _cached_layers(self, kv_caches: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of layers with a cache of their own, in model order."""
        groups = getattr(self._kv_cache_config, "kv_cache_groups", None)
        names = groups[0].layer_names if groups else kv_caches
        layers = self._vllm_config.compilation_config.static_forward_context
        return sorted(
            (
                name
                for name in names
                if name in kv_caches
                and not getattr(layers.get(name), "kv_sharing_target_layer_name", None)
            ),
            key=natural_order,
        )

    def _learn(self, kv_caches: Mapping[str, torch.Tensor]) -> list[LayerCache]:
        context = self._vllm_config.compilation_config.static_forward_context
        for name in self._names:
            if name not in context:
                raise UnsupportedError(
                    f"a KV cache is registered for layer {name}, which the model does not have;"
                    " remove --kv-transfer-config for this model"
                )
            device = kv_caches[name].device
            kind = getattr(getattr(context[name], "impl", None), "attn_type", "decoder")
            kind = str(getattr(kind, "value", kind))
            if kind != "decoder":
                raise UnsupportedError(
                    f"layer {name} has attention of kind {kind!r}, whose KV is not a function of"
                    " the tokens before it; remove --kv-transfer-config for this model"
                )
            if device.type not in ("cpu", "cuda") or device != kv_caches[self._names[0]].device:
                raise UnsupportedError(
                    f"layer {name} keeps its KV on {device}, layer {self._names[0]} on"
                    f" {kv_caches[self._names[0]].device}; kvshelf serves workers whose caches are"
                    " all in host memory or all on one GPU. Remove --kv-transfer-config"
                )
        layers = probe_layers(
            context,
            kv_caches,
            self._names,
            num_blocks=self._num_blocks(),
            block_size=self._block_size,
            cache_dtype=str(self._vllm_config.cache_config.cache_dtype),
            compute_dtype=self._vllm_config.model_config.dtype,
        )
        logger.info(
            "layouts learned from %d writes to %d layers in %.0f ms: %s",
            sum(layer.learned.writes for layer in layers),
            len(layers),
            sum(layer.seconds for layer in layers) * 1e3,
            ", ".join(sorted({layer.learned.kind for layer in layers})),
        )
        return layers

    def _num_blocks(self) -> int:
        """Return the number of blocks of the cache manager."""
        blocks = getattr(self._kv_cache_config, "num_blocks", None)
        return int(blocks or getattr(self._vllm_config.cache_config, "num_gpu_blocks", 0) or 0)

    def _engine_facts(self) -> dict[str, object]:
        """Return what could matter to a layout that is unknown."""
        parallel = self._vllm_config.parallel_config
        cache = self._vllm_config.cache_config
        return {
            **self._device_facts(),
            "num_blocks": self._num_blocks(),
            "block_size": self._block_size,
            "vllm": vllm.__version__,
            "cache_dtype": cache.cache_dtype,
            "compute_dtype": self._vllm_config.model_config.dtype,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
        }

    def _device_facts(self) -> dict[str, object]:
        layers = self._vllm_config.compilation_config.static_forward_context
        device = layers[self._names[0]].kv_cache.device
        if device.type != "cuda":
            return {
                "instructions": torch.backends.cpu.get_cpu_capability(),
                "machine": platform.machine(),
            }
        return {"device": torch.cuda.get_device_capability(device)}

    def _head_groups(self, layers: list[LayerCache]) -> int:
        """Return how many tensor-parallel ranks hold KV heads of their own."""
        attention = ["mla" if layer.kvs == 1 else "full" for layer in layers]
        return head_groups(
            total_kv_heads(self._vllm_config, attention),
            int(self._vllm_config.parallel_config.tensor_parallel_size),
        )

    def _describe(self, layers: list[LayerCache], stored: StoredLayout) -> WorkerPart:
        context = self._vllm_config.compilation_config.static_forward_context
        windows, kinds, head_sizes = [], [], []
        for layer in layers:
            # The layer's, for backends keep it in forms of their own.
            window = getattr(context[layer.name], "sliding_window", None)
            windows.append(-1 if window is None else int(window))
            if layer.kvs == 1:
                kinds.append("mla")
            else:
                kinds.append("full" if windows[-1] < 0 else "sliding")
            # An indexer has a cache and no heads.
            size = layer.head_size or getattr(context[layer.name], "head_size", None)
            head_sizes.append(int(size or context[layer.name].kv_cache.shape[-1]))
        names = tuple(layer.name for layer in layers)
        scaled = "fp8" in str(self._vllm_config.cache_config.cache_dtype) or any(
            layer.dtype.startswith("F8") for layer in layers
        )
        return WorkerPart(
            names,
            stored.shapes,
            stored.dtypes,
            stored.ids,
            tuple(kinds),
            tuple(head_sizes),
            tuple(windows),
            kv_scales=kv_scales(context, names) if scaled else (),
        )

    # ------------------------------------------------------------- namespace

    def _weights_known(self, registration: int, weights: str) -> None:
        """Background thread: complete the part, and make ready what it decides."""
        with self._part_lock:
            if registration != self._registration or self._part is None:
                return
            part = replace(self._part, weights=weights)
        if self._changed_by:
            return
        prepared = None
        try:
            # On a device nothing is allocated behind the back of the step thread.
            if self._allocated is not None or not (
                self._on_device or self._vllm_config.parallel_config.pipeline_parallel_size > 1
            ):
                namespace = build_namespace(self._vllm_config, self._config, [part], weights)
                with self._part_lock:
                    if registration != self._registration:
                        return
                    memory, self._allocated = self._allocated, None
                prepared = self._make_parts(namespace, memory)
        except Exception as error:  # noqa: BLE001 - there is nobody else to tell
            if registration == self._registration:
                self._problem(f"{type(error).__name__}: {error}")
            return
        with self._part_lock:
            current = registration == self._registration
            if current:
                # As it is now: a problem may have come up meanwhile.
                self._part = replace(self._part, weights=weights)
                self._prepared = prepared
                if prepared is not None:
                    self._start_warming(prepared.memory.staging)
        if prepared is not None and not current:
            prepared.memory.close()

    def _start_warming(self, staging: StagingPool) -> None:
        # Memory that is touched for the first time inside a step would slow it.
        warming = threading.Thread(
            target=self._warm, args=(staging,), name="kvshelf-warm", daemon=True
        )
        if try_to_start(warming):
            self._warming = warming, staging

    def _warm(self, staging: StagingPool) -> None:
        spread_out()
        staging.warm(min(_WARM_BYTES, self._config.staging_bytes // 2))

    def _problem(self, problem: str, *, said: bool = False) -> None:
        with self._part_lock:
            if self._part is not None:
                self._part = replace(self._part, problem=problem, said=said)
                self._part_sent = False

    def _streams(self) -> Streams | None:
        device = self._runs[0].caches[0].device
        return None if self._streams_of is None else self._streams_of(device)

    def _make_parts(self, namespace: Namespace, memory: _Memory | None) -> _Prepared:
        """Make what a namespace decides, out of `memory` where it fits."""
        fmt = ObjectFormat(namespace)
        if memory is not None and not memory.fits(fmt):
            memory.close()
            memory = None
        return _Prepared(namespace, fmt, memory or self._allocate(fmt))

    def _threads(self, properties: Properties | None = None) -> tuple[int, int]:
        """Return how many threads load and store; at least, before the storage is known."""
        if self._config.io_threads:
            threads = int(self._config.io_threads)
            return threads, max(1, threads // 2)
        loads, stores = (1, 1) if properties is None else useful_threads(properties)
        if not self._on_device:
            return loads, stores
        # Most cores beside a GPU are idle. As if all ranks of a stage were on this machine.
        ranks = int(self._vllm_config.parallel_config.tensor_parallel_size)
        idle = min(_MOST_IDLE_CORES, len(os.sched_getaffinity(0)) // (2 * ranks))
        return max(2, loads, idle), max(1, stores, idle // 2)

    def _ring(self, chunk_bytes: int) -> int:
        """Return how many chunks may be on their way from the device at once.

        A step's chunks are gathered in one go, much faster than they travel on.
        """
        tokens = int(getattr(self._vllm_config.scheduler_config, "max_num_batched_tokens", 0) or 0)
        of_a_step = -(-tokens // self._config.chunk_size)
        return max(DEFAULT_RING, min(of_a_step, _RING_BYTES // chunk_bytes))

    def _allocate(self, fmt: ObjectFormat) -> _Memory:
        """Take what KV of a namespace is moved through. On a device, step thread only."""
        record: Mapping[str, Any] = fmt.namespace.record
        plan = Topology(
            record["kv_heads"],
            fmt.shards,
            int(self._vllm_config.parallel_config.tensor_parallel_size),
            len(record["stages"]),
            whole_ranks=any(layout.startswith("opaque-") for layout in record["layouts"]),
        ).plan(self.rank)
        largest = max(fmt.object_size(shard) for shard in plan.shards)
        staging = StagingPool(
            int(self._config.staging_bytes),
            largest,
            together=len(plan.shards),
            pinned=self._on_device,
        )
        cache: PagedKVCache | DeviceKVCache
        if not self._on_device:
            cache = PagedKVCache(fmt, self._runs, plan)
        else:
            try:
                cache = DeviceKVCache(
                    fmt,
                    self._runs,
                    plan,
                    ring=self._ring(sum(fmt.object_size(shard) for shard in plan.shards)),
                    loads=self._threads()[0],
                    pinned=staging.pinned,
                    streams=self._streams(),
                )
            except Exception:
                staging.close()
                raise
        return _Memory(fmt, cache, staging, plan)

    def _open_namespace(self, encoded: bytes, slug: str) -> None:
        if self._namespace is not None and self._namespace.encoded == encoded:
            return
        shelf = self._shelf()
        if shelf is None or not self._runs:
            # The scheduler goes on announcing the namespace until it is acknowledged.
            return
        if self._transfer is not None:
            self._close_transfer(0.0)
            self._memory = None
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared.namespace.encoded != encoded:
            self._allocated, prepared = prepared.memory, None
        if prepared is None:
            try:
                allocated, self._allocated = self._allocated, None
                prepared = self._make_parts(Namespace.from_bytes(encoded, slug), allocated)
            except (ValueError, RuntimeError) as error:
                self._problem(str(error))
                return
            self._start_warming(prepared.memory.staging)
        self._memory = memory = prepared.memory
        properties = shelf.backend.properties
        budget = self._config.prefetch_budget(properties.probe_cost)
        self._prefetched = prefetched = PrefetchMemory(
            prepared.fmt, budget, self.counters, shards=memory.plan.shards, push_out=False
        )
        load_threads, store_threads = self._threads(properties)
        try:
            self._transfer = Transfer(
                LoadsFromTiers(shelf, [prefetched]) if budget else shelf,
                prepared.fmt,
                memory.cache,
                memory.staging,
                counters=self.counters,
                plan=memory.plan,
                load_threads=load_threads,
                store_threads=store_threads,
                check_finite=self._config.check_finite,
                on_thread_start=lambda kind: spread_out(),
            )
        except RuntimeError:
            # No threads can be started now. The next step tries again.
            prefetched.close()
            self._prepared, self._memory = prepared, None
            raise
        self._prefetcher = Prefetcher(self._transfer, prefetched) if budget else None
        self._staging = memory.staging
        self._namespace = prepared.namespace

    def _close_transfer(self, drain_seconds: float) -> int:
        """Stop the threads, give memory back; return how many chunks were lost."""
        transfer, self._transfer, self._prefetcher = self._transfer, None, None
        lost = 0 if transfer is None else transfer.close(drain_seconds)
        if self._prefetched is not None:
            self._prefetched.close()
        return lost

    # ------------------------------------------------------------- steps

    def bind(self, meta: StepMetadata) -> None:
        """Begin a step."""
        self._meta = meta
        self._loads_started = False
        if meta.namespace is not None:
            self._open_namespace(*meta.namespace)
        if meta.recheck_weights:
            if self._weights is not None:
                self._weights.recheck()
            if self._transfer is not None:
                self._transfer.forget_stored()
        if self._transfer is not None:
            for request_id in meta.cancelled:
                self._transfer.cancel(request_id)
        if self._spoilt:
            gone = set(meta.cancelled)
            self._spoilt = {load for load in self._spoilt if load.request_id not in gone}
        if self._prefetcher is not None:
            for request_id in (*meta.cancelled, *meta.waited):
                self._prefetcher.over(request_id)
            for wanted in () if self._changed_by else meta.prefetches:
                self._prefetcher.want(wanted.request_id, wanted.chunks)
        # On a CPU nothing of an earlier step is in flight when a step begins, so loads
        # need not wait until this step's forward pass is over.
        if self._runs and not self._on_device:
            self.start_loads()

    def start_loads(self) -> None:
        """Start this step's loads, once."""
        meta = self._meta
        if meta is None or self._loads_started:
            return
        self._loads_started = True
        for op in meta.loads:
            load = None
            try:
                usable = self._transfer is not None and not self._changed_by
                if self._transfer is not None and usable and self._adapters.may_load(op.adapter):
                    load = self._transfer.load(op.request_id, self._load_items(op))
                    self._ops[load] = op
            except Exception as error:
                logger.error("a load was not started", exc_info=error)
            if load is None:
                self._refuse(op)
            self._end_read_ahead(op.request_id, loading=load is not None)

    def _end_read_ahead(self, request_id: str, *, loading: bool = False) -> None:
        """Read no more ahead for a request. What is being read for a load it has made its own."""
        if self._prefetcher is None:
            return
        try:
            (self._prefetcher.stop if loading else self._prefetcher.over)(request_id)
        except Exception as error:
            # vLLM waits for every load, so none may be lost for this.
            logger.error("reading ahead was not ended", exc_info=error)

    def _refuse(self, op: LoadOp) -> None:
        """Report a load finished that brings nothing."""
        self._refused.add(op.request_id)
        self._note_nothing(op)

    def _note_nothing(self, op: LoadOp) -> None:
        """Note that none of a load's blocks has KV."""
        self._note_bad(op, op.start)
        self._failures.append(
            LoadFailure(op.request_id, op.start // self._config.chunk_size, b"", False)
        )

    def _load_items(self, op: LoadOp) -> list[ChunkSlots]:
        """Slot mappings of a load's chunks, −1 outside its tokens and in null blocks.

        A chunk of which nothing is wanted is left out: it lies before a sliding window.
        """
        size, unit = self._config.chunk_size, self._unit_tokens
        first = op.start // size
        count = -(-op.end // size) - first
        if len(op.chunks) != count:
            raise ValueError(
                f"{len(op.chunks)} chunks cannot fill tokens {op.start} to {op.end} of a request"
            )
        ids = native_slots_of(op.block_ids, self._block_size, unit, op.start, op.end - op.start)
        # The null block is in use by everybody.
        ids[ids // (self._block_size // unit) == NULL_BLOCK] = -1
        slots = torch.full((count * size // unit,), -1, dtype=torch.int64)
        at = (op.start - first * size) // unit
        slots[at : at + len(ids)] = ids
        rows = slots.view(count, -1)
        wanted = (rows >= 0).any(dim=1).tolist()
        return [
            ChunkSlots(chunk, row)
            for chunk, row, is_wanted in zip(op.chunks, rows.unbind(), wanted, strict=True)
            if is_wanted
        ]

    def save(self) -> None:
        """Gather the chunks that this step completed. Runs after the forward pass."""
        meta = self._meta
        if meta is None or not meta.stores or self._transfer is None:
            return
        stores, meta.stores = meta.stores, []
        if self._changed_by:
            return
        if sys.exc_info()[0] is not None:
            # vLLM calls this also while an exception leaves the forward pass: then nobody
            # knows which layers have written their KV.
            return
        size = self._config.chunk_size
        for op in stores:
            if NULL_BLOCK in op.block_ids or not self._adapters.may_store(op.adapter):
                continue
            try:
                # The first of these blocks may begin with tokens of the chunk before.
                start = op.chunk.index * size % self._block_size
                slots = native_slots_of(
                    op.block_ids, self._block_size, self._unit_tokens, start, size
                )
                self._transfer.store(ChunkSlots(op.chunk, slots), repair=op.repair, age=op.age)
            except Exception as error:
                self.counters.add("store_errors")
                logger.error("a chunk was not stored", exc_info=error)
                return

    def finished_loads(self) -> set[str]:
        """Return the requests whose loads are over, and note what failed."""
        done, self._refused = self._refused, set()
        if self._transfer is None or not self._transfer.loading:
            return done
        idle = self._meta is not None and self._meta.idle and not done
        for load in self._transfer.poll(_IDLE_WAIT_SECONDS if idle else 0.0):
            op = self._ops.pop(load, None)
            if op is not None:
                done.add(load.request_id)
                if load in self._spoilt:
                    self._spoilt.remove(load)
                    self._note_nothing(op)
                else:
                    self._note(load, op)
                self._end_read_ahead(load.request_id)
        return done

    def _note(self, load: Load, op: LoadOp) -> None:
        if load.cancelled:
            return
        size = self._config.chunk_size
        for chunk, failure in load.failures:
            # What was not asked for because the storage is given a rest is not to blame.
            key = chunk.key
            if failure is Failure.UNAVAILABLE:
                key, self._resting = b"", None
            self._failures.append(
                LoadFailure(load.request_id, chunk.index, key, failure is Failure.BAD)
            )
        good_until = op.end
        if load.failed_at is not None:
            # The block in which the failed chunk begins is not complete either.
            failed = load.items[load.failed_at].chunk.index * size
            good_until = max(op.start, failed - failed % self._block_size)
        self.counters.add("loaded_tokens", good_until - op.start)
        self._note_bad(op, good_until)

    def _note_bad(self, op: LoadOp, start: int) -> None:
        """Note that the blocks of a load have no KV from token `start` on."""
        if start >= op.end:
            return
        blocks = op.block_ids[: -(-op.end // self._block_size)]
        if NULL_BLOCK in blocks:
            # vLLM left out what the window of the token behind the hit does not reach. That of
            # the first bad token may reach it, so nothing of the hit can be built upon.
            self._useless.add(op.request_id)
        bad = blocks[start // self._block_size :]
        self._bad_blocks.update(block for block in bad if block != NULL_BLOCK)

    def take_useless_loads(self) -> set[str]:
        """Return the requests of which all must be computed, what was loaded included."""
        useless, self._useless = self._useless, set()
        return useless

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that failed loads left without KV."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def worker_metadata(self) -> WorkerMetadata | None:
        """Return what the scheduler has to know after this step."""
        if self._prefetcher is not None:
            self._failures += [
                LoadFailure(request_id, chunk.index, chunk.key, failure is Failure.BAD)
                for request_id, chunk, failure in self._prefetcher.take_failures()
            ]
        meta = WorkerMetadata(failures=self._failures, other_adapters=self._adapters.take_others())
        self._failures = []
        self._look_at_device()
        with self._part_lock:
            part = self._part
            if part is not None and not self._part_sent:
                meta.parts = {self.rank: part}
                self._part_sent = self._namespace is not None or bool(part.problem)
        shelf = self._shelf()
        if self._transfer is not None and shelf is not None:
            meta.repaired = [(key, self.rank) for key in self._transfer.take_repaired()]
            meta.published = self._transfer.take_published()
            resting = not shelf.available
            if self._resting is not resting:
                self._resting = resting
                meta.resting = {self.rank: resting}
        news = meta.parts or meta.failures or meta.repaired or meta.published or meta.resting
        if not news and not meta.other_adapters:
            return WorkerMetadata() if self._meta and self._meta.namespace else None
        return meta

    def _look_at_device(self) -> None:
        """Tell the scheduler when the device failed: nothing is looked up any more."""
        cache = self._memory.cache if self._memory is not None else None
        if isinstance(cache, DeviceKVCache) and cache.problem and not self._failed_device:
            self._failed_device = True
            self._problem(cache.problem, said=True)

    def set_gauges(self) -> None:
        """Bring the gauges in `counters` up to date."""
        staging = self._staging
        if staging is not None:
            size = staging.buffer_bytes
            self.counters.set_gauge("staging_used_bytes", staging.in_use * size)
            self.counters.set_gauge("staging_limit_bytes", staging.limit * size)
        shelf = self._shelf()
        if shelf is not None:
            guard = shelf.backend
            self.counters.set_gauge("loads_breaker_state", _STATES[guard.reads.state])
            self.counters.set_gauge("stores_breaker_state", _STATES[guard.writes.state])
            self.counters.set_gauge("calls_past_deadline", guard.late_calls)

    def clear(self) -> None:
        """End a step."""
        self._meta = None

    # ------------------------------------------------------------- end

    def drain(self, seconds: float) -> int:
        """Wait until stores are published; return how many chunks are not."""
        return 0 if self._transfer is None else self._transfer.drain(seconds)

    def close(self) -> None:
        """Publish what is in flight for a bounded time, say what was lost, stop threads."""
        self._give_up_weights()
        if self._transfer is not None:
            lost = self._close_transfer(self._config.shutdown_drain_s)
            if lost:
                logger.warning(
                    "%d chunks were not stored within shutdown_drain_s=%g s and are lost",
                    lost,
                    self._config.shutdown_drain_s,
                )
        self._give_up_memory()
        if self._warming is not None:
            # Python cannot end a thread that is inside compiled code without a crash.
            thread, staging = self._warming
            staging.close()
            thread.join(_WARM_JOIN_SECONDS)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a namespace decides, made before the first step needs it."""

    namespace: Namespace
    fmt: ObjectFormat
    memory: _Memory


@dataclass(frozen=True, slots=True)
class _Memory:
    """What KV is moved through. Whoever has it closes it; a transfer does so at its end."""

    fmt: ObjectFormat
    cache: PagedKVCache | DeviceKVCache
    staging: StagingPool
    plan: ShardPlan

    def fits(self, fmt: ObjectFormat) -> bool:
        """Whether objects of another namespace are of the same sizes and order."""
        return fmt.shards == self.fmt.shards and all(
            fmt.tensors(shard) == self.fmt.tensors(shard)
            and fmt.object_size(shard) <= self.staging.buffer_bytes
            for shard in self.plan.shards
        )

    def close(self) -> None:
        if isinstance(self.cache, DeviceKVCache):
            self.cache.close()
        self.staging.close()
