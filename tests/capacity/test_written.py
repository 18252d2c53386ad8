"""What writers tell each other of what they wrote, where the storage does not tell it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshelf.capacity import written as written_module
from kvshelf.capacity.written import WRITTEN, Written
from kvshelf.errors import PermanentStorageError, TransientStorageError
from tests.sim.storage import Fault, FaultyStorage, posix

DAY = 86400.0


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[FaultyStorage]:
    opened = FaultyStorage(posix(tmp_path / "shelf"))
    yield opened
    opened.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(written_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def now(backend: FaultyStorage) -> float:
    found = backend.inner.now()
    assert found is not None
    return found


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "shelf" / WRITTEN).glob("*"))


def exchange(backend: FaultyStorage, one: Written, own: int) -> None:
    one.exchange(own, math.inf, now(backend), at_once=True)


def test_all_know_what_all_wrote(backend: FaultyStorage, tmp_path: Path) -> None:
    one, other = Written(backend), Written(backend)
    assert not one.is_used
    exchange(backend, one, 100)
    exchange(backend, other, 30)
    exchange(backend, one, 250)
    exchange(backend, other, 30)
    assert one.total(260) == 290
    assert other.total(30) == 280
    assert len(files(tmp_path)) == 2, "the older numbers are gone"
    assert Written(backend).total(5) == 5


def test_who_wrote_nothing_says_that_it_is_there(backend: FaultyStorage, tmp_path: Path) -> None:
    one = Written(backend)
    for _ in range(2):
        exchange(backend, one, 0)
    assert [name[16:] for name in files(tmp_path)] == ["-0"]
    assert backend.counts["write"] <= 1


def test_numbers_are_exchanged_once_a_minute_or_sooner_if_space_is_short(
    backend: FaultyStorage, clock: SimpleNamespace
) -> None:
    one = Written(backend)
    for second in range(300):
        clock.now = 1000.0 + second
        one.exchange(second, 1e9, now(backend))
    assert backend.counts["entries"] == 5
    for second in range(300, 600):
        clock.now = 1000.0 + second
        one.exchange(second, 80.0, now(backend))
    # After ten bytes: an eighth of what is left.
    assert 20 <= backend.counts["entries"] - 5 <= 30


def test_of_many_writers_each_tells_sooner(backend: FaultyStorage, clock: SimpleNamespace) -> None:
    for _ in range(9):
        exchange(backend, Written(backend), 1)
    one = Written(backend)
    exchange(backend, one, 0)
    clock.now += 2.0
    one.exchange(2, 200.0, now(backend))
    assert one._published == 0
    one.exchange(3, 200.0, now(backend))
    assert one._published == 3


@pytest.mark.parametrize(
    "name", ["x", "0123456789abcdef", f"{'a' * 16}--5", f"{'a' * 16}-{'9' * 19}"]
)
def test_a_number_that_makes_no_sense_is_left_out(backend: FaultyStorage, name: str) -> None:
    backend.write(f"{WRITTEN}/{name}", [b"x"])
    backend.write(f"{WRITTEN}/sub/{'b' * 16}-7", [b"x"])
    one = Written(backend)
    exchange(backend, one, 5)
    assert one.total(5) == 5


def test_files_of_writers_that_ended_are_removed_after_a_day(
    backend: FaultyStorage, tmp_path: Path
) -> None:
    one, other = Written(backend), Written(backend)
    exchange(backend, other, 30)
    exchange(backend, one, 100)
    assert one.remove_old() == 0
    one.exchange(100, math.inf, now(backend) + DAY + 1, at_once=True)
    assert one.total(100) == 130
    assert one.remove_old() == 30
    assert one.total(100) == 100
    assert len(files(tmp_path)) == 1
    # It lives, and begins at nothing: what it wrote before was counted.
    exchange(backend, other, 35)
    exchange(backend, one, 100)
    assert one.total(100) == 105
    assert other.total(35) == 105


def test_a_file_that_somebody_removed_is_written_anew(
    backend: FaultyStorage, tmp_path: Path
) -> None:
    one = Written(backend)
    exchange(backend, one, 30)
    (name,) = files(tmp_path)
    backend.delete(f"{WRITTEN}/{name}")
    exchange(backend, one, 30)
    exchange(backend, one, 31)
    (again,) = files(tmp_path)
    assert again.endswith("-1")
    assert again[:16] != name[:16]


def test_who_may_not_delete_leaves_few_files(backend: FaultyStorage, tmp_path: Path) -> None:
    backend.add(Fault("delete", error=PermanentStorageError(13, "EACCES")))
    one = Written(backend)
    for own in range(1, 9):
        exchange(backend, one, own)
    assert len(files(tmp_path)) == 2
    other = Written(backend)
    exchange(backend, other, 0)
    assert other.total(0) == 2


def test_trouble_of_the_storage_is_the_callers_but_for_telling(
    backend: FaultyStorage, tmp_path: Path
) -> None:
    one = Written(backend)
    backend.write(f"{WRITTEN}/{'a' * 16}-9", [b""])
    fault = backend.add(Fault("*", error=TransientStorageError(5, "EIO")))
    one.publish(7)
    with pytest.raises(TransientStorageError):
        one.exchange(7, math.inf, 0.0, at_once=True)
    fault.times = 0
    exchange(backend, one, 7)
    assert {name[-2:] for name in files(tmp_path)} == {"-7", "-9"}


def test_a_file_that_is_replaced_during_a_listing_is_not_forgotten(
    backend: FaultyStorage, tmp_path: Path
) -> None:
    one, other = Written(backend), Written(backend)
    exchange(backend, other, 30)
    exchange(backend, one, 5)
    (path,) = (tmp_path / "shelf" / WRITTEN).glob("*-30")
    path.unlink()
    exchange(backend, one, 5)
    assert one.total(5) == 35
    exchange(backend, one, 5)
    assert one.total(5) == 5, "it is gone for good"
