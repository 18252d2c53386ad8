"""A request that vLLM aborts or preempts while kvshelf does something for it.

A preempted request that waits for its new lookup is in :mod:`tests.vllm.test_scheduler_side`.
"""

from __future__ import annotations

import itertools
import threading

import pytest

pytest.importorskip("vllm")

from tests.sim import engine_sides as sides
from tests.sim.engine import EngineModel, Start
from tests.sim.storage import Fault, FaultyStorage
from tests.support.prompts import prompt
from tests.support.waiting import while_patient

CHUNK, CHUNKS, ANSWER = 32, 6, 30
TOKENS = prompt(CHUNKS * CHUNK + 1)
#: What the storage does not answer meanwhile.
HANGING = {"wait": "stat", "load": "read", "pending store": "write", "sleep": "stat"}


def run_into_answer(engine: EngineModel) -> None:
    engine.add("r", TOKENS, ANSWER)
    while engine.computed("r") + engine.loaded("r") < len(TOKENS) + 2:
        engine.step()


def look_up_again(engine: EngineModel, interruption: str, amid: str) -> None:
    """Let a request, new or preempted, ask for its hit; for its load, go on until that runs."""
    loads = len(engine.loads_of("r"))
    if interruption == "preempt":
        engine.preempt("r")
    else:
        engine.add("r", TOKENS, ANSWER)
    for _ in range(3):
        engine.step()
    for _ in while_patient():
        if amid == "wait" or engine.is_loading("r"):
            break
        engine.step()
    assert len(engine.loads_of("r")) == loads + (amid == "load")


@pytest.mark.parametrize("runner", ["V1", "V2 on a device"])
@pytest.mark.parametrize(
    ("interruption", "amid"),
    [
        ("abort", "wait"),
        *itertools.product(["abort", "preempt"], ["load", "pending store", "sleep"]),
    ],
)
def test_request_interrupted_amid_work_for_it_keeps_no_block_and_stores_nothing_wrong(
    start: Start, backend: FaultyStorage, interruption: str, amid: str, runner: str
) -> None:
    looks_up = amid in ("wait", "load")
    if looks_up:
        start(runner=runner).run(TOKENS)
    engine, answers = start(runner=runner, prefix_caching=False), threading.Event()
    free = engine.free_blocks
    hanging = Fault(HANGING[amid], "*.safetensors", wait=answers)
    if amid == "pending store":
        backend.add(hanging)
    if interruption == "preempt" or not looks_up:
        run_into_answer(engine)
    if looks_up:
        backend.add(hanging)
        look_up_again(engine, interruption, amid)
    if amid == "sleep":
        engine.worker.side.fall_asleep()
    if interruption == "abort":
        engine.abort("r")
    elif not looks_up:
        engine.preempt("r")
    if amid == "sleep":
        engine.worker.side.wake_up()
    for _ in range(3):
        engine.step()
    answers.set()
    engine.finish()
    engine.drain()
    for _ in while_patient():
        if engine.free_blocks == free and not sides.remembers(engine.side):
            break
        engine.step()
    # It compares all that it loads.
    loaded = start(runner=runner).run(TOKENS)
    if interruption == "preempt":
        assert len(engine.answers["r"]) == ANSWER and loaded == [CHUNKS * CHUNK]
