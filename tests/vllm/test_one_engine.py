"""One engine and its shelf: what is stored, what is loaded, and that answers stay the same."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from make_model import RECIPES

from tests.support.engines import Answer, Engine, assert_same
from tests.support.waiting import until
from tests.vllm.shelf_files import (
    CHUNK,
    DAMAGE,
    SEEN_BY_LOOKUP,
    ShelfFiles,
    check_object,
    is_repaired,
)

BLOCK = 128
MakePrompt = Callable[..., list[int]]
Reference = Callable[..., Answer]


def lines_of_transfers(engine: Engine) -> int:
    """Count the lines that share one limit: those of :mod:`kvshelf.transfer`."""
    return len(engine.log_lines("[loads.py:") + engine.log_lines("[stores.py:"))


def expected_hit(shared: int, length: int) -> int:
    """Tokens that the shelf delivers of a prompt whose first `shared` tokens are stored."""
    stored = shared // CHUNK * CHUNK
    return min(stored, length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("length", [1, 127, 255, 256, 257, 300, 511, 512, 513, 1000, 2300])
def test_equal_prompt(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt, length: int
) -> None:
    tokens = prompt(length)
    cold = engine.generate(tokens)
    assert cold.shelf_tokens == 0
    assert_same(cold, reference(tokens))
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    warm = engine.generate(tokens)
    assert warm.shelf_tokens == warm.cached_tokens == expected_hit(length, length)
    assert_same(warm, reference(tokens))


def test_objects_are_readable_by_safetensors(
    engine: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    from safetensors import safe_open

    tokens = prompt(600)
    engine.generate(tokens)
    for chunk in shelf.wait_stored(tokens):
        for path in chunk:
            check_object(path)
            with safe_open(path, framework="pt") as file:
                assert file.metadata()["format"] == "kvshelf/1"
                assert len(list(file.keys())) == RECIPES["tiny"].layers


def test_shared_prefixes_of_any_length(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    base = prompt(1500)
    engine.generate(base)
    shelf.wait_stored(base)
    lengths = [1, 128, 255, 256, 257, 384, 511, 512, 700, 1024, 1279, 1280, 1499]
    lengths += random.Random(7).sample(range(2, 1500), 7)
    for shared in lengths:
        tokens = prompt(1 + shared % 90, after=base[:shared])
        engine.reset_prefix_cache()
        answer = engine.generate(tokens)
        assert answer.shelf_tokens == expected_hit(shared, len(tokens)), shared
        assert_same(answer, reference(tokens))


def test_as_vllms_own_prefix_cache_to_the_last_bit(
    engine: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    for length in (CHUNK + 1, 2 * CHUNK + 100, 5 * CHUNK + 60):
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
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(1500)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    engine.generate(tokens[:400] + prompt(20), max_tokens=1)
    answer = engine.generate(tokens)
    own, hit = 400 // BLOCK * BLOCK, expected_hit(1500, 1500)
    assert answer.cached_tokens == hit
    assert answer.shelf_tokens == hit - own
    assert_same(answer, reference(tokens))
    # The blocks that were there before and those that were loaded are good for others too.
    again = engine.generate(tokens)
    assert again.shelf_tokens == 0
    assert_same(again, reference(tokens))


def test_what_vllm_has_itself_is_used_all_the_same(
    engine: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    """The next engine would load it, so it must not be what is deleted first."""
    tokens, unused = prompt(800), prompt(800)
    paths = {}
    for each in (tokens, unused):
        engine.generate(each)
        paths[tuple(each)] = [path for of_chunk in shelf.wait_stored(each) for path in of_chunk]
        for path in paths[tuple(each)]:
            os.utime(path, (1e9, 1e9))
    answer = engine.generate(tokens)
    assert answer.shelf_tokens == 0 and answer.cached_tokens == 768
    until(
        lambda: all(path.stat().st_atime > 1e9 for path in paths[tuple(tokens)]),
        "access times of the prompt's objects",
    )
    stats = [path.stat() for found in paths.values() for path in found]
    assert {found.st_mtime for found in stats} == {1e9}
    assert {path.stat().st_atime for path in paths[tuple(unused)]} == {1e9}


def test_loads_and_stores_in_one_request(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    base = prompt(600)
    engine.generate(base)
    shelf.wait_stored(base)
    longer = prompt(700, after=base)
    engine.reset_prefix_cache()
    assert engine.generate(longer).shelf_tokens == 512
    shelf.wait_stored(longer)
    engine.reset_prefix_cache()
    answer = engine.generate(longer)
    assert answer.shelf_tokens == 1280
    assert_same(answer, reference(longer))


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


def test_other_salt(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(600)
    engine.generate(tokens, cache_salt="one tenant")
    shelf.wait_stored(tokens, salt="one tenant")
    for salt, hit in ((None, 0), ("another tenant", 0), ("one tenant", 512)):
        engine.reset_prefix_cache()
        answer = engine.generate(tokens, cache_salt=salt)
        assert answer.shelf_tokens == hit, salt
        assert_same(answer, reference(tokens))


def test_prompt_logprobs(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(600)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    answer = engine.generate(tokens, prompt_logprobs=0)
    assert answer.cached_tokens == 0
    assert_same(answer, reference(tokens))
    expected = reference(tokens, prompt_logprobs=0).prompt_logprobs
    assert answer.prompt_logprobs[0] is None and len(answer.prompt_logprobs) == len(tokens)
    assert answer.prompt_logprobs[1:] == pytest.approx(expected[1:], abs=0.2)
    # And its KV may be used by a request that wants no such thing.
    engine.reset_prefix_cache()
    assert engine.generate(tokens).shelf_tokens == 512


def test_abort_while_loading(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    stored = [prompt(1500) for _ in range(6)]
    for tokens in stored:
        engine.generate(tokens, max_tokens=1)
        shelf.wait_stored(tokens)
    for _ in range(5):
        engine.reset_prefix_cache()
        requests = [engine.submit(tokens, max_tokens=32) for tokens in stored]
        for request in requests:
            request.abort()
        assert all(request.result().finish_reason in ("abort", "length") for request in requests)
    # Blocks of aborted loads are free again, or this would be refused.
    engine.reset_prefix_cache()
    for tokens in stored:
        answer = engine.generate(tokens)
        assert answer.shelf_tokens == 1280
        assert_same(answer, reference(tokens))


def test_abort_while_others_load_the_same(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(1500)
    engine.generate(tokens, max_tokens=1)
    shelf.wait_stored(tokens)
    for _ in range(5):
        engine.reset_prefix_cache()
        first, second, third = (engine.submit(tokens) for _ in range(3))
        first.abort()
        for request in (second, third):
            assert_same(request.result(), reference(tokens))


def test_reset_of_the_connector(engine: Engine, shelf: ShelfFiles, prompt: MakePrompt) -> None:
    tokens = prompt(600)
    engine.generate(tokens)
    chunks = shelf.wait_stored(tokens)
    for chunk in chunks:
        for path in chunk:
            path.unlink()
    engine.reset_prefix_cache(connector=True)
    assert engine.generate(tokens).shelf_tokens == 0
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    assert engine.generate(tokens).shelf_tokens == 512


@pytest.mark.parametrize("shard", [0, 1])
# The truncated one has a test of its own in test_named_failures.py.
@pytest.mark.parametrize("damage", [damage for damage in DAMAGE if damage != "truncated"])
def test_bad_object(
    engine: Engine,
    shelf: ShelfFiles,
    reference: Reference,
    prompt: MakePrompt,
    damage: str,
    shard: int,
) -> None:
    tokens = prompt(1100)
    engine.generate(tokens)
    bad = shelf.wait_stored(tokens)[2][shard]
    good = bad.read_bytes()
    DAMAGE[damage](bad)
    before = engine.counters()
    lines = lines_of_transfers(engine)

    engine.reset_prefix_cache()
    answer = engine.generate(tokens)
    assert_same(answer, reference(tokens))
    assert answer.finish_reason == "length"

    until(lambda: is_repaired(bad, good), "the object's repair")

    # That reaches the scheduler with a step, and so may be news to the request after the next.
    def found() -> bool:
        engine.reset_prefix_cache()
        again = engine.generate(tokens)
        assert_same(again, reference(tokens))
        return again.shelf_tokens == 1024

    until(found, "a hit on the repaired object", 10)
    counter = "repaired_objects" if damage in SEEN_BY_LOOKUP else "load_failures_bad"

    # Counts travel with steps too.
    def counted() -> float:
        engine.generate(tokens[:100], max_tokens=1)
        return engine.counters().get(counter, 0) - before.get(counter, 0)

    until(lambda: counted() > 0, "the count of a bad object", 10)
    assert counted() == 1
    # One line for each bad object, and not more than ten a minute.
    said = len(engine.log_lines(bad.name))
    assert said == 1 or (said == 0 and lines >= 10)


def test_hole_in_the_middle(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(1500)
    engine.generate(tokens)
    chunks = shelf.wait_stored(tokens)
    chunks[2][1].unlink()
    engine.reset_prefix_cache()
    answer = engine.generate(tokens)
    assert answer.shelf_tokens == 2 * CHUNK
    assert_same(answer, reference(tokens))
    shelf.wait_stored(tokens)


def test_foreign_files_do_not_matter(
    engine: Engine, shelf: ShelfFiles, reference: Reference, prompt: MakePrompt
) -> None:
    tokens = prompt(600)
    engine.generate(tokens)
    [first, *_], *_ = shelf.wait_stored(tokens)
    (first.parent / "notes.txt").write_text("not an object")
    (first.parent / ".half.safetensors.0123456789abcdef.tmp").write_bytes(b"begun")
    shutil.copyfile(first, first.with_name("copy of " + first.name))
    engine.reset_prefix_cache()
    answer = engine.generate(tokens)
    assert answer.shelf_tokens == 512
    assert_same(answer, reference(tokens))
    for path in first.parent.iterdir():
        if path.name.startswith(("notes", ".half", "copy of")):
            path.unlink()


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
            assert os.getpriority(os.PRIO_PROCESS, int(thread.name)) <= own
            threads += 1
    assert threads > 10


def test_no_temporary_is_left(engine: Engine, shelf: ShelfFiles, prompt: MakePrompt) -> None:
    # Engines that were ended while they stored leave some.
    left = shelf.temporaries()
    tokens = prompt(600)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    until(lambda: shelf.temporaries() <= left, "temporaries gone")


def test_metrics_of_vllm(engine: Engine, shelf: ShelfFiles, prompt: MakePrompt) -> None:
    tokens = prompt(600)
    engine.generate(tokens)
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    before: dict[str, Any] = engine.metrics()
    assert engine.generate(tokens).shelf_tokens == 512
    after = engine.metrics()
    name = "vllm:external_prefix_cache_hits_total"
    assert after[name] - before[name] == 512


def test_a_prompt_whose_log_probabilities_are_wanted_is_stored_and_not_loaded(
    engine: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    tokens = prompt(600)
    cold = engine.generate(tokens, prompt_logprobs=0)
    shelf.wait_stored(tokens)
    engine.reset_prefix_cache()
    before = engine.counters()
    again = engine.generate(tokens, prompt_logprobs=0)
    assert again.shelf_tokens == 0
    assert len(again.prompt_logprobs) == len(tokens)
    assert_same(again, cold)
    engine.reset_prefix_cache()
    assert engine.generate(tokens).shelf_tokens == 512
    # The second request counts as no hit.
    after = engine.counters()
    assert after["hit_tokens"] - before.get("hit_tokens", 0) == 512
