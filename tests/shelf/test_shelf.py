"""The shelf's rules: presence, publishing, verified loads, bad objects, listings."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.backends import WriteResult, open_backend
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    NotRegularError,
    ObjectMissingError,
    ObjectNameError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.pins import Pin, Pins
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef, Presence
from tests.sim.storage import Fault, FaultyStorage
from tests.support import formats

CHUNK = 16
SHARDS = 2


make_format = functools.partial(
    formats.make_format, 2, native=False, chunk_size=CHUNK, shards=SHARDS, slug="tiny"
)


FMT = make_format()
CHUNKS = KeyChain(FMT.namespace.digest, CHUNK).extend(range(CHUNK * 48))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shelf"


@pytest.fixture
def shelf(root: Path) -> Iterator[Shelf]:
    with open_shelf(root) as shelf:
        yield shelf


@pytest.fixture(params=["directory", "memory"])
def any_shelf(request: pytest.FixtureRequest, root: Path) -> Iterator[Shelf]:
    url = root if request.param == "directory" else f"memory://{uuid.uuid4().hex}"
    with open_shelf(url) as shelf:
        yield shelf


def image(chunk: Chunk, shard: int = 0, fill: int = 7, fmt: ObjectFormat = FMT) -> bytearray:
    data = bytearray([fill + shard]) * fmt.object_size(shard, chunk.tokens)
    fmt.seal(memoryview(data), chunk, shard)
    return data


def zero(data: bytearray) -> None:
    data[:] = bytes(len(data))


def store(shelf: Shelf, chunk: Chunk, shard: int = 0, fmt: ObjectFormat = FMT) -> WriteResult:
    data = image(chunk, shard, fmt=fmt)
    return shelf.view(fmt).publish(ObjectRef(chunk, shard), data)


def publish(shelf: Shelf, data: bytes | bytearray, *, suspect: bool = False) -> WriteResult:
    """Publish bytes as the first object of the first chunk."""
    return shelf.view(FMT).publish(ObjectRef(CHUNKS[0], 0), data, suspect=suspect)


def load(shelf: Shelf, chunk: Chunk, shard: int = 0, fmt: ObjectFormat = FMT) -> bytearray:
    data = bytearray(fmt.object_size(shard, chunk.tokens))
    shelf.view(fmt).load(ObjectRef(chunk, shard), memoryview(data))
    return data


def present(shelf: Shelf, count: int = 1, fmt: ObjectFormat = FMT) -> list[bool]:
    """Whether the first objects of the first chunks are there."""
    found = shelf.view(fmt).find([ObjectRef(chunk, 0) for chunk in CHUNKS[:count]])
    return [answer is Presence.PRESENT for answer in found]


def path_of(shelf: Shelf, chunk: Chunk, fmt: ObjectFormat = FMT) -> Path:
    return Path(shelf.url) / shelf.view(fmt).name(ObjectRef(chunk, 0))


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def faulty(root: Path) -> FaultyStorage:
    return FaultyStorage(open_backend(root))


def set_aside(shelf: Shelf) -> list[Path]:
    return list(Path(shelf.url).rglob(".*.tmp"))


# ------------------------------------------------------------------------------ store and load


def test_buffers_of_wrong_size_are_the_callers_mistake(shelf: Shelf, root: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        publish(shelf, image(CHUNKS[0]) + b"x")
    assert list(root.iterdir()) == []


def test_views_that_are_used_no_more_are_forgotten(shelf: Shelf) -> None:
    old, used = weakref.ref(shelf.view(make_format(version="old"))), shelf.view(FMT)
    for number in range(50):
        shelf.view(make_format(version=f"{number}"))
        assert shelf.view(FMT) is used
    gc.collect()
    assert old() is None


def test_damaged_description_is_written_again_by_a_store_ten_seconds_later(
    shelf: Shelf, root: Path
) -> None:
    store(shelf, CHUNKS[0])
    path = root / FMT.namespace.folder / "namespace.json"
    path.write_bytes(b"")
    # Not every store looks at it.
    store(shelf, CHUNKS[1])
    assert path.read_bytes() == b""
    time.sleep(10.0)
    store(shelf, CHUNKS[2])
    assert path.read_bytes() == FMT.namespace.encoded


def test_description_of_zeros_is_written_again(
    any_shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    """A power loss may leave the size of a file and none of its bytes."""
    name = f"{FMT.namespace.folder}/namespace.json"
    any_shelf.backend.write(name, [bytes(len(FMT.namespace.encoded))])
    assert [info.namespace for info in any_shelf.namespaces()] == [None]
    store(any_shelf, CHUNKS[0])
    assert [info.namespace for info in any_shelf.namespaces()] == [FMT.namespace]
    assert "is damaged" in caplog.text
    # The next process finds nothing to do.
    caplog.clear()
    fresh = Shelf(any_shelf.backend)
    store(fresh, CHUNKS[1])
    assert not caplog.records


def test_two_folders_of_one_namespace_are_read_as_one(shelf: Shelf, root: Path) -> None:
    other = make_format(slug="aaa")
    store(shelf, CHUNKS[0])
    with open_shelf(root.parent / "elsewhere") as elsewhere:
        store(elsewhere, CHUNKS[1], fmt=other)
    shutil.copytree(root.parent / "elsewhere", root, dirs_exist_ok=True)
    for mine in (FMT, other, make_format(slug="zzz")):
        with open_shelf(root) as fresh:
            assert present(fresh, 3, fmt=mine) == [True, True, False]
            for chunk in CHUNKS[:2]:
                assert load(fresh, chunk, fmt=mine) == image(chunk)
            with pytest.raises(ObjectMissingError):
                load(fresh, CHUNKS[2], fmt=mine)
    assert len(list(root.iterdir())) == 2
    os.truncate(path_of(shelf, CHUNKS[0]), 100)
    with open_shelf(root) as fresh:
        assert fresh.view(FMT).probe([(CHUNKS[0], 0)]) == [Presence.WRONG_SIZE]
        copy = (
            root
            / other.namespace.folder
            / path_of(shelf, CHUNKS[0]).relative_to(root / FMT.namespace.folder)
        )
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(image(CHUNKS[0]))
        assert fresh.view(FMT).probe([(CHUNKS[0], 0)]) == [Presence.PRESENT]


def test_each_folder_of_a_namespace_gets_its_description(shelf: Shelf, root: Path) -> None:
    """A node server publishes in the folder that a client names."""
    folders = [FMT.namespace.folder, make_format(slug="aaa").namespace.folder]
    for folder in folders:
        shelf.view(FMT).describe(folder)
    for folder in folders:
        assert (root / folder / "namespace.json").read_bytes() == FMT.namespace.encoded


def test_many_folders_of_one_namespace_cost_a_bounded_number_of_probes(root: Path) -> None:
    counting = FaultyStorage(open_backend(root))
    with Shelf(counting) as shelf:
        store(shelf, CHUNKS[0])
        for number in range(100):
            (root / f"a{number}-{FMT.namespace.digest.hex()[:16]}").mkdir()
    with Shelf(counting) as shelf:
        counting.counts.clear()
        assert present(shelf, 2) == [True, False]
        assert counting.counts["stat"] <= 8


def test_linked_namespace_folder_is_an_error_not_a_way_out(shelf: Shelf, root: Path) -> None:
    store(shelf, CHUNKS[0])
    moved = root.parent / "moved"
    (root / FMT.namespace.folder).rename(moved)
    (root / FMT.namespace.folder).symlink_to(moved)
    with open_shelf(root) as fresh:
        assert fresh.view(FMT).probe([(CHUNKS[0], 0)]) == [Presence.ERROR]
        with pytest.raises(PermanentStorageError):
            load(fresh, CHUNKS[0])
        with pytest.raises(PermanentStorageError):
            store(fresh, CHUNKS[1])


# ------------------------------------------------------------------------------------ wrong size


def test_running_copy_is_not_moved_by_a_load(shelf: Shelf) -> None:
    data = image(CHUNKS[0])
    path = path_of(shelf, CHUNKS[0])
    path.parent.mkdir(parents=True)
    with path.open("wb") as copy:
        copy.write(data[:5000])
        copy.flush()
        with pytest.raises(BadObjectError):
            load(shelf, CHUNKS[0])
        copy.write(data[5000:])
    assert load(shelf, CHUNKS[0]) == data
    os.truncate(path, 5000)
    age(path, 61)
    for seconds in (60.0, 0.0):
        # A cache of the storage may show the size of an earlier file.
        cached = Shelf(FaultyStorage(open_backend(shelf.url), cache_seconds=seconds))
        with pytest.raises(BadObjectError):
            load(cached, CHUNKS[0])
        assert path.exists() == (seconds > 0)


@pytest.mark.parametrize("stood", ["short", "long", "folder"])
def test_file_that_another_writer_put_right_is_not_moved_by_a_load(root: Path, stood: str) -> None:
    good = image(CHUNKS[0])

    def correct() -> None:
        if path.is_dir():
            path.rmdir()
        path.write_bytes(good)
        age(path, 61)

    # What was read is replaced just before it is looked at again.
    with Shelf(FaultyStorage(open_backend(root), Fault("stat", error=correct))) as shelf:
        path = path_of(shelf, CHUNKS[0])
        path.parent.mkdir(parents=True)
        if stood == "folder":
            path.mkdir()
        else:
            path.write_bytes(good[:5000] if stood == "short" else good + b"more")
            age(path, 61)
        with pytest.raises(BadObjectError):
            load(shelf, CHUNKS[0])
        assert load(shelf, CHUNKS[0]) == good


# ----------------------------------------------------------------------------------- bad objects


def test_bad_object_stays_on_a_read_only_shelf(shelf: Shelf, root: Path) -> None:
    store(shelf, CHUNKS[0])
    flip(path_of(shelf, CHUNKS[0]))
    with open_shelf(root, read_only=True) as reader:
        assert reader.read_only
        with pytest.raises(BadObjectError, match="payload damaged"):
            load(reader, CHUNKS[0])
        with pytest.raises(ReadOnlyStorageError):
            store(reader, CHUNKS[1])
    assert path_of(shelf, CHUNKS[0]).exists()
    assert set_aside(shelf) == []


def test_bad_object_that_cannot_be_moved_is_bad_all_the_same(root: Path) -> None:
    error = TransientStorageError(5, "EIO")
    with Shelf(FaultyStorage(open_backend(root), Fault("set_aside", error=error))) as shelf:
        store(shelf, CHUNKS[0])
        flip(path_of(shelf, CHUNKS[0]))
        with pytest.raises(BadObjectError, match="payload damaged"):
            load(shelf, CHUNKS[0])
        assert path_of(shelf, CHUNKS[0]).exists()


def test_object_that_is_read_damaged_once_is_read_again(faulty: FaultyStorage) -> None:
    """Caches of network filesystems show old contents to an old open."""
    with Shelf(faulty) as shelf:
        store(shelf, CHUNKS[0])
        faulty.add(Fault("read", damage=zero, times=1))
        assert load(shelf, CHUNKS[0]) == image(CHUNKS[0])
        assert not set_aside(shelf)


def test_bad_object_is_set_aside_alone_of_those_that_are_loaded_together(shelf: Shelf) -> None:
    paths = []
    for shard in range(SHARDS):
        store(shelf, CHUNKS[0], shard)
        paths.append(Path(shelf.url, shelf.view(FMT).name(ObjectRef(CHUNKS[0], shard))))
    flip(paths[1])
    buffers = [memoryview(bytearray(FMT.object_size(shard))) for shard in range(SHARDS)]
    failed = shelf.view(FMT).load_all(CHUNKS[0], range(SHARDS), buffers)
    assert failed is not None and failed.shard == 1
    assert [path.exists() for path in paths] == [True, False]
    # What is gone meanwhile is nobody's to move.
    assert not shelf.view(FMT).set_aside(ObjectRef(CHUNKS[0], 1), failed.error)  # type: ignore[arg-type]


def test_machine_that_reads_wrong_bytes_spares_the_shelf(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = KeyChain(FMT.namespace.digest, CHUNK).extend(range(CHUNK * 120))
    faulty = FaultyStorage(open_backend(root))
    with Shelf(faulty) as shelf:
        for chunk in chunks:
            store(shelf, chunk)
        pinned = {path_of(shelf, chunk) for chunk in chunks[:3]}
        Pins.add(shelf.backend, "mine", Pin(keys=[chunk.key for chunk in chunks[:3]]))

        def load_all() -> None:
            for chunk in chunks:
                with pytest.raises((BadObjectError, ObjectMissingError)):
                    load(shelf, chunk)

        faulty.add(Fault("read", "*.safetensors", damage=zero))
        load_all()
        assert len(set_aside(shelf)) == 5
        assert "more objects were found bad" in caplog.text
        time.sleep(61)
        caplog.clear()
        Pins.remove(shelf.backend, "mine")
        load_all()
        assert len(set_aside(shelf)) == 6
        assert "found bad" not in "".join(r.message for r in caplog.records if r.levelno > 20)
        faulty.heal()
        there = [chunk for chunk in chunks if path_of(shelf, chunk).exists()]
        assert len(there) == 114
        assert all(load(shelf, chunk) == image(chunk) for chunk in there)
    assert len([path for path in pinned if path.exists()]) == 2


def test_probe_errors_are_answers(root: Path, faulty: FaultyStorage) -> None:
    with Shelf(faulty) as shelf:
        store(shelf, CHUNKS[0])
        store(shelf, CHUNKS[1])
        key = CHUNKS[0].key.hex()
        faulty.add(Fault("stat", f"*{key}*", error=TransientStorageError(5, "EIO")))
        answers = shelf.view(FMT).probe([(CHUNKS[0], 0), (CHUNKS[1], 0)])
        assert answers == [Presence.ERROR, Presence.PRESENT]
        with pytest.raises(TransientStorageError):
            store(shelf, CHUNKS[0])
    faulty = FaultyStorage(open_backend(root))
    faulty.add(Fault("folders", error=lambda: TransientStorageError(5, "EIO"), times=1))
    with Shelf(faulty) as shelf:
        assert shelf.view(FMT).probe([(CHUNKS[0], 0)]) == [Presence.ERROR]
        assert shelf.view(FMT).probe([(CHUNKS[0], 0)]) == [Presence.PRESENT]


def test_listing_may_be_forbidden(faulty: FaultyStorage) -> None:
    faulty.add(Fault("folders", error=lambda: PermanentStorageError(13, "denied")))
    with Shelf(faulty) as shelf:
        store(shelf, CHUNKS[0])
        assert load(shelf, CHUNKS[0]) == image(CHUNKS[0])


def test_listings_that_fail_do_not_stop_what_can_be_read(faulty: FaultyStorage) -> None:
    """The folders of the namespace are looked for each minute, by one caller."""
    with Shelf(faulty) as shelf:
        store(shelf, CHUNKS[0])
        time.sleep(61.0)
        assert present(shelf) == [True]
        faulty.counts.clear()
        faulty.add(Fault("folders", error=lambda: TransientStorageError(5, "503")))
        for minute in range(1, 4):
            time.sleep(61.0)
            for _ in range(10):
                assert present(shelf) == [True]
                assert load(shelf, CHUNKS[0]) == image(CHUNKS[0])
            assert faulty.counts["folders"] == minute
        assert shelf.available


def test_folder_that_another_engine_makes_first_is_found_within_seconds(
    shelf: Shelf, root: Path
) -> None:
    """Its slug is another, so it is not the folder that this engine would make."""
    assert present(shelf) == [False]
    with open_shelf(root) as other:
        store(other, CHUNKS[0], fmt=make_format(slug="aaa"))
    time.sleep(6.0)
    assert present(shelf) == [True]


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
@pytest.mark.parametrize("how", ["write", "repair", "load first"])
def test_something_else_in_an_objects_place(shelf: Shelf, kind: str, how: str) -> None:
    store(shelf, CHUNKS[0])
    path = path_of(shelf, CHUNKS[0])
    outside = Path(shelf.url).parent / "outside"
    path.rename(outside)  # a link to a good object is no object either
    if kind == "folder":
        path.mkdir()
        (path / "inside").write_bytes(b"")
    elif kind == "link":
        path.symlink_to(outside)
    else:
        os.mkfifo(path)
    before = outside.read_bytes()
    assert shelf.view(FMT).probe([(CHUNKS[0], 0)]) == [Presence.NOT_REGULAR]
    good = image(CHUNKS[0], fill=50)
    if how == "write":
        assert publish(shelf, good) is WriteResult.REPLACED
    elif how == "repair":
        assert publish(shelf, good, suspect=True) is WriteResult.REPLACED
    else:
        with pytest.raises(BadObjectError) as caught:
            load(shelf, CHUNKS[0])
        assert isinstance(caught.value, NotRegularError)
        assert isinstance(caught.value, StorageError)
        assert publish(shelf, good) is WriteResult.CREATED
    assert load(shelf, CHUNKS[0]) == good
    assert outside.read_bytes() == before
    assert len(set_aside(shelf)) == (how == "load first" or kind == "folder")


# -------------------------------------------------------------------------------------- listings


def test_listing_tells_what_the_names_of_objects_say(any_shelf: Shelf) -> None:
    other = make_format(weights="user:other", slug="second")
    for shard in range(SHARDS):
        store(any_shelf, CHUNKS[0], shard)
    chain = KeyChain(other.namespace.digest, CHUNK)
    chain.extend(range(CHUNK + 3))
    tail = chain.tail()
    assert tail is not None
    store(any_shelf, tail, fmt=other)
    name = any_shelf.view(other).name(ObjectRef(tail, 0))
    (item,) = any_shelf.objects(other.namespace.folder)
    assert (item.name, item.size) == (name, other.object_size(0, 3))
    assert (item.parsed.key, item.parsed.tail_tokens) == (tail.key, 3)
    assert item.parsed.namespace == other.namespace.folder
    assert abs(item.mtime - time.time()) < 60
    assert len(list(any_shelf.objects())) == SHARDS + 1
    assert {info.folder for info in any_shelf.namespaces()} == {
        FMT.namespace.folder,
        other.namespace.folder,
    }
    with pytest.raises(ObjectNameError):
        list(any_shelf.objects("../elsewhere"))


def test_foreign_files_are_skipped_and_kept(shelf: Shelf, root: Path) -> None:
    store(shelf, CHUNKS[0])
    folder = root / FMT.namespace.folder
    foreign = [
        "README.md",
        "lost+found/x",
        f"{FMT.namespace.folder}/notes.txt",
        f"{FMT.namespace.folder}/_/zz/x.safetensors",
        f"{FMT.namespace.folder}/.kvshelf/x.safetensors",
    ]
    for name in foreign:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    shutil.copytree(folder / "_", root / "not-a-namespace" / "_")
    assert [item.name for item in shelf.objects()] == [
        shelf.view(FMT).name(ObjectRef(CHUNKS[0], 0))
    ]
    assert [info.folder for info in shelf.namespaces()] == [FMT.namespace.folder]
    for name in [*foreign, f"{FMT.namespace.folder}/namespace.json", "../x", ""]:
        with pytest.raises(ObjectNameError):
            shelf.delete(name)
    for name in foreign:
        assert (root / name).exists()


def test_descriptions_that_cannot_be_used(shelf: Shelf, root: Path) -> None:
    other = make_format(weights="user:other").namespace
    for number, content in enumerate([None, b"", b"{}", b"\xff", other.encoded]):
        folder = root / f"n{number}-{number:016x}"
        folder.mkdir()
        if content is not None:
            (folder / "namespace.json").write_bytes(content)
    fifo = root / "n8-0000000000000008"
    fifo.mkdir()
    os.mkfifo(fifo / "namespace.json")
    huge = root / "n9-0000000000000009"
    huge.mkdir()
    (huge / "namespace.json").touch()
    os.truncate(huge / "namespace.json", 100 << 30)
    found = list(shelf.namespaces())
    assert len(found) == 7
    assert all(info.namespace is None and info.problem for info in found)
    assert found[0].problem == "it has no namespace.json"
    assert other.digest.hex()[:16] in str(found[4].problem)


def test_directory_that_is_not_to_be_made_must_be_there(tmp_path: Path) -> None:
    folder, options = tmp_path / "unmounted", {"create": False}
    for url in (str(folder), f"file://{folder}"):
        with pytest.raises(ConfigError, match=r"does not exist.*create: false.*mount it"):
            open_shelf(url, storage_options=options)
    assert not folder.exists()
    folder.mkdir()
    open_shelf(str(folder), storage_options=options).close()
