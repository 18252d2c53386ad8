"""What a worker knows of its weights, and what several ranks make of it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from kvshelf.prompts import TokenPrompt
from kvshelf.vllm import weight_changes
from kvshelf.vllm.handshake import Handshake
from kvshelf.vllm.metadata import BY_PARAMETERS, WeightsReport
from kvshelf.vllm.scheduler.periods import BlockPeriods
from kvshelf.vllm.seeding import OfflineEngine
from kvshelf.vllm.worker import model_tensors
from kvshelf.vllm.worker.weights import WorkerWeights
from kvshelf.weights.parameters import ParameterDigest
from tests.sim import engine_sides as sides
from tests.sim.engine import EngineModel, Rank, Start
from tests.support.prompts import prompt
from tests.support.waiting import until


@pytest.fixture
def start(start_model: Start) -> Start:
    """Start engines on one shelf that keep no blocks of requests."""
    return lambda ranks=1, **options: start_model(
        **{"tensor_parallel": ranks, "prefix_caching": False, **options}
    )


def begin(engine: EngineModel) -> None:
    """Step until an engine computes a request with a long answer."""
    engine.add("long", prompt(9), answer=50)
    until(lambda: engine.step() is not None and bool(engine.written))


def named(engine: EngineModel) -> str:
    for _ in range(2):
        # The workers report, and get the namespace.
        engine.step()
    until(lambda: engine.step() is not None and not sides.compares_weights(engine.side))
    engine.step()
    return str(engine.format.namespace.record["weights"])


def change(engine: EngineModel, value: float, ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.side.weights_changed("a test")
        rank.model.weight.data.fill_(value)


def test_weights_that_no_file_identifies_are_named_by_their_parameters(start: Start) -> None:
    def start_with(weights: float) -> EngineModel:
        # No file of this machine.
        engine = start(ranks=2, weights="content", model={"model": "s3://a-bucket/mini"})
        engine.write_weights(weights)
        until(lambda: engine.step() is not None and engine.side.namespace is not None)
        return engine

    one, same, other = start_with(1), start_with(1), start_with(2)
    first = named(one)
    assert first.startswith("params:")
    assert named(same) == first != named(other)
    one.run(prompt(20))
    assert same.run(prompt(20)) == [16]
    assert other.run(prompt(20)) == [0]
    # Changed in place, and back.
    change(one, 3.0, one.ranks[1:])
    assert named(one) != first
    change(one, 1.0, one.ranks[1:])
    assert named(one) == first


class Packed(torch.nn.Module):
    """A layer as vLLM leaves it on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.cpu_linear: object = object()


class Ear:
    """Listens to changes of weights and memory."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def weights_changed(self, how: str) -> None:
        self.heard.append(how)
        raise RuntimeError("a bug must not keep vLLM from its work")

    def fall_asleep(self) -> None:
        self.heard.append("fall asleep")

    def wake_up(self) -> None:
        self.heard.append("wake up")


def reading(model: Any, **parallel: Any) -> WorkerWeights:
    """What a worker knows of a model's weights, whose runner makes this call."""
    self = SimpleNamespace(get_model=lambda: model)
    made = WorkerWeights(SimpleNamespace(parallel_config=SimpleNamespace(**parallel)))
    made.watch(Ear())
    assert self.get_model() is model
    return made


def read(weights: WorkerWeights) -> WeightsReport:
    """What a worker reports once it has read its weights, or found that it cannot."""
    while True:
        weights.advance(idle=True)
        report = weights.report(asked=True)
        assert report is not None
        if report.digest or report.problem:
            return report


def compared(weights: WorkerWeights) -> WeightsReport:
    """The report of another round."""
    weights.begin(read(weights).round + 1)
    return read(weights)


def digest(weights: WorkerWeights) -> str:
    """The digest of another round."""
    found = compared(weights).digest
    assert found is not None
    return found


def test_packed_weights_count_as_those_of_the_start_until_they_are_replaced() -> None:
    model = Packed()
    weights = reading(model)
    first = read(weights)
    assert first.packed
    assert digest(weights) == first.first == first.digest
    model.bias[1] = 1
    assert digest(weights) != first.digest
    model.bias[1] = 0
    original, model.cpu_linear = model.cpu_linear, object()
    assert "packed other weights" in compared(weights).problem
    model.cpu_linear = original
    assert digest(weights) == first.digest


class Wrapped:
    """A tensor as ``triton_kernels`` wraps it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.storage = SimpleNamespace(data=data)


Hidden = type("Tensor", (), {"__module__": "triton_kernels.tensor"})


def test_experts_that_a_layer_keeps_as_pairs_are_read() -> None:
    """As DeepSeek V4's layer does, which frees the parameters."""
    layer = torch.nn.Linear(2, 2)
    layer.get_expert_weights = list  # type: ignore[assignment]
    pair = torch.zeros(4, dtype=torch.uint8), torch.ones(2)
    layer._transformed_l1_weights = pair  # type: ignore[assignment]
    weights = reading(torch.nn.Sequential(layer))
    found = {digest(weights)}
    for one in pair:
        one[0] += 1
        found.add(digest(weights))
    assert len(found) == 3


def test_what_kernels_wrap_is_read_and_what_they_hide_is_said() -> None:
    """As vLLM's MXFP4 method leaves it with kernels of ``triton_kernels``."""
    layer = torch.nn.Module()
    layer.quant_method = SimpleNamespace()  # type: ignore[assignment]
    data = torch.arange(8, dtype=torch.uint8)
    layer.w13_weight = Wrapped(data)  # type: ignore[assignment]
    # Neither is a weight.
    layer.workspace, layer.lora_a_weight_stacked = torch.zeros(2), torch.zeros(2)
    weights = reading(layer)
    first = digest(weights)
    layer.workspace[0] = layer.lora_a_weight_stacked[0] = 1
    assert digest(weights) == first
    data[3] = 9
    assert digest(weights) != first
    layer.w13_weight = Hidden()
    assert "w13_weight" in compared(weights).problem


@pytest.mark.parametrize(
    ("model", "parallel", "problem"),
    [
        (None, {}, "does not show its model"),
        (torch.nn.Linear(2, 2), {"enable_eplb": True}, "--enable-eplb"),
        (
            torch.nn.ParameterList([torch.eye(3).to_sparse()]).requires_grad_(False),
            {},
            "cannot be read",
        ),
    ],
)
def test_weights_that_cannot_be_read_are_said_to_be(
    model: Any, parallel: dict[str, Any], problem: str
) -> None:
    weights = reading(model, **parallel)
    assert problem in read(weights).problem
    assert problem in compared(weights).problem
    assert weights.agree(1)


def test_buffers_count_among_the_weights() -> None:
    model = torch.nn.BatchNorm1d(2)
    before = digest(reading(model))
    assert model.running_mean is not None
    model.running_mean += 1
    assert digest(reading(model)) != before


@pytest.mark.parametrize(("failures", "readable"), [(4, True), (5, False)])
def test_digest_that_fails_begins_again_a_few_times(
    failures: int, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    weights, expected = reading(model), digest(reading(model))
    advance, left = ParameterDigest.advance, list[int]()

    def short_of_memory(self: ParameterDigest, seconds: float) -> None:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("out of memory")
        advance(self, seconds)

    monkeypatch.setattr(ParameterDigest, "advance", short_of_memory)
    for number in (1, 2):
        left[:] = range(failures)
        weights.begin(number)
        report = read(weights)
        assert (report.digest == expected, not report.problem) == (readable, readable)


def test_change_before_the_digest_of_the_start_leaves_none() -> None:
    model = torch.nn.Linear(2, 2)
    for weights in (reading(model), reading(model)):
        assert weights.settled
    weights.begin(1)
    assert read(weights).first is None
    weights = reading(model)
    weights.changed("a test")
    weights.advance(idle=True)
    report = weights.report(asked=False)
    assert report is not None
    assert report.first is report.digest is None
    weights.begin(1)
    assert read(weights).first is None


def test_version_belongs_to_what_the_next_step_computes_with() -> None:
    def version(weights: WorkerWeights) -> str:
        return read(weights).version

    weights = reading(torch.nn.Linear(2, 2))
    weights.changed("a test")
    weights.changed("a test", "7")
    weights.changed("a test")
    weights.begin(1)
    assert version(weights) == "7"
    # Other weights, of a later step.
    weights.changed("a test")
    weights.begin(2)
    assert version(weights) == ""
    weights.changed("a test", "8")
    weights.begin(3)
    assert version(weights) == "8"
    # What the engine calls for a user, or a reset, before the round ends.
    weights.begin(4)
    assert version(weights) == ""
    weights.changed("a test", "9")
    weights.begin(4)
    weights.begin(5)
    assert version(weights) == "9"
    weights.settle()
    weights.begin(6)
    assert version(weights) == ""


def test_prefetched_weights_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of all layers are shown one buffer, in which some layer happens to be."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    )
    host = [layer.weight.data.clone() for layer in model]
    buffer = torch.zeros(4, 4)
    for layer in model:
        layer.weight.data = buffer
    modules = [
        SimpleNamespace(
            _param_offloaders={"weight": SimpleNamespace(_param=layer.weight, _cpu_storage=held)}
        )
        for layer, held in zip(model, host, strict=True)
    ]
    offloader = SimpleNamespace(module_offloaders=modules)
    monkeypatch.setitem(
        sys.modules, model_tensors._OFFLOADER, SimpleNamespace(get_offloader=lambda: offloader)
    )
    weights = reading(model)
    first = digest(weights)
    buffer.fill_(1.0)
    assert digest(weights) == first
    host[1][0, 0] += 1
    assert digest(weights) != first


def test_offloader_of_vllm_has_what_is_read() -> None:
    from vllm.model_executor.offloader import base, prefetch

    assert base.__name__ == model_tensors._OFFLOADER
    assert callable(base.get_offloader)
    source = inspect.getsource(prefetch)
    for part in ("self.module_offloaders", "self._param_offloaders", "def _param(", "_cpu_storage"):
        assert part in source


def handshake(**parallel: Any) -> Handshake:
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, **parallel
        ),
        model_config=SimpleNamespace(quantization=None),
    )
    made = Handshake(vllm_config, SimpleNamespace(), 1)
    made._reports = {0: SimpleNamespace(weights="sha256:00")}  # type: ignore[dict-item]
    return made


def name(
    made: Handshake, digest: str, *, noticed: bool = False, first: str | None = "aa", **fields: Any
) -> str | None:
    """What weights are called at the end of a round."""
    made.begin_round(noticed=noticed)
    report = WeightsReport(made.round, first, digest or None, **fields)
    made.receive({}, {0: report}, all_spoke=True)
    found = made._name_of_weights()
    if found is not None:
        made.settle(SimpleNamespace())  # type: ignore[arg-type]
    return found


def test_names_of_weights(caplog: pytest.LogCaptureFixture) -> None:
    made = handshake()
    assert name(made, "aa") == "sha256:00"
    other = name(made, "bb", noticed=True)
    assert other is not None and other.startswith("params:") and len(other) == 71
    assert name(made, "aa", noticed=True) == "sha256:00"
    assert name(made, "bb", version="late") == other
    assert name(handshake(), "bb", packed=True) not in (other, None)
    assert name(made, "cc", version="v") == name(made, "cc") == "version:v"
    assert (name(made, "dd", version="v") or "").startswith("params:")
    assert "was the name of other weights before" in caplog.text
    # Nothing is known of the start.
    assert name(handshake(), "bb", first=None) == other
    assert (name(handshake(), "aa", first=None) or "").startswith("params:")


def test_round_waits_for_what_rank_0_reads_in_the_files() -> None:
    made = handshake()
    [known] = made._reports.values()
    made._reports = {0: SimpleNamespace(weights=None)}  # type: ignore[dict-item]
    assert name(made, "bb", noticed=True, version="v") is None
    made._reports = {0: known}
    assert made._name_of_weights() == "version:v"


def test_weights_that_cannot_be_read_wait_for_a_version(caplog: pytest.LogCaptureFixture) -> None:
    made = handshake()
    assert name(made, "aa") == "sha256:00"
    for _ in range(2):
        assert name(made, "", problem="a problem") is None
        assert made._name_of_weights() is None
        assert made.needs_version
    assert caplog.text.count("not known to what: a problem") == 2
    assert name(made, "", problem="a problem", version="v") == "version:v"
    assert made.weights_changed and not made.needs_version
    assert name(made, "", problem="a problem") is None
    assert name(made, "aa") == "sha256:00"


@pytest.mark.parametrize("how", ["changed", "computed"])
def test_what_was_computed_before_a_round_may_have_other_weights_than_it_finds(how: str) -> None:
    made = handshake()
    assert name(made, "aa") == "sha256:00"
    made.begin_round(noticed=True)
    if how == "computed":
        made.computes = True
        made.begin_round(noticed=False)
    else:
        late = WeightsReport(made.round, "aa", None, changed=True)
        assert made.receive({}, {0: late}, all_spoke=True)
        made.begin_round(noticed=True)
    made.receive({}, {0: WeightsReport(made.round, "aa", "aa")}, all_spoke=True)
    assert made._name_of_weights() == "sha256:00"
    assert made.weights_changed
    made.settle(SimpleNamespace())  # type: ignore[arg-type]
    made.computes = True
    for _ in range(2):
        # As a pause and the sleep that follows.
        made.begin_round(noticed=True)
    made.receive({}, {0: WeightsReport(made.round, "aa", "aa")}, all_spoke=True)
    assert made._name_of_weights() == "sha256:00"
    assert not made.weights_changed


def test_only_steps_that_compute_count_in_a_round(start: Start) -> None:
    engine = start()
    handshake = engine.side.engine.handshake
    engine.side.reset()
    engine.step()
    assert not handshake.computes
    begin(engine)
    engine.side.reset()
    engine.step()
    assert handshake.computes


@settings(max_examples=8)
@given(data=st.data())
def test_name_stands_for_the_same_weights_in_all_engines(data: st.DataObject) -> None:
    """Trainers say a version and write it between two steps, in any order, or say none."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # They load the same file.
        engines = [stack.enter_context(EngineModel(folder)) for _ in range(2)]
        first = 0.0
        content = [first, first]
        for engine in engines:
            named(engine)
        known: dict[str, float] = {}
        actions = st.sampled_from(["update", "update", "other", "step", "look"])
        for _ in range(data.draw(st.integers(1, 14), "actions")):
            number = data.draw(st.integers(0, 1), "engine")
            engine, action = engines[number], data.draw(actions, "action")
            (rank,) = engine.ranks
            if action == "update":
                version = data.draw(st.integers(1, 3), "version")
                does = [
                    lambda rank=rank, version=version: rank.side.weights_changed(
                        "a test", f"step {version}"
                    ),
                    lambda rank=rank: rank.side.weights_changed("a test"),
                    lambda engine=engine, version=version: engine.write_weights(version),
                ]
                for one in data.draw(st.permutations(does), "order"):
                    one()
                content[number] = float(version)
            elif action == "other":
                # Nobody gave these a version, and the next step would compute with the ones before.
                engine.step()
                content[number] = data.draw(st.sampled_from([first, 1.0, 7.0]), "content")
                change(engine, content[number], engine.ranks)
            elif action == "step":
                engine.step()
            else:
                engine.side.reset()
                assert known.setdefault(named(engine), content[number]) == content[number]


def check_health(worker: object) -> None:
    """A user's function with the name of a method of vLLM's worker."""


@pytest.mark.parametrize(
    ("method", "comparisons"),
    [*((name, 0) for name in weight_changes.READING), ("my_monitor", 5), (check_health, 5)],
)
def test_call_that_may_write_begins_a_comparison_and_is_named_when_it_interrupts_one(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: object,
    comparisons: int,
) -> None:
    class EngineCore:
        def collective_rpc(self, method: object, timeout: float | None = None) -> None: ...

    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(EngineCore=EngineCore))
    monkeypatch.setattr(ParameterDigest, "advance", lambda *_: None)
    engine, core = start(), EngineCore()
    begin(engine)
    core.collective_rpc(timeout=1.0, method=method)
    for _ in range(4):
        engine.step()
        core.collective_rpc(method)
    assert sides.round_of(engine.side) == comparisons
    assert engine.counted["weight_comparisons"] == comparisons
    name = repr(method) if isinstance(method, str) else "check_health"
    assert caplog.text.count(f"collective_rpc({name}) begins that anew") == bool(comparisons)


def test_hits_are_offered_when_all_ranks_serve_the_new_weights(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = start(ranks=2)
    change(writer, 1.0, writer.ranks)
    named(writer)
    writer.run(prompt(20))
    reader = start(ranks=2)
    reader.run(prompt(20, 2))
    late = reader.ranks[1].side.registration
    # Rank 1 is not there yet, as where it gets no threads.
    monkeypatch.setattr(late, "open", lambda encoded, slug: False)
    change(reader, 1.0, reader.ranks)
    named(reader)
    reader.add("late", prompt(20))
    reader.finish()
    assert reader.loaded("late") == 0
    monkeypatch.undo()
    until(lambda: reader.step() is not None and not reader.side.engine.handshake.announcing)
    assert reader.run(prompt(20)) == [16]
    assert not reader.failed


def test_seeder_s_wait_for_stores_begins_no_comparison(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Executor:
        def collective_rpc(
            self, method: Callable[..., int], timeout: object = None, args: tuple[Any, ...] = ()
        ) -> list[int]:
            return [method(rank.side, *args) for rank in engine.ranks]

    class EngineCore:
        def __init__(self) -> None:
            self.scheduler = SimpleNamespace(connector=None)
            self.model_executor = Executor()

        def collective_rpc(self, *arguments: Any, **named: Any) -> list[int]:
            return self.model_executor.collective_rpc(*arguments, **named)

    class LLM:
        def __init__(self, **_: object) -> None:
            core = EngineCore()
            self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
            self.collective_rpc = core.collective_rpc

        def generate(self, inputs: list[dict[str, Any]], *_: object, **__: object) -> None:
            for number, one in enumerate(inputs):
                engine.add(f"{engine.steps}-{number}", one["prompt_token_ids"], answer=1)
            engine.finish()

    monkeypatch.setattr("vllm.LLM", LLM)
    monkeypatch.setattr("vllm.v1.engine.core.EngineCore", EngineCore)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr("kvshelf.vllm.seeding._check_vllm", lambda: None)
    engine = start()
    transfer = "vllm.distributed.kv_transfer.get_kv_transfer_group"
    monkeypatch.setattr(transfer, lambda: engine.worker.connector)
    seeder = OfflineEngine("a model", "a shelf", {})
    for seed in (7, 8):
        seeder.compute([TokenPrompt(1, prompt(20, seed))])
        assert not sides.compares_weights(engine.side)
        assert start().run(prompt(20, seed)) == [16]


def test_worker_s_methods_that_free_memory_or_change_drafts_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ear, other = Ear(), Ear()

    class Worker:
        def sleep(self, level: int = 1) -> str:
            return f"{ear.heard[-1]} {level}"

        def discard(self, tags: tuple[str, ...]) -> None: ...

        def wake_up(self, tags: list[str] | None = None, level: int = 0) -> int:
            ear.heard.append("vLLM wakes")
            return level

        def start_draft_weight_update(self) -> None: ...

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=Worker))
    for one in (ear, ear, other):
        weight_changes.watch_worker(one)
    worker = Worker()
    assert worker.sleep(level=2) == "fall asleep 2"
    worker.wake_up(["weights"])
    worker.wake_up(tags=["kv_cache"])
    worker.discard(("weights",))
    worker.discard(("kv_cache",))
    worker.start_draft_weight_update()
    # As with an argument of a later vLLM.
    assert worker.wake_up(level=1) == 1
    assert ear.heard == [
        "fall asleep",
        "vLLM wakes",
        "vLLM wakes",
        "wake up",
        "fall asleep",
        "start_draft_weight_update()",
        "vLLM wakes",
        "wake up",
    ]
    assert other.heard == [one for one in ear.heard if one != "vLLM wakes"]


class Loadable(torch.nn.Linear):
    """A model with vLLM's way to load weights."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.loaded: list[object] = []

    def load_weights(self, weights: object) -> set[str]:
        self.loaded.append(weights)
        return {"weight"}


def test_weights_that_a_worker_extension_loads_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader:
        def __init__(self, model: object) -> None:
            self.model = model

        def load_weights(self, weights: object, *, mapper: object = None) -> object:
            return self.model, weights, mapper

    utils = SimpleNamespace(AutoWeightsLoader=Loader)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.utils", utils)
    ear, model, other = Ear(), Loadable(), Loadable()
    for _ in range(2):
        weight_changes.watch_loading(ear, model)
    assert model.load_weights([1]) == {"weight"}
    assert model.loaded == [[1]]
    assert ear.heard == ["load_weights()"]
    # Another model of the same class is not the engine's.
    other.load_weights([2])
    assert len(ear.heard) == 1
    assert Loader("m").load_weights("w", mapper=3) == ("m", "w", 3)
    assert len(ear.heard) == 2


def test_weights_that_are_loaded_into_a_drafter_are_noticed() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

    ear, models = Ear(), [Loadable(), Loadable()]

    class Runner:
        def get_model(self) -> torch.nn.Module:
            return models[0]

        def get_draft_model(self) -> torch.nn.Module:
            return models[1]

        def register(self, weights: WorkerWeights) -> None:
            weights.watch(ear)

    Runner().register(WorkerWeights(SimpleNamespace(parallel_config=SimpleNamespace())))
    for model in models:
        model.load_weights([1])
    assert ear.heard == ["load_weights()"] * 2
    assert all(callable(runner.get_draft_model) for runner in (First, Second))


def test_what_vllm_calls_for_users_is_wrapped() -> None:
    from vllm.model_executor.models.utils import AutoWeightsLoader
    from vllm.v1.engine import core, core_client, llm_engine
    from vllm.v1.worker import worker_base

    assert AutoWeightsLoader.__module__ == "vllm.model_executor.models.utils"
    assert callable(AutoWeightsLoader.__dict__["load_weights"])
    assert callable(core.EngineCore.__dict__["collective_rpc"])
    assert "collective_rpc" not in vars(core.EngineCoreProc)
    assert "self.engine_core.collective_rpc(" in inspect.getsource(core_client.InprocClient)
    assert 'call_utility("collective_rpc"' in inspect.getsource(core_client.SyncMPClient)
    assert 'collective_rpc("apply_model"' in inspect.getsource(llm_engine.LLMEngine)
    init = inspect.getsource(worker_base.WorkerWrapperBase.init_worker)
    assert "assert not hasattr(worker_class, attr)" in init
    # Sleep reaches the workers in another way, and resets the connector's cache before.
    assert "reset_connector=reset_connector" in inspect.getsource(core.EngineCore._reset_caches)
    assert "self._reset_caches()" in inspect.getsource(core.EngineCore._finish_pause)


def test_engine_that_holds_a_part_of_the_experts_cannot_name_changed_weights() -> None:
    parts = {"enable_expert_parallel": True, "data_parallel_size": 2}
    made = handshake(**parts)
    assert name(made, "aa") == "sha256:00"
    assert name(made, "aa", noticed=True) is None
    # Of which this engine's part may be the same.
    assert name(made, "aa", noticed=True, version="v") == "version:v"
    assert name(made, "aa") == "version:v"
    assert name(made, "bb") is None


@pytest.mark.parametrize(
    ("parallel", "report", "problem"),
    [
        ({}, {0: WeightsReport(0, "aa", None, packed=True)}, "packed"),
        ({}, {0: WeightsReport(0, None, None, problem="a problem")}, "a problem"),
        (
            {"enable_expert_parallel": True, "data_parallel_size": 2},
            {0: WeightsReport(0, "aa", None)},
            "other engines hold a part",
        ),
    ],
)
def test_where_parameters_cannot_name_weights_one_line_says_what_to_set(
    parallel: dict[str, Any],
    report: dict[int, WeightsReport],
    problem: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = handshake(**parallel)
    made._reports = {0: SimpleNamespace(weights=BY_PARAMETERS)}  # type: ignore[dict-item]
    made.receive({}, report, all_spoke=True)
    for _ in range(2):
        assert made.unite() is None
    assert made.disabled
    (line,) = caplog.messages
    assert problem in line
    assert "Set `weights`" in line


def of_period(period: int) -> Any:
    """A request, as far as the periods of blocks look at it."""
    return SimpleNamespace(period=period)


def block_periods(
    *, hybrid: bool = False, block_size: int = 1
) -> tuple[BlockPeriods, Callable[[list[int], int], Any]]:
    """The periods of blocks, and what admits a request there."""
    groups = MagicMock(scratch=(), hybrid=hybrid)
    groups.__iter__.side_effect = lambda: iter([SimpleNamespace(index=0, block_size=block_size)])
    periods = BlockPeriods(MagicMock(groups=groups), MagicMock())
    return periods, lambda blocks, computed: of_period(periods.admit([blocks], computed, None))


def test_period_of_a_block_is_that_of_the_oldest_block_before_it() -> None:
    periods, admit = block_periods()

    assert admit([1, 2, 3], 0).period == 0
    periods.begin()
    assert admit([1, 2, 4, 5], 2).period == 0
    assert admit([6, 7], 0).period == 1
    assert admit([6, 7, 8], 2).period == 1
    # The null block stands for those that a window has passed.
    assert admit([0, 7, 8], 2).period == 1
    assert periods.is_valid(of_period(0))
    periods.settle(changed=True)
    assert not periods.is_valid(of_period(0))
    assert periods.is_valid(of_period(1))
    # Computed since, but behind old blocks.
    assert admit([6, 4, 9], 2).period == 0
    periods.begin()
    periods.settle(changed=False)
    assert periods.is_valid(admit([6, 7, 9], 2))


def test_blocks_count_as_old_after_a_step_that_was_lost() -> None:
    periods, admit = block_periods()
    periods.lose()
    assert periods.is_valid(admit([1, 2], 0)), "there were no other weights yet"
    periods.begin()
    before = admit([3, 4], 0)
    assert periods.is_valid(before)
    periods.lose()
    assert not periods.is_valid(before)
    assert not periods.is_valid(admit([3, 5], 1))
    assert periods.is_valid(admit([6, 7], 0))


@pytest.mark.parametrize("hybrid", [False, True])
def test_block_that_a_hybrid_engine_copied_has_no_known_weights(hybrid: bool) -> None:
    periods, admit = block_periods(hybrid=hybrid, block_size=4)
    periods.begin()
    periods.settle(changed=True)
    assert periods.is_valid(admit([1, 2], 0))
    assert periods.is_valid(admit([1, 3], 4))
    assert periods.is_valid(admit([1, 4], 3)) is not hybrid
