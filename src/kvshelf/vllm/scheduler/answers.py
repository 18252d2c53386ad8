"""The answers to vLLM's question how much of a prompt the shelf has.

Owns the order of the checks that lead to an answer, and what is counted of answers.

Contracts
---------
* vLLM asks until it gets a number. A request waits for its lookup at most a second. It does not
  wait where vLLM has as much in memory as any hit could bring, unless it brings a hand-over.
* A request that brings a hand-over waits for it before its lookup counts
  (:mod:`kvshelf.vllm.scheduler.handovers`).
* While the weights are compared (:mod:`kvshelf.vllm.handshake`), and while a storage breaker of the
  scheduler or of a worker is open, there are no hits. Only requests that wait for a hand-over wait.
* A step leaves at most :data:`~kvshelf.vllm.scheduler.lookups.LONG_QUEUE` requests waiting for a
  lookup, or for the load of another request. Further ones get 0, since each question takes vLLM
  about 17 µs. Those that share a computed prefix find it in vLLM's cache.
* The shelf may offer a part of a hit. The rest counts as refused.
* A hit is not offered if vLLM never has the blocks for its load: the request would wait for ever.
* Runs on the engine's step thread.
"""

from __future__ import annotations

from kvshelf.vllm.scheduler.admission import Admission
from kvshelf.vllm.scheduler.handovers import Handovers
from kvshelf.vllm.scheduler.loads import SchedulerLoads
from kvshelf.vllm.scheduler.lookups import LONG_QUEUE, Lookups
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart


class Answers(SharingPart):
    """Answers vLLM.

    Parameters
    ----------
    shared : Shared
    lookups : Lookups
    handovers : Handovers
    admission : Admission
    loads : SchedulerLoads
    """

    def __init__(
        self,
        shared: Shared,
        lookups: Lookups,
        handovers: Handovers,
        admission: Admission,
        loads: SchedulerLoads,
    ) -> None:
        super().__init__(shared)
        self._loads = loads
        self._lookups = lookups
        self._handovers = handovers
        self._admission = admission

    def answer(self, state: RequestState, computed: int) -> int | None:
        """Return how many tokens beyond `computed` are to be loaded; None while not known."""
        clock = self._admission.clock
        if state.unanswered is None:
            state.unanswered = clock()
        tokens = self._answer(state, computed)
        if tokens is None and state.unanswered is not None:
            self._lookups.waiting_in_step += 1
            if self._lookups.waiting_in_step > LONG_QUEUE:
                # Otherwise vLLM would ask about each request of a long queue in each step.
                tokens = 0
        if tokens is not None and state.unanswered is not None:
            # The time from here to the load is vLLM's.
            state.answered_after, state.unanswered = clock() - state.unanswered, None
        if tokens == 0 and not self._requests.is_transferred(state.request):
            self._admission.computes(state, computed)
        return tokens

    def _answer(self, state: RequestState, computed: int) -> int | None:
        """Run the checks in their order; return tokens to load, or None to be asked again."""
        if not state.reads or self._requests.is_transferred(state.request):
            # vLLM would not use a hit, or another connector brings the KV.
            return 0
        handshake = self._opening.handshake
        if state.loaded or state.gave_up or handshake.disabled or handshake.needs_version:
            return 0
        if self._handovers.is_short(state, computed):
            return 0
        if self._handovers.wait(state, computed):
            # This wait is for the producer, and not counted as one for kvshelf.
            state.unanswered = None
            return None
        if handshake.checking:
            return 0
        lookups, overdue = self._opening.lookups, self._handovers.is_overdue(state)
        lookup = None if lookups is None else self._lookups.asked(lookups, state)
        if lookups is None or handshake.announcing:
            return None if not overdue and handshake.may_wait() else 0
        if self._lookups.breaker_is_open(lookups):
            if not state.refused:
                state.refused = True
                self._counters.add("skipped_lookups")
            return 0
        if state.awaited is None and self._hits.most(state) <= computed:
            # No hit could bring more than vLLM has.
            state.offered_from = computed
            self._count(state, computed, 0)
            return 0
        done = lookup is not None and self._lookups.wait(lookups, lookup)
        if not done and not overdue and not (lookup and self._lookups.too_long(lookups, state)):
            return None
        if lookup is None or not done or lookup.given_up:
            state.gave_up = True
            self._counters.add("lookup_timeouts")
            return 0
        if not self._keys.trusts(state):
            return 0
        hit = self._hits.tokens(state, self._lookups.newest(state) or lookup, computed)
        has_room = hit > computed and self._hits.has_room(hit)
        end = self._admission.end_of_load(state, computed, hit) if has_room else computed
        if computed < end == hit and self._loads.shares(state, computed, hit):
            return None
        state.offered_from = computed
        first = self._count(state, computed, max(0, hit - computed))
        if first and end < hit:
            self._counters.add("refused_hits", end == computed)
            self._counters.add("refused_tokens", hit - end)
        return max(0, end - computed)

    def _count(self, state: RequestState, computed: int, found: int) -> bool:
        """Count what was looked up and found for a request, once; return whether it was now."""
        if state.counted:
            return False
        state.counted = True
        self._counters.add("lookup_tokens", state.request.num_tokens - computed)
        self._counters.add("hit_tokens", found)
        return True
