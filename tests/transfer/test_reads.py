"""What threads of loads read: what a choice costs, and objects left to other threads."""

from __future__ import annotations

from typing import Any, cast

import torch

from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Piece
from kvshelf.transfer.reads import Objects, Reads
from tests.support.formats import make_format
from tests.support.prompts import make_chunks


class Looked(Piece):
    """A load that counts how often it is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        Looked.looks += 1
        return super().__getattribute__(name)


def _looks(loads: int) -> int:
    """Return how often a thread looks at loads, of so many, for six objects."""
    reads, fmt = Reads(range(2), 2), make_format()
    for seed in range(loads):
        chunks = make_chunks(fmt, 3, seed)
        reads.add(Looked([ChunkSlots(chunk, torch.empty(0)) for chunk in chunks]))
    before = Looked.looks
    for _ in range(6):
        assert reads.take(0, 1) is not None
        reads.end(0)
    return Looked.looks - before


def test_a_thread_looks_at_no_more_loads_where_there_are_more() -> None:
    assert _looks(200) == _looks(2)


def test_what_was_left_to_a_thread_that_leaves_its_own_goes_on_to_the_last_one() -> None:
    chunks = make_chunks(make_format(), 2)
    load = Piece([ChunkSlots(chunk, torch.empty(0)) for chunk in chunks])
    reads = Reads(range(4), 4)
    reads.add(load)
    read = []
    for thread in range(4):
        task = reads.take(thread, 1)
        assert task is not None
        assert (task.item, task.shards) == (0, range(thread, thread + 1))
        task.reading = True
        read.append((task, Objects(cast(Any, None))))
    for thread in range(3):
        assert reads.leave(thread, *read[thread])
    task, objects = read[3]
    assert not reads.leave(3, task, objects)
    assert {id(one) for _, one in reads.take_left(task)} == {id(one) for _, one in read[:3]}
    assert reads.take_left(task) == []
