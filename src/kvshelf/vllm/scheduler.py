"""The scheduler side of the connector: what the shelf holds, what to load and what to store.

Owns each request's lookup and the decision which tokens are loaded and which chunks are stored.
:mod:`kvshelf.vllm.handshake` finds the namespace, :mod:`kvshelf.vllm.read_ahead` decides what is
prefetched. Everything here runs on the engine's step thread, except the lookups, which
:mod:`kvshelf.shelf.lookup` runs on threads of its own.

A request's life
----------------
1. ``new_request`` starts its lookup.
2. vLLM calls ``matched_tokens``, perhaps many times: the answer is (None, False) until the lookup
   is done or its time is up. A request that brings a hand-over keeps waiting until all of it is on
   the shelf.
3. ``allocated`` turns the answer into a load, unless vLLM did not use it.
4. ``step_metadata`` hands loads to the worker, and as stores all chunks that the step completes
   and that the lookup did not find. It also names chunks of waiting requests, which the worker
   reads ahead.
5. ``worker_output`` takes what failed, so that these chunks are computed and stored again.
6. ``finished`` forgets the request, and cancels its load if it is still running. It returns what
   is promised to another engine.

Contracts
---------
* A hit ends at a block boundary and leaves at least one token to compute. Of a hybrid engine
  (:mod:`kvshelf.vllm.groups`) it ends at a chunk boundary. A hand-over may end anywhere and have
  all tokens, of which vLLM then computes the last one once more; but of a hybrid engine, and of one
  with a drafter, it ends as other hits do.
* A request that brings a hand-over (:mod:`kvshelf.vllm.awaiting`) waits for its chunks and the tail
  until its deadline, and never longer. What ends the wait of others does not end this one: a
  lookup's misses, chunks that failed, ``lookup_wait_s``, a storage that does not answer, an open
  breaker, a namespace that is not known yet. At its end there is a hit of what was seen.
* Of a request that wants a hand-over the tail is stored, in the step that completes the prompt, and
  everything stored or planned is promised (:mod:`kvshelf.vllm.promise`). While a worker's storage
  takes no writes, it promises only what lookups have seen. When it ends it keeps its blocks until
  the workers have gathered what they had postponed (:mod:`kvshelf.vllm.postponed`).
* With ``cache_tails`` the tails of all prompts are stored, and lookups look for them. Only a prompt
  with equal tokens to its end finds one. Its hit then has all tokens, as that of a hand-over,
  unless vLLM computes the tail sooner than it could be loaded.
* An idle step sleeps up to 10 ms when every request waits for a hand-over and no other rank or
  stage depends on this engine's steps.
* Requests for which vLLM would ignore a hit are not delayed, prefetched or counted; they are stored
  like others. These are requests that skip the prefix cache (log probabilities of the prompt), and
  all requests of engines that return the routed experts: vLLM takes KV only together with the
  experts of its tokens, which a shelf does not have.
* Reports to vLLM and to the workers stay on a list until they are delivered, whatever raises.
* There is one load for each time that a request is admitted: what the load did not deliver is
  computed, so no request can loop. Of a hybrid engine a load brings everything or nothing: after
  one that failed, the request gets a new lookup for a shorter hit, for a bounded number of times.
* Windows are stored in the step that completes the chunk. vLLM frees their blocks soon after: a
  window of which it has freed a block is not stored.
* A state is stored only at chunk boundaries at which vLLM has one: where a step happens to end, in
  that step or the next one, or where vLLM names a block for it. No step is changed for that.
  :meth:`SchedulerSide._is_worth_storing` decides which of them are worth their bytes.
* With speculative decoding the end of a step behind the prompt is not known, and states lie in
  other columns: there only blocks that vLLM names are stored, once it has judged the step's drafts.
* Until the namespace is known there are no hits and no stores.
* While the weights are compared (:mod:`kvshelf.vllm.handshake`) there are neither, and no other
  request waits. After a change nothing is stored that was computed before it, or behind blocks
  that were (:mod:`kvshelf.vllm.block_weights`).
* While a storage breaker of the scheduler or of a worker is open there are no hits, and no
  other request waits.
* All waits for lookups in one step together take at most the lookup budget. Steps that compute
  nothing may take longer, and workers may then wait for loads, but only where no other rank or
  pipeline stage waits for this engine's step: not with several stages, nor with data parallelism
  over the experts of one model, whose ranks step together.
* A preempted and resumed request gets a new lookup. So does one that vLLM polls when its answer is
  older than a second, or a chunk that it missed was stored since, unless all of it was found. It
  waits for this lookup as for the first, and keeps the old answer if there is none in time.
* Of a long queue only the first requests have a lookup and keys.
* What depends on a load that another connector (inside MultiConnector) does synchronously is not
  stored until the outcome of that load is known: it may depend on blocks without KV.
* A request whose prompt another connector transfers (``do_remote_prefill`` beside NixlConnector and
  its like) is neither delayed nor loaded, unless the option says so: that connector has all of it.
* Where the tokens of an image attend to each other in both directions, the KV of an image depends
  on which of its tokens one step computes. So no hit ends within an image, because a later step
  would have to continue it; and where vLLM divided an image all the same, nothing from its first
  token on is stored.
* A hit is recorded as a use of all that it needs, on the lookup thread, also where vLLM's prefix
  cache has a part of it or all (:mod:`kvshelf.capacity.uses`).
* A drafter's KV is stored and loaded beside the model's (:mod:`kvshelf.vllm.draft_scheduler`). It
  never changes what is a hit.
* Only tokens that can no longer change are stored: those of the prompt and those that vLLM has
  accepted, never drafts or samples in flight.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvshelf.capacity.uses import Uses
from kvshelf.config import Config
from kvshelf.format.keys import Chunk, KeyChain, MultimodalItem, salt_group_of
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind, kind_key, kind_of_key
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.history import Event, History, Reason
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.paths import cache_dir
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.hits import window_chunks
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.view import ShelfView
from kvshelf.shelf.waits import Wait, WaitService
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.vllm.adapters import AdapterDigests, adapter_settings
from kvshelf.vllm.awaiting import RETRY_SECONDS, Awaited, Awaiting
from kvshelf.vllm.block_weights import BlockWeights
from kvshelf.vllm.draft_scheduler import DraftedChain, DraftScheduler
from kvshelf.vllm.encoder_outputs import EncoderOutputs
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.handover import asks_for_handover
from kvshelf.vllm.handshake import Handshake
from kvshelf.vllm.item_ids import ItemIds
from kvshelf.vllm.metadata import (
    NULL_BLOCK,
    AdapterContent,
    LoadFailure,
    LoadOp,
    Owner,
    StepMetadata,
    StoreOp,
    WorkerMetadata,
)
from kvshelf.vllm.namespace import topologies_of
from kvshelf.vllm.other_namespaces import OtherNamespaces
from kvshelf.vllm.promise import Promise
from kvshelf.vllm.read_ahead import Loadable, ReadAhead
from kvshelf.vllm.speculation import draft_engine, drafter_has_kv, drops_last_block
from kvshelf.weights.fingerprints import FingerprintCache

logger = logging.getLogger(__name__)

# An idle engine loses nothing by a wait as long as an empty step.
_IDLE_LOOKUP_SECONDS = 2e-3
# A lookup that takes longer will not end soon.
_IDLE_WAIT_SECONDS = 10e-3
# After this long without a step, a worker's last report of its breaker no longer counts.
_STALE_SECONDS = 1.0
_REPAIRS_REMEMBERED = 4096
# Age of an answer at which a waiting request is looked up again; doubled each time.
_ANSWER_SECONDS = 1.0
# Most chunks that are remembered as stored recently.
_PUBLISHED_REMEMBERED = 4096
# Waiting requests whose lookups are made before vLLM polls them.
_LOOKUPS_AHEAD = 256
#: Least tokens of a tail: a shorter one is computed sooner than loaded, and takes the same space.
_LEAST_TAIL = 16
#: Loads of a hybrid engine's request that may fail before it is computed without the shelf.
_MOST_FAILED_LOADS = 3


class _Request:
    """The state of one request of the engine."""

    __slots__ = (
        "adapter",
        "addressable",
        "admission",
        "awaited",
        "breaker_counted",
        "counted",
        "cut",
        "failed",
        "failed_loads",
        "failures",
        "gave_up",
        "last_state",
        "limit",
        "loaded",
        "loading",
        "lookup",
        "newer",
        "next_boundary",
        "next_store",
        "not_loaded",
        "offered_from",
        "period",
        "planned_at",
        "promise",
        "reads",
        "renewals",
        "request",
        "tail_planned",
        "waiting_since",
    )

    def __init__(self, request: Any, addressable: bool, reads: bool) -> None:
        self.request = request
        self.addressable = addressable
        #: Whether a hit would be used.
        self.reads = addressable and reads
        #: Why the request is computed without the answer of a lookup, for the history.
        self.not_loaded = None if reads else Reason.NOT_ASKED
        self.adapter: AdapterContent | None = None
        # A request that was preempted since then is admitted anew.
        self.admission: int = request.num_preemptions
        self.lookup: Lookup | None = None
        #: A newer lookup, to replace `lookup`, whose answer is old; how many there were.
        self.newer: Lookup | None = None
        self.renewals = 0
        #: The hand-over that the request brought.
        self.awaited: Awaited | None = None
        self.waiting_since: float | None = None
        self.gave_up = False
        self.loaded = False
        self.loading = False
        self.counted = False
        self.breaker_counted = False
        #: Index of the first chunk that could not be loaded: no hit may include it.
        self.limit: int | None = None
        #: Kind keys of chunks that could not be loaded; True where the object is damaged.
        self.failures: dict[bytes, bool] = {}
        #: Indices of the chunks whose windows and states could not be loaded.
        self.failed: dict[Kind, set[int]] = {WINDOW: set(), STATE: set()}
        #: Failed loads since the request was admitted.
        self.failed_loads = 0
        self.next_store = 0
        #: `next_store`, and the first token behind which there is more to store with it.
        self.next_boundary = (0, 0)
        #: The step in which stores of the request were last planned.
        self.planned_at = 0
        #: Set if the request wants a hand-over.
        self.promise: Promise | None = None
        #: Index of the last chunk whose state was planned to be stored.
        self.last_state = -1
        #: Whether the tail is on the shelf or planned to be stored, where tails are cached.
        self.tail_planned = False
        #: From this token on the KV does not depend on the prefix alone.
        self.cut = sys.maxsize
        self.offered_from = 0
        #: The oldest period of its blocks, see :mod:`kvshelf.vllm.block_weights`.
        self.period = 0

    def admit_again(self) -> None:
        self.admission = self.request.num_preemptions
        self.loaded = self.gave_up = False
        self.failed_loads = 0
        if self.reads:
            self.not_loaded = None
        if self.awaited is not None and self.awaited.outcome is not None:
            # Promised chunks are there, or are not waited for again.
            self.awaited.deadline = math.inf
        self.drop_lookup()

    def drop_lookup(self) -> None:
        for lookup in (self.lookup, self.newer):
            if lookup is not None:
                lookup.cancel()
        if self.awaited is not None:
            self.awaited.drop()
        self.lookup = self.newer = None
        self.waiting_since = None


class SchedulerSide:
    """Scheduler half of :class:`kvshelf.vllm.connector.SharedStorageConnector`.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    shelf : Callable[[], AnyShelf or None]
        Returns the shelf, None while it is not open.
    groups : CacheGroups
        The engine's KV cache groups.
    ranks : int
        Number of workers that must report before the namespace is known.
    may_store : bool
        Whether the engine's ``kv_role`` allows to store; all roles load.
    hands_over : bool
        Whether requests may hand their KV over to other engines.
    on_thread_start : Callable, optional
        Called first on each lookup thread.
    counters : Counters, optional
        Where to count; new counters when absent.
    uses : Uses, optional
        Records what hits use; the caller closes it. Nothing is recorded without it.
    history : History, optional
        Gets what is missed and refused.
    others_transfer : bool
        Whether another connector transfers the prompts of requests with ``do_remote_prefill``.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        shelf: Callable[[], AnyShelf | None],
        *,
        groups: CacheGroups,
        ranks: int = 1,
        may_store: bool = True,
        hands_over: bool = True,
        on_thread_start: Callable[[], None] | None = None,
        counters: Counters | None = None,
        uses: Uses | None = None,
        history: History | None = None,
        others_transfer: bool = False,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._shelf = shelf
        self._groups = groups
        self._others_transfer = others_transfer and not config.load_transferred
        self._history = history
        #: Tokens: where a hit may end.
        self._block_size = groups.alignment
        self._may_store = may_store and not config.read_only
        self._hands_over = hands_over
        #: Whether tails can be stored and loaded, and whether those of all prompts are.
        self._tails = self._caches_tails = False
        self._on_thread_start = on_thread_start
        self.counters = Counters() if counters is None else counters
        self._handshake = Handshake(vllm_config, config, ranks)
        self._blocks = BlockWeights()
        self._encoder_outputs = EncoderOutputs()
        speculative_config = getattr(vllm_config, "speculative_config", None)
        self._drafting = speculative_config is not None
        #: Tokens between the last state in vLLM's cache and a prompt's last block boundary.
        self._held_back = groups.alignment if drops_last_block(speculative_config) else 0
        self._drafts: DraftScheduler | None = None
        if draft_engine(vllm_config) is not None:
            self._drafts = DraftScheduler(vllm_config, config, groups.hash_block_size)
        self._awaiting = Awaiting(config, groups, self.counters)
        self._waits: WaitService | None = None
        #: The objects of each kind.
        self._views: dict[Kind, ShelfView] = {}
        self._uses = uses
        #: The drafter's objects.
        self._draft_view: ShelfView | None = None
        self._others = OtherNamespaces()
        #: `_held`: how many requests polled since the last step wait for a hand-over. `_hurried`: a
        #: lookup of one of them will end soon, so the step must not sleep.
        self._held = 0
        self._hurried = False
        self._read_ahead = ReadAhead()
        self._failed = FailedKeys()
        #: By kind key, the ranks that replaced their objects of a damaged chunk, until all have.
        self._repaired_ranks: OrderedDict[bytes, set[int]] = OrderedDict()
        #: The ranks that have layers of each kind.
        self._ranks_of: dict[Kind, int] = {}
        self._lookups: LookupService | None = None
        #: Ranks whose storage breaker is open.
        self._open_breakers: set[int] = set()
        #: Ranks whose storage takes no writes.
        self._refusing: set[int] = set()
        self._steps = 0
        #: Requests with stores that workers postponed, and how often each had been preempted.
        self._postponed: dict[str, int] = {}
        #: Requests that ended and keep their blocks until all workers have gathered what they
        #: postponed.
        self._held_blocks: set[str] = set()
        self._to_hold: list[Owner] = []
        self._gone: list[Owner] = []
        self._stepped_at = 0.0
        self._requests: dict[str, _Request] = {}
        #: Waiting requests with a lookup, and later ones without, in order.
        self._looked_up: set[str] = set()
        self._not_looked_up: OrderedDict[str, None] = OrderedDict()
        #: When a kind of a chunk appeared, by kind key, the latest last.
        self._published: OrderedDict[bytes, float] = OrderedDict()
        self._publishing = threading.Lock()
        self._loads: list[LoadOp] = []
        self._cancelled: list[str] = []
        self._reset = False
        #: The cache was reset before all workers had reported that they can compare their weights.
        self._reset_early = False
        self._budget = config.lookup_budget_ms * 1e-3
        # With asynchronous scheduling or pipeline stages, later steps are scheduled before earlier
        # ones finish.
        scheduling = getattr(vllm_config, "scheduler_config", None)
        stages = int(vllm_config.parallel_config.pipeline_parallel_size)
        self._steps_in_flight = stages + bool(getattr(scheduling, "async_scheduling", False))
        # vLLM sets data_parallel_size to 1 where the ranks do not depend on each other. It divides
        # batches into micro-batches only where it is more.
        ranks_step_together = int(vllm_config.parallel_config.data_parallel_size) > 1
        self._holds_up_others = stages > 1 or ranks_step_together
        #: Steps since the last one that computed anything, and the requests of that one.
        self._idle_steps = self._steps_in_flight
        self._computed: Iterable[str] = ()
        self._budget_left = self._budget_of_step()
        #: By request that depends on another connector's load whose outcome is not known: for how
        #: many steps more, and its blocks.
        self._unsettled: dict[str, tuple[int, frozenset[int]]] = {}
        #: Number of further steps of which it is not known what they compute.
        self._unsettled_steps = 0
        self._log = RateLimitedLog(logger)
        self._item_ids = ItemIds(vllm_config, config.trust_uuids, self.counters)
        outputs = getattr(vllm_config, "aux_output_config", None)
        self._hits_are_used = outputs is None or not outputs.enabled
        if not self._hits_are_used:
            logger.warning(
                "the engine returns the experts of all tokens (enable_return_routed_experts), and"
                " a shelf does not have them: this engine stores KV and loads none"
            )
        self._whole_items = bool(getattr(vllm_config.model_config, "is_mm_prefix_lm", False))
        self._adapters = AdapterDigests(
            FingerprintCache(cache_dir() / "fingerprints.json"),
            settings=adapter_settings(vllm_config),
            prefix_caching=bool(getattr(vllm_config.cache_config, "enable_prefix_caching", True)),
        )

    @property
    def namespace(self) -> Namespace | None:
        """The engine's namespace; None while it is not known."""
        return self._handshake.namespace

    @property
    def disabled(self) -> bool:
        """Whether nothing is loaded or stored any more; the log says why."""
        return self._handshake.disabled

    # ------------------------------------------------------------- lookup

    def new_request(self, request: Any) -> None:
        """Start the lookup of a request that was just added."""
        state = self._add(request)
        if state.reads and not self._is_transferred(request):
            self._read_ahead.wait(request.request_id)
        usable = state.addressable and not self.disabled and not self._handshake.checking
        if self._lookups is not None and usable:
            self._look_up_in_turn(self._lookups, state)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond `computed` the shelf has, and whether to load them.

        The number is None while it is not known.
        """
        state = self._state_of(request)
        if state.admission != request.num_preemptions:
            state.admit_again()
            if state.reads:
                self._read_ahead.wait(request.request_id, first=True)
        self._read_ahead.asked(request.request_id)
        if self._drafts is not None:
            self._drafts.asked(request, computed)
        if not state.reads or state.loaded or state.gave_up or self.disabled:
            return 0, False
        if self._is_transferred(request):
            state.not_loaded = Reason.NOT_ASKED
            return 0, False
        awaited = state.awaited
        if awaited is not None and awaited.outcome is None:
            if computed > 0 and awaited.handover.tokens - computed <= self._block_size:
                # vLLM computes the rest sooner than it could be loaded.
                return 0, False
            if self._still_waits(state, awaited):
                self._held += 1
                state.offered_from = computed
                return None, False
        if self._handshake.checking:
            state.not_loaded = Reason.WEIGHTS_CHANGED
            return 0, False
        lookups = self._lookups
        overdue = awaited is not None and awaited.is_overdue(self._awaiting.clock())
        if lookups is None:
            may_wait = not overdue and self._handshake.may_wait()
            state.not_loaded = Reason.STARTING
            return (None, False) if may_wait else (0, False)
        state.not_loaded = None
        lookup = state.lookup or self._start_lookup(lookups, state)
        if self._breaker_is_open(lookups):
            if not state.breaker_counted:
                state.breaker_counted = True
                self.counters.add("skipped_lookups")
            state.not_loaded = Reason.UNAVAILABLE
            return 0, False
        if not lookup.done and not self._wait(lookups, lookup):
            if not overdue and not self._too_long(lookups, state):
                return None, False
            return self._no_answer(state)
        if lookup.given_up:
            return self._no_answer(state)
        if not self._adapters.trusts(request.lora_request):
            state.not_loaded = Reason.ADAPTER_UNKNOWN
            return 0, False
        newest = self._newest(lookups, state, lookup)
        if newest is None:
            return None, False
        hit = self._hit_tokens(state, newest, computed)
        state.offered_from = computed
        if not state.counted:
            state.counted = True
            self.counters.add("lookup_tokens", request.num_tokens - computed)
            self.counters.add("hit_tokens", max(0, hit - computed))
            self._note_miss(state, newest, computed)
        return (hit - computed, True) if hit > computed else (0, False)

    def _newest(self, lookups: LookupService, state: _Request, lookup: Lookup) -> Lookup | None:
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
        if not newer.done and not self._wait(lookups, newer) and not self._too_long(lookups, state):
            return None
        state.newer = None
        if newer.done and not newer.given_up:
            state.lookup = newer
        else:
            newer.cancel()
        return state.lookup

    def _is_old(self, state: _Request, lookup: Lookup) -> bool:
        """Whether a new lookup probably finds more."""
        chain = lookup.chain
        if chain is None or state.awaited is not None or lookup.hit_chunks >= len(chain.chunks):
            return False
        if time.monotonic() - lookup.as_of > _ANSWER_SECONDS * 2**state.renewals:
            return True
        missing = chain.chunks[lookup.full_chunks :][:1] or chain.chunks[-1:]
        found = [self._published.get(kind_key(missing[0].key, kind)) for kind in self._groups.kinds]
        return any(at is not None and at > lookup.as_of for at in found)

    def _still_waits(self, state: _Request, awaited: Awaited) -> bool:
        """Whether a request waits for its hand-over in this step; notes how the wait ends."""
        request_id, now = state.request.request_id, self._awaiting.clock()
        lookups, wait = self._lookups, awaited.wait
        known = lookups is not None and not self._handshake.checking
        # vLLM may not have polled for a while.
        there = known and wait is not None and wait.complete
        if now >= awaited.deadline and not there:
            self._awaiting.end(request_id, awaited, "late")
            return False
        if lookups is None or not known:
            return True
        if wait is None:
            if self._is_of_another_namespace(request_id, awaited):
                return False
            lookup = state.lookup
            if lookup is None:
                if now < awaited.retry_at:
                    return True
                lookup = self._start_lookup(lookups, state)
            if not lookup.done and not self._wait(lookups, lookup):
                self._hurried = self._hurried or not lookups.stalled(_IDLE_WAIT_SECONDS, lookup)
                return True
            if lookup.given_up:
                # The storage may be back before the deadline.
                state.drop_lookup()
                awaited.retry_at = now + RETRY_SECONDS
                return True
            wait = self._begin_wait(state, awaited, lookup)
        if wait is None:
            return False
        if wait.complete:
            if not self._breaker_is_open(lookups):
                self._awaiting.end(request_id, awaited, "complete")
                if self._groups.hybrid and self._divides_item(state, awaited.hit_tokens):
                    state.drop_lookup()
            elif now >= awaited.deadline:
                self._awaiting.end(request_id, awaited, "late")
        elif wait.gave_up:
            self._awaiting.end(request_id, awaited, "gave_up")
            if self._groups.hybrid:
                # The wait did not cover the objects that a shorter hit needs at its end.
                state.drop_lookup()
        return awaited.outcome is None

    def _is_of_another_namespace(self, request_id: str, awaited: Awaited) -> bool:
        """Whether the producer's KV is unusable here; logs once how the namespaces differ."""
        namespace, shelf = self.namespace, self._shelf()
        assert namespace is not None
        if awaited.handover.namespace == namespace.digest:
            return False
        self._awaiting.end(request_id, awaited, "other_namespace")
        if shelf is not None:
            self._others.met(shelf, namespace, awaited.handover.namespace)
        return True

    def _begin_wait(self, state: _Request, awaited: Awaited, lookup: Lookup) -> Wait | None:
        """Wait for pieces that the lookup missed; None if the hand-over is not of this request."""
        request = state.request
        try:
            if not self._adapters.trusts(request.lora_request):
                raise ValueError("KV of its LoRA adapter cannot be loaded")
            pieces = self._awaiting.missing(awaited, request, lookup, tails=self._tails)
        except ValueError as error:
            self._awaiting.end(request.request_id, awaited, "invalid", str(error))
            return None
        if self._waits is None:
            self._waits = WaitService(
                self._views,
                counters=self.counters,
                on_seen=self._note_there,
                on_thread_start=self._on_thread_start,
            )
        wait = self._waits.submit(pieces, awaited.handover.attempt)
        awaited.begin(wait, lookup.full_chunks, pieces)
        return wait

    def _breaker_is_open(self, lookups: LookupService) -> bool:
        """Whether the breaker of the scheduler's storage, or of a worker's, is open."""
        if self._open_breakers and time.monotonic() - self._stepped_at > _STALE_SECONDS:
            # Workers report in steps only. One whose breaker is still open reports it again when
            # it refuses a load.
            self._open_breakers.clear()
        return bool(self._open_breakers) or not lookups.available

    def _no_answer(self, state: _Request) -> tuple[int, bool]:
        """Give up a request's lookup that took too long: the request is computed."""
        state.gave_up = True
        state.not_loaded = Reason.TIMED_OUT
        self.counters.add("lookup_timeouts")
        return 0, False

    def _note(self, event: Event, chunk: Chunk, reason: Reason, kind: Kind = FULL) -> None:
        """Note an event in the history, if there is one."""
        if self._history is not None:
            key = kind_key(chunk.key, kind)
            self._history.note(event, key, chunk=chunk.index, detail=reason)

    def _note_miss(self, state: _Request, lookup: Lookup, computed: int) -> None:
        """Note the chunk at which the hit of a request ends, if the prompt is longer."""
        if self._history is None or lookup.chain is None:
            return
        size, awaited = self._config.chunk_size, state.awaited
        place = lookup.hit_chunks
        if awaited is not None:
            place = max(place, awaited.full_chunks)
        if state.limit is not None:
            place = min(place, state.limit)
        whole = len(lookup.chain.chunks)
        if self._groups.hybrid:
            # A hit leaves one token to compute, and ends at a chunk boundary.
            whole = min(whole, (state.request.num_tokens - 1) // size)
        if place >= whole or place * size < computed:
            return
        chunk, kind = lookup.chain.chunks[place], FULL
        if self._groups.hybrid and place < lookup.full_chunks:
            kind = STATE if STATE in self._groups.kinds else WINDOW
        usable = self._is_usable(state, chunk, kind)
        self._note(Event.MISSED, chunk, Reason.ABSENT if usable else Reason.FAILED_BEFORE, kind)

    def _note_not_loaded(self, state: _Request) -> None:
        """Note that a request was computed without the answer of a lookup, by its last chunk."""
        lookup, reason = state.lookup, state.not_loaded
        if reason is None or lookup is None or not lookup.done or lookup.chain is None:
            return
        whole = state.request.num_prompt_tokens // self._config.chunk_size
        for chunk in lookup.chain.chunks[max(0, whole - 1) : whole]:
            self._note(Event.NOT_LOADED, chunk, reason)

    def _state_of(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._add(request)
        return state

    def _add(self, request: Any) -> _Request:
        addressable = _has_address(request) and self._item_ids.may_enter_keys(request)
        reads = self._hits_are_used and not request.skip_reading_prefix_cache
        state = self._requests[request.request_id] = _Request(request, addressable, reads)
        params = request.kv_transfer_params
        if params is not None and self._hands_over:
            if addressable and asks_for_handover(params):
                state.promise = Promise()
            request_id = request.request_id
            if not self._is_transferred(request):
                state.awaited = self._awaiting.arrive(request_id, params, reads=state.reads)
        return state

    def _is_transferred(self, request: Any) -> bool:
        """Whether another connector transfers a prompt; it reports the end of that itself."""
        params = request.kv_transfer_params if self._others_transfer else None
        return isinstance(params, Mapping) and params.get("do_remote_prefill") is True

    @property
    def _may_wait(self) -> bool:
        """Whether nothing is computed, and no other rank depends on this engine's steps."""
        if self._holds_up_others or self._idle_steps == 0:
            return False
        # A step that computes may still be in flight, unless its requests have ended.
        in_flight = self._idle_steps < self._steps_in_flight
        return not in_flight or self._requests.keys().isdisjoint(self._computed)

    def _budget_of_step(self) -> float:
        return max(self._budget, _IDLE_LOOKUP_SECONDS) if self._may_wait else self._budget

    def _wait(self, lookups: LookupService, lookup: Lookup) -> bool:
        """Wait within the step's budget; return whether the lookup is done."""
        if self._budget_left <= 0:
            return False
        # A wait that times out lasts longer than its timeout: until the lookup thread releases the
        # GIL.
        if not self._may_wait and not lookups.may_be_done_within(lookup, self._budget_left):
            return False
        begin = time.monotonic()
        done = lookup.wait(self._budget_left)
        self._budget_left -= time.monotonic() - begin
        return done

    def _too_long(self, lookups: LookupService, state: _Request) -> bool:
        """Whether a request has waited for its lookup long enough."""
        now = time.monotonic()
        if state.waiting_since is None:
            state.waiting_since = now
        longest = self._config.lookup_wait_s
        # Once the storage has delayed one request for this long, the next does not wait for it.
        return now - state.waiting_since >= longest or lookups.stalled(longest)

    def _hit_tokens(self, state: _Request, lookup: Lookup, computed: int) -> int:
        """Return the leading tokens that can be loaded; vLLM has `computed` of them already."""
        chunks, awaited = lookup.hit_chunks, state.awaited
        if self._groups.hybrid:
            ends = self._ends(state)
            if not self._groups.mixed and ends is not None:
                # A search for full chunks alone has no ends.
                chunks = ([0, *ends])[bisect_right(ends, chunks)]
            # One of _ends.
            handed = 0 if awaited is None else awaited.hit_tokens
            if self._divides_item(state, handed):
                handed = 0
            return max(chunks * self._config.chunk_size, handed)
        size, last = self._config.chunk_size, state.request.num_tokens - 1
        whole = 0
        if awaited is not None:
            chunks = max(chunks, awaited.full_chunks)
            # A drafter has KV of whole chunks only.
            whole = awaited.hit_tokens if self._drafts is None else 0
        if lookup.tail is not None:
            end = lookup.tail.index * size + lookup.tail.tokens
            # vLLM computes the rest of a block sooner than it could be loaded.
            if not computed or end - computed > self._block_size:
                whole = max(whole, end)
        if state.limit is not None:
            chunks = min(chunks, state.limit)
            whole = whole if whole <= state.limit * size else 0
        # One token must be left: the model has to compute an output to sample from.
        hit: int = min(chunks * size, last)
        hit -= hit % self._block_size
        # Behind a hand-over vLLM computes the last token once more.
        hit = max(hit, whole)
        if self._whole_items:
            for start, end in reversed(_items(state.request)):
                if start < min(hit, last) < end:
                    hit = start - start % self._block_size
        return hit

    def _ends(self, state: _Request) -> Sequence[int] | None:
        """Return the numbers of chunks at which a hit of a hybrid engine may end, ascending."""
        if not self._groups.hybrid:
            return None
        size = self._config.chunk_size
        # One token must be left: vLLM would compute the last one anew, over a state behind it.
        last = (state.request.num_tokens - 1) // size
        ends: Sequence[int] = range(1, last + 1 if state.limit is None else state.limit + 1)
        if self._whole_items:
            ends = [n for n in ends if not self._divides_item(state, n * size)]
        if any(state.failed.values()):
            ends = [n for n in ends if not self._needs_failed(state, n)]
        return ends

    def _divides_item(self, state: _Request, tokens: int) -> bool:
        """Whether a hit of so many tokens would end within an item that must not be divided."""
        items = _items(state.request) if self._whole_items else ()
        return any(start < tokens < end for start, end in items)

    def _needs_failed(self, state: _Request, end: int) -> bool:
        """Whether a hit of `end` chunks needs a window or a state that could not be loaded."""
        windows = window_chunks(end, self._groups.window, self._config.chunk_size)
        return end - 1 in state.failed[STATE] or not state.failed[WINDOW].isdisjoint(windows)

    def _note_cuts(self, output: Any) -> None:
        """Note multimodal items of which a step computes only the beginning."""
        scheduled = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        ends = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        ends.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, computed in ends.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            step_end = computed + scheduled[request_id]
            for start, end in _items(state.request):
                if start < step_end < end:
                    state.cut = min(state.cut, start)

    def _start_lookup(self, lookups: LookupService, state: _Request) -> Lookup:
        request = state.request
        self._not_looked_up.pop(request.request_id, None)
        if request.num_computed_tokens == 0:
            self._looked_up.add(request.request_id)
        state.lookup = self._submit(lookups, state)
        return state.lookup

    def _look_up_in_turn(self, lookups: LookupService, state: _Request) -> None:
        """Start the lookup of a request that waits, or leave it for later in a long queue.

        Keys of all prompts in such a queue would take much memory, and be old answers.
        """
        request_id, looked_up = state.request.request_id, self._looked_up
        has_turn = request_id in looked_up or len(looked_up) < _LOOKUPS_AHEAD
        if has_turn or state.awaited is not None:
            self._start_lookup(lookups, state)
        else:
            self._not_looked_up[request_id] = None

    def _look_up_next(self) -> None:
        """Start lookups of the next waiting requests, in place of those that no longer wait."""
        lookups = self._lookups
        while lookups is not None and len(self._looked_up) < _LOOKUPS_AHEAD and self._not_looked_up:
            request_id, _ = self._not_looked_up.popitem(last=False)
            state = self._requests.get(request_id)
            if state is not None and state.lookup is None:
                self._start_lookup(lookups, state)

    def _submit(self, lookups: LookupService, state: _Request) -> Lookup:
        assert self.namespace is not None
        namespace, lora = self.namespace.digest, state.request.lora_request
        adapter: bytes | None = b""

        def prepare(go_on: Callable[[], None]) -> None:
            def tell(digest: bytes | None) -> None:
                nonlocal adapter
                adapter = digest
                go_on()

            self._adapters.ask(lora, tell)

        # The list itself, of which the lookup thread takes slices: vLLM only ever appends to it
        # (see _has_address).
        return lookups.submit(
            state.request._all_token_ids,
            lambda: None if adapter is None else self._make_chain(state, namespace, adapter),
            ends=self._ends(state),
            tail_end=state.request.num_prompt_tokens if self._has_cached_tail(state) else 0,
            on_done=self._recorder() if state.reads else None,
            prepare=None if lora is None else prepare,
        )

    def _recorder(self) -> Callable[[Lookup], None] | None:
        """Return the function that records the hit of a lookup that begins now, on its thread."""
        if self._uses is None:
            return None
        uses, views, drafts = self._uses, self._views, self._view_of_drafts()
        size = self._config.chunk_size

        def record(lookup: Lookup) -> None:
            chain, end = lookup.chain, lookup.first_chunk + lookup.hit_chunks
            if chain is None or not lookup.hit_chunks:
                return
            for kind, indices in self._ranges(0, end * size).items():
                # The step thread may append chunks meanwhile, behind the hit.
                uses.note(views[kind], chain.chunks[indices.start : indices.stop])
            if drafts is not None and isinstance(chain, DraftedChain):
                uses.note(drafts, chain.drafts.chunks[:end])

        return record

    def _view_of_drafts(self) -> ShelfView | None:
        """Return the drafter's objects, once their namespace is known."""
        namespace = None if self._drafts is None else self._drafts.namespace
        if self._draft_view is None and namespace is not None:
            shelf = self._shelf()
            self._draft_view = None if shelf is None else shelf.view(ObjectFormat(namespace))
        return self._draft_view

    def _has_cached_tail(self, state: _Request) -> bool:
        """Whether a prompt ends in a tail that is cached without a hand-over."""
        rest = state.request.num_prompt_tokens % self._config.chunk_size
        return self._caches_tails and bool(rest >= _LEAST_TAIL)

    def _make_chain(self, state: _Request, digest: bytes, adapter: bytes = b"") -> KeyChain:
        """Make the chain of a request's keys, without tokens."""
        request = state.request
        if adapter:
            state.adapter = AdapterContent(int(request.lora_request.lora_int_id), adapter)
        salt = request.cache_salt or ""
        make: Callable[..., KeyChain]
        make = KeyChain if self._drafts is None else self._drafts.chain
        return make(
            digest,
            self._config.chunk_size,
            salt=salt,
            lora_digest=adapter,
            items=[
                MultimodalItem(
                    self._item_ids.in_key(feature, request.lora_request),
                    feature.mm_position.offset,
                    feature.mm_position.length,
                )
                for feature in request.mm_features
            ],
            salt_group=salt_group_of(salt) if self._config.group_by_salt else "_",
        )

    def _keys(self, state: _Request, lookup: Lookup) -> KeyChain | None:
        """Return the chain of a request whose chunks can be stored now; None if there is none yet.

        What is computed in the meantime is stored in a later step. But a prompt that is handed over
        often has only one, so its keys do not wait for the answer of a slow storage.
        """
        if lookup.done:
            return lookup.chain
        if state.promise is None or state.request.lora_request is not None:
            return None
        assert self.namespace is not None
        return self._make_chain(state, self.namespace.digest)

    # ------------------------------------------------------------- loads

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Plan the load of `external` tokens into the request's blocks in each cache group.

        vLLM now waits for this load, so one is planned in any case: if its chunks are not
        known, the worker reports it as failed.
        """
        if external <= 0:
            return
        state = self._state_of(request)
        state.loaded = state.loading = True
        self._looked_up.discard(request.request_id)
        self._read_ahead.loading(request.request_id)
        start, end = state.offered_from, state.offered_from + external
        lookup = state.lookup
        chain = lookup.chain if lookup is not None and lookup.done else None
        known: list[Chunk] = []
        if lookup is not None and chain is not None:
            known = self._chunks_of(state, lookup, chain, end)
        chunks = {
            kind: known[indices.start : indices.stop]
            for kind, indices in self._ranges(start, end).items()
        }
        blocks = tuple(map(list, block_ids))
        state.period = self._admit_blocks(blocks, start, request.mm_features)
        op = LoadOp(
            request.request_id,
            start,
            end,
            chunks.get(FULL, []),
            blocks,
            state.adapter,
            self._handshake.round,
            windows=chunks.get(WINDOW, []),
            states=chunks.get(STATE, []),
        )
        if self._drafts is not None:
            op.drafts.extend(self._drafts.to_load(request.request_id, chain, start, end))
        self._read_ahead.note_in_engine_cache(op.chunks)
        self._loads.append(op)

    def _chunks_of(self, state: _Request, lookup: Lookup, chain: KeyChain, end: int) -> list[Chunk]:
        """Return the chunks of a prompt of which a load of tokens before `end` takes the first."""
        awaited = state.awaited
        handed_over = awaited.tail if awaited is not None and awaited.hit_tokens else None
        for tail in (handed_over, lookup.tail):
            first = 0 if tail is None else tail.index * self._config.chunk_size
            if tail is not None and first < end <= first + tail.tokens:
                return [*chain.chunks[: tail.index], tail]
        return chain.chunks

    def _ranges(self, start: int, end: int) -> dict[Kind, range]:
        """Return the chunks of each kind that a load of tokens ``[start, end)`` needs."""
        size, kinds = self._config.chunk_size, self._groups.kinds
        if not self._groups.hybrid:
            return {FULL: range(start // size, -(-end // size))}
        if end % size:
            # Not a hit that was offered: no load for it is known.
            return {}
        ranges: dict[Kind, range] = {}
        first, last = start // size, end // size
        if FULL in kinds:
            ranges[FULL] = range(first, last)
        if WINDOW in kinds:
            reach = window_chunks(last, self._groups.window, size)
            ranges[WINDOW] = range(max(first, reach.start), last)
        if STATE in kinds:
            ranges[STATE] = range(last - 1, last)
        return ranges

    def _admit_blocks(
        self, block_ids: Sequence[Sequence[int]], computed: int, features: Iterable[Any] | None
    ) -> int:
        """Note which blocks a request has, of which the first `computed` tokens are in a cache."""
        scratch = self._groups.scratch
        # A ring has no KV of these tokens.
        sizes = [0 if group.index in scratch else group.block_size for group in self._groups]
        filled = [-(-computed // size) if size else 0 for size in sizes]
        old = self._encoder_outputs.are_old(features)
        period = self._blocks.admit(block_ids, filled, old=old)
        if self._groups.hybrid and any(size and computed % size for size in sizes):
            # vLLM copied a block of another request, and it is not known which.
            return min(0, period)
        return period

    def fail_load(self, request_id: str, external: int) -> None:
        """Plan a load after an error in :meth:`allocated`: the workers report it as failed."""
        if external > 0:
            state = self._requests.get(request_id)
            if state is not None:
                state.loaded = state.loading = True
            # Without its blocks, the workers have all tokens of the request computed.
            self._loads.append(LoadOp(request_id, 0, external, [], ([],) * len(self._groups)))

    # ------------------------------------------------------------- steps

    def step_metadata(self, output: Any) -> StepMetadata:
        """Return what the workers have to do in this step, and forget it."""
        idle = output.total_num_scheduled_tokens == 0
        self._idle_steps = self._idle_steps + 1 if idle else 0
        if not idle:
            self._computed = output.num_scheduled_tokens
        self._steps += 1
        self._stepped_at = time.monotonic()
        self._budget_left = self._budget_of_step()
        self._awaiting.scheduled(output.num_scheduled_tokens)
        if self._looked_up:
            self._looked_up.difference_update(output.num_scheduled_tokens)
        if self._not_looked_up and not self._handshake.checking:
            for request_id in output.num_scheduled_tokens:
                self._not_looked_up.pop(request_id, None)
            self._look_up_next()
        meta = StepMetadata(idle=self._may_wait)
        if self._blocks.period:
            try:
                self._note_blocks(output)
            except Exception as error:  # noqa: BLE001 - the loads must reach the worker
                self._blocks.lose()
                self._log.error("it is not known which blocks a step filled", exc_info=error)
        try:
            meta.prefetches = self._read_ahead.plan(
                output.num_scheduled_tokens, self._loadable, paused=self._loads_are_paused
            )
        except Exception as error:  # noqa: BLE001 - the loads must reach the worker
            self._log.error("prefetches of a step could not be planned", exc_info=error)
        if self._drafts is not None:
            try:
                self._drafts.begin_step(self._computed_by(output))
            except Exception as error:  # noqa: BLE001 - the loads must reach the worker
                self._drafts = None
                self._log.error("KV of the drafter is left out from now on", exc_info=error)
        if self._whole_items:
            self._note_cuts(output)
        self._note_sync_loads(output)
        if self._unsettled_steps:
            # A later step stores the chunks of requests that are still running then.
            self._unsettled_steps -= 1
        elif self._may_store and self._serving:
            try:
                self._plan_stores(output, meta)
            except Exception as error:  # noqa: BLE001 - the loads must reach the worker
                meta.stores = []
                self._break_promises(output.num_scheduled_tokens)
                self._log.error("stores of a step could not be planned", exc_info=error)
        if self._postponed:
            self._allow_postponed(output, meta)
        self._hand_out(meta)
        self._rest(meta)
        return meta

    def _rest(self, meta: StepMetadata) -> None:
        """Sleep for a moment if all requests wait for hand-overs, and a step has no work."""
        held, self._held = self._held, 0
        hurried, self._hurried = self._hurried, False
        if not meta.idle or hurried or not held or held < len(self._requests):
            return
        if self._handshake.checking:
            # Workers compare their weights in steps.
            return
        if meta != StepMetadata(idle=True, weights_round=meta.weights_round):
            return
        seconds = self._awaiting.longest_rest()
        if seconds > 0:
            (time.sleep if self._waits is None else self._waits.sleep)(seconds)

    def failed_step(self) -> StepMetadata:
        """Return what the workers have to do after an error in :meth:`step_metadata`.

        What the step computes is not known, so nothing more is stored of the requests that may be
        part of it.
        """
        self._idle_steps = 0
        self._unsettled_steps = self._steps_in_flight
        self._blocks.lose()
        for state in self._requests.values():
            state.cut = 0
        self._break_promises(self._requests)
        return self._hand_out(StepMetadata())

    def _hand_out(self, meta: StepMetadata) -> StepMetadata:
        """Add what every step must bring to the workers."""
        meta.namespace = self._handshake.announcement
        if self._drafts is not None:
            meta.draft_namespace = self._drafts.announcement
        meta.prefetch_ended = self._read_ahead.take_ended()
        meta.loads, self._loads = self._loads, []
        meta.cancelled, self._cancelled = self._cancelled, []
        meta.held, self._to_hold = self._to_hold, []
        meta.gone, self._gone = self._gone, []
        meta.reset, self._reset = self._reset, False
        meta.weights_round = self._handshake.round
        return meta

    @property
    def _serving(self) -> bool:
        """Whether KV may be loaded and stored."""
        return self.namespace is not None and not self.disabled and not self._handshake.checking

    def _note_blocks(self, output: Any) -> None:
        """Note which requests got which blocks, and in which period."""
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            features = None if state is None else state.request.mm_features
            period = self._admit_blocks(new.block_ids, new.num_computed_tokens, features)
            if state is not None:
                state.period = period
        cached = output.scheduled_cached_reqs
        for req_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            state = self._requests.get(req_id)
            if state is None or not blocks:
                continue
            if req_id in cached.resumed_req_ids:
                state.period = self._admit_blocks(blocks, computed, state.request.mm_features)
            else:
                self._blocks.take(blocks, state.period)

    def _allow_postponed(self, output: Any, meta: StepMetadata) -> None:
        """Name the requests whose postponed stores workers may gather.

        Of those of this step: vLLM keeps their blocks until it has the step's output. But the
        blocks of a request that was preempted since then may be others'.
        """
        for request_id, preempted in list(self._postponed.items()):
            if self._requests[request_id].request.num_preemptions != preempted:
                del self._postponed[request_id]
                self._gone.append((request_id, preempted))
                # Lost chunks are stored when they are in the cache again.
                self._requests[request_id].next_store = 0
            elif request_id in output.num_scheduled_tokens:
                meta.again.append((request_id, preempted))

    def _note_postponed(self, owner: Owner) -> None:
        request_id, preempted = owner
        state = self._requests.get(request_id)
        if state is not None and state.request.num_preemptions == preempted:
            self._postponed[request_id] = preempted
        elif request_id not in self._held_blocks:
            self._gone.append(owner)
            if state is not None:
                state.next_store = 0

    def _loads_are_paused(self) -> bool:
        lookups = self._lookups
        return not self._serving or lookups is None or self._breaker_is_open(lookups)

    def _loadable(self, request_id: str) -> Loadable | None:
        """Return what a load of a request would bring now; None while that is not known."""
        state = self._requests[request_id]
        lookup, awaited = state.lookup, state.awaited
        if lookup is None or not lookup.done or lookup.given_up or lookup.chain is None:
            return None
        size, first = self._config.chunk_size, state.offered_from
        if awaited is not None and awaited.outcome is None:
            # Windows and states are useful at the end of the wait only.
            full = range(first // size, awaited.full_chunks)
            return Loadable(lookup.chain.chunks, {FULL: full} if full else {}, grows=True)
        hit = self._hit_tokens(state, lookup, first)
        if state.gave_up or hit <= first:
            return Loadable()
        chunks = self._chunks_of(state, lookup, lookup.chain, hit)
        if chunks[-1].tail:
            # It is small, and appears last.
            chunks = chunks[:-1]
            hit = min(hit, len(chunks) * size)
        return Loadable(chunks, self._ranges(first, hit) if hit > first else {})

    def _note_sync_loads(self, output: Any) -> None:
        """Note which requests depend on loads of another connector whose outcome is not known.

        These are requests that a step with such loads admits, and those admitted behind it that
        share blocks with them. All others were admitted before, into blocks of their own.
        """
        loads = getattr(output, "has_sync_kv_loads", False)
        if not loads and not self._unsettled:
            return
        self._unsettled = {
            request_id: (left - 1, blocks)
            for request_id, (left, blocks) in self._unsettled.items()
            if left > 1
        }
        admitted = [new.req_id for new in output.scheduled_new_reqs]
        admitted += getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())
        for request_id in admitted:
            tables = output.kv_connector_block_state.get_block_ids(request_id) or ()
            blocks = frozenset(itertools.chain.from_iterable(tables)) - {NULL_BLOCK}
            if loads or any(blocks & others for _, others in self._unsettled.values()):
                self._unsettled[request_id] = self._steps_in_flight, blocks

    def _plan_stores(self, output: Any, meta: StepMetadata) -> None:
        for req_id, before, after in _scheduled(output):
            if req_id in self._unsettled:
                # A later step stores its chunks, if it is still running then.
                continue
            self._plan_request(req_id, before, after, output, meta)

    def _computed_by(self, output: Any) -> list[tuple[Any, int, int]]:
        """Return the requests of a step, with their tokens with KV before and after it."""
        return [
            (self._requests[req_id].request, before, after)
            for req_id, before, after in _scheduled(output)
            if req_id in self._requests
        ]

    def _plan_request(
        self, req_id: str, before: int, after: int, output: Any, meta: StepMetadata
    ) -> None:
        """Plan the stores of a request, of which a step computes tokens ``[before, after)``."""
        state = self._requests.get(req_id)
        if state is None or (
            state.next_boundary[0] == state.next_store and after < state.next_boundary[1]
        ):
            return
        if not state.addressable or not self._blocks.is_valid(state.period):
            return
        request, lookup = state.request, state.lookup
        if not self._adapters.trusts(request.lora_request):
            return
        size = self._config.chunk_size
        # Tokens beyond these (drafts, samples in flight) may still change.
        known = request.num_tokens if self._config.save_decode else request.num_prompt_tokens
        end = min(after, known, state.cut)
        complete = end // size
        states = self._states_at(req_id, (before, after), complete, output)
        tail = self._needs_tail(state, end)
        if complete <= state.next_store and not states and not tail:
            state.next_boundary = self._boundary_after(state)
            return
        if lookup is None or lookup.given_up:
            # The request was admitted before the namespace was known, or has no keys yet.
            if self._lookups is None:
                return
            lookup = self._start_lookup(self._lookups, state)
        chain = self._keys(state, lookup)
        if chain is None:
            return
        if lookup.tail is not None and self._is_usable(state, lookup.tail, FULL):
            state.tail_planned = True
            tail = self._needs_tail(state, end)
        if len(chain.chunks) < complete:
            chain.extend(request._all_token_ids[chain.tokens : complete * size])
        self._read_ahead.note_in_engine_cache(chain.chunks[state.next_store : complete])
        tables: Sequence[Sequence[int]] | None = None
        for chunk in chain.chunks[state.next_store : complete]:
            kinds = self._groups.kinds
            stored = [kind for kind in kinds if self._is_stored(state, lookup, chunk, kind)]
            missing = [kind for kind in kinds if kind != STATE and kind not in stored]
            for kind in stored:
                self._note_promised(state, kind, chunk, seen=True)
            if not missing:
                continue
            if tables is None:
                tables = output.kv_connector_block_state.get_block_ids(req_id)
                if tables is None:
                    return
            for kind in missing:
                blocks = self._blocks_of(chunk, kind, tables)
                if blocks is None:
                    # vLLM has freed blocks that a sliding window has passed.
                    self._note(Event.DROPPED_STORE, chunk, Reason.BLOCKS_FREED, kind)
                else:
                    op = self._store_op(state, lookup, chain, chunk, kind, blocks)
                    meta.stores.append(op)
        for index, blocks in states.items():
            chunk = chain.chunks[index]
            if self._is_worth_storing(state, lookup, chunk):
                state.last_state = index
                meta.stores.append(self._store_op(state, lookup, chain, chunk, STATE, blocks))
            elif index != state.last_state and not self._is_stored(state, lookup, chunk, STATE):
                self._note(Event.REFUSED_STORE, chunk, Reason.NOT_WORTH, STATE)
        if tail:
            first, prompt = request.num_prompt_tokens // size, request.num_prompt_tokens
            chunk = chain.tail_after(first, request._all_token_ids[first * size : prompt])
            tables = output.kv_connector_block_state.get_block_ids(req_id)
            of_tail = None if tables is None else self._blocks_of(chunk, FULL, tables)
            state.tail_planned = tables is not None
            if of_tail is not None:
                meta.stores.append(self._store_op(state, lookup, chain, chunk, FULL, of_tail))
        state.next_store = max(state.next_store, complete)

    def _boundary_after(self, state: _Request) -> tuple[int, int]:
        """Return a request's next chunk to store, and the first token at which one is complete."""
        if STATE in self._groups.kinds:
            # vLLM may offer one in any step.
            return state.next_store, 0
        request, size = state.request, self._config.chunk_size
        boundary = (state.next_store + 1) * size
        if not self._config.save_decode and boundary > request.num_prompt_tokens:
            boundary = sys.maxsize
        if self._needs_tail(state, request.num_prompt_tokens):
            boundary = min(boundary, request.num_prompt_tokens)
        return state.next_store, boundary

    def _needs_tail(self, state: _Request, end: int) -> bool:
        """Whether to store the tail of a request whose tokens before `end` have KV."""
        prompt = state.request.num_prompt_tokens
        if not self._tails or end < prompt or not prompt % self._config.chunk_size:
            return False
        if state.promise is not None:
            return state.promise.tail is None
        return not state.tail_planned and self._has_cached_tail(state)

    def _note_promised(self, state: _Request, kind: Kind, chunk: Chunk, *, seen: bool) -> None:
        """Note a kind of a chunk that is stored or planned to be, if the request hands over."""
        if state.promise is not None:
            assert self.namespace is not None
            state.promise.add(self.namespace, kind, chunk, seen=seen)

    def _break_promises(self, request_ids: Iterable[str]) -> None:
        """Promise nothing of requests whose stores are unknown."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.promise = None

    def _blocks_of(
        self, chunk: Chunk, kind: Kind, tables: Sequence[Sequence[int]]
    ) -> dict[int, list[int]] | None:
        """Return the blocks of a chunk in each group of a kind; None if vLLM has freed some."""
        size = self._config.chunk_size
        groups = self._groups.of(kind)
        if kind == FULL:
            # The drafter's KV is stored with these.
            groups += tuple(group for group in self._groups.drafts if group.kind == FULL)
        found: dict[int, list[int]] = {}
        for group in groups:
            first = chunk.index * size // group.block_size
            last = -(-(chunk.index * size + chunk.tokens) // group.block_size)
            found[group.index] = blocks = list(tables[group.index][first:last])
            if len(blocks) < last - first or NULL_BLOCK in blocks:
                return None
        return found

    def _states_at(
        self, req_id: str, computed: Sequence[int], complete: int, output: Any
    ) -> dict[int, dict[int, list[int]]]:
        """Return the chunks whose states of a request are in the cache at the end of a step.

        Parameters
        ----------
        req_id : str
        computed : Sequence of int
            Tokens with KV before and after the step. The state of before the step is still there:
            behind a block boundary a step goes on with a copy. It is stored then if it could not be
            at its own step, as where vLLM schedules ahead of the tokens that it samples.
        complete : int
            Number of chunks whose tokens can no longer change.
        output : SchedulerOutput

        Returns
        -------
        dict
            For each index of such a chunk, the block of each state group, by the group's index.
        """
        groups, size = self._groups.of(STATE), self._config.chunk_size
        found: dict[int, dict[int, list[int]]] = {}
        if not groups:
            return found
        offered = output.kv_connector_block_state.boundary_state_offloads.get(req_id, ())
        for group, block, tokens in offered:
            if tokens % size == 0 and 0 < tokens <= complete * size:
                found.setdefault(tokens // size - 1, {})[group] = [block]
        request = self._requests[req_id]
        ends = [
            n
            for n in computed
            if n % size == 0 and 0 < n <= complete * size and not self._is_drafted(request, n)
        ]
        tables = output.kv_connector_block_state.get_block_ids(req_id) if ends else ()
        for tokens in ends if tables else ():
            at_end = found.setdefault(tokens // size - 1, {})
            for group in groups:
                column = tokens // group.block_size - 1
                if group.index not in at_end and column < len(tables[group.index]):
                    at_end[group.index] = [tables[group.index][column]]
        return {
            index: blocks
            for index, blocks in sorted(found.items())
            if len(blocks) == len(groups) and [NULL_BLOCK] not in blocks.values()
        }

    def _is_stored(self, state: _Request, lookup: Lookup, chunk: Chunk, kind: Kind) -> bool:
        """Whether the lookup saw a kind of a chunk on the shelf, and no load of it failed."""
        if not self._is_usable(state, chunk, kind):
            return False
        if state.awaited is not None and state.awaited.has_seen(kind, chunk.index):
            return True
        if kind == FULL:
            return chunk.index < lookup.full_chunks
        return chunk.index in lookup.known.get(kind, ())

    def _is_usable(self, state: _Request, chunk: Chunk, kind: Kind) -> bool:
        """Whether no load of a kind of a chunk has failed since it was last stored."""
        key = kind_key(chunk.key, kind)
        return key not in state.failures and key not in self._failed

    def _is_worth_storing(self, state: _Request, lookup: Lookup, chunk: Chunk) -> bool:
        """Whether to store the state after a chunk.

        Stored are those at which later prompts are likely to begin: the last one of the prompt
        (with some drafters a block before it, since vLLM drops the last block of its own hits),
        those where vLLM has seen prompts part, and those inside a prefix that another prompt has
        had, since its full chunks are on the shelf. Of the others one is stored where prompts would
        otherwise have to compute too many chunks anew.
        """
        if chunk.index == state.last_state or self._is_stored(state, lookup, chunk, STATE):
            return False
        if FULL in self._groups.kinds and self._is_stored(state, lookup, chunk, FULL):
            return True
        request, end = state.request, (chunk.index + 1) * self._config.chunk_size
        last = request.num_prompt_tokens - 1
        first = max(0, last - self._held_back) // self._config.chunk_size
        parting = request.shared_prefix_boundary
        if first <= chunk.index + 1 <= last // self._config.chunk_size:
            return True
        if end == parting - parting % self._groups.alignment:
            return True
        known = lookup.known.get(STATE, frozenset())
        before = max([state.last_state, *(index for index in known if index < chunk.index)])
        return chunk.index - before >= self._config.state_interval

    def _store_op(
        self,
        state: _Request,
        lookup: Lookup,
        chain: KeyChain,
        chunk: Chunk,
        kind: Kind,
        blocks: dict[int, list[int]],
    ) -> StoreOp:
        key = kind_key(chunk.key, kind)
        draft = None
        if self._drafts is not None and kind == FULL:
            draft = self._drafts.to_store(state.request.request_id, chain, chunk.index)
        self._note_promised(state, kind, chunk, seen=False)
        state.planned_at = self._steps
        return StoreOp(
            chunk,
            tuple(blocks.get(group.index, []) for group in self._groups),
            state.failures.get(key, False) or self._failed.is_bad(key),
            time.monotonic() - lookup.as_of,
            state.adapter,
            self._handshake.round,
            draft,
            kind,
            "" if state.promise is None else state.promise.attempt,
            (state.request.request_id, state.request.num_preemptions),
            kind == STATE and self._is_drafted(state, (chunk.index + 1) * self._config.chunk_size),
        )

    def _is_drafted(self, state: _Request, tokens: int) -> bool:
        """Whether drafts may have been computed with the token before so many tokens."""
        return self._drafting and tokens > state.request.num_prompt_tokens

    def worker_output(self, meta: WorkerMetadata) -> None:
        """Take what the workers report of a step."""
        for failure in itertools.chain.from_iterable(meta.failures):
            self._note_failure(failure)
        for key, rank in meta.repaired:
            self._note_repaired(key, rank)
        self._note_there(meta.published)
        for number in meta.other_adapters:
            self._adapters.distrust(number)
        for rank, is_open in meta.breaker_open.items():
            (self._open_breakers.add if is_open else self._open_breakers.discard)(rank)
        for rank, refused in meta.writes_refused.items():
            (self._refusing.add if refused else self._refusing.discard)(rank)
        for owner in meta.postponed:
            self._note_postponed(owner)
        again = self._handshake.receive(meta.reports, meta.weights)
        if again or (self._reset_early and self._handshake.watched):
            self._reset_early = False
            self._compare_weights()
        shelf = self._shelf() if meta.reports or meta.weights else None
        if shelf is not None:
            self._open_namespace(shelf)
        if self._drafts is not None:
            self._drafts.receive(meta.draft_reports, self.namespace)
            for request_id, token in meta.without_drafts:
                self._drafts.missing(request_id, token)

    def _note_there(self, keys: Sequence[bytes]) -> None:
        """Note, on any thread, kinds of chunks that have appeared on the shelf."""
        lookups = self._lookups
        if lookups is None:
            return
        lookups.note_published(keys)
        self._note_published(keys)
        for key in keys:
            if not self._failed.is_bad(key):
                # A chunk that was missing and is stored now counts as present again.
                self._failed.forget(key)

    def _note_published(self, keys: Sequence[bytes]) -> None:
        now = time.monotonic()
        with self._publishing:
            for key in keys:
                self._published[key] = now
                self._published.move_to_end(key)
            while len(self._published) > _PUBLISHED_REMEMBERED:
                self._published.popitem(last=False)

    def _note_failure(self, failure: LoadFailure) -> None:
        key = kind_key(failure.key, failure.kind)
        if failure.key:
            self._failed.add(key, bad=failure.bad)
            self._repaired_ranks.pop(key, None)
        state = self._requests.get(failure.request_id)
        if state is None:
            return
        if failure.key:
            state.failures[key] = failure.bad
        if failure.key and failure.kind != FULL:
            state.failed[failure.kind].add(failure.chunk_index)
        else:
            limit = failure.chunk_index
            state.limit = limit if state.limit is None else min(state.limit, limit)
        if not self._groups.hybrid:
            return
        if state.awaited is not None and state.awaited.outcome is not None:
            # A wait that has not ended is not that of the load.
            state.awaited = None
        if state.loaded:
            # The load brought nothing. Other ranks may report the same one later.
            state.failed_loads += 1
            # Where no object is the cause, a shorter hit would fail as well.
            state.loaded = not failure.key or state.failed_loads >= _MOST_FAILED_LOADS
        if not state.loaded:
            state.drop_lookup()

    def _note_repaired(self, key: bytes, rank: int) -> None:
        """Trust a damaged chunk again once every rank that has layers of its kind repaired it."""
        ranks = self._repaired_ranks.setdefault(key, set())
        ranks.add(rank)
        if len(ranks) == self._ranks_of[kind_of_key(key)]:
            del self._repaired_ranks[key]
            self._failed.forget(key)
        elif len(self._repaired_ranks) > _REPAIRS_REMEMBERED:
            self._repaired_ranks.popitem(last=False)

    def loads_done(self, request_ids: set[str]) -> None:
        """Note that these requests' loads are finished."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.loading = False

    def _open_namespace(self, shelf: AnyShelf) -> None:
        """Start lookups once the workers' reports make a namespace."""
        fmt = self._handshake.unite()
        if fmt is None:
            if self.disabled and self._history is not None:
                self._history.describe(disabled=self._handshake.disabled_reason)
            return
        self._check_whole_shards(fmt)
        if drafter_has_kv(self._vllm_config):
            record: Mapping[str, Any] = fmt.namespace.record
            self._groups.narrow(record["layer_names"])
        changed = self._handshake.weights_changed
        if self.namespace is not None:
            if self.namespace.encoded == fmt.namespace.encoded:
                self._settle_weights(changed)
                self._handshake.settle(self.namespace)
                self._look_up_again()
                return
            # Chunk keys of the namespace of before.
            for state in self._requests.values():
                state.drop_lookup()
                if state.awaited is not None and state.awaited.outcome is not None:
                    state.awaited = None
        previous = self._lookups
        # If no thread can be started, the next report tries again: the namespace is not in use yet.
        self._views = {kind: shelf.view(fmt.of(kind)) for kind in fmt.kinds}
        self._lookups = LookupService(
            self._views[fmt.kind],
            others=self._views,
            window=self._groups.window,
            failed=self._failed,
            counters=self.counters,
            on_thread_start=self._on_thread_start,
        )
        self._ranks_of = self._ranks_with(fmt)
        drafts = draft_engine(self._vllm_config) is not None
        self._tails = fmt.tails and not self._groups.hybrid and not drafts
        self._caches_tails = self._tails and self._config.cache_tails
        if self._config.cache_tails and not self._tails:
            self._log.warning(
                "cache_tails has no effect: this engine has no tails, because %s",
                "it has several kinds of KV"
                if self._groups.hybrid
                else "a drafter has KV of whole chunks only"
                if drafts
                else "the layout of its KV cache is not known",
            )
        self._settle_weights(changed)
        self._handshake.settle(fmt.namespace)
        if self._waits is not None:
            self._waits.close()
            self._waits = None
        if previous is not None:
            previous.close()
            self._look_up_again()
        probe_cost = shelf.backend.properties.probe_cost
        if self._config.prefetch_budget(probe_cost) > 0:
            self._read_ahead.enable(self._engine_chunks())
        if self._history is not None:
            self._history.describe(namespace=fmt.namespace.folder, record=fmt.namespace.record)
        logger.info("shelf %s, namespace %s", shelf.backend.url, fmt.namespace.folder)

    def _ranks_with(self, fmt: ObjectFormat) -> dict[Kind, int]:
        """Return how many ranks have layers of each kind."""
        record: Mapping[str, Any] = fmt.namespace.record
        stages = record["stages"]
        kinds = record.get("kinds") or [fmt.kind] * sum(stages)
        ends = list(itertools.accumulate(stages))
        of_stages = [set(kinds[end - count : end]) for end, count in zip(ends, stages, strict=True)]
        ranks = self._handshake.ranks // len(stages)
        return {kind: ranks * sum(kind in of_stage for of_stage in of_stages) for kind in fmt.kinds}

    def _check_whole_shards(self, fmt: ObjectFormat) -> None:
        """Plan no stores where no rank holds all heads of a shard."""
        topologies = topologies_of(self._vllm_config, fmt.namespace.record)
        topology = next((one for one in topologies.values() if one.divided), None)
        if self._may_store and topology is not None:
            self._may_store = False
            if self._history is not None:
                self._history.describe(refuses="each rank holds only a part of a shard")
            logger.warning(
                "tensor_parallel_size=%d is more than the %d KV heads that all layers of this model"
                " have in common, so each rank holds only a part of a shard: this engine loads KV"
                " from the shelf and stores none. Other engines must store it, with"
                " tensor_parallel_size of at most %d",
                topology.tensor_parallel,
                topology.kv_heads,
                topology.kv_heads,
            )

    def _look_up_again(self) -> None:
        """Start the lookups of requests that arrived before lookups were possible."""
        assert self._lookups is not None
        for state in self._requests.values():
            waits = state.request.num_computed_tokens == 0 and not state.loading
            if state.lookup is None and state.addressable and waits:
                self._look_up_in_turn(self._lookups, state)

    def _engine_chunks(self) -> int | None:
        """Return how many chunks vLLM's prefix cache has room for; None if that is not known."""
        cache = self._vllm_config.cache_config
        if not getattr(cache, "enable_prefix_caching", True):
            return 0
        blocks = int(getattr(cache, "num_gpu_blocks", None) or 0)
        # The groups share the blocks. Windows and states need few of them.
        sizes = [group.block_size for group in self._groups.of(FULL) or self._groups]
        tokens = int(blocks / sum(1 / size for size in sizes))
        return tokens // self._config.chunk_size if blocks else None

    # ------------------------------------------------------------- end

    def finished(self, request_id: str) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; cancel its load if it is still running.

        Returns
        -------
        held : bool
            The request keeps its blocks until all workers have reported it.
        params : dict or None
            What is promised to another engine, if the request wants a hand-over.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return False, None
        preempted = self._postponed.pop(request_id, None)
        if preempted is not None:
            self._gone.append((request_id, preempted))
        self._read_ahead.end(request_id)
        self._awaiting.forget(request_id)
        self._looked_up.discard(request_id)
        self._not_looked_up.pop(request_id, None)
        if self._drafts is not None:
            self._drafts.finished(state.request)
        self._note_not_loaded(state)
        for lookup in (state.lookup, state.newer):
            if lookup is not None:
                lookup.cancel()
        if state.loading:
            self._cancelled.append(request_id)
        request, handover = state.request, None
        if state.promise is not None and request.num_computed_tokens >= request.num_prompt_tokens:
            size = self._config.chunk_size
            handover = state.promise.handover(
                self._groups, request.num_prompt_tokens, size, seen_only=bool(self._refusing)
            )
        if handover is None:
            return False, None
        params = handover.params()
        self.counters.add("handovers_promised")
        owner = (request_id, request.num_preemptions)
        # Workers have not reported yet which stores they postponed in the last steps.
        unknown = self._steps - state.planned_at <= self._steps_in_flight and state.planned_at
        if state.loading or not (unknown or owner in self._gone):
            return False, params
        self._gone = [gone for gone in self._gone if gone != owner]
        self._held_blocks.add(request_id)
        self._to_hold.append(owner)
        return True, params

    def released(self, request_ids: Iterable[str]) -> None:
        """Note that all workers have reported requests that kept their blocks."""
        self._held_blocks.difference_update(request_ids)

    def reset(self) -> bool:
        """Forget everything known of the shelf, and let the workers compare their weights.

        Requests that are being computed keep their chunk keys, under which they store.
        """
        self._failed.clear()
        if self._lookups is not None:
            self._lookups.forget()
        self._read_ahead.engine_cache_was_reset()
        self._adapters.prefix_cache_was_reset()
        for state in self._requests.values():
            if state.request.num_computed_tokens == 0 and not state.loading:
                state.drop_lookup()
        self._reset = True
        if self._handshake.watched:
            self._compare_weights()
        else:
            self._reset_early = True
        return True

    def _compare_weights(self) -> None:
        """Load and store nothing until it is known which weights the engine has."""
        self._handshake.begin_round()
        self._blocks.begin()
        self._encoder_outputs.begin()

    def _settle_weights(self, changed: bool) -> None:
        """Note whether the weights differ from those before the round."""
        self._blocks.settle(changed=changed)
        if self._encoder_outputs.settle(changed=changed):
            self._blocks.lose()

    def close(self) -> None:
        """Stop the threads."""
        if self._lookups is not None:
            self._lookups.close()
        if self._waits is not None:
            self._waits.close()


def _scheduled(output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield the requests of a step, with their tokens with KV before and after it.

    vLLM's second model runner lists resumed requests among the new ones, its first among the
    cached ones; both lists say how many tokens were computed before the step.
    """
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        computed = new.num_computed_tokens
        yield new.req_id, computed, computed + scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield req_id, computed, computed + scheduled[req_id]


def _items(request: Any) -> list[tuple[int, int]]:
    """Return where the multimodal items of a request begin and end, in order."""
    positions = [feature.mm_position for feature in request.mm_features]
    return sorted((found.offset, found.offset + found.length) for found in positions)


def _has_address(request: Any) -> bool:
    """Whether a request's KV is a function of tokens that never change.

    Embeddings have no content address, and a streaming session replaces tokens.
    """
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.prompt_is_token_ids is None
        and not request.resumable
    )
