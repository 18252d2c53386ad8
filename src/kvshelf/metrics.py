"""Counters, gauges and durations that the parts of kvshelf report.

Owns the name of every measurement, and the metric names and labels that a monitoring system
sees. The code that assembles the parts (the vLLM connector, the command line, a test) creates
a :class:`Counters` and passes it to them; there are no global counts. Any thread may call any
method; a call takes about a microsecond, lock included.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, Final, Literal

#: Prefix of every metric name in a monitoring system. vLLM registers and removes metrics by the
#: first five characters.
METRIC_PREFIX: Final = "vllm:kvshelf_"


def _of_kind(kind: str, several: str) -> dict[str, str]:
    """Return the counters of a kind of KV; what they count is part of the others' counts."""
    return {
        f"{kind}_stored_chunks": f"chunks whose {several} were published",
        f"{kind}_stored_bytes": f"bytes of {several} published",
        f"{kind}_loaded_chunks": f"chunks whose {several} were loaded",
        f"{kind}_loaded_bytes": f"bytes of {several} loaded",
        f"{kind}_dropped_chunks": f"chunks whose {several} were computed but not stored",
    }


#: Every counter, with what one unit of it means. The names of a family's counters
#: (:data:`FAMILIES`) are the family's name and a reason.
COUNTERS: Mapping[str, str] = {
    "lookups": "lookups of the stored prefix of a request",
    "lookup_tokens": "tokens that lookups searched for",
    "hit_tokens": "tokens that lookups found on the shelf",
    "lookup_timeouts": "lookups that timed out and counted as misses",
    "skipped_lookups": "requests not looked up because a circuit breaker was open",
    "uuid_requests": (
        "requests neither loaded nor stored because a client may have chosen the id of an image,"
        " audio or video in them"
    ),
    "probes": "objects probed",
    "probe_errors": "probes that failed",
    "refused_hits": (
        "hits that were computed instead: that is faster, or the hit does not fit into the KV cache"
    ),
    "refused_tokens": "tokens of such hits",
    "cut_loads": "loads that were cut because computing the rest was expected to be sooner",
    "explored_loads": "loads of hits that would be refused, to learn how long they take",
    "expected_load_seconds": "seconds that loads were expected to take",
    "measured_load_seconds": "seconds that these loads took",
    "expected_prefill_seconds": "seconds that steps with prompts were expected to take",
    "measured_prefill_seconds": "seconds that these steps took",
    "loaded_tokens": "tokens whose KV was loaded",
    "loaded_chunks": "chunks loaded",
    "loaded_bytes": "bytes of objects loaded",
    "cancelled_loads": "loads cancelled because their request was aborted",
    "load_failures_missing": "objects that were missing when a load read them",
    "load_failures_bad": "objects that failed verification in a load",
    "load_failures_error": "objects that a load could not read because of a storage error",
    "load_failures_timeout": "loads that timed out",
    "load_failures_unavailable": "loads refused because the read circuit breaker was open",
    "stored_chunks": "chunks published",
    "stored_bytes": "bytes of objects published",
    "draft_stored_chunks": "chunks of a drafter's KV published",
    "draft_loaded_chunks": "chunks of a drafter's KV loaded",
    **_of_kind("window", "windows"),
    **_of_kind("state", "states"),
    "hours_without_loads": "hours in which 1000 chunks or more were stored and none was loaded",
    "existing_chunks": "chunks already on the shelf when their store began",
    "repaired_objects": "bad objects replaced with good ones",
    "unrepaired_objects": (
        "bad objects found by an engine that stores nothing, and so cannot replace them"
    ),
    "dropped_chunks_staging_full": (
        "chunks dropped because the memory for stores, or the GPU's buffers for them, were full"
    ),
    "dropped_chunks_unavailable": (
        "chunks dropped because a circuit breaker was open, the storage was read-only, or every"
        " store thread was stuck"
    ),
    "dropped_chunks_no_room": (
        "chunks dropped because the storage or the shelf was full up to a bound of `capacity`"
    ),
    "dropped_chunks_parent_dropped": "chunks dropped because a chunk before them was dropped",
    "dropped_chunks_adapter_unknown": (
        "chunks dropped because it was not known that the worker had loaded the files of their LoRA"
        " adapter that were hashed"
    ),
    "dropped_chunks_weights_changed": (
        "chunks dropped because the weights may have changed since their store was planned"
    ),
    "weight_comparisons": "comparisons begun because the weights may have changed",
    "dropped_chunks_error": "chunks dropped because their store failed",
    "dropped_chunks_shutdown": "chunks not yet published at shutdown",
    "handovers_promised": "prompts promised to other engines",
    "handovers_complete": "requests for which everything promised was there in time",
    "handovers_late": "requests that were computed because their hand-over was late",
    "handovers_vain": "requests that waited for KV that nobody had promised, and none appeared",
    "handovers_skipped": "requests that did not wait for KV that nobody had promised",
    "handovers_gave_up": "requests that were computed because the producer gave up",
    "handovers_refused": "requests that did not wait for a hand-over because too many waited",
    "handovers_other_namespace": (
        "requests that did not wait for a hand-over because the producer's KV is of no use here"
    ),
    "handovers_invalid": (
        "requests that did not wait for a hand-over because their params do not fit them"
    ),
    "promises_broken": "hand-overs of which a chunk was dropped or could not be stored",
    "markers_written": "markers written that tell other engines of a broken promise",
    "leftovers_deleted": "temporaries, old tails, and markers of old hand-overs, deleted",
    "touched_objects": "objects in use whose use was recorded",
    "sweeps": "sweeps to a slice of the shelf",
    "sweep_errors": "sweeps that ended because of an error",
    "sweep_seconds": "seconds of processor time that sweeps took",
    "shelf_evicted_objects": "objects deleted from the shelf by sweeps",
    "shelf_evicted_bytes": "bytes of objects deleted from the shelf by sweeps",
    "late_calls": "storage calls that missed their deadline",
    "stuck_threads": "threads that got stuck in a storage call and were replaced",
    "breaker_opens": "times that a circuit breaker opened",
    "breaker_closes": "times that a circuit breaker closed again",
    "prefetched_objects": "objects read ahead into memory",
    "prefetched_bytes": "bytes of objects read ahead into memory",
    "prefetched_unused_objects": "objects read ahead that no load used",
    "memory_tier_loaded_objects": "objects that loads found in memory",
    "memory_tier_loaded_bytes": "bytes of objects that loads found in memory",
    "memory_tier_stored_objects": "objects kept in memory",
    "memory_tier_stored_bytes": "bytes of objects kept in memory",
    "memory_tier_evicted_objects": "objects evicted from memory",
    "memory_tier_evicted_bytes": "bytes of objects evicted from memory",
    "disk_tier_loaded_objects": "objects that loads found in the disk tier",
    "disk_tier_loaded_bytes": "bytes of objects that loads found in the disk tier",
    "disk_tier_stored_bytes": "bytes of objects copied to the disk tier",
    "disk_tier_evicted_objects": "objects evicted from the disk tier",
    "disk_tier_evicted_bytes": "bytes of objects evicted from the disk tier",
    "disk_tier_bad_objects": "bad copies found in the disk tier and removed",
    "disk_tier_dropped_objects": (
        "objects not copied to the disk tier because it was unavailable, too slow or too small"
    ),
    "disk_tier_breaker_opens": "times that a circuit breaker of the disk tier opened",
}


def _by_reason(family: str) -> dict[str, str]:
    """Return the counters of a family by their reasons."""
    prefix = f"{family}_"
    return {name.removeprefix(prefix): name for name in COUNTERS if name.startswith(prefix)}


#: Families of counters. A monitoring system sees each family as one metric with the label
#: ``reason``: the metric's meaning, and the counter of each reason. Every other counter is a
#: metric of its own.
FAMILIES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "load_failures": (
        "failures that left loads incomplete, by reason",
        _by_reason("load_failures"),
    ),
    "dropped_chunks": ("chunks computed but not stored, by reason", _by_reason("dropped_chunks")),
}

#: Every operation that is timed, with what one measurement covers.
OPERATIONS: Mapping[str, str] = {
    "probe": "probing a batch of objects",
    "read": "waiting for the bytes of one object",
    "verify": "verifying one object",
    "scatter": "copying one chunk into the paged KV cache",
    "gather": "copying one chunk out of the paged KV cache, within an engine step",
    "publish": "writing one object",
    "handover_wait": (
        "one request's wait for a hand-over, from its arrival; ended complete, late or given up"
    ),
}

#: Metric that holds the durations of all operations.
TIMES: Final = "operation_duration_seconds"

#: Upper bounds, in seconds, of the histogram's buckets; one more bucket has no bound.
TIME_BOUNDS: tuple[float, ...] = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3, 500e-3),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)

#: What copies KV between caches and memory: the gauge of each, and its meaning. A monitoring system
#: sees one metric, ``copier``, with the label ``copier``.
COPIERS: Mapping[str, tuple[str, str]] = {
    "cuda": ("copier_cuda", "processes whose KV kvshelf's kernel for GPUs copies"),
    "cpp": ("copier_cpp", "processes whose KV the compiled library copies, on CPUs"),
    "torch": ("copier_torch", "processes whose KV torch's index operations copy"),
}

#: Every gauge: its meaning, and how the values of an engine's processes become one.
GAUGES: Mapping[str, tuple[str, Literal["sum", "max"]]] = {
    "staging_used_bytes": (
        "bytes of the memory for chunks in use at the end of the last step",
        "sum",
    ),
    "staging_limit_bytes": (
        "bytes of the memory for chunks, as far as it has been taken",
        "sum",
    ),
    "read_breaker_state": ("read circuit breaker: 0 closed, 1 half-open, 2 open", "max"),
    "write_breaker_state": (
        "write circuit breaker: 0 closed, 1 half-open, 2 open, 3 while the storage takes no stores",
        "max",
    ),
    "shelf_used_bytes": ("bytes of all objects on the shelf, as sweeps estimate", "max"),
    "unlisted_folders": ("folders that the last sweep could not list", "max"),
    "shelf_limit_bytes": ("upper limit of the shelf in bytes, of this engine", "max"),
    "storage_free_bytes": ("bytes that are free on the shelf's storage", "max"),
    "clock_difference_seconds": (
        "whole seconds by which the storage's clock and this machine's differ, as sweeps find",
        "max",
    ),
    "memory_tier_used_bytes": ("bytes of all objects that are kept in memory", "sum"),
    "memory_tier_pinned_bytes": (
        "bytes of memory for what is read ahead, until its requests have used it",
        "sum",
    ),
    "memory_tier_limit_bytes": (
        "upper limit of what is kept in memory, in bytes: the option `memory`; 0 without it",
        "sum",
    ),
    "disk_tier_used_bytes": ("bytes of all objects in the disk tier", "max"),
    **{name: (meaning, "sum") for name, meaning in COPIERS.values()},
    "pending_late_calls": ("storage calls past their deadline that have not returned", "sum"),
}


class Counters:
    """Counters, gauges and durations by name.

    The names are in :data:`COUNTERS`, :data:`GAUGES` and :data:`OPERATIONS`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._gauges_changed = False
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
        """Set the gauge `name` to `value`.

        Raises
        ------
        KeyError
            If `name` is not one of :data:`GAUGES`.
        """
        if name not in GAUGES:
            raise KeyError(name)
        if self._gauges.get(name) != value:
            with self._lock:
                # Sizes of the configuration are a class of their own, which vLLM does not send.
                self._gauges[name] = int(value) if isinstance(value, int) else value
                self._gauges_changed = True

    def observe(self, operation: str, seconds: float, count: int = 1) -> None:
        """Record the duration of one operation, in seconds, or of `count` that took as long each.

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
            times[bucket] += count
            times[-1] += count * seconds

    def snapshot(self) -> dict[str, float]:
        """Return all counters that are not zero."""
        with self._lock:
            return dict(self._sums)

    def gauges(self) -> dict[str, float]:
        """Return all gauges that were set."""
        with self._lock:
            return dict(self._gauges)

    def times(self) -> dict[str, list[float]]:
        """Return the counts by bucket and then the total seconds of each recorded operation."""
        with self._lock:
            return {name: list(times) for name, times in self._times.items()}

    def take(self) -> dict[str, Any]:
        """Return the measurements since the last call as plain data, by name.

        Returns
        -------
        dict
            A number for each counter that is not zero and for each gauge; for each recorded
            operation a list: the counts by bucket, then the total seconds. Counters and
            durations restart from zero. Empty when nothing was counted and no gauge changed.
        """
        with self._lock:
            if not (self._sums or self._times or self._gauges_changed):
                return {}
            taken: dict[str, Any] = {**self._sums, **self._times, **self._gauges}
            self._sums, self._times, self._gauges_changed = {}, {}, False
            return taken
