"""Work on the storage, done on threads for a caller that must not block.

Owns the queues of one kind of work, one of each client, and the threads that do it. A thread whose
work is stuck in the storage is replaced (:mod:`kvshelf.shelf.threads`), and the caller
learns of it at once.

Contracts
---------
* :meth:`Workers.submit` is called on the caller's thread, the loop of the server, and never blocks.
* Outcomes come back on that thread: `post` takes them there.
* Clients take turns: however many jobs of one are waiting, the next job of another begins after at
  most one job of each.
* What work uses (memory, a connection) belongs to it until its `returned` was called.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import TransientStorageError, UnavailableStorageError
from kvshelf.metrics import Counters
from kvshelf.server.turns import Turns
from kvshelf.shelf.threads import StorageThreads

logger = logging.getLogger(__name__)

#: Calls a function on the thread of the loop, soon; may be called on any thread.
Post: TypeAlias = Callable[[Callable[[], None]], None]

_CLOSE_SECONDS: Final = 1.0


class ClientGoneError(UnavailableStorageError):
    """The client is gone, and its work was not begun."""


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    done: Callable[[Any], None]
    returned: Callable[[Any], None] | None
    #: Whether `done` was called. Used on the loop's thread only.
    reported: bool = False


class Workers:
    """Threads that do one kind of work.

    Parameters
    ----------
    name : str
        Prefix of the threads' names.
    count : int
        Number of threads that work at the same time.
    guard : GuardedBackend
        The storage that the work calls.
    post : Callable
        Calls a function on the loop's thread.
    counters : Counters
        Counts stuck threads.

    Raises
    ------
    RuntimeError
        If the system allows no thread.
    """

    def __init__(
        self, name: str, count: int, guard: GuardedBackend, post: Post, counters: Counters
    ) -> None:
        self._post = post
        self._url = guard.url
        self._wake = threading.Condition()
        self._waiting: Turns[_Job] = Turns()
        self._running: dict[int, _Job] = {}
        self._closed = False
        self._threads = StorageThreads(
            name,
            count,
            self._run,
            guard,
            count_stuck=lambda: counters.add("stuck_threads"),
            on_stuck=self._on_stuck,
            on_stop=self._on_stop,
        )
        self._threads.start()

    def submit(
        self,
        client: bytes,
        work: Callable[[], Any],
        done: Callable[[Any], None],
        returned: Callable[[Any], None] | None = None,
    ) -> None:
        """Do `work` on one of the threads.

        Parameters
        ----------
        client : bytes
            The client whose turn it takes.
        work : Callable
            Called once at most.
        done : Callable
            Called once, on the loop's thread, with what `work` returned or the exception that it
            raised; with a StorageError when it is late, or was never begun.
        returned : Callable, optional
            Called once, on the loop's thread, when `work` is over or was never begun, with the same
            as `done`, and after it. Where `work` was late it is called when it returns, if ever.
        """
        job = _Job(work, done, returned)
        with self._wake:
            if not self._closed and self._threads.ready():
                self._waiting.add(client, job)
                self._wake.notify()
                return
        self._post(lambda: self._end(job, self._unavailable()))

    def forget(self, client: bytes) -> None:
        """Begin no more work of a client; what was not begun fails with a ClientGoneError."""
        with self._wake:
            jobs = self._waiting.remove(lambda of, _: of == client)
        for job in jobs:
            self._report(job, ClientGoneError(errno.ECANCELED, "its client has gone", self._url))

    def close(self) -> None:
        """Begin no more work; what was not begun fails. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._fail_waiting()
        self._threads.close()
        self._threads.join(_CLOSE_SECONDS)

    # ------------------------------------------------------------------------------- their threads

    def _run(self) -> None:
        me = threading.get_ident()
        while not self._threads.replaced():
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                job = self._running[me] = self._waiting.take(self._waiting.clients[0])
            try:
                outcome = job.work()
            except BaseException as error:  # noqa: BLE001 - it is the outcome, panics included
                outcome = error
            with self._wake:
                self._running.pop(me, None)
            self._report(job, outcome)

    def _report(self, job: _Job, outcome: Any) -> None:
        self._post(lambda: self._end(job, outcome))

    def _on_stuck(self, thread: int) -> None:
        with self._wake:
            job = self._running.get(thread)
        if job is not None:
            error = TransientStorageError(errno.ETIMEDOUT, "the storage did not answer", self._url)
            self._post(lambda: self._tell(job, error))

    def _on_stop(self) -> None:
        # With a thread left, the guard lets each call fail at once.
        if not self._threads.any:
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        with self._wake:
            jobs = self._waiting.remove(lambda *_: True)
        for job in jobs:
            self._report(job, self._unavailable())

    def _unavailable(self) -> UnavailableStorageError:
        return UnavailableStorageError(errno.EAGAIN, "no thread can call the storage", self._url)

    # ---------------------------------------------------------------------------- the loop's thread

    def _tell(self, job: _Job, outcome: Any) -> None:
        if not job.reported:
            job.reported = True
            job.done(outcome)

    def _end(self, job: _Job, outcome: Any) -> None:
        try:
            self._tell(job, outcome)
        finally:
            # Otherwise what the work used would be lost.
            if job.returned is not None:
                job.returned(outcome)
