"""Rows ``busy/*``: hits in an engine that computes for others meanwhile.

Owns the comparison of a hit on the shelf, in the memory tier, or in a node server's memory, with a
hit in vLLM's own prefix cache, in the same engine and beside the same others. An idle engine does
not show how many of the engine's steps a hit waits for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from benchmarks.child import Child
from benchmarks.engine import (
    HIT_TOKENS,
    PROMPT_TOKENS,
    WARM_UP_PAIRS,
    EngineRun,
    find_model,
    guarded,
    hits_beside_memory,
    warm,
    warm_up,
)
from benchmarks.measure import Goal, Row
from benchmarks.served import Server
from benchmarks.settings import Settings

_PAIRS = 31
_SEED = 7_000_000
_STORE_SECONDS = 3.0
#: Longest pause before a request, so that requests come at any moment of a step.
_PAUSE_SECONDS = 0.5
#: What others ask for: how many at once, the tokens of each prompt and of each answer.
_OTHERS = {"answers": (8, 32, 1000), "prompts": (2, 4128, 1)}
_SOURCES = {
    "shelf": "the shelf",
    "memory": "the memory tier in process",
    "served": "a node server's memory",
}
_ENGINE: dict[str, Any] = {"max_num_batched_tokens": 2048, "long_prefill_token_threshold": 512}


def _row(source: str, others: str) -> Row:
    count, prompt, answer = _OTHERS[others]
    return Row(
        f"busy/{others}/{source}",
        f"TTFT, {HIT_TOKENS} of {PROMPT_TOKENS} tokens from {_SOURCES[source]}, beside {count}"
        f" requests of {prompt} tokens that get {answer}",
        "vLLM's in-memory prefix cache",
        goal=Goal(1.15),
    )


#: In each such time one hit is asked for, while the tokens of others are counted.
_WINDOW_SECONDS = 1.0
_DECODES = Row(
    "busy/decodes",
    f"a token of {_OTHERS['answers'][0]} answers, beside a hit of {HIT_TOKENS} tokens every"
    f" {_WINDOW_SECONDS:g} s from {_SOURCES['memory']}",
    "the same beside hits in vLLM's in-memory prefix cache",
    goal=Goal(1.03),
)
_ROWS = {(source, others): _row(source, others) for source in _SOURCES for others in _OTHERS}


def bench_busy(settings: Settings) -> Iterator[Row]:
    """Measure hits beside requests that others run all the time."""
    yield from guarded(settings, [*_ROWS.values(), _DECODES], _rows)


def _rows(settings: Settings) -> Iterator[Row]:
    run = EngineRun(settings, find_model(settings), "busy")
    pairs = settings.pairs(_PAIRS)
    prompts = (len(_OTHERS) + 1) * (pairs + WARM_UP_PAIRS + 1)
    for source in reversed(_SOURCES):
        options: dict[str, Any] = {"shared_storage_path": str(run.shelf)}
        arguments = {**_ENGINE, "kv_cache_memory_bytes": 32 * run.prompt_bytes()}
        memory = 2 * prompts * run.prompt_bytes()
        if source == "memory":
            options["memory_tier"] = {"max_bytes": memory}
        settings.progress(f"starting an engine for hits from {_SOURCES[source]}")
        with ExitStack() as stack:
            if source == "served":
                folders = settings.folder(f"busy-{source}"), settings.folder(f"busy-{source}-shelf")
                node = stack.enter_context(closing(Server(*folders, memory)))
                options = {"server": node.url}
            engine = stack.enter_context(run.engine(source, options=options, **arguments))
            engine.wait_ready()
            if source != "shelf":
                run.seed = _SEED
                # The engine before may have left them on the shelf.
                for _ in range(prompts):
                    engine.call("generate", prompts=[run.prompt()])
            # vLLM's own cache has none of these after so many others.
            run.seed = 2 * _SEED
            for _ in range(6):
                warm_up(engine, run)
            time.sleep(_STORE_SECONDS)
            run.seed = _SEED
            for others in _OTHERS:
                yield _measure(settings, run, engine, _ROWS[source, others], others, pairs)
            if source == "memory":
                yield _measure_others(settings, run, engine, pairs)


def _measure(
    settings: Settings, run: EngineRun, engine: Child, row: Row, others: str, pairs: int
) -> Row:
    pauses = random.Random(0)  # noqa: S311  not for secrets
    before = run.prompt()
    warm(engine, before, HIT_TOKENS)
    _occupy(run, engine, others)
    measured = hits_beside_memory(
        settings,
        run,
        engine,
        row,
        before,
        pairs,
        pause=lambda: time.sleep(pauses.uniform(0, _PAUSE_SECONDS)),
    )
    engine.call("relieve")
    return measured


def _occupy(run: EngineRun, engine: Child, others: str) -> None:
    """Let others run requests, until ``relieve``."""
    count, prompt_tokens, answer_tokens = _OTHERS[others]
    seed = run.seed
    run.seed = 3 * _SEED
    engine.call(
        "occupy", prompts=[run.prompt(prompt_tokens) for _ in range(count)], tokens=answer_tokens
    )
    run.seed = seed


def _measure_others(settings: Settings, run: EngineRun, engine: Child, pairs: int) -> Row:
    """Measure what hits cost the answers of others."""
    before = run.prompt()
    warm(engine, before, HIT_TOKENS)
    _occupy(run, engine, "answers")
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(-WARM_UP_PAIRS, pairs):
        settings.progress(f"{_DECODES.work}: pair {pair + 1} of {pairs}")
        prompt = run.prompt()
        turns = [(0, prompt, HIT_TOKENS), (1, before, 0)]
        for side, tokens, shelf in turns if pair % 2 else turns[::-1]:
            begin = engine.call("others")
            warm(engine, tokens, shelf)
            time.sleep(max(0.0, begin["seconds"] + _WINDOW_SECONDS - time.perf_counter()))
            end = engine.call("others")
            if pair >= 0:
                passed = end["seconds"] - begin["seconds"]
                times[side].append(passed / max(1, end["tokens"] - begin["tokens"]))
        before = prompt
    engine.call("relieve")
    return replace(_DECODES, ours=times[0], floors=times[1])
