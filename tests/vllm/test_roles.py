"""Producers and consumers, options that change what is stored, and changed weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import StartEngine
from harness import Answer, Engine, EngineError, assert_same
from make_model import make_model
from shelf_files import ShelfFiles

MakePrompt = Callable[[int], list[int]]
Reference = Callable[..., Answer]


@pytest.fixture(scope="module")
def copied_model(workspace: Path, model: Path) -> Path:
    """The same weights in another folder."""
    copy = workspace / "models" / "a copy"
    shutil.copytree(model, copy)
    return copy


@pytest.fixture(scope="module")
def consumer(
    start_engine: StartEngine,
    session_engines: tuple[Engine, Engine],
    copied_model: Path,
    shelf: ShelfFiles,
) -> Iterator[Engine]:
    """An engine that only loads, on a copy of the model."""
    engine = start_engine("consumer", copied_model, shelf.root, kv_role="kv_consumer")
    yield engine.wait_ready()
    engine.stop()


@pytest.fixture(scope="module")
def chatting(
    start_engine: StartEngine,
    session_engines: tuple[Engine, Engine],
    model: Path,
    shelf: ShelfFiles,
) -> Iterator[Engine]:
    """An engine without a prefix cache of its own that stores what it decodes, too."""
    engine = start_engine(
        "chatting",
        model,
        shelf.root,
        extra_config={"save_decode": True},
        enable_prefix_caching=False,
    )
    yield engine.wait_ready()
    engine.stop()


def test_without_vllms_prefix_cache(
    chatting: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(1100)
    assert_same(chatting.generate(tokens), reference(tokens))
    shelf.wait_stored(tokens)
    for _ in range(2):
        answer = chatting.generate(tokens)
        assert answer.shelf_tokens == 1024
        assert_same(answer, reference(tokens))


def test_save_decode(
    chatting: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    question = prompt(200)
    answer = chatting.generate(question, max_tokens=400)
    conversation = question + answer.tokens
    # The last token of an answer has no KV: nothing was computed after it.
    shelf.wait_stored(conversation[:-1])
    follow_up = conversation + prompt(30)
    answer = chatting.generate(follow_up)
    assert answer.shelf_tokens == 512
    assert_same(answer, reference(follow_up))


def test_answers_are_not_stored_by_default(
    engine: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    question = prompt(300)
    answer = engine.generate(question, max_tokens=300)
    shelf.wait_stored(question)
    conversation = question + answer.tokens
    marker = prompt(300)
    engine.generate(marker)
    shelf.wait_stored(marker)
    assert [all(path.exists() for path in chunk) for chunk in shelf.of(conversation)] == [
        True,
        False,
    ]


def test_consumer_loads_and_stores_nothing(
    engine: Engine,
    consumer: Engine,
    shelf: ShelfFiles,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    tokens = prompt(1100)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    objects = shelf.objects()
    answer = consumer.generate(tokens)
    assert answer.shelf_tokens == 1024
    assert_same(answer, reference(tokens))
    for _ in range(3):
        new = prompt(600)
        assert_same(consumer.generate(new), reference(new))
    consumer.stop()
    assert shelf.objects() == objects
    assert len(shelf.namespaces()) == 1


def test_changed_weights_at_the_same_path(
    engine: Engine,
    consumer: Engine,
    start_engine: StartEngine,
    copied_model: Path,
    shelf: ShelfFiles,
    reference: Reference,
    prompt: MakePrompt,
) -> None:
    tokens = prompt(1100)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    consumer.stop()
    make_model(copied_model, "tiny", seed=1, replace=True)
    with start_engine("changed", copied_model, shelf.root) as changed:
        answer = changed.generate(tokens)
        assert answer.shelf_tokens == 0
        # With another salt it is computed again: what these weights say, without any shelf.
        assert_same(answer, changed.generate(tokens, cache_salt="other"))
        assert answer.tokens != reference(tokens).tokens
        assert len(shelf.namespaces()) == 2
        [folder] = [
            folder
            for folder in shelf.namespaces()
            if not all(path.exists() for chunk in shelf.of(tokens, folder=folder) for path in chunk)
            or folder.stat().st_ctime_ns
            == max(each.stat().st_ctime_ns for each in shelf.namespaces())
        ]
        assert folder.name.startswith("a-copy-")


def test_mistakes_stop_the_engine_with_a_message(
    start_engine: StartEngine, model: Path, shelf: ShelfFiles
) -> None:
    engine = start_engine("mistaken", model, shelf.root, extra_config={"chunk_sise": 256})
    with pytest.raises(EngineError):
        engine.wait_ready()
    assert "did you mean chunk_size?" in engine.log()
