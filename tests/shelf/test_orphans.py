"""What killed writers and bad objects leave behind makes room when a storage is full."""

from __future__ import annotations

import errno
import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshelf.errors import NoSpaceStorageError, TransientStorageError
from kvshelf.shelf import orphans as module
from kvshelf.shelf.orphans import is_temporary
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.storages import CountingBackend, Fault, FaultyBackend, posix

FMT = make_format(native=False)
OTHER = make_format(native=False, weights="user:other")
HEX = "0123456789abcdef"


class Full:
    """A shelf of two namespaces whose storage is full, with files that killed writers left."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faults = FaultyBackend(posix(root))
        self.counting = CountingBackend(self.faults)
        self.shelf = Shelf(self.counting)
        self.chunks = make_chunks(FMT, 3)
        self.store(0)
        self.orphans = []
        for fmt in (FMT, OTHER):
            for chunk in make_chunks(fmt, 3, 1):
                self.shelf.view(fmt).describe()
                name = Path(self.shelf.view(fmt).name(ObjectRef(chunk, 0)))
                self.orphans.append(self.leave(name.parent / f".{name.name}.{HEX}.tmp"))
        self.orphans.append(self.leave(Path(f".kvshelf/.sweep.{HEX}.tmp")))
        self.bad = self.leave(Path(FMT.namespace.folder) / ".kvshelf/bad/00-11-x", age=0.0)
        self.foreign = self.leave(Path(FMT.namespace.folder) / f"_/ab/.notes.{HEX}.tmp")
        full = NoSpaceStorageError(errno.ENOSPC, "ENOSPC")
        self.faults.add(Fault("write", error=full))

    def leave(self, name: Path, age: float = 7200.0) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"begun")
        os.utime(path, (time.time() - age,) * 2)
        return path

    def store(self, number: int) -> None:
        chunk = self.chunks[number]
        self.shelf.view(FMT).publish(ObjectRef(chunk, 0), sealed(FMT, chunk))


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Full:
    # The age counts from a file's last change too, which no test can set.
    monkeypatch.setattr(module, "TEMPORARY_SECONDS", -1.0)
    return Full(tmp_path / "shelf")


def test_a_write_that_finds_no_room_removes_orphans_of_all_namespaces(full: Full) -> None:
    with pytest.raises(NoSpaceStorageError):
        full.store(1)
    assert not [path for path in full.orphans if path.exists()]
    assert not full.bad.exists()
    assert full.foreign.exists()
    assert full.shelf.view(FMT).present(full.chunks[:1], [0]) == [True]


def test_namespaces_of_other_versions_keep_their_quarantine_and_temporaries(full: Full) -> None:
    newer = Path("newer-" + "0" * 16)
    (full.root / newer).mkdir()
    (full.root / newer / "namespace.json").write_text('{"format": "kvshelf/2"}')
    kept = [
        full.leave(newer / ".kvshelf/bad/00-11-x"),
        full.leave(newer / f".namespace.json.{HEX}.tmp"),
    ]
    with pytest.raises(NoSpaceStorageError):
        full.store(1)
    assert not full.bad.exists()
    assert all(path.exists() for path in kept)


def test_temporaries_that_may_be_in_use_stay(full: Full, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEMPORARY_SECONDS", 3600.0)
    with pytest.raises(NoSpaceStorageError):
        full.store(1)
    # They have just been written here, whatever their modification times say.
    assert all(path.exists() for path in full.orphans)


def test_a_full_storage_is_searched_once_a_minute(
    full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoSpaceStorageError):
        full.store(1)
    sweeps = full.counting.counts["sweep"]
    orphans = full.shelf.view(FMT)._orphans
    assert orphans is not None
    folder = full.orphans[0].parent.relative_to(full.root)
    full.leave(full.orphans[0].relative_to(full.root))
    assert orphans.remove(str(folder)) == 0
    assert full.counting.counts["sweep"] == sweeps
    monkeypatch.setattr(orphans, "_next", 0.0)
    assert orphans.remove(str(folder)) == 1


def test_a_search_that_takes_too_long_goes_on_where_it_ended(
    full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    orphans = full.shelf.view(FMT)._orphans
    assert orphans is not None
    removed = []
    while any(path.exists() for path in full.orphans):
        monkeypatch.setattr(orphans, "_next", 0.0)
        removed.append(orphans.remove(FMT.namespace.folder))
        assert len(removed) < 40
    assert sum(removed) == len(full.orphans)
    assert max(removed) < len(full.orphans)


def test_trouble_while_orphans_are_removed_is_not_the_stores(full: Full) -> None:
    full.faults.add(Fault("sweep", error=TransientStorageError(errno.EIO, "EIO")))
    with pytest.raises(NoSpaceStorageError):
        full.store(1)
    full.faults.heal()
    full.shelf.backend.writes.close()
    full.store(1)
    assert full.shelf.view(FMT).present(full.chunks[:2], [0]) == [True, True]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{FMT.namespace.folder}/.namespace.json.{HEX}.tmp", True),
        (f".kvshelf/pins/.mine.json.{HEX}.tmp", True),
        (f"{FMT.namespace.folder}/.kvshelf/gave-up/.{'1' * 32}.{HEX}.tmp", True),
        (f"{FMT.namespace.folder}/.notes.{HEX}.tmp", False),
        (f"{FMT.namespace.folder}/_/ab/.namespace.json.{HEX}.tmp", False),
        (f".namespace.json.{HEX}.tmp", False),
        (f"data/.namespace.json.{HEX}.tmp", False),
        (f"{FMT.namespace.folder}/namespace.json", False),
    ],
)
def test_which_names_are_those_of_temporaries_of_ours(name: str, expected: bool) -> None:
    assert is_temporary(name) is expected
