"""Chunked prefill, many requests at once, and preemption forced by a tiny cache."""

from __future__ import annotations

import random

import pytest

from tests.support.engines import NEAR_TIE, Answer, Engine, assert_same_up_to_ties
from tests.support.fleet import Ask, MakePrompt, Reference
from tests.support.variants import variants
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

BLOCK = 128


@pytest.mark.parametrize("length", variants([300, 1000, 1800], {1000}))
def test_chunked_prefill(
    small: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt, length: int
) -> None:
    small.reset_prefix_cache()
    tokens = prompt(length)
    ask(small, tokens, 0, tolerance=NEAR_TIE)
    shelf.wait_stored(tokens)
    small.reset_prefix_cache()
    ask(small, tokens, length // 256 * 256, tolerance=NEAR_TIE)


def test_prefill_chunks_do_not_show_in_objects(
    small: Engine, engine: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt
) -> None:
    """What one engine stored in steps of 384 tokens, another with larger steps loads."""
    tokens = prompt(1500)
    small.reset_prefix_cache()
    small.generate(tokens)
    shelf.wait_stored(tokens)
    ask(engine, tokens, 1280, tolerance=NEAR_TIE)


def test_many_requests_with_preemption(
    small: Engine, small_inert: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    small.reset_prefix_cache()
    stems = [prompt(length) for length in (300, 520, 700)]
    for stem in stems[:2]:
        small.generate(stem, max_tokens=1)
        shelf.wait_stored(stem)
    # Behind 5 tokens each needs one more block.
    prompts = [prompt(-(len(stem) + 5) % BLOCK, after=stem) for stem in stems for _ in range(4)]

    def answers(engine: Engine) -> list[Answer]:
        found: list[Answer] = []

        def preempted() -> bool:
            engine.reset_prefix_cache()
            before = engine.metrics()["vllm:num_preemptions_total"]
            found[:] = engine.generate_all(prompts, max_tokens=16, timeout=300)
            return engine.metrics()["vllm:num_preemptions_total"] > before

        # On a busy machine they may come one after the other.
        until(preempted, "a preemption", 600)
        assert all(answer.finish_reason == "length" for answer in found)
        return found

    alone = [reference(tokens, max_tokens=16) for tokens in prompts]
    assert_same_up_to_ties(answers(small), alone, answers(small_inert))
    # All blocks are free again.
    small.reset_prefix_cache()
    for tokens in prompts:
        shelf.wait_stored(tokens)
    shelf.check_all()


def test_aborts_among_many_requests(
    small: Engine, small_inert: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    stems = [prompt(600), prompt(900)]
    for stem in stems:
        small.reset_prefix_cache()
        small.generate(stem, max_tokens=1)
        shelf.wait_stored(stem)
    small.reset_prefix_cache()
    prompts = [stems[index % 2] + prompt(20 + index) for index in range(10)]

    def answers(engine: Engine) -> dict[int, Answer]:
        """Abort half of the requests; return the answers of the other half."""
        requests = [engine.submit(tokens, max_tokens=16) for tokens in prompts]
        generator = random.Random(3)
        aborted = set(generator.sample(range(10), 5))
        for index in sorted(aborted):
            if generator.random() < 0.5:
                requests[generator.randrange(10)].wait_first_token()
            requests[index].abort()
        results = [request.result(300) for request in requests]
        return {index: result for index, result in enumerate(results) if index not in aborted}

    kept = answers(small)
    assert_same_up_to_ties(
        list(kept.values()),
        [reference(prompts[index], max_tokens=16) for index in kept],
        list(answers(small_inert).values()),
    )
    small.reset_prefix_cache()


def test_killed_while_storing(small: Engine, shelf: ShelfFiles, prompt: MakePrompt) -> None:
    """The last test of this module: an engine that is killed leaves whole objects or none."""
    requests = [small.submit(prompt(1500), max_tokens=1) for _ in range(4)]
    requests[1].wait_first_token()
    small.kill()
    assert shelf.check_all() > 0
