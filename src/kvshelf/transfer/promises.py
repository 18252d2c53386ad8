"""The chunks that an engine has promised to others, and what becomes of them.

Owns the account of broken promises, and the thread that writes their markers
(:mod:`kvshelf.shelf.markers`). An engine that hands a request over promises that all chunks of the
prompt will be stored. If one of them is dropped, fails or is lost at shutdown, the promise is
broken: a marker informs the engine that waits for the chunks.

Contracts
---------
* A marker is written at most once for an attempt, and a write that fails is not repeated: the
  engine that waits has a deadline. It is counted in ``promises_broken`` in any case.
* No thread is started before the first broken promise. It is a daemon thread: one that is stuck in
  the storage keeps no process alive.
* All methods may be called from any thread; only :meth:`Promises.close` waits.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

from kvshelf.background import Background
from kvshelf.format.keys import Chunk
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ShelfView
from kvshelf.transfer.stores import OnStored, StoreOutcome, StoreResult

logger = logging.getLogger(__name__)

#: Most broken attempts that are remembered.
_BROKEN_MEMORY: Final = 4096
#: Most markers that wait to be written.
_MOST_QUEUED: Final = 1024


class Promises:
    """The promises of one worker.

    Methods take the view of any kind in the namespace of the attempt: its markers are there.

    Parameters
    ----------
    counters : Counters
        Gets ``promises_broken`` and ``markers_written``.
    on_handover : Callable, optional
        Called when this process will write a tail or a marker, which will have to be deleted.
    on_thread_start : Callable, optional
        Called first on the thread, to set its processors.

    Attributes
    ----------
    given : bool
        Whether anything was promised.
    unmarked : bool
        A marker could not be written, and no promised store has succeeded since.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        on_handover: Callable[[], None] = lambda: None,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._counters = counters
        self._on_handover = on_handover
        self._thread = Background("kvshelf-marker", self._write_all, on_start=on_thread_start)
        self._changed = threading.Condition()
        #: The marker that is being written is the first one.
        self._queue: deque[tuple[ShelfView, str]] = deque()
        self._broken: OrderedDict[str, None] = OrderedDict()
        self._closed = False
        self.given = False
        self.unmarked = False

    # ------------------------------------------------------------- the outcomes of stores

    def watch(self, view: ShelfView, attempt: str) -> OnStored:
        """Return the callback for the end of a promised store of an attempt, or of a tail.

        `attempt` is empty where no engine waits for it.
        """
        self.given = self.given or bool(attempt)
        self._on_handover()
        return functools.partial(self._ended, view, attempt)

    def note(self, view: ShelfView, attempt: str, outcome: StoreOutcome) -> None:
        """Note the result of the call that should queue a watched store."""
        if outcome not in (StoreOutcome.KNOWN, StoreOutcome.QUEUED) and attempt:
            self.give_up(view, attempt)

    def _ended(self, view: ShelfView, attempt: str, chunk: Chunk, result: StoreResult) -> None:
        if result.is_stored:
            self.unmarked = False
        elif attempt:
            self.give_up(view, attempt)

    # ------------------------------------------------------------- markers

    def give_up(self, view: ShelfView, attempt: str) -> None:
        """Note that a promise is broken. The first call for an attempt queues its marker."""
        with self._changed:
            if attempt in self._broken:
                return
            self._broken[attempt] = None
            if len(self._broken) > _BROKEN_MEMORY:
                self._broken.popitem(last=False)
            if not self._closed and len(self._queue) < _MOST_QUEUED:
                self._queue.append((view, attempt))
                # Where the system allows no thread now, the next marker tries again.
                self._thread.start()
                self._thread.wake()
        self._counters.add("promises_broken")

    def _write_all(self) -> None:
        """Write the markers that wait; the last call of the thread writes all."""
        while self._queue:
            view, attempt = self._queue[0]
            try:
                if view.on_storage.give_up(attempt):
                    self._counters.add("markers_written")
            except Exception as error:  # noqa: BLE001 - the engine that waits has a deadline
                self.unmarked = True
                logger.debug("a marker was not written: %s", error)
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()
        with self._changed:
            if self._closed and not self._queue:
                self._thread.close()

    def close(self, seconds: float = 0.0) -> None:
        """Take no more; wait for a limited time for unwritten markers. Idempotent.

        The thread continues afterwards, until all are written.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._closed = True
            self._thread.wake()
            remaining = seconds
            while self._queue and self._thread.running and remaining > 0:
                self._changed.wait(remaining)
                remaining = deadline - time.monotonic()
