"""Fleets that keep one shelf within bounds, in simulated time: what they store, and what is lost.

The storages' costs are those of :mod:`tests.support.simulated`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from kvshelf.capacity.lease import SWEEP, Lease
from kvshelf.capacity.marks import MARKS
from kvshelf.format.names import parse_path
from kvshelf.shelf.pins import PINS, Pin, Pins
from tests.support.simulated import DIRECTORY, NAMESPACE, OBJECT_BYTES, S3, Costs, Fleet

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
#: A shelf of a million objects, and 10 writers of 200 objects a second each: each object stands for
#: so many.
SCALE = 50
OBJECTS = 1_000_000 // SCALE
RATE = 200 / SCALE

both = pytest.mark.parametrize(
    "costs",
    [
        pytest.param(DIRECTORY, id="directory"),
        pytest.param(S3, id="s3", marks=pytest.mark.slow),
    ],
)


@pytest.mark.long
@both
def test_ten_writers_at_the_bound_lose_few_stores(
    monkeypatch: pytest.MonkeyPatch, costs: Costs
) -> None:
    bound = OBJECTS * OBJECT_BYTES
    with Fleet(monkeypatch, costs, SCALE) as fleet:
        fleet.fill(int(0.85 * OBJECTS))
        for _ in range(10):
            fleet.add(max_bytes=bound)
        # They come to a shelf that is known.
        fleet.run(10 * MINUTE)
        assert fleet.count("sweeps") > 0
        for writer in fleet.writers:
            writer.store(RATE)
        fleet.run(10 * MINUTE)
        assert fleet.offered > 0.99 * 10 * RATE * 10 * MINUTE
        assert fleet.dropped < 0.05 * fleet.offered
        assert fleet.storage.most <= 1.1 * bound


@both
def test_no_process_deletes_below_its_own_bound(
    monkeypatch: pytest.MonkeyPatch, costs: Costs
) -> None:
    with Fleet(monkeypatch, costs) as fleet:
        fleet.fill(170)
        small = fleet.add(max_bytes=100 * OBJECT_BYTES)
        large = fleet.add(max_bytes=200 * OBJECT_BYTES)
        fleet.run(2 * HOUR)
        assert large.counters.snapshot().get("shelf_evicted_objects", 0) == 0
        assert small.counters.snapshot()["shelf_evicted_objects"] > 70
        assert 79 <= len(fleet.storage.names()) <= 90


@both
def test_the_bound_of_a_process_that_has_ended_deletes_nothing(
    monkeypatch: pytest.MonkeyPatch, costs: Costs
) -> None:
    with Fleet(monkeypatch, costs) as fleet:
        fleet.fill(70)
        small = fleet.add(max_bytes=100 * OBJECT_BYTES)
        fleet.run(5 * MINUTE)
        small.sweeper.close()
        fleet.fill(80)
        fleet.add(max_bytes=200 * OBJECT_BYTES)
        fleet.run(2 * HOUR)
        assert len(fleet.storage.names()) == 150


# ---------------------------------------------------------------------------------------- lies


def record(fields: Callable[[float], dict[str, object]]) -> Callable[[Fleet], None]:
    """A record of sweeps that says something; `fields` is called with the time."""

    def write(fleet: Fleet) -> None:
        said = {"version": 1, "owner": "x", "until": 0, **fields(fleet.storage.time)}
        fleet.storage.write(SWEEP, [json.dumps(said).encode()], "replace")

    return write


def file(name: str, data: bytes) -> Callable[[Fleet], None]:
    def write(fleet: Fleet) -> None:
        fleet.storage.write(name, [data], "replace")

    return write


def marks_of(age: bytes, keys: bytes) -> bytes:
    """Return what a file of marks begins with."""
    return b'{"version":1,"sections":[{"namespace":"%s","kind":"full","age":%s,"keys":%s}]}\n' % (
        NAMESPACE.encode(),
        age,
        keys,
    )


def finding(**fields: object) -> Callable[[Fleet], None]:
    said = {"nbytes": 1, "seconds": 0.0, "free": None, **fields}
    return record(lambda now: {"finding": {"at": now, **said}})


LIES: dict[str, Callable[[Fleet], None]] = {
    "a bound of one byte": record(lambda now: {"max_bytes": 1, "max_bytes_at": now}),
    "a bound for ever": record(lambda now: {"max_bytes": 1, "max_bytes_at": now + 1e9}),
    "more than there can be": finding(nbytes=1 << 62, seconds=1e18),
    "a sweep of a year": finding(seconds=3e7),
    "an empty shelf": finding(free=1 << 49),
    "an empty shelf and storage": finding(free=0),
    "an age of a second": finding(max_age=1.0),
    "a finding of tomorrow": record(
        lambda now: {"finding": {"at": now + DAY, "nbytes": 0, "seconds": 1.0}}
    ),
    "a finding of 1970": record(lambda now: {"finding": {"at": 0, "nbytes": 0, "seconds": 1e9}}),
    "a lease for ever": record(lambda now: {"until": now + 1e9}),
    "a lease that is kept": record(lambda now: {"until": now + 50}),
    "no JSON": file(SWEEP, b"\xff" * 400),
    "numbers that are none": file(
        SWEEP,
        b'{"version":1,"owner":7,"until":Infinity,"max_bytes":-1,"max_bytes_at":NaN,"finding":'
        b'{"at":-Infinity,"nbytes":1e400,"seconds":NaN}}',
    ),
    "an endless number of bytes that were written": file(
        ".kvshelf/written/0123456789abcdef-999999999999999999", b""
    ),
    "more bytes that were written than are true": file(
        ".kvshelf/written/0123456789abcdef-409600", b""
    ),
    "damaged marks": file(f"{MARKS}/1-0123456789abcdef", b"\xff" * 500),
    "marks without number": file(
        f"{MARKS}/1-0123456789abcdef", marks_of(b"0", b"Infinity") + bytes(64)
    ),
    "marks of an age of 400 digits": file(
        f"{MARKS}/1-0123456789abcdef", marks_of(b"1" + b"0" * 400, b"4") + bytes(64)
    ),
    "a damaged pin": file(f"{PINS}/x.json", b'{"version":1,"namespace":"'),
    "a pin of nothing": file(
        f"{PINS}/x.json",
        b'{"version":1,"namespace":null,"group":null,"keys":null,"until":null}',
    ),
    "a pin that has expired": file(
        f"{PINS}/x.json",
        b'{"version":1,"namespace":"%s","group":null,"keys":null,"until":1}' % NAMESPACE.encode(),
    ),
}


def deleted_by_rules(
    patch: pytest.MonkeyPatch,
    costs: Costs,
    lie: Callable[[Fleet], None] | None = None,
    *,
    again: float | None = None,
) -> list[str]:
    """Return what goes of a shelf that exceeds its bounds after one hour, in three hours in all."""
    with patch.context() as context, Fleet(context, costs) as fleet:
        storage, clock = fleet.storage, fleet.clock

        def tell() -> None:
            if lie is not None:
                lie(fleet)
                if again is not None:
                    clock.at(clock.now + again, tell)

        clock.at(0.0, tell)
        names = [fleet.new_name() for _ in range(100)]
        for name in names[50:]:
            storage.put(name, OBJECT_BYTES)
        # Half an object for records and the like.
        fleet.add(max_bytes=70 * OBJECT_BYTES + OBJECT_BYTES // 2, max_age="20h")
        fleet.run(HOUR)
        # Somebody copies what is old: a quarter of all is too old, and the rest is too much.
        for number, name in enumerate(names[:50]):
            storage.put(name, OBJECT_BYTES, age=25 * HOUR if number < 25 else 5 * HOUR)
        fleet.run(2 * HOUR)
        left = storage.names()
        return [name for name in names if name not in left]


@pytest.fixture(scope="module")
def honest() -> dict[Costs, list[str]]:
    """What goes where nobody lies."""
    with pytest.MonkeyPatch.context() as patch:
        found = {costs: deleted_by_rules(patch, costs) for costs in (DIRECTORY, S3)}
    assert all(len(names) == 44 for names in found.values())
    return found


@pytest.mark.long
@both
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_what_a_writer_says_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
    costs: Costs,
    lie: Callable[[Fleet], None],
    honest: dict[Costs, list[str]],
) -> None:
    assert deleted_by_rules(monkeypatch, costs, lie) == honest[costs]


@pytest.mark.long
@both
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_what_a_writer_says_again_and_again_deletes_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
    costs: Costs,
    lie: Callable[[Fleet], None],
    honest: dict[Costs, list[str]],
) -> None:
    assert set(deleted_by_rules(monkeypatch, costs, lie, again=10.0)) <= set(honest[costs])


@both
@pytest.mark.parametrize(
    ("whose", "days"),
    [("storage", [8]), ("storage", [-8]), ("clock", [8]), ("clock", [-8]), ("storage", [-8, 0, 8])],
    ids=["storage ahead", "storage behind", "machine ahead", "machine behind", "storage jumps"],
)
def test_a_wrong_clock_deletes_nothing_by_age_and_bounds_still_act(
    monkeypatch: pytest.MonkeyPatch, costs: Costs, whose: str, days: list[int]
) -> None:
    with Fleet(monkeypatch, costs) as fleet:
        storage, clock = fleet.storage, fleet.clock
        for _ in range(75):
            storage.put(fleet.new_name(), OBJECT_BYTES, age=HOUR)
        fleet.add(max_bytes=100 * OBJECT_BYTES, max_age="2d")

        def again() -> None:
            getattr(fleet, whose).ahead = random.choice(days) * DAY
            clock.at(clock.now + 30.0, again)

        fleet.run(10 * MINUTE)
        again()
        fleet.run(3 * HOUR)
        assert len(storage.names()) == 75
        for _ in range(50):
            storage.put(fleet.new_name(), OBJECT_BYTES, age=HOUR)
        fleet.run(1.1 * HOUR)
        assert 75 <= len(storage.names()) <= 90


# ------------------------------------------------------------------------------------- a pause


@both
def test_a_process_that_was_stopped_in_a_sweep_goes_by_what_is_true_then(
    monkeypatch: pytest.MonkeyPatch, costs: Costs
) -> None:
    """Neither what was used nor what was pinned meanwhile goes; the lease is another's by then."""
    with Fleet(monkeypatch, costs, scale=100) as fleet:
        storage, clock = fleet.storage, fleet.clock
        for _ in range(4000):
            storage.put(fleet.new_name(), OBJECT_BYTES, age=10 * HOUR)
        gone: list[tuple[float, str]] = []

        def note(name: str) -> None:
            gone.append((clock.now, name))
            if len(gone) == 50:
                clock.stop(clock.running, 20 * MINUTE)

        storage.on_delete = note
        fleet.add(max_bytes=2000 * OBJECT_BYTES)
        while len(gone) < 50:
            fleet.run(1.0)
            assert clock.now < HOUR
        stopped_at = clock.now
        left = sorted(storage.names())
        # With what is pinned they are less than what bounds leave.
        used, pinned = left[:300], left[1000:2000]
        fleet.run(10 * MINUTE)
        use(fleet, used)
        Pins.add(storage, "meanwhile", Pin(keys=keys_of(pinned)))
        fleet.run(stopped_at + 20 * MINUTE - 5.0 - clock.now)
        # Another process sweeps when it goes on.
        lease = Lease(storage)
        assert lease.take(lease.read(storage.time), storage.time) is not None
        held = content(fleet, SWEEP)
        fleet.run(30.0)
        assert content(fleet, SWEEP) == held, "neither renewed nor released"
        fleet.run(2 * HOUR)
        later = {name for at, name in gone if at > stopped_at}
        assert later, "it goes on"
        assert later.isdisjoint(used)
        assert later.isdisjoint(pinned)


def keys_of(names: list[str]) -> list[bytes]:
    return [parsed.key for name in names if (parsed := parse_path(name)) is not None]


def use(fleet: Fleet, names: list[str]) -> None:
    """Record that objects are used now, as engines do on this storage."""
    if fleet.storage.costs.far:
        keys = keys_of(names)
        data = marks_of(b"0", b"%d" % len(keys)) + b"".join(key[:16] for key in keys)
        fleet.storage.write(f"{MARKS}/1-fedcba9876543210", [data])
    for name in names:
        fleet.storage.touch(name)


def content(fleet: Fleet, name: str) -> bytes:
    with fleet.storage.open(name) as reader:
        data = bytearray(reader.size)
        reader.read_into(memoryview(data), 0)
    return bytes(data)
