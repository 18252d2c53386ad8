"""A process that has imported vLLM once and forks engines: ``fork_server.py <fd of the socket>``.

A start of an engine imports vLLM three times, in its own process, in the engine core's and in the
worker's: half of its time. Engines that are forked from this server import nothing. They are what
vLLM starts by default on GPUs, where it forks as well; on CPUs it spawns, because libraries must be
preloaded, and those are preloaded here. Engines that need another environment while Python starts
are started by :mod:`.engines` itself, and examples and the demo start theirs as users do.

:class:`ForkServer` is the side of the tests. Each request is one message: the environment and the
arguments as JSON, with two file descriptors, the engine's socket and its log. The answer is the
process id with a descriptor of the process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Where the engine core's and the worker's time goes when they start.
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
_LARGEST_MESSAGE = 1 << 18


class ForkedProcess:
    """One engine's process, for callers that expect a ``subprocess.Popen``.

    Attributes
    ----------
    pid : int
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)

    def poll(self) -> int | None:
        """Return None while the process runs."""
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; raises ``subprocess.TimeoutExpired``."""
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("an engine", timeout or 0.0)
        return 0


class ForkServer:
    """Forks engines; it is started with the first one and ends with the process that owns it.

    Parameters
    ----------
    log : path
        File that receives what the server prints.
    environment : Mapping
        The server's environment variables, as engines have them.
    """

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        self._environment = {**environment, "LD_PRELOAD": _preloaded(), "OMP_NUM_THREADS": "1"}
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST_MESSAGE)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return ours

    def start(self, environment: dict[str, str], connection: int, log: int) -> ForkedProcess:
        """Fork one engine.

        Parameters
        ----------
        environment : dict
            All environment variables of the engine.
        connection, log : int
            Descriptors of its socket and of the file that receives what it prints.

        Raises
        ------
        RuntimeError
            If the server has ended, as when vLLM cannot be imported.
        """
        if self._socket is None:
            self._socket = self._start()
        message = json.dumps(environment).encode()
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [message], [connection, log])
            answer, descriptors, _, _ = socket.recv_fds(self._socket, _LARGEST_MESSAGE, 1)
            if answer:
                return ForkedProcess(int(answer), descriptors[0])
        raise RuntimeError(f"the process that forks engines has ended: see {self._log}")

    def stop(self) -> None:
        """Let the server end; engines that it forked go on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()


def _preloaded() -> str:
    """Return the libraries that vLLM preloads in the processes that it spawns on CPUs.

    Source: ``vllm/platforms/cpu.py``, ``check_and_update_config``.
    """
    found = [os.environ.get("LD_PRELOAD", "")]
    for package, pattern in (
        ("torch", "lib/libgomp*.so*"),
        ("vllm", "libs/libtcmalloc_minimal*.so*"),
    ):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        found += map(str, sorted(Path(spec.origin).parent.glob(pattern))[:1])
    return ":".join(filter(None, found))


# ------------------------------------------------------------------------------ in the server


def _import_vllm() -> None:
    import vllm.utils.system_utils as system_utils

    # vLLM asks for "spawn" on CPUs whatever is configured.
    fork = multiprocessing.get_context("fork")
    system_utils.get_mp_context = lambda: fork  # type: ignore[assignment,return-value]
    for name in _IMPORTS:
        importlib.import_module(name)
    _spin_shortly()
    gc.collect()
    # Pages of what is there now stay shared with the engines.
    gc.freeze()


def _spin_shortly() -> None:
    """Let idle workers sleep after 5 ms; vLLM's take a core for a second after each step.

    Several engines share the cores of a machine that runs tests. A worker that falls asleep while
    it is notified looks again after 50 ms, not after 5 s: it sleeps between any two steps.
    Source: ``vllm/distributed/device_communicators/shm_broadcast.py``, ``SpinCondition``.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 50
    made = shm_broadcast.SpinCondition.__init__

    def make(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.busy_loop_s = min(self.busy_loop_s, 0.005)

    shm_broadcast.SpinCondition.__init__ = make


def _bind_worker() -> None:
    """Bind a worker as OpenMP does where it starts anew, with the same number of threads.

    Source: ``vllm/utils/ompmultiprocessing.py``, which sets one of these for workers only.
    """
    places = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES")
    if places:
        import torch

        cores = [int(core) for core in re.findall(r"\d+", places)]
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


def _serve(control: socket.socket) -> tuple[dict[str, str], int, int] | None:
    """Fork an engine for each message; return its message in an engine, None at the end."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _LARGEST_MESSAGE, 2)
        if not message:
            return None
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        pid = os.fork()
        if pid == 0:
            control.close()
            return json.loads(message), descriptors[0], descriptors[1]
        process = os.pidfd_open(pid)
        socket.send_fds(control, [str(pid).encode()], [process])
        for descriptor in (process, *descriptors):
            os.close(descriptor)


def _become_engine(environment: dict[str, str], connection: int, log: int) -> None:
    from tests.support import engine_process

    os.setsid()
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    # Only this process speaks with the tests: they see its end although its children live on.
    os.register_at_fork(after_in_child=functools.partial(os.close, connection))
    os.register_at_fork(after_in_child=_bind_worker)
    for name in set(os.environ) - set(environment) - {"LD_PRELOAD"}:
        del os.environ[name]
    os.environ.update(environment)
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[1:1] = [path for path in paths if path not in sys.path]
    sys.argv = ["engine_process.py", str(connection)]
    engine_process.run()


def main() -> None:
    """Import vLLM, then fork engines until the tests end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _import_vllm()
    engine = _serve(control)
    if engine is not None:
        _become_engine(*engine)


if __name__ == "__main__":
    main()
