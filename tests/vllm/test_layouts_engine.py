"""Canonical chunks on real engines: other block sizes, chunks that are no whole blocks, native KV.

What a hit gives is compared bit by bit with a hit of the same length in vLLM's own prefix cache,
where both hold KV that was computed in batches of the same shape, and always with what vLLM answers
without a cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.format.keys import KeyChain
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from tests.support.engines import NEAR_TIE, Answer, Engine, assert_same
from tests.support.fleet import Engines, Places
from tests.support.waiting import until
from tests.vllm.shelf_files import DAMAGE, ShelfFiles
from tests.vllm.test_golden import RELEASES

MakePrompt = Callable[..., list[int]]
Reference = Callable[..., Answer]


class Shelf(ShelfFiles):
    """A shelf whose chunks may have another size."""

    def __init__(self, root: Path, chunk_size: int) -> None:
        super().__init__(root)
        self.chunk_size = chunk_size

    def namespace(self) -> Namespace:
        [folder] = self.namespaces()
        return Namespace.from_bytes((folder / "namespace.json").read_bytes())

    def chunks(self, prompt: list[int]) -> list[list[Path]]:
        """Return the objects of a prompt's chunks."""
        [folder] = self.namespaces()
        namespace = self.namespace()
        shards = namespace.record["shards"]
        assert isinstance(shards, int)
        chain = KeyChain(namespace.digest, self.chunk_size)
        return [
            [folder / object_name(chunk, shard, shards) for shard in range(shards)]
            for chunk in chain.extend(prompt)
        ]

    def wait_for(self, prompt: list[int]) -> None:
        """Wait until all chunks of a prompt are there."""
        until(lambda: bool(self.namespaces()), "a namespace on the shelf")
        objects = [path for chunk in self.chunks(prompt) for path in chunk]
        until(lambda: all(path.is_file() for path in objects), f"{len(objects)} objects")


def assert_bit_equal(answer: Answer, expected: Answer) -> None:
    assert answer.cached_tokens == expected.cached_tokens
    assert answer.tokens == expected.tokens
    assert answer.logprobs == expected.logprobs


def start(engines: Engines, places: Places, name: str, shelf: Shelf, **options: Any) -> Engine:
    arguments = {name: options.pop(name) for name in ("block_size", "core") if name in options}
    return engines.on_shelf(name, shelf.root, options, **arguments)


@pytest.fixture(scope="module")
def canonical(places: Places) -> Shelf:
    """A shelf of canonical chunks of 256 tokens."""
    return Shelf(places.root / "canonical shelf", 256)


@pytest.fixture(scope="module")
def by_block_size(
    engines: Engines, places: Places, on_shelf: Engine, canonical: Shelf
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
    canonical: Shelf,
    reference: Reference,
    prompt: MakePrompt,
    writer: int,
    reader: int,
) -> None:
    tokens = prompt(1500)
    by_block_size[writer].generate(tokens)
    canonical.wait_for(tokens)
    assert canonical.namespace().record["layouts"] == ["canonical"] * 2
    engine = by_block_size[reader]
    engine.reset_prefix_cache()
    answer = engine.generate(tokens)
    assert answer.shelf_tokens == 1280
    assert_same(answer, reference(tokens))


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_a_release_s_canonical_shelf_is_loaded_on_every_processor(
    engines: Engines, places: Places, reference: Reference, release: Path
) -> None:
    """By an engine whose namespace has no more fields than that release's."""
    stored = json.loads((release / "prompt.json").read_text())
    shelf = Shelf(places.root / f"canonical shelf of {release.name}", 256)
    with engines.start(
        f"reads {release.name}",
        model=places.model,
        connector=("ConnectorWithoutConfiguration", "tests.vllm.earlier_connector"),
        extra_config={"shared_storage_path": str(shelf.root), "layout": "canonical"},
        block_size=64,
    ) as engine:
        engine.generate([3] * 300, max_tokens=1)  # so that the engine's namespace is there
        shelf.wait_for([3] * 300)
        [folder] = shelf.namespaces()
        shutil.copytree(release / "shelf" / folder.name, folder, dirs_exist_ok=True)
        engine.reset_prefix_cache()
        answer = engine.generate(stored["tokens"])
        assert answer.shelf_tokens == stored["chunks"] * 256
        assert_same(answer, reference(stored["tokens"]), NEAR_TIE)


def test_canonical_and_native_are_bit_equal(
    engine: Engine,
    shelf: ShelfFiles,
    by_block_size: dict[int, Engine],
    canonical: Shelf,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    """The session's engine stores native chunks, with the same blocks of 128 tokens."""
    other = by_block_size[128]
    for length in (700, 1025, 1793):
        tokens = prompt(length)
        answers = []
        for each, objects in ((engine, shelf), (other, canonical)):
            each.generate(tokens)
            if isinstance(objects, Shelf):
                objects.wait_for(tokens)
            else:
                objects.wait_stored(tokens)
            each.reset_prefix_cache()
            answers.append(each.generate(tokens))
            assert answers[-1].shelf_tokens == (length - 1) // 256 * 256
        assert_bit_equal(*answers)
        assert_same(answers[0], reference(tokens))


@pytest.fixture(scope="module")
def by_chunk_size(
    engines: Engines, places: Places, inert: Engine
) -> Iterator[dict[int, tuple[Engine, Shelf]]]:
    """Engines with chunks of 96 and of 200 tokens, each on a shelf of its own."""
    found = {}
    for core, size in enumerate((96, 200)):
        shelf = Shelf(places.root / f"shelf of {size}", size)
        name = f"chunks of {size}"
        found[size] = start(engines, places, name, shelf, chunk_size=size, core=core), shelf
    yield {size: (engine.wait_ready(), shelf) for size, (engine, shelf) in found.items()}
    for engine, _ in found.values():
        engine.stop(at_once=True)


@pytest.mark.parametrize(("chunk_size", "hit"), [(96, 1408), (200, 1152)])
def test_chunks_that_are_no_whole_blocks(
    by_chunk_size: dict[int, tuple[Engine, Shelf]],
    reference: Reference,
    prompt: MakePrompt,
    chunk_size: int,
    hit: int,
) -> None:
    engine, shelf = by_chunk_size[chunk_size]
    engine.reset_prefix_cache()
    tokens = prompt(1500)
    # The same beginning, so that both caches have exactly `hit` tokens of it.
    asked = prompt(92, after=tokens[:hit])
    engine.generate(tokens)
    own = engine.generate(asked)
    assert own.shelf_tokens == 0
    shelf.wait_for(tokens)
    shelf.wait_for(asked)
    assert shelf.namespace().record["layouts"] == ["canonical"] * 2
    engine.reset_prefix_cache()
    answer = engine.generate(asked)
    assert answer.shelf_tokens == hit
    assert_bit_equal(answer, own)
    assert_same(answer, reference(asked))
    # A part of it in the engine's own cache already: loads begin at any block, within a chunk.
    for local in (128, 300, 900):
        engine.reset_prefix_cache()
        engine.generate(tokens[:local], max_tokens=1)
        again = engine.generate(asked)
        assert again.shelf_tokens == hit - local // 128 * 128
        assert_same(again, reference(asked))


@pytest.mark.parametrize("chunk_size", [96, 200])
@pytest.mark.parametrize("failing", [0, 3, 5])
def test_a_chunk_that_fails_in_the_middle_of_a_block(
    by_chunk_size: dict[int, tuple[Engine, Shelf]],
    reference: Reference,
    prompt: MakePrompt,
    chunk_size: int,
    failing: int,
) -> None:
    engine, shelf = by_chunk_size[chunk_size]
    engine.reset_prefix_cache()
    tokens = prompt(1300)
    expected = reference(tokens)
    engine.generate(tokens)
    shelf.wait_for(tokens)
    [damaged, *_] = shelf.chunks(tokens)[failing]
    DAMAGE["flipped byte of the payload"](damaged)
    engine.reset_prefix_cache()
    assert_same(engine.generate(tokens), expected)
    # What was computed instead replaces the bad object, which then gives the same answer.
    until(damaged.is_file, "the chunk stored again")
    engine.reset_prefix_cache()
    assert_same(engine.generate(tokens), expected)
