"""Rows ``engine/*``: first tokens and steps of engines with kvshelf, against vLLM alone.

Owns the comparison of three ways to the KV of a prompt, over its length: computed, loaded from a
shelf by a process that has not computed it, and found in that process's own prefix cache. Three
engines run at the same time and take turns; the next one is asked when the others sleep: one that
computes and stores, a new one on the same shelf, and one with an inert connector.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from benchmarks.engines import (
    INERT,
    QUIET_SECONDS,
    REST_TOKENS,
    Child,
    EngineRun,
    find_model,
    guarded,
)
from benchmarks.measure import Goal, Row
from benchmarks.samples import CHUNK_TOKENS
from benchmarks.settings import Settings

#: The last length is the longest that the demo model allows.
_LENGTHS = tuple(CHUNK_TOKENS * chunks + REST_TOKENS for chunks in (4, 8, 16, 31))
_STEPS, _AT_ONCE, _SHORT = 32, 8, CHUNK_TOKENS + REST_TOKENS
#: Rounds that touch every block of an engine's KV cache.
_WARM_UP_ROUNDS = 2
_INERT_TEXT = "computed, inert connector"

#: What is compared, by its name: what is measured of a length, the floor, and the goal.
_WAYS = {
    "stored": ("TTFT, {0} tokens, computed and stored", _INERT_TEXT, Goal(1.03)),
    "computed": ("TTFT, all but 32 of {0} tokens from the shelf", _INERT_TEXT, None),
    "memory": (
        "TTFT, all but 32 of {0} tokens from the shelf",
        "vLLM's in-memory prefix cache",
        Goal(1.25),
    ),
}
_STEP = Row(
    "engine/step",
    f"one token of each of {_AT_ONCE} answers, kvshelf stores their prompts",
    "inert connector",
    goal=Goal(1.03),
)


def _row(tokens: int, way: str) -> Row:
    work, floor, goal = _WAYS[way]
    return Row(
        f"engine/{tokens}/{way}",
        work.format(tokens),
        floor,
        goal=goal,
        extra={"tokens": tokens, "stored_tokens": tokens - REST_TOKENS},
    )


def bench_engine(settings: Settings) -> Iterator[Row]:
    """Measure first tokens by length, and the time of a step."""
    yield from guarded(settings, "engine", _rows)


def _rows(settings: Settings) -> Iterator[Row]:
    run = EngineRun(settings, find_model(settings), "engine")
    pairs = settings.pairs(9)
    ours, floors = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        storing = stack.enter_context(run.engine("storing", _LENGTHS[-1]))
        fresh = stack.enter_context(run.engine("fresh", _LENGTHS[-1]))
        inert = stack.enter_context(run.engine("inert", _LENGTHS[-1], INERT))
        for pair in range(-_WARM_UP_ROUNDS, pairs):
            settings.progress(f"engine: round {pair + 1} of {pairs}")
            found = _round(run, storing, fresh, inert, inert_first=bool(pair % 2))
            if pair >= 0:
                for name, (mine, floor) in found.items():
                    ours[name].append(mine)
                    floors[name].append(floor)
    for row in [*(_row(tokens, way) for tokens in _LENGTHS for way in _WAYS), _STEP]:
        yield replace(row, ours=ours[row.name], floors=floors[row.name])


def _round(
    run: EngineRun, storing: Child, fresh: Child, inert: Child, *, inert_first: bool
) -> dict[str, tuple[float, float]]:
    """Return our seconds and those of the floor for each row."""
    prompts = [run.prompt(tokens) for tokens in _LENGTHS]
    short = [run.prompt(_SHORT) for _ in range(_AT_ONCE)]
    computed: dict[Child, list[float]] = {}
    steps: dict[Child, float] = {}
    for engine in (inert, storing) if inert_first else (storing, inert):
        computed[engine] = []
        for prompt in prompts:
            computed[engine].append(engine.first_token(prompt, 0, 0))
            run.settle()
        reply = engine.ask(short, tokens=_STEPS)
        steps[engine] = (max(reply["last"]) - max(reply["first"])) / (_STEPS - 1)
        time.sleep(QUIET_SECONDS)
    found = {_STEP.name: (steps[storing], steps[inert])}
    for place, (tokens, prompt) in enumerate(zip(_LENGTHS, prompts, strict=True)):
        hit = tokens - REST_TOKENS
        loaded = fresh.first_token(prompt, hit, hit)
        memory = fresh.first_token(prompt, hit, 0)
        found[f"engine/{tokens}/stored"] = computed[storing][place], computed[inert][place]
        found[f"engine/{tokens}/computed"] = loaded, computed[inert][place]
        found[f"engine/{tokens}/memory"] = loaded, memory
    time.sleep(QUIET_SECONDS)
    return found
