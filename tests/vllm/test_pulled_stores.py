"""Prompts larger than the memory of stores: chunks wait for room, and later steps store them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.format.keys import Chunk
from kvshelf.vllm.handover import no_handover
from kvshelf.vllm.metadata import RefusedStore
from tests.sim.engine import RUNNERS, EngineModel
from tests.sim.engine_sides import (
    LoneScheduler,
    Request,
    image,
    limit_stores,
    orders_of,
    stored_chunks,
)
from tests.sim.storage import Fault, FaultyStorage
from tests.support.clocks import Clock
from tests.support.prompts import prompt
from tests.support.waiting import until

CHUNK, CHUNKS = 8, 24
#: Chunks for which stores have memory.
IN_MEMORY = 4
ASKED = {"do_remote_decode": True}


@pytest.fixture
def storage(backend: FaultyStorage) -> Iterator[threading.Event]:
    """Objects are written only once it is set."""
    is_open = threading.Event()
    backend.add(Fault("write", "*.safetensors", wait=is_open))
    yield is_open
    is_open.set()


@pytest.fixture
def start(
    backend: FaultyStorage,
    storage: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Callable[..., EngineModel]]:
    engines: list[EngineModel] = []

    def start(
        runner: str = "V2 on a device", *, in_memory: int = IN_MEMORY, **options: Any
    ) -> EngineModel:
        settled = {"blocks": 80, "budget": 8 * CHUNK, "prefix_caching": False, **options}
        engines.append(EngineModel(backend.url, runner=runner, **settled))
        engines[-1].settle()
        limit_stores(engines[-1].worker.side, in_memory)
        return engines[-1]

    yield start
    storage.set()
    for engine in engines:
        engine.close()
    assert "the engine goes on" not in caplog.text


def loaded(start: Callable[..., EngineModel], like: EngineModel, tokens: list[int]) -> int:
    """Tokens that another engine of the same kind loads, of which it compares all bytes."""
    other = start("V1" if like.device is None else "V1 on a device", in_memory=CHUNKS)
    return other.run(tokens)[0]


@pytest.mark.parametrize("runner", RUNNERS)
def test_blocks_of_a_preempted_request_are_not_stored_as_its_own(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., EngineModel], runner: str
) -> None:
    engine = start(runner)
    tokens = prompt(CHUNKS * CHUNK + 1)
    engine.add("r", tokens, 20)
    while engine.computed("r") < len(tokens):
        engine.step()
    engine.step()
    engine.preempt("r")
    # Another one gets its blocks, and is part of the same steps.
    other = prompt(CHUNKS * CHUNK + 1, seed=1)
    waiting, preempted = engine.scheduler.waiting, engine.scheduler.requests["r"]
    waiting.remove_request(preempted)
    engine.add("other", other, 20)
    engine.step()
    storage.set()
    engine.drain()
    waiting.add_request(preempted)
    while engine.names:
        engine.step()
        engine.drain()
    for each in (tokens, other):
        assert loaded(start, engine, each) == CHUNKS * CHUNK


def test_producer_keeps_its_blocks_for_a_bounded_time(
    backend: FaultyStorage, storage: threading.Event, start: Callable[..., EngineModel]
) -> None:
    engine = start(handover_wait_s=0)
    free = engine.free_blocks
    tokens = prompt(CHUNKS * CHUNK + 3)
    engine.add("r", tokens, 1, transfer=ASKED)
    engine.finish()
    assert engine.free_blocks == free
    # Before any of the chunks in memory has failed.
    assert engine.worker.counted["promises_broken"] == 1
    until(lambda: engine.worker.counted["markers_written"] == 1)
    assert engine.counted["dropped_chunks_staging_full"] == CHUNKS + 1 - IN_MEMORY


# ------------------------------------------------------------- what the scheduler hands out


@pytest.fixture
def side(tmp_path: Path) -> Iterator[LoneScheduler]:
    made = LoneScheduler(tmp_path / "shelf")
    yield made
    made.close()


def compute(side: LoneScheduler, name: str, seed: int, **options: Any) -> tuple[Request, list[int]]:
    """Compute a prompt of four chunks and a tail in one step; return the chunks that it stores."""
    request = Request(name, prompt(4 * CHUNK + 1, seed), **options)
    assert side.ask(request) == 0
    meta = side.step({name: (0, request.num_prompt_tokens)}, new=(name,))
    request.num_computed_tokens = request.num_prompt_tokens
    return request, stored_chunks(meta)


def decode(side: LoneScheduler, *requests: Request) -> dict[str, list[int]]:
    """Compute a token of each request; return the chunks that the step stores, by request."""
    steps = {request.request_id: (request.num_computed_tokens, 1) for request in requests}
    stored: dict[str, list[int]] = {}
    for op in side.step(steps).stores:
        stored.setdefault(op.request_id, []).append(op.chunk.index)
    return stored


def refuse(side: LoneScheduler, request: Request, *chunks: Chunk) -> None:
    """Say that a worker had no memory for chunks that were handed out."""
    state = side.side.requests.get(request.request_id)
    state = state or side.side.stores.ended[request.request_id][0].state
    attempt = "" if state.promise is None else state.promise.attempt
    round_ = side.side.engine.handshake.round
    side.tell(refused=[RefusedStore(state.id, chunk, attempt, round_) for chunk in chunks])


def answer(side: LoneScheduler, room: int) -> None:
    """Say that all steps so far have ended, and for how many chunks there is room."""
    side.tell(room=(side.side.engine.steps, room))


def test_steps_store_as_many_chunks_as_there_is_room_for(side: LoneScheduler) -> None:
    first, stored = compute(side, "first", 1)
    assert stored == [0, 1, 2, 3]
    answer(side, 3)
    second, stored = compute(side, "second", 2)
    assert stored == [0, 1, 2]
    # The room is that of before the step.
    assert decode(side, first, second) == {}
    answer(side, 0)
    assert decode(side, first, second) == {}
    answer(side, 5)
    assert decode(side, first, second) == {"second": [3]}
    assert decode(side, first, second) == {}


def test_handed_over_prompts_and_then_the_oldest_get_room_first(side: LoneScheduler) -> None:
    answer(side, 0)
    requests = [
        compute(side, name, seed, kv_transfer_params=params)[0]
        for seed, (name, params) in enumerate({"old": None, "young": None, "over": ASKED}.items())
    ]
    answer(side, 7)
    assert decode(side, *requests) == {"over": [0, 1, 2, 3, 4], "old": [0, 1]}
    answer(side, 2)
    assert decode(side, *requests) == {"old": [2, 3]}


def test_tail_is_stored_in_the_step_that_completes_the_prompt(side: LoneScheduler) -> None:
    request = Request("r", prompt(4 * CHUNK - 1), kv_transfer_params=ASKED)
    assert side.ask(request) == 0
    assert stored_chunks(side.step({"r": (0, 4 * CHUNK - 3)}, new=("r",))) == [0, 1, 2]
    assert not side.step({"r": (4 * CHUNK - 3, 1)}).stores
    assert stored_chunks(side.step({"r": (4 * CHUNK - 2, 1)})) == [3]


def test_chunk_without_memory_is_handed_out_again_with_those_behind_it(side: LoneScheduler) -> None:
    request, _ = compute(side, "r", 1)
    refuse(side, request, *side.chunks(request.prompt_token_ids)[2:4])
    assert decode(side, request) == {"r": [2, 3]}


def test_ended_request_keeps_its_blocks_until_its_backlog_is_stored(side: LoneScheduler) -> None:
    answer(side, 3)
    _, stored = compute(side, "r", 1, kv_transfer_params=ASKED)
    assert stored == [0, 1, 2]
    blocks = [*range(20, 40)]
    keeps_blocks, params = side.side.finished("r", (blocks,))
    assert keeps_blocks and params is not None and params["kvshelf_tokens"] == 4 * CHUNK + 1
    answer(side, 1)
    (op,) = side.step().stores
    assert op.chunk.index == 3 and op.block_ids == (blocks[6:8],)
    answer(side, 0)
    assert not side.step().stores
    answer(side, 1)
    meta = side.step()
    assert [op.chunk.tail for op in meta.stores] == [True] and not orders_of(meta).released
    answer(side, 0)
    assert orders_of(side.step()).released == ["r"]


@pytest.mark.parametrize("answered", [False, True])
def test_ended_request_keeps_its_blocks_until_workers_have_answered(
    side: LoneScheduler, answered: bool
) -> None:
    _, stored = compute(side, "r", 1, kv_transfer_params=ASKED)
    assert stored == [0, 1, 2, 3, 4]
    if answered:
        answer(side, 0)
    keeps_blocks, params = side.side.finished("r", ([],))
    assert params is not None and keeps_blocks is not answered


def test_refused_chunk_of_an_ended_request_is_stored_from_its_blocks(side: LoneScheduler) -> None:
    request, _ = compute(side, "r", 1, kv_transfer_params=ASKED)
    chunks = side.chunks(request.prompt_token_ids)
    assert side.side.finished("r", ([*range(20, 40)],))[0]
    refuse(side, request, chunks[3])
    assert stored_chunks(side.step()) == [3]


@pytest.mark.parametrize("ends", ["deadline", "reset", "weights", "failed step"])
def test_promise_of_an_ended_request_is_broken_with_its_backlog(
    side: LoneScheduler, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    answer(side, 3)
    clock = side.side.stores.clock = Clock(0.0)
    _, params = compute(side, "r", 1, kv_transfer_params=ASKED)
    _, params = side.side.finished("r", ([*range(20, 40)],))
    assert params is not None
    if ends == "deadline":
        clock.now = side.side.engine.config.handover_wait_s - 0.1
        assert not orders_of(side.step()).released
        clock.now += 0.1
    elif ends == "reset":
        side.side.reset()
    elif ends == "weights":
        side.side.weights_may_change("a test")
    else:
        monkeypatch.setattr(side.side.periods, "plan", lambda *_: 1 / 0)
    orders = orders_of(side.step())
    assert orders.released == ["r"] and orders.broken == [params["kvshelf_attempt"]]
    assert side.side.counters.snapshot()["dropped_chunks_staging_full"] == 2


def test_reset_drops_the_backlogs_of_running_requests(side: LoneScheduler) -> None:
    answer(side, 0)
    request, _ = compute(side, "r", 1, kv_transfer_params=ASKED)
    side.reset()
    answer(side, 9)
    assert decode(side, request) == {}
    assert side.side.counters.snapshot()["dropped_chunks_staging_full"] == 4


def test_reset_compares_weights_although_backlogs_cannot_be_dropped(
    side: LoneScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side.side.stores, "drop_backlogs", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        side.side.reset()
    assert side.side.engine.handshake.checking


def test_backlog_of_a_request_that_hands_nothing_over_is_dropped_with_its_end(
    side: LoneScheduler,
) -> None:
    answer(side, 1)
    compute(side, "r", 1)
    assert side.side.finished("r", ([],)) == (False, None)
    assert side.side.counters.snapshot()["dropped_chunks_staging_full"] == 3


# ------------------------------------------------------------- what must not be stored or promised


def divide_nothing(config: Any) -> None:
    """Allow no image to be divided between steps."""
    config.model_config.is_mm_prefix_lm = True


@pytest.mark.parametrize(
    ("first", "length", "steps", "promised"),
    [
        # The image lies in the tail, and in a chunk.
        (4 * CHUNK + 1, 3, (4 * CHUNK + 2, 3), 4 * CHUNK),
        (2 * CHUNK + 1, 6, (2 * CHUNK + 4, 2 * CHUNK + 1), 2 * CHUNK),
    ],
)
def test_what_lies_behind_a_divided_image_is_neither_promised_nor_stored(
    tmp_path: Path, first: int, length: int, steps: tuple[int, int], promised: int
) -> None:
    side = LoneScheduler(tmp_path, change=divide_nothing)
    image_at = image("an image", first, length)
    request = Request("r", prompt(4 * CHUNK + 5), kv_transfer_params=ASKED, mm_features=[image_at])
    assert side.ask(request) == 0
    stored = stored_chunks(side.step({"r": (0, steps[0])}, new=("r",)))
    stored += stored_chunks(side.step({"r": steps}))
    answer(side, 9)
    request.num_computed_tokens = request.num_prompt_tokens
    keeps_blocks, params = side.side.finished("r", ([*range(20, 60)],))
    assert params is not None and params["kvshelf_tokens"] == promised
    assert not keeps_blocks and not side.step().stores
    assert stored == [*range(promised // CHUNK)]
    side.close()


def test_backlog_that_a_resumed_request_divides_is_dropped(tmp_path: Path) -> None:
    side = LoneScheduler(tmp_path, change=divide_nothing)
    answer(side, 0)
    request = Request(
        "r",
        prompt(4 * CHUNK + 1),
        kv_transfer_params=ASKED,
        mm_features=[image("an image", 2 * CHUNK + 1, 6)],
    )
    assert side.ask(request) == 0
    side.step({"r": (0, 4 * CHUNK + 1)}, new=("r",))
    request.num_preemptions = 1
    side.step(preempted=("r",))
    assert side.ask(request) == 0
    side.step({"r": (0, 2 * CHUNK + 4)})
    side.step({"r": (2 * CHUNK + 4, 2 * CHUNK - 3)})
    request.num_computed_tokens = 4 * CHUNK + 1
    keeps_blocks, params = side.side.finished("r", ([*range(20, 60)],))
    assert keeps_blocks and params is not None and params["kvshelf_tokens"] == 2 * CHUNK
    answer(side, 9)
    assert stored_chunks(side.step()) == [0, 1]
    side.close()


def test_blocks_behind_another_connectors_load_are_not_promised_at_the_end(
    side: LoneScheduler,
) -> None:
    request = Request("r", prompt(5), kv_transfer_params=ASKED)
    assert side.ask(request) == 0
    assert not side.step({"r": (4, 1)}, new=("r",), sync_loads=True).stores
    request.num_computed_tokens = 5
    assert side.side.finished("r", ([*range(20, 40)],)) == (False, no_handover())


def test_engine_that_stores_nothing_promises_no_tail(tmp_path: Path) -> None:
    side = LoneScheduler(tmp_path / "shelf", read_only=True)
    request = Request("r", prompt(5), kv_transfer_params=ASKED)
    assert side.ask(request) == 0
    assert not side.step({"r": (0, 5)}, new=("r",)).stores
    request.num_computed_tokens = 5
    assert side.side.finished("r", ([*range(20, 40)],)) == (False, no_handover())
    side.close()


@pytest.mark.parametrize("tail", [0, 1])
def test_prompt_whose_lookup_is_late_is_promised_and_stored_as_others(
    side: LoneScheduler, tail: int
) -> None:
    is_open = threading.Event()
    side.faults.add(Fault("stat", wait=is_open))
    answer(side, 2)
    request = Request("r", prompt(4 * CHUNK + tail), kv_transfer_params=ASKED)
    side.side.new_request(request)
    assert stored_chunks(side.step({"r": (0, request.num_prompt_tokens)}, new=("r",))) == [0, 1]
    request.num_computed_tokens = request.num_prompt_tokens
    keeps_blocks, params = side.side.finished("r", ([*range(20, 60)],))
    assert keeps_blocks and params is not None
    assert params["kvshelf_tokens"] == request.num_prompt_tokens
    answer(side, 9)
    assert stored_chunks(side.step()) == [2, 3, 4][: 2 + tail]
    answer(side, 9)
    assert orders_of(side.step()).released == ["r"]
    is_open.set()


# ------------------------------------------------------------- chunks that are refused late


@pytest.mark.parametrize("ends", ["deadline", "weights"])
def test_chunk_that_is_refused_after_its_request_was_released_breaks_the_promise(
    side: LoneScheduler, ends: str
) -> None:
    clock = side.side.stores.clock = Clock(0.0)
    request, _ = compute(side, "r", 1, kv_transfer_params=ASKED)
    chunk = side.chunks(request.prompt_token_ids)[3]
    _, params = side.side.finished("r", ([*range(20, 40)],))
    assert params is not None
    if ends == "weights":
        side.side.weights_may_change("a test")
    clock.now += 1000.0
    orders = orders_of(side.step())
    assert (orders.released, orders.broken) == (["r"], [])
    side.tell(refused=[RefusedStore("r", chunk, params["kvshelf_attempt"], 0)])
    assert orders_of(side.step()).broken == [params["kvshelf_attempt"]]
    assert side.side.counters.snapshot()["dropped_chunks_staging_full"] == 1


def test_chunk_that_is_refused_after_a_reset_is_dropped(side: LoneScheduler) -> None:
    request, _ = compute(side, "r", 1, kv_transfer_params=ASKED)
    chunk, promise = side.chunks(request.prompt_token_ids)[3], side.side.requests["r"].promise
    assert promise is not None
    side.reset()
    side.tell(refused=[RefusedStore("r", chunk, promise.attempt, 0)])
    assert decode(side, request) == {}
    assert side.side.counters.snapshot()["dropped_chunks_staging_full"] == 1
    # The marker that the workers write holds for all of the prompt.
    assert side.side.finished("r", ([],)) == (False, no_handover())


def test_chunk_that_is_refused_before_a_reset_is_promised_no_more(side: LoneScheduler) -> None:
    request, _ = compute(side, "r", 1, kv_transfer_params=ASKED)
    refuse(side, request, side.chunks(request.prompt_token_ids)[3])
    side.reset()
    _, params = side.side.finished("r", ([],))
    assert params is not None and params["kvshelf_tokens"] == 3 * CHUNK


def test_chunk_that_is_refused_after_a_preemption_is_no_hit(side: LoneScheduler) -> None:
    request, _ = compute(side, "r", 1)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    side.side.matched_tokens(request, 0)
    refuse(side, request, side.chunks(request.prompt_token_ids)[2])
    assert side.lookup("r").hit_chunks == 2
    assert stored_chunks(side.step({"r": (0, request.num_prompt_tokens)})) == [2, 3]


def test_refused_tail_of_a_running_request_is_handed_out_again(side: LoneScheduler) -> None:
    request, stored = compute(side, "r", 1, kv_transfer_params=ASKED)
    assert stored[-1] == 4 and decode(side, request) == {}
    promise = side.side.requests["r"].promise
    assert promise is not None and promise.tail is not None
    refuse(side, request, promise.tail)
    assert decode(side, request) == {"r": [4]}


def test_decoded_chunks_that_wait_at_the_end_are_counted(tmp_path: Path) -> None:
    side = LoneScheduler(tmp_path / "shelf", save_decode=True)
    answer(side, 4)
    request = Request("r", prompt(4 * CHUNK), kv_transfer_params=ASKED)
    assert side.ask(request) == 0
    assert stored_chunks(side.step({"r": (0, 4 * CHUNK)}, new=("r",))) == [0, 1, 2, 3]
    answer(side, 0)
    request._all_token_ids += prompt(2 * CHUNK, 5)
    assert not side.step({"r": (4 * CHUNK, 2 * CHUNK)}).stores
    request.num_computed_tokens = 6 * CHUNK
    assert side.side.finished("r", ([*range(20, 60)],))[1] is not None
    assert side.side.counters.snapshot()["dropped_chunks_staging_full"] == 2
    side.close()
