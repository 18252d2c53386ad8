"""Memory for objects that were brought near before they are needed.

Owns the payloads that were prefetched: the memory tier, in front of a shelf by the classes of
:mod:`kvshelf.tiers`.

Contracts
---------
* Only payloads that a load has verified come in, so nothing is verified again on its way
  out. What is pushed out, the least recently used first, is only farther away.
* All methods may be called from any thread. Copies are made outside the lock; a payload
  that is pushed out meanwhile stays where it is until its copy is done.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from kvshelf.backends import Buffer as Bytes
from kvshelf.backends.guard import GuardedBackend
from kvshelf.buffers import ALIGNMENT, Buffer, BufferPool
from kvshelf.chunkfile import ObjectFormat
from kvshelf.identity import Chunk
from kvshelf.metrics import Counters


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

    @property
    def available(self) -> bool:
        """True: what is in memory can be had whatever a storage does."""
        return True

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
