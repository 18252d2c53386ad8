"""Probes of objects for searches: which pieces are there.

A search asks for *pieces*: one kind of one chunk, by all its objects or the first of them. It has
one answer for each.

Owns how these probes are sent. :class:`Probes` sends each, and remembers nothing.
:class:`SharedProbes` is for high-latency storage: it sends the probes of several searches at once,
each probe once, and none that another thread has sent already; and it learns what rounds take.

Contracts
---------
* A piece is present if all objects that were asked for are. An error of one of them is an error of
  the piece, which does not mean that it is missing.
* All methods block on the storage, for no longer than its deadline; any thread may call.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import islice, repeat
from typing import NamedTuple, TypeAlias

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import Kind, kind_key
from kvshelf.metrics import Counters
from kvshelf.shelf.presence import Asked, PresenceCache
from kvshelf.shelf.view import ObjectRef, Presence, ShelfView, find_together

#: Most chunks that one search probes in one round.
MOST_POINTS = 64

#: One object: its kind key, and its shard.
_Object: TypeAlias = "tuple[bytes, int]"


class Ask(NamedTuple):
    """One piece to look for.

    Attributes
    ----------
    kind : Kind
    chunk : Chunk
    shards : int
        Look for the first so many objects of the piece.
    """

    kind: Kind
    chunk: Chunk
    shards: int


class Answer(NamedTuple):
    """What the storage says about a piece.

    Attributes
    ----------
    presence : Presence
        PRESENT, MISSING or ERROR.
    asked : Asked
        When its first probe was sent.
    """

    presence: Presence
    asked: Asked

    @property
    def there(self) -> bool:
        """Whether all objects that were asked for are present."""
        return self.presence is Presence.PRESENT


class RoundCosts:
    """The time that a round takes: a latency, and a little for each probe.

    Parameters
    ----------
    latency : float
        Seconds that one probe takes, as the storage states it.
    concurrency : int
        Probes that take little longer than one, as the storage states it.
    """

    #: A round of this many probes shows as much of the one cost as of the other.
    _SCALE = 16.0

    def __init__(self, latency: float, concurrency: int) -> None:
        self.latency = latency
        self.each = latency / max(1, concurrency)

    def note(self, probes: int, seconds: float) -> None:
        """Learn from a round."""
        size = probes / self._SCALE
        expected = self.latency + probes * self.each
        # One slow round says little about the next.
        error = (min(seconds, 4 * expected) - expected) / (2 * (1 + size * size))
        self.latency = max(self.latency + error, 1e-6)
        self.each = max(self.each + error * size / self._SCALE, 1e-8)

    def points(self, chunks: int, weight: int) -> int:
        """Return the number of chunks to probe in a round so that the search takes least time.

        Parameters
        ----------
        chunks : int
            Number of chunks that are searched.
        weight : int
            Probes of the round for each of these chunks.
        """
        best, least = 1, float("inf")
        for rounds in range(1, chunks.bit_length() + 1):
            points = max(1, math.ceil((chunks + 1) ** (1 / rounds) - 1e-9) - 1)
            seconds = rounds * (self.latency + points * weight * self.each)
            if points <= MOST_POINTS and seconds < least:
                best, least = points, seconds
        return best

    def is_worth(self, probes: int) -> bool:
        """Whether this many more probes take less time than another round."""
        return probes * self.each < self.latency


class Probes:
    """Sends probes, each for itself.

    Parameters
    ----------
    views : Mapping[Kind, ShelfView]
        The objects of each kind.
    counters : Counters
    costs : RoundCosts
    """

    def __init__(
        self, views: Mapping[Kind, ShelfView], counters: Counters, costs: RoundCosts
    ) -> None:
        self.costs = costs
        self._views = views
        self._counters = counters

    def send(self, asks: Sequence[Ask]) -> list[Answer]:
        """Look for pieces; return an answer for each."""
        refs: dict[Kind, list[ObjectRef]] = {}
        for kind, chunk, shards in asks:
            # Quicker than a call of the class for each, which lookups would notice.
            pairs = zip(repeat(chunk), range(shards))
            refs.setdefault(kind, []).extend(map(ObjectRef._make, pairs))
        asked = Asked(0, time.monotonic())
        found = self._find(refs)
        if all(of_kind.count(Presence.PRESENT) == len(of_kind) for of_kind in found.values()):
            # The usual answer, by far the quickest.
            return [Answer(Presence.PRESENT, asked)] * len(asks)
        answers = {kind: iter(of_kind) for kind, of_kind in found.items()}
        return [self._fold(list(islice(answers[kind], n)), asked) for kind, _, n in asks]

    def _find(self, refs: Mapping[Kind, Sequence[ObjectRef]]) -> dict[Kind, list[Presence]]:
        """Probe objects of all kinds, in one call of the storage."""
        self._counters.add("probes", sum(map(len, refs.values())))
        if len(refs) == 1:
            ((kind, of_kind),) = refs.items()
            return {kind: self._views[kind].find(of_kind)}
        asked = [(self._views[kind], of_kind) for kind, of_kind in refs.items()]
        return dict(zip(refs, find_together(asked), strict=True))

    def _fold(self, found: Sequence[Presence], asked: Asked) -> Answer:
        """Return the answer about a piece, from those about its objects."""
        if found.count(Presence.PRESENT) == len(found):
            return Answer(Presence.PRESENT, asked)
        errors = found.count(Presence.ERROR)
        if errors:
            self._counters.add("probe_errors", errors)
        return Answer(Presence.ERROR if errors else Presence.MISSING, asked)


class _Flight:
    """Probes that one thread has sent to the storage, and their answers."""

    __slots__ = ("answers", "asked", "over", "until")

    def __init__(self, asked: Asked, until: float) -> None:
        self.asked = asked
        #: Other threads wait for the answers until then.
        self.until = until
        self.answers: dict[_Object, Presence] = {}
        self.over = threading.Event()


class SharedProbes(Probes):
    """Sends the probes of several searches and threads to a high-latency storage, each once.

    Parameters
    ----------
    views, counters, costs
        As for :class:`Probes`.
    cache : PresenceCache
        Says since when an answer about a chunk is valid.
    seconds : float
        Deadline of a probe.
    """

    def __init__(
        self,
        views: Mapping[Kind, ShelfView],
        counters: Counters,
        costs: RoundCosts,
        cache: PresenceCache,
        seconds: float,
    ) -> None:
        super().__init__(views, counters, costs)
        self._cache = cache
        self._seconds = seconds
        self._flights: dict[_Object, _Flight] = {}
        self._lock = threading.Lock()

    def send(self, asks: Sequence[Ask]) -> list[Answer]:
        """Look for pieces; return an answer for each.

        An object that another thread is probing now is not probed again, unless that answer would
        be older than something that is known to have happened to the chunk.
        """
        wanted: dict[_Object, tuple[Kind, ObjectRef]] = {}
        keys = [kind_key(ask.chunk.key, ask.kind) for ask in asks]
        for key, (kind, chunk, shards) in zip(keys, asks, strict=True):
            for shard in range(shards):
                wanted[key, shard] = kind, ObjectRef(chunk, shard)
        now = time.monotonic()
        # The guard reports a stuck thread sooner or later.
        mine = _Flight(self._cache.ask(), now + self._seconds)
        flights: dict[_Object, _Flight] = {}
        with self._lock:
            for one in wanted:
                other = self._flights.get(one)
                if (
                    other is None
                    or now >= other.until
                    or other.asked.generation <= self._cache.since(one[0])
                ):
                    other = self._flights[one] = mine
                flights[one] = other
        try:
            self._fly(mine, {one: wanted[one] for one in wanted if flights[one] is mine})
        finally:
            with self._lock:
                for one, flight in flights.items():
                    if flight is mine and self._flights.get(one) is mine:
                        del self._flights[one]
            mine.over.set()
        answers: list[Answer] = []
        for key, ask in zip(keys, asks, strict=True):
            of_piece = [flights[key, shard] for shard in range(ask.shards)]
            for flight in of_piece:
                flight.over.wait(max(0.0, flight.until - time.monotonic()))
            found = [
                flight.answers.get((key, shard), Presence.ERROR)
                for shard, flight in enumerate(of_piece)
            ]
            answers.append(self._fold(found, min(flight.asked for flight in of_piece)))
        return answers

    def _fly(self, mine: _Flight, wanted: Mapping[_Object, tuple[Kind, ObjectRef]]) -> None:
        """Send the probes of a flight."""
        if not wanted:
            return
        refs: dict[Kind, list[ObjectRef]] = {}
        for kind, ref in wanted.values():
            refs.setdefault(kind, []).append(ref)
        begin = time.perf_counter()
        found = self._find(refs)
        if not any(Presence.ERROR in of_kind for of_kind in found.values()):
            self.costs.note(len(wanted), time.perf_counter() - begin)
        answers = {kind: iter(of_kind) for kind, of_kind in found.items()}
        mine.answers = {one: next(answers[kind]) for one, (kind, _) in wanted.items()}
