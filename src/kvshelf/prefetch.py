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

import threading
from collections import Counter, OrderedDict, deque
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
    #: What there was room for, and how many early loads it came by.
    keys: list[bytes] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    over: bool = False


class Prefetcher:
    """Brings the chunks of requests that wait into memory, in the order they are named.

    The memory is reserved before anything is read, so that nothing is read which there is no
    room for; the rest of a request's chunks comes when others are over. A chunk that several
    requests want is brought once. All methods are called on the step thread and never touch
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
        self._ending: list[_Wish] = []
        #: Keys that a request less wants.
        self._unwanted: deque[bytes] = deque()
        #: How many requests want each chunk that there is room for.
        self._wanted: Counter[bytes] = Counter()
        self._failures: deque[tuple[str, Chunk, Failure]] = deque()

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
            self._ending.append(wish)
            self._go_on()

    def take_failures(self) -> list[tuple[str, Chunk, Failure]]:
        """Return what could not be brought since the last call: request, chunk, reason."""
        self._go_on()
        failures = []
        while self._failures:
            failures.append(self._failures.popleft())
        return failures

    def _go_on(self) -> None:
        self._end()
        if all(not wish.chunks for wish in self._wishes.values()):
            return
        for wish in self._wishes.values():
            fresh = self._reserve(wish)
            if fresh:
                name = f"{wish.request_id}#{len(wish.loads)}"
                none = torch.empty(0, dtype=torch.int64)
                items = [
                    ChunkSlots(chunk, none, IntoMemory(self._memory, chunk.key)) for chunk in fresh
                ]
                # A load of its own for each piece: what was asked for before is under way.
                wish.loads.append(self._transfer.load(name, items, early=True, on_done=self._ended))
            if wish.chunks:
                # Those behind it would take the room that it waits for.
                return

    def _reserve(self, wish: _Wish) -> list[Chunk]:
        """Return the next chunks of a request that there is room for and that must be read."""
        fresh = []
        while wish.chunks:
            chunk = wish.chunks[0]
            if chunk.key not in self._wanted:
                if len(self._wanted) >= self._memory.most_chunks:
                    break
                fresh.append(chunk)
            self._wanted[chunk.key] += 1
            wish.keys.append(chunk.key)
            wish.chunks.popleft()
        return fresh

    def _end(self) -> None:
        """Drop what requests that are over have left, once no thread writes to it."""
        ending, self._ending = self._ending, []
        for wish in ending:
            if all(load.finished for load in wish.loads):
                self._unwanted.extend(wish.keys)
            else:
                self._ending.append(wish)
        gone = []
        # A step gives only so much memory back, since each piece takes a microsecond or two.
        for _ in range(min(_DROPS_A_STEP, len(self._unwanted))):
            key = self._unwanted.popleft()
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
                gone.append(key)
        if gone:
            self._memory.drop(gone)

    def _ended(self, load: Load) -> None:
        """Note what failed. On whatever thread ended the load, with its lock held."""
        if not load.cancelled:
            request_id = load.request_id.rpartition("#")[0]
            self._failures.extend(
                (request_id, chunk, failure)
                for chunk, failure in load.failures
                if failure is not Failure.UNAVAILABLE
            )
