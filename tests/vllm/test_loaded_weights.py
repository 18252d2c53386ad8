"""What a worker knows of its weights, and what several ranks make of it. Simulated engines."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.distributed.eplb.eplb_state import EplbLayerState, compute_logical_maps
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from kvshelf.vllm.handshake import Handshake
from kvshelf.vllm.metadata import BY_PARAMETERS, WeightsReport
from kvshelf.vllm.scheduler.block_weights import BlockWeights
from kvshelf.vllm.worker import model_tensors, weight_changes
from kvshelf.vllm.worker.loaded_weights import LoadedWeights
from tests.support import prompts
from tests.support.waiting import until, while_patient
from tests.vllm import rig
from tests.vllm.simulated import SimulatedEngine, engines_on

CHUNK = 256


prompt = functools.partial(prompts.prompt, 600)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SimulatedEngine]]:
    with engines_on(tmp_path, blocks=600) as start:
        yield lambda ranks=1, **options: start(tensor_parallel=ranks, **options)


def named(engine: SimulatedEngine) -> str:
    for _ in range(2):
        # The workers report, and get the namespace.
        engine.step([])
    for _ in while_patient():
        engine.step([])
        if not rig.compares_weights(engine.scheduler):
            break
    engine.step([])
    namespace = engine.scheduler.namespace
    assert namespace is not None
    return str(namespace.record["weights"])


def change(engine: SimulatedEngine, value: float, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        engine.ranks[rank].worker.weights_changed("a test")
        engine.ranks[rank].model.bias[0] = value


def test_weights_that_no_file_identifies_are_named_by_their_parameters(
    start: Callable[..., SimulatedEngine],
) -> None:
    def begin(seed: int) -> SimulatedEngine:
        torch.manual_seed(seed)
        engine = start(ranks=2, weights="content")
        until(lambda: (engine.step([]), engine.scheduler.namespace is not None)[1])
        return engine

    one, same, other = begin(1), begin(1), begin(2)
    first = named(one)
    assert first.startswith("params:")
    assert named(same) == first != named(other)
    one.prefill(prompt(1))
    assert same.load(prompt(1))[0] == 512
    assert other.load(prompt(1))[0] == 0
    # Changed in place, and back.
    bias = float(one.ranks[1].model.bias[0])
    change(one, bias + 1.0, (1,))
    assert named(one) != first
    change(one, bias, (1,))
    assert named(one) == first


def test_unknown_tensors_are_said_to_be_unreadable(
    start: Callable[..., SimulatedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    named(engine)
    model = engine.ranks[0].model
    model.register_buffer("strange", torch.eye(3).to_sparse())
    assert engine.scheduler.reset()
    for _ in range(3):
        engine.step([])
    assert engine.scheduler.disabled
    assert "cannot be read" in caplog.text


class Packed(torch.nn.Module):
    """A layer as vLLM leaves it on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.cpu_linear: object = object()


def digest(weights: LoadedWeights, *, packed: bool = True, noticed: bool = True) -> str:
    if noticed:
        weights.changed()
    weights.begin(weights.round + 1)
    while True:
        weights.advance(idle=True)
        report = weights.report()
        assert report is not None
        assert report.packed is packed
        if report.digest is not None:
            weights.settle("")
            return report.digest


def test_packed_weights_are_known_by_what_holds_them() -> None:
    model = Packed()
    weights = LoadedWeights(model)
    first = digest(weights)
    assert first == weights.report().first  # type: ignore[union-attr]
    model.bias[1] = 1
    assert digest(weights) != first
    model.bias[1] = 0
    assert digest(weights) == first
    original, model.cpu_linear = model.cpu_linear, object()
    later = digest(weights)
    assert later != first
    assert digest(weights) == later
    model.cpu_linear = object()
    assert digest(weights) not in (first, later)
    model.cpu_linear = original
    assert digest(weights) == first


class Wrapped:
    """A tensor as ``triton_kernels`` wraps it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.storage = SimpleNamespace(data=data)


class PrecisionConfig:
    """Holds a wrapped scale, as the class of this name in ``triton_kernels`` does."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.weight_scale = Wrapped(scale)
        self.flex_ctx = None


Hidden = type("Tensor", (), {"__module__": "triton_kernels.tensor"})
PrecisionConfig.__module__ = "triton_kernels.matmul_ogs"


class Experts(torch.nn.Module):
    """A layer as vLLM's MXFP4 method leaves it with kernels of ``triton_kernels``."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight: Any = Wrapped(torch.arange(8, dtype=torch.uint8))
        self.quant_method = SimpleNamespace(
            w13_precision_config=PrecisionConfig(torch.ones(4)), moe_kernel=object()
        )
        # Neither is a weight.
        self.workspace = torch.zeros(2)
        self.lora_a_weight_stacked = torch.zeros(2)


def test_experts_that_a_layer_keeps_as_pairs_are_read() -> None:
    """As DeepSeek V4's layer does, which frees the parameters."""
    layer = torch.nn.Linear(2, 2)
    layer.get_expert_weights = list  # type: ignore[assignment]
    pair = torch.zeros(4, dtype=torch.uint8), torch.ones(2)
    layer._transformed_l1_weights = pair  # type: ignore[assignment]
    weights = LoadedWeights(torch.nn.Sequential(layer))
    found = {digest(weights, packed=False)}
    for one in pair:
        one[0] += 1
        found.add(digest(weights, packed=False))
    assert len(found) == 3


def test_weights_that_nothing_shows_are_never_the_same_after_a_noticed_change() -> None:
    layer = Experts()
    layer.w13_weight = Hidden()
    weights = LoadedWeights(layer)
    first = weights.report().first  # type: ignore[union-attr]
    # A reset or a pause changes nothing.
    assert digest(weights, noticed=False) == digest(weights, noticed=False) == first
    changed = digest(weights)
    assert changed != first
    assert digest(weights, noticed=False) == changed
    assert digest(weights) not in (first, changed)
    layer.w13_weight = Hidden()
    assert digest(weights, noticed=False) not in (first, changed)


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
    weights = LoadedWeights(model)
    first = digest(weights, packed=False)
    buffer.fill_(1.0)
    assert digest(weights, packed=False) == first
    host[1][0, 0] += 1
    assert digest(weights, packed=False) != first


def test_the_offloader_of_vllm_has_what_is_read() -> None:
    import inspect

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


def name(made: Handshake, digest: str, **fields: Any) -> str | None:
    made.receive({}, {0: WeightsReport(made.round, "aa", "aa")}, all_spoke=True)
    made.begin_round()
    made.receive({}, {0: WeightsReport(made.round, "aa", digest, **fields)}, all_spoke=True)
    return made._name_of_weights()


def test_names_of_weights() -> None:
    made = handshake()
    assert name(made, "aa") == "sha256:00"
    other = name(made, "bb", noticed=True)
    assert other is not None and other.startswith("params:") and len(other) == 71
    assert name(made, "aa", noticed=True) == "sha256:00"
    assert name(made, "bb") == other
    assert name(handshake(), "bb", packed=True) not in (other, None)
    assert name(handshake(), "cc", version="v") == "version:v"


@settings(max_examples=15)
@given(data=st.data())
def test_a_name_stands_for_the_same_weights_in_all_engines(data: st.DataObject) -> None:
    """Trainers say a version before they write it; steps and comparisons come at any time."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engines = []
        for _ in range(2):
            # They load the same file.
            torch.manual_seed(0)
            engines.append(engine := SimulatedEngine(Path(folder), "NHD", 16, blocks=600))
            stack.callback(engine.close)
            named(engine)
        [first] = {float(engine.ranks[0].model.bias[0]) for engine in engines}
        announced: list[int | None] = [None, None]
        content = [first, first]
        known: dict[str, float] = {}
        actions = st.sampled_from(["announce", "write", "write", "other", "step", "look", "look"])
        for _ in range(data.draw(st.integers(1, 14), "actions")):
            number = data.draw(st.integers(0, 1), "engine")
            engine, action = engines[number], data.draw(actions, "action")
            (rank,), version = engine.ranks, announced[number]
            if action == "announce" and version is None:
                announced[number] = data.draw(st.integers(1, 3), "version")
                rank.worker.weights_changed("a test", f"step {announced[number]}")
            elif action == "write" and version is not None:
                if data.draw(st.booleans(), "noticed"):
                    rank.worker.weights_changed("a test")
                elif engine.scheduler.reset():
                    engine.step([])
                rank.model.bias[0] = content[number] = float(version)
                announced[number] = None
            elif action == "other" and version is None:
                # Nobody gave these a version.
                content[number] = data.draw(st.sampled_from([first, 1.0, 7.0]), "content")
                change(engine, content[number], (0,))
            elif action == "step":
                engine.step([])
            elif action == "look":
                engine.scheduler.reset()
                assert known.setdefault(named(engine), content[number]) == content[number]


@pytest.mark.parametrize("earlier", ["", "step 6"])
def test_a_version_does_not_name_weights_that_were_written_before_it(
    start: Callable[..., SimulatedEngine], earlier: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    named(engine)
    [rank] = engine.ranks
    rank.worker.weights_changed("a test", earlier)
    rank.model.bias[0] = 3.0
    rank.worker.weights_changed("a test", "step 7")
    assert named(engine).startswith("params:")
    assert "'step 7' was given before earlier weights had a name" in caplog.text
    rank.worker.weights_changed("a test", "step 8")
    rank.model.bias[0] = 4.0
    assert named(engine) == "version:step 8"


def test_what_user_code_changes_gets_another_namespace(
    start: Callable[..., SimulatedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a word of it, a pause or a reset."""

    class Root:
        __module__ = "vllm.v1.worker.worker_base"

        def get_model(self) -> torch.nn.Module:
            return engine.ranks[0].model

        def apply_model(self, function: Callable[..., Any]) -> Any:
            return function(self.get_model())

    class Worker(Root):
        __module__ = "vllm.v1.worker.gpu_worker"

        def load_model(self) -> None: ...

    class Extended(Worker):
        __module__ = "a.platform"

        def load_model(self) -> None: ...

        def train(self) -> None:
            self.get_model().bias[0] += 1.0

    class Wrapper:
        def __init__(self) -> None:
            self.worker = Extended()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.worker, name)

    for method in (Root.apply_model, Worker.load_model):
        method.__module__ = Worker.__module__
    base = SimpleNamespace(WorkerWrapperBase=Wrapper, WorkerBase=Root)
    runner = SimpleNamespace(run_method=lambda obj, method: method(obj))
    pickler = SimpleNamespace(cloudpickle=SimpleNamespace(loads=lambda data: add))
    monkeypatch.setitem(sys.modules, weight_changes._BASE_MODULE, base)
    monkeypatch.setitem(sys.modules, weight_changes._RUNNERS[0], runner)
    monkeypatch.setitem(sys.modules, weight_changes._UNPICKLER, pickler)
    monkeypatch.setitem(sys.modules, weight_changes._MODULE, SimpleNamespace(Worker=Worker))
    engine = start()
    first = named(engine)
    worker = Wrapper()

    def add(obj: Any) -> None:
        obj.get_model().bias[0] += 1.0

    engine.prefill(prompt(6))
    names = [first]
    for run in (
        lambda: worker.train() or None,
        lambda: worker.apply_model(lambda model: model.bias.add_(1.0)),
        lambda: runner.run_method(worker, add),
        lambda: pickler.cloudpickle.loads(b"")(worker),
    ):
        run()
        names.append(named(engine))
        assert names[-1] not in names[:-1]
        assert engine.load(prompt(6))[0] == 0
        engine.prefill(prompt(6))
    # vLLM's own methods begin no comparison, and a comparison of equal weights keeps the name.
    rounds = rig.round_of(engine.scheduler)
    worker.load_model()
    assert engine.worker.weights.settled
    worker.apply_model(lambda model: None)
    assert named(engine) == names[-1]
    assert rig.round_of(engine.scheduler) == rounds + 1
    assert engine.load(prompt(6))[0] == 512


def test_the_executors_of_vllm_have_what_is_wrapped() -> None:
    import inspect

    from vllm.v1.executor import multiproc_executor, uniproc_executor
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    assert multiproc_executor.__name__ == weight_changes._UNPICKLER
    assert uniproc_executor.__name__ in weight_changes._RUNNERS
    assert "partial(cloudpickle.loads(method), self.worker)" in inspect.getsource(
        multiproc_executor
    )
    assert "run_method(self.driver_worker" in inspect.getsource(uniproc_executor)
    assert callable(WorkerWrapperBase.__getattr__)
    assert callable(WorkerBase.apply_model)


def test_an_engine_that_holds_a_part_of_the_experts_cannot_name_changed_weights() -> None:
    parts = {"enable_expert_parallel": True, "data_parallel_size": 2}
    assert name(handshake(**parts), "aa") == "sha256:00"
    made = handshake(**parts)
    assert name(made, "aa", noticed=True) is None
    assert made.disabled
    assert name(handshake(**parts), "bb", noticed=True, version="v") == "version:v"


@pytest.mark.parametrize(
    ("parallel", "report", "problem"),
    [
        ({}, {0: WeightsReport(0, "aa", None, packed=True)}, "packed"),
        ({}, {}, "not all ranks"),
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


class BalancedLayer(torch.nn.Module):
    """The places of one layer's experts on one rank, read by vLLM's own method."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.local_num_experts = places
        self.w13_weight = torch.nn.Parameter(torch.zeros(places, 4, 3))
        self.w2_weight = torch.nn.Parameter(torch.zeros(places, 2, 3))
        # As methods of block quantization leave it.
        scale = torch.zeros(places, 3, 2).transpose(1, 2)
        self.w13_weight_scale_inv = torch.nn.Parameter(scale)
        #: Not of one expert.
        self.w13_input_scale = torch.nn.Parameter(torch.ones(1).expand(places))
        self.gate = torch.nn.Linear(3, 2, bias=False)
        #: As kernels of some models want a weight.
        self._transformed = torch.zeros(places, 5)
        self.eplb_state = EplbLayerState()

    def get_expert_weights(self) -> Any:
        named = [(name, one) for name, one in self.named_parameters() if "gate" not in name]
        shown = SimpleNamespace(
            named_parameters=lambda: named, local_num_experts=self.local_num_experts
        )
        of_parameters = RoutedExperts.get_expert_weights(shown)  # type: ignore[arg-type]
        return [*of_parameters, self._transformed]


class Balanced:
    """The ranks over which vLLM balances the experts of a model, and what is known of its weights.

    Of an engine with data parallelism the others' ranks belong to other engines.
    """

    LAYERS, EXPERTS, PLACES = 2, 5, 4

    def __init__(self, ranks: int, engines: int = 1) -> None:
        self.changed: dict[tuple[int, int], float] = {}
        self.models: list[Any] = []
        for _ in range(ranks * engines):
            torch.manual_seed(0)
            layers = [BalancedLayer(self.PLACES) for _ in range(self.LAYERS)]
            self.models.append(torch.nn.Sequential(*layers))
        self.place([[n % self.EXPERTS for n in range(self.places)]] * self.LAYERS)
        self.weights = [self._on(rank, LoadedWeights) for rank in range(ranks)]
        parallel = {"data_parallel_size": engines, "enable_expert_parallel": True}
        self.handshake = handshake(**parallel)
        self.handshake.ranks = ranks
        reports = [SimpleNamespace(weights="sha256:00")] * ranks
        self.handshake._reports = dict(enumerate(reports))  # type: ignore[arg-type]

    @property
    def places(self) -> int:
        return len(self.models) * self.PLACES

    def _on(self, rank: int, work: Callable[[Any], Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_tensors, "_expert_rank", lambda: rank)
            return work(self.models[rank])

    def place(self, experts: list[list[int]]) -> None:
        """Have each place of all ranks hold an expert, as a rebalance does."""
        self.placed = experts
        found, copies = compute_logical_maps(torch.tensor(experts), self.EXPERTS)
        for layer in range(self.LAYERS):
            for n, expert in enumerate(experts[layer]):
                of_rank = self.models[n // self.PLACES][layer]
                with torch.no_grad():
                    for tensor in of_rank.get_expert_weights():
                        tensor[n % self.PLACES] = torch.arange(tensor.shape[1]) + 100.0 * expert
                        tensor[n % self.PLACES, 0] += self.changed.get((layer, expert), 0.0)
            for model in self.models:
                model[layer].eplb_state.logical_to_physical_map = found[layer]
                model[layer].eplb_state.logical_replica_count = copies[layer]

    def change(self, layer: int, expert: int) -> None:
        """Change an expert, wherever it is."""
        self.changed[layer, expert] = self.changed.get((layer, expert), 0.0) + 1.0
        self.place(self.placed)

    def name(self, between: Callable[[], None] = lambda: None, version: str = "") -> str | None:
        """Compare the weights; return their name."""
        made = self.handshake
        made.receive(
            {}, {rank: one.report() for rank, one in enumerate(self.weights)}, all_spoke=True
        )
        made.begin_round()
        for rank, one in enumerate(self.weights):
            if version:
                one.changed(version)
            self._on(rank, lambda _, one=one: one.begin(made.round))
        between()
        for _ in while_patient():
            for rank, one in enumerate(self.weights):
                self._on(rank, lambda _, one=one: one.advance(idle=False))
            reports = {rank: one.report() for rank, one in enumerate(self.weights)}
            made.receive({}, reports, all_spoke=True)
            assert not any(one.problem for one in self.weights)
            if all(report.digest for report in reports.values()):
                break
        found = made._name_of_weights()
        if found is not None:
            made.settle(SimpleNamespace())  # type: ignore[arg-type]
            for one in self.weights:
                one.settle(found)
        return found


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_experts_that_vllm_moves_keep_the_name_of_the_weights(data: st.DataObject) -> None:
    engine = Balanced(data.draw(st.sampled_from([2, 3])))
    experts = list(range(Balanced.EXPERTS))

    def placement() -> list[list[int]]:
        """All experts, and some of them twice or more."""
        spare = st.lists(
            st.sampled_from(experts),
            min_size=engine.places - len(experts),
            max_size=engine.places - len(experts),
        )
        return [
            data.draw(st.permutations(experts + data.draw(spare))) for _ in range(Balanced.LAYERS)
        ]

    names = {(): "sha256:00"}
    for _ in range(3):
        engine.place(placement())
        if data.draw(st.booleans()):
            layer = data.draw(st.integers(0, Balanced.LAYERS - 1))
            engine.change(layer, data.draw(st.sampled_from(experts)))
        # Perhaps once more while the weights are being read.
        again = placement() if data.draw(st.booleans()) else engine.placed
        content = tuple(sorted(engine.changed.items()))
        found = engine.name(lambda again=again: engine.place(again))  # type: ignore[misc]
        assert found == names.setdefault(content, found or "")
    assert len(set(names.values())) == len(names)


def test_of_experts_that_other_engines_hold_those_are_compared_that_were_seen() -> None:
    engine = Balanced(1, engines=2)
    first = [[0, 1, 2, 3, 4, 0, 1, 2]] * 2
    moved = [[4, 4, 2, 3, 0, 1, 1, 2], [3, 2, 1, 0, 4, 4, 4, 4]]
    for placed in (first, moved, first):
        engine.place(placed)
        assert engine.name() == "sha256:00"
    # One that came here later, and is not here now.
    engine.change(0, 4)
    assert engine.name() == "sha256:00"
    engine.place(moved)
    assert engine.name(version="v") == "version:v"
    engine.place(first)
    assert engine.name() == "version:v"
    engine.place(moved)
    engine.change(0, 4)
    assert engine.name() is None
    assert engine.handshake.disabled


def test_vllm_balances_experts_as_they_are_read() -> None:
    import inspect

    from vllm.distributed import parallel_state
    from vllm.distributed.eplb import eplb_state
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    assert issubclass(MoERunner, torch.nn.Module)
    assert isinstance(MoERunner.eplb_state, property)
    assert callable(MoERunner.get_expert_weights)
    assert callable(parallel_state.get_ep_group)
    source = inspect.getsource(eplb_state)
    assert "ep_group = get_ep_group().device_group\n        ep_rank = ep_group.rank()" in source


def test_the_period_of_a_block_is_that_of_the_oldest_block_before_it() -> None:
    blocks = BlockWeights()
    assert blocks.admit([[1, 2, 3]], [0]) == 0
    blocks.begin()
    assert blocks.admit([[1, 2, 4, 5]], [2]) == 0
    assert blocks.admit([[6, 7]], [0]) == 1
    assert blocks.admit([[6, 7, 8]], [2]) == 1
    # The null block stands for those that a window has passed.
    assert blocks.admit([[0, 7, 8]], [2]) == 1
    assert blocks.is_valid(0)
    blocks.settle(changed=True)
    assert not blocks.is_valid(0)
    assert blocks.is_valid(1)
    # Computed since, but behind old blocks.
    assert blocks.admit([[6, 4, 9]], [2]) == 0
    blocks.begin()
    blocks.settle(changed=False)
    assert blocks.is_valid(blocks.admit([[6, 7, 9]], [2]))
