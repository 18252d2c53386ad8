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
