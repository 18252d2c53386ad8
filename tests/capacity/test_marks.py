"""Marks say when chunks were used last, of all processes, and whatever lies beside them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.backends.base import Backend
from kvshelf.capacity import marks
from kvshelf.capacity.marks import MARKS, Marks
from kvshelf.errors import TransientStorageError
from tests.sim.storage import Fault, FaultyStorage, LaterBackend, posix

FOLDER = "llama-0123456789abcdef"
OTHER = "qwen-fedcba9876543210"
NOW = 1_700_000_000.0
HOUR = 3600.0


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(23) + b"\x01"


def used(found: Marks, folder: str, *numbers: int) -> list[float]:
    keys = np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 32)
    return [float(value) for value in found.used(folder, keys)]


def packed(*numbers: int) -> bytes:
    return b"".join(key(number)[:16] for number in numbers)


@pytest.fixture
def backend(tmp_path: Path) -> Backend:
    return posix(tmp_path)


def write(root: Path, backend: Backend, at: float, *sections: tuple[Any, ...]) -> Path:
    """Write one file of marks, as if at some time."""
    folder = root / MARKS
    before = set(folder.iterdir()) if folder.exists() else set()
    marks.write(backend, [marks.Batch(*section) for section in sections])
    (path,) = set(folder.iterdir()) - before
    os.utime(path, (at, at))
    return path


def test_the_last_use_of_a_chunk_counts(tmp_path: Path, backend: Backend) -> None:
    write(tmp_path, backend, NOW - HOUR, (FOLDER, 0.0, packed(1, 2)), (OTHER, 5.0, packed(1)))
    write(tmp_path, backend, NOW, (FOLDER, 60.0, packed(2, 3)))
    found = Marks.read(backend)
    assert len(found) == 4
    assert used(found, FOLDER, 3, 1, 4, 2) == [NOW - 60, NOW - HOUR, 0.0, NOW - 60]
    assert used(found, OTHER, 1, 2) == [NOW - HOUR - 5, 0.0]


def test_each_kind_of_a_chunk_is_marked_by_itself(tmp_path: Path, backend: Backend) -> None:
    write(tmp_path, backend, NOW, (FOLDER, 9.0, packed(1, 2)), (FOLDER, 5.0, packed(2), "window"))
    write(tmp_path, backend, NOW, (FOLDER, 1.0, packed(3), "state"))
    found = Marks.read(backend)
    keys = np.frombuffer(b"".join(map(key, (1, 2, 3))), np.uint8).reshape(-1, 32)
    assert found.used(FOLDER, keys, "full").tolist() == [NOW - 9, NOW - 9, 0]
    assert found.used(FOLDER, keys, "window").tolist() == [0, NOW - 5, 0]
    assert found.used(FOLDER, keys, "state").tolist() == [0, 0, NOW - 1]
    assert found.used(FOLDER, keys).tolist() == [NOW - 9, NOW - 5, NOW - 1]


def test_folders_of_one_namespace_have_their_marks_in_common(
    tmp_path: Path, backend: Backend
) -> None:
    write(tmp_path, backend, NOW, (FOLDER, 0.0, packed(1)))
    assert used(Marks.read(backend), "renamed-0123456789abcdef", 1) == [NOW]


def test_a_shelf_without_marks_marks_nothing(backend: Backend) -> None:
    found = Marks.read(backend)
    assert used(found, FOLDER, 1) == [0.0]
    assert found.used(FOLDER, np.empty((0, 32), np.uint8)).shape == (0,)
    assert Marks.compact(backend) == 0


def one_section(age: str, keys: int) -> bytes:
    section = f'{{"namespace": "{FOLDER}", "kind": "full", "age": {age}, "keys": {keys}}}'
    return f'{{"version": 1, "sections": [{section}]}}\n'.encode() + bytes(16)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json\n",
        b'{"version": 1}\n',
        b'{"version": 2, "sections": []}\n',
        one_section("0", 1).replace(FOLDER.encode(), b"x"),
        one_section("0", 1).replace(b"full", b"other"),
        one_section('"x"', 1),
        one_section("-1", 1),
        one_section("NaN", 1),
        one_section("0", 9),
        one_section("0", -1),
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_file_of_marks_marks_nothing(
    tmp_path: Path, backend: Backend, content: bytes
) -> None:
    path = write(tmp_path, backend, NOW, (FOLDER, 0.0, packed(1)))
    path.with_name("472222-0123456789abcdef").write_bytes(content)
    path.with_name("something else").write_bytes(b"x")
    assert used(Marks.read(backend), FOLDER, 1) == [NOW]


def test_a_storage_that_fails_does_not_say_that_nothing_is_marked(backend: Backend) -> None:
    marks.write(backend, [marks.Batch(FOLDER, 0.0, packed(1))])
    faulty = FaultyStorage(backend, Fault("open", error=TransientStorageError(5, "down", "x")))
    with pytest.raises(TransientStorageError):
        Marks.read(faulty)


def test_a_file_that_another_process_has_merged_meanwhile_is_read_in_its_new_place(
    tmp_path: Path, backend: Backend
) -> None:
    first = write(tmp_path, backend, NOW, (FOLDER, 0.0, packed(1)))

    def merge() -> None:
        write(tmp_path, backend, NOW + 5, (FOLDER, 5.0, packed(1)))
        first.unlink()

    merging = FaultyStorage(backend, Fault("open", error=merge, times=1))
    assert used(Marks.read(merging), FOLDER, 1) == [NOW]


def test_many_files_become_one_that_says_the_same(tmp_path: Path, backend: Backend) -> None:
    now = time.time()
    for number in range(marks._MANY_FILES + 10):
        age = 10 * HOUR + number
        write(tmp_path, backend, now - age, (FOLDER, 0.0, packed(number, 1000)))
    write(tmp_path, backend, now - HOUR, (OTHER, 0.0, packed(7)))
    before = Marks.read(backend)
    removed = Marks.compact(backend, resolution=60.0)
    assert removed == marks._MANY_FILES + 11
    assert len(list((tmp_path / MARKS).iterdir())) == 1
    after = Marks.read(backend)
    assert len(after) == len(before)
    for number in (0, 5, marks._MANY_FILES, 1000):
        (old,), (new,) = used(before, FOLDER, number), used(after, FOLDER, number)
        assert old - 5 <= new <= old + 65
    assert used(after, OTHER, 7) == pytest.approx(used(before, OTHER, 7), abs=5)
    assert Marks.compact(backend) == 0


def test_marks_go_at_the_age_at_which_chunks_go(tmp_path: Path, backend: Backend) -> None:
    now = time.time()
    old = write(tmp_path, backend, now - 3 * HOUR, (FOLDER, 0.0, packed(1)))
    broken = old.with_name("472222-0123456789abcdef")
    broken.write_bytes(b"no marks")
    os.utime(broken, (now - 3 * HOUR, now - 3 * HOUR))
    young = write(tmp_path, backend, now - HOUR, (FOLDER, 0.0, packed(2)))
    assert Marks.compact(backend) == 0
    assert Marks.compact(backend, max_age=2 * HOUR) == 2
    assert [path for path in (old, broken, young) if path.exists()] == [young]
    os.utime(young, (now - 31 * 24 * HOUR,) * 2)
    assert Marks.compact(backend) == 1


@pytest.mark.parametrize(("ahead", "max_age"), [(HOUR / 2, 1.25 * HOUR), (40 * 24 * HOUR, None)])
def test_a_clock_that_is_ahead_deletes_no_marks(
    tmp_path: Path, ahead: float, max_age: float | None
) -> None:
    later = LaterBackend(posix(tmp_path), 0.0)
    later.alone = True
    later.ahead = ahead
    mark = write(tmp_path, later, time.time() - HOUR, (FOLDER, 0.0, packed(1)))
    assert Marks.compact(later, max_age=max_age) == 0
    assert mark.exists()


def test_marks_that_could_not_be_merged_stay(tmp_path: Path, backend: Backend) -> None:
    now = time.time()
    for number in range(marks._MANY_FILES):
        write(tmp_path, backend, now, (FOLDER, 0.0, packed(number)))
    faulty = FaultyStorage(backend, Fault("write", error=TransientStorageError(5, "down", "x")))
    with pytest.raises(TransientStorageError):
        Marks.compact(faulty)
    assert len(Marks.read(backend)) == marks._MANY_FILES


def test_more_keys_than_a_file_has_become_several(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "_FILE_KEYS", 4)
    batches = [(FOLDER, 0.0, packed(*range(10))), (OTHER, 0.0, packed(1, 2))]
    marks.write(backend, [marks.Batch(*batch) for batch in batches])
    assert len(list((tmp_path / MARKS).iterdir())) == 3
    found = Marks.read(backend)
    assert len(found) == 12 and all(used(found, FOLDER, *range(10)))


@given(
    st.lists(
        st.tuples(st.sampled_from([FOLDER, OTHER]), st.integers(0, 20), st.integers(0, 9)),
        max_size=60,
    )
)
def test_marks_are_a_table_of_last_uses(uses: list[tuple[str, int, int]]) -> None:
    sections = [
        marks._Section(folder, np.frombuffer(packed(number), np.uint8).reshape(1, 16), float(time))
        for folder, number, time in uses
    ]
    found = Marks(sections)
    for folder in (FOLDER, OTHER):
        for number in range(21):
            times = [time for where, what, time in uses if (where, what) == (folder, number)]
            assert used(found, folder, number) == [float(max(times, default=0))]
