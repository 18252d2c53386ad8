"""What a hit needs of each kind of KV, and the search for it on a high-latency storage.

A hit of N chunks needs all full objects before N, the window objects that the windows of the next
token reach (:func:`window_chunks`), and the state object of chunk N − 1: the state after N chunks.
The caller says which N are possible (the *ends*). Where there is only one kind, full, a hit is the
longest stored prefix.

Owns which objects a search probes in each round, and what follows from the answers. It has no
thread and does not call the storage: the caller probes, and passes the answers back.

While :class:`~kvshelf.shelf.search.PrefixSearch` narrows the full prefix down, each round also
probes the states of the latest ends that are still possible, and the windows of the best of them.
So there are hardly more rounds than for the prefix alone. Windows and states are never inferred
from others: all shards of those that a hit needs were seen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind, kind_key
from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import required_field
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.presence import Known, PresenceCache
from kvshelf.shelf.search import Answers, PrefixSearch, Question, RoundCosts
from kvshelf.shelf.view import Presence

#: A window of more tokens than any prompt has.
UNLIMITED: Final = 1 << 62

#: States and windows that one search scans in its first round, which most prompts that are known
#: to their end do not need; in each later round four times as many, since then few ends are left.
_FIRST_SCAN = 16
#: Most probes for the last end of a prompt, as long as nothing is known about it.
_MOST_FOR_LAST = 64

#: One kind of one chunk: the kind, and the chunk's index in the prompt.
Piece: TypeAlias = "tuple[Kind, int]"
#: The probes of a round, with the kind and the chunk of each.
Questions: TypeAlias = "dict[Question, tuple[Kind, Chunk]]"


def window_of(fmt: ObjectFormat) -> int:
    """Return the tokens that the windows of a namespace reach, by its record; 0 without windows."""
    if WINDOW not in fmt.kinds:
        return 0
    record = fmt.namespace.record
    sizes: list[int] = required_field(record, "sliding_windows")
    kinds: list[str] = required_field(record, "kinds")
    reach = [size for size, kind in zip(sizes, kinds, strict=True) if kind == WINDOW]
    # A layer without a window in the record may need the KV of all tokens.
    return max(reach) if min(reach) > 0 else UNLIMITED


def window_chunks(end: int, window: int, chunk_size: int) -> range:
    """Return the chunks whose window objects a hit of `end` chunks needs.

    Parameters
    ----------
    end : int
        Number of chunks of the hit.
    window : int
        Tokens that a window reaches: a token attends to itself and to ``window − 1`` before it.
    chunk_size : int
        Tokens.
    """
    return range(max(0, end - max(0, -(-(window - 1) // chunk_size))), end)


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
    window : int
        See :func:`window_chunks`.
    cache : PresenceCache
        By kind key, see :func:`~kvshelf.format.kinds.kind_key`.
    failed : FailedKeys
        Kind keys that count as missing.
    shards : Mapping[Kind, int]
        Objects of each chunk, for each kind of the namespace.

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
        window: int,
        cache: PresenceCache,
        failed: FailedKeys,
        shards: Mapping[Kind, int],
    ) -> None:
        self.first = first = min(first, len(chunks))
        self.full_chunks = self.hit_chunks = first
        self._chunks = chunks
        self._window = window
        self._cache = cache
        self._failed = failed
        self._shards = shards
        self._prefix: PrefixSearch | None = None
        if FULL in shards:
            self._prefix = PrefixSearch(chunks[first:], cache, failed, shards[FULL])
        self._kinds = [kind for kind in shards if kind != FULL]
        #: Whether a piece is there, once that is known: all its shards.
        self._there: dict[Piece, bool] = {}
        #: Pieces of which the first shard was seen, and not yet all.
        self._begun: set[Piece] = set()
        #: Ends that are still possible, the latest first.
        self._ends = [end for end in reversed(ends) if end > first] if self._kinds else []
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
        pieces: list[Piece] = [(STATE, end - 1)] if STATE in self._shards else []
        if WINDOW in self._shards:
            pieces += [(WINDOW, index) for index in self._reach(end) if index >= self.first]
        return pieces

    def _reach(self, end: int) -> range:
        return window_chunks(end, self._window, self._chunks[0].tokens)

    def _bounds(self) -> tuple[int, int]:
        """Return how many full chunks count as present, and how many there may be."""
        if self._prefix is None:
            return len(self._chunks), len(self._chunks)
        return self.first + self._prefix.found, self.first + self._prefix.end

    def _narrow(self) -> None:
        """Drop the ends that have become impossible."""
        _, most = self._bounds()
        gone = sorted(
            index for (kind, index), there in self._there.items() if kind == WINDOW and not there
        )
        left = []
        for end in self._ends:
            if end > most or self._there.get((STATE, end - 1)) is False:
                continue
            # The last missing window before the end.
            place = bisect_left(gone, end) - 1
            if place >= 0 and gone[place] in self._reach(end):
                continue
            left.append(end)
        self._ends = left

    def plan(self, costs: RoundCosts, searches: int) -> Questions:
        """Return the probes of the next round; none when the search is over.

        Parameters
        ----------
        costs : RoundCosts
        searches : int
            Number of searches that share the round.
        """
        questions: Questions = {}
        if self._prefix is not None:
            for ref in self._prefix.plan(costs, searches):
                questions[ref.chunk.key, ref.shard] = FULL, ref.chunk
        self._wanted = self._plan(costs, searches)
        for piece, whole in self._wanted.items():
            kind, index = piece
            key = self._key(piece)
            for shard in range(self._shards[kind] if whole else 1):
                questions[key, shard] = kind, self._chunks[index]
        return questions

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

    def take(self, answers: Answers) -> None:
        """Take the answers to the probes of the plan."""
        if self._prefix is not None:
            self._prefix.take(answers)
        for piece, whole in self._wanted.items():
            key = self._key(piece)
            shards = self._shards[piece[0]] if whole else 1
            given = [answers[key, shard] for shard in range(shards)]
            there = all(answer is Presence.PRESENT for answer, _ in given)
            if there and not whole and self._shards[piece[0]] > 1:
                self._begun.add(piece)
                continue
            self._there[piece] = there
            self._misled = self._misled or (piece in self._hoped and not there)
            # An error does not mean that the object is missing.
            if all(answer is not Presence.ERROR for answer, _ in given):
                self._cache.learn(key, there, min(asked for _, asked in given))
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
