"""Loads go on whatever else holds memory, and a close ends them in the middle of it.

Each case uses memory up in another way. The order of threads is another one with each ``--seed``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvshelf.format.keys import Chunk
from kvshelf.memory.ring import Slot
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import LoadPiece
from kvshelf.transfer.stores import StoreOutcome
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

FMT = make_format()


class Machine:
    """A rig with little memory on a storage with faults, and chunks that lie there."""

    def __init__(self, root: Path, memory_chunks: int = 6) -> None:
        self.chunks = make_chunks(FMT, 6)
        writer = Rig(posix(root / "shelf"), fmt=FMT)
        writer.put(self.chunks)
        writer.close()
        self.storage = FaultyStorage(posix(root / "shelf"))
        self.rig = Rig(
            self.storage,
            fmt=FMT,
            blocks=400,
            memory_chunks=memory_chunks,
            keeps=True,
        )
        self.gate = threading.Event()
        self.pieces: list[LoadPiece] = []
        self.slots: list[Slot] = []

    def read_ahead(self, chunks: list[Chunk]) -> LoadPiece:
        """Read chunks into memory for a request that never loads them."""
        items = [ChunkSlots(chunk, torch.empty(0, dtype=torch.int64)) for chunk in chunks]
        piece = self.rig.read(items, early=True, keeps=True, on_done=lambda piece: None)
        self.pieces.append(piece)
        return piece

    def store(self, count: int, seed: int) -> list[StoreOutcome]:
        items = self.rig.items(make_chunks(FMT, count, seed), 0)
        return [self.rig.store(item) for item in items]

    def end(self) -> None:
        """Let go of all that a case holds."""
        self.gate.set()
        self.storage.heal()
        for piece in self.pieces:
            self.rig.loads.release(piece)
        self.rig.host.ring.release(self.rig.context.shares.ahead, self.slots)


def hang_all_stores(machine: Machine) -> None:
    machine.storage.add(Fault("write", wait=machine.gate))
    assert StoreOutcome.STAGING_FULL in machine.store(8, 7)


def pin_every_second_slot(machine: Machine) -> None:
    rig = machine.rig
    share = rig.context.shares.ahead
    share.limit = rig.host.nbytes
    while (slot := rig.context.places.claim(machine.chunks[0], share, is_named=False)) is not None:
        machine.slots.append(slot)
    rig.host.ring.release(share, machine.slots[::2])
    del machine.slots[::2]


def read_ahead_what_nobody_loads(machine: Machine) -> None:
    piece = machine.read_ahead(make_chunks(FMT, 2, 9) + machine.chunks)
    until(lambda: piece.finished)
    piece = machine.read_ahead(machine.chunks[3:])
    until(lambda: piece.finished and len(piece.kept) == 3)


def hang_a_load_thread(machine: Machine) -> None:
    """A read never returns; a load that comes later reads the same chunk."""
    chunk = machine.chunks[0]
    machine.storage.add(
        Fault("open", f"*{chunk.key.hex()}*", wait=machine.gate, times=1),
    )
    machine.rig.start("stuck", machine.rig.items([chunk], 300))
    until(lambda: bool(machine.rig.loads._reading_of))
    assert machine.rig.finished().failed_at == 0
    assert machine.rig.count("stuck_threads") == 1


def use_two_chunks(machine: Machine) -> None:
    """The memory has room for two chunks beside the spare slots."""
    assert machine.rig.host.ring.capacity == machine.rig.slot_bytes * (2 + 3)
    machine.store(4, 7)


CASES: dict[Callable[[Machine], None], int] = {
    hang_all_stores: 6,
    pin_every_second_slot: 6,
    read_ahead_what_nobody_loads: 6,
    hang_a_load_thread: 6,
    use_two_chunks: 2,
}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@every_case
def test_loads_arrive_from_storage_and_memory_beside_what_holds_memory(
    case: Callable[[Machine], None], tmp_path: Path
) -> None:
    machine = Machine(tmp_path, CASES[case])
    case(machine)
    machine.rig.comes_back(machine.chunks, 100)
    machine.rig.comes_back(machine.chunks[-1:], 200)
    machine.end()
    assert machine.rig.transfer.drain(PATIENCE) == 0
    until(lambda: machine.rig.chunks_in_use == 0)
    machine.rig.comes_back(machine.chunks, 100)
    machine.rig.close()


@every_case
def test_close_beside_what_holds_memory_ends_all_loads_and_frees_the_memory(
    case: Callable[[Machine], None], tmp_path: Path
) -> None:
    machine = Machine(tmp_path, CASES[case])
    case(machine)
    rig = machine.rig
    loads = [rig.start(f"load {n}", rig.items(machine.chunks, 40 * n)) for n in range(3)]
    machine.read_ahead(machine.chunks)
    rig.transfer.close(0.0)
    assert all(load.finished for load in loads)
    rig.host.close()
    machine.end()
    until(lambda: rig.chunks_in_use == 0)
    until(lambda: not rig.host.view)
    rig.guard.close()
