"""A rank of tensor parallelism, beside the way in which vLLM copies the same bytes.

vLLM's OffloadingConnector copies each page of each layer on its own: by one batch of copies of the
driver for each request, and pages below 28 KiB into the GPU by a Triton kernel of 12 programs.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from gpu_design import Batch
from gpu_figures import COPY_GOAL, RING, THREADS
from gpu_groups import Context
from gpu_measure import (
    LLAMA,
    Caches,
    Clock,
    Shape,
    copies,
    load_all,
    make_caches,
    new_stream,
    on_stream,
    random_bytes,
    sized,
    store_all,
)
from torch import Tensor

#: One of 8 ranks of a model with 8 KV heads: a chunk is one object of 4 MiB.
RANK: Final = replace(LLAMA, heads=1, shards=1, chunks=256)
#: Chunks of a request: 8,192 tokens.
REQUEST: Final = 32
#: Times as fast as vLLM's way.
STORE_GOAL: Final = 3.0
LOAD_GOAL: Final = 1.2


def one_head(ctx: Context) -> None:
    """Pages of 8 KiB, and K and V apart, of 4 KiB."""
    for form in ("NHD", "K in front of V"):
        shape = sized(ctx, replace(RANK, form=form))
        _one_head(ctx, replace(shape, heads=1, shards=1))
        if ctx.cuda:
            torch.cuda.empty_cache()


def pages_of(caches: Caches, chunk: int) -> tuple[list[int], int]:
    """The addresses of a chunk's pages, layer by layer, and the bytes of one."""
    shape = caches.shape
    blocks = (caches.slots(chunk)[:: shape.block] // shape.block).tolist()
    found = []
    page = 0
    for view in caches.views:
        # K and V of a block beside each other, or in two halves of the cache.
        planes = view.unbind(0) if shape.form == "K in front of V" else [view]
        for plane in planes:
            page = plane.stride(0) * plane.element_size()
            found += [plane.data_ptr() + block * page for block in blocks]
    return found, page


class Pages:
    """Copies of the pages of all chunks between the caches and staging, one by one, as vLLM's."""

    def __init__(self, ctx: Context, caches: Caches, staging: Sequence[Tensor]) -> None:
        self._requests: list[tuple[array[int], array[int]]] = []
        self.page = 0
        for first in range(0, len(staging), REQUEST):
            paged, host = array("Q"), array("Q")
            for chunk in range(first, min(first + REQUEST, len(staging))):
                pages, self.page = pages_of(caches, chunk)
                start = staging[chunk].data_ptr()
                paged.extend(pages)
                host.extend(start + number * self.page for number in range(len(pages)))
            self._requests.append((paged, host))
        self._stream = new_stream(ctx)
        self._batches = {
            load: [
                Batch(ctx, *((paged, host) if load else (host, paged)), self.page)
                for paged, host in self._requests
            ]
            for load in (True, False)
        }

    def by_batch(self, *, load: bool) -> None:
        """Enqueue one batch of the driver for each request."""
        for batch in self._batches[load]:
            batch.enqueue("any, default" if load else "stream, default", self._stream)

    def by_triton(self, copy: Callable[..., None]) -> Callable[[], None]:
        """Return what loads by the kernel of vLLM: one launch for each request."""
        tables = [
            tuple(torch.frombuffer(table, dtype=torch.int64) for table in (host, paged))
            for paged, host in self._requests
        ]
        sizes = [torch.full_like(host, self.page) for host, _ in tables]
        width = min(1 << (self.page - 1).bit_length(), 8192)

        def load() -> None:
            with on_stream(self._stream):
                for (host, paged), size in zip(tables, sizes, strict=True):
                    copy(host, paged, size, bytes_per_chunk=width)

        return load


def _triton_copy(ctx: Context) -> Callable[..., None] | None:
    """Return the function with which vLLM loads small pages, if it runs here."""
    try:
        ctx.needs_gpu("Triton's kernels need a GPU")
        copy: Callable[..., None] = importlib.import_module("vllm_swap_blocks").swap_blocks_batch
        some = torch.zeros(512, dtype=torch.int64, pin_memory=True)
        places = some.data_ptr() + torch.arange(32) * 64
        # It copies pieces onto themselves.
        copy(places, places, torch.full_like(places, 64), bytes_per_chunk=64)
        torch.cuda.synchronize(ctx.device)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:300]
        ctx.fact("vLLM's Triton kernel", why, f"vLLM's Triton kernel does not run: {why}")
        return None
    return copy


def _one_head(ctx: Context, shape: Shape) -> None:
    caches, clock = make_caches(shape, ctx.device), Clock(ctx, samples=5)
    total = shape.chunks * shape.chunk_bytes
    path = caches.on_device(ctx, ring=RING, loads=THREADS, pinned=True)
    with ctx.staging(shape.chunks, shape.object_bytes) as staging:
        pieces = list(random_bytes(total, ctx.device).view(shape.chunks, -1))
        out, inward = copies(clock, staging, pieces), copies(clock, pieces, staging)
        del pieces
        theirs = Pages(ctx, caches, staging)
        what = f"{shape.chunks} chunks, pages of {theirs.page} bytes"
        before = [view.clone() for view in caches.views]

        def loaded(by: str) -> None:
            clock.synchronize()
            for view, old in zip(caches.views, before, strict=True):
                ctx.equal(view.view(torch.int16), old.view(torch.int16), f"{what}, {by}")
                view.zero_()
            clock.synchronize()

        store = clock.wall(lambda: store_all(path, caches, staging))
        for view in caches.views:
            view.zero_()
        load = clock.wall(lambda: load_all(path, caches, staging, THREADS))
        loaded("loaded by kvshelf")
        floor = "copies of whole objects"
        ctx.row(f"store {what}", store, floor, out, total, COPY_GOAL)
        ctx.row(f"load {what}", load, floor, inward, total, COPY_GOAL)
        for view, old in zip(caches.views, before, strict=True):
            view.copy_(old)
        batch = clock.wall(lambda: theirs.by_batch(load=False))
        ctx.row(f"store {what}, against vLLM", store, "batch", batch, total, STORE_GOAL)
        for view in caches.views:
            view.zero_()
        # vLLM takes its kernel for pages of this size, and the batch where Triton does not run.
        copy = _triton_copy(ctx)
        ways: dict[str, Callable[[], None]] = {"batch": lambda: theirs.by_batch(load=True)}
        if copy is not None:
            ways["Triton kernel"] = theirs.by_triton(copy)
        for name, way in ways.items():
            took = clock.wall(way)
            loaded(f"loaded by vLLM's {name}")
            goal = LOAD_GOAL if name == list(ways)[-1] else None
            ctx.row(f"load {what}, against vLLM", load, name, took, total, goal)
    path.close()
