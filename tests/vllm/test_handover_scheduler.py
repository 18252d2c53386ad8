"""Hand-overs: vLLM's own scheduler drives the scheduler side of the connector of each engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hybrid_specs import full, models
from parts import until
from replay import prompt
from scheduled import ScheduledEngine, Text, World, make_namespace

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.vllm import handshake
from kvshelf.vllm.handover import Handover, read_handover

HYBRID = models()
MODELS = {"plain": [full(8)], **HYBRID}
WITH_WINDOWS = ["DeepSeek V4", "Gemma 3", "two windows", "Llama 4"]
CHUNK = 32
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "shelf")


@pytest.fixture
def start(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(handshake, "build_namespace", make_namespace)
    engines: list[ScheduledEngine] = []

    def start(model: str = "plain", **options: Any) -> ScheduledEngine:
        options.setdefault("chunk_size", CHUNK)
        engines.append(ScheduledEngine(world, MODELS[model], **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    # Of an error that was contained there would be such a line.
    assert not [line for line in caplog.messages if "the engine goes on" in line]


def counts(engine: ScheduledEngine) -> dict[str, float]:
    """What was counted of hand-overs."""
    begin = "handovers_"
    return {name.removeprefix(begin): n for name, n in engine.counted.items() if begin in name}


class Clock:
    """Seconds that only a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Promised:
    """A hand-over to a consumer whose producer is the test.

    Parameters
    ----------
    engine : ScheduledEngine
        The consumer.
    tokens : list of int
        The prompt.
    number : int
        Different for each attempt.
    """

    def __init__(self, engine: ScheduledEngine, tokens: list[int], number: int = 1) -> None:
        self.engine, self.tokens = engine, tokens
        self.text = Text(tokens, 1)
        chunks, tail = engine.chunks_of(tokens), engine.tail_of(tokens)
        #: The chunks and the tail.
        self.pieces: list[Chunk] = chunks if tail is None else [*chunks, tail]
        self.handover = Handover(
            engine.fmt.namespace.digest,
            len(tokens),
            self.pieces[-1].key,
            0 if tail is None else tail.tokens,
            f"{number:032x}",
        )

    def params(self, **changed: Any) -> dict[str, Any]:
        """What a client sends, as JSON has it."""
        params: dict[str, Any] = json.loads(json.dumps(self.handover.params() | changed))
        return params

    def publish(self, first: int, end: int | None = None) -> None:
        """Put pieces on the shelf, as a producer does."""
        for chunk in self.pieces[first:end]:
            start = chunk.index * CHUNK
            content = self.text.kv(0, start, start + chunk.tokens, 0)
            self.engine.world.put(self.engine.fmt, chunk, FULL, content)

    def give_up(self) -> None:
        """Leave the producer's marker."""
        folder = self.engine.fmt.namespace.folder
        name = f"{folder}/.kvshelf/gave-up/{self.handover.attempt}"
        self.engine.world.backend.write(name, [b""])


def waits(engine: ScheduledEngine, name: str) -> bool:
    """Whether a request waits for its hand-over, and has nothing of the engine meanwhile."""
    state = engine.connector._scheduler._requests.get(name)
    if state is None or state.awaited is None or state.awaited.outcome is not None:
        return False
    assert not any(engine.scheduler.kv_cache_manager.get_block_ids(name))
    return True


def step_until(engine: ScheduledEngine, condition: Callable[[], bool]) -> None:
    """Step until something is so that other threads work on."""

    def stepped() -> bool:
        engine.step()
        return condition()

    until(stepped)


def loaded(engine: ScheduledEngine, name: str) -> int:
    """How many tokens a request got from the shelf."""
    return sum(op.end - op.start for op in engine.loads if op.request_id == name)


def prefill(engine: ScheduledEngine, tokens: list[int], name: str = "prefill") -> Handover:
    """Prefill a prompt for another engine; return what is promised."""
    engine.add(name, tokens, answer=1, transfer=ASKED)
    engine.finish()
    handover = read_handover(engine.params[name])
    assert handover is not None
    assert handover.params() == engine.params[name]
    return handover


# ------------------------------------------------------------------------------- the producer


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 64, 203])
def test_a_whole_prompt_is_promised_and_stored(
    start: Callable[..., ScheduledEngine], world: World, length: int, asynchronous: bool
) -> None:
    engine = start(asynchronous=asynchronous)
    tokens = prompt(length)
    handover = prefill(engine, tokens)
    chunks, tail = engine.chunks_of(tokens), engine.tail_of(tokens)
    last = tail or chunks[-1]
    assert handover.namespace == engine.fmt.namespace.digest
    assert (handover.tokens, handover.tail) == (length, length % CHUNK)
    assert handover.key == last.key
    assert all(chunk.key in world.contents for chunk in [*chunks, last])
    stores = [op for meta in engine.metas for op in meta.stores]
    assert {op.attempt for op in stores} == {handover.attempt}
    assert counts(engine) == {"promised": 1}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}])
def test_nothing_is_answered_to_those_who_ask_for_nothing(
    start: Callable[..., ScheduledEngine], params: object
) -> None:
    engine = start()
    engine.add("r", prompt(203), transfer=params)
    engine.finish()
    assert engine.params["r"] is None
    stores = [op for meta in engine.metas for op in meta.stores]
    assert len(stores) == 6
    assert not any(op.attempt or op.chunk.tail for op in stores)


def test_each_attempt_has_an_id_of_its_own(start: Callable[..., ScheduledEngine]) -> None:
    engine = start()
    first, second = prefill(engine, prompt(203)), prefill(engine, prompt(203), "again")
    assert first.attempt != second.attempt
    assert first.key == second.key


def test_what_others_have_stored_is_promised_as_well(
    start: Callable[..., ScheduledEngine], world: World
) -> None:
    tokens = prompt(203)
    start().run(tokens)
    engine = start()
    handover = prefill(engine, tokens)
    assert handover.tokens == 203
    # Only the tail was missing.
    assert [op.chunk.tail for meta in engine.metas for op in meta.stores] == [True]


def test_what_is_not_stored_is_not_promised(start: Callable[..., ScheduledEngine]) -> None:
    engine = start(read_only=True)
    engine.add("r", prompt(203), answer=1, transfer=ASKED)
    engine.finish()
    assert engine.params["r"] is None


def test_a_prompt_that_is_aborted_is_not_promised(start: Callable[..., ScheduledEngine]) -> None:
    engine = start(budget=32)
    engine.add("r", prompt(203), answer=1, transfer=ASKED)
    while not any(meta.stores for meta in engine.metas):
        engine.step()
    engine.abort("r")
    engine.finish()
    assert counts(engine) == {}


def test_after_an_error_nothing_is_promised(
    start: Callable[..., ScheduledEngine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start(budget=64)
    side = engine.connector._scheduler
    engine.add("r", prompt(203), answer=1, transfer=ASKED)
    engine.wait_for_lookup("r")

    def fail(*_: object) -> None:
        raise RuntimeError("planning failed")

    with monkeypatch.context() as patch:
        patch.setattr(side, "_plan_request", fail)
        engine.step()
    engine.finish()
    assert "planning failed" in caplog.text
    assert engine.params["r"] is None


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("model", HYBRID)
def test_hybrid_models_hand_over_at_the_last_boundary_before_the_end(
    start: Callable[..., ScheduledEngine], world: World, model: str, asynchronous: bool
) -> None:
    boundaries = [(203, 192), (33, 32)]
    if model in WITH_WINDOWS:
        # No step ends within the last chunk, so there is no state.
        boundaries.append((192, 160))
    for length, expected in boundaries:
        engine = start(model, asynchronous=asynchronous)
        tokens = prompt(length, seed=length)
        handover = prefill(engine, tokens)
        assert (handover.tokens, handover.tail) == (expected, 0)
        chunks = engine.chunks_of(tokens)[: expected // CHUNK]
        assert handover.key == chunks[-1].key
        # An ordinary lookup finds as much, and no more.
        assert start(model).run(tokens) == [expected]


@pytest.mark.parametrize("model", HYBRID)
def test_a_prompt_without_a_boundary_before_its_end_is_not_promised(
    start: Callable[..., ScheduledEngine], model: str
) -> None:
    engine = start(model)
    engine.add("r", prompt(32), answer=1, transfer=ASKED)
    engine.finish()
    assert engine.params["r"] is None


def test_requests_that_go_on_promise_their_prompt_only(
    start: Callable[..., ScheduledEngine],
) -> None:
    engine = start(save_decode=True)
    engine.add("r", prompt(203), answer=90, transfer=ASKED)
    engine.finish()
    handover = read_handover(engine.params["r"])
    assert handover is not None
    assert (handover.tokens, handover.tail) == (203, 203 % CHUNK)


def test_a_promise_outlives_a_preemption(start: Callable[..., ScheduledEngine]) -> None:
    engine = start(blocks=60, budget=64)
    for number in range(4):
        engine.add(f"r{number}", prompt(90 + number, seed=number), answer=90, transfer=ASKED)
    engine.finish()
    assert engine.preempted
    for number in range(4):
        handover = read_handover(engine.params[f"r{number}"])
        assert handover is not None
        assert handover.tokens == 90 + number


# ------------------------------------------------------------------------------- the consumer


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 64, 203])
def test_all_tokens_are_loaded_and_one_is_computed(
    start: Callable[..., ScheduledEngine], length: int, asynchronous: bool
) -> None:
    tokens = prompt(length)
    handover = prefill(start(asynchronous=asynchronous), tokens)
    engine = start(asynchronous=asynchronous)
    engine.add("r", tokens, answer=1, transfer=handover.params())
    engine.finish()
    assert loaded(engine, "r") == length
    assert engine.computed["r"] == 1
    assert counts(engine) == {"complete": 1}
    # None of it is stored again.
    assert not any(meta.stores for meta in engine.metas)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", [20, 64, 203])
def test_a_consumer_that_comes_first_waits(
    start: Callable[..., ScheduledEngine], length: int, asynchronous: bool
) -> None:
    engine = start(asynchronous=asynchronous, lookup_wait_s=0)
    tokens = prompt(length)
    promised = Promised(engine, tokens)
    engine.add("r", tokens, answer=1, transfer=promised.params())
    for _ in range(5):
        engine.step()
    assert waits(engine, "r")
    # All but the last piece.
    promised.publish(0, -1)
    awaited = engine.connector._scheduler._requests["r"].awaited
    step_until(engine, lambda: awaited.wait is not None)
    step_until(engine, lambda: awaited.full_chunks == (length - 1) // CHUNK)
    assert waits(engine, "r")
    promised.publish(-1)
    engine.finish()
    assert loaded(engine, "r") == length
    assert engine.computed["r"] == 1
    assert counts(engine) == {"complete": 1}
