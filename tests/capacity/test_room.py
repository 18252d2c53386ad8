"""Room: what may be stored, as far as a process can tell without asking."""

from __future__ import annotations

import logging
import math

import pytest

from kvshelf.backends.base import Space
from kvshelf.capacity import room as room_module
from kvshelf.capacity.lease import Finding
from kvshelf.capacity.room import Room, least_free
from kvshelf.config import CapacityConfig
from kvshelf.metrics import Counters

GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "memory", "expected"),
    [
        (100 * GIB, False, 5 * GIB),
        (400 * GIB, False, 20 * GIB),
        (9000 * GIB, False, 20 * GIB),
        (400 * GIB, True, 40 * GIB),
    ],
)
def test_what_stays_free_depends_on_the_storage(total: int, memory: bool, expected: int) -> None:
    assert least_free(Space(0, total, memory), None) == expected
    assert least_free(Space(0, total, memory), 7) == 7


@pytest.fixture
def counters() -> Counters:
    return Counters()


def room(counters: Counters, **capacity: object) -> Room:
    return Room(CapacityConfig.model_validate(capacity), counters, "/mnt/kv")


def write(found: Room, nbytes: int) -> None:
    """Write as a store does that is allowed to."""
    assert found.begin(nbytes)
    found.end(nbytes, written=True)


def test_nothing_is_bounded_before_anything_is_known(counters: Counters) -> None:
    found = room(counters, max_bytes=1)
    assert found.allows(1 << 60)
    write(found, 1 << 40)
    found.update(None, None, 1)
    assert found.allows(1 << 60)


def test_stores_stop_above_what_must_stay_free_and_go_on_later(
    counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    found = room(counters, min_free=1000)
    found.update(Space(1200, 10000), None, None)
    assert found.allows(200)
    with caplog.at_level(logging.WARNING):
        found.update(Space(900, 10000), None, None)
        assert not found.allows(1)
        found.update(Space(800, 10000), None, None)
        assert not found.allows(1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("/mnt/kv: 900 bytes are free, and stores leave 1000 (min_free)")
    found.update(Space(5000, 10000), None, None)
    assert found.allows(2000)
    assert counters.take()["storage_free_bytes"] == 5000


def test_no_bytes_must_stay_free_if_that_is_turned_off(counters: Counters) -> None:
    found = room(counters, min_free=0)
    found.update(Space(1, 10000), None, None)
    assert found.allows(1 << 40)


def test_own_writes_use_up_the_room_and_call_for_another_look(counters: Counters) -> None:
    found = room(counters, max_bytes=1000)
    found.update(None, 200, 1000)
    assert found.allows(1)
    assert found.wake.is_set(), "the first store after a pause"
    found.wake.clear()
    found.update(None, 200, 1000)
    write(found, 150)
    assert not found.wake.is_set()
    write(found, 100)
    assert found.wake.is_set()
    assert found.allows(150)
    assert not found.begin(151), "half of it is for others"
    found.update(None, 450, 1000)
    assert found.begin(275)


def test_half_of_the_room_is_for_others_but_there_is_always_enough_for_one_chunk(
    counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    found = room(counters, max_bytes=1000)
    found.update(None, 600, 1000)
    assert found.allows(300), "a chunk of three objects"
    for _ in range(3):
        write(found, 100)
    assert not found.allows(100)
    assert not found.begin(100)
    assert not caplog.records, "there is room, after another look"
    found.update(None, 900, 1000)
    assert found.begin(100)
    assert not found.begin(1)
    assert "it holds 900 bytes" in caplog.text


def test_a_bound_that_is_reached_calls_for_no_look_at_each_store(counters: Counters) -> None:
    found = room(counters, max_bytes=1000)
    found.update(None, 1200, 1000)
    assert not found.begin(100)
    assert found.wake.is_set(), "the first store after a pause"
    found.wake.clear()
    assert not found.begin(100)
    assert not found.allows(100)
    assert not found.wake.is_set()


def test_writes_that_go_on_count_and_those_that_failed_do_not(counters: Counters) -> None:
    found = room(counters, max_bytes=1000)
    found.update(None, 0, 1000)
    assert found.begin(400)
    listed = Finding(at=100.0, nbytes=50, seconds=0.1, free=9000)
    assert found.estimate(listed, None, 110.0) == 450
    assert found.estimate(listed, Space(8900, 10000), 110.0) == 550, "others write too"
    found.end(400, written=False)
    assert found.estimate(listed, None, 110.0) == 50
    assert found.begin(500)
    found.update(Space(800, 10000), None, None)
    assert not found.begin(0), "less is free than min_free and that write"


def test_the_narrower_bound_acts_and_is_named(
    counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    found = room(counters, max_bytes=1000, min_free=10)
    found.update(Space(5000, 10000), 1000, 1000)
    assert found.is_short
    assert not found.allows(1)
    assert "it holds 1000 bytes, and max_bytes is 1000" in caplog.text
    found.update(Space(5000, 10000), 500, 1000)
    assert not found.is_short
    taken = counters.take()
    assert (taken["shelf_used_bytes"], taken["shelf_limit_bytes"]) == (500, 1000)


def test_the_estimate_is_the_listing_and_all_that_was_written_since(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr(room_module.time, "monotonic", lambda: clock)
    found = room(counters, max_bytes=10000)
    write(found, 64)
    clock += 100
    listed = Finding(at=5000.0, nbytes=500, seconds=0.1, free=9000)
    clock += 10
    write(found, 30)
    write(found, 3)
    clock += 10
    write(found, 7)
    now = 5020.0
    assert found.estimate(listed, None, now) == 500 + 40
    assert found.estimate(listed, Space(8990, 10000), now) == 500 + 40, "somebody deletes files"
    assert found.estimate(listed, Space(8000, 10000), now) == 500 + 1000, "others write too"
    assert found.written_since(math.inf) == 104


def test_writes_are_remembered_in_bounded_memory(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_module, "_WRITES_SECONDS", 0.0)
    found = room(counters, max_bytes=1)
    for _ in range(8000):
        write(found, 1)
    assert found.written_since(math.inf) == room_module._MOST_WRITES


def test_space_that_somebody_frees_hides_no_writes_of_others(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(room_module.time, "monotonic", lambda: clock[0])
    found = room(counters, max_bytes=10000)
    now = 5000.0
    found.look(Space(9000, 20000, memory=False))
    listed = Finding(now, 500, 0.1, 9000, None)
    for free in (8700, 12000, 11600):
        clock[0] += 1
        now += 1
        found.look(Space(free, 20000, memory=False))
    # 300 and 400 bytes were written by others, and 3,300 of another program's were deleted.
    assert found.estimate(listed, Space(11600, 20000, memory=False), now) == 500 + 700


def test_own_deletions_hide_no_writes_of_others(counters: Counters) -> None:
    room = Room(CapacityConfig.model_validate({"max_bytes": 1000}), counters, "/shelf")
    room.look(Space(5000, 20000))
    # 300 bytes were deleted, and others wrote 200 meanwhile; then somebody else frees much.
    room.look(Space(5100, 20000), 300)
    room.look(Space(9000, 20000))
    found = Finding(at=100.0, nbytes=500, seconds=0.0, free=5300)
    assert room.estimate(found, Space(9000, 20000), 110.0) == 700
