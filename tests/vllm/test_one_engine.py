"""One engine and its shelf: what is stored, what is loaded, and that answers stay the same."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engines import (
    CHUNK,
    Ask,
    Engine,
    MakePrompt,
    Reference,
    ShelfFiles,
    assert_close,
    assert_same,
    eventually_hits,
    flip_byte,
    read_object,
    replace_by_fifo,
)
from tests.support.waiting import until
from tests.vllm.handing_over import Counted

BLOCK = 128


def lines_of_transfers(engine: Engine) -> int:
    """Count the lines that share one limit: those of :mod:`kvshelf.transfer`."""
    return len(engine.log_lines("[loads.py:") + engine.log_lines("[stores.py:"))


def expected_hit(shared: int, length: int) -> int:
    """Tokens that the shelf delivers of a prompt whose first `shared` tokens are stored."""
    stored = shared // CHUNK * CHUNK
    return min(stored, length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("length", [256, 257, 1000, 1])
def test_equal_prompt(
    engine: Engine,
    shelf: ShelfFiles,
    reference: Reference,
    ask: Ask,
    prompt: MakePrompt,
    length: int,
) -> None:
    tokens = prompt(length)
    ask(engine, tokens, 0)
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    warm = engine.generate(tokens)
    assert warm.shelf_tokens == warm.cached_tokens == expected_hit(length, length)
    assert_same(warm, reference(tokens))


def test_as_vllms_own_prefix_cache_to_the_last_bit(
    engine: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    for length in (CHUNK + 1, 5 * CHUNK + 60):
        tokens = prompt(length)
        engine.generate(tokens, max_tokens=1)
        shelf.wait_stored(tokens)
        own = engine.generate(tokens, max_tokens=16)
        assert own.shelf_tokens == 0
        engine.reset_prefix_cache()
        loaded = engine.generate(tokens, max_tokens=16)
        assert own.cached_tokens == loaded.cached_tokens == loaded.shelf_tokens > 0
        assert loaded.tokens == own.tokens
        assert loaded.logprobs == own.logprobs
        assert loaded.gaps == own.gaps


def test_what_vllm_has_itself_is_not_loaded(
    engine: Engine, shelf: ShelfFiles, reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(1500)
    shelf.fill(engine, tokens)
    engine.generate(tokens[:400] + prompt(20), max_tokens=1)
    answer = engine.generate(tokens)
    own, hit = 400 // BLOCK * BLOCK, expected_hit(1500, 1500)
    assert answer.cached_tokens == hit
    assert answer.shelf_tokens == hit - own
    assert_same(answer, reference(tokens))
    # The blocks that were there before and those that were loaded are good for others too.
    ask(engine, tokens, 0)


def test_loads_and_stores_in_one_request(
    engine: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt
) -> None:
    base = prompt(600)
    engine.generate(base)
    shelf.wait_stored(base)
    longer = prompt(700, after=base)
    engine.reset_prefix_cache()
    assert engine.generate(longer).shelf_tokens == 512
    shelf.wait_stored(longer)
    engine.reset_prefix_cache()
    ask(engine, longer, 1280)


def test_stored_once(engine: Engine, shelf: ShelfFiles, prompt: MakePrompt) -> None:
    tokens = prompt(600)
    engine.generate(tokens)
    chunks = shelf.wait_stored(tokens)
    times = [path.stat().st_mtime_ns for chunk in chunks for path in chunk]
    for _ in range(2):
        engine.reset_prefix_cache()
        engine.generate(tokens)
    engine.generate(prompt(300))
    assert [path.stat().st_mtime_ns for chunk in chunks for path in chunk] == times


def test_other_salt(engine: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt) -> None:
    tokens = prompt(600)
    engine.generate(tokens, cache_salt="one tenant")
    shelf.wait_stored(tokens, salt="one tenant")
    for salt, hit in ((None, 0), ("another tenant", 0), ("one tenant", 512)):
        engine.reset_prefix_cache()
        ask(engine, tokens, hit, cache_salt=salt)


def test_prompt_logprobs(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(600)
    shelf.fill(engine, tokens)
    before = engine.counters()
    answer = engine.generate(tokens, prompt_logprobs=0)
    assert answer.cached_tokens == 0
    assert_same(answer, reference(tokens))
    expected = reference(tokens, prompt_logprobs=0).prompt_logprobs
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(tokens)
    assert answer.prompt_logprobs[1:] == pytest.approx(expected[1:], abs=0.2)
    # And its KV may be used by a request that wants no such thing. Only that one counts as a hit.
    engine.reset_prefix_cache()
    assert engine.generate(tokens).shelf_tokens == 512
    assert engine.counters()["hit_tokens"] - before.get("hit_tokens", 0) == 512


def test_abort_while_loading(
    engine: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt
) -> None:
    stored = [prompt(1500) for _ in range(3)]
    for tokens in stored:
        engine.generate(tokens, max_tokens=1)
        shelf.wait_stored(tokens)
    for _ in range(3):
        engine.reset_prefix_cache()
        requests = [engine.submit(tokens, max_tokens=32) for tokens in stored]
        for request in requests:
            request.abort()
        assert all(request.result().finish_reason in ("abort", "length") for request in requests)
    # Blocks of aborted loads are free again, or this would be refused.
    engine.reset_prefix_cache()
    for tokens in stored:
        ask(engine, tokens, 1280)


def test_reset_of_the_connector(engine: Engine, shelf: ShelfFiles, prompt: MakePrompt) -> None:
    tokens = prompt(600)
    engine.generate(tokens)
    chunks = shelf.wait_stored(tokens)
    for chunk in chunks:
        for path in chunk:
            path.unlink()
    engine.reset_connector()
    assert engine.generate(tokens).shelf_tokens == 0
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    assert engine.generate(tokens).shelf_tokens == 512


@pytest.mark.parametrize("damage", [flip_byte, replace_by_fifo])
def test_bad_object_is_computed_and_repaired(
    engine: Engine, shelf: ShelfFiles, ask: Ask, prompt: MakePrompt, damage: Callable[[Path], None]
) -> None:
    """A load finds the one bad, and a look-up the other. What may be wrong is tested elsewhere."""
    tokens = prompt(1100)
    engine.generate(tokens)
    bad = shelf.wait_stored(tokens)[2][1]
    metadata, tensors = read_object(bad)
    damage(bad)
    counter = "load_failures_bad" if damage is flip_byte else "repaired_objects"
    counted = Counted(engine)
    lines = lines_of_transfers(engine)
    engine.reset_prefix_cache()
    answer = ask(engine, tokens)
    assert answer.finish_reason == "length"

    def is_repaired() -> bool:
        with contextlib.suppress(AssertionError, LookupError, OSError, ValueError):
            # Whoever opens a FIFO waits for somebody at its other end.
            return bad.is_file() and read_object(bad)[0] == metadata
        return False

    until(is_repaired, "the object's repair")
    assert_close(read_object(bad)[1], tensors)
    # That reaches the scheduler with a step, and so may be news to the request after the next.
    eventually_hits(engine, tokens, answer, 1024)
    counted.wait(**{counter: 1})
    # One line for each bad object, and not more than ten a minute.
    said = len(engine.log_lines(bad.name))
    assert said == 1 or (said == 0 and lines >= 10)


def test_no_thread_gives_way_to_others(
    engine: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    """One that waits for a processor while it holds the GIL would stop the engine's step."""
    tokens = prompt(600)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    threads = 0
    for process in engine.processes():
        own = os.getpriority(os.PRIO_PROCESS, process)
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                assert os.getpriority(os.PRIO_PROCESS, int(thread.name)) <= own
                threads += 1
    assert threads > 10
