"""Gather and scatter, by each implementation, against indexing by the names of dimensions."""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvshelf.errors import ConfigError
from kvshelf.kv import ops
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.ops import library as library_module
from kvshelf.kv.ops import torch_copy as torch_copy_module
from tests.kv.implementations import COMPILED, IMPLEMENTATIONS, using
from tests.support.paged import make_paged
from tests.support.paged_cases import Buffers, Case, cases


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


@given(
    case=cases(),
    lead=st.integers(0, 9),
    gap=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_gather_and_scatter_are_plain_indexing(case: Case, lead: int, gap: int) -> None:
    paged = case.paged
    expected = case.gathered()
    incoming = case.random_buffers()
    after = case.scattered(incoming)
    original = [memory.clone() for memory in paged.memory]
    for name in IMPLEMENTATIONS:
        with using(name):
            buffers = Buffers.of(case, lead, gap)
            arguments = (paged.layout, case.first_head, case.heads)
            ops.gather_kv(paged.caches, case.mapping, buffers.view, *arguments)
            np.testing.assert_array_equal(buffers.view.numpy(), expected)
            assert (buffers.memory.numpy()[~buffers.used] == 0xAB).all()

            buffers.view.copy_(incoming)
            ops.scatter_kv(paged.caches, case.mapping, buffers.view, *arguments)
            for memory, want, old in zip(paged.memory, after, original, strict=True):
                np.testing.assert_array_equal(memory, want)
                memory[...] = old


def test_without_their_number_all_heads_from_the_first_on_are_copied(implementation: str) -> None:
    paged = make_paged("bhnc-nhd", torch.bfloat16, heads=4)
    for first in (0, 1, 3):
        case = Case(paged, list(range(8)), 1, first, 4 - first)
        out = torch.empty(case.buffer_bytes, dtype=torch.uint8)
        ops.gather_kv(paged.caches, case.mapping, out, paged.layout, first)
        assert torch.equal(out, case.gathered().view(-1))


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


def test_all_tokens_skipped_even_without_blocks(implementation: str) -> None:
    cache = torch.empty(0, 4, 8)
    layout = PagedLayout.from_mla(cache)
    out = torch.full((2 * layout.row_bytes,), 9, dtype=torch.uint8)
    ops.scatter_kv([cache], torch.tensor([-1, -1]), out, layout)
    ops.gather_kv([cache], torch.tensor([-1, -1]), out, layout)
    assert not out.any()
    with pytest.raises(ValueError, match="0 blocks"):
        ops.gather_kv([cache], torch.tensor([-1, 0]), out, layout)


def test_slot_given_twice_gets_a_row_of_one_of_its_tokens(implementation: str) -> None:
    paged = make_paged("mla", torch.uint8, layers=1)
    slots = [1, 5, 1]
    size = paged.layout.row_bytes
    chunk = torch.cat([torch.full((size,), n, dtype=torch.uint8) for n in (1, 2, 3)])
    untouched = torch.tensor([[s for s in range(paged.layout.num_slots) if s not in slots]])
    before = paged.gathered(untouched, 0, 1)
    ops.scatter_kv(paged.caches, torch.tensor(slots), chunk, paged.layout)
    assert set(paged.gathered(torch.tensor([[1]]), 0, 1).view(-1).tolist()) <= {1, 3}
    assert torch.equal(paged.gathered(untouched, 0, 1), before)


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


def test_plain_torch_sends_slots_to_a_gpu_without_waiting_and_once_for_all_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[torch.device, bool, bool]] = []
    pinned: set[int] = set()

    def pin(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        pinned.add(id(copy))
        return copy

    def to(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        sent.append((device, non_blocking, id(tensor) in pinned))
        return tensor

    gpu, send = torch.device("cuda"), torch_copy_module.sent
    paged = make_paged("bhnc-nhd", torch.bfloat16, heads=4)
    slots = torch.tensor([0, 7, -1])
    shards = torch.empty(4, 2 * paged.layout.chunk_bytes(3, 1), dtype=torch.uint8)
    with using("torch"), monkeypatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", pin)
        patch.setattr(Tensor, "to", to)
        patch.setattr(torch_copy_module, "sent", lambda tensor, _: send(tensor, gpu))
        ops.gather_kv(paged.caches, slots, shards, paged.layout, 0, 1)
    # They, and which tokens are skipped.
    assert sent == [(gpu, True, True)] * 2
    expected = Case(paged, slots.tolist(), 4, 0, 1).gathered()
    np.testing.assert_array_equal(shards.numpy(), expected)


@pytest.mark.parametrize("copy", [ops.gather_kv, ops.scatter_kv])
def test_plain_torch_sends_slots_once_where_layers_lie_apart(
    copy: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Tensor] = []
    monkeypatch.setattr(torch_copy_module, "sent", lambda tensor, _: sent.append(tensor) or tensor)
    paged = make_paged("bhnc-nhd", torch.bfloat16, layers=3, heads=8)
    nbytes = paged.layout.chunk_bytes(4)
    buffer = torch.zeros(4 * nbytes, dtype=torch.uint8)
    starts = [0, 3 * nbytes, nbytes]
    with using("torch"):
        copy(paged.caches, torch.tensor([5, -1, 7, 0]), buffer, paged.layout, 0, 8, starts)
    # They, and which tokens are skipped.
    assert len(sent) == 2
    if copy is ops.gather_kv:
        expected = Case(paged, [5, -1, 7, 0], 1, 0, 8).gathered()[0].reshape(3, -1)
        for start, layer in zip(starts, expected, strict=True):
            np.testing.assert_array_equal(buffer[start : start + nbytes].numpy(), layer)


@pytest.mark.parametrize("operation", ["index_select", "index_copy_"])
def test_plain_torch_copies_all_heads_at_once(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each of these is a launch on the stream of the engine."""
    calls = []
    owner = torch if operation == "index_select" else Tensor
    work = getattr(owner, operation)

    def counted(*arguments: object, **options: object) -> object:
        calls.append(operation)
        return work(*arguments, **options)

    paged = make_paged("bhnc-nhd", torch.bfloat16, layers=3, heads=8)
    slots = torch.tensor([5, 6, 7, 0])
    shards = torch.empty(8, 3 * paged.layout.chunk_bytes(4, 1), dtype=torch.uint8)
    copy = ops.gather_kv if operation == "index_select" else ops.scatter_kv
    with using("torch"), monkeypatch.context() as patch:
        patch.setattr(owner, operation, counted)
        copy(paged.caches, slots, shards, paged.layout)
    assert len(calls) == 3 * 2  # layers × K and V, not × shards
    expected = Case(paged, slots.tolist(), 8, 0, 1).gathered()
    np.testing.assert_array_equal(shards.numpy(), expected)


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
        ("slot 2**32", {"slots": torch.tensor([0, 2**32 + 1, 1])}, r"slot_mapping\[1\]"),
        ("slot tiny", {"slots": torch.tensor([-(2**63), 0, 1])}, r"slot_mapping\[0\]"),
        ("slots int32", {"slots": torch.tensor([0, 1, 2], dtype=torch.int32)}, "int32"),
        ("slots 2-D", {"slots": torch.tensor([[0, 1, 2]])}, r"int64 CPU tensor \[tokens\]"),
        ("slots strided", {"slots": torch.arange(6)[::2]}, r"strides \[2\].*contiguous"),
        ("chunk short", {"chunk": bytes_[:-1]}, f"has {size - 1} bytes; expected {size} = 2 lay"),
        ("chunk long", {"chunk": torch.zeros(size + 1, dtype=torch.uint8)}, f"expected {size}"),
        ("chunk int8", {"chunk": bytes_.view(torch.int8)}, "int8.*uint8"),
        ("chunk 0-D", {"chunk": torch.tensor(3, dtype=torch.uint8)}, r"uint8 tensor \[bytes\]"),
        ("chunk 3-D", {"chunk": bytes_.view(1, 1, -1)}, r"uint8 tensor \[bytes\]"),
        ("too many shards", {"chunk": bytes_.view(3, -1), "num_heads": 1}, "3 shards of 1 he"),
        ("two heads, four shards", {"chunk": bytes_.view(4, -1)}, "4 shards, which do not div"),
        (
            "buffers overlap",
            {"chunk": bytes_.as_strided((2, size // 2), (0, 1)), "num_heads": 1},
            "overlap",
        ),
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


@pytest.mark.parametrize("operation", [ops.gather_kv, ops.scatter_kv])
def test_nothing_is_touched_by_a_refused_call(
    operation: Callable[..., None], implementation: str
) -> None:
    for name, changes, message in _calls():
        paged = make_paged("bhnc-hnd", torch.bfloat16)
        arguments = {
            "caches": list(paged.caches),
            "slots": torch.tensor([0, 1, 2]),
            "chunk": torch.full((2 * paged.layout.chunk_bytes(3),), 7, dtype=torch.uint8),
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
        before = [memory.clone() for memory in paged.memory]
        with pytest.raises(ValueError, match=message):
            operation(*arguments.values())
        for memory, old in zip(paged.memory, before, strict=True):
            np.testing.assert_array_equal(memory, old, err_msg=name)
        assert torch.equal(given_chunk, buffer), name


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
        with pytest.raises(ValueError, match=r"caches\[1\] reaches .* released"):
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


def test_slot_mapping_may_lie_in_the_cache_that_is_written(implementation: str) -> None:
    # Slots are read once, before anything is written: what was checked is what is used.
    if implementation != "cpp":
        pytest.skip("only promised by the compiled functions for CPUs")
    memory = torch.zeros(64, dtype=torch.int64)
    memory[:3] = torch.tensor([2, 0, 1])
    cache = memory.view(8, 1, 8)
    layout = PagedLayout.from_mla(cache)
    chunk = torch.full((3 * 64,), 0x7F, dtype=torch.uint8)
    ops.scatter_kv([cache], memory[:3], chunk, layout)
    assert (memory[:24].view(torch.uint8) == 0x7F).all()
    assert not memory[24:].any()


# --- slots that are not in the cache -----------------------------------------------


@pytest.mark.parametrize("bad", [12, -2, 2**63 - 1])
def test_slots_can_be_checked_beforehand(bad: int, implementation: str) -> None:
    layout = make_paged("bhnc-nhd", torch.bfloat16).layout
    ops.check_slots(torch.tensor([0, 11, -1]), layout)
    ops.check_slots(torch.tensor([], dtype=torch.int64), layout)
    with pytest.raises(ValueError, match=rf"slot_mapping\[2\] is {bad}; expected"):
        ops.check_slots(torch.tensor([0, 3, bad]), layout)
    with pytest.raises(ValueError, match="expected an int64 CPU tensor"):
        ops.check_slots(torch.tensor([0, 3], dtype=torch.int32), layout)


# --- as torch operators ------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "form",
    ["bhnc-nhd", *(pytest.param(form, marks=pytest.mark.slow) for form in ("2bnhd", "native"))],
)
def test_opcheck(form: str, implementation: str) -> None:
    paged = make_paged(form, torch.bfloat16)
    slots = torch.tensor([2, -1, 0])
    chunk = torch.zeros(2 * paged.layout.chunk_bytes(3, 1), dtype=torch.uint8)
    arguments = (paged.caches, slots, chunk, paged.layout.as_ints(), 1, 1, [])
    for name in ("gather_kv", "scatter_kv"):
        results = torch.library.opcheck(getattr(torch.ops.kvshelf, name).default, arguments)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.long
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

    slots, back = torch.tensor([2, -1, 0, 7]), torch.tensor([5, 6, -1, 9])
    plain = make_paged("bhnc-nhd", torch.float32)
    out = torch.zeros(2 * layout.chunk_bytes(4, 1), dtype=torch.uint8)
    plain_out = torch.zeros_like(out)
    expected = move(plain.caches, slots, back, plain_out)
    compiled = torch.compile(move, fullgraph=True, backend="aot_eager")
    got = compiled(paged.caches, slots, back, out)
    assert torch.equal(out, plain_out)
    assert expected[0].item() == plain_out.sum().item()
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1].view(torch.uint8), expected[1].view(torch.uint8))
    for memory, want in zip(paged.memory, plain.memory, strict=True):
        np.testing.assert_array_equal(memory, want)
    torch.compiler.reset()


# --- which implementation ----------------------------------------------------------


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("KVSHELF_OPS", raising=False)
    library_module.compiled_library.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library_module.compiled_library.cache_clear()


def _copies() -> bool:
    paged = make_paged("b2nhd", torch.bfloat16)
    slots = torch.tensor([1, -1, 7])
    out = torch.empty(2 * paged.layout.chunk_bytes(3), dtype=torch.uint8)
    ops.gather_kv(paged.caches, slots, out, paged.layout)
    return torch.equal(out, paged.gathered(slots.view(1, -1), 0, 2).view(-1))


@pytest.mark.parametrize("requested", [True, False])
def test_plain_torch_on_request_and_silently_without_the_library(
    fresh_choice: pytest.MonkeyPatch, requested: bool
) -> None:
    if requested:
        fresh_choice.setenv("KVSHELF_OPS", "torch")
    else:
        fresh_choice.setattr(library_module, "_library_paths", list)
    assert ops.implementation() == "torch"
    assert _copies()


@pytest.mark.long
def test_library_that_does_not_load_warns_once_and_is_not_used(
    fresh_choice: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "libkvshelf_ops.so"
    broken.write_bytes(b"not a library")
    fresh_choice.setattr(library_module, "_library_paths", lambda: [broken])
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert ops.implementation() == "torch"
    assert ops.implementation() == "torch"  # a second warning would be an error
    assert _copies()


def test_library_of_another_version_is_not_used(fresh_choice: pytest.MonkeyPatch) -> None:
    if not COMPILED:
        pytest.skip("the compiled library is not installed")
    fresh_choice.setattr(library_module, "_LIBRARY_VERSION", 0)
    with pytest.warns(RuntimeWarning, match="expected 0"):
        assert ops.implementation() == "torch"


@pytest.mark.long
def test_asking_for_a_library_that_is_not_there_is_an_error(
    fresh_choice: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_choice.setenv("KVSHELF_OPS", "cpp")
    fresh_choice.setattr(library_module, "_library_paths", list)
    with pytest.raises(ConfigError, match=r"not installed.*reinstall"):
        ops.implementation()
    broken = tmp_path / "libkvshelf_ops.so"
    broken.write_bytes(b"not a library")
    fresh_choice.setattr(library_module, "_library_paths", lambda: [broken])
    with pytest.raises(ConfigError, match=r"cannot be used.*reinstall"):
        ops.implementation()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("fast", "'fast'; expected auto, cpp, cuda or torch$"),
        ("triton", "'triton'; expected auto, cpp, cuda or torch.*uses no Triton"),
    ],
)
def test_unknown_choice_is_an_error(
    fresh_choice: pytest.MonkeyPatch, choice: str, message: str
) -> None:
    fresh_choice.setenv("KVSHELF_OPS", choice)
    with pytest.raises(ConfigError, match=message):
        ops.implementation()


@pytest.mark.real
def test_importing_loads_neither_the_library_nor_cuda() -> None:
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import kvshelf.kv.ops, sys, torch\n"
            "assert 'tvm_ffi' not in sys.modules\n"
            "assert not torch.cuda.is_initialized()\n",
        ],
        check=True,
    )


@pytest.mark.real
@pytest.mark.skipif(not COMPILED, reason="the compiled library is not installed")
def test_other_threads_run_while_bytes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = library_module.compiled_library()
    assert compiled is not None
    started, ran = threading.Event(), threading.Event()
    gather = compiled.gather

    def repeated(*arguments: Any) -> Any:
        started.set()
        for _ in range(1000):
            answer = gather(*arguments)
            if ran.is_set():
                return answer
        pytest.fail("the other thread did not run during any copy")

    replaced = dataclasses.replace(compiled, gather=repeated)
    monkeypatch.setattr(library_module, "compiled_library", lambda: replaced)
    cache = torch.zeros(16, 16, 1024)
    layout = PagedLayout.from_mla(cache)
    out = torch.zeros(64 * layout.chunk_bytes(256), dtype=torch.uint8)
    # With so long a switch interval no thread gets the GIL unless it is given away.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        with ThreadPoolExecutor(1) as pool:
            copied = pool.submit(ops.gather_kv, [cache] * 64, torch.arange(256), out, layout)
            assert started.wait(60)
            ran.set()
            copied.result()
    finally:
        sys.setswitchinterval(interval)
