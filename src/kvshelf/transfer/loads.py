"""The loads of one kind of KV: chunks on their way from a shelf to a paged cache.

Owns the threads that read, and the loads in progress: what is called a load here is the
:class:`~kvshelf.transfer.load.Piece` of this kind.

A load: a load thread reads some objects of a chunk into staging buffers, verifies them and scatters
them into the paged cache. :mod:`kvshelf.transfer.reads` chooses the objects. An object that lies in
memory already, or that a tier takes into memory, is scattered from there
(:meth:`~kvshelf.shelf.view.ShelfView.fetch`): it takes no staging. When all objects of a load have
arrived or were given up, the load is ``finished`` and says at which chunk it failed. Objects that
miss their deadline are given up: their thread may hang for ever, the load does not.

Deadlines: what a thread reads at once has the deadline of its backend
(:mod:`kvshelf.backends.guard`). A load's deadline is that of reading 2 × (the bytes of the loads
before it + its own), since later loads may take half of the bandwidth. An early load has none.
While the circuit breaker of reads is open, loads fail at once, except for objects that a tier has.

Contracts
---------
* :meth:`Loads.load`, :meth:`Loads.cancel` and :meth:`Loads.check` are called on the step thread
  and never call the storage. Any other thread may call them too.
* The threads are daemon threads. A stuck thread is replaced (:mod:`kvshelf.shelf.threads`);
  its staging buffer stays with it.
* Of a paged cache only the slots given are written, between :meth:`Loads.load` and the moment
  at which the load is reported finished, however it ends: loaded, failed, cancelled or late.
* Nothing unverified is ever scattered. Memory of other owners is checked for validity after the
  scatter: if it was taken back meanwhile, the object counts as failed.
* What is pinned is given back exactly once, after the last scatter from it has ended and before
  the last load that needs it is reported finished.
* One lock, held for queue operations and during completion callbacks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvshelf.errors import (
    BadObjectError,
    DeviceUnavailableError,
    ObjectMissingError,
    TransientStorageError,
    UnavailableStorageError,
)
from kvshelf.format.names import object_name
from kvshelf.shelf.view import FailedRead
from kvshelf.traces import trace_range
from kvshelf.transfer.context import ChunkSlots, TransferContext, TransferHalf
from kvshelf.transfer.load import Failure, Piece
from kvshelf.transfer.reads import Arrived, Objects, Reads, ReadTask
from kvshelf.transfer.staging import StagingBuffer

#: Objects of a load that are announced to the shelf at a time, the first ones by the step thread:
#: a name for each takes a while.
_ANNOUNCED: Final = 32


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, ObjectMissingError):
        return Failure.MISSING
    if isinstance(error, BadObjectError):
        return Failure.BAD
    if isinstance(error, UnavailableStorageError | DeviceUnavailableError):
        return Failure.UNAVAILABLE
    return Failure.ERROR


class Loads(TransferHalf):
    """The loads of one kind of KV.

    Parameters
    ----------
    context : TransferContext

    Attributes
    ----------
    chunk_bytes : int
        Bytes of a chunk's objects that this worker reads.
    """

    def __init__(self, context: TransferContext) -> None:
        # One for what lies in memory, which no slow read holds up.
        threads = context.load_threads + (context.shelf.in_memory is not None)
        super().__init__(context, "load", threads)
        self._shards = context.plan.shards
        self.chunk_bytes = sum(context.fmt.object_size(shard) for shard in self._shards)
        #: Most objects that a thread takes at once: few enough that all threads find staging.
        self._most = max(1, self._staging.for_loads // threads)
        self._announced = max(1, _ANNOUNCED // len(self._shards))
        self._chunks_at_once = max(1, context.load_threads // len(self._shards))
        #: Those that are not finished, the oldest first.
        self._active: dict[Piece, None] = {}
        self._reads = Reads(self._shards, context.load_threads, self._shelf.in_memory)

    # ------------------------------------------------------------- step thread

    def load(
        self,
        items: Sequence[ChunkSlots],
        *,
        early: bool = False,
        bytes_ahead: int = 0,
        cuts: Sequence[float] = (),
        at_once: int = 0,
        on_done: Callable[[Piece], None],
    ) -> Piece:
        """Start to load chunks into the paged cache. Step thread; returns at once.

        Parameters
        ----------
        items : Sequence of ChunkSlots
            In the order of the prompt.
        early : bool
            The request does not wait for it yet: other loads come first.
        bytes_ahead : int
            Bytes of loads of other kinds, which share the storage with this one.
        cuts : Sequence of float
            See :attr:`Piece.cuts`.
        at_once : int
            See :attr:`Piece.at_once`.
        on_done : Callable
            Called once when the load is finished, perhaps before this method returns, on
            the thread that ended it and with a lock held: it must not block, and must not
            call these loads. A caller that waits for it calls :meth:`check` now and then.
        """
        nbytes = len(items) * self.chunk_bytes
        piece = Piece(
            items,
            early,
            nbytes=nbytes,
            cuts=cuts,
            at_once=at_once,
            threads=self._chunks_at_once,
            on_done=on_done,
        )
        usable = True
        cache = self._context.cache
        if cache is not None and any(item.memory is None for item in items):
            try:
                piece.fence = cache.fence()
            except DeviceUnavailableError:
                usable = False
        if usable:
            self._announce(piece, 0)
        with self._lock:
            if not early:
                nbytes = bytes_ahead + self.loading_bytes + piece.nbytes
                seconds = self._shelf.backend.deadlines.to_read(2 * nbytes)
                piece.deadline = time.monotonic() + seconds
            self._active[piece] = None
            if not items:
                self._complete(piece)
            elif not (
                usable and self._shelf.available and not self._closing and self._threads.ready()
            ):
                self._refuse(piece)
            else:
                self._reads.add(piece)
                self._work.notify(len(items) * len(self._shards))
        return piece

    def _announce(self, piece: Piece, first: int) -> None:
        """Announce some items of a load to the shelf. Does not hold the lock."""
        # Where few are to be read at once, who is told of all would read them.
        if not piece.early and not piece.at_once:
            items = piece.items[first : first + self._announced]
            self._shelf.expect([item.chunk for item in items], self._shards)

    def cancel(self, piece: Piece, *, count: bool = True) -> None:
        """Give a load up.

        It is still reported finished, once no thread writes to the cache for it. Objects that
        no thread has begun to read are not read any more. With `count` it counts as one whose
        request was aborted, unless it is an early one.
        """
        with self._lock:
            if not piece.finished:
                piece.cancelled = True
                if count and not piece.early:
                    self._counters.add("cancelled_loads")
                self._settle(piece)

    def check(self) -> None:
        """Give up the loads that are past their deadline, or slower than computing the rest."""
        with self._lock:
            now = time.monotonic()
            for piece in list(self._active):
                if now > piece.deadline and piece.lacks:
                    self._give_up(piece, piece.leading)
                elif piece.is_slow(now):
                    self._counters.add("cut_loads")
                    self._fail(piece, piece.leading, Failure.CUT)

    @property
    def loading_bytes(self) -> int:
        """Bytes of the loads that are not finished, early ones apart."""
        return sum(piece.nbytes for piece in list(self._active) if not piece.early)

    # ------------------------------------------------------------- load threads

    def _next_task(self) -> ReadTask | None:
        """Take the next objects to read, waiting for them; None at the end."""
        with self._lock:
            while True:
                most = self._most if self._shelf.backend.reads_whole else 1
                task = self._reads.take(threading.get_ident(), most)
                if task is not None and task.piece.started is None:
                    task.piece.started = time.monotonic()
                if task is not None or self._closing:
                    return task
                self._work.wait()

    def _run(self) -> None:
        while not self._threads.replaced() and (task := self._next_task()) is not None:
            objects = Objects(self._context)
            try:
                with trace_range("kvshelf load"):
                    failure = self._fetch(task, objects)
                left = self._leave(task, objects)
                if left is None:
                    objects = Objects(self._context)
                    continue
                taker: ReadTask | None = task
                while taker is not None:
                    ended = failure or self._scatter(taker, [(taker, objects), *left])
                    self._end_left(left)
                    left = []
                    with self._lock:
                        following = self._reads.next_sharer(threading.get_ident(), task)
                    if following is None:
                        # Before its load is finished: the memory that the load has used is free
                        # from then on.
                        objects.release()
                    self._end_task(taker, ended)
                    taker = following
            finally:
                objects.release()

    def _fetch(self, task: ReadTask, objects: Objects) -> Failure | None:
        """Bring the objects of a task into memory; return why that failed, if it did.

        `objects` has all of them afterwards, or none: after a failure, or if no staging became
        free.
        """
        chunk = task.chunk
        # A flag, not the lock: a thread that reads it too early scatters by itself.
        task.reading = True
        try:
            if task.item % self._announced == 0 and self._shards[0] in task.shards:
                self._announce(task.piece, task.item + self._announced)
            fetched = self._shelf.fetch(chunk, task.shards, partial(self._staging_for, task))
        except Exception as error:  # noqa: BLE001 - the thread must go on
            return self._load_failed(task, task.shards[0], _failure_of(error), error)
        if fetched is None:
            # No load waits any more for the objects of a thread that was stuck.
            return Failure.ERROR if task.late else None
        if isinstance(fetched, FailedRead):
            return self._load_failed(task, fetched.shard, _failure_of(fetched.error), fetched.error)
        objects.take(chunk, fetched)
        return None

    def _staging_for(self, task: ReadTask, count: int) -> list[StagingBuffer] | None:
        """Take buffers; wait for them until the last deadline of the loads that need them."""
        if task.late:
            return None
        # A wait must not keep what others left to this thread.
        self._deliver_left(task)
        # When memory is short, an early load is not worth a wait.
        deadline = 0.0 if task.piece.early else task.piece.deadline
        while True:
            buffers = self._staging.acquire_for_load(count, deadline - time.monotonic())
            if buffers is not None:
                task.reading = True
                return buffers
            with self._lock:
                waiting = [
                    share.piece.deadline
                    for share in task.sharers
                    if share.wanted and not share.piece.early
                ]
                deadline = max(waiting, default=0.0)
                if deadline <= time.monotonic() or self._closing:
                    # Under this lock, so that no load joins a read that has failed.
                    self._reads.share_no_more(task)
                    return None

    def _leave(self, task: ReadTask, objects: Objects) -> list[Arrived] | None:
        """Leave objects to a thread that still reads others of their chunk, if there is one.

        Otherwise return what was left to this thread, which delivers all.
        """
        memory = task.piece.items[task.item].memory or self._context.cache
        if memory is None or not memory.whole_chunks:
            return []
        with self._lock:
            if objects.payloads and self._reads.leave(threading.get_ident(), task, objects):
                return None
            return self._reads.take_left(task)

    def _deliver_left(self, task: ReadTask) -> None:
        """Scatter what was left to this thread, without its own objects."""
        with self._lock:
            left = self._reads.take_left(task)
        if left:
            self._end_left(left, self._scatter(left[0][0], left))

    def _end_left(self, left: Sequence[Arrived], failure: Failure | None = None) -> None:
        """End what was left to this thread: why it failed counts once."""
        for _, objects in left:
            objects.release()
        for other, _ in left:
            self._end_task(other, failure)
            failure = None

    def _scatter(self, first: ReadTask, arrived: Sequence[Arrived]) -> Failure | None:
        """Scatter objects of one item; return why that failed, and none of them arrived."""
        piece = first.piece
        if not arrived[0][1].payloads:
            if piece.early:
                return Failure.UNAVAILABLE
            error = TimeoutError("no staging buffer became free")
            return self._load_failed(first, first.shards[0], Failure.ERROR, error)
        with self._lock:
            if not all(task.wanted for task, _ in arrived):
                return None
            # From here on the load waits for the scatter to end.
            piece.scattering += 1
        item = piece.items[first.item]
        payloads = {
            shard: objects.payloads[shard] for task, objects in arrived for shard in task.shards
        }
        begin = time.perf_counter()
        try:
            memory = self._context.memory(item)
            fence = piece.fence if item.memory is None else item.fence
            if len(payloads) == len(self._shards) > 1:
                in_order = [payloads[shard] for shard in self._shards]
                memory.scatter_chunk(self._shards, item.slots, in_order, fence)
            else:
                for shard, payload in payloads.items():
                    memory.scatter(shard, item.slots, payload, fence)
            # Memory of other owners may have been taken back meanwhile.
            if not all(objects.valid() for _, objects in arrived):
                raise TransientStorageError(
                    "the memory that lent it was taken back while it was read; where this recurs,"
                    " loads take longer than loans last"
                )
            for task, _ in arrived:
                task.arrived = True
        except Exception as error:  # noqa: BLE001 - the thread must go on
            return self._load_failed(first, first.shards[0], Failure.ERROR, error)
        finally:
            with self._lock:
                piece.scattering -= 1
        if not piece.early:
            self._counters.observe("scatter", time.perf_counter() - begin)
            nbytes = sum(self._shelf.size(item.chunk, shard) for shard in payloads)
            self._context.count("loaded_bytes", nbytes)
        return None

    def _load_failed(
        self, task: ReadTask, shard: int, failure: Failure, error: Exception
    ) -> Failure:
        if task.late or failure is Failure.UNAVAILABLE:
            # It was counted when it was given up, or the storage was not called.
            return failure
        name = object_name(task.chunk, shard, self._fmt.shards, self._fmt.kind)
        self._counters.add(f"load_failures_{failure.value}")
        early = all(share.piece.early for share in [task, *task.sharers])
        self._log.warning(
            "object %s was not %s: %s",
            name,
            "prefetched" if early else "loaded, its tokens are computed instead",
            error,
            about=("early" if early else "load", name),
        )
        return failure

    def _end_task(self, task: ReadTask, failure: Failure | None) -> None:
        piece = task.piece
        with self._lock:
            if piece.finished:
                return
            if failure is None:
                if task.arrived:
                    piece.arrive(task.item, len(task.shards), len(self._shards))
            elif not task.late:
                self._fail(piece, task.item, failure)
                return
            # Also for a late task, which was given up: its load may have waited for its scatter.
            self._settle(piece)

    # ------------------------------------------------------------- failures

    def _give_up(self, piece: Piece, item: int) -> None:
        """Fail a load from an item on that missed its deadline. Holds the lock."""
        self._counters.add("load_failures_timeout")
        chunk = piece.items[item].chunk
        self._fail(piece, item, Failure.ERROR)
        if not piece.early:
            self._log.warning(
                "%s did not deliver chunk %d of a request in time, its tokens are computed instead",
                self._shelf.backend.url,
                chunk.index,
                about="late",
            )

    def _give_up_thread(self, thread: int) -> None:
        """Give up the objects that a stuck thread reads."""
        with self._lock:
            stuck = self._reads.end(thread)
            if stuck is None:
                return
            for _, objects in self._reads.take_left(stuck):
                # Objects that were left to it are useless without its own.
                objects.release()
            for task in (stuck, *stuck.sharers):
                task.late = True
                if task.wanted:
                    self._give_up(task.piece, task.item)

    def _give_up_all(self) -> None:
        """Give up all loads: the circuit breaker is open, and no tier is in front of the shelf."""
        if self._shelf.available and self._threads.any:
            # Objects that no tier has fail at once.
            return
        with self._lock:
            for piece in self._lacking():
                self._refuse(piece)

    def _refuse(self, piece: Piece) -> None:
        """Fail the rest of a load without a call to the storage. Holds the lock."""
        if not piece.early:
            self._counters.add("load_failures_unavailable")
        self._fail(piece, piece.leading, Failure.UNAVAILABLE)

    def _lacking(self) -> list[Piece]:
        return [piece for piece in self._active if piece.lacks]

    def _fail(self, piece: Piece, item: int, failure: Failure) -> None:
        """Note that an item will not arrive. Holds the lock."""
        piece.fail(item, failure)
        self._settle(piece)

    def _settle(self, piece: Piece) -> None:
        """Complete a load if no further object of it is wanted. Holds the lock."""
        # Chunks after a failed one are useless to this request.
        self._reads.update(piece)
        if piece.at_once:
            # Threads wait for its next chunks, or for its end.
            self._work.notify_all()
        if piece.leading >= piece.wanted and not piece.scattering:
            self._complete(piece)

    def _complete(self, piece: Piece) -> None:
        piece.finished = True
        if piece.wanted and not piece.early:
            self._context.count("loaded_chunks", piece.wanted)
        del self._active[piece]
        self._context.notify(piece.on_done, piece)

    def close(self) -> None:
        """Fail the loads that are not finished, and end the threads."""
        self._closing = True
        self._threads.close()
        with self._lock:
            for piece in self._lacking():
                self._fail(piece, piece.leading, Failure.ERROR)
            self._work.notify_all()
