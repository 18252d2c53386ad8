"""The threads of a node server that call the storage, for a loop that must not block.

Owns the queue of what they do. A thread that is stuck in the storage is replaced
(:mod:`kvshelf.shelf.threads`), and the loop learns of it at once.

Contracts
---------
* Clients take turns: however many jobs of one client wait, the next job of another client begins
  after at most one job of each. Early jobs begin when no other job waits.
* The outcome of a job that was given up as late goes to `discard`.

Threads
-------
:meth:`Pool.run` is called on the loop's thread. The threads ``kvshelf-node-…`` do the work.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import TransientStorageError, UnavailableStorageError
from kvshelf.metrics import Counters
from kvshelf.shelf.threads import StorageThreads

_T = TypeVar("_T")

_CLOSE_SECONDS: Final = 1.0


@dataclass(eq=False, slots=True)
class _Job(Generic[_T]):
    work: Callable[[], _T]
    discard: Callable[[_T], None]
    outcome: Future[_T]


class Pool:
    """Threads that call one storage.

    Parameters
    ----------
    count : int
        Number of threads that work at the same time.
    guard : GuardedBackend
        The storage that they call.
    counters : Counters
        Counts stuck threads.

    Raises
    ------
    RuntimeError
        If the system allows no thread.
    """

    def __init__(self, count: int, guard: GuardedBackend, counters: Counters) -> None:
        self._url = guard.url
        self._work = threading.Condition()
        #: Jobs that wait, by client: urgent ones, and early ones.
        self._queues: tuple[OrderedDict[Hashable, deque[_Job[Any]]], ...]
        self._queues = OrderedDict(), OrderedDict()
        self._running: dict[int, _Job[Any]] = {}
        self._is_closed = False
        self._threads = StorageThreads(
            "kvshelf-node",
            count,
            self._run,
            guard,
            count_stuck=lambda: counters.add("stuck_threads"),
            on_stuck=self._give_up,
            on_stop=self._give_up_waiting,
        )
        self._threads.start()

    def run(
        self,
        client: Hashable,
        work: Callable[[], _T],
        *,
        is_early: bool = False,
        discard: Callable[[_T], None] = lambda _: None,
    ) -> asyncio.Future[_T]:
        """Do `work` on a thread.

        Parameters
        ----------
        client : Hashable
            Whose turn it takes.
        work : Callable
            Called once at most.
        is_early : bool
        discard : Callable
            Gets what `work` returned if it came too late.

        Returns
        -------
        asyncio.Future
            Raises a StorageError if the work was late or never begun.
        """
        job = _Job(work, discard, Future[_T]())
        with self._work:
            is_taken = not self._is_closed and self._threads.ready()
            if is_taken:
                self._queues[is_early].setdefault(client, deque()).append(job)
                self._work.notify()
        if not is_taken:
            self._refuse(job)
        return asyncio.wrap_future(job.outcome)

    def close(self) -> None:
        """Begin no more work; what was not begun fails. Idempotent."""
        with self._work:
            self._is_closed = True
            self._work.notify_all()
        self._give_up_waiting()
        self._threads.close()
        self._threads.join(_CLOSE_SECONDS)

    def _next(self) -> _Job[Any] | None:
        """Return the next job; None if there is none. Holds the lock."""
        for queue in self._queues:
            if queue:
                client, jobs = queue.popitem(last=False)
                job = jobs.popleft()
                if jobs:
                    queue[client] = jobs
                return job
        return None

    def _run(self) -> None:
        thread = threading.get_ident()
        while not self._threads.replaced():
            with self._work:
                while (job := self._next()) is None and not self._is_closed:
                    self._work.wait()
                if job is None:
                    return
                self._running[thread] = job
            if not job.outcome.set_running_or_notify_cancel():
                continue
            try:
                result = job.work()
            except BaseException as error:  # noqa: BLE001 - it is the outcome, panics included
                self._end(job, error)
            else:
                if not self._end(job, None, result):
                    job.discard(result)
            self._running.pop(thread, None)

    def _end(self, job: _Job[Any], error: BaseException | None, result: Any = None) -> bool:
        """Set the outcome of a job, unless it has one; return whether it was set."""
        with self._work:
            if job.outcome.done():
                return False
            if error is None:
                job.outcome.set_result(result)
            else:
                job.outcome.set_exception(error)
            return True

    def _give_up(self, thread: int) -> None:
        """End the job of a stuck thread."""
        job = self._running.get(thread)
        if job is not None:
            text = "the storage did not answer"
            self._end(job, TransientStorageError(errno.ETIMEDOUT, text, self._url))

    def _give_up_waiting(self) -> None:
        """End the jobs in the queue if no thread is left for them."""
        while self._is_closed or not self._threads.any:
            with self._work:
                job = self._next()
            if job is None:
                return
            self._refuse(job)

    def _refuse(self, job: _Job[Any]) -> None:
        text = "no thread can call the storage"
        self._end(job, UnavailableStorageError(errno.EAGAIN, text, self._url))
