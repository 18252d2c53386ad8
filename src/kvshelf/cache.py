"""``ChunkCache``: the KV of prompts on a shelf, for any program.

Owns the combination of a shelf, the format of one kind of KV of one namespace, staging, the
threads that look up, load and store, the record of failed keys, and a memory for prefetched chunks
unless it is given a memory tier; and the interface by tokens (:meth:`ChunkCache.store`,
:meth:`~ChunkCache.retrieve`, :meth:`~ChunkCache.lookup`, :meth:`~ChunkCache.prefetch`), blocking
and as handles to poll.

A namespace of a hybrid model has several kinds (:mod:`kvshelf.format.kinds`), and a cache for
each (:meth:`ChunkCache.of`). States are no KV of tokens, and have methods of their own.

Contracts
---------
* Only whole chunks are stored and retrieved, never the shorter rest of a prompt.
* A chunk that is missing, invalid or late is a miss. Storage errors raise nothing: they are
  counted, and the result is smaller.
* ``submit_store`` has copied the KV when it returns, or on a device enqueued the copy on the
  caller's current stream. ``submit_retrieve`` may write to the given memory until its handle is
  done, cancelled, or ``result`` has returned; not after that. On a device it writes after the
  work that the caller's current stream has when it is called.
* Blocking calls and ``result`` end after their timeout; the cache has a default timeout.
* What is retrieved is recorded as used, with the prompt's chunks before it
  (:mod:`kvshelf.capacity.uses`). To look a prompt up, or to prefetch it, is no use.
* All methods may be called from any thread. The cache's threads are daemons and start when
  they are first needed.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from kvshelf.capacity.sweeper import Sweeper
from kvshelf.capacity.uses import Uses
from kvshelf.capacity.walk import Walk
from kvshelf.config import Config
from kvshelf.errors import ConfigError
from kvshelf.format.keys import Chunk, KeyChain, MultimodalItem, salt_group_of
from kvshelf.format.kinds import FULL, STATE, Kind, kind_key
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import KVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.sources import (
    BlobKV,
    BoundKV,
    KVSource,
    PagedCaches,
    TupleKV,
    host_slot_mapping,
    paged_memory,
    with_slots,
)
from kvshelf.kv.state_tensors import StateTensors, empty_state
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.hits import UNLIMITED, window_of
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import Tier, TieredShelf, open_configured, shelf_url
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure, Load
from kvshelf.transfer.prefetch import IntoMemory, KindMemory
from kvshelf.transfer.staging import StagingPool
from kvshelf.transfer.stores import StoreOutcome, StoreResult
from kvshelf.transfer.transfer import Transfer, default_io_threads

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: KV of a prompt: a form of :mod:`kvshelf.kv.sources`, K and V of each layer as transformers
#: has them, or a blob ``[2, layers, tokens, hidden]``.
KVLike: TypeAlias = "KVSource | Tensor | Sequence[tuple[Tensor, Tensor]]"
Tokens: TypeAlias = "Sequence[int] | Tensor"

#: Where chunks may be, the nearest first.
TIERS: Final = ("memory", "disk", "shelf")

_CHECK_SECONDS: Final = 0.5
_PREFETCH_BYTES: Final = 256 << 20
#: The smallest memory tier.
_LEAST_MEMORY: Final = 4096
#: The name of the lookups over all kinds.
_ALL_KINDS: Final = ("all kinds",)


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """The parts of a request, besides model and tokens, that determine its KV.

    Attributes
    ----------
    salt : str
        Separates the chunks of a user or tenant from all others.
    lora_digest : bytes
        Digest of the LoRA adapter, see :func:`kvshelf.weights.fingerprints.lora_digest`; empty
        without one.
    items : Sequence of MultimodalItem
        Images, sounds and other items among the tokens.
    """

    salt: str = ""
    lora_digest: bytes = b""
    items: Sequence[MultimodalItem] = ()


_PLAIN: Final = PromptIdentity()


class ChunkKey(NamedTuple):
    """A chunk of a prompt: tokens [start, end) and the chunk's key."""

    start: int
    end: int
    key: bytes


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The result of one store.

    Attributes
    ----------
    chunks : int
        Whole chunks of the call.
    published, existed : int
        On the shelf now: published by this store, or before it.
    dropped : int
        Not copied: staging was full, or the storage is read-only.
    failed : int
        Not published: the storage refused the write or failed.
    pending : int
        Copied, but not yet published when the report was made.
    """

    chunks: int
    published: int
    existed: int
    dropped: int
    failed: int
    pending: int

    @property
    def complete(self) -> bool:
        """Whether all chunks are on the shelf."""
        return self.published + self.existed == self.chunks


class Handle(Generic[T]):
    """A running operation."""

    _operation = "operation"

    def __init__(self, check: Callable[[], None], timeout: float) -> None:
        self._check = check
        self._timeout = timeout
        self._done = threading.Event()

    def __repr__(self) -> str:
        return f"<{self._operation}, {'done' if self._done.is_set() else 'running'}>"

    def poll(self) -> bool:
        """Whether the operation is done. Never waits."""
        if not self._done.is_set():
            self._check()
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the operation is done; return whether it is.

        Parameters
        ----------
        timeout : float, optional
            Longest time to wait, in seconds; unlimited when absent.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.poll():
            left = _CHECK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            self._done.wait(min(left, _CHECK_SECONDS))
        return True

    def cancel(self) -> None:
        """End the operation with its partial result; wait until it touches no memory."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> T:
        """Return the outcome; an operation that is not done in time is cancelled first.

        Parameters
        ----------
        timeout : float, optional
            Seconds; the cache's timeout when absent.
        """
        if not self.wait(self._timeout if timeout is None else timeout):
            self.cancel()
        return self._outcome()

    def _outcome(self) -> T:
        raise NotImplementedError


class _LookupHandle(Handle[int]):
    """A lookup, or a result that is known without one."""

    _operation = "lookup"

    def __init__(self, cache: ChunkCache, timeout: float) -> None:
        super().__init__(cache._check, timeout)
        self._counters = cache.counters
        self._lookup: Lookup | None = None
        self._chunk_size = cache.chunk_size
        self._hit = 0

    def set_result(self, chunks: int) -> None:
        self._hit = chunks
        self._done.set()

    def on_lookup_done(self, lookup: Lookup) -> None:
        if not self._done.is_set():
            self.set_result(lookup.hit_chunks)

    def cancel(self) -> None:
        if not self._done.is_set():
            if self._lookup is not None:
                self._lookup.cancel()
            self._counters.add("lookup_timeouts")
            self._done.set()

    def _outcome(self) -> int:
        return self._hit * self._chunk_size


class _LoadHandle(Handle[T]):
    """A lookup and the load of the chunks that it finds.

    The lookup thread calls :meth:`on_lookup_done`, which starts the load; the thread that ends
    the load calls :meth:`_on_load_done`. No method of another object is called with the lock held.
    """

    _early = False

    def __init__(self, cache: ChunkCache, prompt: _Prompt, timeout: float) -> None:
        super().__init__(cache._check, timeout)
        self._cache = cache
        self._prompt = prompt
        self._lock = threading.Lock()
        self._lookup: Lookup | None = None
        self._load: Load | None = None
        self._starting = False
        self._cancelled = threading.Event()
        self._leading = 0

    def on_lookup_done(self, lookup: Lookup) -> None:
        with self._lock:
            if self._cancelled.is_set() or lookup.chain is None or not lookup.hit_chunks:
                self._done.set()
                return
            self._starting = True
        first = self._prompt.first_chunk
        chunks = lookup.chain.chunks[first : first + lookup.hit_chunks]
        if not self._early:
            # Of the full chunks, those before the first are in use as well.
            whole = lookup.chain.chunks[: first + lookup.hit_chunks]
            self._cache._note_used(whole if self._cache.fmt.kind == FULL else chunks)
        try:
            load = self._cache.transfer.load(
                self._cache._next_id(),
                self._items(chunks),
                early=self._early,
                on_done=self._on_load_done,
            )
        except BaseException:  # the cache was closed
            self._done.set()
            raise
        with self._lock:
            self._starting = False
            self._load = load
            cancelled = self._cancelled.is_set()
        if cancelled:
            self._cache.transfer.cancel(load.request_id)

    def _items(self, chunks: Sequence[Chunk]) -> list[ChunkSlots]:
        raise NotImplementedError

    def _on_load_done(self, load: Load) -> None:
        self._leading = load.leading
        for chunk, failure in load.failures:
            if failure is not Failure.UNAVAILABLE:
                self._cache.failed.add(self._cache._kind_key(chunk), bad=failure is Failure.BAD)
        self._done.set()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled.set()
            lookup, load = self._lookup, self._load
            idle = load is None and not self._starting
        if lookup is not None:
            lookup.cancel()
        if load is not None:
            self._cache.transfer.cancel(load.request_id)
        elif idle:
            self._done.set()
        # If the load is just being started, the thread that starts it cancels it.
        self._done.wait()


class _RetrieveHandle(_LoadHandle[Tensor]):
    _operation = "retrieve"

    def __init__(
        self,
        cache: ChunkCache,
        prompt: _Prompt,
        timeout: float,
        opened: BoundKV,
        slots: list[Tensor],
    ) -> None:
        super().__init__(cache, prompt, timeout)
        self._opened = opened
        self._slots = slots
        self._fence = opened.memory.fence()

    def _items(self, chunks: Sequence[Chunk]) -> list[ChunkSlots]:
        memory = self._opened.memory
        return [
            ChunkSlots(chunk, slots, memory, self._fence)
            for chunk, slots in zip(chunks, self._slots, strict=False)
        ]

    def _on_load_done(self, load: Load) -> None:
        tokens = load.leading * self._cache.chunk_size
        self._cache.counters.add("hit_tokens", len(load.items) * self._cache.chunk_size)
        self._cache.counters.add("loaded_tokens", tokens)
        super()._on_load_done(load)

    def _outcome(self) -> Tensor:
        start = self._prompt.first_chunk * self._cache.chunk_size
        mask = torch.zeros(len(self._prompt.tokens), dtype=torch.bool)
        mask[start : start + self._leading * self._cache.chunk_size] = True
        return mask


class _PrefetchHandle(_LoadHandle[int]):
    _operation = "prefetch"
    _early = True

    def __init__(
        self, cache: ChunkCache, prompt: _Prompt, timeout: float, memory: KindMemory
    ) -> None:
        super().__init__(cache, prompt, timeout)
        self._memory = memory
        self._chunks: Sequence[Chunk] = ()

    def _items(self, chunks: Sequence[Chunk]) -> list[ChunkSlots]:
        none = torch.empty(0, dtype=torch.int64)
        self._chunks = chunks[: self._memory.most_chunks]
        self._memory.want(chunk.key for chunk in self._chunks)
        return [ChunkSlots(chunk, none, IntoMemory(self._memory, chunk)) for chunk in self._chunks]

    def _on_load_done(self, load: Load) -> None:
        self._memory.unwant(chunk.key for chunk in self._chunks)
        super()._on_load_done(load)

    def _outcome(self) -> int:
        # Other prompts may have evicted prefetched chunks.
        return self._memory.leading(self._chunks) * self._cache.chunk_size


class _StoreHandle(Handle[StoreReport]):
    _operation = "store"

    def __init__(self, cache: ChunkCache, chunks: int, timeout: float) -> None:
        super().__init__(cache._check, timeout)
        self._cache = cache
        self._lock = threading.Lock()
        self._chunks = chunks
        self._counts: dict[str, int] = {}
        self._pending = 0
        self._submitted = False

    def count(self, what: str, chunks: int = 1) -> None:
        with self._lock:
            self._counts[what] = self._counts.get(what, 0) + chunks

    def add_pending(self) -> None:
        with self._lock:
            self._pending += 1

    def resolve(self, what: str) -> None:
        """Count a pending chunk whose store was not started."""
        self.count(what)
        with self._lock:
            self._pending -= 1

    def on_chunk_done(self, chunk: Chunk, result: StoreResult) -> None:
        if result in (StoreResult.PUBLISHED, StoreResult.REPAIRED):
            self._cache.failed.forget(self._cache._kind_key(chunk))
        lost = result in (StoreResult.FAILED, StoreResult.LOST)
        if not lost:
            self._cache._note_stored(chunk)
        existed = result is StoreResult.EXISTED
        self.count("failed" if lost else "existed" if existed else "published")
        with self._lock:
            self._pending -= 1
            self._finish()

    def all_submitted(self) -> None:
        with self._lock:
            self._submitted = True
            self._finish()

    def _finish(self) -> None:
        if self._submitted and not self._pending:
            self._done.set()

    def cancel(self) -> None:
        """Stop waiting. Chunks that were copied are still published."""
        self._done.set()

    def _outcome(self) -> StoreReport:
        with self._lock:
            return StoreReport(
                self._chunks,
                self._counts.get("published", 0),
                self._counts.get("existed", 0),
                self._counts.get("dropped", 0),
                self._counts.get("failed", 0),
                self._pending,
            )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The checked tokens of a call, and the first chunk that its mask selects."""

    tokens: array[int]
    first_chunk: int
    identity: PromptIdentity


class ChunkCache:
    """The KV of prompts on a shelf, in one namespace.

    Parameters
    ----------
    shelf : Shelf
        Stays open when the cache is closed.
    namespace : Namespace or ObjectFormat
        Identifies the model's KV; :class:`kvshelf.format.model.ModelFacts` makes one. Of several
        kinds the cache has the first, or that of the format; :meth:`of` gives the others.
    memory : KVCache, optional
        An engine's own caches, for calls without `kv`; see :meth:`bind`.
    staging_bytes, group_by_salt, check_finite
        The options of these names.
    io_threads : int, optional
        Threads that load; half as many store. When absent, depends on the storage.
    disk_tier : DiskTier, optional
        A local directory that caches objects of a remote shelf. Stays open when the cache is
        closed.
    memory_tier : MemoryTier, optional
        Memory that keeps what is stored, loaded and prefetched, of any number of caches. Stays open
        when the cache is closed.
    prefetch_bytes : int
        Without `memory_tier`: largest memory for prefetched chunks.
    timeout_s : float
        Default timeout of blocking calls, in seconds.
    drain_s : float
        Seconds that :meth:`close` waits for unfinished stores.
    counters : Counters, optional
        The counters to use; new ones when absent.
    on_thread_start : Callable, optional
        Called first on each thread with ``"load"``, ``"store"`` or ``"lookup"``.
    uses : Uses, optional
        Records what is used. When absent, the cache has its own.

    Attributes
    ----------
    shelf : Shelf
    fmt : ObjectFormat
    counters : Counters
    failed : FailedKeys
        Kind keys whose objects failed to load; they count as missing for some time.
    staging : StagingPool
        Allocates no memory before it is used or warmed.

    Raises
    ------
    ConfigError
        If the namespace does not define objects, or `staging_bytes` is too small for them.
    """

    _instances: ClassVar[dict[str, tuple[Config, ModelFacts, ChunkCache]]] = {}
    _instances_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        shelf: Shelf,
        namespace: Namespace | ObjectFormat,
        *,
        memory: KVCache | None = None,
        staging_bytes: int = 1 << 30,
        io_threads: int | None = None,
        group_by_salt: bool = False,
        check_finite: bool = False,
        disk_tier: DiskTier | None = None,
        memory_tier: MemoryTier | None = None,
        prefetch_bytes: int = _PREFETCH_BYTES,
        timeout_s: float = 30.0,
        drain_s: float = 4.0,
        counters: Counters | None = None,
        on_thread_start: Callable[[str], None] | None = None,
        uses: Uses | None = None,
    ) -> None:
        self.shelf = shelf
        self.fmt = ObjectFormat(namespace) if isinstance(namespace, Namespace) else namespace
        self.counters = Counters() if counters is None else counters
        self.failed = FailedKeys()
        largest = max(self.fmt.object_size(shard) for shard in range(self.fmt.shards))
        self.staging = StagingPool(staging_bytes, largest, together=self.fmt.shards)
        self._bound = memory
        self._bound_slots: int | None = None
        self._threads = (
            (io_threads, max(1, io_threads // 2))
            if io_threads
            else default_io_threads(shelf.backend.properties)
        )
        self._group_by_salt = group_by_salt
        self._check_finite = check_finite
        self._timeout = timeout_s
        self._drain = drain_s
        self._on_thread_start = on_thread_start
        self._owns_uses = uses is None
        self._uses = Uses(self.counters) if uses is None else uses
        self._owns_shelf = False
        #: What keeps the shelf within its bounds, where this cache does.
        self._sweeper: Sweeper | None = None
        self._lock = threading.Lock()
        self._kinds_lock = threading.Lock()
        self._closed = False
        self._ids = itertools.count()
        self._transfer: Transfer | None = None
        self._lookups: dict[tuple[str, ...], LookupService] = {}
        #: The caches of the namespace's kinds that were made so far.
        self._caches: dict[Kind, ChunkCache] = {self.fmt.kind: self}
        self._options: dict[str, Any] = {
            "staging_bytes": staging_bytes,
            "io_threads": io_threads,
            "group_by_salt": group_by_salt,
            "check_finite": check_finite,
            "disk_tier": disk_tier,
            "memory_tier": memory_tier,
            "prefetch_bytes": prefetch_bytes,
            "timeout_s": timeout_s,
            "drain_s": drain_s,
            "counters": self.counters,
            "on_thread_start": on_thread_start,
            "uses": self._uses,
        }
        #: The memory that this cache closes.
        self._own_memory: MemoryTier | None = None
        if memory_tier is None:
            memory_tier = self._own_memory = MemoryTier(
                max(prefetch_bytes, _LEAST_MEMORY), counters=self.counters, lazy=True
            )
        self._memory = KindMemory(
            memory_tier, self.fmt, self.counters, keeps=self._own_memory is None
        )
        self._tiers: dict[str, Tier] = {"memory": self._memory}
        self._disk_tier = disk_tier
        if disk_tier is not None:
            disk_tier.check_disjoint(shelf.backend)
            self._tiers["disk"] = disk_tier

    def __repr__(self) -> str:
        return f"ChunkCache({self.shelf.url!r}, {self.fmt.namespace.folder!r})"

    def __enter__(self) -> ChunkCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------- instances

    @classmethod
    def open(cls, config: Config, model: ModelFacts, *, timeout_s: float = 30.0) -> ChunkCache:
        """Open the shelf of `config` for the KV of `model`.

        Blocks on storage and while weight files are fingerprinted.

        Parameters
        ----------
        config : Config
            Options that concern an engine's steps have no effect.
        model : ModelFacts
        timeout_s : float

        Raises
        ------
        ConfigError
            If the configuration or the facts cannot be used.
        StorageError
            If the storage could not be opened.
        """
        if config.server is not None:
            raise ConfigError(
                f"server is {config.server}: a cache with a node server is opened by"
                " kvshelf.server.client.open_cache"
            )
        return cls.open_on(
            lambda counters: open_configured(shelf_url(config), config, counters),
            config,
            model,
            timeout_s=timeout_s,
        )

    @classmethod
    def open_on(
        cls,
        open_shelf: Callable[[Counters], tuple[Shelf, DiskTier | None]],
        config: Config,
        model: ModelFacts,
        *,
        timeout_s: float = 30.0,
    ) -> ChunkCache:
        """Open a cache for the KV of `model` on a shelf that is opened in another way.

        Parameters
        ----------
        open_shelf : Callable
            Opens the shelf, which the cache closes, and its disk tier if there is one.
        config, model, timeout_s
            As for :meth:`open`.

        Raises
        ------
        ConfigError
            If the configuration or the facts cannot be used.
        StorageError
            As `open_shelf`.
        """
        if config.layout == "native" and model.layouts is None:
            raise ConfigError(
                "layout is native, but the model's facts state no native layout: set layout to"
                " auto, or state layouts"
            )
        namespace = model.namespace(
            chunk_size=config.chunk_size,
            shards=config.shards,
            version=config.version,
            weights=config.weights,
        )
        counters = Counters()
        uses = Uses.of(config, counters)
        shelf, disk_tier = open_shelf(counters)
        memory_tier = sweeper = None
        try:
            if config.memory_bytes:
                memory_tier = MemoryTier(config.memory_bytes, counters=counters)
            if config.server is None and not config.read_only:
                # With a node server, that keeps the shelf within its bounds.
                sweeper = Sweeper(
                    shelf,
                    config.capacity,
                    counters,
                    walk=Walk(shelf.backend, counters),
                    keep_tails=config.handover_keep_s or None,
                )
                sweeper.start()
            cache = cls(
                shelf,
                namespace,
                disk_tier=disk_tier,
                memory_tier=memory_tier,
                staging_bytes=config.least_staging,
                io_threads=config.io_threads,
                group_by_salt=config.group_by_salt,
                check_finite=config.check_finite,
                timeout_s=timeout_s,
                drain_s=config.shutdown_drain_s,
                counters=counters,
                uses=uses,
            )
        except BaseException:
            if sweeper is not None:
                sweeper.close()
            if memory_tier is not None:
                memory_tier.close()
            if disk_tier is not None:
                disk_tier.close()
            shelf.close()
            raise
        cache._owns_shelf = cache._owns_uses = True
        cache._sweeper = sweeper
        cache._own_memory = cache._own_memory or memory_tier
        return cache

    @classmethod
    def get_or_create(cls, instance_id: str, config: Config, model: ModelFacts) -> ChunkCache:
        """Return this process's cache of this name; open it if there is none.

        Parameters
        ----------
        instance_id : str
        config, model
            As for :meth:`open`.

        Raises
        ------
        ConfigError
            (A ValueError.) If the cache exists with another configuration or other facts.
        """
        with cls._instances_lock:
            found = cls._instances.get(instance_id)
            if found is None:
                cache = cls.open(config, model)
                cls._instances[instance_id] = (config, model, cache)
                return cache
        different = _differences(found[0], config, found[1], model)
        if different:
            raise ConfigError(
                f"the cache {instance_id!r} exists already, with another {', '.join(different)}:"
                " use another instance_id, or destroy it first"
            )
        return found[2]

    @classmethod
    def get(cls, instance_id: str) -> ChunkCache | None:
        """Return this process's cache of this name, None if there is none."""
        with cls._instances_lock:
            found = cls._instances.get(instance_id)
        return None if found is None else found[2]

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close and remove the cache of this name, if there is one."""
        with cls._instances_lock:
            found = cls._instances.pop(instance_id, None)
        if found is not None:
            found[2].close()

    # -------------------------------------------------------------- by kind

    def of(self, kind: Kind) -> ChunkCache:
        """Return the cache of a kind of this namespace; the same each time.

        The caches of a namespace's kinds are closed together, and share counters and failed keys.
        Each has staging and threads of its own, and without a memory tier memory for prefetched
        chunks, with equal limits.

        Parameters
        ----------
        kind : Kind
            ``full``, ``window`` or ``state``.

        Raises
        ------
        ConfigError
            If the namespace has no layers of this kind.
        """
        fmt = self.fmt.of(kind)
        with self._kinds_lock:
            self._check_open()
            found = self._caches.get(kind)
            if found is None:
                found = self._caches[kind] = ChunkCache(self.shelf, fmt, **self._options)
                found._caches, found._kinds_lock = self._caches, self._kinds_lock
                found.failed = self.failed
            return found

    def find_hit(
        self,
        tokens: Tokens | None = None,
        *,
        identity: PromptIdentity = _PLAIN,
        timeout: float | None = None,
    ) -> int:
        """Return how many leading tokens of a prompt an engine could load: of all kinds.

        Parameters
        ----------
        tokens, identity
            As for :meth:`chunk_keys`. An engine computes at least the last of them itself.
        timeout : float, optional
            Seconds, after which the result is 0.

        Returns
        -------
        int
            The largest multiple of the chunk size for which the shelf or the disk tier has all
            full chunks, the window chunks in reach of its end, and the state at its end.

        Raises
        ------
        ValueError
            If tokens are missing.
        """
        prompt = self._prompt("find_hit", tokens, None, identity)
        handle = _LookupHandle(self, self._timeout)
        handle._lookup = self._hits().submit(
            prompt.tokens[:-1],
            lambda: self._chain(prompt.identity),
            on_done=handle.on_lookup_done,
        )
        return handle.result(timeout)

    def store_state(
        self,
        tokens: Tokens | None = None,
        state: Mapping[str, Tensor] | None = None,
        *,
        identity: PromptIdentity = _PLAIN,
        timeout: float | None = None,
    ) -> StoreReport:
        """Store the state after the last of `tokens`, unless it is on the shelf.

        Parameters
        ----------
        tokens, identity
            As for :meth:`chunk_keys`; whole chunks.
        state : Mapping of str to Tensor
            The tensors of the whole model, on the CPU, by their names in state objects
            (:mod:`kvshelf.kv.state_tensors`).
        timeout : float, optional
            Seconds. A state that was copied by then is still published.

        Raises
        ------
        ValueError
            If an argument is missing or does not fit the namespace.
        ConfigError
            If the namespace has no layers of kind state.
        """
        cache = self.of(STATE)
        prompt = cache._at_state("store_state", tokens, identity)
        if state is None:
            raise ValueError("store_state() needs state, which is missing")
        return cache._store(prompt, StateTensors(cache.fmt, state).bound(), timeout)

    def retrieve_state(
        self,
        tokens: Tokens | None = None,
        *,
        identity: PromptIdentity = _PLAIN,
        timeout: float | None = None,
    ) -> dict[str, Tensor] | None:
        """Load the state after the last of `tokens`.

        Parameters
        ----------
        tokens, identity
            As for :meth:`store_state`.
        timeout : float, optional
            Seconds, after which the result is None.

        Returns
        -------
        dict of str to Tensor, or None
            The tensors of the whole model, as for :meth:`store_state`. None if there is no such
            state, or it could not be loaded.

        Raises
        ------
        ValueError
            If tokens are missing, or are not whole chunks.
        ConfigError
            If the namespace has no layers of kind state.
        """
        cache = self.of(STATE)
        prompt = cache._at_state("retrieve_state", tokens, identity)
        state = empty_state(cache.fmt)
        opened = StateTensors(cache.fmt, state).bound()
        found = cache._submit_retrieve(prompt, opened).result(timeout)
        return state if bool(found.any()) else None

    # -------------------------------------------------------------- by tokens

    @property
    def chunk_size(self) -> int:
        """Tokens in a chunk."""
        return self.fmt.chunk_size

    @property
    def namespace(self) -> Namespace:
        """The namespace."""
        return self.fmt.namespace

    def bind(self, caches: PagedCaches, layout: PagedLayout | None = None) -> None:
        """Use these paged caches for all calls with a `slot_mapping` and without `kv`.

        Parameters
        ----------
        caches, layout
            As for :class:`kvshelf.forms.PagedKV`.

        Raises
        ------
        ValueError
            If they do not fit the namespace.
        """
        self._bound, self._bound_slots = paged_memory(self.fmt, caches, layout)

    def chunk_keys(
        self,
        tokens: Tokens | None = None,
        mask: Tensor | Sequence[bool] | None = None,
        *,
        identity: PromptIdentity = _PLAIN,
    ) -> list[ChunkKey]:
        """Return the whole chunks of a prompt that `mask` selects, with their keys.

        Parameters
        ----------
        tokens : Sequence[int] or Tensor
            Token ids of the prompt from its beginning; a one-dimensional tensor.
        mask : Tensor or Sequence[bool], optional
            bool [tokens]: a run of False, a multiple of the chunk size, then True.
        identity : PromptIdentity

        Raises
        ------
        ValueError
            If tokens are missing or are not token ids, or the mask does not have this form.
        """
        prompt = self._prompt("chunk_keys", tokens, mask, identity)
        size = self.chunk_size
        return [
            ChunkKey(chunk.index * size, (chunk.index + 1) * size, chunk.key)
            for chunk in self._chunks(prompt)
        ]

    def lookup(
        self,
        tokens: Tokens | None = None,
        *,
        tiers: Collection[str] | None = None,
        identity: PromptIdentity = _PLAIN,
        timeout: float | None = None,
    ) -> int:
        """Return how many leading tokens of a prompt can be retrieved.

        Parameters
        ----------
        tokens, identity
            As for :meth:`chunk_keys`.
        tiers : Collection[str], optional
            The tiers to search: ``memory`` (the memory tier; without one, prefetched chunks),
            ``disk`` (the disk tier), ``shelf``, or several of them; all by default.
        timeout : float, optional
            Seconds, after which the result is 0.

        Raises
        ------
        ValueError
            If tokens are missing, or a tier is unknown.
        """
        return self.submit_lookup(tokens, tiers=tiers, identity=identity).result(timeout)

    def submit_lookup(
        self,
        tokens: Tokens | None = None,
        *,
        tiers: Collection[str] | None = None,
        identity: PromptIdentity = _PLAIN,
    ) -> Handle[int]:
        """Start :meth:`lookup`."""
        prompt = self._prompt("lookup", tokens, None, identity)
        wanted = _tiers(tiers)
        handle = _LookupHandle(self, self._timeout)
        if wanted == ("memory",):
            handle.set_result(self._memory.leading(self._chunks(prompt)))
        else:
            handle._lookup = self._search(prompt, handle.on_lookup_done, wanted)
        return handle

    def store(
        self,
        tokens: Tokens | None = None,
        mask: Tensor | Sequence[bool] | None = None,
        kv: KVLike | None = None,
        *,
        slot_mapping: Tensor | None = None,
        identity: PromptIdentity = _PLAIN,
        timeout: float | None = None,
    ) -> StoreReport:
        """Store the whole chunks of a prompt that are not on the shelf; wait until they are stored.

        Unlike :meth:`submit_store` it first looks up the leading chunks, and waits for staging
        instead of dropping chunks.

        Parameters
        ----------
        tokens, mask, identity
            As for :meth:`chunk_keys`.
        kv : PagedKV, TupleKV, BlobKV, Tensor or Sequence of (Tensor, Tensor)
            The prompt's KV from position 0 on; further tokens are ignored.
        slot_mapping : Tensor
            In place of `kv`, if paged caches are bound: the slot of each token.
        timeout : float, optional
            Seconds. Chunks that were copied by then are still published.

        Raises
        ------
        ValueError
            If an argument is missing, does not fit the namespace or has too few tokens.
        """
        prompt = self._prompt("store", tokens, mask, identity)
        return self._store(prompt, self._open("store", kv, slot_mapping), timeout)

    def _store(self, prompt: _Prompt, opened: BoundKV, timeout: float | None) -> StoreReport:
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        items = self._store_items(prompt, opened)
        handle = _StoreHandle(self, len(items), self._timeout)
        search = _LookupHandle(self, self._timeout)
        search._lookup = self._search(prompt, search.on_lookup_done, ("shelf",))
        known = search.result(max(0.0, deadline - time.monotonic())) // self.chunk_size
        handle.count("existed", known)
        self._store_all(handle, items[known:], deadline)
        return handle.result(max(0.0, deadline - time.monotonic()))

    def submit_store(
        self,
        tokens: Tokens | None = None,
        mask: Tensor | Sequence[bool] | None = None,
        kv: KVLike | None = None,
        *,
        slot_mapping: Tensor | None = None,
        identity: PromptIdentity = _PLAIN,
    ) -> Handle[StoreReport]:
        """Copy the whole chunks of a prompt and store them in the background.

        Touches no storage. Chunks that do not fit into staging are dropped.

        Parameters
        ----------
        tokens, mask, kv, slot_mapping, identity
            As for :meth:`store`.
        """
        prompt = self._prompt("store", tokens, mask, identity)
        items = self._store_items(prompt, self._open("store", kv, slot_mapping))
        handle = _StoreHandle(self, len(items), self._timeout)
        self._store_all(handle, items, 0.0)
        return handle

    def retrieve(
        self,
        tokens: Tokens | None = None,
        mask: Tensor | Sequence[bool] | None = None,
        kv: KVLike | None = None,
        *,
        slot_mapping: Tensor | None = None,
        identity: PromptIdentity = _PLAIN,
        timeout: float | None = None,
    ) -> Tensor:
        """Load the leading whole chunks of a prompt into the caller's memory.

        Parameters
        ----------
        tokens, identity
            As for :meth:`chunk_keys`.
        mask : Tensor or Sequence[bool], optional
            False for leading tokens whose KV the caller already has.
        kv, slot_mapping
            The destination: as for :meth:`store`. Places of chunks after the retrieved ones may
            be overwritten with undefined content.
        timeout : float, optional
            Seconds. Chunks that have not arrived by then are not retrieved.

        Returns
        -------
        Tensor
            bool [tokens] on the CPU: the tokens whose KV was written, a run that begins with
            the first token that `mask` selects.

        Raises
        ------
        ValueError
            As for :meth:`store`.
        DeviceUnavailableError
            If the destination's device failed.
        """
        return self.submit_retrieve(
            tokens, mask, kv=kv, slot_mapping=slot_mapping, identity=identity
        ).result(timeout)

    def submit_retrieve(
        self,
        tokens: Tokens | None = None,
        mask: Tensor | Sequence[bool] | None = None,
        kv: KVLike | None = None,
        *,
        slot_mapping: Tensor | None = None,
        identity: PromptIdentity = _PLAIN,
    ) -> Handle[Tensor]:
        """Start :meth:`retrieve`. The memory may be written until the handle is done."""
        prompt = self._prompt("retrieve", tokens, mask, identity)
        return self._submit_retrieve(prompt, self._open("retrieve", kv, slot_mapping))

    def _submit_retrieve(self, prompt: _Prompt, opened: BoundKV) -> Handle[Tensor]:
        slots = self._slots(prompt, opened)
        handle = _RetrieveHandle(self, prompt, self._timeout, opened, slots)
        size = self.chunk_size
        self.counters.add("lookup_tokens", len(prompt.tokens) - prompt.first_chunk * size)
        handle._lookup = self._search(prompt, handle.on_lookup_done, TIERS)
        return handle

    def prefetch(
        self,
        tokens: Tokens | None = None,
        mask: Tensor | Sequence[bool] | None = None,
        *,
        identity: PromptIdentity = _PLAIN,
        timeout: float | None = None,
    ) -> int:
        """Load the leading whole chunks of a prompt into memory, for a later retrieve.

        Parameters
        ----------
        tokens, mask, identity
            As for :meth:`retrieve`.
        timeout : float, optional
            Seconds. Chunks that have not arrived by then are not prefetched.

        Returns
        -------
        int
            Number of tokens in memory, counted from the first that `mask` selects; limited by the
            memory tier, without one by ``prefetch_bytes``.

        Raises
        ------
        ValueError
            As for :meth:`chunk_keys`.
        """
        return self.submit_prefetch(tokens, mask, identity=identity).result(timeout)

    def submit_prefetch(
        self,
        tokens: Tokens | None = None,
        mask: Tensor | Sequence[bool] | None = None,
        *,
        identity: PromptIdentity = _PLAIN,
    ) -> Handle[int]:
        """Start :meth:`prefetch`. It goes on when the handle is dropped."""
        self._check_kind("prefetch")
        prompt = self._prompt("prefetch", tokens, mask, identity)
        handle = _PrefetchHandle(self, prompt, self._timeout, self._memory)
        handle._lookup = self._search(prompt, handle.on_lookup_done, TIERS)
        return handle

    # -------------------------------------------------------------- by chunks

    def remove(
        self,
        key: ChunkKey,
        *,
        tiers: Collection[str] | None = None,
        identity: PromptIdentity = _PLAIN,
    ) -> bool:
        """Remove the objects of one chunk. A store of it that is running may bring it back.

        Blocks on the storage. Other engines on the shelf miss the chunk from then on.

        Parameters
        ----------
        key : ChunkKey
            See :meth:`chunk_keys`. Of several kinds, the one of this cache is removed.
        tiers : Collection[str], optional
            Where to remove it, see :meth:`lookup`; everywhere by default.
        identity : PromptIdentity
            That of the prompt: with ``group_by_salt`` it names the folder.

        Returns
        -------
        bool
            Whether there was anything.

        Raises
        ------
        ValueError
            If a tier is unknown.
        StorageError
            If the storage refused or failed. Some objects may be gone.
        """
        self._check_open()
        wanted = _tiers(tiers)
        size = self.chunk_size
        group = self._chain(identity).salt_group
        chunk = Chunk(key.key, bytes(32), key.start // size, size, salt_group=group)
        refs = [ObjectRef(chunk, shard) for shard in range(self.fmt.shards)]
        removed = 0
        try:
            if "shelf" in wanted:
                # First: a load that runs copies what it finds there into the tiers.
                view = self.shelf.view(self.fmt)
                removed += sum(view.delete(ref) for ref in refs)
            for name, tier in self._tiers.items():
                if name in wanted:
                    removed += tier.remove(self.fmt, refs)
        finally:
            if self._transfer is not None:
                self._transfer.forget_stored()
            for cache in list(self._caches.values()):
                for service in list(cache._lookups.values()):
                    service.note_removed((self._kind_key(chunk),))
        return removed > 0

    @property
    def transfer(self) -> Transfer:
        """The store and load pipelines, for engines that track requests chunk by chunk."""
        with self._lock:
            self._check_open()
            if self._transfer is None:
                shelf = TieredShelf(self.shelf, list(self._tiers.values()))
                self._transfer = Transfer(
                    shelf.view(self.fmt),
                    self._bound,
                    self.staging,
                    counters=self.counters,
                    load_threads=self._threads[0],
                    store_threads=self._threads[1],
                    check_finite=self._check_finite,
                    on_thread_start=self._on_thread_start,
                )
            return self._transfer

    @property
    def lookups(self) -> LookupService:
        """The lookups over all tiers, for engines that track requests themselves."""
        return self._service(TIERS)

    def close(self) -> None:
        """Wait for unfinished stores for a bounded time, then stop the threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            transfer, services = self._transfer, list(self._lookups.values())
        for service in services:
            service.close()
        if transfer is not None:
            lost = transfer.close(self._drain)
            if lost:
                logger.warning("%d chunks were not stored in time and are lost", lost)
        self.staging.close()
        self._memory.close()
        with self._kinds_lock:
            others = [cache for cache in self._caches.values() if not cache._closed]
        for cache in others:
            cache.close()
        if self._owns_uses:
            self._uses.close()
        if self._own_memory is not None:
            self._own_memory.close()
        if self._sweeper is not None:
            self._sweeper.close()
        if self._owns_shelf:
            if self._disk_tier is not None:
                self._disk_tier.close()
            self.shelf.close()

    # ----------------------------------------------------------------- inside

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this cache is closed")

    def _service(self, tiers: tuple[str, ...]) -> LookupService:
        with self._lock:
            self._check_open()
            service = self._lookups.get(tiers)
            if service is None:
                started = self._on_thread_start
                near = [tier for name, tier in self._tiers.items() if name in tiers]
                shelf = TieredShelf(self.shelf, near)
                service = self._lookups[tiers] = LookupService(
                    shelf.view(self.fmt, ask_shelf="shelf" in tiers),
                    failed=self.failed,
                    counters=self.counters,
                    remembers="shelf" in tiers,
                    on_thread_start=None if started is None else lambda: started("lookup"),
                    # A hit of windows that reach so far is the longest run of chunks.
                    window=UNLIMITED,
                )
            return service

    def _hits(self) -> LookupService:
        """Return the lookups over all kinds."""
        with self._lock:
            self._check_open()
            service = self._lookups.get(_ALL_KINDS)
            if service is None:
                near = [] if self._disk_tier is None else [self._disk_tier]
                shelf = TieredShelf(self.shelf, near)
                views = [shelf.view(self.fmt.of(kind)) for kind in self.fmt.kinds]
                service = self._lookups[_ALL_KINDS] = LookupService(
                    views[0],
                    failed=self.failed,
                    counters=self.counters,
                    others={view.fmt.kind: view for view in views[1:]},
                    window=window_of(self.fmt),
                )
            return service

    def _kind_key(self, chunk: Chunk) -> bytes:
        return kind_key(chunk.key, self.fmt.kind)

    def _note_used(self, chunks: Sequence[Chunk]) -> None:
        """Record that chunks of this kind were used."""
        self._uses.note(self.shelf.view(self.fmt), chunks)

    def _note_stored(self, chunk: Chunk) -> None:
        """Let lookups find a chunk that was just published."""
        for cache in list(self._caches.values()):
            for service in list(cache._lookups.values()):
                service.note_published((self._kind_key(chunk),))

    def _next_id(self) -> str:
        return f"cache-{next(self._ids)}"

    def _check(self) -> None:
        transfer = self._transfer
        if transfer is not None:
            transfer.check()

    def _prompt(
        self,
        method: str,
        tokens: Tokens | None,
        mask: Tensor | Sequence[bool] | None,
        identity: PromptIdentity,
    ) -> _Prompt:
        self._check_open()
        if tokens is None:
            raise ValueError(f"{method}() needs tokens, which is missing")
        ids = _token_ids(tokens)
        first = 0 if mask is None else _false_run(mask, len(ids), self.chunk_size)
        return _Prompt(ids, first // self.chunk_size, identity)

    def _check_kind(self, method: str) -> None:
        if self.fmt.kind == STATE:
            raise ValueError(
                f"{method}() is for the KV of tokens, and this cache is of kind state: use"
                " store_state() and retrieve_state()"
            )

    def _at_state(self, method: str, tokens: Tokens | None, identity: PromptIdentity) -> _Prompt:
        """Return a prompt of which only the last chunk is selected."""
        prompt = self._prompt(method, tokens, None, identity)
        chunks, rest = divmod(len(prompt.tokens), self.chunk_size)
        if rest or not chunks:
            raise ValueError(
                f"{method}() got {len(prompt.tokens)} tokens; expected a multiple of the chunk size"
                f" {self.chunk_size}: states are stored at the ends of chunks"
            )
        return replace(prompt, first_chunk=chunks - 1)

    def _chain(self, identity: PromptIdentity) -> KeyChain:
        return KeyChain(
            self.fmt.namespace.digest,
            self.chunk_size,
            salt=identity.salt,
            lora_digest=identity.lora_digest,
            items=identity.items,
            salt_group=salt_group_of(identity.salt) if self._group_by_salt else "_",
        )

    def _chunks(self, prompt: _Prompt) -> list[Chunk]:
        chain = self._chain(prompt.identity)
        chain.extend(prompt.tokens)
        return chain.chunks[prompt.first_chunk :]

    def _search(
        self, prompt: _Prompt, found: Callable[[Lookup], None], tiers: tuple[str, ...]
    ) -> Lookup:
        return self._service(tiers).submit(
            prompt.tokens,
            lambda: self._chain(prompt.identity),
            first_chunk=prompt.first_chunk,
            on_done=found,
        )

    def _open(self, method: str, kv: KVLike | None, slot_mapping: Tensor | None) -> BoundKV:
        self._check_kind(method)
        if kv is not None:
            if slot_mapping is not None:
                raise ValueError(
                    f"{method}() got both kv and slot_mapping; a slot mapping goes with bound"
                    " caches, or into PagedKV(caches, layout, slot_mapping)"
                )
            return _form(kv).open(self.fmt)
        if self._bound is None:
            raise ValueError(
                f"{method}() needs kv, which is missing (or bind paged caches, and give"
                " slot_mapping)"
            )
        if slot_mapping is None:
            raise ValueError(f"{method}() needs kv or slot_mapping, which are both missing")
        return with_slots(self.fmt, self._bound, host_slot_mapping(slot_mapping), self._bound_slots)

    def _slots(self, prompt: _Prompt, opened: BoundKV) -> list[Tensor]:
        """Return the slots of each whole chunk that the prompt's mask selects."""
        size = self.chunk_size
        end = len(prompt.tokens) // size * size
        if opened.tokens < end:
            raise ValueError(
                f"KV of {opened.tokens} tokens was given for {len(prompt.tokens)} tokens; expected"
                f" at least {end}"
            )
        starts = range(prompt.first_chunk * size, end, size)
        return [opened.slots(start, start + size) for start in starts]

    def _store_items(self, prompt: _Prompt, opened: BoundKV) -> list[ChunkSlots]:
        items = [
            ChunkSlots(chunk, slots, opened.memory)
            for chunk, slots in zip(self._chunks(prompt), self._slots(prompt, opened), strict=True)
        ]
        for item in items:
            if bool((item.slots < 0).any()):
                raise ValueError(
                    f"slot_mapping is −1 for tokens of chunk {item.chunk.index}, which are not in"
                    " the cache and cannot be stored: pass fewer tokens, or a mask"
                )
        return items

    def _store_all(
        self, handle: _StoreHandle, items: Sequence[ChunkSlots], deadline: float
    ) -> None:
        begin = time.monotonic()
        for number, item in enumerate(items):
            handle.add_pending()
            try:
                outcome = self.transfer.store(
                    item,
                    repair=self.failed.is_bad(self._kind_key(item.chunk)),
                    age=time.monotonic() - begin,
                    wait=max(0.0, deadline - time.monotonic()) if deadline else 0.0,
                    on_done=handle.on_chunk_done,
                )
            except BaseException:
                handle.resolve("failed")
                raise
            if outcome is StoreOutcome.KNOWN:
                handle.resolve("existed")
            elif outcome is not StoreOutcome.QUEUED:
                handle.resolve("dropped")
                if outcome is StoreOutcome.UNAVAILABLE:
                    handle.count("dropped", len(items) - number - 1)
                    break
        handle.all_submitted()


# ----------------------------------------------------------------------------- arguments


def _tiers(given: Collection[str] | None) -> tuple[str, ...]:
    """Return the tiers that a caller names, the nearest first."""
    wanted = TIERS if given is None else tuple(tier for tier in TIERS if tier in given)
    unknown = sorted(set(given or ()) - set(TIERS))
    if unknown or not wanted:
        raise ValueError(
            f"tiers is {unknown or list(given or ())}; expected some of {', '.join(TIERS)}"
        )
    return wanted


def _token_ids(tokens: Tokens) -> array[int]:
    """Return a copy of token ids; raise unless it is one sequence of integers that fit u32."""
    shape = getattr(tokens, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ValueError(
            f"tokens has shape {list(shape)}; expected one dimension: one prompt at a time"
        )
    ids = tokens.tolist() if shape is not None else tokens  # type: ignore[union-attr]
    try:
        return array("I", ids)
    except (TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"tokens contains a value that is not a token id ({error}); expected integers from 0 to"
            f" {2**32 - 1}"
        ) from error


def _false_run(mask: Tensor | Sequence[bool], tokens: int, chunk_size: int) -> int:
    """Return the number of leading False of a mask; raise unless it fits the chunk size."""
    try:
        values = mask if isinstance(mask, Tensor) else torch.tensor(list(mask))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"mask is a {type(mask).__name__}; expected one bool for each token (KV goes into kv)"
        ) from None
    if values.dtype != torch.bool and values.numel():
        raise ValueError(f"mask is {values.dtype}; expected bool (KV goes into kv)")
    if tuple(values.shape) != (tokens,):
        raise ValueError(
            f"mask has shape {list(values.shape)}; expected one value for each of {tokens} tokens"
        )
    false = tokens - int(values.sum())
    if bool(values[:false].any()):
        raise ValueError("mask has True before False; expected a run of False, then True")
    if false % chunk_size:
        raise ValueError(
            f"mask begins with {false} False; expected a multiple of the chunk size {chunk_size}:"
            " a chunk is stored and retrieved whole"
        )
    return false


def _form(kv: Any) -> KVSource:
    if isinstance(kv, Tensor):
        return BlobKV(kv)
    if isinstance(kv, Sequence) and not isinstance(kv, str | bytes):
        return TupleKV(kv)
    if hasattr(kv, "open") and not isinstance(kv, os.PathLike):
        return cast(KVSource, kv)
    raise ValueError(
        f"kv is a {type(kv).__name__}; expected PagedKV, (K, V) of each layer, or a tensor"
        " [2, layers, tokens, hidden]"
    )


def _differences(
    config: Config, other_config: Config, model: ModelFacts, other_model: ModelFacts
) -> list[str]:
    """Return the names of options and facts that differ. Values may be secret."""
    names = [
        name for name in Config.model_fields if getattr(config, name) != getattr(other_config, name)
    ]
    return names + [
        field.name
        for field in fields(model)
        if getattr(model, field.name) != getattr(other_model, field.name)
    ]
