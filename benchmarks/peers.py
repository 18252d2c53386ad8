"""Rows ``peers/*``: real engines with kvshelf and with other connectors that share KV by files.

Owns the comparison. Every connector gets the same model, the same prompts and an empty folder. Its
engines are started one after the other: one that computes and stores, a fresh one that loads, one
whose storage is slow, one of two ranks, one with other weights, and one whose files are damaged. A
server that the
connector needs starts and ends with each engine, so that all bytes come from files.

LMCache is compared where it is installed beside vLLM. Its dependencies are made for CUDA; on CPUs
``pip install --no-deps lmcache`` and what it then misses will do.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from benchmarks.child import Child, ChildError, MissingEngineError
from benchmarks.engine import (
    INERT,
    QUIET_SECONDS,
    REST_TOKENS,
    EngineRun,
    find_model,
    guarded,
    kvshelf_connector,
)
from benchmarks.fault_mount import require_faultfs
from benchmarks.measure import Row
from benchmarks.samples import CHUNK_TOKENS
from benchmarks.served import Server
from benchmarks.settings import Settings

#: Prompts that are asked for alone, those of which only a part is stored, and those asked at once.
_SINGLE: Final = 9
_SHARED: Final = 5
_MANY, _BATCHES = 8, 3
_STORED_TOKENS: Final = 16 * CHUNK_TOKENS
_SHARED_TOKENS: Final = 8 * CHUNK_TOKENS
_ANSWER_TOKENS: Final = 4
_SLOW: Final = 50e6
_LEARNING: Final = 14
_MEMORY_BYTES: Final = 4 << 30
#: Files count as written when nothing has changed for so long.
_SETTLED_SECONDS: Final = 2.0
_LONGEST_SECONDS: Final = 120.0
_DAMAGED_BYTES: Final = 64 << 10
_SEED: Final = 5_000_000

COMPUTING: Final = "computing"
#: What is asked of each, and its description.
WORKS: Final = {
    "cold": "first prompts, which it stores",
    "restart": "the same prompts in a fresh engine",
    "shared": f"prompts of which the first {_SHARED_TOKENS} tokens are stored",
    "many": f"{_MANY} stored prompts at once",
    "slow": f"stored prompts, storage {_SLOW / 1e6:g} MB/s",
}


# ------------------------------------------------------------------------------- the connectors


@dataclass(frozen=True, slots=True)
class Peer:
    """A connector.

    Attributes
    ----------
    name : str
    start : Callable
        Starts what it needs on a folder, with an empty folder for logs, closed by the stack;
        returns ``kv_transfer_config``.
    module : str
        Must be importable.
    """

    name: str
    start: Callable[[ExitStack, Path, Path], Mapping[str, Any]]
    module: str = "vllm"


def _inert(stack: ExitStack, folder: Path, logs: Path) -> Mapping[str, Any]:
    return INERT


def _example(stack: ExitStack, folder: Path, logs: Path) -> Mapping[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}


def _kvshelf(stack: ExitStack, folder: Path, logs: Path) -> Mapping[str, Any]:
    return kvshelf_connector({"admission": "auto", "shared_storage_path": str(folder)})


def _kvshelf_served(stack: ExitStack, folder: Path, logs: Path) -> Mapping[str, Any]:
    server = stack.enter_context(closing(Server(logs, folder, _MEMORY_BYTES)))
    return kvshelf_connector({"admission": "auto", "server": server.url})


def _lmcache(stack: ExitStack, folder: Path, logs: Path) -> Mapping[str, Any]:
    port, http = _free_port(), _free_port()
    log = stack.enter_context((logs / "lmcache.txt").open("ab"))
    command = [
        *(sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"),
        *("--port", str(port), "--http-port", str(http), "--chunk-size", str(CHUNK_TOKENS)),
        *("--l1-size-gb", str(_MEMORY_BYTES >> 30), "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto", "--max-workers", "2", "--disable-observability"),
        *("--l2-adapter", f'{{"type": "fs", "base_path": "{folder}"}}'),
    ]
    process = subprocess.Popen(  # noqa: S603  a command of our own
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "DO_NOT_TRACK": "1"},
    )

    def stop() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)
    _wait_listening(port, process, log.name)
    extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
    return {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_listening(port: int, process: subprocess.Popen[bytes], log: str) -> None:
    until = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise ChildError(f"LMCache's server did not start, see {log}")


PEERS: Final = (
    Peer(COMPUTING, _inert),
    Peer("kvshelf", _kvshelf),
    Peer("kvshelf with a node server", _kvshelf_served),
    Peer("LMCache", _lmcache, "lmcache"),
    Peer("ExampleConnector", _example),
)


# ------------------------------------------------------------------------------- the prompts


@dataclass(frozen=True, slots=True)
class _Prompts:
    """What all connectors are asked.

    Attributes
    ----------
    single, sharers, many : list of list of int
        Prompts that are stored. Of `sharers` only the beginning is asked for again.
    shared : list of list of int
        Those beginnings, with other tokens behind them.
    """

    single: list[list[int]]
    sharers: list[list[int]]
    many: list[list[int]]
    shared: list[list[int]]

    @classmethod
    def make(cls, run: EngineRun) -> _Prompts:
        run.seed = _SEED
        tokens = _STORED_TOKENS + REST_TOKENS

        def several(count: int) -> list[list[int]]:
            return [run.prompt(tokens) for _ in range(count)]

        single, sharers, many = several(_SINGLE), several(_SHARED), several(_MANY * _BATCHES)
        shared = [
            prompt[:_SHARED_TOKENS] + run.prompt(tokens)[_SHARED_TOKENS:] for prompt in sharers
        ]
        return cls(single, sharers, many, shared)


# ------------------------------------------------------------------------------- one connector


@dataclass(slots=True)
class _Found:
    """What was measured of a connector.

    Attributes
    ----------
    first : dict
        Seconds to the first tokens, for each of `WORKS`.
    cached : dict
        Tokens that were not computed, of all prompts together.
    answers : dict
        The first tokens of the answers to the single prompts; also of an engine of two ranks, of
        one with other weights, and after damage. None: the engine ended.
    """

    first: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    answers: dict[str, list[list[int]] | None] = field(default_factory=dict)


class _Measured:
    """Engines with one connector, on one folder.

    Parameters
    ----------
    settings : Settings
    peer : Peer
    models : Path, Path
        With the weights, and with others.
    """

    def __init__(self, settings: Settings, peer: Peer, models: tuple[Path, Path]) -> None:
        self._settings, self._peer = settings, peer
        name = "peer-" + peer.name.replace(" ", "-").lower()
        # Fine-tuned weights take the place of those before: their path says nothing.
        self._model = settings.folder(name) / "model"
        self._models = models
        self._use(0)
        self.run = EngineRun(settings, self._model, name)
        self._folder, self._starts = self.run.shelf, 0
        self.found = _Found()

    def _use(self, which: int) -> None:
        self._model.unlink(missing_ok=True)
        self._model.symlink_to(self._models[which])

    @contextmanager
    def _engine(self, what: str, folder: Path | None = None, **arguments: Any) -> Iterator[Child]:
        self._settings.progress(f"{self._peer.name}: {what}")
        self._starts += 1
        logs = self._settings.folder(f"{self.run.shelf.name}-{self._starts}")
        with ExitStack() as stack:
            connector = self._peer.start(stack, folder or self._folder, logs)
            engine = stack.enter_context(
                self.run.engine(
                    f"{self._starts}",
                    connector=connector,
                    kv_cache_memory_bytes=(_MANY + 2) * self.run.prompt_bytes(),
                    **arguments,
                )
            )
            engine.wait_ready()
            # Compiles, and touches all memory; nothing of it is asked for again.
            self.run.seed = 2 * _SEED + 100 * self._starts
            for tokens in (600, _STORED_TOKENS + REST_TOKENS):
                self._ask(engine, [self.run.prompt(tokens) for _ in range(2)])
            self._settle()
            yield engine

    @staticmethod
    def _ask(engine: Child, prompts: list[list[int]]) -> dict[str, Any]:
        return engine.call("ask", prompts=prompts, tokens=_ANSWER_TOKENS)

    def _measure(
        self, what: str, engine: Child, prompts: list[list[int]], at_once: int = 1
    ) -> None:
        first, cached = self.found.first.setdefault(what, []), 0
        answers: list[list[int]] = []
        for start in range(0, len(prompts), at_once):
            reply = self._ask(engine, prompts[start : start + at_once])
            first += reply["first"]
            cached += sum(reply["cached"])
            answers += reply["answers"]
            if what == "cold":
                self._settle()
            else:
                time.sleep(QUIET_SECONDS)
        self.found.cached[what], self.found.answers[what] = cached, answers

    def _settle(self) -> None:
        """Wait until what the engine stores lies in files."""
        until, before, since = time.monotonic() + _LONGEST_SECONDS, -1, time.monotonic()
        while time.monotonic() < until:
            now = _nbytes(self._folder)
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > _SETTLED_SECONDS:
                return
            time.sleep(0.1)

    def measure(self, prompts: _Prompts, faultfs: Any) -> None:
        """Fill :attr:`found`."""
        with self._engine("stores") as engine:
            self._measure("cold", engine, prompts.single)
            if self._peer.name == COMPUTING:
                # Behind a hit the last tokens are computed alone, which rounds differently.
                own: list[list[int]] = []
                for prompt in prompts.single:
                    self._ask(engine, [prompt])
                    own += self._ask(engine, [prompt])["answers"]
                self.found.answers["memory"] = own
            self._ask(engine, prompts.sharers)
            for prompt in prompts.many:
                self._ask(engine, [prompt])
            self._settle()
        with self._engine("loads") as engine:
            self._measure("restart", engine, prompts.single)
            self._measure("shared", engine, prompts.shared)
            self._measure("many", engine, prompts.many, _MANY)
        mount = faultfs.FaultMount(
            self._settings.folder(f"{self.run.shelf.name}-mount"), source=self._folder
        )
        with closing(mount), self._engine("loads from a slow storage", mount.path) as engine:
            mount.add("read", rate=_SLOW)
            # Who can, learns that it is slow.
            for prompt in prompts.many[:_LEARNING]:
                self._ask(engine, [prompt])
            self._measure("slow", engine, prompts.single)
            mount.clear()
        # vLLM wants a NUMA node for each rank unless it is told where they run.
        cores = sorted(os.sched_getaffinity(0))
        env = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
        self._try("ranks", "has two ranks", prompts.single, tensor_parallel_size=2, env=env)
        self._use(1)
        self._try("weights", "has other weights", prompts.single)
        self._use(0)
        damage(self._folder)
        self._try("damage", "finds damaged files", prompts.single)

    def _try(self, what: str, text: str, prompts: list[list[int]], **arguments: Any) -> None:
        try:
            with self._engine(text, **arguments) as engine:
                self._measure(what, engine, prompts)
        except ChildError:
            self.found.answers[what] = None
        self.found.first.pop(what, None)


def _nbytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    found = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                # It has been given its own name meanwhile.
                continue
    return found


def damage(folder: Path) -> None:
    """Write random bytes into the middle of each large file below a folder."""
    draw = random.Random(_SEED)  # noqa: S311
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size > 2 * _DAMAGED_BYTES:
            path.chmod(0o644)
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(draw.randbytes(_DAMAGED_BYTES))


# ------------------------------------------------------------------------------- all of them


def _row(peer: Peer, work: str) -> Row:
    name = peer.name.replace(" ", "-").lower()
    text = f"{peer.name}: {WORKS[work]}, TTFT of {_STORED_TOKENS + REST_TOKENS} tokens"
    return Row(f"peers/{name}/{work}", text, COMPUTING)


def bench_peers(settings: Settings) -> Iterator[Row]:
    """Measure the time to the first token with each of `PEERS`, and look at the answers."""
    rows = [_row(peer, work) for peer in PEERS for work in WORKS]
    yield from guarded(settings, rows, _rows)


def _rows(settings: Settings) -> Iterator[Row]:
    faultfs = require_faultfs()
    maker: Any = import_module("examples.models.make_model")
    model = find_model(settings)
    other = settings.folder("peers-weights") / "other"
    try:
        maker.make_model(other, maker.recipe_of(model), seed=1)
    except ValueError as error:
        raise MissingEngineError(str(error)) from None
    models = model, other
    computed: _Found | None = None
    for peer in PEERS:
        if find_spec(peer.module) is None:
            for work in WORKS:
                yield replace(_row(peer, work), skipped=f"{peer.module} is not installed")
            continue
        measured = _Measured(settings, peer, models)
        try:
            measured.measure(_Prompts.make(measured.run), faultfs)
        except ChildError as error:
            if computed is None:
                raise
            for work in WORKS:
                if work not in measured.found.first:
                    yield replace(_row(peer, work), skipped=f"failed: {error}")
        computed = computed or measured.found
        yield from _measured_rows(peer, measured.found, computed)


def _measured_rows(peer: Peer, found: _Found, computed: _Found) -> Iterator[Row]:
    for work, first in found.first.items():
        asked = len(first) * (_STORED_TOKENS + REST_TOKENS)
        note = f"{found.cached[work] / asked:.0%} of the tokens loaded"
        if work in ("cold", "restart", "slow"):
            note += f"; {_differing(found.answers[work], *_right(computed))}"
        if work == "restart" and "ranks" in found.answers:
            # Two ranks round differently, so answers may differ without an error.
            ended = found.answers["ranks"] is None
            loaded = found.cached.get("ranks", 0) / asked
            note += f"; with two ranks {'the engine ended' if ended else f'{loaded:.0%} loaded'}"
        if work == "restart":
            for what, text in (("weights", "with other weights"), ("damage", "from damaged files")):
                if what in found.answers:
                    weights = [computed.answers["weights"]]
                    expected = weights if what == "weights" else _right(computed)
                    note += f"; {text} {_differing(found.answers[what], *expected)}"
        yield replace(
            _row(peer, work),
            ours=first,
            floors=computed.first[work],
            note=note,
            extra={"cached": found.cached[work]},
        )


def _right(computed: _Found) -> list[list[list[int]] | None]:
    """Return the answers that are right: computed, and behind hits in vLLM's own prefix cache."""
    return [computed.answers["cold"], computed.answers.get("memory", computed.answers["cold"])]


def _differing(answers: list[list[int]] | None, *expected: list[list[int]] | None) -> str:
    """Return how many answers differ from all that are expected, as text."""
    if answers is None or None in expected:
        return "the engine ended"
    right = [[one[number] for one in expected if one] for number in range(len(answers))]
    wrong = sum(answer not in among for answer, among in zip(answers, right, strict=True))
    return f"{wrong} of {len(answers)} answers differ"
