"""Notices of what appears in single folders of a storage.

Owns what a reader of notices can rely on (:class:`Notices`), and the notices of a local directory
(:class:`FolderNotices`, by inotify): the watches of one reader, and nothing that was read. A folder
that does not exist yet is watched through the nearest parent that does. Folders below a watched one
are not watched.

Contracts
---------
* One thread at a time uses an object. Only :meth:`Notices.watch` touches the storage.
* Nothing is promised: watches are limited by the system, and a folder can be moved away. A
  reader of notices also probes for what it waits for, less often.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from typing import Final, Protocol

_IN_MOVED_TO: Final = 0x80
_IN_CREATE: Final = 0x100
_IN_Q_OVERFLOW: Final = 0x4000
_IN_IGNORED: Final = 0x8000
_IN_ONLYDIR: Final = 0x01000000
_IN_DONT_FOLLOW: Final = 0x02000000
_IN_ISDIR: Final = 0x40000000
#: A file gets its name by a link or a rename, a folder by being made.
_MASK: Final = _IN_CREATE | _IN_MOVED_TO | _IN_ONLYDIR | _IN_DONT_FOLLOW
_EVENT: Final = struct.Struct("iIII")
_READ_BYTES: Final = 1 << 16

_libc: Final = ctypes.CDLL(None, use_errno=True)


class Notices(Protocol):
    """Says what appears in some folders of a storage."""

    def fileno(self) -> int:
        """Return a file descriptor that is readable when :meth:`appeared` has something to say."""

    def watch(self, folders: Iterable[str]) -> tuple[set[str], set[str]]:
        """Watch these folders, and no others any more. May block on the storage.

        Parameters
        ----------
        folders : iterable of str
            Names relative to the storage's root.

        Returns
        -------
        fresh : set of str
            Of `folders` those that were not watched before. What has appeared in them until now is
            not reported.
        unwatched : set of str
            Of `folders` those in which things may appear without a notice.
        """

    def appeared(self) -> set[str] | None:
        """Return what has appeared since the last call, without waiting.

        Returns
        -------
        set of str or None
            Names relative to the storage's root. A name that ends with a slash is a folder in which
            anything may have appeared. None: anything may have appeared anywhere.
        """

    def close(self) -> None:
        """End all watches. Idempotent."""


class FolderNotices:
    """Says what appears in some folders of a local directory.

    Parameters
    ----------
    root : str
        Absolute path that the names of folders and files begin at.

    Raises
    ------
    OSError
        If the system has no inotify, or allows this user no more readers.
    """

    def __init__(self, root: str) -> None:
        if not hasattr(_libc, "inotify_init1"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._base = root.rstrip("/") + "/"
        self._fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "inotify")
        self._numbers: dict[str, int] = {}
        self._folders: dict[int, str] = {}
        self._added = 0
        #: Folders that do not exist, by their parents that are watched: not to be tried again until
        #: the parent reports them.
        self._absent: dict[str, set[str]] = {}

    def fileno(self) -> int:
        """Return a file descriptor that is readable when :meth:`appeared` has something to say."""
        return self._fd

    def watch(self, folders: Iterable[str]) -> tuple[set[str], set[str]]:
        """Watch these folders, and no others any more.

        Parameters
        ----------
        folders : iterable of str
            Names relative to the root.

        Returns
        -------
        fresh : set of str
            Of `folders` those that were not watched before. What has appeared in them until now is
            not reported.
        unwatched : set of str
            Of `folders` those that the system does not let watch.
        """
        fresh: set[str] = set()
        unwatched: set[str] = set()
        wanted: set[str] = set()
        for folder in folders:
            added = self._added
            try:
                wanted.add(self._reach(folder))
            except OSError:
                unwatched.add(folder)
            else:
                if self._added > added:
                    fresh.add(folder)
        for folder in self._numbers.keys() - wanted:
            number = self._numbers.pop(folder)
            del self._folders[number]
            self._absent.pop(folder, None)
            # It fails where the folder is gone.
            _libc.inotify_rm_watch(self._fd, number)
        return fresh, unwatched

    def _reach(self, folder: str) -> str:
        """Watch a folder or, where it does not exist, the nearest parent; return which."""
        if folder in self._numbers:
            return folder
        parent = folder.rpartition("/")[0]
        if folder in self._absent.get(parent, ()):
            return parent
        known = parent in self._numbers
        try:
            return self._add(folder)
        except FileNotFoundError:
            if not folder:
                raise
        reached = self._reach(parent)
        if reached == parent:
            if not known:
                # The folder may have been made before its parent was watched.
                with contextlib.suppress(FileNotFoundError):
                    return self._add(folder)
            self._absent.setdefault(parent, set()).add(folder)
        return reached

    def _add(self, folder: str) -> str:
        path = os.fsencode(self._base + folder)
        number: int = _libc.inotify_add_watch(self._fd, path, ctypes.c_uint32(_MASK))
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), self._base + folder)
        # A folder that was renamed is watched under its old name.
        old = self._folders.get(number)
        if old is not None:
            del self._numbers[old]
            self._absent.pop(old, None)
        self._numbers[folder], self._folders[number] = number, folder
        self._added += 1
        return folder

    def appeared(self) -> set[str] | None:
        """Return what has appeared since the last call, without waiting.

        Returns
        -------
        set of str or None
            Names relative to the root; temporaries are left out. A name that ends with a slash is
            a folder: one that was made, or one that is watched no longer because it is gone. None:
            some were lost; anything may have appeared.
        """
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return set()
        names: set[str] = set()
        place = 0
        while place < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, place)
            place += _EVENT.size
            base = data[place : place + length].rstrip(b"\0")
            place += length
            if mask & _IN_Q_OVERFLOW:
                self._absent.clear()
                return None
            folder = self._folders.get(number)
            if folder is None:
                # Its watch was taken away meanwhile.
                continue
            if mask & _IN_IGNORED:
                del self._folders[number]
                self._numbers.pop(folder, None)
                self._absent.pop(folder, None)
                names.add(folder + "/")
            elif not base.startswith(b"."):
                name = f"{folder}/{os.fsdecode(base)}" if folder else os.fsdecode(base)
                if mask & _IN_ISDIR:
                    self._absent.get(folder, set()).discard(name)
                    name += "/"
                names.add(name)
        return names

    def close(self) -> None:
        """End all watches. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
