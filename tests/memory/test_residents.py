"""Named objects in a range of memory: who stays, who goes, and whose memory is whose."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshelf.memory.residents import Residents, Slot

PAGE = 4096
KIB, MIB = 1 << 10, 1 << 20


def put(
    residents: Residents, name: object, nbytes: int = PAGE, parent: object = None
) -> Slot | None:
    slot = residents.reserve(name, nbytes, parent=parent)
    if slot is not None:
        assert residents.publish(slot)
    return slot


def held(residents: Residents, names: str) -> str:
    return "".join(n for n, here in zip(names, residents.holds(names), strict=True) if here)


def test_the_beginnings_of_prompts_outlive_their_ends() -> None:
    residents = Residents(8 * PAGE)
    # Two prompts of four chunks; the second is older, although its end was stored last.
    for name, parent in ("a ", "ba", "cb", "dc", "A ", "BA", "CB", "DC"):
        put(residents, name, parent=parent)
    residents.touch("abcd")
    put(residents, "1")
    assert held(residents, "abcdABCD") == "abcdABC"
    put(residents, "2")
    put(residents, "3")
    put(residents, "4")
    assert held(residents, "abcdABCD") == "abcd"
    residents.touch("1234")
    put(residents, "5")
    put(residents, "6")
    assert held(residents, "abcd") == "ab"


def test_a_parent_that_comes_later_is_not_evicted_before_its_child() -> None:
    residents = Residents(2 * PAGE)
    put(residents, "child", parent="parent")
    put(residents, "parent")
    residents.touch(["child"])
    put(residents, "x")
    assert residents.holds(["child", "parent", "x"]) == [False, True, True]


def test_what_is_pinned_or_reserved_keeps_its_memory() -> None:
    residents = Residents(3 * PAGE)
    put(residents, "pinned")
    pinned = residents.pin("pinned")
    assert pinned is not None
    reserved = residents.reserve("reserved", PAGE)
    assert reserved is not None
    assert not residents.holds(["reserved"])[0]
    for name in range(5):
        put(residents, name)
    assert residents.holds(["pinned", 3, 4]) == [True, False, True]
    assert residents.reserve("larger", 2 * PAGE) is None
    # What could not be made room for has not cost what could stay.
    assert residents.holds([4]) == [True]
    residents.unpin(pinned)
    residents.abandon(reserved)
    assert put(residents, "larger", 2 * PAGE) is not None


def test_the_first_of_two_objects_of_one_name_counts() -> None:
    residents = Residents(4 * PAGE)
    first, second = residents.reserve("x", PAGE), residents.reserve("x", PAGE)
    assert first is not None
    assert second is not None
    assert residents.publish(second)
    assert not residents.publish(first)
    assert residents.pin("x") is second
    assert residents.stats().free_bytes == 3 * PAGE


def test_a_published_object_can_be_pinned_from_the_start() -> None:
    residents = Residents(PAGE)
    slot = residents.reserve("x", PAGE)
    assert slot is not None
    assert residents.publish(slot, pinned=True)
    assert residents.reserve("y", PAGE) is None
    residents.unpin(slot)
    assert residents.reserve("y", PAGE) is not None


def test_a_removed_object_is_gone_at_once_and_its_memory_when_it_is_unpinned() -> None:
    told: list[tuple[int, int]] = []
    residents = Residents(PAGE, on_generation=lambda *what: told.append(what))
    put(residents, "x")
    slot = residents.pin("x")
    assert slot is not None
    assert residents.remove("x")
    assert not residents.remove("x")
    assert residents.pin("x") is None
    assert residents.reserve("y", PAGE) is None
    assert told == []
    residents.unpin(slot)
    assert told == [(slot.number, slot.generation + 1)]
    after = residents.reserve("y", PAGE)
    assert after is not None
    assert (after.number, after.generation) == (slot.number, slot.generation + 1)


def test_an_expired_slot_has_another_generation_and_its_object_stays() -> None:
    told: list[tuple[int, int]] = []
    residents = Residents(PAGE, on_generation=lambda *what: told.append(what))
    put(residents, "x")
    slot = residents.pin("x")
    assert slot is not None
    before = slot.generation
    residents.expire(slot)
    assert told == [(slot.number, before + 1)]
    assert slot.generation == before + 1
    assert residents.sizes(["x", "y"]) == [PAGE, None]
    assert residents.reserve("y", PAGE) is None
    residents.unpin(slot)
    assert residents.reserve("y", PAGE) is not None


def test_of_many_that_are_pinned_together_the_last_is_evicted_first() -> None:
    residents = Residents(3 * PAGE)
    for name in "abc":
        put(residents, name)
    found = residents.pin_all(["a", "x", "b", "c"])
    assert [slot and slot.name for slot in found] == ["a", None, "b", "c"]
    assert residents.stats().pinned_bytes == 3 * PAGE
    for slot in found:
        if slot is not None:
            residents.unpin(slot)
    put(residents, "d")
    assert residents.holds(["a", "b", "c"]) == [True, True, False]


def test_mistakes_of_callers_are_named() -> None:
    residents = Residents(PAGE)
    slot = residents.reserve("x", PAGE)
    assert slot is not None
    with pytest.raises(ValueError, match="is not pinned"):
        residents.unpin(slot)
    assert residents.publish(slot)
    for end in (residents.publish, residents.abandon):
        with pytest.raises(ValueError, match="is not reserved"):
            end(slot)
    with pytest.raises(ValueError, match="is not pinned"):
        residents.unpin(slot)


def test_after_the_end_nothing_comes_in_and_what_is_pinned_stays() -> None:
    residents = Residents(4 * PAGE)
    put(residents, "x")
    put(residents, "y")
    slot = residents.pin("x")
    late = residents.reserve("z", PAGE)
    assert slot is not None
    assert late is not None
    residents.close()
    assert residents.holds(["x", "y"]) == [False, False]
    assert not residents.publish(late)
    assert residents.reserve("z", PAGE) is None
    assert residents.stats().pinned_bytes == PAGE
    residents.unpin(slot)
    assert residents.stats().free_bytes == 4 * PAGE


def test_one_large_object_does_not_cost_all_small_ones() -> None:
    residents = Residents(1024 * PAGE)
    order = list(range(1024))
    for name in order:
        put(residents, name)
    # The order of use has nothing to do with the order of places.
    random.Random(1).shuffle(order)
    for name in order:
        residents.touch([name])
    assert put(residents, "large", 64 * PAGE) is not None
    assert residents.stats().objects >= 1024 - 2 * 64


def test_room_is_found_between_pins() -> None:
    residents = Residents(64 * PAGE)
    for name in range(64):
        put(residents, name)
    for name in (0, 20, 25, 63):
        residents.pin(name)
    # Between 25 and 63 only; the least recently used objects lie elsewhere.
    residents.touch(range(25, 64))
    assert residents.reserve("too large", 38 * PAGE) is None
    slot = residents.reserve("large", 36 * PAGE)
    assert slot is not None
    assert 26 * PAGE <= slot.offset <= 27 * PAGE


def test_what_finds_no_room_costs_nothing() -> None:
    residents = Residents(256 * PAGE)
    for name in range(256):
        put(residents, name)
    pinned = [residents.pin(name) for name in range(0, 256, 16)]
    for _ in range(3):
        assert residents.reserve("large", 16 * PAGE) is None
    assert residents.stats().objects == 256
    assert put(residents, "fits", 15 * PAGE) is not None
    # One pin less, and there is room.
    assert pinned[7] is not None
    residents.unpin(pinned[7])
    assert put(residents, "large", 16 * PAGE) is not None


def test_leaves_between_pins_do_not_go_for_what_fits_elsewhere() -> None:
    residents = Residents(256 * PAGE)
    for name in range(256):
        put(residents, name)
    for name in range(0, 200, 4):
        residents.pin(name)
    # The least recently used leaves lie between pins.
    for number in range(8):
        assert put(residents, f"large {number}", 6 * PAGE) is not None
    assert residents.stats().evictions < 2 * 8 * 6
    assert all(residents.holds(range(196)))


class _CountedLock:
    """A lock that counts the calls that its holder makes."""

    def __init__(self) -> None:
        self.calls = self.most = 0
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.lock.acquire()
        self.calls = 0
        sys.setprofile(self.count)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        self.most = max(self.most, self.calls)
        self.lock.release()

    def count(self, frame: FrameType, event: str, what: object) -> None:
        self.calls += event in ("call", "c_call")


def _with_counted_lock(
    capacity: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Residents, _CountedLock]:
    lock = _CountedLock()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", lambda: lock)
        return Residents(capacity), lock


def test_no_call_is_long_under_the_lock_however_many_objects_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 5000
    residents, lock = _with_counted_lock(count * PAGE, monkeypatch)
    for name in range(count):
        put(residents, name, parent=name - 1 if name % 5 else None)
    for name in range(0, count, 16):
        residents.pin(name)
    assert residents.reserve("too large", 40 * PAGE) is None
    assert residents.reserve("large", 12 * PAGE) is not None
    # All places in the queue are wrong now.
    residents.touch(range(count))
    assert put(residents, "small") is not None
    residents.pin_all(range(count // 2))
    assert residents.reserve("large", 12 * PAGE) is not None
    for name in range(count // 2, count):
        if name % 16:
            residents.remove(name)
    assert residents.reserve("larger", 14 * PAGE) is not None
    residents.close()
    # A thousand calls take less than a millisecond.
    assert lock.most < 1000


def test_many_small_objects_go_for_a_large_one_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    residents, lock = _with_counted_lock(1024 * PAGE, monkeypatch)
    for name in range(1024):
        put(residents, name)
    assert put(residents, "large", 900 * PAGE) is not None
    assert lock.most < 1000


def test_what_is_removed_while_it_is_read_does_not_come_back() -> None:
    residents = Residents(8 * PAGE)
    first, second = residents.reserve("x", PAGE), residents.reserve("x", PAGE)
    other = residents.reserve("y", PAGE)
    assert first is not None
    assert second is not None
    assert other is not None
    # It was not here yet.
    assert not residents.remove("x")
    late = residents.reserve("x", PAGE)
    assert late is not None
    assert not residents.publish(first)
    assert not residents.publish(second, pinned=True)
    assert residents.publish(other)
    assert residents.holds(["x"]) == [False]
    assert residents.stats().pinned_bytes == PAGE
    # What is read after that counts.
    assert residents.publish(late)
    assert residents.holds(["x"]) == [True]
    assert residents.stats().free_bytes == 6 * PAGE


class _Name:
    """A name whose end can be noticed."""


@pytest.mark.parametrize("removed", [1, 3])
def test_names_of_objects_that_are_gone_are_forgotten(removed: int) -> None:
    """They are evicted, or all of them are removed before."""
    residents = Residents(64 * PAGE)
    names: weakref.WeakSet[_Name] = weakref.WeakSet()
    name: _Name | None = None
    for count in range(5000):
        parent, name = (name if count % 16 else None), _Name()
        names.add(name)
        slot = residents.reserve(name, PAGE, parent=parent)
        assert slot is not None
        if count % 5:
            assert residents.publish(slot)
        else:
            residents.abandon(slot)
        if not count % removed:
            residents.remove(name)
    assert len(names) < 500


# ------------------------------------------------------------------------------------ in any order


def taken(slot: Slot) -> int:
    """How many bytes of the range an object of a machine takes."""
    return -(-slot.nbytes // PAGE) * PAGE


class ResidentsMachine(RuleBasedStateMachine):
    """All calls in any order, against a plain record of who has which bytes."""

    CAPACITY = 32 * PAGE
    BORDERS: tuple[int, ...] = ()
    SIZES = st.integers(1, 12 * PAGE)
    NAMES = st.integers(0, 11)

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, int] = {}
        self.residents = Residents(self.CAPACITY, borders=self.BORDERS, on_generation=self.tell)
        self.reserved: list[Slot] = []
        #: One entry for each pin, and the slots of those that were removed.
        self.pins: list[Slot] = []
        #: The resident objects as far as they are known, and when each was used: evictions are
        #: noticed afterwards.
        self.known: dict[int, Slot] = {}
        self.used: dict[Slot, int] = {}
        self.clock = itertools.count()
        #: Reserved slots whose names were removed.
        self.refused: set[Slot] = set()
        #: Most slots that had memory at once.
        self.most_live = 0

    def tell(self, number: int, generation: int) -> None:
        assert generation == self.told.get(number, 0) + 1
        self.told[number] = generation

    def live(self) -> set[Slot]:
        return {*self.known.values(), *self.reserved, *self.pins}

    def use(self, slot: Slot) -> None:
        self.used[slot] = next(self.clock)

    def longest_run(self) -> int:
        """Bytes of the longest run without a pinned or reserved object."""
        stay = {s.offset: s.offset + taken(s) for s in (*self.reserved, *self.pins)}
        stay |= {border - PAGE: border for border in self.BORDERS}
        ends = [0, *(stay[offset] for offset in sorted(stay))]
        starts = [*sorted(stay), self.CAPACITY]
        return max(start - end for start, end in zip(starts, ends, strict=True))

    def notice_evictions(self) -> list[Slot]:
        names = [name for name in self.known if not self.residents.holds([name])[0]]
        gone = [self.known.pop(name) for name in names]
        for slot in gone:
            assert slot not in self.pins, "a pinned object was evicted"
            assert self.told[slot.number] > slot.generation
        return gone

    @rule(name=NAMES, parent=st.none() | NAMES, data=st.data())
    def put(self, name: int, parent: int | None, data: st.DataObject) -> None:
        slot = self.make_room(name, parent, data.draw(self.SIZES))
        if slot is not None:
            self.let_be_found(slot, pinned=False)

    @rule(name=NAMES, parent=st.none() | NAMES, data=st.data())
    def reserve(self, name: int, parent: int | None, data: st.DataObject) -> None:
        self.make_room(name, parent, data.draw(self.SIZES))

    def make_room(self, name: int, parent: int | None, nbytes: int) -> Slot | None:
        evicted = self.residents.stats().evictions
        longest = self.longest_run()
        slot = self.residents.reserve(name, nbytes, parent=parent)
        assert (slot is None) == (nbytes > longest)
        gone = self.notice_evictions()
        assert len(gone) == self.residents.stats().evictions - evicted
        if slot is None:
            assert not gone
            return None
        assert self.told.get(slot.number, 0) == slot.generation
        self.reserved.append(slot)
        self.most_live = max(self.most_live, len(self.live()))
        assert slot.number < self.most_live <= self.residents.most_slots
        return slot

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), pinned=st.booleans())
    def publish(self, data: st.DataObject, pinned: bool) -> None:
        self.let_be_found(data.draw(st.sampled_from(self.reserved)), pinned=pinned)

    def let_be_found(self, slot: Slot, *, pinned: bool) -> None:
        self.reserved.remove(slot)
        assert isinstance(slot.name, int)
        published = self.residents.publish(slot, pinned=pinned)
        assert published == (slot.name not in self.known and slot not in self.refused)
        if published:
            self.known[slot.name] = slot
            self.use(slot)
            if pinned:
                self.pins.append(slot)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        slot = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        self.residents.abandon(slot)
        assert self.told[slot.number] == slot.generation + 1

    @rule(name=NAMES)
    def pin(self, name: int) -> None:
        slot = self.residents.pin(name)
        assert slot is self.known.get(name)
        if slot is not None:
            self.pins.append(slot)
            self.use(slot)

    @rule(names=st.lists(NAMES, unique=True))
    def pin_all(self, names: list[int]) -> None:
        slots = self.residents.pin_all(names)
        assert slots == [self.known.get(name) for name in names]
        found = [slot for slot in slots if slot is not None]
        self.pins += found
        for slot in reversed(found):
            self.use(slot)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.residents.unpin(slot)

    @rule(names=st.lists(NAMES))
    def touch(self, names: list[int]) -> None:
        self.residents.touch(names)
        for name in names:
            if name in self.known:
                self.use(self.known[name])

    @rule(name=NAMES)
    def remove(self, name: int) -> None:
        assert self.residents.remove(name) == (self.known.pop(name, None) is not None)
        self.refused.update(slot for slot in self.reserved if slot.name == name)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.pins))
        generation = self.told.get(slot.number, 0)
        self.residents.expire(slot)
        assert self.told[slot.number] == slot.generation == generation + 1

    @invariant()
    def no_byte_has_two_owners_and_none_is_lost(self) -> None:
        live = self.live()
        ranges = sorted((slot.offset, slot.offset + taken(slot)) for slot in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert not any(start < border < end for border in self.BORDERS for start, end in ranges)
        assert len({slot.number for slot in live}) == len(live)
        used = sum(end - start for start, end in ranges)
        stats = self.residents.stats()
        assert stats.free_bytes == self.CAPACITY - used
        assert stats.wasted_bytes == used - sum(slot.nbytes for slot in live)
        assert stats.objects == len(self.known)
        assert stats.bytes == sum(slot.nbytes for slot in self.known.values())
        assert stats.pinned_bytes == sum(slot.nbytes for slot in {*self.reserved, *self.pins})

    def teardown(self) -> None:
        for slot in self.reserved:
            self.residents.abandon(slot)
        for slot in self.pins:
            self.residents.unpin(slot)
        for name in list(self.known):
            assert self.residents.remove(name)
        stats = self.residents.stats()
        assert stats.free_bytes == self.CAPACITY
        assert stats.largest_free == (12 * PAGE if self.BORDERS else self.CAPACITY)
        assert stats.pinned_bytes == stats.bytes == stats.wasted_bytes == 0


class BorderedMachine(ResidentsMachine):
    """The same in memory that is page-locked in pieces."""

    BORDERS = (10 * PAGE, 11 * PAGE, 20 * PAGE)


class EqualMachine(ResidentsMachine):
    """The same with objects of one page each: which one is evicted is known."""

    CAPACITY = 5 * PAGE
    SIZES = st.just(PAGE)

    def notice_evictions(self) -> list[Slot]:
        parents = {slot.parent for slot in self.known.values()}
        leaves = [s for n, s in self.known.items() if n not in parents and s not in self.pins]
        gone = super().notice_evictions()
        if gone and leaves:
            assert gone == [min(leaves, key=self.used.__getitem__)]
        return gone


TestResidents = ResidentsMachine.TestCase
TestResidents.settings = settings(stateful_step_count=80)
TestBorderedResidents = BorderedMachine.TestCase
TestBorderedResidents.settings = settings(stateful_step_count=80)
TestEqualResidents = EqualMachine.TestCase
TestEqualResidents.settings = settings(stateful_step_count=80)


def test_threads_that_use_it_at_once_leave_nothing_behind() -> None:
    residents = Residents(64 * PAGE)
    memory = bytearray(64 * PAGE)
    errors: list[BaseException] = []
    rounds = 400

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(rounds):
                name = rng.randrange(40)
                slot = residents.pin(name)
                if slot is None:
                    pages = 1 + name % 7
                    slot = residents.reserve(name, pages * PAGE, parent=name - 1)
                    if slot is None:
                        continue
                    end = slot.offset + slot.nbytes
                    memory[slot.offset : end] = bytes([name]) * slot.nbytes
                    if rng.random() < 0.1:
                        residents.abandon(slot)
                        continue
                    if not residents.publish(slot, pinned=True):
                        continue
                seen = set(memory[slot.offset : slot.offset + slot.nbytes])
                assert seen == {name}, f"{name} was overwritten while it was pinned"
                residents.holds(range(40))
                residents.touch(range(name))
                if rng.random() < 0.2:
                    residents.remove(name)
                residents.unpin(slot)
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert residents.stats().pinned_bytes == 0
    for name in range(40):
        residents.remove(name)
    assert residents.stats().largest_free == 64 * PAGE


# --------------------------------------------------------------------------------- for a long time


def _log_uniform(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda rng: int(low * (high / low) ** rng.random())


SIZES = {
    "16 KiB to 8 MiB": _log_uniform(16 * KIB, 8 * MIB),
    "100 KiB to 4 MiB, most of them large": lambda rng: rng.randint(100 * KIB, 4 * MIB),
    "1 MiB to 2 MiB": lambda rng: rng.randint(MIB, 2 * MIB),
    "mostly 3 MiB, and shorter tails": lambda rng: (
        3 * MIB + PAGE if rng.random() < 0.8 else rng.randint(PAGE, 3 * MIB)
    ),
}


def _lifetime(kind: str, operations: int) -> Iterator[tuple[float, float]]:
    """Use a range for a long time; yield the shares that objects, and with rounding, take."""
    rng = random.Random(kind)
    sizes = [SIZES[kind](rng) for _ in range(1000)]
    residents = Residents(512 * MIB)
    pins: list[Slot] = []
    written = 0
    name = 0
    for count in range(operations):
        what = rng.random()
        if what < 0.6:
            name += 1
            # Prompts of 16 chunks.
            parent = name - 1 if name % 16 else None
            slot = put(residents, name, rng.choice(sizes), parent)
            assert slot is not None
            written += slot.nbytes
        elif what < 0.85:
            residents.touch([name - rng.randrange(500)])
        elif what < 0.9:
            residents.remove(name - rng.randrange(500))
        else:
            found = residents.pin(name - rng.randrange(500))
            if found is not None:
                pins.append(found)
            if pins and (found is None or len(pins) > 8):
                residents.unpin(pins.pop(rng.randrange(len(pins))))
        if written > residents.capacity and count % 100 == 0:
            stats = residents.stats()
            yield stats.bytes / residents.capacity, 1 - stats.free_bytes / residents.capacity
    for slot in pins:
        residents.unpin(slot)
    assert residents.stats().pinned_bytes == 0
    for old in range(name + 1):
        residents.remove(old)
    assert residents.stats().largest_free == residents.capacity


def _check_lifetime(kind: str, operations: int) -> None:
    shares = list(_lifetime(kind, operations))
    assert len(shares) > operations / 1000
    filled = sorted(objects for objects, _ in shares)
    # Removed objects leave gaps until others take their place.
    assert filled[len(filled) // 2] > 0.88
    assert filled[len(filled) // 100] > 0.8
    assert all(rounded - objects < 1 / 32 for objects, rounded in shares)
    first, last = shares[: len(shares) // 4], shares[-len(shares) // 4 :]
    # It does not get worse with time.
    assert sum(s for s, _ in last) / len(last) > sum(s for s, _ in first) / len(first) - 0.02


@pytest.mark.parametrize("kind", SIZES)
def test_memory_does_not_fragment(kind: str) -> None:
    _check_lifetime(kind, 15_000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
def test_memory_does_not_fragment_over_days(kind: str) -> None:
    _check_lifetime(kind, 2_500_000)
