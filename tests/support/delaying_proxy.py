"""A proxy that adds latency to a server on this machine.

Owns both sides. Run as a program, this file is the proxy: a separate process, so that it does not
hold up the interpreter of the tests. Imported, it provides :class:`DelayingProxy`, which starts the
proxy, reads its counts of requests and stops it.

Contracts
---------
* Data from a client arrives `delay_seconds` later; data from the server is not delayed. So each
  request takes that much longer, independent of concurrency, at unchanged bandwidth. As with real
  latency, a new connection can be used after one more delay.
* Bodies are forwarded as they arrive, never buffered as a whole.
* The proxy ends with the process that started it, even if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
from types import TracebackType
from typing import Final

_PIECE: Final = 1 << 18
#: Largest number of delayed pieces per connection.
_PIECES: Final = 1024
_REQUEST: Final = re.compile(rb"([A-Z]{3,8}) \S+ HTTP/1\.[01]\r?\n")
_STOP_SECONDS: Final = 10.0


class DelayingProxy:
    """A running proxy on 127.0.0.1, as a context manager.

    Parameters
    ----------
    target_host, target_port : str, int
        The server. It may start later, or be restarted.
    delay_seconds : float
        Latency added to each request.

    Attributes
    ----------
    port : int
        The port for clients.

    Raises
    ------
    RuntimeError
        If the proxy could not be started.
    """

    def __init__(self, target_host: str, target_port: int, delay_seconds: float) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__, target_host, str(target_port), str(delay_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.port = int(self._answer())
        except (RuntimeError, ValueError):
            self.close()
            raise

    def __enter__(self) -> DelayingProxy:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def requests(self) -> dict[str, int]:
        """Return the number of requests by method; of pipelined ones only the first counts."""
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            found: dict[str, int] = json.loads(self._answer())
        return found

    def close(self) -> None:
        """Stop the proxy and close its connections. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the delaying proxy ended")
        return line


# ------------------------------------------------------------------------------------- the proxy


class _Proxy:
    def __init__(self, host: str, port: int, delay: float) -> None:
        self._target = host, port
        self._delay = delay
        self.requests: dict[str, int] = {}

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until one side closes, or the proxy ends."""
        # asyncio would print the cancellation at the end.
        with contextlib.suppress(asyncio.CancelledError):
            await self._connect(reader, writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begin = asyncio.get_running_loop().time() + self._delay
        with contextlib.closing(writer):
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_PIECE)
            except OSError:
                writer.transport.abort()
                return
            with contextlib.closing(far_writer):
                turn = asyncio.Event()
                turn.set()
                ways = {
                    asyncio.create_task(self._there(reader, far_writer, begin, turn)),
                    asyncio.create_task(self._back(far_reader, writer, turn)),
                }
                # Cancelled only when the proxy ends; asyncio would print a traceback.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _there(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        begin: float,
        turn: asyncio.Event,
    ) -> None:
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES)

        async def arrive() -> None:
            while True:
                due, data = await under_way.get()
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        arriving = asyncio.create_task(arrive())
        try:
            while not arriving.done():
                data = await reader.read(_PIECE)
                if turn.is_set() and (request := _REQUEST.match(data)):
                    turn.clear()
                    method = request[1].decode()
                    self.requests[method] = self.requests.get(method, 0) + 1
                await under_way.put((max(begin, loop.time()) + self._delay, data))
                if not data:
                    break
            await arriving
        finally:
            arriving.cancel()

    async def _back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turn: asyncio.Event
    ) -> None:
        while data := await reader.read(_PIECE):
            turn.set()
            writer.write(data)
            await writer.drain()


async def _serve(host: str, port: int, delay: float) -> None:
    proxy = _Proxy(host, port, delay)
    server = await asyncio.start_server(proxy.connect, "127.0.0.1", 0, limit=_PIECE)
    _say(str(server.sockets[0].getsockname()[1]))
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        _say(json.dumps(proxy.requests))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(host: str, port: str, delay: str) -> None:
    """Run the proxy until standard input ends."""
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(_serve(host, int(port), float(delay)))


if __name__ == "__main__":
    main(*sys.argv[1:])
