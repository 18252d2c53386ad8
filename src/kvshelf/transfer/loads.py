"""The loads of one kind of KV: chunks on their way from a shelf to a paged cache.

Owns the threads that read, the loads in progress, and who reads what for which of them: what is
called a load here is the :class:`~kvshelf.transfer.load.LoadPiece` of this kind.

A load thread takes the next objects of a chunk that is begun. Else it begins the next chunk that a
load wants: it looks for the chunk in memory, or takes a slot (:mod:`kvshelf.memory.ring`). The
thread that reads the last object of a chunk seals the slot, scatters the chunk once for each load
that wants it, and gives the slot back. All loads that want a chunk share one :class:`Reading` of
it, and fail together if its thread hangs. An object that lies in memory of another owner
(:meth:`~kvshelf.shelf.view.ShelfView.pin_all`) is scattered from there. When all chunks of a load
have arrived or were given up, the load is ``finished`` and says at which chunk it failed.

Order: threads alternate between the oldest load (so that every load finishes) and the load with the
fewest chunks left, by powers of two (so that short loads do not queue behind long ones). A load
whose next chunk is in memory comes before all others, and one thread reads nothing from the
storage, so that no slow read holds it up. *Early* loads, which read ahead for requests that do not
wait for them yet, get the threads that no other load needs, but never all of them. A load may bound
how many chunks behind those that have arrived are read at once, since a slow storage delivers many
chunks together, and late. While the oldest load has such a bound, only its chunks are begun.

Deadlines: what a thread reads at once has the deadline of its backend
(:mod:`kvshelf.backends.guard`). A load's deadline is that of reading 2 × (the bytes of the loads
before it + its own), since later loads may take half of the bandwidth. An early load has none.
While the circuit breaker of reads is open, loads fail at once, except for what lies in a tier or
in memory.

Contracts
---------
* :meth:`Loads.load`, :meth:`Loads.cancel`, :meth:`Loads.check` and :meth:`Loads.release` are called
  on the step thread and never call the storage. Any other thread may call them too.
* The threads are daemon threads. A stuck thread is replaced (:mod:`kvshelf.shelf.threads`); the
  slot that it reads into stays with it.
* Of a paged cache only the slots given are written, between :meth:`Loads.load` and the moment
  at which the load is reported finished, however it ends: loaded, failed, cancelled or late.
* Nothing unverified is ever scattered or sealed. Memory of another owner is given back after the
  last scatter from it.
* A thread takes a slot only while it holds none: at most as many chunks are begun as there are
  threads, so each of them finds a spare slot.
* A slot is given back exactly once, when no thread reads into it and no copy from it runs. The last
  load that wants the chunk is reported finished after that.
* One lock, held for queue operations and during completion callbacks.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from kvshelf.background import trace_range
from kvshelf.errors import (
    BadObjectError,
    DeviceUnavailableError,
    ObjectMissingError,
    UnavailableStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.names import object_name
from kvshelf.kv.caches import KVMemory
from kvshelf.memory.arena import bytes_at
from kvshelf.memory.ring import Share, Slot
from kvshelf.shelf.view import FailedRead, Pinned, ShelfView
from kvshelf.transfer.context import TransferContext, TransferHalf
from kvshelf.transfer.load import Failure, LoadPiece

#: Chunks whose objects the owner of other memory is asked for at a time.
_AHEAD: Final = 16
#: Chunks of fewer bytes are read sooner by one thread than by two.
_SHARED_BYTES: Final = 1 << 20
#: The load with the fewest chunks left is looked for among so many of the oldest loads.
_COMPARED: Final = 64


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, ObjectMissingError):
        return Failure.MISSING
    if isinstance(error, BadObjectError):
        return Failure.BAD
    if isinstance(error, UnavailableStorageError | DeviceUnavailableError):
        return Failure.UNAVAILABLE
    return Failure.ERROR


def _release(lent: Mapping[int, Pinned]) -> None:
    """Give objects back to the owner of their memory."""
    for pinned in lent.values():
        pinned.release()


class _NoRoomError(Exception):
    """No slot was free for a chunk."""


@dataclass(eq=False, slots=True)
class Reading:
    """A chunk on its way through memory, for all loads that want it.

    Attributes
    ----------
    view : ShelfView
        Its objects.
    name : Hashable
        Its name in memory.
    wants : list of (LoadPiece, int)
        The loads that it is for, and the item of each.
    share : Share
        By which the slot is pinned.
    slot : Slot or None
        None until an object needs it.
    is_near : bool
        It was in memory when it was begun.
    unread : list of int
        Shards that no thread has taken.
    unfinished : int
        Number of shards that are not read yet.
    lent : dict of int to Pinned
        Objects that lie in memory of another owner.
    is_over : bool
        It failed, no load wants it, or a thread of it is stuck: nothing more comes of it, and it
        ends with the last thread that reads into its slot.
    """

    view: ShelfView
    chunk: Chunk
    name: Hashable
    wants: list[tuple[LoadPiece, int]]
    share: Share
    slot: Slot | None
    is_near: bool
    unread: list[int] = field(default_factory=list)
    unfinished: int = 0
    lent: dict[int, Pinned] = field(default_factory=dict)
    is_over: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether any load still needs it."""
        return any(piece.wants(item) for piece, item in self.wants)

    @property
    def is_early(self) -> bool:
        """Whether no request waits for it."""
        return all(piece.early for piece, _ in self.wants)


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
        # One more than those that may read from the storage: it takes what lies in memory.
        super().__init__(context, "load", context.shares.threads)
        self._shards = context.plan.shards
        self.chunk_bytes = context.places.chunk_bytes
        self._ring = context.memory.ring
        self._storage_threads = context.load_threads
        self._early_threads = max(1, self._storage_threads - max(1, self._storage_threads // 4))
        self._chunks_at_once = max(1, context.load_threads // len(self._shards))
        #: Those that are not finished, the oldest first.
        self._active: dict[LoadPiece, None] = {}
        #: Those of them with chunks that no thread has begun, early ones apart; and which of these
        #: have their next chunk in memory.
        self._queue: dict[LoadPiece, None] = {}
        self._near: dict[LoadPiece, None] = {}
        self._early: dict[LoadPiece, None] = {}
        self._oldest_next = True
        #: The loads that want a chunk which no thread has begun for them, and the item of each, by
        #: its name.
        self._wanted: dict[object, dict[LoadPiece, int]] = {}
        #: The chunks that are being read, by name; those with objects that no thread has taken; and
        #: that of each thread.
        self._reading: dict[object, Reading] = {}
        self._begun: deque[Reading] = deque()
        self._reading_of: dict[int, Reading] = {}

    # ------------------------------------------------------------- step thread

    def load(self, piece: LoadPiece, bytes_ahead: int = 0) -> None:
        """Start to load chunks into the paged cache. Step thread; returns at once.

        Parameters
        ----------
        piece : LoadPiece
            A new one. A caller that waits for its end calls :meth:`check` now and then.
        bytes_ahead : int
            Bytes of loads of other kinds, which share the storage with this one.
        """
        items, early = piece.items, piece.early
        piece.names = [self._places.name(item.chunk) for item in items]
        piece.nbytes = len(items) * self.chunk_bytes
        piece.threads = self._chunks_at_once
        usable = True
        cache = self._context.cache
        waits = cache is not None and not early and any(item.memory is None for item in items)
        if cache is not None and waits and piece.fence is None:
            try:
                piece.fence = cache.fence()
            except DeviceUnavailableError:
                usable = False
        with self._lock:
            if not early:
                nbytes = bytes_ahead + self.loading_bytes + piece.nbytes
                seconds = self._backend.deadlines.to_read(2 * nbytes)
                piece.deadline = time.monotonic() + seconds
            self._active[piece] = None
            if not items:
                self._complete(piece)
            elif not usable or self._closing or not self._threads.ready():
                self._refuse(piece)
            else:
                self._enqueue(piece)
                if not self._may_come(piece):
                    self._refuse(piece)

    def _enqueue(self, piece: LoadPiece) -> None:
        """Queue the chunks of a load; those that are being read are shared. Holds the lock."""
        for item, name in enumerate(piece.names):
            reading = self._reading.get(name)
            if reading is None:
                self._wanted.setdefault(name, {})[piece] = item
            else:
                piece.begin(item)
                reading.wants.append((piece, item))
        (self._early if piece.early else self._queue)[piece] = None
        self._update(piece)
        self._work.notify(len(piece.items))

    def cancel(self, piece: LoadPiece, *, count: bool = True) -> None:
        """Give a load up.

        It is still reported finished, once no thread writes to the cache for it. Objects that
        no thread has begun to read are not read any more. With `count` it counts as one whose
        request was aborted, unless it is an early one.
        """
        with self._lock:
            if not piece.finished:
                piece.cancel()
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

    def release(self, piece: LoadPiece, first: int = 0) -> None:
        """Give an early load up, and what it pins of its items from `first` on."""
        with self._lock:
            if not piece.finished:
                piece.cancel()
                self._settle(piece)
            slots = {item: piece.kept.pop(item) for item in list(piece.kept) if item >= first}
        fresh = [slot for item, slot in slots.items() if item in piece.fresh]
        unused = sum(slot.objects for slot in fresh if not slot.was_loaded)
        if unused:
            self._counters.add("prefetched_unused_objects", unused)
        self._ring.release(self._context.shares.ahead, slots.values())

    @property
    def loading_bytes(self) -> int:
        """Bytes of the loads that are not finished, early ones apart."""
        return sum(piece.nbytes for piece in list(self._active) if not piece.early)

    # ------------------------------------------------------------- the queue, with the lock

    def _update(self, piece: LoadPiece) -> None:
        """Note that less of a load is wanted, or that its next chunk is another one."""
        if piece.next_item >= piece.wanted:
            (self._early if piece.early else self._queue).pop(piece, None)
            self._near.pop(piece, None)
            for name in piece.names[piece.next_item :]:
                pieces = self._wanted.get(name, {})
                if pieces.pop(piece, None) is not None and not pieces:
                    del self._wanted[name]
        elif piece in self._queue:
            if self._ring.holds([piece.names[piece.next_item]])[0]:
                self._near[piece] = None
            else:
                self._near.pop(piece, None)

    def _take(self) -> tuple[Reading, list[int]] | None:
        """Return what a thread does next: a chunk, and the shards of it to read; None: nothing."""
        while self._near:
            near = next(iter(self._near))
            slot = self._ring.find(near.names[near.next_item], self._memory.loads)
            if slot is not None:
                return self._begin(near, slot)
            # It was evicted meanwhile.
            del self._near[near]
        if (
            sum(not reading.is_near for reading in self._reading_of.values())
            >= self._storage_threads
        ):
            return None
        early: Reading | None = None
        for reading in list(self._begun):
            if not reading.is_wanted:
                self._end(reading)
            elif not reading.is_early or (reading.slot is not None and reading.slot.is_spare):
                return reading, self._take_shards(reading)
            else:
                early = early or reading
        if self._queue:
            piece = self._choose()
            return None if piece is None else self._begin(piece)
        if sum(reading.is_early for reading in self._reading_of.values()) >= self._early_threads:
            return None
        if early is not None:
            return early, self._take_shards(early)
        return self._begin(next(iter(self._early))) if self._early else None

    def _choose(self) -> LoadPiece | None:
        """Return the load whose turn it is, see the module; None if that may read no more now."""
        oldest = next(iter(self._queue))
        if oldest.at_once:
            return oldest if oldest.may_begin else None
        self._oldest_next = not self._oldest_next
        if not self._oldest_next:
            return oldest
        compared = [piece for piece in islice(self._queue, _COMPARED) if piece.may_begin]
        return min(compared, key=lambda piece: (piece.wanted - piece.next_item).bit_length())

    def _begin(self, piece: LoadPiece, slot: Slot | None = None) -> tuple[Reading, list[int]]:
        """Begin the next chunk of a load, in memory if a slot has it, for all who want it."""
        name = piece.names[piece.next_item]
        slot = slot or self._ring.find(name, self._memory.loads)
        # A chunk that a load wants twice is wanted under one of both items.
        wants = list({**self._wanted.pop(name, {}), piece: piece.next_item}.items())
        chunk, share = piece.items[piece.next_item].chunk, self._memory.loads
        reading = Reading(piece.view, chunk, name, wants, share, slot, slot is not None)
        if slot is None:
            self._reading[name] = reading
            reading.unread = list(self._shards)
            reading.unfinished = len(self._shards)
            self._begun.append(reading)
        for sharer, item in wants:
            sharer.begin(item)
            self._update(sharer)
        return reading, self._take_shards(reading)

    def _take_shards(self, reading: Reading) -> list[int]:
        """Take shards of a chunk to read: all where the storage reads many in one call."""
        count = 1
        if not reading.is_near and self._backend.reads_whole:
            count = len(reading.unread)
            if not (self._queue or self._early) and self.chunk_bytes >= _SHARED_BYTES:
                # Nothing is left for the other threads: they read the rest of this one.
                count = -(-count // 2)
        shards, reading.unread = reading.unread[:count], reading.unread[count:]
        if reading.unread:
            self._work.notify(len(reading.unread))
        elif not reading.is_near:
            self._begun.remove(reading)
        return shards

    def _take_wants(self, reading: Reading) -> list[tuple[LoadPiece, int]]:
        """Let no further load share a chunk; return the loads that it is for."""
        if self._reading.get(reading.name) is reading:
            del self._reading[reading.name]
        wants, reading.wants = reading.wants, []
        return wants

    def _end(self, reading: Reading) -> list[tuple[LoadPiece, int]]:
        """Let nothing more come of a chunk that is being read; return the loads that it was for."""
        wants = self._take_wants(reading)
        if not reading.is_over:
            reading.is_over = True
            if reading.unread:
                self._begun.remove(reading)
                reading.unfinished -= len(reading.unread)
                reading.unread = []
            if reading.slot is not None:
                # The next one reads it into another slot.
                self._ring.abandon(reading.slot)
            if not reading.unfinished:
                self._give_back(reading)
        return wants

    def _give_back(self, reading: Reading) -> None:
        """Give back what a chunk has of memory: no thread uses it any more."""
        slot, reading.slot = reading.slot, None
        if slot is not None:
            self._ring.release(reading.share, [slot])
        while reading.lent:
            reading.lent.popitem()[1].release()

    # ------------------------------------------------------------- load threads

    def _run(self) -> None:
        thread = threading.get_ident()
        while not self._threads.replaced():
            with self._lock:
                while (task := self._take()) is None and not self._closing:
                    self._work.wait()
                if task is None:
                    return
                reading, shards = task
                self._reading_of[thread] = reading
            with trace_range("kvshelf load"):
                failed = self._read(reading, shards) if shards else None
            if self._note_read(thread, reading, len(shards), failed):
                self._deliver(reading)

    def _read(self, reading: Reading, shards: list[int]) -> FailedRead | None:
        """Read objects of a chunk into its slot, and verify them; return what failed."""
        chunk = reading.chunk
        shard = shards[0]
        try:
            view = reading.view
            if view.pins:
                self._borrow(reading, shards)
                shards = [shard for shard in shards if shard not in reading.lent]
                if not shards:
                    return None
                shard = shards[0]
            slot = self._slot_for(reading)
            if slot is None:
                return None
            buffers = [self._places.view(slot, chunk, shard) for shard in shards]
            hold = functools.partial(self._places.hold, slot, self._context.shares)
            return view.load_all(chunk, shards, buffers, hold)
        except Exception as error:  # noqa: BLE001 - the thread must go on
            return FailedRead(shard, error)

    def _borrow(self, reading: Reading, shards: Sequence[int]) -> None:
        """Have objects of a chunk lent, and those of the next chunks that its load wants.

        A message for each chunk would take as long as the copy of a small one.
        """
        ahead: range | None = None
        with self._lock:
            piece, item = reading.wants[0] if reading.wants else (None, 0)
            if piece is not None:
                reading.lent.update(piece.lent.pop(item, {}))
                is_whole = len(shards) == len(self._shards)
                if is_whole and not (piece.early or piece.at_once):
                    ahead = range(max(item + 1, piece.asked), min(item + _AHEAD, piece.wanted))
        shards = [shard for shard in shards if shard not in reading.lent]
        if not shards:
            return
        chunks = [reading.chunk]
        if piece is not None and ahead:
            piece.asked = ahead.stop
            chunks += [piece.items[next_item].chunk for next_item in ahead]
        lent, *lent_ahead = reading.view.pin_all(chunks, shards, is_early=reading.is_early)
        unused: list[Mapping[int, Pinned]] = []
        with self._lock:
            reading.lent.update(lent)
            for next_item, pinned in zip(ahead or (), lent_ahead, strict=True):
                if piece is not None and piece.wants(next_item) and next_item >= piece.next_item:
                    piece.lent[next_item] = pinned
                else:
                    # Another thread has begun it meanwhile.
                    unused.append(pinned)
        for pinned in unused:
            _release(pinned)

    def _slot_for(self, reading: Reading) -> Slot | None:
        """Return the slot of a chunk, taken for its first object; None if the chunk is over."""
        lacking: list[tuple[LoadPiece, int]] = []
        with self._lock:
            if reading.slot is None and not reading.is_over:
                if reading.is_early:
                    reading.share = self._context.shares.ahead
                slot = self._places.claim(reading.chunk, reading.share)
                if slot is not None and slot.is_sealed:
                    # It has come into memory meanwhile. A sealed slot is never read into.
                    self._ring.release(reading.share, [slot])
                    slot = self._places.claim(reading.chunk, reading.share, is_named=False)
                reading.slot = slot
                if slot is None:
                    # Before the lock is free: a load that comes later may claim more memory than an
                    # early one.
                    lacking = self._end(reading)
            slot = reading.slot
        if lacking:
            failed = FailedRead(self._shards[0], _NoRoomError("there is no memory for it"))
            self._fail_all(reading.chunk, lacking, failed)
        return slot

    def _note_read(
        self, thread: int, reading: Reading, count: int, failed: FailedRead | None
    ) -> bool:
        """Note that objects of a chunk were read; return whether the thread delivers the chunk."""
        with self._lock:
            self._reading_of.pop(thread, None)
            reading.unfinished -= count
            if reading.is_over:
                if not reading.unfinished:
                    self._give_back(reading)
                return False
            if failed is None:
                return not reading.unfinished
            wants = self._end(reading)
        self._fail_all(reading.chunk, wants, failed)
        return False

    def _fail_all(
        self, chunk: Chunk, wants: Sequence[tuple[LoadPiece, int]], failed: FailedRead
    ) -> None:
        """Fail the loads that a chunk was for. Without the lock, since it logs."""
        if wants:
            failure = self._note_failure(chunk, failed, [piece for piece, _ in wants])
            with self._lock:
                for piece, item in wants:
                    if piece.wants(item):
                        self._fail(piece, item, failure)

    def _deliver(self, reading: Reading) -> None:
        """Copy a chunk to where the loads want it, give its memory back, and note that it came."""
        slot = reading.slot
        with self._lock:
            wants = self._take_wants(reading)
        if slot is not None and not reading.lent and not reading.is_near:
            stays = self._memory.keeps or any(piece.early for piece, _ in wants)
            self._ring.seal(slot, stays=stays)
            if stays:
                self._memory.report()
        is_fresh = not reading.is_near
        while wants:
            piece, item = wants.pop(0)
            failure = None
            if piece.early:
                failure = self._keep(reading, piece, item, is_fresh=is_fresh)
                is_fresh = False
            elif piece.wants(item):
                failure = self._scatter(reading, piece, item)
            with self._lock:
                if not wants:
                    self._give_back(reading)
                if piece.finished:
                    continue
                if failure is not None:
                    self._fail(piece, item, failure)
                    continue
                # Also where it is wanted no more: the load may have waited for the copy.
                if item < piece.wanted:
                    piece.arrive(item)
                self._settle(piece)

    def _keep(
        self, reading: Reading, piece: LoadPiece, item: int, *, is_fresh: bool
    ) -> Failure | None:
        """Keep a chunk in memory for an early load; `is_fresh` if it was read for this one."""
        slot = reading.slot
        if piece.keeps:
            with self._lock:
                if not piece.wants(item):
                    return None
                if slot is None or not self._ring.pin(slot, self._context.shares.ahead, stays=True):
                    return Failure.UNAVAILABLE
                piece.kept[item] = slot
                if is_fresh:
                    piece.fresh.add(item)
        if is_fresh and slot is not None:
            self._counters.add("prefetched_objects", slot.objects)
            self._counters.add("prefetched_bytes", self._bytes_of(reading.chunk))
        return None

    def _scatter(self, reading: Reading, piece: LoadPiece, item: int) -> Failure | None:
        """Copy a chunk into the paged cache for one load; return why that failed."""
        with self._lock:
            if not piece.wants(item):
                return None
            # From here on the load waits for the copy to end.
            piece.scattering += 1
        slots, chunk = piece.items[item], reading.chunk
        begin = time.perf_counter()
        try:
            memory = self._context.kv_memory(slots)
            fence = piece.fence if slots.memory is None else slots.fence
            payloads = [
                self._places.payload(reading.slot, chunk, shard)
                if shard not in reading.lent and reading.slot is not None
                else bytes_at(reading.lent[shard].view)[self._fmt.data_offset :]
                for shard in self._shards
            ]
            memory.scatter_chunk(self._shards, slots.slots, payloads, fence)
        except Exception as error:  # noqa: BLE001 - the thread must go on
            failed = FailedRead(self._shards[0], error)
            return self._note_failure(chunk, failed, [piece], Failure.ERROR)
        finally:
            with self._lock:
                piece.scattering -= 1
        self._counters.observe("scatter", time.perf_counter() - begin)
        self._context.count("loaded_bytes", self._bytes_of(chunk))
        if reading.slot is not None:
            reading.slot.was_loaded = True
            if reading.is_near:
                self._counters.add("memory_tier_loaded_objects", reading.slot.objects)
                self._counters.add("memory_tier_loaded_bytes", self._bytes_of(chunk))
        return None

    def _bytes_of(self, chunk: Chunk) -> int:
        if not chunk.tail:
            return self.chunk_bytes
        return sum(self._fmt.object_size(shard, chunk.tokens) for shard in self._shards)

    def _note_failure(
        self,
        chunk: Chunk,
        failed: FailedRead,
        pieces: Sequence[LoadPiece],
        failure: Failure | None = None,
    ) -> Failure:
        """Count and log that a chunk could not be had for loads; return why."""
        early = all(piece.early for piece in pieces)
        if failure is None:
            failure = _failure_of(failed.error)
        if early and isinstance(failed.error, _NoRoomError):
            failure = Failure.UNAVAILABLE
        if failure is Failure.UNAVAILABLE:
            # The storage was not called.
            return failure
        name = object_name(chunk, failed.shard, self._fmt.shards, self._fmt.kind)
        self._counters.add(f"load_failures_{failure.value}")
        self._log.warning(
            "object %s was not %s: %s",
            name,
            "prefetched" if early else "loaded, its tokens are computed instead",
            failed.error,
            about=("early" if early else "load", name),
        )
        return failure

    # ------------------------------------------------------------- failures

    def _give_up(self, piece: LoadPiece, item: int) -> None:
        """Fail a load from an item on that missed its deadline. Holds the lock."""
        self._counters.add("load_failures_timeout")
        chunk = piece.items[item].chunk
        self._fail(piece, item, Failure.ERROR)
        if not piece.early:
            self._log.warning(
                "%s did not deliver chunk %d of a request in time, its tokens are computed instead",
                self._backend.url,
                chunk.index,
                about="late",
            )

    def _give_up_thread(self, thread: int) -> None:
        """Give up the chunk that a stuck thread reads."""
        with self._lock:
            reading = self._reading_of.pop(thread, None)
            # Loads that share it fail too: read again, it might hang one thread after another.
            for piece, item in [] if reading is None else self._end(reading):
                if piece.wants(item):
                    self._give_up(piece, item)
            # Where no thread takes the place of the stuck one, another one goes on.
            self._work.notify()

    def _give_up_all(self) -> None:
        """Give up loads: the circuit breaker is open, and no tier is in front of the shelf."""
        with self._lock:
            for piece in self._lacking():
                if not (self._threads.any and self._may_come(piece)):
                    self._refuse(piece)

    def _may_come(self, piece: LoadPiece) -> bool:
        """Whether more of a load may come: from the storage, a tier or memory."""
        return piece.view.available or piece in self._near

    def _refuse(self, piece: LoadPiece) -> None:
        """Fail the rest of a load without a call to the storage. Holds the lock."""
        if not piece.early:
            self._counters.add("load_failures_unavailable")
        self._fail(piece, piece.leading, Failure.UNAVAILABLE)

    def _lacking(self) -> list[LoadPiece]:
        return [piece for piece in self._active if piece.lacks]

    def _fail(self, piece: LoadPiece, item: int, failure: Failure) -> None:
        """Note that an item will not arrive. Holds the lock."""
        piece.fail(item, failure)
        self._settle(piece)

    def _settle(self, piece: LoadPiece) -> None:
        """Complete a load if no further object of it is wanted. Holds the lock."""
        # Chunks after a failed one are useless to this request.
        self._update(piece)
        if piece.at_once:
            # Threads wait for its next chunks, or for its end.
            self._work.notify_all()
        if piece.leading >= piece.wanted and not piece.scattering:
            self._complete(piece)

    def _complete(self, piece: LoadPiece) -> None:
        piece.finished = True
        while piece.lent:
            _release(piece.lent.popitem()[1])
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

    def memory_in_use(self) -> list[KVMemory]:
        """Return the callers' own memory that chunks are being scattered to."""
        with self._lock:
            pieces = [piece for piece in self._active if piece.scattering]
        return [item.memory for piece in pieces for item in piece.items if item.memory is not None]
