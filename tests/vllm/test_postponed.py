"""Prompts larger than staging: what finds no room in its step is stored in later ones."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.errors import PermanentStorageError, ReadOnlyStorageError
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
        config = make_config(
            backend.url,
            staging_bytes=staging,
            write_deadline_s=PATIENCE,
            lookup_wait_s=PATIENCE,
            identity_wait_s=PATIENCE,
            **extra,
        )
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
def test_a_prompt_larger_than_staging_is_stored_in_one_pass(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., MiniVllm], runner: str
) -> None:
    engine = start(runner)
    tokens = prompt(CHUNKS * CHUNK + 1)
    engine.add(Request("r", tokens, max_tokens=20))
    while len(engine.states["r"].history) < len(tokens):
        engine.step()
    # Of three steps of 8 chunks 4 are in staging.
    (memory,) = side_of(engine).model.registration.memories.values()
    assert memory.staging.for_stores // 2 == 4
    assert stored(backend) == 0
    storage.set()
    while "r" in engine.states:
        assert side_of(engine).drain(PATIENCE) == 0
        engine.step()
    assert side_of(engine).drain(PATIENCE) == 0
    assert stored(backend) == CHUNKS
    assert count(engine, "dropped_chunks_staging_full") == 0
    assert loaded(start, engine, tokens) == CHUNKS * CHUNK


def test_an_engine_stores_no_faster_than_its_bytes_per_second(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., MiniVllm]
) -> None:
    storage.set()
    engine = start(
        staging=1 << 20, config={"store_bytes_per_s": 1, "io_threads": 2, "shutdown_drain_s": 0.0}
    )
    engine.add(Request("r", prompt(3 * CHUNK + 1), max_tokens=2))
    engine.run()
    until(lambda: count(engine, "stored_chunks") == 1)
    assert side_of(engine).drain(0.0) == 2
    assert stored(backend) == 1


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_is_postponed_at_the_end_of_a_request_is_dropped_and_counted(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., MiniVllm], runner: str
) -> None:
    engine = start(runner)
    tokens = prompt(CHUNKS * CHUNK + 1)
    engine.add(Request("r", tokens, max_tokens=2))
    engine.run()
    # Its blocks are others' now.
    engine.add(Request("other", prompt(CHUNKS * CHUNK + 1, seed=1), max_tokens=1))
    engine.run()
    engine.step()
    assert count(engine, "dropped_chunks_staging_full") == 2 * CHUNKS - 4
    storage.set()
    engine.add(Request("third", prompt(20, seed=2), max_tokens=4))
    engine.run()
    assert side_of(engine).drain(PATIENCE) == 0
    assert loaded(start, engine, tokens) == 4 * CHUNK


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


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_producer_keeps_its_blocks_until_its_chunks_are_gathered(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., MiniVllm], runner: str
) -> None:
    engine = start(runner)
    free = len(engine.free)
    tokens = prompt(CHUNKS * CHUNK + 3)
    engine.add(Request("r", tokens, max_tokens=1, kv_transfer_params=ASKED))
    while engine.states["r"].status != "finished":
        engine.step()
    for _ in range(3):
        engine.step()
        assert len(engine.free) < free
    assert engine.params["r"]["kvshelf_tokens"] == len(tokens)
    storage.set()
    engine.run()
    assert len(engine.free) == free
    assert side_of(engine).drain(PATIENCE) == 0
    assert count(engine, "promises_broken") == 0
    assert loaded(start, engine, tokens) == CHUNKS * CHUNK


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


def test_a_small_prompt_that_is_handed_over_keeps_its_blocks_for_a_step(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., MiniVllm]
) -> None:
    storage.set()
    engine = start(staging=1 << 20)
    engine.add(Request("r", prompt(20), max_tokens=1, kv_transfer_params=ASKED))
    while engine.states["r"].status != "finished":
        engine.step()
    engine.step()
    assert not engine.states


def promises_nothing(engine: MiniVllm) -> bool:
    """Whether a request that asks for a hand-over gets no promise after a further step."""
    engine.step()
    engine.add(Request("other", prompt(20, seed=1), max_tokens=1, kv_transfer_params=ASKED))
    engine.run()
    return engine.params["other"] is None


def test_a_worker_says_that_its_storage_takes_no_objects(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., MiniVllm]
) -> None:
    storage.set()
    refuses = Fault("write", error=lambda: ReadOnlyStorageError(errno.EROFS, "read-only", "x"))
    backend.add(refuses)
    engine = start(staging=1 << 20)
    # Nothing is promised of it, so there is no marker.
    engine.add(Request("r", prompt(20), max_tokens=1))
    engine.run()
    assert side_of(engine).drain(PATIENCE) == 0
    assert promises_nothing(engine)


def test_a_worker_says_that_its_storage_takes_no_markers(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., MiniVllm]
) -> None:
    """No object has failed yet, so nothing else tells it."""
    refused = PermanentStorageError(errno.EACCES, "not allowed", "x")
    backend.add(Fault("write", "*/gave-up/*", error=refused))
    engine = start(config={"handover_wait_s": 0})
    tokens = prompt(CHUNKS * CHUNK + 3)
    engine.add(Request("r", tokens, max_tokens=1, kv_transfer_params=ASKED))
    engine.run()
    promises = side_of(engine).model.promises
    assert promises is not None
    until(lambda: promises.unmarked)
    assert promises_nothing(engine)
