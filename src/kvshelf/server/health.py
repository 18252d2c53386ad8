"""Health and metrics of a node server over HTTP, for probes and Prometheus on the same machine.

===========  =====================================================================================
path         answer
===========  =====================================================================================
``/health``  200 if the server's loop answers, else 503: restart it
``/ready``   200 if clients are served and the shelf can be read, else 503 with the reason
``/metrics`` what ``docs/metrics.md`` lists, for Prometheus
===========  =====================================================================================

Contracts
---------
* Only GET of these paths is answered; nothing is read from a request but its path.
* A client that is slow or silent is left after some seconds.

Threads
-------
``kvshelf-http`` listens, and each request has a thread. What they call must be safe to call from
any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
from kvshelf.errors import ConfigError
from kvshelf.metrics import COUNTERS as SHELF_COUNTERS
from kvshelf.metrics import GAUGES as SHELF_GAUGES
from kvshelf.metrics import OPERATIONS, TIME_BOUNDS, Counters
from kvshelf.server.service import COUNTERS, GAUGES

#: Prefix of all names.
PREFIX: Final = "kvshelf_server_"
#: What the shelf, its storage threads, sweeps and the disk tier count in a server.
_OF_THE_SHELF: Final = (
    "late_calls",
    "stuck_threads",
    "breaker_opens",
    "breaker_closes",
    "touched_objects",
    "marked_chunks",
    "rewritten_objects",
    "rewritten_bytes",
    "sweeps",
    "sweep_errors",
    "sweep_seconds",
    "shelf_evicted_objects",
    "shelf_evicted_bytes",
    *(name for name in SHELF_COUNTERS if name.startswith("disk_tier_")),
)
_GAUGES_OF_THE_SHELF: Final = ("shelf_used_bytes", "shelf_limit_bytes", "storage_free_bytes")
_TIMED: Final = ("probe", "read", "verify", "publish")
_BREAKER: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}
#: What the loop counts.
LOOP: Final = {
    "requests": "requests of clients",
    "refused": "requests and connections that were refused: malformed, not allowed, or too many",
}
_SILENCE_SECONDS: Final = 5.0


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

    def __init__(
        self, stats: Callable[[], dict[str, float]], counters: Counters, backend: GuardedBackend
    ) -> None:
        self._stats = stats
        self._counters = counters
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        stats, counts = self._stats(), self._counters.snapshot()
        known = self._counters.gauges()
        for name, meaning in {**COUNTERS, **LOOP}.items():
            yield CounterMetricFamily(PREFIX + name, meaning, value=stats.get(name, 0))
        for name in _OF_THE_SHELF:
            yield CounterMetricFamily(
                PREFIX + name, SHELF_COUNTERS[name], value=counts.get(name, 0)
            )
        for name, meaning in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, meaning, value=stats.get(name, 0))
        for name in _GAUGES_OF_THE_SHELF:
            # Without a value the metric has no sample.
            yield GaugeMetricFamily(PREFIX + name, SHELF_GAUGES[name][0], value=known.get(name))
        for name, breaker in (("read", self._backend.reads), ("write", self._backend.writes)):
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
        for name, times in self._counters.times().items():
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
    metrics : iterable of Collector

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
        metrics: Iterable[Collector],
    ) -> None:
        registry = CollectorRegistry()
        for each in metrics:
            registry.register(each)

        def answer(path: str) -> tuple[int, str, bytes] | None:
            if path == "/health":
                well = healthy()
                return (200, "text/plain", b"ok\n") if well else (503, "text/plain", b"hangs\n")
            if path == "/ready":
                found = problem()
                return (
                    (200, "text/plain", b"ok\n")
                    if found is None
                    else (503, "text/plain; charset=utf-8", f"{found}\n".encode())
                )
            if path == "/metrics":
                return 200, CONTENT_TYPE_LATEST, generate_latest(registry)
            return None

        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENCE_SECONDS

            def do_GET(self) -> None:
                found = answer(self.path.partition("?")[0])
                status, kind, body = found or (404, "text/plain", b"no such path\n")
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}, port {port}: {error}") from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvshelf-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
