"""The search for a hit on a low-latency storage: chunk by chunk.

Owns the order of its probes. Leading chunks are probed in batches up to the first that is missing.
Where hits need states or windows, those of the last chunk of the latest possible ends are probed
next, then what else the latest of these ends needs, from the end backwards.

Contracts
---------
* Every object that a hit needs has been seen by a probe of this search. Nothing is remembered for
  other searches.
* It has no thread and does not call the storage, see :mod:`kvshelf.shelf.hits`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kvshelf.format.hit_rule import HitRule, Piece
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, Kind, kind_key
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.probes import Answer, Ask, RoundCosts
from kvshelf.shelf.view import Presence

#: Few chunks per call keep the time between two pauses of the thread short.
_BATCH = 8
_MOST_ENDS = 32


class SequentialSearch:
    """The search for the longest hit of one prompt, by small batches.

    Parameters
    ----------
    chunks, first, ends, rule, failed, shards, tail
        As for :class:`~kvshelf.shelf.hits.HitSearch`.

    Attributes
    ----------
    first, full_chunks, hit_chunks
        As for :class:`~kvshelf.shelf.hits.HitSearch`; the answer, once there is nothing to plan.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        first: int,
        ends: Sequence[int],
        rule: HitRule,
        failed: FailedKeys,
        shards: Mapping[Kind, int],
    ) -> None:
        self.first = self.full_chunks = self.hit_chunks = min(first, len(chunks))
        self._chunks = chunks
        self._ends = ends
        self._failed = failed
        self._shards = shards
        kinds = [kind for kind in shards if kind != FULL]
        self._seen: dict[Kind, set[int]] = {kind: set() for kind in kinds}
        self._gone: dict[Kind, set[int]] = {kind: set() for kind in kinds}
        #: What a hit needs beside the full chunks.
        self._rule = replace(rule, kinds=tuple(kinds))
        self._there: list[bool] = []
        self._batches = self._search()

    @property
    def known(self) -> dict[Kind, frozenset[int]]:
        """The indices of the chunks that were seen, for each kind but full."""
        return {kind: frozenset(seen) for kind, seen in self._seen.items()}

    def plan(self, costs: RoundCosts, searches: int) -> list[Ask]:
        """Return what to look for next; nothing when the search is over."""
        return next(self._batches, [])

    def take(self, answers: Sequence[Answer]) -> None:
        """Take the answers to what was planned, in the same order."""
        self._there = [presence is Presence.PRESENT for presence, _ in answers]

    def _search(self) -> Iterator[list[Ask]]:
        if FULL in self._shards:
            yield from self._find_full()
        else:
            self.full_chunks = len(self._chunks)
        if self._seen:
            yield from self._find_end()
            return
        self.hit_chunks = self.full_chunks

    def _find_full(self) -> Iterator[list[Ask]]:
        """Look for every full chunk in order, up to the first that is missing."""
        chunks = self._chunks[self.first :]
        usable = self._failed.leading([chunk.key for chunk in chunks])
        for begin in range(0, usable, _BATCH):
            group = chunks[begin : min(begin + _BATCH, usable)]
            yield [Ask(FULL, chunk, self._shards[FULL]) for chunk in group]
            self.full_chunks += (*self._there, False).index(False)
            if not all(self._there):
                return

    def _find_end(self) -> Iterator[list[Ask]]:
        """Look for the latest end of a hit."""
        ends = [end for end in reversed(self._ends) if self.first < end <= self.full_chunks]
        batch = _BATCH
        while ends:
            group, ends = ends[:batch], ends[batch:]
            batch = min(2 * batch, _MOST_ENDS)
            yield from self._look([(kind, end - 1) for kind in self._seen for end in group])
            group = self._rule.possible(group, self._gone, self.first)
            while group:
                missing = self._rule.missing(group[0], self._seen, self.first)
                if not missing:
                    self.hit_chunks = group[0]
                    return
                yield from self._look(missing[: -_BATCH - 1 : -1])
                group = self._rule.possible(group, self._gone, self.first)

    def _look(self, pieces: Sequence[Piece]) -> Iterator[list[Ask]]:
        """Look for pieces, a batch at a time."""
        chunks = self._chunks
        for begin in range(0, len(pieces), _BATCH):
            asked = []
            for kind, index in pieces[begin : begin + _BATCH]:
                if kind_key(chunks[index].key, kind) in self._failed:
                    self._gone[kind].add(index)
                else:
                    asked.append((kind, index))
            if asked:
                yield [Ask(kind, chunks[n], self._shards[kind]) for kind, n in asked]
                for (kind, index), there in zip(asked, self._there, strict=True):
                    (self._seen if there else self._gone)[kind].add(index)
