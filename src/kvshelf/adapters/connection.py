"""What the adapters of a scheduler and of a worker have in common.

Owns the connection, the shelf behind it, the namespaces of both modes, and the chunk size that
server, namespace and engine must agree on.

Contracts
---------
* The namespace identifies weights and layout, so the caller states it.
* Only the constructor waits for the server, for a bounded time.
* Everything runs on the caller's thread.
"""

from __future__ import annotations

import logging
from typing import Final

from kvshelf.adapters.names import hashed_namespace
from kvshelf.errors import ConfigError, UnavailableStorageError, UnsupportedError
from kvshelf.format.kinds import FULL
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.format.tensors import required_field
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.server.connection import NodeClient
from kvshelf.server.view import NodeShelf

logger = logging.getLogger("kvshelf.adapters")

_LINES_PER_MINUTE: Final = 10
#: How long an adapter's constructor waits for the server.
CONNECT_SECONDS: Final = 10.0
#: How the chunk size of adapters is set.
_CHUNK_SIZE: Final = (
    "start the server with another one (KVSHELF_CHUNK_SIZE in its environment, or chunk_size in the"
    " file that `kvshelf serve --config` names)"
)


class Adapter:
    """A connection to a node server, for one namespace.

    Parameters
    ----------
    server_url : str
    model : Namespace or ModelFacts
    block_size : int
    client : NodeClient or None
        None: a connection of its own.

    Attributes
    ----------
    namespace : Namespace
    fmt, hashed_fmt : ObjectFormat
        Of chunks that tokens name, and of those that block hashes name.
    chunk_size, block_size, blocks_in_chunk : int
        Tokens in a chunk, and in a block of the engine; blocks in a chunk.

    Raises
    ------
    ConfigError
        If the chunk size is no multiple of the block size, or the namespace has another one than
        the server.
    UnavailableStorageError
        If facts are given and the server does not answer.
    UnsupportedError
        If the namespace has layers of other kinds than ``full``: an operation names blocks of one
        cache group.
    """

    def __init__(
        self,
        server_url: str,
        model: Namespace | ModelFacts,
        block_size: int,
        client: NodeClient | None,
    ) -> None:
        self._log = RateLimitedLog(logger, _LINES_PER_MINUTE)
        self._owns_client = client is None
        self._client = client or NodeClient(server_url)
        try:
            self.namespace = self._namespace_of(model)
            self.fmt = ObjectFormat(self.namespace)
            self.hashed_fmt = ObjectFormat(hashed_namespace(self.namespace))
            self.chunk_size = self.fmt.chunk_size
            if block_size < 1 or self.chunk_size % block_size:
                raise ConfigError(
                    f"the chunk size is {self.chunk_size} tokens, which is no multiple of the"
                    f" engine's block size {block_size}: {_CHUNK_SIZE}, or start the engine with"
                    " another block size"
                )
            if self.fmt.kinds != (FULL,):
                raise UnsupportedError(
                    f"the namespace has layers of kind {', '.join(self.fmt.kinds)}, but an"
                    " operation names blocks of one cache group: use kvshelf's connector with the"
                    " option server"
                )
        except BaseException:
            self._close_client()
            raise
        self.block_size = block_size
        self.blocks_in_chunk = self.chunk_size // block_size
        self._counters = Counters()

    def __repr__(self) -> str:
        state = "connected" if self._client.is_connected else "not connected"
        return f"<{type(self).__name__} of {self._client.url}, {self.namespace.folder}, {state}>"

    def num_blocks_per_chunk(self) -> int:
        """Return the number of the engine's blocks in a chunk."""
        return self.blocks_in_chunk

    def _open_shelves(self, *, in_place: bool = True) -> tuple[NodeShelf, NodeShelf]:
        """Return the shelves of chunks that tokens name, and of those that block hashes name."""
        return (
            NodeShelf(self._client, self._counters, in_place=in_place),
            NodeShelf(self._client, self._counters, in_place=in_place, is_volatile=True),
        )

    def _close_client(self) -> None:
        """End the connection, unless it is another's."""
        if self._owns_client:
            self._client.close()

    def _namespace_of(self, model: Namespace | ModelFacts) -> Namespace:
        self._client.wait_connected(CONNECT_SECONDS)
        welcome = self._client.welcome
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
        chunk_size = required_field(model.record, "chunk_size")
        if welcome.chunk_size != chunk_size:
            raise ConfigError(
                f"the chunk size of the server is {welcome.chunk_size} tokens, that of the"
                f" namespace is {chunk_size}: use one for both, or {_CHUNK_SIZE}"
            )
        return model
