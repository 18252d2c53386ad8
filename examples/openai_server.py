"""An OpenAI-compatible server with a shelf: ask it twice about one document.

The connector is one argument of the server. The document of the first request goes to the shelf;
the second request, with another question behind the same document, computes only what is behind the
document's last whole chunk of 256 tokens. Run it twice on one shelf, and the first request
loads the document, too.

    python examples/openai_server.py --shelf ~/my-shelf

Without ``--model`` a tiny model with random weights and a tokenizer with a token for each byte is
made on the spot; its answers are noise. The server's log is in ``build/openai_server.log``.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from models.make_model import make_model
from openai import OpenAI

DOCUMENT = "A shelf keeps what one engine has read, so that others need not. " * 30
QUESTIONS = ("What does a shelf keep?", "Who need not read it again?")


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def engine_command(model: str, shelf: str, port: int, role: str = "kv_both") -> list[str]:
    """Return the command that serves a model; ``vllm serve MODEL`` takes the same arguments."""
    connector = {
        "kv_connector": "KVShelfConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": shelf},
    }
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--served-model-name", "model", "--kv-transfer-config", json.dumps(connector)),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20)),
        *("--gpu-memory-utilization", "0.1"),
        # The usage in answers says how many tokens came from a cache. Without vLLM's own prefix
        # cache, that is the shelf.
        *("--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
    ]


@contextmanager
def running(command: list[str], url: str, log: Path) -> Iterator[None]:
    """Run a server from its first healthy answer on; end it and all that it started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 300
            while not is_healthy(url):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"a server did not start: see {log}")
                time.sleep(0.2)
            yield
        finally:
            for which in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, which)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(20)


def is_healthy(url: str) -> bool:
    """Return whether a server answers; it is on this machine, so no HTTP proxy leads to it."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    return False


def ask(url: str, prompt: str) -> str:
    """Send a prompt, print how much of it was not computed, and return the answer."""
    http = httpx.Client(timeout=120, trust_env=False)
    with OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
        answer = client.completions.create(
            model="model", prompt=prompt, max_tokens=8, temperature=0
        )
    details = answer.usage.prompt_tokens_details
    loaded = details.cached_tokens if details else 0
    print(
        f"{answer.usage.prompt_tokens} prompt tokens, {loaded or 0} of them from the shelf",
        flush=True,
    )
    return answer.choices[0].text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server with a shelf.")
    parser.add_argument("--shelf", required=True, help="directory or URL that engines share")
    parser.add_argument("--model", help="a model; default: a tiny one with random weights")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model = options.model or make_model("build/models/bytes", "tiny", tokenizer=True, replace=True)
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = engine_command(str(model), options.shelf, port)
    with running(command, url, Path("build/openai_server.log")):
        for question in QUESTIONS:
            ask(url, DOCUMENT + question)


if __name__ == "__main__":
    main()
