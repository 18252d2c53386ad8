"""The scheduler half: what it answers, when it stops waiting, and what it refuses."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.aux_output import AuxOutputConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import KVConnectorBlockState

from kvshelf.backends import Deadlines
from kvshelf.config import Config
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.format.keys import KeyChain, MultimodalItem
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.history import Event, Reason
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers import tiered
from kvshelf.vllm import check_vllm_version, connector, scheduler
from kvshelf.vllm.connector import SharedStorageConnector
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.handover import Handover
from kvshelf.vllm.item_ids import CLIENT, CONTENT
from kvshelf.vllm.metadata import (
    LoadFailure,
    StepMetadata,
    WeightsReport,
    WorkerMetadata,
    WorkerReport,
)
from kvshelf.vllm.multiprocess import model_facts
from kvshelf.vllm.namespace import build_namespace, default_shards, kv_scales
from kvshelf.vllm.scheduler import SchedulerSide
from kvshelf.vllm.speculation import METHODS_WITH_KV, METHODS_WITHOUT_KV
from tests.support.prompts import prompt
from tests.support.storages import CountingBackend, Fault, FaultyBackend, posix
from tests.support.threads import none_can_be_started
from tests.support.waiting import PATIENCE, until, while_patient
from tests.vllm.hybrid_specs import cache_config, full
from tests.vllm.replay import (
    HEAD_SIZE,
    HEADS,
    LAYERS,
    Blocks,
    Request,
    image,
    make_config,
    make_groups,
    speculation,
)

BLOCK, CHUNK = 4, 8

PART = WorkerReport(
    layer_names=tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)),
    layer_shapes=(f"2,*,{HEADS},{HEAD_SIZE}",) * LAYERS,
    layer_dtypes=("BF16",) * LAYERS,
    layouts=(f"cpu-vec-bf16-b{BLOCK}",) * LAYERS,
    attention=("full",) * LAYERS,
    head_sizes=(HEAD_SIZE,) * LAYERS,
    sliding_windows=(-1,) * LAYERS,
    weights="user:test",
)


class Side:
    """A scheduler side whose worker has reported, on a shelf with hollow objects."""

    def __init__(
        self,
        root: Path,
        *,
        known: bool = True,
        change: Callable[[SimpleNamespace], None] = lambda config: None,
        history: Any = None,
        **options: Any,
    ) -> None:
        self.faults = FaultyBackend(posix(root))
        self.backend = CountingBackend(self.faults)
        extra = {"lookup_wait_s": PATIENCE, "identity_wait_s": PATIENCE, **options}
        self.config = make_config(str(root), **extra)
        change(self.config)
        found = Config.load(self.config.kv_transfer_config.kv_connector_extra_config)
        self.shelf = Shelf(self.backend, deadlines=replace(Deadlines(), **found.deadlines))
        self.side = SchedulerSide(
            self.config,
            found,
            lambda: self.shelf,
            groups=CacheGroups(self.config, None),
            history=history,
        )
        namespace = build_namespace(self.config, self.side._config, [PART], "user:test")
        self.fmt = ObjectFormat(namespace)
        if known:
            self.side.worker_output(WorkerMetadata(reports={0: PART}))
            self.side.worker_output(WorkerMetadata())

    def put(self, tokens: list[int], count: int | None = None, **options: Any) -> None:
        chain = KeyChain(self.fmt.namespace.digest, CHUNK, **options)
        for chunk in chain.extend(tokens)[:count]:
            for shard in range(self.fmt.shards):
                name = f"{self.fmt.namespace.folder}/{object_name(chunk, shard, self.fmt.shards)}"
                self.backend.write(name, [bytes(self.fmt.object_size(shard))])

    def ask(self, request: Request, computed: int = 0) -> tuple[int, bool]:
        """Ask as vLLM does, step by step, until there is an answer."""
        for _ in while_patient():
            found, asynchronous = self.side.matched_tokens(request, computed)
            if found is not None:
                return found, asynchronous
            self.step()
        raise AssertionError("no answer")

    def step(
        self,
        scheduled: dict[str, tuple[int, int]] | None = None,
        *,
        new: tuple[str, ...] = (),
        blocks: Callable[[str], tuple[list[int], ...]] = lambda _: (list(range(1, 100)),),
        sync_loads: bool = False,
    ) -> StepMetadata:
        """Build a step in which requests compute ``(computed before, scheduled)`` tokens."""
        scheduled = scheduled or {}
        cached = [r for r in scheduled if r not in new]
        return self.side.step_metadata(
            SimpleNamespace(
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=r, num_computed_tokens=scheduled[r][0]) for r in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=cached, num_computed_tokens=[scheduled[r][0] for r in cached]
                ),
                num_scheduled_tokens={r: n for r, (_, n) in scheduled.items()},
                total_num_scheduled_tokens=sum(n for _, n in scheduled.values()),
                has_sync_kv_loads=sync_loads,
                kv_connector_block_state=KVConnectorBlockState(set(scheduled), blocks, {}),
            )
        )

    def close(self) -> None:
        self.faults.heal()
        self.side.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Side]]:
    sides: list[Side] = []

    def make(**options: Any) -> Side:
        sides.append(Side(tmp_path / "shelf", **options))
        return sides[-1]

    yield make
    for side in sides:
        side.close()


# ------------------------------------------------------------------------- answers


@pytest.mark.parametrize("loads", [False, True])
def test_a_prompt_that_another_connector_transfers_is_only_stored(
    make: Callable[..., Side], loads: bool
) -> None:
    """Beside NixlConnector, in either order: with a hit of one chunk the rest would be computed."""
    side = make(load_transferred=loads)
    side.side._others_transfer = not loads
    tokens = prompt(41)
    side.put(tokens, 1)
    handed = Handover(side.fmt.namespace.digest, 40, bytes(32), 0, "0" * 32).params()
    params = {"do_remote_prefill": True, "remote_engine_id": "p", **handed}
    request = Request("r", tokens, kv_transfer_params=params)
    side.side.new_request(request)
    if loads:
        assert side.ask(request) == (8, True)
        return
    assert side.side.matched_tokens(request, 0) == (0, False)
    assert not any(name.startswith("handovers") for name in side.side.counters.snapshot())
    lookup = side.side._requests["r"].lookup
    assert lookup is not None and lookup.wait(PATIENCE)
    assert [op.chunk.index for op in side.step({"r": (0, 41)}, new=("r",)).stores] == [1, 2, 3, 4]
    # The other connector could not fetch it, and says so: then what is on the shelf counts.
    failed = {"do_remote_prefill": False, "remote_engine_id": "p"}
    assert side.ask(Request("s", tokens, kv_transfer_params=failed)) == (8, True)


@pytest.mark.parametrize(
    ("children", "transfers"),
    [
        (["NixlConnector", "SharedStorageConnector"], True),
        (["SharedStorageConnector", "MooncakeConnector"], True),
        (["SharedStorageConnector", "OffloadingConnector"], False),
    ],
)
def test_a_connector_beside_this_one_that_transfers_prompts_is_noticed(
    tmp_path: Path, children: list[str], transfers: bool
) -> None:
    config = make_config(str(tmp_path))
    config.kv_transfer_config.kv_connector = "SharedStorageConnector"
    names = [{"kv_connector": name, "kv_role": "kv_both"} for name in children]
    parent = {"kv_role": "kv_both", "kv_connector_extra_config": {"connectors": names}}
    made = MultiConnector("recompute", config, **parent).child
    assert made._as_scheduler()._others_transfer is transfers
    made.shutdown()


def test_a_request_that_waits_finds_what_was_stored_meanwhile(make: Callable[..., Side]) -> None:
    side = make()
    tokens = prompt(41)
    request = Request("r", tokens)
    side.side.new_request(request)
    lookup = side.side._requests["r"].lookup
    assert lookup is not None and lookup.wait(PATIENCE)
    side.put(tokens)
    chain = KeyChain(side.fmt.namespace.digest, CHUNK)
    side.side.worker_output(WorkerMetadata(published=[c.key for c in chain.extend(tokens)]))
    assert side.ask(request) == (40, True)
    # It has all of its prompt: no step looks again.
    side.backend.counts.clear()
    for _ in range(3):
        assert side.ask(request) == (40, True)
    assert not side.backend.counts


def test_an_old_answer_is_looked_for_again_and_seldom(make: Callable[..., Side]) -> None:
    """What other engines store is announced by nobody."""
    side = make()
    tokens = prompt(41)
    request = Request("r", tokens)
    side.side.new_request(request)
    assert side.ask(request) == (0, False)
    side.put(tokens, 2)
    assert side.ask(request) == (0, False)
    state = side.side._requests["r"]

    def older(seconds: float) -> None:
        assert state.lookup is not None
        state.lookup.as_of -= seconds

    older(1.5)
    assert side.ask(request) == (16, True)
    side.put(tokens)
    older(1.5)
    # The next time it takes twice as long.
    assert side.ask(request) == (16, True)
    older(1.5)
    assert side.ask(request) == (40, True)


def test_a_request_that_looks_again_has_its_old_answer_when_the_storage_hangs(
    make: Callable[..., Side],
) -> None:
    side = make(lookup_wait_s=0.05)
    tokens = prompt(41)
    side.put(tokens, 2)
    request = Request("r", tokens)
    side.side.new_request(request)
    assert side.ask(request) == (16, True)
    lookup = side.side._requests["r"].lookup
    assert lookup is not None
    lookup.as_of -= 2
    gate = threading.Event()
    side.faults.add(Fault("stat", wait=gate))
    assert side.ask(request) == (16, True)
    gate.set()


def test_after_a_reset_the_first_requests_of_a_long_queue_have_keys_again(
    make: Callable[..., Side],
) -> None:
    side = make()
    side.side.worker_output(WorkerMetadata(weights={0: WeightsReport(0, "aa", None)}))
    for number in range(300):
        side.side.new_request(Request(str(number), prompt(41, number)))

    def looked_up() -> list[str]:
        return [name for name, one in side.side._requests.items() if one.lookup is not None]

    first = looked_up()
    assert len(first) == scheduler._LOOKUPS_AHEAD
    side.side.reset()
    assert not looked_up()
    # The weights are compared, and are the same.
    side.side.worker_output(WorkerMetadata(weights={0: WeightsReport(1, "aa", "aa")}))
    assert looked_up() == first


def test_of_a_long_queue_the_first_requests_have_keys(make: Callable[..., Side]) -> None:
    side = make()
    for number in range(1000):
        side.side.new_request(Request(str(number), prompt(41, number)))

    def looked_up() -> list[str]:
        return [name for name, one in side.side._requests.items() if one.lookup is not None]

    assert looked_up() == [str(n) for n in range(scheduler._LOOKUPS_AHEAD)]
    # They are admitted or end, and others are next.
    side.step({"0": (0, 41), "1": (0, 41)}, new=("0", "1"))
    side.side.finished("2")
    side.step()
    first = scheduler._LOOKUPS_AHEAD
    assert looked_up()[-3:] == [str(first), str(first + 1), str(first + 2)]
    # One that vLLM asks for out of order.
    assert side.ask(side.side._requests["900"].request) == (0, False)
    for number in range(1000):
        side.side.finished(str(number))
    assert not side.side._looked_up
    assert not side.side._not_looked_up


def test_the_answer_is_remembered_and_always_the_same(make: Callable[..., Side]) -> None:
    side = make()
    tokens = prompt(33)
    side.put(tokens, 3)
    request = Request("r", tokens)
    side.side.new_request(request)
    assert side.ask(request) == (24, True)
    side.backend.counts.clear()
    for _ in range(5):
        # Allocation failed: vLLM asks again in every step.
        assert side.side.matched_tokens(request, 0) == (24, True)
        side.step()
    # The local cache may have grown meanwhile.
    assert side.side.matched_tokens(request, 8) == (16, True)
    assert side.side.matched_tokens(request, 24) == (0, False)
    assert side.side.matched_tokens(request, 28) == (0, False)
    assert not side.backend.counts
    assert side.side.counters.snapshot()["lookups"] == 1


def test_a_request_that_was_not_announced_is_answered(make: Callable[..., Side]) -> None:
    side = make()
    side.put(prompt(16))
    assert side.ask(Request("r", prompt(16))) == (12, True)


@pytest.mark.parametrize("length", range(8, 40))
def test_hits_end_at_blocks_and_leave_a_token(make: Callable[..., Side], length: int) -> None:
    side = make()
    side.put(prompt(length))
    found, asynchronous = side.ask(Request("r", prompt(length)))
    assert found < length
    assert found % BLOCK == 0
    assert found >= min(length // CHUNK * CHUNK, length - BLOCK)
    assert asynchronous == (found > 0)


def test_what_vllm_does_not_take_is_no_load(make: Callable[..., Side]) -> None:
    side = make()
    side.put(prompt(20))
    request = Request("r", prompt(20))
    assert side.ask(request) == (16, True)
    # Another connector loads, prompt log probabilities were asked for, …
    side.side.allocated(request, ([1, 2, 3, 4, 5],), 0)
    assert side.step().loads == []
    assert side.side.matched_tokens(request, 0) == (16, True)


def test_a_load_names_tokens_chunks_and_blocks(make: Callable[..., Side]) -> None:
    side = make()
    side.put(prompt(40))
    request = Request("r", prompt(40))
    assert side.ask(request, 12) == (24, True)
    side.side.allocated(request, ([*range(1, 11)],), 24)
    (load,) = side.step().loads
    assert (load.request_id, load.start, load.end) == ("r", 12, 36)
    assert [chunk.index for chunk in load.chunks] == [1, 2, 3, 4]
    assert load.block_ids == ([*range(1, 11)],)
    assert side.step().loads == []


def test_a_load_that_vllm_cut_is_planned_as_cut(make: Callable[..., Side]) -> None:
    side = make()
    side.put(prompt(40))
    request = Request("r", prompt(40))
    assert side.ask(request) == (36, True)
    side.side.allocated(request, ([*range(1, 11)],), 16)
    (load,) = side.step().loads
    assert (load.start, load.end, len(load.chunks)) == (0, 16, 2)


@pytest.mark.parametrize("why", ["the request", "the engine"])
def test_what_vllm_would_not_use_is_not_offered_held_or_counted_but_stored(
    make: Callable[..., Side], why: str
) -> None:
    def change(config: SimpleNamespace) -> None:
        # As in vllm/config/aux_output.py.
        config.aux_output_config = SimpleNamespace(enabled=why == "the engine")

    side = make(change=change, memory_tier={"max_bytes": 1 << 20})
    side.put(prompt(40), 3)
    gate = threading.Event()
    side.faults.add(Fault("stat", wait=gate))
    request = Request("r", prompt(40), skip_reading_prefix_cache=why == "the request")
    side.side.new_request(request)
    for _ in range(3):
        assert side.side.matched_tokens(request, 0) == (0, False)
        assert side.step().prefetches == []
    gate.set()
    lookup = side.side._requests["r"].lookup
    assert lookup is not None
    assert lookup.wait(PATIENCE)
    assert side.side.matched_tokens(request, 0) == (0, False)
    for _ in range(3):
        assert side.step().prefetches == []
    assert side.side.counters.snapshot().get("hit_tokens", 0) == 0
    meta = side.step({"r": (0, 40)}, new=("r",))
    assert [op.chunk.index for op in meta.stores] == [3, 4]
    # Nor after a preemption.
    request.num_preemptions = 1
    assert side.side.matched_tokens(request, 0) == (0, False)
    assert side.step().prefetches == []


def test_no_request_waits_for_a_namespace_that_it_does_not_need(make: Callable[..., Side]) -> None:
    side = make(known=False)
    request = Request("r", prompt(40), skip_reading_prefix_cache=True)
    side.side.new_request(request)
    assert side.side.matched_tokens(request, 0) == (0, False)
    other = Request("s", prompt(40))
    assert side.side.matched_tokens(other, 0) == (None, False)


# ------------------------------------------------------------------------- failed loads


def test_a_failed_load_is_not_offered_again(make: Callable[..., Side]) -> None:
    side = make()
    tokens = prompt(40)
    side.put(tokens)
    request = Request("r", tokens)
    assert side.ask(request) == (36, True)
    side.side.allocated(request, ([*range(1, 11)],), 36)
    side.step()
    chunk = side.side._requests["r"].lookup.chain.chunks[0]  # type: ignore[union-attr]
    side.side.worker_output(WorkerMetadata(failures=([LoadFailure("r", 0, chunk.key, False)],)))
    side.side.loads_done({"r"})
    assert side.side.matched_tokens(request, 0) == (0, False)
    # Another request does not run into the same hole either.
    assert side.ask(Request("s", tokens)) == (0, False)
    side.side.finished("r")
    # When it is admitted anew the hole is still known, and what comes before it is used.
    request.num_preemptions = 1
    assert side.ask(request) == (0, False)


def test_a_load_of_which_nothing_is_known_is_not_offered_again(make: Callable[..., Side]) -> None:
    side = make()
    side.put(prompt(40))
    request = Request("r", prompt(40))
    assert side.ask(request) == (36, True)
    side.side.allocated(request, ([*range(1, 11)],), 36)
    side.side.loads_done({"r"})
    assert side.side.matched_tokens(request, 0) == (0, False)
    request.num_preemptions += 1
    assert side.ask(request) == (36, True)


def test_the_rest_of_a_truncated_hit_is_used_after_preemption(make: Callable[..., Side]) -> None:
    side = make()
    side.put(prompt(40))
    request = Request("r", prompt(40))
    assert side.ask(request) == (36, True)
    side.side.allocated(request, ([*range(1, 11)],), 36)
    side.side.worker_output(WorkerMetadata(failures=([LoadFailure("r", 2, b"k" * 32, True)],)))
    side.side.loads_done({"r"})
    request.num_preemptions += 1
    assert side.ask(request) == (16, True)


def test_bad_objects_are_repaired_by_the_next_store(make: Callable[..., Side]) -> None:
    side = make()
    side.put(prompt(40))
    request = Request("r", prompt(40))
    side.side.new_request(request)
    side.ask(request)
    keys = [chunk.key for chunk in side.side._requests["r"].lookup.chain.chunks]  # type: ignore[union-attr]
    side.side.worker_output(
        WorkerMetadata(
            failures=([LoadFailure("r", 1, keys[1], True), LoadFailure("r", 3, keys[3], False)],)
        )
    )
    meta = side.step({"r": (0, 40)}, new=("r",))
    assert [(op.chunk.index, op.repair) for op in meta.stores] == [(1, True), (3, False)]
    assert side.ask(Request("s", prompt(40))) == (8, True)
    side.side.worker_output(WorkerMetadata(repaired=[(keys[1], 0), (keys[3], 0)]))
    assert side.ask(Request("t", prompt(40))) == (36, True)


def test_a_hole_is_stored_though_it_is_long_until_it_is_computed(
    make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make()
    side.put(prompt(40))
    request = Request("r", prompt(40))
    side.ask(request)
    key = side.side._requests["r"].lookup.chain.chunks[2].key  # type: ignore[union-attr]
    side.side.worker_output(WorkerMetadata(failures=([LoadFailure("r", 2, key, False)],)))
    side.side._failed.clear()
    meta = side.step({"r": (16, 24)})
    assert [op.chunk.index for op in meta.stores] == [2]


def test_vllm_49176_a_request_that_is_asked_again_and_again_is_not_loaded_for_ever(
    make: Callable[..., Side],
) -> None:
    side = make()
    tokens = prompt(40)
    side.put(tokens)
    request = Request("r", tokens)
    offers = []
    for _ in range(20):
        found, _ = side.ask(request)
        offers.append(found)
        if found:
            side.side.allocated(request, ([*range(1, 11)],), found)
            side.step()
            # The last chunk of what was offered could not be loaded, and whatever comes, the
            # first is still there: vLLM asks again, and again after each preemption.
            index = -(-found // CHUNK) - 1
            failure = LoadFailure("r", index, b"", False)
            side.side.worker_output(WorkerMetadata(failures=([failure],)))
            side.side.loads_done({"r"})
            assert side.side.matched_tokens(request, 0) == (0, False)
        request.num_preemptions += 1
    assert offers[:6] == [36, 32, 24, 16, 8, 0]
    assert not any(offers[6:])


def test_while_the_storage_rests_nobody_waits_and_nothing_is_found(
    make: Callable[..., Side],
) -> None:
    side = make()
    side.put(prompt(40))
    assert side.ask(Request("r", prompt(40))) == (36, True)
    side.shelf.backend.reads.trip("broken")
    request = Request("s", prompt(40))
    side.side.new_request(request)
    assert side.side.matched_tokens(request, 0) == (0, False)
    assert side.side.matched_tokens(request, 0) == (0, False)
    assert side.side.counters.snapshot()["skipped_lookups"] == 1
    # The keys are known all the same, for stores once it is well.
    lookup = side.side._requests["s"].lookup
    assert lookup is not None
    assert lookup.wait(PATIENCE)
    side.shelf.backend.reads.close()
    meta = side.step({"s": (0, 40)}, new=("s",))
    assert [op.chunk.index for op in meta.stores] == [0, 1, 2, 3, 4]
    assert side.ask(Request("t", prompt(40))) == (36, True)


def test_while_a_worker_rests_nothing_is_offered(
    make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make()
    side.put(prompt(40))
    side.step()
    side.side.worker_output(WorkerMetadata(breaker_open={0: True, 1: False}))
    assert side.ask(Request("r", prompt(40))) == (0, False)
    side.side.worker_output(WorkerMetadata(breaker_open={0: False}))
    assert side.ask(Request("s", prompt(40))) == (36, True)
    # An engine without steps hears nothing of its workers.
    side.side.worker_output(WorkerMetadata(breaker_open={0: True}))
    monkeypatch.setattr("kvshelf.vllm.scheduler._STALE_SECONDS", 0.0)
    assert side.ask(Request("t", prompt(40))) == (36, True)


def test_a_look_up_that_hangs_is_made_again_for_the_keys(make: Callable[..., Side]) -> None:
    side = make(probe_deadline_s=0.3)
    side.put(prompt(40))
    gate = threading.Event()
    side.faults.add(Fault("stat", wait=gate, times=1))
    request = Request("r", prompt(40, 1))
    side.side.new_request(request)
    assert side.ask(request) == (0, False)
    assert side.side.counters.snapshot()["lookup_timeouts"] == 1
    assert not side.step({"r": (0, 16)}, new=("r",)).stores
    lookup = side.side._requests["r"].lookup
    assert lookup is not None
    assert lookup.wait(PATIENCE)
    meta = side.step({"r": (16, 16)})
    assert [op.chunk.index for op in meta.stores] == [0, 1, 2, 3]
    gate.set()


# ------------------------------------------------------------------------- history


class Notes:
    """What a history was told."""

    def __init__(self) -> None:
        self.events: list[tuple[Event, bytes, int, int]] = []
        self.header: dict[str, Any] = {}

    def note(self, event: Event, key: bytes, *, chunk: int, detail: int) -> None:
        self.events.append((event, key, chunk, detail))

    def describe(self, **header: Any) -> None:
        self.header |= header


def test_the_chunk_that_ends_a_hit_is_noted_once(make: Callable[..., Side]) -> None:
    notes = Notes()
    side = make(history=notes)
    tokens = prompt(40)
    chunks = KeyChain(side.fmt.namespace.digest, CHUNK).extend(tokens)
    side.put(tokens, 3)
    request = Request("r", tokens)
    assert side.ask(request) == (24, True)
    assert side.ask(request) == (24, True)
    side.side.finished("r")
    assert notes.events == [(Event.MISSED, chunks[3].key, 3, Reason.ABSENT)]
    assert notes.header["namespace"] == side.fmt.namespace.folder
    assert Namespace(notes.header["record"]) == side.fmt.namespace
    notes.events.clear()
    # vLLM has the chunk that is missing; or all is there.
    assert side.ask(Request("s", tokens), 32) == (0, False)
    side.put(tokens)
    assert side.ask(Request("t", tokens)) == (36, True)
    assert not notes.events
    failure = LoadFailure("t", 2, chunks[2].key, True)
    side.side.worker_output(WorkerMetadata(failures=([failure],)))
    assert side.ask(Request("u", tokens)) == (16, True)
    assert notes.events == [(Event.MISSED, chunks[2].key, 2, Reason.FAILED_BEFORE)]


@pytest.mark.parametrize("reason", [Reason.UNAVAILABLE, Reason.TIMED_OUT, Reason.STARTING])
def test_a_request_that_is_computed_without_an_answer_is_noted(
    make: Callable[..., Side], reason: Reason
) -> None:
    notes = Notes()
    starting = reason is Reason.STARTING
    side = make(
        history=notes,
        known=not starting,
        identity_wait_s=0.0 if starting else PATIENCE,
        probe_deadline_s=0.3 if reason is Reason.TIMED_OUT else PATIENCE,
    )
    tokens = prompt(44)
    chunks = KeyChain(side.fmt.namespace.digest, CHUNK).extend(tokens)
    side.put(tokens)
    gate = threading.Event()
    if reason is Reason.UNAVAILABLE:
        side.shelf.backend.reads.trip("broken")
    elif reason is Reason.TIMED_OUT:
        side.faults.add(Fault("stat", wait=gate, times=1))
    request = Request("r", tokens)
    side.side.new_request(request)
    assert side.ask(request) == (0, False)
    if starting:
        side.side.worker_output(WorkerMetadata(reports={0: PART}))
        side.side.worker_output(WorkerMetadata())
    side.step({"r": (0, 20)}, new=("r",))
    lookup = side.side._requests["r"].lookup
    assert lookup is not None
    assert lookup.wait(PATIENCE)
    gate.set()
    side.side.finished("r")
    assert notes.events == [(Event.NOT_LOADED, chunks[4].key, 4, reason)]


# ------------------------------------------------------------------------- stores


def test_only_chunks_that_the_step_completes_are_stored_and_only_once(
    make: Callable[..., Side],
) -> None:
    side = make()
    request = Request("r", prompt(30))
    side.side.new_request(request)
    assert side.ask(request) == (0, False)
    assert [op.chunk.index for op in side.step({"r": (0, 7)}, new=("r",)).stores] == []
    assert [op.chunk.index for op in side.step({"r": (7, 12)}).stores] == [0, 1]
    meta = side.step({"r": (19, 11)})
    assert [op.chunk.index for op in meta.stores] == [2]
    assert meta.stores[0].block_ids == ([5, 6],)
    assert side.step({"r": (30, 1)}).stores == []


@pytest.mark.parametrize("second_runner", [False, True])
def test_a_resumed_request_stores_what_it_had_not_stored(
    make: Callable[..., Side], second_runner: bool
) -> None:
    side = make()
    request = Request("r", prompt(30))
    side.side.new_request(request)
    side.ask(request)
    assert len(side.step({"r": (0, 17)}, new=("r",)).stores) == 2
    request.num_preemptions = 1
    side.step()
    assert side.ask(request) == (0, False)
    new = ("r",) if second_runner else ()
    meta = side.step({"r": (0, 30)}, new=new, blocks=lambda _: ([*range(50, 60)],))
    assert [op.chunk.index for op in meta.stores] == [2]
    assert meta.stores[0].block_ids == ([54, 55],)


def test_drafts_and_samples_in_flight_are_not_stored(make: Callable[..., Side]) -> None:
    side = make(save_decode=True)
    request = Request("r", prompt(14))
    side.side.new_request(request)
    side.ask(request)
    assert [op.chunk.index for op in side.step({"r": (0, 14)}, new=("r",)).stores] == [0]
    # 1 sampled token and 5 drafts: 20 slots are written, 15 tokens are known.
    request._all_token_ids.append(1)
    assert side.step({"r": (14, 6)}).stores == []
    request._all_token_ids += [2, 3]
    (op,) = side.step({"r": (16, 6)}).stores
    chain = KeyChain(side.fmt.namespace.digest, CHUNK)
    assert op.chunk == chain.extend([*prompt(14), 1, 2])[1]


@pytest.mark.parametrize("save_decode", [False, True])
def test_decoded_chunks_are_stored_on_demand(make: Callable[..., Side], save_decode: bool) -> None:
    side = make(save_decode=save_decode)
    request = Request("r", prompt(14))
    side.side.new_request(request)
    side.ask(request)
    side.step({"r": (0, 14)}, new=("r",))
    request._all_token_ids += [1, 2]
    assert len(side.step({"r": (15, 1)}).stores) == save_decode


def test_blocks_that_are_gone_are_not_stored(make: Callable[..., Side]) -> None:
    side = make()
    request = Request("r", prompt(30))
    side.side.new_request(request)
    side.ask(request)
    blocks = [0, 0, 0, 4, 5, 6, 7, 8]
    meta = side.step({"r": (0, 30)}, new=("r",), blocks=lambda _: (blocks,))
    assert [op.chunk.index for op in meta.stores] == [2]


def test_a_step_whose_blocks_are_not_told_stores_later(make: Callable[..., Side]) -> None:
    side = make()
    request = Request("r", prompt(20))
    side.side.new_request(request)
    side.ask(request)
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={"r": 20},
        total_num_scheduled_tokens=20,
        kv_connector_block_state=KVConnectorBlockState(set(), lambda _: ([],), {}),
    )
    assert side.side.step_metadata(output).stores == []
    assert len(side.step({"r": (20, 1)}).stores) == 2


def test_stores_that_cannot_be_planned_do_not_hold_up_loads(
    make: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    side = make()
    side.put(prompt(20))
    request = Request("r", prompt(20))
    other = Request("s", prompt(20, 1))
    side.ask(other)
    assert side.ask(request) == (16, True)
    side.side.allocated(request, ([1, 2, 3, 4, 5],), 16)

    def broken(request_id: str) -> tuple[list[int], ...]:
        raise KeyError(request_id)

    meta = side.step({"s": (0, 20)}, new=("s",), blocks=broken)
    assert len(meta.loads) == 1
    assert meta.stores == []
    assert "could not be planned" in caplog.text


def test_what_to_read_ahead_that_cannot_be_planned_does_not_hold_up_loads(
    make: Callable[..., Side], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make(memory_tier={"max_bytes": 1 << 20})
    side.put(prompt(20))
    _known(side, "gone", prompt(20))
    side.step()
    side.step()
    request = Request("r", prompt(20))
    assert side.ask(request) == (16, True)
    side.side.allocated(request, ([1, 2, 3, 4, 5],), 16)
    side.side.finished("gone")
    _known(side, "s", prompt(20, 1))

    def broken(*_: object) -> int:
        raise KeyError("a chunk")

    monkeypatch.setattr(side.side, "_breaker_is_open", broken)
    meta = side.step()
    assert len(meta.loads) == 1
    assert meta.prefetch_ended == ["gone"]
    assert "could not be planned" in caplog.text


# ------------------------------------------------------------------------- waiting


def test_all_waiting_in_one_step_is_within_the_budget(make: Callable[..., Side]) -> None:
    side = make(lookup_budget_ms=1.0)
    gate = threading.Event()
    side.faults.add(Fault("stat", wait=gate))
    requests = [Request(f"r{i}", prompt(20, i)) for i in range(20)]
    waits: list[float] = []
    for request in requests:
        side.side.new_request(request)
        lookup = side.side._requests[request.request_id].lookup
        assert lookup is not None
        lookup.wait = lambda seconds: _sleep(seconds, waits)  # type: ignore[method-assign]
    busy = {"busy": (0, 1)}
    for _ in range(3):
        side.step(busy)
        waits.clear()
        for request in requests:
            assert side.side.matched_tokens(request, 0) == (None, False)
        assert waits
        assert waits[0] <= 1e-3
        assert len(waits) <= 2
    gate.set()


@pytest.mark.parametrize(
    ("ranks", "stages", "asynchronous", "waits"),
    [
        (1, 1, False, [False, True, True]),
        # The step before may still be computed when the next one begins.
        (1, 1, True, [False, False, True]),
        (2, 1, False, [False, False, False]),
        (2, 1, True, [False, False, False]),
        (1, 2, False, [False, False, False]),
        (1, 4, True, [False, False, False]),
    ],
)
def test_a_step_waits_only_where_it_holds_up_nobody(
    make: Callable[..., Side], ranks: int, stages: int, asynchronous: bool, waits: list[bool]
) -> None:
    def change(config: SimpleNamespace) -> None:
        config.parallel_config.data_parallel_size = ranks
        config.parallel_config.pipeline_parallel_size = stages
        config.scheduler_config.async_scheduling = asynchronous

    side = make(known=stages == 1, change=change, lookup_budget_ms=0.2)
    side.side.new_request(Request("busy", prompt(20)))
    found = [side.step({"busy": (0, 1)}), side.step(), side.step()]
    assert [meta.idle for meta in found] == waits
    assert (side.side._budget_left > 0.2e-3) is waits[-1]
    # Once the last request has ended nothing is in flight.
    side.step({"busy": (1, 1)})
    side.side.finished("busy")
    assert side.step().idle is waits[-1]


def test_a_look_up_is_not_waited_for_in_vain_where_other_ranks_wait(
    make: Callable[..., Side],
) -> None:
    side = make(change=_set("parallel_config.data_parallel_size", 2))
    gate = threading.Event()
    side.faults.add(Fault("stat", wait=gate))
    request = Request("r", prompt(20))
    side.side.new_request(request)
    lookup = side.side._requests["r"].lookup
    assert lookup is not None
    waits: list[float] = []
    lookup.wait = lambda seconds: _sleep(seconds, waits)  # type: ignore[method-assign]
    for _ in range(5):
        side.step()
        assert side.side.matched_tokens(request, 0) == (None, False)
    gate.set()
    assert all(wait <= 0.2e-3 for wait in waits)


def _sleep(seconds: float, waits: list[float]) -> bool:
    waits.append(seconds)
    threading.Event().wait(seconds)
    return False


def test_a_look_up_that_takes_too_long_is_a_miss_but_its_keys_are_used(
    make: Callable[..., Side],
) -> None:
    side = make(lookup_wait_s=0.02)
    side.put(prompt(20))
    gate = threading.Event()
    side.faults.add(Fault("stat", wait=gate))
    request = Request("r", prompt(20))
    assert side.ask(request) == (0, False)
    assert side.side.matched_tokens(request, 0) == (0, False)
    assert side.side.counters.snapshot()["lookup_timeouts"] == 1
    gate.set()
    lookup = side.side._requests["r"].lookup
    assert lookup is not None
    assert lookup.wait(PATIENCE)
    # Both chunks are there, as is known now.
    assert side.step({"r": (0, 20)}, new=("r",)).stores == []


def test_requests_wait_for_the_namespace_until_one_deadline(make: Callable[..., Side]) -> None:
    side = make(known=False, identity_wait_s=0.05)
    first = Request("r", prompt(20))
    side.side.new_request(first)
    assert side.side.matched_tokens(first, 0) == (None, False)
    until(lambda: side.side.matched_tokens(first, 0) == (0, False))
    second = Request("s", prompt(20))
    side.side.new_request(second)
    assert side.side.matched_tokens(second, 0) == (0, False)
    # It is never too late for the namespace.
    side.side.worker_output(WorkerMetadata(reports={0: PART}))
    side.put(prompt(20))
    assert side.ask(Request("t", prompt(20))) == (16, True)


def test_the_namespace_is_announced_until_the_worker_has_it(make: Callable[..., Side]) -> None:
    side = make(known=False)
    assert side.step().namespace is None
    side.side.worker_output(WorkerMetadata(reports={0: PART}))
    encoded = (side.fmt.namespace.encoded, side.fmt.namespace.slug)
    assert side.step().namespace == encoded
    assert side.step().namespace == encoded
    side.side.worker_output(WorkerMetadata())
    assert side.step().namespace is None


def test_weights_that_are_not_known_yet_are_waited_for(make: Callable[..., Side]) -> None:
    side = make(known=False)
    side.side.worker_output(WorkerMetadata(reports={0: replace(PART, weights=None)}))
    assert side.side.matched_tokens(Request("r", prompt(20)), 0) == (None, False)
    side.side.worker_output(WorkerMetadata(reports={0: PART}))
    assert side.ask(Request("s", prompt(20))) == (0, False)


def test_a_worker_s_problem_ends_hits_and_stores_and_is_said_once(
    make: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    side = make()
    side.put(prompt(20))
    request = Request("r", prompt(30))
    assert side.ask(request) == (16, True)
    for _ in range(3):
        problem = replace(PART, disabled_reason="the weights changed")
        side.side.worker_output(WorkerMetadata(reports={0: problem}))
    assert side.side.matched_tokens(request, 0) == (0, False)
    assert side.side.matched_tokens(Request("s", prompt(20)), 0) == (0, False)
    assert side.step({"r": (0, 30)}, new=("r",)).stores == []
    assert caplog.text.count("the weights changed") == 1


def test_a_shelf_that_opens_late_is_used_from_then_on(make: Callable[..., Side]) -> None:
    side = make(known=False)
    opened = side.side._shelf
    side.side._shelf = lambda: None
    side.put(prompt(20))
    side.side.worker_output(WorkerMetadata(reports={0: PART}))
    assert side.side.matched_tokens(Request("r", prompt(20)), 0) == (None, False)
    side.side._shelf = opened
    side.side.worker_output(WorkerMetadata(reports={0: PART}))
    assert side.ask(Request("s", prompt(20))) == (16, True)


# ------------------------------------------------------------------------- the end of requests


def test_a_finished_request_leaves_nothing_behind(make: Callable[..., Side]) -> None:
    side = make()
    side.put(prompt(20))
    request = Request("r", prompt(20))
    side.ask(request)
    side.side.allocated(request, ([1, 2, 3, 4, 5],), 16)
    assert len(side.step().loads) == 1
    side.side.finished("r")
    side.side.finished("r")
    side.side.loads_done({"r"})
    assert side.step().cancelled == ["r"]
    assert side.step().cancelled == []
    assert not side.side._requests


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "stored"),
    [(4.0, True, True), (4.0, False, True), (0.0, True, True), (0.0, False, False)],
)
def test_images_that_vllm_only_numbers_are_neither_looked_up_nor_stored(
    make: Callable[..., Side], cache_gb: float, prefix_caching: bool, stored: bool
) -> None:
    def change(config: SimpleNamespace) -> None:
        config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=cache_gb)
        config.cache_config.enable_prefix_caching = prefix_caching

    side = make(change=change)
    tokens = prompt(24)
    item = MultimodalItem("renderer0-mm-1-image-0", 3, 4)
    side.put(tokens, items=[item])
    request = Request("picture", tokens)
    request.mm_features = [image(item.hash, item.start, item.length)]
    assert (side.ask(request)[0] > 0) is stored
    words = Request("words", prompt(24, 1))
    side.put(words.prompt_token_ids)
    assert side.ask(words)[0] > 0
    fresh = Request("another", prompt(24, 2))
    fresh.mm_features = list(request.mm_features)
    side.ask(fresh)
    meta = side.step({"another": (0, 24)}, new=("another",))
    assert bool(meta.stores) is stored


def named(identifier: str, mm_hash: str) -> SimpleNamespace:
    """An image with these names."""
    position = SimpleNamespace(offset=3, length=4)
    return SimpleNamespace(identifier=identifier, mm_position=position, mm_hash=mm_hash)


#: Images with an id that a client may have chosen, and what the log says of them.
UNTRUSTED = {
    "a uuid": (named(f"{CLIENT}cat", f"{CLIENT}cat"), "by a uuid of its own"),
    "a uuid, adapter for images": (named(f"a:{CLIENT}cat", f"{CLIENT}cat"), "by a uuid of its own"),
    "no marks": (named("cat", "cat"), "does not mark ids"),
    "no marks, and a uuid that feigns one": (named(f"{CONTENT}cat", f"{CONTENT}cat"), "not mark"),
    "no second name": (named("cat", None), "does not mark ids"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", UNTRUSTED)
def test_an_image_by_an_id_that_a_client_may_have_chosen_needs_a_salt(
    make: Callable[..., Side], case: str, caplog: pytest.LogCaptureFixture
) -> None:
    item, said = UNTRUSTED[case]
    side = make()
    tokens = prompt(24)
    for salt in ("", "a tenant's"):
        side.put(tokens, items=[MultimodalItem(side.side._item_ids.in_key(item), 3, 4)], salt=salt)
    for name, salt in (("one", None), ("two", None), ("salted", "a tenant's")):
        request = Request(name, tokens, cache_salt=salt, mm_features=[item])
        assert (side.ask(request)[0] > 0) is (salt is not None)
    assert side.side.counters.snapshot()["uuid_requests"] == 2
    assert caplog.text.count("neither loaded nor stored") == 1
    assert said in caplog.text
    assert "trust_uuids" in caplog.text

    fresh = Request("fresh", prompt(24, 2), mm_features=[item])
    salted = Request("fresh, salted", prompt(24, 3), mm_features=[item], cache_salt="a tenant's")
    for request in (fresh, salted):
        side.ask(request)
    meta = side.step({"fresh": (0, 24), "fresh, salted": (0, 24)}, new=("fresh", "fresh, salted"))
    assert len(meta.stores) == 3


@pytest.mark.parametrize(
    "item",
    [
        named("cat", f"{CONTENT}cat"),
        named("an adapter:cat", f"{CONTENT}cat"),
    ],
)
def test_an_image_by_its_content_needs_no_salt(
    make: Callable[..., Side], item: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    side = make()
    tokens = prompt(24)
    side.put(tokens, items=[MultimodalItem(item.identifier, 3, 4)])
    assert side.ask(Request("r", tokens, mm_features=[item]))[0] > 0
    assert "neither loaded nor stored" not in caplog.text


def test_encoders_in_other_engines_know_images_by_ids_without_marks(
    make: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    def change(config: SimpleNamespace) -> None:
        config.ec_transfer_config = SimpleNamespace()

    side = make(change=change)
    tokens = prompt(24)
    side.put(tokens, items=[MultimodalItem("cat", 3, 4)])
    assert side.ask(Request("r", tokens, mm_features=[image("cat", 3, 4)])) == (0, False)
    assert "ec_transfer_config" in caplog.text


@pytest.mark.parametrize("case", UNTRUSTED)
def test_uuids_that_are_trusted_have_the_keys_of_ids_without_marks(
    make: Callable[..., Side], case: str
) -> None:
    item, _ = UNTRUSTED[case]
    side = make(trust_uuids=True)
    tokens = prompt(24)
    plain = named(item.identifier.replace(CLIENT, ""), "none")
    side.put(tokens, items=[MultimodalItem(side.side._item_ids.in_key(plain), 3, 4)])
    assert side.ask(Request("r", tokens, mm_features=[item]))[0] > 0
    assert "uuid_requests" not in side.side.counters.snapshot()


@pytest.mark.parametrize(("asynchronous", "stages"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_what_stands_on_another_connector_s_load_is_stored_when_its_outcome_is_known(
    make: Callable[..., Side], asynchronous: bool, stages: int
) -> None:
    def change(config: SimpleNamespace) -> None:
        config.scheduler_config.async_scheduling = asynchronous
        config.parallel_config.pipeline_parallel_size = stages

    side = make(change=change)
    loading, sharing = Request("x", prompt(40)), Request("y", prompt(40, 1))
    for request in (loading, sharing):
        side.ask(request)
    # Another connector loads 16 tokens of x while 8 are computed behind them. Of y nobody
    # knows whether it shares blocks with x.
    steps = [
        side.step({"x": (16, 8), "y": (0, 24)}, new=("x", "y"), sync_loads=True),
        *(side.step({"x": (24, 8), "y": (24, 8)}) for _ in range(asynchronous + stages - 1)),
    ]
    assert not any(meta.stores for meta in steps)
    # The load failed: x begins anew, and what y has is known to be good.
    meta = side.step({"x": (0, 8), "y": (24, 8)})
    assert [(op.chunk.index, op.chunk.key in _keys(side, loading)) for op in meta.stores] == [
        (0, True),
        (0, False),
        (1, False),
        (2, False),
        (3, False),
    ]
    meta = side.step({"x": (8, 24)})
    assert [op.chunk.index for op in meta.stores] == [1, 2, 3]


def test_other_connectors_loads_stop_only_the_stores_that_depend_on_them(
    make: Callable[..., Side],
) -> None:
    """A busy server may have such a load in each step."""
    side = make(change=lambda config: setattr(config.scheduler_config, "async_scheduling", True))
    requests = {name: Request(name, prompt(80, n)) for n, name in enumerate("rsabcdef")}
    for request in requests.values():
        side.ask(request)
    # s shares blocks with a, whose load may fail; r shares none with anybody.
    tables = {"r": range(100, 140), "s": range(10, 30), "a": range(10, 20)}

    def blocks(name: str) -> tuple[list[int], ...]:
        start = 200 + 20 * ord(name)
        return (list(tables.get(name, range(start, start + 20))),)

    side.step({"r": (0, 8)}, new=("r",), blocks=blocks)
    stored: dict[str, list[int]] = {name: [] for name in requests}
    before = 8
    for number, name in enumerate("abcdef"):
        new, steps = (name,), {"r": (before, 8), name: (8, 16)}
        if number == 1:
            new, steps = (*new, "s"), {**steps, "s": (8, 16)}
        meta = side.step(steps, new=new, blocks=blocks, sync_loads=True)
        before += 8
        for op in meta.stores:
            owner = next(n for n, r in requests.items() if op.chunk.key in _keys(side, r))
            stored[owner].append(op.chunk.index)
    assert stored["r"] == [1, 2, 3, 4, 5, 6]
    assert not any(stored[name] for name in "sabcdef")


def _keys(side: Side, request: Request) -> set[bytes]:
    chain = KeyChain(side.fmt.namespace.digest, CHUNK)
    return {chunk.key for chunk in chain.extend(request.prompt_token_ids)}


def test_resetting_asks_again_for_requests_that_wait(make: Callable[..., Side]) -> None:
    side = make()
    waiting, running = Request("w", prompt(20)), Request("x", prompt(20, 1))
    side.ask(waiting)
    side.ask(running)
    running.num_computed_tokens = 12
    side.put(prompt(20))
    side.side._failed.add(b"k", bad=True)
    assert side.side.matched_tokens(waiting, 0) == (0, False)
    assert side.side.reset() is True
    assert b"k" not in side.side._failed
    meta = side.step({"x": (12, 8)})
    assert meta.reset
    assert [op.chunk.index for op in meta.stores] == [0, 1]
    assert side.ask(waiting) == (16, True)


# ------------------------------------------------------------------------- the connector


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    connector._logs.clear()


def make_connector(root: Path, **options: Any) -> SharedStorageConnector:
    config = make_config(str(root), **options)
    return SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config))


def test_the_cache_config_is_optional(tmp_path: Path) -> None:
    config = make_config(str(tmp_path))
    made = SharedStorageConnector(config, KVConnectorRole.SCHEDULER)
    request = Request("r", prompt(20))
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (None, False)
    assert made.get_loaded_kv_cache_group_ids(request) == (0,)
    assert made.request_finished(request, []) == (False, None)
    made.shutdown()


def test_what_vllm_relies_on(tmp_path: Path) -> None:
    made = make_connector(tmp_path)
    assert made.requires_kv_delivery is False
    assert made.get_kv_connector_stats() is None
    made.shutdown()
    made.shutdown()


def test_metrics_of_vllm_know_where_hits_come_from(tmp_path: Path) -> None:
    request = Request("r", prompt(20))
    for place, source in ((str(tmp_path), "disk"), ("memory://kv", "external_unspecified")):
        config = make_config(place)
        made = SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config))
        assert made.get_external_cache_hit_sources(request, 16) == {source: 16}
        assert made.get_external_cache_hit_sources(request, 0) == {}
        made.shutdown()


@pytest.mark.usefixtures("quiet")
def test_nothing_that_goes_wrong_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_connector(tmp_path)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    for name in (
        "new_request",
        "matched_tokens",
        "worker_output",
        "finished",
        "reset",
    ):
        monkeypatch.setattr(made._scheduler, name, broken)
    request = Request("r", prompt(20))
    for _ in range(3):
        made.on_new_request(request)
        assert made.get_num_new_matched_tokens(request, 0) == (0, False)
        made.update_state_after_alloc(request, Blocks([1, 2]), 0)
        made.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=WorkerMetadata(), finished_recving=None)
        )
        assert made.request_finished(request, []) == (False, None)
        assert made.reset_cache() is False
    assert caplog.text.count("get_num_new_matched_tokens failed; the engine goes on") == 1
    made.shutdown()


def test_foreign_worker_metadata_is_ignored(tmp_path: Path) -> None:
    made = make_connector(tmp_path)
    for meta in (None, object()):
        made.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=meta, finished_recving={"who?"})
        )
    made.shutdown()


# ------------------------------------------------------------------------- refusals


def _mla_without_chunked_prefill(config: SimpleNamespace) -> None:
    config.model_config.use_mla = True
    config.scheduler_config.enable_chunked_prefill = False


def _ranks_on_their_own(config: SimpleNamespace) -> None:
    config.parallel_config.world_size = 2
    config.parallel_config.distributed_executor_backend = "external_launcher"


def _drafts_in_stages(config: SimpleNamespace) -> None:
    config.parallel_config.pipeline_parallel_size = 2
    config.speculative_config = SimpleNamespace(method="ngram")


def _set(path: str, value: object) -> Callable[[SimpleNamespace], None]:
    def change(config: SimpleNamespace) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            config = getattr(config, parent)
        setattr(config, name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_ranks_on_their_own, "external_launcher each rank schedules for itself"),
        (_drafts_in_stages, "no chunk would ever be stored completely"),
        (_mla_without_chunked_prefill, "cannot continue a stored prefix with MLA"),
        (_set("model_config.is_encoder_decoder", True), "encoder-decoder"),
        (_set("model_config.is_diffusion", True), "cannot reuse KV"),
        (_set("model_config.is_prefix_caching_supported", False), "cannot reuse KV"),
        (
            _set("speculative_config", SimpleNamespace(method="extract_hidden_states")),
            r"'extract_hidden_states'.*; use one of custom_class, dflash, .*suffix",
        ),
    ],
)
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_engines_that_are_not_served_do_not_start(
    tmp_path: Path,
    change: Callable[[SimpleNamespace], None],
    message: str,
    role: KVConnectorRole,
) -> None:
    config = make_config(str(tmp_path / "shelf"))
    change(config)
    with pytest.raises(UnsupportedError, match=message):
        SharedStorageConnector(config, role, make_groups(config))
    assert not (tmp_path / "shelf").exists()


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_engine_that_simulates_the_choice_of_experts_does_not_start(
    tmp_path: Path, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
    monkeypatch.setenv(name, "uniform_random")
    config = make_config(str(tmp_path / "shelf"))
    with pytest.raises(UnsupportedError, match=name):
        SharedStorageConnector(config, role, make_groups(config))
    with pytest.raises(UnsupportedError, match=name):
        model_facts(config)
    assert not (tmp_path / "shelf").exists()


@pytest.mark.parametrize("method", sorted(METHODS_WITHOUT_KV | METHODS_WITH_KV))
def test_speculative_methods_are_served(tmp_path: Path, method: str) -> None:
    config = make_config(str(tmp_path))
    config.speculative_config = speculation(method)
    SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config)).shutdown()


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_drafts_with_stages_are_served_by_the_second_model_runner(
    tmp_path: Path, method: str
) -> None:
    config = make_config(str(tmp_path))
    _drafts_in_stages(config)
    config.speculative_config = speculation(method)
    config.use_v2_model_runner = True
    SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config)).shutdown()


def test_a_model_without_caches_is_refused(tmp_path: Path) -> None:
    config = make_config(str(tmp_path))
    with pytest.raises(UnsupportedError, match="0 KV cache groups"):
        SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config, 0))


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_a_cache_without_prefixes_is_refused(tmp_path: Path, role: KVConnectorRole) -> None:
    config = make_config(str(tmp_path / "shelf"))
    groups = make_groups(config)
    groups.prefix_cacheable_group_ids = ()
    with pytest.raises(UnsupportedError, match=r"holds no KV of prefixes.* remove --kv-transfer"):
        SharedStorageConnector(config, role, groups)
    assert not (tmp_path / "shelf").exists()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("windowed", [True, False])
def test_answers_that_see_a_window_are_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, windowed: bool, whole: bool
) -> None:
    config = make_config(str(tmp_path), save_decode=True)
    groups = make_groups(config)
    spec = SimpleNamespace(block_size=groups.kv_cache_groups[0].kv_cache_spec.block_size)
    groups.kv_cache_groups[0].kv_cache_spec = spec
    if windowed:
        spec.rswa_window = 128
    if not whole:
        # As UniformTypeKVCacheSpecs of vllm/v1/kv_cache_interface.py.
        specs = {"model.layers.0.self_attn.attn": spec}
        groups.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(
            block_size=spec.block_size, kv_cache_specs=specs
        )
    for role in KVConnectorRole:
        made = SharedStorageConnector(config, role, groups)
        assert made.config.save_decode is not windowed
        made.shutdown()
    assert caplog.text.count("save_decode is off") == windowed


def test_vllm_says_which_caches_have_no_prefixes_or_windows_of_answers() -> None:
    import vllm.v1.kv_cache_interface as interface

    assert interface.HiSparseHotSpec.prefix_cacheable.fget(None) is False
    assert "rswa_window" in {one.name for one in fields(interface.RSWASpec)}
    assert "kv_cache_specs" in {one.name for one in fields(interface.UniformTypeKVCacheSpecs)}
    assert AuxOutputConfig(enable_return_routed_experts=True).enabled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_sise": 8}, "chunk_sise"),
        ({"read_only": True, "save_decode": True}, "read_only and save_decode"),
    ],
)
def test_configurations_that_cannot_be_meant_do_not_start(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_connector(tmp_path, **options)


def test_a_shelf_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        make_connector(tmp_path / "file")


@pytest.mark.parametrize(
    ("option", "before", "after", "log"),
    [
        ({}, "fail", "recompute", "kv_load_failure_policy is set to recompute"),
        ({}, "recompute", "recompute", ""),
        ({"load_failure_policy": "recompute"}, "fail", "recompute", "is set to recompute"),
        ({"load_failure_policy": "vllm"}, "fail", "fail", "kv_load_failure_policy stays fail"),
        ({"load_failure_policy": "vllm"}, "recompute", "recompute", "stays recompute"),
    ],
)
def test_failed_loads_are_recomputed_unless_that_is_left_to_vllm(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    option: dict[str, str],
    before: str,
    after: str,
    log: str,
) -> None:
    config = make_config(str(tmp_path), **option)
    config.kv_transfer_config.kv_load_failure_policy = before
    with caplog.at_level("INFO", "kvshelf"):
        SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config)).shutdown()
    assert config.kv_transfer_config.kv_load_failure_policy == after
    assert log in caplog.text
    assert log or "policy" not in caplog.text


class MultiConnector:
    """Makes a child as vLLM's class of this name does."""

    def __init__(
        self, policy: str, child: SimpleNamespace, groups: Any = None, **fields: object
    ) -> None:
        self._kv_transfer_config = SimpleNamespace(kv_load_failure_policy=policy, **fields)
        groups = groups or make_groups(child)
        self.child = SharedStorageConnector(child, KVConnectorRole.SCHEDULER, groups)


def test_inside_multi_connector_the_policy_must_be_set_by_the_user(tmp_path: Path) -> None:
    config = make_config(str(tmp_path))
    with pytest.raises(ConfigError, match='"kv_load_failure_policy": "recompute"'):
        MultiConnector("fail", config)
    MultiConnector("recompute", config).child.shutdown()


def test_inside_multi_connector_the_policy_may_be_left_to_vllm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(str(tmp_path), load_failure_policy="vllm")
    with caplog.at_level("INFO", "kvshelf"):
        MultiConnector("fail", config).child.shutdown()
    assert "kv_load_failure_policy stays fail" in caplog.text


@pytest.mark.parametrize(
    ("role", "others_role", "batches", "served"),
    [
        ("kv_producer", "kv_both", 2, False),
        ("kv_producer", "kv_consumer", 2, False),
        ("kv_producer", "kv_both", 1, True),
        ("kv_producer", "kv_producer", 2, True),
        ("kv_both", "kv_both", 2, True),
        ("kv_consumer", "kv_consumer", 2, True),
    ],
)
def test_blocks_that_others_may_fill_must_be_kept_until_their_last_step_has_run(
    tmp_path: Path, role: str, others_role: str, batches: int, served: bool
) -> None:
    config = make_config(str(tmp_path))
    config.max_concurrent_batches = batches
    config.device_config = SimpleNamespace(device_type="cuda")
    config.kv_transfer_config.kv_connector = "SharedStorageConnector"
    children = [
        {"kv_connector": "NixlConnector", "kv_role": others_role},
        {"kv_connector": "SharedStorageConnector", "kv_role": "kv_both"},
    ]
    parent = {"kv_role": role, "kv_connector_extra_config": {"connectors": children}}
    if served:
        MultiConnector("recompute", config, **parent).child.shutdown()
        return
    with pytest.raises(ConfigError, match=r'NixlConnector may fill them.*"kv_role": "kv_both"'):
        MultiConnector("recompute", config, **parent)


@pytest.mark.parametrize("window", [None, 64])
def test_a_connector_beside_this_one_that_allows_one_group_only_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, window: int | None
) -> None:
    config = make_config(str(tmp_path))
    config.kv_transfer_config.kv_connector = "SharedStorageConnector"
    children = [
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
        {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_module_path": "kvshelf.vllm.connector",
            "kv_role": "kv_both",
        },
    ]
    parent = {"kv_role": "kv_both", "kv_connector_extra_config": {"connectors": children}}
    # As vLLM keeps windows without its hybrid allocator.
    groups = cache_config([replace(full(BLOCK), sliding_window=window)])
    MultiConnector("recompute", config, groups, **parent).child.shutdown()
    names = [line for line in caplog.messages if "does not support several KV cache groups" in line]
    assert len(names) == (window is not None)
    assert all(line.startswith("ExampleConnector inside MultiConnector") for line in names)


def test_vllm_keeps_blocks_of_consumers_until_their_last_step_has_run() -> None:
    import inspect

    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.__init__)
    condition = "if multiple_inflight_batches and kv_transfer_config.is_kv_consumer:"
    assert condition in source
    assert "self.defer_block_free = True" in source[source.index(condition) :]


def test_the_real_multi_connector_sets_what_is_looked_at() -> None:
    import inspect

    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    source = inspect.getsource(multi_connector.MultiConnector.__init__)
    assert source.index("super().__init__(") < source.index("connector_cls(temp_config")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.5.post1", "0.32.0+cpu"])
def test_supported_versions(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize(
    "version",
    ["0.31.9", "0.34.0", "1.0.0", "0.9.2", "0.36.0.dev3", "0.34.0.dev12+gabc", "0.31.1.dev2"],
)
def test_other_versions_get_a_message_that_names_those_that_work(version: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        check_vllm_version(version)
    assert f"vLLM {version} found" in str(error.value)
    assert ">=0.32,<0.34" in str(error.value)


def test_another_version_gets_the_message_though_its_modules_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib.util
    import sys

    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    # As in a version in which this did not exist yet.
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.cache_hit_source", None)
    spec = importlib.util.spec_from_file_location("connector_again", connector.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.31\.0 found"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(
    "version", ["unknown", "0.1.dev1+g123", "0.0.0", "0.32.1.dev7+g123", "0.33.0.dev1"]
)
def test_builds_from_source_are_let_through_with_a_warning(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_vllm_version(version)
    assert f"vLLM {version} is a build from source" in caplog.text


@pytest.mark.parametrize(
    ("heads", "shards"),
    [(1, 1), (2, 2), (6, 6), (8, 8), (9, 3), (10, 5), (12, 6), (13, 1), (32, 8)],
)
def test_the_number_of_shards_is_a_function_of_the_model(heads: int, shards: int) -> None:
    assert default_shards(heads) == shards
    assert default_shards(heads, 4) == 4 * shards


# ------------------------------------------------------------------------- opening


def test_log_lines_about_a_shelf_that_does_not_answer_show_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()

    def hang(url: str, **_: Any) -> Shelf:
        assert gate.wait(PATIENCE)
        return Shelf(posix(tmp_path))

    monkeypatch.setattr(connector, "START_SECONDS", 0.01)
    monkeypatch.setattr(tiered, "open_shelf", hang)
    config = Config(shared_storage_path="sftp://user:hun@ter2@host/kv")
    opening = connector._open(config, Counters(), on_cpu=True, gpu=None)
    opening.close()
    gate.set()
    assert "sftp://host/kv has not answered" in caplog.text
    assert "ter2" not in caplog.text


# ------------------------------------------------------------------------- several ranks


def _ranks(make: Callable[..., Side], stages: int = 1) -> Side:
    """A side of an engine with two workers that have not reported yet."""
    side = make(known=False)
    side.config.parallel_config.tensor_parallel_size = 2 // stages
    side.config.parallel_config.pipeline_parallel_size = stages
    side.side._handshake.ranks = 2
    return side


def test_the_namespace_waits_for_all_ranks(make: Callable[..., Side]) -> None:
    side = _ranks(make)
    request = Request("r", prompt(20))
    # Only rank 0 names the weights.
    side.side.worker_output(WorkerMetadata(reports={1: replace(PART, weights=None)}))
    assert side.side.matched_tokens(request, 0) == (None, False)
    side.side.worker_output(WorkerMetadata(reports={0: replace(PART, weights=None)}))
    assert side.side.matched_tokens(request, 0) == (None, False)
    side.side.worker_output(WorkerMetadata(reports={0: PART}))
    # Shards do not depend on the degree, and so what one rank stored is found.
    side.put(prompt(20))
    assert side.ask(request) == (16, True)


@pytest.mark.parametrize(
    "difference",
    [
        {"layouts": ("canonical",) * LAYERS},
        {"layer_names": tuple("abcdefgh"[:LAYERS])},
        {"kv_scales": ((0.5, 0.5),) * LAYERS},
    ],
)
def test_ranks_that_differ_share_nothing(
    make: Callable[..., Side], difference: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    side = _ranks(make)
    other = replace(PART, weights=None, **difference)
    side.side.worker_output(WorkerMetadata(reports={0: PART, 1: other}))
    assert side.side.matched_tokens(Request("r", prompt(20)), 0) == (0, False)
    assert "rank 1 differ from those of rank 0" in caplog.text


def _scaled_by_head(heads: int, ranks: int, context: int) -> list[WorkerReport]:
    """The reports of all ranks of a model that has a scale for each of its KV heads."""
    reports = []
    for rank in range(ranks * context):
        held, copies = max(1, heads // ranks), max(1, ranks // heads)
        first = rank % ranks // copies * held
        scales = [
            [layer + (head + kv / 2) / 8 for head in range(first, first + held)]
            for layer in range(LAYERS)
            for kv in (0, 1)
        ]
        layers = SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"})
        method = SimpleNamespace(quant_config=layers)
        context_of = {
            name: SimpleNamespace(
                quant_method=method,
                _k_scale=torch.tensor(scales[2 * n]),
                _v_scale=torch.tensor(scales[2 * n + 1]),
            )
            for n, name in enumerate(PART.layer_names)
        }
        reports.append(
            replace(
                PART,
                weights=None if rank else "user:test",
                layer_shapes=(f"2,*,{heads},{HEAD_SIZE}",) * LAYERS,
                kv_scales=kv_scales(context_of, context_of),
            )
        )
    return reports


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("ranks", "context"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2)])
def test_scales_of_heads_are_the_same_on_any_number_of_ranks(
    make: Callable[..., Side], heads: int, ranks: int, context: int
) -> None:
    side = make(known=False)
    side.config.model_config.get_total_num_kv_heads = lambda: heads
    side.config.parallel_config.tensor_parallel_size = ranks
    side.config.parallel_config.prefill_context_parallel_size = context
    side.side._handshake.ranks = ranks * context
    reports = _scaled_by_head(heads, ranks, context)
    side.side.worker_output(WorkerMetadata(reports=dict(enumerate(reports))))
    assert side.side.namespace is not None, side.side._handshake.disabled_reason
    values = [
        layer + (head + kv / 2) / 8
        for layer in range(LAYERS)
        for kv in (0, 1)
        for head in range(heads)
    ]
    digest = hashlib.sha256(struct.pack(f"<{len(values)}f", *values)).hexdigest()
    assert side.side.namespace.record["kv_scales"] == digest


@pytest.mark.parametrize("which", ["a copy", "a part", "none"])
def test_ranks_with_other_scales_of_the_same_heads_share_nothing(
    make: Callable[..., Side], caplog: pytest.LogCaptureFixture, which: str
) -> None:
    side = make(known=False)
    side.config.model_config.get_total_num_kv_heads = lambda: 2
    side.config.parallel_config.tensor_parallel_size = 4
    side.side._handshake.ranks = 4
    reports = _scaled_by_head(2, 4, 1)
    found = reports[3].kv_scales
    other: tuple[Any, ...] = {
        "a copy": (((9.0,), (9.0,)), *found[1:]),
        "a part": (((9.0, 9.0), (9.0, 9.0)), *found[1:]),
        "none": (),
    }[which]
    reports[3] = replace(reports[3], kv_scales=other)
    side.side.worker_output(WorkerMetadata(reports=dict(enumerate(reports))))
    assert side.side.namespace is None
    assert "rank 3 differ from those of rank 0" in caplog.text


def test_stages_are_put_together_in_order(make: Callable[..., Side]) -> None:
    side = _ranks(make, stages=2)
    second = replace(
        PART, weights=None, layer_names=tuple(f"model.layers.{LAYERS + i}" for i in range(LAYERS))
    )
    side.side.worker_output(WorkerMetadata(reports={1: second, 0: PART}))
    assert side.side.namespace is not None
    record = side.side.namespace.record
    assert record["layer_names"] == [*PART.layer_names, *second.layer_names]
    assert record["stages"] == [LAYERS, LAYERS]
    assert record["shards"] == 2 * default_shards(HEADS)


def test_a_bad_chunk_is_trusted_again_when_all_ranks_have_seen_to_it(
    make: Callable[..., Side],
) -> None:
    side = _ranks(make)
    side.side.worker_output(WorkerMetadata(reports={0: PART, 1: replace(PART, weights=None)}))
    side.put(prompt(20))
    request = Request("r", prompt(20))
    assert side.ask(request) == (16, True)
    key = side.side._requests["r"].lookup.chain.chunks[1].key  # type: ignore[union-attr]
    side.side.worker_output(WorkerMetadata(failures=([LoadFailure("r", 1, key, True)],)))
    for number, repaired in enumerate([[], [(key, 0)], [(key, 0)]]):
        side.side.worker_output(WorkerMetadata(repaired=repaired))
        assert side.ask(Request(f"before {number}", prompt(20))) == (8, True)
    # Found bad once more: what was repaired before counts no longer.
    side.side.worker_output(WorkerMetadata(failures=([LoadFailure("r", 1, key, True)],)))
    side.side.worker_output(WorkerMetadata(repaired=[(key, 1)]))
    assert side.ask(Request("still", prompt(20))) == (8, True)
    side.side.worker_output(WorkerMetadata(repaired=[(key, 0)]))
    assert side.ask(Request("after", prompt(20))) == (16, True)


# ------------------------------------------------------------------------- images and sounds


def test_images_are_part_of_the_address(make: Callable[..., Side]) -> None:
    """Requests as vLLM makes them: placeholders are equal tokens whatever the image."""
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request as VLLMRequest

    side = make()
    tokens = prompt(40)

    def ask(number: int, *items: tuple[str, int, int]) -> int:
        request = VLLMRequest(
            f"request {number}",
            tokens,
            SamplingParams(),
            None,
            mm_features=[
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=identifier,
                    mm_position=PlaceholderRange(offset=offset, length=length),
                    mm_hash=f"{CONTENT}{identifier}",
                )
                for identifier, offset, length in items
            ],
        )
        return side.ask(request)[0]  # type: ignore[arg-type]

    side.put(tokens, items=[MultimodalItem("cat", 10, 12), MultimodalItem("dog", 30, 4)])
    assert ask(1, ("cat", 10, 12), ("dog", 30, 4)) == 36
    # Up to the first chunk that an other image reaches into, or that it lies elsewhere in.
    assert ask(2, ("cat", 10, 12), ("cow", 30, 4)) == 24
    assert ask(3, ("cow", 10, 12), ("dog", 30, 4)) == 8
    assert ask(4, ("cat", 11, 12), ("dog", 30, 4)) == 8
    assert ask(5, ("cat", 10, 13), ("dog", 30, 4)) == 8
    assert ask(6) == 8
    # An image that begins behind the chunk has no part in it.
    assert ask(7, ("cat", 10, 12), ("dog", 30, 4), ("sun", 38, 2)) == 32


# ------------------------------------------------------------------------- requests that wait


def _known(side: Side, name: str, tokens: list[int]) -> Request:
    """A request whose look-up is done and which no step has admitted yet."""
    request = Request(name, tokens)
    side.side.new_request(request)
    state = side.side._requests[name]
    until(lambda: state.lookup is not None and state.lookup.done)
    return request


def _named(meta: StepMetadata) -> dict[str, list[int]]:
    return {op.request_id: [chunk.index for chunk in op.chunks] for op in meta.prefetches}


def test_chunks_of_a_request_that_steps_pass_over_are_named_once(
    make: Callable[..., Side],
) -> None:
    side = make(memory_tier={"max_bytes": 1 << 20})
    tokens = prompt(40)
    side.put(tokens, 4)
    request = _known(side, "r", tokens)
    # The next step may admit it.
    assert _named(side.step()) == {}
    assert _named(side.step()) == {"r": [0, 1, 2, 3]}
    assert _named(side.step()) == {}
    # It is admitted: the worker knows by its load that it waits no more.
    assert side.ask(request) == (32, True)
    side.side.allocated(request, ([*range(1, 11)],), 32)
    meta = side.step()
    assert (len(meta.loads), meta.prefetch_ended) == (1, [])
    assert _named(side.step()) == {}
    side.side.loads_done({"r"})
    side.side.finished("r")
    assert side.step().prefetch_ended == ["r"]


def test_a_request_that_ends_while_it_waits_is_told(make: Callable[..., Side]) -> None:
    side = make(memory_tier={"max_bytes": 1 << 20})
    tokens = prompt(40)
    side.put(tokens, 4)
    _known(side, "r", tokens)
    _known(side, "nothing", prompt(40, 7))
    side.step()
    side.step()
    side.side.finished("r")
    side.side.finished("nothing")
    assert side.step().prefetch_ended == ["r"]


def test_what_runs_without_a_load_waits_no_more(make: Callable[..., Side]) -> None:
    side = make(memory_tier={"max_bytes": 1 << 20})
    tokens = prompt(40)
    side.put(tokens, 4)
    _known(side, "r", tokens)
    side.step()
    assert _named(side.step()) == {"r": [0, 1, 2, 3]}
    assert side.step({"r": (32, 8)}, new=("r",)).prefetch_ended == ["r"]
    side.side.finished("r")


def test_what_the_engine_has_at_hand_is_not_named(make: Callable[..., Side]) -> None:
    side = make(memory_tier={"max_bytes": 1 << 20})
    tokens = prompt(40)
    side.put(tokens, 5)
    first = _known(side, "first", tokens[:24])
    assert side.ask(first) == (20, True)
    side.side.allocated(first, ([*range(1, 7)],), 20)
    side.step()
    # Its first 8 tokens are in vLLM's own cache, of the 24 before it a load has come.
    second = _known(side, "second", tokens)
    assert side.side.matched_tokens(second, 8) == (28, True)
    side.step()
    assert _named(side.step()) == {"second": [3, 4]}
    side.side.reset()
    _known(side, "third", tokens)
    side.step()
    assert _named(side.step()) == {"third": [0, 1, 2, 3, 4]}


def test_a_step_names_a_bounded_number_of_chunks_oldest_requests_first(
    make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvshelf.vllm.read_ahead._CHUNKS_PER_STEP", 3)
    side = make(memory_tier={"max_bytes": 1 << 20})
    prompts = {name: prompt(40, seed) for seed, name in enumerate("ab")}
    for name, tokens in prompts.items():
        side.put(tokens, 4)
        _known(side, name, tokens)
    side.step()
    assert [_named(side.step()) for _ in range(4)] == [
        {"a": [0, 1, 2]},
        {"a": [3], "b": [0, 1]},
        {"b": [2, 3]},
        {},
    ]


def test_requests_that_cannot_be_admitted_do_not_starve_those_behind_them(
    make: Callable[..., Side],
) -> None:
    side = make(memory_tier={"max_bytes": 1 << 20})
    tokens = prompt(40)
    side.put(tokens, 4)
    # Their grammar is not compiled, or no step has room for their adapter: vLLM asks for none.
    blocked = [_known(side, f"blocked {i}", prompt(40, i + 1)) for i in range(100)]
    # These have no keys, or take nothing from a cache.
    for i in range(100):
        side.side.new_request(Request(f"embeds {i}", prompt(40), prompt_embeds=object()))
        side.side.new_request(Request(f"logprobs {i}", prompt(40), skip_reading_prefix_cache=True))
    first, _ = (_known(side, name, tokens) for name in ("first", "second"))
    assert side.ask(first) == (32, True)
    assert _named(side.step()) == {}
    assert _named(side.step()) == {"first": [0, 1, 2, 3], "second": [0, 1, 2, 3]}
    # What is blocked no more is looked at again.
    assert side.ask(blocked[5]) == (0, False)
    assert side.side._read_ahead._waiting["blocked 5"].passed_over
    side.step()
    assert not side.side._read_ahead._waiting["blocked 5"].passed_over
    assert side.side._read_ahead._waiting["blocked 4"].passed_over
    # The first is admitted, and one that waits before it is still passed over.
    assert side.ask(first) == (32, True)
    side.side.allocated(first, ([*range(1, 11)],), 32)
    side.step()
    assert side.side._read_ahead._waiting["blocked 5"].passed_over
    assert not side.side._read_ahead._waiting["second"].passed_over


def test_a_preempted_request_waits_before_all_others(make: Callable[..., Side]) -> None:
    side = make(memory_tier={"max_bytes": 1 << 20})
    tokens = prompt(40)
    side.put(tokens, 4)
    preempted, other = (_known(side, name, tokens) for name in ("preempted", "other"))
    side.ask(preempted)
    side.step({"preempted": (0, 40)}, new=("preempted",))
    preempted.num_preemptions = 1
    # There are no blocks for it, so that vLLM does not come to the other one.
    for _ in range(3):
        side.ask(preempted)
        side.step()
    assert not side.side._read_ahead._waiting[other.request_id].passed_over


def test_nothing_is_named_without_memory_for_it_or_while_the_storage_rests(
    make: Callable[..., Side],
) -> None:
    tokens = prompt(40)
    # A local disk is as near as memory.
    side = make()
    side.put(tokens, 4)
    _known(side, "r", tokens)
    assert [_named(side.step()) for _ in range(3)] == [{}] * 3
    side = make(memory_tier={"max_bytes": 1 << 20})
    _known(side, "r", tokens)
    side.step()
    side.side.worker_output(WorkerMetadata(breaker_open={0: True}))
    assert _named(side.step()) == {}
    side.side.worker_output(WorkerMetadata(breaker_open={0: False}))
    assert _named(side.step()) == {"r": [0, 1, 2, 3]}


def test_nothing_is_named_when_nothing_is_loaded_any_more(make: Callable[..., Side]) -> None:
    side = make(memory_tier={"max_bytes": 1 << 20})
    tokens = prompt(40)
    side.put(tokens, 4)
    _known(side, "r", tokens)
    side.step()
    problem = replace(PART, disabled_reason="the weights changed")
    side.side.worker_output(WorkerMetadata(reports={0: problem}))
    assert [_named(side.step()) for _ in range(2)] == [{}, {}]


def test_what_could_not_be_brought_shortens_the_hit_before_it_is_announced(
    make: Callable[..., Side],
) -> None:
    side = make(memory_tier={"max_bytes": 1 << 20})
    tokens = prompt(40)
    side.put(tokens, 4)
    request = _known(side, "r", tokens)
    side.step()
    (op,) = side.step().prefetches
    failure = LoadFailure("r", 2, op.chunks[2].key, False)
    side.side.worker_output(WorkerMetadata(failures=([failure],)))
    assert side.ask(request) == (16, True)


def test_caches_that_are_made_anew_otherwise_share_nothing(
    make: Callable[..., Side], caplog: pytest.LogCaptureFixture
) -> None:
    side = make()
    side.put(prompt(20))
    side.side.worker_output(WorkerMetadata(reports={0: PART}))
    assert side.ask(Request("a", prompt(20))) == (16, True)
    side.side.worker_output(
        WorkerMetadata(reports={0: replace(PART, layouts=("canonical",) * LAYERS)})
    )
    assert side.side.matched_tokens(Request("b", prompt(20)), 0) == (0, False)
    assert "registered again with other layers" in caplog.text


def test_look_ups_that_could_not_start_are_started_later(
    make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make(known=False)
    side.put(prompt(20))
    with (
        none_can_be_started(monkeypatch, "kvshelf-lookup"),
        pytest.raises(RuntimeError, match="thread limit"),
    ):
        side.side.worker_output(WorkerMetadata(reports={0: PART}))
    assert side.step().namespace is None
    # So the worker says again who it is.
    side.side.worker_output(WorkerMetadata(reports={0: PART}))
    assert side.step().namespace is not None
    assert side.ask(Request("r", prompt(20))) == (16, True)


# ------------------------------------------------------------------------- images as a whole


def _whole_items(config: SimpleNamespace) -> None:
    config.model_config.is_mm_prefix_lm = True


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("images", "stored", "expected"),
    [
        ([(20, 8)], 3, 20),
        ([(22, 8)], 3, 20),
        ([(16, 8)], 3, 24),
        ([(24, 8)], 3, 24),
        ([(8, 10), (18, 10)], 3, 8),
        ([(0, 30)], 3, 0),
    ],
)
def test_no_hit_ends_within_an_image_that_is_computed_as_a_whole(
    make: Callable[..., Side],
    whole: bool,
    images: list[tuple[int, int]],
    stored: int,
    expected: int,
) -> None:
    side = make(change=_whole_items if whole else lambda config: None)
    features = [image(str(offset), offset, length) for offset, length in images]
    items = [MultimodalItem(str(offset), offset, length) for offset, length in images]
    side.put(prompt(41), stored, items=items)
    hit = expected if whole else stored * CHUNK
    assert side.ask(Request("r", prompt(41), mm_features=features)) == (hit, hit > 0)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("doubtful", [False, True])
def test_what_follows_the_beginning_of_a_divided_image_is_not_stored(
    make: Callable[..., Side], whole: bool, doubtful: bool
) -> None:
    side = make(change=_whole_items if whole else lambda config: None)
    request = Request("r", prompt(41), mm_features=[image("x", 18, 10)])
    side.side.new_request(request)
    assert side.ask(request) == (0, False)
    stored = []
    for at, count in ((0, 20), (20, 12), (32, 8)):
        meta = side.step(
            {"r": (at, count)}, new=("r",) if at == 0 else (), sync_loads=doubtful and at == 0
        )
        stored += [store.chunk.index for store in meta.stores]
    assert stored == ([0, 1] if whole else [0, 1, 2, 3, 4])
