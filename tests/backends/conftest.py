"""Readable failures inside the suite, the matrix of a run, and a bucket with a script."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Backend
from tests.sim.s3 import ScriptedS3

pytest.register_assert_rewrite("tests.support.backend_suite")

_WORD = re.compile(r"[A-Z]{2,}|[A-Z][a-z0-9]*")


@pytest.fixture(autouse=True)
def note_storage(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """Say for which storage and which test of the suite this one counts."""
    from tests.support.backend_suite import BackendSuite

    if request.cls is not None and issubclass(request.cls, BackendSuite):
        words = _WORD.findall(request.cls.__name__.removeprefix("Test"))
        test = request.node.originalname.removeprefix("test_")
        record_property("suite", (" ".join(words).lower(), test.replace("_", " ")))


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's own configuration has a part in the tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def store(no_account: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedS3]:
    """An S3 store of which nothing is known."""
    pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
    # Another store may have had its port.
    monkeypatch.setattr("kvshelf.backends.s3_quirks._known_until", {})
    with ScriptedS3() as store:
        yield store


@pytest.fixture
def bucket(store: ScriptedS3) -> Iterator[Backend]:
    """A shelf in a bucket of the store."""
    with closing(store.open()) as backend:
        yield backend


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the matrix: which storage passes which test of the suite."""
    ended: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in getattr(report, "user_properties", ()):
                if name == "suite":
                    ended[tuple(value)][outcome] += 1
    if not ended:
        return
    storages = list(dict.fromkeys(storage for storage, _ in ended))
    tests = list(dict.fromkeys(test for _, test in ended))
    marks = [chr(ord("A") + number) for number in range(len(storages))]
    write = terminalreporter.write_line
    terminalreporter.section("backends")
    write("A number: runs that passed. -: the storage has nothing of the kind. .: not run.")
    for mark, storage in zip(marks, storages, strict=True):
        total = sum((found for key, found in ended.items() if key[0] == storage), Counter[str]())
        bad = total["failed"] + total["error"]
        write(f"{mark}: {storage}: {total['passed']} passed" + (f", {bad} FAILED" if bad else ""))
    width = max(map(len, tests))
    write("".ljust(width) + "".join(f"{mark:>4}" for mark in marks))
    for test in tests:
        cells = [_cell(ended.get((storage, test), Counter())) for storage in storages]
        write(test.ljust(width) + "".join(f"{cell:>4}" for cell in cells))


def _cell(found: Counter[str]) -> str:
    if found["failed"] or found["error"]:
        return "BAD"
    return str(found["passed"]) if found["passed"] else "-" if found["skipped"] else "."
