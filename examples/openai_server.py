"""Serve with a shelf: start ``vllm serve``, and ask it twice about the same document.

Everything that matters is in :func:`server_command`; the rest waits for the server, sends two
requests and prints how many prompt tokens the second one did not have to compute.

    python examples/openai_server.py --shelf /tmp/my-shelf

Without ``--model`` a tiny model with random weights and a byte-level tokenizer is made on the spot;
its answers are noise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from make_model import make_model

START_SECONDS = 300


def server_command(model: str, shelf: str, port: int) -> list[str]:
    """Return the command that serves `model` with a shelf."""
    try:
        version("vllm")
        launcher = ["vllm", "serve", model]
    except PackageNotFoundError:
        # The command of the CPU build asks for a package that has another name there.
        launcher = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    connector = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": shelf},
    }
    return [
        *launcher,
        *("--kv-transfer-config", json.dumps(connector)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", "4096"),
        *("--kv-cache-memory-bytes", str(256 << 20)),
        *("--gpu-memory-utilization", "0.1"),
        "--enforce-eager",
        # Tells how many prompt tokens came from a cache, the shelf's among them.
        "--enable-prompt-tokens-details",
        # Only to show the shelf: without a prefix cache of vLLM's own, hits are the shelf's.
        "--no-enable-prefix-caching",
    ]


def post(url: str, body: dict[str, Any]) -> Any:
    """Send a JSON request and return the JSON answer."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def wait_for(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}")
        with suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the server did not answer within {START_SECONDS} s")
        time.sleep(0.2)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Serve with a shelf.")
    parser.add_argument("--shelf", required=True, help="directory that engines share")
    parser.add_argument("--model", help="a model with a tokenizer")
    parser.add_argument("--port", type=int, help="default: any free one")
    options = parser.parse_args()
    model = options.model or str(
        make_model(Path("build/models/tiny-with-tokenizer"), "tiny", tokenizer=True, replace=True)
    )
    port = options.port
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    server = subprocess.Popen(
        server_command(model, str(Path(options.shelf).absolute()), port),
        env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
        start_new_session=True,
    )
    try:
        wait_for(server, url)
        document = "A shelf keeps what one engine has read, so that others need not. " * 30
        for question in ("What does a shelf keep?", "Who need not read it again?"):
            answer = post(
                f"{url}/v1/completions",
                {
                    "model": model,
                    "prompt": document + question,
                    "max_tokens": 8,
                    "temperature": 0,
                },
            )
            usage = answer["usage"]
            details = usage.get("prompt_tokens_details") or {}
            print(
                f"{usage['prompt_tokens']} prompt tokens,"
                f" {details.get('cached_tokens') or 0} of them from the shelf",
                flush=True,
            )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


if __name__ == "__main__":
    main()
