"""Hits that lie in the worker's memory: loaded within the step in which vLLM asks for them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshelf.vllm import pinned_hits
from kvshelf.vllm.pinned_hits import PinnedHits
from tests.support.prompts import prompt
from tests.vllm.hybrid_specs import full
from tests.vllm.scheduled import DAMAGED, ScheduledEngine, Start, World, patch_namespaces
from tests.vllm.test_handover_scheduler import ASKED

PLAIN = [full(8)]
#: Of a chunk of 32 tokens, in the format of these engines.
CHUNK = 32


def sync_loads(engine: ScheduledEngine) -> list[str]:
    return [op.request_id for meta in engine.metas for op in meta.loads if op.sync]


def first_step(engine: ScheduledEngine, tokens: list[int]) -> Any:
    """Add a request whose lookup has ended, and return what the next step brings to the worker."""
    engine.add("r", tokens)
    engine.wait_for_lookup("r")
    return engine.step()


#: Where all hits lie.
WHERE = pytest.mark.parametrize("where", ["memory", "served"])


@WHERE
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hit_in_memory_is_computed_behind_in_the_same_step(
    start: Start, asynchronous: bool, where: str
) -> None:
    tokens = prompt(200)
    start().run(tokens)
    engine = start(**{where: 1.0}, asynchronous=asynchronous)
    (op,) = first_step(engine, tokens).loads
    assert op.sync
    assert bool(op.memory) == (where == "served")
    assert (op.start, op.end) == (0, 192)
    # The rest of the prompt, at once.
    assert engine.computed["r"] == 8
    engine.finish()
    assert len(engine.answers["r"]) == 2


def test_several_ranks_load_so_from_a_node_server_alone(start: Start) -> None:
    tokens = prompt(200)
    start().run(tokens)
    engine = start(memory=1.0, ranks=2)
    assert engine.run(tokens) == [192]
    assert not sync_loads(engine)
    engine = start(served=1.0, ranks=2)
    assert engine.run(tokens) == [192]
    assert sync_loads(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_several_ranks_compute_behind_such_a_load_is_stored_once_all_have_loaded(
    start: Start, asynchronous: bool
) -> None:
    """One of them may have failed, and computed, and sent to others, what is wrong."""
    tokens = prompt(200)
    start().run(tokens[:100])
    engine = start(served=1.0, ranks=2, asynchronous=asynchronous, budget=300)
    engine.add("r", tokens, answer=20)
    engine.wait_for_lookup("r")
    first = engine.step()
    assert [op.sync for op in first.loads] == [True]
    assert not first.stores
    engine.finish()
    stored = [op.chunk.index for meta in engine.metas for op in meta.stores]
    assert sorted(stored) == [3, 4, 5]
    # What it hands over must be stored in the step that ends it.
    others = prompt(200, seed=1)
    start().run(others[:100])
    engine = start(served=1.0, ranks=2, asynchronous=asynchronous, budget=300)
    engine.add("r", others, answer=1, transfer=ASKED)
    engine.wait_for_lookup("r")
    engine.finish()
    assert not sync_loads(engine)
    assert engine.params["r"] is not None


def test_a_hit_that_lies_elsewhere_is_waited_for(start: Start) -> None:
    tokens = prompt(200)
    start().run(tokens)
    engine = start(memory=0.0)
    (op,) = first_step(engine, tokens).loads
    assert not op.sync
    assert engine.computed["r"] == 0
    engine.finish()


@WHERE
def test_what_vllm_has_itself_is_not_loaded_again(start: Start, where: str) -> None:
    tokens = prompt(200)
    start().run(tokens)
    engine = start(**{where: 1.0})
    engine.run(tokens[:100])
    (op,) = first_step(engine, tokens).loads
    assert op.sync
    assert (op.start, op.end) == (96, 192)
    engine.finish()


@WHERE
def test_a_step_loads_no_more_bytes_than_it_may(start: Start, where: str) -> None:
    prompts = [prompt(200, seed=seed) for seed in range(3)]
    start().run(*prompts)
    one = start(**{where: 1.0}, budget=600)
    fmt = one.connector._scheduler.opening.views["full"].fmt
    hit = 192 // CHUNK * sum(map(fmt.object_size, range(fmt.shards)))
    engine = start(**{where: 1.0}, budget=600, sync_load_bytes=2 * hit)
    for number, tokens in enumerate(prompts):
        engine.add(f"r{number}", tokens)
        engine.wait_for_lookup(f"r{number}")
    assert [op.sync for op in engine.step().loads] == [True, True, False]
    engine.finish()
    # The next step has its own.
    assert start(**{where: 1.0}, sync_load_bytes=hit).run(prompts[0]) == [192]
    less = start(**{where: 1.0}, sync_load_bytes=hit - 1)
    assert less.run(prompts[0]) == [192]
    assert not sync_loads(less)


@pytest.mark.parametrize("options", [{"sync_load_bytes": 0}, {"drafts": 2}], ids=["off", "drafts"])
def test_where_all_loads_are_waited_for(start: Start, options: dict[str, Any]) -> None:
    tokens = prompt(200)
    start().run(tokens)
    engine = start(memory=1.0, served=1.0, **options)
    assert engine.run(tokens) == [192]
    assert not sync_loads(engine)


def test_several_groups_are_waited_for(start: Start) -> None:
    tokens = prompt(200)
    start("Gemma 3").run(tokens)
    engine = start("Gemma 3", memory=1.0, served=1.0)
    assert engine.run(tokens) == [192]
    assert not sync_loads(engine)


@WHERE
def test_a_request_that_gets_no_blocks_is_asked_for_again(start: Start, where: str) -> None:
    long, short = prompt(190), prompt(120, seed=1)
    start().run(short)
    # One of the two fits.
    engine = start(**{where: 1.0}, blocks=30, budget=300)
    engine.add("long", long, answer=20)
    engine.step()
    engine.add("short", short)
    engine.wait_for_lookup("short")
    meta = engine.step()
    # Nothing stays pinned without a load: the engine checks that in each step.
    assert not meta.loads
    engine.finish()
    assert "short" in sync_loads(engine)


@WHERE
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_computed_behind_such_a_load_is_stored_and_handed_over(
    start: Start, asynchronous: bool, where: str
) -> None:
    tokens = prompt(200)
    start().run(tokens[:100])
    engine = start(**{where: 1.0}, asynchronous=asynchronous, budget=300)
    # It ends with the step that loads, and another prompt is computed beside it.
    engine.add("r", tokens, answer=1, transfer=ASKED)
    engine.add("other", prompt(70, seed=5), answer=1)
    for name in ("r", "other"):
        engine.wait_for_lookup(name)
    engine.finish()
    assert sync_loads(engine) == ["r"]
    assert engine.params["r"] is not None
    stored = [op.chunk.index for meta in engine.metas for op in meta.stores if not op.chunk.tail]
    assert sorted(stored) == [0, 1, 3, 4, 5]


def test_while_the_weights_change_nothing_is_taken_from_memory(start: Start) -> None:
    tokens = prompt(200)
    start().run(tokens)
    engine = start(memory=1.0)
    engine.add("r", tokens)
    engine.wait_for_lookup("r")
    engine.change_weights()
    meta = engine.step()
    assert not [op for op in meta.loads if op.sync]
    engine.finish()


@WHERE
def test_requests_that_are_preempted_and_aborted(start: Start, where: str) -> None:
    prompts = [
        prompt(80 + 7 * number, seed=number, shared=40 * (number % 2)) for number in range(8)
    ]
    start().run(*prompts)
    engine = start(**{where: 0.7}, blocks=60, budget=64)
    for number, tokens in enumerate(prompts):
        engine.add(f"r{number}", tokens, answer=130)
    for number in range(40):
        engine.step()
        if number == 10:
            engine.abort("r3")
    engine.finish()
    assert engine.preempted
    assert len(sync_loads(engine)) > 1
    assert all(len(engine.answers[f"r{n}"]) == 130 for n in range(8) if n != 3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_anything_that_may_happen(data: st.DataObject) -> None:
    """What each step reads is compared to the byte by the engine, and what is pinned counted."""

    def draw(strategy: Any, label: str) -> Any:
        return data.draw(strategy, label)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch_namespaces(patch)
        world = World(Path(folder) / "shelf")
        options = {
            "chunk_size": CHUNK,
            **draw(
                st.sampled_from(
                    [
                        {"budget": 32, "blocks": 60},
                        {"budget": 200, "blocks": 300},
                        {"budget": 64, "blocks": 60, "asynchronous": True},
                    ]
                ),
                "steps",
            ),
            "seqs": draw(st.sampled_from([1, 4]), "seqs"),
            "seed": draw(st.integers(0, 9), "seed"),
            "save_decode": draw(st.booleans(), "save_decode"),
            "cache_tails": draw(st.booleans(), "cache_tails"),
            "memory": draw(st.sampled_from([0.0, 0.5, 1.0]), "memory"),
        }
        if draw(st.booleans(), "has a node server"):
            options["served"] = draw(st.sampled_from([0.5, 1.0]), "served")
            options["ranks"] = draw(st.sampled_from([1, 2]), "ranks")
        engine = ScheduledEngine(world, PLAIN, **options)
        try:
            for number in range(draw(st.integers(3, 14), "actions")):
                action = draw(st.sampled_from(_ACTIONS), "action")
                if action == "add":
                    tokens = prompt(
                        draw(st.integers(30, 200), "length"),
                        seed=draw(st.integers(0, 2), "prompt"),
                        shared=draw(st.sampled_from([0, 30]), "shared"),
                    )
                    engine.add(f"r{number}", tokens, draw(st.integers(1, 60), "answer"))
                elif action == "steps":
                    for _ in range(draw(st.integers(1, 30), "count")):
                        engine.step()
                elif action == "abort" and engine.texts:
                    name = draw(st.sampled_from(sorted(engine.texts)), "request")
                    if name in engine.scheduler.requests:
                        engine.abort(name)
                elif action == "weights":
                    engine.change_weights()
                elif action == "reset":
                    engine.reset()
                elif action == "lose":
                    which = draw(st.integers(0, 99), "object")
                    for key in sorted(world.contents)[which : which + 1]:
                        world.contents[key] = DAMAGED
                elif action == "fail":
                    engine.failing_loads = draw(st.integers(1, 4), "failing loads")
                elif action == "restart":
                    engine.close()
                    engine = ScheduledEngine(world, PLAIN, **options)
            engine.finish()
        finally:
            engine.close()


_ACTIONS = [
    *["add", "add", "add", "steps", "steps"],
    *["abort", "reset", "weights", "lose", "fail", "restart"],
]


def test_two_workers_of_one_name_are_not_confused() -> None:
    names: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="e"))
    config: Any = SimpleNamespace(shared_storage_path="/s")
    first, second = PinnedHits(lambda chunks: {}), PinnedHits(lambda chunks: {})
    assert pinned_hits.find(names, config) is None
    first.offer(names, config)
    assert pinned_hits.find(names, config) is first
    second.offer(names, config)
    assert pinned_hits.find(names, config) is None
    first.withdraw()
    first.withdraw()
    assert pinned_hits.find(names, config) is second
    second.withdraw()
    assert pinned_hits.find(names, config) is None
