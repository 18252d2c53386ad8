"""Stores and loads under way: when each ends, and when the blocks of a request may be released.

Owns the end of one operation (:class:`Operation`), and the bookkeeping of all of a worker
(:class:`Operations`): in every step an engine asks which of its finished requests have no store
under way any more, which loads have ended, and which blocks they did not fill. Neither KV nor a
server is known here.

Contracts
---------
* The blocks of a finished request are released when none of its stores is under way: at once if
  there was none, and also if the finish was reported first.
* A request is named once, however often the engine reports its finish. A request that begins an
  operation after it was named is a new one.
* Whatever the outcome of an operation, its end counts. It ends once, at the latest after its
  deadline, and never while a thread or the GPU accesses the engine's memory for it.
* The blocks that a load did not fill are known before its request is named.

Threads
-------
Any thread may call everything.
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
    """A store or a load of one request, until it accesses no memory of the engine any more.

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
        self._accesses = 0
        self._expired = False
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether it has ended, or will once nothing accesses the engine's memory."""
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

    def acquire(self) -> bool:
        """Whether the engine's memory may be accessed; if so, :meth:`release` follows."""
        with self._lock:
            if self._expired:
                return False
            self._accesses += 1
            return True

    def release(self) -> None:
        """Note that one access to the engine's memory is over."""
        with self._lock:
            self._accesses -= 1
        self._finish()

    def expire(self) -> None:
        """End with what has succeeded so far, once nothing accesses the engine's memory."""
        with self._lock:
            self._expired = True
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            if self._ended or self._accesses or (self._left and not self._expired):
                return
            self._ended = True
        self._on_end(self)


class Operations:
    """The stores and loads of one worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._stores: set[Operation] = set()
        self._loads: set[Operation] = set()
        #: Finished requests with stores under way, and those that were named.
        self._waiting: set[str] = set()
        self._named: OrderedDict[str, None] = OrderedDict()
        #: Requests whose loads have ended, and the blocks that loads did not fill.
        self._loaded: set[str] = set()
        self._failed_blocks: set[int] = set()

    def begin(
        self,
        request_id: str,
        seconds: float,
        parts: Mapping[int, int],
        on_end: Callable[[Operation], Iterable[int]],
        *,
        store: bool,
    ) -> Operation:
        """Begin an operation.

        Parameters
        ----------
        request_id : str
        seconds : float
            How long it may take.
        parts : Mapping[int, int]
            Parts of each chunk.
        on_end : Callable
            Called once, before the end counts, on the thread that ends the operation. Returns the
            blocks that a load did not fill.
        store : bool
            Whether this is a store.

        Raises
        ------
        ValueError
            After :meth:`close`.
        """
        running = self._stores if store else self._loads

        def ended(operation: Operation) -> None:
            failed = on_end(operation)
            with self._changed:
                running.discard(operation)
                if not store:
                    self._failed_blocks.update(failed)
                    if all(one.request_id != request_id for one in running):
                        self._loaded.add(request_id)
                self._changed.notify_all()

        operation = Operation(request_id, time.monotonic() + seconds, parts, ended)
        with self._changed:
            if self._closed:
                raise ValueError("this adapter was shut down")
            running.add(operation)
            if store:
                self._named.pop(request_id, None)
            else:
                self._loaded.discard(request_id)
        return operation

    def finished(self, request_ids: Iterable[str]) -> set[str]:
        """Return the requests whose blocks may be released now.

        Parameters
        ----------
        request_ids : Iterable[str]
            The requests that the engine has finished since the last call.
        """
        with self._changed:
            self._waiting.update(one for one in request_ids if one not in self._named)
            ready = self._waiting - {one.request_id for one in self._stores}
            self._waiting -= ready
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

    def expire_late(self) -> None:
        """End those whose time is over."""
        now = time.monotonic()
        for operation in self._running():
            if operation.deadline <= now:
                operation.expire()

    def _running(self) -> set[Operation]:
        with self._changed:
            return self._stores | self._loads

    def close(self, seconds: float) -> bool:
        """Begin nothing more, wait, end what has not ended, and wait again; False if closed before.

        Parameters
        ----------
        seconds : float
            Longest time of each wait. Afterwards only an operation that still accesses the
            engine's memory has not ended.
        """
        with self._changed:
            if self._closed:
                return False
            self._closed = True
        self._wait(seconds)
        for operation in self._running():
            operation.expire()
        self._wait(seconds)
        return True

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._stores and not self._loads, seconds)
