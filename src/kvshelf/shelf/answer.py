"""One lookup: what is asked about a prompt, and the answer.

Owns :class:`Lookup`, through which a caller of :class:`~kvshelf.shelf.lookup.LookupService` and its
threads speak with each other.

Contracts
---------
* It is made and read on the caller's (step) thread, and worked on by one background thread. Once it
  is ``done``, its answer is valid and belongs to the caller. It is answered once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvshelf.format.keys import KeyChain
from kvshelf.format.kinds import Kind
from kvshelf.logs import RateLimitedLog
from kvshelf.shelf.pacing import GilPace

logger = logging.getLogger(__name__)

#: Chunks of which the keys are made between two pauses.
_AT_ONCE = 8


@dataclass(eq=False)
class Lookup:
    """One search for the longest hit of one prompt.

    Attributes
    ----------
    chain : KeyChain or None
        Keys of the prompt's chunks; None when it has none, or was cancelled or given up.
    first_chunk : int
        Index of the chunk that the search begins at.
    hit_chunks : int
        Number of chunks from there on that can be loaded.
    full_chunks : int
        Number of chunks from there on whose full objects are on the shelf, up to the first that is
        not; all of them in a namespace without kind full. It differs from `hit_chunks` only where
        there are other kinds.
    known : Mapping[Kind, frozenset[int]]
        For each kind but full, the chunks (by their index in the prompt) that the search has seen
        on the shelf.
    in_disk_tier : float
        The share of the chunks that can be loaded which a disk tier has, where the service counts
        these.
    as_of : float
        ``time.monotonic()`` of the answer; until it is there, of the lookup's beginning.
    given_up : bool
        The storage did not answer in time, or the keys could not be made: nothing is known.
    waited_for : bool
        A thread waits in :meth:`wait`. It is the one that pauses are made for, so there are none.
    """

    tokens: Sequence[int]
    make_chain: Callable[[], KeyChain | None]
    first_chunk: int = 0
    ends: Sequence[int] | None = None
    on_done: Callable[[Lookup], None] | None = None
    #: None once the lookup no longer waits for it.
    prepare: Callable[[Callable[[], None]], None] | None = None
    log: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(logger))
    cancelled: bool = False
    given_up: bool = False
    waited_for: bool = False
    chain: KeyChain | None = None
    hit_chunks: int = 0
    full_chunks: int = 0
    in_disk_tier: float = 0.0
    known: Mapping[Kind, frozenset[int]] = field(default_factory=dict)
    as_of: float = field(default_factory=time.monotonic)
    _done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.count = len(self.tokens)

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the answer for at most `seconds`; return ``done``."""
        self.waited_for = True
        try:
            return self._done.wait(seconds)
        finally:
            self.waited_for = False

    def cancel(self) -> None:
        """Note that the answer is not needed any more; the background thread skips it."""
        self.cancelled = True
        # The lookup may stay in the queue for long: release what it holds. A thread that reads
        # these attributes now checks whether the lookup is cancelled before it gives an answer.
        self.tokens = ()
        self.make_chain = _no_chain
        self.prepare = None

    def make_keys(self, pace: GilPace) -> KeyChain | None:
        """Return the keys of the prompt; None if it has none, or the lookup was cancelled."""
        chain = self.make_chain()
        if chain is None:
            return None
        step = chain.chunk_size * _AT_ONCE
        for start in range(chain.tokens, self.count, step):
            chain.extend(self.tokens[start : min(start + step, self.count)])
            if not self.waited_for:
                pace.rest()
        return None if self.cancelled else chain

    def finish(
        self,
        hit_chunks: int,
        chain: KeyChain | None,
        *,
        full_chunks: int = 0,
        in_disk_tier: float = 0.0,
        known: Mapping[Kind, frozenset[int]] | None = None,
        given_up: bool = False,
    ) -> None:
        """Give the answer, unless there is one: a stuck thread may come back late."""
        with self._lock:
            if self._done.is_set():
                return
            self.given_up = given_up
            self.hit_chunks = hit_chunks
            self.full_chunks = full_chunks
            self.in_disk_tier = in_disk_tier
            self.known = known or {}
            self.chain = chain
            self.as_of = time.monotonic()
            self._done.set()
        if self.on_done is not None:
            try:
                self.on_done(self)
            except Exception as error:
                self.log.error("a completion callback of a lookup raised", exc_info=error)


def _no_chain() -> KeyChain | None:
    return None
