"""A model of the disk tier: any sequence of calls, damage, evictions and restarts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvshelf.backends import WriteResult
from kvshelf.backends.base import delete_one
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import NoSpaceStorageError, ObjectMissingError
from kvshelf.format.keys import Chunk
from kvshelf.format.names import object_name
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.tiered import TieredShelf
from tests.faults.crash_child import make_format
from tests.sim.storage import Fault, FaultyStorage
from tests.support.formats import hold_buffer, sealed
from tests.support.prompts import make_chunks
from tests.support.waiting import PATIENCE, PATIENT

FMT = make_format()
SIZE = FMT.object_size(0)
ITEMS: list[tuple[Chunk, int]] = [(c, s) for c in make_chunks(FMT, 2) for s in range(FMT.shards)]
any_item = st.integers(0, len(ITEMS) - 1)


def image_of(number: int) -> bytes:
    return bytes(sealed(FMT, *ITEMS[number]))


class _Tiered(RuleBasedStateMachine):
    """A shelf with a tier that has room for all objects, compared with a set."""

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
        self.tier = DiskTier(self.near, 1 << 30, open_seconds=PATIENCE)
        assert self.tier.usable is not None
        self.tier.usable.backend.deadlines = PATIENT
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
    def store_on_full_shelf(self, number: int) -> None:
        """What the shelf does not take is not copied."""
        copies = self.copies()
        self.counting.add(Fault("write", error=NoSpaceStorageError(28, "full"), times=1))
        with pytest.raises(NoSpaceStorageError):
            self.tiered.view(FMT).publish(
                ObjectRef(*ITEMS[number]), image_of(number), hold=hold_buffer
            )
        self.settle()
        assert self.copies() == copies
        self.counting.heal()
        self.shelf.backend.writes.close()

    @rule(number=any_item)
    def store(self, number: int) -> None:
        copy = self.path(self.near, number)
        cut = copy.exists() and copy.stat().st_size != SIZE
        result = self.tiered.view(FMT).publish(
            ObjectRef(*ITEMS[number]), image_of(number), hold=hold_buffer
        )
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
        chunk, shard = ITEMS[number]
        failed = self.tiered.view(FMT).load_all(chunk, [shard], [memoryview(image)], hold_buffer)
        if failed is not None:
            assert isinstance(failed.error, ObjectMissingError)
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
        assert self.tier.usable is not None
        guard = self.tier.usable.backend
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

    def teardown(self) -> None:
        if hasattr(self, "stored"):
            copies = self.copies()
            self.tiered.close()
            with open_shelf(self.near, read_only=True) as shelf:
                assert len(list(shelf.objects())) == len(copies), "a tier is a shelf"
                assert all(info.namespace == FMT.namespace for info in shelf.namespaces())
            self._folder.cleanup()


TestTiered = _Tiered.TestCase
TestTiered.settings = settings(max_examples=25, stateful_step_count=25)
