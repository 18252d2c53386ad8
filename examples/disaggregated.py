"""Prefill in one engine, decode in another: the KV of prompts is handed over by the shelf.

An engine that prefills and one that decodes share a shelf and nothing else; ``kvshelf proxy`` is
before them. Each prompt goes to the first one, which answers with one token and with
``kv_transfer_params``, and then, with these, to the second one. That one loads the whole prompt and
computes its last token once more, from which the answer goes on. In the end it is asked the same
without a hand-over, and the answers are compared.

    python examples/disaggregated.py
    python examples/disaggregated.py --shelf s3://bucket/kv

It needs the extra ``proxy``. Logs are in ``build/disaggregated``; Ctrl-C ends all processes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from models.make_model import make_model
from openai_server import DOCUMENT, QUESTIONS, ask, engine_command, free_port, running

LOGS = Path("build/disaggregated")


def main() -> None:
    """Start two engines and the proxy, and ask them."""
    parser = argparse.ArgumentParser(description="One engine prefills, another one decodes.")
    parser.add_argument("--shelf", help="directory or URL; default: a temporary directory")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    model = str(make_model("build/models/bytes", "tiny", tokenizer=True, replace=True))
    with ExitStack() as started:
        shelf = options.shelf or started.enter_context(tempfile.TemporaryDirectory())
        urls = {}
        for role in ("kv_producer", "kv_consumer"):
            print(f"an engine starts as {role} …", flush=True)
            urls[role] = f"http://127.0.0.1:{(port := free_port())}"
            command = engine_command(model, shelf, port, role)
            started.enter_context(running(command, urls[role], LOGS / f"{role}.log"))
        port, admin = free_port(), free_port()
        command = [sys.executable, "-m", "kvshelf", "proxy", "--port", str(port)]
        command += ["--prefill", urls["kv_producer"], "--decode", urls["kv_consumer"]]
        command += ["--admin", str(admin)]
        started.enter_context(running(command, f"http://127.0.0.1:{admin}", LOGS / "proxy.log"))
        prompts = [DOCUMENT + question for question in QUESTIONS]
        print("through the proxy:")
        answers = [ask(f"http://127.0.0.1:{port}", prompt) for prompt in prompts]
        print("the engine that decodes, on its own:")
        equal = answers == [ask(urls["kv_consumer"], prompt) for prompt in prompts]
        print(f"the answers are equal: {equal}")


if __name__ == "__main__":
    main()
