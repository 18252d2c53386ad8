"""Rows ``lengths/*``: the time to the first token of prompts of several lengths.

Owns the comparison of three ways to the KV of a prompt: computed by an engine with an inert
connector, loaded from a shelf by a process that has not computed it, and found in that process's
own prefix cache. Each engine is a child process; this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.child import Child
from benchmarks.engine import (
    INERT,
    QUIET_SECONDS,
    REST_TOKENS,
    EngineRun,
    cold,
    find_model,
    guarded,
    warm,
)
from benchmarks.measure import Row
from benchmarks.samples import CHUNK_TOKENS
from benchmarks.settings import Settings

#: Tokens on the shelf, in whole chunks; the last length is the longest that the demo model allows.
STORED_TOKENS = (1024, 2048, 4096, 7936)
COMPUTED, IN_MEMORY = "computed", "memory"
_FLOORS = {COMPUTED: "computed, inert connector", IN_MEMORY: "vLLM's in-memory prefix cache"}
_LENGTHS = tuple(stored + REST_TOKENS for stored in STORED_TOKENS)
_PAIRS = 9
#: Two rounds touch every block of a KV cache of `_PROMPTS_IN_CACHE` prompts of the last length.
_WARM_UP_ROUNDS = 2
_PROMPTS_IN_CACHE = 2
_STORED_SEED = 1_000_000
_COLD_SEED = 2 * _STORED_SEED


def _row(tokens: int, floor: str) -> Row:
    return Row(
        f"lengths/{tokens}/{floor}",
        f"TTFT, {tokens - REST_TOKENS} of {tokens} tokens from the shelf, fresh process",
        _FLOORS[floor],
        extra={"tokens": tokens, "stored_tokens": tokens - REST_TOKENS},
    )


_ROWS = [_row(tokens, floor) for tokens in _LENGTHS for floor in _FLOORS]


def bench_lengths(settings: Settings) -> Iterator[Row]:
    """Measure the time to the first token over the length of the prompt.

    An engine stores the prompts and ends. Then two engines run at the same time: a new one on the
    same shelf, and one with an inert connector. They take turns, a round of all lengths each, and
    the next one begins when the workers of the other sleep.
    """
    yield from guarded(settings, _ROWS, _rows)


def _rows(settings: Settings) -> Iterator[Row]:
    model = find_model(settings)
    run = EngineRun(settings, model, "lengths")
    pairs = settings.pairs(_PAIRS)
    _store(settings, run, pairs + _WARM_UP_ROUNDS)
    times: dict[int, dict[str, list[float]]] = {
        tokens: {way: [] for way in ("shelf", *_FLOORS)} for tokens in _LENGTHS
    }
    settings.progress("starting two engines")
    memory = _PROMPTS_IN_CACHE * run.prompt_bytes(_LENGTHS[-1])
    with (
        run.engine("fresh", kv_cache_memory_bytes=memory) as fresh,
        run.engine("inert", connector=INERT, kv_cache_memory_bytes=memory) as inert,
    ):
        for engine in (fresh, inert):
            engine.wait_ready()
        for pair in range(-_WARM_UP_ROUNDS, pairs):
            settings.progress(f"first tokens by length: round {pair + 1} of {pairs}")
            for engine in (fresh, inert) if pair % 2 else (inert, fresh):
                if engine is fresh:
                    run.seed = _STORED_SEED + (pair + _WARM_UP_ROUNDS) * len(_LENGTHS)
                    found = _warm_round(engine, run)
                else:
                    run.seed = _COLD_SEED + (pair + _WARM_UP_ROUNDS) * len(_LENGTHS)
                    found = _cold_round(engine, run)
                if pair >= 0:
                    for tokens, ways in found.items():
                        for way, seconds in ways.items():
                            times[tokens][way].append(seconds)
                time.sleep(QUIET_SECONDS)
    for tokens in _LENGTHS:
        ours = times[tokens]["shelf"]
        for floor in _FLOORS:
            row = _row(tokens, floor)
            yield replace(
                row,
                ours=ours,
                floors=times[tokens][floor],
                extra={**row.extra, "model": model.name},
            )


def _store(settings: Settings, run: EngineRun, rounds: int) -> None:
    """Store the prompts of all rounds, by an engine that ends."""
    settings.progress("starting an engine that stores the prompts")
    memory = _PROMPTS_IN_CACHE * run.prompt_bytes(_LENGTHS[-1])
    with run.engine("store", kv_cache_memory_bytes=memory) as engine:
        engine.wait_ready()
        run.seed = _STORED_SEED
        chunks = objects_of_a_chunk = 0
        for number in range(rounds):
            settings.progress(f"storing prompts: round {number + 1} of {rounds}")
            for stored, tokens in zip(STORED_TOKENS, _LENGTHS, strict=True):
                cold(engine, run, 1, tokens)
                chunks += stored // CHUNK_TOKENS
                if not objects_of_a_chunk:
                    run.wait_stored(chunks)
                    time.sleep(QUIET_SECONDS)
                    objects_of_a_chunk = len(run.objects()) // chunks
                run.wait_stored(chunks * objects_of_a_chunk)


def _warm_round(engine: Child, run: EngineRun) -> dict[int, dict[str, float]]:
    """Ask for a prompt of each length twice: from the shelf, then from memory."""
    found = {}
    for stored, tokens in zip(STORED_TOKENS, _LENGTHS, strict=True):
        prompt = run.prompt(tokens)
        found[tokens] = {"shelf": warm(engine, prompt, stored), IN_MEMORY: warm(engine, prompt, 0)}
    return found


def _cold_round(engine: Child, run: EngineRun) -> dict[int, dict[str, float]]:
    """Let a prompt of each length be computed."""
    return {tokens: {COMPUTED: cold(engine, run, 1, tokens)["seconds"]} for tokens in _LENGTHS}
