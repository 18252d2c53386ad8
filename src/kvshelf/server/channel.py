"""A client's way to the node server: requests as futures, and objects leased in place.

Owns that there is a connection (:mod:`kvshelf.server.connection`), and what is sent and received
over it. The messages are in :mod:`kvshelf.server.messages`.

Contracts
---------
* No method blocks, except :meth:`Channel.wait_connected` for the time that it is given, and
  :meth:`Channel.close` for a moment. A server that hangs leaves futures without a result: callers
  wait with a deadline, and cancel a future that they give up.
* A server that is gone fails all futures at once with :class:`UnavailableStorageError`, and so does
  every request until there is a server again. The channel looks for one at least once a second.
* Nothing of one session is used in another one.
* A lease whose future was cancelled is given back.
* A channel belongs to the process that made it. After a fork, the child's copy is closed.

Threads
-------
Any thread may call all methods. One thread, ``kvshelf-channel``, connects, completes the futures
and calls the callbacks: these must not wait for the channel. The calling thread sends its request,
under a lock, through a ZMQ socket for requests only: handing it to another thread would take longer
than the server needs for its answer.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

import zmq

from kvshelf.errors import KVShelfError, UnavailableStorageError
from kvshelf.logs import RateLimitedLog
from kvshelf.server import messages, session
from kvshelf.server.connection import Connection, Leased, Waiting
from kvshelf.server.messages import (
    Done,
    EndSession,
    Failed,
    Fault,
    Fetch,
    Fetched,
    Hello,
    MalformedError,
    Ping,
    Register,
    Release,
    Reply,
    Request,
    Welcome,
)
from kvshelf.server.segment import Segment
from kvshelf.server.wake import Wake

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: How long the server may take to take a client.
_GREETING_SECONDS: Final = 2.0
#: Pauses between attempts to connect.
_RETRY_SECONDS: Final = (0.05, 0.2, 0.5)
#: How long leases are collected before they are given back, and how many at most.
_RELEASE_SECONDS: Final = 0.01
_RELEASE_COUNT: Final = 256
_CLOSE_SECONDS: Final = 1.0
#: Namespaces in use: those of so many views does a shelf keep.
_NAMESPACES: Final = 16
#: Answers that are handled before anything else is looked at.
_ROUND: Final = 64


class Channel:
    """A connection to the server at a URL, made and kept in the background.

    Parameters
    ----------
    url : str
        ``ipc:///absolute/path``.
    segment_bytes : int
        Size of the memory for objects to be stored; 0: none.
    segment : Segment, optional
        Memory for objects to be stored, which the caller closes after the channel.

    Attributes
    ----------
    url : str
    welcome : Welcome or None
        The server's answer to the last hello: its memory, its chunk size, its storage.
    problem : KVShelfError or None
        Why the last attempt to connect failed.
    segment : Segment or None
        Memory for objects to be stored. It outlives connections.

    Raises
    ------
    ConfigError
        If the URL is none of a server, or the system gives no memory.
    """

    def __init__(
        self,
        url: str,
        *,
        segment_bytes: int = 0,
        segment: Segment | None = None,
    ) -> None:
        self.url = url
        self.welcome: Welcome | None = None
        self.problem: KVShelfError | None = None
        self._path = session.socket_path(url)
        self._own = Segment(segment_bytes) if segment_bytes and segment is None else None
        self.segment = self._own if segment is None else segment
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        #: The records of the namespaces in use, those registered last first.
        self._records: list[bytes] = []
        self._on_connect: list[Callable[[Welcome], None]] = []
        self._is_connected = threading.Event()
        self._wake = Wake()
        self._closed = False
        self._device: torch.device | None = None
        self._log = RateLimitedLog(logger, lines=10)
        _channels.add(self)
        self._thread = threading.Thread(target=self._run, name="kvshelf-channel", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------- any thread

    @property
    def connected(self) -> bool:
        """Whether there is a server now, as far as is known."""
        return self._is_connected.is_set()

    def wait_connected(self, seconds: float) -> bool:
        """Wait until there is a server; return whether there is one."""
        return self._is_connected.wait(seconds)

    def page_lock(self, device: torch.device) -> None:
        """Page-lock the server's memory for a GPU: in the background, for this and later servers.

        Until :attr:`page_locked`, and where it cannot be, a GPU copies from it slowly.
        """
        with self._lock:
            if self._device is None:
                self._device = device
                if self._connection is not None:
                    self._connection.lock(device, self._not_locked)

    @property
    def page_locked(self) -> bool:
        """Whether the memory of the present server is page-locked."""
        connection = self._connection
        return connection is not None and connection.locked

    def _not_locked(self, error: RuntimeError) -> None:
        logger.warning(
            "could not pin the memory of the node server at %s (%s); a GPU gets its objects by way"
            " of other memory",
            self._path,
            error,
        )

    def register(self, record: bytes) -> None:
        """Have the server know a namespace, now and after each reconnection while it is in use.

        Parameters
        ----------
        record : bytes
            The bytes of its ``namespace.json``.
        """
        with self._lock:
            is_new = record not in self._records
            others = (other for other in self._records if other != record)
            self._records = [record, *others][:_NAMESPACES]
            ready = self._ready
        if is_new and ready is not None:
            self._register(record)

    def _register(self, record: bytes) -> None:
        self.request(Register(record)).add_done_callback(self._registered)

    def _registered(self, done: Future[Reply]) -> None:
        error = done.exception()
        if error is not None:
            self._log.warning("the node server did not take the namespace: %s", error)

    def on_connect(self, callback: Callable[[Welcome], None]) -> None:
        """Call a function at each connection, and now if there is one.

        It runs when the server knows the namespaces, and before the requests of other threads are
        taken: its own requests come first.
        """
        with self._lock:
            self._on_connect.append(callback)
            ready = self._ready
        if ready is not None:
            callback(ready.welcome)

    @property
    def _ready(self) -> Connection | None:
        """The connection, if it takes requests. The lock is held."""
        connection = self._connection
        return connection if connection is not None and connection.ready else None

    def request(self, message: Request) -> Future[Reply]:
        """Send a request other than a fetch.

        Returns
        -------
        Future of Reply
            A fault is raised as its error.

        Raises
        ------
        ValueError
            If the message is too large.
        """
        future: Future[Reply] = Future()
        self._send(message, Waiting([future]))
        return future

    def fetch(
        self, session: str, names: Sequence[str], sizes: Sequence[int]
    ) -> list[Future[Leased]]:
        """Lease objects, each as soon as it is in the server's memory.

        Parameters
        ----------
        session : str
            Name under which they were looked up.
        names : Sequence of str
        sizes : Sequence of int
            Bytes of each object.
        """
        futures: list[Future[Leased]] = [Future() for _ in names]
        for start in range(0, len(names), messages.MAX_NAMES):
            part = slice(start, start + messages.MAX_NAMES)
            message = Fetch(session, list(names[part]), list(sizes[part]))
            self._send(message, Waiting(futures[part], fetch=True))
        return futures

    def end_session(self, session: str) -> None:
        """Give up what was looked up under a name and not fetched."""
        self._send(EndSession(session), None)

    def close(self) -> None:
        """End the connection; all futures fail. Idempotent."""
        self._closed = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)
        if self._own is not None:
            self._own.close()

    def _send(self, message: Request, waiting: Waiting | None) -> None:
        number = next(self._numbers)
        connection = self._connection
        problem = "is not connected"
        if connection is not None:
            frame = messages.encode_request(connection.welcome.token, number, message)
            with self._lock:
                if not connection.lost and (connection.ready or self._is_mine()):
                    problem = self._pass_on(connection, number, frame, waiting)
            if not problem:
                return
        if waiting is not None:
            waiting.fail(lambda: self._unavailable(problem))

    @staticmethod
    def _pass_on(
        connection: Connection,
        number: int,
        frame: bytes,
        waiting: Waiting | None,
    ) -> str:
        """Give a request to ZMQ, under the lock; return what was wrong."""
        if waiting is not None:
            if (
                connection.open + waiting.left > messages.MAX_OPEN
                or connection.open_bytes + len(frame) > messages.MAX_OPEN_BYTES
            ):
                return f"has not answered {connection.open} requests"
            waiting.nbytes = len(frame)
            connection.waiting[number] = waiting
            connection.open += waiting.left
            connection.open_bytes += waiting.nbytes
        try:
            connection.sender.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            if waiting is not None:
                connection.forget(number, waiting, waiting.left)
            return "takes no requests"
        return ""

    def _is_mine(self) -> bool:
        return threading.current_thread() is self._thread

    def _unavailable(self, problem: str) -> UnavailableStorageError:
        if self._closed:
            problem = "is not used any more: its channel is closed"
        return UnavailableStorageError(f"the node server at {self._path} {problem}")

    # ---------------------------------------------------------------------------- channel's thread

    def _run(self) -> None:
        attempts = 0
        while not self._closed:
            try:
                self._stay_connected()
                attempts = 0
            except KVShelfError as error:
                self.problem = error
                self._log.warning("%s; kvshelf tries again", error, about=str(error))
            except Exception as error:  # noqa: BLE001 - no descriptors are left, or a mistake here
                self._log.error("the node server cannot be used: %s", error, exc_info=error)
            self._pause(_RETRY_SECONDS[min(attempts, len(_RETRY_SECONDS) - 1)])
            attempts += 1

    def _stay_connected(self) -> None:
        """Connect, and return when the connection is lost."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            connection = self._connect(context)
        except BaseException:
            context.destroy(linger=0)
            raise
        problem = "the connection failed"
        try:
            logger.info("the node server at %s is connected", self._path)
            self._announce(connection)
            problem = self._serve(connection)
        except (zmq.ZMQError, MalformedError) as error:
            problem = f"the connection failed: {error}"
        finally:
            self._lose(connection)
            context.destroy(linger=0)
        if not self._closed:
            self._log.warning("the node server at %s is lost: %s", self._path, problem)

    def _pause(self, seconds: float) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        until = time.monotonic() + seconds
        while not self._closed and (left := until - time.monotonic()) > 0:
            poller.poll(int(left * 1000) + 1)
            self._wake.clear()

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> Connection:
        client = os.urandom(messages.ID_BYTES)
        segment = self.segment
        nbytes = 0 if segment is None or segment.fd is None else segment.nbytes
        connected, welcome, arena = session.connect(
            self._path,
            Hello(messages.PROTOCOL, client, nbytes),
            segment.fd if segment is not None and nbytes else None,
            _GREETING_SECONDS,
        )
        try:
            receiver = self._socket(context, client)
            sender = self._socket(context, client + messages.SENDER)
            receiver.send(messages.encode_request(welcome.token, 0, Ping()))
            if not receiver.poll(int(_GREETING_SECONDS * 1000)):
                raise UnavailableStorageError(f"the node server at {self._path} does not answer")
            if messages.decode_reply(memoryview(receiver.recv())) != (0, Done()):
                raise UnavailableStorageError(f"the node server at {self._path} answers nonsense")
        except (zmq.ZMQError, MalformedError) as error:
            connected.close()
            raise UnavailableStorageError(
                f"the node server at {self._path} cannot be used: {error}"
            ) from error
        except BaseException:
            connected.close()
            raise
        return Connection(connected, welcome, arena, sender, receiver, self._wake.set)

    def _socket(
        self, context: zmq.Context[zmq.Socket[bytes]], routing_id: bytes
    ) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        dealer.setsockopt(zmq.MAXMSGSIZE, messages.MAX_REPLY)
        dealer.connect(self.url)
        return dealer

    def _announce(self, connection: Connection) -> None:
        """Let the server know the namespaces, the callbacks send next, then all others."""
        self.welcome = connection.welcome
        self.problem = None
        with self._lock:
            self._connection = connection
            if self._device is not None:
                connection.lock(self._device, self._not_locked)
        done, registered = 0, set[bytes]()
        while not connection.ready:
            with self._lock:
                records = [record for record in self._records if record not in registered]
                callbacks = self._on_connect[done:]
                if not records and not callbacks:
                    connection.ready = True
                    self._is_connected.set()
            for record in records:
                registered.add(record)
                self._register(record)
            for callback in callbacks:
                done += 1
                self._call(callback, connection.welcome)

    def _call(self, callback: Callable[..., None], argument: object) -> None:
        try:
            callback(argument)
        except Exception as error:  # noqa: BLE001
            self._log.error("a callback of the channel failed: %s", error, exc_info=error)

    def _lose(self, connection: Connection) -> None:
        with self._lock:
            connection.lost = True
            self._connection = None
            self._is_connected.clear()
            waiting, connection.waiting = connection.waiting, {}
        connection.session.close()
        for one in waiting.values():
            one.fail(lambda: self._unavailable("is gone"))

    def _serve(self, connection: Connection) -> str:
        """Receive until the session ends; return why it did."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(connection.receiver, zmq.POLLIN)
        ended = connection.session.fileno()
        poller.register(ended, zmq.POLLIN)
        wait = None
        give_back_at = 0.0
        while not self._closed:
            for source, _ in poller.poll(wait):
                if source is connection.receiver:
                    self._receive(connection)
                elif source == ended:
                    if session.has_ended(connection.session):
                        return "it has ended the session"
                else:
                    self._wake.clear()
            if not connection.released:
                continue
            now = time.monotonic()
            if not connection.collecting:
                connection.collecting = True
                give_back_at = now + _RELEASE_SECONDS
            wait = int((give_back_at - now) * 1000) + 1
            if now >= give_back_at:
                wait = None
                self._give_back(connection)
        return "the channel was closed"

    def _give_back(self, connection: Connection) -> None:
        connection.collecting = False
        while connection.released:
            leases: list[int] = []
            while connection.released and len(leases) < _RELEASE_COUNT:
                leases.append(connection.released.popleft())
            frame = messages.encode_request(connection.welcome.token, 0, Release(leases))
            with self._lock:
                refused = self._pass_on(connection, 0, frame, None)
            if refused:
                # The server hangs: try again when the next lease is given back.
                connection.released.extend(leases)
                return

    # ---------------------------------------------------------------------------- answers

    def _receive(self, connection: Connection) -> None:
        for _ in range(_ROUND):
            number, reply = messages.decode_reply(memoryview(connection.receiver.recv()))
            self._answered(connection, number, reply)
            if not int(connection.receiver.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return

    def _answered(self, connection: Connection, number: int, reply: Reply) -> None:
        waiting = connection.waiting.get(number)
        if isinstance(reply, Fetched):
            self._fetched(connection, number, waiting, reply)
        elif waiting is not None:
            with self._lock:
                connection.forget(number, waiting, waiting.left)
            if isinstance(reply, Fault):
                waiting.fail(reply.error)
            elif waiting.fetch:
                raise MalformedError(f"a {type(reply).__name__} answers a fetch")
            elif (future := waiting.take(0)) and future.set_running_or_notify_cancel():
                future.set_result(reply)

    def _fetched(
        self,
        connection: Connection,
        number: int,
        waiting: Waiting | None,
        reply: Fetched,
    ) -> None:
        if waiting is None or not waiting.fetch:
            raise MalformedError("outcomes of a fetch that is not waited for")
        before = waiting.left
        for outcome in reply.outcomes:
            future = waiting.take(outcome.index)
            wanted = future is not None and future.set_running_or_notify_cancel()
            if isinstance(outcome, Failed):
                if future is not None and wanted:
                    future.set_exception(outcome.fault.error())
                continue
            if outcome.offset + outcome.nbytes > len(connection.arena) or not (
                0 <= outcome.slot < len(connection.generations) and outcome.offset >= 0
            ):
                raise MalformedError("an object outside the arena")
            leased = Leased(connection, outcome)
            if future is not None and wanted:
                future.set_result(leased)
            else:
                leased.release()
        with self._lock:
            if waiting.left:
                connection.open -= before - waiting.left
            else:
                connection.forget(number, waiting, before)

    # ---------------------------------------------------------------------------- a fork

    def _leave(self) -> None:
        """Close a forked process's copy, which the parent's connection must not depend on."""
        self._closed = True
        self._is_connected = threading.Event()
        self._lock = threading.Lock()
        self.segment = self._own = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.lost = connection.foreign = True
            # Or the server would take the parent for alive as long as this process is.
            connection.session.close()


_channels: Final[weakref.WeakSet[Channel]] = weakref.WeakSet()


def _after_fork() -> None:
    for channel in list(_channels):
        channel._leave()


os.register_at_fork(after_in_child=_after_fork)
