"""Hybrid engines: vLLM's own scheduler and cache manager drive the connector's scheduler side."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.format.kinds import FULL, STATE, WINDOW, kind_key
from tests.server.node import LocalServer
from tests.sim import engine_sides as sides
from tests.support.prompts import prompt
from tests.support.variants import variants
from tests.vllm.hybrid_specs import full, models
from tests.vllm.scheduled import DAMAGED, ScheduledEngine, Start, World, patch_namespaces
from tests.vllm.test_questions import Asked

MODELS = models()
#: So many that a few requests of 200 tokens fit.
FEW_BLOCKS = {
    "Mamba2": 8,
    "Jamba": 40,
    "Nemotron-H": 40,
    "DeepSeek V4": 45,
    "Gemma 3": 70,
    "Qwen3-Next": 40,
    "LFM2": 60,
    "two windows": 40,
    "Llama 4": 65,
    "GLM-5-next": 45,
    "Qwen4-exp": 40,
    "ring and windows": 70,
}
#: Models of which each kind of KV has one, for tests that take long.
FEW = {"Mamba2", "Jamba", "DeepSeek V4", "Gemma 3"}
WITH_STATES = ["Mamba2", "Jamba", "Nemotron-H", "Qwen3-Next", "LFM2", "Qwen4-exp"]
#: vLLM has no drafts beside chunked local attention.
WITH_DRAFTS = [model for model in MODELS if model != "Llama 4"]
#: Groups of a drafter with KV, in blocks of other sizes than some of the model's.
DRAFTERS = {
    "Gemma 3": full(16),
    "DeepSeek V4": full(16),
    "Jamba": full(16),
    "Nemotron-H": full(16),
    "Qwen3-Next": full(16),
    "LFM2": full(8),
}
#: Of the prompts' common part only full KV tells where it ends. vLLM's own hits have all windows
#: that ours need, but where local attention begins anew.
FULL_AND_OTHERS = [one for one in MODELS if one not in ("Mamba2", "two windows", "Llama 4")]
WITH_WINDOWS = ["DeepSeek V4", "Gemma 3", "two windows", "Llama 4", "ring and windows"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_what_one_engine_stores_another_loads(start: Start, model: str, asynchronous: bool) -> None:
    first = start(model, asynchronous=asynchronous)
    tokens = prompt(203)
    assert first.run(tokens) == [0]
    # The last chunk boundary before the prompt's end.
    second = start(model, asynchronous=asynchronous)
    assert second.run(tokens) == [192]
    # Its own cache has it now.
    assert second.run(tokens) == [0]


@pytest.mark.parametrize("model", WITH_STATES)
def test_which_states_are_stored(start: Start, model: str) -> None:
    def states(length: int, **options: Any) -> list[int]:
        engine = start(model, budget=32, **options)
        engine.run(prompt(length))
        return [index for kind, index in engine.stored if kind == STATE]

    # After every third chunk, and the last one before the prompt's end.
    assert states(331, interval=3) == [2, 5, 8, 9]
    # What is stored already counts.
    assert states(449, interval=3) == [12, 13]


def test_which_windows_are_stored(start: Start, world: World) -> None:
    """A hit needs the windows of the last three chunks."""

    def engine(**options: Any) -> ScheduledEngine:
        return start("Gemma 3", chunk_size=8, interval=10, **options)

    def windows(engine: ScheduledEngine) -> list[int]:
        """The chunks of which an engine has stored windows, which it forgets."""
        stored, engine.stored = engine.stored, []
        return sorted(index for kind, index in stored if kind == WINDOW)

    first, tokens = engine(), prompt(203)
    first.run(tokens)
    # Behind every tenth chunk, and the last one before the prompt's end.
    assert windows(first) == [7, 8, 9, 17, 18, 19, 22, 23, 24]
    # One token must be left to compute; and the tenth chunk is none of this prompt.
    first.run(prompt(72, seed=7))
    assert windows(first) == [5, 6, 7]
    # Where the full chunks on the shelf end; the second prompt computes them once.
    second = engine()
    assert second.run([*tokens[:125], *prompt(45, seed=1)]) == [80]
    assert windows(second) == [12, 13, 14, 17, 18, 19, 20]
    assert engine().run([*tokens[:125], *prompt(20, seed=2)]) == [120]
    for chunk in first.chunks_of(tokens):
        for kind in (FULL, WINDOW):
            if kind_key(chunk.key, kind) in world.contents:
                world.remove(first.fmt, chunk, kind)
    # Where vLLM has seen prompts part.
    assert first.run([*tokens[:125], *prompt(60, seed=3)]) == [0]
    assert windows(first) == [7, 8, 9, 12, 13, 14, 17, 18, 19, 20, 21, 22]
    # Where its own hit ended: it still has all of these windows.
    first.run([*tokens, *prompt(60, seed=4)])
    assert windows(first) == [22, 23, 24, 27, 28, 29, 30, 31]
    # Not where vLLM has freed the first of them, as of the end before a hit of 104 tokens.
    larger = start("Gemma 3", chunk_size=16, retention=None)
    larger.run(tokens)
    assert windows(larger) == [8, 9, 10, 11]
    larger.run([*tokens[:104], *prompt(90, seed=6)])
    assert windows(larger) == [8, 9, 10, 11]
    # All of an answer.
    answering = engine(save_decode=True)
    answering.run(prompt(100, seed=5), answer=42)
    assert windows(answering) == [*range(7, 17)]


@pytest.mark.parametrize("model", FULL_AND_OTHERS)
def test_all_that_three_prompts_share_is_loaded(start: Start, model: str) -> None:
    tokens = prompt(300)
    first = start(model)
    first.run(tokens)
    # What it shares with the first one is in the engine's own cache, full KV at least.
    first.run([*tokens[:163], *prompt(50, seed=1)])
    assert start(model).run([*tokens[:163], *prompt(70, seed=2)]) == [160]


@pytest.mark.parametrize("model", variants(WITH_WINDOWS, FEW))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_hits_are_the_longest_that_are_allowed(model: str, data: st.DataObject) -> None:
    """All windows that are stored are of use for hits of some prompt."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch_namespaces(patch)
        world = World(Path(folder) / "shelf")
        size = data.draw(st.sampled_from([32, 64] if model == "DeepSeek V4" else [8, 16, 32]))
        options = {"chunk_size": size, "interval": data.draw(st.sampled_from([3, 7]), "interval")}
        retention = data.draw(st.sampled_from([0, None]), "retention")
        budget = data.draw(st.sampled_from([40, 64, 200]), "budget")
        writers = [
            ScheduledEngine(world, MODELS[model], retention=retention, budget=budget, **options)
            for _ in range(2)
        ]
        reader = ScheduledEngine(world, MODELS[model], read_only=True, **options)
        rule = reader.groups.hit_rule(size)
        stored, useful = set(), set()
        try:
            for _ in range(data.draw(st.integers(2, 7), "prompts")):
                length = data.draw(st.integers(50, 250), "length")
                shared = data.draw(st.sampled_from([0, 45, 50]), "shared")
                tokens = prompt(length, data.draw(st.integers(0, 3), "seed"), shared)
                data.draw(st.sampled_from(writers), "engine").run(tokens)
                chunks = reader.chunks_of(tokens)
                there = {
                    kind: {one.index for one in chunks if kind_key(one.key, kind) in world.contents}
                    for kind in rule.kinds
                }
                ends = range(1, len(chunks) + 1)
                hit = rule.longest(ends[: (length - 1) // size], there)
                assert reader.run(tokens) == [hit * size]
                reader.reset(connector=False)
                stored |= {chunks[n].key for n in there[WINDOW]}
                for needed in (rule.needs(end)[WINDOW] for end in ends):
                    if there[WINDOW].issuperset(needed):
                        useful |= {chunks[n].key for n in needed}
            assert stored == useful
        finally:
            for engine in (*writers, reader):
                engine.close()


@pytest.mark.parametrize(
    ("model", "blocks"),
    # In the last three the prompt needs more than half of the cache.
    [*((model, 400) for model in MODELS), ("Gemma 3", 80), ("Jamba", 50), ("LFM2", 90)],
)
def test_prompt_whose_load_failed_is_computed(start: Start, model: str, blocks: int) -> None:
    """vLLM keeps blocks free for a request whose load failed, beside those of its next load."""
    start(model, interval=1, budget=32).run(prompt(331))
    second = start(model, blocks=blocks)
    second.failing_loads = 1
    assert second.run(prompt(331)) == [0]
    assert second.failing_loads == 0
    assert second.run(prompt(40, seed=5)) == [0]


@pytest.mark.parametrize("model", MODELS)
def test_answer_with_a_chunk_that_is_known_to_be_gone_is_looked_up_again(
    start: Start, world: World, model: str
) -> None:
    tokens = prompt(203)
    writer = start(model, interval=1, budget=32)
    writer.run(tokens)
    engine = start(model)
    engine.add("r", tokens)
    engine.wait_for_lookup("r")
    gone = writer.chunks_of(tokens)[5]
    keys = [kind_key(gone.key, kind) for kind in engine.groups.kinds]
    for kind in engine.groups.kinds:
        world.remove(writer.fmt, gone, kind)
    sides.tell(engine.connector._scheduler, failures=[(key, False) for key in keys[-1:]])
    asked = Asked(engine)
    engine.step()
    # No step was given to other requests meanwhile.
    assert asked.take() == {"r": 160}
    engine.finish()
    assert [op.end for op in engine.loads] == [160]


@pytest.mark.parametrize(
    ("model", "drafts", "blocks", "loaded"),
    [
        # The fewest in which vLLM computes the prompt, and the fewest in which it takes the hit.
        ("plain", 16, 44, 46),
        ("gpt-oss", 16, 50, 53),
        ("Gemma 3", 16, 60, 62),
        ("GLM-5-next", 3, 23, 24),
        ("DeepSeek V4", 16, 25, 25),
        ("Jamba", 16, 77, 77),
        ("plain", 0, 42, 42),
    ],
)
def test_a_hit_is_refused_exactly_where_vllm_would_never_take_it(
    start: Start, model: str, drafts: int, blocks: int, loaded: int
) -> None:
    """Beside a load vLLM keeps blocks free for drafts, and waits for them."""
    tokens = prompt(327)
    start(model, drafts=drafts, interval=1, budget=32).run(tokens)
    for count in range(blocks, loaded + 2):
        engine = start(model, drafts=drafts, blocks=count, budget=32, read_only=True)
        engine.add("r", tokens)
        engine.wait_for_lookup("r")
        for _ in range(60):
            engine.step()
        assert not engine.scheduler.has_requests()
        assert bool(engine.loads) is (count >= loaded)
        assert engine.counted["refused_hits"] == (count < loaded)


@pytest.mark.parametrize("model", MODELS)
def test_waiting_requests_are_read_ahead(start: Start, model: str) -> None:
    start(model).run(prompt(203))
    engine = start(model, seqs=1, memory=1 << 20)
    engine.add("first", prompt(400, seed=1), answer=30)
    for _ in range(3):
        engine.step()
    engine.add("second", prompt(203))
    engine.wait_for_lookup("second")
    engine.finish()
    named = [
        (op.kind, chunk.index)
        for meta in engine.metas
        for op in meta.prefetches
        if op.request_id == "second"
        for chunk in op.chunks
    ]
    kinds = engine.groups.kinds
    assert [index for kind, index in named if kind == "full"] == (
        [*range(6)] if "full" in kinds else []
    )
    assert [index for kind, index in named if kind == WINDOW] == ([5] if WINDOW in kinds else [])
    assert [index for kind, index in named if kind == STATE] == ([5] if STATE in kinds else [])


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_stored_on_demand(start: Start, model: str, asynchronous: bool) -> None:
    options = {"save_decode": True, "interval": 1, "asynchronous": asynchronous}
    first = start(model, **options)
    first.run(prompt(100), answer=140)
    tokens = first.texts["0"].tokens
    # vLLM frees blocks of windows before a chunk is complete that is longer than they are.
    passed = model in ("DeepSeek V4", "Gemma 3", "two windows", "ring and windows")
    assert start(model).run([*tokens, *prompt(40, seed=1)]) == [96 if passed else 224]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", variants(MODELS, FEW))
def test_nothing_is_stored_that_depends_on_earlier_weights(
    start: Start, world: World, model: str, asynchronous: bool
) -> None:
    engine = start(model, interval=1, budget=32, asynchronous=asynchronous)
    engine.run(prompt(150))
    for number in range(3):
        # The last one begins with blocks of the first prompt, which vLLM's own cache has.
        engine.add(f"r{number}", prompt(150 + 20 * number, seed=number % 2), answer=40)
    for _ in range(6):
        engine.step()
    engine.change_weights()
    engine.finish()
    engine.settle()
    # What an object holds is compared with its weights when it is stored.
    engine.run(prompt(180, seed=5))
    assert any(weights for _, weights in map(world.texts.get, world.of(engine.groups.kinds[0])))
    engine.reset()
    engine.settle()
    assert engine.run(prompt(180, seed=5)) == [160]


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.real)], ids=["shelf", "node server"]
)
def behind(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Iterator[Any]:
    """Options of an engine, with and without a node server."""
    if not request.param:
        yield {}
        return
    with LocalServer(tmp_path / "run", world.root) as node:
        yield {"server": node.url}


@pytest.mark.parametrize("connector", [False, True], ids=["vllm's cache", "all caches"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["plain", "Gemma 3"])
def test_nothing_of_earlier_weights_is_loaded_after_a_reset(
    behind: dict[str, Any],
    start: Start,
    model: str,
    ranks: int,
    asynchronous: bool,
    connector: bool,
) -> None:
    """Where the reset leaves the connector out, only the workers know at first."""
    engine = start(model, ranks=ranks, asynchronous=asynchronous, **behind)
    tokens = prompt(203)
    engine.run(tokens)
    engine.reset(connector=False)
    assert engine.run(tokens) == [192]
    engine.loads.clear()
    engine.add("found before", tokens)
    engine.wait_for_lookup("found before")
    engine.change_weights()
    engine.reset(connector=connector)
    engine.add("after", tokens)
    # What each step reads is compared with the weights.
    engine.finish()
    assert not engine.loads
    engine.settle()
    engine.reset(connector=connector)
    engine.settle()
    engine.run(tokens)
    engine.reset(connector=False)
    assert engine.run(tokens) == [192]


@pytest.mark.parametrize("model", variants(MODELS, FEW))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_anything_that_may_happen(model: str, data: st.DataObject) -> None:
    """What each step reads and stores is compared to the byte by the engine itself."""

    def draw(strategy: Any, label: str) -> Any:
        return data.draw(strategy, label)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch_namespaces(patch)
        world = World(Path(folder) / "shelf")
        drafts = draw(st.sampled_from([0, 0, 1, 3] if model in WITH_DRAFTS else [0]), "drafts")
        # States of drafts take blocks.
        few = FEW_BLOCKS[model] + 5 * drafts + (25 if drafts else 0)
        has_kv = drafts and draw(st.booleans(), "drafter with KV")
        options = {
            "drafts": drafts,
            "drafter": DRAFTERS.get(model) if has_kv else None,
            "retention": draw(st.sampled_from([0, None]), "retention"),
            # With few blocks and larger steps no request would fit.
            **draw(
                st.sampled_from(
                    [
                        {"budget": 32, "blocks": few},
                        {"budget": 48, "blocks": few},
                        {"budget": 200, "blocks": 300},
                        {"budget": 64, "blocks": 300, "asynchronous": True},
                    ]
                ),
                "steps",
            ),
            "seqs": draw(st.sampled_from([1, 4]), "seqs"),
            "seed": draw(st.integers(0, 9), "seed"),
            "save_decode": draw(st.booleans(), "save_decode"),
            "interval": draw(st.sampled_from([1, 2, 8]), "interval"),
            "memory": draw(st.sampled_from([None, 1 << 20]), "memory"),
            "chunk_size": draw(st.sampled_from([32, 64]), "chunk_size"),
        }
        engine = ScheduledEngine(world, MODELS[model], **options)
        try:
            for number in range(draw(st.integers(3, 12), "actions")):
                action = draw(st.sampled_from(_ACTIONS), "action")
                if action == "add":
                    tokens = prompt(
                        draw(st.integers(30, 200), "length"),
                        seed=draw(st.integers(0, 2), "prompt"),
                        shared=draw(st.sampled_from([0, 30]), "shared"),
                    )
                    engine.add(f"r{number}", tokens, draw(st.integers(1, 60), "answer"))
                elif action == "steps":
                    for _ in range(draw(st.integers(1, 30), "count")):
                        engine.step()
                elif action == "abort" and engine.texts:
                    name = draw(st.sampled_from(sorted(engine.texts)), "request")
                    if name in engine.scheduler.requests:
                        engine.abort(name)
                elif action == "weights":
                    engine.change_weights()
                elif action == "reset":
                    engine.reset(connector=draw(st.booleans(), "and the connector"))
                elif action == "lose":
                    which, damaged = draw(st.integers(0, 99), "object"), draw(st.booleans(), "bad")
                    for key in sorted(world.contents)[which : which + 1]:
                        # The object is still there, without its content or with a damaged one.
                        if damaged:
                            world.contents[key] = DAMAGED
                        else:
                            del world.contents[key]
                elif action == "fail":
                    engine.failing_loads = draw(st.integers(1, 4), "failing loads")
                elif action == "restart":
                    engine.close()
                    engine = ScheduledEngine(world, MODELS[model], **options)
            engine.finish()
        finally:
            engine.close()


_ACTIONS = [
    *["add", "add", "add", "steps", "steps"],
    *["abort", "reset", "weights", "lose", "fail", "restart"],
]


def test_what_a_drafter_lacks_is_remembered_by_the_blocks_that_vllm_hashes(start: Start) -> None:
    # vLLM hashes pieces of 8 tokens, and its hits end at multiples of 16.
    options: dict[str, Any] = {"drafts": 2, "drafter": full(16), "retention": None}
    first, second = (start("Gemma 3", **options) for _ in range(2))
    beginning, end = prompt(64, seed=1), prompt(100, seed=2)
    first.run([*beginning, 1])
    start("Gemma 3").run([*beginning, *end])
    longer = [*beginning, *end, *prompt(200, seed=3)]
    assert second.run(longer) == [160]
    assert second.loaded_drafts == [0, 1]
    # This prompt parts from the other one before what the drafter lacks.
    second.run([*beginning[:48], *prompt(100, seed=4)])
    assert second.stored_drafts == [1, 2, 3]
    # Behind that nothing is stored, whatever was computed meanwhile.
    assert second.run([*longer[:350], *prompt(60, seed=5)]) == [0]
    assert second.stored_drafts == [1, 2, 3]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", WITH_STATES)
def test_states_of_answers_are_stored_where_vllm_names_them(
    start: Start, model: str, asynchronous: bool
) -> None:
    engine = start(
        model,
        drafts=2,
        asynchronous=asynchronous,
        retention=None,
        save_decode=True,
        interval=1,
    )
    tokens = prompt(203)
    engine.run(tokens, answer=200)
    # What is stored is compared with the accepted tokens. What is late is that of an answer.
    late = {op.chunk.index for meta in engine.metas for op in meta.stores if op.late}
    assert late == {index for kind, index in engine.stored if kind == STATE and index >= 6}
    assert len(late) > 1
    [text] = engine.texts.values()
    follow_up = [*text.tokens, *prompt(20, seed=2)]
    plain = start(model)
    assert plain.run(follow_up) == [(max(late) + 1) * 32]
