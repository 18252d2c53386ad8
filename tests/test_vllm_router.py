"""vLLM's own router before engines without a model: what it makes of kvshelf's params.

It is the real one, in a process of its own. What engines answer and get is made and read by the
product.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Send

from kvshelf.vllm.handover import (
    Handover,
    asks_for_handover,
    no_handover,
    read_bare,
    read_handover,
)
from tests.support.servers import free_port
from tests.support.vllm_router import routing
from tests.test_example_proxy import (
    EVENTS,
    WAIT,
    WHOLE,
    Engine,
    answer,
    bodies,
    decodes,
    says,
    serving,
)

pytestmark = pytest.mark.real

HANDOVER = Handover(b"n" * 32, 300, b"k" * 32, 44, "0f" * 16)
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "p"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
}
ASKING = {"model": "tiny", "max_tokens": 8}


class Prefill(Engine):
    """An engine that prefills, and promises what a test says."""

    def __init__(self) -> None:
        super().__init__(Prefill.prefills)
        self.params: dict[str, Any] | None = HANDOVER.params()

    async def prefills(self, body: Any, receive: Receive, send: Send) -> None:
        choice = {"index": 0, "text": "a", "message": {"role": "assistant", "content": "a"}}
        answered = {"id": "1", "choices": [choice], "kv_transfer_params": self.params}
        await answer(send, json.dumps(answered).encode())


class Rig:
    """The router with two engines on each side, and a third one to prefill that is away."""

    def __init__(self, prefill: list[Prefill], decode: list[Engine], url: str) -> None:
        self.prefill, self.decode, self.url = prefill, decode, url
        self.client = httpx.Client(timeout=WAIT, trust_env=False)

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """Send a request, as often as it takes to reach an engine that is there."""
        for engine in self.prefill + self.decode:
            engine.asked.clear()
        body = ASKING | REQUESTS[path] | fields
        for _ in range(2):
            found = self.client.post(self.url + path, json=body)
            if "failed: error sending" not in found.text:
                break
        return found


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    prefill, decode = [Prefill(), Prefill()], [Engine(decodes), Engine(decodes)]
    log = tmp_path_factory.mktemp("router") / "log"
    with serving(*prefill, *decode) as urls:
        away = f"http://127.0.0.1:{free_port()}"
        with routing([*urls[:2], away], urls[2:], log) as url:
            rig = Rig(prefill, decode, url)
            with rig.client:
                yield rig


@pytest.fixture(autouse=True)
def as_before(rig: Rig) -> None:
    for engine in rig.prefill:
        engine.params, engine.behaviour = HANDOVER.params(), Prefill.prefills
    for other in rig.decode:
        other.behaviour = decodes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_a_handover_passes_it_untouched(rig: Rig, path: str, stream: bool) -> None:
    found = rig.post(path, stream=stream)
    assert found.content == (b"".join(EVENTS) if stream else WHOLE)
    [first], [second] = bodies(list(rig.prefill)), bodies(rig.decode)
    assert asks_for_handover(first["kv_transfer_params"])
    assert (first["max_tokens"], first["min_tokens"], first["stream"]) == (1, 1, False)
    assert read_handover(second["kv_transfer_params"]) == HANDOVER


@pytest.mark.parametrize("params", [no_handover(), None])
def test_where_nothing_is_promised_the_second_engine_learns_it(
    rig: Rig, params: dict[str, Any] | None
) -> None:
    """A producer of another kind answers nothing: only a consumer waits then, and for chunks."""
    for engine in rig.prefill:
        engine.params = params
    assert rig.post().content == WHOLE
    [second] = bodies(rig.decode)
    answered = second["kv_transfer_params"]
    assert answered == params and read_handover(answered) is None
    assert (read_bare(answered, expected=True) is None) == (params is not None)
    assert read_bare(answered, expected=False) is None


@pytest.mark.parametrize("status", [500, 503])
def test_a_first_leg_that_fails_is_the_clients_error(rig: Rig, status: int) -> None:
    """The router sends neither leg again: clients do."""
    for engine in rig.prefill:
        engine.behaviour = says(b"{}", status)
    assert rig.post().status_code == 500
    assert len(bodies(list(rig.prefill))) == 1 and not bodies(rig.decode)


def test_a_request_whose_engine_is_away_is_an_error_and_the_next_one_is_not(rig: Rig) -> None:
    url, body = f"{rig.url}/v1/completions", ASKING | {"prompt": "p"}
    statuses = [rig.client.post(url, json=body).status_code for _ in range(3)]
    assert sorted(statuses) == [200, 200, 500]
