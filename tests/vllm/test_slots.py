"""The slots of chunks and tails, worked out token by token."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    from kvshelf.vllm.worker.slots import (
        StateBlocks,
        TokenSlots,
        slots_to_load,
        slots_to_store,
        state_to_load,
    )

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.kv.interleave import InterleavedBlocks
from kvshelf.kv.states import StateSlots
from kvshelf.kv.topology import ShardPlan

CHUNK = 16
#: Slots of a block, and tokens for each entry of a chunk's mapping.
GROUPS = [(4, 1), (4, 2), (8, 8), (16, 16), (8, 1), (32, 16), (12, 1)]


def chunks_of(tokens: int) -> list[Chunk]:
    """The chunks of a prompt, and its tail."""
    chain = KeyChain(bytes(32), CHUNK)
    chain.extend(range(tokens))
    tail = chain.tail()
    return chain.chunks + ([] if tail is None else [tail])


@given(group=st.sampled_from(GROUPS), tokens=st.integers(1, CHUNK - 1), index=st.integers(0, 2))
def test_tail_is_stored_token_by_token_whatever_chunks_are(
    group: tuple[int, int], tokens: int, index: int
) -> None:
    size, unit = group
    slots = [TokenSlots(0, InterleavedBlocks(size), unit)]
    # The blocks from the one on in which the tail begins.
    ids = [7, 3, 9, 1, 5, 8]
    skip = index * CHUNK % size
    found = slots_to_store(slots, (ids,), index, CHUNK, tokens=tokens)
    places = range(skip, skip + tokens)
    assert found.tolist() == [ids[at // size] * size + at % size for at in places]
    whole = slots_to_store(slots, (ids,), index, CHUNK)
    assert len(whole) == CHUNK // unit


@given(
    group=st.sampled_from(GROUPS),
    length=st.integers(1, 4 * CHUNK),
    lacks=st.integers(0, CHUNK),
    start=st.integers(0, 4 * CHUNK),
    null=st.sets(st.integers(0, 8)),
)
def test_load_ends_inside_its_tail(
    group: tuple[int, int], length: int, lacks: int, start: int, null: set[int]
) -> None:
    size, unit = group
    chunks = chunks_of(length)
    end = max(1, length - lacks) if chunks[-1].tail else length
    end = max(end, (len(chunks) - 1) * CHUNK + 1) if chunks[-1].tail else end
    # vLLM's own hits end with a block.
    start = min(start, end - 1) // size * size
    ids = [0 if at in null else 20 + 3 * at for at in range(-(-end // size))]
    slots = [TokenSlots(0, InterleavedBlocks(size), unit)]
    items = slots_to_load(slots, chunks[start // CHUNK :], (ids,), start, end, CHUNK)
    found = {item.chunk.index: item.slots.tolist() for item in items}
    for chunk in chunks[start // CHUNK :]:
        each = 1 if chunk.tail else unit
        first = chunk.index * CHUNK
        expected = []
        for at in range(first, first + chunk.tokens, each):
            block = ids[at // size] if start <= at < end else 0
            expected.append((block * size + at % size) // each if block else -1)
        wanted = any(slot >= 0 for slot in expected)
        assert found.get(chunk.index) == (expected if wanted else None)


@given(length=st.integers(1, 3 * CHUNK), rank=st.integers(0, 3), interleave=st.sampled_from([1, 2]))
def test_each_rank_of_a_context_parallel_group_loads_its_tokens_of_a_tail(
    length: int, rank: int, interleave: int
) -> None:
    plan = ShardPlan((0,), context_ranks=4, context_rank=rank)
    slots = [TokenSlots(0, InterleavedBlocks(4)).of_rank(plan, interleave)]
    ids = [5, 2, 9]
    items = slots_to_load(slots, chunks_of(length), (ids,), 0, length, CHUNK)
    found: dict[int, int] = {}
    for item in items:
        for at, slot in enumerate(item.slots.tolist()):
            if slot >= 0:
                found[item.chunk.index * CHUNK + at] = slot
    expected = {}
    for at in range(length):
        turn, token = divmod(at % 16, interleave)
        if turn % 4 == rank:
            expected[at] = ids[at // 16] * 4 + turn // 4 * interleave + token
    assert found == expected


@given(ranks=st.sampled_from([1, 2, 4]), index=st.integers(0, 5))
def test_ranks_of_a_context_parallel_group_store_the_tokens_that_they_load(
    ranks: int, index: int
) -> None:
    ids = [5, 2, 9, 7, 4, 3, 8, 6, 1, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25]
    chunks = chunks_of(6 * CHUNK)
    first, end = index * CHUNK // (12 * ranks), -(-(index + 1) * CHUNK // (12 * ranks))
    for rank in range(ranks):
        plan = ShardPlan((0,), context_ranks=ranks, context_rank=rank)
        slots = [TokenSlots(0, InterleavedBlocks(12)).of_rank(plan, 1)]
        (item,) = slots_to_load(
            slots, [chunks[index]], (ids,), index * CHUNK, (index + 1) * CHUNK, CHUNK
        )
        stored = slots_to_store(slots, (ids[first:end],), index, CHUNK)
        assert stored.tolist() == item.slots.tolist()


@pytest.mark.parametrize(("ids", "end"), [([0, 0, 3], 32), ([1, 2, 3], 40), ([1], 32), ([1], 0)])
def test_state_without_a_block_of_its_own_is_not_loaded(ids: list[int], end: int) -> None:
    groups = [StateBlocks(0, StateSlots((1,)), 16)]
    with pytest.raises(ValueError, match=f"the state after {end} tokens has no block"):
        state_to_load(groups, chunks_of(CHUNK)[0], (ids,), end)


def test_tail_cannot_fill_more_tokens_than_it_has() -> None:
    slots = [TokenSlots(0, InterleavedBlocks(4))]
    ids = torch.arange(1, 9).tolist()
    with pytest.raises(ValueError, match="a tail of 3 tokens cannot fill tokens 16 to 20"):
        slots_to_load(slots, chunks_of(CHUNK + 3), (ids,), 0, CHUNK + 4, CHUNK)
    with pytest.raises(ValueError, match="2 chunks cannot fill tokens 0 to 16"):
        slots_to_load(slots, chunks_of(CHUNK + 3), (ids,), 0, CHUNK, CHUNK)
