"""HTTP for probes and Prometheus: answers GET of a few paths, on a port of its own.

Owns :class:`Probes`, which the node server uses for health and metrics, and :func:`listen`.

Contracts
---------
* Nothing is read from a request but its first line and the end of its headers, and a connection has
  one answer.
* A client has :data:`SECONDS` for all of it: its request, the answer, and taking that. However
  slowly it sends or reads, its connection then ends.
* There are at most :data:`CONNECTIONS`; a further one ends the oldest, so that silent clients keep
  no others out.

Threads
-------
:meth:`Probes.serve` belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from kvshelf.errors import ConfigError
from kvshelf.logs import RateLimitedLog

logger = logging.getLogger(__name__)

#: Longest time from a connection to its end.
SECONDS: Final = 10.0
#: Most connections at the same time.
CONNECTIONS: Final = 32
#: Most bytes of a request.
_REQUEST: Final = 16 << 10
_HEAD_END: Final = b"\r\n\r\n"
_REASONS: Final = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Page(NamedTuple):
    """The answer to a request.

    Attributes
    ----------
    status : int
    kind : str
        The ``Content-Type``.
    body : bytes
    """

    status: int
    kind: str
    body: bytes


def text(status: int, line: str) -> Page:
    """Return a page of one line."""
    return Page(status, "text/plain; charset=utf-8", f"{line}\n".encode())


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Parameters
    ----------
    host : str
        An address of this machine, IPv4 or IPv6, or a name of it.
    port : int
        0 for any free one.

    Raises
    ------
    ConfigError
        If the address cannot be listened at.
    """
    try:
        [family, *_], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}, port {port}: {error}") from None


class Probes:
    """Answers on one socket.

    Parameters
    ----------
    listener : socket
        Is closed when :meth:`serve` ends.
    answer : Callable
        Returns the page of a path; None: there is none.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[str], Awaitable[Page | None]],
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._log = RateLimitedLog(logger)
        #: The oldest first.
        self._connections: dict[asyncio.Task[None], None] = {}

    async def serve(self, until: asyncio.Event) -> None:
        """Answer requests until an event is set."""
        server = await asyncio.start_server(self._begin, sock=self._listener, limit=_REQUEST)
        try:
            await until.wait()
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(self._converse(reader, writer))
        self._connections[task] = None
        task.add_done_callback(lambda _: self._connections.pop(task, None))
        # A task that is cancelled before it begins does not close its connection.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            TimeoutError,
            ConnectionError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ):
            await asyncio.wait_for(self._reply(reader, writer), SECONDS)

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        page = await self._page(await reader.readuntil(_HEAD_END))
        head = (
            f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\n"
            f"Content-Type: {page.kind}\r\n"
            f"Content-Length: {len(page.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + page.body)
        writer.close()
        await writer.wait_closed()

    async def _page(self, head: bytes) -> Page:
        method, _, target = head.partition(b" ")
        if method != b"GET":
            return text(405, "only GET")
        path = target.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        try:
            answer = await self._answer(path)
        except Exception as error:  # noqa: BLE001 - the client gets an answer, whatever went wrong
            self._log.error("a request for %r failed", path, exc_info=error)
            return text(500, "this could not be found out")
        return answer or text(404, "no such path")
