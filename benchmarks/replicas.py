"""Rows ``replicas/*``: 64 processes that serve a trace of real requests from one shelf.

Owns the processes, light replicas of an engine: each has a ``ChunkCache`` of its own and no model.
A process takes the next request of the trace, looks its prompt up, loads the hit, and stores the
chunks behind it. The chunks are those of the trace, of 512 tokens; their KV is small, so that the
figures are those of calls, not of bytes. The floor is one such process that serves the same
requests alone, from a shelf of its own.

Compared is the processor time of a request, of all processes together without the storage's.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch

from benchmarks.bucket import bucket
from benchmarks.measure import Row, median
from benchmarks.paged import paged_kv
from benchmarks.processes import Processes
from benchmarks.samples import Shape, make_format
from benchmarks.servers import BUCKET, MissingServerError
from benchmarks.settings import Settings
from benchmarks.traces import TRACES, Trace
from kvshelf.backends import open_backend
from kvshelf.cache import ChunkCache
from kvshelf.shelf.shelf import Shelf

_REPLICAS, _FEW_REPLICAS = 64, 3
_TRACE: Final = "mooncake_conversation.jsonl.gz"
_TRACE_TOKENS: Final = 512
_SHAPE: Final = Shape(1, 1, 16)
#: Longer prompts of the trace are cut to so many chunks.
_MOST_CHUNKS: Final = 64
_NEAR_REQUESTS, _FAR_REQUESTS, _FEW_REQUESTS = 1280, 320, 8
_PAIRS: Final = 3
_STAGING_BYTES: Final = 16 << 20
_SECONDS: Final = 300.0


def _row(name: str, requests: int) -> Row:
    return Row(
        f"replicas/{name}",
        f"processor time of a request, {_REPLICAS} processes serve {requests} requests of a trace",
        "one process serves them",
    )


_NEAR = _row("directory", _NEAR_REQUESTS)
_FAR = _row("s3", _FAR_REQUESTS)


def bench_replicas(settings: Settings) -> Iterator[Row]:
    """Measure what many processes on one shelf take, and what they find."""

    def folder(name: str) -> tuple[str, dict[str, Any]]:
        return str(settings.folder(f"replicas-{name}")), {}

    yield _measure(settings, _NEAR, _NEAR_REQUESTS, folder, dict)
    try:
        with bucket(settings.folder("replicas-bucket")) as place:

            def prefix(name: str) -> tuple[str, dict[str, Any]]:
                return f"s3://{BUCKET}/{name}", place.options()

            def counts() -> Mapping[str, int]:
                return place.proxy.counts()["requests"]

            yield _measure(settings, _FAR, _FAR_REQUESTS, prefix, counts)
    except MissingServerError as error:
        yield replace(_FAR, skipped=str(error))


def _measure(
    settings: Settings,
    row: Row,
    requests: int,
    shelf: Callable[[str], tuple[str, dict[str, Any]]],
    counts: Callable[[], Mapping[str, int]],
) -> Row:
    prompts = _prompts(_FEW_REQUESTS if settings.quick else requests)
    chunks = sum(len(prompt) for prompt in prompts)
    processes = _FEW_REPLICAS if settings.quick else _REPLICAS
    served: tuple[list[_Served], list[_Served]] = ([], [])
    pairs = settings.pairs(_PAIRS)
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            count = (processes, 1)[side]
            settings.progress(f"{row.work}: pair {pair + 1} of {pairs}, processes: {count}")
            url, options = shelf(f"{pair}-{side}")
            served[side].append(_serve_all(count, url, options, prompts, counts))
    found, alone = (median([one.hits for one in side]) / chunks for side in served)
    many = served[0][len(served[0]) // 2]
    note = f"of the chunks {found:.1%} were hit, by one process {alone:.1%}; {many.seconds:.0f} s"
    if many.requests:
        calls = ", ".join(f"{name} {n}" for name, n in sorted(many.requests.items()))
        note += f"; requests for {chunks} chunks: {calls}"
    return replace(
        row,
        ours=[one.processor / len(prompts) for one in served[0]],
        floors=[one.processor / len(prompts) for one in served[1]],
        note=note,
        extra={
            "chunks": chunks,
            "many": [asdict(one) for one in served[0]],
            "alone": [asdict(one) for one in served[1]],
        },
    )


def _prompts(requests: int) -> list[list[int]]:
    """Return the whole chunks of the first requests of the trace."""
    trace = Trace(TRACES / _TRACE)
    found = zip(trace.prompts, trace.whole, strict=True)
    prompts = [
        [int(chunk) for chunk in prompt[: min(whole, _MOST_CHUNKS)]] for prompt, whole in found
    ]
    return [prompt for prompt in prompts if prompt][:requests]


@dataclass(slots=True)
class _Served:
    """What serving all requests took.

    Attributes
    ----------
    seconds : float
        Until the last one was served.
    processor : float
        Seconds of processor time of the processes.
    hits : int
        Chunks that were loaded.
    failed : int
        Chunks that were not stored.
    requests : Mapping of str to int
        To the bucket, by method.
    """

    seconds: float
    processor: float = 0.0
    hits: int = 0
    failed: int = 0
    requests: Mapping[str, int] | None = None


def _serve_all(
    processes: int,
    url: str,
    options: Mapping[str, Any],
    prompts: Sequence[list[int]],
    counts: Callable[[], Mapping[str, int]],
) -> _Served:
    """Let processes serve the requests, and end them."""
    turn = multiprocessing.get_context("forkserver").Value("l", 0)
    arguments = ((url, dict(options), list(prompts), turn) for _ in range(processes))
    with closing(Processes(_serve, arguments)) as running:
        before = Counter(counts())
        begin = time.perf_counter()
        replies = running.ask()
        served = _Served(time.perf_counter() - begin)
        served.requests = dict(Counter(counts()) - before)
    for processor, hits, failed in replies:
        served.processor += processor
        served.hits += hits
        served.failed += failed
    return served


def _serve(
    end: Connection, url: str, options: dict[str, Any], prompts: list[list[int]], turn: Any
) -> None:
    """Serve requests until none is left; runs in a process of its own."""
    # Of 64 processes none can have the machine's threads for itself.
    torch.set_num_threads(1)
    fmt = make_format(_SHAPE, 1, _TRACE_TOKENS)
    kv = paged_kv(_SHAPE, _MOST_CHUNKS * _TRACE_TOKENS)
    hits = failed = 0
    with (
        Shelf(open_backend(url, storage_options=options)) as shelf,
        ChunkCache(
            shelf, fmt, prefetch_bytes=0, staging_bytes=_STAGING_BYTES, timeout_s=_SECONDS
        ) as cache,
    ):
        end.send(None)
        end.recv()
        processor = 0.0
        while True:
            with turn.get_lock():
                number = turn.value
                turn.value += 1
            if number >= len(prompts):
                break
            tokens = _tokens(prompts[number])
            begin = time.process_time()
            found = int(cache.retrieve(tokens, kv=kv).sum())
            hits += found // _TRACE_TOKENS
            behind = [place >= found for place in range(len(tokens))]
            report = cache.submit_store(tokens, behind, kv=kv).result(_SECONDS)
            failed += report.chunks - report.published - report.existed
            processor += time.process_time() - begin
        end.send((processor, hits, failed))


def _tokens(prompt: Sequence[int]) -> list[int]:
    """Return the token ids of a prompt of the trace: those of a chunk depend on its number."""
    return [
        int(token)
        for chunk in prompt
        for token in np.random.default_rng(chunk).integers(2, 32000, _TRACE_TOKENS)
    ]
