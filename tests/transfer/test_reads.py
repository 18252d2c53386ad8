"""What threads of loads read: objects that are left to other threads."""

from __future__ import annotations

from typing import Any, cast

import torch

from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Piece
from kvshelf.transfer.reads import Objects, Reads
from tests.support.formats import make_format
from tests.support.prompts import make_chunks


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
