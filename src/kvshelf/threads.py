"""Threads that work in the storage, and others in their place when it keeps them.

Owns the threads of one kind (load, store, look-up) of one owner. A thread whose call missed
its deadline is *kept*: nobody reckons with it any more, and a fresh one takes its place. When
more are kept than there should be threads at all, or no fresh one can be started, the guard
is told, which gives the storage a rest; from then on no further ones enter it. At most
:data:`MOST_KEPT` are ever kept. A thread that could not be started is started later, when there
is work (:meth:`StorageThreads.ready`).

Contracts
---------
* All are daemon threads of our own: the process ends whatever they wait for. (Those of
  concurrent.futures are joined at exit, and one blocked read would hold that up for ever.)
* The owner hears on the guard's thread which of its threads is kept. A thread that comes
  back asks :meth:`StorageThreads.replaced` and ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvshelf.backends.guard import THREAD_LIMIT, GuardedBackend, try_to_start

logger = logging.getLogger(__name__)

#: Most threads of one owner that a storage can keep.
MOST_KEPT: Final = 32


class StorageThreads:
    """Threads that all run one loop.

    Parameters
    ----------
    name : str
        Beginning of the threads' names.
    count : int
        Threads that work at once.
    run : Callable
        The loop. It ends when there is no more work, or when :meth:`replaced` says so.
    guard : GuardedBackend
        What they work in.
    count_kept : Callable
        Called for each thread that is kept.
    on_kept : Callable, optional
        Called with the id of a thread that is kept, before another takes its place. Called
        again when one that took more work nevertheless is late with that.
    on_stop : Callable, optional
        Called when the storage is given a rest, and when no thread is left.
    on_thread_start : Callable, optional
        Called first on each thread.
    """

    def __init__(
        self,
        name: str,
        count: int,
        run: Callable[[], None],
        guard: GuardedBackend,
        *,
        count_kept: Callable[[], None],
        on_kept: Callable[[int], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._count = count
        self._run = run
        self._guard = guard
        self._count_kept = count_kept
        self._on_kept = on_kept
        self._on_stop = on_stop
        self._on_thread_start = on_thread_start
        self._lock = threading.Lock()
        self._working: dict[int, threading.Thread] = {}
        self._kept: set[int] = set()
        self._starting: set[threading.Thread] = set()
        self._started = 0
        self._closed = False

    def start(self) -> None:
        """Start the threads, or as many as the system allows.

        Raises
        ------
        RuntimeError
            If it allows none.
        """
        if not sum([self._start_one() for _ in range(self._count)]):
            raise RuntimeError(f"no thread {self._name} can be started: {THREAD_LIMIT}")
        self._guard.watch(self)

    @property
    def _missing(self) -> bool:
        """Whether there are to be more threads. For sure only with the lock held."""
        there = len(self._working) + len(self._starting)
        return there < self._count and len(self._kept) < MOST_KEPT and not self._closed

    def _start_one(self) -> bool:
        """Start a thread if one is missing; False when the system allows no further ones now."""
        with self._lock:
            if not self._missing:
                return True
            name = f"{self._name}-{self._started}"
            thread = threading.Thread(target=self._body, name=name, daemon=True)
            self._started += 1
            self._starting.add(thread)
        if try_to_start(thread):
            return True
        with self._lock:
            # Whoever looks whether there are threads must not wait for this one.
            self._starting.discard(thread)
        return False

    def _body(self) -> None:
        me, thread = threading.get_ident(), threading.current_thread()
        with self._lock:
            # In this order, for `any` looks without the lock.
            self._working[me] = thread
            self._starting.discard(thread)
        try:
            self._prepare()
            self._run()
        finally:
            with self._lock:
                self._working.pop(me, None)
                self._kept.discard(me)

    def _prepare(self) -> None:
        if self._on_thread_start is not None:
            try:
                self._on_thread_start()
            except Exception as error:
                # One thread after the other would end, and its work with it.
                logger.error("a thread was not prepared, it works all the same", exc_info=error)

    @property
    def kept(self) -> int:
        """Number of threads that the storage keeps at this moment."""
        return len(self._kept)

    @property
    def working(self) -> list[int]:
        """Ids of the threads that are not kept."""
        with self._lock:
            return list(self._working)

    @property
    def any(self) -> bool:
        """Whether any thread is there to do work."""
        return bool(self._working or self._starting)

    def ready(self) -> bool:
        """Start the threads that are missing; return whether any is there to do work.

        Takes no lock when none is missing.
        """
        for _ in range(self._count):
            if not self._missing or not self._start_one():
                break
        return self.any

    def replaced(self) -> bool:
        """Whether another thread does the work of the calling one by now."""
        me = threading.get_ident()
        if me not in self._kept:
            return False
        with self._lock:
            if len(self._working) + len(self._starting) >= self._count:
                return True
            # Nobody could take its place when it was kept.
            self._kept.discard(me)
            self._working[me] = threading.current_thread()
            return False

    def thread_late(self, thread: int) -> bool:
        """Replace a thread of ours that the storage keeps; whether it keeps too many."""
        with self._lock:
            fresh = self._working.pop(thread, None) is not None
            # One that came back as it was taken for kept may be late again, with other work.
            if not fresh and thread not in self._kept:
                return False
            self._kept.add(thread)
            kept = len(self._kept)
        if fresh:
            self._count_kept()
        if self._on_kept is not None:
            self._on_kept(thread)
        started = self._start_one()
        if not self.any:
            # The storage may be at rest already: nobody would be told a second time.
            self.reads_stopped()
        return not started or kept > self._count

    def reads_stopped(self) -> None:
        """Pass on that nothing can be had from the storage."""
        if self._on_stop is not None:
            self._on_stop()

    def close(self) -> None:
        """Start no more threads. Those that work end when their loop does."""
        self._closed = True
        self._guard.unwatch(self)

    def join(self, seconds: float) -> None:
        """Wait for the threads that are not kept, for at most so long."""
        deadline = time.monotonic() + seconds
        with self._lock:
            threads = [*self._working.values(), *self._starting]
        for thread in threads:
            # One that is just being started ends as soon as it looks for work.
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
