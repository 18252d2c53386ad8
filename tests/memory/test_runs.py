"""Runs between held places, against a plain list of the places."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshelf.memory.runs import Runs

CAPACITY = 64


class RunsMachine(RuleBasedStateMachine):
    """Places are held and let go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs(CAPACITY)
        self.held: dict[int, int] = {}

    def plain(self) -> list[tuple[int, int]]:
        ends = [0, *(self.held[start] for start in sorted(self.held))]
        starts = [*sorted(self.held), CAPACITY]
        return [(e, s) for e, s in zip(ends, starts, strict=True) if s > e]

    @precondition(lambda self: self.plain())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        low, high = data.draw(st.sampled_from(self.plain()))
        start = data.draw(st.integers(low, high - 1))
        end = data.draw(st.integers(start + 1, high))
        self.runs.hold(start, end)
        self.held[start] = end

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.held)))
        self.runs.let_go(start)
        del self.held[start]

    @invariant()
    def knows_the_runs(self) -> None:
        plain = self.plain()
        start, end = self.runs.longest
        assert end - start == max((high - low for low, high in plain), default=0)
        assert (start, end) in plain or not plain
        for low, high in plain:
            assert all(self.runs.around(offset) == (low, high) for offset in range(low, high))
        assert [o for o in range(CAPACITY) if self.runs.holds(o)] == sorted(self.held)


TestRuns = RunsMachine.TestCase
