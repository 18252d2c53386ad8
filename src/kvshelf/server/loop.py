"""The server's event loop: sessions and requests of all clients, on one thread.

Owns the ZMQ socket (ROUTER), the sessions, and the way between messages and the
:class:`~kvshelf.server.service.Service`, which does the work. How a session begins is in
:mod:`kvshelf.server.greetings`, what a client waits for in :mod:`kvshelf.server.answers`.

Contracts
---------
* A request counts only if its client has a session and it begins with that session's token. Others
  are dropped. One that is malformed or asks for too much is answered by a fault. Neither has any
  effect on other clients.
* No client blocks the loop, whatever it does or leaves undone. A client that does not read its
  answers loses its session.
* A session ends with its socket. A client that loses its session otherwise keeps the memory that it
  holds until its socket closes: it may be reading there.

Threads
-------
:meth:`Loop.run` belongs to one thread, and calls all methods of the service there.
:meth:`Loop.post`, :meth:`Loop.stop` and :meth:`Loop.stats` may be called from any thread.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from kvshelf.errors import (
    ConfigError,
    KVShelfError,
    PermanentStorageError,
    TransientStorageError,
)
from kvshelf.logs import RateLimitedLog
from kvshelf.memory.arena import Arena
from kvshelf.server import messages, session
from kvshelf.server.answers import Answers, PendingRequest
from kvshelf.server.greetings import Greetings
from kvshelf.server.messages import (
    Call,
    Done,
    EndSession,
    Fault,
    Fetch,
    Find,
    Hello,
    LookUpChunks,
    MalformedError,
    Ping,
    Register,
    Release,
    Request,
    Store,
    Welcome,
)
from kvshelf.server.service import Service
from kvshelf.server.wake import Wake

logger = logging.getLogger(__name__)

#: Messages of one client that ZMQ keeps, in each direction.
_ZMQ_QUEUE: Final = 64
#: Requests that are handled before the loop looks at anything else.
_ROUND: Final = 32

_TICK_SECONDS: Final = 0.25
_BACKLOG_SECONDS: Final = 0.002


@dataclass(eq=False, slots=True)
class _Session:
    """One client, on the loop's thread."""

    client: bytes
    token: bytes
    socket: socket.socket
    segment: memoryview
    answers: Answers


class Loop:
    """Listens at an ``ipc://`` URL.

    Parameters
    ----------
    url : str
        The folder of the socket is made if it does not exist.

    Raises
    ------
    ConfigError
        If another server runs there, or the folder is not this user's alone.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._log = RateLimitedLog(logger, lines=5)
        self._poller = zmq.Poller()
        #: By their ids, also those that have lost their session and not closed their socket.
        self._sessions: dict[bytes, _Session] = {}
        #: By descriptor.
        self._sockets: dict[int, _Session] = {}
        path = session.socket_path(url)
        self._greetings = Greetings(path, self._poller, self._sessions, self._log)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, messages.MAX_REQUEST)
        self._router.setsockopt(zmq.RCVHWM, _ZMQ_QUEUE)
        self._router.setsockopt(zmq.SNDHWM, _ZMQ_QUEUE)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._wake = Wake()
        self._stopping = False
        self._thread: int | None = None
        self._posted: deque[Callable[[], None]] = deque()
        #: What is to be sent when the round ends.
        self._due: set[Answers] = set()
        self._requests = 0
        self._refused = 0
        self._service: Service
        #: Answers the hello of a client.
        self._welcome: Callable[[_Session], None]
        self._bind()

    def _bind(self) -> None:
        """Let ZMQ listen at the path.

        The sockets are the listener's: ZMQ would delete what is at the path when it begins and when
        it ends, even another server's socket. One at which it listened before goes on: to unbind it
        would end the connections that it has taken.
        """
        try:
            self._router.setsockopt(zmq.USE_FD, self._greetings.take_requests())
            self._router.bind(self.url)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"the node server cannot listen at {self.url}: {error}") from error

    # ---------------------------------------------------------------------------- any thread

    def post(self, function: Callable[[], None]) -> None:
        """Call a function on the loop's thread, soon."""
        self._posted.append(function)
        if threading.get_ident() != self._thread:
            self._wake.set()

    def stop(self) -> None:
        """Let :meth:`run` return. May be called by a signal handler."""
        self._stopping = True
        self._wake.set()

    def stats(self) -> dict[str, int]:
        """Return the number of sessions, requests, and messages and connections refused."""
        return {
            "clients": len(self._sessions),
            "requests": self._requests,
            "refused": self._refused + self._greetings.refused,
        }

    # ---------------------------------------------------------------------------- the loop's thread

    def run(self, service: Service, arena: Arena, *, chunk_size: int) -> None:
        """Serve until :meth:`stop` is called.

        Parameters
        ----------
        service : Service
        arena : Arena
            Shared, and open until this method returns.
        chunk_size : int
            Tokens of a chunk, for clients that have no configuration.

        Raises
        ------
        ConfigError
            If another server has taken this one's place, whose files had been deleted.
        """
        fd = arena.fd
        assert fd is not None
        self._thread = threading.get_ident()
        self._service = service

        def welcome(new: _Session) -> None:
            message = Welcome(
                new.token,
                arena.nbytes,
                service.slots,
                service.lease_seconds,
                chunk_size,
                service.facts,
            )
            session.welcome(new.socket, message, fd)

        self._welcome = welcome
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        next_tick = time.monotonic()
        while not self._stopping:
            wait = _BACKLOG_SECONDS if self._due else max(0.0, next_tick - time.monotonic())
            events = self._poller.poll(0 if self._posted else int(wait * 1000) + 1)
            for source, _ in events:
                try:
                    self._handle_event(source)
                except (zmq.ZMQError, MemoryError):
                    raise
                except Exception as error:  # noqa: BLE001
                    self._log.error("the node server failed: %s", error, exc_info=error)
            self._run_posted()
            for answers in list(self._due):
                answers.flush()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + _TICK_SECONDS
                self._tick()

    def _handle_event(self, source: object) -> None:
        """Look at a socket, or at a descriptor, that is readable."""
        if source is self._router:
            self._receive()
        elif source == self._wake.fileno():
            self._wake.clear()
        elif source in self._sockets:
            self._look_at(self._sockets[source])
        elif isinstance(source, int) and (greeted := self._greetings.handle(source)) is not None:
            self._open(*greeted)

    def close(self) -> None:
        """Close all sockets. Idempotent; after :meth:`run`."""
        for client in self._sessions.values():
            client.socket.close()
        self._sessions.clear()
        self._sockets.clear()
        if not self._router.closed:
            self._router.close()
            self._context.term()
        self._greetings.close()

    def _run_posted(self) -> None:
        for _ in range(len(self._posted)):
            self._guarded(self._posted.popleft())

    def _tick(self) -> None:
        if self._greetings.tick():
            self._bind()
        self._guarded(self._service.tick)

    def _guarded(self, function: Callable[..., None], *args: object) -> None:
        """Call a function; what it raises is logged, and ends nothing."""
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001
            self._log.error("the node server failed: %s", error, exc_info=error)

    # ---------------------------------------------------------------------------- sessions

    def _open(self, connection: socket.socket, hello: Hello, segment: memoryview) -> None:
        """Begin the session of a client that has said hello."""

        def send(frame: bytes) -> None:
            self._router.send_multipart((hello.client, frame), zmq.NOBLOCK)

        answers = Answers(
            send,
            self._due,
            lambda leases: self._service.release(hello.client, leases),
            lambda problem: self._expel(new, problem),
        )
        token = os.urandom(messages.TOKEN_BYTES)
        new = _Session(hello.client, token, connection, segment, answers)
        self._sessions[hello.client] = self._sockets[connection.fileno()] = new
        self._poller.register(connection.fileno(), zmq.POLLIN)
        try:
            self._welcome(new)
        except OSError:
            self._end(new)

    def _look_at(self, client: _Session) -> None:
        """End a session whose socket has closed."""
        if session.has_ended(client.socket):
            self._end(client)

    def _end(self, client: _Session) -> None:
        client.answers.end()
        fd = client.socket.fileno()
        del self._sessions[client.client], self._sockets[fd]
        self._poller.unregister(fd)
        client.socket.close()
        client.segment = memoryview(b"")
        self._guarded(self._service.client_gone, client.client)

    def _expel(self, client: _Session, problem: str) -> None:
        """Take no more messages of a client, which may still read memory."""
        self._refused += 1
        self._log.warning("a client of the node server lost its session: %s", problem)
        client.answers.end()
        with contextlib.suppress(OSError):
            client.socket.shutdown(socket.SHUT_WR)

    # ---------------------------------------------------------------------------- requests

    def _receive(self) -> None:
        for _ in range(_ROUND):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = self._sessions.get(frames[0][: messages.ID_BYTES])
            if client is None or client.answers.ended or len(frames) != 2:
                self._refused += 1
                continue
            frame = memoryview(frames[1])
            try:
                token, number = messages.read_request_head(frame)
            except MalformedError:
                self._refused += 1
                continue
            if not hmac.compare_digest(token, client.token):
                self._refused += 1
                continue
            self._handle(client, number, frame)

    def _handle(self, client: _Session, number: int, frame: memoryview) -> None:
        self._requests += 1
        try:
            request = messages.decode_request(frame)
        except MalformedError as error:
            self._refused += 1
            client.answers.send(number, Fault("PermanentStorageError", f"no request: {error}"))
            return
        count = len(request.names) if isinstance(request, Fetch) else 1
        try:
            pending = client.answers.begin(number, count, len(frame))
        except TransientStorageError as error:
            self._refused += 1
            client.answers.send(number, Fault.of(error))
            return
        try:
            self._dispatch(client, request, pending)
        except Exception as error:  # noqa: BLE001
            if not isinstance(error, KVShelfError):
                self._log.error("the node server failed: %s", error, exc_info=error)
            pending.fail(Fault.of(error))

    def _dispatch(self, client: _Session, request: Request, pending: PendingRequest) -> None:
        service = self._service
        match request:
            case Find():
                service.find(client.client, request, pending.done)
            case Fetch():
                if len(request.sizes) != len(request.names):
                    raise PermanentStorageError(
                        f"{len(request.sizes)} sizes for {len(request.names)} names"
                    )
                service.fetch(client.client, request, pending.each)
            case Release():
                pending.settle()
                service.release(client.client, request.leases)
            case EndSession():
                pending.settle()
                service.end_session(client.client, request.session)
            case LookUpChunks():
                service.lookup(client.client, request, pending.done)
            case Store():
                end = request.offset + request.nbytes
                if end > len(client.segment):
                    raise PermanentStorageError(
                        f"bytes {request.offset} to {end} of a segment of {len(client.segment)}"
                    )
                source = client.segment[request.offset : end]
                service.store(client.client, request, source, pending.done)
            case Call():
                service.call(client.client, request, pending.done)
            case Register():
                service.register(request.record)
                pending.done(Done())
            case Ping():
                pending.done(Done())
