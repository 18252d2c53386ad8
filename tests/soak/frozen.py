"""What a shelf that is frozen for ever costs an engine that decodes.

Run as ``python tests/soak/frozen.py`` where FUSE can be mounted. An engine with kvshelf, on a
filesystem that answers nothing any more, and one with an inert connector get the same prompts in
turn and decode, both on the same core, of which one at a time has anything to do: two cores of
one machine are seldom equally fast. Printed: the time that kvshelf takes of each step (the
copies of KV into staging apart), and the ratio of the times of a decoded token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("vllm", "faults", "soak")]
sys.path.append(str(ROOT / "examples"))

from faultfs import mounted
from harness import INERT_CONNECTOR, Answer, Engine
from make_model import RECIPES, make_model

from kvshelf.bench.measure import estimate, median, percentile

SIDES = ("worker", "scheduler", "idle scheduler")
DECODED = 120
PROMPT = 600
#: Answers of one engine, before it is the other's turn.
ANSWERS = 2
#: vLLM's workers poll for a second after their last step, at the cost of the other engine.
POLLING_SECONDS = 1.3
#: The other cores are for what serves the filesystem and what asks.
CORE = 0


def token_seconds(answer: Answer) -> float:
    return (answer.seconds - answer.ttft) / (DECODED - 1)


def steps_of(out: str) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for path in Path(out).parent.glob(Path(out).name + ".*"):
        for line in path.read_text().splitlines():
            side, spent, gathered = json.loads(line)
            found[side].append([spent - gathered, gathered])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--recipe", default="tiny", choices=sorted(RECIPES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvshelf-frozen-") as folder:
        root = Path(folder)
        model = make_model(root / "model", options.recipe)
        mount = mounted(root / "storage")
        out = str(root / "steps")
        arguments: dict[str, Any] = {"model": model, "max_num_seqs": 4}
        # Whatever of the shelf is asked, it must come from storage: nothing is cached.
        env = {"TIMED_OUT": out, "PYTHONPATH": os.pathsep.join(sys.path[:3])}
        try:
            with (
                Engine(
                    log=root / "kvshelf.log",
                    connector=("TimedConnector", "timed"),
                    extra_config={"shared_storage_path": str(mount.path / "shelf")},
                    core=CORE,
                    env=env,
                    **arguments,
                ) as ours,
                Engine(
                    log=root / "inert.log", connector=INERT_CONNECTOR, core=CORE, **arguments
                ) as floor,
            ):
                report(ours, floor, mount, out, options)
        finally:
            mount.close()


def report(ours: Engine, floor: Engine, mount: Any, out: str, options: Any) -> None:
    generator = random.Random(0)
    vocabulary = RECIPES[options.recipe].vocab

    def ask(engine: Engine) -> Answer:
        tokens = [generator.randrange(2, vocabulary) for _ in range(PROMPT)]
        return engine.generate(tokens, max_tokens=DECODED)

    for engine in (ours, floor):
        engine.wait_ready()
        for _ in range(2):
            ask(engine)
    well = compare(ours, floor, ask, options.pairs)
    say("well", well, options.pairs)
    mount.freeze()
    try:
        before = {side: len(steps) for side, steps in steps_of(out).items()}
        frozen = compare(ours, floor, ask, options.pairs)
        say("frozen", frozen, options.pairs)
        for side, steps in steps_of(out).items():
            spent = [step[0] for step in steps[before[side] :]] or [0.0]
            gathered = [step[1] for step in steps[before[side] :] if step[1]]
            print(
                f"{side}: {len(spent)} steps, kvshelf took p50 {percentile(spent, 0.5):.3f} ms,"
                f" p99 {percentile(spent, 0.99):.3f} ms, most {max(spent):.3f} ms;"
                f" beside it {len(gathered)} steps copied KV,"
                f" p99 {percentile(gathered, 0.99) if gathered else 0:.3f} ms"
            )
    finally:
        mount.thaw()


def compare(
    ours: Engine, floor: Engine, ask: Callable[[Engine], Answer], pairs: int
) -> list[float]:
    """Ratios of the times of a decoded token."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            time.sleep(POLLING_SECONDS)
            answers = [ask((ours, floor)[side]) for _ in range(ANSWERS)]
            times[side].append(median([token_seconds(answer) for answer in answers]))
    return [a / b for a, b in zip(*times, strict=True)]


def say(state: str, ratios: list[float], pairs: int) -> None:
    found = estimate(ratios)
    print(
        f"time of a decoded token, storage {state}, against an inert connector:"
        f" {found.value:.3f} ({found.low:.3f} to {found.high:.3f}), {pairs} pairs"
    )


if __name__ == "__main__":
    main()
