"""What the threads of loads read, in which order, and for which loads.

Owns the objects of loads that no thread has taken yet, and the task of each thread.

Order: the objects of a load are read from its beginning, as many at once as there are threads, and
scattered as they arrive. Where the storage reads many objects in one call, a thread takes all of a
chunk at once, and fewer towards the end of the load, so that the threads end together. Threads
alternate between the oldest load (so that every load finishes) and the load with the fewest objects
left, by powers of two (so that short loads do not queue behind long ones). Loads of equal size are
thus served in order of arrival. *Early* loads, for requests that do not wait for them yet, get the
threads that no other load needs, but never all of them. An object that several loads need at the
same time is read once, for all of them. A load may bound how many chunks behind those that have
arrived are read at once: from a slow storage, many at once arrive together, and late. So would they
if others were read beside them: while the oldest load has such a bound, only its objects are read.

What lies in memory needs no storage. A load whose next chunk lies there comes before all others,
and only so many threads read from the storage at once that one is left for such loads.

Where the caches prefer whole chunks (:attr:`~kvshelf.kv.caches.KVMemory.whole_chunks`), a thread
leaves its objects to a thread that still reads others of the same chunk; the last of them scatters
all. So the objects left over have a thread that needs no further staging for them, and no thread
waits. A thread scatters what was left to it before it takes staging.

Contracts
---------
* :class:`Reads` has no lock: its methods are called with that of the loads held. Only
  ``ReadTask.reading`` is set without it: a thread that sees it too late scatters by itself.
* Each object of a load is taken at most once: in a task, or in a share of another load's task.
* No method takes longer where there are more loads, but for those that want the same objects.
* What a thread leaves to another one is released by that one, or by the thread that gives it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch

from kvshelf.format.keys import Chunk
from kvshelf.shelf.view import Fetched, Pinned
from kvshelf.transfer.context import TransferContext
from kvshelf.transfer.load import Piece
from kvshelf.transfer.staging import StagingBuffer

#: A load has fewer objects than two to the power of one less.
_LANES: Final = 33


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
    #: They lay in memory when it was made.
    near: bool = False
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

    __slots__ = ("first", "lane", "piece", "taken")

    def __init__(self, piece: Piece, shards: int) -> None:
        self.piece = piece
        self.taken = bytearray(len(piece.items) * shards)
        self.first = 0
        #: The lane that it is in; None where nothing of it may be read now.
        self.lane: _Lane | None = None


#: Loads, in the order in which they are served.
_Lane: TypeAlias = dict[_Untaken, None]


class Reads:
    """The objects that the loads of one kind want.

    Parameters
    ----------
    shards : Sequence of int
        Those of each chunk that are read.
    threads : int
        Those that read from the storage at once.
    in_memory : Callable, optional
        See :attr:`~kvshelf.shelf.view.ShelfView.in_memory`. With it there is one thread more.
    """

    def __init__(
        self,
        shards: Sequence[int],
        threads: int,
        in_memory: Callable[[Chunk, Sequence[int]], bool] | None = None,
    ) -> None:
        self._shards = shards
        self._places = {shard: place for place, shard in enumerate(shards)}
        self._threads = threads
        self._in_memory = in_memory
        self._max_early = max(1, threads - max(1, threads // 4))
        #: Loads with objects that no thread has taken.
        self._loads: dict[Piece, _Untaken] = {}
        #: Those among them that are not early, the oldest first, and again in lanes: in the first
        #: one if their next chunk lies in memory, else by the bit length of what is left.
        self._queue: _Lane = {}
        self._lanes: list[_Lane] = [{} for _ in range(_LANES)]
        self._early: _Lane = {}
        #: The loads with untaken objects of each chunk, by its key, and its place in each.
        self._wanted: dict[bytes, dict[_Untaken, int]] = {}
        self._oldest_next = True
        #: The task of each thread.
        self._tasks: dict[int, ReadTask] = {}
        #: Tasks whose objects are being read, so that other loads may share them.
        self._shared: set[ReadTask] = set()

    def add(self, piece: Piece) -> None:
        """Queue the objects of a load."""
        self._loads[piece] = untaken = _Untaken(piece, len(self._shards))
        if not piece.early:
            self._queue[untaken] = None
        for place, item in enumerate(piece.items):
            self._wanted.setdefault(item.chunk.key, {})[untaken] = place
        self._move(untaken)
        for task in self._shared:
            self._share(task, untaken)

    def update(self, piece: Piece) -> None:
        """Note that more of a load has arrived, or that less of it is useful."""
        untaken = self._loads.get(piece)
        if untaken is not None:
            self._move(untaken)

    def _move(self, untaken: _Untaken) -> None:
        """Put a load into its lane, or off the queue once all its useful objects are taken."""
        piece, shards = untaken.piece, len(self._shards)
        item, place = divmod(untaken.first, shards)
        left = piece.wanted * shards - untaken.first
        lane: _Lane | None = None
        if left <= 0:
            del self._loads[piece]
            self._queue.pop(untaken, None)
            for useless in range(item, len(piece.items)):
                self._forget(untaken, useless)
        elif piece.early:
            lane = self._early
        elif self._in_memory and self._in_memory(piece.items[item].chunk, self._shards[place:]):
            lane = self._lanes[0]
        elif not piece.at_once or item < piece.leading + piece.at_once:
            lane = self._lanes[left.bit_length()]
        if lane is not untaken.lane:
            if untaken.lane is not None:
                del untaken.lane[untaken]
            if lane is not None:
                lane[untaken] = None
            untaken.lane = lane

    def _forget(self, untaken: _Untaken, item: int) -> None:
        """Note that a load wants no further objects of an item."""
        key = untaken.piece.items[item].chunk.key
        wanted = self._wanted.get(key, {})
        wanted.pop(untaken, None)
        if not wanted:
            self._wanted.pop(key, None)

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
        near = untaken.lane is self._lanes[0]
        task = ReadTask(piece, item, self._shards[place:end], near)
        self._note_taken(untaken, item, task.shards)
        for other in list(self._wanted.get(task.chunk.key, ())):
            self._share(task, other)
        self._shared.add(task)
        self._tasks[thread] = task
        return task

    def _choose(self) -> _Untaken | None:
        """Return the load whose turn it is, see the module."""
        if self._lanes[0]:
            return next(iter(self._lanes[0]))
        reading = sum(not task.near for task in self._tasks.values())
        if self._in_memory and reading >= self._threads:
            return None
        if self._queue:
            oldest = next(iter(self._queue))
            if oldest.piece.at_once:
                return oldest if oldest.lane is not None else None
            self._oldest_next = not self._oldest_next
            if not self._oldest_next:
                return oldest
            return next(untaken for lane in self._lanes for untaken in lane)
        if sum(task.piece.early for task in self._tasks.values()) < self._max_early:
            return next(iter(self._early), None)
        return None

    def _share(self, task: ReadTask, untaken: _Untaken) -> None:
        """Let a load share the objects that `task` reads, if it needs them."""
        item = self._wanted.get(task.chunk.key, {}).get(untaken)
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
        if untaken.taken.find(0, first, first + len(self._shards)) < 0:
            self._forget(untaken, item)
        left = untaken.taken.find(0, untaken.first)
        untaken.first = len(untaken.taken) if left < 0 else left
        self._move(untaken)

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
