"""The worker side of the connector: moves KV between the paged cache and the shelf.

Owns the registered KV caches, this worker's part of the namespace, and the
:class:`~kvshelf.transfer.Transfer` that runs its stores and loads.

A slot mapping has one entry for each token where chunks are stored canonically, and one
for each block where blocks are stored whole; vLLM's blocks and kvshelf's chunks need not
end together. Tokens that a load must not touch, because vLLM has them already or the hit
ends before them, are −1.

Contracts
---------
* All methods run on the worker's step thread and never touch storage.
* The layout of a cache is learned by :mod:`kvshelf.vllm.layout_probe` when caches are
  registered, never guessed.
* A block is reported as loaded only when all of its tokens that the hit covers are.
* On CPUs the engine's threads are bound to cores of their own; kvshelf's threads keep
  off those where others are free. The scheduler has no such binding.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import vllm

from kvshelf import ops
from kvshelf.chunkfile import ObjectFormat
from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.identity import Namespace
from kvshelf.layout import native_slots_of
from kvshelf.metrics import Counters
from kvshelf.shelf import Shelf
from kvshelf.staging import StagingPool
from kvshelf.transfer import ChunkSlots, Failure, LayerRun, Load, PagedKVCache, Transfer
from kvshelf.vllm.layout_probe import LayerCache, StoredLayout, choose_layout, probe_layers
from kvshelf.vllm.metadata import LoadFailure, LoadOp, StepMetadata, WorkerMetadata, WorkerPart
from kvshelf.vllm.namespace import (
    WeightsIdentity,
    build_namespace,
    kv_scales_digest,
)

logger = logging.getLogger(__name__)

# How long a step that computes nothing waits for a load. A new request that arrives
# meanwhile waits as long.
_IDLE_WAIT_SECONDS = 5e-3
_WARM_BYTES = 256 << 20


def natural_order(name: str) -> list[str | int]:
    """Sort key that puts layer 10 behind layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def free_cpus() -> set[int] | None:
    """Return the processors that the engine may use but has not bound itself to.

    None where binding is unknown or leaves none: then threads stay where they are.
    """
    try:
        bound = os.sched_getaffinity(0)
        allowed = os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        return None
    return (allowed - bound) or None


def _of_one_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device.type == b.device.type
    )


class WorkerSide:
    """Worker half of :class:`kvshelf.vllm.connector.SharedStorageConnector`.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    shelf : Shelf
    kv_cache_config : KVCacheConfig, optional
        The cache groups; layer names come from the registered caches without it.
    rank : int
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        shelf: Shelf,
        *,
        kv_cache_config: Any = None,
        rank: int = 0,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._shelf = shelf
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self.counters = Counters()
        self._free_cpus = free_cpus()
        self._block_size = int(vllm_config.cache_config.block_size)
        self._unit_tokens = 1
        self._runs: list[LayerRun] = []
        self._names: list[str] = []
        self._part: WorkerPart | None = None
        self._part_lock = threading.Lock()
        self._part_sent = False
        self._weights: WeightsIdentity | None = None
        self._namespace: Namespace | None = None
        self._transfer: Transfer | None = None
        self._prepared: tuple[Namespace, ObjectFormat, PagedKVCache, StagingPool] | None = None
        self._meta: StepMetadata | None = None
        self._loads_started = False
        self._ops: dict[str, LoadOp] = {}
        self._refused: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failures: list[LoadFailure] = []

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
        # Loads the compiled code now, so that no step has to.
        logger.info("gather and scatter: %s", ops.implementation())
        self._names = self._cached_layers(kv_caches)
        layers = self._learn(kv_caches)
        stored = choose_layout(
            layers,
            self._config.layout,
            chunk_size=self._config.chunk_size,
            block_size=self._block_size,
            engine=self._engine_facts(),
        )
        self._runs = list(stored.runs)
        self._unit_tokens = stored.unit_tokens
        with self._part_lock:
            self._part = self._make_part(layers, stored)
        self._weights = WeightsIdentity(
            self._vllm_config,
            self._config,
            on_known=self._weights_known,
            on_problem=self._problem,
            cpus=self._free_cpus,
        )
        self._weights.start()

    def restore(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches as they are after the engine slept.

        Nothing is written to them: only shapes, strides and dtypes are compared with
        those that were learned.
        """
        caches = iter([kv_caches.get(name) for name in self._names])
        for run in self._runs:
            for number, old in enumerate(run.caches):
                new = next(caches)
                if new is None or not _of_one_kind(old, new):
                    self._problem(
                        "the engine's KV caches came back from sleep in another layout; nothing is"
                        " stored or loaded until the engine is restarted"
                    )
                    return
                run.caches[number] = new

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
                and getattr(layers[name], "kv_sharing_target_layer_name", None) is None
            ),
            key=natural_order,
        )

    def _learn(self, kv_caches: Mapping[str, torch.Tensor]) -> list[LayerCache]:
        for name in self._names:
            device = kv_caches[name].device
            if device.type != "cpu":
                raise UnsupportedError(
                    f"layer {name} keeps its KV on {device}; this version of kvshelf serves vLLM's"
                    " CPU backend"
                )
        layers = probe_layers(
            self._vllm_config.compilation_config.static_forward_context,
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
        return int(blocks or self._vllm_config.cache_config.num_gpu_blocks or 0)

    def _engine_facts(self) -> dict[str, object]:
        """Return what could matter to a layout that is unknown."""
        parallel = self._vllm_config.parallel_config
        cache = self._vllm_config.cache_config
        return {
            "num_blocks": self._num_blocks(),
            "block_size": self._block_size,
            "vllm": vllm.__version__,
            "cache_dtype": cache.cache_dtype,
            "compute_dtype": self._vllm_config.model_config.dtype,
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
        }

    def _make_part(self, layers: list[LayerCache], stored: StoredLayout) -> WorkerPart:
        context = self._vllm_config.compilation_config.static_forward_context
        windows, kinds, head_sizes = [], [], []
        for layer in layers:
            window = getattr(context[layer.name].impl, "sliding_window", None)
            windows.append(-1 if window is None else int(window))
            if layer.kvs == 1:
                kinds.append("mla")
            else:
                kinds.append("full" if windows[-1] < 0 else "sliding")
            head_sizes.append(layer.head_size or int(context[layer.name].head_size))
        names = tuple(layer.name for layer in layers)
        scaled = "fp8" in str(self._vllm_config.cache_config.cache_dtype)
        return WorkerPart(
            names,
            stored.shapes,
            stored.dtypes,
            stored.ids,
            tuple(kinds),
            tuple(head_sizes),
            tuple(windows),
            kv_scales=kv_scales_digest(context, names) if scaled else "",
        )

    # ------------------------------------------------------------- namespace

    def _weights_known(self, weights: str) -> None:
        """Background thread: complete the part, and make ready what it decides."""
        with self._part_lock:
            assert self._part is not None
            self._part = replace(self._part, weights=weights)
            part = self._part
        try:
            namespace = build_namespace(self._vllm_config, self._config, part)
            fmt = ObjectFormat(namespace)
            cache = PagedKVCache(fmt, self._runs)
            staging = self._make_staging(fmt)
        except ConfigError as error:
            self._problem(str(error))
            return
        self._prepared = (namespace, fmt, cache, staging)
        # Memory that is touched for the first time inside a step would slow it.
        threading.Thread(
            target=self._warm, args=(staging,), name="kvshelf-warm", daemon=True
        ).start()

    def _warm(self, staging: StagingPool) -> None:
        self._place_thread("warm")
        staging.warm(min(_WARM_BYTES, self._config.staging_bytes // 2))

    def _problem(self, problem: str) -> None:
        with self._part_lock:
            assert self._part is not None
            self._part = replace(self._part, problem=problem)
            self._part_sent = False

    def _make_staging(self, fmt: ObjectFormat) -> StagingPool:
        largest = max(fmt.object_size(shard) for shard in range(fmt.shards))
        return StagingPool(int(self._config.staging_bytes), largest)

    def _open_namespace(self, encoded: bytes, slug: str) -> None:
        if self._namespace is not None and self._namespace.encoded == encoded:
            return
        if self._transfer is not None:
            self._transfer.close()
        prepared = self._prepared
        if prepared is not None and prepared[0].encoded == encoded:
            namespace, fmt, cache, staging = prepared
            self._prepared = None
        else:
            try:
                namespace = Namespace.from_bytes(encoded, slug)
                fmt = ObjectFormat(namespace)
                cache = PagedKVCache(fmt, self._runs)
                staging = self._make_staging(fmt)
            except ValueError as error:
                self._problem(str(error))
                return
        threads = self._config.io_threads or 2
        self._transfer = Transfer(
            self._shelf,
            fmt,
            cache,
            staging,
            counters=self.counters,
            load_threads=threads,
            store_threads=max(1, threads // 2),
            on_thread_start=self._place_thread,
        )
        self._namespace = namespace

    def _place_thread(self, kind: str) -> None:
        """Keep a thread of ours out of the engine's way. Runs on that thread."""
        try:
            if kind != "load":
                # A much lower priority would be worse: a thread that holds the GIL and is
                # not scheduled stops the engine's step.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
            if self._free_cpus:
                bound = os.sched_getaffinity(0)
                # While a load is waited for, the engine's own core may be idle too.
                os.sched_setaffinity(
                    0, self._free_cpus | bound if kind == "load" else self._free_cpus
                )
        except (AttributeError, OSError):
            pass

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
        # On a CPU nothing of an earlier step is in flight when a step begins, so loads
        # need not wait until this step's forward pass is over.
        if self._runs and self._runs[0].caches[0].device.type == "cpu":
            self.start_loads()

    def start_loads(self) -> None:
        """Start this step's loads, once."""
        meta = self._meta
        if meta is None or self._loads_started:
            return
        self._loads_started = True
        for op in meta.loads:
            if self._transfer is None:
                self._refused.add(op.request_id)
                self._bad_blocks.update(self._blocks_of(op, op.start))
                continue
            self._ops[op.request_id] = op
            self._transfer.load(op.request_id, self._load_items(op))

    def _load_items(self, op: LoadOp) -> list[ChunkSlots]:
        size = self._config.chunk_size
        return [
            ChunkSlots(chunk, self._slots(op.block_ids, chunk.index * size, op.start, op.end))
            for chunk in op.chunks
        ]

    def _slots(self, block_ids: list[int], chunk_start: int, start: int, end: int) -> torch.Tensor:
        """Slot mapping of one chunk, −1 outside tokens ``[start, end)``."""
        unit = self._unit_tokens
        size = self._config.chunk_size
        slots = torch.full((size // unit,), -1, dtype=torch.int64)
        first, last = max(start, chunk_start), min(end, chunk_start + size)
        at = (first - chunk_start) // unit
        ids = native_slots_of(block_ids, self._block_size, unit, first, last - first)
        slots[at : at + len(ids)] = ids
        return slots

    def save(self) -> None:
        """Gather the chunks that this step completed. Runs after the forward pass."""
        meta = self._meta
        if meta is None or not meta.stores or self._transfer is None:
            return
        size = self._config.chunk_size
        stores, meta.stores = meta.stores, []
        for op in stores:
            # The first of these blocks may begin with tokens of the chunk before.
            start = op.chunk.index * size % self._block_size
            slots = native_slots_of(op.block_ids, self._block_size, self._unit_tokens, start, size)
            self._transfer.store(ChunkSlots(op.chunk, slots), repair=op.repair, age=op.age)

    def finished_loads(self) -> set[str]:
        """Return the requests whose loads are over, and note what failed."""
        done, self._refused = self._refused, set()
        if self._transfer is None or not self._transfer.loading:
            return done
        idle = self._meta is not None and self._meta.idle and not done
        for load in self._transfer.poll(_IDLE_WAIT_SECONDS if idle else 0.0):
            done.add(load.request_id)
            self._note(load, self._ops.pop(load.request_id))
        return done

    def _note(self, load: Load, op: LoadOp) -> None:
        size = self._config.chunk_size
        for chunk, failure in load.failures:
            self._failures.append(
                LoadFailure(load.request_id, chunk.index, chunk.key, failure is Failure.BAD)
            )
        good_until = op.end
        if load.cancelled:
            good_until = op.start
        elif load.failed_at is not None:
            # The block in which the failed chunk begins is not complete either.
            failed = load.items[load.failed_at].chunk.index * size
            good_until = max(op.start, failed - failed % self._block_size)
        self.counters.add("loaded_tokens", max(0, good_until - op.start))
        if not load.cancelled:
            self._bad_blocks.update(self._blocks_of(op, good_until))

    def _blocks_of(self, op: LoadOp, start: int) -> list[int]:
        """Return the blocks of `op` from token `start` on."""
        return op.block_ids[start // self._block_size : -(-op.end // self._block_size)]

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that failed loads left without KV."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def worker_metadata(self) -> WorkerMetadata | None:
        """Return what the scheduler has to know after this step."""
        meta = WorkerMetadata(failures=self._failures)
        self._failures = []
        with self._part_lock:
            part = self._part
            if part is not None and not self._part_sent:
                meta.parts = {self._rank: part}
                self._part_sent = self._namespace is not None or bool(part.problem)
        if self._transfer is not None:
            meta.repaired = self._transfer.take_repaired()
        if not meta.parts and not meta.failures and not meta.repaired:
            return WorkerMetadata() if self._meta and self._meta.namespace else None
        return meta

    def clear(self) -> None:
        """End a step."""
        self._meta = None

    # ------------------------------------------------------------- end

    def drain(self, seconds: float) -> int:
        """Wait until stores are published; return how many chunks are not."""
        return 0 if self._transfer is None else self._transfer.drain(seconds)

    def close(self) -> None:
        """Publish what is in flight for a bounded time, say what was lost, stop threads."""
        if self._weights is not None:
            self._weights.cancel()
        if self._transfer is not None:
            lost = self._transfer.close(self._config.shutdown_drain_s)
            if lost:
                logger.warning(
                    "%d chunks were not stored within shutdown_drain_s=%g s and are lost",
                    lost,
                    self._config.shutdown_drain_s,
                )
            self._transfer = None
