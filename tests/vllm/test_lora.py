"""LoRA adapters: KV computed with one is never used with another, or without."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import Engine, assert_same
from tests.support.fleet import ENGINES, Engines, MakePrompt
from tests.vllm.adapter_files import RANK, attention_shapes, make_adapter
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapted(engines: Engines) -> Iterator[Engine]:
    """An engine that takes adapters, on a shelf of its own."""
    arguments = ENGINES["on_shelf"](engines.places)
    arguments["extra_config"]["shared_storage_path"] = str(engines.places.root / "lora shelf")
    engine = engines.start("adapted", **arguments, enable_lora=True, max_lora_rank=RANK)
    yield engine.wait_ready()
    engine.stop(at_once=True)


def test_adapters_are_told_apart_by_content(
    adapted: Engine, engines: Engines, prompt: MakePrompt
) -> None:
    folder = engines.places.root / "adapters"
    shapes = attention_shapes()
    one, two = make_adapter(folder / "one", 1, shapes), make_adapter(folder / "two", 2, shapes)
    copy = shutil.copytree(one, folder / "copy of one")

    def lora(number: int, path: Path) -> dict[str, Any]:
        return {"lora_name": path.name, "lora_int_id": number, "lora_path": str(path)}

    adapters = [None, lora(1, one), lora(2, two)]
    shelf = ShelfFiles(engines.places.root / "lora shelf")
    tokens = prompt(600)
    cold = []
    for number, adapter in enumerate(adapters, 1):
        # Loads the adapter, so that the worker knows its digest when there is something to store.
        adapted.generate(prompt(20), lora=adapter)
        adapted.reset_prefix_cache()
        cold.append(adapted.generate(tokens, lora=adapter))
        assert cold[-1].shelf_tokens == 0
        # Two chunks in two shards.
        shelf.wait_objects(4 * number)
    assert len({tuple(answer.tokens) for answer in cold}) == 3
    for adapter, answer in zip([*adapters, lora(3, copy)], [*cold, cold[1]], strict=True):
        adapted.reset_prefix_cache()
        warm = adapted.generate(tokens, lora=adapter)
        assert warm.shelf_tokens == 512
        assert_same(warm, answer)

    # Another adapter at the same path is another adapter, under a new id; under the old one nobody
    # can tell which of the two some KV was computed with.
    shutil.rmtree(two)
    make_adapter(two, 9, shapes)
    objects = shelf.objects()
    adapted.reset_prefix_cache()
    old = adapted.generate(tokens, lora=lora(2, two))
    assert old.shelf_tokens == 0
    assert shelf.objects() == objects
    # vLLM's prefix cache may hold KV of both, until it is reset for kvshelf to hear.
    adapted.reset_prefix_cache()
    assert adapted.generate(tokens, lora=lora(5, two)).shelf_tokens == 0
    assert shelf.objects() == objects
    adapted.reset_prefix_cache(connector=True)
    new = adapted.generate(tokens, lora=lora(5, two))
    assert new.shelf_tokens == 0
    assert new.tokens != cold[2].tokens
    shelf.wait_objects(len(objects) + 4)
    adapted.reset_prefix_cache()
    warm = adapted.generate(tokens, lora=lora(5, two))
    assert warm.shelf_tokens == 512
    assert_same(warm, new)
