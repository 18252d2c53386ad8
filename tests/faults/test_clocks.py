"""Clocks that are wrong: rows of the table of faults.

The storage's clock is an hour ahead of this machine's, or an hour behind it. What is young by
either clock stays, what is old by both goes.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvshelf.backends import Touched, WriteResult, open_backend
from kvshelf.backends.base import delete_one
from kvshelf.errors import BadObjectError
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from tests.faults.cells import (
    AHEAD,
    BEHIND,
    LIMIT,
    ODD_TIMES,
    EngineStandIn,
    MountedStorage,
    eventually,
    make_prompt,
)
from tests.faults.faultfs import FaultMount
from tests.faults.test_table import loads_all
from tests.sim.storage import FaultyStorage
from tests.support.cleaning import clean
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks

pytestmark = [pytest.mark.real, pytest.mark.slow]

FMT = make_format()
HOUR = 3600.0
OURS = ".namespace.json.0123456789abcdef.tmp"


class Skewed:
    """A shelf on a storage with a clock of its own, and its files past the mount."""

    def __init__(self, fault: str, mount: FaultMount) -> None:
        self.fault = fault
        name = uuid.uuid4().hex
        self.files = mount.source / name
        self.backend = FaultyStorage(open_backend(mount.path / name), cache_seconds=0.0)
        self.shelf = Shelf(self.backend)
        self.view = self.shelf.view(FMT)

    def make_older(self, name: str, seconds: float) -> None:
        """Date a file back; past the mount all times are those of this machine."""
        then = time.time() - seconds
        os.utime(self.files / name, (then, then))


@pytest.fixture(scope="module", params=[AHEAD, BEHIND])
def skewed_mount(
    request: pytest.FixtureRequest, mounts: Callable[..., FaultMount]
) -> tuple[str, FaultMount]:
    return request.param, mounts(ahead=HOUR if request.param == AHEAD else -HOUR)


@pytest.fixture
def skewed(skewed_mount: tuple[str, FaultMount]) -> Iterator[Skewed]:
    place = Skewed(*skewed_mount)
    yield place
    place.shelf.close()


def test_leftovers_go_by_the_clock_of_the_storage(
    skewed: Skewed, note_cell: Callable[..., None]
) -> None:
    """A temporary, and the marker of a hand-over."""
    note_cell(skewed.fault, "delete", "fuse")
    note_cell(skewed.fault, "list", "fuse")
    folder = FMT.namespace.folder
    skewed.view.give_up("0" * 32)
    (skewed.files / folder / OURS).write_bytes(b"being written")
    # By the earlier of the two clocks they were changed an hour ago, at most.
    assert clean(skewed.shelf.backend) == 0
    assert clean(skewed.shelf.backend, HOUR + HOUR + 60) == 2
    assert [row.name for row in skewed.backend.list(hidden=True)] == [f"{folder}/namespace.json"]


def test_a_file_that_is_being_copied_stays(skewed: Skewed, note_cell: Callable[..., None]) -> None:
    note_cell(skewed.fault, "write", "fuse")
    (chunk,) = make_chunks(FMT, 1)
    for shard, age in ((0, 0.0), (1, 2 * HOUR)):
        ref = ObjectRef(chunk, shard)
        data = sealed(FMT, chunk, shard)
        name = skewed.view.name(ref)
        skewed.backend.write(name, [data[: len(data) // 2]])
        skewed.make_older(name, age)
        with pytest.raises(BadObjectError):
            skewed.view.load(ref, memoryview(bytearray(len(data))))
        # By this machine's clock: what is copied to a storage whose clock is behind looks old.
        moved = age > 0 or skewed.fault == BEHIND
        assert skewed.backend.stat([name]) == [None if moved else len(data) // 2]
        stored = skewed.view.publish(ref, data)
        assert stored is (WriteResult.CREATED if moved else WriteResult.REPLACED)


def test_a_use_is_recorded_in_the_time_of_the_storage(skewed: Skewed) -> None:
    skewed.backend.write("a/used", [b"1"])
    skewed.make_older("a/used", 100.0)
    assert skewed.backend.touch("a/used") is Touched.TOUCHED
    skewed.backend.write("a/later", [b"1"])
    used, later = skewed.backend.info("a/used"), skewed.backend.info("a/later")
    assert used is not None and later is not None and used.ctime is not None
    assert used.mtime + 60 < later.mtime < used.ctime + 60


#: In 1969, and in the year 30000, which most filesystems take for the end of their time.
@pytest.mark.parametrize("moment", [-1e6, 8.8e11], ids=["1969", "30000"])
@pytest.mark.parametrize("backend", ["fuse"])
def test_times_that_make_no_sense(
    storage: MountedStorage, backend: str, moment: float, note_cell: Callable[..., None]
) -> None:
    for what in ("read", "list", "delete"):
        note_cell(ODD_TIMES, what, backend)
    known = make_prompt(FMT, 0)
    with closing(EngineStandIn(storage.backend, deadline=LIMIT)) as engine:
        engine.answer(known)
        eventually(loads_all(engine, known))
        names = [row.name for row in storage.plain.list()]
        for name in names:
            os.utime(Path(storage.plain.url, name), (moment, moment))
        eventually(loads_all(engine, known))
        assert len(list(engine.rig.shelf.objects())) == len(known.chunks) * FMT.shards
        for name in names:
            assert storage.backend.touch(name) is Touched.TOUCHED
        assert clean(engine.rig.shelf.backend) == 0
        assert {row.name for row in storage.plain.list()} == set(names)
        assert delete_one(storage.backend, names[0])
        eventually(loads_all(engine, known))
