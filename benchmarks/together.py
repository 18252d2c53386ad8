"""Rows ``together/*``: four processes of one machine, with a node server and without one.

Owns the processes, which retrieve the same prompts at once, and what they have in common: a
directory whose files are in the page cache; or a bucket 20 ms away, and a folder of one disk tier.
The processes have no model: a retrieve is all that they do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benchmarks.bucket import bucket
from benchmarks.measure import Goal, Row
from benchmarks.paged import paged_kv
from benchmarks.processes import Processes
from benchmarks.samples import CHUNK_TOKENS, TINY, Shape, make_format, make_prompt
from benchmarks.served import Server
from benchmarks.servers import BUCKET, MissingServerError
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.cache import ChunkCache
from kvshelf.config import Config
from kvshelf.metrics import Counters
from kvshelf.server.shelf import open_served
from kvshelf.shelf.shelf import Shelf
from kvshelf.tiers.tiered import open_configured

_PROCESSES: Final = 4
#: KV of a rank that has one of eight heads of a model of 8B: 4 MiB for a chunk.
_SHAPE: Final = Shape(32, 1)
_CHUNKS: Final = 16
#: Prompts that all retrieve in a round.
_NEAR_PROMPTS, _FAR_PROMPTS = 8, 2
_NEAR_PAIRS, _FAR_PAIRS = 15, 9
_DELAY_SECONDS: Final = 20e-3
#: The processes copy to the disk tier in the background.
_TIER_SECONDS: Final = 3.0


def _row(name: str, work: str) -> Row:
    return Row(
        f"together/{name}",
        f"{_PROCESSES} processes retrieve the same {work} at once, through a node server",
        "the same without a node server",
        goal=Goal(0.9),
    )


_TOKENS = _CHUNKS * CHUNK_TOKENS
_NEAR = _row("directory", f"{_NEAR_PROMPTS} prompts of {_TOKENS} tokens in the page cache")
_FIRST = _row("s3-first", f"{_FAR_PROMPTS} prompts of {_TOKENS} tokens for the first time, from S3")
_AGAIN = _row("s3-again", f"{_FAR_PROMPTS} prompts of {_TOKENS} tokens again, with a disk tier")


def bench_together(settings: Settings) -> Iterator[Row]:
    """Measure what a node server gains where several processes load the same prompts."""
    shape = TINY if settings.quick else _SHAPE
    yield _near_row(settings, shape)
    try:
        yield from _far_rows(settings, shape)
    except MissingServerError as error:
        for row in (_FIRST, _AGAIN):
            yield replace(row, skipped=str(error))


def _start(options: Mapping[str, Any], shape: Shape) -> Processes:
    """Start processes with one configuration: of the shelf, or ``server``, a node server's URL."""
    arguments = ((dict(options), shape, number) for number in range(_PROCESSES))
    return Processes(_serve, arguments)


def _retrieve(group: Processes, seeds: Sequence[int]) -> float:
    """Let all retrieve the prompts of these seeds; return the seconds until all have."""
    group.ask(list(seeds))
    begin = time.perf_counter()
    group.ask()
    return time.perf_counter() - begin


def _serve(end: Connection, options: dict[str, Any], shape: Shape, number: int) -> None:
    """Retrieve prompts until the other end is closed; runs in a process of its own."""
    fmt = make_format(shape, 1)
    kv = paged_kv(shape, _TOKENS)
    with ExitStack() as stack:
        tier = None
        if "server" in options:
            shelf: Shelf = stack.enter_context(open_served(options["server"]))
        else:
            config = Config(**options)
            shelf, tier = open_configured(options["shared_storage_path"], config, Counters())
            stack.callback(shelf.close)
            if tier is not None:
                stack.callback(tier.close)
        cache = stack.enter_context(
            ChunkCache(shelf, fmt, disk_tier=tier, prefetch_bytes=0, timeout_s=60.0)
        )
        try:
            end.send(None)
            while True:
                prompts = [make_prompt(_TOKENS, seed) for seed in end.recv()]
                end.send(None)
                end.recv()
                # Each begins with another prompt.
                first = number % len(prompts)
                for prompt in (*prompts[first:], *prompts[:first]):
                    if not bool(cache.retrieve(prompt, kv=kv).all()):
                        raise RuntimeError("a stored prompt was not retrieved")
                end.send(None)
        except EOFError:
            return


def _store(folder: Path, shape: Shape, seeds: Sequence[int]) -> int:
    """Store the prompts of these seeds in a directory; return their bytes."""
    fmt = make_format(shape, 1)
    kv = paged_kv(shape, _TOKENS)
    with Shelf(open_backend(str(folder))) as shelf, ChunkCache(shelf, fmt, timeout_s=60.0) as cache:
        for seed in seeds:
            if not cache.store(make_prompt(_TOKENS, seed), kv=kv).complete:
                raise RuntimeError("a prompt was not stored")
    return len(seeds) * _CHUNKS * fmt.object_size(0)


def _near_row(settings: Settings, shape: Shape) -> Row:
    folder = settings.folder("together")
    seeds = range(_NEAR_PROMPTS)
    settings.progress("storing prompts")
    nbytes = _store(folder, shape, seeds)
    times: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        node = stack.enter_context(
            closing(Server(settings.folder("together-server"), folder, 2 * nbytes + (8 << 20)))
        )
        groups = [
            stack.enter_context(closing(_start(options, shape)))
            for options in ({"server": node.url}, {"shared_storage_path": str(folder)})
        ]
        pairs = settings.pairs(_NEAR_PAIRS)
        for pair in range(-2, pairs):
            settings.progress(f"{_NEAR.work}: pair {pair + 1} of {pairs}")
            for side in (0, 1) if pair % 2 else (1, 0):
                seconds = _retrieve(groups[side], seeds)
                if pair >= 0:
                    times[side].append(seconds)
    return replace(_NEAR, ours=times[0], floors=times[1], extra={"bytes": nbytes})


def _far_rows(settings: Settings, shape: Shape) -> Iterator[Row]:
    pairs = settings.pairs(_FAR_PAIRS)
    firsts: tuple[list[float], list[float]] = ([], [])
    agains: tuple[list[float], list[float]] = ([], [])
    with ExitStack() as stack:
        place = stack.enter_context(bucket(settings.folder("together-bucket")))
        settings.progress("storing prompts")
        nbytes = _store(place.folder / "kv", shape, range((pairs + 1) * _FAR_PROMPTS))
        place.proxy.delay(_DELAY_SECONDS)

        def options(name: str) -> dict[str, Any]:
            return {
                "shared_storage_path": f"s3://{BUCKET}/kv",
                "storage_options": place.options(),
                "disk_tier": {
                    "path": str(settings.folder(f"together-tier-{name}")),
                    "max_bytes": 2 * nbytes + (1 << 30),
                },
            }

        config = settings.folder("together-far-server") / "config.json"
        # YAML reads it as well.
        config.write_text(json.dumps(options("server")))
        node = stack.enter_context(
            closing(
                Server(settings.folder("together-far"), None, 2 * nbytes + (8 << 20), config=config)
            )
        )
        groups = [
            stack.enter_context(closing(_start(options, shape)))
            for options in ({"server": node.url}, options("shared"))
        ]
        for pair in range(-1, pairs):
            settings.progress(f"{_FIRST.work}: pair {pair + 1} of {pairs}")
            seeds = range((pair + 1) * _FAR_PROMPTS, (pair + 2) * _FAR_PROMPTS)
            for side in (0, 1) if pair % 2 else (1, 0):
                first = _retrieve(groups[side], seeds)
                time.sleep(_TIER_SECONDS)
                again = _retrieve(groups[side], seeds)
                if pair >= 0:
                    firsts[side].append(first)
                    agains[side].append(again)
        extra: dict[str, object] = {"bytes": nbytes // (pairs + 1)}
    for row, times in ((_FIRST, firsts), (_AGAIN, agains)):
        yield replace(row, ours=times[0], floors=times[1], extra=extra)
