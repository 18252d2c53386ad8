"""Tails as a cache: prompts are loaded to their end, and shorter ones than a chunk are stored."""

from __future__ import annotations

import functools
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.backends.posix import PosixBackend
from kvshelf.format.kinds import FULL
from kvshelf.logs import RateLimitedLog
from kvshelf.vllm import handshake
from tests.support.prompts import prompt
from tests.vllm.hybrid_specs import full, models
from tests.vllm.scheduled import DAMAGED, ScheduledEngine, Start, World, make_namespace
from tests.vllm.test_handover_scheduler import ASKED, loaded, prefill

MODELS = {"plain": [full(8)], **models()}
CHUNK, BLOCK = 32, 8
LENGTHS = [16, 31, 33, 48, 63, 203]


@pytest.fixture
def start(begin: Start) -> Start:
    """Start an engine that caches tails."""
    return functools.partial(begin, cache_tails=True)


@pytest.fixture(params=["low latency", "high latency"])
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have lookups probe everything, or search in rounds and remember."""
    if request.param == "high latency":
        own = PosixBackend.properties
        assert isinstance(own, property)
        assert own.fget is not None
        read = own.fget
        slow = property(lambda self: replace(read(self), probe_cost=0.02, concurrency=8))
        monkeypatch.setattr(PosixBackend, "properties", slow)


def tails(engine: ScheduledEngine) -> list[int]:
    """The lengths of the tails that an engine has planned to store."""
    return [op.chunk.tokens for meta in engine.metas for op in meta.stores if op.chunk.tail]


@pytest.mark.usefixtures("storage")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_is_loaded_to_its_end_in_another_engine(
    start: Start, length: int, asynchronous: bool
) -> None:
    tokens = prompt(length)
    first = start(asynchronous=asynchronous)
    assert first.run(tokens) == [0]
    assert tails(first) == ([length % CHUNK] if length % CHUNK >= 16 else [])
    second = start(asynchronous=asynchronous)
    second.add("r", tokens, answer=5)
    second.finish()
    if length % CHUNK >= 16:
        assert loaded(second, "r") == length
        # The last token once more, and the answer.
        assert second.computed["r"] == 5
    else:
        assert loaded(second, "r") == length - length % CHUNK
    assert tails(second) == []


@pytest.mark.usefixtures("storage")
def test_only_a_prompt_with_equal_tokens_to_its_end_has_the_tail(start: Start) -> None:
    tokens = prompt(203)
    start().run(tokens, tokens[:24])
    for other, expected in (
        (tokens[:202], 192),
        ([*tokens, 7], 192),
        ([*tokens[:202], 7], 192),
        (tokens[:23], 0),
        ([*tokens[:23], 7], 0),
        ([7, *tokens[1:24]], 0),
        (tokens[:40], 32),
        (tokens[:24], 24),
    ):
        assert start().run(other) == [expected]


def test_a_turn_of_a_conversation_loads_whole_chunks_and_the_same_turn_all(start: Start) -> None:
    first = start(save_decode=True)
    question = prompt(80)
    first.add("r", question, answer=40)
    first.finish()
    turn = [*first.texts["r"].tokens, *prompt(30, 1)]
    # The last token of the answer has no KV.
    assert start().run(question) == [80]
    assert start(save_decode=True).run(turn) == [96]
    assert start().run(turn) == [len(turn)]


def test_an_engine_without_the_option_neither_stores_nor_finds_tails(
    begin: Start, start: Start
) -> None:
    tokens = prompt(203)
    plain = begin()
    plain.run(tokens)
    assert tails(plain) == []
    start().run(tokens)
    assert begin().run(tokens) == [192]


def test_what_the_engine_has_itself_is_not_loaded_for_the_rest_of_a_block(start: Start) -> None:
    engine = start()
    tokens = prompt(62)
    engine.run(tokens)
    assert engine.run(tokens) == [0]
    # Only its first blocks are there: the rest is worth a load.
    engine.reset()
    engine.run(tokens[:33])
    assert engine.run(tokens) == [62 - 32]


def test_a_tail_that_cannot_be_loaded_is_computed_and_stored_again(
    start: Start, world: World
) -> None:
    tokens = prompt(62)
    first = start()
    first.run(tokens)
    tail = first.tail_of(tokens)
    assert tail is not None
    right = world.contents[tail.key]
    world.contents[tail.key] = DAMAGED
    second = start()
    second.run(tokens)
    assert second.loads == []
    assert world.contents[tail.key] == right
    assert start().run(tokens) == [62]


def test_a_tail_that_is_gone_is_a_miss_and_is_stored_again(start: Start, world: World) -> None:
    tokens = prompt(62)
    first = start()
    first.run(tokens)
    tail = first.tail_of(tokens)
    assert tail is not None
    world.remove(first.fmt, tail, FULL)
    second = start()
    assert second.run(tokens) == [32]
    assert tails(second) == [30]
    assert start().run(tokens) == [62]


def test_a_request_that_is_preempted_is_loaded_to_the_end_of_its_prompt(start: Start) -> None:
    prompts = [prompt(55, seed) for seed in range(4)]
    start().run(*prompts)
    engine = start(blocks=30, prefix_caching=False)
    for round_ in itertools.count():
        # Where loads take long, the requests may run one after the other.
        for number, tokens in enumerate(prompts):
            engine.add(f"{round_}.{number}", tokens, answer=30)
        engine.finish()
        if engine.preempted:
            break
    ends = {op.end for op in engine.loads}
    assert 55 in ends
    # Behind the prompt there may be whole chunks, but no tails.
    assert all(end == 55 or end % BLOCK == 0 for end in ends)


def test_with_a_hand_over_the_tail_is_promised_whether_or_not_it_is_there(
    begin: Start, start: Start
) -> None:
    tokens = prompt(203)
    start().run(tokens)
    producer = start()
    handover = prefill(producer, tokens)
    assert (handover.tokens, handover.tail) == (203, 11)
    tokens = prompt(218, 1)
    start().run(tokens)
    producer = start()
    handover = prefill(producer, tokens)
    assert (handover.tokens, handover.tail) == (218, 26)
    consumer = start()
    consumer.add("r", tokens, answer=1, transfer=handover.params())
    consumer.finish()
    assert loaded(consumer, "r") == 218
    # To engines without the option as well.
    plain = begin()
    plain.add("r", tokens, answer=1, transfer=handover.params())
    plain.finish()
    assert loaded(plain, "r") == 218


def test_a_request_that_hands_over_stores_its_tail_once(start: Start) -> None:
    engine = start()
    engine.add("r", prompt(62), answer=9, transfer=ASKED)
    engine.finish()
    assert tails(engine) == [30]


@pytest.mark.parametrize("model", ["Gemma 3", "Mamba2"])
def test_an_engine_without_tails_says_so(
    start: Start, caplog: pytest.LogCaptureFixture, model: str
) -> None:
    engine = start(model)
    engine.run(prompt(203))
    assert tails(engine) == []
    assert caplog.text.count("cache_tails has no effect") == 1


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_conversations_on_several_engines_read_and_store_what_is_right(data: st.DataObject) -> None:
    """What each step reads and stores is compared to the byte by the engines themselves."""

    def draw(strategy: Any, label: str) -> Any:
        return data.draw(strategy, label)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "build_namespace", make_namespace)
        # An error that is contained would only be logged.
        patch.setattr(RateLimitedLog, "error", lambda *args, **_: pytest.fail(str(args[1:])))
        world = World(Path(folder) / "shelf")
        asynchronous = draw(st.booleans(), "asynchronous")
        engines = [
            ScheduledEngine(
                world,
                MODELS["plain"],
                chunk_size=CHUNK,
                cache_tails=number > 0,
                save_decode=number > 1,
                asynchronous=asynchronous,
                blocks=draw(st.sampled_from([40, 60, 400]), "blocks"),
                budget=draw(st.sampled_from([16, 40, 64]), "budget"),
                seed=number,
            )
            for number in range(3)
        ]
        prompts = [prompt(draw(st.integers(1, 90), "length"), number) for number in range(3)]
        try:
            for number in range(draw(st.integers(5, 30), "requests")):
                engine = engines[draw(st.integers(0, 2), "engine")]
                tokens = prompts[draw(st.integers(0, len(prompts) - 1), "prompt")]
                engine.add(f"{number}", tokens, answer=draw(st.integers(1, 40), "answer"))
                # The next turn, perhaps with nothing new.
                said = [*engine.texts[f"{number}"].tokens, *prompt(number % 20, number)]
                prompts.append(said[:200])
                damaged = draw(st.integers(0, 300), "damaged")
                for key in sorted(world.contents)[damaged : damaged + 1]:
                    world.contents[key] = DAMAGED
                engine.failing_loads += draw(st.integers(0, 5), "failing") == 0
                for _ in range(draw(st.integers(0, 12), "steps")):
                    engine.step()
            for engine in engines:
                engine.finish()
        finally:
            for engine in engines:
                engine.close()
