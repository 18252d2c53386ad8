"""Prompts larger than staging: what finds no room in its step is stored in later ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.sim.engine import RUNNERS, EngineModel
from tests.sim.storage import Fault, FaultyStorage
from tests.support.prompts import prompt
from tests.support.waiting import until

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
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Callable[..., EngineModel]]:
    engines: list[EngineModel] = []

    def start(
        runner: str = "V2 on a device", *, staging: int = BUFFERS * 8192, **options: Any
    ) -> EngineModel:
        settled = {"blocks": 80, "budget": 8 * CHUNK, "prefix_caching": False, **options}
        engines.append(EngineModel(backend.url, runner=runner, staging_bytes=staging, **settled))
        engines[-1].step()
        return engines[-1]

    yield start
    storage.set()
    for engine in engines:
        engine.close()
    assert "the engine goes on" not in caplog.text


def stored(backend: FaultyStorage) -> int:
    """Chunks on the shelf."""
    return sum(info.name.endswith(".safetensors") for info in backend.list()) // 2


def loaded(start: Callable[..., EngineModel], like: EngineModel, tokens: list[int]) -> int:
    """Tokens that another engine of the same kind loads, of which it compares all bytes."""
    other = start("V1" if like.device is None else "V1 on a device", staging=1 << 20)
    return other.run(tokens)[0]


@pytest.mark.parametrize("runner", RUNNERS)
def test_blocks_of_a_preempted_request_are_not_stored_as_its_own(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., EngineModel], runner: str
) -> None:
    engine = start(runner)
    tokens = prompt(CHUNKS * CHUNK + 1)
    engine.add("r", tokens, 20)
    while engine.computed("r") < len(tokens):
        engine.step()
    engine.step()
    engine.preempt("r")
    # Another one gets its blocks, and is part of the same steps.
    other = prompt(CHUNKS * CHUNK + 1, seed=1)
    waiting, preempted = engine.scheduler.waiting, engine.scheduler.requests["r"]
    waiting.remove_request(preempted)
    engine.add("other", other, 20)
    engine.step()
    storage.set()
    engine.drain()
    waiting.add_request(preempted)
    while engine.names:
        engine.step()
        engine.drain()
    for each in (tokens, other):
        assert loaded(start, engine, each) == CHUNKS * CHUNK


def test_a_producer_keeps_its_blocks_for_a_bounded_time(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., EngineModel]
) -> None:
    engine = start(handover_wait_s=0)
    free = engine.free_blocks
    tokens = prompt(CHUNKS * CHUNK + 3)
    engine.add("r", tokens, 1, transfer=ASKED)
    engine.finish()
    assert engine.free_blocks == free
    # Before any of the chunks in staging has failed.
    assert engine.worker.counted["promises_broken"] == 1
    until(lambda: engine.worker.counted["markers_written"] == 1)
    assert engine.worker.counted["dropped_chunks_staging_full"] == CHUNKS + 1 - 4
