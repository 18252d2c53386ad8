"""The backend interface: what kvshelf requires of one kind of storage.

A backend maps *names* (relative POSIX paths such as ``a/b/c.safetensors``) to byte
objects. It knows nothing of chunks, tensors or vLLM. Wrappers (read-only, circuit breaker,
fault injection, …) are backends themselves, see :mod:`kvshelf.backends.wrappers`.

Contracts
---------
* Every method may block on storage. The step thread of an engine calls none of them.
* Several threads may call any method at once.
* Each backend decides in one place which of its native errors mean missing, retryable or
  permanent; callers see only the classes of :mod:`kvshelf.errors`.
* Every name is checked (:func:`check_name`), so that none can reach outside the root.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

from xxhash import xxh3_128_hexdigest

from kvshelf.errors import ObjectNameError, StorageError

BytesLike: TypeAlias = "bytes | bytearray | memoryview"
WriteMode: TypeAlias = Literal["create", "replace"]


#: A *high-latency* storage is one whose probe takes at least this many seconds. On any other
#: storage, probing thousands of objects takes less time than a search that probes few of them.
HIGH_LATENCY_SECONDS: Final = 75e-6


class NotRegular(Enum):
    """Type of :data:`NOT_REGULAR`."""

    NOT_REGULAR = "not a regular file"


NOT_REGULAR: Final = NotRegular.NOT_REGULAR

#: Answer of a probe for one name: size in bytes, ``None`` if missing, ``NOT_REGULAR``, or the
#: error of the probe.
StatResult: TypeAlias = "int | None | NotRegular | StorageError"

StatResults: TypeAlias = "list[StatResult]"  # inside the classes `list` is a method

#: Comes after every name, for listings without an end.
BEYOND_NAMES: Final = "\x80"

#: Answers of :meth:`Backend.delete`: deleted, was gone, or why not.
DeleteResults: TypeAlias = "list[bool | StorageError]"


class WriteResult(Enum):
    """Result of a write. Losing a race is a result, not an error."""

    CREATED = "created"
    EXISTED = "existed"
    REPLACED = "replaced"


class Touched(Enum):
    """Whether a storage can record uses of objects.

    TOUCHED: it can. A use that it could not record for a passing reason is lost.
    REFUSED: it has no way to do so, or this user may not: ages go by the last change.
    """

    TOUCHED = "touched"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Space:
    """The space on a storage.

    Attributes
    ----------
    free : int
        Bytes that this user may still write, quotas of users aside.
    total : int
        Bytes of the whole filesystem.
    memory : bool
        The objects lie in the host's memory (tmpfs, ramfs).
    files : int or None
        Files that this user may still make; None where their number has no bound.
    """

    free: int
    total: int
    memory: bool = False
    files: int | None = None


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a call may take before it counts as late, see :mod:`kvshelf.backends.guard`.

    Attributes
    ----------
    probe : float
        Seconds for one call of ``stat`` or ``info``.
    read : float
        Seconds to read one object, in addition to the time for its bytes; also for listings.
    write : float
        Seconds to write one object, in addition to the time for its bytes; also for deleting and
        moving.
    bytes_per_second : float
        Bandwidth from which the time for an object's bytes is computed.
    """

    probe: float = 1.0
    read: float = 5.0
    write: float = 5.0
    bytes_per_second: float = 50e6

    def to_read(self, nbytes: int) -> float:
        """Return the seconds allowed for reading `nbytes`."""
        return self.read + nbytes / self.bytes_per_second

    def to_write(self, nbytes: int) -> float:
        """Return the seconds allowed for writing `nbytes`."""
        return self.write + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Properties:
    """What callers may rely on for one backend.

    Attributes
    ----------
    filesystem : str
        Short name, for display: ``ext4``, ``nfs``, ``fuse``, ``memory``, ``s3`` …
    cache_seconds : float
        How long the storage's own caches may give outdated answers.
    concurrency : int
        Number of concurrent calls up to which throughput grows.
    deletes_at_once : int
        Number of names for which one call of ``delete`` takes little longer than for one.
    probe_cost : float
        Seconds for one probe, typical or as measured.
    read_only : bool
        The storage is known to refuse writes.
    sets_aside : bool
        :meth:`Backend.set_aside` renames the entry; False: it deletes the object.
    temporaries : bool
        A writer that is killed may leave a temporary, see :func:`final_name`.
    renews : bool
        :meth:`Backend.touch` has the storage copy the object onto itself.
    shared : bool
        Others than the owner of the root may write.
    versions : bool
        The storage is known to keep older versions of what is replaced or deleted.
    deadlines : Deadlines
        Upper bounds for calls when the storage works.
    local_path : str
        Absolute path of the root, where this machine's kernel is the only one that changes files,
        and gives them the times of its clock; empty elsewhere.
    available : bool
        False: the circuit breaker is open, and calls fail at once without being tried.
    """

    filesystem: str
    cache_seconds: float = 0.0
    concurrency: int = 8
    deletes_at_once: int = 1
    probe_cost: float = 10e-6
    read_only: bool = False
    sets_aside: bool = False
    temporaries: bool = False
    renews: bool = False
    shared: bool = False
    versions: bool = False
    local_path: str = ""
    deadlines: Deadlines = Deadlines()
    available: bool = True

    @property
    def high_latency(self) -> bool:
        """Whether one probe takes at least :data:`HIGH_LATENCY_SECONDS`."""
        return self.probe_cost >= HIGH_LATENCY_SECONDS


class ObjectInfo(NamedTuple):
    """One row of a listing: name, size in bytes, times in seconds since the epoch.

    `ctime` is the last change of the entry itself (its times, links, owner), where that is known.
    `held` is the bytes that the storage holds for it, which every backend sets: fewer than `size`
    where a file has holes, or several links.
    """

    # Not a dataclass, which takes four times as long to make: a listing has millions of rows.
    name: str
    size: int
    mtime: float
    atime: float | None = None
    ctime: float | None = None
    held: int = -1


class Reader(ABC):
    """One opened object; all reads see one version if the storage distinguishes versions."""

    #: Size in bytes at the time of opening.
    size: int

    @abstractmethod
    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` with the bytes from `offset`; return the number of bytes read.

        The number is less than ``len(buffer)`` only at the object's end.

        Raises
        ------
        StorageError
            If the storage failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the reader's resources. Idempotent."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WholeReader(Reader):
    """Fetches an object whole at the first read, so that all reads see one version.

    Parameters
    ----------
    size : int
    fetch : Callable
        Returns so many bytes.
    """

    def __init__(self, size: int, fetch: Callable[[], BytesLike]) -> None:
        self.size = size
        self._fetch = fetch
        self._data: memoryview | None = None

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Copy bytes, which were fetched by now."""
        view = buffer.cast("B")
        if self._data is None:
            self._data = memoryview(self._fetch() if self.size else b"").cast("B")
        part = self._data[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """Drop the bytes."""
        self._data = None


@dataclass(frozen=True, eq=False, slots=True)
class Whole:
    """What an object that is read whole has to be, but for a text that several objects share.

    It begins with `first`, that text, and `second`. Then come the XXH3-128 of each of its parts, as
    32 hexadecimal digits with commas between them, `after`, and spaces up to the first part. The
    parts follow, without gaps, to the end. Kept by callers, since backends prepare for each.

    Attributes
    ----------
    end : str
        End of the object's name.
    first : bytes
        What is before the shared text.
    second : bytes
        What is behind it.
    after : bytes
        What is behind the digests.
    borders : array of int64
        The first byte of the first part, and the end of each. No part has fewer than 241 bytes.
    """

    end: str
    first: bytes
    second: bytes
    after: bytes
    borders: array[int]


def is_whole(whole: Whole, text: bytes, image: memoryview) -> bool:
    """Whether bytes are what an object has to be.

    Parameters
    ----------
    whole : Whole
    text : bytes
        As for :meth:`Backend.read_whole`.
    image : memoryview
        Of the object's size.
    """
    digests = [xxh3_128_hexdigest(image[a:b]) for a, b in pairwise(whole.borders)]
    begin = whole.first + text + whole.second + ",".join(digests).encode() + whole.after
    return bytes(image[: whole.borders[0]]) == begin.ljust(whole.borders[0])


class Checked(NamedTuple):
    """What :meth:`Backend.read_whole` did.

    Attributes
    ----------
    done : Sequence of bool
        Whether each object was read and is what it has to be. If not, its buffer holds anything.
    reading : float
        Seconds in which all of them were read.
    checking : float
        Seconds in which all of them were checked.
    """

    done: Sequence[bool]
    reading: float
    checking: float


class Backend(ABC):
    """A storage of one kind, below one root."""

    #: The root, for display: a path or URL without secrets.
    url: str

    @property
    @abstractmethod
    def properties(self) -> Properties:
        """What callers may rely on at present. Never blocks."""

    @abstractmethod
    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names in one call; return one answer for each, errors included.

        Fastest if the names of one folder are adjacent.

        Raises
        ------
        ObjectNameError
            If a name is not safe: an error of the caller.
        """

    @abstractmethod
    def info(self, name: str) -> ObjectInfo | None:
        """Return size and times of the entry at `name`, of any type, folders too; None if missing.

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
            If there is no entry with this name.
        NotRegularError
            If the entry with this name is not a regular file.
        StorageError
            If the storage failed.
        """

    @property
    def reads_whole(self) -> bool:
        """Whether :meth:`read_whole` reads objects here, and many at once. Never blocks."""
        return False

    def read_whole(
        self,
        start: str,
        text: bytes,
        wholes: Sequence[Whole],
        buffers: Sequence[memoryview],
        seconds: float = math.inf,
    ) -> Checked | None:
        """Read objects and check them, those of them for which one call does it all.

        The others are read through :meth:`open`, which also says what is wrong with them. So are
        all objects by default. A wrapper that changes :meth:`open` has to change this as well.

        Parameters
        ----------
        start : str
            What precedes the end of each name.
        text : bytes
            What is between `first` and `second` of each object.
        wholes : Sequence of Whole
        buffers : Sequence of memoryview
            Where they are read to: writable, of their sizes.
        seconds : float
            Read nothing more after so long.

        Returns
        -------
        Checked or None
            None: no object was read.

        Raises
        ------
        ObjectNameError
            If a name is not safe: an error of the caller.
        StorageError
            If the storage failed as a whole.
        """
        return None

    @abstractmethod
    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish the concatenated `buffers` as one object.

        ``create`` leaves an existing entry alone, whatever its type, and returns EXISTED.
        ``replace`` replaces a file or link and returns REPLACED, or CREATED if nothing was
        there. Several writers may create one object at a time where the storage cannot decide
        between them: equal names hold equal bytes. No reader sees part of an object, except on some
        filesystems of programs; loads verify what they read.

        Raises
        ------
        NotRegularError
            If mode is ``replace`` and the entry is a folder.
        ReadOnlyStorageError
            If the storage refuses writes.
        NoSpaceStorageError
            If the storage is full.
        StorageError
            If the write failed for another reason.
        """

    @abstractmethod
    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        start: str | None = None,
        end: str | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """Stream all objects below the folder `prefix`, in any order.

        Objects that are created or deleted meanwhile may be missed. A missing folder is empty.

        Parameters
        ----------
        prefix : str
            A folder's name without trailing slash, or "".
        hidden : bool
            List what has a leading dot in a part of its name below `prefix` as well: temporaries,
            and files in reserved folders. A storage may be unable to: what bounds a shelf neither
            counts nor deletes them there. Where :attr:`Properties.sets_aside` holds, an entry with
            the name of a temporary is listed whatever it is, and not opened; other links and
            special files are listed nowhere.
        start, end : str, optional
            Only files and folders directly in `prefix` whose names lie between these, which are
            included. Other folders are not opened. None is no bound.
        flat : bool
            Only objects directly in `prefix`. No other folder is opened: a storage with folders
            never fails because of them.

        Raises
        ------
        StorageError
            If the storage failed, also to list one of the folders.
        """

    @abstractmethod
    def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names of the folders directly in `prefix`, sorted, without dot folders.

        Raises
        ------
        StorageError
            If the storage failed.
        """

    @abstractmethod
    def delete(self, names: Sequence[str]) -> DeleteResults:
        """Remove entries (never a link's target), by few requests where the storage has such.

        Of folders only those that are empty are removed, on a directory. Elsewhere there are none,
        or they are refused like one that is not empty: with NotRegularError.

        Returns
        -------
        list of bool or StorageError
            For each name whether it was there, or why it still is; True for what was gone where the
            storage does not report it. After :data:`MOST_FAILURES` errors in a row that may pass
            the others are not tried, and have the last answer. Any of them may be gone if the
            process is killed meanwhile.

        Raises
        ------
        ObjectNameError
            If a name is not safe: an error of the caller.
        """

    def set_aside(self, name: str) -> bool:
        """Rename the entry at `name` (file, link, FIFO, folder) to a temporary's name in its place.

        It is never followed, opened or descended into, and deleted as any temporary of a killed
        writer. If :attr:`Properties.sets_aside` is False, as by default, the object is deleted at
        once. Returns False if there was no entry.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        return delete_one(self, name)

    def touch(self, name: str, before: float = math.inf) -> Touched:
        """Record a use of the object, in one of its times. Best effort.

        A directory sets the access time, never the mtime; or the ctime, where the file is another
        user's. Where :attr:`Properties.renews` holds, the storage copies the object onto itself:
        if it was last changed before `before`, in seconds since the epoch by the clock of the
        storage. No backend writes bytes that nobody verified. REFUSED, as by default, costs no
        request once it is known. A missing object is no reason for it.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        check_name(name)
        return Touched.REFUSED

    def space(self) -> Space | None:
        """Return the space on the storage; None if the storage does not report it.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        return None

    def close(self) -> None:
        """Release connections and threads. Idempotent."""


def probe(backend: Backend, name: str) -> int | NotRegular | None:
    """Probe one name; raise what :meth:`Backend.stat` would answer as an error."""
    answer = backend.stat([name])[0]
    if isinstance(answer, StorageError):
        raise answer
    return answer


def delete_one(backend: Backend, name: str) -> bool:
    """Remove one entry, see :meth:`Backend.delete`; raise what that would answer as an error."""
    answer = backend.delete([name])[0]
    if isinstance(answer, StorageError):
        raise answer
    return answer


def delete_each(names: Sequence[str], delete: Callable[[str], bool]) -> DeleteResults:
    """Answer for :meth:`Backend.delete` by a call for each name, which returns or raises."""
    for name in names:
        check_name(name)
    answers: DeleteResults = []
    failures = 0
    for name in names:
        try:
            answers.append(delete(name))
            failures = 0
        except StorageError as error:
            answers.append(error)
            failures += error.retryable
            if failures == MOST_FAILURES:
                break
    return answers + answers[-1:] * (len(names) - len(answers))


#: Errors in a row that may pass after which nothing more is deleted: the storage may be down.
MOST_FAILURES: Final = 3
_TEMPORARY: Final = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.ASCII)


def temporary_name(base: str) -> str:
    """Return a unique temporary name for an object, used until it is published."""
    return f".{base}.{os.urandom(8).hex()}.tmp"


def final_name(temporary: str) -> str | None:
    """Return the final name of a temporary; None if `temporary` is not a temporary's name."""
    match = _TEMPORARY.fullmatch(temporary)
    return match[1] if match else None


def endless_listing(seconds: float) -> str:
    """Return why a listing was given up after some time, and what to do."""
    return (
        f"the listing did not end within {seconds:g} s: very many objects lie beside the shelf, or"
        " the server's listings have no end; give the shelf a prefix of its own in the bucket"
    )


def check_folder(name: str) -> str:
    """Return a folder's name if it is safe, or "": the root. Raises as :func:`check_name`."""
    return check_name(name) if name else name


#: What no name has: a part that is empty, ``.`` or ``..``, a backslash, NUL.
_NO_NAME: Final = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)|[\\\0]")


def is_name(name: str) -> bool:
    """Whether `name` is safe. No listing has any other: it is somebody else's."""
    return name.isascii() and _NO_NAME.search(name) is None


def check_name(name: str) -> str:
    """Return `name` if it is a safe relative name.

    Raises
    ------
    ObjectNameError
        If `name` is empty, absolute, not ASCII, or has an empty, ``.`` or ``..`` part.
    """
    if not is_name(name):
        raise ObjectNameError(
            f"{name!r} is not an object name: expected relative ASCII parts without backslashes,"
            " none of which is empty, '.' or '..'"
        )
    return name
