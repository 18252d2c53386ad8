"""What a cache has for all kinds of KV of its namespace, and what it has for each.

Owns the lookups and the transfer of a kind (:class:`KindParts`), and when they start: a lookup's
threads with the first lookup, a transfer's with the first store or load. The kinds share the shelf,
the memory, the disk tier, counters, failed keys and the options (:class:`Shared`).

Contracts
---------
* Any thread may call everything. The lock is held while threads are started, not while they run.
* After :attr:`Shared.closed` nothing is started any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from kvshelf.cache.prompts import (
    TIERS,
    KVLike,
    Mask,
    Prompt,
    PromptIdentity,
    Tokens,
    false_run,
    form_of,
    identity_of,
    token_ids,
)
from kvshelf.capacity.uses import Uses
from kvshelf.format.hit_rule import HitRule
from kvshelf.format.keys import Chunk, KeyChain, salt_group_of
from kvshelf.format.kinds import STATE, kind_key
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import KVCache
from kvshelf.kv.sources import BoundKV, host_slot_mapping, with_slots
from kvshelf.kv.topology import ShardPlan
from kvshelf.memory.chunk_memory import ChunkMemory, ChunkPlaces
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, ShelfView
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import Tier, TieredShelf
from kvshelf.transfer.context import TransferContext
from kvshelf.transfer.loads import Loads
from kvshelf.transfer.transfers import Transfers, default_io_threads

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Shared:
    """What the kinds of a cache share.

    Attributes
    ----------
    io_threads : int or None
        Threads that load, for each kind; half as many store. None: depends on the storage.
    services : dict
        The lookups that were started, by kind and tiers.
    closed : bool
        Set with the lock held.
    """

    shelf: Shelf
    counters: Counters
    uses: Uses
    memory: ChunkMemory
    disk_tier: DiskTier | None
    io_threads: int | None
    group_by_salt: bool
    timeout: float
    failed: FailedKeys = field(default_factory=FailedKeys)
    services: dict[object, LookupService] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def check_open(self) -> None:
        """Raise a ValueError if the cache is closed."""
        if self.closed:
            raise ValueError("this cache is closed")

    def service(self, place: object, make: Callable[[], LookupService]) -> LookupService:
        """Return the lookups of a place; start them if that was not done."""
        with self.lock:
            self.check_open()
            if place not in self.services:
                self.services[place] = make()
            return self.services[place]

    def hits(self, fmt: ObjectFormat) -> LookupService:
        """Return the lookups over all kinds, on the shelf and the disk tier."""

        def make() -> LookupService:
            near = [] if self.disk_tier is None else [self.disk_tier]
            shelf = TieredShelf(self.shelf, near)
            views = [shelf.view(fmt.of(kind)) for kind in fmt.kinds]
            return LookupService(*views, failed=self.failed, counters=self.counters)

        return self.service("all kinds", make)


class KindParts:
    """What a cache has for one kind of KV.

    Parameters
    ----------
    shared : Shared
    fmt : ObjectFormat
    own : KVCache, optional
        An engine's own caches.

    Attributes
    ----------
    bound : tuple of KVCache and int, or None
        The caches for calls without KV, and how many slots they have, where that is known.
    view : ShelfView
        The objects of the kind that loads and stores move.
    places : ChunkPlaces
        How the kind's chunks lie in memory.
    tiers : dict of str to Tier
        The nearest first.

    Raises
    ------
    ConfigError
        If the memory is too small for the kind's chunks.
    """

    def __init__(self, shared: Shared, fmt: ObjectFormat, own: KVCache | None = None) -> None:
        self.shared = shared
        self.fmt = fmt
        self.bound: tuple[KVCache, int | None] | None = None if own is None else (own, None)
        self.places = ChunkPlaces(shared.memory, fmt, range(fmt.shards))
        shared.memory.serve((id(shared), fmt.kind), self._io_threads[0] + 1, self.places.slot_bytes)
        self.tiers: dict[str, Tier] = {"memory": MemoryTier(self.places)}
        if shared.disk_tier is not None:
            self.tiers["disk"] = shared.disk_tier
        near = [] if shared.disk_tier is None else [shared.disk_tier]
        self.view: ShelfView = TieredShelf(shared.shelf, near).view(fmt)
        self._transfer: Transfers | None = None

    # ------------------------------------------------------------- keys

    def prompt(
        self, method: str, tokens: Tokens | None, mask: Mask, identity: PromptIdentity | None
    ) -> Prompt:
        """Return the prompt that a call of `method` was given.

        Raises
        ------
        ValueError
            If tokens are missing or are not token ids, or the mask does not fit them.
        """
        self.shared.check_open()
        given = identity_of(identity)
        if tokens is None:
            raise ValueError(f"{method}() needs tokens, which is missing")
        ids, size = token_ids(tokens), self.fmt.chunk_size
        first = 0 if mask is None else false_run(mask, len(ids), size) // size
        return Prompt(ids, first, size, partial(self.chain, given))

    def chain(self, identity: PromptIdentity) -> KeyChain:
        """Return the keys of a prompt, still without tokens."""
        return KeyChain(
            self.fmt.namespace.digest,
            self.fmt.chunk_size,
            salt=identity.salt,
            lora_digest=identity.lora_digest,
            items=identity.items,
            salt_group=salt_group_of(identity.salt) if self.shared.group_by_salt else "_",
        )

    def kind_key(self, chunk: Chunk) -> bytes:
        """Return the key of a chunk's objects of this kind."""
        return kind_key(chunk.key, self.fmt.kind)

    def note_used(self, chunks: Sequence[Chunk]) -> None:
        """Record that chunks were used."""
        self.shared.uses.note(self.shared.shelf.view(self.fmt), chunks)

    def note_removed(self, chunk: Chunk) -> None:
        """Let lookups probe a chunk that was just removed, and stores store it again."""
        if self._transfer is not None:
            self._transfer.forget_stored()
        for service in list(self.shared.services.values()):
            service.note_removed(self.kind_key(chunk))

    # ------------------------------------------------------------- KV

    def check_tokens(self, method: str) -> None:
        """Raise a ValueError if the KV of this kind is not that of tokens."""
        if self.fmt.kind == STATE:
            raise ValueError(
                f"{method}() is for the KV of tokens, and this cache is of kind state: use"
                " store_state() and retrieve_state()"
            )

    def opened(self, method: str, kv: KVLike | None, slot_mapping: Tensor | None) -> BoundKV:
        """Return the KV that a call of `method` was given, or the slots of the bound caches.

        Raises
        ------
        ValueError
            If neither or both were given, or it does not fit the namespace.
        """
        self.check_tokens(method)
        if kv is not None:
            if slot_mapping is not None:
                raise ValueError(
                    f"{method}() got both kv and slot_mapping; a slot mapping is for bound"
                    " caches, or into PagedKV(caches, layout, slot_mapping)"
                )
            return form_of(kv).open(self.fmt)
        if self.bound is None:
            raise ValueError(
                f"{method}() needs kv, which is missing (or bind paged caches, and give"
                " slot_mapping)"
            )
        if slot_mapping is None:
            raise ValueError(f"{method}() needs kv or slot_mapping, which are both missing")
        caches, slots = self.bound
        return with_slots(self.fmt, caches, host_slot_mapping(slot_mapping), slots)

    def remove(self, chunk: Chunk, tiers: Collection[str]) -> bool:
        """Remove a chunk's objects from some tiers; return whether there was anything.

        Raises
        ------
        StorageError
            If the storage refused or failed. Some objects may be gone.
        """
        refs = [ObjectRef(chunk, shard) for shard in range(self.fmt.shards)]
        removed = 0
        try:
            if "shelf" in tiers:
                # First: a load that runs copies what it finds there into the tiers.
                view = self.shared.shelf.view(self.fmt)
                removed += sum(view.delete(ref) for ref in refs)
            # The farthest first: a load that runs copies what it finds there into the others.
            removed += sum(
                tier.remove(self.fmt, refs)
                for name, tier in reversed(self.tiers.items())
                if name in tiers
            )
        finally:
            self.note_removed(chunk)
        return removed > 0

    # ------------------------------------------------------------- threads

    @property
    def _io_threads(self) -> tuple[int, int]:
        """How many threads load, and how many store."""
        threads = self.shared.io_threads
        if threads:
            return threads, max(1, threads // 2)
        return default_io_threads(self.shared.shelf.backend.properties)

    @property
    def transfer(self) -> Transfers:
        """The store and load pipelines."""
        shared = self.shared
        with shared.lock:
            shared.check_open()
            if self._transfer is None:
                loading, storing = self._io_threads
                context = TransferContext(
                    self.fmt,
                    shared.shelf.backend,
                    None if self.bound is None else self.bound[0],
                    shared.memory,
                    shared.counters,
                    ShardPlan.whole(self.fmt.shards),
                    load_threads=loading,
                    store_threads=storing,
                    owner=id(shared),
                )
                self._transfer = Transfers([context])
            return self._transfer

    @property
    def loads(self) -> Loads:
        """The loads of this kind."""
        return self.transfer.loads[self.fmt.kind]

    def lookups(self, tiers: tuple[str, ...] = TIERS) -> LookupService:
        """Return the lookups of this kind in some tiers."""
        shared = self.shared

        def make() -> LookupService:
            near = [tier for name, tier in self.tiers.items() if name in tiers]
            shelf = TieredShelf(shared.shelf, near)
            return LookupService(
                shelf.view(self.fmt, ask_shelf="shelf" in tiers),
                failed=shared.failed,
                counters=shared.counters,
                remembers="shelf" in tiers,
                # A hit of windows that reach all chunks is the longest run of chunks.
                rule=HitRule((self.fmt.kind,)),
            )

        return shared.service((self.fmt.kind, tiers), make)

    def search(
        self, prompt: Prompt, found: Callable[[Lookup], None], tiers: tuple[str, ...] = TIERS
    ) -> Lookup:
        """Start to look for the chunks of a prompt; `found` gets the answer on another thread."""
        return self.lookups(tiers).submit(
            prompt.tokens, prompt.make_chain, first_chunk=prompt.first_chunk, on_done=found
        )

    def check(self) -> None:
        """End loads that are late."""
        if self._transfer is not None:
            self._transfer.loads[self.fmt.kind].check()

    def close(self, drain_seconds: float) -> None:
        """Wait for unfinished stores for a bounded time, and stop the threads."""
        lost = 0 if self._transfer is None else self._transfer.close(drain_seconds)
        if lost:
            logger.warning("%d chunks were not stored in time and are lost", lost)
