"""``kvshelf gc``: shows what would go, deletes it when told to, and never anything else."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.posix import PosixBackend
from kvshelf.cli.common import PROBLEM
from kvshelf.errors import PermanentStorageError, StorageError, TransientStorageError
from kvshelf.shelf.pins import Pin, Pins
from tests.support.filled import namespace, prompt
from tests.support.places import Place


@pytest.fixture
def place(empty: Place) -> Place:
    """A shelf with three prompts of four chunks."""
    for seed in range(3):
        empty.fill(namespace(), prompt(seed, chunks=4))
    return empty


def size(place: Place) -> int:
    with place.open() as shelf:
        return sum(row.size for row in shelf.objects())


def gc(place: Place, *args: object, code: int = 0, **environment: str) -> dict[str, Any]:
    return place.rows("gc", *args, code=code, **environment)[-1]


def test_gc_deletes_what_its_dry_run_shows(place: Place) -> None:
    assert gc(place, "--yes")["deleted"] == {}, "nothing goes without a bound"
    # All of one age, however long it took to store them: all runs choose the same.
    for path in Path(place.url).rglob("*.safetensors"):
        os.utime(path, (time.time() - 3600,) * 2)
    bound = size(place) // 2
    given = ("--max-bytes", f"{bound}B")
    shown = place.run("gc", *given)
    assert "would delete" in shown.stdout and "--yes deletes" in shown.stdout
    chosen = gc(place, *given)["chosen"]
    row = gc(place, *given, "--yes")
    assert row["errors"] == [] and row["deleted"] == chosen
    left = place.names()
    assert row["deleted"]["size"]["files"] == 24 - len(left)
    assert size(place) <= bound
    again = place.run("gc", *given)
    assert again.exit_code == 0
    assert "0 files" in again.stdout
    assert "--yes" not in again.stdout


def test_pin_ends_by_the_clock_that_is_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = Pin(namespace=namespace().folder, until=time.time() + 600)
    with place.open() as shelf:
        Pins.add(shelf.backend, "all", pin)
    monkeypatch.setattr("kvshelf.cli.deletion.storage_time", lambda _: time.time() + 1800)
    row = gc(place, "--max-bytes", "1000B", "--yes", code=PROBLEM)
    assert row["pinned"]["bytes"] == size(place)
    assert "pinned" in row["problem"]
    assert row["deleted"] == {}


def test_each_salt_group_is_bounded_before_the_shelf_is(place: Place) -> None:
    for salt in ("tenant", "other"):
        place.fill(namespace(), prompt(5, chunks=4), salt)
    each = size(place) // 5
    row = gc(place, "--group-max-bytes", f"{each // 2}B", "--max-bytes", f"{3 * each}B")
    # Two of the eight objects of each group stay; of all 28 that are left, 22.
    assert row["chosen"]["group"]["files"] == 12
    assert row["chosen"]["size"]["files"] == 6
    assert row["bytes_after"] <= 3 * each


def test_gc_of_a_storage_that_is_overloaded_ends_with_an_error_and_the_next_one_finishes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes ten deletions, and then answers 503: both runs say what they deleted."""
    delete, taken = PosixBackend._delete, list[str]()

    def overloaded(self: PosixBackend, name: str) -> bool:
        if name.endswith(".safetensors"):
            taken.append(name)
            if len(taken) > 10:
                raise TransientStorageError(16, "503 slow down", name)
        return bool(delete(self, name))

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "_delete", overloaded)
        first = gc(place, "--max-bytes", "1000B", "--yes", code=PROBLEM)
    assert first["deleted"]["size"]["files"] == 10 and len(place.names()) == 14
    assert first["bytes_after"] == size(place)
    assert first["failed"] == 14 and len(taken) == len({*taken}), "none is tried twice"
    second = gc(place, "--max-bytes", "1000B", "--yes")
    assert second["deleted"]["size"]["files"] == 14 and not place.names()


def test_deletions_that_the_storage_refuses_are_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: PosixBackend, names: list[str]) -> list[StorageError]:
        return [PermanentStorageError(13, "EACCES", name) for name in names]

    monkeypatch.setattr("kvshelf.cli.deletion.storage_time", lambda _: time.time())
    monkeypatch.setattr(PosixBackend, "delete", refuse)
    result = place.run("gc", "--max-bytes", "1000B", "--yes")
    assert result.exit_code == PROBLEM
    assert "24 files could not be deleted" in result.stderr
    assert "EACCES" in result.stderr
