"""The disk tier on a disk that makes trouble: the shelf is used, and nothing else happens."""

from __future__ import annotations

import errno
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvshelf.backends import Deadlines, WriteResult
from kvshelf.backends.base import delete_one
from kvshelf.backends.breaker import Backoff
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import ObjectMissingError
from kvshelf.format.keys import Chunk
from kvshelf.format.names import object_name
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.tiered import TieredShelf
from tests.faults.crash_child import make_format
from tests.faults.faultfs import FaultMount
from tests.sim.storage import FaultyStorage, posix
from tests.support.formats import sealed
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


def test_a_disk_that_fails_reads(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    chunks = make_chunks(machine.rig.fmt, 8)
    machine.put(chunks)
    machine.mount.add("open|read|getattr", f"{machine.place.name}/*", error=errno.EIO)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert machine.load(chunks)
    assert machine.count("disk_tier_loaded_objects") == 0
    # Its circuit breaker may have been closed by a trial, and opened again.
    said = caplog.text.count("the disk tier is not used")
    assert 1 <= said <= machine.count("disk_tier_breaker_opens")
    machine.mount.clear()
    until(lambda: machine.tier.available)
    until(lambda: machine.load(chunks) and machine.count("disk_tier_loaded_objects") > 0)


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
    assert machine.rig.shelf.backend.reads.opened == 0
    machine.mount.clear()
    until(lambda: machine.tier.available)
    until(lambda: machine.load(chunks) and machine.count("disk_tier_loaded_objects") > 0)


# ---------------------------------------------------------------------------------- any sequence

FMT = make_format()
SIZE = FMT.object_size(0)
ITEMS: list[tuple[Chunk, int]] = [(c, s) for c in make_chunks(FMT, 2) for s in range(FMT.shards)]
any_item = st.integers(0, len(ITEMS) - 1)


def image_of(number: int) -> bytes:
    return bytes(sealed(FMT, *ITEMS[number]))


class _Tiered(RuleBasedStateMachine):
    """A shelf with a tier that has room for three of four objects, compared with a set."""

    @initialize()
    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        root = Path(self._folder.name)
        self.remote = root / "remote"
        self.near = root / "tier"
        self.counting = FaultyStorage(PosixBackend(self.remote))
        self.stored: set[int] = set()
        #: Copies whose bytes are wrong, if they are there.
        self.damaged: set[int] = set()
        self.open()

    def open(self) -> None:
        self.tier = DiskTier(self.near, 3 * SIZE, open_seconds=PATIENCE)
        assert self.tier.guard is not None
        self.tier.guard.deadlines = PATIENT
        self.shelf = Shelf(GuardedBackend(self.counting, PATIENT))
        self.tiered = TieredShelf(self.shelf, [self.tier])

    def path(self, root: Path, number: int) -> Path:
        return root / FMT.namespace.folder / object_name(*ITEMS[number], FMT.shards)

    def copies(self) -> set[int]:
        return {n for n in range(len(ITEMS)) if self.path(self.near, n).exists()}

    def settle(self) -> None:
        assert self.tier.drain(PATIENCE)
        self.damaged &= self.copies()

    @rule(number=any_item)
    def store(self, number: int) -> None:
        copy = self.path(self.near, number)
        cut = copy.exists() and copy.stat().st_size != SIZE
        result = self.tiered.view(FMT).publish(ObjectRef(*ITEMS[number]), image_of(number))
        assert (result is WriteResult.EXISTED) == (number in self.stored)
        self.stored.add(number)
        self.settle()
        assert number in self.copies()
        if cut:
            assert copy.read_bytes() == image_of(number), "a copy of a wrong size was kept"
            self.damaged.discard(number)

    @rule(number=any_item)
    def load(self, number: int) -> None:
        near = number in self.copies() - self.damaged
        self.counting.counts.clear()
        image = bytearray(SIZE)
        try:
            self.tiered.view(FMT).load(ObjectRef(*ITEMS[number]), memoryview(image))
        except ObjectMissingError:
            assert not near
            assert number not in self.stored
        else:
            assert near or number in self.stored
            assert image == image_of(number), "a load gave wrong bytes"
            assert self.counting.counts["open"] == (0 if near else 1)
        self.damaged.discard(number)
        self.settle()
        assert (number in self.copies()) == (near or number in self.stored)

    @rule()
    def probe(self) -> None:
        self.counting.counts.clear()
        answers = self.tiered.view(FMT).find(ITEMS)
        there = {n for n, answer in enumerate(answers) if answer is Presence.PRESENT}
        whole = {n for n in self.copies() if self.path(self.near, n).stat().st_size == SIZE}
        assert there == self.stored | whole
        assert self.counting.counts["stat_names"] == len(ITEMS) - len(whole)
        stored = self.tiered.view(FMT).probe(ITEMS)
        assert {n for n, a in enumerate(stored) if a is Presence.PRESENT} == self.stored

    @rule(number=any_item, how=st.sampled_from(["flip", "cut", "remove"]))
    def damage(self, number: int, how: str) -> None:
        path = self.path(self.near, number)
        if not path.exists():
            return
        data = bytearray(path.read_bytes())
        if how == "remove":
            path.unlink()
            self.damaged.discard(number)
            return
        if how == "cut":
            del data[-7:]
        else:
            data[-1] ^= 1
        good = image_of(number)
        path.write_bytes(data)
        (self.damaged.discard if data == good else self.damaged.add)(number)

    @rule(number=any_item)
    def delete_from_the_shelf(self, number: int) -> None:
        self.path(self.remote, number).unlink(missing_ok=True)
        self.stored.discard(number)

    @rule(number=any_item)
    def evict(self, number: int) -> None:
        """Another process makes room."""
        guard = self.tier.guard
        assert guard is not None
        delete_one(guard, f"{FMT.namespace.folder}/{object_name(*ITEMS[number], FMT.shards)}")
        self.settle()

    @rule()
    def restart(self) -> None:
        self.tiered.close()
        self.counting = FaultyStorage(PosixBackend(self.remote))
        self.open()

    @invariant()
    def the_shelf_is_as_it_was_left(self) -> None:
        if hasattr(self, "stored"):
            for number in range(len(ITEMS)):
                path = self.path(self.remote, number)
                assert path.exists() == (number in self.stored)
                assert not path.exists() or path.read_bytes() == image_of(number)

    @invariant()
    def the_tier_is_within_its_bound(self) -> None:
        if hasattr(self, "stored"):
            assert len(self.copies()) <= 3

    def teardown(self) -> None:
        if hasattr(self, "stored"):
            self.tiered.close()
            self._folder.cleanup()


def test_a_store_replaces_a_copy_that_was_cut() -> None:
    machine = _Tiered()
    machine.start()
    try:
        machine.store(0)
        machine.damage(0, "cut")
        machine.store(0)
        machine.load(0)
    finally:
        machine.teardown()


TestTiered = _Tiered.TestCase
TestTiered.settings = settings(max_examples=12, stateful_step_count=25)
