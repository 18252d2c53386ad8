"""``kvshelf du``: every object is counted once, in the row where a user looks for it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.posix import PosixBackend
from kvshelf.cli.du import By
from kvshelf.shelf.shelf import open_shelf
from kvshelf.tools.du import BREAKDOWNS
from tests.support import commands
from tests.support.filled import fill, hybrid, namespace, prompt, store

FOLDER = namespace().folder
HYBRID = hybrid()
DAY = 86400.0


run = functools.partial(commands.done, "du")


usage = functools.partial(commands.report, "du")


def rows(found: dict[str, Any], by: str) -> dict[str, tuple[int, int]]:
    return {row["name"]: (row["objects"], row["bytes"]) for row in found["by"][by]}


def of(paths: list[Path]) -> tuple[int, int]:
    return len(paths), sum(path.stat().st_size for path in paths)


def objects(root: Path, pattern: str = "*.safetensors") -> list[Path]:
    return sorted(root.rglob(pattern))


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    root = tmp_path / "shelf"
    fill(root, namespace(), prompt(0, 6))
    with open_shelf(root) as opened:
        store(opened, namespace(), prompt(1, 2), salt="tenant")
    fill(root, HYBRID, prompt(0, 2))
    return root


def test_the_command_knows_all_breakdowns() -> None:
    assert [by.value for by in By] == list(BREAKDOWNS)


def test_by_namespace(shelf: Path) -> None:
    found = usage(shelf)
    assert rows(found, "namespace") == {
        folder: of(objects(shelf / folder)) for folder in (FOLDER, HYBRID.folder)
    }
    assert (found["objects"], found["bytes"]) == of(objects(shelf))
    sizes = [row["bytes"] for row in found["by"]["namespace"]]
    assert sizes == sorted(sizes, reverse=True)
    descriptions = of(objects(shelf, "namespace.json"))
    assert found["others"]["descriptions"] == {"files": 2, "bytes": descriptions[1]}
    assert found["counted_bytes"] == found["bytes"] + descriptions[1]
    assert 0 < found["free"] <= found["total"]
    text = run(shelf).stdout
    assert text.splitlines()[0].split() == ["OBJECTS", "SIZE", "SHARE", "LAST", "USED", "NAMESPACE"]
    assert FOLDER in text
    assert "2: " in text.splitlines()[-1]


def test_by_group_depth_and_kind_of_one_listing(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    real = PosixBackend.list

    def list_all(self: PosixBackend, prefix: str = "", **options: Any) -> Any:
        listed.append(prefix)
        return real(self, prefix, **options)

    monkeypatch.setattr(PosixBackend, "list", list_all)
    found = usage(shelf, "--by", "group", "--by", "depth", "--by", "kind", "--by", "kind")
    assert len(listed) == len(set(listed))
    assert rows(found, "group") == {
        f"{folder}/{group.name}": of(objects(group))
        for folder in (FOLDER, HYBRID.folder)
        for group in (shelf / folder).iterdir()
        if group.is_dir() and group.name[0] != "."
    }
    assert len(rows(found, "group")) == 3
    first = [p for p in objects(shelf) if "-0-" in p.name[64:67]]
    assert rows(found, "depth")["chunk 0"] == of(first)
    assert list(rows(found, "depth")) == ["chunk 0", "chunks 1 to 3", "chunks 4 to 15"]
    assert rows(found, "kind") == {
        "full": of(
            [p for p in objects(shelf) if "-state-" not in p.name and "-window-" not in p.name]
        ),
        "window": of(objects(shelf, "*-window-*")),
        "state": of(objects(shelf, "*-state-*")),
    }
    assert all(
        sum(row["objects"] for row in table) == found["objects"]
        and sum(row["bytes"] for row in table) == found["bytes"]
        for table in found["by"].values()
    )


@pytest.mark.parametrize("when", [-1e10, 1e14])
def test_absurd_times_are_counted(shelf: Path, when: float) -> None:
    try:
        os.utime(objects(shelf)[0], (when, when))
    except OverflowError:
        pytest.skip("this system has no such times")
    found = usage(shelf, "--by", "age", "--by", "namespace")
    assert sum(row["objects"] for row in found["by"]["age"]) == len(objects(shelf))
    run(shelf, "--by", "age")


def test_one_namespace(shelf: Path) -> None:
    found = usage(shelf, "-n", FOLDER[-16:])
    assert rows(found, "namespace") == {FOLDER: of(objects(shelf / FOLDER))}
    assert "it has:" in run(shelf, "-n", "other-0123456789abcdef", code=2).stderr


def test_empty_and_missing(tmp_path: Path) -> None:
    found = usage(tmp_path, *(part for name in BREAKDOWNS for part in ("--by", name)))
    assert found["objects"] == 0
    assert found["by"] == {name: [] for name in BREAKDOWNS}
    assert "0 objects" in run(tmp_path).stdout
    run(tmp_path / "typo", code=3)
    run(tmp_path, "--by", "moon", code=2)
