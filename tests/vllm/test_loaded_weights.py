"""What a worker knows of its weights, and what several ranks make of it. Simulated engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from parts import until, while_patient
from simulated import SimulatedEngine

from kvshelf.vllm.block_weights import BlockWeights
from kvshelf.vllm.handshake import Handshake
from kvshelf.vllm.loaded_weights import LoadedWeights
from kvshelf.vllm.metadata import BY_PARAMETERS, WeightsReport

CHUNK = 256


def prompt(seed: int, length: int = 600) -> list[int]:
    return random.Random(seed).choices(range(900), k=length)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., SimulatedEngine]]:
    engines: list[SimulatedEngine] = []

    def start(ranks: int = 1, **options: Any) -> SimulatedEngine:
        engines.append(
            SimulatedEngine(tmp_path, "NHD", 16, blocks=600, tensor_parallel=ranks, **options)
        )
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def named(engine: SimulatedEngine) -> str:
    for _ in range(2):
        # The workers report, and get the namespace.
        engine.step([])
    for _ in while_patient():
        engine.step([])
        if not engine.scheduler._handshake.checking:
            break
    engine.step([])
    namespace = engine.scheduler.namespace
    assert namespace is not None
    return str(namespace.record["weights"])


def change(engine: SimulatedEngine, value: float, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        engine.ranks[rank].worker.weights_changed("a test")
        engine.ranks[rank].model.bias[0] = value


@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_a_change_in_any_rank_gives_all_ranks_another_namespace(
    start: Callable[..., SimulatedEngine], ranks: tuple[int, ...]
) -> None:
    engine = start(ranks=2)
    for rank in engine.ranks:
        rank.model.bias[0] = 0.0
    first = named(engine)
    engine.prefill(prompt(1))
    assert engine.load(prompt(1))[0] == 512
    names = []
    for value in (1.0, 2.0, 1.0):
        change(engine, value, ranks)
        names.append(named(engine))
        found, _ = engine.load(prompt(1))
        assert found == (512 if names[-1] in names[:-1] else 0)
        engine.prefill(prompt(1))
        assert engine.load(prompt(1))[0] == 512
    assert names[0] == names[2] != names[1]
    assert all(name.startswith("params:") for name in names)
    assert first == "user:simulated"


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


def test_engines_of_other_degrees_share_a_version_and_nothing_else(
    start: Callable[..., SimulatedEngine],
) -> None:
    one, two = start(ranks=1), start(ranks=2)
    for version in ("", "step 7"):
        for engine in (one, two):
            named(engine)
            for rank in engine.ranks:
                rank.worker.weights_changed("a test", version)
                rank.model.bias.fill_(3.0 + len(version))
        assert (named(one) == named(two)) is bool(version)
    one.prefill(prompt(2))
    assert two.load(prompt(2))[0] == 512


def test_a_store_and_a_load_of_an_earlier_round_are_dropped(
    start: Callable[..., SimulatedEngine],
) -> None:
    engine = start()
    named(engine)
    engine.prefill(prompt(3))
    request = engine.request(prompt(3))
    assert engine.matched(request, 0) == 512
    change(engine, 1.0, (0,))
    # The scheduler does not know yet.
    blocks = engine.blocks_for(600)
    engine.scheduler.allocated(request, (blocks,), 512)
    done = engine.step([])
    assert done == {request.request_id}
    assert engine.bad_blocks == set(blocks[:32])
    assert engine.scheduler.matched_tokens(engine.request(prompt(3)), 0) == (0, False)
    # Back again: a load of the round before is still none of this one.
    named(engine)
    engine.scheduler.allocated(request, (blocks,), 512)
    (op,) = engine.scheduler._loads
    change(engine, engine.ranks[0].model.bias[0].item() - 1.0, (0,))
    named(engine)
    assert op.round < engine.worker._weights.round
    assert not engine.worker._is_current(op)


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


def digest(weights: LoadedWeights) -> str:
    weights.changed()
    weights.begin(weights.round + 1)
    while True:
        weights.advance(idle=True)
        report = weights.report()
        assert report is not None
        assert report.packed
        if report.digest is not None:
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
    made.receive({}, {0: WeightsReport(made.round, "aa", "aa")})
    made.begin_round()
    made.receive({}, {0: WeightsReport(made.round, "aa", digest, **fields)})
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
    made.receive({}, report)
    for _ in range(2):
        assert made.unite() is None
    assert made.disabled
    (line,) = caplog.messages
    assert problem in line
    assert "Set `weights`" in line


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


def test_the_period_of_blocks_of_several_groups_is_that_of_the_oldest() -> None:
    blocks = BlockWeights()
    blocks.begin()
    blocks.settle(changed=True)
    assert blocks.admit([[1, 2, 3], [0, 4, 5]], [0, 0]) == 1
    assert blocks.admit([[1, 2, 6], [0, 4, 7]], [2, 2]) == 1
    # Block 8 was there before.
    assert blocks.admit([[1, 2, 9], [0, 8, 10]], [2, 2]) == 0
    assert blocks.admit([[1, 2], [0, 10, 11]], [2, 2]) == 0
    blocks.take([[12], [13, 14]], 1)
    assert blocks.admit([[12, 15], [13, 14, 16]], [1, 2]) == 1
