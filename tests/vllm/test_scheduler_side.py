"""The scheduler half: what it answers, when it stops waiting, and what it refuses."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import shutil
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.aux_output import AuxOutputConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1 import kv_cache_interface
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from kvshelf.config import Config
from kvshelf.errors import ConfigError, TransientStorageError, UnsupportedError
from kvshelf.format.keys import MultimodalItem
from kvshelf.format.kinds import FULL
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers import runtime
from kvshelf.vllm import check_vllm_version, connector
from kvshelf.vllm.connector import SharedStorageConnector
from kvshelf.vllm.handover import Handover
from kvshelf.vllm.item_ids import CLIENT, CONTENT
from kvshelf.vllm.metadata import (
    WeightsReport,
    WorkerMetadata,
    WorkerReport,
)
from kvshelf.vllm.multiprocess import model_facts
from kvshelf.vllm.namespace import kv_scales
from kvshelf.vllm.scheduler.hits import Hits
from tests.sim.engine import adapter, make_adapter
from tests.sim.engine_caches import LAYERS, SIZE, make_config, make_groups
from tests.sim.engine_sides import (
    CHUNK,
    PART,
    Blocks,
    LoneScheduler,
    Make,
    Request,
    image,
    make_connector,
    named_chunks,
    orders_of,
    round_of,
    set_clock,
    stored_chunks,
)
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.prompts import make_tail, prompt
from tests.support.threads import none_can_be_started
from tests.support.waiting import PATIENCE, until

#: Waiting requests whose lookups are made before vLLM polls them.
AHEAD = 256


@pytest.fixture
def side(make: Make) -> LoneScheduler:
    return make()


@pytest.fixture
def ahead(make: Make) -> LoneScheduler:
    """A side with memory, whose workers read ahead."""
    return make(memory=1 << 20)


# ------------------------------------------------------------------------- answers


@pytest.mark.parametrize("transferred", [False, True])
def test_what_another_connector_transfers_is_not_read_ahead(make: Make, transferred: bool) -> None:
    side = make(memory=1 << 20, others_transfer=True)
    tokens = prompt(41)
    side.put(tokens)
    params = {"do_remote_prefill": transferred, "remote_engine_id": "p"}
    side.side.new_request(Request("r", tokens, kv_transfer_params=params))
    side.looked_up("r")
    named = [op.request_id for _ in range(3) for op in side.step().prefetches]
    assert named == ([] if transferred else ["r"])


def test_newer_lookup_that_the_storage_never_answers_takes_no_hit_away(make: Make) -> None:
    side = make(deadlines={"probe": 0.3})
    side.put(prompt(41), 2)
    request = side.known("r", prompt(41))
    side.lookup("r").as_of -= 2
    gate = side.faults.hang("stat", times=1)
    for _ in range(10):
        side.step()
        assert side.side.matched_tokens(request, 0) == 16
        time.sleep(0.1)
    gate.set()


def test_preempted_request_is_answered_by_what_it_had_until_it_is_looked_up_anew(
    side: LoneScheduler,
) -> None:
    """While it waits, vLLM serves others."""
    tokens = prompt(41)
    side.put(tokens, 2)
    request = side.known("r", tokens)
    side.step({"r": (0, 41)}, new=("r",))
    gate = side.faults.hang("stat")
    request.num_preemptions = 1
    for _ in range(3):
        # With the chunks that were to be stored, of which none is there.
        assert side.side.matched_tokens(request, 0) == 40
        side.step()
    gate.set()
    until(lambda: side.side.matched_tokens(request, 0) == 16)


def test_of_a_long_queue_the_first_requests_have_keys(side: LoneScheduler) -> None:
    requests = [Request(str(number), prompt(41, number)) for number in range(1000)]
    for request in requests:
        side.side.new_request(request)

    assert side.with_lookups() == [str(n) for n in range(AHEAD)]
    # They are admitted or end, and others are next.
    side.step({"0": (0, 41), "1": (0, 41)}, new=("0", "1"))
    side.side.finished("2", ())
    side.step()
    assert side.with_lookups()[-3:] == [str(AHEAD), str(AHEAD + 1), str(AHEAD + 2)]
    # One that vLLM asks for out of order.
    assert side.ask(requests[900]) == 0
    for number in range(1000):
        side.side.finished(str(number), ())
    assert not side.remembers()


def test_hit_that_vllm_does_not_take_is_not_loaded(side: LoneScheduler) -> None:
    side.put(prompt(20))
    request = Request("r", prompt(20))
    assert side.ask(request) == 16
    # Another connector loads, prompt log probabilities were asked for, …
    side.load(request, 0)
    assert side.step().loads == []
    assert side.side.matched_tokens(request, 0) == 16


@pytest.mark.parametrize("why", ["the request", "the engine"])
def test_what_vllm_would_not_use_is_not_offered_held_or_counted_but_stored(
    make: Make, why: str
) -> None:
    # As in vllm/config/aux_output.py.
    aux_output = SimpleNamespace(enabled=why == "the engine")
    side = make(change=_set("aux_output_config", aux_output), memory=1 << 20)
    side.put(prompt(40), 3)
    gate = side.faults.hang("stat")
    request = Request("r", prompt(40), skip_reading_prefix_cache=why == "the request")
    side.side.new_request(request)
    for _ in range(3):
        assert side.side.matched_tokens(request, 0) == 0
        assert side.step().prefetches == []
    gate.set()
    side.looked_up("r")
    assert side.side.matched_tokens(request, 0) == 0
    for _ in range(3):
        assert side.step().prefetches == []
    assert side.side.counters.snapshot().get("hit_tokens", 0) == 0
    meta = side.step({"r": (0, 40)}, new=("r",))
    assert stored_chunks(meta) == [3, 4]
    # Nor after a preemption.
    request.num_preemptions = 1
    assert side.side.matched_tokens(request, 0) == 0
    assert side.step().prefetches == []


@pytest.mark.parametrize("known", [True, False])
def test_request_whose_hand_over_is_late_waits_for_nothing_more(make: Make, known: bool) -> None:
    side = make(known=known)
    clock, gate = set_clock(side.side), threading.Event()
    side.faults.add(Fault("stat", wait=gate))
    params = Handover(side.fmt.namespace.digest, 8, bytes(32), 0, "0" * 32).params()
    request, short = (Request(name, prompt(41), kv_transfer_params=params) for name in "rs")
    # A block is computed sooner than it is waited for.
    assert side.side.matched_tokens(short, 4) == 0
    side.side.finished("s", ())
    side.side.new_request(request)
    assert side.side.matched_tokens(request, 0) is None
    begin = time.monotonic()
    side.step()
    # No step sleeps while a lookup may end soon.
    assert known is (time.monotonic() - begin < 5e-3)
    clock.now += 3600
    assert side.side.matched_tokens(request, 0) == 0
    gate.set()


def _opaque(part: WorkerReport) -> WorkerReport:
    """A report of caches whose layout is unknown, so that there are no tails."""
    fields = {"layouts": "opaque-0123456789abcdef", "layer_shapes": "2,512", "layer_dtypes": "U8"}
    return replace(part, **{name: (value,) * LAYERS for name, value in fields.items()})


@pytest.mark.parametrize(("part", "loaded"), [(PART, 7), (_opaque(PART), 0)])
def test_tail_that_is_handed_over_is_loaded_behind_all_that_vllm_has(
    make: Make, part: WorkerReport, loaded: int
) -> None:
    side = make(known=False)
    side.report(reports={0: part})
    side.report()
    assert side.side.namespace is not None
    side.fmt = ObjectFormat(side.side.namespace)
    side.put(prompt(15))
    tail = make_tail(side.fmt, 7)
    if loaded:
        side.put_chunk(tail)
    params = Handover(side.side.namespace.digest, 15, tail.key, 7, "0" * 32).params()
    assert side.ask(Request("r", prompt(15), kv_transfer_params=params), 8) == loaded
    assert side.side.counters.snapshot()["handovers_complete"] == 1


# ------------------------------------------------------------------------- failed loads


def test_hole_is_stored_though_it_is_long_until_it_is_computed(side: LoneScheduler) -> None:
    side.put(prompt(40))
    request = Request("r", prompt(40))
    side.ask(request)
    key = side.chunks(prompt(40))[2].key
    side.fail(key)
    # A lookup that begins now asks the storage for it again.
    request.num_computed_tokens = 16
    time.sleep(3600)
    meta = side.step({"r": (16, 24)})
    assert stored_chunks(meta) == [2]


@pytest.mark.parametrize(
    ("computed", "end", "chunks"),
    [(0, 16, [0, 1]), (8, 16, [1]), (20, 20, []), (24, 36, [3, 4])],
)
def test_answer_that_is_older_than_a_failure_ends_before_it(
    ahead: LoneScheduler, computed: int, end: int, chunks: list[int]
) -> None:
    tokens = prompt(40)
    ahead.put(tokens)
    request = ahead.known("r", tokens)
    ahead.fail(ahead.chunks(tokens)[2].key)
    # Chunks that vLLM has itself need not be on the shelf.
    assert computed + ahead.ask(request, computed) == end
    named = named_chunks(ahead.step()) or named_chunks(ahead.step())
    assert named.get("r", []) == chunks


def test_idle_steps_after_a_forward_pass_are_not_a_pause(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make(change=_set("parallel_config.pipeline_parallel_size", 4))
    side.put(prompt(40))
    request = side.known("r", prompt(40))
    side.step({"s": (0, 1000)}, new=("s",))
    side.tell(breaker_open=True)
    side.step()
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 2)
    assert side.side.matched_tokens(request, 0) == 0


def test_while_the_breaker_of_a_worker_is_open_nothing_is_offered(
    side: LoneScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.put(prompt(40))
    side.step()
    side.tell(breaker_open=True)
    assert side.ask(Request("r", prompt(40))) == 0
    side.tell(breaker_open=False)
    assert side.ask(Request("s", prompt(40))) == 36
    side.tell(breaker_open=True)
    side.step({"s": (36, 40)})
    now, passed = time.monotonic, 2.0
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed)
    # That step took long.
    assert side.ask(Request("t", prompt(40))) == 0
    # Without steps an engine gets no reports of its workers.
    side.step()
    passed = 4.0
    assert side.ask(Request("u", prompt(40))) == 36


def test_requests_are_not_looked_up_while_the_breaker_of_the_scheduler_is_open(
    side: LoneScheduler,
) -> None:
    side.faults.add(Fault("*", error=lambda: TransientStorageError(5, "EIO")))
    numbers = itertools.count()
    until(
        lambda: side.ask(Request(f"{next(numbers)}", prompt(40))) == 0 and not side.shelf.available
    )
    skipped = side.side.counters.snapshot().get("skipped_lookups", 0)
    assert side.ask(Request("r", prompt(40))) == 0
    assert side.side.counters.snapshot()["skipped_lookups"] == skipped + 1


def test_look_up_that_hangs_is_made_again_for_the_keys(make: Make) -> None:
    side = make(deadlines={"probe": 0.3})
    side.put(prompt(40))
    gate = side.faults.hang("stat", times=1)
    request = Request("r", prompt(40, 1))
    assert side.ask(request) == 0
    # vLLM asks again for a request that it could not admit.
    assert side.ask(request) == 0
    assert side.side.counters.snapshot()["lookup_timeouts"] == 1
    assert not side.step({"r": (0, 16)}, new=("r",)).stores
    side.looked_up("r")
    meta = side.step({"r": (16, 16)})
    assert stored_chunks(meta) == [0, 1, 2, 3]
    gate.set()


def test_request_whose_look_up_fails_is_stored(side: LoneScheduler) -> None:
    side.faults.add(Fault("stat", error=RuntimeError("a bug")))
    assert side.ask(Request("r", prompt(40))) == 0
    assert stored_chunks(side.step({"r": (0, 40)}, new=("r",))) == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------- stores


def test_step_reads_nothing_of_requests_that_complete_no_chunk(side: LoneScheduler) -> None:
    """Most of the requests of most steps: each costs the step's time."""
    read: list[str] = []

    class Counting(Request):
        """Counts what is read of it."""

        def __getattribute__(self, name: str) -> Any:
            read.append(name)
            return super().__getattribute__(name)

    request = Counting("r", prompt(20))
    side.side.new_request(request)
    side.looked_up("r")
    assert stored_chunks(side.step({"r": (0, 20)}, new=("r",))) == [0, 1]
    side.step({"r": (20, 1)})
    read.clear()
    for computed in range(21, 30):
        side.step({"r": (computed, 1)})
    assert read == []


def test_step_whose_blocks_vllm_does_not_name_stores_later(side: LoneScheduler) -> None:
    request = Request("r", prompt(20))
    side.ask(request)
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={"r": 20},
        total_num_scheduled_tokens=20,
        preempted_req_ids=None,
        kv_connector_block_state=KVConnectorBlockState(set(), lambda _: ([],), {}),
    )
    assert side.side.step_metadata(output).stores == []
    assert len(side.step({"r": (20, 1)}).stores) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"prompt_is_token_ids": [True] * 40},
        {"resumable": True},
    ],
)
def test_request_whose_tokens_may_change_is_neither_loaded_nor_stored(
    side: LoneScheduler, changed: dict[str, object]
) -> None:
    side.put(prompt(40), 3)
    assert side.ask(Request("r", prompt(40), **changed)) == 0
    assert not side.step({"r": (0, 40)}, new=("r",)).stores


def test_step_of_which_a_part_fails_brings_loads_and_stores_nothing(
    ahead: LoneScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (0, 1):
        ahead.put(prompt(20, seed))
    requests = [ahead.known(name, prompt(20, seed)) for seed, name in enumerate(("r", "s", "t"))]
    ahead.step()
    assert ahead.ask(requests[0]) == 16
    ahead.load(requests[0], 16)

    def broken(*_: object) -> None:
        raise KeyError("a component that plans after the stores")

    ahead.side.admission.always = False
    monkeypatch.setattr(ahead.side.admission, "plan", broken)
    meta = ahead.step({"t": (0, 20)}, new=("t",))
    assert (meta.stores, meta.prefetches) == ([], [])
    assert [op.request_id for op in meta.loads] == ["r"]


def test_what_to_read_ahead_that_cannot_be_planned_does_not_hold_up_loads(
    ahead: LoneScheduler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.put(prompt(20))
    ahead.known("gone", prompt(20))
    ahead.step()
    ahead.step()
    request = Request("r", prompt(20))
    assert ahead.ask(request) == 16
    ahead.load(request, 16)
    ahead.side.finished("gone", ())
    ahead.known("s", prompt(20, 1))

    def broken(*_: object) -> int:
        raise KeyError("a chunk")

    monkeypatch.setattr(Hits, "loadable", broken)
    meta = ahead.step()
    assert len(meta.loads) == 1
    assert orders_of(meta).prefetch_ended == ["gone"]
    assert "could not be planned" in caplog.text


# ------------------------------------------------------------------------- waiting


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
def test_step_waits_only_where_no_other_rank_waits_for_it(
    make: Make, ranks: int, stages: int, asynchronous: bool, waits: list[bool]
) -> None:
    def change(config: SimpleNamespace) -> None:
        config.parallel_config.data_parallel_size = ranks
        config.parallel_config.pipeline_parallel_size = stages
        config.scheduler_config.async_scheduling = asynchronous

    side = make(known=stages == 1, change=change)
    side.side.new_request(Request("busy", prompt(20)))
    found = [side.step({"busy": (0, 1)}), side.step(), side.step()]
    assert [meta.idle for meta in found] == waits
    # Once the last request has ended nothing is in flight.
    side.step({"busy": (1, 1)})
    side.side.finished("busy", ())
    assert side.step().idle is waits[-1]


@pytest.mark.parametrize(("tokens", "computed"), [(20, 16), (17, 16), (16, 12), (7, 0), (7, 4)])
def test_request_whose_tokens_vllm_has_waits_for_no_look_up(
    make: Make, tokens: int, computed: int
) -> None:
    side = make()
    side.put(prompt(tokens))
    request = Request("r", prompt(tokens))
    gate, waits = _hold_lookups(side, request)
    assert side.side.matched_tokens(request, computed) == 0
    assert waits == []
    gate.set()


def _hold_lookups(side: LoneScheduler, *requests: Request) -> tuple[threading.Event, list[float]]:
    """Submit requests whose lookups wait for an event; return it, and how long steps wait."""
    gate = side.faults.hang("stat")
    waits: list[float] = []
    for request in requests:
        side.side.new_request(request)
        lookup = side.lookup(request.request_id)
        lookup.wait = lambda seconds: _sleep(seconds, waits)  # type: ignore[method-assign]
    return gate, waits


def _sleep(seconds: float, waits: list[float]) -> bool:
    waits.append(seconds)
    threading.Event().wait(seconds)
    return False


def test_worker_s_problem_ends_hits_and_stores_and_is_logged_once(
    side: LoneScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    side.put(prompt(20))
    request = Request("r", prompt(30))
    assert side.ask(request) == 16
    for _ in range(3):
        side.tell(disabled=[("the weights changed", False)])
    assert side.side.matched_tokens(request, 0) == 0
    assert side.side.matched_tokens(Request("s", prompt(20)), 0) == 0
    assert side.step({"r": (0, 30)}, new=("r",)).stores == []
    assert caplog.text.count("the weights changed") == 1


# ------------------------------------------------------------------------- the end of requests


def test_finished_request_leaves_nothing_behind(side: LoneScheduler) -> None:
    side.put(prompt(20))
    request = Request("r", prompt(20))
    side.ask(request)
    side.load(request, 16)
    assert len(side.step().loads) == 1
    side.side.finished("r", ())
    side.side.finished("r", ())
    side.side.loads.done({"r"})
    assert orders_of(side.step()).cancelled == [1]
    assert not orders_of(side.step()).cancelled
    assert not side.remembers()


@pytest.mark.parametrize(
    ("cache_gb", "prefix_caching", "stored"),
    [(4.0, True, True), (4.0, False, True), (0.0, True, True), (0.0, False, False)],
)
def test_images_that_vllm_only_numbers_are_neither_looked_up_nor_stored(
    make: Make, cache_gb: float, prefix_caching: bool, stored: bool
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
    assert (side.ask(request) > 0) is stored
    words = Request("words", prompt(24, 1))
    side.put(words.prompt_token_ids)
    assert side.ask(words) > 0
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
def test_image_by_an_id_that_a_client_may_have_chosen_needs_a_salt(
    side: LoneScheduler, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    item, said = UNTRUSTED[case]
    tokens = prompt(24)
    for salt in ("", "a tenant's"):
        side.put(tokens, items=[MultimodalItem(side.item_ids.in_key(item), 3, 4)], salt=salt)
    for name, salt in (("one", None), ("two", None), ("salted", "a tenant's")):
        request = Request(name, tokens, cache_salt=salt, mm_features=[item])
        assert (side.ask(request) > 0) is (salt is not None)
    assert side.side.counters.snapshot()["uuid_requests"] == 2
    assert caplog.text.count("whose id a client may have chosen are neither loaded nor stored") == 1
    assert said in caplog.text
    assert "trust_uuids" in caplog.text

    fresh = Request("fresh", prompt(24, 2), mm_features=[item])
    salted = Request("fresh, salted", prompt(24, 3), mm_features=[item], cache_salt="a tenant's")
    for request in (fresh, salted):
        side.ask(request)
    meta = side.step({"fresh": (0, 24), "fresh, salted": (0, 24)}, new=("fresh", "fresh, salted"))
    assert len(meta.stores) == 3


def test_encoders_in_other_engines_know_images_by_ids_without_marks(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    side = make(change=_set("ec_transfer_config", SimpleNamespace()))
    tokens = prompt(24)
    side.put(tokens, items=[MultimodalItem("cat", 3, 4)])
    assert side.ask(Request("r", tokens, mm_features=[image("cat", 3, 4)])) == 0
    assert "ec_transfer_config" in caplog.text


def test_what_is_admitted_behind_another_connector_s_load_waits_if_it_shares_its_blocks(
    make: Make,
) -> None:
    side = make(change=_set("scheduler_config.async_scheduling", True))
    requests = {name: Request(name, prompt(80, n)) for n, name in enumerate("ars")}
    for request in requests.values():
        side.ask(request)
    tables = {"a": range(10, 20), "r": range(100, 140), "s": range(10, 30)}

    def step(scheduled: dict[str, tuple[int, int]], **options: Any) -> set[str]:
        """The requests of which a step stores chunks."""
        meta = side.step(scheduled, blocks=lambda name: (list(tables[name]),), **options)
        keys = {op.chunk.key for op in meta.stores}
        return {name for name, request in requests.items() if keys & side.keys(request)}

    step({"a": (16, 8)}, new=("a",), sync_loads=True)
    assert step({"r": (0, 24), "s": (0, 24)}, new=("r", "s")) == {"r"}
    assert step({"r": (24, 8), "s": (24, 8)}) == {"r"}
    assert step({"r": (32, 8), "s": (32, 8)}) == {"r", "s"}


def test_reset_forgets_what_a_distant_storage_was_seen_to_have(make: Make) -> None:
    side = make(known=False)
    side.shelf = Shelf(FaultyStorage(side.faults, probe_cost=10e-3))
    side.report(reports={0: PART})
    side.put(prompt(40))
    assert side.ask(Request("before", prompt(40))) == 36
    shutil.rmtree(Path(side.faults.url) / side.fmt.namespace.folder)
    assert side.ask(Request("remembered", prompt(40))) == 36
    side.reset()
    assert side.ask(Request("after", prompt(40))) == 0


def test_reset_forgets_loads_that_failed_also_without_their_requests(side: LoneScheduler) -> None:
    side.put(prompt(40))
    key = side.chunks(prompt(40))[1].key
    side.fail(key, bad=True)
    assert side.ask(Request("before", prompt(40))) == 8
    side.reset()
    assert side.ask(Request("after", prompt(40))) == 36


# ------------------------------------------------------------------------- the connector


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    connector._logs.clear()


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
            SimpleNamespace(
                kv_connector_worker_meta=WorkerMetadata(),
                finished_recving=None,
                finished_sending=None,
            )
        )
        assert made.request_finished(request, []) == (False, None)
        assert made.reset_cache() is False
    assert caplog.text.count("get_num_new_matched_tokens failed; the engine goes on") == 1
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
    tmp_path: Path, change: Callable[[SimpleNamespace], None], message: str, role: KVConnectorRole
) -> None:
    config = make_config(str(tmp_path / "shelf"))
    change(config)
    with pytest.raises(UnsupportedError, match=message):
        SharedStorageConnector(config, role, make_groups(config))
    assert not (tmp_path / "shelf").exists()


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_engine_that_simulates_the_choice_of_experts_does_not_start(
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


def test_model_without_caches_is_refused(tmp_path: Path) -> None:
    config = make_config(str(tmp_path))
    with pytest.raises(UnsupportedError, match="no KV cache group"):
        SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config, 0))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("windowed", [True, False])
def test_answers_that_see_a_window_are_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, windowed: bool, whole: bool
) -> None:
    config = make_config(str(tmp_path), save_decode=True)
    groups = make_groups(config)
    size = groups.kv_cache_groups[0].kv_cache_spec.block_size
    spec = SimpleNamespace(block_size=size, dcp_sharded=False)
    groups.kv_cache_groups[0].kv_cache_spec = spec
    if windowed:
        spec.rswa_window = 128
    if not whole:
        specs: Any = {"model.layers.0.self_attn.attn": spec}
        groups.kv_cache_groups[0].kv_cache_spec = UniformTypeKVCacheSpecs(spec.block_size, specs)
    for role in KVConnectorRole:
        made = SharedStorageConnector(config, role, groups)
        assert made.config.save_decode is not windowed
        made.shutdown()
    assert caplog.text.count("save_decode is off") == windowed


def test_vllm_has_what_the_refusals_rely_on() -> None:
    assert kv_cache_interface.HiSparseHotSpec.prefix_cacheable.fget(None) is False
    assert "rswa_window" in {one.name for one in fields(kv_cache_interface.RSWASpec)}
    assert "kv_cache_specs" in {one.name for one in fields(UniformTypeKVCacheSpecs)}
    assert AuxOutputConfig(enable_return_routed_experts=True).enabled
    source = inspect.getsource(Scheduler.__init__)
    # The blocks of consumers are kept until their last step has run.
    condition = "if multiple_inflight_batches and kv_transfer_config.is_kv_consumer:"
    assert condition in source
    assert "self.defer_block_free = True" in source[source.index(condition) :]
    source = inspect.getsource(multi_connector.MultiConnector.__init__)
    assert source.index("super().__init__(") < source.index("connector_cls(temp_config")


@pytest.mark.parametrize(
    ("before", "log"),
    [
        ("fail", "kv_load_failure_policy is set to recompute"),
        ("recompute", ""),
    ],
)
def test_failed_loads_are_recomputed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str, log: str
) -> None:
    config = make_config(str(tmp_path))
    config.kv_transfer_config.kv_load_failure_policy = before
    with caplog.at_level("DEBUG", "kvshelf"):
        SharedStorageConnector(config, KVConnectorRole.SCHEDULER, make_groups(config)).shutdown()
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert log in caplog.text
    assert log or "policy" not in caplog.text


def test_start_of_an_engine_names_shelf_bounds_and_memory_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(str(tmp_path), memory="8MiB", capacity={"max_bytes": "2TiB"})
    with caplog.at_level("INFO", "kvshelf"):
        for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
            SharedStorageConnector(config, role, make_groups(config)).shutdown()
    line = f"shelf {tmp_path}, 8 tokens a chunk, memory 8.0 MiB, max_bytes 2.0 TiB"
    assert [record.getMessage() for record in caplog.records].count(line) == 1


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


# ------------------------------------------------------------------------- opening


def test_log_lines_about_a_shelf_that_does_not_answer_show_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()

    def hang(url: str, **_: Any) -> Shelf:
        assert gate.wait(PATIENCE)
        return Shelf(posix(tmp_path))

    monkeypatch.setattr(runtime, "START_SECONDS", 0.01)
    monkeypatch.setattr(runtime, "open_shelf", hang)
    config = Config(shared_storage_path="sftp://user:hun@ter2@host/kv")
    runtime.open_runtime(config, runtime.Role.ENGINE, Counters()).close()
    gate.set()
    assert "sftp://host/kv has not answered" in caplog.text
    assert "ter2" not in caplog.text


# ------------------------------------------------------------------------- several ranks


def _ranks(make: Make, stages: int = 1) -> LoneScheduler:
    """A side of an engine with two workers that have not reported yet."""
    side = make(known=False, ranks=2)
    side.config.parallel_config.tensor_parallel_size = 2 // stages
    side.config.parallel_config.pipeline_parallel_size = stages
    return side


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
                layer_shapes=(f"2,*,{heads},{SIZE}",) * LAYERS,
                kv_scales=kv_scales(context_of, context_of),
            )
        )
    return reports


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize(("ranks", "context"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2)])
def test_scales_of_heads_are_the_same_on_any_number_of_ranks(
    make: Make, heads: int, ranks: int, context: int
) -> None:
    side = make(known=False, ranks=ranks * context)
    side.config.model_config.get_total_num_kv_heads = lambda: heads
    side.config.parallel_config.tensor_parallel_size = ranks
    side.config.parallel_config.prefill_context_parallel_size = context
    reports = _scaled_by_head(heads, ranks, context)
    side.report(reports=dict(enumerate(reports)))
    assert side.side.namespace is not None
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
    make: Make, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    side = make(known=False, ranks=4)
    side.config.model_config.get_total_num_kv_heads = lambda: 2
    side.config.parallel_config.tensor_parallel_size = 4
    reports = _scaled_by_head(2, 4, 1)
    found = reports[3].kv_scales
    other: tuple[Any, ...] = {
        "a copy": (((9.0,), (9.0,)), *found[1:]),
        "a part": (((9.0, 9.0), (9.0, 9.0)), *found[1:]),
        "none": (),
    }[which]
    reports[3] = replace(reports[3], kv_scales=other)
    side.report(reports=dict(enumerate(reports)))
    assert side.side.namespace is None
    assert "rank 3 differ from those of rank 0" in caplog.text


def test_bad_chunk_is_trusted_again_when_all_ranks_have_repaired_it(make: Make) -> None:
    side = _ranks(make)
    side.report(reports={0: PART, 1: replace(PART, weights=None)})
    side.put(prompt(20))
    request = Request("r", prompt(20))
    assert side.ask(request) == 16
    key = side.chunks(prompt(20))[1].key
    side.fail(key, bad=True)
    for number, repaired in enumerate([[], [key], [key]]):
        side.tell(repaired=repaired)
        assert side.ask(Request(f"before {number}", prompt(20))) == 8
    # Found bad once more: what was repaired before counts no longer.
    side.fail(key, bad=True)
    side.tell(1, repaired=[key])
    assert side.ask(Request("still", prompt(20))) == 8
    side.tell(repaired=[key])
    assert side.ask(Request("after", prompt(20))) == 16
    # Where one stage alone has layers of this kind, its ranks are enough.
    side.side.engine.ranks_of = {FULL: 1}
    first = side.chunks(prompt(20))[0].key
    side.fail(first, bad=True)
    side.tell(1, repaired=[first])
    assert side.ask(Request("of one stage", prompt(20))) == 16


def test_load_and_its_end_are_announced_until_every_rank_has_begun(make: Make) -> None:
    side = _ranks(make)
    side.report(reports={0: PART, 1: replace(PART, weights=None)})
    side.put(prompt(20))
    request = Request("r", prompt(20))
    side.ask(request)
    side.load(request, 16)
    load = side.side.requests["r"].load
    for _ in range(3):
        meta = side.step(silent=frozenset({1}))
        assert [op.number for op in meta.loads] == [load]
    side.side.finished("r", ())
    for _ in range(3):
        meta = side.step(silent=frozenset({1}))
        assert orders_of(meta).cancelled == [load]
        assert [op.chunks for op in meta.loads] == [[]]
    side.step()
    meta = side.step()
    assert not meta.loads
    assert not meta.orders


def test_load_whose_end_was_lost_ends_when_its_request_is_computed(side: LoneScheduler) -> None:
    side.put(prompt(41))
    first, second = (side.known(name, prompt(41)) for name in ("first", "second"))
    assert side.ask(first) == 40
    side.load(first, 40)
    for _ in range(3):
        side.step()
        assert side.side.matched_tokens(second, 0) is None
    side.step({"first": (40, 1)}, new=("first",))
    assert side.ask(second) == 40


def test_adapter_that_is_distrusted_after_its_digest_is_neither_loaded_nor_stored(
    side: LoneScheduler, tmp_path: Path
) -> None:
    named = {"lora_request": adapter(make_adapter(tmp_path / "a", "a"))}
    side.known("first", prompt(20), **named)
    chain = side.lookup("first").chain
    assert chain is not None
    for chunk in chain.chunks:
        side.put_chunk(chunk)
    requests = [side.known(f"{seed}", prompt(20, seed), **named) for seed in (0, 1)]
    side.tell(other_adapters=[1])
    assert [side.ask(request) for request in requests] == [0, 0]
    assert not stored_chunks(side.step({"1": (0, 20)}, new=("1",)))


def _change_weights(side: LoneScheduler) -> None:
    """Give the engine other weights in place, and have its workers name them."""
    side.side.weights_may_change("a test")
    side.report(weights={0: WeightsReport(round_of(side.side), "aa", "bb")})
    side.report()
    assert side.side.namespace not in (None, side.fmt.namespace)


def test_what_is_computed_behind_a_load_of_new_weights_is_stored(side: LoneScheduler) -> None:
    _change_weights(side)
    assert side.side.namespace is not None
    side.fmt = ObjectFormat(side.side.namespace)
    side.put(prompt(41), 2)
    request = Request("r", prompt(41))
    assert side.ask(request) == 16
    side.load(request, 16)
    assert stored_chunks(side.step({"r": (16, 25)}, new=("r",))) == [2, 3, 4]


def test_weights_without_a_name_end_a_wait_for_a_hand_over(side: LoneScheduler) -> None:
    params = Handover(side.fmt.namespace.digest, 8, bytes(32), 0, "0" * 32).params()
    request = Request("r", prompt(41), kv_transfer_params=params)
    side.side.new_request(request)
    side.side.weights_may_change("a test")
    assert side.side.matched_tokens(request, 0) is None
    side.report(weights={0: WeightsReport(round_of(side.side), None, None, problem="a test")})
    assert side.side.matched_tokens(request, 0) == 0


def test_request_that_waits_gets_keys_of_the_new_weights(side: LoneScheduler) -> None:
    side.put(prompt(20))
    request = side.known("r", prompt(20))
    before = side.lookup("r")
    side.side.weights_may_change("a test")
    assert side.ask(request) == 0
    _change_weights(side)
    until(lambda: side.lookup("r").done)
    chains = before.chain, side.lookup("r").chain
    old, new = ({chunk.key for chunk in chain.chunks} for chain in chains if chain is not None)
    assert not old & new


# ------------------------------------------------------------------------- requests that wait


def test_requests_that_cannot_be_admitted_do_not_starve_those_behind_them(
    ahead: LoneScheduler,
) -> None:
    tokens = prompt(40)
    ahead.put(tokens, 4)
    # Their grammar is not compiled, or no step has room for their adapter: vLLM asks for none.
    ahead.put(prompt(40, 6), 4)
    blocked = [ahead.known(f"blocked {i}", prompt(40, i + 1)) for i in range(100)]
    # These have no keys, or take nothing from a cache.
    for i in range(100):
        ahead.side.new_request(Request(f"embeds {i}", prompt(40), prompt_embeds=object()))
        ahead.side.new_request(Request(f"logprobs {i}", prompt(40), skip_reading_prefix_cache=True))
    first, _ = (ahead.known(name, tokens) for name in ("first", "second"))
    assert ahead.ask(first) == 32
    assert named_chunks(ahead.step()) == {}
    assert named_chunks(ahead.step()) == {"first": [0, 1, 2, 3], "second": [0, 1, 2, 3]}
    # What is blocked no more is looked at again.
    assert ahead.ask(blocked[5]) == 32
    ahead.step()
    assert named_chunks(ahead.step()) == {"blocked 5": [0, 1, 2, 3]}


def test_preempted_request_waits_before_all_others(ahead: LoneScheduler) -> None:
    prompts = {name: prompt(40, seed) for seed, name in enumerate(("preempted", "other"))}
    for tokens in prompts.values():
        ahead.put(tokens, 4)
    preempted, _ = (ahead.known(name, tokens) for name, tokens in prompts.items())
    ahead.ask(preempted)
    ahead.step({"preempted": (0, 40)}, new=("preempted",))
    preempted.num_preemptions = 1
    # There are no blocks for it, so that vLLM does not come to the other one.
    named = {}
    for _ in range(3):
        ahead.side.matched_tokens(preempted, 0)
        named |= named_chunks(ahead.step())
    assert named["other"] == [0, 1, 2, 3]


def test_look_ups_that_could_not_start_are_started_later(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = make(known=False)
    side.put(prompt(20))
    with none_can_be_started(monkeypatch, "kvshelf-lookup"):
        side.report(reports={0: PART})
    assert "thread limit" in caplog.text
    assert side.step().namespace is None
    # So the worker reports again.
    side.report(reports={0: PART})
    assert side.step().namespace is not None
    assert side.ask(Request("r", prompt(20))) == 16


# ------------------------------------------------------------------------- images as a whole


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
    make: Make, whole: bool, images: list[tuple[int, int]], stored: int, expected: int
) -> None:
    side = make(change=_set("model_config.is_mm_prefix_lm", whole))
    features = [image(str(offset), offset, length) for offset, length in images]
    items = [MultimodalItem(str(offset), offset, length) for offset, length in images]
    side.put(prompt(41), stored, items=items)
    hit = expected if whole else stored * CHUNK
    assert side.ask(Request("r", prompt(41), mm_features=features)) == hit


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("doubtful", [False, True])
@pytest.mark.parametrize("images", [[(18, 10)], [(18, 10), (30, 8)]])
def test_what_follows_the_beginning_of_a_divided_image_is_not_stored(
    make: Make, whole: bool, doubtful: bool, images: list[tuple[int, int]]
) -> None:
    side = make(change=_set("model_config.is_mm_prefix_lm", whole))
    features = [image(str(offset), offset, length) for offset, length in images]
    request = Request("r", prompt(41), mm_features=features)
    assert side.ask(request) == 0
    stored = []
    for at, count in ((0, 20), (20, 12), (32, 8)):
        meta = side.step(
            {"r": (at, count)}, new=("r",) if at == 0 else (), sync_loads=doubtful and at == 0
        )
        stored += [store.chunk.index for store in meta.stores]
    assert stored == ([0, 1] if whole else [0, 1, 2, 3, 4])
