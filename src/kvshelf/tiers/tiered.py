"""Joins tiers and a shelf. A tier is a faster copy in front of a shelf.

Owns the shape of a tier (:class:`Tier`), and the shelf that looks into tiers first
(:class:`TieredShelf`). The disk tier is :mod:`kvshelf.tiers.disk_tier`, the memory tier
:mod:`kvshelf.tiers.memory_tier`.

Contracts
---------
* The shelf decides what is stored: stores ask the shelf alone, and an object that it did not take
  does not get into a tier. Loads and lookups ask the tiers first, and ask the shelf only for the
  objects that are in no tier. So an object that was deleted from the shelf is found until it is
  gone from the tiers as well.
* All methods may be called from any thread but an engine's step thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from kvshelf.backends import BytesLike, WriteResult
from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import (
    FailedRead,
    Hold,
    NamespaceView,
    ObjectRef,
    Pinned,
    Presence,
    ShelfView,
)


class Tier(Protocol):
    """A store in front of a shelf that has copies of some of its objects."""

    @property
    def available(self) -> bool:
        """Whether anything can be loaded from it."""

    def holds(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> list[bool]:
        """Return which of these objects are here."""

    def load(self, fmt: ObjectFormat, ref: ObjectRef, buffer: memoryview) -> bool:
        """Fill `buffer`, or at least its payload; False when the object is not here or is bad."""

    def keep(self, fmt: ObjectFormat, ref: ObjectRef, buffer: BytesLike, hold: Hold) -> None:
        """Take a copy of an object that is on the shelf, if its memory is held. Never waits."""

    def remove(self, fmt: ObjectFormat, refs: Sequence[ObjectRef]) -> int:
        """Remove copies; return of how many objects there were any. Raises StorageError."""

    def attach(self, guard: GuardedBackend) -> None:
        """Report to the watchers of `guard` which of their threads are stuck in the tier."""

    def close(self) -> None:
        """Release what it holds. Idempotent."""


class TieredView(ShelfView):
    """A view of a shelf with tiers in front of it; has no state of its own.

    Parameters
    ----------
    shelf : ShelfView
    tiers : Sequence of Tier
        The nearest first.
    ask_shelf : bool
        False: :meth:`find` finds only the objects in the tiers.
    """

    def __init__(self, shelf: ShelfView, tiers: Sequence[Tier], *, ask_shelf: bool = True) -> None:
        super().__init__(shelf.backend, shelf.fmt)
        self._shelf = shelf
        self._tiers = tiers
        self._ask_shelf = ask_shelf

    @property
    def available(self) -> bool:
        """Whether anything can be loaded from a tier or from the shelf."""
        return any(tier.available for tier in self._tiers) or self._shelf.available

    def probe(self, refs: Sequence[ObjectRef]) -> list[Presence]:
        """Probe the shelf alone: a store must know whether an object is there."""
        return self._shelf.probe(refs)

    def nearby(self, refs: Sequence[ObjectRef]) -> list[Presence | None]:
        """Probe the tiers alone, see :meth:`ShelfView.nearby`."""
        unknown = None if self._ask_shelf else Presence.MISSING
        answers: list[Presence | None] = [unknown] * len(refs)
        missing: Sequence[int] = range(len(refs))
        for tier in self._tiers:
            in_tier = tier.holds(self.fmt, [refs[i] for i in missing]) if missing else []
            present = {i for i, here in zip(missing, in_tier, strict=True) if here}
            for i in present:
                answers[i] = Presence.PRESENT
            missing = [i for i in missing if i not in present]
        if missing and self._ask_shelf:
            further = self._shelf.nearby([refs[i] for i in missing])
            for i, answer in zip(missing, further, strict=True):
                answers[i] = answer
        return answers

    @property
    def on_storage(self) -> NamespaceView:
        """The view of the storage behind all tiers."""
        return self._shelf.on_storage

    def load_all(
        self,
        chunk: Chunk,
        shards: Sequence[int],
        buffers: Sequence[memoryview],
        hold: Hold | None = None,
    ) -> FailedRead | None:
        """Read and verify objects, each from the first tier that has it, else from the shelf.

        If they can be held, they are copied to the tiers in front of it.
        """
        unread: dict[int, memoryview] = {}
        for shard, buffer in zip(shards, buffers, strict=True):
            ref = ObjectRef(chunk, shard)
            for index, tier in enumerate(self._tiers):
                if tier.load(self.fmt, ref, buffer):
                    self._keep(ref, buffer, hold, self._tiers[:index])
                    break
            else:
                unread[shard] = buffer
        if not unread:
            return None
        failed = self._shelf.load_all(chunk, tuple(unread), tuple(unread.values()))
        if failed is None:
            for shard, buffer in unread.items():
                self._keep(ObjectRef(chunk, shard), buffer, hold, self._tiers)
        return failed

    def _keep(
        self, ref: ObjectRef, buffer: BytesLike, hold: Hold | None, tiers: Sequence[Tier]
    ) -> None:
        if hold is not None:
            for tier in tiers:
                tier.keep(self.fmt, ref, buffer, hold)

    @property
    def pins(self) -> bool:
        """Whether objects may lie in memory of the shelf."""
        return self._shelf.pins

    def pin_all(
        self, chunks: Sequence[Chunk], shards: Sequence[int], *, is_early: bool = False
    ) -> Sequence[Mapping[int, Pinned]]:
        """Pin objects in the memory of the shelf, unless a tier has objects of the first chunk.

        What lies there is not copied into the tiers.
        """
        refs = [ObjectRef(chunks[0], shard) for shard in shards]
        if any(any(tier.holds(self.fmt, refs)) for tier in self._tiers):
            return [{} for _ in chunks]
        return self._shelf.pin_all(chunks, shards, is_early=is_early)

    def publish(
        self, ref: ObjectRef, buffer: BytesLike, *, suspect: bool = False, hold: Hold | None = None
    ) -> WriteResult:
        """Publish to the shelf, then copy to the tiers if the object can be held.

        A suspect object is repaired on the shelf alone: a copy in a tier is verified when read.
        """
        result = self._shelf.publish(ref, buffer, suspect=suspect)
        if not suspect:
            self._keep(ref, buffer, hold, self._tiers)
        return result


class TieredShelf:
    """A shelf with tiers in front of it; closes them all.

    Parameters
    ----------
    shelf : Shelf
    tiers : Sequence of Tier
        The nearest first. None has files in common with the shelf, see
        :meth:`DiskTier.check_disjoint`.
    """

    def __init__(self, shelf: Shelf, tiers: Sequence[Tier]) -> None:
        self._shelf = shelf
        self._tiers = tiers
        for tier in tiers:
            tier.attach(shelf.backend)

    @property
    def backend(self) -> GuardedBackend:
        """The storage of the shelf."""
        return self._shelf.backend

    @property
    def available(self) -> bool:
        """Whether anything can be loaded from a tier or from the shelf."""
        return any(tier.available for tier in self._tiers) or self._shelf.available

    @property
    def memory_bytes(self) -> int:
        """See :attr:`Shelf.memory_bytes`."""
        return self._shelf.memory_bytes

    def view(self, fmt: ObjectFormat, *, ask_shelf: bool = True) -> TieredView:
        """Return the objects of one kind, see :class:`TieredView`. Does not block."""
        return TieredView(self._shelf.view(fmt), self._tiers, ask_shelf=ask_shelf)

    def close(self) -> None:
        """Close the tiers and the shelf. Idempotent."""
        for tier in self._tiers:
            tier.close()
        self._shelf.close()


#: A shelf with or without tiers.
AnyShelf: TypeAlias = Shelf | TieredShelf
