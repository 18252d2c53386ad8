"""Look-ups: how many leading chunks of a prompt are on the shelf.

Owns the search for the longest stored prefix, the threads that run it, and the memory
of keys whose objects turned out bad. Existence of objects is the only index: every
answer comes from probes made for that look-up.

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
  confirmed in full; a hole in between is found by the load.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvshelf.chunkfile import ObjectFormat
from kvshelf.identity import Chunk, KeyChain
from kvshelf.metrics import Counters
from kvshelf.shelf import Presence, Shelf
from kvshelf.threads import StorageThreads

logger = logging.getLogger(__name__)

_CHEAP_PROBE_SECONDS = 1e-3
_FIRST_BATCH = 8
_LARGEST_BATCH = 32
_WORK_SECONDS = 0.5e-3
_REST_SECONDS = 50e-6
_LOG_SECONDS = 60.0


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

    def __contains__(self, key: bytes) -> bool:
        return self._get(key) is not None

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

    def add(self, key: bytes, *, bad: bool) -> None:
        """Remember `key`."""
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
    ) -> None:
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
            self._on_done(self)


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
        Look-ups worked on at once.
    on_thread_start : Callable, optional
        Called first on each thread, to set its priority and processors.
    """

    def __init__(
        self,
        shelf: Shelf,
        fmt: ObjectFormat,
        *,
        failed: FailedKeys,
        counters: Counters,
        threads: int = 1,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._shelf = shelf
        self._fmt = fmt
        self._failed = failed
        self._counters = counters
        self._queue: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        # What each thread works on, and since when; absent while it waits for a look-up.
        self._busy: dict[int, tuple[float, Lookup]] = {}
        self._next_log = 0.0
        self._chunk_seconds = 0.0
        self._cheap = shelf.backend.properties.probe_cost < _CHEAP_PROBE_SECONDS
        self._count = threads
        self._threads = StorageThreads(
            "kvshelf-lookup",
            threads,
            self._run,
            shelf.backend,
            count_kept=lambda: counters.add("kept_threads"),
            on_kept=self._give_up,
            on_thread_start=on_thread_start,
        )
        shelf.backend.count_into(counters.add)
        self._threads.start()

    @property
    def available(self) -> bool:
        """Whether look-ups can find anything: not while the storage is given a rest."""
        return self._shelf.available and self._threads.any

    def submit(
        self,
        tokens: Sequence[int],
        make_chain: Callable[[], KeyChain | None],
        *,
        first_chunk: int = 0,
        on_done: Callable[[Lookup], None] | None = None,
    ) -> Lookup:
        """Start a look-up; returns at once.

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
        lookup = Lookup(tokens, make_chain, first_chunk, on_done)
        if self._threads.any:
            self._queue.put(lookup)
        else:
            lookup._finish(0, None, given_up=True)
        return lookup

    def stalled(self, seconds: float) -> bool:
        """Whether every thread has been at one look-up for longer than `seconds`."""
        busy = self._busy.copy()
        since = [busy[thread][0] for thread in self._threads.working if thread in busy]
        return len(since) >= self._count and max(since) < time.monotonic() - seconds

    def may_be_done_within(self, lookup: Lookup, seconds: float) -> bool:
        """Whether waiting for `lookup` for `seconds` makes sense, going by those before it."""
        return lookup._count // self._fmt.chunk_size * self._chunk_seconds <= seconds

    def close(self) -> None:
        """Stop the threads once they have worked off what was submitted."""
        self._threads.close()
        for _ in range(self._count + self._threads.kept):
            self._queue.put(None)

    def _give_up(self, thread: int) -> None:
        """End the look-up of a thread that the storage keeps."""
        busy = self._busy.pop(thread, None)
        if busy is not None:
            busy[1]._finish(0, None, given_up=True)

    def _run(self) -> None:
        me = threading.get_ident()
        while not self._threads.replaced() and (lookup := self._queue.get()) is not None:
            begin = time.monotonic()
            self._busy[me] = begin, lookup
            try:
                self._work(lookup)
                self._note_speed(lookup, begin)
            except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
                self._counters.add("probe_errors")
                self._log_failure(error)
            finally:
                lookup._finish(0, None)
                self._busy.pop(me, None)

    def _note_speed(self, lookup: Lookup, begin: float) -> None:
        chunks = lookup._count // self._fmt.chunk_size
        if lookup.done and chunks:
            found = (lookup.finished_at - begin) / chunks
            known = self._chunk_seconds or found
            self._chunk_seconds = known + (found - known) / 4

    def _log_failure(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_SECONDS
            logger.error("a look-up failed and counts as a miss", exc_info=error)

    def _work(self, lookup: Lookup) -> None:
        if lookup._cancelled:
            return
        self._counters.add("lookups")
        chain = lookup._make_chain()
        if chain is None:
            return
        pace = _Pace()
        # While the storage rests, probes fail at once; the keys are of use for later stores.
        if self._cheap:
            hit = self._search_near(lookup, chain, pace)
            self._extend(lookup, chain, pace, lookup._count)
        else:
            self._extend(lookup, chain, pace, lookup._count)
            hit = self._search_far(lookup, chain.chunks[lookup.first_chunk :])
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

    def _search_far(self, lookup: Lookup, chunks: Sequence[Chunk]) -> int:
        """Find a stored prefix with few rounds of probes at once."""
        width = max(2, self._shelf.backend.properties.concurrency)
        end = len(chunks)
        for i, chunk in enumerate(chunks):
            if chunk.key in self._failed:
                end = i
                break
        low, high = 0, end
        while low < high:
            if lookup._cancelled:
                return 0
            count = min(width, high - low)
            points = sorted({high - 1 - (high - 1 - low) * i // count for i in range(count)})
            self._counters.add("probes", len(points))
            answers = self._shelf.probe(self._fmt, [(chunks[p], 0) for p in points])
            for point, answer in zip(points, answers, strict=True):
                if answer is not Presence.PRESENT:
                    high = point
                    break
                low = point + 1
        if low == 0:
            return 0
        # What has a first shard may miss others: a copy that runs, or one of some files only.
        first, last = self._present([chunks[0], chunks[low - 1]])
        if not first or last:
            return low if first else 0
        low, high = 1, low - 1
        while low < high and not lookup._cancelled:
            middle = (low + high + 1) // 2
            if self._present([chunks[middle - 1]])[0]:
                low = middle
            else:
                high = middle - 1
        return low

    def _present(self, chunks: Sequence[Chunk]) -> list[bool]:
        self._counters.add("probes", len(chunks) * self._fmt.shards)
        return self._shelf.present(self._fmt, chunks)
