"""A directory of objects that stays below a number of bytes, whoever writes to it.

Owns the *ledger*, in which all processes that write to a directory add up how many bytes it
holds, and the choice of what goes when there are too many.

The ledger is one small file, ``.kvshelf/use``: what was there when somebody last counted, then a
number for each change. Each writer notes an object before it writes it, by one append of eight
bytes, and gives way when all that was noted is too much. So writers take no lock that a process
could keep when it is killed or stopped, and the bound holds for any number of processes. Only who
begins a new ledger locks the old one, for a moment; others do not count meanwhile. What a
ledger cannot know (writers that were killed, files that others put there or removed) ends when
somebody counts anew: when there is no room, and after an hour.

To make room all objects are looked at, on the caller's thread and in small steps, and those that
were used longest ago go until a tenth of the bound is free. That is one look at ten objects, or
so, for each object written. Of objects used in the same minute those far from the beginning of
their prompts go first, since a chunk is of no use without the ones before it.

Contracts
---------
* The use of an object is its access time, which a reader sets by
  :meth:`~kvshelf.backends.Backend.touch`, so that it is right on filesystems that note no
  accesses of their own; where there is no access time, the time of the last change counts.
* Of several processes that make room at once each takes the same objects, and stops as soon as
  the ledger says that there is room: together they take no more than one alone. A process that
  stood still in between takes nothing that was used meanwhile.
* Only objects are counted and removed; other files are left alone.
* Appends of eight bytes must not be torn or lost when several processes make them, as is so on
  every local filesystem. Elsewhere the bound is rough.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import heapq
import os
import secrets
import stat
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Final

from kvshelf.backends import Backend, Buffer, ObjectInfo, Properties, WriteMode, WriteResult
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import PermanentStorageError, StorageError, UnavailableStorageError
from kvshelf.identity import parse_namespace_folder, parse_path

#: Name of the ledger.
LEDGER: Final = ".kvshelf/use"
#: Share of the bound that is full after room was made.
FULL_AFTER: Final = 0.9
#: Seconds after which somebody counts anew.
RECOUNT_SECONDS: Final = 3600.0

#: Number of the count, when it was made, and bytes there were then.
_HEAD: Final = struct.Struct("=qqq")
_CHANGE: Final = struct.Struct("=q")
# Without O_NONBLOCK a FIFO in its place would keep the thread.
_PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND: Final = os.O_RDWR | os.O_APPEND | _PLAIN
_READ: Final = os.O_RDONLY | _PLAIN
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | _PLAIN
#: Uses within so many seconds count as one.
_SAME_SECONDS: Final = 60
#: A temporary that has not changed for so long belongs to a writer that was killed.
_SWEEP_SECONDS: Final = 300.0
_ROUNDS: Final = 3
#: A ledger is locked for the moment in which it is replaced.
_LOCK_TRIES: Final = 20
_LOCK_SECONDS: Final = 5e-3
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
_WORK_SECONDS: Final = 0.5e-3
_REST_SECONDS: Final = 50e-6


class FullError(PermanentStorageError):
    """There is no room below the bound, or nobody has counted yet."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a ledger says.

    Attributes
    ----------
    used : int
        Bytes of all objects.
    counted_at : float
        When they were last counted, seconds since the epoch.
    """

    used: int
    counted_at: float


@dataclass(slots=True)
class _Read:
    """What was read of a ledger so far."""

    count: int
    counted_at: int
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
        """Return what the ledger says; None when there is none, or it makes no sense.

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
        """Note a change; return the state after it, None when nobody has counted yet.

        Parameters
        ----------
        change : int
            Bytes more, or less.
        removed : bool
            An object that was there is there no more.

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
                # Somebody counted meanwhile and may not have seen it. Twice does no harm.
            return None

    def mark(self) -> tuple[int, int] | None:
        """Return where the ledger ends now, for :meth:`restart`; None when there is none."""
        self.read()
        with self._lock:
            return None if self._known is None else (self._known.count, self._known.end)

    def restart(self, counted: int, mark: tuple[int, int] | None) -> None:
        """Begin a new ledger with what was counted, unless somebody else did so meanwhile.

        Parameters
        ----------
        counted : int
            Bytes of all objects that were found.
        mark : (int, int) or None
            What :meth:`mark` returned before they were looked for. What was written since then
            is added, seen or not: it says rather too much than too little. When something was
            removed since then, by somebody who makes room, the ledger stays as it is.

        Raises
        ------
        StorageError
            If it could not be written.
        """
        with self._lock, self._failing():
            fd = self._open(_READ)
            if fd is None:
                self._publish(counted, "create")
                return
            try:
                if not self._is_ours(fd):
                    return
                known = self._catch_up(fd)
                if known is None:
                    self._publish(counted, "replace")
                    return
                if mark is None or mark[0] != known.count:
                    return
                seen = known.end
                since = _changes(fd, mark[1], seen)
                if any(change & 1 for change in since):
                    return
                self._publish(counted + _written(since), "replace")
                late = _written(_changes(fd, seen, os.fstat(fd).st_size))
            finally:
                os.close(fd)
        if late:
            self.add(late)

    def _failing(self) -> _AsStorageError:
        return _AsStorageError(self._path)

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
        """Lock a ledger against other counters; whether it is the one to replace.

        Who did not get the lock, or gets it after the ledger was replaced, has been outrun: what
        was noted in the new one must not be dropped. Closing the file unlocks it.
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
        # The number tells this file from a later one that the system gives the same inode.
        head = _HEAD.pack(secrets.randbits(62), int(time.time()), used)
        self._backend.write(LEDGER, [head], mode)

    def _catch_up(self, fd: int) -> _Read | None:
        """Read what is new; None where it makes no sense: a torn append, a foreign file."""
        size = os.fstat(fd).st_size
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size or size % _CHANGE.size:
            self._known = None
            return None
        known = self._known
        if known is None or known.count != _HEAD.unpack(head)[0] or known.end > size:
            known = _Read(*_HEAD.unpack(head))
        known.used += sum(change >> 1 for change in _changes(fd, known.end, size))
        known.end = size
        self._known = known if known.used >= 0 else None
        return self._known

    @staticmethod
    def _use(known: _Read | None) -> Use | None:
        return None if known is None else Use(known.used, known.counted_at)


class _AsStorageError:
    """Translates what the operating system raises."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise storage_error(error, "counting", self._path, writing=True) from error


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

    Bad objects are removed from it, not moved aside.

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
        return replace(self.inner.properties, sets_aside=False)

    def write(
        self, name: str, buffers: Sequence[Buffer], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish one object.

        Raises
        ------
        FullError
            If :meth:`make_room` must be called first.
        """
        if parse_path(name) is None:
            return self.inner.write(name, buffers, mode)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        before = self.inner.info(name)
        if mode == "create" and before is not None:
            return WriteResult.EXISTED
        # A look first: what is noted and taken back spoils the next count a little.
        use = self.ledger.read()
        if use is not None and use.used + size <= self.max_bytes:
            use = self.ledger.add(size)
            if use is not None and use.used > self.max_bytes:
                self.ledger.add(-size)
                raise self._full(size)
        elif use is not None:
            raise self._full(size)
        if use is None:
            raise FullError(errno.ENOSPC, "nobody has counted yet what is there", self.url)
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

    def set_aside(self, name: str, target: str) -> bool:
        """Remove what stands at `name`."""
        return self.delete(name)

    def _full(self, size: int) -> FullError:
        return FullError(
            errno.ENOSPC, f"no room for {size} bytes: max_bytes is {self.max_bytes}", self.url
        )

    @property
    def counted_lately(self) -> bool:
        """Whether the ledger is one to rely on. May block on the directory."""
        use = self.ledger.read()
        return use is not None and abs(time.time() - use.counted_at) < RECOUNT_SECONDS

    def make_room(
        self,
        size: int,
        through: Backend,
        noting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> tuple[int, int]:
        """Count what is there, and remove what was used longest ago until `size` bytes fit.

        Goes through all objects, in small steps: not for a thread that anybody waits for. Does
        nothing when there is room and the last count is not old.

        Parameters
        ----------
        size : int
        through : Backend
            What is around this backend, or itself: by this way it is asked.
        noting : Callable, optional
            Makes a context for each use of the ledger that is no part of a call of `through`.

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
            with noting():
                mark, use = self.ledger.mark(), self.ledger.read()
                lately = self.counted_lately
            if use is not None and use.used + size <= self.max_bytes and lately:
                break
            wanted = self.max_bytes - goal if use is None else use.used - goal
            counted, oldest = _look(through, max(wanted, size))
            with noting():
                self.ledger.restart(counted, mark)
                use = self.ledger.read()
            if use is not None and use.used + size <= self.max_bytes:
                break
            for found in oldest:
                # Others may be at it too.
                with noting():
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


def _look(backend: Backend, wanted: int) -> tuple[int, list[ObjectInfo]]:
    """Return the bytes of all objects, and those to remove first, of `wanted` bytes or so."""
    total = held = 0
    # The first of the heap is what stays longest of what it holds.
    heap: list[tuple[int, int, str, ObjectInfo]] = []
    rested = time.perf_counter()
    for folder in _object_folders(backend):
        backend.sweep(folder, _SWEEP_SECONDS, functools.partial(_is_object, folder))
        for info in backend.list(folder):
            parsed = parse_path(info.name)
            if parsed is None:
                continue
            total += info.size
            rank = (-int(_used_at(info) // _SAME_SECONDS), parsed.index, info.name)
            if held < wanted or rank > heap[0][:3]:
                heapq.heappush(heap, (*rank, info))
                held += info.size
            while heap and held - heap[0][3].size >= wanted:
                held -= heapq.heappop(heap)[3].size
            # A thread that only gives up the GIL takes it back before others have woken.
            if time.perf_counter() - rested > _WORK_SECONDS:
                time.sleep(_REST_SECONDS)
                rested = time.perf_counter()
    return total, [row[3] for row in sorted(heap, reverse=True)]


def _object_folders(backend: Backend) -> Iterator[str]:
    """Yield the folders that objects lie in: ``<namespace>/<group>/<2 hex>``."""
    for namespace in backend.folders():
        if parse_namespace_folder(namespace) is not None:
            for group in backend.folders(namespace):
                for fan_out in backend.folders(f"{namespace}/{group}"):
                    yield f"{namespace}/{group}/{fan_out}"


def _is_object(folder: str, name: str) -> bool:
    return parse_path(f"{folder}/{name}") is not None
