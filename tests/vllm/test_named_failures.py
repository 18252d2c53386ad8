"""Four things that went wrong with LMCache 0.5.6 when it was tried, here on real engines.

It served NaN when bytes of an object were damaged, never repaired a truncated object, served old
KV after the weights at a path had changed, and hung for as long as a read was blocked. The tests
are marked ``named_failure``; that of changed weights is in test_roles.py, with the engine it needs.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.faults.faultfs import mounted
from tests.support.engines import Engine, assert_same, eventually_hits
from tests.support.fleet import Ask, MakePrompt, Reference
from tests.support.waiting import until
from tests.vllm.shelf_files import DAMAGE, ShelfFiles, is_repaired

pytestmark = [pytest.mark.named_failure, pytest.mark.slow]


def fill_with_nan(path: Path) -> None:
    """Make every number of an object NaN, and leave its header as it is."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    start = 8 + length
    data[start:] = b"\xc0\x7f" * ((len(data) - start) // 2)  # bfloat16
    path.write_bytes(data)


def test_damaged_object_bytes_are_never_served(
    engine: Engine, shelf: ShelfFiles, reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(1100)
    engine.generate(tokens)
    chunks = shelf.wait_stored(tokens)
    good = {path: path.read_bytes() for chunk in chunks for path in chunk}
    for path in good:
        fill_with_nan(path)
    before = engine.counters()
    engine.reset_prefix_cache()
    answer = engine.generate(tokens)
    # Not a number would be found at the first token; equal logprobs show that none came in.
    assert_same(answer, reference(tokens))
    assert engine.counters().get("load_failures_bad", 0) > before.get("load_failures_bad", 0)
    assert engine.log_lines("was not loaded")

    # What comes behind a bad chunk is not loaded, and so found bad by later requests only.
    def repaired() -> bool:
        engine.reset_prefix_cache()
        ask(engine, tokens)
        return all(is_repaired(path, content) for path, content in good.items())

    until(repaired, "the repair of all chunks")
    eventually_hits(engine, tokens, reference(tokens), 1024)


def test_a_truncated_object_is_repaired(
    engine: Engine, shelf: ShelfFiles, reference: Reference, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(1100)
    engine.generate(tokens)
    chunks = shelf.wait_stored(tokens)
    good = {path: path.read_bytes() for path in chunks[2]}
    for path in good:
        DAMAGE["truncated"](path)
    engine.reset_prefix_cache()
    ask(engine, tokens, 512)
    until(lambda: all(is_repaired(*item) for item in good.items()), "the repair")
    eventually_hits(engine, tokens, reference(tokens), 1024)


def test_a_blocked_read_does_not_hang_a_request(
    engine: Engine,
    shelf: ShelfFiles,
    reference: Reference,
    ask: Ask,
    prompt: MakePrompt,
    tmp_path: Path,
) -> None:
    tokens, others = prompt(1100), prompt(600)
    for each in (tokens, others):
        engine.generate(each)
    shelf.wait_stored(others)
    blocked = shelf.wait_stored(tokens)[2][0]
    with mounted(tmp_path, path=blocked.parent) as mount:
        mount.add("read", blocked.name, block=True)
        engine.reset_prefix_cache()
        request = engine.submit(tokens)
        mount.met(1)
        # The engine goes on meanwhile, with and without the shelf.
        ask(engine, others)
        # The read is blocked all the time.
        assert_same(request.result(), reference(tokens))
        mount.clear()
        eventually_hits(engine, tokens, reference(tokens), 1024)
