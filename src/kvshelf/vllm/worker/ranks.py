"""Finds out whether all ranks see one directory: rank 0 writes a file, the others look for it.

On several machines, directories of the same name may lie on a disk of each machine. A hit, which
needs the objects of all ranks, would then never come. Owns the file and the thread of it.

Contracts
---------
* The file is a temporary: those of killed engines are deleted an hour after they were written.
  Rank 0 writes it anew before that, and deletes it at the end.
* The scheduler tells the other ranks the file's name once it is written. A rank is disabled that
  misses the file for longer than its mount's caches may. Errors of the storage disable nobody.
* Public methods run on the worker's step thread and never touch the storage. ``kvshelf-ranks``
  does, on each rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from kvshelf.backends.base import delete_one, temporary_name
from kvshelf.background import Background
from kvshelf.errors import StorageError
from kvshelf.shelf.leftovers import RESERVED
from kvshelf.tiers.tiered import AnyShelf
from kvshelf.vllm.affinity import widen_cpu_affinity
from kvshelf.vllm.metadata import Orders

logger = logging.getLogger(__name__)

#: Seconds from one look to the next, also for a shelf that is not open yet.
_LOOK_SECONDS: Final = 1.0
#: Seconds for which the file may be missing, in addition to those of a mount's caches.
_MISSING_SECONDS: Final = 10.0
#: Seconds after which the file is written anew: temporaries are deleted after an hour.
_RENEW_SECONDS: Final = 600.0


class RanksFile:
    """The file by which the ranks of one engine find out whether they see one directory.

    Parameters
    ----------
    rank : int
    shelf : Callable[[], AnyShelf or None]
        Returns the shelf, None while it is not open.
    disable : Callable[[str], object]
        Called on ``kvshelf-ranks`` with the reason, on a rank that does not see the file.
    """

    def __init__(
        self, rank: int, shelf: Callable[[], AnyShelf | None], disable: Callable[[str], object]
    ) -> None:
        self._rank, self._shelf, self._disable = rank, shelf, disable
        self._name = "" if rank else f"{RESERVED}/{temporary_name('ranks')}"
        self._written = self._told = self._closing = False
        self._missing_since: float | None = None
        step = self._look if rank else self._write
        self._thread = Background("kvshelf-ranks", step, on_start=widen_cpu_affinity)
        if not rank:
            self._thread.start()

    def take_written(self) -> str:
        """Return the file's name, once, when rank 0 has written it; else an empty string."""
        if self._told or not self._written:
            return ""
        self._told = True
        return self._name

    def take_orders(self, orders: Orders) -> None:
        """Begin to look for the file that the scheduler names."""
        if orders.ranks_file and self._rank:
            self._name = orders.ranks_file
            self._thread.start()

    def close(self) -> None:
        """End the thread, which deletes the file on rank 0."""
        self._closing = True
        self._thread.wake()

    def _write(self) -> float:
        """Write the file, or delete it at the end; return the seconds to the next call."""
        shelf = self._shelf()
        try:
            if self._closing:
                self._thread.close()
                if self._written and shelf is not None:
                    delete_one(shelf.backend, self._name)
            elif shelf is not None:
                shelf.backend.write(self._name, [], "replace")
                self._written = True
        except Exception as error:  # noqa: BLE001 - without the file nobody looks for it
            logger.debug("the file for the other ranks was not written: %s", error)
        return _LOOK_SECONDS if shelf is None else _RENEW_SECONDS

    def _look(self) -> float:
        """Look for the file; return the seconds to the next look."""
        shelf = self._shelf()
        try:
            answer = None if shelf is None else shelf.backend.stat([self._name])[0]
        except Exception as error:  # noqa: BLE001 - as an answer for the file alone
            answer = StorageError(str(error))
        if self._closing or isinstance(answer, int):
            self._thread.close()
        elif shelf is not None and answer is None:
            now, cached = time.monotonic(), shelf.backend.properties.cache_seconds
            self._missing_since = self._missing_since or now
            if now - self._missing_since > _MISSING_SECONDS + cached:
                self._thread.close()
                self._disable(
                    f"rank {self._rank} does not find the file {self._name} in {shelf.backend.url},"
                    " which rank 0 has written there: all ranks of an engine need one storage."
                    " Mount it at this path on each of their machines, or set shared_storage_path"
                    " to a URL such as s3://bucket/kv"
                )
        return _LOOK_SECONDS
