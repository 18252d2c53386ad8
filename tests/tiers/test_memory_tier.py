"""The memory tier: objects in, objects out, and nothing more than its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvshelf import pages
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, WINDOW
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import open_shelf
from kvshelf.shelf.view import ObjectRef, Pinned
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import Tier, TieredShelf
from tests.native.fake_cudart import fake_cudart
from tests.support.formats import format_of_kinds, make_format
from tests.support.prompts import make_chunks

FMT = make_format(shards=2)
OTHER = make_format(shards=1, weights="user:other")
CHUNKS = make_chunks(FMT, 64)
SIZE = FMT.object_size(0)
MIB = 1 << 20


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    tier = MemoryTier(MIB)
    yield tier
    assert tier.stats().pinned_bytes == 0, "something is still pinned"
    tier.close()


def ref(index: int, shard: int = 0) -> ObjectRef:
    return ObjectRef(CHUNKS[index], shard)


def image(index: int, shard: int = 0, fmt: ObjectFormat = FMT, chunk: Chunk | None = None) -> bytes:
    buffer = bytearray([1 + index]) * fmt.object_size(shard)
    fmt.seal(memoryview(buffer), CHUNKS[index] if chunk is None else chunk, shard)
    return bytes(buffer)


def test_an_object_comes_out_as_it_was_put_in(tmp_path: Path) -> None:
    counters = Counters()
    tier = MemoryTier(MIB, counters=counters)
    shape: Tier = tier
    assert not shape.available
    tier.keep(FMT, ref(0), image(0))
    assert tier.available
    assert tier.holds(FMT, [ref(0), ref(0, 1), ref(1)]) == [True, False, False]
    buffer = bytearray(SIZE)
    assert tier.load(FMT, ref(0), memoryview(buffer))
    assert buffer == image(0)
    assert not tier.load(FMT, ref(1), memoryview(buffer))
    lent = tier.pin(FMT, ref(0))
    assert lent is not None
    as_lent: Pinned = lent
    assert bytes(as_lent.view) == buffer
    assert as_lent.valid()
    tier.keep(FMT, ref(1), image(1))
    counts = counters.take()
    as_lent.release()
    assert counters.take()["memory_tier_pinned_bytes"] == 0
    assert counts == {
        "memory_tier_loaded_objects": 2,
        "memory_tier_loaded_bytes": 2 * SIZE,
        "memory_tier_stored_objects": 2,
        "memory_tier_stored_bytes": 2 * SIZE,
        "memory_tier_used_bytes": 2 * SIZE,
        "memory_tier_pinned_bytes": SIZE,
        "memory_tier_limit_bytes": MIB,
    }
    TieredShelf(open_shelf(tmp_path), [tier]).close()
    assert not tier.available


def test_namespaces_and_kinds_do_not_mix(tier: MemoryTier) -> None:
    theirs = make_chunks(OTHER, 1)[0]
    tier.keep(FMT, ref(0), image(0))
    tier.keep(OTHER, ObjectRef(theirs, 0), image(5, 0, OTHER, theirs))
    assert tier.holds(OTHER, [ref(0), ObjectRef(theirs, 0)]) == [False, True]
    assert tier.holds(FMT, [ref(0), ObjectRef(theirs, 0)]) == [True, False]
    assert tier.stats().objects == 2
    full = format_of_kinds({FULL: 2, WINDOW: 2})
    (chunk,) = make_chunks(full, 1)
    tier.keep(full, ObjectRef(chunk, 0), image(6, 0, full, chunk))
    assert tier.holds(full, [ObjectRef(chunk, 0)]) == [True]
    assert tier.holds(full.of(WINDOW), [ObjectRef(chunk, 0)]) == [False]


def test_a_tail_is_an_object_like_others(tier: MemoryTier) -> None:
    chain = KeyChain(FMT.namespace.digest, FMT.chunk_size)
    chain.extend(range(FMT.chunk_size + 3))
    tail = chain.tail()
    assert tail is not None
    size = FMT.object_size(0, 3)
    assert size < SIZE
    room = tier.reserve(FMT, ObjectRef(tail, 0))
    assert room is not None
    assert len(room.view) == size
    room.view[:] = bytes(size)
    FMT.seal(room.view, tail, 0)
    expected = bytes(room.view)
    found = room.publish()
    assert found is room
    found.release()
    buffer = bytearray(size)
    assert tier.load(FMT, ObjectRef(tail, 0), memoryview(buffer))
    assert buffer == expected


def test_objects_are_removed_by_key(tier: MemoryTier) -> None:
    for shard in (0, 1):
        tier.keep(FMT, ref(0, shard), image(0, shard))
    lent = tier.pin(FMT, ref(0))
    assert lent is not None
    assert tier.remove(FMT, [ref(0), ref(0, 1), ref(1)]) == 2
    assert tier.holds(FMT, [ref(0), ref(0, 1)]) == [False, False]
    assert bytes(lent.view) == image(0)
    lent.release()
    stats = tier.stats()
    assert (stats.objects, stats.largest_free) == (0, MIB)


def test_the_ends_of_prompts_are_evicted_first() -> None:
    counters = Counters()
    room = 8 * (-(-SIZE // 4096) * 4096)
    tier = MemoryTier(room, counters=counters)
    for index in range(8):
        tier.keep(FMT, ref(index), image(index))
    used = tier.pin(FMT, ref(7))
    assert used is not None
    used.release()
    other = make_chunks(FMT, 3, seed=5)
    for chunk in other:
        tier.keep(FMT, ObjectRef(chunk, 0), image(0, 0, FMT, chunk))
    assert tier.holds(FMT, [ref(i) for i in range(8)]) == [True] * 5 + [False] * 3
    assert counters.snapshot()["memory_tier_evicted_objects"] == 3
    assert counters.snapshot()["memory_tier_evicted_bytes"] == 3 * SIZE
    tier.close()


def test_an_object_can_be_read_right_into_the_memory(tier: MemoryTier) -> None:
    room = tier.reserve(FMT, ref(0))
    assert room is not None
    room.view[:] = image(0)
    assert tier.holds(FMT, [ref(0)]) == [False]
    lent = room.publish()
    assert lent is not None
    assert bytes(lent.view) == image(0)
    assert tier.reserve(FMT, ref(0)) is None
    lent.release()
    lost = tier.reserve(FMT, ref(1))
    assert lost is not None
    lost.release()
    assert tier.stats().objects == 1
    # Two threads read one object: the second one's memory is free again.
    first, second = tier.reserve(FMT, ref(2)), tier.reserve(FMT, ref(2))
    assert first is not None
    assert second is not None
    first.view[:] = second.view[:] = image(2)
    found = first.publish()
    assert found is first
    found.release()
    lent = second.publish()
    assert lent is not None
    assert bytes(lent.view) == image(2)
    lent.release()
    assert tier.stats().objects == 2


def test_how_many_chunks_fit(tier: MemoryTier) -> None:
    both = tier.most_chunks(FMT)
    assert both == MIB // (2 * (-(-SIZE // 4096) * 4096))
    assert tier.most_chunks(FMT, [0]) in (2 * both, 2 * both + 1)
    for index in range(tier.most_chunks(FMT, [0])):
        room = tier.reserve(FMT, ObjectRef(make_chunks(FMT, 1, seed=index)[0], 0))
        assert room is not None
        found = room.publish()
        assert found is not None
        found.release()
    assert tier.stats().evictions == 0


def test_memory_is_freed_when_nothing_of_it_is_lent_any_more() -> None:
    with fake_cudart() as runtime:
        tier = MemoryTier(MIB, device=torch.device("cuda:0"))
        tier.keep(FMT, ref(0), image(0))
        lent = tier.pin(FMT, ref(0))
        late = tier.reserve(FMT, ref(1))
        assert lent is not None
        assert late is not None
        tier.close()
        tier.close()
        assert not tier.available
        assert tier.pin(FMT, ref(0)) is None
        assert tier.reserve(FMT, ref(2)) is None
        assert bytes(lent.view) == image(0)
        lent.release()
        # A copy of a GPU may be under way to what is reserved.
        assert runtime.holds(late.view)
        late.view[:] = image(1)
        assert not late.publish()
        assert runtime.registered == {}


# -------------------------------------------------------------------------- page-locked in pieces


def test_a_page_locked_tier_is_registered_in_pieces_that_no_object_lies_across(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "LOCKED_AT_ONCE", 2 * MIB)
    fmt = make_format(shards=1, chunk_size=2048)
    size = fmt.object_size(0)
    assert size > 100_000
    chunks = make_chunks(fmt, 8 * MIB // size)
    buffer = bytes(size)
    with fake_cudart() as runtime:
        tier = MemoryTier(8 * MIB, device=torch.device("cuda:0"))
        assert list(runtime.registered.values()) == 4 * [2 * MIB]
        for chunk in chunks:
            tier.keep(fmt, ObjectRef(chunk, 0), buffer)
        lent = [tier.pin(fmt, ObjectRef(chunk, 0)) for chunk in chunks]
        here = [one for one in lent if one is not None]
        assert len(here) >= tier.most_chunks(fmt) > 5 * MIB // size
        assert all(runtime.holds(one.view) for one in here)
        # It ends as soon as nothing is lent any more, and not before.
        tier.close()
        assert len(runtime.registered) == 4
        for one in here:
            one.release()
        assert runtime.registered == {}


def test_a_tier_of_which_a_piece_is_refused_leaves_nothing_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "LOCKED_AT_ONCE", 2 * MIB)
    with fake_cudart() as runtime:
        runtime.most = 5 * MIB
        with pytest.raises(RuntimeError, match=r"after 4194304 of 8388608 bytes .* out of memory"):
            MemoryTier(8 * MIB, device=torch.device("cuda:0"))
        assert runtime.registered == {}
