"""The host memory of one process for chunks: its bytes, its shares, and how it grows.

Owns the memory in which chunks are read, gathered, kept and read ahead (:class:`ChunkMemory`), and
how the objects of a chunk lie in a slot of it (:class:`ChunkPlaces`).
:mod:`kvshelf.memory.ring` decides who gets which slot.

Contracts
---------
* Loads have a spare slot for each thread (:meth:`ChunkMemory.serve`). Of the rest, stores may hold
  half, and read-ahead and the queue of a disk tier the other half, of which the queue may hold one
  half. Each kind has its part of each.
* Memory for a GPU, and memory that keeps chunks, is there before it is used. The constructor takes
  the first piece. A thread takes the others, and rests between them; :meth:`ChunkMemory.grow`
  starts it, since no memory may be page-locked while vLLM captures graphs. Where the system refuses
  a piece, the memory stays as large as it is, and one warning says so. Other memory is taken when
  it is first written to.
* The memory is given back when it is closed and nobody holds a slot: a thread that never returns
  from the storage keeps all of it.
* Any thread may call all methods; none waits, but for the constructor.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvshelf.background import Background
from kvshelf.errors import ConfigError
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import Arena
from kvshelf.memory.pages import require_free
from kvshelf.memory.ring import Ring, Share, Slot, rounded
from kvshelf.metrics import Counters

if TYPE_CHECKING:
    import torch

__all__ = ["ChunkMemory"]

logger = logging.getLogger(__name__)

#: Bytes that are taken at once.
_PIECE: Final = 1 << 30
#: Chunks of each kind that the memory holds beside the spare slots: one for stores, and one that is
#: read ahead.
_LEAST_CHUNKS: Final = 2


@dataclass(eq=False, slots=True)
class Shares:
    """What stores and loads of one kind may have of a memory.

    Attributes
    ----------
    threads : int
        Threads that load.
    slot_bytes : int
        Bytes of the largest slot.
    weight : float
        Its part of the memory is in proportion to it.
    stores, ahead, copies : Share
        Of stores, of what is read ahead, and of what waits to be copied to a disk tier.
    """

    threads: int
    slot_bytes: int
    weight: float
    stores: Share = field(default_factory=lambda: Share(0))
    ahead: Share = field(default_factory=lambda: Share(0))
    copies: Share = field(default_factory=lambda: Share(0))


class ChunkMemory:
    """Host memory for chunks of any kinds and namespaces.

    Parameters
    ----------
    nbytes : int
    keeps : bool
        Keep what was stored and loaded until it is evicted. So much memory, and a sixteenth more,
        must be free now.
        False: of chunks that nobody holds only those that were read ahead stay.
    first_bytes : int
        Take at least so much at once.
    device : torch.device, optional
        The GPU on which the caches are: the memory is page-locked, if the system allows it.
    share : Callable, optional
        Lets another process read the memory, which it gets then: a node server, from which loads
        read, and to which stores go.
    counters : Counters, optional
        Gets what is here, see :meth:`report`.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.

    Attributes
    ----------
    nbytes : int
    keeps : bool
    is_page_locked : bool
        Whether the memory is page-locked.
    ring : Ring
    loads : Share
        Of all loads.

    Raises
    ------
    ConfigError
        If there is not so much free memory.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        keeps: bool = False,
        first_bytes: int = 0,
        device: torch.device | None = None,
        share: Callable[[Arena], None] | None = None,
        counters: Counters | None = None,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self.nbytes = rounded(nbytes)
        self.keeps = keeps
        self.ring = Ring(self._free)
        self.loads = Share(self.nbytes, may_take_spares=True)
        self._users: dict[Hashable, Shares] = {}
        self._counters = Counters() if counters is None else counters
        self._reported = self.ring.stats()
        self._lock = threading.Lock()
        self._is_growing = False
        self._over = threading.Event()
        self._thread: Background | None = None
        self._piece = max(_PIECE, rounded(first_bytes))
        self._taken = 0
        self._device = device
        self._arena: Arena | None = None
        try:
            if keeps:
                require_free(self.nbytes + self.nbytes // 16)
            is_shared = share is not None
            self._arena = Arena(self.nbytes, lazy=True, shared=is_shared, inherited=device is None)
            self.view, self.tensor = self._arena.view, self._arena.tensor
            self.is_page_locked = device is not None and self._lock_first()
            if not (keeps or self.is_page_locked):
                self._extend(self.nbytes)
            elif not self._taken:
                self._take_piece()
            if share is not None:
                if self._device is None and not keeps:
                    # The first use of shared memory, which has no huge pages, holds up a step.
                    with contextlib.suppress(MemoryError):
                        self._arena.take(0, min(self._piece, self.nbytes))
                share(self._arena)
        except MemoryError as error:
            self._close()
            raise ConfigError(
                f"there is no memory for {self.nbytes} bytes of chunks: {error}. Ask for less"
                " (memory of an engine, memory_bytes of a ChunkCache), or give the machine or the"
                " container more memory"
            ) from error
        if self._taken < self.nbytes:
            self._thread = Background("kvshelf-memory", self._grow, on_start=on_thread_start)
        self.report()

    def __repr__(self) -> str:
        return f"ChunkMemory({self.nbytes} bytes)"

    # ------------------------------------------------------------- growth

    def _lock_first(self) -> bool:
        """Page-lock the first piece; False where that is not possible."""
        import torch

        try:
            if not torch.cuda.is_available():
                raise RuntimeError("there is no CUDA device")
            self._take_piece()
        except (RuntimeError, MemoryError) as error:
            if self.keeps and isinstance(error, MemoryError):
                raise
            logger.warning(
                "could not pin the memory for chunks (%s); copies to and from the GPU will be"
                " slower and will block",
                error,
            )
            self._device = None
            return False
        return True

    def _take_piece(self) -> None:
        """Take the next piece, and give it to the ring."""
        assert self._arena is not None
        stop = min(self._taken + self._piece, self.nbytes)
        self._arena.take(self._taken, stop, self._device)
        self._extend(stop)

    def _extend(self, stop: int) -> None:
        self.ring.extend(stop - self._taken)
        self._taken = stop
        self._divide()

    def _divide(self) -> None:
        """Make the spare slots; stores, and what is read ahead, have half each of the rest."""
        with self._lock:
            counts: Counter[int] = Counter()
            for user in self._users.values():
                counts[user.slot_bytes] += user.threads
            self.ring.ensure_spares(counts)
            half = (self.ring.capacity - self.ring.spare_bytes) // 2
            total = sum(user.weight for user in self._users.values())
            for user in self._users.values():
                user.stores.limit = user.ahead.limit = int(half * user.weight / total)
                user.copies.limit = user.ahead.limit // 2

    def _grow(self) -> float | None:
        """Take the next piece; return for how many seconds to rest. On the thread alone."""
        with self._lock:
            if self._over.is_set() or self._taken == self.nbytes:
                return None
            self._is_growing = True
        begin = time.monotonic()
        pause: float | None = None
        try:
            self._take_piece()
            pause = time.monotonic() - begin
        except (MemoryError, RuntimeError, ValueError) as error:
            logger.warning(
                "the memory for chunks stays at %d of %d bytes: %s", self._taken, self.nbytes, error
            )
            self.nbytes = self._taken
        self.report()
        with self._lock:
            self._is_growing = False
            is_over = self._over.is_set()
        if is_over:
            self._close()
        return pause

    # ------------------------------------------------------------- users

    def serve(self, user: Hashable, threads: int, slot_bytes: int, *, share: float = 1.0) -> Shares:
        """Let the stores and loads of one kind use the memory, with spare slots for their threads.

        Parameters
        ----------
        user : Hashable
            Whose they are: the next call for the same takes the place of this one.
        threads : int
            Threads that load; fewer where there is no memory for so many spare slots.
        slot_bytes : int
        share : float
            Chunks of this kind for each chunk of a kind whose share is 1.

        Raises
        ------
        ConfigError
            If the memory does not hold one spare slot and two further chunks.
        """
        with self._lock:
            users = [shares for of, shares in self._users.items() if of != user]
            room = self.nbytes - sum(
                (shares.threads + _LEAST_CHUNKS) * rounded(shares.slot_bytes) for shares in users
            )
            slots = room // rounded(slot_bytes)
            if slots < 1 + _LEAST_CHUNKS:
                raise ConfigError(
                    f"the memory for chunks has {self.nbytes} bytes, of which {room} are left for"
                    f" chunks of {slot_bytes} bytes: expected at least three of these. Give more"
                    " (memory of an engine, memory_bytes of a ChunkCache), or make chunk_size"
                    " smaller"
                )
            shares = self._users.get(user)
            if shares is None:
                shares = self._users[user] = Shares(0, 0, 0.0)
            # Spare slots take half of it at most.
            shares.threads, shares.slot_bytes = min(threads, max(1, slots // 2)), slot_bytes
            shares.weight = share * slot_bytes
        self._divide()
        return shares

    def grow(self) -> None:
        """Take the rest of the memory in the background, if any is left to take."""
        if self._thread is not None:
            self._thread.start()

    def report(self) -> None:
        """Bring the metrics of the memory up to date."""
        counters = self._counters
        with self._lock:
            stats, reported = self.ring.stats(), self._reported
            self._reported = stats
        for name in ("stored_objects", "stored_bytes", "evicted_objects", "evicted_bytes"):
            change = getattr(stats, name) - getattr(reported, name)
            if change > 0:
                counters.add(f"memory_tier_{name}", change)
        counters.set_gauge("staging_limit_bytes", stats.capacity)
        counters.set_gauge("staging_used_bytes", stats.pinned_bytes)
        counters.set_gauge("memory_tier_limit_bytes", self.nbytes if self.keeps else 0)
        counters.set_gauge("memory_tier_used_bytes", stats.kept_bytes)
        ahead = sum(user.ahead.pinned_bytes for user in tuple(self._users.values()))
        counters.set_gauge("memory_tier_pinned_bytes", ahead)

    # ------------------------------------------------------------- the end

    def close(self) -> None:
        """Hand out nothing more; give the memory back once nobody holds any of it. Idempotent."""
        if self._thread is not None:
            self._thread.close()
        self.ring.close()

    def _free(self) -> None:
        with self._lock:
            self._over.set()
            is_growing = self._is_growing
        if not is_growing:
            self._close()

    def _close(self) -> None:
        self.__dict__.pop("tensor", None)
        self.view = memoryview(b"")
        if self._arena is not None:
            self._arena.close()


class ChunkPlaces:
    """How the objects of a chunk of one kind lie in a slot: one behind the other, aligned.

    Parameters
    ----------
    memory : ChunkMemory
    fmt : ObjectFormat
    shards : Sequence of int
        The shards of every chunk that this process reads or writes.

    Attributes
    ----------
    memory : ChunkMemory
    shards : Sequence of int
    chunk_bytes : int
        Bytes of a whole chunk's objects.
    slot_bytes : int
        Bytes of its slot.
    """

    def __init__(self, memory: ChunkMemory, fmt: ObjectFormat, shards: Sequence[int]) -> None:
        self.memory = memory
        self.shards = shards
        self._fmt = fmt
        self._kind = fmt.kind
        #: By the tokens of a tail, 0 for whole chunks: the bytes of a slot, and where objects lie.
        self._layouts: dict[int, tuple[int, dict[int, tuple[int, int]]]] = {}
        self.chunk_bytes = sum(fmt.object_size(shard) for shard in shards)
        self.slot_bytes = self._layout()[0]

    def _layout(self, chunk: Chunk | None = None) -> tuple[int, dict[int, tuple[int, int]]]:
        tokens = chunk.tokens if chunk is not None and chunk.tail else 0
        layout = self._layouts.get(tokens)
        if layout is None:
            places = {}
            end = 0
            for shard in self.shards:
                size = self._fmt.object_size(shard, tokens or None)
                places[shard] = (end, end + size)
                end += rounded(size)
            layout = self._layouts[tokens] = (end, places)
        return layout

    def name(self, chunk: Chunk) -> tuple[bytes, str]:
        """Return the name of a chunk in the ring. Keys of other namespaces differ."""
        return chunk.key, self._kind

    def claim(
        self, chunk: Chunk, share: Share, *, deadline: float = 0.0, is_named: bool = True
    ) -> Slot | None:
        """Return a slot for a chunk, see :meth:`Ring.claim`; one without a name is never found."""
        size, places = self._layout(chunk)
        name = self.name(chunk) if is_named else None
        return self.memory.ring.claim(name, size, share, objects=len(places), deadline=deadline)

    def hold(self, slot: Slot, shares: Shares) -> Callable[[], None] | None:
        """Pin a slot, which the caller holds, for a disk tier; return what ends that, or None."""
        ring, copies = self.memory.ring, shares.copies
        room = shares.ahead.limit - shares.ahead.pinned_bytes - copies.pinned_bytes
        if slot.size > room or not ring.pin(slot, copies):
            return None
        return lambda: ring.release(copies, [slot])

    def view(self, slot: Slot, chunk: Chunk, shard: int) -> memoryview:
        """Return the bytes of an object, header included."""
        start, stop = self._layout(chunk)[1][shard]
        return self.memory.view[slot.offset + start : slot.offset + stop]

    def payload(self, slot: Slot, chunk: Chunk, shard: int) -> torch.Tensor:
        """Return the payload of an object, uint8 [bytes]."""
        start, stop = self._layout(chunk)[1][shard]
        offset = slot.offset
        return self.memory.tensor[offset + start + self._fmt.data_offset : offset + stop]

    @property
    def most_chunks(self) -> int:
        """How many chunks the memory keeps if it has nothing else."""
        ring = self.memory.ring
        return (ring.capacity - ring.spare_bytes) // self.slot_bytes

    def leading(self, chunks: Sequence[Chunk]) -> int:
        """Return how many leading chunks are here."""
        present = self.memory.ring.holds([self.name(chunk) for chunk in chunks])
        return present.index(False) if False in present else len(chunks)
