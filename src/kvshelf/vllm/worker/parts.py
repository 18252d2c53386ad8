"""The KV of a worker: its registered caches, and what moves it to and from the shelf.

A :class:`Part` has registered caches and their way to a namespace
(:mod:`kvshelf.vllm.worker.registration`), and owns what moves KV between them and the shelf: the
transfers of all kinds, what is read ahead into memory, and the promises of hand-overs.
:mod:`kvshelf.assembly` owns the shelf. The KV of a drafter
(:mod:`kvshelf.vllm.worker.drafter`) is one more kind of these transfers.

Contracts
---------
* All methods run on the worker's step thread and never touch storage.
* One memory serves all kinds of KV and outlives changes of the weights: chunks of different
  namespaces have different keys. The shelf decides what is a hit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvshelf.assembly import Assembly
from kvshelf.format.kinds import FULL, Kind
from kvshelf.metrics import Counters
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.transfer.context import TransferContext
from kvshelf.transfer.promises import Promises
from kvshelf.transfer.read_ahead import ReadAhead
from kvshelf.transfer.transfers import Transfers
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.metadata import Orders
from kvshelf.vllm.worker.engine import WorkerEngine
from kvshelf.vllm.worker.registration import Memories, Registration

#: How long an engine with new weights waits, without a cache, for what is gathered of earlier ones.
_PUBLISH_SECONDS = 30.0


class Part:
    """The caches of the model's layers, and what moves their KV and a drafter's.

    Parameters
    ----------
    engine : WorkerEngine
    assembly : Assembly
        The shelf, and what this process has beside it.
    counters : Counters

    Attributes
    ----------
    registration : Registration
    transfers : Transfers or None
        What moves KV now, even where that may not go on: see :attr:`serving`.
    promises : Promises or None
        Those of the namespace that is open.
    ahead : Mapping of Kind to ReadAhead
        What is read ahead of requests that wait.
    """

    def __init__(self, engine: WorkerEngine, assembly: Assembly, counters: Counters) -> None:
        self.registration = Registration(engine, counters)
        self.transfers: Transfers | None = None
        self.promises: Promises | None = None
        self.ahead: Mapping[Kind, ReadAhead] = {}
        self._config = engine.config
        self._assembly = assembly
        self._counters = counters
        #: When transfers of earlier weights end at the latest; 0 while there are none.
        self._ends_at = 0.0

    @property
    def serving(self) -> Transfers | None:
        """What moves KV; None while there is no namespace or the part is disabled."""
        return self.transfers if self.registration.serves else None

    # ------------------------------------------------------------- namespaces

    def open(self, encoded: bytes, slug: str) -> bool:
        """Move KV of a namespace from now on; return whether that is so.

        No load may be running. What was gathered of earlier weights is published before.

        Raises
        ------
        RuntimeError
            If the system allows no threads now. The next call tries again.
        """
        registration, shelf = self.registration, self._assembly.shelf()
        known = registration.namespace
        if known is not None and known.encoded == encoded:
            self._ends_at = 0.0
            return True
        if shelf is None or registration.caches is None or registration.disabled_reason:
            # The scheduler announces the namespace until this worker's reports end.
            return False
        if not self._has_ended():
            return False
        if not registration.open(encoded, slug):
            return False
        memories = registration.memories
        try:
            contexts = [
                self._context(shelf, registration, kind, self._counters) for kind in memories
            ]
            self.transfers = transfers = Transfers(contexts)
        except RuntimeError:
            registration.leave()
            raise
        before, self.promises = self.promises, self._promises_in(shelf, memories)
        if before is not None:
            before.close()
        assert registration.host is not None
        registration.host.grow()
        if self._config.reads_ahead(shelf.backend.properties.probe_cost):
            self.ahead = {
                context.kind: ReadAhead(context, transfers.loads[context.kind])
                for context in contexts
            }
        return True

    def add_drafts(self, registration: Registration, counters: Counters) -> None:
        """Also move the KV of a drafter, of which `registration` has opened the namespace.

        Raises
        ------
        RuntimeError
            If the system allows no threads now.
        """
        shelf = self._assembly.shelf()
        assert self.transfers is not None and shelf is not None
        self.transfers.add(self._context(shelf, registration, FULL, counters))

    def _context(
        self,
        shelf: AnyShelf,
        registration: Registration,
        kind: Kind,
        counters: Counters,
    ) -> TransferContext:
        """Return what moves a kind of KV."""
        memory = registration.memories[kind]
        view = shelf.view(memory.fmt)
        load_threads, store_threads = registration.io_threads(view.backend.properties)
        if memory.fmt.kind != memory.fmt.kinds[0]:
            # These have fewer objects, and all kinds share the processors.
            load_threads, store_threads = max(1, load_threads // 2), max(1, store_threads // 2)
        return TransferContext(
            view,
            memory.cache,
            memory.places.memory,
            counters,
            memory.plan,
            load_threads=load_threads,
            store_threads=store_threads,
            on_thread_start=widen_cpu_affinity,
            of_drafter=registration is not self.registration,
        )

    def _promises_in(self, shelf: AnyShelf, memories: Memories) -> Promises:
        kind = FULL if FULL in memories else next(iter(memories))
        return Promises(
            shelf.view(memories[kind].fmt),
            self._counters,
            keeper=self._assembly.keeper,
            on_thread_start=widen_cpu_affinity,
        )

    # ------------------------------------------------------------- the end

    def _has_ended(self) -> bool:
        """End the transfers of other weights once they have published; return whether none is left.

        Their memory is kept, and what a thread that is stuck uses of it.
        """
        if self.transfers is not None:
            left, now = self.transfers.drain(0.0), time.monotonic()
            self._ends_at = self._ends_at or now + _PUBLISH_SECONDS
            if left and now < self._ends_at:
                return False
            if left:
                self._counters.add("dropped_chunks_weights_changed", left)
            self._stop_reading_ahead()
            self.transfers.end()
            self.transfers, self._ends_at = None, 0.0
            self.registration.leave()
        return True

    def _stop_reading_ahead(self) -> None:
        """Keep nothing for waiting requests any more."""
        for ahead in self.ahead.values():
            ahead.release_all()
        self.ahead = {}

    def take_orders(self, orders: Orders) -> None:
        """Forget what is known of the shelf, if it is time for that."""
        if orders.reset and self.transfers is not None:
            self.transfers.forget_stored()

    def give_up(self, attempt: str) -> None:
        """Mark a promise as broken, also one of a namespace that is open no more."""
        if self.promises is not None:
            self.promises.give_up(attempt)

    def drain(self, seconds: float) -> int:
        """Wait until stores are published; return how many chunks are not."""
        return 0 if self.transfers is None else self.transfers.drain(seconds)

    @property
    def promised(self) -> bool:
        """Whether another engine was promised anything in the namespace that is open."""
        return self.promises is not None and self.promises.given

    def close(self, drain_seconds: float, marker_seconds: float = 0.0) -> int:
        """Stop the threads, free the memory; return how many chunks were lost."""
        transfers, self.transfers = self.transfers, None
        promises, self.promises = self.promises, None
        self._stop_reading_ahead()
        lost = 0 if transfers is None else transfers.close(drain_seconds)
        if promises is not None:
            promises.close(marker_seconds)
        return lost
