"""Check gather and scatter on a GPU against indexing of named dimensions.

Everything is compared byte for byte: buffers and caches are poisoned before each call, and what
must not be touched is compared as well. The device is an option: on a CPU the same checks run on
the implementation for CPUs, those that need streams or graphs are skipped by name.

Run by ``make gpu``; prints a line for each group of checks and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from library_writers import Writer, flash_attn_writer, flashinfer_writer
from torch import Tensor

from kvshelf.buffers import BufferPool
from kvshelf.kv import ops
from kvshelf.kv.caches import LayerCall
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.layout_learning import CacheShape, learn_layout
from kvshelf.kv.ops import checks, dispatch
from kvshelf.kv.ops import library as native

FORMS = ("bhnc-hnd", "bhnc-nhd", "2bnhd", "b2nhd", "mla", "native")
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
POISON = 0xAB


class Skipped(Exception):  # noqa: N818  not an error
    """The device cannot run the check; the message says why."""


@dataclass
class Report:
    """The results of the checks.

    Attributes
    ----------
    device : torch.device
    small : bool
        Fewer and smaller cases, for tools that slow everything.
    widths : set of int
        Widths in bytes of the vectors that kernels were launched with.
    groups : list of dict
        Name, number of comparisons, seconds, and what failed or why it was skipped.
    """

    device: torch.device
    small: bool = False
    widths: set[int] = field(default_factory=set)
    groups: list[dict[str, object]] = field(default_factory=list)
    comparisons: int = 0

    def equal(self, got: Tensor, want: Tensor, what: str) -> None:
        """Compare two byte tensors.

        Raises
        ------
        AssertionError
            With the number and the first of the different bytes.
        """
        self.comparisons += 1
        if got.shape != want.shape:
            raise AssertionError(f"{what}: {list(got.shape)} instead of {list(want.shape)}")
        if torch.equal(got, want.to(got.device)):
            return
        wrong = (got != want.to(got.device)).view(-1).nonzero().view(-1)
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {wrong.numel()} of {got.numel()} bytes differ, first at {first}: "
            f"{int(got.view(-1)[first])} instead of {int(want.view(-1)[first])}"
        )

    @property
    def failed(self) -> bool:
        """Whether anything failed."""
        return any("failed" in group for group in self.groups)


# --- caches and the reference ------------------------------------------------------


@dataclass
class Pages:
    """Paged caches of several layers inside poisoned memory."""

    form: str
    memory: list[Tensor]  # uint8, everything that was allocated
    caches: list[Tensor]
    layout: PagedLayout
    head_size: int

    def rows(self, cache: Tensor) -> Tensor:
        """Return a cache as [slots or blocks, kv_planes, heads, row bytes], for any form."""
        if self.form == "native":
            blocks, heads = cache.shape[:2]
            named = cache.reshape(blocks, 1, heads, -1)
        elif self.form == "mla":
            named = cache.reshape(-1, 1, 1, cache.shape[-1])
        elif self.form == "2bnhd":
            named = cache.permute(1, 2, 0, 3, 4).flatten(0, 1)
        elif self.form == "b2nhd":
            named = cache.permute(0, 2, 1, 3, 4).flatten(0, 1)
        else:
            kv_planes = cache.unflatten(3, (2, self.head_size))
            named = kv_planes.permute(0, 2, 3, 1, 4).flatten(0, 1)
        return named.contiguous().view(torch.uint8)

    def gathered(self, slots: Tensor, first: int, heads: int, shards: int) -> Tensor:
        """uint8 [chunks, shards, bytes] that a gather of [chunks, tokens] slots gives."""
        of_layers = []
        for cache in self.caches:
            rows = self.rows(cache)[:, :, first : first + shards * heads]
            taken = rows[slots.clamp(min=0).to(rows.device)]
            taken[slots.to(rows.device) < 0] = 0
            # [chunks, tokens, planes, shards, heads, bytes] -> [chunks, shards, planes, tokens, …]
            split = taken.unflatten(3, (shards, heads)).permute(0, 3, 2, 1, 4, 5)
            of_layers.append(split.flatten(2))
        return torch.cat(of_layers, dim=2)

    def clone(self) -> Pages:
        """Return the same caches in other memory."""
        memory = [part.clone() for part in self.memory]
        caches = []
        for part, cache in zip(memory, self.caches, strict=True):
            typed = part.view(cache.dtype)
            offset = cache.storage_offset()
            caches.append(typed.as_strided(cache.shape, cache.stride(), offset))
        return Pages(self.form, memory, caches, self.layout, self.head_size)


def make_pages(
    form: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    layers: int = 3,
    blocks: int = 7,
    block_size: int = 16,
    heads: int = 4,
    head_size: int = 32,
    gaps: tuple[int, ...] = (0, 0, 0, 0, 0),
    lead: int = 0,
    seed: int = 0,
) -> Pages:
    """Caches of random bytes; ``gaps`` and ``lead`` count elements, as in the tests on the host."""
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
    size = lead
    count = 1
    for n in whole:
        count *= n
    size += count
    generator = torch.Generator(device=device).manual_seed(seed)
    memory, caches = [], []
    for _ in range(layers):
        flat = torch.randint(
            0, 256, (size * dtype.itemsize,), dtype=torch.uint8, device=device, generator=generator
        )
        cache = flat.view(dtype)[lead:].view(whole)[tuple(slice(0, n) for n in used)]
        if form == "bhnc-nhd":
            cache = cache.transpose(1, 2)
        memory.append(flat)
        caches.append(cache)
    first = caches[0]
    layout = {
        "bhnc-hnd": lambda: PagedLayout.from_bhnc(first, head_size),
        "bhnc-nhd": lambda: PagedLayout.from_bhnc(first, head_size),
        "2bnhd": lambda: PagedLayout.from_2bnhd(first),
        "b2nhd": lambda: PagedLayout.from_b2nhd(first),
        "mla": lambda: PagedLayout.from_mla(first),
        "native": lambda: PagedLayout.native_blocks(first),
    }[form]()
    return Pages(form, memory, caches, layout, head_size)


def random_slots(pages: Pages, chunks: int, tokens: int, *, skip: bool, seed: int = 0) -> Tensor:
    """Return int64 CPU [chunks, tokens], all different except −1."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(pages.layout.num_slots, generator=generator)[: chunks * tokens]
    if skip:
        order[torch.rand(order.shape, generator=generator) < 0.15] = -1
    return order.view(chunks, tokens)


def check_call(
    report: Report,
    pages: Pages,
    slots: Tensor,
    *,
    first: int = 0,
    heads: int | None = None,
    shards: int = 1,
    lead: int = 0,
    gap: int = 0,
    what: str = "",
) -> None:
    """Gather, and scatter other bytes, and compare everything."""
    device = report.device
    heads = (pages.layout.heads - first) // shards if heads is None else heads
    chunks, tokens = slots.shape
    size = len(pages.caches) * pages.layout.chunk_bytes(tokens, heads)
    step = size + gap
    memory = torch.full((lead + chunks * shards * step + 64,), POISON, dtype=torch.uint8)
    memory = memory.to(device)
    buffers = memory.as_strided((chunks, shards, size), (shards * step, step, 1), lead)
    arguments = (pages.layout, first, heads)

    expected = torch.full_like(memory, POISON)
    want = pages.gathered(slots, first, heads, shards)
    expected.as_strided(buffers.shape, buffers.stride(), lead).copy_(want)
    before = [part.clone() for part in pages.memory]
    ops.gather_kv(pages.caches, slots, buffers, *arguments)
    report.equal(memory, expected, f"gather {what}")
    for part, old in zip(pages.memory, before, strict=True):
        report.equal(part, old, f"caches after gather {what}")

    incoming = torch.randint(0, 256, buffers.shape, dtype=torch.uint8, device=device)
    buffers.copy_(incoming)
    target = pages.clone()
    after = pages.clone()
    place(after, slots, incoming, first, heads)
    ops.scatter_kv(target.caches, slots, buffers, *arguments)
    for part, new in zip(target.memory, after.memory, strict=True):
        report.equal(part, new, f"scatter {what}")
    report.equal(buffers.contiguous(), incoming, f"buffers after scatter {what}")


def place(pages: Pages, slots: Tensor, buffers: Tensor, first: int, heads: int) -> None:
    """Write buffers into caches, by the names of their dimensions."""
    device = buffers.device
    layout, form = pages.layout, pages.form
    chunks, shards, _ = buffers.shape
    layers = len(pages.caches)
    item = pages.caches[0].element_size()
    split = buffers.contiguous().view(
        chunks, shards, layers, layout.kv_planes, slots.shape[1], heads, layout.row_bytes
    )
    # [layers, chunks × tokens, kv_planes, shards × heads, bytes]
    rows = split.permute(2, 0, 4, 3, 1, 5, 6).flatten(4, 5).flatten(1, 2).contiguous()
    flat = slots.reshape(-1).to(device)
    kept = flat >= 0
    slots, rows = flat[kept], rows[:, kept]
    some = slice(first, first + shards * heads)
    for cache, of_layer in zip(pages.caches, rows, strict=True):
        block, offset = slots // layout.block_size, slots % layout.block_size
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[item]
        view, values = cache.view(words), of_layer.contiguous().view(words)
        if form == "native":
            view[slots, some] = values[:, 0].unflatten(-1, tuple(view.shape[2:]))
        elif form == "mla":
            view[block, offset] = values[:, 0, 0]
        elif form == "2bnhd":
            view[:, block, offset, some] = values.transpose(0, 1)
        elif form == "b2nhd":
            for kv in (0, 1):
                view[block, kv, offset, some] = values[:, kv]
        else:
            heads_first = view.transpose(1, 2)
            heads_first[block, offset, some] = values.transpose(1, 2).flatten(2)


# --- groups of checks --------------------------------------------------------------


def forms_dtypes_widths(report: Report) -> None:
    """Each form × dtype × cause of the vectors' width."""
    dtypes = DTYPES[:2] if report.small else DTYPES
    spoilers = {
        "aligned": {},
        "lead 1": {"lead": 1},
        "lead 2": {"lead": 2},
        "lead 4": {"lead": 4},
        "lead 8": {"lead": 8},
        "odd rows": {"head_size": 27},
        "gaps": {"gaps": (1, 3, 1, 2, 5)},
        "one block": {"blocks": 1, "head_size": 40},
    }
    for form, dtype, (name, options) in itertools.product(FORMS, dtypes, spoilers.items()):
        pages = make_pages(form, dtype, report.device, **options)  # type: ignore[arg-type]
        tokens = max(1, min(48, pages.layout.num_slots) // 2)
        for skip in (False, True):
            slots = random_slots(pages, 1, tokens, skip=skip)
            what = f"{form} {dtype} {name}"
            check_call(report, pages, slots, lead=16, what=what)
    for lead, form in itertools.product((1, 2, 4, 8, 16), FORMS):
        pages = make_pages(form, torch.bfloat16, report.device)
        slots = random_slots(pages, 1, 5, skip=True)
        check_call(report, pages, slots, lead=lead, what=f"{form}, buffer at {lead}")


def chunks_shards_heads(report: Report) -> None:
    """Several chunks and shards in one call, ranges of heads, gaps between buffers."""
    for form, chunks, shards in itertools.product(FORMS, (1, 3), (1, 2, 4)):
        pages = make_pages(form, torch.bfloat16, report.device, blocks=13)
        if shards > pages.layout.heads:
            continue
        tokens = 4 if form == "native" else 60
        for gap in (0, 16, 5):
            slots = random_slots(pages, chunks, tokens, skip=True, seed=chunks)
            what = f"{form}, {chunks} chunks, {shards} shards, gap {gap}"
            check_call(report, pages, slots, shards=shards, gap=gap, what=what)
        for first in range(pages.layout.heads):
            slots = random_slots(pages, chunks, 3, skip=False, seed=first)
            check_call(report, pages, slots, first=first, heads=1, what=f"{form}, head {first}")


def sizes_of_models(report: Report) -> None:
    """The shapes of real models, whole chunks of 256 tokens in blocks of 16."""
    layers = 2 if report.small else 32
    for form, heads, size in (
        ("bhnc-nhd", 8, 128),
        ("bhnc-hnd", 8, 128),
        ("2bnhd", 8, 128),
        ("b2nhd", 2, 64),
        ("bhnc-nhd", 1, 80),
        ("mla", 1, 288),
    ):
        pages = make_pages(
            form,
            torch.bfloat16,
            report.device,
            layers=layers,
            blocks=40,
            heads=heads,
            head_size=size,
        )
        order = torch.randperm(40)[:32]
        slots = (order.view(-1, 1) * 16 + torch.arange(16)).view(2, 256)
        shards = pages.layout.heads
        for count in {1, shards}:
            what = f"{form}, {heads} heads of {size}, {count} shards"
            check_call(report, pages, slots, shards=count, what=what)


def deep_models(report: Report) -> None:
    """More layers than one launch takes."""
    pages = make_pages("mla", torch.uint8, report.device, layers=300, blocks=2, head_size=8)
    check_call(report, pages, random_slots(pages, 2, 7, skip=True), what="deep")


def bad_slots_are_refused(report: Report) -> None:
    """A slot outside the cache is refused before anything is launched."""
    pages = make_pages("bhnc-nhd", torch.bfloat16, report.device)
    size = len(pages.caches) * pages.layout.chunk_bytes(20)
    for bad in (pages.layout.num_slots, -2, 2**31, 2**32 + 1, 2**63 - 1, -(2**63)):
        slots = random_slots(pages, 2, 20, skip=True)
        slots[1, 7] = bad
        out = torch.full((2, size), POISON, dtype=torch.uint8, device=report.device)
        untouched, target = out.clone(), pages.clone()
        for operate in (ops.gather_kv, ops.scatter_kv):
            try:
                operate(target.caches, slots, out, pages.layout)
            except ValueError:
                continue
            raise AssertionError(f"slot {bad} was not refused")
        report.equal(out, untouched, f"buffers after slot {bad}")
        for part, old in zip(target.memory, pages.memory, strict=True):
            report.equal(part, old, f"caches after slot {bad}")


def far_offsets(report: Report) -> None:
    """Rows beyond 4 GiB in a cache and in a buffer."""
    if report.device.type != "cuda" or report.small:
        raise Skipped("takes 13 GiB of GPU memory")
    free, _ = torch.cuda.mem_get_info(report.device)
    if free < 16 << 30:
        raise Skipped(f"only {free >> 30} GiB of GPU memory are free, 16 are needed")
    blocks, block_size, content = 300_000, 16, 1024  # 4.9 GB
    cache = torch.empty(blocks, block_size, content, dtype=torch.uint8, device=report.device)
    edge = 2**32 // content
    edges = torch.tensor([blocks * block_size - 1, edge, edge - 1])
    others = torch.randperm(blocks * block_size)[: 2**16 + 3]
    others = others[~torch.isin(others, edges)]
    slots = torch.cat([edges, others])[: 2**16].view(1, -1)
    known = torch.randint(0, 256, (2**16, content), dtype=torch.uint8, device=report.device)
    layout = PagedLayout.from_mla(cache)
    cache.fill_(POISON)
    ops.scatter_kv([cache], slots, known.view(1, -1), layout)
    index = slots[0].to(report.device)
    report.equal(cache.view(-1, content)[index], known, "scatter beyond 4 GiB")
    out = torch.empty(1, known.numel(), dtype=torch.uint8, device=report.device)
    ops.gather_kv([cache], slots, out, layout)
    report.equal(out.view_as(known), known, "gather beyond 4 GiB")
    del out
    chosen = torch.arange(edge + 4096).remainder(2**16).to(report.device)
    mapping = slots[0][chosen.cpu()].view(1, -1)
    large = torch.empty(1, mapping.numel() * content, dtype=torch.uint8, device=report.device)
    ops.gather_kv([cache], mapping, large, layout)
    report.equal(large.view(-1, content)[-4096:], known[chosen[-4096:]], "buffer beyond 4 GiB")


def the_same_as_torch(report: Report) -> None:
    """Plain torch on the same device gives the same."""
    if ops.implementation(report.device) == "torch":
        raise Skipped("torch is what serves this device")
    pages = make_pages("bhnc-nhd", torch.bfloat16, report.device, gaps=(1, 2, 1, 8))
    slots = random_slots(pages, 2, 20, skip=True)
    size = len(pages.caches) * pages.layout.chunk_bytes(20, 1)
    outs = [torch.full((2, 4, size), POISON, dtype=torch.uint8) for _ in range(2)]
    outs = [out.to(report.device) for out in outs]
    ops.gather_kv(pages.caches, slots, outs[0], pages.layout, 0, 1)
    with plain_torch():
        ops.gather_kv(pages.caches, slots, outs[1], pages.layout, 0, 1)
    report.equal(outs[0], outs[1], "gather, kernels and torch")
    targets = [pages.clone(), pages.clone()]
    ops.scatter_kv(targets[0].caches, slots.flip(1), outs[0], pages.layout, 0, 1)
    with plain_torch():
        ops.scatter_kv(targets[1].caches, slots.flip(1), outs[0], pages.layout, 0, 1)
    for one, other in zip(targets[0].memory, targets[1].memory, strict=True):
        report.equal(one, other, "scatter, kernels and torch")


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Use plain torch for everything."""
    kept = dispatch.run_compiled
    dispatch.run_compiled = lambda call, *, gather: False
    try:
        yield
    finally:
        dispatch.run_compiled = kept


def operators(report: Report) -> None:
    """torch.library.opcheck of both operators; compiled as one graph."""
    if report.small:
        raise Skipped("takes long under a checking tool")
    pages = make_pages("bhnc-nhd", torch.bfloat16, report.device)
    slots = torch.tensor([2, -1, 0])
    size = len(pages.caches) * pages.layout.chunk_bytes(3, 1)
    out = torch.zeros(size, dtype=torch.uint8, device=report.device)
    for name in ("gather_kv", "scatter_kv"):
        operator = getattr(torch.ops.kvshelf, name).default
        arguments = (pages.caches, slots, out, pages.layout.as_ints(), 1, 1)
        results = torch.library.opcheck(operator, arguments)
        report.comparisons += 1
        if set(results.values()) != {"SUCCESS"}:
            raise AssertionError(f"opcheck of {name}: {results}")

    def move(caches: list[Tensor], mapping: Tensor, buffer: Tensor) -> Tensor:
        ops.gather_kv(caches, mapping, buffer, pages.layout, 1, 1)
        return buffer.sum()

    compiled = torch.compile(move, fullgraph=True, backend="aot_eager")
    got = int(compiled(pages.caches, slots, out))
    want = int(pages.gathered(slots.view(1, -1), 1, 1, 1).to(torch.int64).sum())
    if got != want:
        raise AssertionError(f"compiled: {got} instead of {want}")


def graphs(report: Report) -> None:
    """Captured once, replayed with other bytes, after slots and known caches were cleared."""
    if report.device.type != "cuda":
        raise Skipped("CUDA graphs need CUDA")
    if ops.implementation(report.device) != "cuda":
        raise Skipped("plain torch cannot be captured")
    pages = make_pages("bhnc-nhd", torch.bfloat16, report.device, layers=140)
    target = pages.clone()
    layout = pages.layout
    mapping = random_slots(pages, 2, 20, skip=True)
    back = random_slots(pages, 2, 20, skip=True, seed=9)
    slots, places = mapping.clone(), back.clone()
    size = len(pages.caches) * layout.chunk_bytes(20, 2)
    buffers = torch.full((2, 2, size), POISON, dtype=torch.uint8, device=report.device)
    ops.prepare(pages.caches, layout)
    ops.prepare(target.caches, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gather_kv(pages.caches, mapping, buffers, layout, 0, 2)
        ops.scatter_kv(target.caches, back, buffers, layout, 0, 2)
    # The slots travelled with the launches.
    mapping.fill_(-1)
    back.fill_(-1)
    # What the library remembers of the caches is not what a graph depends on.
    checks._known_caches.clear()
    for seed in range(3 if report.small else 20):
        for part in pages.memory:
            part.random_(0, 256)
        after = target.clone()
        want = pages.gathered(slots, 0, 2, 2)
        place(after, places, want, 0, 2)
        graph.replay()
        report.equal(buffers, want, f"gather, replay {seed}")
        for part, new in zip(target.memory, after.memory, strict=True):
            report.equal(part, new, f"scatter, replay {seed}")


def streams_and_threads(report: Report) -> None:
    """Several threads, each with its own stream and caches."""
    if report.device.type != "cuda":
        raise Skipped("streams need CUDA")
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(report.device)):
                pages = make_pages("bhnc-hnd", torch.float16, report.device, seed=seed)
                for round_ in range(2 if report.small else 20):
                    slots = random_slots(pages, 2, 30, skip=True, seed=round_)
                    check_call(report, pages, slots, what="thread")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def buffers_in_host_memory(report: Report) -> None:
    """Blocks that hold all layers, copied without a kernel."""
    if report.device.type != "cuda":
        raise Skipped("buffers in host memory are only apart from caches on a device")
    backing = torch.randint(0, 256, (9, 4, 16, 2, 64), dtype=torch.uint8, device=report.device)
    whole = backing.view(9, 1, 1, -1)
    layout = PagedLayout.native_blocks(whole)
    mapping = torch.tensor([[5, 0, 2, 3, 4], [1, -1, 8, 7, 6]])
    rows = backing.view(9, -1)[mapping.clamp(min=0).to(report.device)]
    chunk = rows.view(2, -1).cpu().pin_memory()
    for legacy in (False, True):
        for use_torch in (False, True):
            target = torch.zeros_like(whole)
            stream = torch.cuda.default_stream() if legacy else torch.cuda.Stream(report.device)
            stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.synchronize()
            context = plain_torch() if use_torch else contextlib.nullcontext()
            with torch.cuda.stream(stream), context:
                ops.scatter_kv([target], mapping, chunk, layout)
                stream.synchronize()
            kept = mapping[mapping >= 0].to(report.device)
            report.equal(target[kept], whole[kept], "scatter from the host")


def the_way_to_staging(report: Report) -> None:
    """Chunks to staging buffers and back over the ring, beside a compute load."""
    layers, tokens, shards = (2, 64, 2) if report.small else (8, 256, 2)
    pages = make_pages(
        "bhnc-nhd", torch.bfloat16, report.device, layers=layers, blocks=160, heads=4, head_size=64
    )
    target = pages.clone()
    for part in target.memory:
        part.zero_()
    size = layers * pages.layout.chunk_bytes(tokens, 2)
    pinned = report.device.type == "cuda"
    chunks = min(8, pages.layout.num_slots // tokens)
    slots = random_slots(pages, chunks, tokens, skip=False)
    staging = [
        [torch.full((size,), POISON, dtype=torch.uint8, pin_memory=pinned) for _ in range(shards)]
        for _ in range(chunks)
    ]
    call = LayerCall(pages.caches, pages.layout, 0, size, 2)
    back = LayerCall(target.caches, target.layout, 0, size, 2)
    want = pages.gathered(slots, 0, 2, shards)
    path, path_back = (
        DeviceKVCache(
            {shard: [replace(c, first_head=shard * c.heads)] for shard in range(shards)}, loads=2
        )
        for c in (call, back)
    )
    with compute_load(report.device) as step:
        under_way = []
        for chunk in range(chunks):
            while (copied := path.gather(slots[chunk], staging[chunk])) is None:
                step()
            under_way.append(copied)
            step()
        for copied in under_way:
            copied.wait()
        for chunk in range(chunks):
            for shard in range(shards):
                report.equal(staging[chunk][shard], want[chunk, shard].cpu(), "staging")
        fence = path_back.fence()
        threads = [
            threading.Thread(
                target=path_back.scatter,
                args=(shard, slots[chunk], staging[chunk][shard], fence),
            )
            for chunk in range(chunks)
            for shard in range(shards)
        ]
        for thread in threads:
            thread.start()
            step()
        for thread in threads:
            thread.join()
    again = target.gathered(slots, 0, 2, shards)
    report.equal(again, want, "back in the caches")
    path.close()
    path_back.close()


@contextlib.contextmanager
def compute_load(device: torch.device) -> Iterator[Callable[[], None]]:
    """A function that enqueues some work on the current stream."""
    a = torch.randn(512, 512, device=device)

    def step() -> None:
        torch.mm(a, a)

    yield step


def blocks_that_hold_all_layers(report: Report) -> None:
    """Caches with layers inside blocks, filled from page-locked staging without a kernel."""
    device, tokens, layers = report.device, 64, 6
    generator = torch.Generator(device=device).manual_seed(1)
    backing = torch.randint(
        0, 256, (9, layers, 16, 48), dtype=torch.uint8, device=device, generator=generator
    )
    caches = list(backing.unbind(1))
    layout = PagedLayout.from_mla(caches[0])
    call = LayerCall(caches, layout, 0, layers * layout.chunk_bytes(tokens), 1)
    pinned = device.type == "cuda"
    for mapped in (True, False):
        path = DeviceKVCache({0: [call]}, pinned=mapped)
        for seed in range(4):
            order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:4]
            slots = (order.view(-1, 1) * 16 + torch.arange(16)).view(-1)
            slots[seed * 7 :: 23] = -1
            payload = torch.randint(0, 256, (call.end,), dtype=torch.uint8)
            payload = payload.pin_memory() if pinned else payload
            want = backing.clone()
            rows = payload.to(device).view(layers, tokens, 48)
            kept = (slots >= 0).nonzero().view(-1)
            at = slots[kept].to(device)
            want[at // 16, :, at % 16] = rows[:, kept.to(device)].transpose(0, 1)
            path.scatter(0, slots, payload, path.fence())
            report.equal(backing, want, f"caches with layers inside blocks, {mapped}, {seed}")
        path.close()


def registered_memory(report: Report) -> None:
    """Memory pinned by the pool is page-locked for torch too, and copied directly to blocks."""
    if report.device.type != "cuda":
        raise Skipped("there is nothing to pin memory for")
    backing = torch.zeros(9, 4, 16, 48, dtype=torch.uint8, device=report.device)
    caches = list(backing.unbind(1))
    layout = PagedLayout.from_mla(caches[0])
    pool = BufferPool(1 << 20, kind="pinned")
    buffer = pool.allocate(4 * layout.chunk_bytes(32))
    if buffer is None:
        raise Skipped("the system lets no memory be pinned")
    report.comparisons += 1
    if not buffer.tensor.is_pinned():
        raise AssertionError("memory of cudaHostRegister is not pinned, says torch")
    buffer.tensor.random_(0, 256)
    # Refuses memory that is not.
    ops.scatter_kv(caches, torch.arange(16, 48), buffer.tensor, layout)
    torch.cuda.synchronize(report.device)
    want = buffer.tensor.clone().view(4, 2, 16, 48).transpose(0, 1).to(report.device)
    report.equal(backing[1:3], want, "blocks filled from pinned memory")
    buffer.release()
    pool.close()


def made_in_inference_mode(report: Report) -> None:
    """Another thread loads by device buffers that were made in inference mode."""
    pages = make_pages("bhnc-nhd", torch.bfloat16, report.device)
    slots = random_slots(pages, 1, 40, skip=True)
    size = len(pages.caches) * pages.layout.chunk_bytes(40)
    call = LayerCall(pages.caches, pages.layout, 0, size, pages.layout.heads)
    with torch.inference_mode():
        path = DeviceKVCache({0: [call]})
    payload = torch.randint(0, 256, (size,), dtype=torch.uint8)
    after = pages.clone()
    place(after, slots, payload.view(1, 1, -1).to(report.device), 0, pages.layout.heads)
    problems: list[BaseException] = []

    def load() -> None:
        try:
            path.scatter(0, slots[0], payload, path.fence())
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    for part, new in zip(pages.memory, after.memory, strict=True):
        report.equal(part, new, "scatter through buffers of inference mode")
    path.close()


def overwritten_blocks(report: Report) -> None:
    """The chunk does not contain what the engine writes after the gather was enqueued."""
    pages = make_pages("bhnc-nhd", torch.bfloat16, report.device, layers=4, blocks=64, heads=4)
    tokens = 256
    size = 4 * pages.layout.chunk_bytes(tokens)
    pinned = report.device.type == "cuda"
    call = LayerCall(pages.caches, pages.layout, 0, size, 4)
    path = DeviceKVCache({0: [call]})
    for seed in range(4 if report.small else 32):
        staging = torch.full((size,), POISON, dtype=torch.uint8, pin_memory=pinned)
        slots = random_slots(pages, 1, tokens, skip=False, seed=seed)
        want = pages.gathered(slots, 0, 4, 1)[0, 0].cpu()
        copied = path.gather(slots[0], [staging])
        if copied is None:
            raise AssertionError("no device buffer is free though all gathers have ended")
        for part in pages.memory:
            part.random_(0, 256)
        copied.wait()
        report.equal(staging, want, f"chunk {seed} of blocks that were overwritten")
    path.close()


def named_rows(pages: Pages, cache: Tensor) -> list[Tensor]:
    """K and V, or the single content, as views [blocks, slots of a block, heads, elements]."""
    if pages.form == "mla":
        return [cache.unsqueeze(2)]
    if pages.form == "2bnhd":
        return list(cache.unbind(0))
    if pages.form == "b2nhd":
        return list(cache.unbind(1))
    return list(cache.unflatten(3, (2, pages.head_size)).transpose(1, 2).unbind(3))


def write_by_torch(rows: Tensor, slots: Tensor, content: Tensor) -> None:
    """Write rows of tokens into K or V of a cache; see :func:`triton_writer.write`."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[rows.element_size()]
    size = rows.shape[1]
    rows.view(words)[slots // size, slots % size] = content.view(words)


def one_by_one(write: Callable[[Tensor, Tensor, Tensor], None]) -> Writer:
    """Make a writer of one for K or V alone."""

    def both(rows: Sequence[Tensor], slots: Tensor, contents: Sequence[Tensor]) -> None:
        for view, content in zip(rows, contents, strict=True):
            write(view, slots, content)

    return both


def learn_all(
    report: Report,
    write: Writer,
    *,
    forms: Sequence[str] = FORMS[:-1],
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float8_e4m3fn),
    block_size: int = 16,
    head_size: int = 32,
    padding: int = 8,
) -> None:
    """Learn the layout of each form from the effect of `write`, and compare."""
    device = report.device
    for form, dtype in itertools.product(forms, dtypes):
        for gaps in ((0, 0, 0, 0, 0), (0, 0, 3, 0, padding)):
            pages = make_pages(
                *(form, dtype, device),
                blocks=5,
                block_size=block_size,
                heads=2,
                head_size=head_size,
                gaps=gaps,
            )
            cache = pages.caches[0]
            rows = named_rows(pages, cache)

            def writes(
                slots: Tensor, key: Tensor, value: Tensor | None, *, rows: list[Tensor] = rows
            ) -> None:
                moved = []
                for view, content in zip(rows, (key, value), strict=False):
                    assert content is not None
                    moved.append(content.to(device).to(view.dtype))
                write(rows, slots.to(device), moved)

            shape = CacheShape(
                num_blocks=5,
                block_size=block_size,
                heads=rows[0].shape[2],
                head_size=rows[0].shape[3],
                kv_planes=len(rows),
                dtype=dtype,
            )
            before = pages.memory[0].clone()
            learned = learn_layout(cache, shape, writes)
            what = f"{form}, {dtype}, gaps {gaps}"
            if learned.layout != pages.layout:
                raise AssertionError(f"{what}: {learned} instead of {pages.layout}")
            report.equal(pages.memory[0], before, f"memory after learning {what}")


def learn_from(
    report: Report, library: str, make: Callable[[], Writer], block_size: int, head_size: int
) -> None:
    """Learn layouts from a library's writes, if the library can be used."""
    try:
        write = make()
    except ImportError as error:
        raise Skipped(f"no {library}: {error}") from None
    if report.device.type != "cuda":
        raise Skipped(f"{library}'s kernels need a GPU")
    trial = make_pages(
        "2bnhd", torch.bfloat16, report.device, block_size=block_size, head_size=head_size
    )
    content = torch.ones(1, 4, head_size, dtype=torch.bfloat16, device=report.device)
    slot = torch.zeros(1, dtype=torch.int64, device=report.device)
    try:
        write(named_rows(trial, trial.caches[0]), slot, [content, content])
        torch.cuda.synchronize(report.device)
    except Exception as error:
        # It may have no machine code for this device, and no compiler to make some.
        reason = str(error).strip().partition("\n")[0]
        raise Skipped(f"{library} does not run here: {type(error).__name__}: {reason}") from None
    learn_all(
        report,
        write,
        forms=("bhnc-hnd", "bhnc-nhd", "2bnhd", "b2nhd"),
        dtypes=(torch.bfloat16, torch.float16),
        block_size=block_size,
        head_size=head_size,
        padding=16,
    )


def layouts_learned_from_torch(report: Report) -> None:
    """Layouts are learned from writes by indexing."""
    learn_all(report, one_by_one(write_by_torch))


def layouts_learned_from_triton(report: Report) -> None:
    """Layouts are learned from writes of a Triton kernel."""
    try:
        import triton_writer
    except ImportError as error:
        raise Skipped(f"no Triton: {error}") from None
    if report.device.type != "cuda":
        raise Skipped("Triton's kernels need a GPU")
    learn_all(report, one_by_one(triton_writer.write))


def layouts_learned_from_flashinfer(report: Report) -> None:
    """Layouts are learned from FlashInfer's writes."""
    learn_from(report, "FlashInfer", flashinfer_writer, 16, 64)


def layouts_learned_from_flash_attn(report: Report) -> None:
    """Layouts are learned from flash-attn's writes, in blocks of 256 tokens."""
    learn_from(report, "flash-attn", flash_attn_writer, 256, 64)


def kernel_attributes(report: Report) -> None:
    """Machine code for this device, without spilled registers."""
    library = native.kernels(report.device.index) if report.device.type == "cuda" else None
    if library is None or library.device is None:
        raise Skipped("no kernels serve this device")
    major, _ = torch.cuda.get_device_capability(report.device)
    for gather, width in itertools.product((True, False), (16, 8, 4, 2, 1)):
        registers, spilled, _, code, ptx = (
            library.device.kernel(report.device.index, gather, width, which) for which in range(5)
        )
        report.comparisons += 1
        if spilled or registers > 64:
            raise AssertionError(
                f"width {width}: {registers} registers, {spilled} bytes of local memory"
            )
        if code // 10 != major and ptx // 10 > major:
            raise AssertionError(f"width {width}: machine code of sm_{code} on a device {major}.x")


GROUPS: tuple[Callable[[Report], None], ...] = (
    kernel_attributes,
    forms_dtypes_widths,
    chunks_shards_heads,
    sizes_of_models,
    deep_models,
    bad_slots_are_refused,
    far_offsets,
    the_same_as_torch,
    operators,
    graphs,
    streams_and_threads,
    buffers_in_host_memory,
    blocks_that_hold_all_layers,
    registered_memory,
    made_in_inference_mode,
    layouts_learned_from_torch,
    layouts_learned_from_triton,
    layouts_learned_from_flashinfer,
    layouts_learned_from_flash_attn,
    overwritten_blocks,
    the_way_to_staging,
)


@contextlib.contextmanager
def widths_noted(report: Report) -> Iterator[None]:
    """Record the vectors' width of each launch."""
    kept = native.kernels

    def noting(function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            width = function(*arguments)
            report.widths.add(width)
            return width

        return call

    def kernels(index: int | None) -> native.Library | None:
        library = kept(index)
        if library is None or library.device is None:
            return library
        noted = dataclasses.replace(
            library.device,
            gather=noting(library.device.gather),
            scatter=noting(library.device.scatter),
        )
        return dataclasses.replace(library, device=noted)

    native.kernels = kernels
    try:
        yield
    finally:
        native.kernels = kept


def run_checks(device: torch.device, *, small: bool = False, seconds: float = 240) -> Report:
    """Run all groups; those that would begin after `seconds` are skipped and named."""
    report = Report(device, small)
    began = time.monotonic()
    with widths_noted(report):
        for group in GROUPS:
            start, before = time.monotonic(), report.comparisons
            result: dict[str, object] = {"name": group.__name__}
            try:
                if start - began > seconds:
                    raise Skipped(f"{seconds:.0f} s have passed")
                torch.manual_seed(0)
                group(report)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            except Skipped as reason:
                result["skipped"] = str(reason)
            except Exception as error:
                result["failed"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            result["comparisons"] = report.comparisons - before
            result["seconds"] = round(time.monotonic() - start, 2)
            report.groups.append(result)
            state = next((key for key in ("failed", "skipped") if key in result), "ok")
            print(
                f"  {group.__name__:24} {state:8} {result['comparisons']:6} comparisons "
                f"{result['seconds']:6} s  {result.get(state, '')}",
                flush=True,
            )
    served = device.type == "cuda" and ops.implementation(device) == "cuda"
    if served and report.widths - {0} != {16, 8, 4, 2, 1}:
        report.groups.append(
            {"name": "widths", "failed": f"only {sorted(report.widths)} were launched"}
        )
    return report


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    report = run_checks(device, small=options.small, seconds=options.seconds)
    result = {
        "implementation": ops.implementation(device),
        "problem": ops.kernel_problem(device) if device.type == "cuda" else None,
        "widths": sorted(report.widths),
        "comparisons": report.comparisons,
        "groups": report.groups,
        "failed": report.failed,
    }
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
