"""Look-ups: how many leading chunks of a prompt are on the shelf.

Owns the search for the longest stored prefix, the threads that run it, and the memory
of keys whose objects turned out bad. Existence of objects is the only index: where probes
are cheap every answer comes from probes made for that look-up, elsewhere from such as were
made within the times of a :class:`~kvshelf.memo.Memo`.

Contracts
---------
* A :class:`Lookup` is made and read on the caller's (step) thread and worked on by one
  background thread. Once it is ``done``, ``hit_chunks`` is valid, ``chain`` holds the
  keys of all complete chunks, and both belong to the caller.
* A storage that does not answer holds up the look-ups behind it, never their callers:
  :meth:`LookupService.stalled` tells that waiting is of no use. A look-up whose probe
  missed its deadline ends with nothing found and no keys; another thread goes on with
  those behind it (:mod:`kvshelf.threads`).
* While the storage is given a rest, look-ups make keys and find nothing, at once.
* Background threads sleep for some microseconds after each half millisecond of work.
  Merely releasing the GIL would not do: a thread that gives it up for a short system
  call takes it back before a waiting thread has woken.
* Where probes are cheap every shard of every chunk of a hit has been seen. Elsewhere a
  k-ary search looks at one shard of few chunks, and the first and last chunk are
  confirmed in full; a hole in between is found by the load, and asked for by every search
  from then on.
* Where they are not cheap, look-ups that wait are searched for together: a *round* puts the
  questions of all of them to the storage at once, each question once, and none that another
  thread waits for the answer of. A look-up that comes meanwhile joins the next round. How many
  questions a search puts in a round follows from the time that rounds have taken so far.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeAlias

from kvshelf.backends.base import CHEAP_PROBE
from kvshelf.chunkfile import ObjectFormat
from kvshelf.identity import Chunk, KeyChain
from kvshelf.memo import Asked, Memo
from kvshelf.metrics import Counters
from kvshelf.shelf import Presence, Shelf
from kvshelf.threads import StorageThreads

logger = logging.getLogger(__name__)

_FIRST_BATCH = 8
_LARGEST_BATCH = 32
_WORK_SECONDS = 0.5e-3
_REST_SECONDS = 50e-6
_LOG_SECONDS = 60.0
#: Most look-ups that share rounds.
_TOGETHER = 16
#: Most chunks that one search asks for in one round.
_MOST_POINTS = 64
#: Threads where a round takes long: a look-up need not wait for the end of one that has begun.
_FAR_THREADS = 2


class FailedKeys:
    """Keys that a load failed for; to be treated as missing for a while.

    A *bad* key's object is damaged and stays failed until it is replaced or
    `bad_seconds` are over; other failures (gone, storage trouble) pass sooner. A key that
    fails again within as long as it was failed the last time stays failed for twice as
    long, so that no object is tried for ever at a cost to every request.

    Parameters
    ----------
    bad_seconds, other_seconds : float
        How long a key stays failed at first, unless :meth:`forget` is called before.
    most_seconds : float
        How long at most.
    limit : int
        Most keys remembered; the oldest are forgotten first.
    """

    def __init__(
        self,
        bad_seconds: float = 300.0,
        other_seconds: float = 10.0,
        limit: int = 65536,
        most_seconds: float = 1800.0,
    ) -> None:
        self._seconds = {True: bad_seconds, False: other_seconds}
        self._most_seconds = most_seconds
        self._limit = limit
        #: Until when a key is failed, whether it is bad, and for how long it was failed.
        self._keys: OrderedDict[bytes, tuple[float, bool, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._listeners: list[Callable[[bytes], None]] = []

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._get(key) is not None

    def __len__(self) -> int:
        return sum(key in self for key in list(self._keys))

    def is_bad(self, key: bytes) -> bool:
        """Whether `key` failed because its object is damaged."""
        return self._get(key) is True

    def _get(self, key: bytes) -> bool | None:
        found = self._keys.get(key)
        if found is None:
            return None
        until, bad, seconds = found
        late = time.monotonic() - until
        if late > seconds:
            with self._lock:
                if self._keys.get(key) is found:
                    del self._keys[key]
        return None if late >= 0 else bad

    def tell(self, listener: Callable[[bytes], None]) -> None:
        """Call `listener` with each key that is added from now on. It must not block."""
        self._listeners.append(listener)

    def add(self, key: bytes, *, bad: bool) -> None:
        """Remember `key`."""
        for listener in self._listeners:
            listener(key)
        now = time.monotonic()
        with self._lock:
            seconds = self._seconds[bad]
            known = self._keys.get(key)
            if known is not None and known[0] <= now <= known[0] + known[2]:
                seconds = min(max(seconds, 2 * known[2]), max(seconds, self._most_seconds))
            elif known is not None and now < known[0]:
                # Several loads of the same object failed together.
                seconds = max(seconds, known[2])
            self._keys[key] = (now + seconds, bad, seconds)
            self._keys.move_to_end(key)
            while len(self._keys) > self._limit:
                self._keys.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Let `key` be tried again: a good object has taken the place.

        Once. A key that has failed again after that waits: its objects are not the trouble.
        """
        with self._lock:
            known = self._keys.get(key)
            if known is not None and known[2] <= self._seconds[known[1]]:
                # What is over is remembered for as long, so that a second failure counts.
                self._keys[key] = (min(known[0], time.monotonic()), known[1], known[2])

    def clear(self) -> None:
        """Forget all keys."""
        with self._lock:
            self._keys.clear()


class Lookup:
    """One search for the stored prefix of one prompt.

    Attributes
    ----------
    chain : KeyChain or None
        Keys of the prompt's chunks; None when it has none, or the look-up failed.
    first_chunk : int
        Index of the chunk that the search begins at.
    hit_chunks : int
        Number of chunks from there on that are on the shelf, up to the first that is not.
    finished_at : float
        ``time.monotonic()`` when the answer was there.
    given_up : bool
        The storage did not answer in time: nothing is known, not even the keys.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        make_chain: Callable[[], KeyChain | None],
        first_chunk: int = 0,
        on_done: Callable[[Lookup], None] | None = None,
        on_mistake: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self._on_mistake = on_mistake
        self.first_chunk = first_chunk
        self._on_done = on_done
        self._tokens = tokens
        self._count = len(tokens)
        self._make_chain = make_chain
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._cancelled = False
        self.given_up = False
        self.chain: KeyChain | None = None
        self.hit_chunks = 0
        self.finished_at = 0.0

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the answer for at most `seconds`; return ``done``."""
        return self._done.wait(seconds)

    def cancel(self) -> None:
        """Tell the background thread that nobody wants the answer any more."""
        self._cancelled = True
        # It may wait behind others for long. A thread that reads them at this moment looks whether
        # it is cancelled before it gives an answer.
        self._tokens = ()
        self._make_chain = _no_chain

    def _finish(self, hit_chunks: int, chain: KeyChain | None, *, given_up: bool = False) -> None:
        """Give the answer, unless there is one: a thread that was given up may come back."""
        with self._lock:
            if self._done.is_set():
                return
            self.given_up = given_up
            self.hit_chunks = hit_chunks
            self.chain = chain
            self.finished_at = time.monotonic()
            self._done.set()
        if self._on_done is not None:
            try:
                self._on_done(self)
            except Exception as error:  # noqa: BLE001 - it must end no thread of ours
                if self._on_mistake is not None:
                    self._on_mistake("who was told of a look-up's end made a mistake", error)


def _no_chain() -> KeyChain | None:
    return None


class _Pace:
    """Keeps the GIL free for others, see the module's contracts."""

    def __init__(self) -> None:
        self._rested = time.perf_counter()

    def rest(self) -> None:
        if time.perf_counter() - self._rested > _WORK_SECONDS:
            time.sleep(_REST_SECONDS)
            self._rested = time.perf_counter()


class LookupService:
    """Threads that answer look-ups on one namespace of one shelf.

    Parameters
    ----------
    shelf : Shelf
    fmt : ObjectFormat
        Format of the namespace's objects.
    failed : FailedKeys
        Keys to be treated as missing.
    counters : Counters
    threads : int
        Look-ups worked on at once. Where probes are not cheap there are at least two threads,
        and each works on several.
    remembers : bool
        Where probes are not cheap an answer stands for a while. False: for what comes and goes
        without a word, as copies do.
    on_thread_start : Callable, optional
        Called first on each thread, to set its processors.
    """

    def __init__(
        self,
        shelf: Shelf,
        fmt: ObjectFormat,
        *,
        failed: FailedKeys,
        counters: Counters,
        threads: int = 1,
        remembers: bool = True,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._shelf = shelf
        self._fmt = fmt
        self._failed = failed
        self._remembers = remembers
        self._counters = counters
        self._queue: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._submitting = threading.Lock()
        self._closed = False
        # What each thread works on, and since when; absent while it waits for a look-up.
        self._busy: dict[int, tuple[float, Sequence[Lookup]]] = {}
        self._next_log = 0.0
        #: How long look-ups take: for each chunk where probes are cheap, else each of them.
        self._usual_seconds = 0.0
        properties = shelf.backend.properties
        self._cheap = properties.probe_cost < CHEAP_PROBE
        self._memo = Memo()
        self._costs = _Costs(properties.probe_cost, properties.probes_at_once)
        self._asked: dict[_Question, _Flight] = {}
        self._asked_lock = threading.Lock()
        self._count = threads if self._cheap else max(threads, _FAR_THREADS)
        self._threads = StorageThreads(
            "kvshelf-lookup",
            self._count,
            self._run,
            shelf.backend,
            count_kept=lambda: counters.add("kept_threads"),
            on_kept=self._give_up,
            on_stop=self._give_up_waiting,
            on_thread_start=on_thread_start,
        )
        shelf.backend.count_into(counters.add)
        if not self._cheap:
            failed.tell(self._memo.failed)
        self._threads.start()

    @property
    def available(self) -> bool:
        """Whether look-ups can find anything: not while the storage is given a rest."""
        return self._shelf.available and self._threads.ready()

    def submit(
        self,
        tokens: Sequence[int],
        make_chain: Callable[[], KeyChain | None],
        *,
        first_chunk: int = 0,
        on_done: Callable[[Lookup], None] | None = None,
    ) -> Lookup:
        """Start a look-up; returns at once. After :meth:`close` it is given up at once.

        Parameters
        ----------
        tokens : Sequence[int]
            The prompt. Only its present length is looked at, so that the caller may
            append to it meanwhile.
        make_chain : Callable[[], KeyChain or None]
            Called on the background thread, and so may hash files. None: the prompt has
            no content address, which is a miss.
        first_chunk : int
            Index of the chunk to begin at: the caller has what comes before.
        on_done : Callable, optional
            Called once on the background thread when the answer is there, also when the
            look-up was cancelled. Must not block.
        """
        lookup = Lookup(tokens, make_chain, first_chunk, on_done, self._log_failure)
        with self._submitting:
            taken = not self._closed and self._threads.ready()
            if taken:
                self._queue.put(lookup)
        if not taken:
            lookup._finish(0, None, given_up=True)
        return lookup

    def stalled(self, seconds: float) -> bool:
        """Whether every thread has been at one look-up for longer than `seconds`."""
        busy = self._busy.copy()
        since = [busy[thread][0] for thread in self._threads.working if thread in busy]
        return len(since) >= self._count and max(since) < time.monotonic() - seconds

    def may_be_done_within(self, lookup: Lookup, seconds: float) -> bool:
        """Whether waiting for `lookup` for `seconds` makes sense, going by those before it."""
        chunks = lookup._count // self._fmt.chunk_size if self._cheap else 1
        return chunks * self._usual_seconds <= seconds

    def stored(self, keys: Iterable[bytes]) -> None:
        """Note that these chunks were just published; a look-up from now on finds them."""
        if not self._cheap:
            for key in keys:
                self._memo.stored(key)

    def forget(self) -> None:
        """Forget what is remembered of the storage's answers."""
        self._memo.clear()

    def close(self) -> None:
        """Stop the threads once they have worked off what was submitted."""
        self._threads.close()
        with self._submitting:
            self._closed = True
            self._queue.put(None)

    def _give_up(self, thread: int) -> None:
        """End the look-ups of a thread that the storage keeps."""
        busy = self._busy.pop(thread, None)
        if busy is not None:
            for lookup in busy[1]:
                lookup._finish(0, None, given_up=True)

    def _give_up_waiting(self) -> None:
        """End the look-ups that no thread is left for."""
        waiting: list[Lookup] = []
        with self._submitting:
            if self._threads.any:
                return
            with contextlib.suppress(queue.Empty):
                while (lookup := self._queue.get_nowait()) is not None:
                    waiting.append(lookup)
            if self._closed:
                # For threads that come back.
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
            if not self._cheap:
                _Rounds(self, me, lookup).run()
                continue
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
            found = (lookup.finished_at - begin) / (chunks if self._cheap else 1)
            known = self._usual_seconds or found
            self._usual_seconds = known + (found - known) / 4

    def _count_failure(self, error: Exception) -> None:
        self._counters.add("probe_errors")
        self._log_failure("a look-up failed and counts as a miss", error)

    def _log_failure(self, text: str, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_SECONDS
            logger.error(text, exc_info=error)

    def _work(self, lookup: Lookup) -> None:
        if lookup._cancelled:
            return
        self._counters.add("lookups")
        chain = lookup._make_chain()
        if chain is None:
            return
        pace = _Pace()
        # While the storage rests, probes fail at once; the keys are of use for later stores.
        hit = self._search_near(lookup, chain, pace)
        self._extend(lookup, chain, pace, lookup._count)
        if not lookup._cancelled:
            lookup._finish(hit, chain)

    def _extend(self, lookup: Lookup, chain: KeyChain, pace: _Pace, end: int) -> None:
        step = chain.chunk_size * _LARGEST_BATCH
        for start in range(chain.tokens, end, step):
            if lookup._cancelled:
                return
            chain.extend(lookup._tokens[start : min(start + step, end)])
            pace.rest()

    def _search_near(self, lookup: Lookup, chain: KeyChain, pace: _Pace) -> int:
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
            # Few chunks a call keep the time between two rests short.
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
        usable = len(chunks)
        for i, chunk in enumerate(chunks):
            if chunk.key in self._failed:
                usable = i
                break
        for i, present in enumerate(self._present(chunks[:usable])):
            if not present:
                return i
        return usable

    def _ask(self, questions: dict[_Question, Chunk]) -> _Answers:
        """Put questions to the storage, all at once; return answers, and when each was asked.

        What another thread asks at this moment is not asked again, unless the answer would be
        older than something that is known to have happened to the chunk.
        """
        now = time.monotonic()
        # Sooner or later the guard takes a thread that the storage keeps for lost.
        mine = _Flight(self._memo.ask(), now + self._shelf.backend.deadlines.probe)
        theirs: dict[_Question, _Flight] = {}
        with self._asked_lock:
            for question in questions:
                other = self._asked.get(question)
                if (
                    other is not None
                    and now < other.until
                    and other.asked.generation > self._memo.since(question[0])
                ):
                    theirs[question] = other
                else:
                    self._asked[question] = mine
        asked = [question for question in questions if question not in theirs]
        try:
            if asked:
                self._counters.add("probes", len(asked))
                begin = time.perf_counter()
                found = self._shelf.probe(self._fmt, [(questions[q], q[1]) for q in asked])
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

    def _present(self, chunks: Sequence[Chunk]) -> list[bool]:
        self._counters.add("probes", len(chunks) * self._fmt.shards)
        return self._shelf.present(self._fmt, chunks)


# ----------------------------------------------------------------------- where probes are dear

#: A chunk's key and a shard.
_Question: TypeAlias = "tuple[bytes, int]"
#: What the storage said, and when it was asked.
_Answers: TypeAlias = "dict[_Question, tuple[Presence, Asked]]"


class _Flight:
    """Questions that one thread has put to the storage, and their answers."""

    __slots__ = ("answers", "asked", "over", "until")

    def __init__(self, asked: Asked, until: float) -> None:
        self.asked = asked
        #: Nobody waits for the answers longer than that.
        self.until = until
        self.answers: dict[_Question, Presence] = {}
        self.over = threading.Event()


class _Costs:
    """What a round costs: a latency, and something for each question.

    Parameters
    ----------
    latency : float
        Seconds that one question is said to take.
    concurrency : int
        Questions that are said to cost little more than one.
    """

    #: A round of so many questions tells as much of the one cost as of the other.
    _SCALE = 16.0

    def __init__(self, latency: float, concurrency: int) -> None:
        self.latency = latency
        self.each = latency / max(1, concurrency)

    def note(self, questions: int, seconds: float) -> None:
        """Learn from a round."""
        size = questions / self._SCALE
        expected = self.latency + questions * self.each
        # One round that hangs says little of the next.
        error = (min(seconds, 4 * expected) - expected) / (2 * (1 + size * size))
        self.latency = max(self.latency + error, 1e-6)
        self.each = max(self.each + error * size / self._SCALE, 1e-8)

    def points(self, chunks: int, weight: int) -> int:
        """Return among how many points to divide a search, so that it takes least time.

        Parameters
        ----------
        chunks : int
            That are searched.
        weight : int
            Questions of the round for each point.
        """
        best, least = 1, float("inf")
        for rounds in range(1, chunks.bit_length() + 1):
            points = max(1, math.ceil((chunks + 1) ** (1 / rounds) - 1e-9) - 1)
            seconds = rounds * (self.latency + points * weight * self.each)
            if points <= _MOST_POINTS and seconds < least:
                best, least = points, seconds
        return best

    def is_worth(self, questions: int) -> bool:
        """Whether so many questions more are cheaper than another round."""
        return questions * self.each < self.latency


class _Search:
    """The search for one look-up, by rounds.

    Chunks before :attr:`found` count as there, since one behind them was; chunk :attr:`end` is
    the first that is missing. Each round brings them nearer to each other. At the end the first
    chunk, the last one and known holes between them have been seen in full.
    """

    def __init__(
        self,
        lookup: Lookup,
        chain: KeyChain,
        chunks: Sequence[Chunk],
        memo: Memo,
        failed: Container[bytes],
        shards: int,
    ) -> None:
        self.lookup = lookup
        self.chain = chain
        self.began = memo.ask()
        self._memo = memo
        self._failed = failed
        self._shards = shards
        self._wanted: dict[int, bool] = {}
        for end, chunk in enumerate(chunks):
            if chunk.key in failed:
                chunks = chunks[:end]
                break
        self._chunks = chunks
        self._keys = [chunk.key for chunk in chunks]
        known = memo.prefix(self._keys)
        self.found, self.end = known.found, known.end
        self._seen = known.seen
        self._must = [0, *known.holes]
        self._first_round = True
        #: What has a first shard turned out to miss others: ask for all of them.
        self._thorough = False

    def plan(self, costs: _Costs, searches: int) -> list[tuple[Chunk, int]]:
        """Return what to ask the storage for now.

        Nothing, when the search is over: :attr:`found` is its result.

        Parameters
        ----------
        costs : _Costs
        searches : int
            That share the round.
        """
        self._wanted = self._plan(costs, searches, self._shards)
        return [
            (self._chunks[index], shard)
            for index, whole in sorted(self._wanted.items())
            for shard in range(self._shards if whole else 1)
        ]

    def _plan(self, costs: _Costs, searches: int, shards: int) -> dict[int, bool]:
        """Return the chunks to ask for, and whether for all their shards."""
        wanted: dict[int, bool] = {}
        open_ = self.end - self.found
        if open_ and open_ * shards <= _MOST_POINTS and costs.is_worth(open_ * shards * searches):
            wanted |= dict.fromkeys(range(self.found, self.end), True)
        elif open_:
            weight = searches * (shards if self._thorough else 1)
            points = costs.points(open_, weight)
            for number in range(points):
                wanted[self.found + open_ * (number + 1) // (points + 1)] = self._thorough
            if self._first_round:
                # Most prompts that begin on the shelf are there to their end.
                wanted[self.end - 1] = True
        last = self.found - 1
        if last >= 0 and last not in self._seen and (self._first_round or not open_):
            wanted[last] = True
        for index in self._must:
            if index < self.end and index not in self._seen:
                wanted[index] = True
        self._first_round = False
        return wanted

    def tell(self, answers: _Answers) -> None:
        """Take the answers to the plan."""
        wanted = self._wanted
        there: dict[int, bool] = {}
        for index, whole in wanted.items():
            key = self._keys[index]
            told = [answers[key, shard] for shard in range(self._shards if whole else 1)]
            there[index] = all(answer is Presence.PRESENT for answer, _ in told)
            # A storage that fails has not said that anything is missing.
            if (whole or not there[index]) and all(a is not Presence.ERROR for a, _ in told):
                self._memo.learn(key, there[index], min(asked for _, asked in told))
        self._seen |= {index for index, whole in wanted.items() if whole and there[index]}
        self.end = min([self.end, *(index for index in wanted if not there[index])])
        if self.end < self.found:
            self._thorough = True
            self.found = 0
            present: Iterable[int] = self._seen
        else:
            present = (index for index in wanted if there[index])
        self.found = max([self.found, *(index + 1 for index in present if index < self.end)])

    def finish(self) -> None:
        """Give the answer."""
        hit = self.found
        # What others learned meanwhile is younger than what this search knows.
        known = self._memo.prefix(self._keys[:hit])
        hit = min([known.end, *known.holes])
        for index, key in enumerate(self._keys[:hit]):
            if key in self._failed:
                hit = index
                break
        self._memo.imply(self._keys[:hit], self.began)
        if not self.lookup._cancelled:
            self.lookup._finish(hit, self.chain)


class _Rounds:
    """One thread's searches, from the first look-up until none is left."""

    def __init__(self, service: LookupService, thread: int, first: Lookup) -> None:
        self._service = service
        self._thread = thread
        self._first = first
        #: Those that have no answer yet, in order, and when they were taken.
        self._lookups: dict[Lookup, float] = {}
        self._searches: list[_Search] = []

    def run(self) -> None:
        """Search; a look-up that fails ends alone."""
        service = self._service
        try:
            self._take(self._first)
            while self._lookups:
                self._take_more()
                self._round()
                if self._thread not in service._busy:
                    # Given up: others go on with what came later.
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
                # For a thread that has nothing else to do.
                self._service._queue.put(None)
                return
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
            self._searches.append(search)

    def _search_for(self, lookup: Lookup) -> _Search | None:
        service = self._service
        service._counters.add("lookups")
        chain = lookup._make_chain()
        if chain is None:
            return None
        service._extend(lookup, chain, _Pace(), lookup._count)
        # What is remembered is of no use while nothing can be loaded.
        useful = service._remembers and not service._shelf.backend.reads.stopped
        memo = service._memo if useful else Memo()
        chunks = chain.chunks[lookup.first_chunk :]
        return _Search(lookup, chain, chunks, memo, service._failed, service._fmt.shards)

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
        asking: list[_Search] = []
        questions: dict[_Question, Chunk] = {}
        together = len(self._searches)
        for search in list(self._searches):
            wanted: list[tuple[Chunk, int]] = []
            if not search.lookup._cancelled:
                wanted = search.plan(service._costs, together)
            if wanted:
                asking.append(search)
                questions |= {(chunk.key, shard): chunk for chunk, shard in wanted}
                continue
            self._searches.remove(search)
            if not search.lookup._cancelled:
                search.finish()
                service._note_speed(search.lookup, self._lookups[search.lookup])
            self._end(search.lookup)
        if asking:
            answers = service._ask(questions)
            for search in asking:
                search.tell(answers)
