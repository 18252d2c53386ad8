"""Disaggregated prefill and decode on this machine, beside the same engines aggregated.

    python examples/disaggregated/run.py                          # a directory
    python examples/disaggregated/run.py --store s3 --latency-ms 20

Starts two producers and two consumers, which share a store and nothing else, and ``kvshelf proxy``
before them; sends requests and measures. Then it does the same with four engines that each prefill
and decode, with the store and without one, and prints one table. It needs the extra
``kvshelf[proxy]`` and, for ``--store s3``, ``kvshelf[s3]`` and rclone. Ctrl-C ends all processes.

Four engines on a few cores take turns: the table shows that everything works, and is no statement
about speed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(2, str(Path(__file__).resolve().parents[2]))
from load import Measured, make_prompts, percentile, run_load
from make_model import make_model
from processes import Store, bucket, engines, metrics, proxy

#: For each arrangement the roles of the engines.
MODES: dict[str, list[str]] = {
    "disaggregated": ["kv_producer"] * 2 + ["kv_consumer"] * 2,
    "aggregated": ["kv_both"] * 4,
    "no-store": ["kv_both"] * 4,
}
TITLES = {
    "disaggregated": "2 prefill, 2 decode",
    "aggregated": "4 do both",
    "no-store": "4 do both, no store",
}
TOKENS = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True)
class Result:
    """What one arrangement did.

    Attributes
    ----------
    requests : list of Measured
    prefill, decode : dict of str to float
        Prompt tokens by where their KV came from, of the engines that prefill only, and of those
        that answer.
    handovers : float
        Requests for which a consumer was given the params of a producer.
    """

    requests: list[Measured]
    prefill: dict[str, float]
    decode: dict[str, float]
    handovers: float


def sources(urls: Sequence[str]) -> dict[str, float]:
    """Return the prompt tokens of some engines by source."""
    found: dict[str, float] = {}
    for url in urls:
        for name, value in metrics(url).items():
            if name.startswith(f"{TOKENS}/"):
                source = name.partition("/")[2]
                found[source] = found.get(source, 0.0) + value
    return found


def measure(
    console: Console, mode: str, model: Path, folder: Path, options: argparse.Namespace
) -> Result:
    """Start the engines of one arrangement, load them, and end them."""
    roles = MODES[mode]
    logs = folder / mode
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as running:
        store: Store | None = None
        if mode != "no-store":
            # A store of an earlier run, or of the other arrangement, would make all of them warm.
            place = folder / f"store-{mode}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            if options.store == "s3":
                store = running.enter_context(bucket(place, options.latency_ms / 1000))
            else:
                store = Store(str(place), {})
        with console.status(f"{mode}: starting {len(roles)} engines, one after the other …"):
            urls = running.enter_context(engines(roles, model, store, logs))
        sides = (urls[:2], urls[2:]) if mode == "disaggregated" else ([], urls)
        front, probed = running.enter_context(proxy(*sides, logs / "proxy.log"))
        prompts = make_prompts(options.documents, options.questions)
        with console.status(f"{mode}: warming up …"):
            # An engine learns the name of its namespace with its first requests.
            for url in urls:
                run_load(url, make_prompts(1, 1, seed=1), clients=1, tokens=2)
        before = [sources(side) for side in sides]
        with console.status(f"{mode}: {len(prompts)} requests from {options.clients} clients …"):
            requests = run_load(front, prompts, clients=options.clients, tokens=options.tokens)
        after = [sources(side) for side in sides]
        used = [
            {source: now[source] - then.get(source, 0.0) for source in now}
            for then, now in zip(before, after, strict=True)
        ]
        handed = metrics(probed).get("kvshelf_proxy_handovers_total/promised", 0.0)
    return Result(requests, used[0], used[1], handed)


def share(tokens: dict[str, float], source: str) -> str:
    """Return the share of prompt tokens whose KV came from a source."""
    total = sum(tokens.values())
    return f"{100 * tokens.get(source, 0.0) / total:.0f} %" if total else "-"


def show(console: Console, results: dict[str, Result], options: argparse.Namespace) -> None:
    """Print the table."""
    where = "a directory"
    if options.store == "s3":
        where = f"S3 on this machine, {options.latency_ms:g} ms a request"
    cores = len(os.sched_getaffinity(0))
    numbers = {1: "one core", 2: "two cores"}
    table = Table(
        title=f"Four engines on {numbers.get(cores, f'{cores} cores')}: functional, no speed claim."
        f" Store: {where}",
        title_justify="left",
    )
    table.add_column("engines", no_wrap=True)
    for name in ("TTFT", "ITL"):
        for at in ("p50", "p99"):
            table.add_column(f"{name}\n{at}, ms", justify="right")
    table.add_column("KV from\nthe store", justify="right")
    table.add_column("own\ncache", justify="right")
    table.add_column("computed", justify="right")
    table.add_column("handed\nover", justify="right")
    for mode, result in results.items():
        times = [request.first for request in result.requests]
        gaps = [request.gap for request in result.requests]
        table.add_row(
            TITLES[mode],
            *(f"{1000 * percentile(of, at):,.0f}" for of in (times, gaps) for at in (0.5, 0.99)),
            share(result.decode, "external_kv_transfer"),
            share(result.decode, "local_cache_hit"),
            share(result.decode, "local_compute"),
            f"{result.handovers:.0f} of {len(result.requests)}" if result.prefill else "-",
        )
    console.print(table)
    console.print(
        "TTFT: time to the first token, with the prefill engine's leg. ITL: time from token to"
        " token, the average of each answer. Shares are of the prompts' tokens, at the engines"
        " that answer."
    )
    reference = results.get("no-store")
    for mode, result in results.items():
        if reference is not None and result is not reference:
            pairs = zip(result.requests, reference.requests, strict=True)
            equal = sum(one.text == other.text for one, other in pairs)
            console.print(
                f"{mode}: {equal} of {len(result.requests)} answers equal those without a store"
            )


def interrupt(*_: object) -> None:
    """Leave all blocks, which ends their processes; further signals do not disturb that."""
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Two producers and two consumers, and a proxy.")
    parser.add_argument("--folder", type=Path, default=Path(".disaggregated"), help="for all files")
    parser.add_argument("--store", choices=["directory", "s3"], default="directory")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of each S3 request")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--questions", type=int, default=4, help="requests for each document")
    parser.add_argument("--clients", type=int, default=4, help="requests at the same time")
    parser.add_argument("--tokens", type=int, default=16, help="length of each answer, 2 or more")
    options = parser.parse_args()
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, interrupt)
    console = Console(highlight=False)
    # Tables of a narrow terminal, or of a file, would not be readable.
    console.width = max(console.width, 110)
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(folder / "model", "tiny", tokenizer=True, replace=True)
    try:
        results = {
            mode: measure(console, mode, model, folder, options)
            for mode in dict.fromkeys(options.modes)
        }
    except KeyboardInterrupt:
        console.print("interrupted; all processes have ended", style="red")
        sys.exit(130)
    show(console, results, options)


if __name__ == "__main__":
    main()
