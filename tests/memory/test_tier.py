"""The memory tier: objects in, objects out, and nothing more than its bytes."""

from __future__ import annotations

import pytest
from parts import make_chunks, make_format

from kvshelf.errors import ConfigError
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.tier import MemoryTier
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ObjectRef

FMT = make_format(shards=2)
CHUNKS = make_chunks(FMT, 64)


def ref(index: int, shard: int = 0) -> ObjectRef:
    return ObjectRef(CHUNKS[index], shard)


def image(fmt: ObjectFormat, index: int, shard: int = 0) -> bytearray:
    buffer = bytearray([1 + index]) * fmt.object_size(shard)
    fmt.seal(memoryview(buffer), CHUNKS[index], shard)
    return buffer


def test_an_object_comes_out_as_it_was_put_in() -> None:
    counters = Counters()
    tier = MemoryTier(1 << 20, counters=counters)
    assert not tier.available
    tier.keep(FMT, ref(0), image(FMT, 0))
    assert tier.available
    assert tier.holds(FMT, [ref(0), ref(0, 1), ref(1)]) == [True, False, False]
    buffer = bytearray(FMT.object_size(0))
    assert tier.load(FMT, ref(0), memoryview(buffer))
    assert buffer == image(FMT, 0)
    assert not tier.load(FMT, ref(1), memoryview(buffer))
    lent = tier.borrow(FMT, ref(0))
    assert lent is not None
    assert bytes(lent.view) == buffer
    assert lent.valid()
    lent.release()
    assert counters.snapshot() == {
        "memory_tier_loaded_objects": 2,
        "memory_tier_loaded_bytes": 2 * len(buffer),
        "memory_tier_stored_objects": 1,
        "memory_tier_stored_bytes": len(buffer),
    }
    tier.close()


def test_memory_that_is_not_there_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"only \d+ are free"):
        MemoryTier(1 << 60)
