"""Loads of chunks that memory keeps: what was stored, loaded or read ahead by the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.memory.ring import Slot
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.tiered import TieredShelf
from kvshelf.transfer.loads import Reading
from kvshelf.transfer.stores import StoreOutcome
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

FMT = make_format()
OBJECTS = FMT.shards


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(posix(tmp_path / "shelf"))


StartRig: TypeAlias = Callable[..., Rig]


@pytest.fixture
def start(storage: FaultyStorage) -> Iterator[StartRig]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(storage, fmt=FMT, blocks=400, **{"keeps": True, **options}))
        return rigs[-1]

    yield make
    storage.heal()
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(start: StartRig) -> Rig:
    return start()


def stored(root: Path, count: int, seed: int = 0) -> list[Chunk]:
    """Chunks that another engine has stored."""
    chunks = make_chunks(FMT, count, seed)
    with closing(Rig(posix(root / "shelf"), fmt=FMT, blocks=400, memory_chunks=2 * count)) as rig:
        rig.put(chunks)
    return chunks


def break_reads(storage: FaultyStorage) -> None:
    storage.add(Fault("open", error=lambda: TransientStorageError(5, "broken")))


def test_chunk_that_was_loaded_once_is_loaded_from_memory(
    rig: Rig, storage: FaultyStorage, tmp_path: Path
) -> None:
    chunks = stored(tmp_path, 4)
    rig.comes_back(chunks, 100)
    assert storage.counts["open"] == 4 * OBJECTS
    break_reads(storage)
    rig.comes_back(chunks, 200)
    assert rig.count("memory_tier_loaded_objects") == 4 * OBJECTS
    assert rig.count("memory_tier_loaded_bytes") == 4 * rig.loads.chunk_bytes
    assert rig.count("memory_tier_stored_objects") == 4 * OBJECTS


def test_chunk_that_was_stored_is_loaded_from_memory(rig: Rig, storage: FaultyStorage) -> None:
    chunks = make_chunks(FMT, 3)
    rig.put(chunks)
    break_reads(storage)
    rig.comes_back(chunks, 100)


def test_chunk_that_another_engine_had_stored_is_not_kept_by_a_store(
    rig: Rig, tmp_path: Path
) -> None:
    chunks = stored(tmp_path, 2)
    rig.put(chunks)
    assert rig.context.places.leading(chunks) == 0


def test_chunk_in_memory_is_stored_again_without_a_gather(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = make_chunks(FMT, 2)
    rig.put(chunks)
    for chunk in chunks:
        for shard in range(OBJECTS):
            rig.path(chunk, shard).unlink()
    gathers: list[object] = []
    monkeypatch.setattr(rig.cache, "gather", lambda *call: gathers.append(call))
    rig.transfer.forget_stored()
    for item in rig.items(chunks, 20):
        assert rig.store(item) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    assert not gathers
    monkeypatch.undo()
    rig.host.ring.forget(rig.context.places.name(chunks[0]))
    rig.comes_back(chunks, 100)


def test_nothing_stays_in_memory_without_keeps(
    start: StartRig, storage: FaultyStorage, tmp_path: Path
) -> None:
    chunks, rig = stored(tmp_path, 2), start(keeps=False)
    for first_block in (100, 200):
        rig.comes_back(chunks, first_block)
    assert storage.counts["open"] == 2 * 2 * OBJECTS
    assert rig.host.ring.stats().kept_bytes == 0


def test_chunk_that_left_memory_is_loaded_from_the_disk_tier_and_kept_again(
    start: StartRig, storage: FaultyStorage, tmp_path: Path
) -> None:
    chunks = stored(tmp_path, 4)
    disk = DiskTier(tmp_path / "disk", 1 << 30)
    with closing(disk):
        rig = start(in_front=lambda shelf: TieredShelf(shelf, [disk]))
        rig.comes_back(chunks, 100)
        assert disk.drain(PATIENCE)
        break_reads(storage)
        for chunk in chunks:
            assert rig.host.ring.forget(rig.context.places.name(chunk))
        rig.comes_back(chunks, 200)
        assert rig.context.places.leading(chunks) == 4
        assert rig.count("memory_tier_loaded_objects") == 0


def test_hit_in_memory_waits_for_no_read_of_the_storage(
    rig: Rig, storage: FaultyStorage, tmp_path: Path
) -> None:
    kept, slow = stored(tmp_path, 4), stored(tmp_path, 4, 7)
    rig.comes_back(kept, 100)
    gate = storage.hang("read", f"*{slow[0].key.hex()}*")
    few = rig.start("few", rig.items(slow, 200), at_once=1)
    # All threads that read are at its first chunk.
    until(lambda: storage.counts["open"] == (4 + 1) * OBJECTS)
    hit = rig.items(kept, 300)
    assert rig.start("hit", hit) is rig.finished()
    assert all(rig.holds(item) for item in hit)
    assert (few.leading, storage.counts["open"]) == (0, (4 + 1) * OBJECTS)
    gate.set()
    assert rig.finished() is few
    assert few.failed_at is None


def test_hit_in_memory_is_loaded_while_the_storage_is_not_available(
    rig: Rig, tmp_path: Path
) -> None:
    kept, others = stored(tmp_path, 2), stored(tmp_path, 2, 7)
    rig.comes_back(kept, 100)
    rig.guard.reads.trip("a test", 1000.0)
    rig.comes_back(kept, 200)
    assert rig.load(others, 300)[0].failed_at == 0


def test_two_transfers_that_read_one_chunk_at_once_keep_it_once(
    rig: Rig, storage: FaultyStorage, tmp_path: Path
) -> None:
    chunks = stored(tmp_path, 3)
    with closing(Rig(posix(tmp_path / "shelf"), fmt=FMT, blocks=400)) as other:
        other.transfer.close()
        other.host.close()
        other.host = rig.host
        other.begin()
        gate = storage.hang("read")
        items = rig.items(chunks, 100)
        rig.start("r", items)
        until(lambda: storage.counts["open"] == 2)
        other.comes_back(chunks, 200)
        gate.set()
        assert rig.finished().failed_at is None
        assert all(rig.holds(item) for item in items)
        until(lambda: rig.chunks_in_use == 0)
        assert rig.host.ring.stats().kept_bytes == 3 * rig.slot_bytes


def test_chunk_that_comes_into_memory_while_it_is_begun_is_not_read_over(
    rig: Rig, storage: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chunk,) = stored(tmp_path, 1)
    places, (item,) = rig.context.places, rig.items([chunk], 0)
    rig.fill(item)

    claim_slot = rig.loads._slot_for

    def slot_for(reading: Reading) -> Slot | None:
        """Claim a slot after a store of the same chunk, which ends when the load has begun."""
        slot = places.claim(chunk, rig.context.shares.stores)
        assert slot is not None
        rig.cache.gather(item.slots, [places.payload(slot, chunk, n) for n in range(OBJECTS)])
        for shard in range(OBJECTS):
            FMT.seal(places.view(slot, chunk, shard), chunk, shard)
        rig.host.ring.seal(slot, stays=True)
        rig.host.ring.release(rig.context.shares.stores, [slot])
        return claim_slot(reading)

    with monkeypatch.context() as patch:
        patch.setattr(rig.loads, "_slot_for", slot_for)
        storage.add(Fault("read", damage=bytearray.reverse))
        assert rig.load([chunk], 100)[0].failed_at == 0
    # What lies in memory is still right.
    rig.comes_back([chunk], 200)


def test_chunk_that_a_load_wants_twice_is_loaded_into_both_places(
    start: StartRig, tmp_path: Path
) -> None:
    chunks, rig = stored(tmp_path, 2), start(keeps=False)
    rig.comes_back([chunks[0], chunks[1], chunks[0]], 100)


def test_loads_that_wait_end_when_the_storage_rests_though_memory_has_something(
    rig: Rig, storage: FaultyStorage, tmp_path: Path
) -> None:
    kept, chunks = stored(tmp_path, 1), stored(tmp_path, 3, 7)
    rig.comes_back(kept, 100)
    gate = storage.hang("read", f"*{chunks[0].key.hex()}*")
    load = rig.start("few", rig.items(chunks, 200), at_once=1)
    until(lambda: storage.counts["open"] > OBJECTS)
    rig.guard.reads.trip("a test", 1000.0)
    rig.loads._give_up_all()
    assert load.finished and load.failed_at == 0
    gate.set()


def test_kinds_that_share_a_memory_have_a_spare_slot_for_each_thread_and_shares_of_their_own(
    start: StartRig,
) -> None:
    rig = start(keeps=False, memory_chunks=40)
    other = rig.host.serve("another kind", 3, rig.slot_bytes)
    spares = rig.context.shares.threads + other.threads
    assert rig.host.ring.spare_bytes == spares * rig.slot_bytes
    places, mine = rig.context.places, rig.context.shares
    (chunk,) = make_chunks(FMT, 1)
    for share in (mine.stores, mine.ahead, other.ahead):
        while places.claim(chunk, share, is_named=False) is not None:
            pass
    # What one kind holds is not taken from another.
    assert places.claim(chunk, other.stores, is_named=False) is not None
    while places.claim(chunk, other.stores, is_named=False) is not None:
        pass
    slots = [places.claim(chunk, rig.host.loads, is_named=False) for _ in range(spares)]
    assert None not in slots
    for share in (mine.stores, mine.ahead, other.stores, other.ahead, rig.host.loads):
        rig.host.ring.release(share, list(share._pins))
