"""How much may still be stored on a shelf: free space and ``max_bytes``.

Owns the check before every store (:meth:`ShelfBound.allows`), and the estimate of a shelf's bytes
between two listings. The sweeper's thread (:mod:`kvshelf.capacity.sweeper`) reads the storage and
calls :meth:`ShelfBound.update`; writes reserve space when they begin (:meth:`ShelfBound.begin`),
and give it back if nothing was written.

The estimate is what the last listing found, plus what this process wrote since then or the decrease
of the filesystem's free space, if that is more: other engines and programs write too. Space that is
freed meanwhile hides none of these writes: decreases from one look to the next are added up, with
what this process deleted in between. Where the storage does not report its free space, writers
publish what they wrote (:mod:`kvshelf.capacity.written`). Writes under way are added to any of
them.

Other processes see the same free space. So this one uses at most half of it, or as much as one
chunk takes, until the sweeper looks again, which it does soon when a quarter is used up.

Contracts
---------
* :meth:`ShelfBound.allows`, :meth:`ShelfBound.begin` and :meth:`ShelfBound.end` may be called on
  any thread, and never block.
* What is not known bounds nothing.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from kvshelf.backends.base import Space
from kvshelf.capacity.lease import Finding
from kvshelf.config import CapacityConfig
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters

logger = logging.getLogger(__name__)

#: What stores leave free: a part of the storage, at most this many bytes.
FREE_PART: Final = 0.05
FREE_BYTES: Final = 20 << 30
#: The same for a filesystem in memory, whatever its size.
FREE_PART_IN_MEMORY: Final = 0.10

#: Share of ``max_bytes`` from which on space is short.
_SHORT: Final = 0.9
#: Part of the space that this process uses from one look of the sweeper to the next.
_OWN_PART: Final = 0.5
#: Part of the space that is used up when the sweeper looks again.
_WAKE_PART: Final = 0.25
#: Seconds from one look of the sweeper to the next that a store asks for: the first one after a
#: look, and one that has used up much of the space.
LOOK_SECONDS: Final = 1.0
HURRIED_SECONDS: Final = 0.1
#: Pieces of a sum; an even number.
_MOST_PIECES: Final = 2048


def least_free(space: Space) -> int:
    """Return the bytes that stores leave free on a storage."""
    if space.memory:
        return int(space.total * FREE_PART_IN_MEMORY)
    return min(int(space.total * FREE_PART), FREE_BYTES)


class Sum:
    """A sum that grows, and by how much it has grown since any time: exactly, or a little more.

    Attributes
    ----------
    value : int
    """

    def __init__(self) -> None:
        self.value = 0
        #: When the last part of each piece came, and the sum before it. Where they become many, two
        #: pieces become one.
        self._ends: list[float] = []
        self._before: list[int] = []
        self._begun = -math.inf

    def add(self, nbytes: int) -> None:
        """Add an amount at the current time."""
        now = time.monotonic()
        if now < self._begun + HURRIED_SECONDS:
            self._ends[-1] = now
        else:
            self._begun = now
            if len(self._ends) >= _MOST_PIECES:
                self._ends, self._before = self._ends[1::2], self._before[::2]
            self._ends.append(now)
            self._before.append(self.value)
        self.value += nbytes

    def since(self, seconds: float) -> int:
        """Return what was added in the last `seconds`, and perhaps a little before."""
        place = bisect_left(self._ends, time.monotonic() - seconds)
        return self.value - self._before[place] if place < len(self._ends) else 0


class ShelfBound:
    """What bounds the stores of one process to a shelf.

    Parameters
    ----------
    capacity : CapacityConfig
    counters : Counters
        Gets the gauges ``shelf_used_bytes``, ``shelf_limit_bytes`` and ``storage_free_bytes``.
    url : str
        The shelf, for log lines.
    wake : Callable
        Called when the sweeper should look at the storage soon: the first store has come since its
        last look, or a quarter of the space is used up. Must not block.

    Attributes
    ----------
    left : float
        Bytes that may be written to the shelf, as the last update said.
    asked : bool
        A store has come since the last look.
    is_short : bool
        Little is left of `max_bytes`.
    is_urgent : bool
        Much of the space is used up: look at once.
    refuses : bool
        Stores were refused lately.
    largest : int
        Most bytes that a store has requested: those of a chunk, or of a kind of it.
    """

    def __init__(
        self, capacity: CapacityConfig, counters: Counters, url: str, wake: Callable[[], None]
    ) -> None:
        self._wake = wake
        self._capacity = capacity
        self._counters = counters
        self._url = url
        self._log = RateLimitedLog(logger, lines=2)
        self._lock = threading.Lock()
        self.left = math.inf
        #: Bytes of the writes that have begun since then, and of all that are under way.
        self._taken = 0
        self._begun = 0
        self.largest = 0
        self._why: tuple[str, str] = ("", "")
        self.asked = self._refused = False
        self.is_short = self.is_urgent = self.refuses = False
        #: What this process wrote, and the sum of the decreases of free space between two looks.
        self._written = Sum()
        self._decreased = Sum()
        self._free: int | None = None
        self._freed = 0

    # ------------------------------------------------------------- stores

    def allows(self, nbytes: int) -> bool:
        """Whether `nbytes` may be stored now. The log says once that there is no space."""
        return self._ask(nbytes, take=False)

    def begin(self, nbytes: int) -> bool:
        """Reserve space for a write that begins now; False, and nothing is reserved, if not."""
        return self._ask(nbytes, take=True)

    def _ask(self, nbytes: int, take: bool) -> bool:
        with self._lock:
            self.largest = max(self.largest, nbytes)
            most = min(self.left, max(self.left * _OWN_PART, self.largest))
            allowed, full = self._taken + nbytes <= most, self._taken + nbytes > self.left
            about, text = self._why
            wake, self.asked = not self.asked, True
            if allowed and take:
                self._taken += nbytes
                self._begun += nbytes
            self._refused |= not allowed
            # A store that finds no space at all does not wake the sweeper: deletions free some.
            if not full and not self.is_urgent and self._taken > self.left * _WAKE_PART:
                wake = self.is_urgent = True
        if wake:
            self._wake()
        if full:
            self._log.warning("%s: %s", self._url, text, about=about)
        return allowed

    def end(self, nbytes: int, written: bool) -> None:
        """Note that a write has ended, and whether it wrote anything."""
        with self._lock:
            self._begun -= nbytes
            if written:
                self._written.add(nbytes)
            else:
                # Writes that began before the last update are not in it.
                self._taken = max(0, self._taken - nbytes)

    # ------------------------------------------------------------- the sweeper

    def take_asked(self) -> bool:
        """Whether a store has come since the last call."""
        asked, self.asked = self.asked, False
        return asked

    @property
    def written(self) -> int:
        """The bytes that this process has written."""
        return self._written.value

    def is_full(self, space: Space | None) -> bool:
        """Whether less is free than stores leave."""
        return space is not None and space.free < least_free(space)

    def free(self, nbytes: int) -> None:
        """Note the bytes that this process has deleted since the last look: they hide no writes."""
        self._freed += nbytes

    def look(self, space: Space | None) -> None:
        """Note how much is free now; the sweeper's thread, at each look at the storage."""
        if space is None:
            return
        if self._free is not None and space.free < self._free + self._freed:
            self._decreased.add(self._free + self._freed - space.free)
        self._free, self._freed = space.free, 0

    def estimate(
        self, finding: Finding, space: Space | None, now: float, published: int | None = None
    ) -> int:
        """Return the bytes that are on the shelf, judged by its last listing.

        Parameters
        ----------
        finding : Finding
        space : Space or None
            The storage's space now.
        now : float
            The storage's time.
        published : int or None
            The bytes that all writers have published.
        """
        seconds = max(0.0, now - finding.at)
        with self._lock:
            more = self._written.since(seconds)
        if space is not None and finding.free is not None:
            more = max(more, finding.free - space.free, self._decreased.since(seconds))
        if published is not None and finding.written is not None:
            more = max(more, published - finding.written)
        return finding.nbytes + more + self._begun

    def update(self, space: Space | None, used: int | None, max_bytes: int | None) -> None:
        """Take what is known of the storage and of the shelf now.

        Parameters
        ----------
        space : Space or None
            The storage's space.
        used : int or None
            Bytes on the shelf.
        max_bytes : int or None
            Its bound.
        """
        left, why = math.inf, ("", "")
        if space is not None:
            self._counters.set_gauge("storage_free_bytes", space.free)
            kept = least_free(space)
            if kept:
                left = space.free - kept - self._begun
                why = (
                    "free",
                    f"{space.free} bytes are free, and stores leave {kept} free: nothing is"
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
            self.left = left
            self._taken = 0
            self._why = why
            self.is_urgent = False
            self.refuses, self._refused = self._refused, False
