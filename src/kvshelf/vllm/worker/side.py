"""The worker half of the connector: the methods that it calls in each step, and the worker's parts.

Owns the parts of a worker and the order in which a step, a sleep and the end run through them, and
what the scheduler side and vLLM's metrics learn. What each of them does is in
:mod:`~kvshelf.vllm.worker.registration`, :mod:`~kvshelf.vllm.worker.loads`,
:mod:`~kvshelf.vllm.worker.stores` and :mod:`~kvshelf.vllm.worker.weights`.

The device that holds the caches is a parameter: chunks move between caches in host memory and
the memory for chunks at once, between caches on a GPU and that memory by :mod:`kvshelf.kv.device`.

Contracts
---------
* All methods run on the worker's step thread and never touch storage.
* Loads into caches on a device start in ``start_load_kv``. On the device they wait for what was
  enqueued when the step began, not for its forward pass.
* From the moment that an engine sleeps until it is awake nothing touches the caches. A device
  that failed is not used again: the engine continues without a cache.
* A step waits for loads where the scheduler says that no other rank waits for the step.
* On CPUs the engine's threads are bound to cores of their own; kvshelf's threads may also use the
  cores to which no rank is bound. The scheduler has no such binding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

import torch

from kvshelf.backends.breaker import BreakerState
from kvshelf.errors import UnsupportedError
from kvshelf.kv import ops
from kvshelf.metrics import COPIERS
from kvshelf.urls import directory_of
from kvshelf.vllm.adapters import LoadedAdapters
from kvshelf.vllm.messages import Inbox, Outbox
from kvshelf.vllm.metadata import Orders, StepMetadata, WorkerFacts, WorkerMetadata
from kvshelf.vllm.worker.loads import WorkerLoads
from kvshelf.vllm.worker.ranks import RanksFile
from kvshelf.vllm.worker.registration import Registration
from kvshelf.vllm.worker.stores import WorkerStores
from kvshelf.vllm.worker.weights import WorkerWeights

logger = logging.getLogger(__name__)

#: Seconds that a stopping engine may spend on unfinished stores: vLLM kills its workers after 5
#: (``VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS``).
DRAIN_SECONDS: Final = 4.0

# Part of the shutdown time that is kept for the markers of chunks that could not be stored.
_MARKER_SECONDS = 0.5
# Breaker states as numbers, for metrics.
_STATES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
_NO_STORES: Final = 3

#: Chunks stored in an hour of which some should have been of use: a prefill of 70 tokens a second.
_MUCH: Final = 1000


class WorkerSide:
    """Worker half of :class:`kvshelf.vllm.connector.KVShelfConnector`.

    Parameters
    ----------
    registration : Registration
        Closed with the worker side, as its runtime is.
    may_store : bool
        Whether the engine stores anything: no object that it finds bad is replaced otherwise.
    others_fill : bool
        Whether another connector may fill free blocks without waiting for the engine's stream.

    Attributes
    ----------
    weights : WorkerWeights
    loads : WorkerLoads
    stores : WorkerStores
    """

    def __init__(
        self,
        registration: Registration,
        *,
        may_store: bool = True,
        others_fill: bool = False,
    ) -> None:
        self.registration = registration
        self.rank = rank = registration.rank
        self._runtime = runtime = registration.runtime
        self.counters = runtime.counters
        self._vllm_config = vllm_config = registration.vllm_config
        self._config = config = registration.config
        self.weights = WorkerWeights(vllm_config)
        #: What the scheduler side must learn.
        self._facts = facts = Outbox(WorkerFacts)
        self.adapters = LoadedAdapters(facts)
        parts = registration, self.weights, self.adapters, facts
        self.loads = WorkerLoads(*parts, may_store)
        self.stores = WorkerStores(*parts, others_fill)
        receivers = [self.registration.take_orders, self.loads.take_orders, self.stores.take_orders]
        self._ranks_file: RanksFile | None = None
        several = vllm_config.parallel_config.world_size > 1
        in_directory = config.server is None and directory_of(config.shared_storage_path or "")
        if several and in_directory and (rank or may_store):
            self._ranks_file = RanksFile(rank, runtime.shelf, self.registration.model.disable)
            receivers.append(self._ranks_file.take_orders)
        self._orders = Inbox[Orders](receivers)
        self._meta: StepMetadata | None = None
        #: When the hour is over in which something should be loaded; what was counted before it.
        self._hour_ends = time.monotonic() + 3600
        self._before: dict[str, float] = {}
        #: What the scheduler has been told.
        self._breaker_open = False
        self._writes_refused = False

    # ------------------------------------------------------------- caches

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's caches. vLLM registers them once.

        Raises
        ------
        UnsupportedError
            If kvshelf does not support a cache of this kind, or caches are registered again.
        ConfigError
            If the configuration does not fit the caches or the engine.
        """
        if self.registration.model.caches is not None:
            raise UnsupportedError("vLLM has replaced the KV caches of a running worker")
        self.weights.watch(self)
        if getattr(self._vllm_config, "lora_config", None) and not self.adapters.watch():
            logger.warning(
                "this vLLM version does not expose which LoRA adapters it loads, so KV of requests"
                " with one is not stored"
            )
        self.registration.register(kv_caches, self.weights.modules)

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
        self.weights.changed(how, version)
        self.loads.stop()
        if self.registration.drafter is not None:
            self.registration.drafter.disable("the engine's weights were changed in place")

    def fall_asleep(self) -> None:
        """Publish what is staged, and stop using the caches: their memory is freed. Idempotent.

        Waits for copies that are running. Loads that are not reported yet fail, and so do loads
        that come later.
        """
        self.loads.invalidate()
        self.registration.drain(DRAIN_SECONDS)
        self.registration.pause()

    def wake_up(self) -> None:
        """Use the caches again after the engine slept, see :meth:`StoredLayers.resume`."""
        for layers in self.registration.layers:
            layers.resume()

    # ------------------------------------------------------------- steps

    def bind(self, meta: StepMetadata) -> None:
        """Begin a step."""
        self._meta = meta
        self._orders.take(meta.orders)
        self._facts.heard(meta.heard.get(self.rank, 0))
        self.stores.begin(meta)
        self.loads.begin(meta)
        if self.weights.begin(meta.weights_round):
            self.loads.stop()
        if meta.namespace is not None and self.weights.agree(meta.weights_round):
            is_open = self.registration.open(*meta.namespace)
            if is_open:
                self.weights.settle()
        if meta.draft_namespace is not None:
            self.registration.open_drafts(*meta.draft_namespace)
        if meta.prefetches:
            self.loads.read_ahead(meta.prefetches)
        # On a CPU no work of an earlier step is in flight when a step begins, so loads start now.
        # On a device they start once the forward pass is enqueued, which is not to be held up. They
        # wait for nothing of it: by now vLLM has enqueued the zeroing and the copies of blocks that
        # belong to this step (``_update_states`` in vllm/v1/worker/gpu_model_runner.py,
        # ``update_requests`` in vllm/v1/worker/gpu/model_runner.py), and no request of the step has
        # a load's blocks.
        if meta.loads and not self.registration.on_device:
            self.loads.start()

    def clear(self, meta: StepMetadata) -> None:
        """End a step, whether or not it could begin."""
        self._meta = None
        self.stores.clear(meta)

    # ------------------------------------------------------------- what others learn

    def worker_metadata(self) -> WorkerMetadata | None:
        """Return what the scheduler has to know of this step; None if that is nothing."""
        self.loads.note_reads()
        self._note_storage(self._facts.next)
        self.stores.note_room()
        meta = WorkerMetadata()
        self.weights.advance(idle=self._meta is None or self._meta.idle)
        self._facts.next.disabled += self.registration.model.take_disabled()
        if self._ranks_file is not None:
            self._facts.next.ranks_file += self._ranks_file.take_written()
        report = self.registration.model.report()
        if report is not None:
            meta.reports = {self.rank: report}
        weights = self.weights.report(asked=report is not None)
        if weights is not None:
            meta.weights = {self.rank: weights}
        drafter = self.registration.drafter
        if drafter is not None:
            self._facts.next.drafter_disabled += drafter.take_disabled()
            if (report := drafter.report()) is not None:
                meta.draft_reports = {drafter.rank: report}
        step = self._meta
        if step is not None and step.timed_step:
            meta.timed_steps = {self.rank: step.timed_step}
        facts = self._facts.messages()
        if facts:
            meta.facts = {self.rank: facts}
        if not any(vars(meta).values()) and (
            step is None or not (step.namespace or step.draft_namespace or step.orders)
        ):
            return None
        # Without reports it acknowledges a namespace.
        meta.heard = {self.rank: self._orders.heard}
        return meta

    def _note_storage(self, facts: WorkerFacts) -> None:
        """Note what stores have left on the shelf, and whether its storage answers."""
        transfers, shelf = self.registration.transfers, self._runtime.shelf()
        if transfers is None or shelf is None:
            return
        facts.repaired += transfers.take_repaired()
        breaker_open, promises = not shelf.available, self.registration.promises
        if self.loads.refused or self._breaker_open is not breaker_open:
            self.loads.refused = False
            self._breaker_open = facts.breaker_open = breaker_open
        properties = shelf.backend.properties
        refused = properties.read_only or not properties.available
        refused = refused or (promises is not None and promises.unmarked)
        if self._writes_refused is not refused:
            self._writes_refused = facts.writes_refused = refused

    def set_gauges(self) -> None:
        """Bring the gauges in `counters` up to date."""
        host = self.registration.host
        if host is not None:
            host.report()
        caches = self.registration.model.caches
        used = None if caches is None else ops.implementation(caches.device)
        for copier, (name, _) in COPIERS.items():
            self.counters.set_gauge(name, int(copier == used))
        shelf = self._runtime.shelf()
        if shelf is not None:
            guard = shelf.backend
            self.counters.set_gauge("read_breaker_state", _STATES[guard.reads.state])
            writes = _NO_STORES if guard.takes_no_stores else _STATES[guard.writes.state]
            self.counters.set_gauge("write_breaker_state", writes)
            self.counters.set_gauge("pending_late_calls", guard.late_calls)
        if time.monotonic() > self._hour_ends:
            self._say_whether_hits_are_missing()

    def _say_whether_hits_are_missing(self) -> None:
        """Count and log an hour in which much was stored and nothing loaded; begin the next one."""
        counts_before, self._before = self._before, self.counters.snapshot()
        self._hour_ends = time.monotonic() + 3600
        stored, loaded = (
            self._before.get(name, 0) - counts_before.get(name, 0)
            for name in ("stored_chunks", "loaded_chunks")
        )
        transfer = getattr(self._vllm_config, "kv_transfer_config", None)
        if stored < _MUCH or loaded or not getattr(transfer, "is_kv_consumer", True):
            return
        self.counters.add("hours_without_loads")
        if not self.rank:
            logger.warning(
                "%d chunks were stored within an hour, and none was loaded: prompts begin alike"
                " for fewer than %d tokens, or engines that should share a shelf do not."
                " `kvshelf explain` says what a prompt misses",
                stored,
                self._config.chunk_size,
            )

    # ------------------------------------------------------------- end

    def drain(self, seconds: float) -> int:
        """Wait until stores are published; return how many chunks are not."""
        return self.registration.drain(seconds)

    def close(self) -> None:
        """Publish what is in flight for a bounded time, log what was lost, stop all threads."""
        # All of these are called, the last one first, whatever some of them raise.
        with ExitStack() as stack:
            stack.callback(self.registration.close)
            stack.callback(self._runtime.close)
            stack.callback(self._end_transfers, DRAIN_SECONDS)
            if self._ranks_file is not None:
                stack.callback(self._ranks_file.close)
            for layers in self.registration.layers:
                stack.callback(layers.cancel_weights)

    def _end_transfers(self, seconds: float) -> None:
        lost = self.registration.end_transfers(seconds, min(_MARKER_SECONDS, seconds / 4))
        if lost:
            logger.warning(
                "%d chunks were not stored in the last %g s of the engine, and are lost",
                lost,
                seconds,
            )
