"""What is remembered of the existence of chunks, where asking the storage is dear.

Owns the rules by which an answer of the storage may stand for a while, and those by which it is
dropped before. It knows keys and times; it asks nobody.

Each thing that is learned has a *generation*: the moment, as a number, at which the storage was
asked for it, or at which something happened to the chunk. What is older never replaces what is
younger, however late it arrives. Where a chunk was forgotten to keep the memory bounded, its
generation goes on to hold for all chunks that are not remembered.

==========  ==============================================================  =================
a chunk is  because                                                         for
==========  ==============================================================  =================
seen        all its objects were                                            `seen_seconds`
implied     it lies before one that a search found                          `seen_seconds`
missing     one of its objects was                                          `missing_seconds`
a hole      a load did not find what a search had found                     `hole_seconds`
==========  ==============================================================  =================

Contracts
---------
* :meth:`Memo.stored` and :meth:`Memo.failed` may be called on an engine's step thread: they
  append to a queue. All else takes a lock, for as long as a pass over a prompt's chunks lasts.
* A store of our own ends "missing", a failed load ends "seen" and "implied", both at once: for
  every answer that was asked for before, too.
* A hole is asked for by every search until it is seen again, since a search could be fooled by
  it a second time.
* All times are bounded, and so is the number of chunks; the oldest are forgotten first.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

_EVENTS: Final = 65536


class Known(Enum):
    """What is known of one chunk."""

    NOTHING = "nothing"
    SEEN = "seen"
    IMPLIED = "implied"
    MISSING = "missing"


_THERE: Final = frozenset((Known.SEEN, Known.IMPLIED))


class Asked(NamedTuple):
    """When a question was put to the storage: as a generation, and in ``time.monotonic()``."""

    generation: int
    at: float


@dataclass(slots=True)
class _Entry:
    generation: int
    known: Known
    until: float
    #: Until when searches have to ask, whatever they find around it.
    hole_until: float = 0.0


@dataclass(slots=True)
class Prefix:
    """What is known of the leading chunks of a prompt.

    Attributes
    ----------
    found : int
        Number of leading chunks that need not be searched.
    end : int
        Index of the first chunk that is missing; the number of chunks when none is known to be.
    seen : set of int
        Chunks of which all objects were seen.
    holes : list of int
        Chunks before `end` that must be asked for.
    """

    found: int
    end: int
    seen: set[int]
    holes: list[int]


class Memo:
    """Remembers what was learned of chunks, see the module.

    Parameters
    ----------
    seen_seconds, missing_seconds, hole_seconds : float
    limit : int
        Most chunks remembered.
    """

    def __init__(
        self,
        seen_seconds: float = 60.0,
        missing_seconds: float = 1.0,
        hole_seconds: float = 1800.0,
        limit: int = 65536,
    ) -> None:
        self._seconds = {
            Known.SEEN: seen_seconds,
            Known.IMPLIED: seen_seconds,
            Known.MISSING: missing_seconds,
        }
        self._hole_seconds = hole_seconds
        self._limit = limit
        self._numbers = itertools.count(1)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        #: Generation of what was forgotten.
        self._floor = 0
        self._events: deque[tuple[int, bytes, bool]] = deque(maxlen=_EVENTS)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def ask(self) -> Asked:
        """Return when a question is asked that is about to be put to the storage."""
        return Asked(next(self._numbers), time.monotonic())

    # ------------------------------------------------------------------------- what happened

    def stored(self, key: bytes) -> None:
        """Note that a chunk was just published."""
        self._events.append((next(self._numbers), key, True))

    def failed(self, key: bytes) -> None:
        """Note that a load could not have an object of this chunk."""
        self._events.append((next(self._numbers), key, False))

    def clear(self) -> None:
        """Forget everything, and take no answer that was asked for before."""
        with self._lock:
            self._forget_all()

    def _forget_all(self) -> None:
        self._events.clear()
        self._entries.clear()
        self._floor = next(self._numbers)

    def _settle(self) -> None:
        if len(self._events) == _EVENTS:
            # Some were lost.
            self._forget_all()
        while self._events:
            generation, key, stored = self._events.popleft()
            entry = self._entries.get(key)
            if entry is None:
                entry = _Entry(generation, Known.NOTHING, 0.0)
            elif generation > entry.generation:
                entry.generation = generation
                if not stored or entry.known is Known.MISSING:
                    entry.known = Known.NOTHING
            if not stored:
                entry.hole_until = time.monotonic() + self._hole_seconds
            self._keep(key, entry)

    # ------------------------------------------------------------------------- what was learned

    def learn(self, key: bytes, there: bool, asked: Asked) -> None:
        """Take an answer of the storage about all objects of a chunk.

        Parameters
        ----------
        key : bytes
        there : bool
            Whether all are there. False: at least one is not.
        asked : Asked
            What :meth:`ask` returned before the storage was asked.
        """
        with self._lock:
            self._settle()
            self._learn(key, Known.SEEN if there else Known.MISSING, asked)

    def imply(self, keys: Sequence[bytes], asked: Asked) -> None:
        """Take the result of a search: these leading chunks of a prompt were found.

        Parameters
        ----------
        keys : Sequence of bytes
        asked : Asked
            What :meth:`ask` returned before the search began.
        """
        now = time.monotonic()
        with self._lock:
            self._settle()
            for key in keys:
                entry = self._entries.get(key)
                # What only a memo says is not remembered for longer by being said again.
                if entry is None or entry.until <= now or entry.known not in _THERE:
                    self._learn(key, Known.IMPLIED, asked)

    def _learn(self, key: bytes, known: Known, asked: Asked) -> None:
        entry = self._entries.get(key)
        if (self._floor if entry is None else entry.generation) > asked.generation:
            return
        if entry is None:
            entry = _Entry(0, known, 0.0)
        entry.generation, entry.known = asked.generation, known
        # An answer may have taken long, and was true when it was given.
        entry.until = asked.at + self._seconds[known]
        if known is Known.SEEN:
            entry.hole_until = 0.0
        self._keep(key, entry)

    def _keep(self, key: bytes, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        while len(self._entries) > self._limit:
            _, oldest = self._entries.popitem(last=False)
            self._floor = max(self._floor, oldest.generation)

    # ------------------------------------------------------------------------- what is known

    def since(self, key: bytes) -> int:
        """Return the generation before which no answer about a chunk is of use."""
        with self._lock:
            self._settle()
            entry = self._entries.get(key)
            return self._floor if entry is None else entry.generation

    def known(self, key: bytes) -> Known:
        """Return what is known of one chunk now."""
        with self._lock:
            self._settle()
            entry = self._entries.get(key)
            if entry is None or entry.until <= time.monotonic():
                return Known.NOTHING
            return entry.known

    def prefix(self, keys: Sequence[bytes]) -> Prefix:
        """Return what is known of the leading chunks of a prompt.

        Parameters
        ----------
        keys : Sequence of bytes
            Of all its chunks, in order.
        """
        now = time.monotonic()
        found = 0
        seen: set[int] = set()
        holes: list[int] = []
        with self._lock:
            self._settle()
            entries = self._entries
            for index, key in enumerate(keys):
                entry = entries.get(key)
                if entry is None:
                    continue
                known = entry.known if now < entry.until else Known.NOTHING
                if known is Known.MISSING:
                    return Prefix(found, index, seen, holes)
                if known is not Known.NOTHING:
                    found = index + 1
                if known is Known.SEEN:
                    seen.add(index)
                elif now < entry.hole_until:
                    holes.append(index)
        return Prefix(found, len(keys), seen, holes)
