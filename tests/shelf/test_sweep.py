"""What hand-overs leave is deleted by age: never what is young, never anything else."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from faulty import CountingBackend, Fault, FaultyBackend
from parts import make_chunks, make_format, posix, until
from thread_limit import none_can_be_started

from kvshelf.errors import PermanentStorageError, ReadOnlyStorageError, TransientStorageError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.metrics import Counters
from kvshelf.shelf import sweep as module
from kvshelf.shelf.markers import marker_name
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.sweep import Sweep
from kvshelf.shelf.view import NamespaceView, ObjectRef

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
    monkeypatch.setattr(NamespaceView, "sweep", lambda *_: None)
    with closing(Place(tmp_path)) as place:
        yield place


def look(sweep: Sweep, view: NamespaceView, times: int) -> None:
    """Look into some folders on the test's thread, without pauses."""
    sweep._view = view
    for _ in range(times):
        sweep._next_folder = 0.0
        sweep.step()


def walk(sweep: Sweep, view: NamespaceView) -> None:
    """Walk through all folders twice: what is newest may come last in the first walk."""
    for _ in range(2):
        sweep._next_walk = 0.0
        look(sweep, view, 1)
        look(sweep, view, len(sweep._left))


# ------------------------------------------------------------------------------- what others left


def test_a_walk_deletes_old_tails_and_markers_and_nothing_else(place: Place) -> None:
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
    walk(place.sweep(), place.view)
    assert not [path for path in old if path.exists()]
    assert all(path.exists() for path in [*kept, with_content])
    assert place.deleted == len(old)


def test_a_walk_looks_into_one_folder_at_a_time_and_rests(place: Place) -> None:
    for tail in tails(20):
        place.put(tail, 2 * KEEP)
    place.put(make_chunks(FMT, 1)[0])
    folders = len(list((place.root / "_").iterdir())) + 1
    sweep = place.sweep()
    place.counting.counts.clear()
    look(sweep, place.view, folders)
    assert place.counting.counts["list"] == folders
    # The next walk begins at an age after the first began.
    look(sweep, place.view, 50)
    assert place.counting.counts["list"] == folders
    sweep._next_folder = 0.0
    assert KEEP / 2 < sweep.step() <= KEEP
    sweep._next_walk = 0.0
    look(sweep, place.view, folders)
    assert place.counting.counts["list"] == 2 * folders
    assert place.deleted == 20 * FMT.shards


def test_the_pace_is_that_of_one_walk_in_the_age(place: Place) -> None:
    assert place.sweep(3600.0)._pause == pytest.approx(3600 / 256)
    assert place.sweep(1.0)._pause == 1.0


@pytest.mark.parametrize("ahead", [KEEP, -KEEP, 10 * KEEP, -10 * KEEP])
def test_a_clock_that_is_wrong_deletes_nothing_early(
    place: Place, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """Nor anything at all while it is wrong by more than an hour."""
    young = place.put(tails(1)[0], KEEP / 2)
    place.put(make_chunks(FMT, 1)[0])
    old = place.mark(ONE, 3 * KEEP)
    now = time.time() + ahead
    monkeypatch.setattr(module.time, "time", lambda: now)
    walk(place.sweep(), place.view)
    assert all(path.exists() for path in young)
    assert old.exists() == (abs(ahead) > 3600)


def test_a_modification_in_the_future_makes_nothing_old(place: Place) -> None:
    young = [*place.put(tails(1)[0], KEEP / 2), *place.put(make_chunks(FMT, 1)[0], -10 * KEEP)]
    walk(place.sweep(), place.view)
    assert all(path.exists() for path in young)


# ------------------------------------------------------------------------------- its own


def test_what_it_wrote_itself_goes_at_its_age_without_a_walk(place: Place) -> None:
    """Of this process's own leftovers no clock of the storage is asked."""
    one, two = tails(2)
    paths = [place.put(one), place.put(two)]
    marker = place.mark(ONE)
    sweep = place.sweep(walks=False)
    for shard in range(FMT.shards):
        sweep.wrote(place.view, ObjectRef(one, shard))
    sweep.wrote(place.view, ONE)
    sweep.step()
    assert place.deleted == 0
    for key in sweep._own:
        sweep._own[key] -= KEEP + 1
    for shard in range(FMT.shards):
        # Stored or found again: it is of use still.
        sweep.wrote(place.view, ObjectRef(two, shard))
    sweep.step()
    assert not any(path.exists() for path in [*paths[0], marker])
    assert all(path.exists() for path in paths[1])
    assert len(sweep._own) == FMT.shards
    assert place.deleted == FMT.shards + 1


def test_the_account_of_its_own_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_OWN", 3)
    sweep = place.sweep(walks=False)
    for number in range(10):
        sweep.wrote(place.view, f"{number:032x}")
    assert len(sweep._own) == 3


def test_it_sweeps_on_a_thread_of_its_own_once_there_was_a_hand_over(place: Place) -> None:
    tail = tails(1)[0]
    paths = place.put(tail)
    sweep = place.sweep(0.05)
    assert sweep._thread is None
    sweep.begin(place.view)
    for shard in range(FMT.shards):
        sweep.wrote(place.view, ObjectRef(tail, shard))
    until(lambda: not any(path.exists() for path in paths))
    assert sweep._thread is not None
    assert sweep._thread.daemon
    thread = sweep._thread
    sweep.begin(place.view)
    assert sweep._thread is thread
    sweep.close()
    sweep.close()
    until(lambda: not thread.is_alive())


def test_a_process_without_threads_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = place.sweep()
    with none_can_be_started(monkeypatch, "kvshelf-sweep"):
        sweep.begin(place.view)
    assert sweep._thread is None
    sweep.begin(place.view)
    assert sweep._thread is not None


# ------------------------------------------------------------------------------- tails in use


def test_a_tail_that_is_used_goes_at_its_age_after_the_last_use(place: Place) -> None:
    used, unused = tails(2)
    paths, others = place.put(used, 2 * KEEP), place.put(unused, 2 * KEEP)
    place.put(make_chunks(FMT, 1)[0])
    sweep = place.sweep()
    for shard in range(FMT.shards):
        sweep.used(place.view, ObjectRef(used, shard))
    until(lambda: all(time.time() - path.stat().st_atime < KEEP / 10 for path in paths))
    walk(place.sweep(), place.view)
    assert all(path.exists() for path in paths)
    assert not any(path.exists() for path in others)
    then = time.time() - 2 * KEEP
    for path in paths:
        os.utime(path, (then + 1, then))
    walk(place.sweep(), place.view)
    assert not any(path.exists() for path in paths)


def test_a_process_keeps_its_own_tail_as_long_as_others_use_it(place: Place) -> None:
    one, two = tails(2)
    paths = [place.put(one, 2 * KEEP), place.put(two, 2 * KEEP)]
    mine, theirs = place.sweep(walks=False), place.sweep(walks=False)
    for chunk in (one, two):
        for shard in range(FMT.shards):
            mine.wrote(place.view, ObjectRef(chunk, shard))
    for shard in range(FMT.shards):
        theirs.used(place.view, ObjectRef(one, shard))
    until(lambda: all(time.time() - path.stat().st_atime < KEEP / 10 for path in paths[0]))
    for key in mine._own:
        mine._own[key] -= KEEP + 1
    mine.step()
    assert all(path.exists() for path in paths[0])
    assert not any(path.exists() for path in paths[1])
    # Nobody has used it for another age.
    then = time.time() - 2 * KEEP
    for path in paths[0]:
        os.utime(path, (then + 1, then))
    for key in mine._own:
        mine._own[key] -= KEEP + 1
    mine.step()
    assert not any(path.exists() for path in paths[0])


def test_its_own_uses_need_no_storage_to_keep_a_tail(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The thread would delete the last shards before their use is noted.
    monkeypatch.setattr(Sweep, "_start", lambda _: None)
    tail = tails(1)[0]
    paths = place.put(tail, 2 * KEEP)
    sweep = place.sweep(walks=False)
    refs = [ObjectRef(tail, shard) for shard in range(FMT.shards)]
    for ref in refs:
        sweep.wrote(place.view, ref)
    for key in sweep._own:
        sweep._own[key] -= KEEP + 1
    place.faults.add(Fault("touch", error=TransientStorageError(5, "down", "x")))
    for ref in refs:
        sweep.used(place.view, ref)
    sweep.step()
    sweep.close()
    assert all(due > time.monotonic() for due in sweep._own.values())
    assert all(path.exists() for path in paths)


def test_uses_are_recorded_a_few_times_in_an_age(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_OWN", 3)
    monkeypatch.setattr(Sweep, "_start", lambda _: None)
    sweep = place.sweep(walks=False)
    refs = [ObjectRef(tail, 0) for tail in tails(4)]
    touched: list[str] = []
    monkeypatch.setattr(place.shelf.backend, "touch", touched.append)

    def use(ref: ObjectRef) -> list[str]:
        for _ in range(3):
            sweep.used(place.view, ref)
        touched.clear()
        sweep._record_uses()
        return list(touched)

    assert use(refs[0]) == [place.view.name(refs[0])]
    assert use(refs[0]) == []
    sweep._used[place.view, refs[0]] -= KEEP / 4
    assert use(refs[0]) == [place.view.name(refs[0])]
    for ref in refs[1:]:
        assert len(use(ref)) == 1
    assert len(sweep._used) == 3


def test_an_engine_that_only_loads_tails_rests_until_the_next_use(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "_start", lambda _: None)
    sweep = place.sweep()
    assert sweep.step() == pytest.approx(KEEP, abs=1)
    sweep.used(place.view, ObjectRef(tails(1)[0], 0))
    assert sweep._wake.is_set()
    assert sweep.step() == pytest.approx(KEEP, abs=1)
    # It walks as soon as it stores tails itself.
    sweep._wake.clear()
    sweep.begin(place.view)
    assert sweep._wake.is_set()
    assert sweep.step() <= sweep._pause


def test_a_use_that_cannot_be_recorded_is_left_out(place: Place) -> None:
    tail = tails(1)[0]
    place.put(tail)
    place.faults.add(Fault("touch", error=TransientStorageError(5, "down", "x")))
    sweep = place.sweep()
    sweep.used(place.view, ObjectRef(tail, 0))
    until(lambda: not sweep._uses)
    assert sweep._thread is not None
    assert sweep._walks


# ------------------------------------------------------------------------------- trouble


def test_where_others_leftovers_may_not_be_deleted_its_own_are(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = tails(2)
    paths, others = place.put(mine), place.put(theirs, 2 * KEEP)
    place.put(make_chunks(FMT, 1)[0])
    refused = ReadOnlyStorageError(errno.EACCES, "deleting failed: EACCES", "x")
    place.faults.add(Fault("delete", f"*{theirs.key.hex()}*", error=refused))
    sweep = place.sweep()
    walk(sweep, place.view)
    for shard in range(FMT.shards):
        sweep.wrote(place.view, ObjectRef(mine, shard))
    for key in sweep._own:
        sweep._own[key] -= KEEP + 1
    walk(sweep, place.view)
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
    sweep = place.sweep(0.02)
    sweep.wrote(place.view, ONE)
    sweep.begin(place.view)
    until(lambda: sweep._thread is not None and not sweep._thread.is_alive())
    assert path.exists()
    assert caplog.text.count("are not deleted, here and later") == 1
    assert place.deleted == 0


def test_a_storage_that_is_down_is_asked_again_later(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    path = place.mark(ONE)
    sweep = place.sweep(walks=False)
    sweep.wrote(place.view, ONE)
    sweep._own[place.view, ONE] = 0.0
    place.faults.add(Fault("delete", error=TransientStorageError(5, "down", "x")))
    assert sweep.step() == module._TROUBLE_SECONDS
    place.faults.heal()
    sweep.step()
    assert not path.exists()
    assert not caplog.text


def test_a_listing_that_is_forbidden_ends_the_walks_alone(place: Place) -> None:
    path = place.mark(ONE)
    place.faults.add(Fault("list", error=PermanentStorageError(13, "no", "x")))
    sweep = place.sweep()
    look(sweep, place.view, 5)
    assert place.counting.counts["list"] == 1
    sweep.wrote(place.view, ONE)
    sweep._own[place.view, ONE] = 0.0
    sweep.step()
    assert not path.exists()


def test_something_else_in_the_place_is_left(place: Place) -> None:
    path = place.mark(ONE)
    path.unlink()
    path.mkdir()
    sweep = place.sweep(walks=False)
    sweep.wrote(place.view, ONE)
    sweep._own[place.view, ONE] = 0.0
    sweep.step()
    assert path.is_dir()
    assert not sweep._own


def test_a_mistake_of_its_own_ends_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> str:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(NamespaceView, "folder", broken)
    sweep = place.sweep(0.01)
    sweep.wrote(place.view, ONE)
    sweep.begin(place.view)
    until(lambda: sweep._thread is not None and not sweep._thread.is_alive())
    assert "not deleted any more" in caplog.text
