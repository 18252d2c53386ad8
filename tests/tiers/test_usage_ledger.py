"""Directories that stay below a bound, and their ledger."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshelf.backends import ObjectInfo, WriteMode, WriteResult, base
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import StorageError
from kvshelf.tiers import usage_ledger as ledger_module
from kvshelf.tiers.usage_ledger import LEDGER, BoundedBackend, FullError

SIZE = 1000


def name(number: int, index: int = 0) -> str:
    """Name of an object; those of one folder and namespace differ in their keys."""
    key = f"{number:02x}".ljust(64, "7")
    return f"m-{'5' * 16}/_/{key[:2]}/{key}-{index}-0of1.safetensors"


def open_bounded(root: Path, max_bytes: int = 10 * SIZE) -> BoundedBackend:
    return BoundedBackend(PosixBackend(root), max_bytes)


def put(backend: BoundedBackend, number: int, size: int = SIZE, index: int = 0) -> WriteResult:
    """Write an object, making room for it if there is none."""
    try:
        return backend.write(name(number, index), [bytes(size)])
    except FullError:
        backend.evict(size, backend)
        return backend.write(name(number, index), [bytes(size)])


def there(root: Path) -> set[int]:
    """Numbers of the objects that are there."""
    return {int(path.name[:2], 16) for path in root.rglob("*.safetensors")}


def age(root: Path, number: int, seconds: float, index: int = 0) -> None:
    """Let an object have been used so long ago."""
    then = time.time() - seconds
    os.utime(root / name(number, index), (then, then))


def used(backend: BoundedBackend) -> int:
    use = backend.ledger.read()
    assert use is not None
    return use.used


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    for number in range(10):
        assert put(backend, number) is WriteResult.CREATED
        age(tmp_path, number, 1000 - 100 * number)
    assert used(backend) == 10 * SIZE
    # The oldest is used again, which makes it the newest.
    changed = (tmp_path / name(0)).stat().st_mtime_ns
    backend.touch(name(0))
    assert (tmp_path / name(0)).stat().st_mtime_ns == changed
    put(backend, 10)
    assert there(tmp_path) == {0, *range(2, 11)}
    assert used(backend) == 10 * SIZE


def test_what_was_never_used_again_goes_before_what_was(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    for number in range(10):
        put(backend, number)
        age(tmp_path, number, 1000 - 10 * number)
    stored = time.time() - 9000
    os.utime(tmp_path / name(0), (time.time() - 1000, stored))
    put(backend, 10)
    assert there(tmp_path) == {0, *range(2, 11)}


def test_tails_and_salt_groups_are_evicted_too(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    tail = name(0).replace("/_/", f"/{'ab' * 8}/").replace("-0-0of1", "-0t17-0of1")
    backend.evict(0, backend)
    backend.write(tail, [bytes(SIZE)])
    for number in range(1, 11):
        put(backend, number)
        if number == 1:
            then = time.time() - 1000
            os.utime(tmp_path / tail, (then, then))
    assert not (tmp_path / tail).exists()
    assert there(tmp_path) == set(range(1, 11))


def test_of_what_was_used_together_the_beginning_of_a_prompt_stays(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    for number in range(10):
        put(backend, number, index=number)
    put(backend, 10, index=3)
    assert there(tmp_path) == {*range(9), 10}


def test_room_is_made_for_what_needs_much(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    for number in range(10):
        put(backend, number)
        age(tmp_path, number, 1000 - 100 * number)
    put(backend, 10, 6 * SIZE)
    assert there(tmp_path) == {6, 7, 8, 9, 10}
    with pytest.raises(FullError):
        put(backend, 11, 11 * SIZE)


def test_a_bound_that_was_lowered_holds_from_the_next_object_on(tmp_path: Path) -> None:
    for number in range(10):
        put(open_bounded(tmp_path), number)
        age(tmp_path, number, 1000 - 100 * number)
    backend = open_bounded(tmp_path, 3 * SIZE)
    put(backend, 10)
    assert there(tmp_path) == {8, 9, 10}


def test_other_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    others = [tmp_path / "notes.txt", (tmp_path / name(1)).parent / "x.safetensors"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(50 * SIZE))
    backend = open_bounded(tmp_path)
    for number in range(20):
        put(backend, number)
    assert all(path.exists() for path in others)
    assert 8 <= len(list(tmp_path.rglob("*-0of1.safetensors"))) <= 10


def test_nothing_is_listed_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(open_bounded(tmp_path), 0)

    def forbidden(*_: object) -> Iterator[ObjectInfo]:
        raise AssertionError("the directory was listed")

    monkeypatch.setattr(PosixBackend, "list", forbidden)
    backend = open_bounded(tmp_path)
    for number in range(1, 10):
        assert backend.write(name(number), [bytes(SIZE)]) is WriteResult.CREATED
    assert used(backend) == 10 * SIZE


def test_what_existed_failed_or_was_deleted_takes_no_room(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    put(backend, 0)
    put(backend, 1)
    assert backend.write(name(0), [bytes(SIZE)]) is WriteResult.EXISTED
    assert backend.write(name(0), [bytes(2 * SIZE)], "replace") is WriteResult.REPLACED
    assert used(backend) == 3 * SIZE
    assert backend.delete(name(1))
    assert not backend.delete(name(1))
    assert used(backend) == 2 * SIZE
    (tmp_path / name(2)).parent.parent.joinpath("aa").write_text("a file where a folder belongs")
    with pytest.raises(OSError, match="aa"):
        backend.write(name(0xAA), [bytes(SIZE)])
    assert used(backend) == 2 * SIZE


def test_each_knows_what_the_others_wrote(tmp_path: Path) -> None:
    one, other = open_bounded(tmp_path), open_bounded(tmp_path)
    put(one, 0)
    for number in range(1, 10):
        put(other, number)
    with pytest.raises(FullError):
        one.write(name(10), [bytes(SIZE)])


class _Meeting(WrappedBackend):
    """Two processes that have looked at the same before either removes anything."""

    def __init__(self, inner: BoundedBackend, barrier: threading.Barrier) -> None:
        super().__init__(inner)
        self._barrier = barrier
        self._met = False

    def info(self, name: str) -> ObjectInfo | None:
        if not self._met:
            self._met = True
            self._barrier.wait(20)
        return super().info(name)


def test_two_that_evict_at_once_remove_no_more_than_one(tmp_path: Path) -> None:
    for number in range(40):
        put(open_bounded(tmp_path, 40 * SIZE), number)
    barrier = threading.Barrier(2)
    results: list[tuple[int, int]] = []

    def evict() -> None:
        backend = open_bounded(tmp_path, 20 * SIZE)
        results.append(backend.evict(SIZE, _Meeting(backend, barrier)))

    threads = [threading.Thread(target=evict) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    left = len(there(tmp_path))
    assert sum(removed for removed, _ in results) == 40 - left
    assert sum(freed for _, freed in results) == SIZE * (40 - left)
    # Between a removal and its note in the ledger the other may take one more.
    assert 17 <= left <= 18
    assert used(open_bounded(tmp_path)) == left * SIZE


class _Frozen(WrappedBackend):
    """A process that stands still between its look and its first removal."""

    def __init__(self, inner: BoundedBackend, meanwhile: object) -> None:
        super().__init__(inner)
        self.meanwhile = meanwhile

    def info(self, name: str) -> ObjectInfo | None:
        if callable(self.meanwhile):
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return super().info(name)


def test_what_is_used_while_an_evictor_stands_still_stays(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    for number in range(10):
        put(backend, number)
        age(tmp_path, number, 1000 - 100 * number)
    frozen = _Frozen(backend, lambda: backend.touch(name(0)))
    backend.evict(SIZE, frozen)
    assert 0 in there(tmp_path)


def test_an_evictor_that_comes_too_late_removes_nothing(tmp_path: Path) -> None:
    backend, other = open_bounded(tmp_path), open_bounded(tmp_path)
    for number in range(10):
        put(backend, number)
        age(tmp_path, number, 1000 - 100 * number)
    frozen = _Frozen(backend, lambda: other.evict(5 * SIZE, other))
    backend.evict(SIZE, frozen)
    # The one that it had looked at is gone already; nothing else goes.
    assert there(tmp_path) == {5, 6, 7, 8, 9}


@pytest.mark.parametrize("damage", ["remove", "cut", "fill", "other"])
def test_a_ledger_that_makes_no_sense_is_made_anew(tmp_path: Path, damage: str) -> None:
    backend = open_bounded(tmp_path)
    for number in range(9):
        put(backend, number)
    ledger = tmp_path / LEDGER
    if damage == "remove":
        ledger.unlink()
    elif damage == "cut":
        ledger.write_bytes(ledger.read_bytes()[:-3])
    elif damage == "fill":
        ledger.write_bytes(b"\xff" * 80)
    else:
        ledger.write_bytes(b"text")
    for number in range(9, 30):
        put(open_bounded(tmp_path), number)
        assert len(there(tmp_path)) <= 10
    assert used(backend) == len(there(tmp_path)) * SIZE


def test_objects_of_all_kinds_are_counted_and_removed(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    backend.evict(SIZE, backend)  # counts what is there: nothing
    names = [name(0).replace("-0of1", f"{kind}-0of1") for kind in ("", "-window", "-state")]
    for number, each in enumerate(names):
        assert backend.write(each, [bytes(3 * SIZE)]) is WriteResult.CREATED
        then = time.time() - 1000 + 100 * number
        os.utime(tmp_path / each, (then, then))
    assert used(backend) == 9 * SIZE
    # A window was used last, so it is the state that goes with the oldest, the full object.
    backend.touch(names[1])
    put(backend, 1, 5 * SIZE)
    assert {path.name for path in tmp_path.rglob("*.safetensors")} == {
        Path(each).name for each in (names[1], name(1))
    }


def test_what_others_put_there_is_counted_within_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_bounded(tmp_path)
    put(backend, 0)
    for number in range(1, 20):
        PosixBackend(tmp_path).write(name(number), [bytes(SIZE)])
    assert backend.scanned_recently
    monkeypatch.setattr(ledger_module, "RESCAN_SECONDS", -1.0)
    assert not backend.scanned_recently
    backend.evict(SIZE, backend)
    assert len(there(tmp_path)) <= 10
    # What is counted and has room stays.
    put(backend, 20)
    left = there(tmp_path)
    assert backend.evict(0, backend) == (0, 0)
    assert there(tmp_path) == left


def test_what_killed_writers_left_goes_when_room_is_made(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    for number in range(10):
        put(backend, number)
    folder = (tmp_path / name(0)).parent
    left = folder / f".{Path(name(0)).name}.{'0' * 16}.tmp"
    fresh = folder / f".{Path(name(0)).name}.{'1' * 16}.tmp"
    for path in (left, fresh):
        path.write_bytes(bytes(SIZE))
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        # An hour later, in which only one of them was written to. The change time of a file
        # cannot be set.
        patch.setattr(PosixBackend, "now", lambda _: real() + 3600)
        patch.setattr(base, "time", SimpleNamespace(time=lambda: real() + 3600))
        os.utime(fresh, (real() + 3600, real() + 3600))
        put(backend, 10)
    assert not left.exists()
    assert fresh.exists()


@pytest.mark.parametrize("thing", ["link", "FIFO", "folder", "folder behind a link"])
def test_a_ledger_is_a_file_of_its_directory(tmp_path: Path, thing: str) -> None:
    backend = open_bounded(tmp_path / "tier")
    put(backend, 0)
    ledger, elsewhere = tmp_path / "tier" / LEDGER, tmp_path / "elsewhere"
    if thing == "folder behind a link":
        ledger.parent.rename(elsewhere)
        ledger.parent.symlink_to(elsewhere)
        foreign = elsewhere / "use"
    else:
        ledger.rename(elsewhere)
        foreign = elsewhere
        if thing == "link":
            ledger.symlink_to(elsewhere)
        elif thing == "FIFO":
            os.mkfifo(ledger)
        else:
            ledger.mkdir()
    before = foreign.read_bytes()
    with pytest.raises(StorageError):
        backend.ledger.read()
    with pytest.raises(StorageError):
        backend.ledger.add(SIZE)
    with pytest.raises(StorageError):
        put(backend, 1)
    assert foreign.read_bytes() == before
    assert there(tmp_path / "tier") == {0}


def test_what_was_noted_since_another_counted_is_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick, writer = (open_bounded(tmp_path) for _ in range(3))
    put(writer, 0)
    mark = slow.ledger.mark()
    going_on = slow.ledger._publish

    def outrun(counted: int, mode: WriteMode) -> None:
        # Between its last look at the old ledger and the new one.
        quick.ledger.restart(SIZE, quick.ledger.mark())
        put(writer, 1)
        going_on(counted, mode)

    monkeypatch.setattr(slow.ledger, "_publish", outrun)
    slow.ledger.restart(SIZE, mark)
    assert used(quick) == used(writer) == used(slow) == 2 * SIZE


def test_who_counts_at_once_with_another_leaves_its_ledger_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick, writer = (open_bounded(tmp_path) for _ in range(3))
    put(writer, 0)
    mark = slow.ledger.mark()
    opening = slow.ledger._open

    def outrun(flags: int) -> int | None:
        fd = opening(flags)
        monkeypatch.undo()
        quick.ledger.restart(SIZE, quick.ledger.mark())
        put(writer, 1)
        return fd

    monkeypatch.setattr(slow.ledger, "_open", outrun)
    slow.ledger.restart(SIZE, mark)
    assert used(quick) == used(writer) == used(slow) == 2 * SIZE


def test_a_ledger_that_another_process_locks_is_left_alone(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    put(backend, 0)
    with open(tmp_path / LEDGER, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        backend.ledger.restart(5 * SIZE, backend.ledger.mark())
        assert used(backend) == SIZE
        # Nobody who writes waits for it.
        put(backend, 1)
    backend.ledger.restart(5 * SIZE, backend.ledger.mark())
    assert used(backend) == 5 * SIZE
