"""Uses of chunks are recorded in the way that the storage allows, and as often as is of use."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvshelf.backends import Touched
from kvshelf.backends.base import Backend
from kvshelf.backends.wrappers import ReadOnlyBackend
from kvshelf.capacity import uses as uses_module
from kvshelf.capacity.marks import MARKS, Marks
from kvshelf.capacity.uses import How, Uses, resolution
from kvshelf.errors import (
    NoSpaceStorageError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import NamespaceView, ObjectRef
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.clocks import Clock
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks, make_tail
from tests.support.threads import named
from tests.support.waiting import PATIENCE, until

FMT = make_format(native=False)
CHUNKS = make_chunks(FMT, 6)
TAIL = make_tail(FMT)
DAY = 86400.0


class Prompt(list[Chunk]):
    """Chunks whose end can be noticed."""


#: A storage without access times; what it is asked is counted.
Refusing = functools.partial(FaultyStorage, touched=Touched.REFUSED)


class Place:
    """A shelf in a folder, with what was stored a day ago."""

    def __init__(
        self, root: Path, wrap: Callable[[Backend], Backend] = lambda inner: inner
    ) -> None:
        self.root = root
        self.faults = FaultyStorage(posix(root))
        self.shelf = Shelf(wrap(self.faults))
        self.view: NamespaceView = self.shelf.view(FMT)
        self.counters = Counters()
        self.clock = Clock(time.monotonic())
        self.then = time.time() - DAY
        with closing(Shelf(posix(root))) as shelf:
            view = shelf.view(FMT)
            for chunk in CHUNKS:
                for shard in range(FMT.shards):
                    view.publish(ObjectRef(chunk, shard), sealed(FMT, chunk, shard))
                    os.utime(self.path(chunk, shard), (self.then, self.then))

    def path(self, chunk: Chunk, shard: int = 0) -> Path:
        return self.root / self.view.name(ObjectRef(chunk, shard))

    def uses(self, how: How = "auto", **options: object) -> Uses:
        return Uses(self.counters, how=how, clock=self.clock, **options)  # type: ignore[arg-type]

    def record(self, uses: Uses, chunks: Sequence[Chunk]) -> None:
        """Note uses of chunks, and wait until they are recorded."""
        uses.note(self.view, chunks)
        assert uses.flush(PATIENCE)

    def fresh(self) -> list[int]:
        """The chunks whose objects all have a new access time; no other time may have moved."""
        found = []
        for number, chunk in enumerate(CHUNKS):
            stats = [self.path(chunk, shard).stat() for shard in range(FMT.shards)]
            assert all(abs(one.st_mtime - self.then) < 1 for one in stats)
            new = [one.st_atime > self.then + 1 for one in stats]
            assert all(new) or not any(new)
            if all(new):
                found.append(number)
        return found

    def marked(self) -> list[int]:
        found = Marks.read(self.shelf.backend)
        keys = np.frombuffer(b"".join(chunk.key for chunk in CHUNKS), np.uint8).reshape(-1, 32)
        times = found.used(FMT.namespace.folder, keys)
        return [number for number, at in enumerate(times) if at]

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    with closing(place.shelf):
        yield place


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[Place]:
    """A shelf whose storage has no access times."""
    place = Place(tmp_path, Refusing)
    with closing(place.shelf):
        yield place


@pytest.mark.parametrize(
    ("max_age", "expected"),
    [(None, 3600), (30 * DAY, 3600), (8 * 3600, 3600), (4000, 500), (300, 60), (1, 60)],
)
def test_the_resolution_follows_from_the_age(max_age: float | None, expected: float) -> None:
    assert resolution(max_age) == expected


def test_a_hit_sets_the_access_times_of_all_its_objects(place: Place) -> None:
    with closing(place.uses()) as uses:
        place.record(uses, CHUNKS[:3])
        assert place.fresh() == [0, 1, 2] and place.marked() == []
    assert place.count("touched_objects") == 3 * FMT.shards
    assert not (place.root / MARKS).exists()


def test_a_use_is_recorded_again_when_it_is_of_use(place: Place) -> None:
    with closing(place.uses(resolution=600.0)) as uses:
        for seconds, expected in [(0, 4), (300, 4), (200, 4), (101, 8), (1, 8)]:
            place.clock.now += seconds
            place.record(uses, CHUNKS[:2])
            assert place.faults.counts["touch"] == expected


def test_what_the_storage_refuses_for_one_object_is_marked(tmp_path: Path) -> None:
    refused = [CHUNKS[1].key.hex(), CHUNKS[4].key.hex(), TAIL.key.hex()]

    class Partly(FaultyStorage):
        def touch(self, name: str) -> Touched:
            done = super().touch(name)
            return Touched.REFUSED if any(key in name for key in refused) else done

    place = Place(tmp_path, Partly)
    with closing(place.shelf), closing(place.uses()) as uses:
        uses.note(place.view, CHUNKS[:3])
        names = [place.view.name(ObjectRef(CHUNKS[4], shard)) for shard in range(FMT.shards)]
        # No program reads marks of tails.
        tail = place.view.name(ObjectRef(TAIL, 0))
        uses.note_names(place.shelf.backend, [*names, tail, "foreign/file"])
        assert uses.flush(PATIENCE)
        assert place.marked() == [1, 4] and len(Marks.read(place.shelf.backend)) == 2
        assert place.count("marked_chunks") == 2
        assert place.count("touched_objects") == 2 * FMT.shards


def test_nothing_is_marked_where_no_program_reads_marks(refusing: Place) -> None:
    with closing(refusing.uses("touch")) as uses:
        refusing.record(uses, CHUNKS)
        assert refusing.faults.counts["touch"] and not refusing.faults.counts["write"]


def test_tails_are_recorded_some_times_in_their_age(place: Place) -> None:
    with closing(place.uses(keep_tails=100.0)) as uses:
        for seconds, expected in [(0, 1), (24, 1), (2, 2), (10, 2)]:
            place.clock.now += seconds
            uses.note_names(place.shelf.backend, [place.view.name(ObjectRef(TAIL, 0))])
            assert uses.flush(PATIENCE)
            assert place.faults.counts["touch"] == expected


@pytest.mark.long
def test_marks_are_written_in_batches(refusing: Place) -> None:
    uses = refusing.uses(resolution=3600.0)
    counts = refusing.faults.counts
    for count in (1, 2, 5, 3):
        uses.note(refusing.view, CHUNKS[:count])
    until(lambda: counts["touch"] == 5 * FMT.shards)
    refusing.clock.now += 800
    uses.note(refusing.view, CHUNKS)
    until(lambda: counts["touch"] == 6 * FMT.shards)
    assert counts["write"] == 0
    refusing.clock.now += 100
    uses.note(refusing.view, CHUNKS[:1])
    until(lambda: refusing.count("marked_chunks") == 6)
    assert counts["write"] == 1 and refusing.marked() == [0, 1, 2, 3, 4, 5]
    uses.close()


def test_marks_do_not_pile_up_where_no_process_sweeps(
    refusing: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes that write marks merge them as well.
    monkeypatch.setattr(random, "random", lambda: 0.0)
    uses = refusing.uses(resolution=3600.0)
    for turn in range(200):
        uses.note(refusing.view, CHUNKS[: 1 + turn % 5])
        assert uses.flush(30.0)
        refusing.clock.now += 3600
    uses.close()
    files = [
        info for info in refusing.shelf.backend.list(".kvshelf", hidden=True) if "uses" in info.name
    ]
    assert 0 < len(files) <= 70
    assert refusing.marked() == [0, 1, 2, 3, 4]


def test_the_end_of_a_process_records_what_it_used(refusing: Place) -> None:
    uses = refusing.uses()
    uses.note(refusing.view, CHUNKS[:2])
    uses.close()
    uses.close()
    assert refusing.marked() == [0, 1]
    uses.note(refusing.view, CHUNKS)
    assert refusing.marked() == [0, 1]


def test_off_is_off(place: Place) -> None:
    before = named("kvshelf-uses")
    with closing(place.uses("off")) as uses:
        uses.note(place.view, CHUNKS)
        uses.note_names(place.shelf.backend, [place.view.name(ObjectRef(CHUNKS[0], 0))])
        assert uses.flush(PATIENCE) and not named("kvshelf-uses") - before
    assert place.fresh() == [] and place.marked() == []


def test_a_shelf_that_takes_no_writes_is_left_alone(tmp_path: Path) -> None:
    place = Place(tmp_path, ReadOnlyBackend)
    with closing(place.shelf), closing(place.uses()) as uses:
        place.record(uses, CHUNKS)
        assert place.faults.counts["touch"] == place.faults.counts["write"] == 0


def test_a_storage_in_trouble_is_asked_again_at_the_next_hit(place: Place) -> None:
    place.faults.add(Fault("touch", error=TransientStorageError(5, "down", "x"), times=1))
    with closing(place.uses()) as uses:
        place.record(uses, CHUNKS[:2])
        assert place.fresh() == []
        place.record(uses, CHUNKS[:2])
        assert place.fresh() == [0, 1]


def test_uses_are_recorded_on_a_full_storage(place: Place) -> None:
    """They decide what is deleted to free space."""
    backend = place.shelf.backend
    place.faults.add(Fault("write", error=NoSpaceStorageError(28, "full", "x")))
    with pytest.raises(NoSpaceStorageError):
        backend.write("x", [b"x"])
    assert backend.properties.read_only
    with closing(place.uses()) as uses:
        place.record(uses, CHUNKS[:2])
    assert place.fresh() == [0, 1]


def test_what_a_storage_that_fails_has_not_recorded_is_recorded_later(place: Place) -> None:
    backend = place.shelf.backend
    backend.writes.trip("down")
    with closing(place.uses()) as uses:
        place.record(uses, CHUNKS[:2])
        assert place.faults.counts["touch"] == 0
        backend.writes.close()
        place.record(uses, CHUNKS[:2])
    assert place.fresh() == [0, 1]


@pytest.mark.parametrize(
    "error", [TransientStorageError(5, "down", "x"), NoSpaceStorageError(28, "full", "x")]
)
def test_marks_that_could_not_be_written_are_written_later(
    refusing: Place, error: StorageError
) -> None:
    refusing.faults.add(Fault("write", error=error, times=1))
    with closing(refusing.uses()) as uses:
        refusing.record(uses, CHUNKS[:2])
        assert refusing.marked() == []
        # A full storage is given a rest.
        refusing.shelf.backend.writes.close()
        assert uses.flush(PATIENCE)
        assert refusing.marked() == [0, 1] and refusing.count("marked_chunks") == 2


def test_marks_that_may_not_be_written_are_spoken_of_once_an_hour(
    refusing: Place, caplog: pytest.LogCaptureFixture
) -> None:
    refusing.faults.add(Fault("write", error=PermanentStorageError(13, "forbidden", "x")))
    with closing(refusing.uses(resolution=60.0)) as uses:
        for seconds in (0, 61, 61, 61):
            refusing.clock.now += seconds
            refusing.record(uses, CHUNKS)
        assert refusing.faults.counts["write"] == 1
        refusing.clock.now += 3600
        refusing.faults.heal()
        refusing.record(uses, CHUNKS)
        assert refusing.marked() == [0, 1, 2, 3, 4, 5]
    lines = [r for r in caplog.records if "are not recorded" in r.message]
    assert len(lines) == 1 and "Allow this user to write" in lines[0].message


@pytest.mark.long
def test_a_storage_that_hangs_holds_up_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uses_module, "_MOST_WAITING", 600)
    place = Place(tmp_path)
    hang = threading.Event()
    place.faults.add(Fault("touch", wait=hang))
    with closing(place.shelf):
        before = named("kvshelf-uses")
        uses = place.uses()
        uses.note(place.view, CHUNKS)
        until(lambda: place.faults.counts["touch"] == 1)
        hits = []
        for _ in range(500):
            chunks = Prompt(CHUNKS)
            hits.append(weakref.ref(chunks))
            uses.note(place.view, chunks)
        assert sum(hit() is not None for hit in hits) <= 600 / len(CHUNKS) + 1
        assert not uses.flush(0.01)
        uses.close()
        hang.set()
        until(lambda: not named("kvshelf-uses") - before)
        # The storage may be closed by then: nothing more is asked of it but what was begun.
        assert place.faults.counts["touch"] <= FMT.shards


def test_what_is_remembered_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uses_module, "_MOST_USES", 4)
    with closing(place.uses()) as uses:
        place.record(uses, CHUNKS)
        place.record(uses, CHUNKS[-1:])
        assert place.faults.counts["touch"] == len(CHUNKS) * FMT.shards
        place.record(uses, CHUNKS[:1])
        assert place.faults.counts["touch"] == (len(CHUNKS) + 1) * FMT.shards


def test_objects_are_used_by_their_names(place: Place) -> None:
    names = [place.view.name(ObjectRef(CHUNKS[3], shard)) for shard in range(FMT.shards)]
    with closing(place.uses()) as uses:
        uses.note_names(place.shelf.backend, names)
        uses.note_names(place.shelf.backend, names)
        assert uses.flush(PATIENCE)
    assert place.fresh() == [3]
    assert place.faults.counts["touch"] == FMT.shards
