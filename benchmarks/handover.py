"""Rows ``handover/*``: an engine with a hundred requests that wait for a producer.

Owns the figures of what waiting costs: the processor time of an engine that has nothing else to
do, and the steps of a request that decodes beside them. The hand-overs never come. This module
imports neither vLLM nor torch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.child import Child, ChildError
from benchmarks.engine import QUIET_SECONDS, EngineRun, find_model, guarded
from benchmarks.measure import Goal, Row
from benchmarks.samples import CHUNK_TOKENS, make_prompt
from benchmarks.settings import Settings
from kvshelf.format.keys import KeyChain
from kvshelf.format.namespace import Namespace

_REQUESTS = 100
_TOKENS = 4 * CHUNK_TOKENS + 100
#: Longer than the measurement: no request's wait may end.
_WAIT_SECONDS = 3000.0
_IDLE_SECONDS = 2.0
_DECODED = 64
#: Title of the process that schedules, as vLLM sets it (``vllm/v1/engine/core.py``).
_CORE = "VLLM::EngineCore"

_SCHEDULER = Row(
    "handover/waiting",
    f"processor time in one second, {_REQUESTS} requests wait: process of the scheduler",
    "nothing waits",
    goal=Goal(0.15, "seconds"),
)
_ENGINE = Row(
    "handover/waiting-engine",
    f"processor time in one second, {_REQUESTS} requests wait: all of the engine",
    "nothing waits",
    note="a worker in a process of its own polls for a second after each step, for whatever step",
)
_BESIDE = Row(
    "handover/beside",
    f"a token of a request that decodes beside {_REQUESTS} that wait",
    "nothing waits",
    goal=Goal(1.03),
)
_STEP = Row(
    "handover/step",
    f"a step with {_REQUESTS} requests that wait, one decodes",
    "nothing waits",
    goal=Goal(2e-3, "difference"),
    note="from the same pairs",
)


def bench_handover(settings: Settings) -> Iterator[Row]:
    """Measure an engine in turn with a hundred requests that wait and with none."""
    rows = (_SCHEDULER, _ENGINE, _BESIDE, _STEP)
    yield from guarded(settings, rows, _rows)


def _rows(settings: Settings) -> Iterator[Row]:
    run = EngineRun(settings, find_model(settings), "handover")
    settings.progress("starting an engine")
    options = {"shared_storage_path": str(run.shelf), "handover_wait_s": _WAIT_SECONDS}
    with run.engine("consumer", options=options) as engine:
        engine.wait_ready()
        # A stored prompt makes the namespace; it is the first that decodes as well.
        decoding = run.prompt()[:_TOKENS]
        engine.call("decode", prompt=decoding, tokens=_DECODED)
        run.wait_stored(_TOKENS // CHUNK_TOKENS)
        params = [_never_handed_over(run, number) for number in range(_REQUESTS)]
        hold = partial(engine.call, "hold", requests=params)
        shares: dict[str, tuple[list[float], list[float]]] = {_CORE: ([], []), "": ([], [])}
        gaps: tuple[list[float], list[float]] = ([], [])
        pairs = settings.pairs(15)
        for pair in range(-1, pairs):
            settings.progress(f"pair {pair + 1} of {pairs}")
            for side in (0, 1) if pair % 2 else (1, 0):
                if side == 0 and hold()["waiting"] != _REQUESTS:
                    raise ChildError("requests that should wait have ended")
                decoded = engine.call("decode", prompt=decoding, tokens=_DECODED)["gap"]
                time.sleep(QUIET_SECONDS)
                used = _processor_shares(engine)
                if side == 0 and engine.call("let_go")["waited"] != _REQUESTS:
                    raise ChildError("a request did not wait until the end")
                if pair >= 0:
                    gaps[side].append(decoded)
                    for name, samples in shares.items():
                        samples[side].append(used[name])
    for row, (ours, floors) in (
        (_SCHEDULER, shares[_CORE]),
        (_ENGINE, shares[""]),
        (_BESIDE, gaps),
        (_STEP, gaps),
    ):
        yield Row(
            row.name, row.work, row.floor, ours=ours, floors=floors, goal=row.goal, note=row.note
        )


def _never_handed_over(run: EngineRun, number: int) -> dict[str, Any]:
    """Return a prompt, and the params of a producer that never begins with it."""
    prompt = make_prompt(_TOKENS, 5_000_000 + number, 1000)
    [path] = run.shelf.glob("*/namespace.json")
    namespace = Namespace.from_bytes(path.read_bytes())
    chain = KeyChain(namespace.digest, CHUNK_TOKENS)
    chain.extend(prompt)
    tail = chain.tail()
    if tail is None:
        raise ChildError(f"a prompt of {_TOKENS} tokens has no tail")
    return {
        "prompt": prompt,
        "params": {
            "kvshelf_version": 1,
            "kvshelf_namespace": namespace.digest.hex(),
            "kvshelf_tokens": _TOKENS,
            "kvshelf_key": tail.key.hex(),
            "kvshelf_tail": tail.tokens,
            "kvshelf_attempt": secrets.token_hex(16),
        },
    }


def _processor_shares(engine: Child) -> dict[str, float]:
    """Return the processors that the scheduler's process uses, and all of the engine (key "")."""
    before = engine.cpu_seconds_by_process()
    time.sleep(_IDLE_SECONDS)
    used = {
        name: (seconds - before.get(name, 0.0)) / _IDLE_SECONDS
        for name, seconds in engine.cpu_seconds_by_process().items()
    }
    if _CORE not in used:
        raise ChildError(f"no process is called {_CORE}: {', '.join(sorted(used))}")
    return {_CORE: used[_CORE], "": sum(used.values())}
