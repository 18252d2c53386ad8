"""vLLM's router from the package index, as a process before engines."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tests.support.servers import free_port
from tests.support.waiting import LONG, until


@contextlib.contextmanager
def routing(
    prefill: Sequence[str], decode: Sequence[str], log: Path, *arguments: str
) -> Iterator[str]:
    """Run a router before engines that prefill and decode; yields its URL."""
    if find_spec("vllm_router") is None:
        pytest.skip("vllm-router is not installed")
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--policy", "round_robin", *arguments]
    for side, urls in (("--prefill", prefill), ("--decode", decode)):
        for url in urls:
            command += [side, url]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        router = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:

        def ready() -> bool:
            assert router.poll() is None, log.read_text()[-2000:]
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{url}/health", trust_env=False, timeout=LONG).is_success
            return False

        until(ready, "the router")
        yield url
    finally:
        router.terminate()
        router.wait(LONG)
