"""The answers to vLLM's question how much of a prompt the shelf has.

Owns the order in which a request is asked for, and what follows from each :class:`Outcome`: vLLM's
answer and counters.

Contracts
---------
* vLLM asks until it gets a number. A request waits for its lookup at most a second, and
  not at all where no hit may have more than vLLM has in memory.
* A request that brings a hand-over waits for it first (:mod:`kvshelf.vllm.scheduler.handovers`).
* While the weights are compared (:mod:`kvshelf.vllm.handshake`), no other request waits.
* While a storage breaker of the scheduler or of a worker is open there are no hits, and no
  other request waits.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import enum

from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.vllm.scheduler.admission import Admission
from kvshelf.vllm.scheduler.handovers import Handovers
from kvshelf.vllm.scheduler.loads import Loads
from kvshelf.vllm.scheduler.lookups import Lookups
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart


class Outcome(enum.Enum):
    """Why vLLM gets the answer that it gets."""

    #: The answer of a lookup.
    FOUND = enum.auto()
    #: Not known yet: vLLM asks again in the next step.
    WAITS = enum.auto()
    #: The same, until the load of another request is over that brings what this one needs.
    SHARES = enum.auto()
    #: The same, until the namespace is known.
    STARTS = enum.auto()
    #: The namespace was not known in time.
    NOT_STARTED = enum.auto()
    #: Nothing more is asked of the shelf: there was a load, the lookup was given up, or nothing is
    #: loaded any more.
    ENDED = enum.auto()
    #: vLLM would not use it, or another connector brings it.
    NOT_ASKED = enum.auto()
    #: No hit may have more than vLLM has.
    COVERED = enum.auto()
    #: vLLM computes the rest sooner than it could be loaded.
    SHORT = enum.auto()
    #: The weights are compared.
    COMPARING = enum.auto()
    #: A breaker is open.
    UNAVAILABLE = enum.auto()
    #: The lookup takes too long.
    TIMED_OUT = enum.auto()
    #: KV of the request's adapter cannot be loaded.
    ADAPTER_UNKNOWN = enum.auto()


class Answers(SharingPart):
    """Answers vLLM.

    Parameters
    ----------
    shared : Shared
    lookups : Lookups
    handovers : Handovers
    admission : Admission
    loads : Loads
    """

    def __init__(
        self,
        shared: Shared,
        lookups: Lookups,
        handovers: Handovers,
        admission: Admission,
        loads: Loads,
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
        found = self._answer(state, computed)
        if found is not None and state.unanswered is not None:
            # What vLLM makes the request wait behind that is not kvshelf's.
            state.answered_after, state.unanswered = clock() - state.unanswered, None
        if found == 0 and not self._requests.is_transferred(state.request):
            self._admission.computes(state, computed)
        return found

    def _answer(self, state: RequestState, computed: int) -> int | None:
        outcome = self._ask(state, computed)
        if outcome is Outcome.FOUND:
            return self._found(state, computed)
        if outcome is Outcome.COVERED:
            state.offered_from = computed
            self._count(state, computed, 0)
        if outcome is Outcome.TIMED_OUT:
            state.gave_up = True
            self._counters.add("lookup_timeouts")
        elif outcome is Outcome.UNAVAILABLE and not state.refused:
            state.refused = True
            self._counters.add("skipped_lookups")
        return None if outcome in (Outcome.WAITS, Outcome.SHARES, Outcome.STARTS) else 0

    def _ask(self, state: RequestState, computed: int) -> Outcome:
        """Take what is asked for a request a step further."""
        if not state.reads or self._requests.is_transferred(state.request):
            return Outcome.NOT_ASKED
        handshake = self._opening.handshake
        if state.loaded or state.gave_up or handshake.disabled or handshake.needs_version:
            return Outcome.ENDED
        if self._handovers.is_short(state, computed):
            return Outcome.SHORT
        if self._handovers.wait(state, computed):
            # For its producer, not for kvshelf.
            state.unanswered = None
            return Outcome.WAITS
        if handshake.checking:
            return Outcome.COMPARING
        lookups, overdue = self._opening.lookups, self._handovers.is_overdue(state)
        if lookups is None:
            starts = not overdue and handshake.may_wait()
            return Outcome.STARTS if starts else Outcome.NOT_STARTED
        lookup = self._lookups.asked(lookups, state)
        if self._lookups.breaker_is_open(lookups):
            return Outcome.UNAVAILABLE
        if self._is_covered(state, computed):
            return Outcome.COVERED
        outcome = self._wait(lookups, state, lookup, computed, overdue=overdue)
        self._lookups.held += outcome in (Outcome.WAITS, Outcome.SHARES)
        return outcome

    def _is_covered(self, state: RequestState, computed: int) -> bool:
        """Whether no hit may have more than the tokens that vLLM has computed."""
        if state.awaited is not None:
            return False
        return self._hits.most(state) <= computed

    def _wait(
        self,
        lookups: LookupService,
        state: RequestState,
        lookup: Lookup | None,
        computed: int,
        *,
        overdue: bool,
    ) -> Outcome:
        """Wait for a lookup, or for another's load."""
        if lookup is None or not self._lookups.wait(lookups, lookup):
            ends = overdue or (lookup is not None and self._lookups.too_long(lookups, state))
            return Outcome.TIMED_OUT if ends else Outcome.WAITS
        if lookup.given_up:
            return Outcome.TIMED_OUT
        if not self._keys.trusts(state):
            return Outcome.ADAPTER_UNKNOWN
        hit = self._hits.tokens(state, self._lookups.newest(state) or lookup, computed)
        shares = hit > computed and self._loads.shares(state, computed, hit)
        return Outcome.SHARES if shares else Outcome.FOUND

    def _found(self, state: RequestState, computed: int) -> int:
        """Offer what the lookup has found, and count it the first time."""
        lookup = state.lookup
        assert lookup is not None
        hit = self._hits.tokens(state, lookup, computed)
        state.offered_from = computed
        first = self._count(state, computed, max(0, hit - computed))
        if hit <= computed:
            return 0
        if not self._admission.admits(state, computed, hit):
            if first:
                self._counters.add("refused_hits")
                self._counters.add("refused_tokens", hit - computed)
            return 0
        return hit - computed

    def _count(self, state: RequestState, computed: int, found: int) -> bool:
        """Count what was looked up and found for a request, once; return whether it was now."""
        if state.counted:
            return False
        state.counted = True
        self._counters.add("lookup_tokens", state.request.num_tokens - computed)
        self._counters.add("hit_tokens", found)
        return True
