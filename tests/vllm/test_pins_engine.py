"""Pins and ``kvshelf rm`` on the shelves of real engines: what stays, what goes, right answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import SHELF_CONNECTOR, Answer, Engine, assert_same
from tests.support.fleet import Engines, Places
from tests.support.places import Place
from tests.support.servers import BUCKET, S3Server, command
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

MakePrompt = Callable[[int], list[int]]
Reference = Callable[..., Answer]

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
    stored = ShelfFiles(places.shelf).wait_stored(tokens)
    chunk_bytes = sum(path.stat().st_size for path in stored[0])
    bound = 12 * chunk_bytes

    def used() -> int:
        return sum(path.stat().st_size for path in shelf.objects() if path.is_file())

    options = {
        "shared_storage_path": place.url,
        "capacity": {"max_bytes": bound, "min_free": 0},
    }
    with start(engines, "with pins", **options) as engine:
        engine.generate(tokens)
        shelf.wait_stored(tokens)
        row = one(place, "pin", "keep", "--prompts", file)
        assert (row["chunks"], row["stored"]) == (4, 4)
        others = [prompt(1100) for _ in range(5)]
        for other in others:
            engine.generate(other)
            until(lambda: used() <= 0.9 * bound, "room for more")
        answer = hit(engine, tokens)
        assert answer.shelf_tokens == 1024
        assert_same(answer, reference(tokens))
        assert not all(path.exists() for chunk in shelf.of(others[0]) for path in chunk)

        assert one(place, "rm", "--prompts", file)["pinned"] == 4 * len(stored[0])
        assert place.run("unpin", "keep").exit_code == 0
        deleted = one(place, "rm", "--prompts", file, "--yes")["deleted"]
        assert deleted["removed"] == 4 * len(stored[0])
        answer = hit(engine, tokens)
        assert answer.shelf_tokens == 0
        assert_same(answer, reference(tokens))
        assert not engine.log_lines("Traceback")


@pytest.mark.skipif(command("rclone") is None, reason="rclone is not installed")
def test_in_a_bucket(
    engines: Engines,
    server: S3Server,
    reference: Reference,
    prompt: MakePrompt,
    tmp_path: Path,
) -> None:
    assert server.folder is not None
    place = Place(f"s3://{BUCKET}/kv", server.options())
    shelf = ShelfFiles(server.folder / BUCKET / "kv")
    tokens, other = prompt(1100), prompt(1100)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(tokens))
    options = {"shared_storage_path": place.url, "storage_options": server.options()}
    with start(engines, "fills a bucket", **options) as engine:
        for each in (tokens, other):
            engine.generate(each)
            shelf.wait_stored(each)
        until(lambda: len(place.names()) == len(shelf.objects()), "the server sees all")
        row = one(place, "pin", "keep", "--prompts", file)
        assert (row["chunks"], row["stored"]) == (4, 4)
        found = one(place, "rm", "-n", shelf.namespaces()[0].name, "--yes")
        assert found["pinned"] == found["deleted"]["removed"] > 0
        # What an engine remembers to be there costs a miss.
        assert_same(hit(engine, other), reference(other))
        assert_same(hit(engine, tokens), reference(tokens))
    with start(engines, "finds what was pinned", **options) as engine:
        answer = hit(engine, tokens)
        assert answer.shelf_tokens == 1024
        assert_same(answer, reference(tokens))
        found = one(place, "rm", "--prompts", file, "--pinned", "--yes")
        assert found["deleted"]["removed"] == found["objects"] > 0
        assert_same(hit(engine, tokens), reference(tokens))
