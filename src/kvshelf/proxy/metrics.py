"""The proxy's metrics for Prometheus, in a registry of its own.

Engines have theirs; these are about what passes between clients and engines. No label is chosen by
a client, and engines have the names of :mod:`kvshelf.proxy.engines`. Used on the event loop's
thread only.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class ProxyMetrics:
    """All metrics of a proxy; ``docs/disaggregation.md`` lists them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "kvshelf_proxy_answers",
            "answers to clients, by status",
            ["status"],
            registry=self.registry,
        )
        self.disconnects = Counter(
            "kvshelf_proxy_disconnects",
            "requests whose client left before its answer was complete",
            registry=self.registry,
        )
        self.legs = Counter(
            "kvshelf_proxy_legs",
            "requests to engines: answered (also with an error of 4xx), failed (5xx), unreachable,"
            " broken (the connection ended before an answer) or timeout",
            ["side", "outcome"],
            registry=self.registry,
        )
        self.handovers = Counter(
            "kvshelf_proxy_handovers",
            "first legs: promised (params came), nothing (an answer without params) or impossible"
            " (no prefill engine answered in time)",
            ["outcome"],
            registry=self.registry,
        )
        self.durable = Counter(
            "kvshelf_proxy_durable",
            "answers to requests with `durable`: whether the KV was on the store in time",
            ["durable"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "kvshelf_proxy_in_flight",
            "requests to an engine that are not answered yet",
            ["side", "engine"],
            registry=self.registry,
        )
        self.body_bytes = Gauge(
            "kvshelf_proxy_body_bytes",
            "bytes of the bodies of requests that are not over",
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "kvshelf_proxy_first_byte_seconds",
            "time from the request to an engine until the first byte of its answer",
            ["side"],
            buckets=_SECONDS,
            registry=self.registry,
        )
