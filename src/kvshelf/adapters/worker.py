"""The adapter of an engine's worker: stores and loads its KV through a node server.

Owns :class:`WorkerAdapter`: the caches that are registered, and the operations on them. Chunks move
through :mod:`kvshelf.transfer`, as those of kvshelf's own connector. ``README.md`` compares the
adapter with vLLM's
(vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/multi_process_adapter.py).

Contracts
---------
* No method waits for the server, except the constructor, ``register_kv_caches`` and ``shutdown``,
  for a bounded time.
* A store has copied the KV when it returns, or on a device enqueued the copy on the caller's
  current stream. Only KV in host memory whose event has not passed yet is copied later. A chunk for
  which no memory is free is not stored.
* Every operation ends, at the latest at its deadline. Without a server it fails at once.
* Whatever a load could not write is among
  :meth:`WorkerAdapter.get_block_ids_with_load_errors`: all blocks from the first chunk that it does
  not get.

Threads
-------
The methods are called by one thread, that of the worker's step. An operation that waits for an
event in host memory has a thread of its own, ``kvshelf-event``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from kvshelf.adapters.connection import Adapter
from kvshelf.adapters.copies import EngineCaches, Layout, LoadStoreOp
from kvshelf.adapters.names import PLAIN, hashed_chunk, striding_block_hashes, token_chain
from kvshelf.adapters.operations import Operation, Operations
from kvshelf.cache import PromptIdentity
from kvshelf.errors import ConfigError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.kv.topology import ShardPlan
from kvshelf.memory.chunk_memory import ChunkMemory
from kvshelf.server.connection import NodeClient
from kvshelf.shelf.view import ShelfView
from kvshelf.transfer.context import ChunkSlots, TransferContext
from kvshelf.transfer.load import Load
from kvshelf.transfer.stores import StoreOutcome, StoreResult
from kvshelf.transfer.transfers import Transfers, default_io_threads

#: How long an operation may take, unless it is stated.
OPERATION_SECONDS: Final = 30.0
#: How long the end of an adapter waits for stores.
DRAIN_SECONDS: Final = 4.0
_MEMORY_BYTES: Final = 1 << 30


class Event(Protocol):
    """What is needed of an event of the engine's device, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has passed."""

    def synchronize(self) -> None:
        """Wait until it has."""


class WorkerAdapter(Adapter):
    """Stores and loads the KV of one worker through a node server.

    Parameters
    ----------
    server_url, model, block_size, client
        As for :class:`kvshelf.adapters.scheduler.SchedulerAdapter`.
    plan : ShardPlan, optional
        The shards that this worker holds, or a function that returns them for the namespace; all
        of them when absent.
    timeout_s : float
        An operation that has not ended after so many seconds, 30 by default, has failed.
    memory_bytes : int
        Memory for KV on its way to the server, 1 GiB by default. Chunks for which none is free are
        not stored.

    Raises
    ------
    ConfigError, UnavailableStorageError, UnsupportedError
        As for :class:`kvshelf.adapters.scheduler.SchedulerAdapter`.
    """

    def __init__(
        self,
        server_url: str,
        model: Namespace | ModelFacts,
        block_size: int,
        *,
        plan: ShardPlan | Callable[[Namespace], ShardPlan] | None = None,
        timeout_s: float = OPERATION_SECONDS,
        memory_bytes: int = _MEMORY_BYTES,
        client: NodeClient | None = None,
    ) -> None:
        super().__init__(server_url, model, block_size, client)
        try:
            if plan is None:
                plan = ShardPlan.whole(self.fmt.shards)
            self._plan = plan(self.namespace) if callable(plan) else plan
        except BaseException:
            self._close_client()
            raise
        self._timeout = timeout_s
        self._memory_bytes = memory_bytes
        self._caches: EngineCaches | None = None
        self._operations = Operations()
        self._transfers: Transfers | None = None
        self._token_view: ShelfView
        self._hash_view: ShelfView
        #: The loads under way, by their names in the transfers.
        self._loads: dict[str, Operation] = {}
        self._numbers = itertools.count()
        self._closing = ExitStack()

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, Tensor],
        layout: Layout | Mapping[str, Layout] | None = None,
    ) -> None:
        """Use these paged caches for all operations.

        Parameters
        ----------
        kv_caches : Mapping[str, Tensor]
            The cache of each layer of this worker, by the layer's name in the namespace.
        layout : PagedLayout or PermutedLayout, or a mapping of them by layer
            How a block lies in the caches: known, or learned by
            :func:`kvshelf.kv.layout_learning.learn_layout`. It is needed: with one that was only
            guessed from shapes, wrong KV could be stored.

        Raises
        ------
        ConfigError
            If the layout is missing, or the caches do not fit the namespace.
        """
        if layout is None:
            raise ConfigError(
                "register_kv_caches() needs layout, which is missing: pass how a block lies in the"
                " caches, for example PagedLayout.from_bhnc(cache, head_size)"
            )
        if self._caches is not None:
            raise ValueError("KV caches are registered already: an adapter serves them to its end")
        caches = EngineCaches(self.fmt, self._plan, self.block_size, kv_caches, layout)
        on_gpu = caches.device.type == "cuda"
        if on_gpu:
            self._client.page_lock(caches.device)
        with ExitStack() as opened:
            shelves = self._open_shelves(in_place=not on_gpu)
            for shelf in shelves:
                opened.callback(shelf.close)
            memory = ChunkMemory(
                self._memory_bytes,
                device=caches.device if on_gpu else None,
                share=self._client.share,
                counters=self._counters,
            )
            opened.callback(memory.close)
            loading, storing = default_io_threads(shelves[0].backend.properties)
            context = TransferContext(
                self.fmt,
                shelves[0].backend,
                caches.memory,
                memory,
                self._counters,
                self._plan,
                load_threads=loading,
                store_threads=storing,
            )
            self._transfers = Transfers([context])
            self._closing = opened.pop_all()
        memory.grow()
        self._token_view = shelves[0].view(self.fmt)
        self._hash_view = shelves[1].view(self.hashed_fmt)
        self._caches = caches

    def submit_store_request(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: Event | None = None,
        *,
        identity: PromptIdentity = PLAIN,
    ) -> None:
        """Store the whole chunks of an operation. Never waits for the server.

        Parameters
        ----------
        request_id : str
            The engine's id of the request, by which :meth:`get_finished` reports it.
        op : LoadStoreOp
            The tokens, or their hashes, and the blocks.
        event : Event, optional
            Passes when the KV is in the blocks. Without one it is there.
        identity : PromptIdentity
            As for the lookup.

        Raises
        ------
        ValueError
            If the operation is malformed, or no caches are registered.
        """
        self._begin(request_id, op, event, identity, is_store=True)

    def batched_submit_store_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Event | None = None,
        *,
        identities: Sequence[PromptIdentity] | None = None,
    ) -> None:
        """Store for several requests, see :meth:`submit_store_request`. Each ends by itself.

        Raises
        ------
        ValueError
            As for :meth:`submit_store_request`, or if the arguments differ in length.
        """
        for request_id, op, identity in _zipped(request_ids, ops, identities):
            self.submit_store_request(request_id, op, event, identity=identity)

    def submit_retrieve_request(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: Event | None = None,
        *,
        identity: PromptIdentity = PLAIN,
    ) -> None:
        """Load the whole chunks of an operation into its blocks. Never waits for the server.

        Parameters
        ----------
        request_id : str
            The engine's id of the request, by which :meth:`get_finished` reports it.
        op : LoadStoreOp
            The tokens, or their hashes, and the blocks.
        event : Event, optional
            Passes when the engine's earlier work no longer uses the blocks. On a device, loads also
            wait for what the caller's current stream has to do.
        identity : PromptIdentity
            As for the lookup.

        Raises
        ------
        ValueError
            If the operation is malformed, or no caches are registered.
        """
        self._begin(request_id, op, event, identity, is_store=False)

    def batched_submit_retrieve_requests(
        self,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Event | None = None,
        *,
        identities: Sequence[PromptIdentity] | None = None,
    ) -> None:
        """Load for several requests, see :meth:`submit_retrieve_request`. Each ends by itself.

        Raises
        ------
        ValueError
            As for :meth:`submit_retrieve_request`, or if the arguments differ in length.
        """
        for request_id, op, identity in _zipped(request_ids, ops, identities):
            self.submit_retrieve_request(request_id, op, event, identity=identity)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads could not fill since the last call: compute them again.

        A load's blocks are here before :meth:`get_finished` names its request, or with it.
        """
        return self._operations.take_failed_blocks()

    def get_finished(self, finished_req_ids_from_engine: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks may be released, and those whose loads have ended.

        Parameters
        ----------
        finished_req_ids_from_engine : set of str
            The requests that the engine has finished; it may name one several times.

        Returns
        -------
        set of str
            Of the requests named in this call or before, those without a store under way. Each
            once.
        set of str
            The requests whose loads have ended since the last call.
        """
        for operation in self._operations.late():
            self._expire(operation)
        self._note_loads()
        finished = self._operations.take_finished(finished_req_ids_from_engine)
        return finished, self._operations.take_loaded()

    def shutdown(self) -> None:
        """Wait a few seconds for stores, end all operations and close the connection. Idempotent.

        When it returns, nothing accesses the caches any more.
        """
        self._operations.close(DRAIN_SECONDS)
        if self._transfers is not None:
            self._transfers.close()
            self._note_loads()
            self._transfers = None
        self._operations.expire_all()
        self._closing.close()
        self._close_client()

    # ------------------------------------------------------------------------- operations

    def _begin(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: Event | None,
        identity: PromptIdentity,
        *,
        is_store: bool,
    ) -> None:
        """Check an operation, and begin it unless there is nothing to copy, or no server."""
        caches = self._caches
        if caches is None:
            raise ValueError("no KV caches are registered: call register_kv_caches first")
        slots = caches.slots(op, is_store=is_store)
        if op.block_hashes is not None:
            hashes = striding_block_hashes(op.block_hashes, self.blocks_in_chunk)
            chunks = [hashed_chunk(self.hashed_fmt, block_hash) for block_hash in hashes]
        blocks = caches.blocks(op, len(slots))
        operation = self._operations.begin(request_id, self._timeout, blocks, is_store=is_store)
        if not slots:
            return
        if not self._client.is_connected:
            self._operations.expire(operation)
            return
        if op.token_ids is not None:
            try:
                chain = token_chain(self.fmt, identity)
                chain.extend(op.token_ids[: op.end // self.chunk_size * self.chunk_size])
            except ValueError as error:
                self._log.warning("request %s was not copied: %s", request_id, error)
                self._operations.expire(operation)
                return
            chunks = chain.chunks[op.start // self.chunk_size :]
        start = self._store if is_store else self._load
        view = self._token_view if op.block_hashes is None else self._hash_view
        items = list(map(ChunkSlots, chunks, slots))
        if event is None or _may_begin(event, caches.device):
            start(operation, view, items)
            return

        def start_later() -> None:
            event.synchronize()
            start(operation, view, items)

        threading.Thread(target=start_later, name="kvshelf-event", daemon=True).start()

    def _store(self, operation: Operation, view: ShelfView, items: Sequence[ChunkSlots]) -> None:
        """Copy chunks, and have them published."""
        operations, transfers = self._operations, self._transfers
        if transfers is None or not operations.enter(operation):
            return

        def stored(number: int, _: Chunk, result: StoreResult) -> None:
            operations.end_chunk(operation, number, is_done=result.is_stored)

        for number, item in enumerate(items):
            is_queued = is_there = False
            try:
                outcome = transfers.stores[FULL].store(view, item, on_done=partial(stored, number))
                is_queued = outcome is StoreOutcome.QUEUED
                is_there = outcome is StoreOutcome.KNOWN
                problem = outcome.value
            except Exception as error:  # noqa: BLE001 - it must not end the engine's step
                problem = str(error)
            if not (is_queued or is_there):
                text = "a chunk of request %s was not stored: %s"
                self._log.warning(text, operation.request_id, problem)
            if not is_queued:
                operations.end_chunk(operation, number, is_done=is_there)
        operations.leave(operation)

    def _load(self, operation: Operation, view: ShelfView, items: Sequence[ChunkSlots]) -> None:
        """Begin to load chunks; the end of the load is the end of the access."""
        transfers = self._transfers
        if transfers is None or not self._operations.enter(operation):
            return
        first = 0
        while first < len(items) and bool((items[first].slots < 0).all()):
            # Nothing is written for it.
            self._operations.end_chunk(operation, first, is_done=True)
            first += 1
        if first == len(items):
            self._operations.leave(operation)
            return
        name = f"{next(self._numbers)} {operation.request_id}"
        self._loads[name] = operation
        try:
            transfers.load(name, {FULL: view}, {FULL: items[first:]})
        except Exception as error:  # noqa: BLE001 - it must not end the engine's step
            del self._loads[name]
            self._log.warning("request %s was not loaded: %s", operation.request_id, error)
            for number in range(first, len(items)):
                self._operations.end_chunk(operation, number, is_done=False)
            self._operations.leave(operation)

    def _note_loads(self) -> None:
        """Note the loads that have ended."""
        transfers = self._transfers
        for load in transfers.poll() if transfers is not None else ():
            self._end_load(load)

    def _end_load(self, load: Load) -> None:
        operation = self._loads.pop(load.request_id)
        piece = load.pieces[FULL]
        chunks = len(operation.blocks)
        skipped = chunks - len(piece.items)
        arrived = skipped + piece.leading
        if arrived < chunks and not operation.is_expired:
            self._log.warning(
                "%d of %d chunks of request %s were not loaded",
                chunks - arrived,
                chunks,
                operation.request_id,
            )
        for number in range(chunks):
            self._operations.end_chunk(operation, number, is_done=number < arrived)
        self._operations.leave(operation)

    def _expire(self, operation: Operation) -> None:
        """End an operation whose time is over, once nothing accesses memory for it."""
        for name, load in list(self._loads.items()):
            if load is operation and self._transfers is not None:
                self._transfers.cancel(name)
        self._operations.expire(operation)


def _may_begin(event: Event, device: torch.device) -> bool:
    """Whether a copy that begins now begins after the event."""
    if device.type == "cpu":
        return event.query()
    torch.cuda.current_stream(device).wait_event(event)  # type: ignore[arg-type]
    return True


def _zipped(
    request_ids: Sequence[str],
    ops: Sequence[LoadStoreOp],
    identities: Sequence[PromptIdentity] | None,
) -> list[tuple[str, LoadStoreOp, PromptIdentity]]:
    """Return the requests of a batch; ValueError if the arguments differ in length."""
    prompts = [PLAIN] * len(ops) if identities is None else identities
    return list(zip(request_ids, ops, prompts, strict=True))
