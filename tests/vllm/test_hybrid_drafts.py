"""Windows and an EAGLE drafter on a real engine: drafts are accepted behind a hit as without one.

The drafter guesses most of what its model says: see ``leader`` in
``tests/support/make_hybrid_model.py``.
"""

from __future__ import annotations

from tests.support.engines import NEAR_TIE, Answer, Engine, Engines, MakePrompt, assert_same
from tests.support.make_hybrid_model import RECIPES, make_hybrid_model
from tests.support.waiting import until
from tests.vllm.eagle_model import make_eagle3
from tests.vllm.hybrid_files import HybridFiles


def ask(engine: Engine, tokens: list[int]) -> tuple[Answer, float]:
    """Return an answer without vLLM's own cache, and which part of the drafts was accepted."""
    engine.reset_prefix_cache()
    before = engine.metrics()
    answer = engine.generate(tokens, max_tokens=256)
    after = engine.metrics()
    drafted, accepted = (
        after[name] - before[name]
        for name in (
            "vllm:spec_decode_num_draft_tokens_total",
            "vllm:spec_decode_num_accepted_tokens_total",
        )
    )
    return answer, accepted / drafted


def test_drafts_behind_a_hit_are_accepted_as_without_one(
    engines: Engines, prompt: MakePrompt
) -> None:
    """The drafter of a gpt-oss model has a layer that shares a group with the model's."""
    model = make_hybrid_model(engines.root / "models" / "gpt-oss", "gpt-oss")
    leader = RECIPES["gpt-oss"].leader
    assert leader is not None
    drafter = make_eagle3(engines.root / "models" / "eagle3", model, leader)
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    shelf, tokens = HybridFiles(engines.root / "shelf of drafts"), prompt(600)
    with engines.start(
        "drafting", shelf.root, model=model, dtype="float32", speculative_config=speculative
    ) as engine:
        cold, usual = ask(engine, tokens)
        # How many are accepted differs by the processor.
        assert usual > 0.5
        shelf.wait_hit(tokens, 512)
        assert shelf.kinds == {"full", "window"}

        def drafts_are_stored() -> bool:
            # Counters come with the output of a step.
            engine.generate([2, 3, 4], max_tokens=1)
            return engine.counters().get("draft_stored_chunks", 0) >= 2

        until(drafts_are_stored, "two chunks of the drafter on the shelf")
        loaded, accepted = ask(engine, tokens)
        assert (loaded.shelf_tokens, engine.counters()["draft_loaded_chunks"]) == (512, 2)
        assert_same(loaded, cold, NEAR_TIE)
        assert accepted >= 0.95 * usual
        # Without the drafter's KV there is the same hit, and fewer drafts are accepted.
        shelf.remove_drafts()
        engine.reset_connector()
        without, accepted = ask(engine, tokens)
        assert without.shelf_tokens == 512
        assert_same(without, cold, NEAR_TIE)
        assert accepted < 0.95 * usual
