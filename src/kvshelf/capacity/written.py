"""What all writers of a shelf have written, where the storage does not report its free space.

Owns the files ``.kvshelf/written/<id>-<bytes>`` at the root of a shelf: each process that stores to
a bounded shelf publishes there how much it has written since it started. The number is in the name,
so that one listing reads them all. To publish a new number a process writes a new file and removes
its old one.

Contracts
---------
* Any writer of the shelf can write false numbers there. They decide when stores end and when a
  shelf is listed again, never what is deleted. A number that makes no sense is ignored.
* A process that lists the shelf removes files older than a day: their writers have ended, or
  publish again and begin at 0.
* A process that may not delete publishes once only.

Blocks on the storage. Used by one thread.
"""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from typing import Final

from kvshelf.backends import Backend
from kvshelf.errors import StorageError

logger = logging.getLogger(__name__)

#: The folder.
WRITTEN: Final = ".kvshelf/written"
#: Seconds between two publications: at most, while there is much space, and at least.
PUBLISH_SECONDS: Final = 60.0
_LEAST_SECONDS: Final = 1.0
#: All writers together may have written this part of the space that is left without publishing it.
_UNPUBLISHED_PART: Final = 1 / 8
#: A file of this age belongs to a process that has ended.
_OLD_SECONDS: Final = 86400.0
#: Most files that are read: a listing may have no end.
_MOST_FILES: Final = 65536
_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,18})", re.ASCII)


class Written:
    """What the writers of one shelf have written; publishes this process's part.

    Parameters
    ----------
    backend : Backend
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._id = secrets.token_hex(8)
        #: What this process had written when it began to publish under its name.
        self._base = 0
        self._published = 0
        self._name: str | None = None
        self._publishes = True
        #: What each of the others had written, those that the last listing missed, and old files.
        self._others: dict[str, int] = {}
        self._missed: set[str] = set()
        self._old: list[str] = []
        self._read_at = -math.inf

    @property
    def is_used(self) -> bool:
        """Whether anything was read or published."""
        return self._read_at > -math.inf

    def total(self, own: int) -> int:
        """Return the bytes that all processes have written, this one `own`."""
        return sum(self._others.values()) + own - self._base

    def exchange(self, own: int, left: float, now: float, *, at_once: bool = False) -> None:
        """Publish what this process has written, and read what others have, if it is time.

        Parameters
        ----------
        own : int
            Bytes that this process has written.
        left : float
            Bytes that may still be written to the shelf.
        now : float
            The storage's time.
        at_once : bool
            It is time.

        Raises
        ------
        StorageError
            If the storage failed while the files were listed.
        """
        passed = time.monotonic() - self._read_at
        unpublished = own - self._published
        hurries = unpublished * (len(self._others) + 1) > left * _UNPUBLISHED_PART
        if not at_once and passed < (_LEAST_SECONDS if hurries else PUBLISH_SECONDS):
            return
        self._read_at = time.monotonic()
        self._read(now)
        if self._name is None or unpublished > 0:
            self.publish(own)

    def look(self, now: float) -> int:
        """Return the bytes that all processes have published; publish nothing.

        Parameters
        ----------
        now : float
            The storage's time.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        self._read(now)
        return self.total(0)

    def publish(self, own: int) -> None:
        """Publish what this process has written. Best effort."""
        if not self._publishes or (self._name is not None and own <= self._published):
            return
        name = f"{WRITTEN}/{self._id}-{own - self._base}"
        before = self._name
        try:
            self._backend.write_marker(name)
            self._name, self._published = name, own
            if before is not None:
                self._backend.delete(before)
        except StorageError as error:
            # Files that cannot be removed would accumulate.
            self._publishes = error.retryable
            logger.debug("what was written was not published: %s", error)

    def _read(self, now: float) -> None:
        found: dict[str, int] = {}
        self._old = []
        is_there = False
        for count, info in enumerate(self._backend.list(WRITTEN, hidden=True)):
            if count >= _MOST_FILES:
                break
            is_there |= info.name == self._name
            parsed = _NAME.fullmatch(info.name.removeprefix(f"{WRITTEN}/"))
            if parsed is None or parsed[1] == self._id:
                continue
            nbytes = int(parsed[2])
            # One that could not remove its old file has two.
            found[parsed[1]] = max(nbytes, found.get(parsed[1], 0))
            if info.mtime < now - _OLD_SECONDS:
                self._old.append(info.name)
        # A file that is replaced while the folder is listed may be missed, but not twice.
        missed = self._others.keys() - found.keys() - self._missed
        self._others = found | {each: self._others[each] for each in missed}
        self._missed = missed
        if self._name is not None and not is_there:
            self._id, self._name, self._base = secrets.token_hex(8), None, self._published

    def remove_old(self) -> int:
        """Remove the files of processes that have ended; return the bytes that they published."""
        removed = 0
        for name in self._old:
            try:
                self._backend.delete(name)
            except StorageError as error:
                logger.debug("%s was not removed: %s", name, error)
                break
            removed += self._others.pop(name.rpartition("/")[2][:16], 0)
        self._old = []
        return removed
