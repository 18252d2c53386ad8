"""Groups of the parts ``smoke`` and ``checks``: gather and scatter against indexing.

Everything is compared byte for byte: buffers and caches are poisoned before each call, and what
must not be touched is compared as well.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch
from gpu_groups import Context, NotRun
from gpu_paged import DTYPES, FORMS, Paged, make_paged
from torch import Tensor

from kvshelf.kv import ops
from kvshelf.kv.caches import LayerCall, PendingCopy
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.layout_learning import CacheShape, learn_layout
from kvshelf.kv.native_copier import NativeCopier
from kvshelf.kv.ops import checks
from kvshelf.kv.ops import library as native
from kvshelf.kv.states import StateLayer, split_state, state_runs
from kvshelf.memory.arena import Arena
from kvshelf.pages import page_lock
from kvshelf.transfer.context import bytes_at

WIDTHS = (16, 8, 4, 1)
POISON = 0xAB
#: Writes [K, V] of tokens, each [tokens, heads, elements], to slots (int64, on the device) of
#: views of K and V [blocks, slots of a block, heads, elements].
Writer: TypeAlias = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor]], None]


# --- calls beside the reference ----------------------------------------------------

make_pages = functools.partial(make_paged, layers=3, blocks=7, block_size=16, heads=4, head_size=32)


def random_slots(pages: Paged, chunks: int, tokens: int, *, skip: bool, seed: int = 0) -> Tensor:
    """Return int64 CPU [chunks, tokens], all different except −1."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(pages.layout.num_slots, generator=generator)[: chunks * tokens]
    if skip:
        order[torch.rand(order.shape, generator=generator) < 0.15] = -1
    return order.view(chunks, tokens)


def check_call(
    ctx: Context,
    pages: Paged,
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
    device = ctx.device
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
    # Whatever does not wait for what is enqueued next comes too early.
    ctx.engine.fall_behind()
    memory.fill_(POISON)
    ops.gather_kv(pages.caches, slots, buffers, *arguments)
    ctx.equal(memory, expected, f"gather {what}")
    for part, old in zip(pages.memory, before, strict=True):
        ctx.equal(part, old, f"caches after gather {what}")

    incoming = torch.randint(0, 256, buffers.shape, dtype=torch.uint8, device=device)
    target, after = pages.clone(), pages.scattered(slots, incoming, first, heads)
    ctx.engine.fall_behind()
    buffers.copy_(incoming)
    ops.scatter_kv(target.caches, slots, buffers, *arguments)
    for part, new in zip(target.memory, after.memory, strict=True):
        ctx.equal(part, new, f"scatter {what}")
    ctx.equal(buffers.contiguous(), incoming, f"buffers after scatter {what}")


# --- groups of checks --------------------------------------------------------------


def forms_dtypes_widths(ctx: Context) -> None:
    """Each form × dtype × cause of the vectors' width."""
    dtypes = DTYPES[:2] if ctx.small else DTYPES
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
        pages = make_pages(form, dtype, ctx.device, **options)  # type: ignore[arg-type]
        tokens = max(1, min(48, pages.layout.num_slots) // 2)
        for skip in (False, True):
            slots = random_slots(pages, 1, tokens, skip=skip)
            what = f"{form} {dtype} {name}"
            check_call(ctx, pages, slots, lead=16, what=what)
    for lead, form in itertools.product((1, 2, 4, 8, 16), FORMS):
        pages = make_pages(form, torch.bfloat16, ctx.device)
        slots = random_slots(pages, 1, 5, skip=True)
        check_call(ctx, pages, slots, lead=lead, what=f"{form}, buffer at {lead}")
    if ctx.widths != set(WIDTHS):
        raise AssertionError(f"vectors of {sorted(ctx.widths)} bytes were used, not of {WIDTHS}")


def chunks_shards_heads(ctx: Context) -> None:
    """Several chunks and shards in one call, ranges of heads, gaps between buffers."""
    for form, chunks, shards in itertools.product(FORMS, (1, 3), (1, 2, 4)):
        pages = make_pages(form, torch.bfloat16, ctx.device, blocks=13)
        if shards > pages.layout.heads:
            continue
        tokens = 4 if form == "native" else 60
        for gap in (0, 16, 5):
            slots = random_slots(pages, chunks, tokens, skip=True, seed=chunks)
            what = f"{form}, {chunks} chunks, {shards} shards, gap {gap}"
            check_call(ctx, pages, slots, shards=shards, gap=gap, what=what)
        for first in range(pages.layout.heads):
            slots = random_slots(pages, chunks, 3, skip=False, seed=first)
            check_call(ctx, pages, slots, first=first, heads=1, what=f"{form}, head {first}")


def sizes_of_models(ctx: Context) -> None:
    """The shapes of real models, whole chunks of 256 tokens in blocks of 16."""
    layers = 2 if ctx.small else 32
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
            ctx.device,
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
            check_call(ctx, pages, slots, shards=count, what=what)


def deep_models(ctx: Context) -> None:
    """More layers than one launch takes."""
    pages = make_pages("mla", torch.uint8, ctx.device, layers=300, blocks=2, head_size=8)
    check_call(ctx, pages, random_slots(pages, 2, 7, skip=True), what="deep")


def bad_slots_are_refused(ctx: Context) -> None:
    """A slot outside the cache is refused before anything is launched."""
    pages = make_pages("bhnc-nhd", torch.bfloat16, ctx.device)
    size = len(pages.caches) * pages.layout.chunk_bytes(20)
    for bad in (pages.layout.num_slots, -2, 2**31, 2**32 + 1, 2**63 - 1, -(2**63)):
        slots = random_slots(pages, 2, 20, skip=True)
        slots[1, 7] = bad
        out = torch.full((2, size), POISON, dtype=torch.uint8, device=ctx.device)
        untouched, target = out.clone(), pages.clone()
        for operate in (ops.gather_kv, ops.scatter_kv):
            try:
                operate(target.caches, slots, out, pages.layout)
            except ValueError:
                continue
            raise AssertionError(f"slot {bad} was not refused")
        ctx.equal(out, untouched, f"buffers after slot {bad}")
        for part, old in zip(target.memory, pages.memory, strict=True):
            ctx.equal(part, old, f"caches after slot {bad}")


def far_offsets(ctx: Context) -> None:
    """Rows beyond 4 GiB in a cache and in a buffer."""
    ctx.needs_gpu("takes 13 GiB of GPU memory")
    free, _ = torch.cuda.mem_get_info(ctx.device)
    if free < 16 << 30:
        raise NotRun(f"only {free >> 30} GiB of GPU memory are free, 16 are needed")
    blocks, block_size, content = 300_000, 16, 1024  # 4.9 GB
    cache = torch.empty(blocks, block_size, content, dtype=torch.uint8, device=ctx.device)
    edge = 2**32 // content
    edges = torch.tensor([blocks * block_size - 1, edge, edge - 1])
    others = torch.randperm(blocks * block_size)[: 2**16 + 3]
    others = others[~torch.isin(others, edges)]
    slots = torch.cat([edges, others])[: 2**16].view(1, -1)
    known = torch.randint(0, 256, (2**16, content), dtype=torch.uint8, device=ctx.device)
    layout = PagedLayout.from_mla(cache)
    cache.fill_(POISON)
    ops.scatter_kv([cache], slots, known.view(1, -1), layout)
    index = slots[0].to(ctx.device)
    ctx.equal(cache.view(-1, content)[index], known, "scatter beyond 4 GiB")
    out = torch.empty(1, known.numel(), dtype=torch.uint8, device=ctx.device)
    ops.gather_kv([cache], slots, out, layout)
    ctx.equal(out.view_as(known), known, "gather beyond 4 GiB")
    del out
    chosen = torch.arange(edge + 4096).remainder(2**16).to(ctx.device)
    mapping = slots[0][chosen.cpu()].view(1, -1)
    large = torch.empty(1, mapping.numel() * content, dtype=torch.uint8, device=ctx.device)
    ops.gather_kv([cache], mapping, large, layout)
    ctx.equal(large.view(-1, content)[-4096:], known[chosen[-4096:]], "buffer beyond 4 GiB")


def graphs(ctx: Context) -> None:
    """Captured once, replayed with other bytes, after slots and known caches were cleared."""
    ctx.needs_gpu("CUDA graphs need CUDA")
    pages = make_pages("bhnc-nhd", torch.bfloat16, ctx.device, layers=140)
    target = pages.clone()
    layout = pages.layout
    mapping = random_slots(pages, 2, 20, skip=True)
    back = random_slots(pages, 2, 20, skip=True, seed=9)
    slots, places = mapping.clone(), back.clone()
    size = len(pages.caches) * layout.chunk_bytes(20, 2)
    buffers = torch.full((2, 2, size), POISON, dtype=torch.uint8, device=ctx.device)
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
    for seed in range(3 if ctx.small else 20):
        for part in pages.memory:
            part.random_(0, 256)
        want = pages.gathered(slots, 0, 2, 2)
        after = target.scattered(places, want, 0, 2)
        graph.replay()
        ctx.equal(buffers, want, f"gather, replay {seed}")
        for part, new in zip(target.memory, after.memory, strict=True):
            ctx.equal(part, new, f"scatter, replay {seed}")


def streams_and_threads(ctx: Context) -> None:
    """Several threads, each with its own stream and caches."""
    ctx.needs_gpu("streams need CUDA")
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(ctx.device)):
                pages = make_pages("bhnc-hnd", torch.float16, ctx.device, seed=seed)
                for round_ in range(2 if ctx.small else 20):
                    slots = random_slots(pages, 2, 30, skip=True, seed=round_)
                    check_call(ctx, pages, slots, what="thread")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def made_in_inference_mode(ctx: Context) -> None:
    """Another thread loads by device buffers that were made in inference mode."""
    pages = make_pages("bhnc-nhd", torch.bfloat16, ctx.device)
    slots = random_slots(pages, 1, 40, skip=True)
    size = len(pages.caches) * pages.layout.chunk_bytes(40)
    call = LayerCall(pages.caches, pages.layout, 0, size, pages.layout.heads)
    with torch.inference_mode():
        path = ctx.device_caches({0: [call]})
    payload = torch.randint(0, 256, (size,), dtype=torch.uint8)
    incoming = payload.view(1, 1, -1).to(ctx.device)
    after = pages.scattered(slots, incoming, 0, pages.layout.heads)
    problems: list[BaseException] = []

    fence = path.fence()

    def load() -> None:
        try:
            path.scatter(0, slots[0], payload, fence)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    for part, new in zip(pages.memory, after.memory, strict=True):
        ctx.equal(part, new, "scatter through buffers of inference mode")
    path.close()


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
    ctx: Context,
    write: Writer,
    *,
    forms: Sequence[str] = FORMS[:-1],
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float8_e4m3fn),
    block_size: int = 16,
    head_size: int = 32,
    padding: int = 8,
) -> None:
    """Learn the layout of each form from the effect of `write`, and compare."""
    device = ctx.device
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
            rows = pages.named(cache)

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
            ctx.equal(pages.memory[0], before, f"memory after learning {what}")


def layouts_learned_from_torch(ctx: Context) -> None:
    """Layouts are learned from writes by indexing."""
    learn_all(ctx, one_by_one(write_by_torch))


def layouts_learned_from_triton(ctx: Context) -> None:
    """Layouts are learned from writes of a Triton kernel."""
    ctx.needs_gpu("Triton's kernels need a GPU")
    try:
        import triton_writer
    except ImportError as error:
        raise NotRun(f"no Triton: {error}") from None
    learn_all(ctx, one_by_one(triton_writer.write))


def kernel_attributes(ctx: Context) -> None:
    """Machine code for this device, without spilled registers."""
    ctx.needs_gpu("an emulated device has no machine code")
    library = native.kernels(ctx.device.index)
    assert library is not None and library.device is not None
    major, _ = torch.cuda.get_device_capability(ctx.device)
    found = {}
    for gather, width in itertools.product((True, False), WIDTHS):
        registers, spilled, _, code, ptx = (
            library.device.kernel(ctx.device.index, gather, width, which) for which in range(5)
        )
        found[f"{'gather' if gather else 'scatter'}, {width}"] = [registers, code, ptx]
        ctx.comparisons += 1
        if spilled or registers > 64:
            raise AssertionError(
                f"width {width}: {registers} registers, {spilled} bytes of local memory"
            )
        if code // 10 != major and ptx // 10 > major:
            raise AssertionError(f"width {width}: machine code of sm_{code} on a device {major}.x")
    ctx.fact("registers, machine code, PTX", found)


def registered_memory(ctx: Context) -> None:
    """Memory registered by the pool is page-locked for torch too."""
    ctx.needs_gpu("there is nothing to pin memory for")
    with ctx.staging(1, 1 << 20) as (buffer,):
        ctx.comparisons += 1
        if not buffer.is_pinned():
            raise AssertionError("memory of cudaHostRegister is not pinned, says torch")
        buffer.random_(0, 256)
        ctx.equal(buffer.to(ctx.device, non_blocking=True), buffer, "copied from pinned memory")
    registered_for_reading(ctx)


def registered_for_reading(ctx: Context) -> None:
    """A node server's memory, which its clients map for reading only."""
    arena = Arena(64 << 20, shared=True)
    arena.tensor.random_(0, 256)
    assert arena.fd is not None
    view = memoryview(mmap.mmap(arena.fd, arena.nbytes, prot=mmap.PROT_READ))
    try:
        unlock = page_lock(view, ctx.device)
    except RuntimeError as error:
        ctx.fact("memory for reading only", str(error), f"no memory for reading only: {error}")
        return
    finally:
        content = arena.tensor.clone()
        arena.close()
    target = torch.empty(view.nbytes, dtype=torch.uint8, device=ctx.device)
    stream = torch.cuda.Stream(ctx.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        target.copy_(bytes_at(view), non_blocking=True)
    # A copy from memory that is not page-locked would have waited.
    waited = stream.query()
    stream.synchronize()
    unlock()
    ctx.equal(target, content.to(ctx.device), "a copy from memory for reading only")
    ctx.fact(
        "memory for reading only",
        "copied from in the call" if waited else "copied from in the background",
        f"memory for reading only: its copy {'waited' if waited else 'did not wait'}",
    )


def blocks_that_hold_all_layers(ctx: Context) -> None:
    """MLA with layers inside blocks of 16 and 64 tokens: loads from staging, by both ways."""
    device = ctx.device
    layers, row, tokens = (6, 48, 128) if ctx.small else (61, 1152, 256)
    for block in (16, 64):
        count = 3 * tokens // block
        backing = torch.randint(
            0, 256, (count, layers, block, row), dtype=torch.uint8, device=device
        )
        caches = list(backing.unbind(1))
        layout = PagedLayout.from_mla(caches[0])
        pages = Paged("mla", [backing], caches, layout)
        size = layers * layout.chunk_bytes(tokens)
        call = LayerCall(caches, layout, 0, size, 1)
        with ctx.staging(1, size) as (payload,):
            for mapped, seed in itertools.product((True, False), range(3)):
                path = ctx.device_caches({0: [call]}, pinned=mapped)
                order = torch.randperm(count)[: tokens // block]
                slots = (order.view(-1, 1) * block + torch.arange(block)).view(-1)
                slots[seed * 7 :: 23] = -1
                payload.random_(0, 256)
                incoming = payload.to(device).view(1, 1, -1)
                want = pages.scattered(slots.view(1, -1), incoming, 0, 1).memory[0]
                path.scatter(0, slots, payload, path.fence())
                ctx.equal(backing, want, f"blocks of {block} with all layers, {mapped}, {seed}")
                path.close()


def states(ctx: Context) -> None:
    """States of layers in two cache groups, to staging and back into other blocks."""
    shards, layers = 2, 3 if ctx.small else 36
    shapes, dtypes = [(3, 512), (4, 64, 64)], [torch.bfloat16, torch.float32]
    state = split_state("gdn_attn", shapes, dtypes, 1, False)
    memory = [
        torch.randint(0, 256, (9, state.nbytes + 192), dtype=torch.uint8, device=ctx.device)
        for _ in range(layers)
    ]
    runs, units = state_runs(
        [
            StateLayer(part.view(torch.int8)[:, None, None, : state.nbytes], state, number % 2)
            for number, part in enumerate(memory)
        ],
        shards,
    )
    ends = list(
        itertools.accumulate(
            len(run.caches) * run.layout.chunk_bytes(run.layout.block_size, 1) for run in runs
        )
    )
    calls = {
        shard: [
            LayerCall(run.caches, run.layout, start, end, 1, shard, first_slot=run.first_slot)
            for run, start, end in zip(runs, [0, *ends], ends, strict=False)
        ]
        for shard in range(shards)
    }

    def slots(blocks: tuple[int, int]) -> Tensor:
        return torch.tensor([slot for group, of in units.items() for slot in of.of(blocks[group])])

    def payload(shard: int, block: Tensor) -> Tensor:
        conv, ssm = block[: 3 * 1024].view(3, 512, 2), block[3 * 1024 : state.nbytes].view(4, -1)
        sections = [part.chunk(shards, 1)[shard] for part in conv.split((128, 128, 256), 1)]
        return torch.cat([part.reshape(-1) for part in (*sections, ssm.chunk(shards)[shard])])

    there, here = (5, 2), (1, 7)
    path = ctx.device_caches(calls)
    with ctx.staging(shards, ends[-1]) as staging:
        for buffer in staging:
            buffer.fill_(POISON)
        copied = path.gather(slots(there), staging)
        if copied is None:
            raise AssertionError("no device buffer is free")
        copied.wait()
        blocks = [part[there[number % 2]].cpu() for number, part in enumerate(memory)]
        for shard, buffer in enumerate(staging):
            ctx.equal(buffer, torch.cat([payload(shard, block) for block in blocks]), "states")
        want = [part.clone() for part in memory]
        for number, part in enumerate(want):
            part[here[number % 2], : state.nbytes] = part[there[number % 2], : state.nbytes]
        path.scatter_chunk(range(shards), slots(here), staging, path.fence())
        for part, expected in zip(memory, want, strict=True):
            ctx.equal(part, expected, "states back in the caches")
    path.close()


def overwritten_blocks(ctx: Context) -> None:
    """The chunk has what the engine wrote before the gather, and nothing that it wrote later."""
    pages = make_pages("bhnc-nhd", torch.bfloat16, ctx.device, layers=4, blocks=64, heads=4)
    tokens = 256
    size = 4 * pages.layout.chunk_bytes(tokens)
    path = ctx.device_caches({0: [LayerCall(pages.caches, pages.layout, 0, size, 4)]})
    with ctx.staging(1, size) as (staging,):
        for seed in range(4 if ctx.small else 32):
            staging.fill_(POISON)
            fresh = pages.clone()
            for part in fresh.memory:
                part.random_(0, 256)
            slots = random_slots(pages, 1, tokens, skip=False, seed=seed)
            want = fresh.gathered(slots, 0, 4, 1)[0, 0].cpu()
            ctx.engine.fall_behind()
            for part, new in zip(pages.memory, fresh.memory, strict=True):
                ctx.engine.enqueue(part.copy_, new)
            copied = path.gather(slots[0], [staging])
            if copied is None:
                raise AssertionError("no device buffer is free though all gathers have ended")
            for part in pages.memory:
                ctx.engine.enqueue(part.random_, 0, 256)
            copied.wait()
            ctx.equal(staging, want, f"chunk {seed} of blocks that were overwritten")
            ctx.engine.finish()
    path.close()


def loads_behind_the_engine(ctx: Context) -> None:
    """What the engine had enqueued before a load, such as zeroing its blocks, comes before it."""
    pages = make_pages("bhnc-nhd", torch.bfloat16, ctx.device, blocks=16)
    _loads_behind_the_engine(ctx, pages, 2)
    # Pieces of 64 KiB, which are copied without a kernel.
    backing = torch.zeros(16, 3, 16, 4096, dtype=torch.uint8, device=ctx.device)
    caches = list(backing.unbind(1))
    pages = Paged("mla", [backing], caches, PagedLayout.from_mla(caches[0]))
    _loads_behind_the_engine(ctx, pages, 1)


def _loads_behind_the_engine(ctx: Context, pages: Paged, shards: int) -> None:
    heads, blocks = pages.layout.heads // shards, 4
    size = len(pages.caches) * pages.layout.chunk_bytes(blocks * 16, heads)
    path = ctx.device_caches(calls_of(pages, shards, size), pinned=True)
    with ctx.staging(shards, size) as payloads, ThreadPoolExecutor(1) as pool:
        for seed in range(3 if ctx.small else 16):
            for payload in payloads:
                payload.random_(0, 256)
            for part in pages.memory:
                part.fill_(POISON)
            order = torch.randperm(16, generator=torch.Generator().manual_seed(seed))[:blocks]
            slots = (order.view(-1, 1) * 16 + torch.arange(16)).view(-1)
            ctx.engine.fall_behind()
            for part in pages.memory:
                ctx.engine.enqueue(part.zero_)
            fence = path.fence()
            pool.submit(path.scatter_chunk, range(shards), slots, payloads, fence).result()
            ctx.engine.finish()
            want = torch.stack(payloads).unsqueeze(0).to(ctx.device)
            found = pages.gathered(slots.view(1, -1), 0, heads, shards)
            ctx.equal(found, want, f"blocks that were zeroed before load {seed}")
            written = sum(int(part.count_nonzero()) for part in pages.memory)
            if written != int(want.count_nonzero()):
                raise AssertionError(f"load {seed} wrote to other blocks")
    path.close()


def calls_of(pages: Paged, shards: int, payload: int) -> dict[int, list[LayerCall]]:
    """The copy calls of shards of equally many heads."""
    heads = pages.layout.heads // shards
    return {
        shard: [LayerCall(pages.caches, pages.layout, 0, payload, heads, shard * heads)]
        for shard in range(shards)
    }


@dataclass
class Ways:
    """Caches, others of zeros, and the paths from the ones to staging and into the others."""

    pages: Paged
    target: Paged
    shards: int
    tokens: int
    payload: int
    path: DeviceKVCache
    back: DeviceKVCache

    def gathered(self, of: Paged, slots: Tensor) -> Tensor:
        """See :meth:`Paged.gathered`."""
        return of.gathered(slots, 0, of.layout.heads // self.shards, self.shards)


@contextlib.contextmanager
def both_ways(ctx: Context, chunks: int) -> Iterator[Ways]:
    """Caches for chunks of 8 objects of 4 MiB, or of 2 of 1 MiB: several pieces for each."""
    layers, tokens, shards = (8, 64, 2) if ctx.small else (32, 256, 8)
    pages = make_pages(
        *("bhnc-nhd", torch.bfloat16, ctx.device),
        layers=layers,
        blocks=chunks * tokens // 16,
        heads=8,
        head_size=128,
    )
    target = pages.clone()
    for part in target.memory:
        part.zero_()
    payload = layers * pages.layout.chunk_bytes(tokens, 8 // shards)
    path, back = (
        ctx.device_caches(calls_of(of, shards, payload), loads=2, pinned=True)
        for of in (pages, target)
    )
    yield Ways(pages, target, shards, tokens, payload, path, back)
    path.close()
    back.close()


def gather_all(
    ctx: Context, ways: Ways, slots: Tensor, staging: Sequence[Sequence[Tensor]]
) -> list[PendingCopy]:
    """Gather all chunks, beside a compute load, as device buffers become free."""
    a = torch.randn(512, 512, device=ctx.device)
    under_way = []
    for chunk, payloads in enumerate(staging):
        for payload in payloads:
            payload.fill_(POISON)
        while (copied := ways.path.gather(slots[chunk], payloads)) is None:
            torch.mm(a, a)
        under_way.append(copied)
        torch.mm(a, a)
    return under_way


def the_way_to_staging(ctx: Context) -> None:
    """Chunks of objects to staging and back over the ring, beside a compute load."""
    chunks = 4 if ctx.small else 8
    a = torch.randn(512, 512, device=ctx.device)
    with both_ways(ctx, chunks) as ways, ThreadPoolExecutor(4) as pool:
        shards, back = range(ways.shards), ways.back
        slots = random_slots(ways.pages, chunks, ways.tokens, skip=False)
        want = ways.gathered(ways.pages, slots)
        with ctx.staging(chunks * ways.shards, ways.payload) as buffers:
            staging = [buffers[chunk * ways.shards :][: ways.shards] for chunk in range(chunks)]
            for copied in gather_all(ctx, ways, slots, staging):
                copied.wait()
            for chunk, shard in itertools.product(range(chunks), shards):
                ctx.equal(staging[chunk][shard], want[chunk, shard].cpu(), "staging")
            fence = back.fence()
            # Even chunks as a whole, odd ones object by object.
            loads = [
                pool.submit(back.scatter_chunk, shards, slots[i], staging[i], fence)
                for i in range(0, chunks, 2)
            ] + [
                pool.submit(back.scatter, shard, slots[i], staging[i][shard], fence)
                for i, shard in itertools.product(range(1, chunks, 2), shards)
            ]
            while not all(load.done() for load in loads):
                torch.mm(a, a)
            for load in loads:
                load.result()
            ctx.equal(ways.gathered(ways.target, slots), want, "back in the caches")


def captures_beside_copies(ctx: Context) -> None:
    """The engine captures graphs while chunks are on their way to the host, and others back."""
    chunks = 4
    a = torch.randn(512, 512, device=ctx.device)
    torch.mm(a, a)
    with both_ways(ctx, chunks) as ways, ThreadPoolExecutor(2) as pool:
        slots = random_slots(ways.pages, chunks, ways.tokens, skip=False)
        want = ways.gathered(ways.pages, slots)
        with ctx.staging(2 * chunks * ways.shards, ways.payload) as buffers:
            staging = [buffers[chunk * ways.shards :][: ways.shards] for chunk in range(2 * chunks)]
            for copied in gather_all(ctx, ways, slots, staging[chunks:]):
                copied.wait()
            done: list[int] = []

            def load(chunk: int, fence: object) -> None:
                ways.back.scatter_chunk(
                    range(ways.shards), slots[chunk], staging[chunks + chunk], fence
                )
                done.append(chunk)

            for round_ in range(2 if ctx.small else 10):
                under_way = gather_all(ctx, ways, slots, staging[:chunks])
                fence = ways.back.fence()
                loads = [pool.submit(load, chunk, fence) for chunk in range(chunks)]
                before, ends = len(done), time.monotonic() + 20
                with ctx.engine.capturing():
                    # Loads end meanwhile: so there were copies beside the capture.
                    while len(done) < before + 2 and time.monotonic() < ends:
                        torch.mm(a, a)
                        time.sleep(0.5e-3)
                    beside = len(done) - before
                for one in loads:
                    one.result()
                for copied in under_way:
                    copied.wait()
                if beside < 2:
                    raise AssertionError(f"no load ended within 20 s beside capture {round_}")
                for chunk, shard in itertools.product(range(chunks), range(ways.shards)):
                    ctx.equal(staging[chunk][shard], want[chunk, shard].cpu(), "beside a capture")
            ctx.equal(ways.gathered(ways.target, slots), want, "back in the caches")


#: Bytes per second of any link that serves a GPU: the slowest is 16 lanes of PCIe 3.
LEAST_RATE = 10e9


def rates_are_learned(ctx: Context) -> None:
    """The pace of the copies is that of the link: both directions learn it from their pieces."""
    chunks = 4
    with both_ways(ctx, chunks) as ways:
        slots = random_slots(ways.pages, chunks, ways.tokens, skip=False)
        with ctx.staging(chunks * ways.shards, ways.payload) as buffers:
            staging = [buffers[chunk * ways.shards :][: ways.shards] for chunk in range(chunks)]
            for _ in range(5):
                for copied in gather_all(ctx, ways, slots, staging):
                    copied.wait()
                fence = ways.back.fence()
                for chunk in range(chunks):
                    ways.back.scatter_chunk(range(ways.shards), slots[chunk], staging[chunk], fence)
            found = {}
            for name, path, of_stores in (("out", ways.path, True), ("in", ways.back, False)):
                copier = path._copier
                assert isinstance(copier, NativeCopier)
                found[name] = copier.rate(of_stores=of_stores)
                ctx.comparisons += 1
    told = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in found.items())
    ctx.fact("learned bytes per second", found, f"learned rates, GB/s: {told}")
    if min(found.values()) < LEAST_RATE:
        raise AssertionError(f"learned rates: {told} GB/s, less than {LEAST_RATE / 1e9:.0f}")


def tails(ctx: Context) -> None:
    """Tails of several lengths to staging and back, by the buffers of whole chunks."""
    with both_ways(ctx, 4) as ways:
        tokens, payload = ways.tokens, ways.payload
        with ctx.staging(ways.shards, payload) as buffers:
            for count in (1, 7, tokens // 2, tokens - 1):
                slots = random_slots(ways.pages, 1, count, skip=False, seed=count)
                want = ways.gathered(ways.pages, slots)
                staging = [buffer[: payload // tokens * count] for buffer in buffers]
                for buffer in buffers:
                    buffer.fill_(POISON)
                copied = ways.path.of_tail(count).gather(slots[0], staging)
                if copied is None:
                    raise AssertionError("no device buffer is free")
                copied.wait()
                for shard, part in enumerate(staging):
                    ctx.equal(part, want[0, shard].cpu(), f"a tail of {count} tokens")
                back = ways.back.of_tail(count)
                back.scatter_chunk(range(ways.shards), slots[0], staging, ways.back.fence())
                found = ways.gathered(ways.target, slots)
                ctx.equal(found, want, f"a tail of {count} tokens, back in the caches")


def nvcc(ctx: Context) -> None:
    """The library that nvcc builds."""
    if ctx.cuda:
        kernel_attributes(ctx)
    forms_dtypes_widths(ctx)
    deep_models(ctx)
    the_way_to_staging(ctx)


def fallback(ctx: Context) -> None:
    """What serves a GPU without the kernels."""
    chunks_shards_heads(ctx)
    deep_models(ctx)
    the_way_to_staging(ctx)
    tails(ctx)


def under_memcheck(ctx: Context) -> None:
    """What memcheck looks at, in memory that torch takes from CUDA piece by piece."""
    for check in (
        forms_dtypes_widths,
        chunks_shards_heads,
        sizes_of_models,
        deep_models,
        bad_slots_are_refused,
        the_way_to_staging,
        overwritten_blocks,
        loads_behind_the_engine,
        tails,
        blocks_that_hold_all_layers,
        states,
    ):
        check(ctx)
