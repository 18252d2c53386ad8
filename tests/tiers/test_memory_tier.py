"""The memory tier: which chunks lie in memory, and how they are removed from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, WINDOW, Kind
from kvshelf.memory.chunk_memory import ChunkMemory, ChunkPlaces
from kvshelf.memory.ring import Slot
from kvshelf.shelf.shelf import open_shelf
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import Tier, TieredShelf
from tests.support.formats import format_of_kinds, hold_buffer, make_format, sealed
from tests.support.prompts import make_chunks, make_tail

FMT = make_format(shards=2)
OTHER = make_format(shards=2, weights="user:other")
CHUNKS = make_chunks(FMT, 8)


@pytest.fixture
def memory() -> Iterator[ChunkMemory]:
    memory = ChunkMemory(1 << 20, keeps=True)
    yield memory
    memory.close()


@pytest.fixture
def places(memory: ChunkMemory) -> ChunkPlaces:
    return ChunkPlaces(memory, FMT, range(2))


@pytest.fixture
def tier(places: ChunkPlaces) -> MemoryTier:
    return MemoryTier(places)


def refs(*chunks: Chunk) -> list[ObjectRef]:
    """Return all objects of chunks."""
    return [ObjectRef(chunk, shard) for chunk in chunks for shard in range(2)]


def fill(places: ChunkPlaces, chunk: Chunk) -> Slot:
    """Return a sealed slot of a chunk that stays, pinned."""
    slot = places.claim(chunk, places.memory.loads)
    assert slot is not None
    for shard in places.shards:
        places.payload(slot, chunk, shard).fill_(1 + chunk.index)
    places.memory.ring.seal(slot, stays=True)
    return slot


def keep(places: ChunkPlaces, *chunks: Chunk) -> None:
    for chunk in chunks:
        places.memory.ring.release(places.memory.loads, [fill(places, chunk)])


def test_tier_holds_the_chunks_that_are_sealed_in_memory(
    tier: MemoryTier, places: ChunkPlaces
) -> None:
    shape: Tier = tier
    assert not shape.available
    keep(places, CHUNKS[0])
    assert shape.available
    assert shape.holds(FMT, refs(*CHUNKS[:2])) == [True, True, False, False]
    assert shape.holds(FMT, []) == []
    filling = places.claim(CHUNKS[1], places.memory.loads)
    assert filling is not None
    assert shape.holds(FMT, refs(CHUNKS[1])) == [False, False]
    places.memory.ring.release(places.memory.loads, [filling])


def test_chunk_of_full_memory_is_held_until_it_is_evicted(
    tier: MemoryTier, places: ChunkPlaces, memory: ChunkMemory
) -> None:
    count = memory.nbytes // places.slot_bytes
    chunks = make_chunks(FMT, count + 1, seed=1)
    keep(places, *chunks[:count])
    assert all(tier.holds(FMT, refs(*chunks[:count])))
    keep(places, chunks[count])
    assert tier.holds(FMT, refs(chunks[0], chunks[count])) == [False, False, True, True]


def test_kinds_and_namespaces_do_not_mix(memory: ChunkMemory) -> None:
    fmt = format_of_kinds({FULL: 2, WINDOW: 2})
    kinds: tuple[Kind, ...] = (FULL, WINDOW)
    full, window = (ChunkPlaces(memory, fmt.of(kind), range(2)) for kind in kinds)
    theirs = ChunkPlaces(memory, OTHER, range(2))
    (chunk,), (their_chunk,) = make_chunks(fmt, 1), make_chunks(OTHER, 1)
    keep(full, chunk)
    assert MemoryTier(full).holds(fmt, refs(chunk)) == [True, True]
    assert MemoryTier(window).holds(fmt.of(WINDOW), refs(chunk)) == [False, False]
    assert MemoryTier(theirs).holds(OTHER, refs(their_chunk)) == [False, False]
    keep(window, chunk)
    assert MemoryTier(full).remove(fmt, refs(chunk)) == 2
    assert MemoryTier(full).holds(fmt, refs(chunk)) == [False, False]
    assert MemoryTier(window).holds(fmt.of(WINDOW), refs(chunk)) == [True, True]


def test_tail_is_held_as_other_chunks_are(tier: MemoryTier, places: ChunkPlaces) -> None:
    tail = make_tail(FMT)
    keep(places, tail)
    assert tier.holds(FMT, refs(tail, *CHUNKS[:1])) == [True, True, False, False]
    assert tier.remove(FMT, refs(tail)) == 2
    assert tier.holds(FMT, refs(tail)) == [False, False]


def test_remove_counts_the_objects_of_chunks_that_were_held(
    tier: MemoryTier, places: ChunkPlaces, memory: ChunkMemory
) -> None:
    keep(places, *CHUNKS[:3])
    assert tier.remove(FMT, refs(CHUNKS[0], CHUNKS[2], CHUNKS[5])) == 4
    assert tier.remove(FMT, refs(CHUNKS[0])) == 0
    assert tier.holds(FMT, refs(*CHUNKS[:3])) == [False, False, True, True, False, False]
    assert tier.available
    assert tier.remove(FMT, refs(CHUNKS[1])) == 2
    assert not tier.available
    assert memory.ring.stats().kept_bytes == 0


def test_removed_chunk_keeps_its_bytes_while_it_is_pinned(
    tier: MemoryTier, places: ChunkPlaces, memory: ChunkMemory
) -> None:
    slot = fill(places, CHUNKS[0])
    assert tier.remove(FMT, refs(CHUNKS[0])) == 2
    assert tier.holds(FMT, refs(CHUNKS[0])) == [False, False]
    keep(places, *make_chunks(FMT, 2 * memory.nbytes // places.slot_bytes, seed=1))
    assert bool((places.payload(slot, CHUNKS[0], 1) == 1).all())
    memory.ring.release(memory.loads, [slot])
    assert memory.ring.stats().pinned_bytes == 0


def test_chunk_that_is_removed_while_it_is_filled_is_not_held(
    tier: MemoryTier, places: ChunkPlaces, memory: ChunkMemory
) -> None:
    slot = places.claim(CHUNKS[0], memory.loads)
    assert slot is not None
    assert tier.remove(FMT, refs(CHUNKS[0])) == 0
    memory.ring.seal(slot, stays=True)
    memory.ring.release(memory.loads, [slot])
    assert tier.holds(FMT, refs(CHUNKS[0])) == [False, False]
    keep(places, CHUNKS[0])
    assert tier.holds(FMT, refs(CHUNKS[0])) == [True, True]


def test_nothing_is_copied_into_the_tier_or_out_of_it(
    tier: MemoryTier, places: ChunkPlaces
) -> None:
    image = bytes(sealed(FMT, CHUNKS[0]))
    tier.keep(FMT, ObjectRef(CHUNKS[0], 0), image, hold_buffer)
    assert not tier.available
    keep(places, CHUNKS[0])
    buffer = bytearray(FMT.object_size(0))
    assert not tier.load(FMT, ObjectRef(CHUNKS[0], 0), memoryview(buffer))
    assert not any(buffer)


def test_shelf_behind_the_tier_is_not_asked_for_what_is_held(
    tier: MemoryTier, places: ChunkPlaces, memory: ChunkMemory, tmp_path: Path
) -> None:
    keep(places, CHUNKS[0])
    with open_shelf(tmp_path) as shelf:
        tiered = TieredShelf(shelf, [tier])
        view = tiered.view(FMT)
        assert view.nearby(refs(*CHUNKS[:2])) == 2 * [Presence.PRESENT] + 2 * [None]
        assert view.find(refs(*CHUNKS[:2])) == 2 * [Presence.PRESENT] + 2 * [Presence.MISSING]
        # Stores ask the shelf alone.
        assert view.probe(refs(CHUNKS[0])) == 2 * [Presence.MISSING]
        # The owner of the memory closes it.
        tiered.close()
    assert tier.available
    memory.close()
    assert not tier.available
    assert tier.holds(FMT, refs(CHUNKS[0])) == [False, False]
    assert tier.remove(FMT, refs(CHUNKS[0])) == 0
