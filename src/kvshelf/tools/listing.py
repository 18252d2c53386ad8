"""How commands list a shelf, and by which clock ages count.

All functions block on the storage, on the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

from kvshelf.backends import Backend
from kvshelf.backends.base import delete_one, temporary_name
from kvshelf.capacity.sweep import Lister, Part
from kvshelf.errors import NoSpaceStorageError, StorageError, UnavailableStorageError
from kvshelf.shelf.leftovers import RESERVED


def list_parts(
    backend: Backend,
    folders: Collection[str] | None,
    now: float,
    skipped: dict[str, StorageError],
    *,
    group: str | None = None,
    on_listed: Callable[[int], None] = lambda files: None,
) -> Iterator[Part]:
    """Yield what lies on a shelf, a fan-out folder at a time.

    Parameters
    ----------
    backend : Backend
    folders : Collection of str or None
        Of namespaces; None: all, and the reserved folder of the root.
    now : float
        Seconds since the epoch.
    skipped : dict
        Gets the folders that cannot be listed, and why.
    group : str, optional
        Only this salt group.
    on_listed : Callable
        Called with the number of files of each part.

    Raises
    ------
    StorageError
        If the shelf itself cannot be listed, or the storage answers no more.
    """
    for part in Lister(backend).whole(folders, now, group):
        for error in part.skipped.values():
            if isinstance(error, UnavailableStorageError):
                raise error
        skipped |= part.skipped
        on_listed(part.files)
        yield part


def storage_time(backend: Backend) -> float:
    """Return the storage's time: that of an empty temporary, which is deleted again.

    Where it has no space for one, this machine's.

    Raises
    ------
    StorageError
        If it takes no writes.
    """
    name = f"{RESERVED}/{temporary_name('time')}"
    try:
        backend.write(name, [b""])
    except NoSpaceStorageError:
        return time.time()
    info = backend.info(name)
    delete_one(backend, name)
    return time.time() if info is None else info.mtime
