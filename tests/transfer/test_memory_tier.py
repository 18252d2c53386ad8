"""A memory tier in front: what gets into it, what is read from there, and what stays there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.memory.size_classes import SizeClasses
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import Tier, TieredShelf
from kvshelf.transfer.prefetch import KindMemory
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

FMT = make_format()
OBJECT = SizeClasses(1 << 30).rounded(FMT.object_size(0))


class Near:
    """A transfer behind a memory tier, and perhaps a disk tier."""

    def __init__(
        self, root: Path, *, objects: int = 100, disk: Path | None = None, **options: Any
    ) -> None:
        self.faults = FaultyStorage(posix(root))
        self.counters = Counters()
        self.tier = MemoryTier(objects * OBJECT, counters=self.counters)
        tiers: list[Tier] = [KindMemory(self.tier, FMT, self.counters, **options)]
        self.disk: DiskTier | None = None
        if disk is not None:
            self.disk = DiskTier(disk, 1 << 30, counters=self.counters)
            tiers.append(self.disk)
        self.rig = Rig(
            self.faults,
            fmt=FMT,
            blocks=400,
            in_front=lambda shelf: TieredShelf(shelf, tiers),
        )

    def opens(self) -> int:
        return self.faults.counts["open"]

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)

    def load(self, chunks: list[Chunk], first_block: int = 100) -> int | None:
        """Load; return at which chunk it failed, having checked the others."""
        load, items = self.rig.load(chunks, first_block)
        good = len(items) if load.failed_at is None else load.failed_at
        assert all(self.rig.holds(item) for item in items[:good])
        return load.failed_at

    def idle(self) -> None:
        """Wait until nothing of the memory is in use."""
        until(lambda: not self.tier.stats().pinned_bytes)

    def close(self) -> None:
        self.faults.heal()
        self.rig.close()
        if self.disk is not None:
            self.disk.close()
        self.tier.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Near]]:
    started: list[Near] = []

    def make(**options: Any) -> Near:
        started.append(Near(tmp_path / "shelf", **options))
        return started[-1]

    yield make
    for near in started:
        near.close()


def stored(tmp_path: Path, count: int, seed: int = 0) -> list[Chunk]:
    """Chunks that another engine has stored."""
    chunks = make_chunks(FMT, count, seed)
    with closing(Rig(posix(tmp_path / "shelf"), fmt=FMT)) as rig:
        rig.put(chunks)
    return chunks


def test_what_is_loaded_once_comes_from_memory(start: Callable[..., Near], tmp_path: Path) -> None:
    chunks = stored(tmp_path, 4)
    near = start(disk=tmp_path / "disk")
    assert near.disk is not None
    assert near.load(chunks) is None
    assert near.opens() == 4 * FMT.shards
    assert near.disk.drain(PATIENCE)
    # All tiers have got it.
    near.faults.add(Fault("open", error=lambda: TransientStorageError(5, "broken")))
    assert near.load(chunks, 200) is None
    assert near.count("memory_tier_loaded_objects") == 4 * FMT.shards
    assert near.count("disk_tier_loaded_objects") == 0
    near.idle()
    for chunk in chunks:
        for shard in range(FMT.shards):
            assert near.tier.remove(FMT, [ObjectRef(chunk, shard)])
    assert near.load(chunks, 300) is None
    assert near.count("disk_tier_loaded_objects") == 4 * FMT.shards
    # ... and has given it to the tier before it.
    assert near.tier.stats().objects == 4 * FMT.shards


def test_a_hit_in_memory_waits_for_no_read_of_a_load_that_is_read_few_chunks_at_a_time(
    start: Callable[..., Near], tmp_path: Path
) -> None:
    kept, slow = stored(tmp_path, 4), stored(tmp_path, 4, 7)
    near = start()
    assert near.load(kept) is None
    gate = threading.Event()
    near.faults.add(Fault("read", f"*{slow[0].key.hex()}*", wait=gate))
    items = {FMT.kind: near.rig.items(slow, 200)}
    few = near.rig.transfer.load("few", items, at_once=1).pieces[FMT.kind]
    # All threads that read are at its first chunk.
    until(lambda: near.opens() == (4 + 1) * FMT.shards)
    hit = near.rig.items(kept, 300)
    assert near.rig.start("hit", hit) is near.rig.finished()
    assert all(near.rig.holds(item) for item in hit)
    assert (few.leading, near.opens()) == (0, (4 + 1) * FMT.shards)
    gate.set()
    assert near.rig.finished() is few
    assert few.failed_at is None


def test_loads_into_memory_take_no_staging(start: Callable[..., Near], tmp_path: Path) -> None:
    chunks = stored(tmp_path, 3)
    near = start()
    taken = [near.rig.staging.acquire_for_load(timeout=0.0) for _ in range(near.rig.staging.limit)]
    assert near.load(chunks) is None
    near.idle()
    for buffer in taken:
        assert buffer is not None
        near.rig.staging.release(*buffer)


def test_objects_that_memory_has_no_room_for_are_read_into_staging(
    start: Callable[..., Near], tmp_path: Path
) -> None:
    chunks = stored(tmp_path, 2)
    near = start(objects=1)
    (other,) = make_chunks(FMT, 1, seed=1)
    room = near.tier.reserve(FMT, ObjectRef(other, 0))
    assert room is not None
    assert near.load(chunks) is None
    assert near.count("memory_tier_dropped_objects") == 2 * FMT.shards
    room.release()


def test_two_transfers_share_one_memory(start: Callable[..., Near], tmp_path: Path) -> None:
    chunks = stored(tmp_path, 3)
    near = start()
    memory = KindMemory(near.tier, FMT, near.counters)
    with closing(
        Rig(
            posix(tmp_path / "shelf"),
            fmt=FMT,
            blocks=400,
            in_front=lambda shelf: TieredShelf(shelf, [memory]),
        )
    ) as other:
        gate = threading.Event()
        near.faults.add(Fault("read", wait=gate))
        items = near.rig.items(chunks, 100)
        near.rig.start("r", items)
        until(lambda: near.opens() == 2)
        # The same objects are read twice at once: one copy stays.
        load, others = other.load(chunks, 200)
        assert load.failed_at is None
        assert all(other.holds(item) for item in others)
        gate.set()
        assert near.rig.finished().failed_at is None
        assert all(near.rig.holds(item) for item in items)
    near.idle()
    assert near.tier.stats().objects == 3 * FMT.shards
