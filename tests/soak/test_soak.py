"""The soak itself: what it takes for a failure, and that its report can be written."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.engines import Answer


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", Path(__file__).with_name("soak.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


soak = _load()


def answer(tokens: list[int], reason: str = "length", seconds: float = 0.1) -> Answer:
    gaps = [0.5, 0.005, 2.0, 1.0]
    return Answer(tokens, [], gaps[: len(tokens)], [], 0, None, reason, None, seconds, None)


EXPECTED = answer([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("given", "near_ties", "failures"),
    [
        (answer([1, 2, 3, 4]), 0, 0),
        (answer([9, 2, 3, 4]), 0, 1),
        # What follows a near-tie is another text.
        (answer([1, 9, 9, 9]), 1, 0),
        (answer([1, 2, 3]), 0, 1),
        (answer([1, 2, 3, 4, 5]), 0, 1),
        (answer([], "abort"), 0, 0),
        (answer([1, 2], "abort"), 0, 0),
        (answer([1, 2, 9], "abort"), 0, 1),
        (answer([1, 2, 3, 4], "error"), 0, 1),
        (answer([1, 2, 3, 4], seconds=61.0), 0, 1),
    ],
)
def test_what_is_a_failure(given: Answer, near_ties: int, failures: int) -> None:
    report = soak.Report()
    report.judge("A", 7, given, EXPECTED)
    assert (len(report.near_ties), len(report.failures)) == (near_ties, failures)
    assert report.answers == 1


def test_prompts_share_beginnings_and_depend_on_the_seed_only() -> None:
    prompts = soak.make_prompts(60, 3)
    assert prompts == soak.make_prompts(60, 3) != soak.make_prompts(60, 4)
    assert all(20 <= len(prompt) <= 1800 for prompt in prompts)
    beginnings = [tuple(prompt[:256]) for prompt in prompts if len(prompt) >= 256]
    assert len(set(beginnings)) < 0.7 * len(beginnings)


def test_the_report_is_shown_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    report = soak.Report(faults={"deleted": 3}, left_out=["writes stop: no"])
    report.judge("A", 7, answer([1, 9, 9, 9]), EXPECTED)
    report.counters = [{"probes": 1.0}, {"lookups": 2.0}]
    report.samples = [{"second": float(i), "A: memory, MiB": 100.0 + i} for i in range(20)]
    soak.show(report)
    shown = capsys.readouterr().out
    assert "deleted" in shown and "left out: writes stop: no" in shown
    written = json.loads(json.dumps(soak.as_json(report, 20.0, 1)))
    assert written["flatness"] == [
        {"what": "A: memory, MiB", "early": 105.5, "late": 117.5, "most": 119.0}
    ]
    assert written["near_ties"][0]["gap"] == 0.005


def test_objects_that_are_special_are_only_deleted(tmp_path: Path) -> None:
    """Whoever opens a FIFO for writing waits for ever."""
    import os

    ground = soak.Ground.__new__(soak.Ground)
    ground.mount, ground.why_plain, ground._frozen = tmp_path, "not here", False
    ground.shelf = tmp_path / "shelf"
    folder = ground.shelf / "x-0123456789abcdef" / "_"
    folder.mkdir(parents=True)
    report = soak.Report()
    trouble = soak.Trouble(ground, report, 1)
    for number in range(40):
        os.mkfifo(folder / f"{number}.safetensors")
        (folder / f"{100 + number}.safetensors").mkdir()
    names = [trouble._object_trouble() for _ in range(300)]
    assert set(names) == {None, "deleted"}
    assert any("filesystem full" in line for line in report.left_out)
