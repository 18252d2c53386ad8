"""The scheduler side of the connector: what is on the shelf, what to load and store.

Owns each request's look-up and the decision which tokens are loaded and which chunks
are stored. Everything here runs on the engine's step thread, except the look-ups, which
:mod:`kvshelf.probe` runs on a thread of its own.

A request's life
----------------
1. ``new_request`` starts its look-up.
2. ``matched_tokens`` is asked, perhaps many times: (None, False) until the look-up is
   done or its time is up, then always the same answer.
3. ``allocated`` turns the answer into a load, unless vLLM did not take it.
4. ``step_metadata`` hands loads to the worker, and each chunk that the step completes
   and that the look-up did not find as a store.
   Chunks of a request that a step could have admitted and did not (there are
   too many requests, or too few blocks) are named to the worker, which reads
   them into memory meanwhile.
5. ``worker_output`` learns what failed, so that it is computed and stored again.
6. ``finished`` forgets the request; a load that still runs is cancelled.

Contracts
---------
* A hit ends at a block boundary and leaves at least one token to compute.
* One load for each time a request is admitted: what a load did not deliver is computed,
  so no request can loop.
* Until the namespace is known there are no hits and no stores. Requests wait for it at
  most until one deadline, which the first of them sets.
* While the scheduler or a worker gives the storage a rest there are no hits, and nobody waits.
* All waiting for look-ups together takes no more of a step than the look-up budget.
* The answer to a preempted and resumed request comes from a new look-up.
* What is computed while another connector (inside MultiConnector) loads synchronously is not
  stored before that load's outcome is known: it may stand on blocks without KV.
* Where the tokens of an image attend to each other in both directions, KV of an image is what
  one step makes of it. No hit ends within one, so that no later step has to go on with it; and
  what follows the beginning of one that vLLM divided all the same is not stored.
* Only tokens that cannot change any more are stored: those of the prompt and those that
  vLLM has accepted, never drafts or samples in flight.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvshelf.chunkfile import ObjectFormat
from kvshelf.config import Config, cache_dir
from kvshelf.errors import KVShelfError
from kvshelf.identity import (
    Chunk,
    FingerprintCache,
    KeyChain,
    MultimodalItem,
    Namespace,
    group_of_salt,
)
from kvshelf.metrics import Counters
from kvshelf.probe import FailedKeys, Lookup, LookupService
from kvshelf.shelf import Shelf
from kvshelf.vllm.adapters import AdapterDigests, adapter_settings
from kvshelf.vllm.metadata import (
    NULL_BLOCK,
    AdapterContent,
    LoadOp,
    PrefetchOp,
    StepMetadata,
    StoreOp,
    WorkerMetadata,
    WorkerPart,
)
from kvshelf.vllm.namespace import build_namespace

logger = logging.getLogger(__name__)

# An engine that computes nothing loses nothing by waiting as long as an empty step takes.
_IDLE_LOOKUP_SECONDS = 2e-3
_LOG_SECONDS = 60.0
# What a worker said is not trusted for longer while no step lets it say something else.
_STALE_SECONDS = 1.0
_REPAIRS_REMEMBERED = 4096
#: Of requests that wait so many are looked at in a step, and so many of their chunks named.
_WAITING_LOOKED_AT = 32
_PREFETCHES_A_STEP = 64
#: Chunks of which it is remembered that the engine had them, when its memory is not known.
_CHUNKS_AT_HAND = 4096


class _Request:
    """What is known of one request of the engine."""

    __slots__ = (
        "adapter",
        "addressable",
        "admission",
        "announced",
        "counted",
        "cut",
        "failures",
        "gave_up",
        "limit",
        "loaded",
        "loading",
        "lookup",
        "next_store",
        "offered_from",
        "ready",
        "request",
        "rested",
        "waiting_since",
    )

    def __init__(self, request: Any, addressable: bool) -> None:
        self.request = request
        self.addressable = addressable
        self.adapter: AdapterContent | None = None
        # Counts preemptions: after each one the request is admitted anew.
        self.admission: int = request.num_preemptions
        self.lookup: Lookup | None = None
        self.waiting_since: float | None = None
        self.gave_up = False
        self.loaded = False
        self.loading = False
        self.counted = False
        self.rested = False
        #: No hit may go beyond this chunk, which could not be loaded.
        self.limit: int | None = None
        #: Keys of chunks that could not be loaded; True when their objects are damaged.
        self.failures: dict[bytes, bool] = {}
        self.next_store = 0
        #: From this token on KV is not what its prefix demands.
        self.cut = sys.maxsize
        self.offered_from = 0
        #: A step has gone by since the look-up was done.
        self.ready = False
        #: Chunks from the first on that were named to the worker ahead of their load.
        self.announced = 0

    def admit_again(self) -> None:
        self.admission = self.request.num_preemptions
        self.loaded = self.gave_up = self.ready = False
        self.announced = 0
        self.drop_lookup()

    def drop_lookup(self) -> None:
        if self.lookup is not None:
            self.lookup.cancel()
        self.lookup = None
        self.waiting_since = None


class SchedulerSide:
    """Scheduler half of :class:`kvshelf.vllm.connector.SharedStorageConnector`.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    shelf : Callable[[], Shelf or None]
        Returns the shelf, None while it is not open.
    block_size : int
        Tokens in a block of the cache manager.
    ranks : int
        Number of workers that must report before the namespace is known.
    may_store, may_load : bool
        What the engine's ``kv_role`` allows.
    on_thread_start : Callable, optional
        Called first on each look-up thread.
    counters : Counters, optional
        Where to count; the side's own when absent.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        shelf: Callable[[], Shelf | None],
        *,
        block_size: int,
        ranks: int = 1,
        may_store: bool = True,
        may_load: bool = True,
        on_thread_start: Callable[[], None] | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._shelf = shelf
        self._block_size = block_size
        self._ranks = ranks
        self._may_store = may_store and not config.read_only
        self._may_load = may_load
        self._on_thread_start = on_thread_start
        self.counters = Counters() if counters is None else counters
        self._failed = FailedKeys()
        self._parts: dict[int, WorkerPart] = {}
        self._repaired_by: OrderedDict[bytes, set[int]] = OrderedDict()
        self._namespace: Namespace | None = None
        #: What the namespace was made of.
        self._stages: list[WorkerPart] = []
        self._announce = False
        self._disabled = False
        self._lookups: LookupService | None = None
        #: Ranks that give the storage a rest.
        self._resting: set[int] = set()
        self._stepped_at = 0.0
        self._identity_deadline: float | None = None
        self._requests: dict[str, _Request] = {}
        #: Those that may wait for their turn, by age.
        self._waiting: OrderedDict[str, _Request] = OrderedDict()
        self._waited: list[str] = []
        self._prefetches = False
        self._most_at_hand = _CHUNKS_AT_HAND
        #: Keys of what is probably in the engine's own prefix cache, the latest last.
        self._at_hand: OrderedDict[bytes, None] = OrderedDict()
        self._loads: list[LoadOp] = []
        self._cancelled: list[str] = []
        self._recheck = False
        self._budget = config.lookup_budget_ms * 1e-3
        self._budget_left = max(self._budget, _IDLE_LOOKUP_SECONDS)
        self._idle = True
        # With asynchronous scheduling and pipeline stages steps are planned before those before
        # them have ended.
        scheduling = getattr(vllm_config, "scheduler_config", None)
        stages = int(vllm_config.parallel_config.pipeline_parallel_size)
        self._doubtful_steps = stages + bool(getattr(scheduling, "async_scheduling", False))
        self._doubtful = 0
        self._next_log = 0.0
        self._items_have_content = _items_have_content(vllm_config)
        if not self._items_have_content:
            logger.warning(
                "prefix caching and the multimodal processor cache are both off: vLLM then numbers"
                " images, audio and video instead of naming them by content, so requests with"
                " them are neither loaded nor stored. Set --mm-processor-cache-gb above 0"
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
        return self._namespace

    @property
    def disabled(self) -> bool:
        """Whether nothing is ever loaded or stored; the log says why."""
        return self._disabled

    # ------------------------------------------------------------- look-up

    def new_request(self, request: Any) -> None:
        """Start the look-up of a request that was just added."""
        state = self._add(request)
        self._waiting[request.request_id] = state
        if self._lookups is not None and state.addressable and not self._disabled:
            self._start_lookup(self._lookups, state)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Answer how many tokens beyond `computed` the shelf has, see the module."""
        state = self._state_of(request)
        if state.admission != request.num_preemptions:
            state.admit_again()
            self._waiting[request.request_id] = state
        if not state.addressable or state.loaded or state.gave_up or self._disabled:
            return 0, False
        lookups = self._lookups
        if lookups is None:
            return (None, False) if self._may_wait_for_identity() else (0, False)
        lookup = state.lookup or self._start_lookup(lookups, state)
        if self._is_resting(lookups):
            if not state.rested:
                state.rested = True
                self.counters.add("lookup_paused")
            return 0, False
        if not lookup.done and not self._wait(lookups, lookup):
            if not self._too_long(lookups, state):
                return None, False
            return self._no_answer(state)
        if lookup.given_up:
            return self._no_answer(state)
        if not self._may_load or not self._adapters.trusts(request.lora_request):
            return 0, False
        hit = self._hit_tokens(state, lookup)
        state.offered_from = computed
        if not state.counted:
            state.counted = True
            self.counters.add("query_tokens", request.num_tokens - computed)
            self.counters.add("hit_tokens", max(0, hit - computed))
        return (hit - computed, True) if hit > computed else (0, False)

    def _is_resting(self, lookups: LookupService) -> bool:
        """Whether the storage is given a rest, as far as is known."""
        if self._resting and time.monotonic() - self._stepped_at > _STALE_SECONDS:
            # Workers speak in steps only. One that still rests says so when it refuses a load.
            self._resting.clear()
        return bool(self._resting) or not lookups.available

    def _no_answer(self, state: _Request) -> tuple[int, bool]:
        """Compute a request whose look-up took too long."""
        state.gave_up = True
        self.counters.add("lookup_timeouts")
        return 0, False

    def _state_of(self, request: Any) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._add(request)
        return state

    def _add(self, request: Any) -> _Request:
        addressable = _has_address(request) and (
            self._items_have_content or not request.mm_features
        )
        state = self._requests[request.request_id] = _Request(request, addressable)
        return state

    def _may_wait_for_identity(self) -> bool:
        now = time.monotonic()
        if self._identity_deadline is None:
            self._identity_deadline = now + self._config.identity_wait_s
        return now < self._identity_deadline

    def _wait(self, lookups: LookupService, lookup: Lookup) -> bool:
        """Wait within the step's budget; return whether the look-up is done."""
        if self._budget_left <= 0:
            return False
        # Who waits in vain waits longer than asked for: until the look-up's thread next rests.
        if not self._idle and not lookups.may_be_done_within(lookup, self._budget_left):
            return False
        begin = time.monotonic()
        done = lookup.wait(self._budget_left)
        self._budget_left -= time.monotonic() - begin
        return done

    def _too_long(self, lookups: LookupService, state: _Request) -> bool:
        """Whether waiting any longer is of no use."""
        now = time.monotonic()
        if state.waiting_since is None:
            state.waiting_since = now
        longest = self._config.lookup_wait_s
        # A storage that held up one request for so long is not waited for by the next.
        return now - state.waiting_since >= longest or lookups.stalled(longest)

    def _hit_tokens(self, state: _Request, lookup: Lookup) -> int:
        chunks = lookup.hit_chunks
        if state.limit is not None:
            chunks = min(chunks, state.limit)
        # One token must be left: the model has to compute something to sample from.
        hit: int = min(chunks * self._config.chunk_size, state.request.num_tokens - 1)
        hit -= hit % self._block_size
        if self._whole_items:
            for start, end in reversed(_items(state.request)):
                if start < hit < end:
                    hit = start - start % self._block_size
        return hit

    def _note_cuts(self, output: Any) -> None:
        """Note items of which a step computes the beginning only, see the module."""
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
        assert self._namespace is not None
        request = state.request
        digest = self._namespace.digest

        def make_chain() -> KeyChain | None:
            adapter = self._adapters.digest(request.lora_request)
            if adapter is None:
                return None
            if adapter:
                state.adapter = AdapterContent(int(request.lora_request.lora_int_id), adapter)
            salt = request.cache_salt or ""
            return KeyChain(
                digest,
                self._config.chunk_size,
                salt=salt,
                lora_digest=adapter,
                items=[
                    MultimodalItem(
                        feature.identifier,
                        feature.mm_position.offset,
                        feature.mm_position.length,
                    )
                    for feature in request.mm_features
                ],
                group=group_of_salt(salt) if self._config.group_by_salt else "_",
            )

        # The list itself: vLLM only ever appends to it (see _has_address), and slices of
        # it are taken on the look-up thread.
        state.lookup = lookups.submit(request._all_token_ids, make_chain)
        return state.lookup

    # ------------------------------------------------------------- loads

    def allocated(self, request: Any, block_ids: list[int], external: int) -> None:
        """Plan the load of `external` tokens into the request's blocks.

        vLLM now waits for this load, so it is planned whatever is known of it: one whose
        chunks are not known is reported failed by the worker.
        """
        if external <= 0:
            return
        state = self._state_of(request)
        state.loaded = state.loading = True
        self._waiting.pop(request.request_id, None)
        size = self._config.chunk_size
        start, end = state.offered_from, state.offered_from + external
        lookup = state.lookup
        chain = lookup.chain if lookup is not None and lookup.done else None
        chunks = [] if chain is None else chain.chunks[start // size : -(-end // size)]
        self._loads.append(
            LoadOp(request.request_id, start, end, chunks, list(block_ids), state.adapter)
        )
        self._note_at_hand(chunks)

    # ------------------------------------------------------------- steps

    def step_metadata(self, output: Any) -> StepMetadata:
        """Return what the workers are to do in this step; forgets it afterwards."""
        self._idle = output.total_num_scheduled_tokens == 0
        self._stepped_at = time.monotonic()
        self._budget_left = max(self._budget, _IDLE_LOOKUP_SECONDS) if self._idle else self._budget
        meta = StepMetadata(
            idle=self._idle,
            loads=self._loads,
            cancelled=self._cancelled,
            recheck_weights=self._recheck,
        )
        self._loads, self._cancelled, self._recheck = [], [], False
        if self._prefetches:
            try:
                self._plan_prefetches(output, meta)
            except Exception as error:  # noqa: BLE001 - the loads must reach the worker
                self._log_error("what to read ahead could not be planned", error)
            meta.waited, self._waited = self._waited, []
        if self._announce and self._namespace is not None:
            meta.namespace = (self._namespace.encoded, self._namespace.slug)
        if self._whole_items:
            self._note_cuts(output)
        if getattr(output, "has_sync_kv_loads", False):
            self._doubtful = self._doubtful_steps
        if self._doubtful:
            # Requests that go on have their chunks stored by a later step.
            self._doubtful -= 1
        elif self._may_store and self._namespace is not None and not self._disabled:
            try:
                self._plan_stores(output, meta)
            except Exception as error:  # noqa: BLE001 - the loads must reach the worker
                meta.stores = []
                self._log_error("stores of a step could not be planned", error)
        return meta

    def _plan_prefetches(self, output: Any, meta: StepMetadata) -> None:
        """Name chunks of requests that wait, oldest requests first."""
        lookups = self._lookups
        rests = self._disabled or lookups is None or self._is_resting(lookups)
        left = _PREFETCHES_A_STEP
        for request_id in list(itertools.islice(self._waiting, _WAITING_LOOKED_AT)):
            state = self._waiting[request_id]
            if request_id in output.num_scheduled_tokens:
                # It was admitted without a load: vLLM had what the shelf has, or there is none.
                del self._waiting[request_id]
                if state.announced:
                    self._waited.append(request_id)
                continue
            lookup = state.lookup
            if lookup is None or not lookup.done or lookup.given_up or lookup.chain is None:
                continue
            if not state.ready:
                # It may be admitted by the next step.
                state.ready = True
                continue
            if rests or left <= 0 or state.gave_up:
                continue
            size = self._config.chunk_size
            end = -(-self._hit_tokens(state, lookup) // size)
            first = max(state.announced, state.offered_from // size)
            chunks = lookup.chain.chunks
            while first < end and chunks[first].key in self._at_hand:
                first += 1
            wanted = chunks[first : min(end, first + left)]
            state.announced = first + len(wanted)
            left -= len(wanted)
            if wanted:
                meta.prefetches.append(PrefetchOp(request_id, wanted))

    def _note_at_hand(self, chunks: Sequence[Chunk]) -> None:
        """Note that the engine has these chunks in its KV cache, for a while."""
        if not self._prefetches:
            return
        for chunk in chunks:
            self._at_hand[chunk.key] = None
            self._at_hand.move_to_end(chunk.key)
        while len(self._at_hand) > self._most_at_hand:
            self._at_hand.popitem(last=False)

    def _log_error(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_SECONDS
            logger.error("%s", what, exc_info=error)

    def _plan_stores(self, output: Any, meta: StepMetadata) -> None:
        scheduled = output.num_scheduled_tokens
        # Resumed requests are among the new ones for vLLM's second model runner, among
        # the cached ones for its first; what was computed before the step is in both.
        for new in output.scheduled_new_reqs:
            self._plan_request(
                new.req_id, new.num_computed_tokens + scheduled[new.req_id], output, meta
            )
        cached = output.scheduled_cached_reqs
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._plan_request(req_id, computed + scheduled[req_id], output, meta)

    def _plan_request(self, req_id: str, computed: int, output: Any, meta: StepMetadata) -> None:
        state = self._requests.get(req_id)
        if state is None or not state.addressable:
            return
        request, lookup = state.request, state.lookup
        if not self._adapters.trusts(request.lora_request):
            return
        size = self._config.chunk_size
        # Tokens that are not known yet (drafts, samples in flight) may still change.
        known = request.num_tokens if self._config.save_decode else request.num_prompt_tokens
        complete = min(computed, known, state.cut) // size
        if complete <= state.next_store:
            return
        if lookup is None or lookup.given_up:
            # It was admitted before the namespace was known, or there are no keys yet.
            if self._lookups is not None:
                self._start_lookup(self._lookups, state)
            return
        chain = lookup.chain
        if not lookup.done or chain is None:
            return
        if len(chain.chunks) < complete:
            chain.extend(request._all_token_ids[chain.tokens : complete * size])
        self._note_at_hand(chain.chunks[state.next_store : complete])
        block_ids: list[int] | None = None
        age = time.monotonic() - lookup.finished_at
        for chunk in chain.chunks[state.next_store : complete]:
            failed = chunk.key in state.failures or chunk.key in self._failed
            if chunk.index < lookup.hit_chunks and not failed:
                continue
            if block_ids is None:
                groups = output.kv_connector_block_state.get_block_ids(req_id)
                if groups is None:
                    return
                block_ids = groups[0]
            first = chunk.index * size // self._block_size
            last = -(-(chunk.index + 1) * size // self._block_size)
            blocks = list(block_ids[first:last])
            if len(blocks) < last - first or NULL_BLOCK in blocks:
                # Blocks that a sliding window has left behind are gone.
                continue
            repair = state.failures.get(chunk.key, False) or self._failed.is_bad(chunk.key)
            meta.stores.append(StoreOp(chunk, blocks, repair, age, state.adapter))
        state.next_store = complete

    def worker_output(self, meta: WorkerMetadata) -> None:
        """Learn what the workers report."""
        for failure in meta.failures:
            if failure.key:
                self._failed.add(failure.key, bad=failure.bad)
                self._repaired_by.pop(failure.key, None)
            state = self._requests.get(failure.request_id)
            if state is not None:
                limit = failure.chunk_index
                state.limit = limit if state.limit is None else min(state.limit, limit)
                if failure.key:
                    state.failures[failure.key] = failure.bad
        for key, rank in meta.repaired:
            self._note_repaired(key, rank)
        if meta.published and self._lookups is not None:
            self._lookups.stored(meta.published)
            for key in meta.published:
                if not self._failed.is_bad(key):
                    # What was gone is asked for again, rather than taken for missing.
                    self._failed.forget(key)
        for number in meta.other_adapters:
            self._adapters.distrust(number)
        for rank, resting in meta.resting.items():
            (self._resting.add if resting else self._resting.discard)(rank)
        if meta.parts:
            self._parts.update(meta.parts)
            self._unite_parts()
        else:
            # Workers send their parts until they have the namespace.
            self._announce = False

    def _note_repaired(self, key: bytes, rank: int) -> None:
        """Trust a bad chunk again once every rank has seen to its shards."""
        ranks = self._repaired_by.setdefault(key, set())
        ranks.add(rank)
        if len(ranks) == self._ranks:
            del self._repaired_by[key]
            self._failed.forget(key)
        elif len(self._repaired_by) > _REPAIRS_REMEMBERED:
            self._repaired_by.popitem(last=False)

    def loads_done(self, request_ids: set[str]) -> None:
        """Note that these requests' loads are over."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.loading = False

    def _unite_parts(self) -> None:
        if len(self._parts) < self._ranks:
            return
        parts = [self._parts[rank] for rank in sorted(self._parts)]
        bad = next((part for part in parts if part.problem), None)
        if bad is not None:
            self._disable(bad.problem, said=bad.said)
            return
        weights, shelf = parts[0].weights, self._shelf()
        if weights is None or shelf is None:
            return
        # Ranks are numbered stage by stage.
        degree = int(self._vllm_config.parallel_config.tensor_parallel_size)
        stages = parts[::degree]
        for rank, part in enumerate(parts):
            if replace(part, weights=None) != replace(stages[rank // degree], weights=None):
                self._disable(
                    f"the KV caches of rank {rank} differ from those of rank"
                    f" {rank // degree * degree} of the same stage in layers, shapes, layout or"
                    " scales: run all ranks on machines of one kind, with one version of vLLM"
                )
                return
        stages = [replace(part, weights=None) for part in stages]
        if self._namespace is not None:
            self._announce = True
            if stages != self._stages:
                self._disable(
                    "the KV caches were made anew with other layers, shapes, layout or scales:"
                    " restart the engine"
                )
            return
        try:
            namespace = build_namespace(self._vllm_config, self._config, stages, weights)
            fmt = ObjectFormat(namespace)
        except KVShelfError as error:
            self._disable(str(error))
            return
        lookups = LookupService(
            shelf,
            fmt,
            failed=self._failed,
            counters=self.counters,
            on_thread_start=self._on_thread_start,
        )
        # Only now, so that what failed until here is tried again.
        self._lookups, self._namespace, self._stages = lookups, namespace, stages
        self._announce = True
        probe_cost = shelf.backend.properties.probe_cost
        self._prefetches = self._may_load and self._config.prefetch_budget(probe_cost) > 0
        cache = self._vllm_config.cache_config
        blocks = int(getattr(cache, "num_gpu_blocks", None) or 0)
        if not getattr(cache, "enable_prefix_caching", True):
            self._most_at_hand = 0
        elif blocks:
            self._most_at_hand = blocks * self._block_size // self._config.chunk_size
        logger.info("shelf %s, namespace %s", shelf.url, namespace.folder)

    def _disable(self, problem: str, *, said: bool = False) -> None:
        if not self._disabled:
            self._disabled = True
            if not said:
                logger.error("nothing is loaded from or stored on the shelf: %s", problem)

    # ------------------------------------------------------------- end

    def finished(self, request_id: str) -> None:
        """Forget a request; cancel its load when it still runs."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        self._waiting.pop(request_id, None)
        if state.lookup is not None:
            state.lookup.cancel()
        if state.loading:
            self._cancelled.append(request_id)
        elif state.announced:
            self._waited.append(request_id)

    def reset(self) -> bool:
        """Drop all that is remembered of the shelf, and have the weights checked again.

        Requests that are being computed keep their keys, with which they store.
        """
        self._failed.clear()
        if self._lookups is not None:
            self._lookups.forget()
        self._at_hand.clear()
        self._adapters.prefix_cache_was_reset()
        for state in self._requests.values():
            if state.request.num_computed_tokens == 0 and not state.loading:
                state.drop_lookup()
        self._recheck = True
        return True

    def close(self) -> None:
        """Stop the look-up threads."""
        if self._lookups is not None:
            self._lookups.close()


def _items(request: Any) -> list[tuple[int, int]]:
    """Return where the multimodal items of a request begin and end, in order."""
    positions = [feature.mm_position for feature in request.mm_features]
    return sorted((found.offset, found.offset + found.length) for found in positions)


def _items_have_content(vllm_config: Any) -> bool:
    """Whether vLLM names multimodal items by their content (vllm/renderers/base.py)."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return (
        multimodal is None
        or multimodal.mm_processor_cache_gb > 0
        or bool(vllm_config.cache_config.enable_prefix_caching)
    )


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
