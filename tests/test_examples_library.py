"""The examples without engines of vLLM print what ``examples/README.md`` says they do."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Examples copy little."""


def output_of(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Run an example in this process; return what it printed."""
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capfd.readouterr().out


def test_memory_tier(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    output = output_of("memory_tier.py", monkeypatch, capfd)
    # Tokens of the first prompt in memory and on the shelf, then of the second one.
    rows = [list(map(int, row)) for row in re.findall(r" +(\d+)" * 4 + "$", output, re.MULTILINE)]
    stored, opened, loaded, both, deleted = rows
    assert stored == loaded == [1024, 1024, 0, 0]
    assert opened == [0, 1024, 0, 0]
    # The beginning of the first prompt stays.
    assert 0 < both[0] < 1024
    assert both[1:] == [1024, 768, 768]
    assert deleted == [both[0], 1024, 768, 0]
    assert "768 tokens of the second prompt are loaded nevertheless; all equal: True" in output


def test_paged_cache(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    output = output_of("paged_cache.py", monkeypatch, capfd)
    assert "stored 3 chunks, complete: True" in output
    assert "finds 768 of 1000 tokens" in output
    assert "loaded 768, equal: True, and computes 232" in output


@pytest.mark.long
def test_custom_op(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    output = output_of("custom_op.py", monkeypatch, capfd)
    assert "layer 0 equal: True" in output
    assert "refused: slot_mapping[0]" in output
    for operator in ("gather_kv", "scatter_kv"):
        assert f"kvshelf.{operator}.default: 4 checks, {{'SUCCESS'}}" in output


def test_adapters(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq", reason="pyzmq is missing: pip install '.[server]' in a clone")
    output = output_of("adapters.py", monkeypatch, capfd)
    assert "first engine: stored 512 tokens" in output
    assert "second engine: the server has 512 of 512 tokens" in output
    assert "second engine: loaded; blocks to compute: set()" in output
    assert "the blocks of both engines are equal: True" in output


def test_the_index_names_every_example_and_leads_to_files() -> None:
    index = (EXAMPLES / "README.md").read_text()
    for program in EXAMPLES.glob("*.py"):
        assert f"`python examples/{program.name}" in index or program.name == "demo.py"
    for path in re.findall(r"\b(examples/[\w/]+\.(?:py|sh))", index):
        assert (EXAMPLES.parent / path).is_file(), path
    for link in re.findall(r"\]\(([^)#]+)", index):
        assert (EXAMPLES / link).is_file(), link
