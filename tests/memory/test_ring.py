"""A ring of slots: who gets which memory, what is evicted for it, and what is found."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvshelf.memory.ring import ALIGNMENT as PAGE
from kvshelf.memory.ring import LOOKS, Ring, Share, Slot, rounded

NAMES = tuple("abcdef")
EVERYTHING = 1 << 40
#: Alignment of the model's rings.
UNIT = 64
any_name = st.sampled_from(NAMES)
any_size = st.integers(1, 6 * UNIT)
any_share = st.sampled_from(["loads", "stores", "ahead"])
#: Orders of magnitude more than the slots of the model's rings, or as few as hide most of them.
any_looks = st.sampled_from([LOOKS, LOOKS, 3])
any_index = st.integers(0, 99)


def slots_of(ring: Ring) -> list[Slot]:
    """Return the slots of a ring as they follow each other, and the walls between them."""
    slots = [ring._wall]
    while (slot := slots[-1].next) is not ring._wall:
        slots.append(slot)
    return slots


def make_ring(pages: int) -> Ring:
    """Return a ring of so many pages."""
    ring = Ring()
    ring.extend(pages * PAGE)
    return ring


def keep(ring: Ring, *names: str) -> list[Slot]:
    """Fill slots of one page that stay, and release them; return them."""
    owner = Share(EVERYTHING)
    slots = []
    for name in names:
        slot = ring.claim(name, PAGE, owner)
        assert slot is not None
        ring.seal(slot, stays=True)
        ring.release(owner, [slot])
        slots.append(slot)
    return slots


def claim_all(ring: Ring, share: Share, pages: int = 1) -> list[Slot]:
    """Claim slots without names until none is left for the share."""
    slots: list[Slot] = []
    while (slot := ring.claim(None, pages * PAGE, share)) is not None:
        slots.append(slot)
    return slots


def found(ring: Ring, *names: str) -> set[str]:
    """Return which names are found."""
    return {name for name, is_found in zip(names, ring.holds(names), strict=True) if is_found}


@contextmanager
def looked_at() -> Iterator[dict[int, Slot]]:
    """Collect the slots of which anything is read, by their identities."""
    seen: dict[int, Slot] = {}
    read = object.__getattribute__

    def note(slot: Slot, name: str) -> Any:
        seen[id(slot)] = slot
        return read(slot, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "__getattribute__", note)
        yield seen


# ---------------------------------------------------------------------------------- any sequence


@dataclass(eq=False)
class _Content:
    """What a slot was claimed for.

    Attributes
    ----------
    slot : Slot
    size, objects : int
    place : tuple
        Offset and bytes of its slot at the claim.
    pins : Counter of str
        By the names of shares.
    """

    slot: Slot = field(repr=False)
    size: int
    objects: int
    place: tuple[int, int]
    pins: Counter[str] = field(default_factory=Counter)
    is_sealed: bool = False
    stays: bool = False


def _overlap(place: tuple[int, int], slot: Slot) -> bool:
    start, nbytes = place
    return start < slot.offset + slot.nbytes and slot.offset < start + nbytes


class _Model(RuleBasedStateMachine):
    """A ring, compared with a list of contents."""

    @initialize(units=st.integers(4, 20), spares=st.integers(0, 3))
    def start(self, units: int, spares: int) -> None:
        self.ends = 0
        self.ring = Ring(self.note_end, alignment=UNIT)
        self.borders = [0]
        self.shares = {
            "loads": Share(EVERYTHING, may_take_spares=True),
            "stores": Share(0),
            "ahead": Share(0),
        }
        #: What is pinned or stays.
        self.contents: list[_Content] = []
        self.found: dict[str, _Content] = {}
        self.filling: dict[str, _Content] = {}
        #: One entry for each pin.
        self.holds: list[tuple[_Content, str]] = []
        self.spares: list[Slot] = []
        #: Places of slots that were freed, and lie there still.
        self.freed: set[tuple[int, int]] = set()
        self.stored = self.evicted = (0, 0)
        self.is_closed = False
        self.serial = self.steps = 0
        self.extend(units)
        self.ensure_spares({2: spares})

    def note_end(self) -> None:
        self.ends += 1
        # The ring does not hold its lock.
        thread = threading.Thread(target=self.ring.stats)
        thread.start()
        thread.join()

    # ------------------------------------------------------------- what the model expects

    def of_share(self, share: str) -> list[_Content]:
        return [content for content in self.contents if content.pins[share]]

    def may_pin(self, content: _Content, share: str) -> bool:
        """Whether a share may hold a content, as far as its limit and spare slots say."""
        if content.slot.is_spare and not self.shares[share].may_take_spares:
            return False
        return content.pins[share] > 0 or self.fits(content.size, share)

    def fits(self, size: int, share: str) -> bool:
        pinned = self.of_share(share)
        used = sum(content.size for content in pinned)
        return not pinned or used + size <= self.shares[share].limit

    def largest_room(self, *, unused: bool = False) -> int:
        """Return the bytes of the largest range in which nothing is pinned, or used either."""
        largest = room = 0
        for slot in 2 * slots_of(self.ring):
            room = 0 if slot.pins or (unused and slot.is_used) else room + slot.nbytes
            largest = max(largest, room)
        return largest

    def free_spares(self) -> list[Slot]:
        taken = {content.slot for content in self.contents}
        return [slot for slot in self.spares if slot not in taken]

    def missing_spares(self, counts: dict[int, int]) -> Counter[int]:
        """Return how many spare slots of each size there should be more, beside larger ones."""
        missing: Counter[int] = Counter()
        needed = 0
        for units in sorted(counts, reverse=True):
            needed += counts[units]
            there = sum(slot.nbytes >= units * UNIT for slot in self.spares)
            missing[units] = max(0, needed - there)
            needed = min(needed, there)
        return missing

    def evict(self, content: _Content) -> None:
        assert not +content.pins, "memory that is pinned was given to another owner"
        assert content.stays
        objects, nbytes = self.evicted
        self.evicted = objects + content.objects, nbytes + content.size
        self.contents.remove(content)
        self.hide(content)

    def evict_below(self, slot: Slot) -> list[_Content]:
        """Note the eviction of what lay where a new slot lies, and return it."""
        contents = [content for content in self.contents if _overlap(content.place, slot)]
        for content in contents:
            self.evict(content)
        self.freed = {place for place in self.freed if not _overlap(place, slot)}
        return contents

    def hide(self, content: _Content) -> None:
        for table in (self.found, self.filling):
            for name in [name for name, named in table.items() if named is content]:
                del table[name]
        content.stays = False

    def note_stays(self, content: _Content) -> None:
        if not content.stays and not content.slot.is_spare:
            content.stays = True
            objects, nbytes = self.stored
            self.stored = objects + content.objects, nbytes + content.size

    def note_free(self, content: _Content) -> None:
        self.contents.remove(content)
        self.hide(content)
        if not content.slot.is_spare:
            self.freed.add(content.place)

    def hold(self, content: _Content, share: str) -> None:
        content.pins[share] += 1
        self.holds.append((content, share))

    # ------------------------------------------------------------- rules

    @precondition(lambda self: self.steps % 4 == 0 and self.borders[-1] < 64 * UNIT)
    @rule(units=st.integers(1, 8), more=st.integers(0, UNIT - 1))
    def extend(self, units: int, more: int = 0) -> None:
        self.ring.extend(units * UNIT + more)
        self.borders.append(self.borders[-1] + units * UNIT)
        self.shares["stores"].limit = self.shares["ahead"].limit = self.borders[-1] // 4

    @precondition(lambda self: self.steps % 4 == 1 and len(self.spares) < 4)
    @rule(counts=st.dictionaries(st.integers(1, 4), st.integers(1, 2), max_size=2))
    def ensure_spares(self, counts: dict[int, int]) -> None:
        missing = self.missing_spares(counts)
        self.ring.ensure_spares({units * UNIT - 1: count for units, count in counts.items()})
        fresh = [slot for slot in slots_of(self.ring) if slot.is_spare and slot not in self.spares]
        for slot in fresh:
            assert slot.nbytes // UNIT in counts
            self.evict_below(slot)
        assert len(fresh) <= missing.total()
        self.spares += fresh
        for units in +self.missing_spares(counts):
            assert self.largest_room() < units * UNIT

    @rule(name=st.none() | any_name, size=any_size, share=any_share, looks=any_looks)
    def claim(self, name: str | None, size: int, share: str, looks: int = LOOKS) -> None:
        self.serial += 1
        content = None if name is None else self.found.get(name)
        used = {content for content in self.contents if content.slot.is_used}
        unused_room = self.largest_room(unused=True)
        was_freed = any(nbytes == rounded(size, UNIT) for _, nbytes in self.freed)
        slot = self.ring.claim(
            name, size, self.shares[share], objects=1 + self.serial % 3, looks=looks
        )
        if content is not None and self.may_pin(content, share):
            assert slot is content.slot
            assert slot.is_used
            self.hold(content, share)
        elif slot is None:
            self.check_refusal(size, share, looks)
        else:
            evicted = self.note_claimed(slot, name, size, share, looks)
            if looks == LOOKS:
                assert not (was_freed and evicted), "a free slot of this size was not taken"
                has_room = unused_room >= rounded(size, UNIT)
                assert not (has_room and used.intersection(evicted)), "a used slot was evicted"

    def check_refusal(self, size: int, share: str, looks: int) -> None:
        """Check that a claim had to be refused, unless it could not look everywhere."""
        evicted = [content for content in self.contents if content.stays > content.slot.stays]
        if self.is_closed or not self.fits(size, share):
            assert not evicted
        elif looks < LOOKS:
            assert len(evicted) <= looks
            for content in evicted:
                self.evict(content)
        else:
            assert not evicted
            assert self.largest_room() < rounded(size, UNIT)
            if self.shares[share].may_take_spares:
                assert all(spare.nbytes < size for spare in self.free_spares())

    def note_claimed(
        self, slot: Slot, name: str | None, size: int, share: str, looks: int
    ) -> list[_Content]:
        """Check a slot that is to be filled; return what was evicted for it."""
        assert not self.is_closed
        assert self.fits(size, share)
        assert not (slot.is_sealed or slot.was_loaded or slot.stays or slot.is_used)
        assert (slot.size, slot.objects) == (size, 1 + self.serial % 3)
        assert slot.nbytes >= size
        if slot.is_spare:
            assert self.shares[share].may_take_spares
            assert self.largest_room() < rounded(size, UNIT) or looks < LOOKS
            large_enough = [spare.nbytes for spare in self.free_spares() if spare.nbytes >= size]
            assert slot.nbytes == min(large_enough)
        else:
            assert slot.nbytes == rounded(size, UNIT)
        evicted = self.evict_below(slot)
        content = _Content(slot, size, slot.objects, (slot.offset, slot.nbytes))
        self.contents.append(content)
        if name is None or name in self.found or name in self.filling:
            assert slot.name is None
        else:
            assert slot.name == name
            self.filling[name] = content
        self.hold(content, share)
        return evicted

    def taken_names(self) -> list[str]:
        """Return names that a new slot does not get, though some share cannot have the old one."""
        in_spares = {name for name, content in self.found.items() if content.slot.is_spare}
        return sorted(in_spares.union(self.filling))

    @precondition(lambda self: self.taken_names())
    @rule(index=any_index, size=any_size, share=any_share)
    def claim_taken_name(self, index: int, size: int, share: str) -> None:
        names = self.taken_names()
        self.claim(names[index % len(names)], size, share)

    @precondition(lambda self: any(not content.is_sealed for content, _ in self.holds))
    @rule(index=any_index, stays=st.booleans())
    def seal(self, index: int, stays: bool) -> None:
        contents = [content for content, _ in self.holds if not content.is_sealed]
        self.seal_content(contents[index % len(contents)], stays=stays)

    def seal_content(self, content: _Content, *, stays: bool) -> None:
        self.ring.seal(content.slot, stays=stays)
        content.is_sealed = content.slot.was_loaded = True
        for name in [name for name, named in self.filling.items() if named is content]:
            self.found[name] = self.filling.pop(name)
            if stays:
                self.note_stays(content)

    @rule(name=any_name, share=any_share)
    def find(self, name: str, share: str) -> None:
        content = self.found.get(name)
        slot = self.ring.find(name, self.shares[share])
        if content is None or not self.may_pin(content, share):
            assert slot is None
        else:
            assert slot is content.slot
            assert slot.is_used
            self.hold(content, share)

    @rule(name=any_name, size=any_size, share=any_share)
    def keep(self, name: str, size: int, share: str) -> None:
        """Claim, seal and release a slot that stays."""
        holds = len(self.holds)
        self.claim(name, size, share)
        for hold in self.holds[holds:]:
            if not hold[0].is_sealed:
                self.seal_content(hold[0], stays=True)
            self.let_go(share, [hold])

    @rule(name=any_name)
    def use(self, name: str) -> None:
        """Find and release a slot."""
        holds = len(self.holds)
        self.find(name, "loads")
        self.let_go("loads", self.holds[holds:])

    @precondition(lambda self: self.holds)
    @rule(index=any_index, share=any_share, stays=st.booleans())
    def pin(self, index: int, share: str, stays: bool) -> None:
        content, _ = self.holds[index % len(self.holds)]
        may_pin = self.may_pin(content, share) and not self.is_closed
        if stays and content not in self.found.values():
            may_pin = False
        assert self.ring.pin(content.slot, self.shares[share], stays=stays) == may_pin
        if may_pin:
            self.hold(content, share)
            if stays:
                self.note_stays(content)

    @precondition(lambda self: self.holds)
    @rule(index=any_index, count=st.integers(1, 6))
    def release(self, index: int, count: int) -> None:
        _, share = self.holds[index % len(self.holds)]
        self.let_go(share, [hold for hold in self.holds if hold[1] == share][-count:])

    def let_go(self, share: str, holds: list[tuple[_Content, str]]) -> None:
        self.ring.release(self.shares[share], [content.slot for content, _ in holds])
        for hold in holds:
            content = hold[0]
            self.holds.remove(hold)
            content.pins[share] -= 1
            if not +content.pins and not content.stays:
                self.note_free(content)

    @precondition(lambda self: self.steps % 8 == 7)
    @rule()
    def release_all(self) -> None:
        """Release all slots; then all memory but the spare slots can be had again."""
        for share in self.shares:
            self.let_go(share, [hold for hold in self.holds if hold[1] == share])
        if room := self.largest_room():
            self.claim(None, room, "loads")
            self.let_go("loads", self.holds[:])

    @rule(name=any_name)
    def forget(self, name: str) -> None:
        assert self.ring.forget(name) == (name in self.found)
        for table in (self.filling, self.found):
            content = table.get(name)
            if content is not None:
                self.hide(content)
                if not +content.pins:
                    self.note_free(content)

    @precondition(lambda self: self.steps > 45)
    @rule()
    def close(self) -> None:
        for _ in range(2):
            self.ring.close()
        self.is_closed = True
        self.found.clear()
        self.filling.clear()
        # Threads go on with what they hold.
        for content, _ in self.holds:
            self.seal_content(content, stays=True)

    # ------------------------------------------------------------- invariants

    @invariant()
    def slots_are_disjoint_and_cover_the_memory(self) -> None:
        self.steps += 1
        slots = slots_of(self.ring)
        places = sorted((slot.offset, slot.nbytes) for slot in slots)
        assert places[0][0] == 0
        assert sum(places[-1]) == self.borders[-1] == self.ring.capacity
        assert all(sum(place) == start for place, (start, _) in pairwise(places))
        # No slot lies across a border, and an empty one, which is always pinned, marks each.
        walls = [slot for slot in slots if not slot.nbytes]
        assert sorted(wall.offset for wall in walls) == self.borders
        assert all(wall.pins for wall in walls)
        assert {slot for slot in slots if slot.is_spare} == set(self.spares)
        assert self.ring.spare_bytes == sum(slot.nbytes for slot in self.spares)
        assert {content.slot for content in self.contents} <= set(slots)
        self.freed.intersection_update(places)

    @invariant()
    def contents_keep_their_places(self) -> None:
        for content in self.contents:
            slot = content.slot
            assert (slot.offset, slot.nbytes) == content.place
            assert (slot.is_sealed, slot.stays) == (content.is_sealed, content.stays)
            assert slot.pins == content.pins.total() + slot.is_spare
            # The slots behind it are not shown.
            assert len(repr(slot)) < 300

    @invariant()
    def shares_pin_no_more_than_they_may(self) -> None:
        for name, share in self.shares.items():
            pinned = self.of_share(name)
            assert share.pinned_bytes == sum(content.size for content in pinned)
            assert share.pinned_bytes <= share.limit or len(pinned) == 1
            assert share.may_take_spares or not any(content.slot.is_spare for content in pinned)

    @invariant()
    def names_are_found_if_they_were_sealed_and_not_lost(self) -> None:
        assert found(self.ring, *NAMES) == set(self.found)
        assert self.ring.has_content == bool(self.found)

    @invariant()
    def statistics_agree(self) -> None:
        assert self.ring.stats() == (
            self.borders[-1],
            sum(content.slot.nbytes for content in self.contents if +content.pins),
            sum(content.size for content in self.contents if content.stays),
            *self.stored,
            *self.evicted,
        )

    @invariant()
    def the_end_is_told_once(self) -> None:
        assert self.ends == (self.is_closed and not self.holds)

    def teardown(self) -> None:
        if hasattr(self, "ring"):
            self.ring.close()


Model = _Model.TestCase
Model.settings = settings(max_examples=200, stateful_step_count=60)


# --------------------------------------------------------------------------------------- looking


@pytest.mark.parametrize("looks", [64, LOOKS])
def test_refused_claim_with_many_slots_looks_at_no_more_than_it_may(looks: int) -> None:
    ring, share = make_ring(2_000), Share(EVERYTHING)
    ring.release(share, claim_all(ring, share))
    slots = claim_all(ring, share, pages=2)
    assert len(slots) == 1_000
    ring.release(share, slots[::2])
    # Slots of one page were freed and are used otherwise; four pages lie nowhere side by side.
    for pages in (1, 4):
        with looked_at() as looked:
            assert ring.claim(None, pages * PAGE, share, looks=looks) is None
        assert 0 < len(looked) <= looks


def test_claims_with_few_looks_reach_all_slots() -> None:
    ring, share = make_ring(1_000), Share(EVERYTHING)
    ring.release(share, claim_all(ring, share)[-2:])
    claimed = [ring.claim(None, 2 * PAGE, share, looks=64) for _ in range(2 * 1_000 // 64)]
    assert [slot.offset for slot in claimed if slot is not None] == [998 * PAGE]


@pytest.mark.parametrize("may_wait", [False, True])
@pytest.mark.parametrize("are_used", [False, True])
def test_claim_of_more_slots_than_one_call_looks_at_is_granted_after_few_calls(
    are_used: bool, may_wait: bool
) -> None:
    ring, share = make_ring(3_000), Share(EVERYTHING)
    names = [f"slot {number}" for number in range(3_000)]
    slots = keep(ring, *names)
    if are_used:
        assert [ring.find(name, share) for name in names] == slots
        ring.release(share, slots)
    deadline = time.monotonic() + 60 if may_wait else 0.0
    calls = 1 if may_wait else 10
    claims = (ring.claim(None, 2_000 * PAGE, share, deadline=deadline) for _ in range(calls))
    assert any(slot is not None for slot in claims)
    assert ring.stats().evicted_objects == 2_000


@pytest.mark.parametrize("pages", [300, 400, LOOKS - 2])
def test_refused_claim_of_a_call_that_looks_at_all_slots_evicts_nothing(pages: int) -> None:
    ring = make_ring(pages)
    keep(ring, *(f"slot {number}" for number in range(pages - 1)))
    # The slot right before those that are looked at first.
    assert ring.claim(None, PAGE, Share(0)) is not None
    assert [ring.claim(None, pages * PAGE, Share(0)) for _ in range(3)] == 3 * [None]
    assert ring.stats().evicted_objects == 0


def test_claim_that_looks_at_used_slots_alone_evicts_the_first_of_them() -> None:
    ring, share = make_ring(1_000), Share(EVERYTHING)
    names = [f"slot {number}" for number in range(1_000)]
    slots = keep(ring, *names)
    assert [ring.find(name, share) for name in names] == slots
    ring.release(share, [*slots[:1], *slots[2:]])
    claimed = ring.claim(None, 2 * PAGE, share, looks=64)
    assert claimed is not None
    assert claimed.offset == 2 * PAGE
    assert set(names) - found(ring, *names) == set(names[2:4])
    # The marks of those behind it are cleared: the next one is evicted at once.
    assert ring.claim(None, PAGE, share, looks=64) is slots[4]


# ----------------------------------------------------------------------------- which memory first


def test_claim_after_memory_was_added_takes_that_first() -> None:
    ring = make_ring(4)
    keep(ring, *"abcdx")
    ring.extend(4 * PAGE)
    keep(ring, *"efgh")
    assert found(ring, *"abcdefgh") == set("bcdefgh")


def test_claim_of_a_size_takes_the_slot_of_it_that_was_freed_last() -> None:
    ring, shares = make_ring(64), (Share(3 * PAGE), Share(6 * PAGE))
    (forgotten,) = keep(ring, "a")
    small, large = (claim_all(ring, share, pages) for pages, share in enumerate(shares, 1))
    ring.release(shares[0], [small[0], small[1]])
    ring.release(shares[1], [large[2], large[0]])
    assert ring.forget("a")
    claimed = [ring.claim(None, pages * PAGE, Share(0)) for pages in (1, 2, 1, 2, 1)]
    assert claimed == [forgotten, large[0], small[1], large[2], small[0]]


# --------------------------------------------------------------------------------------- waiting


def claim_late(
    ring: Ring, share: Share, pages: int, event: Callable[[], object]
) -> tuple[Slot | None, int]:
    """Wait for a slot for 20 seconds at most; after five of them `event` is called.

    Returns the slot, and how many seconds it took.
    """

    def run() -> None:
        threading.Event().wait(5)
        event()

    thread = threading.Thread(target=run)
    thread.start()
    begin = time.monotonic()
    slot = ring.claim("late", pages * PAGE, share, deadline=begin + 20)
    seconds = int(time.monotonic() - begin)
    thread.join()
    return slot, seconds


@pytest.mark.parametrize(
    ("event", "is_own", "is_granted", "seconds"),
    [
        ("release", False, True, 5),
        ("release", True, True, 5),
        ("extend", False, True, 5),
        ("close", False, False, 5),
        ("nothing", False, False, 20),
    ],
)
def test_claim_with_deadline_ends_when_something_changed_or_is_over(
    event: str, is_own: bool, is_granted: bool, seconds: int
) -> None:
    ring, share = make_ring(5), Share(4 * PAGE)
    slots = claim_all(ring, share)
    assert len(slots) == 4
    events: dict[str, Callable[[], object]] = {
        "release": lambda: ring.release(share, slots[2:]),
        "extend": lambda: ring.extend(2 * PAGE),
        "close": ring.close,
        "nothing": lambda: None,
    }
    slot, waited = claim_late(ring, share if is_own else Share(0), 2, events[event])
    assert (slot is not None, waited) == (is_granted, seconds)


def test_claim_that_waits_for_much_memory_holds_up_no_other() -> None:
    ring, share = make_ring(4), Share(EVERYTHING)
    slots = claim_all(ring, share)
    claimed = []

    def release() -> None:
        ring.release(share, slots[:1])
        claimed.append(ring.claim(None, PAGE, share))
        ring.release(share, slots[1:3])

    slot, _ = claim_late(ring, Share(0), 2, release)
    assert slot is not None
    assert claimed == slots[:1]
