"""The adapter of an engine's worker: stores and loads its KV through a node server.

Owns :class:`WorkerAdapter`: the caches that are registered, and operations from their beginning
until an engine is notified of their end. ``README.md`` compares the adapter with vLLM's
(vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/multi_process_adapter.py).

Contracts
---------
* No method waits for the server, except the constructor and ``shutdown``, for a bounded time.
* Every operation ends, at the latest at its deadline. Without a server it fails at once.
* Whatever a load could not write is among
  :meth:`WorkerAdapter.get_block_ids_with_load_errors`.

Threads
-------
The methods are called by one thread, that of the worker's step. The threads ``kvshelf-client-…``
derive keys, hash and copy (:mod:`kvshelf.adapters.stores`, :mod:`kvshelf.adapters.loads`); the
channel's thread only puts work into their queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from torch import Tensor

from kvshelf.adapters.connection import Adapter, AdapterThreads
from kvshelf.adapters.copies import EngineCaches, Layout, LoadStoreOp
from kvshelf.adapters.loads import Loads
from kvshelf.adapters.names import PLAIN
from kvshelf.adapters.operations import Operation, Operations
from kvshelf.adapters.stores import Stores
from kvshelf.adapters.transfers import Event, Transfers, Work
from kvshelf.cache import PromptIdentity
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.kinds import FULL
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.kv.topology import ShardPlan
from kvshelf.server.interface import Channel

#: How long an operation may take, unless it is stated.
OPERATION_SECONDS: Final = 30.0
#: How long the end of an adapter waits for stores.
DRAIN_SECONDS: Final = 4.0
_SEGMENT_BYTES: Final = 1 << 30
_THREADS: Final = 2


class WorkerAdapter(Adapter):
    """Stores and loads the KV of one worker through a node server.

    Parameters
    ----------
    server_url, model, block_size, channel
        As for :class:`kvshelf.adapters.scheduler.SchedulerAdapter`.
    plan : ShardPlan, optional
        The shards that this worker holds, or a function that returns them for the namespace; all
        of them when absent.
    timeout_s : float
        An operation that has not ended after so many seconds, 30 by default, has failed.
    segment_bytes : int
        Memory for KV on its way to the server, 1 GiB by default. Chunks for which none is free are
        not stored.
    threads : int
        Threads that hash and copy, 2 by default.

    Raises
    ------
    ConfigError, UnavailableStorageError
        As for :class:`kvshelf.adapters.scheduler.SchedulerAdapter`.
    UnsupportedError
        If the namespace has layers of other kinds than ``full``: an operation names blocks of one
        cache group.
    """

    def __init__(
        self,
        server_url: str,
        model: Namespace | ModelFacts,
        block_size: int,
        *,
        plan: ShardPlan | Callable[[Namespace], ShardPlan] | None = None,
        timeout_s: float = OPERATION_SECONDS,
        segment_bytes: int = _SEGMENT_BYTES,
        threads: int = _THREADS,
        channel: Channel | None = None,
    ) -> None:
        super().__init__(server_url, model, block_size, channel, segment_bytes=segment_bytes)
        try:
            self._plan = self._plan_of(plan)
        except BaseException:
            self._client.close()
            raise
        self._timeout = timeout_s
        self._caches: EngineCaches | None = None
        self._operations = Operations()
        self._threads = AdapterThreads(threads, self._log)
        parts = self._client, self.fmt, self.blocks_in_chunk, self._threads
        self._stores = Stores(*parts)
        self._loads = Loads(*parts)

    def _plan_of(self, plan: ShardPlan | Callable[[Namespace], ShardPlan] | None) -> ShardPlan:
        if self.fmt.kinds != (FULL,):
            raise UnsupportedError(
                f"the namespace has layers of kind {', '.join(self.fmt.kinds)}, but an operation"
                " names blocks of one cache group: use kvshelf's connector with the option server"
            )
        if plan is None:
            return ShardPlan.whole(self.fmt.shards)
        return plan(self.namespace) if callable(plan) else plan

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
        self._caches = EngineCaches(self.fmt, self._plan, self.block_size, kv_caches, layout)
        if self._caches.device.type == "cuda":
            self._client.page_lock(self._caches.device)

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
        self._begin(request_id, op, event, identity, self._stores)

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
        self._begin(request_id, op, event, identity, self._loads)

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
        self._operations.expire_late()
        finished = self._operations.finished(finished_req_ids_from_engine)
        self._stores.forget(finished)
        return finished, self._operations.take_loaded()

    def shutdown(self) -> None:
        """Wait a few seconds for stores, end all operations and close the connection. Idempotent.

        When it returns, nothing accesses the caches any more.
        """
        if self._operations.close(DRAIN_SECONDS):
            self._threads.close()
            self._client.close()

    def _begin(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: Event | None,
        identity: PromptIdentity,
        transfers: Transfers,
    ) -> None:
        """Check an operation, and begin it unless there is nothing to copy, or no server."""
        caches = self._caches
        if caches is None:
            raise ValueError("no KV caches are registered: call register_kv_caches first")
        store = transfers is self._stores
        copies = caches.copies(op, store=store)

        def on_end(operation: Operation) -> Iterable[int]:
            failed = operation.failed
            if failed:
                self._log.warning(
                    "%d of %d chunks of request %s were not %s",
                    len(failed),
                    len(copies),
                    request_id,
                    transfers.done,
                )
            return caches.blocks(op, failed)

        parts = {copy.number: len(copy.shards) for copy in copies}
        operation = self._operations.begin(request_id, self._timeout, parts, on_end, store=store)
        if copies and self._client.channel.connected:
            transfers.begin(Work(operation, op, identity, copies, caches, event))
        else:
            operation.expire()


def _zipped(
    request_ids: Sequence[str],
    ops: Sequence[LoadStoreOp],
    identities: Sequence[PromptIdentity] | None,
) -> list[tuple[str, LoadStoreOp, PromptIdentity]]:
    """Return the requests of a batch; ValueError if the arguments differ in length."""
    prompts = [PLAIN] * len(ops) if identities is None else identities
    return list(zip(request_ids, ops, prompts, strict=True))
