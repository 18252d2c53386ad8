"""Gather and scatter of permuted caches, compiled and plain torch, against plain indexing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvshelf.kv import ops
from kvshelf.kv.layout import PermutedLayout, packed_positions, permutation_bytes
from kvshelf.kv.ops.permuted import units_of
from tests.kv import implementations
from tests.kv.implementations import using

Bytes = NDArray[np.uint8]

IMPLEMENTATIONS = [name for name in implementations.IMPLEMENTATIONS if name != "kernels"]
DTYPES = {1: torch.float8_e5m2, 2: torch.bfloat16, 4: torch.float32}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


@dataclass
class Permuted:
    """Permuted caches of several layers, and the same memory as bytes.

    ``regions[layer]`` is a view [blocks, heads, bytes] of ``memory[layer]``.
    """

    layout: PermutedLayout
    memory: list[Bytes]
    regions: list[Bytes]
    caches: list[Tensor]

    def _places(self, layer: int, slot: int, kv: int, head: int) -> tuple[Bytes, Bytes]:
        layout = self.layout
        block, token = divmod(slot, layout.block_size)
        items = self.regions[layer][block, head].reshape(-1, layout.item_bytes)
        return items, layout.positions()[kv, token].numpy()

    def gathered(self, slots: Sequence[int], first: int, heads: int) -> Bytes:
        layout = self.layout
        out = np.zeros(
            (len(self.caches), layout.kv_planes, len(slots), heads, layout.row_bytes),
            dtype=np.uint8,
        )
        for layer, kv, token, head in np.ndindex(*out.shape[:-1]):
            if slots[token] >= 0:
                items, places = self._places(layer, slots[token], kv, first + head)
                out[layer, kv, token, head] = items[places].reshape(-1)
        return out

    def scatter(self, slots: Sequence[int], chunk: Bytes, first: int, heads: int) -> None:
        layout = self.layout
        rows = chunk.reshape(
            len(self.caches), layout.kv_planes, len(slots), heads, layout.row_bytes
        )
        for layer, kv, token, head in np.ndindex(*rows.shape[:-1]):
            if slots[token] >= 0:
                items, places = self._places(layer, slots[token], kv, first + head)
                row = rows[layer, kv, token, head].reshape(-1, layout.item_bytes)
                items[places] = row
                block = slots[token] // layout.block_size
                self.regions[layer][block, first + head] = items.reshape(-1)


def make(
    positions: Tensor,
    item: int = 2,
    *,
    layers: int = 2,
    blocks: int = 3,
    heads: int = 2,
    gap: int = 0,
    seed: int = 0,
) -> Permuted:
    """Caches full of random bytes, `gap` heads that are not the cache's behind each block."""
    kv_planes, tokens, size = positions.shape
    region = kv_planes * tokens * size * item
    random = np.random.default_rng(seed)
    memory = [
        random.integers(0, 256, (blocks, heads + gap, region), dtype=np.uint8)
        for _ in range(layers)
    ]
    regions = [whole[:, :heads] for whole in memory]
    caches = [
        torch.from_numpy(whole).view(DTYPES[item]).unflatten(-1, (tokens, -1))[:, :heads]
        for whole in memory
    ]
    layout = PermutedLayout(
        block_size=tokens,
        block_stride=(heads + gap) * region if blocks > 1 else 0,
        head_stride=region if heads > 1 else 0,
        kv_planes=kv_planes,
        heads=heads,
        head_size=size,
        item_bytes=item,
        num_blocks=blocks,
        permutation=permutation_bytes(positions),
    )
    return Permuted(layout, memory, regions, caches)


def positions_of(kind: str, tokens: int, size: int, item: int, seed: int = 0) -> Tensor:
    """Positions that take each path: transposed, interleaved, rows, runs and no order at all."""
    if kind in ("vec", "amx", "pairs"):
        # "pairs": those of amx also where an element has four bytes.
        name, item = ("amx", 2) if kind == "pairs" else (kind, item)
        known = packed_positions(name, tokens, size, item)
        assert known is not None
        return known
    random = torch.Generator().manual_seed(seed)
    count = 2 * tokens * size
    plain = torch.arange(count, dtype=torch.int32)
    if kind == "plain":
        return plain.view(2, tokens, size)
    if kind == "rows":  # whole rows in disorder
        order = torch.randperm(2 * tokens, generator=random)
        return plain.view(-1, size)[order].reshape(2, tokens, size)
    if kind == "runs":  # half rows in disorder
        order = torch.randperm(4 * tokens, generator=random)
        return plain.view(-1, size // 2)[order].reshape(2, tokens, size)
    if kind == "content":
        return torch.randperm(count // 2, generator=random).int().view(1, tokens, size)
    assert kind == "random"
    return torch.randperm(count, generator=random).int().view(2, tokens, size)


KINDS = ["vec", "amx", "pairs", "plain", "rows", "runs", "content", "random"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Permuted, list[int], int, int]:
    kind = draw(st.sampled_from(KINDS))
    item = draw(st.sampled_from([1, 2, 4]))
    tokens, size = draw(st.sampled_from([(16, 16), (32, 48), (16, 8), (6, 4), (1, 2), (10, 24)]))
    if kind in ("amx", "pairs") and (tokens % 16 or size % 16):
        tokens, size = 32, 16
    heads = draw(st.integers(1, 3))
    blocks = draw(st.integers(1, 4))
    found = make(
        positions_of(kind, tokens, size, item, draw(st.integers(0, 99))),
        item,
        blocks=blocks,
        heads=heads,
        gap=draw(st.integers(0, 1)),
        layers=draw(st.integers(1, 2)),
    )
    every = blocks * tokens
    if draw(st.booleans()):  # consecutive slots from anywhere, in blocks in any order
        order = draw(st.permutations(range(blocks)))
        slots = [block * tokens + i for block in order for i in range(tokens)]
        start = draw(st.integers(0, every - 1))
        slots = slots[start : start + draw(st.integers(1, every))]
    else:
        slots = draw(st.lists(st.integers(0, every - 1), unique=True, max_size=40))
    for index in draw(st.lists(st.integers(0, 200), max_size=5)):
        if slots:
            slots[index % len(slots)] = -1
    first = draw(st.integers(0, heads - 1))
    return found, slots, first, draw(st.integers(1, heads - first))


@given(case=cases(), lead=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_gather_and_scatter_are_plain_indexing(
    case: tuple[Permuted, list[int], int, int], lead: int
) -> None:
    found, slots, first, heads = case
    expected = found.gathered(slots, first, heads).reshape(-1)
    mapping = torch.tensor(slots, dtype=torch.int64)
    incoming = np.random.default_rng(1).integers(0, 256, expected.size, dtype=np.uint8)
    original = [memory.copy() for memory in found.memory]
    found.scatter(slots, incoming, first, heads)
    after = [memory.copy() for memory in found.memory]
    for name in IMPLEMENTATIONS:
        for memory, old in zip(found.memory, original, strict=True):
            memory[...] = old
        with using(name):
            buffer = torch.full((lead + expected.size + 3,), 0xAB, dtype=torch.uint8)
            out = buffer[lead : lead + expected.size]
            ops.gather_kv(found.caches, mapping, out, found.layout, first, heads)
            np.testing.assert_array_equal(out.numpy(), expected)
            assert (buffer[:lead] == 0xAB).all()
            assert (buffer[lead + expected.size :] == 0xAB).all()
            out.copy_(torch.from_numpy(incoming))
            ops.scatter_kv(found.caches, mapping, out, found.layout, first, heads)
            for memory, want in zip(found.memory, after, strict=True):
                np.testing.assert_array_equal(memory, want)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "item"), [*((kind, 2) for kind in KINDS), ("vec", 1), ("amx", 4), ("pairs", 4)]
)
def test_whole_blocks_of_a_real_size(kind: str, item: int, implementation: str) -> None:
    found = make(positions_of(kind, 32, 64, item), item, blocks=4)
    slots = [*range(96, 128), *range(32, 64), *range(64, 81)]
    expected = found.gathered(slots, 0, 2)
    chunk = torch.empty(expected.size, dtype=torch.uint8)
    ops.gather_kv(found.caches, torch.tensor(slots), chunk, found.layout)
    np.testing.assert_array_equal(chunk.numpy(), expected.reshape(-1))
    other = make(positions_of(kind, 32, 64, item), item, blocks=4, seed=9)
    ops.scatter_kv(other.caches, torch.tensor(slots), chunk, other.layout)
    np.testing.assert_array_equal(other.gathered(slots, 0, 2), expected)


@pytest.mark.parametrize("kind", ["vec", "amx", "random"])
def test_two_threads_may_fill_one_block(kind: str, implementation: str) -> None:
    """The pieces of a block that straddles two chunks arrive on different threads."""
    size = 256
    positions = positions_of(kind, 32, size, 2)
    found = make(positions, layers=4, blocks=2)
    expected = make(positions, layers=4, blocks=2)
    slots = [torch.tensor([s if s % 2 == half else -1 for s in range(32, 64)]) for half in (0, 1)]
    count = 4 * found.layout.chunk_bytes(32)
    chunks = [torch.randint(0, 256, (count,), dtype=torch.uint8) for _ in range(2)]
    for mapping, chunk in zip(slots, chunks, strict=True):
        expected.scatter(mapping.tolist(), chunk.numpy(), 0, 2)
    start = threading.Barrier(2)

    def fill(half: int) -> None:
        start.wait()
        for _ in range(20):
            ops.scatter_kv(found.caches, slots[half], chunks[half], found.layout)

    threads = [threading.Thread(target=fill, args=(half,)) for half in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for memory, want in zip(found.memory, expected.memory, strict=True):
        np.testing.assert_array_equal(memory, want)


def refused() -> list[tuple[str, Callable[[Permuted], dict[str, object]], str]]:
    return [
        ("slot too large", lambda _: {"slots": torch.tensor([0, 48, 1])}, r"mapping\[1\] is 48"),
        ("slot too small", lambda _: {"slots": torch.tensor([0, 1, -2])}, r"mapping\[2\] is -2"),
        ("float slots", lambda _: {"slots": torch.zeros(3)}, "one-dimensional int64"),
        ("heads", lambda _: {"first_head": 1, "num_heads": 2}, "2 heads from head 1 on"),
        ("chunk size", lambda _: {"chunk": torch.zeros(5, dtype=torch.uint8)}, "has 5 bytes"),
        ("caches", lambda _: {"caches": []}, "caches is empty"),
        (
            "reach",
            lambda found: {"layout": replace(found.layout, num_blocks=4)},
            "the layout reaches",
        ),
    ]


@pytest.mark.parametrize(
    ("changes", "message"), [case[1:] for case in refused()], ids=[case[0] for case in refused()]
)
@pytest.mark.parametrize("gather", [True, False])
def test_nothing_is_touched_by_a_refused_call(
    gather: bool,
    changes: Callable[[Permuted], dict[str, object]],
    message: str,
    implementation: str,
) -> None:
    found = make(positions_of("vec", 16, 8, 2))
    arguments = {
        "caches": found.caches,
        "slots": torch.tensor([0, 1, 2]),
        "chunk": torch.full((2 * found.layout.chunk_bytes(3),), 7, dtype=torch.uint8),
        "layout": found.layout,
        "first_head": 0,
        "num_heads": 2,
    } | changes(found)
    chunk = arguments["chunk"]
    assert isinstance(chunk, Tensor)
    buffer = chunk.clone()
    before = [memory.copy() for memory in found.memory]
    copy = ops.gather_kv if gather else ops.scatter_kv
    with pytest.raises(ValueError, match=message):
        copy(*arguments.values())  # type: ignore[arg-type]
    for memory, old in zip(found.memory, before, strict=True):
        np.testing.assert_array_equal(memory, old)
    assert torch.equal(chunk, buffer)


def test_tables_have_units_as_long_as_they_can_be() -> None:
    units = {
        kind: tuple(units_of(make(positions_of(kind, 32, 16, 2)).layout).sizes)
        for kind in ("vec", "amx", "plain", "rows", "runs")
    }
    assert units == {
        "vec": (2, 32),
        "amx": (4, 2),
        "plain": (32, 32),
        "rows": (32, 32),
        "runs": (16, 16),
    }


# --------------------------------------------------------------------------- the layout itself


def test_layout_whose_positions_are_no_permutation_is_refused() -> None:
    layout = make(positions_of("vec", 16, 8, 2)).layout
    twice = layout.positions()
    twice[0, 0, 0] = twice[0, 0, 1]
    with pytest.raises(ValueError, match="no permutation"):
        replace(layout, permutation=permutation_bytes(twice))
    with pytest.raises(ValueError, match="the permutation has"):
        replace(layout, block_size=15)
    with pytest.raises(ValueError, match="overlap"):
        replace(layout, head_stride=layout.head_stride - 1)
    with pytest.raises(ValueError, match="at most 2 KV planes"):
        replace(layout, kv_planes=3)


def test_as_blocks_of_a_permuted_layout_are_the_bytes_of_each_block_and_head() -> None:
    found = make(positions_of("vec", 16, 8, 2), gap=1)
    layout = found.layout.as_blocks()
    chunk = torch.empty(2 * layout.chunk_bytes(2), dtype=torch.uint8)
    ops.gather_kv(found.caches, torch.tensor([2, 0]), chunk, layout)
    expected = np.stack([regions[[2, 0]] for regions in found.regions])
    np.testing.assert_array_equal(chunk.numpy(), expected.reshape(-1))
