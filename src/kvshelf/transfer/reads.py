"""What the threads of loads read, in which order, and for which loads.

Owns the objects of loads that no thread has taken yet, and the task of each thread.

Order: the objects of a load are read from its beginning, as many at once as there are threads, and
scattered as they arrive. Where the storage reads many objects in one call, a thread takes all of a
chunk at once, and fewer towards the end of the load, so that the threads end together. Threads
alternate between the oldest load (so that every load finishes) and the load with the fewest objects
left (so that short loads do not queue behind long ones). Loads of equal size are thus served in
order of arrival. *Early* loads, for requests that do not wait for them yet, get the threads that no
other load needs, but never all of them. An object that several loads need at the same time is read
once, for all of them. A load may bound how many chunks behind those that have arrived are read at
once: from a slow storage, many at once arrive together, and late. So would they if others were read
beside them: while the oldest load has such a bound, only its objects are read.

Where the caches prefer whole chunks (:attr:`~kvshelf.kv.caches.KVMemory.whole_chunks`), a thread
leaves its objects to a thread that still reads others of the same chunk; the last of them scatters
all. So the objects left over have a thread that needs no further staging for them, and no thread
waits. A thread scatters what was left to it before it takes staging.

Contracts
---------
* :class:`Reads` has no lock: its methods are called with that of the loads held. Only
  ``ReadTask.reading`` is set without it: a thread that sees it too late scatters by itself.
* Each object of a load is taken at most once: in a task, or in a share of another load's task.
* What a thread leaves to another one is released by that one, or by the thread that gives it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from kvshelf.format.keys import Chunk
from kvshelf.shelf.view import Fetched, Pinned
from kvshelf.transfer.context import TransferContext
from kvshelf.transfer.load import Piece
from kvshelf.transfer.staging import StagingBuffer


class Objects:
    """The bytes of verified objects of one chunk that a thread has.

    Attributes
    ----------
    payloads : dict
        The payload of each shard, uint8 [bytes].
    """

    __slots__ = ("_context", "_fetched", "payloads")

    def __init__(self, context: TransferContext) -> None:
        self.payloads: dict[int, torch.Tensor] = {}
        self._context = context
        self._fetched: Sequence[Pinned] = ()

    def take(self, chunk: Chunk, fetched: Fetched) -> None:
        """Take over objects, once."""
        self._fetched = tuple(fetched.values())
        for shard, one in fetched.items():
            self.payloads[shard] = self._context.payload(one, chunk, shard)

    def valid(self) -> bool:
        """Whether the bytes were the objects' until now."""
        return all(one.valid() for one in self._fetched)

    def release(self) -> None:
        """Give them back, once."""
        fetched, self._fetched = self._fetched, ()
        self.payloads.clear()
        if staged := [one for one in fetched if isinstance(one, StagingBuffer)]:
            self._context.staging.release(*staged)
        for one in fetched:
            if not isinstance(one, StagingBuffer):
                one.release()


@dataclass(eq=False, slots=True)
class ReadTask:
    """Objects of one chunk that a thread reads for one load."""

    piece: Piece
    item: int
    shards: Sequence[int]
    arrived: bool = False
    #: It was given up, since its thread is stuck.
    late: bool = False
    #: Its thread is pinning the objects, or has staging buffers and is reading into them.
    reading: bool = False
    #: The same objects, or some of them, for other loads.
    sharers: list[ReadTask] = field(default_factory=list)
    #: Others of the chunk that were read, and left to its thread.
    left: list[Arrived] = field(default_factory=list)

    @property
    def chunk(self) -> Chunk:
        """The chunk that the objects belong to."""
        return self.piece.items[self.item].chunk

    @property
    def wanted(self) -> bool:
        """Whether the load still needs the objects."""
        return not self.piece.finished and self.item < self.piece.wanted


#: Objects that were read, and for what.
Arrived: TypeAlias = tuple[ReadTask, Objects]


class _Untaken:
    """The objects of a load that no thread has taken: a flag for each, over items and shards."""

    __slots__ = ("first", "piece", "taken")

    def __init__(self, piece: Piece, shards: int) -> None:
        self.piece = piece
        self.taken = bytearray(len(piece.items) * shards)
        self.first = 0

    def is_ready(self, shards: int) -> bool:
        """Whether the next objects may be read now."""
        piece = self.piece
        return not piece.at_once or self.first < (piece.leading + piece.at_once) * shards


class Reads:
    """The objects that the loads of one kind want.

    Parameters
    ----------
    shards : Sequence of int
        Those of each chunk that are read.
    threads : int
        Threads that read.
    """

    def __init__(self, shards: Sequence[int], threads: int) -> None:
        self._shards = shards
        self._places = {shard: place for place, shard in enumerate(shards)}
        self._threads = threads
        self._max_early = max(1, threads - max(1, threads // 4))
        #: Loads with objects that no thread has taken, the oldest first.
        self._queue: dict[Piece, _Untaken] = {}
        self._early_queue: dict[Piece, _Untaken] = {}
        self._oldest_next = True
        #: The task of each thread.
        self._tasks: dict[int, ReadTask] = {}
        #: Tasks whose objects are being read, so that other loads may share them.
        self._shared: set[ReadTask] = set()

    def add(self, piece: Piece) -> None:
        """Queue the objects of a load."""
        queue = self._early_queue if piece.early else self._queue
        queue[piece] = untaken = _Untaken(piece, len(self._shards))
        for task in self._shared:
            self._share(task, untaken)

    def drop(self, piece: Piece) -> None:
        """Take a load off its queue once all its useful objects are taken."""
        queue = self._early_queue if piece.early else self._queue
        untaken = queue.get(piece)
        if untaken is not None and untaken.first >= piece.wanted * len(self._shards):
            del queue[piece]

    # ------------------------------------------------------------- order

    def take(self, thread: int, most: int) -> ReadTask | None:
        """Hand up to `most` objects to a thread, for all loads that want them; None: none left."""
        untaken = self._choose()
        if untaken is None:
            return None
        piece, first, shards = untaken.piece, untaken.first, len(self._shards)
        item, place = divmod(first, shards)
        # A part of what is left that gets smaller, so that no thread is left with much at the end.
        share = (piece.wanted * shards - first) // (2 * self._threads)
        end = min(place + max(1, min(share, most)), shards)
        taken = untaken.taken.find(1, first, first - place + end)
        if taken >= 0:
            end = place + taken - first
        task = ReadTask(piece, item, self._shards[place:end])
        self._note_taken(untaken, item, task.shards)
        for other in [*self._queue.values(), *self._early_queue.values()]:
            self._share(task, other)
        self._shared.add(task)
        self._tasks[thread] = task
        return task

    def _choose(self) -> _Untaken | None:
        """Return the load whose turn it is, see the module."""
        shards = len(self._shards)
        oldest = next(iter(self._queue.values()), None)
        if oldest is not None and oldest.piece.at_once:
            return oldest if oldest.is_ready(shards) else None
        ready = [one for one in self._queue.values() if one.is_ready(shards)]
        if ready:
            self._oldest_next = not self._oldest_next
            if not self._oldest_next:
                return ready[0]
            return min(ready, key=lambda one: one.piece.wanted * shards - one.first)
        if self._early_queue:
            early = sum(task.piece.early for task in self._tasks.values())
            if early < self._max_early:
                return next(iter(self._early_queue.values()))
        return None

    def _share(self, task: ReadTask, untaken: _Untaken) -> None:
        """Let a load share the objects that `task` reads, if it needs them."""
        item = untaken.piece.places.get(task.chunk.key)
        if item is None:
            return
        first = item * len(self._shards)
        shards = [s for s in task.shards if not untaken.taken[first + self._places[s]]]
        if shards:
            task.sharers.append(ReadTask(untaken.piece, item, shards))
            self._note_taken(untaken, item, shards)

    def _note_taken(self, untaken: _Untaken, item: int, shards: Sequence[int]) -> None:
        """Note that objects of a load are being read."""
        first = item * len(self._shards)
        for shard in shards:
            untaken.taken[first + self._places[shard]] = 1
        left = untaken.taken.find(0, untaken.first)
        untaken.first = len(untaken.taken) if left < 0 else left
        self.drop(untaken.piece)

    # ------------------------------------------------------------- tasks

    def leave(self, thread: int, task: ReadTask, objects: Objects) -> bool:
        """Leave objects to a thread that still reads others of their chunk, if there is one.

        That thread scatters them with its own, and releases them.
        """
        task.reading = False
        if not task.sharers:
            for other in self._tasks.values():
                if other.reading and other.piece is task.piece and other.item == task.item:
                    other.left += [(task, objects), *self.take_left(task)]
                    self.end(thread)
                    return True
        return False

    def take_left(self, task: ReadTask) -> list[Arrived]:
        """Take over what was left to the thread of a task; nothing more is left to it."""
        task.reading = False
        left, task.left = task.left, []
        return left

    def next_sharer(self, thread: int, task: ReadTask) -> ReadTask | None:
        """Return a further load's share in the objects; without one, the task is over."""
        if task.sharers:
            return task.sharers.pop(0)
        self.end(thread)
        return None

    def end(self, thread: int) -> ReadTask | None:
        """Forget and return a thread's task; other loads that need its objects read them again."""
        task = self._tasks.pop(thread, None)
        if task is not None:
            self._shared.discard(task)
        return task

    def share_no_more(self, task: ReadTask) -> None:
        """Stop loads from joining a read that fails."""
        self._shared.discard(task)
