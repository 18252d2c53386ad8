"""Real engines whose loads turn out slow: they are cut, or others wait for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.faultfs import mounted
from tests.support.fleet import Ask, Engines, MakePrompt
from tests.support.waiting import until
from tests.vllm.handing_over import Counted
from tests.vllm.shelf_files import CHUNK, ShelfFiles

pytestmark = pytest.mark.slow

CHUNKS = 8
#: The chunk that does not come.
MISSING = 3
#: Longer than a test may take.
NEVER = 600.0
OPTIONS = {"admission": "auto", "deadlines": {"read": NEVER}, "drain_seconds": 0.5}


def test_a_load_that_is_cut_keeps_what_has_come(
    engines: Engines, tmp_path: Path, ask: Ask, prompt: MakePrompt
) -> None:
    with (
        mounted(tmp_path) as mount,
        # A prompt takes several steps, which follow each other without a pause.
        engines.on_shelf(
            "cuts", mount.path / "kv", OPTIONS, core=0, max_num_batched_tokens=64, max_num_seqs=4
        ) as engine,
    ):
        shelf = ShelfFiles(mount.source / "kv")
        tokens, others = prompt(CHUNKS * CHUNK + 40), [prompt(6 * CHUNK + 40) for _ in range(3)]
        ask(engine, tokens, 0)
        missing = shelf.wait_stored(tokens)[MISSING]
        for other in others:
            ask(engine, other, 0)
            shelf.wait_stored(other)

        def known() -> bool:
            for other in others:
                engine.reset_prefix_cache()
                ask(engine, other)
            return engine.counters().get("measured_load_seconds", 0) > 0

        until(known, "loads whose times are known")
        for path in missing:
            mount.add("read", f"*{path.name}", block=True)
        all_of_them = Counted(engine)

        def cut() -> bool:
            # On a busy machine the time may be over before the first chunks have come.
            counted = Counted(engine)
            engine.reset_prefix_cache()
            ask(engine, tokens, tolerance=0.0)
            counted.wait(cut_loads=1)
            return counted("loaded_tokens") == MISSING * CHUNK

        until(cut, "a load that is cut behind its first chunks")
        # The rest was computed, and no object counts as bad or missing.
        all_of_them.wait(load_failures_missing=0, load_failures_bad=0, load_failures_timeout=0)
        mount.clear()
        engine.reset_prefix_cache()
        ask(engine, tokens, CHUNKS * CHUNK)


def test_of_requests_that_come_together_one_loads_what_they_have_in_common(
    engines: Engines, tmp_path: Path, prompt: MakePrompt
) -> None:
    options = {"deadlines": {"read": NEVER}, "drain_seconds": 0.5}
    with (
        mounted(tmp_path) as mount,
        engines.on_shelf("together", mount.path / "kv", options, core=0) as engine,
    ):
        common = prompt(CHUNKS * CHUNK + 40)
        for chunk in ShelfFiles(mount.source / "kv").fill(engine, common):
            for path in chunk:
                mount.add("read", f"*{path.name}", block=True)
        counted = Counted(engine)
        requests = [engine.submit(prompt(20, after=common), max_tokens=2) for _ in range(8)]
        # vLLM asks for all of these before it computes the next ones.
        for _ in range(3):
            engine.generate(prompt(5))
        mount.clear()
        answers = [request.result() for request in requests]
        assert all(answer.cached_tokens >= CHUNKS * CHUNK for answer in answers)
        counted.wait(loaded_tokens=CHUNKS * CHUNK)
