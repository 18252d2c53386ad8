"""``kvshelf ls``: every object is counted once, and the bounds and the pins are named."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.posix import PosixBackend
from kvshelf.capacity.sweep import KEEPERS
from kvshelf.shelf.pins import Pin, Pins
from kvshelf.shelf.shelf import open_shelf
from tests.support import commands
from tests.support.filled import fill, hybrid, namespace, prompt, store
from tests.support.places import Place

FOLDER = namespace().folder
HYBRID = hybrid()
DAY = 86400.0


run = functools.partial(commands.done, "ls")


usage = functools.partial(commands.report, "ls")


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


def test_last_use_of_a_namespace_is_that_of_any_object_and_the_largest_is_first(
    shelf: Path,
) -> None:
    for folder in (FOLDER, HYBRID.folder):
        for path in objects(shelf / folder)[1:]:
            os.utime(path, (1e9, 1e9))
    report = usage(shelf)
    assert all(time.time() - row["last_used"] < DAY for row in report["by"]["namespace"])
    assert list(rows(report, "namespace").items()) == sorted(
        ((folder, of(objects(shelf / folder))) for folder in (FOLDER, HYBRID.folder)),
        key=lambda row: -row[1][1],
    )
    assert (report["objects"], report["bytes"]) == of(objects(shelf))
    assert 0 < report["free"] <= report["total"]


def test_what_lies_beside_objects_is_counted(shelf: Path) -> None:
    (shelf / FOLDER / f".namespace.json.{'0' * 16}.tmp").write_bytes(bytes(10))
    objects(shelf)[0].with_name("README").write_bytes(bytes(20))
    marker = shelf / FOLDER / ".kvshelf" / "gave-up" / ("a" * 32)
    marker.parent.mkdir(parents=True)
    marker.touch()
    (shelf / "empty-0123456789abcdef").mkdir()
    others = usage(shelf)["others"]
    assert others == {
        "temporary": {"files": 1, "bytes": 10},
        "foreign": {"files": 1, "bytes": 20},
        "marker": {"files": 1, "bytes": 0},
    }
    text = run(shelf).stdout
    assert "; 1 foreign file: 20 B; 1 marker file: 0 B; 1 temporary file: 10 B; " in text
    assert "0 0 B 0%" in " ".join(text.split())


def test_by_group_and_age_of_one_listing(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    real = PosixBackend.list

    def list_all(self: PosixBackend, prefix: str = "", **options: Any) -> Any:
        listed.append(prefix)
        return real(self, prefix, **options)

    monkeypatch.setattr(PosixBackend, "list", list_all)
    found = usage(shelf, "--by", "group")
    assert len(listed) == len(set(listed))
    assert rows(found, "group") == {
        f"{folder}/{group.name}": of(objects(group))
        for folder in (FOLDER, HYBRID.folder)
        for group in (shelf / folder).iterdir()
        if group.is_dir() and group.name[0] != "."
    }
    assert len(rows(found, "group")) == 3
    for path, when in zip(objects(shelf), (-1e10, 1e14), strict=False):
        with contextlib.suppress(OverflowError):  # where a system has no such times
            os.utime(path, (when, when))
    ages = usage(shelf, "--by", "age")["by"]["age"]
    assert sum(row["objects"] for row in ages) == len(objects(shelf))


GIB = 1 << 30


@pytest.fixture
def kept(empty: Place) -> Place:
    """A shelf with two keepers and two pins."""
    empty.fill(namespace(), prompt(1, chunks=3))
    with empty.open() as shelf:
        for name, said in (("0" * 16, {"max_bytes": 3 * GIB, "max_age": 7200.0}), ("1" * 16, {})):
            data = json.dumps({"max_bytes": 5 * GIB, "by": "node-7 1"} | said).encode()
            shelf.backend.write(f"{KEEPERS}/{name}", [data])
        Pins.add(
            shelf.backend, "system", Pin(namespace=namespace().folder, until=time.time() + 9e5)
        )
        Pins.add(shelf.backend, "past", Pin(group="_", until=1.6e9))
    return empty


def test_keepers_and_each_pin_are_a_line(kept: Place) -> None:
    before = kept.names()
    *_, bounds, past, system = kept.run("ls").stdout.splitlines()
    assert bounds.startswith("2 keepers in the last 10 minutes, the last sweep ")
    assert bounds.endswith(" ago; max_bytes 3.0 GiB; max_age 2 h")
    assert past.startswith("pin past: all namespaces/_, all chunks, until 2020-09-13")
    assert past.endswith("(expired)")
    assert system.startswith(f"pin system: {FOLDER}/*, all chunks, until ")
    [row] = kept.rows("ls")
    assert (row["keepers"], row["bounds"]) == (2, {"max_bytes": 3 * GIB, "max_age": 7200.0})
    assert abs(time.time() - row["last_sweep"]) < 3600
    assert [(pin["pin"], pin["expired"]) for pin in row["pins"]] == [
        ("past", True),
        ("system", False),
    ]
    assert row["errors"] == []
    assert kept.names() == before


def test_what_is_damaged_is_named(kept: Place) -> None:
    with kept.open() as shelf:
        shelf.backend.write(".kvshelf/pins/later.json", [b'{"version": 2}'])
        shelf.backend.write(".kvshelf/pins/broken.json", [b"{\x1b[31m"])
        shelf.backend.write(f"{KEEPERS}/{'2' * 16}", [b"\x1b[31m"])
    [row] = kept.rows("ls")
    told = " ".join(error["problem"] for error in row["errors"])
    assert all(word in told for word in ("the pin broken pins nothing", "the pin later"))
    assert row["keepers"] == 2
    result = kept.run("ls")
    assert "the pin broken pins nothing" in result.stderr
    assert "\x1b[31m" not in result.output
