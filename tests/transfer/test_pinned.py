"""Loads of objects that the storage has in memory: read where they lie, and given back."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvshelf.format.keys import Chunk
from kvshelf.kv.caches import HostKVCache
from kvshelf.memory.arena import bytes_at
from kvshelf.shelf.view import NamespaceView, ObjectRef
from kvshelf.transfer import loads
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure, LoadPiece
from tests.sim.storage import FaultyStorage, LendingMemory, Loan, posix
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

    def name(self, chunk: Chunk, shard: int) -> str:
        return self.rig.shelf.view(self.rig.fmt).name(ObjectRef(chunk, shard))

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


def test_lent_objects_are_loaded_where_they_lie_while_no_slot_is_free(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "_ANNOUNCED", 4)
    lender: Lender = request.getfixturevalue("lender")
    rig, step, announced = lender.rig, threading.current_thread(), lender.lending.expect
    by_step: list[str] = []

    def expect(names: Sequence[str], sizes: Sequence[int]) -> None:
        by_step.extend(names if threading.current_thread() is step else ())
        announced(names, sizes)

    monkeypatch.setattr(lender.lending, "expect", expect)
    chunks = lender.put(5)
    held = []
    while (slot := rig.host.ring.claim(None, 1, rig.host.loads)) is not None:
        held.append(slot)
    rig.comes_back(chunks, 20)
    # A finished load has given back what it used.
    assert [loan.released for loan in lender.loans] == [1] * 5 * rig.fmt.shards
    rig.host.ring.release(rig.host.loads, held)
    # All were announced, in the order of the prompt, the first of them by the step thread.
    assert by_step == [name for name, _ in lender.lending.expected[:4]]
    assert lender.lending.expected == [
        (lender.name(chunk, shard), rig.fmt.object_size(shard))
        for chunk in chunks
        for shard in range(rig.fmt.shards)
    ]
    assert rig.count("loaded_chunks") == 5
    assert rig.count("loaded_bytes") == 5 * rig.loads.chunk_bytes


def test_of_few_chunks_at_once_none_is_announced(lender: Lender) -> None:
    rig = lender.rig
    items = rig.items(lender.put(5), 20)
    lender.gate.clear()
    rig.start("r", items, at_once=1)
    until(lambda: lender.asked >= 1)
    # What is announced is read, so the first chunk would come as late as the last one.
    assert lender.lending.expected == []
    lender.gate.set()
    assert rig.finished().failed_at is None
    assert all(rig.holds(item) for item in items)


def test_chunk_of_which_an_object_was_taken_back_meanwhile_has_failed(lender: Lender) -> None:
    rig = lender.rig
    chunks = lender.put(4)

    def expire(loan: Loan) -> None:
        if chunks[2].key.hex() in loan.name:
            loan.valid_now = False
            loan.data[rig.fmt.data_offset :] = bytes(len(loan.data) - rig.fmt.data_offset)

    lender.lending.on_lend = expire
    load, items = rig.load(chunks, 20)
    assert load.failed_at == 2
    assert {(chunk.key, failure) for chunk, failure in load.failures} >= {
        (chunks[2].key, Failure.ERROR)
    }
    assert all(rig.holds(item) for item in items[:2])
    until(lambda: all(loan.released for loan in lender.loans))
    lender.lending.on_lend = lambda loan: None
    rig.comes_back(chunks, 60)
    lender.settled()


def test_bytes_are_asked_for_after_the_scatter(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    scatter = HostKVCache.scatter

    def noting(self: HostKVCache, *arguments: object) -> None:
        scatter(self, *arguments)  # type: ignore[arg-type]
        order.append("scatter")

    monkeypatch.setattr(HostKVCache, "scatter", noting)
    chunks = lender.put(1)
    lender.lending.lends = lambda name: "0of" in name
    lender.lending.on_lend = lambda loan: setattr(loan, "on_valid", lambda: order.append("valid"))
    assert lender.rig.load(chunks, 20)[0].failed_at is None
    lender.settled(1)
    assert order.index("scatter") < order.index("valid")


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


def test_closing_ends_loads_of_lent_objects(lender: Lender) -> None:
    chunks = lender.put(3)
    lender.gate.clear()
    load = lender.start(chunks)
    until(lambda: lender.asked == 2)
    ending = threading.Thread(target=lender.rig.transfer.close)
    ending.start()
    until(lambda: load.finished)
    assert load.failed_at == 0
    lender.gate.set()
    ending.join(PATIENCE)
    lender.settled(2)
    assert all(lender.rig.untouched(item) for item in lender.rig.items(chunks, 20))


def test_missing_object_is_not_looked_for_twice(lender: Lender) -> None:
    chunks = lender.put(2)
    for shard in range(lender.rig.fmt.shards):
        lender.rig.path(chunks[1], shard).unlink()
    load, _ = lender.rig.load(chunks, 20)
    assert load.failed_at == 1
    assert load.failures[0] == (chunks[1], Failure.MISSING)
    lender.settled(lender.rig.fmt.shards)


def test_early_loads_are_not_announced(lender: Lender) -> None:
    chunks = lender.put(2)
    none, ended = torch.empty(0, dtype=torch.int64), threading.Event()
    items = [ChunkSlots(chunk, none) for chunk in chunks]
    lender.rig.read(items, early=True, on_done=lambda load: ended.set())
    assert ended.wait(PATIENCE)
    assert not lender.lending.expected
    lender.settled(2 * lender.rig.fmt.shards)


def test_tensor_of_read_only_bytes_keeps_them_no_longer_than_they_are_lent() -> None:
    data = bytearray(b"0123456789")
    tensor = bytes_at(memoryview(data)[2:].toreadonly())
    assert tensor.tolist() == list(b"23456789")
    # A tensor that held on to the bytes would not let their owner resize them.
    data.append(1)
