"""Files of a namespace that are not what they should be: replaced, or moved to quarantine.

Owns when a file may be replaced or moved: a file of wrong size stays where it is if it changed
within the last minute (it may still be copied to its place) or if caches of the storage may show
the size of an earlier file. A file that was found bad for its size or kind also stays if it is a
file of the right size now: it was replaced. :mod:`kvshelf.capacity.collect` bounds the quarantine.

All methods block on the storage, and any thread may call them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Final

from kvshelf.backends import NOT_REGULAR, Backend, BytesLike, WriteResult
from kvshelf.backends.base import probe
from kvshelf.errors import NotRegularError, StorageError
from kvshelf.format.invalid import EmptyObject, TruncatedObject, WrongSize
from kvshelf.shelf.leftovers import QUARANTINE

logger = logging.getLogger(__name__)

#: Seconds after its last change in which an object of wrong size may still be being copied.
COPY_SECONDS: Final = 60.0
#: Defects that a file of the right size does not have.
_WRONG_SIZE_OR_KIND: Final = (EmptyObject, TruncatedObject, WrongSize, NotRegularError)


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Ignore errors of a move to quarantine, which is best effort."""
    try:
        yield
    except StorageError as error:
        logger.debug("a bad object could not be quarantined: %s", error)


class Repairs:
    """Replaces and moves files of a storage.

    Parameters
    ----------
    backend : Backend
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def create(self, folder: str, name: str, buffer: BytesLike, size: int) -> WriteResult:
        """Write a file unless one of its size is there.

        Parameters
        ----------
        folder : str
            The namespace's.
        name : str
            Relative to the shelf's root.
        buffer : BytesLike
        size : int
            Its bytes.

        Raises
        ------
        StorageError
            If the storage refused or failed.
        """
        result = self._backend.write(name, [buffer])
        if result is not WriteResult.EXISTED:
            return result
        found = probe(self._backend, name)
        if found == size:
            return result
        if found is None:
            return self._backend.write(name, [buffer])
        # While its size is no evidence of damage, replacing it is right all the same: a copier
        # continues with a file that has no name any more.
        if found is NOT_REGULAR or (
            self._backend.properties.can_quarantine and self._is_surely_of_wrong_size(name)
        ):
            with best_effort():
                self._quarantine(folder, name)
        return self.replace(folder, name, buffer)

    def replace(self, folder: str, name: str, buffer: BytesLike) -> WriteResult:
        """Write a file, and replace what is in its place."""
        try:
            self._backend.write(name, [buffer], "replace")
        except NotRegularError:
            self._quarantine(folder, name)
            self._backend.write(name, [buffer], "replace")
        return WriteResult.REPLACED

    def quarantine(self, name: str, size: int | None, bad: Exception) -> bool | None:
        """Move a file that was found bad to quarantine, unless it may be good now.

        Parameters
        ----------
        name : str
            Relative to the shelf's root.
        size : int or None
            The bytes that it should have; None if the namespace has no object of this name.
        bad : Exception
            What was found wrong with it.

        Returns
        -------
        bool or None
            Whether it was moved; None if there is none.

        Raises
        ------
        StorageError
            If the storage refused or failed.
        """
        found = probe(self._backend, name)
        if found is None:
            return None
        if isinstance(found, int) and size is not None:
            if found != size:
                if not self._is_surely_of_wrong_size(name):
                    return False
            elif isinstance(bad, _WRONG_SIZE_OR_KIND):
                return False
        return self._quarantine(name.partition("/")[0], name)

    def _is_surely_of_wrong_size(self, name: str) -> bool:
        """Whether a wrong size that was seen shows that the object is bad."""
        if self._backend.properties.cache_seconds:
            return False
        info, now = self._backend.info(name), self._backend.now()
        if info is None:
            return True
        # By either clock: one of them may be wrong.
        clocks = (now, time.time())
        return all(c is not None and abs(c - info.mtime) >= COPY_SECONDS for c in clocks)

    def _quarantine(self, folder: str, name: str) -> bool:
        # The time makes names sort by age: the oldest are deleted first.
        base = f"{time.time_ns():020d}-{os.urandom(4).hex()}-{name.rpartition('/')[2]}"
        return self._backend.quarantine(name, f"{folder}/{QUARANTINE}/{base}")
