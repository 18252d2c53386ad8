"""The memory tier: objects of all kinds and namespaces in host memory of this process.

Owns the names of objects in memory, and the copies into and out of it.

Contracts
---------
* The tier holds whole objects, header included. Callers enter verified bytes only, so nothing is
  verified again when it is read.
* What is in use is pinned: memory that was lent, or is being filled, stays as it is until it is
  given back.
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
from kvshelf.memory.residents import Residents, ResidentStats, Slot
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ObjectRef

if TYPE_CHECKING:
    import torch

_Name: TypeAlias = tuple[bytes, Kind, int, int]


class Lent:
    """An object in the tier's memory, pinned until :meth:`release`.

    Attributes
    ----------
    view : memoryview
        The whole object, header included. It must not be written to.
    """

    __slots__ = ("_slot", "_tier", "view")

    def __init__(self, tier: MemoryTier, slot: Slot) -> None:
        self._tier = tier
        self._slot = slot
        self.view = tier._bytes_of(slot)

    def valid(self) -> bool:
        """Tell that the bytes are the object: they stay so until :meth:`release`."""
        return True

    def release(self) -> None:
        """End the pin. Called exactly once."""
        self._tier._unpin(self._slot)


class Room:
    """Memory for one object that is being read, which nobody else finds yet.

    Exactly one of the other methods ends it.

    Attributes
    ----------
    view : memoryview
        Memory of the object's size, to be filled.
    """

    __slots__ = ("_slot", "_tier", "view")

    def __init__(self, tier: MemoryTier, slot: Slot) -> None:
        self._tier = tier
        self._slot = slot
        self.view = tier._bytes_of(slot)

    def publish(self) -> bool:
        """Let the object be found; it is whole and verified.

        False if it was there already, or was removed since the room was made.
        """
        return self._tier._publish(self._slot, pinned=False)

    def publish_pinned(self) -> Lent | None:
        """Do the same and return the object that is there now, pinned.

        None only where the object was removed since the room was made, or another thread had
        entered it and it is gone again.
        """
        slot, tier = self._slot, self._tier
        if tier._publish(slot, pinned=True):
            return Lent(tier, slot)
        return tier._pin(slot.name)

    def abandon(self) -> None:
        """Free the memory: the object does not come."""
        self._tier._abandon(self._slot)


class MemoryTier:
    """Objects in host memory, in front of a disk tier and a shelf.

    Parameters
    ----------
    max_bytes : int
        Bytes of memory.
    counters : Counters, optional
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
    """

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
        self._arena = Arena(max_bytes, lazy=lazy, device=device)
        borders = () if device is None else self._arena.borders
        self._residents = Residents(max_bytes, borders=borders)
        self._lock = threading.Lock()
        self._closed = False
        self._evictions = self._evicted_bytes = 0
        self._counters.set_gauge("memory_tier_limit_bytes", max_bytes)

    def __repr__(self) -> str:
        return f"MemoryTier({self.max_bytes}, {self._residents!r})"

    @property
    def available(self) -> bool:
        """Whether any object is here."""
        return bool(self._residents)

    def stats(self) -> ResidentStats:
        """Return what is here now."""
        return self._residents.stats()

    def most_chunks(self, fmt: ObjectFormat, shards: Sequence[int] | None = None) -> int:
        """Return how many whole chunks fit if nothing else is here.

        Parameters
        ----------
        fmt : ObjectFormat
        shards : Sequence of int, optional
            The shards of each chunk; all when absent.
        """
        wanted = range(fmt.shards) if shards is None else shards
        return self._residents.most([fmt.object_size(shard) for shard in wanted])

    # ------------------------------------------------------------------------------------ reading

    def holds(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> list[bool]:
        """Tell which of these objects are here."""
        return self._residents.holds([_name(fmt, chunk, shard) for chunk, shard in refs])

    def touch(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> None:
        """Count a use of these objects, those of them that are here."""
        self._residents.touch([_name(fmt, chunk, shard) for chunk, shard in refs])

    def pin(self, fmt: ObjectFormat, ref: ObjectRef) -> Lent | None:
        """Keep an object here until its :meth:`Lent.release`; None if it is not here."""
        return self._pin(_name(fmt, *ref))

    def borrow(self, fmt: ObjectFormat, ref: ObjectRef) -> Lent | None:
        """Lend an object for a load; None if it is not here."""
        lent = self.pin(fmt, ref)
        if lent is not None:
            self._counters.add("memory_tier_loaded_objects")
            self._counters.add("memory_tier_loaded_bytes", len(lent.view))
        return lent

    def load(self, fmt: ObjectFormat, ref: ObjectRef, buffer: memoryview) -> bool:
        """Copy an object to `buffer`; False if it is not here."""
        lent = self.borrow(fmt, ref)
        if lent is None:
            return False
        try:
            copy_bytes(buffer, lent.view)
        finally:
            lent.release()
        return True

    # ----------------------------------------------------------------------------------- entering

    def reserve(self, fmt: ObjectFormat, ref: ObjectRef) -> Room | None:
        """Make room for an object that is going to be read; None if it is here, or there is none.

        What is used least recently is evicted for it.
        """
        name = _name(fmt, *ref)
        if name in self._residents:
            return None
        chunk, shard = ref
        size = fmt.object_size(shard, chunk.tokens)
        parent = (chunk.parent, fmt.kind, fmt.shards, shard)
        slot = self._residents.reserve(name, size, parent=parent)
        return None if slot is None else Room(self, slot)

    def keep(self, fmt: ObjectFormat, ref: ObjectRef, buffer: BytesLike) -> None:
        """Copy an object in, if there is room. The bytes must be verified."""
        if self.holds(fmt, [ref])[0]:
            return
        room = self.reserve(fmt, ref)
        if room is None:
            self._counters.add("memory_tier_dropped_objects")
            return
        try:
            copy_bytes(room.view, buffer)
        except BaseException:
            room.abandon()
            raise
        room.publish()

    def remove(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> int:
        """Remove objects; return how many were here. Memory that is lent is freed later.

        What is being read or copied in for these names is not published.
        """
        names = [_name(fmt, chunk, shard) for chunk, shard in refs]
        removed = sum(self._residents.remove(name) for name in names)
        self._report()
        return removed

    # ------------------------------------------------------------------------------------ the end

    def attach(self, guard: GuardedBackend) -> None:
        """Do nothing: no thread is ever stuck in memory."""

    def close(self) -> None:
        """Forget all objects, and free the memory once none of it is lent. Idempotent."""
        with self._lock:
            self._closed = True
        self._residents.close()
        self._free_if_closed()

    # ------------------------------------------------------------------------------------- inside

    def _bytes_of(self, slot: Slot) -> memoryview:
        return self._arena.view[slot.offset : slot.offset + slot.nbytes]

    def _pin(self, name: object) -> Lent | None:
        slot = self._residents.pin(name)
        return None if slot is None else Lent(self, slot)

    def _unpin(self, slot: Slot) -> None:
        self._residents.unpin(slot)
        self._counters.set_gauge("memory_tier_pinned_bytes", self._residents.pinned_bytes)
        if self._closed:
            self._free_if_closed()

    def _publish(self, slot: Slot, *, pinned: bool) -> bool:
        published = self._residents.publish(slot, pinned=pinned)
        if published:
            self._counters.add("memory_tier_stored_objects")
            self._counters.add("memory_tier_stored_bytes", slot.nbytes)
            self._report()
        if self._closed:
            self._free_if_closed()
        return published

    def _abandon(self, slot: Slot) -> None:
        self._residents.abandon(slot)
        if self._closed:
            self._free_if_closed()

    def _report(self) -> None:
        stats = self._residents.stats()
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

    def _free_if_closed(self) -> None:
        with self._lock:
            if not self._residents.pinned_bytes:
                self._arena.close()


def _name(fmt: ObjectFormat, chunk: Chunk, shard: int) -> _Name:
    # Keys of other namespaces differ; a chunk has the same key in all kinds.
    return chunk.key, fmt.kind, fmt.shards, shard
