"""The dashboard and the alerts name metrics and pages that exist, and promtool takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvshelf.backends.breaker import BreakerState
from kvshelf.metrics import COUNTERS, FAMILIES, GAUGES, METRIC_PREFIX, OPERATIONS, TIMES, Counters
from tests.support.pages import anchors

ROOT = Path(__file__).resolve().parents[2]
WATCHING = ROOT / "examples" / "watching"
PANELS = json.loads((WATCHING / "grafana.json").read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
(GROUP,) = yaml.safe_load((WATCHING / "alerts.yaml").read_text())["groups"]
RUNBOOKS = "https://github.com/kvshelf/kvshelf/blob/main/"
#: Of Prometheus, and of vLLM itself.
OF_OTHERS = {"up", "vllm:prompt_tokens_by_source_total", "vllm:time_to_first_token_seconds_bucket"}
#: What the labels of kvshelf's metrics can be.
VALUES = {
    "reason": {reason for _, reasons in FAMILIES.values() for reason in reasons},
    "operation": set(OPERATIONS),
}

pytest.importorskip("zmq", reason="pyzmq is missing: pip install '.[server]' in a clone")
pytestmark = pytest.mark.real
promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus"
)


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """The names of all series that can be scraped."""
    from kvshelf.server.health import ServerMetrics

    closed = SimpleNamespace(state=BreakerState.CLOSED)
    storage: Any = SimpleNamespace(reads=closed, writes=closed)
    families = [
        *((f"{METRIC_PREFIX}{name}", "counter") for name in {*COUNTERS, *FAMILIES}),
        *((f"{METRIC_PREFIX}{name}", "gauge") for name in GAUGES),
        (f"{METRIC_PREFIX}{TIMES}", "histogram"),
        *((one.name, one.type) for one in ServerMetrics(dict, Counters(), storage).collect()),
    ]
    ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return OF_OTHERS | {name + end for name, kind in families for end in ends[kind]}


@pytest.mark.parametrize("expression", [*QUERIES, *(rule["expr"] for rule in GROUP["rules"])])
def test_metrics_exist(expression: str, metrics: set[str]) -> None:
    names = set(re.findall(r"\b(?:vllm:\w+|kvshelf_\w+|up)\b", expression))
    assert names and names <= metrics
    for label, values in re.findall(r'(\w+)=~?"([^"]*)"', expression):
        if label in VALUES:
            assert set(values.split("|")) <= VALUES[label]


def test_headlines_come_first() -> None:
    assert [panel["type"] for panel in PANELS[:4]] == ["row", "stat", "stat", "stat"]


@pytest.mark.parametrize("rule", GROUP["rules"], ids=lambda rule: rule["alert"])
def test_alerts_lead_to_a_page(rule: dict[str, Any]) -> None:
    url = rule["annotations"]["runbook_url"]
    page, _, anchor = url.removeprefix(RUNBOOKS).partition("#")
    assert url.startswith(RUNBOOKS) and anchor in anchors(ROOT / page)


def told(*arguments: str, folder: Path = WATCHING) -> None:
    done = subprocess.run(
        ["promtool", *arguments], check=False, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_prometheus_takes_all(tmp_path: Path) -> None:
    told("check", "config", "prometheus.yml")
    told("test", "rules", "alerts_test.yaml", folder=Path(__file__).parent)
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(QUERIES)
    ]
    (tmp_path / "queries.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    told("check", "rules", "queries.yaml", folder=tmp_path)
