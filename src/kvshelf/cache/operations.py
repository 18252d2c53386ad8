"""What a cache does with the chunks of a prompt: lookups, stores, retrieves and prefetches.

Owns the handles of running operations (:class:`Handle`), and how each operation ends.

Contracts
---------
* A handle is done once nothing more is written to the caller's memory.
* Callbacks run on threads of lookups, loads and stores. No method of another object is called with
  a lock held.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from kvshelf.cache.parts import KindParts
from kvshelf.cache.prompts import Prompt
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.kv.sources import BoundKV
from kvshelf.shelf.lookup import Lookup
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure, LoadPiece
from kvshelf.transfer.stores import StoreOutcome, StoreResult

T = TypeVar("T")

_CHECK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The result of one store.

    Attributes
    ----------
    chunks : int
        Whole chunks of the call.
    published : int
        On the shelf now: published by this store.
    existed : int
        On the shelf since before this store.
    dropped : int
        Not stored: memory was full, a bound left no room, the storage is read-only, or a chunk
        before it was not stored.
    failed : int
        Not published: the storage refused the write or failed.
    pending : int
        Copied, but not yet published when the report was made.
    """

    chunks: int
    published: int
    existed: int
    dropped: int
    failed: int
    pending: int

    @property
    def complete(self) -> bool:
        """Whether all chunks are on the shelf."""
        return self.published + self.existed == self.chunks


class Handle(Generic[T]):
    """A running operation.

    Parameters
    ----------
    operation : str
        What it is called.
    parts : KindParts
    outcome : Callable
        Returns the result so far.
    cancel : Callable, optional
        Ends the operation, which then calls :meth:`finish`. When absent, waiting ends.
    """

    def __init__(
        self,
        operation: str,
        parts: KindParts,
        outcome: Callable[[], T],
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self._operation = operation
        self._check = parts.check
        self._timeout = parts.shared.timeout
        self._outcome = outcome
        self._cancel = self.finish if cancel is None else cancel
        self._done = threading.Event()

    def __repr__(self) -> str:
        return f"<{self._operation}, {'done' if self._done.is_set() else 'running'}>"

    def finish(self) -> None:
        """Note that the operation is done. Not for callers."""
        self._done.set()

    def poll(self) -> bool:
        """Whether the operation is done. Never waits."""
        if not self._done.is_set():
            self._check()
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the operation is done; return whether it is.

        Parameters
        ----------
        timeout : float, optional
            Longest time to wait, in seconds; unlimited when absent.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.poll():
            seconds = _CHECK_SECONDS if deadline is None else deadline - time.monotonic()
            if seconds <= 0:
                return False
            self._done.wait(min(seconds, _CHECK_SECONDS))
        return True

    def cancel(self) -> None:
        """End the operation with its partial result; wait until it touches no memory."""
        if not self._done.is_set():
            self._cancel()
            self._done.wait()

    def result(self, timeout: float | None = None) -> T:
        """Return the outcome; an operation that is not done in time is cancelled first.

        Parameters
        ----------
        timeout : float, optional
            Seconds; the cache's timeout when absent.
        """
        if not self.wait(self._timeout if timeout is None else timeout):
            self.cancel()
        return self._outcome()


# ----------------------------------------------------------------------------- lookups


def find(
    parts: KindParts,
    submit: Callable[[Callable[[Lookup], None]], Lookup],
) -> Handle[int]:
    """Start a lookup; its outcome is a number of tokens.

    Parameters
    ----------
    parts : KindParts
    submit : Callable
        Starts it, given what is to be called with the answer.
    """
    hits: list[int] = []

    def found(lookup: Lookup) -> None:
        hits.append(lookup.hit_chunks)
        handle.finish()

    def cancel() -> None:
        hits.append(0)
        lookup.cancel()
        parts.shared.counters.add("lookup_timeouts")
        handle.finish()

    # The first to come is the answer.
    handle = Handle("lookup", parts, lambda: hits[0] * parts.fmt.chunk_size, cancel)
    lookup = submit(found)
    return handle


def find_in_memory(parts: KindParts, prompt: Prompt) -> Handle[int]:
    """Return how much of a prompt is in memory, which needs no lookup."""
    tokens = parts.places.leading(prompt.chunks()) * parts.fmt.chunk_size
    handle = Handle("lookup", parts, lambda: tokens)
    handle.finish()
    return handle


# ----------------------------------------------------------------------------- loads


class _Retrieval(Generic[T]):
    """A lookup and the load of the chunks that it finds.

    The lookup thread calls :meth:`_found`, which starts the load; the thread that ends the load
    calls :meth:`_ended`.

    Parameters
    ----------
    operation : str
    parts : KindParts
    prompt : Prompt
    items : Callable
        Returns what is loaded of the chunks that were found.
    outcome : Callable
        Returns the result, given how many leading chunks were loaded.
    on_ended : Callable
    early : bool
        It is a prefetch, and no use.
    """

    def __init__(
        self,
        operation: str,
        parts: KindParts,
        prompt: Prompt,
        items: Callable[[Sequence[Chunk]], list[ChunkSlots]],
        outcome: Callable[[int], T],
        on_ended: Callable[[LoadPiece], None] = lambda load: None,
        *,
        early: bool = False,
    ) -> None:
        self._parts = parts
        self._prompt = prompt
        self._items = items
        self._on_ended = on_ended
        self._early = early
        self._lock = threading.Lock()
        self._load: LoadPiece | None = None
        self._starting = False
        self._cancelled = threading.Event()
        self._leading = 0
        self.handle = Handle(operation, parts, lambda: outcome(self._leading), self._cancel)
        self._lookup = parts.search(prompt, self._found)

    def _found(self, lookup: Lookup) -> None:
        with self._lock:
            if self._cancelled.is_set() or lookup.chain is None or not lookup.hit_chunks:
                self.handle.finish()
                return
            self._starting = True
        parts, first = self._parts, self._prompt.first_chunk
        hit = lookup.chain.chunks[: first + lookup.hit_chunks]
        chunks = hit[first:]
        if not self._early:
            # Of the full chunks, those before the first are in use as well.
            parts.note_used(hit if parts.fmt.kind == FULL else chunks)
        try:
            load = LoadPiece(
                parts.view, self._items(chunks), early=self._early, on_done=self._ended
            )
            parts.loads.load(load)
        except BaseException:  # the cache was closed
            self.handle.finish()
            raise
        with self._lock:
            self._starting = False
            self._load = load
            cancelled = self._cancelled.is_set()
        if cancelled:
            parts.loads.cancel(load)

    def _ended(self, load: LoadPiece) -> None:
        self._on_ended(load)
        self._leading = load.leading
        for chunk, failure in load.failures:
            if failure is not Failure.UNAVAILABLE:
                key = self._parts.kind_key(chunk)
                self._parts.shared.failed.add(key, bad=failure is Failure.BAD)
        self.handle.finish()

    def _cancel(self) -> None:
        with self._lock:
            self._cancelled.set()
            load, idle = self._load, self._load is None and not self._starting
        self._lookup.cancel()
        if load is not None:
            self._parts.loads.cancel(load)
        elif idle:
            self.handle.finish()
        # If the load is just being started, the thread that starts it cancels it.


def retrieve(parts: KindParts, prompt: Prompt, opened: BoundKV) -> Handle[Tensor]:
    """Start to load a prompt into KV of the caller; its outcome is a mask of the tokens."""
    size, counters = parts.fmt.chunk_size, parts.shared.counters
    slots, memory = prompt.slots(opened), opened.memory
    fence = memory.fence()

    def items(chunks: Sequence[Chunk]) -> list[ChunkSlots]:
        return [
            ChunkSlots(chunk, places, memory, fence)
            for chunk, places in zip(chunks, slots, strict=False)
        ]

    def outcome(leading: int) -> Tensor:
        mask = torch.zeros(len(prompt.tokens), dtype=torch.bool)
        mask[prompt.start : prompt.start + leading * size] = True
        return mask

    def ended(load: LoadPiece) -> None:
        counters.add("hit_tokens", len(load.items) * size)
        counters.add("loaded_tokens", load.leading * size)

    counters.add("lookup_tokens", len(prompt.tokens) - prompt.start)
    return _Retrieval("retrieve", parts, prompt, items, outcome, ended).handle


def prefetch(parts: KindParts, prompt: Prompt) -> Handle[int]:
    """Start to load a prompt into memory; its outcome is how many tokens are there."""
    places, missing = parts.places, list[Chunk]()

    def items(chunks: Sequence[Chunk]) -> list[ChunkSlots]:
        missing.extend(chunks[: places.most_chunks])
        none = torch.empty(0, dtype=torch.int64)
        return [ChunkSlots(chunk, none) for chunk in missing]

    def outcome(_: int) -> int:
        # Other prompts may have evicted prefetched chunks.
        return places.leading(missing) * parts.fmt.chunk_size

    return _Retrieval("prefetch", parts, prompt, items, outcome, early=True).handle


# ----------------------------------------------------------------------------- stores


class _Storing:
    """The chunks of one store, and what has become of them."""

    def __init__(self, parts: KindParts, chunks: int) -> None:
        self._parts = parts
        self._chunks = self._left = chunks
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        # What was copied is published, whatever becomes of the handle.
        self.handle = Handle("store", parts, self._report)
        self.count("existed", 0)

    def count(self, what: str, chunks: int = 1) -> None:
        """Count what has become of chunks."""
        with self._lock:
            self._counts[what] += chunks
            self._left -= chunks
            is_complete = not self._left
        if is_complete:
            self.handle.finish()

    def submit(self, items: Sequence[ChunkSlots], deadline: float) -> None:
        """Copy chunks, and store them in the background."""
        parts, begin = self._parts, time.monotonic()
        for number, item in enumerate(items):
            outcome = parts.transfer.stores[parts.fmt.kind].store(
                parts.view,
                item,
                repair=parts.shared.failed.is_bad(parts.kind_key(item.chunk)),
                age=time.monotonic() - begin,
                wait=max(0.0, deadline - time.monotonic()) if deadline else 0.0,
                on_done=self._on_chunk_done,
            )
            if outcome is StoreOutcome.UNAVAILABLE:
                self.count("dropped", len(items) - number)
                return
            if outcome is not StoreOutcome.QUEUED:
                self.count("existed" if outcome is StoreOutcome.KNOWN else "dropped")

    def _on_chunk_done(self, chunk: Chunk, result: StoreResult) -> None:
        if result.is_stored:
            self._parts.shared.failed.forget(self._parts.kind_key(chunk))
            self.count("existed" if result is StoreResult.EXISTED else "published")
        else:
            self.count("dropped" if result is StoreResult.DROPPED else "failed")

    def _report(self) -> StoreReport:
        with self._lock:
            counts = self._counts
            return StoreReport(
                self._chunks,
                counts["published"],
                counts["existed"],
                counts["dropped"],
                counts["failed"],
                self._left,
            )


def submit_store(parts: KindParts, items: Sequence[ChunkSlots]) -> Handle[StoreReport]:
    """Copy chunks and store them in the background; drop those that find no memory."""
    storing = _Storing(parts, len(items))
    storing.submit(items, 0.0)
    return storing.handle


def store(parts: KindParts, prompt: Prompt, opened: BoundKV, timeout: float | None) -> StoreReport:
    """Store the chunks of a prompt that are not on the shelf; wait until they are stored."""
    deadline = time.monotonic() + (parts.shared.timeout if timeout is None else timeout)
    items = prompt.stored_from(opened)
    storing = _Storing(parts, len(items))
    search = find(parts, lambda found: parts.search(prompt, found, ("shelf",)))
    stored_chunks = search.result(max(0.0, deadline - time.monotonic())) // parts.fmt.chunk_size
    storing.count("existed", stored_chunks)
    storing.submit(items[stored_chunks:], deadline)
    return storing.handle.result(max(0.0, deadline - time.monotonic()))
