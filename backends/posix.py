"""Objects as files below a directory: local disks, tmpfs, NFS, FUSE mounts.

Owns the publish protocol, the rule that no symbolic link inside a shelf is followed, and the
facts about each kind of filesystem.

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
import re
import stat as stat_module
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from kvshelf.backends.base import (
    CLOCK_FOLDER,
    HIGH_LATENCY_SECONDS,
    NOT_REGULAR,
    Backend,
    BytesLike,
    Checked,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResults,
    Touched,
    Whole,
    WriteMode,
    WriteResult,
    check_name,
    final_name,
    temporary_name,
    time_for_ages,
)
from kvshelf.backends.native import can_read_files, read_whole_files
from kvshelf.backends.notices import FolderNotices
from kvshelf.backends.oserrors import storage_error

from kvshelf.errors import (
    ConfigError,
    NoSpaceStorageError,
    NotRegularError,
    ObjectNameError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
    UnavailableStorageError,
)

#: Seconds for which writes fail at once after the storage refused one.
READ_ONLY_MEMORY: Final = 60.0

_O_PATH: Final[int] = getattr(os, "O_PATH", os.O_RDONLY)
_FOLDER: Final = _O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER_NOFOLLOW: Final = _FOLDER | os.O_NOFOLLOW
_SCAN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ_NOATIME: Final[int] = _READ | getattr(os, "O_NOATIME", 0)
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_IOV_MAX: Final = max(16, os.sysconf("SC_IOV_MAX"))
_DOTS: Final = frozenset(("", ".", ".."))
#: Ways to publish, the best first; a backend only ever moves down this list.
_LINK, _NOREPLACE, _RENAME = range(3)
#: Seconds from one check of what is mounted at the root to the next, by calls that change nothing.
_CHECK_SECONDS: Final = 0.05
#: Seconds for which an unchanged device number shows that nothing else was mounted.
_MOUNT_SECONDS: Final = 10.0
#: Seconds for which the difference between two clocks is believed.
_APART_SECONDS: Final = 600.0
#: Number of entries of one folder that a sweep examines.
_SWEEP_ENTRIES: Final = 65536

#: Errors of `link` if the filesystem has no hard links.
_NO_LINKS: Final = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS))
#: Errors of `utimensat` if this user may not set the times, or the filesystem has none.
_NO_TIMES: Final = frozenset((errno.EACCES, errno.EROFS, *_NO_LINKS))
#: A filesystem may know times no better than to so many seconds.
_COARSE_SECONDS: Final = 60.0
#: Errors of `renameat2` if the filesystem does not support RENAME_NOREPLACE.
_NO_NOREPLACE: Final = frozenset((errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))

# ------------------------------------------------------------- system calls Python does not have


class _OpenHow(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_AT_FDCWD: Final = -100
_SYS_OPENAT2: Final = 437  # the same number on every Linux architecture but alpha
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RENAME_NOREPLACE: Final = 1
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_UTIME_NOW: Final = (1 << 30) - 1
_UTIME_OMIT: Final = (1 << 30) - 2

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_renameat2: Callable[..., int] | None = getattr(_libc, "renameat2", None)
_utimensat: Callable[..., int] | None = getattr(_libc, "utimensat", None)


def _raise_errno(path: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), path)


def _open_how(flags: int) -> tuple[_OpenHow, object]:
    how = _OpenHow(flags, 0, _RESOLVE_NO_SYMLINKS)
    return how, ctypes.byref(how)


_HOWS: Final = {flags: _open_how(flags) for flags in (_FOLDER, _SCAN, _READ, _READ_NOATIME)}
_HOW_SIZE: Final = ctypes.c_size_t(ctypes.sizeof(_OpenHow))
_NUMBER: Final = ctypes.c_long(_SYS_OPENAT2)


def _openat2(path: str, flags: int) -> int:
    """Open an absolute path without any symbolic link in it (else ELOOP)."""
    encoded, how = os.fsencode(path), _HOWS[flags]
    while True:
        fd: int = _libc.syscall(_NUMBER, _AT_FDCWD, encoded, how[1], _HOW_SIZE)
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code), path)


def _has_openat2() -> bool:
    if os.uname().sysname != "Linux" or os.uname().machine == "alpha":
        return False
    try:
        os.close(_openat2("/", _FOLDER))
    except OSError:
        return False  # an old kernel, or a sandbox that blocks the system call
    return True


def _rename_noreplace(source: str, target: str, dir_fd: int) -> None:
    """Call `renameat2` in one folder with RENAME_NOREPLACE; EEXIST if `target` exists."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
    if _renameat2(dir_fd, source.encode(), dir_fd, target.encode(), _RENAME_NOREPLACE):
        _raise_errno(target)


# ----------------------------------------------------------------------------------- filesystem

#: Filesystems whose only client is this machine's kernel, so that no cache is outdated.
_LOCAL: Final = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs"),
        *("tmpfs", "ramfs", "overlay", "apfs", "hfs", "ufs", "vfat", "exfat"),
    )
)
#: Filesystems in the host's memory.
_MEMORY: Final = frozenset(("tmpfs", "ramfs"))
#: Seconds for which a client's caches may be outdated by default: attribute caches of NFS and SMB,
#: metadata caches of FUSE programs.
_CACHE_SECONDS: Final = {
    # Clients of these hold locks on what they cache.
    **dict.fromkeys(("lustre", "gpfs", "ceph", "gfs2", "ocfs2"), 0.0),
    **dict.fromkeys(("cifs", "smb3", "beegfs", "wekafs", "virtiofs", "fuse.juicefs"), 1.0),
    "fuse.sshfs": 20.0,
    "fuse.rclone": 300.0,
}
_USUAL_CACHE_SECONDS: Final = 60.0
#: Filesystems on which a reader may see parts of an object and of its replacement.
_TORN: Final = frozenset(("fuse.rclone",))
_ATTRIBUTE_CACHES: Final = frozenset(("nfs", "nfs4", "cifs", "smb3"))
#: Upper bound of a local mount's probe cost. That of any other mount is at least
#: :data:`HIGH_LATENCY_SECONDS`.
_LOCAL_PROBE_SECONDS: Final = HIGH_LATENCY_SECONDS / 2
_MEASURED_PROBES: Final = 5
#: Time budget of the measurement, in seconds.
_MEASURE_SECONDS: Final = 10e-3


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that holds a path.

    Attributes
    ----------
    kind : str
        The kernel's name for the filesystem, such as ``ext4`` or ``fuse.rclone``; or
        ``unknown``.
    options : frozenset of str
        Of the mount and of the filesystem, such as ``ro`` or ``acdirmax=5``.
    point : str
        Where it is mounted; empty if that is unknown.
    source : str
        What is mounted there: a device, ``server:/export``, or a name.
    """

    kind: str = "unknown"
    options: frozenset[str] = frozenset()
    point: str = ""
    source: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.source!r} at {self.point!r}"

    def has_source_of(self, other: Mount) -> bool:
        """Whether what is mounted is the same as for `other`."""
        return (self.kind, self.source) == (other.kind, other.source)

    @property
    def local(self) -> bool:
        """Whether this machine's kernel is the only one that changes the files."""
        return self.kind in _LOCAL

    @property
    def cache_seconds(self) -> float:
        """Seconds for which the mount may give outdated answers."""
        if self.local:
            return 0.0
        if self.kind in _ATTRIBUTE_CACHES:
            if "noac" in self.options:
                return 0.0
            named = (option.partition("=") for option in self.options)
            limits = ("actimeo", "acregmax", "acdirmax")
            said = {name: float(value) for name, _, value in named if name in limits}
            if "actimeo" in said:
                return said["actimeo"]
            usual = _CACHE_SECONDS.get(self.kind, _USUAL_CACHE_SECONDS)
            return max(said.get(limit, usual) for limit in ("acregmax", "acdirmax"))
        return _CACHE_SECONDS.get(self.kind, _USUAL_CACHE_SECONDS)


def find_mount(path: str) -> Mount:
    """Return the mount that holds an absolute path without links.

    Reads the kernel's table and never the filesystem, so that it works for a mount that hangs.
    """
    best, found = "", Mount()
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                before, _, behind = line.partition(" - ")
                fields, rest = before.split(" "), behind.split()
                mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
                inside = path == mount or path.startswith(mount.rstrip("/") + "/")
                # Of several mounts on one mount point, the last line is the topmost.
                if inside and len(mount) >= len(best):
                    options = [*fields[5].split(","), *rest[-1].split(",")]
                    best, found = mount, Mount(rest[0], frozenset(options), mount, rest[1])
    except (OSError, IndexError):
        return found
    return found


# --------------------------------------------------------------------------------------- reader


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
        done = 0
        try:
            while done < total:
                count = os.preadv(self._fd, (view[done:] if done else view,), offset + done)
                if not count:
                    break
                done += count
        except OSError as exc:
            raise storage_error(exc, "reading", self._path) from exc
        return done

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written, so nothing can be lost
                os.close(fd)


# -------------------------------------------------------------------------------------- backend


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
        Make the root if it is missing, now or after it was deleted: with mode 0700 the first
        time, later with its previous mode and group. False: writes without a root fail.
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
        self._root = os.path.realpath(given)
        self._base = self._root.rstrip("/") + "/"
        self.url = self._root
        self._option_read_only = read_only
        self._create = create
        self._fsync = fsync
        self._read_flags = _READ_NOATIME if keep_atime else _READ
        self._openat2 = _has_openat2()
        self._how = _LINK
        self._refused_until = 0.0
        self._lock = threading.Lock()
        self._folder_mode = 0o700
        self._file_mode = 0o600
        self._gid = -1
        #: Device and mount of the root, once it has been seen.
        self._device: int | None = None
        self._mount = Mount()
        #: How long the last look at the mount, and the last check at all, are good for.
        self._mount_until = 0.0
        self._checked_until = 0.0
        try:
            self._learn_root(make=create and not read_only)
        except PermanentStorageError as exc:
            if exc.errno != errno.ENOTDIR:
                raise
            raise ConfigError(
                f"{self._root!r} is not a directory: give the shelf a directory of its own"
            ) from exc
        mount = find_mount(self._root)
        # Some FUSE programs take UTIME_OMIT for a time, so pass both times explicitly.
        self._sets_both_times = mount.kind.startswith("fuse")
        #: Seconds by which the storage's clock is ahead of this machine's, as of the last look.
        self._apart = 0.0
        self._apart_until = 0.0
        self._in_memory = mount.kind in _MEMORY
        #: Whether access times that are set are kept; None while that is not known.
        self._keeps_access_times = True if mount.local else None
        self._properties = Properties(
            filesystem=mount.kind,
            atomic_publish=mount.kind not in _TORN,
            notifications=mount.local,
            cache_seconds=mount.cache_seconds,
            links=True,
            concurrency=8 if mount.local else 32,
            probe_cost=self._probe_cost(mount),
            can_quarantine=True,
            temporaries=True,
        )

    def __repr__(self) -> str:
        return f"PosixBackend({self.url!r})"

    @property
    def root(self) -> str:
        """Absolute path of the root, links resolved."""
        return self._root

    @property
    def properties(self) -> Properties:
        """What callers may rely on at present; a refused write expires after a minute."""
        refused = self._option_read_only or time.monotonic() < self._refused_until
        conditional, links = self._how != _RENAME, self._how == _LINK
        known = self._properties
        if (known.read_only, known.conditional_create, known.links) != (
            refused,
            conditional,
            links,
        ):
            self._properties = known = replace(
                known, read_only=refused, conditional_create=conditional, links=links
            )
        return known

    def _probe_cost(self, mount: Mount) -> float:
        """Measure a probe, in seconds: the fastest of a few, for names that no cache can know."""
        best = math.inf
        end = time.perf_counter() + _MEASURE_SECONDS
        for _ in range(_MEASURED_PROBES):
            path = f"{self._base}.{os.urandom(8).hex()}"
            begin = time.perf_counter()
            try:
                os.lstat(path)
            except FileNotFoundError:
                best = min(best, time.perf_counter() - begin)
            except OSError:
                break
            if begin > end:
                break
        # On a local filesystem a slow probe was disturbed by other work. On any other, a fast
        # one may have been answered from a cache that does not know the objects.
        if mount.local:
            return min(best, _LOCAL_PROBE_SECONDS)
        return max(HIGH_LATENCY_SECONDS, best if best < math.inf else 1e-3)

    # ---------------------------------------------------------------- root, folders, permissions

    def _learn_root(self, *, make: bool) -> None:
        """Read mode and group of the root, make it if requested; detect a read-only mount."""
        writing = False
        try:
            try:
                info = os.stat(self._root)
            except FileNotFoundError:
                if not make:
                    return
                writing = True
                os.makedirs(os.path.dirname(self._root), exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._root, self._folder_mode)
                    self._give(self._root, folder=True)
                info = os.stat(self._root)
            if not stat_module.S_ISDIR(info.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "the shelf's root is a file", self._root)
            if self._device is None:
                self._device, self._mount = info.st_dev, find_mount(self._root)
            self._folder_mode = stat_module.S_IMODE(info.st_mode)
            self._file_mode = self._folder_mode & 0o666
            self._gid = info.st_gid
            if os.statvfs(self._root).f_flag & os.ST_RDONLY:
                self._refused_until = time.monotonic() + READ_ONLY_MEMORY
        except OSError as exc:
            raise storage_error(exc, "opening the shelf", self._root, writing=writing) from exc

    def _check_root_at_times(self) -> None:
        """Check unless that was done just now: for calls that change nothing.

        What they find in a wrong place is a miss.
        """
        if time.monotonic() >= self._checked_until:
            self._check_root()

    def _check_root(self) -> None:
        """Raise UnavailableStorageError if another filesystem is where the root was.

        A filesystem without a disk may have the device number of one that is gone, and another one
        when it is mounted again: where its number is no evidence, the mount is looked at.
        """
        try:
            try:
                device = os.stat(self._root).st_dev
            except FileNotFoundError:
                if self._device is None:
                    return
                device = _device_above(self._root)
        except OSError:
            return  # the call itself says what is wrong
        now = time.monotonic()
        if device != self._device or now >= self._mount_until:
            mount, known = find_mount(self._root), self._mount
            if self._device is None:
                same = True
            elif device == self._device:
                same = mount.has_source_of(known) or not mount.point
            else:
                same = mount.has_source_of(known) and mount.point == known.point != ""
            if not same:
                raise UnavailableStorageError(
                    errno.ENODEV,
                    f"another filesystem is at the root: found {mount}, expected {known}. Mount"
                    " that again, or restart to use what is there now",
                    self._root,
                )
            self._device, self._mount, self._mount_until = device, mount, now + _MOUNT_SECONDS
        self._checked_until = now + _CHECK_SECONDS

    def _give(self, target: str | int, *, folder: bool) -> None:
        """Give a new file or folder the group and mode of the root, as far as possible."""
        info = os.stat(target)
        if self._gid not in (-1, info.st_gid):
            with contextlib.suppress(OSError):
                os.chown(target, -1, self._gid)
        wanted = self._folder_mode if folder else self._file_mode
        # Only add the bits that the umask removed: a default ACL may have granted more.
        if wanted & ~stat_module.S_IMODE(info.st_mode):
            with contextlib.suppress(OSError):
                os.chmod(target, wanted)

    def _open_folder(self, folder: str, flags: int = _FOLDER) -> int:
        """Open a folder below the root without following links; OSError on failure."""
        try:
            fd = self._open_below(folder, flags)
        except OSError:
            self._check_root_at_times()
            raise
        # Only now: until then another filesystem may be mounted.
        try:
            self._check_root_at_times()
        except UnavailableStorageError:
            os.close(fd)
            raise
        return fd

    def _open_below(self, folder: str, flags: int) -> int:
        if self._openat2:
            return _openat2(self._base + folder, flags)
        fd = os.open(self._root, flags if not folder else _FOLDER)
        parts = folder.split("/") if folder else []
        try:
            for position, part in enumerate(parts, 1):
                wanted = (flags if position == len(parts) else _FOLDER) | os.O_NOFOLLOW
                inner = os.open(part, wanted, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make_folder(self, folder: str) -> int:
        """Like :meth:`_open_folder`, but make missing folders, the root included."""
        with self._lock:
            self._check_root()
            if not self._create and not os.path.isdir(self._root):
                raise PermanentStorageError(
                    errno.ENOENT, "the shelf's root is gone; make or mount it again", self._root
                )
            self._learn_root(make=True)
            fd = os.open(self._root, _FOLDER)
            try:
                for part in folder.split("/") if folder else ():
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, self._folder_mode, dir_fd=fd)
                        self._give_folder(part, fd)
                    inner = os.open(part, _FOLDER_NOFOLLOW, dir_fd=fd)
                    os.close(fd)
                    fd = inner
            except BaseException:
                os.close(fd)
                raise
            return fd

    def _give_folder(self, part: str, dir_fd: int) -> None:
        # chmod cannot refuse links, but opening a descriptor can.
        try:
            fd = os.open(part, _SCAN | os.O_NOFOLLOW, dir_fd=dir_fd)
        except OSError:
            return  # the root's mode has no read permission
        try:
            self._give(fd, folder=True)
        finally:
            os.close(fd)

    def _folder_error(self, exc: OSError, what: str, folder: str, *, writing: bool) -> StorageError:
        """Return the error for a folder that could not be opened; it names the offending part."""
        if isinstance(exc, StorageError) or exc.errno not in (errno.ELOOP, errno.ENOTDIR):
            return self._failed(exc, what, folder, writing=writing)
        path = self._root
        for part in ["", *folder.split("/")]:
            path = os.path.join(path, part) if part else path
            try:
                mode = os.lstat(path).st_mode
            except OSError:
                break
            if not stat_module.S_ISDIR(mode):
                found = "a symbolic link" if stat_module.S_ISLNK(mode) else "a file"
                text = f"{found} is in the place of a folder of the shelf; remove it"
                return PermanentStorageError(exc.errno, f"{what} failed: {text}", path)
        text = "the path to its root now contains a link; open the shelf again"
        return PermanentStorageError(exc.errno, f"{what} failed: {text}", self._root)

    @contextlib.contextmanager
    def _opened(self, folder: str, what: str) -> Iterator[int | None]:
        """Open a folder to change its entries; None if it is missing."""
        try:
            fd = self._open_folder(folder)
        except FileNotFoundError:
            yield None
            return
        except OSError as exc:
            raise self._folder_error(exc, what, folder, writing=True) from exc
        try:
            self._check_root()
            yield fd
        finally:
            os.close(fd)

    def _failed(self, exc: OSError, what: str, name: str, *, writing: bool = False) -> StorageError:
        """Return the typed error; remember a write that was refused for the whole shelf."""
        error = storage_error(exc, what, self._base + name, writing=writing)
        if isinstance(error, ReadOnlyStorageError) and (
            error.errno == errno.EROFS or not os.access(self._root, os.W_OK)
        ):
            self._refused_until = time.monotonic() + READ_ONLY_MEMORY
        return error

    def _check_writable(self, name: str) -> None:
        if self._option_read_only or time.monotonic() < self._refused_until:
            why = (
                "the shelf was opened read-only"
                if self._option_read_only
                else "the shelf refused a write within the last minute"
            )
            raise ReadOnlyStorageError(errno.EROFS, why, self._base + name)

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
                        fd = self._open_folder(folder)
                    except FileNotFoundError:
                        pass
                    except OSError as exc:
                        folder_answer = self._folder_error(exc, "probing", folder, writing=False)
                if fd < 0:
                    append(folder_answer)
                    continue
                try:
                    info = lstat(base, dir_fd=fd)
                except FileNotFoundError:
                    append(None)
                except OSError as exc:
                    append(storage_error(exc, "probing", self._base + name))
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

    def notices(self) -> FolderNotices | None:
        """Return what says which objects appear in chosen folders, on local filesystems."""
        if not self._properties.notifications:
            return None
        try:
            return FolderNotices(self._root)
        except OSError:
            return None

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and times of the entry at `name`, without following links."""
        folder, _, base = check_name(name).rpartition("/")
        try:
            fd = self._open_folder(folder)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._folder_error(exc, "probing", folder, writing=False) from exc
        try:
            found = os.lstat(base, dir_fd=fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise storage_error(exc, "probing", self._base + name) from exc
        finally:
            os.close(fd)
        return _object_info(name, found)

    # -------------------------------------------------------------------------------------- reads

    def open(self, name: str) -> PosixReader:
        """Open one file; 4 µs on a local disk."""
        return self._open(name, self._read_flags)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """Read a part of a file, which is no use of it: its access time stays, if it is our own."""
        with self._open(name, _READ_NOATIME) as reader:
            return reader.read_into(buffer, offset)

    @property
    def reads_whole(self) -> bool:
        """Whether the compiled library is there, and the kernel has `openat2`."""
        return self._openat2 and can_read_files()

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
        begin = self._base + start
        checked = read_whole_files(begin, text, wholes, buffers, self._read_flags, seconds)
        # As after opening one: until then another filesystem may be mounted.
        self._check_root_at_times()
        return checked

    def _open_file(self, name: str, flags: int) -> int:
        if self._openat2:
            return _openat2(self._base + name, flags)
        folder, _, base = name.rpartition("/")
        folder_fd = self._open_below(folder, _FOLDER)
        try:
            return os.open(base, flags, dir_fd=folder_fd)
        finally:
            os.close(folder_fd)

    def _open(self, name: str, flags: int) -> PosixReader:
        check_name(name)
        path = self._base + name
        folder = name.rpartition("/")[0]
        try:
            try:
                fd = self._open_file(name, flags)
            except PermissionError:
                if flags == _READ:
                    raise
                # Another user's file, whose access time is set by reading it.
                fd = self._open_file(name, _READ)
        except OSError as exc:
            self._check_root_at_times()
            if exc.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                raise storage_error(exc, "opening", path) from exc
            # Is it the object itself, or a folder on its path?
            try:
                os.close(self._open_folder(folder))
            except OSError as folder_exc:
                raise self._folder_error(
                    folder_exc, "opening", folder, writing=False
                ) from folder_exc
            raise self._not_regular(exc.errno, "a link, socket or device", path) from exc
        try:
            self._check_root_at_times()
            info = os.fstat(fd)
        except OSError as exc:
            os.close(fd)
            raise storage_error(exc, "opening", path) from exc
        if not stat_module.S_ISREG(info.st_mode):
            os.close(fd)
            kind = "a folder" if stat_module.S_ISDIR(info.st_mode) else "a special file"
            raise self._not_regular(errno.EINVAL, kind, path)
        return PosixReader(fd, info.st_size, path)

    @staticmethod
    def _not_regular(code: int | None, found: str, path: str) -> NotRegularError:
        return NotRegularError(
            code, f"found {found} where an object (a regular file) was expected", path
        )

    # ------------------------------------------------------------------------------------- writes

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish `buffers` as one file, with a single `writev` if the kernel accepts it."""
        self._check_writable(check_name(name))
        views = [view for view in map(_as_bytes, buffers) if len(view)]
        folder, _, base = name.rpartition("/")
        try:
            try:
                return self._write_once(folder, base, views, mode, make=False)
            except FileNotFoundError:
                # No folder yet, or the shelf is being deleted concurrently.
                return self._write_once(folder, base, views, mode, make=True)
        except StorageError:
            raise
        except FileNotFoundError as exc:
            raise TransientStorageError(
                exc.errno,
                "writing failed: the folder was deleted twice during the write",
                self._base + name,
            ) from exc
        except OSError as exc:
            raise self._failed(exc, "writing", name, writing=True) from exc

    def _write_once(
        self, folder: str, base: str, views: list[memoryview], mode: WriteMode, *, make: bool
    ) -> WriteResult:
        try:
            dir_fd = self._make_folder(folder) if make else self._open_folder(folder)
        except (StorageError, FileNotFoundError):
            raise
        except OSError as exc:
            raise self._folder_error(exc, "writing", folder, writing=True) from exc
        temporary = temporary_name(base)
        left = False
        try:
            self._check_root()
            existed = _occupied(base, dir_fd)
            if existed and mode == "create":
                return WriteResult.EXISTED
            fd = os.open(temporary, _CREATE, self._file_mode, dir_fd=dir_fd)
            left = True
            try:
                self._give(fd, folder=False)
                total = _write_all(fd, views)
                size = os.fstat(fd).st_size
                if size != total:
                    raise TransientStorageError(
                        errno.EIO,
                        f"the storage has {size} of {total} bytes written; nothing was published",
                        base,
                    )
                if self._fsync:
                    os.fsync(fd)
            finally:
                # Before publishing: NFS and FUSE report delayed write errors here.
                os.close(fd)
            if mode == "replace":
                try:
                    os.replace(temporary, base, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                except (IsADirectoryError, NotADirectoryError) as exc:
                    raise self._not_regular(
                        exc.errno, "a folder", f"{self._base}{folder}/{base}"
                    ) from exc
                left = False
                result = WriteResult.REPLACED if existed else WriteResult.CREATED
            else:
                created, left = self._publish(temporary, base, dir_fd)
                result = WriteResult.CREATED if created else WriteResult.EXISTED
            if self._fsync:
                self._sync_folder(folder)
            return result
        finally:
            if left:
                with contextlib.suppress(OSError):  # sweep() removes it later
                    os.unlink(temporary, dir_fd=dir_fd)
            os.close(dir_fd)

    def _publish(self, temporary: str, base: str, dir_fd: int) -> tuple[bool, bool]:
        """Give a finished temporary its name; return (created, temporary still exists)."""
        if self._how == _LINK:
            try:
                os.link(
                    temporary, base, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False
                )
                return True, True
            except FileExistsError:
                # NFS repeats a request if the answer was lost: then the link is ours.
                return os.lstat(temporary, dir_fd=dir_fd).st_nlink == 2, True
            except OSError as exc:
                if exc.errno not in _NO_LINKS:
                    raise
                self._how = _NOREPLACE
        if self._how == _NOREPLACE:
            try:
                _rename_noreplace(temporary, base, dir_fd)
                return True, False
            except FileExistsError:
                return False, True
            except OSError as exc:
                if exc.errno not in _NO_NOREPLACE:
                    raise
                self._how = _RENAME
        # Two concurrent writers may both get CREATED here (Properties.conditional_create is
        # False). Equal names hold equal bytes, so the second rename does no harm.
        if _occupied(base, dir_fd):
            return False, True
        os.rename(temporary, base, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        return True, False

    def _sync_folder(self, folder: str) -> None:
        fd = self._open_folder(folder, _SCAN)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # ----------------------------------------------------------------------------------- listings

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream all objects below `prefix`, one open folder at a time."""
        return self._walk(prefix, hidden=False)

    def entries(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Stream all files below `prefix`, one open folder at a time."""
        return self._walk(prefix, hidden=True)

    def _walk(self, prefix: str, *, hidden: bool) -> Iterator[ObjectInfo]:
        if prefix:
            check_name(prefix)
        self._check_root()
        pending = [prefix]
        while pending:
            folder = pending.pop()
            start = folder + "/" if folder else ""
            for entry in self._scan(folder):
                if (entry.name[0] == "." and not hidden) or not entry.name.isascii():
                    continue
                try:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(start + entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        yield _object_info(start + entry.name, entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    raise storage_error(exc, "listing", self._base + start) from exc

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        if prefix:
            check_name(prefix)
        self._check_root()
        return sorted(
            entry.name
            for entry in self._scan(prefix)
            if entry.name[0] != "." and entry.name.isascii() and _is_folder(entry)
        )

    def _scan(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Stream the entries of one folder; none if it is missing."""
        try:
            fd = self._open_folder(folder, _SCAN)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise self._folder_error(exc, "listing", folder, writing=False) from exc
        try:
            with os.scandir(fd) as entries:
                while True:
                    try:
                        entry = next(entries)
                    except StopIteration:
                        return
                    except OSError as exc:
                        raise storage_error(exc, "listing", self._base + folder) from exc
                    yield entry
        finally:
            os.close(fd)

    # ------------------------------------------------------------------------------- other changes

    def delete(self, name: str) -> bool:
        """Unlink one file or link."""
        self._check_writable(check_name(name))
        folder, _, base = name.rpartition("/")
        with self._opened(folder, "deleting") as fd:
            if fd is None:
                return False
            try:
                os.unlink(base, dir_fd=fd)
            except FileNotFoundError:
                return False
            except OSError as exc:
                if exc.errno == errno.EISDIR or (
                    exc.errno == errno.EPERM
                    and stat_module.S_ISDIR(os.lstat(base, dir_fd=fd).st_mode)
                ):
                    raise self._not_regular(exc.errno, "a folder", self._base + name) from exc
                raise self._failed(exc, "deleting", name, writing=True) from exc
        return True

    def quarantine(self, name: str, target: str) -> bool:
        """Rename the entry at `name` to `target`, whatever its type."""
        self._check_writable(check_name(name))
        check_name(target)
        folder, _, base = name.rpartition("/")
        target_folder, _, target_base = target.rpartition("/")
        with self._opened(folder, "moving") as source_fd:
            try:
                if source_fd is None or not _occupied(base, source_fd):
                    return False
                try:
                    target_fd = self._make_folder(target_folder)
                except (StorageError, FileNotFoundError):
                    raise
                except OSError as exc:
                    raise self._folder_error(exc, "moving", target_folder, writing=True) from exc
                try:
                    os.rename(base, target_base, src_dir_fd=source_fd, dst_dir_fd=target_fd)
                finally:
                    os.close(target_fd)
            except StorageError:
                raise
            except FileNotFoundError:
                return False
            except OSError as exc:
                raise self._failed(exc, "moving", name, writing=True) from exc
        return True

    def trim(self, folder: str, max_count: int, max_bytes: int) -> None:
        """Remove the first entries of `folder`, empty folders included."""
        check_name(folder)
        if self.properties.read_only:
            return
        found: list[tuple[str, int, bool]] = []
        try:
            for entry in self._scan(folder):
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    found.append((entry.name, info.st_size, _is_folder(entry)))
            fd = self._open_folder(folder)
        except OSError:
            return
        try:
            found.sort()
            total = sum(size for _, size, _ in found)
            for position, (name, size, is_folder) in enumerate(found):
                if len(found) - position <= max_count and total <= max_bytes:
                    break
                with contextlib.suppress(OSError):
                    if is_folder:
                        os.rmdir(name, dir_fd=fd)
                    else:
                        os.unlink(name, dir_fd=fd)
                total -= size
        finally:
            os.close(fd)

    def touch(self, name: str) -> Touched:
        """Set the access time to the storage's now; keep the modification time.

        Only the owner of a file may do so, whatever its permissions. Some FUSE programs, such as
        rclone, say that they did so and do nothing: where that is seen, it counts as refused.
        """
        folder, _, base = check_name(name).rpartition("/")
        if self.properties.read_only or self._keeps_access_times is False:
            return Touched.REFUSED
        try:
            fd = self._open_folder(folder)
            try:
                before = None if self._keeps_access_times else os.lstat(base, dir_fd=fd)
                _touch(base, fd, self._time() if self._sets_both_times else None)
                if before is not None:
                    after = os.lstat(base, dir_fd=fd)
                    self._keeps_access_times = _has_kept(before, after, self._time())
                    return Touched.REFUSED if self._keeps_access_times is False else Touched.TOUCHED
            finally:
                os.close(fd)
        except OSError as exc:
            if exc.errno in _NO_TIMES:
                return Touched.REFUSED
        return Touched.TOUCHED

    def space(self) -> Space | None:
        """Return what `statvfs` says of the root; None for filesystems that do not tell."""
        self._check_root()
        try:
            found = os.statvfs(self._root)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise storage_error(exc, "asking for the free space", self._root) from exc
        if not found.f_blocks:
            return None
        unit = found.f_frsize
        return Space(found.f_bavail * unit, found.f_blocks * unit, self._in_memory)

    def _time(self) -> float:
        """Return the storage's time by this machine's clock and how far the two are apart."""
        if time.monotonic() >= self._apart_until:
            self._apart_until = time.monotonic() + _APART_SECONDS
            now = self.now()
            self._apart = 0.0 if now is None else now - time.time()
        return time.time() + self._apart

    def now(self) -> float | None:
        """Create a temporary, look at its time, and remove it."""
        if self.properties.read_only:
            return None
        name = f"{CLOCK_FOLDER}/{temporary_name('now')}"
        try:
            try:
                folder = self._open_folder(CLOCK_FOLDER)
            except FileNotFoundError:
                folder = self._make_folder(CLOCK_FOLDER)
            try:
                self._check_root()
                return self._time_of_a_new_file(folder, name.rpartition("/")[2])
            finally:
                os.close(folder)
        except OSError as exc:
            error = self._folder_error(exc, "asking for the time", CLOCK_FOLDER, writing=True)
            if isinstance(error, ReadOnlyStorageError):
                return None
            if not isinstance(error, NoSpaceStorageError):
                raise error from exc
            return self._time_of_the_root()

    def _time_of_a_new_file(self, dir_fd: int, temporary: str) -> float:
        fd = os.open(temporary, _CREATE, self._file_mode, dir_fd=dir_fd)
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
        if self._sets_both_times:
            return None
        try:
            os.utime(self._root)
            return os.stat(self._root).st_mtime
        except OSError as exc:
            error = storage_error(exc, "asking for the time", self._root, writing=True)
            if isinstance(error, ReadOnlyStorageError | NoSpaceStorageError):
                return None
            raise error from exc

    def sweep(self, folder: str, older_than: float, is_ours: Callable[[str], bool]) -> int:
        """Remove old temporaries among the first 65536 entries of one folder."""
        self._check_writable(check_name(folder) if folder else "")
        found: list[tuple[str, float]] = []
        for entry in islice(self._scan(folder), _SWEEP_ENTRIES):
            final = final_name(entry.name)
            if final is None or not is_ours(final):
                continue
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                # Linking or renaming changes only the ctime; such a file is in use as well.
                if stat_module.S_ISREG(info.st_mode):
                    found.append((entry.name, max(info.st_mtime, info.st_ctime)))
        now = time_for_ages(self.now(), self.url) if found else None
        stale = [name for name, changed in found if now is not None and changed < now - older_than]
        if not stale:
            return 0
        removed = 0
        with self._opened(folder, "sweeping") as fd:
            try:
                for name in stale if fd is not None else ():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)
                        removed += 1
            except OSError as exc:
                raise self._failed(exc, "sweeping", folder, writing=True) from exc
        return removed


# -------------------------------------------------------------------------------------- helpers


def _device_above(path: str) -> int:
    """Return the device of the nearest folder above `path` that exists."""
    while True:
        path = os.path.dirname(path)
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path).st_dev


def _as_bytes(buffer: BytesLike) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _write_all(fd: int, views: list[memoryview]) -> int:
    """Write all `views` (none empty) to `fd`; return the number of bytes written."""
    written = 0
    first, inside = 0, 0  # written: all views before `first`, and `inside` bytes of that one
    while first < len(views):
        batch = views[first : first + _IOV_MAX]
        if inside:
            batch[0] = batch[0][inside:]
        count = os.writev(fd, batch)
        if not count:
            raise OSError(errno.EIO, "the storage accepted no bytes")
        written += count
        inside += count
        while first < len(views) and inside >= len(views[first]):
            inside -= len(views[first])
            first += 1
    return written


def _object_info(name: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(name, found.st_size, found.st_mtime, found.st_atime, found.st_ctime)


def _occupied(base: str, dir_fd: int) -> bool:
    try:
        os.lstat(base, dir_fd=dir_fd)
    except FileNotFoundError:
        return False
    return True


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


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
        _raise_errno(base)
