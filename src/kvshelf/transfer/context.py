"""What the stores and the loads of one kind of KV share.

:class:`TransferContext` is immutable, its parts have their own locks: any thread may use it.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import InitVar, dataclass
from typing import Final

import torch

from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import DRAFT, FULL, STATE, Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import KVCache, KVMemory
from kvshelf.kv.topology import ShardPlan
from kvshelf.logs import RateLimitedLog
from kvshelf.memory.chunk_memory import ChunkMemory, ChunkPlaces
from kvshelf.metrics import Counters
from kvshelf.shelf.threads import StorageThreads

logger = logging.getLogger("kvshelf.transfer")

_LINES_PER_MINUTE = 10
#: Of most chunks no state is stored, and a hit loads one.
STATE_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True)
class ChunkSlots:
    """One chunk and its slots in the paged cache.

    Attributes
    ----------
    chunk : Chunk
    slots : Tensor
        int64 CPU tensor: a slot for each token, or for native layouts a block id for
        each block of the chunk, but for each token of a tail; −1 = skip (loads only).
    memory : KVMemory, optional
        The memory that has these slots; the context's paged cache when absent.
    fence : object
        What :meth:`KVCache.fence` of `memory` returned; loads only.
    """

    chunk: Chunk
    slots: torch.Tensor
    memory: KVMemory | None = None
    fence: object = None


@dataclass(eq=False)
class TransferContext:
    """The caches and the memory of one kind of KV, and how its chunks are counted.

    Nothing of it depends on the weights: stores and loads are given the view of the namespace
    whose chunks they move. The log has at most ten lines a minute, and one for each object.

    Parameters
    ----------
    fmt : ObjectFormat
        Of the kind, in any of the namespaces: their objects have the same sizes.
    backend : GuardedBackend
        The storage of all views.
    cache : KVCache or None
        None where every :class:`ChunkSlots` names its own memory. Closed with the transfers.
    memory : ChunkMemory
        Its owner closes it, after the transfers.
    counters : Counters
    plan : ShardPlan
        The shards that this worker reads and writes.
    load_threads, store_threads : int
    on_thread_start : Callable, optional
        Called first on each thread, to set its processors.
    owner : Hashable
        Whose transfers they are, where several share the memory.
    of_drafter : bool
        The KV is a drafter's: no request depends on it, so failures are in the debug log only.

    Attributes
    ----------
    places : ChunkPlaces
        How chunks lie in slots of the memory.
    shares : Shares
        What stores, and what is read ahead, may have of the memory.

    Raises
    ------
    ConfigError
        If the memory is too small for a chunk.
    """

    fmt: ObjectFormat
    backend: GuardedBackend
    cache: KVCache | None
    memory: ChunkMemory
    counters: Counters
    plan: ShardPlan
    load_threads: int = 2
    store_threads: int = 1
    on_thread_start: Callable[[], None] | None = None
    owner: Hashable = None
    of_drafter: InitVar[bool] = False

    def __post_init__(self, of_drafter: bool) -> None:
        self.kind: Kind = DRAFT if of_drafter else self.fmt.kind
        self.log = RateLimitedLog(logger, 0 if of_drafter else _LINES_PER_MINUTE)
        self.places = ChunkPlaces(self.memory, self.fmt, self.plan.shards)
        # A further thread has what lies in memory, see :mod:`kvshelf.transfer.loads`.
        self.shares = self.memory.serve(
            (self.owner, self.kind),
            self.load_threads + 1,
            self.places.slot_bytes,
            share=STATE_SHARE if self.fmt.kind == STATE else 1.0,
        )
        self.load_threads = max(1, self.shares.threads - 1)

    def kv_memory(self, item: ChunkSlots) -> KVMemory:
        """Return the memory that has a chunk's slots, in the form that takes the chunk.

        Raises UnsupportedError if the chunk is a tail, and the memory has none.
        """
        memory = self.cache if item.memory is None else item.memory
        if memory is None:
            raise ValueError("there is no paged cache: the chunk must name its memory")
        return memory.of_tail(item.chunk.tokens) if item.chunk.tail else memory

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of chunks or bytes, and for kinds other than full to the kind's own."""
        self.counters.add(name, amount)
        if self.fmt.kind != FULL:
            # Dropped chunks are counted by reason for all kinds together.
            family = "dropped_chunks" if name.startswith("dropped_chunks_") else name
            self.counters.add(f"{self.fmt.kind}_{family}", amount)

    def notify(self, callback: Callable[..., None], *values: object) -> None:
        """Call a completion callback; an exception that it raises must not end the thread."""
        try:
            callback(*values)
        except Exception as error:
            self.log.error(
                "a completion callback raised", exc_info=error, about=("callback", type(error))
            )


class TransferHalf(ABC):
    """The common base of the stores and the loads of one kind: each has its own lock and threads.

    `kind` is ``load`` or ``store``, for the names of the threads.
    """

    def __init__(self, context: TransferContext, kind: str, threads: int) -> None:
        self._context = context
        self._backend = context.backend
        self._fmt = context.fmt
        self._memory = context.memory
        self._places = context.places
        self._counters = context.counters
        self._log = context.log
        self._closing = False
        self._lock = threading.Lock()
        #: There is work, or the half is closed.
        self._work = threading.Condition(self._lock)
        self._threads = StorageThreads(
            f"kvshelf-{kind}",
            threads,
            self._run,
            self._backend,
            count_stuck=lambda: self._counters.add("stuck_threads"),
            on_stuck=self._give_up_thread,
            on_stop=self._give_up_all,
            on_thread_start=context.on_thread_start,
        )

    @abstractmethod
    def _run(self) -> None:
        """Work until the half is closed, or another thread has taken the place of this one."""

    @abstractmethod
    def _give_up_thread(self, thread: int) -> None:
        """Give up the work of a stuck thread."""

    @abstractmethod
    def _give_up_all(self) -> None:
        """Give up work that waits for the storage and cannot be done without it."""

    def start(self) -> None:
        """Start the threads; RuntimeError if the system allows none."""
        self._threads.start()

    @abstractmethod
    def close(self) -> None:
        """Give up what no thread has begun, and end the threads."""

    def join(self, seconds: float) -> None:
        """Wait for the threads that are not stuck."""
        self._threads.join(seconds)
