"""Prefill in one engine, decode in another: the KV of prompts is handed over by the shelf.

An engine that prefills and one that decodes share a shelf and nothing else; ``proxy.py`` is before
them. The engine that decodes loads whole prompts. In the end it is asked the same without a
hand-over, and the answers are compared.

    python examples/disaggregated/run.py
    python examples/disaggregated/run.py --shelf s3://bucket/kv

Logs are in ``build/disaggregated``; Ctrl-C ends all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.make_model import make_model

PROXY = Path(__file__).with_name("proxy.py")
LOGS = Path("build/disaggregated")
DOCUMENT = "A shelf keeps what one engine has read, so that others need not. " * 30
QUESTIONS = ("What does a shelf keep?", "Who need not read it again?")


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def engine_command(model: str, shelf: str, port: int, role: str) -> list[str]:
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
    """Start two engines and the proxy, and ask them."""
    parser = argparse.ArgumentParser(description="One engine prefills, another one decodes.")
    parser.add_argument("--shelf", help="directory or URL; default: a temporary directory")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model = str(make_model("build/models/bytes", "tiny", tokenizer=True))
    with ExitStack() as started:
        shelf = options.shelf or started.enter_context(tempfile.TemporaryDirectory())
        ports = {role: free_port() for role in ("kv_producer", "kv_consumer", "proxy")}
        urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
        for role, port in ports.items():
            command = [sys.executable, str(PROXY), "--port", str(port)]
            command += ["--prefill", urls["kv_producer"], "--decode", urls["kv_consumer"]]
            if role != "proxy":
                print(f"an engine starts as {role} …", flush=True)
                command = engine_command(model, shelf, port, role)
            started.enter_context(running(command, urls[role], LOGS / f"{role}.log"))
        prompts = [DOCUMENT + question for question in QUESTIONS]
        print("through the proxy:")
        answers = [ask(urls["proxy"], prompt) for prompt in prompts]
        print("the engine that decodes, on its own:")
        equal = answers == [ask(urls["kv_consumer"], prompt) for prompt in prompts]
        print(f"the answers are equal: {equal}")


if __name__ == "__main__":
    main()
