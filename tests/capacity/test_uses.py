"""Uses of chunks are recorded in the way that the storage allows, and as often as is of use."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Touched
from kvshelf.backends.base import Backend
from kvshelf.capacity import keepers, limits
from kvshelf.capacity.uses import Uses, resolution
from kvshelf.errors import (
    NoSpaceStorageError,
    TransientStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import NamespaceView, ObjectRef
from tests.sim.storage import Fault, FaultyStorage, posix
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
        self.then = time.time() - DAY
        with closing(Shelf(posix(root))) as shelf:
            view = shelf.view(FMT)
            for chunk in CHUNKS:
                for shard in range(FMT.shards):
                    view.publish(ObjectRef(chunk, shard), sealed(FMT, chunk, shard))
                    os.utime(self.path(chunk, shard), (self.then, self.then))

    def path(self, chunk: Chunk, shard: int = 0) -> Path:
        return self.root / self.view.name(ObjectRef(chunk, shard))

    def uses(self, **options: Any) -> Uses:
        return Uses(self.counters, **options)

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

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    with closing(place.shelf):
        yield place


@pytest.mark.parametrize(
    ("max_age", "expected"),
    [(None, 3600), (30 * DAY, 3600), (8 * 3600, 3600), (4000, 500), (300, 60), (1, 60)],
)
def test_resolution_follows_from_the_age(max_age: float | None, expected: float) -> None:
    assert resolution(max_age) == expected


def test_use_is_recorded_again_when_it_is_of_use(place: Place) -> None:
    with closing(place.uses(max_age=4800.0)) as uses:
        for seconds, expected in [(0, 4), (300, 4), (200, 4), (101, 8), (1, 8)]:
            time.sleep(seconds)
            place.record(uses, CHUNKS[:2])
            assert place.faults.counts["touch"] == expected


def test_off_is_off(place: Place) -> None:
    before = named("kvshelf-uses")
    with closing(place.uses(off=True)) as uses:
        uses.note(place.view, CHUNKS)
        uses.note(place.shelf.backend, [place.view.name(ObjectRef(CHUNKS[0], 0))])
        assert uses.flush(PATIENCE) and not named("kvshelf-uses") - before
    assert place.fresh() == []


def test_what_a_storage_that_fails_has_not_recorded_is_recorded_later(place: Place) -> None:
    backend = place.shelf.backend
    backend.writes.trip("down")
    with closing(place.uses()) as uses:
        place.record(uses, CHUNKS[:2])
        assert place.faults.counts["touch"] == 0
        backend.writes.close()
        # On a full storage uses decide what is deleted to free space.
        place.faults.add(Fault("write", error=NoSpaceStorageError(28, "full", "x")))
        with pytest.raises(NoSpaceStorageError):
            backend.write("x", [b"x"])
        assert backend.properties.read_only
        place.record(uses, CHUNKS[:2])
    assert place.fresh() == [0, 1]


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_use_of_an_object_that_hangs_or_fails_takes_no_other_with_it(
    tmp_path: Path, fault: str
) -> None:
    place = Place(tmp_path, lambda inner: FaultyStorage(inner, local_path=""))
    bad = place.view.name(ObjectRef(CHUNKS[1], 0))
    error = TransientStorageError(errno.EIO, "bad block", bad) if fault == "fails" else None
    hang = threading.Event() if fault == "hangs" else None
    place.faults.add(Fault("touch", bad, wait=hang, error=error))
    with closing(place.shelf), closing(place.uses()) as uses:
        for _ in range(2):
            place.record(uses, CHUNKS[:4])
        # The chunk's other objects are asked again, and the bad one where it does not hang still.
        again = FMT.shards - (fault == "hangs")
        assert place.faults.counts["touch"] == 4 * FMT.shards + again
        times = [place.path(CHUNKS[1], shard).stat().st_atime for shard in range(FMT.shards)]
        assert [time > place.then + 1 for time in times] == [False] + [True] * (FMT.shards - 1)
        place.path(CHUNKS[1]).touch()
        os.utime(place.path(CHUNKS[1]), (time.time(), place.then))
        assert place.fresh() == [0, 1, 2, 3]
        if hang is not None:
            hang.set()


@pytest.mark.long
def test_storage_that_hangs_holds_up_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_WAITING", 600)
    place = Place(tmp_path)
    hang = place.faults.hang("touch")
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
    monkeypatch.setattr(limits, "MOST_USES", 4)
    with closing(place.uses()) as uses:
        place.record(uses, CHUNKS)
        place.record(uses, CHUNKS[-1:])
        assert place.faults.counts["touch"] == len(CHUNKS) * FMT.shards
        place.record(uses, CHUNKS[:1])
        assert place.faults.counts["touch"] == (len(CHUNKS) + 1) * FMT.shards


def test_use_is_recorded_in_whichever_folder_of_its_namespace_an_object_lies(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    name = place.view.name(ObjectRef(CHUNKS[1], 0))
    other = place.root / f"other-{name}"
    other.parent.mkdir(parents=True)
    place.path(CHUNKS[1]).rename(other)
    time.sleep(61)
    with closing(place.shelf), closing(place.uses()) as uses:
        place.record(uses, CHUNKS)
    assert other.stat().st_atime > place.then + 1


def test_tails_are_recorded_each_minute(place: Place) -> None:
    with closing(place.uses(max_age=30 * DAY)) as uses:
        for seconds, expected in [(0, 1), (50, 1), (11, 2), (10, 2)]:
            time.sleep(seconds)
            uses.note(place.shelf.backend, [place.view.name(ObjectRef(TAIL, 0))])
            assert uses.flush(PATIENCE)
            assert place.faults.counts["touch"] == expected


def test_what_keepers_say_decides_how_often_uses_are_recorded(place: Place) -> None:
    with closing(place.uses()) as uses:
        place.record(uses, CHUNKS[:1])
        assert uses.resolution == 3600
        keepers.say(place.shelf.backend, "a" * 16, {"evicts_after": 4000.0, "max_age": DAY})
        keepers.say(place.shelf.backend, "b" * 16, {"evicts_after": "soon", "max_age": -1})
        place.record(uses, CHUNKS[:1])
        assert uses.resolution == 3600
        time.sleep(61)
        place.record(uses, CHUNKS[:1])
        assert uses.resolution == 500


class Renewing(FaultyStorage):
    """A storage that records uses by writing objects anew; tells before which time."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, renews=True)
        self.before: list[float] = []

    def touch(self, name: str, before: float = math.inf) -> Touched:
        self.before.append(time.time() - before)
        return Touched.TOUCHED


def test_objects_are_written_anew_in_half_of_the_age_of_eviction(tmp_path: Path) -> None:
    place = Place(tmp_path, Renewing)
    renewing = place.shelf.backend.inner
    assert isinstance(renewing, Renewing)
    with closing(place.shelf), closing(place.uses()) as uses:
        # Nothing is deleted: nothing is written.
        place.record(uses, CHUNKS)
        assert not renewing.before
        keepers.say(place.shelf.backend, "a" * 16, {"evicts_after": 4 * DAY})
        time.sleep(61)
        place.record(uses, CHUNKS[:2])
        assert renewing.before == pytest.approx([2 * DAY] * 2 * FMT.shards)
