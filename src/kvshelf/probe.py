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
  :meth:`LookupService.stalled` tells that waiting is of no use.
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
    `bad_seconds` are over; other failures (gone, storage trouble) pass sooner.

    Parameters
    ----------
    bad_seconds, other_seconds : float
        How long a key stays failed unless :meth:`forget` is called first.
    limit : int
        Most keys remembered; the oldest are forgotten first.
    """

    def __init__(
        self, bad_seconds: float = 300.0, other_seconds: float = 10.0, limit: int = 65536
    ) -> None:
        self._seconds = {True: bad_seconds, False: other_seconds}
        self._limit = limit
        self._keys: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return self._get(key) is not None

    def __len__(self) -> int:
        return len(self._keys)

    def is_bad(self, key: bytes) -> bool:
        """Whether `key` failed because its object is damaged."""
        return self._get(key) is True

    def _get(self, key: bytes) -> bool | None:
        with self._lock:
            found = self._keys.get(key)
            if found is None:
                return None
            until, bad = found
            if until < time.monotonic():
                del self._keys[key]
                return None
            return bad

    def add(self, key: bytes, *, bad: bool) -> None:
        """Remember `key`."""
        with self._lock:
            self._keys[key] = (time.monotonic() + self._seconds[bad], bad)
            self._keys.move_to_end(key)
            while len(self._keys) > self._limit:
                self._keys.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Forget `key`: a good object has taken the place."""
        with self._lock:
            self._keys.pop(key, None)

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
    hit_chunks : int
        Number of leading chunks on the shelf.
    finished_at : float
        ``time.monotonic()`` when the answer was there.
    """

    def __init__(self, tokens: Sequence[int], make_chain: Callable[[], KeyChain | None]) -> None:
        self._tokens = tokens
        self._count = len(tokens)
        self._make_chain = make_chain
        self._done = threading.Event()
        self._cancelled = False
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

    def _finish(self, hit_chunks: int, chain: KeyChain | None) -> None:
        self.hit_chunks = hit_chunks
        self.chain = chain
        self.finished_at = time.monotonic()
        self._done.set()


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
        self._on_thread_start = on_thread_start
        self._queue: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        # When each thread took the look-up it works on; absent while it waits for one.
        self._busy_since: dict[int, float] = {}
        self._next_log = 0.0
        self._chunk_seconds = 0.0
        self._cheap = shelf.backend.properties.probe_cost < _CHEAP_PROBE_SECONDS
        # Daemon threads: a probe that never returns must not keep the process alive.
        self._threads = [
            threading.Thread(target=self._run, name=f"kvshelf-lookup-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tokens: Sequence[int], make_chain: Callable[[], KeyChain | None]) -> Lookup:
        """Start a look-up; returns at once.

        Parameters
        ----------
        tokens : Sequence[int]
            The prompt. Only its present length is looked at, so that the caller may
            append to it meanwhile.
        make_chain : Callable[[], KeyChain or None]
            Called on the background thread, and so may hash files. None: the prompt has
            no content address, which is a miss.
        """
        lookup = Lookup(tokens, make_chain)
        self._queue.put(lookup)
        return lookup

    def stalled(self, seconds: float) -> bool:
        """Whether every thread has been at one look-up for longer than `seconds`."""
        since = list(self._busy_since.values())
        return len(since) == len(self._threads) and max(since) < time.monotonic() - seconds

    def may_be_done_within(self, lookup: Lookup, seconds: float) -> bool:
        """Whether waiting for `lookup` for `seconds` makes sense, going by those before it."""
        return lookup._count // self._fmt.chunk_size * self._chunk_seconds <= seconds

    def close(self) -> None:
        """Stop the threads once they have worked off what was submitted."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        if self._on_thread_start is not None:
            self._on_thread_start()
        me = threading.get_ident()
        while (lookup := self._queue.get()) is not None:
            self._busy_since[me] = begin = time.monotonic()
            try:
                self._work(lookup)
                self._note_speed(lookup, begin)
            except Exception as error:  # noqa: BLE001 - cache trouble never ends an engine
                self._counters.add("probe_errors")
                self._log_failure(error)
            finally:
                if not lookup.done:
                    lookup._finish(0, None)
                self._busy_since.pop(me, None)

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
        if self._cheap:
            hit = self._search_near(lookup, chain, pace)
            self._extend_all(lookup, chain, pace)
        else:
            self._extend_all(lookup, chain, pace)
            hit = self._search_far(lookup, chain.chunks)
        if not lookup._cancelled:
            lookup._finish(hit, chain)

    def _extend_all(self, lookup: Lookup, chain: KeyChain, pace: _Pace) -> None:
        step = chain.chunk_size * _LARGEST_BATCH
        for start in range(chain.tokens, lookup._count, step):
            if lookup._cancelled:
                return
            chain.extend(lookup._tokens[start : min(start + step, lookup._count)])
            pace.rest()

    def _search_near(self, lookup: Lookup, chain: KeyChain, pace: _Pace) -> int:
        """Probe every shard of every chunk in order, up to the first that is missing."""
        batch = _FIRST_BATCH
        hit = 0
        total = lookup._count // chain.chunk_size
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
