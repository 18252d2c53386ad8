"""The usage ledger: how many bytes a directory holds, counted by all processes that write to it.

Owns one small file, ``.kvshelf/use``: the bytes that the last scan found, then a number for each
change since. A writer notes an object before it writes it, by one append of eight bytes, and
withdraws if the sum exceeds the bound. So writers take no lock that a process could hold while it
is killed or stopped, and the bound holds for any number of processes. Only a process that begins a
new ledger locks the old one, for a moment; other processes do not begin one meanwhile.

Contracts
---------
* A ledger misses some changes: by writers that were killed, or files that were added or removed by
  hand. A new scan corrects that.
* Appends of eight bytes must not be torn or lost when several processes make them, as is so on
  every local filesystem. Elsewhere the count is approximate.
* All methods may be called on any thread, and block on the directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import threading
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvshelf.backends import WriteMode
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import StorageError

#: Name of the ledger.
LEDGER: Final = ".kvshelf/use"
#: Seconds for which a scan is relied on.
RESCAN_SECONDS: Final = 3600.0

#: Number of the scan, when it was made, and the bytes that it found.
_HEAD: Final = struct.Struct("=qqq")
_CHANGE: Final = struct.Struct("=q")
# Without O_NONBLOCK a FIFO in its place would keep the thread.
_PLAIN: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | _PLAIN


@dataclass(frozen=True, slots=True)
class Use:
    """The state of a ledger.

    Attributes
    ----------
    scan : int
        Number of the last scan.
    scanned_at : int
        When that was, seconds since the epoch.
    used : int
        Bytes of all objects.
    end : int
        Size of the ledger.
    """

    scan: int
    scanned_at: int
    used: int
    end: int = _HEAD.size

    @property
    def is_recent(self) -> bool:
        """Whether the last scan is recent enough to rely on."""
        return abs(time.time() - self.scanned_at) < RESCAN_SECONDS


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
        #: What was read so far.
        self._known: Use | None = None

    @property
    def last_used(self) -> int | None:
        """The bytes that the last call of a method found. Does not block."""
        known = self._known
        return None if known is None else known.used

    def read(self) -> Use | None:
        """Return the state of the ledger; None when there is none, or it is damaged.

        Raises
        ------
        StorageError
            If it cannot be read.
        """
        with self._opened(os.O_RDONLY) as fd:
            return None if fd is None else self._catch_up(fd)

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
        while True:
            with self._opened(os.O_RDWR | os.O_APPEND) as fd:
                if fd is None:
                    return None
                os.write(fd, _CHANGE.pack(2 * change + removed))
                use = self._catch_up(fd)
                if self._is_current(fd):
                    return use
            # A new ledger was begun meanwhile, whose scan may have missed the object. To note it
            # twice does no harm.

    def restart(self, scanned: int, before: Use | None) -> None:
        """Begin a new ledger with the result of a scan, unless another process just did.

        Parameters
        ----------
        scanned : int
            Bytes of all objects that the scan found.
        before : Use or None
            What :meth:`read` returned before the scan. Objects that were written since then are
            added, whether the scan has seen them or not: the sum is rather too large than too
            small. If an object was removed since then, the ledger stays as it is.

        Raises
        ------
        StorageError
            If it could not be written.
        """
        late = 0
        with self._opened(os.O_RDONLY) as fd:
            if fd is None:
                self._publish(scanned, "create")
            elif self._is_ours(fd):
                use = self._catch_up(fd)
                if use is None:
                    self._publish(scanned, "replace")
                elif before is not None and before.scan == use.scan:
                    since = _changes(fd, before.end, use.end)
                    if not any(change & 1 for change in since):
                        self._publish(scanned + _written(since), "replace")
                        late = _written(_changes(fd, use.end, os.fstat(fd).st_size))
        if late:
            self.add(late)

    @contextmanager
    def _opened(self, flags: int) -> Iterator[int | None]:
        """Open the ledger for one thread; None when there is none. Translates errors."""
        with self._lock:
            try:
                fd = self._open(flags)
                if fd is None:
                    self._known = None
                try:
                    yield fd
                finally:
                    if fd is not None:
                        os.close(fd)
            except StorageError:
                raise
            except OSError as error:
                raise storage_error(error, "counting", self._path, writing=True) from error

    def _open(self, flags: int) -> int | None:
        """Open the ledger, not by a link and nothing but a file; None when there is none."""
        folder, _, base = self._path.rpartition("/")
        try:
            at = os.open(folder, _FOLDER)
            try:
                fd = os.open(base, flags | _PLAIN, dir_fd=at)
            finally:
                os.close(at)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            # The system reports this for a link, too.
            if os.path.islink(folder):
                raise OSError(errno.ELOOP, f"{folder} is a link; remove it") from None
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
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            # Filesystems without locks: the look below makes it unlikely only.
            pass
        return self._is_current(fd)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _publish(self, used: int, mode: WriteMode) -> None:
        # The number distinguishes this file from a later one that gets the same inode.
        head = _HEAD.pack(secrets.randbits(62), int(time.time()), used)
        self._backend.write(LEDGER, [head], mode)

    def _catch_up(self, fd: int) -> Use | None:
        """Read the new changes; None if the ledger is damaged: a torn append, a foreign file."""
        known, self._known = self._known, None
        size = os.fstat(fd).st_size
        head = os.pread(fd, _HEAD.size, 0)
        if len(head) < _HEAD.size or size % _CHANGE.size:
            return None
        scan, scanned_at, used = _HEAD.unpack(head)
        end = _HEAD.size
        if known is not None and known.scan == scan and known.end <= size:
            used, end = known.used, known.end
        used += sum(change >> 1 for change in _changes(fd, end, size))
        if used >= 0:
            self._known = Use(scan, scanned_at, used, size)
        return self._known


def _changes(fd: int, start: int, end: int) -> array[int]:
    """Return the changes noted in a part of a ledger: twice the bytes, odd for a removal."""
    found = array("q")
    data = os.pread(fd, end - start, start)
    found.frombytes(data[: len(data) // _CHANGE.size * _CHANGE.size])
    return found


def _written(changes: Iterable[int]) -> int:
    return sum(change >> 1 for change in changes if change > 0)
