"""How much staging an engine has by default: enough for the chunks of a step of usual models."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.config import Config
from kvshelf.format.kinds import FULL
from kvshelf.format.model import ModelFacts
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.topology import ShardPlan
from kvshelf.transfer.staging import StagingPool

with warnings.catch_warnings():
    # Importing vLLM warns of what torch and others deprecate.
    warnings.simplefilter("ignore")
    from kvshelf.vllm.worker import registration
    from kvshelf.vllm.worker.engine import WorkerEngine
    from kvshelf.vllm.worker.registration import Registration

GIB = 1 << 30
#: Layers, KV heads, head size, ranks; bf16.
MODELS = {
    "Llama 3 8B": (32, 8, 128, 1),
    "Qwen3 8B": (36, 8, 128, 1),
    "Qwen3 32B": (64, 8, 128, 2),
    "Llama 3 70B": (80, 8, 128, 4),
}


def registration_of(ranks: int, tokens: int, *, drafter: bool = False, **options: Any) -> Any:
    """A registration of an engine with so many ranks and tokens in a step."""
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks,
            local_world_size=ranks,
            data_parallel_size_local=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens),
    )
    config = Config.load({"shared_storage_path": "/nowhere", **options})
    return Registration(WorkerEngine(vllm_config, config, of_drafter=drafter))


def of(model: str) -> tuple[ObjectFormat, ShardPlan]:
    """The objects of a model, and the shards of the first rank."""
    layers, heads, size, ranks = MODELS[model]
    facts = ModelFacts(
        layers=layers, kv_heads=heads, head_size=size, dtype="bfloat16", weights="name:some"
    )
    fmt = ObjectFormat(facts.namespace(chunk_size=256))
    return fmt, ShardPlan(tuple(range(fmt.shards // ranks)))


@pytest.mark.parametrize("tokens", [8192, 16384])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_fits_into_staging_and_the_device_ring_by_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, model: str, tokens: int
) -> None:
    monkeypatch.setattr(registration, "memory_limit", lambda: 1 << 40)
    fmt, plan = of(model)
    made = registration_of(MODELS[model][3], tokens)
    pool = StagingPool(
        made._staging_bytes([fmt], {FULL: plan}), fmt.object_size(0), together=len(plan.shards)
    )
    chunks = tokens // 256
    assert pool.limit - pool.for_loads >= chunks * len(plan.shards)
    assert made._ring(FULL) >= chunks
    # A quarter of what is free beside an engine with --gpu-memory-utilization 0.92.
    gpu = 80 * GIB if tokens == 8192 else 180 * GIB
    assert chunks * sum(map(fmt.object_size, plan.shards)) < gpu * 0.08 / 4
    assert not caplog.records
