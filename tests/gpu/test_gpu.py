"""Gather and scatter, stores and loads on a GPU, compared byte for byte with torch's indexing.

Buffers and caches hold other bytes before each call, and what must not be touched is compared as
well. The engine's stream is made busy before each step that has to come after it: whatever does not
wait for that stream comes too early, and is found.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvshelf import PagedLayout
from kvshelf.errors import DeviceUnavailableError
from kvshelf.kv import ops
from kvshelf.kv.caches import LayerCall
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.ops import kernel
from kvshelf.memory import arena
from kvshelf.memory.chunk_memory import ChunkMemory
from tests.support.paged import DTYPES, FORMS, Paged, make_paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda", 0)
POISON = 0xAB
#: Why a call could use vectors of fewer than 16 bytes, as arguments of make_paged and `lead`.
ALIGNMENTS = {
    "aligned": {},
    "lead 1": {"lead": 1},
    "lead 2": {"lead": 2},
    "lead 4": {"lead": 4},
    "odd rows": {"head_size": 27},
    "gaps": {"gaps": (1, 3, 1, 2, 5)},
}


def pages_of(form: str, dtype: torch.dtype = torch.bfloat16, **options: object) -> Paged:
    """Caches on the GPU; by default 3 layers of 7 blocks of 16 tokens, 4 heads of 32."""
    sizes = {"layers": 3, "blocks": 7, "block_size": 16, "heads": 4, "head_size": 32}
    return make_paged(form, dtype, DEVICE, **(sizes | options))  # type: ignore[arg-type]


def slots_of(pages: Paged, tokens: int, seed: int = 0, skip: float = 0.15) -> Tensor:
    """Return int64 CPU [tokens], all different; a part `skip` of them is −1."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(pages.layout.num_slots, generator=generator)[:tokens]
    order[torch.rand(order.shape, generator=generator) < skip] = -1
    return order


def fall_behind() -> None:
    """Keep the current stream busy for some milliseconds."""
    torch.cuda._sleep(10_000_000)


def same(got: Tensor, want: Tensor) -> None:
    """Compare all bytes."""
    assert torch.equal(got.cpu(), want.cpu())


def check(
    pages: Paged, slots: Tensor, shards: int = 1, first: int = 0, lead: int = 0, gap: int = 0
) -> None:
    """Gather, scatter other bytes, and compare everything with the reference."""
    heads = (pages.layout.heads - first) // shards
    tokens = len(slots)
    size = len(pages.caches) * pages.layout.chunk_bytes(tokens, heads)
    memory = torch.full(
        (lead + shards * (size + gap) + 64,), POISON, dtype=torch.uint8, device=DEVICE
    )
    strides = (size + gap, 1)
    buffers = memory.as_strided((shards, size), strides, lead)
    want = memory.clone()
    want.as_strided(buffers.shape, strides, lead).copy_(
        pages.gathered(slots.view(1, -1), first, heads, shards)[0]
    )
    before = [part.clone() for part in pages.memory]
    fall_behind()
    memory.fill_(POISON)
    ops.gather_kv(pages.caches, slots, buffers, pages.layout, first, heads)
    same(memory, want)
    for part, old in zip(pages.memory, before, strict=True):
        same(part, old)

    incoming = torch.randint(0, 256, buffers.shape, dtype=torch.uint8, device=DEVICE)
    target, after = (
        pages.clone(),
        pages.scattered(slots.view(1, -1), incoming.unsqueeze(0), first, heads),
    )
    fall_behind()
    buffers.copy_(incoming)
    ops.scatter_kv(target.caches, slots, buffers, pages.layout, first, heads)
    for part, new in zip(target.memory, after.memory, strict=True):
        same(part, new)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    kernel.prepare(DEVICE)
    assert not ops.kernel_problem(DEVICE, seconds=60)
    assert ops.implementation(DEVICE) == "cuda"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_each_layout_dtype_and_alignment(form: str, dtype: torch.dtype) -> None:
    for options in ALIGNMENTS.values():
        pages = pages_of(form, dtype, **options)
        check(pages, slots_of(pages, min(48, pages.layout.num_slots) // 2), lead=16)
    for lead in (1, 2, 4, 8):
        check(pages_of(form, dtype), slots_of(pages_of(form, dtype), 5), lead=lead)


@pytest.mark.parametrize("form", FORMS)
def test_shards_and_heads(form: str) -> None:
    pages = pages_of(form, blocks=13)
    heads = pages.layout.heads
    tokens = 4 if form == "native" else 60
    for shards, gap in itertools.product({1, 2, 4, heads}, (0, 16, 5)):
        if heads % shards == 0:
            check(pages, slots_of(pages, tokens), shards, gap=gap)
    for first in range(heads):
        check(pages, slots_of(pages, 3, seed=first), first=first)


def test_more_layers_than_one_launch_takes() -> None:
    pages = pages_of("mla", torch.uint8, layers=300, blocks=2, head_size=8)
    check(pages, slots_of(pages, 7))


def test_slots_outside_the_cache_are_refused() -> None:
    pages = pages_of("bhnc-nhd")
    out = torch.zeros(3 * pages.layout.chunk_bytes(20), dtype=torch.uint8, device=DEVICE)
    for bad in (pages.layout.num_slots, -2, 2**31, 2**63 - 1, -(2**63)):
        slots = slots_of(pages, 20)
        slots[7] = bad
        for operate in (ops.gather_kv, ops.scatter_kv):
            with pytest.raises(ValueError, match="slot"):
                operate(pages.caches, slots, out, pages.layout)
    assert not out.any()


def test_offsets_beyond_4_gib() -> None:
    if torch.cuda.mem_get_info(DEVICE)[0] < 8 << 30:
        pytest.skip("a GPU with 8 GiB of free memory is needed")
    cache = torch.full((300_000, 16, 1024), POISON, dtype=torch.uint8, device=DEVICE)
    edge = 2**32 // 1024
    slots = torch.tensor([300_000 * 16 - 1, edge, edge - 1, 5])
    known = torch.randint(0, 256, (4 * 1024,), dtype=torch.uint8, device=DEVICE)
    layout, out = PagedLayout.from_mla(cache), torch.empty_like(known)
    ops.scatter_kv([cache], slots, known, layout)
    same(cache.view(-1, 1024)[slots.to(DEVICE)], known.view(4, 1024))
    ops.gather_kv([cache], slots, out, layout)
    same(out, known)


def test_captured_graphs_hold_their_slots() -> None:
    pages = pages_of("bhnc-nhd", layers=140)
    slots = slots_of(pages, 20)
    given = slots.clone()
    out = torch.zeros(140 * pages.layout.chunk_bytes(20), dtype=torch.uint8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gather_kv(pages.caches, given, out, pages.layout)
    given.fill_(-1)
    for _ in range(3):
        for part in pages.memory:
            part.random_(0, 256)
        graph.replay()
        same(out, pages.gathered(slots.view(1, -1), 0, pages.layout.heads).view(-1))


def test_threads_with_streams_of_their_own() -> None:
    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            pages = pages_of("bhnc-hnd", torch.float16, seed=seed)
            for round_ in range(10):
                check(pages, slots_of(pages, 30, seed=round_))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


# --- stores and loads ----------------------------------------------------------------


SHARDS, TOKENS = 2, 64


class Rig:
    """Caches, the path between them and the host, and page-locked memory for a chunk."""

    def __init__(self, form: str = "bhnc-nhd", **options: object) -> None:
        self.pages = pages_of(form, blocks=16, **options)
        heads = self.pages.layout.heads // SHARDS
        size = len(self.pages.caches) * self.pages.layout.chunk_bytes(TOKENS, heads)
        self.heads = heads
        calls = {
            shard: [LayerCall(self.pages.caches, self.pages.layout, 0, size, heads, shard * heads)]
            for shard in range(SHARDS)
        }
        self.memory = ChunkMemory(16 << 20, device=DEVICE)
        self.path = DeviceKVCache(calls, buffer_bytes=64 << 20)
        self.payloads = list(self.memory.tensor[: SHARDS * size].split(size))

    def expected(self, slots: Tensor, pages: Paged | None = None) -> Tensor:
        """[shards, bytes] that a gather of the caches, or others, must give."""
        return (pages or self.pages).gathered(slots.view(1, -1), 0, self.heads, SHARDS)[0]

    def store(self, slots: Tensor) -> None:
        """Gather into memory, and wait."""
        for payload in self.payloads:
            payload.fill_(POISON)
        copied = self.path.gather(slots, self.payloads)
        assert copied is not None, "no device buffer is free though all gathers have ended"
        copied.wait()

    def load(self, slots: Tensor) -> None:
        """Scatter from memory on another thread, as a load thread does."""
        fence = self.path.fence()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(
                self.path.scatter_chunk, range(SHARDS), slots, self.payloads, fence
            ).result()


@contextmanager
def rig(form: str = "bhnc-nhd", **options: object) -> Iterator[Rig]:
    made = Rig(form, **options)
    yield made
    made.path.close()
    made.memory.close()


@pytest.mark.parametrize("form", ["bhnc-nhd", "bhnc-hnd", "2bnhd", "b2nhd"])
def test_chunk_comes_back(form: str) -> None:
    with rig(form) as made:
        for seed in range(8):
            slots = slots_of(made.pages, TOKENS, seed, skip=0)
            want = made.expected(slots)
            made.store(slots)
            same(torch.stack(made.payloads), want)
            for part in made.pages.memory:
                part.zero_()
            made.load(slots)
            same(made.expected(slots), want)


def test_a_store_has_what_was_written_before_it_and_nothing_later() -> None:
    with rig() as made, torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        for seed in range(8):
            slots = slots_of(made.pages, TOKENS, seed, skip=0)
            fresh = made.pages.clone()
            for part in fresh.memory:
                part.random_(0, 256)
            want = made.expected(slots, fresh)
            fall_behind()
            for part, new in zip(made.pages.memory, fresh.memory, strict=True):
                part.copy_(new)
            copied = made.path.gather(slots, made.payloads)
            assert copied is not None
            for part in made.pages.memory:
                part.random_(0, 256)
            copied.wait()
            same(torch.stack(made.payloads), want)


def test_load_comes_after_what_the_engine_had_enqueued() -> None:
    with rig() as made, torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        for seed in range(8):
            slots = slots_of(made.pages, TOKENS, seed, skip=0)
            for payload in made.payloads:
                payload.random_(0, 256)
            fall_behind()
            for part in made.pages.memory:
                part.zero_()
            made.load(slots)
            torch.cuda.synchronize()
            same(made.expected(slots), torch.stack(made.payloads))


def test_load_waits_for_its_fence_and_not_for_later_work() -> None:
    with rig() as made, torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        slots = slots_of(made.pages, TOKENS, skip=0)
        made.load(slots)
        fence, later = made.path.fence(), torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)
        later.record()
        with ThreadPoolExecutor(1) as pool:
            arguments = (range(SHARDS), slots, made.payloads, fence)
            pool.submit(made.path.scatter_chunk, *arguments).result()
        assert not later.query()
        torch.cuda.synchronize()


def test_torch_copies_the_same_while_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "kernels_of", lambda device: None)
    for form in FORMS:
        pages = pages_of(form)
        check(pages, slots_of(pages, 5))
    test_chunk_comes_back("bhnc-hnd")


def test_nothing_touches_the_caches_of_an_engine_that_sleeps() -> None:
    with rig() as made:
        slots = slots_of(made.pages, TOKENS, skip=0)
        want = made.expected(slots)
        made.store(slots)
        made.path.pause()
        with pytest.raises(DeviceUnavailableError, match="sleeps"):
            made.load(slots)
        for part in made.pages.memory:
            part.zero_()
        made.path.resume()
        made.load(slots)
        same(made.expected(slots), want)


def test_memory_that_cannot_be_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("cudaHostRegister failed")

    monkeypatch.setattr(arena, "page_lock", refuse)
    with rig() as made:
        assert not made.memory.is_page_locked
        slots = slots_of(made.pages, TOKENS, skip=0)
        want = made.expected(slots)
        made.store(slots)
        for part in made.pages.memory:
            part.zero_()
        made.load(slots)
        same(made.expected(slots), want)


def test_chunk_cache_on_paged_caches(tmp_path: Path) -> None:
    for package in ("pydantic", "fsspec", "tvm_ffi", "safetensors", "xxhash"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    from kvshelf import ChunkCache, Config, ModelFacts

    first, second = (pages_of("bhnc-hnd", blocks=64, heads=2, seed=seed) for seed in (1, 2))
    facts = ModelFacts(layers=3, kv_heads=2, head_size=32, dtype="bfloat16", weights="name:gpu-v1")
    prompt, mine, theirs = list(range(600)), *(slots_of(first, 600, n, 0) for n in (1, 2))
    with ChunkCache.open(Config(shared_storage_path=str(tmp_path)), facts) as cache:
        cache.bind(first.caches, first.layout)
        assert cache.store(prompt, slot_mapping=mine).complete
    with ChunkCache.open(Config(shared_storage_path=str(tmp_path)), facts) as cache:
        cache.bind(second.caches, second.layout)
        assert cache.lookup(prompt) == 512
        assert int(cache.retrieve(prompt, slot_mapping=theirs).sum()) == 512
    of = (mine[:512].view(1, -1), theirs[:512].view(1, -1))
    same(second.gathered(of[1], 0, 2), first.gathered(of[0], 0, 2))


def test_with_every_launch_waited_for() -> None:
    """CUDA_LAUNCH_BLOCKING is read once in a process."""
    if os.environ.get("CUDA_LAUNCH_BLOCKING"):
        pytest.skip("it is set for all tests")
    here = Path(__file__)
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={ROOT}"),
            *("--import-mode=importlib", f"--confcutdir={here.parent}"),
            *("-k", "layout_dtype or comes_back or written_before or sleeps", str(here)),
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1"},
        check=True,
    )


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vllm is not installed")
def test_two_engines_give_the_same_answers() -> None:
    """A cold and a warm engine of vLLM, compared by the demo."""
    subprocess.run([sys.executable, "examples/demo.py"], cwd=ROOT, check=True)
