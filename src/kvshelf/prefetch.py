"""Memory for objects that were brought near before they are needed.

Owns the payloads that were prefetched, and their place in front of a shelf: loads and
look-ups that ask a shelf of this module find in memory what is there, and everything else
on the shelf behind it.

Contracts
---------
* Only payloads that a load has verified come in, so nothing is verified again on its way
  out. What is pushed out, the least recently used first, is only farther away.
* Stores ask the shelf itself: what is in memory may be gone from there.
* All methods may be called from any thread. Copies are made outside the lock; a payload
  that is pushed out meanwhile stays where it is until its copy is done.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvshelf.backends import WriteResult
from kvshelf.buffers import ALIGNMENT, Buffer, BufferPool
from kvshelf.chunkfile import ObjectFormat
from kvshelf.identity import Chunk
from kvshelf.metrics import Counters
from kvshelf.shelf import Presence, Shelf


class PrefetchMemory:
    """Payloads of prefetched objects of one namespace.

    Parameters
    ----------
    fmt : ObjectFormat
    capacity : int
        Most bytes that they take.
    counters : Counters

    Attributes
    ----------
    most_chunks : int
        Chunks that there is room for.
    """

    def __init__(self, fmt: ObjectFormat, capacity: int, counters: Counters) -> None:
        self._counters = counters
        self._shards = range(fmt.shards)
        sizes = [fmt.payload_size(shard) for shard in self._shards]
        self.most_chunks = capacity // sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        self._pool = BufferPool(max(capacity, ALIGNMENT))
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[bytes, int], Buffer] = OrderedDict()

    def holds(self, chunk: Chunk, shard: int) -> bool:
        """Whether the payload of one object is here."""
        return (chunk.key, shard) in self._held

    def leading(self, chunks: Sequence[Chunk]) -> int:
        """Return how many leading `chunks` are here in full."""
        for number, chunk in enumerate(chunks):
            if not all(self.holds(chunk, shard) for shard in self._shards):
                return number
        return len(chunks)

    def put(self, key: bytes, shard: int, payload: Tensor) -> None:
        """Keep a copy of a payload, if there can be room for it."""
        name = (key, shard)
        with self._lock:
            if name in self._held:
                self._held.move_to_end(name)
                return
            buffer = self._pool.allocate(payload.numel())
            while buffer is None and self._held:
                self._held.popitem(last=False)[1].release()
                buffer = self._pool.allocate(payload.numel())
        if buffer is None:
            return
        buffer.tensor.copy_(payload)
        with self._lock:
            if name in self._held:
                buffer.release()
            else:
                self._held[name] = buffer
                self._counters.add("prefetched_objects")

    def copy_to(self, key: bytes, shard: int, out: Tensor) -> bool:
        """Copy a payload that is here into `out`; False when it is not."""
        with self._lock:
            found = self._held.get((key, shard))
            if found is None:
                return False
            self._held.move_to_end((key, shard))
            view = found.share()
        with view:
            out.copy_(view.tensor)
        self._counters.add("memory_objects")
        return True

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            for buffer in self._held.values():
                buffer.release()
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


class LoadsFromMemory(Shelf):
    """A shelf whose loads look into memory first."""

    def __init__(self, shelf: Shelf, memory: PrefetchMemory) -> None:
        super().__init__(shelf.backend)
        self._shelf = shelf
        self._memory = memory

    @property
    def available(self) -> bool:
        """True: what is in memory can be had whatever the storage does."""
        return True

    def load(self, fmt: ObjectFormat, chunk: Chunk, shard: int, image: memoryview) -> None:
        """Fill the payload of `image`, and its header only where the object was read."""
        payload = torch.frombuffer(image, dtype=torch.uint8)[fmt.data_offset :]
        if not self._memory.copy_to(chunk.key, shard, payload):
            self._shelf.load(fmt, chunk, shard, image)

    def probe(self, fmt: ObjectFormat, items: Sequence[tuple[Chunk, int]]) -> list[Presence]:
        """Ask the shelf behind."""
        return self._shelf.probe(fmt, items)

    def write(self, *args: Any, **options: Any) -> WriteResult:
        """Write to the shelf behind."""
        return self._shelf.write(*args, **options)

    def repair(self, *args: Any, **options: Any) -> WriteResult:
        """Repair on the shelf behind."""
        return self._shelf.repair(*args, **options)


class FindsInMemory(Shelf):
    """A shelf on which everything is that is in memory."""

    def __init__(self, shelf: Shelf, memory: PrefetchMemory) -> None:
        super().__init__(shelf.backend)
        self._shelf = shelf
        self._memory = memory

    def probe(self, fmt: ObjectFormat, items: Sequence[tuple[Chunk, int]]) -> list[Presence]:
        """Ask the shelf behind for what is not in memory."""
        answers = [Presence.PRESENT] * len(items)
        asked = [
            i for i, (chunk, shard) in enumerate(items) if not self._memory.holds(chunk, shard)
        ]
        found = self._shelf.probe(fmt, [items[i] for i in asked]) if asked else []
        for i, answer in zip(asked, found, strict=True):
            answers[i] = answer
        return answers
