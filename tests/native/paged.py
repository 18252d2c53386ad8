"""Paged caches for tests: the same memory as tensors and as numpy bytes found by names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvshelf.kv.layout import PagedLayout, native_slots_of, slots_of

Bytes = NDArray[np.uint8]

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
FORMS = ["bhnc-hnd", "bhnc-nhd", "2bnhd", "b2nhd", "mla", "native"]


@dataclass
class Paged:
    """Paged caches of several layers, and the same memory as numpy bytes.

    ``memory[layer]`` is everything that was allocated, gaps included; ``row`` is a view of
    the bytes of one (layer, slot, kv, head), found by naming the dimensions, not by strides.
    """

    form: str
    memory: list[Bytes]
    views: list[Bytes]
    caches: list[Tensor]
    layout: PagedLayout
    block_size: int
    head_size: int

    def row(self, layer: int, slot: int, kv: int, head: int) -> Bytes:
        view, size = self.views[layer], self.head_size
        if self.form == "native":
            return view[slot, head]
        block, token = divmod(slot, self.block_size)
        if self.form == "mla":
            return view[block, token]
        if self.form == "2bnhd":
            return view[kv, block, token, head]
        if self.form == "b2nhd":
            return view[block, kv, token, head]
        return view[block, head, token, kv * size : (kv + 1) * size]

    def gathered(self, slots: Sequence[int], first: int, heads: int) -> Bytes:
        layout = self.layout
        out = np.zeros(
            (len(self.caches), layout.kv_planes, len(slots), heads, layout.row_bytes),
            dtype=np.uint8,
        )
        for layer, kv, token, head in np.ndindex(*out.shape[:-1]):
            if slots[token] >= 0:
                out[layer, kv, token, head] = self.row(
                    layer, slots[token], kv, first + head
                ).reshape(-1)
        return out

    def scatter_into_copy(
        self, slots: Sequence[int], chunk: Bytes, first: int, heads: int
    ) -> list[Bytes]:
        """What all memory must be after a scatter."""
        before = [memory.copy() for memory in self.memory]
        layout = self.layout
        rows = chunk.reshape(
            len(self.caches), layout.kv_planes, len(slots), heads, layout.row_bytes
        )
        for layer, kv, token, head in np.ndindex(*rows.shape[:-1]):
            if slots[token] >= 0:
                place = self.row(layer, slots[token], kv, first + head)
                place[...] = rows[layer, kv, token, head].reshape(place.shape)
        after = [memory.copy() for memory in self.memory]
        for memory, old in zip(self.memory, before, strict=True):
            memory[...] = old
        return after


def make_paged(
    form: str,
    dtype: torch.dtype,
    *,
    layers: int = 2,
    blocks: int = 3,
    block_size: int = 4,
    heads: int = 2,
    head_size: int = 4,
    gaps: tuple[int, ...] = (0, 0, 0, 0, 0),
    lead: int = 0,
    seed: int = 0,
) -> Paged:
    """Caches full of random bytes.

    ``gaps[i]`` elements lie unused after dimension i's used ones, ``lead`` elements before the
    cache: so strides are any multiple of the element size and storage offsets are not zero.
    """
    item = dtype.itemsize
    content = 2 * head_size
    used = {
        "bhnc-hnd": (blocks, heads, block_size, content),
        "bhnc-nhd": (blocks, block_size, heads, content),
        "2bnhd": (2, blocks, block_size, heads, head_size),
        "b2nhd": (blocks, 2, block_size, heads, head_size),
        "mla": (blocks, block_size, content),
        "native": (blocks, heads, block_size, content),
    }[form]
    if form == "native":
        gaps = (*gaps[:2], 0, 0)
    whole = tuple(n + gap for n, gap in zip(used, gaps, strict=False))
    random = np.random.default_rng(seed)
    memory, views, caches = [], [], []
    for _ in range(layers):
        flat = random.integers(1, 256, (lead + int(np.prod(whole))) * item, dtype=np.uint8)
        inner = tuple(slice(0, n) for n in used)
        view = flat[lead * item :].reshape(*whole, item)[inner]
        cache = torch.from_numpy(flat).view(dtype)[lead:].view(whole)[inner]
        if form == "bhnc-nhd":
            view, cache = view.swapaxes(1, 2), cache.transpose(1, 2)
        memory.append(flat)
        views.append(view)
        caches.append(cache)
    make: dict[str, Callable[[Tensor], PagedLayout]] = {
        "bhnc-hnd": lambda cache: PagedLayout.from_bhnc(cache, head_size),
        "bhnc-nhd": lambda cache: PagedLayout.from_bhnc(cache, head_size),
        "2bnhd": PagedLayout.from_2bnhd,
        "b2nhd": PagedLayout.from_b2nhd,
        "mla": PagedLayout.from_mla,
        "native": PagedLayout.native_blocks,
    }
    return Paged(form, memory, views, caches, make[form](caches[0]), block_size, head_size)


@dataclass
class Case:
    """A call: caches, slots of all chunks one after another, and heads."""

    paged: Paged
    slots: list[int]
    chunks: int
    shards: int
    first_head: int
    heads: int  # of each shard

    @property
    def tokens(self) -> int:
        return len(self.slots) // self.chunks

    @property
    def mapping(self) -> Tensor:
        return torch.tensor(self.slots, dtype=torch.int64).view(self.chunks, self.tokens)

    @property
    def buffer_bytes(self) -> int:
        return len(self.paged.caches) * self.paged.layout.chunk_bytes(self.tokens, self.heads)

    def gathered(self) -> Bytes:
        """[chunks, shards, bytes] that a gather must give."""
        return np.array(
            [
                [
                    self.paged.gathered(slots, first, self.heads).reshape(-1)
                    for first in self._first_heads()
                ]
                for slots in self._slots()
            ],
            dtype=np.uint8,
        ).reshape(self.chunks, self.shards, self.buffer_bytes)

    def scattered(self, buffers: Bytes) -> list[Bytes]:
        """What all memory must be after a scatter of [chunks, shards, bytes]."""
        before = [memory.copy() for memory in self.paged.memory]
        for slots, of_chunk in zip(self._slots(), buffers, strict=True):
            for first, buffer in zip(self._first_heads(), of_chunk, strict=True):
                after = self.paged.scatter_into_copy(slots, buffer, first, self.heads)
                for memory, new in zip(self.paged.memory, after, strict=True):
                    memory[...] = new
        after = [memory.copy() for memory in self.paged.memory]
        for memory, old in zip(self.paged.memory, before, strict=True):
            memory[...] = old
        return after

    def _slots(self) -> list[list[int]]:
        tokens = self.tokens
        return [self.slots[i * tokens : (i + 1) * tokens] for i in range(self.chunks)]

    def _first_heads(self) -> list[int]:
        return [self.first_head + shard * self.heads for shard in range(self.shards)]


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
    chunks = draw(st.integers(1, 3))
    del slots[len(slots) - len(slots) % chunks :]
    for position in range(len(slots)):
        if draw(st.integers(0, 5)) == 0:
            slots[position] = -1
    first = draw(st.integers(0, paged.layout.heads - 1))
    shards = draw(st.integers(1, paged.layout.heads - first))
    heads = draw(st.integers(1, (paged.layout.heads - first) // shards))
    return Case(paged, slots, chunks, shards, first, heads)


@dataclass
class Buffers:
    """The buffers of a call inside a larger memory, with gaps that must stay as they are."""

    memory: Tensor
    view: Tensor  # [chunks, shards, bytes]
    used: NDArray[np.bool_]  # of each byte of memory

    @classmethod
    def of(
        cls, case: Case, lead: int = 0, gap: int = 0, *, shards_outside: bool = False
    ) -> Buffers:
        chunks, shards, size = case.chunks, case.shards, case.buffer_bytes
        step = size + gap
        memory = torch.full((lead + chunks * shards * step,), 0xAB, dtype=torch.uint8)
        strides = (step, chunks * step, 1) if shards_outside else (shards * step, step, 1)
        places = torch.arange(memory.numel()).as_strided((chunks, shards, size), strides, lead)
        used = np.zeros(memory.numel(), dtype=np.bool_)
        used[places.numpy().reshape(-1)] = True
        return cls(memory, memory.as_strided((chunks, shards, size), strides, lead), used)
