"""Real engines with equal weights whose KV differs: they load nothing of each other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Engines
from harness import SHELF_CONNECTOR, Answer, Engine, assert_same
from shelf_files import ShelfFiles

pytestmark = pytest.mark.slow

MakePrompt = Callable[..., list[int]]

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from .scale import SCALE


class CustomConfig(LlamaConfig):
    model_type = "custom_llama"


class CustomModel(LlamaModel):
    config_class = CustomConfig

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        kwargs |= {"position_ids": position_ids, "inputs_embeds": inputs_embeds * SCALE}
        return super().forward(**kwargs)


class CustomForCausalLM(LlamaForCausalLM):
    config_class = CustomConfig
"""


@pytest.fixture
def shelf(tmp_path: Path) -> ShelfFiles:
    return ShelfFiles(tmp_path / "shelf")


@pytest.fixture
def copy(engines: Engines, tmp_path: Path) -> Callable[..., Path]:
    """Copies the model, with other keys in its configuration."""

    def copy(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(engines.places.model, folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        return folder

    return copy


@pytest.fixture
def start(engines: Engines, shelf: ShelfFiles) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(model: Path, **arguments: Any) -> Engine:
        engine = engines.start(
            f"{model.parent.name} {model.name}",
            model=model,
            connector=SHELF_CONNECTOR,
            extra_config={"shared_storage_path": str(shelf.root)},
            core=0,
            **arguments,
        )
        started.append(engine)
        return engine.wait_ready()

    yield start
    for engine in started:
        engine.stop(at_once=True)


def shelf_and_own(engine: Engine, tokens: list[int]) -> tuple[Answer, Answer]:
    """What an engine answers with the shelf, and what without."""
    return engine.generate(tokens), engine.generate(tokens, cache_salt="its own")


def test_a_configuration_edited_beside_equal_weights(
    start: Callable[..., Engine],
    copy: Callable[..., Path],
    shelf: ShelfFiles,
    prompt: MakePrompt,
) -> None:
    tokens = prompt(1100)
    first = start(copy("first"))
    first.generate(tokens)
    shelf.wait_stored(tokens)
    answer, own = shelf_and_own(start(copy("edited", rms_norm_eps=0.1)), tokens)
    assert answer.shelf_tokens == 0
    assert_same(answer, own)
    # A value that decides nothing, and another version of the library that wrote the file.
    answer, own = shelf_and_own(
        start(copy("written anew", transformers_version="9.9", use_cache=False)), tokens
    )
    assert answer.shelf_tokens == 1024
    assert_same(answer, own)


def test_remote_code_that_differs(
    start: Callable[..., Engine],
    copy: Callable[..., Path],
    shelf: ShelfFiles,
    prompt: MakePrompt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    tokens = prompt(1100)

    def with_code(name: str, scale: float) -> Engine:
        folder = copy(
            name,
            architectures=["CustomForCausalLM"],
            model_type="custom_llama",
            auto_map={
                "AutoConfig": "modeling_custom.CustomConfig",
                "AutoModel": "modeling_custom.CustomModel",
                "AutoModelForCausalLM": "modeling_custom.CustomForCausalLM",
            },
        )
        (folder / "modeling_custom.py").write_text(CODE)
        (folder / "scale.py").write_text(f"SCALE = {scale}\n")
        return start(
            folder,
            trust_remote_code=True,
            model_impl="transformers",
            env={"HF_MODULES_CACHE": str(tmp_path / "modules")},
        )

    with_code("model_a", 1.0).generate(tokens)
    shelf.wait_stored(tokens)
    answer, own = shelf_and_own(with_code("model_b", 2.0), tokens)
    assert answer.shelf_tokens == 0
    assert_same(answer, own)
    answer, own = shelf_and_own(with_code("model_c", 1.0), tokens)
    assert answer.shelf_tokens == 1024
    assert_same(answer, own)
