"""From a connection to a session: the server's sockets, and clients that have not said hello.

Owns the :class:`~kvshelf.server.session.Listener` and the connections that it has taken, until they
have said hello. Then the loop owns them.

Contracts
---------
* Connections that say nothing are bounded, in number and in time. A client that sends something
  else than hello, comes when the server is full, or has the id of another client, gets an error and
  is counted.
* The server stays at its path: files that a cleaner deletes there are made again, without effect
  on sessions. If another server has taken the place meanwhile, this one ends.
* Without descriptors no client is accepted, until the next :meth:`Greetings.tick`.

Threads
-------
All methods are called on the loop's thread, and none blocks; but :attr:`Greetings.refused`, which
any thread may read.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection
from typing import Final

import zmq

from kvshelf.errors import ConfigError, KVShelfError
from kvshelf.logs import RateLimitedLog
from kvshelf.server import messages, session
from kvshelf.server.messages import Hello

#: Most sessions, and connections that have not said hello; and how long one may take for that.
MAX_SESSIONS: Final = 256
_MAX_GREETING: Final = 64
_GREETING_SECONDS: Final = 5.0


class Greetings:
    """Takes connections at a path.

    Parameters
    ----------
    path : str
    poller : zmq.Poller
        Knows the descriptors that :meth:`handle` is to be called for.
    clients : Collection of bytes
        The ids of the clients with a session.
    log : RateLimitedLog

    Attributes
    ----------
    refused : int
        Connections that were refused.

    Raises
    ------
    ConfigError
        If another server runs there, or the folder is not this user's alone.
    """

    def __init__(
        self,
        path: str,
        poller: zmq.Poller,
        clients: Collection[bytes],
        log: RateLimitedLog,
    ) -> None:
        self._path = path
        self._poller = poller
        self._clients = clients
        self._log = log
        self._greeting: dict[int, tuple[socket.socket, float]] = {}
        self.refused = 0
        self._listener = session.Listener(path)
        self._poller.register(self._listener.fileno(), zmq.POLLIN)

    def take_requests(self) -> int:
        """Return the descriptor of the socket for requests, which the caller closes."""
        return self._listener.requests.detach()

    def handle(self, fd: int) -> tuple[socket.socket, Hello, memoryview] | None:
        """Look at a descriptor that is readable.

        Returns
        -------
        tuple of socket, Hello and memoryview, or None
            A connection that has said hello, and its segment; the caller closes it.
        """
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._greeting:
            return self._greet(fd)
        return None

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()
        except OSError as error:
            # No descriptors are left: look again at the next tick.
            self._poller.modify(self._listener.fileno(), 0)
            self._log.error("no client can connect: %s", error)
            return
        if connection is None:
            return
        if len(self._clients) >= MAX_SESSIONS or len(self._greeting) >= _MAX_GREETING:
            self.refused += 1
            session.refuse(connection, f"there are {len(self._clients)} clients already")
            connection.close()
            return
        self._greeting[connection.fileno()] = connection, time.monotonic() + _GREETING_SECONDS
        self._poller.register(connection.fileno(), zmq.POLLIN)

    def _greet(self, fd: int) -> tuple[socket.socket, Hello, memoryview] | None:
        connection, _ = self._greeting[fd]
        try:
            received = session.receive_hello(connection, messages.MAX_SEGMENT)
            if received is None:
                return None
            self._check(received[0])
        except OSError as error:
            if isinstance(error, KVShelfError):
                session.refuse(connection, str(error))
            self._refuse(fd, str(error))
            return None
        self._end(fd)
        return connection, *received

    def _check(self, hello: Hello) -> None:
        if hello.protocol != messages.PROTOCOL:
            raise session.SessionError(
                f"the client speaks version {hello.protocol} of the protocol, this server version"
                f" {messages.PROTOCOL}: use the same version of kvshelf"
            )
        if hello.client in self._clients:
            raise session.SessionError("another client has the same id")

    def _refuse(self, fd: int, problem: str) -> None:
        self.refused += 1
        self._log.warning("a client of the node server was refused: %s", problem)
        self._end(fd).close()

    def _end(self, fd: int) -> socket.socket:
        self._poller.unregister(fd)
        return self._greeting.pop(fd)[0]

    def tick(self) -> bool:
        """Refuse clients that stay silent for too long, and stay in place; several times a second.

        Returns
        -------
        bool
            Whether there is a new socket for requests: lock or sockets were deleted.

        Raises
        ------
        ConfigError
            If another server has taken the place.
        """
        now = time.monotonic()
        for fd, (_, deadline) in list(self._greeting.items()):
            if now >= deadline:
                self._refuse(fd, "it said nothing")
        is_new = not self._listener.in_place() and self._listen_anew()
        if self._listener.fileno() >= 0:
            self._poller.register(self._listener.fileno(), zmq.POLLIN)
        return is_new

    def _listen_anew(self) -> bool:
        with contextlib.suppress(KeyError):
            self._poller.unregister(self._listener.fileno())
        self._listener.close()
        try:
            self._listener = session.Listener(self._path)
        except session.TakenError as error:
            raise ConfigError(
                f"the files of this node server at {self._path} were deleted, and another server"
                " has taken its place"
            ) from error
        except KVShelfError as error:
            # Its clients are served; the next tick tries again.
            self._log.error("no client can connect to the node server: %s", error)
            return False
        self._log.warning(
            "the files of the node server at %s were deleted and are there again", self._path
        )
        return True

    def close(self) -> None:
        """Close all sockets and leave the path. Idempotent."""
        for connection, _ in self._greeting.values():
            connection.close()
        self._greeting.clear()
        self._listener.close()
