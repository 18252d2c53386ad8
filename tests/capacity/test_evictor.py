"""An evictor: when it sweeps, what it deletes then, and what stores may write."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvshelf.backends.base import Space
from kvshelf.backends.oserrors import no_space, storage_error
from kvshelf.capacity import evictor as evictor_module
from kvshelf.capacity import keepers, limits
from kvshelf.capacity.budget import least_free
from kvshelf.capacity.evictor import Evictor
from kvshelf.capacity.limits import DAY, FANS, HOUR
from kvshelf.capacity.sweep import KEEPERS
from kvshelf.config import CapacityConfig
from kvshelf.errors import (
    BoundReachedError,
    NoSpaceStorageError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.shelf.pins import PINS, Pin, Pins
from tests.capacity.shelves import FMT, SIZE, Place, chunks, salted, tail_of
from tests.sim.memory import MemoryStorage
from tests.sim.storage import Fault, FaultyStorage
from tests.support import simulated
from tests.support.simulated import DIRECTORY, NAMESPACE, S3, Costs, Fleet
from tests.support.waiting import until

MIB, GIB = 1 << 20, 1 << 30
GROUP = "ab" * 8


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


# ----------------------------------------------------------------------------- what is deleted


def test_without_bounds_only_leftovers_go(place: Place) -> None:
    place.put(FMT, chunks(5), age=900 * DAY)
    tail = place.put(FMT, [tail_of()], age=2 * HOUR)
    left = place.write(
        f"{FMT.namespace.folder}/_/aa/.{'aa' * 32}-0-0of2.safetensors.{'0' * 16}.tmp", age=2 * HOUR
    )
    evictor = place.evictor()
    place.round(evictor)
    assert place.objects().isdisjoint(tail) and len(place.objects()) == 5 * FMT.shards
    assert not left.exists()
    assert place.count("leftovers_deleted") == len(tail) + 1
    assert place.count("shelf_evicted_objects") == 0


def test_above_the_bound_the_oldest_go_and_of_a_prompt_its_end(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old = place.put(FMT, chunks(10), age=10 * HOUR)
    new = place.put(FMT, chunks(10, seed=7), age=9 * HOUR, used=HOUR)
    place.round(place.evictor(max_bytes=16 * SIZE))
    left = place.objects()
    assert set(new) < left and len(left) <= 0.93 * 16 * FMT.shards
    assert {name for name in old if name in left} == set(old[: len(left) - len(new)])
    assert place.count("shelf_evicted_objects") == 20 * FMT.shards - len(left)
    line = next(record.message for record in caplog.records if "deleted" in record.message)
    assert f"(size {20 * FMT.shards - len(left)})" in line


def test_what_was_not_used_for_max_age_goes_and_nothing_else(place: Place) -> None:
    old = place.put(FMT, chunks(3), age=3 * DAY)
    used = place.put(FMT, chunks(3, seed=1), age=3 * DAY, used=DAY)
    place.round(place.evictor(max_age="2d"))
    assert place.objects() == set(used) and old


def test_group_has_a_quota_and_pushes_out_no_other(place: Place) -> None:
    mine = [salted(chunk, GROUP) for chunk in chunks(20)]
    place.put(FMT, mine, age=HOUR)
    others = place.put(FMT, [salted(chunk, "cd" * 8) for chunk in chunks(9)], age=9 * HOUR)
    bare = place.put(FMT, chunks(30), age=9 * HOUR)
    place.round(place.evictor(group_max_bytes=10 * SIZE))
    left = place.objects()
    assert {*others, *bare} <= left
    assert 8 <= sum(f"/{GROUP}/" in name for name in left) / FMT.shards <= 9.3


def test_more_than_the_storage_says_is_used_is_not_believed(fleet: Fleet) -> None:
    """Files may share their blocks in ways that no listing shows, or have holes."""
    fill(fleet, 50, HOUR)
    fleet.storage.put(f"{NAMESPACE}/_/ab/{'ab' * 32}-0-0of1.safetensors", 60 * GIB)
    fleet.storage.free = lambda: Space(1000 * MIB - (fleet.storage.nbytes - 60 * GIB), 1000 * MIB)
    writer = fleet.add(1.0, max_bytes=100 * MIB)
    fleet.run(20)
    assert fleet.count("shelf_evicted_objects") == 0 and not writer.dropped
    assert writer.counters.gauges()["shelf_used_bytes"] <= 75 * MIB


def test_pins_keep_what_they_name_and_do_not_lift_the_bound(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    pinned = place.put(FMT, chunks(5), age=9 * DAY)
    place.put(FMT, chunks(5, seed=1), age=HOUR)
    Pins.add(place.backend, "x", Pin(keys=[chunk.key for chunk in chunks(5)]))
    evictor = place.evictor(max_bytes=4 * SIZE, max_age="1d")
    # The first sweep deletes something, and the next one shows that no more will.
    for soon in (True, False):
        place.round(evictor)
        assert place.objects() == set(pinned)
        assert evictor.allows(SIZE) is soon
    assert "of max_bytes" in caplog.text


@pytest.mark.parametrize("middle", ["{index}t1", "4294967295"])
def test_empty_file_with_the_name_of_a_pinned_chunk_takes_no_pin(place: Place, middle: str) -> None:
    names = place.put(FMT, chunks(9), age=9 * DAY)
    Pins.add(place.backend, "x", Pin(keys=[chunk.key for chunk in chunks(9)]))
    for chunk in chunks(9):
        name = f"{chunk.key.hex()}-{middle.format(index=chunk.index)}-0of1.safetensors"
        folder = f"{FMT.namespace.folder}/_/{name[:2]}"
        place.write(f"{folder}/{name}", b"", age=9 * DAY)
    place.round(place.evictor())
    assert set(names) <= place.objects()
    # Nor is a chunk that is not pinned the first to go.
    place.path(f"{PINS}/x.json").unlink()
    place.round(place.evictor(max_bytes=8 * SIZE))
    left = {name.split("-")[-2] for name in place.objects() & set(names)}
    assert left == {str(index) for index in range(len(left))} and len(left) >= 6


def test_pin_of_a_later_version_keeps_everything_and_is_named(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    names = place.put(FMT, chunks(5), age=9 * DAY)
    place.write(f"{PINS}/x.json", b'{"version": 99}')
    place.round(place.evictor(max_bytes=SIZE))
    assert place.objects() == set(names)
    assert "the pin x is not known" in caplog.text
    # Nor is anything deleted while pins cannot be read.
    place.faults.add(Fault("list", f"{PINS}/*", error=TransientStorageError(errno.EIO, "down")))
    with pytest.raises(TransientStorageError):
        place.round(place.evictor(max_bytes=SIZE))
    assert place.objects() == set(names)


def test_ages_pause_while_clocks_differ_and_bounds_hold(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.later.alone = True
    place.later.ahead = 3 * DAY + 2 * HOUR
    place.put(FMT, chunks(10), age=9 * DAY)
    place.put(FMT, [tail_of()], age=9 * DAY)
    evictor = place.evictor(max_age="1d")
    place.round(evictor)
    assert len(place.objects()) == 11 * FMT.shards
    assert "nothing is deleted because of its age" in caplog.text
    place.round(place.evictor(max_bytes=5 * SIZE))
    assert len(place.objects()) <= 5 * FMT.shards
    assert place.counters.gauges()["clock_difference_seconds"] >= 2 * HOUR


def test_folder_that_cannot_be_listed_is_named_and_the_rest_is_bounded(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    names = place.put(FMT, chunks(40), age=HOUR)
    bad = names[0].rpartition("/")[0]
    place.faults.add(
        Fault("entries", f"{bad}/*", error=TransientStorageError(errno.EIO, "bad block", bad))
    )
    place.round(place.evictor(max_bytes=20 * SIZE))
    left = place.objects()
    inside = {name for name in names if name.startswith(f"{bad}/")}
    assert inside <= left and len(left) - len(inside) <= 19 * FMT.shards
    assert place.counters.gauges()["unlisted_folders"] == 1
    assert f"{bad} cannot be listed" in caplog.text


@pytest.mark.parametrize("code", [errno.EIO, errno.EBUSY, errno.EACCES])
@pytest.mark.parametrize("operation", ["delete", "info"])
@pytest.mark.parametrize("bad", ["the oldest object", "a leftover"])
def test_sweep_with_a_file_that_cannot_be_deleted_deletes_the_others(
    place: Place, caplog: pytest.LogCaptureFixture, bad: str, operation: str, code: int
) -> None:
    """Each sweep has to make room for one chunk, for which the oldest would go."""
    [name, *_] = place.put(FMT, chunks(1), age=20 * HOUR)
    place.put(FMT, chunks(9, seed=1), age=10 * HOUR)
    if bad == "a leftover":
        name = f"{FMT.namespace.folder}/_/aa/.{'aa' * 32}-0-0of2.safetensors.{'0' * 16}.tmp"
        place.write(name, age=2 * HOUR)
    error, tried = storage_error(OSError(code, "bad"), "x", name), list[float]()
    place.faults.add(Fault(operation, name, error=lambda: tried.append(time.monotonic()) or error))
    evictor = place.evictor(max_bytes=10 * SIZE)
    for turn in range(8):
        place.put(FMT, chunks(1, seed=9 + turn))
        place.round(evictor)
    assert len(place.objects()) <= 10 * FMT.shards
    assert len(tried) == (bad != "a leftover" or operation != "info")
    assert ("could not be deleted" in caplog.text) is bool(tried)
    assert place.count("sweep_errors") == 0 and evictor.schedule.blocked_until == 0
    time.sleep(HOUR)
    place.put(FMT, chunks(1, seed=17))
    place.round(evictor)
    assert len(tried) in (0, 2)


def test_sweep_that_fails_is_followed_by_one_of_another_slice(place: Place) -> None:
    place.put(FMT, chunks(5), age=HOUR)
    evictor, first = place.evictor(max_bytes=SIZE), 7
    evictor._next = first
    place.faults.add(Fault("folders", error=TransientStorageError(errno.EIO, "down", "x")))
    with pytest.raises(TransientStorageError):
        evictor.sweep()
    assert evictor._next == first + 1


def test_who_may_not_delete_says_so_once_and_tries_again_in_an_hour(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.put(FMT, chunks(40), age=HOUR)
    place.faults.add(Fault("delete", error=PermanentStorageError(errno.EPERM, "no", "x")))
    evictor = place.evictor(max_bytes=SIZE)
    for _ in range(5):
        evictor._turn()
    assert evictor.schedule.blocked_until > time.monotonic() + 3000
    assert caplog.text.count("listing or deleting is not allowed") == 1
    assert not evictor.allows(SIZE)


def test_error_of_its_own_lifts_no_bound(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.put(FMT, chunks(9), age=HOUR)
    evictor = place.evictor(max_bytes=9 * SIZE)
    evictor._turn()
    monkeypatch.setattr(evictor_module, "delete", lambda *_, **__: 1 / 0)
    evictor.schedule.ended_at = 0.0
    evictor.budget.refused, evictor.budget.credit = True, 0.0
    assert evictor._turn() is not None and place.count("sweep_errors") == 1
    assert "a sweep failed" in caplog.text and not evictor.allows(9 * SIZE)


# ----------------------------------------------------------------------------- stores


def test_end_while_it_works_is_no_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    evictor, end = place.evictor(max_bytes=SIZE), threading.Event()
    monkeypatch.setattr(evictor, "_look_at_space", lambda: setattr(evictor, "_end", end))
    assert evictor._turn() is not None
    assert evictor._turn() is None and end.is_set()
    assert place.count("sweep_errors") == 0


@pytest.mark.parametrize("costs", [DIRECTORY, S3], ids=["directory", "s3"])
def test_what_is_in_use_stays_where_the_rest_of_the_shelf_changes(
    monkeypatch: pytest.MonkeyPatch, costs: Costs
) -> None:
    fleet = Fleet(monkeypatch, costs)
    writer = fleet.add(4.0, max_bytes=200 * MIB, nbytes=MIB)
    fleet.run(60)
    before = {row.name for row in fleet.storage.list()}
    assert fleet.store(writer)
    [used] = {row.name for row in fleet.storage.list()} - before
    for _ in range(8):
        # After about 46 seconds what is not used is gone.
        fleet.run(30)
        # As engines do: on S3 an object is written anew at half of the age of eviction.
        age = writer.evictor.order.evicts_after or math.inf
        fleet.storage.touch(used, fleet.now - age / 2)
    assert fleet.count("shelf_evicted_objects") > 400
    assert fleet.storage.entry(used) is not None


def test_store_that_ends_during_a_sweep_makes_no_sweep_vain(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    evictor = place.evictor(max_bytes=10 * SIZE)
    assert evictor.allows(SIZE)
    evictor._turn()
    place.put(FMT, chunks(2))
    assert evictor.begin(SIZE)
    sweep = evictor._lister.sweep

    def end(*arguments: Any) -> Any:
        evictor.end(SIZE, written=True)
        return sweep(*arguments)

    monkeypatch.setattr(evictor._lister, "sweep", end)
    place.round(evictor)
    assert evictor.schedule.folders_without_gain == 0


@pytest.mark.parametrize(
    ("total", "memory", "expected"),
    [(GIB, False, GIB // 20), (1 << 50, False, 20 * GIB), (GIB, True, GIB // 10), (0, False, 0)],
)
def test_what_stays_free_depends_on_the_storage(total: int, memory: bool, expected: int) -> None:
    assert least_free(Space(0, total, memory)) == expected


def test_it_bounds_stores_from_its_start_to_its_end(place: Place) -> None:
    place.put(FMT, chunks(9), age=HOUR)
    place.later.ahead = 0.0
    with closing(place.evictor(max_bytes=4 * SIZE)) as evictor:
        evictor.start()
        evictor.start()
        assert place.backend.bound is evictor
        until(lambda: len(place.objects()) <= 4 * FMT.shards)
        with pytest.raises(BoundReachedError):
            place.backend.write("x/z", [bytes(4 * SIZE)])
    assert place.backend.bound is None
    place.backend.write("x/y", [bytes(9 * SIZE)])
    until(lambda: not os.listdir(place.path(KEEPERS)), "others learn at once that it has gone")


def test_evictor_of_a_tier_counts_what_it_evicts_and_nothing_of_the_shelf(place: Place) -> None:
    place.put(FMT, chunks(9), age=HOUR)
    bound = CapacityConfig(max_bytes=4 * SIZE)
    evictor = Evictor(place.backend, bound, place.counters, prefix="disk_tier_")
    evictor.budget.unknown = 0
    place.round(evictor)
    assert place.count("disk_tier_evicted_objects") >= 5 * FMT.shards
    assert all(name.startswith("disk_tier_") for name in place.counters.snapshot())
    assert place.counters.gauges().keys() == {"disk_tier_used_bytes"}


def test_nothing_is_stored_before_the_first_sweep_and_then_at_once(place: Place) -> None:
    place.later.ahead = 0.0
    with closing(place.evictor(max_bytes=100 * SIZE)) as evictor:
        evictor.budget.asked = True
        assert evictor.budget.credit == 0 and evictor.allows(SIZE)
        evictor.start()
        begun = time.monotonic()
        assert evictor.begin(SIZE)
        assert time.monotonic() - begun < 1 and place.count("sweeps") == 1


def test_write_without_room_waits_for_a_sweep_and_a_step_does_not(place: Place) -> None:
    place.put(FMT, chunks(10), age=HOUR)
    evictor = place.evictor(max_bytes=10 * SIZE)
    begun, results = time.monotonic(), []
    assert evictor.allows(SIZE) and time.monotonic() - begun < 0.01
    thread = threading.Thread(target=lambda: results.append(evictor.begin(SIZE)))
    thread.start()
    time.sleep(2)
    assert not results
    evictor._turn()
    thread.join(2)
    assert results == [True] and evictor.budget.begun == SIZE
    # Where no sweep comes it ends.
    assert not evictor.begin(5 * SIZE) and 5 < time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "state",
    [
        {"schedule.folders_without_gain": FANS},
        {"schedule.blocked_until": math.inf},
        {"budget.free": 0.0},
        {"_end": threading.Event()},
    ],
    ids=lambda state: next(iter(state)),
)
def test_write_for_which_no_sweep_can_make_room_does_not_wait(
    place: Place, state: dict[str, Any]
) -> None:
    evictor = place.evictor(max_bytes=10 * SIZE)
    [(path, value)] = state.items()
    *parts, name = path.split(".")
    setattr(getattr(evictor, parts[0]) if parts else evictor, name, value)
    begun = time.monotonic()
    assert not evictor.allows(SIZE) and not evictor.begin(SIZE)
    assert time.monotonic() - begun < 0.1


# ----------------------------------------------------------------------------- a disk nearly full


class Disk:
    """A disk that others fill too."""

    def __init__(self, fleet: Fleet, total: int, others: int) -> None:
        self.fleet, self.total, self.others = fleet, total, others
        fleet.storage.free = lambda: Space(max(0, self.free), total)

    @property
    def free(self) -> int:
        return self.total - self.others - self.fleet.storage.nbytes


def fill(fleet: Fleet, count: int, age: float) -> None:
    writer = fleet.add()
    for _ in range(count):
        assert fleet.store(writer)
    fleet.now += age
    writer.stopped = True


@pytest.mark.long
def test_store_on_a_disk_nearly_full_is_paid_for_by_the_oldest(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fill(fleet, 1000, 2 * HOUR)
    disk = Disk(fleet, 3300 * MIB, 2180 * MIB)
    before = fleet.storage.nbytes
    writer = fleet.add(0.4)
    fleet.run(300)
    assert writer.dropped < 0.1 * writer.offered
    assert caplog.text.count("each store deletes as many bytes") == 1
    assert abs(fleet.storage.nbytes - before) < 0.05 * before
    # Others write: the shelf does not shrink, nor does it grow.
    disk.others += 100 * MIB
    fleet.run(300)
    assert abs(fleet.storage.nbytes - before) < 0.05 * before
    assert writer.dropped < 0.1 * writer.offered
    writer.stopped = True
    at_last = fleet.storage.nbytes
    fleet.run(600)
    assert fleet.storage.nbytes == at_last


def test_store_on_a_disk_nearly_full_takes_nothing_young(fleet: Fleet) -> None:
    """What was never used ages twice as fast: it goes before what was used 62 minutes ago."""
    fill(fleet, 20, 60.0)
    for row in fleet.storage.list():
        if "of1" in row.name:
            fleet.storage.touch(row.name)
    fleet.now += 22 * 60
    fill(fleet, 300, 40 * 60)
    young = {row.name for row in fleet.storage.list() if row.mtime > fleet.now - HOUR}
    Disk(fleet, 10000 * MIB, 9400 * MIB)
    writer = fleet.add(1.0)
    fleet.run(120)
    assert 0 < fleet.count("shelf_evicted_objects") <= 20
    assert young <= {row.name for row in fleet.storage.list()}
    # It does not look again and again.
    assert writer.dropped and writer.cpu < 0.05 * 120


def test_reserve_of_a_disk_is_kept_by_half_where_deletion_frees_nothing(fleet: Fleet) -> None:
    """As where a backup has hard links to all objects."""
    fill(fleet, 3000, 2 * HOUR)
    disk = Disk(fleet, 10000 * MIB, 6600 * MIB)
    deleted = fleet.storage._delete

    def delete(name: str) -> Any:
        entry = fleet.storage.entry(name)
        disk.others += 0 if entry is None else entry.size
        return deleted(name)

    fleet.storage._delete = delete  # type: ignore[method-assign]
    fleet.add(10.0)
    fleet.run(120)
    assert 230 * MIB <= disk.free <= 270 * MIB


def test_with_max_bytes_nobody_pays(fleet: Fleet) -> None:
    fill(fleet, 300, 5 * HOUR)
    Disk(fleet, 10000 * MIB, 9500 * MIB)
    writer = fleet.add(1.0, max_bytes=9000 * MIB)
    fleet.run(60)
    assert writer.dropped == writer.offered and fleet.count("shelf_evicted_objects") == 0


def test_stores_go_on_soon_after_another_program_filled_the_disk_for_a_while(fleet: Fleet) -> None:
    disk = Disk(fleet, 10000 * MIB, 0)
    writer = fleet.add(2.0, max_bytes=100 * MIB)
    fleet.run(300)
    disk.others = 10000 * MIB
    fleet.run(5)
    assert writer.dropped
    disk.others, before = 0, writer.dropped
    fleet.run(30)
    assert writer.dropped - before <= 4


@pytest.fixture
def in_storage_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers live in the time of the storage, and their writes do not wait."""
    clock = SimpleNamespace(**vars(time) | {"time": lambda: time.time() + 3 * DAY})
    monkeypatch.setattr(evictor_module, "time", clock)
    monkeypatch.setattr(limits, "WAIT_SECONDS", 0.0)


@pytest.mark.usefixtures("in_storage_time")
@pytest.mark.parametrize("short_of", ["inodes", "quota"])
@pytest.mark.parametrize("bound", [{}, {"max_bytes": "1GiB"}])
def test_stores_where_inodes_or_quota_ran_out_are_paid_for_by_the_oldest(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bound: dict[str, str],
    short_of: str,
) -> None:
    old = place.put(FMT, chunks(30), age=3 * HOUR)
    write = place.faults.write

    def refuse(name: str, *arguments: Any) -> Any:
        if len(place.objects()) >= len(old):
            raise no_space(errno.ENOSPC, "not written", name, short_of)
        return write(name, *arguments)

    monkeypatch.setattr(place.faults, "write", refuse)
    place.age(place.path(old[-1]), 4 * HOUR)
    evictor = place.evictor(**bound)
    place.backend.bound, place.backend.on_full = evictor, evictor.found_full
    stored = 0
    for chunk in chunks(20, seed=1):
        evictor._turn()
        with suppress(StorageError):
            stored += len(place.put(FMT, [chunk]))
        place.backend.writes.close()
    assert stored >= 36
    assert len(place.objects()) >= len(old) - 10 and old[-1] not in place.objects()
    assert caplog.text.count(f"its {short_of} ran out") == 1


def test_what_came_with_old_times_stays_on_a_disk_nearly_full(tmp_path: Path) -> None:
    place = Place(tmp_path, ahead=0.0)
    names = place.put(FMT, chunks(50), age=300 * DAY)
    evictor = place.evictor()
    evictor._frees_disk_space, evictor._free, evictor._largest, evictor.budget.refused = (
        True,
        0.0,
        SIZE,
        True,
    )
    place.round(evictor)
    assert place.objects() == set(names)


@pytest.mark.real
@pytest.mark.parametrize("local", [True, False])
def test_old_temporaries_on_a_disk_without_a_free_byte_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """No marker can be written there: the time is this machine's, or that of an empty file."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        place = Place(tmp_path)
        clock = SimpleNamespace(**vars(time) | {"time": lambda: time.time() + 3 * DAY})
        monkeypatch.setattr(evictor_module, "time", clock)
        place.faults._stated = {"local_path": str(place.root) if local else ""}
        names = place.put(FMT, chunks(4))
        for fan in ("00", "7f", "ff"):
            name = f".{fan * 32}-0-0of2.safetensors.{'0' * 16}.tmp"
            place.write(f"{FMT.namespace.folder}/_/{fan}/{name}", bytes(4096), age=2 * HOUR)
        with suppress(OSError), (tmp_path / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert not os.statvfs(tmp_path).f_bavail
        evictor = place.evictor()
        place.backend.on_full = evictor.found_full
        with pytest.raises(NoSpaceStorageError):
            place.backend.write("x/y", [bytes(4096)])
        for _ in range(20):
            evictor._turn()
        # A marker that is written where there is room again takes one of the three blocks.
        markers = sum(marker.stat().st_blocks > 0 for marker in (tmp_path / KEEPERS).iterdir())
        assert os.statvfs(tmp_path).f_bavail + markers >= 3 and place.objects() == set(names)
        assert not list(tmp_path.rglob("*.tmp"))
        place.backend.writes.close()
        place.backend.write("x/y", [bytes(4096)])
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


# ----------------------------------------------------------------------------- markers


def test_keepers_know_how_many_they_are_and_the_storage_s_time() -> None:
    storage = MemoryStorage()
    storage.ahead = 500.0
    for number in range(3):
        now, place, count = keepers.say(storage, f"{9 - number:016x}", {"max_bytes": 7})
        assert (place, count) == (0, number + 1) and abs(now - time.time() - 500.0) < 1
    assert keepers.say(storage, f"{9:016x}", {"max_bytes": 7})[1:] == (2, 3)
    keepers.say(storage, "a" * 16, {"max_bytes": 5, "max_age": math.inf})
    said = keepers.read(storage)
    assert sorted(one["max_bytes"] for one in said.values()) == [5, 7, 7, 7]
    assert keepers.bounds(said) == {"max_bytes": 5}, "the smallest, and none without an end"


def test_keeper_that_is_gone_counts_for_ten_minutes(fleet: Fleet) -> None:
    one, other = (fleet.add(0.1, max_bytes=GIB) for _ in range(2))
    fleet.run(400)
    assert one.evictor.budget.keepers == other.evictor.budget.keepers == 2
    other.stopped = True
    fleet.run(1000)
    assert one.evictor.budget.keepers == 1


def test_forged_markers_are_bounded_and_decide_nothing(fleet: Fleet) -> None:
    for number in range(3000):
        data = json.dumps({"evicts_after": 1e-9, "max_bytes": 1}).encode()
        fleet.storage.put(f"{KEEPERS}/{number:016x}", len(data), data)
    fill(fleet, 300, HOUR)
    writer = fleet.add(1.0, max_bytes=1000 * MIB)
    fleet.run(60)
    assert writer.evictor.budget.keepers <= limits.MOST_HEARTBEATS
    assert fleet.count("shelf_evicted_objects") == 0 and writer.dropped < 0.05 * writer.offered
    fleet.now += 2 * DAY
    fleet.run(600)
    # They are leftovers as well.
    assert not [name for name in fleet.storage._tree[KEEPERS] if name.startswith("0000")]


def test_markers_from_the_future_count_for_nobody_and_hide_nobody() -> None:
    storage = MemoryStorage()
    storage.ahead = 2 * HOUR
    for number in range(63):
        keepers.say(storage, f"{number:016x}", {"max_age": 1.0})
    storage.ahead = 0.0
    assert keepers.say(storage, "a" * 16, {"max_age": 7.0})[1:] == (0, 1)
    assert keepers.read(storage).keys() == {"a" * 16}
    assert keepers.evicts_after(storage) == 7.0
    # Where all are from the future it is this machine's clock that is behind.
    storage._delete(f"{KEEPERS}/{'a' * 16}")
    assert len(keepers.read(storage)) == 63


def test_three_newest_markers_tell_the_age_of_eviction() -> None:
    storage = MemoryStorage(renews=True, deletes_at_once=1000)
    counting = FaultyStorage(storage)
    for number in range(64):
        storage.ahead = number
        keepers.say(storage, f"{number:016x}", {"max_age": 1000.0 - number})
    assert keepers.evicts_after(counting) == 1000.0 - 63
    assert counting.counts["open"] == 3 and counting.counts["list"] == 1


def test_where_no_marker_can_be_written_the_own_one_is_touched() -> None:
    storage = MemoryStorage()
    keepers.say(storage, "a" * 16, {})
    full = NoSpaceStorageError(errno.ENOSPC, "full", "x")
    storage.fail = lambda operation, name: full if operation == "write" else None
    storage.ahead = 100.0
    now, *_ = keepers.say(storage, "a" * 16, {})
    assert abs(now - time.time() - 100.0) < 1
    # Another one has the time of the newest.
    now, *_ = keepers.say(storage, "b" * 16, {})
    assert abs(now - time.time() - 100.0) < 1


# ----------------------------------------------------------------------------- fleets


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "costs"),
    [
        pytest.param(1, S3, id="one, S3"),
        pytest.param(8, DIRECTORY, id="eight, directory"),
        pytest.param(1, DIRECTORY, id="one, directory", marks=pytest.mark.slow),
        pytest.param(8, S3, id="eight, S3", marks=pytest.mark.slow),
    ],
)
def test_writers_at_the_bound_stay_below_it_and_lose_few_stores(
    monkeypatch: pytest.MonkeyPatch, costs: Costs, count: int
) -> None:
    fleet = Fleet(monkeypatch, costs)
    # A slice is a third of the shelf.
    monkeypatch.setattr(limits, "SLICE", 200)
    for _ in range(count):
        fleet.add(16.0 / count, max_bytes=600 * MIB)
    fleet.run(80)
    late = sorted(fleet.fills[len(fleet.fills) * 3 // 4 :])
    assert fleet.most <= 1.02 * 600 * MIB
    assert late[len(late) // 2] >= 0.85 * 600 * MIB
    assert fleet.dropped <= 0.01 * fleet.offered


@pytest.mark.long
def test_bound_with_tenants_that_come_and_go_is_used_for_hours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S3 names no group whose last object was deleted: the group has no bytes any more."""
    monkeypatch.setattr(simulated, "STEP", 1.0)
    fleet = Fleet(monkeypatch, S3)
    writer = fleet.add(0.25, max_bytes=125 * MIB)
    for tenant in range(120):
        writer.group = f"{tenant:016x}"
        fleet.run(120)
        assert fleet.fills[-1] >= min(30 * tenant, 112) * MIB
    assert fleet.most <= 125 * MIB


@pytest.mark.parametrize(
    ("processes", "rate", "bound"),
    [
        # Of a few chunks: there is always room for the next.
        (1, 1.0, 10),
        (1, 5.0, 20),
        (16, 10.0, 80),
        pytest.param(16, 40.0, 600, marks=[pytest.mark.long, pytest.mark.slow]),
    ],
)
def test_bound_is_used_and_few_stores_are_dropped(
    fleet: Fleet, processes: int, rate: float, bound: int
) -> None:
    """On a filesystem that has nothing but the shelf."""
    total = 4 * bound * MIB
    fleet.storage.free = lambda: Space(total - fleet.storage.nbytes, total)
    for _ in range(processes):
        fleet.add(rate / processes, max_bytes=bound * MIB)
    fleet.run(40 + bound / rate)
    assert fleet.most <= 1.02 * bound * MIB
    assert min(fleet.fills[-600:]) >= int(0.85 * bound) * MIB
    assert fleet.dropped <= 0.05 * fleet.offered


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "bound"),
    [
        (8, 80),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((8, 300), (256, 80), (8, 1500), (256, 1500))
        ),
    ],
)
def test_processes_that_begin_together_stay_below_the_bound(
    fleet: Fleet, processes: int, bound: int
) -> None:
    """Each has a chunk to store at once, on a shelf that is at its bound."""
    fill(fleet, int(0.92 * bound), HOUR)
    for _ in range(processes):
        fleet.add(100.0 / processes, max_bytes=bound * MIB).owed = 1.0
    fleet.run(3)
    assert fleet.most <= 1.05 * bound * MIB
    assert fleet.fills[-1] >= 0.85 * bound * MIB


def test_full_bucket_is_not_said_to_have_bytes_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S3 does not say how many bytes are free."""
    evictor = Fleet(monkeypatch, S3).add(1.0, max_bytes=100 * MIB).evictor
    evictor.found_full(NoSpaceStorageError(errno.ENOSPC, "full", "s3://bucket/kv"))
    evictor._look_at_space()
    assert not evictor.begin(200 * MIB)
    assert "a store is dropped" in caplog.text and "bytes are free" not in caplog.text


def test_slow_writer_stays_below_the_bound_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes less between two of its markers than it may between two sweeps."""
    monkeypatch.setattr(simulated, "STEP", 1.0)
    fleet = Fleet(monkeypatch, S3)
    fleet.add(0.05, max_bytes=100 * MIB)
    fleet.run(HOUR)
    assert fleet.offered > 150
    assert fleet.most <= 100 * MIB


def test_chunks_of_many_objects_are_kept_or_deleted_whole(fleet: Fleet) -> None:
    fleet.add(2.0, max_bytes=200 * MIB, objects=8, nbytes=MIB)
    fleet.run(60)
    assert fleet.most <= 200 * MIB
    names = [row.name for row in fleet.storage.list() if "of8" in row.name]
    assert len(names) == 8 * len({name.split("-")[-3] for name in names})


def test_smallest_bound_holds_and_who_has_none_deletes_nothing(fleet: Fleet) -> None:
    small = fleet.add(1.0, max_bytes=100 * MIB)
    large = fleet.add(max_bytes=10 * GIB)
    fleet.run(300)
    assert fleet.storage.nbytes <= 100 * MIB
    assert large.counters.snapshot().get("shelf_evicted_objects", 0) == 0
    assert small.counters.snapshot()["shelf_evicted_objects"] > 0


def test_ages_are_kept_by_all_together_and_rest_where_nothing_is_stored(fleet: Fleet) -> None:
    writers = [fleet.add(0.2, max_age="1h") for _ in range(4)]
    fleet.run(600)
    for writer in writers:
        writer.rate = 0.0
    fleet.run(4500)
    assert fleet.chunks() == 0
    assert all(writer.cpu < 0.01 * 5100 for writer in writers)


def test_tails_of_hand_overs_go_within_their_second_hour_on_s3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(monkeypatch, S3)
    writer = fleet.add()
    key = "ab" * 32
    fleet.storage.put(f"{NAMESPACE}/_/ab/{key}-0t5-0of1.safetensors", 9)
    fleet.run(2.5 * HOUR)
    assert writer.counters.snapshot().get("sweeps", 0) == 0
    writer.evictor.hands_over()
    fleet.run(2 * HOUR)
    assert fleet.chunks() == 0


def test_listing_that_fails_in_its_midst_is_that_of_another_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(monkeypatch, S3)
    writer = fleet.add(1.0, max_bytes=1000 * MIB)
    for group in ("_", GROUP):
        for fan in range(FANS):
            name = f"{fan:02x}/{fan:02x}{'0' * 62}-0-0of1.safetensors"
            fleet.storage.put(f"{NAMESPACE}/{group}/{name}", MIB)
    down = TransientStorageError(errno.EIO, "slow down", "x")
    fleet.storage.fail = lambda operation, name: (
        down if operation == "list" and name.startswith(f"{NAMESPACE}/_/c0") else None
    )
    fleet.run(200)
    fleet.storage.fail = lambda operation, name: None
    fleet.run(200)
    assert writer.counters.snapshot().get("sweep_errors", 0) == 0
    assert fleet.dropped <= 0.05 * fleet.offered


@pytest.fixture(autouse=True)
def _no_seconds_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a sweep costs here is no time of this machine's."""
    if not isinstance(evictor_module.time, type(os)):
        yield
        return
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    yield


@pytest.mark.parametrize("chunks_of_a_prompt", [1, 3, 64])
def test_of_units_of_one_age_no_more_go_than_must(place: Place, chunks_of_a_prompt: int) -> None:
    """All of a shelf may have been restored there with one time."""
    for seed in range(192 // chunks_of_a_prompt):
        place.put(FMT, chunks(chunks_of_a_prompt, seed), age=5 * HOUR)
    place.round(place.evictor(max_bytes=180 * SIZE))
    assert 0.89 * 180 <= len(place.objects()) / FMT.shards <= 0.95 * 180
