"""What hand-overs, killed writers and bad objects leave goes by age, and nothing else does."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvshelf.capacity import walk as module
from kvshelf.capacity.sweeper import Sweeper
from kvshelf.capacity.walk import Walk
from kvshelf.config import CapacityConfig
from kvshelf.errors import (
    NoSpaceStorageError,
    PermanentStorageError,
    ReadOnlyStorageError,
    TransientStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.metrics import Counters
from kvshelf.shelf.markers import marker_name
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import NamespaceView, ObjectRef
from tests.capacity.shelves import DAY, Place, tail_of
from tests.sim.storage import Fault, FaultyStorage
from tests.support.clocks import Clock
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.threads import named
from tests.support.waiting import until

FMT = make_format(native=False)
OTHER = make_format(native=False, weights="user:other")
FOLDER = FMT.namespace.folder
KEEP = 1000.0
ONE, TWO = "1" * 32, "2" * 32
HEX = "0123456789abcdef"


class Walked(Place):
    """A shelf with a whole chunk and a tail, through which a test walks in its own time."""

    def __init__(self, root: Path, clock: Clock) -> None:
        super().__init__(root)
        self.clock = clock
        self.view: NamespaceView = self.shelf.view(FMT)
        self.counters = Counters()
        self.put(FMT, make_chunks(FMT, 1), age=5 * DAY)

    def walk(self, keep: float | None = KEEP, *, walks: bool = True, tails: bool = True) -> Walk:
        walk = Walk(self.backend, self.counters, keep=keep, walks=walks)
        if tails:
            walk.begin(self.view)
        return walk

    def go(self, walk: Walk, seconds: float = 2 * KEEP) -> None:
        """Make steps for so long; two ages are two walks: what is newest may come last in one."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += walk.step() + 1e-6

    def tail(self, seed: int = 0, age: float = 2 * KEEP, group: str = "_") -> list[Path]:
        return [self.path(name) for name in self.put(FMT, [tail_of(seed, group=group)], age)]

    def mark(self, attempt: str, age: float = 2 * KEEP) -> Path:
        self.view.give_up(attempt)
        path = self.path(f"{FOLDER}/{marker_name(attempt)}")
        self.age(path, age)
        return path

    def temporary(self, fmt: object = FMT, seed: int = 9) -> Path:
        """Leave what a writer left that was killed long ago."""
        of = FMT if fmt is FMT else OTHER
        name = self.name(of, make_chunks(of, 1, seed)[0])
        folder, _, base = name.rpartition("/")
        return self.write(f"{folder}/.{base}.{HEX}.tmp", b"begun", 2 * DAY)

    def wrote(self, walk: Walk, chunk: Chunk) -> None:
        for shard in range(FMT.shards):
            walk.wrote(self.view, ObjectRef(chunk, shard))

    @property
    def deleted(self) -> float:
        return self.counters.snapshot().get("leftovers_deleted", 0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Walked]:
    clock = Clock(1000.0)
    monkeypatch.setattr(module, "time", clock)
    place = Walked(tmp_path / "shelf", clock)
    yield place
    place.shelf.close()


# ------------------------------------------------------------------------------- what others left


def test_a_walk_deletes_what_is_old_and_nothing_else(place: Walked) -> None:
    old = [*place.tail(), *place.tail(1, group="0" * 16), place.mark(ONE)]
    temporaries = [
        place.temporary(),
        place.write(f"{FOLDER}/.namespace.json.{HEX}.tmp", age=2 * DAY),
        place.write(f"{FOLDER}/.kvshelf/gave-up/.{TWO}.{HEX}.tmp", age=2 * DAY),
        place.write(f".kvshelf/pins/.mine.json.{HEX}.tmp", age=2 * DAY),
    ]
    kept = [*place.tail(2, KEEP / 2), place.mark(TWO, KEEP / 2)]
    kept += [place.path(name) for name in place.put(FMT, make_chunks(FMT, 3, 5), 9 * DAY)]
    for name in (
        "namespace.json",
        ".kvshelf/gave-up/notes",
        ".kvshelf/gave-up/" + "F" * 32,
        "_/00/foreign",
        "_/00/" + "1" * 32,
        f"_/00/.notes.{HEX}.tmp",
        f"_/.{'0' * 64}-0-0of1.safetensors.{HEX}.tmp",
        f"data/00/.namespace.json.{HEX}.tmp",
    ):
        kept.append(place.write(f"{FOLDER}/{name}", b"", 9 * DAY))
    kept.append(place.write(f"{FOLDER}/{marker_name('3' * 32)}", b"content", 9 * DAY))
    state = random.getstate()
    place.go(place.walk())
    assert not [path for path in (*old, *temporaries) if path.exists()]
    assert all(path.exists() for path in kept)
    assert place.deleted == len(old)
    assert random.getstate() == state


def test_what_was_set_aside_goes_after_an_hour_whatever_it_is(place: Walked) -> None:
    names = [name for chunk in make_chunks(FMT, 5, 5) for name in place.put(FMT, [chunk])[:1]]
    link, fifo, empty, full, file = paths = [place.path(name) for name in names]
    for path in paths[:-1]:
        path.unlink()
    link.symlink_to(place.root)
    os.mkfifo(fifo)
    empty.mkdir()
    (full / "inside").mkdir(parents=True)
    place.age(file, 9 * DAY)
    for name in names:
        assert place.backend.set_aside(name)

    def left() -> list[Path]:
        return [found for path in paths for found in path.parent.glob(f".{path.name}.*.tmp")]

    place.later.ahead = 30 * 60.0
    place.go(place.walk(None, tails=False), 7200)
    assert len(left()) == 5
    place.later.ahead = 61 * 60.0
    place.put(FMT, make_chunks(FMT, 1, 1))
    place.go(place.walk(None, tails=False), 7200)
    (stays,) = left()
    assert (stays / "inside").exists()


def test_tails_of_other_namespaces_stay(place: Walked) -> None:
    theirs = [place.path(name) for name in place.put(OTHER, [tail_of(1, OTHER)], 9 * DAY)]
    temporary = place.temporary(OTHER)
    place.go(place.walk(), 2 * 7200)
    assert all(path.exists() for path in theirs)
    assert not temporary.exists(), "this process has written there"


def test_only_namespaces_that_it_writes_to_are_walked_through(place: Walked) -> None:
    temporary = place.temporary()
    with Shelf(place.faults) as fresh:
        place.faults.counts.clear()
        walk = Walk(fresh.backend, Counters())
        place.go(walk, 7200)
        assert not place.faults.counts, "nothing is listed without a write"
        fresh.view(OTHER).describe()
        place.go(walk, 7200)
        assert temporary.exists()
        chunk = make_chunks(FMT, 1)[0]
        fresh.view(FMT).publish(ObjectRef(chunk, 0), sealed(FMT, chunk))
        place.go(walk, 2 * 7200)
        assert not temporary.exists()
        place.faults.counts.clear()
        place.go(walk, 2 * 7200)
        assert not place.faults.counts, "it has written nothing since"


def test_a_walk_looks_into_one_folder_at_a_time_and_rests(place: Walked) -> None:
    for seed in range(20):
        place.tail(seed)
    folders = len(list(place.path(f"{FOLDER}/_").iterdir())) + 3
    walk = place.walk()
    place.clock.now += walk.step() + 1e-6
    place.faults.counts.clear()
    while place.faults.counts["entries"] < folders:
        before = place.faults.counts["entries"]
        place.clock.now += walk.step() + 1e-6
        assert place.faults.counts["entries"] <= before + 1
    assert place.deleted == 20 * FMT.shards
    # The next walk begins at an age after the first began.
    place.clock.now += walk.step() + 1e-6
    assert KEEP / 2 < walk.step() <= KEEP
    assert place.faults.counts["entries"] == folders


@pytest.mark.parametrize(("keep", "pause"), [(1000.0, 1000 / 256), (1.0, 1.0), (1e6, 3600 / 256)])
def test_the_pace_is_that_of_one_walk_in_the_age(place: Walked, keep: float, pause: float) -> None:
    walk = place.walk(keep)
    place.clock.now += walk.step() + 1e-6
    assert 0.5 * pause <= walk.step() <= 1.5 * pause


@pytest.mark.parametrize("ahead", [KEEP, -KEEP, 10 * KEEP, -10 * KEEP])
def test_a_clock_that_is_wrong_deletes_nothing_early(place: Walked, ahead: float) -> None:
    """Nor anything at all while it is wrong by more than an hour."""
    young, old = place.tail(0, KEEP / 2), place.mark(ONE, 4 * KEEP)
    place.later.alone = True
    place.later.ahead += ahead
    place.go(place.walk())
    assert all(path.exists() for path in young)
    assert old.exists() == (abs(ahead) > 3600)


def test_others_leftovers_stay_on_a_storage_without_a_clock(
    place: Walked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.later, "now", lambda: None)
    monkeypatch.setattr("kvshelf.capacity.inventory.time_of", lambda _: place.now)
    old = place.mark(ONE, 4 * KEEP)
    place.go(place.walk())
    assert old.exists()


def test_where_nobody_leaves_temporaries_only_tails_are_looked_for(place: Walked) -> None:
    old = [place.mark(ONE), *place.tail()]
    temporary = place.write(f"{FOLDER}/.namespace.json.{HEX}.tmp", age=2 * DAY)
    storage = FaultyStorage(place.faults, temporaries=False)
    with Shelf(storage) as shelf:
        place.view, place.backend = shelf.view(FMT), shelf.backend
        place.faults.counts.clear()
        place.go(place.walk(tails=False))
        assert not place.faults.counts
        walk = place.walk()
        place.go(walk)
        assert walk.free_space() == 0
    assert not any(path.exists() for path in old)
    assert temporary.exists()


# ------------------------------------------------------------------------------- what is said


# ------------------------------------------------------------------------------- its own


def test_what_it_wrote_itself_goes_at_its_age_without_a_walk(place: Walked) -> None:
    one, two = (place.tail(seed, age=0.0) for seed in (0, 1))
    marker = place.mark(ONE, age=0.0)
    walk = place.walk(walks=False)
    for seed in (0, 1):
        place.wrote(walk, tail_of(seed))
    walk.wrote(place.view, ONE)
    assert walk.step() == pytest.approx(KEEP)
    assert place.deleted == 0
    place.clock.now += KEEP + 1
    place.later.ahead += KEEP + 1
    # Stored, loaded, or found again: it is of use still.
    place.wrote(walk, tail_of(1))
    assert walk.step() == pytest.approx(KEEP)
    assert not any(path.exists() for path in (*one, marker))
    assert all(path.exists() for path in two)
    assert place.deleted == FMT.shards + 1
    place.clock.now += KEEP + 1
    place.later.ahead += KEEP + 1
    assert walk.step() > KEEP, "nothing is left"
    assert not any(path.exists() for path in two)


def test_it_keeps_its_own_tail_as_long_as_others_use_it(place: Walked) -> None:
    used, unused = place.tail(0, KEEP + 1), place.tail(1, KEEP + 1)
    walk = place.walk(walks=False)
    for seed in (0, 1):
        place.wrote(walk, tail_of(seed))
    for path in used:
        place.age(path, KEEP + 1, used=KEEP / 4)
    place.clock.now += KEEP + 1
    assert walk.step() == pytest.approx(3 * KEEP / 4, rel=0.01), "its age after the last use"
    assert all(path.exists() for path in used)
    assert not any(path.exists() for path in unused)
    place.clock.now += KEEP
    place.later.ahead += KEEP
    walk.step()
    assert not any(path.exists() for path in used)


def test_the_account_of_its_own_is_bounded(place: Walked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_OWN", 10)
    walk = place.walk(walks=False)
    for number in range(20):
        walk.wrote(place.view, f"{number:032x}")
    place.faults.counts.clear()
    place.clock.now += KEEP + 1
    walk.step()
    assert place.faults.counts["info"] == 10


def test_without_an_age_tails_stay(place: Walked) -> None:
    kept = [*place.tail(), place.mark(ONE)]
    walk = place.walk(None)
    place.wrote(walk, tail_of())
    place.go(walk, 7200)
    assert all(path.exists() for path in kept)


def test_a_thread_of_the_process_walks(tmp_path: Path) -> None:
    place = Walked(tmp_path / "shelf", Clock())
    paths = place.tail()
    before = named("kvshelf-capacity")
    walk = Walk(place.backend, place.counters, keep=0.5, walks=False)
    sweeper = Sweeper(place.shelf, CapacityConfig(), Counters(), walk=walk)
    sweeper.start()
    (thread,) = named("kvshelf-capacity") - before
    place.wrote(walk, tail_of())
    until(lambda: not any(path.exists() for path in paths))
    sweeper.close()
    until(lambda: not thread.is_alive())


# ------------------------------------------------------------------------------- a full storage


@pytest.fixture
def full(place: Walked) -> Callable[[], None]:
    """Store something, for which there is no space."""
    error = NoSpaceStorageError(errno.ENOSPC, "ENOSPC")
    place.shelf.view(OTHER).describe()
    chunk = make_chunks(FMT, 1, 3)[0]

    def store() -> None:
        place.faults.add(Fault("write", error=error))
        with pytest.raises(NoSpaceStorageError):
            place.view.publish(ObjectRef(chunk, 0), sealed(FMT, chunk))
        place.faults.heal()
        place.backend.writes.close()

    return store


def test_a_write_that_finds_no_space_frees_some_everywhere(
    place: Walked, full: Callable[[], None]
) -> None:
    nothing = [place.temporary(seed=seed) for seed in range(3)] + [place.temporary(OTHER)]
    nothing.append(place.write(f".kvshelf/.sweep.{HEX}.tmp", age=2 * DAY))
    newer = "newer-" + "0" * 16
    place.write(f"{newer}/namespace.json", b'{"format": "kvshelf/2"}')
    kept = [
        place.write(f"{newer}/.namespace.json.{HEX}.tmp"),
        place.write(f"{FOLDER}/_/ab/.notes.{HEX}.tmp"),
        *place.tail(),
    ]
    woken: list[None] = []
    walk = place.walk(tails=False)
    walk.wake = lambda: woken.append(None)
    full()
    assert woken
    walk.step()
    assert not [path for path in nothing if path.exists()]
    assert all(path.exists() for path in kept)
    # Others need not find it full as well.
    again = place.temporary()
    full()
    assert 0 < walk.step() <= 600
    assert again.exists()
    place.clock.now += 601
    assert walk.free_space() == 1


def test_temporaries_that_may_be_in_use_stay(place: Walked) -> None:
    place.later.ahead = 0.0
    young = place.temporary()
    walk = place.walk()
    # It has just been written here, whatever its modification time says.
    assert walk.free_space() == 0
    assert young.exists()


def test_what_takes_too_long_goes_on_where_it_ended(
    place: Walked, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [place.temporary(seed=seed) for seed in range(6)]
    walk = place.walk(tails=False)

    def tick() -> float:
        place.clock.now += 0.5
        return place.clock.now

    monkeypatch.setattr(place.clock, "monotonic", tick)
    deleted = []
    while any(path.exists() for path in left):
        deleted.append(walk.free_space())
        place.clock.now += 61
        assert len(deleted) < 40
    assert sum(deleted) == len(left) > max(deleted)


def test_trouble_while_space_is_freed_is_tried_again(place: Walked) -> None:
    left = place.temporary()
    place.faults.add(Fault("folders", error=TransientStorageError(errno.EIO, "EIO")))
    walk = place.walk()
    assert walk.free_space() == 0
    place.faults.heal()
    place.clock.now += 61
    assert walk.free_space() == 1
    assert not left.exists()


# ------------------------------------------------------------------------------- trouble


REFUSED = ReadOnlyStorageError(errno.EACCES, "deleting failed: EACCES", "x")


def test_where_others_leftovers_may_not_be_deleted_its_own_are(
    place: Walked, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = place.tail(0), place.tail(1)
    place.faults.add(Fault("delete", f"*{tail_of(1).key.hex()}*", error=REFUSED))
    walk = place.walk()
    place.go(walk)
    paths = place.tail(0)
    place.wrote(walk, tail_of(0))
    place.go(walk)
    assert all(path.exists() for path in theirs)
    assert not any(path.exists() for path in (*mine, *paths))
    assert caplog.text.count("are not deleted, here and later") == 1
    assert place.backend.writes.is_closed, "stores go on"


def test_where_nothing_may_be_deleted_it_stops(
    place: Walked, caplog: pytest.LogCaptureFixture
) -> None:
    path = place.mark(ONE)
    place.faults.add(Fault("delete", error=REFUSED))
    walk = place.walk(walks=False)
    walk.wrote(place.view, ONE)
    place.go(walk)
    walk.wrote(place.view, ONE)
    place.go(walk)
    assert path.exists()
    assert place.faults.counts["delete"] == 1
    assert caplog.text.count("are not deleted, here and later") == 1


def test_a_storage_that_is_down_is_asked_again_later(
    place: Walked, caplog: pytest.LogCaptureFixture
) -> None:
    path = place.mark(ONE)
    walk = place.walk(walks=False)
    walk.wrote(place.view, ONE)
    place.clock.now += KEEP + 1
    place.faults.add(Fault("delete", error=TransientStorageError(5, "down", "x")))
    assert 10.0 < walk.step() < 100.0
    place.faults.heal()
    walk.step()
    assert not path.exists()
    assert not caplog.text
    assert place.backend.reads.is_closed


def test_while_the_storage_fails_it_is_left_alone(place: Walked) -> None:
    walk = place.walk()
    walk.wrote(place.view, ONE)
    place.backend.reads.trip("down")
    place.faults.counts.clear()
    place.go(walk)
    assert not place.faults.counts


def test_a_listing_that_is_forbidden_ends_the_walks_alone(place: Walked) -> None:
    path = place.mark(ONE)
    place.faults.add(Fault("entries", error=PermanentStorageError(13, "no", "x")))
    walk = place.walk()
    place.go(walk)
    assert place.faults.counts["entries"] <= 6
    walk.wrote(place.view, ONE)
    place.clock.now += KEEP + 1
    walk.step()
    assert not path.exists()


def test_something_else_in_the_place_is_left(place: Walked) -> None:
    path = place.mark(ONE)
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"")
    walk = place.walk(walks=False)
    walk.wrote(place.view, ONE)
    place.clock.now += KEEP + 1
    assert walk.step() > KEEP, "it is forgotten"
    assert path.is_dir()


def test_a_mistake_of_its_own_ends_it(
    place: Walked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> str:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(NamespaceView, "folder", broken)
    walk = place.walk()
    place.go(walk, 10 * KEEP)
    assert caplog.text.count("not deleted any more") == 1
