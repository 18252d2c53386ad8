"""The connections of a node server: from the greeting of a client to the end of its stream.

Owns the event loop, the connections, and the way between messages and the
:class:`~kvshelf.server.node.Node`, which does the work.

Contracts
---------
* No client blocks the loop, whatever it does or leaves undone. Connections that say nothing are
  bounded in number and time. A client's requests that are under way are bounded; further ones are
  not read. So are its answers, which wait until it reads them.
* A client that sends no message of the protocol is told so, and is served no further. It keeps what
  it has on loan until it closes its end: it may be reading there.
* The server stays at its path: files that a cleaner deletes there are made again, without effect on
  connections. If another server has taken the place meanwhile, this one ends.

Threads
-------
:meth:`Server.run` belongs to one thread, and the loop runs there. :meth:`Server.post`,
:meth:`Server.stop`, :meth:`Server.drain` and :meth:`Server.stats` may be called from any other
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from kvshelf.errors import ConfigError, KVShelfError
from kvshelf.logs import RateLimitedLog
from kvshelf.memory.arena import Arena
from kvshelf.server import protocol
from kvshelf.server.listener import (
    Greeting,
    Listener,
    SessionError,
    TakenError,
    peer_user,
    send_greeting,
    socket_path,
)
from kvshelf.server.node import Loans, Node
from kvshelf.server.protocol import Fault, MalformedError, Refused, Reply, Request, Welcome

logger = logging.getLogger(__name__)

#: Connections, those of them that have not said hello, and how long one may take for that.
MAX_CONNECTIONS: Final = 256
_MAX_GREETING: Final = 64
_GREETING_SECONDS: Final = 5.0
#: Requests of one connection that are under way.
_REQUESTS: Final = 256
_RECEIVED_BYTES: Final = 256 << 10
_TICK_SECONDS: Final = 0.25


class Server:
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
        self._path = socket_path(url)
        self._listener = Listener(self._path)
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._log = RateLimitedLog(logger, lines=5)
        self._connections: set[asyncio.Task[None]] = set()
        self._greeting_count = self._requests = self._refused = 0
        self._node: Node
        self._welcome: Callable[[], Welcome]
        self._memory_fd = -1

    # ---------------------------------------------------------------------------- any thread

    def post(self, function: Callable[[], None]) -> None:
        """Call a function on the loop's thread, soon."""
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Let :meth:`run` return. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self.post(self._stopped.set)

    def drain(self, seconds: float) -> int:
        """Begin nothing more, and wait for stores; return how many were not in time."""
        stores = asyncio.run_coroutine_threadsafe(self._node.drain(seconds), self._loop)
        return stores.result(seconds + 1.0)

    def stats(self) -> dict[str, int]:
        """Return the number of requests, and of messages and connections that were refused."""
        return {"requests": self._requests, "refused": self._refused}

    # ---------------------------------------------------------------------------- the loop's thread

    def run(self, node: Node, arena: Arena, *, chunk_size: int) -> None:
        """Serve until :meth:`stop` is called.

        Parameters
        ----------
        node : Node
        arena : Arena
            Shared, and open until this method returns.
        chunk_size : int
            Tokens of a chunk, for clients that have no configuration.

        Raises
        ------
        ConfigError
            If another server has taken this one's place, whose files had been deleted.
        """
        assert arena.fd is not None
        self._node, self._memory_fd = node, arena.fd
        self._welcome = lambda: Welcome(arena.nbytes, chunk_size, node.facts)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(asyncio.sleep(0))

    def close(self) -> None:
        """Leave the path. Idempotent; after :meth:`run`."""
        self._listener.close()
        if not self._loop.is_running():
            self._loop.close()

    async def _serve(self) -> None:
        accepting = self._loop.create_task(self._accept())
        while not self._stopped.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _TICK_SECONDS)
            if accepting.done() or not self._listener.in_place():
                accepting.cancel()
                if self._listener.in_place() or self._listen_anew():
                    accepting = self._loop.create_task(self._accept())
        accepting.cancel()

    def _listen_anew(self) -> bool:
        """Make the lock and the socket again, which were deleted; return whether they are there."""
        self._listener.close()
        try:
            self._listener = Listener(self._path)
        except TakenError as error:
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

    async def _accept(self) -> None:
        """Take connections; end where the system has no descriptors left, until the next tick."""
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener.socket)
            except OSError as error:
                self._log.error("no client can connect: %s", error)
                return
            connection.setblocking(False)
            full = len(self._connections) >= MAX_CONNECTIONS
            if full or self._greeting_count >= _MAX_GREETING:
                self._refuse(connection, f"there are {len(self._connections)} clients already")
                continue
            task = self._loop.create_task(self._talk(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    def _refuse(self, connection: socket.socket, problem: str) -> None:
        self._refused += 1
        self._log.warning("a client of the node server was refused: %s", problem)
        with contextlib.suppress(OSError):
            send_greeting(connection, protocol.frame(Refused(problem[:4096])), [])
        connection.close()

    async def _talk(self, connection: socket.socket) -> None:
        """Serve one connection to its end."""
        self._greeting_count += 1
        try:
            memory = await asyncio.wait_for(self._greet(connection), _GREETING_SECONDS)
        except TimeoutError:
            self._refuse(connection, "it said nothing")
            return
        except OSError as error:
            self._refuse(connection, str(error))
            return
        except BaseException:
            connection.close()
            raise
        finally:
            self._greeting_count -= 1
        loans = self._node.connect(memory)
        del memory
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            try:
                await _Session(self, self._node, loans, reader, writer).run()
            finally:
                writer.close()
        except OSError as error:
            logger.debug("a connection ended: %s", error)
        finally:
            self._node.leave(loans)

    async def _greet(self, connection: socket.socket) -> memoryview:
        """Receive the hello of a client, and answer it; return the client's memory."""
        if peer_user(connection) != os.geteuid():
            raise SessionError("the node server serves processes of its own user only")
        greeting = Greeting()
        try:
            body: bytes | None = None
            while body is None:
                await _readable(connection)
                body = greeting.receive(connection)
            try:
                hello = protocol.decode(protocol.HELLO, body)
            except MalformedError as error:
                raise SessionError(f"a client's first message is no hello: {error}") from None
            if hello.protocol != protocol.PROTOCOL:
                raise SessionError(
                    f"the client speaks version {hello.protocol} of the protocol, this server"
                    f" version {protocol.PROTOCOL}: use the same version of kvshelf"
                )
            memory = greeting.map(hello.memory_bytes)
        finally:
            greeting.close()
        send_greeting(connection, protocol.frame(self._welcome()), [self._memory_fd])
        return memory

    def count_request(self) -> None:
        """Count a request."""
        self._requests += 1

    def note_malformed(self, problem: str) -> None:
        """Count and log a client that is served no further."""
        self._refused += 1
        self._log.warning("a client of the node server is served no further: %s", problem)

    def note_failure(self, error: Exception) -> None:
        """Log an error of the server itself."""
        self._log.error("the node server failed: %s", error, exc_info=error)


async def _readable(connection: socket.socket) -> None:
    """Wait until there is something to receive."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


class _Session:
    """The requests of one client, and their replies."""

    def __init__(
        self,
        server: Server,
        node: Node,
        loans: Loans,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._server = server
        self._node = node
        self._loans = loans
        self._reader = reader
        self._writer = writer
        self._writing = asyncio.Lock()
        #: One object at a time is sent by the stream, so that few of them wait in memory.
        self._streaming = asyncio.Lock()
        self._free = asyncio.Semaphore(_REQUESTS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve the client until it closes its end."""
        received = bytearray()
        is_served = True
        try:
            while data := await self._reader.read(_RECEIVED_BYTES):
                if not is_served:
                    continue
                received += data
                try:
                    for body in protocol.take_frames(received, protocol.MAX_REQUEST):
                        await self._begin(protocol.decode(protocol.REQUESTS, body))
                except MalformedError as error:
                    is_served = False
                    self._server.note_malformed(str(error))
                    await self._send(Refused(str(error)[:4096]))
                    self._writer.write_eof()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _begin(self, request: Request) -> None:
        """Handle a request, or begin to."""
        self._server.count_request()
        node, loans = self._node, self._loans
        match request:
            case protocol.GiveBack():
                node.give_back(loans, request.offsets)
            case protocol.Lock():
                node.lock(loans, request.session, request.names)
            case protocol.EndSession():
                node.end_session(loans, request.session, request.names)
            case _:
                await self._free.acquire()
                task = asyncio.get_running_loop().create_task(self._answer(request))
                self._tasks.add(task)
                task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._free.release()
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a reply was not sent: %s", error)

    async def _answer(self, request: Any) -> None:
        """Do what a request asks for, and send the reply."""
        if isinstance(request, protocol.Read):
            async with self._streaming:
                await self._send(await self._reply(request))
        else:
            await self._send(await self._reply(request))

    async def _reply(self, request: Any) -> Reply:
        try:
            if isinstance(request, protocol.Read):
                data = await self._node.read(self._loans, request.name)
                return Reply(request.number, data=data)
            return Reply(request.number, await self._value(request))
        except Exception as error:  # noqa: BLE001 - the client is told, and others are served
            if not isinstance(error, KVShelfError | ValueError):
                self._server.note_failure(error)
            return Reply(request.number, fault=Fault.of(error))

    async def _value(self, request: Any) -> Any:
        node, loans = self._node, self._loans
        match request:
            case protocol.Find():
                return await node.find(loans, request.names)
            case protocol.Fetch():
                return await node.fetch(loans, request.names, request.is_early, request.ahead)
            case protocol.Store():
                return await node.store(
                    loans, request.name, request.offset, request.nbytes, request.is_suspect
                )
            case protocol.Delete():
                return await node.delete(loans, request.names)
            case protocol.Stat():
                return await node.stat(loans, request.names)
            case protocol.Touch():
                return await node.touch(loans, request.name, request.before)
            case protocol.Register():
                node.register(request.record, request.slug, request.is_volatile)
                return None

    async def _send(self, message: Reply | Refused) -> None:
        async with self._writing:
            self._writer.write(protocol.frame(message))
            await self._writer.drain()
