"""What hand-overs leave is deleted by age: never what is young, never anything else."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvshelf.errors import PermanentStorageError, ReadOnlyStorageError, TransientStorageError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.metrics import Counters
from kvshelf.shelf import sweep as module
from kvshelf.shelf.markers import marker_name
from kvshelf.shelf.orphans import SlowSweep
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.sweep import Sweep
from kvshelf.shelf.view import NamespaceView, ObjectRef
from tests.support.clocks import Clock
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.storages import CountingBackend, Fault, FaultyBackend, posix
from tests.support.threads import named, none_can_be_started
from tests.support.waiting import until

FMT = make_format(native=False)
KEEP = 1000.0
ONE, TWO = "1" * 32, "2" * 32


def tails(count: int, group: str = "_") -> list[Chunk]:
    found = []
    for number in range(count):
        salt = "" if group == "_" else "salt"
        chain = KeyChain(FMT.namespace.digest, FMT.chunk_size, salt=salt, salt_group=group)
        chain.extend([number] * 5)
        tail = chain.tail()
        assert tail is not None
        found.append(tail)
    return found


class Place:
    """A namespace, and what a sweep of it has done."""

    def __init__(self, root: Path) -> None:
        self.faults = FaultyBackend(posix(root))
        self.counting = CountingBackend(self.faults)
        self.root = root / FMT.namespace.folder
        self.shelf = Shelf(self.counting)
        self.view: NamespaceView = self.shelf.view(FMT)
        self.counters = Counters()
        self.sweeps: list[Sweep] = []

    def sweep(self, keep: float = KEEP, *, walks: bool = True) -> Sweep:
        sweep = Sweep(keep, self.counters, walks=walks)
        self.sweeps.append(sweep)
        return sweep

    def put(self, chunk: Chunk, age: float = 0.0) -> list[Path]:
        """Store all objects of a chunk, as if some time ago."""
        tokens = chunk.tokens if chunk.tail else None
        paths = []
        for shard in range(FMT.shards):
            data = bytearray(FMT.object_size(shard, tokens))
            FMT.seal(memoryview(data), chunk, shard)
            ref = ObjectRef(chunk, shard)
            self.view.publish(ref, data)
            paths.append(self.root.parent / self.view.name(ref))
        for path in paths:
            then = time.time() - age
            os.utime(path, (then, then))
        return paths

    def mark(self, attempt: str, age: float = 0.0) -> Path:
        self.view.give_up(attempt)
        path = self.root / marker_name(attempt)
        then = time.time() - age
        os.utime(path, (then, then))
        return path

    @property
    def deleted(self) -> float:
        return self.counters.snapshot().get("leftovers_deleted", 0)

    def close(self) -> None:
        for sweep in self.sweeps:
            sweep.close()
        self.shelf.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    # The sweep of temporaries is not of interest.
    monkeypatch.setattr(SlowSweep, "written", lambda *_: None)
    with closing(Place(tmp_path)) as place:
        yield place


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The time of sweeps, which have no threads meanwhile: the test makes their steps."""
    clock = Clock(1000.0)
    monkeypatch.setattr(module, "time", clock)
    with none_can_be_started(monkeypatch, "kvshelf-sweep"):
        yield clock


def step(sweep: Sweep, clock: Clock) -> float:
    """Make a step, and let the time pass until the next one."""
    pause = sweep.step()
    clock.now += pause + 1e-6
    return pause


def walk(sweep: Sweep, view: NamespaceView, clock: Clock) -> None:
    """Walk through all folders twice: what is newest may come last in the first walk."""
    sweep.begin(view)
    end = clock.now + 2 * KEEP
    while clock.now < end:
        step(sweep, clock)


# ------------------------------------------------------------------------------- what others left


def test_a_walk_deletes_old_tails_and_markers_and_nothing_else(place: Place, clock: Clock) -> None:
    old = [*place.put(tails(2)[0], 2 * KEEP), *place.put(tails(1, "0" * 16)[0], 2 * KEEP)]
    old.append(place.mark(ONE, 2 * KEEP))
    chunks = make_chunks(FMT, 3)
    kept = [path for chunk in chunks for path in place.put(chunk, 5 * KEEP)]
    kept += [*place.put(tails(2)[1], KEEP / 2), place.mark(TWO, KEEP / 2)]
    kept.append(place.root / "namespace.json")
    for name in (
        ".kvshelf/gave-up/notes",
        ".kvshelf/gave-up/" + "F" * 32,
        ".kvshelf/bad/" + "1" * 32,
        "_/00/foreign",
        "_/00/" + "1" * 31,
    ):
        path = place.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        os.utime(path, (1, 1))
        kept.append(path)
    with_content = place.root / marker_name("3" * 32)
    with_content.write_bytes(b"not a marker")
    os.utime(with_content, (1, 1))
    walk(place.sweep(), place.view, clock)
    assert not [path for path in old if path.exists()]
    assert all(path.exists() for path in [*kept, with_content])
    assert place.deleted == len(old)


def test_a_walk_looks_into_one_folder_at_a_time_and_rests(place: Place, clock: Clock) -> None:
    for tail in tails(20):
        place.put(tail, 2 * KEEP)
    place.put(make_chunks(FMT, 1)[0])
    folders = len(list((place.root / "_").iterdir())) + 1
    sweep = place.sweep()
    sweep.begin(place.view)
    step(sweep, clock)
    place.counting.counts.clear()
    for looked in range(1, folders + 1):
        step(sweep, clock)
        assert place.counting.counts["list"] == looked
    # The next walk begins at an age after the first began.
    assert KEEP / 2 < step(sweep, clock) <= KEEP
    assert place.counting.counts["list"] == folders
    for looked in range(folders + 1, 2 * folders + 1):
        step(sweep, clock)
        assert place.counting.counts["list"] == looked
    assert place.deleted == 20 * FMT.shards


@pytest.mark.parametrize(("keep", "pause"), [(3600.0, 3600 / 256), (1.0, 1.0)])
def test_the_pace_is_that_of_one_walk_in_the_age(
    place: Place, clock: Clock, keep: float, pause: float
) -> None:
    place.put(make_chunks(FMT, 1)[0])
    sweep = place.sweep(keep)
    sweep.begin(place.view)
    assert 0 <= step(sweep, clock) <= pause
    assert 0.5 * pause <= sweep.step() <= 1.5 * pause


@pytest.mark.parametrize("ahead", [KEEP, -KEEP, 10 * KEEP, -10 * KEEP])
def test_a_clock_that_is_wrong_deletes_nothing_early(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """Nor anything at all while it is wrong by more than an hour."""
    young = place.put(tails(1)[0], KEEP / 2)
    place.put(make_chunks(FMT, 1)[0])
    old = place.mark(ONE, 3 * KEEP)
    now = time.time() + ahead
    monkeypatch.setattr(time, "time", lambda: now)
    walk(place.sweep(), place.view, clock)
    assert all(path.exists() for path in young)
    assert old.exists() == (abs(ahead) > 3600)


def test_a_modification_in_the_future_makes_nothing_old(place: Place, clock: Clock) -> None:
    young = [*place.put(tails(1)[0], KEEP / 2), *place.put(make_chunks(FMT, 1)[0], -10 * KEEP)]
    walk(place.sweep(), place.view, clock)
    assert all(path.exists() for path in young)


# ------------------------------------------------------------------------------- its own


def test_what_it_wrote_itself_goes_at_its_age_without_a_walk(place: Place, clock: Clock) -> None:
    """Of this process's own leftovers no clock of the storage is asked."""
    one, two = tails(2)
    paths = [place.put(one), place.put(two)]
    marker = place.mark(ONE)
    sweep = place.sweep(walks=False)
    for tail in (one, two):
        for shard in range(FMT.shards):
            sweep.wrote(place.view, ObjectRef(tail, shard))
    sweep.wrote(place.view, ONE)
    assert sweep.step() == pytest.approx(KEEP)
    assert place.deleted == 0
    clock.now += KEEP + 1
    for shard in range(FMT.shards):
        # Stored or found again: it is of use still.
        sweep.wrote(place.view, ObjectRef(two, shard))
    sweep.step()
    assert not any(path.exists() for path in [*paths[0], marker])
    assert all(path.exists() for path in paths[1])
    assert place.deleted == FMT.shards + 1
    clock.now += KEEP + 1
    assert sweep.step() == pytest.approx(KEEP), "nothing is left"
    assert not any(path.exists() for path in paths[1])


def test_the_account_of_its_own_is_bounded(
    place: Place, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = place.sweep(walks=False)
    for number in range(66_000):
        sweep.wrote(place.view, f"{number:032x}")
    deleted: list[str] = []
    monkeypatch.setattr(place.shelf.backend, "delete", deleted.append)
    clock.now += KEEP + 1
    sweep.step()
    assert 1000 < len(deleted) < 66_000


def test_it_sweeps_on_a_thread_of_its_own_once_there_was_a_hand_over(place: Place) -> None:
    tail = tails(1)[0]
    paths = place.put(tail)
    before = named("kvshelf-sweep")
    sweep = place.sweep(0.05)
    assert not named("kvshelf-sweep") - before
    sweep.begin(place.view)
    for shard in range(FMT.shards):
        sweep.wrote(place.view, ObjectRef(tail, shard))
    until(lambda: not any(path.exists() for path in paths))
    (thread,) = named("kvshelf-sweep") - before
    assert thread.daemon
    sweep.begin(place.view)
    assert named("kvshelf-sweep") - before == {thread}
    sweep.close()
    sweep.close()
    until(lambda: not thread.is_alive())


def test_a_process_without_threads_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = named("kvshelf-sweep")
    sweep = place.sweep()
    with none_can_be_started(monkeypatch, "kvshelf-sweep"):
        sweep.begin(place.view)
    assert not named("kvshelf-sweep") - before
    sweep.begin(place.view)
    assert len(named("kvshelf-sweep") - before) == 1


# ------------------------------------------------------------------------------- tails in use


def test_a_tail_that_is_used_goes_at_its_age_after_the_last_use(place: Place, clock: Clock) -> None:
    used, unused = tails(2)
    paths, others = place.put(used, 2 * KEEP), place.put(unused, 2 * KEEP)
    place.put(make_chunks(FMT, 1)[0])
    sweep = place.sweep()
    for shard in range(FMT.shards):
        sweep.used(place.view, ObjectRef(used, shard))
    sweep.step()
    assert all(time.time() - path.stat().st_atime < KEEP / 10 for path in paths)
    walk(place.sweep(), place.view, clock)
    assert all(path.exists() for path in paths)
    assert not any(path.exists() for path in others)
    then = time.time() - 2 * KEEP
    for path in paths:
        os.utime(path, (then + 1, then))
    walk(place.sweep(), place.view, clock)
    assert not any(path.exists() for path in paths)


def test_a_process_keeps_its_own_tail_as_long_as_others_use_it(place: Place, clock: Clock) -> None:
    one, two = tails(2)
    paths = [place.put(one, 2 * KEEP), place.put(two, 2 * KEEP)]
    mine, theirs = place.sweep(walks=False), place.sweep(walks=False)
    for chunk in (one, two):
        for shard in range(FMT.shards):
            mine.wrote(place.view, ObjectRef(chunk, shard))
    for shard in range(FMT.shards):
        theirs.used(place.view, ObjectRef(one, shard))
    theirs.step()
    clock.now += KEEP + 1
    mine.step()
    assert all(path.exists() for path in paths[0])
    assert not any(path.exists() for path in paths[1])
    # Nobody has used it for another age.
    then = time.time() - 2 * KEEP
    for path in paths[0]:
        os.utime(path, (then + 1, then))
    clock.now += KEEP + 1
    mine.step()
    assert not any(path.exists() for path in paths[0])


def test_its_own_uses_need_no_storage_to_keep_a_tail(place: Place, clock: Clock) -> None:
    tail = tails(1)[0]
    paths = place.put(tail, 2 * KEEP)
    sweep = place.sweep(walks=False)
    refs = [ObjectRef(tail, shard) for shard in range(FMT.shards)]
    for ref in refs:
        sweep.wrote(place.view, ref)
    clock.now += KEEP + 1
    place.faults.add(Fault("touch", error=TransientStorageError(5, "down", "x")))
    for ref in refs:
        sweep.used(place.view, ref)
    assert sweep.step() == pytest.approx(KEEP)
    assert all(path.exists() for path in paths)


@pytest.fixture
def touched(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all objects whose use was recorded."""
    names: list[str] = []
    monkeypatch.setattr(place.shelf.backend, "touch", names.append)
    return names


def test_uses_are_recorded_a_few_times_in_an_age(
    place: Place, clock: Clock, touched: list[str]
) -> None:
    sweep = place.sweep(walks=False)
    ref = ObjectRef(tails(1)[0], 0)
    for seconds, times in [(0, 1), (1, 1), (KEEP / 4 - 2, 1), (1, 2), (KEEP / 4, 3)]:
        clock.now += seconds
        for _ in range(3):
            sweep.used(place.view, ref)
        sweep.step()
        assert touched == times * [place.view.name(ref)]


def test_the_account_of_uses_is_bounded(place: Place, clock: Clock, touched: list[str]) -> None:
    """What was used first is forgotten first, and recorded once more when it is used again."""
    sweep = place.sweep(walks=False)
    tail = tails(1)[0]
    refs = [ObjectRef(replace(tail, key=number.to_bytes(32, "big")), 0) for number in range(66_000)]
    for ref in refs:
        sweep.used(place.view, ref)
    sweep.step()
    assert 1000 < len(touched) < 66_000
    touched.clear()
    sweep.used(place.view, refs[0])
    sweep.used(place.view, refs[-1])
    sweep.step()
    assert touched == [place.view.name(refs[0])]


def test_an_engine_that_only_loads_tails_rests_until_the_next_use(
    place: Place, touched: list[str]
) -> None:
    sweep = place.sweep(100.0)
    for number, tail in enumerate(tails(3), 1):
        sweep.used(place.view, ObjectRef(tail, 0))
        until(lambda number=number: len(touched) == number)  # type: ignore[misc]
    assert place.counting.counts["list"] == 0
    # It walks as soon as it stores tails itself.
    sweep.begin(place.view)
    until(lambda: place.counting.counts["list"] > 0)


def test_without_tails_of_its_own_an_engine_has_nothing_to_do(place: Place, clock: Clock) -> None:
    sweep = place.sweep()
    assert sweep.step() == pytest.approx(KEEP)
    sweep.used(place.view, ObjectRef(tails(1)[0], 0))
    assert sweep.step() == pytest.approx(KEEP)
    sweep.begin(place.view)
    assert sweep.step() < KEEP / 100


def test_a_use_that_cannot_be_recorded_is_left_out(place: Place, clock: Clock) -> None:
    tail = tails(1)[0]
    place.put(tail)
    place.faults.add(Fault("touch", error=TransientStorageError(5, "down", "x")))
    sweep = place.sweep()
    sweep.used(place.view, ObjectRef(tail, 0))
    assert sweep.step() == pytest.approx(KEEP)
    assert place.counting.counts["touch"] == 1
    old = place.mark(ONE, 2 * KEEP)
    walk(sweep, place.view, clock)
    assert place.counting.counts["touch"] == 1
    assert not old.exists()


# ------------------------------------------------------------------------------- trouble


def test_where_others_leftovers_may_not_be_deleted_its_own_are(
    place: Place, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = tails(2)
    paths, others = place.put(mine), place.put(theirs, 2 * KEEP)
    place.put(make_chunks(FMT, 1)[0])
    refused = ReadOnlyStorageError(errno.EACCES, "deleting failed: EACCES", "x")
    place.faults.add(Fault("delete", f"*{theirs.key.hex()}*", error=refused))
    sweep = place.sweep()
    walk(sweep, place.view, clock)
    for shard in range(FMT.shards):
        sweep.wrote(place.view, ObjectRef(mine, shard))
    walk(sweep, place.view, clock)
    assert all(path.exists() for path in others)
    assert not any(path.exists() for path in paths)
    assert caplog.text.count("are not deleted, here and later") == 1
    # Stores go on.
    assert place.shelf.backend.writes.is_closed


def test_where_nothing_may_be_deleted_it_stops(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    path = place.mark(ONE)
    refused = ReadOnlyStorageError(errno.EACCES, "deleting failed: EACCES", "x")
    place.faults.add(Fault("delete", error=refused))
    before = named("kvshelf-sweep")
    sweep = place.sweep(0.02)
    sweep.wrote(place.view, ONE)
    sweep.begin(place.view)
    until(lambda: place.counting.counts["delete"] > 0 and not named("kvshelf-sweep") - before)
    assert path.exists()
    assert caplog.text.count("are not deleted, here and later") == 1
    assert place.deleted == 0


def test_a_storage_that_is_down_is_asked_again_later(
    place: Place, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = place.mark(ONE)
    sweep = place.sweep(walks=False)
    sweep.wrote(place.view, ONE)
    clock.now += KEEP + 1
    place.faults.add(Fault("delete", error=TransientStorageError(5, "down", "x")))
    assert 10.0 < sweep.step() < 100.0
    place.faults.heal()
    sweep.step()
    assert not path.exists()
    assert not caplog.text


def test_a_listing_that_is_forbidden_ends_the_walks_alone(place: Place, clock: Clock) -> None:
    path = place.mark(ONE)
    place.faults.add(Fault("list", error=PermanentStorageError(13, "no", "x")))
    sweep = place.sweep()
    walk(sweep, place.view, clock)
    assert place.counting.counts["list"] == 1
    sweep.wrote(place.view, ONE)
    clock.now += KEEP + 1
    sweep.step()
    assert not path.exists()


def test_something_else_in_the_place_is_left(place: Place, clock: Clock) -> None:
    path = place.mark(ONE)
    path.unlink()
    path.mkdir()
    sweep = place.sweep(walks=False)
    sweep.wrote(place.view, ONE)
    clock.now += KEEP + 1
    assert sweep.step() == pytest.approx(KEEP), "it is forgotten"
    assert path.is_dir()


def test_a_mistake_of_its_own_ends_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> str:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(NamespaceView, "folder", broken)
    before = named("kvshelf-sweep")
    sweep = place.sweep(0.01)
    sweep.wrote(place.view, ONE)
    sweep.begin(place.view)
    until(lambda: "not deleted any more" in caplog.text and not named("kvshelf-sweep") - before)
