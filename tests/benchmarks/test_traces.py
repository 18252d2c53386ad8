"""The simulation of bounded shelves counts what can be counted by hand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from benchmarks import traces
from benchmarks.plots import make
from benchmarks.traces import FAMILIES, ORDERS, OURS, TRACES, Family, Trace, compare, main

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


def test_the_command_prints_tables_and_writes_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "small.jsonl", [[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 4]])
    file = tmp_path / "eviction.json"
    main([str(tmp_path / "small.jsonl"), "--json", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| small, plain: unlimited 50.0% | 1% | 3% | 10% | 30% |")
    assert sum(line.startswith(f"| {OURS} |") for line in lines) == len(FAMILIES)
    report = json.loads(file.read_text())
    assert report["command"][-1] == str(file)
    assert report["shares"] == [0.01, 0.03, 0.1, 0.3]
    assert list(report["results"]) == [f"small, {family.title}" for family in FAMILIES]
    plain = report["results"]["small, plain"]
    assert plain["most"] == 0.5
    for line in lines[2 : 2 + len(plain["rates"])]:
        name, *rates = [cell.strip() for cell in line.strip("|").split("|")]
        assert [f"{100 * rate:.1f}" for rate in plain["rates"][name]] == rates
    picture = ET.fromstring(make("eviction", tmp_path)["eviction.svg"])
    paths = [part for part in picture.iterfind(".//{*}path") if part.get("class") == "blue"]
    assert len(paths) == 1 + len(FAMILIES), "one in the legend, and one in each panel"


def test_the_traces_are_there_with_their_notice() -> None:
    assert "Apache License 2.0" in (TRACES / "README.md").read_text()
    assert {path.name for path in TRACES.glob("*.gz")} == {
        "mooncake_conversation.jsonl.gz",
        "mooncake_synthetic.jsonl.gz",
    }
