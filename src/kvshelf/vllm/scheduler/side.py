"""The scheduler half of the connector: builds the parts, and runs them.

Owns the order of the parts in a step, and nothing else: each part has its own state and contracts.

Contracts
---------
* Each part plans in each step by itself. What it raises is logged, and the step stores nothing; the
  other parts plan all the same, and loads always reach the workers.
* What the workers must learn is named in each step until all of them have answered.
* Each part takes what workers report, and the end of a request, by itself.
* All methods run on the engine's step thread.
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
from kvshelf.vllm.messages import Inbox, Outbox
from kvshelf.vllm.metadata import Facts, Orders, StepMetadata, WorkerMetadata
from kvshelf.vllm.scheduler.admission import Admission
from kvshelf.vllm.scheduler.answers import Answers
from kvshelf.vllm.scheduler.drafts import DraftScheduler
from kvshelf.vllm.scheduler.engine import Engine
from kvshelf.vllm.scheduler.handovers import Handovers
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.keys import ChunkKeys
from kvshelf.vllm.scheduler.loads import SchedulerLoads
from kvshelf.vllm.scheduler.lookups import Lookups
from kvshelf.vllm.scheduler.opening import Opening
from kvshelf.vllm.scheduler.part import Part
from kvshelf.vllm.scheduler.periods import BlockPeriods
from kvshelf.vllm.scheduler.promise import Promise
from kvshelf.vllm.scheduler.read_ahead import Loadable, ReadAheadPlan
from kvshelf.vllm.scheduler.requests import Requests, RequestState
from kvshelf.vllm.scheduler.shared import Shared
from kvshelf.vllm.scheduler.steps import Steps
from kvshelf.vllm.scheduler.stores import SchedulerStores
from kvshelf.vllm.scheduler.unsettled import Unsettled
from kvshelf.vllm.weight_changes import READING, watch_engine

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Scheduler half of :class:`kvshelf.vllm.connector.KVShelfConnector`.

    Parameters
    ----------
    engine : Engine

    Attributes
    ----------
    engine : Engine
    counters : Counters
    requests : Requests
    drafts : DraftScheduler
    opening : Opening
    lookups : Lookups
    handovers : Handovers
    admission : Admission
    loads : SchedulerLoads
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.counters = engine.counters
        self._log = RateLimitedLog(logger)
        self.requests = requests = Requests(engine)
        self._steps = Steps(engine.vllm_config, requests)
        self.drafts = DraftScheduler(engine, requests)
        self.opening = Opening(engine)
        self._hits = Hits(engine)
        keys = ChunkKeys(engine, requests.item_ids, self.drafts)
        self._adapters = keys.adapters
        self._orders = orders = Outbox(Orders)
        #: Up to which number each rank has taken the orders.
        self._heard = dict.fromkeys(range(engine.ranks), 0)
        #: The ranks that have sent facts since the last step.
        self._answer: set[int] = set()
        shared = Shared(
            engine, requests, self._steps, self.drafts, self.opening, self._hits, keys, orders
        )
        self.lookups = Lookups(shared)
        self.handovers = Handovers(shared, self.lookups)
        self.admission = Admission(shared)
        self._periods = BlockPeriods(shared)
        self._read_ahead = ReadAheadPlan(self._loadable, self.lookups.loads_are_paused, orders)
        self.loads = SchedulerLoads(shared, self._periods, self._read_ahead, self.admission)
        self._answers = Answers(shared, self.lookups, self.handovers, self.admission, self.loads)
        unsettled = Unsettled(shared)
        self._stores = SchedulerStores(
            shared,
            lookups=self.lookups,
            periods=self._periods,
            unsettled=unsettled,
            read_ahead=self._read_ahead,
        )
        #: In the order in which they plan.
        self._parts: list[Part] = [
            self.handovers,
            self.loads,
            self.lookups,
            self._periods,
            self._read_ahead,
            self.drafts,
            unsettled,
            self._stores,
            self.admission,
        ]
        self._facts = {rank: Inbox(self._receivers(rank)) for rank in range(engine.ranks)}
        watch_engine(self)

    def _receivers(self, rank: int) -> list[Callable[[Facts], None]]:
        parts = [functools.partial(part.take_facts, rank) for part in self._parts]
        return [self._take_facts, *parts]

    def _take_facts(self, facts: Facts) -> None:
        """Take what concerns the engine as a whole."""
        for reason, already_logged in facts.disabled:
            self.opening.handshake.disable(reason, already_logged=already_logged)
        self._orders.next.ranks_file = facts.ranks_file or self._orders.next.ranks_file

    @property
    def namespace(self) -> Namespace | None:
        """The engine's namespace; None while it is not known."""
        return self.opening.namespace

    @property
    def disabled(self) -> bool:
        """Whether nothing is loaded or stored any more; the log says why."""
        return self.opening.handshake.disabled

    # ------------------------------------------------------------- requests

    def new_request(self, request: Any) -> None:
        """Start the lookup of a request that was just added."""
        state = self._add(request)
        if state.reads and not self.requests.is_transferred(request):
            self._read_ahead.wait(state.id)
        if not self.disabled:
            self.lookups.start_in_turn(state)

    def _add(self, request: Any) -> RequestState:
        state = self.requests.add(request)
        if request.lora_request is not None:
            self._adapters.note_request(request.lora_request)
        if self.engine.hands_over:
            if state.addressable and asks_for_handover(request.kv_transfer_params):
                state.promise = Promise()
            if not self.requests.is_transferred(request):
                self.handovers.arrive(state)
        return state

    def _state_of(self, request: Any) -> RequestState:
        state = self.requests.get(request.request_id)
        return self._add(request) if state is None else state

    def _loadable(self, request_id: str) -> Loadable | None:
        return self._hits.loadable(self.requests[request_id])

    def matched_tokens(self, request: Any, computed: int) -> int | None:
        """Return how many tokens beyond `computed` are to be loaded; None while not known."""
        state = self._state_of(request)
        if state.admission != request.num_preemptions:
            state.admit_again()
            if state.reads:
                self._read_ahead.wait(state.id, first=True)
                self.lookups.look_up_again(state)
        lookup = self.lookups.newest(state)
        if lookup and not state.loaded and self._hits.is_refuted(state, lookup, computed):
            state.drop_lookup()
        self._read_ahead.asked(state.id)
        self.drafts.asked(request, computed)
        return self._answers.answer(state, computed)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Plan the load of `external` tokens into the request's blocks in each cache group."""
        if external > 0:
            state = self._state_of(request)
            self.lookups.loading(state)
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
        for part in self._parts:
            self._run("the end of a request was not noted", part.finished, state)
        return self._stores.end(state, block_ids)

    # ------------------------------------------------------------- steps

    def step_metadata(self, output: Any) -> StepMetadata:
        """Return what the workers have to do in this step."""
        try:
            self._steps.begin(output)
            idle = output.total_num_scheduled_tokens == 0 and self._steps.may_wait
            meta = StepMetadata(idle=idle)
            for part in self._parts:
                if not self._run(part.failure, part.plan, output, meta):
                    self._lose([part], output.num_scheduled_tokens, meta)
            self._hand_out(meta)
        except Exception as error:  # noqa: BLE001 - the loads must reach the workers
            self._log.error("a step could not be planned", exc_info=error)
            meta = StepMetadata()
            self._steps.lose()
            self._lose(self._parts, self.requests, meta)
            self._hand_out(meta)
        self._run("a step did not sleep", self.handovers.sleep, meta)
        return meta

    def _lose(self, parts: Iterable[Part], requests: Iterable[str], meta: StepMetadata) -> None:
        """Store nothing in a step of which `parts` do not know what it computes."""
        meta.stores, meta.prefetches = [], []
        self._stores.lose()
        for request_id in requests:
            state = self.requests.get(request_id)
            if state is not None:
                state.promise = None
        for part in parts:
            self._run(part.failure, part.lose)

    def _run(self, failure: str, call: Callable[..., object], *arguments: Any) -> bool:
        """Call a part; log `failure` and return False if it raises."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 - the other parts are called all the same
            self._log.error("%s", failure, exc_info=error)
            return False
        return True

    def _hand_out(self, meta: StepMetadata) -> None:
        """Add what every step must bring to the workers."""
        handshake = self.opening.handshake
        handshake.computes |= not self._steps.idle
        meta.namespace, meta.weights_round = handshake.announcement, handshake.round
        meta.draft_namespace = self.drafts.announcement
        meta.loads = list(self.loads.planned.values())
        meta.orders = self._orders.messages()
        meta.heard = {rank: self._facts[rank].heard for rank in self._answer}
        self._answer.clear()

    def take_output(self, loaded: Iterable[str], meta: WorkerMetadata | None) -> None:
        """Take what a step brings.

        Parameters
        ----------
        loaded : iterable of str
            The requests of which all workers have reported that their load is finished.
        meta : WorkerMetadata, optional
        """
        self._run("the end of loads was not noted", self.loads.done, loaded)
        if meta is not None:
            self._run("a report of workers was not taken", self.worker_output, meta)

    def worker_output(self, meta: WorkerMetadata) -> None:
        """Take what the workers report of a step."""
        for rank, number in meta.heard.items():
            self._heard[rank] = max(self._heard[rank], number)
        self._orders.heard(min(self._heard.values()))
        for rank, facts in meta.facts.items():
            self._answer.add(rank)
            self._facts[rank].take(facts)
        self._run("steps were not timed", self.admission.take_times, meta.timed_steps.values())
        self._run("what workers have was not united", self._unite, meta)

    def _unite(self, meta: WorkerMetadata) -> None:
        """Take what the workers report of their caches and weights."""
        handshake, all_spoke = self.opening.handshake, len(meta.heard) == self.engine.ranks
        if handshake.receive(meta.reports, meta.weights, all_spoke=all_spoke):
            self.weights_may_change("in a worker")
        shelf = self.engine.shelf() if meta.reports or meta.weights else None
        fmt = None if shelf is None else self.opening.unite()
        if shelf is not None and fmt is not None:
            self._open(shelf, fmt)
        self.drafts.receive(meta.draft_reports, self.namespace, all_spoke=all_spoke)

    # ------------------------------------------------------------- namespace

    def _open(self, shelf: AnyShelf, fmt: ObjectFormat) -> None:
        """Serve a namespace that the workers' reports have made."""
        was_open = self.namespace is not None
        changed = self.opening.handshake.weights_changed
        if self.namespace != fmt.namespace:
            for state in self.requests.values() if was_open else ():
                # Chunk keys of the namespace of before.
                state.drop_lookup()
                state.drop_awaited()
            self.opening.open(shelf, fmt)
            self.handovers.reopen()
            probe_cost = shelf.backend.properties.probe_cost
            if self.engine.config.reads_ahead(probe_cost):
                self._read_ahead.enable(self.opening.engine_chunks())
        self._periods.settle(changed=changed)
        self.opening.handshake.settle(fmt.namespace)
        if was_open:
            self.lookups.start_again()

    def reset(self) -> bool:
        """Forget everything known of the shelf, and let the workers compare their weights.

        Requests that are being computed keep their chunk keys, under which they store.
        """
        self.lookups.reset()
        self._read_ahead.engine_cache_was_reset()
        self._stores.drop_backlogs()
        self._orders.next.reset = True
        self.weights_may_change()
        return True

    def weights_may_change(self, how: str = "") -> None:
        """Load and store nothing until it is known which weights the engine has.

        Parameters
        ----------
        how : str
            What may change them; empty if nothing is known that may.
        """
        handshake = self.opening.handshake
        if handshake.checking and handshake.computes:
            self._log.warning(
                "nothing is loaded or stored while weights are compared, and %s begins that anew"
                " before it has ended; only calls of %s begin none",
                *(how or "a reset of the cache", ", ".join(READING)),
                about=how,
            )
        self.counters.add("weight_comparisons")
        handshake.begin_round(noticed=bool(how))
        self._stores.release_ended()
        self._periods.begin()

    def close(self) -> None:
        """Stop the threads."""
        with ExitStack() as stack:
            stack.callback(self.handovers.close)
            stack.callback(self.opening.close)
            stack.callback(self._adapters.close)
