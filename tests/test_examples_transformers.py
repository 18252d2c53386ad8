"""The transformers example: with KV from a shelf the answers are what they are without."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
# transformers warns of its own doings.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.filterwarnings("default")]

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("transformers_cache")


@pytest.fixture(scope="module")
def checkpoint(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = example.make_model(tmp_path_factory.mktemp("model") / "tiny", "tiny")
    return folder


def test_answers_are_equal_with_and_without_the_shelf(
    example: Any, checkpoint: Path, tmp_path: Path
) -> None:
    model, facts = example.load(checkpoint)
    config = example.Config(shared_storage_path=tmp_path / "shelf", chunk_size=64)
    draw = random.Random(0)
    base = draw.choices(range(2, 4096), k=400)
    prompts = [base, base[:320], base[:200] + draw.choices(range(2, 4096), k=90), base + base[:70]]
    plain = []
    for prompt in prompts:
        ids = example.torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=example.torch.ones_like(ids),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
        )
        plain.append(output[0, len(prompt) :].tolist())
    # The second round has caches of its own, as another process would.
    for hits in ([0, 319, 192, 384], [384, 319, 256, 448]):
        with example.ChunkCache.open(config, facts) as cache:
            answers = [example.generate(model, cache, prompt, 8) for prompt in prompts]
        assert [answer.hit for answer in answers] == hits
        assert [answer.tokens for answer in answers] == plain


def test_example_runs_and_another_process_finds_its_shelf(
    example: Any, checkpoint: Path, tmp_path: Path
) -> None:
    shelf = tmp_path / "shelf"
    command = [
        sys.executable,
        str(EXAMPLES / "transformers_cache.py"),
        *("--shelf", str(shelf), "--prompt-tokens", "600"),
    ]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=tmp_path
    ).stdout
    assert "first: 0 of 600" in output
    assert "second: 512 of 600" in output
    assert "the answers are equal: True" in output
    model, facts = example.load(checkpoint)
    prompt = random.Random(0).choices(range(2, 4096), k=600)
    with example.ChunkCache.open(example.Config(shared_storage_path=shelf), facts) as cache:
        answer = example.generate(model, cache, prompt, 20)
    assert answer.hit == 512
    assert f"answer {answer.tokens}" in output
