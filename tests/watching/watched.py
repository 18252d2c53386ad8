"""The files of ``examples/watching``, and a Prometheus that reads them."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
WATCHING = ROOT / "examples" / "watching"
sys.path.insert(0, str(ROOT / "examples" / "disaggregated"))
from processes import free_port, process  # noqa: E402

from tests.support.waiting import until  # noqa: E402

#: Prometheus is on this machine: a proxy that the environment names would not reach it.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
#: What stands for the interval of panels, and the time from one scrape to the next: an engine on a
#: busy machine takes more than a second to answer one.
RANGE = "30s"
SCRAPE = "5s"


def queries() -> list[tuple[str, str]]:
    """The title of each panel of the dashboard, with each of its queries."""
    board = json.loads((WATCHING / "grafana.json").read_text())
    return [
        (panel["title"], target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


class Prometheus:
    """A running Prometheus.

    Parameters
    ----------
    url : str
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **fields: str) -> Any:
        """What it answers; an error of a query is an HTTPError."""
        with DIRECT.open(f"{self.url}{path}?{urllib.parse.urlencode(fields)}", timeout=60) as said:
            return json.load(said)["data"]

    def ask(self, query: str) -> list[float]:
        """The values that a query of the dashboard has now."""
        query = query.replace("$__rate_interval", RANGE).replace("$model", ".*")
        found = self.get("/api/v1/query", query=query)
        return [float(sample["value"][1]) for sample in found["result"]]

    def firing(self) -> set[tuple[str, str]]:
        """The alerts that fire, each with its job."""
        return {
            (alert["labels"]["alertname"], alert["labels"]["job"])
            for alert in self.get("/api/v1/alerts")["alerts"]
            if alert["state"] == "firing"
        }


@contextlib.contextmanager
def prometheus(targets: Mapping[str, str], folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus with the files of the example, but these targets and short times.

    Parameters
    ----------
    targets : Mapping
        URL of the target of each job.
    folder : Path
        Gets its data and its log.
    """
    folder.mkdir()
    config = yaml.safe_load((WATCHING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPE, "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]].removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    rules = (WATCHING / "alerts.yaml").read_text()
    (folder / "alerts.yaml").write_text(re.sub(r"\bfor: \d+m", "for: 1s", rules))
    address, log = f"127.0.0.1:{free_port()}", folder / "prometheus.log"
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yml"),
        *(f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"),
    ]
    with process(command, log) as running:
        found = Prometheus(f"http://{address}")

        def answers() -> bool:
            assert running.poll() is None, log.read_text()
            with contextlib.suppress(OSError):
                DIRECT.open(f"{found.url}/-/ready", timeout=5).close()
                return True
            return False

        until(answers, "Prometheus answers")
        yield found


def finite(values: list[float]) -> bool:
    """Whether one of these is a number."""
    return any(map(math.isfinite, values))
