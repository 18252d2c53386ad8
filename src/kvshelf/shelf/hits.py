"""The search for a hit on a high-latency storage.

What a hit needs of each kind of KV says :class:`kvshelf.format.hit_rule.HitRule`. The caller says
at which numbers of chunks it may end (the *ends*). Where there is only one kind, full, a hit is the
longest stored prefix.

Owns which objects a search probes in each round, and what follows from the answers. It has no
thread and does not call the storage: the caller probes, and passes the answers back.

While :class:`~kvshelf.shelf.search.PrefixSearch` narrows the full prefix down, each round also
probes the states of the latest ends that are still possible, and the windows of the best of them.
So there are hardly more rounds than for the prefix alone. Windows and states are never inferred
from others: all shards of those that a hit needs were seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvshelf.format.hit_rule import HitRule, Piece
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, STATE, Kind, kind_key
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.presence import Known, PresenceCache
from kvshelf.shelf.probes import Answer, Ask, RoundCosts
from kvshelf.shelf.search import PrefixSearch
from kvshelf.shelf.view import Presence

#: States and windows that one search scans in its first round, which most prompts that are known
#: to their end do not need; in each later round four times as many, since then few ends are left.
_FIRST_SCAN = 16
#: Most probes for the last end of a prompt, as long as nothing is known about it.
_MOST_FOR_LAST = 64


class HitSearch:
    """The search for the longest hit of one prompt, by rounds.

    Parameters
    ----------
    chunks : Sequence of Chunk
        The prompt's chunks, from its beginning.
    first : int
        Index of the chunk that the search begins at: the caller has what comes before.
    ends : Sequence of int
        Numbers of chunks at which a hit may end, ascending. Of no meaning where the only kind is
        full.
    rule : HitRule
    cache : PresenceCache
        By kind key, see :func:`~kvshelf.format.kinds.kind_key`.
    failed : FailedKeys
        Kind keys that count as missing.
    shards : Mapping[Kind, int]
        Objects of each chunk, for each kind of the namespace.
    tail : Chunk, optional
        The tail to look for behind all chunks; only where full is the only kind.

    Attributes
    ----------
    first : int
    full_chunks, hit_chunks : int
        The answer, once :meth:`finish` was called: number of leading chunks whose full objects are
        present (without kind full: of all), and number of chunks of the longest hit. Both count
        from the prompt's beginning, and are not less than `first`.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        first: int,
        ends: Sequence[int],
        rule: HitRule,
        cache: PresenceCache,
        failed: FailedKeys,
        shards: Mapping[Kind, int],
    ) -> None:
        self.first = first = min(first, len(chunks))
        self.full_chunks = self.hit_chunks = first
        self._chunks = chunks
        self._cache = cache
        self._failed = failed
        self._shards = shards
        self._prefix: PrefixSearch | None = None
        if FULL in shards:
            self._prefix = PrefixSearch(chunks[first:], cache, failed, shards[FULL])
        self._kinds = [kind for kind in shards if kind != FULL]
        #: What a hit needs beside the full chunks.
        self._rule = replace(rule, kinds=tuple(self._kinds))
        #: Whether a piece is there, once that is known: all its shards.
        self._there: dict[Piece, bool] = {}
        #: Pieces of which the first shard was seen, and not yet all.
        self._begun: set[Piece] = set()
        #: Ends that are still possible, the latest first.
        self._ends = [end for end in reversed(ends) if first < end <= len(chunks)]
        if not self._kinds:
            self._ends = []
        self._scan = _FIRST_SCAN
        self._first_round = True
        #: The pieces that this round probes for an end that is probably the answer.
        self._hoped: set[Piece] = set()
        #: Such a piece was missing: from then on other ends are probed too.
        self._misled = False
        #: The pieces that this round probes, and whether all their shards.
        self._wanted: dict[Piece, bool] = {}
        self._recall()
        self._narrow()

    @property
    def known(self) -> dict[Kind, frozenset[int]]:
        """The indices of the chunks that were seen, for each kind but full."""
        return {
            kind: frozenset(
                index for (of, index), there in self._there.items() if there and of == kind
            )
            for kind in self._kinds
        }

    def _key(self, piece: Piece) -> bytes:
        kind, index = piece
        return kind_key(self._chunks[index].key, kind)

    def _recall(self) -> None:
        """Use what is known already about the pieces that a hit may need."""
        last = self._ends[0] if self._ends else self.first
        pieces = [(kind, index) for kind in self._kinds for index in range(self.first, last)]
        keys = [self._key(piece) for piece in pieces]
        for piece, key, known in zip(pieces, keys, self._cache.known(keys), strict=True):
            if known is Known.MISSING or key in self._failed:
                self._there[piece] = False
            elif known is Known.SEEN:
                self._there[piece] = True

    def _needs(self, end: int) -> list[Piece]:
        """Return what a hit of `end` chunks needs beside the full objects."""
        needed = self._rule.needs(end, self.first).items()
        return [(kind, index) for kind, indices in needed for index in indices]

    def _bounds(self) -> tuple[int, int]:
        """Return how many full chunks count as present, and how many there may be."""
        if self._prefix is None:
            return len(self._chunks), len(self._chunks)
        return self.first + self._prefix.found, self.first + self._prefix.end

    def _narrow(self) -> None:
        """Drop the ends that have become impossible."""
        _, most = self._bounds()
        gone: dict[Kind, list[int]] = {kind: [] for kind in self._kinds}
        for (kind, index), there in self._there.items():
            if not there:
                gone[kind].append(index)
        ends = (end for end in self._ends if end <= most)
        self._ends = self._rule.possible(ends, gone, self.first)

    def plan(self, costs: RoundCosts, searches: int) -> list[Ask]:
        """Return what to look for in the next round; nothing when the search is over.

        Parameters
        ----------
        costs : RoundCosts
        searches : int
            Number of searches that share the round.
        """
        full = [] if self._prefix is None else self._prefix.plan(costs, searches)
        self._wanted = self._plan(costs, searches)
        return full + [
            Ask(kind, self._chunks[index], self._shards[kind] if whole else 1)
            for (kind, index), whole in self._wanted.items()
        ]

    def _plan(self, costs: RoundCosts, searches: int) -> dict[Piece, bool]:
        """Return the pieces to probe, and for each whether all its shards."""
        found, _ = self._bounds()
        wanted: dict[Piece, bool] = {}
        scanned: dict[Piece, None] = {}
        has_favourite = False
        for place, end in enumerate(self._ends):
            state = STATE, end - 1
            unseen = [piece for piece in self._needs(end) if piece not in self._there]
            fresh = [piece for piece in unseen if piece not in self._begun]
            likely = state not in fresh
            certain = end <= found
            last = place == 0 and self._first_round and self._probes(unseen) <= _MOST_FOR_LAST
            if last or (likely and (place == 0 or (certain and not has_favourite))):
                # The round shows whether this one is the answer.
                wanted |= dict.fromkeys(unseen, True)
                if likely and certain:
                    has_favourite = True
                    self._hoped.update(unseen)
            elif likely:
                scanned |= dict.fromkeys(fresh)
            else:
                # Its windows are useless without a state.
                scanned[state] = None
            sure = likely and certain and not (fresh and self._misled)
            if sure or len(scanned) >= self._scan:
                break
        self._scan *= 4
        self._first_round = False
        whole = costs.is_worth(self._probes(scanned) * searches)
        return dict.fromkeys(scanned, whole) | wanted

    def _probes(self, pieces: Iterable[Piece]) -> int:
        return sum(self._shards[kind] for kind, _ in pieces)

    def take(self, answers: Sequence[Answer]) -> None:
        """Take the answers to what was planned, in the same order."""
        full = len(answers) - len(self._wanted)
        if self._prefix is not None:
            self._prefix.take(answers[:full])
        for (piece, whole), answer in zip(self._wanted.items(), answers[full:], strict=True):
            if answer.there and not whole and self._shards[piece[0]] > 1:
                self._begun.add(piece)
                continue
            self._there[piece] = answer.there
            self._misled = self._misled or (piece in self._hoped and not answer.there)
            # An error does not mean that the object is missing.
            if answer.presence is not Presence.ERROR:
                self._cache.learn(self._key(piece), answer.there, answer.asked)
        self._narrow()

    def finish(self) -> None:
        """End the search: give the answer."""
        if self._prefix is not None:
            self.full_chunks = self.hit_chunks = self.first + self._prefix.finish()
        else:
            self.full_chunks = len(self._chunks)
        if self._kinds:
            ends = (end for end in self._ends if end <= self.full_chunks and self._holds(end))
            self.hit_chunks = next(ends, self.first)

    def remember(self) -> None:
        """Let other searches know the answer; after :meth:`finish`.

        Separate, as it takes longer than the rest: callers get their answer before it.
        """
        if self._prefix is not None:
            self._prefix.remember()

    def _holds(self, end: int) -> bool:
        """Whether all that a hit needs was seen, and nothing else has become known since."""
        needs = self._needs(end)
        keys = [self._key(piece) for piece in needs]
        return (
            all(self._there.get(piece) for piece in needs)
            and Known.MISSING not in self._cache.known(keys)
            and not self._cache.any_gap(keys)
            and not any(key in self._failed for key in keys)
        )
