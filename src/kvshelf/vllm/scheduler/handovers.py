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
* ``refused``: too many requests wait already.

A wait also ends, uncounted, when its request is aborted or served from vLLM's own cache.

Of a *bare* hand-over it is not known what was promised, nor whether: the request waits for all of
its own prompt, and no longer than :mod:`kvshelf.vllm.scheduler.bare` says. Otherwise it is served
like any request: it waits for no namespace and no broken storage, and is loaded where that pays.
Such requests take no places of those that were promised something. Without params only chunks are
waited for, since a producer stores a tail where it is asked to; and where none is missing, nothing
says that the request is handed over.

Contracts
---------
* A request that brings a hand-over waits for its chunks and the tail until its deadline, and never
  longer. What ends the wait of others does not end this one: a lookup's misses, chunks that failed,
  a late lookup, a storage that does not answer, an open breaker, a namespace that is not known
  yet. At its end there is a hit of what was seen.
* An idle step sleeps up to 10 ms when every request waits for a hand-over and no other rank or
  stage depends on this engine's steps.
* Params come from any client. They can make their own request wait, at most as long as the
  engine's option says, and nothing else.
* Deadlines count from the arrival, by this process's monotonic clock.
* Runs on the engine's step thread and does no I/O.

When this part fails, requests wait on until vLLM asks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container
from typing import Any, Final

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, KINDS, Kind
from kvshelf.logs import RateLimitedLog
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.waits import Piece, Wait, WaitService
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.handover import Handover, read_bare, read_handover
from kvshelf.vllm.metadata import StepMetadata
from kvshelf.vllm.scheduler.bare import BareWaits, Patience
from kvshelf.vllm.scheduler.difference import log_difference
from kvshelf.vllm.scheduler.lookups import Lookups
from kvshelf.vllm.scheduler.requests import Awaited, HandoverOutcome, RequestState
from kvshelf.vllm.scheduler.shared import Shared, SharingPart

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


class Handovers(SharingPart):
    """All waits of one engine.

    Parameters
    ----------
    shared : Shared
    lookups : Lookups

    Attributes
    ----------
    clock : Callable
        Seconds.
    """

    failure = "it is not known which requests still wait for a hand-over"

    def __init__(self, shared: Shared, lookups: Lookups) -> None:
        super().__init__(shared)
        self._lookups = lookups
        self._log = RateLimitedLog(logger)
        self.clock: Callable[[], float] = time.monotonic
        self._bare = BareWaits()
        #: The requests that wait.
        self._waiting: dict[str, Awaited] = {}
        self._service: WaitService | None = None
        #: How many requests polled since the last step wait.
        self._held = 0
        #: A lookup of one of them will end soon, so the step must not sleep.
        self._hurried = False
        #: The other namespaces that were logged.
        self._others: set[bytes] = set()

    # ------------------------------------------------------------- begin and end

    def arrive(self, state: RequestState) -> None:
        """Let a new request wait for the hand-over that it brings, if it brings one."""
        params, longest = state.request.kv_transfer_params, self._config.handover_wait_s
        wanted = patience = None
        try:
            handover = read_handover(params)
            if handover is None:
                wanted = read_bare(params, expected=self._engine.is_consumer)
            elif not state.reads:
                raise ValueError("KV of this request cannot be loaded")
        except ValueError as error:
            self._refuse("invalid", str(error))
            return
        if wanted and longest and state.reads:
            handover, patience = self._own(state), Patience(min(longest, wanted))
        if handover is None:
            return
        now = self.clock()
        if handover.wait_s is not None:
            longest = min(longest, handover.wait_s)
        waiting = [bool(awaited.patience) for awaited in self._waiting.values()]
        is_full = waiting.count(patience is not None) >= MAX_WAITING
        if not longest:
            self._counters.add("handovers_late")
        elif patience is not None and (is_full or not self._bare.may_begin(patience)):
            self._counters.add("handovers_skipped")
        elif is_full:
            self._refuse("refused", f"{MAX_WAITING} requests wait")
        else:
            deadline = math.inf if patience is not None else now + longest
            self._waiting[state.id] = state.awaited = Awaited(handover, now, deadline, patience)

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
        self._waiting.pop(state.id, None)
        awaited.outcome = outcome
        if awaited.wait is not None:
            awaited.wait.cancel()
        patience = awaited.patience
        if patience is not None and (patience.hopeful or (awaited.wait and outcome == "vain")):
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
        awaited = self._waiting.pop(request_id, None)
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

    def plan(self, output: Any, meta: StepMetadata) -> None:
        """Forget the requests that a step computes."""
        scheduled = output.num_scheduled_tokens
        for request_id in [one for one in self._waiting if one in scheduled]:
            self._forget(request_id)

    def sleep(self, meta: StepMetadata) -> None:
        """Sleep for a moment if all requests wait for hand-overs, and a step has no work."""
        held, self._held = self._held, 0
        hurried, self._hurried = self._hurried, False
        if hurried or held < len(self._requests):
            return
        if self._opening.handshake.checking:
            # Workers compare their weights in steps.
            return
        if meta != StepMetadata(idle=True, weights_round=meta.weights_round, heard=meta.heard):
            return
        first = min((one.until for one in self._waiting.values()), default=0.0)
        seconds = min(_LONGEST_SLEEP, first - self.clock())
        if seconds > 0:
            (time.sleep if self._service is None else self._service.sleep)(seconds)

    # ------------------------------------------------------------- waiting

    def is_short(self, state: RequestState, computed: int) -> bool:
        """Whether vLLM computes the rest of what is waited for sooner than it could be loaded."""
        awaited = state.awaited
        if awaited is None or awaited.outcome is not None or not computed:
            return False
        return awaited.handover.tokens - computed <= self._groups.alignment

    def is_overdue(self, state: RequestState) -> bool:
        """Whether the wait of a request failed, and its deadline has passed."""
        return state.awaited is not None and state.awaited.is_overdue(self.clock())

    def wait(self, state: RequestState, computed: int) -> bool:
        """Return whether a request waits for its hand-over in this step; notes how a wait ends."""
        awaited = state.awaited
        if awaited is None or awaited.outcome is not None:
            return False
        if awaited.patience is not None and not self._begin_bare(awaited, awaited.patience):
            return False
        self._go_on(state, awaited)
        waits = awaited.outcome is None
        if waits:
            self._held += 1
            state.offered_from = computed
        return waits

    def _begin_bare(self, awaited: Awaited, patience: Patience) -> bool:
        """Return whether a bare hand-over can be waited for now; its time begins with the first."""
        lookups = self._opening.looks_up
        if lookups is None or self._lookups.breaker_is_open(lookups):
            return False
        if awaited.deadline == math.inf:
            awaited.arrived = self.clock()
            awaited.deadline = awaited.arrived + patience.longest
            patience.begin(awaited.arrived)
        return True

    def _go_on(self, state: RequestState, awaited: Awaited) -> None:
        """Take a wait a step further."""
        lookups, wait, patience = self._opening.looks_up, awaited.wait, awaited.patience
        now = self.clock()
        if lookups is not None and wait is None and now < awaited.until:
            wait = self._begin(lookups, state, awaited)
        complete = wait is not None and wait.complete
        if wait is not None:
            self._take(state, awaited, wait, complete=complete)
            if patience is not None and wait.seen > awaited.seen:
                patience.note_new(now)
                awaited.seen = wait.seen
        late = now >= awaited.until
        # vLLM may not have polled for a while.
        if lookups is not None and complete:
            self._complete(lookups, state, awaited, late=late)
        elif late and patience is not None:
            self._end(state, awaited, "late" if patience.hopeful else "vain")
            if self._groups.hybrid and patience.hopeful:
                state.drop_lookup()
        elif late:
            self._end(state, awaited, "late")
        elif lookups is not None and wait is not None and wait.gave_up:
            self._end(state, awaited, "gave_up")
            if self._groups.hybrid:
                # The wait did not cover the objects that a shorter hit needs at its end.
                state.drop_lookup()

    def _take(self, state: RequestState, awaited: Awaited, wait: Wait, *, complete: bool) -> None:
        """Make what a wait has seen part of the lookup's answer.

        Full chunks come first in its order. Windows and states are useful at its end only.
        """
        lookup, count = state.lookup, awaited.handover.tokens // self._size
        if lookup is None or lookup.chain is None:
            return
        if FULL in self._groups.kinds:
            seen = count if complete else min(awaited.first + wait.seen, count)
            lookup.full_chunks = max(lookup.full_chunks, seen)
        if not self._groups.hybrid:
            lookup.hit_chunks = lookup.full_chunks
        elif complete:
            lookup.hit_chunks = max(lookup.hit_chunks, count)
            needed = self._groups.hit_rule(self._size).needs(count).items()
            others = {kind: frozenset(indices) for kind, indices in needed if kind != FULL}
            lookup.known = {
                kind: lookup.known.get(kind, frozenset()) | there for kind, there in others.items()
            }

    def _complete(
        self, lookups: LookupService, state: RequestState, awaited: Awaited, *, late: bool
    ) -> None:
        """End a wait of which everything was seen, unless nothing can be loaded now."""
        if self._lookups.breaker_is_open(lookups):
            if late:
                self._end(state, awaited, "late")
            return
        self._end(state, awaited, "complete")
        if self._groups.hybrid and self._hits.divides_item(state, awaited.hit_tokens):
            state.drop_lookup()

    def _begin(self, lookups: LookupService, state: RequestState, awaited: Awaited) -> Wait | None:
        """Return the wait for what a lookup has missed; None while there is none, or for ever."""
        if self._is_of_another_namespace(lookups, state, awaited):
            return None
        lookup = state.lookup
        if lookup is None:
            if self.clock() < awaited.retry_at:
                return None
            lookup = self._lookups.start(lookups, state)
        if not self._lookups.wait(lookups, lookup):
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
        self, lookups: LookupService, state: RequestState, awaited: Awaited
    ) -> bool:
        """Whether the producer's KV is unusable here; logs once for each namespace why."""
        namespace, other = self._opening.namespace, awaited.handover.namespace
        assert namespace is not None
        if other in (b"", namespace.digest):
            return False
        self._end(state, awaited, "other_namespace")
        shelf, known = self._opening.shelf, self._others
        if shelf is not None and other not in known and len(known) < _MOST_NAMESPACES:
            known.add(other)

            def explain() -> None:
                log_difference(shelf, namespace, other)

            # On the lookup thread, since it asks the storage.
            lookups.submit((), explain)
        return True

    def _submit(self, state: RequestState, awaited: Awaited, lookup: Lookup) -> Wait | None:
        """Wait for pieces that the lookup missed; None if the hand-over is not of this request."""
        try:
            if not self._keys.trusts(state):
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
                self._opening.views, counters=self._counters, on_thread_start=widen_cpu_affinity
            )
        awaited.first, awaited.seen = lookup.full_chunks, 0
        awaited.wait = self._service.submit(pieces, awaited.handover.attempt)
        return awaited.wait

    def _missing(self, state: RequestState, awaited: Awaited, lookup: Lookup) -> list[Piece]:
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
        awaited.tail = tail if self._opening.tails else None
        seen: dict[Kind, Container[int]] = {kind: lookup.known.get(kind, ()) for kind in KINDS}
        seen[FULL] = range(lookup.full_chunks)
        missing = self._groups.hit_rule(size).missing(handover.tokens // size, seen)
        pieces: list[Piece] = [(kind, lookup.chain.chunks[n]) for kind, n in missing]
        return pieces if awaited.tail is None else [*pieces, (FULL, awaited.tail)]

    def _check(self, request: Any, handover: Handover, chain: KeyChain) -> Chunk | None:
        """Return the tail of a hand-over, after a comparison of its key with the prompt's."""
        size = self._size
        count, rest = divmod(handover.tokens, size)
        most = request.num_prompt_tokens - (1 if self._groups.hybrid else 0)
        if handover.tokens > most or rest != handover.tail or count > len(chain.chunks):
            raise ValueError(
                f"{handover.tokens} tokens with a tail of {handover.tail}, of a prompt of"
                f" {request.num_prompt_tokens} with chunks of {size}"
            )
        tail = None
        if rest:
            tail = chain.tail_after(count, request._all_token_ids[count * size : handover.tokens])
        if handover.key and (tail or chain.chunks[count - 1]).key != handover.key:
            raise ValueError(
                "the key is of another prompt; the producer and this engine must get the same"
                " tokens, cache_salt, LoRA adapter and images"
            )
        return tail
