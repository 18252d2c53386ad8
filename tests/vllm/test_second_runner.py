"""vLLM's second model runner, the default on CUDA, in real engines on CPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import Engines

CHILD = Path(__file__).with_name("second_runner_child.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


def run(model: Path, shelf: Path, prompts: list[list[int]]) -> dict[str, Any]:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, CHILD, str(model), str(shelf), json.dumps(prompts)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def test_chunks_are_gathered_behind_the_forward_pass_and_loaded_by_the_next_engine(
    engines: Engines, tmp_path: Path, prompt: Callable[[int], list[int]]
) -> None:
    tokens = prompt(600)
    first = run(engines.model, tmp_path / "shelf", [tokens, tokens])
    (cold, no_hit), (warm, hit) = first["answers"]
    assert (no_hit, hit) == (0, 512)
    assert warm == cold
    # Before vLLM learns that the step is over.
    assert (first["early"], first["late"]) == (2, 0)
    second = run(engines.model, tmp_path / "shelf", [tokens])
    assert second["answers"] == [[cold, 512]]
    assert second["early"] == 0
