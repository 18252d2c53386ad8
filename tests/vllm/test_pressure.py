"""Many requests at once in a small cache: preemption."""

from __future__ import annotations

from tests.support.engines import (
    Answer,
    Engine,
    MakePrompt,
    Reference,
    ShelfFiles,
    assert_same_up_to_ties,
)
from tests.support.waiting import until

BLOCK = 128


def test_many_requests_with_preemption(
    engine: Engine, inert: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    stems = [prompt(length) for length in (300, 520, 700)]
    for stem in stems[:2]:
        engine.generate(stem, max_tokens=1)
        shelf.wait_stored(stem)
    # Behind 5 tokens each needs one more block.
    prompts = [prompt(-(len(stem) + 5) % BLOCK, after=stem) for stem in stems for _ in range(4)]

    def answers(one: Engine) -> list[Answer]:
        found: list[Answer] = []

        def preempted() -> bool:
            one.reset_prefix_cache()
            before = one.metrics()["vllm:num_preemptions_total"]
            found[:] = one.generate_all(prompts, max_tokens=16)
            return one.metrics()["vllm:num_preemptions_total"] > before

        # On a busy machine they may come one after the other.
        until(preempted, "a preemption", 600)
        assert all(answer.finish_reason == "length" for answer in found)
        return found

    alone = [reference(tokens, max_tokens=16) for tokens in prompts]
    assert_same_up_to_ties(answers(engine), alone, answers(inert))
    # All blocks are free again.
    engine.reset_prefix_cache()
    for tokens in prompts:
        shelf.wait_stored(tokens)
    shelf.check_all()
