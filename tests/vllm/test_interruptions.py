"""A request that vLLM aborts or preempts while kvshelf does something for it."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("vllm")

from tests.sim import engine_sides as sides
from tests.sim.engine import Start
from tests.sim.storage import Fault, FaultyStorage
from tests.support.prompts import prompt
from tests.support.waiting import while_patient

CHUNK, CHUNKS = 32, 6


@pytest.mark.parametrize("runner", ["V1", "V2 on a device"])
@pytest.mark.parametrize("amid", ["wait", "load", "pending store", "sleep"])
@pytest.mark.parametrize("interruption", ["abort", "preempt"])
def test_request_interrupted_amid_something_keeps_no_block_and_stores_nothing_wrong(
    start: Start, backend: FaultyStorage, interruption: str, amid: str, runner: str
) -> None:
    tokens = prompt(CHUNKS * CHUNK + 1)
    if amid in ("wait", "load"):
        start(runner=runner).run(tokens)
    engine = start(runner=runner, prefix_caching=False)
    free, storage_answers = engine.free_blocks, threading.Event()
    gates = {"wait": "stat", "load": "read", "pending store": "write"}
    gate = Fault(gates.get(amid, "stat"), "*.safetensors", wait=storage_answers)

    def run_to_its_answer() -> None:
        engine.add("r", tokens, 30)
        while engine.computed("r") + engine.loaded("r") < len(tokens) + 2:
            engine.step()

    if amid == "pending store":
        backend.add(gate)
    if interruption == "preempt" or amid in ("pending store", "sleep"):
        run_to_its_answer()
    loads = len(engine.loads_of("r"))
    if amid in ("wait", "load"):
        backend.add(gate)
        if interruption == "preempt":
            engine.preempt("r")
        else:
            engine.add("r", tokens, 30)
        for _ in range(3):
            engine.step()
        if amid == "load":
            for _ in while_patient():
                if engine.is_loading("r"):
                    break
                engine.step()
        assert engine.is_loading("r") == (amid == "load")
        assert len(engine.loads_of("r")) == loads + (amid == "load")
    for rank in engine.ranks if amid == "sleep" else ():
        rank.side.fall_asleep()
    if interruption == "abort":
        engine.abort("r")
    elif amid in ("pending store", "sleep"):
        engine.preempt("r")
    for rank in engine.ranks if amid == "sleep" else ():
        rank.side.wake_up()
    for _ in range(3):
        engine.step()
    storage_answers.set()
    engine.finish()
    engine.drain()
    for _ in while_patient():
        if engine.free_blocks == free and not sides.remembers(engine.side):
            break
        engine.step()
    assert ("r" in engine.answers) and start(runner=runner).run(tokens) == [CHUNKS * CHUNK]
