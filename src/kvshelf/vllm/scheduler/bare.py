"""How long requests wait for KV that nobody has promised: their hand-overs are *bare*.

A router may say only that another engine prefills a prompt, or nothing at all to an engine that is
a consumer. What is missing of such a prompt is probably being stored, and perhaps never will be.

Contracts
---------
* A request waits one second for the first piece that is new, from when vLLM first asks for it, and
  then for each further piece twice the longest time that one took. A piece counts as one that took
  a tenth of a second at least: a look at a remote storage takes as long.
* Once three requests in a row have waited and nothing new has appeared, one in sixteen waits. Each
  further wait in vain halves that chance, down to one in 1,024. When something new appears, all
  wait again. The log says so once.
* Runs on the engine's step thread.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

logger = logging.getLogger(__name__)

#: Seconds in which the first piece must appear.
FIRST_SECONDS: Final = 1.0
#: The shortest time that a piece takes, in seconds, and how much longer the next one may.
_LEAST_GAP: Final = 0.1
_LONGER: Final = 2
#: Waits in vain after which one request in so many waits; and one in how many at least.
_MOST_IN_VAIN: Final = 3
_ONE_IN: Final = 16
_LEAST_ONE_IN: Final = 1024


@dataclass(slots=True)
class Patience:
    """How long one request waits.

    Attributes
    ----------
    longest : float
        Most seconds that it may wait in all.
    ends : float
        When it waits no longer; infinite before vLLM has asked for it.
    hopeful : bool
        Whether anything new was seen.
    """

    longest: float
    ends: float = math.inf
    hopeful: bool = False
    #: One in so many requests waited when this one arrived.
    _one_in: int = 1
    _gap: float = _LEAST_GAP
    _last: float = 0.0

    def begin(self, now: float) -> None:
        """Begin to wait."""
        self._last, self.ends = now, now + FIRST_SECONDS

    def note_new(self, now: float) -> None:
        """Note that pieces have appeared."""
        self._gap = max(self._gap, now - self._last)
        self._last, self.ends, self.hopeful = now, now + _LONGER * self._gap, True


class BareWaits:
    """Whether requests of one engine wait at all."""

    def __init__(self) -> None:
        self._in_vain = 0
        self._passed = 0
        self._one_in = 1
        self._said = False

    def may_begin(self, patience: Patience) -> bool:
        """Whether a request that has just arrived waits."""
        self._passed = (self._passed + 1) % self._one_in
        patience._one_in = self._one_in
        return self._passed == 0

    def ended(self, patience: Patience) -> None:
        """Note the end of a wait for pieces."""
        self._in_vain = 0 if patience.hopeful else self._in_vain + 1
        if patience.hopeful:
            self._one_in = 1
        elif self._one_in == patience._one_in > 1:
            # Requests that wait at the same time halve the chance once.
            self._one_in = min(2 * self._one_in, _LEAST_ONE_IN)
        elif self._in_vain == _MOST_IN_VAIN:
            self._one_in = _ONE_IN
        if self._in_vain == _MOST_IN_VAIN and not self._said:
            self._said = True
            logger.warning(
                "%d requests in a row have waited %g s for KV that another engine was to store, and"
                " nothing appeared: until something does, one such request in %d waits. Requests"
                " wait that say do_remote_prefill, and with kv_role kv_consumer all that bring no"
                " kv_transfer_params. Where no other engine prefills, use kv_role kv_both, with"
                " read_only: true if it must not store",
                _MOST_IN_VAIN,
                FIRST_SECONDS,
                _ONE_IN,
            )
