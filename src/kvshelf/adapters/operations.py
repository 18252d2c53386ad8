"""Stores and loads under way: when each ends, and when the blocks of a request may be released.

Owns the bookkeeping of all operations of a worker: in every step an engine asks which of its
finished requests have no store under way any more, which loads have ended, and which blocks they
did not fill. Neither KV nor a server is known here.

Contracts
---------
* The blocks of a finished request are released when none of its stores is under way: at once if
  there was none, and also if the finish was reported first.
* A request is named once, however often the engine reports its finish. A request that begins an
  operation after it was named is a new one.
* Whatever the outcome of an operation, its end counts. It ends once, at the latest after its
  deadline, and never while a thread or the GPU accesses the engine's memory for it.
* The blocks that a load did not fill are known before its request is named.
* Any thread may call everything.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

#: Requests that were named and may be reported again. With asynchronous scheduling vLLM reports a
#: finish in several steps that follow each other.
_REMEMBERED: Final = 16384


@dataclass(eq=False, slots=True)
class Operation:
    """A store or a load of one request, until it accesses no memory of the engine any more.

    Attributes
    ----------
    request_id : str
    deadline : float
        When it ends at the latest, by ``time.monotonic``.
    is_store : bool
    blocks : Sequence of set of int
        Of each chunk, the blocks that a load writes to.
    unfinished : set of int
        The chunks that have no outcome yet.
    failed : set of int
        Those that failed.
    accesses : int
        Threads that access the engine's memory.
    is_expired : bool
        Nothing more may begin for it.
    is_over : bool
    """

    request_id: str
    deadline: float
    is_store: bool
    blocks: Sequence[set[int]]
    unfinished: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    accesses: int = 0
    is_expired: bool = False
    is_over: bool = False


class Operations:
    """The stores and loads of one worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_closed = False
        self._running: set[Operation] = set()
        #: Finished requests with stores under way, and those that were named.
        self._finished: set[str] = set()
        self._named: OrderedDict[str, None] = OrderedDict()
        #: Requests whose loads have ended, and the blocks that loads did not fill.
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()

    def begin(
        self, request_id: str, seconds: float, blocks: Sequence[set[int]], *, is_store: bool
    ) -> Operation:
        """Begin an operation.

        Parameters
        ----------
        request_id : str
        seconds : float
            How long it may take.
        blocks : Sequence of set of int
            See :class:`Operation`; one set for each chunk. An operation without chunks ends at
            once.
        is_store : bool

        Raises
        ------
        ValueError
            After :meth:`close`.
        """
        operation = Operation(request_id, time.monotonic() + seconds, is_store, blocks)
        operation.unfinished.update(range(len(blocks)))
        with self._changed:
            if self._is_closed:
                raise ValueError("this adapter was shut down")
            self._running.add(operation)
            if is_store:
                self._named.pop(request_id, None)
            else:
                self._loaded.discard(request_id)
            self._end_if_over(operation)
        return operation

    def enter(self, operation: Operation) -> bool:
        """Whether the engine's memory may be accessed; if so, :meth:`leave` follows."""
        with self._changed:
            operation.accesses += not operation.is_expired
            return not operation.is_expired

    def leave(self, operation: Operation) -> None:
        """Note that one access to the engine's memory is over."""
        with self._changed:
            operation.accesses -= 1
            self._end_if_over(operation)

    def end_chunk(self, operation: Operation, number: int, *, is_done: bool) -> None:
        """Note that a chunk was stored or loaded, or was not."""
        with self._changed:
            if number in operation.unfinished and not operation.is_over:
                operation.unfinished.discard(number)
                if not is_done:
                    operation.failed.add(number)
                self._end_if_over(operation)

    def expire(self, operation: Operation) -> None:
        """Fail the chunks without an outcome; end the operation once nothing accesses memory."""
        with self._changed:
            operation.is_expired = True
            operation.failed |= operation.unfinished
            operation.unfinished.clear()
            self._end_if_over(operation)

    def late(self) -> list[Operation]:
        """Return the operations whose time is over."""
        now = time.monotonic()
        with self._changed:
            return [
                operation
                for operation in self._running
                if operation.deadline <= now and not operation.is_expired
            ]

    def _end_if_over(self, operation: Operation) -> None:
        """Count the end of an operation. Holds the lock."""
        if operation.unfinished or operation.accesses or operation.is_over:
            return
        operation.is_over = True
        self._running.discard(operation)
        if not operation.is_store:
            for number in operation.failed:
                self._failed_blocks |= operation.blocks[number]
            request_id = operation.request_id
            if all(load.is_store or load.request_id != request_id for load in self._running):
                self._loaded.add(request_id)
        self._changed.notify_all()

    def take_finished(self, request_ids: Iterable[str]) -> set[str]:
        """Return the requests whose blocks may be released now.

        Parameters
        ----------
        request_ids : Iterable[str]
            The requests that the engine has finished since the last call.
        """
        with self._changed:
            self._finished.update(name for name in request_ids if name not in self._named)
            storing = {store.request_id for store in self._running if store.is_store}
            ready = self._finished - storing
            self._finished -= ready
            self._named.update(dict.fromkeys(ready))
            while len(self._named) > _REMEMBERED:
                self._named.popitem(last=False)
            return ready

    def take_loaded(self) -> set[str]:
        """Return the requests whose last load has ended since the last call.

        A request is named once for loads that overlap, and not while one of them is under way.
        """
        with self._changed:
            loaded, self._loaded = self._loaded, set()
            return loaded

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that loads did not fill since the last call."""
        with self._changed:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def close(self, seconds: float) -> None:
        """Begin nothing more, and wait for stores for at most so many seconds."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(
                lambda: not any(operation.is_store for operation in self._running), seconds
            )

    def expire_all(self) -> None:
        """End all operations, each once nothing accesses memory for it."""
        with self._changed:
            running = list(self._running)
        for operation in running:
            self.expire(operation)
