"""A hybrid model on a real engine: gated delta nets, whose KV is a state, beside full attention.

What a hit gives is compared to the bit with vLLM's own hit of the same length in memory, and with
what the same engine answers without a cache.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import (
    NEAR_TIE,
    Answer,
    Ask,
    Engine,
    Engines,
    MakePrompt,
    assert_same,
)
from tests.support.make_hybrid_model import make_hybrid_model
from tests.vllm.hybrid_files import HybridFiles, forge

#: Tokens of a chunk: vLLM's block.
CHUNK = 128


@pytest.fixture(scope="module")
def shelf(engines: Engines) -> HybridFiles:
    return HybridFiles(engines.root / "hybrid shelf")


@pytest.fixture(scope="module")
def hybrid(engines: Engines, shelf: HybridFiles) -> Iterator[Engine]:
    model = make_hybrid_model(engines.root / "models" / "qwen3-next", "qwen3-next")
    # Some processors have states in float32 in any case.
    engine = engines.start("hybrid", shelf.root, model=model, mamba_ssm_cache_dtype="float32")
    yield engine.wait_ready()
    engine.stop(at_once=True)


def bits(answer: Answer) -> tuple[list[int], list[float]]:
    """What must be equal to the last bit."""
    return answer.tokens, answer.logprobs


@pytest.fixture
def ask() -> Ask:
    """Let an engine answer as without a cache, up to the rounding of steps of other sizes."""

    def ask(engine: Engine, tokens: list[int], hit: int | None = None) -> Answer:
        answer = engine.generate(tokens)
        assert hit is None or answer.shelf_tokens == hit
        # With a salt that nobody else has, nothing comes from a cache.
        alone = engine.generate(tokens, cache_salt=secrets.token_hex())
        assert alone.cached_tokens == 0
        assert_same(answer, alone, NEAR_TIE)
        return answer

    return ask


def test_hit_is_as_one_in_memory(hybrid: Engine, shelf: HybridFiles, prompt: MakePrompt) -> None:
    """Must be the first test with this engine."""
    hit = 3 * CHUNK
    tokens = prompt(hit + 40)
    cold = hybrid.generate(tokens)
    assert (cold.cached_tokens, cold.shelf_tokens) == (0, 0)
    shelf.wait_hit(tokens, hit)
    assert shelf.chunk == CHUNK
    assert shelf.kinds == {"full", "state"}
    own = hybrid.generate(tokens)
    assert (own.cached_tokens, own.shelf_tokens) == (hit, 0)
    hybrid.reset_prefix_cache()
    loaded = hybrid.generate(tokens)
    assert (loaded.cached_tokens, loaded.shelf_tokens) == (hit, hit)
    assert bits(loaded) == bits(own)
    # What was loaded is in memory now, and is continued.
    again = hybrid.generate(tokens)
    assert (again.cached_tokens, again.shelf_tokens) == (hit, 0)
    assert bits(again) == bits(own)
    assert shelf.check_all()
    assert len(shelf.namespaces()) == 1


def test_conversation_goes_on(
    hybrid: Engine, shelf: HybridFiles, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(2 * CHUNK + 50)
    answer = hybrid.generate(tokens, max_tokens=60)
    shelf.wait_hit(tokens, 2 * CHUNK)
    following = tokens + answer.tokens + prompt(CHUNK)
    for hit in (2, 3):
        hybrid.reset_prefix_cache()
        ask(hybrid, following, hit * CHUNK)
        shelf.wait_hit(following, 3 * CHUNK)


def test_answer_depends_on_one_byte_of_a_state(
    hybrid: Engine, shelf: HybridFiles, prompt: MakePrompt
) -> None:
    """The control of this module: with a wrong state whose hash is right, the answer is wrong."""
    hit = 2 * CHUNK
    tokens = prompt(hit + 1)
    hybrid.generate(tokens)
    shelf.wait_hit(tokens, hit)
    shelf.wait_quiet()
    hybrid.reset_connector()
    right = hybrid.generate(tokens)
    path: Path = shelf.of(tokens, "state")[1][0]
    forge(path, "ssm")
    assert shelf.check_all()
    hybrid.reset_connector()
    wrong = hybrid.generate(tokens)
    assert right.shelf_tokens == wrong.shelf_tokens == hit
    assert bits(wrong) != bits(right)
