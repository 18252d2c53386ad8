"""Times of files: uses recorded in access times, or in the ctime of files of other users.

Owns what is known of how a filesystem keeps the times that are set.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Final

from kvshelf.backends.base import Touched, check_name, temporary_name
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix_folders import Folders, libc
from kvshelf.backends.posix_mount import Mount, Root
from kvshelf.errors import NoSpaceStorageError, ObjectMissingError

#: A filesystem may know times no better than to so many seconds.
_COARSE_SECONDS: Final = 60.0

_AT_SYMLINK_NOFOLLOW: Final = 0x100
_UTIME_NOW: Final = (1 << 30) - 1
_UTIME_OMIT: Final = (1 << 30) - 2
_utimensat: Callable[..., int] | None = getattr(libc, "utimensat", None)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Times:
    """Records uses.

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

    def touch(self, name: str) -> Touched:
        """Set an access time, or the ctime of another user's file.

        Refused also where it is seen that this was said, and not done.
        """
        folder, _, base = check_name(name).rpartition("/")
        if self._root.read_only or self._kept is False:
            return Touched.REFUSED
        try:
            fd = self._folders.open(folder)
            try:
                before = None if self._kept else os.lstat(base, dir_fd=fd)
                try:
                    _touch(base, fd, both=self._sets_both)
                except PermissionError:
                    if not self._folders.may_link:
                        raise
                    _link_once(base, fd)
                    return Touched.TOUCHED
                if before is not None:
                    self._kept = _has_kept(before, os.lstat(base, dir_fd=fd))
                    return Touched.REFUSED if self._kept is False else Touched.TOUCHED
            finally:
                os.close(fd)
        except OSError as exc:
            error = storage_error(exc, "recording a use", name)
            passes = isinstance(error, ObjectMissingError | NoSpaceStorageError)
            if not (passes or error.retryable):
                return Touched.REFUSED
        return Touched.TOUCHED


def _has_kept(before: os.stat_result, after: os.stat_result) -> bool | None:
    """Whether an access time that was set between two looks was kept; None if that is not sure."""
    if after.st_atime_ns != before.st_atime_ns or after.st_atime_ns > after.st_mtime_ns:
        return True
    # To a coarse clock, a file that was just written has been used just now.
    return None if abs(time.time() - after.st_mtime) < _COARSE_SECONDS else False


def _link_once(base: str, dir_fd: int) -> None:
    """Set the ctime of a file by a second link to it, which only takes the right to write."""
    temporary = temporary_name(base)
    os.link(base, temporary, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
    os.unlink(temporary, dir_fd=dir_fd)


def _touch(base: str, dir_fd: int, *, both: bool) -> None:
    """Set the access time to now, and `both` times by name where the system cannot omit one."""
    if both or _utimensat is None:
        times = (time.time_ns(), os.lstat(base, dir_fd=dir_fd).st_mtime_ns)
        os.utime(base, ns=times, dir_fd=dir_fd, follow_symlinks=False)
        return
    times_spec = (_TimeSpec * 2)(_TimeSpec(0, _UTIME_NOW), _TimeSpec(0, _UTIME_OMIT))
    if _utimensat(dir_fd, base.encode(), times_spec, _AT_SYMLINK_NOFOLLOW):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), base)
