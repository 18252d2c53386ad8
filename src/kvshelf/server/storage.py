"""The shelf and the disk tier before it, by the names of objects.

Owns how an object comes from there into memory and back: verified in both directions, in the
memory where it stays.

Contracts
---------
* The shelf decides what is stored; the disk tier gets copies of what the shelf has.
* All methods block on storage, and may be called from any thread but the loop's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from kvshelf.backends import WriteResult
from kvshelf.backends.base import StatResults, WriteMode, probe
from kvshelf.buffers import BufferPool
from kvshelf.errors import StorageError
from kvshelf.format.keys import Chunk
from kvshelf.memory.arena import copy_bytes
from kvshelf.metrics import Counters
from kvshelf.server.namespaces import NamedObject
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.disk_tier import DiskTier

#: Most memory for objects that wait to be written to the disk tier.
_COPIES_BYTES: Final = 256 << 20


class Copied:
    """Reads an object from memory that another process may change.

    Parameters
    ----------
    source : memoryview
    """

    def __init__(self, source: memoryview) -> None:
        self.size = source.nbytes
        self._source = source

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Copy bytes from `offset`; return how many."""
        count = min(buffer.nbytes, max(0, self.size - offset))
        if count:
            copy_bytes(buffer[:count], self._source[offset : offset + count])
        return count


class Storage:
    """A shelf, and its disk tier if it has one.

    Parameters
    ----------
    shelf : Shelf
    disk_tier : DiskTier or None
    counters : Counters
        Gets the times of `probe` and `publish`; the shelf's own get those of reads.

    Raises
    ------
    ConfigError
        If the two have files in common. May block on both.
    """

    def __init__(self, shelf: Shelf, disk_tier: DiskTier | None, counters: Counters) -> None:
        self._shelf = shelf
        self._counters = counters
        self._backend = shelf.backend
        self._tier = disk_tier
        self._copies = BufferPool(_COPIES_BYTES)
        if disk_tier is not None:
            disk_tier.attach(shelf.backend)

    @property
    def has_tier(self) -> bool:
        """Whether there is a disk tier."""
        return self._tier is not None

    def find(self, names: Sequence[str], objects: Sequence[NamedObject | None]) -> StatResults:
        """Probe objects, in the tier and on the shelf.

        Parameters
        ----------
        names : Sequence of str
        objects : Sequence of NamedObject or None
            The same objects, for the tier; None: it is not asked.
        """
        answers: StatResults = [None] * len(names)
        asked = list(range(len(names)))
        if self._tier is not None:
            for number, found in enumerate(objects):
                # The tier has low latency: many calls cost little more than one.
                if found is not None and self._tier.holds(found.fmt, [_ref(found)])[0]:
                    answers[number] = found.fmt.object_size(found.parsed.shard, found.chunk.tokens)
            asked = [number for number in asked if answers[number] is None]
        if asked:
            begin = time.perf_counter()
            found_sizes = self._backend.stat([names[number] for number in asked])
            self._counters.observe("probe", time.perf_counter() - begin)
            for number, answer in zip(asked, found_sizes, strict=True):
                answers[number] = answer
        return answers

    def load(self, found: NamedObject, buffer: memoryview) -> Chunk:
        """Read and verify an object.

        Raises
        ------
        ObjectMissingError, BadObjectError, StorageError
            As :meth:`kvshelf.shelf.view.NamespaceView.load_named`.
        """
        fmt, parsed = found.fmt, found.parsed
        if self._tier is not None:
            chunk = self._tier.load_named(fmt, parsed, buffer)
            if chunk is not None:
                return chunk
        chunk = self._shelf.view(fmt).load_named(parsed, buffer)
        if self._tier is not None:
            self._keep(self._tier, found, chunk, buffer)
        return chunk

    def publish(
        self, found: NamedObject, source: memoryview, buffer: memoryview, mode: WriteMode
    ) -> tuple[WriteResult, Chunk, bool]:
        """Copy an object, verify the copy, and publish that, beside the namespace's description.

        Parameters
        ----------
        found : NamedObject
        source : memoryview
            The object, where a client may change it.
        buffer : memoryview
            Where the copy comes to lie.
        mode : str
            As for :meth:`kvshelf.backends.base.Backend.write`.

        Returns
        -------
        result : WriteResult
        chunk : Chunk
            With its parent.
        kept : bool
            Whether the shelf has this object now: what stood there may be something else.

        Raises
        ------
        BadObjectError
            If the copy is not the object that its name says.
        StorageError
            If the storage refused or failed.
        """
        fmt, parsed = found.fmt, found.parsed
        chunk = fmt.read_named(Copied(source), parsed, buffer)
        begin = time.perf_counter()
        self._shelf.view(fmt).describe(found.name.partition("/")[0])
        result = self._backend.write(found.name, [buffer], mode)
        self._counters.observe("publish", time.perf_counter() - begin)
        kept = (
            result is not WriteResult.EXISTED or probe(self._backend, found.name) == buffer.nbytes
        )
        if kept and self._tier is not None:
            self._keep(self._tier, found, chunk, buffer)
        return result, chunk, kept

    def _keep(self, tier: DiskTier, found: NamedObject, chunk: Chunk, buffer: memoryview) -> None:
        """Copy an object for the tier: its memory may be another object's before it is written."""
        ref = ObjectRef(chunk, found.parsed.shard)
        takes = tier.available and not tier.is_queued(found.fmt, ref)
        copy = self._copies.allocate(buffer.nbytes) if takes else None
        if copy is None:
            tier.keep(found.fmt, ref, buffer, lambda: None)
            return
        with copy:
            copy_bytes(copy.view, buffer)
            tier.keep(found.fmt, ref, copy.view, lambda: copy.share().release)

    def forget(self, found: NamedObject) -> None:
        """Remove an object from the tier. Best effort."""
        if self._tier is not None:
            with contextlib.suppress(StorageError):
                self._tier.remove(found.fmt, [_ref(found)])


def _ref(found: NamedObject) -> ObjectRef:
    return ObjectRef(found.chunk, found.parsed.shard)
