"""Real vLLM engines for tests, each in a process of its own, and the shelves that they fill.

:class:`Engines` starts engines, and :class:`Engine` is one of them as a test sees it. A command is
the name of a method and its arguments. It goes to the engine's process through a connection, on
which a thread of the test waits for results. So requests run side by side, are aborted half way and
looked at while they run. What an engine prints goes to a file.

A process with an engine runs :func:`run_engine`. It is forked from a server that has imported vLLM
once, since those imports are half of the time of a start. When the connection closes, the engine
shuts down: it never outlives its test run.

:class:`ShelfFiles` reads a shelf from outside, as files. It asks kvshelf for names of objects and
for the record of a namespace, both of which golden vectors test elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import multiprocessing.forkserver
import os
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, TypeAlias
from unittest import mock

import torch
import xxhash

from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, SHARDS_FIELDS, Kind
from kvshelf.format.names import object_name
from kvshelf.format.namespace import Namespace
from tests.support import constants
from tests.support.waiting import LONG, until

START_SECONDS = 600.0
REQUEST_SECONDS = 120.0
#: Differences of log probabilities, in nats, that rounding makes with the models of make_model.py.
NEAR_TIE = 0.15
#: Tokens of a chunk by default.
CHUNK = 256

SHELF_CONNECTOR = ("SharedStorageConnector", "tests.support.connector")
INERT_CONNECTOR = ("InertConnector", "benchmarks.inert")

# Fixtures of tests/vllm.
#: Makes a prompt that no other test has.
MakePrompt: TypeAlias = "Callable[..., list[int]]"
#: Returns the answer of the engine without a shelf.
Reference: TypeAlias = "Callable[..., Answer]"
#: Asks an engine, and compares its answer with the reference.
Ask: TypeAlias = "Callable[..., Answer]"


class EngineError(RuntimeError):
    """An engine did not start, died, or answered a command with an error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got.

    Attributes
    ----------
    tokens : list[int]
        Generated token ids.
    logprobs, gaps : list[float]
        For each generated token its log probability, and how far that is above the one of its best
        rival, nats.
    prompt_logprobs : list[float | None]
        Log probability of each prompt token, nats; empty unless asked for.
    cached_tokens : int
        Prompt tokens that were not computed: from vLLM's own prefix cache or from the shelf.
    shelf_tokens : int | None
        Prompt tokens that the connector delivered; None when other requests ran at the same time
        (vLLM counts them for the engine, not for the request).
    finish_reason : str | None
        ``"length"``, ``"stop"``, ``"abort"`` or ``"error"``.
    kv_transfer_params : dict | None
        What the connector handed back for the decode side.
    """

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]
    prompt_logprobs: list[float | None]
    cached_tokens: int
    shelf_tokens: int | None
    finish_reason: str | None
    kv_transfer_params: dict[str, Any] | None


# ------------------------------------------------------------------- in the process of an engine

#: An environment variable that only the server that forks engines has: there this module imports
#: vLLM.
_IMPORTS_VLLM = "TEST_ENGINES_ARE_FORKED"
#: The imports that take most of an engine's start.
_IMPORTS = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.distributed.kv_transfer.kv_connector.v1",
)


class EngineCounts:
    """Sums what vLLM's scheduler reports; vLLM calls ``record`` after every step with output."""

    def __init__(self) -> None:
        self.loaded_tokens = 0
        self.connector: dict[str, float] = {}

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is None:
            return
        if scheduler_stats.connector_prefix_cache_stats is not None:
            self.loaded_tokens += scheduler_stats.connector_prefix_cache_stats.hits
        for name, amount in (scheduler_stats.kv_connector_stats or {}).items():
            if isinstance(amount, (int, float)):
                self.connector[name] = self.connector.get(name, 0) + amount

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *_: Any, **__: Any) -> None: ...


class EngineProcess:
    """Answers the commands of a connection: those below, and any method of vLLM's engine."""

    def __init__(self, engine: Any, counts: EngineCounts, connection: Connection) -> None:
        self._engine, self._counts, self._connection = engine, counts, connection
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = self._begun = 0

    async def serve(self) -> None:
        """Answer until the connection closes, or None comes."""
        ended = asyncio.Event()

        def receive() -> None:
            command = None
            with contextlib.suppress(EOFError, OSError):
                command = self._connection.recv()
            if command is None:
                asyncio.get_running_loop().remove_reader(self._connection.fileno())
                ended.set()
                return
            task = asyncio.create_task(self._answer(*command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        asyncio.get_running_loop().add_reader(self._connection.fileno(), receive)
        await ended.wait()
        self._engine.shutdown(timeout=0)

    async def _answer(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            method = getattr(self, name, None) or getattr(self._engine, name)
            result = method(**arguments)
            if asyncio.iscoroutine(result):
                result = await result
            self._connection.send((number, result, None))
        except Exception:  # noqa: BLE001 -- the test is told
            self._connection.send((number, None, traceback.format_exc()))

    async def generate(
        self,
        number: int,
        prompt: list[int],
        sampling: dict[str, Any],
        lora: dict[str, Any] | None,
        images: Sequence[int],
        **fields: Any,
    ) -> Answer:
        """Run request `number`; the command of the number before it ends at the first token."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        request: dict[str, Any] = {"prompt_token_ids": prompt, **fields}
        if images:
            from tests.vllm.tiny_llava import picture

            request["multi_modal_data"] = {"image": [picture(seed) for seed in images]}
        parameters = SamplingParams(temperature=0.0, detokenize=False, **sampling)
        adapter = LoRARequest(**lora) if lora else None
        was_alone = not self._in_flight
        self._in_flight += 1
        self._begun += 1
        begun, loaded = self._begun, self._counts.loaded_tokens
        outputs = self._engine.generate(request, parameters, str(number), lora_request=adapter)
        try:
            output = await anext(outputs)
            self._connection.send((number - 1, None, None))
            async for output in outputs:  # noqa: B007 -- the last one has all tokens
                pass
        finally:
            self._in_flight -= 1
        completion = output.outputs[0]
        pairs = list(zip(completion.logprobs or (), completion.token_ids, strict=False))
        prompted = zip(output.prompt_logprobs or (), output.prompt_token_ids, strict=False)
        return Answer(
            tokens=list(completion.token_ids),
            logprobs=[entry[token].logprob for entry, token in pairs],
            gaps=[
                entry[token].logprob - max(e.logprob for key, e in entry.items() if key != token)
                for entry, token in pairs
            ],
            prompt_logprobs=[entry and entry[token].logprob for entry, token in prompted],
            cached_tokens=output.num_cached_tokens or 0,
            shelf_tokens=(
                self._counts.loaded_tokens - loaded if was_alone and self._begun == begun else None
            ),
            finish_reason=completion.finish_reason,
            kv_transfer_params=getattr(output, "kv_transfer_params", None),
        )

    def metrics(self) -> str:
        from prometheus_client import REGISTRY, generate_latest

        return generate_latest(REGISTRY).decode()

    def counters(self) -> dict[str, float]:
        return self._counts.connector


def run_engine(
    connection: Connection, log: str, environment: dict[str, str], settings: dict[str, Any]
) -> None:
    """Be an engine until the connection closes: command 0 ends when it takes requests."""
    os.setsid()
    with open(log, "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    # Only this process speaks with the tests: they see its end although its children live on.
    os.register_at_fork(after_in_child=functools.partial(os.close, connection.fileno()))
    os.register_at_fork(after_in_child=_bind_worker)
    os.environ.clear()
    os.environ.update(environment)
    paths = environment["PYTHONPATH"].split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path not in sys.path]

    async def serve() -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if (transfer := settings.pop("kv_transfer_config", None)) is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        counts = EngineCounts()
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**settings), stat_loggers=[lambda *_: counts]
        )
        connection.send((0, None, None))
        await EngineProcess(engine, counts, connection).serve()

    try:
        asyncio.run(serve())
    except BaseException:  # noqa: BLE001 -- it ends the process
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the test run has ended
            connection.send((0, None, traceback.format_exc()))
        sys.stderr.flush()
        # Processes and threads of an engine that failed may wait for ever.
        os.killpg(0, signal.SIGKILL)


def _bind_worker() -> None:
    """Bind a forked worker to its cores: OpenMP does so only where a process begins.

    Source: ``vllm/utils/ompmultiprocessing.py``, which sets the variables for workers only.
    """
    if places := os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES"):
        cores = [int(core) for core in re.findall(r"\d+", places)]
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


def _import_vllm() -> None:
    """Import what engines need, and let them fork and wait as tests need it.

    vLLM spawns processes on CPUs, because libraries must be preloaded, and they are here. Its idle
    workers take a core for a second after each step; here they sleep after 5 ms, and one that falls
    asleep while it is notified looks again after 50 ms, not after 5 s.
    Source: ``vllm/distributed/device_communicators/shm_broadcast.py``, ``SpinCondition``.
    """
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.utils import system_utils

    fork = multiprocessing.get_context("fork")
    system_utils.get_mp_context = lambda: fork  # type: ignore[assignment,return-value]
    for name in _IMPORTS:
        importlib.import_module(name)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 50
    init = shm_broadcast.SpinCondition.__init__

    def init_sleepy(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        self.busy_loop_s = min(self.busy_loop_s, 0.005)

    shm_broadcast.SpinCondition.__init__ = init_sleepy
    gc.collect()
    # Pages of what is there now stay shared with the engines.
    gc.freeze()


if _IMPORTS_VLLM in os.environ:
    _import_vllm()


# --------------------------------------------------------------------------- in the test's process

#: Environment variables that engines read after vLLM is imported.
_READ_LATE = {"PYTHONPATH", "VLLM_CPU_OMP_THREADS_BIND"}


def preloaded_libraries() -> str:
    """Return the libraries that vLLM preloads in the processes that it spawns on CPUs.

    Source: ``vllm/platforms/cpu.py``, ``check_and_update_config``.
    """
    paths = [os.environ.get("LD_PRELOAD", "")]
    for package, pattern in (("torch", "libgomp*.so*"), ("vllm", "libtcmalloc_minimal*.so*")):
        origin = getattr(importlib.util.find_spec(package), "origin", None) or ""
        paths += map(str, sorted(Path(origin).parent.glob(f"lib*/{pattern}"))[:1])
    return ":".join(filter(None, paths))


def _environment(core: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine: offline, quiet, small."""
    environment = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "PYTHONUNBUFFERED": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        # vLLM compiles how it counts ranks of logprobs, even eagerly: seconds, and a compiler.
        "TORCHDYNAMO_DISABLE": "1",
        # The inert connector lies in benchmarks/.
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}".strip(":"),
    }
    return environment | dict(env)


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is running in an engine."""

    engine: Engine
    number: int
    first: Future[Any]
    answer: Future[Any]

    def wait_first_token(self) -> None:
        """Wait for the first token, or the end of the request."""
        self.engine.result_of(self.first)

    def abort(self) -> None:
        """Ask the engine to abort this request; :meth:`result` then returns what it had."""
        self.engine.call("abort", request_id=str(self.number))

    def result(self, seconds: float = REQUEST_SECONDS) -> Answer:
        """Wait for the end of the request."""
        answer: Answer = self.engine.result_of(self.answer, seconds)
        return answer


class Engine:
    """One vLLM engine in a process of its own.

    The constructor returns at once, so that two can start side by side; :meth:`wait_ready`, or any
    command, waits for the start.

    Parameters
    ----------
    model, log : path
        The checkpoint's folder, and the file that receives what the engine prints.
    connector : tuple of str, optional
        Name and module of the connector; None for an engine without one.
    extra_config : mapping, optional
        ``kv_connector_extra_config``; what is a constant among it is replaced, see
        :mod:`tests.support.constants`.
    transfer : mapping, optional
        Other fields of the ``KVTransferConfig``, such as the role.
    core : int
        The processor core that the engine is bound to.
    env : mapping, optional
        Further environment variables. Unless vLLM reads them late, the engine is not forked.
    **arguments
        Fields of vLLM's ``AsyncEngineArgs`` on top of those for all tests.
    """

    #: Those whose processes run.
    running: ClassVar[list[Engine]] = []
    #: Names of all that this process has started.
    names: ClassVar[list[str]] = []

    def __init__(
        self,
        model: str | os.PathLike[str],
        log: str | os.PathLike[str],
        *,
        connector: tuple[str, str] | None = None,
        extra_config: Mapping[str, Any] | None = None,
        transfer: Mapping[str, Any] | None = None,
        core: int = 0,
        env: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.log_path = Path(log)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 4096,
            "kv_cache_memory_bytes": 128 << 20,
            "gpu_memory_utilization": 0.1,
            "max_num_seqs": 64,
            "enable_prefix_caching": True,
            **arguments,
        }
        options, replaced = constants.split(extra_config or {})
        if connector is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": connector[0],
                "kv_connector_module_path": connector[1],
                "kv_role": "kv_both",
                "kv_connector_extra_config": options,
                **(transfer or {}),
            }
        environment = _environment(core, env or {}) | {constants.VARIABLE: json.dumps(replaced)}
        is_forked = not set(env or ()) - _READ_LATE
        server = {"LD_PRELOAD": preloaded_libraries(), "OMP_NUM_THREADS": "1", _IMPORTS_VLLM: "1"}
        context = multiprocessing.get_context("forkserver" if is_forked else "spawn")
        if is_forked:
            context.set_forkserver_preload([__name__])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=run_engine, args=(theirs, str(log), environment, settings), daemon=False
        )
        with mock.patch.dict(os.environ, environment | (server if is_forked else {}), clear=True):
            self._process.start()
        theirs.close()
        self._send_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._ready: Future[Any] = Future()
        self._commands = {0: self._ready}
        self.running.append(self)
        self.names.append(self.log_path.stem)
        threading.Thread(target=self._read, daemon=True, name="engine results").start()

    # Life

    def wait_ready(self) -> Engine:
        """Wait until the engine takes requests; raises :class:`EngineError` if it fails to."""
        self.result_of(self._ready, START_SECONDS)
        return self

    def stop(self, *, at_once: bool = False) -> None:
        """Shut down in order, or without the time to finish anything; at last kill it."""
        with contextlib.suppress(EngineError, OSError):
            self.call("shutdown", seconds=LONG, timeout=0.0 if at_once else None)
            self._connection.send(None)
            self._process.join(LONG)
        self.kill()

    def processes(self) -> list[int]:
        """Return the engine's processes."""
        pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
        with contextlib.suppress(ProcessLookupError):  # one has ended meanwhile
            return [pid for pid in pids if os.getpgid(pid) == self._process.pid]
        return self.processes()

    def kill(self) -> None:
        """Kill the engine and all its processes, as ``kill -9`` does."""
        with contextlib.suppress(ValueError):
            self.running.remove(self)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Engine:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Requests

    def submit(
        self,
        prompt: Sequence[int],
        *,
        lora: Mapping[str, Any] | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        images: Sequence[int] = (),
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> Request:
        """Start a greedy request of 8 tokens, whatever they are, and return its handle at once.

        `images` are the seeds of :func:`picture`, `sampling` further ``SamplingParams``.
        """
        sampling = {"max_tokens": 8, "ignore_eos": True, "logprobs": 2, **sampling}
        if kv_transfer_params is not None:
            sampling["extra_args"] = {"kv_transfer_params": dict(kv_transfer_params)}
        self.wait_ready()
        first, number = next(self._numbers), next(self._numbers)
        self._commands[first] = Future()
        fields = {} if cache_salt is None else {"cache_salt": cache_salt}
        arguments = {"prompt": list(prompt), "sampling": sampling, "lora": lora, "images": images}
        answer = self._send(number, "generate", {"number": number, **arguments, **fields})
        return Request(self, number, self._commands[first], answer)

    def generate(self, prompt: Sequence[int], **options: Any) -> Answer:
        """Run one request to its end; options as for :meth:`submit`."""
        return self.submit(prompt, **options).result()

    def generate_all(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        """Run requests concurrently to their ends; answers in the order of the prompts."""
        requests = [self.submit(prompt, **options) for prompt in prompts]
        return [request.result(300) for request in requests]

    def reset_prefix_cache(self, *, connector: bool = False) -> None:
        """Empty vLLM's own prefix cache, and the connector's memos where asked.

        vLLM refuses while blocks are in use, so a refused reset is repeated.
        """
        until(lambda: self.call("reset_prefix_cache", reset_connector=connector), "no used block")

    def reset_connector(self) -> None:
        """Empty both caches, and let workers compare their weights: before, nothing is stored."""
        self.reset_prefix_cache(connector=True)
        # Each step compares at least 2 MiB. The tokens fill no chunk.
        self.generate([2, 3, 4], max_tokens=64)

    # What can be seen from outside

    def metrics_text(self) -> str:
        """All metrics of the engine's front end, in Prometheus's text format."""
        return str(self.call("metrics"))

    def metrics(self) -> dict[str, float]:
        """Metrics by name, summed over labels."""
        sums: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+).* (\S+)$", self.metrics_text(), re.M):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def counters(self) -> dict[str, float]:
        """Return the connector's own counters, as far as steps with output have reported them."""
        return dict(self.call("counters"))

    def log(self) -> str:
        """Everything that the engine has printed so far."""
        return self.log_path.read_text(errors="replace")

    def log_lines(self, text: str) -> list[str]:
        """The log's lines that contain `text`."""
        return [line for line in self.log().splitlines() if text in line]

    def account(self) -> str:
        """What somebody who looks for the cause of a failed test wants to know."""
        counters: dict[str, float] = {}
        with contextlib.suppress(EngineError):
            counters = self.call("counters", seconds=5.0) if self._ready.done() else {}
        return f"{self.log()[-6000:]}\n{counters}"

    # Commands

    def call(self, name: str, *, seconds: float = REQUEST_SECONDS, **arguments: Any) -> Any:
        """Call a method of :class:`EngineProcess`, or of vLLM's engine, and return its result."""
        self.wait_ready()
        return self.result_of(self._send(next(self._numbers), name, arguments), seconds)

    def result_of(self, command: Future[Any], seconds: float = REQUEST_SECONDS) -> Any:
        """Wait for a result; raises :class:`EngineError` on errors, death and deadline."""
        try:
            return command.result(seconds)
        except (EngineError, TimeoutError) as error:
            what = str(error) or "no answer from the engine in time"
            raise EngineError(f"{what}\nend of {self.log_path}:\n{self.log()[-6000:]}") from None

    def _send(self, number: int, name: str, arguments: dict[str, Any]) -> Future[Any]:
        command: Future[Any] = Future()
        self._commands[number] = command
        try:
            with self._send_lock:
                self._connection.send((number, name, arguments))
        except OSError:
            raise EngineError("the engine is gone") from None
        return command

    def _read(self) -> None:
        with self._connection, contextlib.suppress(EOFError, OSError):
            while True:
                number, result, error = self._connection.recv()
                command = self._commands[number]
                # An engine that ends with an error reports it as the result of its start.
                if command.done():
                    continue
                if error is not None:
                    command.set_exception(EngineError(error))
                else:
                    command.set_result(result)
        for command in list(self._commands.values()):
            if not command.done():
                command.set_exception(EngineError("the engine's process ended"))


# ----------------------------------------------------------------------- the engines of a session

#: 23 blocks of 128 tokens, 384 tokens a step: requests wait for each other and are preempted.
_SMALL = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 384, "max_model_len": 2816}


class Engines:
    """All engines of the session, with the model that most of them have.

    Parameters
    ----------
    root : path
        The folder of models, logs and shelves.
    model : path
    """

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model, self.shelf = root, model, root / "shelf"
        copied = shutil.copytree(model, root / "models" / "a copy")
        self._named: dict[str, dict[str, Any]] = {
            "inert": {"connector": INERT_CONNECTOR, "core": 0, **_SMALL},
            "on_shelf": {"shelf": self.shelf, "core": 1, **_SMALL},
            "doomed": {"shelf": self.shelf, "core": 0},
            "second": {"shelf": self.shelf, "core": 0, "model": copied, "enable_lora": True},
        }
        self._started: dict[str, Engine] = {}

    def __getitem__(self, name: str) -> Engine:
        """Return an engine that tests know by name; it is started when first asked for."""
        return self._started.get(name) or self.start(name, **self._named[name])

    def start(self, name: str, shelf: Path | None = None, **arguments: Any) -> Engine:
        """Start an engine, by default with kvshelf's connector and on a shelf.

        `arguments` are those of :class:`Engine`.
        """
        arguments = {"model": self.model, "connector": SHELF_CONNECTOR, **arguments}
        if shelf is not None:
            path = {"shared_storage_path": str(shelf)}
            arguments["extra_config"] = path | constants.PATIENT | arguments.get("extra_config", {})
        cores = sorted(os.sched_getaffinity(0))
        arguments["core"] = cores[arguments.get("core", 0) % len(cores)]
        engine = Engine(log=self.root / "logs" / f"{name}.log", **arguments)
        self._started.setdefault(name, engine)
        return engine

    def stop_all(self) -> None:
        """Stop the engines, and the server that forks them, whose time counts when it has ended."""
        for engine in list(Engine.running):
            engine.stop(at_once=True)
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------- answers


def assert_same(answer: Answer, expected: Answer, tolerance: float = 0.0) -> None:
    """Assert that an answer has the expected tokens.

    Where the first difference is, the expected token may have been ahead of its best rival by less
    than `tolerance` nats: rounding, which depends on the shapes of batches, decides such near-ties.
    What follows a difference is another text.
    """
    if answer.tokens == expected.tokens:
        return
    pairs = zip(answer.tokens, expected.tokens, strict=False)
    at = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    gap = math.inf if at is None else expected.gaps[at]
    assert gap < tolerance, (
        f"token {at} was {gap:.3f} nats ahead: {answer.tokens}, expected {expected.tokens}"
    )


def eventually_hits(
    engine: Engine, tokens: Sequence[int], expected: Answer, hit: int, seconds: float = LONG
) -> None:
    """Ask until `hit` tokens of a prompt come from the shelf; every answer must be right."""

    def hits() -> bool:
        engine.reset_prefix_cache()
        answer = engine.generate(tokens)
        assert_same(answer, expected)
        return answer.shelf_tokens == hit

    until(hits, f"a hit of {hit} tokens", seconds)


def assert_same_up_to_ties(
    answers: Sequence[Answer], expected: Sequence[Answer], control: Sequence[Answer]
) -> None:
    """Assert that answers differ only by near-ties, and no more often than without a shelf.

    Requests that are computed together go through matrices of other shapes than requests that are
    computed alone. Rounding then decides near-ties otherwise, on some processors in one answer of
    five and on others never. So `control` are answers to the same prompts under the same load from
    an engine without a shelf, `expected` those of prompts that were computed alone. The two numbers
    of answers that differ are compared by Fisher's exact test: if a shelf changes nothing, it fails
    one time in a thousand.
    """
    for answer, alone in zip(answers, expected, strict=True):
        assert_same(answer, alone, NEAR_TIE)
    ours, theirs = (
        sum(a.tokens != b.tokens for a, b in zip(some, expected, strict=True))
        for some in (answers, control)
    )
    count, both = len(answers), ours + theirs
    chance = sum(
        math.comb(both, k) * math.comb(2 * count - both, count - k)
        for k in range(ours, min(both, count) + 1)
    ) / math.comb(2 * count, count)
    assert chance > 0.001, f"{ours} of {count} answers differ, {theirs} without a shelf"


# --------------------------------------------------------------------------------------- shelves


class ShelfFiles:
    """A shelf in a local directory, and the one namespace on it that prompts are looked for in."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the namespace."""
        [folder] = self.namespaces()
        return folder

    @functools.cached_property
    def namespace(self) -> Namespace:
        """The namespace."""
        # A server that replaces the file may show none for a moment.
        file = self.folder / "namespace.json"
        until(lambda: file.exists() and file.stat().st_size > 0, "the namespace's record")
        return Namespace.from_bytes(file.read_bytes())

    @property
    def record(self) -> dict[str, Any]:
        """The namespace record."""
        return dict(self.namespace.record)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return int(self.record["chunk_size"])

    def chain(self, prompt: Sequence[int], *, salt: str = "") -> KeyChain:
        """Return the keys of a prompt's chunks."""
        chain = KeyChain(self.namespace.digest, self.chunk, salt=salt)
        chain.extend(prompt)
        return chain

    def namespaces(self) -> list[Path]:
        """Return the namespace folders."""
        return sorted(record.parent for record in self.root.glob("*/namespace.json"))

    def objects(self) -> set[Path]:
        """Return all objects of the shelf, without those that were begun or set aside."""
        found = self.root.rglob("[!.]*.safetensors")
        return {path for path in found if ".kvshelf" not in path.parts}

    def temporaries(self) -> set[Path]:
        """Return files that were begun and not published."""
        return set(self.root.rglob(".*.tmp"))

    def of(self, prompt: Sequence[int], kind: Kind = FULL, *, salt: str = "") -> list[list[Path]]:
        """Return the objects that a prompt's chunks have or would have: a list for each chunk."""
        return [self.objects_of(chunk, kind) for chunk in self.chain(prompt, salt=salt).chunks]

    def objects_of(self, chunk: Chunk, kind: Kind = FULL) -> list[Path]:
        """Return the objects that a chunk has or would have."""
        shards = self.record[SHARDS_FIELDS[kind]]
        return [self.folder / object_name(chunk, shard, shards, kind) for shard in range(shards)]

    def fill(self, engine: Engine, prompt: Sequence[int]) -> list[list[Path]]:
        """Have an engine store a prompt, and empty its own cache; return the prompt's objects."""
        engine.generate(prompt)
        chunks = self.wait_stored(prompt)
        engine.reset_prefix_cache()
        return chunks

    def wait_stored(
        self, prompt: Sequence[int], *, salt: str = "", seconds: float = LONG
    ) -> list[list[Path]]:
        """Wait until all chunks of a prompt are on the shelf, and return their objects."""
        until(lambda: bool(self.namespaces()), "a namespace on the shelf", seconds)
        chunks = self.of(prompt, salt=salt)
        wait_files([path for chunk in chunks for path in chunk], seconds)
        return chunks

    def check_all(self) -> int:
        """Check every object against its own header; returns how many there are."""
        objects = self.objects()
        for path in objects:
            read_object(path)
        return len(objects)


def wait_files(paths: Sequence[Path], seconds: float = LONG) -> None:
    """Wait until all of these are on the shelf."""
    try:
        until(lambda: all(path.is_file() for path in paths), f"{len(paths)} objects", seconds)
    except AssertionError as error:
        error.add_note(f"missing: {[path.name for path in paths if not path.is_file()]}")
        raise


def read_object(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return an object's metadata without hashes, and the bytes of its tensors, which must fit."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header, payload = json.loads(data[8:start]), memoryview(data)[start:]
    metadata = header.pop("__metadata__")
    tensors, end = {}, 0
    for (name, tensor), digest in zip(header.items(), metadata.pop("xxh3").split(","), strict=True):
        begin, end = tensor["data_offsets"]
        assert xxhash.xxh3_128_hexdigest(payload[begin:end]) == digest, f"{path}: {name}"
        tensors[name] = torch.frombuffer(bytearray(payload[begin:end]), dtype=torch.uint8)
    assert end == len(payload), path
    return metadata, tensors


def assert_close(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    """Assert that two objects hold the same KV in bfloat16 up to rounding.

    Elements are of the size of one. Where sums are made in another order, as by other batches or
    other ranks, elements move by a few of their last bits.
    """
    for name, tensor in tensors.items():
        ours, theirs = (part.view(torch.bfloat16).float() for part in (tensor, others[name]))
        assert ours.abs().max() > 0.1, "there is no KV"
        assert (ours - theirs).abs().max() <= 0.1, name
        assert (ours - theirs).abs().mean() <= 0.01, name


def flip_byte(path: Path) -> None:
    """Change one byte of an object's payload: a load notices it."""
    data = bytearray(path.read_bytes())
    data[-1000] ^= 0x10
    path.write_bytes(data)


def replace_by_fifo(path: Path) -> None:
    """Put something else in an object's place: a look-up notices it."""
    path.unlink()
    os.mkfifo(path)
