"""A real engine with a long queue: requests find what was stored while they waited."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.engines import NEAR_TIE, Answer, assert_same
from tests.support.fleet import Engines
from tests.vllm.shelf_files import ShelfFiles


def test_prompts_that_wait_share_the_document_that_the_first_stored(
    engines: Engines,
    shelf: ShelfFiles,
    reference: Callable[..., Answer],
    prompt: Callable[[int], list[int]],
) -> None:
    document = prompt(600)
    prompts = [[*document, *prompt(20)] for _ in range(50)]
    with engines.on_shelf(
        "backlog", shelf.root, max_num_seqs=1, enable_prefix_caching=False
    ) as engine:
        # The first request of an engine may be computed before it knows its namespace.
        engine.generate(prompt(300))
        answers = engine.generate_all(prompts, max_tokens=24)
        loaded = engine.counters()["loaded_tokens"]
    # On an idle machine all but the first: the others begin when its chunks are published.
    assert loaded >= 40 * 512
    assert_same(answers[-1], reference(prompts[-1], max_tokens=24), NEAR_TIE)
