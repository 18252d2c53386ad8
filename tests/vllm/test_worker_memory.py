"""The memory tier of a worker, and what it reads ahead of requests that wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvshelf.errors import ConfigError
from kvshelf.vllm.connector import SharedStorageConnector
from kvshelf.vllm.metadata import (
    LoadOp,
    PrefetchOp,
    StepMetadata,
)
from tests.sim.engine_caches import make_config, make_groups
from tests.sim.engine_sides import LoneWorker, next_number
from tests.sim.storage import Fault, FaultyStorage
from tests.support.waiting import until

# ------------------------------------------------------------------------- requests that wait

TIER = 4 << 20


def same(writer: LoneWorker, block: int, reader: LoneWorker, other: int) -> bool:
    """Whether blocks of two workers hold the same."""
    return all(map(torch.equal, writer.rows(block), reader.rows(other)))


@pytest.fixture
def writer(make_worker: Callable[..., LoneWorker]) -> LoneWorker:
    """An engine that has stored the four chunks of a prompt from its first blocks."""
    rig = make_worker()
    rig.store(rig.chunks(4))
    return rig


@pytest.fixture
def rig(writer: LoneWorker, make_worker: Callable[..., LoneWorker]) -> LoneWorker:
    """Another one, with memory that holds nothing yet."""
    return make_worker(memory=TIER)


def test_a_waiting_requests_bad_object_is_reported_before_its_load(
    rig: LoneWorker, backend: FaultyStorage
) -> None:
    chunks = rig.chunks(3)
    backend.add(Fault("read", f"*{chunks[1].key.hex()}*", damage=lambda data: data.reverse()))
    found: list[tuple[bytes, bool]] = []

    def reported() -> bool:
        _, bad, meta = rig.step(StepMetadata())
        assert not bad
        found.extend(meta.failures if meta is not None else ())
        return bool(found)

    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    until(reported)
    assert found[0] == (chunks[1].key, True)


def test_a_low_latency_shelf_takes_no_memory_for_waiting_requests(writer: LoneWorker) -> None:
    writer.step(StepMetadata(prefetches=[PrefetchOp("r", writer.chunks(2))]))
    writer.side.set_gauges()
    assert "memory_tier_used_bytes" not in writer.side.counters.gauges()
    assert "prefetched_objects" not in writer.counts


# ------------------------------------------------------------------------- the memory tier


@pytest.mark.parametrize("options", [{"memory": TIER}, {}])
def test_chunk_that_a_worker_stored_is_loaded_from_its_memory(
    make_worker: Callable[..., LoneWorker], options: dict[str, int]
) -> None:
    rig = make_worker(**options)
    chunks = rig.chunks(1)
    rig.store(chunks)
    rig.path(chunks[0]).unlink()
    _, bad, _ = rig.load(LoadOp(next_number(), "r", 0, 8, chunks, ([20, 21],)))
    assert rig.same(1, 20) is bool(options)
    assert bad == (set() if options else {20, 21})


def test_an_engine_does_not_start_without_the_memory_of_its_tier(
    make_worker: Callable[..., LoneWorker],
) -> None:
    with pytest.raises(ConfigError, match="have to be free"):
        make_worker(memory=1 << 50)


def test_the_ranks_of_a_machine_share_the_memory() -> None:
    config = make_config("/nowhere", memory="8MiB")
    config.parallel_config.local_world_size = 2
    config.parallel_config.data_parallel_size_local = 2
    made = SharedStorageConnector(config, KVConnectorRole.WORKER, make_groups(config))  # type: ignore[arg-type]
    assert made._config.memory_bytes == 2 << 20
    assert "memory 2.0 MiB" in made._config.bounds_told
    made.shutdown()
