"""Views of a shelf whose objects lie in the memory of somebody else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvshelf.backends import open_backend
from kvshelf.backends.wrappers import ReadOnlyBackend
from kvshelf.errors import (
    BadObjectError,
    ObjectMissingError,
    TransientStorageError,
    UnavailableStorageError,
)
from kvshelf.format.invalid import Defect
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef, Presence, find_together
from kvshelf.tiers.object_memory import PinningShelf
from tests.sim.storage import Fault, FaultyStorage, LendingMemory
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks


@pytest.fixture(scope="module")
def fmt() -> ObjectFormat:
    return make_format()


@pytest.fixture(scope="module")
def chunks(fmt: ObjectFormat) -> list[Chunk]:
    return make_chunks(fmt, 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shelf"


def store(shelf: Shelf, fmt: ObjectFormat, *chunks: Chunk) -> None:
    for chunk in chunks:
        shelf.view(fmt).publish(ObjectRef(chunk, 0), sealed(fmt, chunk))


def load(shelf: Shelf, fmt: ObjectFormat, chunk: Chunk) -> bytes:
    data = bytearray(fmt.object_size(0))
    shelf.view(fmt).load(ObjectRef(chunk, 0), memoryview(data))
    return bytes(data)


def set_aside(shelf: Shelf) -> list[Path]:
    return list(Path(shelf.url).rglob(".*.tmp"))


def test_object_that_the_storage_has_in_memory_is_pinned_whole(
    root: Path, fmt: ObjectFormat, chunks: list[Chunk]
) -> None:
    lending = LendingMemory(open_backend(root))
    with PinningShelf(open_backend(root), lending) as shelf:
        store(shelf, fmt, chunks[0])
        view = shelf.view(fmt)
        ref, missing = ObjectRef(chunks[0], 0), ObjectRef(chunks[1], 1)
        view.expect(chunks[:2], (0, 1))
        assert lending.expected == [
            (view.name(ObjectRef(chunk, shard)), fmt.object_size(shard))
            for chunk in chunks[:2]
            for shard in (0, 1)
        ]
        loan = view.pin(ref)
        assert loan is not None and bytes(loan.view) == sealed(fmt, chunks[0])
        loan.release()
        with pytest.raises(ObjectMissingError):
            view.pin(missing)
        lending.lends = lambda name: False
        assert view.pin(ref) is None


def test_lookups_find_what_is_in_memory_only_and_stores_do_not(
    root: Path, fmt: ObjectFormat, chunks: list[Chunk]
) -> None:
    lending = LendingMemory(open_backend(root))
    with PinningShelf(ReadOnlyBackend(open_backend(root)), lending) as shelf:
        view = shelf.view(fmt)
        refs = [ObjectRef(chunk, 0) for chunk in chunks[:2]]
        lending.kept = {view.name(refs[1])}
        assert view.find(refs) == [Presence.MISSING, Presence.PRESENT]
        assert find_together([(view, refs)]) == [[Presence.MISSING, Presence.PRESENT]]
        assert view.probe(refs) == [Presence.MISSING, Presence.MISSING]


def test_bytes_of_another_object_are_not_taken_for_this_one(
    root: Path, fmt: ObjectFormat, chunks: list[Chunk], caplog: pytest.LogCaptureFixture
) -> None:
    lending = LendingMemory(open_backend(root))
    with PinningShelf(open_backend(root), lending) as shelf:
        store(shelf, fmt, chunks[0])
        lending.on_lend = lambda loan: loan.data.__setitem__(slice(None), sealed(fmt, chunks[1]))
        assert shelf.view(fmt).pin(ObjectRef(chunks[0], 0)) is None
        assert [loan.released for loan in lending.loans] == [1]
        assert "bytes in memory are not those of" in caplog.text
        # The object on the storage is good, and stays.
        assert not set_aside(shelf)
        assert load(shelf, fmt, chunks[0]) == sealed(fmt, chunks[0])


def test_object_that_the_owner_of_the_memory_found_bad_is_set_aside(
    root: Path, fmt: ObjectFormat, chunks: list[Chunk]
) -> None:
    faulty = FaultyStorage(open_backend(root))
    faulty.add(Fault("pin", error=BadObjectError(Defect.PAYLOAD_DAMAGED, "payload damaged")))
    with PinningShelf(faulty, LendingMemory(open_backend(root), faulty)) as shelf:
        store(shelf, fmt, chunks[0])
        with pytest.raises(BadObjectError, match="payload damaged"):
            shelf.view(fmt).pin(ObjectRef(chunks[0], 0))
        assert len(set_aside(shelf)) == 1


def test_objects_of_all_folders_of_a_namespace_are_pinned(root: Path, chunks: list[Chunk]) -> None:
    for slug, chunk in (("one", chunks[0]), ("two", chunks[1])):
        with open_shelf(root.parent / slug) as alone:
            store(alone, make_format(slug=slug), chunk)
        shutil.copytree(root.parent / slug, root, dirs_exist_ok=True)
    fmt = make_format(slug="one")
    with PinningShelf(open_backend(root), LendingMemory(open_backend(root))) as shelf:
        view = shelf.view(fmt)
        for chunk in chunks[:2]:
            loan = view.pin(ObjectRef(chunk, 0))
            assert loan is not None and bytes(loan.view) == sealed(fmt, chunk)
            loan.release()
        with pytest.raises(ObjectMissingError):
            view.pin(ObjectRef(chunks[2], 0))


@pytest.mark.parametrize(
    ("left_out", "copied"), [((), True), ((0,), False)], ids=["in memory", "not there"]
)
def test_what_is_not_read_in_place_is_copied(
    root: Path, fmt: ObjectFormat, chunks: list[Chunk], left_out: tuple[int, ...], copied: bool
) -> None:
    lending = LendingMemory(open_backend(root))
    lending.pins = False
    lending.lends = lambda name: 0 not in left_out
    with PinningShelf(open_backend(root), lending) as shelf:
        store(shelf, fmt, chunks[0])
        view = shelf.view(fmt)
        view.expect(chunks, (0, 1))
        assert not lending.expected
        assert view.pin(ObjectRef(chunks[0], 0)) is None
        assert load(shelf, fmt, chunks[0]) == sealed(fmt, chunks[0])
        assert [loan.released for loan in lending.loans] == [1] * copied


def test_bytes_that_were_taken_back_while_they_were_copied_are_no_object(
    root: Path, fmt: ObjectFormat, chunks: list[Chunk]
) -> None:
    lending = LendingMemory(open_backend(root))
    lending.pins = False
    lending.on_lend = lambda loan: setattr(loan, "valid_now", False)
    with PinningShelf(open_backend(root), lending) as shelf:
        store(shelf, fmt, chunks[0])
        with pytest.raises(TransientStorageError, match="taken back"):
            load(shelf, fmt, chunks[0])
        assert [loan.released for loan in lending.loans] == [1]


def test_nothing_is_expected_of_a_storage_that_is_not_asked(
    root: Path, fmt: ObjectFormat, chunks: list[Chunk]
) -> None:
    lending = LendingMemory(open_backend(root))
    with PinningShelf(open_backend(root), lending) as shelf:
        store(shelf, fmt, chunks[0])
        view = shelf.view(fmt)
        loan = view.pin(ObjectRef(chunks[0], 0))
        assert loan is not None
        loan.release()
        shelf.backend.reads.trip("made by a test")
        view.expect(chunks, (0, 1))
        assert not lending.expected
        assert view.find([ObjectRef(chunks[0], 0)]) == [Presence.ERROR]
        with pytest.raises(UnavailableStorageError):
            view.pin(ObjectRef(chunks[0], 0))
        assert len(lending.asked) == 1
