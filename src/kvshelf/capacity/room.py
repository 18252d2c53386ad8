"""How much may still be stored on a shelf: ``min_free`` and ``max_bytes`` for stores.

Owns the question that every store asks (:meth:`Room.allows`), and the estimate of a shelf's bytes
between two listings. The sweeper's thread (:mod:`kvshelf.capacity.sweeper`) reads the storage and
tells (:meth:`Room.update`); writes take their room when they begin (:meth:`Room.begin`), and give
it back if nothing was written.

The estimate is what the last listing found, and since then what this process wrote, or what the
filesystem's free space has become less by, if that is more: what other engines wrote, and other
programs. Space that somebody frees meanwhile hides nothing of that: decreases from one look to the
next are added up, with what this process deleted in between. A storage that does not tell its free
space leaves only the first until the next listing. Writes under way are added to either.

Other processes see the same room. So this one uses at most half of it, or as much as one chunk
takes, until the sweeper looks again, which it does soon when a quarter is used up.

Contracts
---------
* :meth:`Room.allows`, :meth:`Room.begin` and :meth:`Room.end` may be called on any thread, and
  never block.
* What is not known bounds nothing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import Final

from kvshelf.backends.base import Space
from kvshelf.capacity.lease import Finding
from kvshelf.config import CapacityConfig
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters

logger = logging.getLogger(__name__)

#: ``min_free`` unless it is set: a part of the storage, at most so many bytes.
FREE_PART: Final = 0.05
FREE_BYTES: Final = 20 << 30
#: The same for a filesystem in memory, whatever its size.
FREE_PART_IN_MEMORY: Final = 0.10

#: Share of ``max_bytes`` from which on room is short.
_SHORT: Final = 0.9
#: Part of the room that this process uses from one look of the sweeper to the next.
_OWN_PART: Final = 0.5
#: Part of the room that is used up when the sweeper looks again.
_WAKE_PART: Final = 0.25
#: Seconds of own writes that are added up in one number, and how many such numbers are kept.
_WRITES_SECONDS: Final = 1.0
_MOST_WRITES: Final = 7200


def least_free(space: Space, min_free: int | None) -> int:
    """Return the bytes that stores leave free on a storage.

    Parameters
    ----------
    space : Space
    min_free : int or None
        The option; None: as much as suits the storage.
    """
    if min_free is not None:
        return min_free
    if space.memory:
        return int(space.total * FREE_PART_IN_MEMORY)
    return min(int(space.total * FREE_PART), FREE_BYTES)


class Room:
    """The room for stores on one shelf, as one process sees it.

    Parameters
    ----------
    capacity : CapacityConfig
    counters : Counters
        Gets the gauges ``shelf_used_bytes``, ``shelf_limit_bytes`` and ``storage_free_bytes``.
    url : str
        The shelf, for log lines.

    Attributes
    ----------
    is_short : bool
        Little is left of `max_bytes`.
    largest : int
        Most bytes that a store has asked for: those of a chunk, or of a kind of it.
    wake : threading.Event
        The sweeper should look at the storage soon: the first store has asked since its last look,
        or a quarter of the room is used up.
    """

    def __init__(self, capacity: CapacityConfig, counters: Counters, url: str) -> None:
        self.wake = threading.Event()
        self._capacity = capacity
        self._counters = counters
        self._url = url
        self._log = RateLimitedLog(logger, lines=2)
        self._lock = threading.Lock()
        #: Bytes that may be written to the shelf, as the last update said.
        self._room = math.inf
        #: Bytes of the writes that have begun since then, and of all that are under way.
        self._taken = 0
        self._begun = 0
        self.largest = 0
        self._why: tuple[str, str] = ("", "")
        self._asked = False
        self.is_short = False
        #: What this process wrote: when, and bytes; the latest last.
        self._writes: deque[tuple[float, int]] = deque(maxlen=_MOST_WRITES)
        #: By how much the free space had decreased at a look, and what was free at the last one.
        self._decreases: deque[tuple[float, int]] = deque(maxlen=_MOST_WRITES)
        self._free: int | None = None

    # ------------------------------------------------------------- stores

    def allows(self, nbytes: int) -> bool:
        """Whether `nbytes` may be stored now. The log says once that there is no room."""
        return self._ask(nbytes, take=False)

    def begin(self, nbytes: int) -> bool:
        """Take the room for a write that begins now; False, and nothing is taken, if it may not."""
        return self._ask(nbytes, take=True)

    def _ask(self, nbytes: int, take: bool) -> bool:
        with self._lock:
            self.largest = max(self.largest, nbytes)
            most = min(self._room, max(self._room * _OWN_PART, self.largest))
            allowed, full = self._taken + nbytes <= most, self._taken + nbytes > self._room
            about, text = self._why
            wake = not self._asked
            if allowed and take:
                self._taken += nbytes
                self._begun += nbytes
                wake = wake or self._taken > self._room * _WAKE_PART
        if wake:
            self._asked = True
            self.wake.set()
        if full:
            self._log.warning("%s: %s", self._url, text, about=about)
        return allowed

    def end(self, nbytes: int, written: bool) -> None:
        """Note that a write which has begun is over, and whether it wrote anything."""
        now = time.monotonic()
        with self._lock:
            self._begun -= nbytes
            if not written:
                # What began before the last update is not in it.
                self._taken = max(0, self._taken - nbytes)
            elif self._writes and now < self._writes[-1][0] + _WRITES_SECONDS:
                begin, before = self._writes.pop()
                self._writes.append((begin, before + nbytes))
            else:
                self._writes.append((now, nbytes))

    # ------------------------------------------------------------- the sweeper

    def take_asked(self) -> bool:
        """Whether a store has asked since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def written_since(self, seconds: float) -> int:
        """Return the bytes that this process wrote in the last `seconds`, or a little longer."""
        with self._lock:
            # A number is of the second after its time.
            return _sum_since(self._writes, time.monotonic() - seconds - _WRITES_SECONDS)

    def look(self, space: Space | None, freed: int = 0) -> None:
        """Note how much is free now; the sweeper's thread, at each look at the storage.

        Parameters
        ----------
        space : Space or None
        freed : int
            Bytes that this process has deleted since the last look: they hide no writes.
        """
        if space is None:
            return
        if self._free is not None and space.free < self._free + freed:
            self._decreases.append((time.monotonic(), self._free + freed - space.free))
        self._free = space.free

    def estimate(self, finding: Finding, space: Space | None, now: float) -> int:
        """Return the bytes that are on the shelf, judged by its last listing.

        Parameters
        ----------
        finding : Finding
        space : Space or None
            The storage's room now.
        now : float
            The storage's time.
        """
        seconds = max(0.0, now - finding.at)
        more = self.written_since(seconds)
        if space is not None and finding.free is not None:
            decreases = _sum_since(self._decreases, time.monotonic() - seconds)
            more = max(more, finding.free - space.free, decreases)
        return finding.nbytes + more + self._begun

    def update(self, space: Space | None, used: int | None, max_bytes: int | None) -> None:
        """Take what is known of the storage and of the shelf now.

        Parameters
        ----------
        space : Space or None
            The storage's room.
        used : int or None
            Bytes on the shelf.
        max_bytes : int or None
            Its bound.
        """
        left, why = math.inf, ("", "")
        if space is not None:
            self._counters.set_gauge("storage_free_bytes", space.free)
            kept = least_free(space, self._capacity.min_free)
            if kept:
                left = space.free - kept - self._begun
                why = (
                    "min_free",
                    f"{space.free} bytes are free, and stores leave {kept} (min_free): nothing is"
                    " stored until more is free; loads continue",
                )
        if used is not None:
            self._counters.set_gauge("shelf_used_bytes", used)
        if max_bytes is not None:
            self._counters.set_gauge("shelf_limit_bytes", max_bytes)
            if used is not None and max_bytes - used < left:
                left = max_bytes - used
                why = (
                    "max_bytes",
                    f"it holds {used} bytes, and max_bytes is {max_bytes}: nothing is stored until"
                    " older chunks were deleted; loads continue",
                )
        self.is_short = bool(used and max_bytes and used > max_bytes * _SHORT)
        with self._lock:
            self._room = left
            self._taken = 0
            self._why = why


def _sum_since(noted: deque[tuple[float, int]], since: float) -> int:
    """Return the bytes that were noted since a time."""
    total = 0
    for at, nbytes in reversed(noted):
        if at < since:
            break
        total += nbytes
    return total
