"""Times of files: uses recorded in access times, and the clock of the storage.

Owns what is known of how a filesystem keeps the times that are set.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable
from typing import Final

from kvshelf.backends.base import CLOCK_FOLDER, Touched, check_name, temporary_name
from kvshelf.backends.clock import StorageClock
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix_folders import Folders, libc
from kvshelf.backends.posix_mount import Mount, Root
from kvshelf.backends.posix_publish import CREATE, NO_LINKS
from kvshelf.errors import NoSpaceStorageError, ReadOnlyStorageError

#: Errors of `utimensat` if this user may not set the times, or the filesystem has none.
_NO_TIMES: Final = frozenset((errno.EACCES, errno.EROFS, *NO_LINKS))
#: A filesystem may know times no better than to so many seconds.
_COARSE_SECONDS: Final = 60.0

_AT_SYMLINK_NOFOLLOW: Final = 0x100
_UTIME_NOW: Final = (1 << 30) - 1
_UTIME_OMIT: Final = (1 << 30) - 2
_utimensat: Callable[..., int] | None = getattr(libc, "utimensat", None)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Times:
    """Sets access times, and reports the storage's time.

    Parameters
    ----------
    root : Root
    folders : Folders
    mount : Mount
        What holds the root.
    """

    def __init__(self, root: Root, folders: Folders, mount: Mount) -> None:
        self._root = root
        self._folders = folders
        # Some FUSE programs take UTIME_OMIT for a time, so pass both times explicitly.
        self._sets_both = mount.kind.startswith("fuse")
        #: Whether access times that are set are kept; None while that is not known.
        self._kept = True if mount.local else None
        self._clock = StorageClock(self.now)

    def touch(self, name: str) -> Touched:
        """Set an access time; refused also where it is seen that this was said, and not done."""
        folder, _, base = check_name(name).rpartition("/")
        if self._root.read_only or self._kept is False:
            return Touched.REFUSED
        try:
            fd = self._folders.open(folder)
            try:
                before = None if self._kept else os.lstat(base, dir_fd=fd)
                _touch(base, fd, self._clock.now() if self._sets_both else None)
                if before is not None:
                    after = os.lstat(base, dir_fd=fd)
                    self._kept = _has_kept(before, after, self._clock.now())
                    return Touched.REFUSED if self._kept is False else Touched.TOUCHED
            finally:
                os.close(fd)
        except OSError as exc:
            if exc.errno in _NO_TIMES:
                return Touched.REFUSED
        return Touched.TOUCHED

    def now(self) -> float | None:
        """Create a temporary, look at its time, and remove it."""
        if self._root.read_only:
            return None
        try:
            try:
                folder = self._folders.open(CLOCK_FOLDER)
            except FileNotFoundError:
                folder = self._folders.make(CLOCK_FOLDER)
            try:
                self._root.check()
                return self._time_of_a_new_file(folder)
            finally:
                os.close(folder)
        except OSError as exc:
            error = self._folders.error(exc, "asking for the time", CLOCK_FOLDER, writing=True)
            if isinstance(error, ReadOnlyStorageError):
                return None
            if not isinstance(error, NoSpaceStorageError):
                raise error from exc
            return self._time_of_the_root()

    def _time_of_a_new_file(self, dir_fd: int) -> float:
        temporary = temporary_name("now")
        fd = os.open(temporary, CREATE, self._folders.file_mode, dir_fd=dir_fd)
        try:
            # Some filesystems make an empty file only after it was closed and removed.
            os.write(fd, b"1")
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):  # sweeps remove it later
                os.unlink(temporary, dir_fd=dir_fd)

    def _time_of_the_root(self) -> float | None:
        """Set the root's times to now: a full filesystem takes no new file, but takes this."""
        if self._sets_both:
            return None
        try:
            os.utime(self._root.path)
            return os.stat(self._root.path).st_mtime
        except OSError as exc:
            error = storage_error(exc, "asking for the time", self._root.path, writing=True)
            if isinstance(error, ReadOnlyStorageError | NoSpaceStorageError):
                return None
            raise error from exc


def _has_kept(before: os.stat_result, after: os.stat_result, now: float) -> bool | None:
    """Whether an access time that was set between two looks was kept; None if that is not sure."""
    if after.st_atime_ns != before.st_atime_ns or after.st_atime_ns > after.st_mtime_ns:
        return True
    # To a coarse clock, a file that was just written has been used just now.
    return None if abs(now - after.st_mtime) < _COARSE_SECONDS else False


def _touch(base: str, dir_fd: int, now: float | None) -> None:
    """Set the access time to `now`, or to what the kernel takes for now."""
    if now is not None or _utimensat is None:
        info = os.lstat(base, dir_fd=dir_fd)
        times = (int((time.time() if now is None else now) * 1e9), info.st_mtime_ns)
        os.utime(base, ns=times, dir_fd=dir_fd, follow_symlinks=False)
        return
    times_spec = (_TimeSpec * 2)(_TimeSpec(0, _UTIME_NOW), _TimeSpec(0, _UTIME_OMIT))
    if _utimensat(dir_fd, base.encode(), times_spec, _AT_SYMLINK_NOFOLLOW):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), base)
