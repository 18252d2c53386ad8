"""The worker half: caches it takes, steps it lives through, loads it accounts for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvshelf.errors import (
    ConfigError,
    NoSpaceStorageError,
    PermanentStorageError,
    TransientStorageError,
    UnsupportedError,
)
from kvshelf.memory.chunk_memory import ChunkMemory
from kvshelf.tiers import runtime
from kvshelf.vllm.connector import SharedStorageConnector
from kvshelf.vllm.metadata import (
    LoadOp,
    RefusedStore,
    StepMetadata,
    WorkerMetadata,
)
from kvshelf.vllm.worker import side as side_module
from kvshelf.vllm.worker.registered_caches import natural_order
from tests.sim.engine_caches import bind, make_caches, make_config, make_groups
from tests.sim.engine_sides import (
    BLOCK,
    LoneWorker,
    MakeWorker,
    limit_stores,
    next_number,
    ordered,
    store_op,
)
from tests.sim.storage import Fault, FaultyStorage
from tests.support.threads import named, none_can_be_started
from tests.support.waiting import until, while_patient

# ------------------------------------------------------------------------- caches


def test_layers_come_in_the_order_of_the_model() -> None:
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.1.attn"]
    assert sorted(names, key=natural_order) == names[::-1]


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


@contextlib.contextmanager
def registering(
    backend: FaultyStorage, change: Callable[..., None] = lambda *_: None, **options: Any
) -> Iterator[Callable[[], SharedStorageConnector]]:
    """Make a connector; register its caches, which were changed, when the test asks for it."""
    config, caches = make_config(backend.url, blocks=8, **options), make_caches(8, BLOCK)
    bind(config, caches)
    change(config, caches)
    made = SharedStorageConnector(config, KVConnectorRole.WORKER, make_groups(config))

    def register() -> SharedStorageConnector:
        made.register_kv_caches(caches)
        return made

    yield register
    made.shutdown()


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
    backend: FaultyStorage, change: Callable[..., None], message: str
) -> None:
    with registering(backend, change) as register, pytest.raises(UnsupportedError, match=message):
        register()


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
    backend: FaultyStorage, change: Callable[..., None]
) -> None:
    with registering(backend, change) as register:
        meta = register().build_connector_worker_meta()
    assert isinstance(meta, WorkerMetadata)
    assert all(layout.startswith("opaque-") for layout in meta.reports[0].layouts)


def test_layer_that_vllm_does_not_know_stops_the_start(backend: FaultyStorage) -> None:
    config = make_config(backend.url)
    made = SharedStorageConnector(config, KVConnectorRole.WORKER)
    with pytest.raises(UnsupportedError, match=r"layer who\.0"):
        made.register_kv_caches({"who.0": torch.zeros(2, 2, 4, 32)})
    made.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 8192}, "make chunk_size smaller"),
        (
            {"capacity": {"max_bytes": "8KiB"}},
            "max_bytes is 8.0 KiB, and a chunk of this model",
        ),
    ],
)
@pytest.mark.parametrize("weights", ["name:test", "content"])
def test_configurations_that_do_not_fit_the_model_stop_the_start(
    backend: FaultyStorage, options: dict[str, Any], message: str, weights: str
) -> None:
    options = {"chunk_size": 8, "weights": weights, **options}
    with registering(backend, **options) as register, pytest.raises(ConfigError, match=message):
        register()


def test_report_names_how_the_model_scales_queries(make_worker: MakeWorker) -> None:
    # As vLLM builds Llama 4: layers with scaling, and without it.
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(3)))
    for layer, tuned in zip(model, (True, True, False), strict=True):
        layer.attn_temperature_tuning, layer.floor_scale, layer.attn_scale = tuned, 7 + 2 * tuned, 2
    assert make_worker(model=model).report().attention_temperature == ("9.0 2.0",)


@pytest.mark.parametrize(("chunks", "warned"), [(1.9, None), (2, True), (511, True), (512, False)])
def test_bound_below_two_chunks_is_refused_and_below_a_prompt_warned_of(
    rig: LoneWorker,
    make_worker: MakeWorker,
    caplog: pytest.LogCaptureFixture,
    chunks: float,
    warned: bool | None,
) -> None:
    chunk = sum(rig.fmt.object_size(shard) for shard in range(rig.fmt.shards))
    assert rig.config.model_config.max_model_len == 512 * rig.fmt.chunk_size
    options = {"capacity": {"max_bytes": f"{int(chunks * chunk)}B"}}
    if warned is None:
        with pytest.raises(ConfigError, match="for two chunks"):
            make_worker(**options)
        return
    make_worker(**options)
    assert ("a prompt of 4096 tokens (--max-model-len) needs" in caplog.text) is warned


def test_releases_of_vllm_share_unless_the_layout_is_unknown(
    make_worker: MakeWorker, backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, list[tuple[bytes, str]]] = {"known": [], "unknown": []}
    for version in ("0.32.0", "0.33.0"):
        monkeypatch.setattr("vllm.__version__", version)
        names["known"].append(make_worker().namespace())
        config = make_config(backend.url)
        for layer in config.compilation_config.static_forward_context.values():
            layer.kv_cache_update_bypass = True
        names["unknown"].append(make_worker(config=config).namespace())
    assert names["known"][0] == names["known"][1]
    assert b"opaque-" not in names["known"][0][0]
    assert b"opaque-" in names["unknown"][0][0]
    assert names["unknown"][0] != names["unknown"][1]


# ------------------------------------------------------------------------- steps


def test_steps_without_metadata_or_work_are_no_trouble(make_worker: MakeWorker) -> None:
    made = make_worker().connector
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


@pytest.mark.parametrize("blocks", [[20, 21], [0, 21]])
def test_load_that_is_refused_is_useless_where_a_window_left_blocks_out(
    rig: LoneWorker, blocks: list[int]
) -> None:
    rig.step(StepMetadata(loads=[LoadOp(next_number(), "r", 0, 8, [], (blocks,))]))
    assert rig.failed_requests == ({"r"} if 0 in blocks else set())


# ------------------------------------------------------------------------- loads that fail


def test_load_of_another_round_is_not_begun(rig: LoneWorker) -> None:
    chunks = rig.chunks(1)
    rig.store(chunks)
    _, bad, _ = rig.load(LoadOp(next_number(), "r", 0, 8, chunks, ([20, 21],), round=7))
    assert bad == {20, 21}
    assert not rig.same(1, 20)


def test_failed_load_is_told_until_this_rank_is_heard(rig: LoneWorker) -> None:
    rig.load(LoadOp(next_number(), "r", 0, 8, rig.chunks(1), ([20, 21],)))
    for heard, is_told in (({1: 99}, True), ({0: 99}, False)):
        meta = StepMetadata(heard=heard)
        rig.side.bind(meta)
        said = rig.side.worker_metadata()
        rig.side.clear(meta)
        assert bool(said and said.facts) is is_told


def test_worker_tells_when_writes_work_again(rig: LoneWorker) -> None:
    def tells_refused() -> Any:
        return getattr(rig.step(StepMetadata())[2], "writes_refused", None)

    rig.backend.add(Fault("write", error=NoSpaceStorageError("full")))
    rig.store(rig.chunks(1))
    assert [tells_refused(), tells_refused()] == [True, None]
    rig.backend.heal()
    # Half a minute after it refused a write the storage may be asked again.
    time.sleep(31)
    assert tells_refused() is False


@pytest.mark.parametrize(("read_only", "bad"), [(False, True), (True, True), (True, False)])
def test_bad_object_is_counted_where_a_read_only_shelf_keeps_it(
    make_worker: MakeWorker, read_only: bool, bad: bool
) -> None:
    writer = make_worker()
    chunks = writer.chunks(2)
    writer.store(chunks)
    rig = make_worker(read_only=read_only)
    rig.path(chunks[1]).write_bytes(b"no") if bad else rig.path(chunks[1]).unlink()
    op = LoadOp(next_number(), "r", 0, 16, chunks, ([*range(20, 24)],))
    finished, _, meta = rig.step(StepMetadata(loads=[op]))
    while not finished:
        finished, _, meta = rig.step(StepMetadata())
    assert meta is not None and meta.failures == [(chunks[1].key, bad)]
    assert rig.counts.get("unrepaired_objects", 0) == (read_only and bad)


@pytest.mark.parametrize(
    ("error", "starts"),
    [
        (PermanentStorageError(13, "refused"), False),
        (TransientStorageError(), True),
    ],
)
def test_engine_starts_without_its_shelf_where_waiting_may_help(
    make_worker: MakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    starts: bool,
) -> None:
    monkeypatch.setattr(runtime, "open_shelf", mock.Mock(side_effect=error))
    with contextlib.nullcontext() if starts else pytest.raises(PermanentStorageError):
        make_worker(opened=False)
    assert ("until then the engine runs without it" in caplog.text) is starts


def test_cancelled_load_is_finished_and_no_failure(rig: LoneWorker) -> None:
    chunks = rig.chunks(2)
    rig.store(chunks)
    gate = rig.backend.hang("read")
    op = LoadOp(next_number(), "r", 0, 16, chunks, ([*range(20, 24)],))
    rig.step(StepMetadata(loads=[op]))
    finished, bad, meta = rig.step(ordered(cancelled=[op.number, next_number()]))
    assert (finished, bad) == ({"r"}, set())
    assert meta is not None and not meta.failures
    assert not rig.counts.get("loaded_tokens")
    gate.set()
    assert rig.step(ordered(cancelled=[op.number]))[0] == set()


def test_nothing_that_goes_wrong_ends_the_engine(
    rig: LoneWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    for owner, names in {
        rig.side: ("bind", "worker_metadata", "clear"),
        rig.side.loads: ("start", "take_ended"),
        rig.side.stores: ("save",),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, broken)
    for _ in range(2):
        assert rig.step(StepMetadata()) == (set(), set(), None)
    assert caplog.text.count("wait_for_save failed; the engine goes on") == 1


# ------------------------------------------------------------------------- caches that change


def test_caches_are_registered_once(rig: LoneWorker) -> None:
    with pytest.raises(UnsupportedError, match="replaced the KV caches"):
        rig.register()


def test_chunks_in_memory_are_published_before_an_engine_sleeps(
    rig: LoneWorker, backend: FaultyStorage
) -> None:
    chunks = rig.chunks(2)
    backend.add(Fault("write", "*.safetensors", wait=0.1))
    ops = [store_op(chunk) for chunk in chunks]
    rig.step(StepMetadata(stores=ops))
    rig.connector.unregister_kv_caches()
    assert all(rig.path(chunk).exists() for chunk in chunks)


def test_full_chunk_without_memory_is_refused_with_those_behind_it_of_its_request(
    rig: LoneWorker, backend: FaultyStorage
) -> None:
    limit_stores(rig.side, 4)
    chunks, (other,) = rig.chunks(8), rig.chunks(1, seed=1)
    gate = backend.hang("write", "*.safetensors")
    ops = [store_op(chunk, request_id="r") for chunk in chunks]
    _, _, said = rig.step(StepMetadata(stores=[*ops], number=1))
    assert said is not None and said.room == (1, 0)
    assert said.refused == [RefusedStore("r", chunk, "", 0) for chunk in chunks[4:]]
    gate.set()
    rig.drain()
    _, _, said = rig.step(StepMetadata())
    assert said is not None and said.room == (1, 4)
    rig.step(StepMetadata(stores=[store_op(other, request_id="s")], number=2))
    rig.drain()
    assert [rig.path(chunk).exists() for chunk in chunks] == [True] * 4 + [False] * 4
    assert rig.path(other).exists() and "dropped_chunks_staging_full" not in rig.counts


def test_reset_lets_a_worker_store_again_what_it_has_stored(rig: LoneWorker) -> None:
    (chunk,) = rig.chunks(1)
    rig.store([chunk])
    rig.path(chunk).unlink()
    rig.step(ordered(reset=True))
    rig.step(StepMetadata(stores=[store_op(chunk, age=60.0)]))
    rig.drain()
    assert rig.path(chunk).exists()


@pytest.mark.parametrize(
    ("how", "scattered"),
    [
        ("sleep", True),
        ("sleep", False),
        ("weights", True),
        ("weights", False),
        ("comparison", False),
    ],
)
def test_load_that_is_not_reported_before_its_caches_or_weights_go_fails(
    rig: LoneWorker, backend: FaultyStorage, how: str, scattered: bool
) -> None:
    chunks = rig.chunks(2)
    rig.store(chunks)
    gate = backend.hang("read")
    gone, kept = [30, 31, 32, 33], [20, 21, 22, 23]
    loads = [
        LoadOp(next_number(), "gone", 0, 16, chunks, (gone,)),
        LoadOp(next_number(), "r", 0, 16, chunks, (kept,)),
    ]
    assert rig.step(StepMetadata(loads=loads))[0] == set()
    if scattered:
        gate.set()
        until(lambda: rig.counts.get("loaded_chunks") == 4)
    if how == "sleep":
        rig.connector.unregister_kv_caches()
        rig.connector.restore_kv_caches()
    elif how == "weights":
        rig.connector.weights_changed()
    gate.set()
    meta = ordered(cancelled=[loads[0].number])
    if how == "comparison":
        meta.weights_round, meta.namespace = 1, rig.namespace("user:new")
    finished, bad, _ = rig.step(meta)
    for _ in while_patient():
        if finished == {"gone", "r"}:
            break
        more = rig.step(StepMetadata(idle=True))
        finished, bad = finished | more[0], bad | more[1]
    assert bad >= set(kept)
    # Who has gone needs no blocks.
    assert not bad & set(gone)


def test_worker_that_gets_no_thread_tries_again_and_keeps_nothing_twice(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_worker(opened=False)
    assert rig.reported("weights")
    namespace = rig.namespace()
    taken: list[ChunkMemory] = []
    create = ChunkMemory.__init__

    def note(memory: ChunkMemory, *args: Any, **options: Any) -> None:
        taken.append(memory)
        create(memory, *args, **options)

    before = len(named("kvshelf-load"))
    monkeypatch.setattr(ChunkMemory, "__init__", note)
    with none_can_be_started(monkeypatch, "kvshelf-store"):
        for _ in range(5):
            rig.step(StepMetadata(namespace=namespace))
    assert not taken
    until(lambda: len(named("kvshelf-load")) == before)
    assert "the thread limit is reached" in caplog.text
    rig.step(StepMetadata(namespace=namespace))
    chunks = rig.chunks(2)
    rig.store(chunks)
    rig.drain()
    assert not taken


# ------------------------------------------------------------------------- the end


def test_hour_in_which_much_is_stored_and_nothing_loaded_is_told(
    rig: LoneWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store(rig.chunks(2))
    now, hours = time.monotonic, 0.0
    monkeypatch.setattr(side_module.time, "monotonic", lambda: now() + hours * 3600)

    def told(after: float) -> float:
        nonlocal hours
        hours += after
        rig.side.set_gauges()
        return rig.counts.get("hours_without_loads", 0)

    assert told(1.01) == 0, "that was little"
    monkeypatch.setattr(side_module, "_MUCH", 2)
    assert told(1.01) == 0, "and nothing since"
    rig.store(rig.chunks(2, seed=1))
    assert told(0.5) == 0
    assert told(0.51) == 1
    (line,) = [one for one in caplog.messages if "none was loaded" in one]
    assert line.startswith("2 chunks were stored within an hour")
    rig.side.counters.add("loaded_chunks")
    rig.store(rig.chunks(2, seed=2))
    assert told(1.01) == 1
