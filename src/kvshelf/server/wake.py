"""Wakes a thread that polls descriptors.

Owns an eventfd. Any thread may call all methods, a signal handler :meth:`Wake.set`.
"""

from __future__ import annotations

import contextlib
import os


class Wake:
    """An event with a descriptor. It is open until the last reference to the object is gone."""

    def __init__(self) -> None:
        self._is_set = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        try:
            os.close(self._fd)
        except (AttributeError, TypeError):  # half made, or the interpreter ends
            pass

    def fileno(self) -> int:
        """Return the descriptor: readable while the event is set."""
        return self._fd

    def set(self) -> None:
        """Wake the thread, or keep it from waiting. Cheap if it is awake."""
        if not self._is_set:
            self._is_set = True
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget the event. What was done before a :meth:`set` is to be looked at afterwards."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._is_set = False
