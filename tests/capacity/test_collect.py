"""What is deleted from a shelf, in which order, and what stays whatever happens meanwhile."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.backends.oserrors import storage_error
from kvshelf.capacity.collect import Limits, Outcome, Plan, Reason, carry_out, plan
from kvshelf.capacity.inventory import Inventory
from kvshelf.capacity.pins import Pin, Pins
from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, STATE, WINDOW
from kvshelf.format.names import parse_path
from tests.capacity.shelves import DAY, Place, salted
from tests.support.formats import format_of_kinds, make_format
from tests.support.prompts import make_chunks
from tests.support.storages import DescribedBackend, Fault

FMT = make_format(native=False)
SIZE = sum(FMT.object_size(shard) for shard in range(FMT.shards))
GROUP, GROUP_2 = "0123456789abcdef", "fedcba9876543210"
HEX = "0123456789abcdef"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "shelf")


def chunks(count: int, seed: int = 0) -> list[Chunk]:
    return make_chunks(FMT, count, seed)


def tail_of(seed: int) -> Chunk:
    chain = KeyChain(FMT.namespace.digest, FMT.chunk_size)
    chain.extend([seed] * 5)
    tail = chain.tail()
    assert tail is not None
    return tail


def names(found: Plan) -> dict[str, Reason]:
    return dict(found.names())


def bound(place: Place, kept: int) -> Limits:
    """Return a bound of bytes at which so many chunks stay of those on the shelf."""
    held = place.scan().nbytes
    others = held - sum(
        path.stat().st_size for path in place.root.rglob("*.safetensors") if path.is_file()
    )
    return Limits(max_bytes=others + kept * SIZE, high=0.999, low=1.0)


# ------------------------------------------------------------------------------------- plans


def test_no_chunk_goes_without_a_limit(place: Place) -> None:
    place.put(FMT, chunks(3), age=400 * DAY)
    found = plan(place.scan(), Limits())
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
    assert {reason: total.count for reason, total in found.totals().items()} == {Reason.SIZE: 10}
    assert found.before - found.after == 5 * SIZE
    assert found.problem is None


def test_a_bound_acts_at_90_percent_and_makes_room_to_80(place: Place) -> None:
    place.put(FMT, chunks(50))
    held = place.scan().nbytes
    assert not names(plan(place.scan(), Limits(max_bytes=int(held / 0.9) + 1)))
    found = plan(place.scan(), Limits(max_bytes=int(held / 0.91)))
    assert 0.78 * held < found.after * 0.91 <= 0.8 * held


def test_what_was_not_used_for_an_age_goes(place: Place) -> None:
    old = place.put(FMT, chunks(3, 1), age=8 * DAY)
    place.put(FMT, chunks(3, 2), age=9 * DAY, used=6 * DAY)
    found = plan(place.scan(), Limits(max_age=7 * DAY))
    assert names(found) == dict.fromkeys(old, Reason.AGE)


def test_objects_copied_to_a_shelf_with_their_old_times_are_young(tmp_path: Path) -> None:
    place = Place(tmp_path / "shelf", ahead=3600.0)
    place.put(FMT, chunks(3), age=8 * DAY)
    assert not names(plan(place.scan(), Limits(max_age=7 * DAY)))
    place.later.ahead = 25 * 3600.0
    assert len(names(plan(place.scan(), Limits(max_age=7 * DAY)))) == 6


def test_pinned_chunks_stay_whatever_their_age(place: Place) -> None:
    pinned = chunks(2)
    place.put(FMT, pinned, age=90 * DAY)
    loose = place.put(FMT, chunks(2, 1), age=80 * DAY)
    pins = Pins({"it": Pin(keys=[chunk.key for chunk in pinned])}, {}, place.now)
    found = plan(place.scan(), Limits(max_age=7 * DAY), pins=pins)
    assert set(names(found)) == set(loose)
    found = plan(place.scan(), bound(place, 1), pins=pins)
    assert set(names(found)) == set(loose)
    assert found.pinned == 2 * SIZE
    assert found.problem is not None and "pinned" in found.problem
    behind = Pins({"it": Pin(namespace=FMT.namespace.folder)}, {}, place.now)
    place.path(place.name(FMT, pinned[0])).unlink()
    place.path(place.name(FMT, pinned[0], 1)).unlink()
    assert names(plan(place.scan(parents=True), Limits())) == dict.fromkeys(
        [place.name(FMT, pinned[1], shard) for shard in (0, 1)], Reason.ORPHAN
    )
    assert not names(plan(place.scan(parents=True), Limits(), pins=behind))


def test_old_tails_go_although_they_are_pinned(place: Place) -> None:
    tails = place.put(FMT, [tail_of(1)], age=7200.0)
    place.put(FMT, [tail_of(2)], age=600.0)
    kept = place.put(FMT, chunks(2), age=90 * DAY)
    pins = Pins({"it": Pin(namespace=FMT.namespace.folder)}, {}, place.now)
    assert names(plan(place.scan(), Limits(), pins=pins)) == dict.fromkeys(tails, Reason.TAIL)
    found = plan(place.scan(), bound(place, 1), pins=pins)
    assert names(found) == dict.fromkeys(tails, Reason.TAIL)
    assert not set(kept) & set(names(found))
    assert found.problem is not None and "pinned chunks alone" in found.problem


def test_pins_that_leave_no_room_are_named(place: Place) -> None:
    pinned = place.put(FMT, chunks(19), age=DAY)
    place.put(FMT, chunks(1, 1), age=DAY)
    pins = Pins({"it": Pin(keys=[chunk.key for chunk in chunks(19)])}, {}, place.now)
    held = place.scan().nbytes
    found = plan(place.scan(), Limits(max_bytes=held), pins=pins)
    assert len(names(found)) == FMT.shards
    assert not set(pinned) & set(names(found))
    assert found.problem is not None and "remove pins" in found.problem
    # With twice the room, there is some for others.
    assert plan(place.scan(), Limits(max_bytes=2 * held), pins=pins).problem is None


def test_pins_keep_a_salt_group_above_its_bound_and_that_is_said(place: Place) -> None:
    both = chunks(10)
    place.put(FMT, [salted(chunk, GROUP) for chunk in both], age=DAY)
    place.put(FMT, [salted(chunk, GROUP_2) for chunk in both], age=DAY)
    pins = Pins({"it": Pin(group=GROUP, keys=[chunk.key for chunk in both[:9]])}, {}, place.now)
    found = plan(place.scan(), Limits(group_max_bytes=8 * SIZE), pins=pins)
    gone = names(found)
    # Of the pinned group only what is not pinned goes, of the other one what is above the bound.
    assert len([name for name in gone if f"/{GROUP}/" in name]) == 2
    assert len([name for name in gone if f"/{GROUP_2}/" in name]) == 8
    assert found.problem is not None
    assert f"{FMT.namespace.folder}/{GROUP}, more than group_max_bytes" in found.problem
    assert plan(place.scan(), Limits(group_max_bytes=10 * SIZE), pins=pins).problem is None


def test_a_salt_group_has_a_bound_of_its_own(place: Place) -> None:
    large = place.put(FMT, [salted(chunk, GROUP) for chunk in chunks(10)], age=DAY)
    place.put(FMT, [salted(chunk, GROUP_2) for chunk in chunks(5)], age=9 * DAY)
    place.put(FMT, chunks(20, 1), age=9 * DAY)
    found = plan(place.scan(), Limits(group_max_bytes=8 * SIZE))
    # 80 % of eight chunks are six; of equal ages the ends of prompts go.
    assert names(found) == dict.fromkeys(large[12:], Reason.GROUP)


def test_leftovers_go_at_their_own_ages(tmp_path: Path) -> None:
    # Nobody can set the time of a file's last change.
    place = Place(tmp_path / "shelf", ahead=30 * 60.0)
    (name, *_) = place.put(FMT, chunks(1))
    folder = FMT.namespace.folder
    tails = place.put(FMT, [tail_of(1)], age=7200.0)
    place.put(FMT, [tail_of(2)], age=7200.0, used=60.0)
    temporary = f"{name.rpartition('/')[0]}/.{name.rpartition('/')[2]}.{HEX}.tmp"
    marker = f"{folder}/.kvshelf/gave-up/{'1' * 32}"
    bad = f"{folder}/.kvshelf/bad/00-11-{name.rpartition('/')[2]}"
    for left in (temporary, bad):
        place.write(left, bytes(100), age=7200.0)
    place.write(marker, b"", age=7200.0)
    place.write(f"{folder}/notes.txt", bytes(100), age=900 * DAY)
    place.write(".kvshelf/pins/mine.json", b"{}", age=900 * DAY)

    def plan_at(ahead: float, **limits: float) -> dict[str, Reason]:
        place.later.ahead = ahead
        return names(plan(place.scan(), Limits(**limits)))  # type: ignore[arg-type]

    assert plan_at(30 * 60.0) == {}
    old = {temporary: Reason.TEMPORARY, marker: Reason.MARKER}
    assert plan_at(61 * 60.0, keep_tails=7200.0) == {temporary: Reason.TEMPORARY}
    assert plan_at(61 * 60.0) == {**old, **dict.fromkeys(tails, Reason.TAIL)}
    assert bad in plan_at(8 * DAY)
    # Where room is needed.
    assert plan_at(61 * 60.0, max_bytes=10)[bad] is Reason.QUARANTINE


def test_tails_and_markers_stay_for_ever_if_that_is_wanted(place: Place) -> None:
    place.put(FMT, [tail_of(1)], age=90 * DAY)
    place.write(f"{FMT.namespace.folder}/.kvshelf/gave-up/{'1' * 32}", b"", age=90 * DAY)
    assert not names(plan(place.scan(), Limits(keep_tails=None)))


def test_chunks_behind_a_missing_one_go_a_day_after_their_last_use(place: Place) -> None:
    prompt = chunks(6)
    place.put(FMT, prompt[:2], age=9 * DAY)
    behind = place.put(FMT, prompt[3:], age=9 * DAY)
    place.put(FMT, chunks(3, 1)[1:], age=9 * DAY, used=DAY / 2)
    assert not names(plan(place.scan(), Limits())), "their parents are not known"
    found = names(plan(place.scan(parents=True), Limits()))
    assert found == dict.fromkeys(behind, Reason.ORPHAN)
    # The deepest first: a process that ends in between leaves no others without a parent.
    indexes = [parsed.index for name in found if (parsed := parse_path(name))]
    assert indexes == sorted(indexes, reverse=True)
    place.put(FMT, [prompt[2]])
    assert not names(plan(place.scan(parents=True), Limits()))


def test_a_state_needs_no_state_before_it(place: Place) -> None:
    states = format_of_kinds({STATE: 2})
    place.put(states, make_chunks(states, 4)[2:], age=9 * DAY)
    assert not names(plan(place.scan(parents=True), Limits()))


def test_kv_that_no_state_follows_goes_before_what_is_older(place: Place) -> None:
    hybrid = format_of_kinds({FULL: 1, WINDOW: 1, STATE: 1})
    used = make_chunks(hybrid, 4)
    for kind in (FULL, WINDOW):
        place.put(hybrid.of(kind), used, age=9 * DAY)
    place.put(hybrid.of(STATE), [used[1]], age=9 * DAY)
    found = plan(place.scan(), Limits(max_bytes=place.scan().nbytes - 1, high=1.0, low=1.0))
    (name, *_) = names(found)
    parsed = parse_path(name)
    assert parsed is not None and parsed.index == 3


# --------------------------------------------------------------------------------- execution


def everything(place: Place) -> Plan:
    return plan(place.scan(), Limits(max_age=7 * DAY))


def test_a_plan_is_carried_out_whole(place: Place) -> None:
    place.put(FMT, chunks(4), age=9 * DAY)
    young = place.put(FMT, chunks(4, 1), age=DAY)
    told: list[tuple[bytes, int]] = []
    outcome = carry_out(
        place.backend, everything(place), on_deleted=lambda key, index: told.append((key, index))
    )
    assert outcome.finished and outcome.error is None
    assert (outcome.count, outcome.nbytes) == (8, 4 * SIZE)
    assert outcome.deleted[Reason.AGE].count == 8
    assert {name for name in place.files() if name.endswith("safetensors")} == set(young)
    assert sorted(told, key=lambda chunk: chunk[1]) == [
        (chunk.key, chunk.index) for chunk in chunks(4)
    ]


def test_what_is_used_meanwhile_stays_with_all_its_shards(place: Place) -> None:
    stored = place.put(FMT, chunks(3), age=9 * DAY)
    found = everything(place)
    place.age(place.path(stored[3]), 9 * DAY, used=0.0)
    outcome = carry_out(place.backend, found)
    assert (outcome.count, outcome.kept.count) == (4, 2)
    assert {name for name in place.files() if name.endswith("safetensors")} == set(stored[2:4])


def test_what_is_stored_again_meanwhile_stays(place: Place) -> None:
    stored = place.put(FMT, chunks(1), age=9 * DAY, shards=[0])
    found = everything(place)
    place.path(stored[0]).unlink()
    place.put(FMT, chunks(1), shards=[0])
    assert carry_out(place.backend, found).count == 0
    assert stored[0] in place.files()


def test_what_others_delete_meanwhile_is_no_trouble(place: Place) -> None:
    stored = place.put(FMT, chunks(2), age=9 * DAY)
    found = everything(place)
    for name in stored[:3]:
        place.path(name).unlink()
    outcome = carry_out(place.backend, found)
    assert (outcome.count, outcome.gone, outcome.error) == (1, 3, None)


def test_a_temporary_that_is_written_again_stays(place: Place) -> None:
    (name, *_) = place.put(FMT, chunks(1))
    folder, _, base = name.rpartition("/")
    path = place.write(f"{folder}/.{base}.{HEX}.tmp", age=9 * DAY)
    found = everything(place)
    assert list(names(found).values()) == [Reason.TEMPORARY]
    place.age(path, 0)
    assert carry_out(place.backend, found).kept.count == 1
    assert path.exists()


def test_several_sweepers_delete_no_more_than_one(place: Place) -> None:
    for seed in range(20):
        place.put(FMT, chunks(3, seed), age=(9 + seed) * DAY)
    limits = bound(place, 30)
    plans = [plan(place.scan(), limits) for _ in range(3)]
    outcomes: list[Outcome] = []

    def sweep(found: Plan) -> None:
        outcomes.append(carry_out(place.backend, found))

    threads = [threading.Thread(target=sweep, args=(found,)) for found in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(outcome.count for outcome in outcomes) == 60
    assert all(outcome.finished and outcome.error is None for outcome in outcomes)
    assert len(place.scan()) == 60


def test_a_storage_that_allows_no_deletion_is_asked_a_few_times_only(place: Place) -> None:
    place.put(FMT, chunks(90), age=9 * DAY)
    refused = storage_error(OSError(errno.EACCES, "no"), "deleting", "x", writing=True)
    place.faults.add(Fault("delete", error=refused))
    outcome = carry_out(place.backend, everything(place))
    assert not outcome.finished
    assert outcome.count == 0 < outcome.failed < 90
    assert "EACCES" in str(outcome.error)
    assert place.counting.counts["delete"] == outcome.failed


def test_objects_of_another_user_do_not_keep_the_others(place: Place) -> None:
    stored = place.put(FMT, chunks(4), age=9 * DAY)
    refused = storage_error(OSError(errno.EACCES, "no"), "deleting", "x", writing=True)
    place.faults.add(Fault("delete", stored[0], error=refused))
    outcome = carry_out(place.backend, everything(place))
    assert outcome.finished
    assert (outcome.count, outcome.failed) == (7, 1)


def test_trouble_of_the_storage_ends_an_execution(place: Place) -> None:
    place.put(FMT, chunks(4), age=9 * DAY)
    place.faults.add(Fault("delete", error=TransientStorageError(errno.EIO, "EIO")))
    outcome = carry_out(place.backend, everything(place))
    assert not outcome.finished
    assert isinstance(outcome.error, TransientStorageError)
    assert place.counting.counts["delete"] == 1


@pytest.mark.parametrize("limit", [{"stop": lambda: True}, {"seconds": 0.0}])
def test_an_execution_can_be_cut_short(place: Place, limit: dict[str, object]) -> None:
    stored = place.put(FMT, chunks(4), age=9 * DAY)
    outcome = carry_out(place.backend, everything(place), **limit)  # type: ignore[arg-type]
    assert not outcome.finished
    assert outcome.count == 2
    assert set(stored[:6]) <= place.files()


@pytest.mark.parametrize("fault", [None, TransientStorageError(errno.EIO, "EIO")])
def test_objects_far_away_are_deleted_side_by_side(
    place: Place, fault: TransientStorageError | None
) -> None:
    for seed in range(5):
        place.put(FMT, chunks(10, seed), age=9 * DAY)
    far = DescribedBackend(place.backend, probe_cost=1.0, concurrency=4)
    threads = threading.active_count()
    if fault is not None:
        place.faults.add(Fault("delete", "*-3-*", error=fault))
    outcome = carry_out(far, everything(place))
    assert outcome.finished == (fault is None)
    assert outcome.error is fault
    assert outcome.count == 100 if fault is None else outcome.count < 100
    for thread in threading.enumerate():
        if thread.name == "kvshelf-parallel":
            thread.join(20)
    assert threading.active_count() == threads


def test_parents_far_away_are_read_side_by_side(place: Place) -> None:
    for seed in range(5):
        place.put(FMT, chunks(10, seed))
    found = Inventory.scan(
        DescribedBackend(place.backend, probe_cost=1.0, concurrency=4), parents=True
    )
    assert found is not None
    assert (found.units().parent >= 0).sum() == 45


# ------------------------------------------------------------------------------- any shelf


@given(st.randoms(use_true_random=False), st.integers(0, 60), st.booleans())
@settings(deadline=None, max_examples=40)
def test_no_sweep_leaves_a_chunk_without_the_ones_before_it(
    tmp_path_factory: pytest.TempPathFactory, numbers: random.Random, kept: int, cut: bool
) -> None:
    """Whatever was used when, if each hit has touched all of its chunks."""
    place = Place(tmp_path_factory.mktemp("shelf"))
    ages: dict[Chunk, float] = {}
    for seed in range(6):
        prompt = chunks(10, seed % 4)
        age = numbers.uniform(1, 9) * DAY
        for chunk in prompt[: numbers.randint(1, 10)]:
            ages[chunk] = min(age, ages.get(chunk, age))
    for chunk, age in ages.items():
        place.put(FMT, [chunk], age=age, shards=[0, 1])
    found = plan(place.scan(), bound(place, kept), resolution=3600.0)
    left = iter(range(numbers.randint(0, 60)))
    stop: Callable[[], bool] = (lambda: next(left, None) is None) if cut else (lambda: False)
    carry_out(place.backend, found, stop=stop)
    there = {
        (parsed.key, parsed.shard)
        for name in place.files()
        if (parsed := parse_path(name)) is not None
    }
    keys = {key for key, _ in there}
    assert len(there) == 2 * len(keys), "shards of a chunk go together"
    for chunk in ages:
        if chunk.key in keys and chunk.index:
            assert chunk.parent in keys
    if not cut:
        assert len(keys) <= max(kept, 0)
