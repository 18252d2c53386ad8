"""``python -m benchmarks.simulated``: what the first token of a hit takes, by rates.

Owns a simulation of requests that come at once to one engine with one storage. What is loaded is
decided by :mod:`kvshelf.admission`, the code that engines run, which has learned the simulated
rates. No bytes are moved; neither vLLM nor a storage is needed.

What is simulated
-----------------
* The engine computes one prompt after the other, in the order in which they become ready. Tokens
  ``[x, y)`` of a prompt take p (y − x) + q (y² − x²) / 2.
* The storage reads one load after the other. The chunks that are read at once share its rate.
* A load that is cut ends at once, and what has arrived is kept.
* Lookups, copies and steps take no time beyond that.

The rates of engines are measured, see `ENGINES`. Those of storages are limits: a network of
100 Gb/s delivers 11.5 GB/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.samples import CHUNK_TOKENS
from benchmarks.stepped import ALWAYS, AUTO, COMPUTED, POLICIES
from kvshelf.admission import AdmissionRule, Before, Hit
from kvshelf.costs import attended

#: Tokens of each prompt that are not on the shelf.
NEW_TOKENS: Final = 1024
LENGTHS: Final = (4096, 8192, 16384, 32768, 65536, 131072)
#: Requests at once, and the length of their prompts.
MANY: Final = 16
MANY_TOKENS: Final = 16384


@dataclass(frozen=True, slots=True)
class Engine:
    """A model on some processors.

    Attributes
    ----------
    name : str
    linear, attention : float
        p, seconds for each token, and q, seconds for each pair of tokens.
    token_bytes : int
        Bytes of KV of a token, of all ranks.
    step_tokens : int
    """

    name: str
    linear: float
    attention: float
    token_bytes: int
    step_tokens: int = 8192

    def seconds(self, start: int, end: int) -> float:
        """Return how long it computes tokens ``[start, end)`` of a prompt."""
        return self.linear * (end - start) + self.attention * attended(start, end)


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage, as one engine meets it.

    Attributes
    ----------
    name : str
    latency : float
        Seconds until the first byte of a read.
    rate : float
        Bytes per second.
    """

    name: str
    latency: float
    rate: float

    def seconds(self, nbytes: float) -> float:
        """Return how long a read takes."""
        return self.latency + nbytes / self.rate


#: The rates of the first are fitted to the times of prompts computed whole in `PUBLISHED`.
ENGINES: Final = (Engine("QwQ-32B, 4 × H20", 131.2e-6, 2.16e-9, 256 << 10),)
STORAGES: Final = (
    Storage("local, 7 GB/s", 0.5e-3, 7e9),
    Storage("NFS, 25 Gb/s", 2e-3, 2.9e9),
    Storage("S3, 100 Gb/s", 0.15, 11.5e9),
    Storage("S3, 10 Gb/s", 0.15, 1.15e9),
)
#: First tokens in seconds by the length of the prompt: computed, and with four fifths of it loaded
#: from NFS. Of https://github.com/ModelEngine-Group/unified-cache-management/pull/656
PUBLISHED: Final = {
    4000: (0.55199, 0.17769),
    8000: (1.10231, 0.32772),
    16000: (2.35601, 0.68889),
    32000: (5.3411, 1.54476),
}
#: Its rate is fitted to these hits.
PUBLISHED_STORAGE: Final = Storage("NFS, 16 GB/s", 2e-3, 16e9)


def taught(engine: Engine, storage: Storage) -> AdmissionRule:
    """Return the rule of an engine that has learned its own rates, and those of a storage."""
    rule = AdmissionRule(engine.step_tokens)
    for number in range(32):
        start = number % 8 * 4096
        end = start + (1 + number % 4) * 1024
        rule.prefill.learn([(start, end)], 0, engine.seconds(start, end))
    for number in range(16):
        nbytes = 2 ** (number % 10) * CHUNK_TOKENS * engine.token_bytes
        rule.storage.learn(nbytes, storage.seconds(nbytes))
    return rule


@dataclass(slots=True)
class _Request:
    """A request: when it can be computed, from which token on."""

    tokens: int
    ready: float = 0.0
    start: int = 0


def first_tokens(
    engine: Engine,
    storage: Storage,
    prompts: Sequence[tuple[int, int]],
    policy: str,
    rule: AdmissionRule | None = None,
) -> list[float]:
    """Return when the first token of each request is there, in seconds since all came.

    Parameters
    ----------
    engine : Engine
    storage : Storage
    prompts : sequence of (int, int)
        The tokens of each, and how many of them are on the shelf, in whole chunks.
    policy : str
        One of `POLICIES`.
    rule : AdmissionRule, optional
        Of an engine that has learned; by default the rates of `engine` and `storage`.
    """
    if policy != AUTO:
        rule = None
    elif rule is None:
        rule = taught(engine, storage)
    requests = [_Request(tokens) for tokens, _ in prompts]
    free, before = 0.0, Before()
    for request, (tokens, stored) in zip(requests, prompts, strict=True):
        hit = Hit(0, stored, tokens, CHUNK_TOKENS, stored * engine.token_bytes)
        alone = engine.seconds(0, tokens)
        at_once = hit.chunks
        patience: tuple[float, ...] = ()
        loads = stored > 0 and policy != COMPUTED
        if loads and rule is not None:
            loads = rule.admits(hit, before)
            at_once, patience = rule.at_once(hit, before), rule.patience(hit, before)
        computing, unloaded, nbytes, _, count = before
        if loads:
            begin = max(0.0, free - storage.latency)
            free, chunks = loaded(arrivals(storage, hit, at_once, begin), patience)
            request.ready, request.start = free, min(stored, chunks * CHUNK_TOKENS)
            before = Before(computing, unloaded + alone, nbytes + hit.nbytes, 0, count + 1)
        else:
            before = Before(computing + alone, unloaded + alone, nbytes, 0, count)
    return _computed(engine, requests)


def arrivals(storage: Storage, hit: Hit, at_once: int, begin: float) -> list[float]:
    """Return when each chunk is there, with all before it."""
    there = [0.0] * hit.chunks
    chunk_bytes = hit.nbytes / hit.chunks
    asked, now = 0, begin
    answers: list[tuple[float, int]] = []
    left: dict[int, float] = {}
    while asked < hit.chunks or answers or left:
        while asked < hit.chunks and len(answers) + len(left) < at_once:
            answers.append((now + storage.latency, asked))
            asked += 1
        each = storage.rate / max(1, len(left))
        ends = now + min(left.values(), default=math.inf) / each
        then = min(ends, answers[0][0] if answers else math.inf)
        left = {chunk: nbytes - (then - now) * each for chunk, nbytes in left.items()}
        now = then
        for chunk in [chunk for chunk, nbytes in left.items() if nbytes <= 1e-3]:
            there[chunk] = now
            del left[chunk]
        while answers and answers[0][0] <= now:
            left[answers.pop(0)[1]] = chunk_bytes
    return list(itertools.accumulate(there, max))


def loaded(arrived: Sequence[float], patience: Sequence[float]) -> tuple[float, int]:
    """Return when a load ends, and how many chunks are there then."""
    if patience:
        for there, arrival in enumerate(arrived):
            cut = patience[min(there, len(patience) - 1)]
            if arrival > cut:
                return max(cut, arrived[there - 1] if there else 0.0), there
    return arrived[-1], len(arrived)


def _computed(engine: Engine, requests: Sequence[_Request]) -> list[float]:
    """Return when each request is computed."""
    ends, now = [0.0] * len(requests), 0.0
    for place in sorted(range(len(requests)), key=lambda place: requests[place].ready):
        request = requests[place]
        now = max(now, request.ready) + engine.seconds(request.start, request.tokens)
        ends[place] = now
    return ends


# ------------------------------------------------------------------------------- what is compared


def stored_tokens(tokens: int) -> int:
    """Return how many of a prompt's tokens are on the shelf."""
    return (tokens - NEW_TOKENS) // CHUNK_TOKENS * CHUNK_TOKENS


def published(tokens: int) -> tuple[float, float]:
    """Return what is simulated of a prompt that `PUBLISHED` has: computed, and loaded."""
    prompt = [(tokens, tokens * 4 // 5)]
    [computed] = first_tokens(ENGINES[0], PUBLISHED_STORAGE, prompt, COMPUTED)
    [loaded] = first_tokens(ENGINES[0], PUBLISHED_STORAGE, prompt, ALWAYS)
    return computed, loaded


def series(
    engine: Engine, storage: Storage, lengths: Sequence[int] = LENGTHS
) -> dict[str, list[float]]:
    """Return first tokens of one prompt by its length, for each policy, in seconds."""
    prompts = [[(tokens, stored_tokens(tokens))] for tokens in lengths]
    return {
        policy: [round(first_tokens(engine, storage, each, policy)[0], 3) for each in prompts]
        for policy in POLICIES
    }


def fitted(rows: Sequence[Mapping[str, Any]], step_tokens: int = 8192) -> Engine:
    """Return the engine that rows ``admission/*`` of a report have measured.

    Its rates are those of the prompts that were computed alone. They have two lengths.
    """
    times: dict[int, list[float]] = {}
    for row in rows:
        if len(row["extra"]["requests"][COMPUTED]) == len(row["extra"]["means"][COMPUTED]):
            times.setdefault(row["extra"]["tokens"], []).extend(row["extra"]["means"][COMPUTED])
    (short, first), (long, last) = ((n, statistics.fmean(times[n])) for n in sorted(times))
    attention = 2 * (last / long - first / short) / (long - short)
    linear = first / short - attention * short / 2
    return Engine("measured", linear, attention, rows[0]["extra"]["token_bytes"], step_tokens)


def report() -> dict[str, Any]:
    """Return what the documentation's plot shows."""
    [engine] = ENGINES
    return {
        "command": ["python", "-m", "benchmarks.simulated"],
        "engine": engine.name,
        "new_tokens": NEW_TOKENS,
        "lengths": list(LENGTHS),
        "storages": {storage.name: series(engine, storage) for storage in STORAGES},
    }


class Met(NamedTuple):
    """A point that was measured, and simulated.

    Attributes
    ----------
    work : str
    measured, simulated : float
        Mean seconds to the first token of prompts whose hits are always loaded.
    """

    work: str
    measured: float
    simulated: float


def met(rows: Sequence[Mapping[str, Any]]) -> list[Met]:
    """Return the points of rows ``admission/*`` whose storage had a limited rate."""
    engine, found = fitted(rows), []
    for row in rows:
        extra = row["extra"]
        if extra["rate"] and extra["means"][ALWAYS]:
            count = len(extra["requests"][ALWAYS]) // len(extra["means"][ALWAYS])
            prompts = [(extra["tokens"], extra["stored_tokens"])] * count
            simulated = first_tokens(engine, Storage("", 0.0, extra["rate"]), prompts, ALWAYS)
            measured = statistics.fmean(extra["means"][ALWAYS])
            found.append(Met(row["work"], measured, statistics.fmean(simulated)))
    return found


# --------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulated",
        description="Simulate mean first tokens: computed, always loaded, and as kvshelf decides.",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the first tokens of one prompt to FILE"
    )
    options = parser.parse_args(arguments)
    if options.json is not None:
        options.json.write_text(json.dumps(report(), indent=1) + "\n")
    for engine, storage in itertools.product(ENGINES, STORAGES):
        sys.stdout.write(f"{engine.name}, {storage.name}\n")
        for tokens, count in (*((tokens, 1) for tokens in LENGTHS), (MANY_TOKENS, MANY)):
            prompts = [(tokens, stored_tokens(tokens))] * count
            sys.stdout.write(f"  {count:2} × {tokens:7,} tokens")
            for policy in POLICIES:
                mean = statistics.fmean(first_tokens(engine, storage, prompts, policy))
                sys.stdout.write(f"  {policy} {mean:7.3f} s")
            sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
