"""What is to be deleted from a shelf, and in which order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvshelf.capacity import collect
from kvshelf.capacity.collect import Plan, plan
from kvshelf.capacity.files import Total
from kvshelf.capacity.inventory import Scan
from kvshelf.capacity.rules import NO_RULES, Choice, Rule, Rules
from kvshelf.format.kinds import FULL, STATE, WINDOW
from kvshelf.format.names import parse_path
from kvshelf.shelf.pins import Pin, Pins
from tests.capacity.shelves import DAY, FMT, HEX, SIZE, Place, bound, chunks, salted, tail_of
from tests.sim.storage import FaultyStorage
from tests.support.formats import format_of_kinds, make_format
from tests.support.prompts import make_chunks

OTHER = make_format(native=False, weights="user:other")
GROUP, GROUP_2 = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "shelf")


def names(found: Plan) -> dict[str, Rule]:
    return dict(found.names())


# ------------------------------------------------------------------------------------- plans


def test_no_chunk_goes_without_a_limit(place: Place) -> None:
    place.put(FMT, chunks(3), age=400 * DAY)
    found = plan(place.scan(), Rules())
    assert not names(found)
    assert found.before == found.after == place.scan().nbytes
    assert found.totals() == {}


def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings(place: Place) -> None:
    old = place.put(FMT, chunks(3, 1), age=30 * DAY)
    used = place.put(FMT, chunks(3, 2), age=40 * DAY, used=2 * DAY)
    new = place.put(FMT, chunks(3, 3), age=DAY / 4)
    order = list(names(plan(place.scan(), bound(place, 0))))

    def prompt(objects: list[str]) -> list[set[str]]:
        """Names by chunk, the last first: the shards of a chunk go together."""
        return [{objects[i], objects[i + 1]} for i in (4, 2, 0)]

    together = [set(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert together == prompt(old) + prompt(used) + prompt(new)
    found = plan(place.scan(), bound(place, 4))
    assert set(names(found)) == {*old, *used[2:]}
    assert {reason: total.count for reason, total in found.totals().items()} == {Rule.SIZE: 10}
    assert found.before - found.after == 5 * SIZE
    assert found.problem is None


def test_a_bound_acts_at_90_percent_and_deletes_to_80(place: Place) -> None:
    place.put(FMT, chunks(50))
    held = place.scan().nbytes
    assert not names(plan(place.scan(), Rules(max_bytes=int(held / 0.9) + 1)))
    found = plan(place.scan(), Rules(max_bytes=int(held / 0.91)))
    assert 0.78 * held < found.after * 0.91 <= 0.8 * held


def test_what_was_not_used_for_an_age_goes(place: Place) -> None:
    old = place.put(FMT, chunks(3, 1), age=8 * DAY)
    place.put(FMT, chunks(3, 2), age=9 * DAY, used=6 * DAY)
    found = plan(place.scan(), Rules(max_age=7 * DAY))
    assert names(found) == dict.fromkeys(old, Rule.AGE)


def test_objects_copied_to_a_shelf_with_their_old_times_are_young(tmp_path: Path) -> None:
    place = Place(tmp_path / "shelf", ahead=3600.0)
    place.put(FMT, chunks(3), age=8 * DAY)
    assert not names(plan(place.scan(), Rules(max_age=7 * DAY)))
    place.later.ahead = 25 * 3600.0
    assert len(names(plan(place.scan(), Rules(max_age=7 * DAY)))) == 6


def test_pinned_chunks_stay_whatever_their_age(place: Place) -> None:
    pinned = chunks(2)
    place.put(FMT, pinned, age=90 * DAY)
    loose = place.put(FMT, chunks(2, 1), age=80 * DAY)
    pins = Pins({"it": Pin(keys=[chunk.key for chunk in pinned])}, {}, place.now)
    found = plan(place.scan(), Rules(max_age=7 * DAY), pins=pins)
    assert set(names(found)) == set(loose)
    found = plan(place.scan(), bound(place, 1), pins=pins)
    assert set(names(found)) == set(loose)
    assert found.pinned == Total(4, 2 * SIZE)
    assert found.problem is not None and "pinned" in found.problem
    behind = Pins({"it": Pin(namespace=FMT.namespace.folder)}, {}, place.now)
    place.path(place.name(FMT, pinned[0])).unlink()
    place.path(place.name(FMT, pinned[0], 1)).unlink()
    assert names(plan(place.scan(parents=True), Rules())) == dict.fromkeys(
        [place.name(FMT, pinned[1], shard) for shard in (0, 1)], Rule.ORPHAN
    )
    assert not names(plan(place.scan(parents=True), Rules(), pins=behind))


def test_old_tails_go_although_they_are_pinned(place: Place) -> None:
    tails = place.put(FMT, [tail_of(1)], age=7200.0)
    place.put(FMT, [tail_of(2)], age=600.0)
    kept = place.put(FMT, chunks(2), age=90 * DAY)
    pins = Pins({"it": Pin(namespace=FMT.namespace.folder)}, {}, place.now)
    assert names(plan(place.scan(), Rules(), pins=pins)) == dict.fromkeys(tails, Rule.TAIL)
    found = plan(place.scan(), bound(place, 1), pins=pins)
    assert names(found) == dict.fromkeys(tails, Rule.TAIL)
    assert not set(kept) & set(names(found))
    assert found.problem is not None and "pinned chunks alone" in found.problem


def test_pins_that_leave_no_space_are_named(place: Place) -> None:
    pinned = place.put(FMT, chunks(19), age=DAY)
    place.put(FMT, chunks(1, 1), age=DAY)
    pins = Pins({"it": Pin(keys=[chunk.key for chunk in chunks(19)])}, {}, place.now)
    held = place.scan().nbytes
    found = plan(place.scan(), Rules(max_bytes=held), pins=pins)
    assert len(names(found)) == FMT.shards
    assert not set(pinned) & set(names(found))
    assert found.problem is not None and "remove pins" in found.problem
    # With twice the space, there is some for others.
    assert plan(place.scan(), Rules(max_bytes=2 * held), pins=pins).problem is None


def test_pins_keep_a_salt_group_above_its_bound_and_that_is_said(place: Place) -> None:
    both = chunks(10)
    place.put(FMT, [salted(chunk, GROUP) for chunk in both], age=DAY)
    place.put(FMT, [salted(chunk, GROUP_2) for chunk in both], age=DAY)
    pins = Pins({"it": Pin(group=GROUP, keys=[chunk.key for chunk in both[:9]])}, {}, place.now)
    found = plan(place.scan(), Rules(group_max_bytes=8 * SIZE), pins=pins)
    gone = names(found)
    # Of the pinned group only what is not pinned goes, of the other one what is above the bound.
    assert len([name for name in gone if f"/{GROUP}/" in name]) == 2
    assert len([name for name in gone if f"/{GROUP_2}/" in name]) == 8
    assert found.problem is not None
    assert f"{FMT.namespace.folder}/{GROUP}, more than group_max_bytes" in found.problem
    assert plan(place.scan(), Rules(group_max_bytes=10 * SIZE), pins=pins).problem is None


def test_while_clocks_differ_nothing_is_deleted_because_of_its_age(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.put(FMT, chunks(4), age=90 * DAY)
    place.later.alone = True
    place.later.ahead += 8 * DAY
    assert not names(plan(place.scan(), Rules(max_age=DAY)))
    assert "ahead of this machine's" in caplog.text
    limits = replace(bound(place, 3), max_age=DAY)
    assert len(names(plan(place.scan(), limits))) == FMT.shards


def test_each_salt_group_has_a_bound_of_its_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = []
    for number in range(6):
        group, count = f"{number:016x}", 5 if number == 3 else 10
        prompt = [salted(chunk, group) for chunk in chunks(count, number % 2)]
        # 80 % of eight chunks are six; of equal ages the ends of prompts go.
        large += place.put(FMT, prompt, age=(9 - number) * DAY)[12:]
    place.put(FMT, chunks(20, 1), age=9 * DAY)
    orders = []
    choose = collect.choose
    monkeypatch.setattr(collect, "choose", lambda *of, **at: orders.append(of) or choose(*of, **at))
    found = plan(place.scan(), Rules(group_max_bytes=8 * SIZE))
    assert names(found) == dict.fromkeys(large, Rule.GROUP)
    assert len(orders) == 1, "all groups are sorted at once"


def test_leftovers_go_at_their_own_ages(tmp_path: Path) -> None:
    # Nobody can set the time of a file's last change.
    place = Place(tmp_path / "shelf", ahead=30 * 60.0)
    (name, *_) = place.put(FMT, chunks(1))
    folder = FMT.namespace.folder
    tails = place.put(FMT, [tail_of(1)], age=7200.0)
    place.put(FMT, [tail_of(2)], age=7200.0, used=60.0)
    temporary = f"{name.rpartition('/')[0]}/.{name.rpartition('/')[2]}.{HEX}.tmp"
    marker = f"{folder}/.kvshelf/gave-up/{'1' * 32}"
    place.write(temporary, bytes(100), age=7200.0)
    place.write(marker, b"", age=7200.0)
    place.write(f"{folder}/notes.txt", bytes(100), age=900 * DAY)
    place.write(".kvshelf/pins/mine.json", b"{}", age=900 * DAY)

    def plan_at(ahead: float, **limits: float) -> dict[str, Rule]:
        place.later.ahead = ahead
        return names(plan(place.scan(), Rules(**limits)))  # type: ignore[arg-type]

    assert plan_at(30 * 60.0) == {}
    old = {temporary: Rule.TEMPORARY, marker: Rule.MARKER}
    assert plan_at(61 * 60.0, tails=7200.0, markers=7200.0) == {temporary: Rule.TEMPORARY}
    assert plan_at(61 * 60.0) == {**old, **dict.fromkeys(tails, Rule.TAIL)}


def test_tails_and_markers_stay_for_ever_if_that_is_wanted(place: Place) -> None:
    place.put(FMT, [tail_of(1)], age=90 * DAY)
    place.write(f"{FMT.namespace.folder}/.kvshelf/gave-up/{'1' * 32}", b"", age=90 * DAY)
    assert not names(plan(place.scan(), Rules(tails=None, markers=None)))


def test_chunks_behind_a_missing_one_go_a_day_after_their_last_use(place: Place) -> None:
    prompt = chunks(6)
    place.put(FMT, prompt[:2], age=9 * DAY)
    behind = place.put(FMT, prompt[3:], age=9 * DAY)
    place.put(FMT, chunks(3, 1)[1:], age=9 * DAY, used=DAY / 2)
    assert not names(plan(place.scan(), Rules())), "their parents are not known"
    found = names(plan(place.scan(parents=True), Rules()))
    assert found == dict.fromkeys(behind, Rule.ORPHAN)
    # The deepest first: a process that ends in between leaves no others without a parent.
    indexes = [parsed.index for name in found if (parsed := parse_path(name))]
    assert indexes == sorted(indexes, reverse=True)
    place.put(FMT, [prompt[2]])
    assert not names(plan(place.scan(parents=True), Rules()))


def test_a_state_needs_no_state_before_it(place: Place) -> None:
    states = format_of_kinds({STATE: 2})
    place.put(states, make_chunks(states, 4)[2:], age=9 * DAY)
    assert not names(plan(place.scan(parents=True), Rules()))


def test_kv_that_no_state_follows_goes_before_what_is_older(place: Place) -> None:
    hybrid = format_of_kinds({FULL: 1, WINDOW: 1, STATE: 1})
    used = make_chunks(hybrid, 4)
    for kind in (FULL, WINDOW):
        place.put(hybrid.of(kind), used, age=9 * DAY)
    place.put(hybrid.of(STATE), [used[1]], age=9 * DAY)
    found = plan(place.scan(), Rules(max_bytes=place.scan().nbytes - 1, high=1.0, low=1.0))
    (name, *_) = names(found)
    parsed = parse_path(name)
    assert parsed is not None and parsed.index == 3


def test_parents_far_away_are_read_side_by_side(place: Place) -> None:
    for seed in range(5):
        place.put(FMT, chunks(10, seed))
    far = FaultyStorage(place.backend, probe_cost=1.0, concurrency=4)
    found = Scan(far, parents=True).run()
    assert found is not None
    assert (found.units().parent >= 0).sum() == 45


def test_a_command_chooses_by_group_and_use_and_nothing_else_goes(place: Place) -> None:
    old = place.put(FMT, [salted(chunk, GROUP) for chunk in chunks(3)], age=9 * DAY)
    place.put(FMT, [salted(chunk, GROUP) for chunk in chunks(3, 1)], age=DAY)
    place.put(FMT, chunks(3), age=9 * DAY)
    place.put(FMT, [tail_of(1)], age=9 * DAY)
    pins = Pins({"it": Pin(keys=[chunks(3)[0].key])}, {}, place.now)

    def chosen(**of: object) -> Plan:
        rules = replace(NO_RULES, choice=Choice(**of))  # type: ignore[arg-type]
        return plan(place.scan(), rules, pins=pins)

    found = chosen(group=GROUP, unused_for=7 * DAY)
    assert names(found) == dict.fromkeys(old[2:], Rule.CHOSEN)
    assert found.pinned == Total(2, SIZE)
    assert set(names(chosen(group=GROUP, unused_for=7 * DAY, pinned=True))) == set(old)
    assert len(names(chosen(pinned=True))) == 2 * 10
    assert not names(plan(place.scan(), NO_RULES))
