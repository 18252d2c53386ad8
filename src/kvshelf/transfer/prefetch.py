"""What is read ahead of requests that wait, into a memory tier.

Owns what the loads of one kind see of a memory tier (:class:`KindMemory`), with the objects in it
that are kept for requests that wait, and the decision what to prefetch for the waiting requests of
an engine (:class:`Prefetcher`). :mod:`kvshelf.tiers.memory_tier` owns the memory.

Contracts
---------
* A prefetched object is pinned until its load has used it, or until no request needs it any more.
  So requests are served in order of arrival: the chunks that are needed first came first.
* What is pinned here is at most a given part of the memory: stores, loads and other kinds always
  find some of it.
* Any thread may call the methods of :class:`KindMemory`. Those that copy an object
  (:meth:`KindMemory.load`, :meth:`KindMemory.keep`) are not for an engine's step thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from kvshelf.backends import BytesLike
from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import KVMemory, PendingCopy
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.memory_tier import MemoryTier, PinnedObject
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure, Piece
from kvshelf.transfer.loads import Loads

#: Limit of the chunks that are dropped per step.
_DROPS_PER_STEP: Final = 16
#: Limit of the chunks that are read again per step.
_RETRIES_PER_STEP: Final = 16
#: Seconds until the next attempt after storage or staging was unavailable.
_RETRY_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Pin:
    """One object that is kept for waiting requests."""

    memory: PinnedObject
    #: It was read for them, and no load has used it.
    unused: bool


class KindMemory:
    """A memory tier as the loads and stores of one kind in one namespace see it.

    Parameters
    ----------
    memory : MemoryTier
        Others may use it too; it stays open.
    fmt : ObjectFormat
    counters : Counters
    shards : Sequence of int, optional
        The shards that are prefetched; all of them when absent.
    share : float
        The part of the memory that may be pinned for waiting requests.
    keeps : bool
        What is stored and loaded gets into the memory. False: only what is prefetched does.
    in_place : bool
        Loads read in place what is here. False: they copy it to staging, for caches on a GPU to
        which copies from ordinary memory are slow.

    Attributes
    ----------
    most_chunks : int
        Number of chunks that may be pinned for waiting requests.
    """

    in_memory = True

    def __init__(
        self,
        memory: MemoryTier,
        fmt: ObjectFormat,
        counters: Counters,
        *,
        shards: Sequence[int] | None = None,
        share: float = 1.0,
        keeps: bool = True,
        in_place: bool = True,
    ) -> None:
        self._memory = memory
        self._fmt = fmt
        self._counters = counters
        self._shards = range(fmt.shards) if shards is None else shards
        self._keeps = keeps
        self._in_place = in_place
        self.most_chunks = int(memory.most_chunks(fmt, self._shards) * share)
        self._lock = threading.Lock()
        #: How often each chunk is wanted.
        self._wanted: Counter[bytes] = Counter()
        self._pins: dict[tuple[bytes, int], _Pin] = {}
        self._closed = False

    # ------------------------------------------------------------- the tier

    @property
    def available(self) -> bool:
        """Whether any object is here: it can be read even while the storage is unavailable."""
        return self._memory.available

    def holds(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> list[bool]:
        """Return, for each object, whether it is here."""
        return self._memory.holds(fmt, refs)

    def load(self, fmt: ObjectFormat, ref: ObjectRef, buffer: memoryview) -> bool:
        """Copy an object to `buffer`; False when it is not here."""
        loaded = self._memory.load(fmt, ref, buffer)
        if loaded:
            self._note_use(ref)
        return loaded

    def pin(self, fmt: ObjectFormat, ref: ObjectRef) -> PinnedObject | None:
        """Pin an object; None when it is not here. It counts as used."""
        pinned = self._memory.pin(fmt, ref) if self._in_place else None
        if pinned is not None:
            self._note_use(ref)
        return pinned

    def reserve(self, fmt: ObjectFormat, ref: ObjectRef) -> PinnedObject | None:
        """Reserve memory for an object that is about to be read, if it should be here."""
        return self._memory.reserve(fmt, ref) if self._takes(ref, read=True) else None

    def keep(self, fmt: ObjectFormat, ref: ObjectRef, buffer: BytesLike) -> None:
        """Copy an object in, if it should be here and there is memory for it."""
        if self._takes(ref):
            self._memory.keep(fmt, ref, buffer)

    def remove(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> int:
        """Remove objects; return how many were here."""
        return self._memory.remove(fmt, refs)

    def attach(self, guard: GuardedBackend) -> None:
        """Do nothing: no thread is ever stuck in memory."""

    def close(self) -> None:
        """Unpin all objects, and pin no more. Idempotent."""
        with self._lock:
            self._closed = True
            pins = list(self._pins.values())
            self._pins.clear()
        for pin in pins:
            pin.memory.release()

    def _takes(self, ref: ObjectRef, *, read: bool = False) -> bool:
        if ref.chunk.key in self._wanted:
            return True
        # A read puts its object into memory only where it reads in place.
        return self._keeps and (self._in_place or not read)

    def _note_use(self, ref: ObjectRef) -> None:
        pin = self._pins.get((ref.chunk.key, ref.shard))
        if pin is not None:
            pin.unused = False

    # ------------------------------------------------------------- what is prefetched

    def leading(self, chunks: Sequence[Chunk]) -> int:
        """Return how many leading `chunks` are here with all shards."""
        refs = [ObjectRef(chunk, shard) for chunk in chunks for shard in self._shards]
        held = self._memory.holds(self._fmt, refs)
        return held.index(False) // len(self._shards) if False in held else len(chunks)

    def kept(self, chunks: Sequence[Chunk]) -> int:
        """Return how many leading `chunks` are pinned here with all shards."""
        for number, chunk in enumerate(chunks):
            if not all((chunk.key, shard) in self._pins for shard in self._shards):
                return number
        return len(chunks)

    def want(self, keys: Iterable[bytes]) -> None:
        """Admit objects of these chunks to the memory until :meth:`unwant`."""
        with self._lock:
            self._wanted.update(keys)

    def unwant(self, keys: Iterable[bytes]) -> None:
        """End what :meth:`want` began; what is here stays until it is evicted."""
        with self._lock:
            for key in keys:
                self._wanted[key] -= 1
                if not self._wanted[key]:
                    del self._wanted[key]

    def retain(self, ref: ObjectRef, *, fresh: bool = False) -> bool:
        """Keep an object here until :meth:`drop`; False if it is not here, or after :meth:`close`.

        Parameters
        ----------
        ref : ObjectRef
        fresh : bool
            It was read for that.
        """
        name = (ref.chunk.key, ref.shard)
        pinned = self._memory.pin(self._fmt, ref, loads=False)
        if pinned is None:
            return False
        with self._lock:
            kept = not self._closed
            if kept and name not in self._pins:
                self._pins[name] = _Pin(pinned, fresh)
                return True
        pinned.release()
        return kept

    def retain_chunk(self, chunk: Chunk) -> bool:
        """Keep a chunk here until :meth:`drop`, if all its shards are here."""
        if not self.leading([chunk]):
            return False
        return all(self.retain(ObjectRef(chunk, shard)) for shard in self._shards)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Unpin some chunks. They stay here until they are evicted."""
        with self._lock:
            pins = [self._pins.pop((key, shard), None) for key in keys for shard in self._shards]
        dropped = [pin for pin in pins if pin is not None]
        for pin in dropped:
            pin.memory.release()
        unused = sum(pin.unused for pin in dropped)
        if unused:
            self._counters.add("prefetched_unused_objects", unused)

    def note_read(self, payload: Tensor) -> None:
        """Count an object that was prefetched."""
        self._counters.add("prefetched_objects")
        self._counters.add("prefetched_bytes", payload.numel())


class IntoMemory(KVMemory):
    """The destination of an early load: the objects of one chunk, which reads leave in memory.

    Parameters
    ----------
    memory : KindMemory
    chunk : Chunk
        :meth:`KindMemory.want` was called for it.
    pins : bool
        Pin what has come.
    """

    def __init__(self, memory: KindMemory, chunk: Chunk, *, pins: bool = False) -> None:
        self._memory = memory
        self._chunk = chunk
        self._pins = pins

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy:
        """Never called: nothing is stored from here."""
        raise NotImplementedError("prefetched objects are on the shelf already")

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """Note that an object was read; it is in the memory if it fitted."""
        if not self._pins or self._memory.retain(ObjectRef(self._chunk, shard), fresh=True):
            self._memory.note_read(payload)

    def of_tail(self, tokens: int) -> IntoMemory:
        """Return itself: the memory holds objects of any size."""
        return self


@dataclass(eq=False, slots=True)
class _Request:
    """A waiting request, and the chunks that are prefetched for it."""

    #: Chunks for which no memory is reserved yet.
    chunks: deque[Chunk] = field(default_factory=deque)
    #: Keys of the others, and the early loads that bring them.
    keys: list[bytes] = field(default_factory=list)
    loads: list[Piece] = field(default_factory=list)
    #: Nothing more is read for it.
    ended: bool = False
    #: One of its chunks cannot be read, so those behind it are of no use.
    failed: bool = False


class Prefetcher:
    """Prefetches the chunks of waiting requests into memory, in order of arrival.

    Memory is reserved before a chunk is read, so that no chunk is read that does not fit;
    the rest of a request's chunks follows when other requests are released. A chunk that several
    requests need is read once. If a chunk did not arrive because the request that it was read for
    was released, it is read again for the others in the next step; if the storage or
    staging was unavailable, a second later. If a chunk cannot be read, the chunks behind it
    are not prefetched either. The step thread calls all methods; none calls the storage.

    Parameters
    ----------
    loads : Loads
        Their shelf is a :class:`~kvshelf.tiers.tiered.TieredView` with the same memory.
    memory : KindMemory
    """

    def __init__(self, loads: Loads, memory: KindMemory) -> None:
        self._loads = loads
        self._memory = memory
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        #: Keys that one request fewer needs from now on.
        self._released: deque[tuple[_Request, bytes]] = deque()
        #: The requests that need each chunk with reserved memory. The list may be empty while
        #: the chunk is still being read.
        self._users: dict[bytes, list[_Request]] = {}
        #: The chunks among these that are being read, and those whose load ended without them.
        self._reading: set[bytes] = set()
        self._retries: dict[bytes, Chunk] = {}
        self._retry_at = 0.0
        #: Early loads that ended; any thread appends.
        self._finished: deque[Piece] = deque()
        self._failures: list[tuple[Chunk, Failure]] = []

    def add(self, request_id: str, chunks: Sequence[Chunk]) -> None:
        """Prefetch further chunks for a waiting request."""
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request()
        if not (request.ended or request.failed):
            request.chunks.extend(chunks)
        self._advance()

    def cancel_reads(self, request_id: str) -> None:
        """Stop reading for a request, since its load has begun. Chunks in memory stay."""
        request = self._requests.get(request_id)
        if request is not None:
            request.ended = True
            request.chunks.clear()
            for load in request.loads:
                self._loads.cancel(load)

    def release(self, request_id: str) -> None:
        """Unpin the chunks that no other request needs."""
        self.cancel_reads(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._released.extend((request, key) for key in request.keys)
            self._advance()

    def release_all(self) -> None:
        """Unpin all chunks."""
        # All reads are cancelled first, so that no request takes the memory of another.
        for request_id in self._requests:
            self.cancel_reads(request_id)
        for request_id in list(self._requests):
            self.release(request_id)

    def take_failures(self) -> list[tuple[Chunk, Failure]]:
        """Return the chunks that could not be read since the last call, each with the reason.

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
                # Later requests would take the memory that this one waits for.
                return

    def _reserve(self, request: _Request) -> list[Chunk]:
        """Reserve memory for the next chunks of a request; return those that must be read."""
        fresh = []
        while request.chunks:
            chunk = request.chunks[0]
            key = chunk.key
            users = self._users.get(key)
            if users is None:
                if len(self._users) >= self._memory.most_chunks:
                    break
                users = self._users[key] = []
                self._memory.want([key])
                if not self._memory.retain_chunk(chunk):
                    fresh.append(chunk)
            elif key not in self._reading and not self._memory.kept([chunk]):
                # The requests that needed it until now have loads of their own.
                self._retries.pop(key, None)
                fresh.append(chunk)
            users.append(request)
            request.keys.append(key)
            request.chunks.popleft()
        return fresh

    def _read(self, request: _Request, chunks: Sequence[Chunk]) -> None:
        none = torch.empty(0, dtype=torch.int64)
        items = [
            ChunkSlots(chunk, none, IntoMemory(self._memory, chunk, pins=True)) for chunk in chunks
        ]
        self._reading.update(chunk.key for chunk in chunks)
        request.loads = [load for load in request.loads if not load.finished]
        # In a separate load, since the request's earlier chunks are being read already.
        request.loads.append(self._loads.load(items, early=True, on_done=self._finished.append))

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
                    and not self._memory.kept([item.chunk])
                ):
                    self._retries[key] = item.chunk
        self._forget(gone)

    def _give_up(self, chunk: Chunk, failure: Failure) -> None:
        """Report a chunk as failed, and end the reads of all requests that need it there."""
        self._failures.append((chunk, failure))
        for request in dict.fromkeys(self._users[chunk.key]):
            if request.ended:
                continue
            request.failed = True
            request.chunks.clear()
            first = request.keys.index(chunk.key)
            rest = _Request(keys=request.keys[first:], ended=True)
            del request.keys[first:]
            for key in rest.keys:
                users = self._users[key]
                users[users.index(request)] = rest
                self._released.append((rest, key))

    def _drop(self) -> None:
        """Unpin chunks that no request needs any more, once nothing is read for them."""
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
        self._forget(gone)

    def _forget(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._memory.unwant(keys)
            self._memory.drop(keys)
