"""An S3 store on a port of this machine, in this process: objects, and a script of answers.

Owns the answers of a store and the script that replaces some of them. The store knows objects,
``If-None-Match`` for new ones, copies, ranges of the form ``a-b``, and listings by pages with ``/``
as delimiter. Each connection has a thread of its own. Clients see real HTTP, so tests with this
store have the mark ``real``.
"""

from __future__ import annotations

import contextlib
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.message import Message
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SO_LINGER, SOL_SOCKET
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from kvshelf.backends import open_backend
from tests.support.servers import BUCKET, KEY, SECRET


@dataclass(eq=False)
class Request:
    """One request.

    Attributes
    ----------
    path : str
        ``bucket/key``; of a listing the bucket.
    query : dict
    kind : str
        ``probe``, ``read``, ``write``, ``list`` or ``delete``.
    """

    method: str
    url: str
    headers: Message
    body: bytes = b""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self.path = unquote(parts.path).strip("/")
        self.query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        kinds = {"HEAD": "probe", "PUT": "write", "GET": "read" if "/" in self.path else "list"}
        self.kind = kinds.get(self.method, "delete")


@dataclass
class Answer:
    """An answer to one request.

    Attributes
    ----------
    status : int
    body : bytes, or Iterable of bytes
        The length of pieces must be among the headers.
    headers : dict
    says_length : bool
        Without the length of a body the connection ends behind it.
    ends_after : int or None
        Reset the connection after so many bytes of each piece; of -1, before the status.
    gate : threading.Event or None
        Where `ends_after` is given: reset the connection only once this is set.
    """

    status: int = 200
    body: bytes | Iterable[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)
    says_length: bool = True
    ends_after: int | None = None
    gate: threading.Event | None = None


def refusal(status: int, code: str, message: str = "made by a test") -> Answer:
    """Return an error answer with S3's `code`."""
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, text.encode("utf-8", "surrogatepass"))


def row(name: str, size: int = 1, modified: str = "2026-01-31T12:00:00.000Z") -> str:
    """Return the XML of an object in a listing."""
    times = f'<LastModified>{modified}</LastModified><ETag>"e"</ETag>'
    return f"<Contents><Key>{escape(name)}</Key>{times}<Size>{size}</Size></Contents>"


def folder(name: str) -> str:
    """Return the XML of a folder in a listing."""
    return f"<CommonPrefixes><Prefix>{escape(name)}/</Prefix></CommonPrefixes>"


def page(rows: str, token: str = "") -> Answer:
    """Return a page of a listing; with a `token` the client asks for the page behind it."""
    more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
    text = f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>{rows}{more}"
    return Answer(body=f"<ListBucketResult><Name>b</Name>{text}</ListBucketResult>".encode())


class ScriptedS3:
    """A store that begins with one empty bucket, and answers until it is closed.

    Attributes
    ----------
    endpoint : str
    objects : dict
        Bytes and time of the last change, by path.
    buckets, versioned : set of str
        The buckets, and those whose answers name a version.
    heeds_conditions, copies, knows_ranges : bool
        Whether it refuses to replace an object, copies, and serves ranges. Without `copies` it
        answers a copy as if it had made it.
    delay_seconds : float
        How long it waits before each answer.
    clock : Callable
        Gives the time of the last change of what is written.
    requests : list of Request
    script : Callable
        Answers a request in place of the store, unless it returns None.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.buckets, self.versioned = {BUCKET}, set[str]()
        self.heeds_conditions = self.copies = self.knows_ranges = True
        self.delay_seconds, self.clock = 0.0, time.time
        self.requests: list[Request] = []
        self.script: Callable[[Request], Answer | None] = lambda _: None
        self.lock = threading.Lock()
        self._server = _Server(self, 0)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> ScriptedS3:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def options(self, **more: Any) -> dict[str, Any]:
        """Return storage options for the store."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint, **more}

    def open(self, prefix: str = "kv", **options: Any) -> Any:
        """Open a shelf in the bucket."""
        return open_backend(f"s3://{BUCKET}/{prefix}", storage_options=self.options(**options))

    def asked(self, call: Callable[[], object]) -> list[str]:
        """Make a call, and return the kinds of its requests."""
        seen = len(self.requests)
        call()
        return [request.kind for request in self.requests[seen:]]

    def close(self) -> None:
        """Take no connection any more, and answer nothing."""
        self._server.is_down = True
        self._server.shutdown()
        self._server.server_close()

    def reopen(self) -> None:
        """Answer again, at the same port, after :meth:`close`."""
        self._server = _Server(self, self._server.server_port)

    def answer(self, request: Request) -> Answer:
        """Do what a request asks for."""
        bucket, _, key = request.path.partition("/")
        if bucket not in self.buckets:
            return refusal(404, "NoSuchBucket")
        with self.lock:
            return getattr(self, f"_{request.kind}")(request, f"{bucket}/", key)  # type: ignore[no-any-return]

    def _read(self, request: Request, bucket: str, key: str) -> Answer:
        if request.path not in self.objects:
            return refusal(404, "NoSuchKey")
        data, modified = self.objects[request.path]
        headers = {"ETag": f'"{hash(data)}"', "Last-Modified": formatdate(modified)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if wanted is None or not self.knows_ranges:
            return Answer(200, data, headers)
        first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
        if first > last:
            return refusal(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return Answer(206, data[first : last + 1], headers)

    _probe = _read

    def _delete(self, request: Request, bucket: str, key: str) -> Answer:
        names = [escape(key)] if key else re.findall("<Key>(.*?)</Key>", request.body.decode())
        for name in names:
            self.objects.pop(bucket + unescape(name), None)
        rows = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        return Answer(body=b"" if key else f"<DeleteResult>{rows}</DeleteResult>".encode())

    def _write(self, request: Request, bucket: str, key: str) -> Answer:
        source = unquote(request.headers.get("x-amz-copy-source", "")).strip("/")
        is_new = "If-None-Match" in request.headers and self.heeds_conditions
        if source and source not in self.objects:
            return refusal(404, "NoSuchKey")
        if is_new and request.path in self.objects:
            return refusal(412, "PreconditionFailed")
        data = self.objects[source][0] if source else request.body
        if self.copies or not source:
            self.objects[request.path] = data, self.clock()
        copied = f"<ETag>{hash(data)}</ETag><LastModified>{_iso(self.clock())}</LastModified>"
        headers = {"ETag": f'"{hash(data)}"'}
        if bucket[:-1] in self.versioned:
            headers["x-amz-version-id"] = "v"
        return Answer(200, f"<CopyObjectResult>{copied}</CopyObjectResult>".encode(), headers)

    def _list(self, request: Request, bucket: str, key: str) -> Answer:
        query, rows, last = request.query, dict[str, str](), ""
        prefix = bucket + query.get("prefix", "")
        after = bucket + max(query.get("start-after", ""), query.get("continuation-token", ""))
        for path in sorted(path for path in self.objects if path.startswith(prefix)):
            inside, slash, _ = path[len(prefix) :].partition("/")
            name = f"{prefix}{inside}" if slash and "delimiter" in query else path
            if path <= after or name in rows or (name != path and after.startswith(f"{name}/")):
                continue
            if len(rows) == int(query.get("max-keys", 1000)):
                return page("".join(rows.values()), last[len(bucket) :])
            (data, modified), last, shown = self.objects[path], path, name[len(bucket) :]
            is_object = name == path
            rows[name] = row(shown, len(data), _iso(modified)) if is_object else folder(shown)
        return page("".join(rows.values()))


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, store: ScriptedS3, port: int) -> None:
        self.store, self.is_down = store, False
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""

    def _serve(self) -> None:
        store, request = self.server.store, Request(self.command, self.path, self.headers)
        request.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        store.requests.append(request)
        time.sleep(store.delay_seconds)
        answer = Answer(ends_after=-1)
        if not self.server.is_down:
            answer = store.script(request) or store.answer(request)
        if answer.ends_after is None or answer.ends_after >= 0:
            self._send(answer)
        if answer.ends_after is not None:
            if answer.gate is not None:
                answer.gate.wait()
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _send(self, answer: Answer) -> None:
        headers = {"Content-Type": "application/xml", "Last-Modified": formatdate(0)}
        pieces = [answer.body] if isinstance(answer.body, bytes) else answer.body
        if answer.says_length and isinstance(answer.body, bytes):
            headers["Content-Length"] = str(len(answer.body))
        self.close_connection |= not answer.says_length
        self.send_response(answer.status)
        for name, value in (headers | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        for piece in pieces if self.command != "HEAD" else ():
            self.wfile.write(piece[: answer.ends_after])
