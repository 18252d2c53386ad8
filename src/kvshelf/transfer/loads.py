"""The loads of a transfer: chunks on their way from a shelf to a paged cache.

Owns the queues of loads, the threads that read, and the loads in progress.

A load: a load thread reads some objects of a chunk into staging buffers, verifies them and scatters
them into the paged cache. An object that lies in memory already, or that a tier takes into memory,
is scattered from there (:meth:`~kvshelf.shelf.view.ShelfView.fetch`): it takes no staging. When all
objects of a load have arrived or were given up, the load is ``finished`` and says at which chunk it
failed. Objects that miss their deadline are given up: their thread may hang for ever, the load does
not.

Order: the objects of a load are read from its beginning, as many at once as there are threads, and
scattered as they arrive. Where the storage reads many objects in one call, a thread takes all of a
chunk at once, and fewer towards the end of the load, so that the threads end together. Threads
alternate between the oldest load (so that every load finishes) and the load with the fewest objects
left (so that short loads do not queue behind long ones). Loads of equal size are thus served in
order of arrival. *Early* loads, for requests that do not wait for them yet, get the threads that no
other load needs, but never all of them. An object that several loads need at the same time is read
once, for all of them.

Where the caches prefer whole chunks (:attr:`~kvshelf.kv.caches.KVMemory.whole_chunks`), a thread
leaves its objects to a thread that still reads others of the same chunk; the last of them scatters
all. So what is left has a taker that needs no further staging, and no thread waits. A thread
scatters what was left to it before it takes staging.

Deadlines: what a thread reads at once has the deadline of its backend
(:mod:`kvshelf.backends.guard`). A load's deadline is that of reading 2 × (the bytes of the loads
before it + its own), since later loads may take half of the bandwidth. An early load has none.
While the circuit breaker of reads is open, loads fail at once, except for objects that a tier has.

Contracts
---------
* :meth:`Loads.load`, :meth:`Loads.poll` and the cancelling methods are called on the step
  thread and never call the storage. Any other thread may call them too.
* The threads are daemon threads. A stuck thread is replaced (:mod:`kvshelf.shelf.threads`);
  its staging buffer stays with it.
* Of a paged cache only the slots given are written, between :meth:`Loads.load` and the moment
  at which the load is reported finished, however it ends: loaded, failed, cancelled or late.
* Nothing unverified is ever scattered. Borrowed bytes are asked for their validity after the
  scatter: where they were taken back meanwhile, the object counts as failed.
* What is borrowed is given back exactly once, after the last scatter from it has ended and before
  the last load that needs it is reported finished.
* One lock, held for queue operations and during completion callbacks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

import torch

from kvshelf.backends import Borrowed
from kvshelf.capacity.history import Event, Reason
from kvshelf.errors import (
    BadObjectError,
    DeviceUnavailableError,
    ObjectMissingError,
    TransientStorageError,
    UnavailableStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.names import object_name
from kvshelf.shelf.view import FailedRead, Fetched, ObjectRef
from kvshelf.traces import trace_range
from kvshelf.transfer.context import ChunkSlots, TransferContext, TransferHalf
from kvshelf.transfer.staging import StagingBuffer, StagingPool


class Failure(Enum):
    """Why an object could not be loaded."""

    MISSING = "missing"
    BAD = "bad"
    ERROR = "error"
    #: The circuit breaker is open, or the device cannot be used: no verdict on the object.
    UNAVAILABLE = "unavailable"


_REASONS: Final = {
    Failure.MISSING: Reason.ABSENT,
    Failure.BAD: Reason.BAD,
    Failure.ERROR: Reason.ERROR,
    Failure.UNAVAILABLE: Reason.UNAVAILABLE,
}


@dataclass(eq=False, slots=True)
class Load:
    """One load, and its outcome once ``finished``.

    Attributes
    ----------
    request_id : str
    items : Sequence[ChunkSlots]
        In the order of the prompt.
    failed_at : int or None
        Index in `items` of the first chunk that is not in the cache.
    failures : list
        The chunks that failed, with the reason. Those given up after a failure before
        them are not listed.
    early : bool
        Its request does not wait for it yet.
    cancelled, finished : bool
    """

    request_id: str
    items: Sequence[ChunkSlots]
    early: bool = False
    failed_at: int | None = None
    failures: list[tuple[Chunk, Failure]] = field(default_factory=list)
    cancelled: bool = False
    finished: bool = False
    #: Objects of each item that are in the cache, and number of leading items with all.
    _arrived: list[int] = field(default_factory=list)
    _leading: int = 0
    #: Objects that a thread has taken, counted over items and shards, and the first not taken.
    _taken: bytearray = field(default_factory=bytearray)
    _next: int = 0
    #: The item of each key.
    _places: dict[bytes, int] = field(default_factory=dict)
    #: Threads that are copying into the cache at this moment.
    _scattering: int = 0
    #: Objects of each item that were read, and left to a thread that reads others.
    _left: dict[int, list[tuple[ReadTask, _Objects]]] = field(default_factory=dict)
    _deadline: float = 0.0
    _bytes: int = 0
    #: Mark of the engine's work on the cache's device before the load.
    _fence: object = None
    _on_done: Callable[[Load], None] | None = None

    @property
    def leading(self) -> int:
        """Number of leading items that are in the cache, however the load ended."""
        return self._leading

    @property
    def _wanted(self) -> int:
        """Number of leading items that are still of use."""
        if self.cancelled:
            return 0
        return len(self.items) if self.failed_at is None else self.failed_at

    @property
    def _lacks(self) -> bool:
        """Whether items that are of use have not arrived, and may yet."""
        return not self.finished and self._leading < self._wanted


@dataclass(eq=False, slots=True)
class ReadTask:
    """Objects of one chunk that a thread reads for one load."""

    load: Load
    item: int
    shards: Sequence[int]
    arrived: bool = False
    #: It was given up, since its thread is stuck.
    late: bool = False
    #: Its thread is borrowing the objects, or has staging buffers and is reading into them.
    reading: bool = False
    #: The same objects, or some of them, for other loads.
    sharers: list[ReadTask] = field(default_factory=list)

    @property
    def chunk(self) -> Chunk:
        """The chunk that the objects belong to."""
        return self.load.items[self.item].chunk

    @property
    def wanted(self) -> bool:
        """Whether the objects are still of use to the load."""
        return not self.load.finished and self.item < self.load._wanted


class _Objects:
    """The bytes of verified objects of one chunk that a thread has.

    Attributes
    ----------
    payloads : dict
        The payload of each shard, uint8 [bytes].
    """

    __slots__ = ("_fetched", "_staging", "payloads")

    def __init__(self, staging: StagingPool) -> None:
        self.payloads: dict[int, torch.Tensor] = {}
        self._staging = staging
        self._fetched: Sequence[Borrowed] = ()

    def take(self, context: TransferContext, chunk: Chunk, fetched: Fetched) -> None:
        """Take over objects, once."""
        self._fetched = tuple(fetched.values())
        for shard, one in fetched.items():
            self.payloads[shard] = context.payload(one, chunk, shard)

    def valid(self) -> bool:
        """Tell whether the bytes were the objects' until now."""
        return all(one.valid() for one in self._fetched)

    def release(self) -> None:
        """Give them back, once."""
        fetched, self._fetched = self._fetched, ()
        self.payloads.clear()
        staged = [one for one in fetched if isinstance(one, StagingBuffer)]
        if staged:
            self._staging.release(*staged)
        if len(staged) < len(fetched):
            for one in fetched:
                if not isinstance(one, StagingBuffer):
                    one.release()


class Loads(TransferHalf):
    """The loads of one transfer.

    Parameters
    ----------
    context : TransferContext
    threads : int
        Threads that read.
    """

    def __init__(self, context: TransferContext, threads: int) -> None:
        super().__init__(context)
        self._shards = context.plan.shards
        self._places = {shard: place for place, shard in enumerate(self._shards)}
        #: Bytes of a chunk's objects that this worker reads.
        self.chunk_bytes = sum(context.fmt.object_size(shard) for shard in self._shards)
        self._deadlines = context.shelf.backend.deadlines
        self._done = threading.Condition(self._lock)
        #: Loads with objects that no thread has taken, the oldest first.
        self._queue: deque[Load] = deque()
        self._early_queue: deque[Load] = deque()
        self._oldest_next = True
        self._max_early = max(1, threads - max(1, threads // 4))
        self._count_threads = threads
        #: Most objects that a thread takes at once: so many that all threads find staging.
        self._most = max(1, self._staging.for_loads // threads)
        #: All loads that are not finished or not yet polled, by request.
        self._active: dict[str, Load] = {}
        self._active_early: dict[str, Load] = {}
        self._finished: list[Load] = []
        #: The task of each load thread.
        self._tasks: dict[int, ReadTask] = {}
        #: Tasks whose objects are being read, so that others may share them.
        self._reading: set[ReadTask] = set()
        self._threads = context.threads(
            "load", threads, self._run, on_stuck=self._give_up_task, on_stop=self._refuse_all
        )

    # ------------------------------------------------------------- step thread

    def load(
        self,
        request_id: str,
        items: Sequence[ChunkSlots],
        *,
        early: bool = False,
        bytes_ahead: int = 0,
        on_done: Callable[[Load], None] | None = None,
    ) -> Load:
        """Start to load chunks into the paged cache. Step thread; returns at once.

        Parameters
        ----------
        request_id : str
            Different from those of all loads that are not yet finished; early ones have
            names of their own.
        items : Sequence of ChunkSlots
        early : bool
            The request does not wait for it yet: other loads go first. Needs `on_done`.
        bytes_ahead : int
            Bytes of loads of other transfers, which share the storage with this one.
        on_done : Callable, optional
            Called once when the load is finished, perhaps before this method returns, on
            the thread that ended it and with a lock held: it must not block, and must not
            call the transfer. Such a load is not returned by :meth:`poll`; a caller that
            waits for it calls :meth:`check` now and then.
        """
        load = Load(
            request_id,
            items,
            early,
            _arrived=[0] * len(items),
            _bytes=len(items) * self.chunk_bytes,
            _taken=bytearray(len(items) * len(self._shards)),
            _places={item.chunk.key: place for place, item in enumerate(items)},
            _on_done=on_done,
        )
        if early and on_done is None:
            raise ValueError("an early load needs on_done: it is not returned by poll()")
        usable = True
        cache = self._context.cache
        if cache is not None and any(item.memory is None for item in items):
            try:
                load._fence = cache.fence()
            except DeviceUnavailableError:
                usable = False
        if usable and not early and self._shelf.backend.properties.lends:
            # Without the lock: a name for each object takes a while.
            self._shelf.expect(
                [ObjectRef(item.chunk, shard) for item in items for shard in self._shards]
            )
        with self._lock:
            ahead = bytes_ahead + self._unfinished_bytes()
            seconds = self._deadlines.to_read(2 * (ahead + load._bytes))
            load._deadline = time.monotonic() + seconds
            (self._active_early if early else self._active)[request_id] = load
            if not items:
                self._complete(load)
            elif not (
                usable and self._shelf.available and not self._closing and self._threads.ready()
            ):
                self._refuse(load)
            else:
                (self._early_queue if early else self._queue).append(load)
                for task in self._reading:
                    self._share(task, load)
                self._work.notify(len(items) * len(self._shards))
        return load

    def cancel(self, request_id: str, *, count: bool = True) -> None:
        """Give a load up, and the early one of the same name.

        It is still reported finished, once no thread writes to the cache for it. Objects that
        no thread has begun to read are not read any more.

        Parameters
        ----------
        request_id : str
        count : bool
            Whether it counts as one that was cancelled because its request was aborted.
        """
        with self._lock:
            load = self._active.get(request_id)
            if load is not None and not load.finished:
                load.cancelled = True
                if count:
                    self._counters.add("cancelled_loads")
                self._settle(load)
        self.cancel_early(request_id)

    def cancel_early(self, request_id: str) -> None:
        """Do as :meth:`cancel` does, to an early load only."""
        with self._lock:
            load = self._active_early.get(request_id)
            if load is not None and not load.finished:
                load.cancelled = True
                self._settle(load)

    def poll(self, wait: float = 0.0) -> list[Load]:
        """Return the loads that finished since the last call.

        Parameters
        ----------
        wait : float
            Seconds to wait for the first one while any load is running: for steps that
            have nothing else to do.
        """
        with self._lock:
            if wait > 0 and not self._finished and self._active:
                self._done.wait(wait)
            if self._active and not self._finished:
                self._give_up_late()
            finished, self._finished = self._finished, []
            for load in finished:
                if self._active.get(load.request_id) is load:
                    del self._active[load.request_id]
            return finished

    def check(self) -> None:
        """Give up the loads that are past their deadline, as :meth:`poll` does too."""
        with self._lock:
            if self._active:
                self._give_up_late()

    @property
    def loading(self) -> bool:
        """Whether any load is running or not yet polled, early ones apart."""
        return bool(self._active)

    @property
    def loading_bytes(self) -> int:
        """Bytes of the loads that are not finished, early ones apart."""
        with self._lock:
            return self._unfinished_bytes()

    def _unfinished_bytes(self) -> int:
        return sum(load._bytes for load in self._active.values() if not load.finished)

    # ------------------------------------------------------------- order

    def _next_task(self) -> ReadTask | None:
        """Take the next objects to read, waiting for them; None at the end. Load threads."""
        with self._lock:
            while (task := self._take()) is None:
                if self._closing:
                    return None
                self._work.wait()
            self._tasks[threading.get_ident()] = task
            return task

    def _take(self) -> ReadTask | None:
        """Take the next objects, for all loads that want them. Holds the lock."""
        load = self._choose()
        if load is None:
            return None
        shards, first = len(self._shards), load._next
        item, place = divmod(first, shards)
        # A part of what is left that gets smaller, so that no thread is left with much at the end.
        share = (load._wanted * shards - first) // (2 * self._count_threads)
        most = self._most if self._shelf.backend.reads_whole else 1
        end = min(place + max(1, min(share, most)), shards)
        taken = load._taken.find(1, first, first - place + end)
        if taken >= 0:
            end = place + taken - first
        task = ReadTask(load, item, self._shards[place:end])
        self._note_taken(load, item, task.shards)
        for other in [*self._queue, *self._early_queue]:
            self._share(task, other)
        self._reading.add(task)
        return task

    def _choose(self) -> Load | None:
        """Return the load whose turn it is, see the module. Holds the lock."""
        if self._queue:
            self._oldest_next = not self._oldest_next
            if not self._oldest_next:
                return self._queue[0]
            shards = len(self._shards)
            return min(self._queue, key=lambda load: load._wanted * shards - load._next)
        if self._early_queue:
            early = sum(task.load.early for task in self._tasks.values())
            if early < self._max_early:
                return self._early_queue[0]
        return None

    def _share(self, task: ReadTask, load: Load) -> None:
        """Let `load` share the objects that `task` reads, if it needs them. Holds the lock."""
        item = load._places.get(task.chunk.key)
        if item is None:
            return
        first = item * len(self._shards)
        shards = [s for s in task.shards if not load._taken[first + self._places[s]]]
        if shards:
            task.sharers.append(ReadTask(load, item, shards))
            self._note_taken(load, item, shards)

    def _note_taken(self, load: Load, item: int, shards: Sequence[int]) -> None:
        """Note that objects of a load are being read. Holds the lock."""
        first = item * len(self._shards)
        for shard in shards:
            load._taken[first + self._places[shard]] = 1
        left = load._taken.find(0, load._next)
        load._next = len(load._taken) if left < 0 else left
        self._leave_queue(load)

    def _leave_queue(self, load: Load) -> None:
        """Take a load off its queue once all its useful objects are taken. Holds the lock."""
        queue = self._early_queue if load.early else self._queue
        if load._next >= load._wanted * len(self._shards) and load in queue:
            queue.remove(load)

    # ------------------------------------------------------------- load threads

    def _run(self) -> None:
        while not self._threads.replaced() and (task := self._next_task()) is not None:
            objects = _Objects(self._staging)
            try:
                with trace_range("kvshelf load"):
                    failure = self._fetch(task, objects)
                if objects.payloads and self._leave(task, objects):
                    objects = _Objects(self._staging)
                    continue
                taker: ReadTask | None = task
                while taker is not None:
                    ended = self._deliver(taker, objects, failure)
                    following = self._next_sharer(task)
                    if following is None:
                        # Before its load is finished: what the load has used is free from then on.
                        objects.release()
                    self._end_task(taker, ended)
                    taker = following
            finally:
                objects.release()

    def _fetch(self, task: ReadTask, objects: _Objects) -> Failure | None:
        """Have the objects of a task in memory; otherwise return why not.

        `objects` has all of them afterwards, or none: after a failure, or if no staging became
        free.
        """
        chunk = task.chunk
        # A flag, not the lock: a thread that reads it too early scatters by itself.
        task.reading = True
        try:
            fetched = self._shelf.fetch(chunk, task.shards, partial(self._staging_for, task))
        except Exception as error:  # noqa: BLE001 - the thread must go on
            return self._reason(task, task.shards[0], error)
        if fetched is None:
            # Nobody waits for the objects of a thread that was stuck any more.
            return Failure.ERROR if task.late else None
        if isinstance(fetched, FailedRead):
            return self._reason(task, fetched.shard, fetched.error)
        objects.take(self._context, chunk, fetched)
        return None

    def _staging_for(self, task: ReadTask, count: int) -> list[StagingBuffer] | None:
        """Take buffers; wait for them until the last deadline of the loads that need them."""
        if task.late:
            return None
        # A wait must not keep what others left to this thread.
        self._deliver_left(task)
        # When memory is short, an early load is not worth a wait.
        deadline = 0.0 if task.load.early else task.load._deadline
        while True:
            buffers = self._staging.acquire_for_load(count, deadline - time.monotonic())
            if buffers is not None:
                task.reading = True
                return buffers
            with self._lock:
                waiting = [
                    share.load._deadline
                    for share in task.sharers
                    if share.wanted and not share.load.early
                ]
                deadline = max(waiting, default=0.0)
                if deadline <= time.monotonic() or self._closing:
                    # Under this lock, so that no load joins a read that has failed.
                    self._reading.discard(task)
                    return None

    def _reason(self, task: ReadTask, shard: int, error: Exception) -> Failure:
        """Count and log that an object could not be had; return why."""
        if isinstance(error, ObjectMissingError):
            return self._load_failed(task, shard, Failure.MISSING, error)
        if isinstance(error, BadObjectError):
            return self._load_failed(task, shard, Failure.BAD, error)
        if isinstance(error, UnavailableStorageError | DeviceUnavailableError):
            return self._load_failed(task, shard, Failure.UNAVAILABLE, error)
        return self._load_failed(task, shard, Failure.ERROR, error)

    def _leave(self, task: ReadTask, objects: _Objects) -> bool:
        """Leave objects to a thread that still reads others of their chunk, if there is one.

        That thread delivers them, and releases them.
        """
        load = task.load
        memory = load.items[task.item].memory or self._context.cache
        with self._lock:
            task.reading = False
            if task.sharers or memory is None or not memory.whole_chunks:
                return False
            if not any(
                other.reading and other.load is load and other.item == task.item
                for other in self._tasks.values()
            ):
                return False
            self._tasks.pop(threading.get_ident(), None)
            self._reading.discard(task)
            load._left.setdefault(task.item, []).append((task, objects))
            return True

    def _take_left(self, task: ReadTask) -> list[tuple[ReadTask, _Objects]]:
        """Take over what was left to the thread of `task`; nothing more is left to it."""
        with self._lock:
            task.reading = False
            return task.load._left.pop(task.item, [])

    def _deliver_left(self, task: ReadTask) -> None:
        """Scatter what was left to this thread, without its own objects."""
        left = self._take_left(task)
        if not left:
            return
        failure = None
        try:
            self._scatter(task.load, task.item, left)
        except Exception as error:  # noqa: BLE001 - the thread must go on
            other = left[0][0]
            failure = self._load_failed(other, other.shards[0], Failure.ERROR, error)
        finally:
            for _, objects in left:
                objects.release()
        for number, (other, _) in enumerate(left):
            self._end_task(other, None if number else failure)

    def _deliver(
        self, task: ReadTask, objects: _Objects, failure: Failure | None
    ) -> Failure | None:
        """Scatter the objects, and those left to this thread, for one load that needs them.

        Returns why the load did not get the objects of `task`; those that were left are ended.
        """
        left = self._take_left(task)
        try:
            if failure is None and not objects.payloads:
                failure = Failure.UNAVAILABLE
                if not task.load.early:
                    error = TimeoutError("no staging buffer became free")
                    failure = self._load_failed(task, task.shards[0], Failure.ERROR, error)
            elif failure is None:
                try:
                    self._scatter(task.load, task.item, [(task, objects), *left])
                except Exception as error:  # noqa: BLE001 - the thread must go on
                    failure = self._load_failed(task, task.shards[0], Failure.ERROR, error)
        finally:
            for _, others in left:
                others.release()
        for other, _ in left:
            self._end_task(other, None)
        return failure

    def _scatter(
        self, load: Load, number: int, arrived: Sequence[tuple[ReadTask, _Objects]]
    ) -> None:
        """Scatter objects of one item.

        Raises
        ------
        TransientStorageError
            If borrowed bytes were taken back meanwhile: none of the objects counts as arrived.
        """
        with self._lock:
            if not all(task.wanted for task, _ in arrived):
                return
            # From here on the load waits for the scatter to end.
            load._scattering += 1
        item = load.items[number]
        payloads = {
            shard: objects.payloads[shard] for task, objects in arrived for shard in task.shards
        }
        begin = time.perf_counter()
        try:
            memory = self._context.memory(item)
            fence = load._fence if item.memory is None else item.fence
            if len(payloads) == len(self._shards) > 1:
                in_order = [payloads[shard] for shard in self._shards]
                memory.scatter_chunk(self._shards, item.slots, in_order, fence)
            else:
                for shard, payload in payloads.items():
                    memory.scatter(shard, item.slots, payload, fence)
            if not all(objects.valid() for _, objects in arrived):
                raise TransientStorageError(
                    "the memory that lent it was taken back while it was read; where this recurs,"
                    " loads take longer than loans last"
                )
            for task, _ in arrived:
                task.arrived = True
        finally:
            with self._lock:
                load._scattering -= 1
        if not load.early:
            self._counters.observe("scatter", time.perf_counter() - begin)
            nbytes = sum(self._shelf.size(item.chunk, shard) for shard in payloads)
            self._count("loaded_bytes", nbytes)

    def _next_sharer(self, task: ReadTask) -> ReadTask | None:
        """Return a further load's share in the objects; without one, the task is over."""
        with self._lock:
            if task.sharers:
                return task.sharers.pop(0)
            self._tasks.pop(threading.get_ident(), None)
            self._reading.discard(task)
            return None

    def _load_failed(
        self, task: ReadTask, shard: int, failure: Failure, error: Exception
    ) -> Failure:
        if task.late or failure is Failure.UNAVAILABLE:
            # It was counted when it was given up, or the storage was not called.
            return failure
        name = object_name(task.chunk, shard, self._fmt.shards, self._fmt.kind)
        if failure is Failure.MISSING:
            self._counters.add("load_failures_missing")
        elif failure is Failure.BAD:
            self._counters.add("load_failures_bad")
            self._context.note_bad(f"{self._fmt.namespace.folder}/{name}")
        else:
            self._counters.add("load_failures_error")
        early = all(share.load.early for share in [task, *task.sharers])
        self._log.warning(
            "object %s was not %s: %s",
            name,
            "prefetched" if early else "loaded, its tokens are computed instead",
            error,
            about=("early" if early else "load", name),
        )
        return failure

    def _end_task(self, task: ReadTask, failure: Failure | None) -> None:
        with self._lock:
            load = task.load
            if load.finished:
                return
            if failure is not None:
                # A late one was given up before; its load may have waited for its scatter.
                if not task.late:
                    self._fail(load, task.item, failure)
            elif task.arrived:
                load._arrived[task.item] += len(task.shards)
                items, shards = len(load.items), len(self._shards)
                while load._leading < items and load._arrived[load._leading] == shards:
                    load._leading += 1
            self._settle(load)

    # ------------------------------------------------------------- failures

    def _give_up_late(self) -> None:
        """Fail the loads that are past their deadline. Holds the lock."""
        now = time.monotonic()
        for load in list(self._active.values()):
            if now > load._deadline and load._lacks:
                self._give_up(load, load._leading)

    def _give_up(self, load: Load, item: int) -> None:
        """Fail a load from an item on that missed its deadline. Holds the lock."""
        self._counters.add("load_failures_timeout")
        chunk = load.items[item].chunk
        self._fail(load, item, Failure.ERROR, Reason.TIMED_OUT)
        self._settle(load)
        if not load.early:
            self._log.warning(
                "%s did not deliver chunk %d of a request in time, its tokens are computed instead",
                self._shelf.backend.url,
                chunk.index,
                about="late",
            )

    def _give_up_task(self, thread: int) -> None:
        """Give up the objects that a stuck thread reads."""
        with self._lock:
            stuck = self._tasks.pop(thread, None)
            if stuck is None:
                return
            # Loads that need the objects from now on have them read again.
            self._reading.discard(stuck)
            stuck.reading = False
            for _, objects in stuck.load._left.pop(stuck.item, []):
                # What was left to it is of no use without its own.
                objects.release()
            for task in (stuck, *stuck.sharers):
                task.late = True
                if task.wanted:
                    self._give_up(task.load, task.item)

    def _refuse_all(self) -> None:
        """Give up all loads: the circuit breaker is open, and no tier is in front of the shelf."""
        if self._shelf.available and self._threads.any:
            # Objects that no tier has fail at once.
            return
        with self._lock:
            for load in [*self._active.values(), *self._active_early.values()]:
                if load._lacks:
                    self._refuse(load)

    def _refuse(self, load: Load) -> None:
        """Fail the rest of a load without a call to the storage. Holds the lock."""
        if not load.early:
            self._counters.add("load_failures_unavailable")
        self._fail(load, load._leading, Failure.UNAVAILABLE)
        self._settle(load)

    def _fail(self, load: Load, item: int, failure: Failure, reason: Reason | None = None) -> None:
        """Note that an item will not arrive. Holds the lock."""
        chunk = load.items[item].chunk
        load.failures.append((chunk, failure))
        if not load.early:
            self._context.note(Event.FAILED_LOAD, chunk, reason or _REASONS[failure])
        if load.failed_at is None or item < load.failed_at:
            load.failed_at = item

    # ------------------------------------------------------------- end

    def _settle(self, load: Load) -> None:
        """Complete a load if no further object of it is wanted. Holds the lock."""
        # Chunks after a failed one are of no use to this request.
        self._leave_queue(load)
        if load._leading >= load._wanted and not load._scattering:
            self._complete(load)

    def _complete(self, load: Load) -> None:
        load.finished = True
        if load._wanted and not load.early:
            self._count("loaded_chunks", load._wanted)
        if load._on_done is None:
            self._finished.append(load)
            self._done.notify_all()
        else:
            active = self._active_early if load.early else self._active
            if active.get(load.request_id) is load:
                del active[load.request_id]
            self._context.notify(load._on_done, load)

    def close(self) -> None:
        """Fail the loads that are not finished and tell the threads to end."""
        self._closing = True
        self._threads.close()
        with self._lock:
            for load in [*self._active.values(), *self._active_early.values()]:
                if load._lacks:
                    self._fail(load, load._leading, Failure.ERROR)
                    self._settle(load)
            self._work.notify_all()
