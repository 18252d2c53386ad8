"""A real engine with a long queue: requests find what was stored while they waited."""

from __future__ import annotations

import time

import pytest

from tests.support.engines import NEAR_TIE, Engine, assert_same
from tests.support.fleet import Engines, MakePrompt, Reference
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_prompts_that_wait_share_the_document_that_the_first_stored(
    engines: Engines, engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    document = prompt(600)
    prompts = [[*document, *prompt(20)] for _ in range(8)]
    with engines.on_shelf(
        "backlog", shelf.root, max_num_seqs=1, enable_prefix_caching=False, max_model_len=8192
    ) as backlog:
        first = backlog.submit(prompt(5), max_tokens=8000)
        first.wait_first_token()
        # Looked up at arrival, they find nothing, and wait until the first has ended.
        requests = [backlog.submit(waiting, max_tokens=16) for waiting in prompts]
        shelf.fill(engine, document)
        # An answer is renewed when it is older than a second.
        time.sleep(1.2)
        first.abort()
        answers = [request.result() for request in requests]
        assert first.result().finish_reason == "abort"
    assert [answer.cached_tokens for answer in answers] == [512] * len(prompts)
    assert_same(answers[-1], reference(prompts[-1], max_tokens=16), NEAR_TIE)
