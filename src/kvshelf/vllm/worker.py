"""The worker side of the connector: moves KV between the paged cache and the shelf.

Owns the registered KV caches, this worker's part of the namespace, and the
:class:`~kvshelf.transfer.Transfer` that runs its stores and loads.

Contracts
---------
* All methods run on the worker's step thread and never touch storage.
* The layout of a cache is recognised, never guessed: what is not recognised is refused
  when caches are registered.
* On CPUs the engine's threads are bound to cores of their own; kvshelf's threads keep
  off those where others are free. The scheduler has no such binding.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kvshelf import ops
from kvshelf.chunkfile import ObjectFormat
from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.identity import Namespace
from kvshelf.layout import PagedLayout, native_slots_of
from kvshelf.metrics import Counters
from kvshelf.shelf import Shelf
from kvshelf.staging import StagingPool
from kvshelf.transfer import ChunkSlots, Failure, LayerRun, Load, PagedKVCache, Transfer
from kvshelf.vllm.metadata import LoadFailure, LoadOp, StepMetadata, WorkerMetadata, WorkerPart
from kvshelf.vllm.namespace import (
    WeightsIdentity,
    build_namespace,
    kv_scales_digest,
    stored_dtype,
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
        self._kernel_block_size = 0
        self._runs: list[LayerRun] = []
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
        """Take the engine's caches, recognise their layout, begin to name the weights.

        Raises
        ------
        UnsupportedError
            If a cache is of a kind that this version does not know.
        ConfigError
            If the chunk size does not fit the block size.
        """
        # Loads the compiled code now, so that no step has to.
        logger.info("gather and scatter: %s", ops.implementation())
        names = self._cached_layers(kv_caches)
        caches = [kv_caches[name] for name in names]
        self._runs, part = self._recognise(names, caches)
        with self._part_lock:
            self._part = part
        self._weights = WeightsIdentity(
            self._vllm_config,
            self._config,
            on_known=self._weights_known,
            on_problem=self._problem,
            cpus=self._free_cpus,
        )
        self._weights.start()

    def _cached_layers(self, kv_caches: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of layers with a cache of their own, in model order."""
        groups = getattr(self._kv_cache_config, "kv_cache_groups", None)
        names = groups[0].layer_names if groups else kv_caches
        return sorted((name for name in names if name in kv_caches), key=natural_order)

    def _recognise(
        self, names: list[str], caches: list[torch.Tensor]
    ) -> tuple[list[LayerRun], WorkerPart]:
        layers = self._vllm_config.compilation_config.static_forward_context
        cache_dtype = str(self._vllm_config.cache_config.cache_dtype)
        runs: list[LayerRun] = []
        shapes, dtypes, layouts, kinds = [], [], [], []
        head_sizes, windows = [], []
        for i, (name, cache) in enumerate(zip(names, caches, strict=True)):
            layer = layers[name]
            layout_id, head_size = self._native_layout(name, layer, cache, cache_dtype)
            layout = PagedLayout.native_blocks(cache)
            if runs and runs[-1].layout == layout:
                runs[-1] = LayerRun(runs[-1].first_layer, [*runs[-1].caches, cache], layout)
            else:
                runs.append(LayerRun(i, [cache], layout))
            window = getattr(layer.impl, "sliding_window", None)
            windows.append(-1 if window is None else int(window))
            kinds.append("full" if windows[-1] < 0 else "sliding")
            layouts.append(layout_id)
            head_sizes.append(head_size)
            dtypes.append(stored_dtype(cache_dtype, str(cache.dtype)))
            shapes.append(f"2,*,{cache.shape[1]},{head_size}")
        part = WorkerPart(
            tuple(names),
            tuple(shapes),
            tuple(dtypes),
            tuple(layouts),
            tuple(kinds),
            tuple(head_sizes),
            tuple(windows),
            kv_scales=kv_scales_digest(layers, tuple(names)) if "fp8" in cache_dtype else "",
        )
        return runs, part

    def _native_layout(
        self, name: str, layer: Any, cache: torch.Tensor, cache_dtype: str
    ) -> tuple[str, int]:
        """Return layout id and head size of one layer of vLLM's CPU attention backend."""
        backend = type(layer.impl).__name__
        if cache.device.type != "cpu" or backend != "CPUAttentionBackendImpl":
            raise UnsupportedError(
                f"layer {name} keeps its KV on {cache.device.type} in the layout of {backend};"
                " this version of kvshelf serves vLLM's CPU attention backend"
            )
        if cache.dim() != 4:
            raise UnsupportedError(
                f"the cache of layer {name} has shape {list(cache.shape)}; expected"
                " [blocks, KV heads, tokens, content]"
            )
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        head_size = int(layer.head_size)
        tokens = int(cache.shape[2])
        dtype = stored_dtype(cache_dtype, str(cache.dtype))
        if int(cache.shape[3]) != 2 * head_size or self._block_size % tokens:
            raise UnsupportedError(
                f"the cache of layer {name} has shape {list(cache.shape)}; expected blocks of a"
                f" divisor of {self._block_size} tokens with content of {2 * head_size} elements"
            )
        if self._kernel_block_size not in (0, tokens):
            raise UnsupportedError("layers with blocks of different size are not supported")
        self._kernel_block_size = tokens
        if self._config.chunk_size % self._block_size:
            raise ConfigError(
                f"chunk_size={self._config.chunk_size} is not a multiple of the engine's block"
                f" size {self._block_size}: set chunk_size to a multiple, or --block-size to a"
                " divisor"
            )
        isa = _get_attn_isa(
            self._vllm_config.model_config.dtype, self._block_size, head_size, cache_dtype
        )
        return f"cpu-{isa}-{dtype.lower()}-b{tokens}", head_size

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
        """Block ids of one chunk, −1 for blocks outside tokens ``[start, end)``."""
        tokens = self._kernel_block_size
        size = self._config.chunk_size
        slots = torch.full((size // tokens,), -1, dtype=torch.int64)
        first, last = max(start, chunk_start), min(end, chunk_start + size)
        at = (first - chunk_start) // tokens
        ids = native_slots_of(block_ids, self._block_size, tokens, first, last - first)
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
            slots = native_slots_of(
                op.block_ids, self._block_size, self._kernel_block_size, 0, size
            )
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
            good_until = max(op.start, load.items[load.failed_at].chunk.index * size)
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




