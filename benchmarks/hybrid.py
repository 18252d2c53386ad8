"""Rows ``hybrid/*``: engines with models that have several kinds of KV.

Owns the comparison of :mod:`benchmarks.engine` for models of
``examples/models/make_hybrid_model.py``, a cold and a warm row for each, and the bytes that each of
them stores for a token of a prompt. This module imports neither vLLM nor torch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.child import Child, MissingEngineError
from benchmarks.engine import (
    HIT_TOKENS,
    INERT,
    PROMPT_TOKENS,
    QUIET_SECONDS,
    EngineRun,
    cold,
    guarded,
    store_for_warm_row,
    warm_row,
    warm_up,
)
from benchmarks.measure import Goal, Row
from benchmarks.settings import Settings

#: Recipes of ``examples/models/make_hybrid_model.py``, with the arguments of their engines. States
#: are float32 on all processors, as on those where vLLM has them so in any case.
_MODELS: dict[str, dict[str, Any]] = {
    "gemma3-large": {"dtype": "float32"},
    "qwen3-next-large": {"mamba_ssm_cache_dtype": "float32"},
    "lfm2-large": {"dtype": "float32"},
}


def bench_hybrid(settings: Settings) -> Iterator[Row]:
    """Measure the time to the first token, cold and warm, and the stored bytes, for each model.

    As for the rows ``engine/*``: cold prompts go to an engine with kvshelf and to one with an inert
    connector in turn, warm ones twice to a fresh engine, whose second answer comes from vLLM's
    memory.
    """
    for model, arguments in _MODELS.items():
        rows = (
            Row(
                f"hybrid/{model}-cold",
                f"{model}: cold TTFT, {PROMPT_TOKENS} tokens",
                "inert connector",
                goal=Goal(1.03),
                note="stores end, and 1.3 s pass, before the other engine's request",
            ),
            Row(
                f"hybrid/{model}-warm",
                f"{model}: warm TTFT, {HIT_TOKENS} of {PROMPT_TOKENS} tokens from the shelf",
                "vLLM's in-memory prefix cache",
                goal=Goal(1.3),
            ),
        )
        yield from guarded(settings, rows, partial(_rows, model, arguments, rows))


def _rows(
    recipe: str, arguments: dict[str, Any], rows: tuple[Row, Row], settings: Settings
) -> Iterator[Row]:
    run = EngineRun(settings, _find_model(settings, recipe), rows[0].name.replace("/", "-"))
    yield _cold_row(settings, run, rows[0], arguments)
    yield warm_row(settings, run, rows[1], **arguments)


def _find_model(settings: Settings, recipe: str) -> Path:
    checkout = Path(__file__).resolve().parents[1]
    script = checkout / "examples" / "models" / "make_hybrid_model.py"
    if not script.exists():
        raise MissingEngineError("no models here: run this in a clone of the repository")
    folder = checkout / "build" / "models" / recipe
    settings.progress(f"making the model {recipe}")
    subprocess.run(  # noqa: S603  our own script
        [sys.executable, str(script), str(folder), "--recipe", recipe],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


def _cold_row(settings: Settings, run: EngineRun, row: Row, arguments: dict[str, Any]) -> Row:
    """Measure cold prompts; then store the prompts of the warm row."""
    settings.progress("starting two engines")
    times: tuple[list[float], list[float]] = ([], [])
    with (
        run.engine("kvshelf", **arguments) as ours,
        run.engine("inert", connector=INERT, **arguments) as floor,
    ):
        for engine in (ours, floor):
            engine.wait_ready()
        for engine in (ours, floor):
            warm_up(engine, run)
        stored = _stored_bytes(ours, run)
        objects = len(run.objects())
        run.empty()
        pairs = settings.pairs(21)
        for pair in range(pairs):
            settings.progress(f"{row.work}: pair {pair + 1} of {pairs}")
            for side in (0, 1) if pair % 2 else (1, 0):
                times[side].append(cold((ours, floor)[side], run, 1)["seconds"])
                if side == 0:
                    run.wait_stored(objects)
                    run.empty()
                time.sleep(QUIET_SECONDS)
        store_for_warm_row(settings, run, ours, objects)
    a_token = {kind: size / PROMPT_TOKENS for kind, size in stored.items() if size}
    shares = ", ".join(f"{kind} {size:.0f}" for kind, size in a_token.items())
    return replace(
        row,
        work=f"{row.work}; stores {sum(a_token.values()):.0f} bytes a token ({shares})",
        ours=times[0],
        floors=times[1],
        extra={"bytes_for_a_prompt": stored, "objects_for_a_prompt": objects},
    )


def _stored_bytes(engine: Child, run: EngineRun) -> dict[str, int]:
    """Store one prompt; return the bytes of its objects by kind."""
    time.sleep(2 * QUIET_SECONDS)
    run.empty()
    cold(engine, run, 1)
    run.wait_stored(1)
    time.sleep(2 * QUIET_SECONDS)
    sizes = dict.fromkeys(("full", "window", "state"), 0)
    for path in run.objects():
        kind = next((kind for kind in ("window", "state") if f"-{kind}-" in path.name), "full")
        sizes[kind] += path.stat().st_size
    return sizes
