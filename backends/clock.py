"""The time of a storage: its own clock gives objects their times, not that of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

#: Seconds for which a storage's time is expected to advance as this machine's does.
_BELIEVED_SECONDS: Final = 600.0


class StorageClock:
    """The time by a storage's clock, which is asked now and then.

    Parameters
    ----------
    reported : Callable
        As :meth:`kvshelf.backends.Backend.now`.
    clock : Callable
        Seconds.
    """

    def __init__(
        self, reported: Callable[[], float | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reported = reported
        self._clock = clock
        #: What the storage's time is more than `clock`, and when that was learned.
        self._ahead = time.time() - clock()
        self._asked_at: float | None = None

    def ask(self) -> float:
        """Ask the storage; return its time, this machine's where the storage does not report it.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        reported = self._reported()
        # Time passes in the call: the storage's time is rather too early than too late.
        self._asked_at = self._clock()
        self._ahead = (time.time() if reported is None else reported) - self._asked_at
        return self.last()

    def now(self) -> float:
        """Return the storage's time; ask if that was not done lately. Raises as :meth:`ask`."""
        asked = self._asked_at
        if asked is None or self._clock() >= asked + _BELIEVED_SECONDS:
            return self.ask()
        return self.last()

    def last(self) -> float:
        """Return the storage's time by what it reported last; this machine's if it never did."""
        return self._clock() + self._ahead
