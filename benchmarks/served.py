"""Rows ``server/*``: a shelf behind a node server, against the memory tier of one process.

Owns the servers, each ``kvshelf serve`` in a process of its own, and the comparisons: a prompt's
retrieval, its store, a lookup, four processes that start on one set of prompts, and the warm
requests of a real engine.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.child import ChildError
from benchmarks.engine import (
    HIT_TOKENS,
    PROMPT_TOKENS,
    QUIET_SECONDS,
    EngineRun,
    cold,
    find_model,
    guarded,
    warm,
    warm_up,
)
from benchmarks.least_bytes import bytes_row, with_bytes
from benchmarks.measure import Goal, Row, Work, measure_pairs
from benchmarks.paged import paged_kv
from benchmarks.samples import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    LARGE,
    TINY,
    Shape,
    make_chunks,
    make_format,
    make_prompt,
)
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.cache import ChunkCache
from kvshelf.format.keys import KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import HostKVCache, LayerRun, layer_calls
from kvshelf.kv.sources import PagedKV
from kvshelf.kv.topology import ShardPlan
from kvshelf.metrics import Counters
from kvshelf.server.messages import Ping
from kvshelf.server.segment import Segment
from kvshelf.server.shelf import connect, open_served
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.transfer.context import ChunkSlots, TransferContext
from kvshelf.transfer.staging import StagingPool
from kvshelf.transfer.stores import StoreOutcome
from kvshelf.transfer.transfers import Transfers

_CHUNKS = 16
_STORED = 8
_THREADS = 2
_PAIRS = 31
_CLIENTS = 4
_START_SECONDS = 60.0
#: Pairs of the engines that are not counted.
_WARM_UP_PAIRS = 2
_SEED = 5_000_000
#: An engine stores a prompt in less.
_STORE_SECONDS = 3.0
#: Small objects of many shards: the time of a lookup does not depend on their sizes.
_LOOKUP_SHAPE = Shape(1, 8, 16)
_ENGINE = Row(
    "server/engine",
    f"warm TTFT, {HIT_TOKENS} of {PROMPT_TOKENS} tokens from a node server's memory",
    "from the memory tier in process",
    goal=Goal(1.1),
)
_IN_MEMORY = replace(_ENGINE, name="server/engine-memory", floor="vLLM's in-memory prefix cache")
_BYTES = bytes_row(_IN_MEMORY, "server/engine-bytes", 1.05, read=False)


class Server:
    """``kvshelf serve`` in a process of its own, ready when it is made.

    Parameters
    ----------
    folder : Path
        An empty folder that only this user can enter.
    shelf : Path or None
        None: that of the configuration.
    memory_bytes : int
    config : Path, optional
        A file with further options.
    """

    def __init__(
        self, folder: Path, shelf: Path | None, memory_bytes: int, *, config: Path | None = None
    ) -> None:
        self.url = f"ipc://{folder}/node.sock"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSHELF_")}
        command = [sys.executable, "-m", "kvshelf", "serve"]
        command += [] if shelf is None else ["--url", str(shelf)]
        command += [] if config is None else ["--config", str(config)]
        command += ["--memory", str(memory_bytes), "--socket", self.url, "--http", "0"]
        with (folder / "log.txt").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  our own command
                command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "http://" not in line:
            self.close()
            raise ChildError(f"kvshelf serve did not start, see {folder}/log.txt: {line}")
        self._http = "http://" + line.rpartition("http://")[2].strip()

    def count(self, name: str) -> float:
        """Return one of the server's metrics."""
        with urllib.request.urlopen(f"{self._http}/metrics", timeout=10) as answer:  # noqa: S310
            for row in answer.read().decode().splitlines():
                if row.startswith(f"kvshelf_server_{name} "):
                    return float(row.rpartition(" ")[2])
        raise ChildError(f"the server has no metric {name}")

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        with self._process:
            self._process.wait(_START_SECONDS)


def bench_server(settings: Settings) -> Iterator[Row]:
    """Measure retrievals, stores, lookups, shared reads and engines through a node server."""
    yield from _retrieve_rows(settings, TINY if settings.quick else LARGE)
    yield _store_row(settings, TINY if settings.quick else LARGE)
    yield _lookup_row(settings, 4 if settings.quick else 512)
    yield _sharing_row(settings, TINY if settings.quick else LARGE)
    yield from guarded(settings, [_ENGINE, _IN_MEMORY, _BYTES], _engine_rows)


def _retrieve_rows(settings: Settings, shape: Shape) -> Iterator[Row]:
    """Compare ``retrieve``, search and keys included, with the same in process."""
    fmt = make_format(shape, 1)
    tokens = make_prompt(_CHUNKS * CHUNK_TOKENS)
    kv = paged_kv(shape, len(tokens))
    capacity = 4 * _CHUNKS * fmt.object_size(0)
    options: dict[str, Any] = {"io_threads": _THREADS, "timeout_s": 60.0}
    settings.progress("retrieve through a server")
    with ExitStack() as stack:
        server = stack.enter_context(
            closing(Server(settings.folder("server"), settings.folder("served"), capacity))
        )
        served = stack.enter_context(open_served(server.url))
        through = stack.enter_context(ChunkCache(served, fmt, prefetch_bytes=0, **options))
        tier = stack.enter_context(closing(MemoryTier(capacity)))
        shelf = stack.enter_context(Shelf(open_backend(str(settings.folder("beside")))))
        inside = stack.enter_context(ChunkCache(shelf, fmt, memory_tier=tier, **options))
        for cache in (through, inside):
            if not cache.store(tokens, kv=kv).complete:
                raise RuntimeError("the prompt was not stored")

        def retrieve(cache: ChunkCache) -> None:
            if not bool(cache.retrieve(tokens, kv=kv).all()):
                raise RuntimeError("a prompt in memory was not retrieved")

        ours, floors = measure_pairs(
            Work(lambda: retrieve(through)),
            Work(lambda: retrieve(inside)),
            settings.pairs(_PAIRS),
            warm_up=2,
        )
        extra: dict[str, object] = {
            "bytes": _CHUNKS * fmt.object_size(0),
            "read_bytes": server.count("read_bytes_total"),
        }
    row = Row(
        "server/retrieve",
        f"retrieve of {len(tokens)} tokens from a node server's memory",
        "from the memory tier in process",
        ours,
        floors,
        goal=Goal(1.15),
        extra=extra,
    )
    yield row
    yield replace(row, name="server/request", goal=Goal(300e-6, "difference"))


class _Stores:
    """Stores of one prompt's KV through a server, again and again.

    Parameters
    ----------
    stack : ExitStack
        Closes what is opened.
    url : str
        The server's.
    fmt : ObjectFormat
    kv : PagedKV
    in_place : bool
        Gather where the server takes what is stored.
    """

    def __init__(
        self, stack: ExitStack, url: str, fmt: ObjectFormat, kv: PagedKV, *, in_place: bool
    ) -> None:
        size = fmt.object_size(0)
        capacity = 2 * _STORED * (size + 4096)
        segment = Segment(4 * (size + 4096), regions=capacity * 33 // 32)
        stack.callback(segment.close)
        self._view = stack.enter_context(open_served(url, segment=segment)).view(fmt)
        staging = StagingPool(capacity, size, regions=segment.take_region if in_place else None)
        # As an engine's staging is before its first step.
        staging.warm(capacity)
        assert kv.layout is not None
        calls = layer_calls(fmt, [LayerRun(0, [*kv.caches], kv.layout)])
        plan = ShardPlan.whole(fmt.shards)
        context = TransferContext(self._view, HostKVCache(calls), staging, Counters(), plan)
        self.transfer = Transfers([context])
        self._stores = self.transfer.stores[fmt.kind]
        stack.callback(self.transfer.close)
        blocks = CHUNK_TOKENS // BLOCK_TOKENS
        self._items = [
            ChunkSlots(chunk, torch.arange(place * blocks, (place + 1) * blocks))
            for place, chunk in enumerate(make_chunks(fmt, _STORED))
        ]
        self.gather_seconds: list[float] = []

    def run(self) -> None:
        """Store all chunks."""
        begin = time.perf_counter()
        for item in self._items:
            if self._stores.store(item) is not StoreOutcome.QUEUED:
                raise RuntimeError("a chunk was not stored")
        self.gather_seconds.append(time.perf_counter() - begin)
        if self.transfer.drain(_START_SECONDS):
            raise RuntimeError("stores did not end")

    def delete(self) -> None:
        """Delete what was stored."""
        for item in self._items:
            if not self._view.delete(ObjectRef(item.chunk, 0)):
                raise RuntimeError("a chunk was not on the shelf")
        self.transfer.forget_stored()


def _store_row(settings: Settings, shape: Shape) -> Row:
    """Compare stores that are gathered into the segment with those that are copied there."""
    fmt = make_format(shape, 1)
    kv = paged_kv(shape, _STORED * CHUNK_TOKENS)
    capacity = 4 * _STORED * fmt.object_size(0)
    settings.progress("stores through a server")
    with ExitStack() as stack:
        server = stack.enter_context(
            closing(Server(settings.folder("server-w"), settings.folder("served-w"), capacity))
        )
        inside, copied = (
            _Stores(stack, server.url, fmt, kv, in_place=in_place) for in_place in (True, False)
        )
        times = measure_pairs(
            Work(inside.run, inside.delete),
            Work(copied.run, copied.delete),
            settings.pairs(_PAIRS),
            warm_up=2,
        )
        extra: dict[str, object] = {
            "bytes": _STORED * fmt.object_size(0),
            "gather_seconds": median(inside.gather_seconds),
            "gather_seconds_elsewhere": median(copied.gather_seconds),
        }
    return Row(
        "server/store",
        f"stores of {_STORED} chunks through a node server, gathered where it takes them",
        "gathered elsewhere and copied there",
        *times,
        goal=Goal(1.0),
        extra=extra,
    )


def _lookup_row(settings: Settings, chunks: int) -> Row:
    """Measure a lookup whose keys are known, of objects in the server's memory."""
    fmt = make_format(_LOOKUP_SHAPE, 8)
    prompt = make_prompt(chunks * CHUNK_TOKENS)
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    settings.progress(f"storing {chunks * fmt.shards} objects through a server")
    with ExitStack() as stack:
        capacity = 2 * chunks * fmt.shards * (fmt.object_size(0) + 4096) + (8 << 20)
        server = stack.enter_context(
            closing(Server(settings.folder("server-l"), settings.folder("served-l"), capacity))
        )
        shelf = stack.enter_context(open_served(server.url))
        view = shelf.view(fmt)
        buffer = memoryview(bytearray(fmt.object_size(0)))
        for chunk in chain.extend(prompt):
            for shard in range(fmt.shards):
                fmt.seal(buffer, chunk, shard)
                view.publish(ObjectRef(chunk, shard), buffer)
        service = LookupService(view, failed=FailedKeys(), counters=Counters(), remembers=False)
        stack.callback(service.close)

        def search() -> None:
            lookup = service.submit(prompt, lambda: chain)
            if not lookup.wait(60.0) or lookup.hit_chunks != chunks:
                raise RuntimeError(f"the lookup found {lookup.hit_chunks} of {chunks} chunks")

        channel = stack.enter_context(closing(connect(server.url)))
        times = measure_pairs(
            Work(search),
            Work(lambda: channel.request(Ping()).result(60.0)),
            settings.pairs(_PAIRS),
        )
        return Row(
            "server/lookup",
            f"lookup of {chunks} chunks × {fmt.shards} shards in a node server's memory, keys"
            " known, nothing remembered",
            "one message to the server and its answer",
            *times,
            goal=Goal(1e-3, "seconds"),
        )


def _retrieve_once(url: str, quick: bool, start: Barrier, seconds: Any) -> None:
    """Retrieve the prompt of :func:`_sharing_row` in a process of its own."""
    shape = TINY if quick else LARGE
    fmt = make_format(shape, 1)
    tokens = make_prompt(_CHUNKS * CHUNK_TOKENS)
    kv = paged_kv(shape, len(tokens))
    with open_served(url) as shelf, ChunkCache(shelf, fmt, prefetch_bytes=0) as cache:
        start.wait(_START_SECONDS)
        begin = time.perf_counter()
        if not bool(cache.retrieve(tokens, kv=kv).all()):
            raise RuntimeError("a stored prompt was not retrieved")
        seconds.put(time.perf_counter() - begin)


def _sharing_row(settings: Settings, shape: Shape) -> Row:
    """Start processes on one set of objects, of which the server's memory has none."""
    fmt = make_format(shape, 1)
    chunks = make_chunks(fmt, _CHUNKS)
    size = _CHUNKS * fmt.object_size(0)
    root = settings.folder("served-by-one")
    settings.progress(f"{_CLIENTS} processes on one server")
    with Shelf(open_backend(str(root))) as shelf:
        buffer = memoryview(bytearray(fmt.object_size(0)))
        for chunk in chunks:
            fmt.seal(buffer, chunk, 0)
            shelf.view(fmt).publish(ObjectRef(chunk, 0), buffer)
    with closing(Server(settings.folder("server-s"), root, 4 * size + (8 << 20))) as server:
        context = multiprocessing.get_context("spawn")
        start, seconds = context.Barrier(_CLIENTS), context.Queue()
        clients = [
            context.Process(
                target=_retrieve_once, args=(server.url, settings.quick, start, seconds)
            )
            for _ in range(_CLIENTS)
        ]
        for client in clients:
            client.start()
        times = [seconds.get(timeout=2 * _START_SECONDS) for _ in clients]
        for client in clients:
            client.join(_START_SECONDS)
        read = server.count("read_bytes_total")
    return Row(
        "server/sharing",
        f"retrieve of {_CHUNKS * CHUNK_TOKENS} tokens by {_CLIENTS} processes at once, none of"
        " them in the node server's memory",
        ours=times,
        note=f"bytes read from storage: {read / size:.3f} of the set (goal 1.02)",
        extra={"set_bytes": size, "read_bytes": read},
    )


def _engine_rows(settings: Settings) -> Iterator[Row]:
    model = find_model(settings)
    run = EngineRun(settings, model, "in-process")
    pairs = settings.pairs(_PAIRS)
    prompts = pairs + _WARM_UP_PAIRS
    memory = (prompts + 16) * run.prompt_bytes()
    times: tuple[list[float], list[float]] = ([], [])
    in_memory: list[float] = []
    with closing(Server(settings.folder("server-e"), settings.folder("served-e"), memory)) as node:
        settings.progress("starting two engines")
        inside = {"shared_storage_path": str(run.shelf), "memory_tier": {"max_bytes": memory}}
        with (
            run.engine("through", options={"server": node.url}) as through,
            run.engine("inside", options=inside, cache="inside") as beside,
        ):
            engines = through, beside
            for engine in engines:
                engine.wait_ready()
            settings.progress("storing prompts")
            for engine in engines:
                run.seed = _SEED
                for _ in range(prompts):
                    cold(engine, run, 1)
                # After that, vLLM's own cache has none of these any more.
                run.seed = 2 * _SEED
                warm_up(engine, run)
                time.sleep(_STORE_SECONDS)
            run.seed = _SEED
            before = node.count("read_bytes_total")
            for pair in range(-_WARM_UP_PAIRS, pairs):
                settings.progress(f"{_ENGINE.work}: pair {pair + 1} of {pairs}")
                prompt = run.prompt()
                for side in (0, 1) if pair % 2 else (1, 0):
                    seconds = warm(engines[side], prompt, HIT_TOKENS)
                    if pair >= 0:
                        times[side].append(seconds)
                    if side == 0:
                        seconds = warm(through, prompt, 0)
                        in_memory += [seconds] if pair >= 0 else []
                    time.sleep(QUIET_SECONDS)
            read = node.count("read_bytes_total") - before
    yield replace(_ENGINE, ours=times[0], floors=times[1], extra={"read_bytes": read})
    row = replace(_IN_MEMORY, ours=times[0], floors=in_memory)
    yield row
    yield with_bytes(_BYTES, row, run.objects(), _CHUNKS, read=False)
