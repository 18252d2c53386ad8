"""The directories of disk tiers: which may be one, and whether two storages are one directory.

All functions block on the storage, and may be called on any thread.
"""

from __future__ import annotations

import os
from contextlib import suppress

from kvshelf.backends import Backend
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import ConfigError, UnavailableStorageError
from kvshelf.format.names import parse_namespace_folder
from kvshelf.shelf.leftovers import TIER


def take_directory(directory: PosixBackend) -> None:
    """Mark a directory as one of a disk tier.

    Raises
    ------
    ConfigError
        If it has objects and no mark: it is a shelf, of which a tier would evict objects.
    StorageError
        If the directory failed.
    """
    if directory.info(TIER) is not None:
        return
    if any(parse_namespace_folder(name) for name in directory.folders()):
        raise ConfigError(
            f"the disk tier {directory.url} is a shelf: it has objects, and no {TIER}. A disk tier"
            " evicts objects when it is full: give disk_tier.path a directory of its own, or empty"
            " this one if it was a tier from which somebody deleted that file"
        )
    mark(directory)


def mark(directory: Backend) -> None:
    """Write the mark if it is not there: who empties the directory in use takes it too.

    Raises
    ------
    StorageError
        If the directory failed.
    """
    if directory.stat([TIER])[0] is None:
        directory.write(TIER, [b""])


def refuse_tier(backend: Backend) -> None:
    """Refuse a shelf that is the directory of a disk tier: what is stored there is evicted.

    Raises
    ------
    ConfigError
    """
    root = _root_of(backend)
    if root is not None and os.path.lexists(os.path.join(root, TIER)):
        raise ConfigError(
            f"the shelf {root} is the directory of a disk tier, which evicts objects when it is"
            f" full: give shared_storage_path another directory. If it is a tier no longer, delete"
            f" {TIER} in it"
        )


def share_files(one: Backend, other: Backend) -> bool:
    """Whether both are directories, and one is the other or lies in it, by whatever path."""
    root, other_root = _root_of(one), _root_of(other)
    if root is None or other_root is None:
        return False
    return _lies_in(root, other_root) or _lies_in(other_root, root)


def _root_of(backend: Backend) -> str | None:
    with suppress(UnavailableStorageError):  # it is not open
        while isinstance(backend, WrappedBackend):
            backend = backend.inner
    return backend.root if isinstance(backend, PosixBackend) else None


def _lies_in(path: str, root: str) -> bool:
    """Compare the folders themselves: a bind mount gives one of them two names."""
    if os.path.commonpath((path, root)) == root:
        return True
    with suppress(OSError):
        top = os.stat(root)
        while (parent := os.path.dirname(path)) != path:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), top):
                    return True
            path = parent
    return False
