"""A directory of objects that stays below a number of bytes, however many processes write to it.

Owns when objects are evicted from it, and how many, and whether two storages are one directory. As
on a shelf, :mod:`kvshelf.capacity.collect` chooses what is deleted, unused objects only: chunks and
tails, each with all its shards and kinds. The directory knows no parents of them.

All processes count the bytes in one ledger (:mod:`kvshelf.tiers.ledger`). The estimate that bounds
a shelf (:mod:`kvshelf.capacity.bound`) is not exact enough: it follows the free space of the
filesystem, which other programs use as well; each process has its own, and takes half of the space
that it sees; and unknown numbers bound nothing.

Contracts
---------
* Nothing is written before the objects have been counted by a scan, nor an hour after the last one.
  The count is kept from one process to the next: while objects fit nothing is scanned.
* Several processes that evict at the same time stop as soon as the object fits by the ledger:
  together they remove no more than one alone.
* Only objects are counted and removed, those of other versions of the format too; and temporaries
  of killed writers are removed. Other files are left alone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from kvshelf.backends import Backend, BytesLike, Properties, WriteMode, WriteResult
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.capacity.collect import plan
from kvshelf.capacity.deletion import Outcome, carry_out
from kvshelf.capacity.inventory import Scan
from kvshelf.capacity.rules import Rules
from kvshelf.errors import BoundReachedError, StorageError, UnavailableStorageError
from kvshelf.format.names import parse_path
from kvshelf.shelf.pacing import GilPace
from kvshelf.tiers.ledger import LEDGER, Ledger

#: Share of the bound that evictions leave in use: ten objects are scanned for each written.
_FULL_AFTER: Final = 0.9
#: Seconds without a change after which a temporary belongs to a writer that was killed.
_TEMPORARY_SECONDS: Final = 300.0


class BoundedBackend(WrappedBackend):
    """A directory that refuses objects that would exceed a bound.

    Bad objects are removed from it, not set aside.

    Parameters
    ----------
    inner : PosixBackend
    max_bytes : int
        Most bytes of all objects together.

    Attributes
    ----------
    ledger : Ledger
    max_bytes : int
    """

    def __init__(self, inner: PosixBackend, max_bytes: int) -> None:
        super().__init__(inner)
        self.max_bytes = max_bytes
        self.ledger = Ledger(inner)

    @property
    def properties(self) -> Properties:
        """The properties of the directory."""
        return replace(self.inner.properties, sets_aside=False)

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish one object.

        Raises
        ------
        BoundReachedError
            If :meth:`evict` must be called first.
        """
        if parse_path(name) is None:
            return self.inner.write(name, buffers, mode)
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        before = self.inner.info(name)
        if mode == "create" and before is not None:
            return WriteResult.EXISTED
        if not self._take(size):
            raise BoundReachedError(
                errno.ENOSPC,
                f"{size} bytes more do not fit: max_bytes is {self.max_bytes}",
                self.url,
            )
        result = None
        try:
            result = self.inner.write(name, buffers, mode)
        finally:
            if result is None or result is WriteResult.EXISTED:
                with suppress(StorageError):
                    self.ledger.add(-size)
        if result is WriteResult.REPLACED and before is not None:
            self.ledger.add(-before.size)
        return result

    def delete(self, name: str) -> bool:
        """Remove one object."""
        before = self.inner.info(name) if parse_path(name) is not None else None
        deleted = self.inner.delete(name)
        if deleted and before is not None:
            self.ledger.add(-before.size, removed=True)
        return deleted

    def set_aside(self, name: str) -> bool:
        """Remove the file at `name`."""
        return self.delete(name)

    def _fits(self, size: int) -> bool:
        """Whether `size` bytes fit, by a count that is recent."""
        use = self.ledger.read()
        return use is not None and use.is_recent and use.used + size <= self.max_bytes

    def _take(self, size: int) -> bool:
        """Note an object that is about to be written, if it fits."""
        # Look first: a change that is noted and withdrawn makes the next scan less precise.
        use = self.ledger.add(size) if self._fits(size) else None
        if use is not None and use.used > self.max_bytes:
            self.ledger.add(-size)
            return False
        return use is not None

    def evict(self, size: int, guard: GuardedBackend) -> Outcome:
        """Scan the objects, and remove the first in the order of eviction until `size` bytes fit.

        Lists all objects, in small steps: not for a thread whose caller waits. Does nothing when
        they fit and the last scan is recent.

        Parameters
        ----------
        size : int
        guard : GuardedBackend
            Of this backend: all calls of the directory go through it.

        Returns
        -------
        Outcome
            Also what was done before an error of the directory, see
            :func:`kvshelf.capacity.deletion.carry_out`.

        Raises
        ------
        StorageError
            If the directory failed before anything was removed.
        """
        with guard.tracked_write(LEDGER):
            before = self.ledger.read()
            if self._fits(size):
                return Outcome()
        scan = Scan(guard, records=False, parents=None, in_part=True)
        found = scan.run(pace=GilPace().rest)
        assert found is not None
        held = int(found.size.sum()) + found.unlisted.nbytes
        with guard.tracked_write(LEDGER):
            self.ledger.restart(held, before)
            full = not self._fits(size)
        rules = Rules(
            max_bytes=self.max_bytes if full else None,
            markers=None,
            tails=None,
            temporaries=_TEMPORARY_SECONDS,
            largest=size,
            high=_FULL_AFTER,
            low=_FULL_AFTER,
        )

        outcome, noted = Outcome(), 0

        def fits_now() -> bool:
            nonlocal noted
            if not full:
                return False
            if outcome.count == noted:
                # Another process was quicker. Noting the deletions here reads its changes as well.
                with guard.tracked_write(LEDGER):
                    self.ledger.read()
            noted, used = outcome.count, self.ledger.last_used
            return used is None or not rules.to_free(used, self.max_bytes)

        return carry_out(guard, plan(found, rules), stop=fits_now, outcome=outcome)


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
