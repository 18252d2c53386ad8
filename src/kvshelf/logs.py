"""Log lines: their beginning, and those about events that may come thousands of times a minute.

Owns the limit on such lines. May be used from any thread; imports nothing of kvshelf.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Final

_SUBJECTS: Final = 4096
_PREFIX: Final = "kvshelf: "


def prefixed(handler: logging.Handler) -> logging.Handler:
    """Return a handler that writes as another does, each line behind kvshelf's name."""
    own = copy.copy(handler)
    own.filters = [*handler.filters, _prefix]
    return own


def _prefix(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith(_PREFIX):  # of another handler
        record.msg = f"{_PREFIX}{record.msg}"
    return True


class RateLimitedLog:
    """A logger that writes few lines; the lines above the limit become debug lines.

    Parameters
    ----------
    logger : Logger
        Where the lines go.
    lines : int
        Most lines in `seconds`; 0 for debug lines only.
    seconds : float
        The length of the interval.
    """

    def __init__(self, logger: logging.Logger, lines: int = 1, seconds: float = 60.0) -> None:
        self._logger = logger
        self._seconds = seconds
        self._lock = threading.Lock()
        #: When the latest lines were written.
        self._times: deque[float] = deque(maxlen=lines)
        self._subjects: OrderedDict[Hashable, None] = OrderedDict()

    def allows(self, about: Hashable | None = None) -> bool:
        """Whether a line may be written now. A line that is allowed counts as written.

        Parameters
        ----------
        about : Hashable, optional
            The subject of the line. Each of the latest 4096 subjects gets one line only.
        """
        now = time.monotonic()
        with self._lock:
            if not self._times.maxlen:
                return False
            full = len(self._times) == self._times.maxlen and now < self._times[0] + self._seconds
            if full or about in self._subjects:
                return False
            self._times.append(now)
            if about is not None:
                self._subjects[about] = None
                if len(self._subjects) > _SUBJECTS:
                    self._subjects.popitem(last=False)
            return True

    def warning(self, text: str, *values: object, about: Hashable | None = None) -> None:
        """Log a warning, see :meth:`allows`."""
        level = logging.WARNING if self.allows(about) else logging.DEBUG
        self._logger.log(level, text, *values, stacklevel=2)

    def error(
        self,
        text: str,
        *values: object,
        exc_info: BaseException | None = None,
        about: Hashable | None = None,
    ) -> None:
        """Log an error, see :meth:`allows`."""
        level = logging.ERROR if self.allows(about) else logging.DEBUG
        self._logger.log(level, text, *values, exc_info=exc_info, stacklevel=2)
