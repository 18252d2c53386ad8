"""Listings of a shelf's folders. One folder is open at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from kvshelf.backends.base import ObjectInfo, check_folder, final_name, folders_left, is_behind
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix_folders import SCAN, Folders
from kvshelf.backends.posix_mount import Root


class Listing:
    """Lists folders.

    Parameters
    ----------
    root : Root
    folders : Folders
    """

    def __init__(self, root: Root, folders: Folders) -> None:
        self._root = root
        self._folders = folders

    def walk(
        self,
        prefix: str,
        hidden: bool = False,
        wanted: Callable[[str], bool] | None = None,
        after: str | None = None,
    ) -> Iterator[ObjectInfo]:
        """Stream the files below `prefix`, see :meth:`kvshelf.backends.base.Backend.list`."""
        check_folder(prefix)
        self._root.check()
        pending = [prefix]
        while pending:
            folder = pending.pop()
            start = folder + "/" if folder else ""
            listed = is_behind(folder, after)
            inner: list[str] = []
            for entry in self._scan(folder):
                is_hidden = entry.name[0] == "."
                if (is_hidden and not hidden) or not entry.name.isascii():
                    continue
                name = start + entry.name
                if wanted is not None and not wanted(name):
                    continue
                whole = is_hidden and final_name(entry.name) is not None
                try:
                    if not whole and entry.is_dir(follow_symlinks=False):
                        inner.append(name)
                    elif not listed and (whole or entry.is_file(follow_symlinks=False)):
                        yield object_info(name, entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    raise storage_error(exc, "listing", self._root.base + start) from exc
            pending += folders_left(inner, after)

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        check_folder(prefix)
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


def object_info(name: str, found: os.stat_result) -> ObjectInfo:
    """Return the row of a listing."""
    return ObjectInfo(name, found.st_size, found.st_mtime, found.st_atime, found.st_ctime)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
