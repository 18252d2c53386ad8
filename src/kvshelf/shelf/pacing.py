"""Keeps the GIL free for other threads during long work in Python.

A background thread that computes without a pause delays an engine's step thread by up to five
milliseconds each time that thread needs the GIL. It does not help to release the GIL: a thread
that releases it for a short system call takes it back before a waiting thread has woken. So the
background thread sleeps for a moment after each fifth of a millisecond of work.
"""

from __future__ import annotations

import time
from typing import Final

_WORK_SECONDS: Final = 0.2e-3
_SLEEP_SECONDS: Final = 50e-6


class GilPace:
    """The pace of one thread: made when its work begins, called after each small piece of it."""

    def __init__(self) -> None:
        self._slept = time.perf_counter()

    def rest(self) -> None:
        """Sleep if the thread has worked for long enough; to call after each piece of work."""
        if time.perf_counter() - self._slept > _WORK_SECONDS:
            time.sleep(_SLEEP_SECONDS)
            self._slept = time.perf_counter()
