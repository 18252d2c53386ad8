"""Folders below the root of a shelf: opened without following links, made, and given away.

Owns the rule that no symbolic link inside a shelf is followed, and the permissions and the group of
what is made: those of the root, whatever the umask.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat as stat_module
from collections.abc import Iterator
from typing import Final

from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix_mount import Root, enter
from kvshelf.errors import (
    NotRegularError,
    PermanentStorageError,
    StorageError,
    UnavailableStorageError,
)

#: How folders and files are opened: to find entries in a folder, to list it, to read a file, and
#: to do that without setting its access time.
FOLDER: Final[int] = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
SCAN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
READ_NOATIME: Final[int] = READ | getattr(os, "O_NOATIME", 0)

_AT_FDCWD: Final = -100
_SYS_OPENAT2: Final = 437  # the same number on every Linux architecture but alpha
_RESOLVE_NO_SYMLINKS: Final = 0x04

#: The C library. Its system calls release the GIL.
libc: Final = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def _open_how(flags: int) -> tuple[_OpenHow, object]:
    how = _OpenHow(flags, 0, _RESOLVE_NO_SYMLINKS)
    return how, ctypes.byref(how)


_HOWS: Final = {flags: _open_how(flags) for flags in (FOLDER, SCAN, READ, READ_NOATIME)}
_HOW_SIZE: Final = ctypes.c_size_t(ctypes.sizeof(_OpenHow))
_NUMBER: Final = ctypes.c_long(_SYS_OPENAT2)


def openat2(path: str, flags: int) -> int:
    """Open an absolute path without any symbolic link in it (else ELOOP)."""
    encoded, how = os.fsencode(path), _HOWS[flags]
    while True:
        fd: int = libc.syscall(_NUMBER, _AT_FDCWD, encoded, how[1], _HOW_SIZE)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), path)


def has_openat2() -> bool:
    """Whether this kernel has it, and no sandbox blocks it."""
    if os.uname().sysname != "Linux" or os.uname().machine == "alpha":
        return False
    try:
        os.close(openat2("/", FOLDER))
    except OSError:
        return False
    return True


class Folders(Root):
    """The root of a shelf and the folders below it.

    Parameters
    ----------
    path, read_only
        As for :class:`~kvshelf.backends.posix_mount.Root`.
    create : bool
        Make the root if it is missing.

    Attributes
    ----------
    has_openat2 : bool
        Paths are opened by one system call each.
    file_mode : int
        The permissions of new files.
    """

    @property
    def shared(self) -> bool:
        """Whether others than the owner of the root may write."""
        return bool(self._mode & 0o022)

    @property
    def may_link(self) -> bool:
        """Whether others may link files here and remove the links again."""
        return self.shared and not self._mode & stat_module.S_ISVTX

    def __init__(self, path: str, *, read_only: bool, create: bool) -> None:
        super().__init__(path, read_only=read_only)
        self._create = create
        self._mode = 0o700
        self._gid = -1
        self.file_mode = 0o600
        self.has_openat2 = has_openat2()

    # -------------------------------------------------------------------------------------- making

    def learn_root(self, *, make: bool) -> None:
        """Read mode and group of the root, make it if requested; detect a read-only mount."""
        root = self.path
        writing = False
        if self._gid == -1:
            enter(root)
        try:
            try:
                info = os.stat(root)
            except FileNotFoundError:
                if not make:
                    return
                writing = True
                parent = os.path.dirname(root)
                os.makedirs(parent, exist_ok=True)
                info = os.stat(parent)
                # What everybody may write to, as /tmp, is no group's.
                if self._gid == -1 and info.st_mode & 0o022 == 0o020:
                    self._mode, self._gid = 0o700 | info.st_mode & 0o2070, info.st_gid
                with contextlib.suppress(FileExistsError):
                    os.mkdir(root, self._mode)
                    self._give(root, self._mode)
                info = os.stat(root)
            if not stat_module.S_ISDIR(info.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "the shelf's root is a file", root)
            if not os.access(root, os.R_OK | os.X_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, "permission denied", root)
            self._mode = stat_module.S_IMODE(info.st_mode)
            self.file_mode = self._mode & 0o666
            self._gid = info.st_gid
            self.learn(info)
        except OSError as exc:
            if exc.errno == errno.EACCES:
                exc.strerror = f"{exc.strerror}: {_whose(root)}"
            raise storage_error(exc, "opening the shelf", root, writing=writing) from exc

    def give_file(self, fd: int) -> None:
        """Give a new file the group and mode of the root, as far as possible."""
        self._give(fd, self.file_mode)

    def _give(self, target: str | int, wanted: int) -> None:
        info = os.stat(target)
        if self._gid not in (-1, info.st_gid):
            with contextlib.suppress(OSError):
                os.chown(target, -1, self._gid)
        # Only add the bits that the umask removed: a default ACL may have granted more.
        if wanted & ~stat_module.S_IMODE(info.st_mode):
            with contextlib.suppress(OSError):
                os.chmod(target, wanted)

    def _give_folder(self, part: str, dir_fd: int) -> None:
        # chmod cannot refuse links, but opening a descriptor can.
        try:
            fd = os.open(part, SCAN | os.O_NOFOLLOW, dir_fd=dir_fd)
        except OSError:
            return  # the root's mode has no read permission
        try:
            self._give(fd, self._mode)
        finally:
            os.close(fd)

    def make(self, folder: str) -> int:
        """Like :meth:`open`, but make missing folders, the root included."""
        root = self.path
        # Without a lock: one folder that hangs must not delay the others, and all of it may be done
        # twice.
        self.check()
        if not self._create and not os.path.isdir(root):
            raise PermanentStorageError(
                errno.ENOENT, "the shelf's root is gone; make or mount it again", root
            )
        self.learn_root(make=True)
        fd = os.open(root, FOLDER)
        try:
            for part in folder.split("/") if folder else ():
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, self._mode, dir_fd=fd)
                    self._give_folder(part, fd)
                inner = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd

    # ------------------------------------------------------------------------------------- opening

    def open(self, folder: str, flags: int = FOLDER) -> int:
        """Open a folder below the root without following links; OSError on failure."""
        try:
            fd = self._open_below(folder, flags)
        except OSError:
            self.check_at_times()
            raise
        # Only now: until then another filesystem may be mounted.
        try:
            self.check_at_times()
        except UnavailableStorageError:
            os.close(fd)
            raise
        return fd

    def _open_below(self, folder: str, flags: int) -> int:
        if self.has_openat2:
            return openat2(self.base + folder, flags)
        fd = os.open(self.path, flags if not folder else FOLDER)
        parts = folder.split("/") if folder else []
        try:
            for position, part in enumerate(parts, 1):
                open_flags = (flags if position == len(parts) else FOLDER) | os.O_NOFOLLOW
                inner = os.open(part, open_flags, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_file(self, name: str, flags: int) -> int:
        """Open a file below the root without following links; OSError on failure."""
        if self.has_openat2:
            return openat2(self.base + name, flags)
        folder, _, base = name.rpartition("/")
        folder_fd = self._open_below(folder, FOLDER)
        try:
            return os.open(base, flags, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)

    def open_to_put(self, folder: str, *, make: bool) -> int:
        """Open a folder for a new entry; FileNotFoundError if it is missing and not made."""
        try:
            return self.make(folder) if make else self.open(folder)
        except (StorageError, FileNotFoundError):
            raise
        except OSError as exc:
            raise self.error(exc, "writing", folder, writing=True) from exc

    @contextlib.contextmanager
    def opened(
        self, folder: str, what: str, *, writing: bool, flags: int = FOLDER
    ) -> Iterator[int | None]:
        """Open a folder to look at its entries or, `writing`, to change them; None if missing."""
        try:
            fd = self.open(folder, flags)
        except FileNotFoundError:
            yield None
            return
        except OSError as exc:
            raise self.error(exc, what, folder, writing=writing) from exc
        try:
            if writing:
                self.check()
            yield fd
        finally:
            os.close(fd)

    def error(self, exc: OSError, what: str, folder: str, *, writing: bool) -> StorageError:
        """Return the error for a folder that could not be opened; it names the offending part."""
        if isinstance(exc, StorageError) or exc.errno not in (errno.ELOOP, errno.ENOTDIR):
            return self.failed(exc, what, folder, writing=writing)
        path = self.path
        for part in ["", *folder.split("/")]:
            path = os.path.join(path, part) if part else path
            try:
                mode = os.lstat(path).st_mode
            except OSError:
                break
            if not stat_module.S_ISDIR(mode):
                entry = "a symbolic link" if stat_module.S_ISLNK(mode) else "a file"
                text = f"{entry} is in the place of a folder of the shelf; remove it"
                return PermanentStorageError(exc.errno, f"{what} failed: {text}", path)
        text = "the path to its root now contains a link; open the shelf again"
        return PermanentStorageError(exc.errno, f"{what} failed: {text}", self.path)


def _whose(path: str) -> str:
    """Say of a folder, or of the one above that can be looked at, who may enter it."""
    while True:
        with contextlib.suppress(OSError):
            info = os.stat(path)
            return (
                f"{path} belongs to user {info.st_uid} and group {info.st_gid}, with mode"
                f" {stat_module.S_IMODE(info.st_mode):o}, and this is user {os.geteuid()} of group"
                f" {os.getegid()}; let a group of both enter and write (chmod g+rwxs), or make the"
                " folder beforehand for it"
            )
        path = os.path.dirname(path)


def not_regular(code: int | None, found: str, path: str) -> NotRegularError:
    """Return the error for what is no object."""
    return NotRegularError(
        code, f"found {found} where an object (a regular file) was expected", path
    )


def occupied(base: str, dir_fd: int) -> bool:
    """Whether there is an entry of any type."""
    try:
        os.lstat(base, dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    return True
