"""Hits of engines are recorded as uses of all that they need, wherever the engine has it from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("vllm")

from kvshelf.capacity.uses import Uses
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, Kind
from kvshelf.metrics import Counters
from kvshelf.shelf.view import ShelfView
from tests.sim.engine_sides import LoneScheduler, Make, Request
from tests.support.prompts import prompt
from tests.support.waiting import until


class Noted(Uses):
    """Notes what is recorded."""

    def __init__(self) -> None:
        super().__init__(Counters())
        self.hits: list[tuple[Kind, list[int]]] = []

    def note(self, view: ShelfView, chunks: Sequence[Chunk]) -> None:
        """Note the kind and the indices."""
        self.hits.append((view.fmt.kind, [chunk.index for chunk in chunks]))


@pytest.fixture
def side(make: Make) -> LoneScheduler:
    return make(uses=Noted())


def hits(side: LoneScheduler) -> list[tuple[Kind, list[int]]]:
    assert isinstance(side.uses, Noted)
    return side.uses.hits


@pytest.mark.parametrize("at_hand", [0, 8, 24, 28])
def test_hit_is_a_use_of_its_whole_prefix(side: LoneScheduler, at_hand: int) -> None:
    side.put(prompt(33), 3)
    request = Request("r", prompt(33))
    side.side.new_request(request)
    side.ask(request, at_hand)
    until(lambda: hits(side) == [(FULL, [0, 1, 2])])
