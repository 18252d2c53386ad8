"""The stores and loads of all kinds of KV (:mod:`kvshelf.format.kinds`) of one set of caches.

Owns the :class:`~kvshelf.transfer.loads.Loads` and :class:`~kvshelf.transfer.stores.Stores` of each
kind, starts and closes them, and owns what holds between the kinds: a
:class:`~kvshelf.transfer.load.Load` brings all kinds that a hit needs, and fails as a whole. With
one kind, a load that fails keeps what lies before the failure. A drafter's KV is optional: a load
succeeds without it, and gives it up where it fails.

Contracts
---------
* No method but ``drain`` and ``close`` waits for the storage. Any thread may call all
  methods.
* A load is reported finished once no thread writes to the caches for any of its pieces.
* The lock is held for bookkeeping only; no other object is called with it.
* Stores and loads have locks and threads of their own, so that a storage which takes no
  writes cannot delay loads. All threads are daemon threads: a call that never returns does
  not keep the process alive.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from kvshelf.backends import Properties
from kvshelf.format.kinds import DRAFT, KINDS, Kind
from kvshelf.shelf.view import ShelfView
from kvshelf.transfer.context import ChunkSlots, TransferContext, TransferHalf
from kvshelf.transfer.load import Load, LoadPiece
from kvshelf.transfer.loads import Loads
from kvshelf.transfer.stores import Stores

logger = logging.getLogger(__name__)

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


class Transfers:
    """The stores and loads between one set of caches and a shelf, whatever the weights.

    Each load and store is given the view of its namespace, so that those of one namespace go on
    beside those of the next one.

    Parameters
    ----------
    contexts : Iterable of TransferContext
        One for each kind, at least one; see also :meth:`add`.

    Attributes
    ----------
    loads : Mapping[Kind, Loads]
        By :attr:`TransferContext.kind`, in the order of :data:`~kvshelf.format.kinds.KINDS`. A
        caller that wants chunks of one kind, and does not poll, calls these.
    stores : Mapping[Kind, Stores]
        In the same order.

    Raises
    ------
    RuntimeError
        If the system allows no thread that loads, or none that stores. The caches stay open.
    """

    def __init__(self, contexts: Iterable[TransferContext]) -> None:
        self._contexts: dict[Kind, TransferContext] = {}
        self._changed = threading.Condition()
        #: All loads that are not yet polled, by request.
        self._active: dict[str, Load] = {}
        self._finished: list[Load] = []
        self.loads: dict[Kind, Loads] = {}
        self.stores: dict[Kind, Stores] = {}
        try:
            for context in sorted(contexts, key=lambda context: KINDS.index(context.kind)):
                context.backend.count_into(context.counters.add)
                self.add(context)
        except RuntimeError:
            # The caller gets nothing that it could close.
            for half in (*self.loads.values(), *self.stores.values()):
                half.close()
            raise

    def add(self, context: TransferContext) -> None:
        """Move a further kind; RuntimeError if the system allows no threads for it."""
        loads, stores = Loads(context), Stores(context)
        try:
            loads.start()
            stores.start()
        except RuntimeError:
            loads.close()
            raise
        kind = context.kind
        self._contexts[kind], self.loads[kind], self.stores[kind] = context, loads, stores

    # ------------------------------------------------------------- loads

    def load(
        self,
        request_id: str,
        views: Mapping[Kind, ShelfView],
        items: Mapping[Kind, Sequence[ChunkSlots]],
        patience: Sequence[float] = (),
        at_once: int = 0,
        fences: Mapping[Kind, object] = MappingProxyType({}),
    ) -> Load:
        """Start to load chunks into the paged caches; returns at once.

        Parameters
        ----------
        request_id : str
            Different from those of all loads that are not yet finished.
        views : Mapping[Kind, ShelfView]
            The objects of each of these kinds, in the namespace of the chunks.
        items : Mapping[Kind, Sequence[ChunkSlots]]
            The chunks of each kind, in the order of the prompt. At least one kind.
        patience : Sequence of float
            Seconds after which the load is cut, if no more than the first so many chunks have
            arrived: computing the rest is sooner. One number holds for any number of them. Empty:
            the load is never cut.
        at_once : int
            Chunks of each kind behind those that have arrived that are read at once; 0: no bound.
        fences : Mapping[Kind, object]
            What :meth:`KVCache.fence` of the caches of each kind returned when their slots were
            free; where it is missing, they are marked now.
        """
        kinds = [(kind, loads) for kind, loads in self.loads.items() if kind in items]
        begun = time.monotonic()
        load = Load(request_id, unfinished=len(kinds), begun=begun)
        cuts = [begun + seconds for seconds in patience]
        # All share the bandwidth of the storage.
        sizes = {kind: len(items[kind]) * loads.chunk_bytes for kind, loads in kinds}
        ahead = {kind: loads.loading_bytes for kind, loads in self.loads.items()}
        total = sum(ahead.values()) + sum(sizes.values())
        pieces = {
            kind: LoadPiece(
                views[kind],
                items[kind],
                cuts=cuts * len(items[kind]) if len(cuts) == 1 else cuts,
                at_once=at_once,
                fence=fences.get(kind),
                on_done=functools.partial(self._piece_done, load, kind),
            )
            for kind, _ in kinds
        }
        # An error before this line leaves no trace. Each piece behind it ends by itself.
        with self._changed:
            self._active[request_id] = load
        for kind, loads in kinds:
            piece = pieces[kind]
            try:
                loads.load(piece, total - ahead[kind] - sizes[kind])
                load.pieces[kind] = piece
            except Exception as error:
                # Other pieces may write to the caches already: the load ends with them.
                logger.error("a part of a load was not started", exc_info=error)
                piece.on_done(LoadPiece(views[kind], items[kind], failed_at=0, finished=True))
        return load

    def cancel(self, request_id: str) -> None:
        """Give a load up, because its request was aborted; see :meth:`Loads.cancel`."""
        load = self._active.get(request_id)
        if load is not None and not load.finished:
            load.cancelled = True
            self._cancel_pieces(load.pieces, count=True)

    def _cancel_pieces(self, pieces: Mapping[Kind, LoadPiece], *, count: bool) -> None:
        for kind, piece in tuple(pieces.items()):
            self.loads[kind].cancel(piece, count=count)
            # One load counts once.
            count = False

    def poll(self, wait: float = 0.0) -> list[Load]:
        """Return the loads that finished since the last call; stop those of which a piece failed.

        Parameters
        ----------
        wait : float
            Seconds to wait for the first one while any load is running.
        """
        deadline = time.monotonic() + wait
        while True:
            self._stop_failed()
            with self._changed:
                remaining = deadline - time.monotonic()
                if self._finished or not self._active or remaining <= 0:
                    finished, self._finished = self._finished, []
                    for load in finished:
                        if self._active.get(load.request_id) is load:
                            del self._active[load.request_id]
                    return finished
                self._changed.wait(remaining)

    @property
    def loading(self) -> bool:
        """Whether any load is running or not yet polled."""
        return bool(self._active)

    def _stop_failed(self) -> None:
        """Give up late pieces, and those that are useless because another one failed."""
        with self._changed:
            active = [load for load in self._active.values() if not load.finished]
        if not active:
            return
        for loads in self.loads.values():
            loads.check()
        for load in active:
            if len(load.pieces) > 1 and load.failed and not load.stopped:
                load.stopped = True
                # One needed kind keeps what lies before the failure.
                useful = load.needed if len(load.needed) == 1 else {}
                useless = {kind: piece for kind, piece in load.pieces.items() if kind not in useful}
                self._cancel_pieces(useless, count=False)

    def _piece_done(self, load: Load, kind: Kind, piece: LoadPiece) -> None:
        """Note that a piece is finished. Runs with the lock of its :class:`Loads` held."""
        with self._changed:
            load.pieces[kind] = piece
            load.unfinished -= 1
            if not load.unfinished:
                load.finished = True
                load.seconds = time.monotonic() - load.begun
                self._finished.append(load)
            self._changed.notify_all()

    # ------------------------------------------------------------- stores

    def take_repaired(self) -> list[bytes]:
        """Return the kind keys whose bad objects were replaced since the last call."""
        # No lookup searches for a drafter's.
        needed = [stores for kind, stores in self.stores.items() if kind != DRAFT]
        return [key for stores in needed for key in stores.known.take_repaired()]

    def forget_stored(self) -> None:
        """Forget what was published here, so that it is stored again if it is missing."""
        for stores in self.stores.values():
            stores.known.forget_published()

    # ------------------------------------------------------------- the end

    def drain(self, seconds: float) -> int:
        """Wait until all stores are published; return how many were not in time."""
        deadline = time.monotonic() + seconds
        return sum(
            stores.drain(max(0.0, deadline - time.monotonic())) for stores in self.stores.values()
        )

    def close(self, drain_seconds: float = 0.0) -> int:
        """Drain, stop the threads, and return how many chunks were lost.

        A stuck thread is not waited for: it ends with the process. Others are, since Python
        cannot end a thread that is inside compiled code without a crash.
        """
        self.drain(drain_seconds)
        lost = {kind: stores.drain(0.0) for kind, stores in self.stores.items()}
        for kind, context in self._contexts.items():
            if lost[kind]:
                context.count("dropped_chunks_shutdown", lost[kind])
        halves: list[TransferHalf] = [*self.loads.values(), *self.stores.values()]
        for half in halves:
            half.close()
        deadline = time.monotonic() + _JOIN_SECONDS
        for half in halves:
            half.join(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + _JOIN_SECONDS
        for loads in self.loads.values():
            # Callers may use their memory for something else when this returns.
            for memory in loads.memory_in_use():
                memory.close(deadline)
        for context in self._contexts.values():
            if context.cache is not None:
                context.cache.close()
        return sum(lost.values())
