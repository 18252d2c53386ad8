"""Which filesystem a directory is on, and whether it still is.

Owns the facts about each kind of filesystem (:class:`Mount`), and the root of a shelf: which mount
holds it, and whether it takes writes (:class:`Root`). What is mounted is read from the kernel's
table, never asked of the filesystem itself, which may hang.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from dataclasses import dataclass
from typing import Final

from kvshelf.backends.base import Space
from kvshelf.backends.oserrors import no_space, storage_error
from kvshelf.errors import ReadOnlyStorageError, StorageError, UnavailableStorageError

#: Seconds for which writes fail at once after the storage refused one.
READ_ONLY_MEMORY: Final = 60.0
#: Seconds from one check of what is mounted at the root to the next, by calls that change nothing.
_CHECK_SECONDS: Final = 0.05
#: Seconds for which an unchanged device number shows that nothing else was mounted.
_MOUNT_SECONDS: Final = 10.0
#: Filesystems whose only client is this machine's kernel, so that no cache is outdated.
_LOCAL: Final = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs"),
        *("tmpfs", "ramfs", "overlay", "apfs", "hfs", "ufs", "vfat", "exfat"),
    )
)
_MEMORY: Final = frozenset(("tmpfs", "ramfs"))
#: Programs whose mounts say how much is free where they keep copies.
_SHOW_CACHE: Final = frozenset(("blobfuse", "blobfuse2", "rclone"))
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
_ATTRIBUTE_CACHES: Final = frozenset(("nfs", "nfs4", "cifs", "smb3"))
#: With fewer files left a filesystem is full by their number, and with more bytes not by these.
_FEW_FILES: Final = 16
_MUCH_SPACE: Final = 64 << 20


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
    def in_memory(self) -> bool:
        """Whether the files lie in the host's memory."""
        return self.kind in _MEMORY

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
            seconds_of = {name: float(value) for name, _, value in named if name in limits}
            if "actimeo" in seconds_of:
                return seconds_of["actimeo"]
            usual = _CACHE_SECONDS.get(self.kind, _USUAL_CACHE_SECONDS)
            return max(seconds_of.get(limit, usual) for limit in ("acregmax", "acdirmax"))
        return _CACHE_SECONDS.get(self.kind, _USUAL_CACHE_SECONDS)


def find_mount(path: str) -> Mount:
    """Return the mount that holds an absolute path without links.

    Reads the kernel's table and never the filesystem, so that it works for a mount that hangs.
    """
    best, candidate = "", Mount()
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                head, _, behind = line.partition(" - ")
                fields, tail = head.split(" "), behind.split()
                mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
                inside = path == mount or path.startswith(mount.rstrip("/") + "/")
                # Of several mounts on one mount point, the last line is the topmost.
                if inside and len(mount) >= len(best):
                    options = [*fields[5].split(","), *tail[-1].split(",")]
                    best, candidate = mount, Mount(tail[0], frozenset(options), mount, tail[1])
    except (OSError, IndexError):
        return candidate
    return candidate


def enter(path: str) -> None:
    """Have a folder mounted that is mounted when it is entered: a look at it is not enough.

    So it is with direct maps of autofs, since Linux 4.11.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


class Root:
    """The directory of a shelf, and the mount that holds it.

    Parameters
    ----------
    path : str
        Absolute, and without links.
    read_only : bool
        It takes no writes.

    Attributes
    ----------
    path, base : str
        The directory; with a slash at the end.
    """

    def __init__(self, path: str, *, read_only: bool) -> None:
        self.path = path
        self.base = path.rstrip("/") + "/"
        self._opened_read_only = read_only
        self._refused_until = 0.0
        #: Device and mount, once the directory has been seen.
        self._device: int | None = None
        self._mount = Mount()
        #: How long the last look at the mount, and the last check at all, are good for.
        self._mount_until = 0.0
        self._checked_until = 0.0

    def learn(self, info: os.stat_result) -> None:
        """Take note of the directory when it is seen first; detect a read-only mount."""
        if self._device is None:
            self._device, self._mount = info.st_dev, find_mount(self.path)
        if os.statvfs(self.path).f_flag & os.ST_RDONLY:
            self._refuse()

    def find_mount(self) -> Mount:
        """Return the mount that holds it now."""
        return find_mount(self.path)

    def check_at_times(self) -> None:
        """Check unless that was done just now: for calls that change nothing.

        What they find in a wrong place is a miss.
        """
        if time.monotonic() >= self._checked_until:
            self.check()

    def check(self) -> None:
        """Raise UnavailableStorageError if another filesystem is where the root was.

        A filesystem without a disk may have the device number of one that is gone, and another one
        when it is mounted again: where its number is no evidence, the mount is looked at.
        """
        try:
            try:
                device = os.stat(self.path).st_dev
                if device != self._device:
                    enter(self.path)
                    device = os.stat(self.path).st_dev
            except FileNotFoundError:
                if self._device is None:
                    return
                device = _device_above(self.path)
        except OSError:
            return  # the call itself says what is wrong
        now = time.monotonic()
        if device != self._device or now >= self._mount_until:
            mount, initial = find_mount(self.path), self._mount
            if self._device is None:
                same = True
            elif device == self._device:
                same = mount.has_source_of(initial) or not mount.point
            else:
                same = mount.has_source_of(initial) and mount.point == initial.point != ""
            if not same:
                raise UnavailableStorageError(
                    errno.ENODEV,
                    f"another filesystem is at the root: found {mount}, expected {initial}. Mount"
                    " that again, or restart to use what is there now",
                    self.path,
                )
            self._device, self._mount, self._mount_until = device, mount, now + _MOUNT_SECONDS
        self._checked_until = now + _CHECK_SECONDS

    @property
    def read_only(self) -> bool:
        """Whether it takes no writes at present; a refused write expires after a minute."""
        return self._opened_read_only or time.monotonic() < self._refused_until

    def _refuse(self) -> None:
        self._refused_until = time.monotonic() + READ_ONLY_MEMORY

    def failed(self, exc: OSError, what: str, name: str, *, writing: bool = False) -> StorageError:
        """Return the typed error; remember a write that was refused for the whole shelf."""
        error = storage_error(exc, what, self.base + name, writing=writing)
        if exc.errno == errno.ENOSPC:
            with contextlib.suppress(OSError):
                filesystem = os.statvfs(self.path)
                short_of = (
                    "quota" if filesystem.f_bavail * filesystem.f_frsize > _MUCH_SPACE else "bytes"
                )
                if filesystem.f_files and filesystem.f_favail < _FEW_FILES:
                    short_of = "inodes"
                text = f"{what} failed: {exc.strerror} (ENOSPC)"
                return no_space(errno.ENOSPC, text, self.base + name, short_of)
        if isinstance(error, ReadOnlyStorageError) and (
            error.errno == errno.EROFS or not os.access(self.path, os.W_OK)
        ):
            self._refuse()
        return error

    def check_writable(self, name: str) -> None:
        """Raise ReadOnlyStorageError if the shelf takes no writes at present."""
        if self.read_only:
            why = "the shelf refused a write within the last minute"
            if self._opened_read_only:
                why = "the shelf was opened read-only"
            elif os.statvfs(self.path).f_flag & os.ST_RDONLY:
                why = "the filesystem is mounted read-only"
            raise ReadOnlyStorageError(errno.EROFS, why, self.base + name)

    def space(self) -> Space | None:
        """Return what `statvfs` says; None for filesystems that do not report it, or not truly."""
        self.check()
        if not _SHOW_CACHE.isdisjoint((self._mount.kind.partition(".")[2], self._mount.source)):
            return None
        try:
            filesystem = os.statvfs(self.path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise storage_error(exc, "asking for the free space", self.path) from exc
        if not filesystem.f_blocks:
            return None
        unit = filesystem.f_frsize
        files = filesystem.f_favail if filesystem.f_files else None
        nbytes = filesystem.f_bavail * unit, filesystem.f_blocks * unit
        return Space(*nbytes, self._mount.in_memory, files)


def _device_above(path: str) -> int:
    """Return the device of the nearest folder above `path` that exists."""
    while True:
        path = os.path.dirname(path)
        with contextlib.suppress(FileNotFoundError):
            return os.stat(path).st_dev
