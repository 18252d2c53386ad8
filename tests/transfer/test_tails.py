"""Tails on their way between paged caches and a shelf: whatever chunks are, and what fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.backends import open_backend
from kvshelf.errors import UnsupportedError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.layout import slots_of
from kvshelf.memory.chunk_memory import ChunkPlaces
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.read_ahead import ReadAhead
from kvshelf.transfer.stores import StoreOutcome
from tests.sim.storage import FaultyStorage, posix
from tests.support.formats import BLOCK, HEADS, LAYERS, make_format
from tests.support.transfers import Rig, content
from tests.support.waiting import PATIENCE, until

#: A namespace of its own for each example.
NUMBERS = itertools.count()


def pieces(fmt: ObjectFormat, count: int, tokens: int) -> list[Chunk]:
    """The chunks of a prompt, and its tail."""
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    chain.extend(range(count * fmt.chunk_size))
    return [*chain.chunks, chain.tail_after(count, range(tokens))]


def tail_item(rig: Rig, tail: Chunk, first_block: int) -> ChunkSlots:
    blocks = range(first_block, first_block + rig.per_chunk)
    return ChunkSlots(tail, slots_of(blocks, BLOCK, 0, tail.tokens))


def row(tail: Chunk, layer: int, token: int) -> torch.Tensor:
    """What a token of a tail has in one layer: [heads, K and V]."""
    return content(tail, layer, token // BLOCK)[:, token % BLOCK]


def fill(rig: Rig, item: ChunkSlots) -> None:
    for token, slot in enumerate(item.slots.tolist()):
        for layer, cache in enumerate(rig.caches):
            cache[slot // BLOCK, :, slot % BLOCK] = row(item.chunk, layer, token)


def holds(rig: Rig, item: ChunkSlots) -> bool:
    return all(
        torch.equal(cache[slot // BLOCK, :, slot % BLOCK], row(item.chunk, layer, token))
        for token, slot in enumerate(item.slots.tolist())
        for layer, cache in enumerate(rig.caches)
    )


def put(rig: Rig, tail: Chunk) -> None:
    item = tail_item(rig, tail, 12)
    fill(rig, item)
    assert rig.store(item) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0


@pytest.fixture(params=["native", "canonical"])
def rig(backend: FaultyStorage, request: pytest.FixtureRequest) -> Iterator[Rig]:
    native = request.param == "native"
    with closing(Rig(backend, make_format(native=native), native)) as rig:
        yield rig


@settings(max_examples=40, deadline=None)
@given(native=st.booleans(), shards=st.sampled_from([1, 2]), tokens=st.integers(1, 7))
def test_prompt_with_its_tail_comes_back_into_other_blocks(
    native: bool, shards: int, tokens: int
) -> None:
    fmt = make_format(native=native, shards=shards, weights=f"user:{next(NUMBERS)}")
    with closing(Rig(open_backend("memory://tails"), fmt, native)) as rig:
        *chunks, tail = pieces(fmt, 2, tokens)
        rig.put(chunks)
        put(rig, tail)
        sizes = [fmt.object_size(shard, tokens) for shard in range(shards)]
        whole = [fmt.object_size(shard) for shard in range(shards)]
        assert rig.count("stored_bytes") == sum(sizes) + 2 * sum(whole)
        before = [cache.clone() for cache in rig.caches]
        items = [*rig.items(chunks, 20), tail_item(rig, tail, 30)]
        rig.start("r", items)
        assert rig.finished().failed_at is None
        assert all(rig.holds(item) for item in items[:-1])
        assert holds(rig, items[-1])
        assert rig.count("loaded_bytes") == sum(sizes) + 2 * sum(whole)
        # Nothing behind the last token is touched.
        for cache, old in zip(rig.caches, before, strict=True):
            after = cache.clone()
            after[20:24] = old[20:24]
            for slot in items[-1].slots.tolist():
                after[slot // BLOCK, :, slot % BLOCK] = old[slot // BLOCK, :, slot % BLOCK]
            assert torch.equal(after, old)


def test_tail_in_canonical_shape_is_what_is_stored(rig: Rig) -> None:
    tail = pieces(rig.fmt, 1, 5)[-1]
    put(rig, tail)
    for shard in range(rig.fmt.shards):
        payload = rig.path(tail, shard).read_bytes()[rig.fmt.data_offset :]
        heads = slice(shard * HEADS // rig.fmt.shards, (shard + 1) * HEADS // rig.fmt.shards)
        expected = []
        for layer in range(LAYERS):
            rows = torch.stack([row(tail, layer, token) for token in range(5)])[:, heads]
            expected += list(rows.chunk(2, dim=2))
        found = torch.frombuffer(bytearray(payload), dtype=torch.int16)
        assert torch.equal(found, torch.cat([part.reshape(-1) for part in expected]))


def test_bad_tail_is_replaced_by_the_next_one_that_is_computed(rig: Rig) -> None:
    tail = pieces(rig.fmt, 1, 3)[-1]
    put(rig, tail)
    path = rig.path(tail, 0)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert rig.store(tail_item(rig, tail, 12), repair=True) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    assert path.read_bytes() == good
    assert rig.transfer.take_repaired() == [tail.key]


def test_engine_whose_layout_is_unknown_has_no_tails(backend: FaultyStorage) -> None:
    shape = f"2,{HEADS // 2 * BLOCK * 32}"
    fmt = make_format(shape=shape, dtype="U8", layout="opaque-0123456789abcdef")
    assert not fmt.tails
    with closing(Rig(backend, make_format())) as rig:
        rig.context.fmt = fmt
        rig.context.shelf = rig.shelf.view(fmt)
        rig.stores._places = ChunkPlaces(rig.host, fmt, range(fmt.shards))
        tail = pieces(fmt, 1, 3)[-1]
        for _ in range(20):
            with pytest.raises(UnsupportedError, match="tails cannot be stored"):
                rig.store(tail_item(rig, tail, 12))
        assert rig.chunks_in_use == 0


def test_tail_that_was_read_ahead_is_taken_from_memory(tmp_path: Path) -> None:
    fmt = make_format()
    tail = pieces(fmt, 1, 5)[-1]
    with closing(Rig(posix(tmp_path / "shelf"), fmt)) as rig:
        put(rig, tail)
    with closing(Rig(posix(tmp_path / "shelf"), fmt)) as rig:
        ahead = ReadAhead(rig.context, rig.loads)
        ahead.add("r", rig.view, [tail])
        until(lambda: rig.context.places.leading([tail]) == 1)
        for shard in range(fmt.shards):
            rig.path(tail, shard).unlink()
        item = tail_item(rig, tail, 30)
        rig.start("r", [item])
        assert rig.finished().failed_at is None
        assert holds(rig, item)
        ahead.release("r")
        assert rig.chunks_in_use == 0
