"""Rows ``admission/*`` and ``tails/*``: first tokens over a storage of several speeds, by policy.

Owns the comparison of three policies in turn in one engine: to compute each prompt, to load all
that the shelf has, and ``admission: auto``. The shelf lies behind a filesystem whose reads share
a limited rate, so this needs FUSE and a source checkout. The engine stores nothing meanwhile and
learns only from what it does itself under ``auto``, and from the prompts that it computes.

Rows ``fresh/*``: the first requests of an engine that has learned nothing, all of them on the
shelf. Row ``blocked/*``: a request that waits for blocks before its load.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
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

_SHORT, _MIDDLE, _LONG = 1024, 2048, 7936
_MANY = 16
#: Requests of a fresh engine, and the longest prompt with its answer that fits into its KV cache.
_FIRST = 18
_FRESH_TOKENS = 3072
#: How long a request waits for blocks.
_BLOCKED_SECONDS = 2.0
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
#: By the rate of the storage.
FRESH = {
    rate: Row(
        f"fresh/{speed(rate).replace(' ', '')}",
        f"TTFT of the 3rd to {_FIRST}th request of a fresh engine, one at a time,"
        f" {_MIDDLE + REST_TOKENS} tokens, storage {speed(rate)}",
        "the median of the better of always and never loading",
        goal=Goal(1.15),
    )
    for rate in (FULL, 100e6, 10e6, 2e6)
}
BLOCKED = Row(
    "blocked/full",
    f"TTFT, {_MIDDLE + REST_TOKENS} tokens, behind {_BLOCKED_SECONDS:g} s without blocks",
    "always loading",
    goal=Goal(1.05),
)


def bench_admission(settings: Settings) -> Iterator[Row]:
    """Measure first tokens by policy at each of `POINTS`, and those of `FRESH` and `BLOCKED`."""
    rows = [*(point.row for point in POINTS), *FRESH.values(), BLOCKED]
    yield from guarded(settings, rows, lambda settings: _rows(settings, POINTS, FRESH))


def bench_tails(settings: Settings) -> Iterator[Row]:
    """Measure the slowest first tokens by policy, at each of `TAILS`."""
    rows = [point.row for point in TAILS]
    yield from guarded(settings, rows, lambda settings: _rows(settings, TAILS, {}))


def _rows(settings: Settings, points: Sequence[Point], fresh: Mapping[float, Row]) -> Iterator[Row]:
    faultfs = require_faultfs()
    run = EngineRun(settings, find_model(settings), "admission")
    prompts = _store(settings, run)
    with ExitStack() as stack:
        mount = faultfs.FaultMount(settings.folder("admission-mount"), source=run.shelf)
        stack.callback(mount.close)
        place = {"shared_storage_path": str(mount.path), "admission": "auto", "read_only": True}

        def start(name: str, nbytes: int, **arguments: Any) -> Child:
            settings.progress("starting an engine")
            arguments["kv_cache_memory_bytes"] = nbytes
            return run.engine(name, mode="stepped", options=place, **arguments)

        for rate, row in fresh.items():
            nbytes, unseen = run.prompt_bytes(_FRESH_TOKENS), run.prompt(_MIDDLE + REST_TOKENS)
            with start(f"fresh-{rate:g}", nbytes, max_model_len=_FRESH_TOKENS) as engine:
                yield _first(settings, row, engine, mount, rate, [unseen, *prompts[_MIDDLE]])
                if rate == FULL:
                    yield _blocked(settings, engine, [unseen, *prompts[_MIDDLE]])
        with start("policies", _PROMPTS_IN_CACHE * run.prompt_bytes(_LONG + REST_TOKENS)) as engine:
            _warm_up(engine, prompts)
            token_bytes = run.prompt_bytes(1) - run.prompt_bytes(0)
            for point in points:
                row = _measure(settings, point, engine, mount, prompts[point.tokens])
                yield replace(row, extra={**row.extra, "token_bytes": token_bytes})


def _first(
    settings: Settings, row: Row, engine: Child, mount: Any, rate: float, prompts: list[list[int]]
) -> Row:
    """Measure the first requests of an engine; the first of `prompts` is not on the shelf."""
    loaded: list[float] = []

    def serve(policy: str, count: int) -> list[float]:
        asked = [prompts[1 + number % _MANY] for number in range(count)]
        settings.progress(f"{row.work}: {policy}")
        replies = [engine.call("serve", prompts=[one], policy=policy) for one in asked]
        loaded.append(sum(reply["loaded"][0] for reply in replies) / (_MIDDLE * count))
        return [reply["first"][0] for reply in replies]

    # Memory is touched; nothing is learned.
    for prompt in prompts[:2]:
        engine.call("serve", prompts=[prompt], policy=ALWAYS)
    mount.clear()
    if not math.isinf(rate):
        mount.add("read", _PATTERN, rate=rate)
    first = serve(AUTO, _FIRST)
    others = {policy: serve(policy, _FEW) for policy in (COMPUTED, ALWAYS)}
    mount.clear()
    each = [*first[:3], median(first), *map(median, others.values())]
    names = ("s: 1st", "2nd", "3rd", f"median of {_FIRST}", *others)
    note = ", ".join(f"{name} {taken:.2f}" for name, taken in zip(names, each, strict=True))
    return replace(
        row,
        ours=first[2:],
        floors=[min(map(median, others.values()))] * len(first[2:]),
        note=f"{note}; auto loaded {loaded[0]:.0%}",
        extra={"first": first, **others},
    )


def _blocked(settings: Settings, engine: Child, prompts: list[list[int]]) -> Row:
    """Measure hits behind a prompt that has the cache's blocks; prompts as for :func:`_first`."""
    for prompt in prompts[:_FEW]:
        for policy in (COMPUTED, AUTO):
            engine.call("serve", prompts=[prompt], policy=policy)
    times: dict[str, list[float]] = {AUTO: [], ALWAYS: []}
    loaded = dict.fromkeys(times, 0)
    pairs = settings.pairs(9)
    for number in range(pairs):
        settings.progress(f"{BLOCKED.work}: pair {number + 1} of {pairs}")
        for policy, found in times.items():
            reply = engine.call(
                "serve",
                prompts=[prompts[1 + number % _MANY]],
                policy=policy,
                behind=prompts[0],
                seconds=_BLOCKED_SECONDS,
            )
            found.append(reply["first"][0] - _BLOCKED_SECONDS)
            loaded[policy] += reply["loaded"][0]
    shares = (f"{policy} {count / (pairs * _MIDDLE):.0%}" for policy, count in loaded.items())
    return replace(
        BLOCKED, ours=times[AUTO], floors=times[ALWAYS], note=f"loaded: {', '.join(shares)}"
    )


def _store(settings: Settings, run: EngineRun) -> dict[int, list[list[int]]]:
    """Store prompts of all lengths, by an engine that ends; return them."""
    settings.progress("starting an engine that stores the prompts")
    prompts: dict[int, list[list[int]]] = {}
    with run.engine("store") as engine:
        engine.wait_ready()
        run.seed = _SEED
        chunks = 0
        for tokens in (_SHORT, _MIDDLE, _LONG):
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
