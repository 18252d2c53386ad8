"""A bounded range of host memory as a ring of slots: where chunks are read, gathered and kept.

Owns which slot is free, filled or kept, who may take one, and what is evicted for it. Offsets
alone: :mod:`kvshelf.memory.chunk_memory` has the bytes.

A slot is *filling* from :meth:`Ring.claim` on, *sealed* from :meth:`Ring.seal` on, and free again
after its last :meth:`Ring.release`. A slot that *stays* is free when it is evicted or forgotten. A
hand goes round the ring and evicts slots that were not used since it last passed them (second
chance).

Contracts
---------
* A pinned slot keeps its bytes and its place. A name can be found once its slot is sealed; sealed
  bytes never change.
* Each kind of owner has a :class:`Share`. It pins at most the bytes of its share, and one slot in
  any case. *Spare* slots are for shares that may take them; no other share ever pins one.
* Who holds a slot never waits for another slot: only :meth:`Ring.claim` waits, for one slot, until
  a deadline. Loads need no wait. A load thread holds at most one slot that is filling, and there is
  a spare slot for each load thread; stores and what is read ahead never hold those. So a load goes
  on, whatever else hangs.
* A call looks at no more than ``looks`` slots at a time. A claim that is refused evicts nothing,
  except where one call cannot look at enough slots side by side: it merges those that it has seen,
  and a later call goes on behind them.
* Any thread may call all methods. One lock; nothing else is called with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: Offsets and sizes of slots are multiples of it, unless a ring has another alignment.
ALIGNMENT: Final = 4096
#: Slots that one call looks at: a quarter of a millisecond at worst.
LOOKS: Final = 700
#: Seconds until a claim that waits looks at further slots.
_SOON: Final = 0.001


def rounded(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Round a size up to a multiple of the alignment."""
    return -(-nbytes // alignment) * alignment


@dataclass(eq=False, slots=True)
class Slot:
    """A place in the ring. Only the ring writes to its fields, except for `was_loaded`.

    Attributes
    ----------
    offset, nbytes : int
        Where it lies; multiples of the ring's alignment.
    name : Hashable
        What can be found in it; None: nothing.
    size : int
        Bytes of its content.
    objects : int
        Number of objects in it, for counts.
    pins : int
        Holders. A *wall*, an empty slot that nothing lies across, has one for ever.
    is_sealed : bool
    stays : bool
        It keeps its content when nobody holds it, until it is evicted.
    is_used : bool
        It was used since the hand passed it.
    is_spare : bool
    was_loaded : bool
        A load has copied its content.
    """

    offset: int
    nbytes: int
    name: Hashable = None
    size: int = 0
    objects: int = 0
    pins: int = 0
    is_sealed: bool = False
    stays: bool = False
    is_used: bool = False
    is_spare: bool = False
    was_loaded: bool = False
    _next: Slot | None = field(default=None, repr=False)

    @property
    def next(self) -> Slot:
        """The slot behind it."""
        assert self._next is not None
        return self._next


@dataclass(eq=False, slots=True)
class Share:
    """What one kind of owner may pin of a ring.

    Attributes
    ----------
    limit : int
        Bytes.
    may_take_spares : bool
    pinned_bytes : int
    """

    limit: int
    may_take_spares: bool = False
    pinned_bytes: int = 0
    _pins: dict[Slot, int] = field(default_factory=dict)


class RingStats(NamedTuple):
    """What is in a ring, and what has been.

    Attributes
    ----------
    capacity, pinned_bytes, kept_bytes : int
        Bytes of all slots, of those that are pinned, and of those that stay.
    stored_objects, stored_bytes, evicted_objects, evicted_bytes : int
        What was kept and evicted so far.
    """

    capacity: int
    pinned_bytes: int
    kept_bytes: int
    stored_objects: int
    stored_bytes: int
    evicted_objects: int
    evicted_bytes: int


class Ring:
    """The slots of one range of memory.

    Parameters
    ----------
    on_end : Callable, optional
        Called once, when the ring is closed and no slot is pinned.
    alignment : int
        Offsets and sizes of slots are multiples of it.

    Attributes
    ----------
    capacity : int
        Bytes that :meth:`extend` has given it.
    spare_bytes : int
        Those of them that are spare slots.
    """

    def __init__(
        self, on_end: Callable[[], None] = lambda: None, *, alignment: int = ALIGNMENT
    ) -> None:
        self._alignment = alignment
        self.capacity = self.spare_bytes = 0
        self._on_end = on_end
        self._changed = threading.Condition()
        self._named: dict[Hashable, Slot] = {}
        self._filling: dict[Hashable, Slot] = {}
        self._closed = False
        self._pinned_slots = self._pinned_bytes = self._kept_bytes = 0
        self._stored = self._evicted = (0, 0)
        self._wall = Slot(0, 0, pins=1)
        self._wall._next = self._hand = self._wall
        self._count = 1
        #: Slots that were freed last, by their size: memory that was used lately is quicker.
        self._freed: dict[int, list[Slot]] = {}
        #: Spare slots that are free; sizes of all of them.
        self._spares: list[Slot] = []
        self._spare_sizes: list[int] = []
        #: Grows with each release: what found no room may find some then.
        self._changes = 0
        self._refused = (0, -1)

    # ------------------------------------------------------------- memory

    def extend(self, nbytes: int) -> None:
        """Add memory behind the end. No slot lies across the border."""
        with self._changed:
            start = self.capacity
            self.capacity += nbytes // self._alignment * self._alignment
            wall = Slot(self.capacity, 0, pins=1, _next=self._wall.next)
            fresh = Slot(start, self.capacity - start, _next=wall)
            self._wall._next = self._hand = fresh
            self._count += 2
            self._notify()

    def ensure_spares(self, counts: Mapping[int, int]) -> None:
        """Have spare slots, as far as there is room: so many of each size, in bytes."""
        with self._changed:
            sizes = [size for size, count in counts.items() for _ in range(count)]
            there = sorted(self._spare_sizes, reverse=True)
            for size in sorted(sizes, reverse=True):
                nbytes = rounded(size, self._alignment)
                if there and there[0] >= nbytes:
                    del there[0]
                    continue
                slot = self._find_room(nbytes, 1 << 62)
                if slot is None:
                    continue
                slot.is_spare, slot.pins = True, 1
                self._spares.append(slot)
                self._spare_sizes.append(slot.nbytes)
                self.spare_bytes += slot.nbytes

    # ------------------------------------------------------------- slots

    def claim(
        self,
        name: Hashable,
        size: int,
        share: Share,
        *,
        objects: int = 1,
        deadline: float = 0.0,
        looks: int = LOOKS,
    ) -> Slot | None:
        """Return a pinned slot: sealed if it holds `name`, otherwise to be filled.

        Parameters
        ----------
        name : Hashable
            What is about to be filled in. If another slot has the name, or is being filled for it,
            the slot gets no name, and can never be found.
        size : int
            Bytes.
        share : Share
        objects : int
            See :attr:`Slot.objects`.
        deadline : float
            Until when to wait for room, in seconds of :func:`time.monotonic`; 0: not at all.
        looks : int
            Slots that the call may look at; again and again while it waits.

        Returns
        -------
        Slot or None
            None: there is no room, or the ring is closed.
        """
        nbytes = rounded(size, self._alignment)
        with self._changed:
            while not self._closed:
                slot = self._named.get(name)
                if slot is not None and self._may_pin(slot, share):
                    slot.is_used = True
                    return self._pin(slot, share)
                if not share._pins or share.pinned_bytes + size <= share.limit:
                    slot = self._find_room(nbytes, looks) or self._take_spare(nbytes, share)
                    if slot is not None:
                        is_free = name not in self._filling and name not in self._named
                        slot.name = name if is_free else None
                        slot.size, slot.objects = size, objects
                        if slot.name is not None:
                            self._filling[slot.name] = slot
                        return self._pin(slot, share)
                remaining = deadline - time.monotonic() if deadline else 0.0
                if remaining <= 0:
                    return None
                # The rest of the slots is looked at soon.
                is_refused = self._refused[1] == self._changes
                self._changed.wait(remaining if is_refused else min(remaining, _SOON))
            return None

    def seal(self, slot: Slot, *, stays: bool) -> None:
        """Let the content of a filled slot be found; keep it after its last release if it stays."""
        with self._changed:
            slot.is_sealed = True
            if slot.name is not None and self._filling.get(slot.name) is slot:
                del self._filling[slot.name]
                self._named[slot.name] = slot
                self._keep(slot, stays)

    def find(self, name: Hashable, share: Share) -> Slot | None:
        """Return the sealed slot of a name, pinned and used; None if there is none."""
        with self._changed:
            slot = self._named.get(name)
            if slot is None or not self._may_pin(slot, share):
                return None
            slot.is_used = True
            return self._pin(slot, share)

    def pin(self, slot: Slot, share: Share, *, stays: bool = False) -> bool:
        """Pin a slot, which the caller holds, once more; let it stay if it `stays`.

        Returns
        -------
        bool
            False: the share has no room for it, it was to stay and its name is not found any more,
            or the ring is closed.
        """
        with self._changed:
            if (stays and self._named.get(slot.name) is not slot) or not self._may_pin(slot, share):
                return False
            self._keep(slot, stays)
            self._pin(slot, share)
            return True

    def holds(self, names: Sequence[Hashable]) -> list[bool]:
        """Return which names are found. Takes no lock."""
        return [name in self._named for name in names]

    @property
    def has_content(self) -> bool:
        """Whether any name is found."""
        return bool(self._named)

    def release(self, share: Share, slots: Iterable[Slot]) -> None:
        """End a pin of each slot."""
        with self._changed:
            for slot in slots:
                self._unpin(slot, share)
            self._notify()
            on_end = self._take_end()
        on_end()

    def forget(self, name: Hashable) -> bool:
        """Let a name be found no more, and what is being filled with it neither.

        A pinned slot is free after its last release. Returns whether the name was found.
        """
        with self._changed:
            self._filling.pop(name, None)
            slot = self._named.get(name)
            if slot is not None:
                self._lose(slot)
                if not slot.pins:
                    self._free(slot)
                self._notify()
            return slot is not None

    def abandon(self, slot: Slot) -> None:
        """Let a slot that is not sealed never be found: it is filled no further."""
        with self._changed:
            if not slot.is_sealed:
                self._lose(slot)

    def stats(self) -> RingStats:
        """Return what is here, and what has been."""
        with self._changed:
            return RingStats(
                self.capacity, self._pinned_bytes, self._kept_bytes, *self._stored, *self._evicted
            )

    def close(self) -> None:
        """Hand out nothing more, find nothing more, and wake who waits. Idempotent."""
        with self._changed:
            self._closed = True
            self._named.clear()
            self._filling.clear()
            self._notify()
            on_end = self._take_end()
        on_end()

    # ------------------------------------------------------------- inside, with the lock

    def _take_end(self) -> Callable[[], None]:
        """Return what to call without the lock: `on_end`, once, if nothing uses the memory."""
        if not self._closed or self._pinned_slots:
            return lambda: None
        on_end, self._on_end = self._on_end, lambda: None
        return on_end

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _may_pin(self, slot: Slot, share: Share) -> bool:
        if self._closed or (slot.is_spare and not share.may_take_spares):
            return False
        if slot in share._pins or not share._pins:
            return True
        return share.pinned_bytes + slot.size <= share.limit

    def _pin(self, slot: Slot, share: Share) -> Slot:
        pins = share._pins.get(slot, 0)
        share._pins[slot] = pins + 1
        if not pins:
            share.pinned_bytes += slot.size
        # A spare slot has one pin more, by which the hand passes it.
        if slot.pins == slot.is_spare:
            self._pinned_slots += 1
            self._pinned_bytes += slot.nbytes
        slot.pins += 1
        return slot

    def _unpin(self, slot: Slot, share: Share) -> None:
        pins = share._pins[slot] - 1
        if pins:
            share._pins[slot] = pins
        else:
            del share._pins[slot]
            share.pinned_bytes -= slot.size
        slot.pins -= 1
        if slot.pins == slot.is_spare:
            self._pinned_slots -= 1
            self._pinned_bytes -= slot.nbytes
            if not slot.stays:
                self._lose(slot)
                self._free(slot)

    def _keep(self, slot: Slot, stays: bool) -> None:
        """Note that a sealed slot stays, once; a spare one never does."""
        if stays and not slot.stays and not slot.is_spare:
            slot.stays = True
            self._kept_bytes += slot.size
            objects, nbytes = self._stored
            self._stored = objects + slot.objects, nbytes + slot.size

    def _lose(self, slot: Slot) -> None:
        """Let the content of a slot be found no more."""
        for table in (self._named, self._filling):
            if slot.name is not None and table.get(slot.name) is slot:
                del table[slot.name]
        if slot.stays:
            slot.stays = False
            self._kept_bytes -= slot.size

    def _free(self, slot: Slot) -> None:
        """Note that nobody holds a slot that is not found any more."""
        slot.name = None
        slot.is_sealed = slot.is_used = slot.was_loaded = False
        if slot.is_spare:
            self._spares.append(slot)
        else:
            self._freed.setdefault(slot.nbytes, []).append(slot)

    def _take_spare(self, nbytes: int, share: Share) -> Slot | None:
        """Return the smallest spare slot that is large enough, if the share may have it."""
        fitting = [slot for slot in self._spares if slot.nbytes >= nbytes]
        if not share.may_take_spares or not fitting:
            return None
        slot = min(fitting, key=lambda slot: slot.nbytes)
        self._spares.remove(slot)
        return slot

    def _find_room(self, nbytes: int, looks: int) -> Slot | None:
        """Return a free slot of this size: one that was just freed, or by eviction."""
        freed = self._freed.get(nbytes, [])
        while freed and looks > 0:
            slot = freed.pop()
            looks -= 1
            # It may have been taken, or be a part of another slot, since.
            if slot.nbytes == nbytes and not slot.pins and not slot.stays and not slot.is_spare:
                return slot
        if self._refused[1] == self._changes and nbytes >= self._refused[0]:
            return None
        return self._evict(nbytes, looks)

    def _evict(self, nbytes: int, looks: int) -> Slot | None:
        """Make one slot of what lies side by side behind the hand, and is not pinned or used."""
        first = slot = self._hand
        room = 0
        # The same with slots that were used; the first such run that is large enough serves where
        # no other does.
        first_used, room_used = slot, 0
        large_enough: tuple[Slot, Slot, int] | None = None
        # Two rounds clear all marks of use; a third one finds what lies across the beginning.
        scanned = min(looks, 3 * self._count)
        for _ in range(scanned):
            behind = slot.next
            if slot.pins:
                first_used, room_used = behind, 0
            else:
                room_used += slot.nbytes
            if slot.pins or slot.is_used:
                slot.is_used, first, room = False, behind, 0
            else:
                room += slot.nbytes
            slot = behind
            if room >= nbytes:
                return self._merge(first, slot, room, nbytes)
            if room_used >= nbytes and large_enough is None:
                large_enough = first_used, slot, room_used
        if scanned == 3 * self._count:
            self._refused = nbytes, self._changes
            return None
        if large_enough is not None:
            return self._merge(*large_enough, nbytes)
        if first is self._hand and room and scanned < self._count:
            # Slots so small that one call cannot look at enough of them: the next call begins with
            # one slot in their place.
            self._hand = self._merge(first, slot, room, room)
        else:
            self._hand = first
        return None

    def _merge(self, first: Slot, behind: Slot, room: int, nbytes: int) -> Slot:
        """Make a slot of `nbytes` of the slots from `first` up to `behind`, and one of the rest."""
        slot = first
        while slot is not behind:
            if slot.stays:
                objects, evicted = self._evicted
                self._evicted = objects + slot.objects, evicted + slot.size
            self._lose(slot)
            slot.name, slot.is_sealed, slot.is_used, slot.was_loaded = None, False, False, False
            # Slots inside are no slots any more.
            slot.nbytes = 0
            self._count -= 1
            slot = slot.next
        self._hand = behind
        if room > nbytes:
            self._hand = Slot(first.offset + nbytes, room - nbytes, _next=behind)
            self._count += 1
        first.nbytes, first._next = nbytes, self._hand
        self._count += 1
        return first
