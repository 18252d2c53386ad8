"""Gather and scatter, compiled and plain torch, against plain indexing of numpy bytes."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kvshelf import ops
from kvshelf.errors import ConfigError
from kvshelf.layout import PagedLayout, native_slots_of, slots_of

Bytes = NDArray[np.uint8]

COMPILED = ops.implementation() == "cpp"
IMPLEMENTATIONS = ["cpp", "torch"] if COMPILED else ["torch"]
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
FORMS = ["bhnc-hnd", "bhnc-nhd", "2bnhd", "b2nhd", "mla", "native"]


@contextlib.contextmanager
def using(implementation: str) -> Iterator[None]:
    if implementation == "cpp":
        yield
    else:
        with mock.patch.object(ops, "_library", return_value=None):
            yield


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


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
            (len(self.caches), layout.kvs, len(slots), heads, layout.row_bytes), dtype=np.uint8
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
        rows = chunk.reshape(len(self.caches), layout.kvs, len(slots), heads, layout.row_bytes)
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


@st.composite
def pages_and_slots(draw: st.DrawFn) -> tuple[Paged, list[int], int, int]:
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
    count_heads = draw(st.integers(1, paged.layout.heads - first))
    return paged, slots, first, count_heads


@given(case=pages_and_slots(), lead=st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_gather_and_scatter_are_plain_indexing(
    case: tuple[Paged, list[int], int, int], lead: int
) -> None:
    paged, slots, first, heads = case
    expected = paged.gathered(slots, first, heads).reshape(-1)
    mapping = torch.tensor(slots, dtype=torch.int64)
    incoming = np.random.default_rng(1).integers(0, 256, expected.size, dtype=np.uint8)
    after = paged.scatter_into_copy(slots, incoming, first, heads)
    original = [memory.copy() for memory in paged.memory]
    for name in IMPLEMENTATIONS:
        with using(name):
            buffer = torch.full((lead + expected.size + 3,), 0xAB, dtype=torch.uint8)
            out = buffer[lead : lead + expected.size]
            ops.gather_kv(paged.caches, mapping, out, paged.layout, first, heads)
            np.testing.assert_array_equal(out.numpy(), expected)
            assert (buffer[:lead] == 0xAB).all()
            assert (buffer[lead + expected.size :] == 0xAB).all()

            out.copy_(torch.from_numpy(incoming))
            ops.scatter_kv(paged.caches, mapping, out, paged.layout, first, heads)
            for memory, want, old in zip(paged.memory, after, original, strict=True):
                np.testing.assert_array_equal(memory, want)
                memory[...] = old


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_form_and_dtype(form: str, dtype: torch.dtype, implementation: str) -> None:
    source = make_paged(form, dtype, blocks=5, seed=1)
    target = make_paged(form, dtype, blocks=5, seed=2)
    order = [3, 0, 4]
    slots = torch.tensor(order) if form == "native" else slots_of(order, 4, 1, 10)
    chunk = torch.empty(2 * source.layout.chunk_bytes(len(slots)), dtype=torch.uint8)
    ops.gather_kv(source.caches, slots, chunk, source.layout)
    ops.scatter_kv(target.caches, slots, chunk, target.layout)
    heads = source.layout.heads
    np.testing.assert_array_equal(
        target.gathered(slots.tolist(), 0, heads), source.gathered(slots.tolist(), 0, heads)
    )


def test_shards_put_together_are_the_whole(implementation: str) -> None:
    paged = make_paged("bhnc-nhd", torch.bfloat16, heads=4)
    slots = slots_of([2, 0], 4, 0, 8)
    shape = (2, 2, 8, 4, -1)
    whole = torch.empty(2 * paged.layout.chunk_bytes(8), dtype=torch.uint8)
    ops.gather_kv(paged.caches, slots, whole, paged.layout)
    for first in (0, 2):
        shard = torch.empty(2 * paged.layout.chunk_bytes(8, 2), dtype=torch.uint8)
        ops.gather_kv(paged.caches, slots, shard, paged.layout, first, 2)
        assert torch.equal(
            shard.view(2, 2, 8, 2, -1), whole.view(shape)[:, :, :, first : first + 2]
        )
    rest = torch.empty(2 * paged.layout.chunk_bytes(8, 1), dtype=torch.uint8)
    ops.gather_kv(paged.caches, slots, rest, paged.layout, first_head=3)
    assert torch.equal(rest.view(2, 2, 8, 1, -1), whole.view(shape)[:, :, :, 3:])


def test_layers_in_one_allocation(implementation: str) -> None:
    backing = torch.arange(3 * 5 * 2 * 4 * 8, dtype=torch.float32).view(3, 5, 2, 4, 8)
    caches = list(backing)
    layout = PagedLayout.from_bhnc(caches[0], 4)
    chunk = torch.empty(3 * layout.chunk_bytes(1), dtype=torch.uint8)
    ops.gather_kv(caches, torch.tensor([6]), chunk, layout)
    got = chunk.view(torch.float32).view(3, 2, 2, 4)
    assert torch.equal(got[:, 0], backing[:, 1, :, 2, :4])
    assert torch.equal(got[:, 1], backing[:, 1, :, 2, 4:])
    block_outermost = backing.transpose(0, 1).contiguous().transpose(0, 1)
    caches = list(block_outermost)
    again = torch.empty_like(chunk)
    ops.gather_kv(caches, torch.tensor([6]), again, PagedLayout.from_bhnc(caches[0], 4))
    assert torch.equal(again, chunk)


def test_copies_longer_than_one_piece(implementation: str) -> None:
    # One run of 1.25 MB for each layer and kv, and one that is interrupted.
    caches = [torch.randn(2, 40, 16, 4, 128) for _ in range(2)]
    layout = PagedLayout.from_2bnhd(caches[0])
    for slots in (torch.arange(3, 620), torch.cat([torch.arange(9, 600), torch.arange(3, 9)])):
        chunk = torch.empty(2 * layout.chunk_bytes(len(slots)), dtype=torch.uint8)
        ops.gather_kv(caches, slots, chunk, layout)
        got = chunk.view(torch.float32).view(2, 2, len(slots), 4, 128)
        for layer, cache in enumerate(caches):
            assert torch.equal(got[layer], cache.view(2, -1, 4, 128)[:, slots])
        empty = [torch.zeros_like(cache) for cache in caches]
        ops.scatter_kv(empty, slots, chunk, layout)
        again = torch.empty_like(chunk)
        ops.gather_kv(empty, slots, again, layout)
        assert torch.equal(again, chunk)


def test_no_tokens(implementation: str) -> None:
    paged = make_paged("2bnhd", torch.bfloat16)
    nothing = torch.empty(0, dtype=torch.int64)
    before = [memory.copy() for memory in paged.memory]
    ops.gather_kv(paged.caches, nothing, torch.empty(0, dtype=torch.uint8), paged.layout)
    ops.scatter_kv(paged.caches, nothing, torch.empty(0, dtype=torch.uint8), paged.layout)
    for memory, old in zip(paged.memory, before, strict=True):
        np.testing.assert_array_equal(memory, old)


def test_all_tokens_skipped_even_without_blocks(implementation: str) -> None:
    cache = torch.empty(0, 4, 8)
    layout = PagedLayout.from_mla(cache)
    out = torch.full((2 * layout.row_bytes,), 9, dtype=torch.uint8)
    ops.scatter_kv([cache], torch.tensor([-1, -1]), out, layout)
    ops.gather_kv([cache], torch.tensor([-1, -1]), out, layout)
    assert not out.any()
    with pytest.raises(ValueError, match="0 blocks"):
        ops.gather_kv([cache], torch.tensor([-1, 0]), out, layout)


def test_a_slot_given_twice_gets_a_row_of_one_of_its_tokens(implementation: str) -> None:
    paged = make_paged("mla", torch.uint8, layers=1)
    slots = [1, 5, 1]
    size = paged.layout.row_bytes
    chunk = torch.cat([torch.full((size,), n, dtype=torch.uint8) for n in (1, 2, 3)])
    untouched = [s for s in range(paged.layout.num_slots) if s not in slots]
    before = paged.gathered(untouched, 0, 1)
    ops.scatter_kv(paged.caches, torch.tensor(slots), chunk, paged.layout)
    assert set(paged.row(0, 1, 0, 0).ravel().tolist()) <= {1, 3}
    np.testing.assert_array_equal(paged.gathered(untouched, 0, 1), before)


def test_caches_of_an_engine_in_inference_mode_from_a_thread_that_is_not(
    implementation: str,
) -> None:
    with torch.inference_mode():
        caches = [torch.randn(4, 2, 8, 16) for _ in range(2)]
        targets = [torch.zeros_like(cache) for cache in caches]
    parameter = [torch.zeros(4, 2, 8, 16, requires_grad=True) for _ in range(2)]
    layout = PagedLayout.from_bhnc(caches[0], 8)
    slots = torch.arange(32)
    chunk = torch.empty(2 * layout.chunk_bytes(32), dtype=torch.uint8)
    ops.gather_kv(caches, slots, chunk, layout)
    ops.scatter_kv(targets, slots, chunk, layout)
    ops.scatter_kv(parameter, slots, chunk, layout)
    for cache, target, leaf in zip(caches, targets, parameter, strict=True):
        assert torch.equal(cache, target)
        assert torch.equal(cache, leaf.detach())


# --- refusals ----------------------------------------------------------------------


def _calls() -> list[tuple[str, dict[str, object], str]]:
    """Name, changed arguments of a good call, and what the message says."""
    good = make_paged("bhnc-hnd", torch.bfloat16)
    size = 2 * good.layout.chunk_bytes(3)
    bytes_ = torch.zeros(size, dtype=torch.uint8)
    return [
        ("slot too large", {"slots": torch.tensor([0, 12, 1])}, r"slot_mapping\[1\] is 12.*0 … 11"),
        ("slot below -1", {"slots": torch.tensor([0, 1, -2])}, r"slot_mapping\[2\] is -2"),
        ("slot huge", {"slots": torch.tensor([2**63 - 1, 0, 1])}, r"slot_mapping\[0\]"),
        ("slot tiny", {"slots": torch.tensor([-(2**63), 0, 1])}, r"slot_mapping\[0\]"),
        ("slots int32", {"slots": torch.tensor([0, 1, 2], dtype=torch.int32)}, "int32"),
        ("slots 2-D", {"slots": torch.tensor([[0, 1, 2]])}, "one-dimensional int64 CPU"),
        ("slots strided", {"slots": torch.arange(6)[::2]}, "stride 2.*contiguous"),
        ("chunk short", {"chunk": bytes_[:-1]}, f"has {size - 1} bytes; expected {size} = 2 lay"),
        ("chunk long", {"chunk": torch.zeros(size + 1, dtype=torch.uint8)}, f"expected {size}"),
        ("chunk int8", {"chunk": bytes_.view(torch.int8)}, "int8.*uint8"),
        ("chunk 2-D", {"chunk": bytes_.view(2, -1)}, "one-dimensional uint8"),
        ("chunk strided", {"chunk": torch.zeros(2 * size, dtype=torch.uint8)[::2]}, "contiguous"),
        ("no caches", {"caches": []}, "caches is empty"),
        ("head below 0", {"first_head": -1, "num_heads": 1}, "1 heads from head -1"),
        ("too many heads", {"first_head": 1, "num_heads": 2}, "heads 0 … 1"),
        ("no heads", {"first_head": 0, "num_heads": 0}, "at least one"),
        ("other dtype", {"second": good.caches[1].view(torch.float16)}, r"caches\[1\] is torch.fl"),
        ("other shape", {"second": good.caches[1][:-1]}, "layers of one kind"),
        ("other strides", {"second": good.caches[1].mT.contiguous().mT}, "layers of one kind"),
        ("other layout", {"layout": make_paged("mla", torch.float32, blocks=60).layout}, "reaches"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"), [call[1:] for call in _calls()], ids=[call[0] for call in _calls()]
)
@pytest.mark.parametrize("operation", [ops.gather_kv, ops.scatter_kv])
def test_nothing_is_touched_by_a_refused_call(
    operation: Callable[..., None],
    changes: dict[str, object],
    message: str,
    implementation: str,
) -> None:
    paged = make_paged("bhnc-hnd", torch.bfloat16)
    chunk = torch.full((2 * paged.layout.chunk_bytes(3),), 7, dtype=torch.uint8)
    arguments = {
        "caches": list(paged.caches),
        "slots": torch.tensor([0, 1, 2]),
        "chunk": chunk,
        "layout": paged.layout,
        "first_head": 0,
        "num_heads": None,
    } | changes
    second = arguments.pop("second", None)
    if second is not None:
        arguments["caches"] = [paged.caches[0], second]
    given_chunk = arguments["chunk"]
    assert isinstance(given_chunk, Tensor)
    buffer = given_chunk.clone()
    before = [memory.copy() for memory in paged.memory]
    with pytest.raises(ValueError, match=message):
        operation(*arguments.values())
    for memory, old in zip(paged.memory, before, strict=True):
        np.testing.assert_array_equal(memory, old)
    assert torch.equal(given_chunk, buffer)


@pytest.mark.parametrize("left", [0, 64])
def test_memory_given_back_after_an_earlier_call_is_noticed(left: int, implementation: str) -> None:
    caches = [torch.zeros(8, 4, 8) for _ in range(2)]
    layout = PagedLayout.from_mla(caches[0])
    chunk = torch.ones(2 * layout.chunk_bytes(1), dtype=torch.uint8)
    slots = torch.tensor([31])
    ops.scatter_kv(caches, slots, chunk, layout)
    assert torch.equal(caches[1].view(-1, 8)[31].view(torch.uint8), chunk[:32])
    caches[1].untyped_storage().resize_(left)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"caches\[1\] reaches .* given back"):
            ops.scatter_kv(caches, slots, chunk, layout)


def test_new_caches_are_checked_though_old_ones_of_the_same_kind_were(implementation: str) -> None:
    chunk = torch.zeros(128, dtype=torch.uint8)
    layout = PagedLayout.from_mla(torch.empty(64, 4, 32))
    for _ in range(50):
        large = torch.zeros(64, 4, 32)
        ops.scatter_kv([large], torch.tensor([255]), chunk, layout)
        del large
        small = torch.zeros(1, 4, 32)  # Python likes to give it the id of the one before
        with pytest.raises(ValueError, match="the layout reaches"):
            ops.scatter_kv([small], torch.tensor([255]), chunk, layout)
        del small


def test_caches_are_not_kept_alive(implementation: str) -> None:
    freed = threading.Event()
    memory = np.zeros((8, 4, 8), dtype=np.float32)
    holder = memory[...]
    weakref.finalize(holder, freed.set)
    cache = torch.from_numpy(holder)
    del holder
    layout = PagedLayout.from_mla(cache)
    ops.gather_kv([cache], torch.tensor([1]), torch.empty(32, dtype=torch.uint8), layout)
    del cache
    gc.collect()
    assert freed.is_set()


def test_the_slot_mapping_may_lie_in_the_cache_that_is_written(implementation: str) -> None:
    # Slots are read once, before anything is written: what was checked is what is used.
    if implementation == "torch":
        pytest.skip("torch checks each index as it uses it")
    memory = torch.zeros(64, dtype=torch.int64)
    memory[:3] = torch.tensor([2, 0, 1])
    cache = memory.view(8, 1, 8)
    layout = PagedLayout.from_mla(cache)
    chunk = torch.full((3 * 64,), 0x7F, dtype=torch.uint8)
    ops.scatter_kv([cache], memory[:3], chunk, layout)
    assert (memory[:24].view(torch.uint8) == 0x7F).all()
    assert not memory[24:].any()


# --- as torch operators ------------------------------------------------------------


@pytest.mark.parametrize("form", ["bhnc-nhd", "2bnhd", "native"])
def test_opcheck(form: str, implementation: str) -> None:
    paged = make_paged(form, torch.bfloat16)
    slots = torch.tensor([2, -1, 0])
    chunk = torch.zeros(2 * paged.layout.chunk_bytes(3, 1), dtype=torch.uint8)
    arguments = (paged.caches, slots, chunk, paged.layout.as_ints(), 1, 1)
    for name in ("gather_kv", "scatter_kv"):
        results = torch.library.opcheck(getattr(torch.ops.kvshelf, name).default, arguments)
        assert set(results.values()) == {"SUCCESS"}


def test_compiled_as_one_graph(implementation: str) -> None:
    paged = make_paged("bhnc-nhd", torch.float32)
    layout = paged.layout

    def move(
        caches: list[Tensor], slots: Tensor, back: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        ops.gather_kv(caches, slots, out, layout, 1, 1)
        total = out.sum()
        ops.scatter_kv(caches, back, out, layout, 0, 1)
        return total, caches[0] * 2

    slots, back = torch.tensor([2, -1, 0, 7]), torch.tensor([5, 6, -1, 1])
    plain = make_paged("bhnc-nhd", torch.float32)
    out = torch.zeros(2 * layout.chunk_bytes(4, 1), dtype=torch.uint8)
    plain_out = torch.zeros_like(out)
    expected = move(plain.caches, slots, back, plain_out)
    compiled = torch.compile(move, fullgraph=True, backend="aot_eager")
    got = compiled(paged.caches, slots, back, out)
    assert torch.equal(out, plain_out)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1].view(torch.uint8), expected[1].view(torch.uint8))
    for memory, want in zip(paged.memory, plain.memory, strict=True):
        np.testing.assert_array_equal(memory, want)
    torch.compiler.reset()


# --- which implementation ----------------------------------------------------------


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("KVSHELF_OPS", raising=False)
    ops._library.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    ops._library.cache_clear()


def _copies() -> bool:
    paged = make_paged("b2nhd", torch.bfloat16)
    slots = [1, -1, 7]
    out = torch.empty(2 * paged.layout.chunk_bytes(3), dtype=torch.uint8)
    ops.gather_kv(paged.caches, torch.tensor(slots), out, paged.layout)
    return bool((out.numpy() == paged.gathered(slots, 0, 2).reshape(-1)).all())


def test_without_the_library_plain_torch_is_used_silently(
    fresh_choice: pytest.MonkeyPatch,
) -> None:
    fresh_choice.setattr(ops, "_library_paths", list)
    assert ops.implementation() == "torch"
    assert _copies()


def test_plain_torch_on_request(fresh_choice: pytest.MonkeyPatch) -> None:
    fresh_choice.setenv("KVSHELF_OPS", "torch")
    assert ops.implementation() == "torch"
    assert _copies()


def test_a_library_that_does_not_load_warns_once_and_is_not_used(
    fresh_choice: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libkvshelf_ops.so"
    broken.write_bytes(b"not a library")
    fresh_choice.setattr(ops, "_library_paths", lambda: [broken])
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert ops.implementation() == "torch"
    assert ops.implementation() == "torch"  # a second warning would be an error
    assert _copies()


def test_a_library_of_another_version_is_not_used(fresh_choice: pytest.MonkeyPatch) -> None:
    if not COMPILED:
        pytest.skip("the compiled library is not installed")
    fresh_choice.setattr(ops, "_LIBRARY_VERSION", 0)
    with pytest.warns(RuntimeWarning, match="expected 0"):
        assert ops.implementation() == "torch"


def test_asking_for_a_library_that_is_not_there_is_an_error(
    fresh_choice: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_choice.setenv("KVSHELF_OPS", "cpp")
    fresh_choice.setattr(ops, "_library_paths", list)
    with pytest.raises(ConfigError, match=r"not installed.*reinstall"):
        ops.implementation()
    broken = tmp_path / "libkvshelf_ops.so"
    broken.write_bytes(b"not a library")
    fresh_choice.setattr(ops, "_library_paths", lambda: [broken])
    with pytest.raises(ConfigError, match=r"cannot be used.*reinstall"):
        ops.implementation()


def test_an_unknown_choice_is_an_error(fresh_choice: pytest.MonkeyPatch) -> None:
    fresh_choice.setenv("KVSHELF_OPS", "fast")
    with pytest.raises(ConfigError, match="'fast'; expected auto, cpp or torch"):
        ops.implementation()


def test_importing_loads_neither_the_library_nor_cuda() -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import kvshelf.ops, sys, torch\n"
            "assert 'tvm_ffi' not in sys.modules\n"
            "assert not torch.cuda.is_initialized()\n",
        ],
        check=True,
    )


@pytest.mark.skipif(not COMPILED, reason="the compiled library is not installed")
def test_other_threads_run_while_bytes_are_copied() -> None:
    # With so long a switch interval no thread gets the GIL unless it is given away.
    cache = torch.zeros(16, 16, 1024)
    layout = PagedLayout.from_mla(cache)
    slots = torch.arange(256)
    caches = [cache] * 64
    out = torch.zeros(64 * layout.chunk_bytes(256), dtype=torch.uint8)
    started = threading.Event()
    span: list[int] = []

    def copy() -> None:
        started.set()
        span.append(time.perf_counter_ns())
        ops.gather_kv(caches, slots, out, layout)
        span.append(time.perf_counter_ns())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(30)
    try:
        for _ in range(20):
            span.clear()
            started.clear()
            thread = threading.Thread(target=copy)
            thread.start()
            started.wait()
            tick = time.perf_counter_ns()
            thread.join()
            if span[0] < tick < span[1]:
                return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("this thread did not run during any of 20 copies")
