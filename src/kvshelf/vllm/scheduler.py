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
5. ``worker_output`` learns failed loads: what failed is not offered to that request
   again, so that no request can loop.
6. ``finished`` forgets the request; a load that still runs is cancelled.

Contracts
---------
* A hit ends at a block boundary and leaves at least one token to compute.
* Until the namespace is known there are no hits and no stores.
* The answer to a preempted and resumed request comes from a new look-up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvshelf.chunkfile import ObjectFormat
from kvshelf.config import Config, cache_dir
from kvshelf.errors import ConfigError
from kvshelf.identity import (
    FingerprintCache,
    KeyChain,
    MultimodalItem,
    Namespace,
    group_of_salt,
    lora_digest,
)
from kvshelf.metrics import Counters
from kvshelf.probe import FailedKeys, Lookup, LookupService
from kvshelf.shelf import Shelf
from kvshelf.vllm.metadata import LoadOp, StepMetadata, StoreOp, WorkerMetadata, WorkerPart
from kvshelf.vllm.namespace import build_namespace

logger = logging.getLogger(__name__)

# An engine that computes nothing loses nothing by waiting as long as an empty step takes.
_IDLE_LOOKUP_SECONDS = 2e-3


class _Request:
    """What is known of one request of the engine."""

    __slots__ = (
        "asked_at",
        "gave_up",
        "limit",
        "loading",
        "lookup",
        "next_store",
        "offered_from",
        "preemptions",
        "request",
    )

    def __init__(self, request: Any) -> None:
        self.request = request
        self.lookup: Lookup | None = None
        self.asked_at: float | None = None
        self.gave_up = False
        self.limit: int | None = None
        self.loading = False
        self.next_store = 0
        self.offered_from = 0
        self.preemptions = request.num_preemptions


class SchedulerSide:
    """Scheduler half of :class:`kvshelf.vllm.connector.SharedStorageConnector`.

    Parameters
    ----------
    vllm_config : VllmConfig
    config : Config
    shelf : Shelf
    block_size : int
        Tokens in a block of the cache manager.
    ranks : int
        Number of workers that must report before the namespace is known.
    may_store, may_load : bool
        What the engine's ``kv_role`` allows.
    on_thread_start : Callable, optional
        Called first on each look-up thread.
    """

    def __init__(
        self,
        vllm_config: Any,
        config: Config,
        shelf: Shelf,
        *,
        block_size: int,
        ranks: int = 1,
        may_store: bool = True,
        may_load: bool = True,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._shelf = shelf
        self._block_size = block_size
        self._ranks = ranks
        self._may_store = may_store and not config.read_only
        self._may_load = may_load
        self._on_thread_start = on_thread_start
        self.counters = Counters()
        self._failed = FailedKeys()
        self._parts: dict[int, WorkerPart] = {}
        self._namespace: Namespace | None = None
        self._announce = False
        self._disabled = False
        self._lookups: LookupService | None = None
        self._requests: dict[str, _Request] = {}
        self._loads: list[LoadOp] = []
        self._cancelled: list[str] = []
        self._recheck = False
        self._idle = True
        self._lora_digests: dict[tuple[int, str, str], bytes] = {}
        self._fingerprints = FingerprintCache(cache_dir() / "fingerprints.json")

    # ------------------------------------------------------------- look-up

    def new_request(self, request: Any) -> None:
        """Start the look-up of a request that was just added."""
        state = self._requests[request.request_id] = _Request(request)
        if self._lookups is not None:
            self._start_lookup(state)

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Answer how many tokens beyond `computed` the shelf has, see the module."""
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = _Request(request)
        if state.gave_up or self._disabled or not _has_token_ids(request):
            return 0, False
        if state.preemptions != request.num_preemptions:
            state.preemptions = request.num_preemptions
            self._drop_lookup(state)
        now = time.monotonic()
        if state.asked_at is None:
            state.asked_at = now
        if self._lookups is None:
            if now - state.asked_at < self._config.identity_wait_s:
                return None, False
            state.gave_up = True
            return 0, False
        lookup = state.lookup or self._start_lookup(state)
        if not lookup.done:
            budget = self._config.lookup_budget_ms * 1e-3
            lookup.wait(max(budget, _IDLE_LOOKUP_SECONDS) if self._idle else budget)
        if not lookup.done:
            if now - state.asked_at < self._config.identity_wait_s + self._config.lookup_wait_s:
                return None, False
            self.counters.add("lookup_timeouts")
            state.gave_up = True
            return 0, False
        if not self._may_load:
            return 0, False
        hit = self._hit_tokens(state, lookup)
        state.offered_from = computed
        return (hit - computed, True) if hit > computed else (0, False)

    def _hit_tokens(self, state: _Request, lookup: Lookup) -> int:
        chunks = lookup.hit_chunks
        if state.limit is not None:
            chunks = min(chunks, state.limit)
        # One token must be left: the model has to compute something to sample from.
        hit = min(chunks * self._config.chunk_size, state.request.num_tokens - 1)
        return hit - hit % self._block_size

    def _start_lookup(self, state: _Request) -> Lookup:
        assert self._lookups is not None and self._namespace is not None
        request = state.request
        digest = self._namespace.digest

        def make_chain() -> KeyChain:
            salt = request.cache_salt or ""
            return KeyChain(
                digest,
                self._config.chunk_size,
                salt=salt,
                lora_digest=self._lora_digest(request.lora_request),
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

        # The list itself: vLLM only ever appends to it, and slices of it are taken on
        # the look-up thread.
        state.lookup = self._lookups.submit(request._all_token_ids, make_chain)
        return state.lookup

    def _lora_digest(self, lora: Any) -> bytes:
        """Return the adapter's digest, as of when this engine first used it."""
        if lora is None:
            return b""
        key = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        digest = self._lora_digests.get(key)
        if digest is None or lora.load_inplace:
            digest = lora_digest(lora.lora_path, cache=self._fingerprints)
            self._lora_digests[key] = digest
        return digest

    def _drop_lookup(self, state: _Request) -> None:
        if state.lookup is not None:
            state.lookup.cancel()
        state.lookup = None
        state.asked_at = None

    # ------------------------------------------------------------- loads

    def allocated(self, request: Any, block_ids: list[int], external: int) -> None:
        """Plan the load of `external` tokens into the request's blocks."""
        if external == 0:
            return
        state = self._requests[request.request_id]
        lookup = state.lookup
        assert lookup is not None and lookup.chain is not None
        size = self._config.chunk_size
        start, end = state.offered_from, state.offered_from + external
        chunks = lookup.chain.chunks[start // size : -(-end // size)]
        self._loads.append(LoadOp(request.request_id, start, end, chunks, list(block_ids)))
        state.loading = True
        self.counters.add("hit_tokens", external)
        self.counters.add("query_tokens", request.num_tokens - start)

    # ------------------------------------------------------------- steps

    def step_metadata(self, output: Any) -> StepMetadata:
        """Return what the workers are to do in this step; forgets it afterwards."""
        self._idle = output.total_num_scheduled_tokens == 0
        meta = StepMetadata(
            idle=self._idle,
            loads=self._loads,
            cancelled=self._cancelled,
            recheck_weights=self._recheck,
        )
        self._loads, self._cancelled, self._recheck = [], [], False
        if self._announce:
            assert self._namespace is not None
            meta.namespace = (self._namespace.encoded, self._namespace.slug)
        if self._may_store and self._namespace is not None and not self._disabled:
            self._plan_stores(output, meta)
        return meta

    def _plan_stores(self, output: Any, meta: StepMetadata) -> None:
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._plan_request(
                new.req_id, new.num_computed_tokens + scheduled[new.req_id], output, meta
            )
        cached = output.scheduled_cached_reqs
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._plan_request(req_id, computed + scheduled[req_id], output, meta)

    def _plan_request(self, req_id: str, computed: int, output: Any, meta: StepMetadata) -> None:
        state = self._requests.get(req_id)
        if state is None or state.lookup is None or not state.lookup.done:
            return
        request, lookup = state.request, state.lookup
        size = self._config.chunk_size
        # Tokens that are not known yet (drafts, samples in flight) may still change.
        known = request.num_tokens if self._config.save_decode else request.num_prompt_tokens
        complete = min(computed, known) // size
        if complete <= state.next_store:
            return
        chain = lookup.chain
        if chain is None:
            return
        if len(chain.chunks) < complete:
            chain.extend(request._all_token_ids[chain.tokens : complete * size])
        chunks = chain.chunks[state.next_store : complete]
        block_ids: list[int] | None = None
        age = time.monotonic() - lookup.finished_at
        for chunk in chunks:
            state.next_store = chunk.index + 1
            repair = self._failed.is_bad(chunk.key)
            if chunk.index < lookup.hit_chunks and chunk.key not in self._failed:
                continue
            if block_ids is None:
                groups = output.kv_connector_block_state.get_block_ids(req_id)
                if groups is None:
                    return
                block_ids = groups[0]
            first = chunk.index * size // self._block_size
            last = -(-(chunk.index + 1) * size // self._block_size)
            meta.stores.append(StoreOp(chunk, block_ids[first:last], repair, age))

    def worker_output(self, meta: WorkerMetadata) -> None:
        """Learn what the workers report."""
        if meta.parts:
            self._parts.update(meta.parts)
            self._unite_parts()
        else:
            # Workers send their parts until they have the namespace.
            self._announce = False
        for failure in meta.failures:
            self._failed.add(failure.key, bad=failure.bad)
            state = self._requests.get(failure.request_id)
            if state is not None:
                limit = failure.chunk_index
                state.limit = limit if state.limit is None else min(state.limit, limit)
        for key in meta.repaired:
            self._failed.forget(key)

    def loads_done(self, request_ids: set[str]) -> None:
        """Note that these requests' loads are over."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                state.loading = False

    def _unite_parts(self) -> None:
        if len(self._parts) < self._ranks:
            return
        parts = list(self._parts.values())
        problem = next((part.problem for part in parts if part.problem), "")
        if problem:
            self._disable(problem)
            return
        part = parts[0]
        if part.weights is None:
            return
        self._announce = True
        if self._namespace is not None:
            return
        try:
            namespace = build_namespace(self._vllm_config, self._config, part)
            fmt = ObjectFormat(namespace)
        except ConfigError as error:
            self._disable(str(error))
            return
        self._namespace = namespace
        self._lookups = LookupService(
            self._shelf,
            fmt,
            failed=self._failed,
            counters=self.counters,
            on_thread_start=self._on_thread_start,
        )
        logger.info("shelf %s, namespace %s", self._shelf.url, namespace.folder)

    def _disable(self, problem: str) -> None:
        if not self._disabled:
            self._disabled = True
            logger.error("nothing is loaded from or stored on the shelf: %s", problem)

    # ------------------------------------------------------------- end

    def finished(self, request_id: str) -> None:
        """Forget a request; cancel its load when it still runs."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        if state.lookup is not None:
            state.lookup.cancel()
        if state.loading:
            self._cancelled.append(request_id)

    def reset(self) -> bool:
        """Drop all that is remembered of the shelf, and have the weights checked again."""
        self._failed.clear()
        for state in self._requests.values():
            if not state.loading:
                self._drop_lookup(state)
        self._recheck = True
        return True

    def close(self) -> None:
        """Stop the look-up threads."""
        if self._lookups is not None:
            self._lookups.close()


def _has_token_ids(request: Any) -> bool:
    """Whether the prompt is made of tokens; embeddings have no content address."""
    return (
        request.prompt_token_ids is not None
        and request.prompt_embeds is None
        and request.prompt_is_token_ids is None
        and not request.resumable
    )
