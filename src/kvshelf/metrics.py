"""Counters, gauges and times that the parts of kvshelf report into.

Owns the names of everything that is measured, and under which names and labels a monitoring
system sees it. A :class:`Counters` is created by whoever assembles the parts (the vLLM
connector, the command line, a test) and handed to them; no part keeps global counts. All
methods may be called from any thread, cost about a microsecond and never block on more
than a lock that is held for as long.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final, Literal

#: What begins the name of every metric in a monitoring system. vLLM makes and removes
#: metrics by the first five characters.
METRIC_PREFIX: Final = "vllm:kvshelf_"

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
    "load_cancelled": "loads given up because their request was aborted",
    "load_missing": "objects that were gone when a load came for them",
    "load_bad": "objects that a load found to be bad",
    "load_errors": "objects that the storage failed to deliver",
    "load_stalled": "loads given up because the storage took too long",
    "load_paused": "loads given up because the storage is given a rest",
    "lookup_paused": "requests for which nothing was looked up, as the storage is given a rest",
    "late_calls": "calls of the storage that took longer than their deadline",
    "kept_threads": "threads that the storage kept beyond a deadline, and that were replaced",
    "breaker_opened": "times that the storage was given a rest, or that its writes were stopped",
    "breaker_closed": "times that the storage, or its writes, were used again",
    "prefetched_objects": "objects brought into memory ahead of their use",
    "prefetched_bytes": "bytes brought into memory ahead of their use",
    "prefetch_unused_objects": "objects brought into memory for requests that then did not load",
    "memory_objects": "objects that loads found in memory",
    "disk_tier_objects": "objects that loads found in the disk tier",
    "disk_tier_loaded_bytes": "bytes of objects that loads found in the disk tier",
    "disk_tier_written_bytes": "bytes of objects copied to the disk tier",
    "disk_tier_evicted_objects": "objects removed from the disk tier to make room",
    "disk_tier_evicted_bytes": "bytes of objects removed from the disk tier to make room",
    "disk_tier_bad": "bad copies found in the disk tier, and removed",
    "disk_tier_dropped": "objects not copied to the disk tier, since it was at rest or too slow",
    "disk_tier_rests": "times that the disk tier was given a rest, or that its writes were stopped",
    "stored_chunks": "chunks published",
    "stored_bytes": "bytes of objects published",
    "store_existed": "chunks that were on the shelf already when their store came",
    "store_repaired": "bad objects replaced by good ones",
    "store_dropped_full": "chunks not stored because staging was full",
    "store_dropped_paused": "chunks not stored because the storage takes no writes for now",
    "store_dropped_hole": "chunks not stored because one before them was not",
    "store_not_finite": "chunks not stored because their KV holds NaN or infinity",
    "store_errors": "chunks whose store failed",
    "store_lost": "chunks not yet published at shutdown",
}

#: Counters that a monitoring system sees as one metric with a label ``reason``: the metric's
#: meaning, and its reasons with the counter of each. All others are metrics of their own.
FAMILIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "load_failures": (
        "what kept loads from being complete, by reason",
        {
            "missing": "load_missing",
            "bad": "load_bad",
            "error": "load_errors",
            "stalled": "load_stalled",
        },
    ),
    "chunks_not_stored": (
        "chunks that were computed and not stored, by reason",
        {
            "staging_full": "store_dropped_full",
            "paused": "store_dropped_paused",
            "hole": "store_dropped_hole",
            "not_finite": "store_not_finite",
            "error": "store_errors",
            "shutdown": "store_lost",
        },
    ),
}

#: Every operation whose time is measured, with what is measured once.
OPERATIONS: Mapping[str, str] = {
    "probe": "asking the storage for the existence of a batch of objects",
    "read": "waiting for the storage's bytes of one object",
    "verify": "checking one object that is read",
    "scatter": "copying one object into the paged KV cache",
    "gather": "copying one chunk out of the paged KV cache, within an engine's step",
    "publish": "writing one object",
}

#: Metric of the times of all operations.
TIMES: Final = "operation_time_seconds"

#: Upper bounds, in seconds, of the buckets in which times are counted; one more has no bound.
TIME_BOUNDS: tuple[float, ...] = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0),
)

#: Every gauge: its meaning, and how those of several processes of an engine become one.
GAUGES: Mapping[str, tuple[str, Literal["sum", "max"]]] = {
    "staging_used_bytes": ("bytes of staging in use when a step ended", "sum"),
    "staging_limit_bytes": ("most bytes of staging that may be in use", "sum"),
    "loads_breaker_state": ("whether the storage is asked: 0 yes, 1 being tried, 2 at rest", "max"),
    "stores_breaker_state": ("whether stores are tried: 0 yes, 1 being tried, 2 at rest", "max"),
    "disk_tier_bytes": ("bytes of all objects in the disk tier", "max"),
    "calls_past_deadline": ("calls of the storage that are past their deadline now", "sum"),
}


class Counters:
    """Named sums, gauges and times, see :data:`COUNTERS`, :data:`GAUGES`, :data:`OPERATIONS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._moved = False
        self._times: dict[str, list[float]] = {}

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

    def set_gauge(self, name: str, value: float) -> None:
        """Note that the gauge `name` now stands at `value`.

        Raises
        ------
        KeyError
            If `name` is not one of :data:`GAUGES`.
        """
        if name not in GAUGES:
            raise KeyError(name)
        if self._gauges.get(name) != value:
            with self._lock:
                self._gauges[name] = value
                self._moved = True

    def observe(self, operation: str, seconds: float) -> None:
        """Count the time that one operation took.

        Raises
        ------
        KeyError
            If `operation` is not one of :data:`OPERATIONS`.
        """
        bucket = bisect_left(TIME_BOUNDS, seconds)
        with self._lock:
            times = self._times.get(operation)
            if times is None:
                if operation not in OPERATIONS:
                    raise KeyError(operation)
                times = self._times[operation] = [0] * (len(TIME_BOUNDS) + 1) + [0.0]
            times[bucket] += 1
            times[-1] += seconds

    def snapshot(self) -> dict[str, float]:
        """Return all sums that are not zero."""
        with self._lock:
            return dict(self._sums)

    def gauges(self) -> dict[str, float]:
        """Return all gauges that were ever set."""
        with self._lock:
            return dict(self._gauges)

    def times(self) -> dict[str, list[float]]:
        """Return, for each operation that took place, counts by bucket, then the sum of seconds."""
        with self._lock:
            return {name: list(times) for name, times in self._times.items()}

    def take(self) -> dict[str, Any]:
        """Return what came since the last call: plain data, by name.

        Returns
        -------
        dict
            A number for each counter that is not zero and each gauge; for each operation
            that took place a list: counts by bucket, then the sum of seconds. Counters and
            times start again from zero. Empty when nothing was counted and no gauge moved.
        """
        with self._lock:
            if not (self._sums or self._times or self._moved):
                return {}
            taken: dict[str, Any] = {**self._sums, **self._times, **self._gauges}
            self._sums, self._times, self._moved = {}, {}, False
            return taken
