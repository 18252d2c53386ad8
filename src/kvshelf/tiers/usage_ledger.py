"""A directory of objects that stays below a number of bytes, whoever writes to it.

Owns the *ledger*, in which all processes that write to a directory add up how many bytes it holds,
and the choice of the objects that are evicted when there are too many.

The ledger is one small file, ``.kvshelf/use``: the bytes that the last scan found, then a number
for each change since. A writer notes an object before it writes it, by one append of eight bytes,
and withdraws if the sum exceeds the bound. So writers take no lock that a process could hold while
it is killed or stopped, and the bound holds for any number of processes. Only a process that begins
a new ledger locks the old one, for a moment; other processes do not begin one meanwhile. A ledger
misses some changes (by writers that were killed, or files that were added or removed by hand). A
new scan corrects that: when there is no room, and after an hour.

Eviction scans all objects, on the caller's thread and in small steps, and removes objects until a
tenth of the bound is free. That is about ten objects scanned for each one written. Which go first
is the same as on a shelf (:mod:`kvshelf.shelf.eviction`), for each object by itself. A scan takes
about 80 bytes for each object.

Contracts
---------
* The use of an object is its access time, which a reader sets by
  :meth:`~kvshelf.backends.Backend.touch`, so that it is right on filesystems that record no
  accesses; where there is no access time, the modification time is used.
* Several processes that evict at the same time choose about the same objects, and stop as soon as
  the ledger says that there is room: together they remove no more than one alone. A process that
  was stopped in between removes nothing that was used meanwhile.
* Only objects are counted and removed; other files are left alone.
* Appends of eight bytes must not be torn or lost when several processes make them, as is so on
  every local filesystem. Elsewhere the bound is approximate.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import secrets
import stat
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvshelf.backends import (
    Backend,
    BytesLike,
    ObjectInfo,
    Properties,
    WriteMode,
    WriteResult,
)
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import PermanentStorageError, StorageError, UnavailableStorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import KINDS
from kvshelf.format.names import object_name, parse_namespace_folder, parse_path
from kvshelf.shelf.eviction import UNKNOWN, Units, choose
from kvshelf.shelf.pacing import GilPace

#: Name of the ledger.
LEDGER: Final = ".kvshelf/use"
#: Share of the bound that is full after room was made.
FULL_AFTER: Final = 0.9
#: Seconds after which the directory is scanned again.
RESCAN_SECONDS: Final = 3600.0

#: Number of the scan, when it was made, and the bytes that it found.
_HEAD: Final = struct.Struct("=qqq")
_CHANGE: Final = struct.Struct("=q")
# Without O_NONBLOCK a FIFO in its place would keep the thread.
_PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND: Final = os.O_RDWR | os.O_APPEND | _PLAIN
_READ: Final = os.O_RDONLY | _PLAIN
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | _PLAIN
#: Uses within so many seconds may count as one.
_SAME_SECONDS: Final = 60.0
#: An access time that is later than the modification time by this is a use: writing takes time.
_HIT_SECONDS: Final = 1.0
#: What a scan remembers of each object.
_ROW: Final = np.dtype(
    [
        ("folder", "u4"),
        ("index", "u4"),
        ("tail", "u4"),
        ("shard", "u4"),
        ("shards", "u4"),
        ("kind", "u1"),
        ("key", "u1", 32),
        ("size", "i8"),
        ("used", "f8"),
        ("born", "f8"),
    ]
)
_PACKED: Final = struct.Struct("=IIIIIB32sqdd")
#: A temporary that has not changed for so long belongs to a writer that was killed.
_SWEEP_SECONDS: Final = 300.0
_ROUNDS: Final = 3
#: A ledger is locked for the moment in which it is replaced.
_LOCK_TRIES: Final = 20
_LOCK_SECONDS: Final = 5e-3
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


class FullError(PermanentStorageError):
    """There is no room below the bound, or the directory has not been scanned yet."""


@dataclass(frozen=True, slots=True)
class Use:
    """The state of a ledger.

    Attributes
    ----------
    used : int
        Bytes of all objects.
    scanned_at : float
        When they were last scanned, seconds since the epoch.
    """

    used: int
    scanned_at: float


@dataclass(slots=True)
class _Read:
    """The part of a ledger that was read so far."""

    scan: int
    scanned_at: int
    used: int
    end: int = _HEAD.size


class Ledger:
    """The number of bytes in a directory, known to all processes that write to it.

    Parameters
    ----------
    backend : PosixBackend
        The directory.
    """

    def __init__(self, backend: PosixBackend) -> None:
        self._backend = backend
        self._path = f"{backend.root}/{LEDGER}"
        self._lock = threading.Lock()
        self._known: _Read | None = None

    def read(self) -> Use | None:
        """Return the state of the ledger; None when there is none, or it is damaged.

        Raises
        ------
        StorageError
            If it cannot be read.
        """
        with self._lock, self._failing():
            fd = self._open(_READ)
            if fd is None:
                return None
            try:
                return self._use(self._catch_up(fd))
            finally:
                os.close(fd)

    def add(self, change: int, *, removed: bool = False) -> Use | None:
        """Note a change; return the state after it, None when there was no scan yet.

        Parameters
        ----------
        change : int
            Bytes more, or less.
        removed : bool
            The change is the removal of an object.

        Raises
        ------
        StorageError
            If it could not be noted.
        """
        with self._lock, self._failing():
            while (fd := self._open(_APPEND)) is not None:
                try:
                    os.write(fd, _CHANGE.pack(2 * change + removed))
                    known = self._catch_up(fd)
                    if self._is_current(fd):
                        return self._use(known)
                finally:
                    os.close(fd)
                # A new ledger was begun meanwhile, whose scan may have missed the object. To note
                # it twice does no harm.
            return None

    def mark(self) -> tuple[int, int] | None:
        """Return where the ledger ends now, for :meth:`restart`; None when there is none."""
        self.read()
        with self._lock:
            return None if self._known is None else (self._known.scan, self._known.end)

    def restart(self, scanned: int, mark: tuple[int, int] | None) -> None:
        """Begin a new ledger with the result of a scan, unless another process just did.

        Parameters
        ----------
        scanned : int
            Bytes of all objects that the scan found.
        mark : (int, int) or None
            What :meth:`mark` returned before the scan. Objects that were written since then are
            added, whether the scan has seen them or not: the sum is rather too large than too
            small. If an object was evicted since then, the ledger stays as it is.

        Raises
        ------
        StorageError
            If it could not be written.
        """
        with self._lock, self._failing():
            fd = self._open(_READ)
            if fd is None:
                self._publish(scanned, "create")
                return
            try:
                if not self._is_ours(fd):
                    return
                known = self._catch_up(fd)
                if known is None:
                    self._publish(scanned, "replace")
                    return
                if mark is None or mark[0] != known.scan:
                    return
                seen = known.end
                since = _changes(fd, mark[1], seen)
                if any(change & 1 for change in since):
                    return
                self._publish(scanned + _written(since), "replace")
                late = _written(_changes(fd, seen, os.fstat(fd).st_size))
            finally:
                os.close(fd)
        if late:
            self.add(late)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Translate errors of the operating system."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(error, "counting", self._path, writing=True) from error

    def _open(self, flags: int) -> int | None:
        """Open the ledger, not by a link and nothing but a file; None when there is none."""
        folder, _, base = self._path.rpartition("/")
        try:
            # Not O_DIRECTORY alone, whose error for a link is the one for a file.
            if stat.S_ISLNK(os.lstat(folder).st_mode):
                raise OSError(errno.ELOOP, f"{folder} is a link; remove it")
            at = os.open(folder, _FOLDER)
            try:
                fd = os.open(base, flags, dir_fd=at)
            finally:
                os.close(at)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is not a file; remove it")
        return fd

    def _is_ours(self, fd: int) -> bool:
        """Lock a ledger against other scans; return whether it is the one to replace.

        A process that did not get the lock, or got it after the ledger was replaced, was too late:
        the changes in the new ledger must not be lost. Closing the file unlocks it.
        """
        for left in reversed(range(_LOCK_TRIES)):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    return False
                time.sleep(_LOCK_SECONDS)
            except OSError as error:
                # Filesystems without locks: the look below makes it unlikely only.
                if error.errno not in _NO_LOCKS:
                    raise
                break
        return self._is_current(fd)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _publish(self, used: int, mode: WriteMode) -> None:
        # The number tells this file from a later one that gets the same inode.
        head = _HEAD.pack(secrets.randbits(62), int(time.time()), used)
        self._backend.write(LEDGER, [head], mode)

    def _catch_up(self, fd: int) -> _Read | None:
        """Read the new changes; None if the ledger is damaged: a torn append, a foreign file."""
        size = os.fstat(fd).st_size
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size or size % _CHANGE.size:
            self._known = None
            return None
        known = self._known
        if known is None or known.scan != _HEAD.unpack(head)[0] or known.end > size:
            known = _Read(*_HEAD.unpack(head))
        known.used += sum(change >> 1 for change in _changes(fd, known.end, size))
        known.end = size
        self._known = known if known.used >= 0 else None
        return self._known

    @staticmethod
    def _use(known: _Read | None) -> Use | None:
        return None if known is None else Use(known.used, known.scanned_at)


def _changes(fd: int, start: int, end: int) -> array[int]:
    """Return the changes noted in a part of a ledger: twice the bytes, odd for a removal."""
    found = array("q")
    data = os.pread(fd, end - start, start)
    found.frombytes(data[: len(data) // _CHANGE.size * _CHANGE.size])
    return found


def _written(changes: Iterable[int]) -> int:
    return sum(change >> 1 for change in changes if change > 0)


class BoundedBackend(WrappedBackend):
    """A directory that takes no object for which there is no room below a bound.

    Bad objects are removed from it, not quarantined.

    Parameters
    ----------
    inner : PosixBackend
    max_bytes : int
        Most bytes of all objects together.

    Attributes
    ----------
    ledger : Ledger
    max_bytes : int
    """

    def __init__(self, inner: PosixBackend, max_bytes: int) -> None:
        super().__init__(inner)
        self.max_bytes = max_bytes
        self.ledger = Ledger(inner)

    @property
    def properties(self) -> Properties:
        """Those of the directory."""
        return replace(self.inner.properties, can_quarantine=False)

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish one object.

        Raises
        ------
        FullError
            If :meth:`evict` must be called first.
        """
        if parse_path(name) is None:
            return self.inner.write(name, buffers, mode)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        before = self.inner.info(name)
        if mode == "create" and before is not None:
            return WriteResult.EXISTED
        # Read first: a change that is noted and withdrawn makes the next scan less precise.
        use = self.ledger.read()
        if use is not None and use.used + size <= self.max_bytes:
            use = self.ledger.add(size)
            if use is not None and use.used > self.max_bytes:
                self.ledger.add(-size)
                raise self._full(size)
        elif use is not None:
            raise self._full(size)
        if use is None:
            raise FullError(errno.ENOSPC, "the directory has not been scanned yet", self.url)
        result = None
        try:
            result = self.inner.write(name, buffers, mode)
        finally:
            if result is None or result is WriteResult.EXISTED:
                with suppress(StorageError):
                    self.ledger.add(-size)
        if result is WriteResult.REPLACED and before is not None:
            self.ledger.add(-before.size)
        return result

    def delete(self, name: str) -> bool:
        """Remove one object."""
        before = self.inner.info(name) if parse_path(name) is not None else None
        deleted = self.inner.delete(name)
        if deleted and before is not None:
            self.ledger.add(-before.size, removed=True)
        return deleted

    def quarantine(self, name: str, target: str) -> bool:
        """Remove what stands at `name`."""
        return self.delete(name)

    def _full(self, size: int) -> FullError:
        return FullError(
            errno.ENOSPC, f"no room for {size} bytes: max_bytes is {self.max_bytes}", self.url
        )

    @property
    def scanned_recently(self) -> bool:
        """Whether the last scan is recent enough to rely on. May block on the directory."""
        use = self.ledger.read()
        return use is not None and abs(time.time() - use.scanned_at) < RESCAN_SECONDS

    def evict(
        self,
        size: int,
        through: Backend,
        tracked_write: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[int, int]:
        """Scan the objects, and remove those used longest ago until `size` bytes fit.

        Goes through all objects, in small steps: not for a thread whose caller waits. Does
        nothing when there is room and the last scan is recent.

        Parameters
        ----------
        size : int
        through : Backend
            This backend, or a wrapper around it; it is scanned through that.
        tracked_write : Callable, optional
            Makes a context for each use of the ledger that is not part of a call of `through`.

        Returns
        -------
        (int, int)
            Number and bytes of the objects that were removed.

        Raises
        ------
        StorageError
            If the directory failed.
        """
        goal = min(int(self.max_bytes * FULL_AFTER), self.max_bytes - size)
        removed = freed = 0
        for _ in range(_ROUNDS):
            with tracked_write():
                mark, use = self.ledger.mark(), self.ledger.read()
                recent = self.scanned_recently
            if use is not None and use.used + size <= self.max_bytes and recent:
                break
            wanted = self.max_bytes - goal if use is None else use.used - goal
            scan = _Scan(through)
            with tracked_write():
                self.ledger.restart(scan.nbytes, mark)
                use = self.ledger.read()
            if use is not None and use.used + size <= self.max_bytes:
                break
            for found in scan.first_to_go(max(wanted, size)):
                # Others may be at it too.
                with tracked_write():
                    use = self.ledger.read()
                if use is None or use.used <= goal:
                    break
                now = through.info(found.name)
                unused = now is not None and _used_at(now) <= _used_at(found)
                if unused and through.delete(found.name):
                    removed += 1
                    freed += found.size
        return removed, freed


def share_files(one: Backend, other: Backend) -> bool:
    """Whether both are directories, and one is the other or lies in it, by whatever path."""
    root, other_root = _root_of(one), _root_of(other)
    if root is None or other_root is None:
        return False
    return _lies_in(root, other_root) or _lies_in(other_root, root)


def _root_of(backend: Backend) -> str | None:
    with suppress(UnavailableStorageError):  # it is not open
        while isinstance(backend, WrappedBackend):
            backend = backend.inner
    return backend.root if isinstance(backend, PosixBackend) else None


def _lies_in(path: str, root: str) -> bool:
    """Compare the folders themselves: a bind mount gives one of them two names."""
    if os.path.commonpath((path, root)) == root:
        return True
    with suppress(OSError):
        top = os.stat(root)
        while (parent := os.path.dirname(path)) != path:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), top):
                    return True
            path = parent
    return False


def _used_at(info: ObjectInfo) -> float:
    return info.mtime if info.atime is None else max(info.atime, info.mtime)


class _Scan:
    """All objects of a directory.

    Attributes
    ----------
    nbytes : int
        Bytes of them together.
    """

    def __init__(self, backend: Backend) -> None:
        self._folders: list[str] = []
        rows = bytearray()
        pace = GilPace()
        for folder in _object_folders(backend):
            backend.sweep(folder, _SWEEP_SECONDS, functools.partial(_is_object, folder))
            self._folders.append(folder)
            for info in backend.list(folder):
                parsed = parse_path(info.name)
                if parsed is not None:
                    rows += _PACKED.pack(
                        len(self._folders) - 1,
                        parsed.index,
                        parsed.tail_tokens or 0,
                        parsed.shard,
                        parsed.shards,
                        KINDS.index(parsed.kind),
                        parsed.key,
                        info.size,
                        _used_at(info),
                        info.mtime,
                    )
                pace.rest()
        self._rows = np.frombuffer(rows, _ROW)
        self.nbytes = int(self._rows["size"].sum())

    def first_to_go(self, nbytes: int) -> Iterator[ObjectInfo]:
        """Yield the objects to remove first, of so many bytes or a little more."""
        rows = self._rows
        count = len(rows)
        nothing, nobody = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        units = Units(
            used=rows["used"].copy(),
            born=rows["born"].copy(),
            index=rows["index"].copy(),
            parent=np.full(count, UNKNOWN, np.int64),
            full=rows["size"].copy(),
            window=nothing,
            state=nothing,
            hit=rows["used"] > rows["born"] + _HIT_SECONDS,
            pinned=nobody,
        )
        victims = choose(units, free=nbytes, now=time.time(), resolution=_SAME_SECONDS)
        for row in victims.rows:
            yield self._info(rows[row])

    def _info(self, row: np.void) -> ObjectInfo:
        namespace, group, _ = self._folders[row["folder"]].split("/")
        tail = int(row["tail"])
        chunk = Chunk(
            row["key"].tobytes(),
            b"",
            int(row["index"]),
            tail or 1,
            tail=tail > 0,
            salt_group=group,
        )
        kind = KINDS[row["kind"]]
        name = object_name(chunk, int(row["shard"]), int(row["shards"]), kind)
        return ObjectInfo(f"{namespace}/{name}", int(row["size"]), float(row["used"]))


def _object_folders(backend: Backend) -> Iterator[str]:
    """Yield the folders that objects lie in: ``<namespace>/<group>/<2 hex>``."""
    for namespace in backend.folders():
        if parse_namespace_folder(namespace) is not None:
            for group in backend.folders(namespace):
                for fan_out in backend.folders(f"{namespace}/{group}"):
                    yield f"{namespace}/{group}/{fan_out}"


def _is_object(folder: str, name: str) -> bool:
    return parse_path(f"{folder}/{name}") is not None
