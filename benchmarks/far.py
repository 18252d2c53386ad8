"""Rows ``far/*``: the load of one request from a real S3 server, without and with 20 ms latency.

64 MiB in 16 objects are read, verified and passed to a paged cache that discards them, so the rows
measure the way from storage to staging. Server, proxy and kvshelf share the processors of one
machine, so rows show the effect of latency, not of networks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch

from benchmarks.measure import Row, Work, measure_pairs
from benchmarks.proxy import DelayingProxy
from benchmarks.samples import LARGE, TINY, fill, make_chunks, make_format
from benchmarks.servers import BUCKET, MissingServerError, S3Server
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import DONE, KVMemory, PendingCopy
from kvshelf.kv.topology import ShardPlan
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, ShelfView
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import AnyShelf, TieredView
from kvshelf.transfer.context import ChunkSlots, TransferContext
from kvshelf.transfer.prefetch import KindMemory, Prefetcher
from kvshelf.transfer.staging import StagingPool
from kvshelf.transfer.transfers import Transfers, default_io_threads

_DELAY_SECONDS = 20e-3
_LOAD_SECONDS = 60.0
_CHUNKS = 2


class Nowhere(KVMemory):
    """A paged cache that discards its content."""

    def gather(self, slots: torch.Tensor, payloads: Sequence[torch.Tensor]) -> PendingCopy:
        """Never called."""
        return DONE

    def scatter(
        self, shard: int, slots: torch.Tensor, payload: torch.Tensor, fence: object = None
    ) -> None:
        """Discard the payload."""


class RepeatedLoads:
    """Loads of the same chunks, one after another."""

    def __init__(
        self,
        shelf: ShelfView,
        chunks: Sequence[Chunk],
        threads: int,
        memory: KVMemory | None = None,
    ) -> None:
        fmt = shelf.fmt
        size = fmt.object_size(0)
        none = torch.empty(0, dtype=torch.int64)
        self._items = [ChunkSlots(chunk, none, memory or Nowhere()) for chunk in chunks]
        objects = len(chunks) * fmt.shards
        staging = StagingPool(2 * objects * (size + 4096), size, together=fmt.shards)
        plan = ShardPlan.whole(fmt.shards)
        self.transfer = Transfers(
            [TransferContext(shelf, None, staging, Counters(), plan, load_threads=threads)]
        )
        self.loads = self.transfer.loads[fmt.kind]

    def load(self) -> None:
        """Load all chunks and wait for them."""
        over = threading.Event()
        load = self.loads.load(self._items, on_done=lambda _: over.set())
        if not over.wait(_LOAD_SECONDS) or load.failed_at is not None:
            raise RuntimeError("a load of existing objects failed")


def bench_far(settings: Settings) -> Iterator[Row]:
    """Measure the load of one request from S3, by number of threads and with prefetching."""
    fmt = make_format(TINY, 2) if settings.quick else make_format(LARGE, 8)
    try:
        with S3Server(settings.folder("far")) as server:
            for delay in (0.0, _DELAY_SECONDS):
                with DelayingProxy("127.0.0.1", server.port, delay) as proxy:
                    yield from _rows(settings, fmt, delay, server, proxy.port)
    except MissingServerError as error:
        yield Row("far", "load of one request from S3", skipped=str(error))


def _rows(
    settings: Settings, fmt: ObjectFormat, delay: float, server: S3Server, port: int
) -> Iterator[Row]:
    chunks = make_chunks(fmt, _CHUNKS)
    objects = len(chunks) * fmt.shards
    label = f"{objects} objects of {fmt.object_size(0) / 2**20:.3g} MiB, S3 at {delay * 1e3:g} ms"
    with ExitStack() as stack:
        shelf = stack.enter_context(
            Shelf(open_backend(f"s3://{BUCKET}/far", storage_options=server.options(port)))
        )
        store(shelf, fmt, chunks)
        threads = default_io_threads(shelf.backend.properties)[0]
        view = shelf.view(fmt)
        many, few = (RepeatedLoads(view, chunks, count) for count in (threads, 2))
        tier = MemoryTier(2 * objects * fmt.object_size(0), lazy=True)
        stack.callback(tier.close)
        memory = KindMemory(tier, fmt, Counters(), keeps=False)
        ahead = RepeatedLoads(TieredView(view, [memory]), chunks, threads)
        for loads in (many, few, ahead):
            stack.callback(loads.transfer.close)
        prefetcher = Prefetcher(ahead.loads, memory)
        prefetcher.add("request", chunks)
        deadline = time.monotonic() + _LOAD_SECONDS
        while memory.kept(chunks) < len(chunks):
            if time.monotonic() > deadline:
                raise RuntimeError("existing objects were not prefetched")
            threading.Event().wait(1e-3)
        for name, work, loads, text, floor in (
            ("threads", f"by {threads} threads", many, "by 2 threads", few),
            ("prefetched", "read while it waited", ahead, "read at its turn", many),
        ):
            yield Row(
                f"far/{delay * 1e3:g}ms/{name}",
                f"load of {label}, {work}",
                text,
                *measure_pairs(Work(loads.load), Work(floor.load), settings.pairs(15), warm_up=1),
                extra={"bytes": objects * fmt.object_size(0)},
            )


def store(shelf: AnyShelf, fmt: ObjectFormat, chunks: Sequence[Chunk]) -> None:
    """Store chunks of random bytes."""
    buffer = memoryview(bytearray(fmt.object_size(0)))
    fill(buffer)
    for chunk in chunks:
        for shard in range(fmt.shards):
            fmt.seal(buffer, chunk, shard)
            shelf.view(fmt).publish(ObjectRef(chunk, shard), buffer)
