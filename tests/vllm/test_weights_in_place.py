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


Changing = tuple[Engine, ShelfFiles, Path]


@pytest.fixture(scope="module")
def both(
    engines: Engines, places: Places, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Changing]]:
    """Two engines, started side by side, each with a model and a shelf of its own."""
    found = []
    for core in (0, 1):
        folder = tmp_path_factory.mktemp("changing")
        model = Path(shutil.copytree(places.model, folder / "model"))
        shelf = ShelfFiles(folder / "shelf")
        engine = engines.start(
            f"changing {core}",
            model=model,
            connector=SHELF_CONNECTOR,
            extra_config={"shared_storage_path": str(shelf.root)},
            core=core,
        )
        found.append((engine, shelf, model))
    unchanged = list(found)
    yield unchanged
    for engine, *_ in found:
        engine.stop(at_once=True)


@pytest.fixture
def changing(both: list[Changing]) -> Changing:
    """One of them, which no other test has changed."""
    return both.pop()


def test_weights_that_vllm_reloads(changing: Changing, prompt: MakePrompt) -> None:
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
    (line,) = engine.log_lines("weights were changed in place")
    assert "reload_weights()" in line


def test_weight_files_that_are_replaced_are_noticed_at_a_reset(
    changing: Changing, prompt: MakePrompt
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
