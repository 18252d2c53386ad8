"""The proxy of ``examples/disaggregated`` before engines without a model, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from examples.disaggregated import proxy as example
from tests.support.servers import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.real

WAIT = 20.0
PARAMS = {"kvshelf_version": 1, "kvshelf_key": "cd" * 32, "kvshelf_tail": 4}
PROMISE = json.dumps({"choices": [], "kv_transfer_params": PARAMS}).encode()
#: What an engine that decodes answers: the spaces are not those of json.dumps.
WHOLE = b'{"id":"1",  "choices":[{"text":"\xc3\xa9 ok"}]}\n'
EVENTS = [*(b'data: {"text":"%d"}\n\n' % number for number in range(3)), b"data: [DONE]\n\n"]
ASKING = {"model": "tiny", "prompt": "p", "max_tokens": 8}
PATH = "/v1/completions"


class Engine:
    """An application that records what it is sent, and behaves as told."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.asked: list[tuple[str, Headers, Any]] = []
        self.health = 200
        self.saw_close = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        raw = await request.body()
        if scope["path"] == "/health":
            await answer(send, b"", self.health)
            return
        body = json.loads(raw) if raw else None
        self.asked.append((scope["path"], request.headers, body))
        await self.behaviour(self, body, receive, send)


Behaviour = Callable[[Engine, Any, Receive, Send], Awaitable[None]]


async def answer(send: Send, body: bytes, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-engine", b"1")]})
    await send({"type": "http.response.body", "body": body})


async def stream(send: Send, *events: bytes) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})


def says(body: bytes, status: int = 200) -> Behaviour:
    return lambda engine, asked, receive, send: answer(send, body, status)


async def decodes(engine: Engine, body: Any, receive: Receive, send: Send) -> None:
    if body is None or not body.get("stream"):
        await answer(send, WHOLE)
    else:
        await stream(send, *EVENTS)
        await send({"type": "http.response.body", "body": b""})


async def dies(engine: Engine, body: Any, receive: Receive, send: Send) -> None:
    """End the connection in the middle of a stream."""
    await stream(send, EVENTS[0])


async def hangs(engine: Engine, body: Any, receive: Receive, send: Send) -> None:
    if body["stream"]:
        await stream(send, EVENTS[0])
    while (await receive())["type"] != "http.disconnect":
        pass
    engine.saw_close.set()


@contextlib.contextmanager
def serving(*apps: ASGIApp) -> Iterator[list[str]]:
    """Serve applications on a thread; yields their URLs."""
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in apps]
        quiet: dict[str, Any] = {"log_level": "critical", "ws": "none"}
        servers = [
            uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **quiet))
            for app in apps
        ]

        async def serve() -> None:
            pairs = zip(servers, listeners, strict=True)
            await asyncio.gather(*(server.serve([listener]) for server, listener in pairs))

        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            until(lambda: all(server.started for server in servers) or not thread.is_alive())
            yield [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        finally:
            for server in servers:
                server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


@dataclass
class Rig:
    """A running proxy with two engines on each side."""

    prefill: list[Engine]
    decode: list[Engine]
    proxy: example.Proxy
    url: str
    client: httpx.Client

    def post(self, path: str = PATH, **fields: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=ASKING | fields)


@pytest.fixture
def rig() -> Iterator[Rig]:
    engines = [Engine(does) for does in (says(PROMISE), says(PROMISE), decodes, decodes)]
    with httpx.Client(timeout=WAIT, trust_env=False) as client, serving(*engines) as urls:
        proxy = example.Proxy(urls[:2], urls[2:])
        with serving(proxy.app) as [url]:
            yield Rig(engines[:2], engines[2:], proxy, url, client)


def bodies(engines: list[Engine]) -> list[Any]:
    return [body for engine in engines for _, _, body in engine.asked]


def test_first_leg_asks_for_one_token_and_the_second_is_the_clients_own(rig: Rig) -> None:
    own = {"temperature": 0.5, "cache_salt": "s", "response_format": {"type": "text"}}
    costs = {"stream": True, "stream_options": {}, "n": 3, "logprobs": 2, "min_tokens": 5}
    rig.client.headers["authorization"] = "Bearer key"
    rig.post(**own, **costs)
    asks = {"stream": False, "n": 1, "max_tokens": 1}
    asks |= {"kv_transfer_params": {"do_remote_decode": True}}  # type: ignore[dict-item]
    assert bodies(rig.prefill) == [ASKING | own | asks]
    assert bodies(rig.decode) == [ASKING | own | costs | {"kv_transfer_params": PARAMS}]
    chat = {"messages": [{"role": "user"}], "max_completion_tokens": 9, "tools": [{}]}
    rig.post("/v1/chat/completions", **chat, top_logprobs=3)
    assert rig.prefill[1].asked[0][2] == ASKING | chat | asks | {"max_completion_tokens": 1}
    for path, headers, _ in (one for engine in rig.prefill + rig.decode for one in engine.asked):
        assert path in (PATH, "/v1/chat/completions")
        assert headers["authorization"] == "Bearer key"


@pytest.mark.parametrize(
    ("legs", "fields"),
    [
        *(
            (2, {"prompt": ["p"]}),
            (2, {"prompt": [1, 2]}),
            (2, {"echo": True}),
            (2, {"logprobs": 1}),
        ),
        *((1, {"prompt": ["p", "q"]}), (1, {"prompt": [[1], [2]]}), (1, {"prompt_embeds": "x"})),
        *((1, {"prompt_logprobs": 0}), (1, {"echo": True, "logprobs": 0})),
        (1, {"use_beam_search": True}),
    ],
    ids=str,
)
def test_only_what_can_be_handed_over_has_two_legs(
    rig: Rig, legs: int, fields: dict[str, Any]
) -> None:
    rig.post(**fields)
    assert len(bodies(rig.prefill)) == legs - 1
    params = {"kv_transfer_params": PARAMS} if legs == 2 else {}
    assert bodies(rig.decode) == [ASKING | fields | params]


def test_one_token_is_answered_by_a_prefill(rig: Rig) -> None:
    rig.post(max_tokens=1, n=2)
    rig.post("/v1/chat/completions", max_completion_tokens=1)
    assert bodies(rig.prefill)[0] == ASKING | {"max_tokens": 1, "n": 2}
    assert (len(bodies(rig.prefill)), bodies(rig.decode)) == (2, [])
    for engine in rig.prefill:
        engine.behaviour = says(b"", 503)
    assert rig.post(max_tokens=1).content == WHOLE


@pytest.mark.parametrize("stream", [False, True])
def test_answers_come_byte_for_byte(rig: Rig, stream: bool) -> None:
    found = rig.post(stream=stream)
    assert found.content == (b"".join(EVENTS) if stream else WHOLE)
    assert stream or found.headers["x-engine"] == "1"
    assert rig.client.get(f"{rig.url}/v1/models").content == WHOLE


def test_events_are_not_held_back_and_a_stream_that_ends_early_is_not_complete(rig: Rig) -> None:
    rig.decode[0].behaviour = rig.decode[1].behaviour = dies
    with rig.client.stream("POST", rig.url + PATH, json=ASKING | {"stream": True}) as found:
        pieces = found.iter_raw()
        assert next(pieces) == EVENTS[0]
        with pytest.raises(httpx.RemoteProtocolError):
            next(pieces)
    assert len(bodies(rig.decode)) == 1


def test_engines_are_asked_in_turn(rig: Rig) -> None:
    for _ in range(4):
        rig.post()
    assert [len(engine.asked) for engine in rig.prefill + rig.decode] == [2] * 4


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("failure", ["down", "503"])
def test_another_engine_is_asked_where_one_is_away(rig: Rig, side: str, failure: str) -> None:
    gone, other = getattr(rig, side)
    gone.behaviour = says(b"", 503)
    if failure == "down":
        getattr(rig.proxy, side).urls[0] = f"http://127.0.0.1:{free_port()}"
    assert [rig.post().content for _ in range(3)] == [WHOLE] * 3
    assert len(other.asked) == 3
    assert all(body["kv_transfer_params"] == PARAMS for body in bodies(rig.decode))
    assert len(getattr(rig.proxy, side).aside) == (failure == "down")


@pytest.mark.parametrize(
    "failure", [says(b"", 503), says(b"", 400), dies, says(b'{"kv_transfer_params": null}')]
)
def test_without_a_prefill_the_decode_engine_does_it_all(rig: Rig, failure: Behaviour) -> None:
    for engine in rig.prefill:
        engine.behaviour = failure
    assert rig.post().content == WHOLE
    assert bodies(rig.decode) == [ASKING]


def test_errors(rig: Rig) -> None:
    """Those of engines come as they are; others are the proxy's."""
    rig.decode[0].behaviour = rig.decode[1].behaviour = says(b"of an engine", 404)
    assert (rig.post().status_code, rig.post().content) == (404, b"of an engine")
    rig.decode[0].behaviour = rig.decode[1].behaviour = says(b"", 503)
    assert rig.post().json()["error"]["code"] == 503
    asked = Counter(map(str, bodies(rig.decode)))
    refused = [{"kv_transfer_params": PARAMS}, {"vllm_xargs": {"kv_transfer_params": PARAMS}}]
    assert [rig.post(**fields).status_code for fields in refused] == [400, 400]
    for raw in (b"", b"[]", b'{"prompt": ', b'{"max_tokens": "\xff"}', b"[" * 100_000):
        assert rig.client.post(rig.url + PATH, content=raw).status_code == 400
    assert rig.client.get(f"{rig.url}/other").status_code == 404
    assert Counter(map(str, bodies(rig.decode))) == asked


@pytest.mark.parametrize("leg", ["prefill", "decode", "stream"])
def test_engine_sees_that_the_client_left(rig: Rig, leg: str) -> None:
    side = rig.prefill if leg == "prefill" else rig.decode
    side[0].behaviour = hangs
    body = json.dumps(ASKING | {"stream": leg == "stream"}).encode()
    host, port = rig.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), WAIT) as connection:
        head = b"POST %s HTTP/1.1\r\nHost: p\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % (PATH.encode(), len(body)) + body)
        until(lambda: bool(side[0].asked))
        assert leg != "stream" or connection.recv(1 << 16)
    assert side[0].saw_close.wait(WAIT)
    assert leg != "prefill" or not bodies(rig.decode)


@pytest.mark.parametrize(("decoding", "status"), [([200, 503], 200), ([503, 503], 503)])
def test_health(rig: Rig, decoding: list[int], status: int) -> None:
    rig.prefill[0].health = 503
    for engine, health in zip(rig.decode, decoding, strict=True):
        engine.health = health
    found = rig.client.get(f"{rig.url}/health")
    assert found.status_code == status
    assert list(found.json().values()) == [False, True, *(one == 200 for one in decoding)]
