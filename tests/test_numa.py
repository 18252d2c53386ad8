"""Memory near a device."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvshelf import numa

ALLOWED = {0, 1, 2, 3, 8, 9}


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numa, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALLOWED))
    return tmp_path


@pytest.mark.parametrize(
    ("cpulist", "near"),
    [
        ("0-3,16-19\n", {0, 1, 2, 3}),
        ("8\n", {8}),
        # All are equally near, or none may be used.
        ("0-31\n", set()),
        ("20-31\n", set()),
        ("\n", set()),
    ],
)
def test_processors_near_a_device_are_those_that_linux_names(
    devices: Path, cpulist: str, near: set[int]
) -> None:
    folder = devices / "0000:1b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text(cpulist)
    assert numa.processors_near("0000:1B:00.0") == near


def test_an_unknown_device_is_near_nothing(devices: Path) -> None:
    assert numa.processors_near("0000:1b:00.0") == set()


def test_work_runs_on_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, set[int]]] = []

    def set_affinity(_: int, processors: set[int]) -> None:
        asked.append((threading.get_ident(), processors))
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    worked_on = numa.run_on({1, 2}, threading.get_ident)
    # Where the system refuses them, the work is done all the same.
    assert asked == [(worked_on, {1, 2})]
    assert worked_on != threading.get_ident()
    assert numa.run_on(set(), threading.get_ident) == threading.get_ident()


def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        numa.run_on({0}, lambda: 1 // 0)
