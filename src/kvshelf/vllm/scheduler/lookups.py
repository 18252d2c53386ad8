"""The lookups of requests: started, waited for, renewed and given up.

Owns which requests have a lookup, how long a step waits for one, and what is known of the storage's
health and of what appeared on it.

Contracts
---------
* Of a long queue only the first requests have a lookup and keys.
* All waits for lookups in one step together take at most the lookup budget, or a hundredth of what
  the last step took: a request that is not answered now is asked again in the next step. Steps
  that compute nothing may take longer, where :class:`~kvshelf.vllm.scheduler.steps.Steps` says that
  one may.
* A preempted and resumed request gets a new lookup. So does one that vLLM polls when its answer is
  older than a second, or a chunk that it missed was stored since, unless all of it was found. It
  waits for this lookup as for the first, and keeps the old answer if there is none in time.
* A hit is recorded as a use of all that it needs, on the lookup thread, also where vLLM's prefix
  cache has a part of it or all (:mod:`kvshelf.capacity.uses`).
* Runs on the engine's step thread, but :meth:`Lookups.note_there` on any, and lookups on theirs.

When this part fails, its lookups are made when vLLM asks.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvshelf.format.kinds import kind_key
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.vllm.metadata import StepMetadata, WorkerMetadata
from kvshelf.vllm.scheduler.drafts import draft_chunks
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart

#: An idle engine loses nothing by a wait as long as an empty step; seconds.
_IDLE_LOOKUP_SECONDS: Final = 3e-3
#: Share of the last step that the next one may wait for lookups, and the most of it in seconds.
_STEP_SHARE: Final = 0.01
_LONGEST_LOOKUP_SECONDS: Final = 4e-3
#: After this long without a step, a worker's last report of its breaker no longer counts.
_STALE_SECONDS: Final = 1.0
#: Age of an answer at which a waiting request is looked up again; doubled each time.
_ANSWER_SECONDS: Final = 1.0
#: Most chunks that are remembered as stored recently.
_PUBLISHED_REMEMBERED: Final = 4096
#: Waiting requests whose lookups are made before vLLM polls them.
_LOOKUPS_AHEAD: Final = 256


class Lookups(SharingPart):
    """The lookups of one engine.

    Parameters
    ----------
    shared : Shared
    """

    failure = "lookups of waiting requests could not be started"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        #: Waiting requests with a lookup, and later ones without, in order.
        self._ahead: set[str] = set()
        self._later: OrderedDict[str, None] = OrderedDict()
        #: When a kind of a chunk appeared, by kind key, the latest last.
        self._published: OrderedDict[bytes, float] = OrderedDict()
        self._publishing = threading.Lock()
        #: Ranks whose storage breaker is open.
        self._open_breakers: set[int] = set()
        #: How long this step has waited for lookups.
        self._waited = 0.0

    def __len__(self) -> int:
        """Return how many waiting requests have a lookup or will get one."""
        return len(self._ahead) + len(self._later)

    # ------------------------------------------------------------- steps

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Start lookups of the next waiting requests, in place of those that no longer wait."""
        self._waited = 0.0
        if self._ahead:
            self._ahead.difference_update(output.num_scheduled_tokens)
        lookups = self._opening.looks_up
        if lookups is None or not self._later:
            return
        for request_id in output.num_scheduled_tokens:
            self._later.pop(request_id, None)
        while len(self._ahead) < _LOOKUPS_AHEAD and self._later:
            request_id, _ = self._later.popitem(last=False)
            state = self._requests.get(request_id)
            if state is not None and state.lookup is None:
                self.start(lookups, state)

    def _budget(self, *, idle: bool) -> float:
        """Return how long this step may wait for lookups, in seconds."""
        budget = self._config.lookup_budget_ms * 1e-3
        if idle:
            return max(budget, _IDLE_LOOKUP_SECONDS)
        if not budget:
            return 0.0
        return max(budget, min(_STEP_SHARE * self._steps.seconds, _LONGEST_LOOKUP_SECONDS))

    # ------------------------------------------------------------- begin and end

    def start_in_turn(self, state: RequestState) -> None:
        """Start the lookup of a request that waits, or leave it for later in a long queue.

        Keys of all prompts in such a queue would take much memory, and be old answers.
        """
        lookups = self._opening.looks_up
        if lookups is None or not state.addressable:
            return
        has_turn = state.id in self._ahead or len(self._ahead) < _LOOKUPS_AHEAD
        if has_turn or state.awaited is not None:
            self.start(lookups, state)
        else:
            self._later[state.id] = None

    def start_again(self) -> None:
        """Start the lookups of requests that arrived before lookups were possible."""
        for state in self._requests.values():
            if state.lookup is None and state.waits:
                self.start_in_turn(state)

    def start(self, lookups: LookupService, state: RequestState) -> Lookup:
        """Start the lookup of a request."""
        self._later.pop(state.id, None)
        if state.request.num_computed_tokens == 0:
            self._ahead.add(state.id)
        state.lookup = self._submit(lookups, state)
        return state.lookup

    def _submit(self, lookups: LookupService, state: RequestState) -> Lookup:
        namespace, request = self._opening.namespace, state.request
        assert namespace is not None
        digest, lora = namespace.digest, request.lora_request
        adapter: bytes | None = b""

        def prepare(go_on: Callable[[], None]) -> None:
            def tell(found: bytes | None) -> None:
                nonlocal adapter
                adapter = found
                go_on()

            self._keys.adapters.ask(lora, tell)

        # The list itself, of which the lookup thread takes slices: vLLM only ever appends to the
        # tokens of a request with an address.
        return lookups.submit(
            request._all_token_ids,
            lambda: None if adapter is None else self._keys.chain(state, digest, adapter),
            ends=self._hits.ends(state),
            tail_end=request.num_prompt_tokens if self._opening.caches_tail_of(request) else 0,
            on_done=self._recorder() if state.reads else None,
            prepare=None if lora is None else prepare,
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
        self._ahead.discard(state.id)

    def finished(self, state: RequestState) -> None:
        """Forget a request."""
        self._ahead.discard(state.id)
        self._later.pop(state.id, None)
        state.cancel_lookups()

    def reset(self) -> None:
        """Forget what is known of the shelf; what is being computed keeps its keys."""
        self._engine.failed.clear()
        if self._opening.lookups is not None:
            self._opening.lookups.forget()
        self._keys.adapters.prefix_cache_was_reset()
        for state in self._requests.values():
            if state.waits:
                state.drop_lookup()

    # ------------------------------------------------------------- waiting

    def wait(self, lookups: LookupService, lookup: Lookup) -> bool:
        """Wait within the step's budget; return whether the lookup is done."""
        if lookup.done:
            return True
        idle = self._steps.may_wait
        left = self._budget(idle=idle) - self._waited
        # A wait that times out lasts longer than its timeout: until the lookup thread releases the
        # GIL.
        if left <= 0 or not (idle or lookups.may_be_done_within(lookup, left)):
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
        longest = self._config.lookup_wait_s
        # Once the storage has delayed one request for this long, the next does not wait for it.
        return now - state.waiting_since >= longest or lookups.stalled(longest)

    def newest(self, lookups: LookupService, state: RequestState, lookup: Lookup) -> Lookup | None:
        """Return a request's lookup with a recent answer; None while it runs.

        A request may have waited for long, and what its prompt begins with may be stored by now.
        """
        if state.newer is None:
            if not self._is_old(state, lookup):
                return lookup
            state.renewals += 1
            state.waiting_since = None
            state.newer = self._submit(lookups, state)
        newer = state.newer
        if not self.wait(lookups, newer) and not self.too_long(lookups, state):
            return None
        state.newer = None
        if newer.done and not newer.given_up:
            state.lookup = newer
        else:
            newer.cancel()
        return state.lookup

    def _is_old(self, state: RequestState, lookup: Lookup) -> bool:
        """Whether a new lookup probably finds more."""
        chain = lookup.chain
        if chain is None or state.awaited is not None or lookup.hit_chunks >= len(chain.chunks):
            return False
        if time.monotonic() - lookup.as_of > _ANSWER_SECONDS * 2**state.renewals:
            return True
        missing = chain.chunks[lookup.full_chunks :][:1] or chain.chunks[-1:]
        found = [self._published.get(kind_key(missing[0].key, kind)) for kind in self._groups.kinds]
        return any(at is not None and at > lookup.as_of for at in found)

    # ------------------------------------------------------------- the storage

    def take_report(self, meta: WorkerMetadata) -> None:
        """Take what workers report of the storage."""
        self.note_there(meta.published)
        for number in meta.other_adapters:
            self._keys.adapters.distrust(number)
        for rank, is_open in meta.breaker_open.items():
            (self._open_breakers.add if is_open else self._open_breakers.discard)(rank)

    def note_there(self, keys: Sequence[bytes]) -> None:
        """Note, on any thread, kinds of chunks that have appeared on the shelf."""
        lookups = self._opening.lookups
        if lookups is None:
            return
        lookups.note_published(keys)
        self._note_published(keys)
        for key in keys:
            if not self._engine.failed.is_bad(key):
                # A chunk that was missing and is stored now counts as present again.
                self._engine.failed.forget(key)

    def _note_published(self, keys: Sequence[bytes]) -> None:
        now = time.monotonic()
        with self._publishing:
            for key in keys:
                self._published[key] = now
                self._published.move_to_end(key)
            while len(self._published) > _PUBLISHED_REMEMBERED:
                self._published.popitem(last=False)

    def breaker_is_open(self, lookups: LookupService) -> bool:
        """Whether the breaker of the scheduler's storage, or of a worker's, is open."""
        if self._open_breakers and time.monotonic() - self._steps.began > _STALE_SECONDS:
            # Workers report in steps only. One whose breaker is still open reports it again when
            # it refuses a load.
            self._open_breakers.clear()
        return bool(self._open_breakers) or not lookups.available

    def loads_are_paused(self) -> bool:
        """Whether nothing can be loaded now."""
        lookups = self._opening.lookups
        return not self._opening.serves or lookups is None or self.breaker_is_open(lookups)
