"""``kvshelf explain`` on shelves of real engines; each cause is in tests/tools/test_explain.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshelf.cli.app import app
from tests.support.fleet import Engines, MakePrompt
from tests.support.waiting import until
from tests.vllm.shelf_files import DAMAGE, ShelfFiles

pytestmark = pytest.mark.slow


def explain(root: Path, tokens: list[int]) -> tuple[dict[str, Any], list[str]]:
    """Return the explanation of a prompt, and its causes' codes."""
    path = root / "prompt.jsonl"
    path.write_text(json.dumps({"tokens": tokens}))
    arguments = ["explain", str(root / "shelf"), str(path), "--json"]
    result = CliRunner().invoke(app, arguments)
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["hits"] else 1)
    return found, [cause["code"] for cause in found["causes"]]


def test_a_read_only_engine_counts_a_bad_object_and_the_command_names_it(
    engines: Engines, tmp_path: Path, prompt: MakePrompt
) -> None:
    shelf, files, tokens = str(tmp_path / "shelf"), ShelfFiles(tmp_path / "shelf"), prompt(900)
    with engines.on_shelf("explained writer", shelf, {}) as writer:
        writer.generate(tokens)
        files.wait_stored(tokens)
    found, codes = explain(tmp_path, tokens)
    assert found["hits"] and not codes
    assert found["hit_chunks"] == found["usable_chunks"] == 3
    path = files.of(tokens)[1][0]
    DAMAGE["flipped byte of the payload"](path)
    with engines.on_shelf("explained reader", shelf, {"read_only": True}) as reader:
        reader.generate(tokens)
        until(lambda: reader.counters().get("unrepaired_objects") == 1, "the bad object counted")
    verified = CliRunner().invoke(app, ["verify", shelf])
    assert verified.exit_code == 1
    assert str(path.relative_to(files.root)) in verified.output
