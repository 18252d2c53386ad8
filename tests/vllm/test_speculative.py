"""Speculative decoding on a real engine: KV of drafts that were rejected is never stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fleet import ENGINES, Engines
from harness import NEAR_TIE, Answer, Engine, assert_same
from safetensors.torch import load_file
from shelf_files import ShelfFiles, assert_close

pytestmark = pytest.mark.slow
MakePrompt = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def drafting(engines: Engines) -> Iterator[Engine]:
    """An engine that guesses tokens from n-grams, and stores what it decodes."""
    arguments = ENGINES["on_shelf"](engines.places)
    arguments["extra_config"] |= {
        "shared_storage_path": str(engines.places.root / "shelf of drafts"),
        "save_decode": True,
    }
    arguments["speculative_config"] = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    engine = engines.start("drafting", **arguments)
    yield engine.wait_ready()
    engine.stop(at_once=True)


@pytest.fixture
def shelf(engines: Engines) -> ShelfFiles:
    return ShelfFiles(engines.places.root / "shelf of drafts")


def test_rejected_drafts_are_never_stored(
    drafting: Engine, shelf: ShelfFiles, reference: Callable[..., Answer], prompt: MakePrompt
) -> None:
    # Drafts come from repetitions, which a random model does not go on with: most are rejected.
    tokens = prompt(20) * 20
    answer = drafting.generate(tokens, max_tokens=700)
    metrics = drafting.metrics()
    drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert drafted - accepted > 100
    # What is computed last is not stored: its last token has no KV yet.
    text = [*tokens, *answer.tokens][: 4 * 256]
    shelf.wait_stored(text)
    assert shelf.check_all() == 2 * 4
    # Prefilled, the same text has the same KV up to rounding; a draft's would be another.
    drafting.reset_prefix_cache()
    drafting.generate([*text, 2], max_tokens=1, cache_salt="prefilled")
    for one, other in zip(shelf.of(text), shelf.wait_stored(text, salt="prefilled"), strict=True):
        for decoded, prefilled in zip(one, other, strict=True):
            assert_close(load_file(decoded), load_file(prefilled))
    # The next turn of the chat loads prompt and answer; a draft's KV would change what follows.
    follow_up = [*text, *prompt(40)]
    drafting.reset_prefix_cache()
    loaded = drafting.generate(follow_up)
    assert loaded.shelf_tokens == 1024
    assert_same(loaded, reference(follow_up), NEAR_TIE)
