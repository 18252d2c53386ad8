"""The time of a storage is asked for now and then, and goes on in between."""

from __future__ import annotations

from kvshelf.backends.clock import StorageClock
from tests.support.clocks import Clock


def test_the_storage_is_asked_now_and_then() -> None:
    here, told = Clock(1000.0), [5000.0, 7000.0]
    clock = StorageClock(lambda: told.pop(0), here)
    times = []
    for seconds in (0, 100, 400, 200):
        here.now += seconds
        times.append(clock.now())
    assert times == [5000, 5100, 5500, 7000]
