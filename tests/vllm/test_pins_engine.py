"""Pins and ``kvshelf rm`` on the shelves of real engines: what stays, what goes, right answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import SHELF_CONNECTOR, Answer, Engine, assert_same
from tests.support.fleet import Engines, MakePrompt, Places, Reference
from tests.support.places import Place
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow


def start(engines: Engines, name: str, **options: Any) -> Engine:
    return engines.start(
        name,
        model=engines.places.model,
        connector=SHELF_CONNECTOR,
        extra_config=options,
        core=1,
    )


def one(place: Place, *args: object) -> dict[str, Any]:
    (row,) = place.rows(*args)
    return row


def hit(engine: Engine, tokens: list[int]) -> Answer:
    engine.reset_prefix_cache()
    return engine.generate(tokens)


def test_pinned_prompts_outlive_a_flood_and_go_when_they_are_deleted(
    engines: Engines, places: Places, reference: Reference, prompt: MakePrompt, tmp_path: Path
) -> None:
    shelf = ShelfFiles(tmp_path / "shelf")
    place = Place(str(shelf.root))
    tokens = prompt(1100)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(tokens))
    # The bytes of a chunk, as an engine of the session stores them.
    engines["on_shelf"].generate(tokens, max_tokens=1)
    objects = ShelfFiles(places.shelf).wait_stored(tokens)[0]
    chunk_bytes = sum(path.stat().st_size for path in objects)
    # Between two visits an engine stores a twentieth of it: more than two prompts.
    bound = 200 * chunk_bytes

    def used() -> int:
        return sum(path.stat().st_size for path in shelf.objects() if path.is_file())

    options = {
        "shared_storage_path": place.url,
        "capacity": {"max_bytes": f"{bound}B"},
        "least_free": 0,
    }
    with start(engines, "with pins", **options) as engine:
        engine.generate(tokens)
        shelf.wait_stored(tokens)
        row = one(place, "pin", "keep", file)
        assert (row["chunks"], row["stored"]) == (4, 4)
        flood = prompt(1100)
        engine.generate(flood)
        stored = shelf.wait_stored(flood)

        def is_evicted() -> bool:
            engine.generate(prompt(1100))
            assert used() <= bound
            return not all(path.exists() for chunk in stored for path in chunk)

        until(is_evicted, "a prompt that is not pinned is deleted")
        answer = hit(engine, tokens)
        assert answer.shelf_tokens == 1024
        assert_same(answer, reference(tokens))

        assert one(place, "rm", "--prompts", file)["pinned"]["files"] == 4 * len(objects)
        assert place.run("pin", "keep", "--remove").exit_code == 0
        deleted = one(place, "rm", "--prompts", file, "--yes")["deleted"]
        assert deleted["chosen"]["files"] == 4 * len(objects)
        answer = hit(engine, tokens)
        assert answer.shelf_tokens == 0
        assert_same(answer, reference(tokens))
        assert not engine.log_lines("Traceback")
