"""Learning layouts from writers: every known one, any permutation, and all that must be unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvshelf.kv import ops
from kvshelf.kv.layout import (
    PagedLayout,
    PermutedLayout,
    packed_positions,
    permutation_bytes,
)
from kvshelf.kv.layout_learning import (
    CacheShape,
    LearnedLayout,
    WritePattern,
    confirm_layout,
    learn_layout,
)

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCKS, HEADS, SIZE = 5, 2, 32
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
# [L, B, H, N, C] in the order of memory, as vLLM names its layouts.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass
class Engine:
    """A cache as an engine registers it, and the engine's way to write to it.

    ``rows`` is a view of the same memory, [kernel blocks, slots, kv_planes, heads, elements].
    """

    cache: Tensor
    rows: Tensor
    shape: CacheShape
    expected: PagedLayout | None = None

    def write(self, slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        contents = [key] if value is None else [key, value]
        scales = self.shape.scales
        size = self.rows.shape[1]
        for kv, content in enumerate(contents):
            # Computed in bfloat16 and scaled as engines do.
            scaled = (content.bfloat16() / scales[kv]).to(self.rows.dtype)
            self.rows[slots // size, slots % size, kv] = scaled

    def learn(self) -> LearnedLayout:
        return learn_layout(self.cache, self.shape, self.write)


def shape_of(
    block_size: int = 16, dtype: torch.dtype = torch.bfloat16, **changes: object
) -> CacheShape:
    shape = CacheShape(BLOCKS, block_size, HEADS, SIZE, 2, dtype)
    return replace(shape, **changes)  # type: ignore[arg-type]


def memory(*size: int, dtype: torch.dtype) -> Tensor:
    """Memory with something in it: engines do not promise zeros."""
    count = torch.Size(size).numel()
    random = torch.randint(0, 120, (count * dtype.itemsize,), dtype=torch.uint8)
    return random.view(dtype).view(size)


def engine(form: str, dtype: torch.dtype = torch.bfloat16, block_size: int = 16) -> Engine:
    shape = shape_of(block_size, dtype)
    if form in ORDERS:
        logical = (3, BLOCKS, HEADS, block_size, 2 * SIZE)
        order = ORDERS[form]
        back = [order.index(dimension) for dimension in range(5)]
        whole = memory(*(logical[dimension] for dimension in order), dtype=dtype).permute(back)
        cache = whole[1]
        rows = cache.unflatten(-1, (2, SIZE)).permute(0, 2, 3, 1, 4)
        return Engine(cache, rows, shape, PagedLayout.from_bhnc(cache, SIZE))
    if form == "2BNHD":
        cache = memory(2, BLOCKS, block_size, HEADS, SIZE, dtype=dtype)
        rows = cache.permute(1, 2, 0, 3, 4)
        return Engine(cache, rows, shape, PagedLayout.from_2bnhd(cache))
    if form == "B2NHD":
        cache = memory(BLOCKS, 2, block_size, HEADS, SIZE, dtype=dtype)
        rows = cache.permute(0, 2, 1, 3, 4)
        return Engine(cache, rows, shape, PagedLayout.from_b2nhd(cache))
    if form == "halves":
        # Registered as [B, H, N, 2 D], but all of K, then all of V in each (block, head).
        cache = memory(BLOCKS, HEADS, block_size, 2 * SIZE, dtype=dtype)
        apart = cache.view(BLOCKS, HEADS, 2, block_size, SIZE)
        return Engine(
            cache,
            apart.permute(0, 3, 2, 1, 4),
            shape,
            PagedLayout.from_b2nhd(apart.permute(0, 2, 3, 1, 4)),
        )
    if form in ("MLA", "MLA with a head"):
        cache = memory(BLOCKS, block_size, SIZE, dtype=dtype)
        rows = cache.view(BLOCKS, block_size, 1, 1, SIZE)
        registered = cache if form == "MLA" else cache.unsqueeze(1)
        shape = replace(shape, heads=1, kv_planes=1)
        return Engine(registered, rows, shape, PagedLayout.from_mla(cache))
    if form == "padded":
        # Bytes behind each head that belong to nobody.
        whole = memory(BLOCKS, HEADS, block_size + 3, 2 * SIZE, dtype=dtype)
        cache = whole[:, :, :block_size]
        rows = cache.unflatten(-1, (2, SIZE)).permute(0, 2, 3, 1, 4)
        return Engine(cache, rows, shape, PagedLayout.from_bhnc(cache, SIZE))
    raise AssertionError(form)


def packed_engine(
    positions: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    block_size: int = 0,
    heads: int = HEADS,
) -> Engine:
    """A cache [B, H, N, C] whose (block, head)s hold elements in an order of their own."""
    kv_planes, tokens, size = positions.shape
    parts = (block_size or tokens) // tokens
    cache = memory(BLOCKS * parts, heads, tokens, kv_planes * size, dtype=dtype)
    shape = shape_of(block_size or tokens, dtype, heads=heads, head_size=size, kv_planes=kv_planes)
    found = Engine(cache, cache, shape)
    flat = cache.view(BLOCKS * parts, heads, -1)
    order = positions.long()

    def write(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        contents = [key] if value is None else [key, value]
        for kv, content in enumerate(contents):
            places = order[kv, slots % tokens]  # [tokens, size]
            for head in range(heads):
                flat[(slots // tokens).unsqueeze(1), head, places] = content[:, head].to(dtype)

    found.write = write  # type: ignore[method-assign]
    return found


def check_gather(found: Engine, layout: PagedLayout | PermutedLayout) -> None:
    """What the engine writes, the operators gather in canonical order."""
    shape = found.shape
    slots = torch.randperm((BLOCKS - 1) * shape.block_size)[:37] + shape.block_size
    count = slots.numel()
    values = torch.randint(-8, 8, (shape.kv_planes, count, shape.heads, shape.head_size)).float()
    found.write(slots, values[0], values[1] if shape.kv_planes == 2 else None)
    out = torch.empty(layout.chunk_bytes(count), dtype=torch.uint8)
    ops.gather_kv([found.cache], slots, out, layout)
    assert torch.equal(out.view(shape.dtype).float().view(values.shape), values)


# --------------------------------------------------------------------------- strided


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, torch.bfloat16) for form in [*ORDERS, "2BNHD", "B2NHD", "halves", "padded"]),
        *(("MLA", dtype) for dtype in DTYPES),
        *(("LBNHC", dtype) for dtype in DTYPES[1:]),
        ("MLA with a head", torch.bfloat16),
    ],
    ids=str,
)
def test_strided_layouts_are_learned(form: str, dtype: torch.dtype) -> None:
    found = engine(form, dtype)
    before = found.cache.clone()
    learned = found.learn()
    assert learned.kind == "strided", learned.reason
    assert learned.layout == found.expected
    assert torch.equal(found.cache.view(torch.uint8), before.view(torch.uint8))
    assert learned.writes < 25
    check_gather(found, learned.layout)


@pytest.mark.parametrize("scale", [1.0, 0.0371, 3.0, 210.0])
def test_scales_outside_the_cache_do_not_matter(scale: float) -> None:
    found = engine("LBNHC", torch.float8_e4m3fn)
    # As vLLM registers it: bytes.
    found.cache = found.cache.view(torch.uint8)
    found.shape = replace(found.shape, scales=(scale, 1 / scale))
    assert found.learn().layout == found.expected


@st.composite
def strided_caches(draw: st.DrawFn) -> Engine:
    """Strides of any order of [B, N, KV, H], with gaps."""
    heads, block_size = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    size = draw(st.integers(1, 6))
    parts = draw(st.sampled_from([1, 1, 2, 3]))
    counts = {"B": BLOCKS * parts, "N": block_size, "2": 2, "H": heads}
    order = draw(st.permutations(list(counts)))
    # Where manager blocks are, kernel blocks follow each other at one distance.
    strides, step = {}, size
    for name in reversed(order):
        strides[name] = step
        step *= counts[name]
        step += draw(st.integers(0, 2)) * size
    whole = memory(step, dtype=torch.bfloat16)
    cache = whole.as_strided(
        (BLOCKS * parts, 2, block_size, heads, size),
        (strides["B"], strides["2"], strides["N"], strides["H"], 1),
    )
    shape = CacheShape(BLOCKS, block_size * parts, heads, size, 2, torch.bfloat16)
    rows = cache.permute(0, 2, 1, 3, 4)
    return Engine(cache, rows, shape, PagedLayout.from_b2nhd(cache))


@given(found=strided_caches())
@settings(max_examples=50, deadline=None)
def test_any_strides_are_learned(found: Engine) -> None:
    before = found.cache.clone()
    assert found.learn().layout == found.expected
    assert torch.equal(found.cache, before)


# --------------------------------------------------------------------------- permuted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("packing", ["vec", "amx"])
def test_known_packings_are_learned_and_named(
    packing: str, block_size: int, dtype: torch.dtype
) -> None:
    positions = packed_positions(packing, block_size, SIZE, dtype.itemsize)
    assert positions is not None
    found = packed_engine(positions, dtype)
    before = found.cache.clone()
    learned = found.learn()
    assert isinstance(learned.layout, PermutedLayout), learned.reason
    assert learned.layout.packing == packing
    assert torch.equal(learned.layout.positions(), positions)
    assert torch.equal(found.cache.view(torch.uint8), before.view(torch.uint8))
    check_gather(found, learned.layout)


@given(
    kv_planes=st.integers(1, 2),
    tokens=st.integers(1, 8),
    size=st.integers(1, 8),
    heads=st.integers(1, 3),
    parts=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=50, deadline=None)
def test_any_permutation_is_learned(
    kv_planes: int, tokens: int, size: int, heads: int, parts: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    count = kv_planes * tokens * size
    positions = torch.randperm(count, generator=random).view(kv_planes, tokens, size).int()
    found = packed_engine(positions, block_size=tokens * parts, heads=heads)
    before = found.cache.clone()
    learned = found.learn()
    # By chance the permutation may be no permutation at all, or one of a smaller block.
    assert learned.kind != "unknown"
    assert learned.layout is not None
    assert torch.equal(found.cache, before)
    if isinstance(learned.layout, PermutedLayout) and learned.layout.block_size == tokens:
        assert learned.layout.permutation == permutation_bytes(positions)
    check_gather(found, learned.layout)


def test_packing_without_a_name_is_named_by_its_digest() -> None:
    positions = packed_positions("vec", 32, SIZE, 2)
    assert positions is not None
    reversed_ = positions.flip(2).contiguous()
    learned = packed_engine(reversed_).learn()
    assert isinstance(learned.layout, PermutedLayout)
    assert learned.layout.packing == "pe077bd4b"
    other = packed_engine(positions.flip(1).contiguous()).learn()
    assert isinstance(other.layout, PermutedLayout)
    assert other.layout.packing[0] == "p" and len(other.layout.packing) == 9
    assert other.layout.packing != learned.layout.packing


# --------------------------------------------------------------------------- unknown


def changed(found: Engine, change: Callable[[Engine, WritePattern], WritePattern]) -> LearnedLayout:
    """Learn with another writer; whatever it does, the blocks must be as before."""
    before = found.cache.clone()
    learned = learn_layout(found.cache, found.shape, change(found, found.write))
    borrowed = [1, 2, BLOCKS - 1]
    assert torch.equal(found.cache[borrowed].float(), before[borrowed].float())
    return learned


def nothing(found: Engine, write: WritePattern) -> WritePattern:
    return lambda slots, key, value: None


def only_the_first_block(found: Engine, write: WritePattern) -> WritePattern:
    size = found.shape.block_size

    def writer(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        kept = slots // size == 1
        write(slots[kept], key[kept], None if value is None else value[kept])

    return writer


def another_place_in(
    block: int, *, at_end: bool = False
) -> Callable[[Engine, WritePattern], WritePattern]:
    """Lie in one block: its first two tokens, or its last two, are exchanged."""

    def change(found: Engine, write: WritePattern) -> WritePattern:
        size = found.shape.block_size
        first = block * size + (size - 2) * at_end

        def writer(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
            swapped = slots.clone()
            swapped[slots == first] = first + 1
            swapped[slots == first + 1] = first
            write(swapped, key, value)

        return writer

    return change


def another_element_in_the_last_block(found: Engine, write: WritePattern) -> WritePattern:
    first = (BLOCKS - 1) * found.shape.block_size

    def writer(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        key = key.clone()
        lying = slots == first + 3
        key[lying] = key[lying].flip(-1)
        write(slots, key, value)

    return writer


def a_slot_too_far_beyond_the_first_block(found: Engine, write: WritePattern) -> WritePattern:
    size = found.shape.block_size
    return lambda slots, key, value: write(
        slots + (slots // size > 1) * (slots % size < size - 1), key, value
    )


def in_order_whatever_the_slots(found: Engine, write: WritePattern) -> WritePattern:
    return lambda slots, key, value: write(slots.sort().values, key, value)


def keys_only(found: Engine, write: WritePattern) -> WritePattern:
    return lambda slots, key, value: write(slots, key, torch.zeros_like(key))


def added(found: Engine, write: WritePattern) -> WritePattern:
    """Add to what is there instead of overwriting it."""

    def writer(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        size = found.rows.shape[1]
        found.rows[slots // size, slots % size, 0] += key.to(found.rows.dtype)
        found.rows[slots // size, slots % size, 1] += value.to(found.rows.dtype)

    return writer


def rotated(found: Engine, write: WritePattern) -> WritePattern:
    """Mix the elements of a row, as a Hadamard transform does."""
    return lambda slots, key, value: write(slots, key + key.roll(1, -1), value)


def doubled(found: Engine, write: WritePattern) -> WritePattern:
    return lambda slots, key, value: write(slots, key * 2, value)


def without_sign(found: Engine, write: WritePattern) -> WritePattern:
    return lambda slots, key, value: write(slots, key.abs(), value)


def also_elsewhere(found: Engine, write: WritePattern) -> WritePattern:
    """What is written to the first block also spills into the next one."""
    size = found.shape.block_size

    def writer(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        write(slots, key, value)
        spill = slots == 2 * size - 1
        write(slots[spill] + 1, key[spill], None if value is None else value[spill])

    return writer


def in_turns(found: Engine, write: WritePattern) -> WritePattern:
    """Heads take turns with the number of the call."""
    calls = iter(range(10**6))
    return lambda slots, key, value: write(slots, key.roll(next(calls), 1), value)


@pytest.mark.parametrize("form", ["LBNHC", "vec"])
@pytest.mark.parametrize(
    "change",
    [
        nothing,
        only_the_first_block,
        another_place_in(2),
        another_place_in(BLOCKS - 1),
        another_element_in_the_last_block,
        a_slot_too_far_beyond_the_first_block,
        in_order_whatever_the_slots,
        keys_only,
        rotated,
        doubled,
        without_sign,
        also_elsewhere,
        in_turns,
    ],
)
def test_writers_that_are_not_what_they_seem_are_unknown(
    form: str, change: Callable[[Engine, WritePattern], WritePattern]
) -> None:
    if form == "vec":
        positions = packed_positions("vec", 32, SIZE, 2)
        assert positions is not None
        found = packed_engine(positions)
    else:
        found = engine(form)
    learned = changed(found, change)
    assert learned.kind == "unknown"
    assert learned.reason


def test_writer_that_adds_is_unknown() -> None:
    assert changed(engine("LBNHC"), added).kind == "unknown"


def test_heads_that_differ_are_unknown() -> None:
    found = packed_engine(torch.randperm(2 * 8 * 4).view(2, 8, 4).int())
    write = found.write

    def writer(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        key = key.clone()
        key[:, 1] = key[:, 1].roll(1, -1)
        write(slots, key, value)

    assert learn_layout(found.cache, found.shape, writer).kind == "unknown"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, "packed"),
        ({"num_blocks": 2}, "needed to learn"),
        ({"num_blocks": 3}, "expected 3 blocks"),
        ({"block_size": 32}, ""),
        ({"heads": HEADS + 1}, ""),
        ({"head_size": SIZE // 2}, ""),
    ],
)
def test_cache_that_is_not_what_it_is_said_to_be_is_unknown(
    change: dict[str, object], words: str
) -> None:
    found = engine("LBNHC")
    shape = replace(found.shape, **change)  # type: ignore[arg-type]

    def write(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        assert value is not None
        rows, columns = min(HEADS, key.shape[1]), key.shape[2]
        kept = slots < BLOCKS * 16
        slots, key, value = slots[kept], key[kept], value[kept]
        for kv, content in enumerate((key, value)):
            place = found.rows[slots // 16, slots % 16, kv]
            place[:, :rows, :columns] = content[:, :rows].to(place.dtype)
            found.rows[slots // 16, slots % 16, kv] = place

    learned = learn_layout(found.cache, shape, write)
    if learned.kind == "strided":
        # Half of each row is a cache as well, one with gaps.
        assert change == {"head_size": SIZE // 2}
    else:
        assert words in learned.reason


def test_what_the_writer_raises_is_passed_on_and_the_blocks_are_put_back() -> None:
    found = engine("LBHNC")
    before = found.cache.clone()
    calls = iter(range(10))

    def writer(slots: Tensor, key: Tensor, value: Tensor | None) -> None:
        if next(calls) == 5:
            raise RuntimeError("no such instruction")
        found.write(slots, key, value)

    with pytest.raises(RuntimeError, match="no such instruction"):
        learn_layout(found.cache, found.shape, writer)
    assert torch.equal(found.cache, before)


# --------------------------------------------------------------------------- confirming


@pytest.mark.parametrize("form", ["LBNHC", "2BNHD", "BHLNC", "MLA", "vec", "amx"])
def test_another_layer_of_the_kind_is_confirmed_with_one_write(form: str) -> None:
    def make() -> Engine:
        if form not in ("vec", "amx"):
            return engine(form)
        positions = packed_positions(form, 32, SIZE, 2)
        assert positions is not None
        return packed_engine(positions)

    layout = make().learn().layout
    assert layout is not None
    other = make()
    before = other.cache.clone()
    confirmed = confirm_layout(other.cache, other.shape, other.write, layout)
    assert confirmed.layout == layout, confirmed.reason
    assert confirmed.writes == 1
    assert torch.equal(other.cache, before)
    for at_end in (False, True):
        lying = another_place_in(2, at_end=at_end)(other, other.write)
        refused = confirm_layout(other.cache, other.shape, lying, layout)
        assert refused.kind == "unknown"
        assert torch.equal(other.cache, before)


def test_layout_of_another_shape_is_not_confirmed() -> None:
    found = engine("LBNHC")
    other = engine("LBHNC")
    assert other.expected is not None
    refused = confirm_layout(found.cache, found.shape, found.write, other.expected)
    assert refused.kind == "unknown"
