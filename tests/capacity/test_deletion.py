"""What a plan's execution deletes, and what stays whatever happens meanwhile."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.backends.base import DeleteResults, ObjectInfo
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.capacity import deletion, marks
from kvshelf.capacity.collect import Plan, plan
from kvshelf.capacity.deletion import Outcome, carry_out
from kvshelf.capacity.rules import NO_RULES, Choice, Rule, Rules
from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.names import parse_path
from kvshelf.shelf.pins import Pin, Pins
from tests.capacity.shelves import DAY, FMT, HEX, SIZE, Place, bound, chunks
from tests.sim.storage import Fault, FaultyStorage


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "shelf")


def everything(place: Place) -> Plan:
    return plan(place.scan(), Rules(max_age=7 * DAY), pins=Pins())


def test_a_plan_is_carried_out_whole(place: Place) -> None:
    place.put(FMT, chunks(4), age=9 * DAY)
    young = place.put(FMT, chunks(4, 1), age=DAY)
    outcome = carry_out(place.backend, everything(place))
    assert outcome.finished and outcome.error is None
    assert (outcome.count, outcome.nbytes) == (8, 4 * SIZE)
    assert outcome.deleted[Rule.AGE].count == 8
    assert {name for name in place.files() if name.endswith("safetensors")} == set(young)
    lost = outcome.lost[f"{FMT.namespace.folder}/_", Rule.AGE]
    assert (len(outcome.lost), lost.count, lost.nbytes) == (1, 8, 4 * SIZE)
    assert lost.oldest == pytest.approx(place.now - 9 * DAY)


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
    assert (outcome.count, outcome.gone.count, outcome.error) == (1, 3, None)


def test_a_temporary_that_is_written_again_stays(place: Place) -> None:
    (name, *_) = place.put(FMT, chunks(1))
    folder, _, base = name.rpartition("/")
    path = place.write(f"{folder}/.{base}.{HEX}.tmp", age=9 * DAY)
    found = everything(place)
    assert [reason for _, reason in found.names()] == [Rule.TEMPORARY]
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
    assert place.faults.counts["delete"] == outcome.failed


def test_objects_of_another_user_do_not_keep_the_others(place: Place) -> None:
    stored = place.put(FMT, chunks(4), age=9 * DAY)
    refused = storage_error(OSError(errno.EACCES, "no"), "deleting", "x", writing=True)
    place.faults.add(Fault("delete", stored[0], error=refused))
    outcome = carry_out(place.backend, everything(place))
    assert outcome.finished
    assert (outcome.count, outcome.failed) == (7, 1)


def test_what_is_used_while_the_process_sleeps_stays(place: Place) -> None:
    """By the clock of the inventory, it is used in the future."""
    stored = place.put(FMT, chunks(3), age=9 * DAY)
    found = everything(place)
    place.later.ahead += 1.5 * DAY
    place.age(place.path(stored[3]), 9 * DAY, used=-1.5 * DAY)
    outcome = carry_out(place.backend, found)
    assert (outcome.count, outcome.kept.count) == (4, 2)
    assert set(stored[2:4]) <= place.files()


def late(place: Place, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Have it be time to read pins again: at once, or by the number of deletions."""
    if how == "deletions":
        monkeypatch.setattr(deletion, "_AGAIN_DELETIONS", 2)
    elif how == "time":
        monkeypatch.setattr(deletion, "_AGAIN_SECONDS", 0.0)
    else:
        # The listing took so long, or the process slept behind it.
        place.later.ahead += 120.0


@pytest.mark.parametrize("how", ["deletions", "time", "listing"])
def test_what_is_pinned_or_marked_meanwhile_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    place.put(FMT, chunks(4), age=9 * DAY)
    pinned = place.put(FMT, chunks(4, 1), age=8.5 * DAY)
    marked = place.put(FMT, chunks(4, 2), age=8 * DAY)
    found = everything(place)
    Pins.add(place.backend, "it", Pin(keys=[chunk.key for chunk in chunks(4, 1)]))
    used = b"".join(chunk.key[:16] for chunk in chunks(4, 2))
    marks.write(place.backend, [marks.Batch(FMT.namespace.folder, 60.0, used)])
    late(place, monkeypatch, how)
    outcome = carry_out(place.backend, found)
    assert (outcome.count, outcome.kept.count) == (8, 16)
    assert {*pinned, *marked} <= place.files()


def test_a_pin_that_is_read_again_ends_by_the_clock_that_is_behind(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = place.put(FMT, chunks(4), age=9 * DAY)
    found = everything(place)
    key = chunks(4)[-1].key
    Pins.add(place.backend, "it", Pin(keys=[key], until=place.later.now() + 600.0))
    late(place, monkeypatch, "time")
    place.later.alone = True
    place.later.ahead += 1800.0
    carry_out(place.backend, found)
    assert place.files() >= {name for name in pinned if key.hex() in name}


def test_what_is_pinned_and_used_while_the_process_sleeps_behind_a_look_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = place.put(FMT, chunks(2), age=9 * DAY)
    found = everything(place)

    class Sleepy(WrappedBackend):
        slept = False

        def info(self, name: str) -> ObjectInfo | None:
            answer = self.inner.info(name)
            if not self.slept and name == stored[3]:
                self.slept = True
                place.age(place.path(stored[3]), 9 * DAY, used=0.0)
                Pins.add(place.backend, "it", Pin(keys=[chunks(1)[0].key]))
                monkeypatch.setattr(deletion, "steady", lambda: clock + 3600.0)
            return answer

    clock = deletion.steady()
    outcome = carry_out(Sleepy(place.backend), found)
    assert outcome.finished
    assert (outcome.count, outcome.kept.count) == (0, 4)


def test_pins_that_cannot_be_read_again_end_an_execution(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put(FMT, chunks(9), age=9 * DAY)
    Pins.add(place.backend, "other", Pin(keys=[bytes(32)]))
    found = everything(place)
    late(place, monkeypatch, "deletions")
    refused = storage_error(OSError(errno.EACCES, "no"), "listing", "x")
    place.faults.add(Fault("list", ".kvshelf/pins/*", error=refused))
    outcome = carry_out(place.backend, found)
    assert not outcome.finished and outcome.error is refused
    assert outcome.count == 2


def test_pins_do_not_keep_what_is_chosen_in_spite_of_them(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.put(FMT, chunks(2), age=DAY)
    choice = Choice(pinned=True)
    found = plan(place.scan(), replace(NO_RULES, choice=choice), pins=Pins())
    Pins.add(place.backend, "it", Pin(namespace=FMT.namespace.folder))
    late(place, monkeypatch, "time")
    assert carry_out(place.backend, found).count == 4


def test_what_is_chosen_whatever_its_use_goes_without_a_look(place: Place) -> None:
    stored = place.put(FMT, chunks(2), age=DAY)
    found = plan(place.scan(), replace(NO_RULES, choice=Choice()))
    place.age(place.path(stored[0]), DAY, used=0.0)
    place.path(stored[3]).unlink()
    looks = place.faults.counts["info"]
    outcome = carry_out(place.backend, found)
    assert (outcome.count, outcome.gone.count) == (3, 1)
    assert place.faults.counts["info"] == looks


class Bulk(FaultyStorage):
    """Deletes up to ten objects by one request, or the first `most` of them."""

    def __init__(self, place: Place, **fields: object) -> None:
        super().__init__(place.backend, deletes_at_once=10, **fields)
        self.requests: list[Sequence[str]] = []
        self.most: int | None = None

    def delete_all(self, names: Sequence[str]) -> DeleteResults:
        self.requests.append(names)
        answers = super().delete_all(names[: self.most])
        refused = storage_error(OSError(errno.EACCES, "no"), "deleting", "x", writing=True)
        return answers + [refused] * (len(names) - len(answers))


@pytest.mark.parametrize("probe_cost", [0.0, 1.0])
def test_many_are_deleted_by_few_requests(place: Place, probe_cost: float) -> None:
    for seed in range(4):
        place.put(FMT, chunks(6, seed), age=(9 + seed) * DAY)
    bulk = Bulk(place, probe_cost=probe_cost)
    found = everything(place)
    outcome = carry_out(bulk, found)
    assert outcome.finished and outcome.count == 48
    assert sorted(map(len, bulk.requests)) == [8, 10, 10, 10, 10]
    if not probe_cost:
        assert [name for names in bulk.requests for name in names] == [n for n, _ in found.names()]


@pytest.mark.parametrize("minutes", [5, 11])
def test_what_frees_space_is_not_looked_at_soon_after_the_listing_where_looks_are_dear(
    place: Place, minutes: int
) -> None:
    stored = place.put(FMT, chunks(6), age=9 * DAY)
    found = plan(place.scan(), Rules(max_bytes=7 * SIZE // 2), pins=Pins())
    place.later.ahead += 60.0 * minutes
    used = stored[-1]
    place.age(place.path(used), 9 * DAY, used=0.0)
    looks = place.faults.counts["info"]
    outcome = carry_out(Bulk(place), found)
    assert outcome.finished
    fresh = minutes < 10
    assert (used not in place.files()) == fresh
    assert (place.faults.counts["info"] == looks) == fresh


def test_units_go_whole_by_one_request_those_of_a_plan_in_its_order(place: Place) -> None:
    """So that a process which is killed leaves beginnings of prompts, but for its last request."""
    place.put(FMT, chunks(9), age=9 * DAY)
    bulk = Bulk(place)
    carry_out(bulk, everything(place))
    for names in bulk.requests:
        keys = [parsed.key for name in names if (parsed := parse_path(name)) is not None]
        assert all(keys.count(key) == FMT.shards for key in keys)
    indexes = [[int(name.split("-")[-2]) for name in names] for names in bulk.requests]
    assert [max(one) for one in indexes] == [8, 3]
    assert [min(one) for one in indexes] == [4, 0]


def test_objects_that_one_request_leaves_are_counted_each(place: Place) -> None:
    place.put(FMT, chunks(5), age=9 * DAY)
    bulk = Bulk(place)
    bulk.most = 7
    outcome = carry_out(bulk, everything(place))
    assert (outcome.count, outcome.failed, outcome.finished) == (7, 3, True)
    assert len([name for name in place.files() if parse_path(name)]) == 3


def test_trouble_that_passes_is_waited_for_where_that_is_wanted(place: Place) -> None:
    place.put(FMT, chunks(4), age=9 * DAY)
    trouble = TransientStorageError(errno.EIO, "EIO")
    place.faults.add(Fault("delete", error=trouble, times=2))
    place.faults.add(Fault("info", "*-0-*", error=trouble, times=1))
    outcome = carry_out(place.backend, everything(place), pauses=(0.0, 0.0))
    assert (outcome.count, outcome.gone.count, outcome.finished) == (8, 0, True)


def test_trouble_of_the_storage_ends_an_execution(place: Place) -> None:
    place.put(FMT, chunks(4), age=9 * DAY)
    place.faults.add(Fault("delete", error=TransientStorageError(errno.EIO, "EIO")))
    outcome = carry_out(place.backend, everything(place))
    assert not outcome.finished
    assert isinstance(outcome.error, TransientStorageError)
    assert place.faults.counts["delete"] == 1


@pytest.mark.parametrize("over_after", [1, 2])
def test_a_plan_that_is_over_deletes_no_more(place: Place, over_after: int) -> None:
    stored = place.put(FMT, chunks(4), age=9 * DAY)
    asked = iter(range(over_after - 1))
    outcome = carry_out(place.backend, everything(place), stop=lambda: next(asked, None) is None)
    assert not outcome.finished
    assert outcome.count == 2 * over_after
    assert set(stored[: 8 - outcome.count]) <= place.files()


@pytest.mark.parametrize("fault", [None, TransientStorageError(errno.EIO, "EIO")])
def test_objects_far_away_are_deleted_side_by_side(
    place: Place, fault: TransientStorageError | None
) -> None:
    for seed in range(5):
        place.put(FMT, chunks(10, seed), age=9 * DAY)
    far = FaultyStorage(place.backend, probe_cost=1.0, concurrency=4)
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
