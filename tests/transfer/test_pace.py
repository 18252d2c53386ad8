"""Stores write no faster than their pace, and hand-overs do not wait for it."""

from __future__ import annotations

import time
from contextlib import closing

from kvshelf.transfer.pace import Pace
from kvshelf.transfer.stores import StoreOutcome, StoreResult
from tests.sim.storage import FaultyStorage
from tests.support.formats import make_format
from tests.support.transfers import Rig
from tests.support.waiting import until
from tests.transfer.test_promised_stores import Ends, single

FMT = make_format()
CHUNK_BYTES = sum(FMT.object_size(shard) for shard in range(FMT.shards))
#: Less than a byte in the time of any test.
NEVER = 1e-9


def test_stores_write_no_faster_than_their_pace(backend: FaultyStorage) -> None:
    seconds = 0.1
    options = {"pace": Pace(CHUNK_BYTES / seconds), "store_threads": 2}
    with closing(Rig(backend, FMT, options=options)) as rig:
        begin = time.monotonic()
        rig.put(single(5))
        # The first chunk of each thread does not wait.
        assert time.monotonic() - begin >= 3 * seconds
        assert rig.count("stored_chunks") == 5


def test_a_chunk_that_is_there_takes_no_part_of_the_pace(backend: FaultyStorage) -> None:
    with closing(Rig(backend, FMT)) as before:
        before.put(single(3))
    with closing(Rig(backend, FMT, options={"pace": Pace(NEVER)})) as rig:
        rig.put(single(3))
        assert rig.count("existing_chunks") == 3


def test_handovers_do_not_wait_for_the_pace(backend: FaultyStorage) -> None:
    ends = Ends()
    with closing(Rig(backend, FMT, options={"pace": Pace(NEVER)})) as rig:
        first, late, promised = rig.items(single(3), 0)
        for item in (first, late):
            assert rig.stores.store(item, on_done=ends) is StoreOutcome.QUEUED
        until(lambda: first.chunk in ends.chunks)
        assert rig.stores.store(promised, promised=True, on_done=ends) is StoreOutcome.QUEUED
        until(lambda: promised.chunk in ends.chunks)
        assert rig.transfer.drain(0.0) == 1
    assert ends.of[-1] == (late.chunk, StoreResult.LOST)
