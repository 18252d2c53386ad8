"""Host memory that holds named objects: which are here, which are pinned, and owners' budgets.

Owns an arena and the table from names to the objects in it: the memory of a node server.
:mod:`kvshelf.memory.places` decides which objects are evicted for others.

Contracts
---------
* An object is invisible from :meth:`HostMemory.reserve` until :meth:`HostMemory.publish`. Callers
  publish only verified objects: nothing is verified again when it is used.
* Memory that is pinned or reserved is never given to another object. A forgotten object is gone
  for lookups at once; its memory is free when its last pin is. What was reserved for a name before
  the name was forgotten is not published: it may be a copy of what is gone.
* An owner reserves no more than its :class:`~kvshelf.memory.places.Budget`, or one object.
* A slot's number is reused together with its memory, with a new *generation*. Number and generation
  together tell a reader whether the memory still held the object.
* After :meth:`HostMemory.close` the arena is closed once nothing is pinned or reserved.
* Any thread may call all methods. None waits for anything but the lock, and none holds it for much
  longer than a few evictions take, however many objects there are. :meth:`HostMemory.reserve` and
  :meth:`HostMemory.close` let other threads have the lock in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvshelf.errors import ConfigError
from kvshelf.memory.arena import Arena
from kvshelf.memory.places import GO_ON, Budget, Places, Slot, State

#: Objects that are pinned, touched, or forgotten at the end, before others can have the lock.
_BATCH: Final = 64
#: Seconds of a pause. The lock is not fair: a thread that takes it again at once keeps it.
_PAUSE: Final = 2e-5
_GENERATION_BYTES: Final = 8
#: Objects start at its multiples.
_ALIGNMENT: Final = 4096


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The content of a range of memory, in numbers.

    Attributes
    ----------
    objects, bytes : int
        Objects that can be found, and their bytes.
    pinned_bytes : int
        Bytes of objects, found or not, that are pinned or reserved.
    wasted_bytes : int
        Bytes lost by rounding sizes up.
    largest_free : int
        Bytes of the largest free range.
    evictions, evicted_bytes : int
        Objects evicted since the beginning, and their bytes.
    """

    objects: int
    bytes: int
    pinned_bytes: int
    wasted_bytes: int
    largest_free: int
    evictions: int
    evicted_bytes: int


class HostMemory:
    """The objects in an arena.

    Parameters
    ----------
    arena : Arena
        Closed together with this object.
    start : int
        Bytes at the arena's beginning that hold no objects; a multiple of 4096.
    borders : Sequence of int
        Multiples of 4096 behind `start`, in order, that no object lies across.
    on_generation : Callable, optional
        Called with a slot's number and its new generation, before the memory that the slot had
        can be reused. It must be quick, and must not call this object.

    Attributes
    ----------
    arena : Arena
    capacity : int
        Bytes for objects.
    table_slots : int
        Entries of the table at the arena's beginning; 0 without one.
    pinned_bytes : int
        Bytes of objects that are pinned or reserved.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        start: int = 0,
        borders: Sequence[int] = (),
        on_generation: Callable[[int, int], None] | None = None,
    ) -> None:
        self.arena = arena
        self._start = start
        self._places = Places(
            arena.nbytes - start,
            alignment=_ALIGNMENT,
            borders=[border - start for border in borders],
        )
        self.capacity = self._places.space.capacity
        self.table_slots = 0
        self._on_generation = on_generation
        self._lock = threading.Lock()
        self._closed = False
        self._slots: dict[Hashable, Slot] = {}
        #: Reserved slots, by name.
        self._coming: dict[Hashable, list[Slot]] = {}
        self._clock = 0
        self._generations: list[int] = []
        self._numbers: list[int] = []
        self._bytes = self._exact = self.pinned_bytes = 0
        self._evictions = self._evicted_bytes = 0

    @classmethod
    def with_generations(cls, arena: Arena) -> HostMemory:
        """Return the memory of an arena that begins with a table of the slots' generations.

        The entries are uint64. Another process that has used the
        memory of a slot reads from it whether the memory was still the object's.

        Raises
        ------
        ConfigError
            If the arena is too small.
        """
        slots = arena.nbytes // _ALIGNMENT
        start = -(-slots * _GENERATION_BYTES // _ALIGNMENT) * _ALIGNMENT
        if arena.nbytes < start + _ALIGNMENT:
            raise ConfigError(
                f"the server's memory is {arena.nbytes} bytes; expected space for objects"
            )
        table = arena.view[: slots * _GENERATION_BYTES].cast("Q")
        memory = cls(
            arena,
            start=start,
            # Clients page-lock the arena for their GPUs.
            borders=arena.borders,
            on_generation=table.__setitem__,
        )
        memory.table_slots = slots
        return memory

    def __repr__(self) -> str:
        return f"HostMemory({len(self._slots)} objects, {self._bytes} of {self.capacity} bytes)"

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._slots

    def most(self, sizes: Sequence[int]) -> int:
        """Return how often objects of these sizes, one of each, fit if nothing else is here."""
        space = self._places.space
        return space.most(sum(space.rounded(size) for size in sizes))

    # ---------------------------------------------------------------------------------- entering

    def view(self, slot: Slot) -> memoryview:
        """Return the bytes of a slot that is pinned or reserved, writable."""
        start = self._start + slot.offset
        return self.arena.view[start : start + slot.nbytes]

    def offset(self, slot: Slot) -> int:
        """Return where a slot lies, in bytes from the arena's beginning."""
        return self._start + slot.offset

    def reserve(
        self,
        name: Hashable,
        nbytes: int,
        *,
        parent: Hashable | None = None,
        owner: Budget | None = None,
    ) -> Slot | None:
        """Reserve memory for an object, evicting others if need be.

        Several slots may be reserved for one name: the first that is published counts.

        Parameters
        ----------
        name : Hashable
        nbytes : int
        parent : Hashable, optional
            Name of an object that is not evicted before this one.
        owner : Budget, optional
            Bounds what is reserved with it, until that is published or abandoned.

        Returns
        -------
        Slot or None
            None if what is pinned or reserved leaves no range of its size, or the owner has
            reserved too much: nothing was evicted for it.

        Raises
        ------
        ValueError
            If `nbytes` is less than one.
        """
        steps = self._places.allocate(nbytes, self._evict)
        while True:
            with self._lock:
                if self._closed or (owner is not None and not owner.allows(nbytes)):
                    return None
                offset = next(steps)
                if offset is None:
                    return None
                if offset != GO_ON:
                    slot = self._enter(name, parent, offset, nbytes)
                    slot.owner = owner
                    if owner is not None:
                        owner.used += nbytes
                    return slot
            time.sleep(_PAUSE)

    def _enter(self, name: Hashable, parent: Hashable | None, offset: int, nbytes: int) -> Slot:
        if self._numbers:
            number = self._numbers.pop()
        else:
            number = len(self._generations)
            self._generations.append(0)
        slot = Slot(name, parent, offset, nbytes, number, self._generations[number])
        self._exact += nbytes
        self._coming.setdefault(name, []).append(slot)
        self.pinned_bytes += nbytes
        self._places.enter(slot)
        return slot

    def publish(self, slot: Slot, *, pinned: bool = False) -> bool:
        """Publish a reserved object.

        Parameters
        ----------
        slot : Slot
        pinned : bool
            The caller keeps a pin of it, and ends it by :meth:`unpin`.

        Returns
        -------
        bool
            False if another object of its name was there first, its name was removed since it was
            reserved, or :meth:`close` was called: the slot is free again.
        """
        with self._lock:
            self._arrive(slot)
            if self._closed or slot.refused or slot.name in self._slots:
                self._unpin(slot)
                return False
            slot.state = State.RESIDENT
            self._slots[slot.name] = slot
            self._bytes += slot.nbytes
            if slot.parent is not None:
                self._places.add_child(slot.parent)
            self._note_use(slot)
            if not pinned:
                self._unpin(slot)
            return True

    def abandon(self, slot: Slot) -> None:
        """Free a reserved slot whose object was given up."""
        with self._lock:
            self._arrive(slot)
            self._unpin(slot)

    def _arrive(self, slot: Slot) -> None:
        if slot.state is not State.RESERVED:
            raise ValueError(f"{slot!r} is not reserved: it was published or abandoned before")
        if slot.owner is not None:
            slot.owner.used -= slot.nbytes
        coming = self._coming[slot.name]
        coming.remove(slot)
        if not coming:
            del self._coming[slot.name]

    # ------------------------------------------------------------------------------------- using

    def pin(self, name: Hashable) -> Slot | None:
        """Protect an object from eviction until :meth:`unpin`; None if it is not here.

        Pins are counted. A pin counts as a use.
        """
        with self._lock:
            slot = self._slots.get(name)
            if slot is None:
                return None
            self._pin(slot)
            return slot

    def pin_all(self, names: Sequence[Hashable]) -> list[Slot | None]:
        """Pin many objects, those of them that are here.

        The first counts as the one that was used last: of a prompt the end is evicted before the
        beginning.
        """
        found: list[Slot | None] = []
        for end in range(len(names), 0, -_BATCH):
            with self._lock:
                for name in reversed(names[max(0, end - _BATCH) : end]):
                    slot = self._slots.get(name)
                    found.append(slot)
                    if slot is not None:
                        self._pin(slot)
        return found[::-1]

    def unpin(self, slot: Slot) -> None:
        """End one pin.

        Raises
        ------
        ValueError
            If the slot has no pin, or is reserved.
        """
        with self._lock:
            if not slot.pins or slot.state is State.RESERVED:
                raise ValueError(f"{slot!r} is not pinned")
            self._unpin(slot)

    def _unpin(self, slot: Slot) -> None:
        slot.pins -= 1
        if slot.pins:
            return
        self.pinned_bytes -= slot.nbytes
        self._places.note_repinned(slot)
        if slot.state is State.RESIDENT:
            self._places.queue(slot)
        else:
            self._free(slot)
        self._close_arena()

    def _pin(self, slot: Slot) -> None:
        if not slot.pins:
            self.pinned_bytes += slot.nbytes
            self._places.note_repinned(slot)
        slot.pins += 1
        self._note_use(slot)

    def holds(self, names: Sequence[Hashable]) -> list[bool]:
        """Return which of these objects are here. Takes no lock and counts as no use."""
        slots = self._slots
        return [name in slots for name in names]

    def sizes(self, names: Sequence[Hashable]) -> list[int | None]:
        """Return the bytes of each of these objects, None for those that are not here.

        Takes no lock and counts as no use.
        """
        found = map(self._slots.get, names)
        return [None if slot is None else slot.nbytes for slot in found]

    def _note_use(self, slot: Slot) -> None:
        self._clock += 1
        slot.used = self._clock

    # ------------------------------------------------------------------------------------ leaving

    def forget(self, name: Hashable) -> bool:
        """Drop an object; return whether it was here. Reservations for its name are given up."""
        with self._lock:
            for coming in self._coming.get(name, ()):
                coming.refused = True
            slot = self._slots.get(name)
            if slot is None:
                return False
            self._remove(slot)
            return True

    def expire(self, slot: Slot) -> None:
        """Change the generation of a pinned slot now.

        Readers that know the previous one notice the change. The object stays, for others and with
        the new generation; its memory cannot be reused before the pin ends.
        """
        with self._lock:
            if slot.state in (State.RESIDENT, State.REMOVED):
                self._next_generation(slot)
                slot.generation = self._generations[slot.number]

    def close(self) -> None:
        """Drop all objects, and take no more. Idempotent.

        What is pinned stays until it is unpinned, and then the arena is closed.
        """
        left = True
        while left:
            with self._lock:
                self._closed = True
                for slot in list(islice(reversed(self._slots.values()), _BATCH)):
                    self._remove(slot)
                left = bool(self._slots)
                # Freed without the lock, when this call ends.
                queues = None if left else self._places.forget_leaves()
        del queues
        with self._lock:
            self._close_arena()

    def _close_arena(self) -> None:
        if self._closed and not self.pinned_bytes and not self._slots:
            self.arena.close()

    def stats(self) -> MemoryStats:
        """Return what is here now."""
        with self._lock:
            used = self._places.space.used
            return MemoryStats(
                objects=len(self._slots),
                bytes=self._bytes,
                pinned_bytes=self.pinned_bytes,
                wasted_bytes=used - self._exact,
                largest_free=self._places.space.largest_free,
                evictions=self._evictions,
                evicted_bytes=self._evicted_bytes,
            )

    def _remove(self, slot: Slot) -> None:
        self._hide(slot)
        if slot.pins:
            slot.state = State.REMOVED
        else:
            self._free(slot)

    def _hide(self, slot: Slot) -> None:
        del self._slots[slot.name]
        self._bytes -= slot.nbytes
        parent = slot.parent
        if parent is not None and self._places.remove_child(parent):
            above = self._slots.get(parent)
            if above is not None and not above.pins:
                self._places.queue(above)

    def _free(self, slot: Slot) -> int:
        """Free a slot; return the begin of the free range that it is part of now."""
        slot.state = State.FREE
        self._exact -= slot.nbytes
        self._next_generation(slot)
        self._numbers.append(slot.number)
        return self._places.free(slot)

    def _next_generation(self, slot: Slot) -> None:
        self._generations[slot.number] += 1
        if self._on_generation is not None:
            self._on_generation(slot.number, self._generations[slot.number])

    def _evict(self, slot: Slot) -> int:
        """Evict an object; return the begin of the free range that it is part of now."""
        self._evictions += 1
        self._evicted_bytes += slot.nbytes
        self._hide(slot)
        return self._free(slot)
