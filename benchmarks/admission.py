"""Rows ``admission/*`` and ``tails/*``: first tokens over a storage of several speeds, by policy.

Owns the comparison of three policies in turn in one engine: to compute each prompt, to load all
that the shelf has, and ``admission: auto``. The shelf lies behind a filesystem whose reads share
a limited rate, so this needs FUSE and a source checkout. The engine stores nothing meanwhile and
learns only from what it does itself under ``auto``, and from the prompts that it computes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.child import Child, ChildError
from benchmarks.engine import REST_TOKENS, EngineRun, cold, find_model, guarded
from benchmarks.fault_mount import require_faultfs
from benchmarks.measure import Goal, Row, median, percentile
from benchmarks.samples import CHUNK_TOKENS
from benchmarks.settings import Settings
from benchmarks.stepped import ALWAYS, AUTO, COMPUTED, POLICIES

_SHORT, _LONG = 1024, 7936
_MANY = 16
FULL, FROZEN = math.inf, 0.0
#: Rounds of a point before those that count, and seconds: the engine learns the storage's speed.
_LEARNING_ROUNDS = 4
_LEARNING_SECONDS = 20.0
_LEARNING_LOADS = 12
#: Where loading everything takes minutes, it is done only so often.
_FEW = 3
_SEED = 3_000_000
_PATTERN = "*.safetensors"
_PROMPTS_IN_CACHE = _MANY + 1


def speed(rate: float | None) -> str:
    """Return a rate as text."""
    if rate is None or math.isinf(rate):
        return "full"
    return f"{rate / 1e6:g} MB/s" if rate else "frozen"


@dataclass(frozen=True, slots=True)
class Point:
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
    group : str
        Of its row.
    """

    rate: float
    tokens: int
    requests: int = 1
    rounds: int = 9
    group: str = "admission"

    @property
    def row(self) -> Row:
        """The row without figures."""
        many = f"{self.requests} at once" if self.requests > 1 else "one at a time"
        return Row(
            f"{self.group}/{speed(self.rate).replace(' ', '')}/{self.tokens}x{self.requests}",
            f"mean TTFT, {self.tokens + REST_TOKENS} tokens, {many}, storage {speed(self.rate)}",
            "the better of always and never loading",
            goal=Goal(1.05),
        )


POINTS = (
    Point(FULL, _SHORT, rounds=31),
    Point(10e6, _SHORT, rounds=31),
    Point(2e6, _SHORT, rounds=31),
    Point(FULL, _SHORT, _MANY, 15),
    Point(50e6, _SHORT, _MANY, 7),
    Point(10e6, _SHORT, _MANY, 7),
    Point(FULL, _LONG),
    Point(200e6, _LONG),
    Point(50e6, _LONG),
    Point(10e6, _LONG),
    Point(2e6, _LONG),
    Point(FULL, _LONG, _MANY, _FEW),
    Point(FROZEN, _LONG),
)
#: Where more than 300 requests by each policy show the slowest ones.
TAILS = tuple(Point(rate, _SHORT, _MANY, 19, "tails") for rate in (FULL, 50e6, 10e6, 2e6))


def bench_admission(settings: Settings) -> Iterator[Row]:
    """Measure the time to the first token by policy, at each of `POINTS`."""
    yield from _guarded(settings, POINTS)


def bench_tails(settings: Settings) -> Iterator[Row]:
    """Measure the slowest first tokens by policy, at each of `TAILS`."""
    yield from _guarded(settings, TAILS)


def _guarded(settings: Settings, points: Sequence[Point]) -> Iterator[Row]:
    rows = [point.row for point in points]
    yield from guarded(settings, rows, lambda settings: _rows(settings, points))


def _rows(settings: Settings, points: Sequence[Point]) -> Iterator[Row]:
    faultfs = require_faultfs()
    run = EngineRun(settings, find_model(settings), "admission")
    prompts = _store(settings, run)
    memory = _PROMPTS_IN_CACHE * run.prompt_bytes(_LONG + REST_TOKENS)
    with ExitStack() as stack:
        mount = faultfs.FaultMount(settings.folder("admission-mount"), source=run.shelf)
        stack.callback(mount.close)
        settings.progress("starting an engine")
        engine = stack.enter_context(
            run.engine(
                "policies",
                mode="stepped",
                options={
                    "shared_storage_path": str(mount.path),
                    "admission": "auto",
                    "read_only": True,
                },
                kv_cache_memory_bytes=memory,
            )
        )
        _warm_up(engine, prompts)
        token_bytes = run.prompt_bytes(1) - run.prompt_bytes(0)
        for point in points:
            row = _measure(settings, point, engine, mount, prompts[point.tokens])
            yield replace(row, extra={**row.extra, "token_bytes": token_bytes})


def _store(settings: Settings, run: EngineRun) -> dict[int, list[list[int]]]:
    """Store prompts of both lengths, by an engine that ends; return them."""
    settings.progress("starting an engine that stores the prompts")
    prompts: dict[int, list[list[int]]] = {}
    with run.engine("store") as engine:
        engine.wait_ready()
        run.seed = _SEED
        chunks = 0
        for tokens in (_SHORT, _LONG):
            first = run.seed
            for _ in range(_MANY):
                cold(engine, run, 1, tokens + REST_TOKENS)
                chunks += tokens // CHUNK_TOKENS
                run.wait_stored(chunks)
            run.seed = first
            prompts[tokens] = [run.prompt(tokens + REST_TOKENS) for _ in range(_MANY)]
    return prompts


def _warm_up(engine: Child, prompts: dict[int, list[list[int]]]) -> None:
    """Touch all memory of the KV cache, and let the engine learn."""
    engine.call("serve", prompts=prompts[_SHORT][:1], policy=COMPUTED)
    for _ in range(2):
        engine.call("serve", prompts=prompts[_LONG], policy=ALWAYS)
    for tokens in (_SHORT, _LONG):
        for prompt in prompts[tokens][:_LEARNING_LOADS]:
            engine.call("serve", prompts=[prompt], policy=COMPUTED)
            engine.call("serve", prompts=[prompt], policy=AUTO)


def _measure(
    settings: Settings, point: Point, engine: Child, mount: Any, prompts: list[list[int]]
) -> Row:
    means: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    each: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    loaded: dict[str, int] = dict.fromkeys(POLICIES, 0)
    rounds = settings.pairs(point.rounds)

    def chosen(number: int) -> list[list[int]]:
        first = number * point.requests
        return [prompts[(first + place) % _MANY] for place in range(point.requests)]

    settings.progress(f"{point.row.work}: the engine learns")
    until, learned = time.monotonic() + (0.0 if settings.quick else _LEARNING_SECONDS), 0
    while learned < _LEARNING_ROUNDS or time.monotonic() < until:
        _set_rate(engine, mount, point.rate, chosen(learned))
        engine.call("serve", prompts=chosen(learned), policy=AUTO)
        learned += 1
    for number in range(rounds):
        settings.progress(f"{point.row.work}: round {number + 1} of {rounds}")
        turn = number % len(POLICIES)
        for policy in (*POLICIES[turn:], *POLICIES[:turn]):
            if policy == ALWAYS and point.rate < 10e6 and number >= _FEW:
                continue
            _set_rate(engine, mount, point.rate, chosen(number))
            reply = engine.call("serve", prompts=chosen(number), policy=policy)
            means[policy].append(statistics.fmean(reply["first"]))
            each[policy] += reply["first"]
            loaded[policy] += sum(reply["loaded"])
    mount.clear()
    if loaded[COMPUTED]:
        raise ChildError(f"{loaded[COMPUTED]} tokens were found under a name that was never stored")
    best = min((COMPUTED, ALWAYS), key=lambda policy: median(means[policy]))
    pairs = min(len(means[AUTO]), len(means[best]))
    asked = len(each[AUTO]) * point.tokens
    note = ", ".join(f"{policy} {_interval(means[policy])}" for policy in POLICIES)
    tails = ", ".join(f"{policy} {percentile(each[policy], 0.99):.2f}" for policy in POLICIES)
    return replace(
        point.row,
        ours=means[AUTO][:pairs],
        floors=means[best][:pairs],
        note=f"s: {note}; p99 {tails}; auto loaded {loaded[AUTO] / asked:.0%}",
        extra={
            "rate": None if math.isinf(point.rate) else point.rate,
            "tokens": point.tokens + REST_TOKENS,
            "stored_tokens": point.tokens,
            "means": means,
            "requests": each,
            "loaded_tokens": loaded,
            "floor_policy": best,
        },
    )


def _interval(samples: list[float]) -> str:
    """Return the mean with its 95 % interval."""
    mean = statistics.fmean(samples)
    return f"{mean:.2f} ± {half_interval(samples):.2f}" if len(samples) > 1 else f"{mean:.2f}"


def half_interval(samples: Sequence[float]) -> float:
    """Return half of the width of the mean's 95 % interval; 0 of a single sample."""
    if len(samples) < 2:
        return 0.0
    return _student(len(samples) - 1) * statistics.stdev(samples) / math.sqrt(len(samples))


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t."""
    table = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31}
    table |= {14: 2.14, 18: 2.10, 30: 2.04}
    return table[max(known for known in table if known <= freedom)]


def _set_rate(engine: Child, mount: Any, rate: float, prompts: list[list[int]]) -> None:
    mount.clear()
    if rate == FROZEN:
        # The circuit breaker has opened in the round before: wait until the engine loads again.
        for _ in range(120):
            reply = engine.call("serve", prompts=prompts[:1], policy=ALWAYS)
            if reply["loaded"][0]:
                break
            time.sleep(1.0)
        else:
            raise ChildError("the engine did not load again after the storage was frozen")
        mount.add("read", _PATTERN, block=True)
    elif not math.isinf(rate):
        mount.add("read", _PATTERN, rate=rate)
