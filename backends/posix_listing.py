"""Listings of a shelf's folders, and the removal of what killed writers and quarantines leave.

Owns which entries are objects, temporaries, or nothing of ours. One folder is open at a time.
"""

from __future__ import annotations

import contextlib
import os
import stat as stat_module
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from kvshelf.backends.base import ObjectInfo, check_name, final_name, time_for_ages
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix_folders import SCAN, Folders
from kvshelf.backends.posix_mount import Root

#: Number of entries of one folder that a sweep examines.
_SWEEP_ENTRIES: Final = 65536


class Listing:
    """Lists folders, and cleans them up.

    Parameters
    ----------
    root : Root
    folders : Folders
    """

    def __init__(self, root: Root, folders: Folders) -> None:
        self._root = root
        self._folders = folders

    def walk(self, prefix: str, *, hidden: bool) -> Iterator[ObjectInfo]:
        """Stream the files below `prefix`, those with a leading dot in their path if `hidden`."""
        if prefix:
            check_name(prefix)
        self._root.check()
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
                        yield object_info(start + entry.name, entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    raise storage_error(exc, "listing", self._root.base + start) from exc

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        if prefix:
            check_name(prefix)
        self._root.check()
        return sorted(
            entry.name
            for entry in self._scan(prefix)
            if entry.name[0] != "." and entry.name.isascii() and _is_folder(entry)
        )

    def _scan(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Stream the entries of one folder; none if it is missing."""
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
                        raise storage_error(exc, "listing", self._root.base + folder) from exc
                    yield entry

    def trim(self, folder: str, max_count: int, max_bytes: int) -> None:
        """Remove the first entries of `folder`, empty folders included."""
        check_name(folder)
        if self._root.read_only:
            return
        found: list[tuple[str, int, bool]] = []
        try:
            for entry in self._scan(folder):
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    found.append((entry.name, info.st_size, _is_folder(entry)))
            fd = self._folders.open(folder)
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

    def sweep(
        self,
        folder: str,
        older_than: float,
        is_ours: Callable[[str], bool],
        now: Callable[[], float | None],
    ) -> int:
        """Remove temporaries that are old at the time that `now` tells, if it is asked."""
        self._root.check_writable(check_name(folder) if folder else "")
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
        time = time_for_ages(now(), self._root.path) if found else None
        stale = [
            name for name, changed in found if time is not None and changed < time - older_than
        ]
        if not stale:
            return 0
        removed = 0
        with self._folders.opened(folder, "sweeping", writing=True) as fd:
            try:
                for name in stale if fd is not None else ():
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=fd)
                        removed += 1
            except OSError as exc:
                raise self._root.failed(exc, "sweeping", folder, writing=True) from exc
        return removed


def object_info(name: str, found: os.stat_result) -> ObjectInfo:
    """Return the row of a listing."""
    return ObjectInfo(name, found.st_size, found.st_mtime, found.st_atime, found.st_ctime)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
