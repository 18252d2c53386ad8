"""Large objects in parts: the same bytes, the same verification, and only where it pays."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from benchmarks.samples import LARGE, fill, make_chunks, make_format
from kvshelf.backends import s3
from kvshelf.backends.base import Whole, delete_one
from kvshelf.backends.breaker import LEAST_FAILURES
from kvshelf.backends.s3 import Rate, S3Backend, Span
from kvshelf.errors import (
    BadObjectError,
    ObjectMissingError,
    PermanentStorageError,
    TransientStorageError,
)
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.testing.backends import read_into
from tests.sim.s3 import BUCKET, ScriptedS3, refusal
from tests.support.threads import none_can_be_started

pytestmark = pytest.mark.real

MIB = 1 << 20
FMT = make_format(LARGE, 8)
[CHUNK] = make_chunks(FMT, 1)
SIZE = FMT.object_size(0)
PARTS = -(-SIZE // MIB)


class Far:
    """A shelf in a bucket with one object."""

    def __init__(self, store: ScriptedS3) -> None:
        self.store = store
        self.backend: S3Backend = store.open()
        self.shelf = Shelf(self.backend)
        self.image = memoryview(bytearray(SIZE))
        fill(self.image)
        FMT.seal(self.image, CHUNK, 0)
        self.name = self.shelf.view(FMT).name(ObjectRef(CHUNK, 0))
        self.put(bytes(self.image))

    def load(self) -> bytes:
        found = memoryview(bytearray(SIZE))
        failed = self.shelf.view(FMT).load_all(CHUNK, [0], [found])
        if failed is not None:
            raise failed.error
        return bytes(found)

    def gets(self, work: Callable[[], Any]) -> int:
        return self.store.asked(work).count("read")

    def put(self, data: bytes) -> None:
        self.store.objects[f"{BUCKET}/kv/{self.name}"] = data, 1e9

    def is_whole_again(self) -> bool:
        """Whether a load makes all requests that it may: nothing of an earlier one is under way."""
        self.put(bytes(self.image))
        return not self.store.knows_ranges or self.gets(self.load) == PARTS


@pytest.fixture(params=[True, False], ids=["ranges", "none"])
def far(
    store: ScriptedS3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Far]:
    """How fast the connection is, is known from the first load on."""
    store.knows_ranges = request.param
    monkeypatch.setattr(s3, "_LARGE_BYTES", 2 * MIB)
    monkeypatch.setattr(s3, "_PART_BYTES", MIB)
    monkeypatch.setattr(s3, "_BODIES_AT_ONCE", PARTS)
    monkeypatch.setattr(s3, "_SLOW_RATE", math.inf)
    far = Far(store)
    with closing(far.shelf):
        assert far.gets(far.load) == 1
        yield far


def test_parts_give_the_same_bytes_or_the_server_is_asked_for_all_at_once(far: Far) -> None:
    def load() -> None:
        assert far.load() == far.image

    asked = far.gets(load)
    if far.store.knows_ranges:
        assert asked == PARTS
        assert far.gets(load) == PARTS
    else:
        # Once it is tried, then never again.
        assert asked + 1 >= PARTS
        assert far.gets(load) == 1


def test_parts_are_for_slow_connections_and_idle_ones(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(s3, "_SLOW_RATE", 1.0)
        assert far.gets(far.load) == 1
    # Where as many objects are under way as help, none is cut.
    far.backend._note_bodies(PARTS)
    assert far.gets(far.load) == 1
    far.backend._note_bodies(-PARTS)
    assert far.is_whole_again()


def test_small_objects_say_nothing_of_a_connection(far: Far) -> None:
    def read() -> None:
        found = memoryview(bytearray(SIZE))
        assert other.view(FMT).load_all(CHUNK, [0], [found]) is None

    with closing(Shelf(far.store.open())) as other:
        other.backend.write("a/small", [b"x" * 1000])
        read_into(other.backend, "a/small", memoryview(bytearray(1000)))
        assert other.view(FMT).probe([(CHUNK, 0)]) == [Presence.PRESENT]
        assert far.gets(read) == 1
        if far.store.knows_ranges:
            assert far.gets(read) == PARTS


def test_connection_that_is_slow_is_noticed() -> None:
    rate = Rate()
    assert not rate.is_slow
    for _ in range(20):
        rate.note(8 * MIB, 0.2)
    assert 30e6 < rate.bytes_per_second < 60e6
    assert rate.is_slow
    rate.note(1000, 1.0)
    assert rate.bytes_per_second > 30e6
    # One that was buffered changes little, many do.
    rate.note(8 * MIB, 1e-3)
    assert rate.is_slow
    for _ in range(20):
        rate.note(8 * MIB, 1e-3)
    assert not rate.is_slow


@pytest.mark.parametrize(
    ("place", "size"),
    [(place, SIZE) for place in (100, FMT.data_offset + 5, 2 * MIB + 17, SIZE - 1)]
    + [(None, size) for size in (0, 1000, MIB + 5, SIZE - 1, SIZE + 1)],
)
def test_damage_in_any_part_is_found(far: Far, place: int | None, size: int) -> None:
    data = bytearray(far.image)[:size].ljust(size, b"x")
    if place is not None:
        data[place] ^= 1
    far.put(bytes(data))
    with pytest.raises(BadObjectError):
        far.load()
    assert far.is_whole_again()


def test_object_that_is_gone_is_missing(far: Far) -> None:
    delete_one(far.backend, far.name)
    with pytest.raises(ObjectMissingError):
        far.load()
    assert far.is_whole_again()


@pytest.mark.parametrize("error", [ValueError("7 bytes came"), ConnectionResetError("reset")])
def test_range_that_does_not_come_is_read_again_with_all_of_the_object(
    far: Far, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """But where nothing comes at all, that is an error of the storage."""
    fill = far.backend._fill

    def short(spans: Sequence[Span], seconds: float) -> Sequence[float | BaseException]:
        return [*fill(spans, seconds)[:-1], error]

    with monkeypatch.context() as patch:
        patch.setattr(far.backend, "_fill", short)
        if isinstance(error, ValueError):
            assert far.load() == far.image
        else:
            with pytest.raises(TransientStorageError):
                far.load()
    assert far.is_whole_again()


def test_all_objects_of_a_chunk_are_asked_for_at_once(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, shards = far.shelf.view(FMT), range(FMT.shards)
    for shard in shards:
        image = memoryview(bytearray(FMT.object_size(shard)))
        FMT.seal(image, CHUNK, shard)
        view.publish(ObjectRef(CHUNK, shard), image)
    found = [memoryview(bytearray(FMT.object_size(shard))) for shard in shards]
    asked: list[set[str]] = []
    fill = far.backend._fill

    def note(spans: Sequence[Span], seconds: float) -> Sequence[float | BaseException]:
        asked.append({span.name for span in spans})
        return fill(spans, seconds)

    monkeypatch.setattr(far.backend, "_fill", note)
    assert view.load_all(CHUNK, shards, found) is None
    assert [len(names) for names in asked] == [FMT.shards]


@pytest.mark.parametrize("status", [403, 500])
def test_object_that_fails_leaves_the_others_of_its_chunk(
    store: ScriptedS3, bucket: Any, status: int
) -> None:
    """Where all fail, the storage does."""
    part = bytes(300)
    image = xxh3_128_hexdigest(part).encode().ljust(64) + part
    store.objects.update({f"{BUCKET}/kv/{name}": (image, 1e9) for name in "ab"})
    wholes = [Whole(name, b"", b"", b"", array("q", (64, len(image)))) for name in "ab"]
    buffers = [memoryview(bytearray(len(image))) for _ in wholes]
    failing = {f"{BUCKET}/kv/a"}
    store.script = lambda request: (
        refusal(status, "AccessDenied" if status == 403 else "InternalError")
        if request.path in failing
        else None
    )
    checked = bucket.read_whole("", b"", wholes, buffers)
    assert checked is not None and checked.done == [False, True]
    failing.add(f"{BUCKET}/kv/b")
    with pytest.raises(PermanentStorageError if status == 403 else TransientStorageError):
        bucket.read_whole("", b"", wholes, buffers)


def test_client_without_a_thread_for_its_requests_fails_each_and_goes_on_later(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of threads is reached just when the backend wants one of its own."""
    far.backend.close()
    with none_can_be_started(monkeypatch, "kvshelf-s3"):
        with pytest.raises(TransientStorageError, match="no thread could be started"):
            far.load()
        for _ in range(LEAST_FAILURES - 1):
            assert far.shelf.view(FMT).probe([(CHUNK, 0), (CHUNK, 1)]) == [Presence.ERROR] * 2
    assert far.backend.stat([far.name, "a/gone"]) == [SIZE, None]
    with closing(Shelf(far.backend)) as shelf:
        found = memoryview(bytearray(SIZE))
        assert shelf.view(FMT).load_all(CHUNK, [0], [found]) is None
        assert found == far.image
