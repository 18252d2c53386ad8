"""Lookups: how many leading chunks of a prompt can be loaded from the shelf.

:class:`kvshelf.format.hit_rule.HitRule` says what can be loaded, for each kind of KV. Owns the
threads that search for it, by rounds (:mod:`kvshelf.shelf.search`), and sends their probes.
Existence of objects is the only index. On a high-latency storage an answer also stands for a while
in a :class:`~kvshelf.shelf.presence.PresenceCache`, and a chunk that lies before one that was found
counts as there.

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
* Background threads pause often, see :mod:`kvshelf.background`.
* On a low-latency storage every object that a hit needs has been seen. On a high-latency storage
  some full chunks of a hit were not probed; a gap between them is found by the load. All windows
  and states that a hit needs have been seen.
* Failures and answers of the storage are remembered for each kind of a chunk, by its kind key
  (:func:`kvshelf.format.kinds.kind_key`).
* One thread works on one lookup; on a high-latency storage 32 do so at the same time.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvshelf.background import GilPace
from kvshelf.format.hit_rule import HitRule
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, KINDS, Kind, kind_key
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.presence import PresenceCache
from kvshelf.shelf.search import Search
from kvshelf.shelf.threads import StorageThreads
from kvshelf.shelf.view import ObjectRef, Presence, ShelfView, find_pieces

logger = logging.getLogger(__name__)

#: Chunks of which the keys are made between two pauses.
_AT_ONCE = 8
#: Chunks of a hit for which a disk tier is asked.
_ASKED_OF_TIER = 16
#: Threads where a round takes long: so many lookups wait for the storage at the same time.
_HIGH_LATENCY_THREADS = 32

#: What is looked for: a kind key, and how many of its objects, from the first on.
_Name: TypeAlias = "tuple[bytes, int]"


@dataclass(eq=False)
class Lookup:
    """One search for the longest hit of one prompt.

    It is made and read on the caller's thread, and answered once.

    Attributes
    ----------
    chain : KeyChain or None
        Keys of the prompt's chunks; None when it has none, or was cancelled or given up.
    first_chunk : int
        Index of the chunk that the search begins at.
    hit_chunks : int
        Number of chunks from there on that can be loaded.
    full_chunks : int
        Number of chunks from there on whose full objects are on the shelf, up to the first that is
        not; all of them in a namespace without kind full. It differs from `hit_chunks` only where
        there are other kinds.
    known : Mapping[Kind, frozenset[int]]
        For each kind but full, the chunks (by their index in the prompt) that the search has seen
        on the shelf.
    in_disk_tier : float
        The share of the chunks that can be loaded which a disk tier has, where the service counts
        these.
    as_of : float
        ``time.monotonic()`` of the answer; until it is there, of the lookup's beginning.
    given_up : bool
        The storage did not answer in time, or the keys could not be made: nothing is known.
    waited_for : bool
        A thread waits in :meth:`wait`. It is the one that pauses are made for, so there are none.
    """

    tokens: Sequence[int]
    make_chain: Callable[[], KeyChain | None]
    first_chunk: int = 0
    ends: Sequence[int] | None = None
    on_done: Callable[[Lookup], None] | None = None
    ready: Future[Any] | None = None
    log: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(logger))
    cancelled: bool = False
    given_up: bool = False
    waited_for: bool = False
    chain: KeyChain | None = None
    hit_chunks: int = 0
    full_chunks: int = 0
    in_disk_tier: float = 0.0
    known: Mapping[Kind, frozenset[int]] = field(default_factory=dict)
    as_of: float = field(default_factory=time.monotonic)
    _done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.count = len(self.tokens)

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the answer for at most `seconds`; return ``done``."""
        self.waited_for = True
        try:
            return self._done.wait(seconds)
        finally:
            self.waited_for = False

    def cancel(self) -> None:
        """Note that the answer is not needed any more; the background thread skips it."""
        self.cancelled = True
        # The lookup may stay in the queue for long: release what it holds. A thread that reads
        # these attributes now checks whether the lookup is cancelled before it gives an answer.
        self.tokens = ()
        self.make_chain = lambda: None

    def make_keys(self, pace: GilPace) -> KeyChain | None:
        """Return the keys of the prompt; None if it has none, or the lookup was cancelled."""
        chain = self.make_chain()
        if chain is None:
            return None
        step = chain.chunk_size * _AT_ONCE
        for start in range(chain.tokens, self.count, step):
            chain.extend(self.tokens[start : min(start + step, self.count)])
            if not self.waited_for:
                pace.rest()
        return None if self.cancelled else chain

    def finish(
        self,
        hit_chunks: int,
        chain: KeyChain | None,
        *,
        full_chunks: int = 0,
        in_disk_tier: float = 0.0,
        known: Mapping[Kind, frozenset[int]] | None = None,
        given_up: bool = False,
    ) -> None:
        """Give the answer, unless there is one: a stuck thread may come back late."""
        with self._lock:
            if self._done.is_set():
                return
            self.given_up = given_up
            self.hit_chunks = hit_chunks
            self.full_chunks = full_chunks
            self.in_disk_tier = in_disk_tier
            self.known = known or {}
            self.chain = chain
            self.as_of = time.monotonic()
            self._done.set()
        if self.on_done is not None:
            try:
                self.on_done(self)
            except Exception as error:
                self.log.error("a completion callback of a lookup raised", exc_info=error)


class LookupService:
    """Threads that answer lookups on one namespace of one shelf.

    Parameters
    ----------
    *views : ShelfView
        The objects of each kind of a namespace.
    failed : FailedKeys
        Kind keys to be treated as missing.
    counters : Counters
    remembers : bool
        On a high-latency storage, remember answers for a while. False: for objects that come and
        go unnoticed, such as copies in a tier.
    on_thread_start : Callable, optional
        Called first on each thread, to set its processors.
    rule : HitRule, optional
        What a hit needs. When absent, what the namespace's record says.
    counts_tier : bool
        Ask a disk tier which chunks of each hit it has.
    """

    def __init__(
        self,
        *views: ShelfView,
        failed: FailedKeys,
        counters: Counters,
        remembers: bool = True,
        on_thread_start: Callable[[], None] | None = None,
        rule: HitRule | None = None,
        counts_tier: bool = False,
    ) -> None:
        ordered = sorted(views, key=lambda view: KINDS.index(view.fmt.kind))
        self._views = {view.fmt.kind: view for view in ordered}
        #: The objects of kind full; in a namespace without these, of its first kind.
        self._shelf = shelf = ordered[0]
        self._counts_tier = counts_tier
        self._shards = {kind: view.fmt.shards for kind, view in self._views.items()}
        self._rule = rule or HitRule.of(shelf.fmt.namespace.record)
        self._failed = failed
        self._counters = counters
        self._queue: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._submitting = threading.Lock()
        self._closed = False
        # What each thread works on, and since when; absent while it waits for a lookup.
        self._busy: dict[int, tuple[float, Lookup]] = {}
        self._log = RateLimitedLog(logger)
        self._high_latency = shelf.backend.properties.high_latency
        self._presence = PresenceCache() if self._high_latency and remembers else None
        self._count = _HIGH_LATENCY_THREADS if self._high_latency else 1
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
        self._threads.start()
        failed.subscribe(self.note_removed)

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
        ready: Future[Any] | None = None,
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
        ready : Future, optional
            `make_chain` is not called before it is done.
        """
        lookup = Lookup(tokens, make_chain, first_chunk, ends, on_done, ready, self._log)
        if ready is None:
            self._put(lookup)
        else:
            ready.add_done_callback(lambda _: self._put(lookup))
        return lookup

    def _put(self, lookup: Lookup) -> None:
        with self._submitting:
            taken = not self._closed and self._threads.ready()
            if taken:
                self._queue.put(lookup)
        if not taken:
            lookup.finish(0, None, given_up=True)

    def stalled(self, seconds: float) -> bool:
        """Whether every thread has been at one lookup for longer than `seconds`."""
        since = [began for began, _ in self._busy.copy().values()]
        return len(since) >= self._count and max(since) < time.monotonic() - seconds

    def answers_soon(self, lookup: Lookup) -> bool:
        """Whether `lookup` may be done in a few milliseconds."""
        return not self._high_latency and (lookup.ready is None or lookup.ready.done())

    def note_removed(self, key: bytes) -> None:
        """Note that a chunk was just deleted, or not found; lookups probe it from now on."""
        if self._presence is not None:
            self._presence.drop(key)

    def forget(self) -> None:
        """Forget the answers of the storage."""
        if self._presence is not None:
            self._presence.clear()

    def close(self) -> None:
        """Stop the threads once they have finished what was submitted."""
        self._failed.unsubscribe(self.note_removed)
        self._threads.close()
        with self._submitting:
            self._closed = True
            self._queue.put(None)

    def _give_up(self, thread: int) -> None:
        """End the lookup of a stuck thread."""
        _, lookup = self._busy.pop(thread, (0.0, None))
        if lookup is not None:
            lookup.finish(0, None, given_up=True)

    def _give_up_waiting(self) -> None:
        """End the lookups in the queue if no thread is left."""
        waiting: list[Lookup | None] = []
        with self._submitting, contextlib.suppress(queue.Empty):
            while not self._threads.any:
                waiting.append(self._queue.get_nowait())
        for lookup in waiting:
            if lookup is None:
                # For a thread whose call returns.
                self._queue.put(None)
            else:
                lookup.finish(0, None, given_up=True)

    # ------------------------------------------------------------------ on background threads

    def _run(self) -> None:
        me = threading.get_ident()
        while not self._threads.replaced():
            lookup = self._queue.get()
            if lookup is None:
                # There is one for all threads, behind everything that was submitted.
                self._queue.put(None)
                return
            self._busy[me] = time.monotonic(), lookup
            try:
                self._search(lookup)
            finally:
                self._busy.pop(me, None)

    def _search(self, lookup: Lookup) -> None:
        """Answer one lookup. If that fails, it has found nothing but its keys."""
        chain: KeyChain | None = None
        pace = GilPace()
        try:
            if not lookup.cancelled:
                self._counters.add("lookups")
                chain = lookup.make_keys(pace)
            if chain is None:
                lookup.finish(0, None)
            else:
                self._find(lookup, chain, pace)
        except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
            self._counters.add("probe_errors")
            self._log.error("a lookup failed and counts as a miss", exc_info=error)
            lookup.finish(0, chain, given_up=chain is None)

    def _find(self, lookup: Lookup, chain: KeyChain, pace: GilPace) -> None:
        """Search for the keys of a lookup, unless it is given up meanwhile."""
        began, chunks, shards = time.monotonic(), chain.chunks, self._shards
        # Remembered answers are useless while nothing can be loaded.
        presence = self._presence if self._shelf.backend.reads.is_closed else None
        first = min(lookup.first_chunk, len(chunks))
        search = Search(
            self._rule,
            shards,
            len(chunks),
            first,
            range(1, len(chunks) + 1) if lookup.ends is None else lookup.ends,
            high_latency=self._high_latency,
        )
        keys = [chunk.key for chunk in chunks[first:]]
        remembered = first + (0 if presence is None else presence.leading(keys))
        rounds = search.rounds(remembered, first + self._failed.leading(keys))
        asks = next(rounds, None)
        while asks is not None:
            asked_at = time.monotonic()
            #: What the search looks for: its names, and what is known of each without asking.
            names: list[_Name] = []
            is_present: dict[_Name, bool] = {}
            unknown: dict[_Name, tuple[Kind, Chunk]] = {}
            for kind, index, is_whole in asks:
                chunk = chunks[index]
                name = kind_key(chunk.key, kind), shards[kind] if is_whole else 1
                names.append(name)
                # Full chunks that have failed are behind the end of the search.
                if kind != FULL and name[0] in self._failed:
                    is_present[name] = False
                elif presence is not None and presence.has(name[0], seen=is_whole):
                    is_present[name] = True
                else:
                    unknown[name] = kind, chunk
            if lookup.cancelled:
                lookup.finish(0, None)
                return
            if unknown:
                is_present |= self._probe(unknown)
            if lookup.done:
                return
            if not lookup.waited_for:
                pace.rest()
            if presence is not None:
                present = [
                    n[0]
                    for n, (kind, _) in unknown.items()
                    if is_present[n] and n[1] == shards[kind]
                ]
                presence.note(present, asked_at)
            try:
                asks = rounds.send([is_present[name] for name in names])
            except StopIteration:
                asks = None
        if presence is not None and FULL in shards:
            inferred = chunks[remembered : search.full_chunks]
            presence.note([chunk.key for chunk in inferred], began, seen=False)
        lookup.finish(
            search.hit_chunks - first,
            chain,
            full_chunks=search.full_chunks - first,
            in_disk_tier=self._share_in_disk_tier(chunks[first : search.hit_chunks]),
            known=search.known,
        )

    def _probe(self, wanted: Mapping[_Name, tuple[Kind, Chunk]]) -> dict[_Name, bool]:
        """Return for each kind of a chunk whether all objects that are looked for are there."""
        pieces = [(kind, chunk, range(count)) for (_, count), (kind, chunk) in wanted.items()]
        presences = find_pieces(self._views, pieces)
        self._counters.add("probes", sum(map(len, presences)))
        errors = sum(answers.count(Presence.ERROR) for answers in presences)
        if errors:
            self._counters.add("probe_errors", errors)
        return {
            name: answers.count(Presence.PRESENT) == len(answers)
            for name, answers in zip(wanted, presences, strict=True)
        }

    def _share_in_disk_tier(self, hit: Sequence[Chunk]) -> float:
        """Return the share of a hit that lies in a disk tier, of a sample of its chunks."""
        if not (hit and self._counts_tier):
            return 0.0
        sample = hit[:: -(-len(hit) // _ASKED_OF_TIER)]
        refs = [
            ObjectRef(chunk, shard) for chunk in sample for shard in range(self._shelf.fmt.shards)
        ]
        answers = self._shelf.nearby(refs)
        return sum(answer is Presence.PRESENT for answer in answers) / len(answers)
