"""Canonical chunks on real engines: other block sizes, chunks that are no whole blocks, native KV.

What a hit gives is compared bit by bit with a hit of the same length in vLLM's own prefix cache,
where both hold KV that was computed in batches of the same shape, and always with what vLLM answers
without a cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import NEAR_TIE, Answer, Engine, assert_same
from tests.support.fleet import PATIENT, Ask, Engines, MakePrompt, Places, Reference
from tests.support.variants import variants
from tests.support.waiting import until
from tests.vllm.shelf_files import DAMAGE, ShelfFiles

pytestmark = pytest.mark.slow

RELEASES = sorted(Path(__file__).parents[1].joinpath("golden").glob("v[0-9]*"))


def assert_bit_equal(answer: Answer, expected: Answer) -> None:
    assert answer.cached_tokens == expected.cached_tokens
    assert answer.tokens == expected.tokens
    assert answer.logprobs == expected.logprobs


def start(engines: Engines, places: Places, name: str, shelf: ShelfFiles, **options: Any) -> Engine:
    arguments = {name: options.pop(name) for name in ("block_size", "core") if name in options}
    # Steps as large as those of the session's engine compute the same bits.
    return engines.on_shelf(name, shelf.root, options, max_num_batched_tokens=384, **arguments)


@pytest.fixture(scope="module")
def canonical(places: Places) -> ShelfFiles:
    """A shelf of canonical chunks of 256 tokens."""
    return ShelfFiles(places.root / "canonical shelf")


@pytest.fixture(scope="module")
def by_block_size(
    engines: Engines, places: Places, on_shelf: Engine, canonical: ShelfFiles
) -> Iterator[dict[int, Engine]]:
    """Engines with blocks of 64 and of 128 tokens on that shelf, started side by side."""
    found = {
        size: start(
            engines,
            places,
            f"blocks of {size}",
            canonical,
            layout="canonical",
            block_size=size,
            core=core,
        )
        for core, size in enumerate((64, 128))
    }
    yield {size: engine.wait_ready() for size, engine in found.items()}
    for engine in found.values():
        engine.stop(at_once=True)


@pytest.mark.parametrize(("writer", "reader"), [(64, 128), (128, 64)])
def test_a_shelf_written_with_one_block_size_is_read_with_another(
    by_block_size: dict[int, Engine],
    canonical: ShelfFiles,
    ask: Ask,
    prompt: MakePrompt,
    writer: int,
    reader: int,
) -> None:
    tokens = prompt(1500)
    by_block_size[writer].generate(tokens)
    canonical.wait_stored(tokens)
    assert canonical.record["layouts"] == ["canonical"] * 2
    engine = by_block_size[reader]
    engine.reset_prefix_cache()
    ask(engine, tokens, 1280)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_release_s_canonical_shelf_is_loaded_on_every_processor(
    engines: Engines, places: Places, ask: Ask, release: Path
) -> None:
    """By an engine whose namespace has no more fields than that release's."""
    stored = json.loads((release / "prompt.json").read_text())
    shelf = ShelfFiles(places.root / f"canonical shelf of {release.name}")
    with engines.start(
        f"reads {release.name}",
        model=places.model,
        connector=("ConnectorWithoutConfiguration", "tests.vllm.earlier_connector"),
        extra_config={"shared_storage_path": str(shelf.root), "layout": "canonical", **PATIENT},
        block_size=64,
    ) as engine:
        engine.generate([3] * 300, max_tokens=1)  # so that the engine's namespace is there
        shelf.wait_stored([3] * 300)
        [folder] = shelf.namespaces()
        shutil.copytree(release / "shelf" / folder.name, folder, dirs_exist_ok=True)
        engine.reset_prefix_cache()
        ask(engine, stored["tokens"], stored["chunks"] * 256, tolerance=NEAR_TIE)


def test_canonical_and_native_are_bit_equal(
    engine: Engine,
    shelf: ShelfFiles,
    by_block_size: dict[int, Engine],
    canonical: ShelfFiles,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    """The session's engine stores native chunks, with the same blocks of 128 tokens."""
    other = by_block_size[128]
    for length in (700, 1025):
        tokens = prompt(length)
        answers = []
        for each, objects in ((engine, shelf), (other, canonical)):
            objects.fill(each, tokens)
            answers.append(each.generate(tokens))
            assert answers[-1].shelf_tokens == (length - 1) // 256 * 256
        assert_bit_equal(*answers)
        assert_same(answers[0], reference(tokens))


@pytest.fixture(scope="module", params=variants([96, 200], {96}))
def chunked(
    engines: Engines, places: Places, inert: Engine, request: pytest.FixtureRequest
) -> Iterator[tuple[Engine, ShelfFiles]]:
    """An engine with chunks that are no whole blocks, on a shelf of its own."""
    size = request.param
    shelf = ShelfFiles(places.root / f"shelf of {size}")
    engine = start(engines, places, f"chunks of {size}", shelf, chunk_size=size)
    yield engine.wait_ready(), shelf
    engine.stop(at_once=True)


def test_chunks_that_are_no_whole_blocks(
    chunked: tuple[Engine, ShelfFiles], reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    engine, shelf = chunked
    engine.reset_prefix_cache()
    tokens = prompt(1500)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    hit = {96: 1408, 200: 1152}[shelf.chunk]
    # The same beginning, so that both caches have exactly `hit` tokens of it.
    asked = prompt(92, after=tokens[:hit])
    own = engine.generate(asked)
    assert own.shelf_tokens == 0
    shelf.wait_stored(asked)
    assert shelf.record["layouts"] == ["canonical"] * 2
    engine.reset_prefix_cache()
    answer = engine.generate(asked)
    assert answer.shelf_tokens == hit
    assert_bit_equal(answer, own)
    assert_same(answer, reference(asked))
    # A part of it in the engine's own cache already: loads begin at any block, within a chunk.
    for local in (128, 300):
        engine.reset_prefix_cache()
        engine.generate(tokens[:local], max_tokens=1)
        ask(engine, asked, hit - local // 128 * 128)


@pytest.mark.parametrize("failing", variants([0, 3, 5], {3}))
def test_a_chunk_that_fails_in_the_middle_of_a_block(
    chunked: tuple[Engine, ShelfFiles], reference: Reference, prompt: MakePrompt, failing: int
) -> None:
    engine, shelf = chunked
    engine.reset_prefix_cache()
    tokens = prompt(1300)
    expected = reference(tokens)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    [damaged, *_] = shelf.of(tokens)[failing]
    DAMAGE["flipped byte of the payload"](damaged)
    engine.reset_prefix_cache()
    assert_same(engine.generate(tokens), expected)
    # What was computed instead replaces the bad object, which then gives the same answer.
    until(damaged.is_file, "the chunk stored again")
    engine.reset_prefix_cache()
    assert_same(engine.generate(tokens), expected)
