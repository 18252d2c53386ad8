"""Directories that stay below a bound, and their ledger."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshelf.backends import Backend, ObjectInfo, WriteMode, WriteResult, base
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.capacity import deletion
from kvshelf.capacity.deletion import Outcome
from kvshelf.errors import BoundReachedError, StorageError
from kvshelf.format.names import DESCRIPTION
from kvshelf.shelf.pins import Pin, Pins
from kvshelf.tiers import ledger as ledger_module
from kvshelf.tiers.bounded import BoundedBackend
from kvshelf.tiers.ledger import LEDGER
from tests.sim.storage import Fault, FaultyStorage, LaterBackend

SIZE = 1000
#: Seconds that the directory's clock is ahead: nobody can set the time of a file's last change,
#: which counts as a use for a day.
AHEAD = 3 * 86400.0


def name(number: int, index: int = 0) -> str:
    """Name of an object; those of one folder and namespace differ in their keys."""
    key = f"{number:02x}".ljust(64, "7")
    return f"m-{'5' * 16}/_/{key[:2]}/{key}-{index}-0of1.safetensors"


def open_bounded(root: Path, max_bytes: int = 10 * SIZE) -> BoundedBackend:
    return BoundedBackend(PosixBackend(root), max_bytes)


def evict_for(backend: BoundedBackend, size: int, through: Backend | None = None) -> Outcome:
    return backend.evict(size, GuardedBackend(LaterBackend(through or backend, AHEAD)))


def put(backend: BoundedBackend, number: int, size: int = SIZE, used: float = 0.0) -> WriteResult:
    """Write an object, making room for it if there is none; say how long ago it was used."""
    return put_named(backend, name(number), size, used)


def put_named(backend: BoundedBackend, name: str, size: int, used: float = 0.0) -> WriteResult:
    try:
        result = backend.write(name, [bytes(size)])
    except BoundReachedError:
        assert evict_for(backend, size).error is None
        result = backend.write(name, [bytes(size)])
    age(Path(backend.url) / name, used)
    return result


def age(path: Path, seconds: float) -> None:
    then = time.time() + AHEAD - seconds
    os.utime(path, (then, then))


def fill(backend: BoundedBackend, count: int = 10) -> None:
    """Write objects, the first of them used longest ago."""
    for number in range(count):
        assert put(backend, number, used=1000 - 10 * number) is WriteResult.CREATED


def there(root: Path) -> set[int]:
    """Numbers of the objects that are there."""
    return {int(path.name[:2], 16) for path in root.rglob("*-0of1.safetensors")}


def used(backend: BoundedBackend) -> int:
    use = backend.ledger.read()
    assert use is not None
    return use.used


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    fill(backend)
    assert used(backend) == 10 * SIZE
    # The oldest is used again, which makes it the newest.
    age(tmp_path / name(0), 0)
    put(backend, 10)
    assert there(tmp_path) == {0, *range(2, 11)}
    assert used(backend) == 10 * SIZE


def test_chunks_of_all_kinds_and_tails_and_salt_groups_are_counted_and_removed(
    tmp_path: Path,
) -> None:
    backend = open_bounded(tmp_path)
    kinds = [name(0).replace("-0of1", f"{kind}-0of1") for kind in ("", "-window", "-state")]
    salted = name(1).replace("/_/", f"/{'ab' * 8}/")
    tail = name(2).replace("-0-0of1", "-0t17-0of1")
    for each in (*kinds, salted, tail):
        put_named(backend, each, SIZE, used=9000)
    for number in range(3, 8):
        put(backend, number)
    assert used(backend) == 10 * SIZE
    put(backend, 8, 5 * SIZE)
    assert there(tmp_path) == set(range(3, 9))
    assert used(backend) == 10 * SIZE


def test_pins_are_a_matter_of_the_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "_AGAIN_DELETIONS", 1)
    backend = open_bounded(tmp_path)
    fill(backend)
    Pins.add(backend, "all", Pin(namespace=name(0).partition("/")[0]))
    assert evict_for(backend, 5 * SIZE).count == 5
    assert there(tmp_path) == {5, 6, 7, 8, 9}


def test_room_is_made_for_what_needs_much(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    fill(backend)
    put(backend, 10, 6 * SIZE)
    assert there(tmp_path) == {6, 7, 8, 9, 10}
    with pytest.raises(BoundReachedError):
        put(backend, 11, 11 * SIZE)


def test_a_bound_that_was_lowered_holds_from_the_next_object_on(tmp_path: Path) -> None:
    fill(open_bounded(tmp_path))
    put(open_bounded(tmp_path, 3 * SIZE), 10)
    assert there(tmp_path) == {8, 9, 10}


def test_other_files_are_neither_counted_nor_removed_nor_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "tier", tmp_path / "elsewhere"
    folder, inner = (root / name(1)).parent, name(0).partition("/")[2]
    foreign = [root / "notes.txt", folder / "x.safetensors", elsewhere / inner]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(50 * SIZE))
    links = [root / f"m-{'6' * 16}", folder / Path(name(0xEE)).name, folder / Path(name(0xEF)).name]
    links[0].symlink_to(elsewhere)
    links[1].symlink_to(foreign[0])
    os.mkfifo(links[2])
    backend = open_bounded(root)
    for number in range(2, 22):
        put(backend, number)
    assert all(path.stat().st_size == 50 * SIZE for path in foreign)
    assert all(os.path.lexists(path) for path in links)
    assert 8 <= len(there(root) - {0xEE, 0xEF}) <= 10


def test_objects_of_other_versions_of_the_format_go_too(tmp_path: Path) -> None:
    fill(open_bounded(tmp_path))
    (tmp_path / name(0)).parents[2].joinpath(DESCRIPTION).write_text('{"format":"kvshelf/9"}')
    (tmp_path / LEDGER).unlink()
    backend = open_bounded(tmp_path)
    other = name(0).replace("5" * 16, "6" * 16)
    put_named(backend, other, SIZE)
    assert there(tmp_path) == {0, *range(1, 10)}
    assert used(backend) == 10 * SIZE


def test_nothing_is_listed_where_there_is_room_and_nothing_written_until_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object, **__: object) -> Iterator[ObjectInfo]:
        raise AssertionError("the directory was listed")

    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "list", forbidden)
        with pytest.raises(BoundReachedError):
            open_bounded(tmp_path).write(name(0), [bytes(SIZE)])
    put(open_bounded(tmp_path), 0)
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
    with pytest.raises(BoundReachedError):
        one.write(name(10), [bytes(SIZE)])


def stopped_in(backend: BoundedBackend, meanwhile: Callable[[], object]) -> FaultyStorage:
    """Stop a process between its look at an object and the removal of it."""

    def stop() -> None:
        meanwhile()

    return FaultyStorage(backend, Fault("info", error=stop, times=1))


def test_two_that_evict_at_once_remove_no_more_than_one(tmp_path: Path) -> None:
    fill(open_bounded(tmp_path, 40 * SIZE), 40)
    barrier = threading.Barrier(2)
    outcomes: list[Outcome] = []

    def evict() -> None:
        backend = open_bounded(tmp_path, 20 * SIZE)
        stopped = stopped_in(backend, lambda: barrier.wait(20))
        outcomes.append(evict_for(backend, SIZE, stopped))

    threads = [threading.Thread(target=evict) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    left = len(there(tmp_path))
    assert sum(outcome.count for outcome in outcomes) == 40 - left
    assert sum(outcome.nbytes for outcome in outcomes) == SIZE * (40 - left)
    # Between a removal and its note in the ledger the other may take one more.
    assert 17 <= left <= 18
    assert used(open_bounded(tmp_path)) == left * SIZE


def test_what_is_used_while_a_process_is_stopped_stays(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    fill(backend)
    evict_for(backend, SIZE, stopped_in(backend, lambda: age(tmp_path / name(0), 0)))
    assert there(tmp_path) == {0, *range(2, 10)}


def test_who_comes_too_late_removes_nothing(tmp_path: Path) -> None:
    backend, other = open_bounded(tmp_path), open_bounded(tmp_path)
    fill(backend)
    evict_for(backend, SIZE, stopped_in(backend, lambda: evict_for(other, 5 * SIZE)))
    # The one that it had looked at is gone already; nothing else goes.
    assert there(tmp_path) == {5, 6, 7, 8, 9}


@pytest.mark.parametrize("damage", ["remove", "cut", "fill", "other"])
def test_a_ledger_that_makes_no_sense_is_made_anew(tmp_path: Path, damage: str) -> None:
    backend = open_bounded(tmp_path)
    fill(backend, 9)
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


def test_what_others_put_there_is_counted_within_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_bounded(tmp_path)
    put(backend, 0)
    for number in range(1, 20):
        PosixBackend(tmp_path).write(name(number), [bytes(SIZE)])
    put(backend, 20)
    assert len(there(tmp_path)) == 21
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "RESCAN_SECONDS", -1.0)
        with pytest.raises(BoundReachedError):
            backend.write(name(21), [bytes(SIZE)])
        evict_for(backend, SIZE)
    left = there(tmp_path)
    assert 8 <= len(left) <= 9
    assert used(backend) == len(left) * SIZE
    # What is counted and has room stays.
    assert evict_for(backend, 0).count == 0
    assert there(tmp_path) == left


def test_what_killed_writers_left_goes_at_a_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_bounded(tmp_path)
    put(backend, 0)
    path = tmp_path / name(0)
    left, fresh = (path.parent / f".{path.name}.{digit * 16}.tmp" for digit in "01")
    for each in (left, fresh):
        each.write_bytes(bytes(50 * SIZE))
    # Five minutes later, in which only one of them was written to.
    later = time.time() + 301
    monkeypatch.setattr(base, "time", SimpleNamespace(time=lambda: later))
    os.utime(fresh, (later, later))
    monkeypatch.setattr(ledger_module, "RESCAN_SECONDS", -1.0)
    outcome = backend.evict(SIZE, GuardedBackend(LaterBackend(backend, 301)))
    assert outcome.count == 1
    assert not left.exists()
    assert fresh.exists()
    assert there(tmp_path) == {0}


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


@pytest.mark.parametrize("at", ["_open", "_publish"])
def test_who_counts_at_once_with_another_drops_nothing_from_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    slow, quick, writer = (open_bounded(tmp_path) for _ in range(3))
    put(writer, 0)
    before = slow.ledger.read()
    going_on = getattr(slow.ledger, at)

    def outrun(*args: int | WriteMode) -> int | None:
        monkeypatch.undo()
        # Just opened, but not locked yet; or locked, between the last look at the old and the new.
        opened: int | None = going_on(*args) if at == "_open" else None
        quick.ledger.restart(SIZE, quick.ledger.read())
        put(writer, 1)
        return opened if at == "_open" else going_on(*args)

    monkeypatch.setattr(slow.ledger, at, outrun)
    slow.ledger.restart(SIZE, before)
    assert used(quick) == used(writer) == used(slow) == 2 * SIZE


def test_a_ledger_that_another_process_locks_is_left_alone(tmp_path: Path) -> None:
    backend = open_bounded(tmp_path)
    put(backend, 0)
    with open(tmp_path / LEDGER, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        backend.ledger.restart(5 * SIZE, backend.ledger.read())
        assert used(backend) == SIZE
        # Nobody who writes waits for it.
        put(backend, 1)
    backend.ledger.restart(5 * SIZE, backend.ledger.read())
    assert used(backend) == 5 * SIZE
