"""A real engine with a long queue: requests find what was stored while they waited."""

from __future__ import annotations

from tests.support.engines import NEAR_TIE, assert_same
from tests.support.fleet import Engines, MakePrompt, Reference
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles


def test_prompts_that_wait_share_the_document_that_the_first_stored(
    engines: Engines, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    document = prompt(600)
    prompts = [[*document, *prompt(20)] for _ in range(20)]
    with engines.on_shelf(
        "backlog", shelf.root, max_num_seqs=1, enable_prefix_caching=False
    ) as engine:
        # Until an engine knows its namespace it stores nothing.
        until(lambda: bool(engine.generate(prompt(300)) and shelf.objects()), "a stored chunk")
        answers = engine.generate_all(prompts, max_tokens=16)
    # On an idle machine all but the first: the others begin when its chunks are published. What was
    # looked up at arrival would be found by none.
    assert sum(answer.cached_tokens == 512 for answer in answers) >= 4
    assert_same(answers[-1], reference(prompts[-1], max_tokens=16), NEAR_TIE)
