"""Runs the proxy on a port of this machine.

Owns the listening socket, the connections of clients, and the end: SIGTERM and SIGINT close the
socket at once, give running requests the drain time, and then cancel them. A second signal cancels
them at once.

Contracts
---------
* A client that has a connection and no request under way has some seconds to send the head of one,
  which is of bounded size.
* There is a limit to the connections. One above it ends the oldest that has no request under way;
  where all have, its request is answered with 503.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import sys
from typing import Any, ClassVar, Final, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvshelf.logs import RateLimitedLog

logger = logging.getLogger(__name__)

#: Longest time without a request until its head is complete.
_HEAD_SECONDS: Final = 10.0
#: Time in which a client takes more of the end of an answer.
_TAKE_SECONDS: Final = 60.0
#: Bytes after which a head that is not complete is given up.
_HEAD_BYTES: Final = 64 << 10
#: Open files for each connection of a client: its own, one to an engine, and one to an engine that
#: is kept for the next request; and for all else.
_FILES_EACH: Final = 3
_FILES: Final = 128


def serve(app: Starlette, listener: socket.socket, *, connections: int, drain: float) -> None:
    """Serve until SIGTERM or SIGINT.

    Parameters
    ----------
    app : Starlette
    listener : socket
        Is closed at the end.
    connections : int
        Most connections of clients; fewer where the system does not allow the files for them.
    drain : float
        Seconds that running requests have to end.
    """
    with listener:
        server = make_server(app, connections=_allowed(connections), drain=drain)
        # uvicorn raises the signals that ended it once more.
        before = {which: signal.signal(which, _exit) for which in (signal.SIGTERM, signal.SIGINT)}
        try:
            server.run(sockets=[listener])
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)


def make_server(app: Starlette, *, connections: int, drain: float) -> uvicorn.Server:
    """Make the server; :func:`serve` runs it."""
    # Which of uvicorn's protocols there is depends on what is installed.
    protocol = type("_Protocol", (_Bounded, AutoHTTPProtocol), {"waiting": {}})
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", protocol),
            limit_concurrency=connections,
            access_log=False,
            log_config=None,
            # Its warnings are one line for each bad request, and for each above the limit.
            log_level="error",
            # Answers have the headers of engines.
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, round(drain)),
            ws="none",
        )
    )


class _Bounded(asyncio.Protocol):
    """A limit on the time for a request's head, which uvicorn's protocols lack.

    Comes before one of them among the bases of a class.
    """

    #: Connections without a request under way, those first that have waited longest.
    waiting: ClassVar[dict[_Bounded, None]]
    _log: ClassVar = RateLimitedLog(logger)

    # Of uvicorn's protocols.
    config: uvicorn.Config
    connections: set[Any]
    cycle: Any
    transport: asyncio.Transport

    _timer: asyncio.TimerHandle | None = None
    _received = 0
    _unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        limit = self.config.limit_concurrency
        if limit is not None and len(self.connections) >= limit and self.waiting:
            self._log.warning("there are %d connections: those that wait are ended", limit)
            oldest = next(iter(self.waiting))
            oldest._end()
            # Its end comes later, and the next connection may be here already.
            self.connections.discard(oldest)
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self in self.waiting:
            if self._received > _HEAD_BYTES:
                self._end()
                return
            self._received += len(data)
        super().data_received(data)
        if not self._idle:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        # A request that came meanwhile may have begun.
        if self._idle:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        self._stop_waiting()
        self._received = self._unsent = 0
        self.waiting[self] = None
        self._timer = asyncio.get_running_loop().call_later(_HEAD_SECONDS, self._late)

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:
            # The end of its last answer is on its way.
            self._unsent = unsent
            self._timer = asyncio.get_running_loop().call_later(_TAKE_SECONDS, self._late)
        else:
            self._end()

    def _end(self) -> None:
        self._stop_waiting()
        self.transport.abort()


def _allowed(connections: int) -> int:
    """Return how many connections there are files for, and let the system allow these."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES + _FILES_EACH * connections
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < wanted:
            connections = max(1, (soft - _FILES) // _FILES_EACH)
            logger.warning(
                "the system allows this process %d open files: enough for %d connections",
                soft,
                connections,
            )
    return connections


def _exit(*_: object) -> None:
    sys.exit(0)
