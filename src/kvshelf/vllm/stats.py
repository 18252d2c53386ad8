"""kvshelf's counters in vLLM's periodic log line.

Owns the conversion of :class:`kvshelf.metrics.Counters` to vLLM's ``KVConnectorStats``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


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
