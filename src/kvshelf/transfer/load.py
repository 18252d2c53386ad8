"""One load of a request: what it needs, how much of it has arrived, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvshelf.format.keys import Chunk
from kvshelf.transfer.context import ChunkSlots


class Failure(Enum):
    """Why an object could not be loaded."""

    MISSING = "missing"
    BAD = "bad"
    ERROR = "error"
    #: The circuit breaker is open, or the device cannot be used: no verdict on the object.
    UNAVAILABLE = "unavailable"


@dataclass(eq=False, slots=True)
class Load:
    """One load, and its outcome once ``finished``.

    Written to by :class:`~kvshelf.transfer.loads.Loads` alone, with its lock held.

    Attributes
    ----------
    request_id : str
    items : Sequence[ChunkSlots]
        In the order of the prompt.
    early : bool
        Its request does not wait for it yet.
    failed_at : int or None
        Index in `items` of the first chunk that is not in the cache.
    failures : list
        The chunks that failed, with the reason. Those given up after a failure before
        them are not listed.
    leading : int
        Number of leading items that are in the cache, however the load ended.
    cancelled, finished : bool
    """

    request_id: str
    items: Sequence[ChunkSlots]
    early: bool = False
    failed_at: int | None = None
    failures: list[tuple[Chunk, Failure]] = field(default_factory=list)
    leading: int = 0
    cancelled: bool = False
    finished: bool = False
    nbytes: int = 0
    deadline: float = 0.0
    #: Mark of the engine's work on the cache's device before the load.
    fence: object = None
    on_done: Callable[[Load], None] | None = None
    #: Threads that are copying into the cache at this moment.
    scattering: int = 0
    #: The item of each key.
    places: dict[bytes, int] = field(init=False)
    #: Objects of each item that are in the cache.
    _arrived: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.places = {item.chunk.key: place for place, item in enumerate(self.items)}
        self._arrived = [0] * len(self.items)

    @property
    def wanted(self) -> int:
        """Number of leading items that are still useful."""
        if self.cancelled:
            return 0
        return len(self.items) if self.failed_at is None else self.failed_at

    @property
    def lacks(self) -> bool:
        """Whether useful items have not arrived, and may yet."""
        return not self.finished and self.leading < self.wanted

    def arrive(self, item: int, objects: int, of: int) -> None:
        """Note that objects of an item, which has `of` of them, are in the cache."""
        self._arrived[item] += objects
        while self.leading < len(self.items) and self._arrived[self.leading] == of:
            self.leading += 1

    def fail(self, item: int, failure: Failure) -> None:
        """Note that an item will not arrive."""
        self.failures.append((self.items[item].chunk, failure))
        if self.failed_at is None or item < self.failed_at:
            self.failed_at = item
