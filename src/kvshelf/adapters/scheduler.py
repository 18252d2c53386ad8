"""The adapter of an engine's scheduler: looks prompts up at a node server.

Owns :class:`SchedulerAdapter`: the lookups of requests, their answers, and the locks of what was
found. ``README.md`` compares it with vLLM's LMCache adapter
(vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/multi_process_adapter.py).

Contracts
---------
* No method waits, except the constructor. Without a server, or if it hangs, nothing is found.
* An answer stays: a lookup that found nothing finds nothing later.

Threads
-------
The methods are called by one thread, that of the scheduler's step. The threads of
:mod:`kvshelf.shelf.lookup` derive keys, search and note answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvshelf.adapters.connection import Adapter
from kvshelf.adapters.names import (
    PLAIN,
    HashChain,
    check_mode,
    names_of,
    striding_block_hashes,
    token_chain,
)
from kvshelf.cache import PromptIdentity
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.server.connection import NodeClient
from kvshelf.server.view import NodeShelf
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import Lookup, LookupService

#: How long a lookup may take, unless it is stated.
LOOKUP_SECONDS: Final = 2.0


@dataclass(eq=False, slots=True)
class _PromptLookup:
    """The lookup of one request.

    The adapter's lock guards `hit`, `chunks` and `is_over`.
    """

    #: Without an answer by then, nothing was found.
    deadline: float
    fmt: ObjectFormat
    #: Tokens that were found; None while there is no answer.
    hit: int | None = None
    #: The chunks of the hit that are locked, by their numbers.
    chunks: dict[int, Chunk] = field(default_factory=dict)
    #: Its session has ended.
    is_over: bool = False


class SchedulerAdapter(Adapter):
    """Looks prompts up at a node server, which keeps what it finds in memory until it is loaded.

    Parameters
    ----------
    server_url : str
        As for ``kvshelf serve``: ``ipc://`` and the path of its socket.
    model : Namespace or ModelFacts
        Identifies weights and layout. The chunk size of facts is the server's.
    block_size : int
        Tokens in a block of the engine; a divisor of the chunk size.
    timeout_s : float
        A lookup that has no answer after so many seconds, 2 by default, finds nothing.
    client : NodeClient, optional
        A connection that other adapters of this process use too. Its owner closes it.

    Attributes
    ----------
    chunk_size : int
        Tokens in a chunk.
    blocks_in_chunk : int
        Blocks in a chunk.
    namespace : Namespace
        That of `model`.

    Raises
    ------
    ConfigError
        If the chunk size is no multiple of the block size, or the namespace has
        another one than the server.
    UnavailableStorageError
        If facts are given and the server does not answer.
    UnsupportedError
        If the namespace has several kinds of KV.
    """

    def __init__(
        self,
        server_url: str,
        model: Namespace | ModelFacts,
        block_size: int,
        *,
        timeout_s: float = LOOKUP_SECONDS,
        client: NodeClient | None = None,
    ) -> None:
        super().__init__(server_url, model, block_size, client)
        self._timeout = timeout_s
        self._lock = threading.Lock()
        self._lookups: dict[str, _PromptLookup] = {}
        #: Lookups whose session has not ended, also those that were cleaned up.
        self._sessions: dict[str, _PromptLookup] = {}
        self._token_shelf, self._hash_shelf = self._open_shelves()
        self._services: dict[bytes, LookupService] = {}

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: Sequence[bytes] | None = None,
        token_ids: Sequence[int] | None = None,
        *,
        identity: PromptIdentity = PLAIN,
    ) -> None:
        """Start to look a prompt up, unless this request has a lookup. Never waits.

        The server keeps the chunks that it finds in memory until :meth:`free_lookup_locks`,
        :meth:`end_session`, or for 30 s.

        Parameters
        ----------
        request_id : str
            A call with the id of a lookup does nothing, whatever its other arguments.
        block_hashes : Sequence[bytes], optional
            Hash mode: the hash of each block of the prompt.
        token_ids : Sequence[int], optional
            Token mode: the tokens of the prompt.
        identity : PromptIdentity
            Token mode: what else determines the KV, such as a LoRA adapter, images among the
            tokens, or a cache salt. An engine's block hashes hold theirs.

        Raises
        ------
        ValueError
            If not exactly one of `block_hashes` and `token_ids` is given.
        """
        if request_id in self._lookups:
            return
        check_mode(f"the lookup of request {request_id!r}", block_hashes, token_ids)
        tokens: Sequence[int]
        make_chain: Callable[[], KeyChain]
        if block_hashes is not None:
            fmt, shelf = self.hashed_fmt, self._hash_shelf
            hashes = striding_block_hashes(block_hashes, self.blocks_in_chunk)
            tokens = range(len(hashes))

            def make_chain() -> KeyChain:
                return HashChain(self.hashed_fmt, hashes)

        else:
            assert token_ids is not None
            fmt, shelf = self.fmt, self._token_shelf
            # The engine may change them afterwards.
            tokens = list(token_ids[: len(token_ids) // self.chunk_size * self.chunk_size])

            def make_chain() -> KeyChain:
                return token_chain(self.fmt, identity)

        lookup = _PromptLookup(time.monotonic() + self._timeout, fmt)
        self._lookups[request_id] = lookup
        if not tokens or not self._client.is_connected:
            lookup.hit = 0
            return
        self._sessions[request_id] = lookup
        self._service(fmt, shelf).submit(
            tokens, make_chain, on_done=lambda search: self._note_answer(lookup, request_id, search)
        )

    def _service(self, fmt: ObjectFormat, shelf: NodeShelf) -> LookupService:
        """Return the lookups of one mode; start them with the first one."""
        service = self._services.get(fmt.namespace.digest)
        if service is None:
            # Objects come and go in the server's memory: no answer is remembered.
            service = LookupService(
                shelf.view(fmt), failed=FailedKeys(), counters=self._counters, remembers=False
            )
            self._services[fmt.namespace.digest] = service
        return service

    def _note_answer(self, lookup: _PromptLookup, request_id: str, search: Lookup) -> None:
        """Note the answer, and have what was found kept in memory. A thread of lookups."""
        chunks = [] if search.chain is None else search.chain.chunks[: search.hit_chunks]
        with self._lock:
            if lookup.hit is not None or lookup.is_over:
                return
            lookup.hit = len(chunks) * self.chunk_size
            lookup.chunks = dict(enumerate(chunks))
            if chunks:
                self._client.lock(request_id, names_of(lookup.fmt, chunks))

    def check_lookup_result(self, request_id: str) -> int | None:
        """Return how many leading tokens of a request were found, None while that is not known.

        The answer is 0 for a prompt shorter than a chunk, without a server, and for a lookup that
        had no answer in time.

        Raises
        ------
        ValueError
            If the request has no lookup, or its result was cleaned up.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None:
            raise ValueError(
                f"request {request_id!r} has no lookup: it was never submitted, or its result was"
                " cleaned up; call maybe_submit_lookup_request first"
            )
        with self._lock:
            if lookup.hit is None and time.monotonic() >= lookup.deadline:
                lookup.hit = 0
            return lookup.hit

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget the result of a lookup. Its locks stay."""
        self._lookups.pop(request_id, None)

    def free_lookup_locks(
        self,
        token_ids: Sequence[int] | None = None,
        start: int = 0,
        end: int | None = None,
        request_id: str = "",
    ) -> None:
        """End the locks of the chunks that lie whole in tokens [start, end). Never waits.

        Parameters
        ----------
        token_ids : Sequence[int], optional
            Not needed: the lookup had them.
        start, end : int
            Positions of tokens; to the end of the prompt when `end` is absent.
        request_id : str
            The request of the lookup. For others, nothing is locked.
        """
        lookup = self._sessions.get(request_id)
        if lookup is None:
            return
        with self._lock:
            first = -(-start // self.chunk_size)
            after = ((lookup.hit or 0) if end is None else end) // self.chunk_size
            numbers = [number for number in lookup.chunks if first <= number < after]
            chunks = [lookup.chunks.pop(number) for number in numbers]
        if chunks:
            self._client.end_session(request_id, names_of(lookup.fmt, chunks))

    def end_session(self, request_id: str) -> None:
        """End all locks of a request. Never waits."""
        lookup = self._sessions.pop(request_id, None)
        if lookup is None:
            return
        with self._lock:
            lookup.is_over = True
            lookup.chunks.clear()
        self._client.end_session(request_id)

    def shutdown(self) -> None:
        """End all locks and close the connection. Idempotent."""
        for request_id in list(self._sessions):
            self.end_session(request_id)
        self._lookups.clear()
        for service in self._services.values():
            service.close()
        for shelf in (self._token_shelf, self._hash_shelf):
            shelf.close()
        self._close_client()
