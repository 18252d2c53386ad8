"""Mounts for tests with faults, and the table that is printed at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvshelf.backends import guard, posix_mount
from kvshelf.shelf import failed_keys
from tests.faults.cells import (
    BACK_OFF,
    BACKENDS,
    BucketStorage,
    MountedStorage,
    Storage,
)
from tests.faults.faultfs import FaultMount, mounted


@pytest.fixture(scope="session")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., FaultMount]]:
    """Mount fault-injecting filesystems; they are gone after the session."""
    made: list[FaultMount] = []

    def make(**options: Any) -> FaultMount:
        made.append(mounted(tmp_path_factory.mktemp("fault"), **options))
        return made[-1]

    yield make
    for mount in made:
        mount.close()


@pytest.fixture(scope="session")
def mount(mounts: Callable[..., FaultMount]) -> FaultMount:
    """The filesystem that most tests share; each has a directory of its own there."""
    return mounts()


@pytest.fixture(autouse=True)
def short_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what failed be loaded again soon."""
    monkeypatch.setattr(failed_keys, "_SECONDS", {True: BACK_OFF, False: BACK_OFF})


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores be tried again soon after the storage refused them."""
    monkeypatch.setattr(guard, "REFUSED_SECONDS", BACK_OFF)
    monkeypatch.setattr(posix_mount, "READ_ONLY_MEMORY", BACK_OFF)


@pytest.fixture
def storage(request: pytest.FixtureRequest, backend: str, short_pauses: None) -> Iterator[Storage]:
    """A shelf's place of the kind that the test's parameter `backend` names."""
    made: Storage
    if backend == "fuse":
        made = MountedStorage(request.getfixturevalue("mount"))
    else:
        pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
        made = BucketStorage()
    yield made
    made.heal()
    made.close()


# ----------------------------------------------------------------------------------------- report


@pytest.fixture
def note_cell(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Say for which cell of the table this test counts."""

    def note(fault: str, moment: str, backend: str) -> None:
        record_property("cell", (fault, moment, backend))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table: how many runs of each cell ended well."""
    cells: dict[tuple[str, str], dict[str, Counter[str]]] = defaultdict(dict)
    met = killed = 0
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in getattr(report, "user_properties", ()):
                if name == "cell":
                    fault, moment, backend = value
                    cells[fault, moment].setdefault(backend, Counter())[outcome] += 1
                elif name == "met" and outcome == "passed":
                    met += value
                elif name == "killed":
                    killed += value
    write = terminalreporter.write_line
    if cells or killed:
        terminalreporter.section("faults")
    if killed:
        write(f"{killed} writers and readers were killed, one at each step of what they did.")
    if not cells:
        return
    write("Each ends with: KV right, or computed instead; time bounded; nothing published lost;")
    write(f"back in use without a restart. A number: runs that ended well. Faults met: {met}.")
    write(f"{'':32}" + "".join(f"{backend:>10}" for backend in BACKENDS))
    for (fault, moment), counted in cells.items():
        texts = [_text_of(counted.get(backend, Counter())) for backend in BACKENDS]
        write(f"{f'{fault}, {moment}':32}" + "".join(f"{text:>10}" for text in texts))


def _text_of(counts: Counter[str]) -> str:
    failed = counts["failed"] + counts["error"]
    if failed:
        return f"FAILED {failed}"
    return str(counts["passed"]) if counts["passed"] else "skipped" if counts else ""
