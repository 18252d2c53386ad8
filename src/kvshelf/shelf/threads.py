"""Threads that call the storage, and their replacements when they get stuck.

Owns the threads of one kind (load, store, lookup) of one owner. A thread whose call missed its
deadline is *stuck*: another thread takes its place. If more threads are stuck than there should be
threads in total, or no replacement can be started, the guard is notified and opens the circuit
breaker; from then on no further threads enter the storage. At most :data:`MAX_STUCK` threads are
ever stuck. A thread that could not be started is started later, when there is work
(:meth:`StorageThreads.ready`).

Contracts
---------
* All threads are daemons of this class: the process can end whatever they wait for. (Threads of
  concurrent.futures are joined at exit, and one blocked read would delay that for ever.)
* The guard's thread reports to the owner which of its threads is stuck. A stuck thread whose call
  returns calls :meth:`StorageThreads.replaced` and ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from kvshelf.backends.guard import GuardedBackend
from kvshelf.background import THREAD_LIMIT, try_to_start

#: Upper limit of stuck threads of one owner.
MAX_STUCK: Final = 32


class StorageThreads:
    """Threads that all run one loop.

    Parameters
    ----------
    name : str
        Prefix of the threads' names.
    count : int
        Number of threads that work at the same time.
    run : Callable
        The loop. It ends when there is no more work, or when :meth:`replaced` returns True.
    guard : GuardedBackend
        The storage that the threads call.
    count_stuck : Callable
        Called for each thread that gets stuck.
    on_stuck : Callable, optional
        Called with the id of a stuck thread, before another takes its place. Called again if a
        thread that had returned just then and taken more work is late with that work.
    on_stop : Callable, optional
        Called when the read breaker opens, and when no thread is left.
    on_thread_start : Callable, optional
        Called first on each thread. It must not raise.
    """

    def __init__(
        self,
        name: str,
        count: int,
        run: Callable[[], None],
        guard: GuardedBackend,
        *,
        count_stuck: Callable[[], None],
        on_stuck: Callable[[int], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._count = count
        self._run = run
        self._guard = guard
        self._count_stuck = count_stuck
        self._on_stuck = on_stuck
        self._on_stop = on_stop
        self._on_thread_start = on_thread_start
        self._lock = threading.Lock()
        #: Also those that are about to start.
        self._working: set[threading.Thread] = set()
        self._stuck: set[threading.Thread] = set()
        self._started = 0
        self._closed = False

    def start(self) -> None:
        """Start the threads, or as many as the system allows.

        Raises
        ------
        RuntimeError
            If the system allows no thread.
        """
        if not sum([self._start_one() for _ in range(self._count)]):
            raise RuntimeError(f"no thread {self._name} could be started: {THREAD_LIMIT}")
        self._guard.watch(self)

    @property
    def _missing(self) -> bool:
        """Whether a thread has to be started. Exact only with the lock held."""
        there = len(self._working)
        return there < self._count and len(self._stuck) < MAX_STUCK and not self._closed

    def _start_one(self) -> bool:
        """Start a thread if one is missing; return False if the system allows no more now."""
        with self._lock:
            if not self._missing:
                return True
            name = f"{self._name}-{self._started}"
            thread = threading.Thread(target=self._body, name=name, daemon=True)
            self._started += 1
            self._working.add(thread)
        if try_to_start(thread):
            return True
        with self._lock:
            # A caller that checks whether there are threads must not wait for this one.
            self._working.discard(thread)
        return False

    def _body(self) -> None:
        try:
            if self._on_thread_start is not None:
                self._on_thread_start()
            self._run()
        finally:
            with self._lock:
                self._working.discard(threading.current_thread())
                self._stuck.discard(threading.current_thread())

    @property
    def any(self) -> bool:
        """Whether any thread can do work."""
        return bool(self._working)

    def ready(self) -> bool:
        """Start the threads that are missing; return whether any thread can do work.

        Takes no lock if no thread is missing.
        """
        for _ in range(self._count):
            if not self._missing or not self._start_one():
                break
        return self.any

    def replaced(self) -> bool:
        """Return whether another thread has taken the place of the calling one."""
        me = threading.current_thread()
        if me not in self._stuck:
            return False
        with self._lock:
            if len(self._working) >= self._count:
                return True
            # No replacement could be started.
            self._stuck.discard(me)
            self._working.add(me)
            return False

    def on_late_call(self, thread: int) -> bool:
        """Replace a stuck thread; return whether too many threads are stuck."""
        with self._lock:
            late = {worker for worker in self._working | self._stuck if worker.ident == thread}
            # A thread whose call returned just now may be late again, with other work.
            fresh = late & self._working
            self._working -= late
            self._stuck |= late
            stuck = len(self._stuck)
        if not late:
            return False
        if fresh:
            self._count_stuck()
        if self._on_stuck is not None:
            self._on_stuck(thread)
        started = self._start_one()
        if not self.any:
            # If the breaker is open already, it will not notify again.
            self.on_reads_open()
        return not started or stuck > self._count

    def on_reads_open(self) -> None:
        """Notify the owner that the storage cannot be called."""
        if self._on_stop is not None:
            self._on_stop()

    def close(self) -> None:
        """Start no more threads. Running threads end when their loop ends."""
        self._closed = True
        self._guard.unwatch(self)

    def join(self, seconds: float) -> None:
        """Wait for the threads that are not stuck, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        with self._lock:
            threads = list(self._working)
        for thread in threads:
            # A thread that is just starting ends as soon as it looks for work.
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
