"""Listings of a shelf's folders. One folder is open at a time."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

from kvshelf.backends.base import ObjectInfo, check_folder, final_name, is_name
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix_folders import SCAN, Folders
from kvshelf.backends.posix_mount import Mount, Root

#: What the root of a filesystem has of its own, and only the system's administrator may open.
_LOST: Final = "lost+found"


class Listing:
    """Lists folders.

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
        # Some FUSE programs say 0 for every file: until they say more, sizes count.
        self._counts_blocks = not mount.kind.startswith("fuse")

    def walk(
        self,
        prefix: str,
        hidden: bool = False,
        between: tuple[str, str] | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """Stream the files below `prefix`, see :meth:`kvshelf.backends.base.Backend.list`."""
        check_folder(prefix)
        self._root.check()
        pending = [prefix]
        while pending:
            folder = pending.pop()
            start = folder + "/" if folder else ""
            for entry in self._scan(folder, hidden):
                if between is not None and not between[0] <= entry.name <= between[1]:
                    continue
                whole = entry.name[0] == "." and final_name(entry.name) is not None
                try:
                    if not whole and entry.is_dir(follow_symlinks=False):
                        pending += [] if flat else [start + entry.name]
                    elif whole or entry.is_file(follow_symlinks=False):
                        found = entry.stat(follow_symlinks=False)
                        yield self.info(start + entry.name, found)
                except FileNotFoundError:
                    continue
                except OSError as exc:
                    raise storage_error(exc, "listing", self._root.base + start) from exc
            between = None

    def folders(self, prefix: str = "") -> Sequence[str]:
        """Names of the folders directly below `prefix`."""
        check_folder(prefix)
        self._root.check()
        return sorted(entry.name for entry in self._scan(prefix) if _is_folder(entry))

    def info(self, name: str, found: os.stat_result) -> ObjectInfo:
        """Return the row of a listing."""
        held, blocks = found.st_size, found.st_blocks * 512
        if stat.S_ISREG(found.st_mode) and 0 < held <= blocks:
            self._counts_blocks = True
        if self._counts_blocks:
            # A small file may lie in its entry, and a block of a large one be used in part.
            held = min(held, blocks + 4096)
        # Each link has its part.
        held //= max(found.st_nlink, 1)
        return ObjectInfo(name, found.st_size, found.st_mtime, found.st_atime, found.st_ctime, held)

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
                        raise storage_error(exc, "listing", self._root.base + folder) from exc
                    name = entry.name
                    if (name[0] != "." or hidden) and is_name(name) and name != _LOST:
                        yield entry


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
