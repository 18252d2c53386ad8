"""A listing that takes very long, on a mounted filesystem: it delays nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvshelf.capacity.sweeper import Sweeper
from kvshelf.config import CapacityConfig
from kvshelf.format.keys import Chunk
from tests.faults.faultfs import FaultMount, mounted
from tests.sim.storage import posix
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENT, until

pytestmark = pytest.mark.real

#: Folders with objects: nothing but a sweep lists them.
FAN_OUT = "*/_/??"


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultMount]:
    with mounted(tmp_path_factory.mktemp("listing")) as mount:
        yield mount


@pytest.fixture
def rig(mount: FaultMount, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(posix(mount.path / request.node.name), deadlines=PATIENT)
    with closing(rig):
        yield rig
        mount.clear()


def sweeping(rig: Rig, chunks: int) -> Sweeper:
    """A sweeper whose bound is so many chunks."""
    chunk_bytes = sum(rig.fmt.object_size(shard) for shard in range(rig.fmt.shards))
    bounds = CapacityConfig.model_validate({"max_bytes": chunks * chunk_bytes})
    return Sweeper(rig.shelf, bounds, rig.counters)


def put(rig: Rig, chunks: list[Chunk]) -> None:
    """Store a few at a time: staging is small, and the mount slow."""
    for first in range(0, len(chunks), 4):
        rig.put(chunks[first : first + 4])


def left(rig: Rig) -> int:
    return len(list(Path(rig.backend.url).rglob("*.safetensors")))


def test_stores_and_loads_go_on_while_a_listing_hangs(mount: FaultMount, rig: Rig) -> None:
    first, second = make_chunks(rig.fmt, 12), make_chunks(rig.fmt, 4, 7)
    put(rig, first)
    mount.add("readdir", FAN_OUT, block=True)
    # What it leaves is all of the second prompt, and the beginning of the first.
    with closing(sweeping(rig, 10)) as sweeper:
        sweeper.start()
        assert mount.met(at_least=1)
        put(rig, second)
        load, items = rig.load(second, 40)
        assert load.failed_at is None
        assert all(rig.holds(item) for item in items)
        assert rig.guard.reads.is_closed
        assert rig.guard.writes.is_closed
        assert rig.count("late_calls") == 0
        mount.clear()
        until(lambda: left(rig) < 16 * rig.fmt.shards)
    load, _ = rig.load(first[:1], 40)
    assert load.failed_at is None, "the beginning of a prompt outlives its end"


def test_a_listing_that_is_slow_at_each_folder_ends(mount: FaultMount, rig: Rig) -> None:
    put(rig, make_chunks(rig.fmt, 12))
    mount.add("readdir", FAN_OUT, seconds=0.15)
    with closing(sweeping(rig, 6)) as sweeper:
        sweeper.start()
        until(lambda: rig.count("sweeps") > 0)
        assert rig.count("late_calls") == 0
        assert left(rig) < 12 * rig.fmt.shards
        # Waiting for the storage is no work.
        assert rig.count("sweep_seconds") < 0.5 * 12 * 0.15
