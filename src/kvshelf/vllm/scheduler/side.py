"""The scheduler half of the connector: what vLLM calls, and the order of a step.

Owns the components, the order in which a step plans them, and the order of the checks that lead to
the answer how much of a prompt the shelf has. Each component has its own state and contracts.

Contracts of a step
-------------------
* A component that raises is logged, and stops no other. The step stores nothing of what was planned
  until then, and what was promised of its requests is broken. Loads always reach the workers.
* What the workers must learn is named in each step until all of them have answered.
* Each component takes what workers report, and the end of a request, by itself.

Contracts of an answer
----------------------
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

All methods run on the engine's step thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.logs import RateLimitedLog
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.vllm.handover import asks_for_handover
from kvshelf.vllm.messages import Inbox
from kvshelf.vllm.metadata import StepMetadata, WorkerFacts, WorkerMetadata
from kvshelf.vllm.scheduler.admission import Admission
from kvshelf.vllm.scheduler.drafter import DraftScheduler
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.handovers import Handovers
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.loads import SchedulerLoads
from kvshelf.vllm.scheduler.lookups import LONG_QUEUE, Lookups
from kvshelf.vllm.scheduler.periods import BlockPeriods
from kvshelf.vllm.scheduler.read_ahead import ReadAheadPlan
from kvshelf.vllm.scheduler.requests import Promise, RequestState
from kvshelf.vllm.scheduler.stores import SchedulerStores
from kvshelf.vllm.weight_changes import READING, watch_engine

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Scheduler half of :class:`kvshelf.vllm.connector.KVShelfConnector`.

    Parameters
    ----------
    engine : SchedulerEngine

    Attributes
    ----------
    engine : SchedulerEngine
    counters : Counters
    requests : Requests
    hits : Hits
    drafter : DraftScheduler
    lookups : Lookups
    handovers : Handovers
    admission : Admission
    periods : BlockPeriods
    read_ahead : ReadAheadPlan
    loads : SchedulerLoads
    stores : SchedulerStores
    """

    def __init__(self, engine: SchedulerEngine) -> None:
        self.engine = engine
        self.counters, self.requests = engine.counters, engine.requests
        self._log = RateLimitedLog(logger)
        self.hits = Hits(engine)
        self.drafter = DraftScheduler(engine)
        self.lookups = Lookups(engine, self.hits, self.drafter)
        self.handovers = Handovers(engine, self.hits, self.lookups)
        self.admission = Admission(engine, self.hits)
        self.periods = BlockPeriods(engine, self.hits)
        self.read_ahead = ReadAheadPlan(engine, self.hits, self.lookups)
        self.loads = SchedulerLoads(
            engine, self.hits, self.drafter, self.periods, self.read_ahead, self.admission
        )
        self.stores = SchedulerStores(
            engine,
            hits=self.hits,
            drafter=self.drafter,
            lookups=self.lookups,
            periods=self.periods,
            read_ahead=self.read_ahead,
        )
        #: Up to which number each rank has taken the orders.
        self._heard = dict.fromkeys(range(engine.ranks), 0)
        #: The ranks that have sent facts since the last step.
        self._answer: set[int] = set()
        self._facts = {rank: Inbox(self._receivers(rank)) for rank in range(engine.ranks)}
        watch_engine(self)

    @property
    def namespace(self) -> Namespace | None:
        """The engine's namespace; None while it is not known."""
        return self.engine.handshake.namespace

    @property
    def disabled(self) -> bool:
        """Whether nothing is loaded or stored any more; the log says why."""
        return self.engine.handshake.disabled

    def _contain(self, failure: str, call: Callable[..., object], *arguments: Any) -> None:
        """Call a component; log `failure` if it raises."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - the other components are called all the same
            self._log.error("%s", failure, exc_info=error)

    # ------------------------------------------------------------- requests

    def new_request(self, request: Any) -> None:
        """Start the lookup of a request that was just added."""
        state = self._add(request)
        if state.reads and not self.requests.is_transferred(request):
            self.read_ahead.wait(state.id)
        if not self.engine.handshake.disabled:
            self.lookups.start_in_turn(state)

    def _add(self, request: Any) -> RequestState:
        """Return the state of a request that is not known."""
        engine, state = self.engine, self.requests.add(request)
        if request.lora_request is not None:
            engine.adapters.note_request(request.lora_request)
        if engine.hands_over and (request.kv_transfer_params is not None or engine.is_consumer):
            if state.addressable and asks_for_handover(request.kv_transfer_params):
                state.promise = Promise()
            if not self.requests.is_transferred(request):
                self.handovers.arrive(state)
        return state

    def matched_tokens(self, request: Any, computed: int) -> int | None:
        """Return how many tokens beyond `computed` are to be loaded; None while not known."""
        state = self.requests.get(request.request_id) or self._add(request)
        if state.admission != request.num_preemptions:
            state.admit_again()
            if state.reads:
                self.read_ahead.wait(state.id, first=True)
                self.lookups.look_up_again(state)
        lookup = self.lookups.newest(state)
        if lookup and not state.loaded and self.hits.is_refuted(state, lookup, computed):
            state.drop_lookup()
        self.read_ahead.asked(state.id)
        if not self.drafter.left_out:
            self.drafter.asked(request, computed)
        clock = self.admission.clock
        if state.unanswered is None:
            state.unanswered = clock()
        is_transferred = self.requests.is_transferred(request)
        tokens: int | None = 0
        # Otherwise vLLM would not use a hit, or another connector brings the KV.
        if state.reads and not is_transferred:
            tokens = self._decide(state, computed)
        if tokens is None and state.unanswered is not None:
            self.engine.unanswered_in_step += 1
            if self.engine.unanswered_in_step > LONG_QUEUE:
                # Otherwise vLLM would ask about each request of a long queue in each step.
                tokens = 0
        if tokens is not None and state.unanswered is not None:
            # The time from here to the load is vLLM's.
            state.answered_after, state.unanswered = clock() - state.unanswered, None
        if tokens == 0 and not is_transferred:
            self.admission.computes(state, computed)
        return tokens

    def _decide(self, state: RequestState, computed: int) -> int | None:
        """Run the checks in their order; return tokens to load, or None to be asked again."""
        engine, handshake = self.engine, self.engine.handshake
        if state.loaded or state.gave_up or handshake.disabled or handshake.needs_version:
            return 0
        if state.awaited is not None:
            if self.handovers.is_short(state.awaited, computed):
                return 0
            if self.handovers.wait(state, computed):
                # This wait is for the producer, and not counted as one for kvshelf.
                state.unanswered = None
                return None
        if handshake.checking:
            return 0
        service, awaited = engine.lookup_service, state.awaited
        overdue = awaited is not None and awaited.is_overdue(self.handovers.clock())
        lookup = None if service is None else self.lookups.asked(service, state)
        if service is None or handshake.announcing:
            return None if not overdue and handshake.may_wait() else 0
        if self.lookups.breaker_is_open(service):
            if not state.refused:
                state.refused = True
                self.counters.add("skipped_lookups")
            return 0
        if state.awaited is None and self.hits.longest_hit(state) <= computed:
            # No hit could bring more than vLLM has.
            state.offered_from = computed
            self._count(state, computed, 0)
            return 0
        answered = lookup is not None and self.lookups.wait(service, lookup)
        if not answered and not overdue and not (lookup and self.lookups.too_long(service, state)):
            return None
        if lookup is None or not answered or lookup.given_up:
            state.gave_up = True
            self.counters.add("lookup_timeouts")
            return 0
        if not engine.adapters.trusts(state.request.lora_request):
            return 0
        hit = self.hits.tokens(state, lookup, computed)
        has_room = hit > computed and self.hits.has_room(hit)
        end = self.admission.end_of_load(state, computed, hit) if has_room else computed
        if computed < end == hit and self.loads.shares(state, computed, hit):
            return None
        state.offered_from = computed
        first = self._count(state, computed, max(0, hit - computed))
        if first and end < hit:
            self.counters.add("refused_hits", end == computed)
            self.counters.add("refused_tokens", hit - end)
        return max(0, end - computed)

    def _count(self, state: RequestState, computed: int, hit: int) -> bool:
        """Count what was looked up and found for a request, once; return whether it was now."""
        if state.counted:
            return False
        state.counted = True
        self.counters.add("lookup_tokens", state.request.num_tokens - computed)
        self.counters.add("hit_tokens", hit)
        return True

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Plan the load of `external` tokens into the request's blocks in each cache group."""
        if external > 0:
            state = self.requests.get(request.request_id) or self._add(request)
            self.lookups.ahead.pop(state.id, None)
            self.loads.plan_load(state, block_ids, external)

    def finished(
        self, request_id: str, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; cancel its load if it is still running.

        Parameters
        ----------
        request_id : str
        block_ids : sequence of Sequence of int
            Its blocks in each cache group.

        Returns
        -------
        held : bool
            The request keeps its blocks until all workers have reported it.
        params : dict or None
            What is promised to another engine, if the request wants a hand-over.
        """
        state = self.requests.pop(request_id, None)
        if state is None:
            return False, None
        failure = "the end of a request was not noted"
        if state.awaited is not None:
            self._contain(failure, self.handovers.finished, state)
        if state.load:
            self._contain(failure, self.loads.finished, state)
        self._contain(failure, self.lookups.finished, state)
        if state.reads:
            self._contain(failure, self.read_ahead.finished, state.id)
        if not self.drafter.left_out:
            self._contain(failure, self.drafter.finished, state)
        if not self.admission.always:
            self._contain(failure, self.admission.finished, state)
        return self.stores.end(state, block_ids)

    # ------------------------------------------------------------- steps

    def step_metadata(self, output: Any) -> StepMetadata:
        """Return what the workers have to do in this step."""
        engine, meta = self.engine, StepMetadata()

        def plan(
            failure: str,
            call: Callable[..., object],
            *arguments: Any,
            lose: Callable[[], object] | None = None,
        ) -> None:
            """Call a component; if it raises, drop the step's stores so far, and call `lose`."""
            try:
                call(*arguments)
            except Exception as error:  # noqa: BLE001 - the other components plan all the same
                self._log.error("%s", failure, exc_info=error)
                meta.stores, meta.prefetches = [], []
                self._contain("promises of a step were not broken", self.stores.lose, computed)
                if lose is not None:
                    self._contain(failure, lose)

        try:
            engine.begin_step(output)
            computed = output.num_scheduled_tokens
            meta.idle = engine.idle_steps > 0 and engine.may_wait
            if self.handovers.waiting:
                plan("hand-overs of a step could not be planned", self.handovers.plan, output)
            if self.loads.running:
                plan("loads of a step could not be planned", self.loads.plan, output)
            if self.lookups.ahead or self.lookups.later:
                plan("lookups of waiting requests could not be started", self.lookups.plan, output)
            plan(self.periods.failure, self.periods.plan, output, lose=self.periods.lose)
            if self.read_ahead.waiting:
                plan(
                    "prefetches of a step could not be planned", self.read_ahead.plan, output, meta
                )
            if computed and not self.drafter.left_out:
                plan(self.drafter.failure, self.drafter.plan, output, lose=self.drafter.end)
            if computed or self.stores.ended:
                plan("stores of a step could not be planned", self.stores.plan, output, meta)
            if not self.admission.always:
                failure, admission = "a step is not timed", self.admission
                plan(failure, admission.plan, output, meta, lose=admission.lose)
            self._hand_out(meta)
        except Exception as error:  # noqa: BLE001 - the loads must reach the workers
            self._log.error("a step could not be planned", exc_info=error)
            meta = StepMetadata()
            engine.lose_step()
            self._contain("promises of a step were not broken", self.stores.lose, self.requests)
            self._contain(self.periods.failure, self.periods.lose)
            self._contain(self.drafter.failure, self.drafter.end)
            self._contain("a step is not timed", self.admission.lose)
            self._hand_out(meta)
        if self.handovers.held_requests:
            self._contain("a step did not sleep", self.handovers.sleep, meta)
        return meta

    def _hand_out(self, meta: StepMetadata) -> None:
        """Add what every step must bring to the workers."""
        handshake = self.engine.handshake
        handshake.computes |= not self.engine.idle_steps
        meta.weights_round = handshake.round
        if handshake.announcing:
            meta.namespace = handshake.announcement
        if not self.drafter.left_out:
            meta.draft_namespace = self.drafter.announcement
        meta.loads = list(self.loads.planned.values())
        meta.orders = self.engine.orders.messages()
        meta.heard = {rank: self._facts[rank].heard for rank in self._answer}
        self._answer.clear()

    # ------------------------------------------------------------- workers

    def take_output(self, loaded: Iterable[str], meta: WorkerMetadata | None) -> None:
        """Take what a step brings.

        Parameters
        ----------
        loaded : iterable of str
            The requests of which all workers have reported that their load is finished.
        meta : WorkerMetadata, optional
        """
        if loaded:
            self._contain("the end of loads was not noted", self.loads.done, loaded)
        if meta is not None:
            self._contain("a report of workers was not taken", self.worker_output, meta)

    def worker_output(self, meta: WorkerMetadata) -> None:
        """Take what the workers report of a step."""
        engine = self.engine
        for rank, number in meta.heard.items():
            self._heard[rank] = max(self._heard[rank], number)
        engine.orders.heard(min(self._heard.values()))
        for rank, facts in meta.facts.items():
            self._answer.add(rank)
            self._facts[rank].take(facts)
        if not self.admission.always:
            times = meta.timed_steps.values()
            self._contain("steps were not timed", self.admission.take_times, times)
        all_spoke = len(meta.heard) == engine.ranks
        if engine.handshake.receive(meta.reports, meta.weights, all_spoke=all_spoke):
            self.weights_may_change("in a worker")
        shelf = engine.get_shelf() if meta.reports or meta.weights else None
        fmt = None if shelf is None else engine.unite()
        if shelf is not None and fmt is not None:
            self._open(shelf, fmt)
        if not self.drafter.left_out:
            self.drafter.receive(meta.draft_reports, self.namespace, all_spoke=all_spoke)

    def _receivers(self, rank: int) -> list[Callable[[WorkerFacts], None]]:
        """Return the functions that take what a rank reports, each with its own tries."""
        return [
            self._take_facts,
            functools.partial(self.loads.take_facts, rank),
            functools.partial(self.lookups.take_facts, rank),
            self.drafter.take_facts,
            functools.partial(self.stores.take_facts, rank),
            self.admission.take_facts,
        ]

    def _take_facts(self, facts: WorkerFacts) -> None:
        """Take what concerns the engine as a whole."""
        for reason, already_logged in facts.disabled:
            self.engine.handshake.disable(reason, already_logged=already_logged)
        orders = self.engine.orders.next
        orders.ranks_file = facts.ranks_file or orders.ranks_file

    # ------------------------------------------------------------- namespace

    def _open(self, shelf: AnyShelf, fmt: ObjectFormat) -> None:
        """Serve a namespace that the workers' reports have made."""
        engine, handshake = self.engine, self.engine.handshake
        was_open = handshake.namespace is not None
        changed = handshake.weights_changed
        if handshake.namespace != fmt.namespace:
            for state in self.requests.values() if was_open else ():
                # Chunk keys of the namespace of before.
                state.drop_lookup()
                state.drop_awaited()
            engine.open(shelf, fmt)
            self.handovers.reopen()
            if engine.config.reads_ahead(shelf.backend.properties.probe_cost):
                self.read_ahead.enable(engine.prefix_cache_chunks())
        self.periods.settle(changed=changed)
        handshake.settle(fmt.namespace)
        if was_open:
            self.lookups.start_again()

    def reset(self) -> bool:
        """Forget everything known of the shelf, and let the workers compare their weights.

        Requests that are being computed keep their chunk keys, under which they store.
        """
        self.engine.orders.next.reset = True
        self.weights_may_change()
        self.stores.drop_backlogs()
        self.lookups.reset()
        self.read_ahead.engine_cache_was_reset()
        return True

    def weights_may_change(self, how: str = "") -> None:
        """Load and store nothing until it is known which weights the engine has.

        Parameters
        ----------
        how : str
            What may change them; empty if nothing is known that may.
        """
        handshake = self.engine.handshake
        if handshake.checking and handshake.computes:
            self._log.warning(
                "nothing is loaded or stored while weights are compared, and %s begins that anew"
                " before it has ended; only calls of %s begin none",
                *(how or "a reset of the cache", ", ".join(READING)),
                about=how,
            )
        self.counters.add("weight_comparisons")
        handshake.begin_round(noticed=bool(how))
        self.periods.begin()

    def close(self) -> None:
        """Stop the threads."""
        with ExitStack() as stack:
            stack.callback(self.handovers.close)
            stack.callback(self.engine.close_lookups)
            stack.callback(self.engine.adapters.close)
