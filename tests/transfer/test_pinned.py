"""Loads of objects that the storage has in memory: read where they lie, and given back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk
from kvshelf.memory.arena import bytes_at
from kvshelf.shelf.view import NamespaceView
from kvshelf.transfer import loads
from kvshelf.transfer.load import Failure, LoadPiece
from tests.sim.storage import FaultyStorage, LendingMemory, LendingView, Loan, posix
from tests.support.prompts import make_chunks
from tests.support.threads import named
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until


class Lender:
    """A transfer from a storage that lends."""

    def __init__(self, root: Path) -> None:
        self.reads = FaultyStorage(posix(root))
        self.faults = FaultyStorage(self.reads)
        self.lending = LendingMemory(self.reads, self.faults)
        self.others = named("kvshelf-load")
        self.rig = Rig(self.faults, memory=self.lending, blocks=200, options={"load_threads": 2})
        #: While it is clear, lent objects do not reach their borrowers.
        self.gate = threading.Event()
        self.gate.set()
        self.lending.on_lend = self._lend
        self.asked = 0

    def _lend(self, loan: Loan) -> None:
        self.asked += 1
        assert self.gate.wait(PATIENCE)

    @property
    def loans(self) -> list[Loan]:
        return self.lending.loans

    def put(self, count: int, seed: int = 0) -> list[Chunk]:
        chunks = make_chunks(self.rig.fmt, count, seed)
        self.rig.put(chunks)
        self.reads.counts.clear()
        return chunks

    def start(self, chunks: Sequence[Chunk], first_block: int = 20, name: str = "r") -> LoadPiece:
        return self.rig.start(name, self.rig.items(chunks, first_block))

    def settled(self, loans: int | None = None) -> None:
        """End all threads, and check that what was lent was given back once, and all else too."""
        self.rig.transfer.close()
        until(lambda: not named("kvshelf-load") - self.others)
        assert [loan.released for loan in self.loans] == [1] * len(self.loans)
        assert loans is None or len(self.loans) == loans
        assert self.rig.chunks_in_use == 0

    def close(self) -> None:
        self.gate.set()
        self.faults.heal()
        self.rig.transfer.close()
        self.rig.guard.close()


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[Lender]:
    with closing(Lender(tmp_path / "shelf")) as lender:
        yield lender


def test_lent_objects_are_loaded_where_they_lie_while_no_slot_is_free(lender: Lender) -> None:
    rig = lender.rig
    chunks = lender.put(5)
    held = []
    while (slot := rig.host.ring.claim(None, 1, rig.host.loads)) is not None:
        held.append(slot)
    rig.comes_back(chunks, 20)
    # A finished load has given back what it used.
    assert [loan.released for loan in lender.loans] == [1] * 5 * rig.fmt.shards
    rig.host.ring.release(rig.host.loads, held)
    assert rig.count("loaded_chunks") == 5
    assert rig.count("loaded_bytes") == 5 * rig.loads.chunk_bytes


@pytest.mark.parametrize("lent", [True, False])
def test_loan_that_comes_late_is_given_back_unused(
    lender: Lender, lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = lender.put(1)
    read: list[object] = []
    monkeypatch.setattr(NamespaceView, "load", lambda *arguments: read.append(arguments))
    hold = lender.faults.hang("pin")
    lender.lending.lends = lambda name: lent
    lender.start(chunks)
    load = lender.rig.finished()
    assert load.failed_at == 0
    until(lambda: lender.rig.count("stuck_threads") == 2)
    hold.set()
    lender.settled(lender.rig.fmt.shards if lent else 0)
    assert lender.rig.untouched(lender.rig.items(chunks, 20)[0])
    # Nobody waits for the object any more, so it is not read either.
    assert not read


@pytest.mark.parametrize("reads_whole", [False, True])
def test_closing_ends_loads_of_lent_objects(
    reads_whole: bool, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedBackend, "reads_whole", reads_whole)
    chunks = lender.put(3)
    lender.gate.clear()
    load = lender.start(chunks)
    until(lambda: lender.asked >= 1)
    ending = threading.Thread(target=lender.rig.transfer.close)
    ending.start()
    until(lambda: load.finished)
    assert load.failed_at == 0
    lender.gate.set()
    ending.join(PATIENCE)
    lender.settled()
    assert all(lender.rig.untouched(item) for item in lender.rig.items(chunks, 20))


def test_chunks_of_a_load_are_asked_for_together(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "_AHEAD", 4)
    monkeypatch.setattr(GuardedBackend, "reads_whole", True)
    # Others may begin a chunk before the answer is there.
    lender.rig.loads._storage_threads = 1
    chunks = lender.put(7)
    asked: list[int] = []
    pin_all = LendingView.pin_all

    def counting(view: LendingView, chunks: Sequence[Chunk], *args: Any, **options: Any) -> Any:
        asked.append(len(chunks))
        return pin_all(view, chunks, *args, **options)

    monkeypatch.setattr(LendingView, "pin_all", counting)
    lender.rig.comes_back(chunks, 20)
    assert asked == [4, 3]
    lender.settled()


def test_missing_object_is_not_looked_for_twice(lender: Lender) -> None:
    chunks = lender.put(2)
    for shard in range(lender.rig.fmt.shards):
        lender.rig.path(chunks[1], shard).unlink()
    load, _ = lender.rig.load(chunks, 20)
    assert load.failed_at == 1
    assert load.failures[0] == (chunks[1], Failure.MISSING)
    lender.settled(lender.rig.fmt.shards)


def test_tensor_of_read_only_bytes_keeps_them_no_longer_than_they_are_lent() -> None:
    data = bytearray(b"0123456789")
    tensor = bytes_at(memoryview(data)[2:].toreadonly())
    assert tensor.tolist() == list(b"23456789")
    # A tensor that held on to the bytes would not let their owner resize them.
    data.append(1)
