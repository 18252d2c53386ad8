"""The server's event loop: sessions and requests of all clients, on one thread.

Owns the ZMQ socket (ROUTER), the session sockets, and the way between messages and the
:class:`~kvshelf.server.service.Service`, which does the work. Listening, and whom to trust, is in
:mod:`kvshelf.server.session`.

Contracts
---------
* A request counts only if its client has a session and it begins with that session's token. Others
  are dropped. One that is malformed or asks for too much is answered by a fault. Neither has any
  effect on other clients.
* Nothing that a client does or leaves undone blocks the loop. What it may have waiting is bounded:
  bytes of requests, requests without an answer, bytes of answers. A client that does not read its
  answers loses its session.
* The server stays at its path: what a cleaner deletes there is made again. If another server has
  taken it meanwhile, this one ends.
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
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from kvshelf.errors import ConfigError, KVShelfError, PermanentStorageError
from kvshelf.logs import RateLimitedLog
from kvshelf.memory.arena import Arena
from kvshelf.server import messages, session
from kvshelf.server.messages import (
    Appeared,
    Call,
    Done,
    Draining,
    EndSession,
    Facts,
    Failed,
    Fault,
    Fetch,
    Fetched,
    Find,
    Hello,
    LookUpChunks,
    MalformedError,
    Ping,
    Ready,
    Register,
    Registered,
    Release,
    Reply,
    Request,
    Store,
    Welcome,
)
from kvshelf.server.service import Service
from kvshelf.server.wake import Wake

logger = logging.getLogger(__name__)

#: Most sessions, and connections that have not said hello; and how long one may take for that.
MAX_SESSIONS: Final = 256
_MAX_GREETING: Final = 64
_GREETING_SECONDS: Final = 5.0

#: Most answers that one client may wait for: one for each request, for each object of a fetch.
MAX_OPEN: Final = 4 * messages.MAX_NAMES
#: Most bytes of requests of one client that wait for their answers.
MAX_OPEN_BYTES: Final = 64 << 20
#: Messages of one client that ZMQ keeps, in each direction.
_ZMQ_QUEUE: Final = 64
#: Bytes of answers of one client that wait for room in ZMQ's queue.
_MAX_BACKLOG: Final = 2 * messages.MAX_REPLY
#: Requests that are handled before the loop looks at anything else.
_ROUND: Final = 32

#: Outcomes in one message.
_OUTCOMES: Final = 512

_TICK_SECONDS: Final = 0.25
_BACKLOG_SECONDS: Final = 0.002


class _Session:
    """One client, on the loop's thread."""

    __slots__ = (
        "backlog",
        "backlog_bytes",
        "client",
        "ended",
        "open",
        "open_bytes",
        "segment",
        "socket",
        "token",
    )

    def __init__(
        self, client: bytes, token: bytes, connection: socket.socket, segment: memoryview
    ) -> None:
        self.client = client
        self.token = token
        self.socket = connection
        self.segment = segment
        #: Answers that it waits for.
        self.open = 0
        #: Bytes of its requests that have not all their answers.
        self.open_bytes = 0
        self.backlog: deque[bytes] = deque()
        self.backlog_bytes = 0
        #: Its messages count no more.
        self.ended = False


class _Pending:
    """A request that waits for its answers."""

    __slots__ = ("_client", "_left", "_loop", "_nbytes", "_number")

    def __init__(
        self, loop: Loop, client: _Session, number: int, answers: int, nbytes: int
    ) -> None:
        self._loop = loop
        self._client = client
        self._number = number
        self._left = answers
        self._nbytes = nbytes
        client.open += answers
        client.open_bytes += nbytes

    def settle(self) -> bool:
        """Wait for nothing more; return whether anything was waited for."""
        waited = self._left
        self._answered(waited)
        return waited > 0

    def done(self, reply: Reply) -> None:
        """Answer the request."""
        if self.settle():
            self._loop._send(self._client, self._number, reply)

    def each(self, outcomes: Sequence[Ready | Failed]) -> None:
        """Answer a fetch, for some of its objects."""
        if len(outcomes) > self._left:
            # The request has failed as a whole, and nobody waits for its objects.
            self._loop._give_back(self._client, outcomes)
            return
        self._answered(len(outcomes))
        self._loop._add_outcomes(self._client, self._number, outcomes)

    def _answered(self, answers: int) -> None:
        self._left -= answers
        self._client.open -= answers
        if self._left == 0:
            self._client.open_bytes -= self._nbytes
            self._nbytes = 0


class Loop:
    """Listens at an ``ipc://`` URL.

    Parameters
    ----------
    url : str
        The folder of the socket is made if it does not exist.
    clock : Callable
        Seconds, for deadlines of greetings and ticks.

    Raises
    ------
    ConfigError
        If another server runs there, or the folder is not this user's alone.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        path = session.socket_path(url)
        self._listener = session.Listener(path)
        self._clock = clock
        self._path = path
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
        self._poller = zmq.Poller()
        #: By their ids, also those that have lost their session and not closed their socket.
        self._sessions: dict[bytes, _Session] = {}
        #: By descriptor.
        self._sockets: dict[int, _Session] = {}
        self._greeting: dict[int, tuple[socket.socket, float]] = {}
        self._slow: set[_Session] = set()
        self._outcomes: dict[tuple[_Session, int], list[Ready | Failed]] = {}
        self._requests = 0
        self._refused = 0
        self._log = RateLimitedLog(logger, lines=5)
        self._service: Service
        self._welcome: Callable[[bytes], Welcome]
        self._bind()

    def _bind(self) -> None:
        """Let ZMQ listen at the path.

        The sockets are the listener's: ZMQ would delete what is at the path when it begins and when
        it ends, whoever it belongs to. One at which it listened before goes on: to unbind it would
        end the connections that it has taken.
        """
        try:
            self._router.setsockopt(zmq.USE_FD, self._listener.requests.detach())
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

    def announce_drain(self) -> None:
        """Tell all clients that the server is about to stop."""
        self.post(lambda: self._tell_all(Draining()))

    def stats(self) -> dict[str, int]:
        """Return the number of sessions, requests, and messages and connections refused."""
        return {
            "clients": len(self._sessions),
            "requests": self._requests,
            "refused": self._refused,
        }

    # ---------------------------------------------------------------------------- the loop's thread

    def run(
        self,
        service: Service,
        arena: Arena,
        *,
        slots: int,
        lease_seconds: float,
        chunk_size: int,
        facts: Callable[[], Facts],
        max_segment_bytes: int = messages.MAX_SEGMENT,
    ) -> None:
        """Serve until :meth:`stop` is called.

        Parameters
        ----------
        service : Service
        arena : Arena
            Shared, and open until this method returns.
        slots : int
            Number of generations at the arena's beginning.
        lease_seconds : float
        chunk_size : int
            Tokens of a chunk, for clients that have no configuration.
        facts : Callable
            What clients are told of the storage.
        max_segment_bytes : int
            Largest segment of a client.

        Raises
        ------
        ConfigError
            If another server has taken this one's place, whose files had been deleted.
        """
        assert arena.fd is not None
        self._thread = threading.get_ident()
        self._service = service
        self._arena_fd = arena.fd
        self._max_segment = max_segment_bytes
        server = os.urandom(messages.ID_BYTES)
        self._welcome = lambda token: Welcome(
            token, server, arena.nbytes, slots, lease_seconds, chunk_size, facts()
        )
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._poller.register(self._listener.fileno(), zmq.POLLIN)
        next_tick = self._clock()
        while not self._stopping:
            wait = _BACKLOG_SECONDS if self._slow else max(0.0, next_tick - self._clock())
            events = self._poller.poll(0 if self._posted else int(wait * 1000) + 1)
            for source, _ in events:
                try:
                    self._handle_event(source)
                except (zmq.ZMQError, MemoryError):
                    raise
                except Exception as error:  # noqa: BLE001
                    self._log.error("the node server failed: %s", error, exc_info=error)
            self._run_posted()
            self._send_outcomes()
            for slow in list(self._slow):
                self._send_backlog(slow)
            if self._clock() >= next_tick:
                next_tick = self._clock() + _TICK_SECONDS
                self._tick()

    def _handle_event(self, source: object) -> None:
        """Look at a socket, or at a descriptor, that is readable."""
        if source is self._router:
            self._receive()
        elif source == self._wake.fileno():
            self._wake.clear()
        elif source == self._listener.fileno():
            self._accept()
        elif source in self._greeting:
            self._greet(source)
        elif source in self._sockets:
            self._look_at(self._sockets[source])

    def tell(self, client: bytes, folder: str, names: Sequence[str]) -> None:
        """Tell a client what appeared in a folder; no names: anything may have."""
        told = self._sessions.get(client)
        if told is not None:
            for start in range(0, max(1, len(names)), messages.MAX_NAMES):
                self._send(
                    told, 0, Appeared(folder, list(names[start : start + messages.MAX_NAMES]))
                )

    def close(self) -> None:
        """Close all sockets. Idempotent; after :meth:`run`."""
        for connection, _ in self._greeting.values():
            connection.close()
        for client in self._sessions.values():
            client.socket.close()
        self._greeting.clear()
        self._sessions.clear()
        self._sockets.clear()
        if not self._router.closed:
            self._router.close()
            self._context.term()
        self._listener.close()

    def _run_posted(self) -> None:
        for _ in range(len(self._posted)):
            function = self._posted.popleft()
            try:
                function()
            except Exception as error:  # noqa: BLE001
                self._log.error("the node server failed: %s", error, exc_info=error)

    def _tick(self) -> None:
        now = self._clock()
        for fd, (connection, deadline) in list(self._greeting.items()):
            if now >= deadline:
                self._end_greeting(fd, "it said nothing")
                connection.close()
        self._stay_in_place()
        if self._listener.fileno() >= 0:
            self._poller.register(self._listener.fileno(), zmq.POLLIN)
        try:
            self._service.tick()
        except Exception as error:  # noqa: BLE001
            self._log.error("the node server failed: %s", error, exc_info=error)

    def _stay_in_place(self) -> None:
        """Listen anew if lock or sockets were deleted; sessions and requests go on."""
        if self._listener.in_place():
            return
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
            return
        self._bind()
        self._log.warning(
            "the files of the node server at %s were deleted and are there again", self._path
        )

    # ---------------------------------------------------------------------------- sessions

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
        if len(self._sessions) >= MAX_SESSIONS or len(self._greeting) >= _MAX_GREETING:
            self._refused += 1
            session.refuse(connection, f"there are {len(self._sessions)} clients already")
            connection.close()
            return
        self._greeting[connection.fileno()] = connection, self._clock() + _GREETING_SECONDS
        self._poller.register(connection.fileno(), zmq.POLLIN)

    def _end_greeting(self, fd: int, problem: str | None = None) -> None:
        del self._greeting[fd]
        self._poller.unregister(fd)
        if problem:
            self._refused += 1
            self._log.warning("a client of the node server was refused: %s", problem)

    def _greet(self, fd: int) -> None:
        connection, _ = self._greeting[fd]
        try:
            received = session.receive_hello(connection, self._max_segment)
            if received is None:
                return
            hello, segment = received
            self._check(hello)
            new = _Session(hello.client, os.urandom(messages.TOKEN_BYTES), connection, segment)
            self._sessions[hello.client] = self._sockets[fd] = new
            self._end_greeting(fd)
            self._poller.register(fd, zmq.POLLIN)
            try:
                session.welcome(connection, self._welcome(new.token), self._arena_fd)
            except OSError:
                self._end(new)
        except OSError as error:
            if isinstance(error, KVShelfError):
                session.refuse(connection, str(error))
            self._end_greeting(fd, str(error))
            connection.close()

    def _check(self, hello: Hello) -> None:
        if hello.protocol != messages.PROTOCOL:
            raise session.SessionError(
                f"the client speaks version {hello.protocol} of the protocol, this server version"
                f" {messages.PROTOCOL}: use the same version of kvshelf"
            )
        if hello.client in self._sessions:
            raise session.SessionError("another client has the same id")

    def _look_at(self, client: _Session) -> None:
        """End a session whose socket has closed."""
        if session.has_ended(client.socket):
            self._end(client)

    def _end(self, client: _Session) -> None:
        client.ended = True
        client.backlog.clear()
        self._slow.discard(client)
        fd = client.socket.fileno()
        del self._sessions[client.client], self._sockets[fd]
        self._poller.unregister(fd)
        client.socket.close()
        client.segment = memoryview(b"")
        try:
            self._service.client_gone(client.client)
        except Exception as error:  # noqa: BLE001
            self._log.error("the node server failed: %s", error, exc_info=error)

    def _expel(self, client: _Session, problem: str) -> None:
        """Take no more messages of a client, which may still read memory."""
        self._refused += 1
        self._log.warning("a client of the node server lost its session: %s", problem)
        client.ended = True
        client.backlog.clear()
        self._slow.discard(client)
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
            if client is None or client.ended or len(frames) != 2:
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
            self._send(client, number, Fault("PermanentStorageError", f"no request: {error}"))
            return
        answers = len(request.names) if isinstance(request, Fetch) else 1
        over = client.open_bytes + len(frame) > MAX_OPEN_BYTES
        if over or client.open + answers > MAX_OPEN:
            self._refused += 1
            text = (
                f"the client waits for {client.open} answers already, to requests of"
                f" {client.open_bytes} bytes"
            )
            self._send(client, number, Fault("TransientStorageError", text))
            return
        pending = _Pending(self, client, number, answers, len(frame) if answers else 0)
        try:
            self._dispatch(client, request, pending)
        except Exception as error:  # noqa: BLE001
            if not isinstance(error, KVShelfError):
                self._log.error("the node server failed: %s", error, exc_info=error)
            self._give_back(client, self._outcomes.pop((client, number), []))
            pending.done(Fault.of(error))

    def _dispatch(self, client: _Session, request: Request, pending: _Pending) -> None:
        service = self._service
        match request:
            case Find():
                service.find(client.client, request.names, request.sizes, pending.done)
            case Fetch():
                if len(request.sizes) != len(request.names):
                    raise PermanentStorageError(
                        f"{len(request.sizes)} sizes for {len(request.names)} names"
                    )
                service.fetch(
                    client.client, request.session, request.names, request.sizes, pending.each
                )
            case Release():
                pending.settle()
                service.release(client.client, request.leases)
            case EndSession():
                pending.settle()
                service.end_session(client.client, request.session)
            case LookUpChunks():
                service.lookup(client.client, request.session, request.chains, pending.done)
            case Store():
                end = request.offset + request.nbytes
                if end > len(client.segment):
                    raise PermanentStorageError(
                        f"bytes {request.offset} to {end} of a segment of {len(client.segment)}"
                    )
                service.store(
                    client.client,
                    request.name,
                    client.segment[request.offset : end],
                    request.mode,
                    request.memory_only,
                    request.checksum,
                    pending.done,
                    request.parent,
                )
            case Call():
                service.call(
                    client.client, request.method, request.args, request.data, pending.done
                )
            case Register():
                pending.done(Registered(service.register(request.record)))
            case Ping():
                pending.done(Done())

    # ---------------------------------------------------------------------------- replies

    def _add_outcomes(
        self, client: _Session, number: int, outcomes: Sequence[Ready | Failed]
    ) -> None:
        """Keep outcomes until the end of the round: one message for all of a fetch."""
        if client.ended:
            self._give_back(client, outcomes)
        else:
            self._outcomes.setdefault((client, number), []).extend(outcomes)

    def _give_back(self, client: _Session, outcomes: Sequence[Ready | Failed]) -> None:
        leases = [outcome.lease for outcome in outcomes if isinstance(outcome, Ready)]
        self._service.release(client.client, leases)

    def _send_outcomes(self) -> None:
        waiting, self._outcomes = self._outcomes, {}
        for (client, number), outcomes in waiting.items():
            for start in range(0, len(outcomes), _OUTCOMES):
                self._send(client, number, Fetched(outcomes[start : start + _OUTCOMES]))

    def _tell_all(self, reply: Reply) -> None:
        for client in list(self._sessions.values()):
            self._send(client, 0, reply)

    def _send(self, client: _Session, number: int, reply: Reply) -> None:
        if client.ended:
            return
        frame = messages.encode_reply(number, reply)
        if not client.backlog and self._passed_on(client, frame):
            return
        client.backlog.append(frame)
        client.backlog_bytes += len(frame)
        self._slow.add(client)
        if client.backlog_bytes > _MAX_BACKLOG:
            self._expel(client, "it does not read its answers")

    def _send_backlog(self, client: _Session) -> None:
        while client.backlog:
            frame = client.backlog.popleft()
            if not self._passed_on(client, frame):
                client.backlog.appendleft(frame)
                return
            client.backlog_bytes -= len(frame)
        self._slow.discard(client)

    def _passed_on(self, client: _Session, frame: bytes) -> bool:
        """Pass a frame to ZMQ; False if its queue for this client is full."""
        try:
            self._router.send_multipart((client.client, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self._expel(client, f"it has no connection: {error}")
        return True
