"""Engines with several ranks on one shelf, with engines of another degree beside them.

Greedy tokens may differ between tensor-parallel degrees in any vLLM, since partial sums are added
in another order. So what a hit gives is compared with a hit of the same length in the prefix cache
of the same engine, and what one degree stored with what the other stored, as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.engines import (
    NEAR_TIE,
    Answer,
    Engine,
    Engines,
    MakePrompt,
    ShelfFiles,
    assert_close,
    assert_same,
    eventually_hits,
    flip_byte,
    read_object,
)
from tests.support.waiting import until


@dataclass
class Degrees:
    """Engines with one rank and with two on one shelf."""

    shelf: ShelfFiles
    one: Engine
    two: Engine

    def __getitem__(self, ranks: int) -> Engine:
        return (self.one, self.two)[ranks - 1]


@pytest.fixture(scope="module")
def degrees(engines: Engines, shelf: ShelfFiles, on_shelf: Engine) -> Iterator[Degrees]:
    two = engines.start(
        "two ranks",
        shelf.root,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    yield Degrees(shelf, on_shelf, two)
    two.stop(at_once=True)


def own_hit(engine: Engine, tokens: list[int], hit: int) -> Answer:
    """What the engine answers with a hit of `hit` tokens in its own cache, which it computed."""
    # With a salt that nobody else has, nothing comes from the shelf.
    engine.reset_prefix_cache()
    engine.generate(tokens[: hit + 1], max_tokens=1, cache_salt="of its own")
    answer = engine.generate(tokens, cache_salt="of its own")
    assert (answer.cached_tokens, answer.shelf_tokens) == (hit, 0)
    return answer


@pytest.mark.parametrize(("writer", "reader"), [(2, 2), (2, 1), (1, 2)])
def test_one_degree_loads_what_another_stored(
    degrees: Degrees, prompt: MakePrompt, writer: int, reader: int
) -> None:
    # Three chunks, and less than a block more: both caches hold the same tokens of it.
    tokens = prompt(800)
    degrees[writer].reset_prefix_cache()
    degrees[writer].generate(tokens)
    # A shard for each of the two KV heads, whoever writes it.
    assert [len(chunk) for chunk in degrees.shelf.wait_stored(tokens)] == [2, 2, 2]
    assert len(degrees.shelf.namespaces()) == 1
    engine = degrees[reader]
    engine.reset_prefix_cache()
    loaded = engine.generate(tokens)
    assert loaded.shelf_tokens == 768
    cached = engine.generate(tokens)
    assert (cached.cached_tokens, cached.shelf_tokens) == (768, 0)
    assert (loaded.tokens, loaded.logprobs) == (cached.tokens, cached.logprobs)
    assert_same(loaded, own_hit(engine, tokens, 768), 0.0 if writer == reader else NEAR_TIE)


def test_both_degrees_compute_the_same_kv(degrees: Degrees, prompt: MakePrompt) -> None:
    tokens = prompt(600)
    stored = []
    for ranks in (1, 2):
        degrees[ranks].reset_prefix_cache()
        degrees[ranks].generate(tokens)
        chunks = degrees.shelf.wait_stored(tokens)
        stored.append([[read_object(path)[1] for path in chunk] for chunk in chunks])
        for chunk in chunks:
            for path in chunk:
                path.unlink()
        # Look-ups and stores remember what was there a moment ago.
        degrees[ranks].reset_connector()
    for one, two in zip(*stored, strict=True):
        for of_one, of_two in zip(one, two, strict=True):
            assert_close(of_one, of_two)


@pytest.mark.usefixtures("reference")  # so that no near-tie is drawn
def test_what_one_rank_cannot_load_all_compute_again(degrees: Degrees, prompt: MakePrompt) -> None:
    engine, shelf = degrees.two, degrees.shelf
    tokens = prompt(900)
    engine.reset_prefix_cache()
    cold = engine.generate(tokens)
    damaged = shelf.wait_stored(tokens)[1][1]
    flip_byte(damaged)
    engine.reset_prefix_cache()
    answer = engine.generate(tokens)
    assert_same(answer, cold)
    until(damaged.is_file, "the object stored again")
    assert shelf.check_all()
    # Both ranks report before the chunk is trusted again.
    eventually_hits(engine, tokens, cold, 768)
