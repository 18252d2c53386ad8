"""Rows ``admission/*``: first tokens over a storage of several speeds, by policy.

Owns the comparison of three policies in turn in one engine: to compute each prompt, to load all
that the shelf has, and ``admission: auto``. The shelf lies behind a filesystem whose reads share
a limited rate, so this needs FUSE and a source checkout. The engine stores nothing meanwhile and
learns only from what it does itself under ``auto``, and from the prompts that it computes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.engines import (
    ALWAYS,
    AUTO,
    COMPUTED,
    POLICIES,
    REST_TOKENS,
    Child,
    ChildError,
    EngineRun,
    find_model,
    guarded,
    kvshelf_connector,
    slow_mount,
)
from benchmarks.measure import Goal, Row, median
from benchmarks.settings import Settings

_SHORT, _LONG = 1024, 7936
_MANY = 16
_FULL, _FROZEN = math.inf, 0.0
#: What comes before the rounds of a point: the engine learns the storage's speed. It refuses hits
#: for a minute.
_LEARNING_ROUNDS, _LEARNING_SECONDS = 4, 70.0
#: Where loading everything takes minutes, it is done only so often.
_FEW = 3
_PATTERN = "*.safetensors"


def speed(rate: float | None) -> str:
    """Return a rate as text."""
    if rate is None or math.isinf(rate):
        return "full"
    return f"{rate / 1e6:g} MB/s" if rate else "frozen"


@dataclass(frozen=True, slots=True)
class _Point:
    """What is measured.

    Attributes
    ----------
    rate : float
        Bytes per second that all reads share; 0: none is answered.
    tokens : int
        Stored tokens of a prompt, in whole chunks.
    requests : int
        That are submitted at once.
    rounds : int
        In each, every policy gets its turn.
    """

    rate: float
    tokens: int
    requests: int = 1
    rounds: int = 9

    @property
    def row(self) -> Row:
        """The row without figures."""
        many = f"{self.requests} at once" if self.requests > 1 else "one at a time"
        return Row(
            f"admission/{speed(self.rate).replace(' ', '')}/{self.tokens}x{self.requests}",
            f"mean TTFT, {self.tokens + REST_TOKENS} tokens, {many}, storage {speed(self.rate)}",
            "the better of always and never loading",
            goal=Goal(1.05),
        )


_POINTS = (
    *(_Point(rate, _SHORT, rounds=31) for rate in (_FULL, 10e6, 2e6)),
    _Point(_FULL, _SHORT, _MANY, 15),
    *(_Point(rate, _SHORT, _MANY, 7) for rate in (50e6, 10e6)),
    *(_Point(rate, _LONG) for rate in (_FULL, 200e6, 50e6, 10e6, 2e6)),
    _Point(_FULL, _LONG, _MANY, _FEW),
    _Point(_FROZEN, _LONG),
)


#: Fresh engines: the rates of their storage, tokens that are stored of their prompts, seconds that
#: the first step takes longer, requests, and those from which on the better way counts.
_FRESH_RATES, _FRESH_TOKENS = (100e6, 30e6, 10e6), 2048
_SLOW_START, _FRESH_REQUESTS, _FRESH_FROM = 3.0, 11, 3


def bench_admission(settings: Settings) -> Iterator[Row]:
    """Measure first tokens by policy at each point."""
    yield from guarded(settings, "admission", _rows)


def _rows(settings: Settings) -> Iterator[Row]:
    run = EngineRun(settings, find_model(settings), "admission")
    longest = _LONG + REST_TOKENS
    prompts = {
        tokens: [run.prompt(tokens + REST_TOKENS) for _ in range(_MANY)]
        for tokens in (_SHORT, _LONG)
    }
    with run.engine("storing", longest) as engine:
        for prompt in (*prompts[_SHORT], *prompts[_LONG]):
            engine.ask([prompt])
            run.settle()
    with closing(slow_mount(settings, "admission", run.shelf)) as mount:
        connector = kvshelf_connector(mount.path, admission="auto", read_only=True)
        many = _MANY + 1
        with run.engine("policies", longest, connector, prompts=many, switched=True) as engine:
            # All memory is touched, and the engine learns.
            engine.ask(prompts[_LONG], policy=ALWAYS)
            for several in prompts.values():
                for prompt in several:
                    for policy in (COMPUTED, AUTO):
                        engine.ask([prompt], policy=policy)
            for point in _POINTS:
                yield _measure(settings, point, engine, mount, prompts[point.tokens])
        yield from _fresh_rows(run, mount, connector)


def _fresh_rows(run: EngineRun, mount: Any, connector: Mapping[str, Any]) -> Iterator[Row]:
    """Measure the first requests of engines whose first step is slow."""
    tokens, longest = _FRESH_TOKENS + REST_TOKENS, _LONG + REST_TOKENS
    prompts = [run.prompt(tokens) for _ in range(_FRESH_REQUESTS)]
    with run.engine("storing for fresh ones", longest) as engine:
        for prompt in prompts:
            engine.ask([prompt])
        run.settle()
    for rate in _FRESH_RATES:
        name = f"fresh at {rate / 1e6:g} MBps"
        with run.engine(name, longest, connector, switched=True, slow_start=_SLOW_START) as engine:
            _set_rate(engine, mount, rate, prompts[0])
            times = [engine.ask([prompt], policy=AUTO)["first"][0] for prompt in prompts]
            ways = {
                policy: median(
                    [engine.ask([prompt], policy=policy)["first"][0] for prompt in prompts[:5]]
                )
                for policy in (COMPUTED, ALWAYS)
            }
            mount.clear()
        later, best = times[_FRESH_FROM:], min(ways, key=lambda policy: ways[policy])
        yield Row(
            f"admission/fresh/{speed(rate).replace(' ', '')}",
            f"TTFT from the 4th request on, {tokens} tokens, fresh engine, first step"
            f" {_SLOW_START:g} s longer, storage {speed(rate)}",
            "the better of always and never loading",
            goal=Goal(1.15),
            ours=later,
            floors=[ways[best]] * len(later),
            note=", ".join(f"{policy} {seconds:.2f} s" for policy, seconds in ways.items())
            + "; requests "
            + ", ".join(f"{seconds:.2f}" for seconds in times),
            extra={"rate": rate, "times": times, "ways": ways},
        )


def _measure(
    settings: Settings, point: _Point, engine: Child, mount: Any, prompts: list[list[int]]
) -> Row:
    means: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    loaded = dict.fromkeys(POLICIES, 0)
    rounds = settings.pairs(point.rounds)

    def ask(number: int, policy: str) -> dict[str, Any]:
        first = number * point.requests
        chosen = [prompts[(first + place) % _MANY] for place in range(point.requests)]
        _set_rate(engine, mount, point.rate, chosen[0])
        return engine.ask(chosen, policy=policy)

    until, learned = time.monotonic() + _LEARNING_SECONDS, 0
    while learned < _LEARNING_ROUNDS or time.monotonic() < until:
        ask(learned, AUTO)
        learned += 1
    for number in range(rounds):
        settings.progress(f"{point.row.work}: round {number + 1} of {rounds}")
        turn = number % len(POLICIES)
        for policy in (*POLICIES[turn:], *POLICIES[:turn]):
            if policy == ALWAYS and point.rate < 10e6 and number >= _FEW:
                continue
            reply = ask(number, policy)
            means[policy].append(statistics.fmean(reply["first"]))
            loaded[policy] += sum(reply["cached"])
    mount.clear()
    if loaded[COMPUTED]:
        raise ChildError(f"{loaded[COMPUTED]} tokens were found under a name that was never stored")
    best = min((COMPUTED, ALWAYS), key=lambda policy: median(means[policy]))
    pairs = min(len(means[AUTO]), len(means[best]))
    share = loaded[AUTO] / (rounds * point.requests * point.tokens)
    note = ", ".join(f"{policy} {statistics.fmean(means[policy]):.2f} s" for policy in POLICIES)
    return replace(
        point.row,
        ours=means[AUTO][:pairs],
        floors=means[best][:pairs],
        note=f"{note}; auto loaded {share:.0%}",
        extra={
            "rate": None if math.isinf(point.rate) else point.rate,
            "tokens": point.tokens + REST_TOKENS,
            "at_once": point.requests,
            "means": means,
            "loaded_tokens": loaded,
        },
    )


def _set_rate(engine: Child, mount: Any, rate: float, prompt: list[int]) -> None:
    mount.clear()
    if rate == _FROZEN:
        # The circuit breaker has opened in the round before: wait until the engine loads again.
        for _ in range(120):
            if engine.ask([prompt], policy=ALWAYS)["cached"][0]:
                break
            time.sleep(1.0)
        else:
            raise ChildError("the engine did not load again after the storage was frozen")
        mount.add("read", _PATTERN, block=True)
    elif not math.isinf(rate):
        mount.add("read", _PATTERN, rate=rate)
