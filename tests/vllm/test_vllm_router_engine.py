"""vLLM's own router between two engines that prefill and two that decode, on one shelf.

Answers are compared with those of an engine that computes everything: one that prefills, asked with
a salt of its own. Engines are vLLM's API servers, forked where vLLM spawns, which takes half as
long.
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
from tests.support.engines import preloaded_libraries
from tests.support.servers import BUCKET, command, free_port, rclone_s3
from tests.support.vllm_router import routing
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.real]

FORKING = (
    "import multiprocessing, runpy; from vllm.utils import system_utils;"
    " system_utils.get_mp_context = lambda: multiprocessing.get_context('fork');"
    " runpy.run_module('vllm.entrypoints.openai.api_server', run_name='__main__')"
)
PATHS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
#: The router takes an engine out that does not answer, and back in, within a few seconds.
WATCHING = [
    *("--health-check-interval-secs", "1", "--health-failure-threshold", "1"),
    *("--health-success-threshold", "1", "--disable-circuit-breaker"),
]
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
HTTP = httpx.Client(timeout=120, trust_env=False)


class Server:
    """An engine behind vLLM's API server."""

    def __init__(self, model: Path, log: Path, role: str, **options: Any) -> None:
        self.url, self.log = f"http://127.0.0.1:{(port := free_port())}", log
        connector = {"kv_connector": "KVShelfConnector", "kv_role": role}
        transfer = json.dumps(connector | {"kv_connector_extra_config": options})
        self._command = [
            *(sys.executable, "-c", FORKING, "--model", str(model), "--served-model-name", "model"),
            *("--kv-transfer-config", transfer, "--host", "127.0.0.1", "--port", str(port)),
            *("--enforce-eager", "--max-model-len", "4096", "--gpu-memory-utilization", "0.1"),
            *("--kv-cache-memory-bytes", str(256 << 20), "--chat-template", CHAT),
            # All that is not computed comes from the shelf.
            *("--no-enable-prefix-caching", "--enable-prompt-tokens-details"),
        ]
        self._own = {
            "LD_PRELOAD": preloaded_libraries(),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._stores = role == "kv_producer"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | self._own,
            )

    def wait_ready(self) -> None:
        """Wait until it answers, and a producer promises something: it knows its namespace."""

        def ready() -> bool:
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            with suppress(httpx.HTTPError):
                asked = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
                found = HTTP.post(self.url + "/v1/completions", json=body_of(text(40)) | asked)
                return self._stores <= ("kvshelf_key" in found.json()["kv_transfer_params"])
            return False

        until(ready, f"an engine, see {self.log}", 600)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def count(self, name: str) -> float:
        """Return the sum of its metrics whose names match."""
        text = HTTP.get(f"{self.url}/metrics").text
        return sum(map(float, re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)))


def text(length: int) -> str:
    return "".join(random.choices(string.ascii_lowercase, k=length))


def body_of(said: str, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    content = said if path == "/v1/completions" else [{"role": "user", "content": said}]
    body = {"model": "model", PATHS[path]: content, "max_tokens": 8, "temperature": 0}
    return body | {"return_token_ids": True} | fields


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[list[int], int] | None:
    """Return the answer, and how many tokens the prompt has.

    None where the router says that an engine is away.
    """
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    found = HTTP.post(url + path, json=body)
    if found.status_code == 500:
        return None
    assert found.is_success, found.text
    answer, length = list[int](), 0
    for part in re.findall(r"^data: (\{.*)$", found.text, re.MULTILINE) or [found.text]:
        event = json.loads(part)
        answer += [token for one in event["choices"] for token in one.get("token_ids") or ()]
        length = (event.get("usage") or {"prompt_tokens": 0})["prompt_tokens"]
    return answer, length


class Rig:
    """The router before its engines."""

    def __init__(self, prefill: list[Server], decode: list[Server], url: str) -> None:
        self.prefill, self.decode, self.url = prefill, decode, url

    def check(self, length: int = 700, path: str = "/v1/completions", **fields: Any) -> bool:
        """Ask through the router; whether it had an engine. All of the prompt must be loaded."""
        body, before = body_of(text(length), path, **fields), self.loaded()
        found = ask(self.url, path, body)
        if found is None:
            return False
        assert len(found[0]) == 8 and found[1] >= length
        assert found == ask(self.prefill[-1].url, path, body | {"cache_salt": "of its own"})
        # vLLM computes the last token once more.
        until(lambda: self.loaded() == before + found[1], f"{found[1]} loaded tokens")
        return True

    def loaded(self) -> float:
        """Count what the engines that decode have loaded, as far as they answer."""
        total = 0.0
        for engine in self.decode:
            with suppress(httpx.HTTPError):
                total += engine.count("kvshelf_loaded_tokens_total")
        return total

    def check_all(self) -> None:
        """Ask until as many requests in a row succeed as there are engines."""
        until(lambda: all(self.check() for _ in range(4)), "requests that are all served")


@pytest.fixture(params=["directory", "bucket"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    model = make_model(tmp_path / "model", "tiny", tokenizer=True)
    with ExitStack() as started:
        options: dict[str, Any] = {"shared_storage_path": str(tmp_path / "kv")}
        if request.param == "bucket":
            pytest.importorskip("obstore")
            if command("rclone") is None:
                pytest.skip("rclone is not installed")
            server = started.enter_context(rclone_s3(tmp_path / "bucket"))
            options = {"shared_storage_path": f"s3://{BUCKET}/kv"}
            options["storage_options"] = server.options()
        engines = []
        for number in range(4):
            role = ("kv_producer", "kv_consumer")[number // 2]
            engines.append(Server(model, tmp_path / f"{role} {number}.log", role, **options))
            started.callback(engines[-1].kill)
        for engine in engines:
            engine.wait_ready()
        urls = [engine.url for engine in engines]
        with routing(urls[:2], urls[2:], tmp_path / "router.log", *WATCHING) as url:
            yield Rig(engines[:2], engines[2:], url)


def test_answers_are_those_of_one_engine_whatever_happens(rig: Rig) -> None:
    for path in PATHS:
        for stream in (False, True):
            for length in (40, 1200):
                assert rig.check(length, path, stream=stream)
    # Clients that leave behind the first event: the engines have nothing of them soon.
    for path in PATHS:
        body = body_of(text(600), path, stream=True, max_tokens=2000, ignore_eos=True)
        with HTTP.stream("POST", rig.url + path, json=body) as found:
            next(found.iter_raw())
    running = "num_requests_(?:running|waiting)"
    until(lambda: not any(engine.count(running) for engine in rig.decode), "idle engines")
    # An engine that prefills is killed, and one that decodes, which comes back.
    rig.prefill[0].kill()
    rig.check_all()
    rig.decode[0].kill()
    rig.decode[0].start()
    rig.decode[0].wait_ready()
    rig.check_all()
