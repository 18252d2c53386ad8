"""How fast stores may write: :class:`Pace`, one for all kinds of KV of a worker.

Any thread may call everything; nothing waits here.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Final

#: Waits of threads cannot be of any length.
_LONGEST_SECONDS: Final = 3600.0


class Pace:
    """Bounds the bytes per second that stores write, on average.

    Chunks that several threads store at once are counted when they are written, so after a pause
    each thread writes one at once.

    Parameters
    ----------
    bytes_per_second : float, optional
        None: there is no bound.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._bytes_per_second = math.inf if bytes_per_second is None else bytes_per_second
        self._lock = threading.Lock()
        #: When what was written would have been written at this rate.
        self._until = 0.0

    def seconds(self) -> float:
        """Return how long it is until more may be written, an hour at most; 0: not at all."""
        return min(max(0.0, self._until - time.monotonic()), _LONGEST_SECONDS)

    def wrote(self, nbytes: int) -> None:
        """Count bytes that were written."""
        with self._lock:
            self._until = max(self._until, time.monotonic()) + nbytes / self._bytes_per_second
