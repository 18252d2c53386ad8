"""Counters that the parts of kvshelf report into.

Owns the names of everything that is counted. A :class:`Counters` is created by
whoever assembles the parts (the vLLM connector, the command line, a test) and handed
to them; no part keeps global counts. All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

#: Every counter, with what one unit of it means.
COUNTERS: Mapping[str, str] = {
    "lookups": "look-ups of a request's stored prefix",
    "lookup_timeouts": "look-ups that were not done in time and counted as misses",
    "probes": "objects whose existence was asked for",
    "probe_errors": "probes that the storage could not answer",
    "hit_tokens": "tokens that look-ups found on the shelf",
    "query_tokens": "tokens that look-ups asked for",
    "loaded_tokens": "tokens whose KV was loaded from the shelf",
    "loaded_chunks": "chunks loaded",
    "loaded_bytes": "bytes of objects loaded",
    "load_seconds": "seconds that threads spent to read, verify and scatter",
    "load_cancelled": "loads given up because their request was aborted",
    "load_missing": "objects that were gone when a load came for them",
    "load_bad": "objects that a load found to be bad",
    "load_errors": "objects that the storage failed to deliver",
    "load_stalled": "loads given up because the storage took too long",
    "stored_chunks": "chunks published",
    "stored_bytes": "bytes of objects published",
    "store_existed": "chunks that were on the shelf already when their store came",
    "store_repaired": "bad objects replaced by good ones",
    "store_dropped_full": "chunks not stored because staging was full",
    "store_dropped_paused": "chunks not stored because the storage refuses writes for now",
    "store_errors": "chunks whose store failed",
    "store_lost": "chunks not yet published at shutdown",
    "store_seconds": "seconds that threads spent to hash and write",
    "gather_seconds": "seconds that steps spent to copy KV into staging",
}


class Counters:
    """Named sums, see :data:`COUNTERS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the counter `name`.

        Raises
        ------
        KeyError
            If `name` is not one of :data:`COUNTERS`.
        """
        if name not in COUNTERS:
            raise KeyError(name)
        with self._lock:
            self._sums[name] = self._sums.get(name, 0) + amount

    def snapshot(self) -> dict[str, float]:
        """Return all sums that are not zero."""
        with self._lock:
            return dict(self._sums)

    def take(self) -> dict[str, float]:
        """Return all sums that are not zero and start again from zero."""
        with self._lock:
            sums, self._sums = self._sums, {}
            return sums
