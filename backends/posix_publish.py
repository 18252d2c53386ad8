"""Publications of files: an object appears whole or not at all.

Owns the protocol: an object is written to a temporary name in its folder, its size is checked, the
file is closed, and only then it is linked (or renamed) to its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from typing import Final

from kvshelf.backends.base import BytesLike, WriteMode, WriteResult, check_name, temporary_name
from kvshelf.backends.posix_folders import SCAN, Folders, libc, not_regular, occupied
from kvshelf.backends.posix_mount import Root
from kvshelf.errors import PermanentStorageError, StorageError, TransientStorageError

CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Errors of `link` if the filesystem has no hard links.
NO_LINKS: Final = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS))
_IOV_MAX: Final = max(16, os.sysconf("SC_IOV_MAX"))
#: Ways to publish, the best first; a backend only ever moves down this list.
_LINK, _NOREPLACE, _RENAME = range(3)
#: Errors of `renameat2` if the filesystem does not support RENAME_NOREPLACE.
_NO_NOREPLACE: Final = frozenset((errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))
#: Errors of `rename` if the filesystem renames nothing.
_NO_RENAME: Final = frozenset((errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))
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


class Publisher:
    """Writes objects.

    Parameters
    ----------
    root : Root
    folders : Folders
    fsync : bool
        Flush each object and its folder to the disk.
    """

    def __init__(self, root: Root, folders: Folders, *, fsync: bool) -> None:
        self._root = root
        self._folders = folders
        self._fsync = fsync
        self._how = _LINK

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish `buffers` as one file, with a single `writev` if the kernel accepts it."""
        self._root.check_writable(check_name(name))
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
                self._root.base + name,
            ) from exc
        except OSError as exc:
            raise self._root.failed(exc, "writing", name, writing=True) from exc

    def _write_once(
        self, folder: str, base: str, views: list[memoryview], mode: WriteMode, *, make: bool
    ) -> WriteResult:
        dir_fd = self._folders.open_to_put(folder, make=make)
        temporary = temporary_name(base)
        left = False
        try:
            self._root.check()
            existed = occupied(base, dir_fd)
            if existed and mode == "create":
                return WriteResult.EXISTED
            fd = os.open(temporary, CREATE, self._folders.file_mode, dir_fd=dir_fd)
            left = True
            try:
                self._folders.give_file(fd)
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
                    path = f"{self._root.base}{folder}/{base}"
                    raise not_regular(exc.errno, "a folder", path) from exc
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
                if exc.errno not in NO_LINKS:
                    raise
                self._how = _NOREPLACE
        if self._how == _NOREPLACE:
            try:
                rename_noreplace(temporary, base, dir_fd)
                return True, False
            except FileExistsError:
                return False, True
            except OSError as exc:
                if exc.errno not in _NO_NOREPLACE:
                    raise
                self._how = _RENAME
        # Two concurrent writers may both get CREATED here. Equal names hold equal bytes, so the
        # second rename does no harm.
        if occupied(base, dir_fd):
            return False, True
        try:
            os.rename(temporary, base, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except OSError as exc:
            if exc.errno not in _NO_RENAME:
                raise
            raise PermanentStorageError(
                exc.errno,
                f"publishing failed: {os.strerror(exc.errno)} ({errno.errorcode[exc.errno]}): this"
                " mount renames no files, as Mountpoint for S3; use s3://bucket/prefix",
                f"{self._root.base}{base}",
            ) from exc
        return True, False

    def _sync_folder(self, folder: str) -> None:
        fd = self._folders.open(folder, SCAN)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


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
