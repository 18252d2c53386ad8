"""Health and metrics of a node server over HTTP, for probes and Prometheus on the same machine.

===========  =====================================================================================
path         answer
===========  =====================================================================================
``/health``  200 if the server's loop answers, else 503: restart it
``/ready``   200 if clients are served and the shelf can be read, else 503 with the reason
``/metrics`` what ``docs/metrics.md`` lists, for Prometheus
===========  =====================================================================================

How clients are bounded is in :mod:`kvshelf.server.http`.

Threads
-------
``kvshelf-http`` has an event loop for all connections. What the answers call may block, runs on a
few threads of that loop, and must be safe to call from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvshelf.backends.breaker import BreakerState
from kvshelf.backends.guard import GuardedBackend
from kvshelf.metrics import COUNTERS as SHELF_COUNTERS
from kvshelf.metrics import GAUGES as SHELF_GAUGES
from kvshelf.metrics import OPERATIONS, TIME_BOUNDS, Counters
from kvshelf.server.http import Page, Probes, listen, text
from kvshelf.server.node import COUNTERS, GAUGES

#: Prefix of all names.
PREFIX: Final = "kvshelf_server_"
#: What the shelf, its storage threads, sweeps and the disk tier count in a server.
OF_THE_SHELF: Final = (
    "late_calls",
    "stuck_threads",
    "breaker_opens",
    "breaker_closes",
    "touched_objects",
    "sweeps",
    "sweep_errors",
    "sweep_seconds",
    "shelf_evicted_objects",
    "shelf_evicted_bytes",
    *(name for name in SHELF_COUNTERS if name.startswith("disk_tier_")),
)
GAUGES_OF_THE_SHELF: Final = (
    "shelf_used_bytes",
    "shelf_limit_bytes",
    "storage_free_bytes",
    "unlisted_folders",
    "clock_difference_seconds",
)
_TIMED: Final = ("probe", "read", "verify", "publish")
_BREAKER: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
#: What the loop counts.
LOOP: Final = {
    "requests": "requests of clients",
    "refused": "requests and connections that were refused: malformed, not allowed, or too many",
}
_CLOSE_SECONDS: Final = 5.0


@dataclass(eq=False)
class ServerMetrics(Collector):
    """All metrics of a server.

    Parameters
    ----------
    stats : Callable
        Returns the values of the service and of the loop by name.
    counters : Counters
        What the shelf and its tier have counted.
    backend : GuardedBackend
        The storage.
    """

    stats: Callable[[], dict[str, float]]
    counters: Counters
    backend: GuardedBackend

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        stats, counts = self.stats(), self.counters.snapshot()
        gauges = self.counters.gauges()
        for name, meaning in {**COUNTERS, **LOOP}.items():
            yield CounterMetricFamily(PREFIX + name, meaning, value=stats.get(name, 0))
        for name in OF_THE_SHELF:
            yield CounterMetricFamily(
                PREFIX + name, SHELF_COUNTERS[name], value=counts.get(name, 0)
            )
        for name, meaning in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, meaning, value=stats.get(name, 0))
        for name in GAUGES_OF_THE_SHELF:
            # Without a value the metric has no sample.
            yield GaugeMetricFamily(PREFIX + name, SHELF_GAUGES[name][0], value=gauges.get(name))
        for name, breaker in (("read", self.backend.reads), ("write", self.backend.writes)):
            yield GaugeMetricFamily(
                f"{PREFIX}{name}_breaker_state",
                f"{name} circuit breaker: 0 closed, 1 half-open, 2 open",
                value=_BREAKER[breaker.state],
            )
        yield self._times()

    def _times(self) -> Metric:
        family = HistogramMetricFamily(
            PREFIX + "operation_duration_seconds",
            "; ".join(f"{name}: {OPERATIONS[name]}" for name in _TIMED),
            labels=["operation"],
        )
        bounds = [*map(str, TIME_BOUNDS), "+Inf"]
        for name, times in self.counters.times().items():
            if name in _TIMED:
                total, buckets = 0.0, []
                for bound, count in zip(bounds, times, strict=False):
                    total += count
                    buckets.append((bound, total))
                family.add_metric([name], buckets, times[-1])
        return family


class Health:
    """An HTTP server on one address of this machine.

    Parameters
    ----------
    host : str
    port : int
        0 for any free one.
    healthy : Callable
        Whether the server's loop answers.
    problem : Callable
        Why no client is served; None if all is well.
    metrics : Collector

    Attributes
    ----------
    port : int
        The port that was taken.

    Raises
    ------
    ConfigError
        If it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        healthy: Callable[[], bool],
        problem: Callable[[], str | None],
        metrics: Collector,
    ) -> None:
        registry = CollectorRegistry()
        registry.register(metrics)

        def page(path: str) -> Page | None:
            if path == "/health":
                return text(200, "ok") if healthy() else text(503, "hangs")
            if path == "/ready":
                reason = problem()
                return text(200, "ok") if reason is None else text(503, reason)
            if path == "/metrics":
                return Page(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            return None

        async def answer(path: str) -> Page | None:
            return await asyncio.to_thread(page, path)

        listener = listen(host, port)
        self.port: int = listener.getsockname()[1]
        self._over = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(Probes(listener, answer),), name="kvshelf-http", daemon=True
        )
        self._thread.start()

    def _run(self, probes: Probes) -> None:
        with contextlib.closing(self._loop) as loop:
            loop.run_until_complete(probes.serve(self._over))
            loop.run_until_complete(loop.shutdown_default_executor())

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_CLOSE_SECONDS)
