"""The presence cache: answers about the existence of chunks, for high-latency storage.

Owns the rules by which an answer of the storage holds for a while, and those by which it is
dropped before. It knows keys and times; it does not call the storage. Each kind of a chunk is
remembered for itself, by its kind key (:func:`kvshelf.format.kinds.kind_key`).

Each thing that is learned has a *generation*: a number for the moment of the probe, or of an event
that happened to the chunk. Answers are ordered by the time of their probe: a stale one never
replaces a newer one. When an entry is evicted, its generation becomes the floor for every key
without an entry.

===========  ===========================================================  =================
a chunk is   because                                                      for
===========  ===========================================================  =================
seen         all its objects were present                                 `seen_seconds`
inferred     it lies before a chunk that a search found                   `seen_seconds`
missing      one of its objects was missing                               `missing_seconds`
a gap        a load did not find an object that a search had inferred     `gap_seconds`
===========  ===========================================================  =================

Contracts
---------
* :meth:`PresenceCache.note_published` and :meth:`PresenceCache.note_failed` may be called on an
  engine's step thread: they append to a queue. All other methods take a lock, for as long as a
  pass over a prompt's chunks lasts.
* A store of this engine ends "missing", a failed load ends "seen" and "inferred", both at once:
  also for every answer whose probe was sent before.
* Every search probes a gap until it is seen again, since a search could be wrong about it twice.
* All times are bounded, and so is the number of entries; the oldest are evicted first.
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
    """What is known about one chunk."""

    NOTHING = "nothing"
    SEEN = "seen"
    INFERRED = "inferred"
    MISSING = "missing"


_THERE: Final = frozenset((Known.SEEN, Known.INFERRED))


class Asked(NamedTuple):
    """When a probe was sent: as a generation, and in ``time.monotonic()``."""

    generation: int
    at: float


@dataclass(slots=True)
class _Entry:
    generation: int
    known: Known
    until: float
    #: Until when searches have to probe the chunk, whatever they find around it.
    gap_until: float = 0.0


@dataclass(slots=True)
class Prefix:
    """What is known about the leading chunks of a prompt.

    Attributes
    ----------
    found : int
        Number of leading chunks that need not be searched.
    end : int
        Index of the first chunk that is missing; the number of chunks when none is known to be.
    seen : set of int
        Chunks of which all objects were seen.
    gaps : list of int
        Chunks before `end` that must be probed.
    """

    found: int
    end: int
    seen: set[int]
    gaps: list[int]


class PresenceCache:
    """What was learned about chunks, see the module.

    Parameters
    ----------
    seen_seconds, missing_seconds, gap_seconds : float
    limit : int
        Most entries.
    """

    def __init__(
        self,
        seen_seconds: float = 60.0,
        missing_seconds: float = 1.0,
        gap_seconds: float = 1800.0,
        limit: int = 65536,
    ) -> None:
        self._seconds = {
            Known.SEEN: seen_seconds,
            Known.INFERRED: seen_seconds,
            Known.MISSING: missing_seconds,
        }
        self._gap_seconds = gap_seconds
        self._limit = limit
        self._numbers = itertools.count(1)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        #: The youngest generation of an entry that was evicted.
        self._floor = 0
        self._events: deque[tuple[int, bytes, bool]] = deque(maxlen=_EVENTS)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def ask(self) -> Asked:
        """Return the moment for a probe that is about to be sent."""
        return Asked(next(self._numbers), time.monotonic())

    # ------------------------------------------------------------------------- events

    def note_published(self, key: bytes) -> None:
        """Note that a chunk was just published."""
        self._events.append((next(self._numbers), key, True))

    def note_failed(self, key: bytes) -> None:
        """Note that a load failed for an object of this chunk."""
        self._events.append((next(self._numbers), key, False))

    def clear(self) -> None:
        """Forget everything, and accept no answer to a probe that was sent before."""
        with self._lock:
            self._forget_all()

    def _forget_all(self) -> None:
        self._events.clear()
        self._entries.clear()
        self._floor = next(self._numbers)

    def _settle(self) -> None:
        if len(self._events) == _EVENTS:
            # Some events were lost.
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
                entry.gap_until = time.monotonic() + self._gap_seconds
            self._keep(key, entry)

    # ------------------------------------------------------------------------- answers

    def learn(self, key: bytes, there: bool, asked: Asked) -> None:
        """Take an answer of the storage about all objects of a chunk.

        Parameters
        ----------
        key : bytes
        there : bool
            Whether all are there. False: at least one is not.
        asked : Asked
            What :meth:`ask` returned before the probe was sent.
        """
        with self._lock:
            self._settle()
            self._learn(key, Known.SEEN if there else Known.MISSING, asked)

    def infer(self, keys: Sequence[bytes], asked: Asked) -> None:
        """Take the result of a search: these leading chunks of a prompt were found.

        Parameters
        ----------
        keys : Sequence of bytes
        asked : Asked
            What :meth:`ask` returned before the search began.
        """
        now = time.monotonic()
        until = asked.at + self._seconds[Known.INFERRED]
        with self._lock:
            self._settle()
            entries, current = self._entries, asked.generation >= self._floor
            for key in keys:
                entry = entries.get(key)
                if entry is None:
                    # As _learn does, and quicker: most chunks of a long prompt are new here.
                    if current:
                        entries[key] = _Entry(asked.generation, Known.INFERRED, until)
                # An answer of this cache must not extend its own time.
                elif entry.until <= now or entry.known not in _THERE:
                    self._learn(key, Known.INFERRED, asked)
            self._trim()

    def _learn(self, key: bytes, known: Known, asked: Asked) -> None:
        entry = self._entries.get(key)
        if (self._floor if entry is None else entry.generation) > asked.generation:
            return
        if entry is None:
            entry = _Entry(0, known, 0.0)
        entry.generation, entry.known = asked.generation, known
        # An answer that took long was true when its probe was sent.
        entry.until = asked.at + self._seconds[known]
        if known is Known.SEEN:
            entry.gap_until = 0.0
        self._keep(key, entry)

    def _keep(self, key: bytes, entry: _Entry) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        self._trim()

    def _trim(self) -> None:
        while len(self._entries) > self._limit:
            _, oldest = self._entries.popitem(last=False)
            self._floor = max(self._floor, oldest.generation)

    # ------------------------------------------------------------------------- knowledge

    def since(self, key: bytes) -> int:
        """Return the generation before which an answer about a chunk is out of date."""
        with self._lock:
            self._settle()
            entry = self._entries.get(key)
            return self._floor if entry is None else entry.generation

    def known(self, keys: Sequence[bytes]) -> list[Known]:
        """Return what is known about each of some chunks."""
        now = time.monotonic()
        with self._lock:
            self._settle()
            entries = [self._entries.get(key) for key in keys]
            return [
                Known.NOTHING if entry is None or now >= entry.until else entry.known
                for entry in entries
            ]

    def any_gap(self, keys: Sequence[bytes]) -> bool:
        """Whether one of some chunks is a gap: a load failed for it, and it was not seen since."""
        now = time.monotonic()
        with self._lock:
            self._settle()
            entries = [self._entries.get(key) for key in keys]
            return any(entry is not None and now < entry.gap_until for entry in entries)

    def prefix(self, keys: Sequence[bytes]) -> Prefix:
        """Return what is known about the leading chunks of a prompt.

        Parameters
        ----------
        keys : Sequence of bytes
            Of all its chunks, in order.
        """
        now = time.monotonic()
        found = 0
        seen: set[int] = set()
        gaps: list[int] = []
        with self._lock:
            self._settle()
            entries = self._entries
            if entries.keys().isdisjoint(keys):
                return Prefix(found, len(keys), seen, gaps)
            for index, key in enumerate(keys):
                entry = entries.get(key)
                if entry is None:
                    continue
                known = entry.known if now < entry.until else Known.NOTHING
                if known is Known.MISSING:
                    return Prefix(found, index, seen, gaps)
                if known is not Known.NOTHING:
                    found = index + 1
                if known is Known.SEEN:
                    seen.add(index)
                elif now < entry.gap_until:
                    gaps.append(index)
        return Prefix(found, len(keys), seen, gaps)
