"""The loads of a worker: what the scheduler planned, what runs, and what vLLM learns of it.

Contracts
---------
* The step thread waits for no device. A load writes to its blocks after everything that was
  enqueued on the engine's stream when its step began, such as the zeroing of new blocks: they were
  free then, and the step's forward pass does not touch them.
* A load is begun once, with the blocks that the step's metadata name. One that a step could not
  begin is named by the next step.
* Every load that the scheduler planned is reported to vLLM as finished once, whether it succeeded
  or not, together with the blocks that it left without KV. Where an error hides which blocks those
  are, all tokens of the request are computed.
* A block counts as loaded only when all of its tokens that the hit covers are loaded.
* Where a sliding window leaves blocks out of a hit, a load succeeds as a whole or not at all: the
  tokens computed behind a part of the hit would read blocks that are not there.
* Where the engine has several cache groups or states, all loads do: no block of a load that failed
  is used, and vLLM computes all tokens that it was for, or polls the request again.
* All methods run on the worker's step thread.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvshelf.errors import DeviceUnavailableError
from kvshelf.format.kinds import DRAFT, FULL, WINDOW, Kind, kind_key
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure, Load
from kvshelf.vllm.adapters import LoadedAdapters
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.messages import Outbox
from kvshelf.vllm.metadata import NULL_BLOCK, LoadOp, Orders, PrefetchOp, StepMetadata, WorkerFacts
from kvshelf.vllm.namespace import manager_block_size
from kvshelf.vllm.worker.registration import Registration
from kvshelf.vllm.worker.slots import slots_to_load, state_to_load
from kvshelf.vllm.worker.weights import WorkerWeights

logger = logging.getLogger(__name__)

#: How long a step waits for a load where the scheduler allows it: another empty step would cost the
#: load 2 to 3 ms. A new request that arrives meanwhile waits as long.
IDLE_WAIT_SECONDS = 10e-3


class Ended(NamedTuple):
    """What vLLM learns of loads that have ended.

    Attributes
    ----------
    finished : set of str
        The requests whose loads have ended.
    failed : set of str
        Requests of which all tokens must be computed, including loaded ones.
    bad_blocks : set of int
        The blocks that failed loads left without KV, of an engine with one cache group.
    """

    finished: set[str]
    failed: set[str]
    bad_blocks: set[int]


@dataclass(eq=False)
class WorkerLoads:
    """The account of the loads of one worker.

    Parameters
    ----------
    registration : Registration
    weights : WorkerWeights
    adapters : LoadedAdapters
    facts : Outbox of WorkerFacts
        Gets what the scheduler side must learn.
    may_store : bool
        Whether the engine stores anything: no object that it finds bad is replaced otherwise.
    """

    registration: Registration
    weights: WorkerWeights
    adapters: LoadedAdapters
    facts: Outbox[WorkerFacts]
    may_store: bool
    #: The open circuit breaker refused a load, and the scheduler does not know it.
    refused: bool = field(default=False, init=False)
    #: No request waits for this step, so it may wait for a load.
    _idle: bool = field(default=False, init=False)
    #: Loads that the step names and that have not begun, and the number of the last that has.
    _planned: list[LoadOp] = field(default_factory=list, init=False)
    #: Marks of the work on the device that was there when the step began.
    _fences: dict[Kind, object] = field(default_factory=dict, init=False)
    _begun: int = field(default=0, init=False)
    _ops: dict[Load, LoadOp] = field(default_factory=dict, init=False)
    #: Loads whose KV must not be used, whatever their transfer reports.
    _invalidated: set[Load] = field(default_factory=set, init=False)
    #: Requests whose loads have ended, until that is reported to vLLM.
    _finished: set[str] = field(default_factory=set, init=False)
    _bad_blocks: set[int] = field(default_factory=set, init=False)
    #: Requests of which all tokens must be computed, including those that were loaded.
    _failed_requests: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        engine = self.registration.vllm_config, self.registration.kv_cache_config
        self._chunk_size = self.registration.config.chunk_size
        #: Tokens in a block of vLLM's cache manager, where there is one group.
        self._block_size = manager_block_size(*engine)
        #: The engine has several cache groups, or states.
        self._hybrid = CacheGroups(*engine).hybrid
        #: With drafts vLLM frees blocks of windows before it knows how many drafts are accepted.
        #: The step's forward pass may read a load's blocks then, and the load waits for it.
        self._frees_blocks_early = getattr(engine[0], "speculative_config", None) is not None

    # ------------------------------------------------------------- begin

    def begin(self, meta: StepMetadata) -> None:
        """Take the loads of a step, for :meth:`start`."""
        self._idle = meta.idle
        self._planned = [op for op in meta.loads if op.number > self._begun]
        self._fences = {}
        if self._planned and not self._frees_blocks_early:
            with contextlib.suppress(DeviceUnavailableError):  # noticed again by :meth:`start`
                for kind, of_kind in self.registration.model.kinds.items():
                    self._fences[kind] = of_kind.cache.fence()

    def start(self) -> None:
        """Start the loads that the step names, once."""
        planned, self._planned = self._planned, []
        for op in planned:
            load = None
            try:
                load = self._start(op)
            except Exception as error:
                logger.error("a load was not started", exc_info=error)
            self._begun = self.facts.next.begun = op.number
            if load is None:
                self._report(op, functools.partial(self._note_bad, op, op.start))
            self._end_read_ahead(op.request_id, loading=load is not None)

    def _start(self, op: LoadOp) -> Load | None:
        """Start a load; None if it may not run now."""
        transfers = self.registration.serving
        usable = self.weights.is_current(op) and self.adapters.may_load(op.adapter)
        if transfers is None or not usable or not (op.chunks or op.windows or op.states):
            return None
        load = transfers.load(
            op.request_id,
            self.registration.views,
            self._items(op),
            op.patience,
            op.at_once,
            self._fences,
        )
        self._ops[load] = op
        return load

    def _items(self, op: LoadOp) -> dict[Kind, list[ChunkSlots]]:
        """Return what each kind has to load."""
        size = self._chunk_size
        items: dict[Kind, list[ChunkSlots]] = {}
        for kind, of_kind in self.registration.model.kinds.items():
            slots = of_kind.slots
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
        drafts = self.registration.moving(DRAFT)
        if drafts is not None and op.drafts:
            try:
                items[DRAFT] = slots_to_load(
                    drafts.slots, op.drafts, op.block_ids, op.start, op.end, size
                )
            except Exception as error:
                # The model's KV is loaded all the same.
                logger.error("KV of the drafter is not loaded for a request", exc_info=error)
        return items

    def read_ahead(self, ops: Iterable[PrefetchOp]) -> None:
        """Read chunks of requests that wait into memory."""
        ahead, views = self.registration.ahead, self.registration.views
        for op in ops if self.weights.settled else ():
            if op.kind in ahead:
                ahead[op.kind].add(op.request_id, views[op.kind], op.chunks)

    def _end_read_ahead(self, request_id: str, *, loading: bool = False) -> None:
        """Stop reading ahead for a request. A load takes over what is being read for it."""
        try:
            for ahead in self.registration.ahead.values():
                (ahead.cancel_reads if loading else ahead.release)(request_id)
        except Exception as error:
            # vLLM waits for every load, so an error here must not lose one.
            logger.error("could not stop reading ahead for a request", exc_info=error)

    # ------------------------------------------------------------- give up

    def take_orders(self, orders: Orders) -> None:
        """Give up the loads of requests that have ended, and what was read ahead for requests."""
        for load in [load for load, op in self._ops.items() if op.number in orders.cancelled]:
            self._invalidated.discard(load)
            if self.registration.transfers is not None:
                self.registration.transfers.cancel(load.request_id)
        for request_id in orders.prefetch_ended:
            self._end_read_ahead(request_id)

    def invalidate(self) -> None:
        """Fail all loads that are not reported: what they have scattered is no longer valid."""
        for load in self._ops:
            if not load.cancelled:
                self._invalidated.add(load)
                if self.registration.transfers is not None:
                    self.registration.transfers.cancel(load.request_id)

    def stop(self) -> None:
        """Fail all loads, and read nothing ahead: the weights are not what they were."""
        self.invalidate()
        for ahead in self.registration.ahead.values():
            ahead.release_all()

    # ------------------------------------------------------------- end

    def take_ended(self) -> Ended:
        """Return what vLLM has to learn of the loads that have ended since the last call."""
        transfers = self.registration.transfers
        if transfers is not None and self._ops:
            wait = IDLE_WAIT_SECONDS if self._idle and not self._finished else 0.0
            for load in transfers.poll(wait):
                self._end(load)
        # Nothing below raises: vLLM must learn of each end once.
        taken = Ended(self._finished, self._failed_requests, self._bad_blocks)
        self._finished, self._failed_requests, self._bad_blocks = set(), set(), set()
        return taken

    def _end(self, load: Load) -> None:
        op = self._ops.pop(load, None)
        if op is not None:
            self._report(op, functools.partial(self._note, load, op))
            self._invalidated.discard(load)
            self._end_read_ahead(load.request_id)

    def _report(self, op: LoadOp, note: Callable[[], None]) -> None:
        """Report a load as finished, after `note` has noted what it did not deliver."""
        try:
            note()
        except Exception as error:
            self._failed_requests.add(op.request_id)
            logger.error("all tokens of a request are computed after an error", exc_info=error)
        self._finished.add(op.request_id)

    def _note(self, load: Load, op: LoadOp) -> None:
        if load in self._invalidated or not self.adapters.may_load(op.adapter):
            self._note_bad(op, op.start)
            return
        if load.cancelled:
            return
        if self.registration.drafter is not None:
            self._note_drafts(load, op)
        seconds = load.seconds_of_all
        if seconds is not None:
            self.facts.next.load_seconds.append((op.number, op.request_id, seconds))
        for kind, chunk, failure in load.failures:
            self.refused = self.refused or failure is Failure.UNAVAILABLE
            bad = failure is Failure.BAD
            if bad and not self._repairs:
                self.registration.runtime.counters.add("unrepaired_objects")
            # The others say nothing about the chunk.
            if failure not in (Failure.UNAVAILABLE, Failure.CUT):
                self.facts.next.failures.append((kind_key(chunk.key, kind), bad))
        good_until = op.end
        if load.failed:
            good_until = op.start if self._hybrid else self._good_until(load, op)
        self.registration.runtime.counters.add("loaded_tokens", good_until - op.start)
        self._note_bad(op, good_until)

    def _note_drafts(self, load: Load, op: LoadOp) -> None:
        """Note from which token on a load brought no KV of the drafter."""
        piece, start = load.pieces.get(DRAFT), op.start
        if piece is not None:
            if piece.leading == len(piece.items):
                return
            start = max(start, piece.items[piece.leading].chunk.index * self._chunk_size)
        self.facts.next.without_drafts.append((op.request_id, start))

    def _good_until(self, load: Load, op: LoadOp) -> int:
        """Return the first token without KV of a load that failed, of one kind."""
        (piece,) = load.needed.values()
        assert piece.first_failed is not None
        # The block in which the failed chunk begins is not complete either.
        failed = piece.first_failed.index * self._chunk_size
        return max(op.start, failed - failed % self._block_size)

    @property
    def _repairs(self) -> bool:
        """Whether what is computed instead of a bad object may replace it."""
        shelf = self.registration.runtime.shelf()
        return self.may_store and shelf is not None and not shelf.backend.properties.read_only

    def _note_bad(self, op: LoadOp, start: int) -> None:
        """Note that the blocks of a load have no KV from token `start` on."""
        if start >= op.end:
            return
        if self._hybrid:
            # vLLM takes ids of blocks from engines with one group only.
            self._failed_requests.add(op.request_id)
            return
        (block_ids,) = op.block_ids
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
        self._bad_blocks.update(block for block in bad if block != NULL_BLOCK)

    # ------------------------------------------------------------- what the scheduler learns

    def note_reads(self) -> None:
        """Note the chunks that could not be read ahead."""
        for kind, ahead in self.registration.ahead.items():
            self.facts.next.failures += [
                (kind_key(chunk.key, kind), failure is Failure.BAD)
                for chunk, failure in ahead.take_failures()
            ]
