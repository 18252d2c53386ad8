"""A second engine on the same shelf: restarts, races, adapters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from tests.support.engines import (
    Ask,
    Engine,
    Engines,
    MakePrompt,
    Reference,
    ShelfFiles,
    assert_same,
    assert_same_up_to_ties,
)
from tests.support.waiting import until
from tests.vllm.adapter_files import attention_shapes, make_adapter


@pytest.fixture(scope="module")
def second(engines: Engines) -> Iterator[Engine]:
    """An engine that was started after another one was killed, with large steps."""
    yield engines["second"]
    engines["second"].stop(at_once=True)


def wait_objects(shelf: ShelfFiles, count: int) -> None:
    """Wait until the shelf holds `count` objects."""
    until(lambda: len(shelf.objects()) == count, f"{count} objects on the shelf")


def test_killed_while_storing_and_started_again(
    engines: Engines, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt
) -> None:
    """Must be the first test with the second engine."""
    doomed = engines["doomed"]
    tokens, cut_off = prompt(1500), [prompt(1500) for _ in range(4)]
    shelf.fill(doomed, tokens)
    requests = [doomed.submit(each, max_tokens=1) for each in cut_off]
    requests[1].wait_first_token()
    doomed.kill()
    # Whole objects or none are left.
    assert shelf.check_all() > 0
    second = engines["second"]
    ask(second, tokens, 1280)
    for each in cut_off:
        ask(second, each)
        shelf.wait_stored(each)
    shelf.check_all()


def test_a_prompt_is_stored_in_small_steps_and_loaded_with_large_ones(
    engine: Engine, second: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(1500)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    ask(second, tokens, 1280)


def test_two_engines_store_the_same_chunks_at_once(
    engine: Engine,
    second: Engine,
    inert: Engine,
    shelf: ShelfFiles,
    reference: Reference,
    ask: Ask,
    prompt: MakePrompt,
) -> None:
    left = shelf.temporaries()
    prompts = [prompt(800) for _ in range(4)]
    both = [[each.submit(tokens) for each in (engine, second)] for tokens in prompts]
    answers = [request.result() for pair in both for request in pair]
    expected = [reference(tokens) for tokens in prompts for _ in range(2)]
    inert.reset_prefix_cache()
    control = [answer for answer in inert.generate_all(prompts) for _ in range(2)]
    for tokens in prompts:
        shelf.wait_stored(tokens)
    assert_same_up_to_ties(answers, expected, control)
    shelf.check_all()
    until(lambda: shelf.temporaries() <= left, "temporaries gone")
    for each in (engine, second):
        each.reset_prefix_cache()
        for tokens in prompts:
            ask(each, tokens, 768)


def test_adapters_are_told_apart_by_content(
    second: Engine, shelf: ShelfFiles, tmp_path: Path, prompt: MakePrompt
) -> None:
    shapes = attention_shapes()
    one, two = make_adapter(tmp_path / "one", 1, shapes), make_adapter(tmp_path / "two", 2, shapes)
    copy = shutil.copytree(one, tmp_path / "copy of one")

    def lora(number: int, path: Path) -> dict[str, Any]:
        return {"lora_name": path.name, "lora_int_id": number, "lora_path": str(path)}

    adapters = [None, lora(1, one), lora(2, two)]
    tokens, before = prompt(600), len(shelf.objects())
    cold = []
    for number, adapter in enumerate(adapters, 1):
        # Loads the adapter, so that the worker knows its digest when there is something to store.
        second.generate(prompt(20), lora=adapter)
        second.reset_prefix_cache()
        cold.append(second.generate(tokens, lora=adapter))
        assert cold[-1].shelf_tokens == 0
        # Two chunks in two shards.
        wait_objects(shelf, before + 4 * number)
    assert len({tuple(answer.tokens) for answer in cold}) == 3
    for adapter, answer in zip([*adapters, lora(3, copy)], [*cold, cold[1]], strict=True):
        second.reset_prefix_cache()
        warm = second.generate(tokens, lora=adapter)
        assert warm.shelf_tokens == 512
        assert_same(warm, answer)

    # Another adapter at the same path is another adapter, under a new id; under the old one nobody
    # can tell which of the two some KV was computed with.
    shutil.rmtree(two)
    make_adapter(two, 9, shapes)
    objects = shelf.objects()
    second.reset_prefix_cache()
    old = second.generate(tokens, lora=lora(2, two))
    assert old.shelf_tokens == 0
    assert shelf.objects() == objects
    # vLLM's prefix cache may hold KV of both.
    second.reset_prefix_cache(connector=True)
    assert second.generate(tokens, lora=lora(5, two)).shelf_tokens == 0
    assert shelf.objects() == objects
    renamed = lora(6, two) | {"lora_name": "another"}
    second.generate(prompt(20), lora=renamed)
    new = second.generate(tokens, lora=renamed)
    assert new.shelf_tokens == 0
    assert new.tokens != cold[2].tokens
    wait_objects(shelf, len(objects) + 4)
    second.reset_prefix_cache()
    warm = second.generate(tokens, lora=renamed)
    assert warm.shelf_tokens == 512
    assert_same(warm, new)


def test_an_adapter_that_is_swapped_in_place_answers_with_its_new_files(
    second: Engine, shelf: ShelfFiles, tmp_path: Path, prompt: MakePrompt
) -> None:
    """As an API server does it for ``load_lora_adapter`` with ``load_inplace``."""
    shapes = attention_shapes()
    folder = make_adapter(tmp_path / "swapped", 11, shapes)
    new = make_adapter(tmp_path / "new", 12, shapes)
    lora = {"lora_name": "swapped", "lora_int_id": 11, "lora_path": str(folder)}
    tokens, before = prompt(600), len(shelf.objects())
    second.generate(prompt(20), lora=lora)
    old = second.generate(tokens, lora=lora)
    wait_objects(shelf, before + 4)
    expected = second.generate(
        tokens, lora={"lora_name": "new", "lora_int_id": 12, "lora_path": str(new)}
    )
    assert expected.tokens != old.tokens
    wait_objects(shelf, before + 8)
    shutil.rmtree(folder)
    make_adapter(folder, 12, shapes)
    second.call("add_lora", lora_request=LoRARequest(**lora, load_inplace=True))
    # The server's later requests keep `load_inplace`, those of other clients need not.
    for inplace in (True, False):
        for connector in (False, True):
            second.reset_prefix_cache(connector=connector)
            answer = second.generate(tokens, lora=lora | {"load_inplace": inplace})
            assert answer.shelf_tokens == 0
            assert_same(answer, expected)
    assert len(shelf.objects()) == before + 8


def test_stop_publishes_what_is_staged(
    second: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    """The last test with the second engine: it stops it."""
    prompts = [prompt(1500) for _ in range(4)]
    for tokens in prompts:
        second.generate(tokens, max_tokens=1)
    second.stop()
    for tokens in prompts:
        shelf.wait_stored(tokens, seconds=0.1)
    shelf.check_all()
