"""One load of a request and its pieces: what they need, how much has arrived, how they ended.

Passive: :mod:`kvshelf.transfer.loads` and :mod:`kvshelf.transfer.transfers` write to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import DRAFT, Kind
from kvshelf.memory.ring import Slot
from kvshelf.shelf.view import Pinned, ShelfView
from kvshelf.transfer.context import ChunkSlots


class Failure(Enum):
    """Why an object could not be loaded."""

    MISSING = "missing"
    BAD = "bad"
    ERROR = "error"
    #: The circuit breaker is open, or the device cannot be used: no verdict on the object.
    UNAVAILABLE = "unavailable"
    #: Computing the rest is sooner: no verdict on the object.
    CUT = "cut"


@dataclass(eq=False, slots=True)
class LoadPiece:
    """The chunks of one kind that a load brings, and their outcome once ``finished``.

    Its maker says what to load. Afterwards :class:`~kvshelf.transfer.loads.Loads` alone writes to
    it, with its lock held.

    Parameters
    ----------
    view : ShelfView
        The objects of the kind, in the namespace of the chunks.
    items : Sequence[ChunkSlots]
        In the order of the prompt.
    early : bool
        Read the chunks into memory, and copy them nowhere: no request waits for them yet, so other
        loads come first.
    keeps : bool
        An early one pins what has come, until :meth:`~kvshelf.transfer.loads.Loads.release`.
    cuts : Sequence of float
        Times of :func:`time.monotonic`, for each number of leading items: with no more of them by
        then, computing the rest is sooner. Empty: the load is never cut.
    at_once : int
        Only so many items behind the leading ones are read; 0: no bound.
    on_done : Callable
        Called once when the load is finished, perhaps before :meth:`~Loads.load` returns, on the
        thread that ended it and with a lock held: it must not block, and must not call the loads.

    Attributes
    ----------
    names : Sequence of Hashable
        Of the items, in memory.
    failed_at : int or None
        Index in `items` of the first chunk that is not in the cache.
    failures : list
        The chunks that failed, with the reason. Those given up after a failure before
        them are not listed.
    leading : int
        Number of leading items that are in the cache, however it ended.
    wanted : int
        Number of leading items that are still useful.
    nbytes : int
        Bytes of all objects.
    deadline : float
        In seconds of :func:`time.monotonic`.
    threads : int
        So many items are read at once where there is no bound.
    started : float or None
        When a thread began its first chunk, in seconds of :func:`time.monotonic`.
    kept : dict
        The slots that it pins, by item.
    fresh : set of int
        Those of them that were read for it.
    lent : dict
        Objects that lie in memory of another owner, of items that no thread has begun.
    asked : int
        The first item whose objects the owner of such memory was not asked for.
    """

    view: ShelfView
    items: Sequence[ChunkSlots]
    early: bool = False
    keeps: bool = False
    cuts: Sequence[float] = ()
    at_once: int = 0
    on_done: Callable[[LoadPiece], None] = lambda piece: None
    names: Sequence[Hashable] = ()
    failed_at: int | None = None
    failures: list[tuple[Chunk, Failure]] = field(default_factory=list)
    leading: int = 0
    wanted: int = field(init=False)
    cancelled: bool = False
    finished: bool = False
    nbytes: int = 0
    deadline: float = math.inf
    threads: int = 1
    started: float | None = None
    #: Mark of the work on the cache's device behind which the load may write to its slots; None:
    #: behind all of it that is there when the load begins.
    fence: object = None
    #: Threads that are copying into the cache at this moment.
    scattering: int = 0
    kept: dict[int, Slot] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    lent: dict[int, Mapping[int, Pinned]] = field(default_factory=dict)
    asked: int = 0
    #: The first item that no thread has begun.
    next_item: int = 0
    #: A flag for each item that a thread has begun, and for each that is in the cache.
    _begun: bytearray = field(init=False)
    _arrived: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.wanted = len(self.items) if self.failed_at is None else self.failed_at
        self._begun = bytearray(len(self.items))
        self._arrived = bytearray(len(self.items))

    @property
    def first_failed(self) -> Chunk | None:
        """The first chunk that is not in the cache, if it failed."""
        return None if self.failed_at is None else self.items[self.failed_at].chunk

    def is_slow(self, now: float) -> bool:
        """Whether computing what has not arrived is sooner."""
        return self.lacks and self.leading < len(self.cuts) and now > self.cuts[self.leading]

    @property
    def lacks(self) -> bool:
        """Whether useful items have not arrived, and may yet."""
        return not self.finished and self.leading < self.wanted

    def wants(self, item: int) -> bool:
        """Whether an item is still useful."""
        return not self.finished and item < self.wanted

    @property
    def may_begin(self) -> bool:
        """Whether the next item may be begun now."""
        end = self.leading + self.at_once if self.at_once else self.wanted
        return self.next_item < min(end, self.wanted)

    def begin(self, item: int) -> None:
        """Note that a thread has begun an item."""
        if self.started is None:
            self.started = time.monotonic()
        self._begun[item] = 1
        unbegun = self._begun.find(0, self.next_item)
        self.next_item = len(self.items) if unbegun < 0 else unbegun

    def arrive(self, item: int) -> None:
        """Note that an item is in the cache."""
        self._arrived[item] = 1
        lacking = self._arrived.find(0, self.leading)
        self.leading = len(self.items) if lacking < 0 else lacking

    def fail(self, item: int, failure: Failure) -> None:
        """Note that an item will not arrive."""
        self.failures.append((self.items[item].chunk, failure))
        if self.failed_at is None or item < self.failed_at:
            self.failed_at = item
            self.wanted = min(self.wanted, item)

    def cancel(self) -> None:
        """Note that no item is useful any more."""
        self.cancelled = True
        self.wanted = 0


@dataclass(eq=False, slots=True)
class Load:
    """What one request loads, a piece for each kind of KV, and the outcome once ``finished``.

    Written to by :class:`~kvshelf.transfer.transfers.Transfers` alone.

    Attributes
    ----------
    request_id : str
    pieces : Mapping[Kind, LoadPiece]
        All of them once the load has begun.
    cancelled : bool
        The caller gave it up. Its pieces may be cancelled without that, see `failed`.
    finished : bool
        All pieces are finished.
    begun, seconds : float
        When it began, in seconds of :func:`time.monotonic`, and how long it took.
    """

    request_id: str
    #: Number of pieces that are not finished.
    unfinished: int
    begun: float = 0.0
    seconds: float = 0.0
    pieces: dict[Kind, LoadPiece] = field(default_factory=dict)
    cancelled: bool = False
    finished: bool = False
    #: The other pieces were cancelled after one had failed.
    stopped: bool = False

    @property
    def needed(self) -> dict[Kind, LoadPiece]:
        """The pieces without which the load fails: all but a drafter's."""
        # A copy: another thread may still be starting pieces.
        return {kind: piece for kind, piece in tuple(self.pieces.items()) if kind != DRAFT}

    @property
    def failed(self) -> bool:
        """Whether a piece that is needed failed. The other pieces are then cancelled."""
        return any(piece.failed_at is not None for piece in self.needed.values())

    @property
    def seconds_of_all(self) -> float | None:
        """Seconds that all of it takes, as far as that is known; more where it was cut early.

        None where it failed or was cancelled, or was cut before anything was read for it: that says
        nothing of the time that a load takes.
        """
        pieces = list(self.needed.values())
        failures = {failure for _, _, failure in self.failures}
        if self.cancelled or failures - {Failure.CUT}:
            return None
        if not failures:
            return self.seconds
        begins = [piece.started for piece in pieces if piece.started is not None]
        if not begins:
            return None
        items = sum(len(piece.items) for piece in pieces)
        # Of those that are read at once about half has arrived; of the first ones, maybe all.
        reads = [
            min(piece.at_once or piece.threads, len(piece.items) - piece.leading)
            for piece in pieces
        ]
        arrived = sum(
            piece.leading + read / (1 + bool(piece.leading))
            for piece, read in zip(pieces, reads, strict=True)
        )
        waited = max(0.0, min(begins) - self.begun)
        return waited + (self.seconds - waited) * items / arrived

    @property
    def failures(self) -> list[tuple[Kind, Chunk, Failure]]:
        """What failed of the needed pieces, with the reason; see :attr:`LoadPiece.failures`."""
        return [
            (kind, chunk, failure)
            for kind, piece in self.needed.items()
            for chunk, failure in piece.failures
        ]
