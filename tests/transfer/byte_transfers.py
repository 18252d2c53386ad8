"""Transfers without paged caches: the KV of a chunk is bytes that follow from its key."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvshelf.backends import Backend, Deadlines
from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import DRAFT, FULL, STATE, WINDOW, Kind, kind_key
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import DONE, KVMemory, PendingCopy
from kvshelf.kv.topology import ShardPlan
from kvshelf.memory.chunk_memory import ChunkMemory
from kvshelf.memory.ring import rounded
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.transfer.context import ChunkSlots, TransferContext
from kvshelf.transfer.load import Load
from kvshelf.transfer.stores import StoreOutcome
from kvshelf.transfer.transfers import Transfers
from tests.sim.storage import LendingMemory, LendingShelf
from tests.support.formats import format_of_kinds
from tests.support.waiting import PATIENCE

NO_SLOTS = torch.empty(0, dtype=torch.int64)


@functools.lru_cache(maxsize=1024)
def content(kind: Kind, chunk: Chunk, shard: int, size: int) -> bytes:
    """The payload of an object: different for every one."""
    seed = hashlib.sha256(kind_key(chunk.key, kind) + bytes((shard,))).digest()
    return random.Random(seed).randbytes(size)


class ChunkBytes(KVMemory):
    """The KV of one kind of a chunk: stores read what it should be, loads write what they bring.

    Attributes
    ----------
    loaded : dict
        The bytes of each shard that a load has brought.
    on_scatter : Callable
        Called before a load writes.
    """

    def __init__(self, kind: Kind, chunk: Chunk) -> None:
        self.kind, self.chunk = kind, chunk
        self.loaded: dict[int, bytes] = {}
        self.on_scatter: Callable[[], object] = lambda: None

    def gather(self, slots: torch.Tensor, payloads: Sequence[torch.Tensor]) -> PendingCopy:
        for shard, payload in enumerate(payloads):
            data = bytearray(content(self.kind, self.chunk, shard, payload.numel()))
            payload.copy_(torch.frombuffer(data, dtype=torch.uint8))
        return DONE

    def scatter(
        self, shard: int, slots: torch.Tensor, payload: torch.Tensor, fence: object = None
    ) -> None:
        self.on_scatter()
        self.loaded[shard] = bytes(payload.numpy())

    def of_tail(self, tokens: int) -> ChunkBytes:
        return self

    @property
    def has_no_wrong_bytes(self) -> bool:
        """Whether each shard that was loaded is what was stored."""
        return all(
            data == content(self.kind, self.chunk, shard, len(data))
            for shard, data in self.loaded.items()
        )


@dataclass
class ByteTransfers:
    """Transfers of some kinds of KV, over a storage and perhaps memory in front of it.

    Attributes
    ----------
    backend : Backend
    shards : Mapping of Kind to int
        The shards of each kind; those of a drafter are of a namespace of its own.
    memory_chunks : int
        So many chunks of all kinds fit beside the spare slots of all load threads.
    keeps : bool
        What is loaded and stored stays in memory.
    lending : LendingMemory, optional
        Memory in which objects of the storage lie.
    replicas : int
        So many workers hold the same shards, this one is the first.
    weights : str
    """

    backend: Backend
    shards: Mapping[Kind, int] = field(default_factory=lambda: {FULL: 1, WINDOW: 2, STATE: 2})
    memory_chunks: int = 40
    keeps: bool = False
    deadlines: Deadlines | None = None
    load_threads: int = 2
    lending: LendingMemory | None = None
    replicas: int = 1
    weights: str = "user:test"
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.guard = GuardedBackend(self.backend, self.deadlines)
        self.storage = (
            Shelf(self.guard, self.counters)
            if self.lending is None
            else LendingShelf(self.guard, self.lending, self.counters)
        )
        self.begin(self.weights)
        sizes = [
            sum(rounded(fmt.object_size(shard)) for shard in range(fmt.shards))
            for fmt in self.formats.values()
        ]
        slots = self.memory_chunks + self.load_threads + 1
        self.host = ChunkMemory(slots * sum(sizes), keeps=self.keeps, counters=self.counters)
        self.contexts = {kind: self._context(kind) for kind in self.formats}
        self.transfers = Transfers(self.contexts[kind] for kind in self.shards if kind != DRAFT)
        if DRAFT in self.shards:
            self.transfers.add(self.contexts[DRAFT])

    def begin(self, weights: str) -> None:
        """Move the KV of these weights from now on."""
        self.weights = weights
        needed = {kind: count for kind, count in self.shards.items() if kind != DRAFT}
        fmt = format_of_kinds(needed, weights=weights)
        self.formats = {kind: fmt.of(kind) for kind in needed}
        if DRAFT in self.shards:
            drafts = {FULL: self.shards[DRAFT]}
            self.formats[DRAFT] = format_of_kinds(drafts, weights=f"{weights} drafter")
        self.views = {kind: self.storage.view(fmt) for kind, fmt in self.formats.items()}

    def _context(self, kind: Kind) -> TransferContext:
        fmt = self.formats[kind]
        return TransferContext(
            fmt,
            self.guard,
            None,
            self.host,
            self.counters,
            ShardPlan(tuple(range(fmt.shards)), replicas=self.replicas),
            load_threads=self.load_threads,
            of_drafter=kind == DRAFT,
        )

    @property
    def pinned_bytes(self) -> int:
        """Bytes of memory that somebody holds."""
        return self.host.ring.stats().pinned_bytes

    def store(self, kind: Kind, item: ChunkSlots, **options: Any) -> StoreOutcome:
        return self.transfers.stores[kind].store(self.views[kind], item, **options)

    def start(
        self,
        name: str,
        items: Mapping[Kind, Sequence[ChunkSlots]],
        patience: Sequence[float] = (),
        at_once: int = 0,
    ) -> Load:
        return self.transfers.load(name, self.views, items, patience, at_once)

    def items(self, chunks: Mapping[Kind, Sequence[Chunk]]) -> dict[Kind, list[ChunkSlots]]:
        return {
            kind: [ChunkSlots(chunk, NO_SLOTS, ChunkBytes(kind, chunk)) for chunk in of_kind]
            for kind, of_kind in chunks.items()
        }

    def put(self, chunks: Mapping[Kind, Sequence[Chunk]]) -> None:
        """Store chunks and wait until they are published."""
        for kind, items in self.items(chunks).items():
            for item in items:
                assert self.store(kind, item) == StoreOutcome.QUEUED
        assert self.transfers.drain(PATIENCE) == 0

    def finished(self) -> Load:
        """Wait for one load to end."""
        while not (loads := self.transfers.poll(PATIENCE)):
            assert self.transfers.loading, "no load is running"
        (load,) = loads
        return load

    def path(
        self, kind: Kind, chunk: Chunk, shard: int = 0, fmt: ObjectFormat | None = None
    ) -> Path:
        """Where an object lies, in the namespace that is open if `fmt` is of no other one."""
        fmt = fmt or self.formats[kind]
        folder = Path(self.guard.url) / fmt.namespace.folder
        return folder / object_name(chunk, shard, fmt.shards, fmt.kind)

    def has(self, kind: Kind, chunk: Chunk, shard: int, fmt: ObjectFormat | None = None) -> bool:
        """Whether the shelf has the object, as it was stored."""
        fmt = fmt or self.formats[kind]
        with suppress(FileNotFoundError):
            data = self.path(kind, chunk, shard, fmt).read_bytes()
            size = fmt.object_size(shard) - fmt.data_offset
            return data[fmt.data_offset :] == content(kind, chunk, shard, size)
        return False

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)

    def close(self) -> None:
        self.transfers.close()
        self.host.close()
        self.guard.close()


def bytes_of(items: Mapping[Kind, Iterable[ChunkSlots]]) -> list[ChunkBytes]:
    """The places of chunks, kind by kind."""
    places = [item.memory for of_kind in items.values() for item in of_kind]
    return [place for place in places if isinstance(place, ChunkBytes)]


def chunk_is_loaded(item: ChunkSlots, fmt: ObjectFormat) -> bool:
    """Whether all shards of a chunk are there, as they were stored."""
    place = item.memory
    assert isinstance(place, ChunkBytes)
    return place.loaded.keys() == set(range(fmt.shards)) and place.has_no_wrong_bytes
