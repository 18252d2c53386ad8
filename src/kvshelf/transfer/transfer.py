"""The store and load pipelines between a paged KV cache and a shelf.

Owns the two halves, :class:`~kvshelf.transfer.stores.Stores` and
:class:`~kvshelf.transfer.loads.Loads`: starts their threads, gives both the same shelf,
format, caches, staging and log, and closes them.

Contracts
---------
* No method but ``drain`` and ``close`` waits for the storage.
* Stores and loads have locks and threads of their own, so that a storage which takes no
  writes cannot delay loads. All threads are daemon threads: a call that never returns does
  not keep the process alive.
* Any thread may call all methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvshelf.backends import Properties
from kvshelf.history import History
from kvshelf.kv.caches import KVCache
from kvshelf.kv.topology import ShardPlan
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ShelfView
from kvshelf.transfer.context import TransferContext
from kvshelf.transfer.loads import Loads
from kvshelf.transfer.staging import StagingPool
from kvshelf.transfer.stores import Stores

_JOIN_SECONDS = 0.5
_LOW_LATENCY_THREADS = 2
_HIGH_LATENCY_THREADS = 16


def default_io_threads(properties: Properties) -> tuple[int, int]:
    """Return how many threads should load from a storage and how many store to it.

    Two threads use the full bandwidth of a local disk, and compete with the model for
    processors. Threads that wait for a network do not.
    """
    if not properties.high_latency:
        return _LOW_LATENCY_THREADS, _LOW_LATENCY_THREADS // 2
    threads = max(_LOW_LATENCY_THREADS, min(_HIGH_LATENCY_THREADS, properties.concurrency))
    return threads, max(1, threads // 4)


class Transfer:
    """The store and load pipelines of one worker.

    Parameters
    ----------
    shelf : ShelfView
        The objects of one kind in one namespace.
    cache : KVCache or None
        None where every :class:`~kvshelf.transfer.context.ChunkSlots` names its own memory.
        The cache is closed with the transfer.
    staging : StagingPool
        Its buffers must hold the largest object of the kind.
    counters : Counters
    plan : ShardPlan, optional
        The shards that this worker reads and writes; all of them when absent.
    load_threads, store_threads : int
    check_finite : bool
        Do not store chunks that hold NaN or infinity.
    on_thread_start : Callable, optional
        Called first on each thread with ``"load"`` or ``"store"``, to set its processors.
    quiet : bool
        Write failures to the debug log only: no request depends on these chunks.
    history : History, optional
        Gets what becomes of chunks.

    Attributes
    ----------
    chunk_bytes : int
        Bytes of the objects of a chunk that this worker reads.
    load, cancel, cancel_early, poll, check, store, drain
        The methods of :class:`~kvshelf.transfer.loads.Loads` and of
        :class:`~kvshelf.transfer.stores.Stores`.
    take_repaired, take_published, forget_stored
        Those of :class:`~kvshelf.transfer.known_chunks.KnownChunks`.

    Raises
    ------
    RuntimeError
        If the system allows no thread that loads, or none that stores.
    """

    def __init__(
        self,
        shelf: ShelfView,
        cache: KVCache | None,
        staging: StagingPool,
        *,
        counters: Counters,
        plan: ShardPlan | None = None,
        load_threads: int = 2,
        store_threads: int = 1,
        check_finite: bool = False,
        on_thread_start: Callable[[str], None] | None = None,
        quiet: bool = False,
        history: History | None = None,
    ) -> None:
        plan = plan or ShardPlan.whole(shelf.fmt.shards)
        self._context = context = TransferContext(
            shelf, cache, staging, counters, plan, on_thread_start, quiet, history
        )
        shelf.backend.count_into(counters.add)
        self._loads = loads = Loads(context, load_threads)
        self._stores = stores = Stores(context, store_threads, check_finite=check_finite)
        self.chunk_bytes = loads.chunk_bytes
        self.load = loads.load
        self.cancel = loads.cancel
        self.cancel_early = loads.cancel_early
        self.poll = loads.poll
        self.check = loads.check
        self.store = stores.store
        self.take_repaired = stores.known.take_repaired
        self.take_published = stores.known.take_published
        self.forget_stored = stores.known.forget_published
        self.drain = stores.drain
        loads.start()
        try:
            stores.start()
        except RuntimeError:
            # The caller gets no transfer that it could close.
            loads.close()
            raise

    @property
    def loading(self) -> bool:
        """Whether any load is running or not yet polled, early ones apart."""
        return self._loads.loading

    @property
    def loading_bytes(self) -> int:
        """Bytes of the loads that are not finished, early ones apart."""
        return self._loads.loading_bytes

    def retire(self) -> None:
        """Fail what is being loaded, and publish what is queued, in the background.

        The caches and the staging stay open, for another transfer of the same engine. Nothing may
        be loaded or stored any more. Once nothing is left to :meth:`drain`, the caller calls
        :meth:`end`.
        """
        self._loads.close()
        self._stores.retire()

    def end(self, join_seconds: float = 0.0) -> None:
        """End the threads of a transfer that was retired; drop what is queued."""
        self._stores.close()
        self._stores.join(join_seconds)

    def close(self, drain_seconds: float = 0.0) -> int:
        """Drain, stop the threads, and return how many chunks were lost.

        A stuck thread is not waited for: it ends with the process. Others are, since Python
        cannot end a thread that is inside compiled code without a crash.
        """
        lost = self.drain(drain_seconds)
        if lost:
            self._context.count("dropped_chunks_shutdown", lost)
        self._loads.close()
        self._stores.close()
        self._context.staging.close()
        deadline = time.monotonic() + _JOIN_SECONDS
        for half in (self._loads, self._stores):
            half.join(max(0.0, deadline - time.monotonic()))
        if self._context.cache is not None:
            self._context.cache.close()
        return lost
