"""The sweeper: when it looks, when it lists, and what it leaves to others."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvshelf.backends import Deadlines
from kvshelf.backends.base import Space
from kvshelf.capacity import deletion as deletion_module
from kvshelf.capacity import room as room_module
from kvshelf.capacity import sweeper as sweeper_module
from kvshelf.capacity import sweeping as sweeping_module
from kvshelf.capacity import written as written_module
from kvshelf.capacity.collect import Plan, plan
from kvshelf.capacity.lease import SWEEP, Finding, Lease, Record
from kvshelf.capacity.pins import Pin, Pins
from kvshelf.capacity.sweeper import Sweeper
from kvshelf.capacity.walk import Walk
from kvshelf.capacity.written import WRITTEN
from kvshelf.config import CapacityConfig
from kvshelf.errors import (
    NoSpaceStorageError,
    PermanentStorageError,
    ReadOnlyStorageError,
    TransientStorageError,
)
from kvshelf.metrics import Counters
from tests.capacity.shelves import Place
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.storages import Fault
from tests.support.threads import named
from tests.support.waiting import until

HOUR = 3600.0
FMT = make_format()
CHUNKS = make_chunks(FMT, 10)
CHUNK_BYTES = sum(FMT.object_size(shard) for shard in range(FMT.shards))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A shelf on a filesystem to which nobody else writes."""
    place = Place(tmp_path)

    def space() -> Space:
        used = 0
        for name in place.files():
            with contextlib.suppress(FileNotFoundError):
                used += (tmp_path / name).stat().st_size
        return Space((1 << 40) - used, 1 << 41)

    monkeypatch.setattr(place.later, "space", space)
    return place


@pytest.fixture
def counters() -> Counters:
    """What the sweepers of a test count together."""
    return Counters()


@pytest.fixture
def make(place: Place, counters: Counters) -> Iterator[Callable[..., Sweeper]]:
    made: list[Sweeper] = []

    def make(options: dict[str, Any] | None = None, **capacity: object) -> Sweeper:
        given = {"counters": counters, **(options or {})}
        made.append(Sweeper(place.shelf, CapacityConfig.model_validate(capacity), **given))
        return made[-1]

    yield make
    for sweeper in made:
        sweeper.close()


@pytest.fixture
def later(place: Place, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass for sweepers and for the storage."""
    passed = 0.0

    def let_pass(seconds: float) -> None:
        nonlocal passed
        passed += seconds
        place.later.ahead += seconds

    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + passed,
        time=lambda: time.time() + passed,
        clock_gettime=lambda which: time.clock_gettime(which) + passed,
        thread_time=time.thread_time,
        sleep=time.sleep,
    )
    modules = sweeper_module, sweeping_module, room_module, written_module, deletion_module
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return let_pass


def objects(place: Place) -> set[str]:
    return {name for name in place.files() if name.endswith(".safetensors")}


def count(counters: Counters, name: str) -> float:
    return counters.snapshot().get(name, 0)


def fill(place: Place) -> list[str]:
    """Store ten chunks of one prompt, and a second prompt of ten that was used since."""
    old = place.put(FMT, CHUNKS, age=10 * HOUR)
    place.put(FMT, make_chunks(FMT, 10, 7), age=9 * HOUR, used=HOUR)
    return old


def test_without_bounds_nothing_is_listed_and_nothing_deleted(
    place: Place, make: Callable[..., Sweeper], counters: Counters
) -> None:
    fill(place)
    before = place.files()
    place.counting.counts.clear()
    sweeper = make()
    sweeper.step()
    assert set(place.counting.counts) == {"space"}
    assert place.files() == before
    assert counters.take()["storage_free_bytes"] > 0


def test_orphans_go_when_stores_find_too_little_room(
    place: Place, make: Callable[..., Sweeper]
) -> None:
    """Stores are refused then before they come to the storage: none of them finds it full."""
    (name, *_) = fill(place)
    folder, _, base = name.rpartition("/")
    orphan = place.write(f"{folder}/.{base}.0123456789abcdef.tmp", bytes(5000), 200 * HOUR)
    before = objects(place)
    make().step()
    assert orphan.exists()
    room = place.later.space()
    assert room is not None
    make(min_free=room.free + 1000).step()
    assert orphan.exists()
    sweeper = make({"walk": Walk(place.backend, Counters())}, min_free=room.free + 1000)
    sweeper.step()
    assert not orphan.exists()
    assert objects(place) == before
    assert sweeper.room.allows(1000)


def test_nothing_runs_if_nothing_is_bounded(place: Place, make: Callable[..., Sweeper]) -> None:
    before = named("kvshelf-capacity")
    make(min_free=0).start()
    assert not named("kvshelf-capacity") - before
    assert place.backend.bound is None


def test_above_the_bound_the_ends_of_old_prompts_go_first(
    place: Place, make: Callable[..., Sweeper], counters: Counters
) -> None:
    old = fill(place)
    evicted: list[tuple[bytes, int]] = []
    sweeper = make(
        {"on_evicted": lambda key, index: evicted.append((key, index))},
        max_bytes=20 * CHUNK_BYTES,
    )
    sweeper.step()
    gone = set(old) - objects(place)
    assert len(objects(place)) + len(gone) == 20 * FMT.shards, "only the older prompt lost chunks"
    assert gone == set(old[-len(gone) :])
    assert count(counters, "shelf_evicted_objects") == len(gone)
    assert count(counters, "shelf_evicted_bytes") == len(gone) * FMT.object_size(0)
    assert [index for _, index in evicted] == sorted((i for _, i in evicted), reverse=True)
    assert {key for key, _ in evicted} == {chunk.key for chunk in CHUNKS[-len(evicted) :]}
    found = Lease(place.backend).read(place.later.now()).finding
    assert found is not None
    assert found.nbytes <= 0.8 * 20 * CHUNK_BYTES


@pytest.mark.long
@pytest.mark.parametrize("chunks", [1.5, 2.9, 4.5, 9.05])
def test_a_bound_of_a_few_chunks_always_has_room_for_the_next_one(
    place: Place, make: Callable[..., Sweeper], chunks: float, counters: Counters
) -> None:
    """Also where the last chunk that has room leaves less than 90 % in use."""
    sweeper = make(max_bytes=int(chunks * CHUNK_BYTES))
    sweeper.step()
    for seed in range(int(chunks) + 2):
        until(lambda: sweeper.step() > 0 and sweeper.room.allows(CHUNK_BYTES))
        place.put(FMT, make_chunks(FMT, 1, seed), age=HOUR)
        assert len(objects(place)) <= int(chunks) * FMT.shards
    assert count(counters, "shelf_evicted_objects") > 0


def test_a_store_that_is_larger_than_the_bound_deletes_nothing(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None]
) -> None:
    fill(place)
    before = objects(place)
    sweeper = make(max_bytes=40 * CHUNK_BYTES)
    sweeper.step()
    assert not sweeper.room.allows(41 * CHUNK_BYTES)
    later(2 * HOUR)
    place.counting.counts.clear()
    sweeper.step()
    assert place.counting.counts["entries"] > 0
    assert objects(place) == before


def test_what_was_not_used_for_the_age_goes_and_nothing_else(
    place: Place, make: Callable[..., Sweeper]
) -> None:
    old = fill(place)
    make(max_age="5h").step()
    assert objects(place).isdisjoint(old)
    assert len(objects(place)) == 10 * FMT.shards


def test_what_one_engine_found_others_need_not_look_for(
    place: Place, make: Callable[..., Sweeper]
) -> None:
    fill(place)
    make(max_bytes=40 * CHUNK_BYTES).step()
    place.counting.counts.clear()
    others = Counters()
    make({"counters": others}, max_bytes=40 * CHUNK_BYTES).step()
    assert place.counting.counts["entries"] == 0
    used = others.take()["shelf_used_bytes"]
    assert used >= 20 * CHUNK_BYTES


def test_a_rank_that_does_not_sweep_knows_what_the_one_found_that_does(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None]
) -> None:
    fill(place)
    rank = make({"sweeps": False}, max_bytes=20 * CHUNK_BYTES)
    rank.step()
    assert place.counting.counts["entries"] == 0
    assert rank.room.allows(1 << 20), "nothing is known yet"
    make(max_bytes=20 * CHUNK_BYTES).step()
    later(60.0)
    rank.step()
    assert not rank.room.allows(10 * CHUNK_BYTES)
    assert rank.room.allows(CHUNK_BYTES)


def test_who_finds_the_lease_taken_waits(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None]
) -> None:
    fill(place)
    before = objects(place)
    lease = Lease(place.backend)
    taken = lease.take(Record(), place.later.now())
    assert taken is not None
    sweeper = make(max_bytes=CHUNK_BYTES)
    sweeper.step()
    assert objects(place) == before
    lease.release(taken, place.later.now())
    later(60.0)
    sweeper.step()
    assert objects(place) < before


def test_the_smallest_bound_acts_on_all(place: Place, make: Callable[..., Sweeper]) -> None:
    fill(place)
    make(max_bytes=30 * CHUNK_BYTES).step()
    others = Counters()
    make({"counters": others}, max_bytes=1000 * CHUNK_BYTES).step()
    assert others.take()["shelf_limit_bytes"] == 30 * CHUNK_BYTES


def in_many_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(deletion_module, "threads_for_calls", lambda _: threads)


def write_record(place: Place, **fields: Any) -> None:
    path = place.root / SWEEP
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": 1, "owner": "x", "until": 0, **fields}))


@pytest.mark.parametrize(
    ("free", "passed", "sweeps"),
    [(900, 60.0, 0), (900, 3590.0, 0), (900, 3610.0, 1), (20, 60.0, 1)],
)
def test_a_finding_of_another_engine_and_free_space_say_when_to_sweep(
    place: Place,
    make: Callable[..., Sweeper],
    counters: Counters,
    later: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    passed: float,
    sweeps: int,
) -> None:
    monkeypatch.setattr(place.later, "space", lambda: Space(free, 10000))
    write_record(
        place, finding={"seconds": 0.0, "nbytes": 10, "free": 1000, "at": place.later.now()}
    )
    sweeper = make(max_bytes=1000)
    later(passed)
    sweeper.step()
    assert count(counters, "sweeps") == sweeps


def test_a_sweep_that_is_due_soon_waits_for_no_store(
    place: Place, make: Callable[..., Sweeper]
) -> None:
    sweeper = make(max_bytes=12 * CHUNK_BYTES)
    sweeper.step()
    fill(place)
    # The last sweep is less than a second ago.
    assert sweeper.step() == 1.0
    assert len(objects(place)) == 20 * FMT.shards
    until(lambda: sweeper.step() > 0 and len(objects(place)) < 20 * FMT.shards)


def test_the_first_look_is_a_sweep_and_a_failed_one_is_not_repeated_at_once(
    place: Place, make: Callable[..., Sweeper], counters: Counters
) -> None:
    fill(place)
    place.faults.add(Fault("entries", error=TransientStorageError(5, "EIO")))
    sweeper = make(max_bytes=CHUNK_BYTES)
    sweeper.step()
    listed = place.counting.counts["entries"]
    assert listed
    sweeper.step()
    assert place.counting.counts["entries"] == listed
    assert place.backend.reads.is_closed
    assert count(counters, "sweeps") == 0
    assert Lease(place.backend).read(place.later.now()).until == 0.0, "the lease was given back"


@pytest.fixture
def failed(
    place: Place, make: Callable[..., Sweeper], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[Sweeper, list[str]]]:
    """Makes a sweep that fails in its listing, and says which files are listed from then on."""

    def sweep() -> tuple[Sweeper, list[str]]:
        fill(place)
        last = max(objects(place))
        fault = Fault("entries", last, error=lambda: TransientStorageError(5, "EIO"))
        place.faults.add(fault)
        sweeper = make(max_bytes=20 * CHUNK_BYTES)
        before = objects(place)
        sweeper.step()
        assert objects(place) == before
        fault.times = 0
        listed: list[str] = []
        meet = place.faults.meet

        def note(operation: str, name: str) -> Any:
            if operation == "entries" and name.endswith(".safetensors"):
                listed.append(name)
            return meet(operation, name)

        monkeypatch.setattr(place.faults, "meet", note)
        return sweeper, listed

    return sweep


def test_a_sweep_that_failed_goes_on_where_it_ended(
    place: Place,
    failed: Callable[[], tuple[Sweeper, list[str]]],
    later: Callable[[float], None],
    counters: Counters,
) -> None:
    sweeper, listed = failed()
    spent = count(counters, "sweep_seconds")
    taken: list[float] = []
    sweeper._allowance.take = taken.append  # type: ignore[method-assign]
    # What is stored meanwhile is in the estimate, listed or not.
    new = place.put(FMT, make_chunks(FMT, 3, 9))
    later(40)
    sweeper.step()
    # The one in which it ended, and perhaps the one before.
    assert len({name.rpartition("/")[0] for name in listed}) <= 2
    assert len(objects(place) - {*new}) <= 0.8 * 20 * FMT.shards
    assert objects(place) >= {*new}
    assert taken == [pytest.approx(count(counters, "sweep_seconds"))], "each counts once"
    assert count(counters, "sweep_seconds") > spent
    assert count(counters, "sweeps") == 1
    later(2 * HOUR)
    sweeper.step()
    assert len(listed) > len(objects(place)) / 2, "the next one begins anew"


def test_a_listing_is_not_kept_for_long(
    place: Place,
    failed: Callable[[], tuple[Sweeper, list[str]]],
    later: Callable[[float], None],
) -> None:
    sweeper, listed = failed()
    kept = weakref.ref(sweeper._begun)  # type: ignore[arg-type]
    later(601)
    trouble = place.faults.add(Fault("space", error=TransientStorageError(5, "EIO")))
    sweeper.step()
    assert kept() is None
    trouble.times = 0
    sweeper.step()
    assert len(listed) == 40 * FMT.shards / 2


def test_what_another_engine_has_swept_meanwhile_is_listed_anew(
    place: Place,
    failed: Callable[[], tuple[Sweeper, list[str]]],
    make: Callable[..., Sweeper],
    later: Callable[[float], None],
) -> None:
    sweeper, listed = failed()
    later(1)
    make(max_bytes=20 * CHUNK_BYTES).step()
    left = objects(place)
    assert len(left) <= 16 * FMT.shards
    place.put(FMT, make_chunks(FMT, 10, 9))
    listed.clear()
    later(61)
    sweeper.step()
    assert {*listed} >= left
    assert len(objects(place)) > 14 * FMT.shards


@pytest.mark.parametrize("operation", ["entries", "folders", "delete"])
def test_a_storage_that_refuses_is_named_once(
    place: Place,
    make: Callable[..., Sweeper],
    caplog: pytest.LogCaptureFixture,
    operation: str,
    later: Callable[[float], None],
) -> None:
    fill(place)
    before = objects(place)
    place.faults.add(Fault(operation, error=ReadOnlyStorageError(13, "EACCES")))
    sweeper = make(max_bytes=CHUNK_BYTES)
    for _ in range(3):
        sweeper.step()
    tries = place.counting.counts[operation]
    later(2 * HOUR)
    sweeper.step()
    assert place.counting.counts[operation] > tries, "an hour later it tries again"
    assert objects(place) == before
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "keeps the shelf within no bounds" in line]) == 1
    assert place.backend.writes.is_closed


def test_some_files_of_others_do_not_end_a_sweep(
    place: Place, make: Callable[..., Sweeper], caplog: pytest.LogCaptureFixture, counters: Counters
) -> None:
    old = fill(place)
    place.faults.add(Fault("delete", old[-1], error=PermanentStorageError(1, "EPERM")))
    sweeper = make(max_bytes=20 * CHUNK_BYTES)
    sweeper.step()
    assert old[-1] in objects(place)
    assert count(counters, "shelf_evicted_objects") > 0
    assert not caplog.records


def test_a_full_storage_is_swept(place: Place, make: Callable[..., Sweeper]) -> None:
    fill(place)
    before = objects(place)
    place.faults.add(Fault("write", error=NoSpaceStorageError(28, "ENOSPC")))
    with pytest.raises(NoSpaceStorageError):
        place.backend.write("x", [b"x"])
    assert not place.backend.writes.is_closed
    make(max_bytes=CHUNK_BYTES).step()
    assert objects(place) < before


def test_while_the_storage_does_not_answer_it_is_left_alone(
    place: Place, make: Callable[..., Sweeper]
) -> None:
    fill(place)
    place.backend.reads.trip("it does not answer")
    place.counting.counts.clear()
    make(max_bytes=CHUNK_BYTES).step()
    assert not place.counting.counts


def test_a_slow_listing_holds_up_nothing_and_counts_as_no_failure(
    place: Place, make: Callable[..., Sweeper]
) -> None:
    fill(place)
    place.backend.deadlines = Deadlines(probe=0.05, read=0.05, write=0.05)
    gate = threading.Event()
    place.faults.add(Fault("entries", wait=gate))
    sweeper = make(max_bytes=10 * CHUNK_BYTES)
    sweeper.start()
    until(lambda: place.counting.counts["entries"] > 0)
    assert sweeper.room.allows(1)
    time.sleep(0.2)  # several deadlines
    assert place.backend.reads.is_closed
    assert place.backend.late_calls == 0
    gate.set()
    until(lambda: len(objects(place)) < 20 * FMT.shards)


def test_pins_do_not_lift_the_bound(
    place: Place, make: Callable[..., Sweeper], caplog: pytest.LogCaptureFixture, counters: Counters
) -> None:
    fill(place)
    before = objects(place)
    Pins.add(place.backend, "all", Pin(namespace=FMT.namespace.folder))
    sweeper = make(max_bytes=10 * CHUNK_BYTES)
    sweeper.start()
    until(lambda: count(counters, "sweeps") > 0)
    until(lambda: not place.backend.has_room(1))
    assert objects(place) == before
    assert "pin" in caplog.text
    sweeper.close()
    assert place.backend.has_room(1)


@pytest.mark.long
def test_a_store_wakes_it(
    place: Place, make: Callable[..., Sweeper], monkeypatch: pytest.MonkeyPatch, counters: Counters
) -> None:
    sweeper = make(max_bytes=100 * CHUNK_BYTES)
    sweeper.start()
    until(lambda: count(counters, "sweeps") > 0)
    for _ in range(3):
        looks = place.counting.counts["space"]
        place.backend.has_room(1)
        until(lambda before=looks: place.counting.counts["space"] > before)


def test_stores_know_the_room_while_a_sweep_goes_on(
    place: Place, make: Callable[..., Sweeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They learn of other engines' writes before the sweep, not after it."""
    sweeper = make(max_bytes=30 * CHUNK_BYTES)
    sweeper.step()
    assert sweeper.room.allows(20 * CHUNK_BYTES)
    fill(place)
    place.put(FMT, make_chunks(FMT, 8, 11), age=HOUR)
    allowed: list[bool] = []

    def observed(*arguments: Any, **options: Any) -> Plan:
        allowed.append(sweeper.room.allows(5 * CHUNK_BYTES))
        return plan(*arguments, **options)

    monkeypatch.setattr(sweeping_module, "plan", observed)
    until(lambda: sweeper.step() > 0 and bool(allowed))
    assert allowed == [False]
    assert sweeper.room.allows(5 * CHUNK_BYTES)


@pytest.mark.parametrize("where", ["plan", "least_free"])
def test_an_error_of_its_own_keeps_the_bounds_and_is_tried_again(
    place: Place,
    make: Callable[..., Sweeper],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    later: Callable[[float], None],
    counters: Counters,
) -> None:
    fill(place)
    sweeper = make(max_bytes=19 * CHUNK_BYTES, min_free=1000)
    monkeypatch.setattr(place.backend, "bound", sweeper.room)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(sweeping_module if where == "plan" else room_module, where, broken)
        assert sweeper.step() > 0
        if where == "plan":
            assert count(counters, "sweep_errors") == 1
            assert "tried again in an hour" in caplog.text
            assert not place.backend.has_room(1 << 60), "min_free goes on"
            sweeper.step()
            assert count(counters, "sweep_errors") == 1
    assert place.backend.bound is sweeper.room
    assert len(objects(place)) == 20 * FMT.shards
    later(2 * HOUR)
    until(lambda: sweeper.step() > 0 and len(objects(place)) < 20 * FMT.shards)


def test_no_deletion_follows_from_the_bound_in_a_record(
    place: Place, make: Callable[..., Sweeper]
) -> None:
    """At most stores end."""
    fill(place)
    write_record(place, max_bytes=1, max_bytes_at=place.later.now())
    sweeper = make(max_bytes="10TiB")
    sweeper.step()
    assert len(objects(place)) == 20 * FMT.shards
    assert not sweeper.room.allows(CHUNK_BYTES)


@pytest.mark.parametrize(
    "found",
    [
        {"nbytes": 1 << 62, "seconds": 1e18},
        {"nbytes": 1, "seconds": 1e18},
        {"nbytes": 1 << 62, "seconds": 0},
        {"nbytes": 1, "seconds": 0, "free": 1 << 62},
    ],
)
def test_no_endless_pause_follows_from_a_finding(
    place: Place,
    make: Callable[..., Sweeper],
    found: dict[str, Any],
    later: Callable[[float], None],
) -> None:
    fill(place)
    write_record(place, finding={"at": place.later.now() - 1, **found})
    sweeper = make(max_bytes=10 * CHUNK_BYTES)
    assert sweeper.step() <= HOUR
    if found["nbytes"] > 1 or "free" in found:
        assert len(objects(place)) <= 8 * FMT.shards
        assert sweeper.room.allows(CHUNK_BYTES)
    else:
        later(HOUR)
        sweeper.step()
        assert len(objects(place)) <= 8 * FMT.shards


def test_a_wrong_clock_of_the_storage_deletes_nothing_because_of_its_age(
    place: Place, make: Callable[..., Sweeper], caplog: pytest.LogCaptureFixture
) -> None:
    place.later.ahead = 0.0
    place.now = time.time()
    place.put(FMT, CHUNKS, age=60.0)
    place.later.alone = True
    place.later.ahead = 8 * 24 * HOUR
    before = objects(place)
    make(max_age="7d").step()
    assert objects(place) == before
    assert "ahead of this machine's" in caplog.text
    # Bounds in bytes go on.
    place.later.ahead += 120.0
    make(max_age="7d", max_bytes=5 * CHUNK_BYTES).step()
    assert 0 < len(objects(place)) <= 5 * FMT.shards


def test_the_record_is_small_and_readable(place: Place, make: Callable[..., Sweeper]) -> None:
    fill(place)
    make(max_bytes=40 * CHUNK_BYTES, max_age="7d").step()
    found = json.loads((place.root / SWEEP).read_bytes())
    assert found["version"] == 1
    assert found["max_bytes"] == 40 * CHUNK_BYTES
    assert found["finding"]["max_age"] == 7 * 86400
    assert found["finding"]["nbytes"] >= 20 * CHUNK_BYTES


def test_a_sweep_ends_with_its_engine(place: Place, make: Callable[..., Sweeper]) -> None:
    fill(place)
    before = objects(place)
    listing = threading.Event()
    place.faults.add(Fault("entries", wait=listing))
    running = named("kvshelf-capacity")
    with closing(make(max_bytes=CHUNK_BYTES)) as sweeper:
        sweeper.start()
        until(lambda: place.counting.counts["entries"] > 0)
    listing.set()
    until(lambda: not named("kvshelf-capacity") - running)
    assert objects(place) == before


# ------------------------------------------------------------------------- while a sweep goes on


@pytest.fixture
def used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let listings of small shelves be used again, as those of large ones are."""
    monkeypatch.setattr(sweeping_module, "_LEAST_OBJECTS", 1)


def test_a_listing_is_used_again_while_it_is_fresh(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None], used_again: None
) -> None:
    old = fill(place)
    sweeper = make(max_bytes=20 * CHUNK_BYTES)
    sweeper.step()
    listings = place.counting.counts["entries"]
    assert listings
    new: list[str] = []
    for seed in range(20, 23):
        new += place.put(FMT, make_chunks(FMT, 3, seed))
        later(30.0)
        sweeper.step()
        assert len(objects(place)) <= 0.9 * 20 * FMT.shards
    assert place.counting.counts["entries"] == listings, "a part of the shelf shows its growth"
    assert objects(place) >= set(new)
    assert objects(place).isdisjoint(old[-4:])
    assert count(sweeper._counters, "sweeps") == 1
    # It is no longer fresh.
    place.put(FMT, make_chunks(FMT, 4, 40))
    later(600.0)
    sweeper.step()
    assert place.counting.counts["entries"] > listings


def test_what_others_say_deletes_nothing_from_a_plan(
    place: Place,
    make: Callable[..., Sweeper],
    later: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    used_again: None,
) -> None:
    """Another program fills the filesystem: the shelf has not grown."""
    fill(place)
    sweeper = make(max_bytes=20 * CHUNK_BYTES)
    sweeper.step()
    left = objects(place)
    space = place.later.space()
    assert space is not None
    monkeypatch.setattr(place.later, "space", lambda: Space(space.free - (1 << 30), space.total))
    for _ in range(3):
        later(30.0)
        sweeper.step()
    assert objects(place) == left
    assert sweeper.room.allows(CHUNK_BYTES), "it was found out"


def test_pins_are_read_again_before_a_plan_goes_on(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None], used_again: None
) -> None:
    fill(place)
    sweeper = make(max_bytes=20 * CHUNK_BYTES)
    sweeper.step()
    left = objects(place)
    Pins.add(place.backend, "all", Pin(keys=[chunk.key for chunk in CHUNKS]))
    place.put(FMT, make_chunks(FMT, 4, 20))
    later(120.0)
    sweeper.step()
    gone = left - objects(place)
    assert gone
    assert not any(chunk.key.hex() in name for chunk in CHUNKS for name in gone)


@pytest.mark.parametrize(("passes", "most"), [(0.0, 20), (100.0, 2), (45.0, 15)])
def test_a_plan_ends_when_the_process_was_paused_or_it_is_old(
    place: Place,
    make: Callable[..., Sweeper],
    later: Callable[[float], None],
    passes: float,
    most: int,
) -> None:
    fill(place)
    before = len(objects(place))
    sweeper = make({"on_evicted": lambda *_: later(passes)}, max_bytes=CHUNK_BYTES)
    sweeper.step()
    gone = (before - len(objects(place))) // FMT.shards
    assert 0 < gone <= most
    if passes == 0.0:
        assert gone == 20
    found = Lease(place.backend).read(place.later.now())
    assert found.finding is not None
    assert (found.finding.max_age, found.until) == (None, 0.0)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_sweep_ends_when_the_lease_is_lost_and_keeps_it_until_then(
    place: Place,
    make: Callable[..., Sweeper],
    later: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
) -> None:
    in_many_threads(monkeypatch, threads)
    fill(place)
    other = Lease(place.backend)
    evicted: list[int] = []

    def on_evicted(key: bytes, index: int) -> None:
        evicted.append(index)
        later(25.0)
        now = place.later.now()
        record = other.read(now)
        if len(evicted) == 6:
            assert now < record.until < now + 61
            write_record(place, owner="other", until=now + 50)

    sweeper = make({"on_evicted": on_evicted}, max_bytes=CHUNK_BYTES)
    sweeper.step()
    assert 6 <= len(evicted) <= 8
    assert other.read(place.later.now()).owner == "other"


# ----------------------------------------------------------------------------------------- quiet


def test_at_the_bound_little_is_read(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None]
) -> None:
    fill(place)
    Pins.add(place.backend, "all", Pin(namespace=FMT.namespace.folder))
    sweeper, rank = (
        make({"sweeps": sweeps}, max_bytes=18 * CHUNK_BYTES) for sweeps in (True, False)
    )
    for each, most in ((sweeper, 22), (rank, 3)):
        each.step()
        place.counting.counts.clear()
        for _ in range(200):
            later(0.1)
            assert not each.room.allows(CHUNK_BYTES)
            each._turn()
        assert 0 < place.counting.counts["open"] <= most
        assert place.counting.counts["entries"] == 0


def test_who_loses_the_lease_asks_again_after_some_seconds(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None]
) -> None:
    fill(place)
    sweeper = make(max_bytes=CHUNK_BYTES)
    other = Lease(place.backend)
    assert other.take(Record(), place.later.now()) is not None
    place.counting.counts.clear()
    for _ in range(20):
        later(1.0)
        sweeper.room.allows(1)
        sweeper._turn()
    assert place.counting.counts["now"] <= 3
    assert place.counting.counts["open"] <= 7


def test_who_starts_in_the_first_sweep_of_another_learns_its_finding_soon(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None]
) -> None:
    fill(place)
    lease = Lease(place.backend)
    taken = lease.take(Record(), place.later.now())
    assert taken is not None
    sweeper = make(max_bytes=20 * CHUNK_BYTES)
    sweeper._turn()
    assert sweeper.room.allows(CHUNK_BYTES)
    finding = Finding(place.later.now(), 18 * CHUNK_BYTES, 0.0)
    lease.release(replace(taken, finding=finding), place.later.now())
    later(1.1)
    assert sweeper.room.allows(CHUNK_BYTES)
    # It wakes up because a store asks.
    later(1.1)
    sweeper._turn()
    assert not sweeper.room.allows(4 * CHUNK_BYTES)


def test_engines_that_lose_the_lease_together_come_back_apart(
    place: Place,
    make: Callable[..., Sweeper],
    later: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them saw it free; one was faster."""
    fill(place)
    tries: list[Lease] = []
    monkeypatch.setattr(Lease, "take", lambda lease, *_: tries.append(lease))
    engines = [make(max_bytes=CHUNK_BYTES) for _ in range(8)]
    seconds = []
    for second in range(20):
        before = len(tries)
        for engine in engines:
            engine.step()
        seconds += [second] * (len(tries) - before)
        later(1.0)
    assert seconds[:8] == [0] * 8
    assert seconds[8] >= 5
    assert len(set(seconds[8:16])) > 1


def test_stores_that_are_refused_wake_it_once_a_look(
    place: Place, make: Callable[..., Sweeper]
) -> None:
    fill(place)
    Pins.add(place.backend, "all", Pin(namespace=FMT.namespace.folder))
    sweeper = make(max_bytes=18 * CHUNK_BYTES)
    assert 0 < sweeper._turn() <= 60.0
    looks = place.counting.counts["space"]
    for _ in range(50):
        assert not sweeper.room.allows(CHUNK_BYTES)
        pause = sweeper._turn()
        assert pause is not None
        assert pause <= 1.0
    assert place.counting.counts["space"] == looks


# ------------------------------------------------------------- storages that do not tell free space


@pytest.fixture
def untold(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.later, "space", lambda: None)


@pytest.mark.long
def test_four_engines_do_not_exceed_the_bound_together(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None], untold: None
) -> None:
    bound = 60
    engines = [make(max_bytes=bound * CHUNK_BYTES) for _ in range(4)]
    for engine in engines:
        engine.step()
    stored = most = 0
    for second in range(60):
        later(3.0)
        for number, engine in enumerate(engines):
            engine._turn()
            if not engine.room.begin(CHUNK_BYTES):
                continue
            place.put(FMT, make_chunks(FMT, 1, 100 + 4 * second + number))
            engine.room.end(CHUNK_BYTES, written=True)
            stored += 1
        most = max(most, len(objects(place)) // FMT.shards)
    assert most <= 1.1 * bound
    assert stored > 0.9 * 4 * 60


def test_a_lie_about_what_was_written_deletes_nothing_and_ends_stores_for_a_while(
    place: Place, make: Callable[..., Sweeper], later: Callable[[float], None], untold: None
) -> None:
    fill(place)
    before = objects(place)
    sweeper = make(max_bytes=40 * CHUNK_BYTES)
    sweeper.step()
    place.write(f"{WRITTEN}/0123456789abcdef-{10**17}")
    later(61.0)
    # A sweep finds out that nothing was written, and counts from there.
    sweeper.step()
    assert objects(place) == before
    assert sweeper.room.allows(CHUNK_BYTES)


def test_the_last_words_of_a_process_are_what_it_wrote(
    place: Place, make: Callable[..., Sweeper], counters: Counters, untold: None
) -> None:
    sweeper = make(max_bytes=40 * CHUNK_BYTES)
    sweeper.start()
    until(lambda: count(counters, "sweeps") > 0)
    assert sweeper.room.begin(77)
    sweeper.room.end(77, written=True)
    sweeper.close()
    (path,) = (place.root / WRITTEN).iterdir()
    assert path.name.endswith("-77")
