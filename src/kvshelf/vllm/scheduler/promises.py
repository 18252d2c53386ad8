"""What this engine promises to others of the prompts that it prefills for them.

Owns the promises of requests that want a hand-over, and the blocks that such requests keep until
the workers have gathered what they had postponed (:mod:`kvshelf.vllm.worker.postponed`).

Contracts
---------
* Of a request that wants a hand-over everything stored or planned is promised
  (:mod:`kvshelf.vllm.scheduler.promise`). While a worker's storage takes no writes, nothing is: a
  consumer's lookup finds what is on the shelf.
* A request keeps its blocks until the workers have reported it, if stores of it may be postponed.
* Of requests whose stores are unknown nothing is promised.
* A request that wants a hand-over, and of which nothing can be promised, is answered so: the
  consumer need not wait to learn it.
* Runs on the engine's step thread.

When this part fails, postponed stores wait for a later step, or for the end of their request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import Kind
from kvshelf.vllm.handover import asks_for_handover, no_handover
from kvshelf.vllm.metadata import Facts, Owner, StepMetadata
from kvshelf.vllm.scheduler.promise import Promise
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart


class Promises(SharingPart):
    """The promises of one engine.

    Parameters
    ----------
    shared : Shared
    """

    failure = "postponed stores could not be allowed"

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        #: Ranks whose storage takes no writes.
        self._refusing: set[int] = set()
        #: Requests with stores that workers postponed, and how often each had been preempted.
        self._postponed: dict[str, int] = {}
        #: Requests that ended and keep their blocks until all workers have gathered what they
        #: postponed.
        self._held: set[str] = set()

    def arrive(self, state: RequestState) -> None:
        """Promise the prompt of a request, if it wants a hand-over."""
        if state.addressable and asks_for_handover(state.request.kv_transfer_params):
            state.promise = Promise()

    def note(self, state: RequestState, kind: Kind, chunk: Chunk) -> None:
        """Note a kind of a chunk that is stored or planned to be, if the request hands over."""
        if state.promise is not None:
            namespace = self._opening.namespace
            assert namespace is not None
            state.promise.add(namespace, kind, chunk)

    def break_all(self, request_ids: Iterable[str]) -> None:
        """Promise nothing of requests whose stores are unknown."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.promise = None

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Name the requests whose postponed stores workers may gather.

        Of those of this step: vLLM keeps their blocks until it has the step's output. But the
        blocks of a request that was preempted since then may be others'.
        """
        for request_id, preempted in list(self._postponed.items()):
            state = self._requests.get(request_id)
            if state is None or state.request.num_preemptions != preempted:
                del self._postponed[request_id]
                self._lose((request_id, preempted))
            elif request_id in output.num_scheduled_tokens:
                meta.again.append((request_id, preempted))

    def lose(self) -> None:
        """Promise nothing of any request."""
        self.break_all(self._requests)

    def take_facts(self, rank: int, facts: Facts) -> None:
        """Take what a rank reports of its stores."""
        if facts.writes_refused is not None:
            (self._refusing.add if facts.writes_refused else self._refusing.discard)(rank)
        for request_id, preempted in facts.postponed:
            state = self._requests.get(request_id)
            if state is not None and state.request.num_preemptions == preempted:
                self._postponed[request_id] = preempted
            elif request_id not in self._held:
                self._lose((request_id, preempted))

    def _lose(self, owner: Owner) -> None:
        """Have postponed stores dropped whose blocks may be others'."""
        self._orders.next.gone.append(owner)
        state = self._requests.get(owner[0])
        if state is not None:
            # Lost chunks are stored when they are in the cache again.
            state.stores.next_chunk = 0

    def end(self, state: RequestState) -> tuple[bool, dict[str, Any] | None]:
        """Return whether a request that ends keeps its blocks, and what is promised of it."""
        request = state.request
        preempted = self._postponed.pop(state.id, None)
        orders = self._orders.next
        if preempted is not None:
            orders.gone.append((state.id, preempted))
        handover, prompt = None, request.num_prompt_tokens
        if state.promise and not self._refusing and request.num_computed_tokens >= prompt:
            handover = state.promise.handover(self._groups, prompt, self._size)
        if handover is None:
            asked = self._engine.hands_over and asks_for_handover(request.kv_transfer_params)
            return False, no_handover() if asked else None
        self._counters.add("handovers_promised")
        owner = (state.id, request.num_preemptions)
        # Workers have not reported yet which stores they postponed in the last steps.
        planned = state.stores.at
        unknown = planned and self._steps.count - planned <= self._steps.in_flight
        if state.loading or not (unknown or owner in orders.gone):
            return False, handover.params()
        orders.gone = [gone for gone in orders.gone if gone != owner]
        self._held.add(state.id)
        orders.held.append(owner)
        return True, handover.params()

    def released(self, request_ids: Iterable[str]) -> None:
        """Note that all workers have reported requests that kept their blocks."""
        self._held.difference_update(request_ids)
