"""What moves the KV of a worker between its registered caches and the shelf.

Owns the memory, the transfers of all kinds, what is read ahead into memory, the promises of
hand-overs, and the views of the namespaces whose KV moves. A drafter's KV is one more kind of the
transfers (:mod:`kvshelf.vllm.worker.layers`). :mod:`kvshelf.tiers.runtime` owns the shelf.

When caches are registered, the memory is taken, and what copies from and to it is made; with
pipeline stages, when the first namespace is known. The transfers are made with the first namespace,
once. A change of the weights replaces the views and nothing else: stores of the earlier namespace
are published beside those of the new one. One memory serves them all, since chunks of different
namespaces have different keys. The shelf decides what is a hit.

Contracts
---------
* All methods run on the worker's step thread and never touch storage.
* On a device only the step thread allocates.
* While the engine sleeps nothing touches the caches.
* A drafter's KV decides how many drafts are accepted, but changes no answer. So its failures are
  not reported to vLLM, and its KV is left out with one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_group, model_parallel_is_initialized

from kvshelf.backends.guard import GuardedBackend
from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.kinds import DRAFT, FULL, Kind
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv import ops
from kvshelf.kv.caches import HostKVCache, KVCache, layer_calls
from kvshelf.kv.device import BUFFER_BYTES, DeviceKVCache
from kvshelf.kv.streams import Streams
from kvshelf.kv.topology import ShardPlan
from kvshelf.logs import RateLimitedLog
from kvshelf.memory.arena import Arena
from kvshelf.memory.chunk_memory import ChunkMemory, ChunkPlaces
from kvshelf.metrics import COUNTERS, Counters
from kvshelf.shelf.view import ShelfView
from kvshelf.tiers.runtime import Runtime
from kvshelf.transfer.context import TransferContext
from kvshelf.transfer.promises import Promises
from kvshelf.transfer.read_ahead import ReadAhead
from kvshelf.transfer.transfers import Transfers
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.metadata import Orders
from kvshelf.vllm.worker.layers import KindCache, StoredLayers, drafter_of, has_own_layers
from kvshelf.vllm.worker.memory import io_threads, take_memory
from kvshelf.vllm.worker.slots import TokenSlots

logger = logging.getLogger(__name__)

#: The kernel for a GPU is compiled in a third of a second.
_COMPILE_SECONDS = 10.0


class _DraftCounters(Counters):
    """Counts a drafter's chunks apart from the model's, and nothing else."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters

    def add(self, name: str, amount: float = 1) -> None:
        if f"draft_{name}" in COUNTERS:
            self._counters.add(f"draft_{name}", amount)

    def observe(self, operation: str, seconds: float, count: int = 1) -> None:
        pass


@dataclass(eq=False)
class Registration:
    """The registered caches of a worker, and what moves their KV.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    runtime : Runtime
        The shelf, and what this process has beside it.
    kv_cache_config : KVCacheConfig, optional
    rank : int
    streams : Callable[[torch.device], Streams or None]
        Returns the streams to use on a device; its own where the answer is None.
    share : Callable, optional
        Lets a node server read the memory for chunks, see
        :class:`~kvshelf.memory.chunk_memory.ChunkMemory`.

    Attributes
    ----------
    model, drafter : StoredLayers
        None where there is no drafter, or it is left out.
    on_device : bool
        Whether the caches are on a device, or used as if they were.
    host : ChunkMemory or None
        None while its size is not known.
    transfers : Transfers or None
        None until the first namespace is known.
    views : Mapping of Kind to ShelfView
        The objects of each kind in the namespace that is open.
    promises : Promises or None
    ahead : Mapping of Kind to ReadAhead
        What is read ahead of requests that wait.
    """

    vllm_config: Any
    config: Config
    runtime: Runtime
    kv_cache_config: Any = None
    rank: int = 0
    streams: Callable[[torch.device], Streams | None] = lambda device: None
    share: Callable[[Arena], None] | None = None
    on_device: bool = field(default=False, init=False)
    host: ChunkMemory | None = field(default=None, init=False)
    transfers: Transfers | None = field(default=None, init=False)
    views: Mapping[Kind, ShelfView] = field(default_factory=dict, init=False)
    promises: Promises | None = field(default=None, init=False)
    ahead: Mapping[Kind, ReadAhead] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        engine = self.vllm_config, self.config, self.kv_cache_config, self.rank
        self.model = StoredLayers(*engine)
        self.drafter = drafter_of(*engine)
        self._log = RateLimitedLog(logger)

    @property
    def layers(self) -> list[StoredLayers]:
        """Those of the model, and behind them those of the drafter."""
        return [self.model] if self.drafter is None else [self.model, self.drafter]

    @property
    def serving(self) -> Transfers | None:
        """What moves KV; None while there is no namespace or the worker is disabled."""
        return self.transfers if self.model.serves else None

    def moving(self, kind: Kind) -> KindCache | None:
        """Return the caches of a kind whose KV moves now, while the worker serves."""
        if kind != DRAFT:
            return self.model.kinds.get(kind)
        drafter = self.drafter
        return drafter.kinds[DRAFT] if drafter is not None and drafter.serves else None

    # ------------------------------------------------------------- caches

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], modules: Iterable[torch.nn.Module] = ()
    ) -> None:
        """Describe the engine's caches, take memory, start to fingerprint the weights.

        Parameters
        ----------
        kv_caches : Mapping
        modules : Iterable of Module
            Of the loaded model.

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
        fmt = self.model.describe(kv_caches, modules)
        assert self.model.caches is not None
        device = self.model.caches.device
        self.on_device = device.type != "cpu" or self.streams(device) is not None
        if fmt is not None:
            self._allocate(self.model, fmt)
        # vLLM captures CUDA graphs next: code is better loaded before.
        ops.kernel_problem(device, seconds=_COMPILE_SECONDS)
        self.model.fingerprint(modules)
        drafter = self.drafter
        try:
            if drafter is not None and has_own_layers(drafter):
                fmt = drafter.describe(kv_caches)
                if fmt is not None and self.host is not None:
                    self._allocate(drafter, fmt)
                drafter.fingerprint()
        except Exception as error:  # noqa: BLE001 - the engine is served without it
            assert drafter is not None
            drafter.disable(f"{type(error).__name__}: {error}")

    def _allocate(self, layers: StoredLayers, fmt: ObjectFormat) -> None:
        """Make what moves each kind of some layers between the caches and memory."""
        plans = layers.plans(fmt)
        formats = {kind: fmt.of(kind) for kind in plans}
        threads = io_threads(self.vllm_config, self.on_device)[0] + 1
        if self.host is None:
            assert self.model.caches is not None
            self.host = take_memory(
                self.vllm_config,
                self.config,
                {kind: (formats[kind], plan) for kind, plan in plans.items()},
                threads=threads,
                rank=self.model.rank,
                device=self.model.caches.device if self.on_device else None,
                share=self.share,
                counters=self.runtime.counters,
            )
        for kind, plan in plans.items():
            name = DRAFT if layers.of_drafter else kind
            slot_bytes = ChunkPlaces(self.host, formats[kind], plan.shards).slot_bytes
            self.host.serve((None, name), threads, slot_bytes)
            buffer_bytes = BUFFER_BYTES // len(plans)
            layers.kinds[name] = self._kind_cache(layers, formats[kind], plan, buffer_bytes)

    def _kind_cache(
        self, layers: StoredLayers, fmt: ObjectFormat, plan: ShardPlan, buffer_bytes: int
    ) -> KindCache:
        assert layers.caches is not None and self.host is not None
        caches = layers.caches.kinds.get(fmt.kind)
        if caches is None:
            raise ConfigError(
                f"the namespace has layers of kind {fmt.kind} in this stage, and none are"
                " registered: the engine's model does not match the namespace"
            )
        caches.divide(len(plan.shards))
        slots = caches.slots
        if plan.context_ranks > 1:
            _check_context_group(plan)
            parallel = self.vllm_config.parallel_config
            interleave = int(getattr(parallel, "cp_kv_cache_interleave_size", 1))
            slots = tuple(
                of_group.of_rank(plan, interleave)
                for of_group in slots
                if isinstance(of_group, TokenSlots)
            )
        calls = layer_calls(fmt, caches.runs, plan)
        cache: KVCache
        if not self.on_device:
            cache = HostKVCache(calls)
        else:
            streams = self.streams(layers.caches.device)
            cache = DeviceKVCache(calls, buffer_bytes=buffer_bytes, streams=streams)
        return KindCache(fmt, cache, plan, slots)

    # ------------------------------------------------------------- namespaces

    def open(self, encoded: bytes, slug: str) -> bool:
        """Move KV of a namespace from now on; return whether that is so.

        What is queued of earlier weights is published beside it.

        Raises
        ------
        RuntimeError
            If the system allows no threads now. The next call tries again.
        """
        model, shelf = self.model, self.runtime.shelf()
        if model.namespace is not None and model.namespace.encoded == encoded:
            return True
        self.runtime.keep_bounds()
        if shelf is None or model.caches is None or model.disabled_reason:
            # The scheduler announces the namespace until this worker's reports end.
            return False
        fmt = self._format_in(model, encoded, slug)
        if fmt is None:
            return False
        if self.transfers is None:
            self._start(shelf.backend)
        if model.namespace is not None and self.drafter is not None:
            # Its namespace belongs to the model's.
            self.drafter.disable("the model's weights have changed")
        self.views = {kind: shelf.view(fmt.of(kind)) for kind in model.kinds}
        model.namespace = fmt.namespace
        return True

    def open_drafts(self, encoded: bytes, slug: str) -> None:
        """Also move KV of a namespace of the drafter; never raises."""
        drafter, transfers, shelf = self.drafter, self.serving, self.runtime.shelf()
        if drafter is None or drafter.namespace is not None or transfers is None or shelf is None:
            return
        try:
            fmt = self._format_in(drafter, encoded, slug)
            if fmt is not None:
                counters = _DraftCounters(self.runtime.counters)
                transfers.add(self._context(DRAFT, drafter.kinds[DRAFT], shelf.backend, counters))
                self.views = {**self.views, DRAFT: shelf.view(fmt)}
                drafter.namespace = fmt.namespace
        except Exception as error:  # noqa: BLE001 - the next step tries again
            self._log.error("KV of a drafter does not move yet", exc_info=error)

    def _format_in(self, layers: StoredLayers, encoded: bytes, slug: str) -> ObjectFormat | None:
        """Return the format of a namespace; None if the layers cannot use it, and are disabled."""
        try:
            fmt = ObjectFormat(Namespace.from_bytes(encoded, slug))
            if not layers.kinds:
                self._allocate(layers, fmt)
            for kind in layers.kinds.values():
                if kind.fmt.kind not in fmt.kinds or not kind.fits(fmt.of(kind.fmt.kind)):
                    raise ConfigError(
                        "objects of this engine's namespace have other sizes than those for which"
                        " memory was taken: restart the engine, or nothing is loaded or stored"
                    )
        except (ValueError, RuntimeError) as error:
            layers.disable(str(error))
            return None
        return fmt

    def _start(self, backend: GuardedBackend) -> None:
        """Start the threads that move the model's KV, all kinds of it."""
        counters = self.runtime.counters
        contexts = [
            self._context(kind, of_kind, backend, counters)
            for kind, of_kind in self.model.kinds.items()
        ]
        self.transfers = transfers = Transfers(contexts)
        self.promises = Promises(
            counters,
            on_handover=self.runtime.note_handover,
            on_thread_start=widen_cpu_affinity,
        )
        assert self.host is not None
        self.host.grow()
        if self.config.reads_ahead(backend.properties.probe_cost):
            self.ahead = {
                context.kind: ReadAhead(context, transfers.loads[context.kind])
                for context in contexts
            }

    def _context(
        self, kind: Kind, of_kind: KindCache, backend: GuardedBackend, counters: Counters
    ) -> TransferContext:
        """Return what the stores and loads of a kind have."""
        assert self.host is not None
        fmt = of_kind.fmt
        threads = io_threads(self.vllm_config, self.on_device, backend.properties)
        if fmt.kind != fmt.kinds[0]:
            # These have fewer objects, and all kinds share the processors.
            threads = max(1, threads[0] // 2), max(1, threads[1] // 2)
        return TransferContext(
            fmt,
            backend,
            of_kind.cache,
            self.host,
            counters,
            of_kind.plan,
            load_threads=threads[0],
            store_threads=threads[1],
            on_thread_start=widen_cpu_affinity,
            of_drafter=kind == DRAFT,
        )

    # ------------------------------------------------------------- hand-overs, orders

    @property
    def marker_view(self) -> ShelfView:
        """The view of the open namespace by which markers are written."""
        return self.views[FULL] if FULL in self.views else next(iter(self.views.values()))

    def give_up(self, attempt: str) -> None:
        """Mark a promise in the namespace that is open as broken."""
        if self.promises is not None:
            self.promises.give_up(self.marker_view, attempt)

    def take_orders(self, orders: Orders) -> None:
        """Forget what is known of the shelf, if it is time for that."""
        if orders.reset and self.transfers is not None:
            self.transfers.forget_stored()

    # ------------------------------------------------------------- sleep, the end

    def pause(self) -> None:
        """Wait for running copies and begin no more: the caches' memory is about to be freed."""
        for layers in self.layers:
            for kind in layers.kinds.values():
                kind.cache.pause()

    def drain(self, seconds: float) -> int:
        """Wait until stores are published; return how many chunks are not."""
        return 0 if self.transfers is None else self.transfers.drain(seconds)

    def end_transfers(self, drain_seconds: float, marker_seconds: float) -> int:
        """Stop the threads; return how many chunks were lost.

        A part of the time is kept for the markers of chunks that could not be stored.
        """
        for ahead in self.ahead.values():
            ahead.release_all()
        self.ahead = {}
        if self.promises is None or not self.promises.given:
            marker_seconds = 0.0
        transfers, self.transfers = self.transfers, None
        lost = 0 if transfers is None else transfers.close(drain_seconds - marker_seconds)
        if self.promises is not None:
            self.promises.close(marker_seconds)
        return lost

    def close(self) -> None:
        """Free the memory."""
        for layers in self.layers:
            layers.cancel_weights()
            for kind in layers.kinds.values():
                kind.cache.close()
        if self.host is not None:
            self.host.close()


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
    actual = int(group.world_size), int(group.rank_in_group)
    expected = plan.context_ranks, plan.context_rank
    if actual != expected:
        raise UnsupportedError(
            f"this vLLM version makes the worker rank {actual[1]} of {actual[0]} of its group for"
            f" decode context parallelism, kvshelf expects rank {expected[1]} of {expected[0]}: set"
            " decode_context_parallel_size to 1"
        )
