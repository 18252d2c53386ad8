"""Errors inside the connector: vLLM goes on, no request waits for ever, and no block is wrong.

A conversation is replayed again and again, each time with one error: in one method of one part, in
one step. After it all requests have ended, all blocks are free, neither side repeats anything, and
what was promised to another engine is on the shelf, or marked as broken.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")


from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import KeyChain
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers import runtime
from kvshelf.vllm import connector
from kvshelf.vllm.messages import MOST_TRIES, Inbox
from kvshelf.vllm.metadata import StepMetadata
from kvshelf.vllm.scheduler import SchedulerEngine, SchedulerSide
from kvshelf.vllm.scheduler.read_ahead import ReadAheadPlan
from kvshelf.vllm.worker.layers import StoredLayers
from kvshelf.vllm.worker.weights import WorkerWeights
from tests.sim.engine import RUNNERS, EngineModel, Start
from tests.sim.engine_sides import limit_stores
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.prompts import prompt
from tests.support.threads import named
from tests.support.waiting import until, while_patient

BLOCKS, CHUNK = 48, 8
ASKED = {"do_remote_decode": True}
#: What vLLM calls outside of steps, what runs after an error or at the end, and what other threads
#: call.
NOT_IN_STEPS = {
    *("close", "drain", "end", "start", "join", "shutdown"),
    *("fail", "lose", "register", "open", "leave"),
    *("fall_asleep", "wake_up", "weights_changed", "weights_may_change", "invalidate"),
}


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStorage:
    """The storage of all engines of a test."""
    backend = FaultyStorage(posix(tmp_path / "shelf"))
    monkeypatch.setattr(runtime, "open_shelf", lambda url, **_: Shelf(backend))
    connector._logs.clear()
    return backend


@pytest.fixture
def start(start_model: Start) -> Start:
    """Start engines whose stores have memory for four chunks; they end with the test."""

    def start(runner: str = "V1") -> EngineModel:
        engine = start_model(runner=runner, blocks=BLOCKS, budget=40)
        engine.settle()
        limit_stores(engine.worker.side, 4)
        return engine

    return start


@pytest.fixture
def engine(start: Start) -> EngineModel:
    return start()


class Conversation:
    """Requests that are computed, handed over, loaded, aborted and preempted, as often as asked."""

    def __init__(self, engine: EngineModel, backend: FaultyStorage) -> None:
        self.engine, self.backend = engine, backend
        self.rounds = self.first_step = 0
        self.is_open = threading.Event()
        self.is_open.set()
        backend.add(Fault("write", "*.safetensors", wait=self.is_open))

    @property
    def step(self) -> int:
        """The number of the step in this round."""
        return self.engine.steps - self.first_step

    def run(self) -> None:
        """Go through a round."""
        engine, number = self.engine, self.rounds
        self.rounds, self.first_step = number + 1, engine.steps
        tokens = prompt(40, number, shared=16)
        # Memory does not hold all of it: its blocks are held until the storage writes again.
        self.is_open.clear()
        engine.add(f"cold {number}", tokens, 1, transfer=ASKED)
        for _ in range(3):
            engine.step()
        self.is_open.set()
        engine.finish()
        engine.drain()
        self.check_promise(engine.params[f"cold {number}"], tokens)
        engine.forget()
        broken = f"*-{number % 5}-*"
        self.backend.add(Fault("read", broken, error=TransientStorageError("torn"), times=2))
        engine.add(f"warm {number}", tokens)
        engine.add("gone", tokens)
        engine.step()
        engine.abort("gone")
        engine.add("preempted", tokens)
        engine.step()
        engine.preempt("preempted")
        # Of the same id as one that has ended; the other's blocks are used again.
        if "gone" not in engine.names:
            engine.add("gone", tokens)
        engine.finish()

    def check_promise(self, params: Any, tokens: list[int]) -> None:
        """What was promised is there, unless another engine is told that it is not."""
        if params is None:
            return
        side = self.engine.side
        (view,) = side.engine.views.values()
        chain = KeyChain(view.fmt.namespace.digest, CHUNK)
        chunks = chain.extend(tokens)[: params["kvshelf_tokens"] // CHUNK]

        def is_settled() -> bool:
            names = [info.name for info in self.backend.list()]
            stored = all(any(chunk.key.hex() in name for name in names) for chunk in chunks)
            return stored or view.gave_up([params["kvshelf_attempt"]])[0]

        until(is_settled)

    def check(self) -> None:
        """All is over, on both sides."""
        engine = self.engine
        assert not engine.names
        assert engine.free_blocks == BLOCKS - 1
        for _ in while_patient():
            meta = engine.step()
            idle = StepMetadata(idle=True, weights_round=meta.weights_round)
            if meta == idle and engine.reported is None:
                break
        scheduler, worker = engine.side, engine.worker.side
        assert not scheduler.requests and not scheduler.loads.planned
        assert not worker.loads._ops and not worker.stores.released


def components_of(engine: EngineModel) -> list[Any]:
    """What the scheduler side consists of."""
    side = engine.side
    return [
        *(side.handovers, side.loads, side.lookups, side.periods, side.read_ahead),
        *(side.drafter, side.stores, side.admission),
    ]


def parts_of(engine: EngineModel) -> list[object]:
    """What both sides consist of."""
    scheduler: Any = engine.side
    worker: Any = engine.worker.side
    transfers = worker.registration.transfers
    return [
        *(scheduler, *components_of(engine), scheduler.hits, scheduler.engine),
        *(scheduler.engine.handshake, scheduler.engine.orders, *scheduler._facts.values()),
        *(worker, worker.loads, worker.stores, worker.weights, worker.adapters),
        *(worker.registration, worker.registration.model, worker._facts, worker._orders),
        *(transfers, worker.registration.promises, *transfers.loads.values()),
        *transfers.stores.values(),
    ]


def methods_of(engine: EngineModel) -> list[tuple[type, str]]:
    """The public methods of all parts that may be called in a step."""
    return [
        (kind, name)
        for kind in dict.fromkeys(type(part) for part in parts_of(engine))
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
        and name not in NOT_IN_STEPS
        and not isinstance(inspect.getattr_static(kind, name), staticmethod)
        # All that this does is to call the parts, each by itself.
        and (kind, name) != (SchedulerSide, "finished")
    ]


def watch(patch: pytest.MonkeyPatch, kind: type, name: str, note: Callable[[], None]) -> None:
    """Call `note` before each call of a method on this thread."""
    method, thread = getattr(kind, name), threading.current_thread()

    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is thread:
            note()
        return method(*args, **kwargs)

    patch.setattr(kind, name, call)


@pytest.mark.parametrize(
    ("runner", "most"),
    [
        *(("V1", 40), ("V2 on a device", 40)),
        *(pytest.param(runner, 10_000, marks=pytest.mark.slow) for runner in RUNNERS),
    ],
)
def test_error_in_any_method_in_any_step_loses_nothing(
    start: Start, backend: FaultyStorage, runner: str, most: int
) -> None:
    engine = start(runner)
    conversation = Conversation(engine, backend)
    conversation.run()
    conversation.check()
    called: set[tuple[type, str, int]] = set()
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in methods_of(engine):
            watch(patch, kind, name, lambda k=kind, n=name: called.add((k, n, conversation.step)))
        conversation.run()
    assert len(called) > 300
    cases = sorted(called, key=str)
    for kind, name, step in Random(runner).sample(cases, min(most, len(cases))):

        def fail(name: str = name, step: int = step) -> None:
            if conversation.step == step:
                raise RuntimeError(f"{name} failed in step {step}")

        try:
            with pytest.MonkeyPatch.context() as patch:
                watch(patch, kind, name, fail)
                conversation.run()
            conversation.check()
        except AssertionError as error:
            what = f"after an error of {kind.__name__}.{name} in step {step}"
            raise AssertionError(what) from error


@pytest.mark.parametrize("runner", RUNNERS)
def test_reports_that_are_lost_repeated_or_late_change_nothing(
    start: Start, backend: FaultyStorage, runner: str
) -> None:
    engine = start(runner)
    conversation = Conversation(engine, backend)
    random, late = Random(runner), []

    def deliver(report: Any) -> list[Any]:
        what = random.choice(["as it is", "lost", "twice", "late", "as it is"])
        if what == "late":
            late.append(report)
        found = {"as it is": [report], "twice": [report, report]}.get(what, [])
        # Older ones come behind newer ones.
        if late and random.random() < 0.3:
            found.append(late.pop(random.randrange(len(late))))
        return found

    conversation.run()
    engine.deliver = deliver
    for _ in range(20):
        conversation.run()
    engine.deliver = lambda report: [report]
    conversation.check()


def fill(engine: EngineModel) -> list[list[int]]:
    """Put prompts on the shelf, and nothing in the engine's own cache."""
    prompts = [prompt(40, seed, shared=16) for seed in range(3)]
    for i, tokens in enumerate(prompts):
        engine.add(f"cold {i}", tokens)
        engine.finish()
        engine.drain()
    engine.forget()
    return prompts


def test_error_at_the_end_keeps_nothing_open(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    others = named("kvshelf")
    engine = start()
    fill(engine)
    threads = (named("kvshelf-store") | named("kvshelf-load")) - others
    assert threads
    monkeypatch.setattr(StoredLayers, "cancel_weights", _fail)
    monkeypatch.setattr(SchedulerEngine, "close_lookups", _fail)
    engine.worker.connector.shutdown()
    engine.connector.shutdown()
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_load_that_cannot_be_planned_is_reported_as_failed(
    engine: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = fill(engine)
    monkeypatch.setattr(ReadAheadPlan, "loading", _fail)
    engine.add("r", prompts[0])
    engine.finish()
    assert len(engine.loads_of("r")) == 1
    assert "r" in engine.failed


def _fail(*_: object, **__: object) -> float:
    raise RuntimeError("failed")


def test_what_was_finished_before_an_error_is_reported_after_it(
    engine: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = fill(engine)
    side = engine.worker.side
    add, failed = side.counters.add, []

    def fail_once(name: str, amount: float = 1) -> None:
        if name == "loaded_tokens" and not failed:
            failed.append(name)
            raise RuntimeError("one of several")
        add(name, amount)

    monkeypatch.setattr(side.counters, "add", fail_once)
    for name, tokens in zip("abc", prompts, strict=True):
        engine.add(name, tokens)
    engine.finish()
    # One had to be computed, the others were loaded.
    assert len(engine.failed) == len(failed) == 1
    assert all(len(engine.loads_of(name)) == 1 for name in "abc")


@pytest.mark.parametrize("lost", ["by an error in its step", "on its way"])
def test_why_a_worker_is_disabled_reaches_the_scheduler_when_its_first_report_is_lost(
    engine: EngineModel, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    fill(engine)
    engine.worker.side.registration.model.disable("the caches are gone")
    with monkeypatch.context() as patch:
        if lost == "on its way":
            patch.setattr(engine, "deliver", lambda report: [])
        else:
            patch.setattr(WorkerWeights, "report", _fail)
        engine.step()
        engine.step()
    engine.step()
    engine.step()
    assert engine.connector.disabled


def test_error_at_the_end_of_a_request_leaves_out_no_component(
    engine: EngineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, side, called = fill(engine), engine.side, []

    def fail(component: object) -> None:
        called.append(component)
        raise RuntimeError("failed")

    components = [side.loads, side.lookups, side.read_ahead]
    for component in components:
        monkeypatch.setattr(component, "finished", lambda _, one=component: fail(one))
    engine.add("r", prompts[0])
    engine.finish()
    assert called == components


def test_receiver_of_messages_that_raises_is_given_them_again_and_holds_up_no_other() -> None:
    others, tries = list[str](), list[str]()

    def raises(message: str) -> None:
        tries.append(message)
        raise RuntimeError(message)

    inbox = Inbox([raises, others.append])
    for _ in range(MOST_TRIES):
        assert inbox.heard == 0
        inbox.take([(1, "first"), (2, "second")])
    assert others == ["first", "second"]
    assert tries == [*["first"] * MOST_TRIES, "second"]
    assert inbox.heard == 1
