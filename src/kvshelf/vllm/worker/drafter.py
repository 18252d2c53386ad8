"""The drafter's part of a worker: which layers are its own, and what its loads and stores cost.

A drafter keeps the KV of its layers in the blocks of the model's KV. If a load filled the model's
layers only, the drafter would read what earlier owners of the blocks left there, and few of its
drafts would be accepted. So its KV is stored in a namespace of its own, by a
:class:`~kvshelf.vllm.worker.parts.Part` of its own, which is optional.

Contracts
---------
* All methods run on the worker's step thread.
* A drafter's KV decides how many drafts are accepted, but changes no answer. So nothing here
  raises, no failure is reported to vLLM, and what cannot be served is left out with one warning.
* For each load it reports to the scheduler side from which token on the drafter's KV is missing.
* A load is cut when that of the model's KV would be, and ends where that one brings not all of it.
* A load writes to its blocks until it is no longer in :meth:`Drafter.loading`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from kvshelf.assembly import Assembly
from kvshelf.format.kinds import FULL
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import COUNTERS, Counters
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Load
from kvshelf.vllm.metadata import LoadOp, StoreOp, WorkerReport
from kvshelf.vllm.namespace import stage_ranks
from kvshelf.vllm.speculation import (
    WITHOUT_DRAFTS,
    draft_config,
    draft_engine,
    draft_layers,
    drafter_has_kv,
)
from kvshelf.vllm.worker.engine import WorkerEngine
from kvshelf.vllm.worker.parts import Part
from kvshelf.vllm.worker.slots import slots_to_load, slots_to_store

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


class Drafter(Part):
    """The part of a worker's drafter: loads and stores its KV beside that of the model.

    Parameters
    ----------
    engine : WorkerEngine
        The drafter's.
    assembly : Assembly
        The worker's.
    """

    def __init__(self, engine: WorkerEngine, assembly: Assembly) -> None:
        super().__init__(engine, assembly, _DraftCounters(assembly.counters))
        self._ops: dict[Load, LoadOp] = {}
        self._missing: list[tuple[str, int]] = []
        self._log = RateLimitedLog(logger)

    @classmethod
    def of(cls, engine: WorkerEngine, assembly: Assembly) -> Drafter | None:
        """Return the drafter's side of a worker; None where it has none or it is left out.

        Parameters
        ----------
        engine : WorkerEngine
            The worker's.
        assembly : Assembly
        """
        vllm_config = engine.vllm_config
        if not drafter_has_kv(vllm_config):
            return None
        stage, rank = divmod(engine.rank, stage_ranks(vllm_config))
        if stage < int(vllm_config.parallel_config.pipeline_parallel_size) - 1:
            return None
        drafts = draft_engine(vllm_config)
        if drafts is None:
            if rank == 0:
                logger.warning(
                    WITHOUT_DRAFTS,
                    "kvshelf does so only where the drafter has the model's tensor parallel degree,"
                    " without context parallelism, and with a fixed number of drafts",
                )
            return None
        config = draft_config(vllm_config, engine.config, None)
        own = replace(engine, vllm_config=drafts, config=config, rank=rank, of_drafter=True)
        return cls(own, assembly)

    # ------------------------------------------------------------- caches

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], modules: Iterable[torch.nn.Module] = ()
    ) -> None:
        """Take the caches of the drafter's layers. No use is made of the model's `modules`."""
        self.stop_loads()
        self._ops.clear()
        try:
            if self._has_own_layers():
                super().register(kv_caches)
            else:
                self.close(0.0)
        except Exception as error:  # noqa: BLE001 - the engine is served without it
            self.disable(f"{type(error).__name__}: {error}")

    def _has_own_layers(self) -> bool:
        """Whether any layer of the drafter has KV of its own; others read the model's."""
        return not all(
            getattr(self._engine.layers.get(name), "kv_sharing_target_layer_name", None)
            for name in draft_layers(self._engine.vllm_config)
        )

    def disable(self, reason: str) -> None:
        """Load and store nothing any more."""
        registration = self.registration
        if self._engine.rank == 0 and not registration.disabled_reason:
            logger.warning(WITHOUT_DRAFTS, reason)
        registration.disable(reason, already_logged=True)
        self.stop_loads()

    def stop_loads(self) -> None:
        """Give up the loads that have not ended."""
        for load, op in self._ops.items():
            self._missing.append((op.request_id, op.start))
            if self.transfers is not None:
                self.transfers.cancel(load.request_id)

    # ------------------------------------------------------------- steps

    def announced(self, namespace: tuple[bytes, str] | None) -> None:
        """Take the namespace that a step announces, once no load is running."""
        if namespace is not None and not self._ops:
            try:
                self.open(*namespace)
            except Exception as error:  # noqa: BLE001 - the next step tries again
                self._log.error("KV of a drafter does not move yet", exc_info=error)

    def load(self, op: LoadOp) -> None:
        """Start to load the drafter's KV of the tokens of `op`, as far as it is stored."""
        transfers = self.serving
        if transfers is not None and op.drafts:
            try:
                memory = self.registration.memories[FULL]
                size = memory.fmt.chunk_size
                items = slots_to_load(memory.slots, op.drafts, op.block_ids, op.start, op.end, size)
                load = transfers.load(op.request_id, {FULL: items}, op.patience, op.at_once)
                self._ops[load] = op
                return
            except Exception as error:  # noqa: BLE001 - drafts are accepted less often
                self._log.error("a load of a drafter's KV was not started", exc_info=error)
        self._missing.append((op.request_id, op.start))

    def end_load(self, request_id: str) -> None:
        """End the load of a request: vLLM computes tokens of it."""
        if self.transfers is not None:
            self.transfers.cancel(request_id)

    def loading(self) -> set[str]:
        """Return the requests whose loads have not ended; note what the others have not loaded."""
        transfers = self.transfers
        if transfers is not None and self._ops:
            for load in transfers.poll():
                op, piece = self._ops.pop(load, None), load.pieces[FULL]
                if op is not None and piece.leading < len(piece.items):
                    first = piece.items[piece.leading].chunk.index
                    start = max(op.start, first * self._engine.config.chunk_size)
                    self._missing.append((op.request_id, start))
        return {op.request_id for op in self._ops.values()}

    def store(self, op: StoreOp) -> None:
        """Gather the drafter's KV of a chunk that this step completed."""
        transfers = self.serving
        if transfers is None or op.draft is None:
            return
        try:
            memory = self.registration.memories[FULL]
            size = memory.fmt.chunk_size
            slots = slots_to_store(memory.slots, op.block_ids, op.draft.index, size)
            # Requests that wait for the chunk do not wait for the drafter's KV, but profit from it.
            item, promised = ChunkSlots(op.draft, slots), bool(op.attempt)
            transfers.stores[FULL].store(item, age=op.age, promised=promised)
        except Exception as error:  # noqa: BLE001 - drafts are accepted less often
            self._log.error("a chunk of a drafter's KV was not stored", exc_info=error)

    # ------------------------------------------------------------- what the scheduler learns

    def take_missing(self) -> list[tuple[str, int]]:
        """Return requests and the first token of their loads that has no KV of the drafter."""
        missing, self._missing = self._missing, []
        return missing

    def take_report(self) -> dict[int, WorkerReport]:
        """Return the report about the drafter's layers by rank; empty when the scheduler has it."""
        report = self.registration.take_report()
        return {} if report is None else {self._engine.rank: report}
