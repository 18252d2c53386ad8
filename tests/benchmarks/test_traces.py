"""The simulation of bounded shelves counts what can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import traces
from benchmarks.traces import FAMILIES, ORDERS, Family, Trace, compare

PLAIN, STATES, WINDOWS = FAMILIES
BLOCK = 512


def write(path: Path, prompts: list[list[int]], gap: float = 100.0) -> Trace:
    """A trace of prompts of whole blocks, so many seconds apart."""
    rows = [
        {
            "timestamp": int(1000 * gap * number),
            "input_length": BLOCK * len(ids),
            "output_length": 1,
            "hash_ids": ids,
        }
        for number, ids in enumerate(prompts)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return Trace(path)


def test_without_bound_each_order_hits_all_that_was_seen(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4]])
    result = compare(trace, PLAIN, ORDERS, [2.0])
    assert result.most == 6 / 12
    assert result.nbytes == 6
    assert all(rates == [6 / 12] for rates in result.rates.values())


def test_a_hit_ends_at_a_state(tmp_path: Path) -> None:
    prompts = [[*range(40)], [*range(30), *range(50, 60)]]
    trace = write(tmp_path / "t.jsonl", prompts)
    # States after chunks 32 (the second step's end) and 40; at 32 others have parted already.
    assert compare(trace, STATES, {}).most == 0.0
    third = write(tmp_path / "u.jsonl", [*prompts, prompts[1]])
    assert compare(third, STATES, {}).most == 40 / 120


def test_a_hit_needs_its_last_windows() -> None:
    there = np.ones((3, 6), np.bool_)
    prompt = np.arange(6)
    there[1, 1] = False
    assert WINDOWS.hit(prompt, there) == (6, 6)
    there[1, 4] = False
    assert WINDOWS.hit(prompt, there) == (4, 6)
    there[1, 3] = False
    assert WINDOWS.hit(prompt, there) == (1, 6)
    assert WINDOWS.needs(4) == [(0, slice(0, 4)), (1, slice(2, 4))]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_no_order_holds_more_than_the_bound(tmp_path: Path, family: Family) -> None:
    rng = np.random.default_rng(3)
    prompts = []
    for number in range(60):
        shared = int(rng.integers(0, 8))
        prompts.append([*range(shared), *(1000 * (number + 1) + i for i in range(shared, 12))])
    trace = write(tmp_path / "t.jsonl", prompts, gap=30.0)
    for name, order in {**ORDERS, **traces.MORE_ORDERS}.items():
        cache = order(trace, family, 100.0)
        rate = traces._run(trace, family, cache)
        sizes = np.array(family.sizes)
        held = int((cache.there.sum(axis=1) * sizes).sum())
        assert held == cache.used, name
        assert held <= 100, name
        assert 0 < rate < 0.5, name
