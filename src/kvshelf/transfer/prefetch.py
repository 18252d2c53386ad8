"""The memory tier: objects that were prefetched for requests that wait.

Owns the payloads of prefetched objects (:class:`PrefetchMemory`), which the classes of
:mod:`kvshelf.shelf.tiers` put in front of a shelf, and the decision what to prefetch for the
waiting requests of an engine (:class:`Prefetcher`).

Contracts
---------
* The tier receives only payloads that a load has verified, so they are not verified again.
  Evicted payloads, the least recently used first, are still on the shelf. The memory of a
  :class:`Prefetcher` evicts none: requests are served in order of arrival, so the chunks that
  are needed first came first.
* Any thread may call the methods of :class:`PrefetchMemory`. Copies are made outside the lock;
  a payload that is evicted meanwhile keeps its memory until its copy is done.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kvshelf.backends import BytesLike
from kvshelf.backends.guard import GuardedBackend
from kvshelf.buffers import BUFFER_ALIGNMENT, Buffer, BufferPool
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import KVMemory, PendingCopy
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ObjectRef
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.loads import Failure, Load
from kvshelf.transfer.transfer import Transfer

#: Limit of the chunks that are dropped per step.
_DROPS_PER_STEP: Final = 16
#: Limit of the chunks that are read again per step.
_RETRIES_PER_STEP: Final = 16
#: Seconds until the next attempt after storage or staging was unavailable.
_RETRY_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Held:
    """One payload, and whether a load has used it."""

    buffer: Buffer
    used: bool = False


class PrefetchMemory:
    """Payloads of prefetched objects of one kind in one namespace.

    Parameters
    ----------
    fmt : ObjectFormat
        Objects of other formats, such as those of another kind, are never here.
    capacity : int
        Upper limit of their bytes.
    counters : Counters
    shards : Sequence of int, optional
        The shards that are prefetched; all of them when absent.
    evict : bool
        Make room for new payloads by evicting the least recently used ones.

    Attributes
    ----------
    most_chunks : int
        Number of chunks that fit.
    """

    def __init__(
        self,
        fmt: ObjectFormat,
        capacity: int,
        counters: Counters,
        *,
        shards: Sequence[int] | None = None,
        evict: bool = True,
    ) -> None:
        self._counters = counters
        self._fmt = fmt
        self._data_offset = fmt.data_offset
        self._shards = range(fmt.shards) if shards is None else shards
        self._evict = evict
        sizes = [fmt.payload_size(shard) for shard in self._shards]
        self.most_chunks = capacity // sum(
            -(-size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT for size in sizes
        )
        self._pool = BufferPool(max(capacity, BUFFER_ALIGNMENT))
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[bytes, int], _Held] = OrderedDict()

    @property
    def available(self) -> bool:
        """Whether any payload is here: it can be read even while the storage is unavailable."""
        return bool(self._held)

    def holds(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> list[bool]:
        """Return, for each object, whether its payload is here."""
        if not self._is_of(fmt):
            return [False] * len(refs)
        return [(chunk.key, shard) in self._held for chunk, shard in refs]

    def _is_of(self, fmt: ObjectFormat) -> bool:
        # A chunk has the same key in all kinds. Keys of other namespaces differ.
        return fmt.kind == self._fmt.kind

    def leading(self, chunks: Sequence[Chunk]) -> int:
        """Return how many leading `chunks` are here with all shards."""
        for number, chunk in enumerate(chunks):
            if not all((chunk.key, shard) in self._held for shard in self._shards):
                return number
        return len(chunks)

    def load(self, fmt: ObjectFormat, ref: ObjectRef, buffer: memoryview) -> bool:
        """Fill the payload of `buffer` and leave its header; False when it is not here."""
        if not self._is_of(fmt):
            return False
        out = torch.frombuffer(buffer, dtype=torch.uint8)[self._data_offset :]
        name = (ref.chunk.key, ref.shard)
        with self._lock:
            found = self._held.get(name)
            if found is None:
                return False
            self._held.move_to_end(name)
            found.used = True
            view = found.buffer.share()
        with view:
            out.copy_(view.tensor)
        self._counters.add("memory_tier_loaded_objects")
        return True

    def borrow(self, fmt: ObjectFormat, ref: ObjectRef) -> None:
        """Return None: only payloads are here, without their headers."""

    def keep(self, fmt: ObjectFormat, ref: ObjectRef, buffer: BytesLike) -> None:
        """Do nothing: only a :class:`Prefetcher` or a caller's prefetch fills the memory."""

    def remove(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> int:
        """Free the memory of some objects; return how many were here."""
        if not self._is_of(fmt):
            return 0
        with self._lock:
            names = [(chunk.key, shard) for chunk, shard in refs]
            found = [self._held.pop(name) for name in names if name in self._held]
            for held in found:
                held.buffer.release()
        return len(found)

    def attach(self, guard: GuardedBackend) -> None:
        """Do nothing: no thread is ever stuck in memory."""

    def put(self, key: bytes, shard: int, payload: Tensor) -> None:
        """Keep a copy of a payload, if there is room for it."""
        name = (key, shard)
        with self._lock:
            if name in self._held:
                self._held.move_to_end(name)
                return
            buffer = self._pool.allocate(payload.numel())
            while buffer is None and self._held and self._evict:
                self._held.popitem(last=False)[1].buffer.release()
                buffer = self._pool.allocate(payload.numel())
        if buffer is None:
            return
        buffer.tensor.copy_(payload)
        with self._lock:
            if name in self._held:
                buffer.release()
            else:
                self._held[name] = _Held(buffer)
                self._counters.add("prefetched_objects")
                self._counters.add("prefetched_bytes", payload.numel())

    def drop(self, keys: Iterable[bytes]) -> None:
        """Free the memory of some chunks."""
        unused = 0
        with self._lock:
            for key in keys:
                for shard in self._shards:
                    found = self._held.pop((key, shard), None)
                    if found is not None:
                        unused += not found.used
                        found.buffer.release()
        if unused:
            self._counters.add("prefetched_unused_objects", unused)

    def close(self) -> None:
        """Free all memory."""
        with self._lock:
            for held in self._held.values():
                held.buffer.release()
            self._held.clear()
        self._pool.close()


class IntoMemory(KVMemory):
    """The destination of an early load: receives the payloads of one chunk."""

    def __init__(self, memory: PrefetchMemory, key: bytes) -> None:
        self._memory = memory
        self._key = key

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy:
        """Never called: nothing is stored from here."""
        raise NotImplementedError("prefetched objects are on the shelf already")

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """Keep a payload."""
        self._memory.put(self._key, shard, payload)

    def of_tail(self, tokens: int) -> IntoMemory:
        """Return itself: a payload is kept as it is."""
        return self


@dataclass(eq=False, slots=True)
class _Request:
    """A waiting request, and the chunks that are prefetched for it."""

    request_id: str
    #: Chunks for which there was no room yet.
    chunks: deque[Chunk] = field(default_factory=deque)
    #: Keys of the others, and the early loads that bring them.
    keys: list[bytes] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    #: Nothing more is read for it.
    ended: bool = False


class Prefetcher:
    """Prefetches the chunks of waiting requests into memory, in order of arrival.

    Memory is reserved before a chunk is read, so that no chunk is read for which there is no room;
    the rest of a request's chunks follows when other requests are released. A chunk that several
    requests need is read once. If a chunk did not arrive because the request that it was read for
    was released, it is read again for the others in the next step; if the storage or
    staging was unavailable, a second later. If a chunk cannot be read, the chunks behind it
    are not prefetched either. The step thread calls all methods; none calls the storage.

    Parameters
    ----------
    transfer : Transfer
        Its shelf is a :class:`~kvshelf.shelf.tiers.TieredView` with the same memory.
    memory : PrefetchMemory
        Made with ``evict=False``.
    """

    def __init__(self, transfer: Transfer, memory: PrefetchMemory) -> None:
        self._transfer = transfer
        self._memory = memory
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        #: Keys that one request fewer needs from now on.
        self._released: deque[tuple[_Request, bytes]] = deque()
        #: The requests that need each chunk with reserved memory. The list may be empty while
        #: the chunk is still being read.
        self._users: dict[bytes, list[_Request]] = {}
        #: Of these, the chunks that are being read, and those whose load ended without them.
        self._reading: set[bytes] = set()
        self._retries: dict[bytes, Chunk] = {}
        self._retry_at = 0.0
        #: Numbers of early loads: the name of an unfinished load must not be reused.
        self._numbers = itertools.count()
        #: Early loads that ended; any thread appends.
        self._finished: deque[Load] = deque()
        self._failures: list[tuple[str, Chunk, Failure]] = []

    def add(self, request_id: str, chunks: Sequence[Chunk]) -> None:
        """Prefetch further chunks for a waiting request."""
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request(request_id)
        if not request.ended:
            request.chunks.extend(chunks)
        self._advance()

    def cancel_reads(self, request_id: str) -> None:
        """Read no more for a request, since its load has begun. Chunks in memory stay."""
        request = self._requests.get(request_id)
        if request is not None:
            request.ended = True
            request.chunks.clear()
            for load in request.loads:
                self._transfer.cancel_early(load.request_id)

    def release(self, request_id: str) -> None:
        """Drop the chunks that no other request needs."""
        self.cancel_reads(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._released.extend((request, key) for key in request.keys)
            self._advance()

    def release_all(self) -> None:
        """Drop all chunks."""
        # The reads of all are cancelled first, so that no request takes the room of another.
        for request_id in self._requests:
            self.cancel_reads(request_id)
        for request_id in list(self._requests):
            self.release(request_id)

    def take_failures(self) -> list[tuple[str, Chunk, Failure]]:
        """Return the chunks that could not be read since the last call: request, chunk, reason.

        Called once per step.
        """
        self._read_again()
        self._advance()
        failures, self._failures = self._failures, []
        return failures

    def _advance(self) -> None:
        self._note_finished()
        self._drop()
        if all(not request.chunks for request in self._requests.values()):
            return
        for request in self._requests.values():
            fresh = self._reserve(request)
            if fresh:
                self._read(request, fresh)
            if request.chunks:
                # Later requests would take the room that this one waits for.
                return

    def _reserve(self, request: _Request) -> list[Chunk]:
        """Reserve room for the next chunks of a request; return those that must be read."""
        fresh = []
        while request.chunks:
            chunk = request.chunks[0]
            key = chunk.key
            users = self._users.get(key)
            if users is None:
                if len(self._users) >= self._memory.most_chunks:
                    break
                users = self._users[key] = []
                fresh.append(chunk)
            elif key not in self._reading and not self._memory.leading([chunk]):
                # The requests that needed it until now have loads of their own.
                self._retries.pop(key, None)
                fresh.append(chunk)
            users.append(request)
            request.keys.append(key)
            request.chunks.popleft()
        return fresh

    def _read(self, request: _Request, chunks: Sequence[Chunk]) -> None:
        name = f"{request.request_id}#{next(self._numbers)}"
        none = torch.empty(0, dtype=torch.int64)
        items = [ChunkSlots(chunk, none, IntoMemory(self._memory, chunk.key)) for chunk in chunks]
        self._reading.update(chunk.key for chunk in chunks)
        request.loads = [load for load in request.loads if not load.finished]
        # A load of its own, since the request's earlier chunks are being read already.
        request.loads.append(
            self._transfer.load(name, items, early=True, on_done=self._finished.append)
        )

    def _read_again(self) -> None:
        """Read chunks that did not arrive again, each for the first request that needs it."""
        if not self._retries or time.monotonic() < self._retry_at:
            return
        chunks_of: dict[_Request, list[Chunk]] = {}
        for key in list(itertools.islice(self._retries, _RETRIES_PER_STEP)):
            chunk = self._retries.pop(key)
            request = next((request for request in self._users[key] if not request.ended), None)
            if request is not None:
                chunks_of.setdefault(request, []).append(chunk)
        for request, chunks in chunks_of.items():
            self._read(request, chunks)

    def _note_finished(self) -> None:
        """Note which chunks the finished early loads have brought."""
        gone = []
        while self._finished:
            load = self._finished.popleft()
            lost = set()
            for chunk, failure in () if load.cancelled else load.failures:
                if failure is not Failure.UNAVAILABLE:
                    lost.add(chunk.key)
                    self._give_up(chunk, failure)
                elif self._retry_at <= (now := time.monotonic()):
                    self._retry_at = now + _RETRY_SECONDS
            for place, item in enumerate(load.items):
                key = item.chunk.key
                self._reading.discard(key)
                if not self._users[key]:
                    del self._users[key]
                    gone.append(key)
                elif (
                    place >= load.leading
                    and key not in lost
                    and not self._memory.leading([item.chunk])
                ):
                    self._retries[key] = item.chunk
        if gone:
            self._memory.drop(gone)

    def _give_up(self, chunk: Chunk, failure: Failure) -> None:
        """Report a chunk as failed for all requests that need it, and end their reads there."""
        for request in dict.fromkeys(self._users[chunk.key]):
            if request.ended:
                continue
            self._failures.append((request.request_id, chunk, failure))
            request.chunks.clear()
            first = request.keys.index(chunk.key)
            rest = _Request(request.request_id, keys=request.keys[first:], ended=True)
            del request.keys[first:]
            for key in rest.keys:
                users = self._users[key]
                users[users.index(request)] = rest
                self._released.append((rest, key))

    def _drop(self) -> None:
        """Free the memory that no request needs any more, once no thread writes to it."""
        gone = []
        # Limited per step, since each chunk takes a microsecond or two.
        for _ in range(min(_DROPS_PER_STEP, len(self._released))):
            request, key = self._released.popleft()
            users = self._users[key]
            users.remove(request)
            if not users:
                self._retries.pop(key, None)
                if key not in self._reading:
                    del self._users[key]
                    gone.append(key)
        if gone:
            self._memory.drop(gone)
