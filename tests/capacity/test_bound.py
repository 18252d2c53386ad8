"""What may be stored on a shelf, as far as a process can tell without asking."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.backends.base import Space
from kvshelf.capacity import bound as bound_module
from kvshelf.capacity.bound import ShelfBound, Sum, least_free
from kvshelf.capacity.lease import Finding
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
    assert least_free(Space(0, total, memory)) == expected


@pytest.fixture
def counters() -> Counters:
    return Counters()


class Woken(ShelfBound):
    """Counts how often it calls for a look."""

    def __init__(self, counters: Counters, **capacity: object) -> None:
        self.woken = 0
        config = CapacityConfig.model_validate(capacity)
        super().__init__(config, counters, "/mnt/kv", self._count)

    def _count(self) -> None:
        self.woken += 1


def write(found: ShelfBound, nbytes: int) -> None:
    """Write as a store does that is allowed to."""
    assert found.begin(nbytes)
    found.end(nbytes, written=True)


def test_nothing_is_bounded_before_anything_is_known(counters: Counters) -> None:
    found = Woken(counters, max_bytes=1)
    assert found.allows(1 << 60)
    write(found, 1 << 40)
    found.update(None, None, 1)
    assert found.allows(1 << 60)


def test_stores_stop_above_what_must_stay_free_and_go_on_later(
    counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    found = Woken(counters)
    found.update(Space(700, 10000), None, None)
    assert found.allows(200)
    with caplog.at_level(logging.WARNING):
        found.update(Space(400, 10000), None, None)
        assert not found.allows(1)
        found.update(Space(300, 10000), None, None)
        assert not found.allows(1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("/mnt/kv: 400 bytes are free, and stores leave 500 free")
    found.update(Space(5000, 10000), None, None)
    assert found.allows(2000)
    assert counters.take()["storage_free_bytes"] == 5000


def test_own_writes_use_up_the_space_and_call_for_another_look(counters: Counters) -> None:
    found = Woken(counters, max_bytes=1000)
    found.update(None, 200, 1000)
    assert found.allows(1)
    assert found.woken == 1, "the first store after a look"
    found.update(None, 200, 1000)
    write(found, 150)
    assert found.woken == 1
    write(found, 100)
    assert found.woken == 2
    assert found.is_urgent
    assert found.allows(150)
    assert not found.begin(151), "half of it is for others"
    assert found.woken == 2
    found.update(None, 450, 1000)
    assert not found.is_urgent
    assert found.begin(275)


def test_half_of_the_space_is_for_others_but_there_is_always_enough_for_one_chunk(
    counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    found = Woken(counters, max_bytes=1000)
    found.update(None, 600, 1000)
    assert found.allows(300), "a chunk of three objects"
    for _ in range(3):
        write(found, 100)
    assert not found.allows(100)
    assert not found.begin(100)
    assert not caplog.records, "there is space, after another look"
    found.update(None, 900, 1000)
    assert found.begin(100)
    assert not found.begin(1)
    assert "it holds 900 bytes" in caplog.text


def test_a_bound_that_is_reached_calls_for_no_look_at_each_store(counters: Counters) -> None:
    found = Woken(counters, max_bytes=1000)
    found.update(None, 1200, 1000)
    for _ in range(3):
        assert not found.begin(100)
        assert not found.allows(100)
    assert found.woken == 1, "the first store after a look"
    assert not found.is_urgent, "deletions free space, and no look"
    assert not found.refuses
    found.update(None, 1200, 1000)
    assert found.refuses
    found.update(None, 700, 1000)
    assert not found.refuses


def test_writes_that_go_on_count_and_those_that_failed_do_not(counters: Counters) -> None:
    found = Woken(counters, max_bytes=1000)
    found.update(None, 0, 1000)
    assert found.begin(400)
    listed = Finding(at=100.0, nbytes=50, seconds=0.1, free=9000)
    assert found.estimate(listed, None, 110.0) == 450
    assert found.estimate(listed, Space(8900, 10000), 110.0) == 550, "others write too"
    found.end(400, written=False)
    assert found.estimate(listed, None, 110.0) == 50
    assert found.begin(500)
    found.update(Space(800, 10000), None, None)
    assert not found.begin(0), "less is free than must stay and that write"


def test_the_narrower_bound_acts_and_is_named(
    counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    found = Woken(counters, max_bytes=1000)
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
    monkeypatch.setattr(bound_module.time, "monotonic", lambda: clock)
    found = Woken(counters, max_bytes=10000)
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
    assert found.written == 104


def test_own_writes_are_never_forgotten(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago the listing was: on S3 nothing else tells of them."""
    clock = 1000.0
    monkeypatch.setattr(bound_module.time, "monotonic", lambda: clock)
    found = Woken(counters, max_bytes=1 << 60)
    listed = Finding(at=5000.0, nbytes=0, seconds=0.1)
    for _ in range(12_000):
        clock += 1.0
        write(found, 1 << 30)
    assert found.estimate(listed, None, 17_000.0) == 12_000 << 30
    recent = Finding(at=16_990.0, nbytes=0, seconds=0.1)
    assert 10 << 30 <= found.estimate(recent, None, 17_000.0) <= 20 << 30


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 9)), max_size=60), st.floats(0, 99))
def test_a_sum_says_at_least_what_was_added_since(
    added: list[tuple[float, int]], seconds: float
) -> None:
    clock = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_module, "time", SimpleNamespace(monotonic=lambda: clock))
        patch.setattr(bound_module, "_MOST_PIECES", 8)
        total, times = Sum(), []
        for pause, nbytes in added:
            clock += pause
            total.add(nbytes)
            times.append((clock, nbytes))
        exact = sum(nbytes for at, nbytes in times if at >= clock - seconds)
        assert exact <= total.since(seconds) <= total.value == sum(n for _, n in added)
        assert len(total._ends) <= 8


def test_what_was_written_before_a_listing_does_not_count_twice(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stores fill a small shelf within a second, listings follow each other as fast."""
    clock = 1000.0
    monkeypatch.setattr(bound_module.time, "monotonic", lambda: clock)
    found, free = Woken(counters, max_bytes=1 << 20), 10_000
    found.look(Space(free, 20_000))
    for _ in range(3):
        clock += 0.2
        free -= 100
        write(found, 100)
        found.look(Space(free, 20_000))
    # The listing began 0.1 seconds before the last write.
    listed = Finding(at=clock - 0.1, nbytes=200, seconds=0.0, free=free + 100)
    assert found.estimate(listed, Space(free, 20_000), clock) == 300


def test_what_all_writers_tell_counts_where_free_space_is_not_known(counters: Counters) -> None:
    found = Woken(counters, max_bytes=10_000)
    write(found, 100)
    listed = Finding(at=100.0, nbytes=500, seconds=0.0, written=3000)
    assert found.estimate(listed, None, 110.0, 3700) == 1200
    # Some files were removed.
    assert found.estimate(listed, None, 110.0, 200) == 600
    assert found.estimate(listed, None, 110.0) == 600


def test_space_that_somebody_frees_hides_no_writes_of_others(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(bound_module.time, "monotonic", lambda: clock[0])
    found = Woken(counters, max_bytes=10000)
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
    found = Woken(counters, max_bytes=1000)
    found.look(Space(5000, 20000))
    # 300 bytes were deleted, and others wrote 200 meanwhile; then somebody else frees much.
    found.free(300)
    found.look(Space(5100, 20000))
    found.look(Space(9000, 20000))
    listed = Finding(at=100.0, nbytes=500, seconds=0.0, free=5300)
    assert found.estimate(listed, Space(9000, 20000), 110.0) == 700
