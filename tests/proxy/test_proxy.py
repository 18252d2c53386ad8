"""The proxy between clients and engines, on real sockets; the engines have no model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvshelf.cli.app import app
from kvshelf.format.keys import Chunk, KeyChain, salt_group_of
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.probes import listen
from kvshelf.proxy import app as proxy_app
from kvshelf.proxy import client as proxy_client
from kvshelf.proxy import durable
from kvshelf.proxy import server as proxy_server
from kvshelf.proxy.app import make_app
from kvshelf.proxy.bodies import ClientRequest
from kvshelf.proxy.server import make_server
from kvshelf.proxy.settings import Settings
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef
from tests.proxy.stub_engines import (
    DONE,
    EVENTS,
    PARAMS,
    WAIT,
    WHOLE,
    Behaviour,
    Handler,
    StubEngine,
    breaks,
    decodes,
    fails,
    hangs,
    prefills,
)
from tests.support.filled import CHUNK, hybrid, namespace
from tests.support.servers import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.real

ASKING = {"model": "tiny", "prompt": "a secret prompt", "max_tokens": 8}


@dataclass
class Proxy:
    """A running proxy with two engines on each side."""

    prefill: list[StubEngine]
    decode: list[StubEngine]
    client: httpx.Client
    url: str = ""
    #: Where it answers probes.
    admin: str = ""

    def post(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        return self.client.post(f"{self.url}{path}", json=ASKING | fields)

    def stream(self, **fields: Any) -> AbstractContextManager[httpx.Response]:
        """Ask for an answer that is read piece by piece."""
        return self.client.stream("POST", f"{self.url}/v1/completions", json=ASKING | fields)

    def count(self, name: str, **labels: str) -> float:
        """The value of a metric."""
        text = self.client.get(f"{self.admin}/metrics").text
        inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        wanted = re.escape(f"kvshelf_proxy_{name}" + (f"{{{inside}}}" if inside else ""))
        found = re.search(rf"^{wanted} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0


Sides = tuple[list[StubEngine], list[StubEngine]]
Serve = Callable[..., AbstractContextManager[Proxy]]


@contextlib.contextmanager
def serving(
    sides: Sides,
    client: httpx.Client,
    shelf: Shelf | None = None,
    connections: int = 100,
    **settings: Any,
) -> Iterator[Proxy]:
    """Run a proxy in this process, before these engines unless the settings name others."""
    prefill, decode = (tuple(engine.url for engine in side) for side in sides)
    made = Settings(**{"prefill": prefill, "decode": decode} | settings)
    with listen("127.0.0.1", 0) as listener, listen("127.0.0.1", 0) as admin:
        server = make_server(make_app(made, shelf, admin), connections=connections, drain=1)
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (listener, admin)]
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            yield Proxy(*sides, client, *urls)
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = ["prefill", "decode"]
    made = [
        [StubEngine(f"{side}{n}", b) for n in range(2)]
        for side, b in zip(sides, [prefills, decodes], strict=True)
    ]
    with contextlib.ExitStack() as running:
        for engine in (*made[0], *made[1]):
            running.enter_context(engine.running())
        yield made[0], made[1]


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=WAIT, trust_env=False) as client:
        yield client


@pytest.fixture
def serve(sides: Sides, client: httpx.Client) -> Serve:
    """Runs a proxy before the engines, with settings of its own."""
    return partial(serving, sides, client)


@pytest.fixture
def proxy(serve: Serve) -> Iterator[Proxy]:
    with serve() as proxy:
        yield proxy


def behave(engines: list[StubEngine], behaviour: Behaviour) -> None:
    for engine in engines:
        engine.behaviour = behaviour


def asked(engines: list[StubEngine]) -> list[Any]:
    return [one.body for engine in engines for one in engine.asked]


def pauses(go_on: threading.Event) -> Behaviour:
    """Stream one event, and the rest when the test says so."""

    def behaviour(handler: Handler, body: Any) -> None:
        handler.begin_stream()
        handler.put(EVENTS[0])
        assert go_on.wait(WAIT)
        handler.put(DONE)
        handler.end_stream()

    return behaviour


# ------------------------------------------------------------------------------- the two legs


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_comes_through_byte_for_byte(proxy: Proxy, path: str) -> None:
    answer = proxy.post(path)
    assert (answer.status_code, answer.content) == (200, WHOLE)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-engine"].startswith("decode")
    [first], [second] = asked(proxy.prefill), asked(proxy.decode)
    assert first["max_tokens"] == 1 and first["stream"] is False
    assert first["kv_transfer_params"] == {"do_remote_decode": True}
    assert second == ASKING | {"kv_transfer_params": PARAMS}
    assert {one.path for engine in (*proxy.prefill, *proxy.decode) for one in engine.asked} == {
        path
    }
    assert proxy.count("handovers_total", outcome="promised") == 1


def test_a_stream_comes_through_byte_for_byte(proxy: Proxy) -> None:
    answer = proxy.post(stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.content == b"".join([*EVENTS, DONE])
    [first] = asked(proxy.prefill)
    assert first["stream"] is False


def test_events_are_not_held_back(proxy: Proxy) -> None:
    seen = threading.Event()
    behave(proxy.decode, pauses(seen))
    with proxy.stream() as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == EVENTS[0]
        seen.set()
        assert b"".join(pieces) == DONE


def test_headers_go_to_both_legs(proxy: Proxy) -> None:
    headers = {
        "authorization": "Bearer key",
        "x-request-id": "r-1",
        "connection": "keep-alive, x-own",
    }
    proxy.client.post(f"{proxy.url}/v1/completions", json=ASKING, headers=headers | {"x-own": "1"})
    legs = [one.headers for engine in (*proxy.prefill, *proxy.decode) for one in engine.asked]
    assert len(legs) == 2
    for got in legs:
        assert (got["authorization"], got["x-request-id"]) == ("Bearer key", "r-1")
        assert "x-own" not in got and "accept-encoding" not in got


def test_models_come_from_a_decode_engine(proxy: Proxy) -> None:
    answer = proxy.client.get(f"{proxy.url}/v1/models")
    assert answer.json() == {"data": [{"id": "tiny"}]}


def test_one_token_needs_one_leg(proxy: Proxy) -> None:
    behave(proxy.prefill, decodes)
    assert proxy.post(max_tokens=1, n=2).content == WHOLE
    assert asked(proxy.prefill) == [ASKING | {"max_tokens": 1, "n": 2}]
    assert not asked(proxy.decode)


def test_one_token_comes_from_a_decode_engine_when_no_other_is_there(proxy: Proxy) -> None:
    behave(proxy.prefill, breaks)
    # Of an engine that fails after it got a request there is one repetition.
    assert proxy.post(max_tokens=1).status_code == 502
    assert proxy.post(max_tokens=1).content == WHOLE


def test_without_prefill_engines_requests_go_on_as_they_are(sides: Sides, serve: Serve) -> None:
    with serve(prefill=()) as proxy:
        assert proxy.post().content == WHOLE
    assert asked(sides[1]) == [ASKING] and not asked(sides[0])


# ------------------------------------------------------------------------- choice and retries


def test_ties_are_served_in_turn(proxy: Proxy) -> None:
    for _ in range(4):
        proxy.post()
    for engine in (*proxy.prefill, *proxy.decode):
        assert len(engine.asked) == 2


def test_the_engine_with_fewest_requests_in_flight_gets_the_next(proxy: Proxy) -> None:
    go_on = threading.Event()

    def wait(handler: Handler, body: Any) -> None:
        if body["prompt"] == "slow":
            assert go_on.wait(WAIT)
        decodes(handler, body)

    behave(proxy.decode, wait)
    slow = threading.Thread(target=proxy.post, kwargs={"prompt": "slow"})
    slow.start()
    try:
        until(lambda: bool(asked(proxy.decode)))
        for _ in range(3):
            proxy.post()
        counts = sorted(len(engine.asked) for engine in proxy.decode)
        held = next(engine for engine in proxy.decode if len(engine.asked) == 1)
        assert counts == [1, 3]
        assert proxy.count("in_flight", side="decode", engine=held.host) == 1
    finally:
        go_on.set()
        slow.join()
    until(lambda: proxy.count("in_flight", side="decode", engine=held.host) == 0)


@pytest.mark.parametrize("failure", [breaks, fails(500), fails(503)])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_leg_is_repeated_on_another_engine(proxy: Proxy, side: str, failure: Behaviour) -> None:
    first, other = getattr(proxy, side)
    first.behaviour = failure
    for _ in range(2):
        answer = proxy.post()
        assert answer.content == WHOLE
    assert len(first.asked) == 1 or failure is not breaks
    assert len(other.asked) == 2
    assert all("kv_transfer_params" in body for body in asked(proxy.decode))
    assert proxy.count("handovers_total", outcome="promised") == 2


def test_an_engine_that_breaks_off_before_the_first_token_is_replaced(proxy: Proxy) -> None:
    def begin(handler: Handler, body: Any) -> None:
        handler.begin_stream()
        handler.break_off()

    proxy.decode[0].behaviour = begin
    for _ in range(2):
        assert proxy.post(stream=True).content == b"".join([*EVENTS, DONE])
    assert proxy.decode[0].asked


def test_an_answer_that_breaks_off_is_neither_repeated_nor_complete(proxy: Proxy) -> None:
    def half(handler: Handler, body: Any) -> None:
        handler.begin_stream()
        handler.put(EVENTS[0])
        handler.break_off()

    behave(proxy.decode, half)
    with proxy.stream() as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == EVENTS[0]
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            next(pieces)
    assert len(asked(proxy.decode)) == 1


def test_a_request_that_ends_engines_reaches_two(sides: Sides, client: httpx.Client) -> None:
    more = [StubEngine(f"more{n}", breaks) for n in range(2)]
    behave(sides[1], breaks)
    with contextlib.ExitStack() as running:
        for engine in more:
            running.enter_context(engine.running())
        every = (sides[0], [*sides[1], *more])
        with serving(every, client) as proxy:
            answer = proxy.post()
        assert answer.status_code == 502
        assert answer.json()["error"]["type"] == "server_error"
        assert len(asked(every[1])) == 2


def test_engines_that_are_not_there_cost_nothing(sides: Sides, client: httpx.Client) -> None:
    nowhere = [StubEngine(f"nowhere{n}", decodes, port=free_port()) for n in range(3)]
    with serving(([*nowhere, *sides[0]], [*nowhere, *sides[1]]), client) as proxy:
        for _ in range(8):
            assert proxy.post().content == WHOLE
        health = client.get(f"{proxy.admin}/health")
    assert all(body["kv_transfer_params"] == PARAMS for body in asked(sides[1]))
    assert health.status_code == 200 and health.json()["status"] == "degraded"


@pytest.mark.parametrize("failure", [breaks, fails(500), fails(400), fails(401)])
def test_without_a_prefill_the_decode_engine_does_it_all(proxy: Proxy, failure: Behaviour) -> None:
    behave(proxy.prefill, failure)
    answer = proxy.post()
    assert answer.content == WHOLE
    assert asked(proxy.decode) == [ASKING]


def test_prefill_engines_that_are_down_are_left_out(sides: Sides, client: httpx.Client) -> None:
    nowhere = [StubEngine("nowhere", prefills, port=free_port())]
    with serving((nowhere, sides[1]), client) as proxy:
        for _ in range(2):
            assert proxy.post().content == WHOLE
        # Whoever wants one token gets it all the same.
        assert proxy.post(max_tokens=1).is_success
    assert asked(sides[1]).count(ASKING) == 2


def test_a_prefill_that_takes_too_long_is_given_up(sides: Sides, serve: Serve) -> None:
    behave(sides[0], hangs)
    with serve(prefill_timeout=0.05) as proxy:
        assert proxy.post().content == WHOLE
    until(lambda: any(engine.asked for engine in sides[0]))
    [engine] = [engine for engine in sides[0] if engine.asked]
    assert engine.saw_close.wait(WAIT)
    assert asked(sides[1]) == [ASKING]


def test_a_prefill_without_params_is_no_handover(proxy: Proxy) -> None:
    for answer in (b'{"kv_transfer_params": null}', b"[]", b"no JSON"):

        def says(handler: Handler, body: Any, answer: bytes = answer) -> None:
            handler.answer(200, answer)

        behave(proxy.prefill, says)
        assert proxy.post().content == WHOLE
    assert asked(proxy.decode) == [ASKING] * 3
    assert proxy.count("handovers_total", outcome="nothing") == 3


def test_a_decode_engine_that_is_silent_ends_the_request(sides: Sides, serve: Serve) -> None:
    behave(sides[1], hangs)
    with serve(timeout=0.05) as proxy:
        answer = proxy.post()
    assert answer.status_code == 504
    until(lambda: bool(asked(sides[1])))
    assert len(asked(sides[1])) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500])
def test_errors_of_engines_are_passed_on_as_they_are(proxy: Proxy, status: int) -> None:
    behave(proxy.decode, fails(status))
    answer = proxy.post()
    assert answer.status_code == status
    assert re.fullmatch(rb'\{"error": \{"message": "of decode."\}\}', answer.content)
    assert len(asked(proxy.decode)) == (2 if status == 500 else 1)


# ------------------------------------------------------------------------------- disconnects


@pytest.mark.parametrize("leg", ["prefill", "decode", "stream"])
def test_an_engine_sees_that_the_client_left(proxy: Proxy, leg: str) -> None:
    def streams(handler: Handler, body: Any) -> None:
        handler.begin_stream()
        handler.put(EVENTS[0])
        handler.wait_until_closed()

    side = proxy.prefill if leg == "prefill" else proxy.decode
    behave(side, streams if leg == "stream" else hangs)
    host, port = proxy.url.removeprefix("http://").split(":")
    body = json.dumps(ASKING | {"stream": leg == "stream"}).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: p\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        if leg == "stream":
            connection.settimeout(WAIT)
            while b"data:" not in connection.recv(1 << 16):
                pass
        until(lambda: bool(asked(side)))
    [engine] = [engine for engine in side if engine.asked]
    assert engine.saw_close.wait(WAIT)
    until(lambda: proxy.count("disconnects_total") == 1)
    if leg == "prefill":
        assert not asked(proxy.decode)
    assert proxy.count("in_flight", side=engine.name[:-1], engine=engine.host) == 0


# -------------------------------------------------------------------------- what is refused


def openai_error(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


def test_params_of_a_client_are_refused(proxy: Proxy) -> None:
    answer = proxy.post(kv_transfer_params=PARAMS)
    assert answer.status_code == 400
    assert openai_error(answer)["param"] == "kv_transfer_params"
    assert not asked(proxy.prefill) and not asked(proxy.decode)


def test_durable_needs_a_store(proxy: Proxy) -> None:
    answer = proxy.post(durable=True)
    assert answer.status_code == 400
    assert "--store" in openai_error(answer)["message"]
    assert not asked(proxy.prefill)


def test_bodies_that_are_too_large_or_no_json_are_refused(
    sides: Sides, client: httpx.Client, serve: Serve
) -> None:
    with serve(max_body_bytes=1000) as proxy:
        for content in (b"x" * 1001, iter([b"x" * 600] * 2)):
            answer = client.post(f"{proxy.url}/v1/completions", content=content)
            assert answer.status_code == 413
            openai_error(answer)
        answer = client.post(f"{proxy.url}/v1/completions", content=b"x" * 1000)
        assert answer.status_code == 400
        assert proxy.post().content == WHOLE
    assert len(asked(sides[0])) == 1


@pytest.mark.parametrize("work", ["read_request", "prefill_body", "body"])
def test_work_on_large_bodies_stops_no_other_client(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    owner = proxy_app if work == "read_request" else ClientRequest
    does = getattr(owner, work)

    def slow(first: bytes | ClientRequest, *args: Any, **options: Any) -> Any:
        if b"large" in (first if isinstance(first, bytes) else first.fields["model"].encode()):
            begun.release()
            assert go_on.wait(WAIT)
        return does(first, *args, **options)

    monkeypatch.setattr(owner, work, slow)
    asking = ASKING | {"model": "large", "prompt": "x" * 300_000}
    answers: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(timeout=WAIT, trust_env=False) as client:
            answers.append(client.post(f"{proxy.url}/v1/completions", json=asking))

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for one in clients:
        one.start()
    try:
        assert begun.acquire(timeout=WAIT)
        until(lambda: proxy.count("body_bytes") > 600_000)
        for _ in range(3):
            assert proxy.post().content == WHOLE
        # The other one waits: threads that parse stop all others for as long as each takes.
        assert not begun.acquire(blocking=False)
    finally:
        go_on.set()
        for one in clients:
            one.join()
    assert [answer.content for answer in answers] == [WHOLE] * 2


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/", 404),
        # These are on a port of their own.
        ("GET", "/health", 404),
        ("GET", "/metrics", 404),
    ],
)
def test_other_paths(proxy: Proxy, method: str, path: str, status: int) -> None:
    answer = proxy.client.request(method, f"{proxy.url}{path}")
    assert answer.status_code == status
    openai_error(answer)


@pytest.mark.parametrize(
    ("healthy", "status", "word"),
    [("pd", 200, "ok"), ("d", 200, "degraded"), ("p", 503, "down"), ("", 503, "down")],
)
def test_health(proxy: Proxy, healthy: str, status: int, word: str) -> None:
    for side, engines in (("p", proxy.prefill), ("d", proxy.decode)):
        for engine in engines:
            engine.health = 200 if side in healthy else 503
    answer = proxy.client.get(f"{proxy.admin}/health")
    assert (answer.status_code, answer.json()["status"]) == (status, word)
    assert answer.json()["decode"] == {engine.host: "d" in healthy for engine in proxy.decode}


def test_many_who_ask_for_health_ask_the_engines_once(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answers = Handler.answer

    def answer(handler: Handler, *values: Any) -> None:
        asked.append(handler.path)
        answers(handler, *values)

    monkeypatch.setattr(Handler, "answer", answer)
    monkeypatch.setattr(proxy_app, "_HEALTH_SECONDS", 1e6)

    def ask() -> None:
        with httpx.Client(timeout=WAIT, trust_env=False) as client:
            statuses.extend(client.get(f"{proxy.admin}/health").status_code for _ in range(10))

    statuses: list[int] = []
    asking = [threading.Thread(target=ask) for _ in range(10)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert statuses == [200] * 100
    assert asked == ["/health"] * 4


def test_metrics_name_no_secrets(sides: Sides, client: httpx.Client, serve: Serve) -> None:
    first, second = (engine.host for engine in sides[1])
    urls = f"http://{first}/secret-1", f"http://{first}/secret-2", f"http://{second}"
    with serve(prefill=(), decode=urls) as proxy:
        for _ in range(3):
            client.get(f"{proxy.url}/v1/models?secret")
            client.get(f"{proxy.url}/secret?secret")
        texts = [client.get(f"{proxy.admin}/{path}").text for path in ("metrics", "health")]
    for text in texts:
        assert "secret" not in text
        for engine in (f"{first}#1", f"{first}#2", second):
            assert f'"{engine}"' in text


# ----------------------------------------------------------------------------------- limits


@pytest.fixture(params=["httptools", "h11"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn's protocols: which of them there is depends on what is installed."""
    module = pytest.importorskip(f"uvicorn.protocols.http.{request.param}_impl")
    name = {"httptools": "HttpToolsProtocol", "h11": "H11Protocol"}[request.param]
    monkeypatch.setattr(proxy_server, "AutoHTTPProtocol", getattr(module, name))


@contextlib.contextmanager
def connected(url: str, count: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections, and send the same on each."""
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        sockets = []
        for _ in range(count):
            sockets.append(opened.enter_context(socket.create_connection((host, int(port)), WAIT)))
            with contextlib.suppress(ConnectionError):
                sockets[-1].sendall(said)
        yield sockets


def received(client: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.usefixtures("protocol")
@pytest.mark.parametrize("said", [b"", b"POST /v1/comp"], ids=["nothing", "half a head"])
def test_connections_without_a_request_keep_nobody_out(said: bytes, serve: Serve) -> None:
    with serve(connections=20) as proxy, connected(proxy.url, 200, said) as idle:
        for _ in range(3):
            answer = proxy.post()
            assert (answer.status_code, answer.content) == (200, WHOLE)
            # With a new connection.
            proxy.client.close()
            proxy.client = httpx.Client(timeout=WAIT, trust_env=False)
        for one in idle[:150]:
            assert received(one) == b""
    proxy.client.close()


@pytest.mark.usefixtures("protocol")
def test_a_request_whose_head_does_not_come_is_given_up(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    monkeypatch.setattr(proxy_server, "_HEAD_SECONDS", 0.5)
    body = json.dumps(ASKING).encode()
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with (
        serve() as proxy,
        connected(proxy.url, 1) as [silent],
        connected(proxy.url, 1, HEAD) as [half],
        connected(proxy.url, 1, whole) as [second],
    ):
        assert received(silent) == received(half) == b""
        # Half a head after an answer.
        assert second.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(ConnectionError):
            second.sendall(HEAD)
        assert received(second).count(b"HTTP/1.1") == 0
        # Byte by byte it is no better.
        with connected(proxy.url, 1) as [dripping]:
            dripping.settimeout(0.02)
            until(lambda: ends(dripping))
        assert proxy.post().content == WHOLE


def ends(client: socket.socket) -> bool:
    """Send one more byte; whether the other side has ended the connection."""
    try:
        client.send(b"P")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.usefixtures("protocol")
def test_a_head_has_a_largest_size(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    monkeypatch.setattr(proxy_server, "_HEAD_SECONDS", 1e6)
    with serve() as proxy, connected(proxy.url, 1, HEAD) as [endless]:
        line = b"a: " + b"b" * 1000 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(10_000):
                endless.sendall(line)
        assert b" 200 " not in received(endless)
        assert proxy.post().content == WHOLE


@pytest.mark.usefixtures("protocol")
def test_requests_above_the_limit_are_refused_and_those_under_way_go_on(
    sides: Sides, serve: Serve
) -> None:
    go_on = threading.Event()
    behave(sides[1], pauses(go_on))
    with (
        serve(connections=4) as proxy,
        contextlib.ExitStack() as opened,
    ):
        streams = [opened.enter_context(proxy.stream(stream=True)) for _ in range(3)]
        pieces = [stream.iter_raw() for stream in streams]
        assert [next(each) for each in pieces] == [EVENTS[0]] * 3
        assert proxy.post().status_code == 503
        # The same with connections that say nothing beside them.
        with connected(proxy.url, 50):
            assert proxy.post().status_code == 503
        go_on.set()
        assert [b"".join(each) for each in pieces] == [DONE] * 3
        behave(sides[1], decodes)
        assert proxy.post().content == WHOLE


def test_bodies_of_all_requests_have_a_largest_size_together(serve: Serve) -> None:
    with serve(max_held_bytes=1 << 20) as proxy:
        part = HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 999_000
        with connected(proxy.url, 1, part):
            until(lambda: proxy.count("body_bytes") == 999_000)
            answer = proxy.post(user="x" * 60_000)
            assert answer.status_code == 503
            assert "too many bytes" in answer.json()["error"]["message"]
            # There is room for a small one.
            assert proxy.post().content == WHOLE
            assert proxy.count("body_bytes") == 999_000
        until(lambda: proxy.count("body_bytes") == 0)
        assert proxy.post(user="x" * 60_000).content == WHOLE
        assert proxy.count("body_bytes") == 0


def test_a_body_that_does_not_come_is_given_up(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    monkeypatch.setattr(proxy_client, "_BODY_SECONDS", 0.5)
    part = HEAD + b"Content-Length: 1000\r\n\r\n" + b" " * 10
    with serve() as proxy, connected(proxy.url, 1, part) as [slow]:
        assert received(slow).startswith(b"HTTP/1.1 408 ")
        until(lambda: proxy.count("body_bytes") == 0)


def test_the_files_that_connections_need_are_allowed_or_there_are_fewer() -> None:
    code = """
import resource
from kvshelf.proxy.server import _allowed
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
print(_allowed(20), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(_allowed(100), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(_allowed(2048), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["20 256", "100 428", "298 1024"]
    assert "1024 open files" in done.stderr


# ---------------------------------------------------------------------------------- durable


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    (tmp_path / "shelf").mkdir()
    with open_shelf(tmp_path / "shelf") as shelf:
        yield shelf


def promise(of: Namespace, chunk: Chunk, tail: int) -> Behaviour:
    """A prefill engine that promises a chunk."""
    params = PARAMS | {
        "kvshelf_namespace": of.digest.hex(),
        "kvshelf_tokens": chunk.index * CHUNK + chunk.tokens,
        "kvshelf_key": chunk.key.hex(),
        "kvshelf_tail": tail,
    }

    def behaviour(handler: Handler, body: Any) -> None:
        handler.answer(200, json.dumps({"kv_transfer_params": params}).encode())

    return behaviour


def publish(shelf: Shelf, of: Namespace, chunk: Chunk) -> None:
    family = ObjectFormat(of)
    for fmt in map(family.of, family.kinds):
        for shard in range(fmt.shards):
            tensors = [bytes(t.nbytes) for t in fmt.tensors(shard, chunk.tokens)]
            data = b"".join(fmt.encode(chunk, shard, tensors))
            shelf.view(fmt).publish(ObjectRef(chunk, shard), data)


def last_chunk(of: Namespace, tail: int, salt: str = "") -> Chunk:
    chain = KeyChain(of.digest, CHUNK, salt=salt, salt_group=salt_group_of(salt))
    chain.extend(range(3 * CHUNK + tail))
    return chain.tail() or chain.chunks[-1]


@pytest.mark.parametrize(
    ("of", "tail", "salt"),
    [
        pytest.param(namespace(), 5, "", id="tail"),
        pytest.param(namespace(), 0, "tenant", id="salt group"),
        pytest.param(hybrid(), 0, "", id="hybrid"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_durable_waits_for_the_final_key(
    sides: Sides, shelf: Shelf, of: Namespace, tail: int, salt: str, stream: bool, serve: Serve
) -> None:
    chunk = last_chunk(of, tail, salt)
    behave(sides[0], promise(of, chunk, tail))
    answers: list[httpx.Response] = []
    with serve(shelf, durable_wait=WAIT) as proxy:

        def ask() -> None:
            answers.append(proxy.post(durable=True, stream=stream, cache_salt=salt))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: bool(asked(sides[1])))
        assert not answers
        publish(shelf, of, chunk)
        asking.join(WAIT)
    [answer] = answers
    assert "durable" not in asked(sides[0])[0] and "durable" not in asked(sides[1])[0]
    if stream:
        told = b": kvshelf-durable: true\n\n"
        assert answer.content == b"".join([*EVENTS, told, DONE])
    else:
        assert answer.content == WHOLE
        assert answer.headers["kvshelf-durable"] == "true"


def test_the_last_event_waits_and_the_others_do_not(
    sides: Sides, shelf: Shelf, serve: Serve
) -> None:
    chunk = last_chunk(namespace(), 5)
    behave(sides[0], promise(namespace(), chunk, 5))
    with (
        serve(shelf, durable_wait=WAIT) as proxy,
        proxy.stream(durable=True, stream=True) as answer,
    ):
        pieces = answer.iter_raw()
        seen = b""
        while seen != b"".join(EVENTS):
            seen += next(pieces)
        publish(shelf, namespace(), chunk)
        assert b"".join(pieces) == b": kvshelf-durable: true\n\n" + DONE


def test_a_broken_promise_ends_the_wait(sides: Sides, shelf: Shelf, serve: Serve) -> None:
    of = namespace()
    publish(shelf, of, last_chunk(of, 0))
    shelf.view(ObjectFormat(of)).give_up(PARAMS["kvshelf_attempt"])
    behave(sides[0], promise(of, last_chunk(of, 5), 5))
    with serve(shelf, durable_wait=1e6) as proxy:
        answer = proxy.post(durable=True)
    assert (answer.content, answer.headers["kvshelf-durable"]) == (WHOLE, "false")


def test_kv_that_does_not_come_is_told(sides: Sides, shelf: Shelf, serve: Serve) -> None:
    of = namespace()
    with serve(shelf, durable_wait=0.05) as proxy, serve(shelf, durable_wait=WAIT) as patient:

        def told(by: Proxy = proxy) -> str:
            answer = by.post(durable=True)
            assert answer.content == WHOLE
            return answer.headers["kvshelf-durable"]

        # A namespace that is not on the shelf; an object that is not; one shard of two.
        assert told() == "false"
        publish(shelf, of, last_chunk(of, 0))
        behave(sides[0], promise(of, last_chunk(of, 5), 5))
        assert told() == "false"
        publish(shelf, of, last_chunk(of, 5))
        assert told(patient) == "true"
        [name] = [at.name for at in shelf.objects() if at.parsed.tail_tokens and at.parsed.shard]
        shelf.delete(name)
        assert told() == "false"
        # No hand-over, nothing to wait for.
        behave(sides[0], fails(400))
        assert told() == "false"
        # An error of the engine is not withheld.
        behave(sides[1], fails(400))
        answer = proxy.post(durable=True)
        assert answer.status_code == 400 and "kvshelf-durable" not in answer.headers


def test_namespaces_that_are_not_asked_for_any_more_take_no_threads(
    sides: Sides, shelf: Shelf, serve: Serve
) -> None:
    def waiting_threads() -> int:
        return sum(thread.name.startswith("kvshelf-wait") for thread in threading.enumerate())

    before = waiting_threads()
    with serve(shelf, durable_wait=WAIT) as proxy:
        # The first one is asked for once more when its threads are gone.
        for number in (*range(durable._MOST_IDLE + 4), 0):
            of = namespace(weights=f"user:{number}")
            publish(shelf, of, last_chunk(of, 5))
            behave(sides[0], promise(of, last_chunk(of, 5), 5))
            answer = proxy.post(durable=True)
            assert answer.headers["kvshelf-durable"] == "true"
        until(lambda: waiting_threads() - before <= durable._MOST_IDLE)
    until(lambda: waiting_threads() == before)


# -------------------------------------------------------------------------------- the command


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `kvshelf proxy` on a free port; yields the process and its URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvshelf", "proxy", "--port", "0", "--admin", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert found, line + process.stderr.read()
            yield process, found[0]
        finally:
            process.kill()


def test_the_command_ends_after_its_requests(sides: Sides, client: httpx.Client) -> None:
    go_on = threading.Event()
    behave(sides[1], pauses(go_on))
    arguments = [
        argument
        for option, side in zip(("--prefill", "--decode"), sides, strict=True)
        for engine in side
        for argument in (option, engine.url)
    ]
    with command(*arguments) as (process, url):
        with client.stream("POST", f"{url}/v1/completions", json=ASKING | {"stream": True}) as on:
            pieces = on.iter_raw()
            assert next(pieces) == EVENTS[0]
            process.send_signal(signal.SIGTERM)

            def refuses() -> bool:
                try:
                    httpx.get(f"{url}/health", trust_env=False)
                except httpx.TransportError:
                    return True
                return False

            until(refuses)
            go_on.set()
            assert b"".join(pieces) == DONE
        assert process.wait(WAIT) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert said == "", said


def test_the_command_takes_bodies_of_8_mib_at_most() -> None:
    part = HEAD + b"Content-Length: %d\r\n\r\n" % ((8 << 20) + 1)
    with (
        command("--decode", "http://127.0.0.1:1") as (_, url),
        connected(url, 1, part) as [large],
    ):
        assert received(large).startswith(b"HTTP/1.1 413 ")


def test_prompts_are_not_logged(sides: Sides, client: httpx.Client) -> None:
    behave(sides[0], breaks)
    behave(sides[1], fails(500))
    with command("--prefill", sides[0][0].url, "--decode", sides[1][0].url) as (process, url):
        client.post(f"{url}/v1/completions", json=ASKING)
        client.post(f"{url}/v1/completions", content=b'{"a secret prompt')
        process.terminate()
        assert process.wait(WAIT) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert "broken" in said
    assert "secret" not in said


def test_the_proxy_needs_neither_torch_nor_vllm() -> None:
    code = "import sys; sys.modules |= dict.fromkeys(('torch', 'vllm')); import kvshelf.proxy.app"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ImportError('No module named starlette')")
    done = subprocess.run(
        [sys.executable, "-m", "kvshelf", "proxy", "--decode", "http://127.0.0.1:1"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'kvshelf[proxy]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--decode", "localhost:1"], "expected http://HOST:PORT"),
        (["--decode", "http://h", "--host", "203.0.113.1"], "cannot listen at 203.0.113.1"),
        (
            ["--decode", "http://h", "--port", "0", "--admin", "203.0.113.1:1"],
            "cannot listen at 203",
        ),
        (["--decode", "http://h", "--port", "0", "--admin", "none"], "--admin is 'none'"),
        (["--decode", "http://h", "--store", "/does/not/exist"], "does not exist"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["proxy", *arguments])
    assert done.exit_code in {2, 3}
    assert says in done.stderr
