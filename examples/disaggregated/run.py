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
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.make_model import make_model
from openai_server import DOCUMENT, QUESTIONS, ask, engine_command, free_port, running

PROXY = Path(__file__).with_name("proxy.py")
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
