"""Prompts larger than the memory of stores: chunks that find no room are stored in later steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.vllm.worker.postponed import PostponedStores
from tests.sim.engine import RUNNERS, EngineModel
from tests.sim.engine_sides import limit_stores, store_op
from tests.sim.storage import Fault, FaultyStorage
from tests.support.clocks import Clock
from tests.support.formats import make_format
from tests.support.prompts import make_chunks, prompt
from tests.support.waiting import until

CHUNK, CHUNKS = 8, 24
#: Chunks for which stores have memory.
IN_MEMORY = 4
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
        runner: str = "V2 on a device", *, in_memory: int = IN_MEMORY, **options: Any
    ) -> EngineModel:
        settled = {"blocks": 80, "budget": 8 * CHUNK, "prefix_caching": False, **options}
        engines.append(EngineModel(backend.url, runner=runner, **settled))
        engines[-1].settle()
        limit_stores(engines[-1].worker.side, in_memory)
        return engines[-1]

    yield start
    storage.set()
    for engine in engines:
        engine.close()
    assert "the engine goes on" not in caplog.text


def loaded(start: Callable[..., EngineModel], like: EngineModel, tokens: list[int]) -> int:
    """Tokens that another engine of the same kind loads, of which it compares all bytes."""
    other = start("V1" if like.device is None else "V1 on a device", in_memory=CHUNKS)
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
    # Before any of the chunks in memory has failed.
    assert engine.worker.counted["promises_broken"] == 1
    until(lambda: engine.worker.counted["markers_written"] == 1)
    assert engine.worker.counted["dropped_chunks_staging_full"] == CHUNKS + 1 - IN_MEMORY


def test_postponed_stores_are_taken_in_order_and_all_of_a_request_that_ended() -> None:
    clock = Clock(0.0)
    stores = PostponedStores(10.0, clock)
    chunks = make_chunks(make_format(), 4)
    running, ended = ("running", 0), ("ended", 0)
    for owner in (running, ended):
        for index in (2, 0, 1):
            stores.put(store_op(chunks[index], owner=owner))
    stores.hold([ended])
    clock.now += 3.0
    taken = stores.take([running, ended], 2)
    assert [(op.owner, op.chunk.index, op.age) for op in taken] == [
        *((running, index, 3.0) for index in (0, 1)),
        *((ended, index, 3.0) for index in (0, 1, 2)),
    ]
    assert running in stores and stores.take_released() == {"ended"}
    stores.put(taken[0])
    stores.hold([running])
    clock.now += 9.9
    assert not stores.drop_late() and not stores.take_released()
    clock.now += 0.1
    assert [op.chunk.index for op in stores.drop_late()] == [0, 2]
    assert stores.take_released() == {"running"}
