"""The backend interface: what kvshelf asks of one kind of storage.

A backend maps *names* (relative POSIX paths such as ``a/b/c.safetensors``) to byte
objects. It knows nothing of chunks, tensors or vLLM. Wrappers (read-only, retry,
fault injection, …) are backends themselves, see :mod:`kvshelf.backends.wrappers`.

Contracts
---------
* Every method may block on storage; none is called on an engine's step thread.
* All methods may be called from several threads at once.
* Each backend decides in one place which of its native errors mean missing,
  retryable, permanent; callers see only the classes of :mod:`kvshelf.errors`.
* Names are checked (:func:`check_name`): no name can reach outside the root.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Final, Literal, TypeAlias

from kvshelf.errors import ObjectNameError, StorageError

Buffer: TypeAlias = "bytes | bytearray | memoryview"
WriteMode: TypeAlias = Literal["create", "replace"]


#: Seconds below which a probe is cheap: thousands of them take less than a search with few.
CHEAP_PROBE: Final = 75e-6


class NotRegular(Enum):
    """Type of :data:`NOT_REGULAR`."""

    NOT_REGULAR = "not a regular file"


NOT_REGULAR: Final = NotRegular.NOT_REGULAR

#: Answer of a probe for one name: size in bytes, ``None`` when missing,
#: ``NOT_REGULAR``, or the error that kept the backend from telling.
StatResult: TypeAlias = "int | None | NotRegular | StorageError"

StatResults: TypeAlias = "list[StatResult]"  # inside the classes `list` is a method


class WriteResult(Enum):
    """What a write did. Losing a race is a result, not an error."""

    CREATED = "created"
    EXISTED = "existed"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a call may take before it counts as late, see :mod:`kvshelf.backends.guard`.

    Attributes
    ----------
    probe : float
        Seconds for one call of ``stat`` or ``info``.
    read, write : float
        Seconds to read or write one object, beyond what its bytes take. `read` is also for
        listings, `write` also for deleting and moving.
    bytes_per_second : float
        The speed at which bytes are allowed for.
    """

    probe: float = 1.0
    read: float = 5.0
    write: float = 5.0
    bytes_per_second: float = 50e6

    def to_read(self, nbytes: int) -> float:
        """Seconds for reading `nbytes`."""
        return self.read + nbytes / self.bytes_per_second

    def to_write(self, nbytes: int) -> float:
        """Seconds for writing `nbytes`."""
        return self.write + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Properties:
    """What callers may rely on for one backend.

    Attributes
    ----------
    filesystem : str
        Short name for people: ``ext4``, ``nfs``, ``fuse``, ``memory``, ``s3`` …
    atomic_publish : bool
        Readers see either no object or the whole object.
    conditional_create : bool
        Of several writers in mode ``create`` exactly one is told CREATED.
    notifications : bool
        Change notifications (inotify) see the writes of every client.
    cache_seconds : float
        How long the storage's own caches may show an outdated answer.
    links : bool
        Objects are published by hard links, as far as is known.
    concurrency : int
        Number of calls at once that still helps.
    probes_at_once : int
        Names of one call of ``stat`` that take little longer than one.
    part_bytes : int
        Objects at least as large may come faster by :meth:`Backend.open_large`; 0: none do.
    probe_cost : float
        Seconds for one probe, typical or as measured; below :data:`CHEAP_PROBE` it is cheap.
    read_only : bool
        Writes are known to be refused.
    sets_aside : bool
        :meth:`Backend.set_aside` moves a thing as it is; False: it deletes.
    temporaries : bool
        A writer that is killed may leave a temporary behind, for :meth:`Backend.sweep`.
    deadlines : Deadlines
        How long calls take at most where this storage is well.
    available : bool
        False: the storage is given a rest, and calls fail at once without being tried.
    """

    filesystem: str
    atomic_publish: bool = True
    conditional_create: bool = True
    notifications: bool = False
    cache_seconds: float = 0.0
    links: bool = False
    concurrency: int = 8
    probes_at_once: int = 1
    part_bytes: int = 0
    probe_cost: float = 10e-6
    read_only: bool = False
    sets_aside: bool = False
    temporaries: bool = False
    deadlines: Deadlines = Deadlines()
    available: bool = True


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One row of a listing: name, size in bytes, times in seconds since the epoch."""

    name: str
    size: int
    mtime: float
    atime: float | None = None


class Reader(ABC):
    """One opened object; all reads see the same version where the storage can tell."""

    #: Size in bytes at the time of opening.
    size: int

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` with the bytes from `offset`; return how many were read.

        Returns fewer bytes than ``len(buffer)`` only at the object's end.

        Raises
        ------
        StorageError
            If the storage failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the reader holds. Idempotent."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Backend(ABC):
    """One kind of storage, rooted at one place."""

    #: The root, for people: a path or URL without secrets.
    url: str

    @property
    @abstractmethod
    def properties(self) -> Properties:
        """What callers may rely on now. Never blocks."""

    @abstractmethod
    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names at once; one answer for each, never raising for one of them.

        Cheapest where names of one folder stand next to each other.

        Raises
        ------
        ObjectNameError
            If a name is not a safe one: the caller's mistake, not the storage's answer.
        """

    @abstractmethod
    def info(self, name: str) -> ObjectInfo | None:
        """Size and times of one object or of what stands in its place; None when missing.

        Raises
        ------
        StorageError
            If the storage failed.
        """

    @abstractmethod
    def open(self, name: str) -> Reader:
        """Open one object for reading, never following links, never blocking on a FIFO.

        Raises
        ------
        ObjectMissingError
            If there is no such object.
        NotRegularError
            If something that is not a regular file has this name.
        StorageError
            If the storage failed.
        """

    def open_large(self, name: str, size: int) -> Reader:
        """Open an object that should have `size` bytes, perhaps to fetch parts of it at once.

        Like :meth:`open`. Where parts bring nothing it does just that.
        """
        return self.open(name)

    @abstractmethod
    def write(
        self, name: str, buffers: Sequence[Buffer], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish the concatenated `buffers` as one object.

        ``create`` leaves an existing object alone and answers EXISTED, also when what
        exists is not a regular file. ``replace`` puts the new bytes in the place of a
        file or link and answers REPLACED, or CREATED when nothing was there. Nobody ever
        sees a part of an object where :attr:`Properties.atomic_publish` holds.

        Raises
        ------
        NotRegularError
            If mode is ``replace`` and a folder has this name.
        ReadOnlyStorageError
            If the storage does not take writes.
        NoSpaceStorageError
            If it has no room.
        StorageError
            If it failed in another way.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream all objects below the folder `prefix`, in no particular order.

        `prefix` is "" or a folder name without trailing slash. Links, special files,
        temporaries and everything else below `prefix` with a leading dot in a part of its
        name (reserved folders) are skipped. Objects that come or go meanwhile may be
        missed; a missing folder is empty.

        Raises
        ------
        StorageError
            If the storage failed.
        """

    @abstractmethod
    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`, without it, sorted; no dot folders.

        Raises
        ------
        StorageError
            If the storage failed.
        """

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Remove one object (never what a link points to); False when it was not there.

        Raises
        ------
        NotRegularError
            If a folder has this name.
        StorageError
            If the storage failed.
        """

    @abstractmethod
    def set_aside(self, name: str, target: str) -> bool:
        """Move whatever stands at `name` (file, link, FIFO, folder) to `target`.

        The thing is renamed as it is: never followed, opened or recursed into. Where
        :attr:`Properties.sets_aside` is False the object is deleted. False when nothing
        was there.

        Raises
        ------
        StorageError
            If the storage failed.
        """

    def trim(self, folder: str, max_count: int, max_bytes: int) -> None:
        """Remove the first entries of `folder`, by name, until it is within both bounds.

        For folders that :meth:`set_aside` fills with names that begin with a time.
        Nothing is followed or recursed into: a folder that is not empty stays. Best effort.
        """

    def sweep(self, folder: str, older_than: float, is_ours: Callable[[str], bool]) -> int:
        """Remove temporaries directly in `folder` that writers left when they were killed.

        Parameters
        ----------
        folder : str
            Its subfolders are not looked at.
        older_than : float
            Seconds since the last change of a temporary; younger ones may be in use.
        is_ours : Callable
            Asked with the name (without folder) that a temporary would have been given.
            Regular files whose name is exactly that of a temporary and for which the answer
            is true are removed, nothing else ever.

        Returns
        -------
        int
            Number of files removed.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        return 0

    @abstractmethod
    def touch(self, name: str) -> None:
        """Note a use of the object (access time only, never its mtime). Best effort."""

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Open, read `len(buffer)` bytes from `offset`, close; return the count read."""
        with self.open(name) as reader:
            return reader.read_into(buffer, offset)

    def close(self) -> None:
        """Release connections and threads. Idempotent."""


_TEMPORARY: Final = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.ASCII)


def temporary_name(base: str) -> str:
    """Return a fresh name, in the same folder, for an object until it is published."""
    return f".{base}.{os.urandom(8).hex()}.tmp"


def final_name(temporary: str) -> str | None:
    """Return the name that a temporary would have been given; None for other names."""
    found = _TEMPORARY.fullmatch(temporary)
    return found[1] if found else None


def check_name(name: str) -> str:
    """Return `name` if it is a safe relative name, else raise.

    Raises
    ------
    ObjectNameError
        If `name` is empty, absolute, not ASCII, or has an empty, ``.`` or ``..`` part.
    """
    if not name or not name.isascii() or "\\" in name or "\0" in name:
        raise ObjectNameError(f"{name!r} is not an object name: expected relative ASCII parts")
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise ObjectNameError(
                f"{name!r} is not an object name: {part!r} is not allowed between slashes"
            )
    return name
