"""Plans which chunks the workers store in a step, and what is promised to other engines.

Owns how far the stores of each request are planned, how many chunks the workers have room for, and
the requests that have ended and keep their blocks. :class:`~kvshelf.vllm.scheduler.hits.LikelyEnds`
knows which windows and states are worth their bytes.

A full chunk keeps its KV for as long as its request has the blocks. So the scheduler hands it out
when every worker that has reported its room has some left: in the step that completes the chunk, or
in a later step of the request. The chunks that wait are the request's *backlog*. Windows, states
and the drafter's KV do not wait: the next step may overwrite them.

A worker answers each step that brings stores with its room after that step
(:attr:`~kvshelf.vllm.metadata.WorkerFacts.room`). What was handed out since then is subtracted.
A worker that has no memory after all, as where its memory is in fragments, refuses the chunk, and
the scheduler plans it again.

Contracts
---------
* The scheduler hands out the full chunks that a step completes and that the lookup did not find, as
  far as there is room. Requests that have ended come first, then those with a backlog; of these the
  ones that hand over, then the oldest.
* Only tokens that can no longer change are stored: those of the prompt and those that vLLM has
  accepted, never drafts or samples in flight.
* A request stores in steps that it is part of, since vLLM then keeps its blocks until it has the
  step's output. A request that hands over keeps its blocks after its end until its backlog is
  stored, and for at most ``handover_wait_s``. If chunks still wait then, its promise is broken: the
  workers write a marker for the consumer.
  The backlog of another request is dropped with its end.
* Windows are stored in the step that completes the chunk. vLLM frees their blocks soon after:
  windows of which it has freed a block are not stored.
* The tail is what a prompt has behind its last full chunk. Only requests that hand over store it,
  in the step that completes the prompt or a later one.
* Of a request that hands over, the chunks seen on the shelf, handed out or in its backlog are
  promised (:class:`~kvshelf.vllm.scheduler.requests.Promise`). While a worker's storage takes no
  writes, nothing is promised: a consumer's lookup finds what is on the shelf. A request of which
  nothing can be promised says so, and its consumer does not wait.
* While weights are compared, the scheduler drops the backlogs of requests that have ended. When the
  cache is reset, it drops all backlogs.
* A drafter's KV is stored beside the model's (:mod:`kvshelf.vllm.scheduler.drafter`), but not for
  chunks that wait after the end of their request.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import DRAFT, FULL, STATE, Kind
from kvshelf.shelf.lookup import Lookup
from kvshelf.vllm.handover import asks_for_handover, no_handover
from kvshelf.vllm.metadata import NULL_BLOCK, RefusedStore, StepMetadata, StoreOp, WorkerFacts
from kvshelf.vllm.scheduler.drafter import DraftScheduler
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.hits import Hits, LikelyEnds
from kvshelf.vllm.scheduler.lookups import Lookups
from kvshelf.vllm.scheduler.periods import BlockPeriods
from kvshelf.vllm.scheduler.read_ahead import ReadAheadPlan
from kvshelf.vllm.scheduler.requests import RequestState, scheduled


@dataclass(eq=False, slots=True)
class _Source:
    """A request whose chunks can be stored now, with its keys.

    `tables` are its blocks in each cache group; None before they are needed, or if vLLM does not
    say.
    """

    state: RequestState
    lookup: Lookup
    chain: KeyChain
    tables: Sequence[Sequence[int]] | None = None


class SchedulerStores:
    """The stores of one engine.

    Parameters
    ----------
    engine : SchedulerEngine
    hits : Hits
    drafter : DraftScheduler
    lookups : Lookups
    periods : BlockPeriods
    read_ahead : ReadAheadPlan

    Attributes
    ----------
    clock : Callable
        Seconds.
    ended : dict
        Requests that have ended and keep their blocks, and until when by the clock.
    """

    def __init__(
        self,
        engine: SchedulerEngine,
        *,
        hits: Hits,
        drafter: DraftScheduler,
        lookups: Lookups,
        periods: BlockPeriods,
        read_ahead: ReadAheadPlan,
    ) -> None:
        self._engine, self._config, self._groups = engine, engine.config, engine.groups
        self._requests, self._size = engine.requests, engine.config.chunk_size
        self._hits, self._drafter, self._lookups = hits, drafter, lookups
        self._periods, self._read_ahead = periods, read_ahead
        self._ends = LikelyEnds(engine, hits)
        self.clock: Callable[[], float] = time.monotonic
        #: Requests with a backlog, the oldest backlog first.
        self._behind: dict[str, None] = {}
        self.ended: dict[str, tuple[_Source, float]] = {}
        #: The last step with stores that each rank has answered, and its room in full chunks then.
        self._answers: dict[int, tuple[int, int]] = {}
        #: The steps with full chunks that not all ranks have answered, and how many chunks.
        self._handed_out: deque[tuple[int, int]] = deque()
        #: How many further full chunks this step may hand out.
        self._room = sys.maxsize
        #: Ranks whose storage takes no writes.
        self._refusing: set[int] = set()

    # ------------------------------------------------------------- what workers say

    @property
    def _answered(self) -> int:
        """The step up to which all ranks have answered."""
        if len(self._answers) < self._engine.ranks:
            return 0
        return min(step for step, _ in self._answers.values())

    def take_facts(self, rank: int, facts: WorkerFacts) -> None:
        """Take a rank's room, which stores it has refused, and whether its storage takes writes."""
        if facts.writes_refused is not None:
            (self._refusing.add if facts.writes_refused else self._refusing.discard)(rank)
        for refusal in facts.refused:
            self._take_back(refusal)
        if facts.room is not None:
            self._answers[rank] = facts.room
            answered = self._answered
            while self._handed_out and self._handed_out[0][0] <= answered:
                self._handed_out.popleft()

    def _take_back(self, refusal: RefusedStore) -> None:
        """Plan a chunk again that a rank has refused, and those behind it; else give it up."""
        chunk = refusal.chunk
        source, _ = self.ended.get(refusal.request_id, (None, 0.0))
        state = self._requests.get(refusal.request_id) if source is None else source.state
        if state is None or refusal.round != self._engine.handshake.round:
            self._drop(1)
            if refusal.attempt:
                self._engine.orders.next.broken.append(refusal.attempt)
            if state is not None:
                state.promise = None
            return
        plan, lookup = state.stores, state.lookup
        if state.promise is not None:
            # It is promised again when it is handed out again.
            state.promise.discard(chunk)
        if chunk.tail:
            plan.has_tail, plan.next_boundary = False, (0, 0)
            return
        plan.next_full = min(plan.next_full, chunk.index)
        if lookup is not None:
            # After a preemption the lookup also counts what the request itself has stored.
            lookup.full_chunks = min(lookup.full_chunks, chunk.index)
            if not self._groups.mixed:
                lookup.hit_chunks = min(lookup.hit_chunks, chunk.index)

    # ------------------------------------------------------------- steps

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Plan the stores of a step."""
        serves = self._engine.may_store and self._engine.serves
        room_before = self._room = self._find_room()
        for request_id in list(self.ended):
            self._plan_ended(request_id, meta, may_store=serves)
        if serves and not self._periods.is_lost:
            requests = scheduled(output)
            if self._behind:
                backlog_ages = {request_id: age for age, request_id in enumerate(self._behind)}
                requests = sorted(requests, key=lambda step: self._turn(step[0], backlog_ages))
            for request_id, start, end in requests:
                state = self._requests.get(request_id)
                # If the request depends on the load of another one, a later step stores its chunks.
                if state is not None and request_id not in self._periods.unsettled:
                    self._plan_request(state, start, end, output, meta)
        if room_before != self._room:
            self._handed_out.append((self._engine.steps, room_before - self._room))
        if meta.stores or self.ended or self._behind:
            meta.number = self._engine.steps
            meta.waits_for_room = bool(self.ended or self._behind)

    def _turn(self, request_id: str, backlog_ages: Mapping[str, int]) -> tuple[bool, bool, int]:
        """Return the sort key of a request: backlogs first, and of these the promised ones."""
        state, age = self._requests.get(request_id), backlog_ages.get(request_id)
        return age is None, state is None or state.promise is None, age or 0

    def _find_room(self) -> int:
        """Return for how many full chunks all ranks have room; unknown before they answer."""
        rooms = [
            chunks - sum(count for number, count in self._handed_out if number > step)
            for step, chunks in self._answers.values()
        ]
        return min(rooms, default=sys.maxsize)

    def _plan_request(
        self, state: RequestState, before: int, after: int, output: Any, meta: StepMetadata
    ) -> None:
        """Plan the stores of a request, of which a step computes tokens ``[before, after)``."""
        plan, request = state.stores, state.request
        is_behind = plan.next_full < plan.next_chunk and self._room > 0
        at_boundary = plan.next_boundary[0] != plan.next_chunk or after >= plan.next_boundary[1]
        if not (is_behind or at_boundary):
            return
        if not state.addressable or not self._periods.is_valid(state):
            return
        if not self._engine.adapters.trusts(request.lora_request):
            return
        # Tokens beyond these (drafts, samples in flight) may still change.
        final_tokens = request.num_tokens if self._config.save_decode else request.num_prompt_tokens
        end = min(after, final_tokens, plan.cut)
        complete = end // self._size
        states = self._ends.states_in_cache(state, before, after, complete, output)
        needs_tail = self._room > 0 and self._needs_tail(state, end)
        if complete <= plan.next_chunk and not (is_behind or states or needs_tail):
            plan.next_boundary = self._boundary_after(state)
            return
        source = self._with_keys(state)
        if source is None:
            return
        chain = source.chain
        if len(chain.chunks) < complete:
            chain.extend(request._all_token_ids[chain.tokens : complete * self._size])
        source.tables = output.kv_connector_block_state.get_block_ids(state.id)
        if source.tables is None:
            return
        new = chain.chunks[plan.next_chunk : complete]
        self._read_ahead.note_in_engine_cache(new)
        self._plan_full(source, complete, meta)
        self._plan_windows(source, new, meta)
        self._plan_states(source, states, meta)
        if needs_tail:
            self._plan_tail(source, meta)
        # Chunks behind the cut depend on more than the prefix, and are never stored.
        plan.next_chunk = min(max(plan.next_chunk, complete), plan.cut // self._size)
        if plan.next_full < plan.next_chunk or self._needs_tail(state, end):
            self._behind[state.id] = None
        else:
            self._behind.pop(state.id, None)

    def _with_keys(self, state: RequestState) -> _Source | None:
        """Return a request with its lookup and its keys; None while it has none."""
        lookup, namespace = state.lookup, self._engine.handshake.namespace
        if lookup is None or lookup.given_up:
            # The request was admitted before the namespace was known, or has no keys yet.
            if self._engine.lookup_service is None:
                return None
            lookup = self._lookups.start(self._engine.lookup_service, state)
        assert namespace is not None
        chain = self._lookups.chain_for_stores(state, lookup, namespace.digest)
        return None if chain is None else _Source(state, lookup, chain)

    def _boundary_after(self, state: RequestState) -> tuple[int, int]:
        """Return a request's next chunk to store, and the first token at which one is complete."""
        next_chunk = state.stores.next_chunk
        if STATE in self._groups.kinds:
            # vLLM may offer one in any step.
            return next_chunk, 0
        prompt, boundary = state.request.num_prompt_tokens, (next_chunk + 1) * self._size
        if not self._config.save_decode and boundary > prompt:
            boundary = sys.maxsize
        if self._needs_tail(state, prompt):
            boundary = min(boundary, prompt)
        return next_chunk, boundary

    def _plan_full(self, source: _Source, end: int, meta: StepMetadata) -> None:
        """Hand out the full chunks of a request before chunk `end`, while there is room."""
        state, plan = source.state, source.state.stores
        if FULL not in self._groups.kinds:
            plan.next_full = max(plan.next_full, end)
        for chunk in source.chain.chunks[plan.next_full : end]:
            if self._hits.is_stored(source.lookup, chunk, FULL):
                self._note_promised(state, FULL, chunk)
            elif self._room <= 0:
                return
            else:
                blocks = self._blocks_of(chunk, FULL, source)
                if blocks is not None:
                    self._store(source, chunk, FULL, blocks, meta)
            plan.next_full = chunk.index + 1

    def _plan_windows(self, source: _Source, chunks: Sequence[Chunk], meta: StepMetadata) -> None:
        """Store the windows of new chunks that likely hits need."""
        state, lookup, plan = source.state, source.lookup, source.state.stores
        windows = self._ends.windows(state, lookup, plan.next_chunk, len(chunks))
        for kind in self._groups.kinds:
            for chunk in chunks if kind != FULL else ():
                if self._hits.is_stored(lookup, chunk, kind):
                    self._note_promised(state, kind, chunk)
                    continue
                n, first = chunk.index, plan.windows_from
                is_needed = any(n in window and window.start >= first for window in windows)
                if kind == STATE or not (is_needed or self._hits.must_repair(chunk, kind)):
                    continue
                blocks = self._blocks_of(chunk, kind, source)
                if blocks is not None:
                    self._store(source, chunk, kind, blocks, meta)
                else:
                    plan.windows_from = n + 1

    def _plan_states(
        self,
        source: _Source,
        states: Mapping[int, Mapping[int, list[int]]],
        meta: StepMetadata,
    ) -> None:
        """Store those states that are worth their bytes."""
        state, lookup, plan = source.state, source.lookup, source.state.stores
        for index, blocks in states.items():
            chunk = source.chain.chunks[index]
            is_stored = self._hits.is_stored(lookup, chunk, STATE) or index == plan.last_state
            if not is_stored and self._ends.is_likely(state, lookup, STATE, index + 1):
                plan.last_state = index
                self._store(source, chunk, STATE, blocks, meta)

    def _needs_tail(self, state: RequestState, end: int) -> bool:
        """Whether to store the tail of a request whose tokens before `end` have KV."""
        prompt = state.request.num_prompt_tokens
        if not self._engine.tails or end < prompt or not prompt % self._size:
            return False
        if state.stores.cut < prompt:
            return False
        return state.promise is not None and not state.stores.has_tail

    def _plan_tail(self, source: _Source, meta: StepMetadata) -> None:
        """Store a prompt's tail, once all its full chunks are handed out and there is room."""
        first = source.state.request.num_prompt_tokens // self._size
        if source.state.stores.next_full < first or self._room <= 0:
            return
        chunk = self._tail_of(source)
        blocks = self._blocks_of(chunk, FULL, source)
        if blocks is not None:
            self._store(source, chunk, FULL, blocks, meta)
        source.state.stores.has_tail = True

    def _tail_of(self, source: _Source) -> Chunk:
        request, size = source.state.request, self._size
        first, prompt = request.num_prompt_tokens // size, request.num_prompt_tokens
        return source.chain.tail_after(first, request._all_token_ids[first * size : prompt])

    def _blocks_of(self, chunk: Chunk, kind: Kind, source: _Source) -> dict[int, list[int]] | None:
        """Return the blocks of a chunk in each group of a kind; None if vLLM has freed some.

        It frees those that a sliding window has passed.
        """
        assert source.tables is not None
        groups, start = self._groups.of(kind), chunk.index * self._size
        if kind == FULL:
            # The drafter's KV is stored with these.
            groups += tuple(group for group in self._groups.drafts if group.kind == FULL)
        blocks_of: dict[int, list[int]] = {}
        for group in groups:
            first = start // group.block_size
            last = -(-(start + chunk.tokens) // group.block_size)
            blocks_of[group.index] = blocks = list(source.tables[group.index][first:last])
            if len(blocks) < last - first or NULL_BLOCK in blocks:
                return None
        return blocks_of

    def _store(
        self,
        source: _Source,
        chunk: Chunk,
        kind: Kind,
        blocks: Mapping[int, list[int]],
        meta: StepMetadata,
    ) -> None:
        """Have the workers store a kind of a chunk that lies in `blocks` of each group."""
        state, lookup = source.state, source.lookup
        self._note_promised(state, kind, chunk)
        state.stores.at = self._engine.steps
        end = (chunk.index + 1) * self._size
        op = StoreOp(
            chunk,
            tuple(blocks.get(group.index, []) for group in self._groups),
            self._hits.must_repair(chunk, kind),
            time.monotonic() - lookup.as_of,
            self._engine.adapters.content(state.request.lora_request),
            self._engine.handshake.round,
            kind,
            "" if state.promise is None else state.promise.attempt,
            state.id,
            kind == STATE and self._ends.is_drafted(state, end),
        )
        if kind == FULL:
            self._room -= 1
            draft = self._drafter.to_store(state.id, source.chain, chunk.index)
            if draft is not None:
                # First, so that a lookup that finds the model's KV also finds the drafter's.
                meta.stores.append(replace(op, chunk=draft, repair=False, kind=DRAFT, late=True))
        meta.stores.append(op)

    def _note_promised(self, state: RequestState, kind: Kind, chunk: Chunk) -> None:
        """Note a kind of a chunk that is stored or will be, if the request hands over."""
        if state.promise is not None:
            namespace = self._engine.handshake.namespace
            assert namespace is not None
            state.promise.add(namespace, kind, chunk)

    # ------------------------------------------------------------- requests that end

    def end(
        self, state: RequestState, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a request that ends keeps its blocks, and what is promised of it.

        Parameters
        ----------
        state : RequestState
        tables : sequence of Sequence of int
            Its blocks in each cache group.
        """
        self._behind.pop(state.id, None)
        request, plan = state.request, state.stores
        prompt = request.num_prompt_tokens
        plan.next_chunk = min(plan.next_chunk, plan.cut // self._size)
        source = handover = None
        if state.promise and not self._refusing and request.num_computed_tokens >= prompt:
            if self._may_store_behind_end(state):
                source = self._promise_backlog(state, tables)
            handover = state.promise.handover(self._groups, prompt, self._size)
        promised_chunks = prompt // self._size if handover is not None and source is not None else 0
        self._drop(plan.next_chunk - max(plan.next_full, promised_chunks))
        # From here on only chunks of the prompt wait.
        plan.next_chunk = min(plan.next_chunk, prompt // self._size)
        if handover is None:
            is_asked_for = self._engine.hands_over and asks_for_handover(request.kv_transfer_params)
            return False, no_handover() if is_asked_for else None
        self._engine.counters.add("handovers_promised")
        if source is None or not (self._backlog_of(source) or plan.at > self._answered):
            return False, handover.params()
        self.ended[state.id] = source, self.clock() + self._config.handover_wait_s
        return True, handover.params()

    def _may_store_behind_end(self, state: RequestState) -> bool:
        """Whether the blocks of a request that ends have KV that may be stored."""
        engine, periods = self._engine, self._periods
        if state.loading or not (engine.may_store and engine.serves):
            return False
        return periods.is_valid(state) and state.id not in periods.unsettled

    def _promise_backlog(
        self, state: RequestState, tables: Sequence[Sequence[int]]
    ) -> _Source | None:
        """Promise the backlog of a prompt that has ended; return the request with its blocks."""
        source = self._with_keys(state)
        if source is None:
            return None
        source.tables, chain = tables, source.chain
        plan, end = state.stores, state.request.num_prompt_tokens // self._size
        # The lookup may have no answer, and no keys, yet.
        chain.extend(state.request._all_token_ids[chain.tokens : end * self._size])
        for chunk in chain.chunks[plan.next_full : min(plan.next_chunk, end)]:
            self._note_promised(state, FULL, chunk)
        if self._needs_tail(state, state.request.num_prompt_tokens):
            self._note_promised(state, FULL, self._tail_of(source))
        return source

    def _backlog_of(self, source: _Source) -> int:
        """Return how many chunks of a prompt that has ended are not handed out, tail included."""
        state, plan = source.state, source.state.stores
        needs_tail = self._needs_tail(state, state.request.num_prompt_tokens)
        return max(0, plan.next_chunk - plan.next_full) + needs_tail

    def _plan_ended(self, request_id: str, meta: StepMetadata, *, may_store: bool) -> None:
        """Go on with the backlog of a request that has ended; give its blocks back at the end."""
        source, until = self.ended[request_id]
        state = source.state
        if may_store:
            self._plan_full(source, state.stores.next_chunk, meta)
            if self._needs_tail(state, state.request.num_prompt_tokens):
                self._plan_tail(source, meta)
        backlog = self._backlog_of(source)
        waits = backlog or state.stores.at > self._answered
        if not (waits and may_store and self.clock() < until):
            self._release(request_id)

    def _release(self, request_id: str, *, is_broken: bool = False) -> None:
        """Give the blocks of a request that has ended back; break its promise if chunks wait."""
        source, _ = self.ended.pop(request_id)
        orders, backlog = self._engine.orders.next, self._backlog_of(source)
        self._drop(backlog)
        if (backlog or is_broken) and source.state.promise is not None:
            orders.broken.append(source.state.promise.attempt)
        orders.released.append(request_id)

    def _drop(self, chunks: int) -> None:
        if chunks > 0:
            self._engine.counters.add("dropped_chunks_staging_full", chunks)

    def lose(self, request_ids: Iterable[str]) -> None:
        """Break the promises of requests whose stores are unknown, and of all that have ended.

        Parameters
        ----------
        request_ids : iterable of str
            Requests that run.
        """
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.promise = None
        for request_id in list(self.ended):
            self._release(request_id, is_broken=True)

    def drop_backlogs(self) -> None:
        """Drop what waits for room of running requests: vLLM may free the memory of its caches."""
        for state in self._requests.values():
            plan = state.stores
            self._drop(plan.next_chunk - plan.next_full)
            plan.next_full = plan.next_chunk
            # A tail that waits has lost its KV as well.
            plan.has_tail = plan.has_tail or state.id in self._behind
        self._behind.clear()
