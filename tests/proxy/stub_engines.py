"""Engines without a model: HTTP servers on real sockets that record and misbehave as told."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PARAMS = {
    "kvshelf_version": 1,
    "kvshelf_namespace": "ab" * 32,
    "kvshelf_tokens": 100,
    "kvshelf_key": "cd" * 32,
    "kvshelf_tail": 4,
    "kvshelf_attempt": "ef" * 16,
}
#: What a decode engine answers: the ends of lines and the spaces are not those of json.dumps.
WHOLE = b'{"id":"cmpl-1",  "choices":[{"text":"\xc3\xa9 ok","index":0}]}\n'
EVENTS = [b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(3)]
DONE = b"data: [DONE]\n\n"
WAIT = 20.0


@dataclass
class Asked:
    """One request that an engine got."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class Handler(BaseHTTPRequestHandler):
    """Gives the requests of a connection to the engine's behaviour."""

    protocol_version = "HTTP/1.1"
    engine: StubEngine

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/health":
            self.answer(self.engine.health, b"")
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(raw) if raw else None
        with self.engine.lock:
            self.engine.asked.append(Asked(self.command, self.path, headers, body))
        self.engine.was_asked.set()
        with contextlib.suppress(ConnectionError):
            self.engine.behaviour(self, body)

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Engine", self.engine.name)
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def put(self, piece: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()

    def end_stream(self) -> None:
        self.put(b"")
        self.wfile.flush()

    def break_off(self) -> None:
        """Close the connection in the middle of an answer."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def wait_until_closed(self) -> None:
        """Wait until the other side closes the connection, and say so."""
        self.connection.settimeout(WAIT)
        with contextlib.suppress(ConnectionError):
            assert self.connection.recv(1) == b""
        self.close_connection = True
        self.engine.saw_close.set()

    def log_message(self, *_: object) -> None:
        pass


Behaviour = Callable[[Handler, Any], None]


def prefills(handler: Handler, body: Any) -> None:
    answer = {"choices": [{"text": "x"}], "kv_transfer_params": PARAMS}
    handler.answer(200, json.dumps(answer).encode())


def decodes(handler: Handler, body: Any) -> None:
    if handler.command == "GET":
        handler.answer(200, b'{"data": [{"id": "tiny"}]}')
    elif body.get("stream"):
        handler.begin_stream()
        for event in [*EVENTS, DONE]:
            handler.put(event)
        handler.end_stream()
    else:
        handler.answer(200, WHOLE)


def hangs(handler: Handler, body: Any) -> None:
    handler.wait_until_closed()


def breaks(handler: Handler, body: Any) -> None:
    handler.break_off()


def fails(status: int) -> Behaviour:
    def behave(handler: Handler, body: Any) -> None:
        handler.answer(status, b'{"error": {"message": "of %s"}}' % handler.engine.name.encode())

    return behave


@dataclass
class StubEngine:
    """One server; its behaviour may be changed at any time."""

    name: str
    behaviour: Behaviour
    health: int = 200
    asked: list[Asked] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    was_asked: threading.Event = field(default_factory=threading.Event)
    saw_close: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[StubEngine]:
        handler = type("OfThis", (Handler,), {"engine": self})
        with ThreadingHTTPServer(("127.0.0.1", self.port), handler) as server:
            server.daemon_threads = True
            self.port = server.server_address[1]
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()
