"""vLLM's questions: how many of its queue a step asks, and which wait for another's load."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvshelf.errors import TransientStorageError
from tests.sim import engine_sides as sides
from tests.sim.engine import EngineModel, Start
from tests.sim.engine_sides import LoneScheduler, Make, Request
from tests.sim.storage import Fault, FaultyStorage
from tests.support.prompts import prompt


class Asked:
    """What vLLM was answered since the last time that a test looked."""

    def __init__(self, engine: EngineModel) -> None:
        self._answers: dict[str, int | None] = {}
        ask = engine.connector.get_num_new_matched_tokens

        def asked(request: Request, computed: int) -> tuple[int | None, bool]:
            answer: tuple[int | None, bool] = ask(request, computed)
            self._answers[request.request_id] = answer[0]
            return answer

        engine.connector.get_num_new_matched_tokens = asked

    def take(self) -> dict[str, int | None]:
        answers, self._answers = self._answers, {}
        return answers


def used_blocks(engine: EngineModel) -> int:
    pool = engine.scheduler.kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


# --------------------------------------------------------------------------- a long queue


def test_step_asks_for_few_requests_of_a_long_queue(start: Start) -> None:
    engine = start(requests=4, budget=256)
    side = engine.connector._scheduler
    for number in range(4):
        engine.add(f"runs {number}", prompt(40, number), 60)
        engine.wait_for_lookup(f"runs {number}")
    engine.step()
    for number in range(600):
        engine.add(f"{number}", prompt(41, 100 + number))
    asked = Asked(engine)
    for number in range(4):
        engine.abort(f"runs {number}")
        for name in sides.with_lookups(side):
            # Whatever vLLM asks for has an old answer.
            engine.wait_for_lookup(name)
            side.requests[name].lookup.as_of -= 2
        engine.step()
        assert len(asked.take()) <= 20
        assert len(sides.with_lookups(side)) <= 300


@pytest.mark.parametrize("cause", ["load", "lookup"])
def test_step_leaves_at_most_256_requests_waiting(
    start: Start, backend: FaultyStorage, cause: str
) -> None:
    """The next is computed: it fills the step, and brings others what they wait for."""
    tokens = prompt(400)
    start(budget=1024).run([*tokens, 1])
    engine = start(blocks=2000, budget=512, requests=80)
    asked, hung = Asked(engine), threading.Event()
    backend.add(Fault("stat" if cause == "lookup" else "read", wait=hung))
    for number in range(400):
        engine.add(f"{number}", [*tokens, 1, number])
        if cause == "load" and number < 256:
            engine.wait_for_lookup(f"{number}")
    engine.step()
    answers = list(asked.take().values())
    assert answers.count(None) == 256
    assert 0 in answers
    assert len(answers) <= 256 + 80
    hung.set()
    engine.finish()


def test_request_that_waits_in_the_queue_finds_what_another_engine_stored_meanwhile(
    start: Start,
) -> None:
    document = prompt(203)
    engine = start(requests=1, prefix_caching=False)
    engine.add("runs", prompt(40, 1), 60)
    for number in range(4):
        engine.add(f"{number}", [*document, number])
        engine.wait_for_lookup(f"{number}")
    engine.step()
    start().run(document)
    # An answer is renewed when it is older than a second, one a step.
    time.sleep(1.2)
    for _ in range(8):
        engine.step()
        time.sleep(0.1)
    engine.abort("runs")
    engine.finish()
    assert [engine.loaded(f"{number}") for number in range(4)] == [192] * 4


# --------------------------------------------------------------------------- preempted requests


def waiting_for_blocks(engine: EngineModel, status: RequestStatus) -> set[str]:
    """The requests of a status that have no blocks."""
    requests = engine.scheduler.requests.items()
    return {name for name, r in requests if r.status == status and r.num_computed_tokens == 0}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_preempted_requests_are_admitted_before_new_ones(
    start: Start, backend: FaultyStorage, seconds: float, asynchronous: bool
) -> None:
    """vLLM passes over a request that has no answer, and gives its blocks to those behind it."""
    engine = start(requests=8, budget=128, blocks=90, asynchronous=asynchronous)
    for number in range(20):
        engine.add(f"{number}", prompt(100 + number, number), 60)
        engine.wait_for_lookup(f"{number}")
    backend.add(Fault("stat", wait=seconds))
    preempted: set[str] = set()
    ever_preempted: set[str] = set()
    while engine.scheduler.has_requests():
        new = waiting_for_blocks(engine, RequestStatus.WAITING)
        engine.step()
        time.sleep(0.02)
        preempted &= waiting_for_blocks(engine, RequestStatus.PREEMPTED)
        assert not preempted or waiting_for_blocks(engine, RequestStatus.WAITING) == new
        preempted = waiting_for_blocks(engine, RequestStatus.PREEMPTED)
        ever_preempted |= preempted
    engine.finish()
    assert len(ever_preempted) > 1


# --------------------------------------------------------------------------- one load for all


def loading(engine: EngineModel) -> list[str]:
    """The requests whose loads have not ended."""
    ended = engine.scheduler.finished_recving_kv_req_ids
    return [name for name in engine.names if engine.is_loading(name) and name not in ended]


def begin_alike(engine: EngineModel, own: int, *, longer: int = 0) -> None:
    """Add 16 prompts that begin with what is stored, each `longer` than the one before."""
    for number in range(16):
        tokens = [*prompt(800), 1, *prompt(own + longer * number, 100 + number)]
        engine.add(f"{number}", tokens)
        engine.wait_for_lookup(f"{number}")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("model", "own", "loads", "most"),
    [
        ("plain", 0, 1, 116),
        ("plain", 12, 1, 132),
        ("gpt-oss", 0, 1, 134),
        ("Gemma 3", 0, 1, 154),
        ("DeepSeek V4", 0, 1, 93),
        ("Qwen3-Next", 0, 1, 57),
        ("Llama 4", 0, 1, 132),
        ("two windows", 0, 1, 39),
        ("Mamba2", 0, 1, 17),
        # vLLM keeps windows and states where prompts part once it has seen that they do.
        ("gpt-oss", 45, 2, 382),
        ("Gemma 3", 45, 2, 476),
        ("Qwen3-Next", 45, 2, 238),
        ("Llama 4", 45, 1, 292),
    ],
)
def test_of_requests_that_begin_alike_one_loads(
    start: Start, model: str, own: int, loads: int, most: int, asynchronous: bool
) -> None:
    """As those of one request with ``n > 1`` do, or those with one system prompt."""
    start(model, budget=1024).run([*prompt(800), 1])
    engine = start(model, blocks=2000, budget=2048, requests=16, asynchronous=asynchronous)
    begin_alike(engine, own)
    used = 0
    while engine.scheduler.has_requests():
        engine.step()
        used = max(used, used_blocks(engine))
    engine.finish()
    assert [op.end for op in engine.loads.values()] == [800] * loads
    assert used <= most


@pytest.mark.parametrize(
    ("model", "drafts", "longer"),
    [
        # Without full KV it is not known where they part.
        ("Mamba2", 0, 1),
        # A drafter needs the block before: the load brings no windows of that.
        ("DeepSeek V4", 2, 1),
        ("DeepSeek V4", 2, 0),
    ],
)
def test_no_request_waits_for_a_load_of_which_vllm_keeps_nothing_for_it(
    start: Start, backend: FaultyStorage, model: str, drafts: int, longer: int
) -> None:
    start(model, drafts=drafts, budget=1024).run([*prompt(800), 1])
    engine = start(model, drafts=drafts, blocks=2000, budget=2048, requests=16)
    hung = backend.hang("read")
    begin_alike(engine, 20, longer=longer)
    engine.step()
    assert len(loading(engine)) == 16
    hung.set()
    engine.finish()


@pytest.mark.parametrize("end", ["done", "failed", "aborted", "reset"])
def test_however_a_load_ends_the_requests_that_waited_for_it_begin(
    start: Start, backend: FaultyStorage, end: str
) -> None:
    tokens = prompt(810)
    start(budget=1024).run(tokens)
    engine = start(blocks=2000, budget=2048, requests=16)
    asked, hung = Asked(engine), threading.Event()
    reads = backend.add(Fault("read", wait=hung))
    names = [f"{number}" for number in range(16)]
    for name in names:
        engine.add(name, tokens)
        engine.wait_for_lookup(name)
    for _ in range(3):
        engine.step()
        assert asked.take()["15"] is None
    assert loading(engine) == ["0"]
    if end == "aborted":
        engine.abort("0")
    elif end == "reset":
        # While the weights are compared, all is computed.
        engine.reset(running=True)
    else:
        reads.error = TransientStorageError("torn") if end == "failed" else None
        hung.set()
        while loading(engine):
            engine.step()
        backend.heal()
        reads = backend.add(Fault("read", wait=(hung := threading.Event())))
    asked.take()
    engine.step()
    answers = asked.take()
    assert answers.keys() >= set(names[1:])
    # Where the first has brought nothing, the others wait for the next.
    begun = names[1 : 2 if end == "aborted" else None]
    assert [name for name in names[1:] if answers.get(name) is not None] == begun
    for name in begun:
        status = engine.scheduler.requests[name].status
        assert status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
    hung.set()
    engine.finish()


def _load(side: LoneScheduler, request: Request) -> None:
    """Let a request load all of its hit."""
    assert side.ask(request) == 64
    side.load(request, 64)


LOADED = prompt(65)


@pytest.mark.parametrize(
    ("tokens", "salt", "waits"),
    [
        (LOADED, "", True),
        # Half of its hit, and less.
        ([*LOADED[:32], *prompt(33, 2)], "", True),
        ([*LOADED[:24], *prompt(41, 2)], "", False),
        # A load that is twice as long, and one that is longer.
        (LOADED[:33], "", True),
        (LOADED[:25], "", False),
        (LOADED, "other", False),
    ],
)
def test_request_waits_for_a_load_that_brings_most_of_its_hit(
    make: Make, tokens: list[int], salt: str, waits: bool
) -> None:
    side = make()
    side.put(LOADED)
    side.put(tokens, salt=salt)
    _load(side, Request("first", LOADED))
    request = side.known("other", tokens, cache_salt=salt)
    hit = (len(tokens) - 1) // sides.CHUNK * sides.CHUNK
    assert side.side.matched_tokens(request, 0) == (None if waits else hit)


def test_request_waits_for_two_loads(make: Make) -> None:
    side = make()
    side.put(LOADED)
    waiting = side.known("waiting", LOADED)
    for number in range(3):
        _load(side, Request(f"{number}", LOADED))
        assert side.side.matched_tokens(waiting, 0) == (None if number < 2 else 64)
        side.side.loads.done({f"{number}"})


def test_no_request_waits_for_a_load_that_vllm_does_not_cache(make: Make) -> None:
    def change(config: SimpleNamespace) -> None:
        config.cache_config.enable_prefix_caching = False

    side = make(change=change)
    side.put(LOADED)
    _load(side, Request("first", LOADED))
    _load(side, Request("second", LOADED))
