"""A real engine whose load turns out slow: it is cut, and what has come is kept."""

from __future__ import annotations

from pathlib import Path

from tests.faults.faultfs import mounted
from tests.support.fleet import Ask, Engines, MakePrompt
from tests.support.waiting import until
from tests.vllm.handing_over import Counted
from tests.vllm.shelf_files import CHUNK, ShelfFiles

CHUNKS = 8
#: The chunk that does not come.
MISSING = 3
#: Longer than a test may take.
NEVER = 600.0
OPTIONS = {"admission": "auto", "read_deadline_s": NEVER, "shutdown_drain_s": 0.5}


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
