"""The lookups of requests: started, waited for, renewed and given up.

Owns which requests have a lookup, how long a step waits for one, and what is known of the storage's
health.

Contracts
---------
* Of a long queue only the first requests have a lookup and keys. vLLM asks for the whole queue
  while no request is answered, so its question starts lookups only of the first ones that a step
  asks for: those behind them have their turn when these are answered.
* All waits for lookups in one step together take at most a hundredth of what the last step took: a
  request that is not answered now is asked again in the next step. Steps that compute nothing may
  take longer, where :class:`~kvshelf.vllm.scheduler.steps.Steps` says that one may.
* A preempted and resumed request gets a new lookup. So do the first ones of the queue when their
  answers are older than a second, unless all of the prompt was found. The old answer counts until
  the new one is there: vLLM serves others while a request has none.
* A hit is recorded as a use of all that it needs, on the lookup thread, also where vLLM's prefix
  cache has a part of it or all (:mod:`kvshelf.capacity.uses`).
* Runs on the engine's step thread, and lookups on theirs.

When this part fails, its lookups are made when vLLM asks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from kvshelf.format.keys import KeyChain
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.vllm.metadata import Facts, StepMetadata
from kvshelf.vllm.scheduler.drafts import draft_chunks
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart

#: Seconds that a request waits for its lookup, before it is computed as if nothing had been found:
#: as long as a prompt of some thousand tokens takes.
LOOKUP_SECONDS: Final = 1.0
#: Seconds that an idle step may wait for lookups: most are done by then, and it computes nothing.
_IDLE_LOOKUP_SECONDS: Final = 3e-3
#: Share of the last step that the next one may wait for lookups, and the most of it in seconds: a
#: request that is not answered waits for the whole step.
_STEP_SHARE: Final = 0.01
_LONGEST_LOOKUP_SECONDS: Final = 4e-3
#: After this long without a step, a worker's last report of its breaker no longer counts.
_STALE_SECONDS: Final = 1.0
#: Age of an answer at which one of the first waiting requests is looked up again.
_ANSWER_SECONDS: Final = 1.0
#: Waiting requests whose lookups are made before vLLM asks for them; and those that one step asks
#: for and leaves waiting.
LONG_QUEUE: Final = 256
#: The front of the queue: the first of these, whose answers are renewed; and of the requests that
#: one step asks for and leaves waiting, the first, whose lookups the question starts.
_FRONT: Final = 16


class Lookups(SharingPart):
    """The lookups of one engine.

    Parameters
    ----------
    shared : Shared

    Attributes
    ----------
    waiting_in_step : int
        Requests that wait for a lookup or for the load of another, of those that vLLM has asked for
        since the last step.
    """

    failure = "lookups of waiting requests could not be started"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        #: Waiting requests with a lookup, and later ones without, in order.
        self._ahead: dict[str, None] = {}
        self._later: OrderedDict[str, None] = OrderedDict()
        #: Ranks whose storage breaker is open.
        self._open_breakers: set[int] = set()
        self.waiting_in_step = 0
        #: How long this step has waited for lookups.
        self._waited = 0.0

    # ------------------------------------------------------------- steps

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Start lookups of the next waiting requests, in place of those that no longer wait."""
        self._waited, self.waiting_in_step = 0.0, 0
        for waiting in (self._ahead, self._later):
            for request_id in waiting.keys() & output.num_scheduled_tokens.keys():
                del waiting[request_id]
        lookups = self._opening.looks_up
        if lookups is None:
            return
        while len(self._ahead) < LONG_QUEUE and self._later:
            request_id, _ = self._later.popitem(last=False)
            state = self._requests.get(request_id)
            if state is not None and state.lookup is None:
                self.start(lookups, state)
        self._renew_first(lookups)

    def _renew_first(self, lookups: LookupService) -> None:
        """Look up anew the first waiting request whose answer is old: one a step."""
        old = time.monotonic() - _ANSWER_SECONDS
        for request_id in islice(self._ahead, _FRONT):
            state = self._requests[request_id]
            lookup = self.newest(state)
            if lookup is None or not lookup.done or lookup.chain is None or state.newer is not None:
                continue
            finds_more = lookup.hit_chunks < len(lookup.chain.chunks) and state.awaited is None
            if finds_more and lookup.as_of < old:
                state.waiting_since, state.newer = None, self._submit(lookups, state)
                return

    # ------------------------------------------------------------- begin and end

    def start_in_turn(self, state: RequestState) -> None:
        """Start the lookup of a request that waits, or leave it for later in a long queue.

        Keys of all prompts in such a queue would take much memory, and be old answers.
        """
        lookups = self._opening.looks_up
        if lookups is None or not state.addressable:
            return
        has_turn = state.id in self._ahead or len(self._ahead) < LONG_QUEUE
        if has_turn or state.awaited is not None:
            self.start(lookups, state)
        else:
            self._later[state.id] = None

    def look_up_again(self, state: RequestState) -> None:
        """Look up a request anew that vLLM has preempted.

        Its answer counts until then, with the chunks that it has had stored.
        """
        lookups, lookup = self._opening.looks_up, self.newest(state)
        if lookup is None or (lookup.done and lookup.chain is None):
            state.drop_lookup()
        elif lookup.chain is not None:
            if not self._groups.mixed:
                stored = min(state.stores.next_full, len(lookup.chain.chunks))
                lookup.hit_chunks = lookup.full_chunks = max(lookup.full_chunks, stored)
            state.newer = None if lookups is None else self._submit(lookups, state)

    def start_again(self) -> None:
        """Start the lookups of requests that arrived before lookups were possible."""
        for state in self._requests.values():
            if state.lookup is None and state.waits:
                self.start_in_turn(state)

    def asked(self, lookups: LookupService, state: RequestState) -> Lookup | None:
        """Return the lookup of a request that vLLM asks for; None if others come first."""
        if state.lookup is None and self.waiting_in_step < _FRONT:
            self.start(lookups, state)
        return state.lookup

    def start(self, lookups: LookupService, state: RequestState) -> Lookup:
        """Start the lookup of a request."""
        self._later.pop(state.id, None)
        # There is a bound on requests that wait for hand-overs elsewhere.
        if state.request.num_computed_tokens == 0 and state.awaited is None:
            self._ahead[state.id] = None
        state.lookup = self._submit(lookups, state)
        return state.lookup

    def _submit(self, lookups: LookupService, state: RequestState) -> Lookup:
        namespace, request = self._opening.namespace, state.request
        assert namespace is not None
        digest, lora = namespace.digest, request.lora_request
        hashed = None if lora is None else self._keys.adapters.ask(lora)

        def make_chain() -> KeyChain | None:
            found = b"" if hashed is None else hashed.result()
            return None if found is None else self._keys.chain(state, digest, found)

        # The list itself, of which the lookup thread takes slices: vLLM only ever appends to the
        # tokens of a request with an address.
        return lookups.submit(
            request._all_token_ids,
            make_chain,
            ends=self._hits.ends(state),
            on_done=self._recorder() if state.reads else None,
            ready=hashed,
        )

    def _recorder(self) -> Callable[[Lookup], None] | None:
        """Return the function that records the hit of a lookup that begins now, on its thread."""
        uses, views, drafts = self._engine.uses, self._opening.views, self._drafts.view
        if uses is None:
            return None

        def record(lookup: Lookup) -> None:
            chain, end = lookup.chain, lookup.first_chunk + lookup.hit_chunks
            if chain is None or not lookup.hit_chunks:
                return
            for kind, indices in self._hits.ranges(0, end * self._size).items():
                # The step thread may append chunks meanwhile, behind the hit.
                uses.note(views[kind], chain.chunks[indices.start : indices.stop])
            drafted = draft_chunks(chain)[:end]
            if drafts is not None and drafted:
                uses.note(drafts, drafted)

        return record

    def loading(self, state: RequestState) -> None:
        """Note that a request no longer waits: a load of it was planned."""
        self._ahead.pop(state.id, None)

    def finished(self, state: RequestState) -> None:
        """Forget a request."""
        self._ahead.pop(state.id, None)
        self._later.pop(state.id, None)
        state.cancel_lookups()

    def reset(self) -> None:
        """Forget what is known of the shelf; what is being computed keeps its keys."""
        self._engine.failed.clear()
        if self._opening.lookups is not None:
            self._opening.lookups.forget()
        for state in self._requests.values():
            if state.waits:
                state.drop_lookup()

    # ------------------------------------------------------------- waiting

    def wait(self, lookups: LookupService, lookup: Lookup) -> bool:
        """Wait within the step's budget; return whether the lookup is done."""
        if lookup.done:
            return True
        idle = self._steps.may_wait
        share = min(_STEP_SHARE * self._steps.seconds, _LONGEST_LOOKUP_SECONDS)
        left = (_IDLE_LOOKUP_SECONDS if idle else share) - self._waited
        # A wait that times out lasts longer than its timeout: until the lookup thread releases the
        # GIL.
        if left <= 0 or not (idle or lookups.answers_soon(lookup)):
            return False
        begin = time.monotonic()
        done = lookup.wait(left)
        self._waited += time.monotonic() - begin
        return done

    def too_long(self, lookups: LookupService, state: RequestState) -> bool:
        """Whether a request has waited for its lookup long enough."""
        now = time.monotonic()
        if state.waiting_since is None:
            state.waiting_since = now
        waited = now - state.waiting_since
        # Once the storage has delayed one request for this long, the next does not wait for it.
        return waited >= LOOKUP_SECONDS or lookups.stalled(LOOKUP_SECONDS)

    @staticmethod
    def newest(state: RequestState) -> Lookup | None:
        """Return a request's lookup: the newer one, once that has an answer."""
        if state.newer is not None and state.newer.done:
            if not state.newer.given_up:
                state.lookup = state.newer
            state.newer = None
        return state.lookup

    # ------------------------------------------------------------- the storage

    def take_facts(self, rank: int, facts: Facts) -> None:
        """Take what a rank reports of the storage."""
        for number in facts.other_adapters:
            self._keys.adapters.distrust(number)
        if facts.breaker_open is not None:
            (self._open_breakers.add if facts.breaker_open else self._open_breakers.discard)(rank)

    def breaker_is_open(self, lookups: LookupService) -> bool:
        """Whether the breaker of the scheduler's storage, or of a worker's, is open."""
        paused = self._steps.rests and time.monotonic() - self._steps.began > _STALE_SECONDS
        if self._open_breakers and paused:
            # Workers report in steps only. One whose breaker is still open reports it again when
            # it refuses a load.
            self._open_breakers.clear()
        return bool(self._open_breakers) or not lookups.available

    def loads_are_paused(self) -> bool:
        """Whether nothing can be loaded now."""
        lookups = self._opening.lookups
        return not self._opening.serves or lookups is None or self.breaker_is_open(lookups)
