"""Work on many objects of a storage: threads, interrupts, and calls that hang.

Contracts
---------
* An error or an interrupt lets what is in progress finish, for at most five seconds; then the
  caller continues without it. Queued work is dropped.
* A call that hangs costs its object or folder, and a thread (:class:`PatientBackend`).

Threads
-------
:func:`in_parallel` takes the items on the calling thread and works on them on daemon threads of its
own (``kvshelf-parallel``), so that a storage that hangs cannot keep the process alive.
"""

from __future__ import annotations

import errno
import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvshelf.backends import Backend, ObjectInfo
from kvshelf.backends.base import DeleteResults, delete_each, delete_one
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.background import GilPace, try_to_start
from kvshelf.capacity import limits
from kvshelf.errors import TransientStorageError

_T = TypeVar("_T")
_R = TypeVar("_R")


def threads_for(*backends: Backend) -> int:
    """Return how many threads should work on objects of all these storages; at least one."""
    return max(
        1, min(limits.MOST_THREADS, *(backend.properties.concurrency for backend in backends))
    )


def threads_for_calls(backend: Backend) -> int:
    """Return how many threads should make small calls of a storage; 0: the caller's own.

    Where latency is low, the caller's thread alone is faster.
    """
    return threads_for(backend) if backend.properties.high_latency else 0


def in_parallel(
    work: Callable[[_T], _R],
    items: Iterable[_T],
    threads: int,
    stop: threading.Event | None = None,
) -> Generator[tuple[_T, _R], None, None]:
    """Call `work` for each item; yield the items and results, in no particular order.

    Parameters
    ----------
    work : Callable
        Called on several threads. The first exception that it raises is raised here, and ends all.
    items : Iterable
        Consumed on the caller's thread, a bounded number ahead.
    threads : int
        0: all is done on the caller's thread.
    stop : threading.Event, optional
        Set here if the work ends early; `work` should then end soon.
    """
    if not threads:
        yield from ((item, work(item)) for item in items)
        return
    ending = threading.Event() if stop is None else stop
    todo: queue.SimpleQueue[list[_T]] = queue.SimpleQueue()
    #: Each thread that ends puts None.
    results: queue.SimpleQueue[tuple[_T, _R] | BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        # An empty list ends the thread.
        while (given := todo.get()) and not ending.is_set():
            try:
                results.put((given[0], work(given[0])))
            except BaseException as error:  # noqa: BLE001  raised by the caller's thread
                results.put(error)
                ending.set()
        results.put(None)

    def result() -> tuple[_T, _R]:
        # There is nothing else while no work has failed.
        result = results.get()
        assert result is not None
        if isinstance(result, BaseException):
            raise result
        return result

    started = pending = 0
    source = iter(items)
    try:
        for item in source:
            if started < threads:
                thread = threading.Thread(target=run, name="kvshelf-parallel", daemon=True)
                started += try_to_start(thread)
                if not started:
                    # The system allows no thread now.
                    yield from in_parallel(work, itertools.chain([item], source), 0)
                    return
            todo.put([item])
            pending += 1
            while pending and (pending >= limits.AHEAD or not results.empty()):
                yield result()
                pending -= 1
        while pending:
            yield result()
            pending -= 1
    finally:
        if pending:
            ending.set()
        for _ in range(started):
            todo.put([])
        deadline = time.monotonic() + limits.INTERRUPT_SECONDS
        while started and pending:
            try:
                started -= results.get(timeout=max(0.0, deadline - time.monotonic())) is None
            except queue.Empty:
                break


class PatientBackend(WrappedBackend):
    """Gives up a call that hangs, and its thread; makes no other for the entry while it hangs.

    The files of this machine do not hang one by one, and the client of S3 has limits of its own:
    there calls are made as they are. Elsewhere the thread of a listing rests for other threads.

    Attributes
    ----------
    cpu_seconds : float
        That its threads have taken.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.cpu_seconds = 0.0
        self._hanging: set[str] = set()
        properties = inner.properties
        self._may_hang = not properties.local_path and properties.deletes_at_once == 1

    def make(self, name: str, call: Callable[[], _R], seconds: float | None = None) -> _R:
        """Return what a call for an entry returns.

        Raises
        ------
        TransientStorageError
            If it takes longer than some seconds, by default those of a read, or still hangs, or if
            too many calls hang.
        """
        if not self._may_hang:
            return call()
        hangs = TransientStorageError(errno.ETIMEDOUT, "the call hangs", f"{self.url}/{name}")
        if name in self._hanging or len(self._hanging) >= limits.MOST_HANGING:
            raise hangs
        future: Future[_R] = Future()

        def run() -> None:
            begin = time.thread_time()
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  raised by the caller's thread
                future.set_exception(error)
            self.cpu_seconds += time.thread_time() - begin
            self._hanging.discard(name)

        if not try_to_start(threading.Thread(target=run, name="kvshelf-patient", daemon=True)):
            run()
        try:
            deadline = self.inner.properties.deadlines.read if seconds is None else seconds
            return future.result(deadline)
        except TimeoutError:
            self._hanging.add(name)
            if future.done():
                self._hanging.discard(name)
            raise hangs from None

    def info(self, name: str) -> ObjectInfo | None:
        """Look at one entry."""
        return self.make(name, lambda: self.inner.info(name))

    def folders(self, prefix: str = "") -> Sequence[str]:
        """List folders."""
        return self.make(prefix, lambda: self.inner.folders(prefix))

    def list(self, prefix: str = "", **options: Any) -> Iterator[ObjectInfo]:
        """Stream objects; where a call may hang, by a call for some of them."""
        if not self._may_hang:
            yield from self.inner.list(prefix, **options)
            return
        rows, pace = iter(self.inner.list(prefix, **options)), GilPace()

        def take() -> Sequence[ObjectInfo]:
            some = []
            for row in itertools.islice(rows, limits.ROWS):
                some.append(row)
                pace.rest()
            return some

        while some := self.make(prefix, take):
            yield from some

    def delete(self, names: Sequence[str]) -> DeleteResults:
        """Remove entries, one by one where each may hang."""
        if not self._may_hang:
            return self.inner.delete(names)
        return delete_each(
            names, lambda name: self.make(name, partial(delete_one, self.inner, name))
        )
