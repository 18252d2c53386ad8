"""The storage of a node server as its client calls it, and the memory through which it stores."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvshelf.backends import WriteResult
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import ObjectMissingError, TransientStorageError, UnavailableStorageError
from kvshelf.server import messages
from kvshelf.server.backend import ServedBackend
from kvshelf.server.calls import Calls
from kvshelf.server.segment import Segment
from tests.adapters.standin import ScriptedChannel
from tests.server.desk import name_of
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.waiting import until

FMT = make_format()
CHUNKS = make_chunks(FMT, 8)
#: Bytes of an object in a segment.
PART = -(-FMT.object_size(0) // 4096) * 4096
NAMES = [name_of(FMT, chunk) for chunk in CHUNKS]


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(posix(tmp_path))


@pytest.fixture
def channel(storage: FaultyStorage) -> ScriptedChannel:
    """A channel whose server calls `storage`, and through which two objects can be stored."""
    channel = ScriptedChannel(FMT.chunk_size, segment_bytes=2 * PART)
    channel.calls = Calls(GuardedBackend(storage))
    channel.register(FMT.namespace.encoded)
    return channel


@pytest.fixture
def backend(channel: ScriptedChannel) -> ServedBackend:
    return ServedBackend(channel)  # type: ignore[arg-type]


def test_object_of_several_messages_is_read_whole_unless_its_size_changes_meanwhile(
    backend: ServedBackend, storage: FaultyStorage
) -> None:
    content = bytes(range(256)) * (3 * messages.MAX_INLINE // 256) + b"end"
    storage.write("x", [content])
    buffer = bytearray(len(content) + 10)
    with backend.open("x") as reader:
        assert reader.read_into(memoryview(buffer), 0) == reader.size == len(content)
        assert buffer == content + bytes(10)
        storage.write("x", [content + b"!"], "replace")
        with pytest.raises(TransientStorageError, match="when it was opened"):
            reader.read_into(memoryview(buffer), messages.MAX_INLINE)


def test_listing_of_several_pages_has_each_name_once(
    backend: ServedBackend, tmp_path: Path
) -> None:
    (tmp_path / "many").mkdir()
    for number in range(2100):
        (tmp_path / "many" / str(number)).touch()
    names = [entry.name for entry in backend.list("many")]
    assert sorted(names) == sorted(f"many/{number}" for number in range(2100))


def test_listings_beyond_a_clients_share_are_ended_the_oldest_first(
    backend: ServedBackend, tmp_path: Path
) -> None:
    for number in range(1001):
        (tmp_path / str(number)).touch()
    listings = [backend.list() for _ in range(18)]
    for listing in listings:
        next(listing)
    assert len(list(listings[-1])) == 1000
    with pytest.raises(OSError, match="begin another one"):
        list(listings[0])


def test_entries_are_those_of_the_storage(backend: ServedBackend) -> None:
    assert backend.write("a/x", [b"12"]) is WriteResult.CREATED
    assert backend.write("a/x", [b"12"]) is WriteResult.EXISTED
    info = backend.info("a/x")
    assert info is not None and info.size == 2
    assert backend.info("a/y") is None
    assert list(backend.folders("")) == ["a"]
    assert backend.space() is not None
    with pytest.raises(ObjectMissingError):
        backend.open("a/y")


def test_probe_that_fails_is_no_miss(backend: ServedBackend, storage: FaultyStorage) -> None:
    storage.write("a", [b"1"])
    storage.add(Fault("stat", "b", error=lambda: TransientStorageError("broken")))
    found, unknown, missing = backend.stat(["a", "b", "c"])
    assert (found, missing) == (1, None)
    assert isinstance(unknown, TransientStorageError)


def test_probe_of_a_lost_server_fails_for_all_names(
    backend: ServedBackend, channel: ScriptedChannel
) -> None:
    channel.lose()
    assert [type(answer) for answer in backend.stat(["a", "b"])] == [UnavailableStorageError] * 2


def test_object_in_pieces_is_stored_as_one(
    backend: ServedBackend, channel: ScriptedChannel
) -> None:
    image = sealed(FMT, CHUNKS[0])
    backend.write(NAMES[0], [image[:100], b"", image[100:700], image[700:]])
    assert channel.objects[NAMES[0]] == image


def test_stores_wait_for_a_part_of_the_segment_and_fail_after_their_deadline(
    backend: ServedBackend, channel: ScriptedChannel
) -> None:
    channel.holding = ("Store",)
    threads = [
        threading.Thread(target=backend.write, args=(name, [sealed(FMT, chunk)]))
        for name, chunk in zip(NAMES, CHUNKS, strict=True)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(channel.held) == 2)
    while any(thread.is_alive() for thread in threads):
        channel.answer()
        threads[-1].join(0.1)
    assert set(channel.objects) == set(NAMES)
    # All parts are free again.
    part = channel.segment.reserve(channel.segment.nbytes)
    assert part is not None
    deadlines = backend.properties.deadlines
    for nbytes in (PART, 2 * PART + 1):
        begin = time.monotonic()
        with pytest.raises(TransientStorageError, match="through which objects are stored"):
            backend.write(NAMES[0], [bytes(nbytes)])
        waited = time.monotonic() - begin
        # What does not fit into all of it waits for nothing.
        assert waited == pytest.approx(deadlines.to_write(nbytes) if nbytes == PART else 0, abs=0.1)


def test_regions_of_a_segment_leave_memory_for_other_objects() -> None:
    segment = Segment(8192, regions=16384)
    assert segment.nbytes == 24576
    taken = [segment.take_region(8192) for _ in range(3)]
    assert [part is None for part in taken] == [False, False, True]
    part = segment.reserve(8192)
    assert part is not None
    assert taken[1] is not None
    assert segment.offset_of(taken[1].view[100:200]) == 8292
    another = Segment(4096)
    other = another.reserve(4096)
    assert other is not None
    assert segment.offset_of(other.view) is None
    assert another.offset_of(part.view) is None
    segment.close()
    assert segment.take_region(4096) is None
    # Parts can be used after the end, and the memory is freed with the last one.
    assert segment.offset_of(taken[1].view) == 8192
    part.view[:] = bytes(8192)
    assert segment.fd is None
