"""Health and metrics of a node server over HTTP."""

from __future__ import annotations

import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvshelf.metrics import Counters
from kvshelf.server.health import Health, ServerMetrics
from tests.server.desk import Desk, name_of
from tests.sim.storage import posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks

pytestmark = pytest.mark.real

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
FMT = make_format()


class Asked:
    """What a server says of itself, as the test wants it."""

    def __init__(self, desk: Desk, counters: Counters) -> None:
        self.desk = desk
        self.well = True
        self.found: str | None = None
        self.health = Health(
            "127.0.0.1",
            0,
            healthy=lambda: self.well,
            problem=lambda: self.found,
            metrics=ServerMetrics(desk.node.stats, counters, desk.shelf.backend),
        )

    def get(self, path: str) -> tuple[int, str]:
        try:
            url = f"http://127.0.0.1:{self.health.port}{path}"
            with urllib.request.urlopen(url, timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    counters = Counters()
    with closing(Desk(posix(tmp_path / "shelf"), counters=counters)) as desk:
        desk.register(FMT)
        (chunk,) = make_chunks(FMT, 1)
        desk.store(name_of(FMT, chunk), sealed(FMT, chunk))
        counters.observe("read", 0.003)
        asked = Asked(desk, counters)
        with closing(asked.health):
            yield asked


def test_it_says_whether_it_lives_and_whether_it_serves(asked: Asked) -> None:
    assert asked.get("/health") == (200, "ok\n")
    assert asked.get("/ready?now") == (200, "ok\n")
    asked.well = False
    asked.found = "the shelf does not answer"
    assert asked.get("/health")[0] == 503
    assert asked.get("/ready") == (503, "the shelf does not answer\n")
    assert asked.get("/../etc/passwd")[0] == 404


def test_metrics_are_what_the_server_counts(asked: Asked) -> None:
    families = list(text_string_to_metric_families(asked.get("/metrics")[1]))
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert values["kvshelf_server_stored_objects_total"] == 1
    assert values["kvshelf_server_operation_duration_seconds_count"] == 1
    page = PAGE.read_text().partition("### Metrics of the node server")[2]
    listed = {name.removeprefix("kvshelf_server_") for name in re.findall(r"`(\w+)`", page)}
    shown = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in families
    }
    assert listed - {""} == {name.removeprefix("kvshelf_server_") for name in shown}


def test_what_the_storage_is_asked_for_is_timed(asked: Asked) -> None:
    (other,) = make_chunks(FMT, 1, 7)
    desk = asked.desk
    desk.run(desk.node.find(desk.connect(), [name_of(FMT, other)]))
    families = text_string_to_metric_families(asked.get("/metrics")[1])
    counts = {
        sample.labels["operation"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "kvshelf_server_operation_duration_seconds_count"
    }
    assert counts == {"publish": 1, "probe": 1, "read": 1}


def test_clients_that_send_slowly_take_one_thread_together(asked: Asked) -> None:
    before = threading.active_count()
    address = "127.0.0.1", asked.health.port
    with ExitStack() as opened:
        clients = [opened.enter_context(socket.create_connection(address)) for _ in range(100)]
        for client in clients:
            with suppress(ConnectionError):
                client.sendall(b"GET /hea")
        assert asked.get("/health") == (200, "ok\n")
        # One more for what the answer calls.
        assert threading.active_count() <= before + 1
