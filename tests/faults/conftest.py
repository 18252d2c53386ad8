"""Mounts for tests with faults, and the table that is printed at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from kvshelf.backends import guard, posix_mount
from kvshelf.shelf import failed_keys
from tests.faults.cells import (
    BACK_OFF,
    BACKENDS,
    MOMENTS,
    BucketStorage,
    MountedStorage,
    Storage,
    WrappedStorage,
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
def storage(
    request: pytest.FixtureRequest, backend: str, tmp_path: Path, short_pauses: None
) -> Iterator[Storage]:
    """A shelf's place of the kind that the test's parameter `backend` names."""
    made: Storage
    if backend == "fuse":
        made = MountedStorage(request.getfixturevalue("mount"))
    elif backend == "s3":
        pytest.importorskip("obstore", reason="obstore is missing: pip install '.[s3]'")
        made = BucketStorage()
    else:
        made = WrappedStorage(str(tmp_path / "shelf"))
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
    from tests.faults.test_table import rows_of, why_no_cell

    ended: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    conditions: dict[str, Counter[str]] = defaultdict(Counter)
    met = killed = 0
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in getattr(report, "user_properties", ()):
                if name == "cell":
                    ended[tuple(value)][outcome] += 1
                elif name == "condition":
                    conditions[value][outcome] += 1
                elif name == "met" and outcome == "passed":
                    met += value
                elif name == "killed":
                    killed += value
    write = terminalreporter.write_line
    if ended or killed or conditions:
        terminalreporter.section("faults")
    for text, counts in conditions.items():
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        write(f"{text}: {outcomes}")
    if killed:
        write(f"{killed} writers and readers were killed, one at each step of what they did.")
    if not ended:
        return
    total = sum((counts for counts in ended.values()), Counter[str]())
    write(
        f"{len(ended)} cells, {total['passed']} runs ended well, "
        f"{total['failed'] + total['error']} did not, {total['skipped']} were skipped; "
        f"faults met: {met}."
    )
    write("Each ends with: KV right, or computed instead; time bounded; nothing published lost;")
    write("back in use without a restart. A number: runs that ended well. A letter: no such cell.")
    reasons: dict[str, str] = {}
    for backend in (backend for backend in BACKENDS if backend in {cell[2] for cell in ended}):
        write("")
        write(f"{backend:24}" + "".join(f"{moment:>9}" for moment in MOMENTS))
        for row in rows_of(backend):
            line = f"{row:24}"
            for moment in MOMENTS:
                counts = ended.get((row, moment, backend), Counter())
                reason = why_no_cell(row, moment, backend)
                if counts["failed"] or counts["error"]:
                    text = f"FAILED {counts['failed'] + counts['error']}"
                elif counts["passed"]:
                    text = str(counts["passed"])
                elif counts["skipped"]:
                    text = "skipped"
                elif reason is not None:
                    text = reasons.setdefault(reason, ascii_lowercase[len(reasons)])
                else:
                    text = "."
                line += f"{text:>9}"
            write(line)
    write("")
    for reason, letter in reasons.items():
        write(f"{letter}: {reason}")
