"""The rules by which files of a shelf are deleted, as values.

==============  ================================================================================
reason          what is deleted
==============  ================================================================================
temporary       temporaries that nothing has changed for an hour: also what was set aside
marker, tail    markers and tails of hand-overs at some age
orphan          chunks whose parent is gone, a day after their last use
age             what was not used for some time
group           the oldest chunks of a salt group that holds too many bytes
size            the oldest chunks of all while the shelf holds too many bytes
chosen          what a command's options select
==============  ================================================================================

:mod:`kvshelf.capacity.eviction` has the order in which chunks are deleted to free space.

A bound in bytes acts when 90 % of it are used, and deletes until 80 % are. Ages count by the
earlier of the storage's clock and this machine's. While these are more than an hour apart nothing
is deleted because of its age.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class Rule(IntEnum):
    """Why something is deleted, see the module."""

    TEMPORARY = 0
    MARKER = 1
    TAIL = 2
    ORPHAN = 3
    AGE = 4
    GROUP = 5
    SIZE = 6
    CHOSEN = 7


@dataclass(frozen=True, slots=True)
class Choice:
    """What a command deletes of an inventory: files for which all conditions hold.

    Attributes
    ----------
    group : str or None
        Only of this salt group: ``_`` or 16 hex.
    unused_for : float or None
        Only what was neither stored nor used for so many seconds. Without it, uses do not matter:
        what is chosen is deleted, and is not checked again.
    pinned : bool
        Also what is pinned.
    leftovers : bool
        Also all markers.
    """

    group: str | None = None
    unused_for: float | None = None
    pinned: bool = False
    leftovers: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """What is deleted from a shelf, see the module. None: the rule is off.

    Attributes
    ----------
    temporaries, markers, tails, orphans : float or None
        Ages in seconds.
    max_age : float or None
        Seconds after its last use at which a chunk is deleted.
    group_max_bytes : int or None
        Most bytes of each salt group of a namespace. Requests without a salt are in none.
    max_bytes : int or None
        Most bytes of the whole shelf.
    choice : Choice or None
    largest : int
        Bytes of the largest chunk that is stored at present: a bound in bytes leaves space for it.
    high, low : float
        Shares of a bound in bytes at which deletions begin, and end, unless that is too little.
    spare : int
        Bytes that are picked because of `max_bytes` beyond those that must be deleted now, for
        later.
    """

    temporaries: float | None = 3600.0
    markers: float | None = 3600.0
    tails: float | None = 3600.0
    #: The parent may come back.
    orphans: float | None = 86400.0
    max_age: float | None = None
    group_max_bytes: int | None = None
    max_bytes: int | None = None
    choice: Choice | None = None
    largest: int = 0
    high: float = 0.9
    low: float = 0.8
    spare: int = 0

    def to_free(self, held: int, bound: int | None) -> int:
        """Return how many of `held` bytes must be deleted because of a bound in bytes."""
        if bound is None:
            return 0
        # An object larger than the bound is never stored, however much is deleted.
        most = bound - self.largest if self.largest <= bound else bound
        return held - min(int(self.low * bound), most) if held > min(self.high * bound, most) else 0


#: Age in seconds at which tails and the markers of hand-overs are deleted. No engine waits so long
#: for a hand-over, and a tail serves one prompt only.
KEEP_TAILS: Final = 3600.0

#: All rules are off.
NO_RULES: Final = Rules(None, None, None, None)
