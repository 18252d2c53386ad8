"""A broken promise leaves a marker, whatever the storage does, and never a second one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvshelf.backends.wrappers import ReadOnlyBackend
from kvshelf.capacity.evictor import Evictor
from kvshelf.config import CapacityConfig
from kvshelf.errors import NoSpaceStorageError, PermanentStorageError, TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.transfer.promises import Promises
from kvshelf.transfer.stores import StoreOutcome, StoreResult
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.threads import named, none_can_be_started
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

FMT = make_format()
ATTEMPTS = [f"{number:032x}" for number in range(40)]
ONE, TWO, *_ = ATTEMPTS
QUEUED, KNOWN, FULL = StoreOutcome.QUEUED, StoreOutcome.KNOWN, StoreOutcome.STAGING_FULL


@pytest.fixture
def rig(backend: FaultyStorage) -> Iterator[Rig]:
    with closing(Rig(backend, FMT)) as rig:
        yield rig


@pytest.fixture
def promises(rig: Rig) -> Iterator[Promises]:
    with closing(Promises(rig.counters)) as promises:
        yield promises


def marked(rig: Rig) -> set[str]:
    found = rig.shelf.view(rig.fmt).gave_up(ATTEMPTS)
    return {attempt for attempt, there in zip(ATTEMPTS, found, strict=True) if there}


def chunk() -> Chunk:
    return make_chunks(FMT, 1)[0]


# ------------------------------------------------------------------------------- outcomes


@pytest.mark.parametrize("outcome", list(StoreOutcome))
def test_promise_is_broken_when_a_store_is_dropped(
    rig: Rig, promises: Promises, outcome: StoreOutcome
) -> None:
    promises.note(rig.view, ONE, outcome)
    promises.close(PATIENCE)
    kept = outcome in (QUEUED, KNOWN)
    assert marked(rig) == (set() if kept else {ONE})
    assert rig.count("promises_broken") == rig.count("markers_written") == (not kept)


@pytest.mark.parametrize("result", list(StoreResult))
def test_promise_is_broken_when_a_store_fails_or_is_lost(
    rig: Rig, promises: Promises, result: StoreResult
) -> None:
    promises.watch(rig.view, ONE)(chunk(), result)
    promises.close(PATIENCE)
    broken = result.value in ("failed", "dropped", "lost")
    assert marked(rig) == ({ONE} if broken else set())


def test_tail_that_nobody_waits_for_leaves_no_marker(rig: Rig, promises: Promises) -> None:
    done = promises.watch(rig.view, "")
    for outcome in StoreOutcome:
        promises.note(rig.view, "", outcome)
    for result in StoreResult:
        done(chunk(), result)
    promises.close(PATIENCE)
    assert not promises.given
    assert rig.count("promises_broken") == rig.count("markers_written") == 0


def test_attempt_is_given_up_once(rig: Rig, promises: Promises, backend: FaultyStorage) -> None:
    counting = FaultyStorage(backend.inner)
    backend.inner = counting
    done = promises.watch(rig.view, ONE)
    for _ in range(3):
        done(chunk(), StoreResult.FAILED)
        promises.give_up(rig.view, ONE)
    promises.give_up(rig.view, TWO)
    promises.close(PATIENCE)
    assert marked(rig) == {ONE, TWO}
    assert rig.count("promises_broken") == 2
    # Two markers and the description of the namespace.
    assert counting.counts["write"] == 3


def test_ranks_of_an_engine_write_one_marker(rig: Rig) -> None:
    ranks = [Promises(rig.counters) for _ in range(4)]
    for rank in ranks:
        rank.give_up(rig.view, ONE)
    for rank in ranks:
        rank.close(PATIENCE)
    assert marked(rig) == {ONE}
    assert (rig.count("promises_broken"), rig.count("markers_written")) == (4, 1)


def test_what_is_not_an_attempt_harms_nothing(rig: Rig, promises: Promises) -> None:
    promises.give_up(rig.view, "../../elsewhere")
    promises.give_up(rig.view, ONE)
    promises.close(PATIENCE)
    assert marked(rig) == {ONE}
    assert (rig.count("promises_broken"), rig.count("markers_written")) == (2, 1)


def test_keeper_learns_of_hand_overs(rig: Rig) -> None:
    evictor = Evictor(rig.shelf.backend, CapacityConfig(), rig.counters)
    promises = Promises(rig.counters, on_handover=evictor.hands_over)
    assert evictor.schedule.leaves_until < 0
    promises.watch(rig.view, ONE)
    assert evictor.schedule.leaves_until > 0


# ------------------------------------------------------------------------------- trouble


@pytest.mark.parametrize(
    "error",
    [
        TransientStorageError(5, "down", "x"),
        NoSpaceStorageError(28, "full", "x"),
        PermanentStorageError(13, "not allowed", "x"),
        RuntimeError("a mistake"),
    ],
)
def test_marker_that_cannot_be_written_is_counted_and_nothing_else(
    rig: Rig,
    promises: Promises,
    backend: FaultyStorage,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend.add(Fault("write", error=error, times=1))
    promises.give_up(rig.view, ONE)
    until(lambda: not promises._queue)
    backend.heal()
    rig.guard.writes.close()
    caplog.clear()
    promises.give_up(rig.view, ONE)
    promises.give_up(rig.view, TWO)
    promises.close(PATIENCE)
    assert marked(rig) == {TWO}
    assert (rig.count("promises_broken"), rig.count("markers_written")) == (2, 1)
    assert not caplog.records


def test_after_a_failed_marker_a_store_shows_that_promises_can_be_kept_again(
    rig: Rig, promises: Promises, backend: FaultyStorage
) -> None:
    backend.add(Fault("write", error=NoSpaceStorageError(28, "full", "x"), times=1))
    promises.give_up(rig.view, ONE)
    until(lambda: promises.unmarked)
    ended = promises.watch(rig.view, TWO)
    ended(chunk(), StoreResult.LOST)
    assert promises.unmarked
    ended(chunk(), StoreResult.PUBLISHED)
    assert not promises.unmarked


def test_on_a_read_only_shelf_promises_are_broken_in_silence(tmp_path: Path) -> None:
    backend = ReadOnlyBackend(posix(tmp_path / "shelf"))
    with closing(Rig(backend, FMT)) as rig:
        promises = Promises(rig.counters)
        item = rig.items(make_chunks(FMT, 1), 0)[0]
        outcome = rig.store(item, promised=True, on_done=promises.watch(rig.view, ONE))
        promises.note(rig.view, ONE, outcome)
        promises.close(PATIENCE)
        assert outcome is StoreOutcome.UNAVAILABLE
        assert (rig.count("promises_broken"), rig.count("markers_written")) == (1, 0)
    assert not list((tmp_path / "shelf").iterdir())


def test_storage_that_hangs_holds_up_neither_a_step_nor_the_end(
    rig: Rig, promises: Promises, backend: FaultyStorage
) -> None:
    before = named("kvshelf-marker")
    gate = backend.hang("write", "*gave-up*")
    for attempt in ATTEMPTS:
        promises.give_up(rig.view, attempt)
    promises.close(0.01)
    assert marked(rig) == set()
    promises.give_up(rig.view, "f" * 32)
    gate.set()
    # The process lives on: so do the markers that were asked for.
    until(lambda: rig.count("markers_written") == len(ATTEMPTS))
    until(lambda: not named("kvshelf-marker") - before)
    assert marked(rig) == set(ATTEMPTS)
    assert rig.count("markers_written") == len(ATTEMPTS)


def test_process_without_threads_writes_its_markers_later(
    rig: Rig, promises: Promises, monkeypatch: pytest.MonkeyPatch
) -> None:
    with none_can_be_started(monkeypatch, "kvshelf-marker"):
        promises.give_up(rig.view, ONE)
        promises.close(0.0)
    assert marked(rig) == set()
    other = Promises(rig.counters)
    with none_can_be_started(monkeypatch, "kvshelf-marker"):
        other.give_up(rig.view, ONE)
    other.give_up(rig.view, TWO)
    other.close(PATIENCE)
    assert marked(rig) == {ONE, TWO}


def test_what_waits_to_be_written_is_bounded(
    rig: Rig, promises: Promises, backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvshelf.transfer.promises._MOST_QUEUED", 5)
    monkeypatch.setattr("kvshelf.transfer.promises._BROKEN_MEMORY", 7)
    gate = backend.hang("write")
    for attempt in ATTEMPTS:
        promises.give_up(rig.view, attempt)
    assert (len(promises._queue), len(promises._broken)) == (5, 7)
    gate.set()
    promises.close(PATIENCE)
    assert marked(rig) == set(ATTEMPTS[:5])
