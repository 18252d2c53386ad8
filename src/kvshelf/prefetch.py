"""Memory for objects that were brought near before they are needed.

Owns the payloads that were prefetched: the memory tier, in front of a shelf by the classes of
:mod:`kvshelf.tiers`. :class:`Prefetcher` fills it for requests that wait for their turn.

Contracts
---------
* Only payloads that a load has verified come in, so nothing is verified again on its way
  out. What is pushed out, the least recently used first, is only farther away. A
  :class:`Prefetcher` pushes nothing out: requests are served in their order, so what is
  wanted first came first.
* All methods may be called from any thread. Copies are made outside the lock; a payload
  that is pushed out meanwhile stays where it is until its copy is done.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kvshelf.backends import Buffer as Bytes
from kvshelf.backends.guard import GuardedBackend
from kvshelf.buffers import ALIGNMENT, Buffer, BufferPool
from kvshelf.chunkfile import ObjectFormat
from kvshelf.identity import Chunk
from kvshelf.metrics import Counters
from kvshelf.transfer import ChunkSlots, Failure, Load, Transfer

#: Most chunks that are dropped in one step.
_DROPS_A_STEP: Final = 16
#: Most chunks that are read again in one step.
_AGAIN_A_STEP: Final = 16
#: Seconds until it is tried again where storage or staging could not.
_AGAIN_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Held:
    """One payload, and whether a load has used it."""

    buffer: Buffer
    used: bool = False


class PrefetchMemory:
    """Payloads of prefetched objects of one namespace.

    Parameters
    ----------
    fmt : ObjectFormat
    capacity : int
        Most bytes that they take.
    counters : Counters
    shards : Sequence of int, optional
        The shards that are brought; all of them when absent.
    push_out : bool
        Make room for what comes by pushing out what was used least recently.

    Attributes
    ----------
    most_chunks : int
        Chunks that there is room for.
    """

    def __init__(
        self,
        fmt: ObjectFormat,
        capacity: int,
        counters: Counters,
        *,
        shards: Sequence[int] | None = None,
        push_out: bool = True,
    ) -> None:
        self._counters = counters
        self._shards = range(fmt.shards) if shards is None else shards
        self._push_out = push_out
        sizes = [fmt.payload_size(shard) for shard in self._shards]
        self.most_chunks = capacity // sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        self._pool = BufferPool(max(capacity, ALIGNMENT))
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[bytes, int], _Held] = OrderedDict()

    @property
    def available(self) -> bool:
        """Whether there is anything: that can be had whatever a storage does."""
        return bool(self._held)

    def holds(self, fmt: ObjectFormat, items: Sequence[tuple[Chunk, int]]) -> list[bool]:
        """Tell of which (chunk, shard) pairs the payloads are here."""
        return [(chunk.key, shard) in self._held for chunk, shard in items]

    def leading(self, chunks: Sequence[Chunk]) -> int:
        """Return how many leading `chunks` are here in full."""
        for number, chunk in enumerate(chunks):
            if not all((chunk.key, shard) in self._held for shard in self._shards):
                return number
        return len(chunks)

    def load(self, fmt: ObjectFormat, chunk: Chunk, shard: int, image: memoryview) -> bool:
        """Fill the payload of `image` and leave its header; False when it is not here."""
        out = torch.frombuffer(image, dtype=torch.uint8)[fmt.data_offset :]
        return self.copy_to(chunk.key, shard, out)

    def keep(self, fmt: ObjectFormat, chunk: Chunk, shard: int, buffers: Sequence[Bytes]) -> None:
        """Do nothing: what is here was asked for."""

    def stand_before(self, guard: GuardedBackend) -> None:
        """Do nothing: memory keeps no threads."""

    def put(self, key: bytes, shard: int, payload: Tensor) -> None:
        """Keep a copy of a payload, if there can be room for it."""
        name = (key, shard)
        with self._lock:
            if name in self._held:
                self._held.move_to_end(name)
                return
            buffer = self._pool.allocate(payload.numel())
            while buffer is None and self._held and self._push_out:
                self._held.popitem(last=False)[1].buffer.release()
                buffer = self._pool.allocate(payload.numel())
        if buffer is None:
            return
        buffer.tensor.copy_(payload)
        with self._lock:
            if name in self._held:
                buffer.release()
            else:
                self._held[name] = _Held(buffer)
                self._counters.add("prefetched_objects")
                self._counters.add("prefetched_bytes", payload.numel())

    def copy_to(self, key: bytes, shard: int, out: Tensor) -> bool:
        """Copy a payload that is here into `out`; False when it is not."""
        with self._lock:
            found = self._held.get((key, shard))
            if found is None:
                return False
            self._held.move_to_end((key, shard))
            found.used = True
            view = found.buffer.share()
        with view:
            out.copy_(view.tensor)
        self._counters.add("memory_objects")
        return True

    def drop(self, keys: Iterable[bytes]) -> None:
        """Give the memory of some chunks back."""
        unused = 0
        with self._lock:
            for key in keys:
                for shard in self._shards:
                    found = self._held.pop((key, shard), None)
                    if found is not None:
                        unused += not found.used
                        found.buffer.release()
        if unused:
            self._counters.add("prefetch_unused_objects", unused)

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            for held in self._held.values():
                held.buffer.release()
            self._held.clear()
        self._pool.close()


class IntoMemory:
    """Takes the payloads of one chunk where a load would scatter them."""

    def __init__(self, memory: PrefetchMemory, key: bytes) -> None:
        self._memory = memory
        self._key = key

    def gather(self, shard: int, slots: Tensor, payload: Tensor) -> None:
        """Never called: nothing is stored from here."""
        raise NotImplementedError("what was prefetched is on the shelf already")

    def scatter(self, shard: int, slots: Tensor, payload: Tensor) -> None:
        """Keep a payload."""
        self._memory.put(self._key, shard, payload)


@dataclass(eq=False, slots=True)
class _Wish:
    """What one request that waits is to find in memory."""

    request_id: str
    chunks: deque[Chunk] = field(default_factory=deque)
    #: What there was room for, and the early loads it comes by.
    keys: list[bytes] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    over: bool = False


class Prefetcher:
    """Brings the chunks of requests that wait into memory, in the order they are named.

    The memory is reserved before anything is read, so that nothing is read which there is no
    room for; the rest of a request's chunks comes when others are over. A chunk that several
    requests want is brought once. What did not come, because the storage or staging could not
    for a moment or the request that it was read for went away, is read again for who still wants
    it, in the next step or, where they could not, a second later; a chunk that cannot be had ends
    the wishes for what is behind it. All methods are called on the step thread and never touch
    storage.

    Parameters
    ----------
    transfer : Transfer
        Its shelf is a :class:`~kvshelf.tiers.LoadsFromTiers` with the same memory.
    memory : PrefetchMemory
        Pushes nothing out.
    """

    def __init__(self, transfer: Transfer, memory: PrefetchMemory) -> None:
        self._transfer = transfer
        self._memory = memory
        self._wishes: OrderedDict[str, _Wish] = OrderedDict()
        #: Keys that a request less wants.
        self._unwanted: deque[tuple[_Wish, bytes]] = deque()
        #: Who wants each chunk that there is room for; nobody, while it is still being read.
        self._wanted: dict[bytes, list[_Wish]] = {}
        #: Of those, what is being read, and what ended without having come.
        self._reading: set[bytes] = set()
        self._again: dict[bytes, Chunk] = {}
        self._again_at = 0.0
        #: Numbers of early loads: a name must not come again while its load is not finished.
        self._numbers = itertools.count()
        #: Early loads that ended, on whatever thread.
        self._ended: deque[Load] = deque()
        self._failures: list[tuple[str, Chunk, Failure]] = []

    def want(self, request_id: str, chunks: Sequence[Chunk]) -> None:
        """Bring further chunks for a request that waits."""
        wish = self._wishes.get(request_id)
        if wish is None:
            wish = self._wishes[request_id] = _Wish(request_id)
        if not wish.over:
            wish.chunks.extend(chunks)
        self._go_on()

    def stop(self, request_id: str) -> None:
        """Read no more for a request: its load has come. What is here stays."""
        wish = self._wishes.get(request_id)
        if wish is not None:
            wish.over = True
            wish.chunks.clear()
            for load in wish.loads:
                self._transfer.cancel_early(load.request_id)

    def over(self, request_id: str) -> None:
        """Drop what nobody but this request wanted."""
        self.stop(request_id)
        wish = self._wishes.pop(request_id, None)
        if wish is not None:
            self._unwanted.extend((wish, key) for key in wish.keys)
            self._go_on()

    def all_over(self) -> None:
        """Drop everything."""
        # All are stopped first: none is to take the room that another one leaves.
        for request_id in self._wishes:
            self.stop(request_id)
        for request_id in list(self._wishes):
            self.over(request_id)

    def take_failures(self) -> list[tuple[str, Chunk, Failure]]:
        """Return what could not be brought since the last call: request, chunk, reason.

        Called once in each step.
        """
        self._read_again()
        self._go_on()
        failures, self._failures = self._failures, []
        return failures

    def _go_on(self) -> None:
        self._note_ended()
        self._drop()
        if all(not wish.chunks for wish in self._wishes.values()):
            return
        for wish in self._wishes.values():
            fresh = self._reserve(wish)
            if fresh:
                self._read(wish, fresh)
            if wish.chunks:
                # Those behind it would take the room that it waits for.
                return

    def _reserve(self, wish: _Wish) -> list[Chunk]:
        """Return the next chunks of a request that there is room for and that must be read."""
        fresh = []
        while wish.chunks:
            chunk = wish.chunks[0]
            key = chunk.key
            wishers = self._wanted.get(key)
            if wishers is None:
                if len(self._wanted) >= self._memory.most_chunks:
                    break
                wishers = self._wanted[key] = []
                fresh.append(chunk)
            elif key not in self._reading and not self._memory.leading([chunk]):
                # Those who wanted it until now have a load of their own.
                self._again.pop(key, None)
                fresh.append(chunk)
            wishers.append(wish)
            wish.keys.append(key)
            wish.chunks.popleft()
        return fresh

    def _read(self, wish: _Wish, chunks: Sequence[Chunk]) -> None:
        name = f"{wish.request_id}#{next(self._numbers)}"
        none = torch.empty(0, dtype=torch.int64)
        items = [ChunkSlots(chunk, none, IntoMemory(self._memory, chunk.key)) for chunk in chunks]
        self._reading.update(chunk.key for chunk in chunks)
        wish.loads = [load for load in wish.loads if not load.finished]
        # A load of its own for each piece: what was asked for before is under way.
        wish.loads.append(self._transfer.load(name, items, early=True, on_done=self._ended.append))

    def _read_again(self) -> None:
        """Read what did not come for the first who still waits for it."""
        if not self._again or time.monotonic() < self._again_at:
            return
        pieces: dict[_Wish, list[Chunk]] = {}
        for key in list(itertools.islice(self._again, _AGAIN_A_STEP)):
            chunk = self._again.pop(key)
            wish = next((wish for wish in self._wanted[key] if not wish.over), None)
            if wish is not None:
                pieces.setdefault(wish, []).append(chunk)
        for wish, chunks in pieces.items():
            self._read(wish, chunks)

    def _note_ended(self) -> None:
        """Look at what early loads that ended have brought."""
        gone = []
        while self._ended:
            load = self._ended.popleft()
            lost = set()
            for chunk, failure in () if load.cancelled else load.failures:
                if failure is not Failure.UNAVAILABLE:
                    lost.add(chunk.key)
                    self._give_up(chunk, failure)
                elif self._again_at <= (now := time.monotonic()):
                    self._again_at = now + _AGAIN_SECONDS
            for place, item in enumerate(load.items):
                key = item.chunk.key
                self._reading.discard(key)
                if not self._wanted[key]:
                    del self._wanted[key]
                    gone.append(key)
                elif (
                    place >= load.leading
                    and key not in lost
                    and not self._memory.leading([item.chunk])
                ):
                    self._again[key] = item.chunk
        if gone:
            self._memory.drop(gone)

    def _give_up(self, chunk: Chunk, failure: Failure) -> None:
        """Tell all who want a chunk that it cannot be had, nor what is behind it."""
        for wish in dict.fromkeys(self._wanted[chunk.key]):
            if wish.over:
                continue
            self._failures.append((wish.request_id, chunk, failure))
            wish.chunks.clear()
            first = wish.keys.index(chunk.key)
            rest = _Wish(wish.request_id, keys=wish.keys[first:], over=True)
            del wish.keys[first:]
            for key in rest.keys:
                wishers = self._wanted[key]
                wishers[wishers.index(wish)] = rest
                self._unwanted.append((rest, key))

    def _drop(self) -> None:
        """Give memory back that nobody wants any more, once no thread writes to it."""
        gone = []
        # A step gives only so much memory back, since each piece takes a microsecond or two.
        for _ in range(min(_DROPS_A_STEP, len(self._unwanted))):
            wish, key = self._unwanted.popleft()
            wishers = self._wanted[key]
            wishers.remove(wish)
            if not wishers:
                self._again.pop(key, None)
                if key not in self._reading:
                    del self._wanted[key]
                    gone.append(key)
        if gone:
            self._memory.drop(gone)
