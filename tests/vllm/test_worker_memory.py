"""The memory tier of a worker, and what it reads ahead of requests that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

import torch

from kvshelf.errors import ConfigError, TransientStorageError
from kvshelf.format.namespace import Namespace
from kvshelf.transfer.staging import StagingPool
from kvshelf.vllm.metadata import (
    LoadFailure,
    LoadOp,
    PrefetchOp,
    StepMetadata,
)
from tests.sim.storage import Fault, FaultyStorage
from tests.support.waiting import until
from tests.vllm.rig import next_number, ordered
from tests.vllm.worker_rig import CHUNK, WorkerRig

# ------------------------------------------------------------------------- requests that wait

TIER = {"max_bytes": 4 << 20}


def kept(rig: WorkerRig) -> float:
    """Bytes that are kept for waiting requests, or are in use by loads."""
    return rig.gauge("memory_tier_pinned_bytes")


def read_ahead(rig: WorkerRig, chunks: int) -> None:
    """Wait until all objects of so many chunks were read for waiting requests."""
    until(lambda: rig.counts.get("prefetched_objects", 0) == chunks * rig.fmt.shards)


def nothing_is_kept(rig: WorkerRig) -> bool:
    rig.step(StepMetadata())
    return not kept(rig)


def same(writer: WorkerRig, block: int, reader: WorkerRig, other: int) -> bool:
    """Whether blocks of two workers hold the same."""
    return all(map(torch.equal, writer.rows(block), reader.rows(other)))


@pytest.fixture
def writer(make_worker: Callable[..., WorkerRig]) -> WorkerRig:
    """An engine that has stored the four chunks of a prompt from its first blocks."""
    rig = make_worker()
    rig.store(rig.chunks(4))
    return rig


@pytest.fixture
def rig(writer: WorkerRig, make_worker: Callable[..., WorkerRig]) -> WorkerRig:
    """Another one, with memory that holds nothing yet."""
    return make_worker(memory_tier=TIER)


def test_a_waiting_requests_objects_are_in_memory_when_its_load_comes(
    writer: WorkerRig, rig: WorkerRig, backend: FaultyStorage
) -> None:
    chunks = rig.chunks(4)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    read_ahead(rig, 4)
    # Nothing that the storage could still do matters to the load.
    backend.add(Fault("open", error=TransientStorageError("broken")))
    blocks = [*range(20, 28)]
    finished, bad, _ = rig.load(LoadOp(next_number(), "r", 0, 4 * CHUNK, chunks, (blocks,)))
    assert (finished, bad) == ({"r"}, set())
    assert all(same(writer, i + 1, rig, block) for i, block in enumerate(blocks))
    # The thread that delivered the last object counts it afterwards.
    until(lambda: rig.counts["memory_tier_loaded_objects"] == 4 * rig.fmt.shards)
    until(lambda: nothing_is_kept(rig))


def test_a_waiting_request_that_ends_leaves_no_memory_behind(rig: WorkerRig) -> None:
    chunks = rig.chunks(4)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks), PrefetchOp("s", chunks[:1])]))
    read_ahead(rig, 4)
    of_all = kept(rig)
    rig.step(ordered(prefetch_ended=["r"]))
    until(lambda: bool(rig.step(StepMetadata()) and kept(rig) == of_all / 4))
    rig.step(ordered(prefetch_ended=["s"]))
    until(lambda: nothing_is_kept(rig))


def test_when_weights_change_nothing_is_read_ahead_and_its_memory_is_given_back(
    rig: WorkerRig, backend: FaultyStorage
) -> None:
    chunks = rig.chunks(4)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks[:2])]))
    read_ahead(rig, 2)
    gate = threading.Event()
    backend.add(Fault("read", wait=gate))
    rig.step(StepMetadata(prefetches=[PrefetchOp("s", chunks)]))
    rig.connector.weights_changed()
    gate.set()
    rig.step(StepMetadata(prefetches=[PrefetchOp("t", chunks)]))
    until(lambda: nothing_is_kept(rig))
    rig.step(ordered(prefetch_ended=["r", "s", "t"]))
    until(lambda: nothing_is_kept(rig))


def test_a_waiting_request_whose_load_is_refused_leaves_no_memory_behind(rig: WorkerRig) -> None:
    chunks = rig.chunks(4)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    read_ahead(rig, 4)
    # Its chunks are not known, as when the scheduler's look-up was given up.
    finished, _, _ = rig.step(
        StepMetadata(loads=[LoadOp(next_number(), "r", 0, 4 * CHUNK, [], ([*range(20, 28)],))])
    )
    assert finished == {"r"}
    until(lambda: nothing_is_kept(rig))


def test_a_waiting_requests_bad_object_is_reported_before_its_load(
    rig: WorkerRig, backend: FaultyStorage
) -> None:
    chunks = rig.chunks(3)
    backend.add(Fault("read", f"*{chunks[1].key.hex()}*", damage=lambda data: data.reverse()))
    found: list[LoadFailure] = []

    def reported() -> bool:
        _, bad, meta = rig.step(StepMetadata())
        assert not bad
        found.extend(meta.failures if meta is not None else ())
        return bool(found)

    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    until(reported)
    assert found[0] == LoadFailure("r", 1, chunks[1].key, True)


def test_a_step_that_computes_nothing_does_not_wait_for_early_reads(
    rig: WorkerRig, backend: FaultyStorage
) -> None:
    gate = threading.Event()
    backend.add(Fault("read", wait=gate))
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", rig.chunks(2))]))
    assert min(rig.seconds(StepMetadata(idle=True)) for _ in range(5)) < 10e-3
    gate.set()


def test_a_low_latency_shelf_takes_no_memory_for_waiting_requests(writer: WorkerRig) -> None:
    writer.step(StepMetadata(prefetches=[PrefetchOp("r", writer.chunks(2))]))
    writer.side.set_gauges()
    assert "memory_tier_used_bytes" not in writer.side.counters.gauges()
    assert "prefetched_objects" not in writer.counts


# ------------------------------------------------------------------------- the memory tier


def test_what_was_stored_is_loaded_from_memory_without_storage_and_staging(
    make_worker: Callable[..., WorkerRig],
    backend: FaultyStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_worker(memory_tier=TIER)
    chunks = rig.chunks(3)
    rig.store(chunks)
    backend.add(Fault("open", error=TransientStorageError("broken")))
    monkeypatch.setattr(StagingPool, "acquire_for_load", lambda *_, **__: None)
    blocks = [*range(20, 26)]
    finished, bad, _ = rig.load(LoadOp(next_number(), "r", 0, 3 * CHUNK, chunks, (blocks,)))
    assert (finished, bad) == ({"r"}, set())
    assert all(rig.same(i + 1, block) for i, block in enumerate(blocks))
    counts = rig.counts
    assert counts["memory_tier_loaded_objects"] == 3 * rig.fmt.shards
    assert counts["memory_tier_stored_objects"] == 3 * rig.fmt.shards
    until(lambda: not kept(rig))
    assert rig.gauge("memory_tier_used_bytes") > 0


def test_what_was_loaded_is_read_once(
    writer: WorkerRig, rig: WorkerRig, backend: FaultyStorage
) -> None:
    chunks = rig.chunks(3)
    for first in (20, 30):
        op = LoadOp(next_number(), f"r{first}", 0, 3 * CHUNK, chunks, ([*range(first, first + 6)],))
        finished, bad, _ = rig.load(op)
        assert (finished, bad) == ({op.request_id}, set())
        backend.add(Fault("open", error=TransientStorageError("broken")))
    assert all(rig.same(20 + i, 30 + i) for i in range(6))
    assert all(same(writer, 1 + i, rig, 20 + i) for i in range(6))


def test_the_memory_tier_outlives_a_change_of_the_weights(
    make_worker: Callable[..., WorkerRig], backend: FaultyStorage
) -> None:
    rig = make_worker(memory_tier=TIER)
    named, chunks = rig.namespace(), rig.chunks(2)
    rig.store(chunks)
    record = Namespace.from_bytes(named[0]).record | {"weights": "user:other"}
    rig.step(StepMetadata(namespace=(Namespace(record, "other").encoded, "other")))
    rig.step(StepMetadata(namespace=named))
    backend.add(Fault("open", error=TransientStorageError("broken")))
    blocks = [20, 21, 22, 23]
    finished, bad, _ = rig.load(LoadOp(next_number(), "r", 0, 2 * CHUNK, chunks, (blocks,)))
    assert (finished, bad) == ({"r"}, set())
    assert all(rig.same(i + 1, block) for i, block in enumerate(blocks))


def test_an_engine_does_not_start_without_the_memory_of_its_tier(
    make_worker: Callable[..., WorkerRig],
) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        make_worker(memory_tier={"max_bytes": 1 << 50})
