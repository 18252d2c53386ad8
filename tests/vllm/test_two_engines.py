"""A second engine on the same shelf: restarts, races, shelves that vanish or take no writes."""

from __future__ import annotations

import pytest

from tests.support.engines import Engine, assert_same_up_to_ties
from tests.support.fleet import Ask, MakePrompt, Places, Reference
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles


def test_first_request_of_a_fresh_engine_hits(
    engine: Engine, second: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt
) -> None:
    """Must be the first test with the second engine."""
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


def test_stop_publishes_what_is_staged(
    second: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    """The last test with the second engine: it stops it."""
    prompts = [prompt(1500) for _ in range(4)]
    for tokens in prompts:
        second.generate(tokens, max_tokens=1)
    second.stop()
    for tokens in prompts:
        shelf.wait_stored(tokens, timeout=0.1)
    shelf.check_all()


@pytest.fixture(scope="module")
def own(places: Places) -> ShelfFiles:
    """A shelf that is deleted and write-protected."""
    return ShelfFiles(places.own)


def test_shelf_deleted_while_running(
    third: Engine,
    inert: Engine,
    own: ShelfFiles,
    reference: Reference,
    ask: Ask,
    prompt: MakePrompt,
) -> None:
    tokens = prompt(1100)
    own.fill(third, tokens)
    prompts = [tokens + prompt(5) for _ in range(6)]
    requests = [third.submit(each) for each in prompts]
    own.delete()
    answers = [request.result() for request in requests]
    alone = [reference(each) for each in prompts]
    inert.reset_prefix_cache()
    inert.generate(tokens)
    assert_same_up_to_ties(answers, alone, inert.generate_all(prompts))
    third.reset_prefix_cache()
    ask(third, tokens)
    # It comes back by itself: every ten seconds, a store looks whether it is described.
    until(lambda: bool(third.generate(prompt(300)) and own.namespaces()))
    new = prompt(600)
    own.fill(third, new)
    ask(third, new, 512)


def test_read_only_shelf(third: Engine, own: ShelfFiles, ask: Ask, prompt: MakePrompt) -> None:
    """The last test with the third engine: after a refusal it stores nothing for a while."""
    if not third.heeds_permissions:
        pytest.skip("these tests run as a root that cannot give up its privileges")
    stored, new = prompt(600), [prompt(600) for _ in range(3)]
    own.fill(third, stored)
    until(lambda: not own.temporaries(), "temporaries gone")
    objects = own.objects()
    # The second, if another write than that of a chunk is refused first.
    lines = "write circuit breaker open", "takes no writes"

    def said() -> list[int]:
        return [len(third.log_lines(line)) for line in lines]

    before = said()
    folders = [own.root, *(path for path in own.root.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        ask(third, stored, 512)
        for tokens in new:
            ask(third, tokens, 0)
        until(lambda: said() > before, "a line in the log")
        third.generate(prompt(600))
        assert own.objects() == objects
        assert all(now - then <= 1 for now, then in zip(said(), before, strict=True))
    finally:
        for folder in folders:
            folder.chmod(0o755)
