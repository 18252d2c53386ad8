"""Rows ``handover/*``: an engine with a hundred requests that wait for a producer.

Owns the figures of what waiting costs: the processor time of an engine that has nothing else to
do, and the steps of a request that decodes beside them. The hand-overs never come. This module
imports neither vLLM nor torch.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.child import Child, ChildError
from benchmarks.engine import HOLDING, QUIET_SECONDS, EngineRun, find_model, guarded
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
#: Tokens of the prompt that decodes, and of its answer.
_DECODING = 900
_DECODED = 64
#: Title of the process that schedules, as vLLM sets it (``vllm/v1/engine/core.py``).
_CORE = "VLLM::EngineCore"

_FLOOR = "a connector whose requests wait, and that only sleeps"
_SCHEDULER = Row(
    "handover/waiting",
    f"processor time in one second, {_REQUESTS} requests wait: process of the scheduler",
    _FLOOR,
    goal=Goal(0.15, "difference"),
)
_ENGINE = Row(
    "handover/waiting-engine",
    f"processor time in one second, {_REQUESTS} requests wait: all of the engine",
    _FLOOR,
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
    _FLOOR,
    goal=Goal(2e-3, "difference"),
)


def bench_handover(settings: Settings) -> Iterator[Row]:
    """Measure two engines in turn whose requests wait: with kvshelf, and with vLLM's part only.

    While one of them is measured, nothing waits in the other, so that it is idle.
    """
    rows = (_SCHEDULER, _ENGINE, _BESIDE, _STEP)
    yield from guarded(settings, rows, _rows)


@dataclass
class _Samples:
    """What was measured of one engine, each in seconds."""

    core: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)


def _rows(settings: Settings) -> Iterator[Row]:
    run = EngineRun(settings, find_model(settings), "handover")
    settings.progress("starting two engines")
    options = {"shared_storage_path": str(run.shelf), "handover_wait_s": _WAIT_SECONDS}
    with (
        run.engine("ours", options=options) as ours,
        run.engine("holding", connector=HOLDING) as floor,
    ):
        engines = (ours, floor)
        decoding = run.prompt()[:_DECODING]
        for engine in engines:
            engine.wait_ready()
            _decode(engine, decoding)
        # A stored prompt makes the namespace.
        run.wait_stored(_DECODING // CHUNK_TOKENS)
        requests = [_never_handed_over(run, number) for number in range(_REQUESTS)]
        measured = (_Samples(), _Samples())
        alone: list[float] = []
        pairs = settings.pairs(15)
        for pair in range(pairs):
            settings.progress(f"pair {pair + 1} of {pairs}")
            for side in (0, 1) if pair % 2 else (1, 0):
                _measure(engines[side], requests, decoding, measured[side])
            alone.append(_decode(ours, decoding))
            time.sleep(QUIET_SECONDS)
    waiting, held = measured
    yield replace(_SCHEDULER, ours=waiting.core, floors=held.core)
    yield replace(_ENGINE, ours=waiting.engine, floors=held.engine)
    yield replace(_BESIDE, ours=waiting.gap, floors=alone)
    yield replace(_STEP, ours=waiting.gap, floors=held.gap)


def _decode(engine: Child, prompt: list[int]) -> float:
    """Return the seconds from one token of an answer to the next."""
    return float(engine.call("decode", prompt=prompt, tokens=_DECODED)["gap"])


def _measure(
    engine: Child, requests: list[dict[str, Any]], decoding: list[int], samples: _Samples
) -> None:
    """Let requests wait; measure a request that decodes beside them, and them alone."""
    if engine.call("hold", requests=requests)["waiting"] != len(requests):
        raise ChildError("requests that should wait have ended")
    samples.gap.append(_decode(engine, decoding))
    time.sleep(QUIET_SECONDS)
    used = _processor_shares(engine)
    samples.core.append(used[_CORE])
    samples.engine.append(sum(used.values()))
    if engine.call("let_go")["waited"] != len(requests):
        raise ChildError("a request did not wait until the end")


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
    """Return the processor time of each process of an engine in one second, by title."""
    before = engine.cpu_seconds_by_process()
    time.sleep(_IDLE_SECONDS)
    used = {
        title: (seconds - before.get(title, 0.0)) / _IDLE_SECONDS
        for title, seconds in engine.cpu_seconds_by_process().items()
    }
    if _CORE not in used:
        raise ChildError(f"no process is called {_CORE}: {', '.join(sorted(used))}")
    return used
