"""The hand-over that one request brought, and what was seen of it.

Owns which of the promised objects have appeared since the request's lookup, and how its wait ended.
:mod:`kvshelf.vllm.scheduler.handovers` decides that. Runs on the engine's step thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, Kind
from kvshelf.shelf.waits import Piece, Wait
from kvshelf.vllm.handover import Handover

Outcome: TypeAlias = Literal[
    "complete", "gave_up", "late", "other_namespace", "invalid", "refused", "unneeded"
]


@dataclass(slots=True, eq=False)
class Awaited:
    """The hand-over that one request brought.

    Attributes
    ----------
    handover : Handover
    arrived, deadline : float
        By the clock of :class:`~kvshelf.vllm.scheduler.handovers.Handovers`.
    outcome : Outcome or None
        How the wait ended; None while the request waits.
    tail : Chunk or None
        The tail, once its key was compared.
    wait : Wait or None
        None until it is known what is missing.
    retry_at : float
        No lookup is started before that.
    """

    handover: Handover
    arrived: float
    deadline: float
    outcome: Outcome | None = None
    tail: Chunk | None = None
    wait: Wait | None = None
    retry_at: float = -math.inf
    #: Full chunks that the lookup has seen, and those among each number of leading pieces.
    _first: int = 0
    _full: Sequence[int] = (0,)
    #: Where the other pieces are in the order of the wait.
    _places: Mapping[tuple[Kind, int], int] = field(default_factory=dict)

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
        """Whether a window or a state was seen since the lookup."""
        place = self._places.get((kind, index))
        return place is not None and self.wait is not None and place < self.wait.seen
