"""The k-ary search for the longest stored prefix on a high-latency storage.

Owns which objects a search probes in each round, and what follows from the answers. It has no
thread and does not call the storage: the caller probes, and passes the answers back.

A search probes one shard of a few chunks, spread over the chunks that are still open. In the end
the first and the last chunk of the hit are confirmed in full, and so are gaps that are known from
failed loads. How many chunks a round probes follows from the time that rounds have taken so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.presence import PresenceCache
from kvshelf.shelf.probes import MOST_POINTS, Answer, Ask, RoundCosts
from kvshelf.shelf.view import Presence


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

    def plan(self, costs: RoundCosts, searches: int) -> list[Ask]:
        """Return what to look for in the next round; nothing when the search is over.

        Parameters
        ----------
        costs : RoundCosts
        searches : int
            Number of searches that share the round.
        """
        self._wanted = dict(sorted(self._plan(costs, searches, self._shards).items()))
        return [
            Ask(FULL, self._chunks[index], self._shards if whole else 1)
            for index, whole in self._wanted.items()
        ]

    def _plan(self, costs: RoundCosts, searches: int, shards: int) -> dict[int, bool]:
        """Return the chunks to probe, and for each whether all its shards."""
        wanted: dict[int, bool] = {}
        open_ = self.end - self.found
        if open_ and open_ * shards <= MOST_POINTS and costs.is_worth(open_ * shards * searches):
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

    def take(self, answers: Sequence[Answer]) -> None:
        """Take the answers to what was planned, in the same order."""
        wanted = self._wanted
        there: dict[int, bool] = {}
        for (index, whole), answer in zip(wanted.items(), answers, strict=True):
            there[index] = answer.there
            # An error does not mean that the object is missing.
            if (whole or not answer.there) and answer.presence is not Presence.ERROR:
                self._cache.learn(self._keys[index], answer.there, answer.asked)
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
