"""What the keepers of one shelf say to each other: a heartbeat of each, below ``.kvshelf/keepers``.

A *keeper* is a process that evicts. Owns the time by which ages count, and the heartbeats: small
JSON files, each rewritten while its keeper sweeps. Its time is the storage's clock; the number of
recent ones is the number of keepers.

Contracts
---------
* A heartbeat decides no deletion: forged ones make stores smaller, sweeps for ages rarer, and uses
  recorded more often, or not.
* What is read is bounded: the names of a listing, and the bytes of a heartbeat.

Threads
-------
All functions block on the storage, and may be called on any thread.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import time
from bisect import bisect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from kvshelf.backends import Backend, ObjectInfo
from kvshelf.capacity import limits
from kvshelf.capacity.sweep import KEEPERS
from kvshelf.errors import StorageError
from kvshelf.logs import RateLimitedLog
from kvshelf.shelf.leftovers import read_small

logger = logging.getLogger(__name__)

#: Seconds by which the clocks of a storage and of this machine may differ where anything is deleted
#: because of its age; asking for the time may take a minute of it.
MOST_APART: Final = 3600.0 + 60.0
#: A time at which nothing is old.
NEVER_OLD: Final = -math.inf
_apart_log: Final = RateLimitedLog(logger, seconds=3600.0)


def time_for_ages(now: float, url: str) -> float:
    """Return the time by which files are old enough to be deleted.

    That is the earlier of the storage's time and this machine's: a clock that is ahead deletes
    nothing early. While they differ by more than an hour it is :data:`NEVER_OLD`, and a warning
    says so.

    Parameters
    ----------
    now : float
        The storage's time: the mtime of what was written now.
    url : str
        The storage, for the warning.
    """
    local_time = time.time()
    if abs(now - local_time) <= MOST_APART:
        return min(now, local_time)
    _apart_log.warning(
        "%s: the storage's clock is %.0f s %s this machine's: nothing is deleted because of its age"
        " until they agree to an hour. Correct the clock that is wrong",
        url,
        abs(now - local_time),
        "ahead of" if now > local_time else "behind",
    )
    return NEVER_OLD


def _heartbeats(backend: Backend) -> list[ObjectInfo]:
    """Return the heartbeats, the newest first."""
    rows = itertools.islice(backend.list(KEEPERS, flat=True), limits.MOST_HEARTBEATS)
    return sorted(rows, key=_at, reverse=True)


def _at(info: ObjectInfo) -> float:
    # On a full disk a heartbeat cannot be written, but touched.
    return max(info.mtime, info.atime or 0.0)


def say(backend: Backend, name: str, said: Mapping[str, Any]) -> tuple[float, int, int]:
    """Write a keeper's heartbeat; return the storage's time, its place among keepers, their number.

    Where it cannot be written it is touched, or made without a byte, which a full disk may take.
    Else the newest time of any heartbeat counts.

    Raises
    ------
    StorageError
        If heartbeats cannot be listed, or there is none and none can be written.
    """
    own_name = f"{KEEPERS}/{name}"
    problem: StorageError | None = None
    try:
        backend.write(own_name, [json.dumps(said).encode()], "replace")
    except StorageError as error:
        problem = error
        with suppress(StorageError):
            if backend.info(own_name) is None:
                backend.write(own_name, [b""])
            backend.touch(own_name)
    heartbeats = _heartbeats(backend)
    own_info = next((info for info in heartbeats if info.name == own_name), None) or backend.info(
        own_name
    )
    own_info = own_info or next(iter(heartbeats), None)
    if own_info is None:
        late = "what was just written is not listed"
        raise problem or StorageError(errno.ENOENT, late, backend.url)
    now = _at(own_info)
    alive = sorted(info.name for info in heartbeats if abs(_at(info) - now) < limits.ALIVE_SECONDS)
    return now, bisect(alive, own_name) - 1, max(len(alive), 1)


def read(backend: Backend, most: int = limits.MOST_READ) -> dict[str, dict[str, Any]]:
    """Return what the keepers that spoke last say, by name; ``at`` is when.

    Alive are those that were as recent as the newest, so that no clock is needed.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    heartbeats = _heartbeats(backend)
    # One from the future would hide the others; unless all are, and this machine's clock is behind.
    end = time.time() + MOST_APART
    heartbeats = [info for info in heartbeats if _at(info) < end] or heartbeats
    heartbeat_of: dict[str, dict[str, Any]] = {}
    for info in heartbeats[:most]:
        if _at(info) <= _at(heartbeats[0]) - limits.ALIVE_SECONDS:
            continue
        with suppress(StorageError, ValueError, RecursionError):
            value = json.loads(read_small(backend, info.name, limits.HEARTBEAT_BYTES))
            if isinstance(value, dict):
                heartbeat_of[info.name.rpartition("/")[2]] = {**value, "at": _at(info)}
    return heartbeat_of


def number(said: Mapping[str, Any], name: str) -> float | None:
    """Return a positive number that a keeper says; None where it says none."""
    value = said.get(name)
    with suppress(OverflowError):
        if isinstance(value, int | float) and 0 < float(value) < math.inf:
            return float(value)
    return None


def smallest(said: Mapping[str, Mapping[str, Any]], *names: str) -> dict[str, float]:
    """Return the smallest number that any keeper says, by name."""
    numbers = {name: [number(heartbeat, name) for heartbeat in said.values()] for name in names}
    given = {name: [n for n in values if n is not None] for name, values in numbers.items()}
    return {name: min(values) for name, values in given.items() if values}


def evicts_after(backend: Backend) -> float | None:
    """Return the least age in seconds at which a keeper that spoke last deletes chunks, or None."""
    smallest_ages = smallest(read(backend, limits.NEWEST), "evicts_after", "max_age")
    return min(smallest_ages.values(), default=None)


def bounds(said: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the bounds of a shelf: the smallest that any of its keepers says, by option."""
    return smallest(said, "max_bytes", "max_age", "group_max_bytes")
