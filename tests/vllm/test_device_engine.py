"""A real engine whose stores and loads go by the streams of a simulated device."""

from __future__ import annotations

import pytest

from tests.support.engines import Engine, assert_same
from tests.support.fleet import Ask, MakePrompt, Reference
from tests.support.variants import variants
from tests.vllm.shelf_files import CHUNK, ShelfFiles

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("length", variants([CHUNK, 2 * CHUNK + 100, 2300], ()))
def test_answers_stay_the_same_beside_a_device(
    beside_device: Engine,
    shelf: ShelfFiles,
    reference: Reference,
    ask: Ask,
    prompt: MakePrompt,
    length: int,
) -> None:
    engine, tokens = beside_device, prompt(length)
    ask(engine, tokens, 0)
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    warm = engine.generate(tokens)
    assert warm.shelf_tokens == warm.cached_tokens == (
        length - 1
    ) // 128 * 128 // CHUNK * CHUNK or (length == CHUNK)
    assert_same(warm, reference(tokens))
    assert "could not pin staging memory" in engine.log_path.read_text()


def test_requests_that_load_store_and_end_early_at_the_same_time(
    beside_device: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    engine, base = beside_device, prompt(4 * CHUNK)
    shelf.fill(engine, base)
    prompts = [prompt(100 + 300 * (i % 3), after=base[: (1 + i % 4) * CHUNK]) for i in range(8)]
    requests = [engine.submit(tokens) for tokens in prompts]
    for request in requests[::4]:
        request.abort()
    for i, (tokens, request) in enumerate(zip(prompts, requests, strict=True)):
        answer = request.result()
        if i % 4:
            assert_same(answer, reference(tokens))
