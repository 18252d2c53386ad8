"""The kernels for GPUs, run for every block and every thread on the host.

The launch plan, the kernels' body and the binding are those of the CUDA build; only the device is
made of loops. It counts what each byte of memory sees.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.errors import ConfigError
from kvshelf.kv import ops
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops import choice as choice_module
from kvshelf.kv.ops import library as library_module
from tests.native.emulation import Counts, Emulation, emulation
from tests.native.paged import Buffers, Case, cases
from tests.support.paged import FORMS, Paged, make_paged

pytestmark = pytest.mark.real

#: Alignments; there are no vectors of 2 bytes.
ALIGNMENTS = [16, 8, 4, 2, 1]


def widest(alignment: int) -> int:
    return 1 if alignment == 2 else alignment


@pytest.fixture(scope="module")
def device() -> Emulation:
    return emulation()


def rows_touched(case: Case) -> list[torch.Tensor]:
    """For each cache's memory: how often the kept slots' rows cover each byte."""
    empty = case.paged.clone()
    for memory in empty.memory:
        memory.zero_()
    ones = torch.ones(case.chunks, case.shards, case.buffer_bytes, dtype=torch.uint8)
    return replace(case, paged=empty).scattered(ones)


def kept_in_buffers(case: Case, buffers: Buffers) -> np.ndarray:
    """For each byte of the buffers' memory: whether it belongs to a token that is not skipped."""
    kept = np.array(case.slots).reshape(case.chunks, case.tokens) >= 0
    paged = case.paged
    shape = (
        *(
            case.chunks,
            case.shards,
            len(paged.caches),
            paged.layout.kv_planes,
            case.tokens,
            case.heads,
        ),
        paged.layout.row_bytes,
    )
    of_byte = np.broadcast_to(kept[:, None, None, None, :, None, None], shape)
    places = torch.arange(buffers.memory.numel()).as_strided(
        tuple(buffers.view.shape), buffers.view.stride(), buffers.view.storage_offset()
    )
    result = np.zeros(buffers.memory.numel(), dtype=np.uint8)
    result[places.numpy().reshape(-1)] = of_byte.reshape(-1)
    return result


def check_exactly_once(device: Emulation, case: Case, buffers: Buffers) -> int:
    """Gather and scatter; each byte that is to be copied is loaded and stored exactly once."""
    paged = case.paged
    arguments = (paged.layout, case.first_head, case.heads)
    mapping = case.mapping
    touched = rows_touched(case)
    kept = kept_in_buffers(case, buffers)

    def watch() -> tuple[list[Counts], Counts]:
        device.unwatch()
        of_caches = [device.watch(memory) for memory in paged.memory]
        return of_caches, device.watch(buffers.memory)

    with device.in_use():
        in_caches, in_buffers = watch()
        ops.gather_kv(paged.caches, mapping, buffers.view, *arguments)
        width = device.width
        assert device.violations == 0
        np.testing.assert_array_equal(buffers.view.numpy(), case.gathered())
        np.testing.assert_array_equal(in_buffers.stores, buffers.used)
        assert not in_buffers.loads.any()
        for counts, rows in zip(in_caches, touched, strict=True):
            np.testing.assert_array_equal(counts.loads, rows)
            assert not counts.stores.any()

        incoming = case.random_buffers()
        after = case.scattered(incoming)
        buffers.view.copy_(incoming)
        in_caches, in_buffers = watch()
        ops.scatter_kv(paged.caches, mapping, buffers.view, *arguments)
        assert device.violations == 0
        for memory, want in zip(paged.memory, after, strict=True):
            np.testing.assert_array_equal(memory, want)
        for counts, rows in zip(in_caches, touched, strict=True):
            np.testing.assert_array_equal(counts.stores, rows)
            assert not counts.loads.any()
        np.testing.assert_array_equal(in_buffers.loads, kept)
        assert not in_buffers.stores.any()
        if case.tokens:
            assert device.width == width
    return width


# --- every byte exactly once -------------------------------------------------------


@given(
    case=cases(),
    lead=st.integers(0, 33),
    gap=st.sampled_from([0, 0, 1, 2, 4, 8, 16, 5]),
    shards_outside=st.booleans(),
    blocks=st.sampled_from([0, 0, 1, 2, 3, 8]),
)
@settings(max_examples=100)
def test_every_byte_is_copied_exactly_once(
    case: Case, lead: int, gap: int, shards_outside: bool, blocks: int
) -> None:
    buffers = Buffers.of(case, lead, gap, shards_outside=shards_outside)
    with limited(blocks):
        check_exactly_once(emulation(), case, buffers)


@contextlib.contextmanager
def limited(blocks: int) -> Iterator[None]:
    """Launches have at most so many blocks."""
    emulation().limit(blocks)
    try:
        yield
    finally:
        emulation().limit(0)


@pytest.mark.parametrize(
    ("heads", "most", "blocks"),
    # 5 layers; of each 4 blocks of 16 steps of 4 tokens, as long as nothing limits them.
    [
        *((8, 0, 20), (8, 20, 20), (8, 19, 10), (8, 9, 5), (8, 3, 3), (8, 1, 1)),
        # The lanes of a token need two blocks.
        *((64, 0, 80), (64, 11, 10), (64, 7, 6), (64, 1, 2)),
    ],
)
def test_a_grid_can_be_limited(device: Emulation, heads: int, most: int, blocks: int) -> None:
    shape = {"layers": 5, "blocks": 4, "block_size": 64, "heads": heads, "head_size": 32}
    paged = make_paged("bhnc-nhd", torch.bfloat16, **shape)
    case = Case(paged, list(range(256 if heads == 8 else 128)), 1, 1, 0, heads)
    buffers = Buffers.of(case)
    with limited(most), device.in_use():
        ops.gather_kv(paged.caches, case.mapping, buffers.view, paged.layout, 0, heads)
        assert device.launches == 1
        assert device.blocks == blocks
    np.testing.assert_array_equal(buffers.view.numpy(), case.gathered())


def aligned(paged: Paged) -> bool:
    return all(memory.data_ptr() % 16 == 0 for memory in paged.memory)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", ALIGNMENTS)
@pytest.mark.parametrize("spoiled_by", ["row", "cache", "buffer", "stride"])
def test_every_width_in_every_form(
    device: Emulation, form: str, width: int, spoiled_by: str
) -> None:
    # Rows of 32 bytes in aligned memory allow the widest vectors; one thing is then misaligned.
    item, size, lead, gaps, buffer_lead, buffer_gap = 1, 32, 0, (0, 0, 0, 0, 0), 16, 0
    if spoiled_by == "row":
        size = 32 if width == 16 else 16 + width
    elif spoiled_by == "cache":
        lead = width
    elif spoiled_by == "buffer":
        buffer_lead = width
    else:
        gaps = (width, *gaps[1:]) if form == "native" else (0, 0, 0, 0, width)
        buffer_gap = width
    paged = make_paged(
        form,
        torch.uint8 if item == 1 else torch.int16,
        layers=2,
        blocks=4,
        block_size=4,
        heads=3,
        head_size=size,
        gaps=gaps,
        lead=lead,
    )
    assert aligned(paged)
    slots = [3, -1, 1, 0] if form == "native" else [14, 3, -1, 0, 1, 2, 9, 15]
    heads = paged.layout.heads
    case = Case(paged, slots, 2, heads, 0, 1)
    buffers = Buffers.of(case, buffer_lead, buffer_gap)
    assert buffers.memory.data_ptr() % 16 == 0
    expected = width
    row = paged.layout.row_bytes
    if spoiled_by == "row":
        expected = min(16, row & -row)
    elif spoiled_by == "stride" and form == "native":
        # A gap of blocks × heads × tokens × content elements.
        expected = min(width, 16)
    assert check_exactly_once(device, case, buffers) == widest(expected)


@pytest.mark.parametrize(
    ("shape", "strides", "first_head", "width"),
    [
        # [2, blocks, block_size, heads, row]; what is used once has no say in the width.
        ((2, 1, 1, 1, 32), (36, 1, 1, 1, 1), 0, 4),
        ((2, 1, 1, 1, 32), (48, 1, 1, 1, 1), 0, 16),
        ((2, 1, 1, 2, 32), (128, 1, 1, 34, 1), 1, 1),
        ((2, 1, 1, 2, 32), (128, 1, 1, 34, 1), 0, 16),
        ((2, 1, 3, 1, 32), (192, 1, 40, 1, 1), 0, 8),
        ((2, 3, 1, 1, 32), (192, 36, 1, 1, 1), 0, 4),
    ],
)
def test_strides_that_decide_the_width(
    device: Emulation,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    first_head: int,
    width: int,
) -> None:
    memory = torch.randint(1, 256, (512,), dtype=torch.uint8)
    cache = memory.as_strided(shape, strides)
    layout = PagedLayout.from_2bnhd(cache)
    paged = Paged("2bnhd", [memory], [cache], layout)
    case = Case(paged, [layout.num_slots - 1, 0][: layout.num_slots], 1, 1, first_head, 1)
    assert check_exactly_once(device, case, Buffers.of(case)) == width


@pytest.mark.parametrize("form", ["bhnc-nhd", "bhnc-hnd", "mla"])
def test_more_tokens_and_lanes_than_one_block_has(device: Emulation, form: str) -> None:
    paged = make_paged(
        form, torch.bfloat16, layers=3, blocks=9, block_size=16, heads=8, head_size=72
    )
    order = np.random.default_rng(3).permutation(paged.layout.num_slots)[:130].tolist()
    case = Case(paged, order, 2, 1, 0, paged.layout.heads)
    buffers = Buffers.of(case)
    assert check_exactly_once(device, case, buffers) == 16


@pytest.mark.parametrize("row", [257, 514, 767, 1283])
def test_lanes_that_do_not_fill_their_blocks(device: Emulation, row: int) -> None:
    memory = [torch.randint(1, 256, (12 * row,), dtype=torch.uint8) for _ in range(2)]
    caches = [part.view(3, 4, row) for part in memory]
    paged = Paged("mla", memory, caches, PagedLayout.from_mla(caches[0]))
    case = Case(paged, [7, -1, 0, 11, 5, 3], 2, 1, 0, 1)
    check_exactly_once(device, case, Buffers.of(case, lead=1))


def test_deep_models_take_several_launches(device: Emulation) -> None:
    paged = make_paged("mla", torch.uint8, layers=300, blocks=2, head_size=2)
    case = Case(paged, [5, 0, 7], 1, 1, 0, 1)
    check_exactly_once(device, case, Buffers.of(case))
    out = torch.empty(case.buffer_bytes, dtype=torch.uint8)
    with device.in_use():
        ops.gather_kv(paged.caches, torch.tensor(case.slots), out, paged.layout)
        assert device.launches == 3


@pytest.mark.parametrize(
    ("chunks", "tokens", "launches"),
    [(1, 512, 1), (1, 513, 2), (2, 256, 2), (2, 513, 4), (3, 1100, 9)],
)
def test_mappings_travel_in_the_arguments(
    device: Emulation, chunks: int, tokens: int, launches: int
) -> None:
    paged = make_paged("mla", torch.uint8, layers=2, blocks=chunks * tokens, block_size=1)
    order = np.random.default_rng(5).permutation(chunks * tokens).tolist()
    order[tokens // 2] = -1
    case = Case(paged, order, chunks, 1, 0, 1)
    check_exactly_once(device, case, Buffers.of(case, gap=3))
    mapping, buffers = case.mapping, Buffers.of(case)
    with device.in_use():
        ops.gather_kv(paged.caches, mapping, buffers.view, paged.layout)
        assert device.launches == launches


def test_one_launch_for_all_layers_and_shards(device: Emulation) -> None:
    paged = make_paged("bhnc-nhd", torch.bfloat16, layers=32, blocks=8, heads=8, head_size=16)
    case = Case(paged, list(range(32)), 1, 8, 0, 1)
    buffers = Buffers.of(case)
    with device.in_use():
        ops.gather_kv(paged.caches, case.mapping, buffers.view, paged.layout, 0, 1)
        assert device.launches == 1
    np.testing.assert_array_equal(buffers.view.numpy(), case.gathered())


# --- the arithmetic of the launch --------------------------------------------------


@given(n=st.integers(0, 2**31 - 1), divisor=st.integers(1, 2**31 - 1))
@settings(max_examples=200)
def test_division_by_multiplication(n: int, divisor: int) -> None:
    device = emulation()
    for value in (n, min(n // divisor * divisor, 2**31 - 1), 2**31 - 1, divisor - 1):
        assert device.divide(value, divisor) == value // divisor


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 16, 96, 641, 2**16 + 1, 2**30, 2**31 - 1])
def test_division_at_the_edges(device: Emulation, divisor: int) -> None:
    for multiple in range(0, 2**31, max(divisor, 2**31 // 200)):
        near = multiple // divisor * divisor
        for value in (near - 1, near, near + 1):
            if 0 <= value < 2**31:
                assert device.divide(value, divisor) == value // divisor


@pytest.mark.parametrize(
    "counts",
    [
        {"num_blocks": 2**31, "block_size": 1},
        {"row_bytes": 2**36},
    ],
    ids=str,
)
def test_what_31_bits_cannot_count_is_left_to_torch(
    device: Emulation, counts: dict[str, int]
) -> None:
    index = {
        "num_blocks": 4,
        "block_size": 4,
        "block_stride": 64,
        "token_stride": 16,
        "kv_stride": 0,
        "head_stride": 0,
        "first_head": 0,
        "layers": 1,
        "tokens": 1,
        "shards": 1,
        "heads": 1,
        "kv_planes": 1,
        "row_bytes": 16,
        "shard_stride": 0,
    } | counts
    functions = device.library.device
    assert functions is not None
    fields = torch.tensor(list(index.values()), dtype=torch.int64)
    caches = torch.zeros(1, dtype=torch.int64)
    anchor = torch.empty(0, dtype=torch.uint8)
    # No address is good: nothing may be touched.
    slots = torch.zeros(1, dtype=torch.int64)
    for operate in (functions.gather, functions.scatter):
        arguments = (anchor, fields.data_ptr(), caches.data_ptr(), slots.data_ptr(), 0)
        assert operate(*arguments) == -1

    paged = make_paged("mla", torch.float32)
    case = Case(paged, [3, 1], 1, 1, 0, 1)
    out = torch.empty(case.buffer_bytes, dtype=torch.uint8)
    refuses = mock.Mock(return_value=-1)
    library = replace(device.library, device=replace(functions, gather=refuses))
    with device.in_use(), mock.patch.object(library_module, "_load_kernels", return_value=library):
        ops.gather_kv(paged.caches, torch.tensor(case.slots), out, paged.layout)
    refuses.assert_called_once()
    np.testing.assert_array_equal(out.numpy(), case.gathered().reshape(-1))


# --- which implementation ----------------------------------------------------------


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("KVSHELF_OPS", raising=False)
    for remembered in (library_module.compiled_library, library_module._load_kernels):
        remembered.cache_clear()
    library_module._kernel_problems.clear()
    monkeypatch.setattr(choice_module, "triton_copy", lambda device: None)
    yield monkeypatch
    monkeypatch.undo()
    for remembered in (library_module.compiled_library, library_module._load_kernels):
        remembered.cache_clear()
    library_module._kernel_problems.clear()


def test_kernels_are_used_where_they_are(
    device: Emulation, fresh_choice: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_choice.setattr(library_module, "compiled_library", lambda: device.library)
    with caplog.at_level(logging.INFO, logger="kvshelf.kv.ops"):
        for _ in range(3):
            assert ops.implementation("cuda:0") == "cuda"
            assert ops.kernel_problem("cuda:0") is None
    assert ops.kernel_build() == ops.KernelBuild("0.0", "emulation")
    (line,) = caplog.messages
    assert "on cuda:0: cuda" in line and "emulation" in line


def test_why_kernels_are_not_used_is_said_once(
    device: Emulation, fresh_choice: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_choice.setattr(library_module, "compiled_library", lambda: device.library)
    with caplog.at_level(logging.INFO, logger="kvshelf.kv.ops"):
        for _ in range(3):
            assert ops.implementation("cuda:1") == "torch"
    assert ops.kernel_problem("cuda:1") == "there is no such device"
    (line,) = caplog.messages
    assert "cannot be used on cuda:1: there is no such device" in line


def test_a_library_without_kernels(device: Emulation, fresh_choice: pytest.MonkeyPatch) -> None:
    library = replace(device.library, device=None)
    fresh_choice.setattr(library_module, "compiled_library", lambda: library)
    assert ops.implementation("cuda:0") == "torch"
    assert ops.kernel_build() is None
    assert "without a CUDA compiler" in str(ops.kernel_problem("cuda:0"))


def test_asking_for_kernels_that_are_not_there_is_an_error(
    device: Emulation, fresh_choice: pytest.MonkeyPatch
) -> None:
    fresh_choice.setenv("KVSHELF_OPS", "cuda")
    fresh_choice.setattr(library_module, "compiled_library", lambda: device.library)
    assert ops.implementation("cuda:0") == "cuda"
    with pytest.raises(ConfigError, match=r"cannot be used on cuda:1: there is no such device"):
        ops.implementation("cuda:1")
    assert ops.implementation("cpu") == "cpp"


def test_an_error_of_the_device_is_reported_in_its_words(device: Emulation) -> None:
    paged = make_paged("mla", torch.float32)
    functions = device.library.device
    assert functions is not None
    failing = mock.Mock(side_effect=RuntimeError("CUDA error: an illegal memory access"))
    library = replace(device.library, device=replace(functions, gather=failing))
    out = torch.empty(2 * paged.layout.chunk_bytes(1), dtype=torch.uint8)
    with (
        device.in_use(),
        mock.patch.object(library_module, "_load_kernels", return_value=library),
        pytest.raises(RuntimeError, match="illegal memory access"),
    ):
        ops.gather_kv(paged.caches, torch.tensor([1]), out, paged.layout)


def test_prepare_checks_caches_before_the_first_call(device: Emulation) -> None:
    paged = make_paged("mla", torch.float32)
    with device.in_use():
        ops.prepare(paged.caches, paged.layout)
        with pytest.raises(ValueError, match="the layout reaches"):
            ops.prepare([cache[:1] for cache in paged.caches], paged.layout)
    ops.prepare(paged.caches, paged.layout)
