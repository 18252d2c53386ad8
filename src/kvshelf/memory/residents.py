"""Which named objects are in a range of memory: places, pins, eviction.

Owns the table from names to places and the decision what makes room for a new object. It knows
offsets, and touches no memory itself.

Contracts
---------
* An object is invisible from :meth:`Residents.reserve` until :meth:`Residents.publish`. Callers
  publish only verified objects: nothing is verified again when it is used.
* *Leaves* are evicted, the least recently used first: an object stays while an object that names
  it as its parent is there. So the beginning of a prompt outlives its end. Only where evicted
  leaves of as many bytes as the new object has left gaps that are too small for it, objects that
  lie side by side go, those that were used least recently, leaves or not. So an object of any
  size finds room without much else being evicted, whatever sizes came before it.
* Nothing is evicted for an object that finds no room: pins leave no run (:mod:`.runs`) of its
  size. Leaves in runs that are too short for it stay too. Where most of the oldest leaves lie in
  such runs, the order of eviction is that of a sample.
* Memory that is pinned or reserved is never given to another object. A removed object is gone
  for lookups at once; its memory is free when its last pin is. What was reserved for a name before
  the name was removed is not published: it may be a copy of what is gone.
* A slot's number is free again together with its memory, and gets another generation before that.
  Who knows number and generation can tell whether the memory was still the object's.
* Any thread may call all methods. None waits for anything but the lock, and none holds it for much
  longer than a few evictions take, however many objects there are. :meth:`Residents.reserve` and
  :meth:`Residents.close` let other threads have the lock in between.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Final

from kvshelf.memory.runs import Runs
from kvshelf.memory.size_classes import SizeClasses

_RESERVED: Final = 0
_RESIDENT: Final = 1
#: Gone for lookups, but pinned.
_REMOVED: Final = 2
_FREE: Final = 3

#: Between two pauses, a thread that makes room evicts at most so many objects.
_STEPS: Final = 8
#: For one eviction, at most so many leaves are looked at, or neighbours in a run.
_LOOKS: Final = 16
#: In one step, so many changes of pins are sorted into the runs, or leaves into the queue.
_SORTED: Final = 4
#: Objects that are pinned, touched, or removed at the end, before others can have the lock.
_BATCH: Final = 64
#: Seconds of a pause. The lock is not fair: a thread that takes it again at once keeps it.
_PAUSE: Final = 2e-5
#: Says that room is still being made.
_GO_ON: Final = -1


class Slot:
    """The place of one object.

    Attributes
    ----------
    name : Hashable
    parent : Hashable or None
        Name of the object before it; may be set until the slot is published.
    offset, nbytes : int
        Where its bytes are in the range, and how many.
    number : int
        Small number of the slot, which another slot has once this one is free.
    generation : int
        How often a slot of this number has been freed before, see :meth:`Residents.expire`.
    """

    __slots__ = (
        "_pins",
        "_queued",
        "_refused",
        "_state",
        "_used",
        "generation",
        "name",
        "nbytes",
        "number",
        "offset",
        "parent",
    )

    def __init__(
        self,
        name: Hashable,
        parent: Hashable | None,
        offset: int,
        nbytes: int,
        number: int,
        generation: int,
    ) -> None:
        self.name = name
        self.parent = parent
        self.offset = offset
        self.nbytes = nbytes
        self.number = number
        self.generation = generation
        self._state = _RESERVED
        #: While it is reserved, the pin of who reserved it.
        self._pins = 1
        self._used = 0
        #: Whether it is in the queue of leaves.
        self._queued = False
        #: Whether its name was removed while it was reserved.
        self._refused = False

    def __repr__(self) -> str:
        return f"Slot({self.name!r}, {self.offset}, {self.nbytes} bytes)"


@dataclass(frozen=True, slots=True)
class ResidentStats:
    """What a range of memory holds.

    Attributes
    ----------
    objects, bytes : int
        Objects that can be found, and their bytes.
    pinned_bytes : int
        Bytes of objects, found or not, that are pinned or reserved.
    wasted_bytes : int
        Bytes lost by rounding sizes up.
    free_bytes, largest_free : int
        Free bytes, and those of the largest free range.
    evictions, evicted_bytes : int
        Objects evicted since the beginning, and their bytes.
    """

    objects: int
    bytes: int
    pinned_bytes: int
    wasted_bytes: int
    free_bytes: int
    largest_free: int
    evictions: int
    evicted_bytes: int


class Residents:
    """The objects in a range of memory.

    Parameters
    ----------
    capacity : int
        Bytes of the range.
    alignment : int
        A power of two: objects start at its multiples.
    borders : Sequence of int
        Multiples of the alignment, in order, that no object lies across.
    on_generation : Callable, optional
        Called with a slot's number and its new generation, before the memory that the slot had
        can be reused. It must be quick, and must not call this object.

    Attributes
    ----------
    capacity : int
    most_slots : int
        Slot numbers are less than this.
    pinned_bytes : int
        Bytes of objects that are pinned or reserved.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alignment: int = 4096,
        borders: Sequence[int] = (),
        on_generation: Callable[[int, int], None] | None = None,
    ) -> None:
        self._space = SizeClasses(capacity, alignment=alignment, borders=borders)
        self.capacity = self._space.capacity
        self.most_slots = self.capacity // alignment
        self._on_generation = on_generation
        self._lock = threading.Lock()
        self._closed = False
        self._slots: dict[Hashable, Slot] = {}
        #: All slots whose memory is not free.
        self._places: dict[int, Slot] = {}
        #: Reserved slots, by name.
        self._coming: dict[Hashable, list[Slot]] = {}
        #: Where nothing was pinned or reserved, apart from the slots that were pinned or unpinned
        #: since, in that order.
        self._runs = Runs(self.capacity)
        for gap in self._space.gaps:
            self._runs.hold(gap, gap + alignment)
        self._repinned: OrderedDict[Slot, None] = OrderedDict()
        #: Where the last search of a run for what was used least recently ended.
        self._hand = 0
        #: How many resident objects name an object as their parent.
        self._children: dict[Hashable, int] = {}
        #: Slots that were unpinned leaves, by their use at that time. Each is in it at most once.
        #: Uses since then are noticed when a slot comes up.
        self._leaves: list[tuple[int, Slot]] = []
        #: The same, while entries of removed slots are sorted out of it.
        self._mixed: list[tuple[int, Slot]] = []
        self._clock = 0
        self._generations: list[int] = []
        self._numbers: list[int] = []
        self._bytes = self._exact = self.pinned_bytes = 0
        self._evictions = self._evicted_bytes = 0

    def __repr__(self) -> str:
        return f"Residents({len(self._slots)} objects, {self._bytes} of {self.capacity} bytes)"

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._slots

    def most(self, sizes: Sequence[int]) -> int:
        """Return how often objects of these sizes, one of each, fit if nothing else is here."""
        return self._space.most(sum(self._space.rounded(size) for size in sizes))

    # ---------------------------------------------------------------------------------- entering

    def reserve(
        self, name: Hashable, nbytes: int, *, parent: Hashable | None = None
    ) -> Slot | None:
        """Make room for an object, by evicting others if need be.

        Several slots may be reserved for one name: the first that is published counts.

        Parameters
        ----------
        name : Hashable
        nbytes : int
        parent : Hashable, optional
            Name of an object that is not evicted before this one.

        Returns
        -------
        Slot or None
            None if what is pinned or reserved leaves no room: nothing was evicted for it.

        Raises
        ------
        ValueError
            If `nbytes` is less than one.
        """
        steps = self._make_room(nbytes)
        while True:
            with self._lock:
                offset = None if self._closed else next(steps)
                if offset is None:
                    return None
                if offset != _GO_ON:
                    return self._enter(name, parent, offset, nbytes)
            time.sleep(_PAUSE)

    def _enter(self, name: Hashable, parent: Hashable | None, offset: int, nbytes: int) -> Slot:
        if self._numbers:
            number = self._numbers.pop()
        else:
            number = len(self._generations)
            self._generations.append(0)
        slot = Slot(name, parent, offset, nbytes, number, self._generations[number])
        self._exact += nbytes
        self._places[offset] = slot
        self._coming.setdefault(name, []).append(slot)
        self._note_pinned(slot)
        return slot

    def publish(self, slot: Slot, *, pinned: bool = False) -> bool:
        """Let a reserved object be found.

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
            if self._closed or slot._refused or slot.name in self._slots:
                self._unpin(slot)
                return False
            slot._state = _RESIDENT
            self._slots[slot.name] = slot
            self._bytes += slot.nbytes
            if slot.parent is not None:
                self._children[slot.parent] = self._children.get(slot.parent, 0) + 1
            self._note_use(slot)
            if not pinned:
                self._unpin(slot)
            return True

    def abandon(self, slot: Slot) -> None:
        """Free a reserved slot whose object does not come."""
        with self._lock:
            self._arrive(slot)
            self._unpin(slot)

    def _arrive(self, slot: Slot) -> None:
        if slot._state != _RESERVED:
            raise ValueError(f"{slot!r} is not reserved: it was published or abandoned before")
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
            if not slot._pins or slot._state == _RESERVED:
                raise ValueError(f"{slot!r} is not pinned")
            self._unpin(slot)

    def _unpin(self, slot: Slot) -> None:
        slot._pins -= 1
        if slot._pins:
            return
        self.pinned_bytes -= slot.nbytes
        self._note_repinned(slot)
        if slot._state == _RESIDENT:
            self._queue(slot)
        else:
            self._free(slot)

    def _pin(self, slot: Slot) -> None:
        if not slot._pins:
            self._note_pinned(slot)
        slot._pins += 1
        self._note_use(slot)

    def _note_pinned(self, slot: Slot) -> None:
        self.pinned_bytes += slot.nbytes
        self._note_repinned(slot)

    def _note_repinned(self, slot: Slot) -> None:
        # The runs are only looked at when memory is full: most pins are gone until then.
        if slot in self._repinned:
            del self._repinned[slot]
        else:
            self._repinned[slot] = None

    def holds(self, names: Sequence[Hashable]) -> list[bool]:
        """Tell which of these objects are here. Takes no lock and counts as no use."""
        slots = self._slots
        return [name in slots for name in names]

    def sizes(self, names: Sequence[Hashable]) -> list[int | None]:
        """Return the bytes of each of these objects, None for those that are not here.

        Takes no lock and counts as no use.
        """
        found = map(self._slots.get, names)
        return [None if slot is None else slot.nbytes for slot in found]

    def touch(self, names: Sequence[Hashable]) -> None:
        """Count a use of these objects, those of them that are here."""
        for start in range(0, len(names), _BATCH):
            with self._lock:
                for name in names[start : start + _BATCH]:
                    slot = self._slots.get(name)
                    if slot is not None:
                        self._note_use(slot)

    def _note_use(self, slot: Slot) -> None:
        self._clock += 1
        slot._used = self._clock

    # ------------------------------------------------------------------------------------ leaving

    def remove(self, name: Hashable) -> bool:
        """Remove an object; whether it was here. What is reserved for its name does not come."""
        with self._lock:
            for coming in self._coming.get(name, ()):
                coming._refused = True
            slot = self._slots.get(name)
            if slot is None:
                return False
            self._remove(slot)
            return True

    def expire(self, slot: Slot) -> None:
        """Change the generation of a pinned slot now.

        Who was told the one before notices it. The object stays, for others and with the new
        generation; its memory cannot be reused before the pin ends.
        """
        with self._lock:
            if slot._state in (_RESIDENT, _REMOVED):
                self._next_generation(slot)
                slot.generation = self._generations[slot.number]

    def close(self) -> None:
        """Remove all objects, and take no more. What is pinned stays until it is unpinned."""
        left = True
        while left:
            with self._lock:
                self._closed = True
                for slot in list(islice(reversed(self._slots.values()), _BATCH)):
                    self._remove(slot)
                left = bool(self._slots)
                # Freed without the lock, when this call ends.
                queues = self._leaves, self._mixed
                if not left:
                    self._leaves, self._mixed = [], []
        del queues

    def stats(self) -> ResidentStats:
        """Return what is here now."""
        with self._lock:
            used = self._space.used
            return ResidentStats(
                objects=len(self._slots),
                bytes=self._bytes,
                pinned_bytes=self.pinned_bytes,
                wasted_bytes=used - self._exact,
                free_bytes=self.capacity - used,
                largest_free=self._space.largest_free,
                evictions=self._evictions,
                evicted_bytes=self._evicted_bytes,
            )

    def _remove(self, slot: Slot) -> None:
        self._hide(slot)
        if slot._pins:
            slot._state = _REMOVED
        else:
            self._free(slot)

    def _hide(self, slot: Slot) -> None:
        del self._slots[slot.name]
        self._bytes -= slot.nbytes
        parent = slot.parent
        if parent is not None:
            left = self._children[parent] - 1
            if left:
                self._children[parent] = left
            else:
                del self._children[parent]
                above = self._slots.get(parent)
                if above is not None and not above._pins:
                    self._queue(above)

    def _free(self, slot: Slot) -> int:
        """Free a slot; return where the free range begins that it is part of now."""
        slot._state = _FREE
        self._exact -= slot.nbytes
        self._next_generation(slot)
        self._numbers.append(slot.number)
        del self._places[slot.offset]
        return self._space.free(slot.offset)

    def _next_generation(self, slot: Slot) -> None:
        self._generations[slot.number] += 1
        if self._on_generation is not None:
            self._on_generation(slot.number, self._generations[slot.number])

    # ----------------------------------------------------------------------------------- eviction

    def _is_evictable(self, slot: Slot) -> bool:
        return slot._state == _RESIDENT and not slot._pins and slot.name not in self._children

    def _queue(self, slot: Slot) -> None:
        """Queue a slot for eviction if it is an unpinned leaf."""
        if slot._queued or slot.name in self._children:
            return
        slot._queued = True
        heappush(self._leaves, (slot._used, slot))
        if not self._mixed and len(self._leaves) > 2 * len(self._slots) + 64:
            # Slots that were removed are still in it.
            self._leaves, self._mixed = [], self._leaves
        for _ in range(min(_SORTED, len(self._mixed))):
            # What is left without its last entry is a heap still.
            _, other = self._mixed.pop()
            other._queued = self._is_evictable(other)
            if other._queued:
                heappush(self._leaves, (other._used, other))

    def _make_room(self, nbytes: int) -> Iterator[int | None]:
        """Make room for an object, by evictions if need be.

        Yields
        ------
        int or None
            The offset of the object's memory, or None if there is no room, and then nothing more;
            ``_GO_ON`` where the lock should be released before it goes on.
        """
        size = self._space.rounded(nbytes)
        steps = evicted = 0
        hole: int | None = None
        while (offset := self._space.allocate(nbytes)) is None:
            steps += 1
            if steps % _STEPS == 0:
                yield _GO_ON
                continue
            if self._repinned:
                self._sort_pins()
                continue
            start, end = self._runs.longest
            if end - start < size:
                break
            if hole is not None:
                hole = self._widen(hole)
                if hole is not None:
                    continue
            victim = self._victim(size)
            if victim is None:
                continue
            side_by_side = evicted >= nbytes or victim.name in self._children
            evicted += victim.nbytes
            start = self._evict(victim)
            if side_by_side:
                hole = start
        yield offset

    def _sort_pins(self) -> None:
        """Bring the runs nearer to what is pinned now."""
        for _ in range(min(_SORTED, len(self._repinned))):
            slot, _ = self._repinned.popitem(last=False)
            if self._runs.holds(slot.offset):
                self._runs.let_go(slot.offset)
            else:
                self._runs.hold(slot.offset, slot.offset + self._space.length(slot.offset))

    def _widen(self, hole: int) -> int | None:
        """Evict the neighbour of a free range that was used less recently than the other.

        Returns where the free range begins now; None if it is gone, or both neighbours must stay.
        """
        beside = [self._places[offset] for offset in self._space.neighbours(hole)]
        beside = [slot for slot in beside if not slot._pins]
        return self._evict(min(beside, key=lambda slot: slot._used)) if beside else None

    def _victim(self, size: int) -> Slot | None:
        """Return the least recently used leaf in a run of this size, if it is soon found.

        Otherwise an object of a sample in such a run, there is one; None if it needs another look.
        """
        short: list[Slot] = []
        found, stale = None, False
        for _ in range(_LOOKS):
            leaves = self._leaves
            if self._mixed and (not leaves or self._mixed[0] < leaves[0]):
                leaves = self._mixed
            if not leaves:
                break
            used, slot = heappop(leaves)
            slot._queued = False
            if not self._is_evictable(slot):
                stale = True
            elif slot._used != used:
                stale = True
                self._queue(slot)
            elif self._is_in_run(slot.offset, size):
                found = slot
                break
            else:
                short.append(slot)
        for slot in short:
            self._queue(slot)
        return found if found is not None or stale else self._sampled(size)

    def _is_in_run(self, offset: int, size: int) -> bool:
        start, end = self._runs.around(offset)
        return end - start >= size

    def _sampled(self, size: int) -> Slot | None:
        """Return the least recently used of some objects side by side in a run, leaves first."""
        offset = self._hand
        end = self._runs.around(offset)[1]
        if offset == end or not self._space.divides(offset) or not self._is_in_run(offset, size):
            offset, end = self._runs.longest
        sample: list[Slot] = []
        while offset < end and len(sample) < _LOOKS:
            slot = self._places.get(offset)
            if slot is not None:
                sample.append(slot)
            offset += self._space.length(offset)
        self._hand = offset
        return min(sample, key=lambda slot: (slot.name in self._children, slot._used), default=None)

    def _evict(self, slot: Slot) -> int:
        """Evict an object; return where the free range begins that it was in."""
        self._evictions += 1
        self._evicted_bytes += slot.nbytes
        self._hide(slot)
        return self._free(slot)
