"""The memory tier: objects of all kinds and namespaces in host memory of this process.

Owns the names of objects in memory, and the copies into and out of it.

Contracts
---------
* The tier holds whole objects, header included. Callers enter verified bytes only, so nothing is
  verified again when it is read.
* Memory that is in use or is being filled is pinned: it stays as it is until
  :meth:`PinnedObject.release`.
* The memory is bounded by ``max_bytes``, which is taken when the tier is made, or refused. A lazy
  tier takes it when it is needed.
* Any thread may call all methods. Those that copy an object (:meth:`MemoryTier.load`,
  :meth:`MemoryTier.keep`) take as long as a copy takes, without the GIL; the others are quick.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvshelf.backends import BytesLike
from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import Arena, copy_bytes
from kvshelf.memory.host_memory import HostMemory, MemoryStats
from kvshelf.memory.places import Slot, State
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ObjectRef

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryTier"]

_Name: TypeAlias = tuple[bytes, Kind, int, int]


class PinnedObject:
    """The memory of one object in the tier, which stays as it is until :meth:`release`.

    Attributes
    ----------
    view : memoryview
        The whole object, header included. Only its reserver writes to it, before :meth:`publish`.
    """

    __slots__ = ("_slot", "_tier", "view")

    def __init__(self, tier: MemoryTier, slot: Slot) -> None:
        self._tier = tier
        self._slot = slot
        self.view = tier._memory.view(slot)

    def valid(self) -> bool:
        """Return True: the bytes stay those of the object until :meth:`release`."""
        return True

    def publish(self) -> PinnedObject | None:
        """Publish an object whose memory was reserved: it is whole and verified.

        Returns the object that is there now, to be released in place of this one. None only where
        the object was removed since its memory was reserved, or another thread had entered it and
        it is gone again.
        """
        return self if self._tier._publish(self._slot) else self._tier._pin(self._slot.name)

    def release(self) -> None:
        """End the pin; an object that was not published is given up. Called exactly once."""
        self._tier._release(self._slot)


class MemoryTier:
    """Objects in host memory, in front of a disk tier and a shelf.

    Parameters
    ----------
    max_bytes : int
        Bytes of memory.
    counters : Counters, optional
        Counts what is done.
    lazy : bool
        Take memory from the system when it is needed, and never refuse.
    device : torch.device, optional
        Page-lock the memory for this GPU. Not with `lazy`.

    Raises
    ------
    ConfigError
        If there is not so much free memory.

    Attributes
    ----------
    max_bytes : int
        As above.
    """

    in_memory = True

    def __init__(
        self,
        max_bytes: int,
        *,
        counters: Counters | None = None,
        lazy: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self._counters = Counters() if counters is None else counters
        arena = Arena(max_bytes, lazy=lazy, device=device)
        self._memory = HostMemory(arena, borders=() if device is None else arena.borders)
        self._lock = threading.Lock()
        self._evictions = self._evicted_bytes = 0
        self._counters.set_gauge("memory_tier_limit_bytes", max_bytes)

    def __repr__(self) -> str:
        return f"MemoryTier({self.max_bytes}, {self._memory!r})"

    @property
    def available(self) -> bool:
        """Whether any object is here."""
        return bool(self._memory)

    def stats(self) -> MemoryStats:
        """Return what is here now."""
        return self._memory.stats()

    def most_chunks(self, fmt: ObjectFormat, shards: Sequence[int] | None = None) -> int:
        """Return how many whole chunks fit if nothing else is here.

        Parameters
        ----------
        fmt : ObjectFormat
        shards : Sequence of int, optional
            The shards of each chunk; all when absent.
        """
        wanted = range(fmt.shards) if shards is None else shards
        return self._memory.most([fmt.object_size(shard) for shard in wanted])

    # ------------------------------------------------------------------------------------ reading

    def holds(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> list[bool]:
        """Return which of these objects are here."""
        return self._memory.holds([_name(fmt, chunk, shard) for chunk, shard in refs])

    def pin(self, fmt: ObjectFormat, ref: ObjectRef, *, loads: bool = True) -> PinnedObject | None:
        """Keep an object here until its :meth:`PinnedObject.release`; None if it is not here.

        Parameters
        ----------
        fmt : ObjectFormat
        ref : ObjectRef
        loads : bool
            It is pinned to be loaded, and counted.
        """
        pinned = self._pin(_name(fmt, *ref))
        if pinned is not None and loads:
            self._counters.add("memory_tier_loaded_objects")
            self._counters.add("memory_tier_loaded_bytes", len(pinned.view))
        return pinned

    def load(self, fmt: ObjectFormat, ref: ObjectRef, buffer: memoryview) -> bool:
        """Copy an object to `buffer`; False if it is not here."""
        pinned = self.pin(fmt, ref)
        if pinned is None:
            return False
        try:
            copy_bytes(buffer, pinned.view)
        finally:
            pinned.release()
        return True

    # ----------------------------------------------------------------------------------- entering

    def reserve(self, fmt: ObjectFormat, ref: ObjectRef) -> PinnedObject | None:
        """Reserve memory for an object about to be read; None if it is here or does not fit.

        The least recently used objects are evicted for it.
        """
        name = _name(fmt, *ref)
        if name in self._memory:
            return None
        chunk, shard = ref
        size = fmt.object_size(shard, chunk.tokens)
        parent = (chunk.parent, fmt.kind, fmt.shards, shard)
        slot = self._memory.reserve(name, size, parent=parent)
        return None if slot is None else PinnedObject(self, slot)

    def keep(self, fmt: ObjectFormat, ref: ObjectRef, buffer: BytesLike) -> None:
        """Copy an object in, if it fits. The bytes must be verified."""
        if self.holds(fmt, [ref])[0]:
            return
        reserved = self.reserve(fmt, ref)
        if reserved is None:
            self._counters.add("memory_tier_dropped_objects")
            return
        kept: PinnedObject | None = reserved
        try:
            copy_bytes(reserved.view, buffer)
            kept = reserved.publish()
        finally:
            if kept is not None:
                kept.release()

    def remove(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> int:
        """Remove objects; return how many were here. Memory that is pinned is freed later.

        What is being read or copied in for these names is not published.
        """
        names = [_name(fmt, chunk, shard) for chunk, shard in refs]
        removed = sum(self._memory.forget(name) for name in names)
        self._report()
        return removed

    # ------------------------------------------------------------------------------------ the end

    def attach(self, guard: GuardedBackend) -> None:
        """Do nothing: no thread is ever stuck in memory."""

    def close(self) -> None:
        """Forget all objects, and free the memory once none of it is pinned. Idempotent."""
        self._memory.close()

    # ------------------------------------------------------------------------------------- inside

    def _pin(self, name: object) -> PinnedObject | None:
        slot = self._memory.pin(name)
        return None if slot is None else PinnedObject(self, slot)

    def _release(self, slot: Slot) -> None:
        if slot.state is State.RESERVED:
            self._memory.abandon(slot)
        else:
            self._memory.unpin(slot)
        self._counters.set_gauge("memory_tier_pinned_bytes", self._memory.pinned_bytes)

    def _publish(self, slot: Slot) -> bool:
        published = self._memory.publish(slot, pinned=True)
        if published:
            self._counters.add("memory_tier_stored_objects")
            self._counters.add("memory_tier_stored_bytes", slot.nbytes)
            self._report()
        return published

    def _report(self) -> None:
        stats = self._memory.stats()
        with self._lock:
            objects = stats.evictions - self._evictions
            nbytes = stats.evicted_bytes - self._evicted_bytes
            if objects > 0:
                self._evictions, self._evicted_bytes = stats.evictions, stats.evicted_bytes
        if objects > 0:
            self._counters.add("memory_tier_evicted_objects", objects)
            self._counters.add("memory_tier_evicted_bytes", nbytes)
        self._counters.set_gauge("memory_tier_used_bytes", stats.bytes)
        self._counters.set_gauge("memory_tier_pinned_bytes", stats.pinned_bytes)


def _name(fmt: ObjectFormat, chunk: Chunk, shard: int) -> _Name:
    # Keys of other namespaces differ; a chunk has the same key in all kinds.
    return chunk.key, fmt.kind, fmt.shards, shard
