"""Waits: pieces are seen when they come, whatever the storage does, and nobody waits too long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import FaultyBackend
from kvshelf.backends.guard import GuardedBackend
from parts import AT_ONCE, SOON, make_chunks, make_format, posix, until

from kvshelf.format.keys import Chunk
from kvshelf.format.names import object_name
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.waits import Wait, WaitService

FMT = make_format(shards=2)
ATTEMPT = "0123456789abcdef" * 2


class Rig:
    """A shelf whose objects appear and vanish without being written, and waits for them."""

    def __init__(self, root: Path) -> None:
        self.faults = FaultyBackend(posix(root))
        self.shelf = Shelf(GuardedBackend(self.faults, SOON, AT_ONCE))
        self.counters = Counters()
        self.seen: list[bytes] = []
        self.service = WaitService(
            {"full": self.shelf.view(FMT)}, counters=self.counters, on_seen=self.seen.extend
        )

    def name(self, chunk: Chunk, shard: int) -> str:
        return f"{FMT.namespace.folder}/{object_name(chunk, shard, FMT.shards)}"

    def put(self, chunk: Chunk, *shards: int) -> None:
        for shard in shards or range(FMT.shards):
            data = bytes(FMT.object_size(shard))
            self.faults.inner.write(self.name(chunk, shard), [data])

    def give_up(self, attempt: str = ATTEMPT) -> None:
        self.faults.inner.write(f"{FMT.namespace.folder}/.kvshelf/gave-up/{attempt}", [])

    def submit(self, *chunks: Chunk) -> Wait:
        return self.service.submit([("full", chunk) for chunk in chunks], ATTEMPT)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "shelf")
    yield rig
    rig.faults.heal()
    rig.service.close()
    rig.shelf.close()


def test_pieces_are_seen_as_they_come(rig: Rig) -> None:
    chunks = make_chunks(FMT, 3)
    wait = rig.submit(*chunks)
    for number, chunk in enumerate(chunks):
        assert (wait.seen, wait.ended) == (number, False)
        rig.put(chunk)
        until(lambda number=number: wait.seen == number + 1)  # type: ignore[misc]
    assert wait.complete and not wait.gave_up
    assert rig.seen == [chunk.key for chunk in chunks]
    assert rig.service.waiting == 0


def test_a_marker_ends_a_wait_and_pieces_that_are_there_count(rig: Rig) -> None:
    chunks = make_chunks(FMT, 3)
    rig.put(chunks[0])
    rig.put(chunks[1], 0)
    rig.give_up()
    wait = rig.submit(*chunks)
    until(lambda: wait.ended)
    assert (wait.complete, wait.gave_up, wait.seen) == (False, True, 1)


def test_who_cancels_is_forgotten_at_once(rig: Rig) -> None:
    wait = rig.submit(*make_chunks(FMT, 1))
    assert rig.service.waiting == 1
    wait.cancel()
    assert rig.service.waiting == 0
    wait.cancel()
