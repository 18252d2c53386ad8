"""Dividing a range of memory: nothing overlaps, and freed memory serves objects of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshelf.memory.size_classes import SizeClasses

PAGE = 4096
CAPACITY = 256 * PAGE


class SpaceMachine(RuleBasedStateMachine):
    """Allocations and frees in any order, against a map of the pages in use."""

    borders: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.space = SizeClasses(CAPACITY, borders=self.borders)
        self.taken: dict[int, int] = {}
        self.gaps = {border - PAGE: PAGE for border in self.borders}

    def free_runs(self) -> list[int]:
        used = {**self.taken, **self.gaps}
        ends = [0, *(offset + length for offset, length in sorted(used.items()))]
        starts = [*sorted(used), CAPACITY]
        return [start - end for start, end in zip(starts, ends, strict=True)]

    @rule(nbytes=st.integers(1, CAPACITY // 2))
    def allocate(self, nbytes: int) -> None:
        runs = self.free_runs()
        size = self.space.rounded(nbytes)
        offset = self.space.allocate(nbytes)
        if offset is None:
            assert max(runs) < size
            return
        assert offset % PAGE == 0
        assert 0 <= offset <= CAPACITY - size
        assert all(
            other + length <= offset or offset + size <= other
            for other, length in {**self.taken, **self.gaps}.items()
        )
        assert self.space.length(offset) == size
        self.taken[offset] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[offset]
        self.space.free(offset)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), nbytes=st.integers(1, CAPACITY))
    def make_room(self, data: st.DataObject, nbytes: int) -> None:
        stays = data.draw(st.sets(st.sampled_from(sorted(self.taken))))
        seed = data.draw(st.sampled_from(sorted(self.taken)))
        stays.discard(seed)
        held = {o: self.taken[o] for o in stays} | self.gaps
        low = max((o + length for o, length in held.items() if o < seed), default=0)
        high = min((o for o in held if o > seed), default=CAPACITY)
        del self.taken[seed]
        start = self.space.free(seed)
        while beside := [o for o in self.space.neighbours(start) if o not in stays]:
            offset = data.draw(st.sampled_from(beside))
            del self.taken[offset]
            start = self.space.free(offset)
        # All between what stays is one free range now.
        assert (start, start + self.space.length(start)) == (low, high)
        if self.space.rounded(nbytes) <= high - low:
            self.allocate(nbytes)
            assert self.space.rounded(nbytes) in self.taken.values()

    @rule(offset=st.integers(0, CAPACITY // PAGE - 1))
    def ask(self, offset: int) -> None:
        offset *= PAGE
        beside = self.space.neighbours(offset)
        assert all(place in self.taken for place in beside)
        if offset in self.taken or not self.space.divides(offset):
            assert beside == []
        assert self.space.divides(offset) or offset not in self.taken

    @invariant()
    def knows_what_is_free(self) -> None:
        assert self.space.largest_free == max(self.free_runs())
        assert self.space.used == sum(self.taken.values())


class BorderedMachine(SpaceMachine):
    """The same with borders that no allocation lies across, one of them at the first page."""

    borders = (PAGE, 64 * PAGE, 160 * PAGE)


TestSpace = SpaceMachine.TestCase
TestBorderedSpace = BorderedMachine.TestCase


def test_what_fits_lies_between_borders() -> None:
    assert SizeClasses(8 * PAGE).most(3 * PAGE) == 2
    assert SizeClasses(8 * PAGE, borders=[4 * PAGE]).most(3 * PAGE) == 2
    assert SizeClasses(8 * PAGE, borders=[5 * PAGE]).most(4 * PAGE) == 1


@given(nbytes=st.integers(1, 1 << 40))
def test_classes_waste_little(nbytes: int) -> None:
    rounded = SizeClasses(PAGE).rounded(nbytes)
    assert rounded >= nbytes
    assert rounded % PAGE == 0
    assert rounded - nbytes < max(PAGE, nbytes / 32)


@pytest.mark.parametrize(("capacity", "alignment"), [(PAGE, 3), (PAGE, 0), (PAGE - 1, PAGE)])
def test_range_that_cannot_be_divided_is_refused(capacity: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        SizeClasses(capacity, alignment=alignment)


def test_object_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SizeClasses(PAGE).allocate(0)
