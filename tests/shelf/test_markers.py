"""Markers of broken promises, over every kind of storage: written once, found by who asks."""

from __future__ import annotations

import errno
import importlib.util
import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Backend, open_backend
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import ReadOnlyBackend, WrappedBackend
from kvshelf.errors import (
    NoSpaceStorageError,
    ObjectNameError,
    ReadOnlyStorageError,
    TransientStorageError,
    UnavailableStorageError,
)
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.markers import is_attempt, marker_name
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.tiers.tiered import TieredView
from tests.sim.storage import Fault, FaultyStorage
from tests.support.formats import make_format
from tests.support.prompts import make_chunks
from tests.support.servers import BUCKET, S3Server, command, moto_s3

FMT = make_format(native=False)
FOLDER = FMT.namespace.folder
ONE, TWO, THREE = ("0123456789abcdef" * 2, "f" * 32, "0" * 32)


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    if command("moto_server") is None or importlib.util.find_spec("obstore") is None:
        pytest.skip("moto or obstore is not installed: pip install 'kvshelf[s3]' 'moto[server]'")
    with moto_s3() as server:
        yield server


BUCKETS = [pytest.param(name, marks=pytest.mark.real) for name in ("s3", "s3 by s3fs")]


@pytest.fixture(params=["directory", "directory by fsspec", "memory", *BUCKETS])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param.startswith("s3"):
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        options = request.getfixturevalue("moto").options()
        if request.param != "s3":
            pytest.importorskip("s3fs")
            options["client"] = "s3fs"
    else:
        folder = str(tmp_path / "shelf")
        urls = {"memory": f"memory://{uuid.uuid4().hex}", "directory": folder}
        url, options = urls.get(request.param, f"file://{folder}"), {}
    with closing(open_backend(url, storage_options=options)) as backend:
        yield backend


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shelf"


def view_of(backend: Backend, fmt: ObjectFormat = FMT) -> Any:
    return Shelf(backend).view(fmt)


# ------------------------------------------------------------------------------- every storage


def test_a_marker_is_an_empty_object_that_is_written_once(backend: Backend) -> None:
    view = view_of(backend)
    assert view.gave_up([ONE, TWO]) == [False, False]
    assert view.give_up(ONE)
    assert not view.give_up(ONE)
    assert view.gave_up([TWO, ONE, TWO, ONE]) == [False, True, False, True]
    assert backend.stat([f"{FOLDER}/.kvshelf/gave-up/{ONE}"]) == [0]
    assert [row.name for row in backend.list(f"{FOLDER}/.kvshelf/gave-up")] == [
        f"{FOLDER}/.kvshelf/gave-up/{ONE}"
    ]


def test_another_engine_finds_it_and_no_listing_does(backend: Backend) -> None:
    view_of(backend).give_up(ONE)
    other = Shelf(backend)
    assert other.view(FMT).gave_up([ONE]) == [True]
    assert list(other.objects()) == []
    [found] = other.namespaces()
    assert found.namespace == FMT.namespace
    chunks = make_chunks(FMT, 2)
    refs = [ObjectRef(chunk, 0) for chunk in chunks]
    assert other.view(FMT).probe(refs) == [Presence.MISSING] * 2


def test_engines_with_other_names_of_the_model_find_it(backend: Backend) -> None:
    """The folder's slug is no part of the namespace."""
    record = dict(FMT.namespace.record)
    other = ObjectFormat(Namespace(record, "other-name"))
    view_of(backend, other).give_up(ONE)
    assert view_of(backend).gave_up([ONE, TWO]) == [True, False]


def test_it_is_of_one_namespace(backend: Backend) -> None:
    view_of(backend, make_format(native=False, weights="user:other")).give_up(ONE)
    assert view_of(backend).gave_up([ONE]) == [False]


# ------------------------------------------------------------------------------- what clients send


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f" * 31,
        "f" * 33,
        "F" * 32,
        "g" * 32,
        f"{'f' * 32}\n",
        f"../{'f' * 29}",
        "/" + "f" * 31,
        "٠" * 32,
        f"{'f' * 31}\0",
        "." * 32,
    ],
)
def test_nothing_but_32_hex_digits_becomes_part_of_a_name(tmp_path: Path, text: str) -> None:
    counting = FaultyStorage(PosixBackend(tmp_path))
    view = view_of(counting)
    assert not is_attempt(text)
    assert view.gave_up([text]) == [False]
    assert counting.counts["stat_names"] == 0
    with pytest.raises(ObjectNameError, match="32 lowercase hex"):
        view.give_up(text)
    with pytest.raises(ObjectNameError):
        marker_name(text)
    assert not list(tmp_path.iterdir())
    view.give_up(ONE)
    assert view.gave_up([text, ONE]) == [False, True]


def test_many_are_asked_for_in_one_call(tmp_path: Path) -> None:
    counting = FaultyStorage(PosixBackend(tmp_path))
    view = view_of(counting)
    view.give_up(ONE)
    counting.counts.clear()
    attempts = [f"{number:032x}" for number in range(100)]
    assert view.gave_up([*attempts, ONE, ONE]) == [False] * 100 + [True] * 2
    assert (counting.counts["stat"], counting.counts["stat_names"]) == (1, 101)


# ------------------------------------------------------------------------------- trouble


def test_a_read_only_shelf_takes_no_marker_and_shows_those_it_has(root: Path) -> None:
    view_of(PosixBackend(root)).give_up(ONE)
    view = view_of(ReadOnlyBackend(PosixBackend(root)))
    with pytest.raises(ReadOnlyStorageError):
        view.give_up(TWO)
    assert view.gave_up([ONE, TWO]) == [True, False]


def test_a_full_disk_takes_a_marker_although_stores_have_stopped(root: Path) -> None:
    class Full(WrappedBackend):
        def write(self, name: str, buffers: Any, mode: Any = "create") -> Any:
            if any(memoryview(buffer).nbytes for buffer in buffers):
                raise NoSpaceStorageError(errno.ENOSPC, "no space left", name)
            return self.inner.write(name, buffers, mode)

    view_of(PosixBackend(root)).give_up(TWO)
    with closing(GuardedBackend(Full(PosixBackend(root)))) as guard:
        with pytest.raises(NoSpaceStorageError):
            guard.write("an object", [b"payload"])
        with pytest.raises(UnavailableStorageError):
            guard.write("another", [b"payload"])
        assert view_of(guard).give_up(ONE)
        # It says nothing about larger objects.
        with pytest.raises(UnavailableStorageError):
            guard.write("another", [b"payload"])
    assert view_of(PosixBackend(root)).gave_up([ONE]) == [True]


def test_a_storage_that_is_down_has_no_markers(root: Path) -> None:
    faulty = FaultyStorage(PosixBackend(root))
    view = view_of(faulty)
    view.give_up(ONE)
    faulty.add(Fault("*", error=TransientStorageError(5, "down", "x")))
    assert view.gave_up([ONE]) == [False]
    with pytest.raises(TransientStorageError):
        view.give_up(TWO)
    fresh = view_of(faulty)
    assert fresh.gave_up([ONE]) == [False]


@pytest.mark.parametrize("what", ["folder", "link", "fifo"])
def test_what_is_no_file_is_no_marker(root: Path, what: str) -> None:
    view = view_of(PosixBackend(root))
    view.give_up(TWO)
    place = root / FOLDER / ".kvshelf" / "gave-up" / ONE
    if what == "folder":
        place.mkdir()
    elif what == "link":
        place.symlink_to(place.with_name(TWO))
    else:
        os.mkfifo(place)
    assert view.gave_up([ONE, TWO]) == [False, True]


def test_a_tiered_view_writes_and_asks_the_shelf_alone(root: Path) -> None:
    tiered = TieredView(Shelf(PosixBackend(root), Counters()).view(FMT), [])
    assert tiered.give_up(THREE)
    assert tiered.gave_up([THREE, ONE]) == [True, False]
    assert view_of(PosixBackend(root)).gave_up([THREE]) == [True]
