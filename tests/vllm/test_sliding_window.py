"""A model of which every layer has a sliding window, on a real engine.

vLLM then has no blocks for tokens that the window of the token behind a hit does not reach.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.engines import NEAR_TIE, Engine, assert_same
from tests.support.fleet import ENGINES, Engines, MakePrompt
from tests.support.variants import variants
from tests.vllm.shelf_files import ShelfFiles, assert_close

pytestmark = pytest.mark.slow

WINDOW = 512
CHUNKS = 5
#: vLLM has blocks from this one on when all of them are a hit.
FIRST_WANTED = 3


@pytest.fixture(scope="module")
def model(engines: Engines) -> Path:
    folder = engines.places.root / "models" / "windowed"
    shutil.copytree(engines.places.model, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": WINDOW,
    }
    file.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def pair(engines: Engines, model: Path) -> Iterator[tuple[Engine, Engine]]:
    """An engine on a shelf, and one without."""
    arguments = ENGINES["on_shelf"](engines.places)
    arguments["extra_config"] |= {"shared_storage_path": str(engines.places.root / "windows")}
    started = (
        engines.start("windowed", **arguments | {"model": model}),
        engines.start("windowed inert", **ENGINES["inert"](engines.places) | {"model": model}),
    )
    yield started[0].wait_ready(), started[1].wait_ready()
    for engine in started:
        engine.stop(at_once=True)


@pytest.fixture
def shelf(engines: Engines) -> ShelfFiles:
    return ShelfFiles(engines.places.root / "windows")


@pytest.mark.parametrize("failing", variants([None, 0, 2, 3, 4], {2, 4}))
def test_a_chunk_that_fails_behind_what_the_window_left_out(
    pair: tuple[Engine, Engine], shelf: ShelfFiles, prompt: MakePrompt, failing: int | None
) -> None:
    engine, inert = pair
    tokens = prompt(CHUNKS * 256 + 40)
    expected = inert.generate(tokens, logprobs=2)
    assert_same(engine.generate(tokens, logprobs=2), expected, NEAR_TIE)
    stored = shelf.wait_stored(tokens)
    kept = [[load_file(path) for path in chunk] for chunk in stored]
    if failing is not None:
        path = stored[failing][0]
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
    engine.reset_prefix_cache()
    answer = engine.generate(tokens, logprobs=2)
    assert_same(answer, expected, NEAR_TIE)
    if failing is None or failing < FIRST_WANTED:
        # A chunk of which nothing is wanted is not even read.
        assert answer.shelf_tokens == CHUNKS * 256
    else:
        # What was computed anew is on the shelf, and right.
        for chunk, before in zip(shelf.wait_stored(tokens), kept, strict=True):
            for path, tensors in zip(chunk, before, strict=True):
                assert_close(load_file(path), tensors)
    engine.reset_prefix_cache()
    assert_same(engine.generate(tokens, logprobs=2), expected, NEAR_TIE)
