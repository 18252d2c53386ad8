"""Lookups: how many leading chunks of a prompt can be loaded from the shelf.

:mod:`kvshelf.shelf.hits` says what can be loaded, for each kind of KV. Owns the threads that search
for it. Existence of objects is the only index. On a low-latency storage every answer comes from
probes made for that lookup; on a high-latency storage an answer also stands for a while in a
:class:`~kvshelf.shelf.presence.PresenceCache`.

Contracts
---------
* A :class:`Lookup` is made and read on the caller's (step) thread and worked on by one
  background thread. Once it is ``done``, its answer is valid, ``chain`` holds the
  keys of all complete chunks, and both belong to the caller.
* A storage that does not answer delays the lookups in the queue, never their callers:
  :meth:`LookupService.stalled` is true when waiting is useless. A lookup whose probe missed its
  deadline ends with nothing found and no keys; another thread goes on with the next lookups
  (:mod:`kvshelf.shelf.threads`).
* A lookup may have to wait for something before its keys can be made. It waits outside the queue,
  so that no other lookup waits with it.
* While the circuit breaker is open, lookups still compute chunk keys but report no hit, at once.
* Background threads pause after each half millisecond of work (:mod:`kvshelf.shelf.pacing`).
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, KINDS, STATE, WINDOW, Kind, kind_key
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.hits import HitSearch, Questions, window_chunks
from kvshelf.shelf.pacing import GilPace
from kvshelf.shelf.presence import Asked, PresenceCache
from kvshelf.shelf.search import Answers, Question, RoundCosts
from kvshelf.shelf.threads import StorageThreads
from kvshelf.shelf.view import ObjectRef, Presence, ShelfView, find_together
from kvshelf.traces import trace_range

logger = logging.getLogger(__name__)

_FIRST_BATCH = 8
_LARGEST_BATCH = 32
#: Most lookups that share rounds.
_TOGETHER = 16
#: Threads where a round takes long: a lookup need not wait for the end of one that has begun.
_HIGH_LATENCY_THREADS = 2


class Lookup:
    """One search for the longest hit of one prompt.

    Attributes
    ----------
    chain : KeyChain or None
        Keys of the prompt's chunks; None when it has none, or the lookup failed.
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
    tail : Chunk or None
        The tail behind the last of the chunks that can be loaded, where the search found it.
    as_of : float
        ``time.monotonic()`` of the answer; until it is there, of the lookup's beginning.
    given_up : bool
        The storage did not answer in time: nothing is known, not even the keys.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        make_chain: Callable[[], KeyChain | None],
        first_chunk: int = 0,
        on_done: Callable[[Lookup], None] | None = None,
        log: RateLimitedLog | None = None,
        ends: Sequence[int] | None = None,
        tail_end: int = 0,
        prepare: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._log = RateLimitedLog(logger) if log is None else log
        self.first_chunk = first_chunk
        self._on_done = on_done
        self._tokens = tokens
        self._count = len(tokens)
        self._make_chain = make_chain
        #: None once the lookup no longer waits for it.
        self._prepare = prepare
        self._ends = ends
        self._tail_end = tail_end
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._cancelled = False
        self.given_up = False
        self.chain: KeyChain | None = None
        self.hit_chunks = 0
        self.full_chunks = 0
        self.known: Mapping[Kind, frozenset[int]] = {}
        self.tail: Chunk | None = None
        self.as_of = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the answer for at most `seconds`; return ``done``."""
        return self._done.wait(seconds)

    def cancel(self) -> None:
        """Note that the answer is not needed any more; the background thread skips it."""
        self._cancelled = True
        # The lookup may stay in the queue for long: release what it holds. A thread that reads
        # these attributes now checks whether the lookup is cancelled before it gives an answer.
        self._tokens = ()
        self._make_chain = _no_chain
        self._prepare = None

    def _finish(
        self,
        hit_chunks: int,
        chain: KeyChain | None,
        *,
        full_chunks: int = 0,
        known: Mapping[Kind, frozenset[int]] | None = None,
        tail: Chunk | None = None,
        given_up: bool = False,
    ) -> None:
        """Give the answer, unless there is one: a stuck thread may come back late."""
        with self._lock:
            if self._done.is_set():
                return
            self.given_up = given_up
            self.hit_chunks = hit_chunks
            self.full_chunks = full_chunks
            self.known = known or {}
            self.tail = tail
            self.chain = chain
            self.as_of = time.monotonic()
            self._done.set()
        if self._on_done is not None:
            try:
                self._on_done(self)
            except Exception as error:  # noqa: BLE001 - the thread must go on
                self._log.error("a completion callback of a lookup raised", exc_info=error)


def _no_chain() -> KeyChain | None:
    return None


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
    window : int
        Tokens that the namespace's windows reach, see
        :func:`~kvshelf.shelf.hits.window_chunks`.
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
        window: int = 0,
    ) -> None:
        self._shelf = shelf
        self._fmt = shelf.fmt
        views = {shelf.fmt.kind: shelf, **(others or {})}
        self._views = {kind: views[kind] for kind in KINDS if kind in views}
        self._window = window
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
        self._costs = RoundCosts(properties.probe_cost, properties.probes_at_once)
        self._asked: dict[Question, _Flight] = {}
        self._asked_lock = threading.Lock()
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
        tail_end: int = 0,
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
        tail_end : int
            Number of leading tokens: also look for the tail that ends there, where all chunks are
            found. It must begin behind the last chunk. 0: for no tail. Of no meaning where there
            are other kinds than full.
        on_done : Callable, optional
            Called once on the background thread when the answer is there, also when the
            lookup was cancelled. Must not block.
        prepare : Callable, optional
            Called first, on the background thread, with a function. `make_chain` is called once
            that function was called, on any thread. Neither may block.
        """
        lookup = Lookup(
            tokens, make_chain, first_chunk, on_done, self._log, ends, tail_end, prepare
        )
        self._put(lookup)
        return lookup

    def _put(self, lookup: Lookup) -> None:
        with self._submitting:
            taken = not self._closed and self._threads.ready()
            if taken:
                self._queue.put(lookup)
        if not taken:
            lookup._finish(0, None, given_up=True)

    def _put_back(self, lookup: Lookup) -> bool:
        """Whether a lookup has to wait before its keys can be made; it comes back to the queue."""
        prepare = lookup._prepare
        if prepare is None:
            return False

        def go_on() -> None:
            lookup._prepare = None
            self._put(lookup)

        try:
            prepare(go_on)
        except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
            self._count_failure(error)
            lookup._finish(0, None)
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
        chunks = 1 if self._high_latency else lookup._count // self._fmt.chunk_size
        return chunks * self._usual_seconds <= seconds

    @staticmethod
    def _waits_for_keys(lookup: Lookup, seconds: float) -> bool:
        return lookup._prepare is not None and time.monotonic() - lookup.as_of > seconds

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
                lookup._finish(0, None, given_up=True)

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
            lookup._finish(0, None, given_up=True)

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
            with trace_range("kvshelf lookup"):
                if self._high_latency:
                    _Rounds(self, me, lookup).run()
                else:
                    self._search(me, lookup)

    def _search(self, me: int, lookup: Lookup) -> None:
        begin = time.monotonic()
        self._busy[me] = begin, (lookup,)
        try:
            self._work(lookup)
            self._note_speed(lookup, begin)
        except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
            self._count_failure(error)
        finally:
            lookup._finish(0, None)
            self._busy.pop(me, None)

    def _note_speed(self, lookup: Lookup, begin: float) -> None:
        chunks = lookup._count // self._fmt.chunk_size
        if lookup.done and chunks:
            found = (lookup.as_of - begin) / (1 if self._high_latency else chunks)
            known = self._usual_seconds or found
            self._usual_seconds = known + (found - known) / 4

    def _count_failure(self, error: Exception) -> None:
        self._counters.add("probe_errors")
        self._log.error("a lookup failed and counts as a miss", exc_info=error)

    def _work(self, lookup: Lookup) -> None:
        if lookup._cancelled:
            return
        self._counters.add("lookups")
        chain = lookup._make_chain()
        if chain is None:
            return
        pace = GilPace()
        # While the breaker is open, probes fail at once; later stores need the keys.
        full = hit = 0
        if FULL in self._views:
            full = hit = self._search_low_latency(lookup, chain, pace)
        self._extend(lookup, chain, pace, lookup._count)
        known: dict[Kind, frozenset[int]] = {}
        if self._views.keys() != {FULL}:
            first = min(lookup.first_chunk, len(chain.chunks))
            full = full if FULL in self._views else len(chain.chunks) - first
            end, known = self._latest_end(lookup, chain.chunks, first, first + full, pace)
            hit = end - first
        tail = (
            self._tail_of(lookup, chain) if lookup.first_chunk + hit >= len(chain.chunks) else None
        )
        if tail is not None and not self._leading([tail]):
            tail = None
        if not lookup._cancelled:
            lookup._finish(hit, chain, full_chunks=full, known=known, tail=tail)

    def _tail_of(self, lookup: Lookup, chain: KeyChain) -> Chunk | None:
        """Return the tail to look for behind all chunks; None if there is none."""
        first = len(chain.chunks) * chain.chunk_size
        count = lookup._tail_end - first
        if not 0 < count < chain.chunk_size or self._views.keys() != {FULL}:
            return None
        tokens = lookup._tokens[first : lookup._tail_end]
        # A cancelled lookup has none any more.
        return chain.tail_after(len(chain.chunks), tokens) if len(tokens) == count else None

    def _ends(self, lookup: Lookup, chunks: Sequence[Chunk]) -> Sequence[int]:
        if lookup._ends is None:
            return range(1, len(chunks) + 1)
        return [end for end in lookup._ends if end <= len(chunks)]

    def _latest_end(
        self, lookup: Lookup, chunks: Sequence[Chunk], first: int, full: int, pace: GilPace
    ) -> tuple[int, dict[Kind, frozenset[int]]]:
        """Find the latest end of a hit, and all the chunks seen on the way, by kind.

        Probes states from the latest end on backwards, in batches; where there is a state, the
        windows that the end needs.
        """
        there: dict[Kind, dict[int, bool]] = {kind: {} for kind in self._views if kind != FULL}

        def present(kind: Kind, indices: Iterable[int]) -> bool:
            """Whether all are there; after one that is not, the rest may not be probed."""
            known = there[kind]
            unknown = [index for index in indices if index not in known]
            for begin in range(0, len(unknown), _FIRST_BATCH):
                group = unknown[begin : begin + _FIRST_BATCH]
                answers = self._present(kind, [chunks[index] for index in group])
                known.update(zip(group, answers, strict=True))
                pace.rest()
                if kind == WINDOW and not all(answers):
                    return False
            return all(known[index] for index in indices)

        ends = [end for end in reversed(self._ends(lookup, chunks)) if first < end <= full]
        batch = _FIRST_BATCH
        found = first
        while ends and found == first and not lookup._cancelled:
            group, ends = ends[:batch], ends[batch:]
            batch = min(2 * batch, _LARGEST_BATCH)
            if STATE in there:
                present(STATE, [end - 1 for end in group])
                group = [end for end in group if there[STATE][end - 1]]
            for end in group:
                reach = window_chunks(end, self._window, self._fmt.chunk_size)
                needed = [index for index in reversed(reach) if index >= first]
                windows = there.get(WINDOW)
                if windows is None or (
                    all(windows.get(index, True) for index in needed) and present(WINDOW, needed)
                ):
                    found = end
                    break
        return found, {
            kind: frozenset(index for index, is_there in known.items() if is_there)
            for kind, known in there.items()
        }

    def _present(self, kind: Kind, chunks: Sequence[Chunk]) -> list[bool]:
        """Return which of `chunks` are there in full."""
        view = self._views[kind]
        shards = view.fmt.shards
        refs = [ObjectRef(chunk, shard) for chunk in chunks for shard in range(shards)]
        self._counters.add("probes", len(refs))
        answers = view.find(refs)
        errors = answers.count(Presence.ERROR)
        if errors:
            self._counters.add("probe_errors", errors)
        return [
            kind_key(chunk.key, kind) not in self._failed
            and all(
                answer is Presence.PRESENT
                for answer in answers[place * shards : (place + 1) * shards]
            )
            for place, chunk in enumerate(chunks)
        ]

    def _extend(self, lookup: Lookup, chain: KeyChain, pace: GilPace, end: int) -> None:
        step = chain.chunk_size * _LARGEST_BATCH
        for start in range(chain.tokens, end, step):
            if lookup._cancelled:
                return
            chain.extend(lookup._tokens[start : min(start + step, end)])
            pace.rest()

    def _search_low_latency(self, lookup: Lookup, chain: KeyChain, pace: GilPace) -> int:
        """Probe every shard of every chunk in order, up to the first that is missing."""
        batch = _FIRST_BATCH
        hit = 0
        skipped = min(lookup.first_chunk, lookup._count // chain.chunk_size)
        self._extend(lookup, chain, pace, skipped * chain.chunk_size)
        total = lookup._count // chain.chunk_size - skipped
        while hit < total and not lookup._cancelled:
            start = chain.tokens
            chunks = chain.extend(
                lookup._tokens[start : min(start + batch * chain.chunk_size, lookup._count)]
            )
            batch = min(2 * batch, _LARGEST_BATCH)
            found = 0
            # Few chunks per call keep the time between two pauses short.
            for first in range(0, len(chunks), _FIRST_BATCH):
                group = chunks[first : first + _FIRST_BATCH]
                present = self._leading(group)
                found += present
                pace.rest()
                if present < len(group):
                    break
            hit += found
            if found < len(chunks):
                break
        return hit

    def _leading(self, chunks: Sequence[Chunk]) -> int:
        """Return how many leading `chunks` are there in full."""
        usable = self._failed.leading([chunk.key for chunk in chunks])
        shards = self._fmt.shards
        # Quicker than a call of the class for each, which lookups would notice.
        refs = list(map(ObjectRef._make, product(chunks[:usable], range(shards))))
        self._counters.add("probes", len(refs))
        answers = self._shelf.find(refs)
        errors = answers.count(Presence.ERROR)
        if errors:
            self._counters.add("probe_errors", errors)
        for i, answer in enumerate(answers):
            if answer is not Presence.PRESENT:
                return i // shards
        return usable

    def _ask(self, questions: Questions) -> Answers:
        """Send probes to the storage, all at once; return answers, and when each probe was sent.

        An object that another thread is probing now is not probed again, unless that answer would
        be older than something that is known to have happened to the chunk.
        """
        now = time.monotonic()
        # The guard reports a stuck thread sooner or later.
        mine = _Flight(self._cache.ask(), now + self._shelf.backend.deadlines.probe)
        theirs: dict[Question, _Flight] = {}
        with self._asked_lock:
            for question in questions:
                other = self._asked.get(question)
                if (
                    other is not None
                    and now < other.until
                    and other.asked.generation > self._cache.since(question[0])
                ):
                    theirs[question] = other
                else:
                    self._asked[question] = mine
        asked = [question for question in questions if question not in theirs]
        try:
            if asked:
                self._counters.add("probes", len(asked))
                begin = time.perf_counter()
                found = self._find(questions, asked)
                if Presence.ERROR not in found:
                    self._costs.note(len(asked), time.perf_counter() - begin)
                mine.answers = dict(zip(asked, found, strict=True))
        finally:
            with self._asked_lock:
                for question in asked:
                    if self._asked.get(question) is mine:
                        del self._asked[question]
            mine.over.set()
        answers = {question: (answer, mine.asked) for question, answer in mine.answers.items()}
        for question, other in theirs.items():
            other.over.wait(max(0.0, other.until - time.monotonic()))
            answer = other.answers.get(question, Presence.ERROR)
            answers[question] = answer, other.asked
        errors = sum(answer is Presence.ERROR for answer, _ in answers.values())
        if errors:
            self._counters.add("probe_errors", errors)
        return answers

    def _find(self, questions: Questions, asked: list[Question]) -> list[Presence]:
        """Probe objects of all kinds, in one call of the storage."""
        by_kind: dict[Kind, list[ObjectRef]] = {}
        for question in asked:
            kind, chunk = questions[question]
            by_kind.setdefault(kind, []).append(ObjectRef(chunk, question[1]))
        found = find_together([(self._views[kind], refs) for kind, refs in by_kind.items()])
        answers = {kind: iter(of_kind) for kind, of_kind in zip(by_kind, found, strict=True)}
        return [next(answers[questions[question][0]]) for question in asked]


# ------------------------------------------------------------------- high-latency storage


class _Flight:
    """Probes that one thread has sent to the storage, and their answers."""

    __slots__ = ("answers", "asked", "over", "until")

    def __init__(self, asked: Asked, until: float) -> None:
        self.asked = asked
        #: Other threads wait for the answers until then.
        self.until = until
        self.answers: dict[Question, Presence] = {}
        self.over = threading.Event()


class _Search(NamedTuple):
    """The state of one lookup while its search runs."""

    search: HitSearch
    chain: KeyChain
    tail: Chunk | None


class _Rounds:
    """The searches of one thread, from the first lookup until none is left."""

    def __init__(self, service: LookupService, thread: int, first: Lookup) -> None:
        self._service = service
        self._thread = thread
        self._first = first
        #: Lookups without an answer, in order, and when each was taken.
        self._lookups: dict[Lookup, float] = {}
        self._searches: dict[Lookup, _Search] = {}
        self._pace = GilPace()

    def run(self) -> None:
        """Search; a lookup that fails ends alone."""
        service = self._service
        try:
            self._take(self._first)
            while self._lookups:
                self._take_more()
                self._round()
                if self._thread not in service._busy:
                    # The thread was given up: another one continues with later lookups.
                    break
        except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
            service._count_failure(error)
        finally:
            for lookup in self._lookups:
                lookup._finish(0, None)
            service._busy.pop(self._thread, None)

    def _take_more(self) -> None:
        while len(self._lookups) < _TOGETHER:
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
        service = self._service
        self._lookups[lookup] = time.monotonic()
        self._note_busy()
        try:
            search = None if lookup._cancelled else self._search_for(lookup)
        except Exception as error:  # noqa: BLE001 - the others can still be found
            service._count_failure(error)
            search = None
        if search is None:
            self._end(lookup)
        else:
            self._searches[lookup] = search

    def _search_for(self, lookup: Lookup) -> _Search | None:
        service = self._service
        service._counters.add("lookups")
        chain = lookup._make_chain()
        if chain is None:
            return None
        service._extend(lookup, chain, GilPace(), lookup._count)
        # Remembered answers are useless while nothing can be loaded.
        useful = service._remembers and service._shelf.backend.reads.is_closed
        cache = service._cache if useful else PresenceCache()
        tail = service._tail_of(lookup, chain)
        search = HitSearch(
            # Last of all, as a chunk of which nothing but the length is different.
            chain.chunks if tail is None else [*chain.chunks, tail],
            min(lookup.first_chunk, len(chain.chunks)),
            service._ends(lookup, chain.chunks),
            service._window,
            cache,
            service._failed,
            {kind: view.fmt.shards for kind, view in service._views.items()},
        )
        return _Search(search, chain, tail)

    def _end(self, lookup: Lookup) -> None:
        lookup._finish(0, None)
        del self._lookups[lookup]
        if self._lookups and self._thread in self._service._busy:
            self._note_busy()

    def _note_busy(self) -> None:
        oldest = next(iter(self._lookups.values()))
        self._service._busy[self._thread] = oldest, tuple(self._lookups)

    def _round(self) -> None:
        service = self._service
        asking: list[HitSearch] = []
        questions: Questions = {}
        together = len(self._searches)
        for lookup, (search, chain, tail) in list(self._searches.items()):
            planned = {} if lookup._cancelled else search.plan(service._costs, together)
            if planned:
                asking.append(search)
                questions |= planned
                continue
            del self._searches[lookup]
            if not lookup._cancelled:
                search.finish()
                if not lookup._cancelled:
                    chunks = len(chain.chunks)
                    lookup._finish(
                        min(search.hit_chunks, chunks) - search.first,
                        chain,
                        full_chunks=min(search.full_chunks, chunks) - search.first,
                        known=search.known,
                        tail=tail if search.hit_chunks > chunks else None,
                    )
                # The threads that wait for the answer continue before that.
                self._pace.rest()
                search.remember()
                service._note_speed(lookup, self._lookups[lookup])
            self._end(lookup)
        if asking:
            answers = service._ask(questions)
            for search in asking:
                search.take(answers)
