"""Stores that another engine waits for: first in the queue, last to be dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvshelf.format.keys import Chunk
from kvshelf.transfer.stores import StoreOutcome, StoreResult
from tests.sim.storage import FaultyStorage, Gate
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

FMT = make_format()
QUEUED, KNOWN, FULL = StoreOutcome.QUEUED, StoreOutcome.KNOWN, StoreOutcome.STAGING_FULL


@pytest.fixture
def rig(backend: FaultyStorage) -> Iterator[Rig]:
    """One store thread, and staging for three chunks of two objects."""
    with closing(Rig(backend, FMT, memory_chunks=6)) as rig:
        yield rig


def single(count: int, first: int = 0) -> list[Chunk]:
    """First chunks of different prompts: none is another's parent."""
    return [make_chunks(FMT, 1, seed)[0] for seed in range(first, first + count)]


class Ends:
    """What became of stores, in the order of their ends."""

    def __init__(self) -> None:
        self.of: list[tuple[Chunk, StoreResult]] = []

    def __call__(self, chunk: Chunk, result: StoreResult) -> None:
        self.of.append((chunk, result))

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for chunk, _ in self.of]


def test_promised_stores_are_published_before_the_others(rig: Rig, backend: FaultyStorage) -> None:
    gate = Gate(backend)
    one, two, three = rig.items(single(3), 0)
    ends = Ends()
    assert rig.store(one, on_done=ends) is QUEUED
    assert gate.waiting.acquire(timeout=PATIENCE)
    assert rig.store(two, on_done=ends) is QUEUED
    assert rig.store(three, promised=True, on_done=ends) is QUEUED
    gate.let(6)
    assert rig.transfer.drain(PATIENCE) == 0
    # Stores are told of a moment after they have ended.
    until(lambda: ends.chunks == [one.chunk, three.chunk, two.chunk])


def test_store_in_flight_becomes_promised(rig: Rig, backend: FaultyStorage) -> None:
    gate = Gate(backend)
    one, two, three = rig.items(single(3), 0)
    ends, told = Ends(), Ends()
    for item in (one, two, three):
        assert rig.store(item, on_done=ends) is QUEUED
    assert gate.waiting.acquire(timeout=PATIENCE)
    assert rig.store(three, promised=True, on_done=told) is QUEUED
    # The one that is running, too; then again, which changes nothing.
    assert rig.store(one, promised=True) is KNOWN
    assert rig.store(three, promised=True) is KNOWN
    gate.let(6)
    assert rig.transfer.drain(PATIENCE) == 0
    until(lambda: ends.chunks == [one.chunk, three.chunk, two.chunk])
    assert told.of == [(three.chunk, StoreResult.EXISTED)]


def test_promised_stores_that_run_at_the_end_are_lost(rig: Rig, backend: FaultyStorage) -> None:
    """Who waits is told, even if the storage never answers."""
    gate = Gate(backend)
    one, two, three = rig.items(single(3), 0)
    ends = Ends()
    assert rig.store(one, promised=True, on_done=ends) is QUEUED
    assert gate.waiting.acquire(timeout=PATIENCE)
    assert rig.store(two, on_done=ends) is QUEUED
    assert rig.store(three, promised=True, on_done=ends) is QUEUED
    assert rig.transfer.close(0.0) == 3
    lost = StoreResult.LOST
    assert ends.of == [(three.chunk, lost), (two.chunk, lost), (one.chunk, lost)]
    gate.let(6)
    until(lambda: rig.chunks_in_use == 0)
    assert len(ends.of) == 3
