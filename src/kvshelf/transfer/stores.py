"""The stores of one kind of KV: chunks on their way from a paged cache to a shelf.

Owns the queue of stores and the threads that publish.

A store: the step thread gathers the shards of a chunk into a slot of host memory
(:meth:`Stores.store`); on a device it only begins to. A store thread waits for the copy,
probes the shelf for the objects, hashes those that are missing and publishes them. On a storage of
high latency it does not probe: a lookup has just seen the chunk missing, and the write tells. Once
a write has found an object, stores probe for a minute.

The rules are those of the write (:class:`~kvshelf.backends.guard.GuardedBackend`): it creates an
object at most once, and none beyond the bound of the shelf, and waits some seconds for a sweep that
makes room. What is asked before only saves work:
the probe hashes and writes of what exists; the bound, before a chunk is gathered, memory for what
cannot be stored, and, before its first object is written, objects without the rest of their chunk.

In memory: a slot whose objects were all written is sealed, and loads find it. A chunk that is in
memory already is stored from there; nothing is gathered.

Dropped chunks: stores have a share of the memory, and the engine's step must not wait. A store for
which the share has no room is dropped, or refused if its caller plans it again. What was dropped or
published is remembered (:mod:`kvshelf.transfer.store_history`), and decides about the chunks behind
it.

Promised stores: another engine waits for these chunks. They are published before all others.

Contracts
---------
* :meth:`Stores.store` is called on the step thread and never calls the storage. Any other
  thread may call it too.
* The threads are daemon threads. A stuck thread is replaced (:mod:`kvshelf.shelf.threads`);
  its slot stays with it.
* Of a paged cache only the slots given are read, inside :meth:`Stores.store`, or on a device
  in the order of the engine's own work.
* While the circuit breaker of writes is open, stores are dropped.
* One lock, held for queue operations only; callbacks run without it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvshelf.backends import WriteResult
from kvshelf.background import trace_range
from kvshelf.errors import (
    BoundReachedError,
    DeviceUnavailableError,
    StorageError,
    UnavailableStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.names import object_name
from kvshelf.kv.caches import DONE, PendingCopy
from kvshelf.memory.ring import Slot
from kvshelf.shelf.view import ObjectRef, Presence, ShelfView
from kvshelf.transfer.context import ChunkSlots, TransferContext, TransferHalf
from kvshelf.transfer.store_history import StoreHistory

#: Seconds in which the copies of stores that are given up end, unless the device hangs.
_COPY_SECONDS: Final = 1.0
#: Seconds for which stores probe after a write found an object there.
_PROBES_SECONDS: Final = 60.0


class StoreOutcome(Enum):
    """What became of a call of :meth:`Stores.store`."""

    QUEUED = "queued"
    #: In flight already, published here, or another worker's to write.
    KNOWN = "known"
    #: Dropped: the memory of stores or the device's buffers are used up.
    STAGING_FULL = "staging full"
    #: Dropped: the chunk before it was dropped.
    PARENT_DROPPED = "parent dropped"
    #: Dropped: a bound of the shelf is reached.
    NO_ROOM = "no room"
    #: Dropped: the storage takes no writes for now or all store threads are stuck, the device
    #: cannot be used, or the stores are closed.
    UNAVAILABLE = "unavailable"


class StoreResult(Enum):
    """How a queued store ended."""

    PUBLISHED = "published"
    EXISTED = "existed"
    REPAIRED = "repaired"
    FAILED = "failed"
    #: A bound of the shelf left no room for it, or the chunk before it was not stored.
    DROPPED = "dropped"
    #: The stores were closed before.
    LOST = "lost"

    @property
    def is_stored(self) -> bool:
        """Whether the chunk is on the shelf."""
        return self in (StoreResult.PUBLISHED, StoreResult.EXISTED, StoreResult.REPAIRED)


OnStored = Callable[[Chunk, StoreResult], None]


@dataclass(eq=False, slots=True)
class _StoreJob:
    view: ShelfView
    chunk: Chunk
    slot: Slot
    repair: bool
    #: When the chunk was last seen missing.
    seen_at: float
    on_done: OnStored | None
    promised: bool = False
    pending: PendingCopy = DONE
    #: Callbacks of later stores of the same chunk.
    waiting: list[OnStored] = field(default_factory=list)
    ended: bool = False


class Stores(TransferHalf):
    """The stores of one kind of KV.

    Parameters
    ----------
    context : TransferContext

    Attributes
    ----------
    known : StoreHistory
        What was published, repaired and dropped here.
    """

    def __init__(self, context: TransferContext) -> None:
        super().__init__(context, "store", context.store_threads)
        self._plan = context.plan
        self.known = StoreHistory(context.fmt.kind)
        self._idle = threading.Condition(self._lock)
        self._queue: deque[_StoreJob] = deque()
        #: Queued stores that are promised: they run before those in the queue.
        self._promised: deque[_StoreJob] = deque()
        #: Until when stores probe a storage of high latency.
        self._probes_until = -math.inf
        #: The job of each store thread.
        self._running: dict[int, _StoreJob] = {}
        #: Queued and running jobs, by the chunk's key.
        self._in_flight: dict[bytes, _StoreJob] = {}

    # ------------------------------------------------------------- step thread

    def store(
        self,
        view: ShelfView,
        item: ChunkSlots,
        *,
        repair: bool = False,
        age: float = 0.0,
        wait: float = 0.0,
        promised: bool = False,
        may_refuse: bool = False,
        on_done: OnStored | None = None,
    ) -> StoreOutcome:
        """Gather one chunk and queue it for publishing. Step thread, unless it may wait.

        Parameters
        ----------
        view : ShelfView
            The objects of the kind, in the namespace of the chunk.
        item : ChunkSlots
            Slots of all tokens of the chunk.
        repair : bool
            The object with the chunk's name was found bad: verify and replace it.
        age : float
            Seconds since the chunk was last seen missing. A chunk that was published
            here later than that is not gathered again, and one whose parent was dropped
            later than that is dropped.
        wait : float
            Seconds to wait for memory when it is used up.
        promised : bool
            Another engine waits for the chunk: publish it before chunks that are not promised. A
            store of the same chunk that is in flight becomes promised.
        may_refuse : bool
            Where there is no memory now, the caller plans the chunk again: nothing is counted or
            remembered.
        on_done : Callable, optional
            Called once for a chunk that was queued, on the thread that ended its store. Must
            not block.
        """
        key = item.chunk.key
        seen_at = time.monotonic() - age
        shards = self._plan.writes(item.chunk.index)
        if not shards:
            # Another worker with the same heads writes it, unless its parent was dropped.
            self.known.follows_dropped(item.chunk, seen_at)
            if repair:
                self.known.note_repaired(key)
            return StoreOutcome.KNOWN
        properties = self._backend.properties
        writable = properties.available and not properties.read_only and not self._closing
        if not (writable and self._threads.ready()):
            self._log_read_only()
            return self._drop(item.chunk, StoreOutcome.UNAVAILABLE)
        with self._lock:
            job = self._in_flight.get(key)
            if job is not None:
                if promised:
                    self._promise(job)
                if on_done is None:
                    return StoreOutcome.KNOWN
                job.waiting.append(on_done)
                return StoreOutcome.QUEUED
            if not repair and self.known.published_after(key, seen_at):
                return StoreOutcome.KNOWN
        if self.known.follows_dropped(item.chunk, seen_at):
            self._context.count("dropped_chunks_parent_dropped")
            return StoreOutcome.PARENT_DROPPED
        if not self._backend.allows(self._places.slot_bytes):
            return self._drop(item.chunk, StoreOutcome.NO_ROOM)
        memory, share = self._context.kv_memory(item), self._context.shares.stores
        until = time.monotonic() + wait if wait > 0 else 0.0
        # Without a name it is never found: of no use where nothing stays in memory.
        named = self._memory.keeps
        slot = self._places.claim(item.chunk, share, deadline=until, is_named=named)
        if slot is None:
            return self._drop(item.chunk, StoreOutcome.STAGING_FULL, may_refuse)
        begin = time.perf_counter()
        pending: PendingCopy | None = DONE if slot.is_sealed else None
        try:
            if not slot.is_sealed:
                payloads = [self._places.payload(slot, item.chunk, shard) for shard in shards]
                pending = memory.gather(item.slots, payloads)
        except DeviceUnavailableError:
            return self._drop(item.chunk, StoreOutcome.UNAVAILABLE)
        except BaseException:
            self.known.note_dropped(key)
            raise
        finally:
            if pending is None:
                self._memory.ring.release(share, [slot])
        if pending is None:
            return self._drop(item.chunk, StoreOutcome.STAGING_FULL, may_refuse)
        self._counters.observe("gather", time.perf_counter() - begin)
        job = _StoreJob(view, item.chunk, slot, repair, seen_at, on_done, promised, pending)
        with self._lock:
            if not self._closing and self._threads.any:
                self.known.note_queued(key)
                self._in_flight[key] = job
                (self._promised if promised else self._queue).append(job)
                self._work.notify()
                return StoreOutcome.QUEUED
        self._give_up(job, time.monotonic() + _COPY_SECONDS)
        return self._drop(item.chunk, StoreOutcome.UNAVAILABLE)

    @property
    def room(self) -> int:
        """How many further chunks the memory for stores, and a device's buffers, have room for."""
        share, cache = self._context.shares.stores, self._context.cache
        room = max(0, share.limit - share.pinned_bytes) // self._places.slot_bytes
        # A share that has nothing may take a slot in any case.
        room = room or int(not share.pinned_bytes)
        return room if cache is None else min(room, cache.room)

    def await_room(self, seconds: float) -> None:
        """Wait until the memory for stores has room for a chunk, and not longer than `seconds`."""
        ring, share = self._memory.ring, self._context.shares.stores
        deadline = time.monotonic() + seconds
        slot = ring.claim(None, self._places.slot_bytes, share, deadline=deadline)
        if slot is not None:
            ring.release(share, [slot])

    def _promise(self, job: _StoreJob) -> None:
        """Make a store in flight a promised one. Holds the lock."""
        if not job.promised:
            job.promised = True
            with contextlib.suppress(ValueError):  # a thread has begun it
                self._queue.remove(job)
                self._promised.append(job)

    def _drop(self, chunk: Chunk, outcome: StoreOutcome, may_refuse: bool = False) -> StoreOutcome:
        """Count and remember a chunk that is not stored, unless it is only refused."""
        if not may_refuse:
            self._context.count(f"dropped_chunks_{outcome.name.lower()}")
            self.known.note_dropped(chunk.key)
        return outcome

    def _log_read_only(self) -> None:
        """Log, once, that the storage takes no writes: no write fails that could say so."""
        backend = self._backend
        if backend.writes.is_closed and backend.properties.read_only:
            self._log.warning(
                "%s takes no writes: nothing is stored", backend.url, about="read-only"
            )

    # ------------------------------------------------------------- store threads

    def _run(self) -> None:
        while not self._threads.replaced() and (job := self._next_job()) is not None:
            result = StoreResult.FAILED
            try:
                job.pending.wait()
                if self.known.follows_dropped(job.chunk, job.seen_at):
                    self._context.count("dropped_chunks_parent_dropped")
                    result = StoreResult.DROPPED
                else:
                    with trace_range("kvshelf store"):
                        result = self._publish(job)
            except Exception as error:  # noqa: BLE001 - the thread must go on
                self._store_failed(job, error)
                if isinstance(error, BoundReachedError):
                    result = StoreResult.DROPPED
            finally:
                self._release(job)
                self._end(threading.get_ident(), job, result)

    def _next_job(self) -> _StoreJob | None:
        """Return the next chunk to store, waiting for one; None at the end."""
        with self._lock:
            while not (self._promised or self._queue):
                if self._closing:
                    return None
                self._work.wait()
            job = (self._promised or self._queue).popleft()
            self._running[threading.get_ident()] = job
            return job

    def _publish(self, job: _StoreJob) -> StoreResult:
        view, chunk = job.view, job.chunk
        written = objects = repaired = 0
        refs = [ObjectRef(chunk, shard) for shard in self._plan.writes(chunk.index)]
        answers = [Presence.MISSING] * len(refs)
        is_far = self._backend.properties.high_latency
        if job.repair or not is_far or time.monotonic() < self._probes_until:
            answers = view.probe(refs)
        unwritten = [
            (ref, answer, self._places.view(job.slot, chunk, ref.shard))
            for ref, answer in zip(refs, answers, strict=True)
            if answer is not Presence.PRESENT or job.repair
        ]
        if unwritten and not self._backend.allows(sum(len(buffer) for *_, buffer in unwritten)):
            # Some of the objects alone would be useless.
            raise BoundReachedError(errno.ENOSPC, "not stored: a bound of the shelf is reached")
        hold = functools.partial(self._places.hold, job.slot, self._context.shares)
        for ref, answer, buffer in unwritten:
            if not job.slot.is_sealed:
                view.fmt.seal(buffer, *ref)
            suspect = answer is not Presence.MISSING
            result = view.publish(ref, buffer, suspect=suspect, hold=hold)
            if result is WriteResult.EXISTED:
                self._probes_until = time.monotonic() + _PROBES_SECONDS
                continue
            written += len(buffer)
            objects += 1
            if suspect or result is WriteResult.REPLACED:
                repaired += 1
                name = object_name(*ref, self._fmt.shards, self._fmt.kind)
                # A load that met the object has logged it already, under the same subject.
                self._log.warning(
                    "object %s was bad (%s) and has been replaced",
                    name,
                    answer.value if suspect else Presence.WRONG_SIZE.value,
                    about=("load", name),
                )
        if objects == len(refs) and self._memory.keeps and not job.slot.is_sealed:
            self._memory.ring.seal(job.slot, stays=True)
            self._memory.report()
        if written:
            self._context.count("stored_chunks")
            self._context.count("stored_bytes", written)
        else:
            self._counters.add("existing_chunks")
        if repaired:
            self._counters.add("repaired_objects", repaired)
            return StoreResult.REPAIRED
        return StoreResult.PUBLISHED if written else StoreResult.EXISTED

    def _store_failed(self, job: _StoreJob, error: Exception) -> None:
        if job.ended:
            # It was counted when it was given up.
            return
        self.known.note_dropped(job.chunk.key)
        reason = "error"
        if isinstance(error, (UnavailableStorageError, DeviceUnavailableError)):
            reason = "unavailable"
        elif isinstance(error, BoundReachedError):
            # The owner of the bound has logged it.
            reason = "no_room"
        elif not isinstance(error, StorageError):
            self._log.error("a chunk was not stored", exc_info=error, about=("store", type(error)))
        elif not self._backend.properties.read_only:
            # A storage that takes no writes at all was logged by its guard.
            self._log.warning("a chunk was not stored: %s", error, about=("store", job.chunk.key))
        self._context.count(f"dropped_chunks_{reason}")

    def _end(self, thread: int, job: _StoreJob, result: StoreResult) -> None:
        """End a job, once: a stuck thread whose job was given up may come back."""
        with self._lock:
            if self._running.get(thread) is job:
                del self._running[thread]
            if result.is_stored:
                self.known.note_published(job.chunk.key)
                if job.repair:
                    self.known.note_repaired(job.chunk.key)
            if job.ended:
                return
            self._forget(job)
        self._report(job, result)

    def _forget(self, job: _StoreJob) -> None:
        """Note that a job has ended. Holds the lock."""
        job.ended = True
        if self._in_flight.get(job.chunk.key) is job:
            del self._in_flight[job.chunk.key]
        self._idle.notify_all()

    def _report(self, job: _StoreJob, result: StoreResult) -> None:
        """Call the job's callbacks."""
        if job.on_done is not None:
            self._context.notify(job.on_done, job.chunk, result)
        if result in (StoreResult.PUBLISHED, StoreResult.REPAIRED):
            result = StoreResult.EXISTED
        for on_done in job.waiting:
            self._context.notify(on_done, job.chunk, result)

    # ------------------------------------------------------------- the end

    def _give_up_thread(self, thread: int) -> None:
        """End the job of a stuck thread, which keeps its slot."""
        with self._lock:
            job = self._running.pop(thread, None)
            if job is None or job.ended:
                return
            self.known.note_dropped(job.chunk.key)
            self._forget(job)
            self._memory.ring.abandon(job.slot)
        self._context.count("dropped_chunks_error")
        self._report(job, StoreResult.FAILED)

    def _give_up_all(self) -> None:
        """Drop the queued stores if no thread is left for them."""
        if not self._threads.any:
            self._end_queued(StoreResult.FAILED)

    def _end_queued(self, result: StoreResult) -> None:
        """End the jobs that no thread has begun."""
        with self._lock:
            queued = [*self._promised, *self._queue]
            self._promised.clear()
            self._queue.clear()
        deadline = time.monotonic() + _COPY_SECONDS
        for job in queued:
            # Those that are lost are counted at the close.
            if result is not StoreResult.LOST:
                self._drop(job.chunk, StoreOutcome.UNAVAILABLE)
            self._give_up(job, deadline)
            with self._lock:
                self._forget(job)
            self._report(job, result)

    def _release(self, job: _StoreJob) -> None:
        """Give a job's memory back. A disk tier may hold it longer.

        Memory that a device may still write to is given to nobody else.
        """
        self._memory.ring.abandon(job.slot)
        if job.pending.done():
            self._memory.ring.release(self._context.shares.stores, [job.slot])
        else:
            self._counters.add("stuck_threads")

    def _give_up(self, job: _StoreJob, deadline: float) -> None:
        """Give the memory of a job back that no thread has begun."""
        with contextlib.suppress(RuntimeError):
            job.pending.wait(deadline)
        self._release(job)

    def drain(self, seconds: float) -> int:
        """Wait until all stores are published; return how many were not in time."""
        deadline = time.monotonic() + seconds
        with self._lock:
            while True:
                lost = len(self._promised) + len(self._queue) + len(self._running)
                remaining = deadline - time.monotonic()
                if not lost or remaining <= 0:
                    return lost
                self._idle.wait(remaining)

    def close(self) -> None:
        """Drop the queued stores, and end the threads."""
        self._closing = True
        self._threads.close()
        self._end_queued(StoreResult.LOST)
        with self._lock:
            self._work.notify_all()

    def join(self, seconds: float) -> None:
        """Wait for the threads that are not stuck; report promised chunks that are lost."""
        super().join(seconds)
        with self._lock:
            lost = [job for job in self._running.values() if job.promised and not job.ended]
            for job in lost:
                self._forget(job)
        for job in lost:
            self._report(job, StoreResult.LOST)
