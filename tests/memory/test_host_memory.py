"""Named objects in a range of memory: who stays, who goes, and whose memory is whose."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshelf import pages
from kvshelf.errors import ConfigError
from kvshelf.memory.arena import Arena
from kvshelf.memory.host_memory import HostMemory
from kvshelf.memory.places import Budget, Slot
from tests.support.waiting import PATIENCE

PAGE = 4096
KIB, MIB = 1 << 10, 1 << 20


def make_memory(capacity: int, **options: Any) -> HostMemory:
    return HostMemory(Arena(capacity, lazy=True), **options)


def put(memory: HostMemory, name: object, nbytes: int = PAGE, parent: object = None) -> Slot | None:
    slot = memory.reserve(name, nbytes, parent=parent)
    if slot is not None:
        assert memory.publish(slot)
    return slot


def use(memory: HostMemory, names: Iterable[object]) -> None:
    for slot in filter(None, map(memory.pin, names)):
        memory.unpin(slot)


def end_all(
    memory: HostMemory, pinned: Iterable[Slot | None] = (), coming: Iterable[Slot | None] = ()
) -> None:
    """End pins and reservations."""
    for slot in filter(None, pinned):
        memory.unpin(slot)
    for slot in filter(None, coming):
        memory.abandon(slot)


def held(memory: HostMemory, names: str) -> str:
    return "".join(n for n, here in zip(names, memory.holds(names), strict=True) if here)


def test_beginnings_of_prompts_outlive_their_ends() -> None:
    memory = make_memory(8 * PAGE)
    # Two prompts of four chunks; the second is older, although its end was stored last.
    for name, parent in ("a ", "ba", "cb", "dc", "A ", "BA", "CB", "DC"):
        put(memory, name, parent=parent)
    use(memory, "abcd")
    put(memory, "1")
    assert held(memory, "abcdABCD") == "abcdABC"
    put(memory, "2")
    put(memory, "3")
    put(memory, "4")
    assert held(memory, "abcdABCD") == "abcd"
    use(memory, "1234")
    put(memory, "5")
    put(memory, "6")
    assert held(memory, "abcd") == "ab"


def test_mistakes_of_callers_are_named() -> None:
    memory = make_memory(PAGE)
    slot = memory.reserve("x", PAGE)
    assert slot is not None
    with pytest.raises(ValueError, match="is not pinned"):
        memory.unpin(slot)
    assert memory.publish(slot)
    for end in (memory.publish, memory.abandon):
        with pytest.raises(ValueError, match="is not reserved"):
            end(slot)
    with pytest.raises(ValueError, match="is not pinned"):
        memory.unpin(slot)


def test_one_large_object_does_not_cost_all_small_ones() -> None:
    memory = make_memory(1024 * PAGE)
    order = list(range(1024))
    for name in order:
        put(memory, name)
    # The order of use has nothing to do with the order of places.
    random.Random(1).shuffle(order)
    for name in order:
        use(memory, [name])
    assert put(memory, "large", 64 * PAGE) is not None
    assert memory.stats().objects >= 1024 - 2 * 64


def test_leaves_between_pins_do_not_go_for_what_fits_elsewhere() -> None:
    memory = make_memory(256 * PAGE)
    for name in range(256):
        put(memory, name)
    pinned = [memory.pin(name) for name in range(0, 200, 4)]
    # The least recently used leaves lie between pins.
    for number in range(8):
        assert put(memory, f"large {number}", 6 * PAGE) is not None
    assert memory.stats().evictions < 2 * 8 * 6
    assert all(memory.holds(range(196)))
    end_all(memory, pinned)


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
) -> tuple[HostMemory, _CountedLock]:
    lock = _CountedLock()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", lambda: lock)
        return make_memory(capacity), lock


def test_no_call_is_long_under_the_lock_however_many_objects_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 5000
    memory, lock = _with_counted_lock(count * PAGE, monkeypatch)
    for name in range(count):
        put(memory, name, parent=name - 1 if name % 5 else None)
    pinned = [memory.pin(name) for name in range(0, count, 16)]
    assert memory.reserve("too large", 40 * PAGE) is None
    coming = [memory.reserve("large", 12 * PAGE)]
    # All places in the queue are wrong now.
    use(memory, range(count))
    assert put(memory, "small") is not None
    pinned += memory.pin_all(range(count // 2))
    coming.append(memory.reserve("large", 12 * PAGE))
    for name in range(count // 2, count):
        if name % 16:
            memory.forget(name)
    coming.append(memory.reserve("larger", 14 * PAGE))
    assert None not in coming
    memory.close()
    # A thousand calls take less than a millisecond.
    assert lock.most < 1000
    end_all(memory, pinned, coming)


class _Name:
    """A name whose end can be noticed."""


@pytest.mark.parametrize("removed", [1, 3])
def test_names_of_objects_that_are_gone_are_forgotten(removed: int) -> None:
    """They are evicted, or all of them are removed before."""
    memory = make_memory(64 * PAGE)
    names: weakref.WeakSet[_Name] = weakref.WeakSet()
    name: _Name | None = None
    for count in range(5000):
        parent, name = (name if count % 16 else None), _Name()
        names.add(name)
        slot = memory.reserve(name, PAGE, parent=parent)
        assert slot is not None
        if count % 5:
            assert memory.publish(slot)
        else:
            memory.abandon(slot)
        if not count % removed:
            memory.forget(name)
    assert len(names) < 500


# ------------------------------------------------------------------------------------ in any order


def taken(slot: Slot) -> int:
    """How many bytes of the range an object of a machine takes."""
    return -(-slot.nbytes // PAGE) * PAGE


class MemoryMachine(RuleBasedStateMachine):
    """All calls in any order, against a plain record of who has which bytes."""

    CAPACITY = 32 * PAGE
    BORDERS: tuple[int, ...] = ()
    SIZES = st.integers(1, 12 * PAGE)
    NAMES = st.integers(0, 11)

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[int, int] = {}
        self.memory = make_memory(self.CAPACITY, borders=self.BORDERS, on_generation=self.tell)
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
        names = [name for name in self.known if not self.memory.holds([name])[0]]
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
        evicted = self.memory.stats().evictions
        longest = self.longest_run()
        slot = self.memory.reserve(name, nbytes, parent=parent)
        assert (slot is None) == (nbytes > longest)
        gone = self.notice_evictions()
        assert len(gone) == self.memory.stats().evictions - evicted
        if slot is None:
            assert not gone
            return None
        assert self.told.get(slot.number, 0) == slot.generation
        self.reserved.append(slot)
        self.most_live = max(self.most_live, len(self.live()))
        assert slot.number < self.most_live
        return slot

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), pinned=st.booleans())
    def publish(self, data: st.DataObject, pinned: bool) -> None:
        self.let_be_found(data.draw(st.sampled_from(self.reserved)), pinned=pinned)

    def let_be_found(self, slot: Slot, *, pinned: bool) -> None:
        self.reserved.remove(slot)
        assert isinstance(slot.name, int)
        published = self.memory.publish(slot, pinned=pinned)
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
        self.memory.abandon(slot)
        assert self.told[slot.number] == slot.generation + 1

    @rule(name=NAMES)
    def pin(self, name: int) -> None:
        slot = self.memory.pin(name)
        assert slot is self.known.get(name)
        if slot is not None:
            self.pins.append(slot)
            self.use(slot)

    @rule(names=st.lists(NAMES, unique=True))
    def pin_all(self, names: list[int]) -> None:
        slots = self.memory.pin_all(names)
        assert slots == [self.known.get(name) for name in names]
        found = [slot for slot in slots if slot is not None]
        self.pins += found
        for slot in reversed(found):
            self.use(slot)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.memory.unpin(slot)

    @rule(name=NAMES)
    def remove(self, name: int) -> None:
        assert self.memory.forget(name) == (self.known.pop(name, None) is not None)
        self.refused.update(slot for slot in self.reserved if slot.name == name)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.pins))
        generation = self.told.get(slot.number, 0)
        self.memory.expire(slot)
        assert self.told[slot.number] == slot.generation == generation + 1

    @invariant()
    def no_byte_has_two_owners_and_none_is_lost(self) -> None:
        live = self.live()
        ranges = sorted((slot.offset, slot.offset + taken(slot)) for slot in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert not any(start < border < end for border in self.BORDERS for start, end in ranges)
        assert len({slot.number for slot in live}) == len(live)
        used = sum(end - start for start, end in ranges)
        stats = self.memory.stats()
        assert stats.wasted_bytes == used - sum(slot.nbytes for slot in live)
        assert stats.objects == len(self.known)
        assert stats.bytes == sum(slot.nbytes for slot in self.known.values())
        assert stats.pinned_bytes == sum(slot.nbytes for slot in {*self.reserved, *self.pins})
        sizes = [slot and slot.nbytes for slot in map(self.known.get, range(12))]
        assert self.memory.sizes(range(12)) == sizes

    def teardown(self) -> None:
        for slot in self.reserved:
            self.memory.abandon(slot)
        for slot in self.pins:
            self.memory.unpin(slot)
        for name in list(self.known):
            assert self.memory.forget(name)
        stats = self.memory.stats()
        assert stats.largest_free == (12 * PAGE if self.BORDERS else self.CAPACITY)
        assert stats.pinned_bytes == stats.bytes == stats.wasted_bytes == 0


class BorderedMachine(MemoryMachine):
    """The same in memory that is page-locked in pieces."""

    BORDERS = (10 * PAGE, 11 * PAGE, 20 * PAGE)


class EqualMachine(MemoryMachine):
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


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=80)
TestBorderedMemory = BorderedMachine.TestCase
TestBorderedMemory.settings = settings(max_examples=60, stateful_step_count=80)
TestEqualMemory = EqualMachine.TestCase
TestEqualMemory.settings = settings(max_examples=60, stateful_step_count=80)


def test_threads_that_use_it_at_once_leave_nothing_behind() -> None:
    memory = make_memory(64 * PAGE)
    errors: list[BaseException] = []
    rounds = 400

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(rounds):
                name = rng.randrange(40)
                slot = memory.pin(name)
                if slot is None:
                    pages = 1 + name % 7
                    slot = memory.reserve(name, pages * PAGE, parent=name - 1)
                    if slot is None:
                        continue
                    memory.view(slot)[:] = bytes([name]) * slot.nbytes
                    if rng.random() < 0.1:
                        memory.abandon(slot)
                        continue
                    if not memory.publish(slot, pinned=True):
                        continue
                seen = set(memory.view(slot))
                assert seen == {name}, f"{name} was overwritten while it was pinned"
                memory.holds(range(40))
                use(memory, range(name))
                if rng.random() < 0.2:
                    memory.forget(name)
                memory.unpin(slot)
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert memory.stats().pinned_bytes == 0
    for name in range(40):
        memory.forget(name)
    assert memory.stats().largest_free == 64 * PAGE


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
    memory = make_memory(512 * MIB)
    pins: list[Slot] = []
    written = 0
    name = 0
    for count in range(operations):
        what = rng.random()
        if what < 0.6:
            name += 1
            # Prompts of 16 chunks.
            parent = name - 1 if name % 16 else None
            slot = put(memory, name, rng.choice(sizes), parent)
            assert slot is not None
            written += slot.nbytes
        elif what < 0.85:
            use(memory, [name - rng.randrange(500)])
        elif what < 0.9:
            memory.forget(name - rng.randrange(500))
        else:
            found = memory.pin(name - rng.randrange(500))
            if found is not None:
                pins.append(found)
            if pins and (found is None or len(pins) > 8):
                memory.unpin(pins.pop(rng.randrange(len(pins))))
        if written > memory.capacity and count % 100 == 0:
            stats = memory.stats()
            taken = stats.bytes + stats.wasted_bytes
            yield stats.bytes / memory.capacity, taken / memory.capacity
    for slot in pins:
        memory.unpin(slot)
    assert memory.stats().pinned_bytes == 0
    for old in range(name + 1):
        memory.forget(old)
    assert memory.stats().largest_free == memory.capacity


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
def test_memory_does_not_fragment_over_days(kind: str) -> None:
    _check_lifetime(kind, 2_500_000)


def test_owner_reserves_no_more_than_its_budget_or_one_object() -> None:
    memory = make_memory(8 * PAGE)
    stores = Budget(3 * PAGE)
    first = memory.reserve("a", PAGE, owner=stores)
    second = memory.reserve("b", 2 * PAGE, owner=stores)
    assert first is not None
    assert second is not None
    assert memory.reserve("c", PAGE, owner=stores) is None
    coming = [memory.reserve("d", PAGE)]
    assert memory.publish(first)
    assert stores.used == 2 * PAGE
    coming.append(memory.reserve("c", PAGE, owner=stores))
    memory.abandon(second)
    assert memory.reserve("e", 4 * PAGE, owner=stores) is None
    coming.append(memory.reserve("e", 2 * PAGE, owner=stores))
    large = Budget(PAGE)
    coming.append(memory.reserve("f", 2 * PAGE, owner=large))
    assert None not in coming
    end_all(memory, coming=coming)
    assert stores.used == large.used == 0


def test_closed_memory_is_freed_with_its_last_pin() -> None:
    memory = make_memory(4 * PAGE)
    put(memory, "a")
    pinned = memory.pin("a")
    coming = memory.reserve("b", PAGE)
    assert pinned is not None
    assert coming is not None
    memory.view(pinned)[:3] = b"abc"
    memory.close()
    assert memory.holds(["a"]) == [False]
    assert memory.reserve("c", PAGE) is None
    assert bytes(memory.view(pinned)[:3]) == b"abc"
    memory.unpin(pinned)
    assert len(memory.arena.view) == 4 * PAGE
    assert not memory.publish(coming)
    assert len(memory.arena.view) == 0


def test_table_of_generations_says_whether_memory_was_reused() -> None:
    arena = Arena(64 * PAGE)
    memory = HostMemory.with_generations(arena)
    assert memory.table_slots == 64
    table = arena.view[: 64 * 8].cast("Q")
    slot = put(memory, "a")
    assert slot is not None
    assert memory.offset(slot) == PAGE
    pinned = memory.pin("a")
    assert pinned is slot
    memory.view(slot)[:] = b"a" * PAGE
    assert bytes(arena.view[PAGE : 2 * PAGE]) == b"a" * PAGE
    assert table[0] == 0
    memory.unpin(slot)
    assert table[slot.number] == slot.generation == 0
    memory.forget("a")
    assert table[slot.number] == 1
    with pytest.raises(ConfigError, match="expected space for objects"):
        HostMemory.with_generations(Arena(PAGE))


def test_shared_memory_that_clients_page_lock_in_pieces_has_no_object_across_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "LOCKED_AT_ONCE", 2 * MIB)
    memory = HostMemory.with_generations(Arena(8 * MIB, lazy=True))
    assert memory.most([3 * MIB // 2]) == 4


@pytest.mark.parametrize("action", ["forget", "expire", "evict"])
def test_object_cannot_be_pinned_while_another_thread_changes_a_generation(action: str) -> None:
    changes, go = threading.Event(), threading.Event()

    def change(number: int, generation: int) -> None:
        changes.set()
        assert go.wait(PATIENCE)

    memory = make_memory(2 * PAGE, on_generation=change)
    put(memory, "a")
    put(memory, "b")
    slot = memory.pin("a")
    assert slot is not None
    actions: dict[str, Callable[[], Slot | None]] = {
        "forget": lambda: memory.forget("b") and None,
        "expire": lambda: memory.expire(slot),
        "evict": lambda: memory.reserve("c", PAGE),
    }
    with ThreadPoolExecutor() as threads:
        changing = threads.submit(actions[action])
        assert changes.wait(PATIENCE)
        pinning = threads.submit(memory.pin, "a")
        counting = threads.submit(memory.stats)
        time.sleep(1.0)
        is_early = pinning.done() or counting.done()
        go.set()
        end_all(memory, [slot, pinning.result()], [changing.result()])
    assert not is_early


def test_bytes_that_were_evicted_are_summed_up() -> None:
    memory = make_memory(4 * PAGE)
    for name in "abcdef":
        put(memory, name)
    stats = memory.stats()
    assert (stats.evictions, stats.evicted_bytes) == (2, 2 * PAGE)
