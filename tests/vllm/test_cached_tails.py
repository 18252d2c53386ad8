"""Tails as a cache: prompts are loaded to their end, and shorter ones than a chunk are stored."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.backends.posix import PosixBackend
from kvshelf.logs import RateLimitedLog
from kvshelf.vllm import handshake
from tests.support.prompts import prompt
from tests.vllm.hybrid_specs import full, models
from tests.vllm.scheduled import DAMAGED, ScheduledEngine, Start, World, make_namespace

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
