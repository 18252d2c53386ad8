"""Work on many objects of a shelf at once: threads, retries and interrupts.

Contracts
---------
* An interrupt lets what is in progress finish, for at most five seconds; then the caller goes on
  without it.
* An error with one item that may pass is retried after growing pauses. If it remains although
  other items succeed, it is the item's; if nothing has succeeded yet, or nothing between the
  errors of two items, it ends the work.

Threads
-------
:func:`work_on` takes the items on the calling thread and works on them on daemon threads of its
own, so that a storage that hangs cannot keep the process alive.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from kvshelf.errors import (
    BadObjectError,
    NoSpaceStorageError,
    ObjectMissingError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)

#: More jobs than this make no storage faster.
MOST_JOBS: Final = 16
#: Seconds between the attempts for one item.
PAUSES: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

_QUEUE_LENGTH: Final = 1024
#: Seconds that an interrupt waits for the items in progress.
_INTERRUPT_SECONDS: Final = 5.0

_T = TypeVar("_T")


class Attempts:
    """Tries calls of the storage again; used by all threads of one piece of work.

    Parameters
    ----------
    stop : threading.Event
        Ends all pauses; nothing is retried afterwards.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._successes = 0
        #: Successes when an item failed last.
        self._failed_at = 0

    def make(self, call: Callable[[], None]) -> StorageError | None:
        """Make a call, again after errors that may pass; return the error that remains.

        Returns None also where `stop` is set before the call has succeeded.

        Raises
        ------
        ObjectMissingError, BadObjectError, ReadOnlyStorageError, NoSpaceStorageError
            At once.
        StorageError
            If the storage seems to answer no more: no call has succeeded yet, or none since another
            one failed for good.
        """
        pauses = iter(PAUSES)
        while True:
            try:
                call()
            except (
                ObjectMissingError,
                BadObjectError,
                ReadOnlyStorageError,
                NoSpaceStorageError,
            ):
                raise
            except StorageError as error:
                pause = next(pauses, None) if isinstance(error, TransientStorageError) else None
                if pause is not None and not self._stop.wait(pause):
                    continue
                if self._stop.is_set():
                    return None
                # A lost update only causes more retries.
                before, self._failed_at = self._failed_at, self._successes
                if self._successes == before and error.retryable:
                    raise
                return error
            self._successes += 1
            return None


def work_on(
    items: Iterable[_T],
    work: Callable[[_T], None],
    *,
    jobs: int,
    name: str,
    stop: threading.Event,
) -> None:
    """Call `work` with each item, `jobs` at once; return when all is done.

    Parameters
    ----------
    items : Iterable
        Taken on the calling thread, a bounded number ahead.
    work : Callable
        Called on threads of this function.
    jobs : int
    name : str
        Begins the names of the threads.
    stop : threading.Event
        Set here at the first error or interrupt; `work` should end early then.

    Raises
    ------
    BaseException
        The first error of any thread, or of `items`.
    """
    waiting: queue.Queue[tuple[_T] | None] = queue.Queue(_QUEUE_LENGTH)
    errors: list[BaseException] = []

    def take() -> None:
        while not stop.is_set():
            try:
                found = waiting.get(timeout=0.1)
            except queue.Empty:
                continue
            if found is None:
                return
            try:
                work(found[0])
            except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
                errors.append(error)
                stop.set()

    def put(item: tuple[_T] | None) -> None:
        while not stop.is_set():
            try:
                return waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
        return None

    threads = [_Worker(take, f"{name}-{number}") for number in range(jobs)]
    try:
        for item in items:
            put((item,))
            if stop.is_set():
                break
        for _ in threads:
            put(None)
        for thread in threads:
            thread.ended.wait()
    except BaseException:
        stop.set()
        deadline = time.monotonic() + _INTERRUPT_SECONDS
        for thread in threads:
            thread.ended.wait(max(0.0, deadline - time.monotonic()))
        raise
    if errors:
        raise errors[0]


class _Worker:
    """A thread, and whether it has ended."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        # In some versions of Python an interrupted join() marks the thread as finished.
        self.ended = threading.Event()
        self._run = run
        threading.Thread(target=self._run_to_end, name=name, daemon=True).start()

    def _run_to_end(self) -> None:
        try:
            self._run()
        finally:
            self.ended.set()
