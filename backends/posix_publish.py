"""Publications of files: an object appears whole or not at all.

Owns the protocol: an object is written to a temporary name in its folder, its size is checked, the
file is closed, and only then it is linked (or renamed) to its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from kvshelf.backends.base import BytesLike, WriteMode, WriteResult, check_name, temporary_name
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix_folders import SCAN, Folders, libc, not_regular, occupied
from kvshelf.errors import StorageError, TransientStorageError

#: A function that gives a temporary, the first argument, its name in a folder.
Way: TypeAlias = Callable[[str, str, int], None]

CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_IOV_MAX: Final = max(16, os.sysconf("SC_IOV_MAX"))
#: Seconds from one look at a file's size to the next, where a mount shows it late.
_LATE_SECONDS: Final = (0.1, 0.9, 3.0)
#: Errors of `link` and `rename` that say nothing of the filesystem.
_OF_ONE_OBJECT: Final = frozenset((errno.EEXIST, errno.ENOENT, errno.ENOSPC, errno.EDQUOT))
_RENAME_NOREPLACE: Final = 1
_renameat2: Callable[..., int] | None = getattr(libc, "renameat2", None)


def rename_noreplace(source: str, target: str, dir_fd: int) -> None:
    """Call `renameat2` in one folder with RENAME_NOREPLACE; EEXIST if `target` exists."""
    code = errno.ENOSYS
    if _renameat2 is not None:
        if not _renameat2(dir_fd, source.encode(), dir_fd, target.encode(), _RENAME_NOREPLACE):
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), target)


def publish(
    folders: Folders,
    name: str,
    buffers: Sequence[BytesLike],
    mode: WriteMode,
    *,
    ways: list[Way],
    fsync: bool,
    waits: bool,
) -> WriteResult:
    """Publish `buffers` as one file, with a single `writev` if the kernel accepts it.

    Parameters
    ----------
    folders : Folders
    name, buffers, mode
        As for :meth:`kvshelf.backends.base.Backend.write`.
    ways : list of Way
        What gives a temporary its name, the best first: :data:`WAYS` at first. Those before one
        that works are dropped.
    fsync : bool
        Flush the object and its folder to the disk.
    waits : bool
        The filesystem may show the size of a file some seconds late.
    """
    folders.check_writable(check_name(name))
    views = [view for view in map(_as_bytes, buffers) if len(view)]
    make = False
    while True:
        try:
            return _write_once(folders, name, views, mode, ways, fsync, waits, make)
        except StorageError:
            raise
        except FileNotFoundError as exc:
            # No folder yet, or the shelf is being deleted concurrently.
            if make:
                text = "writing failed: the folder was deleted twice during the write"
                raise TransientStorageError(exc.errno, text, folders.base + name) from exc
            make = True
        except OSError as exc:
            raise folders.failed(exc, "writing", name, writing=True) from exc


def _write_once(
    folders: Folders,
    name: str,
    views: list[memoryview],
    mode: WriteMode,
    ways: list[Way],
    fsync: bool,
    waits: bool,
    make: bool,
) -> WriteResult:
    folder, _, base = name.rpartition("/")
    dir_fd = folders.open_to_put(folder, make=make)
    temporary = temporary_name(base)
    is_left = False
    try:
        folders.check()
        existed = occupied(base, dir_fd)
        if existed and mode == "create":
            return WriteResult.EXISTED
        fd = os.open(temporary, CREATE, folders.file_mode, dir_fd=dir_fd)
        is_left = True
        try:
            folders.give_file(fd)
            total = _write_all(fd, views)
            size = os.fstat(fd).st_size
            if fsync:
                os.fsync(fd)
        finally:
            # Before publishing: NFS and FUSE report delayed write errors here.
            os.close(fd)
        if size != total:
            _check_size(temporary, base, dir_fd, total, waits=waits)
        is_named = True
        try:
            if mode == "replace":
                os.replace(temporary, base, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                is_left = False
            else:
                is_left = _give_name(temporary, base, dir_fd, ways, folders.base) is link
        except (IsADirectoryError, NotADirectoryError) as exc:
            raise not_regular(exc.errno, "a folder", folders.base + name) from exc
        except OSError as exc:
            # NFS repeats a request whose answer was lost, and some mounts do what they say has
            # failed.
            is_named = _has_name(temporary, base, dir_fd, total)
            if not (is_named or isinstance(exc, FileExistsError)):
                raise
        if fsync:
            folder_fd = folders.open(folder, SCAN)
            try:
                os.fsync(folder_fd)
            finally:
                os.close(folder_fd)
        if not is_named:
            return WriteResult.EXISTED
        return WriteResult.REPLACED if existed else WriteResult.CREATED
    finally:
        if is_left:
            with contextlib.suppress(OSError):  # sweep() removes it later
                os.unlink(temporary, dir_fd=dir_fd)
        os.close(dir_fd)


def _check_size(temporary: str, base: str, dir_fd: int, total: int, *, waits: bool) -> None:
    """Raise TransientStorageError unless the closed file shows `total` bytes, soon at least.

    Some mounts show the size of an open file late, and others that of one just closed.
    """
    for pause in (0.0, *(_LATE_SECONDS if waits else ())):
        time.sleep(pause)
        size = os.lstat(temporary, dir_fd=dir_fd).st_size
        if size == total:
            return
    text = f"the storage has {size} of {total} bytes written; nothing was published"
    raise TransientStorageError(errno.EIO, text, base)


def _give_name(temporary: str, base: str, dir_fd: int, ways: list[Way], root: str) -> Way:
    """Give a finished temporary its name if it is free, else raise FileExistsError.

    Returns the way that worked. Threads may do so at the same time, and shorten `ways` alike.
    """
    known_ways = [*ways]
    for position, way in enumerate(known_ways):
        try:
            way(temporary, base, dir_fd)
        except OSError as exc:
            error = storage_error(exc, "publishing", root + base, writing=True)
            # Errors that may pass say nothing of the way.
            if error.retryable or exc.errno in _OF_ONE_OBJECT:
                raise
        else:
            if position:
                ways[:] = known_ways[position:]
            return way
    text = (
        f"{error.strerror}; a mount that neither links nor renames files, as Mountpoint for S3,"
        " takes no objects: use s3://bucket/prefix, or mount it otherwise"
    )
    raise type(error)(error.errno, text, error.filename)


def link(temporary: str, base: str, dir_fd: int) -> None:
    """Link a temporary to its name; EEXIST if that exists."""
    os.link(temporary, base, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)


def rename(temporary: str, base: str, dir_fd: int) -> None:
    """Rename a temporary unless its name exists: then EEXIST."""
    # Two concurrent writers may both succeed here. Equal names hold equal bytes, so the second
    # rename does no harm.
    if occupied(base, dir_fd):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), base)
    os.rename(temporary, base, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def _has_name(temporary: str, base: str, dir_fd: int, total: int) -> bool:
    """Whether a temporary of `total` bytes has got its name."""
    try:
        return os.lstat(temporary, dir_fd=dir_fd).st_nlink == 2
    except FileNotFoundError:
        return os.lstat(base, dir_fd=dir_fd).st_size == total


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
