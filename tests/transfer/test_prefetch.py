"""Memory for requests that wait: what comes in, what there is room for, when it is given back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.memory.size_classes import SizeClasses
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import TieredShelf
from kvshelf.transfer import prefetch
from kvshelf.transfer.load import Failure, Piece
from kvshelf.transfer.prefetch import KindMemory, Prefetcher
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import until


class Waiting:
    """A rig whose transfer looks into memory first."""

    def __init__(self, root: Path, chunks: float, **options: Any) -> None:
        self.faults = FaultyStorage(posix(root))
        self.rig = Rig(self.faults, blocks=200, staging_objects=32)
        fmt = self.rig.fmt
        rounded = SizeClasses(1 << 30).rounded
        self.budget = int(chunks * sum(rounded(fmt.object_size(s)) for s in range(fmt.shards)))
        self.tier = MemoryTier(self.budget, counters=self.rig.counters, lazy=True)
        options = {"keeps": False, **options}
        self.memory = KindMemory(self.tier, fmt, self.rig.counters, **options)
        self.rig.transfer.close()
        self.rig.staging = type(self.rig.staging)(
            32 * self.rig.staging.buffer_bytes, self.rig.staging.buffer_bytes, together=fmt.shards
        )
        self.rig.begin(TieredShelf(self.rig.shelf, [self.memory]))
        self.prefetcher = Prefetcher(self.rig.loads, self.memory)

    def put(self, seed: int, count: int = 3) -> list[Chunk]:
        chunks = make_chunks(self.rig.fmt, count, seed)
        self.rig.put(chunks)
        return chunks

    def here(self, chunks: list[Chunk]) -> int:
        """Leading chunks that are kept in memory, after what was asked for has come."""
        self.prefetcher.take_failures()
        return self.memory.kept(chunks)

    @property
    def keeps(self) -> int:
        """Bytes that are kept for requests."""
        return self.tier.stats().pinned_bytes

    def pause(self) -> None:
        """Wait until both threads have ended what they read, and go on."""
        chunks = self.put(99, 1)
        gate = threading.Event()
        self.faults.add(Fault("open", f"*{chunks[0].key.hex()}*", wait=gate))
        before = self.opened()
        self.rig.start("pause", self.rig.items(chunks, 190))
        until(lambda: self.opened() == before + 2)
        gate.set()
        assert self.rig.finished().failed_at is None
        self.faults.counts["open"] = before

    def opened(self) -> int:
        return self.faults.counts["open"]

    def has_room_for(self, chunks: list[Chunk]) -> None:
        """Check that nothing has kept the room of these chunks."""
        self.prefetcher.add("next", chunks)
        until(lambda: self.here(chunks) == len(chunks))

    def close(self) -> None:
        self.faults.heal()
        self.rig.close()
        self.memory.close()
        self.tier.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Waiting]]:
    made: list[Waiting] = []

    def make(chunks: float = 100, **options: Any) -> Waiting:
        made.append(Waiting(tmp_path / "shelf", chunks, **options))
        return made[-1]

    yield make
    for waiting in made:
        waiting.close()


def test_a_request_that_waited_reads_nothing_when_its_turn_comes(
    make: Callable[..., Waiting],
) -> None:
    waiting = make()
    chunks = waiting.put(0)
    waiting.prefetcher.add("r", chunks[:2])
    waiting.prefetcher.add("r", chunks[2:])
    objects = 3 * waiting.rig.fmt.shards
    until(lambda: waiting.here(chunks) == 3)
    # Until a read ends others share it.
    waiting.pause()
    waiting.faults.counts.clear()
    load, items = waiting.rig.load(chunks, 20)
    waiting.prefetcher.release("r")
    assert load.failed_at is None
    assert all(waiting.rig.holds(item) for item in items)
    assert waiting.opened() == 0
    counters = waiting.rig.counters.snapshot()
    assert counters["prefetched_objects"] == counters["memory_tier_loaded_objects"] == objects
    assert counters["prefetched_bytes"] == objects * waiting.rig.fmt.payload_size(0)
    assert counters["loaded_chunks"] == 3 + 1
    assert "prefetched_unused_objects" not in counters
    assert not waiting.keeps


def test_memory_is_never_more_than_it_may_be_and_goes_to_who_came_first(
    make: Callable[..., Waiting],
) -> None:
    waiting = make(4)
    first, second, third = (waiting.put(seed) for seed in range(3))
    for name, chunks in (("first", first), ("second", second), ("third", third)):
        waiting.prefetcher.add(name, chunks)
    until(lambda: (waiting.here(first), waiting.here(second)) == (3, 1))
    assert waiting.memory.kept(third) == 0
    assert 0 < waiting.keeps <= waiting.budget
    read = waiting.opened()
    assert read == 4 * waiting.rig.fmt.shards
    # When the first has been served there is room for the others.
    assert waiting.rig.load(first, 20)[0].failed_at is None
    waiting.prefetcher.release("first")
    until(lambda: (waiting.here(second), waiting.here(third)) == (3, 1))
    assert waiting.memory.kept(first) == 0


def test_what_another_request_wants_too_is_read_once_and_stays(
    make: Callable[..., Waiting],
) -> None:
    waiting = make()
    chunks = waiting.put(0)
    waiting.prefetcher.add("one", chunks)
    waiting.prefetcher.add("other", chunks)
    until(lambda: waiting.here(chunks) == 3)
    assert waiting.opened() == 3 * waiting.rig.fmt.shards
    waiting.prefetcher.release("one")
    assert waiting.here(chunks) == 3
    waiting.prefetcher.release("other")
    # A read may hold its own pin for a moment.
    until(lambda: not waiting.keeps)
    assert waiting.rig.count("prefetched_unused_objects") == 3 * waiting.rig.fmt.shards
    waiting.prefetcher.release("other")


def test_a_request_that_ends_while_it_is_read_for_leaves_nothing(
    make: Callable[..., Waiting],
) -> None:
    waiting = make(3)
    chunks, others = waiting.put(0), waiting.put(1)
    gate = threading.Event()
    waiting.faults.add(Fault("read", wait=gate))
    waiting.prefetcher.add("r", chunks)
    until(lambda: waiting.opened() == 1)
    waiting.prefetcher.release("r")
    gate.set()
    waiting.pause()
    assert waiting.opened() == 1
    assert waiting.here(chunks) == 0
    assert not waiting.keeps
    assert waiting.rig.count("cancelled_loads") == 0
    waiting.has_room_for(others)


def test_a_load_takes_over_what_is_being_read(make: Callable[..., Waiting]) -> None:
    waiting = make()
    chunks = waiting.put(0, 6)
    gate = threading.Event()
    waiting.faults.add(Fault("read", wait=gate))
    waiting.prefetcher.add("r", chunks)
    until(lambda: waiting.opened() == 1)
    items = waiting.rig.items(chunks, 20)
    waiting.rig.start("r", items)
    waiting.prefetcher.cancel_reads("r")
    gate.set()
    assert waiting.rig.finished().failed_at is None
    waiting.prefetcher.release("r")
    assert all(waiting.rig.holds(item) for item in items)
    assert waiting.opened() == 6 * waiting.rig.fmt.shards
    until(lambda: waiting.here(chunks) == 0 and not waiting.keeps)


def _broken() -> Exception:
    return TransientStorageError(5, "EIO")


@pytest.mark.parametrize(
    ("damage", "failure"),
    [
        (lambda w, chunk: w.rig.path(chunk, 0).unlink(), Failure.MISSING),
        (lambda w, chunk: w.rig.path(chunk, 1).write_bytes(b"no"), Failure.BAD),
        (
            lambda w, chunk: w.faults.add(Fault("open", f"*{chunk.key.hex()}*", error=_broken)),
            Failure.ERROR,
        ),
    ],
)
def test_what_cannot_be_had_is_known_before_the_load_comes(
    make: Callable[..., Waiting], damage: Callable[[Waiting, Chunk], Any], failure: Failure
) -> None:
    waiting = make()
    chunks = waiting.put(0)
    damage(waiting, chunks[1])
    waiting.prefetcher.add("a#b", chunks)
    found: list[tuple[Chunk, Failure]] = []
    until(lambda: bool(found.extend(waiting.prefetcher.take_failures()) or found))
    assert found == [(chunks[1], failure)]
    assert waiting.here(chunks) == 1


def test_a_storage_at_rest_is_blamed_for_nothing(make: Callable[..., Waiting]) -> None:
    waiting = make(3)
    chunks, others = waiting.put(0), waiting.put(1)
    waiting.rig.guard.reads.trip("broken", 1000.0)
    waiting.prefetcher.add("r", chunks)
    assert waiting.prefetcher.take_failures() == []
    waiting.prefetcher.release("r")
    waiting.rig.guard.reads.close()
    waiting.has_room_for(others)


def test_what_did_not_come_at_a_bad_moment_is_read_again(
    make: Callable[..., Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = make(3)
    chunks = waiting.put(0)
    # As when loads of other kinds use all of the memory, and stores all staging.
    others = make_chunks(waiting.rig.fmt, 3, seed=1)
    refs = [ObjectRef(chunk, shard) for chunk in others for shard in range(waiting.rig.fmt.shards)]
    rooms = [waiting.tier.reserve(waiting.rig.fmt, ref) for ref in refs]
    buffers = [waiting.rig.staging.acquire_for_load(timeout=0.0) for _ in range(32)]
    load = waiting.rig.loads.load
    loads: list[Piece] = []

    def note(*args: Any, **options: Any) -> Piece:
        loads.append(load(*args, **options))
        return loads[-1]

    monkeypatch.setattr(waiting.rig.loads, "load", note)
    waiting.prefetcher.add("r", chunks)
    until(lambda: bool(loads) and all(load.finished for load in loads))
    assert waiting.here(chunks) == 0
    for room in rooms:
        assert room is not None
        room.release()
    for buffer in buffers:
        assert buffer is not None
        waiting.rig.staging.release(*buffer)
    until(lambda: waiting.here(chunks) == 3)


def test_what_is_in_memory_already_is_kept_and_not_read(make: Callable[..., Waiting]) -> None:
    waiting = make(keeps=True)
    chunks = waiting.put(0)
    waiting.prefetcher.add("r", chunks)
    assert waiting.here(chunks) == 3
    waiting.prefetcher.release("r")
    assert not waiting.keeps
    assert waiting.rig.load(chunks, 20)[0].failed_at is None
    assert waiting.opened() == 0
    assert "prefetched_objects" not in waiting.rig.counters.snapshot()


def test_a_part_of_the_memory_is_left_to_others(make: Callable[..., Waiting]) -> None:
    waiting = make(8, keeps=True, share=0.5)
    first = waiting.put(0, 6)
    waiting.prefetcher.add("r", first)
    assert waiting.here(first) == 4
    # Stores and loads of others go through the rest.
    others = [waiting.put(seed, 4) for seed in range(1, 5)]
    assert all(waiting.memory.leading(chunks) for chunks in others[-1:])
    assert waiting.here(first) == 4
    assert waiting.tier.stats().bytes <= waiting.budget


def test_while_the_storage_rests_it_is_tried_again_each_second(
    make: Callable[..., Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = make()
    chunks = waiting.put(0)
    waiting.rig.guard.reads.trip("broken", 1000.0)
    now = [1000.0]
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    begun: list[int] = []
    load = waiting.rig.loads.load

    def count(*args: Any, **options: Any) -> Piece:
        begun.append(1)
        return load(*args, **options)

    def alive() -> int:
        gc.collect()
        return sum(type(one) is Piece for one in gc.get_objects())

    before = alive()
    monkeypatch.setattr(waiting.rig.loads, "load", count)
    waiting.prefetcher.add("r", chunks[:2])
    waiting.prefetcher.add("r", chunks[2:])
    for second in range(5):
        for _ in range(100):
            assert waiting.prefetcher.take_failures() == []
        assert len(begun) == 2 + second
        now[0] += 1.0
    # What a request keeps does not grow with the time it waits.
    assert alive() <= before + 2
    waiting.rig.guard.reads.close()
    until(lambda: waiting.here(chunks) == 3)


def test_a_prefix_that_was_read_for_a_request_that_went_is_read_for_the_next(
    make: Callable[..., Waiting],
) -> None:
    waiting = make(3)
    chunks, others = waiting.put(0), waiting.put(1)
    gate = threading.Event()
    waiting.faults.add(Fault("read", wait=gate))
    waiting.prefetcher.add("one", chunks)
    waiting.prefetcher.add("other", chunks)
    until(lambda: waiting.opened() == 1)
    waiting.prefetcher.release("one")
    gate.set()
    until(lambda: waiting.here(chunks) == 3)
    waiting.prefetcher.release("other")
    until(lambda: waiting.here(chunks) == 0 and not waiting.keeps)
    waiting.has_room_for(others)


def test_all_who_want_what_cannot_be_had_learn_it_and_give_up_what_is_behind(
    make: Callable[..., Waiting],
) -> None:
    waiting = make(4)
    chunks, others = waiting.put(0, 4), waiting.put(1)
    waiting.rig.path(chunks[1], 0).unlink()
    for name in ("one", "other"):
        waiting.prefetcher.add(name, chunks)
    waiting.prefetcher.add("third", others)
    found: list[tuple[Chunk, Failure]] = []
    until(lambda: bool(found.extend(waiting.prefetcher.take_failures()) or found))
    assert found == [(chunks[1], Failure.MISSING)]
    # There is room for others now.
    until(lambda: (waiting.here(chunks), waiting.here(others)) == (1, 3))


def test_chunk_that_is_read_when_its_request_gives_it_up_leaves_nothing(
    make: Callable[..., Waiting],
) -> None:
    waiting = make(4)
    chunks, others = waiting.put(0, 4), waiting.put(1)
    waiting.rig.path(chunks[1], 0).unlink()
    gate = threading.Event()
    waiting.faults.add(Fault("read", f"*{chunks[2].key.hex()}*", wait=gate))
    waiting.prefetcher.add("r", chunks[:2])
    waiting.prefetcher.add("r", chunks[2:])
    until(lambda: bool(waiting.prefetcher.take_failures()))
    gate.set()
    waiting.has_room_for(others)
    assert waiting.memory.kept(chunks) == 1


def test_object_that_is_retained_twice_is_dropped_at_once(make: Callable[..., Waiting]) -> None:
    waiting = make(keeps=True)
    (chunk,) = waiting.put(0, 1)
    for _ in range(2):
        assert waiting.memory.retain(ObjectRef(chunk, 0))
    waiting.memory.drop([chunk.key])
    assert not waiting.keeps


def test_many_chunks_are_given_back_in_several_steps(make: Callable[..., Waiting]) -> None:
    waiting = make()
    chunks = [chunk for seed in range(5) for chunk in waiting.put(seed, 9)]
    waiting.prefetcher.add("r", chunks)
    until(lambda: waiting.here(chunks) == 45)
    waiting.prefetcher.release("r")
    assert waiting.keeps
    for _ in range(3):
        waiting.prefetcher.take_failures()
    # A read may hold its own pin for a moment, and a later step then gives it back.
    until(lambda: not waiting.prefetcher.take_failures() and not waiting.keeps)


def test_nothing_is_kept_for_requests_of_weights_that_are_gone(
    make: Callable[..., Waiting],
) -> None:
    waiting = make(keeps=True)
    chunks = waiting.put(0)
    waiting.prefetcher.add("r", chunks)
    assert waiting.keeps
    waiting.memory.close()
    assert not waiting.keeps
    # A load that was under way ends after that.
    assert not waiting.memory.retain(ObjectRef(chunks[0], 0), fresh=True)
    assert not waiting.keeps
