"""The delaying proxy: every request takes longer by the same time, and nothing else changes."""

from __future__ import annotations

import hashlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.proxy import DelayingProxy

pytestmark = pytest.mark.real

DELAY = 0.05
BODY = bytes(range(256)) * (5 << 12)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(BODY)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(hashlib.sha256(data).hexdigest().encode())

    def log_message(self, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@pytest.fixture
def port() -> Iterator[int]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def _request(
    connection: http.client.HTTPConnection, method: str, body: bytes | None = None
) -> tuple[bytes, float]:
    begin = time.perf_counter()
    connection.request(method, "/x", body)
    data = connection.getresponse().read()
    return data, time.perf_counter() - begin


def test_each_request_takes_the_delay_and_a_new_connection_one_more(port: int) -> None:
    with DelayingProxy("127.0.0.1", port, DELAY) as proxy:
        client = http.client.HTTPConnection("127.0.0.1", proxy.port)
        assert _request(client, "HEAD")[1] >= 2 * DELAY
        assert _request(client, "HEAD")[1] >= DELAY
        client.close()


def test_it_ends_without_a_word_while_clients_are_there(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with DelayingProxy("127.0.0.1", port, 0.0) as proxy:
        client = http.client.HTTPConnection("127.0.0.1", proxy.port)
        _request(client, "HEAD")
    client.close()
    assert capfd.readouterr() == ("", "")


def test_bodies_pass_unchanged_both_ways_and_are_counted(port: int) -> None:
    with DelayingProxy("127.0.0.1", port, 0.001) as proxy:
        client = http.client.HTTPConnection("127.0.0.1", proxy.port)
        assert _request(client, "GET")[0] == BODY
        assert _request(client, "PUT", BODY)[0] == hashlib.sha256(BODY).hexdigest().encode()
        _request(client, "HEAD")
        client.close()
        counts = proxy.counts()
        assert counts["requests"] == {"GET": 1, "PUT": 1, "HEAD": 1}
        assert counts["connections"] == 1
        assert counts["sent"] > len(BODY)
        assert counts["received"] > len(BODY)


def test_a_server_that_is_not_there_is_a_closed_connection_until_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with DelayingProxy("127.0.0.1", port, 0.0) as proxy:
        client = http.client.HTTPConnection("127.0.0.1", proxy.port)
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            _request(client, "HEAD")
        with _Server(("127.0.0.1", port), _Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            client = http.client.HTTPConnection("127.0.0.1", proxy.port)
            assert _request(client, "GET")[0] == BODY
            client.close()
            server.shutdown()
            thread.join()
