"""The shelf and the disk tier before it, by the names of objects.

Owns how an object comes from there into the server's memory and back: verified in both directions,
in the memory where it stays.

Contracts
---------
* The shelf decides what is stored; the disk tier gets copies of what the shelf has.
* A client knows one folder of its namespace. Objects are found in all of them.
* All methods block on storage, and may be called from any thread but the loop's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from kvshelf.backends import WriteResult
from kvshelf.backends.base import StatResults
from kvshelf.errors import BadObjectError, StorageError
from kvshelf.format.keys import Chunk
from kvshelf.memory.arena import copy_bytes
from kvshelf.metrics import Counters
from kvshelf.server.namespaces import NamedObject, Namespaces
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import Hold, ObjectRef
from kvshelf.tiers.disk_tier import DiskTier


class CopyingReader:
    """Reads an object from memory that another process may change: each byte once.

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
    namespaces : Namespaces
    counters : Counters
        Gets the times of probes; the shelf's own get those of reads and writes.

    Raises
    ------
    ConfigError
        If the two have files in common. May block on both.
    """

    def __init__(
        self,
        shelf: Shelf,
        disk_tier: DiskTier | None,
        namespaces: Namespaces,
        counters: Counters,
    ) -> None:
        self._shelf = shelf
        self._backend = shelf.backend
        self._tier = disk_tier
        self._namespaces = namespaces
        self._counters = counters
        if disk_tier is not None:
            disk_tier.attach(shelf.backend)

    def find(self, names: Sequence[str]) -> StatResults:
        """Probe objects of registered namespaces, in the tier and on the shelf."""
        answers: StatResults = [None] * len(names)
        unknown = [*range(len(names))]
        if self._tier is not None:
            for number, name in enumerate(names):
                named = self._namespaces.object(name)
                # The tier has low latency: many calls cost little more than one.
                if self._tier.holds(named.fmt, [named.ref])[0]:
                    answers[number] = named.size
            unknown = [number for number in unknown if answers[number] is None]
        if unknown:
            begin = time.perf_counter()
            on_shelf = self.stat([names[number] for number in unknown])
            self._counters.observe("probe", time.perf_counter() - begin)
            for number, answer in zip(unknown, on_shelf, strict=True):
                answers[number] = answer
        return answers

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe objects and markers on the shelf, in all folders of their namespaces."""
        answers = self._backend.stat(names)
        missing = [number for number, answer in enumerate(answers) if answer is None]
        for folder in {names[number].partition("/")[0] for number in missing}:
            fmt = self._namespaces.format_of(folder)
            folders: list[str] = []
            if fmt is not None:
                with contextlib.suppress(StorageError):
                    folders = [*self._shelf.view(fmt).folders_from(folder)][1:]
            for other_folder in folders:
                numbers = [
                    number
                    for number in missing
                    if answers[number] is None and names[number].startswith(f"{folder}/")
                ]
                again = [other_folder + names[number][len(folder) :] for number in numbers]
                for number, answer in zip(numbers, self._backend.stat(again), strict=True):
                    answers[number] = answer
        return answers

    def load(self, named: NamedObject, buffer: memoryview, hold: Hold) -> None:
        """Read and verify an object; set it aside if it is bad.

        Parameters
        ----------
        named : NamedObject
        buffer : memoryview
            Of the object's size.
        hold : Hold
            Of the memory of `buffer`, for the disk tier.

        Raises
        ------
        ObjectMissingError, BadObjectError, StorageError
            As :meth:`kvshelf.shelf.view.NamespaceView.load_named`.
        """
        fmt, parsed = named.fmt, named.parsed
        if self._tier is not None and self._tier.load_named(fmt, parsed, buffer) is not None:
            return
        view = self._shelf.view(fmt)
        try:
            chunk = view.load_named(parsed, buffer)
        except BadObjectError as bad:
            view.set_aside(named.ref, bad)
            raise
        if self._tier is not None:
            self._tier.keep(fmt, ObjectRef(chunk, parsed.shard), buffer, hold)

    def publish(
        self, named: NamedObject, chunk: Chunk, buffer: memoryview, is_suspect: bool, hold: Hold
    ) -> WriteResult:
        """Publish an object that was verified, beside the namespace's description.

        Parameters
        ----------
        named : NamedObject
        chunk : Chunk
            Its chunk, with the parent.
        buffer : memoryview
            The object.
        is_suspect : bool
            What is on the shelf may be bad.
        hold : Hold
            Of the memory of `buffer`, for the disk tier.

        Raises
        ------
        StorageError
            If the storage refused or failed.
        """
        ref = ObjectRef(chunk, named.parsed.shard)
        result = self._shelf.view(named.fmt).publish(ref, buffer, suspect=is_suspect)
        if self._tier is not None and not is_suspect:
            self._tier.keep(named.fmt, ref, buffer, hold)
        return result

    def mark(self, name: str) -> WriteResult:
        """Write the marker of a hand-over, an empty file, into a registered namespace."""
        folder = name.partition("/")[0]
        fmt = self._namespaces.format_of(folder)
        if fmt is not None:
            self._shelf.view(fmt).describe(folder)
        return self._backend.write(name, [])

    def delete(self, named: NamedObject) -> bool:
        """Delete an object, from all folders of its namespace and the tier.

        Raises
        ------
        StorageError
            If the shelf refused or failed.
        """
        was_there = self._shelf.view(named.fmt).delete(named.ref)
        if self._tier is not None:
            with contextlib.suppress(StorageError):
                self._tier.remove(named.fmt, [named.ref])
        return was_there
