"""Loads from a storage that reads the objects of a chunk in one call."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvshelf.backends import Checked, Reader, Whole
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import BadObjectError
from kvshelf.format.keys import Chunk
from kvshelf.shelf.view import ObjectRef
from kvshelf.transfer import loads
from kvshelf.transfer.load import Failure
from tests.sim.storage import posix
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(
    not PosixBackend("/").reads_whole, reason="the compiled library is not there, or no openat2"
)


class Noting(WrappedBackend):
    """Notes what is read, and holds calls for some object, or all calls, back with a gate."""

    def __init__(self, inner: PosixBackend) -> None:
        super().__init__(inner)
        self.calls: list[list[str]] = []
        self.opened: list[str] = []
        self.gate: threading.Event | None = None
        self.held = ""

    def read_whole(
        self,
        start: str,
        text: bytes,
        wholes: Sequence[Whole],
        buffers: Sequence[memoryview],
        seconds: float = math.inf,
    ) -> Checked | None:
        names = [start + whole.end for whole in wholes]
        self.calls.append(names)
        if self.gate is not None and any(self.held in name for name in names):
            assert self.gate.wait(PATIENCE)
        return self.inner.read_whole(start, text, wholes, buffers, seconds)

    def open(self, name: str) -> Reader:
        self.opened.append(name)
        return self.inner.open(name)


@pytest.fixture
def noting(tmp_path: Path) -> Noting:
    return Noting(posix(tmp_path / "shelf"))


MakeRig: TypeAlias = Callable[..., Rig]


@pytest.fixture
def make(noting: Noting) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        given = {"memory_chunks": 32, "options": {"load_threads": 2}} | options
        rigs.append(Rig(noting, blocks=400, **given))
        return rigs[-1]

    yield make
    if noting.gate is not None:
        noting.gate.set()
    for rig in rigs:
        rig.close()


def stored(rig: Rig, count: int, seed: int = 0) -> list[Chunk]:
    chunks = make_chunks(rig.fmt, count, seed)
    for first in range(0, count, 3):
        rig.put(chunks[first : first + 3])
    return chunks


def names(rig: Rig, chunk: Chunk) -> list[str]:
    view = rig.shelf.view(rig.fmt).on_storage
    return [view.name(ObjectRef(chunk, shard)) for shard in range(rig.fmt.shards)]


@pytest.mark.parametrize("keeps", [False, True])
def test_objects_of_a_chunk_are_read_in_one_call(
    make: MakeRig, noting: Noting, keeps: bool
) -> None:
    chunks = stored(make(), 20)
    rig = make(keeps=keeps)
    rig.comes_back(chunks, 100)
    assert noting.opened == []
    wanted = [names(rig, chunk) for chunk in chunks]
    # All but those of the last chunk, which the threads share.
    assert all(whole in noting.calls for whole in wanted[:-1])
    assert sorted(chain(*noting.calls)) == sorted(chain(*wanted))
    times, objects = rig.counters.times(), 20 * rig.fmt.shards
    assert sum(times["read"][:-1]) == sum(times["verify"][:-1]) == objects
    assert rig.count("loaded_bytes") == 20 * rig.loads.chunk_bytes


def test_objects_of_the_last_chunk_are_spread_over_the_threads_where_they_are_large(
    make: MakeRig, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "_SHARED_BYTES", 0)
    rig = make()
    chunks = stored(rig, 1)
    assert rig.load(chunks, 100)[0].failed_at is None
    assert sorted(noting.calls) == sorted([name] for name in names(rig, chunks[0]))


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("failure", [Failure.BAD, Failure.MISSING])
def test_which_object_of_a_chunk_failed_is_known(
    make: MakeRig, noting: Noting, caplog: pytest.LogCaptureFixture, shard: int, failure: Failure
) -> None:
    rig = make()
    chunks = stored(rig, 20)
    path = rig.path(chunks[3], shard)
    if failure is Failure.BAD:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    load, items = rig.load(chunks, 100)
    assert load.failed_at == 3
    assert load.failures == [(chunks[3], failure)]
    assert all(rig.holds(item) for item in items[:3])
    assert rig.untouched(items[3])
    name = names(rig, chunks[3])[shard]
    # Only it was looked at again, twice if that could help.
    assert noting.opened == [name] * (2 if failure is Failure.BAD else 1)
    assert [record.getMessage() for record in caplog.records if path.name in record.getMessage()]
    assert names(rig, chunks[3])[1 - shard].rpartition("/")[2] not in caplog.text
    # What was bad is set aside.
    assert not path.exists()
    assert rig.path(chunks[3], 1 - shard).exists()
    until(lambda: rig.chunks_in_use == 0)


def test_object_that_is_good_when_read_again_is_loaded(make: MakeRig, noting: Noting) -> None:
    rig = make()
    (chunk,) = stored(rig, 1)
    path = rig.path(chunk, 0)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

    def mend(name: str) -> Reader:
        path.write_bytes(good)
        return noting.inner.open(name)

    noting.open = mend  # type: ignore[method-assign]
    load, (item,) = rig.load([chunk], 100)
    assert load.failed_at is None
    assert rig.holds(item)


def test_one_object_is_read_without_python_too(noting: Noting) -> None:
    with closing(Rig(noting)) as rig:
        (chunk,) = stored(rig, 1)
        view = rig.shelf.view(rig.fmt)
        buffer = memoryview(bytearray(rig.fmt.object_size(1)))
        view.load(ObjectRef(chunk, 1), buffer)
        assert buffer == rig.path(chunk, 1).read_bytes()
        assert noting.opened == []
        rig.path(chunk, 1).write_bytes(bytes(buffer[:-1]) + b"x")
        with pytest.raises(BadObjectError, match="payload damaged"):
            view.load(ObjectRef(chunk, 1), buffer)
        with pytest.raises(ValueError, match="writable"):
            view.load(ObjectRef(chunk, 0), buffer.toreadonly())
