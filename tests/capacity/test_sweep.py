"""What a sweep sees of a shelf, what goes first, and what is looked at before it is deleted."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.backends.base import ObjectInfo
from kvshelf.capacity import limits
from kvshelf.capacity.keepers import NEVER_OLD, time_for_ages
from kvshelf.capacity.limits import DAY, FANS, HOUR
from kvshelf.capacity.order import EvictionOrder, aged, score
from kvshelf.capacity.sweep import (
    Choice,
    Leftover,
    Lister,
    Part,
    Reason,
    Rules,
    Unit,
    delete,
    fan_of,
    is_old,
    last_use,
    reason_to_delete,
)
from kvshelf.errors import PermanentStorageError, TransientStorageError
from kvshelf.format.kinds import FULL, WINDOW
from kvshelf.shelf.leftovers import TIER
from kvshelf.shelf.pins import PINS
from tests.capacity.shelves import FMT, Place, chunks, tail_of
from tests.sim.memory import MemoryStorage
from tests.sim.storage import Fault

NOW = 1e9
SPACE = "model-0123456789abcdef"
INF = math.inf


def unit(used: float = NOW, **fields: object) -> Unit:
    made = Unit(SPACE, "_", bytes(32), FULL, 0, tail=False, used=used)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


# ----------------------------------------------------------------------------- pure functions


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("mtime", "atime", "ctime", "shared", "expected"),
    [
        (-HOUR, None, None, False, -HOUR),
        (-HOUR, -60.0, None, False, -60.0),
        # An access time that is older than the modification is none.
        (-HOUR, -DAY, None, False, -HOUR),
        # Copied with its old times, an hour ago.
        (-300 * DAY, -300 * DAY, -HOUR, False, -HOUR),
        # Its owner was changed, or it was backed up, two days ago.
        (-300 * DAY, -300 * DAY, -2 * DAY, False, -300 * DAY),
        # Another user recorded a use.
        (-300 * DAY, -300 * DAY, -2 * DAY, True, -2 * DAY),
        # Times in the future, by more than a day.
        (2 * DAY, None, None, False, 0.0),
        (2 * DAY, None, -40 * DAY, False, -40 * DAY),
        (-HOUR, 2 * DAY, None, False, -HOUR),
        (HOUR, None, None, False, HOUR),
    ],
)
def test_last_use(
    mtime: float, atime: float | None, ctime: float | None, shared: bool, expected: float
) -> None:
    times = [None if time is None else NOW + time for time in (atime, ctime)]
    info = ObjectInfo("x", 1, NOW + mtime, *times)
    assert last_use(info, NOW, shared=shared) == NOW + expected


def test_oldest_goes_first_what_was_never_used_sooner_and_ends_before_beginnings() -> None:
    order = [
        unit(NOW - 600, index=0),  # never used: as if 1200 s old
        unit(NOW - 1100, index=9, hit=True),
        unit(NOW - 1105, index=3, hit=True),
        unit(NOW - 500, index=5, hit=True),
        unit(NOW + 50, index=5, hit=True),
    ]
    scores = [score(aged(one, NOW), one.index, 30.0) for one in order]
    assert scores == sorted(scores, reverse=True)
    assert all(later >= 0 for later in scores)


@pytest.mark.parametrize(
    ("of", "rules", "cuts", "pinned", "expected"),
    [
        (unit(NOW - HOUR - 1, tail=True), Rules(), {}, False, Reason.TAIL),
        (unit(NOW - HOUR - 1, tail=True), Rules(), {}, True, Reason.TAIL),
        (unit(NOW - HOUR + 1, tail=True), Rules(), {}, False, None),
        (unit(NOW - 900 * DAY), Rules(), {}, False, None),
        (unit(NOW - 3 * DAY), Rules(max_age=2 * DAY), {}, False, Reason.AGE),
        (unit(NOW - 3 * DAY), Rules(max_age=2 * DAY), {}, True, None),
        (unit(), Rules(), {"": 7.0}, False, Reason.SIZE),
        (unit(), Rules(), {"": 7.1}, False, None),
        (unit(), Rules(), {"": 7.0}, True, None),
        (unit(), Rules(), {f"{SPACE}/_": 6.0, "": INF}, False, Reason.GROUP),
        (unit(), Rules(), {f"{SPACE}/x": 6.0}, False, None),
        (unit(), Rules(choice=Choice()), {}, False, Reason.CHOSEN),
        (unit(), Rules(choice=Choice()), {}, True, None),
        (unit(), Rules(choice=Choice(pinned=True)), {}, True, Reason.CHOSEN),
        (unit(), Rules(choice=Choice(group="0" * 16)), {}, False, None),
        (unit(NOW - 60), Rules(choice=Choice(unused_for=70.0)), {}, False, None),
        (unit(NOW - 80), Rules(choice=Choice(unused_for=70.0)), {}, False, Reason.CHOSEN),
        # A choice is of nothing else.
        (unit(NOW - 3 * DAY), Rules(max_age=1.0, choice=Choice("x")), {"": 0.0}, False, None),
    ],
)
def test_why_a_unit_goes(
    of: Unit, rules: Rules, cuts: dict[str, float], pinned: bool, expected: Reason | None
) -> None:
    assert reason_to_delete(of, rules, cuts, 7.0, NOW, pinned=pinned) is expected
    # While the clocks differ nothing goes because of its age.
    found = reason_to_delete(of, rules, cuts, 7.0, NEVER_OLD, pinned=pinned)
    by_age = expected in (Reason.TAIL, Reason.AGE) or (rules.choice and rules.choice.unused_for)
    assert found is (None if by_age else expected)


def test_leftovers_go_after_an_hour_or_a_day() -> None:
    for reason in (Reason.TEMPORARY, Reason.MARKER, Reason.RESERVED, Reason.EMPTY):
        least = DAY if reason in (Reason.RESERVED, Reason.EMPTY) else HOUR
        assert is_old(Leftover("x", reason, 1, NOW - least - 1), Rules(), NOW)
        assert not is_old(Leftover("x", reason, 1, NOW - least + 1), Rules(), NOW)
        assert not is_old(Leftover("x", reason, 1, 0.0), Rules(leftovers=None), NOW)
        whole = Rules(leftovers=None, choice=Choice(leftovers=True))
        assert is_old(Leftover("x", reason, 1, NOW), whole, NOW) is (reason is Reason.MARKER)


# ----------------------------------------------------------------------------- slices


def filled(seed: int, storage: MemoryStorage) -> set[str]:
    """Fill a shelf with namespaces and groups of all sizes; return the names of objects."""
    draw = random.Random(seed)
    names = set()
    for space in range(draw.randrange(1, 9)):
        folder = f"m-{draw.randbytes(8).hex()}"
        storage.put(f"{folder}/namespace.json", 10)
        for group in draw.sample(["_", *(f"{number:016x}" for number in range(5))], 3):
            for _ in range(draw.choice([0, 1, 30, 3000 if space == 0 else 300])):
                key = draw.randbytes(32).hex()
                kinds = ["", "-window"][: draw.randrange(1, 3)]
                for kind in kinds:
                    for shard in range(2):
                        name = f"{folder}/{group}/{key[:2]}/{key}-3{kind}-{shard}of2.safetensors"
                        storage.put(name, 1000)
                        names.add(name)
    return names


@pytest.mark.parametrize("at_once", [1, 1000], ids=["folders", "ranges"])
@pytest.mark.parametrize("seed", range(4))
def test_slices_of_a_round_are_the_whole_shelf(seed: int, at_once: int) -> None:
    storage = MemoryStorage(deletes_at_once=at_once)
    names = filled(seed, storage)
    lister = Lister(storage)
    place = random.Random(seed).randrange(FANS)
    for turn in range(3):
        seen: Counter[str] = Counter()
        listed = 0
        part = Part()
        while listed < FANS:
            found, width = lister.sweep((place + listed) % FANS, 8, 200, NOW)
            assert width <= FANS, "something is listed twice"
            listed += width
            part.join(found)
            seen.update(name for one in found.units for name in one.names)
        # In the first round it is not known what is small, and in the last all is.
        assert set(seen) == names or not turn
        if turn == 2 and listed == FANS:
            assert set(seen.values()) == {1}
            assert all(part.seen[where][0] == 1 for where in part.seen)
    whole = [name for found in lister.whole(None, NOW) for one in found.units for name in one.names]
    assert sorted(whole) == sorted(names)


def test_small_namespace_is_asked_for_in_its_own_slice_only() -> None:
    storage = MemoryStorage()
    for number in range(300):
        storage.put(f"m-{number:016x}/_/aa/{'aa' * 32}-0-0of1.safetensors", 1)
    lister = Lister(storage)
    lister.sweep(0, FANS, 1, NOW)
    storage.lists = 0
    part, width = lister.sweep(10, 1, 1, NOW)
    assert storage.lists < 40 * width
    mine = {f"m-{number:016x}" for number in range(300)}
    mine = {name for name in mine if 10 <= fan_of(name) < 10 + width}
    assert {one.space for one in part.units} == mine


def test_shelf_whose_namespaces_cannot_be_listed_is_no_error_unless_it_is_its_root() -> None:
    storage = MemoryStorage()
    filled(1, storage)
    down = TransientStorageError(errno.EIO, "down", "x")
    storage.fail = lambda operation, name: down if name else None
    part, _ = Lister(storage).sweep(0, FANS, 10, NOW)
    assert {*storage.folders()} < part.skipped.keys() and not part.seen
    storage.fail = lambda operation, name: down
    with pytest.raises(TransientStorageError):
        Lister(storage).sweep(0, FANS, 10, NOW)


@pytest.mark.parametrize("at_once", [1, 1000], ids=["folders", "ranges"])
def test_group_whose_listing_fails_on_the_way_counts_for_nothing(at_once: int) -> None:
    storage = MemoryStorage(deletes_at_once=at_once)
    for fan in range(FANS):
        storage.put(f"{SPACE}/_/{fan:02x}/{fan:02x}{'a' * 62}-0-0of1.safetensors", 1)
    down = TransientStorageError(errno.EIO, "down", "x")
    listing = storage.list

    def cut(prefix: str, **options: Any) -> Iterator[ObjectInfo]:
        is_cut = prefix.startswith(f"{SPACE}/_") and options.get("start") != "00"
        yield from itertools.islice(listing(prefix, **options), 5 if is_cut else None)
        if is_cut:
            raise down

    storage.list = cut  # type: ignore[method-assign]
    part, listed = Lister(storage).sweep(0, 10, 1000, NOW)
    share = part.seen.get(f"{SPACE}/_", (0.0, 0))[0]
    assert listed == FANS and part.skipped
    # Of folders none is listed, of ranges the first.
    assert len(part.units) == share * FANS == (10 if at_once > 1 else 0)


def test_cut_after_a_sweep_of_the_whole_shelf_is_the_score_that_frees_enough() -> None:
    # Of these two numbers `a + (b - a)` is more than b.
    order = EvictionOrder(None, None)
    order._learned[""] = 1.672
    units = [(0.433, 100), (0.4, 100)]
    assert order.threshold("", units, low=50.0, high=0.0, weight=1.0) == units[0][0]


@pytest.mark.parametrize("at_once", [1, 1000], ids=["directory", "s3"])
def test_folder_with_very_many_units_is_sampled_by_sweeps_and_whole_for_commands(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(limits, "MOST_UNITS", 2000)
    storage, draw = MemoryStorage(deletes_at_once=at_once), random.Random(3)
    for _ in range(5000):
        key = f"ab{draw.randbytes(31).hex()}"
        storage.put(f"{SPACE}/_/ab/{key}-0-0of1.safetensors", 100)
    temporary = f"{SPACE}/_/ab/.{'ab' * 32}-0-0of1.safetensors.{'0' * 16}.tmp"
    storage.put(temporary, 1)
    lister, seen, leftovers, rests = Lister(storage, samples=True), 0.0, set(), []
    lister._pace = lambda: rests.append(None)
    for _ in range(40):
        part, _ = lister.sweep(0xAB, 1, 1, NOW)
        assert len(part.units) <= 2 * 5000 / 8
        seen += len(part.units) / part.seen[f"{SPACE}/_"][0] / FANS / 40
        leftovers |= {leftover.name for leftover in part.leftovers}
    assert 0.9 * 5000 <= seen <= 1.1 * 5000 and temporary in leftovers
    assert len(rests) >= 5000
    assert sum(len(part.units) for part in Lister(storage).whole(None, NOW)) == 5000


def test_folder_whose_keys_are_no_hashes_is_looked_at_in_pieces() -> None:
    storage = MemoryStorage()
    for index in range(9000):
        storage.put(f"{SPACE}/_/ab/{'ab' * 32}-{index}-0of1.safetensors", 100)
    lister = Lister(storage, samples=True)
    for expected in (8193, 807, 0):
        part, _ = lister.sweep(0xAB, 1, 1, NOW)
        assert len(part.units) == expected
        storage.delete([name for unit in part.units for name in unit.names])


@given(st.permutations([DAY, 3 * HOUR, 5 * HOUR]))
def test_unit_was_used_when_any_of_its_objects_was(ages: list[float]) -> None:
    """They were written a day ago, and the first was not used since."""
    key, part = "ab" * 32, Part()
    names = [f"{SPACE}/_/ab/{key}-0-{shard}of3.safetensors" for shard in range(3)]
    rows = [
        ObjectInfo(name, 10, NOW - DAY, NOW - age) for name, age in zip(names, ages, strict=True)
    ]
    temporary = f"{SPACE}/_/ab/.{key}-0-0of3.safetensors.{'0' * 16}.tmp"
    # Its time may be that of what it was copied from.
    rows.append(ObjectInfo(temporary, 10, NOW - DAY, None, NOW - 60))
    part.add_rows(rows, NOW, shared=False)
    [found], [leftover] = part.units, part.leftovers
    assert (found.used, found.hit, found.names) == (NOW - 3 * HOUR, True, names)
    assert leftover.changed == NOW - 60


def test_what_lies_beside_objects_is_told_apart(place: Place) -> None:
    folder = FMT.namespace.folder
    names = place.put(FMT, [*chunks(2), tail_of()])
    temporary = f".x.{'0' * 16}.tmp"
    place.write(f"{folder}/_/aa/.{'aa' * 32}-0-0of2.safetensors.{'0' * 16}.tmp")
    place.write(f"{folder}/.namespace.json.{'0' * 16}.tmp")
    place.write(f".kvshelf/{temporary}")
    place.write(f"{folder}/.kvshelf/gave-up/{'a' * 32}", b"")
    place.write(".kvshelf/written/x")
    # Names and sizes that no marker of a hand-over has.
    place.write(f"{folder}/.kvshelf/gave-up/{'b' * 32}", b"x")
    place.write(f"{folder}/.kvshelf/gave-up/b", b"")
    place.write(f"{PINS}/x.json")
    place.write(TIER)
    place.write(f"{folder}/notes.txt")
    place.write(f"{folder}/_/aa/{temporary}")
    for key in ("aa" * 32, "ab" * 32):
        os.truncate(place.write(f"{folder}/_/aa/{key}-0-0of2.safetensors"), 1 << 43)
    # A window is a unit of its own, beside the full chunk of its key.
    place.write(names[0].replace("-0of", f"-{WINDOW}-0of"))
    found = Part()
    for part in Lister(place.backend).whole(None, place.now):
        found.join(part)
    kinds = Counter((one.kind, one.tail) for one in found.units)
    assert kinds == {(FULL, False): 2, (FULL, True): 1, (WINDOW, False): 1}
    told = Counter(one.reason for one in found.leftovers)
    # A file of eight TiB is no object, and needs no space; without the name of one it is foreign.
    assert told == {Reason.TEMPORARY: 4, Reason.MARKER: 1, Reason.RESERVED: 3}
    assert sum(one.nbytes for one in found.leftovers) < 1 << 20


# ----------------------------------------------------------------------------- deletion


def picked(place: Place) -> list[Unit]:
    return [one for part in Lister(place.backend).whole(None, place.now) for one in part.units]


def test_what_was_used_or_stored_again_meanwhile_stays_with_all_its_shards(place: Place) -> None:
    place.put(FMT, chunks(3), age=DAY)
    units = picked(place)
    used, gone, other = units
    os.utime(place.path(used.names[1]), (place.now, place.now - DAY))
    place.path(gone.names[0]).unlink()
    outcome = delete(place.backend, [(one, Reason.SIZE) for one in units], now=place.now)
    assert outcome.error is None
    assert (outcome.kept, outcome.gone) == (FMT.shards, 1)
    assert outcome.deleted == {Reason.SIZE: 2 * FMT.shards - 1}
    assert place.objects() == set(used.names)
    assert other.nbytes >= sum(FMT.object_size(shard) for shard in range(FMT.shards))


def test_deletion_ends_after_the_request_in_which_it_is_stopped(place: Place) -> None:
    place.put(FMT, chunks(40), age=DAY)
    units = [(one, Reason.SIZE) for one in picked(place)]
    outcome = delete(place.backend, units, now=place.now, stop=lambda: True)
    assert 0 < outcome.done < 40 * FMT.shards == outcome.deleted.total() + len(place.objects())


def test_folder_in_which_there_is_something_again_stays_without_an_error(place: Place) -> None:
    [name, *_] = place.put(FMT, chunks(1))
    folder = name.rpartition("/")[0]
    empty = Leftover(folder, Reason.EMPTY, 0, 0.0)
    outcome = delete(place.backend, [(empty, Reason.EMPTY)], now=place.now)
    assert (outcome.kept, outcome.failed, outcome.done) == (1, 0, 1)
    assert place.path(name).exists()


def test_what_a_command_chose_is_not_looked_at_again(place: Place) -> None:
    place.put(FMT, chunks(2), age=DAY)
    units = picked(place)
    os.utime(place.path(units[0].names[0]), (place.now, place.now))
    delete(place.backend, [(one, Reason.CHOSEN) for one in units], now=place.now)
    assert not place.objects()


def test_refusal_is_told_and_many_end_the_deletion(place: Place) -> None:
    place.put(FMT, chunks(100), age=DAY)
    place.faults.add(Fault("delete", error=PermanentStorageError(errno.EPERM, "no", "x")))
    outcome = delete(place.backend, [(one, Reason.SIZE) for one in picked(place)], now=place.now)
    assert 64 <= outcome.failed < 200 and outcome.error is not None


def test_empty_folders_go_a_day_after_they_became_empty(tmp_path: Path, place: Place) -> None:
    place.put(FMT, chunks(4))
    place.put(FMT, [tail_of()])
    folder = tmp_path / FMT.namespace.folder
    assert (folder / "namespace.json").exists() or place.write(
        f"{FMT.namespace.folder}/namespace.json"
    )
    for name in place.objects():
        place.path(name).unlink()

    def empty(at: float) -> None:
        for _ in range(3):
            for part in Lister(place.backend).whole(None, at):
                old = [(one, one.reason) for one in part.leftovers if is_old(one, Rules(), at)]
                delete(place.backend, old, now=at)

    empty(place.now - 2.5 * DAY)
    assert len(list(folder.rglob("*"))) > 3
    for path in [folder, *folder.rglob("*")]:
        with suppress(FileNotFoundError):
            os.utime(path, (place.now - 2 * DAY,) * 2)
    empty(place.now + 2 * DAY)
    assert not folder.exists()


@pytest.mark.parametrize("shared", [True, False])
def test_use_that_others_record_by_a_link_is_a_use_where_they_do(shared: bool) -> None:
    """Elsewhere an object that was copied with its old times was not used since."""
    name = f"{SPACE}/_/ab/{'ab' * 32}-3-0of1.safetensors"
    part = Part()
    part.add_rows([ObjectInfo(name, 1, NOW - 9, NOW - 9, NOW - 1, 1)], NOW, shared=shared)
    assert part.units[0].used == NOW - 1 and part.units[0].hit is shared


@pytest.mark.parametrize(
    ("ahead", "by"),
    [
        *((-4000.0, "nobody"), (-3600.0, "storage"), (-10.0, "storage")),
        *((10.0, "machine"), (3600.0, "machine"), (4000.0, "nobody")),
    ],
)
def test_ages_go_by_the_clock_that_is_behind_unless_an_hour_lies_between(
    ahead: float, by: str
) -> None:
    own = time.time()
    expected = {"storage": own + ahead, "machine": own, "nobody": NEVER_OLD}
    assert time_for_ages(own + ahead, "memory://x") == pytest.approx(expected[by], abs=5.0)
