"""Objects as files below a directory: local disks, tmpfs, NFS, FUSE mounts.

:class:`PosixBackend` probes, reads, lists, touches and removes files. The mount and the identity of
its root are in :mod:`kvshelf.backends.posix_mount`, folders in
:mod:`kvshelf.backends.posix_folders`, publications in :mod:`kvshelf.backends.posix_publish`.

Contracts
---------
* An object appears whole or not at all: it is written to a temporary name in its folder, its size
  is checked, the file is closed, and only then it is linked (or renamed) to its name.
* The root's path may contain links, which are resolved once, when the backend is made. Below the
  root no link is followed, neither to a folder nor to a file.
* Every call resolves names from the root's path and keeps no folder open. A shelf that is deleted,
  moved or remounted while the process runs therefore needs no special handling.
* While another filesystem than at first is at the root's path, because that of the shelf was
  unmounted or another was mounted over it, every call fails. Nothing is written into a mount point.
* Files and folders get the permissions and the group of the root, whatever the umask, so that
  processes with other user ids share a shelf exactly as its root allows.
* A missing folder means a missing object. A file or link in the place of a *folder* is an error
  (:class:`~kvshelf.errors.PermanentStorageError`): no store could ever succeed there, so a silent
  miss would hide it.

Any number of threads may call any method. The shared state is a few flags; a race on them costs
at most one superfluous system call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import stat as stat_module
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from kvshelf.backends.base import (
    BEYOND_NAMES,
    NOT_REGULAR,
    Backend,
    BytesLike,
    Checked,
    DeleteResults,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResults,
    Touched,
    Whole,
    WriteMode,
    WriteResult,
    check_folder,
    check_name,
    delete_each,
    final_name,
    is_name,
    temporary_name,
)
from kvshelf.backends.native import can_read_files, read_whole_files
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix_folders import (
    READ,
    READ_NOATIME,
    SCAN,
    Folders,
    libc,
    not_regular,
)
from kvshelf.backends.posix_publish import Way, link, publish, rename, rename_noreplace
from kvshelf.errors import (
    ConfigError,
    NoSpaceStorageError,
    ObjectMissingError,
    ObjectNameError,
    PermanentStorageError,
    StorageError,
)

_DOTS: Final = frozenset(("", ".", ".."))
#: Where a smaller part is free a FUSE program is doubted, and a file of so many bytes shows it.
_LITTLE_PART: Final = 0.1
_TRIAL_BYTES: Final = 4 << 20
#: What the root of a filesystem has of its own, and only the system's administrator may open.
_LOST: Final = "lost+found"
#: Seconds for one probe, by kind of mount. Where other machines change the files as well, a fast
#: probe may have been answered from a cache that does not know the objects.
_LOCAL_PROBE_SECONDS: Final = 10e-6
_NETWORK_PROBE_SECONDS: Final = 1e-3
#: A filesystem may know times no better than to so many seconds.
_COARSE_SECONDS: Final = 60.0
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_UTIME_NOW: Final = (1 << 30) - 1
_UTIME_OMIT: Final = (1 << 30) - 2
_utimensat: Callable[..., int] | None = getattr(libc, "utimensat", None)


class PosixReader(Reader):
    """An open file; reads continue to see it after its name was replaced or removed."""

    def __init__(self, fd: int, size: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self.size = size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset`; fewer bytes only at the end of the file."""
        view = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        total = len(view)
        bytes_read = 0
        try:
            while bytes_read < total:
                count = os.preadv(
                    self._fd, (view[bytes_read:] if bytes_read else view,), offset + bytes_read
                )
                if not count:
                    break
                bytes_read += count
        except OSError as exc:
            raise storage_error(exc, "reading", self._path) from exc
        return bytes_read

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written, so nothing can be lost
                os.close(fd)


class PosixBackend(Backend):
    """Objects below one directory.

    Parameters
    ----------
    root : str or os.PathLike
        The directory; ``~`` is expanded, a relative path starts at the working directory, and
        links are resolved once, here.
    read_only : bool
        Refuse every change with :class:`~kvshelf.errors.ReadOnlyStorageError`.
    create : bool
        Make the root if it is missing, now or after it was deleted: the first time with mode 0700,
        or for the group of what is above, if that group and not everybody may write there; later
        with its previous mode and group. False: writes without a root fail.
    fsync : bool
        Flush each object and its folder to the disk before the write returns. Not needed for
        correctness: loads verify every object.
    keep_atime : bool
        Reads are not uses: they leave access times alone, of the files whose owner this user is.

    Raises
    ------
    ConfigError
        If `root` is not a directory.
    StorageError
        If the root could not be made or examined.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        read_only: bool = False,
        create: bool = True,
        fsync: bool = False,
        keep_atime: bool = False,
    ) -> None:
        given = os.path.expanduser(os.fspath(root))
        if not given or "\0" in given:
            raise ConfigError(f"{root!r} is not a path: expected a directory for the shelf")
        self.url = self._root = os.path.realpath(given)
        self._read_flags = READ_NOATIME if keep_atime else READ
        self._folders = Folders(self._root, read_only=read_only, create=create)
        try:
            self._folders.learn_root(make=create and not read_only)
        except PermanentStorageError as exc:
            if exc.errno != errno.ENOTDIR:
                raise
            raise ConfigError(
                f"{self._root!r} is not a directory: give the shelf a directory of its own"
            ) from exc
        mount = self._folders.find_mount()
        self._is_local = mount.local
        self._properties = Properties(
            filesystem=mount.kind,
            cache_seconds=mount.cache_seconds,
            concurrency=8 if mount.local else 32,
            probe_cost=_LOCAL_PROBE_SECONDS if mount.local else _NETWORK_PROBE_SECONDS,
            sets_aside=True,
            temporaries=True,
            local_path=self._root if mount.local else "",
        )
        self._fsync = fsync
        #: What gives a temporary its name, the best first. Those before one that works are dropped.
        self._ways: list[Way] = [link, rename_noreplace, rename]
        is_fuse = mount.kind.startswith("fuse")
        #: Whether the mount says that less is free when a file was written; None: not known.
        self._shows_writes = None if is_fuse else True
        # Some FUSE programs take UTIME_OMIT for a time, so both times are passed.
        self._sets_both_times = is_fuse
        #: Whether access times that are set are kept; None while that is not known.
        self._keeps_times: bool | None = True if mount.local else None
        # Some FUSE programs say 0 for every file: until they say more, sizes count.
        self._counts_blocks = not is_fuse

    def __repr__(self) -> str:
        return f"PosixBackend({self.url!r})"

    @property
    def root(self) -> str:
        """Absolute path of the root, links resolved."""
        return self._root

    @property
    def properties(self) -> Properties:
        """What callers may rely on at present; a refused write expires after a minute."""
        now: dict[str, Any] = {"read_only": self._folders.read_only, "shared": self._folders.shared}
        if any(getattr(self._properties, name) != value for name, value in now.items()):
            self._properties = replace(self._properties, **now)
        return self._properties

    # ------------------------------------------------------------------------------------- probes

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe many names; 2 µs each on a local disk if the names of a folder are adjacent."""
        answers: StatResults = []
        append = answers.append
        lstat = os.lstat
        last: str | None = None
        fd = -1
        folder_answer: StorageError | None = None
        try:
            for name in names:
                folder, _, base = name.rpartition("/")
                if base in _DOTS or name[0] == "/" or not base.isascii():
                    check_name(name)
                if folder != last:
                    if folder:
                        check_name(folder)
                    if fd >= 0:
                        os.close(fd)
                        fd = -1
                    last, folder_answer = folder, None
                    try:
                        fd = self._folders.open(folder)
                    except FileNotFoundError:
                        pass
                    except OSError as exc:
                        folder_answer = self._folders.error(exc, "probing", folder, writing=False)
                if fd < 0:
                    append(folder_answer)
                    continue
                try:
                    info = lstat(base, dir_fd=fd)
                except FileNotFoundError:
                    append(None)
                except OSError as exc:
                    append(storage_error(exc, "probing", self._folders.base + name))
                except ValueError as exc:  # an embedded NUL
                    raise ObjectNameError(f"{name!r} is not an object name: {exc}") from exc
                else:
                    if info.st_mode & 0o170000 == 0o100000:
                        append(info.st_size)
                    else:
                        append(NOT_REGULAR)
        finally:
            if fd >= 0:
                os.close(fd)
        return answers

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and times of the entry at `name`, without following links."""
        folder, _, base = check_name(name).rpartition("/")
        with self._folders.opened(folder, "probing", writing=False) as fd:
            try:
                return None if fd is None else self._row(name, os.lstat(base, dir_fd=fd))
            except FileNotFoundError:
                return None
            except OSError as exc:
                raise storage_error(exc, "probing", self._folders.base + name) from exc

    # -------------------------------------------------------------------------------------- reads

    def open(self, name: str) -> PosixReader:
        """Open one file; 4 µs on a local disk."""
        check_name(name)
        path = self._folders.base + name
        folder = name.rpartition("/")[0]
        try:
            try:
                fd = self._folders.open_file(name, self._read_flags)
            except PermissionError:
                if self._read_flags == READ:
                    raise
                # Another user's file, whose access time is set by reading it.
                fd = self._folders.open_file(name, READ)
        except OSError as exc:
            self._folders.check_at_times()
            if exc.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise storage_error(exc, "opening", path) from exc
            # Is it the object itself, or a folder on its path?
            try:
                os.close(self._folders.open(folder))
            except OSError as found:
                raise self._folders.error(found, "opening", folder, writing=False) from found
            raise not_regular(exc.errno, "a link, socket or device", path) from exc
        try:
            self._folders.check_at_times()
            info = os.fstat(fd)
        except OSError as exc:
            os.close(fd)
            raise storage_error(exc, "opening", path) from exc
        if not stat_module.S_ISREG(info.st_mode):
            os.close(fd)
            kind = "a folder" if stat_module.S_ISDIR(info.st_mode) else "a special file"
            raise not_regular(errno.EINVAL, kind, path)
        return PosixReader(fd, info.st_size, path)

    @property
    def reads_whole(self) -> bool:
        """Whether the compiled library is there, and the kernel has `openat2`."""
        return self._folders.has_openat2 and can_read_files()

    def read_whole(
        self,
        start: str,
        text: bytes,
        wholes: Sequence[Whole],
        buffers: Sequence[memoryview],
        seconds: float = math.inf,
    ) -> Checked | None:
        """Read and check files without the GIL."""
        if not self.reads_whole:
            return None
        # The ends alone are checked once for each.
        check_name(start + wholes[0].end)
        begin = self._folders.base + start
        checked = read_whole_files(begin, text, wholes, buffers, self._read_flags, seconds)
        # As after opening one: until then another filesystem may be mounted.
        self._folders.check_at_times()
        return checked

    # ------------------------------------------------------------------------------------- changes

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish `buffers` as one file, with a single `writev` if the kernel accepts it."""
        return publish(
            self._folders,
            name,
            buffers,
            mode,
            ways=self._ways,
            fsync=self._fsync,
            waits=not self._is_local,
        )

    def delete(self, names: Sequence[str]) -> DeleteResults:
        """Unlink files and links, and remove folders that are empty."""
        return delete_each(names, self._delete)

    def _delete(self, name: str) -> bool:
        self._folders.check_writable(name)
        folder, _, base = name.rpartition("/")
        with self._folders.opened(folder, "deleting", writing=True) as fd:
            if fd is None:
                return False
            try:
                os.unlink(base, dir_fd=fd)
            except FileNotFoundError:
                return False
            except OSError as exc:
                # Some systems say EPERM of folders.
                if exc.errno in (errno.EISDIR, errno.EPERM):
                    return self._delete_folder(name, base, fd, exc)
                raise self._folders.failed(exc, "deleting", name, writing=True) from exc
        return True

    def _delete_folder(self, name: str, base: str, fd: int, refused: OSError) -> bool:
        """Remove what is an empty folder, or `refused` to be unlinked for another reason."""
        try:
            os.rmdir(base, dir_fd=fd)
        except FileNotFoundError:
            return False
        except OSError as exc:
            if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
                path = self._folders.base + name
                raise not_regular(exc.errno, "a folder that is not empty", path) from exc
            why = refused if exc.errno == errno.ENOTDIR else exc
            raise self._folders.failed(why, "deleting", name, writing=True) from why
        return True

    def set_aside(self, name: str) -> bool:
        """Rename the entry at `name` to a temporary's name in its folder, whatever its type."""
        self._folders.check_writable(check_name(name))
        folder, _, base = name.rpartition("/")
        with self._folders.opened(folder, "moving", writing=True) as fd:
            if fd is None:
                return False
            try:
                os.rename(base, temporary_name(base), src_dir_fd=fd, dst_dir_fd=fd)
            except FileNotFoundError:
                return False
            except OSError as exc:
                raise self._folders.failed(exc, "moving", name, writing=True) from exc
        return True

    def touch(self, name: str, before: float = math.inf) -> Touched:
        """Set the access time to now; keep the modification time.

        Only the owner of a file may do so, whatever its permissions. Others link it to a
        temporary's name for a moment, which sets its ctime, where the root is writable for them.
        Some FUSE programs, such as rclone, say that they set a time and do nothing: where that is
        seen, it counts as refused.
        """
        folder, _, base = check_name(name).rpartition("/")
        if self._folders.read_only or self._keeps_times is False:
            return Touched.REFUSED
        try:
            with self._folders.opened(folder, "recording a use", writing=False) as fd:
                return Touched.TOUCHED if fd is None else self._touch(base, fd)
        except OSError as exc:
            error = storage_error(exc, "recording a use", name)
            passes = isinstance(error, ObjectMissingError | NoSpaceStorageError)
            return Touched.TOUCHED if passes or error.retryable else Touched.REFUSED

    def _touch(self, base: str, dir_fd: int) -> Touched:
        times = None if self._keeps_times else os.lstat(base, dir_fd=dir_fd)
        try:
            _set_access_time(base, dir_fd, both=self._sets_both_times)
        except PermissionError:
            if not self._folders.may_link:
                raise
            # A second link sets the ctime, and only takes the right to write.
            temporary = temporary_name(base)
            os.link(base, temporary, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
            os.unlink(temporary, dir_fd=dir_fd)
            return Touched.TOUCHED
        if times is None:
            return Touched.TOUCHED
        after = os.lstat(base, dir_fd=dir_fd)
        if after.st_atime_ns != times.st_atime_ns or after.st_atime_ns > after.st_mtime_ns:
            self._keeps_times = True
        elif abs(time.time() - after.st_mtime) >= _COARSE_SECONDS:
            # To a coarse clock, a file that was just written has been used just now.
            self._keeps_times = False
            return Touched.REFUSED
        return Touched.TOUCHED

    # ------------------------------------------------------------------------ listings, and others

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        start: str | None = None,
        end: str | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """Stream all objects below `prefix`, one open folder at a time."""
        check_folder(prefix)
        self._folders.check()
        first, last = start or "", end or BEYOND_NAMES
        pending = [prefix]
        while pending:
            folder = pending.pop()
            inside = folder + "/" if folder else ""
            for entry in self._scan(folder, hidden):
                if not first <= entry.name <= last:
                    continue
                is_temporary = entry.name[0] == "." and final_name(entry.name) is not None
                try:
                    if not is_temporary and entry.is_dir(follow_symlinks=False):
                        pending += [] if flat else [inside + entry.name]
                    elif is_temporary or entry.is_file(follow_symlinks=False):
                        yield self._row(inside + entry.name, entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    raise storage_error(exc, "listing", self._folders.base + inside) from exc
            first, last = "", BEYOND_NAMES

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        check_folder(prefix)
        self._folders.check()
        return sorted(entry.name for entry in self._scan(prefix) if _is_folder(entry))

    def _scan(self, folder: str, hidden: bool = False) -> Iterator[os.DirEntry[str]]:
        """Stream those entries of one folder that can be a shelf's; none if it is missing."""
        with self._folders.opened(folder, "listing", writing=False, flags=SCAN) as fd:
            if fd is None:
                return
            with os.scandir(fd) as entries:
                while True:
                    try:
                        entry = next(entries)
                    except StopIteration:
                        return
                    except OSError as exc:
                        raise storage_error(exc, "listing", self._folders.base + folder) from exc
                    name = entry.name
                    if (name[0] != "." or hidden) and is_name(name) and name != _LOST:
                        yield entry

    def _row(self, name: str, info: os.stat_result) -> ObjectInfo:
        """Return the row of a listing."""
        nbytes, blocks = info.st_size, info.st_blocks * 512
        if stat_module.S_ISREG(info.st_mode) and 0 < nbytes <= blocks:
            self._counts_blocks = True
        if self._counts_blocks:
            # A small file may lie in its entry, and a block of a large one be used in part.
            nbytes = min(nbytes, blocks + 4096)
        # Each link has its part.
        nbytes //= max(info.st_nlink, 1)
        return ObjectInfo(name, info.st_size, info.st_mtime, info.st_atime, info.st_ctime, nbytes)

    def space(self) -> Space | None:
        """Return what `statvfs` says of the root; None where it does not, or what is not true.

        Some FUSE programs always say the same. One that says that little is free is believed if a
        file of some size makes it less.
        """
        space = self._folders.space()
        if space is None or space.free > space.total * _LITTLE_PART:
            return space
        if self._shows_writes is None:
            name = temporary_name("space")
            try:
                self.write(name, [os.urandom(_TRIAL_BYTES)])
                after = self._folders.space()
                self._shows_writes = after is None or after.free < space.free
            except StorageError:
                self._shows_writes = True  # it may be full indeed
            delete_each([name], self._delete)
        return space if self._shows_writes else None


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_ACCESSED_NOW: Final = (_TimeSpec * 2)(_TimeSpec(0, _UTIME_NOW), _TimeSpec(0, _UTIME_OMIT))


def _set_access_time(base: str, dir_fd: int, *, both: bool) -> None:
    """Set the access time to now, and `both` times by name where the system cannot omit one.

    `os.utime` cannot say *now*. A server of files takes that from its own clock, and ages of a
    shelf go by that clock.
    """
    if both or _utimensat is None:
        times = (time.time_ns(), os.lstat(base, dir_fd=dir_fd).st_mtime_ns)
        os.utime(base, ns=times, dir_fd=dir_fd, follow_symlinks=False)
    elif _utimensat(dir_fd, base.encode(), _ACCESSED_NOW, _AT_SYMLINK_NOFOLLOW):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), base)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
