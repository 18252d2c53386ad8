"""vLLM's own router between two engines that prefill and two that decode, on one shelf.

Every process is as users start it. Answers are compared with those of an engine that computes
everything: one that prefills, asked with a salt of its own.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.models.make_model import make_model
from tests.support.servers import BUCKET, command, free_port, rclone_s3
from tests.support.vllm_router import routing
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.real]

WAIT = 120.0
PATHS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
#: The router takes an engine out that does not answer, and back in, within a few seconds.
WATCHING = [
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
    *("--health-success-threshold", "1", "--disable-circuit-breaker"),
]
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Server:
    """An engine behind vLLM's API server."""

    def __init__(self, model: str, shelf: str, storage: dict[str, Any], role: str, log: Path):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        options = {"shared_storage_path": shelf, "storage_options": storage}
        connector: dict[str, Any] = {"kv_connector": "KVShelfConnector", "kv_role": role}
        connector |= {"kv_connector_extra_config": options}
        self._command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--served-model-name", "model", "--kv-transfer-config", json.dumps(connector)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"),
            *("--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 << 20)),
            *("--gpu-memory-utilization", "0.1", "--chat-template", CHAT),
            # All that is not computed comes from the shelf.
            *("--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
        ]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            with suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health", trust_env=False, timeout=WAIT).is_success
            return False

        until(ready, f"an engine, see {self.log}", 600)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def running(self) -> int:
        """How many requests it has."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False, timeout=WAIT).text
        return sum(
            int(float(count))
            for count in re.findall(
                r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.M
            )
        )


class Client:
    """What a user does."""

    def __init__(self) -> None:
        self._http = httpx.Client(timeout=WAIT, trust_env=False)
        self._random = random.Random(1)

    def text(self, length: int) -> str:
        return "".join(self._random.choices(string.ascii_lowercase, k=length))

    def body(self, path: str, text: str, **fields: Any) -> dict[str, Any]:
        content = {"prompt": text, "messages": [{"role": "user", "content": text}]}[PATHS[path]]
        body = {"model": "model", PATHS[path]: content, "max_tokens": 8, "temperature": 0}
        if fields.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return body | fields

    def ask(self, url: str, path: str, text: str, **fields: Any) -> tuple[str, int, int] | None:
        """Return the answer, how many tokens the prompt has, and how many were loaded.

        None where the router says that an engine is away.
        """
        found = self._http.post(url + path, json=self.body(path, text, **fields))
        if found.status_code == 500:
            return None
        assert found.is_success, found.text
        parts = [found.text]
        if fields.get("stream"):
            parts = re.findall(r"^data: (\{.*)$", found.text, re.M)
        answer, usage = "", None
        for part in map(json.loads, parts):
            for choice in part["choices"]:
                said = choice.get("delta") or choice.get("message") or choice
                answer += said.get("text") or said.get("content") or ""
            usage = part.get("usage") or usage
        assert usage is not None
        details = usage["prompt_tokens_details"] or {}
        return answer, usage["prompt_tokens"], details.get("cached_tokens") or 0

    def leave(self, url: str, path: str, text: str) -> None:
        """Ask for a long answer, and leave behind its first event."""
        body = self.body(path, text, stream=True, max_tokens=2000, ignore_eos=True)
        with self._http.stream("POST", url + path, json=body) as found:
            next(found.iter_raw())


class Rig:
    """The router, the engines, and a client."""

    def __init__(self, prefill: list[Server], decode: list[Server], url: str) -> None:
        self.prefill, self.decode, self.url = prefill, decode, url
        self.client = Client()

    def check(self, *, length: int = 700, path: str = "/v1/completions", **fields: Any) -> bool:
        """Ask through the router; whether it had an engine. All of the prompt must be loaded."""
        text = self.client.text(length)
        found = self.client.ask(self.url, path, text, **fields)
        if found is None:
            return False
        own = self.client.ask(self.prefill[-1].url, path, text, cache_salt="of its own", **fields)
        assert own is not None
        assert found == (own[0], own[1], own[1])
        assert own[2] == 0
        return True

    def until_all_are_served(self) -> None:
        """Ask until as many requests in a row succeed as there are engines."""
        until(lambda: all(self.check() for _ in range(4)), "requests that are all served")


@pytest.fixture(params=["directory", "bucket"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    model = str(make_model(tmp_path / "model", "tiny", tokenizer=True))
    with ExitStack() as started:
        shelf, storage = str(tmp_path / "kv"), {}
        if request.param == "bucket":
            pytest.importorskip("obstore")
            if command("rclone") is None:
                pytest.skip("rclone is not installed")
            storage = started.enter_context(rclone_s3(tmp_path / "bucket")).options()
            shelf = f"s3://{BUCKET}/kv"
        servers = []
        for name in ("kv_producer 0", "kv_producer 1", "kv_consumer 0", "kv_consumer 1"):
            server = Server(model, shelf, storage, name.split()[0], tmp_path / f"{name}.log")
            started.callback(server.kill)
            servers.append(server)
        for server in servers:
            server.wait_ready()
        prefill, decode = servers[:2], servers[2:]
        urls = [server.url for server in servers]
        with routing(urls[:2], urls[2:], tmp_path / "router.log", *WATCHING) as url:
            yield Rig(prefill, decode, url)


def test_answers_are_those_of_one_engine_whatever_happens(rig: Rig) -> None:
    for path in PATHS:
        for stream in (False, True):
            for length in (40, 1200):
                assert rig.check(path=path, length=length, stream=stream)
    # Clients that leave: the engines have nothing of them soon.
    for path in PATHS:
        rig.client.leave(rig.url, path, rig.client.text(600))
    until(lambda: not any(engine.running() for engine in rig.decode), "idle engines")
    # An engine that prefills is killed, and one that decodes, which comes back.
    rig.prefill[0].kill()
    rig.until_all_are_served()
    rig.decode[0].kill()
    rig.decode[0].start()
    rig.decode[0].wait_ready()
    rig.until_all_are_served()
