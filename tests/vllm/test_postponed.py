"""Prompts larger than staging: what finds no room in its step is stored in later ones."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.sim.storage import Fault, FaultyStorage
from tests.support.prompts import prompt
from tests.support.waiting import PATIENCE, until
from tests.vllm.replay import RUNNERS, MiniVllm, Request, make_config, side_of

CHUNK, CHUNKS = 8, 24
#: Buffers that hold 4 chunks of 2 objects beside the part of loads.
BUFFERS = 10
ASKED = {"do_remote_decode": True}


@pytest.fixture
def storage(backend: FaultyStorage) -> Iterator[threading.Event]:
    """Objects are written only once it is set."""
    is_open = threading.Event()
    backend.add(Fault("write", "*.safetensors", wait=is_open))
    yield is_open
    is_open.set()


@pytest.fixture
def start(
    backend: FaultyStorage,
    storage: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Callable[..., MiniVllm]]:
    engines: list[MiniVllm] = []

    def start(
        runner: str = "V2 on a device", *, staging: int = BUFFERS * 8192, **options: Any
    ) -> MiniVllm:
        extra = options.pop("config", {})
        config = make_config(backend.url, staging_bytes=staging, **extra)
        given = {"blocks": 80, "budget": 8 * CHUNK, "prefix_caching": False, **options}
        engines.append(MiniVllm(config, runner=runner, **given))
        engines[-1].counted = counted = Counter()
        counters = side_of(engines[-1]).counters
        add = counters.add

        def note(name: str, amount: float = 1) -> None:
            counted[name] += amount
            add(name, amount)

        monkeypatch.setattr(counters, "add", note)
        engines[-1].step()
        return engines[-1]

    yield start
    storage.set()
    for engine in engines:
        engine.close()
    assert "the engine goes on" not in caplog.text


def count(engine: MiniVllm, name: str) -> float:
    """What the worker has counted, also what vLLM has taken since."""
    counted: Counter[str] = engine.counted  # type: ignore[attr-defined]
    return counted[name]


def stored(backend: FaultyStorage) -> int:
    """Chunks on the shelf."""
    return sum(info.name.endswith(".safetensors") for info in backend.list()) // 2


def loaded(start: Callable[..., MiniVllm], like: MiniVllm, tokens: list[int]) -> int:
    """Tokens that another engine of the same kind loads, of which it compares all bytes."""
    other = start("V1" if like.device is None else "V1 on a device", staging=1 << 20)
    request = other.add(Request("again", tokens))
    state = other.states[request.request_id]
    other.run()
    return state.loaded


@pytest.mark.parametrize("runner", RUNNERS)
def test_blocks_of_a_preempted_request_are_not_stored_as_its_own(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., MiniVllm], runner: str
) -> None:
    engine = start(runner)
    tokens = prompt(CHUNKS * CHUNK + 1)
    engine.add(Request("r", tokens, max_tokens=20))
    while len(engine.states["r"].history) < len(tokens):
        engine.step()
    engine.step()
    engine.preempt("r")
    # Another one gets its blocks, and is part of the same steps.
    other = prompt(CHUNKS * CHUNK + 1, seed=1)
    engine.waiting.remove("r")
    engine.add(Request("other", other, max_tokens=20))
    engine.step()
    storage.set()
    assert side_of(engine).drain(PATIENCE) == 0
    engine.waiting.append("r")
    while engine.states:
        engine.step()
        assert side_of(engine).drain(PATIENCE) == 0
    for each in (tokens, other):
        assert loaded(start, engine, each) == CHUNKS * CHUNK


def test_a_producer_keeps_its_blocks_for_a_bounded_time(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., MiniVllm]
) -> None:
    engine = start(config={"handover_wait_s": 0})
    free = len(engine.free)
    tokens = prompt(CHUNKS * CHUNK + 3)
    engine.add(Request("r", tokens, max_tokens=1, kv_transfer_params=ASKED))
    engine.run()
    assert len(engine.free) == free
    # Before any of the chunks in staging has failed.
    assert count(engine, "promises_broken") == 1
    until(lambda: count(engine, "markers_written") == 1)
    assert count(engine, "dropped_chunks_staging_full") == CHUNKS + 1 - 4
