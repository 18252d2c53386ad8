"""Real vLLM engines for tests: each in its own process, driven from the test.

:class:`Engine` starts ``engine_process.py`` (an ``AsyncLLM`` with a given connector) in a process
group of its own and speaks JSON lines with it over a socket pair. One reader thread per engine
hands replies to the waiting test threads, so requests can run concurrently, be aborted half way and
be looked at while they run. Everything an engine prints goes to a file that tests can read.

An engine never outlives its test run: ``stop`` is bounded and ends by killing the process group,
and the engine process shuts down by itself when its socket closes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from tests.support import constants
from tests.support.engine_process import HEED_PERMISSIONS
from tests.support.fork_server import ForkedProcess, ForkServer
from tests.support.waiting import LONG, until

START_TIMEOUT = 600.0
REQUEST_TIMEOUT = 120.0
STOP_TIMEOUT = LONG
#: Differences of log probabilities, in nats, that rounding makes with the models of make_model.py.
NEAR_TIE = 0.15

SHELF_CONNECTOR = ("SharedStorageConnector", "tests.support.connector")
INERT_CONNECTOR = ("InertConnector", "benchmarks.inert")

#: Environment variables that engines read after vLLM is imported.
_READ_LATE = {"PYTHONPATH", "VLLM_CPU_OMP_THREADS_BIND"}


class EngineError(RuntimeError):
    """An engine did not start, died, or answered a command with an error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got.

    Attributes
    ----------
    tokens : list[int]
        Generated token ids.
    logprobs : list[float]
        Log probability of each generated token, nats; empty unless asked for (``logprobs=2``).
    gaps : list[float]
        For each generated token, how far its log probability is above its best rival's, nats.
    prompt_logprobs : list[float | None]
        Log probability of each prompt token, nats; empty unless asked for.
    cached_tokens : int
        Prompt tokens that were not computed: from vLLM's own prefix cache or from the shelf.
    shelf_tokens : int | None
        Prompt tokens that the connector delivered; None when other requests ran at the same time
        (vLLM counts them for the engine, not for the request).
    finish_reason : str | None
        ``"length"``, ``"stop"``, ``"abort"`` or ``"error"``.
    ttft : float | None
        Seconds from submission to the first token.
    seconds : float
        Seconds from submission to the end.
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
    ttft: float | None
    seconds: float
    kv_transfer_params: dict[str, Any] | None


@dataclass(slots=True)
class Request:
    """A request that is running in an engine."""

    engine: Engine
    number: int
    replies: queue.SimpleQueue[dict[str, Any]]
    seen: dict[str, Any] = field(default_factory=dict)

    def wait_first_token(self, timeout: float = REQUEST_TIMEOUT) -> float:
        """Wait for the first token and return its latency in seconds."""
        while "first" not in self.seen and "done" not in self.seen:
            self._next(time.monotonic() + timeout)
        return float(self.seen.get("first", self.seen.get("ttft") or 0.0))

    @property
    def ended(self) -> bool:
        """Whether the answer is whole."""
        while not self.replies.empty():
            self._next(time.monotonic())
        return "done" in self.seen

    def abort(self) -> None:
        """Ask the engine to abort this request; :meth:`result` then returns what it had."""
        self.engine.call("abort", target=self.number)

    def result(self, timeout: float = REQUEST_TIMEOUT) -> Answer:
        """Wait for the end of the request."""
        deadline = time.monotonic() + timeout
        while "done" not in self.seen:
            self._next(deadline)
        seen = self.seen
        tops = seen["tops"]
        return Answer(
            tokens=seen["tokens"],
            logprobs=[chosen for chosen, _ in tops],
            gaps=[chosen - rival for chosen, rival in tops],
            prompt_logprobs=seen["prompt_logprobs"],
            cached_tokens=seen["cached_tokens"] or 0,
            shelf_tokens=seen["shelf_tokens"],
            finish_reason=seen["finish_reason"],
            ttft=seen["ttft"],
            seconds=seen["seconds"],
            kv_transfer_params=seen["kv_transfer_params"],
        )

    def _next(self, deadline: float) -> None:
        self.seen.update(self.engine.next_reply(self.replies, deadline))


class Engine:
    """One vLLM engine in a process of its own.

    Parameters
    ----------
    model : path
        The checkpoint's folder.
    log : path
        File that receives everything the engine prints; appended to.
    connector : tuple of str, optional
        Name and module of the connector; None for an engine without one.
    extra_config : mapping, optional
        ``kv_connector_extra_config``; what is a constant among it is replaced, see
        :mod:`tests.support.constants`.
    kv_role : str
        ``"kv_both"``, ``"kv_producer"`` or ``"kv_consumer"``.
    transfer : mapping, optional
        Further fields of the ``KVTransferConfig``.
    core : int, optional
        The processor core that the engine is pinned to; all of them by default.
    env : mapping, optional
        Environment variables on top of the harness's.
    heed_permissions : bool
        Give up root's privilege to write where permissions forbid it; see
        :attr:`heeds_permissions`.
    forks : ForkServer, optional
        Forks the engine, unless `env` needs a program started anew.
    **arguments
        Fields of vLLM's ``AsyncEngineArgs`` on top of the harness's.

    Raises
    ------
    ValueError
        If a connector is configured but not named: the engine would run without one.

    Notes
    -----
    The constructor returns at once; :meth:`wait_ready` (or any command) waits for the start, so
    that two engines can start side by side.
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
        kv_role: str = "kv_both",
        transfer: Mapping[str, Any] | None = None,
        core: int | None = None,
        env: Mapping[str, str] | None = None,
        heed_permissions: bool = False,
        forks: ForkServer | None = None,
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
            "seed": 0,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            **arguments,
        }
        if connector is None and (extra_config or transfer):
            raise ValueError("an engine without a connector has nothing to configure; name one")
        options, replaced = constants.split(extra_config or {})
        if connector is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": connector[0],
                "kv_connector_module_path": connector[1],
                "kv_role": kv_role,
                "kv_connector_extra_config": options,
                **(transfer or {}),
            }
        ours, theirs = socket.socketpair()
        # -P: what lies beside the program is not to be found as modules of the top level.
        command = [sys.executable, "-P", str(Path(__file__).with_name("engine_process.py"))]
        environment = engine_environment(core, env) | {constants.VARIABLE: json.dumps(replaced)}
        if heed_permissions:
            environment[HEED_PERMISSIONS] = "1"
        self.started = time.monotonic()
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with self.log_path.open("ab") as output, theirs:
            if forks is not None and not set(env or ()) - _READ_LATE:
                self.process = forks.start(environment, theirs.fileno(), output.fileno())
            else:
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        self._socket = ours
        self._send_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[dict[str, Any]]] = {0: queue.SimpleQueue()}
        self._gone = False
        self._ready: dict[str, Any] | None = None
        self._send(settings)
        self.running.append(self)
        self.names.append(self.log_path.stem)
        threading.Thread(target=self._read, daemon=True, name="engine replies").start()

    # Life

    def wait_ready(self, timeout: float = START_TIMEOUT) -> Engine:
        """Wait until the engine takes requests; raises :class:`EngineError` if it fails to."""
        if self._ready is None:
            try:
                self._ready = self.next_reply(self._replies[0], self.started + timeout)
            except BaseException:
                self.kill()
                raise
        return self

    @property
    def start_seconds(self) -> float:
        """Seconds that the engine took to start, import of vLLM included."""
        self.wait_ready()
        assert self._ready is not None
        return float(self._ready["seconds"])

    @property
    def heeds_permissions(self) -> bool:
        """Whether the engine cannot write where permissions forbid it."""
        self.wait_ready()
        assert self._ready is not None
        return bool(self._ready["heeds_permissions"])

    def stop(self, timeout: float = STOP_TIMEOUT, *, at_once: bool = False) -> float:
        """Shut down in order; returns the seconds that it took.

        Parameters
        ----------
        timeout : float
            Seconds after which the process group is killed.
        at_once : bool
            Have vLLM end its processes without giving them time to finish anything.
        """
        started = time.monotonic()
        try:
            if self.process.poll() is None and not self._gone:
                with contextlib.suppress(EngineError, OSError):
                    self.wait_ready()
                    self.call("stop", wait=timeout, timeout=0.0 if at_once else None)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(max(0.1, started + timeout - time.monotonic()))
                self._let_helpers_end()
        finally:
            self.kill()
        return time.monotonic() - started

    def _let_helpers_end(self, timeout: float = 3.0) -> None:
        """Wait for the rest of the group: Python's resource tracker removes shared memory."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.processes():
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """Return the engine's processes; those that ended and were not reaped do not count."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.getpgid(int(entry.name)) == self.process.pid:
                    # The state follows the name of the program, which may hold anything.
                    state = (entry / "stat").read_text().rpartition(") ")[2][0]
                    if state not in "ZX":
                        found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """Kill the engine and all its processes, as ``kill -9`` does."""
        with contextlib.suppress(ValueError):
            self.running.remove(self)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Engine:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Requests

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        cache_salt: str | None = None,
        lora: Mapping[str, Any] | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        images: Sequence[int] = (),
        uuids: Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> Request:
        """Start a greedy request and return its handle at once.

        Parameters
        ----------
        prompt : sequence of int
            Token ids.
        max_tokens : int
            Tokens to generate; the end-of-sequence token does not stop a request.
        cache_salt : str, optional
            vLLM's ``cache_salt``.
        lora : mapping, optional
            ``lora_name``, ``lora_int_id`` and ``lora_path`` of an adapter.
        kv_transfer_params : mapping, optional
            Sent along as ``extra_args["kv_transfer_params"]``.
        images : sequence of int
            The seeds of images, see :func:`engine_process.picture`.
        uuids : sequence of str or None, optional
            What the client calls these images.
        **sampling
            Further ``SamplingParams``, such as ``prompt_logprobs=0``.
        """
        parameters: dict[str, Any] = {
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "logprobs": 2,
            **sampling,
        }
        if kv_transfer_params is not None:
            parameters["extra_args"] = {"kv_transfer_params": dict(kv_transfer_params)}
        self.wait_ready()
        number, replies = self._command(
            "generate",
            prompt=list(prompt),
            sampling=parameters,
            cache_salt=cache_salt,
            lora=dict(lora) if lora else None,
            images=list(images),
            uuids=None if uuids is None else list(uuids),
        )
        return Request(self, number, replies)

    def generate(
        self, prompt: Sequence[int], *, timeout: float = REQUEST_TIMEOUT, **options: Any
    ) -> Answer:
        """Run one request to its end; options as for :meth:`submit`."""
        return self.submit(prompt, **options).result(timeout)

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        timeout: float = REQUEST_TIMEOUT,
        **options: Any,
    ) -> list[Answer]:
        """Run requests concurrently to their ends; answers in the order of the prompts."""
        requests = [self.submit(prompt, **options) for prompt in prompts]
        deadline = time.monotonic() + timeout
        return [request.result(deadline - time.monotonic()) for request in requests]

    def reset_prefix_cache(self, *, connector: bool = False, timeout: float = LONG) -> None:
        """Empty vLLM's own prefix cache, and the connector's memos where asked.

        vLLM refuses while blocks are in use, so a refused reset is repeated for `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.call("reset_prefix_cache", connector=connector)["done"]:
            if time.monotonic() > deadline:
                raise EngineError(f"the prefix cache is still in use after {timeout:g} s")
            time.sleep(0.01)

    def reset_connector(self) -> None:
        """Empty both caches, and let workers compare their weights: before, nothing is stored."""
        self.reset_prefix_cache(connector=True)
        # Each step compares at least 2 MiB. The tokens fill no chunk.
        self.generate([2, 3, 4], max_tokens=64)

    # What can be seen from outside

    def metrics_text(self) -> str:
        """All metrics of the engine's front end, in Prometheus's text format."""
        return str(self.call("metrics")["text"])

    def metrics(self) -> dict[str, float]:
        """Metrics by name, summed over labels."""
        return _sums(self.metrics_text())

    def counters(self) -> dict[str, float]:
        """Return the connector's own counters, as far as steps with output have reported them."""
        return dict(self.call("counters")["sums"])

    def log(self) -> str:
        """Everything that the engine has printed so far."""
        return self.log_path.read_text(errors="replace")

    def log_lines(self, text: str) -> list[str]:
        """The log's lines that contain `text`."""
        return [line for line in self.log().splitlines() if text in line]

    # The wire

    def call(self, op: str, wait: float = REQUEST_TIMEOUT, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its one reply."""
        self.wait_ready()
        number, replies = self._command(op, **arguments)
        reply = self.next_reply(replies, time.monotonic() + wait)
        self._replies.pop(number, None)
        return reply

    def next_reply(
        self, replies: queue.SimpleQueue[dict[str, Any]], deadline: float
    ) -> dict[str, Any]:
        """Wait for the next reply; raises :class:`EngineError` on errors, death and deadline."""
        try:
            reply = replies.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise EngineError(f"no answer from the engine in time; {self._tail()}") from None
        if "error" in reply:
            raise EngineError(f"{reply['error']}\n{reply.get('trace', '')}{self._tail()}")
        return reply

    def _command(self, op: str, **arguments: Any) -> tuple[int, queue.SimpleQueue[dict[str, Any]]]:
        number = next(self._numbers)
        replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._replies[number] = replies
        if self._gone:
            raise EngineError(f"the engine is gone; {self._tail()}")
        self._send({"id": number, "op": op, **arguments})
        return number, replies

    def _send(self, message: Mapping[str, Any]) -> None:
        with self._send_lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                reply = json.loads(line)
                self._replies[reply["id"]].put(reply)
        self._gone = True
        for replies in list(self._replies.values()):
            replies.put({"error": "the engine's process ended"})

    def account(self) -> str:
        """What somebody who looks for the cause of a failed test wants to know."""
        counters = ""
        with contextlib.suppress(EngineError):
            counted = self.call("counters", wait=5.0)["sums"] if self._ready else {}
            counters = "\n".join(f"{name}: {value:g}" for name, value in counted.items() if value)
        return f"{self._tail()}\n{counters}"

    def _tail(self, lines: int = 40) -> str:
        tail = "\n".join(self.log().splitlines()[-lines:])
        return f"end of {self.log_path}:\n{tail}"


def engine_environment(
    core: int | None = None, env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of an engine: offline, quiet, small."""
    environment = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # vLLM compiles how it counts ranks of logprobs, even eagerly: seconds, and a compiler.
        "TORCHDYNAMO_DISABLE": "1",
        # The inert connector lies in benchmarks/.
        "PYTHONPATH": os.pathsep.join(
            filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])))
        ),
    }
    if core is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    return environment | dict(env or {})


def _sums(text: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name = series.split("{", 1)[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def assert_same(answer: Answer, expected: Answer, tolerance: float = 0.0) -> None:
    """Assert that an answer has the expected tokens.

    Parameters
    ----------
    answer, expected : Answer
        The expected answer must have its gaps (``logprobs=2``).
    tolerance : float
        Where the first difference is, the expected token may have been ahead of its best rival by
        less than this many nats: rounding, which depends on the shapes of batches, decides such
        near-ties. What follows a difference is another text.
    """
    where = _first_difference(answer, expected)
    if where is not None:
        gap = expected.gaps[where] if where < len(expected.gaps) else float("inf")
        assert gap < tolerance, (
            f"token {where} is {answer.tokens[where : where + 1]}, expected "
            f"{expected.tokens[where : where + 1]}, which was {gap:.3f} nats ahead: "
            f"{answer.tokens} instead of {expected.tokens}"
        )


def eventually_hits(
    engine: Engine,
    tokens: Sequence[int],
    expected: Answer,
    hit: int,
    seconds: float = LONG,
    tolerance: float = 0.0,
) -> None:
    """Ask until `hit` tokens of a prompt come from the shelf; every answer must be right."""

    def hits() -> bool:
        engine.reset_prefix_cache()
        answer = engine.generate(tokens)
        assert_same(answer, expected, tolerance)
        return answer.shelf_tokens == hit

    until(hits, f"a hit of {hit} tokens", seconds)


def assert_same_up_to_ties(
    answers: Sequence[Answer],
    expected: Sequence[Answer],
    control: Sequence[Answer],
    recompute: Callable[[int, list[int]], Answer] | None = None,
) -> None:
    """Assert that answers differ only by near-ties, and no more often than without a shelf.

    Requests that are computed together go through matrices of other shapes than requests that are
    computed alone. Rounding then decides near-ties otherwise, on some processors in one answer of
    five and on others never, so how often is not known beforehand.

    Parameters
    ----------
    answers : sequence of Answer
        To be judged.
    expected : sequence of Answer
        The same prompts, each computed alone, with their gaps (``logprobs=2``).
    control : sequence of Answer
        The same prompts under the same load from an engine without a shelf, on this machine.
    recompute : Callable[[int, list of int], Answer], optional
        Returns what an engine without a shelf continues a prompt with, named by its index, behind
        the beginning of an answer. After a preemption an engine computes what it has answered
        already like a prompt, by other kernels. A token counts as a near-tie too where it is one
        behind an answer that was computed like that.

    Notes
    -----
    The two numbers of answers that differ are compared by Fisher's exact test. If a shelf changes
    nothing, it fails one time in a thousand.
    """
    for index, (answer, other) in enumerate(zip(answers, expected, strict=True)):
        where = _first_difference(answer, other)
        if recompute is not None and where is not None and other.gaps[where] >= NEAR_TIE:
            there = replace(answer, tokens=answer.tokens[where : where + 1])
            assert_same(there, recompute(index, answer.tokens[:where]), NEAR_TIE)
        else:
            assert_same(answer, other, NEAR_TIE)
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


def _first_difference(answer: Answer, expected: Answer) -> int | None:
    if answer.tokens == expected.tokens:
        return None
    pairs = zip(answer.tokens, expected.tokens, strict=False)
    shorter = min(len(answer.tokens), len(expected.tokens))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), shorter)
