"""How much memory an engine takes for chunks: by default enough for four steps of usual models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")


from kvshelf.config import DEFAULT_MEMORY, Config
from kvshelf.format.kinds import FULL, STATE, Kind
from kvshelf.format.model import ModelFacts
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.topology import ShardPlan
from kvshelf.memory.ring import rounded
from tests.support.formats import format_of_kinds

with warnings.catch_warnings():
    # Importing vLLM warns of what torch and others deprecate.
    warnings.simplefilter("ignore")
    from kvshelf.vllm.worker import memory
    from kvshelf.vllm.worker.memory import io_threads, take_memory
    from tests.sim.engine_caches import make_config
    from tests.sim.engine_sides import MakeWorker

GIB = 1 << 30
#: Layers, KV heads, head size, ranks; bf16.
MODELS = {
    "Llama 3 8B": (32, 8, 128, 1),
    "Qwen3 8B": (36, 8, 128, 1),
    "Qwen3 32B": (64, 8, 128, 2),
    "Llama 3 70B": (80, 8, 128, 4),
}
#: What each kind has: its objects, and the shards of a rank.
Kinds = dict[Kind, tuple[ObjectFormat, ShardPlan]]
Taken = Callable[..., int]
OPTIONS = Config.load({"shared_storage_path": "/nowhere"})


def engine_of(ranks: int, tokens: int) -> Any:
    """The configuration of an engine with so many ranks and tokens in a step."""
    return SimpleNamespace(
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


def kinds_of(model: str) -> Kinds:
    """The objects of a model, and the shards of the first rank."""
    layers, heads, size, ranks = MODELS[model]
    facts = ModelFacts(
        layers=layers, kv_heads=heads, head_size=size, dtype="bfloat16", weights="name:some"
    )
    fmt = ObjectFormat(facts.namespace(chunk_size=256))
    return {FULL: (fmt, ShardPlan(tuple(range(fmt.shards // ranks))))}


def chunk_bytes(kinds: Kinds, kind: Kind = FULL) -> int:
    """Bytes of a chunk of one kind in memory."""
    fmt, plan = kinds[kind]
    return sum(rounded(fmt.object_size(shard)) for shard in plan.shards)


def spare_bytes(engine: Any, kinds: Kinds) -> int:
    """Bytes of the slots that only loads may have: one of each kind for each thread."""
    threads = io_threads(engine, on_device=False)[0] + 1
    return threads * sum(chunk_bytes(kinds, kind) for kind in kinds)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Let a worker take its memory on a machine with a terabyte; return how many bytes."""
    monkeypatch.setattr(memory, "memory_limit", lambda: 1 << 40)

    def take(engine: Any, kinds: Kinds, rank: int = 0) -> int:
        threads = io_threads(engine, on_device=False)[0] + 1
        host = take_memory(engine, OPTIONS, kinds, threads=threads, rank=rank)
        host.close()
        return host.nbytes

    return take


@pytest.mark.parametrize("tokens", [8192, 16384])
@pytest.mark.parametrize("model", MODELS)
def test_memory_by_default_has_room_for_four_steps(
    taken: Taken,
    caplog: pytest.LogCaptureFixture,
    model: str,
    tokens: int,
) -> None:
    kinds = kinds_of(model)
    engine = engine_of(MODELS[model][3], tokens)
    chunks = tokens // 256
    step = chunks * chunk_bytes(kinds)
    assert taken(engine, kinds) == 4 * step + spare_bytes(engine, kinds)
    assert not caplog.records


def test_memory_for_small_steps_is_the_least_that_an_engine_takes(
    taken: Taken,
) -> None:
    assert taken(engine_of(1, 256), kinds_of("Llama 3 8B")) == DEFAULT_MEMORY


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_take_a_sixteenth_of_the_machine_together_where_four_steps_need_more(
    taken: Taken, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: 64 * GIB * ranks)
    assert taken(engine_of(ranks, 1 << 20), kinds_of("Llama 3 8B")) == 4 * GIB


def test_memory_holds_the_spare_slots_and_three_chunks_on_a_small_machine(
    taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "DEFAULT_MEMORY", 1)
    monkeypatch.setattr(memory, "memory_limit", lambda: 1)
    fmt = format_of_kinds({FULL: 2, STATE: 2}, chunk_size=2048)
    whole = ShardPlan.whole(2)
    kinds: Kinds = {kind: (fmt.of(kind), whole) for kind in (FULL, STATE)}
    engine = engine_of(1, 8192)
    chunk = chunk_bytes(kinds) + chunk_bytes(kinds, STATE)
    assert taken(engine, kinds) == spare_bytes(engine, kinds) + 3 * chunk


def test_step_counts_states_for_a_quarter_of_its_chunks(
    taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "DEFAULT_MEMORY", 1)
    fmt = format_of_kinds({FULL: 2, STATE: 2}, chunk_size=256)
    kinds: Kinds = {kind: (fmt.of(kind), ShardPlan.whole(2)) for kind in (FULL, STATE)}
    engine = engine_of(1, 10 * 256)
    step = 10 * chunk_bytes(kinds) + 3 * chunk_bytes(kinds, STATE)
    assert taken(engine, kinds) == 4 * step + spare_bytes(engine, kinds)


@pytest.mark.parametrize("rank", [0, 1])
def test_first_rank_warns_of_a_step_that_stores_cannot_hold(
    taken: Taken,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: 24 * GIB)
    kinds = kinds_of("Llama 3 8B")
    nbytes = taken(engine_of(1, 8192), kinds, rank)
    step = 32 * chunk_bytes(kinds)
    # Two threads have a spare slot each.
    for_stores = (nbytes - 2 * chunk_bytes(kinds)) // 2
    assert for_stores < step <= nbytes
    lines = [line for line in caplog.messages if line.startswith("stores have")]
    assert len(lines) == (1 if rank == 0 else 0)
    for line in lines:
        assert line.startswith(f"stores have {for_stores} bytes of memory, too few for the 32")
        assert f"takes {step} bytes" in line and "twice as much memory" in line


def test_memory_that_is_configured_is_taken_as_it_is(make_worker: MakeWorker) -> None:
    rig = make_worker(memory=3 << 20)
    assert rig.gauge("staging_limit_bytes") == rig.gauge("memory_tier_limit_bytes") == 3 << 20


def test_ranks_of_a_machine_share_the_memory_that_is_configured(
    make_worker: MakeWorker,
) -> None:
    config = make_config("/nowhere", memory=8 << 20)
    config.parallel_config.local_world_size = 2
    config.parallel_config.data_parallel_size_local = 2
    assert make_worker(config=config).gauge("staging_limit_bytes") == 2 << 20


def test_engine_serves_with_the_least_memory_that_it_takes_by_default(
    make_worker: MakeWorker,
) -> None:
    rig = make_worker(memory_bytes=1)
    chunks = rig.chunks(1)
    rig.store(chunks)
    assert rig.path(chunks[0]).exists()
