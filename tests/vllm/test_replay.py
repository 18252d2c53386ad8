"""Adapters, roles, aborts, storages in trouble and other weights in whole engines.

:mod:`tests.vllm.test_engine_machine` draws what else may happen.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")


from kvshelf.format.kinds import DRAFT
from kvshelf.vllm import adapters, connector
from kvshelf.vllm.messages import Outbox
from kvshelf.vllm.metadata import AdapterContent, WorkerFacts, WorkerMetadata
from kvshelf.weights.fingerprints import FingerprintCache
from tests.sim.engine import RUNNERS, Adapters, EngineModel, Start, adapter, make_adapter
from tests.sim.engine_caches import PLAIN, drafter
from tests.sim.engine_sides import namespace_of_drafts
from tests.sim.storage import Fault, FaultyStorage
from tests.support.prompts import prompt
from tests.support.waiting import PATIENCE, until

BLOCK, CHUNK = 4, 8


@pytest.fixture(autouse=True)
def nothing_contained(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No exception of ours was caught at vLLM's door."""
    connector._logs.clear()
    yield
    for record in caplog.get_records("call"):
        assert "the engine goes on" not in record.getMessage()
        assert "could not be planned" not in record.getMessage()


@pytest.fixture
def engine(start_model: Start) -> EngineModel:
    """An engine that keeps no blocks of requests that have ended."""
    return start_model(prefix_caching=False)


def objects(backend: FaultyStorage) -> set[str]:
    return {info.name for info in backend.list() if info.name.endswith(".safetensors")}


# ------------------------------------------------------------------------- adapters


def settle(engine: EngineModel) -> None:
    """Let a request's steps bring the workers' reports to the scheduler and back."""
    engine.run(prompt(3, 99), answer=12)


class Hashing:
    """Counts how often adapters' files are hashed, and holds that up once it is `held`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._digest = adapters.lora_digest
        patch.setattr(adapters, "lora_digest", self)
        self.count = 0
        self.threads: set[threading.Thread] = set()
        self.held = False
        self.gate = threading.Event()

    def __call__(self, *args: Any, **options: Any) -> bytes:
        self.count += 1
        self.threads.add(threading.current_thread())
        assert not self.held or self.gate.wait(PATIENCE)
        return self._digest(*args, **options)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashing]:
    hashing = Hashing(monkeypatch)
    yield hashing
    hashing.gate.set()


def test_adapters_are_told_apart_by_content(start_model: Start, tmp_path: Path) -> None:
    one, two = (make_adapter(tmp_path / name, name) for name in ("one", "two"))
    copy = make_adapter(tmp_path / "copy", "one")
    start_model().run(prompt(20), lora_request=adapter(one))
    assert start_model().run(prompt(20)) == [0]
    assert start_model().run(prompt(20), lora_request=adapter(two)) == [0]
    assert start_model().run(prompt(20), lora_request=adapter(copy, number=7)) == [16]


def test_engines_that_apply_adapters_in_different_ways_share_nothing(
    start_model: Start, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", "a")
    everything: dict[str, Any] = {"target_modules": None, "lora_dtype": torch.bfloat16}
    for lora, found in (
        (everything, [0, 0]),
        (everything | {"max_loras": 4}, [16, 16]),
        (everything | {"target_modules": ["o_proj"]}, [0, 16]),
        (everything | {"lora_dtype": torch.float32}, [0, 16]),
    ):
        engine = start_model(lora=lora, prefix_caching=False)
        first = engine.run(prompt(20), lora_request=adapter(folder))
        assert [*first, *engine.run(prompt(20))] == found
        assert engine.run(prompt(20), lora_request=adapter(folder)) == [16]


def test_what_is_on_its_way_when_other_content_is_loaded_is_not_used(
    start_model: Start, backend: FaultyStorage, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", "before")
    start_model().run(prompt(20), lora_request=adapter(folder))
    engine = start_model(prefix_caching=False)
    engine.add("r", prompt(20), lora_request=adapter(folder))
    loads = backend.hang("read")
    until(lambda: engine.step() is None or engine.is_loading("r"))
    make_adapter(folder, "after, and longer")
    # As an API server does, or a request without a hit.
    engine.worker.adapters.use(adapter(folder))
    loads.set()
    engine.finish()
    assert engine.failed == {"r"}


def test_adapter_that_was_loaded_before_its_files_changed_is_not_stored(
    engine: EngineModel, backend: FaultyStorage, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", "before")
    # As an API server does, ahead of all requests.
    engine.worker.adapters.use(adapter(folder))
    make_adapter(folder, "after, and longer")
    for seed in (0, 0, 1):
        assert engine.run(prompt(20, seed), lora_request=adapter(folder)) == [0]
    assert not objects(backend)


@pytest.mark.parametrize("inplace", [False, True])
def test_adapter_under_the_name_of_another_is_not_stored(
    start_model: Start, backend: FaultyStorage, tmp_path: Path, inplace: bool
) -> None:
    folder = make_adapter(tmp_path / "a", "before")
    engine = start_model()
    early = adapter(folder, lora_name="a", load_inplace=inplace)
    engine.run(prompt(20, shared=16), lora_request=early)
    make_adapter(folder, "after, and longer")
    before = objects(backend)
    late = adapter(folder, number=2, lora_name="a")
    # vLLM takes the first one's KV from its own prefix cache.
    assert engine.run(prompt(40, 1, shared=16), lora_request=late) == [0]
    assert objects(backend) == before
    # vLLM tells of a reset of that cache also where it kept it, beside requests that run.
    engine.connector.reset_cache()
    settle(engine)
    assert engine.run(prompt(40, 2, shared=16), lora_request=late) == [0]
    assert objects(backend) == before


def test_adapter_whose_files_change_while_vllm_reads_them_is_not_stored(
    start_model: Start, backend: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = make_adapter(tmp_path / "a", "before"), Adapters._load_adapter

    def change_and_read(self: Adapters, asked: Any) -> str:
        make_adapter(folder, "after, and longer")
        return read(self, asked)

    monkeypatch.setattr(Adapters, "_load_adapter", change_and_read)
    start_model().run(prompt(20), lora_request=adapter(folder))
    assert not objects(backend)


def test_worker_that_loaded_two_contents_of_an_adapter_agrees_with_neither(tmp_path: Path) -> None:
    asked, loaded = adapter(tmp_path / "a"), adapters.LoadedAdapters(Outbox(WorkerFacts))
    contents = []
    for text in ("before", "after, and longer"):
        stamp, _ = adapters._stamp(str(make_adapter(tmp_path / "a", text)))
        loaded.loaded(asked, stamp)
        contents.append(AdapterContent(asked.lora_int_id, (stamp,)))
    for content in contents:
        assert not loaded.may_store(content)
        assert not loaded.may_load(content)


def test_adapter_whose_files_change_while_they_are_hashed_is_not_stored(
    engine: EngineModel, backend: FaultyStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, digest = make_adapter(tmp_path / "a", "before"), adapters.lora_digest

    def change_and_digest(*arguments: Any, **options: Any) -> bytes:
        make_adapter(folder, "after, and longer")
        return digest(*arguments, **options)

    engine.worker.adapters.use(adapter(folder))
    monkeypatch.setattr(adapters, "lora_digest", change_and_digest)
    engine.run(prompt(20), lora_request=adapter(folder))
    assert not objects(backend)


def test_adapter_loaded_again_is_not_trusted_though_its_files_look_unchanged(
    start_model: Start, tmp_path: Path
) -> None:
    folder, engine = make_adapter(tmp_path / "a", "before"), start_model()
    one, two = (adapter(folder, number=number, lora_name="a") for number in (1, 2))
    engine.run(prompt(20), lora_request=one)
    make_adapter(folder, "other, and longer")
    engine.worker.adapters.use(two)
    make_adapter(folder, "before")
    # No chunk of it is complete, so no worker reports what it has loaded.
    engine.run(prompt(40, 1)[:7], lora_request=two)
    engine.run(prompt(40, 1), lora_request=one)
    assert start_model().run(prompt(40, 1), lora_request=adapter(folder)) == [0]


def test_adapter_counts_that_was_used_while_nothing_was_looked_up(
    start_model: Start, backend: FaultyStorage, tmp_path: Path
) -> None:
    folder, engine = make_adapter(tmp_path / "a", "before"), start_model()
    early = adapter(folder, lora_name="a")
    # Neither looked up nor stored, and in vLLM's prefix cache.
    engine.add("early", prompt(20, shared=16), lora_request=early, resumable=True)
    until(lambda: engine.step() is not None and engine.computed("early") >= 20)
    engine.abort("early")
    make_adapter(folder, "after, and longer")
    late = adapter(folder, number=2, lora_name="a")
    assert engine.run(prompt(40, 1, shared=16), lora_request=late) == [0]
    assert not objects(backend)


def test_adapter_whose_files_cannot_be_read_in_time_delays_no_request(
    start_model: Start,
    backend: FaultyStorage,
    tmp_path: Path,
    hashing: Hashing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashing.held = True
    monkeypatch.setattr(adapters, "_HASHING_SECONDS", 0.05)
    folder = make_adapter(tmp_path / "a", "a")
    engine = start_model(lookup_seconds=0.05, prefix_caching=False)
    for _ in range(2):
        assert engine.run(prompt(20), lora_request=adapter(folder)) == [0]
    assert not objects(backend)
    engine.run(prompt(20))
    assert engine.run(prompt(20)) == [16]
    plain = len(objects(backend))
    hashing.gate.set()

    def stored() -> bool:
        engine.run(prompt(20), lora_request=adapter(folder))
        return len(objects(backend)) == 2 * plain

    until(stored)


def test_one_thread_reads_all_adapters_and_another_goes_on_while_files_hang(
    tmp_path: Path, hashing: Hashing
) -> None:
    digests = adapters.AdapterDigests(FingerprintCache(tmp_path / "fingerprints.json"))
    asked = [adapter(make_adapter(tmp_path / name, name), ord(name)) for name in "abc"]
    for request in asked:
        assert digests.ask(request).result(PATIENCE)
    assert len(hashing.threads) == 1
    hashing.held = True
    hangs, waits = digests.ask(asked[0]), digests.ask(asked[1])
    until(lambda: hashing.count == 4)
    hashing.held = False
    time.sleep(1)
    assert digests.ask(asked[2]).result(PATIENCE)
    assert waits.result(PATIENCE)
    assert digests.ask(asked[0]).result(PATIENCE) is None
    assert len(hashing.threads) == 2
    hashing.gate.set()
    assert hangs.result(PATIENCE)
    digests.close()


def test_files_of_an_adapter_are_hashed_again_only_when_they_change(
    engine: EngineModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashing: Hashing
) -> None:
    folder = make_adapter(tmp_path / "a", "a")
    for count in (1, 2):
        # The clock may not tell these files from later ones yet.
        engine.run(prompt(20, count), lora_request=adapter(folder))
        assert hashing.count == count
    monkeypatch.setattr(adapters, "is_settled", lambda written, now: True)
    for count in range(3, 6):
        engine.run(prompt(20, count), lora_request=adapter(folder))
    assert hashing.count == 3
    make_adapter(folder, "after, and longer")
    assert engine.run(prompt(20), lora_request=adapter(folder)) == [0]
    assert hashing.count == 4


def test_adapter_whose_files_only_get_other_times_stays_trusted(
    start_model: Start, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", "a")
    engine = start_model(prefix_caching=False)
    for when in (1, 2):
        os.utime(folder / "adapter_model.safetensors", (when, when))
        # As after vLLM has evicted it.
        engine.worker.adapters.loaded.clear()
        engine.run(prompt(20, when), lora_request=adapter(folder))
    for when in (1, 2):
        assert engine.run(prompt(20, when), lora_request=adapter(folder)) == [16]


def test_adapter_without_files_is_served_without_the_shelf(
    engine: EngineModel, backend: FaultyStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(3):
        assert engine.run(prompt(20, seed), lora_request=adapter(tmp_path / "no")) == [0]
    assert not objects(backend)
    assert len([r for r in caplog.records if "cannot be read" in r.getMessage()]) == 1
    assert engine.run(prompt(20)) == [0]


# ------------------------------------------------------------------------- roles


@pytest.mark.parametrize("option", [{"role": "kv_consumer"}, {"read_only": True}])
def test_engine_that_may_not_store_loads_and_stores_nothing(
    start_model: Start, backend: FaultyStorage, option: dict[str, Any]
) -> None:
    start_model(role="kv_producer").run(prompt(20))
    before = objects(backend)
    engine = start_model(**option)
    assert engine.run(prompt(20), prompt(20, 1)) == [16, 0]
    assert objects(backend) == before


# ------------------------------------------------------------------------- preemption and aborts


@pytest.mark.parametrize("runner", RUNNERS)
def test_chunks_of_forward_pass_that_raised_are_not_stored(
    start_model: Start, backend: FaultyStorage, runner: str
) -> None:
    engine = start_model(runner=runner)
    engine.add("r", prompt(20))
    engine.forward_error = RuntimeError("the model failed")
    with pytest.raises(RuntimeError, match="the model failed"):
        engine.finish()
    engine.forward_error = None
    engine.drain()
    assert not objects(backend)


# ------------------------------------------------------------------------- trouble


@pytest.mark.parametrize("runner", RUNNERS)
def test_of_a_load_that_is_cut_the_first_chunks_are_kept_and_the_rest_is_computed(
    start_model: Start, backend: FaultyStorage, runner: str
) -> None:
    stored = [prompt(41, seed) for seed in range(4)]
    start_model(runner=runner).run(*stored)
    options: dict[str, Any] = {"admission": "auto", "io_threads": 1, "prefix_caching": False}
    engine = start_model(runner=runner, **options)
    # A token takes 0.1 s: far more than a load of one on a machine that is busy with others.
    engine.side.admission.clock = lambda: 0.1 * sum(end - begin for _, begin, end in engine.written)
    assert engine.run(prompt(41, 100)) == [0]
    for tokens in stored[1:]:
        assert engine.run(tokens) == [40]
    gate = threading.Semaphore(4)
    backend.add(Fault("read", "*.safetensors", wait=gate))
    engine.add("cut", stored[0])
    engine.finish()
    gate.release(1000)
    engine.drain()
    engine.step()
    assert len(engine.loads_of("cut")) == 1
    assert 8 < engine.computed("cut") < 41
    assert engine.run(stored[0]) == [40]


@pytest.mark.parametrize("damaged", range(5))
def test_damaged_chunk_is_computed_only_where_a_window_reaches_it(
    start_model: Start, backend: FaultyStorage, damaged: int
) -> None:
    """vLLM has no blocks for tokens that the window of the token behind a hit does not reach."""
    tokens = prompt(5 * CHUNK + 3)
    groups = [replace(PLAIN[0], kind="window", reach=2 * CHUNK)]
    start_model(groups=groups).run(tokens)
    (path,) = Path(backend.url).rglob(f"*-{damaged}-0of*")
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for _ in range(2):
        # The engine compares all that a step reads with what the model computes.
        start_model(groups=groups).run(tokens)
    # What was computed instead is stored again. A chunk that is not wanted is not even read.
    assert (path.read_bytes() == good) is (damaged >= 3)


@pytest.mark.parametrize(
    ("lost", "told"), [("nothing", []), ("1", [12]), ("3", [24]), ("the drafter", [12])]
)
def test_load_tells_from_which_token_on_it_brought_no_kv_of_the_drafter(
    start_model: Start, backend: FaultyStorage, lost: str, told: list[int]
) -> None:
    writer, reader = (start_model(runner="V1 speculative", drafter=drafter()) for _ in range(2))
    tokens, heard = prompt(41), list[int]()
    # vLLM hits all blocks but the last in its own cache.
    for engine, length in ((writer, 41), (reader, 17)):
        for _ in range(5):
            engine.step()
        engine.run(tokens[:length])
    drafts = namespace_of_drafts(writer.side)
    assert drafts is not None
    for path in Path(backend.url, drafts.folder).rglob(f"*-{lost}-*"):
        path.unlink()
    side = reader.worker.side
    assert side.registration.drafter is not None and side.registration.transfers is not None
    moving = side.registration.transfers.loads[DRAFT]
    # Each step announces the namespace, until all ranks are heard.
    side.registration.open_drafts(drafts.encoded, drafts.slug)
    assert side.registration.transfers.loads[DRAFT] is moving
    if lost == "the drafter":
        side.registration.drafter.disable("a test")

    def deliver(report: WorkerMetadata | None) -> list[WorkerMetadata | None]:
        for _, facts in () if report is None else report.facts.get(0, ()):
            heard.extend(token for _, token in facts.without_drafts)
        return [report]

    reader.deliver = deliver
    assert reader.run(tokens) == [28]
    assert heard == told and not reader.failed
