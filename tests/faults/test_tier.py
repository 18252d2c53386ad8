"""The disk tier on a disk that makes trouble: the shelf is used, and nothing else happens."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.backends import Deadlines
from kvshelf.backends.breaker import Backoff
from kvshelf.format.keys import Chunk
from kvshelf.metrics import Counters
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.tiered import TieredShelf
from tests.faults.faultfs import FaultMount
from tests.sim.storage import FaultyStorage, posix
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, PATIENT, until

pytestmark = [pytest.mark.real, pytest.mark.slow]

BACKOFF = Backoff(0.02, 0.2)


class Machine:
    """An engine whose disk tier is on a disk that may make trouble."""

    def __init__(self, folder: Path, mount: FaultMount) -> None:
        self.mount = mount
        self.place = mount.path / folder.name
        self.counters = Counters()
        self.remote = FaultyStorage(posix(folder / "remote"))
        self.tier = DiskTier(self.place, 1 << 30, counters=self.counters, backoff=BACKOFF)
        assert self.tier.guard is not None
        self.tier.guard.deadlines = PATIENT
        self.rig = Rig(
            self.remote,
            deadlines=PATIENT,
            staging_objects=64,
            in_front=lambda shelf: TieredShelf(shelf, [self.tier]),
        )

    def put(self, chunks: list[Chunk]) -> None:
        self.rig.put(chunks)
        self.tier.drain(PATIENCE)

    def load(self, chunks: list[Chunk]) -> bool:
        load, items = self.rig.load(chunks, 20)
        assert all(self.rig.holds(item) for item in items[: load.failed_at])
        for cache in self.rig.caches:
            cache.zero_()
        self.tier.drain(PATIENCE)
        return load.failed_at is None

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)

    def close(self) -> None:
        self.mount.clear()
        self.rig.transfer.close(0.0)
        self.tier.close()
        self.rig.guard.close()


@pytest.fixture
def machine(tmp_path: Path, mount: FaultMount, short_pauses: None) -> Iterator[Machine]:
    machine = Machine(tmp_path, mount)
    yield machine
    machine.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_writes(
    machine: Machine, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    chunks = make_chunks(machine.rig.fmt, 12)
    machine.put(chunks[:2])
    machine.mount.add("create|write|mkdir", f"{machine.place.name}/*", error=code)
    with caplog.at_level(logging.INFO):
        machine.put(chunks)
        assert machine.load(chunks)
    assert machine.count("disk_tier_dropped_objects") > 0
    assert machine.count("disk_tier_breaker_opens") == 1
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1
    # Only an error may be over in a moment: the others are refusals.
    refused = code != errno.EIO
    assert ("takes no stores" in caplog.text) == refused
    assert ("no objects are copied to the disk tier" in caplog.text) != refused
    # What is there is used meanwhile, and nothing of what failed is counted.
    before = machine.remote.counts["open"]
    assert machine.load(chunks[:2])
    assert machine.remote.counts["open"] == before
    machine.mount.clear()

    def full() -> bool:
        before = machine.count("disk_tier_loaded_objects")
        assert machine.load(chunks)
        return machine.count("disk_tier_loaded_objects") - before == 24

    until(full)
    assert "write circuit breaker closed" in caplog.text
    assert len(list(machine.place.rglob("*.safetensors"))) == 24


def test_a_disk_that_hangs_keeps_few_loads(machine: Machine) -> None:
    chunks = make_chunks(machine.rig.fmt, 4)
    machine.put(chunks)
    assert machine.tier.guard is not None
    machine.tier.guard.deadlines = Deadlines(0.5, 0.5, 0.5)
    machine.mount.add("open|read", f"{machine.place.name}/*", block=True)
    # Loads that met it are given up in time; after few of them it is not asked any more.
    until(lambda: machine.load(chunks))
    assert machine.count("disk_tier_breaker_opens") >= 1
    for _ in range(5):
        assert machine.load(chunks)
    assert machine.rig.count("breaker_opens") == 0
    machine.mount.clear()
    until(lambda: machine.tier.available)
    until(lambda: machine.load(chunks) and machine.count("disk_tier_loaded_objects") > 0)
