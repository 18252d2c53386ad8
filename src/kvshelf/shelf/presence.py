"""The presence cache: which chunks a high-latency storage was seen to have a short while ago.

Owns for how long such an answer holds. It knows keys and times; it does not call the storage. Each
kind of a chunk is remembered for itself, by its kind key (:func:`kvshelf.format.kinds.kind_key`).

A chunk is *seen* if all its objects were, and *inferred* if it lies before a chunk that a search
found. Nothing is remembered of what is missing.

Contracts
---------
* An answer counts from when it was asked for, and never replaces a newer one: neither what was
  dropped since, nor what was seen.
* All methods take a lock for a moment. Any thread may call them, an engine's step thread too.
* The number of entries is bounded; the oldest are forgotten first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final


class _Known(Enum):
    SEEN = "seen"
    INFERRED = "inferred"
    DROPPED = "dropped"


_NEVER: Final = (float("-inf"), _Known.DROPPED)


class PresenceCache:
    """What was learned about chunks, see the module.

    Parameters
    ----------
    seconds : float
        For how long an answer holds.
    limit : int
        Most entries.
    """

    def __init__(self, seconds: float = 60.0, limit: int = 65536) -> None:
        self._seconds = seconds
        self._limit = limit
        #: When it was asked for, and what is known.
        self._entries: OrderedDict[bytes, tuple[float, _Known]] = OrderedDict()
        self._cleared = _NEVER[0]
        self._lock = threading.Lock()

    def note(self, keys: Iterable[bytes], asked: float, *, seen: bool = True) -> None:
        """Take an answer: these chunks are there.

        Parameters
        ----------
        keys : iterable of bytes
        asked : float
            ``time.monotonic()`` of before the probe was sent, or the search began.
        seen : bool
            All their objects were seen; else they are inferred.
        """
        how = _Known.SEEN if seen else _Known.INFERRED
        for key in keys:
            self._put(key, asked, how)

    def drop(self, key: bytes) -> None:
        """Note that a chunk is not there: a load failed, or it was removed."""
        self._put(key, time.monotonic(), _Known.DROPPED)

    def _put(self, key: bytes, asked: float, known: _Known) -> None:
        with self._lock:
            if asked <= max(self._cleared, self._entries.get(key, _NEVER)[0]):
                return
            # The newest stand last.
            self._entries[key] = asked, known
            self._entries.move_to_end(key)
            if len(self._entries) > self._limit:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, and take no answer that was asked for before."""
        with self._lock:
            self._entries.clear()
            self._cleared = time.monotonic()

    def has(self, key: bytes, *, seen: bool) -> bool:
        """Whether a chunk is known to be there; with `seen`, not merely inferred."""
        asked_at, how = self._entries.get(key, _NEVER)
        is_there = how is _Known.SEEN or (how is _Known.INFERRED and not seen)
        return is_there and time.monotonic() < asked_at + self._seconds

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return how many of `keys` come before the first that is not known to be there."""
        places = enumerate(keys)
        return next((index for index, key in places if not self.has(key, seen=False)), len(keys))
