"""Engines and the proxy before them, as processes that end with a ``with`` block.

Each has a process group of its own, so that what it started ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers import free_port

START_SECONDS, STOP_SECONDS = 240, 20


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
            for which in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, which)
                with suppress(subprocess.TimeoutExpired):
                    running.wait(STOP_SECONDS)


@contextmanager
def server(command: Sequence[str], url: str, log: Path, **variables: str) -> Iterator[None]:
    """Run a command as :func:`process` does; begin the block when its ``/health`` answers."""
    with process(command, log, **variables) as running:
        deadline = time.monotonic() + START_SECONDS
        while not answers(url):
            if running.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"a server did not start; its log is {log}")
            time.sleep(0.1)
        yield


def answers(url: str) -> bool:
    """Return whether a server is there; it is on this machine, so no HTTP proxy leads to it."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    return False


def engine_command(model: Path, port: int, connector: dict[str, Any]) -> list[str]:
    """Return the command of an engine."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "4096", "--max-num-seqs", "16"]
    command += ["--kv-cache-memory-bytes", str(8 << 20), "--gpu-memory-utilization", "0.05"]
    command += ["--chat-template", "{% for m in messages %}{{ m.content }}\n{% endfor %}"]
    command += ["--kv-transfer-config", json.dumps(connector)]
    return command


@contextmanager
def engines(roles: Sequence[str], model: Path, shelf: str, logs: Path) -> Iterator[list[str]]:
    """Start engines one after the other; yields their URLs."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as running:
        urls = []
        for number, role in enumerate(roles):
            port = free_port()
            urls.append(f"http://127.0.0.1:{port}")
            connector = {
                "kv_connector": "KVShelfConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"shared_storage_path": shelf},
            }
            command = engine_command(model, port, connector)
            log = logs / f"engine-{number}-{role}.log"
            bound = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)])}
            running.enter_context(server(command, urls[-1], log, **bound))
        yield urls


@contextmanager
def proxy(
    prefill: Sequence[str], decode: Sequence[str], log: Path, *options: str
) -> Iterator[tuple[str, str]]:
    """Start ``kvshelf proxy`` before engines; yields its URL and that of its health and metrics."""
    port, admin = free_port(), free_port()
    command = [sys.executable, "-m", "kvshelf", "proxy", "--port", str(port)]
    command += ["--admin", str(admin), *options]
    command += [part for url in prefill for part in ("--prefill", url)]
    command += [part for url in decode for part in ("--decode", url)]
    with server(command, f"http://127.0.0.1:{admin}", log):
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"


def metrics(url: str) -> dict[str, float]:
    """Return the sums of a server's metrics: by name, and by name and source or outcome."""
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            detail = sample.labels.get("source") or sample.labels.get("outcome")
            for key in {sample.name, f"{sample.name}/{detail}" if detail else sample.name}:
                sums[key] = sums.get(key, 0.0) + sample.value
    return sums
