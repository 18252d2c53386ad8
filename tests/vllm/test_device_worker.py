"""Lives of an engine whose caches are on a device: sleep, failures, memory.

:mod:`tests.kv.test_copier` has what each copy does then.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import UnsupportedError
from kvshelf.server import view as node_view
from kvshelf.server.connection import NodeClient
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers import runtime
from kvshelf.vllm import connector
from kvshelf.vllm.connector import SharedStorageConnector
from tests.native.emulation import emulated
from tests.server.node import LocalServer
from tests.sim.device import SimulatedEvent
from tests.sim.engine import DRAFTING, EngineModel, Start
from tests.sim.engine_caches import PLAIN, PagedCaches, guesser, transfer_config, vllm_config
from tests.sim.storage import FaultyStorage, posix
from tests.support.prompts import prompt
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real

RUNNERS = ["V1 on a device", "V2 on a device"]


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def copier(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who gathers and scatters: the kernel, emulated, or what replaces it."""
    with emulated() if request.param == "kernel" else nullcontext():
        yield request.param


@pytest.fixture
def start(backend: FaultyStorage, caplog: pytest.LogCaptureFixture) -> Iterator[Start]:
    engines: list[EngineModel] = []

    def start(runner: str = "V2 on a device", **options: Any) -> EngineModel:
        engines.append(EngineModel(backend.url, runner=runner, prefix_caching=False, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    assert "the engine goes on" not in caplog.text


def run(engine: EngineModel, tokens: list[int], name: str = "") -> int:
    """Run a request to its end; return the tokens that it got from the shelf."""
    name = name or f"{engine.steps}"
    engine.add(name, tokens)
    engine.finish()
    engine.drain()
    return engine.loaded(name)


def computed(engine: EngineModel) -> int:
    """Tokens of its prompt that the request which ran last computed itself."""
    last = engine.written[-1][0]
    return max(end for name, _, end in engine.written if name == last and end <= 41) - min(
        begin for name, begin, _ in engine.written if name == last
    )


def copies(engine: EngineModel) -> int:
    """What the device has done that is not the engine's own work."""
    assert engine.device is not None
    engine.device.finish()
    return sum(name != "engine" for name in engine.device.ran)


def pinned_bytes(engine: EngineModel) -> float:
    """Bytes of the memory for chunks that are in use."""
    side = engine.worker.side
    side.set_gauges()
    return side.counters.gauges()["staging_used_bytes"]


# ------------------------------------------------------------------------- memory


def test_threads_that_load_are_as_many_as_idle_cores_allow(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(**options: Any) -> tuple[int, int]:
        before = threading.enumerate()
        run(start(**options), prompt(41))
        new = [thread.name for thread in threading.enumerate() if thread not in before]
        loads, stores = (
            sum(name.startswith(prefix) for name in new)
            for prefix in ("kvshelf-load", "kvshelf-store")
        )
        return loads, stores

    # One thread more loads what lies in memory.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    assert threads() == (8 + 1, 4)
    assert threads(runner="V1") == (2 + 1, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert threads() == (2 + 1, 1)


@pytest.mark.parametrize("where", ["meta", "two devices"])
def test_caches_elsewhere_stop_the_start(backend: FaultyStorage, where: str) -> None:
    paged = PagedCaches(PLAIN, 8)
    caches = dict(paged.caches)
    for name in list(caches)[where == "two devices" :]:
        caches[name] = caches[name].to("meta")
    paged.bind(caches)
    config = vllm_config(paged.layers, kv_transfer_config=transfer_config(backend.url))
    made = SharedStorageConnector(config, KVConnectorRole.WORKER, paged.config)
    with pytest.raises(UnsupportedError, match="all in host memory or all on one GPU"):
        made.register_kv_caches(caches)
    made.shutdown()


# ------------------------------------------------------------------------- others' loads


def _stored_beside_rdma(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runner: str, seed: int, fills: str
) -> dict[str, bytes]:
    """Objects of a request whose blocks another connector fills, past the engine's stream.

    fills: "never", "after the step" of which vLLM has the output, or "early": while it runs.
    """
    monkeypatch.setattr(
        runtime, "open_shelf", lambda url, **_: Shelf(GuardedBackend(posix(folder)))
    )
    connector._logs.clear()
    engine = EngineModel(str(folder), runner=runner, prefix_caching=False, seed=seed)
    with closing(engine):
        device = engine.device
        assert device is not None
        rdma = device.stream(urgent=False)
        device.let_all_be_as_fast()
        with device.hold():
            # It ends in the step that computes it, so its blocks are free behind that step.
            engine.add("r", prompt(41), 1)
            engine.finish()
            if fills == "after the step":
                assert engine.output is not None
                rdma.wait_event(engine.output)
            if fills != "never":
                with device.use(rdma):
                    # Some time during the engine's work, as far as there is any.
                    for _ in range(seed % 8 * len(device.engine.entries) // 8):
                        device.do(lambda: None)
                    for cache in engine.worker.caches.values():
                        device.do(cache[1:].fill_, 7.0)
        engine.drain()
        device.finish()
        # The engine's own check: others' KV is in its blocks.
        device.problems.clear()
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safetensors")
    }


@pytest.mark.parametrize("seeds", [16, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("runner", ["V1 on a device", "V2 on a device", DRAFTING])
def test_blocks_that_others_fill_past_the_stream_are_gathered_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str, seeds: int
) -> None:
    def stored(name: str, seed: int, fills: str) -> dict[str, bytes]:
        folder = tmp_path / name
        folder.mkdir()
        found = _stored_beside_rdma(folder, monkeypatch, runner, seed, fills)
        shutil.rmtree(folder)
        return found

    good = stored("alone", 0, "never")
    assert len(good) == 10
    wrong = [s for s in range(seeds) if stored(f"{s}", s, "after the step") != good]
    assert not wrong
    # Without vLLM's care objects would be wrong: so it is asked for at the start.
    assert any(stored(f"early {seed}", seed, "early") != good for seed in range(8))


# ------------------------------------------------------------------------- sleep


def poison(engine: EngineModel) -> None:
    """What is in the caches' memory after it was given away."""
    assert engine.device is not None
    engine.device.finish()
    for cache in engine.worker.caches.values():
        cache.view(torch.int16).random_(1, 1000)
        cache[0] = 0


@pytest.mark.parametrize(
    "hooks", ["of the connector", "of the worker", "both", "of the worker, which frees only KV"]
)
def test_while_the_engine_sleeps_nothing_touches_the_caches(
    start: Start, monkeypatch: pytest.MonkeyPatch, hooks: str
) -> None:
    class Worker:
        def sleep(self, level: int = 1) -> None: ...

        def discard(self, tags: tuple[str, ...]) -> None: ...

        def wake_up(self, tags: list[str] | None = None) -> None: ...

    def fall_asleep() -> None:
        if not hooks.startswith("of the worker"):
            engine.worker.connector.unregister_kv_caches()
        if "only KV" in hooks:
            Worker().discard(("kv_cache",))
        elif hooks != "of the connector":
            Worker().sleep()

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=Worker))
    engine = start()
    assert engine.device is not None
    Worker().discard(("something else",))
    with engine.device.hold():
        engine.add("r", prompt(41))
        engine.finish()
        # Its chunks are on their way; their blocks may only go when they have left.
        asleep = threading.Thread(target=fall_asleep)
        asleep.start()
        asleep.join(0.05)
        assert asleep.is_alive()
    asleep.join(PATIENCE)
    assert not asleep.is_alive()
    assert engine.worker.counted["stored_chunks"] == 5
    poison(engine)
    before = len(engine.device.ran)
    Worker().wake_up(["weights"])
    if hooks != "of the connector":
        Worker().wake_up(["kv_cache"])
    if not hooks.startswith("of the worker"):
        engine.worker.connector.restore_kv_caches()
    assert len(engine.device.ran) == before
    assert run(engine, prompt(41)) == 40


def test_caches_that_come_back_elsewhere_are_used_there(start: Start) -> None:
    engine = start()
    run(engine, prompt(41))
    engine.worker.connector.unregister_kv_caches()
    assert engine.device is not None
    engine.device.finish()
    old = engine.worker.caches
    engine.worker.paged.bind({name: torch.zeros_like(cache) for name, cache in old.items()})
    engine.worker.connector.restore_kv_caches()
    for cache in old.values():
        cache.zero_()
    assert run(engine, prompt(41)) == 40
    assert run(engine, prompt(41, 1)) == 0
    assert run(engine, prompt(41, 1)) == 40
    engine.device.finish()
    assert not any(cache.any() for cache in old.values())


def test_gpu_of_a_worker_copies_from_a_node_servers_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[bool, torch.device | None]] = []

    class AskedError(Exception):
        pass

    def opening(client: NodeClient, **options: Any) -> None:
        client.close()
        asked.append((options["in_place"], options["device"]))
        raise AskedError

    def make(role: KVConnectorRole, device: str) -> None:
        served = transfer_config("", server="ipc:///nowhere/node.sock", read_only=True)
        config = vllm_config({}, kv_transfer_config=served)
        config.device_config = SimpleNamespace(device_type=device)
        with pytest.raises(AskedError):
            SharedStorageConnector(config, role, PagedCaches(PLAIN, 8).config)

    monkeypatch.setattr(node_view, "open_served", opening)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for available in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=available: found)
        for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
            make(role, "cuda")
        make(KVConnectorRole.WORKER, "cpu")
    third = torch.device("cuda", 3)
    # Whether loads copy straight from the server's memory, and the GPU that does.
    # A scheduler reads headers alone.
    in_place = [(True, None), (True, None)]
    assert asked == [(False, third), *in_place, (False, None), *in_place]


@pytest.mark.real
def test_node_server_takes_stores_from_the_memory_of_a_worker(tmp_path: Path) -> None:
    with LocalServer(tmp_path / "node", tmp_path / "served") as node:
        engine = EngineModel(
            "", runner="V2 on a device", prefix_caching=False, on="cuda", server=node.url
        )
        assert run(engine, prompt(41)) == 0
        assert node.stat("stored_objects") == 10
        engine.close()


# ------------------------------------------------------------------------- failures


@pytest.mark.parametrize("fault", ["event", "record", "query", "copy", "enqueue"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_after_a_device_failed_the_engine_goes_on_as_with_no_cache(
    start: Start,
    backend: FaultyStorage,
    runner: str,
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start(runner=runner)
    run(engine, prompt(41))
    assert engine.device is not None
    engine.device.faults = {fault}
    # Whether by a load or by a store, it is noticed; and requests end as without a load.
    run(engine, prompt(41))
    assert computed(engine) == 41 or fault == "query"
    run(engine, prompt(41, 1))
    assert computed(engine) == 41
    assert engine.connector.disabled
    engine.device.faults.clear()
    # What was enqueued before it failed may still run.
    engine.device.finish()
    before = {info.name for info in backend.list()}
    ran = copies(engine)
    for seed in range(4):
        assert run(engine, prompt(41, seed)) == 0
    assert {info.name for info in backend.list()} == before
    assert copies(engine) == ran
    lines = [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    assert len(lines) == 1
    assert f"cpu failed: CUDA error: {fault} failed" in lines[0].getMessage()
    assert pinned_bytes(engine) == 0


def test_engine_that_is_shut_down_waits_for_its_copies(
    backend: FaultyStorage,
) -> None:
    engine = EngineModel(backend.url, runner="V2 on a device", prefix_caching=False)
    with closing(engine):
        engine.add("r", prompt(41))
        engine.finish()
        engine.worker.connector.shutdown()
        assert len([i for i in backend.list() if i.name.endswith(".safetensors")]) == 10


@pytest.mark.parametrize("runner", RUNNERS)
def test_load_does_not_wait_for_the_forward_pass_of_its_step(
    start: Start, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    engine = start(runner=runner)
    run(engine, prompt(41))
    device, loads = engine.device, engine.worker.side.loads
    assert device is not None
    gate, begin = SimulatedEvent(device), loads.start

    def begin_behind_the_forward_pass() -> None:
        if loads._planned:
            gate.recorded = 1
            device.engine.wait_event(gate)
        begin()

    monkeypatch.setattr(loads, "start", begin_behind_the_forward_pass)
    engine.add("late", prompt(41))
    try:
        while not gate.recorded:
            engine.step()
        until(lambda: engine.worker.counted["loaded_chunks"] > 0)
    finally:
        with device.changed:
            gate.reached = 1
            device.changed.notify_all()
    engine.finish()
    assert engine.loaded("late") == 40


@pytest.mark.parametrize(("runner", "waits"), [("V2 on a device", False), (DRAFTING, True)])
def test_load_beside_drafts_waits_for_the_forward_pass_of_its_step(
    start: Start, monkeypatch: pytest.MonkeyPatch, runner: str, waits: bool
) -> None:
    engine = start(runner=runner, drafter=guesser(2) if waits else None)
    run(engine, prompt(41))
    loads, fences = engine.worker.side.loads, []
    begin = loads.start

    def noted() -> None:
        if loads._planned:
            fences.append(loads._fences)
        begin()

    monkeypatch.setattr(loads, "start", noted)
    assert run(engine, prompt(41)) == 40
    assert len(fences) == 1
    # Without a mark of its step's beginning it waits for all that is enqueued when it starts.
    assert (not fences[0]) is waits
