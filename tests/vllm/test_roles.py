"""Producers and consumers, options that change what is stored, and changed weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from examples.models.make_model import make_model
from tests.support.engines import Engine, EngineError, assert_same
from tests.support.fleet import ENGINES, Ask, Engines, MakePrompt, Reference
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

pytestmark = pytest.mark.slow


def test_without_vllms_prefix_cache(
    chatting: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(1100)
    ask(chatting, tokens)
    shelf.wait_stored(tokens)
    for _ in range(2):
        ask(chatting, tokens, 1024)


def test_save_decode(chatting: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt) -> None:
    question = prompt(480)
    answer = chatting.generate(question, max_tokens=60)
    conversation = question + answer.tokens
    # The last token of an answer has no KV: nothing was computed after it.
    shelf.wait_stored(conversation[:-1])
    follow_up = prompt(30, after=conversation)
    ask(chatting, follow_up, 512)


@pytest.mark.named_failure
def test_changed_weights_at_a_path_do_not_hit_old_kv(
    engine: Engine,
    engines: Engines,
    shelf: ShelfFiles,
    reference: Reference,
    prompt: MakePrompt,
    tmp_path: Path,
) -> None:
    tokens = prompt(1100)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    [before] = shelf.namespaces()
    model = make_model(tmp_path / "a copy", "tiny", seed=1)
    arguments = ENGINES["on_shelf"](engines.places) | {"model": model}
    with engines.start("changed", **arguments) as changed:
        answer = changed.generate(tokens)
        assert answer.shelf_tokens == 0
        # With another salt it is computed again: what these weights say, without any shelf.
        assert_same(answer, changed.generate(tokens, cache_salt="other"))
        assert answer.tokens != reference(tokens).tokens
        until(lambda: len(shelf.namespaces()) == 2, "a namespace of the new weights")
        [after] = set(shelf.namespaces()) - {before}
        assert after.name.startswith("a-copy-")
    # Other tests look for their prompts in the one namespace of this shelf.
    shutil.rmtree(after)


@pytest.mark.slow
def test_mistakes_stop_the_engine_with_a_message(engines: Engines) -> None:
    arguments = ENGINES["on_shelf"](engines.places)
    arguments["extra_config"]["chunk_sise"] = 256
    engine = engines.start("mistaken", **arguments)
    with pytest.raises(EngineError):
        engine.wait_ready()
    assert "did you mean chunk_size?" in engine.log()
