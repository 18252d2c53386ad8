"""What a shelf that is frozen for ever costs an engine that decodes.

Run as ``python tests/soak/frozen.py`` where FUSE can be mounted. An engine with kvshelf, on a
filesystem that answers nothing any more, and two with an inert connector get prompts in turn and
decode, all on the same core, of which one at a time has anything to do: two cores of one machine
are seldom equally fast. Two inert engines, since they differ from each other, too: by how much,
is what the method cannot tell. Printed: the ratios of the times of a decoded token, and the time
that kvshelf takes of each step (the copies of KV into staging apart), by an engine of its own,
because the clock takes a part of so short a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.measure import estimate, median, percentile
from examples.models.make_model import RECIPES, make_model
from tests.faults.faultfs import mounted
from tests.support.engines import INERT_CONNECTOR, SHELF_CONNECTOR, Answer, Engine

OURS, FLOOR, CONTROL, CLOCKED = "kvshelf", "inert", "second inert", "clocked"
SIDES = ("worker", "scheduler", "idle scheduler")
DECODED = 360
PROMPT = 600
#: Answers of one engine, before it is another's turn.
ANSWERS = 2
#: Answers of the engine with the clock.
CLOCKED_ANSWERS = 12
#: vLLM's workers poll for a second after their last step, at the cost of the others.
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
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of who comes first")
    parser.add_argument("--recipe", default="tiny", choices=sorted(RECIPES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvshelf-frozen-") as folder:
        root = Path(folder)
        model = make_model(root / "model", options.recipe)
        mount = mounted(root / "storage")
        out = str(root / "steps")
        env = {"TIMED_OUT": out, "PYTHONPATH": str(ROOT)}
        # Whatever of the shelf is asked, it must come from storage: nothing is cached.
        shelf = {"shared_storage_path": str(mount.path / "shelf")}
        kinds: dict[str, dict[str, Any]] = {
            OURS: {"connector": SHELF_CONNECTOR, "extra_config": shelf},
            FLOOR: {"connector": INERT_CONNECTOR},
            CONTROL: {"connector": INERT_CONNECTOR},
            CLOCKED: {
                "connector": ("TimedConnector", "tests.soak.timed"),
                "extra_config": shelf,
                "env": env,
            },
        }
        generator = random.Random(options.seed)
        with contextlib.ExitStack() as stack:
            stack.callback(mount.close)
            engines = {
                kind: stack.enter_context(
                    Engine(
                        log=root / f"{kind}.log",
                        core=CORE,
                        model=model,
                        max_num_seqs=4,
                        **arguments,
                    )
                )
                for kind, arguments in generator.sample(list(kinds.items()), len(kinds))
            }
            print(f"started in this order: {', '.join(engines)}")
            report(engines, mount, out, generator, options)


def report(
    engines: dict[str, Engine], mount: Any, out: str, generator: random.Random, options: Any
) -> None:
    vocabulary = RECIPES[options.recipe].vocab

    def ask(engine: Engine) -> Answer:
        tokens = [generator.randrange(2, vocabulary) for _ in range(PROMPT)]
        return engine.generate(tokens, max_tokens=DECODED)

    for engine in engines.values():
        engine.wait_ready()
        for _ in range(2):
            ask(engine)
    clocked = engines.pop(CLOCKED)
    say("well", compare(engines, ask, generator, options.pairs))
    mount.freeze()
    try:
        say("frozen", compare(engines, ask, generator, options.pairs))
        before = {side: len(steps) for side, steps in steps_of(out).items()}
        for _ in range(CLOCKED_ANSWERS):
            ask(clocked)
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
    engines: dict[str, Engine],
    ask: Callable[[Engine], Answer],
    generator: random.Random,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of a decoded token, by engine and round."""
    times: dict[str, list[float]] = {kind: [] for kind in engines}
    for _ in range(rounds):
        for kind in generator.sample(list(engines), len(engines)):
            time.sleep(POLLING_SECONDS)
            answers = [ask(engines[kind]) for _ in range(ANSWERS)]
            times[kind].append(median([token_seconds(answer) for answer in answers]))
    return times


def say(state: str, times: dict[str, list[float]]) -> None:
    ours, floor, control = times[OURS], times[FLOOR], times[CONTROL]
    both = [(a + b) / 2 for a, b in zip(floor, control, strict=True)]
    print(
        f"storage {state}: a decoded token took {median(both) * 1e3:.3f} ms with an inert connector"
    )
    for what, times_of, against in (
        ("kvshelf against the inert ones", ours, both),
        ("the second inert one against the first", control, floor),
    ):
        found = estimate([a / b for a, b in zip(times_of, against, strict=True)])
        print(
            f"  {what}: {found.value:.3f} times as long"
            f" ({found.low:.3f} to {found.high:.3f}, {len(ours)} pairs)"
        )


if __name__ == "__main__":
    main()
