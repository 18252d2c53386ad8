"""Plans which chunks a step stores.

Owns how far the stores of each request are planned: its chunks, tail, and the windows and states
at likely ends of hits (:mod:`kvshelf.vllm.scheduler.ends`).

Contracts
---------
* Stored are all full chunks that the step completes and that the lookup did not find.
* Only tokens that can no longer change are stored: those of the prompt and those that vLLM has
  accepted, never drafts or samples in flight.
* Windows are stored in the step that completes the chunk. vLLM frees their blocks soon after:
  windows of which it has freed a block are not stored.
* Of a request that wants a hand-over the tail is stored, in the step that completes the prompt.
* A drafter's KV is stored beside the model's (:mod:`kvshelf.vllm.scheduler.drafts`).
* Runs on the engine's step thread.

"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import DRAFT, FULL, STATE, WINDOW, Kind
from kvshelf.shelf.lookup import Lookup
from kvshelf.vllm.metadata import NULL_BLOCK, StepMetadata, StoreOp
from kvshelf.vllm.scheduler.ends import Ends
from kvshelf.vllm.scheduler.lookups import Lookups
from kvshelf.vllm.scheduler.periods import BlockPeriods
from kvshelf.vllm.scheduler.promises import Promises
from kvshelf.vllm.scheduler.read_ahead import ReadAheadPlan
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart
from kvshelf.vllm.scheduler.steps import scheduled
from kvshelf.vllm.scheduler.unsettled import Unsettled


class _Stored(NamedTuple):
    """A request in a step that may store some of it."""

    state: RequestState
    lookup: Lookup
    chain: KeyChain
    output: Any
    meta: StepMetadata

    def tables(self) -> Sequence[Sequence[int]] | None:
        """Return the request's blocks in each cache group; None if vLLM does not say."""
        found: Sequence[Sequence[int]] | None
        found = self.output.kv_connector_block_state.get_block_ids(self.state.id)
        return found


class SchedulerStores(SharingPart):
    """The stores of one engine.

    Parameters
    ----------
    shared : Shared
    lookups : Lookups
    periods : BlockPeriods
    unsettled : Unsettled
    promises : Promises
    read_ahead : ReadAheadPlan
    """

    failure = "stores of a step could not be planned"

    def __init__(
        self,
        shared: Shared,
        *,
        lookups: Lookups,
        periods: BlockPeriods,
        unsettled: Unsettled,
        promises: Promises,
        read_ahead: ReadAheadPlan,
    ) -> None:
        super().__init__(shared)
        self._lookups = lookups
        self._periods = periods
        self._unsettled = unsettled
        self._ends = Ends(shared)
        self._promises = promises
        self._read_ahead = read_ahead

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Plan the stores of a step."""
        if self._unsettled.lost or not self._opening.may_store or not self._opening.serves:
            return
        for req_id, before, after in scheduled(output):
            state = self._requests.get(req_id)
            # Of one that depends on another's load a later step stores the chunks, if it is still
            # running then.
            if state is not None and req_id not in self._unsettled:
                self._plan_request(state, before, after, output, meta)

    def _plan_request(
        self, state: RequestState, before: int, after: int, output: Any, meta: StepMetadata
    ) -> None:
        """Plan the stores of a request, of which a step computes tokens ``[before, after)``."""
        plan, request = state.stores, state.request
        if plan.next_boundary[0] == plan.next_chunk and after < plan.next_boundary[1]:
            return
        if not state.addressable or not self._periods.is_valid(state):
            return
        if not self._keys.trusts(state):
            return
        # Tokens beyond these (drafts, samples in flight) may still change.
        known = request.num_tokens if self._config.save_decode else request.num_prompt_tokens
        end = min(after, known, plan.cut)
        complete = end // self._size
        states = self._ends.states_in_cache(state, before, after, complete, output)
        if complete <= plan.next_chunk and not states and not self._needs_tail(state, end):
            plan.next_boundary = self._boundary_after(state)
            return
        stored = self._with_keys(state, output, meta)
        if stored is None:
            return
        chain = stored.chain
        if len(chain.chunks) < complete:
            chain.extend(request._all_token_ids[chain.tokens : complete * self._size])
        if not self._plan_chunks(stored, chain.chunks[plan.next_chunk : complete]):
            return
        self._plan_states(stored, states)
        if self._needs_tail(state, end):
            self._plan_tail(stored)
        plan.next_chunk = max(plan.next_chunk, complete)

    def _with_keys(self, state: RequestState, output: Any, meta: StepMetadata) -> _Stored | None:
        """Return a request with its lookup and its keys; None while it has none."""
        lookup, namespace = state.lookup, self._opening.namespace
        if lookup is None or lookup.given_up:
            # The request was admitted before the namespace was known, or has no keys yet.
            if self._opening.lookups is None:
                return None
            lookup = self._lookups.start(self._opening.lookups, state)
        assert namespace is not None
        chain = self._keys.for_stores(state, lookup, namespace.digest)
        return None if chain is None else _Stored(state, lookup, chain, output, meta)

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

    def _plan_chunks(self, stored: _Stored, chunks: Sequence[Chunk]) -> bool:
        """Plan the stores of chunks and windows; return whether vLLM says where they are."""
        state, lookup, plan = stored.state, stored.lookup, stored.state.stores
        self._read_ahead.note_in_engine_cache(chunks)
        tables: Sequence[Sequence[int]] | None = None
        windows = self._ends.windows(state, lookup, plan.next_chunk, len(chunks))
        for chunk in chunks:
            n, first = chunk.index, plan.windows_from
            is_needed = any(n in one and one.start >= first for one in windows)
            for kind in self._groups.kinds:
                if self._hits.is_stored(lookup, chunk, kind):
                    self._promises.note(state, kind, chunk)
                    continue
                repairs = self._hits.must_repair(chunk, kind)
                if kind == STATE or (kind == WINDOW and not (is_needed or repairs)):
                    continue
                tables = tables or stored.tables()
                if tables is None:
                    return False
                blocks = self._blocks_of(chunk, kind, tables)
                if blocks is not None:
                    self._store(stored, chunk, kind, blocks)
                elif kind == WINDOW:
                    plan.windows_from = n + 1
        return True

    def _plan_states(self, stored: _Stored, states: Mapping[int, Mapping[int, list[int]]]) -> None:
        """Plan the stores of those states that are worth their bytes."""
        state, lookup, plan = stored.state, stored.lookup, stored.state.stores
        for index, blocks in states.items():
            chunk = stored.chain.chunks[index]
            known = self._hits.is_stored(lookup, chunk, STATE) or index == plan.last_state
            if not known and self._ends.is_likely(state, lookup, STATE, index + 1):
                plan.last_state = index
                self._store(stored, chunk, STATE, blocks)

    def _needs_tail(self, state: RequestState, end: int) -> bool:
        """Whether to store the tail of a request whose tokens before `end` have KV."""
        request = state.request
        prompt = request.num_prompt_tokens
        if not self._opening.tails or end < prompt or not prompt % self._size:
            return False
        return state.promise is not None and state.promise.tail is None

    def _plan_tail(self, stored: _Stored) -> None:
        """Plan the store of a prompt's tail."""
        request, size = stored.state.request, self._size
        first, prompt = request.num_prompt_tokens // size, request.num_prompt_tokens
        chunk = stored.chain.tail_after(first, request._all_token_ids[first * size : prompt])
        tables = stored.tables()
        blocks = None if tables is None else self._blocks_of(chunk, FULL, tables)
        if blocks is not None:
            self._store(stored, chunk, FULL, blocks)

    def _blocks_of(
        self, chunk: Chunk, kind: Kind, tables: Sequence[Sequence[int]]
    ) -> dict[int, list[int]] | None:
        """Return the blocks of a chunk in each group of a kind; None if vLLM has freed some.

        It frees those that a sliding window has passed.
        """
        groups, start = self._groups.of(kind), chunk.index * self._size
        if kind == FULL:
            # The drafter's KV is stored with these.
            groups += tuple(group for group in self._groups.drafts if group.kind == FULL)
        found: dict[int, list[int]] = {}
        for group in groups:
            first = start // group.block_size
            last = -(-(start + chunk.tokens) // group.block_size)
            found[group.index] = blocks = list(tables[group.index][first:last])
            if len(blocks) < last - first or NULL_BLOCK in blocks:
                return None
        return found

    def _store(
        self, stored: _Stored, chunk: Chunk, kind: Kind, blocks: Mapping[int, list[int]]
    ) -> None:
        """Have the workers store a kind of a chunk that lies in `blocks` of each group."""
        state, lookup, chain, _, meta = stored
        self._promises.note(state, kind, chunk)
        state.stores.at = self._steps.count
        end = (chunk.index + 1) * self._size
        op = StoreOp(
            chunk,
            tuple(blocks.get(group.index, []) for group in self._groups),
            self._hits.must_repair(chunk, kind),
            time.monotonic() - lookup.as_of,
            self._keys.adapters.content(state.request.lora_request),
            self._opening.handshake.round,
            kind,
            "" if state.promise is None else state.promise.attempt,
            (state.id, state.request.num_preemptions),
            kind == STATE and self._ends.is_drafted(state, end),
        )
        draft = self._drafts.to_store(state.id, chain, chunk.index) if kind == FULL else None
        if draft is not None:
            # First, so that a lookup that finds the model's KV also finds the drafter's.
            meta.stores.append(replace(op, chunk=draft, repair=False, kind=DRAFT, late=True))
        meta.stores.append(op)
