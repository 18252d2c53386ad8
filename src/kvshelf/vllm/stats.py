"""kvshelf's counters in vLLM's periodic log line and in its Prometheus metrics.

Owns the conversion of :class:`kvshelf.metrics.Counters` to vLLM's ``KVConnectorStats`` and
``KVConnectorPromMetrics``. Counting happens in the workers and the scheduler, all else in
the process of the API server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvshelf.metrics import COUNTERS


@dataclass
class ShelfStats(KVConnectorStats):
    """Sums of one interval, by counter name (see :data:`kvshelf.metrics.COUNTERS`)."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Start a new interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the sums of `other`."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the sums, seconds rounded for reading."""
        return {
            name: round(amount, 4) if isinstance(amount, float) else amount
            for name, amount in sorted(self.data.items())
        }

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def stats_of(counts: dict[str, Any]) -> ShelfStats | None:
    """Return `counts` as stats, None when there are none."""
    return ShelfStats(counts) if counts else None


class ShelfPromMetrics(KVConnectorPromMetrics):
    """A Prometheus counter ``vllm:kvshelf_<name>_total`` for each of kvshelf's counters.

    vLLM's prefix, because vLLM makes and removes metrics by it. Without this class an
    engine whose kvshelf is inside MultiConnector would end at the first count.

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
        self._counters: dict[tuple[int, str], Any] = {}
        for name, meaning in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvshelf_{name}",
                documentation=f"kvshelf: {meaning}.",
                labelnames=labelnames,
            )
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*values)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add the sums of one interval."""
        for name, amount in transfer_stats_data.items():
            counter = self._counters.get((engine_idx, name))
            if counter is not None:
                counter.inc(amount)
