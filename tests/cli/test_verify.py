"""``kvshelf verify``: what it finds, what a repair does, and what it leaves alone."""

from __future__ import annotations

import functools
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import open_backend
from kvshelf.backends.posix import PosixBackend
from kvshelf.cli.verify import verify_shelf
from kvshelf.shelf.shelf import Shelf
from tests.support import commands
from tests.support.filled import fill, hybrid, namespace, prompt

FOLDER = namespace().folder
HYBRID = hybrid()
OLD = time.time() - 2 * 86400


run = functools.partial(commands.done, "verify")


report = functools.partial(commands.report, "verify")


def objects(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.safetensors") if ".kvshelf" not in path.parts)


def age(root: Path) -> None:
    """Make all files old, so that nothing looks as if it were being copied."""
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (OLD, OLD))


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    root = tmp_path / "shelf"
    fill(root, namespace(), prompt(0, 3), prompt(1, 2))
    fill(root, HYBRID, prompt(0, 2))
    age(root)
    return root


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, (OLD, OLD))


# ------------------------------------------------------------------------------ what is found


def test_file_that_may_still_be_copied_stays(shelf: Path) -> None:
    bad = objects(shelf)[0]
    os.truncate(bad, 1000)
    found = report(shelf, "--repair", "--yes", code=1)
    assert (found["bad"], found["moved"]) == (1, 0)
    assert "changed within the last minute" in found["problems"][0]["problem"]
    assert bad.stat().st_size == 1000


def test_damaged_objects_and_names_that_the_namespace_has_not_are_moved(shelf: Path) -> None:
    path = next(p for p in objects(shelf) if p.name.endswith("-0of2.safetensors"))
    wrong = [
        path.with_name(path.name.replace("-0of2", "-0of3")),
        path.with_name(path.name.replace("-0of2", "-state-0of9")),
    ]
    for name in wrong:
        shutil.copy2(path, name)
    damaged = next(each for each in objects(shelf) if each not in (path, *wrong))
    flip(damaged)
    found = report(shelf, "--repair", "--yes")
    assert (found["bad"], found["moved"]) == (3, 3)
    assert not any(name.exists() for name in (damaged, *wrong))


# ------------------------------------------------------------------------------ descriptions


def test_description_that_cannot_be_used_is_named_and_its_objects_stay(shelf: Path) -> None:
    path = shelf / FOLDER / "namespace.json"
    for content in (None, b"", path.read_bytes()[:-10], namespace("x", weights="user:y").encoded):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        found = report(shelf, "--repair", "--yes", code=1)
        assert (found["descriptions"], found["unverified"], found["bad"]) == (1, 10, 0)
        [problem] = found["problems"]
        assert problem["name"] == f"{FOLDER}/namespace.json"
        assert "an engine that stores to it" in problem["problem"]
        path.touch()
    assert len(objects(shelf / FOLDER)) == 10


def test_what_cannot_hit_is_counted(shelf: Path) -> None:
    """Chunks of which a shard is missing, and links in the place of objects."""
    one, *_, other = objects(shelf / FOLDER)
    one.unlink()
    other.unlink()
    other.symlink_to(os.devnull)
    found = report(shelf)
    assert (found["incomplete"], found["intact"]) == (2, found["found"])
    assert "2 incomplete chunks" in run(shelf).stdout


# ------------------------------------------------------------------------------ beside objects


def test_leftovers_are_removed_when_they_are_old(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = objects(shelf)[0]
    old = path.with_name(f".{path.name}.{'a' * 16}.tmp")
    young = path.with_name(f".{path.name}.{'b' * 16}.tmp")
    foreign = path.with_name(f".notes.{'c' * 16}.tmp")
    folder = path.relative_to(shelf).parts[0]
    for each in (old, young, foreign):
        each.write_bytes(b"x" * 100)
    found = report(shelf, "--repair", "--yes")
    assert (found["leftovers"], found["removed"], found["sound"]) == (0, 0, True)
    later = time.time() + 8 * 86400
    monkeypatch.setattr("kvshelf.cli.verify.storage_time", lambda _: later)
    assert report(shelf)["leftovers"] == 0, "the clocks differ"
    monkeypatch.setattr("time.time", lambda: later)
    os.utime(young, (later, later))
    found = report(shelf)
    assert (found["leftovers"], found["leftover_bytes"], found["sound"]) == (1, 100, True)
    assert "1 leftovers (100 B)" in run(shelf).stdout
    assert old.exists()
    other = next(each for each in (FOLDER, HYBRID.folder) if each != folder)
    assert report(shelf, "--repair", "--yes", "-n", other)["removed"] == 0
    assert report(shelf, "--repair", "--yes")["removed"] == 1
    assert (old.exists(), young.exists(), foreign.exists()) == (False, True, True)


# ------------------------------------------------------------------------------ samples


def test_sample_is_a_part(shelf: Path) -> None:
    total = len(objects(shelf))
    for text, size in (("5", 5), ("1000000", total), ("0", 0), ("100%", total), ("0.001%", 1)):
        found = report(shelf, "--sample", text)
        assert (found["found"], found["intact"]) == (size, size)
    assert report(shelf, "--sample", "50%")["found"] == round(total / 2)
    for text in ("-1", "101%", "1e3", "%", ""):
        assert "--sample" in run(shelf, f"--sample={text}", code=2).stderr


def test_only_one_namespace(shelf: Path) -> None:
    flip(objects(shelf / HYBRID.folder)[0])
    found = report(shelf, "-n", FOLDER[-16:])
    assert (found["intact"], found["namespaces"]) == (10, 1)
    assert report(shelf, "-n", HYBRID.folder + "/", code=1)["bad"] == 1


# ------------------------------------------------------------------------------ trouble


@pytest.mark.parametrize(
    ("heals", "opens", "gone"),
    [(False, 1, 1), (True, 2, 0)],
    ids=["vanishes", "an old open has old contents"],
)
def test_object_that_changes_while_it_is_opened_is_no_problem(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, heals: bool, opens: int, gone: int
) -> None:
    path = objects(shelf)[3]
    good = path.read_bytes()
    flip(path)
    open_object, opened = PosixBackend.open, list[str]()

    def change_and_open(self: PosixBackend, name: str, size: int | None = None) -> Any:
        if name == str(path.relative_to(shelf)):
            opened.append(name)
            if len(opened) == opens:
                path.write_bytes(good) if heals else path.unlink()
        return open_object(self, name)

    monkeypatch.setattr(PosixBackend, "open", change_and_open)
    row = report(shelf)
    assert (row["gone"], row["sound"], len(opened)) == (gone, True, opens)


def test_repair_of_a_read_only_shelf_is_refused(shelf: Path) -> None:
    with Shelf(open_backend(str(shelf), read_only=True)) as opened:
        with pytest.raises(OSError, match="read-only"):
            verify_shelf(opened, repair=True)
        assert verify_shelf(opened).sound
