"""What stores and loads of a worker have in common.

Owns :class:`Work`, an operation under way and what it copies, and :class:`Transfers`: how its
chunks are named, and where their KV lies in an object.

Threads
-------
Any thread may call everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from kvshelf.adapters.connection import AdapterThreads
from kvshelf.adapters.copies import ChunkCopy, EngineCaches, LoadStoreOp
from kvshelf.adapters.names import NamedChunk, chunks_of, striding_block_hashes
from kvshelf.adapters.operations import Operation
from kvshelf.cache import PromptIdentity
from kvshelf.format.objects import ObjectFormat
from kvshelf.server.interface import ServerClient


class Event(Protocol):
    """What is needed of an event of the engine's device, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether it has passed."""

    def synchronize(self) -> None:
        """Wait until it has."""


@dataclass(frozen=True, slots=True)
class Work:
    """An operation that is under way, and what it copies."""

    operation: Operation
    op: LoadStoreOp
    identity: PromptIdentity
    copies: list[ChunkCopy]
    caches: EngineCaches
    event: Event | None


class Transfers:
    """The stores, or the loads, of one worker.

    Parameters
    ----------
    client : ServerClient
    fmt : ObjectFormat
    blocks_in_chunk : int
    threads : AdapterThreads
        They derive keys, hash and copy.
    """

    #: What happens to chunks, for messages.
    done: ClassVar[str]

    def __init__(
        self,
        client: ServerClient,
        fmt: ObjectFormat,
        blocks_in_chunk: int,
        threads: AdapterThreads,
    ) -> None:
        self._client = client
        self._fmt = fmt
        self._blocks_in_chunk = blocks_in_chunk
        self._threads = threads

    def begin(self, work: Work) -> None:
        """Begin an operation. Never waits for the server."""
        raise NotImplementedError

    def _chunks(self, work: Work) -> Sequence[NamedChunk]:
        """Return the operation's chunks, or in hash mode their block hashes.

        Raises
        ------
        ValueError
            If a token is no token id.
        """
        op = work.op
        if op.block_hashes is not None:
            return striding_block_hashes(op.block_hashes, self._blocks_in_chunk)
        assert op.token_ids is not None
        chunks = chunks_of(self._fmt, op.token_ids, op.end, work.identity)
        return chunks[op.start // self._fmt.chunk_size :]

    def _header_bytes(self, work: Work) -> int:
        """Return where the KV of a chunk begins in its object."""
        return 0 if work.op.block_hashes is not None else self._fmt.data_offset

    def _warn(self, work: Work, error: BaseException) -> None:
        self._client.log.warning(
            "a chunk of request %s was not %s: %s", work.operation.request_id, self.done, error
        )
