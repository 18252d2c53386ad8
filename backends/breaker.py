"""A circuit breaker: decides when calls to a failing storage are made, and when not.

Owns the three states of one breaker, the failure counts that open it and the back-off after which
it is tried again. It knows neither the storage nor the calls:
:class:`~kvshelf.backends.guard.GuardedBackend` reports outcomes and acts on the state.

=========  ==========================================================  ======================
state      entered                                                     calls
=========  ==========================================================  ======================
closed     at first; when a trial in the half-open state succeeds      are made
open       on too many failures (below); on :meth:`Breaker.trip`       fail at once
half-open  from open, when the back-off has passed                     a few are made as trials
=========  ==========================================================  ======================

A closed breaker opens when :data:`LEAST_FAILURES` or more failures of one kind of call were
counted since the first of them, within :data:`WINDOW_SECONDS`, and no more successes than failures.
The back-off starts at 1 s and doubles up to a minute. A random part is subtracted, so that many
engines do not return at the same moment.

Any thread may call any method. `on_change` is called on the thread that causes the change, without
the breaker's lock.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

WINDOW_SECONDS: Final = 10.0
LEAST_FAILURES: Final = 4
# Not Python's global numbers: programs seed those, and their order is theirs.
_CHANCE: Final = random.SystemRandom()


class BreakerState(Enum):
    """State of a :class:`Breaker`."""

    CLOSED = "closed"
    HALF_OPEN = "half open"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a breaker stays open: seconds at first, and at most."""

    first: float = 1.0
    most: float = 60.0


DEFAULT_BACKOFF: Final = Backoff()


class Outcomes:
    """Outcomes of calls of one kind since the first failure in the current window."""

    __slots__ = ("began", "failures", "successes")

    def __init__(self) -> None:
        self.began = 0.0
        self.failures = 0
        # Counted without a lock: a lost success makes no difference.
        self.successes = 0


class Breaker:
    """One circuit breaker, see the module.

    Parameters
    ----------
    kinds : Sequence of str
        Kinds of calls. The failures of each kind are weighed on their own.
    backoff : Backoff
    on_change : Callable
        Called with the breaker when it opens from closed, with the reason, and when it closes,
        with "".

    Attributes
    ----------
    is_closed : bool
        Whether the state is closed; a plain attribute, quick to read.
    retry_at : float
        Time, by ``time.monotonic``, at which an open breaker may become half-open.
    failed_trials : int
        Trials that have failed since the breaker opened.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        backoff: Backoff,
        on_change: Callable[[Breaker, str], None],
    ) -> None:
        self.is_closed = True
        self.retry_at = 0.0
        self.failed_trials = 0
        self._outcomes = {kind: Outcomes() for kind in kinds}
        self._backoff = backoff
        self._delay = backoff.first
        self._state = BreakerState.CLOSED
        self._closed_at = 0.0
        self._on_change = on_change
        self._lock = threading.Lock()

    @property
    def state(self) -> BreakerState:
        """The current state."""
        return self._state

    def record_success(self, kind: str, times: int = 1) -> None:
        """Count calls that the storage answered."""
        self._outcomes[kind].successes += times

    def record_failure(self, kind: str, reason: str, weight: int = 1, least: float = 0.0) -> None:
        """Count a call that failed; open the breaker, as :meth:`trip`, on too many failures."""
        now = time.monotonic()
        outcomes = self._outcomes[kind]
        with self._lock:
            if self._state is BreakerState.CLOSED:
                if now - outcomes.began > WINDOW_SECONDS:
                    outcomes.began, outcomes.failures, outcomes.successes = now, 0, 0
                outcomes.failures += weight
                if outcomes.failures < LEAST_FAILURES or outcomes.successes > outcomes.failures:
                    return
            elif self._state is BreakerState.OPEN:
                return
        self.trip(reason, least)

    def trip(self, reason: str, least: float = 0.0, *, trial: bool = False) -> None:
        """Open the breaker; nothing happens when it is open already.

        Parameters
        ----------
        reason : str
            For the log.
        least : float
            Seconds for which it stays open at least.
        trial : bool
            A trial failed. A closed breaker then stays closed, because another trial succeeded.
        """
        now = time.monotonic()
        with self._lock:
            was = self._state
            if was is BreakerState.OPEN or (trial and was is BreakerState.CLOSED):
                return
            if was is BreakerState.CLOSED:
                self.failed_trials = 0
                if now - self._closed_at > self._backoff.most:
                    self._delay = self._backoff.first
            else:
                self.failed_trials += 1
            self._state = BreakerState.OPEN
            self.is_closed = False
            # A failing storage opens the breakers of many engines at the same time.
            self.retry_at = now + max(least, self._delay * _CHANCE.uniform(0.5, 1.0))
            self._delay = min(2 * self._delay, self._backoff.most)
        if was is BreakerState.CLOSED:
            self._on_change(self, reason)

    def try_half_open(self) -> bool:
        """Become half-open if the back-off has passed; return whether that happened now."""
        with self._lock:
            if self._state is not BreakerState.OPEN or time.monotonic() < self.retry_at:
                return False
            self._state = BreakerState.HALF_OPEN
            return True

    def allows(self) -> bool:
        """Whether calls may be made: the breaker is closed, or half-open by now."""
        return self.is_closed or self.try_half_open() or self._state is not BreakerState.OPEN

    def retry_soon(self) -> None:
        """Shorten the back-off to its first value: there is a sign that the storage works."""
        with self._lock:
            self.retry_at = min(self.retry_at, time.monotonic() + self._backoff.first)

    def close(self) -> None:
        """Close the breaker: all calls are made again."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return
            self._state = BreakerState.CLOSED
            self.is_closed = True
            self._closed_at = time.monotonic()
            for outcomes in self._outcomes.values():
                outcomes.began = 0.0
        self._on_change(self, "")
