"""The benchmark runs, tells what it measured, and judges nothing but figures.

Speed is not tested here: goals are reported by ``make bench``.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as bench
from benchmarks.child import Child, ChildError, MissingEngineError
from benchmarks.least_bytes import bytes_row, with_bytes
from benchmarks.measure import (
    Goal,
    Row,
    Work,
    estimate,
    measure_pairs,
    median,
    percentile,
)
from benchmarks.peers import _differing, damage
from benchmarks.plots import first_tokens, make
from benchmarks.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which vLLM is not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a)
    )


# ----------------------------------------------------------------------------- command line


@pytest.mark.slow
def test_quick_run_prints_the_table_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page, scratch = tmp_path / "figures.json", tmp_path / "table.md", tmp_path / "scratch"
    scratch.mkdir()
    command = ["--quick", "--json", str(file), "--markdown", str(page), "--dir", str(scratch)]
    assert bench.main(command) == 0

    report = json.loads(file.read_text())
    names = [row["name"] for row in report["rows"]]
    assert len(set(names)) == len(names)
    groups = {name.split("/")[0] for name in names}
    assert groups == {
        *("load", "gil", "publish", "tier", "memory", "far", "copy", "lookup", "s3", "engine")
    }
    for row in report["rows"]:
        if row["skipped"]:
            assert row["ours_seconds"] is None, row
            continue
        assert row["pairs"] == 3
        assert 0 < row["ours_seconds"]["least"] <= row["ours_seconds"]["median"]
        assert len(row["samples"]["ours"]) == 3
        if row["floor"]:
            assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    assert report["machine"]["processors"] >= 1
    assert report["machine"]["filesystem"]
    assert report["versions"]["kvshelf"]
    assert report["date"].endswith("+00:00")
    assert report["command"][-len(command) :] == command

    printed = capsys.readouterr().out
    for row in report["rows"]:
        # The beginning of its first line in the table.
        assert textwrap.wrap(row["work"], 24)[0] in " ".join(printed.split()), row["work"]
    assert "Rows of fewer than 15 pairs" in printed
    assert len(page.read_text().splitlines()) == 2 + sum(not r["skipped"] for r in report["rows"])
    assert not list(scratch.iterdir()), "the shelves that were measured on are gone"


def test_chosen_groups_and_pairs(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert bench.main(["load", "--quick", "--pairs", "5", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"].split("/")[0] for row in rows] == ["load", "load"]
    assert {row["pairs"] for row in rows} == {5}


@pytest.mark.slow
def test_waits_are_measured_when_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert bench.main(["waits", "--quick", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    names = {row["name"] for row in rows}
    assert {"waits/delay/local/2", "waits/idle/2", "waits/others"} <= names
    if "waits/compared" not in names:  # watchdog is there
        ways = ("own", "watchdog", "watchdog-256", "polling")
        assert {f"waits/compared/{way}/{what}" for way in ways for what in (2, "others")} <= names
    for row in rows:
        assert row["skipped"] or row["ours_seconds"]["least"] >= 0, row


@pytest.mark.slow
def test_a_sweep_of_many_objects_is_measured_when_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert bench.main(["gc", "--quick", "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    commands = {"gc/plan", "gc/orphans", "gc/delete"}
    assert set(rows) == commands | {"gc/evict", "gc/evict-s3"}
    assert all(rows[name]["extra"]["resident_bytes"] > 20 << 20 for name in commands)
    assert rows["gc/evict"]["ours_seconds"]["median"] > 0


def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "load", "--quick"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "verified load" in done.stdout


def test_a_run_that_is_stopped_shows_what_it_has_and_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "load", "publish", "--quick"]
    with subprocess.Popen(
        [*command, "--pairs", "10000", "--dir", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while process.poll() is None and not list(tmp_path.glob("*/load-*/*/*/*/*.safetensors")):
            time.sleep(0.01)
        process.terminate()
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped" in errors
    assert "processors" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["nonsense"], ["--pairs", "0"]])
def test_wrong_command_lines_are_refused(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(command)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_missed_goal_is_reported_and_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(settings: Settings) -> Iterator[Row]:
        yield Row("slow", "what is slow", "the floor", [2.0] * 20, [1.0] * 20, Goal(1.5))
        yield Row("fast", "what is fast", "the floor", [2.0] * 20, [1.0] * 20, Goal(2.5))

    monkeypatch.setitem(bench.GROUPS, "load", slow)
    file = tmp_path / "figures.json"
    assert bench.main(["load", "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["slow"]["met"] is False
    assert rows["fast"]["met"] is True
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines if line[:3] == ["what", "is", "slow"]] == ["no"]
    assert [line[-1] for line in lines if line[:3] == ["what", "is", "fast"]] == ["yes"]


def test_lengths_are_measured_when_asked_for_and_only_with_engines(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert bench.main(["lengths", "--quick", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert len(report["rows"]) == 8
    assert {row["skipped"] for row in report["rows"]} == {"not with --quick"}
    assert report["commit"] is None or re.fullmatch("[0-9a-f]{12}(-dirty)?", report["commit"])


@pytest.mark.usefixtures("no_engine")
def test_without_vllm_its_rows_say_so(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = ["engine", "startup", "--model", str(tmp_path), "--pairs", "1", "--json", str(file)]
    assert bench.main(command) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 6
    assert all("not installed" in row["skipped"] for row in rows)


def test_without_vllm_there_is_no_child(no_engine: None, tmp_path: Path) -> None:
    with pytest.raises(MissingEngineError, match="not installed"):
        Child("engine", tmp_path / "log")


@pytest.mark.parametrize("read", [False, True])
def test_the_work_on_the_bytes_is_added_to_each_floor(tmp_path: Path, read: bool) -> None:
    files = [tmp_path / name for name in "abcd"]
    for file in files:
        file.write_bytes(bytes(1 << 20))
    measured = Row("hits", "a hit", "in memory", ours=[3.0, 4.0], floors=[1.0, 2.0])
    row = with_bytes(bytes_row(measured, "bytes", 1.1, read=read), measured, files, 2, read=read)
    assert (row.name, row.ours, row.extra["bytes"]) == ("bytes", [3.0, 4.0], 2 << 20)
    assert ("one read" in row.floor) is read
    assert all(0 < a - b < 1 for a, b in zip(row.floors, measured.floors, strict=True))


def test_an_answer_is_right_if_computing_or_a_hit_in_memory_gives_it() -> None:
    computed, in_memory = [[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 7], [5, 6]]
    assert _differing([[1, 2], [3, 7], [5, 6]], computed, in_memory) == "0 of 3 answers differ"
    assert _differing([[1, 2], [3, 7], [5, 6]], computed) == "1 of 3 answers differ"
    assert _differing(None, computed) == "the engine ended"


@pytest.mark.slow
def test_replicas_serve_a_trace_from_one_shelf(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert bench.main(["replicas", "--quick", "--pairs", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["replicas/directory", "replicas/s3"]
    for row in rows:
        if not row["skipped"]:
            [many], [alone] = row["extra"]["many"], row["extra"]["alone"]
            assert 0 < many["hits"] <= alone["hits"] < row["extra"]["chunks"]
            assert not many["failed"] + alone["failed"]


@pytest.mark.slow
def test_four_processes_are_measured_with_a_node_server_and_without(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert bench.main(["together", "--quick", "--pairs", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == [
        f"together/{name}" for name in ("directory", "s3-first", "s3-again")
    ]
    assert all(row["skipped"] or row["samples"]["floor"] for row in rows)


# ------------------------------------------------------------------------------- statistics


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


def test_percentile_is_a_sample() -> None:
    samples = [float(number) for number in range(1, 101)]
    assert percentile(samples, 0.99) == 99.0
    assert percentile(samples, 1.0) == 100.0
    assert percentile([3.0], 0.99) == 3.0


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


def test_short_work_is_repeated_alike_on_both_sides() -> None:
    counts = {"A": 0, "B": 0}

    def count(side: str) -> None:
        counts[side] += 1

    measure_pairs(
        Work(lambda: count("A")), Work(lambda: count("B")), 2, sample_seconds=1e-3, warm_up=0
    )
    assert counts["A"] > 20
    assert counts["A"] % 2 == 0


def test_goals_judge_what_they_are_about() -> None:
    ours, floors = [3.0] * 15, [2.0] * 15
    assert Row("r", "w", "f", ours, floors, Goal(1.6)).met is True
    assert Row("r", "w", "f", ours, floors, Goal(1.4)).met is False
    assert Row("r", "w", "f", ours, floors, Goal(1.1, "difference")).met is True
    assert Row("r", "w", "f", ours, floors, Goal(0.9, "difference")).met is False
    assert Row("r", "w", "f", ours, floors, Goal(3.5, "seconds")).met is True
    assert Row("r", "w", "f", ours, floors, Goal(2.5, "seconds")).met is False
    assert Row("r", "w", "f", ours, floors).met is None
    assert Row("r", "w", goal=Goal(1.0), skipped="why").met is None


# ---------------------------------------------------------------------------------- engines


@pytest.mark.slow
def test_step_thread_is_timed_without_an_engine(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    file = tmp_path / "figures.json"
    assert bench.main(["lookup", "--pairs", "2", "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["lookup/step"]["skipped"] is None
    assert rows["lookup/step"]["pairs"] == 2


def tiny_model(folder: Path) -> Path:
    """Make a model for engines."""
    script, model = ROOT / "examples" / "models" / "make_model.py", folder / "model"
    subprocess.run([sys.executable, str(script), str(model), "--recipe", "tiny"], check=True)
    return model


@pytest.mark.slow
def test_engines_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model = tiny_model(tmp_path)
    file = tmp_path / "figures.json"
    command = ["engine", "--pairs", "2", "--model", str(model), "--json", str(file)]
    assert bench.main(command) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    names = ("cold", "cold-burst", "warm", "warm-bytes", "warm-s3")
    assert set(rows) == {f"engine/{name}" for name in names}
    for row in rows.values():
        assert row["skipped"] is None
        assert row["pairs"] == 2


@pytest.mark.slow
def test_first_tokens_of_prompts_of_several_lengths_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    model = tiny_model(tmp_path)
    file = tmp_path / "first-token.json"
    command = ["lengths", "--pairs", "2", "--model", str(model), "--json", str(file)]
    assert bench.main(command) == 0
    report = json.loads(file.read_text())
    assert [row["skipped"] for row in report["rows"]] == [None] * 8
    found = first_tokens(report)
    assert [one["stored_tokens"] for one in found] == [1024, 2048, 4096, 7936]
    assert all(len(one["seconds"]) == 3 and min(one["seconds"]) > 0 for one in found)
    assert make("first-token", tmp_path)["first-token.svg"].startswith("<svg")


@pytest.mark.slow
def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    with (
        Child("engine", tmp_path / "log", model=str(tmp_path), kv_transfer_config={}) as child,
        pytest.raises(ChildError, match="end of its log"),
    ):
        child.wait_ready()


@pytest.mark.slow
def test_a_prompt_goes_through_the_tier_of_vllm_and_through_kvshelf(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    file = tmp_path / "figures.json"
    command = ["fs-tier", "--quick", "--json", str(file), "--dir", str(tmp_path)]
    # vLLM warns while it is imported.
    subprocess.run([sys.executable, "-m", "benchmarks", *command], check=True, cwd=ROOT)
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["fs-tier/store", "fs-tier/load"]
    assert all(row["ours_seconds"]["median"] > 0 < row["floor_seconds"]["median"] for row in rows)


def test_long_prompts_are_loaded_several_at_once(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert bench.main(["scale", "--quick", "--json", str(file), "--dir", str(tmp_path)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["extra"]["chunk_tokens"] for row in rows] == [256, 512]


def test_damage_changes_the_middle_of_large_files_only(tmp_path: Path) -> None:
    small, large = tmp_path / "config.json", tmp_path / "deep" / "large.bin"
    large.parent.mkdir()
    small.write_bytes(bytes(100))
    large.write_bytes(bytes(1 << 20))
    damage(tmp_path)
    changed = large.read_bytes()
    assert small.read_bytes() == bytes(100)
    assert changed[:4096] == bytes(4096)
    assert changed[1 << 19 : (1 << 19) + 4096] != bytes(4096)
    assert len(changed) == 1 << 20
