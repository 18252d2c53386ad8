"""Divides a range of memory among objects of many sizes.

Owns which bytes of the range are in use. It knows offsets only, and touches no memory.

Contracts
---------
* Sizes are rounded up to one of eight classes between a power of two and the next, so that
  memory of an object fits many later ones. An object wastes less than an eighth of its size,
  or less than the alignment if it is smaller than eight times that.
* Freed memory merges with what is free beside it, and any class may take it.
* It has no lock: its owner locks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

#: Sizes of classes between a power of two and the next.
_STEPS: Final = 8


class SizeClasses:
    """Which parts of a range are free.

    Parameters
    ----------
    capacity : int
        Bytes of the range.
    alignment : int
        A power of two: offsets and sizes are its multiples.

    Attributes
    ----------
    capacity, alignment : int
    used : int
        Bytes in use, rounded up to classes.
    """

    def __init__(self, capacity: int, *, alignment: int = 4096) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment is {alignment}; expected a power of two")
        if capacity < alignment:
            raise ValueError(f"capacity is {capacity}; expected at least {alignment}")
        self.capacity = capacity // alignment * alignment
        self.alignment = alignment
        self.used = 0
        #: Bytes of each allocation by its offset.
        self._sizes: dict[int, int] = {}
        #: Free ranges: by offset, by their end, and in order of size.
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._free: list[tuple[int, int]] = []
        self._add(0, self.capacity)

    def rounded(self, nbytes: int) -> int:
        """Return how many bytes an object takes.

        Raises
        ------
        ValueError
            If `nbytes` is less than one.
        """
        if nbytes < 1:
            raise ValueError(f"{nbytes} bytes were requested; expected at least 1")
        step = max(self.alignment, 1 << max(0, (nbytes - 1).bit_length() - 4))
        return -(-nbytes // step) * step

    def allocate(self, nbytes: int) -> int | None:
        """Return the offset of free memory for an object, None if no free range is so large."""
        size = self.rounded(nbytes)
        place = bisect_left(self._free, (size, 0))
        if place == len(self._free):
            return None
        length, start = self._free[place]
        self._remove(start, length)
        if length > size:
            self._add(start + size, length - size)
        self._sizes[start] = size
        self.used += size
        return start

    def free(self, offset: int) -> None:
        """Free what :meth:`allocate` returned."""
        size = self._sizes.pop(offset)
        self.used -= size
        start, end = offset, offset + size
        before = self._ends.get(start)
        if before is not None:
            self._remove(before, start - before)
            start = before
        after = self._starts.get(end)
        if after is not None:
            self._remove(end, after - end)
            end = after
        self._add(start, end - start)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free range."""
        return self._free[-1][0] if self._free else 0

    def _add(self, start: int, length: int) -> None:
        self._starts[start] = start + length
        self._ends[start + length] = start
        insort(self._free, (length, start))

    def _remove(self, start: int, length: int) -> None:
        del self._starts[start], self._ends[start + length]
        del self._free[bisect_left(self._free, (length, start))]
