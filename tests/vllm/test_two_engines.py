"""A second engine on the same shelf: restarts, races, adapters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

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


def test_adapter_that_is_swapped_in_place_answers_with_its_new_files(
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


def test_stop_publishes_what_is_in_memory(
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
