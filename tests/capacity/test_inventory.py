"""An inventory holds all that is on a shelf, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from kvshelf.backends import ObjectInfo
from kvshelf.capacity import inventory as inventory_module
from kvshelf.capacity.collect import plan
from kvshelf.capacity.eviction import Units
from kvshelf.capacity.files import Sort, last_use
from kvshelf.capacity.inventory import Inventory, Scan
from kvshelf.capacity.marks import Batch, Marks, write
from kvshelf.capacity.rules import Rules
from kvshelf.errors import PermanentStorageError, TransientStorageError
from kvshelf.format.forest import GONE, UNKNOWN
from kvshelf.format.kinds import FULL, STATE, STATE_BIT, WINDOW, WINDOW_BIT
from kvshelf.shelf.pins import Pin, Pins
from tests.capacity.shelves import DAY, Place, salted, tail_of
from tests.sim.storage import Fault
from tests.support.formats import hybrid_format, make_format
from tests.support.prompts import make_chunks

FMT = make_format(native=False)
OTHER = make_format(native=False, weights="user:other")
TEMPORARY = ".0123456789abcdef.tmp"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "shelf")


def test_every_object_is_in_it_under_its_name(place: Place) -> None:
    hybrid = hybrid_format()
    names = place.put(FMT, [*make_chunks(FMT, 5), tail_of()], age=100, used=30)
    names += place.put(FMT, [salted(chunk, "0123456789abcdef") for chunk in make_chunks(FMT, 2, 1)])
    names += place.put(OTHER, make_chunks(OTHER, 3))
    for kind in (FULL, WINDOW, STATE):
        names += place.put(hybrid.of(kind), make_chunks(hybrid, 2))
    found = place.scan()
    assert sorted(map(found.name, range(len(found)))) == sorted(names)
    sizes = {found.name(row): int(found.size[row]) for row in range(len(found))}
    assert sizes == {name: place.path(name).stat().st_size for name in names}
    first = names.index(found.name(int(found.first_rows[0])))
    assert found.key[found.first_rows[0]].tobytes().hex() in names[first]
    descriptions = place.root.glob("*/namespace.json")
    assert found.nbytes == sum(sizes.values()) + sum(path.stat().st_size for path in descriptions)
    # 6 + 2 + 3 + 2, whatever their shards and kinds.
    assert found.unit_count == 13
    together = sorted(len(found.members(unit)) for unit in range(found.unit_count))
    shards = sum(hybrid.of(kind).shards for kind in (FULL, WINDOW, STATE))
    assert together == [FMT.shards] * 11 + [shards] * 2


@pytest.mark.parametrize("parents", [False, True])
def test_units_are_the_same_however_many_are_joined_at_the_same_time(
    place: Place, monkeypatch: pytest.MonkeyPatch, parents: bool
) -> None:
    hybrid = hybrid_format()
    for seed in range(4):
        place.put(FMT, make_chunks(FMT, 5, seed), age=100 * seed, used=30)
        for kind in (FULL, WINDOW, STATE):
            place.put(hybrid.of(kind), make_chunks(hybrid, 3, seed), age=100 * seed)
    found = place.scan(parents=parents)
    pins = Pins({"it": Pin(keys=[make_chunks(FMT, 1)[0].key])})
    whole = found.units(pins=pins)
    assert whole.pinned.sum() == 1
    monkeypatch.setattr(inventory_module, "_UNITS_AT_ONCE", 3)
    parted = found.units(pins=pins)
    for column in fields(Units):
        np.testing.assert_array_equal(
            getattr(parted, column.name), getattr(whole, column.name), column.name
        )


def test_an_empty_shelf_has_nothing(place: Place) -> None:
    found = place.scan(parents=True)
    assert (len(found), found.unit_count, found.nbytes) == (0, 0, 0)
    assert len(found.units()) == 0


def test_files_beside_objects_are_told_apart(place: Place) -> None:
    (name, *_) = place.put(FMT, make_chunks(FMT, 1))
    folder = FMT.namespace.folder
    inner, _, base = name.rpartition("/")
    expected = {
        Sort.TEMPORARY: [
            f"{inner}/.{base}{TEMPORARY}",
            f"{folder}/.namespace.json{TEMPORARY}",
            f"{folder}/.kvshelf/gave-up/.{'1' * 32}{TEMPORARY}",
            f".kvshelf/.sweep{TEMPORARY}",
        ],
        Sort.MARKER: [f"{folder}/.kvshelf/gave-up/{'2' * 32}"],
        Sort.RESERVED: [".kvshelf/pins/mine.json"],
        Sort.FOREIGN: [
            f"{folder}/README",
            f"{inner}/.{base}.tmp",
            f"{inner}/.foreign.txt{TEMPORARY}",
            f"{inner}/{base.replace('0of', '00of')}",
            f"{folder}/_/zz/{base}",
        ],
    }
    for sort, names in expected.items():
        for number, name in enumerate(names):
            place.write(name, b"" if sort is Sort.MARKER else bytes(10 + number), age=50)
    # None of these is in a folder of ours.
    place.write(f"data/_/{base[:2]}/{base}")
    place.write(f".{base}{TEMPORARY}")
    found = place.scan()
    counts = {sort: found.totals[sort].count for sort in Sort if found.totals[sort].count}
    assert counts == {Sort.DESCRIPTION: 1, **{sort: len(names) for sort, names in expected.items()}}
    named = [sort for sort in expected if sort not in (Sort.RESERVED, Sort.FOREIGN)]
    assert {leftover.name for leftover in found.leftovers} == {
        name for sort in named for name in expected[sort]
    }
    foreign = sum(place.path(name).stat().st_size for name in expected[Sort.FOREIGN])
    files = [place.path(name) for name in place.files() if name.startswith((".kvshelf", folder))]
    assert found.nbytes == sum(path.stat().st_size for path in files) - foreign


def test_a_scan_goes_on_where_it_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put(FMT, [*make_chunks(FMT, 6), tail_of()], age=100)
    place.put(FMT, [salted(chunk, "0123456789abcdef") for chunk in make_chunks(FMT, 4, 1)])
    hybrid = hybrid_format()
    for kind in (FULL, WINDOW, STATE):
        place.put(hybrid.of(kind), make_chunks(hybrid, 3))
    folder = FMT.namespace.folder
    for name in ("notes", "_/notes", "_/00/notes", ".kvshelf/notes", "zz/notes"):
        place.write(f"{folder}/{name}", b"foreign")
    place.write(f"{folder}/.kvshelf/gave-up/{'2' * 32}", b"")
    place.write(f".kvshelf/.sweep{TEMPORARY}")

    def content(found: Inventory | None) -> object:
        assert found is not None
        names = sorted((found.name(row), int(found.size[row])) for row in range(len(found)))
        left = sorted(left.name for left in found.leftovers)
        return names, left, found.totals, found.unit_count, sorted(found.units().parent)

    whole = content(place.scan())
    listed: list[str] = []
    failing, left = "", 0

    def meet(operation: str, name: str) -> tuple[()]:
        nonlocal left
        if operation == failing:
            left -= 1
            if left == 0:
                raise TransientStorageError(5, "EIO")
        if operation == "entries":
            listed.append(name)
        return ()

    def stop() -> bool:
        nonlocal left
        left -= failing == "stop"
        return failing == "stop" and left == 0

    monkeypatch.setattr(place.faults, "meet", meet)
    for failing in ("entries", "folders", "open", "read", "stop"):
        for calls in range(1, 1000):
            left = calls
            scan, first = Scan(place.faults), None
            with contextlib.suppress(TransientStorageError):
                first = scan.run(stop)
            if first is not None:
                break
            seen = {*listed}
            listed.clear()
            assert content(scan.run()) == whole, (failing, calls)
            again = {name.rpartition("/")[0] for name in seen.intersection(listed)}
            assert len(again) <= 1, "only the folder in which it ended is listed again"
            listed.clear()
        listed.clear()
        assert calls > 1, failing


def test_a_part_is_listed(place: Place) -> None:
    """Of folders, files, and what of them is wanted."""
    first, second, *_ = place.put(FMT, make_chunks(FMT, 2))
    other, *_ = place.put(OTHER, make_chunks(OTHER, 1))
    place.write(f".kvshelf/.sweep{TEMPORARY}")

    def listed(**options: object) -> set[str]:
        found = place.scan(parents=None, **options)
        return {left.name for left in found.leftovers} | set(map(found.name, range(len(found))))

    assert other in listed(folders=[OTHER.namespace.folder])
    assert first not in listed(folders=[OTHER.namespace.folder, "none-" + "0" * 16])
    inner = first.rpartition("/")[0]
    assert listed(folders=[inner, ".kvshelf"]) >= {first, f".kvshelf/.sweep{TEMPORARY}"}
    assert listed(folders=[inner], wanted=lambda name: name == first) == {first}
    assert listed(folders=(), names=[second, other, f"{inner}/none"]) == {second, other}


@pytest.mark.parametrize("limit", ["_MOST_OBJECTS", "_MOST_GROUPS", "_MOST_FILES"])
def test_more_than_fits_is_counted_or_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    for number in range(8):
        place.put(FMT, [salted(make_chunks(FMT, 1, number)[0], f"{number:016x}")])
    held = place.scan().nbytes
    monkeypatch.setattr(inventory_module, limit, 4)
    with pytest.raises(PermanentStorageError, match="may have no end"):
        place.scan()
    found = place.scan(in_part=True)
    assert found.is_part
    assert 0 < len(found) <= 4 * FMT.shards
    assert found.nbytes <= held
    assert (found.nbytes == held) == (limit != "_MOST_FILES")
    assert len(plan(found, Rules(max_bytes=1)).units)


def test_links_are_neither_followed_nor_counted(place: Place, tmp_path: Path) -> None:
    (name, *_) = place.put(FMT, make_chunks(FMT, 1), shards=[0])
    elsewhere = tmp_path / "elsewhere"
    Place(elsewhere).put(OTHER, make_chunks(OTHER, 1))
    os.symlink(elsewhere / OTHER.namespace.folder, place.root / OTHER.namespace.folder)
    os.symlink(elsewhere, place.root / FMT.namespace.folder / ("0" * 16))
    os.symlink(place.path(name), str(place.path(name)).replace("0of2", "1of2"))
    found = place.scan()
    assert [found.name(row) for row in range(len(found))] == [name]


def test_objects_of_another_version_of_the_format_are_none_of_ours(place: Place) -> None:
    names = place.put(FMT, make_chunks(FMT, 2))
    record = {**FMT.namespace.record, "format": "kvshelf/2"}
    data = json.dumps(record).encode()
    place.write(f"{FMT.namespace.folder}/namespace.json", data)
    held = sum(place.path(name).stat().st_size for name in names) + len(data)
    found = place.scan()
    assert len(found) == 0
    assert found.nbytes == found.totals[Sort.OTHER_VERSION].nbytes == held


@pytest.mark.parametrize("data", [None, b"", bytes(300), b"[" * 100_000, b'{"kinds": 3}', b"[1]"])
def test_objects_count_also_where_the_description_is_damaged(
    place: Place, data: bytes | None
) -> None:
    place.put(FMT, make_chunks(FMT, 2))
    description = place.path(f"{FMT.namespace.folder}/namespace.json")
    description.unlink()
    if data is not None:
        description.write_bytes(data)
    assert len(place.scan()) == 4


def test_folders_of_one_namespace_hold_parts_of_one_unit(place: Place) -> None:
    chunks = make_chunks(FMT, 2)
    place.put(FMT, chunks, shards=[0])
    folder = FMT.namespace.folder
    for chunk in chunks:
        name = place.name(FMT, chunk, 1)
        place.write(name.replace(folder, f"another-slug-{folder[-16:]}"), bytes(5))
    units = place.scan().units()
    assert len(units) == 2
    assert units.broken is not None and not units.broken.any()


def test_units_say_what_hits_need(place: Place) -> None:
    hybrid = hybrid_format()
    first, second = make_chunks(hybrid, 2)
    place.put(hybrid, [first, second], age=500, used=400)
    place.put(hybrid.of(WINDOW), [first], age=500, used=100, shards=[0])
    place.put(hybrid.of(STATE), [second], age=300)
    found = place.scan()
    units = found.units()
    one, two = (int(place_) for place_ in units.index.argsort())
    assert units.parent[two] == one and units.parent[one] == GONE
    assert units.needs is not None and units.needs.tolist() == [7, 7]
    assert units.broken is not None
    assert (units.broken[one], units.broken[two]) == (WINDOW_BIT, 0)
    assert units.state[one] == units.window[two] == 0 < units.state[two]
    assert units.window_used is not None and units.state_used is not None
    assert units.used[one] - place.now == pytest.approx(-100, abs=1)
    assert units.window_used[one] == units.used[one]
    assert units.state_used[two] - place.now == pytest.approx(-300, abs=1)
    assert units.hit.all()
    assert STATE_BIT & int(units.needs[0])


def test_marks_and_pins_count_for_units(place: Place) -> None:
    chunks = make_chunks(FMT, 3)
    place.put(FMT, chunks, age=500)
    found = place.scan()
    write(place.backend, [Batch(FMT.namespace.folder, 7.0, chunks[1].key[:16])])
    for path in (place.root / ".kvshelf/uses").iterdir():
        place.age(path, 0)
    marks = Marks.read(place.backend)
    pins = Pins({"it": Pin(keys=[chunks[2].key])}, {}, place.now)
    units = found.units(marks=marks, pins=pins)
    by_key = {found.key[row].tobytes(): n for n, row in enumerate(found.first_rows)}
    zero, one, two = (by_key[chunk.key] for chunk in chunks)
    assert units.used[one] == pytest.approx(place.now - 7, abs=1e-3)
    assert units.used[zero] == units.used[two] < place.now - 400
    assert (units.hit[zero], units.hit[one]) == (False, True)
    assert (units.pinned[zero], units.pinned[one], units.pinned[two]) == (False, False, True)


def test_parents_are_read_once_and_only_where_asked_for(place: Place) -> None:
    place.put(FMT, make_chunks(FMT, 4))
    assert (place.scan().units().parent < 0).all()
    place.faults.counts.clear()
    found = place.scan(parents=True)
    units = found.units()
    assert sorted(units.index[units.parent[units.parent >= 0]].tolist()) == [0, 1, 2]
    # The description is read too.
    assert place.faults.counts["open"] == 4
    place.put(FMT, make_chunks(FMT, 4, 1))
    place.faults.counts.clear()
    again = place.scan(parents=True, before=found.parents)
    assert place.faults.counts["open"] == 4
    assert (again.units().parent >= 0).sum() == 6


def test_an_object_whose_beginning_is_bad_names_no_parent(place: Place) -> None:
    first, second = make_chunks(FMT, 2)
    place.put(FMT, [first], age=10)
    (bad, good) = place.put(FMT, [second], age=10)
    place.path(bad).write_bytes(bytes(100))
    units = place.scan(parents=True).units()
    assert UNKNOWN not in units.parent
    place.path(good).write_bytes(b"")
    assert sorted(place.scan(parents=True).units().parent) == [GONE, UNKNOWN]


def test_parents_of_a_group_are_looked_for_in_it(place: Place) -> None:
    first, second = make_chunks(FMT, 2)
    place.put(FMT, [first, salted(second, "0" * 16)])
    assert sorted(place.scan(parents=True).units().parent) == [GONE, GONE]
    place.put(FMT, [salted(first, "0" * 16)])
    assert sorted(place.scan(parents=True).units().parent >= 0) == [False, False, True]


def test_a_scan_ends_when_it_is_told_to(place: Place) -> None:
    place.put(FMT, make_chunks(FMT, 3))
    asked = iter([False, False, True])
    assert Scan(place.backend).run(lambda: next(asked)) is None


def test_trouble_of_the_storage_ends_a_scan(place: Place) -> None:
    place.put(FMT, make_chunks(FMT, 3))
    place.faults.add(Fault("open", "*/namespace.json", error=TransientStorageError(5, "EIO")))
    with pytest.raises(TransientStorageError):
        Scan(place.backend).run()


NOW = 1e9


@pytest.mark.parametrize(
    ("mtime", "atime", "ctime", "expected"),
    [
        (NOW - 100, None, None, NOW - 100),
        (NOW - 100, NOW - 50, None, NOW - 50),
        (NOW - 50, NOW - 100, NOW - 9 * DAY, NOW - 50),
        # Copied here just now with its old times, or long ago.
        (NOW - 9 * DAY, NOW - 9 * DAY, NOW - 3600, NOW - 3600),
        (NOW - 9 * DAY, NOW - 8 * DAY, NOW - 2 * DAY, NOW - 8 * DAY),
        # A little in the future: another machine's clock. Far in the future, or none: no times.
        (NOW + 60, None, None, NOW + 60),
        (9e12, NOW - 70, None, NOW - 70),
        (9e12, 9e12, NOW - 3 * DAY, NOW - 3 * DAY),
        (9e12, 9e12, 9e12, NOW),
        (0.0, 0.0, None, NOW),
        (-5.0, None, None, NOW),
    ],
)
def test_the_last_use_of_an_object(
    mtime: float, atime: float | None, ctime: float | None, expected: float
) -> None:
    assert last_use(ObjectInfo("x", 1, mtime, atime, ctime), NOW) == expected
