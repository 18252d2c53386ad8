"""The k-ary search for the longest stored prefix on a high-latency storage.

Owns which objects a search probes in each round, and what follows from the answers. It has no
thread and does not call the storage: the caller probes, and passes the answers back.

A search probes one shard of a few chunks, spread over the chunks that are still open. In the end
the first and the last chunk of the hit are confirmed in full, and so are gaps that are known from
failed loads. How many chunks a round probes follows from the time that rounds have taken so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from kvshelf.format.keys import Chunk
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.presence import Asked, PresenceCache
from kvshelf.shelf.view import ObjectRef, Presence

#: Most chunks that one search probes in one round.
_MOST_POINTS = 64

#: A chunk's key and a shard.
Question: TypeAlias = "tuple[bytes, int]"
#: The storage's answers, and when each probe was sent.
Answers: TypeAlias = "dict[Question, tuple[Presence, Asked]]"


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
            if points <= _MOST_POINTS and seconds < least:
                best, least = points, seconds
        return best

    def is_worth(self, probes: int) -> bool:
        """Whether this many more probes take less time than another round."""
        return probes * self.each < self.latency


class PrefixSearch:
    """The search for the longest stored prefix of one prompt, by rounds.

    Chunks before :attr:`found` count as present, since a chunk behind them is; chunk :attr:`end`
    is the first that is missing. Each round moves the two closer together. At the end all shards
    of the first chunk, the last chunk and of known gaps between them have been seen.

    Parameters
    ----------
    chunks : Sequence of Chunk
        The prompt's chunks, from the one that the search begins at.
    cache : PresenceCache
    failed : FailedKeys
        Keys that count as missing.
    shards : int
        Objects of each chunk.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        cache: PresenceCache,
        failed: FailedKeys,
        shards: int,
    ) -> None:
        self.began = cache.ask()
        self._cache = cache
        self._failed = failed
        self._shards = shards
        self._wanted: dict[int, bool] = {}
        keys = [chunk.key for chunk in chunks]
        usable = failed.leading(keys)
        self._chunks = chunks[:usable]
        self._keys = keys[:usable]
        known = cache.prefix(self._keys)
        self.found, self.end = known.found, known.end
        self._seen = known.seen
        self._must = [0, *known.gaps]
        self._first_round = True
        #: A chunk had its first shard but missed others: probe all shards from now on.
        self._thorough = False

    def plan(self, costs: RoundCosts, searches: int) -> list[ObjectRef]:
        """Return the objects to probe in the next round; none when the search is over.

        Parameters
        ----------
        costs : RoundCosts
        searches : int
            Number of searches that share the round.
        """
        self._wanted = self._plan(costs, searches, self._shards)
        return [
            ObjectRef(self._chunks[index], shard)
            for index, whole in sorted(self._wanted.items())
            for shard in range(self._shards if whole else 1)
        ]

    def _plan(self, costs: RoundCosts, searches: int, shards: int) -> dict[int, bool]:
        """Return the chunks to probe, and for each whether all its shards."""
        wanted: dict[int, bool] = {}
        open_ = self.end - self.found
        if open_ and open_ * shards <= _MOST_POINTS and costs.is_worth(open_ * shards * searches):
            wanted |= dict.fromkeys(range(self.found, self.end), True)
        elif open_:
            weight = searches * (shards if self._thorough else 1)
            points = costs.points(open_, weight)
            for number in range(points):
                wanted[self.found + open_ * (number + 1) // (points + 1)] = self._thorough
            if self._first_round:
                # Most prompts that begin on the shelf are there to their end.
                wanted[self.end - 1] = True
        last = self.found - 1
        if last >= 0 and last not in self._seen and (self._first_round or not open_):
            wanted[last] = True
        for index in self._must:
            if index < self.end and index not in self._seen:
                wanted[index] = True
        self._first_round = False
        return wanted

    def take(self, answers: Answers) -> None:
        """Take the answers to the probes of the plan."""
        wanted = self._wanted
        there: dict[int, bool] = {}
        for index, whole in wanted.items():
            key = self._keys[index]
            given = [answers[key, shard] for shard in range(self._shards if whole else 1)]
            there[index] = all(answer is Presence.PRESENT for answer, _ in given)
            # An error does not mean that the object is missing.
            if (whole or not there[index]) and all(a is not Presence.ERROR for a, _ in given):
                self._cache.learn(key, there[index], min(asked for _, asked in given))
        self._seen |= {index for index, whole in wanted.items() if whole and there[index]}
        self.end = min([self.end, *(index for index in wanted if not there[index])])
        if self.end < self.found:
            self._thorough = True
            self.found = 0
            present: Iterable[int] = self._seen
        else:
            present = (index for index in wanted if there[index])
        self.found = max([self.found, *(index + 1 for index in present if index < self.end)])

    def finish(self) -> int:
        """Return the number of leading chunks that are present."""
        hit = self.found
        # Other searches may have learned more meanwhile.
        known = self._cache.prefix(self._keys[:hit])
        hit = min([known.end, *known.gaps])
        self.found = self._failed.leading(self._keys[:hit])
        return self.found

    def remember(self) -> None:
        """Let other searches know the answer; after :meth:`finish`."""
        self._cache.infer(self._keys[: self.found], self.began)
