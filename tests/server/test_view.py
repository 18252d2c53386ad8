"""A shelf behind a node server, as its client sees it: loads in place, stores, lost servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.backends import WriteResult
from kvshelf.backends.breaker import BreakerState
from kvshelf.backends.posix import PosixBackend
from kvshelf.capacity.uses import Uses
from kvshelf.errors import (
    BadObjectError,
    ObjectMissingError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    UnavailableStorageError,
)
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory import pages
from kvshelf.memory.chunk_memory import ChunkMemory
from kvshelf.metrics import Counters
from kvshelf.server import view as view_module
from kvshelf.server.connection import NodeClient
from kvshelf.server.view import NodeShelf, open_served
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.view import FailedRead, ObjectRef, Presence
from tests.server.desk import name_of, put
from tests.server.node import LocalServer
from tests.sim.device import SimulatedStreams
from tests.sim.storage import FaultyStorage
from tests.support.fake_cudart import fake_cudart
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real


class Client:
    """A shelf behind a server, and memory from which objects are stored."""

    def __init__(self, url: str, **options: Any) -> None:
        self.shelf: NodeShelf = open_served(NodeClient(url), **options)
        self.memory = ChunkMemory(4 << 20, share=self.shelf.share)

    def publish(
        self, fmt: ObjectFormat, ref: ObjectRef, data: bytes, **options: Any
    ) -> WriteResult:
        """Store an object from the shared memory."""
        part = self.memory.view[: len(data)]
        part[:] = data
        return self.shelf.view(fmt).publish(ref, part, **options)

    def close(self) -> None:
        self.shelf.close()
        self.memory.close()


@dataclass
class Setting:
    """A server on a directory, and clients of it."""

    folder: Path
    stack: ExitStack
    memory_bytes: int = 1 << 20
    fmt: ObjectFormat = field(default_factory=make_format)

    def __post_init__(self) -> None:
        self.root = self.folder / "shelf"
        self.chunks = make_chunks(self.fmt, 8)
        self.start()

    def start(self) -> None:
        """Start a server, which knows nothing of earlier ones."""
        self.storage = FaultyStorage(PosixBackend(self.root))
        self.server = LocalServer(self.folder / "node", self.storage, self.memory_bytes)
        self.stack.callback(self.server.close)

    def connect(self, **options: Any) -> Client:
        return self.stack.enter_context(closing(Client(self.server.url, **options)))

    def ref(self, index: int, shard: int = 0) -> ObjectRef:
        return ObjectRef(self.chunks[index], shard)

    def image(self, index: int, shard: int = 0) -> bytes:
        return sealed(self.fmt, self.chunks[index], shard)

    def publish(self, client: Client, index: int, **options: Any) -> WriteResult:
        return client.publish(self.fmt, self.ref(index), self.image(index), **options)

    def place(self, *indices: int) -> None:
        """Publish past the server."""
        for index in indices:
            for shard in range(self.fmt.shards):
                put(self.root, self.fmt, self.chunks[index], shard)

    def path(self, index: int) -> Path:
        return self.root / name_of(self.fmt, self.chunks[index])

    def borrowed(self, client: Client, index: int, *shards: int) -> dict[int, bytes]:
        """Borrow objects of a chunk and give them back."""
        (loans,) = client.shelf.view(self.fmt).pin_all([self.chunks[index]], shards or (0,))
        data = {shard: bytes(loan.view) for shard, loan in loans.items()}
        for loan in loans.values():
            loan.release()
        return data

    def loaded(self, client: Client, index: int) -> bytearray:
        """Load an object to memory of the client."""
        data = bytearray(self.fmt.object_size(0))
        client.shelf.view(self.fmt).load(self.ref(index), memoryview(data))
        return data

    def rig(self, **options: Any) -> Rig:
        """A transfer whose shelf is behind the server."""
        shelf = self.stack.enter_context(closing(open_served(NodeClient(self.server.url))))
        rig = Rig(
            PosixBackend(self.folder / "unused"),
            fmt=self.fmt,
            in_front=lambda _: shelf,
            share=shelf.share,
            memory_chunks=64,
            **options,
        )
        self.stack.callback(rig.close)
        return rig


@pytest.fixture
def make_setting(tmp_path: Path) -> Iterator[Callable[..., Setting]]:
    with ExitStack() as stack:
        yield partial(Setting, tmp_path, stack)


@pytest.fixture
def setting(make_setting: Callable[..., Setting]) -> Setting:
    return make_setting()


# ------------------------------------------------------------------------------ the server works


def test_object_that_one_client_stores_is_lent_to_another_without_a_read(setting: Setting) -> None:
    one, other = setting.connect(), setting.connect()
    assert setting.publish(one, 0) is WriteResult.CREATED
    assert setting.publish(one, 0) is WriteResult.EXISTED
    assert setting.path(0).read_bytes() == setting.image(0)
    assert setting.borrowed(other, 0) == {0: setting.image(0)}
    assert setting.server.stat("read_objects") == 0
    until(lambda: setting.server.stat("lent_bytes") == 0)
    # The description of the namespace is on the shelf for everybody.
    assert (setting.path(0).parents[2] / "namespace.json").exists()


def test_objects_of_a_chunk_are_lent_together_or_not_at_all(setting: Setting) -> None:
    setting.place(0)
    client = setting.connect()
    assert setting.borrowed(client, 0, 0, 1) == {n: setting.image(0, n) for n in (0, 1)}
    for number in range(2):
        (setting.root / name_of(setting.fmt, setting.chunks[1], number)).unlink(missing_ok=True)
    put(setting.root, setting.fmt, setting.chunks[1], 0)
    with pytest.raises(ObjectMissingError):
        setting.borrowed(client, 1, 0, 1)
    until(lambda: setting.server.stat("lent_bytes") == 0)


def test_chunks_that_are_wanted_soon_are_lent_as_far_as_they_are_in_memory(
    setting: Setting,
) -> None:
    setting.place(0, 1, 2)
    client = setting.connect()
    view = client.shelf.view(setting.fmt)
    first = view.pin_all(setting.chunks[:4], (0, 1))
    assert [sorted(loans) for loans in first] == [[0, 1], [], [], []]
    # The server has begun to read what it has.
    until(lambda: setting.server.stat("read_objects") == 6)
    second = view.pin_all(setting.chunks[:4], (0, 1))
    assert [sorted(loans) for loans in second] == [[0, 1], [0, 1], [0, 1], []]
    for loans in (*first, *second):
        for loan in loans.values():
            loan.release()
    until(lambda: setting.server.stat("lent_bytes") == 0)


def test_object_of_another_parent_is_not_taken_for_this_one(setting: Setting) -> None:
    setting.place(0)
    client = setting.connect()
    chunk = setting.chunks[0]
    forged = Chunk(chunk.key, bytes(32), chunk.index, chunk.tokens)
    view = client.shelf.view(setting.fmt)
    with pytest.raises(BadObjectError):
        view.pin_all([forged], (0,))
    assert isinstance(view.load_all(forged, (0,), [memoryview(bytearray(9))]), FailedRead)
    until(lambda: setting.server.stat("lent_bytes") == 0)
    assert setting.path(0).exists()


def test_stores_ask_the_storage_and_lookups_the_memory_as_well(setting: Setting) -> None:
    client = setting.connect()
    setting.publish(client, 0)
    setting.path(0).unlink()
    view = client.shelf.view(setting.fmt)
    refs = [setting.ref(0), setting.ref(1)]
    assert view.find(refs) == [Presence.PRESENT, Presence.MISSING]
    assert view.probe(refs) == [Presence.MISSING, Presence.MISSING]
    assert setting.publish(client, 0) is WriteResult.CREATED
    assert setting.path(0).read_bytes() == setting.image(0)


def test_object_for_which_there_is_no_room_comes_by_the_stream(
    make_setting: Callable[..., Setting],
) -> None:
    fmt = make_format(chunk_size=2048)
    setting = make_setting(memory_bytes=64 << 10, fmt=fmt)
    setting.place(0)
    client = setting.connect()
    assert setting.borrowed(client, 0) == {}
    assert fmt.object_size(0) > 64 << 10
    assert setting.loaded(client, 0) == setting.image(0)
    assert setting.publish(client, 1) is WriteResult.CREATED


def test_memory_that_a_device_cannot_read_is_copied_from(setting: Setting) -> None:
    setting.place(0, 1)
    client = setting.connect(in_place=False)
    assert not client.shelf.view(setting.fmt).pins
    for _ in range(2):
        assert setting.loaded(client, 0) == setting.image(0)
    # The second time it was in the server's memory.
    assert setting.server.stat("read_objects") == 1
    assert setting.server.stat("streamed_objects") == 0
    until(lambda: setting.server.stat("lent_bytes") == 0)
    with pytest.raises(ObjectMissingError):
        setting.loaded(client, 2)


def test_gpu_reads_from_memory_that_is_page_locked_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "LOCKED_AT_ONCE", 2 << 20)
    with fake_cudart() as runtime, ExitStack() as stack:
        fmt = make_format(chunk_size=2048, shards=1)
        setting = Setting(tmp_path, stack, memory_bytes=8 << 20, fmt=fmt)
        setting.chunks = make_chunks(fmt, 6 * (1 << 20) // fmt.object_size(0))
        client = setting.connect(in_place=False, device=torch.device("cuda", 0))
        view = client.shelf.view(fmt)
        until(lambda: view.pins)
        loans = []
        for index in range(len(setting.chunks)):
            setting.publish(client, index)
            loans += view.pin_all([setting.chunks[index]], (0,))[0].values()
        assert all(runtime.holds(loan.view) for loan in loans)
        # A client has no more than a quarter of the memory.
        assert len(loans) >= (2 << 20) // fmt.object_size(0) - 1
        while loans:
            loans.pop().release()


def test_bad_object_is_set_aside_by_the_server_and_stored_again(setting: Setting) -> None:
    setting.place(0)
    path = setting.path(0)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    client = setting.connect()
    with pytest.raises(BadObjectError):
        setting.borrowed(client, 0)
    assert not path.exists()
    assert len(list(path.parent.glob(".*.tmp"))) == 1
    assert setting.publish(client, 0, suspect=True) is WriteResult.CREATED
    assert setting.borrowed(client, 0) == {0: good}


def test_server_takes_no_bad_object_and_none_outside_of_shared_memory(setting: Setting) -> None:
    client = setting.connect()
    bad = bytearray(setting.image(0))
    bad[-1] ^= 1
    with pytest.raises(BadObjectError):
        client.publish(setting.fmt, setting.ref(0), bytes(bad))
    view = client.shelf.view(setting.fmt)
    with pytest.raises(UnavailableStorageError, match="does not read this memory"):
        view.publish(setting.ref(0), setting.image(0))
    with pytest.raises(ValueError, match="expected"):
        view.publish(setting.ref(0), b"x")
    assert not setting.path(0).exists()
    assert view.find([setting.ref(0)]) == [Presence.MISSING]


def test_client_that_only_reads_stores_nothing(setting: Setting) -> None:
    setting.place(0)
    client = setting.connect(read_only=True)
    assert client.shelf.read_only and client.shelf.share is None
    assert setting.borrowed(client, 0) == {0: setting.image(0)}
    with pytest.raises(ReadOnlyStorageError):
        setting.publish(client, 1)
    assert client.shelf.view(setting.fmt).find([setting.ref(0)]) == [Presence.PRESENT]


def test_deletion_reaches_storage_and_memory(setting: Setting) -> None:
    client = setting.connect()
    setting.publish(client, 0)
    view = client.shelf.view(setting.fmt)
    assert view.delete(setting.ref(0))
    assert not view.delete(setting.ref(0))
    assert view.find([setting.ref(0)]) == [Presence.MISSING]


def test_markers_of_hand_overs_are_written_and_found(setting: Setting) -> None:
    view = setting.connect().shelf.view(setting.fmt)
    attempt = "ab" * 16
    assert view.gave_up([attempt]) == [False]
    assert view.give_up(attempt)
    assert not view.give_up(attempt)
    assert view.gave_up([attempt, "no id"]) == [True, False]


def test_clients_list_and_rename_nothing(setting: Setting) -> None:
    backend = setting.connect().shelf.backend
    assert list(backend.folders()) == []
    assert backend.space() is None
    for refused in (backend.info, backend.set_aside, lambda name: list(backend.list(name))):
        with pytest.raises(PermanentStorageError, match="use the shelf's own path"):
            refused("x")


def test_uses_reach_the_server(tmp_path: Path) -> None:
    """As the connector records them: each object of the whole prefix."""
    fmt, counts, server_counts = make_format(), Counters(), Counters()
    chunks = make_chunks(fmt, 3)
    names = [put(tmp_path / "shelf", fmt, chunk, n) for chunk in chunks for n in (0, 1)]
    storage = FaultyStorage(PosixBackend(tmp_path / "shelf"))
    with ExitStack() as stack:
        of_server = stack.enter_context(closing(Uses(server_counts)))
        server = stack.enter_context(LocalServer(tmp_path / "s", storage, uses=of_server))
        client = stack.enter_context(closing(Client(server.url)))
        uses = stack.enter_context(closing(Uses(counts, every=60.0)))
        uses.note(client.shelf.view(fmt), chunks)
        assert uses.flush(PATIENCE)
        assert counts.snapshot()["touched_objects"] == 6
        until(lambda: bool(of_server.flush(PATIENCE) and server_counts.snapshot()))
        assert server_counts.snapshot() == {"touched_objects": 6}
        assert sorted(storage.touches) == sorted(names)


@pytest.mark.parametrize("on_device", [False, True])
def test_transfer_stores_from_shared_memory_and_loads_in_place(
    setting: Setting, on_device: bool
) -> None:
    streams = SimulatedStreams() if on_device else None
    writer, reader = setting.rig(streams=streams), setting.rig()
    writer.put(setting.chunks)
    assert writer.count("stored_chunks") == 8
    load, items = reader.load(setting.chunks, 8)
    assert not load.failures
    assert all(reader.holds(item) for item in items)
    assert setting.server.stat("read_objects") == 0
    assert setting.server.stat("memory_hits") >= 16
    assert setting.server.stat("stored_objects") == 16
    assert reader.count("loaded_chunks") == 8
    until(lambda: setting.server.stat("lent_bytes") == 0)


def test_lookup_takes_few_messages(setting: Setting) -> None:
    """On a shelf behind a server as on any that is far away: not one for each chunk."""
    tokens = list(range(64 * setting.fmt.chunk_size))
    chunks = KeyChain(setting.fmt.namespace.digest, setting.fmt.chunk_size).extend(tokens)
    for chunk in chunks:
        for shard in range(setting.fmt.shards):
            put(setting.root, setting.fmt, chunk, shard)
    view = setting.connect().shelf.view(setting.fmt)
    service = LookupService(view, failed=FailedKeys(), counters=Counters())
    try:
        before = setting.server.server.stats()["requests"]
        lookup = service.submit(
            tokens, lambda: KeyChain(setting.fmt.namespace.digest, setting.fmt.chunk_size)
        )
        assert lookup.wait(PATIENCE)
        assert lookup.hit_chunks == 64
        assert setting.server.server.stats()["requests"] - before <= 6
    finally:
        service.close()


# ------------------------------------------------------------------------------ the server fails


def test_server_that_is_gone_is_used_again_when_it_is_back(setting: Setting) -> None:
    client = setting.connect()
    view = client.shelf.view(setting.fmt)
    setting.publish(client, 0)
    (loans,) = view.pin_all([setting.chunks[0]], (0,))
    setting.server.close()
    with pytest.raises(UnavailableStorageError):
        view.pin_all([setting.chunks[0]], (0,))
    until(lambda: view.find([setting.ref(0)]) == [Presence.ERROR] and not client.shelf.available)
    # What was lent stays where it is.
    assert bytes(loans[0].view) == setting.image(0)
    loans[0].release()
    setting.start()
    until(lambda: client.shelf.available)
    # The new server knows the namespace, and reads the memory of the client.
    assert setting.borrowed(client, 0) == {0: setting.image(0)}
    assert setting.publish(client, 1) is WriteResult.CREATED


def test_server_that_hangs_opens_the_breaker(setting: Setting) -> None:
    client = setting.connect()
    backend = client.shelf.backend
    backend.deadlines = replace(backend.deadlines, probe=0.1, read=0.1, write=0.1)
    setting.place(0)
    view = client.shelf.view(setting.fmt)
    threads = [
        threading.Thread(target=view.find, args=([setting.ref(0)],), daemon=True) for _ in range(2)
    ]
    with setting.server.hanging():
        for thread in threads:
            thread.start()
        until(lambda: backend.reads.state is BreakerState.OPEN)
        assert view.find([setting.ref(0)]) == [Presence.ERROR]
    for thread in threads:
        thread.join(PATIENCE)
    until(lambda: client.shelf.available)
    assert setting.borrowed(client, 0) == {0: setting.image(0)}


def test_server_that_is_not_there_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "CONNECT_SECONDS", 0.1)
    tmp_path.chmod(0o700)
    for path in (tmp_path / "missing" / "node.sock", tmp_path / "node.sock"):
        client = NodeClient(f"ipc://{path}")
        with closing(client), pytest.raises(UnavailableStorageError):
            open_served(client)


def test_server_of_another_user_is_refused(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr("kvshelf.server.connection.peer_user", lambda connection: 4711)
    with closing(NodeClient(setting.server.url)) as client:
        with pytest.raises(StorageError, match="runs as user 4711") as caught:
            open_served(client)
        assert not caught.value.retryable
