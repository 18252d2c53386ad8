"""The adapter of an engine's scheduler: looks prompts up at a node server.

Owns :class:`SchedulerAdapter`: the lookups of requests, their answers, and what the server holds
for them. ``docs/multiprocess.md`` compares it with vLLM's LMCache adapter
(vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/multi_process_adapter.py).

Contracts
---------
* No method waits, except the constructor. Without a server, or if it hangs, nothing is found.
* An answer stays: a lookup that was said to find nothing finds nothing later.

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
from typing import Any, Final

from kvshelf.cache import PromptIdentity
from kvshelf.format.model import ModelFacts
from kvshelf.format.namespace import Namespace
from kvshelf.server.adapter import Adapter, AdapterThreads
from kvshelf.server.channel import Channel
from kvshelf.server.messages import MAX_NAMES, MAX_REQUEST, LookedUp, LookUpChunks
from kvshelf.server.naming import PLAIN, chunks_of, names_of, striding_block_hashes

_LOOKUP_SECONDS: Final = 2.0
#: Bytes of a message beside its names, and beside the characters of each name.
_BESIDE_NAMES: Final = 4096
_BESIDE_NAME: Final = 8


@dataclass(eq=False, slots=True)
class _PromptLookup:
    """The lookup of one request, and what the server holds for it.

    The adapter's lock guards the fields below `leased_until`.
    """

    #: Without an answer by then, nothing was found.
    deadline: float
    #: The server holds nothing after that.
    leased_until: float
    #: Tokens that were found; None while there is no answer.
    hit: int | None = None
    #: The names of each chunk that is asked for, then of each that is leased, by its number.
    chains: dict[int, list[str]] = field(default_factory=dict)
    #: The session under which the server holds chunks; empty when it holds none.
    session: str = ""


class SchedulerAdapter(Adapter):
    """Looks prompts up at a node server, which holds what it finds until it is loaded.

    Parameters
    ----------
    server_url : str
        As for ``kvshelf serve``: ``ipc://`` and the path of its socket.
    model : Namespace or ModelFacts
        Identifies weights and layout. The chunk size of facts is the server's.
    block_size : int
        Tokens in a block of the engine; a divisor of the chunk size.
    timeout_s : float
        A lookup that has no answer after so many seconds finds nothing.
    channel : Channel, optional
        A connection that other adapters of this process use too. Its owner closes it.

    Attributes
    ----------
    chunk_size, blocks_in_chunk : int
        Tokens, and blocks, in a chunk.
    namespace : Namespace

    Raises
    ------
    ConfigError
        (A ValueError.) If the chunk size is no multiple of the block size, or the namespace has
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
        timeout_s: float = _LOOKUP_SECONDS,
        channel: Channel | None = None,
    ) -> None:
        super().__init__(server_url, model, block_size, channel, segment_bytes=0)
        self._timeout = timeout_s
        self._lock = threading.Lock()
        self._lookups: dict[str, _PromptLookup] = {}
        #: What the server may hold, the oldest first; also for results that were cleaned up.
        self._leased: dict[str, _PromptLookup] = {}
        self._threads = AdapterThreads(1, self._on_thread_error)

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: Sequence[bytes] | None = None,
        token_ids: Sequence[int] | None = None,
        *,
        identity: PromptIdentity = PLAIN,
    ) -> None:
        """Start to look a prompt up, unless this request has a lookup. Never waits.

        The server holds the chunks that it finds until a worker has fetched them for the request
        of this id, :meth:`free_lookup_locks`, :meth:`end_session`, or the end of their leases.

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
        derive: Callable[[], list[list[str]]]
        if block_hashes is not None and token_ids is None:
            hashes = striding_block_hashes(block_hashes, self.blocks_in_chunk)
            short = not hashes

            def derive() -> list[list[str]]:
                return [names_of(self.fmt, one) for one in hashes]

        elif token_ids is not None and block_hashes is None:
            tokens = list(token_ids)
            short = len(tokens) < self.chunk_size

            def derive() -> list[list[str]]:
                chunks = chunks_of(self.fmt, tokens, len(tokens), identity)
                return [names_of(self.fmt, chunk) for chunk in chunks]

        else:
            raise ValueError(
                f"the lookup of request {request_id!r} got"
                f" {'neither' if token_ids is None else 'both'} of block_hashes and token_ids:"
                " expected exactly one"
            )
        now = time.monotonic()
        welcome = self._channel.welcome
        lookup = _PromptLookup(now + self._timeout, now + self._timeout)
        self._lookups[request_id] = lookup
        if short or welcome is None or not self._channel.connected:
            lookup.hit = 0
            return
        lookup.leased_until += welcome.lease_seconds
        lookup.session = request_id
        self._forget_ended_leases(now)
        self._leased[request_id] = lookup
        self._threads.put(lambda: self._ask(lookup, request_id, derive))

    def _forget_ended_leases(self, now: float) -> None:
        """Forget lookups of which the server holds nothing any more."""
        while self._leased:
            oldest = next(iter(self._leased))
            if self._leased[oldest].leased_until > now:
                return
            del self._leased[oldest]

    def _ask(
        self, lookup: _PromptLookup, request_id: str, derive: Callable[[], list[list[str]]]
    ) -> None:
        """Derive the names and send them. Adapter's thread."""
        try:
            chains = _fitting(derive())
        except Exception as error:  # noqa: BLE001  tokens may be anything
            self._log.warning("request %s was not looked up: %s", request_id, error)
            chains = []
        with self._lock:
            if not chains:
                lookup.hit = 0
            if lookup.hit is not None or not lookup.session:
                return
            lookup.chains = dict(enumerate(chains))
            request = self._channel.request(LookUpChunks(request_id, chains))
        request.add_done_callback(lambda done: self._on_answer(lookup, request_id, done))

    def _on_answer(self, lookup: _PromptLookup, request_id: str, done: Future[Any]) -> None:
        """Note the answer. Channel's thread."""
        error = done.exception()
        chunks = 0
        if error is not None:
            self._log.warning("the lookup of request %s failed: %s", request_id, error)
        elif isinstance(reply := done.result(), LookedUp):
            chunks = reply.chunks
        with self._lock:
            late = lookup.hit is not None or not lookup.session
            if lookup.hit is None:
                chunks = min(chunks, len(lookup.chains))
                lookup.hit = chunks * self.chunk_size
                lookup.chains = {number: lookup.chains[number] for number in range(chunks)}
        if late and chunks:
            # What was reported as missing, or is not wanted any more, will not be loaded.
            self._channel.end_session(request_id)

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
        """Forget the result of a lookup. What the server holds for it stays."""
        self._lookups.pop(request_id, None)

    def free_lookup_locks(
        self,
        token_ids: Sequence[int] | None = None,
        start: int = 0,
        end: int | None = None,
        request_id: str = "",
    ) -> None:
        """Let go of the chunks that lie whole in tokens [start, end) of a prompt. Never waits.

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
        """Let go of all chunks of a session but those that are kept, at no time of these."""
        meanwhile = f"{session}+"

        def leased_meanwhile(_: Future[Any]) -> None:
            self._channel.end_session(session)
            with self._lock:
                # Others may have been freed by now, or all.
                chains = list(lookup.chains.values()) if lookup.session else []
            if chains:
                again = self._channel.request(LookUpChunks(session, chains))
                again.add_done_callback(leased_again)
            else:
                self._channel.end_session(meanwhile)

        def leased_again(_: Future[Any]) -> None:
            self._channel.end_session(meanwhile)
            with self._lock:
                ended = not lookup.session
            if ended:
                self._channel.end_session(session)

        request = self._channel.request(LookUpChunks(meanwhile, list(kept.values())))
        request.add_done_callback(leased_meanwhile)

    def end_session(self, request_id: str) -> None:
        """Let go of all that the server holds for a request. Never waits."""
        lookup = self._leased.pop(request_id, None)
        if lookup is None:
            return
        with self._lock:
            session, lookup.session = lookup.session, ""
        if session:
            self._channel.end_session(session)

    def shutdown(self) -> None:
        """Let go of everything and close the connection. Idempotent."""
        for request_id in list(self._leased):
            self.end_session(request_id)
        self._lookups.clear()
        self._threads.close()
        self._close_channel()


def _fitting(chains: Sequence[list[str]]) -> list[list[str]]:
    """Return the leading chunks whose names fit into one message: a million tokens or more."""
    left = MAX_REQUEST - _BESIDE_NAMES
    fitting = []
    for names in chains[:MAX_NAMES]:
        left -= sum(len(name) + _BESIDE_NAME for name in names)
        if left < 0:
            break
        fitting.append(names)
    return fitting
