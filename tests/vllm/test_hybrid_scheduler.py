"""Hybrid engines: vLLM's own scheduler and cache manager drive the connector's scheduler side."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.errors import TransientStorageError
from kvshelf.format.kinds import DRAFT, FULL, STATE, WINDOW, kind_key
from tests.server.node import LocalServer
from tests.sim import engine_sides as sides
from tests.sim.engine import EngineModel, Start
from tests.sim.engine_caches import PUBLISHED_MODELS
from tests.sim.storage import Fault, FaultyStorage
from tests.support.prompts import prompt
from tests.support.variants import variants
from tests.support.waiting import until
from tests.vllm.test_handover_scheduler import HYBRID as MODELS
from tests.vllm.test_handover_scheduler import with_drafter
from tests.vllm.test_questions import Asked

#: Models of which each kind of KV has one, for tests that take long.
FEW = {"Mamba2", "Jamba", "DeepSeek V4", "Gemma 3"}
WITH_STATES = ["Mamba2", "Jamba", "Nemotron-H", "Qwen3-Next", "LFM2", "Qwen4-exp"]
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


def test_which_windows_are_stored(start: Start) -> None:
    """A hit needs the windows of the last three chunks."""

    def engine(**options: Any) -> EngineModel:
        return start("Gemma 3", chunk_size=8, interval=10, **options)

    def windows(engine: EngineModel) -> list[int]:
        """The chunks of which an engine has stored windows, which it forgets."""
        stored = engine.stored
        engine.metas.clear()
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
            if first.has_stored(chunk, kind):
                first.take(chunk, kind)
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
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_hits_are_the_longest_that_are_allowed(model: str, data: st.DataObject) -> None:
    """All windows that are stored are of use for hits of some prompt."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        size = data.draw(st.sampled_from([32, 64] if model == "DeepSeek V4" else [8, 16, 32]))
        options = {"chunk_size": size, "interval": data.draw(st.sampled_from([3, 7]), "interval")}
        retention = data.draw(st.sampled_from([0, None]), "retention")
        budget = data.draw(st.sampled_from([40, 64, 200]), "budget")
        *writers, reader = (
            stack.enter_context(
                EngineModel(
                    folder, PUBLISHED_MODELS[model], form="NHD", blocks=400, **options, **role
                )
            )
            for role in (*[{"retention": retention, "budget": budget}] * 2, {"read_only": True})
        )
        for engine in (*writers, reader):
            engine.settle()
        rule = reader.side.engine.groups.hit_rule(size)
        stored, useful = set(), set()
        for _ in range(data.draw(st.integers(2, 7), "prompts")):
            length = data.draw(st.integers(50, 250), "length")
            shared = data.draw(st.sampled_from([0, 45, 50]), "shared")
            tokens = prompt(length, data.draw(st.integers(0, 3), "seed"), shared)
            data.draw(st.sampled_from(writers), "engine").run(tokens)
            chunks = reader.chunks_of(tokens)
            there = {
                kind: {one.index for one in chunks if reader.has_stored(one, kind)}
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


@pytest.mark.parametrize(
    ("model", "blocks"),
    # In the last three the prompt needs more than half of the cache.
    [*((model, 400) for model in MODELS), ("Gemma 3", 80), ("Jamba", 50), ("LFM2", 90)],
)
def test_prompt_whose_load_failed_is_computed(
    start: Start, backend: FaultyStorage, model: str, blocks: int
) -> None:
    """vLLM keeps blocks free for a request whose load failed, beside those of its next load."""
    start(model, interval=1, budget=32).run(prompt(331))
    second = start(model, blocks=blocks)
    # The last chunk of ten: there would be a shorter hit.
    backend.add(Fault("read", "*-9-*", error=TransientStorageError("torn")))
    second.add("r", prompt(331))
    until(lambda: second.step() and bool(second.failed))
    backend.heal()
    second.finish()
    assert second.computed("r") == 331 + 1
    assert second.run(prompt(40, seed=5)) == [0]


@pytest.mark.parametrize("model", MODELS)
def test_answer_with_a_chunk_that_is_known_to_be_gone_is_looked_up_again(
    start: Start, model: str
) -> None:
    tokens = prompt(203)
    writer = start(model, interval=1, budget=32)
    writer.run(tokens)
    engine = start(model)
    engine.add("r", tokens)
    engine.wait_for_lookup("r")
    gone = writer.chunks_of(tokens)[5]
    kinds = engine.side.engine.groups.kinds
    for kind in kinds:
        writer.take(gone, kind)
    sides.tell(engine.side, failures=[(kind_key(gone.key, kinds[-1]), False)])
    asked = Asked(engine)
    engine.step()
    # No step was given to other requests meanwhile.
    assert asked.take() == {"r": 160}
    engine.finish()
    assert [op.end for op in engine.loads.values()] == [160]


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
def test_hit_is_refused_exactly_where_vllm_would_never_take_it(
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
    engine = start(model, requests=1, memory=1 << 20)
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
    kinds = engine.side.engine.groups.kinds
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
    [text] = first.texts.values()
    tokens = text.tokens
    # vLLM frees blocks of windows before a chunk is complete that is longer than they are.
    passed = model in ("DeepSeek V4", "Gemma 3", "two windows", "ring and windows")
    assert start(model).run([*tokens, *prompt(40, seed=1)]) == [96 if passed else 224]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", variants(MODELS, FEW))
def test_nothing_is_stored_that_depends_on_earlier_weights(
    start: Start, model: str, asynchronous: bool
) -> None:
    engine = start(model, interval=1, budget=32, asynchronous=asynchronous)
    engine.run(prompt(150))
    for number in range(3):
        # The last one begins with blocks of the first prompt, which vLLM's own cache has.
        engine.add(f"r{number}", prompt(150 + 20 * number, seed=number % 2), answer=40)
    for _ in range(6):
        engine.step()
    engine.load_weights(1)
    engine.finish()
    engine.settle()
    engine.run(prompt(180, seed=5))
    engine.reset()
    engine.settle()
    # What is loaded is compared with what these weights compute.
    assert engine.run(prompt(180, seed=5)) == [160]


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.real)], ids=["shelf", "node server"]
)
def behind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Options of an engine, with and without a node server."""
    if not request.param:
        yield {}
        return
    with LocalServer(tmp_path / "run", tmp_path / "shelf") as node:
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
    engine = start(model, tensor_parallel=ranks, asynchronous=asynchronous, **behind)
    tokens = prompt(203)
    engine.run(tokens)
    engine.reset(connector=False)
    assert engine.run(tokens) == [192]
    own = {op.request_id for op in engine.loads.values()}
    engine.add("found before", tokens)
    engine.wait_for_lookup("found before")
    engine.load_weights(1)
    engine.reset(connector=connector, running=True)
    engine.add("after", tokens)
    # What each step reads is compared with the weights.
    engine.finish()
    assert engine.failed.issuperset({op.request_id for op in engine.loads.values()} - own)
    engine.settle()
    engine.reset(connector=connector)
    engine.settle()
    engine.run(tokens)
    engine.reset(connector=False)
    assert engine.run(tokens) == [192]


def test_what_a_drafter_lacks_is_remembered_by_the_blocks_that_vllm_hashes(start: Start) -> None:
    # vLLM hashes pieces of 8 tokens, and its hits end at multiples of 16.
    options = with_drafter("Gemma 3", 2)
    first, second = (start(retention=None, **options) for _ in range(2))
    beginning, end = prompt(64, seed=1), prompt(100, seed=2)
    first.run([*beginning, 1])
    start("Gemma 3").run([*beginning, *end])
    longer = [*beginning, *end, *prompt(200, seed=3)]
    assert second.run(longer) == [160]
    assert list(second.loaded_drafts.values()) == [64]
    # This prompt parts from the other one before what the drafter lacks.
    second.run([*beginning[:48], *prompt(100, seed=4)])
    assert [index for kind, index in second.stored if kind == DRAFT] == [1, 2, 3]
    # Behind that nothing is stored, whatever was computed meanwhile.
    assert second.run([*longer[:350], *prompt(60, seed=5)]) == [0]
    assert [index for kind, index in second.stored if kind == DRAFT] == [1, 2, 3]


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
    engine.drain()
    assert late == {index for kind, index in engine.stored if kind == STATE and index >= 6}
    assert len(late) > 1
    [text] = engine.texts.values()
    follow_up = [*text.tokens, *prompt(20, seed=2)]
    plain = start(model)
    assert plain.run(follow_up) == [(max(late) + 1) * 32]
