"""The loads that vLLM waits for, and what failed of them.

Owns the loads that the next step brings to the workers, and which chunks count as missing since
a load of them failed.

Contracts
---------
* vLLM waits for each load that it was offered, or takes it for done, so one is planned in any case:
  without chunks, the workers report it as failed.
* There is one load for each time that a request is admitted: what the load did not deliver is
  computed, so no request can loop. Of a hybrid engine a load brings everything or nothing.
* Of requests that come together and begin alike the first loads, where vLLM caches prefixes. The
  others wait until that load is over, however it ends, and find in vLLM's own cache what it
  brought. A request waits for two loads at most.
* A damaged chunk counts as missing until every rank that has layers of its kind has replaced it.
* Each step names the loads that not all ranks are known to have begun. That of a request that has
  ended is named without chunks, so that a rank which has not begun it reports its end.
* Runs on the engine's step thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, STATE, WINDOW, kind_of_key
from kvshelf.vllm.metadata import LoadOp, WorkerFacts
from kvshelf.vllm.scheduler.admission import Admission
from kvshelf.vllm.scheduler.drafter import DraftScheduler
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.periods import BlockPeriods
from kvshelf.vllm.scheduler.read_ahead import ReadAheadPlan
from kvshelf.vllm.scheduler.requests import RequestState

#: Loads that a request waits for. After the first vLLM knows where prompts part, and keeps the
#: windows and states there that the second brings.
_MOST_SHARED: Final = 2
#: Most damaged chunks of which repairs are counted.
_REPAIRS_REMEMBERED: Final = 4096


class SchedulerLoads:
    """The loads of one engine.

    Parameters
    ----------
    engine : SchedulerEngine
    hits : Hits
    drafter : DraftScheduler
    periods : BlockPeriods
    read_ahead : ReadAheadPlan
    admission : Admission

    Attributes
    ----------
    planned : dict
        By number, the loads that not all ranks are known to have begun.
    running : dict
        By request, the loads that run.
    """

    def __init__(
        self,
        engine: SchedulerEngine,
        hits: Hits,
        drafter: DraftScheduler,
        periods: BlockPeriods,
        read_ahead: ReadAheadPlan,
        admission: Admission,
    ) -> None:
        self._engine, self._hits, self._drafter = engine, hits, drafter
        self._periods, self._read_ahead, self._admission = periods, read_ahead, admission
        self._groups, self._requests = engine.groups, engine.requests
        self._size = engine.config.chunk_size
        cache = engine.vllm_config.cache_config
        #: vLLM's own cache has what a load has brought.
        self._are_shared = bool(getattr(cache, "enable_prefix_caching", True))
        self.planned: dict[int, LoadOp] = {}
        self._count = 0
        #: The last load that each rank is known to have begun.
        self._begun = dict.fromkeys(range(engine.ranks), 0)
        self.running: dict[str, LoadOp] = {}
        #: By chunk key, the last of these loads that brings the chunk.
        self._brought: dict[bytes, LoadOp] = {}
        #: By kind key, the ranks that replaced their objects of a damaged chunk, until all have.
        self._repaired: OrderedDict[bytes, set[int]] = OrderedDict()

    def plan_load(
        self, state: RequestState, block_ids: Sequence[Sequence[int]], external: int
    ) -> None:
        """Plan the load of `external` tokens into the request's blocks in each cache group."""
        number = self._begin(state)
        self._read_ahead.loading(state.id)
        start, end = state.offered_from, state.offered_from + external
        chain = None if state.lookup is None else state.lookup.chain
        chunks = self._hits.to_load(state, start, end)
        blocks = tuple(map(list, block_ids))
        state.period = self._periods.admit(blocks, start, state.request.mm_features)
        patience, at_once = self._admission.begin(state, start, end)
        drafts: Sequence[Chunk] = ()
        if not self._drafter.left_out:
            drafts = self._drafter.to_load(state.id, chain, start, end)
        op = LoadOp(
            number,
            state.id,
            start,
            end,
            chunks.get(FULL, []),
            blocks,
            self._engine.adapters.content(state.request.lora_request),
            self._engine.handshake.round,
            windows=chunks.get(WINDOW, []),
            states=chunks.get(STATE, []),
            drafts=list(drafts),
            patience=patience,
            at_once=at_once,
        )
        self._read_ahead.note_in_engine_cache(op.chunks)
        self.planned[number] = self.running[state.id] = op
        if self._are_shared:
            self._brought |= {chunk.key: op for chunk in (*op.chunks, *op.windows, *op.states)}

    def _begin(self, state: RequestState | None) -> int:
        """Return the number of a new load, of which nothing is known yet but that vLLM waits."""
        self._count += 1
        if state is not None:
            state.loaded = state.loading = True
            state.load = self._count
        return self._count

    def fail(self, request_id: str, external: int) -> None:
        """Plan a load after an error in :meth:`plan_load`: the workers report it as failed."""
        if external > 0:
            number = self._begin(self._requests.get(request_id))
            # Without its blocks, the workers have all tokens of the request computed.
            op = self._without_chunks(number, request_id, external)
            self.planned[number] = self.running[request_id] = op

    def shares(self, state: RequestState, start: int, end: int) -> bool:
        """Whether a request waits for a load that runs, before its own of tokens ``[start, end)``.

        That load brings at least half of what its own would, and is at most twice as long. Windows
        and states are useful at its end only, which is where its own would end.
        """
        loads = state.shared
        if not loads or (len(loads) < _MOST_SHARED and not self._runs(loads[-1])):
            at_end = self._groups.kinds != (FULL,)
            chunk = (end - 1 if at_end else (start + end - 1) // 2) // self._size
            lookup = state.lookup
            chunks = lookup.chain.chunks if lookup is not None and lookup.chain is not None else []
            op = self._brought.get(chunks[chunk].key) if chunk < len(chunks) else None
            if op is None or op.end - op.start > 2 * (end - start):
                return False
            if at_end and not op.end == end <= self._kept(op, state):
                return False
            loads.append(op)
        return self._runs(loads[-1])

    def _runs(self, op: LoadOp) -> bool:
        return self.running.get(op.request_id) is op

    def _kept(self, op: LoadOp, state: RequestState) -> int:
        """Return up to which token vLLM can hit behind a load of another request.

        It keeps windows and states at the end of a prompt: prompts of one length are taken for
        equal. It also keeps them where it has seen prompts part, by the full KV of a first load.
        """
        request, dropped = state.request, self._hits.dropped
        as_long = self._requests[op.request_id].request.num_tokens == request.num_tokens
        learns = not state.shared and FULL in self._groups.kinds and dropped < self._size
        tokens = request.num_tokens - 1 if as_long or learns else request.shared_prefix_boundary
        return int(tokens - dropped)

    def _ended(self, request_id: str) -> None:
        op = self.running.pop(request_id, None)
        for chunk in () if op is None else (*op.chunks, *op.windows, *op.states):
            if self._brought.get(chunk.key) is op:
                del self._brought[chunk.key]

    def _without_chunks(self, number: int, request_id: str, end: int) -> LoadOp:
        return LoadOp(number, request_id, 0, end, [], ([],) * len(self._groups))

    def plan(self, output: Any) -> None:
        """Note the ends of loads that were not noted: vLLM computes no request whose load runs."""
        self.done(self.running.keys() & output.num_scheduled_tokens.keys())

    def done(self, request_ids: Iterable[str]) -> None:
        """Note that the loads of requests are finished."""
        for request_id in request_ids:
            self._ended(request_id)
            state = self._requests.get(request_id)
            if state is not None:
                state.loading = False
                if not self._admission.always:
                    self._admission.load_ended(state)

    def finished(self, state: RequestState) -> None:
        """Cancel the load of a request that ends, if it is still running."""
        self._ended(state.id)
        if not state.loading:
            return
        self._engine.orders.next.cancelled.append(state.load)
        op = self.planned.get(state.load)
        if op is not None:
            self.planned[state.load] = self._without_chunks(op.number, op.request_id, op.end)

    def take_facts(self, rank: int, facts: WorkerFacts) -> None:
        """Take what a rank reports of loads, and of stores that replaced damaged objects."""
        if facts.begun > self._begun.get(rank, 0):
            self._begun[rank] = facts.begun
            begun_by_all = min(self._begun.values())
            for number in [number for number in self.planned if number <= begun_by_all]:
                del self.planned[number]
        for key, bad in facts.failures:
            self._engine.failed.add(key, bad=bad)
            self._repaired.pop(key, None)
        for key in facts.repaired:
            ranks = self._repaired.setdefault(key, set())
            ranks.add(rank)
            if len(ranks) == self._engine.ranks_of[kind_of_key(key)]:
                del self._repaired[key]
                self._engine.failed.forget(key)
            elif len(self._repaired) > _REPAIRS_REMEMBERED:
                self._repaired.popitem(last=False)
