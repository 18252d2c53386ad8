"""A shelf: one storage with any number of namespaces. Opens it, lists and deletes its objects.

Owns the listings and the read of a namespace's description. The objects of one namespace are
probed, published and loaded by a view (:meth:`Shelf.view`, :mod:`kvshelf.shelf.view`).

Contracts
---------
* All methods but :meth:`Shelf.view` block on storage. All may be called from any number of
  threads; those that block never from an engine's step thread.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvshelf.backends import Backend, Deadlines, open_backend
from kvshelf.backends.base import delete_one
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    ObjectMissingError,
    ObjectNameError,
    StorageError,
)
from kvshelf.format.names import DESCRIPTION, ParsedName, parse_namespace_folder, parse_path
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.leftovers import read_small
from kvshelf.shelf.view import NamespaceView

#: Views that a shelf keeps, those that were asked for last: an engine whose weights change has a
#: namespace after another, each with a view for each kind of the model and the drafter.
_VIEWS: Final = 16
#: Most bytes of a description that are read. Those of real models have some tens of thousands; one
#: of this size, which may be forged, costs a second.
_DESCRIPTION_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace folder of a shelf.

    Attributes
    ----------
    folder : str
        Its name.
    namespace : Namespace or None
        What its ``namespace.json`` says; None when that is missing or does not fit the folder.
    problem : str or None
        Why `namespace` is None.
    """

    folder: str
    namespace: Namespace | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ShelfObject:
    """One object in a listing.

    Attributes
    ----------
    name : str
        Relative to the shelf's root.
    parsed : ParsedName
        What the name says, the namespace folder included.
    size : int
        Bytes.
    mtime : float
        When it was written, in seconds since the epoch.
    atime : float or None
        When it was last used, as far as the storage records that; None where it does not.
    """

    name: str
    parsed: ParsedName
    size: int
    mtime: float
    atime: float | None = None


class Shelf:
    """A store of chunks: one backend, any number of namespaces.

    Parameters
    ----------
    backend : Backend
        Closed together with the shelf.
    counters : Counters, optional
        Gets the times of probes, reads, verifications and writes.
    deadlines : Deadlines, optional
        How long its calls may take; those of its properties when absent. Of no meaning for a
        backend that is guarded already.

    Attributes
    ----------
    backend : GuardedBackend
        `backend` itself, or around it: all calls have deadlines, and a circuit breaker opens when
        the storage fails.
    """

    def __init__(
        self,
        backend: Backend,
        counters: Counters | None = None,
        *,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.backend = (
            backend if isinstance(backend, GuardedBackend) else GuardedBackend(backend, deadlines)
        )
        self._counters = Counters() if counters is None else counters
        self._view = functools.lru_cache(_VIEWS)(self._make_view)

    def __repr__(self) -> str:
        return f"Shelf({self.url!r})"

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where the shelf is, without secrets."""
        return self.backend.url

    @property
    def read_only(self) -> bool:
        """Whether writes are known to be refused, by option or by the storage."""
        return self.backend.properties.read_only

    @property
    def available(self) -> bool:
        """Whether anything can be loaded: False while the breaker is open."""
        return self.backend.reads.is_closed

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory in front of the storage; 0 without one."""
        return 0

    def close(self) -> None:
        """Release what the backend holds. Idempotent."""
        self.backend.close()

    @property
    def share(self) -> Callable[[Any], None] | None:
        """Lets the owner of the storage read an :class:`~kvshelf.memory.arena.Arena`.

        Objects are stored from there. One arena at a time; None: no other process reads any.
        """
        return None

    def view(self, fmt: ObjectFormat) -> NamespaceView:
        """Return the objects of one kind in one namespace; the same view while it is in use.

        Parameters
        ----------
        fmt : ObjectFormat
            Format of the objects, see :meth:`ObjectFormat.of`.
        """
        return self._view(fmt)

    def _make_view(self, fmt: ObjectFormat) -> NamespaceView:
        return NamespaceView(self.backend, fmt, self._counters)

    # ---------------------------------------------------------------------------------- listings

    def namespaces(self) -> Iterator[NamespaceInfo]:
        """Yield the namespace folders of the shelf, by name.

        Raises
        ------
        StorageError
            If the storage failed; an error with one description is that entry's `problem`.
        """
        for folder in self.backend.folders():
            tag = parse_namespace_folder(folder)
            if tag is None:
                continue
            try:
                namespace = read_namespace(self.backend, folder)
            except ObjectMissingError:
                yield NamespaceInfo(folder, None, f"it has no {DESCRIPTION}")
            except (StorageError, ConfigError, BadObjectError, ValueError) as exc:
                yield NamespaceInfo(folder, None, f"its {DESCRIPTION} cannot be used: {exc}")
            else:
                if namespace.digest.hex()[:16] == tag:
                    yield NamespaceInfo(folder, namespace)
                else:
                    problem = (
                        f"its {DESCRIPTION} belongs to the digest {namespace.digest.hex()[:16]}"
                    )
                    yield NamespaceInfo(folder, None, problem)

    def objects(self, namespace_folder: str | None = None) -> Iterator[ShelfObject]:
        """Stream the objects of one namespace folder or of all; foreign files are skipped.

        Parameters
        ----------
        namespace_folder : str, optional
            Name of the folder, as in :class:`NamespaceInfo`.

        Raises
        ------
        ObjectNameError
            If `namespace_folder` is not the name of a namespace folder.
        StorageError
            If the storage failed.
        """
        if namespace_folder is None:
            folders = [f for f in self.backend.folders() if parse_namespace_folder(f) is not None]
        elif parse_namespace_folder(namespace_folder) is None:
            raise ObjectNameError(
                f"{namespace_folder!r} is not a namespace folder: expected <slug>-<16 hex>"
            )
        else:
            folders = [namespace_folder]
        for folder in folders:
            for info in self.backend.list(folder):
                parsed = parse_path(info.name)
                if parsed is not None:
                    yield ShelfObject(info.name, parsed, info.size, info.mtime, info.atime)

    def delete(self, name: str) -> bool:
        """Delete one object by its name in a listing; False when it was not there.

        Raises
        ------
        ObjectNameError
            If `name` is not that of an object: nothing else is ever deleted.
        StorageError
            If the storage failed.
        """
        if parse_path(name) is None:
            raise ObjectNameError(f"{name!r} is not the name of an object of a shelf")
        return delete_one(self.backend, name)


def read_namespace(backend: Backend, folder: str) -> Namespace:
    """Read the description in a namespace folder.

    Raises
    ------
    ConfigError, ValueError
        If it is not one, or too large for one.
    StorageError
        If there is none, or it cannot be read.
    """
    record = read_small(backend, f"{folder}/{DESCRIPTION}", _DESCRIPTION_BYTES)
    return Namespace.from_bytes(record, folder[:-17])


def is_missing(backend: Backend) -> bool:
    """Whether `backend` is a directory that does not exist.

    Other storages have no root that could be missing.
    """
    return isinstance(backend, PosixBackend) and not os.path.isdir(backend.root)


def open_shelf(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    read_only: bool = False,
    keep_atime: bool = False,
    counters: Counters | None = None,
    deadlines: Mapping[str, float] | None = None,
) -> Shelf:
    """Open the shelf at `url`.

    Parameters
    ----------
    url : str or os.PathLike
        A directory or a URL, see :func:`kvshelf.backends.open_backend`.
    storage_options : Mapping, optional
        Options of the storage.
    read_only : bool
        Refuse every change.
    keep_atime : bool
        Reads are not uses, see :func:`kvshelf.backends.open_backend`.
    counters : Counters, optional
        Gets the times of probes, reads, verifications and writes.
    deadlines : Mapping, optional
        Fields of :class:`~kvshelf.backends.Deadlines` that replace those of the storage.

    Raises
    ------
    ConfigError
        If the URL or the options cannot be used.
    StorageError
        If the storage could not be opened.

    Examples
    --------
    >>> with open_shelf("memory://example") as shelf:
    ...     list(shelf.objects())
    []
    """
    backend = open_backend(
        url, storage_options=storage_options, read_only=read_only, keep_atime=keep_atime
    )
    if (storage_options or {}).get("create") is False and is_missing(backend):
        backend.close()
        raise ConfigError(
            f"{backend.url} does not exist, and storage_options say that it is not to be made"
            " (create: false): mount it, or leave create out"
        )
    limits = replace(backend.properties.deadlines, **(deadlines or {}))
    return Shelf(backend, counters, deadlines=limits)
