"""Health and metrics over HTTP, beside clients that say nothing, and slowly."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvshelf.errors import ConfigError
from kvshelf.server import http as probes
from kvshelf.server.http import Page, Probes, listen, text
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real


async def answer(path: str) -> Page | None:
    if path == "/breaks":
        raise RuntimeError("a secret")
    if path == "/large":
        return Page(200, "text/plain", bytes(64 << 20))
    return text(200, "ok") if path == "/health" else None


@contextlib.contextmanager
def serving(
    host: str = "127.0.0.1", made: list[Probes] | None = None
) -> Iterator[Callable[[], socket.socket]]:
    """Answer on a thread; yields what connects."""
    listener = listen(host, 0)
    served = Probes(listener, answer)
    if made is not None:
        made.append(served)
    address = listener.getsockname()
    over = asyncio.Event()
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        thread = threading.Thread(target=loop.run_until_complete, args=(served.serve(over),))
        thread.start()
        try:
            yield lambda: socket.create_connection(address[:2], PATIENCE)
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join(PATIENCE)
            assert not thread.is_alive()


def ask(connect: Callable[[], socket.socket], request: bytes) -> bytes:
    """Everything that is answered, until the other side closes the connection."""
    with connect() as client:
        client.sendall(request)
        return received(client)


def get(connect: Callable[[], socket.socket], target: str = "/health") -> bytes:
    return ask(connect, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


def received(client: socket.socket) -> bytes:
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_path_is_answered_and_the_connection_ends(host: str) -> None:
    with serving(host) as connect:
        with connect() as client:
            client.sendall(b"GET /health?full HTTP/1.1\r\nHost: x\r\n\r\n")
            whole = http.client.HTTPResponse(client)
            whole.begin()
            assert (whole.status, whole.read()) == (200, b"ok\n")
            assert received(client) == b""
        assert get(connect).endswith(b"\r\n\r\nok\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /other HTTP/1.1\r\n\r\n", 404),
        (b"GET \r\n\r\n", 404),
        (b"GET\r\n\r\n", 405),
        (b"POST /health HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", 405),
        (b"\r\n\r\n", 405),
        (b"\xff\xfe \0\r\n\r\n", 405),
        (b"GET /\xff\0 HTTP/1.1\r\n\r\n", 404),
        (b"GET /breaks HTTP/1.1\r\n\r\n", 500),
    ],
)
def test_other_requests_get_an_error(request_: bytes, status: int) -> None:
    with serving() as connect:
        said = ask(connect, request_)
        assert said.startswith(b"HTTP/1.1 %d " % status)
        assert b"secret" not in said
        assert get(connect).startswith(b"HTTP/1.1 200 ")


def test_request_without_an_end_is_given_up() -> None:
    with serving() as connect:
        assert ask(connect, b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 10_000) == b""
        assert get(connect).startswith(b"HTTP/1.1 200 ")


def test_clients_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SECONDS", 1e6)
    with serving() as connect, contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connect()) for _ in range(4 * probes.CONNECTIONS)]
        for client in silent:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"G")
        assert get(connect).startswith(b"HTTP/1.1 200 ")
        # The others were ended, the first one first.
        for client in silent[: -probes.CONNECTIONS]:
            assert received(client) == b""


def test_clients_that_leave_early_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as connect:
        for said in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\n"):
            with connect() as client:
                client.sendall(said)
                client.shutdown(socket.SHUT_WR)
                assert received(client) == b""
        # Nothing is read any more.
        with connect() as client:
            client.sendall(b"GET /large HTTP/1.1\r\n\r\n")
            assert client.recv(1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert get(connect).startswith(b"HTTP/1.1 200 ")
        # asyncio logs the exception of a task that nothing has asked for it.
        gc.collect()
    assert not caplog.records


def test_clients_that_send_slowly_are_gone_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SECONDS", 0.5)
    with serving() as connect, contextlib.ExitStack() as opened:
        dripping = [opened.enter_context(connect()) for _ in range(probes.CONNECTIONS)]
        for client in dripping:
            client.setblocking(False)
        left, end = dripping, time.monotonic() + PATIENCE
        while left:
            assert time.monotonic() < end
            left = [client for client in left if takes(client)]
            time.sleep(0.01)


def takes(client: socket.socket) -> bool:
    """Send one more byte; False if the other side has closed the connection."""
    try:
        client.send(b"G")
        return bool(client.recv(1))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_clients_that_take_no_answer_are_gone_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes, "SECONDS", 0.5)
    made: list[Probes] = []
    with serving(made=made) as connect, connect() as slow:
        slow.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        # It reads no more than this until the other side has given up: what then comes is not all.
        assert slow.recv(1)
        until(lambda: not made[0]._connections)
        assert len(received(slow)) < (64 << 20)
        assert get(connect).startswith(b"HTTP/1.1 200 ")


def test_port_that_is_taken_is_an_error_of_the_configuration() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="cannot listen"):
        listen("127.0.0.1", listener.getsockname()[1])
