"""``ChunkCache``: the interface by tokens to the KV of one namespace on a shelf.

Owns the methods that programs call (:meth:`ChunkCache.store`, :meth:`~ChunkCache.retrieve`,
:meth:`~ChunkCache.lookup`, :meth:`~ChunkCache.prefetch`), blocking and as handles to poll, and the
order in which a cache is closed.

A namespace of a hybrid model has several kinds (:mod:`kvshelf.format.kinds`). A ``ChunkCache`` is a
view of one of them, and :meth:`ChunkCache.of` gives the others of the same cache. States are no KV
of tokens, and have methods of their own.

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

import contextlib
import copy
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import ClassVar

from torch import Tensor

from kvshelf.cache.named import Named
from kvshelf.cache.operations import (
    Handle,
    StoreReport,
    find,
    find_in_memory,
    prefetch,
    retrieve,
    store,
    submit_store,
)
from kvshelf.cache.parts import KindParts, Shared
from kvshelf.cache.prompts import (
    ChunkKey,
    KVLike,
    Mask,
    PromptIdentity,
    Tokens,
    identity_of,
    require,
    tiers_of,
)
from kvshelf.capacity.uses import Uses
from kvshelf.config import DEFAULT_MEMORY, Config
from kvshelf.errors import ConfigError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import STATE, Kind
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import KVCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.sources import PagedCaches, paged_memory
from kvshelf.kv.state_tensors import StateTensors, empty_state
from kvshelf.memory.chunk_memory import ChunkMemory
from kvshelf.metrics import Counters
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ShelfView
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.runtime import Role, open_runtime
from kvshelf.transfer.transfers import Transfers


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
    memory_bytes : int
        Host memory for chunks on their way between `kv` and the storage, and for prefetched ones;
        1 GiB by default.
    io_threads : int, optional
        Threads that load; half as many store. When absent, depends on the storage.
    group_by_salt : bool
        Keep the chunks of each salt in a folder of their own: the option of this name.
    disk_tier : DiskTier, optional
        Keeps copies of objects in a local directory, for any number of caches. Stays open when the
        cache is closed.
    chunk_memory : ChunkMemory, optional
        Such memory in place of the cache's own, for any number of caches: it may also keep what was
        loaded and stored. Stays open as well.
    timeout_s : float
        Seconds after which a blocking call ends that was given no timeout.
    drain_s : float
        Seconds for which :meth:`close` waits for unfinished stores.
    counters : Counters, optional
        Counts what is done. When absent, the cache has its own.
    uses : Uses, optional
        Records what is used. When absent, the cache has its own.

    Attributes
    ----------
    shelf : Shelf
    fmt : ObjectFormat
        Format of the objects of this cache: layers, heads, sizes, dtype of one kind.
    counters : Counters
        ``counters.snapshot()`` has the counts, by the names of the metrics.

    Raises
    ------
    ConfigError
        If the namespace does not define objects, or `memory_bytes` is too little for them.
    """

    _named: ClassVar[Named[ChunkCache]] = Named()

    def __init__(
        self,
        shelf: Shelf,
        namespace: Namespace | ObjectFormat,
        *,
        memory: KVCache | None = None,
        memory_bytes: int = DEFAULT_MEMORY,
        io_threads: int | None = None,
        group_by_salt: bool = False,
        disk_tier: DiskTier | None = None,
        chunk_memory: ChunkMemory | None = None,
        timeout_s: float = 30.0,
        drain_s: float = 4.0,
        counters: Counters | None = None,
        uses: Uses | None = None,
    ) -> None:
        fmt = ObjectFormat(namespace) if isinstance(namespace, Namespace) else namespace
        if disk_tier is not None:
            disk_tier.check_disjoint(shelf.backend)
        self.shelf = shelf
        self.counters = Counters() if counters is None else counters
        self._drain = drain_s
        #: Closes what this cache has made, after all else.
        self._closing = contextlib.ExitStack()
        if uses is None:
            uses = Uses(self.counters)
            self._closing.callback(uses.close)
        if chunk_memory is None:
            chunk_memory = ChunkMemory(memory_bytes, share=shelf.share, counters=self.counters)
            self._closing.callback(chunk_memory.close)
        chunk_memory.grow()
        self._shared = Shared(
            shelf,
            self.counters,
            uses,
            chunk_memory,
            disk_tier,
            io_threads=io_threads,
            group_by_salt=group_by_salt,
            timeout=timeout_s,
        )
        #: The views of the namespace's kinds that were made so far.
        self._views: dict[Kind, ChunkCache] = {}
        self._show(KindParts(self._shared, fmt, memory))

    def _show(self, parts: KindParts) -> None:
        """Bind this instance's attributes to the parts of one kind."""
        self._parts = parts
        self.fmt = parts.fmt
        self._views[parts.fmt.kind] = self

    def __repr__(self) -> str:
        return f"ChunkCache({self.shelf.url!r}, {self.fmt.namespace.folder!r})"

    def __enter__(self) -> ChunkCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------- instances

    @classmethod
    def open(
        cls,
        config: Config,
        model: ModelFacts,
        *,
        timeout_s: float = 30.0,
        open_served: Callable[[Counters], Shelf] | None = None,
    ) -> ChunkCache:
        """Open the shelf of `config` for the KV of `model`.

        Blocks on storage and while weight files are fingerprinted.

        Parameters
        ----------
        config : Config
            Options that concern an engine's steps have no effect.
        model : ModelFacts
            What the KV depends on besides tokens.
        timeout_s : float
            Seconds after which a blocking call ends that was given no timeout.
        open_served : Callable, optional
            Opens the shelf behind a node server, which the cache closes.

        Raises
        ------
        ConfigError
            If the configuration or the facts cannot be used.
        StorageError
            If the storage could not be opened.
        """
        require("config", config, Config)
        require("model", model, ModelFacts)
        if config.server is not None and open_served is None:
            raise ConfigError(
                f"server is {config.server}: a cache with a node server is opened by"
                " kvshelf.open_cache"
            )
        namespace = model.namespace(
            chunk_size=config.chunk_size,
            version=config.version,
            weights=config.weights,
        )
        counters = Counters()
        opens = None if open_served is None else partial(open_served, counters)
        runtime = open_runtime(config, Role.CACHE, counters, open_served=opens)
        shelf, disk_tier = runtime.storage
        with contextlib.ExitStack() as opened:
            opened.callback(runtime.close)
            memory = ChunkMemory(
                config.memory_bytes or DEFAULT_MEMORY,
                keeps=config.memory_bytes > 0,
                share=shelf.share,
                counters=counters,
            )
            opened.callback(memory.close)
            cache = cls(
                shelf,
                namespace,
                disk_tier=disk_tier,
                chunk_memory=memory,
                group_by_salt=config.group_by_salt,
                timeout_s=timeout_s,
                counters=counters,
                uses=runtime.uses,
            )
            cache._closing = opened.pop_all()
        return cache

    @classmethod
    def get_or_create(cls, instance_id: str, config: Config, model: ModelFacts) -> ChunkCache:
        """Return this process's cache of this name; open it if there is none.

        Parameters
        ----------
        instance_id : str
            The name.
        config, model
            As for :meth:`open`.

        Raises
        ------
        ConfigError
            If the cache exists with another configuration or other facts.
        """
        return cls._named.get_or_create(instance_id, config, model, cls.open)

    @classmethod
    def get(cls, instance_id: str) -> ChunkCache | None:
        """Return this process's cache of this name, None if there is none."""
        return cls._named.get(instance_id)

    @classmethod
    def destroy(cls, instance_id: str) -> None:
        """Close and remove the cache of this name, if there is one."""
        cache = cls._named.pop(instance_id)
        if cache is not None:
            cache.close()

    # -------------------------------------------------------------- by kind

    def of(self, kind: Kind) -> ChunkCache:
        """Return the cache of a kind of this namespace; the same each time.

        The caches of a namespace's kinds are closed together, and share counters and failed keys.
        Each has threads of its own.

        Raises
        ------
        ConfigError
            If the namespace has no layers of this kind.
        """
        fmt = self.fmt.of(kind)
        with self._shared.lock:
            self._shared.check_open()
            if kind not in self._views:
                copy.copy(self)._show(KindParts(self._shared, fmt))
            return self._views[kind]

    def find_hit(
        self,
        tokens: Tokens | None = None,
        *,
        identity: PromptIdentity | None = None,
        timeout: float | None = None,
    ) -> int:
        """Return how many leading tokens of a prompt an engine could load, of all kinds.

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
        """
        prompt = self._parts.prompt("find_hit", tokens, None, identity)
        hits, usable = self._shared.hits(self.fmt), prompt.tokens[:-1]
        search = find(
            self._parts, lambda done: hits.submit(usable, prompt.make_chain, on_done=done)
        )
        return search.result(timeout)

    def store_state(
        self,
        tokens: Tokens | None = None,
        state: Mapping[str, Tensor] | None = None,
        *,
        identity: PromptIdentity | None = None,
        timeout: float | None = None,
    ) -> StoreReport:
        """Store the state after the last of `tokens`, unless it is on the shelf.

        Parameters
        ----------
        tokens, identity
            As for :meth:`chunk_keys`. The number of tokens is a multiple of the chunk size.
        state : Mapping of str to Tensor
            The tensors of the whole model, on the CPU, by their names in state objects
            (:mod:`kvshelf.kv.state_tensors`).
        timeout : float, optional
            Seconds. A state that was copied by then is still published.

        Returns
        -------
        StoreReport
            Of one chunk.

        Raises
        ------
        ValueError
            If an argument is missing or does not fit the namespace.
        ConfigError
            If the namespace has no layers of kind state.
        """
        parts = self.of(STATE)._parts
        prompt = parts.prompt("store_state", tokens, None, identity).last("store_state")
        if state is None:
            raise ValueError("store_state() needs state, which is missing")
        return store(parts, prompt, StateTensors(parts.fmt, state).bound(), timeout)

    def retrieve_state(
        self,
        tokens: Tokens | None = None,
        *,
        identity: PromptIdentity | None = None,
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
        ValueError, ConfigError
            As for :meth:`store_state`.
        """
        parts = self.of(STATE)._parts
        prompt = parts.prompt("retrieve_state", tokens, None, identity).last("retrieve_state")
        state = empty_state(parts.fmt)
        opened = StateTensors(parts.fmt, state).bound()
        is_found = retrieve(parts, prompt, opened).result(timeout)
        return state if bool(is_found.any()) else None

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
            As for :class:`kvshelf.kv.sources.PagedKV`.

        Raises
        ------
        ValueError
            If they do not fit the namespace.
        """
        self._parts.bound = paged_memory(self.fmt, caches, layout)

    def chunk_keys(
        self,
        tokens: Tokens | None = None,
        mask: Mask = None,
        *,
        identity: PromptIdentity | None = None,
    ) -> list[ChunkKey]:
        """Return the whole chunks of a prompt that `mask` selects, with their keys.

        Parameters
        ----------
        tokens : Sequence[int] or Tensor
            Token ids of the prompt from its beginning; a one-dimensional tensor.
        mask : Tensor or Sequence[bool], optional
            bool [tokens]: a run of False, a multiple of the chunk size, then True.
        identity : PromptIdentity, optional
            What else the prompt's KV depends on: salt, LoRA adapter, images.

        Raises
        ------
        ValueError
            If tokens are missing or are not token ids, or the mask does not have this form.
        """
        prompt = self._parts.prompt("chunk_keys", tokens, mask, identity)
        size = self.chunk_size
        return [
            ChunkKey(chunk.index * size, (chunk.index + 1) * size, chunk.key)
            for chunk in prompt.chunks()
        ]

    def lookup(
        self,
        tokens: Tokens | None = None,
        *,
        tiers: Collection[str] | None = None,
        identity: PromptIdentity | None = None,
        timeout: float | None = None,
    ) -> int:
        """Return how many leading tokens of a prompt can be retrieved.

        Parameters
        ----------
        tokens, identity
            As for :meth:`chunk_keys`.
        tiers : Collection[str], optional
            The tiers to search: ``memory`` (what is kept there; by default prefetched chunks),
            ``disk`` (the disk tier), ``shelf``, or several of them; all by default.
        timeout : float, optional
            Seconds, after which the result is 0.

        Returns
        -------
        int
            A multiple of the chunk size.

        Raises
        ------
        ValueError
            As for :meth:`chunk_keys`, or if a tier is unknown.
        """
        return self.submit_lookup(tokens, tiers=tiers, identity=identity).result(timeout)

    def submit_lookup(
        self,
        tokens: Tokens | None = None,
        *,
        tiers: Collection[str] | None = None,
        identity: PromptIdentity | None = None,
    ) -> Handle[int]:
        """Start :meth:`lookup` in the background: the same arguments and errors, no timeout."""
        prompt = self._parts.prompt("lookup", tokens, None, identity)
        names = tiers_of(tiers)
        if names == ("memory",):
            return find_in_memory(self._parts, prompt)
        return find(self._parts, lambda found: self._parts.search(prompt, found, names))

    def store(
        self,
        tokens: Tokens | None = None,
        mask: Mask = None,
        kv: KVLike | None = None,
        *,
        slot_mapping: Tensor | None = None,
        identity: PromptIdentity | None = None,
        timeout: float | None = None,
    ) -> StoreReport:
        """Store the whole chunks of a prompt that are not on the shelf; wait until they are stored.

        Unlike :meth:`submit_store` it first looks up the leading chunks, and waits for memory
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

        Returns
        -------
        StoreReport
            How many chunks are on the shelf, and what became of the others.

        Raises
        ------
        ValueError
            If an argument is missing, does not fit the namespace or has too few tokens.
        """
        prompt = self._parts.prompt("store", tokens, mask, identity)
        return store(self._parts, prompt, self._parts.opened("store", kv, slot_mapping), timeout)

    def submit_store(
        self,
        tokens: Tokens | None = None,
        mask: Mask = None,
        kv: KVLike | None = None,
        *,
        slot_mapping: Tensor | None = None,
        identity: PromptIdentity | None = None,
    ) -> Handle[StoreReport]:
        """Copy the whole chunks of a prompt and store them in the background.

        Touches no storage. Chunks for which there is no memory now are dropped.

        Arguments and errors are those of :meth:`store`.
        """
        prompt = self._parts.prompt("store", tokens, mask, identity)
        opened = self._parts.opened("store", kv, slot_mapping)
        return submit_store(self._parts, prompt.stored_from(opened))

    def retrieve(
        self,
        tokens: Tokens | None = None,
        mask: Mask = None,
        kv: KVLike | None = None,
        *,
        slot_mapping: Tensor | None = None,
        identity: PromptIdentity | None = None,
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
        mask: Mask = None,
        kv: KVLike | None = None,
        *,
        slot_mapping: Tensor | None = None,
        identity: PromptIdentity | None = None,
    ) -> Handle[Tensor]:
        """Start :meth:`retrieve` in the background: the same arguments and errors, no timeout.

        The destination may be written to until the handle is done.
        """
        prompt = self._parts.prompt("retrieve", tokens, mask, identity)
        return retrieve(self._parts, prompt, self._parts.opened("retrieve", kv, slot_mapping))

    def prefetch(
        self,
        tokens: Tokens | None = None,
        mask: Mask = None,
        *,
        identity: PromptIdentity | None = None,
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
            Number of tokens in memory, counted from the first that `mask` selects; limited by
            ``memory_bytes``.

        Raises
        ------
        ValueError
            As for :meth:`chunk_keys`, or for the cache of states, which has no prefetch.
        """
        return self.submit_prefetch(tokens, mask, identity=identity).result(timeout)

    def submit_prefetch(
        self,
        tokens: Tokens | None = None,
        mask: Mask = None,
        *,
        identity: PromptIdentity | None = None,
    ) -> Handle[int]:
        """Start :meth:`prefetch` in the background: the same arguments and errors, no timeout.

        It continues when the handle is dropped.
        """
        self._parts.check_tokens("prefetch")
        return prefetch(self._parts, self._parts.prompt("prefetch", tokens, mask, identity))

    # -------------------------------------------------------------- by chunks

    def remove(
        self,
        key: ChunkKey,
        *,
        tiers: Collection[str] | None = None,
        identity: PromptIdentity | None = None,
    ) -> bool:
        """Remove the objects of one chunk. A store of it that is running may bring it back.

        Blocks on the storage. Other engines on the shelf miss the chunk from then on.

        Parameters
        ----------
        key : ChunkKey
            See :meth:`chunk_keys`. Of several kinds, the one of this cache is removed.
        tiers : Collection[str], optional
            Where to remove it, see :meth:`lookup`; everywhere by default.
        identity : PromptIdentity, optional
            That of the prompt: with ``group_by_salt`` it names the folder.

        Returns
        -------
        bool
            Whether there was anything.

        Raises
        ------
        StorageError
            If the storage refused or failed. Some objects may be gone.
        """
        self._shared.check_open()
        require("key", key, ChunkKey)
        size = self.chunk_size
        group = self._parts.chain(identity_of(identity)).salt_group
        chunk = Chunk(key.key, bytes(32), key.start // size, size, salt_group=group)
        return self._parts.remove(chunk, tiers_of(tiers))

    @property
    def transfer(self) -> Transfers:
        """The store and load pipelines, for engines that track requests chunk by chunk.

        Their methods are given :attr:`objects`.
        """
        return self._parts.transfer

    @property
    def objects(self) -> ShelfView:
        """The objects of this kind on the shelf and the disk tier."""
        return self._parts.view

    @property
    def lookups(self) -> LookupService:
        """The lookups over all tiers, for engines that track requests themselves."""
        return self._parts.lookups()

    def close(self) -> None:
        """Wait for unfinished stores for a bounded time, then stop the threads. Idempotent."""
        with self._shared.lock:
            if self._shared.closed:
                return
            self._shared.closed = True
        for service in self._shared.services.values():
            service.close()
        for view in self._views.values():
            view._parts.close(self._drain)
        self._closing.close()
