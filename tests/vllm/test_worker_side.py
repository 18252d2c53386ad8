"""The worker half: caches it takes, steps it lives through, loads it accounts for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import ConfigError, TransientStorageError, UnsupportedError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers import tiered
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.transfer.staging import StagingPool
from kvshelf.vllm import connector, weight_changes
from kvshelf.vllm.connector import SharedStorageConnector
from kvshelf.vllm.metadata import (
    BY_PARAMETERS,
    AdapterContent,
    LoadFailure,
    LoadOp,
    PrefetchOp,
    StepMetadata,
    StoreOp,
    WorkerMetadata,
)
from kvshelf.vllm.namespace import build_namespace, kv_scales
from kvshelf.vllm.registered_caches import natural_order
from kvshelf.vllm.registration import Registration, State
from kvshelf.vllm.slots import TokenSlots
from kvshelf.vllm.worker import WorkerSide
from kvshelf.weights.fingerprints import weights_fingerprint
from tests.support.prompts import make_tail, prompt
from tests.support.storages import Fault, FaultyBackend, posix
from tests.support.threads import none_can_be_started
from tests.support.waiting import PATIENCE, until, while_patient
from tests.vllm.replay import HEAD_SIZE, HEADS, bind, make_caches, make_config, make_groups

BLOCK, CHUNK, BLOCKS = 4, 8, 64


class Rig:
    """A worker's connector with registered caches."""

    def __init__(
        self,
        backend: FaultyBackend,
        *,
        kernel_block: int = BLOCK,
        config: SimpleNamespace | None = None,
        opened: bool = True,
        **options: Any,
    ) -> None:
        self.backend = backend
        self.config = config or make_config(backend.url, **options)
        ratio = self.config.cache_config.block_size // kernel_block
        self.caches = make_caches(BLOCKS * ratio, kernel_block)
        bind(self.config, self.caches)
        self.connector = SharedStorageConnector(
            self.config, KVConnectorRole.WORKER, make_groups(self.config)
        )
        self.connector.register_kv_caches(self.caches)
        assert self.connector._worker is not None
        self.side: WorkerSide = self.connector._worker
        if opened:
            self.step(StepMetadata(namespace=self.namespace()))

    def namespace(self) -> tuple[bytes, str]:
        caches = self.side._registration.caches
        assert caches is not None
        made: Namespace = build_namespace(
            self.config, self.side._config, [caches.report], "user:test"
        )
        self.fmt = ObjectFormat(made)
        return made.encoded, made.slug

    def step(self, meta: StepMetadata) -> tuple[set[str], set[int], WorkerMetadata | None]:
        """One step, in the order of vLLM's first model runner."""
        worker = self.connector
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        finished, self.failed_requests = results.finished_recving, results.failed_recving
        bad = worker.get_block_ids_with_load_errors()
        reported = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        assert reported is None or isinstance(reported, WorkerMetadata)
        return finished, bad, reported

    def load(self, op: LoadOp) -> tuple[set[str], set[int], WorkerMetadata | None]:
        """Load, which may end in any step, the first one included; return what that step did."""
        meta = StepMetadata(loads=[op])
        for _ in while_patient():
            answer = self.step(meta)
            if answer[0]:
                return answer
            # vLLM makes empty steps while a load runs.
            meta = StepMetadata(idle=True)
        raise AssertionError("the load never ended")

    def chunks(self, count: int, seed: int = 0) -> list[Chunk]:
        return KeyChain(self.fmt.namespace.digest, CHUNK).extend(prompt(count * CHUNK, seed))

    def store(self, chunks: list[Chunk], first_block: int = 1) -> None:
        """Fill blocks with noise and store them."""
        n = CHUNK // self.config.cache_config.block_size
        ops = []
        for i, chunk in enumerate(chunks):
            blocks = [*range(first_block + i * n, first_block + (i + 1) * n)]
            ops.append(StoreOp(chunk, (blocks,), repair=False, age=0.0))
        for cache in self.caches.values():
            cache.view(torch.int16).random_(1, 1000)
        self.step(StepMetadata(stores=ops))
        assert self.side.drain(PATIENCE) == 0

    def rows(self, block: int) -> list[torch.Tensor]:
        """What a (manager) block holds in each layer."""
        caches = self.side._registration.caches
        assert caches is not None
        (slots,) = caches.kinds[FULL].slots
        assert isinstance(slots, TokenSlots)
        ratio = self.config.cache_config.block_size // slots.unit_tokens
        return [c[block * ratio : (block + 1) * ratio].clone() for c in self.caches.values()]

    def same(self, one: int, other: int) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.rows(one), self.rows(other), strict=True))

    def close(self) -> None:
        self.backend.heal()
        self.connector.shutdown()


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyBackend:
    backend = FaultyBackend(posix(tmp_path / "shelf"))
    monkeypatch.setattr(tiered, "open_shelf", lambda url, **_: Shelf(backend))
    connector._logs.clear()
    return backend


@pytest.fixture
def make(backend: FaultyBackend) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(backend, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


# ------------------------------------------------------------------------- caches


def test_layers_come_in_the_order_of_the_model() -> None:
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.1.attn"]
    assert sorted(names, key=natural_order) == names[::-1]


def test_what_a_worker_knows_of_the_namespace(make: Callable[..., Rig]) -> None:
    rig = make(opened=False, window=32)
    _, _, meta = rig.step(StepMetadata())
    assert meta is not None
    (part,) = meta.reports.values()
    assert part.layer_names == tuple(rig.caches)
    assert part.layer_shapes == (f"2,*,{HEADS},{HEAD_SIZE}",) * 2
    assert part.layer_dtypes == ("BF16",) * 2
    assert part.layouts == ("cpu-vec-bf16-b4",) * 2
    assert part.attention == ("sliding",) * 2
    assert part.sliding_windows == (32,) * 2
    assert part.weights == "user:test"
    assert part.disabled_reason == ""


def test_layers_that_share_another_s_cache_are_left_out(backend: FaultyBackend) -> None:
    config = make_config(backend.url, blocks=8)
    layers = config.compilation_config.static_forward_context
    layers["model.layers.2.self_attn.attn"] = SimpleNamespace(
        kv_sharing_target_layer_name="model.layers.1.self_attn.attn"
    )
    made = SharedStorageConnector(config, KVConnectorRole.WORKER)
    caches = make_caches(8, BLOCK)
    bind(config, caches)
    caches["model.layers.2.self_attn.attn"] = caches["model.layers.1.self_attn.attn"]
    made.register_kv_caches(caches)
    assert made._worker is not None
    caches = made._worker._registration.caches
    assert caches is not None
    assert len(caches.report.layer_names) == 2
    made.shutdown()


def _layer(**changes: Any) -> Callable[[SimpleNamespace, dict[str, torch.Tensor]], None]:
    def change(config: SimpleNamespace, caches: dict[str, torch.Tensor]) -> None:
        layer = next(iter(config.compilation_config.static_forward_context.values()))
        for name, value in changes.items():
            target = layer.impl if name == "attn_type" else layer
            setattr(target, name, value)

    return change


def _cache(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def change(config: SimpleNamespace, caches: dict[str, torch.Tensor]) -> None:
        caches.update({name: make(cache) for name, cache in caches.items()})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_layer(attn_type="encoder_only"), "'encoder_only'"),
        (_layer(attn_type="encoder"), "not a function of the tokens before it"),
        (_cache(lambda c: c[:, 0]), "not the one that is bound"),
        (_cache(lambda c: c.clone()), "not the one that is bound"),
    ],
)
def test_caches_that_cannot_be_served_stop_the_start(
    backend: FaultyBackend, change: Callable[..., None], message: str
) -> None:
    config = make_config(backend.url, blocks=8)
    caches = make_caches(8, BLOCK)
    bind(config, caches)
    change(config, caches)
    made = SharedStorageConnector(config, KVConnectorRole.WORKER, make_groups(config))
    with pytest.raises(UnsupportedError, match=message):
        made.register_kv_caches(caches)
    made.shutdown()


@pytest.mark.parametrize(
    "change",
    [
        _layer(impl=object()),
        _layer(head_size=64),
        _layer(kv_cache_dtype="fp8_e4m3"),
        _cache(lambda c: c.view(torch.int16)),
    ],
)
def test_caches_of_which_nothing_can_be_learned_are_opaque(
    backend: FaultyBackend, change: Callable[..., None]
) -> None:
    config = make_config(backend.url, blocks=8)
    caches = make_caches(8, BLOCK)
    bind(config, caches)
    change(config, caches)
    made = SharedStorageConnector(config, KVConnectorRole.WORKER, make_groups(config))
    made.register_kv_caches(caches)
    assert made._worker is not None
    caches = made._worker._registration.caches
    assert caches is not None
    assert all(layout.startswith("opaque-") for layout in caches.report.layouts)
    made.shutdown()


def test_a_layer_that_vllm_does_not_know_stops_the_start(backend: FaultyBackend) -> None:
    config = make_config(backend.url)
    made = SharedStorageConnector(config, KVConnectorRole.WORKER)
    with pytest.raises(UnsupportedError, match=r"layer who\.0"):
        made.register_kv_caches({"who.0": torch.zeros(2, 2, 4, 32)})
    made.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 6, "layout": "native"}, "6 is not a multiple of the block size 4"),
        ({"staging_bytes": 8192}, "set staging_bytes to"),
        ({"shards": 3}, "shards=3 does not divide the model's 2 KV heads"),
    ],
)
@pytest.mark.parametrize("weights", ["test", "content"])
def test_configurations_that_do_not_fit_the_model_stop_the_start(
    backend: FaultyBackend, options: dict[str, Any], message: str, weights: str
) -> None:
    config = make_config(backend.url, blocks=8, weights=weights, **{"chunk_size": 8, **options})
    caches = make_caches(8, BLOCK)
    bind(config, caches)
    made = SharedStorageConnector(config, KVConnectorRole.WORKER, make_groups(config))
    with pytest.raises(ConfigError, match=message):
        made.register_kv_caches(caches)
    made.shutdown()


def test_releases_of_vllm_share_unless_the_layout_is_unknown(
    make: Callable[..., Rig], backend: FaultyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, list[tuple[bytes, str]]] = {"known": [], "unknown": []}
    for version in ("0.32.0", "0.33.0"):
        monkeypatch.setattr("vllm.__version__", version)
        names["known"].append(make().namespace())
        config = make_config(backend.url)
        for layer in config.compilation_config.static_forward_context.values():
            layer.kv_cache_update_bypass = True
        names["unknown"].append(make(config=config).namespace())
    assert names["known"][0] == names["known"][1]
    assert b"opaque-" not in names["known"][0][0]
    assert b"opaque-" in names["unknown"][0][0]
    assert names["unknown"][0] != names["unknown"][1]


def test_caches_in_kernel_blocks(make: Callable[..., Rig]) -> None:
    rig = make(block_size=8, kernel_block=4)
    chunks = rig.chunks(3)
    rig.store(chunks)
    finished, bad, _ = rig.load(LoadOp("r", 0, 24, chunks, ([20, 0, 22],)))
    assert finished == {"r"}
    assert bad == set()
    assert rig.same(1, 20)
    assert rig.same(3, 22)
    assert not rig.same(2, 0)


# ------------------------------------------------------------------------- steps


def test_steps_without_metadata_or_work_are_no_trouble(make: Callable[..., Rig]) -> None:
    made = make().connector
    made.wait_for_save()
    made.start_load_kv(None, attn_metadata=None, request_ids=[])
    made.save_kv_layer("any", torch.zeros(1), None)
    made.wait_for_layer_load("any")
    assert made.get_finished(set()) == (None, None)
    assert made.get_block_ids_with_load_errors() == set()
    made.build_connector_worker_meta()
    made.clear_connector_metadata()
    made.clear_connector_metadata()

    class Foreign(KVConnectorMetadata):
        pass

    made.bind_connector_metadata(Foreign())
    made.wait_for_save()
    made.clear_connector_metadata()


def test_the_part_is_sent_until_the_namespace_comes(make: Callable[..., Rig]) -> None:
    rig = make(opened=False)
    for _ in range(3):
        _, _, meta = rig.step(StepMetadata())
        assert meta is not None
        assert meta.reports
    named = StepMetadata(namespace=rig.namespace())
    _, _, meta = rig.step(named)
    assert meta is not None
    # The scheduler goes on announcing until it hears nothing of parts.
    _, _, meta = rig.step(StepMetadata(namespace=rig.namespace()))
    assert meta == WorkerMetadata()
    assert rig.step(StepMetadata())[2] is None


def test_metadata_of_ranks_is_united() -> None:
    one = WorkerMetadata(reports={0: "a"}, repaired=[(b"x", 0)])  # type: ignore[dict-item]
    two = WorkerMetadata(reports={1: "b"}, repaired=[(b"y", 1)])  # type: ignore[dict-item]
    both = one.aggregate(two)
    assert both.reports == {0: "a", 1: "b"}
    assert both.repaired == [(b"x", 0), (b"y", 1)]


def test_failures_of_ranks_are_united_within_their_cache_group() -> None:
    first, second, third = (LoadFailure("r", index, b"", False) for index in range(3))
    none = WorkerMetadata()
    one, two = WorkerMetadata(failures=([first],)), WorkerMetadata(failures=([second], [third]))
    assert one.aggregate(two).failures == ([first, second], [third])
    assert none.aggregate(one).failures == one.aggregate(none).failures == ([first],)
    assert none.aggregate(none).failures == ()


def test_a_store_and_a_load(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(3)
    rig.store(chunks)
    blocks = [*range(20, 26)]
    finished, bad, meta = rig.load(LoadOp("r", 0, 24, chunks, (blocks,)))
    assert (finished, bad, meta) == ({"r"}, set(), None)
    assert all(rig.same(1 + i, block) for i, block in enumerate(blocks))
    assert rig.side.counters.snapshot()["loaded_tokens"] == 24


def test_a_load_that_begins_and_ends_inside_chunks_touches_its_blocks_only(
    make: Callable[..., Rig],
) -> None:
    rig = make()
    chunks = rig.chunks(3)
    rig.store(chunks)
    before = [rig.rows(block) for block in (20, 25)]
    rig.load(LoadOp("r", 4, 20, chunks, ([*range(20, 26)],)))
    assert all(rig.same(1 + i, 20 + i) for i in range(1, 5))
    for block, rows in zip((20, 25), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(rig.rows(block), rows, strict=True))


def test_null_blocks_are_never_filled_stored_or_reported(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(3)
    rig.store(chunks)
    null = rig.rows(0)
    assert rig.load(LoadOp("r", 0, 24, chunks, ([0, 0, 0, 23, 24, 25],)))[1] == set()
    assert rig.failed_requests == set()
    assert rig.same(4, 23)
    missing = rig.chunks(3, seed=5)
    assert rig.load(LoadOp("s", 0, 24, missing, ([0, 0, 0, 23, 24, 25],)))[1] == {23, 24, 25}
    rig.step(StepMetadata(stores=[StoreOp(missing[0], ([0, 5],), repair=False, age=0.0)]))
    assert rig.side.drain(PATIENCE) == 0
    path = Path(rig.backend.url) / rig.fmt.namespace.folder
    assert not (path / object_name(missing[0], 0, rig.fmt.shards)).exists()
    assert all(torch.equal(a, b) for a, b in zip(rig.rows(0), null, strict=True))


@pytest.mark.parametrize("blocks", [[20, 21, 22, 23, 24, 25], [0, 21, 22, 23, 24, 25]])
@pytest.mark.parametrize("failing", [0, 1, 2, None])
def test_where_a_window_left_blocks_out_a_load_is_good_as_a_whole_or_not_at_all(
    make: Callable[..., Rig], blocks: list[int], failing: int | None
) -> None:
    """What is computed behind a good part would look at blocks that are not there."""
    rig = make()
    chunks = rig.chunks(3)
    rig.store(chunks)
    if failing is not None:
        path = Path(rig.backend.url) / rig.fmt.namespace.folder
        (path / object_name(chunks[failing], 0, rig.fmt.shards)).unlink()
    assert rig.load(LoadOp("r", 0, 24, chunks, (blocks,)))[0] == {"r"}
    assert rig.failed_requests == ({"r"} if failing is not None and 0 in blocks else set())
    assert rig.step(StepMetadata())[0] == rig.failed_requests == set()


@pytest.mark.parametrize("blocks", [[20, 21], [0, 21]])
def test_a_load_that_is_refused_is_useless_where_a_window_left_blocks_out(
    make: Callable[..., Rig], blocks: list[int]
) -> None:
    rig = make()
    rig.step(StepMetadata(loads=[LoadOp("r", 0, 8, [], (blocks,))]))
    assert rig.failed_requests == ({"r"} if 0 in blocks else set())


def test_an_idle_step_waits_for_the_load_a_busy_one_does_not(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(1)
    rig.store(chunks)
    gate = threading.Event()
    rig.backend.add(Fault("read", wait=gate))
    waits: list[float] = []
    assert rig.side._transfer is not None
    poll = rig.side._transfer.poll

    def spy(wait: float = 0.0) -> Any:
        waits.append(wait)
        return poll(wait)

    rig.side._transfer.poll = spy  # type: ignore[method-assign]
    rig.step(StepMetadata(idle=True, loads=[LoadOp("r", 0, 8, chunks, ([20, 21],))]))
    rig.step(StepMetadata(idle=False))
    gate.set()
    assert waits[0] > 0
    assert waits[1] == 0


def test_with_speculative_decoding_saves_come_last(make: Callable[..., Rig]) -> None:
    rig = make()
    (chunk,) = rig.chunks(1)
    worker = rig.connector
    worker.bind_connector_metadata(
        StepMetadata(stores=[StoreOp(chunk, ([1, 2],), repair=False, age=0.0)])
    )
    worker.get_finished(set())
    worker.build_connector_worker_meta()
    worker.wait_for_save()
    worker.clear_connector_metadata()
    assert rig.side.drain(PATIENCE) == 0
    assert rig.side.counters.snapshot()["stored_chunks"] == 1


def test_a_step_that_raised_stores_nothing(make: Callable[..., Rig]) -> None:
    rig = make()
    (chunk,) = rig.chunks(1)
    worker = rig.connector
    worker.bind_connector_metadata(
        StepMetadata(stores=[StoreOp(chunk, ([1, 2],), repair=False, age=0.0)])
    )

    def step() -> None:
        try:
            raise RuntimeError("forward pass")
        finally:
            worker.wait_for_save()

    with pytest.raises(RuntimeError, match="forward pass"):
        step()
    worker.wait_for_save()
    assert rig.side.drain(PATIENCE) == 0
    assert "stored_chunks" not in rig.side.counters.snapshot()


# ------------------------------------------------------------------------- loads that fail


def test_a_failed_load_tells_which_blocks_have_no_kv(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(4)
    rig.store(chunks)
    rig.backend.add(
        Fault("open", f"*{chunks[2].key.hex()}*", error=TransientStorageError(5, "EIO"))
    )
    finished, bad, meta = rig.load(LoadOp("r", 0, 28, chunks, ([*range(20, 28)],)))
    assert finished == {"r"}
    assert bad == {24, 25, 26}
    assert meta is not None
    assert {(f.request_id, f.chunk_index, f.key, f.bad) for f in meta.failures[0]} == {
        ("r", 2, chunks[2].key, False)
    }
    assert all(rig.same(1 + i, 20 + i) for i in range(4))
    assert rig.step(StepMetadata())[1:] == (set(), None)
    assert rig.side.counters.snapshot()["loaded_tokens"] == 16


def test_a_first_chunk_that_fails_spares_the_blocks_before_the_load(
    make: Callable[..., Rig],
) -> None:
    rig = make()
    chunks = rig.chunks(3, seed=5)
    _, bad, meta = rig.load(LoadOp("r", 12, 24, chunks[1:], ([*range(20, 26)],)))
    assert bad == {23, 24, 25}
    assert meta is not None
    assert min(failure.chunk_index for failure in meta.failures[0]) == 1


@pytest.mark.parametrize("chunks", [0, 1, 4])
def test_a_load_that_cannot_be_started_is_reported_failed(
    make: Callable[..., Rig], chunks: int
) -> None:
    rig = make()
    op = LoadOp("r", 0, 24, rig.chunks(chunks), ([*range(20, 26)],))
    finished, bad, meta = rig.step(StepMetadata(loads=[op]))
    assert finished == {"r"}
    assert bad == {*range(20, 26)}
    assert meta is not None
    assert [(f.chunk_index, f.key) for f in meta.failures[0]] == [(0, b"")]
    assert rig.step(StepMetadata())[0] == set()


def test_a_load_before_the_namespace_is_reported_failed(make: Callable[..., Rig]) -> None:
    rig = make(opened=False)
    rig.namespace()
    op = LoadOp("r", 8, 24, rig.chunks(3)[1:], ([*range(20, 26)],))
    finished, bad, meta = rig.step(StepMetadata(loads=[op]))
    assert finished == {"r"}
    assert bad == {22, 23, 24, 25}
    assert meta is not None
    assert [f.chunk_index for f in meta.failures[0]] == [1]


def test_a_cancelled_load_is_finished_and_no_failure(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(2)
    rig.store(chunks)
    gate = threading.Event()
    rig.backend.add(Fault("read", wait=gate))
    rig.step(StepMetadata(loads=[LoadOp("r", 0, 16, chunks, ([*range(20, 24)],))]))
    finished, bad, meta = rig.step(StepMetadata(cancelled=["r", "never heard of"]))
    assert (finished, bad, meta) == ({"r"}, set(), None)
    gate.set()
    assert rig.step(StepMetadata(cancelled=["r"]))[0] == set()


def test_a_repair_is_reported(make: Callable[..., Rig]) -> None:
    rig = make()
    (chunk,) = rig.chunks(1)
    metas = [rig.step(StepMetadata(stores=[StoreOp(chunk, ([1, 2],), repair=True, age=0.0)]))[2]]
    assert rig.side.drain(PATIENCE) == 0
    metas += [rig.step(StepMetadata())[2], rig.step(StepMetadata())[2]]
    assert [key for meta in metas if meta is not None for key in meta.repaired] == [(chunk.key, 0)]


def test_nothing_that_goes_wrong_ends_the_engine(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    chunks = rig.chunks(1)
    assert rig.side._transfer is not None
    monkeypatch.setattr(rig.side._transfer, "store", broken)
    monkeypatch.setattr(rig.side._transfer, "load", broken)
    meta = StepMetadata(
        loads=[LoadOp("r", 0, 8, chunks, ([20, 21],))],
        stores=[StoreOp(chunks[0], ([1, 2],), repair=False, age=0.0)],
    )
    finished, bad, _ = rig.step(meta)
    assert (finished, bad) == ({"r"}, {20, 21})
    for name in ("bind", "start_loads", "save", "finished_loads", "worker_metadata", "clear"):
        monkeypatch.setattr(rig.side, name, broken)
    monkeypatch.setattr(rig.side, "take_bad_blocks", broken)
    for _ in range(2):
        assert rig.step(StepMetadata()) == (set(), set(), None)
    assert caplog.text.count("wait_for_save failed; the engine goes on") == 1


# ------------------------------------------------------------------------- caches that change


def test_caches_may_be_registered_again(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(2)
    rig.store(chunks)
    gate = threading.Event()
    rig.backend.add(Fault("read", wait=gate))
    rig.step(StepMetadata(loads=[LoadOp("r", 0, 16, chunks, ([*range(20, 24)],))]))
    old = rig.caches
    rig.caches = make_caches(BLOCKS, BLOCK)
    bind(rig.config, rig.caches)
    rig.connector.register_kv_caches(rig.caches)
    finished, bad, meta = rig.step(StepMetadata())
    assert finished == {"r"}
    assert bad == {20, 21, 22, 23}
    assert meta is not None
    assert meta.reports
    gate.set()
    rig.backend.heal()
    rig.step(StepMetadata(namespace=rig.namespace()))
    assert rig.load(LoadOp("s", 0, 16, chunks, ([*range(20, 24)],)))[1] == set()
    for name, cache in rig.caches.items():
        assert torch.equal(cache[20:24], old[name][1:5])


def test_a_registration_passes_through_its_states(make: Callable[..., Rig]) -> None:
    rig = make(opened=False)
    registration = rig.side._registration
    assert registration.state is State.REPORTING
    rig.step(StepMetadata(namespace=rig.namespace()))
    assert registration.state is State.SERVING
    rig.connector.register_kv_caches(rig.caches)
    assert registration.state is State.REPORTING
    rig.step(StepMetadata(namespace=rig.namespace()))
    assert registration.state is State.SERVING


def test_a_disabled_worker_refuses_at_once_and_stays_disabled(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(2)
    rig.store(chunks[:1])
    registration = rig.side._registration
    registration.disable("one reason")
    registration.disable("another")
    finished, bad, meta = rig.step(
        StepMetadata(
            loads=[LoadOp("r", 0, 8, chunks[:1], ([20, 21],))],
            stores=[StoreOp(chunks[1], ([3, 4],), repair=False, age=0.0)],
        )
    )
    assert (finished, bad) == ({"r"}, {20, 21})
    assert rig.side.drain(PATIENCE) == 0
    assert rig.side.counters.snapshot()["stored_chunks"] == 1
    for _ in range(2):
        assert meta is not None and meta.reports[0].disabled_reason == "one reason"
        assert registration.state is State.DISABLED
        rig.connector.register_kv_caches(rig.caches)
        _, _, meta = rig.step(StepMetadata())


def test_sleep_hooks_publish_and_go_on(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(1)
    rig.step(StepMetadata(stores=[StoreOp(chunks[0], ([1, 2],), repair=False, age=0.0)]))
    rig.connector.unregister_kv_caches()
    rig.connector.unregister_kv_caches()
    assert rig.side.counters.snapshot()["stored_chunks"] == 1
    rig.connector.restore_kv_caches()
    rig.connector.restore_kv_caches()


@pytest.mark.parametrize("how", ["sleep", "weights"])
@pytest.mark.parametrize("scattered", [True, False])
def test_a_load_that_is_not_reported_before_its_caches_or_weights_go_fails(
    make: Callable[..., Rig], backend: FaultyBackend, how: str, scattered: bool
) -> None:
    rig = make()
    chunks = rig.chunks(2)
    rig.store(chunks)
    gate = threading.Event()
    backend.add(Fault("read", wait=gate))
    gone, kept = [30, 31, 32, 33], [20, 21, 22, 23]
    loads = [LoadOp("gone", 0, 16, chunks, (gone,)), LoadOp("r", 0, 16, chunks, (kept,))]
    transfer = rig.side._transfer
    assert transfer is not None
    assert rig.step(StepMetadata(loads=loads))[0] == set()
    if scattered:
        gate.set()
        until(lambda: len(transfer._finished) == 2)
    if how == "sleep":
        rig.connector.unregister_kv_caches()
        rig.connector.restore_kv_caches()
    else:
        rig.connector.weights_changed()
    gate.set()
    finished, bad, meta = rig.step(StepMetadata(cancelled=["gone"]))
    while finished != {"gone", "r"}:
        more = rig.step(StepMetadata(idle=True))
        finished, bad, meta = finished | more[0], bad | more[1], meta or more[2]
    assert bad >= set(kept)
    assert meta is not None
    assert LoadFailure("r", 0, b"", False) in meta.failures[0]
    # Who has gone needs no blocks.
    assert not bad & set(gone)


# ------------------------------------------------------------------------- weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process started after all files were written."""
    monkeypatch.setattr("kvshelf.vllm.namespace.process_start_time", lambda: 2e12)


def with_model(backend: FaultyBackend, model: Path, **options: Any) -> SimpleNamespace:
    config = make_config(backend.url, weights="content", **options)
    config.model_config.model = str(model)
    config.model_config.revision = config.load_config.download_dir = None
    return config


def wait_for(rig: Rig, field: str) -> str:
    """Step until the worker's part has this field; return it."""
    found: list[str] = []

    def told() -> bool:
        meta = rig.step(StepMetadata())[2]
        value = getattr(meta.reports.get(0), field, None) if meta is not None else None
        if value:
            found.append(value)
        return bool(found)

    until(told)
    return found[0]


@pytest.mark.usefixtures("old_files")
def test_weights_are_named_by_their_content(
    make: Callable[..., Rig], backend: FaultyBackend, model: Path, tmp_path: Path
) -> None:
    names = []
    for content in (b"weights", b"weights", b"other weights"):
        (model / "model.safetensors").write_bytes(content)
        rig = make(config=with_model(backend, model), opened=False)
        names.append(wait_for(rig, "weights"))
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("sha256:")


def test_weights_written_while_the_engine_started_are_not_trusted(
    make: Callable[..., Rig],
    backend: FaultyBackend,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    started = (model / "model.safetensors").stat().st_mtime + 5
    monkeypatch.setattr("kvshelf.vllm.namespace.process_start_time", lambda: started)
    rig = make(config=with_model(backend, model), opened=False)
    assert wait_for(rig, "weights")
    # A file that was moved into place keeps its times, but not that of its last change.
    monkeypatch.setattr("kvshelf.vllm.namespace.process_start_time", lambda: started - 10)
    os.utime(model / "model.safetensors", (0, 0))
    rig = make(config=with_model(backend, model), opened=False)
    assert wait_for(rig, "weights") == BY_PARAMETERS
    assert "was written after the engine began to start" in caplog.text


@pytest.mark.parametrize("depth", ["the folder", "above it"])
def test_weights_behind_a_link_that_was_switched_meanwhile_are_not_trusted(
    make: Callable[..., Rig],
    backend: FaultyBackend,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    depth: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    link = model.parent / "current"
    target, path = (model, link) if depth == "the folder" else (model.parent, link / model.name)
    link.symlink_to(target)
    made = link.lstat().st_ctime
    monkeypatch.setattr("kvshelf.vllm.namespace.process_start_time", lambda: made + 5)
    rig = make(config=with_model(backend, path), opened=False)
    assert wait_for(rig, "weights")
    os.utime(model / "model.safetensors", (0, 0))
    monkeypatch.setattr("kvshelf.vllm.namespace.process_start_time", lambda: made - 5)
    rig = make(config=with_model(backend, path), opened=False)
    assert wait_for(rig, "weights") == BY_PARAMETERS
    assert f"the link {link} was made after the engine began to start" in caplog.text


@pytest.mark.usefixtures("old_files")
def test_weights_of_which_a_part_is_another_models_are_not_named_by_files(
    make: Callable[..., Rig], backend: FaultyBackend, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = with_model(backend, model)
    config.model_config.hf_config = SimpleNamespace(audio_model_id=None, text_model_id="a/b")
    rig = make(config=config, opened=False)
    assert wait_for(rig, "weights") == BY_PARAMETERS
    assert "comes from another model, a/b" in caplog.text


class MiMoAudioTokenizer(torch.nn.Module):
    """Named as the class of vLLM that reads a folder when it is built."""


def loaded_model(model: Path, kind: str) -> torch.nn.Module:
    """A model as vLLM loads it, which reads weights beside the files at the top of its folder."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def source(place: str = str(model), **options: Any) -> DefaultModelLoader.Source:
        return DefaultModelLoader.Source(place, None, **options)

    loaded: Any = torch.nn.Module()
    if kind == "subfolder":
        loaded.secondary_weights = [source(subfolder="encoder")]
    elif kind == "patterns":
        loaded.secondary_weights = [source(allow_patterns_overrides=["encoder/model.safetensors"])]
    elif kind == "own patterns":
        loaded.allow_patterns_overrides = ["[er]*er/*.safetensors"]
    elif kind == "another":
        loaded.secondary_weights = [source("org/encoder")]
    elif kind == "built":
        loaded.audio = MiMoAudioTokenizer()
    return loaded  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns
@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("kind", ["subfolder", "patterns", "own patterns", "built"])
def test_weights_below_the_folder_are_named_by_their_content(
    make: Callable[..., Rig],
    backend: FaultyBackend,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    encoder = model / ("audio_tokenizer" if kind == "built" else "encoder")
    encoder.mkdir()
    config = with_model(backend, model)
    monkeypatch.setattr("kvshelf.vllm.worker.enclosing_model", lambda: loaded_model(model, kind))

    def name() -> str:
        return wait_for(make(config=config, opened=False), "weights")

    # Files that are missing name nothing.
    assert name() == BY_PARAMETERS
    names = []
    for content in (b"encoder", b"encoder", b"other"):
        (encoder / "model.safetensors").write_bytes(content)
        names.append(name())
    assert names[0] == names[1] != names[2]
    assert all(one.startswith("sha256:") for one in names)
    (encoder / "config.json").write_text("{}")
    assert (name() != names[2]) is (kind in ("subfolder", "built"))
    (encoder / "model.safetensors").unlink()
    assert name() == BY_PARAMETERS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM warns
@pytest.mark.usefixtures("old_files")
def test_weights_of_a_model_without_folders_below_keep_their_name(
    make: Callable[..., Rig], backend: FaultyBackend, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for kind in ("plain", "another"):
        monkeypatch.setattr(
            "kvshelf.vllm.worker.enclosing_model",
            lambda kind=kind: loaded_model(model, kind),
        )
        (model / "encoder").mkdir(exist_ok=True)
        (model / "encoder" / "model.safetensors").write_bytes(kind.encode())
        rig = make(config=with_model(backend, model), opened=False)
        names.append(wait_for(rig, "weights"))
    assert names == [weights_fingerprint([model / "model.safetensors"]), BY_PARAMETERS]


@pytest.mark.usefixtures("old_files")
def test_weights_behind_a_link_below_the_folder_that_was_switched_are_not_trusted(
    make: Callable[..., Rig],
    backend: FaultyBackend,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    elsewhere = model.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_bytes(b"encoder")
    (model / "encoder").symlink_to(elsewhere)
    made = (model / "encoder").lstat().st_ctime
    monkeypatch.setattr(
        "kvshelf.vllm.worker.enclosing_model", lambda: loaded_model(model, "subfolder")
    )
    os.utime(elsewhere / "model.safetensors", (0, 0))
    for started, trusted in ((made + 5, True), (made - 5, False)):
        monkeypatch.setattr(
            "kvshelf.vllm.namespace.process_start_time", lambda started=started: started
        )
        rig = make(config=with_model(backend, model), opened=False)
        assert (wait_for(rig, "weights") != BY_PARAMETERS) is trusted
    assert f"the link {model / 'encoder'} was made after the engine began to start" in caplog.text


def test_layers_that_keep_something_beside_kv_are_stored_as_well(
    make: Callable[..., Rig], backend: FaultyBackend
) -> None:
    # As the indexers of DeepSeek's sparse attention: no attention, no heads, no scales.
    config = make_config(backend.url)
    indexer = torch.zeros(BLOCKS, BLOCK, 12, dtype=torch.uint8)
    layers = config.compilation_config.static_forward_context
    layers["model.layers.0.self_attn.indexer.k_cache"] = SimpleNamespace(kv_cache=indexer)
    caches = make_caches(BLOCKS, BLOCK) | {list(layers)[-1]: indexer}
    bind(config, caches)
    connector = SharedStorageConnector(config, KVConnectorRole.WORKER, make_groups(config))
    connector.register_kv_caches(caches)
    caches = connector._worker._registration.caches  # type: ignore[union-attr]
    assert caches is not None
    part = caches.report
    assert sorted(part.head_sizes) == [12, HEAD_SIZE, HEAD_SIZE]
    assert all(layout.startswith("opaque-") for layout in part.layouts)
    connector.shutdown()


def test_scales_are_one_for_a_layer_or_one_for_each_head() -> None:
    layers = {
        "a": SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor([0.25])),
        "b": SimpleNamespace(_k_scale=torch.tensor([1.0, 2.0]), _v_scale=torch.tensor([3.0, 4.0])),
        "indexer": SimpleNamespace(),
    }
    assert kv_scales(layers, layers) == ((0.5, 0.25), ((1.0, 2.0), (3.0, 4.0)), ())
    # A rank with one head.
    scheme = SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"})
    layers["a"].quant_method = SimpleNamespace(quant_config=scheme)
    assert kv_scales(layers, "a") == (((0.5,), (0.25,)),)


def test_a_worker_that_gets_no_thread_tries_again_and_keeps_nothing_twice(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(opened=False)
    until(lambda: rig.side._registration._weights is not None)
    namespace = rig.namespace()
    pools: list[StagingPool] = []
    create = StagingPool.__init__

    def note(pool: StagingPool, *args: Any, **options: Any) -> None:
        pools.append(pool)
        create(pool, *args, **options)

    def loading() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("kvshelf-load")]

    before = len(loading())
    monkeypatch.setattr(StagingPool, "__init__", note)
    with none_can_be_started(monkeypatch, "kvshelf-store", "kvshelf-warm"):
        for _ in range(5):
            rig.step(StepMetadata(namespace=namespace))
    assert not pools
    until(lambda: len(loading()) == before)
    assert "the thread limit is reached" in caplog.text
    rig.step(StepMetadata(namespace=namespace))
    chunks = rig.chunks(2)
    rig.store(chunks)
    assert rig.side.drain(PATIENCE) == 0
    assert not pools


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("meanwhile", ["a problem", "caches"])
def test_what_happens_while_a_namespace_is_made_ready_is_not_lost(
    backend: FaultyBackend, model: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    reached, gate, ended = threading.Event(), threading.Event(), threading.Event()
    make, known = Registration._memory_for, Registration._weights_known

    def slow(registration: Registration, *args: Any) -> Any:
        made = make(registration, *args)
        if threading.current_thread() is not threading.main_thread() and not reached.is_set():
            reached.set()
            assert gate.wait(PATIENCE)
        return made

    def watched(registration: Registration, *args: Any) -> None:
        mine = not reached.is_set()
        known(registration, *args)
        if mine:
            ended.set()

    monkeypatch.setattr(Registration, "_memory_for", slow)
    monkeypatch.setattr(Registration, "_weights_known", watched)
    rig = Rig(backend, config=with_model(backend, model), opened=False)
    try:
        assert reached.wait(PATIENCE)
        if meanwhile == "a problem":
            rig.connector.weights_changed()
            gate.set()
            assert ended.wait(PATIENCE)
            assert "weights_changed()" in rig.side._registration.disabled_reason
        else:
            caches = make_caches(BLOCKS, BLOCK)
            bind(rig.config, caches)
            rig.connector.register_kv_caches(caches)
            registration = rig.side._registration
            until(lambda: registration._weights is not None)
            mine = registration._ready
            assert mine is not None
            gate.set()
            assert ended.wait(PATIENCE)
            assert registration._ready is mine
    finally:
        gate.set()
        rig.connector.shutdown()


# ----------------------------------------------------------- weights that change in place


class FakeWorker:
    """The methods of vLLM's worker that concern weights."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("discard", tags))

    def reload_weights(self, *args: object, **kwargs: object) -> str:
        self.calls.append(("reload_weights", (args, kwargs)))
        return "reloaded"

    def start_weight_update(self) -> None:
        self.calls.append(("start_weight_update", None))

    def start_draft_weight_update(self) -> None:
        self.calls.append(("start_draft_weight_update", None))

    def update_weights(self, update_info: object) -> None:
        self.calls.append(("update_weights", update_info))

    def finish_weight_update(self) -> None:
        self.calls.append(("finish_weight_update", None))

    def reset_weights(self) -> None:
        self.calls.append(("reset_weights", None))


def test_the_methods_that_are_watched_are_vllm_s() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    for name in weight_changes._METHODS:
        assert callable(Worker.__dict__[name]), name
    assert list(signature(Worker.sleep).parameters)[:2] == ["self", "level"]
    assert list(signature(Worker.wake_up).parameters) == ["self", "tags"]
    assert list(signature(Worker.discard).parameters) == ["self", "tags"]


@pytest.mark.parametrize(
    ("use", "changes"),
    [
        (lambda worker: worker.sleep(), False),
        (lambda worker: worker.sleep(1), False),
        (lambda worker: worker.sleep(2), True),
        (lambda worker: worker.sleep(level=2), True),
        (lambda worker: worker.discard(("kv_cache",)), False),
        (lambda worker: worker.discard(tags=("weights", "kv_cache")), True),
        (lambda worker: worker.reload_weights(weights_path="/new"), True),
        (lambda worker: worker.start_weight_update(), True),
        (lambda worker: worker.start_draft_weight_update(), True),
        (lambda worker: worker.update_weights({"names": []}), True),
        (lambda worker: worker.finish_weight_update(), True),
        (lambda worker: worker.reset_weights(), True),
    ],
)
def test_ways_in_which_vllm_changes_weights_are_noticed(
    use: Callable[[FakeWorker], object], changes: bool
) -> None:
    heard: list[str] = []

    class Ear:
        def weights_changed(self, how: str) -> None:
            heard.append(how)
            raise RuntimeError("a bug must not keep vLLM from its work")

        def fall_asleep(self) -> None: ...

        def wake_up(self) -> None: ...

    kind = type("Fresh", (FakeWorker,), dict(FakeWorker.__dict__))
    ear = Ear()
    assert weight_changes.watch(ear, kind)
    assert weight_changes.watch(ear, kind)
    worker = kind()
    use(worker)
    assert len(worker.calls) == 1
    assert len(heard) == changes
    assert kind().reload_weights() == "reloaded"


class Loadable(torch.nn.Linear):
    """A model with vLLM's way to load weights."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.loaded: list[object] = []

    def load_weights(self, weights: object) -> set[str]:
        self.loaded.append(weights)
        return {"weight"}


def test_weights_that_a_worker_extension_loads_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []

    class Ear:
        def weights_changed(self, how: str) -> None:
            heard.append(how)

        def fall_asleep(self) -> None: ...

        def wake_up(self) -> None: ...

    class Loader:
        def __init__(self, model: object) -> None:
            self.model = model

        def load_weights(self, weights: object, *, mapper: object = None) -> object:
            return self.model, weights, mapper

    monkeypatch.setattr(weight_changes, "_listeners", weakref.WeakSet())
    ear, model, other = Ear(), Loadable(), Loadable()
    for _ in range(2):
        weight_changes.watch_loading(ear, model, Loader)
    assert model.load_weights([1]) == {"weight"}
    assert model.loaded == [[1]]
    assert heard == ["load_weights()"]
    # Another model of the same class is not the engine's.
    other.load_weights([2])
    assert len(heard) == 1
    weight_changes.watch(ear, type("Fresh", (FakeWorker,), {}))
    assert Loader("m").load_weights("w", mapper=3) == ("m", "w", 3)
    assert len(heard) == 2


def test_vllm_s_loader_of_weights_is_watched() -> None:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    assert AutoWeightsLoader.__module__ == weight_changes._LOADER_MODULE
    assert callable(AutoWeightsLoader.__dict__["load_weights"])


def test_weights_that_change_in_place_end_loads_and_stores_at_once(
    make: Callable[..., Rig],
) -> None:
    rig = make()
    chunks = rig.chunks(3)
    rig.store(chunks[:2])
    rig.connector.weights_changed()
    # The scheduler does not know yet: what it planned meanwhile is not done.
    rig.step(StepMetadata(stores=[StoreOp(chunks[2], ([9, 10],), repair=False, age=0.0)]))
    assert rig.side.drain(PATIENCE) == 0
    assert rig.side.counters.snapshot()["stored_chunks"] == 2
    before = rig.rows(20)
    finished, bad, meta = rig.step(
        StepMetadata(loads=[LoadOp("r", 0, 16, chunks[:2], ([20, 21, 22, 23],))])
    )
    assert finished == {"r"}
    assert bad == {20, 21, 22, 23}
    assert all(torch.equal(a, b) for a, b in zip(before, rig.rows(20), strict=True))
    assert "weights_changed()" in rig.side._registration.disabled_reason
    # Also for caches that are registered anew.
    rig.connector.register_kv_caches(rig.caches)
    _, _, meta = rig.step(StepMetadata())
    assert meta is not None and "changed in place" in meta.reports[0].disabled_reason


def test_a_worker_of_vllm_tells_the_connector(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Fresh", (FakeWorker,), dict(FakeWorker.__dict__))
    monkeypatch.setitem(sys.modules, weight_changes._MODULE, SimpleNamespace(Worker=kind))
    rig = make()
    kind().sleep(1)
    assert not rig.side._registration.disabled_reason
    kind().sleep(level=2)
    assert "sleep()" in rig.side._registration.disabled_reason
    _, _, meta = rig.step(StepMetadata())
    assert meta is not None and "restart the engine" in meta.reports[0].disabled_reason


def test_random_weights_are_of_use_to_nobody_else(
    make: Callable[..., Rig], backend: FaultyBackend, model: Path
) -> None:
    config = with_model(backend, model)
    config.load_config.load_format = "dummy"
    problem = wait_for(make(config=config, opened=False), "disabled_reason")
    assert "random weights" in problem
    assert "Set `weights`" in problem


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: setattr(config.model_config, "model", "/nowhere/at/all"), "nowhere"),
        (lambda config: setattr(config.model_config, "model", "qwen/Qwen2"), "cache of Hugging"),
        (lambda config: setattr(config.load_config, "load_format", "tensorizer"), "tensorizer"),
        (
            lambda config: setattr(config.model_config, "model_weights", "s3://a-bucket/model"),
            "come from s3://a-bucket/model",
        ),
    ],
)
def test_weights_from_elsewhere_are_named_by_the_loaded_parameters(
    make: Callable[..., Rig],
    backend: FaultyBackend,
    model: Path,
    change: Callable[[SimpleNamespace], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = with_model(backend, model)
    change(config)
    assert wait_for(make(config=config, opened=False), "weights") == BY_PARAMETERS
    assert message in caplog.text


# ------------------------------------------------------------------------- hand-overs


ATTEMPT, OTHER = "a" * 32, "b" * 32


def promised(chunk: Chunk, blocks: list[int] | None = None, **options: Any) -> StoreOp:
    blocks = [1, 2] if blocks is None else blocks
    return StoreOp(chunk, (blocks,), repair=False, age=0.0, attempt=ATTEMPT, **options)


def gave_up(rig: Rig, *attempts: str) -> list[bool]:
    view = Shelf(rig.backend.inner).view(rig.fmt)
    return view.gave_up(list(attempts or (ATTEMPT,)))


def test_what_others_wait_for_is_gathered_and_published_first(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(1) + rig.chunks(1, 1) + rig.chunks(1, 2)
    ops = [StoreOp(chunk, ([1, 2],), repair=False, age=0.0) for chunk in chunks[:2]]
    names: list[str] = []
    gate = threading.Event()
    rig.backend.add(Fault("write", "*.safetensors", wait=gate))
    write = rig.backend.inner.write
    rig.backend.inner.write = lambda name, *args: (names.append(name), write(name, *args))[1]  # type: ignore[method-assign]
    rig.step(StepMetadata(stores=[*ops, promised(chunks[2])]))
    gate.set()
    assert rig.side.drain(PATIENCE) == 0
    keys = [name.rpartition("/")[2][:64] for name in names if name.endswith(".safetensors")]
    assert keys[0] == chunks[2].key.hex()
    assert gave_up(rig) == [False]
    assert rig.side.counters.snapshot().get("promises_broken") is None


def _unserved(rig: Rig, op: StoreOp) -> None:
    rig.side._registration.disable("a test says so")


def _of_other_weights(rig: Rig, op: StoreOp) -> None:
    object.__setattr__(op, "round", 7)


def _without_a_block(rig: Rig, op: StoreOp) -> None:
    object.__setattr__(op, "block_ids", ([0, 2],))


def _of_an_unknown_adapter(rig: Rig, op: StoreOp) -> None:
    object.__setattr__(op, "adapter", AdapterContent(3, b"x" * 32))


def _outside_the_cache(rig: Rig, op: StoreOp) -> None:
    object.__setattr__(op, "block_ids", ([10**6, 2],))


def _onto_a_broken_storage(rig: Rig, op: StoreOp) -> None:
    rig.backend.add(Fault("write", "*.safetensors", error=TransientStorageError("broken")))


@pytest.mark.parametrize(
    "happens",
    [
        _unserved,
        _of_other_weights,
        _without_a_block,
        _of_an_unknown_adapter,
        _outside_the_cache,
        _onto_a_broken_storage,
    ],
)
def test_a_chunk_that_is_not_stored_breaks_its_promise(
    make: Callable[..., Rig], happens: Callable[[Rig, StoreOp], None]
) -> None:
    rig = make()
    (chunk,) = rig.chunks(1)
    op = promised(chunk)
    happens(rig, op)
    rig.step(StepMetadata(stores=[op]))
    until(lambda: gave_up(rig) == [True])
    until(lambda: rig.side.counters.snapshot().get("promises_broken") == 1)


def test_a_forward_pass_that_fails_breaks_promises(make: Callable[..., Rig]) -> None:
    rig = make()
    (chunk,) = rig.chunks(1)
    rig.connector.bind_connector_metadata(StepMetadata(stores=[promised(chunk)]))
    try:
        raise RuntimeError("the forward pass failed")
    except RuntimeError:
        rig.connector.wait_for_save()
    rig.connector.clear_connector_metadata()
    until(lambda: gave_up(rig) == [True])


def test_the_promises_after_an_error_are_broken_too(make: Callable[..., Rig]) -> None:
    rig = make()
    one, two = promised(rig.chunks(1)[0], [10**6, 2]), promised(rig.chunks(1, 1)[0])
    object.__setattr__(two, "attempt", OTHER)
    rig.step(StepMetadata(stores=[one, two]))
    until(lambda: gave_up(rig, ATTEMPT, OTHER) == [True, True])


def test_tails_are_looked_for_from_the_first_hand_over_on(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(2)
    rig.store(chunks[:1])
    walk = rig.side._walk
    assert walk is not None
    assert (walk._keep, walk._view) == (3600.0, None)
    rig.step(StepMetadata(stores=[promised(chunks[1])]))
    assert walk._view is not None
    rig.connector.shutdown()
    assert walk._closed
    without = make(handover_keep_s=0)
    without.store(chunks[:1])
    assert without.side._walk is not None
    assert without.side._walk._keep is None


def test_the_use_of_a_tail_that_is_loaded_is_recorded(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(PosixBackend, "touch", lambda _, name: names.append(name))
    rig = make(cache_tails=True)
    (chunk,), tail = rig.chunks(1), make_tail(rig.fmt)
    rig.store([chunk, tail])
    rig.load(LoadOp("r", 0, CHUNK + tail.tokens, [chunk, tail], ([1, 2, 3],)))
    shards = range(rig.fmt.shards)
    assert rig.side._uses.flush(PATIENCE)
    view = rig.side._shelf().view(rig.fmt)
    assert names == [view.name(ObjectRef(tail, shard)) for shard in shards]


def test_shutting_down_says_which_hand_overs_are_lost(make: Callable[..., Rig]) -> None:
    """Of what is queued and of what is on its way, though the storage does not end a write."""
    rig = make(shutdown_drain_s=1.0)
    gate = threading.Event()
    rig.backend.add(Fault("write", "*.safetensors", wait=gate))
    ops = [promised(rig.chunks(1, seed)[0]) for seed in range(4)]
    attempts = [f"{number:032x}" for number in range(4)]
    for op, attempt in zip(ops, attempts, strict=True):
        object.__setattr__(op, "attempt", attempt)
    ordinary = StoreOp(rig.chunks(1, 9)[0], ([1, 2],), repair=False, age=0.0)
    rig.step(StepMetadata(stores=[ordinary, *ops]))
    rig.connector.shutdown()
    assert gave_up(rig, *attempts) == [True] * 4
    gate.set()
    assert rig.side.counters.snapshot()["promises_broken"] == 4


@pytest.mark.slow
def test_a_worker_that_is_told_to_end_publishes_what_others_wait_for(tmp_path: Path) -> None:
    """A process of its own, which ends as vLLM's workers do."""
    program = Path(__file__).with_name("promises_child.py")
    child = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "shelf")],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout.splitlines()[-1])
    shelf = tmp_path / "shelf"
    found = {path.name[:64] for path in shelf.rglob("*.safetensors")}
    # Each write takes a while: there was time for some of them, the promised ones first.
    assert set(report["promised"]) <= found
    assert not set(report["ordinary"]) <= found
    assert not list(shelf.rglob("gave-up/*"))


# ------------------------------------------------------------------------- the end


def test_shutting_down_publishes_for_a_bounded_time_and_says_what_was_lost(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(shutdown_drain_s=0.05)
    gate = threading.Event()
    rig.backend.add(Fault("write", wait=gate))
    ops = [StoreOp(chunk, ([1, 2],), repair=False, age=0.0) for chunk in rig.chunks(3)]
    rig.step(StepMetadata(stores=ops))
    rig.connector.shutdown()
    gate.set()
    assert "3 chunks were not stored within shutdown_drain_s=0.05 s and are lost" in caplog.text
    rig.connector.shutdown()


def test_shutting_down_publishes_everything_when_there_is_time(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(shutdown_drain_s=PATIENCE)
    chunks = rig.chunks(3)
    ops = [StoreOp(chunk, ([1, 2],), repair=False, age=0.0) for chunk in chunks]
    rig.step(StepMetadata(stores=ops))
    rig.connector.shutdown()
    folder = Path(rig.backend.url) / rig.fmt.namespace.folder
    assert all((folder / object_name(c, 0, rig.fmt.shards)).is_file() for c in chunks)
    assert "lost" not in caplog.text
    assert rig.step(StepMetadata(stores=ops))[0] == set()


# ------------------------------------------------------------------------- requests that wait

TIER = {"max_bytes": 4 << 20}


def forget(rig: Rig, chunks: Sequence[Chunk]) -> None:
    """Remove objects that were just stored from the memory tier."""
    memory = tier_of(rig)
    refs = [ObjectRef(chunk, shard) for chunk in chunks for shard in range(rig.fmt.shards)]
    assert memory.remove(rig.fmt, refs) == len(refs)


def tier_of(rig: Rig) -> MemoryTier:
    memory = rig.side._memory
    assert memory is not None
    return memory


def kept(rig: Rig) -> int:
    """Bytes that are kept for waiting requests, or are in use by loads."""
    return tier_of(rig).stats().pinned_bytes


def test_a_waiting_requests_objects_are_in_memory_when_its_load_comes(
    make: Callable[..., Rig], backend: FaultyBackend
) -> None:
    rig = make(memory_tier=TIER)
    chunks = rig.chunks(4)
    rig.store(chunks)
    forget(rig, chunks)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    objects = 4 * rig.fmt.shards
    count = rig.side.counters.snapshot
    until(lambda: count().get("prefetched_objects", 0) == objects)
    # Nothing that the storage could still do matters to the load.
    backend.add(Fault("open", error=TransientStorageError("broken")))
    blocks = [*range(20, 28)]
    finished, bad, _ = rig.load(LoadOp("r", 0, 4 * CHUNK, chunks, (blocks,)))
    assert (finished, bad) == ({"r"}, set())
    assert all(rig.same(i + 1, block) for i, block in enumerate(blocks))
    # The thread that delivered the last object counts it afterwards.
    until(lambda: count()["memory_tier_loaded_objects"] == objects)
    until(lambda: bool(rig.step(StepMetadata()) and not kept(rig)))


def test_a_waiting_request_that_ends_leaves_no_memory_behind(make: Callable[..., Rig]) -> None:
    rig = make(memory_tier=TIER)
    chunks = rig.chunks(4)
    rig.store(chunks)
    forget(rig, chunks)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks), PrefetchOp("s", chunks[:1])]))
    memory = rig.side._prefetched[FULL]
    until(lambda: memory.kept(chunks) == 4)
    rig.step(StepMetadata(prefetch_ended=["r"]))
    until(lambda: bool(rig.step(StepMetadata()) and memory.kept(chunks) == 1))
    rig.step(StepMetadata(cancelled=["s"]))
    until(lambda: not kept(rig))


def test_when_weights_change_nothing_is_read_ahead_and_its_memory_is_given_back(
    make: Callable[..., Rig], backend: FaultyBackend
) -> None:
    rig = make(memory_tier=TIER)
    chunks = rig.chunks(4)
    rig.store(chunks)
    forget(rig, chunks)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks[:2])]))
    memory, prefetcher = rig.side._prefetched[FULL], rig.side._prefetchers[FULL]
    until(lambda: memory.kept(chunks) == 2)
    gate = threading.Event()
    backend.add(Fault("read", wait=gate))
    rig.step(StepMetadata(prefetches=[PrefetchOp("s", chunks)]))
    rig.connector.weights_changed()
    gate.set()
    rig.step(StepMetadata(prefetches=[PrefetchOp("t", chunks)]))
    until(lambda: bool(rig.step(StepMetadata()) and not prefetcher._users))
    until(lambda: not kept(rig))
    rig.step(StepMetadata(prefetch_ended=["r", "s", "t"]))


def test_a_waiting_request_whose_load_is_refused_leaves_no_memory_behind(
    make: Callable[..., Rig],
) -> None:
    rig = make(memory_tier=TIER)
    chunks = rig.chunks(4)
    rig.store(chunks)
    forget(rig, chunks)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    memory = rig.side._prefetched[FULL]
    until(lambda: memory.kept(chunks) == 4)
    # Its chunks are not known, as when the scheduler's look-up was given up.
    finished, _, _ = rig.step(
        StepMetadata(loads=[LoadOp("r", 0, 4 * CHUNK, [], ([*range(20, 28)],))])
    )
    assert finished == {"r"}
    until(lambda: bool(rig.step(StepMetadata()) and not kept(rig)))


def test_a_waiting_requests_bad_object_is_reported_before_its_load(
    make: Callable[..., Rig], backend: FaultyBackend
) -> None:
    rig = make(memory_tier=TIER)
    chunks = rig.chunks(3)
    rig.store(chunks)
    forget(rig, chunks)
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
    make: Callable[..., Rig], backend: FaultyBackend
) -> None:
    rig = make(memory_tier=TIER)
    chunks = rig.chunks(2)
    rig.store(chunks)
    forget(rig, chunks)
    gate = threading.Event()
    backend.add(Fault("read", wait=gate))
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    assert rig.side._transfer is not None
    assert not rig.side._transfer.loading
    gate.set()


def test_a_near_shelf_takes_no_memory_for_waiting_requests(make: Callable[..., Rig]) -> None:
    rig = make()
    chunks = rig.chunks(2)
    rig.store(chunks)
    rig.step(StepMetadata(prefetches=[PrefetchOp("r", chunks)]))
    assert not rig.side._prefetchers
    assert rig.side.counters.snapshot().get("prefetched_objects", 0) == 0


# ------------------------------------------------------------------------- the memory tier


def test_what_was_stored_is_loaded_from_memory_without_storage_and_staging(
    make: Callable[..., Rig], backend: FaultyBackend
) -> None:
    rig = make(memory_tier=TIER)
    chunks = rig.chunks(3)
    rig.store(chunks)
    backend.add(Fault("open", error=TransientStorageError("broken")))
    pools = [memory.staging for memory in rig.side._registration.memories.values()]
    taken = [
        (pool, pool.acquire_for_load(timeout=0.0)) for pool in pools for _ in range(pool.limit)
    ]
    blocks = [*range(20, 26)]
    finished, bad, _ = rig.load(LoadOp("r", 0, 3 * CHUNK, chunks, (blocks,)))
    assert (finished, bad) == ({"r"}, set())
    assert all(rig.same(i + 1, block) for i, block in enumerate(blocks))
    counts = rig.side.counters.snapshot()
    assert counts["memory_tier_loaded_objects"] == 3 * rig.fmt.shards
    assert counts["memory_tier_stored_objects"] == 3 * rig.fmt.shards
    until(lambda: not kept(rig))
    rig.side.set_gauges()
    gauges = rig.side.counters.take()
    assert gauges["memory_tier_pinned_bytes"] == 0
    assert gauges["memory_tier_used_bytes"] == tier_of(rig).stats().bytes > 0
    for pool, buffer in taken:
        assert buffer is not None
        pool.release(*buffer)


def test_what_was_loaded_is_read_once(make: Callable[..., Rig], backend: FaultyBackend) -> None:
    writer = make()
    chunks = writer.chunks(3)
    writer.store(chunks)
    rig = make(memory_tier=TIER)
    for first in (20, 30):
        blocks = [*range(first, first + 6)]
        op = LoadOp(f"r{first}", 0, 3 * CHUNK, chunks, (blocks,))
        finished, bad, _ = rig.load(op)
        assert (finished, bad) == ({op.request_id}, set())
        backend.add(Fault("open", error=TransientStorageError("broken")))
    assert all(rig.same(20 + i, 30 + i) for i in range(6))
    assert all(
        torch.equal(a, b)
        for i in range(6)
        for a, b in zip(writer.rows(1 + i), rig.rows(20 + i), strict=True)
    )


def test_the_memory_tier_outlives_a_change_of_the_weights(
    make: Callable[..., Rig], backend: FaultyBackend
) -> None:
    rig = make(memory_tier=TIER)
    named, chunks = rig.namespace(), rig.chunks(2)
    rig.store(chunks)
    memory = tier_of(rig)
    record = Namespace.from_bytes(named[0]).record | {"weights": "user:other"}
    rig.step(StepMetadata(namespace=(Namespace(record, "other").encoded, "other")))
    assert rig.side._registration.namespace is not None
    assert rig.side._registration.namespace.encoded != named[0]
    rig.step(StepMetadata(namespace=named))
    assert tier_of(rig) is memory
    backend.add(Fault("open", error=TransientStorageError("broken")))
    blocks = [20, 21, 22, 23]
    finished, bad, _ = rig.load(LoadOp("r", 0, 2 * CHUNK, chunks, (blocks,)))
    assert (finished, bad) == ({"r"}, set())
    assert all(rig.same(i + 1, block) for i, block in enumerate(blocks))


def test_an_engine_does_not_start_without_the_memory_of_its_tier(
    make: Callable[..., Rig],
) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        make(memory_tier={"max_bytes": 1 << 50})
