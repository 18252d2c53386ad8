"""Many small calls of a storage at the same time.

Owns the threads of :func:`in_parallel`. They are daemons: a process can end whatever they wait for.
A storage with low latency is called on the caller's thread alone, which is faster in Python.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from kvshelf.backends import Backend
from kvshelf.backends.trials import try_to_start

_MOST_THREADS: Final = 16

_T = TypeVar("_T")
_R = TypeVar("_R")


def threads_for(backend: Backend) -> int:
    """Return how many threads should call a storage at the same time; 1: the caller's own."""
    properties = backend.properties
    return min(properties.concurrency, _MOST_THREADS) if properties.high_latency else 1


def in_parallel(
    work: Callable[[_T], _R], items: Iterable[_T], threads: int
) -> Iterator[tuple[_T, _R]]:
    """Call `work` for each item; yield the items and results, in no particular order.

    Parameters
    ----------
    work : Callable
        Called on several threads. The first exception that it raises is raised here, and ends all.
    items : Iterable
        Consumed on the caller's thread, a few more than there are results.
    threads : int
        1: all is done on the caller's thread.
    """
    if threads <= 1:
        yield from ((item, work(item)) for item in items)
        return
    todo: queue.SimpleQueue[list[_T]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[_T, _R] | BaseException] = queue.SimpleQueue()

    def run() -> None:
        # An empty list ends the thread.
        while given := todo.get():
            try:
                done.put((given[0], work(given[0])))
            except BaseException as error:  # noqa: BLE001  raised by the caller's thread
                done.put(error)

    def result() -> tuple[_T, _R]:
        found = done.get()
        if isinstance(found, BaseException):
            raise found
        return found

    started = 0
    pending = 0
    source = iter(items)
    try:
        for item in source:
            if started < threads:
                thread = threading.Thread(target=run, name="kvshelf-parallel", daemon=True)
                started += try_to_start(thread)
                if not started:
                    # The system allows no thread now.
                    yield from in_parallel(work, itertools.chain([item], source), 1)
                    return
            todo.put([item])
            pending += 1
            if pending >= 2 * threads:
                yield result()
                pending -= 1
        for _ in range(pending):
            yield result()
    finally:
        for _ in range(started):
            todo.put([])
