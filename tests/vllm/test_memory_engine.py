"""Real engines with a memory tier: hits come from there, and the shelf decides what is a hit."""

from __future__ import annotations

from tests.support.fleet import Ask, Engines, MakePrompt, Reference
from tests.support.waiting import until
from tests.vllm.shelf_files import ShelfFiles

HIT = 768
#: The worker in the process of the scheduler, as on one GPU.
IN_PROCESS = {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}


def test_a_second_request_is_loaded_from_memory_while_the_shelf_has_its_objects(
    engines: Engines, ask: Ask, prompt: MakePrompt
) -> None:
    tokens = prompt(1000)
    shelf = ShelfFiles(engines.places.root / "shelf behind memory")
    with engines.on_shelf(
        "with memory", shelf.root, {"memory_tier": {"max_bytes": "64MiB"}}
    ) as engine:
        assert engine.generate(tokens).shelf_tokens == 0
        objects = [path for chunk in shelf.wait_stored(tokens) for path in chunk]

        # A file is there a moment before its object is in memory, and counts travel with steps.
        def kept() -> bool:
            engine.generate([2, 3, 4], max_tokens=1)
            return engine.counters().get("memory_tier_stored_objects", 0) >= len(objects)

        until(kept, "the objects in memory")
        # They are found by their sizes, and nobody could load them from the shelf.
        for path in objects:
            path.write_bytes(bytes(path.stat().st_size))
        engine.reset_prefix_cache()
        ask(engine, tokens, HIT)
        counts = engine.counters()
        assert counts["memory_tier_loaded_objects"] == len(objects)
        assert not counts.get("load_failures_bad", 0)

        # What is not on the shelf is no hit, though the memory of a worker has it.
        shelf.delete()
        engine.reset_prefix_cache()
        ask(engine, tokens, 0)


def test_in_one_process_hits_in_memory_are_loaded_within_the_step(
    engines: Engines, ask: Ask, reference: Reference, prompt: MakePrompt
) -> None:
    prompts = [prompt(1000) for _ in range(4)]
    shelf = ShelfFiles(engines.places.root / "shelf of one process")
    options = {"memory_tier": {"max_bytes": "64MiB"}}
    with engines.on_shelf("one process", shelf.root, options, **IN_PROCESS) as engine:
        for tokens in prompts:
            ask(engine, tokens, 0)
        count = sum(len(chunk) for tokens in prompts for chunk in shelf.wait_stored(tokens))

        def kept() -> bool:
            engine.generate([2, 3, 4], max_tokens=1)
            return engine.counters().get("memory_tier_stored_objects", 0) >= count

        until(kept, "the objects in memory")
        engine.reset_prefix_cache()
        for tokens in prompts:
            ask(engine, tokens, HIT)
        assert engine.counters()["sync_loads"] == len(prompts)
        # Several at once, beside one that is computed.
        engine.reset_prefix_cache()
        fresh = prompt(1000)
        running = [engine.submit(tokens) for tokens in (fresh, *prompts)]
        answers = [one.result() for one in running]
        for tokens, answer in zip((fresh, *prompts), answers, strict=True):
            assert answer.tokens == reference(tokens).tokens
        assert engine.counters()["sync_loads"] == 2 * len(prompts)
        assert engine.metrics()["vllm:kvshelf_memory_tier_pinned_bytes"] == 0
    with engines.on_shelf("one process, no memory", shelf.root, {}, **IN_PROCESS) as engine:
        ask(engine, prompts[0], HIT)
        assert not engine.counters().get("sync_loads", 0)
