"""A ring of slots: who gets which memory, what is evicted for it, and what is found."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
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
any_name = st.sampled_from(NAMES)
any_size = st.integers(1, 6 * PAGE)
any_share = st.sampled_from(["loads", "stores", "ahead"])
#: Orders of magnitude more than the slots of the machine's ring, or as few as hide most of them.
any_looks = st.sampled_from([LOOKS, LOOKS, 3])


def slots_of(ring: Ring) -> list[Slot]:
    """Return the slots of a ring as they follow each other, and the walls between them."""
    slots = [ring._wall]
    while (slot := slots[-1].next) is not ring._wall:
        slots.append(slot)
    return slots


def make_ring(*pages: int) -> Ring:
    """Return a ring of ranges of so many pages."""
    ring = Ring()
    for count in pages:
        ring.extend(count * PAGE)
    return ring


def keep(ring: Ring, *names: str, share: Share | None = None, pages: int = 1) -> list[Slot]:
    """Fill slots that stay, and release them; return them."""
    owner = Share(EVERYTHING) if share is None else share
    slots = []
    for name in names:
        slot = ring.claim(name, pages * PAGE, owner)
        assert slot is not None
        ring.seal(slot, stays=True)
        ring.release(owner, [slot])
        slots.append(slot)
    return slots


def claim_all(ring: Ring, share: Share, pages: int = 1, limit: int = 1 << 30) -> list[Slot]:
    """Claim slots without names until none is left for the share, or so many."""
    slots: list[Slot] = []
    while len(slots) < limit and (slot := ring.claim(None, pages * PAGE, share)) is not None:
        slots.append(slot)
    return slots


def found(ring: Ring, *names: str) -> set[str]:
    """Return which names are found."""
    return {name for name, here in zip(names, ring.holds(names), strict=True) if here}


@contextmanager
def looked_at() -> Iterator[list[Slot]]:
    """Collect the slots of which anything is read; each counts once."""
    seen: dict[int, Slot] = {}
    read = object.__getattribute__

    def note(slot: Slot, name: str) -> Any:
        seen[id(slot)] = slot
        return read(slot, name)

    slots: list[Slot] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slot, "__getattribute__", note)
        try:
            yield slots
        finally:
            slots += seen.values()


# ---------------------------------------------------------------------------------- any sequence


@dataclass(eq=False)
class _Content:
    """What a slot was claimed for.

    Attributes
    ----------
    slot : Slot
    name : str or None
        Under which it is or will be found.
    image : bytes
        Its bytes from the claim on.
    place : tuple
        Offset and bytes of its slot at the claim.
    pins : Counter of str
        By the names of shares.
    """

    slot: Slot = field(repr=False)
    name: str | None
    image: bytes = field(repr=False)
    objects: int
    place: tuple[int, int]
    pins: Counter[str] = field(default_factory=Counter)
    is_sealed: bool = False
    stays: bool = False

    @property
    def size(self) -> int:
        return len(self.image)

    def overlaps(self, slot: Slot) -> bool:
        start, nbytes = self.place
        return start < slot.offset + slot.nbytes and slot.offset < start + nbytes


class _Model(RuleBasedStateMachine):
    """A ring, compared with a list of contents; the bytes are a bytearray."""

    @initialize(pages=st.integers(4, 20), spares=st.integers(0, 3))
    def start(self, pages: int, spares: int) -> None:
        self.ends = 0
        self.ring = Ring(self.note_end)
        self.memory = bytearray()
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
        self.stored = self.evicted = (0, 0)
        self.is_closed = False
        self.serial = self.steps = 0
        self.extend(pages)
        self.ensure_spares({2: spares})

    def note_end(self) -> None:
        self.ends += 1

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

    def largest_room(self) -> int:
        """Return the bytes of the largest range in which nothing is pinned."""
        largest = room = 0
        for slot in 2 * slots_of(self.ring):
            room = 0 if slot.pins else room + slot.nbytes
            largest = max(largest, room)
        return largest

    def lose_below(self, slot: Slot) -> None:
        """Note the eviction of what lay where a new slot lies."""
        for content in [content for content in self.contents if content.overlaps(slot)]:
            assert not +content.pins, "memory that is pinned was given to another owner"
            assert content.stays
            objects, nbytes = self.evicted
            self.evicted = objects + content.objects, nbytes + content.size
            self.drop(content)

    def drop(self, content: _Content) -> None:
        self.contents.remove(content)
        self.hide(content)

    def hide(self, content: _Content) -> None:
        for table in (self.found, self.filling):
            if content.name is not None and table.get(content.name) is content:
                del table[content.name]
        content.stays = False

    def note_stays(self, content: _Content) -> None:
        if not content.stays and not content.slot.is_spare:
            content.stays = True
            objects, nbytes = self.stored
            self.stored = objects + content.objects, nbytes + content.size

    def hold(self, content: _Content, share: str) -> None:
        content.pins[share] += 1
        self.holds.append((content, share))
        self.check_bytes(content)

    def check_bytes(self, content: _Content) -> None:
        slot = content.slot
        assert (slot.offset, slot.nbytes) == content.place, "a slot has moved"
        assert self.memory[slot.offset : slot.offset + content.size] == content.image

    # ------------------------------------------------------------- rules

    @precondition(lambda self: self.steps % 4 == 0 and len(self.memory) < 64 * PAGE)
    @rule(pages=st.integers(1, 8), more=st.integers(0, PAGE - 1))
    def extend(self, pages: int, more: int = 0) -> None:
        self.ring.extend(pages * PAGE + more)
        self.memory += bytes(pages * PAGE)
        self.borders.append(len(self.memory))
        self.shares["stores"].limit = self.shares["ahead"].limit = len(self.memory) // 4

    @precondition(lambda self: self.steps % 4 == 1 and len(self.spares) < 4)
    @rule(counts=st.dictionaries(st.integers(1, 4), st.integers(1, 2), max_size=2))
    def ensure_spares(self, counts: dict[int, int]) -> None:
        self.ring.ensure_spares({pages * PAGE - 1: count for pages, count in counts.items()})
        fresh = [slot for slot in slots_of(self.ring) if slot.is_spare and slot not in self.spares]
        for slot in fresh:
            assert slot.nbytes // PAGE in counts
            self.lose_below(slot)
        self.spares += fresh
        # Each size has its slots, beside those of larger sizes, unless there is no room.
        needed = 0
        for pages in sorted(counts, reverse=True):
            there = sum(slot.nbytes >= pages * PAGE for slot in self.spares)
            needed += counts[pages]
            assert there >= needed or self.largest_room() < pages * PAGE
            needed = min(needed, there)
        assert len(fresh) <= sum(counts.values())

    @rule(name=st.none() | any_name, size=any_size, share=any_share, looks=any_looks)
    def claim(self, name: str | None, size: int, share: str, looks: int = LOOKS) -> None:
        self.serial += 1
        objects = 1 + self.serial % 3
        known = None if name is None else self.found.get(name)
        slot = self.ring.claim(name, size, self.shares[share], objects=objects, looks=looks)
        if known is not None and self.may_pin(known, share):
            assert slot is known.slot
            self.hold(known, share)
        elif slot is None:
            self.check_refusal(size, share, looks)
        else:
            self.note_claimed(slot, name, size, objects, share, looks)

    def check_refusal(self, size: int, share: str, looks: int) -> None:
        """Check that a claim had to be refused, unless it could not look everywhere."""
        if self.is_closed or not self.fits(size, share) or looks < LOOKS:
            return
        assert self.largest_room() < rounded(size)
        if self.shares[share].may_take_spares:
            held = [content.slot for content in self.contents]
            assert all(slot in held or slot.nbytes < size for slot in self.spares)

    def note_claimed(
        self, slot: Slot, name: str | None, size: int, objects: int, share: str, looks: int
    ) -> None:
        assert not self.is_closed
        assert self.fits(size, share)
        assert not slot.is_sealed and not slot.was_loaded
        assert (slot.size, slot.objects) == (size, objects)
        if slot.is_spare:
            assert self.shares[share].may_take_spares
            assert self.largest_room() < rounded(size) or looks < LOOKS
        else:
            assert slot.nbytes == rounded(size)
        assert slot.nbytes >= size
        self.lose_below(slot)
        is_free = name not in self.found and name not in self.filling
        assert slot.name == (name if is_free else None)
        image = (self.serial.to_bytes(4, "big") * size)[:size]
        self.memory[slot.offset : slot.offset + size] = image
        place = slot.offset, slot.nbytes
        content = _Content(slot, slot.name if is_free else None, image, objects, place)
        self.contents.append(content)
        if content.name is not None:
            self.filling[content.name] = content
        self.hold(content, share)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), size=any_size, share=any_share)
    def claim_what_is_being_filled(self, data: st.DataObject, size: int, share: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.filling)))
        self.claim(name, size, share)

    @precondition(lambda self: any(not content.is_sealed for content, _ in self.holds))
    @rule(data=st.data(), stays=st.booleans())
    def seal(self, data: st.DataObject, stays: bool) -> None:
        filled = [content for content, _ in self.holds if not content.is_sealed]
        self.seal_content(data.draw(st.sampled_from(filled)), stays=stays)

    def seal_content(self, content: _Content, *, stays: bool) -> None:
        self.ring.seal(content.slot, stays=stays)
        content.is_sealed = True
        if content.name is not None and self.filling.get(content.name) is content:
            del self.filling[content.name]
            self.found[content.name] = content
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
        self.let_go("loads", self.holds[holds:], was_loaded=True)

    @precondition(lambda self: any(content.is_sealed for content, _ in self.holds))
    @rule(data=st.data(), share=any_share)
    def pin(self, data: st.DataObject, share: str) -> None:
        sealed = [content for content, _ in self.holds if content.is_sealed]
        content = data.draw(st.sampled_from(sealed))
        is_found = content.name is not None and self.found.get(content.name) is content
        may_pin = is_found and self.may_pin(content, share)
        assert self.ring.pin(content.slot, self.shares[share]) == may_pin
        if may_pin:
            self.note_stays(content)
            self.hold(content, share)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), count=st.integers(1, 6), was_loaded=st.booleans())
    def release(self, data: st.DataObject, count: int, was_loaded: bool) -> None:
        _, share = data.draw(st.sampled_from(self.holds))
        pins = [hold for hold in self.holds if hold[1] == share][-count:]
        self.let_go(share, pins, was_loaded=was_loaded)

    def let_go(
        self, share: str, pins: list[tuple[_Content, str]], *, was_loaded: bool = False
    ) -> None:
        for content, _ in pins:
            self.check_bytes(content)
            if content.is_sealed and was_loaded:
                content.slot.was_loaded = True
        self.ring.release(self.shares[share], [content.slot for content, _ in pins])
        for pin in pins:
            content = pin[0]
            self.holds.remove(pin)
            content.pins[share] -= 1
            if not +content.pins and not content.stays:
                self.drop(content)

    @rule(name=any_name)
    def forget(self, name: str) -> None:
        assert self.ring.forget(name) == (name in self.found)
        for table in (self.filling, self.found):
            content = table.get(name)
            if content is not None:
                self.hide(content)
                content.name = None
                if not +content.pins:
                    self.contents.remove(content)

    @precondition(lambda self: self.steps > 70)
    @rule()
    def close(self) -> None:
        self.ring.close()
        self.is_closed = True
        self.found.clear()
        self.filling.clear()
        for content in self.contents:
            content.name = None

    # ------------------------------------------------------------- invariants

    @invariant()
    def slots_are_disjoint_and_cover_the_memory(self) -> None:
        self.steps += 1
        slots = slots_of(self.ring)
        ranges = sorted((slot.offset, slot.offset + slot.nbytes) for slot in slots)
        assert ranges[0][0] == 0
        assert ranges[-1][1] == len(self.memory) == self.ring.capacity
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        # No slot lies across a border, and an empty one, which is always pinned, marks each.
        walls = [slot for slot in slots if not slot.nbytes]
        assert sorted(wall.offset for wall in walls) == self.borders
        assert all(wall.pins for wall in walls)
        assert [slot for slot in slots if slot.is_spare] == [
            slot for slot in slots if slot in self.spares
        ]
        assert self.ring.spare_bytes == sum(slot.nbytes for slot in self.spares)
        assert {content.slot for content in self.contents} <= set(slots)

    @invariant()
    def contents_keep_their_bytes(self) -> None:
        for content in self.contents:
            self.check_bytes(content)
            assert content.slot.is_sealed == content.is_sealed
            assert content.slot.pins == content.pins.total() + content.slot.is_spare

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
        stats = self.ring.stats()
        pinned = [content for content in self.contents if +content.pins]
        assert stats.capacity == len(self.memory)
        assert stats.pinned_bytes == sum(content.slot.nbytes for content in pinned)
        assert stats[-4:] == (*self.stored, *self.evicted)
        if not self.is_closed:
            kept = [content for content in self.contents if content.stays]
            assert stats.kept_bytes == sum(content.size for content in kept)

    @invariant()
    def the_end_is_told_once(self) -> None:
        assert self.ends == (self.is_closed and not self.holds)

    def teardown(self) -> None:
        if not hasattr(self, "ring"):
            return
        for share in self.shares:
            self.let_go(share, [hold for hold in self.holds if hold[1] == share])
        self.statistics_agree()
        assert not self.ring.stats().pinned_bytes
        if not self.is_closed:
            # All memory but the spare slots can be had again.
            room = self.largest_room()
            assert room or self.spares
            assert not room or self.ring.claim(None, room, Share(0)) is not None
        self.ring.close()


Model = _Model.TestCase
Model.settings = settings(max_examples=12, stateful_step_count=40)


# --------------------------------------------------------------------------------------- looking


@pytest.mark.parametrize("looks", [64, LOOKS])
def test_claim_with_every_second_slot_pinned_looks_at_few_slots(looks: int) -> None:
    ring, share = make_ring(20_000), Share(EVERYTHING)
    slots = claim_all(ring, share)
    assert len(slots) == 20_000
    ring.release(share, slots[::2])
    with looked_at() as looked:
        assert ring.claim(None, 2 * PAGE, share, looks=looks) is None
    assert 0 < len(looked) <= looks


def test_claim_of_a_size_whose_freed_slots_are_used_otherwise_looks_at_few_slots() -> None:
    ring, share = make_ring(1_000), Share(EVERYTHING)
    ring.release(share, claim_all(ring, share))
    assert len(claim_all(ring, share, pages=2)) == 500
    with looked_at() as looked:
        assert ring.claim(None, PAGE, share, looks=64) is None
    assert len(looked) <= 64


def test_claims_that_look_at_few_slots_reach_all_of_them() -> None:
    ring, share = make_ring(1_000), Share(EVERYTHING)
    slots = claim_all(ring, share)
    ring.release(share, slots[-2:])
    claimed = [ring.claim(None, 2 * PAGE, share, looks=64) for _ in range(2 * 1_000 // 64)]
    assert [slot.offset for slot in claimed if slot is not None] == [998 * PAGE]


def test_claim_after_a_refused_one_is_tried_again_when_memory_became_free() -> None:
    ring, share = make_ring(4), Share(EVERYTHING)
    slots = claim_all(ring, share)
    assert ring.claim(None, 2 * PAGE, share) is None
    ring.release(share, slots[:2])
    assert ring.claim(None, 2 * PAGE, share) is not None


# -------------------------------------------------------------------------------------- eviction


def test_claim_that_finds_no_room_evicts_nothing() -> None:
    ring, share = make_ring(8), Share(EVERYTHING)
    keep(ring, *"abcdefgh")
    pinned = ring.find("d", share)
    assert pinned is not None
    assert ring.claim("new", 5 * PAGE, Share(EVERYTHING)) is None
    assert found(ring, *"abcdefgh") == set("abcdefgh")
    ring.release(share, [pinned])
    assert ring.stats().evicted_objects == 0


def test_claim_beyond_the_share_evicts_nothing() -> None:
    ring, share = make_ring(4), Share(PAGE)
    keep(ring, *"abcd")
    assert ring.find("a", share) is not None
    assert ring.claim("new", PAGE, share) is None
    assert found(ring, *"abcd") == set("abcd")


def test_claim_with_free_memory_evicts_nothing() -> None:
    ring, share = make_ring(8), Share(EVERYTHING)
    for name in "abcdefgh":
        slot = ring.claim(name, PAGE, share)
        assert slot is not None
        ring.seal(slot, stays=name in "abcd")
        ring.release(share, [slot])
    keep(ring, *"efgh")
    assert found(ring, *"abcdefgh") == set("abcdefgh")


def test_added_memory_is_used_before_anything_is_evicted() -> None:
    ring = make_ring(4)
    keep(ring, *"abcdx")
    ring.extend(4 * PAGE)
    keep(ring, *"efgh")
    assert found(ring, *"abcdefgh") == set("bcdefgh")


def test_slot_that_was_used_survives_one_that_was_not() -> None:
    ring, share = make_ring(4), Share(EVERYTHING)
    keep(ring, *"abcd")
    for name in "acd":
        used = ring.find(name, share)
        assert used is not None
        ring.release(share, [used])
    keep(ring, "new")
    assert found(ring, *"abcd", "new") == {*"acd", "new"}
    stats = ring.stats()
    assert (stats.evicted_objects, stats.evicted_bytes) == (1, PAGE)


def test_claim_that_looks_at_used_slots_alone_evicts_the_first_of_them() -> None:
    ring, share = make_ring(1_000), Share(EVERYTHING)
    names = [f"slot {number}" for number in range(1_000)]
    slots = keep(ring, *names)
    pinned = [ring.find(name, share) for name in names]
    assert pinned == slots
    ring.release(share, [*slots[:1], *slots[2:]])
    claimed = ring.claim(None, 2 * PAGE, share, looks=64)
    assert claimed is not None
    assert claimed.offset == 2 * PAGE
    assert set(names) - found(ring, *names) == set(names[2:4])
    assert sorted(slot.nbytes // PAGE for slot in slots_of(ring))[-2:] == [1, 2]
    # The marks of those behind it are cleared: the next one is evicted at once.
    assert ring.claim(None, PAGE, share, looks=64) is slots[4]


def test_slot_that_is_used_no_more_is_evicted_at_the_second_visit() -> None:
    ring, share = make_ring(2), Share(EVERYTHING)
    keep(ring, "a", "b")
    used = ring.find("a", share)
    assert used is not None
    ring.release(share, [used])
    keep(ring, "c")
    assert found(ring, *"abc") == set("ac")
    keep(ring, "d")
    assert found(ring, *"acd") == set("cd")


def test_claim_of_all_memory_with_used_slots_and_the_hand_among_them_succeeds() -> None:
    ring, share = make_ring(4), Share(EVERYTHING)
    keep(ring, *"abcd", "new")
    for name in (*"bcd", "new"):
        used = ring.find(name, share)
        assert used is not None
        ring.release(share, [used])
    assert ring.claim(None, 4 * PAGE, share) is not None


def test_claim_of_what_is_there_counts_as_a_use() -> None:
    ring, share = make_ring(2), Share(EVERYTHING)
    (first, _) = keep(ring, "a", "b")
    again = ring.claim("a", PAGE, share)
    assert again is first
    assert again.is_sealed
    ring.release(share, [again])
    keep(ring, "c")
    assert found(ring, *"abc") == set("ac")


def test_large_claim_takes_the_place_of_small_slots_side_by_side() -> None:
    ring = make_ring(6)
    keep(ring, *"abcdef")
    (large,) = keep(ring, "large", pages=3)
    assert (large.offset, large.nbytes) == (0, 3 * PAGE)
    assert found(ring, *"abcdef", "large") == {*"def", "large"}
    assert ring.stats()[2:] == (6 * PAGE, 7, 9 * PAGE, 3, 3 * PAGE)


def test_no_slot_lies_across_a_border() -> None:
    ring, share = make_ring(3, 3), Share(EVERYTHING)
    slots = claim_all(ring, share, pages=2)
    assert [slot.offset for slot in slots] == [3 * PAGE, 0]
    ring.release(share, slots)
    assert ring.claim(None, 4 * PAGE, share) is None
    assert ring.claim(None, 3 * PAGE, share) is not None


# ----------------------------------------------------------------------------------- freed memory


def test_slot_that_was_freed_is_handed_out_again_first() -> None:
    ring, share = make_ring(64), Share(EVERYTHING)
    offsets = set()
    for name in range(1_000):
        slot = ring.claim(name, PAGE, share)
        assert slot is not None
        offsets.add(slot.offset)
        ring.seal(slot, stays=False)
        ring.release(share, [slot])
    assert len(offsets) == 1


def test_slots_of_two_sizes_that_were_freed_last_are_handed_out_first() -> None:
    ring, share = make_ring(64), Share(EVERYTHING)
    small = claim_all(ring, share, limit=3)
    large = claim_all(ring, share, pages=2, limit=3)
    ring.release(share, [small[0], large[2], small[1], large[0]])
    claimed = [ring.claim(None, pages * PAGE, share) for pages in (1, 2, 1, 2)]
    assert claimed == [small[1], large[0], small[0], large[2]]


def test_slot_that_is_forgotten_is_handed_out_again_first() -> None:
    ring, share = make_ring(8), Share(EVERYTHING)
    _, slot, _ = keep(ring, *"abc")
    assert ring.forget("b")
    assert ring.claim("d", PAGE, share) is slot
    assert found(ring, *"abc") == set("ac")


def test_slot_among_many_is_shown_in_few_words() -> None:
    ring, share = make_ring(2_000), Share(EVERYTHING)
    slot = claim_all(ring, share)[0]
    assert len(repr(slot)) < 1_000


def test_slot_that_is_used_again_says_nothing_of_its_last_content() -> None:
    ring, share = make_ring(1), Share(EVERYTHING)
    (slot,) = keep(ring, "a")
    slot.was_loaded = True
    assert ring.forget("a")
    again = ring.claim("b", PAGE - 1, share, objects=3)
    assert again is slot
    assert not (again.was_loaded or again.is_sealed or again.stays or again.is_used)
    assert (again.name, again.size, again.objects) == ("b", PAGE - 1, 3)


# --------------------------------------------------------------------------------------- waiting


class Waiting:
    """A thread that claims a slot, waiting for 20 seconds; and when it had an answer."""

    def __init__(self, ring: Ring, share: Share, pages: int = 1) -> None:
        self.began = time.monotonic()
        self.slot: Slot | None = None
        self.ended: float | None = None
        self._claim = (ring, share, pages)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        # Until it waits.
        threading.Event().wait(5)
        assert self.ended is None

    def _run(self) -> None:
        ring, share, pages = self._claim
        self.slot = ring.claim("late", pages * PAGE, share, deadline=self.began + 20)
        self.ended = time.monotonic() - self.began

    def join(self) -> Slot | None:
        self._thread.join()
        return self.slot

    @property
    def seconds(self) -> int:
        assert self.ended is not None
        return int(self.ended)


def test_claim_with_deadline_ends_when_memory_is_released() -> None:
    ring, share = make_ring(2), Share(EVERYTHING)
    first, _ = claim_all(ring, share)
    waiting = Waiting(ring, Share(PAGE))
    ring.release(share, [first])
    assert waiting.join() is first
    assert waiting.seconds == 5


def test_claim_with_deadline_ends_when_its_share_has_room() -> None:
    ring, share = make_ring(4), Share(2 * PAGE)
    first, _ = claim_all(ring, share)
    waiting = Waiting(ring, share)
    ring.release(share, [first])
    assert waiting.join() is not None
    assert waiting.seconds == 5


def test_claim_with_deadline_ends_when_memory_is_forgotten_or_added() -> None:
    ring, share = make_ring(2), Share(EVERYTHING)
    keep(ring, "a")
    claim_all(ring, share, limit=1)
    waiting = Waiting(ring, Share(0), pages=2)
    assert ring.forget("a")
    ring.extend(2 * PAGE)
    assert waiting.join() is not None
    assert waiting.seconds == 5


def test_claim_with_deadline_ends_when_the_ring_is_closed() -> None:
    ring, share = make_ring(1), Share(EVERYTHING)
    claim_all(ring, share)
    waiting = Waiting(ring, Share(0))
    ring.close()
    assert waiting.join() is None
    assert waiting.seconds == 5


def test_claim_for_which_nothing_is_released_ends_at_its_deadline() -> None:
    ring, share = make_ring(1), Share(EVERYTHING)
    claim_all(ring, share)
    waiting = Waiting(ring, Share(0))
    assert waiting.join() is None
    assert waiting.seconds == 20


def test_claim_that_waits_for_much_memory_holds_no_other_up() -> None:
    ring, share = make_ring(4), Share(EVERYTHING)
    slots = claim_all(ring, share)
    waiting = Waiting(ring, Share(0), pages=2)
    ring.release(share, slots[:1])
    assert ring.claim(None, PAGE, share) is slots[0]
    ring.release(share, slots[1:3])
    assert waiting.join() is not None


def test_claim_without_deadline_never_waits() -> None:
    ring, share = make_ring(1), Share(EVERYTHING)
    claim_all(ring, share)
    begin = time.monotonic()
    assert ring.claim("late", PAGE, Share(0)) is None
    assert time.monotonic() - begin < 0.1


# ----------------------------------------------------------------------------------------- names


def test_slot_claimed_for_what_is_being_filled_is_never_found() -> None:
    ring, share = make_ring(4), Share(EVERYTHING)
    first, second = ring.claim("a", PAGE, share), ring.claim("a", PAGE, share)
    assert first is not None
    assert second is not None
    assert second is not first
    assert second.name is None
    ring.seal(second, stays=True)
    assert found(ring, "a") == set()
    ring.seal(first, stays=True)
    assert ring.find("a", share) is first
    ring.release(share, [first, first, second])
    assert ring.find("a", share) is first
    # The memory of the other one is free again.
    assert ring.claim("b", PAGE, share) is second
    assert ring.stats().stored_objects == 1


def test_name_of_a_slot_that_was_never_sealed_is_free_again() -> None:
    ring, share = make_ring(4), Share(EVERYTHING)
    given_up = ring.claim("a", PAGE, share)
    assert given_up is not None
    ring.release(share, [given_up])
    assert ring.find("a", share) is None
    again = ring.claim("a", PAGE, share)
    assert again is not None
    assert again.name == "a"


def test_slot_that_is_forgotten_while_it_is_filled_is_never_found() -> None:
    ring, share = make_ring(4), Share(EVERYTHING)
    stale = ring.claim("a", PAGE, share)
    assert stale is not None
    assert not ring.forget("a")
    fresh = ring.claim("a", PAGE, share)
    assert fresh is not None
    assert fresh is not stale
    ring.seal(stale, stays=True)
    assert found(ring, "a") == set()
    ring.seal(fresh, stays=True)
    ring.release(share, [stale])
    assert ring.find("a", share) is fresh


def test_slot_that_is_forgotten_while_it_is_pinned_is_free_with_its_last_pin() -> None:
    ring, share, other = make_ring(1), Share(EVERYTHING), Share(EVERYTHING)
    (slot,) = keep(ring, "a")
    assert ring.find("a", share) is ring.find("a", other) is slot
    assert ring.forget("a")
    assert not ring.forget("a")
    assert ring.find("a", share) is None
    assert not ring.pin(slot, share)
    ring.release(share, [slot])
    assert ring.claim("a", PAGE, share) is None
    ring.release(other, [slot])
    assert ring.claim("a", PAGE, share) is slot


def test_slot_that_does_not_stay_is_found_until_its_last_release() -> None:
    ring, share = make_ring(2), Share(EVERYTHING)
    slot = ring.claim("a", PAGE, share)
    assert slot is not None
    ring.seal(slot, stays=False)
    assert ring.find("a", share) is slot
    ring.release(share, [slot])
    assert found(ring, "a") == {"a"}
    ring.release(share, [slot])
    assert found(ring, "a") == set()
    assert ring.stats().stored_objects == 0


def test_slot_that_is_pinned_once_more_stays() -> None:
    ring, share, ahead = make_ring(2), Share(EVERYTHING), Share(EVERYTHING)
    slot = ring.claim("a", PAGE, share, objects=2)
    assert slot is not None
    ring.seal(slot, stays=False)
    assert ring.pin(slot, ahead)
    assert ring.pin(slot, ahead)
    ring.release(share, [slot])
    ring.release(ahead, [slot, slot])
    assert found(ring, "a") == {"a"}
    assert ring.stats()[2:] == (PAGE, 2, PAGE, 0, 0)


# ---------------------------------------------------------------------------------------- shares


def test_share_pins_one_slot_of_any_size() -> None:
    ring, share = make_ring(8), Share(PAGE)
    slot = ring.claim("a", 4 * PAGE, share)
    assert slot is not None
    assert ring.claim("b", 1, share) is None
    ring.release(share, [slot])
    assert len(claim_all(ring, share)) == 1


def test_pins_of_one_slot_count_once_for_a_share() -> None:
    ring, share = make_ring(8), Share(2 * PAGE)
    keep(ring, "a", "b")
    slots = [ring.find(name, share) for name in "aaab"]
    assert None not in slots
    assert share.pinned_bytes == 2 * PAGE
    ring.release(share, [slot for slot in slots[:2] if slot is not None])
    assert share.pinned_bytes == 2 * PAGE


def test_share_without_room_pins_no_slot_that_is_found() -> None:
    ring, share = make_ring(8), Share(2 * PAGE)
    keep(ring, *"abcd")
    claim_all(ring, share)
    assert ring.find("a", share) is None
    assert ring.claim("b", PAGE, share) is None
    held = ring.find("c", Share(EVERYTHING))
    assert held is not None
    assert not ring.pin(held, share)
    assert share.pinned_bytes == 2 * PAGE


# ----------------------------------------------------------------------------------- spare slots


def test_sealed_spare_slot_is_found_by_loads_alone() -> None:
    ring, loads, stores = make_ring(4), Share(EVERYTHING, may_take_spares=True), Share(EVERYTHING)
    ring.ensure_spares({PAGE: 1})
    claim_all(ring, stores)
    spare = ring.claim("a", PAGE, loads)
    assert spare is not None
    assert spare.is_spare
    ring.seal(spare, stays=True)
    assert ring.find("a", stores) is None
    assert not ring.pin(spare, stores)
    assert ring.claim("a", PAGE, stores) is None
    assert ring.find("a", loads) is spare
    assert ring.claim("a", PAGE, loads) is spare
    # It never stays.
    ring.release(loads, [spare, spare, spare])
    assert ring.find("a", loads) is None
    assert ring.stats()[2:] == (0, 0, 0, 0, 0)


def test_claim_of_what_lies_in_a_spare_slot_by_stores_gets_no_name() -> None:
    ring, loads, stores = make_ring(4), Share(EVERYTHING, may_take_spares=True), Share(EVERYTHING)
    ring.ensure_spares({PAGE: 1})
    others = claim_all(ring, stores)
    spare = ring.claim("a", PAGE, loads)
    assert spare is not None
    ring.seal(spare, stays=True)
    ring.release(stores, others[:1])
    slot = ring.claim("a", PAGE, stores)
    assert slot is others[0]
    assert slot.name is None
    ring.seal(slot, stays=True)
    assert ring.find("a", loads) is spare
    assert ring.find("a", stores) is None


def test_spare_slots_are_taken_where_there_is_no_other_memory() -> None:
    ring, loads = make_ring(12), Share(EVERYTHING, may_take_spares=True)
    ring.ensure_spares({4 * PAGE: 1})
    ring.ensure_spares({2 * PAGE: 2})
    slots = claim_all(ring, loads, pages=2)
    assert [slot.is_spare for slot in slots] == 3 * [False] + 2 * [True]
    # The smallest one that is large enough.
    assert [slot.nbytes for slot in slots[3:]] == [2 * PAGE, 4 * PAGE]
    ring.release(loads, slots)
    assert len(claim_all(ring, loads, pages=2)) == 5


def test_as_many_spare_slots_as_fit_are_there() -> None:
    ring, loads = make_ring(5), Share(EVERYTHING, may_take_spares=True)
    ring.ensure_spares({2 * PAGE - 1: 3})
    assert [slot.is_spare for slot in claim_all(ring, loads, pages=2)] == [True, True]
    ring.extend(4 * PAGE)
    ring.ensure_spares({2 * PAGE: 3})
    assert [slot.is_spare for slot in claim_all(ring, loads, pages=2)] == [False, True]


def test_each_size_has_as_many_spare_slots_as_were_asked_for() -> None:
    ring, loads = make_ring(20), Share(EVERYTHING, may_take_spares=True)
    counts = {3 * PAGE: 1, PAGE: 2, 2 * PAGE - 1: 2}
    for _ in range(2):
        ring.ensure_spares(counts)
        assert ring.spare_bytes == (3 + 2 + 4) * PAGE
    spares = [slot for slot in claim_all(ring, loads) if slot.is_spare]
    assert sorted(slot.nbytes // PAGE for slot in spares) == [1, 1, 2, 2, 3]
    # Larger ones are enough for smaller sizes.
    ring.ensure_spares({2 * PAGE: 1, PAGE: 4})
    assert ring.spare_bytes == (3 + 2 + 4) * PAGE


def test_small_spare_slots_are_there_where_large_ones_have_no_room() -> None:
    ring = make_ring(3)
    ring.ensure_spares({4 * PAGE: 1, PAGE: 2})
    assert ring.spare_bytes == 2 * PAGE


@pytest.mark.parametrize("sizes", [(2,), (1, 2, 3)])
def test_each_load_thread_finds_a_slot_whatever_stores_and_reading_ahead_hold(
    sizes: tuple[int, ...],
) -> None:
    ring, threads = make_ring(40, 24), 4
    loads = Share(64 * PAGE, may_take_spares=True)
    ring.ensure_spares({max(sizes) * PAGE: threads})
    half = (ring.capacity - ring.spare_bytes) // 2
    stores, ahead = Share(half), Share(half)
    for size in sorted(sizes, reverse=True):
        for share in (stores, ahead):
            for slot in claim_all(ring, share, pages=size):
                ring.seal(slot, stays=False)
    assert stores.pinned_bytes == ahead.pinned_bytes == half
    for _ in range(3):
        # Each thread holds one slot at most, which it fills, or which it has found.
        held: list[Slot] = []
        for thread in range(threads):
            taken = ring.claim(thread, sizes[thread % len(sizes)] * PAGE, loads)
            assert taken is not None
            ring.seal(taken, stays=True)
            held.append(taken)
        ring.release(loads, held[1:])
        assert ring.find(0, loads) is held[0]
        ring.release(loads, [held[0], held[0]])


# --------------------------------------------------------------------------------------- the end


def test_closed_ring_ends_with_its_last_pin() -> None:
    ends = []
    ring, share = Ring(lambda: ends.append(ring.stats().pinned_bytes)), Share(EVERYTHING)
    ring.extend(8 * PAGE)
    keep(ring, "a")
    slots = [ring.find("a", share), ring.claim("b", PAGE, share)]
    assert None not in slots
    first, second = (slot for slot in slots if slot is not None)
    ring.close()
    ring.close()
    assert not ring.has_content
    assert ring.find("a", share) is ring.claim("c", PAGE, share) is None
    assert not ring.pin(first, share)
    assert not ring.forget("a")
    # A thread may go on with what it holds.
    ring.seal(second, stays=True)
    assert found(ring, *"ab") == set()
    ring.release(share, [first])
    assert ends == []
    ring.release(share, [second])
    ring.close()
    ring.release(share, [])
    assert ends == [0]


def test_closed_ring_that_nobody_uses_ends_at_once() -> None:
    ends = []
    ring = Ring(lambda: ends.append(1))
    ring.extend(8 * PAGE)
    ring.ensure_spares({PAGE: 2})
    keep(ring, "a")
    ring.close()
    ring.close()
    assert ends == [1]


def test_end_is_told_without_the_lock() -> None:
    ring, share = Ring(lambda: ring.release(share, [])), Share(EVERYTHING)
    ring.extend(PAGE)
    (slot,) = claim_all(ring, share)
    ring.close()
    thread = threading.Thread(target=ring.release, args=(share, [slot]))
    thread.start()
    thread.join()
    assert not ring.stats().pinned_bytes
