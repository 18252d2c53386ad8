"""Errors inside the connector: vLLM goes on, no request waits for ever, and no block is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.errors import TransientStorageError
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers import tiered
from kvshelf.transfer.stores import Stores
from kvshelf.transfer.transfers import Transfers
from kvshelf.vllm import connector
from kvshelf.vllm.scheduler import SchedulerSide
from kvshelf.vllm.scheduler import stores as planning
from kvshelf.vllm.scheduler.hits import Hits
from kvshelf.vllm.scheduler.read_ahead import ReadAhead
from kvshelf.vllm.scheduler.steps import Steps
from kvshelf.vllm.worker.loads import WorkerLoads
from kvshelf.vllm.worker.parts import Part
from kvshelf.vllm.worker.registration import Registration
from kvshelf.vllm.worker.side import WorkerSide
from kvshelf.vllm.worker.stores import WorkerStores
from tests.support.prompts import prompt
from tests.support.storages import Fault, FaultyBackend, posix
from tests.support.waiting import PATIENCE
from tests.vllm.replay import RUNNERS, MiniVllm, Request, make_config

#: Methods that run inside a step, and whether their work is done although they raise.
METHODS: dict[type, dict[str, bool]] = {
    SchedulerSide: {
        "matched_tokens": False,
        "allocated": False,
        "step_metadata": False,
        "worker_output": False,
        "loads_done": True,
    },
    Hits: {"tokens": False},
    planning.Stores: {"plan": False},
    ReadAhead: {"loading": True, "note_in_engine_cache": True, "plan": False},
    Registration: {"take_report": False},
    Stores: {"store": False},
    Transfers: {"load": False, "poll": False, "take_published": False},
    Part: {"open": True},
    WorkerSide: {"worker_metadata": False},
    WorkerStores: {"save": True},
    WorkerLoads: {
        "finished": False,
        "_items": False,
        "_note": False,
        "_note_bad": True,
        "_note_nothing": False,
    },
}


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyBackend:
    """The storage of all engines of a test."""
    backend = FaultyBackend(posix(tmp_path / "shelf"))
    monkeypatch.setattr(tiered, "open_shelf", lambda url, **_: Shelf(backend))
    connector._logs.clear()
    return backend


@pytest.fixture
def engine(backend: FaultyBackend) -> Iterator[MiniVllm]:
    """An engine with 10 prompts on its shelf and nothing in its own cache."""
    config = make_config(backend.url, lookup_wait_s=PATIENCE, identity_wait_s=PATIENCE)
    engine = MiniVllm(config, blocks=48)
    yield engine
    backend.heal()
    engine.close()


def fill(engine: MiniVllm) -> list[list[int]]:
    prompts = [prompt(40, seed, shared=16) for seed in range(10)]
    for i, tokens in enumerate(prompts):
        engine.add(Request(f"cold {i}", tokens))
        engine.run()
    side = engine.worker._worker
    assert side is not None
    assert side.drain(PATIENCE) == 0
    engine.drop_prefix_cache()
    return prompts


def disturb(
    patch: pytest.MonkeyPatch, engine: MiniVllm, kind: type, name: str, chance: Callable[[], bool]
) -> None:
    """Have a method raise at times."""
    method = getattr(kind, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not chance():
            return method(*args, **kwargs)
        if METHODS[kind][name]:
            method(*args, **kwargs)
        raise RuntimeError(f"{name} failed")

    patch.setattr(kind, name, call)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in METHODS.items() for name in names]
)
def test_an_error_in_a_step_ends_no_request_and_holds_none(
    engine: MiniVllm,
    backend: FaultyBackend,
    kind: type,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = fill(engine)
    random = Random(name)
    disturb(monkeypatch, engine, kind, name, lambda: random.random() < 0.4)
    # So that there are failures to report.
    backend.add(Fault("read", pattern="*-3-*", error=TransientStorageError("torn"), times=6))
    for turn in range(2):
        for i, tokens in enumerate(prompts):
            engine.add(Request(f"{turn} {i}", tokens))
            if i % 5 == 4:
                engine.step()
                engine.abort(f"{turn} {i}")
        engine.run()
        engine.drop_prefix_cache()


@pytest.mark.parametrize("runner", RUNNERS)
def test_errors_everywhere(
    backend: FaultyBackend, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(backend.url, lookup_wait_s=0.2, identity_wait_s=PATIENCE)
    engine = MiniVllm(config, blocks=48, runner=runner)
    try:
        prompts = fill(engine)
        random = Random(runner)
        with monkeypatch.context() as patch:
            for kind, names in METHODS.items():
                for name in names:
                    disturb(patch, engine, kind, name, lambda: random.random() < 0.05)
            for i, tokens in enumerate(prompts):
                engine.add(Request(f"warm {i}", tokens))
                engine.step()
                if i % 5 == 4:
                    engine.abort(f"warm {i - 2}")
            engine.run()
    finally:
        engine.close()


def test_a_load_whose_plan_fails_is_reported_and_computed(
    engine: MiniVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = fill(engine)
    disturb(monkeypatch, engine, ReadAhead, "loading", lambda: True)
    state = engine.states[engine.add(Request("r", prompts[0])).request_id]
    engine.run()
    assert state.loads == 1
    assert state.load_failed


def test_a_step_whose_plan_fails_brings_its_loads_and_stores_nothing(
    engine: MiniVllm, backend: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = fill(engine)
    stored = len(list(backend.list()))
    state = engine.states[engine.add(Request("warm", prompts[0])).request_id]
    engine.add(Request("cold", prompt(40, 99)))
    monkeypatch.setattr(Steps, "begin", _fail)
    engine.run()
    assert state.loads == 1
    assert not state.load_failed
    side = engine.worker._worker
    assert side is not None
    assert side.drain(PATIENCE) == 0
    assert len(list(backend.list())) == stored


def _fail(*_: object) -> float:
    raise RuntimeError("no step")


def test_what_was_finished_before_an_error_is_reported_after_it(
    engine: MiniVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = fill(engine)
    side = engine.worker._worker
    assert side is not None
    add, failed = side.counters.add, []

    def fail_once(name: str, amount: float = 1) -> None:
        if name == "loaded_tokens" and not failed:
            failed.append(name)
            raise RuntimeError("one of several")
        add(name, amount)

    monkeypatch.setattr(side.counters, "add", fail_once)
    states = {
        name: engine.states[engine.add(Request(name, prompts[i])).request_id]
        for i, name in enumerate("abc")
    }
    engine.run()
    # One had to be computed, the others were loaded.
    assert sum(state.load_failed for state in states.values()) == len(failed) == 1
    assert all(state.loads == 1 for state in states.values())
