"""The sweeper: when it looks, when it lists, and what it leaves to others."""

from __future__ import annotations

import contextlib
import json
import logging
import re
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
from kvshelf.backends.base import ObjectInfo, Space
from kvshelf.capacity import bound as bound_module
from kvshelf.capacity import deletion as deletion_module
from kvshelf.capacity import sweeper as sweeper_module
from kvshelf.capacity import sweeping as sweeping_module
from kvshelf.capacity import written as written_module
from kvshelf.capacity.collect import Plan, plan
from kvshelf.capacity.lease import LEASE_SECONDS, SWEEP, Finding, Lease, Record
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
from kvshelf.shelf.pins import Pin, Pins
from tests.capacity.shelves import Place
from tests.sim.storage import Fault
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.threads import named
from tests.support.waiting import until

HOUR = 3600.0
FMT = make_format()
CHUNKS = make_chunks(FMT, 10)
CHUNK_BYTES = sum(FMT.object_size(shard) for shard in range(FMT.shards))


class Swept(Place):
    """A shelf with its sweepers, on a filesystem to which no other program writes."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root)
        #: What the sweepers count together.
        self.counters = Counters()
        self.made: list[Sweeper] = []
        self._passed = 0.0
        monkeypatch.setattr(self.later, "space", self._space)
        clock = SimpleNamespace(
            monotonic=lambda: time.monotonic() + self._passed,
            time=lambda: time.time() + self._passed,
            clock_gettime=lambda which: time.clock_gettime(which) + self._passed,
            thread_time=time.thread_time,
            sleep=time.sleep,
        )
        modules = sweeper_module, sweeping_module, bound_module, written_module, deletion_module
        for module in modules:
            monkeypatch.setattr(module, "time", clock)

    def _space(self) -> Space:
        used = 0
        for name in self.files():
            with contextlib.suppress(FileNotFoundError):
                used += self.path(name).stat().st_size
        return Space((1 << 40) - used, 1 << 41)

    def make(self, options: dict[str, Any] | None = None, **capacity: object) -> Sweeper:
        given = {"counters": self.counters, **(options or {})}
        self.made.append(Sweeper(self.shelf, CapacityConfig.model_validate(capacity), **given))
        return self.made[-1]

    def wait(self, seconds: float) -> None:
        """Let time pass for sweepers and for the storage."""
        self._passed += seconds
        self.later.ahead += seconds

    def objects(self) -> set[str]:
        return {name for name in self.files() if name.endswith(".safetensors")}

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)

    def fill(self) -> list[str]:
        """Store ten chunks of one prompt, and a second prompt of ten that was used since."""
        old = self.put(FMT, CHUNKS, age=10 * HOUR)
        self.put(FMT, make_chunks(FMT, 10, 7), age=9 * HOUR, used=HOUR)
        return old


def after_each(sweeper: Sweeper, hook: Callable[[], object]) -> None:
    """Call a hook for each chunk that a sweeper deletes."""
    note = sweeper._note_freed

    def noted(count: int, nbytes: int) -> None:
        note(count, nbytes)
        for _ in range(count // FMT.shards):
            hook()

    sweeper._note_freed = noted  # type: ignore[method-assign]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swept]:
    place = Swept(tmp_path, monkeypatch)
    yield place
    for sweeper in place.made:
        sweeper.close()


def test_without_bounds_nothing_is_listed_and_nothing_deleted(place: Swept) -> None:
    place.fill()
    before = place.files()
    place.faults.counts.clear()
    sweeper = place.make()
    sweeper.step()
    assert set(place.faults.counts) == {"space"}
    assert place.files() == before
    assert place.counters.take()["storage_free_bytes"] > 0


def test_orphans_go_when_stores_find_too_little_space(
    place: Swept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores are refused then before they come to the storage: none of them finds it full."""
    (name, *_) = place.fill()
    folder, _, base = name.rpartition("/")
    orphan = place.write(f"{folder}/.{base}.0123456789abcdef.tmp", bytes(5000), 200 * HOUR)
    before = place.objects()
    place.make().step()
    assert orphan.exists()
    space = place.later.space()
    assert space is not None
    monkeypatch.setattr(bound_module, "least_free", lambda _: space.free + 1000)
    place.make().step()
    assert orphan.exists()
    sweeper = place.make({"walk": Walk(place.backend, Counters())})
    sweeper.step()
    assert not orphan.exists()
    assert place.objects() == before
    assert sweeper.bound.allows(1000)


def test_above_the_bound_the_ends_of_old_prompts_go_first(place: Swept) -> None:
    old = place.fill()
    sweeper = place.make(max_bytes=20 * CHUNK_BYTES)
    sweeper.step()
    gone = set(old) - place.objects()
    assert len(place.objects()) + len(gone) == 20 * FMT.shards, "only the older prompt lost chunks"
    assert gone == set(old[-len(gone) :])
    assert place.count("shelf_evicted_objects") == len(gone)
    assert place.count("shelf_evicted_bytes") == len(gone) * FMT.object_size(0)
    found = Lease(place.backend).read(place.later.now()).finding
    assert found is not None
    assert found.nbytes <= 0.8 * 20 * CHUNK_BYTES
    told = found.by, found.deleted_files, found.deleted_bytes
    assert told == (sweeper._lease.owner, len(gone), len(gone) * FMT.object_size(0))


def test_what_is_listed_but_gone_takes_no_space(
    place: Swept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else is deleted in its place."""
    old = place.fill()
    ghosts = [row for row in place.backend.list() if row.name in old]
    for name in old:
        place.path(name).unlink()
    there = place.objects()
    list_files = place.later.list

    def listed(prefix: str = "", **options: Any) -> Iterator[ObjectInfo]:
        yield from (row for row in ghosts if row.name.startswith(f"{prefix}/"))
        yield from list_files(prefix, **options)

    monkeypatch.setattr(place.later, "list", listed)
    monkeypatch.setattr(sweeping_module, "_LEAST_OBJECTS", 1)
    sweeper = place.make(max_bytes=15 * CHUNK_BYTES)
    with caplog.at_level(logging.INFO):
        sweeper.step()
    assert place.objects() == there
    assert sweeper.bound.allows(CHUNK_BYTES)
    assert re.search(r"deleted 0 files, 0 bytes; .* are listed but gone", caplog.text)


@pytest.mark.long
@pytest.mark.parametrize("chunks", [1.5, 2.9, 4.5, 9.05])
def test_a_bound_of_a_few_chunks_always_has_space_for_the_next_one(
    place: Swept, chunks: float
) -> None:
    """Also where the last chunk for which there is space leaves less than 90 % in use."""
    sweeper = place.make(max_bytes=int(chunks * CHUNK_BYTES))
    sweeper.step()
    for seed in range(int(chunks) + 2):
        until(lambda: sweeper.step() > 0 and sweeper.bound.allows(CHUNK_BYTES))
        place.put(FMT, make_chunks(FMT, 1, seed), age=HOUR)
        assert len(place.objects()) <= int(chunks) * FMT.shards
    assert place.count("shelf_evicted_objects") > 0


@pytest.mark.parametrize(("name", "value"), [("max_age", 8 * HOUR), ("max_bytes", CHUNK_BYTES)])
def test_the_log_says_which_groups_lost_what_and_why(
    place: Swept, caplog: pytest.LogCaptureFixture, name: str, value: float
) -> None:
    files = len(place.put(FMT, CHUNKS[:2], age=9 * HOUR))
    with caplog.at_level(logging.INFO):
        place.make(**{name: value}).step()
    (line,) = [r.getMessage() for r in caplog.records if "deleted" in r.getMessage()]
    assert f": deleted {files} files, {2 * CHUNK_BYTES} bytes; " in line
    group = f"{FMT.namespace.folder}/_: {files} objects, {2 * CHUNK_BYTES} bytes"
    assert re.search(rf"; {group}, the oldest unused for 324\d\d s \({name}\)$", line)


def test_a_store_that_is_larger_than_the_bound_deletes_nothing(place: Swept) -> None:
    place.fill()
    before = place.objects()
    sweeper = place.make(max_bytes=40 * CHUNK_BYTES)
    sweeper.step()
    assert not sweeper.bound.allows(41 * CHUNK_BYTES)
    place.wait(2 * HOUR)
    place.faults.counts.clear()
    sweeper.step()
    assert place.faults.counts["entries"] > 0
    assert place.objects() == before


def test_what_was_not_used_for_the_age_goes_and_nothing_else(place: Swept) -> None:
    old = place.fill()
    place.make(max_age="5h").step()
    assert place.objects().isdisjoint(old)
    assert len(place.objects()) == 10 * FMT.shards


def test_what_one_engine_found_others_need_not_look_for(place: Swept) -> None:
    place.fill()
    place.make(max_bytes=40 * CHUNK_BYTES).step()
    place.faults.counts.clear()
    others = Counters()
    place.make({"counters": others}, max_bytes=40 * CHUNK_BYTES).step()
    assert place.faults.counts["entries"] == 0
    used = others.take()["shelf_used_bytes"]
    assert used >= 20 * CHUNK_BYTES


def test_a_rank_that_does_not_sweep_knows_what_the_one_found_that_does(place: Swept) -> None:
    place.fill()
    rank = place.make({"sweeps": False}, max_bytes=20 * CHUNK_BYTES)
    rank.step()
    assert place.faults.counts["entries"] == 0
    assert rank.bound.allows(1 << 20), "nothing is known yet"
    place.make(max_bytes=20 * CHUNK_BYTES).step()
    place.wait(60.0)
    rank.step()
    assert not rank.bound.allows(10 * CHUNK_BYTES)
    assert rank.bound.allows(CHUNK_BYTES)


def test_the_smallest_bound_acts_on_all(place: Swept) -> None:
    place.fill()
    place.make(max_bytes=30 * CHUNK_BYTES).step()
    others = Counters()
    place.make({"counters": others}, max_bytes=1000 * CHUNK_BYTES).step()
    assert others.take()["shelf_limit_bytes"] == 30 * CHUNK_BYTES


def in_many_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(deletion_module, "threads_for_calls", lambda _: threads)


def write_record(place: Swept, **fields: Any) -> None:
    path = place.root / SWEEP
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": 1, "owner": "x", "until": 0, **fields}))


def test_a_sweep_that_is_due_soon_waits_for_no_store(place: Swept) -> None:
    sweeper = place.make(max_bytes=12 * CHUNK_BYTES)
    sweeper.step()
    place.fill()
    # The last sweep is less than a second ago.
    assert sweeper.step() == 1.0
    assert len(place.objects()) == 20 * FMT.shards
    until(lambda: sweeper.step() > 0 and len(place.objects()) < 20 * FMT.shards)


def test_the_first_look_is_a_sweep_and_a_failed_one_is_not_repeated_at_once(place: Swept) -> None:
    place.fill()
    place.faults.add(Fault("entries", error=TransientStorageError(5, "EIO")))
    sweeper = place.make(max_bytes=CHUNK_BYTES)
    sweeper.step()
    listed = place.faults.counts["entries"]
    assert listed
    sweeper.step()
    assert place.faults.counts["entries"] == listed
    assert place.backend.reads.is_closed
    assert place.count("sweeps") == 0
    assert Lease(place.backend).read(place.later.now()).until == 0.0, "the lease was given back"


@pytest.fixture
def failed(
    place: Swept, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[Sweeper, list[str]]]:
    """Makes a sweep that fails in its listing, and says which files are listed from then on."""

    def sweep() -> tuple[Sweeper, list[str]]:
        place.fill()
        last = max(place.objects())
        fault = Fault("entries", last, error=lambda: TransientStorageError(5, "EIO"))
        place.faults.add(fault)
        sweeper = place.make(max_bytes=20 * CHUNK_BYTES)
        before = place.objects()
        sweeper.step()
        assert place.objects() == before
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
    place: Swept, failed: Callable[[], tuple[Sweeper, list[str]]]
) -> None:
    sweeper, listed = failed()
    spent = place.count("sweep_seconds")
    taken: list[float] = []
    sweeper._allowance.take = taken.append  # type: ignore[method-assign]
    # What is stored meanwhile is in the estimate, listed or not.
    new = place.put(FMT, make_chunks(FMT, 3, 9))
    place.wait(40)
    sweeper.step()
    # The one in which it ended, and perhaps the one before.
    assert len({name.rpartition("/")[0] for name in listed}) <= 2
    assert len(place.objects() - {*new}) <= 0.8 * 20 * FMT.shards
    assert place.objects() >= {*new}
    assert taken == [pytest.approx(place.count("sweep_seconds"))], "each counts once"
    assert place.count("sweep_seconds") > spent
    assert place.count("sweeps") == 1
    place.wait(2 * HOUR)
    sweeper.step()
    assert len(listed) > len(place.objects()) / 2, "the next one begins anew"


def test_a_listing_is_not_kept_for_long(
    place: Swept, failed: Callable[[], tuple[Sweeper, list[str]]]
) -> None:
    sweeper, listed = failed()
    kept = weakref.ref(sweeper._begun)  # type: ignore[arg-type]
    place.wait(601)
    trouble = place.faults.add(Fault("space", error=TransientStorageError(5, "EIO")))
    sweeper.step()
    assert kept() is None
    trouble.times = 0
    sweeper.step()
    assert len(listed) == 40 * FMT.shards / 2


def test_what_another_engine_has_swept_meanwhile_is_listed_anew(
    place: Swept, failed: Callable[[], tuple[Sweeper, list[str]]]
) -> None:
    sweeper, listed = failed()
    place.wait(1)
    place.make(max_bytes=20 * CHUNK_BYTES).step()
    left = place.objects()
    assert len(left) <= 16 * FMT.shards
    place.put(FMT, make_chunks(FMT, 10, 9))
    listed.clear()
    place.wait(61)
    sweeper.step()
    assert {*listed} >= left
    assert len(place.objects()) > 14 * FMT.shards


@pytest.mark.parametrize("operation", ["entries", "folders", "delete"])
def test_a_storage_that_refuses_is_named_once(
    place: Swept, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    place.fill()
    before = place.objects()
    place.faults.add(Fault(operation, error=ReadOnlyStorageError(13, "EACCES")))
    sweeper = place.make(max_bytes=CHUNK_BYTES)
    for _ in range(3):
        sweeper.step()
    tries = place.faults.counts[operation]
    place.wait(2 * HOUR)
    sweeper.step()
    assert place.faults.counts[operation] > tries, "an hour later it tries again"
    assert place.objects() == before
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "keeps the shelf within no bounds" in line]) == 1
    assert place.backend.writes.is_closed


def test_some_files_of_others_do_not_end_a_sweep(
    place: Swept, caplog: pytest.LogCaptureFixture
) -> None:
    old = place.fill()
    place.faults.add(Fault("delete", old[-1], error=PermanentStorageError(1, "EPERM")))
    sweeper = place.make(max_bytes=20 * CHUNK_BYTES)
    sweeper.step()
    assert old[-1] in place.objects()
    assert place.count("shelf_evicted_objects") > 0
    assert not caplog.records


def test_a_full_storage_is_swept(place: Swept) -> None:
    place.fill()
    before = place.objects()
    place.faults.add(Fault("write", error=NoSpaceStorageError(28, "ENOSPC")))
    with pytest.raises(NoSpaceStorageError):
        place.backend.write("x", [b"x"])
    assert not place.backend.writes.is_closed
    place.make(max_bytes=CHUNK_BYTES).step()
    assert place.objects() < before


def test_while_the_storage_does_not_answer_it_is_left_alone(place: Swept) -> None:
    place.fill()
    place.backend.reads.trip("it does not answer")
    place.faults.counts.clear()
    place.make(max_bytes=CHUNK_BYTES).step()
    assert not place.faults.counts


def test_a_slow_listing_holds_up_nothing_and_counts_as_no_failure(place: Swept) -> None:
    place.fill()
    place.backend.deadlines = Deadlines(probe=0.05, read=0.05, write=0.05)
    gate = threading.Event()
    place.faults.add(Fault("entries", wait=gate))
    sweeper = place.make(max_bytes=10 * CHUNK_BYTES)
    sweeper.start()
    until(lambda: place.faults.counts["entries"] > 0)
    assert sweeper.bound.allows(1)
    time.sleep(0.2)  # several deadlines
    assert place.backend.reads.is_closed
    assert place.backend.late_calls == 0
    gate.set()
    until(lambda: len(place.objects()) < 20 * FMT.shards)


def test_pins_do_not_lift_the_bound(place: Swept, caplog: pytest.LogCaptureFixture) -> None:
    place.fill()
    before = place.objects()
    Pins.add(place.backend, "all", Pin(namespace=FMT.namespace.folder))
    sweeper = place.make(max_bytes=10 * CHUNK_BYTES)
    sweeper.start()
    until(lambda: place.count("sweeps") > 0)
    until(lambda: not place.backend.allows(1))
    assert place.objects() == before
    assert "pin" in caplog.text
    sweeper.close()
    assert place.backend.allows(1)


def test_a_pin_ends_by_the_clock_that_is_behind(place: Swept) -> None:
    place.fill()
    before = place.objects()
    until_then = place.later.now() + 600.0
    Pins.add(place.backend, "all", Pin(namespace=FMT.namespace.folder, until=until_then))
    place.later.alone = True
    place.later.ahead += 1800.0
    place.make(max_bytes=10 * CHUNK_BYTES).step()
    assert place.count("sweeps") == 1
    assert place.objects() == before


@pytest.mark.long
def test_a_store_wakes_it(place: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeper = place.make(max_bytes=100 * CHUNK_BYTES)
    sweeper.start()
    until(lambda: place.count("sweeps") > 0)
    for _ in range(3):
        looks = place.faults.counts["space"]
        place.backend.allows(1)
        until(lambda before=looks: place.faults.counts["space"] > before)


def test_stores_know_the_space_while_a_sweep_goes_on(
    place: Swept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They learn of other engines' writes before the sweep, not after it."""
    sweeper = place.make(max_bytes=30 * CHUNK_BYTES)
    sweeper.step()
    assert sweeper.bound.allows(20 * CHUNK_BYTES)
    place.fill()
    place.put(FMT, make_chunks(FMT, 8, 11), age=HOUR)
    allowed: list[bool] = []

    def observed(*arguments: Any, **options: Any) -> Plan:
        allowed.append(sweeper.bound.allows(5 * CHUNK_BYTES))
        return plan(*arguments, **options)

    monkeypatch.setattr(sweeping_module, "plan", observed)
    until(lambda: sweeper.step() > 0 and bool(allowed))
    assert allowed == [False]
    assert sweeper.bound.allows(5 * CHUNK_BYTES)


@pytest.mark.parametrize("where", ["plan", "least_free"])
def test_an_error_of_its_own_keeps_the_bounds_and_is_tried_again(
    place: Swept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    place.fill()
    sweeper = place.make(max_bytes=19 * CHUNK_BYTES)
    monkeypatch.setattr(place.backend, "bound", sweeper.bound)

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(sweeping_module if where == "plan" else bound_module, where, broken)
        assert sweeper.step() > 0
        if where == "plan":
            assert place.count("sweep_errors") == 1
            assert "tried again in an hour" in caplog.text
            assert not place.backend.allows(1 << 60), "the free space is still kept"
            sweeper.step()
            assert place.count("sweep_errors") == 1
    assert place.backend.bound is sweeper.bound
    assert len(place.objects()) == 20 * FMT.shards
    place.wait(2 * HOUR)
    until(lambda: sweeper.step() > 0 and len(place.objects()) < 20 * FMT.shards)


def test_the_record_is_small_and_readable(place: Swept) -> None:
    place.fill()
    place.make(max_bytes=40 * CHUNK_BYTES, max_age="7d").step()
    found = json.loads((place.root / SWEEP).read_bytes())
    assert found["version"] == 1
    assert found["max_bytes"] == 40 * CHUNK_BYTES
    assert found["finding"]["max_age"] == 7 * 86400
    assert found["finding"]["nbytes"] >= 20 * CHUNK_BYTES


def test_the_clock_of_the_storage_is_compared(place: Swept) -> None:
    sweeper = place.make(max_bytes=40 * CHUNK_BYTES)
    for ahead in (3 * 86400, -500):
        place.later.ahead = place._passed + ahead
        place.wait(HOUR)
        sweeper.step()
        found = place.counters.gauges()["clock_difference_seconds"]
        assert found == pytest.approx(abs(ahead), abs=2)


def test_a_sweep_ends_with_its_engine(place: Swept) -> None:
    place.fill()
    before = place.objects()
    listing = threading.Event()
    place.faults.add(Fault("entries", wait=listing))
    running = named("kvshelf-capacity")
    with closing(place.make(max_bytes=CHUNK_BYTES)) as sweeper:
        sweeper.start()
        until(lambda: place.faults.counts["entries"] > 0)
    listing.set()
    until(lambda: not named("kvshelf-capacity") - running)
    assert place.objects() == before


# ------------------------------------------------------------------------- while a sweep goes on


@pytest.fixture
def used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let listings of small shelves be used again, as those of large ones are."""
    monkeypatch.setattr(sweeping_module, "_LEAST_OBJECTS", 1)


def test_a_listing_is_used_again_while_it_is_fresh(place: Swept, used_again: None) -> None:
    old = place.fill()
    sweeper = place.make(max_bytes=20 * CHUNK_BYTES)
    sweeper.step()
    listings = place.faults.counts["entries"]
    assert listings
    new: list[str] = []
    for seed in range(20, 23):
        new += place.put(FMT, make_chunks(FMT, 3, seed))
        place.wait(30.0)
        sweeper.step()
        assert len(place.objects()) <= 0.9 * 20 * FMT.shards
    assert place.faults.counts["entries"] == listings, "a part of the shelf shows its growth"
    assert place.objects() >= set(new)
    assert place.objects().isdisjoint(old[-4:])
    assert place.count("sweeps") == 1
    # It is no longer fresh.
    place.put(FMT, make_chunks(FMT, 4, 40))
    place.wait(600.0)
    sweeper.step()
    assert place.faults.counts["entries"] > listings


def test_what_leftovers_free_is_not_freed_again_by_what_is_chosen_for_later(
    place: Swept, used_again: None
) -> None:
    place.fill()
    before = place.objects()
    bad = f"{FMT.namespace.folder}/_/11/.{'1' * 64}-0-0of1.safetensors.{'2' * 16}.tmp"
    place.write(bad, bytes(10 * CHUNK_BYTES))
    place.later.ahead += HOUR
    place.make(max_bytes=27 * CHUNK_BYTES).step()
    assert place.objects() == before
    assert bad not in place.files()


def test_what_others_say_deletes_nothing_from_a_plan(
    place: Swept, monkeypatch: pytest.MonkeyPatch, used_again: None
) -> None:
    """Another program fills the filesystem: the shelf has not grown."""
    place.fill()
    sweeper = place.make(max_bytes=20 * CHUNK_BYTES)
    sweeper.step()
    left = place.objects()
    space = place.later.space()
    assert space is not None
    monkeypatch.setattr(place.later, "space", lambda: Space(space.free - (1 << 30), space.total))
    for _ in range(3):
        place.wait(30.0)
        sweeper.step()
    assert place.objects() == left
    assert sweeper.bound.allows(CHUNK_BYTES), "it was found out"


@pytest.mark.parametrize(("passes", "most"), [(0.0, 20), (100.0, 2), (45.0, 15)])
def test_a_plan_ends_when_the_process_was_paused_or_it_is_old(
    place: Swept, passes: float, most: int
) -> None:
    place.fill()
    before = len(place.objects())
    sweeper = place.make(max_bytes=CHUNK_BYTES)
    after_each(sweeper, lambda: place.wait(passes))
    sweeper.step()
    gone = (before - len(place.objects())) // FMT.shards
    assert 0 < gone <= most
    if passes == 0.0:
        assert gone == 20
    found = Lease(place.backend).read(place.later.now())
    assert found.finding is not None
    assert (found.finding.max_age, found.until) == (None, 0.0)


@pytest.mark.parametrize(("times", "ends"), [(2, False), (None, True)])
def test_a_sweep_ends_when_its_lease_could_not_be_renewed_while_it_lasted(
    place: Swept, times: int | None, ends: bool
) -> None:
    place.fill()
    gone: list[int] = []

    def hook() -> None:
        if not gone:
            error = TransientStorageError(5, "away")
            place.faults.add(Fault("open", SWEEP, error=error, times=times))
        gone.append(1)
        place.wait(25.0)

    sweeper = place.make(max_bytes=CHUNK_BYTES)
    after_each(sweeper, hook)
    sweeper.step()
    assert len(gone) <= LEASE_SECONDS / 25.0 + 2 if ends else len(gone) == 20


@pytest.mark.parametrize("threads", [1, 4])
def test_a_sweep_ends_when_the_lease_is_lost_and_keeps_it_until_then(
    place: Swept, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    in_many_threads(monkeypatch, threads)
    place.fill()
    other = Lease(place.backend)
    evicted: list[int] = []

    def hook() -> None:
        evicted.append(1)
        place.wait(25.0)
        now = place.later.now()
        record = other.read(now)
        if len(evicted) == 6:
            assert now < record.until < now + 61
            write_record(place, owner="other", until=now + 50)

    sweeper = place.make(max_bytes=CHUNK_BYTES)
    after_each(sweeper, hook)
    sweeper.step()
    assert 6 <= len(evicted) <= 8
    assert other.read(place.later.now()).owner == "other"


# ----------------------------------------------------------------------------------------- quiet


def test_at_the_bound_little_is_read(place: Swept) -> None:
    place.fill()
    Pins.add(place.backend, "all", Pin(namespace=FMT.namespace.folder))
    sweeper, rank = (
        place.make({"sweeps": sweeps}, max_bytes=18 * CHUNK_BYTES) for sweeps in (True, False)
    )
    for each, most in ((sweeper, 22), (rank, 3)):
        each.step()
        place.faults.counts.clear()
        for _ in range(200):
            place.wait(0.1)
            assert not each.bound.allows(CHUNK_BYTES)
            each._turn()
        assert 0 < place.faults.counts["open"] <= most
        assert place.faults.counts["entries"] == 0


def test_who_loses_the_lease_asks_again_after_some_seconds(place: Swept) -> None:
    place.fill()
    sweeper = place.make(max_bytes=CHUNK_BYTES)
    before = place.objects()
    other = Lease(place.backend)
    taken = other.take(Record(), place.later.now())
    assert taken is not None
    place.faults.counts.clear()
    for _ in range(20):
        place.wait(1.0)
        sweeper.bound.allows(1)
        sweeper._turn()
    assert place.faults.counts["now"] <= 3
    assert place.faults.counts["open"] <= 7
    assert place.objects() == before
    other.release(taken, place.later.now())
    place.wait(60.0)
    sweeper.step()
    assert place.objects() < before


def test_who_starts_in_the_first_sweep_of_another_learns_its_finding_soon(place: Swept) -> None:
    place.fill()
    lease = Lease(place.backend)
    taken = lease.take(Record(), place.later.now())
    assert taken is not None
    sweeper = place.make(max_bytes=20 * CHUNK_BYTES)
    sweeper._turn()
    assert sweeper.bound.allows(CHUNK_BYTES)
    finding = Finding(place.later.now(), 18 * CHUNK_BYTES, 0.0)
    lease.release(replace(taken, finding=finding), place.later.now())
    place.wait(1.1)
    assert sweeper.bound.allows(CHUNK_BYTES)
    # It wakes up because a store asks.
    place.wait(1.1)
    sweeper._turn()
    assert not sweeper.bound.allows(4 * CHUNK_BYTES)


def test_engines_that_lose_the_lease_together_come_back_apart(
    place: Swept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them saw it free; one was faster."""
    place.fill()
    tries: list[Lease] = []
    monkeypatch.setattr(Lease, "take", lambda lease, *_: tries.append(lease))
    engines = [place.make(max_bytes=CHUNK_BYTES) for _ in range(8)]
    seconds = []
    for second in range(20):
        before = len(tries)
        for engine in engines:
            engine.step()
        seconds += [second] * (len(tries) - before)
        place.wait(1.0)
    assert seconds[:8] == [0] * 8
    assert seconds[8] >= 5
    assert len(set(seconds[8:16])) > 1


# ------------------------------------------------------------- storages that do not tell free space


@pytest.fixture
def untold(place: Swept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place.later, "space", lambda: None)


def test_a_lie_about_what_was_written_deletes_nothing_and_ends_stores_for_a_while(
    place: Swept, untold: None
) -> None:
    place.fill()
    before = place.objects()
    sweeper = place.make(max_bytes=40 * CHUNK_BYTES)
    sweeper.step()
    place.write(f"{WRITTEN}/0123456789abcdef-{10**17}")
    place.wait(61.0)
    # A sweep finds out that nothing was written, and counts from there.
    sweeper.step()
    assert place.objects() == before
    assert sweeper.bound.allows(CHUNK_BYTES)


def test_the_last_words_of_a_process_are_what_it_wrote(place: Swept, untold: None) -> None:
    sweeper = place.make(max_bytes=40 * CHUNK_BYTES)
    sweeper.start()
    until(lambda: place.count("sweeps") > 0)
    assert sweeper.bound.begin(77)
    sweeper.bound.end(77, written=True)
    sweeper.close()
    (path,) = (place.root / WRITTEN).iterdir()
    assert path.name.endswith("-77")
