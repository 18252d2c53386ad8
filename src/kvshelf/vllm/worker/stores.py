"""The stores of a worker: what a step gathers, in which order, and what is dropped or refused.

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
* The scheduler hands out full chunks as the worker has room for. It learns the room after each
  step that brings stores, and when the room changes. A full chunk that finds no memory all the same
  is refused, and with it the later ones of its request: the scheduler plans them again.
* A worker that has no memory for a window, a state or a drafter's chunk drops it.
* Every store that was planned for a hand-over ends in an object, or in a marker that says that the
  hand-over failed, as far as the storage takes one in time.
* All methods run on the worker's step thread.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field

from kvshelf.format.kinds import DRAFT, FULL, STATE
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.stores import StoreOutcome, Stores
from kvshelf.vllm.adapters import LoadedAdapters
from kvshelf.vllm.messages import Outbox
from kvshelf.vllm.metadata import (
    NULL_BLOCK,
    Orders,
    RefusedStore,
    StepMetadata,
    StoreOp,
    WorkerFacts,
)
from kvshelf.vllm.worker.loads import IDLE_WAIT_SECONDS
from kvshelf.vllm.worker.registration import Registration
from kvshelf.vllm.worker.slots import slots_to_store
from kvshelf.vllm.worker.weights import WorkerWeights

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkerStores:
    """What the steps of one worker store.

    Parameters
    ----------
    registration : Registration
    weights : WorkerWeights
    adapters : LoadedAdapters
    facts : Outbox of WorkerFacts
        Gets what the scheduler side must learn.
    others_fill : bool
        Whether another connector may fill free blocks without waiting for the engine's stream.

    Attributes
    ----------
    released : set of str
        Requests that have ended and whose blocks are no longer needed; the caller that tells vLLM
        takes them out.
    """

    registration: Registration
    weights: WorkerWeights
    adapters: LoadedAdapters
    facts: Outbox[WorkerFacts]
    others_fill: bool
    _meta: StepMetadata | None = field(default=None, init=False)
    #: vLLM may know already that the step is over.
    _may_be_over: bool = field(default=False, init=False)

    #: The number of the last step that is gathered and had one, and what the scheduler has learned.
    _number: int = field(default=0, init=False)
    _told: tuple[int, int] = field(default=(0, 0), init=False)
    released: set[str] = field(default_factory=set, init=False)

    # ------------------------------------------------------------- steps

    def take_orders(self, orders: Orders) -> None:
        """Take which blocks are no longer needed, and which promises have failed."""
        for attempt in orders.broken:
            self.registration.give_up(attempt)
        self.released.update(orders.released)

    def begin(self, meta: StepMetadata) -> None:
        """Take the stores of a step."""
        self._meta = meta

    def finish_forward(self) -> None:
        """Gather the model's KV of this step. Runs after the forward pass, before sampling."""
        try:
            self._gather(late=False)
        finally:
            self._may_be_over = True

    def save(self) -> None:
        """Gather the chunks that this step completed, as far as :meth:`finish_forward` has not.

        Runs after the forward pass and, where there is a drafter, after its drafts are made. An
        idle step waits a moment for room if chunks wait for it.
        """
        self._gather(late=True)
        meta = self._meta
        if meta is not None:
            self._number = meta.number or self._number
        full = self._full_stores
        if meta is not None and meta.idle and meta.waits_for_room and full is not None:
            full.await_room(IDLE_WAIT_SECONDS)

    def clear(self, meta: StepMetadata) -> None:
        """End a step; drop what an error has kept from being gathered."""
        self._meta, self._may_be_over = None, False
        self._number = meta.number or self._number
        for op in meta.stores:
            self._drop(op, "error")
            self._break_promise(op)

    # ------------------------------------------------------------- what others learn

    @property
    def _full_stores(self) -> Stores | None:
        """The stores of full chunks; None while there are none on this rank."""
        transfers = self.registration.transfers
        return None if transfers is None else transfers.stores.get(FULL)

    def note_room(self) -> None:
        """Note for the scheduler for how many chunks there is room, unless it knows."""
        if not self._number:
            # No step has brought stores yet.
            return
        full = self._full_stores
        room = self._number, sys.maxsize if full is None else full.room
        if room != self._told:
            self._told = self.facts.next.room = room

    def _drop(self, op: StoreOp, why: str) -> None:
        """Count a chunk that is not stored. Of a drafter's only those are counted that move."""
        if op.kind != DRAFT:
            self.registration.runtime.counters.add(f"dropped_chunks_{why}")

    def _break_promise(self, op: StoreOp) -> None:
        """Mark the promise of a store as broken, if another engine waits for the chunk."""
        if op.attempt and op.kind != DRAFT:
            self.registration.give_up(op.attempt)

    # ------------------------------------------------------------- gather

    def _gather(self, *, late: bool) -> None:
        """Gather the step's chunks, those that are complete late only if it is `late`."""
        meta = self._meta
        if meta is None or not meta.stores or self.registration.transfers is None:
            return
        stores = [op for op in meta.stores if late or not op.late]
        # vLLM also calls this while an exception leaves the forward pass. It is not known then
        # which layers have written their KV.
        usable = self.registration.serving is not None and sys.exc_info()[0] is None
        # Until here, what an error keeps from being gathered is dropped with the step.
        meta.stores = [op for op in meta.stores if op.late and not late]
        refused: set[str] = set()
        for op in stores:
            outcome = None
            try:
                if not usable:
                    self._drop(op, "error")
                elif op.kind == FULL and op.request_id in refused:
                    outcome = StoreOutcome.STAGING_FULL
                else:
                    outcome = self._store(op)
            except Exception as error:
                # No answer depends on a drafter's KV.
                usable = usable and op.kind == DRAFT
                self._drop(op, "error")
                logger.error("a chunk was not stored", exc_info=error)
            if outcome is None:
                self._break_promise(op)
            elif outcome is StoreOutcome.STAGING_FULL and op.kind == FULL:
                refused.add(op.request_id)
                refusal = RefusedStore(op.request_id, op.chunk, op.attempt, op.round)
                self.facts.next.refused.append(refusal)

    def _store(self, op: StoreOp) -> StoreOutcome | None:
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
            promised=bool(op.attempt) and (promises is not None or op.kind == DRAFT),
            # Windows and states are gone in the next step.
            may_refuse=op.kind == FULL,
            on_done=on_done,
        )
        refused = op.kind == FULL and outcome is StoreOutcome.STAGING_FULL
        if promises is not None and not refused:
            promises.note(marker_view, op.attempt, outcome)
        return outcome
