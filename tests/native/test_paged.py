"""The reference itself: bytes that loops find by the names of their dimensions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gpu_paged import DTYPES, FORMS, Paged, make_paged
from torch import Tensor

from tests.native.paged import Case

HEADS, BLOCK, SIZE = 3, 4, 5


def row(form: str, cache: Tensor, slot: int, kv: int, head: int) -> Tensor:
    if form == "native":
        return cache[slot, head]
    block, token = divmod(slot, BLOCK)
    if form == "mla":
        return cache[block, token]
    if form == "2bnhd":
        return cache[kv, block, token, head]
    if form == "b2nhd":
        return cache[block, kv, token, head]
    return cache[block, head, token, kv * SIZE : (kv + 1) * SIZE]


def rows(case: Case, paged: Paged) -> Iterator[tuple[int, Tensor | None]]:
    """For each row of the buffers, in their order: its number, and its place in the caches."""
    layout = paged.layout
    shape = (case.chunks, case.shards, len(paged.caches), layout.kv_planes, case.tokens, case.heads)
    for number, (chunk, shard, layer, kv, token, head) in enumerate(np.ndindex(*shape)):
        slot = case.slots[chunk * case.tokens + token]
        of_call = case.first_head + shard * case.heads + head
        found = row(paged.form, paged.caches[layer], slot, kv, of_call) if slot >= 0 else None
        yield number, found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_reference_finds_rows_by_their_names(form: str, dtype: torch.dtype) -> None:
    paged = make_paged(
        *(form, dtype),
        blocks=6,
        block_size=BLOCK,
        heads=HEADS,
        head_size=SIZE,
        gaps=(1, 2, 1, 1, 3),
        lead=5,
    )
    first, shards = (0, 1) if form == "mla" else (1, 2)
    case = Case(paged, [4, 0, -1, 5, 2, 3], 2, shards, first, 1)
    size = paged.layout.row_bytes
    found = case.gathered()
    assert found.shape == (2, shards, case.buffer_bytes)
    for number, place in rows(case, paged):
        expected = [0] * size if place is None else place.reshape(-1).view(torch.uint8).tolist()
        assert found.view(-1, size)[number].tolist() == expected

    incoming, after = case.random_buffers(), paged.clone()
    for number, target in rows(case, after):
        if target is not None:
            content = incoming.view(-1, size)[number].view(dtype)
            target.copy_(content.view(target.shape))
    before = [part.clone() for part in paged.memory]
    for found, expected, kept, old in zip(
        case.scattered(incoming), after.memory, paged.memory, before, strict=True
    ):
        assert torch.equal(found, expected)
        assert torch.equal(kept, old)
    assert not torch.equal(after.memory[0], before[0])
