"""Disaggregated prefill and decode on this machine, beside the same engines aggregated.

Starts two producers and two consumers, which share a shelf and nothing else, and ``kvshelf proxy``
before them; sends requests, and measures. Then it does the same with four engines that each prefill
and decode, with the shelf and without one, and prints one table. Ctrl-C ends all processes.

    python examples/disaggregated/run.py
    python examples/disaggregated/run.py --shelf s3://bucket/kv

On a bucket, credentials, region and endpoint come from the sources of the AWS CLI (AWS_PROFILE,
AWS_ENDPOINT_URL, …); each run makes folders of its own there, and leaves them. It needs the extra
``proxy`` and, for a bucket, ``s3``.

Four engines on a few cores take turns: the table shows that everything works, and is no statement
about speed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from load import Measured, make_prompts, percentile, run_load
from processes import engines, metrics, proxy
from rich.console import Console
from rich.table import Table

MAKE_MODEL = Path(__file__).parents[1] / "models" / "make_model.py"
#: For each arrangement its name in the table, and the roles of its engines.
MODES = {
    "disaggregated": ("2 prefill, 2 decode", ["kv_producer"] * 2 + ["kv_consumer"] * 2),
    "aggregated": ("4 do both", ["kv_both"] * 4),
    "no-shelf": ("4 do both, no shelf", ["kv_both"] * 4),
}
TOKENS = "vllm:prompt_tokens_by_source_total/"


@dataclass(frozen=True)
class Result:
    """What clients saw, where the prompts' KV came from, and how many prompts were handed over."""

    requests: list[Measured]
    sources: Counter[str]
    handed: float

    def share(self, source: str) -> str:
        """Return the share of the prompts' tokens whose KV came from a source."""
        return f"{100 * self.sources[TOKENS + source] / self.sources.total():.0f} %"


def sources(urls: Sequence[str]) -> Counter[str]:
    """Return the prompt tokens of engines by the source of their KV."""
    found: Counter[str] = Counter()
    for url in urls:
        found.update({name: n for name, n in metrics(url).items() if name.startswith(TOKENS)})
    return found


def measure(mode: str, model: Path, folder: Path, options: argparse.Namespace) -> Result:
    """Start the engines of one arrangement, load them, and end them."""
    logs = folder / mode
    logs.mkdir(parents=True, exist_ok=True)
    # A shelf that others have filled would give hits at once.
    shelf = f"{options.shelf or folder / 'shelf'}/{mode}-{uuid.uuid4().hex[:8]}"
    prompts = make_prompts(options.documents, options.questions)
    print(f"{mode}: four engines start, one after the other …", flush=True)
    with engines(MODES[mode][1], model, None if mode == "no-shelf" else shelf, logs) as urls:
        prefill, decode = (urls[:2], urls[2:]) if mode == "disaggregated" else ([], urls)
        with proxy(prefill, decode, logs / "proxy.log") as (front, probed):
            for url in urls:
                # An engine learns the name of its namespace with its first requests.
                run_load(url, make_prompts(1, 1, seed=1), clients=1, tokens=2)
            before = sources(decode)
            print(f"{mode}: {len(prompts)} requests from {options.clients} clients …", flush=True)
            requests = run_load(front, prompts, clients=options.clients, tokens=options.tokens)
            handed = metrics(probed).get("kvshelf_proxy_handovers_total/promised", 0.0)
            return Result(requests, sources(decode) - before, handed)


def show(results: dict[str, Result]) -> None:
    """Print the table."""
    table = Table()
    table.add_column("engines", no_wrap=True)
    for name in ("TTFT\np50, ms", "\np99, ms", "ITL\np50, ms", "\np99, ms"):
        table.add_column(name, justify="right")
    for name in ("KV from\nthe shelf", "own\ncache", "computed", "handed\nover"):
        table.add_column(name, justify="right")
    for mode, result in results.items():
        times = [request.first for request in result.requests]
        gaps = [request.gap for request in result.requests]
        table.add_row(
            MODES[mode][0],
            *(f"{1000 * percentile(of, at):,.0f}" for of in (times, gaps) for at in (0.5, 0.99)),
            *map(result.share, ("external_kv_transfer", "local_cache_hit", "local_compute")),
            f"{result.handed:.0f} of {len(result.requests)}",
        )
    Console(width=110).print(table)
    print(
        "TTFT: time to the first token, with the prefill engine's leg. ITL: time from token to"
        "\ntoken, the average of each answer. Shares are of the prompts' tokens, at the engines"
        "\nthat answer. Four engines on a few cores take turns: this is no statement about speed."
    )
    for mode, result in results.items():
        if mode != "no-shelf" and "no-shelf" in results:
            pairs = zip(result.requests, results["no-shelf"].requests, strict=True)
            equal = sum(one.text == other.text for one, other in pairs)
            print(f"{mode}: {equal} of {len(result.requests)} answers equal those without a shelf")


def interrupt(*_: object) -> None:
    """Leave all blocks, which ends their processes; further signals do not disturb that."""
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Two producers and two consumers, and a proxy.")
    parser.add_argument("--folder", type=Path, default=Path(".disaggregated"), help="for all files")
    parser.add_argument("--shelf", help="directory or URL; default: a new directory in the folder")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--questions", type=int, default=4, help="requests for each document")
    parser.add_argument("--clients", type=int, default=4, help="requests at the same time")
    parser.add_argument("--tokens", type=int, default=16, help="length of each answer, 2 or more")
    options = parser.parse_args()
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, interrupt)
    folder, model = options.folder.absolute(), options.folder.absolute() / "model"
    shutil.rmtree(folder / "shelf", ignore_errors=True)
    make = [sys.executable, MAKE_MODEL, model, "--recipe", "tiny", "--tokenizer", "--replace"]
    subprocess.run(make, check=True)
    try:
        show({mode: measure(mode, model, folder, options) for mode in options.modes})
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
