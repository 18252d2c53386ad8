"""``kvshelf gc``: shows what would go, deletes it when told to, and never anything else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.posix import PosixBackend
from kvshelf.cli.codes import PROBLEM
from kvshelf.errors import PermanentStorageError, StorageError
from kvshelf.shelf.pins import Pin, Pins
from tests.support.filled import namespace, prompt
from tests.support.places import Place

DAY = 86400.0


def fill(place: Place) -> Place:
    """Store three prompts of four chunks."""
    for seed in range(3):
        place.fill(namespace(), prompt(seed, chunks=4))
    return place


@pytest.fixture
def filled(empty: Place) -> Place:
    return fill(empty)


@pytest.fixture
def folder(tmp_path: Path) -> Place:
    return fill(Place(str(tmp_path / "shelf")))


def size(place: Place) -> int:
    with place.open() as shelf:
        return sum(row.size for row in shelf.objects())


def gc(place: Place, *args: object, code: int = 0, **environment: str) -> dict[str, Any]:
    return place.rows("gc", *args, code=code, **environment)[-1]


def test_gc_deletes_what_its_dry_run_shows(filled: Place) -> None:
    # All of one age, however long it took to store them: all runs choose the same.
    age(Path(filled.url), 3600)
    bound = size(filled) // 2
    given = ("--max-bytes", f"{bound}B")
    shown = filled.run("gc", *given)
    assert "would delete" in shown.stdout and "--yes deletes" in shown.stdout
    chosen = gc(filled, *given)["chosen"]
    row = gc(filled, *given, "--yes")
    assert row["errors"] == [] and row["deleted"] == chosen
    left = filled.names()
    assert row["deleted"]["size"]["files"] == 24 - len(left)
    assert size(filled) <= bound
    again = filled.run("gc", *given)
    assert again.exit_code == 0
    assert "0 files" in again.stdout
    assert "--yes" not in again.stdout


def test_nothing_goes_without_a_bound(filled: Place) -> None:
    row = gc(filled, "--yes")
    assert row["deleted"] == {}
    assert len(filled.names()) == 24


def age(root: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def test_objects_that_were_just_copied_here_do_not_count_as_old(folder: Place) -> None:
    age(Path(folder.url), 90 * DAY)
    assert gc(folder, "--max-age", "30d")["chosen"] == {}


def test_a_salt_group_is_bounded_whatever_engines_here_would_do(tmp_path: Path) -> None:
    place = fill(Place(str(tmp_path / "shelf")))
    place.fill(namespace(), prompt(5, chunks=10), "tenant")
    row = gc(place, "--group-max-bytes", f"{size(place) // 10}B")
    assert set(row["chosen"]) == {"group"}


def test_pinned_chunks_stay_and_are_told_if_they_are_too_many(folder: Place) -> None:
    with folder.open() as shelf:
        Pins.add(shelf.backend, "all", Pin(namespace=namespace().folder))
    row = gc(folder, "--max-bytes", "1000B", "--yes", code=PROBLEM)
    assert row["pinned"]["bytes"] == size(folder) > 1000
    assert "pinned" in row["problem"]
    assert len(folder.names()) == 24


def test_a_pin_ends_by_the_clock_that_is_behind(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = Pin(namespace=namespace().folder, until=time.time() + 600)
    with folder.open() as shelf:
        Pins.add(shelf.backend, "all", pin)
    monkeypatch.setattr("kvshelf.cli.deletion.storage_time", lambda _: time.time() + 1800)
    row = gc(folder, "--max-bytes", "1000B", "--yes", code=PROBLEM)
    assert row["pinned"]["bytes"] == size(folder)
    assert row["deleted"] == {}


def test_each_salt_group_is_bounded_before_the_shelf_is(folder: Place) -> None:
    for salt in ("tenant", "other"):
        folder.fill(namespace(), prompt(5, chunks=4), salt)
    each = size(folder) // 5
    row = gc(folder, "--group-max-bytes", f"{each // 2}B", "--max-bytes", f"{3 * each}B")
    # Two of the eight objects of each group stay; of all 28 that are left, 22.
    assert row["chosen"]["group"]["files"] == 12
    assert row["chosen"]["size"]["files"] == 6
    assert row["bytes_after"] <= 3 * each


def test_a_folder_that_cannot_be_listed_is_named_and_the_rest_goes_on(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bad,) = {name.rpartition("/")[0] for name in sorted(folder.names())[:1]}
    real = PosixBackend.list

    def refuse(self: PosixBackend, prefix: str = "", **options: Any) -> Any:
        if prefix == bad:
            raise PermanentStorageError(13, "EACCES", bad)
        return real(self, prefix, **options)

    monkeypatch.setattr(PosixBackend, "list", refuse)
    row = gc(folder, "--max-bytes", "1000B", "--yes", code=PROBLEM)
    assert bad in row["errors"][0]["problem"]
    monkeypatch.undo()
    left = {name.rpartition("/")[0] for name in folder.names()}
    assert left == {bad}


def test_a_storage_that_answers_no_more_ends_it(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise StorageError("it is gone")

    monkeypatch.setattr("kvshelf.capacity.visit.Lister.whole", fail)
    assert "it is gone" in folder.run("gc", "--yes").stderr


def test_a_look_is_no_use(folder: Place) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_atime_ns for path in Path(folder.url).rglob("*.safetensors")}

    before = times()
    gc(folder)
    assert times() == before
    # Nor does a look by the command itself keep anything.
    row = gc(folder, "--max-bytes", f"{size(folder) // 2}B", "--yes")
    assert row["kept"] == {"files": 0, "bytes": 0}
    assert row["deleted"]["size"]["files"] > 12


def test_foreign_files_and_links_stay(folder: Place, tmp_path: Path) -> None:
    root = Path(folder.url)
    elsewhere = fill(Place(str(tmp_path / "elsewhere")))
    other = namespace("Another")
    os.symlink(Path(elsewhere.url) / namespace().folder, root / other.folder)
    kept = [
        root / "README",
        root / namespace().folder / "notes.txt",
        root / f".README.{'0' * 16}.tmp",
    ]
    for path in kept:
        path.write_bytes(bytes(1000))
    row = gc(folder, "--max-bytes", "100B", "--yes")
    assert row["deleted"]["size"]["files"] == 24
    assert all(path.exists() for path in kept)
    assert len(elsewhere.names()) == 24


def test_an_empty_shelf_needs_nothing(empty: Place) -> None:
    assert gc(empty, "--yes")["objects"] == 0


def test_deletions_that_the_storage_refuses_are_told(
    folder: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: PosixBackend, names: list[str]) -> list[StorageError]:
        return [PermanentStorageError(13, "EACCES", name) for name in names]

    monkeypatch.setattr("kvshelf.cli.deletion.storage_time", lambda _: time.time())
    monkeypatch.setattr(PosixBackend, "delete", refuse)
    result = folder.run("gc", "--max-bytes", "1000B", "--yes")
    assert result.exit_code == PROBLEM
    assert "24 files could not be deleted" in result.stderr
    assert "EACCES" in result.stderr
