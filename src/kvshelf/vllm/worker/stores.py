"""The stores of a worker: what a step gathers, in which order, and what is dropped or postponed.

Contracts
---------
* Stores are enqueued on the engine's stream after the forward pass, before any later step or
  preemption, or the next owner of a block. CUDA graphs do not change this.
* A chunk is gathered before the event by which vLLM learns that the step is over: from then on it
  may free the block, and a connector that does not wait for the stream may fill it. vLLM's second
  model runner records that event after sampling, so there :meth:`WorkerStores.finish_forward`
  gathers. Drafts are judged, and the drafter runs, behind the event: states of steps with drafts
  and the drafter's KV are gathered in :meth:`WorkerStores.save`, after the rest, and not at all
  beside such a connector.
* What a failed step left in the cache is never stored.
* A chunk of full attention that found no memory is gathered in a later step of its request
  (:mod:`kvshelf.vllm.worker.postponed`).
* Every store that was planned for a hand-over ends in an object, or in a marker that says that the
  hand-over failed, as far as the storage takes one in time.
* All methods run on the worker's step thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvshelf.format.kinds import DRAFT, FULL, STATE
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.stores import StoreOutcome
from kvshelf.vllm.adapters import LoadedAdapters
from kvshelf.vllm.messages import Outbox
from kvshelf.vllm.metadata import NULL_BLOCK, Facts, Orders, StepMetadata, StoreOp
from kvshelf.vllm.worker.loads import IDLE_WAIT_SECONDS
from kvshelf.vllm.worker.postponed import PostponedStores
from kvshelf.vllm.worker.registration import Registration
from kvshelf.vllm.worker.slots import slots_to_store
from kvshelf.vllm.worker.weights import WorkerWeights

logger = logging.getLogger(__name__)

# A step gathers at least this many chunks of earlier steps, if stores have memory.
_LEAST_AGAIN = 4


@dataclass(eq=False)
class WorkerStores:
    """What the steps of one worker store.

    Parameters
    ----------
    registration : Registration
    weights : WorkerWeights
    adapters : LoadedAdapters
    facts : Outbox of Facts
        Gets what the scheduler side must learn.
    others_fill : bool
        Whether another connector may fill free blocks without waiting for the engine's stream.
    """

    registration: Registration
    weights: WorkerWeights
    adapters: LoadedAdapters
    facts: Outbox[Facts]
    others_fill: bool
    _meta: StepMetadata | None = field(default=None, init=False)
    #: vLLM may know already that the step is over.
    _may_be_over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._postponed = PostponedStores(self.registration.config.handover_wait_s)

    # ------------------------------------------------------------- steps

    def take_orders(self, orders: Orders) -> None:
        """Take which requests have their blocks no longer, and which for as long as needed."""
        self._give_up(self._postponed.drop(orders.gone))
        self._postponed.hold(orders.held)

    def begin(self, meta: StepMetadata) -> None:
        """Take the stores of a step."""
        self._meta = meta
        # The blocks of requests that are held keep their content.
        meta.again = self._postponed.held + meta.again

    def finish_forward(self) -> None:
        """Gather the model's KV of this step. Runs after the forward pass, before sampling."""
        try:
            self._gather(late=False)
        finally:
            self._may_be_over = True

    def save(self) -> None:
        """Gather the chunks that this step completed, as far as :meth:`finish_forward` has not.

        Runs after the forward pass and, where there is a drafter, after its drafts are made.
        """
        self._gather(late=True)

    def clear(self, meta: StepMetadata) -> None:
        """End a step; drop what an error has kept from being gathered."""
        self._meta, self._may_be_over = None, False
        for op in meta.stores:
            self._drop(op, "error")
            self._break_promise(op)

    # ------------------------------------------------------------- postponed stores

    def released(self) -> set[str]:
        """Return the requests that ended and whose blocks are no longer needed here."""
        self._give_up(self._postponed.drop_late())
        return self._postponed.take_released()

    def drop_postponed(self) -> None:
        """Drop what was postponed: its blocks are about to be lost."""
        self._give_up(self._postponed.drop_all())

    def _give_up(self, ops: Iterable[StoreOp]) -> None:
        """Count postponed stores as dropped, and mark their promises as broken."""
        for op in ops:
            self._drop(op, "staging_full")
            self._break_promise(op)

    def _drop(self, op: StoreOp, why: str) -> None:
        """Count a chunk that is not stored. Of a drafter's only those are counted that move."""
        if op.kind != DRAFT:
            self.registration.assembly.counters.add(f"dropped_chunks_{why}")

    def _break_promise(self, op: StoreOp) -> None:
        """Mark the promise of a store as broken, if another engine waits for the chunk."""
        if op.attempt and op.kind != DRAFT:
            self.registration.give_up(op.attempt)

    # ------------------------------------------------------------- gather

    def _gather(self, *, late: bool) -> None:
        """Gather the step's chunks, those that are complete late only if it is `late`.

        Before them those of earlier steps, as far as the scheduler side allows them.
        """
        meta = self._meta
        if meta is None or not (meta.stores or meta.again) or self.registration.transfers is None:
            return
        stores = [op for op in meta.stores if late or not op.late]
        again, meta.again = meta.again, []
        # vLLM also calls this while an exception leaves the forward pass. It is not known then
        # which layers have written their KV.
        usable = self.registration.serving is not None and sys.exc_info()[0] is None
        # A step that computes little gathers few of them.
        most = max(_LEAST_AGAIN, len(stores))
        taken = self._postponed.take(again, most) if usable else []
        # Until here, what an error keeps from being gathered is dropped with the step.
        meta.stores = [op for op in meta.stores if op.late and not late]
        # With each, whether earlier chunks of its request are still postponed.
        each = [(op, False) for op in taken]
        each += [(op, op.owner in self._postponed) for op in stores]
        # Stores of hand-overs first: the memory may not hold all.
        each.sort(key=lambda one: not one[0].attempt)
        idle = meta.idle and self._postponed.held
        wait_until = time.monotonic() + (IDLE_WAIT_SECONDS if idle else 0.0)
        full = False
        for op, waits in each:
            outcome = None
            try:
                if not usable:
                    self._drop(op, "error")
                elif op.kind == FULL and (waits or full):
                    outcome = StoreOutcome.STAGING_FULL
                else:
                    wait = max(0.0, wait_until - time.monotonic()) if idle else 0.0
                    outcome = self._store(op, wait)
                if op.kind == FULL and outcome is StoreOutcome.STAGING_FULL:
                    full = full or not waits
                    if op.owner not in self._postponed:
                        self.facts.next.postponed.append(op.owner)
                    self._postponed.put(op)
            except Exception as error:
                # No answer depends on a drafter's KV.
                usable = usable and op.kind == DRAFT
                outcome = None
                self._drop(op, "error")
                logger.error("a chunk was not stored", exc_info=error)
            if outcome is None:
                self._break_promise(op)

    def _store(self, op: StoreOp, wait: float) -> StoreOutcome | None:
        """Gather one chunk; None if it cannot be stored, and :class:`Stores` was not called."""
        transfers = self.registration.serving
        if transfers is None or not self.weights.is_current(op):
            self._drop(op, "weights_changed")
            return None
        if self.others_fill and (self._may_be_over or (op.late and op.kind == STATE)):
            # vLLM may have freed the block.
            return None
        of_kind = self.registration.moving(op.kind)
        if of_kind is None:
            # This rank has no layers of this kind.
            return StoreOutcome.KNOWN
        if any(NULL_BLOCK in ids for ids in op.block_ids):
            return None
        if not self.adapters.may_store(op.adapter):
            self._drop(op, "adapter_unknown")
            return None
        chunk = op.chunk
        tokens = chunk.tokens if chunk.tail else None
        size = self.registration.config.chunk_size
        slots = slots_to_store(of_kind.slots, op.block_ids, chunk.index, size, tokens=tokens)
        # Requests that wait for the chunk do not wait for the drafter's KV, but profit from it.
        promises = self.registration.promises if op.attempt or chunk.tail else None
        promises = None if op.kind == DRAFT else promises
        marker_view = self.registration.marker_view
        on_done = None if promises is None else promises.watch(marker_view, op.attempt)
        outcome = transfers.stores[op.kind].store(
            self.registration.views[op.kind],
            ChunkSlots(chunk, slots),
            repair=op.repair,
            age=op.age,
            wait=wait,
            promised=bool(op.attempt) and (promises is not None or op.kind == DRAFT),
            # Windows and states are gone in the next step.
            postponable=op.kind == FULL,
            on_done=on_done,
        )
        postponed = op.kind == FULL and outcome is StoreOutcome.STAGING_FULL
        if promises is not None and not postponed:
            promises.note(marker_view, op.attempt, outcome)
        return outcome
