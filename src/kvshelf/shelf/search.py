"""The search for the longest hit of one prompt: what to look for in each round.

What a hit needs of each kind of KV says :class:`kvshelf.format.hit_rule.HitRule`. The caller says
at which numbers of chunks it may end (the *ends*). Where there is only one kind, full, a hit is the
longest stored prefix.

Owns the rounds, as a generator: it yields what to look for, and is sent whether each of that is
there. It has no thread, calls no storage, and remembers nothing for other searches.

* A round looks for one object of each of a few chunks, spread over those that are still open; the
  first round also for all objects of the first and the last of them, and for what else a hit of the
  whole prompt needs.
* Where probes are cheap, all objects of the prefix that was found are looked for at the end, up to
  the first that is missing. On a storage of high latency those of its first and last chunk are.
* Of windows and states, a round looks for all that the latest end needs of which nothing is known
  to be missing; the first also for what is at the edges of what other ends need. What a hit needs
  of these kinds was seen, all of it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from kvshelf.format.hit_rule import HitRule, Piece
from kvshelf.format.kinds import FULL, Kind

#: Pieces of one round. A round of a storage of high latency takes as long for many as for one. Of
#: another few keep the time between two pauses of the thread short.
_WIDTH_HIGH_LATENCY: Final = 32
_WIDTH: Final = 8
#: Most objects that a round looks for to save another one, and most beside those of the prefix.
_MOST_AT_ONCE: Final = 64
_MOST_BESIDE: Final = 32
#: Most ends of which a round looks for the edges; the first looks at a width of them.
_MOST_ENDS: Final = 256
#: Objects that are confirmed between two pauses of the thread.
_CONFIRMED_AT_ONCE: Final = 96


class Ask(NamedTuple):
    """One piece to look for: one kind of one chunk.

    Attributes
    ----------
    kind : Kind
    place : int
        Index of the chunk.
    whole : bool
        Look for all its objects; else for the first alone.
    """

    kind: Kind
    place: int
    whole: bool


#: Sent: for each piece, in order, whether all that was asked for is there.
Rounds: TypeAlias = Generator[list[Ask], Sequence[bool], int]


class Search:
    """The search for one prompt.

    Parameters
    ----------
    rule : HitRule
    shards : Mapping[Kind, int]
        Objects of each chunk, for each kind of the namespace.
    count : int
        Number of the prompt's chunks.
    first : int
        Chunks before this one are not looked for: the caller has them.
    ends : Sequence of int
        Numbers of chunks at which a hit may end, ascending. Of no meaning where the only kind is
        full.
    high_latency : bool
        Whether many probes take hardly longer than one, and each round long.

    Attributes
    ----------
    full_chunks, hit_chunks : int
        The answer, once the rounds are over: number of leading chunks whose full objects are
        present (without kind full: of all), and number of chunks of the longest hit. Both count
        from the prompt's beginning, and are not less than `first`.
    """

    def __init__(
        self,
        rule: HitRule,
        shards: Mapping[Kind, int],
        count: int,
        first: int,
        ends: Sequence[int],
        *,
        high_latency: bool,
    ) -> None:
        self.full_chunks = self.hit_chunks = self._first = first
        self._shards = shards
        self._count = count
        #: What a hit needs beside the full chunks.
        self._rule = replace(rule, kinds=tuple(kind for kind in shards if kind != FULL))
        self._ends = ends if self._rule.kinds else ()
        self._confirms = not high_latency
        self._width = _WIDTH_HIGH_LATENCY if high_latency else _WIDTH
        #: Whether a piece is there, once that is known: all its objects.
        self._there: dict[Piece, bool] = {}

    @property
    def known(self) -> dict[Kind, frozenset[int]]:
        """The indices of the chunks that were seen, for each kind but full."""
        present = [piece for piece, there in self._there.items() if there]
        return {kind: frozenset(n for of, n in present if of == kind) for kind in self._rule.kinds}

    def rounds(self, found: int, end: int) -> Rounds:
        """Search; returns the number of chunks of the hit.

        Parameters
        ----------
        found : int
            Number of leading chunks whose full objects count as present.
        end : int
            Number of leading chunks of which no full object is known to be missing.
        """
        if FULL in self._shards:
            self.full_chunks = yield from self._find_prefix(found, max(end, self._first))
            if self._confirms:
                self.full_chunks = yield from self._confirm(self.full_chunks)
        else:
            self.full_chunks = self._count
        self.hit_chunks = self.full_chunks
        if self._rule.kinds:
            full = self.full_chunks
            ends = [end for end in reversed(self._ends) if self._first < end <= full]
            self.hit_chunks = yield from self._find_end(ends)
        return self.hit_chunks

    def _look(self, asks: Sequence[Ask]) -> Generator[list[Ask], Sequence[bool], Sequence[bool]]:
        """Look for pieces; note what is known of them then."""
        answers = yield list(asks)
        for (kind, index, is_whole), there in zip(asks, answers, strict=True):
            if is_whole or not there or self._shards[kind] == 1:
                self._there[kind, index] = there
        return answers

    # ----------------------------------------------------------------------------- full

    def _find_prefix(self, found: int, end: int) -> Rounds:
        """Narrow the prefix down: chunks before `found` count as there, and `end` is missing."""
        shards, beside = self._shards[FULL], self._at_last_end()
        begun = whole = False
        found = min(max(found, self._first), end)
        while found < end or (
            # Not all objects of the last chunk were seen, as they have to be.
            not self._confirms and end > self._first and not self._there.get((FULL, end - 1))
        ):
            confirms: dict[int, bool] = {}
            open_ = end - found
            if open_ * shards <= _MOST_AT_ONCE:
                confirms = dict.fromkeys(range(found, end), True)
            else:
                points = max(1, self._width // shards) if whole else self._width
                for n in range(points):
                    confirms[found + open_ * (n + 1) // (points + 1)] = whole
                if not begun:
                    # Most prompts that begin on the shelf are there to their end.
                    confirms[found] = confirms[end - 1] = True
            if found > self._first and not (begun and open_):
                # If nothing more is there, the hit ends behind it.
                confirms[found - 1] = True
            places = sorted(confirms)
            asks = [Ask(FULL, index, confirms[index]) for index in places]
            answers = yield from self._look(asks if begun else [*asks, *beside])
            begun = True
            # What was asked beside is behind the others.
            end = min([end, *(n for n, there in zip(places, answers, strict=False) if not there)])
            present = [n for n, there in zip(places, answers, strict=False) if there]
            if end < found:
                # Of some chunks not all objects are there: from now on all are looked for.
                found, whole = self._first, True
            if whole:
                present = [n for (kind, n), there in self._there.items() if there and kind == FULL]
            found = max([found, *(n + 1 for n in present if n < end)])
        return end

    def _confirm(self, end: int) -> Rounds:
        """Look for all objects of a prefix, in order; return where the first is missing."""
        step = max(1, _CONFIRMED_AT_ONCE // self._shards[FULL])
        for begin in range(self._first, end, step):
            places = range(begin, min(begin + step, end))
            unseen = [n for n in places if not self._there.get((FULL, n))]
            answers = yield [Ask(FULL, n, True) for n in unseen]
            if not all(answers):
                return unseen[answers.index(False)]
        return end

    # ----------------------------------------------------------------------------- other kinds

    def _at_last_end(self) -> list[Ask]:
        """Return what the latest end needs, unless that is much."""
        end = next((end for end in reversed(self._ends) if end <= self._count), 0)
        pieces = list(self._needs(end)) if end > self._first else []
        few = sum(self._shards[kind] for kind, _ in pieces) <= _MOST_BESIDE
        return [Ask(*piece, whole=True) for piece in pieces] if few else []

    def _needs(self, end: int) -> Iterator[Piece]:
        for kind, needed in self._rule.needs(end, self._first).items():
            yield from ((kind, index) for index in reversed(needed))

    def _possible(self, ends: Sequence[int]) -> list[int]:
        missing: dict[Kind, list[int]] = {kind: [] for kind in self._rule.kinds}
        for (kind, index), there in self._there.items():
            if not there and kind != FULL:
                missing[kind].append(index)
        return self._rule.possible(ends, missing, self._first)

    def _find_end(self, ends: Sequence[int]) -> Rounds:
        """Find the latest of some ends at which there is all that a hit needs."""
        width = self._width
        most_ends = max(width, _MOST_AT_ONCE // max(self._shards.values()))
        while ends:
            group, ends = ends[:width], ends[width:]
            # Where the latest ends are none, those before them are looked at in few rounds.
            width = min(4 * width, _MOST_ENDS)
            needed = [item for end in group for item in self._rule.needs(end, self._first).items()]
            edges = dict.fromkeys((kind, n) for kind, of in needed for n in (*of[:1], *of[-1:]))
            while group := self._possible(group):
                open_ = (piece for piece in self._needs(group[0]) if piece not in self._there)
                latest = dict.fromkeys(islice(open_, most_ends), True)
                if not latest:
                    return group[0]
                unconfirmed = {piece: self._confirms for piece in edges if piece not in self._there}
                edges = {}
                yield from self._look(
                    [Ask(*piece, of) for piece, of in (unconfirmed | latest).items()]
                )
        return self._first
