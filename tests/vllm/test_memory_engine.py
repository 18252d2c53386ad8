"""Real engines with a memory tier: hits come from there, and the shelf decides what is a hit."""

from __future__ import annotations

import pytest

from tests.support.fleet import Ask, Engines, MakePrompt
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow

HIT = 768


def test_a_second_request_is_loaded_from_memory_while_the_shelf_has_its_objects(
    engines: Engines, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(1000)
    shelf = ShelfFiles(engines.places.root / "shelf behind memory")
    with engines.on_shelf("with memory", shelf.root, {"memory": "64MiB"}) as engine:
        assert engine.generate(tokens).shelf_tokens == 0
        objects = [path for chunk in shelf.wait_stored(tokens) for path in chunk]

        # A file is there a moment before its object is in memory, and counts travel with steps.
        def kept() -> bool:
            engine.generate([2, 3, 4], max_tokens=1)
            return engine.counters().get("memory_tier_stored_objects", 0) >= len(objects)

        until(kept, "the objects in memory")
        # They are found by their sizes, and nobody could load them from the shelf.
        for path in objects:
            path.write_bytes(bytes(path.stat().st_size))
        engine.reset_prefix_cache()
        ask(engine, tokens, HIT)
        counts = engine.counters()
        assert counts["memory_tier_loaded_objects"] == len(objects)
        assert not counts.get("load_failures_bad", 0)

        # What is not on the shelf is no hit, though the memory of a worker has it.
        shelf.delete()
        engine.reset_prefix_cache()
        ask(engine, tokens, 0)
