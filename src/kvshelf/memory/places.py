"""Where the objects of a host memory lie, and which of them are evicted for others.

Owns the range of memory, the slots in it, and the order of eviction; :mod:`.host_memory` owns
names, pins and the lock. It knows offsets, and touches no memory itself.

Contracts
---------
* *Leaves* are evicted, the least recently used first: an object stays while an object that names
  it as its parent is there. So the beginning of a prompt outlives its end. Where leaves with as
  many bytes as the new object were evicted and left only gaps too small for it, adjacent objects
  are evicted, the least recently used ones, leaves or not. So memory for an
  object of any size costs few evictions, whatever sizes came before it.
* If pinned objects leave no contiguous range (:mod:`.runs`) of its size, nothing is evicted, and
  the reservation fails. Leaves in ranges too short for the object stay too. Where most of the
  oldest leaves lie in such ranges, the order of eviction is that of a sample.
* It has no lock: its owner locks. No step takes much longer than a few evictions, however many
  objects there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from typing import Final

from kvshelf.memory.runs import Runs
from kvshelf.memory.size_classes import SizeClasses

#: Between two pauses, a thread that allocates evicts at most so many objects.
_STEPS: Final = 8
#: For one eviction, at most so many leaves are looked at, or neighbours in a run.
_LOOKS: Final = 16
#: In one step, so many changes of pins are sorted into the runs, or leaves into the queue.
_SORTED: Final = 4
#: Means that the allocation is not finished.
GO_ON: Final = -1


@dataclass(eq=False, slots=True)
class Budget:
    """The bytes that one owner has reserved at present, and the most it may have.

    Attributes
    ----------
    most, used : int
    """

    most: int
    used: int = 0

    def allows(self, nbytes: int) -> bool:
        """Whether `nbytes` more may be reserved; an owner without a reservation may have one."""
        return not self.used or self.used + nbytes <= self.most


class State(Enum):
    """The state of a slot."""

    RESERVED = 0
    #: It can be found.
    RESIDENT = 1
    #: Gone for lookups, but pinned.
    REMOVED = 2
    FREE = 3


@dataclass(eq=False, slots=True)
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
        How often a slot of this number has been freed before, see
        :meth:`~kvshelf.memory.host_memory.HostMemory.expire`.
    """

    name: Hashable
    parent: Hashable | None
    offset: int
    nbytes: int
    number: int
    generation: int
    #: Whose budget it takes while it is reserved.
    owner: Budget | None = None
    state: State = State.RESERVED
    #: While it is reserved, this includes the pin of its reserver.
    pins: int = 1
    #: The time of its last use, by the memory's clock.
    used: int = 0
    #: Whether it is in the queue of leaves.
    queued: bool = False
    #: Whether its name was forgotten while it was reserved.
    refused: bool = False

    def __repr__(self) -> str:
        return f"Slot({self.name!r}, {self.offset}, {self.nbytes} bytes)"


class Places:
    """The slots in a range of memory.

    Parameters
    ----------
    capacity, alignment, borders
        As for :class:`~kvshelf.memory.size_classes.SizeClasses`.

    Attributes
    ----------
    space : SizeClasses
        Which bytes are in use.
    """

    def __init__(self, capacity: int, *, alignment: int, borders: Sequence[int]) -> None:
        self.space = SizeClasses(capacity, alignment=alignment, borders=borders)
        #: All slots whose memory is not free.
        self._slots: dict[int, Slot] = {}
        #: Where nothing was pinned or reserved, apart from the slots that were pinned or unpinned
        #: since, in that order.
        self._runs = Runs(self.space.capacity)
        for gap in self.space.gaps:
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

    def enter(self, slot: Slot) -> None:
        """Add a reserved slot."""
        self._slots[slot.offset] = slot
        self.note_repinned(slot)

    def free(self, slot: Slot) -> int:
        """Free a slot; return the begin of the free range that it is part of now."""
        del self._slots[slot.offset]
        return self.space.free(slot.offset)

    def note_repinned(self, slot: Slot) -> None:
        """Note a slot's first pin, or the end of its last."""
        # The runs are only used when memory is full: most pins have ended by then.
        if slot in self._repinned:
            del self._repinned[slot]
        else:
            self._repinned[slot] = None

    def add_child(self, parent: Hashable) -> None:
        """Note an object that names `parent`."""
        self._children[parent] = self._children.get(parent, 0) + 1

    def remove_child(self, parent: Hashable) -> bool:
        """Note that the object is gone; return whether it was the last one."""
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]
        return not left

    def forget_leaves(self) -> object:
        """Forget the order of eviction; return containers that take long to free."""
        queues = self._leaves, self._mixed
        self._leaves, self._mixed = [], []
        return queues

    def _is_evictable(self, slot: Slot) -> bool:
        return slot.state is State.RESIDENT and not slot.pins and slot.name not in self._children

    def queue(self, slot: Slot) -> None:
        """Queue a slot for eviction if it is an unpinned leaf."""
        if slot.queued or slot.name in self._children:
            return
        slot.queued = True
        heappush(self._leaves, (slot.used, slot))
        if not self._mixed and len(self._leaves) > 2 * len(self._slots) + 64:
            # Slots that were removed are still in it.
            self._leaves, self._mixed = [], self._leaves
        for _ in range(min(_SORTED, len(self._mixed))):
            # Without its last entry the rest is still a heap.
            _, other = self._mixed.pop()
            other.queued = self._is_evictable(other)
            if other.queued:
                heappush(self._leaves, (other.used, other))

    def allocate(self, nbytes: int, evict: Callable[[Slot], int]) -> Iterator[int | None]:
        """Allocate memory for an object, evicting others if need be.

        Parameters
        ----------
        nbytes : int
        evict : Callable
            Removes an object and calls :meth:`free`; returns what that returns.

        Yields
        ------
        int or None
            The offset of the object's memory, or None if there is none, and then nothing more;
            ``GO_ON`` where the owner should release its lock before the next step.
        """
        size = self.space.rounded(nbytes)
        steps = evicted = 0
        hole: int | None = None
        while (offset := self.space.allocate(nbytes)) is None:
            steps += 1
            if steps % _STEPS == 0:
                yield GO_ON
                continue
            if self._repinned:
                self._sort_pins()
                continue
            start, end = self._runs.longest
            if end - start < size:
                break
            if hole is not None:
                hole = self._widen(hole, evict)
                if hole is not None:
                    continue
            victim = self._victim(size)
            if victim is None:
                continue
            side_by_side = evicted >= nbytes or victim.name in self._children
            evicted += victim.nbytes
            start = evict(victim)
            if side_by_side:
                hole = start
        yield offset

    def _sort_pins(self) -> None:
        """Update some of the runs to the current pins."""
        for _ in range(min(_SORTED, len(self._repinned))):
            slot, _ = self._repinned.popitem(last=False)
            if self._runs.holds(slot.offset):
                self._runs.let_go(slot.offset)
            else:
                self._runs.hold(slot.offset, slot.offset + self.space.length(slot.offset))

    def _widen(self, hole: int, evict: Callable[[Slot], int]) -> int | None:
        """Evict the neighbour of a free range that was used less recently than the other.

        Returns where the free range begins now; None if it is gone, or both neighbours must stay.
        """
        beside = [self._slots[offset] for offset in self.space.neighbours(hole)]
        beside = [slot for slot in beside if not slot.pins]
        return evict(min(beside, key=lambda slot: slot.used)) if beside else None

    def _victim(self, size: int) -> Slot | None:
        """Return the least recently used leaf in a run of this size, if it is found soon.

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
            slot.queued = False
            if not self._is_evictable(slot):
                stale = True
            elif slot.used != used:
                stale = True
                self.queue(slot)
            elif self._is_in_run(slot.offset, size):
                found = slot
                break
            else:
                short.append(slot)
        for slot in short:
            self.queue(slot)
        return found if found is not None or stale else self._sampled(size)

    def _is_in_run(self, offset: int, size: int) -> bool:
        start, end = self._runs.around(offset)
        return end - start >= size

    def _sampled(self, size: int) -> Slot | None:
        """Return the least recently used of some objects side by side in a run, leaves first."""
        offset = self._hand
        end = self._runs.around(offset)[1]
        if offset == end or not self.space.divides(offset) or not self._is_in_run(offset, size):
            offset, end = self._runs.longest
        sample: list[Slot] = []
        while offset < end and len(sample) < _LOOKS:
            slot = self._slots.get(offset)
            if slot is not None:
                sample.append(slot)
            offset += self.space.length(offset)
        self._hand = offset
        return min(sample, key=lambda slot: (slot.name in self._children, slot.used), default=None)
