"""Large objects in parts: the same bytes, the same verification, and only where it pays."""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.samples import LARGE, fill, make_chunks, make_format
from kvshelf.backends import s3
from kvshelf.backends.base import delete_one
from kvshelf.backends.breaker import LEAST_FAILURES
from kvshelf.backends.s3 import Rate, open_s3
from kvshelf.backends.s3_client import Span
from kvshelf.errors import BadObjectError, ObjectMissingError, TransientStorageError
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from tests.support.backend_suite import read_into
from tests.support.delaying_proxy import DelayingProxy
from tests.support.servers import BUCKET, S3Server, command, moto_s3, rclone_s3

pytestmark = pytest.mark.real

if importlib.util.find_spec("obstore") is None:
    pytest.skip("obstore is not installed: pip install '.[s3]'", allow_module_level=True)

MIB = 1 << 20
FMT = make_format(LARGE, 8)
[CHUNK] = make_chunks(FMT, 1)
SIZE = FMT.object_size(0)
PARTS = -(-SIZE // MIB)


class Far:
    """A shelf on a real server, behind a proxy that counts."""

    def __init__(self, server: S3Server, proxy: DelayingProxy, prefix: str) -> None:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        self.options = {**server.options(), "endpoint_url": endpoint}
        self.server = server
        self.proxy = proxy
        self.backend = open_s3(f"s3://{BUCKET}/{prefix}", self.options)
        self.shelf = Shelf(self.backend)
        self.image = memoryview(bytearray(SIZE))
        fill(self.image)
        FMT.seal(self.image, CHUNK, 0)
        self.shelf.view(FMT).publish(ObjectRef(CHUNK, 0), self.image)
        self.name = self.shelf.view(FMT).name(ObjectRef(CHUNK, 0))

    def load(self) -> bytes:
        found = memoryview(bytearray(SIZE))
        failed = self.shelf.view(FMT).load_all(CHUNK, [0], [found])
        if failed is not None:
            raise failed.error
        return bytes(found)

    def gets(self, work: Callable[[], Any]) -> int:
        before = self.proxy.requests().get("GET", 0)
        work()
        return self.proxy.requests().get("GET", 0) - before

    def put(self, data: bytes) -> None:
        key = f"{self.backend.url.rpartition('/')[2]}/{self.name}"
        self.server.client().put_object(Bucket=BUCKET, Key=key, Body=data)

    def is_whole_again(self) -> bool:
        """Whether a load makes all requests that it may: nothing of an earlier one is under way."""
        self.put(bytes(self.image))
        return not knows_ranges(self) or self.gets(self.load) == PARTS


@pytest.fixture(scope="module", params=[pytest.param("moto", marks=pytest.mark.slow), "rclone"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    program = {"moto": "moto_server", "rclone": "rclone"}[request.param]
    if command(program) is None:
        pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("s3")
    with moto_s3() if request.param == "moto" else rclone_s3(folder) as server:
        yield server


@pytest.fixture
def far(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[Far]:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(s3, "_LARGE_BYTES", 2 * MIB)
    monkeypatch.setattr(s3, "_PART_BYTES", MIB)
    monkeypatch.setattr(s3, "_BODIES_AT_ONCE", PARTS)
    monkeypatch.setattr(s3, "_SLOW_RATE", math.inf)
    host, _, port = server.endpoint.rpartition("/")[2].partition(":")
    with ExitStack() as stack:
        proxy = stack.enter_context(DelayingProxy(host, int(port), 0.0))
        far = Far(server, proxy, tmp_path.name)
        stack.callback(far.shelf.close)
        # How fast the connection is, is known from now on.
        assert far.gets(far.load) == 1
        yield far


def knows_ranges(far: Far) -> bool:
    """Whether the server does: that of rclone answers with the whole object."""
    return far.server.folder is None


def test_parts_give_the_same_bytes_or_the_server_is_asked_for_all_at_once(far: Far) -> None:
    def load() -> None:
        assert far.load() == far.image

    asked = far.gets(load)
    if knows_ranges(far):
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

    with closing(Shelf(open_s3(far.backend.url, far.options))) as other:
        other.backend.write("a/small", [b"x" * 1000])
        read_into(other.backend, "a/small", memoryview(bytearray(1000)))
        assert other.view(FMT).probe([(CHUNK, 0)]) == [Presence.PRESENT]
        assert far.gets(read) == 1
        if knows_ranges(far):
            assert far.gets(read) == PARTS


def test_a_connection_that_is_slow_is_noticed() -> None:
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


@pytest.mark.parametrize("place", [100, FMT.data_offset + 5, 2 * MIB + 17, SIZE - 1])
def test_damage_in_any_part_is_found(far: Far, place: int) -> None:
    data = bytearray(far.image)
    data[place] ^= 1
    far.put(bytes(data))
    with pytest.raises(BadObjectError):
        far.load()
    assert far.is_whole_again()


@pytest.mark.parametrize("size", [0, 1000, MIB + 5, SIZE - 1, SIZE + 1])
def test_an_object_of_another_size_is_found(far: Far, size: int) -> None:
    far.put(bytes(far.image)[:size].ljust(size, b"x"))
    with pytest.raises(BadObjectError):
        far.load()
    assert far.is_whole_again()


def test_an_object_that_is_gone_is_missing(far: Far) -> None:
    delete_one(far.backend, far.name)
    with pytest.raises(ObjectMissingError):
        far.load()
    assert far.is_whole_again()


@pytest.mark.parametrize("error", [ValueError("7 bytes came"), ConnectionResetError("reset")])
def test_a_range_that_does_not_come_is_read_again_with_all_of_the_object(
    far: Far, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """But where nothing comes at all, that is an error of the storage."""
    fill = far.backend.client.fill

    def short(spans: Sequence[Span], seconds: float) -> Sequence[float | BaseException]:
        return [*fill(spans, seconds)[:-1], error]

    with monkeypatch.context() as patch:
        patch.setattr(far.backend.client, "fill", short)
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
    fill = far.backend.client.fill

    def note(spans: Sequence[Span], seconds: float) -> Sequence[float | BaseException]:
        asked.append({span.name for span in spans})
        return fill(spans, seconds)

    monkeypatch.setattr(far.backend.client, "fill", note)
    assert view.load_all(CHUNK, shards, found) is None
    assert [len(names) for names in asked] == [FMT.shards]


@pytest.fixture
def no_loop(far: Far, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The limit of threads is reached just when the backend wants one of its own."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvshelf-s3":
            raise RuntimeError("can't start new thread")
        start(thread)

    far.backend.close()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield patch


def test_probes_without_a_thread_for_them_fail_each_and_give_the_storage_a_rest(
    far: Far, no_loop: pytest.MonkeyPatch
) -> None:
    for _ in range(LEAST_FAILURES):
        assert far.shelf.view(FMT).probe([(CHUNK, 0), (CHUNK, 1)]) == [Presence.ERROR] * 2
    assert not far.shelf.available
    no_loop.undo()
    assert far.backend.stat([far.name, "a/gone"]) == [SIZE, None]


def test_parts_go_on_after_there_was_no_thread_for_them(
    far: Far, no_loop: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        with pytest.raises(TransientStorageError, match="no thread could be started"):
            far.load()
    no_loop.undo()
    assert far.gets(far.load) + 1 >= PARTS
    assert far.is_whole_again()


def test_small_objects_are_never_cut(far: Far) -> None:
    far.backend.write("a/small", [b"x" * 1000])
    with far.backend.open("a/small") as reader:
        assert reader.read_into(memoryview(bytearray(1000)), 0) == 1000
