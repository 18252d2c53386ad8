"""What the keepers of one shelf say to each other: a marker of each, below ``.kvshelf/keepers``.

Owns the time by which ages count, and the markers. A marker is a small JSON file that its keeper
writes anew while it visits. Its time is the storage's clock; the number of recent ones is the
number of keepers.

Contracts
---------
* A marker decides no deletion: forged ones make stores smaller, visits because of ages rarer, and
  uses recorded more often, or not.
* What is read is bounded: :data:`MOST` names of a listing, 4 KiB of a marker.

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
from kvshelf.capacity.visit import KEEPERS
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

#: Seconds without a visit after which a keeper does not count.
ALIVE_SECONDS: Final = 600.0
#: Most markers that are looked at.
MOST: Final = 1024
#: Most markers that are read, and most bytes of each.
_MOST_READ: Final = 64
_NEWEST: Final = 3
_BYTES: Final = 4096


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
    own = time.time()
    if abs(now - own) <= MOST_APART:
        return min(now, own)
    _apart_log.warning(
        "%s: the storage's clock is %.0f s %s this machine's: nothing is deleted because of its age"
        " until they agree to an hour. Correct the clock that is wrong",
        url,
        abs(now - own),
        "ahead of" if now > own else "behind",
    )
    return NEVER_OLD


def _markers(backend: Backend) -> list[ObjectInfo]:
    """Return the markers, the newest first."""
    found = list(itertools.islice(backend.list(KEEPERS, flat=True), MOST))
    return sorted(found, key=_at, reverse=True)


def _at(info: ObjectInfo) -> float:
    # On a full disk a marker cannot be written, but touched.
    return max(info.mtime, info.atime or 0.0)


def say(backend: Backend, name: str, said: Mapping[str, Any]) -> tuple[float, int, int]:
    """Write a keeper's marker; return the storage's time, its place among keepers, their number.

    Where it cannot be written it is touched, or made without a byte, which a full disk may take.
    Else the newest time of any marker counts.

    Raises
    ------
    StorageError
        If the markers cannot be listed, or there is none and none can be written.
    """
    problem: StorageError | None = None
    try:
        backend.write(f"{KEEPERS}/{name}", [json.dumps(said).encode()], "replace")
    except StorageError as error:
        problem = error
        with suppress(StorageError):
            if backend.info(f"{KEEPERS}/{name}") is None:
                backend.write(f"{KEEPERS}/{name}", [b""])
            backend.touch(f"{KEEPERS}/{name}")
    found = _markers(backend)
    own = next((info for info in found if info.name == f"{KEEPERS}/{name}"), None)
    if own is None:
        own = backend.info(f"{KEEPERS}/{name}") or next(iter(found), None)
    if own is None:
        late = "what was just written is not listed"
        raise problem or StorageError(errno.ENOENT, late, backend.url)
    now = _at(own)
    alive = sorted(info.name for info in found if abs(_at(info) - now) < ALIVE_SECONDS)
    return now, bisect(alive, f"{KEEPERS}/{name}") - 1, max(len(alive), 1)


def read(backend: Backend, most: int = _MOST_READ) -> dict[str, dict[str, Any]]:
    """Return what the keepers that spoke last say, by name; ``at`` is when.

    Alive are those that were as recent as the newest, so that no clock is needed.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    found = _markers(backend)
    # One from the future would hide the others; unless all are, and this machine's clock is behind.
    end = time.time() + MOST_APART
    found = [info for info in found if _at(info) < end] or found
    said: dict[str, dict[str, Any]] = {}
    for info in found[:most]:
        if _at(info) <= _at(found[0]) - ALIVE_SECONDS:
            continue
        with suppress(StorageError, ValueError, RecursionError):
            value = json.loads(read_small(backend, info.name, _BYTES))
            if isinstance(value, dict):
                said[info.name.rpartition("/")[2]] = {**value, "at": _at(info)}
    return said


def number(said: Mapping[str, Any], name: str) -> float | None:
    """Return a positive number that a keeper says; None where it says none."""
    value = said.get(name)
    with suppress(OverflowError):
        if isinstance(value, int | float) and 0 < float(value) < math.inf:
            return float(value)
    return None


def evicts_after(backend: Backend) -> float | None:
    """Return the least age in seconds at which a keeper that spoke last deletes chunks, or None."""
    ages = [
        age
        for said in read(backend, _NEWEST).values()
        for name in ("evicts_after", "max_age")
        if (age := number(said, name)) is not None
    ]
    return min(ages, default=None)


def bounds(said: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the bounds of a shelf: the smallest that any of its keepers says, by option."""
    found: dict[str, float] = {}
    for name in ("max_bytes", "max_age", "group_max_bytes"):
        values = [value for one in said.values() if (value := number(one, name)) is not None]
        if values:
            found[name] = min(values)
    return found
