"""Reports of other caches from autumn 2026, each tried here: what was done, and what is loaded.

vLLM's own scheduler drives the connector. The engines compare every byte that a step reads or
stores with what a model computes.
"""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("vllm")

from kvshelf.format.keys import KeyChain, MultimodalItem
from tests.sim import engine_sides as sides
from tests.sim.engine import Start
from tests.sim.engine_caches import model_groups
from tests.support.prompts import prompt
from tests.vllm.test_bare_handovers import BARE
from tests.vllm.test_handover_scheduler import ASKED

CHUNK = 256
MODELS = {
    "plain": model_groups(("full", 16)),
    "blocks of 32": model_groups(("full", 32)),
    "blocks of 128": model_groups(("full", 128)),
    "windows": model_groups(("full", 16), ("window", 16, 512)),
    "states": model_groups(("full", 128), ("GDN_ATTN", 128)),
}


@pytest.mark.slow
@pytest.mark.parametrize("multiple", [*range(1, 9), 32])
@pytest.mark.parametrize("model", MODELS)
def test_prompts_of_exact_multiples_of_the_chunk(start: Start, model: str, multiple: int) -> None:
    """LMCache#5151, #3322: a full hit, and another context; or an assert in vLLM's scheduler."""
    options = {"chunk_size": CHUNK, "budget": CHUNK, "blocks": 1200, "interval": 1}
    options |= {"groups": MODELS[model]}
    for length in (multiple * CHUNK + offset for offset in (-1, 0, 1)):
        tokens = prompt(length, seed=length)
        first = start(**options)
        assert first.run(tokens) == [0]
        # In memory, and after a restart.
        first.run(tokens)
        most = (length - 1) // CHUNK * CHUNK
        if not first.side.engine.groups.hybrid:
            most = min(length // CHUNK * CHUNK, length - 1)
            most -= most % first.side.engine.groups.alignment
        assert start(**options).run(tokens) == [most]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", ["plain", "windows"])
def test_two_hundred_aborts_with_a_load_and_a_store_pending(
    start: Start, model: str, asynchronous: bool
) -> None:
    """vLLM#46240, #43226, #48821, #56089: an assert ends the engine; or blocks are never freed."""
    draw = random.Random(model)
    options = {"asynchronous": asynchronous, "interval": 1, "handover_wait_s": 1}
    # What is not computed is loaded.
    engine = start(groups=MODELS[model], prefix_caching=False, **options)
    free = engine.free_blocks
    prompts = [prompt(draw.randrange(33, 200), seed=n, shared=33) for n in range(20)]
    aborts = number = 0
    while aborts < 200:
        running = list(engine.scheduler.requests)
        if len(running) < 6:
            number += 1
            transfer = draw.choice([ASKED, ASKED, BARE, None])
            tokens = draw.choice(prompts)
            engine.add(f"r{number}", tokens, answer=draw.choice([1, 40]), transfer=transfer)
        elif draw.random() < 0.5:
            engine.abort(draw.choice(running))
            aborts += 1
        for _ in range(draw.randrange(3)):
            engine.step()
    engine.finish()
    assert engine.loads and engine.stored
    assert engine.free_blocks == free
    assert not sides.remembers(engine.side)


def test_prefix_whose_beginning_was_deleted_while_an_engine_has_it_in_memory(
    start: Start,
) -> None:
    """SGLang#26886, #39444: it is never written again, and nothing behind it is a hit."""
    engine, tokens = start(), prompt(203)
    engine.run(tokens)
    for chunk in engine.chunks_of(tokens)[:2]:
        engine.take(chunk)
    # As long as an engine believes what it has seen.
    time.sleep(61)
    longer = [*tokens, *prompt(100, seed=1)]
    engine.run(longer)
    assert start().run(longer) == [288]


@pytest.mark.slow
def test_images_whose_short_hashes_are_equal() -> None:
    """LMCache#4086: of 70,000 images two have one hash of 16 bits, and one gets the other's KV."""
    keys = set()
    for number in range(70_000):
        item = MultimodalItem(f"{number:064x}", 0, 8)
        [chunk] = KeyChain(b"n" * 32, 8, items=[item]).extend([7] * 8)
        keys.add(chunk.key)
    assert len(keys) == 70_000
