"""The benchmark runs, and its statistics are right.

Speed is not tested here: goals are reported by ``make bench``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as bench
from benchmarks.measure import Goal, Row, Work, estimate, measure_pairs, median

pytestmark = pytest.mark.real


@pytest.mark.slow
def test_groups_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert bench.main([*bench.GROUPS, "--quick", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert {"machine", "date", "commit"} <= report.keys()
    rows = report["rows"]
    assert {row["name"].split("/")[0] for row in rows} == bench.GROUPS.keys()
    assert all(row["skipped"] or row["ours_seconds"]["low"] >= 0 for row in rows)
    measured = {row["name"].split("/")[0] for row in rows if not row["skipped"]}
    assert measured >= {"load", "publish", "copy", "lookup", "capacity"}


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=80))
def test_interval_holds_the_median_and_only_samples(samples: list[float]) -> None:
    found = estimate(samples)
    assert min(samples) <= found.low <= found.value <= found.high <= max(samples)
    assert {found.low, found.high} <= set(samples)
    assert found.value == median(samples)


@pytest.mark.parametrize("count", [6, 15, 16, 31, 51, 100])
def test_interval_covers_the_median_with_95_percent_and_no_narrower_one_does(count: int) -> None:
    found = estimate([float(rank) for rank in range(count)])
    first = round(found.low)
    assert round(found.high) == count - 1 - first

    def coverage(rank: int) -> float:
        return 1 - 2 * sum(math.comb(count, k) for k in range(rank + 1)) / 2**count

    assert coverage(first) >= 0.95
    assert coverage(first + 1) < 0.95


def test_pairs_alternate_and_swap_their_order() -> None:
    calls: list[str] = []
    cleaned: list[str] = []
    ours = Work(lambda: calls.append("A"), lambda: cleaned.append("A"))
    floor = Work(lambda: calls.append("B"), lambda: cleaned.append("B"))
    times = measure_pairs(ours, floor, 4, sample_seconds=0.0, warm_up=2)
    assert len(times[0]) == len(times[1]) == 4
    pairs = "".join(calls)[-12:]
    assert [pairs[i : i + 2] for i in range(0, 12, 2)] in (
        ["AB", "BA"] * 3,
        ["BA", "AB"] * 3,
    )
    assert len(cleaned) == len(calls)


def test_goals_judge_what_they_are_about() -> None:
    ours, floors = [3.0] * 15, [2.0] * 15
    assert Row("r", "w", "f", ours, floors, Goal(1.6)).met is True
    assert Row("r", "w", "f", ours, floors, Goal(1.4)).met is False
    assert Row("r", "w", "f", ours, floors, Goal(3.5, "seconds")).met is True
    assert Row("r", "w", "f", ours, floors, Goal(2.5, "seconds")).met is False
    assert Row("r", "w", "f", ours, floors).met is None
    assert Row("r", "w", goal=Goal(1.0), skipped="why").met is None
