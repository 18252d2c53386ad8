"""Rows ``peers/*``: kvshelf beside other programs that share KV by files.

Owns two comparisons. Real engines get connectors, each with the same model, the same prompts and an
empty folder: one engine computes and stores, a fresh one loads, and others have a slow storage,
other weights, and damaged files. A server that a connector needs starts and ends with each engine,
so that all bytes come from files. And one prompt's KV goes through vLLM's filesystem tier, without
an engine, as vLLM's scheduler calls it: the tier moves bytes between files and host memory; kvshelf
does all of its part, the copy to or from the paged cache included.

LMCache is compared where it is installed beside vLLM. Its dependencies are made for CUDA; on CPUs
``pip install --no-deps lmcache`` and what it then misses will do.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from benchmarks.engines import (
    AUTO,
    INERT,
    QUIET_SECONDS,
    REST_TOKENS,
    Child,
    ChildError,
    EngineRun,
    MissingEngineError,
    find_model,
    guarded,
    kvshelf_connector,
    slow_mount,
)
from benchmarks.measure import Row, Work, measure_pairs
from benchmarks.samples import BLOCK_TOKENS, CHUNK_TOKENS, LARGE, make_format, make_prompt
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.cache import ChunkCache
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.sources import PagedKV
from kvshelf.shelf.shelf import Shelf

#: Prompts that are asked for alone, those of which only a part is stored, and those asked at once.
_SINGLE: Final = 9
_SHARED: Final = 5
_MANY, _BATCHES = 8, 3
_CHUNKS: Final = 16
_TOKENS: Final = _CHUNKS * CHUNK_TOKENS + REST_TOKENS
_SHARED_TOKENS: Final = 8 * CHUNK_TOKENS
_ANSWER_TOKENS: Final = 4
_SLOW: Final = 50e6
_LEARNING: Final = 14
_THREADS: Final = 2
_LONGEST_SECONDS: Final = 120.0
_DAMAGED_BYTES: Final = 64 << 10
_SEED: Final = 5_000_000

_COMPUTING: Final = "computing"
#: What is asked of each, and its description.
_WORKS: Final = {
    "cold": "first prompts, which it stores",
    "restart": "the same prompts in a fresh engine",
    "shared": f"prompts of which the first {_SHARED_TOKENS} tokens are stored",
    "many": f"{_MANY} stored prompts at once",
    "slow": f"stored prompts, storage {_SLOW / 1e6:g} MB/s",
    "weights": "the same prompts, with other weights",
    "damage": "the same prompts, from damaged files",
}


# ------------------------------------------------------------------------------- the connectors


@contextmanager
def _lmcache(folder: Path, log: Path) -> Iterator[Mapping[str, Any]]:
    port, http = _free_port(), _free_port()
    command = [
        *(sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"),
        *("--port", str(port), "--http-port", str(http), "--chunk-size", str(CHUNK_TOKENS)),
        *("--l1-size-gb", "4", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
        *("--max-workers", "2", "--disable-observability"),
        *("--l2-adapter", f'{{"type": "fs", "base_path": "{folder}"}}'),
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603  a command of our own
            command, stdout=output, stderr=output, env={**os.environ, "DO_NOT_TRACK": "1"}
        )
    try:
        until = time.monotonic() + _LONGEST_SECONDS
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > until:
                raise ChildError(f"LMCache's server did not start, see {log}")
            time.sleep(0.2)
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
        yield {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _example(folder: Path) -> Mapping[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}


#: What starts each connector on a folder, with a log.
_PEERS: Final[dict[str, Callable[[Path, Path], AbstractContextManager[Mapping[str, Any]]]]] = {
    _COMPUTING: lambda folder, log: nullcontext(INERT),
    "kvshelf": lambda folder, log: nullcontext(kvshelf_connector(folder, admission=AUTO)),
    "LMCache": _lmcache,
    "ExampleConnector": lambda folder, log: nullcontext(_example(folder)),
}


# ------------------------------------------------------------------------------- one connector


@dataclass(slots=True)
class _Found:
    """What was measured of some prompts.

    Attributes
    ----------
    first : list of float
        Seconds to the first tokens.
    cached : int
        Tokens that were not computed, of all prompts together.
    answers : list of list of int
        The first tokens of the answers.
    """

    first: list[float] = field(default_factory=list)
    cached: int = 0
    answers: list[list[int]] = field(default_factory=list)


class _Measured:
    """Engines with one connector, on one folder.

    Parameters
    ----------
    settings : Settings
    peer : str
    models : Path, Path
        With the weights, and with others.
    """

    def __init__(self, settings: Settings, peer: str, models: tuple[Path, Path]) -> None:
        self._settings, self._peer = settings, peer
        self._name = f"peer-{peer.lower()}"
        # Fine-tuned weights take the place of those before: their path says nothing.
        self._model = settings.folder(self._name) / "model"
        self._models = models
        self._use(0)
        self._run = EngineRun(settings, self._model, self._name)
        self.found: dict[str, _Found] = {}

    def _use(self, which: int) -> None:
        self._model.unlink(missing_ok=True)
        self._model.symlink_to(self._models[which])

    @contextmanager
    def _engine(self, what: str, folder: Path | None = None) -> Iterator[Child]:
        run, seed = self._run, self._run.seed
        log = self._model.with_name(f"server-{what}.txt")
        with (
            _PEERS[self._peer](folder or run.shelf, log) as connector,
            run.engine(what, _TOKENS, connector, prompts=_MANY + 2) as engine,
        ):
            # Compiles, and touches all memory; nothing of it is asked for again.
            run.seed = 2 * _SEED + 100 * len(self.found)
            for tokens in (600, _TOKENS):
                engine.ask([run.prompt(tokens) for _ in range(2)])
            run.settle()
            run.seed = seed
            yield engine

    def _measure(
        self, what: str, engine: Child, prompts: list[list[int]], at_once: int = 1
    ) -> None:
        found = self.found[what] = _Found()
        for start in range(0, len(prompts), at_once):
            reply = engine.ask(prompts[start : start + at_once], tokens=_ANSWER_TOKENS)
            found.first += reply["first"]
            found.answers += reply["answers"]
            found.cached += sum(reply["cached"])
            if what == "cold":
                self._run.settle()
            else:
                time.sleep(QUIET_SECONDS)

    def measure(self) -> None:
        """Fill :attr:`found`."""
        run = self._run
        run.seed = _SEED
        counts = (_SINGLE, _SHARED, _MANY * _BATCHES, _SHARED)
        single, sharers, many, ends = ([run.prompt(_TOKENS) for _ in range(n)] for n in counts)
        shared = [
            prompt[:_SHARED_TOKENS] + end[_SHARED_TOKENS:]
            for prompt, end in zip(sharers, ends, strict=True)
        ]
        with self._engine("stores") as engine:
            self._measure("cold", engine, single)
            if self._peer == _COMPUTING:
                # Behind a hit the last tokens are computed alone, which rounds differently.
                self._measure("memory", engine, [prompt for prompt in single for _ in range(2)])
            for prompt in (*sharers, *many):
                engine.ask([prompt])
            run.settle()
        with self._engine("loads") as engine:
            self._measure("restart", engine, single)
            self._measure("shared", engine, shared)
            self._measure("many", engine, many, _MANY)
        mount = slow_mount(self._settings, self._name, run.shelf)
        with closing(mount), self._engine("slow", mount.path) as engine:
            mount.add("read", rate=_SLOW)
            # Who can, learns that it is slow.
            for prompt in many[:_LEARNING]:
                engine.ask([prompt])
            self._measure("slow", engine, single)
            mount.clear()
        self._use(1)
        with self._engine("weights") as engine:
            self._measure("weights", engine, single)
        self._use(0)
        _damage(run.shelf)
        with self._engine("damage") as engine:
            self._measure("damage", engine, single)


def _damage(folder: Path) -> None:
    """Write random bytes into the middle of each large file below a folder."""
    draw = random.Random(_SEED)  # noqa: S311
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size > 2 * _DAMAGED_BYTES:
            path.chmod(0o644)
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(draw.randbytes(_DAMAGED_BYTES))


# ------------------------------------------------------------------------------- all of them


def bench_peers(settings: Settings) -> Iterator[Row]:
    """Measure engines with each of the connectors, look at their answers, and vLLM's own tier."""
    yield from guarded(settings, "peers/connectors", _rows)
    yield from guarded(settings, "peers/fs-tier", _tier_rows)


def _rows(settings: Settings) -> Iterator[Row]:
    model, other = find_model(settings), settings.folder("peers-weights") / "other"
    maker: Any = import_module("examples.models.make_model")
    maker.make_model(other, maker.recipe_of(model), seed=1)
    computed: dict[str, _Found] = {}
    for peer in _PEERS:
        measured = _Measured(settings, peer, (model, other))
        try:
            if peer == "LMCache" and find_spec("lmcache") is None:
                raise MissingEngineError("LMCache is not installed")
            measured.measure()
        except ChildError as error:
            if not computed:
                raise
            yield Row(f"peers/{peer.lower()}", peer, skipped=str(error))
        else:
            computed = computed or measured.found
            for work in _WORKS:
                yield _row(peer, work, measured.found[work], computed)


def _row(peer: str, work: str, found: _Found, computed: dict[str, _Found]) -> Row:
    note = f"{found.cached / (len(found.first) * _TOKENS):.0%} of the tokens loaded"
    if len(found.answers) == _SINGLE:
        # Right is what is computed, and what is answered behind hits in vLLM's own prefix cache.
        right = [computed["cold"].answers, computed["memory"].answers[1::2]]
        right = [computed[work].answers] if work == "weights" else right
        expected = zip(found.answers, zip(*right, strict=True), strict=True)
        differing = sum(answer not in among for answer, among in expected)
        note += f"; {differing} of {_SINGLE} answers differ"
    return Row(
        f"peers/{peer.lower()}/{work}",
        f"{peer}: {_WORKS[work]}, TTFT of {_TOKENS} tokens",
        _COMPUTING,
        ours=found.first,
        floors=computed[work].first,
        note=note,
        extra={"cached": found.cached},
    )


# ------------------------------------------------------------------------- vLLM's filesystem tier


class _FsTier:
    """vLLM's tier on one folder, and the memory in front of it.

    Parameters
    ----------
    folder : Path
    chunk_bytes : int
    """

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        base: Any = import_module("vllm.v1.kv_offload.base")
        fs: Any = import_module("vllm.v1.kv_offload.tiering.fs.manager")
        self._job = import_module("vllm.v1.kv_offload.tiering.base").TransferJob
        self._context, self._ended = base.ReqContext, base.ScheduleEndContext((), ())
        self._numbers, self._folder = itertools.count(), folder
        # Files that pass by the page cache are read and written in whole pages.
        nbytes = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, _CHUNKS * nbytes)
        # Memory that was never written is one shared page of zeros, which is too fast to read.
        pages.write(b"\1" * len(pages))
        parallel = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
        # What names files; the tier takes it from the engine.
        config = SimpleNamespace(
            groups=[],
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name="bench", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=BLOCK_TOKENS),
            parallel=SimpleNamespace(rank=0, is_parallelism_agnostic=True, **parallel),
        )
        self.manager = fs.FileSystemTierManager(
            SimpleNamespace(blocks_per_chunk=CHUNK_TOKENS // BLOCK_TOKENS, config=config),
            memoryview(pages).cast("B", (_CHUNKS, nbytes)),
            "fs",
            str(folder),
            n_read_threads=_THREADS,
            n_write_threads=_THREADS,
        )
        digests = (hashlib.sha256(bytes([place])).digest() for place in range(_CHUNKS))
        self._keys = [base.make_offload_key(digest, 0) for digest in digests]

    def load(self) -> None:
        """Look all chunks up, and read them."""
        context = self._context(f"request-{next(self._numbers)}")
        self.manager.on_new_request(context)

        def is_hit() -> bool:
            found = [self.manager.lookup(key, context).name for key in self._keys]
            self.manager.on_schedule_end(self._ended)
            if "MISS" in found:
                raise RuntimeError("the tier misses what it has stored")
            return "RETRY" not in found

        _wait(is_hit)
        self._transfer(self.manager.submit_load, context, is_promotion=True)
        self.manager.on_request_finished(context)

    def store(self) -> None:
        """Write all chunks."""
        context = self._context(f"request-{next(self._numbers)}")
        self._transfer(self.manager.submit_store, context, is_promotion=False)

    def _transfer(self, submit: Callable[[Any], None], context: Any, *, is_promotion: bool) -> None:
        places = torch.arange(_CHUNKS).numpy()
        submit(self._job(next(self._numbers), self._keys, places, is_promotion, context))
        done: list[Any] = []

        def is_done() -> bool:
            done.extend(self.manager.get_finished_jobs())
            return bool(done)

        _wait(is_done)
        if not done[0].success:
            raise RuntimeError("a transfer of the tier failed")

    def delete(self) -> None:
        """Delete all files."""
        for path in self._folder.rglob("*.bin"):
            path.unlink()


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _LONGEST_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError("vLLM's tier did not answer")
        time.sleep(1e-4)


def _tier_rows(settings: Settings) -> Iterator[Row]:
    """Measure stores and loads of one prompt, each against vLLM's filesystem tier."""
    fmt = make_format(LARGE, 1)
    size = f"{_CHUNKS} chunks of {fmt.object_size(0) / 2**20:.1f} MiB"
    floor = "vLLM's fs tier"
    tokens = make_prompt(_CHUNKS * CHUNK_TOKENS)
    sizes = (len(tokens) // BLOCK_TOKENS, LARGE.kv_heads, BLOCK_TOKENS, 2 * LARGE.head_size)
    caches = [torch.ones(sizes, dtype=torch.bfloat16) for _ in range(LARGE.layers)]
    kv = PagedKV(caches, PagedLayout.native_blocks(caches[0]), torch.arange(len(tokens)))
    with ExitStack() as stack:
        tier = _FsTier(settings.folder("fs-tier-vllm"), fmt.object_size(0) - fmt.data_offset)
        stack.callback(tier.manager.shutdown)
        shelf = stack.enter_context(Shelf(open_backend(str(settings.folder("fs-tier")))))
        cache = stack.enter_context(ChunkCache(shelf, fmt, io_threads=_THREADS, timeout_s=60.0))

        def store() -> None:
            if not cache.store(tokens, kv=kv).complete:
                raise RuntimeError("the prompt was not stored")

        def remove() -> None:
            for key in cache.chunk_keys(tokens):
                cache.remove(key)

        def load() -> None:
            if not bool(cache.retrieve(tokens, kv=kv).all()):
                raise RuntimeError("a stored prompt was not retrieved")

        pairs = settings.pairs(31)
        times = measure_pairs(Work(store, remove), Work(tier.store, tier.delete), pairs)
        yield Row("peers/fs-tier/store", f"store of a prompt, {size}", floor, *times)
        store()
        tier.store()
        times = measure_pairs(Work(load), Work(tier.load), pairs)
        yield Row("peers/fs-tier/load", f"lookup and verified load, {size}", floor, *times)
