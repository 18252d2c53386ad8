"""kvshelf's measurements in vLLM's periodic log line and in its Prometheus metrics.

Owns the conversion of :class:`kvshelf.metrics.Counters` to vLLM's ``KVConnectorStats`` and
``KVConnectorPromMetrics``. The workers and the scheduler measure; vLLM collects their stats at the
end of a step and sends them to the process of the API server, where everything else here runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvshelf.metrics import (
    COPIERS,
    COUNTERS,
    FAMILIES,
    GAUGES,
    METRIC_PREFIX,
    OPERATIONS,
    TIME_BOUNDS,
    TIMES,
    Counters,
)

_MB = 1 << 20
#: The gauge of each copier.
_OF_COPIERS = {copier: name for copier, (name, _) in COPIERS.items()}


@dataclass
class ShelfStats(KVConnectorStats):
    """What was measured in one interval, by name.

    Attributes
    ----------
    data : dict
        As :meth:`kvshelf.metrics.Counters.take` returns it, but each gauge is a dict of its
        value in each process: vLLM merges stats of several processes and of several intervals
        by the same method, and gauges must be added up for the former only.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what `other` measured, in another process or later."""
        data = self.data
        for name, theirs in other.data.items():
            ours = data.get(name)
            if ours is None:
                data[name] = theirs
            elif isinstance(theirs, dict):
                data[name] = {**ours, **theirs}
            elif isinstance(theirs, list):
                data[name] = [
                    ours_value + another for ours_value, another in zip(ours, theirs, strict=True)
                ]
            else:
                data[name] = ours + theirs
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the fields of vLLM's log line: traffic always, failures if there were any."""
        data = self.data
        fields: dict[str, int | float] = {
            "Hit tokens": data.get("hit_tokens", 0),
            "Lookup tokens": data.get("lookup_tokens", 0),
            "Loaded MB": round(data.get("loaded_bytes", 0) / _MB, 1),
            "Stored MB": round(data.get("stored_bytes", 0) / _MB, 1),
        }
        for family, (_, reasons) in FAMILIES.items():
            for reason, name in reasons.items():
                if data.get(name):
                    fields[f"{_words(family)} ({_words(reason).lower()})"] = data[name]
        for operation in OPERATIONS:
            times = data.get(operation)
            if times is not None:
                mean = times[-1] / sum(times[:-1])
                fields[f"Avg {operation} (ms)"] = round(mean * 1e3, 3)
        for name in GAUGES:
            if name in data and name not in _OF_COPIERS.values():
                value = _merged(name, data[name])
                if name.endswith("_bytes"):
                    fields[_words(name.removesuffix("_bytes")) + " MB"] = round(value / _MB, 1)
                else:
                    fields[_words(name)] = value
        return fields

    @classmethod
    def of(cls, counters: Counters, source: str) -> ShelfStats | None:
        """Return what `source`, a process, has counted since the last call; None if nothing."""
        taken = counters.take()
        if not taken:
            return None
        return cls(
            {name: {source: value} if name in GAUGES else value for name, value in taken.items()}
        )

    def is_empty(self) -> bool:
        """Whether nothing was measured."""
        return not self.data


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _merged(name: str, values: Mapping[str, float]) -> float:
    """Return one value of a gauge for all processes of an engine."""
    return sum(values.values()) if GAUGES[name][1] == "sum" else max(values.values())


class ShelfPromMetrics(KVConnectorPromMetrics):
    """kvshelf's metrics in Prometheus; ``docs/metrics.md`` lists them.

    Inside MultiConnector, an engine without this class would fail at the first count.

    Parameters
    ----------
    vllm_config : VllmConfig
    metric_types : dict
        vLLM's choice of metric classes.
    labelnames : list of str
    per_engine_labelvalues : dict
        Values of the labels, by engine index.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        #: By engine and name, each with its labels.
        self._metrics: dict[tuple[int, str], Any] = {}
        #: The latest value of each gauge in each process.
        self._standing: dict[tuple[int, str], dict[str, float]] = {}

        def expose(
            kind: Any,
            name: str,
            meaning: str,
            label: str = "",
            names: Mapping[str, str] | None = None,
            **options: Any,
        ) -> None:
            """Make a metric: for each value of a `label` what has one of `names`, or one alone."""
            metric = kind(
                name=METRIC_PREFIX + name,
                documentation=f"kvshelf: {meaning}.",
                labelnames=[*labelnames, *([label] if label else [])],
                **options,
            )
            for engine, values in per_engine_labelvalues.items():
                for value, each in (names or {"": name}).items():
                    labels = [*values, *([value] if label else [])]
                    self._metrics[engine, each] = metric.labels(*labels)

        grouped: set[str] = set()
        for family, (meaning, reasons) in FAMILIES.items():
            grouped.update(reasons.values())
            expose(self._counter_cls, family, meaning, "reason", reasons)
        for name, meaning in COUNTERS.items():
            if name not in grouped:
                expose(self._counter_cls, name, meaning)
        operations, buckets = {name: name for name in OPERATIONS}, list(TIME_BOUNDS)
        meaning = "duration of one operation in seconds"
        expose(self._histogram_cls, TIMES, meaning, "operation", operations, buckets=buckets)
        mode: dict[str, Any] = {"multiprocess_mode": "mostrecent"}
        meaning = "processes whose KV is copied by the implementation that the label names"
        expose(self._gauge_cls, "copier", meaning, "copier", _OF_COPIERS, **mode)
        for name, (meaning, _) in GAUGES.items():
            if name not in _OF_COPIERS.values():
                expose(self._gauge_cls, name, meaning, **mode)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add what was measured in one interval."""
        for name, value in transfer_stats_data.items():
            series = engine_idx, name
            metric = self._metrics.get(series)
            if metric is None:
                continue
            if name in GAUGES:
                standing = self._standing.setdefault(series, {})
                standing.update(value)
                metric.set(_merged(name, standing))
            elif name in OPERATIONS:
                _add_times(metric, value)
            else:
                metric.inc(value)


def _add_times(histogram: Any, times: list[float]) -> None:
    """Add counts by bucket and their sum to a histogram.

    The public interface takes one value at a time, so a burst of operations would keep the API
    server busy for long. So this adds to the histogram's buckets themselves where they are
    accessible. Where they are not (Ray), each operation counts as the mean of all, moved into the
    operation's bucket.
    """
    *counts, total = times
    buckets: Any = getattr(histogram, "_buckets", None)
    seconds: Any = getattr(histogram, "_sum", None)
    if isinstance(buckets, list) and len(buckets) == len(counts) and hasattr(seconds, "inc"):
        for bucket, count in zip(buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        seconds.inc(total)
        return
    mean = total / sum(counts)
    edges = (0.0, *TIME_BOUNDS, float("inf"))
    for number, count in enumerate(counts):
        lowest, highest = edges[number], edges[number + 1]
        # A value on a bucket's lower edge would fall into the bucket below.
        value = highest if mean > highest else mean if mean > lowest else lowest * 1.0001
        for _ in range(int(count)):
            histogram.observe(value)
