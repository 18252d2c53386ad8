"""How commands list a shelf, count what they list, and read the formats of its namespaces.

All functions block on the storage, on the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from kvshelf.backends import Backend
from kvshelf.backends.base import delete_one, temporary_name
from kvshelf.capacity.sweep import Lister, Part, Unit
from kvshelf.errors import (
    ConfigError,
    NoSpaceStorageError,
    StorageError,
    UnavailableStorageError,
)
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.leftovers import RESERVED
from kvshelf.shelf.shelf import NamespaceInfo, Shelf


@dataclass(slots=True)
class Row:
    """One row of a breakdown of a shelf's objects.

    Attributes
    ----------
    name : str
    objects, bytes : int
    last_used : float
        Latest use of any of the objects, seconds since the epoch.
    """

    name: str
    objects: int = 0
    bytes: int = 0
    last_used: float = 0.0

    def add(self, unit: Unit) -> None:
        """Count the objects of a unit."""
        self.objects += len(unit.names)
        self.bytes += unit.nbytes
        self.last_used = max(self.last_used, unit.used)


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

    Falls back to this machine's clock if the storage is full.

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


def formats_of(shelf: Shelf, folders: Collection[str] | None) -> Iterator[tuple[str, ObjectFormat]]:
    """Yield namespace folders and their formats: of certain folders, or of all that have one.

    Raises
    ------
    ConfigError
        If one of `folders` has none.
    StorageError
        If the storage failed.
    """
    for info in shelf.namespaces():
        if folders is None or info.folder in folders:
            try:
                yield info.folder, format_of(info)
            except ConfigError:
                if folders is not None:
                    raise


def format_of(info: NamespaceInfo) -> ObjectFormat:
    """Return the format of a namespace.

    Raises
    ------
    ConfigError
        If it is unknown.
    """
    try:
        if info.namespace is not None:
            return ObjectFormat(info.namespace)
        problem = str(info.problem)
    except ConfigError as error:
        problem = str(error)
    raise ConfigError(
        f"the keys of chunks in {info.folder} are unknown: {problem}; an engine that stores to it"
        " writes a new namespace.json"
    )
