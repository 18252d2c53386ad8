"""How long a load takes whose end was not seen, and which of its pieces matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvshelf.format.kinds import DRAFT, FULL, STATE
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure, Load, LoadPiece
from tests.support.formats import make_format
from tests.support.prompts import make_chunks

CHUNKS = make_chunks(make_format(), 8)
VIEW: Any = None


def piece_of(
    chunks: int, leading: int, failure: Failure | None = None, *, started: float | None, **more: int
) -> LoadPiece:
    """A piece of which so many chunks are there, and the next one failed."""
    piece = LoadPiece(
        VIEW, [ChunkSlots(chunk, torch.empty(0)) for chunk in CHUNKS[:chunks]], **more
    )
    for place in range(leading):
        piece.arrive(place)
    if failure is not None:
        piece.fail(leading, failure)
    piece.started = started
    return piece


@pytest.mark.parametrize(
    ("piece", "seconds"),
    [
        (piece_of(4, 4, started=101.0), 10.0),
        # Of the first chunk maybe all is there, of those behind others a half.
        (piece_of(4, 0, Failure.CUT, started=102.0), 2.0 + 8.0 * 4 / 1),
        (piece_of(4, 2, Failure.CUT, started=102.0), 2.0 + 8.0 * 4 / 2.5),
        (piece_of(8, 2, Failure.CUT, started=100.0, threads=4), 10.0 * 8 / 4),
        (piece_of(8, 2, Failure.CUT, started=100.0, threads=4, at_once=2), 10.0 * 8 / 3),
        (piece_of(4, 3, Failure.CUT, started=100.0, threads=4), 10.0 * 4 / 3.5),
        (piece_of(4, 0, Failure.CUT, started=None), None),
        (piece_of(4, 2, Failure.MISSING, started=101.0), None),
        (piece_of(4, 2, Failure.ERROR, started=101.0), None),
    ],
)
def test_seconds_of_a_whole_load_when_it_was_cut(piece: LoadPiece, seconds: float | None) -> None:
    load = Load("r", 0, begun=100.0, seconds=10.0, pieces={FULL: piece})
    assert load.seconds_of_all == (None if seconds is None else pytest.approx(seconds))
    load.cancelled = True
    assert load.seconds_of_all is None


def test_load_of_which_only_the_drafters_piece_failed_has_not_failed() -> None:
    pieces = {FULL: piece_of(2, 2, started=100.0), STATE: piece_of(1, 1, started=100.0)}
    load = Load("r", 0, begun=100.0, seconds=10.0, pieces=pieces)
    pieces[DRAFT] = piece_of(2, 1, Failure.MISSING, started=100.0)
    assert not load.failed and load.failures == [] and load.seconds_of_all == 10.0
    pieces[STATE].fail(0, Failure.BAD)
    assert load.failed and load.failures == [(STATE, CHUNKS[0], Failure.BAD)]


def test_piece_is_slow_once_it_is_late_for_as_many_chunks_as_are_there() -> None:
    piece = piece_of(3, 1, started=None)
    piece.cuts = [5.0, 7.0, 9.0]
    assert [piece.is_slow(now) for now in (6.0, 7.0, 7.1)] == [False, False, True]
    piece.arrive(1)
    assert not piece.is_slow(8.0)
    piece.arrive(2)
    assert not piece.is_slow(99.0)
