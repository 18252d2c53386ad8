"""Lookups: how many leading chunks of a prompt can be loaded from the shelf.

:class:`kvshelf.format.hit_rule.HitRule` says what can be loaded, for each kind of KV. Owns the
threads that search for it. Each thread plans what to probe, probes it, and narrows its searches
down by the answers, until they are over. There are two plans. On a low-latency storage
(:mod:`kvshelf.shelf.sequential_search`) every answer comes from probes made for that lookup; on a
high-latency storage (:mod:`kvshelf.shelf.hits`) an answer also stands for a while in a
:class:`~kvshelf.shelf.presence.PresenceCache`. Existence of objects is the only index.

Contracts
---------
* A :class:`Lookup` is made and read on the caller's (step) thread and worked on by one
  background thread. Once it is ``done``, its answer is valid, ``chain`` holds the
  keys of all complete chunks, and both belong to the caller.
* A storage that does not answer delays the lookups in the queue, never their callers:
  :meth:`LookupService.stalled` is true when waiting is useless. A lookup whose probe missed its
  deadline ends with nothing found and no keys; another thread goes on with the next lookups
  (:mod:`kvshelf.shelf.threads`).
* A lookup that fails ends alone, and has found nothing. Only if it has no keys yet is it given up.
* A lookup may have to wait for something before its keys can be made. It waits outside the queue,
  so that no other lookup waits with it.
* While the circuit breaker is open, lookups still compute chunk keys but report no hit, at once.
* Background threads pause often, see :mod:`kvshelf.shelf.pacing`.
* On a low-latency storage every object that a hit needs has been seen. On a high-latency storage
  some full chunks of a hit were not probed; a gap between them is found by the load, and probed
  by every search from then on. All windows and states that a hit needs have been seen.
* Failures and answers of the storage are remembered for each kind of a chunk, by its kind key
  (:func:`kvshelf.format.kinds.kind_key`).
* On a high-latency storage waiting lookups share a search. A *round* sends the probes of all of
  them to the storage at once, each probe once, and none that another thread has sent already. A
  lookup that arrives meanwhile joins the next round.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from kvshelf.format.hit_rule import HitRule
from kvshelf.format.keys import KeyChain
from kvshelf.format.kinds import KINDS, Kind
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.answer import Lookup
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.hits import HitSearch
from kvshelf.shelf.pacing import GilPace
from kvshelf.shelf.presence import PresenceCache
from kvshelf.shelf.probes import Answer, Ask, Probes, RoundCosts, SharedProbes
from kvshelf.shelf.sequential_search import SequentialSearch
from kvshelf.shelf.threads import StorageThreads
from kvshelf.shelf.view import ObjectRef, Presence, ShelfView

__all__ = ["Lookup", "LookupService"]

logger = logging.getLogger(__name__)

#: Most lookups that share rounds.
_TOGETHER = 16
#: Chunks of a hit for which a disk tier is asked.
_ASKED_OF_TIER = 16
#: Threads where a round takes long: a lookup need not wait for the end of one that has begun.
_HIGH_LATENCY_THREADS = 2


class LookupService:
    """Threads that answer lookups on one namespace of one shelf.

    Parameters
    ----------
    shelf : ShelfView
        The objects of kind full; in a namespace without these, of its first kind.
    failed : FailedKeys
        Kind keys to be treated as missing.
    counters : Counters
    threads : int
        Lookups worked on at once. On a high-latency storage there are at least two threads,
        and each works on several lookups.
    remembers : bool
        On a high-latency storage, remember answers for a while. False: for objects that come and
        go unnoticed, such as copies in a tier.
    on_thread_start : Callable, optional
        Called first on each thread, to set its processors.
    others : Mapping[Kind, ShelfView], optional
        The objects of the namespace's other kinds.
    rule : HitRule, optional
        What a hit needs. When absent, what the namespace's record says.
    counts_tier : bool
        Ask a disk tier which chunks of each hit it has.
    """

    def __init__(
        self,
        shelf: ShelfView,
        *,
        failed: FailedKeys,
        counters: Counters,
        threads: int = 1,
        remembers: bool = True,
        on_thread_start: Callable[[], None] | None = None,
        others: Mapping[Kind, ShelfView] | None = None,
        rule: HitRule | None = None,
        counts_tier: bool = False,
    ) -> None:
        self._shelf = shelf
        self._counts_tier = counts_tier
        self._fmt = shelf.fmt
        views = {shelf.fmt.kind: shelf, **(others or {})}
        self._views = {kind: views[kind] for kind in KINDS if kind in views}
        self._shards = {kind: view.fmt.shards for kind, view in self._views.items()}
        self._rule = rule or HitRule.of(self._fmt.namespace.record)
        self._failed = failed
        self._remembers = remembers
        self._counters = counters
        self._queue: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._submitting = threading.Lock()
        self._closed = False
        # What each thread works on, and since when; absent while it waits for a lookup.
        self._busy: dict[int, tuple[float, Sequence[Lookup]]] = {}
        self._log = RateLimitedLog(logger)
        #: How long a lookup takes; on a low-latency storage, for each chunk.
        self._usual_seconds = 0.0
        properties = shelf.backend.properties
        self._high_latency = properties.high_latency
        self._cache = PresenceCache()
        self._together = _TOGETHER if self._high_latency else 1
        costs = RoundCosts(properties.probe_cost, properties.probes_at_once)
        seconds = shelf.backend.deadlines.probe
        self._probes = (
            SharedProbes(self._views, counters, costs, self._cache, seconds)
            if self._high_latency
            else Probes(self._views, counters, costs)
        )
        self._count = max(threads, _HIGH_LATENCY_THREADS) if self._high_latency else threads
        self._threads = StorageThreads(
            "kvshelf-lookup",
            self._count,
            self._run,
            shelf.backend,
            count_stuck=lambda: counters.add("stuck_threads"),
            on_stuck=self._give_up,
            on_stop=self._give_up_waiting,
            on_thread_start=on_thread_start,
        )
        shelf.backend.count_into(counters.add)
        if self._high_latency:
            failed.subscribe(self._cache.note_failed)
        self._threads.start()

    @property
    def available(self) -> bool:
        """Whether lookups can find anything: not while the circuit breaker is open."""
        return self._shelf.available and self._threads.ready()

    def submit(
        self,
        tokens: Sequence[int],
        make_chain: Callable[[], KeyChain | None],
        *,
        first_chunk: int = 0,
        ends: Sequence[int] | None = None,
        on_done: Callable[[Lookup], None] | None = None,
        prepare: Callable[[Callable[[], None]], None] | None = None,
    ) -> Lookup:
        """Start a lookup; returns at once. After :meth:`close` it is given up at once.

        Parameters
        ----------
        tokens : Sequence[int]
            The prompt. Only its present length is looked at, so that the caller may
            append to it meanwhile.
        make_chain : Callable[[], KeyChain or None]
            Called on the background thread. None: the prompt has no content address, which is a
            miss.
        first_chunk : int
            Index of the chunk to begin at: the caller has what comes before.
        ends : Sequence of int, optional
            Numbers of chunks, from the prompt's beginning and ascending, at which a hit may end;
            any when absent. Of no meaning where full is the only kind: such a hit may be used in
            part.
        on_done : Callable, optional
            Called once on the background thread when the answer is there, also when the
            lookup was cancelled. Must not block.
        prepare : Callable, optional
            Called first, on the background thread, with a function. `make_chain` is called once
            that function was called, on any thread. Neither may block.
        """
        lookup = Lookup(tokens, make_chain, first_chunk, ends, on_done, prepare, self._log)
        self._put(lookup)
        return lookup

    def _put(self, lookup: Lookup) -> None:
        with self._submitting:
            taken = not self._closed and self._threads.ready()
            if taken:
                self._queue.put(lookup)
        if not taken:
            lookup.finish(0, None, given_up=True)

    def _put_back(self, lookup: Lookup) -> bool:
        """Whether a lookup has to wait before its keys can be made; it comes back to the queue."""
        prepare = lookup.prepare
        if prepare is None:
            return False

        def go_on() -> None:
            lookup.prepare = None
            self._put(lookup)

        try:
            prepare(go_on)
        except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
            self._fail(lookup, error)
        return True

    def stalled(self, seconds: float, lookup: Lookup | None = None) -> bool:
        """Whether every thread has been at one lookup for longer than `seconds`.

        Or `lookup`, where there is one, has waited so long for what its keys need.
        """
        if lookup is not None and self._waits_for_keys(lookup, seconds):
            return True
        busy = self._busy.copy()
        since = [busy[thread][0] for thread in self._threads.working if thread in busy]
        return len(since) >= self._count and max(since) < time.monotonic() - seconds

    def may_be_done_within(self, lookup: Lookup, seconds: float) -> bool:
        """Whether waiting for `lookup` for `seconds` makes sense, judging by those before it."""
        if self._waits_for_keys(lookup, seconds):
            return False
        chunks = 1 if self._high_latency else lookup.count // self._fmt.chunk_size
        return chunks * self._usual_seconds <= seconds

    @staticmethod
    def _waits_for_keys(lookup: Lookup, seconds: float) -> bool:
        return lookup.prepare is not None and time.monotonic() - lookup.as_of > seconds

    def note_published(self, keys: Iterable[bytes]) -> None:
        """Note that these chunks were just published; a lookup from now on finds them."""
        if self._high_latency:
            for key in keys:
                self._cache.note_published(key)

    def note_removed(self, keys: Iterable[bytes]) -> None:
        """Note that these chunks were just deleted; lookups probe them from now on."""
        if self._high_latency:
            for key in keys:
                self._cache.note_failed(key)

    def forget(self) -> None:
        """Forget the answers of the storage."""
        self._cache.clear()

    def close(self) -> None:
        """Stop the threads once they have finished what was submitted."""
        self._failed.unsubscribe(self._cache.note_failed)
        self._threads.close()
        with self._submitting:
            self._closed = True
            self._queue.put(None)

    def _give_up(self, thread: int) -> None:
        """End the lookups of a stuck thread."""
        busy = self._busy.pop(thread, None)
        if busy is not None:
            for lookup in busy[1]:
                lookup.finish(0, None, given_up=True)

    def _give_up_waiting(self) -> None:
        """End the lookups in the queue if no thread is left."""
        waiting: list[Lookup] = []
        with self._submitting:
            if self._threads.any:
                return
            with contextlib.suppress(queue.Empty):
                while (lookup := self._queue.get_nowait()) is not None:
                    waiting.append(lookup)
            if self._closed:
                # For threads whose call returns.
                self._queue.put(None)
        for lookup in waiting:
            lookup.finish(0, None, given_up=True)

    def _run(self) -> None:
        me = threading.get_ident()
        while not self._threads.replaced():
            lookup = self._queue.get()
            if lookup is None:
                # There is one for all threads, behind everything that was submitted.
                self._queue.put(None)
                return
            if self._put_back(lookup):
                continue
            _Rounds(self, me).run(lookup)

    def _note_speed(self, lookup: Lookup, begin: float) -> None:
        chunks = lookup.count // self._fmt.chunk_size
        if chunks:
            found = (lookup.as_of - begin) / (1 if self._high_latency else chunks)
            known = self._usual_seconds or found
            self._usual_seconds = known + (found - known) / 4

    def _share_in_disk_tier(self, found: _Search) -> float:
        """Return the share of a hit that lies in a disk tier, of chunks at even places."""
        search, chain = found
        hit = chain.chunks[search.first : search.hit_chunks]
        if not (hit and self._counts_tier):
            return 0.0
        asked = hit[:: -(-len(hit) // _ASKED_OF_TIER)]
        refs = [ObjectRef(chunk, shard) for chunk in asked for shard in range(self._fmt.shards)]
        answers = self._shelf.nearby(refs)
        return sum(answer is Presence.PRESENT for answer in answers) / len(answers)

    def _fail(self, lookup: Lookup, error: Exception, found: _Search | None = None) -> None:
        """End a lookup that failed; without keys it is given up."""
        self._counters.add("probe_errors")
        self._log.error("a lookup failed and counts as a miss", exc_info=error)
        lookup.finish(0, found and found.chain, given_up=not found)

    def _begin(self, lookup: Lookup, pace: GilPace) -> _Search | None:
        """Return the search for a lookup; None if its prompt has no keys."""
        self._counters.add("lookups")
        chain = lookup.make_keys(pace)
        if chain is None:
            return None
        chunks, first = chain.chunks, lookup.first_chunk
        ends = range(1, len(chunks) + 1) if lookup.ends is None else lookup.ends
        rule, failed, shards = self._rule, self._failed, self._shards
        if not self._high_latency:
            return _Search(SequentialSearch(chunks, first, ends, rule, failed, shards), chain)
        # Remembered answers are useless while nothing can be loaded.
        useful = self._remembers and self._shelf.backend.reads.is_closed
        cache = self._cache if useful else PresenceCache()
        return _Search(HitSearch(chunks, first, ends, rule, cache, failed, shards), chain)


# ------------------------------------------------------------------------------- the search


class _Search(NamedTuple):
    """The state of one lookup while its search runs."""

    search: SequentialSearch | HitSearch
    chain: KeyChain


class _Rounds:
    """The searches of one thread, from the first lookup until none is left.

    Each round plans what to probe, probes it, and narrows the searches down by the answers.
    """

    def __init__(self, service: LookupService, thread: int) -> None:
        self._service = service
        self._thread = thread
        #: Lookups without an answer, in order, and when each was taken.
        self._lookups: dict[Lookup, float] = {}
        self._searches: dict[Lookup, _Search] = {}
        self._pace = GilPace()

    def run(self, first: Lookup) -> None:
        """Search; a lookup that fails ends alone."""
        service = self._service
        try:
            self._take(first)
            while self._lookups:
                self._take_more()
                self._round()
                if self._thread not in service._busy:
                    # The thread was given up: another one continues with later lookups.
                    break
        finally:
            service._busy.pop(self._thread, None)

    def _take_more(self) -> None:
        while len(self._lookups) < self._service._together:
            try:
                lookup = self._service._queue.get_nowait()
            except queue.Empty:
                return
            if lookup is None:
                # For a thread without other work.
                self._service._queue.put(None)
                return
            if not self._service._put_back(lookup):
                self._take(lookup)

    def _take(self, lookup: Lookup) -> None:
        self._lookups[lookup] = time.monotonic()
        self._note_busy()
        with self._alone(lookup):
            if not lookup.cancelled and (search := self._service._begin(lookup, self._pace)):
                self._searches[lookup] = search

    @contextlib.contextmanager
    def _alone(self, lookup: Lookup) -> Iterator[None]:
        """Work for one lookup. If that fails, it has found nothing but its keys."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
            self._service._fail(lookup, error, self._searches.get(lookup))
        if lookup.done:
            self._lookups.pop(lookup, None)
            self._searches.pop(lookup, None)
            if self._lookups and self._thread in self._service._busy:
                self._note_busy()

    def _note_busy(self) -> None:
        oldest = next(iter(self._lookups.values()))
        self._service._busy[self._thread] = oldest, tuple(self._lookups)

    def _round(self) -> None:
        probes, searches = self._service._probes, self._searches.copy()
        asking: dict[Lookup, list[Ask]] = {}
        for lookup in list(self._lookups):
            with self._alone(lookup):
                if lookup.cancelled or lookup not in searches:
                    lookup.finish(0, None)
                elif planned := searches[lookup].search.plan(probes.costs, len(searches)):
                    asking[lookup] = planned
                else:
                    self._answer(lookup, searches[lookup])
        if not asking:
            return
        answers: Iterator[Answer] | None = None
        with contextlib.suppress(Exception):
            answers = iter(probes.send([ask for planned in asking.values() for ask in planned]))
        for lookup, planned in asking.items():
            with self._alone(lookup):
                # Where all together fail, each asks for itself.
                mine = islice(answers, len(planned)) if answers else probes.send(planned)
                searches[lookup].search.take(list(mine))
        self._rest()

    def _answer(self, lookup: Lookup, found: _Search) -> None:
        search, chain = found
        if isinstance(search, HitSearch):
            search.finish()
        lookup.finish(
            search.hit_chunks - search.first,
            chain,
            full_chunks=search.full_chunks - search.first,
            in_disk_tier=self._service._share_in_disk_tier(found),
            known=search.known,
        )
        self._service._note_speed(lookup, self._lookups[lookup])
        if isinstance(search, HitSearch):
            # The threads that wait for the answer continue before that.
            self._pace.rest()
            search.remember()

    def _rest(self) -> None:
        if not any(lookup.waited_for for lookup in self._lookups):
            self._pace.rest()
