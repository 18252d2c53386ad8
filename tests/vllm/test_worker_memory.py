"""The memory tier of a worker, and what it reads ahead of requests that wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvshelf.errors import ConfigError, TransientStorageError
from kvshelf.format.namespace import Namespace
from kvshelf.server.shelf import open_served
from kvshelf.tiers.object_memory import PinningShelf, PinningView
from kvshelf.transfer.staging import StagingPool
from kvshelf.vllm.connector import SharedStorageConnector
from kvshelf.vllm.metadata import (
    LoadFailure,
    LoadOp,
    PrefetchOp,
    StepMetadata,
)
from tests.server.node import LocalServer
from tests.support.storages import Fault, FaultyBackend
from tests.support.waiting import PATIENCE, until
from tests.vllm.replay import make_config, make_groups
from tests.vllm.worker_rig import CHUNK, WorkerRig, store_op

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
    writer: WorkerRig, rig: WorkerRig, backend: FaultyBackend
) -> None:
    chunks = rig.chunks(4)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    read_ahead(rig, 4)
    # Nothing that the storage could still do matters to the load.
    backend.add(Fault("open", error=TransientStorageError("broken")))
    blocks = [*range(20, 28)]
    finished, bad, _ = rig.load(LoadOp("r", 0, 4 * CHUNK, chunks, (blocks,)))
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
    rig.step(StepMetadata(prefetch_ended=["r"]))
    until(lambda: bool(rig.step(StepMetadata()) and kept(rig) == of_all / 4))
    rig.step(StepMetadata(cancelled=["s"]))
    until(lambda: nothing_is_kept(rig))


def test_when_weights_change_nothing_is_read_ahead_and_its_memory_is_given_back(
    rig: WorkerRig, backend: FaultyBackend
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
    rig.step(StepMetadata(prefetch_ended=["r", "s", "t"]))
    until(lambda: nothing_is_kept(rig))


def test_a_waiting_request_whose_load_is_refused_leaves_no_memory_behind(rig: WorkerRig) -> None:
    chunks = rig.chunks(4)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    read_ahead(rig, 4)
    # Its chunks are not known, as when the scheduler's look-up was given up.
    finished, _, _ = rig.step(
        StepMetadata(loads=[LoadOp("r", 0, 4 * CHUNK, [], ([*range(20, 28)],))])
    )
    assert finished == {"r"}
    until(lambda: nothing_is_kept(rig))


def test_a_waiting_requests_bad_object_is_reported_before_its_load(
    rig: WorkerRig, backend: FaultyBackend
) -> None:
    chunks = rig.chunks(3)
    backend.add(Fault("read", f"*{chunks[1].key.hex()}*", damage=lambda data: data.reverse()))
    found: list[LoadFailure] = []

    def reported() -> bool:
        _, bad, meta = rig.step(StepMetadata())
        assert not bad
        for failures in meta.failures if meta is not None else ():
            found.extend(failures)
        return bool(found)

    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    until(reported)
    assert found[0] == LoadFailure("r", 1, chunks[1].key, True)


def test_a_step_that_computes_nothing_does_not_wait_for_early_reads(
    rig: WorkerRig, backend: FaultyBackend
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
    backend: FaultyBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_worker(memory_tier=TIER)
    chunks = rig.chunks(3)
    rig.store(chunks)
    backend.add(Fault("open", error=TransientStorageError("broken")))
    monkeypatch.setattr(StagingPool, "acquire_for_load", lambda *_, **__: None)
    blocks = [*range(20, 26)]
    finished, bad, _ = rig.load(LoadOp("r", 0, 3 * CHUNK, chunks, (blocks,)))
    assert (finished, bad) == ({"r"}, set())
    assert all(rig.same(i + 1, block) for i, block in enumerate(blocks))
    counts = rig.counts
    assert counts["memory_tier_loaded_objects"] == 3 * rig.fmt.shards
    assert counts["memory_tier_stored_objects"] == 3 * rig.fmt.shards
    until(lambda: not kept(rig))
    assert rig.gauge("memory_tier_used_bytes") > 0


def test_what_was_loaded_is_read_once(
    writer: WorkerRig, rig: WorkerRig, backend: FaultyBackend
) -> None:
    chunks = rig.chunks(3)
    for first in (20, 30):
        op = LoadOp(f"r{first}", 0, 3 * CHUNK, chunks, ([*range(first, first + 6)],))
        finished, bad, _ = rig.load(op)
        assert (finished, bad) == ({op.request_id}, set())
        backend.add(Fault("open", error=TransientStorageError("broken")))
    assert all(rig.same(20 + i, 30 + i) for i in range(6))
    assert all(same(writer, 1 + i, rig, 20 + i) for i in range(6))


def test_the_memory_tier_outlives_a_change_of_the_weights(
    make_worker: Callable[..., WorkerRig], backend: FaultyBackend
) -> None:
    rig = make_worker(memory_tier=TIER)
    named, chunks = rig.namespace(), rig.chunks(2)
    rig.store(chunks)
    record = Namespace.from_bytes(named[0]).record | {"weights": "user:other"}
    rig.step(StepMetadata(namespace=(Namespace(record, "other").encoded, "other")))
    rig.step(StepMetadata(namespace=named))
    backend.add(Fault("open", error=TransientStorageError("broken")))
    blocks = [20, 21, 22, 23]
    finished, bad, _ = rig.load(LoadOp("r", 0, 2 * CHUNK, chunks, (blocks,)))
    assert (finished, bad) == ({"r"}, set())
    assert all(rig.same(i + 1, block) for i, block in enumerate(blocks))


def test_an_engine_does_not_start_without_the_memory_of_its_tier(
    make_worker: Callable[..., WorkerRig],
) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        make_worker(memory_tier={"max_bytes": 1 << 50})


# --------------------------------------------------------------------- loads within the step


def test_what_is_pinned_is_in_the_cache_before_the_forward_pass(
    make_worker: Callable[..., WorkerRig], backend: FaultyBackend
) -> None:
    rig = make_worker(memory_tier=TIER)
    chunks = rig.chunks(4)
    rig.store(chunks)
    # No storage is asked.
    backend.add(Fault("open", error=TransientStorageError("broken")))
    pinned = rig.side._pinned
    assert pinned.pin("r", chunks)
    assert kept(rig)
    op = LoadOp("r", 0, 4 * CHUNK, chunks, ([*range(20, 28)],), sync=True)
    meta = StepMetadata(loads=[op])
    rig.connector.bind_connector_metadata(meta)
    rig.connector.start_load_kv(None)
    assert all(rig.same(i + 1, block) for i, block in enumerate(range(20, 28)))
    assert not kept(rig)
    rig.connector.clear_connector_metadata()
    # vLLM does not wait for it, so its end is no news.
    assert rig.step(StepMetadata())[:2] == (set(), set())
    assert rig.counts["sync_loads"] == 1
    assert rig.counts["loaded_tokens"] == 4 * CHUNK


def test_what_is_pinned_at_a_node_server_is_in_the_cache_before_the_forward_pass(
    make_worker: Callable[..., WorkerRig], backend: FaultyBackend, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(LocalServer(tmp_path / "run", Path(backend.url)))
        rig = make_worker(server=node.url)
        chunks = rig.chunks(4)
        rig.store(chunks)
        # As the scheduler's process does it.
        shelf = stack.enter_context(open_served(node.url))
        view = shelf.view(rig.fmt)
        assert isinstance(view, PinningView)
        pinned = view.pin_all(chunks, PATIENCE)
        assert pinned is not None
        assert rig.mapped == pinned.memory
        blocks = [*range(20, 28)]
        op = LoadOp("r", 0, 4 * CHUNK, chunks, (blocks,), sync=True, memory=pinned.memory)
        meta = StepMetadata(loads=[replace(op, offsets=pinned.offsets)])
        rig.connector.bind_connector_metadata(meta)
        rig.connector.start_load_kv(None)
        assert all(rig.same(i + 1, block) for i, block in enumerate(blocks))
        rig.connector.clear_connector_metadata()
        finished, bad, report = rig.step(StepMetadata())
        assert (finished, bad) == (set(), set())
        assert report is not None and report.loaded_now == ["r"]
        assert rig.counts["sync_loads"] == 1
        # What lies elsewhere is not what was pinned.
        finished, bad, report = rig.step(
            StepMetadata(loads=[replace(op, offsets=pinned.offsets[::-1])])
        )
        assert (finished, bad) == (set(), set(blocks))
        pinned.release()
        # A rank that has another server's memory mapped loads nothing, and says so.
        meta = StepMetadata(loads=[replace(op, memory=b"another", offsets=pinned.offsets)])
        finished, bad, report = rig.step(meta)
        assert (finished, bad) == (set(), set(blocks))
        assert report is not None and report.loaded_now == ["r"]


def test_a_rank_whose_weights_change_has_nothing_of_a_node_server_mapped(
    make_worker: Callable[..., WorkerRig], backend: FaultyBackend, tmp_path: Path
) -> None:
    with LocalServer(tmp_path / "run", Path(backend.url)) as node:
        rig = make_worker(server=node.url, model=torch.nn.Linear(2, 2))
        assert rig.mapped
        rig.connector.weights_changed()
        rig.step(StepMetadata())
        assert not rig.mapped


def test_of_a_hit_that_is_not_in_memory_nothing_is_pinned(
    writer: WorkerRig, rig: WorkerRig
) -> None:
    chunks = rig.chunks(4)
    rig.load(LoadOp("r", 0, 3 * CHUNK, chunks[:3], ([*range(20, 26)],)))
    pinned = rig.side._pinned
    assert not pinned.pin("s", chunks)
    assert not kept(rig)
    assert pinned.pin("s", chunks[:3])
    # Asked again, it is pinned once.
    assert pinned.pin("s", chunks[:3])
    pinned.keep_only([])
    assert not kept(rig)


def test_while_weights_change_nothing_is_pinned(make_worker: Callable[..., WorkerRig]) -> None:
    rig = make_worker(memory_tier=TIER, model=torch.nn.Linear(2, 2))
    chunks = rig.chunks(4)
    rig.store(chunks)
    pinned = rig.side._pinned
    assert pinned.pin("r", chunks)
    pinned.keep_only([])
    rig.connector.weights_changed()
    assert not pinned.pin("r", chunks)


def test_a_load_within_the_step_that_fails_names_its_blocks(
    make_worker: Callable[..., WorkerRig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_worker(memory_tier=TIER)
    chunks = rig.chunks(4)
    rig.store(chunks)
    assert rig.side._pinned.pin("r", chunks)
    monkeypatch.setattr(rig.side.loads, "_items", lambda op: {})
    op = LoadOp("r", 0, 4 * CHUNK, chunks, ([*range(20, 28)],), sync=True)
    behind = [store_op(chunk, (40, 41)) for chunk in rig.chunks(3, seed=7)]
    finished, bad, _ = rig.step(StepMetadata(loads=[op], stores=behind[:1]))
    assert not finished
    assert bad == {*range(20, 28)}
    assert not kept(rig)
    # What this step computes may be wrong, and the next one, which vLLM has planned already.
    rig.step(StepMetadata(stores=behind[1:2]))
    rig.step(StepMetadata(stores=behind[2:]))
    rig.drain()
    assert [rig.path(op.chunk).exists() for op in behind] == [False, False, True]


def test_a_worker_that_ends_pins_nothing_more(make_worker: Callable[..., WorkerRig]) -> None:
    rig = make_worker(memory_tier=TIER)
    chunks = rig.chunks(4)
    rig.store(chunks)
    pinned = rig.side._pinned
    assert pinned.pin("r", chunks)
    rig.close()
    assert "r" not in pinned


def test_the_scheduler_reads_a_node_servers_memory_in_place_on_a_gpu_too(
    backend: FaultyBackend, tmp_path: Path
) -> None:
    with LocalServer(tmp_path / "run", Path(backend.url)) as node:
        config = make_config(backend.url, server=node.url)
        config.device_config = SimpleNamespace(device_type="cuda")
        scheduler = SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config))
        with contextlib.closing(scheduler._assembly):
            shelf = scheduler._assembly.shelf()
            assert isinstance(shelf, PinningShelf)
            assert shelf.memory.mapped
