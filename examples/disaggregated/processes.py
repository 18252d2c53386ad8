"""The processes of the example: engines, the proxy, a bucket. All end with the ``with`` block.

Each has a process group of its own, so that Ctrl-C reaches this program alone, which then ends all
of them, an engine's own processes included.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 240
STOP_SECONDS = 20

# All servers are on this machine: a proxy that the environment names would not reach them.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Store:
    """Where the engines meet: what an engine's configuration says of it."""

    url: str
    options: dict[str, Any]


@contextmanager
def process(
    command: Sequence[str], log: Path, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command; end it, and what it started, with the block."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )
        try:
            yield running
        finally:
            stop(running)


def stop(running: subprocess.Popen[bytes]) -> None:
    """End a process group: politely at first."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(running.pid, which)
        with suppress(subprocess.TimeoutExpired):
            running.wait(STOP_SECONDS)
            break
    # What the leader left behind.
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_until_healthy(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers its ``/health``."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(OSError):
            DIRECT.open(f"{url}/health", timeout=5).close()
            return
        if running.poll() is not None or time.monotonic() > deadline:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise SystemExit(f"{end}\nthe server did not start; all of its log is in {log}")
        time.sleep(0.1)


def engine_command(model: Path, role: str, store: Store | None, port: int) -> list[str]:
    """Return the command of an engine; without a store it has no connector."""
    connector = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_module_path": "kvshelf.vllm.connector",
        "kv_role": role,
    }
    if store is not None:
        extra: dict[str, Any] = {"shared_storage_path": store.url}
        if store.options:
            extra["storage_options"] = store.options
        connector_arguments = [
            "--kv-transfer-config",
            json.dumps(connector | {"kv_connector_extra_config": extra}),
        ]
    else:
        connector_arguments = []
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "4096", "--max-num-seqs", "16"),
        *("--kv-cache-memory-bytes", str(8 << 20), "--gpu-memory-utilization", "0.05"),
        "--enforce-eager",
        *("--chat-template", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"),
        *connector_arguments,
    ]


@contextmanager
def engines(
    roles: Sequence[str], model: Path, store: Store | None, logs: Path
) -> Iterator[list[str]]:
    """Start engines one after the other; yields their URLs."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as running:
        urls: list[str] = []
        processes: list[subprocess.Popen[bytes]] = []
        for number, role in enumerate(roles):
            port = free_port()
            log = logs / f"engine-{number}-{role}.log"
            started = running.enter_context(
                process(
                    engine_command(model, role, store, port),
                    log,
                    HF_HUB_OFFLINE="1",
                    VLLM_NO_USAGE_STATS="1",
                    VLLM_CPU_OMP_THREADS_BIND=str(cores[number % len(cores)]),
                )
            )
            urls.append(f"http://127.0.0.1:{port}")
            processes.append(started)
            wait_until_healthy(urls[-1], started, log)
        try:
            yield urls
        finally:
            # All at once, before each is waited for.
            for started in processes:
                started.terminate()


@contextmanager
def proxy(
    prefill: Sequence[str], decode: Sequence[str], log: Path, *, store: str | None = None
) -> Iterator[tuple[str, str]]:
    """Start ``kvshelf proxy`` before engines; yields its URL and that of its health and metrics."""
    port, admin = free_port(), free_port()
    command = [sys.executable, "-m", "kvshelf", "proxy", "--port", str(port)]
    command += ["--admin", str(admin)]
    command += [part for url in prefill for part in ("--prefill", url)]
    command += [part for url in decode for part in ("--decode", url)]
    if store is not None:
        command += ["--store", store]
    with process(command, log) as running:
        probed = f"http://127.0.0.1:{admin}"
        wait_until_healthy(probed, running, log)
        yield f"http://127.0.0.1:{port}", probed


@contextmanager
def bucket(folder: Path, latency: float) -> Iterator[Store]:
    """Serve a folder as an S3 bucket whose answers are late; yields it as a store.

    Parameters
    ----------
    folder : Path
    latency : float
        Seconds that each request takes longer.
    """
    from benchmarks.proxy import DelayingProxy
    from benchmarks.servers import BUCKET, S3Server

    with S3Server(folder) as server, DelayingProxy("127.0.0.1", server.port, latency) as link:
        yield Store(f"s3://{BUCKET}/kv", S3Server.options(link.port))


def metrics(url: str) -> dict[str, float]:
    """Return the sums of a server's metrics: by name, and by name and source or outcome."""
    with DIRECT.open(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        detail = re.search(r'(?:source|outcome)="(\w+)"', labels)
        for key in {name, f"{name}/{detail[1]}" if detail else name}:
            sums[key] = sums.get(key, 0.0) + float(value)
    return sums
