"""Drafters with attention layers: which of their KV is stored, and loaded with the model's."""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.config import Config
from kvshelf.errors import UnsupportedError
from kvshelf.format.kinds import DRAFT
from kvshelf.shelf.view import NamespaceView
from kvshelf.transfer import loads, transfers
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.metadata import WorkerFacts
from kvshelf.vllm.scheduler import SchedulerEngine
from kvshelf.vllm.scheduler import drafter as scheduler_drafter
from kvshelf.vllm.scheduler.drafter import DraftedChain, DraftScheduler
from kvshelf.vllm.scheduler.requests import RequestState
from kvshelf.vllm.speculation import draft_layers
from kvshelf.vllm.worker import loads as worker_loads
from kvshelf.vllm.worker import stores as worker_stores
from kvshelf.vllm.worker.layers import drafter_of
from kvshelf.vllm.worker.side import WorkerSide
from tests.sim import engine_sides as sides
from tests.sim.engine import DRAFT_LAYER, EngineModel, Start
from tests.sim.engine_caches import HEADS, drafter, model_config, speculation, vllm_config
from tests.support.clocks import Clock
from tests.support.prompts import prompt
from tests.support.waiting import until

CHUNK = 8
SHELF = "shelf"


def announce(engine: EngineModel) -> EngineModel:
    """Step until workers know the namespace of their drafter, if they ever will."""
    for _ in range(5):
        engine.step()
    return engine


@pytest.fixture
def start(start_model: Start) -> Start:
    """Start engines with a drafter on one shelf, which keep no blocks of requests."""
    defaults = {"runner": "V1 speculative", "drafter": drafter(), "prefix_caching": False}
    return lambda **options: announce(start_model(**defaults | options))


def namespaces(shelf: Path) -> dict[str, int]:
    """The namespace folders of a shelf, and how many objects each has."""
    folders = [folder for folder in shelf.iterdir() if not folder.name.startswith(".")]
    return {folder.name: len(list(folder.rglob("*.safetensors"))) for folder in folders}


def chunks_of_drafter(engine: EngineModel, root: Path) -> int:
    """The chunks in the namespace of an engine's drafter."""
    namespace = sides.namespace_of_drafts(engine.side)
    assert namespace is not None
    return namespaces(root / SHELF).get(namespace.folder, 0) // HEADS


# ------------------------------------------------------------------------- the drafter's KV


def test_kv_of_a_drafter_moves_through_the_memory_of_the_model(start: Start) -> None:
    side = start().worker.side
    moving = side.registration.transfers
    assert moving is not None and side.registration.moving(DRAFT) is not None
    assert moving.loads[DRAFT]._memory is side.registration.host


@pytest.mark.parametrize("others_fill", [False, True])
def test_drafter_that_runs_when_the_step_may_be_over_decides_only_on_its_own_kv(
    start: Start, tmp_path: Path, others_fill: bool
) -> None:
    """In the order of vLLM's second model runner."""
    first = start(runner="V2 speculative", budget=6)
    first.worker.side.stores.others_fill = others_fill
    first.run(prompt(20))
    # Beside a connector that may fill the blocks meanwhile the drafter's KV is not stored.
    assert chunks_of_drafter(first, tmp_path) == (0 if others_fill else 2)
    second = start()
    assert second.run(prompt(20)) == [16]
    assert bool(second.misled) is others_fill


@pytest.mark.parametrize("ends", ["cut", "failed"])
def test_load_of_a_drafters_kv_ends_with_the_models(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    start().run(prompt(30))
    engine, clock = start(), Clock(1e6)
    drafts = sides.namespace_of_drafts(engine.side)
    gate, load_all = threading.Event(), NamespaceView.load_all

    def hanging(view: NamespaceView, *args: Any) -> Any:
        if view.fmt.namespace == drafts:
            gate.wait()
        return load_all(view, *args)

    monkeypatch.setattr(NamespaceView, "load_all", hanging)
    for module in (loads, transfers):
        times = SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter)
        monkeypatch.setattr(module, "time", times)
    monkeypatch.setattr(worker_loads, "IDLE_WAIT_SECONDS", 0.0)
    patience = (1.0,) if ends == "cut" else ()
    monkeypatch.setattr(engine.side.admission, "begin", lambda *_, **__: (patience, 0))
    if ends == "failed":
        for file in (tmp_path / SHELF / engine.format.namespace.folder).rglob("*-1-*.safetensors"):
            file.write_bytes(bytes(file.stat().st_size))
    engine.add("r", prompt(30))
    if ends == "cut":
        until(lambda: engine.step() is not None and engine.worker.counted["loaded_chunks"] == 3)
        engine.step()
        assert engine.is_loading("r")
        clock.now += 1.5
    engine.finish()
    assert engine.loaded("r") == 24
    gate.set()


def test_kv_of_steps_without_drafts_is_not_stored(start: Start, tmp_path: Path) -> None:
    # Three drafts and one more token fit behind 18 tokens.
    short = drafter(draft_model_config=model_config(max_model_len=22))
    for budget, seed, chunks in ((16, 0, 2), (10, 1, 3)):
        engine = start(drafter=short, budget=budget)
        engine.run(prompt(20, seed))
        assert chunks_of_drafter(engine, tmp_path) == chunks


def test_after_other_weights_the_drafter_is_left_out(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    drafts, before = sides.drafts_of(engine.side), engine.format.namespace.digest
    assert isinstance(drafts.chain(before, CHUNK), DraftedChain)
    changed: Any = SimpleNamespace(digest=bytes(32))
    drafts.receive({}, changed, all_spoke=True)
    assert "weights were changed in place" in caplog.text
    for digest in (changed.digest, before):
        assert not isinstance(drafts.chain(digest, CHUNK), DraftedChain)
    assert drafts.announcement is None


def _fail(*_: object, **__: object) -> None:
    raise RuntimeError("an error")


@pytest.mark.parametrize("where", ["asked", "to_load", "receive"])
def test_after_an_error_the_scheduler_leaves_the_drafter_out(
    start: Start, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    start().run(prompt(20))
    engine = start()
    drafts = sides.drafts_of(engine.side)
    if where == "asked":
        monkeypatch.setattr(drafts, "_forget", _fail)
    elif where == "receive":
        monkeypatch.setattr(drafts._handshake, "receive", _fail)
    else:
        monkeypatch.setattr(scheduler_drafter, "_Progress", lambda *_: object())
    assert engine.run(prompt(20)) == [16]
    assert drafts.left_out


def test_worker_without_its_drafter_tells_so_when_its_first_report_is_lost(start: Start) -> None:
    engine = start()
    assert engine.worker.side.registration.drafter is not None
    engine.worker.side.registration.drafter.disable("an error")
    for reports in ((), (1,)):
        engine.deliver = lambda report, reports=reports: [report for _ in reports]
        assert not sides.drafts_of(engine.side).left_out
        engine.step()
    assert sides.drafts_of(engine.side).left_out


@pytest.mark.parametrize("where", ["slots_to_load", "slots_to_store"])
def test_error_of_the_drafter_in_a_worker_leaves_the_models_kv_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    first, second = start(), start()
    failing_engine = second if where == "slots_to_load" else first
    module = worker_loads if where == "slots_to_load" else worker_stores
    compute = getattr(module, where)
    drafts = failing_engine.worker.side.registration.moving(DRAFT)
    assert drafts is not None

    def failing(slots: Any, *args: Any, **options: Any) -> Any:
        return _fail() if slots is drafts.slots else compute(slots, *args, **options)

    monkeypatch.setattr(module, where, failing)
    first.run(prompt(30))
    assert chunks_of_drafter(first, tmp_path) == (3 if where == "slots_to_load" else 0)
    assert second.run(prompt(30)) == [24]
    assert second.worker.counted["loaded_tokens"] == 24
    assert second.misled


FEWER = "fewer drafts are accepted"


@pytest.mark.parametrize(
    ("fields", "ranks", "line"),
    [
        ({"draft_parallel_config": SimpleNamespace(tensor_parallel_size=2)}, 1, FEWER),
        ({"num_speculative_tokens_per_batch_size": [(1, 100, 3)]}, 1, FEWER),
        ({"draft_model_config": None}, 1, FEWER),
        # Its layout is refused.
        ({"draft_model_config": model_config(get_total_num_kv_heads=lambda: 3)}, 2, FEWER),
        # The option `weights` names those of the model, which is another checkpoint.
        (
            {"draft_model_config": model_config(model="s3://a-bucket/another")},
            1,
            "no file of this machine identifies its weights",
        ),
    ],
)
def test_drafter_that_is_left_out_changes_nothing_else(
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    ranks: int,
    line: str,
) -> None:
    engine = start(drafter=drafter(**fields), tensor_parallel=ranks)
    until(lambda: engine.step() is not None and line in caplog.text)
    engine.run(prompt(20))
    assert start(drafter=drafter(**fields)).run(prompt(20)) == [16]
    assert start(drafter=None).run(prompt(20)) == [16]
    assert len(namespaces(tmp_path / SHELF)) == 1


def test_only_the_last_stage_has_a_drafter() -> None:
    for rank, has in ((0, False), (1, True)):
        parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=2)
        config = SimpleNamespace(
            parallel_config=parallel,
            cache_config=SimpleNamespace(block_size=16, cache_dtype="auto", num_gpu_blocks=4),
            model_config=model_config(),
            load_config=None,
            scheduler_config=None,
            compilation_config=None,
            speculative_config=drafter(),
        )
        assert (drafter_of(config, Config(), rank=rank) is not None) is has


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_what_is_stored_of_a_drafter_belongs_to_its_prefix(data: st.DataObject) -> None:
    """Whatever engines do, a fresh engine gets right KV of the drafter, or none."""
    branches = [prompt(12, seed) for seed in range(3)]
    with ExitStack() as stack:
        shelf = stack.enter_context(tempfile.TemporaryDirectory())

        def make(**options: Any) -> EngineModel:
            runner = data.draw(st.sampled_from(["V1 speculative", "V2 speculative"]), "runner")
            budget = data.draw(st.integers(4, 40), "budget")
            options = {"drafter": drafter(), **options}
            engine = EngineModel(shelf, runner=runner, budget=budget, **options)
            return announce(stack.enter_context(engine))

        engines = [make(), make(), make(drafter=None)]
        served = []
        for _ in range(data.draw(st.integers(1, 8), label="requests")):
            chosen = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
            served.append([token for branch in chosen for token in branches[branch]] + [7])
            engine = engines[data.draw(st.integers(0, 2), label="engine")]
            if data.draw(st.booleans(), label="reset"):
                engine.forget()
            engine.run(served[-1])
            if data.draw(st.booleans(), label="evicted"):
                for path in Path(shelf).rglob("*-0-*.safetensors"):
                    path.unlink()
        # It compares all that a load brings.
        make(prefix_caching=False).run(*served)


# ------------------------------------------------------------------------- whose layer is it


class Runner:
    """A model runner, which registers its caches."""

    def __init__(self, **drafter: Any) -> None:
        self.__dict__.update(drafter)

    def register(self, config: Any) -> frozenset[str]:
        return draft_layers(config)


@pytest.fixture
def config() -> SimpleNamespace:
    names = ["model.layers.0.attn", DRAFT_LAYER]
    layers = {name: SimpleNamespace() for name in names}
    return SimpleNamespace(
        speculative_config=speculation("eagle"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


@pytest.mark.parametrize(
    ("runner", "expected"),
    [
        (Runner(drafter=SimpleNamespace(_draft_attn_layer_names={DRAFT_LAYER})), {DRAFT_LAYER}),
        # Gemma 4's drafter reads the model's own KV.
        (Runner(drafter=SimpleNamespace(_draft_attn_layer_names=set())), set()),
        (Runner(speculator=SimpleNamespace(draft_attn_layer_names={DRAFT_LAYER})), {DRAFT_LAYER}),
        # A stage without a drafter.
        (Runner(speculator=None), set()),
    ],
)
def test_model_runner_knows_the_drafters_layers(
    config: SimpleNamespace, runner: Runner, expected: set[str]
) -> None:
    assert runner.register(config) == expected


def test_model_runner_is_found_above_a_worker_with_a_drafter(config: SimpleNamespace) -> None:
    class Worker:
        drafter = None

        def register(self, config: Any) -> frozenset[str]:
            return draft_layers(config)

    class Calling(Runner):
        def register(self, config: Any) -> frozenset[str]:
            return Worker().register(config)

    Worker.__module__ = WorkerSide.__module__
    runner = Calling(drafter=SimpleNamespace(_draft_attn_layer_names={DRAFT_LAYER}))
    assert runner.register(config) == {DRAFT_LAYER}


@pytest.mark.parametrize("runner", [Runner(), Runner(drafter=SimpleNamespace())])
def test_engine_that_does_not_tell_its_drafters_layers_is_refused(
    config: SimpleNamespace, runner: Runner
) -> None:
    with pytest.raises(UnsupportedError, match=r"does not tell which layers .* method 'eagle'"):
        runner.register(config)


# ------------------------------------------------------------------------- vLLM's prefix cache


class Rows:
    """The scheduler side of a drafter, and requests for the same 16 tokens in 4 blocks."""

    def __init__(self) -> None:
        config = vllm_config({}, block_size=4, blocks=9, speculative_config=drafter())
        engine = SchedulerEngine(config, Config(), lambda: None, CacheGroups(config, None))
        self.side = DraftScheduler(engine)
        self.chain = DraftedChain(bytes(32), bytes(32), CHUNK)
        self.chain.extend(prompt(16))

    def request(self, name: str, cached: int = 0) -> Any:
        """A request of which vLLM's prefix cache has tokens."""
        hashes = [bytes([block]) for block in range(4)]
        request = SimpleNamespace(request_id=name, block_hashes=hashes, num_preemptions=0)
        self.side.asked(request, cached)
        return request

    def is_stored(self, request: Any, *ends: int) -> bool:
        """Compute tokens in steps that end so; return whether the first chunk may be stored."""
        for start, end in pairwise(ends):
            self.side.begin_step([(request, start, end)])
        return self.side.to_store(request.request_id, self.chain, 0) is not None


def test_kv_behind_what_another_connector_loaded_is_not_stored() -> None:
    rows = Rows()
    assert not rows.is_stored(rows.request("loaded"), 5, 16)
    assert not rows.is_stored(rows.request("later", cached=12), 12, 16)


def test_computing_blocks_anew_after_they_left_the_cache_makes_them_good() -> None:
    rows = Rows()
    request = rows.request("loaded")
    rows.side.to_load("loaded", rows.chain, 0, 12)
    rows.side.take_facts(WorkerFacts(without_drafts=[("loaded", 0)]))
    assert not rows.is_stored(request, 12, 16)
    assert rows.is_stored(rows.request("again"), 0, 12, 16)
    assert rows.is_stored(rows.request("later", cached=12), 12, 16)
    # A load that brought nothing at all is computed.
    request = rows.request("failed")
    rows.side.to_load("failed", rows.chain, 0, 12)
    rows.side.take_facts(WorkerFacts(without_drafts=[("failed", 0)]))
    assert rows.is_stored(request, 0, 12, 16)


def test_spoiled_block_is_remembered_once_it_has_a_hash() -> None:
    rows = Rows()
    request = rows.request("growing")
    hashes, request.block_hashes = request.block_hashes, []
    rows.side.begin_step([(request, 0, 5000)])
    request.block_hashes = hashes
    rows.side.finished(RequestState(request, addressable=True, reads=True))
    assert not rows.is_stored(rows.request("later", cached=12), 12, 16)
