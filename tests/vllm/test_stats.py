"""kvshelf's measurements on their way through vLLM: stats, log line, Prometheus."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines import Engine, MakePrompt, ShelfFiles

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvshelf.backends.guard import GuardedBackend
from kvshelf.capacity.evictor import Evictor
from kvshelf.config import CapacityConfig
from kvshelf.metrics import TIME_BOUNDS, Counters
from kvshelf.vllm.connector import SharedStorageConnector
from kvshelf.vllm.stats import ShelfStats
from tests.sim.memory import MemoryStorage

LABELS = ["model_name", "engine"]


def measured(**amounts: Any) -> Counters:
    """What a process measured: counters and gauges by name, operations as lists of seconds."""
    counters = Counters()
    for name, amount in amounts.items():
        if isinstance(amount, list):
            for seconds in amount:
                counters.observe(name, seconds)
        elif name.startswith("staging"):
            counters.set_gauge(name, amount)
        else:
            counters.add(name, amount)
    return counters


def stats(source: str, **amounts: Any) -> ShelfStats:
    found = ShelfStats.of(measured(**amounts), source)
    assert found is not None
    return found


# ----------------------------------------------------------------- stats


def test_nothing_measured_is_nothing_sent() -> None:
    assert ShelfStats.of(Counters(), "scheduler") is None
    made = SharedStorageConnector.build_kv_connector_stats()
    assert made is not None and made.is_empty()


def test_sizes_of_the_configuration_are_sent() -> None:
    """An engine's process that cannot encode its stats answers nothing any more."""
    counters, capacity = Counters(), CapacityConfig.model_validate({"max_bytes": "24MiB"})
    Evictor(GuardedBackend(MemoryStorage()), capacity, counters)
    found = ShelfStats.of(counters, "scheduler")
    assert found is not None
    assert MsgpackDecoder().decode(MsgpackEncoder().encode(found.data)) == found.data
    assert "shelf_limit_bytes" in str(found.data)


def test_ranks_and_scheduler_add_up() -> None:
    one = stats("rank 0", loaded_bytes=3, read=[1e-3, 2e-3], staging_used_bytes=10)
    two = stats("rank 1", loaded_bytes=4, read=[1e-3], staging_used_bytes=20)
    both = one.aggregate(two).aggregate(stats("scheduler", probes=5))
    assert both.data["loaded_bytes"] == 7
    assert both.data["probes"] == 5
    assert sum(both.data["read"][:-1]) == 3
    assert both.data["read"][-1] == pytest.approx(4e-3)
    assert both.reduce()["Staging used MB"] == round(30 / (1 << 20), 1)
    assert both.data["staging_used_bytes"] == {"rank 0": 10, "rank 1": 20}


def test_later_gauges_replace_earlier_ones() -> None:
    before = stats("rank 0", staging_used_bytes=10 << 20)
    after = stats("rank 0", staging_used_bytes=2 << 20)
    assert before.aggregate(after).reduce()["Staging used MB"] == 2


def test_log_line_is_short_and_names_trouble() -> None:
    quiet = stats("scheduler", hit_tokens=512, lookup_tokens=1024, lookups=3).reduce()
    assert quiet == {"Hit tokens": 512, "Lookup tokens": 1024, "Loaded MB": 0.0, "Stored MB": 0.0}
    loud = stats(
        "rank 0",
        load_failures_bad=2,
        dropped_chunks_staging_full=1,
        stored_bytes=3 << 20,
        publish=[0.5],
    )
    assert loud.reduce() == {
        "Hit tokens": 0,
        "Lookup tokens": 0,
        "Loaded MB": 0.0,
        "Stored MB": 3.0,
        "Load failures (bad)": 2,
        "Dropped chunks (staging full)": 1,
        "Avg publish (ms)": 500.0,
    }


# ------------------------------------------------------------ Prometheus


class Exposed:
    """kvshelf's metrics as a monitoring system would scrape them."""

    def __init__(self, histogram: Callable[..., Any] | None = None) -> None:
        self.registry = CollectorRegistry()

        def on(kind: Any) -> Callable[..., Any]:
            return lambda **options: kind(registry=self.registry, **options)

        made = SharedStorageConnector.build_prom_metrics(
            SimpleNamespace(kv_transfer_config=None),  # type: ignore[arg-type]
            {Gauge: on(Gauge), Counter: on(Counter), Histogram: histogram or on(Histogram)},
            LABELS,
            {0: ["m", "0"], 1: ["m", "1"]},
        )
        assert made is not None
        self.metrics: Any = made

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            f"vllm:kvshelf_{name}", {"model_name": "m", "engine": str(engine), **labels}
        )


@pytest.fixture
def exposed() -> Iterator[Exposed]:
    return Exposed()


def test_times_are_a_histogram(exposed: Exposed) -> None:
    exposed.metrics.observe(stats("rank 0", read=[40e-6, 2e-3, 2e-3, 99.0]).data)
    exposed.metrics.observe(stats("rank 0", read=[0.3]).data)

    def below(bound: str) -> float | None:
        return exposed.value("operation_duration_seconds_bucket", operation="read", le=bound)

    assert (below("5e-05"), below("0.001"), below("0.0025")) == (1, 1, 3)
    assert (below("10.0"), below("+Inf")) == (4, 5)
    count = exposed.value("operation_duration_seconds_count", operation="read")
    total = exposed.value("operation_duration_seconds_sum", operation="read")
    assert count == 5
    assert total == pytest.approx(40e-6 + 4e-3 + 99.3)
    assert exposed.value("operation_duration_seconds_count", operation="verify") == 0


def test_times_reach_histograms_that_take_single_values_only() -> None:
    seen: dict[tuple[object, ...], list[float]] = {}

    class Plain:
        def __init__(self, **_: object) -> None:
            self.labelvalues: tuple[object, ...] = ()

        def labels(self, *values: object) -> SimpleNamespace:
            return SimpleNamespace(observe=seen.setdefault(values, []).append)

    exposed = Exposed(histogram=Plain)
    given = [40e-6, TIME_BOUNDS[2], 2e-3, 2e-3, 99.0]
    data = stats("rank 0", read=given).data
    exposed.metrics.observe(data)
    again = measured(read=seen["m", "0", "read"])
    assert again.take()["read"][:-1] == data["read"][:-1]


def test_gauges_of_ranks_add_up(exposed: Exposed) -> None:
    exposed.metrics.observe(stats("rank 0", staging_used_bytes=10).data)
    exposed.metrics.observe(stats("rank 1", staging_used_bytes=5).data)
    assert exposed.value("staging_used_bytes") == 15
    exposed.metrics.observe(stats("rank 0", staging_used_bytes=0).data)
    assert exposed.value("staging_used_bytes") == 5


def test_what_is_unknown_is_passed_over(exposed: Exposed) -> None:
    exposed.metrics.observe({"what is this": 1, "lookups": 1})
    exposed.metrics.observe({"lookups": 1}, 7)
    assert exposed.value("lookups_total") == 1


# ---------------------------------------------------------- a real engine


def test_engine_shows_what_kvshelf_does(
    engine: Engine, shelf: ShelfFiles, prompt: MakePrompt
) -> None:
    def series() -> dict[str, float]:
        found: dict[str, float] = {}
        for line in engine.metrics_text().splitlines():
            if line.startswith("vllm:kvshelf_"):
                name, value = line.rsplit(" ", 1)
                key = re.sub(r'(model_name|engine)="[^"]*",?', "", name)
                found[key.removesuffix("{}").replace(",}", "}")] = float(value)
        return found

    before = series()
    tokens = prompt(600)
    chunks = shelf.fill(engine, tokens)
    assert engine.generate(tokens).shelf_tokens == 512
    # A step brings along what was measured since the step before.
    chunks[1][0].write_bytes(b"damage")
    engine.reset_prefix_cache()
    engine.generate(tokens)
    engine.generate(prompt(20))
    after = series()

    def gained(name: str) -> float:
        return after[name] - before[name]

    objects = sum(len(chunk) for chunk in chunks)
    assert gained("vllm:kvshelf_hit_tokens_total") >= 512
    assert gained("vllm:kvshelf_lookup_tokens_total") >= 1200
    assert gained("vllm:kvshelf_probes_total") > 0
    assert gained("vllm:kvshelf_loaded_tokens_total") >= 512
    size = sum(path.stat().st_size for chunk in chunks for path in chunk)
    assert gained("vllm:kvshelf_stored_bytes_total") >= 0.9 * size
    assert gained("vllm:kvshelf_loaded_bytes_total") >= 0.9 * size
    times = "vllm:kvshelf_operation_duration_seconds"
    for operation, least in {
        "probe": 1,
        "read": objects,
        "verify": objects,
        "scatter": len(chunks),
        "gather": 2,
        "publish": objects,
    }.items():
        label = f'{{operation="{operation}"}}'
        assert gained(f"{times}_count{label}") >= least, operation
        assert gained(f"{times}_sum{label}") > 0, operation
    assert after["vllm:kvshelf_staging_limit_bytes"] > 1 << 29
    assert "vllm:kvshelf_staging_used_bytes" in after
    engine.call("do_log_stats")
    (*_, line) = engine.log_lines("KV Transfer metrics: ")
    assert "Hit tokens=" in line and "Avg read (ms)=" in line and "Staging limit MB=" in line
