"""A client's connection to the node server of its machine: requests as futures, and loans.

Owns that there is a connection, what is sent and received over it, and the memory that the server
has lent (:class:`Loan`). The messages are :mod:`kvshelf.server.protocol`'s.

Contracts
---------
* No method blocks, except :meth:`NodeClient.wait_connected` for the time that it is given, and
  :meth:`NodeClient.close` for a moment. A server that hangs leaves futures without a result:
  callers have deadlines of their own.
* A server that is gone fails all futures at once with :class:`UnavailableStorageError`, and so does
  every request until there is a server again. The client looks for one at least once a second.
* A connection stays open until its last loan has ended. Until then the server lends the memory to
  nobody else, and it stays mapped here: also when the server is gone, or serves this client no
  further.
* Where the server's memory is page-locked for a GPU, it stays so for as long.
* A server gets the namespaces in use before any other request.
* A client belongs to the process that made it. After a fork the child's copy is closed, and the
  parent's loans stay.

Threads
-------
Any thread may call all methods, and sends its request itself. One thread, ``kvshelf-client``,
connects, completes the futures and calls the callbacks: these must not wait for the client.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from kvshelf.background import try_to_start
from kvshelf.errors import KVShelfError, UnavailableStorageError
from kvshelf.format.namespace import Namespace
from kvshelf.logs import RateLimitedLog
from kvshelf.memory.arena import Arena
from kvshelf.memory.pages import page_lock
from kvshelf.server import protocol
from kvshelf.server.listener import (
    Greeting,
    SessionError,
    check_folder,
    peer_user,
    send_greeting,
    socket_path,
)
from kvshelf.server.protocol import (
    EndSession,
    Fault,
    GiveBack,
    Hello,
    MalformedError,
    Message,
    Refused,
    Register,
    Reply,
    Welcome,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: How long the server may take to take a client.
_GREETING_SECONDS: Final = 2.0
#: Pauses between attempts to connect.
_RETRY_SECONDS: Final = (0.0, 0.05, 0.2, 0.5)
_CLOSE_SECONDS: Final = 1.0
_RECEIVED_BYTES: Final = 1 << 20
#: Bytes of requests that wait for a server that does not read.
_BACKLOG_BYTES: Final = 64 << 20
#: Loans that have ended are given back with the next request, at the latest after so many seconds,
#: or when there are so many of them.
_ENDED_SECONDS: Final = 0.01
_ENDED_LOANS: Final = 256
#: Namespaces in use: those of so many views does a shelf keep, and those of block hashes.
_NAMESPACES: Final = 32


class _Connection:
    """One connection, from the welcome until its last loan has ended.

    Attributes
    ----------
    welcome : Welcome
    memory : memoryview
        The server's, read-only.
    arena : Arena or None
        The client's memory, which the server reads.
    pending : dict
        The futures of requests without a reply, by their numbers. Guarded by `lock`.
    ended : list of int
        Offsets of loans that have ended, of which the server was not told. Guarded by `lock`.
    wake : Callable
        Wakes the client's thread.
    is_lost : bool
        Nothing is sent any more.
    is_page_locked : bool
        A GPU can copy from the memory by itself.
    """

    def __init__(
        self,
        stream: socket.socket,
        welcome: Welcome,
        memory: memoryview,
        arena: Arena | None,
        wake: Callable[[], None],
    ) -> None:
        self.stream = stream
        self.welcome = welcome
        self.memory = memory
        self.arena = arena
        # The collector of garbage may end a loan on a thread that has it.
        self.lock = threading.RLock()
        self.pending: dict[int, Future[Any]] = {}
        self.backlog = bytearray()
        self.ended: list[int] = []
        self.wake = wake
        self.is_lost = False
        self.is_page_locked = False
        self._loans = 0
        self._is_over = threading.Event()

    def send(self, data: bytes) -> bool:
        """Send a frame, or queue what the server does not read now; False: it takes nothing.

        What is to be given back goes with it: a message of its own would take as long.
        """
        with self.lock:
            if self.is_lost or len(self.backlog) > _BACKLOG_BYTES:
                return False
            ended, self.ended = self.ended, []
            if ended:
                data = protocol.frame(GiveBack(ended)) + data
            if not self.backlog:
                try:
                    data = data[self.stream.send(data) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return False
            self.backlog += data
        return True

    def flush(self) -> None:
        """Send what was queued, as far as the server reads."""
        with self.lock:
            while self.backlog and not self.is_lost:
                try:
                    sent = self.stream.send(self.backlog)
                except BlockingIOError:
                    return
                del self.backlog[:sent]

    def lend(self, offset: int, nbytes: int) -> Loan:
        """Return the loan of so many bytes."""
        if not 0 <= offset <= len(self.memory) - nbytes:
            raise MalformedError(f"{nbytes} bytes at {offset} are outside of the server's memory")
        with self.lock:
            self._loans += 1
        return Loan(self, offset, nbytes)

    def end_loan(self, offset: int) -> None:
        """End one loan; the server is told soon."""
        with self.lock:
            self.ended.append(offset)
            self._loans -= 1
            is_due = len(self.ended) in (1, _ENDED_LOANS)
        if is_due:
            self.wake()
        self._end_if_over()

    def lose(self) -> list[Future[Any]]:
        """Send nothing any more; return the futures that get no reply."""
        with self.lock:
            self.is_lost = True
            futures = list(self.pending.values())
            self.pending.clear()
            self.backlog.clear()
        self._end_if_over()
        return futures

    def leave(self) -> None:
        """Close a forked process's copy: the server waits for the end of the parent's alone."""
        self.is_lost = True
        self.lock = threading.RLock()
        self.stream.close()

    def _end_if_over(self) -> None:
        with self.lock:
            if self.is_lost and not self._loans:
                self.stream.close()
                self.memory = memoryview(b"")
                self._is_over.set()

    def page_lock(self, device: torch.device, on_error: Callable[[RuntimeError], None]) -> None:
        """Page-lock the memory on a thread, until the connection is over."""
        memory = self.memory

        def keep_locked() -> None:
            try:
                unlock = page_lock(memory, device)
            except RuntimeError as error:
                on_error(error)
                return
            self.is_page_locked = True
            self._is_over.wait()
            unlock()

        # It takes a tenth of a second for each gigabyte.
        try_to_start(threading.Thread(target=keep_locked, name="kvshelf-lock", daemon=True))


class Loan:
    """An object in the server's memory, on loan to this process.

    Attributes
    ----------
    view : memoryview
        The whole object, header included; read-only. Empty after :meth:`release`.
    """

    __slots__ = ("_connection", "_offset", "view")

    def __init__(self, connection: _Connection, offset: int, nbytes: int) -> None:
        self._connection: _Connection | None = connection
        self._offset = offset
        self.view = connection.memory[offset : offset + nbytes]

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self.view = memoryview(b"")
            connection.end_loan(self._offset)

    def __del__(self) -> None:
        try:
            self.release()
        except (AttributeError, TypeError):  # half made, or the interpreter ends
            pass


class NodeClient:
    """The connection to the server at a URL, made and kept in the background.

    Parameters
    ----------
    url : str
        ``ipc:///absolute/path``.

    Attributes
    ----------
    url : str
    welcome : Welcome or None
        The server's answer to the last hello: its memory, its chunk size, its storage.
    problem : KVShelfError or None
        Why the last attempt to connect failed.

    Raises
    ------
    ConfigError
        If the URL is none of a server.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.welcome: Welcome | None = None
        self.problem: KVShelfError | None = None
        self._path = socket_path(url)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        #: Memory for objects to be stored.
        self._arena: Arena | None = None
        #: The namespaces in use, registered last first.
        self._namespaces: list[tuple[Namespace, bool]] = []
        self._on_connect: list[Callable[[], None]] = []
        self._is_connected = threading.Event()
        self._is_closed = False
        self._device: torch.device | None = None
        self._log = RateLimitedLog(logger, lines=10)
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        _clients.add(self)
        self._thread = threading.Thread(target=self._run, name="kvshelf-client", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------- any thread

    @property
    def is_connected(self) -> bool:
        """Whether there is a server now, as far as is known."""
        return self._is_connected.is_set()

    def wait_connected(self, seconds: float) -> bool:
        """Wait until there is a server; return whether there is one."""
        return self._is_connected.wait(seconds)

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Call a function after each connection, on the client's thread."""
        self._on_connect.append(callback)

    def share(self, arena: Arena) -> None:
        """Let the server read the memory in which objects that are stored lie.

        The client connects anew, since only a greeting passes memory. This waits a moment for it.
        """
        with self._lock:
            was_connected = self._is_connected.is_set()
            self._arena = arena
            self._is_connected.clear()
        self._notify()
        if was_connected:
            self._is_connected.wait(_GREETING_SECONDS)

    def offset_of(self, buffer: memoryview) -> int:
        """Return where bytes lie in the memory that the server reads.

        Raises
        ------
        UnavailableStorageError
            If they do not lie there, or the server does not read it yet.
        """
        connection = self._connection
        arena = None if connection is None else connection.arena
        offset = None if arena is None else arena.offset_of(buffer)
        if offset is None:
            raise self._unavailable("does not read this memory")
        return offset

    def page_lock(self, device: torch.device) -> None:
        """Page-lock the server's memory for a GPU: in the background, for this and later servers.

        Until :attr:`is_page_locked`, and where it cannot be, a GPU copies from it slowly.
        """
        with self._lock:
            if self._device is None:
                self._device = device
                if self._connection is not None:
                    self._connection.page_lock(device, self._not_locked)

    @property
    def is_page_locked(self) -> bool:
        """Whether the memory of the present server is page-locked."""
        connection = self._connection
        return connection is not None and connection.is_page_locked

    def _not_locked(self, error: RuntimeError) -> None:
        logger.warning(
            "could not pin the memory of the node server at %s (%s); a GPU gets its objects by way"
            " of other memory",
            self._path,
            error,
        )

    def register(self, namespace: Namespace, *, is_volatile: bool = False) -> None:
        """Have the server know a namespace, now and after each reconnection while it is in use.

        Parameters
        ----------
        namespace : Namespace
        is_volatile : bool
            The server keeps its objects in memory alone.
        """
        registered = namespace, is_volatile
        with self._lock:
            is_new = registered not in self._namespaces
            rest = [entry for entry in self._namespaces if entry != registered]
            self._namespaces = [registered, *rest][:_NAMESPACES]
            connection = self._connection
        if is_new and connection is not None:
            self._register(connection, namespace, is_volatile)

    def _register(self, connection: _Connection, namespace: Namespace, is_volatile: bool) -> None:
        request = self._send(
            connection,
            lambda number: Register(number, namespace.encoded, namespace.slug, is_volatile),
        )
        request.add_done_callback(self._registered)

    def _registered(self, reply: Future[Any]) -> None:
        error = reply.exception()
        if error is not None and not isinstance(error, UnavailableStorageError):
            self._log.warning("the node server did not take the namespace: %s", error)

    def request(self, make: Callable[..., Message], *fields: Any) -> Future[Any]:
        """Send a request.

        Parameters
        ----------
        make : Callable
            A class of :mod:`kvshelf.server.protocol`.
        *fields
            Those behind the number.

        Returns
        -------
        Future
            The value of the reply; a fault is raised as its error.
        """
        connection = self._connection
        if connection is None:
            future: Future[Any] = Future()
            future.set_exception(self._unavailable("is not connected"))
            return future
        return self._send(connection, lambda number: make(number, *fields))

    def fetch(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        *,
        is_early: bool = False,
        ahead: Sequence[str] = (),
    ) -> Future[list[Loan | int | Fault]]:
        """Have objects lent, see :class:`kvshelf.server.protocol.Fetch`.

        Parameters
        ----------
        names : Sequence of str
        sizes : Sequence of int
            Bytes of each object, and of those that are asked for next.
        is_early : bool
        ahead : Sequence of str

        Returns
        -------
        Future of list
            For each object its loan, :data:`~protocol.NO_ROOM`, MISSING, or a fault.
        """
        connection = self._connection
        lent: Future[list[Loan | int | Fault]] = Future()
        if connection is None:
            lent.set_exception(self._unavailable("is not connected"))
            return lent

        def answered(reply: Future[Any]) -> None:
            try:
                lent.set_result(
                    [
                        connection.lend(answer, size)
                        if isinstance(answer, int) and answer >= 0
                        else answer
                        for answer, size in zip(reply.result(), sizes, strict=True)
                    ]
                )
            except Exception as error:  # noqa: BLE001 - whatever it is, the waiting side gets it
                lent.set_exception(error)

        request = self._send(
            connection, lambda number: protocol.Fetch(number, list(names), is_early, list(ahead))
        )
        request.add_done_callback(answered)
        return lent

    def lock(self, session: str, names: Sequence[str]) -> None:
        """Have objects kept in memory for a request, as many as one message names."""
        connection = self._connection
        if connection is not None:
            named = list(names[: protocol.MAX_NAMES])
            connection.send(protocol.frame(protocol.Lock(session, named)))

    def end_session(self, session: str, names: Sequence[str] = ()) -> None:
        """End the locks of a request on some objects; on all of them if there are no names."""
        connection = self._connection
        if connection is not None:
            connection.send(protocol.frame(EndSession(session, list(names))))

    def close(self) -> None:
        """End the connection; all futures fail. Idempotent."""
        self._is_closed = True
        self._notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def _send(self, connection: _Connection, make: Callable[[int], Message]) -> Future[Any]:
        number = next(self._numbers)
        future: Future[Any] = Future()
        with connection.lock:
            connection.pending[number] = future
        if connection.send(protocol.frame(make(number))):
            if connection.backlog:
                self._notify()
            return future
        with connection.lock:
            is_pending = connection.pending.pop(number, None) is not None
        if is_pending:
            future.set_exception(self._unavailable("takes no requests"))
        return future

    def _unavailable(self, problem: str) -> UnavailableStorageError:
        if self._is_closed:
            problem = "is not used any more: its client is closed"
        return UnavailableStorageError(f"the node server at {self._path} {problem}")

    def _notify(self) -> None:
        """Wake the client's thread."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # ---------------------------------------------------------------------------- client's thread

    def _run(self) -> None:
        attempts = 0
        while not self._is_closed:
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
        self._wake.close()
        self._waker.close()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._is_closed and (remaining := until - time.monotonic()) > 0:
                if selector.select(remaining):
                    self._clear_wake()

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

    def _stay_connected(self) -> None:
        """Connect, and return when the connection is lost."""
        connection = self._connect()
        problem = "the connection failed"
        try:
            logger.info("the node server at %s is connected", self._path)
            self.welcome, self.problem = connection.welcome, None
            self._announce(connection)
            problem = self._serve(connection)
        except (OSError, MalformedError) as error:
            problem = f"the connection failed: {error}"
        finally:
            with self._lock:
                if self._connection is connection:
                    self._connection = None
                    self._is_connected.clear()
            self._lose(connection, "is gone")
        if problem and not self._is_closed:
            self._log.warning("the node server at %s is lost: %s", self._path, problem)

    def _lose(self, connection: _Connection, problem: str) -> None:
        for future in connection.lose():
            future.set_exception(self._unavailable(problem))

    def _connect(self) -> _Connection:
        """Begin a session with the server.

        Raises
        ------
        ConfigError
            If the folder of the socket is not this user's alone.
        UnavailableStorageError
            If no server listens there, or it did not answer in time.
        SessionError
            If the server refused, or its answer cannot be used.
        """
        check_folder(self._path)
        arena = self._arena
        fd = None if arena is None else arena.fd
        hello = Hello(protocol.PROTOCOL, 0 if arena is None or fd is None else arena.nbytes)
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        greeting = Greeting()
        try:
            stream.settimeout(_GREETING_SECONDS)
            stream.connect(self._path)
            if peer_user(stream) != os.geteuid():
                raise SessionError(f"the server at {self._path} runs as user {peer_user(stream)}")
            # A server that refuses at once does not wait for this, and its answer comes all the
            # same.
            with contextlib.suppress(BrokenPipeError):
                send_greeting(stream, protocol.frame(hello), [] if fd is None else [fd])
            body: bytes | None = None
            while body is None:
                try:
                    body = greeting.receive(stream)
                except ConnectionResetError:
                    body = greeting.receive(stream)
            answer = protocol.decode(protocol.ANSWER, body)
            if isinstance(answer, Refused):
                raise SessionError(
                    f"the node server at {self._path} refused this client: {answer.text}"
                )
            memory = greeting.map(answer.memory_bytes)
            stream.setblocking(False)
        except MalformedError as error:
            stream.close()
            raise SessionError(
                f"what listens at {self._path} is no node server of this version: {error}"
            ) from None
        except SessionError:
            stream.close()
            raise
        except OSError as error:
            stream.close()
            raise UnavailableStorageError(
                f"no node server answers at {self._path}: {error}"
            ) from error
        finally:
            greeting.close()
        return _Connection(stream, answer, memory, arena, self._notify)

    def _announce(self, connection: _Connection) -> None:
        """Let the server know the namespaces, then take requests, then call the callbacks."""
        with self._lock:
            for namespace, is_volatile in self._namespaces:
                self._register(connection, namespace, is_volatile)
            self._connection = connection
            if self._device is not None:
                connection.page_lock(self._device, self._not_locked)
            if connection.arena is self._arena:
                self._is_connected.set()
        for callback in self._on_connect:
            try:
                callback()
            except Exception as error:  # noqa: BLE001
                self._log.error("a callback of the client failed: %s", error, exc_info=error)

    def _serve(self, connection: _Connection) -> str:
        """Receive until the connection is lost; return why it was, or nothing if that was meant."""
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(connection.stream, selectors.EVENT_READ)
            # A memory that is shared meanwhile needs a greeting.
            while not self._is_closed and connection.arena is self._arena:
                events = selectors.EVENT_READ
                if connection.backlog:
                    events |= selectors.EVENT_WRITE
                selector.modify(connection.stream, events)
                has_ended = bool(connection.ended)
                selected = selector.select(_ENDED_SECONDS if has_ended else None)
                ended = len(connection.ended)
                if (has_ended and ended and not selected) or ended >= _ENDED_LOANS:
                    connection.send(b"")
                for key, ready in selected:
                    if key.fileobj is self._wake:
                        self._clear_wake()
                        continue
                    if ready & selectors.EVENT_WRITE:
                        connection.flush()
                    if ready & selectors.EVENT_READ:
                        problem = self._receive(connection, received)
                        if problem:
                            return problem
        return ""

    def _receive(self, connection: _Connection, received: bytearray) -> str:
        """Receive replies; return why there are no more of them, or nothing."""
        try:
            data = connection.stream.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return ""
        if not data:
            return "it has ended the connection"
        received += data
        for body in protocol.take_frames(received):
            reply = protocol.decode(protocol.REPLIES, body)
            if isinstance(reply, Refused):
                return f"it serves this client no further: {reply.text}"
            self._complete(connection, reply)
        return ""

    def _complete(self, connection: _Connection, reply: Reply) -> None:
        with connection.lock:
            future = connection.pending.pop(reply.number, None)
        if future is None:
            raise MalformedError(f"a reply to request {reply.number}, which is not waited for")
        if reply.fault is not None:
            future.set_exception(reply.fault.error())
        else:
            future.set_result(reply.data if reply.value is None else reply.value)

    # ---------------------------------------------------------------------------- a fork

    def _leave(self) -> None:
        """Close a forked process's copy."""
        self._is_closed = True
        self._lock = threading.Lock()
        self._is_connected = threading.Event()
        self._arena = None
        self._wake.close()
        self._waker.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.leave()


_clients: Final[weakref.WeakSet[NodeClient]] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._leave()


os.register_at_fork(after_in_child=_after_fork)
