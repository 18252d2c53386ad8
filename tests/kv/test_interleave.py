"""The slots of tokens whose blocks the ranks of a group share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.kv.interleave import InterleavedBlocks
from kvshelf.kv.layout import slots_of


def by_hand(blocks: InterleavedBlocks, ids: list[int], position: int) -> int:
    """Give out the tokens of a block one by one."""
    block, inside = divmod(position, blocks.block_size * blocks.ranks)
    next_slot = [0] * blocks.ranks
    for token in range(inside):
        next_slot[token // blocks.interleave % blocks.ranks] += 1
    holder = inside // blocks.interleave % blocks.ranks
    return ids[block] * blocks.block_size + next_slot[holder] if holder == blocks.rank else -1


@given(
    ranks=st.integers(2, 5),
    interleave=st.integers(1, 4),
    runs=st.integers(1, 4),
    ids=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    data=st.data(),
)
def test_each_token_has_one_slot_on_one_rank(
    ranks: int, interleave: int, runs: int, ids: list[int], data: st.DataObject
) -> None:
    size = runs * interleave
    start = data.draw(st.integers(0, len(ids) * size * ranks))
    count = data.draw(st.integers(0, len(ids) * size * ranks - start))
    held = [0] * count
    for rank in range(ranks):
        blocks = InterleavedBlocks(size, ranks, rank, interleave)
        assert blocks.tokens == size * ranks
        slots = blocks.slots_of(ids, start, count).tolist()
        assert slots == [by_hand(blocks, ids, start + token) for token in range(count)]
        held = [count + (slot >= 0) for count, slot in zip(held, slots, strict=True)]
    assert held == [1] * count


@pytest.mark.parametrize("interleave", [1, 3, 64])
def test_single_rank_holds_all_tokens(interleave: int) -> None:
    blocks = InterleavedBlocks(16, interleave=interleave)
    assert blocks.tokens == 16
    assert blocks.slots_of([3, 1], 5, 20).equal(slots_of([3, 1], 16, 5, 20))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((16, 2, 2), "not one of 2 ranks"), ((16, 2, 0, 3), "do not divide"), ((16, 2, 0, 0), "do")],
)
def test_blocks_that_cannot_be_are_refused(arguments: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        InterleavedBlocks(*arguments)


def test_tokens_beyond_the_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="pass all blocks"):
        InterleavedBlocks(16, 2).slots_of([1], 16, 17)
