"""Tails as a cache on a real engine: a prompt that comes again is loaded to its last token."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.engines import NEAR_TIE, Answer, Engine
from tests.support.fleet import Ask, Engines, MakePrompt, Reference
from tests.support.variants import variants
from tests.support.waiting import until
from tests.vllm.handing_over import Promises
from tests.vllm.shelf_files import CHUNK, ShelfFiles

pytestmark = pytest.mark.slow

BLOCK = 128


@dataclass
class Place:
    """An engine that caches tails, and its shelf."""

    engine: Engine
    shelf: ShelfFiles
    tails: Promises

    def stored(self, tokens: list[int]) -> Answer:
        """Compute a prompt, and wait until all of it is stored."""
        answer = self.engine.generate(tokens)
        self.shelf.wait_stored(tokens)
        self.tails.wait_tail(tokens)
        self.engine.reset_prefix_cache()
        return answer


@pytest.fixture(scope="module")
def place(engines: Engines) -> Iterator[Place]:
    shelf = ShelfFiles(engines.places.root / "cached tails")
    engine = engines.on_shelf("cached tails", shelf.root, {"cache_tails": True}).wait_ready()
    first = list(range(2, 302))
    engine.generate(first)
    shelf.wait_stored(first)
    yield Place(engine, shelf, Promises(shelf))
    engine.stop(at_once=True)


@pytest.mark.parametrize("length", variants([16, 40, 129, 255, 300, 700, 1500], {40, 700}))
def test_a_prompt_that_comes_again_is_loaded_whole(
    place: Place, reference: Reference, ask: Ask, prompt: MakePrompt, length: int
) -> None:
    shorter = prompt(length - 1)
    tokens = prompt(1, after=shorter)
    longer = prompt(1, after=tokens)
    assert place.stored(tokens).shelf_tokens == 0
    warm = ask(place.engine, tokens, length)
    assert warm.logprobs == pytest.approx(reference(tokens).logprobs, abs=NEAR_TIE)
    # One token more or less is another prompt.
    for other in (shorter, longer):
        place.engine.reset_prefix_cache()
        ask(place.engine, other, length // CHUNK * CHUNK)


def test_as_a_hit_in_memory_to_the_last_bit(place: Place, prompt: MakePrompt) -> None:
    tokens = prompt(CHUNK + BLOCK + 1)
    place.stored(tokens)
    loaded = place.engine.generate(tokens, max_tokens=16)
    assert loaded.shelf_tokens == len(tokens)
    own = place.engine.generate(tokens, max_tokens=16)
    assert (own.cached_tokens, own.shelf_tokens) == (len(tokens) - 1, 0)
    assert (loaded.tokens, loaded.logprobs, loaded.gaps) == (own.tokens, own.logprobs, own.gaps)


def test_a_hit_renews_a_tail_and_one_that_is_gone_is_stored_again(
    place: Place, prompt: MakePrompt
) -> None:
    tokens = prompt(100)
    place.stored(tokens)
    paths = place.tails.tail(tokens)
    then = time.time() - 86400
    for path in paths:
        os.utime(path, (then, then))
    assert place.engine.generate(tokens).shelf_tokens == 100
    until(lambda: all(path.stat().st_atime > then + 43200 for path in paths), "a use of the tail")
    assert all(path.stat().st_mtime == pytest.approx(then) for path in paths)
    for path in paths:
        path.unlink()
    place.engine.reset_prefix_cache()
    assert place.stored(tokens).shelf_tokens == 0
    assert place.engine.generate(tokens).shelf_tokens == 100
