"""The worker side of the connector: moves KV between the paged cache and the shelf.

Owns the :class:`~kvshelf.transfer.kinds.KindTransfers` that run this worker's stores and loads, the
memory tier, and the account of loads that vLLM waits for.
:mod:`kvshelf.vllm.registration` owns the caches and the way to the namespace.

Owns also the :class:`~kvshelf.vllm.draft_worker.DraftWorker` of a worker with a drafter.
:mod:`kvshelf.vllm.slots` maps tokens to slots.

The device that holds the caches is a parameter: chunks move between caches in host memory and
staging at once, between caches on a GPU and staging by :mod:`kvshelf.kv.device`.

Contracts
---------
* All methods run on the worker's step thread and never touch storage.
* The step thread waits for no device. A load writes to its blocks after everything that was
  enqueued on the engine's stream when it started, such as the zeroing of new blocks. Loads start in
  ``start_load_kv``, behind the forward pass, or before it where ``load_beside_step`` is set and
  vLLM frees no block that this pass may still read. Stores are enqueued on that stream after the
  forward pass, before any later step or preemption, or the next owner of a block. CUDA graphs do
  not change this.
* A chunk is gathered before the event by which vLLM learns that the step is over: from then on it
  may free the block, and a connector that does not wait for the stream may fill it. vLLM's second
  model runner records that event after sampling, so there :meth:`WorkerSide.finish_forward`
  gathers. Drafts are judged, and the drafter runs, behind the event: states of steps with drafts
  and the drafter's KV are gathered in :meth:`WorkerSide.save`, after the rest, and not at all
  beside such a connector.
* From the moment that an engine sleeps until it is awake nothing touches the caches. A device
  that failed is not used again: the engine continues without a cache.
* A block counts as loaded only when all of its tokens that the hit covers are loaded.
* Every load that the scheduler planned is reported as finished, whether it succeeded or not, and
  the blocks that it left without KV no later than that. It stays on the list until vLLM takes the
  report. Where an error hides which blocks those are, all tokens of the request are computed.
* A step waits for loads only where the scheduler says that no other rank waits for the step.
* Where a sliding window leaves blocks out of a hit, a load succeeds as a whole or not at all: the
  tokens computed behind a part of the hit would read blocks that are not there.
* Where the engine has several cache groups or states, all loads do: no block of a load that failed
  is used, and vLLM computes all tokens that it was for, or polls the request again.
* One memory tier serves all kinds of KV and outlives changes of the weights: objects have the names
  of their namespace. The scheduler side knows nothing of it: the shelf decides what is a hit.
* What a failed step left in the cache is never stored.
* A chunk of full attention that found no staging is gathered in a later step of its request
  (:mod:`kvshelf.vllm.postponed`).
* From the moment when weights may have changed in place, nothing is loaded or stored until the
  scheduler has named the namespace of the weights that are there now
  (:mod:`kvshelf.vllm.loaded_weights`). A load or store that was planned in an earlier round is
  dropped. What was gathered before is published.
* Every store that was planned for a hand-over ends in an object, or in a marker that says that the
  hand-over failed, as far as the storage takes one in time.
* On CPUs the engine's threads are bound to cores of their own; kvshelf's threads may also use the
  cores to which no rank is bound. The scheduler has no such binding.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from kvshelf.backends.breaker import BreakerState
from kvshelf.background import Background
from kvshelf.capacity.sweeper import Sweeper
from kvshelf.capacity.uses import Uses
from kvshelf.capacity.walk import Walk
from kvshelf.config import Config
from kvshelf.format.kinds import FULL, WINDOW, Kind, kind_key
from kvshelf.format.objects import ObjectFormat
from kvshelf.history import Event, History, Reason
from kvshelf.kv.streams import Streams
from kvshelf.kv.topology import ShardPlan
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ShelfView
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import AnyShelf, TieredView
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.kinds import JointLoad, KindTransfers, share_out
from kvshelf.transfer.load import Failure
from kvshelf.transfer.prefetch import KindMemory, Prefetcher
from kvshelf.transfer.promises import Promises
from kvshelf.transfer.staging import Regions
from kvshelf.transfer.stores import StoreOutcome
from kvshelf.transfer.transfer import Transfer
from kvshelf.vllm import weight_changes
from kvshelf.vllm.adapters import LoadedAdapters, adapter_settings
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.draft_worker import DraftWorker
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.loaded_weights import LoadedWeights, enclosing_model
from kvshelf.vllm.metadata import (
    NULL_BLOCK,
    LoadFailure,
    LoadOp,
    StepMetadata,
    StoreOp,
    WorkerMetadata,
)
from kvshelf.vllm.namespace import manager_block_size
from kvshelf.vllm.postponed import PostponedStores
from kvshelf.vllm.registration import Memories, Registration, State
from kvshelf.vllm.slots import slots_to_load, slots_to_store, state_to_load

logger = logging.getLogger(__name__)

# How long a step waits for a load where the scheduler allows it: another empty step would cost the
# load 2 to 3 ms. A new request that arrives meanwhile waits as long.
_IDLE_WAIT_SECONDS = 10e-3
# How long the end of an engine waits for threads that publish KV of earlier weights.
_JOIN_SECONDS = 0.5
# Part of the shutdown time that is kept for the markers of chunks that could not be stored.
_MARKER_SECONDS = 0.5
# A step gathers at least this many chunks of earlier steps, if staging has space.
_LEAST_AGAIN = 4
# Breaker states as numbers, for metrics.
_STATES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_WEIGHTS_CHANGED = (
    "the engine's weights were changed in place ({}) and their new content is unknown, because this"
    " vLLM version does not show its model; restart the engine, with a `version` of its own or from"
    " files of the new weights"
)


class WorkerSide:
    """Worker half of :class:`kvshelf.vllm.connector.SharedStorageConnector`.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    shelf : Callable[[], AnyShelf or None]
        Returns the shelf, None while it is not open.
    kv_cache_config : KVCacheConfig, optional
        The cache groups; layer names come from the registered caches without it.
    rank : int
    counters : Counters, optional
        Where to count; new counters when absent.
    streams : Callable[[torch.device], Streams or None], optional
        Returns the streams to use on a device; its own where the answer is None.
    regions : Callable, optional
        Takes memory for staging: that from which a node server takes what is stored.
    may_store : bool
        Whether the engine stores anything: no object that it finds bad is replaced otherwise.
    others_fill : bool
        Whether another connector may fill free blocks without waiting for the engine's stream.
    history : History, optional
        Gets what becomes of chunks.

    Attributes
    ----------
    rank : int
    counters : Counters
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        shelf: Callable[[], AnyShelf | None],
        *,
        kv_cache_config: Any = None,
        rank: int = 0,
        counters: Counters | None = None,
        streams: Callable[[torch.device], Streams | None] | None = None,
        regions: Regions | None = None,
        may_store: bool = True,
        others_fill: bool = False,
        history: History | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._others_fill = others_fill
        self._may_store = may_store
        self._history = history
        self._config = config
        self._shelf = shelf
        self.rank = rank
        self.counters = Counters() if counters is None else counters
        groups = CacheGroups(vllm_config, kv_cache_config)
        self._hybrid = groups.hybrid
        #: On a device, loads start before the forward pass and write during it.
        self._beside_step = config.load_beside_step and groups.keeps_blocks
        self._beside_step &= vllm_config.speculative_config is None
        #: Tokens in a block of the cache manager, where there is one group.
        self._block_size = manager_block_size(vllm_config, kv_cache_config)
        self._registration = Registration(
            vllm_config, config, kv_cache_config, rank, streams, regions=regions
        )
        self._weights: LoadedWeights | None = None
        self._drafts = DraftWorker.of(
            vllm_config,
            config,
            shelf,
            kv_cache_config=kv_cache_config,
            rank=rank,
            counters=self.counters,
            streams=streams,
            regions=regions,
            in_front=self._before_drafts,
        )
        self._transfer: KindTransfers | None = None
        self._walk: Walk | None = None
        #: The walk's thread; with a node server there is no sweeper.
        self._walking: Background | None = None
        self._sweeper: Sweeper | None = None
        #: Uses of tails; the scheduler side records those of chunks.
        self._uses = Uses.of(config, self.counters, on_thread_start=widen_cpu_affinity)
        self._promises: Promises | None = None
        #: Transfers of earlier weights that still publish, and their promises.
        self._retired: list[tuple[KindTransfers, Promises]] = []
        self._prefetchers: dict[Kind, Prefetcher] = {}
        self._prefetched: dict[Kind, KindMemory] = {}
        self._memory: MemoryTier | None = None
        #: Loads copy straight from the memory tier to the caches.
        self._memory_in_place = True
        self._meta: StepMetadata | None = None
        #: Stores whose drafter's KV is gathered when the drafts are made.
        self._undrafted: list[StoreOp] = []
        #: Loads that the scheduler planned and that have not started.
        self._planned: list[LoadOp] = []
        self._ops: dict[JointLoad, LoadOp] = {}
        #: Loads whose KV must not be used, whatever their transfer reports.
        self._invalidated: set[JointLoad] = set()
        #: Loads that ended while it is not known what vLLM loaded for their adapter.
        self._undecided: list[JointLoad] = []
        #: Requests whose loads have ended, until that is reported to vLLM.
        self._finished: set[str] = set()
        #: For each cache group.
        self._bad_blocks: tuple[set[int], ...] = (set(),)
        #: Requests of which all tokens must be computed, including those that were loaded.
        self._failed_requests: set[str] = set()
        self._failures: list[LoadFailure] = []
        self._adapters = LoadedAdapters(adapter_settings(vllm_config))
        #: The last report to the scheduler; None: it must be sent again.
        self._breaker_open: bool | None = False
        self._writes_refused = False
        self._postponed = PostponedStores(config.handover_wait_s)

    # ------------------------------------------------------------- caches

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's caches, in place of those registered before.

        Raises
        ------
        UnsupportedError
            If kvshelf does not support a cache of this kind.
        ConfigError
            If the configuration does not fit the caches or the engine.
        """
        self._drop_postponed(self._postponed.drop_all())
        if self._transfer is not None:
            self._close_transfer(0.0)
        for op in self._ops.values():
            self._refuse(op)
        self._ops.clear()
        self._invalidated.clear()
        weight_changes.watch(self)
        weight_changes.watch_user_code()
        if self._weights is None:
            self._watch_weights(enclosing_model())
        if getattr(self._vllm_config, "lora_config", None) and not self._adapters.watch():
            logger.warning(
                "this vLLM version does not expose which LoRA adapters it loads, so KV of requests"
                " with one is not stored"
            )
        model = None if self._weights is None else self._weights.model
        self._registration.register(kv_caches, () if model is None else model.modules())
        self._take_memory()
        if self._drafts is not None:
            self._drafts.register(kv_caches)

    def _take_memory(self) -> None:
        """Take the memory of the tier that is configured, once."""
        nbytes, caches = self._config.memory_bytes, self._registration.caches
        if not nbytes or caches is None or self._memory is not None:
            return
        if self._registration.disabled_reason:
            return
        if caches.device.type == "cuda":
            try:
                self._memory = MemoryTier(nbytes, counters=self.counters, device=caches.device)
                return
            except RuntimeError as error:
                logger.warning(
                    "could not pin the memory tier (%s); its objects are copied to staging on their"
                    " way to the GPU",
                    error,
                )
            self._memory_in_place = False
        self._memory = MemoryTier(nbytes, counters=self.counters)

    def _memory_of(self, fmt: ObjectFormat, plan: ShardPlan, prefetched: int) -> KindMemory | None:
        """Return the memory tier as one kind uses it; `prefetched` bytes are for waiting requests.

        Without a tier that is configured nothing else gets into it.
        """
        if self._memory is None:
            return None
        return KindMemory(
            self._memory,
            fmt,
            self.counters,
            shards=plan.shards,
            share=prefetched / self._memory.max_bytes,
            keeps=self._config.memory_bytes > 0,
            in_place=self._memory_in_place,
        )

    def _before_drafts(self, view: ShelfView, plan: ShardPlan) -> ShelfView:
        """Put the memory tier in front of the shelf for a drafter's KV, if one is configured."""
        memory = self._memory_of(view.fmt, plan, 0) if self._config.memory_bytes else None
        return view if memory is None else TieredView(view, [memory])

    def _watch_weights(self, model: torch.nn.Module | None) -> None:
        """Read the weights for the first time, and notice when they are loaded anew."""
        self._weights = LoadedWeights(model)
        if self._weights.watched:
            weight_changes.watch_loading(self, model)
        else:
            logger.warning(
                "changes of weights in a running engine are noticed only where vLLM's own methods"
                " make them, and end caching: %s",
                self._weights.problem or "this vLLM version does not show its model",
            )

    def weights_changed(self, how: str, version: str = "") -> None:
        """Load and store nothing until the weights are known: `how` changes or discards them.

        What was gathered before is still valid, and is published.

        Parameters
        ----------
        how : str
            Names the method that changes them.
        version : str
            The name of the new weights; empty where only their content identifies them.
        """
        weights = self._weights
        if weights is None or not weights.watched:
            self._registration.disable(_WEIGHTS_CHANGED.format(how))
        else:
            if weights.settled:
                logger.info(
                    "the weights change (%s): nothing is loaded or stored until they are compared",
                    how,
                )
            weights.changed(version)
        self._stop_loads()
        if self._drafts is not None:
            self._drafts.disable("the engine's weights were changed in place")

    def weights_suspected(self) -> None:
        """Load and store nothing until the weights are compared, as code may change them."""
        if self._weights is not None and self._weights.watched:
            self._weights.suspected()
            self._stop_loads()

    def _stop_loads(self) -> None:
        self._invalidate_loads()
        for prefetcher in self._prefetchers.values():
            prefetcher.release_all()
        if self._drafts is not None:
            self._drafts.stop_loads()

    def fall_asleep(self) -> None:
        """Publish what is staged, and stop using the caches: their memory is freed. Idempotent.

        Waits for copies that are running. Loads that are not reported yet fail, and so do loads
        that come later.
        """
        self._invalidate_loads()
        self._drop_postponed(self._postponed.drop_all())
        self.drain(self._config.shutdown_drain_s)
        self._registration.pause()
        if self._drafts is not None:
            self._drafts.fall_asleep(self._config.shutdown_drain_s)

    def wake_up(self) -> None:
        """Use the caches again after the engine slept, see :meth:`Registration.resume`."""
        self._registration.resume()
        if self._drafts is not None:
            self._drafts.wake_up()

    def _invalidate_loads(self) -> None:
        """Fail all loads that are not reported: what they have scattered is no longer valid."""
        for load in self._ops:
            if not load.cancelled:
                self._invalidated.add(load)
                if self._transfer is not None:
                    self._transfer.cancel(load.request_id)

    # ------------------------------------------------------------- transfer

    @property
    def _serving(self) -> bool:
        settled = self._weights is None or self._weights.settled
        return settled and self._registration.state is State.SERVING

    @property
    def _stores(self) -> bool:
        """Whether what is computed instead of a bad object may replace it."""
        shelf = self._shelf()
        return self._may_store and shelf is not None and not shelf.backend.properties.read_only

    def _is_current(self, op: LoadOp | StoreOp) -> bool:
        """Whether an operation was planned in the namespace that is open."""
        return self._weights is None or op.round == self._weights.round

    def _begin_round(self, number: int) -> None:
        """Compare the weights, as the scheduler requested."""
        if self._weights is None or number <= self._weights.round:
            return
        self._weights.begin(number)
        self._stop_loads()

    def _agree(self, number: int, encoded: bytes, slug: str) -> None:
        """Continue in the namespace that the scheduler has named in a round."""
        if self._weights is not None and not self._weights.agree(number):
            return
        self._open_namespace(encoded, slug)
        namespace = self._registration.namespace
        if self._weights is not None and namespace is not None and namespace.encoded == encoded:
            self._weights.settle(str(namespace.record["weights"]))

    def _open_namespace(self, encoded: bytes, slug: str) -> None:
        registration = self._registration
        if registration.namespace is not None and registration.namespace.encoded == encoded:
            return
        shelf = self._shelf()
        if shelf is None or registration.caches is None:
            # The scheduler announces the namespace until this worker's reports end.
            return
        self._bound(shelf)
        if self._transfer is not None:
            if self._ops:
                # Their blocks may still be written to. All are cancelled, so they end soon.
                return
            self._retire_transfer()
        memories = registration.take_memories(encoded, slug)
        if memories is None:
            return
        budget = self._config.prefetch_budget(shelf.backend.properties.probe_cost)
        if budget and self._memory is None:
            self._memory = MemoryTier(budget, counters=self.counters, lazy=True)
            self._memory_in_place = not registration.on_device
        shares: Mapping[Kind, int] = {}
        if budget:
            formats = [memory.fmt for memory in memories.values()]
            plans = {kind: memory.plan for kind, memory in memories.items()}
            shares = share_out(budget, formats, plans, "memory_tier", chunks=0)
        transfers: dict[Kind, Transfer] = {}
        prefetched: dict[Kind, KindMemory] = {}
        try:
            for kind, memory in memories.items():
                view: ShelfView = shelf.view(memory.fmt)
                near = self._memory_of(memory.fmt, memory.plan, shares.get(kind, 0))
                if near is not None:
                    prefetched[kind] = near
                    view = TieredView(view, [near])
                transfers[kind] = registration.start_transfer(
                    view, memory, self.counters, history=self._history
                )
        except RuntimeError:
            # No threads can be started now. The next step tries again.
            for transfer in transfers.values():
                transfer.retire()
                transfer.end()
            for one in prefetched.values():
                one.close()
            registration.put_back(memories)
            raise
        self._transfer = KindTransfers(transfers)
        self._promises = self._promises_in(shelf, memories)
        self._prefetched = prefetched
        self._prefetchers = {
            kind: Prefetcher(transfers[kind], one) for kind, one in prefetched.items()
        }
        registration.serve(memories)

    def _bound(self, shelf: AnyShelf) -> None:
        """Keep the shelf within its bounds, unless other processes do. Idempotent."""
        if self._config.read_only:
            return
        keep = self._config.handover_keep_s or None
        if self._walk is None:
            # One rank for all.
            self._walk = Walk(shelf.backend, self.counters, keep=keep, walks=self.rank == 0)
        if self._config.server is not None:
            if self._walking is None and keep is not None:
                self._walking = Background(
                    "kvshelf-capacity", self._walk.step, on_start=widen_cpu_affinity
                )
                self._walk.wake = self._walking.wake
            if self._walking is not None:
                self._walking.start()
            return
        if self._sweeper is None:
            self._sweeper = Sweeper(
                shelf,
                self._config.capacity,
                self.counters,
                # One rank for all.
                sweeps=self.rank == 0,
                walk=self._walk,
                keep_tails=keep,
                on_evicted=None if self._history is None else self._history.note_evicted,
                on_thread_start=widen_cpu_affinity,
            )
        self._sweeper.start()

    def _promises_in(self, shelf: AnyShelf, memories: Memories) -> Promises:
        kind = FULL if FULL in memories else next(iter(memories))
        return Promises(
            shelf.view(memories[kind].fmt),
            memories[kind].plan.shards,
            self.counters,
            walk=self._walk,
            uses=self._uses,
            on_thread_start=widen_cpu_affinity,
        )

    def _retire_transfer(self) -> None:
        """Keep the memory for transfers of other weights; publish the rest in the background."""
        transfer, self._transfer = self._transfer, None
        promises, self._promises = self._promises, None
        assert transfer is not None
        assert promises is not None
        transfer.retire()
        self._retired.append((transfer, promises))
        self._close_prefetched()
        self._registration.put_back(self._registration.memories)

    def _close_prefetched(self) -> None:
        """Keep nothing for waiting requests any more. The memory tier stays."""
        self._prefetchers = {}
        for prefetched in self._prefetched.values():
            prefetched.close()

    def _end_retired(self) -> None:
        """Stop the threads of retired transfers that have published everything."""
        for retired in [old for old in self._retired if not old[0].drain(0.0)]:
            transfer, promises = retired
            transfer.end()
            promises.close()
            self._retired.remove(retired)

    def _close_transfer(self, drain_seconds: float, marker_seconds: float = 0.0) -> int:
        """Stop the threads, free the memory; return how many chunks were lost."""
        lost = 0
        given = [promises for _, promises in self._retired]
        for old, _ in self._retired:
            lost += old.drain(drain_seconds)
            old.end(_JOIN_SECONDS)
        self._retired.clear()
        transfer, self._transfer = self._transfer, None
        promises, self._promises = self._promises, None
        if transfer is not None:
            lost += transfer.close(drain_seconds)
        if promises is not None:
            given.append(promises)
        deadline = time.monotonic() + marker_seconds
        for promises in given:
            promises.close(max(0.0, deadline - time.monotonic()))
        self._close_prefetched()
        return lost

    # ------------------------------------------------------------- steps

    def bind(self, meta: StepMetadata) -> None:
        """Begin a step."""
        self._meta = meta
        self._planned += meta.loads
        self._postponed.hold(meta.held)
        self._drop_postponed(self._postponed.drop(meta.gone))
        # Their blocks keep their content.
        meta.again = self._postponed.held + meta.again
        self._begin_round(meta.weights_round)
        if meta.namespace is not None:
            self._agree(meta.weights_round, *meta.namespace)
        if self._drafts is not None:
            self._drafts.begin_step(meta)
        if self._retired:
            self._end_retired()
        if meta.reset and self._transfer is not None:
            self._transfer.forget_stored()
        if self._transfer is not None:
            for request_id in meta.cancelled:
                self._transfer.cancel(request_id)
        if self._invalidated:
            gone = set(meta.cancelled)
            self._invalidated = {load for load in self._invalidated if load.request_id not in gone}
        for prefetcher in self._prefetchers.values():
            for request_id in (*meta.cancelled, *meta.prefetch_ended):
                prefetcher.release(request_id)
        for wanted in meta.prefetches if self._serving else ():
            if wanted.kind in self._prefetchers:
                self._prefetchers[wanted.kind].add(wanted.request_id, wanted.chunks)
        # On a CPU no work of an earlier step is in flight when a step begins, so loads need not
        # wait until this step's forward pass is enqueued. Nor need they on a device: vLLM has
        # enqueued the zeroing and the copies of blocks that belong to this step
        # (``_update_states`` in vllm/v1/worker/gpu_model_runner.py, ``update_requests`` in
        # vllm/v1/worker/gpu/model_runner.py), and no request of the step has a load's blocks.
        if self._registration.caches is not None and (
            self._beside_step or not self._registration.on_device
        ):
            self.start_loads()

    def start_loads(self) -> None:
        """Start the loads that the scheduler planned, once."""
        planned, self._planned = self._planned, []
        for op in planned:
            load = None
            try:
                usable = (
                    self._serving and self._is_current(op) and self._adapters.may_load(op.adapter)
                )
                if self._transfer is not None and usable:
                    load = self._transfer.load(op.request_id, self._load_items(op))
                    self._ops[load] = op
                    if self._drafts is not None:
                        self._drafts.load(op)
            except Exception as error:
                logger.error("a load was not started", exc_info=error)
            if load is None:
                self._refuse(op)
            self._end_read_ahead(op.request_id, loading=load is not None)

    def _end_read_ahead(self, request_id: str, *, loading: bool = False) -> None:
        """Stop reading ahead for a request. A load takes over what is being read for it."""
        try:
            for prefetcher in self._prefetchers.values():
                (prefetcher.cancel_reads if loading else prefetcher.release)(request_id)
        except Exception as error:
            # vLLM waits for every load, so an error here must not lose one.
            logger.error("could not stop reading ahead for a request", exc_info=error)

    def _refuse(self, op: LoadOp) -> None:
        """Report a load as finished that delivers nothing."""
        self._report(op, functools.partial(self._note_nothing, op))

    def _report(self, op: LoadOp, note: Callable[[], None]) -> None:
        """Report a load as finished, after `note` has noted what it did not deliver."""
        try:
            note()
        except Exception as error:
            self._failed_requests.add(op.request_id)
            logger.error("all tokens of a request are computed after an error", exc_info=error)
        self._finished.add(op.request_id)

    def _note_nothing(self, op: LoadOp) -> None:
        """Note that none of a load's blocks has KV."""
        self._note_bad(op, op.start)
        self._failures.append(
            LoadFailure(op.request_id, op.start // self._config.chunk_size, b"", False)
        )

    def _load_items(self, op: LoadOp) -> dict[Kind, list[ChunkSlots]]:
        """Return what each kind has to load."""
        if not (op.chunks or op.windows or op.states):
            raise ValueError(f"the chunks of {op.request_id} are not known")
        size = self._config.chunk_size
        items: dict[Kind, list[ChunkSlots]] = {}
        for kind, memory in self._registration.memories.items():
            slots = memory.slots
            if kind == FULL:
                items[kind] = slots_to_load(slots, op.chunks, op.block_ids, op.start, op.end, size)
            elif kind == WINDOW:
                # A window reaches back to the first of these chunks, perhaps to one that the
                # request has already.
                chunks = [chunk for chunk in op.windows if (chunk.index + 1) * size > op.start]
                start = max(op.start, chunks[0].index * size) if chunks else op.end
                items[kind] = slots_to_load(slots, chunks, op.block_ids, start, op.end, size)
            else:
                (chunk,) = op.states
                items[kind] = [state_to_load(slots, chunk, op.block_ids, op.end)]
        return items

    def finish_forward(self) -> None:
        """Gather the model's KV of this step. Runs after the forward pass, before sampling."""
        stored = self._gather(drafted=False)
        if not self._others_fill:
            self._undrafted = stored

    def save(self) -> None:
        """Gather the chunks that this step completed, as far as :meth:`finish_forward` has not.

        Runs after the forward pass and, where there is a drafter, after its drafts are made.
        """
        undrafted, self._undrafted = self._undrafted, []
        if self._drafts is not None:
            for op in undrafted:
                self._drafts.store(op)
        self._gather(drafted=True)

    def _gather(self, *, drafted: bool) -> list[StoreOp]:
        """Gather the step's chunks, with the drafter's KV if it is `drafted`; return what was.

        Before them those of earlier steps, as far as the scheduler side allows them.
        """
        meta = self._meta
        if meta is None or not (meta.stores or meta.again) or self._transfer is None:
            return []
        stores, meta.stores = meta.stores, []
        again, meta.again = meta.again, []
        if not drafted:
            meta.stores = [op for op in stores if op.late]
            stores = [op for op in stores if not op.late]
        registration = self._registration
        usable = registration.caches is not None and registration.state is State.SERVING
        # vLLM also calls this while an exception leaves the forward pass. It is not known then
        # which layers have written their KV.
        usable = usable and sys.exc_info()[0] is None
        later: list[StoreOp] = []
        if usable:
            # A step that computes little gathers few of them.
            taken = self._postponed.take(again, max(_LEAST_AGAIN, len(stores)))
            later = [op for op in stores if op.kind == FULL and op.owner in self._postponed]
            stores = taken + [op for op in stores if op not in later]
        # Stores of hand-overs first: staging may not hold all.
        stores.sort(key=lambda op: not op.attempt)
        idle = meta.idle and self._postponed.held
        wait_until = time.monotonic() + (_IDLE_WAIT_SECONDS if idle else 0.0)
        stored, full = [], False
        for op in stores:
            may_wait = usable and op.kind == FULL
            if may_wait and full:
                later.append(op)
                continue
            outcome = None
            try:
                if usable:
                    wait = max(0.0, wait_until - time.monotonic()) if idle else 0.0
                    outcome = self._store(op, drafted=drafted, wait=wait)
            except Exception as error:
                usable = False
                self._drop(op, Reason.ERROR)
                logger.error("a chunk was not stored", exc_info=error)
            if may_wait and outcome is StoreOutcome.STAGING_FULL:
                full = True
                # The drafter's KV has a staging of its own.
                later.append(replace(op, draft=None) if drafted else op)
            elif outcome is not None:
                stored.append(op)
            elif op.attempt and self._promises is not None:
                # Another engine waits for the chunk.
                self._promises.give_up(op.attempt)
        self._postponed.put(later)
        return stored

    def _store(self, op: StoreOp, *, drafted: bool, wait: float = 0.0) -> StoreOutcome | None:
        """Gather one chunk; None if it cannot be stored, and :class:`Stores` was not called."""
        if not (self._serving and self._is_current(op)):
            self._drop(op, Reason.WEIGHTS_CHANGED)
            return None
        if op.late and self._others_fill:
            # vLLM may have freed the block.
            return None
        memory = self._registration.memories.get(op.kind)
        if memory is None:
            # This rank has no layers of this kind.
            return StoreOutcome.KNOWN
        if any(NULL_BLOCK in ids for ids in op.block_ids):
            return None
        if not self._adapters.may_store(op.adapter):
            self._drop(op, Reason.ADAPTER_UNKNOWN)
            return None
        if drafted and self._drafts is not None:
            # First, so that a lookup that finds the model's KV also finds the drafter's.
            self._drafts.store(op)
        assert self._transfer is not None
        chunk = op.chunk
        tokens = chunk.tokens if chunk.tail else None
        size = self._config.chunk_size
        slots = slots_to_store(memory.slots, op.block_ids, chunk.index, size, tokens=tokens)
        promises = self._promises if op.attempt or chunk.tail else None
        on_done = None if promises is None else promises.watch(op.attempt)
        outcome = self._transfer.store(
            op.kind,
            ChunkSlots(chunk, slots),
            repair=op.repair,
            age=op.age,
            wait=wait,
            promised=bool(op.attempt) and promises is not None,
            # Windows and states are gone in the next step.
            postponable=op.kind == FULL,
            on_done=on_done,
        )
        postponed = op.kind == FULL and outcome is StoreOutcome.STAGING_FULL
        if promises is not None and not postponed:
            promises.note(op.attempt, chunk, outcome)
        return outcome

    def _drop_postponed(self, ops: Iterable[StoreOp]) -> None:
        """Count postponed stores as dropped, and mark their promises as broken."""
        for op in ops:
            self._drop(op, Reason.STAGING_FULL)
            if op.attempt and self._promises is not None:
                self._promises.give_up(op.attempt)

    def released(self) -> set[str]:
        """Return the requests that ended and whose blocks are no longer needed here."""
        self._drop_postponed(self._postponed.drop_late())
        return self._postponed.take_released()

    def _drop(self, op: StoreOp, reason: Reason) -> None:
        """Count a chunk that is not stored, and note it in the history."""
        self.counters.add(f"dropped_chunks_{reason.name.lower()}")
        if self._history is not None:
            key, index = kind_key(op.chunk.key, op.kind), op.chunk.index
            self._history.note(Event.DROPPED_STORE, key, chunk=index, detail=reason)

    def finished_loads(self) -> set[str]:
        """Return the requests whose loads are finished, and note what failed."""
        ended, self._undecided = self._undecided, []
        if self._transfer is not None and self._transfer.loading:
            idle = self._meta is not None and self._meta.idle and not self._finished
            ended += self._transfer.poll(_IDLE_WAIT_SECONDS if idle else 0.0)
        for load in ended:
            op = self._ops.get(load)
            if op is None:
                continue
            note = functools.partial(self._note, load, op)
            invalid = load in self._invalidated
            if not invalid and self._adapters.is_undecided(op.adapter):
                self._undecided.append(load)
                continue
            if invalid or not self._adapters.may_load(op.adapter):
                self._invalidated.discard(load)
                note = functools.partial(self._note_nothing, op)
            del self._ops[load]
            self._report(op, note)
            self._end_read_ahead(load.request_id)
        done = self._finished
        if self._drafts is not None:
            # The blocks of these are still written to.
            done = done - self._drafts.loading()
        self._finished = self._finished - done
        return done

    def _note(self, load: JointLoad, op: LoadOp) -> None:
        if load.cancelled:
            return
        for kind, chunk, failure in load.failures:
            # A load refused by the open circuit breaker says nothing about the chunk.
            key = chunk.key
            if failure is Failure.UNAVAILABLE:
                key, self._breaker_open = b"", None
            bad = failure is Failure.BAD
            if bad and not self._stores:
                self.counters.add("unrepaired_objects")
            self._failures.append(LoadFailure(load.request_id, chunk.index, key, bad, kind))
        good_until = op.end
        if load.failed:
            good_until = op.start
            if not self._hybrid:
                (part,) = load.parts.values()
                assert part.failed_at is not None
                # The block in which the failed chunk begins is not complete either.
                failed = part.items[part.failed_at].chunk.index * self._config.chunk_size
                good_until = max(op.start, failed - failed % self._block_size)
        elif self._config.cache_tails and self._promises is not None:
            for chunk in op.chunks[-1:]:
                self._promises.loaded(chunk)
        self.counters.add("loaded_tokens", good_until - op.start)
        self._note_bad(op, good_until)

    def _note_bad(self, op: LoadOp, start: int) -> None:
        """Note that the blocks of a load have no KV from token `start` on."""
        if start >= op.end:
            return
        if self._hybrid:
            # vLLM takes ids of blocks from engines with one group only.
            self._failed_requests.add(op.request_id)
            return
        for known, block_ids in zip(self._bad_blocks, op.block_ids, strict=True):
            blocks = block_ids[: -(-op.end // self._block_size)]
            if len(blocks) * self._block_size < op.end:
                # The scheduler did not learn the blocks.
                self._failed_requests.add(op.request_id)
            if NULL_BLOCK in blocks:
                # vLLM left out the blocks that the window of the token behind the hit does not
                # reach. The window of the first bad token may reach them, so the whole hit is
                # unusable.
                self._failed_requests.add(op.request_id)
            bad = blocks[start // self._block_size :]
            known.update(block for block in bad if block != NULL_BLOCK)

    def take_failed_requests(self) -> set[str]:
        """Return the requests of which all tokens must be computed, including loaded ones."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_bad_blocks(self) -> tuple[set[int], ...]:
        """Return the blocks that failed loads left without KV, for each cache group."""
        blocks, self._bad_blocks = self._bad_blocks, (set(),)
        return blocks

    def worker_metadata(self) -> WorkerMetadata | None:
        """Return what the scheduler has to know of this step."""
        meta = WorkerMetadata()
        weights = self._weights
        if weights is not None and not weights.settled:
            weights.advance(idle=self._meta is None or self._meta.idle)
            if weights.problem:
                self._registration.disable(weights.problem)
        report = self._registration.take_report()
        if report is not None:
            meta.reports = {self.rank: report}
        if weights is not None and (report is not None or not weights.settled):
            found = weights.report()
            if found is not None:
                meta.weights = {self.rank: found}
        shelf = self._shelf()
        for kind, prefetcher in self._prefetchers.items():
            self._failures += [
                LoadFailure(request_id, chunk.index, chunk.key, failure is Failure.BAD, kind)
                for request_id, chunk, failure in prefetcher.take_failures()
            ]
        if self._failures:
            meta.failures, self._failures = (self._failures,), []
        meta.other_adapters = self._adapters.take_others()
        if self._drafts is not None:
            meta.draft_reports = self._drafts.take_report()
            meta.without_drafts = self._drafts.take_missing()
        if self._transfer is not None and shelf is not None:
            meta.repaired = [(key, self.rank) for key in self._transfer.take_repaired()]
            meta.published = self._transfer.take_published()
            breaker_open = not shelf.available
            if self._breaker_open is not breaker_open:
                self._breaker_open = breaker_open
                meta.breaker_open = {self.rank: breaker_open}
            properties = shelf.backend.properties
            refused = properties.read_only or not properties.available
            refused = refused or (self._promises is not None and self._promises.unmarked)
            if self._writes_refused is not refused:
                self._writes_refused = refused
                meta.writes_refused = {self.rank: refused}
        meta.postponed = self._postponed.take_news()
        news = meta.reports or meta.failures or meta.repaired or meta.published or meta.breaker_open
        of_drafter = meta.draft_reports or meta.without_drafts
        of_stores = meta.postponed or meta.writes_refused
        if not (news or meta.other_adapters or meta.weights or of_drafter or of_stores):
            # The scheduler side takes an answer without a report for an acknowledgement.
            announced = self._meta and (self._meta.namespace or self._meta.draft_namespace)
            return WorkerMetadata() if announced else None
        return meta

    def set_gauges(self) -> None:
        """Bring the gauges in `counters` up to date."""
        pools = [memory.staging for memory in self._registration.memories.values()]
        if pools:
            used = sum(pool.in_use * pool.buffer_bytes for pool in pools)
            self.counters.set_gauge("staging_used_bytes", used)
            limit = sum(pool.limit * pool.buffer_bytes for pool in pools)
            self.counters.set_gauge("staging_limit_bytes", limit)
        if self._memory is not None:
            self.counters.set_gauge("memory_tier_used_bytes", self._memory.stats().bytes)
            self.counters.set_gauge("memory_tier_pinned_bytes", self._memory.stats().pinned_bytes)
        shelf = self._shelf()
        if shelf is not None:
            guard = shelf.backend
            self.counters.set_gauge("read_breaker_state", _STATES[guard.reads.state])
            self.counters.set_gauge("write_breaker_state", _STATES[guard.writes.state])
            self.counters.set_gauge("pending_late_calls", guard.late_calls)

    def clear(self) -> None:
        """End a step."""
        self._meta = None
        self._undrafted = []

    # ------------------------------------------------------------- end

    def drain(self, seconds: float) -> int:
        """Wait until stores are published; return how many chunks are not."""
        transfers = [transfer for transfer, _ in self._retired]
        if self._transfer is not None:
            transfers.append(self._transfer)
        left = sum(transfer.drain(seconds) for transfer in transfers)
        return left + (0 if self._drafts is None else self._drafts.drain(seconds))

    def close(self) -> None:
        """Publish what is in flight for a bounded time, log what was lost, stop all threads."""
        self._registration.cancel_weights()
        seconds = self._config.shutdown_drain_s
        deadline = time.monotonic() + seconds
        self._drop_postponed(self._postponed.drop_all())
        if self._walk is not None:
            self._walk.close()
        if self._walking is not None:
            self._walking.close()
        if self._transfer is not None or self._retired:
            given = [self._promises, *(promises for _, promises in self._retired)]
            markers = 0.0
            if any(promises is not None and promises.given for promises in given):
                markers = min(_MARKER_SECONDS, seconds / 4)
            lost = self._close_transfer(seconds - markers, markers)
            if lost:
                logger.warning(
                    "%d chunks were not stored within shutdown_drain_s=%g s and are lost",
                    lost,
                    self._config.shutdown_drain_s,
                )
        if self._drafts is not None:
            self._drafts.close(max(0.0, deadline - time.monotonic()))
        if self._sweeper is not None:
            self._sweeper.close()
        self._uses.close()
        if self._memory is not None:
            self._memory.close()
        self._registration.close()
