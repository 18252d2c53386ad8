"""A storage in memory whose clock is that of the test: names, sizes and times, and no bytes.

What is read from it is zeros, but for small objects, whose bytes it keeps. For shelves of many
objects, and for many processes that share one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvshelf.backends.base import (
    BEYOND_NAMES,
    Backend,
    BytesLike,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResults,
    Touched,
    WriteMode,
    WriteResult,
)
from kvshelf.errors import NotRegularError, ObjectMissingError, StorageError

_SMALL_BYTES = 1 << 16


@dataclass(slots=True)
class Entry:
    """One object."""

    size: int
    mtime: float
    atime: float
    data: bytes | None = None


class _Reader(Reader):
    def __init__(self, entry: Entry) -> None:
        self.size = entry.size
        self._data = entry.data

    def read_into(self, buffer: memoryview, offset: int) -> int:
        count = max(0, min(len(buffer), self.size - offset))
        data = bytes(count) if self._data is None else self._data[offset : offset + count]
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing."""


class MemoryStorage(Backend):
    """Objects in memory.

    Parameters
    ----------
    **properties
        Fields of :class:`Properties`.

    Attributes
    ----------
    nbytes : int
        Of all objects.
    lists : int
        Requests for listings, of at most a thousand rows each.
    free : Callable or None
        Returns the space of the storage.
    fail : Callable
        Called with an operation and a name; what it returns is raised.
    """

    url = "memory://shelf"

    def __init__(self, **properties: Any) -> None:
        self._properties = Properties(filesystem="memory", **properties)
        self._tree: dict[str, dict[str, Entry | None]] = {"": {}}
        self.nbytes = 0
        self.lists = 0
        self.free: Callable[[], Space] | None = None
        self.fail: Callable[[str, str], StorageError | None] = lambda operation, name: None
        #: What the storage's clock is ahead.
        self.ahead = 0.0

    @property
    def properties(self) -> Properties:
        """Those of the test."""
        return self._properties

    def _meet(self, operation: str, name: str) -> None:
        if (error := self.fail(operation, name)) is not None:
            raise error

    def _now(self) -> float:
        return time.time() + self.ahead

    def entry(self, name: str) -> Entry | None:
        """Return an object."""
        folder, _, base = name.rpartition("/")
        return self._tree.get(folder, {}).get(base)

    def _make(self, folder: str) -> None:
        if folder not in self._tree:
            above, _, last = folder.rpartition("/")
            self._make(above)
            self._tree[above][last] = None
            self._tree[folder] = {}

    def put(self, name: str, size: int, data: bytes | None = None) -> None:
        """Write an object, and its folders."""
        folder, _, base = name.rpartition("/")
        self._make(folder)
        before = self._tree[folder].get(base)
        now = self._now()
        self._tree[folder][base] = Entry(size, now, now, data)
        self.nbytes += size - (before.size if before is not None else 0)

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe."""
        found = [self.entry(name) for name in names]
        return [None if entry is None else entry.size for entry in found]

    def info(self, name: str) -> ObjectInfo | None:
        """Look at an object; a folder has no times."""
        self._meet("info", name)
        entry = self.entry(name)
        if entry is None:
            return ObjectInfo(name, 0, self._now(), held=0) if name in self._tree else None
        return self._info(name, entry)

    def open(self, name: str) -> Reader:
        """Open an object."""
        entry = self.entry(name)
        if entry is None:
            raise ObjectMissingError(2, "no such object", name)
        return _Reader(entry)

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Write an object."""
        self._meet("write", name)
        there = self.entry(name) is not None
        if there and mode == "create":
            return WriteResult.EXISTED
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        data = b"".join(bytes(buffer) for buffer in buffers) if size <= _SMALL_BYTES else None
        self.put(name, size, data)
        return WriteResult.REPLACED if there else WriteResult.CREATED

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        start: str | None = None,
        end: str | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """List objects, folder by folder."""
        self._meet("list", prefix)
        rows = 0
        for name, entry in self._walk(prefix, hidden, start or "", end or BEYOND_NAMES, flat):
            if not rows % 1000:
                self.lists += 1
            rows += 1
            yield self._info(name, entry)
        self.lists += not rows

    def _walk(
        self,
        folder: str,
        hidden: bool,
        start: str = "",
        end: str = BEYOND_NAMES,
        flat: bool = False,
    ) -> Iterator[tuple[str, Entry]]:
        inner = []
        for base, entry in sorted(self._tree.get(folder, {}).items()):
            if (base[0] == "." and not hidden) or not start <= base <= end:
                continue
            name = f"{folder}/{base}" if folder else base
            if entry is None:
                inner.append(name)
            else:
                yield name, entry
        for name in () if flat else inner:
            self._meet("list", name)
            yield from self._walk(name, hidden)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the folders in a folder."""
        self._meet("folders", prefix)
        self.lists += 1
        found = self._tree.get(prefix, {}).items()
        return sorted(base for base, entry in found if entry is None and base[0] != ".")

    def delete(self, names: Sequence[str]) -> list[bool | StorageError]:
        """Remove objects and empty folders."""
        return [self._delete(name) for name in names]

    def _delete(self, name: str) -> bool | StorageError:
        if (error := self.fail("delete", name)) is not None:
            return error
        folder, _, base = name.rpartition("/")
        if self._tree.get(name):
            return NotRegularError(21, "a folder with objects", name)
        entries = self._tree.get(folder, {})
        if base not in entries:
            return False
        entry = entries.pop(base)
        self._tree.pop(name, None)
        # What deletes many at once has objects and no folders.
        while self._properties.deletes_at_once > 1 and folder and not self._tree[folder]:
            del self._tree[folder]
            folder, _, base = folder.rpartition("/")
            del self._tree[folder][base]
        self.nbytes -= 0 if entry is None else entry.size
        return True

    def _info(self, name: str, entry: Entry) -> ObjectInfo:
        # A storage on which uses are recorded by writing anew has no access times.
        atime = None if self._properties.renews else entry.atime
        return ObjectInfo(name, entry.size, entry.mtime, atime, held=entry.size)

    def touch(self, name: str, before: float = float("inf")) -> Touched:
        """Set an access time, or write anew."""
        entry = self.entry(name)
        if entry is not None and self._properties.renews:
            if entry.mtime < before:
                entry.mtime = self._now()
        elif entry is not None:
            entry.atime = self._now()
        return Touched.TOUCHED

    def space(self) -> Space | None:
        """Return the space that the test says."""
        return None if self.free is None else self.free()

    def state(self, **properties: Any) -> None:
        """State other properties."""
        self._properties = replace(self._properties, **properties)
