"""The runs of a range of memory between pinned objects: each can be evicted as one piece.

Owns the runs and their lengths. It knows offsets only, touches no memory, and has no lock: its
owner locks. All methods take logarithmic time, apart from moving a sorted list's tail.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Runs:
    """The runs of a range, the longest ones between places that are held.

    Parameters
    ----------
    capacity : int
        Bytes of the range.

    Examples
    --------
    >>> runs = Runs(100)
    >>> runs.hold(30, 40)
    >>> runs.longest, runs.around(10)
    ((40, 100), (0, 30))
    >>> runs.let_go(30)
    >>> runs.longest
    (0, 100)
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        #: The held places: their starts in order, and their ends by start.
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}
        #: The runs, as (length, start) in order.
        self._runs: list[tuple[int, int]] = [(capacity, 0)]

    @property
    def longest(self) -> tuple[int, int]:
        """Start and end of the longest run; (0, 0) if there is none."""
        length, start = self._runs[-1] if self._runs else (0, 0)
        return start, start + length

    def holds(self, start: int) -> bool:
        """Whether a held place begins here."""
        return start in self._ends

    def around(self, offset: int) -> tuple[int, int]:
        """Return start and end of the run that an offset lies in.

        For the start of a held place, that is what lies before it.
        """
        place = bisect_left(self._starts, offset)
        start = self._ends[self._starts[place - 1]] if place else 0
        return start, self._starts[place] if place < len(self._starts) else self._capacity

    def hold(self, start: int, end: int) -> None:
        """Hold a place that lies in a run."""
        low, high = self.around(start)
        self._remove(low, high)
        self._add(low, start)
        self._add(end, high)
        insort(self._starts, start)
        self._ends[start] = end

    def let_go(self, start: int) -> None:
        """Release the place that begins here."""
        del self._starts[bisect_left(self._starts, start)]
        end = self._ends.pop(start)
        low, high = self.around(start)
        self._remove(low, start)
        self._remove(end, high)
        self._add(low, high)

    def _add(self, start: int, end: int) -> None:
        if end > start:
            insort(self._runs, (end - start, start))

    def _remove(self, start: int, end: int) -> None:
        if end > start:
            del self._runs[bisect_left(self._runs, (end - start, start))]
