"""Readable failures for the asserts inside the suite, and the matrix of a run."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest

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
