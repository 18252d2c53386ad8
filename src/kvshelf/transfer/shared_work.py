"""Work in memory that one thread needs done, and others help with.

Contracts
---------
* A thread that helps takes one part at a time. Who needs the work done does it all where nobody
  helps, and waits only for parts that have begun: never for a thread that is stuck elsewhere.
* After an error no further part begins.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedWork(Generic[T]):
    """Parts that are independent of each other.

    Parameters
    ----------
    parts : Iterable
    do : Callable
        Called with each part, on any of the threads.
    helpers : int
        Most threads that help at once.
    """

    def __init__(self, parts: Iterable[T], do: Callable[[T], object], helpers: int) -> None:
        self._do = do
        self._helpers = helpers
        self._left = deque(parts)
        self._running = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def wants_help(self) -> bool:
        """Whether another thread may help with a part that has not begun."""
        return bool(self._left) and self._helpers > 0

    def help(self) -> None:
        """Do parts until none is left, unless enough threads do; raises nothing."""
        with self._changed:
            if not self.wants_help:
                return
            self._helpers -= 1
        self._work()
        with self._changed:
            self._helpers += 1

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._left:
                    return
                part = self._left.popleft()
                self._running += 1
            error: BaseException | None = None
            try:
                self._do(part)
            except BaseException as raised:  # noqa: BLE001 - it belongs to the thread that waits
                error = raised
            with self._changed:
                self._running -= 1
                if error is not None:
                    self._error = self._error or error
                    self._left.clear()
                self._changed.notify_all()

    def finish(self) -> None:
        """Do what is left, and wait for what others do; raise the first error of a part."""
        self._work()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        if self._error is not None:
            raise self._error
