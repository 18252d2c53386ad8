"""Background threads: how one starts, ends, spares the GIL and shows in a profile.

:class:`Background` calls a function again and again on a daemon thread. :class:`GilPace` lets a
thread that computes pause for others, and :func:`trace_range` names its work in Nsight Systems.
Threads that call a storage which may never answer are :mod:`kvshelf.shelf.threads`'.

Contracts
---------
* All threads are daemons: the end of the process waits for none of them.
* No method of :class:`Background` blocks, except :meth:`Background.close` for the seconds that it
  is given.
* Any thread may make ranges and paces; each belongs to the thread that made it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

logger = logging.getLogger(__name__)

#: A thread that computes without a pause delays an engine's step thread by up to 5 ms each time the
#: step thread needs the GIL. Releasing the GIL for a short system call does not help: the thread
#: takes it back before a waiting thread has woken.
_WORK_SECONDS: Final = 0.2e-3
_SLEEP_SECONDS: Final = 50e-6
_NO_RANGE: Final = contextlib.nullcontext()
#: For messages: why no thread could be started, and what to check.
THREAD_LIMIT: Final = "the thread limit is reached (ulimit -u, or pids.max of the container)"


def try_to_start(thread: threading.Thread) -> bool:
    """Start a thread; return False if the system allows no more threads now."""
    try:
        thread.start()
    except RuntimeError as error:
        logger.debug("%s: %s", thread.name, error)
        return False
    return True


class Background:
    """One daemon thread that calls a function again and again.

    Parameters
    ----------
    name : str
        Of the thread.
    step : Callable
        Does what is to be done now, and returns the seconds to its next call; None: it is called
        again when :meth:`wake` is. Called on the thread alone. It must not raise.
    on_start : Callable, optional
        Called first on the thread, to set its processors.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], float | None],
        *,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._step = step
        self._on_start = on_start
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._closed

    @property
    def running(self) -> bool:
        """Whether the thread has been started."""
        return self._thread is not None

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the thread."""
        return self._thread is threading.current_thread()

    def start(self) -> bool:
        """Start the thread, unless it runs or was closed; return whether it has been started.

        Where the system allows no thread now, the next call tries again.
        """
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                # The function may ask at once whether it runs on the thread.
                self._thread = thread
                if not try_to_start(thread):
                    self._thread = None
            return self._thread is not None

    def wake(self) -> None:
        """Call the function again now, or once more when the call under way has ended."""
        self._wake.set()

    def close(self, seconds: float = 0.0) -> None:
        """Call the function no more; wait so long for the call under way. Idempotent."""
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None and seconds > 0 and not self.is_current:
            self._thread.join(seconds)

    def _run(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while not self.closed:
            self._wake.clear()
            if self._closed:
                return
            self._wake.wait(self._step())


class GilPace:
    """The pace of one thread: made when its work begins, called after each small piece of it."""

    def __init__(self) -> None:
        self._slept = time.perf_counter()

    def rest(self) -> None:
        """Sleep for 50 µs if the thread has worked for more than 0.2 ms since its last sleep."""
        if time.perf_counter() - self._slept > _WORK_SECONDS:
            time.sleep(_SLEEP_SECONDS)
            self._slept = time.perf_counter()


def trace_range(name: str) -> AbstractContextManager[None]:
    """Return an NVTX range around work of the calling thread, as Nsight Systems shows it.

    torch makes it, in a process that uses a GPU. Elsewhere the context does nothing.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return _NO_RANGE
    nvtx_range: AbstractContextManager[None] = torch.cuda.nvtx.range(name)
    return nvtx_range
