"""Markers of broken promises, over every kind of storage: written once, found by who asks."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Backend, open_backend
from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import ObjectNameError, TransientStorageError
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf
from tests.sim.storage import Fault, FaultyStorage
from tests.support.formats import make_format
from tests.support.servers import BUCKET, S3Server, command, moto_s3

FMT = make_format(native=False)
FOLDER = FMT.namespace.folder
ONE, TWO, THREE = ("0123456789abcdef" * 2, "f" * 32, "0" * 32)


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    if command("moto_server") is None or importlib.util.find_spec("obstore") is None:
        pytest.skip("moto or obstore is not installed: pip install '.[s3]' 'moto[server]'")
    with moto_s3() as server:
        yield server


@pytest.fixture(
    params=[
        "directory",
        "directory by fsspec",
        "memory",
        pytest.param("s3", marks=pytest.mark.real),
    ]
)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "s3":
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        options = request.getfixturevalue("moto").options()
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


def test_marker_is_an_empty_object_that_is_written_once(backend: Backend) -> None:
    view = view_of(backend)
    assert view.gave_up([ONE, TWO]) == [False, False]
    assert view.give_up(ONE)
    assert not view.give_up(ONE)
    # The folder's slug is no part of the namespace.
    other = ObjectFormat(Namespace(dict(FMT.namespace.record), "other-name"))
    for asking in (view, view_of(backend, other)):
        assert asking.gave_up([TWO, ONE, TWO, ONE]) == [False, True, False, True]
    names = [f"{FOLDER}/.kvshelf/gave-up/{ONE}", f"{FOLDER}/namespace.json"]
    assert backend.stat(names) == [0, len(FMT.namespace.encoded)]
    assert [row.name for row in backend.list(f"{FOLDER}/.kvshelf/gave-up")] == [
        f"{FOLDER}/.kvshelf/gave-up/{ONE}"
    ]


@pytest.mark.parametrize(
    "attempt", ["", ONE[1:], ONE + "0", ONE.upper(), f"{ONE}/../x", f"{ONE}\n", "../" * 11]
)
def test_what_is_no_id_of_an_attempt_becomes_no_name(root: Path, attempt: str) -> None:
    """Any client may send it."""
    faulty = FaultyStorage(PosixBackend(root))
    view = view_of(faulty)
    assert view.gave_up([attempt]) == [False] and not faulty.counts["stat"]
    with pytest.raises(ObjectNameError, match="not the id of an attempt"):
        view.give_up(attempt)
    assert not root.exists() or not list(root.iterdir())


# ------------------------------------------------------------------------------- trouble


def test_storage_that_is_down_has_no_markers(root: Path) -> None:
    faulty = FaultyStorage(PosixBackend(root))
    view = view_of(faulty)
    view.give_up(ONE)
    faulty.add(Fault("*", error=TransientStorageError(5, "down", "x")))
    assert view.gave_up([ONE]) == [False]
    with pytest.raises(TransientStorageError):
        view.give_up(TWO)
    fresh = view_of(faulty)
    assert fresh.gave_up([ONE]) == [False]
