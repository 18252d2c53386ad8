"""What lies in memory of this process, as a tier: for lookups, and to remove it.

Loads look into the memory by themselves (:mod:`kvshelf.transfer.loads`), so nothing is read from
this tier or copied into it. Any thread may call all methods; none blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvshelf.backends import BytesLike
from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.chunk_memory import ChunkPlaces
from kvshelf.shelf.view import Hold, ObjectRef


class MemoryTier:
    """The chunks of one kind that lie in memory.

    Parameters
    ----------
    places : ChunkPlaces
    """

    def __init__(self, places: ChunkPlaces) -> None:
        self._ring = places.memory.ring
        self._name = places.name

    @property
    def available(self) -> bool:
        """Whether anything is here."""
        return self._ring.has_content

    def holds(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> list[bool]:
        """Return which of these objects are here."""
        return self._ring.holds([self._name(ref.chunk) for ref in refs])

    def load(self, fmt: ObjectFormat, ref: ObjectRef, buffer: memoryview) -> bool:
        """Return False: loads ask the memory before they ask a tier."""
        return False

    def keep(self, fmt: ObjectFormat, ref: ObjectRef, buffer: BytesLike, hold: Hold) -> None:
        """Do nothing: what is read or stored lies in the memory already."""

    def remove(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> int:
        """Remove chunks; return of how many objects there were any. What is pinned goes later."""
        names = {self._name(ref.chunk) for ref in refs}
        forgotten = {name for name in names if self._ring.forget(name)}
        return sum(self._name(ref.chunk) in forgotten for ref in refs)

    def attach(self, guard: GuardedBackend) -> None:
        """Do nothing: no thread is ever stuck in memory."""

    def close(self) -> None:
        """Do nothing: the owner of the memory closes it."""
