"""What a worker keeps in memory, and what it reads ahead of requests that wait."""

from __future__ import annotations

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
from tests.sim.engine_sides import LoneWorker, MakeWorker, next_number
from tests.sim.storage import Fault, FaultyStorage
from tests.support.waiting import until

# ------------------------------------------------------------------------- requests that wait

MEMORY = 4 << 20


def same(writer: LoneWorker, block: int, reader: LoneWorker, other: int) -> bool:
    """Whether blocks of two workers hold the same."""
    return all(map(torch.equal, writer.rows(block), reader.rows(other)))


@pytest.fixture
def writer(make_worker: MakeWorker) -> LoneWorker:
    """An engine that has stored the four chunks of a prompt from its first blocks."""
    rig = make_worker()
    rig.store(rig.chunks(4))
    return rig


@pytest.fixture
def rig(writer: LoneWorker, make_worker: MakeWorker) -> LoneWorker:
    """Another one, with memory that holds nothing yet."""
    return make_worker(memory=MEMORY)


def test_waiting_requests_bad_object_is_reported_before_its_load(
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


def test_chunks_read_ahead_are_pinned_until_the_load_of_their_request_has_ended(
    rig: LoneWorker, writer: LoneWorker
) -> None:
    chunks = rig.chunks(2)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    until(lambda: rig.counts.get("prefetched_objects") == 4)
    assert rig.gauge("memory_tier_pinned_bytes") >= rig.counts["prefetched_bytes"] > 0
    for chunk in chunks:
        rig.path(chunk).unlink()
    _, bad, _ = rig.load(LoadOp(next_number(), "r", 0, 16, chunks, ([20, 21, 22, 23],)))
    assert not bad and all(same(writer, 1 + i, rig, 20 + i) for i in range(4))
    assert rig.counts["memory_tier_loaded_objects"] == 4
    assert rig.gauge("memory_tier_pinned_bytes") == 0


def test_nothing_is_read_ahead_from_a_low_latency_shelf_without_memory_for_it(
    writer: LoneWorker,
) -> None:
    writer.step(StepMetadata(prefetches=[PrefetchOp("r", writer.chunks(2))]))
    assert writer.gauge("memory_tier_used_bytes") == writer.gauge("memory_tier_limit_bytes") == 0
    assert "prefetched_objects" not in writer.counts


# ------------------------------------------------------------------------- what stays in memory


@pytest.mark.parametrize("options", [{"memory": MEMORY}, {}])
def test_chunk_that_a_worker_stored_is_loaded_from_its_memory(
    make_worker: MakeWorker, options: dict[str, int]
) -> None:
    rig = make_worker(**options)
    chunks = rig.chunks(1)
    rig.store(chunks)
    rig.path(chunks[0]).unlink()
    _, bad, _ = rig.load(LoadOp(next_number(), "r", 0, 8, chunks, ([20, 21],)))
    assert rig.same(1, 20) is bool(options)
    assert bad == (set() if options else {20, 21})


def test_engine_without_so_much_free_memory_does_not_start(make_worker: MakeWorker) -> None:
    with pytest.raises(ConfigError, match="have to be free"):
        make_worker(memory=1 << 50)


def test_ranks_of_a_machine_share_the_memory() -> None:
    config = make_config("/nowhere", memory="8MiB")
    config.parallel_config.local_world_size = 2
    config.parallel_config.data_parallel_size_local = 2
    made = SharedStorageConnector(config, KVConnectorRole.WORKER, make_groups(config))  # type: ignore[arg-type]
    assert made._config.memory_bytes == 2 << 20
    assert "memory 2.0 MiB" in made._config.bounds_told
    made.shutdown()
