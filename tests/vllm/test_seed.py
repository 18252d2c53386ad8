"""``kvshelf seed`` with a real vLLM, and another engine that finds what it stored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.models.make_model import make_model
from tests.support.engines import Ask, Engines, MakePrompt, ShelfFiles

pytestmark = pytest.mark.slow

ENGINE = {
    "enforce_eager": True,
    "max-model-len": 4096,
    "kv_cache_memory_bytes": 128 << 20,
    "gpu_memory_utilization": 0.1,
    "seed": 0,
}


def test_what_was_seeded_is_found_by_another_engine(
    engines: Engines, ask: Ask, prompt: MakePrompt, tmp_path: Path
) -> None:
    """What becomes of each form of a line is in tests/cli/test_seed.py."""
    # The same weights as the model of the other engine, and a tokenizer.
    model = make_model(tmp_path / "model", "tiny", tokenizer=True)
    shelf, file = ShelfFiles(tmp_path / "shelf"), tmp_path / "prompts.jsonl"
    shared, other, text = prompt(600), prompt(300), "A long text. " * 30
    lines = [shared + other, {"tokens": other, "cache_salt": "tenant"}, text, [5] * 20]
    file.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "kvshelf", "seed", str(shelf.root), str(file), "--json"]
    command += ["--model", str(model)]
    command += [f"--engine-arg={name}={json.dumps(value)}" for name, value in ENGINE.items()]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=280).stdout
    report = json.loads(printed)
    assert (report["prompts"], report["stored"], report["short"]) == (4, 3, 1)
    assert report["chunks"] == 3 + 1 + len(text) // 256
    assert shelf.check_all() == len(shelf.objects()) > 0
    with engines.start("after seeding", shelf.root) as engine:
        ask(engine, shared + other, 768)
        assert engine.generate(other, cache_salt="tenant").shelf_tokens == 256
