"""Hand-overs that nobody has promised: how long their requests wait, and which requests do.

vLLM's own scheduler drives the connector, and time is simulated.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvshelf.format.kinds import FULL, Kind
from kvshelf.vllm import connector
from kvshelf.vllm.scheduler import handovers
from kvshelf.vllm.scheduler.handovers import BareWaits
from kvshelf.vllm.scheduler.requests import Patience
from tests.sim import engine_sides as sides
from tests.sim.engine import EngineModel, Start
from tests.support.prompts import prompt
from tests.vllm.test_handover_scheduler import (
    ASKED,
    HYBRID,
    Promised,
    awaited_of,
    counts,
    prefill,
    side_of,
    step_until,
    waits,
)

#: What llm-d's coordinator sends to the engine that decodes.
BARE = {"do_remote_decode": False, "do_remote_prefill": True}
NOTHING = {"kvshelf_version": 1, "kvshelf_tokens": 0}
#: What a few steps may take beside a wait.
STEPS = 0.1


class Consumer:
    """An engine with one request, and what is put on its shelf at which time.

    Parameters
    ----------
    engine : EngineModel
    params : object
        What the request brings.
    length : int
        Tokens of its prompt.
    is_stored : bool
        It is all on the shelf when the request comes.
    """

    def __init__(
        self,
        engine: EngineModel,
        params: object = BARE,
        length: int = 203,
        *,
        is_stored: bool = False,
        **options: Any,
    ) -> None:
        self.engine = engine
        self.promised = Promised(engine, prompt(length, seed=len(engine.texts)))
        if is_stored:
            self.publish(0)
        self.name = f"r{len(engine.texts)}"
        self.began = time.monotonic()
        engine.add(self.name, self.promised.tokens, answer=1, transfer=params, **options)

    def at(self, seconds: float) -> Consumer:
        """Step until so much time has passed since the request came."""
        while time.monotonic() < self.began + seconds:
            before = time.monotonic()
            self.engine.step()
            if time.monotonic() - before < 1e-3:
                time.sleep(1e-3)
        return self

    def publish(self, first: int, end: int | None = None) -> Consumer:
        self.promised.publish(first, end)
        return self

    def waited(self) -> float:
        """Step until the request is done; return how long that took since it came."""
        self.engine.finish()
        return time.monotonic() - self.began

    @property
    def loaded(self) -> int:
        return self.engine.loaded(self.name)


# ----------------------------------------------------------------------------- how long


def test_whole_prompt_and_its_tail_are_waited_for(start: Start) -> None:
    consumer = Consumer(start())
    consumer.at(0.6).publish(0, 2).at(1.7).publish(2, 6).at(3.8).publish(6)
    assert waits(consumer.engine, consumer.name)
    assert consumer.waited() < 3.8 + STEPS
    assert consumer.loaded == 203
    assert counts(consumer.engine) == {"complete": 1}


@pytest.mark.parametrize(
    ("appear", "ends", "outcome"),
    [
        ([], 1.0, "vain"),
        ([0.02], 0.22, "late"),
        ([0.5, 0.6], 1.6, "late"),
        ([0.2, 0.6], 1.4, "late"),
    ],
)
def test_wait_ends_after_a_second_or_after_twice_the_longest_gap(
    start: Start, appear: list[float], ends: float, outcome: str
) -> None:
    consumer = Consumer(start())
    for number, at in enumerate(appear):
        consumer.at(at).publish(number, number + 1)
    assert consumer.waited() == pytest.approx(ends, abs=STEPS)
    assert consumer.loaded == len(appear) * 32
    assert counts(consumer.engine) == {outcome: 1}


@pytest.mark.parametrize(
    ("own", "option", "most"), [({}, 2, 2), ({"kvshelf_wait_s": 1.5}, 30, 1.5)]
)
def test_no_wait_is_longer_than_the_option_or_the_request_says(
    start: Start, own: dict[str, Any], option: float, most: float
) -> None:
    consumer = Consumer(start(handover_wait_s=option), BARE | own)
    for number in range(6):
        consumer.at(0.3 + 0.3 * number).publish(number, number + 1)
    assert consumer.waited() == pytest.approx(max(most, 0.3 + 0.3 * 5), abs=STEPS)
    assert consumer.loaded >= int(most / 0.3 - 0.5) * 32


@pytest.mark.parametrize(
    ("options", "params", "counted"),
    [
        # The option, or the request, allows no wait.
        ({"handover_wait_s": 0}, BARE, {}),
        ({}, BARE | {"kvshelf_wait_s": 0}, {}),
        ({}, BARE | {"kvshelf_wait_s": "long"}, {"invalid": 1}),
        # Nobody prefills for an engine that stores itself, or for these requests.
        ({}, None, {}),
        ({"role": "kv_consumer"}, {"do_remote_prefill": False}, {}),
        ({"role": "kv_consumer"}, ASKED, {}),
        ({"role": "kv_consumer"}, NOTHING, {}),
    ],
)
def test_request_that_may_not_wait_or_has_no_producer_is_computed_at_once(
    start: Start, options: dict[str, Any], params: object, counted: dict[str, int]
) -> None:
    consumer = Consumer(start(**options), params)
    assert consumer.waited() < STEPS
    assert counts(consumer.engine) == counted


def test_time_of_a_wait_begins_when_vllm_asks(start: Start) -> None:
    """And what has appeared since the request came is seen."""
    engine = start(requests=1)
    engine.add("first", prompt(40, seed=99), answer=50)
    engine.step()
    consumer = Consumer(engine)
    consumer.publish(0)
    time.sleep(60)
    engine.finish()
    assert consumer.loaded == 203
    assert counts(engine) == {"complete": 1}


# --------------------------------------------------------------------- waits in vain


def test_after_three_waits_in_vain_one_request_in_sixteen_waits_and_then_fewer(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    times = [Consumer(engine).waited() for _ in range(3 + 16 + 32)]
    assert [number for number, took in enumerate(times) if took >= 1] == [0, 1, 2, 18, 50]
    assert max(took for took in times if took < 1) < STEPS
    assert counts(engine) == {"vain": 5, "skipped": 15 + 31}
    # Something appears for one that waits: all do again.
    for _ in range(63):
        assert Consumer(engine).waited() < STEPS
    consumer = Consumer(engine)
    consumer.at(0.5).publish(0)
    consumer.waited()
    assert consumer.loaded == 203
    assert [Consumer(engine).waited() >= 1 for _ in range(4)] == [True] * 3 + [False]
    assert sum("one such request in 16 waits" in line for line in caplog.messages) == 1


def test_chance_to_wait_after_many_waits_in_vain_is_one_in_1024() -> None:
    bare, waited = BareWaits(), []
    for number in range(4096):
        patience = Patience(1.0)
        if bare.may_begin(patience):
            waited.append(number)
            bare.ended(patience)
            if number > 2:
                # Another request waited at the same time.
                bare.ended(patience)
    assert waited == [0, 1, 2, 18, 50, 114, 242, 498, 1010, 2034, 3058, 4082]


def test_waits_in_vain_that_are_not_in_a_row_leave_the_chance_to_wait() -> None:
    bare = BareWaits()
    for hopeful in (False, True, False, False):
        patience = Patience(1.0, is_hopeful=hopeful)
        assert bare.may_begin(patience)
        bare.ended(patience)
    assert bare.may_begin(Patience(1.0))


def test_what_is_there_already_is_not_waited_for_and_says_nothing(start: Start) -> None:
    engine = start()
    for number in range(4):
        assert (Consumer(engine).waited() >= 1) == (number < 3)
        consumer = Consumer(engine, length=192, is_stored=True)
        assert consumer.waited() < STEPS
        # One that does not wait is given what any lookup finds.
        assert consumer.loaded == (192 if number < 2 else 184)


# ----------------------------------------------------------------------- which requests


@pytest.mark.parametrize("params", [None, {}])
def test_on_a_consumer_requests_without_params_wait_for_chunks(
    start: Start, params: object
) -> None:
    """A tail is stored where the producer was asked to: it was not."""
    engine = start(role="kv_consumer")
    consumer = Consumer(engine, params)
    consumer.at(0.5).publish(0, 6)
    assert consumer.waited() < 0.5 + STEPS
    assert consumer.loaded == 192
    assert Consumer(engine, params).waited() >= 1
    assert Consumer(engine, params, length=31).waited() < STEPS
    assert counts(engine) == {"complete": 1, "vain": 1}


def test_request_to_which_nothing_was_promised_takes_no_place_of_a_hand_over(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handovers, "MAX_WAITING", 1)
    engine = start(role="kv_consumer")
    for number in range(2):
        engine.add(f"plain {number}", prompt(203, number))
    promised = Promised(engine, prompt(203, seed=2))
    engine.add("promised", promised.tokens, transfer=promised.handover.params())
    engine.step()
    promised.publish(0)
    engine.finish()
    assert engine.loaded("promised") == 203
    assert counts(engine) == {"complete": 1, "vain": 1, "skipped": 1}


FIELDS: dict[str, Any] = {
    "remote_block_ids": [1, 2],
    "remote_engine_id": "producer",
    "transfer_id": "number 1",
    "remote_host": "producer.svc",
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("field", FIELDS)
def test_beside_a_connector_that_transfers_its_blocks_are_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch, field: str, beside: bool
) -> None:
    monkeypatch.setattr(connector, "_others_transfer", lambda: beside)
    unnamed = dict.fromkeys(FIELDS)
    consumer = Consumer(start(), BARE | unnamed | {field: FIELDS[field]})
    named = beside and field != "remote_host"
    assert (consumer.waited() < STEPS) == named
    assert counts(consumer.engine) == ({} if named else {"vain": 1})


def test_what_cannot_be_loaded_is_not_waited_for(start: Start) -> None:
    consumer = Consumer(start(), skips=True)
    assert consumer.waited() < STEPS
    assert counts(consumer.engine) == {}


# ------------------------------------------------------------------- as any other request


def test_without_a_namespace_or_a_storage_no_request_waits(start: Start) -> None:
    engine = start(identity_seconds=0)
    lookups = sides.take_lookups(side_of(engine))
    assert Consumer(engine).waited() < STEPS
    sides.give_lookups(side_of(engine), lookups)
    sides.tell(side_of(engine), breaker_open=True)
    assert Consumer(engine).waited() < STEPS
    sides.tell(side_of(engine), breaker_open=False)
    assert counts(engine) == {}
    assert Consumer(engine).waited() >= 1


def test_while_weights_are_compared_no_request_waits(start: Start) -> None:
    engine = start()
    consumer = Consumer(engine)
    consumer.at(0.2)
    engine.load_weights(1)
    engine.reset(running=True)
    assert consumer.waited() < 0.2 + STEPS
    assert counts(engine) == {}


# --------------------------------------------------------------------------- other models


def take_all(engine: EngineModel, tokens: list[int]) -> dict[tuple[Kind, int], dict[Path, bytes]]:
    """Take a prompt's chunks off the shelf, and return their objects."""
    return {
        (kind, chunk.index): engine.take(chunk, kind)
        for chunk in engine.chunks_of(tokens)
        for kind in engine.side.engine.groups.kinds
        if engine.has_stored(chunk, kind)
    }


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("model", HYBRID)
def test_hybrid_models_are_waited_for_up_to_the_last_boundary(
    start: Start, model: str, promised: bool
) -> None:
    tokens = prompt(203)
    producer = start(model)
    handover = prefill(producer, tokens)
    assert handover.tokens == 192
    kept = take_all(producer, tokens)
    engine = start(model)
    engine.add("r", tokens, answer=1, transfer=handover.params() if promised else BARE)
    engine.add("short", prompt(32, seed=1), answer=1, transfer=BARE)
    step_until(engine, lambda: awaited_of(engine).wait is not None)
    assert not waits(engine, "short")
    for (_, index), objects in kept.items():
        if index < 6:
            assert waits(engine, "r")
            engine.put(objects)
            engine.step()
    engine.finish()
    assert engine.loaded("r") == 192
    assert engine.computed("r") == 203 - 192
    assert counts(engine) == {"complete": 1}
    stored = {op.chunk.key for meta in engine.metas for op in meta.stores}
    assert stored.isdisjoint(chunk.key for chunk in engine.chunks_of(tokens))


def test_of_a_hybrid_model_a_shorter_hit_is_looked_up_when_the_rest_does_not_appear(
    start: Start,
) -> None:
    tokens = prompt(203)
    producer = start("Gemma 3", interval=1)
    prefill(producer, tokens)
    kept = take_all(producer, tokens)
    engine = start("Gemma 3")
    engine.add("r", tokens, answer=1, transfer=BARE)
    engine.wait_for_lookup("r")
    engine.step()
    for (kind, index), objects in kept.items():
        if index < 4 or kind != FULL:
            engine.put(objects)
    engine.finish()
    assert engine.loaded("r") == 128
    assert counts(engine) == {"late": 1}
