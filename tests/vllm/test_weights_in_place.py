"""Weights that change while a real engine runs: nothing is loaded or stored from then on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet import Engines, Places
from harness import SHELF_CONNECTOR, Engine
from shelf_files import ShelfFiles, wait_until

MakePrompt = Callable[[int], list[int]]


@pytest.fixture
def changing(
    request: pytest.FixtureRequest, engines: Engines, places: Places, tmp_path: Path
) -> Iterator[tuple[Engine, ShelfFiles, Path]]:
    """An engine with a model and a shelf of its own."""
    model = Path(shutil.copytree(places.model, tmp_path / "model"))
    shelf = ShelfFiles(tmp_path / "shelf")
    engine = engines.start(
        f"changing {request.node.name}",
        model=model,
        connector=SHELF_CONNECTOR,
        extra_config={"shared_storage_path": str(shelf.root)},
        core=0,
    )
    yield engine, shelf, model
    engine.stop(at_once=True)


def test_weights_that_vllm_reloads(
    changing: tuple[Engine, ShelfFiles, Path], prompt: MakePrompt
) -> None:
    engine, shelf, _ = changing
    tokens = prompt(600)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    assert engine.generate(tokens).shelf_tokens == 512
    engine.call("worker", method="reload_weights")
    engine.reset_prefix_cache()
    # This one may still be planned: the worker does not load it.
    engine.generate(tokens)
    engine.reset_prefix_cache()
    assert engine.generate(tokens).shelf_tokens == 0
    before = shelf.objects()
    engine.generate(prompt(600))
    engine.generate(prompt(20))
    assert shelf.objects() == before
    (line,) = engine.log_lines("weights are changed in place")
    assert "reload_weights()" in line


def test_weight_files_that_are_replaced_are_noticed_at_a_reset(
    changing: tuple[Engine, ShelfFiles, Path], prompt: MakePrompt
) -> None:
    engine, shelf, model = changing
    tokens = prompt(600)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache(connector=True)
    assert engine.generate(tokens).shelf_tokens == 512
    (file,) = model.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    # A new file, as tools make one: the engine may have mapped the old one.
    file.unlink()
    file.write_bytes(content)
    engine.reset_prefix_cache(connector=True)

    def ended() -> bool:
        engine.reset_prefix_cache()
        return engine.generate(tokens).shelf_tokens == 0

    wait_until(ended, "the end of hits")
    assert engine.log_lines("weight files changed since the engine loaded them")
