"""The drafter of a worker: which layers are its own, and its namespace.

A drafter keeps the KV of its layers in the blocks of the model's KV. If a load filled the model's
layers only, the drafter would read what earlier owners of the blocks left there, and few of its
drafts would be accepted. So its KV is stored in a namespace of its own, and moves as one more kind
of the model's transfers.

Contracts
---------
* All methods run on the worker's step thread.
* A drafter's KV decides how many drafts are accepted, but changes no answer. So nothing here
  raises, no failure is reported to vLLM, and what cannot be served is left out with one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from kvshelf.format.kinds import FULL
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import COUNTERS, Counters
from kvshelf.vllm.metadata import WorkerReport
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
from kvshelf.vllm.worker.registration import Registration, TransferMemory

logger = logging.getLogger(__name__)


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


class Drafter:
    """The drafter of a worker.

    Parameters
    ----------
    engine : WorkerEngine
        The drafter's.
    model : Part
        Moves its KV with that of the model.
    counters : Counters

    Attributes
    ----------
    registration : Registration
    """

    def __init__(self, engine: WorkerEngine, model: Part, counters: Counters) -> None:
        self.registration = Registration(engine, counters, model.registration)
        self._engine, self._model = engine, model
        self._counters = _DraftCounters(counters)
        self._log = RateLimitedLog(logger)

    @classmethod
    def of(cls, engine: WorkerEngine, model: Part, counters: Counters) -> Drafter | None:
        """Return the drafter's side of a worker; None where it has none or it is left out.

        Parameters
        ----------
        engine : WorkerEngine
            The worker's.
        model : Part
        counters : Counters
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
        return cls(own, model, counters)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches of the drafter's layers, once those of the model's are taken."""
        try:
            if self._has_own_layers():
                self.registration.register(kv_caches)
        except Exception as error:  # noqa: BLE001 - the engine is served without it
            self.registration.disable(f"{type(error).__name__}: {error}")

    def _has_own_layers(self) -> bool:
        """Whether any layer of the drafter has KV of its own; others read the model's."""
        return not all(
            getattr(self._engine.layers.get(name), "kv_sharing_target_layer_name", None)
            for name in draft_layers(self._engine.vllm_config)
        )

    def announced(self, namespace: tuple[bytes, str] | None) -> None:
        """Move KV of the namespace that a step announces, beside the model's."""
        registration = self.registration
        if namespace is None or self._model.serving is None or registration.namespace is not None:
            return
        try:
            if registration.open(*namespace):
                self._model.add_drafts(registration, self._counters)
        except Exception as error:  # noqa: BLE001 - the next step tries again
            registration.leave()
            self._log.error("KV of a drafter does not move yet", exc_info=error)

    @property
    def memory(self) -> TransferMemory | None:
        """How its KV moves now; None while it does not."""
        return self.registration.memories[FULL] if self.registration.serves else None

    def report(self) -> dict[int, WorkerReport]:
        """Return the report about the drafter's layers by rank; empty when the scheduler has it."""
        report = self.registration.report()
        return {} if report is None else {self._engine.rank: report}

    def close(self) -> None:
        """Free the memory."""
        self.registration.close()
