"""The chunks of many prompts as trees, and what hits need of them: the array form of the hit rule.

Owns the trees (:class:`Forest`): a chunk follows its parent, the chunk before it in its prompt;
several may follow one. On them, :class:`HitRules` decides for all chunks of a shelf at once what
:class:`kvshelf.format.hit_rule.HitRule` decides for one prompt: where hits can end, and what those
need.

Contracts
---------
* Pure: numpy arrays in, numpy arrays out; those that are changed say so.
* A chunk whose parent is not the chunk before it, as a forged header may say, has no parent.
* Each operation takes time in proportion to the number of chunks, and a little for each level. All
  together takes less than a second for a million chunks.

Threads
-------
Everything is safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvshelf.format.kinds import FULL, KIND_BITS, STATE, WINDOW, Kind

Integers: TypeAlias = "npt.NDArray[np.int64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"
Masks: TypeAlias = "npt.NDArray[np.uint8]"

#: Parents that are no row.
UNKNOWN: Final = -1
GONE: Final = -2

#: Chunks before a place: all, from the beginning of the prompt.
_WHOLE: Final = 1 << 40


class Forest:
    """Chunks as trees.

    Parameters
    ----------
    parent : int32 or int64 array [n]
        Row of the chunk before each one; `UNKNOWN` if that was not looked up, `GONE` if it is not
        there or the chunk is the first of its prompt.
    index : uint32 array [n]
        Chunk index.
    """

    def __init__(
        self, parent: npt.NDArray[np.signedinteger], index: npt.NDArray[np.uint32]
    ) -> None:
        self.index = index
        self.parent = parent
        rows = np.flatnonzero(parent >= 0)
        # Names and headers are not ours alone: a parent is the chunk before, or none.
        is_before = index[parent[rows]].astype(np.int64) + 1 == index[rows]
        rows = rows[is_before]
        depth = index[rows]
        order = np.argsort(depth, kind="stable")
        cuts = np.flatnonzero(np.diff(depth[order])) + 1
        #: Rows with a parent, those of one index together, the beginnings of prompts first.
        self._levels = np.split(rows[order], cuts) if len(rows) else []

    def __len__(self) -> int:
        return len(self.parent)

    def upwards(self, values: npt.NDArray[Any]) -> None:
        """Give each chunk the largest value of itself and all that follow it, in place."""
        for rows in reversed(self._levels):
            np.maximum.at(values, self.parent[rows], values[rows])

    def downwards(self, flags: Flags) -> None:
        """Keep the flag only of chunks that have it and before which all have it, in place."""
        for rows in self._levels:
            flags[rows] &= flags[self.parent[rows]]

    def any_before(self, flags: Flags) -> Flags:
        """Return whether some chunk before each one has the flag."""
        found = np.zeros(len(flags), np.bool_)
        for rows in self._levels:
            above = self.parent[rows]
            found[rows] = found[above] | flags[above]
        return found

    def run(self, flags: Flags) -> Integers:
        """Return how many chunks up to each one have the flag; many, if all of its prompt have."""
        runs = np.where(flags, _WHOLE, 0)
        for rows in self._levels:
            above = runs[self.parent[rows]]
            runs[rows] = np.where(flags[rows], np.minimum(above, _WHOLE - 1) + 1, 0)
        return runs

    def followers(self) -> Integers:
        """Return how many chunks follow each one directly."""
        counts = np.zeros(len(self), np.int64)
        for rows in self._levels:
            np.add.at(counts, self.parent[rows], 1)
        return counts

    def last_before(self, places: Flags, flags: Flags) -> Flags:
        """Return which chunks are the last one with the flag up to one of the places."""
        last = np.where(flags, np.arange(len(flags)), -1)
        for rows in self._levels:
            last[rows] = np.where(flags[rows], rows, last[self.parent[rows]])
        found = np.zeros(len(flags), np.bool_)
        last = last[places]
        found[last[last >= 0]] = True
        return found

    def above(self, flags: Flags, reach: Integers) -> Flags:
        """Return whether each chunk is one of the last `reach` up to some chunk with the flag."""
        left = np.where(flags, reach, 0)
        for rows in reversed(self._levels):
            np.maximum.at(left, self.parent[rows], left[rows] - 1)
        return left > 0

    def followers_known(self, asked: Flags) -> Flags:
        """Return for which chunks all followers are known, as far as those asked for matter."""
        orphans = asked & (self.parent == UNKNOWN) & (self.index > 0)
        return self.index >= (self.index[orphans].max() if orphans.any() else 0)


class HitRules:
    """What hits need, for the chunks of a forest: the rule of each chunk's namespace.

    What comes before a chunk without a known parent counts as whole, but for full objects before
    one whose parent is gone.

    Parameters
    ----------
    forest : Forest
    kinds : uint8 array [n]
        Kinds of each chunk's namespace, as bits (:data:`~kvshelf.format.kinds.KIND_BITS`).
    reach : int or int64 array [n]
        See :attr:`~kvshelf.format.hit_rule.HitRule.reach`.
    whole : Mapping[Kind, bool array [n]]
        Which chunks have all objects of each kind.

    Attributes
    ----------
    reached : bool array [n]
        The full objects up to each chunk are there, if its hits need them.
    ends : bool array [n]
        A hit can end behind the chunk: all that it needs is there.
    """

    def __init__(
        self, forest: Forest, kinds: Masks, reach: int | Integers, whole: Mapping[Kind, Flags]
    ) -> None:
        self._forest = forest
        self._kinds = kinds
        reach = np.minimum(np.asarray(reach, np.int64), _WHOLE)
        self._reach = np.broadcast_to(reach, (len(forest),))
        cut = (forest.parent == GONE) & (forest.index > 0)
        self.reached = ~self.has(FULL) | (whole[FULL] & ~cut)
        forest.downwards(self.reached)
        self.ends = self.reached & (~self.has(STATE) | whole[STATE])
        needs_window = self.has(WINDOW)
        if needs_window.any():
            self.ends &= ~needs_window | (forest.run(whole[WINDOW]) >= self._reach)

    def has(self, kind: Kind) -> Flags:
        """Return of which chunks the namespace has the kind."""
        found: Flags = (self._kinds & KIND_BITS[kind]) != 0
        return found

    def needed(self, kind: Kind, ends: Flags | None = None) -> Flags:
        """Return whose objects of a kind some hit needs.

        Parameters
        ----------
        kind : Kind
        ends : bool array [n] or None
            Where hits end; None: wherever they can.
        """
        ends = self.ends if ends is None else ends
        if kind == WINDOW:
            return self._forest.above(ends, self._reach)
        needed: Flags = ends.copy()
        if kind == FULL:
            self._forest.upwards(needed)
        return needed
