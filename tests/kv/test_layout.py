"""Paged layouts: what the constructors read from real caches, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.kv.layout import PagedLayout, native_slots_of, slots_of


def test_native_blocks_refuse_tokens_outside_heads() -> None:
    cache = torch.empty(5, 32, 4, 16).transpose(1, 2)
    with pytest.raises(ValueError, match="must be contiguous"):
        PagedLayout.native_blocks(cache)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PagedLayout.from_bhnc(torch.empty(2, 3, 4), 2), "expected 4 dimensions"),
        (lambda: PagedLayout.from_bhnc(torch.empty(2, 3, 4, 8), 8), "2 × head_size = 16"),
        (lambda: PagedLayout.from_bhnc(torch.empty(2, 3, 8, 4).mT, 4), "must be contiguous"),
        (lambda: PagedLayout.from_bhnc(torch.empty(2, 0, 4, 8), 4), "empty in dimension 1"),
        (lambda: PagedLayout.from_2bnhd(torch.empty(3, 2, 4, 5, 6)), "use from_2bnhd"),
        (lambda: PagedLayout.from_b2nhd(torch.empty(2, 3, 4, 5, 6)), "use from_2bnhd"),
        (lambda: PagedLayout.from_mla(torch.empty(2, 3, 4, 5)), "expected 3 dimensions"),
        (lambda: PagedLayout.from_mla(torch.empty(2, 1, 4).expand(2, 3, 4)), "rows .* overlap"),
        (lambda: PagedLayout.from_mla(torch.empty(20).as_strided((4, 2, 4), (4, 4, 1))), "overlap"),
        (lambda: PagedLayout(1, 8, 0, 0, 0, 1, 1, 0, 4), "row_bytes is 0"),
        (lambda: PagedLayout(1, -8, 0, 0, 0, 1, 1, 8, 4), "block_stride is -8"),
        (lambda: PagedLayout.from_ints([1, 2, 3]), "9 integers"),
    ],
)
def test_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_empty_cache_has_a_layout() -> None:
    layout = PagedLayout.from_mla(torch.empty(0, 16, 4))
    assert (layout.num_slots, layout.extent) == (0, 0)


@given(st.data())
def test_slots_of_is_the_plain_formula(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 40))
    ids = data.draw(st.lists(st.integers(0, 1 << 40), max_size=8))
    room = len(ids) * block_size
    start = data.draw(st.integers(0, room))
    count = data.draw(st.integers(0, room - start))
    slots = slots_of(ids, block_size, start, count)
    assert slots.dtype == torch.int64
    assert slots.is_contiguous()
    assert slots.tolist() == [
        ids[position // block_size] * block_size + position % block_size
        for position in range(start, start + count)
    ]


@given(st.data())
def test_native_slots_are_kernel_block_ids(data: st.DataObject) -> None:
    kernel = data.draw(st.sampled_from([16, 32]))
    ratio = data.draw(st.integers(1, 4))
    ids = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=6, unique=True))
    start = data.draw(st.integers(0, len(ids) * ratio))
    count = data.draw(st.integers(0, len(ids) * ratio - start))
    slots = native_slots_of(ids, kernel * ratio, kernel, start * kernel, count * kernel)
    tokens = slots_of(ids, kernel * ratio, start * kernel, count * kernel)
    assert slots.tolist() == [int(slot) // kernel for slot in tokens[::kernel]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: slots_of([1], 16, 0, 17), "hold only 16"),
        (lambda: slots_of([1], 16, -1, 2), "start at 0"),
        (lambda: slots_of([1], 16, 0, -2), "start at 0"),
        (lambda: slots_of([1], 0, 0, 0), "at least 1"),
        (lambda: slots_of([3, -1], 16, 0, 20), "block id -1"),
        (lambda: native_slots_of([1], 32, 24, 0, 24), "do not divide"),
        (lambda: native_slots_of([1], 32, 16, 8, 16), "not whole blocks"),
        (lambda: native_slots_of([1], 32, 16, 0, 8), "not whole blocks"),
    ],
)
def test_slots_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
