"""Random calls of gather and scatter, on the caches and with the reference of support/paged.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvshelf.kv.layout import native_slots_of, slots_of
from tests.support.paged import DTYPES, FORMS, Paged, make_paged


@dataclass
class Case:
    """A call: caches, slots, and heads."""

    paged: Paged
    slots: list[int]
    shards: int
    first_head: int
    heads: int  # of each shard

    @property
    def tokens(self) -> int:
        return len(self.slots)

    @property
    def mapping(self) -> Tensor:
        return torch.tensor(self.slots, dtype=torch.int64)

    @property
    def buffer_bytes(self) -> int:
        return len(self.paged.caches) * self.paged.layout.chunk_bytes(self.tokens, self.heads)

    def random_buffers(self) -> Tensor:
        """uint8 [shards, bytes], always the same for calls of the same size."""
        shape, generator = (self.shards, self.buffer_bytes), torch.Generator()
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator.manual_seed(1))

    def gathered(self) -> Tensor:
        """[shards, bytes] that a gather must give."""
        slots = self.mapping.unsqueeze(0)
        return self.paged.gathered(slots, self.first_head, self.heads, self.shards)[0]

    def scattered(self, buffers: Tensor) -> list[Tensor]:
        """What all memory must be after a scatter of [shards, bytes]."""
        slots, buffers = self.mapping.unsqueeze(0), buffers.unsqueeze(0)
        return self.paged.scattered(slots, buffers, self.first_head, self.heads).memory


@st.composite
def cases(draw: st.DrawFn) -> Case:
    form = draw(st.sampled_from(FORMS))
    ratio = draw(st.integers(1, 3))  # kernel blocks in a manager block
    manager_blocks = draw(st.integers(1, 4))
    block_size = draw(st.integers(1, 5))
    heads = draw(st.integers(1, 4))
    paged = make_paged(
        form,
        draw(st.sampled_from(DTYPES)),
        layers=draw(st.integers(1, 3)),
        blocks=manager_blocks * ratio,
        block_size=block_size,
        heads=heads,
        head_size=draw(st.integers(1, 9)),
        gaps=draw(st.tuples(*[st.integers(0, 2)] * 5)),
        lead=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 99)),
    )
    order = draw(st.permutations(range(manager_blocks)))
    if form == "native":
        room = manager_blocks * ratio
        start = draw(st.integers(0, room))
        count = draw(st.integers(0, room - start))
        slots = native_slots_of(
            order, block_size * ratio, block_size, start * block_size, count * block_size
        ).tolist()
    else:
        room = manager_blocks * ratio * block_size
        start = draw(st.integers(0, room))
        count = draw(st.integers(0, room - start))
        slots = slots_of(order, block_size * ratio, start, count).tolist()
    for position in range(len(slots)):
        if draw(st.integers(0, 5)) == 0:
            slots[position] = -1
    first = draw(st.integers(0, paged.layout.heads - 1))
    shards = draw(st.integers(1, paged.layout.heads - first))
    heads = draw(st.integers(1, (paged.layout.heads - first) // shards))
    return Case(paged, slots, shards, first, heads)


@dataclass
class Buffers:
    """The buffers of a call inside a larger memory, with gaps that must stay as they are."""

    memory: Tensor
    view: Tensor  # [shards, bytes]
    used: NDArray[np.bool_]  # of each byte of memory

    @classmethod
    def of(cls, case: Case, lead: int = 0, gap: int = 0) -> Buffers:
        shards, size = case.shards, case.buffer_bytes
        shape, strides = (shards, size), (size + gap, 1)
        memory = torch.full((lead + shards * (size + gap),), 0xAB, dtype=torch.uint8)
        places = torch.arange(memory.numel()).as_strided(shape, strides, lead)
        used = np.zeros(memory.numel(), dtype=np.bool_)
        used[places.numpy().reshape(-1)] = True
        return cls(memory, memory.as_strided(shape, strides, lead), used)
