"""Divides a range of memory among objects of many sizes.

Owns which bytes of the range are in use, and the neighbours of free ranges. It knows offsets only,
and touches no memory.

Contracts
---------
* Sizes are rounded up to classes, 32 between a power of two and the next, so that the memory of
  an object fits later ones of nearly its size. That wastes less than 1/32 of an object, or less
  than the alignment for one that is smaller than 32 times the alignment.
* No allocation lies across a border: what precedes each, as much as the alignment, is never used.
* No memory belongs to a class for good. A freed range merges with adjacent free ones, and
  :meth:`SizeClasses.neighbours` names what must be evicted to make a free range larger.
* It has no lock: its owner locks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final

#: Binary digits that distinguish the classes between a power of two and the next.
_DIGITS: Final = 5


class SizeClasses:
    """Which parts of a range are free.

    Parameters
    ----------
    capacity : int
        Bytes of the range.
    alignment : int
        A power of two: offsets and lengths are its multiples.
    borders : Sequence of int
        Multiples of the alignment, in order, each inside the range.

    Attributes
    ----------
    capacity, alignment : int
    gaps : list of int
        The offsets of what is never used.
    used : int
        Bytes in use, rounded up to classes.

    Raises
    ------
    ValueError
        If `alignment` is no power of two, or `capacity` is less.

    Examples
    --------
    >>> space = SizeClasses(1 << 20)
    >>> space.allocate(5000), space.allocate(100_000)
    (0, 8192)
    >>> space.free(0)
    >>> space.used
    102400
    """

    def __init__(
        self, capacity: int, *, alignment: int = 4096, borders: Sequence[int] = ()
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment is {alignment}; expected a power of two")
        if capacity < alignment:
            raise ValueError(f"capacity is {capacity}; expected at least {alignment}")
        self.capacity = capacity // alignment * alignment
        self.alignment = alignment
        self.used = 0
        #: All ranges, free or in use: their lengths by offset, and their offsets by end.
        self._lengths: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        #: The free ones, as (length, offset) in order, and their offsets.
        self._free: list[tuple[int, int]] = []
        self._is_free: set[int] = set()
        self.gaps = [border - alignment for border in borders]
        start = 0
        for gap in (*self.gaps, self.capacity):
            if gap > start:
                self._add_free(start, gap - start)
            start = gap + alignment

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free range."""
        return self._free[-1][0] if self._free else 0

    def rounded(self, nbytes: int) -> int:
        """Return how many bytes an object takes.

        Raises
        ------
        ValueError
            If `nbytes` is less than one.
        """
        if nbytes < 1:
            raise ValueError(f"{nbytes} bytes were requested; expected at least 1")
        step = max(self.alignment, 1 << max(0, (nbytes - 1).bit_length() - 1 - _DIGITS))
        return -(-nbytes // step) * step

    def length(self, offset: int) -> int:
        """Return how many bytes the allocation or free range at an offset takes."""
        return self._lengths[offset]

    def divides(self, offset: int) -> bool:
        """Whether an allocation or a free range begins at an offset."""
        return offset in self._lengths

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of memory for an object, from the smallest free range that fits.

        Returns
        -------
        int or None
            None if no free range is so large.

        Raises
        ------
        ValueError
            If `nbytes` is less than one.
        """
        size = self.rounded(nbytes)
        place = bisect_left(self._free, (size, 0))
        if place == len(self._free):
            return None
        length, offset = self._free[place]
        self._remove_free(offset)
        if length > size:
            self._add_free(offset + size, length - size)
        self._lengths[offset] = size
        self._offsets[offset + size] = offset
        self.used += size
        return offset

    def free(self, offset: int) -> int:
        """Free an allocation; return the begin of the free range that it is part of."""
        assert offset not in self._is_free
        size = self._lengths.pop(offset)
        end = offset + size
        del self._offsets[end]
        self.used -= size
        before = self._offsets.get(offset)
        if before in self._is_free:
            self._remove_free(before)
            offset = before
        if end in self._is_free:
            after = end
            end += self._lengths[after]
            self._remove_free(after)
        self._add_free(offset, end - offset)
        return offset

    def neighbours(self, offset: int) -> list[int]:
        """Return the allocations beside the free range at an offset; none if there is no such."""
        if offset not in self._is_free:
            return []
        before = self._offsets.get(offset)
        after = offset + self._lengths[offset]
        beside = [] if before is None else [before]
        return [*beside, after] if after in self._lengths else beside

    def most(self, nbytes: int) -> int:
        """Return how many ranges of `nbytes` fit if nothing is in use."""
        starts = [0, *(gap + self.alignment for gap in self.gaps)]
        return sum(
            (end - start) // nbytes
            for start, end in zip(starts, [*self.gaps, self.capacity], strict=True)
        )

    def _add_free(self, offset: int, length: int) -> None:
        self._lengths[offset] = length
        self._offsets[offset + length] = offset
        self._is_free.add(offset)
        insort(self._free, (length, offset))

    def _remove_free(self, offset: int) -> None:
        length = self._lengths.pop(offset)
        del self._offsets[offset + length]
        self._is_free.remove(offset)
        del self._free[bisect_left(self._free, (length, offset))]
