"""The adapter of an engine's scheduler: looks prompts up at a node server.

Owns :class:`SchedulerAdapter`: the lookups of requests, their answers, and the leases of what was
found. ``README.md`` compares it with vLLM's LMCache adapter
(vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/multi_process_adapter.py).

Contracts
---------
* No method waits, except the constructor. Without a server, or if it hangs, nothing is found.
* An answer stays: a lookup that found nothing finds nothing later.

Threads
-------
The methods are called by one thread, that of the scheduler's step. The thread
``kvshelf-client-0`` derives keys; the channel's thread notes answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from kvshelf.adapters.connection import Adapter, AdapterThreads
from kvshelf.adapters.names import (
    PLAIN,
    NamedChunk,
    check_mode,
    chunks_of,
    names_of,
    striding_block_hashes,
)
from kvshelf.cache import PromptIdentity
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.server.interface import Channel

#: How long a lookup may take, unless it is stated.
LOOKUP_SECONDS: Final = 2.0


@dataclass(eq=False, slots=True)
class _PromptLookup:
    """The lookup of one request, and its leases.

    The adapter's lock guards the fields below `leased_until`.
    """

    #: Without an answer by then, nothing was found.
    deadline: float
    #: All leases are over by then.
    leased_until: float
    #: Tokens that were found; None while there is no answer.
    hit: int | None = None
    #: The names of each chunk that is asked for, then of each that is leased, by its number.
    chains: dict[int, list[str]] = field(default_factory=dict)
    #: The session that has the leases; empty when there are none.
    session: str = ""


class SchedulerAdapter(Adapter):
    """Looks prompts up at a node server, which leases what it finds until it is loaded.

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
    channel : Channel, optional
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
    """

    def __init__(
        self,
        server_url: str,
        model: Namespace | ModelFacts,
        block_size: int,
        *,
        timeout_s: float = LOOKUP_SECONDS,
        channel: Channel | None = None,
    ) -> None:
        super().__init__(server_url, model, block_size, channel)
        self._timeout = timeout_s
        self._lock = threading.Lock()
        self._lookups: dict[str, _PromptLookup] = {}
        #: Lookups that may have leases, the oldest first; also those that were cleaned up.
        self._leased: dict[str, _PromptLookup] = {}
        self._threads = AdapterThreads(1, self._log)

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: Sequence[bytes] | None = None,
        token_ids: Sequence[int] | None = None,
        *,
        identity: PromptIdentity = PLAIN,
    ) -> None:
        """Start to look a prompt up, unless this request has a lookup. Never waits.

        The server leases the chunks that it finds until a worker has fetched them for the request
        of this id, :meth:`free_lookup_locks`, :meth:`end_session`, or for the time of a lease.

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
        derive: Callable[[], Sequence[NamedChunk]]
        if block_hashes is not None:
            hashes = striding_block_hashes(block_hashes, self.blocks_in_chunk)
            chunks = len(hashes)

            def derive() -> Sequence[NamedChunk]:
                return hashes

        else:
            assert token_ids is not None
            tokens = list(token_ids)
            chunks = len(tokens) // self.chunk_size

            def derive() -> Sequence[NamedChunk]:
                return chunks_of(self.fmt, tokens, len(tokens), identity)

        now = time.monotonic()
        welcome = self._client.channel.welcome
        lookup = _PromptLookup(now + self._timeout, now + self._timeout)
        self._lookups[request_id] = lookup
        if not chunks or welcome is None or not self._client.channel.connected:
            lookup.hit = 0
            return
        lookup.leased_until += welcome.lease_seconds
        lookup.session = request_id
        self._forget_ended_leases(now)
        self._leased[request_id] = lookup
        self._threads.put(lambda: self._ask(lookup, request_id, derive))

    def _forget_ended_leases(self, now: float) -> None:
        """Forget lookups whose leases are over."""
        while self._leased:
            oldest = next(iter(self._leased))
            if self._leased[oldest].leased_until > now:
                return
            del self._leased[oldest]

    def _ask(
        self, lookup: _PromptLookup, request_id: str, derive: Callable[[], Sequence[NamedChunk]]
    ) -> None:
        """Derive the names and send them. Adapter's thread."""
        chains: list[list[str]] = []
        try:
            chains = [names_of(self.fmt, chunk) for chunk in derive()]
        except Exception as error:  # noqa: BLE001  tokens may be anything
            self._log.warning("request %s was not looked up: %s", request_id, error)
        with self._lock:
            if not chains:
                lookup.hit = 0
            if lookup.hit is not None or not lookup.session:
                return
            lookup.chains = dict(enumerate(chains))
            request = self._client.look_up(request_id, chains)
        request.add_done_callback(lambda done: self._on_answer(lookup, request_id, done))

    def _on_answer(self, lookup: _PromptLookup, request_id: str, done: Future[int]) -> None:
        """Note the answer. Channel's thread."""
        error = done.exception()
        if error is not None:
            self._log.warning("the lookup of request %s failed: %s", request_id, error)
        chunks = 0 if error is not None else done.result()
        with self._lock:
            late = lookup.hit is not None or not lookup.session
            if lookup.hit is None:
                chunks = min(chunks, len(lookup.chains))
                lookup.hit = chunks * self.chunk_size
                lookup.chains = {number: lookup.chains[number] for number in range(chunks)}
        if late and chunks:
            # What was reported as missing, or is not wanted any more, will not be loaded.
            self._client.channel.end_session(request_id)

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
        if lookup.hit is None and time.monotonic() >= lookup.deadline:
            with self._lock:
                if lookup.hit is None:
                    lookup.hit = 0
        return lookup.hit

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget the result of a lookup. Its leases stay."""
        self._lookups.pop(request_id, None)

    def free_lookup_locks(
        self,
        token_ids: Sequence[int] | None = None,
        start: int = 0,
        end: int | None = None,
        request_id: str = "",
    ) -> None:
        """End the leases of the chunks that lie whole in tokens [start, end). Never waits.

        Parameters
        ----------
        token_ids : Sequence[int], optional
            Not needed: the lookup had them.
        start, end : int
            Positions of tokens; to the end of the prompt when `end` is absent.
        request_id : str
            The request of the lookup. For others, nothing is leased.
        """
        lookup = self._leased.get(request_id)
        if lookup is None:
            return
        with self._lock:
            if lookup.hit is None or not lookup.session:
                return
            first = -(-start // self.chunk_size)
            after = (lookup.hit if end is None else end) // self.chunk_size
            kept = {
                number: names
                for number, names in lookup.chains.items()
                if not first <= number < after
            }
            if len(kept) == len(lookup.chains):
                return
            lookup.chains = kept
        if kept:
            self._keep_only(lookup, request_id, kept)
        else:
            self.end_session(request_id)

    def _keep_only(self, lookup: _PromptLookup, session: str, kept: dict[int, list[str]]) -> None:
        """End the leases of a session but for some chunks, which are leased at any time."""
        meanwhile = f"{session}+"

        def leased_meanwhile(_: Future[int]) -> None:
            self._client.channel.end_session(session)
            with self._lock:
                # Others may have been freed by now, or all.
                chains = list(lookup.chains.values()) if lookup.session else []
            if chains:
                self._client.look_up(session, chains).add_done_callback(leased_again)
            else:
                self._client.channel.end_session(meanwhile)

        def leased_again(_: Future[int]) -> None:
            self._client.channel.end_session(meanwhile)
            with self._lock:
                ended = not lookup.session
            if ended:
                self._client.channel.end_session(session)

        request = self._client.look_up(meanwhile, list(kept.values()))
        request.add_done_callback(leased_meanwhile)

    def end_session(self, request_id: str) -> None:
        """End all leases of a request. Never waits."""
        lookup = self._leased.pop(request_id, None)
        if lookup is None:
            return
        with self._lock:
            session, lookup.session = lookup.session, ""
        if session:
            self._client.channel.end_session(session)

    def shutdown(self) -> None:
        """End all leases and close the connection. Idempotent."""
        for request_id in list(self._leased):
            self.end_session(request_id)
        self._lookups.clear()
        self._threads.close()
        self._client.close()
