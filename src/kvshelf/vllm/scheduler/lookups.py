"""The lookups of requests: started, waited for, renewed and given up.

Owns which requests have a lookup, what enters their chunk keys beside tokens, how long a step waits
for a lookup, and what is known of the storage's health.

Contracts
---------
* Of a long queue only the first requests have a lookup and keys. vLLM asks for the whole queue
  while no request is answered, so its question starts lookups only of the first ones that a step
  asks for: those behind them have their turn when these are answered.
* All waits for lookups in one step together take at most a hundredth of what the last step took: a
  request that is not answered now is asked again in the next step. Steps that compute nothing may
  take longer, where the engine says that a step may.
* A preempted and resumed request gets a new lookup. So do the first ones of the queue when their
  answers are older than a second, unless all of the prompt was found. The old answer counts until
  the new one is there: vLLM serves others while a request has none.
* A hit is recorded as a use of all that it needs, on the lookup thread, also where vLLM's prefix
  cache has a part of it or all (:mod:`kvshelf.capacity.uses`).
* Runs on the engine's step thread. Lookups run on theirs, and call :meth:`Lookups.chain`.

When :meth:`Lookups.plan` fails, the lookups are made when vLLM asks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from kvshelf.format.keys import KeyChain, MultimodalItem, salt_group_of
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.vllm.metadata import WorkerFacts
from kvshelf.vllm.scheduler.drafter import DraftScheduler, draft_chunks
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.requests import RequestState

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


class Lookups:
    """The lookups of one engine.

    Parameters
    ----------
    engine : SchedulerEngine
    hits : Hits
    drafter : DraftScheduler

    Attributes
    ----------
    ahead, later : dict
        Waiting requests of which no load was planned, in order: with a lookup, and later ones
        without.
    """

    def __init__(self, engine: SchedulerEngine, hits: Hits, drafter: DraftScheduler) -> None:
        self._engine, self._hits, self._drafter = engine, hits, drafter
        self._requests, self._size = engine.requests, engine.config.chunk_size
        self.ahead: dict[str, None] = {}
        self.later: OrderedDict[str, None] = OrderedDict()
        #: Ranks whose storage breaker is open.
        self._open_breakers: set[int] = set()

    # ------------------------------------------------------------- steps

    def plan(self, output: Any) -> None:
        """Start lookups of the next waiting requests, in place of those that no longer wait."""
        for waiting in (self.ahead, self.later):
            for request_id in waiting.keys() & output.num_scheduled_tokens.keys():
                del waiting[request_id]
        service = self._engine.usable_lookup_service
        if service is None:
            return
        while len(self.ahead) < LONG_QUEUE and self.later:
            request_id, _ = self.later.popitem(last=False)
            state = self._requests.get(request_id)
            if state is not None and state.lookup is None:
                self.start(service, state)
        # Look up anew the first waiting request whose answer is old: one a step.
        old = time.monotonic() - _ANSWER_SECONDS
        for request_id in islice(self.ahead, _FRONT):
            state = self._requests[request_id]
            lookup = self.newest(state)
            if lookup is None or not lookup.done or lookup.chain is None or state.newer is not None:
                continue
            finds_more = lookup.hit_chunks < len(lookup.chain.chunks) and state.awaited is None
            if finds_more and lookup.as_of < old:
                state.waiting_since, state.newer = None, self._submit(service, state)
                return

    # ------------------------------------------------------------- begin and end

    def start_in_turn(self, state: RequestState) -> None:
        """Start the lookup of a request that waits, or leave it for later in a long queue.

        Keys of all prompts in such a queue would take much memory, and be old answers.
        """
        service = self._engine.usable_lookup_service
        if service is None or not state.addressable:
            return
        has_turn = state.id in self.ahead or len(self.ahead) < LONG_QUEUE
        if has_turn or state.awaited is not None:
            self.start(service, state)
        else:
            self.later[state.id] = None

    def look_up_again(self, state: RequestState) -> None:
        """Look up a request anew that vLLM has preempted.

        Its answer counts until then, with the chunks that it has had stored.
        """
        service, lookup = self._engine.usable_lookup_service, self.newest(state)
        if lookup is None or (lookup.done and lookup.chain is None):
            state.drop_lookup()
        elif lookup.chain is not None:
            if not self._engine.groups.mixed:
                stored = min(state.stores.next_full, len(lookup.chain.chunks))
                lookup.hit_chunks = lookup.full_chunks = max(lookup.full_chunks, stored)
            state.newer = None if service is None else self._submit(service, state)

    def start_again(self) -> None:
        """Start the lookups of requests that arrived before lookups were possible."""
        for state in self._requests.values():
            if state.lookup is None and state.waits:
                self.start_in_turn(state)

    def asked(self, service: LookupService, state: RequestState) -> Lookup | None:
        """Return the lookup of a request that vLLM asks for; None if others come first."""
        if state.lookup is None and self._engine.unanswered_in_step < _FRONT:
            self.start(service, state)
        return state.lookup

    def start(self, service: LookupService, state: RequestState) -> Lookup:
        """Start the lookup of a request."""
        self.later.pop(state.id, None)
        # There is a bound on requests that wait for hand-overs elsewhere.
        if state.request.num_computed_tokens == 0 and state.awaited is None:
            self.ahead[state.id] = None
        state.lookup = self._submit(service, state)
        return state.lookup

    def _submit(self, service: LookupService, state: RequestState) -> Lookup:
        namespace, request = self._engine.handshake.namespace, state.request
        assert namespace is not None
        digest, lora = namespace.digest, request.lora_request
        hashed = None if lora is None else self._engine.adapters.ask(lora)

        def make_chain() -> KeyChain | None:
            adapter = b"" if hashed is None else hashed.result()
            return None if adapter is None else self.chain(state, digest, adapter)

        # The list itself, of which the lookup thread takes slices: vLLM only ever appends to the
        # tokens of a request with an address.
        return service.submit(
            request._all_token_ids,
            make_chain,
            ends=self._hits.ends(state),
            on_done=self._recorder() if state.reads else None,
            ready=hashed,
        )

    def _recorder(self) -> Callable[[Lookup], None] | None:
        """Return the function that records the hit of a lookup that begins now, on its thread."""
        uses, views = self._engine.uses, self._engine.views
        if uses is None:
            return None
        drafts = None if self._drafter.left_out else self._drafter.view

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

    def finished(self, state: RequestState) -> None:
        """Forget a request."""
        self.ahead.pop(state.id, None)
        self.later.pop(state.id, None)
        state.cancel_lookups()

    def reset(self) -> None:
        """Forget what is known of the shelf; what is being computed keeps its keys."""
        self._engine.failed.clear()
        if self._engine.lookup_service is not None:
            self._engine.lookup_service.forget()
        for state in self._requests.values():
            if state.waits:
                state.drop_lookup()

    # ------------------------------------------------------------- keys

    def chain(self, state: RequestState, namespace: bytes, adapter: bytes = b"") -> KeyChain:
        """Return the chain of a request's keys in a namespace, without tokens.

        Parameters
        ----------
        state : RequestState
        namespace : bytes
            Its digest.
        adapter : bytes
            The digest of the request's LoRA adapter; empty without one.
        """
        request, config = state.request, self._engine.config
        salt = request.cache_salt or ""
        return self._drafter.chain(
            namespace,
            self._size,
            salt=salt,
            lora_digest=adapter,
            items=[
                MultimodalItem(
                    self._requests.item_ids.in_key(feature, request.lora_request),
                    feature.mm_position.offset,
                    feature.mm_position.length,
                )
                for feature in request.mm_features
            ],
            salt_group=salt_group_of(salt) if config.group_by_salt else "_",
        )

    def chain_for_stores(
        self, state: RequestState, lookup: Lookup, namespace: bytes
    ) -> KeyChain | None:
        """Return the chain of a request whose chunks can be stored now; None if there is none yet.

        What is computed in the meantime is stored in a later step. But a prompt that is handed over
        often has only one, so its keys do not wait for the answer of a slow storage.
        """
        if lookup.done:
            return lookup.chain
        if state.promise is None or state.request.lora_request is not None:
            return None
        return self.chain(state, namespace)

    # ------------------------------------------------------------- waiting

    def wait(self, service: LookupService, lookup: Lookup) -> bool:
        """Wait within the step's budget; return whether the lookup is done."""
        if lookup.done:
            return True
        engine, is_idle = self._engine, self._engine.may_wait
        share = min(_STEP_SHARE * engine.step_seconds, _LONGEST_LOOKUP_SECONDS)
        budget = (_IDLE_LOOKUP_SECONDS if is_idle else share) - engine.lookup_wait
        # A wait that times out lasts longer than its timeout: until the lookup thread releases the
        # GIL.
        if budget <= 0 or not (is_idle or service.answers_soon(lookup)):
            return False
        begin = time.monotonic()
        has_ended = lookup.wait(budget)
        engine.lookup_wait += time.monotonic() - begin
        return has_ended

    def too_long(self, service: LookupService, state: RequestState) -> bool:
        """Whether a request has waited for its lookup long enough."""
        now = time.monotonic()
        if state.waiting_since is None:
            state.waiting_since = now
        waited = now - state.waiting_since
        # Once the storage has delayed one request for this long, the next does not wait for it.
        return waited >= LOOKUP_SECONDS or service.stalled(LOOKUP_SECONDS)

    @staticmethod
    def newest(state: RequestState) -> Lookup | None:
        """Return a request's lookup: the newer one, once that has an answer."""
        if state.newer is not None and state.newer.done:
            if not state.newer.given_up:
                state.lookup = state.newer
            state.newer = None
        return state.lookup

    # ------------------------------------------------------------- the storage

    def take_facts(self, rank: int, facts: WorkerFacts) -> None:
        """Take what a rank reports of the storage."""
        for number in facts.other_adapters:
            self._engine.adapters.distrust(number)
        if facts.breaker_open is not None:
            (self._open_breakers.add if facts.breaker_open else self._open_breakers.discard)(rank)

    def breaker_is_open(self, service: LookupService) -> bool:
        """Whether the breaker of the scheduler's storage, or of a worker's, is open."""
        engine = self._engine
        paused = engine.rests and time.monotonic() - engine.step_began > _STALE_SECONDS
        if self._open_breakers and paused:
            # Workers report in steps only. One whose breaker is still open reports it again when
            # it refuses a load.
            self._open_breakers.clear()
        return bool(self._open_breakers) or not service.available

    def loads_are_paused(self) -> bool:
        """Whether nothing can be loaded now."""
        service = self._engine.lookup_service
        return not self._engine.serves or service is None or self.breaker_is_open(service)
