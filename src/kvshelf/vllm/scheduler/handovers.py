"""The hand-overs that requests of this engine wait for.

Owns which requests wait, until when, for which objects, and how each wait ends.
:class:`kvshelf.shelf.waits.WaitService` looks for the objects.

A wait begins when its request arrives, and ends in one of these ways, each of which is counted:

* ``complete``: everything that was promised is on the shelf;
* ``gave_up``: the producer's marker says that a part will never be;
* ``late``: the deadline has passed, or the rest of a bare hand-over does not appear;
* ``vain``: nothing new of a bare hand-over has appeared;
* ``other_namespace``: this engine cannot use the producer's KV;
* ``invalid``: the params are malformed, or do not fit the request;
* ``refused``: too many requests wait already;
* ``skipped``: the hand-over is bare, and too many requests wait, or many have waited in vain.

A wait also ends, uncounted, when its request is aborted, or computed or served from vLLM's cache.

A *bare* hand-over does not say what was promised, nor whether anything was. Its request waits for
its own prompt, as far as a hit may go, and no longer than its patience. Otherwise it is served like
any request: it waits for no namespace and no broken storage, and is loaded where that pays. Bare
hand-overs have places of their own. A request without params waits for chunks only, since a
producer stores a tail only where it is asked to. It does not wait where no chunk is missing.

Contracts
---------
* A request that brings a hand-over waits for its chunks and the tail until its deadline, and never
  longer. What ends the wait of others does not end this one: a lookup's misses, chunks that failed,
  a late lookup, a storage that does not answer, an open breaker, a namespace that is not known
  yet. At its end there is a hit of what was seen.
* With a bare hand-over a request waits one second for the first piece that is new, from when vLLM
  first asks for it, and then for each further piece twice the longest time that one took. A piece
  counts as one that took a tenth of a second at least: a look at a remote storage takes as long.
* Once three requests with a bare hand-over in a row have waited and nothing new has appeared, one
  in sixteen waits. A further wait in vain halves that chance, down to one in 1,024; waits at the
  same time halve it once. When
  something new appears, all wait again. The log says so once.
* An idle step sleeps up to 10 ms when every request waits for a hand-over and no other rank or
  stage depends on this engine's steps.
* Params come from any client. They can make their own request wait, at most as long as the
  engine's option says, and nothing else.
* Deadlines count from the arrival, of a bare hand-over from when vLLM first asks, by this process's
  monotonic clock.
* Runs on the engine's step thread and does no I/O.

When :meth:`Handovers.plan` fails, requests wait on until vLLM asks.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Container
from typing import Any, Final

from kvshelf.errors import KVShelfError
from kvshelf.format.differences import how_to_unite
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, KINDS, Kind
from kvshelf.format.names import parse_namespace_folder
from kvshelf.format.namespace import Namespace
from kvshelf.logs import RateLimitedLog
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.shelf import read_namespace
from kvshelf.shelf.waits import AwaitedPiece, Wait, WaitService
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.handover import Handover, read_bare, read_handover
from kvshelf.vllm.metadata import StepMetadata
from kvshelf.vllm.scheduler.engine import SchedulerEngine
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.lookups import Lookups
from kvshelf.vllm.scheduler.requests import (
    FIRST_SECONDS,
    Awaited,
    HandoverOutcome,
    Patience,
    RequestState,
)

logger = logging.getLogger(__name__)

#: Most requests that wait at once, of which each probes the storage again and again: so many for
#: what was promised, and so many for what was not.
MAX_WAITING: Final = 128
#: Seconds until a lookup that the storage did not answer is started again.
_RETRY_SECONDS: Final = 0.25
#: Longest sleep of a step, in seconds: a request that arrives meanwhile waits that long.
_LONGEST_SLEEP: Final = 10e-3
#: Most other namespaces that are logged: clients make up as many as they like.
_MOST_NAMESPACES: Final = 16
#: Waits in vain after which one request in so many waits; and one in how many at least.
_MOST_IN_VAIN: Final = 3
_ONE_IN: Final = 16
_LEAST_ONE_IN: Final = 1024


class Handovers:
    """All waits of one engine.

    Parameters
    ----------
    engine : SchedulerEngine
    hits : Hits
    lookups : Lookups

    Attributes
    ----------
    clock : Callable
        Seconds.
    waiting : dict
        The hand-overs of the requests that wait, by request.
    held_requests : int
        How many requests polled since the last step wait.
    """

    def __init__(self, engine: SchedulerEngine, hits: Hits, lookups: Lookups) -> None:
        self._engine, self._hits, self._lookups = engine, hits, lookups
        self._groups, self._size = engine.groups, engine.config.chunk_size
        self._counters = engine.counters
        self._log = RateLimitedLog(logger)
        self.clock: Callable[[], float] = time.monotonic
        self._bare = BareWaits()
        self.waiting: dict[str, Awaited] = {}
        self._service: WaitService | None = None
        self.held_requests = 0
        #: A lookup of one of them will end soon, so the step must not sleep.
        self._hurried = False
        self._logged_namespaces: set[bytes] = set()

    # ------------------------------------------------------------- begin and end

    def arrive(self, state: RequestState) -> None:
        """Let a new request wait for the hand-over that it brings, if it brings one."""
        params, longest = state.request.kv_transfer_params, self._engine.config.handover_wait_s
        bare_seconds = patience = None
        try:
            handover = read_handover(params)
            if handover is None:
                bare_seconds = read_bare(params, expected=self._engine.is_consumer)
            elif not state.reads:
                raise ValueError("KV of this request cannot be loaded")
        except ValueError as error:
            self._refuse("invalid", str(error))
            return
        if bare_seconds and longest and state.reads:
            handover, patience = self._own(state), Patience(min(longest, bare_seconds))
        if handover is None:
            return
        now = self.clock()
        if handover.wait_s is not None:
            longest = min(longest, handover.wait_s)
        waiting = [bool(awaited.patience) for awaited in self.waiting.values()]
        is_full = waiting.count(patience is not None) >= MAX_WAITING
        if not longest:
            self._counters.add("handovers_late")
        elif patience is not None and (is_full or not self._bare.may_begin(patience)):
            self._counters.add("handovers_skipped")
        elif is_full:
            self._refuse("refused", f"{MAX_WAITING} requests wait")
        else:
            deadline = math.inf if patience is not None else now + longest
            self.waiting[state.id] = state.awaited = Awaited(handover, now, deadline, patience)

    def _own(self, state: RequestState) -> Handover | None:
        """Return what a bare hand-over has of a prompt; None if that is nothing."""
        tokens: int = state.request.num_prompt_tokens
        if self._groups.hybrid:
            tokens = (tokens - 1) // self._size * self._size
        elif not state.request.kv_transfer_params:
            tokens -= tokens % self._size
        return Handover(b"", tokens, b"", tokens % self._size, "") if tokens else None

    def _refuse(self, outcome: HandoverOutcome, reason: str) -> None:
        self._counters.add(f"handovers_{outcome}")
        self._log.warning("a request does not wait for its hand-over: %s", reason)

    def _end(self, state: RequestState, awaited: Awaited, outcome: HandoverOutcome) -> None:
        """Note how a wait ended."""
        self.waiting.pop(state.id, None)
        awaited.outcome = outcome
        if awaited.wait is not None:
            awaited.wait.cancel()
        patience = awaited.patience
        if patience is not None and (patience.is_hopeful or (awaited.wait and outcome == "vain")):
            # Where nothing was missing, or the lookup took too long, nothing is learnt.
            self._bare.ended(patience)
        if outcome in ("complete", "gave_up", "late", "vain"):
            self._counters.observe("handover_wait", max(0.0, self.clock() - awaited.arrived))
        if outcome != "invalid":
            self._counters.add(f"handovers_{outcome}")

    def finished(self, state: RequestState) -> None:
        """Wait for nothing more of a request."""
        self._forget(state.id)

    def _forget(self, request_id: str) -> None:
        awaited = self.waiting.pop(request_id, None)
        if awaited is not None:
            awaited.outcome = "unneeded"
            awaited.drop()

    def reopen(self) -> None:
        """Look in another namespace from now on."""
        self.close()
        self._service = None

    def close(self) -> None:
        """Stop the threads."""
        if self._service is not None:
            self._service.close()

    # ------------------------------------------------------------- steps

    def plan(self, output: Any) -> None:
        """Forget the requests that a step computes."""
        scheduled = output.num_scheduled_tokens
        for request_id in self.waiting.keys() & scheduled.keys():
            self._forget(request_id)

    def sleep(self, meta: StepMetadata) -> None:
        """Sleep for a moment if all requests wait for hand-overs, and a step has no work."""
        held_requests, self.held_requests = self.held_requests, 0
        is_urgent, self._hurried = self._hurried, False
        if is_urgent or held_requests < len(self._engine.requests):
            return
        if self._engine.handshake.checking:
            # Workers compare their weights in steps.
            return
        if meta != StepMetadata(idle=True, weights_round=meta.weights_round, heard=meta.heard):
            return
        until = min((awaited.until for awaited in self.waiting.values()), default=0.0)
        seconds = min(_LONGEST_SLEEP, until - self.clock())
        if seconds > 0:
            (time.sleep if self._service is None else self._service.sleep)(seconds)

    # ------------------------------------------------------------- waiting

    def is_short(self, awaited: Awaited, computed: int) -> bool:
        """Whether vLLM computes the rest of what is waited for sooner than it could be loaded."""
        if awaited.outcome is not None or not computed:
            return False
        return awaited.handover.tokens - computed <= self._groups.alignment

    def wait(self, state: RequestState, computed: int) -> bool:
        """Return whether a request waits for its hand-over in this step; notes how a wait ends."""
        awaited = state.awaited
        if awaited is None or awaited.outcome is not None:
            return False
        service, wait, patience = self._engine.usable_lookup_service, awaited.wait, awaited.patience
        now = self.clock()
        if patience is not None:
            if service is None or self._lookups.breaker_is_open(service):
                return False
            if awaited.deadline == math.inf:
                # The time of a bare hand-over begins when it can be waited for.
                awaited.arrived, awaited.deadline = now, now + patience.longest
                patience.begin(now)
        if service is not None and wait is None and now < awaited.until:
            wait = self._begin(service, state, awaited)
        complete = wait is not None and wait.complete
        if wait is not None:
            self._take(state, awaited, wait, complete=complete)
            if patience is not None and wait.seen > awaited.seen:
                patience.note_new(now)
                awaited.seen = wait.seen
        late = now >= awaited.until
        # vLLM may not have polled for a while, so what is complete is not late.
        if complete and service is not None and not self._lookups.breaker_is_open(service):
            self._end(state, awaited, "complete")
            if self._groups.hybrid and self._hits.divides_item(state, awaited.hit_tokens):
                state.drop_lookup()
        elif late and patience is not None and not complete:
            self._end(state, awaited, "late" if patience.is_hopeful else "vain")
            if self._groups.hybrid and patience.is_hopeful:
                state.drop_lookup()
        elif late:
            self._end(state, awaited, "late")
        elif service is not None and wait is not None and wait.gave_up and not complete:
            self._end(state, awaited, "gave_up")
            if self._groups.hybrid:
                # The wait did not cover the objects that a shorter hit needs at its end.
                state.drop_lookup()
        waits = awaited.outcome is None
        if waits:
            self.held_requests += 1
            state.offered_from = computed
        return waits

    def _take(self, state: RequestState, awaited: Awaited, wait: Wait, *, complete: bool) -> None:
        """Make what a wait has seen part of the lookup's answer.

        Full chunks come first in its order. Windows and states are useful at its end only.
        """
        lookup, count = state.lookup, awaited.handover.tokens // self._size
        if lookup is None or lookup.chain is None:
            return
        if FULL in self._groups.kinds:
            seen_chunks = count if complete else min(awaited.first + wait.seen, count)
            lookup.full_chunks = max(lookup.full_chunks, seen_chunks)
        if not self._groups.hybrid:
            lookup.hit_chunks = lookup.full_chunks
        elif complete:
            lookup.hit_chunks = max(lookup.hit_chunks, count)
            needed = self._groups.hit_rule(self._size).needs(count).items()
            lookup.known = {
                kind: lookup.known.get(kind, frozenset()) | frozenset(indices)
                for kind, indices in needed
                if kind != FULL
            }

    def _begin(self, service: LookupService, state: RequestState, awaited: Awaited) -> Wait | None:
        """Return the wait for what a lookup has missed; None while there is none, or for ever."""
        if self._is_of_another_namespace(service, state, awaited):
            return None
        lookup = state.lookup
        if lookup is None:
            if self.clock() < awaited.retry_at:
                return None
            lookup = self._lookups.start(service, state)
        if not self._lookups.wait(service, lookup):
            # A lookup that takes longer will not end soon.
            age = time.monotonic() - lookup.as_of
            self._hurried = self._hurried or age < _LONGEST_SLEEP
        elif lookup.given_up:
            # The storage may be back before the deadline.
            state.drop_lookup()
            awaited.retry_at = self.clock() + _RETRY_SECONDS
        else:
            return self._submit(state, awaited, lookup)
        return None

    def _is_of_another_namespace(
        self, service: LookupService, state: RequestState, awaited: Awaited
    ) -> bool:
        """Whether the producer's KV is unusable here; logs once for each namespace why."""
        namespace, producer_digest = self._engine.handshake.namespace, awaited.handover.namespace
        assert namespace is not None
        if producer_digest in (b"", namespace.digest):
            return False
        self._end(state, awaited, "other_namespace")
        shelf, logged = self._engine.shelf, self._logged_namespaces
        if shelf is not None and producer_digest not in logged and len(logged) < _MOST_NAMESPACES:
            logged.add(producer_digest)
            # On the lookup thread, since it asks the storage.
            service.submit(
                (), functools.partial(_log_difference, shelf, namespace, producer_digest)
            )
        return True

    def _submit(self, state: RequestState, awaited: Awaited, lookup: Lookup) -> Wait | None:
        """Wait for pieces that the lookup missed; None if the hand-over is not of this request."""
        try:
            if not self._engine.adapters.trusts(state.request.lora_request):
                raise ValueError("KV of its LoRA adapter cannot be loaded")
            pieces = self._missing(state, awaited, lookup)
        except ValueError as error:
            if awaited.patience is not None:
                self._forget(state.id)
                return None
            self._end(state, awaited, "invalid")
            self._refuse("invalid", str(error))
            return None
        if not pieces and not (state.request.kv_transfer_params or awaited.handover.key):
            self._forget(state.id)
            return None
        if self._service is None:
            self._service = WaitService(
                self._engine.views, counters=self._counters, on_thread_start=widen_cpu_affinity
            )
        awaited.first, awaited.seen = lookup.full_chunks, 0
        awaited.wait = self._service.submit(pieces, awaited.handover.attempt)
        return awaited.wait

    def _missing(self, state: RequestState, awaited: Awaited, lookup: Lookup) -> list[AwaitedPiece]:
        """Return what a load needs and the lookup has not seen: the full chunks first, in order.

        The hand-over gets its tail.

        Raises
        ------
        ValueError
            If the hand-over is not of this prompt.
        """
        handover, size = awaited.handover, self._size
        if lookup.chain is None:
            raise ValueError("the request has no chunk keys")
        tail = self._check(state.request, handover, lookup.chain)
        awaited.tail = tail if self._engine.tails else None
        seen_chunks: dict[Kind, Container[int]] = {
            kind: lookup.known.get(kind, ()) for kind in KINDS
        }
        seen_chunks[FULL] = range(lookup.full_chunks)
        missing = self._groups.hit_rule(size).missing(handover.tokens // size, seen_chunks)
        pieces: list[AwaitedPiece] = [(kind, lookup.chain.chunks[n]) for kind, n in missing]
        return pieces if awaited.tail is None else [*pieces, (FULL, awaited.tail)]

    def _check(self, request: Any, handover: Handover, chain: KeyChain) -> Chunk | None:
        """Return the tail of a hand-over, after a comparison of its key with the prompt's."""
        size = self._size
        count, tail_tokens = divmod(handover.tokens, size)
        longest = request.num_prompt_tokens - (1 if self._groups.hybrid else 0)
        if handover.tokens > longest or tail_tokens != handover.tail or count > len(chain.chunks):
            raise ValueError(
                f"{handover.tokens} tokens with a tail of {handover.tail}, of a prompt of"
                f" {request.num_prompt_tokens} with chunks of {size}"
            )
        tail = None
        if tail_tokens:
            tail = chain.tail_after(count, request._all_token_ids[count * size : handover.tokens])
        if handover.key and (tail or chain.chunks[count - 1]).key != handover.key:
            raise ValueError(
                "the key is of another prompt; the producer and this engine must get the same"
                " tokens, cache_salt, LoRA adapter and images"
            )
        return tail


class BareWaits:
    """Whether requests with bare hand-overs of one engine wait at all."""

    def __init__(self) -> None:
        self._in_vain = 0
        self._skipped = 0
        self._one_in = 1
        self._is_logged = False

    def may_begin(self, patience: Patience) -> bool:
        """Whether a request that has just arrived waits."""
        self._skipped = (self._skipped + 1) % self._one_in
        patience.one_in = self._one_in
        return self._skipped == 0

    def ended(self, patience: Patience) -> None:
        """Note the end of a wait for pieces."""
        self._in_vain = 0 if patience.is_hopeful else self._in_vain + 1
        if patience.is_hopeful:
            self._one_in = 1
        elif self._one_in == patience.one_in > 1:
            # Requests that wait at the same time halve the chance once.
            self._one_in = min(2 * self._one_in, _LEAST_ONE_IN)
        elif self._in_vain == _MOST_IN_VAIN:
            self._one_in = _ONE_IN
        if self._in_vain == _MOST_IN_VAIN and not self._is_logged:
            self._is_logged = True
            logger.warning(
                "%d requests in a row have waited %g s for KV that another engine was to store, and"
                " nothing appeared: until something does, one such request in %d waits. Requests"
                " wait that say do_remote_prefill, and with kv_role kv_consumer all that bring no"
                " kv_transfer_params. Where no other engine prefills, use kv_role kv_both, with"
                " read_only: true if it must not store",
                _MOST_IN_VAIN,
                FIRST_SECONDS,
                _ONE_IN,
            )


def _log_difference(shelf: AnyShelf, own: Namespace, digest: bytes) -> None:
    """Log in one line why KV of another namespace cannot be used.

    Parameters
    ----------
    shelf : AnyShelf
    own : Namespace
    digest : bytes
        Of the other one, 32 bytes.
    """
    tag = digest.hex()[:16]
    try:
        folders = [name for name in shelf.backend.folders() if parse_namespace_folder(name) == tag]
        producer = read_namespace(shelf.backend, folders[0]) if folders else None
    except (KVShelfError, ValueError) as error:
        why = f"its description cannot be read: {error}"
    else:
        if producer is None or producer.digest != digest:
            why = (
                "it is not on this shelf; set shared_storage_path of producer and consumer to the"
                " same place"
            )
        else:
            why = f"this engine has {own.folder}. {how_to_unite(own, producer)}"
    logger.warning("requests that wait for KV of namespace %s are computed: %s", tag, why)
