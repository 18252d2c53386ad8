"""The hand-overs that requests of this engine wait for.

Owns which requests wait, until when, for which objects, and how each wait ends.
:class:`kvshelf.shelf.waits.WaitService` looks for the objects, and the scheduler side checks in
each step whether a request still waits.

A wait begins when its request arrives, and ends in one of these ways, each of which is counted:

* ``complete``: everything that was promised is on the shelf;
* ``gave_up``: the producer's marker says that a part will never be;
* ``late``: the deadline has passed;
* ``other_namespace``: this engine cannot use the producer's KV;
* ``invalid``: the params are malformed, or do not fit the request;
* ``refused``: too many requests wait already.

A wait also ends, uncounted, when its request is aborted or served from vLLM's own cache.

Contracts
---------
* Params come from any client. They can make their own request wait, at most as long as the
  engine's option says, and nothing else.
* Deadlines count from the arrival, by this process's monotonic clock.
* Runs on the engine's step thread and does no I/O.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from kvshelf.config import Config
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, WINDOW, Kind
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf.hits import window_chunks
from kvshelf.shelf.lookup import Lookup
from kvshelf.shelf.waits import Piece, Wait
from kvshelf.vllm.groups import CacheGroups
from kvshelf.vllm.handover import Handover, read_handover

logger = logging.getLogger(__name__)

Outcome: TypeAlias = Literal[
    "complete", "gave_up", "late", "other_namespace", "invalid", "refused", "unneeded"
]

#: Seconds until a lookup that the storage did not answer is started again.
RETRY_SECONDS: Final = 0.25
#: Longest sleep of a step, in seconds: a request that arrives meanwhile waits that long.
_LONGEST_REST: Final = 10e-3


class Awaited:
    """The hand-over that one request brought.

    Attributes
    ----------
    handover : Handover
    arrived, deadline : float
        By the clock of :class:`Awaiting`.
    outcome : Outcome or None
        How the wait ended; None while the request waits.
    tail : Chunk or None
        The tail, once its key was compared.
    wait : Wait or None
        None until it is known what is missing.
    retry_at : float
        No lookup is started before that.
    """

    __slots__ = (
        "_first",
        "_full",
        "_places",
        "arrived",
        "deadline",
        "handover",
        "outcome",
        "retry_at",
        "tail",
        "wait",
    )

    def __init__(self, handover: Handover, arrived: float, deadline: float) -> None:
        self.handover = handover
        self.arrived, self.deadline = arrived, deadline
        self.outcome: Outcome | None = None
        self.tail: Chunk | None = None
        self.wait: Wait | None = None
        self.retry_at = arrived
        #: Full chunks that the lookup has seen, and those among each number of leading pieces.
        self._first = 0
        self._full: Sequence[int] = (0,)
        #: Where the other pieces are in the order of the wait.
        self._places: Mapping[tuple[Kind, int], int] = {}

    @property
    def hit_tokens(self) -> int:
        """Leading tokens of the prompt of which all was seen; 0 unless the wait is complete."""
        handover = self.handover
        if self.outcome != "complete":
            return 0
        return handover.tokens if self.tail is not None else handover.tokens - handover.tail

    @property
    def full_chunks(self) -> int:
        """Leading chunks of the prompt whose full objects were seen, without the tail."""
        seen = 0 if self.wait is None else self.wait.seen
        return self._first + self._full[seen]

    def is_overdue(self, now: float) -> bool:
        """Whether the wait failed (late, or the producer gave up) and its deadline has passed."""
        return self.outcome in ("late", "gave_up") and now >= self.deadline

    def begin(self, wait: Wait, first: int, pieces: Sequence[Piece]) -> None:
        """Note that the request waits for `pieces`; the lookup has seen `first` full chunks."""
        self.wait, self._first = wait, first
        self._places = {
            (kind, chunk.index): n for n, (kind, chunk) in enumerate(pieces) if kind != FULL
        }
        full = (kind == FULL and not chunk.tail for kind, chunk in pieces)
        self._full = list(itertools.accumulate(full, initial=0))

    def drop(self) -> None:
        """Forget what was seen, and cancel the wait."""
        if self.wait is not None:
            self.wait.cancel()
        self.wait, self._first, self._full, self._places = None, 0, (0,), {}

    def has_seen(self, kind: Kind, index: int) -> bool:
        """Whether a kind of a chunk was seen since the lookup."""
        if kind == FULL:
            return index < self.full_chunks
        place = self._places.get((kind, index))
        return place is not None and self.wait is not None and place < self.wait.seen


class Awaiting:
    """All hand-overs of one engine.

    Parameters
    ----------
    config : Config
    groups : CacheGroups
    counters : Counters
    clock : Callable, optional
        Seconds.
    """

    def __init__(
        self,
        config: Config,
        groups: CacheGroups,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._groups = groups
        self._counters = counters
        self._log = RateLimitedLog(logger)
        self.clock = clock
        #: The requests that wait.
        self._waiting: dict[str, Awaited] = {}

    def arrive(self, request_id: str, params: object, *, reads: bool) -> Awaited | None:
        """Return the hand-over of a new request, for which it waits from now on.

        Parameters
        ----------
        request_id : str
        params : object
            ``Request.kv_transfer_params``.
        reads : bool
            Whether vLLM would use a hit of the request.
        """
        try:
            handover = read_handover(params)
            if handover is not None and not reads:
                raise ValueError("KV of this request cannot be loaded")
        except ValueError as error:
            self._refuse("invalid", str(error))
            return None
        if handover is None:
            return None
        now, longest = self.clock(), self._config.handover_wait_s
        if handover.wait_s is not None:
            longest = min(longest, handover.wait_s)
        if not longest:
            self._counters.add("handovers_late")
            return None
        if len(self._waiting) >= self._config.max_waiting:
            self._refuse("refused", f"max_waiting ({self._config.max_waiting}) requests wait")
            return None
        awaited = self._waiting[request_id] = Awaited(handover, now, now + longest)
        return awaited

    def _refuse(self, outcome: Outcome, reason: str) -> None:
        self._counters.add(f"handovers_{outcome}")
        self._log.warning("a request does not wait for its hand-over: %s", reason)

    def end(self, request_id: str, awaited: Awaited, outcome: Outcome, reason: str = "") -> None:
        """Note how a wait ended; what was seen stays known."""
        self._waiting.pop(request_id, None)
        awaited.outcome = outcome
        if awaited.wait is not None:
            awaited.wait.cancel()
        if outcome in ("complete", "gave_up", "late"):
            self._counters.add(f"handovers_{outcome}")
            self._counters.observe("handover_wait", max(0.0, self.clock() - awaited.arrived))
        elif reason:
            self._refuse(outcome, reason)
        else:
            self._counters.add(f"handovers_{outcome}")

    def forget(self, request_id: str) -> None:
        """Wait for nothing more of a request: it has ended, or vLLM computes it."""
        awaited = self._waiting.pop(request_id, None)
        if awaited is not None:
            awaited.outcome = "unneeded"
            awaited.drop()

    def scheduled(self, request_ids: Container[str]) -> None:
        """Forget the requests that a step computes."""
        for request_id in [one for one in self._waiting if one in request_ids]:
            self.forget(request_id)

    def longest_rest(self) -> float:
        """Return for how many seconds a step without other work may sleep."""
        first = min((one.deadline for one in self._waiting.values()), default=0.0)
        return min(_LONGEST_REST, first - self.clock())

    def missing(
        self, awaited: Awaited, request: Any, lookup: Lookup, *, tails: bool
    ) -> list[Piece]:
        """Return what a load needs and the lookup has not seen, in the order of the prompt.

        Parameters
        ----------
        awaited : Awaited
            Gets its tail.
        request : Request
        lookup : Lookup
            Done.
        tails : bool
            Whether the engine loads tails.

        Raises
        ------
        ValueError
            If the hand-over is not of this prompt.
        """
        handover, size, chain = awaited.handover, self._config.chunk_size, lookup.chain
        count, rest = divmod(handover.tokens, size)
        if chain is None:
            raise ValueError("the request has no chunk keys")
        most = request.num_prompt_tokens - (1 if self._groups.hybrid else 0)
        if handover.tokens > most or rest != handover.tail or count > len(chain.chunks):
            raise ValueError(
                f"{handover.tokens} tokens with a tail of {handover.tail}, of a prompt of"
                f" {request.num_prompt_tokens} with chunks of {size}"
            )
        tail = None
        if rest:
            tail = chain.tail_after(count, request._all_token_ids[count * size : handover.tokens])
        last = tail or chain.chunks[count - 1]
        if last.key != handover.key:
            raise ValueError(
                "the key is of another prompt; the producer and this engine must get the same"
                " tokens, cache_salt, LoRA adapter and images"
            )
        awaited.tail = tail if tails else None
        pieces: list[Piece] = []
        for kind in self._groups.kinds:
            if kind == FULL:
                indices = range(lookup.full_chunks, count)
            elif kind == WINDOW:
                indices = window_chunks(count, self._groups.window, size)
            else:
                indices = range(max(0, count - 1), count)
            known = lookup.known.get(kind, frozenset())
            pieces += [(kind, chain.chunks[n]) for n in indices if n not in known]
        pieces.sort(key=lambda piece: piece[1].index)
        return pieces if awaited.tail is None else [*pieces, (FULL, awaited.tail)]
