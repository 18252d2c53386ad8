"""Files of a namespace that are not what they should be: replaced, or set aside.

Owns when a file may be replaced or set aside, which is renamed to a temporary's name in its place.
A file that was found bad stays where it is

* if its size is wrong and it changed within the last minute (it may still be copied to its place),
  or caches of the storage may show the size of an earlier file;
* if it was found bad for its size or kind, and is a file of the right size now: it was replaced;
* unless its user wants it set aside: if its chunk is pinned, or this process has set aside eight
  files, and then one a minute. A machine that reads wrong bytes thus takes few objects from others.

What stays is replaced by the next store of its chunk.

All methods block on the storage, and any thread may call them.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from kvshelf.backends import Backend, BytesLike, WriteResult
from kvshelf.backends.base import probe
from kvshelf.errors import BadObjectError, NotRegularError
from kvshelf.format.invalid import Defect
from kvshelf.format.names import parse_path
from kvshelf.logs import RateLimitedLog
from kvshelf.shelf.pins import Pins

logger = logging.getLogger(__name__)

#: Seconds after its last change in which an object of wrong size may still be being copied.
COPY_SECONDS: Final = 60.0
#: Defects that a file of the right size does not have; None is that of what is no file.
_WRONG_SIZE: Final = (None, Defect.EMPTY_OBJECT, Defect.TRUNCATED_OBJECT, Defect.WRONG_SIZE)


class RepairBudget:
    """How many files a process sets aside: eight, and then one a minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: When it is full again.
        self._full = 0.0
        self._log = RateLimitedLog(logger, seconds=3600.0)

    def take(self, url: str) -> bool:
        """Whether one more file of a storage may be set aside; log that none may."""
        now = time.monotonic()
        with self._lock:
            full = max(self._full, now) + 60.0
            if full <= now + 8 * 60.0:
                self._full = full
                return True
        self._log.warning(
            "%s: more objects were found bad than are set aside (8, and then one a minute; stores"
            " replace the others): this machine reads wrong bytes, or the shelf is damaged."
            " `kvshelf verify SHELF` on another machine says which",
            url,
        )
        return False


#: That of this process.
budget = RepairBudget()


def create(backend: Backend, name: str, buffer: BytesLike, size: int) -> WriteResult:
    """Write a file unless one of its size is there.

    Parameters
    ----------
    backend : Backend
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
    result = backend.write(name, [buffer])
    if result is not WriteResult.EXISTED:
        return result
    answer = probe(backend, name)
    if answer == size:
        return result
    if answer is None:
        return backend.write(name, [buffer])
    # While its size is no evidence of damage, replacing it is right all the same: a copier
    # continues with a file that has no name any more.
    return replace(backend, name, buffer)


def replace(backend: Backend, name: str, buffer: BytesLike) -> WriteResult:
    """Write a file, and replace what is in its place."""
    try:
        backend.write(name, [buffer], "replace")
    except NotRegularError:
        backend.set_aside(name)
        backend.write(name, [buffer], "replace")
    return WriteResult.REPLACED


def set_aside(
    backend: Backend, name: str, size: int | None, bad: Exception, *, wanted: bool = False
) -> bool | None:
    """Set aside a file that was found bad, unless it stays, see the module.

    Parameters
    ----------
    backend : Backend
    name : str
        Relative to the shelf's root.
    size : int or None
        The bytes that it should have; None if the namespace has no object of this name.
    bad : Exception
        What was found wrong with it.
    wanted : bool
        Its user wants this: neither pins nor the number of files matter.

    Returns
    -------
    bool or None
        Whether it was moved; None if there is none.

    Raises
    ------
    StorageError
        If the storage refused or failed.
    """
    answer = probe(backend, name)
    if answer is None:
        return None
    if isinstance(answer, int) and size is not None:
        if answer != size:
            if not _is_surely_of_wrong_size(backend, name):
                return False
        elif isinstance(bad, BadObjectError) and bad.defect in _WRONG_SIZE:
            return False
    if not wanted and (not budget.take(backend.url) or _is_pinned(backend, name)):
        return False
    return backend.set_aside(name)


def _is_pinned(backend: Backend, name: str) -> bool:
    parsed = parse_path(name)
    if parsed is None or parsed.namespace is None:
        return False
    return Pins.read(backend).covers(parsed.namespace, parsed.salt_group, parsed.key)


def _is_surely_of_wrong_size(backend: Backend, name: str) -> bool:
    """Whether a wrong size that was seen shows that the object is bad."""
    if backend.properties.cache_seconds:
        return False
    info = backend.info(name)
    return info is None or time.time() - info.mtime >= COPY_SECONDS
