"""Transfers between a small paged cache and a shelf, for tests that start no engine."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvshelf.backends import Backend, Deadlines
from kvshelf.backends.breaker import DEFAULT_BACKOFF, Backoff
from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import HostKVCache, KVCache, KVMemory, LayerRun, PendingCopy, layer_calls
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PagedLayout, native_slots_of, slots_of
from kvshelf.kv.streams import Streams
from kvshelf.kv.topology import ShardPlan
from kvshelf.memory.arena import Arena
from kvshelf.memory.chunk_memory import ChunkMemory
from kvshelf.memory.ring import rounded
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.threads import StorageThreads
from kvshelf.transfer.context import ChunkSlots, TransferContext
from kvshelf.transfer.load import LoadPiece
from kvshelf.transfer.loads import Loads
from kvshelf.transfer.stores import StoreOutcome, Stores
from kvshelf.transfer.transfers import Transfers
from tests.sim.storage import LendingMemory, LendingShelf
from tests.support.formats import BLOCK, HEAD_SIZE, HEADS, LAYERS, make_format
from tests.support.waiting import PATIENCE


@functools.lru_cache(maxsize=4096)
def content(chunk: Chunk, layer: int, block: int) -> torch.Tensor:
    """The bytes that a block of a chunk holds in one layer: different for every one. To be read."""
    seed = hashlib.sha256(chunk.key + bytes((layer, block))).digest()
    size = HEADS * BLOCK * 2 * HEAD_SIZE * 2
    data = bytearray(random.Random(seed).randbytes(size))
    return torch.frombuffer(data, dtype=torch.uint8).view(torch.int16).view(HEADS, BLOCK, -1)


class Destination(KVMemory):
    """Memory that loads fill: it notes the shards that have come."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def gather(self, slots: torch.Tensor, payloads: Sequence[torch.Tensor]) -> PendingCopy:
        raise AssertionError("nothing is stored from here")

    def scatter(
        self, shard: int, slots: torch.Tensor, payload: torch.Tensor, fence: object = None
    ) -> None:
        self.got.append(shard)


@dataclass
class Rig:
    """A transfer between a paged cache and a shelf, with what a test has to look at."""

    backend: Backend
    fmt: ObjectFormat = field(default_factory=make_format)
    native: bool = True
    blocks: int = 64
    #: Beside the spare slots of the threads that load.
    memory_chunks: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    deadlines: Deadlines | None = None
    backoff: Backoff = DEFAULT_BACKOFF
    #: The streams of the device that the caches are on, and the bytes of its buffers; 0: those of
    #: each copy are allocated.
    streams: Streams | None = None
    buffer_bytes: int = 0
    #: Puts tiers in front of the shelf.
    in_front: Callable[[Shelf], Shelf] = lambda shelf: shelf
    #: In which objects lie.
    memory: LendingMemory | None = None
    #: Keeps what is loaded and stored.
    keeps: bool = False
    #: Lets a node server read the memory.
    share: Callable[[Arena], None] | None = None

    def __post_init__(self) -> None:
        self.guard = GuardedBackend(self.backend, self.deadlines, self.backoff)
        self.counters = Counters()
        shelf = (
            Shelf(self.guard, self.counters)
            if self.memory is None
            else LendingShelf(self.guard, self.memory, self.counters)
        )
        self.shelf = self.in_front(shelf)
        shape = (self.blocks, HEADS, BLOCK, 2 * HEAD_SIZE)
        # The bytes of bfloat16, in a dtype whose values compare as bytes do.
        self.caches = [torch.zeros(shape, dtype=torch.int16) for _ in range(LAYERS)]
        layout = (
            PagedLayout.native_blocks(self.caches[0])
            if self.native
            else PagedLayout.from_bhnc(self.caches[0], HEAD_SIZE)
        )
        tokens = PagedLayout.from_bhnc(self.caches[0], HEAD_SIZE) if self.native else None
        run = LayerRun(0, self.caches, layout, token_layout=tokens)
        calls = layer_calls(self.fmt, [run])
        self.cache: KVCache = HostKVCache(calls)
        if self.streams is not None:
            self.cache = DeviceKVCache(calls, streams=self.streams, buffer_bytes=self.buffer_bytes)
        self.slot_bytes = sum(rounded(self.fmt.object_size(n)) for n in range(self.fmt.shards))
        slots = self.memory_chunks + self.options.get("load_threads", 2) + 1
        self.host = ChunkMemory(
            slots * self.slot_bytes,
            keeps=self.keeps,
            share=self.share,
            counters=self.counters,
        )
        self.view = self.shelf.view(self.fmt)
        self.begin()

    def begin(self) -> None:
        """Start the threads that move KV between the caches and the shelf."""
        plan = ShardPlan.whole(self.fmt.shards)
        self.context = TransferContext(
            self.fmt, self.guard, self.cache, self.host, self.counters, plan, **self.options
        )
        self.transfer = Transfers([self.context])

    @property
    def chunks_in_use(self) -> int:
        """Slots of memory that somebody holds."""
        return self.host.ring.stats().pinned_bytes // self.slot_bytes

    @property
    def loads(self) -> Loads:
        return self.transfer.loads[self.fmt.kind]

    @property
    def stores(self) -> Stores:
        return self.transfer.stores[self.fmt.kind]

    @property
    def per_chunk(self) -> int:
        return self.fmt.chunk_size // BLOCK

    def slots(self, blocks: Sequence[int]) -> torch.Tensor:
        make = native_slots_of if self.native else None
        if make is not None:
            return make(list(blocks), BLOCK, BLOCK, 0, len(blocks) * BLOCK)
        return slots_of(list(blocks), BLOCK, 0, len(blocks) * BLOCK)

    def items(self, chunks: Sequence[Chunk], first_block: int) -> list[ChunkSlots]:
        """The chunks, one behind the other from `first_block` on."""
        n = self.per_chunk
        return [
            ChunkSlots(chunk, self.slots(range(first_block + i * n, first_block + (i + 1) * n)))
            for i, chunk in enumerate(chunks)
        ]

    def fill(self, item: ChunkSlots) -> None:
        """Write a chunk's content into its blocks, as a forward pass would."""
        for i, block in enumerate(self.block_ids(item)):
            for layer, cache in enumerate(self.caches):
                cache[block] = content(item.chunk, layer, i)

    def block_ids(self, item: ChunkSlots) -> list[int]:
        slots = item.slots.tolist()
        return slots if self.native else [slot // BLOCK for slot in slots[::BLOCK]]

    def holds(self, item: ChunkSlots) -> bool:
        """Whether the blocks hold exactly the chunk's content."""
        return all(
            torch.equal(cache[block], content(item.chunk, layer, i))
            for i, block in enumerate(self.block_ids(item))
            for layer, cache in enumerate(self.caches)
        )

    def untouched(self, item: ChunkSlots) -> bool:
        """Whether the blocks are still as they were made."""
        return not any(cache[self.block_ids(item)].any() for cache in self.caches)

    def put(self, chunks: Sequence[Chunk], first_block: int = 0) -> None:
        """Store chunks and wait until they are published."""
        for item in self.items(chunks, first_block):
            self.fill(item)
            assert self.store(item) == StoreOutcome.QUEUED
        assert self.transfer.drain(PATIENCE) == 0

    def store(self, item: ChunkSlots, **options: Any) -> StoreOutcome:
        """Store one chunk."""
        return self.stores.store(self.view, item, **options)

    def start(
        self,
        name: str,
        items: Sequence[ChunkSlots],
        patience: Sequence[float] = (),
        at_once: int = 0,
    ) -> LoadPiece:
        """Start a load."""
        kind = self.fmt.kind
        load = self.transfer.load(name, {kind: self.view}, {kind: items}, patience, at_once)
        return load.pieces[kind]

    def read(self, items: Sequence[ChunkSlots], bytes_ahead: int = 0, **options: Any) -> LoadPiece:
        """Start a load of the kind alone, perhaps an early one."""
        piece = LoadPiece(self.view, items, **options)
        self.loads.load(piece, bytes_ahead)
        return piece

    def ended(self, wait: float = 0.0) -> dict[str, LoadPiece]:
        """The loads that ended since the last call, by name, in the order of their ends."""
        return {load.request_id: load.pieces[self.fmt.kind] for load in self.transfer.poll(wait)}

    def all_ended(self, count: int) -> dict[str, LoadPiece]:
        """Wait for so many loads to end, as steps of an engine do."""
        ended: dict[str, LoadPiece] = {}
        while len(ended) < count:
            assert self.transfer.loading, "no load is running"
            ended |= self.ended(0.01)
        return ended

    def finished(self) -> LoadPiece:
        """Wait for one load to end."""
        (load,) = self.all_ended(1).values()
        return load

    def load(self, chunks: Sequence[Chunk], first_block: int) -> tuple[LoadPiece, list[ChunkSlots]]:
        """Load chunks and wait for the end."""
        items = self.items(chunks, first_block)
        self.start("r", items)
        return self.finished(), items

    def comes_back(self, chunks: Sequence[Chunk], first_block: int) -> None:
        """Check that chunks can be loaded."""
        load, items = self.load(chunks, first_block)
        assert load.failed_at is None
        assert all(self.holds(item) for item in items)

    def path(self, chunk: Chunk, shard: int) -> Path:
        """Where an object lies."""
        folder = Path(self.backend.url) / self.fmt.namespace.folder
        return folder / object_name(chunk, shard, self.fmt.shards)

    @property
    def loading(self) -> StorageThreads:
        """The threads that load, as the guard knows them."""
        threads = self.guard.watchers[0]
        assert isinstance(threads, StorageThreads)
        return threads

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)

    def close(self) -> None:
        self.transfer.close(0.0)
        self.host.close()
        self.guard.close()
