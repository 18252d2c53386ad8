"""An OpenAI-compatible server with a shelf: ask it twice about one document.

The connector is one argument of the server. The document of the first request goes to the shelf;
the second request, with another question behind the same document, computes only what is behind the
document's last whole chunk of 256 tokens. Run it twice on one shelf, and the first request
loads the document, too.

    python examples/openai_server.py --shelf /tmp/my-shelf

Without ``--model`` a tiny model with random weights and a tokenizer with a token for each byte is
made on the spot; its answers are noise. The server's log is in ``build/openai_server.log``.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
from models.make_model import make_model
from openai import OpenAI

DOCUMENT = "A shelf keeps what one engine has read, so that others need not. " * 30
QUESTIONS = ("What does a shelf keep?", "Who need not read it again?")


def server_command(model: str, shelf: Path, port: int) -> list[str]:
    """Return the command that serves a model; ``vllm serve MODEL`` takes the same arguments."""
    connector = {
        "kv_connector": "KVShelfConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(shelf)},
    }
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--kv-transfer-config", json.dumps(connector)),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20)),
        *("--gpu-memory-utilization", "0.1"),
        # The usage in answers says how many tokens came from a cache. Without vLLM's own prefix
        # cache, that is the shelf.
        *("--enable-prompt-tokens-details", "--no-enable-prefix-caching"),
    ]


def main() -> None:
    """Start the server, ask it, and end it."""
    parser = argparse.ArgumentParser(description="An OpenAI-compatible server with a shelf.")
    parser.add_argument("--shelf", type=Path, required=True, help="directory that engines share")
    parser.add_argument("--model", help="a model with a tokenizer")
    options = parser.parse_args()
    place = Path("build/models/tiny-with-tokenizer")
    model = options.model or str(make_model(place, "tiny", tokenizer=True, replace=True))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    # The server is on this machine: a proxy that the environment names would not reach it.
    http = httpx.Client(timeout=120, trust_env=False)

    Path("build").mkdir(exist_ok=True)
    with (
        open("build/openai_server.log", "w") as log,
        subprocess.Popen(
            server_command(model, options.shelf.absolute(), port), stdout=log, stderr=log
        ) as server,
    ):
        try:
            deadline = time.monotonic() + 300
            while True:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not start: see build/openai_server.log")
                try:
                    http.get(f"{url}/health").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.2)
            client = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
            for question in QUESTIONS:
                answer = client.completions.create(
                    model=model, prompt=DOCUMENT + question, max_tokens=8, temperature=0
                )
                details = answer.usage.prompt_tokens_details
                loaded = details.cached_tokens if details else 0
                tokens = answer.usage.prompt_tokens
                print(f"{tokens} prompt tokens, {loaded or 0} of them from the shelf", flush=True)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
