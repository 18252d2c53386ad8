"""When a sweep is due, and how much of a core sweeps take."""

from __future__ import annotations

from typing import Any

import pytest

from kvshelf.capacity.due import (
    CORE_PART,
    MOST_CORE_PART,
    Allowance,
    Growth,
    due_in,
    pressure,
    running_part,
)
from kvshelf.capacity.lease import Finding
from kvshelf.capacity.rules import Rules

HOUR = 3600.0


@pytest.mark.parametrize(
    ("rules", "found", "used", "age", "due"),
    [
        # Space is short: after a second.
        ({"max_bytes": 100}, {"nbytes": 10}, 96, 0.25, 0.75),
        ({"max_bytes": 100}, {"nbytes": 10, "seconds": 9e9}, 96, 5, 0),
        # Who swept last has a plan, and goes first.
        ({"max_bytes": 100}, {"nbytes": 10}, 92, 5, HOUR - 5),
        ({"max_bytes": 100}, {"nbytes": 10, "ours": True}, 92, 5, 0),
        ({"max_bytes": 100}, {"nbytes": 10, "ours": True}, 90, 5, HOUR - 5),
        # The last sweep could free nothing.
        ({"max_bytes": 100}, {"nbytes": 95}, 97, 5, 55),
        ({"max_bytes": 100}, {"nbytes": 95}, 97, 61, 0),
        ({"max_bytes": 100}, {"nbytes": 95, "ours": True}, 97, 5, 55),
        # Its plan was too old, or used up: another one may.
        ({"max_bytes": 100}, {"nbytes": 95, "ours": True, "finished": False}, 97, 5, 0),
        # There is space, and it is known what others write.
        ({"max_bytes": 10000}, {"nbytes": 10}, 10, 3000, 600),
        ({"max_bytes": 10000}, {"nbytes": 10}, 10, 3601, 0),
        ({"max_age": 10 * HOUR}, {"nbytes": 10, "max_age": 10 * HOUR}, 10, 100, 3500),
        ({"max_age": 10 * HOUR}, {"nbytes": 10, "max_age": 10 * HOUR}, 10, 3601, 0),
        # The last sweep kept chunks for longer.
        ({"max_age": 10 * HOUR}, {"nbytes": 10}, 10, 100, 0),
        ({"max_age": 10 * HOUR}, {"nbytes": 10, "max_age": 90 * HOUR}, 10, 20, 40),
        ({"max_age": 10 * HOUR}, {"nbytes": 10, "max_age": 9 * HOUR}, 10, 100, 3500),
        # A salt group may have grown: all engines together look as often as one would.
        ({"group_max_bytes": 10}, {"nbytes": 10}, 10, 100, 3500),
        ({"group_max_bytes": 10}, {"nbytes": 10}, 11, 100, 0),
        ({"group_max_bytes": 10}, {"nbytes": 10, "seconds": 2.0}, 11, 100, 100),
        ({"group_max_bytes": 10}, {"nbytes": 10, "seconds": 1e18}, 11, 100, 3500),
    ],
)
def test_when_a_sweep_is_due(
    rules: dict[str, Any], found: dict[str, Any], used: int, age: float, due: float
) -> None:
    given = {"at": 0.0, "seconds": 0.0, "ours": False, "finished": True, **found}
    options = {name: given.pop(name) for name in ("ours", "finished")}
    assert due_in(Finding(**given), Rules(**rules), used, age, HOUR, **options) == pytest.approx(
        due
    )


def test_nothing_is_known_before_the_first_sweep() -> None:
    assert due_in(None, Rules(max_bytes=100), 0, 0.0, HOUR, ours=False) == 0.0


@pytest.mark.parametrize(
    ("used", "limit", "refuses", "expected"),
    [
        (None, 100, True, 0.0),
        (50, None, True, 0.0),
        (50, 100, False, 0.0),
        # The storage is full of something else.
        (50, 100, True, 0.0),
        (9125, 10000, False, 0.5),
        (9125, 10000, True, 1.0),
        (2000, 1000, False, 1.0),
    ],
)
def test_pressure_grows_towards_the_bound(
    used: int | None, limit: int | None, refuses: bool, expected: float
) -> None:
    assert pressure(used, limit, refuses) == pytest.approx(expected)
    assert running_part(0.0) < running_part(0.5) < running_part(1.0) < 1.0


@pytest.mark.parametrize(("pressed", "part"), [(0.0, CORE_PART), (1.0, MOST_CORE_PART)])
def test_sweeps_take_a_part_of_a_core_over_time(pressed: float, part: float) -> None:
    allowance, now, spent = Allowance(), 1000.0, 0.0
    assert allowance.pause(pressed, now) == 0.0
    end = now + 40 * HOUR
    while now < end:
        pause = allowance.pause(pressed, now)
        assert pause < HOUR
        now += pause
        if pause == 0:
            allowance.take(20.0)
            spent += 20.0
            now += 20.0
    assert 0.9 * part < spent / (40 * HOUR) < 1.1 * part + 20.0 / HOUR


def test_what_sweeps_may_take_in_ten_minutes_they_may_take_at_once() -> None:
    allowance = Allowance()
    allowance.take(100.0)
    assert allowance.pause(1.0, 0.0) == 0.0
    assert allowance.pause(0.0, 0.0) == HOUR
    allowance.take(100.0)
    assert allowance.pause(1.0, 0.0) == pytest.approx(200.0)
    assert allowance.pause(1.0, 200.0) == 0.0


def test_growth_follows_what_is_written_and_not_what_is_deleted() -> None:
    growth, used = Growth(), 1000
    for second in range(120):
        growth.note(used, float(second))
        used += 50
    assert growth.per_second == pytest.approx(50.0, rel=0.05)
    growth.note(100, 120.0)
    assert growth.per_second > 45.0
    for second in range(121, 400):
        growth.note(100, float(second))
    assert growth.per_second < 1.0


def test_growth_of_a_shelf_that_is_not_known_is_none() -> None:
    growth = Growth()
    for second, used in enumerate([100, None, 900, None, 5000]):
        growth.note(used, float(second))
    assert growth.per_second == 0.0
