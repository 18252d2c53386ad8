"""The worker side of a drafter's KV: loads and stores beside those of the model.

A drafter keeps the KV of its layers in the blocks of the model's KV. If a load filled the model's
layers only, the drafter would read what earlier owners of the blocks left there, and few of its
drafts would be accepted. So its KV is stored in a namespace of its own, by a second
:class:`~kvshelf.vllm.registration.Registration` and a second
:class:`~kvshelf.transfer.transfer.Transfer`.

Contracts
---------
* All methods run on the worker's step thread.
* A drafter's KV decides how many drafts are accepted, but changes no answer. So nothing here
  raises, no failure is reported to vLLM, and what cannot be served is left out with one warning.
* For each load it reports to the scheduler side from which token on the drafter's KV is missing.
* A load writes to its blocks until it is no longer in :meth:`DraftWorker.loading`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvshelf.config import Config
from kvshelf.format.kinds import FULL
from kvshelf.kv.streams import Streams
from kvshelf.kv.topology import ShardPlan
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import COUNTERS, Counters
from kvshelf.shelf.view import ShelfView
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Load
from kvshelf.transfer.staging import Regions
from kvshelf.transfer.transfer import Transfer
from kvshelf.vllm.metadata import LoadOp, StepMetadata, StoreOp, WorkerReport
from kvshelf.vllm.namespace import stage_ranks
from kvshelf.vllm.registration import Registration, State
from kvshelf.vllm.slots import slots_to_load, slots_to_store
from kvshelf.vllm.speculation import (
    WITHOUT_DRAFTS,
    draft_config,
    draft_engine,
    draft_layers,
    drafter_has_kv,
)

logger = logging.getLogger(__name__)


class _DraftCounters(Counters):
    """Counts a drafter's chunks, and what the storage does with them, apart from the model's.

    All other counters and all durations are about the model's chunks.
    """

    _STORAGE = ("late_calls", "stuck_threads", "breaker_", "disk_tier_")

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self._counters = counters

    def add(self, name: str, amount: float = 1) -> None:
        if name.startswith(self._STORAGE):
            self._counters.add(name, amount)
        elif f"draft_{name}" in COUNTERS:
            self._counters.add(f"draft_{name}", amount)

    def observe(self, operation: str, seconds: float, count: int = 1) -> None:
        pass


class DraftWorker:
    """Moves the KV of one worker's drafter.

    Parameters
    ----------
    engine : object
        The drafter's configuration, see :func:`kvshelf.vllm.speculation.draft_engine`.
    config : Config
        See :func:`kvshelf.vllm.speculation.draft_config`.
    shelf : Callable[[], AnyShelf or None]
        Returns the shelf, None while it is not open.
    kv_cache_config : KVCacheConfig or None
    rank : int
        The worker's rank in its pipeline stage.
    counters : Counters
    streams : Callable[[torch.device], Streams or None], optional
        As for the worker side.
    regions : Callable, optional
        As for the worker side.
    in_front : Callable[[ShelfView, ShardPlan], ShelfView], optional
        Puts the worker's memory tier in front of the shelf.
    """

    def __init__(
        self,
        engine: Any,
        config: Config,
        shelf: Callable[[], AnyShelf | None],
        *,
        kv_cache_config: Any,
        rank: int,
        counters: Counters,
        streams: Callable[[torch.device], Streams | None] | None,
        regions: Regions | None = None,
        in_front: Callable[[ShelfView, ShardPlan], ShelfView] = lambda view, plan: view,
    ) -> None:
        self._engine = engine
        self._config = config
        self._shelf = shelf
        self._in_front = in_front
        self._rank = rank
        self._counters = _DraftCounters(counters)
        self._registration = Registration(
            engine, config, kv_cache_config, rank, streams, regions=regions, of_drafter=True
        )
        self._transfer: Transfer | None = None
        self._ops: dict[Load, LoadOp] = {}
        self._missing: list[tuple[str, int]] = []
        self._log = RateLimitedLog(logger)

    @classmethod
    def of(
        cls,
        vllm_config: Any,
        config: Config,
        shelf: Callable[[], AnyShelf | None],
        *,
        kv_cache_config: Any,
        rank: int,
        counters: Counters,
        streams: Callable[[torch.device], Streams | None] | None,
        regions: Regions | None = None,
        in_front: Callable[[ShelfView, ShardPlan], ShelfView] = lambda view, plan: view,
    ) -> DraftWorker | None:
        """Return the drafter's side of a worker; None where it has none or it is left out.

        Parameters
        ----------
        vllm_config : VllmConfig
            The engine's configuration.
        config : Config
            The engine's options.
        rank : int
            The worker's rank, over all stages.
        shelf, kv_cache_config, counters, streams, regions, in_front
            As for the class.
        """
        if not drafter_has_kv(vllm_config):
            return None
        stage, rank = divmod(rank, stage_ranks(vllm_config))
        if stage < int(vllm_config.parallel_config.pipeline_parallel_size) - 1:
            return None
        engine = draft_engine(vllm_config)
        if engine is None:
            if rank == 0:
                logger.warning(
                    WITHOUT_DRAFTS,
                    "kvshelf does so only where the drafter has the model's tensor parallel degree,"
                    " without context parallelism, and with a fixed number of drafts",
                )
            return None
        return cls(
            engine,
            draft_config(vllm_config, config, None),
            shelf,
            kv_cache_config=kv_cache_config,
            rank=rank,
            counters=counters,
            streams=streams,
            regions=regions,
            in_front=in_front,
        )

    # ------------------------------------------------------------- caches

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches of the drafter's layers, in place of those registered before."""
        self._close_transfer(0.0)
        layers = self._engine.compilation_config.static_forward_context
        if all(
            getattr(layers.get(name), "kv_sharing_target_layer_name", None)
            for name in draft_layers(self._engine)
        ):
            # It reads the model's own KV.
            return
        try:
            self._registration.register(kv_caches)
        except Exception as error:  # noqa: BLE001 - the engine is served without it
            self.disable(f"{type(error).__name__}: {error}")

    def disable(self, reason: str) -> None:
        """Load and store nothing any more."""
        if self._rank == 0 and not self._registration.disabled_reason:
            logger.warning(WITHOUT_DRAFTS, reason)
        self._registration.disable(reason, already_logged=True)
        self.stop_loads()

    def fall_asleep(self, seconds: float) -> None:
        """Publish what is staged, and stop using the caches: their memory is freed. Idempotent."""
        self.stop_loads()
        if self._transfer is not None:
            self._transfer.drain(seconds)
        self._registration.pause()

    def wake_up(self) -> None:
        """Use the caches again after the engine slept."""
        self._registration.resume()

    def stop_loads(self) -> None:
        """Give up the loads that have not ended."""
        for load, op in self._ops.items():
            self._missing.append((op.request_id, op.start))
            if self._transfer is not None:
                self._transfer.cancel(load.request_id)

    # ------------------------------------------------------------- transfer

    @property
    def _serving(self) -> Transfer | None:
        return self._transfer if self._registration.state is State.SERVING else None

    def _open_namespace(self, encoded: bytes, slug: str) -> None:
        """Move KV of a namespace from now on."""
        registration = self._registration
        known = registration.namespace
        shelf = self._shelf()
        if shelf is None or registration.caches is None or registration.disabled_reason:
            return
        if known is not None and known.encoded == encoded:
            return
        self._close_transfer(0.0)
        memories = registration.take_memories(encoded, slug)
        if memories is None:
            return
        memory = memories[FULL]
        view = self._in_front(shelf.view(memory.fmt), memory.plan)
        try:
            self._transfer = registration.start_transfer(view, memory, self._counters, quiet=True)
        except RuntimeError:
            # No threads can be started now. The next step tries again.
            registration.put_back(memories)
            return
        registration.serve(memories)

    def _close_transfer(self, drain_seconds: float) -> None:
        """Stop the threads, free the memory."""
        self.stop_loads()
        self._ops.clear()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close(drain_seconds)

    # ------------------------------------------------------------- steps

    def begin_step(self, meta: StepMetadata) -> None:
        """Take the namespace that a step announces, and what ended."""
        if meta.draft_namespace is not None:
            self._open_namespace(*meta.draft_namespace)
        if self._transfer is None:
            return
        if meta.reset:
            self._transfer.forget_stored()
        for request_id in meta.cancelled:
            self._transfer.cancel(request_id)

    def load(self, op: LoadOp) -> None:
        """Start to load the drafter's KV of the tokens of `op`, as far as it is stored."""
        transfer = self._serving
        if transfer is not None and op.drafts:
            try:
                size = self._config.chunk_size
                slots = self._registration.memories[FULL].slots
                items = slots_to_load(slots, op.drafts, op.block_ids, op.start, op.end, size)
                self._ops[transfer.load(op.request_id, items)] = op
                return
            except Exception as error:  # noqa: BLE001 - drafts are accepted less often
                self._log.error("a load of a drafter's KV was not started", exc_info=error)
        self._missing.append((op.request_id, op.start))

    def loading(self) -> set[str]:
        """Return the requests whose loads have not ended; note what the others have not loaded."""
        transfer = self._transfer
        if transfer is not None and self._ops:
            for load in transfer.poll():
                op = self._ops.pop(load, None)
                if op is not None and load.failed_at is not None and not load.cancelled:
                    failed = load.items[load.failed_at].chunk.index * self._config.chunk_size
                    self._missing.append((op.request_id, max(op.start, failed)))
        return {op.request_id for op in self._ops.values()}

    def store(self, op: StoreOp) -> None:
        """Gather the drafter's KV of a chunk that this step completed."""
        transfer = self._serving
        if transfer is None or op.draft is None:
            return
        try:
            groups = self._registration.memories[FULL].slots
            size = self._config.chunk_size
            slots = slots_to_store(groups, op.block_ids, op.draft.index, size)
            # Requests that wait for the chunk do not wait for the drafter's KV, but profit from it.
            transfer.store(ChunkSlots(op.draft, slots), age=op.age, promised=bool(op.attempt))
        except Exception as error:  # noqa: BLE001 - drafts are accepted less often
            self._log.error("a chunk of a drafter's KV was not stored", exc_info=error)

    def take_missing(self) -> list[tuple[str, int]]:
        """Return requests and the first token of their loads that has no KV of the drafter."""
        missing, self._missing = self._missing, []
        return missing

    def take_report(self) -> dict[int, WorkerReport]:
        """Return the report about the drafter's layers by rank; empty when the scheduler has it."""
        report = self._registration.take_report()
        return {} if report is None else {self._rank: report}

    def drain(self, seconds: float) -> int:
        """Wait until stores are published; return how many chunks are not."""
        return 0 if self._transfer is None else self._transfer.drain(seconds)

    def close(self, drain_seconds: float) -> None:
        """Publish what is in flight for a bounded time, and stop all threads."""
        self._registration.cancel_weights()
        self._close_transfer(drain_seconds)
        self._registration.close()
