"""A proxy in front of a server that speaks S3, which makes trouble on demand.

Owns the translation of HTTP requests into moments of the table of faults (see :class:`S3Proxy`),
and what each fault does to a request and its answer. Everything else goes through unchanged.

Each connection has a thread of its own, and one connection of its own to the server.
"""

from __future__ import annotations

import contextlib
import fnmatch
import http.client
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

#: Statuses that are answered, with the code that goes with them.
STATUSES: Final = {
    "403": "AccessDenied",
    "404": "NoSuchKey",
    "409": "OperationAborted",
    "412": "PreconditionFailed",
    "429": "TooManyRequests",
    "500": "InternalError",
    "503": "SlowDown",
}
RESET: Final = "reset"
STALLED: Final = "stalled"
WRONG_LENGTH: Final = "wrong length"
WRONG_BYTES: Final = "wrong bytes"
REFUSED: Final = "no server"

#: What a proxy does not hand on, and what it says itself.
_OWN_HEADERS: Final = frozenset(("connection", "keep-alive", "transfer-encoding", "expect"))
_SERVER_SECONDS: Final = 30.0


@dataclass(eq=False)
class Rule:
    """One fault at one moment, for the objects that fit a pattern.

    Attributes
    ----------
    fault : str
        A status, or one of the other constants of the module; a wrong length may be followed
        by the length.
    moment : str
        ``probe`` HEAD; ``read`` GET of an object; ``write`` PUT, of which the server learns
        nothing, or something wrong; ``publish`` PUT that the server has done when the trouble
        begins; ``list``; ``delete``.
    pattern : str
        Of the path, or of what is listed, with ``*`` and ``?``.
    times : int or None
        How often at most.
    met : int
    """

    fault: str
    moment: str
    pattern: str = "*"
    times: int | None = None
    met: int = 0


class _ResetError(Exception):
    """The connection to the client is to be reset."""


class S3Proxy:
    """A proxy on a free port of this machine.

    Parameters
    ----------
    upstream : str
        The server's ``http://host:port``.

    Attributes
    ----------
    endpoint : str
    requests : list of str
        ``<moment> <path>`` of every request.
    refuses : Callable
        Called with each request's handler; a status and a code that it returns are the answer.
        Without a code the answer has no body, and says no length.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.requests: list[str] = []
        self.refuses: Callable[[Any], tuple[int, str] | None] = lambda _: None
        self._rules: list[Rule] = []
        self._met = 0
        self._changed = threading.Condition()
        self._port = 0
        self._server: _Server | None = None
        self._connections: set[socket.socket] = set()
        self.listen()
        self.endpoint = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> S3Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add(self, fault: str, moment: str, pattern: str = "*", times: int | None = None) -> None:
        """Put a rule in force."""
        if fault == REFUSED:
            self.refuse()
            return
        with self._changed:
            self._rules.append(Rule(fault, moment, pattern, times))

    def clear(self) -> None:
        """Drop all rules, let go what they hold, listen again."""
        with self._changed:
            self._rules = []
            self._changed.notify_all()
        self.listen()

    @property
    def met(self) -> int:
        """How often rules were met."""
        return self._met

    def rule(self, moments: tuple[str, ...], what: str) -> Rule | None:
        """Meet the first rule that concerns a request."""
        with self._changed:
            for rule in self._rules:
                if (
                    rule.moment in moments
                    and fnmatch.fnmatchcase(what, rule.pattern)
                    and (rule.times is None or rule.met < rule.times)
                ):
                    rule.met += 1
                    self._met += 1
                    return rule
        return None

    def hold(self, rule: Rule) -> None:
        """Wait until a rule is dropped."""
        with self._changed:
            self._changed.wait_for(lambda: all(rule is not other for other in self._rules))

    def listen(self) -> None:
        """Take connections (again), on the same port as before."""
        if self._server is None:
            self._server = _Server(self, self._port)
            self._port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def refuse(self) -> None:
        """Reset all connections, and take none any more."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._met += 1
        for connection in list(self._connections):
            _reset(connection)

    def close(self) -> None:
        """End. Idempotent."""
        with self._changed:
            self._rules = []
            self._changed.notify_all()
        self.refuse()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, proxy: S3Proxy, port: int) -> None:
        self.proxy = proxy
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Without this a thread that waits for the connection would keep it open.
        connection.shutdown(socket.SHUT_RD)
        connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._upstream: http.client.HTTPConnection | None = None
        self.server.proxy._connections.add(self.connection)

    def finish(self) -> None:
        self.server.proxy._connections.discard(self.connection)
        if self._upstream is not None:
            self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except _ResetError:
            self.close_connection = True
            _reset(self.connection)

    # ------------------------------------------------------------------------------- requests

    def _moments(self) -> tuple[tuple[str, ...], str]:
        """At which moments of the table the request is, and what it is about."""
        parts = urlsplit(self.path)
        path = unquote(parts.path).strip("/")
        query = parse_qs(parts.query, keep_blank_values=True)
        if self.command == "HEAD":
            return ("probe",), path
        if self.command == "PUT":
            return ("write", "publish"), path
        if self.command == "DELETE" or "delete" in query:
            return ("delete",), path
        if "list-type" in query or "prefix" in query or "/" not in path:
            return ("list",), f"{path}/{query.get('prefix', [''])[0]}"
        return ("read",), path

    def _serve(self) -> None:
        proxy = self.server.proxy
        length = int(self.headers.get("Content-Length") or 0)
        moments, what = self._moments()
        proxy.requests.append(f"{moments[0]} {what}")
        if (refused := proxy.refuses(self)) is not None:
            self.rfile.read(length)
            status, code = refused
            text = f"<Error><Code>{code}</Code><Message>{code} unsupported header</Message></Error>"
            said = {"Content-Length": str(len(text))} if code else {}
            self._answer(status, said, text.encode())
            self.close_connection = not code
            return
        rule = proxy.rule(moments, what)
        if rule is None:
            self._answer(*self._ask(self.rfile.read(length)))
        elif rule.moment in ("write", "probe", "delete") and rule.fault in (RESET, STALLED):
            self.rfile.read(length // 2)
            if rule.fault == STALLED:
                proxy.hold(rule)
            raise _ResetError
        elif rule.moment != "publish" and rule.fault in STATUSES:
            self.rfile.read(length)
            self._answer(*self._status(rule.fault))
        else:
            body = self.rfile.read(length)
            if rule.moment == "write":
                body = _damaged(body, rule.fault)
            status, headers, answer = self._ask(body)
            if rule.fault in STATUSES:
                self._answer(*self._status(rule.fault))
            elif rule.moment == "write":
                self._answer(status, headers, answer)
            elif rule.moment == "probe":
                size = int(headers.get("Content-Length") or 0)
                self._answer(status, headers | {"Content-Length": str(size // 2)}, b"")
            elif rule.fault in (RESET, STALLED):
                half = len(answer) // 2 if rule.moment != "publish" else 0
                if rule.moment != "publish":
                    self._head(status, headers | {"Content-Length": str(len(answer))})
                    self.wfile.write(answer[:half])
                    self.wfile.flush()
                if rule.fault == STALLED:
                    proxy.hold(rule)
                raise _ResetError
            else:
                answer = _damaged(answer, rule.fault)
                headers["Content-Length"] = str(len(answer))
                self._answer(status, headers, answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _status(self, status: str) -> tuple[int, dict[str, str], bytes]:
        code = STATUSES[status]
        text = f"<Error><Code>{code}</Code><Message>made by a test</Message></Error>".encode()
        headers = {"Content-Type": "application/xml", "Content-Length": str(len(text))}
        return int(status), headers, text

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Hand the request on; return the answer's status, headers and body."""
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _OWN_HEADERS}
        if body or "Content-Length" in headers:
            headers["Content-Length"] = str(len(body))
        for fresh in (False, True):
            if self._upstream is None or fresh:
                self._upstream = http.client.HTTPConnection(
                    self.server.proxy.upstream, timeout=_SERVER_SECONDS
                )
            try:
                self._upstream.putrequest(
                    self.command, self.path, skip_host=True, skip_accept_encoding=True
                )
                for name, value in headers.items():
                    self._upstream.putheader(name, value)
                self._upstream.endheaders(body or None)
                answer = self._upstream.getresponse()
                data = answer.read()
                break
            except (OSError, http.client.HTTPException):
                self._upstream.close()
                if fresh:
                    raise _ResetError from None
        found = {k: v for k, v in answer.getheaders() if k.lower() not in _OWN_HEADERS}
        if self.command != "HEAD":
            found = {k: v for k, v in found.items() if k.lower() != "content-length"}
            found["Content-Length"] = str(len(data))
        return answer.status, found, data

    def _head(self, status: int, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self._head(status, headers)
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()


def _damaged(body: bytes, fault: str) -> bytes:
    if fault.startswith(WRONG_LENGTH):
        size = fault.removeprefix(WRONG_LENGTH)
        return body[: int(size) if size else len(body) // 2]
    return body[:-1] + bytes([body[-1] ^ 1]) if body else body
