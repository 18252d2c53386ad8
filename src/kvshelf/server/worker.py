"""The adapter of an engine's worker: copies KV between its caches and a node server.

Owns :class:`WorkerAdapter` and :class:`LoadStoreOp`: what each operation copies, and its way
between the engine's caches (:mod:`kvshelf.server.engine_caches`) and the server. When operations
end is decided by :mod:`kvshelf.server.operations`, how much is leased at a time by
:mod:`kvshelf.server.lease_window`. ``docs/multiprocess.md`` compares the adapter with vLLM's
(vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/multi_process_adapter.py).

A store: the step thread copies KV into the segment that client and server share; an adapter's
thread derives the keys, hashes the KV, and asks the server to publish it. A load: an adapter's
thread derives the keys and asks for objects; as each arrives in the server's memory, a thread
writes its KV to the blocks, then checks that the memory was the object's until now.

Contracts
---------
* No method waits for the server, except the constructor and ``shutdown``, for a bounded time.
* A store has copied the KV, or on a device enqueued the copy on the caller's current stream, when
  its method returns. Only KV in host memory whose event has not passed yet is copied later.
* A load writes only to the blocks of its operation, and not after its end. Whatever it could not
  load is among :meth:`WorkerAdapter.get_block_ids_with_load_errors`.
* Every operation ends, at the latest at its deadline. Without a server it fails at once.
* In hash mode the server keeps the KV in memory only, and nothing is published.

Threads
-------
The methods are called by one thread, that of the worker's step. The threads ``kvshelf-client-…``
do what is described above; the channel's thread only puts work into their queue.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import torch
import xxhash
from torch import Tensor

from kvshelf.cache import PromptIdentity
from kvshelf.errors import ConfigError, DeviceUnavailableError, UnsupportedError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.format.model import ModelFacts
from kvshelf.format.names import DESCRIPTION
from kvshelf.format.namespace import Namespace
from kvshelf.kv.caches import PendingCopy
from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.topology import ShardPlan
from kvshelf.server.adapter import Adapter, AdapterThreads
from kvshelf.server.channel import Channel, Leased
from kvshelf.server.engine_caches import EngineCaches
from kvshelf.server.lease_window import LeaseWindow, WantedObject
from kvshelf.server.messages import Call, Store, Stored, Welcome
from kvshelf.server.naming import (
    PLAIN,
    NamedChunk,
    check_hash,
    chunks_of,
    name_of,
    striding_block_hashes,
)
from kvshelf.server.operations import LoadOperations, Operation, Operations, StoreOperations
from kvshelf.server.segment import SegmentPart
from kvshelf.transfer.context import bytes_at

Layout: TypeAlias = "PagedLayout | PermutedLayout"

_OPERATION_SECONDS: Final = 30.0
_DRAIN_SECONDS: Final = 4.0
_SEGMENT_BYTES: Final = 1 << 30
_THREADS: Final = 2
#: Requests of which the last chunk is remembered.
_REQUESTS: Final = 4096


class Event(Protocol):
    """What is needed of an event of the engine's device, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has passed."""

    def synchronize(self) -> None:
        """Wait until it has."""


@dataclass(slots=True)
class LoadStoreOp:
    """What is stored or loaded for one request. Exactly one of tokens and hashes is given.

    Attributes
    ----------
    block_ids : list of int
        The engine's blocks, in the order of the tokens: from token `start` on, or in hash mode one
        for each hash.
    token_ids : list of int, optional
        Token mode: the prompt from its beginning.
    block_hashes : list of bytes, optional
        Hash mode: the hash of each block.
    start, end : int
        Token mode: the tokens to store or to load; `start` is a multiple of the chunk size.
    skip_first_n_tokens : int
        A load writes nothing to the blocks of so many first tokens.
    """

    block_ids: list[int]
    token_ids: list[int] | None = None
    block_hashes: list[bytes] | None = None
    start: int = 0
    end: int = 0
    skip_first_n_tokens: int = 0

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class _ChunkCopy:
    """One chunk of an operation.

    Attributes
    ----------
    number : int
        Counted from the operation's first chunk.
    slots : Tensor
        As :meth:`kvshelf.kv.caches.KVMemory.gather` takes them.
    shards : tuple of int
        What to store, or to load.
    """

    number: int
    slots: Tensor
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """An operation that is under way, and what it copies."""

    operation: Operation
    op: LoadStoreOp
    identity: PromptIdentity
    copies: list[_ChunkCopy]
    caches: EngineCaches
    event: Event | None
    #: Hash mode: the last chunk that the request stored before.
    before: bytes | None


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The KV of one chunk on its way into the segment: room for each shard."""

    copy: _ChunkCopy
    rooms: list[SegmentPart]
    pending: PendingCopy


@dataclass(frozen=True, slots=True)
class _Object:
    """One object of a load."""

    work: _Work
    copy: _ChunkCopy
    shard: int
    chunk: NamedChunk
    #: What :meth:`kvshelf.kv.caches.KVCache.fence` returned when the load began.
    fence: object


class WorkerAdapter(Adapter):
    """Stores and loads the KV of one worker through a node server.

    Parameters
    ----------
    server_url, model, block_size, channel
        As for :class:`kvshelf.server.client.SchedulerAdapter`.
    plan : ShardPlan, optional
        The shards that this worker holds, or a function that returns them for the namespace; all
        of them when absent.
    timeout_s : float
        An operation that has not ended after so many seconds has failed.
    segment_bytes : int
        Memory for KV on its way to the server. Chunks that find no room in it are not stored.
    threads : int
        Threads that hash and copy.

    Raises
    ------
    ConfigError, UnavailableStorageError
        As for :class:`kvshelf.server.client.SchedulerAdapter`.
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
        timeout_s: float = _OPERATION_SECONDS,
        segment_bytes: int = _SEGMENT_BYTES,
        threads: int = _THREADS,
        channel: Channel | None = None,
    ) -> None:
        #: Whether the server was asked in this session to describe the namespace on the shelf.
        self._described = False
        super().__init__(server_url, model, block_size, channel, segment_bytes)
        try:
            self._plan = self._plan_of(plan)
        except BaseException:
            self._close_channel()
            raise
        self._timeout = timeout_s
        self._caches: EngineCaches | None = None
        self._operations = Operations()
        self._window = LeaseWindow(self._channel)
        #: Hash mode: the last chunk that each request has stored.
        self._last_hashes: OrderedDict[str, bytes] = OrderedDict()
        self._threads = AdapterThreads(threads, self._on_thread_error)

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
            (A ValueError.) If the layout is missing, or the caches do not fit the namespace.
        """
        if layout is None:
            raise ConfigError(
                "register_kv_caches() needs layout, which is missing: pass how a block lies in the"
                " caches, for example PagedLayout.from_bhnc(cache, head_size)"
            )
        self._caches = EngineCaches(self.fmt, self._plan, self.block_size, kv_caches, layout)
        if self._caches.device.type == "cuda":
            self._page_lock(self._caches.device)

    def _page_lock(self, device: torch.device) -> None:
        """Page-lock what is shared with the server: a copy to other memory waits in its call."""
        self._channel.page_lock(device)
        segment = self._channel.segment
        if segment is None:
            return
        try:
            segment.page_lock(device)
        except RuntimeError as error:
            self._log.warning(
                "could not pin the memory through which KV is stored (%s); stores wait in their"
                " calls until the KV is there",
                error,
            )

    # ------------------------------------------------------------------------- stores

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
        op : LoadStoreOp
        event : Event, optional
            Passes when the KV is in the blocks. Without one it is there.
        identity : PromptIdentity
            As for the lookup.

        Raises
        ------
        ValueError
            If the operation is malformed, or no caches are registered.
        """
        work = self._begin(request_id, op, event, identity, self._operations.stores)
        if work is None:
            return
        if event is None or _may_copy_after(event, work.caches.device):
            gathered = self._gather(work)
            self._threads.put(lambda: self._publish(work, gathered))
        else:
            self._threads.put(lambda: self._publish_after(work, event))

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

    def _publish_after(self, work: _Work, event: Event) -> None:
        event.synchronize()
        self._publish(work, self._gather(work))

    def _gather(self, work: _Work) -> list[_Gathered]:
        """Copy chunks into the segment, or begin to. A chunk without room there has failed.

        The operation touches the engine's memory until :meth:`_publish` lets go for each.
        """
        header = self._header_bytes(work.op)
        gathered = []
        for copy in work.copies:
            if not work.operation.touch():
                break
            rooms: list[SegmentPart] = []
            pending = None
            try:
                for shard in copy.shards:
                    room = self._reserve(header + self.fmt.payload_size(shard))
                    if room is None:
                        break
                    rooms.append(room)
                else:
                    payloads = [bytes_at(room.view)[header:] for room in rooms]
                    pending = work.caches.memory.gather(copy.slots, payloads)
            except Exception as error:  # noqa: BLE001  it must not end the engine's step
                self._log.warning("a chunk of request %s was not stored: %s", *_about(work, error))
            if pending is not None:
                gathered.append(_Gathered(copy, rooms, pending))
                continue
            for room in rooms:
                room.release()
            for _ in copy.shards:
                work.operation.part_ended(copy.number, False)
            work.operation.let_go()
        return gathered

    def _reserve(self, nbytes: int) -> SegmentPart | None:
        segment = self._channel.segment
        return None if segment is None else segment.reserve(nbytes)

    def _publish(self, work: _Work, gathered: Sequence[_Gathered]) -> None:
        """Hash what was gathered and ask the server to publish it. Adapter's thread."""
        chunks = self._chunks(work)
        for one in gathered:
            unsent = deque(zip(one.copy.shards, one.rooms, strict=True))
            try:
                try:
                    one.pending.wait()
                finally:
                    work.operation.let_go()
                while unsent and chunks is not None:
                    number = one.copy.number
                    parent = chunks[number - 1] if number else work.before
                    self._send(work, one.copy, chunks[number], parent, *unsent[0])
                    unsent.popleft()
            except Exception as error:  # noqa: BLE001  the other chunks must end as well
                self._log.warning("a chunk of request %s was not stored: %s", *_about(work, error))
            for _, room in unsent:
                room.release()
                work.operation.part_ended(one.copy.number, False)

    def _send(
        self,
        work: _Work,
        copy: _ChunkCopy,
        chunk: NamedChunk,
        parent: NamedChunk | None,
        shard: int,
        room: SegmentPart,
    ) -> None:
        """Ask the server to publish one object."""
        checksum = None
        if isinstance(chunk, Chunk):
            self._describe()
            self.fmt.seal(room.view, chunk, shard)
        else:
            checksum = xxhash.xxh3_64_intdigest(room.view)
        request = self._channel.request(
            Store(
                name_of(self.fmt, chunk, shard),
                room.offset,
                room.nbytes,
                memory_only=checksum is not None,
                checksum=checksum,
                # Objects of the format name theirs.
                parent=name_of(self.fmt, parent, shard) if isinstance(parent, bytes) else "",
            )
        )

        def stored(done: Future[Any]) -> None:
            room.release()
            error = done.exception()
            if error is not None:
                self._log.warning("a chunk of request %s was not stored: %s", *_about(work, error))
            work.operation.part_ended(
                copy.number, error is None and isinstance(done.result(), Stored)
            )

        request.add_done_callback(stored)

    def _register(self, welcome: Welcome) -> None:
        self._described = False
        super()._register(welcome)

    def _describe(self) -> None:
        """Have the shelf say what the namespace is, beside its first object."""
        if not self._described:
            self._described = True
            name = f"{self.namespace.folder}/{DESCRIPTION}"
            request = self._channel.request(Call("write", [name, "create"], self.namespace.encoded))
            request.add_done_callback(self._on_described)

    def _on_described(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self._described = False
            self._log.warning("the shelf does not describe the namespace: %s", error)

    # ------------------------------------------------------------------------- loads

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
        op : LoadStoreOp
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
        work = self._begin(request_id, op, event, identity, self._operations.loads)
        if work is None:
            return
        try:
            # On a device, the engine's work so far may still use the blocks.
            fence = work.caches.memory.fence()
        except DeviceUnavailableError as error:
            self._log.warning("request %s was not loaded: %s", *_about(work, error))
            work.operation.expire()
        else:
            self._threads.put(lambda: self._want(work, fence))

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
        return self._operations.loads.take_failed_blocks()

    def _want(self, work: _Work, fence: object) -> None:
        """Derive the names of a load, and ask for as many objects as may be leased."""
        chunks = self._chunks(work)
        if chunks is None:
            work.operation.expire()
            return
        self._window.want(
            [
                self._wanted(_Object(work, copy, shard, chunks[copy.number], fence))
                for copy in work.copies
                for shard in copy.shards
            ]
        )

    def _wanted(self, one: _Object) -> WantedObject:
        def arrived(future: Future[Leased]) -> None:
            self._threads.put(lambda: self._scatter(one, wanted, future))

        name = name_of(self.fmt, one.chunk, one.shard)
        nbytes = self._header_bytes(one.work.op) + self.fmt.payload_size(one.shard)
        wanted = WantedObject(one.work.operation, name, nbytes, arrived)
        return wanted

    def _scatter(self, one: _Object, wanted: WantedObject, future: Future[Leased]) -> None:
        """Write one object's KV to its blocks, or note that it did not come. Adapter's thread."""
        operation = one.work.operation
        ok = False
        borrowed: Leased | None = None
        try:
            borrowed = future.result()
            if operation.touch():
                try:
                    ok = borrowed.view.nbytes == wanted.nbytes and self._copy(one, borrowed)
                finally:
                    operation.part_ended(one.copy.number, ok)
                    operation.let_go()
        except Exception as error:  # noqa: BLE001  the chunk has failed, whatever happened
            if borrowed is None:
                operation.part_ended(one.copy.number, False)
            self._log.warning("a chunk of request %s was not loaded: %s", *_about(one.work, error))
        finally:
            if borrowed is not None:
                borrowed.release()
            self._window.give_back(wanted)

    def _copy(self, one: _Object, borrowed: Leased) -> bool:
        """Copy the KV of a borrowed object; return whether it was the object until the end."""
        view = borrowed.view
        if isinstance(one.chunk, Chunk):
            self.fmt.verify_header(view, one.chunk, one.shard)
        if one.work.event is not None:
            one.work.event.synchronize()
        payload = bytes_at(view)[self._header_bytes(one.work.op) :]
        one.work.caches.memory.scatter(one.shard, one.copy.slots, payload, one.fence)
        return borrowed.valid()

    # ------------------------------------------------------------------------- both

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
        finished = self._operations.stores.finished(finished_req_ids_from_engine)
        for request_id in finished:
            self._last_hashes.pop(request_id, None)
        return finished, self._operations.loads.take_ended()

    def shutdown(self) -> None:
        """Wait a few seconds for stores, end all operations and close the connection. Idempotent.

        When it returns, nothing touches the caches any more.
        """
        if self._operations.close(_DRAIN_SECONDS):
            self._threads.close()
            self._close_channel()

    def _begin(
        self,
        request_id: str,
        op: LoadStoreOp,
        event: Event | None,
        identity: PromptIdentity,
        kind: StoreOperations | LoadOperations,
    ) -> _Work | None:
        """Check an operation and begin it; None if it has ended already."""
        store = kind is self._operations.stores
        caches, copies = self._checked(op, store=store)

        def on_end(operation: Operation) -> None:
            failed = operation.failed
            if failed:
                self._log.warning(
                    "%d of %d chunks of request %s were not %s",
                    len(failed),
                    len(copies),
                    request_id,
                    "stored" if store else "loaded",
                )
            if not store:
                self._operations.loads.note_failed(self._blocks(op, failed))

        parts = {copy.number: len(copy.shards) for copy in copies}
        operation = self._operations.begin(kind, request_id, self._timeout, parts, on_end)
        if not copies or not self._channel.connected:
            operation.expire()
            return None
        before = self._follow(request_id, op) if store else None
        return _Work(operation, op, identity, copies, caches, event, before)

    def _follow(self, request_id: str, op: LoadStoreOp) -> bytes | None:
        """Return the last chunk that a request stored before, in hash mode."""
        if not op.block_hashes:
            return None
        before = self._last_hashes.pop(request_id, None)
        hashes = striding_block_hashes(op.block_hashes, self.blocks_in_chunk)
        self._last_hashes[request_id] = hashes[-1]
        if len(self._last_hashes) > _REQUESTS:
            self._last_hashes.popitem(last=False)
        return before

    def _checked(self, op: LoadStoreOp, *, store: bool) -> tuple[EngineCaches, list[_ChunkCopy]]:
        """Return what an operation copies; raise ValueError if it is malformed."""
        if self._caches is None:
            raise ValueError("no KV caches are registered: call register_kv_caches first")
        if (op.token_ids is None) == (op.block_hashes is None):
            raise ValueError(
                f"an operation has {'neither' if op.token_ids is None else 'both'} of token_ids"
                " and block_hashes: expected exactly one"
            )
        size, per_chunk = self.chunk_size, self.blocks_in_chunk
        if op.token_ids is not None:
            if op.start % size or not 0 <= op.start <= op.end <= len(op.token_ids):
                raise ValueError(
                    f"tokens {op.start} … {op.end} of {len(op.token_ids)}: expected a range that"
                    f" begins at a multiple of the chunk size {size}"
                )
            count = (op.end - op.start) // size
            numbers = list(range(op.start // size, op.start // size + count))
        else:
            assert op.block_hashes is not None
            hashes = striding_block_hashes(op.block_hashes, per_chunk)
            for one in hashes:
                check_hash(one)
            # Replicas share the chunks of a prompt by any number that all of them know.
            numbers = [int.from_bytes(one, "little") for one in hashes]
            count = len(hashes)
        if len(op.block_ids) < count * per_chunk:
            raise ValueError(
                f"{len(op.block_ids)} blocks for {count} chunks of {per_chunk} blocks: expected"
                f" {count * per_chunk}"
            )
        first = 0 if store else op.skip_first_n_tokens
        slots = self._caches.slots(op.block_ids, count * size, skipped=first)
        copies = []
        for number, place in enumerate(numbers):
            shards = self._plan.writes(place) if store else self._plan.shards
            if shards and (number + 1) * size > first:
                start = number * size
                copies.append(_ChunkCopy(number, slots(start, start + size), shards))
        return self._caches, copies

    def _chunks(self, work: _Work) -> Sequence[NamedChunk] | None:
        """Return the operation's chunks, or in hash mode their block hashes; None: malformed."""
        op = work.op
        if op.block_hashes is not None:
            return striding_block_hashes(op.block_hashes, self.blocks_in_chunk)
        assert op.token_ids is not None
        try:
            chunks = chunks_of(self.fmt, op.token_ids, op.end, work.identity)
        except Exception as error:  # noqa: BLE001  tokens may be anything
            self._log.warning("request %s cannot be cached: %s", *_about(work, error))
            return None
        return chunks[op.start // self.chunk_size :]

    def _blocks(self, op: LoadStoreOp, chunks: Sequence[int]) -> set[int]:
        """Return the blocks of an operation's chunks that a load writes to."""
        per_chunk = self.blocks_in_chunk
        first = op.skip_first_n_tokens // self.block_size
        return {
            op.block_ids[place]
            for chunk in chunks
            for place in range(chunk * per_chunk, (chunk + 1) * per_chunk)
            if place >= first
        }

    def _header_bytes(self, op: LoadStoreOp) -> int:
        """Return where the KV of a chunk begins in its object."""
        return 0 if op.block_hashes is not None else self.fmt.data_offset


def _may_copy_after(event: Event, device: torch.device) -> bool:
    """Whether a copy that begins now begins after the event."""
    if device.type == "cpu":
        return event.query()
    torch.cuda.current_stream(device).wait_event(event)  # type: ignore[arg-type]
    return True


def _about(work: _Work, error: BaseException) -> tuple[str, BaseException]:
    return work.operation.request_id, error


def _zipped(
    request_ids: Sequence[str],
    ops: Sequence[LoadStoreOp],
    identities: Sequence[PromptIdentity] | None,
) -> list[tuple[str, LoadStoreOp, PromptIdentity]]:
    """Return the requests of a batch; ValueError if the arguments differ in length."""
    whose = [PLAIN] * len(ops) if identities is None else identities
    return list(zip(request_ids, ops, whose, strict=True))
