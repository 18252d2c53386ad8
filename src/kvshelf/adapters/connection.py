"""What the adapters of a scheduler and of a worker have in common.

Owns the connection and its namespace (:class:`Adapter`), the chunk size that server, namespace and
engine must agree on, and the adapter's threads (:class:`AdapterThreads`).

Contracts
---------
* The namespace identifies weights and layout, so the caller states it.
* Only the constructor waits for the server, for a bounded time.

Threads
-------
Everything runs on the caller's thread, but the work that is put to the adapter's threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from kvshelf.errors import ConfigError, UnavailableStorageError
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import required_field
from kvshelf.logs import RateLimitedLog
from kvshelf.server.interface import Channel, ServerClient

#: How long an adapter's constructor waits for the server.
CONNECT_SECONDS: Final = 10.0
#: How the chunk size of adapters is set.
_CHUNK_SIZE: Final = (
    "start the server with another one (KVSHELF_CHUNK_SIZE in its environment, or chunk_size in the"
    " file that `kvshelf serve --config` names)"
)


class AdapterThreads:
    """Daemon threads that call functions in the order in which they were put.

    Parameters
    ----------
    count : int
    log : RateLimitedLog
        Gets what a function raises.
    """

    def __init__(self, count: int, log: RateLimitedLog) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._log = log
        self._count = count
        for number in range(count):
            threading.Thread(target=self._run, name=f"kvshelf-client-{number}", daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        """Let a thread call `work`."""
        self._queue.put(work)

    def close(self) -> None:
        """End the threads when they have done what was put before. Does not wait."""
        for _ in range(self._count):
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  the thread must go on
                about = "thread", type(error)
                self._log.error("an adapter's thread failed", exc_info=error, about=about)
            del work


class Adapter:
    """A connection to a node server, for one namespace.

    Parameters
    ----------
    server_url : str
    model : Namespace or ModelFacts
    block_size : int
    channel : Channel or None
        None: a connection of its own.
    segment_bytes : int
        Size of the shared memory of a connection of its own.

    Attributes
    ----------
    namespace : Namespace
    fmt : ObjectFormat
    chunk_size, block_size, blocks_in_chunk : int
        Tokens in a chunk, and in a block of the engine; blocks in a chunk.

    Raises
    ------
    ConfigError
        If the chunk size is no multiple of the block size, or the namespace has another one than
        the server.
    UnavailableStorageError
        If facts are given and the server does not answer.
    """

    def __init__(
        self,
        server_url: str,
        model: Namespace | ModelFacts,
        block_size: int,
        channel: Channel | None,
        *,
        segment_bytes: int = 0,
    ) -> None:
        self._client = ServerClient(server_url, segment_bytes=segment_bytes, channel=channel)
        self._log = self._client.log
        try:
            self.namespace = self._namespace_of(model)
            self.fmt = ObjectFormat(self.namespace)
            self.chunk_size = self.fmt.chunk_size
            if block_size < 1 or self.chunk_size % block_size:
                raise ConfigError(
                    f"the chunk size is {self.chunk_size} tokens, which is no multiple of the"
                    f" engine's block size {block_size}: {_CHUNK_SIZE}, or start the engine with"
                    " another block size"
                )
        except BaseException:
            self._client.close()
            raise
        self.block_size = block_size
        self.blocks_in_chunk = self.chunk_size // block_size
        self._client.register(self.namespace)

    def __repr__(self) -> str:
        state = "connected" if self._client.channel.connected else "not connected"
        return f"<{type(self).__name__} of {self._client.url}, {self.namespace.folder}, {state}>"

    def num_blocks_per_chunk(self) -> int:
        """Return the number of the engine's blocks in a chunk."""
        return self.blocks_in_chunk

    def _namespace_of(self, model: Namespace | ModelFacts) -> Namespace:
        self._client.channel.wait_connected(CONNECT_SECONDS)
        welcome = self._client.channel.welcome
        if welcome is None:
            text = f"the node server at {self._client.url} does not answer"
            if not isinstance(model, Namespace):
                raise UnavailableStorageError(
                    f"{text}, so its chunk size is not known: start it with `kvshelf serve`, or"
                    " pass a Namespace"
                )
            self._log.warning("%s: going on without a cache until it does", text)
            return model
        if not isinstance(model, Namespace):
            return model.namespace(chunk_size=welcome.chunk_size)
        own = required_field(model.record, "chunk_size")
        if welcome.chunk_size != own:
            raise ConfigError(
                f"the chunk size of the server is {welcome.chunk_size} tokens, that of the"
                f" namespace is {own}: use one for both, or {_CHUNK_SIZE}"
            )
        return model
