"""What a hit needs of each kind of KV.

A hit of `end` chunks needs, of each kind that its namespace has:

* full: all chunks before `end`;
* window: the chunks that the windows of the next token reach;
* state: chunk ``end − 1``, that is the state after `end` chunks.

Owns this rule (:class:`HitRule`), for one prompt: which chunks of each kind a hit needs, which of
those are missing, at which ends hits are possible, and which is the longest.
Everything that has to know what a hit needs asks it.

Contracts
---------
* Everything follows from the namespace record. What a record does not say makes a hit need more,
  never less: windows of unknown size reach all chunks.
* Pure and immutable: no torch, no storage, no vLLM. Safe to call from any thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvshelf.format.kinds import FULL, KIND_BITS, KINDS, STATE, WINDOW, Kind

#: More chunks than any prompt has.
UNLIMITED: Final = 1 << 62

#: One kind of one chunk: the kind, and the chunk's index in its prompt.
Piece: TypeAlias = "tuple[Kind, int]"


@dataclass(frozen=True, slots=True)
class HitRule:
    """What hits of a namespace need.

    Attributes
    ----------
    kinds : tuple of Kind
        The namespace's kinds, in the order of :data:`~kvshelf.format.kinds.KINDS`; empty if its
        record does not say.
    reach : int
        Number of last chunks whose windows a hit needs, wherever it ends; of no meaning without
        kind window.
    """

    kinds: tuple[Kind, ...]
    reach: int = UNLIMITED

    @property
    def mask(self) -> int:
        """The kinds, as bits (:data:`~kvshelf.format.kinds.KIND_BITS`)."""
        return sum(KIND_BITS[kind] for kind in self.kinds)

    @classmethod
    def of(cls, record: Mapping[str, object]) -> HitRule:
        """Return the rule of a namespace, by its record, which need not be valid."""
        names: object = record.get("kinds", (FULL,) if record else ())
        layers = names if isinstance(names, list | tuple) else ()
        kinds = tuple(kind for kind in KINDS if kind in layers)
        sizes, chunk_size = record.get("sliding_windows"), record.get("chunk_size")
        if WINDOW in kinds and isinstance(sizes, list | tuple) and len(sizes) == len(layers):
            windows = [size for size, kind in zip(sizes, layers, strict=True) if kind == WINDOW]
            # A layer without a window in the record may need the KV of all tokens.
            if all(isinstance(number, int) and number > 0 for number in (*windows, chunk_size)):
                return cls.with_window(kinds, max(windows), chunk_size)  # type: ignore[arg-type]
        return cls(kinds, UNLIMITED if WINDOW in kinds or not kinds else 0)

    @classmethod
    def with_window(cls, kinds: Iterable[Kind], window: int, chunk_size: int) -> HitRule:
        """Return the rule of an engine that knows its windows.

        Parameters
        ----------
        kinds : Iterable of Kind
        window : int
            Tokens that the widest window reaches: a token attends to itself and to ``window − 1``
            before it.
        chunk_size : int
            Tokens.
        """
        reach = max(0, -(-(window - 1) // chunk_size))
        return cls(tuple(kinds), min(reach, UNLIMITED))

    def needs(self, end: int, first: int = 0) -> dict[Kind, range]:
        """Return the chunks of each kind that a hit needs.

        Parameters
        ----------
        end : int
            Number of chunks of the hit.
        first : int
            Chunks before this one are not asked for: the caller has them.
        """
        begins = {FULL: 0, WINDOW: end - self.reach, STATE: end - 1}
        return {kind: range(max(first, begins[kind]), end) for kind in self.kinds}

    def missing(
        self, end: int, present: Mapping[Kind, Container[int]], first: int = 0
    ) -> list[Piece]:
        """Return what a hit of `end` chunks needs and `present` does not have, kind by kind."""
        needed = self.needs(end, first).items()
        return [(kind, n) for kind, indices in needed for n in indices if n not in present[kind]]

    def possible(
        self, ends: Iterable[int], gone: Mapping[Kind, Iterable[int]], first: int = 0
    ) -> list[int]:
        """Return at which of some ends a hit needs none of what is gone, in their order.

        Parameters
        ----------
        ends : Iterable of int
            Numbers of chunks.
        gone : Mapping[Kind, Iterable[int]]
            Chunks that cannot be loaded, of any of the kinds.
        first : int
            As in :meth:`needs`.
        """
        places = {kind: sorted(indices) for kind, indices in gone.items()}

        def is_possible(end: int) -> bool:
            for kind, needed in self.needs(end, first).items():
                lost = places.get(kind, ())
                # The last one before the end.
                position = bisect_left(lost, end) - 1
                if position >= 0 and lost[position] in needed:
                    return False
            return True

        return [end for end in ends if is_possible(end)]

    def longest(self, ends: Sequence[int], present: Mapping[Kind, Container[int]]) -> int:
        """Return the last of some ascending ends whose hit needs only what is present; 0: none."""
        count = ends[-1] if ends else 0
        missing = {kind: [n for n in range(count) if n not in present[kind]] for kind in self.kinds}
        return next(iter(self.possible(reversed(ends), missing)), 0)
