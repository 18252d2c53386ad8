"""Stores and loads under way: when each ends, and when the blocks of a request may be released.

Owns the end of one operation (:class:`Operation`), all of a worker (:class:`Operations`), and their
bookkeeping by request: an engine asks in every step which of its finished requests have no store
under way any more, which loads have ended, and which blocks they did not fill. Knows no memory and
no server.

Contracts
---------
* The blocks of a finished request are released when none of its stores is under way: at once if
  there was none, and also if the finish was reported first.
* A request is named once, however often the engine reports its finish. A request that begins an
  operation after it was named is a new one.
* Whatever the outcome of an operation, its end counts. It ends once, at the latest after its
  deadline, and never while a thread or the GPU touches the engine's memory for it.
* The blocks that a load did not fill are known before its request is named.

Threads
-------
Everything is safe to call from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

#: Requests that were named and may be reported again. With asynchronous scheduling vLLM reports a
#: finish in several steps that follow each other.
_REMEMBERED: Final = 16384


class Operation:
    """A store or a load of one request, until it touches no memory of the engine any more.

    A part is one shard of one chunk.

    Parameters
    ----------
    request_id : str
    deadline : float
        When it ends at the latest, by ``time.monotonic``; :meth:`expire` is called then.
    parts : Mapping[int, int]
        Parts of each chunk.
    on_end : Callable
        Called once, on the thread that ends the operation.
    """

    def __init__(
        self,
        request_id: str,
        deadline: float,
        parts: Mapping[int, int],
        on_end: Callable[[Operation], None],
    ) -> None:
        self.request_id = request_id
        self.deadline = deadline
        self._on_end = on_end
        self._lock = threading.Lock()
        #: Parts of each chunk that have not succeeded.
        self._lacks = dict(parts)
        self._left = sum(parts.values())
        self._touching = 0
        self._expired = False
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether it has ended, or will once nothing touches the engine's memory."""
        return self._ended or self._expired

    @property
    def failed(self) -> list[int]:
        """The chunks that lack a part."""
        return [chunk for chunk, parts in self._lacks.items() if parts]

    def part_ended(self, chunk: int, ok: bool) -> None:
        """Count a part that has ended."""
        with self._lock:
            self._left -= 1
            if ok and not self._expired:
                self._lacks[chunk] -= 1
        self._finish()

    def touch(self) -> bool:
        """Whether the engine's memory may be touched; if so, :meth:`let_go` follows."""
        with self._lock:
            if self._expired:
                return False
            self._touching += 1
            return True

    def let_go(self) -> None:
        """Note that one of its parts does not touch the engine's memory any more."""
        with self._lock:
            self._touching -= 1
        self._finish()

    def expire(self) -> None:
        """End with what has succeeded so far, once nothing touches the engine's memory."""
        with self._lock:
            self._expired = True
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            if self._ended or self._touching or (self._left and not self._expired):
                return
            self._ended = True
        self._on_end(self)


class OperationsByRequest:
    """The operations of one kind under way, counted by request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, int] = {}

    def begin(self, request_id: str) -> None:
        """Count an operation that begins."""
        with self._lock:
            self._running[request_id] = self._running.get(request_id, 0) + 1
            self._on_begin(request_id)

    def end(self, request_id: str) -> None:
        """Count an operation that has ended."""
        with self._lock:
            left = self._running[request_id] - 1
            if left:
                self._running[request_id] = left
            else:
                del self._running[request_id]
                self._on_last(request_id)

    def _on_begin(self, request_id: str) -> None:
        """See that an operation begins; the lock is held."""

    def _on_last(self, request_id: str) -> None:
        """See that a request's last operation has ended; the lock is held."""


class StoreOperations(OperationsByRequest):
    """The stores under way, and the finished requests that wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: set[str] = set()
        self._named: OrderedDict[str, None] = OrderedDict()

    def finished(self, request_ids: Iterable[str]) -> set[str]:
        """Return the requests whose blocks may be released now.

        Parameters
        ----------
        request_ids : Iterable[str]
            The requests that the engine has finished since the last call.
        """
        with self._lock:
            self._waiting.update(one for one in request_ids if one not in self._named)
            ready = {one for one in self._waiting if one not in self._running}
            self._waiting -= ready
            self._named.update(dict.fromkeys(ready))
            while len(self._named) > _REMEMBERED:
                self._named.popitem(last=False)
            return ready

    def _on_begin(self, request_id: str) -> None:
        self._named.pop(request_id, None)


class LoadOperations(OperationsByRequest):
    """The loads under way, the requests whose loads have ended, and what these did not fill."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: set[str] = set()
        self._failed_blocks: set[int] = set()

    def note_failed(self, blocks: Iterable[int]) -> None:
        """Take note of blocks that a load which is about to end did not fill."""
        with self._lock:
            self._failed_blocks.update(blocks)

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that loads did not fill since the last call."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def take_ended(self) -> set[str]:
        """Return the requests whose last load has ended since the last call.

        A request is named once for loads that overlap, and not while one of them is under way.
        """
        with self._lock:
            ended, self._ended = self._ended, set()
            return ended

    def _on_begin(self, request_id: str) -> None:
        self._ended.discard(request_id)

    def _on_last(self, request_id: str) -> None:
        self._ended.add(request_id)


class Operations:
    """The stores and loads of one worker.

    Attributes
    ----------
    stores : StoreOperations
    loads : LoadOperations
    """

    def __init__(self) -> None:
        self.stores = StoreOperations()
        self.loads = LoadOperations()
        self._running: set[Operation] = set()
        self._idle = threading.Condition()
        self._closed = False

    @property
    def running(self) -> list[Operation]:
        """Those that have not ended."""
        with self._idle:
            return list(self._running)

    def begin(
        self,
        kind: StoreOperations | LoadOperations,
        request_id: str,
        seconds: float,
        parts: Mapping[int, int],
        on_end: Callable[[Operation], None],
    ) -> Operation:
        """Begin an operation.

        Parameters
        ----------
        kind : StoreOperations or LoadOperations
            :attr:`stores` or :attr:`loads`.
        request_id : str
        seconds : float
            How long it may take.
        parts : Mapping[int, int]
            Parts of each chunk.
        on_end : Callable
            Called once, before the end counts, on the thread that ends the operation.

        Raises
        ------
        ValueError
            After :meth:`close`.
        """

        def ended(operation: Operation) -> None:
            on_end(operation)
            kind.end(request_id)
            with self._idle:
                self._running.discard(operation)
                self._idle.notify_all()

        operation = Operation(request_id, time.monotonic() + seconds, parts, ended)
        with self._idle:
            if self._closed:
                raise ValueError("this adapter was shut down")
            self._running.add(operation)
        kind.begin(request_id)
        return operation

    def expire_late(self) -> None:
        """End those whose time is over."""
        now = time.monotonic()
        for operation in self.running:
            if operation.deadline <= now:
                operation.expire()

    def close(self, seconds: float) -> bool:
        """Begin nothing more, wait, end what has not ended, and wait again; False if closed before.

        Parameters
        ----------
        seconds : float
            Longest time of each wait. Afterwards only an operation that still touches the engine's
            memory has not ended.
        """
        with self._idle:
            if self._closed:
                return False
            self._closed = True
            self._idle.wait_for(lambda: not self._running, seconds)
        for operation in self.running:
            operation.expire()
        with self._idle:
            self._idle.wait_for(lambda: not self._running, seconds)
        return True
