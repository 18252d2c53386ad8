"""A shelf behind a node server, from its client's side: what it lends, stores and survives."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf import pages
from kvshelf.backends import WriteResult
from kvshelf.backends.breaker import BreakerState
from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    ObjectMissingError,
    ReadOnlyStorageError,
    StorageError,
    UnavailableStorageError,
)
from kvshelf.format.keys import KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.server import backend as backend_module
from kvshelf.server import session
from kvshelf.server import shelf as shelf_module
from kvshelf.server.segment import Segment
from kvshelf.server.shelf import ServedShelf, open_served
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from tests.server.node import LocalServer
from tests.sim.device import SimulatedStreams
from tests.sim.storage import FaultyStorage
from tests.support.fake_cudart import fake_cudart
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real


@dataclass
class Setting:
    """A server on a directory, and clients of it."""

    folder: Path
    stack: ExitStack
    arena_bytes: int = 1 << 20
    fmt: ObjectFormat = field(default_factory=make_format)

    def __post_init__(self) -> None:
        self.root = self.folder / "shelf"
        self.chunks = make_chunks(self.fmt, 8)
        self.start()

    def start(self) -> None:
        """Start a server, which knows nothing of earlier ones."""
        self.storage = FaultyStorage(PosixBackend(self.root))
        self.server = LocalServer(self.folder / "node", self.storage, self.arena_bytes)
        self.stack.callback(self.server.close)

    def connect(self, **options: Any) -> ServedShelf:
        return self.stack.enter_context(open_served(self.server.url, **options))

    def ref(self, index: int, shard: int = 0) -> ObjectRef:
        return ObjectRef(self.chunks[index], shard)

    def image(self, index: int) -> bytes:
        return sealed(self.fmt, self.chunks[index])

    def publish(self, shelf: Shelf, *indices: int) -> None:
        for index in indices:
            assert shelf.view(self.fmt).publish(self.ref(index), self.image(index)) in (
                WriteResult.CREATED,
                WriteResult.REPLACED,
            )

    def place(self, *indices: int) -> None:
        """Publish past the server."""
        with Shelf(PosixBackend(self.root)) as shelf:
            self.publish(shelf, *indices)

    def path(self, index: int) -> Path:
        with Shelf(PosixBackend(self.root)) as shelf:
            return self.root / shelf.view(self.fmt).name(self.ref(index))

    def borrowed(self, shelf: Shelf, index: int) -> bytes:
        """Borrow an object and give it back."""
        loan = shelf.view(self.fmt).pin(self.ref(index))
        assert loan is not None
        data = bytes(loan.view)
        assert loan.valid()
        loan.release()
        return data

    def loaded(self, shelf: Shelf, index: int) -> bytearray:
        """Load an object to memory of the client."""
        data = bytearray(self.fmt.object_size(0))
        shelf.view(self.fmt).load(self.ref(index), memoryview(data))
        return data

    def rig(self, segment: Segment | None = None, **options: Any) -> Rig:
        """A transfer whose shelf is behind the server."""
        rig = Rig(
            PosixBackend(self.folder / "unused"),
            fmt=self.fmt,
            in_front=lambda _: self.connect(segment=segment),
            memory_chunks=64,
            **options,
        )
        self.stack.callback(rig.close)
        return rig

    def stats(self) -> dict[str, int]:
        return dict(self.server.service.stats())


@pytest.fixture
def make_setting(tmp_path: Path) -> Iterator[Callable[..., Setting]]:
    with ExitStack() as stack:
        yield partial(Setting, tmp_path, stack)


@pytest.fixture
def setting(make_setting: Callable[..., Setting]) -> Setting:
    return make_setting()


# ------------------------------------------------------------------------------ the server works


def test_what_one_client_stores_another_borrows_without_a_read(setting: Setting) -> None:
    one, other = setting.connect(), setting.connect()
    setting.publish(one, 0)
    assert setting.path(0).read_bytes() == setting.image(0)
    assert setting.borrowed(other, 0) == setting.image(0)
    assert setting.stats()["read_objects"] == 0
    until(lambda: setting.stats()["leases"] == 0)
    # The description of the namespace is on the shelf for everybody.
    assert (setting.path(0).parents[2] / "namespace.json").exists()


def test_object_is_read_once_for_all(setting: Setting) -> None:
    setting.place(0, 1)
    clients = [setting.connect() for _ in range(3)]
    for client in clients:
        view = client.view(setting.fmt)
        view.expect(setting.chunks[:2], (0,))
    for client in clients:
        assert setting.borrowed(client, 0) == setting.image(0)
        assert setting.borrowed(client, 1) == setting.image(1)
    assert setting.stats()["read_objects"] == 2
    with pytest.raises(ObjectMissingError):
        clients[0].view(setting.fmt).pin(setting.ref(2))


def test_stores_ask_the_storage_and_lookups_the_memory_as_well(setting: Setting) -> None:
    shelf = setting.connect()
    setting.publish(shelf, 0)
    setting.path(0).unlink()
    view = shelf.view(setting.fmt)
    refs = [setting.ref(0), setting.ref(1)]
    assert view.find(refs) == [Presence.PRESENT, Presence.MISSING]
    assert view.probe(refs) == [Presence.MISSING, Presence.MISSING]
    setting.publish(shelf, 0)
    assert setting.path(0).read_bytes() == setting.image(0)


def test_objects_too_large_for_the_memory_come_in_messages(
    make_setting: Callable[..., Setting],
) -> None:
    fmt = make_format(chunk_size=2048)
    setting = make_setting(arena_bytes=64 << 10, fmt=fmt)
    setting.place(0)
    shelf = setting.connect()
    assert shelf.view(fmt).pin(setting.ref(0)) is None
    assert fmt.object_size(0) > 64 << 10
    assert setting.loaded(shelf, 0) == setting.image(0)


def test_memory_that_a_device_cannot_read_is_copied_from(setting: Setting) -> None:
    setting.place(0, 1)
    shelf = setting.connect(in_place=False)
    assert shelf.view(setting.fmt).pin(setting.ref(0)) is None
    for _ in range(2):
        assert setting.loaded(shelf, 0) == setting.image(0)
    # The second time it was in the server's memory.
    assert setting.stats()["read_objects"] == 1
    until(lambda: setting.stats()["leases"] == 0)
    with pytest.raises(ObjectMissingError):
        setting.loaded(shelf, 2)


def test_gpu_reads_from_memory_that_is_page_locked_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "LOCKED_AT_ONCE", 2 << 20)
    with fake_cudart() as runtime, ExitStack() as stack:
        fmt = make_format(chunk_size=2048, shards=1)
        setting = Setting(tmp_path, stack, arena_bytes=8 << 20, fmt=fmt)
        setting.chunks = make_chunks(fmt, 6 * (1 << 20) // fmt.object_size(0))
        shelf = setting.connect(in_place=False, device=torch.device("cuda", 0))
        until(lambda: shelf.memory.pins)
        assert len(runtime.registered) == 4
        view = shelf.view(fmt)
        indices = range(len(setting.chunks))
        setting.publish(shelf, *indices)
        loans = []
        for index in indices:
            loan = view.pin(setting.ref(index))
            if loan is None:  # a client has no more than half of the memory
                break
            assert runtime.holds(loan.view)
            loans.append(loan)
        assert len(loans) > len(indices) // 2
        while loans:
            loans.pop().release()
        loan = None


def test_bad_object_is_set_aside_and_replaced(setting: Setting) -> None:
    setting.place(0)
    path = setting.path(0)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    shelf = setting.connect()
    view = shelf.view(setting.fmt)
    with pytest.raises(BadObjectError):
        view.pin(setting.ref(0))
    assert not path.exists()
    assert len(list(path.parent.glob(".*.tmp"))) == 1
    assert view.publish(setting.ref(0), setting.image(0), suspect=True) is WriteResult.CREATED
    assert setting.borrowed(shelf, 0) == good


def test_server_takes_no_bad_object(setting: Setting) -> None:
    shelf = setting.connect()
    bad = bytearray(setting.image(0))
    bad[-1] ^= 1
    with pytest.raises(BadObjectError):
        shelf.view(setting.fmt).publish(setting.ref(0), bad)
    assert not setting.path(0).exists()
    assert shelf.view(setting.fmt).find([setting.ref(0)]) == [Presence.MISSING]


def test_client_that_only_reads(setting: Setting) -> None:
    setting.place(0)
    shelf = setting.connect(read_only=True)
    assert shelf.read_only
    assert setting.borrowed(shelf, 0) == setting.image(0)
    with pytest.raises(ReadOnlyStorageError):
        shelf.view(setting.fmt).publish(setting.ref(1), setting.image(1))
    assert shelf.view(setting.fmt).find([setting.ref(0)]) == [Presence.PRESENT]


def test_transfer_stores_and_loads_in_place(setting: Setting) -> None:
    writer, reader = setting.rig(), setting.rig()
    writer.put(setting.chunks)
    load, items = reader.load(setting.chunks, 8)
    assert not load.failures
    assert all(reader.holds(item) for item in items)
    stats = setting.stats()
    assert (stats["read_objects"], stats["memory_hits"]) == (0, 16)
    assert reader.count("loaded_chunks") == 8
    until(lambda: setting.stats()["leases"] == 0)


@pytest.mark.parametrize("on_device", [False, True])
def test_what_was_gathered_in_the_segment_is_stored_from_there(
    setting: Setting, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = Segment(4096, regions=2 << 20)
    setting.stack.callback(segment.close)
    streams = SimulatedStreams() if on_device else None
    writer = setting.rig(segment, streams=streams, regions=segment.take_region)
    with monkeypatch.context() as patch:
        # Whoever calls it fails.
        patch.setattr(backend_module, "copy_bytes", None)
        writer.put(setting.chunks)
    assert writer.count("stored_chunks") == 8
    assert setting.stats()["stored_objects"] == 16
    reader = setting.rig()
    load, items = reader.load(setting.chunks, 8)
    assert not load.failures
    assert all(reader.holds(item) for item in items)


def test_what_was_gathered_elsewhere_is_copied_to_the_segment(setting: Setting) -> None:
    segment = Segment(1 << 16, regions=1 << 20)
    setting.stack.callback(segment.close)
    writer = setting.rig(segment=segment)
    writer.put(setting.chunks)
    assert writer.count("stored_chunks") == 8
    assert segment.take_region(1 << 20) is not None


def test_lookup_takes_few_messages(setting: Setting) -> None:
    """On a shelf behind a server as on any that is far away: not one for each chunk."""
    tokens = list(range(64 * setting.fmt.chunk_size))
    chunks = KeyChain(setting.fmt.namespace.digest, setting.fmt.chunk_size).extend(tokens)
    shelf = setting.connect()
    view = shelf.view(setting.fmt)
    for chunk in chunks:
        for shard in range(setting.fmt.shards):
            view.publish(ObjectRef(chunk, shard), sealed(setting.fmt, chunk, shard))
    service = LookupService(view, failed=FailedKeys(), counters=Counters())
    try:
        before = setting.server.loop.stats()["requests"]
        lookup = service.submit(
            tokens, lambda: KeyChain(setting.fmt.namespace.digest, setting.fmt.chunk_size)
        )
        assert lookup.wait(PATIENCE)
        assert lookup.hit_chunks == 64
        assert setting.server.loop.stats()["requests"] - before <= 6
    finally:
        service.close()


# ------------------------------------------------------------------------------ the server fails


def test_server_that_is_gone_is_used_again_when_it_is_back(setting: Setting) -> None:
    shelf = setting.connect()
    view = shelf.view(setting.fmt)
    setting.publish(shelf, 0)
    loan = view.pin(setting.ref(0))
    assert loan is not None
    setting.server.close()
    with pytest.raises(UnavailableStorageError):
        view.pin(setting.ref(0))
    until(lambda: view.find([setting.ref(0)]) == [Presence.ERROR] and not shelf.available)
    # What was lent stays where it is, and valid.
    assert bytes(loan.view) == setting.image(0)
    assert loan.valid()
    loan.release()
    setting.start()
    until(lambda: shelf.available)
    # The new server knows the namespace.
    assert setting.borrowed(shelf, 0) == setting.image(0)
    setting.publish(shelf, 1)


def test_server_that_hangs_is_late(setting: Setting) -> None:
    shelf = setting.connect()
    shelf.backend.deadlines = replace(shelf.backend.deadlines, probe=0.1, read=0.1, write=0.1)
    setting.place(0)
    hangs, gate = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        gate.wait(PATIENCE)

    setting.server.loop.post(hang)
    assert hangs.wait(PATIENCE)
    view = shelf.view(setting.fmt)
    threads = [
        threading.Thread(target=view.find, args=([setting.ref(0)],), daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    until(lambda: shelf.backend.reads.state is BreakerState.OPEN)
    assert view.find([setting.ref(0)]) == [Presence.ERROR]
    gate.set()
    for thread in threads:
        thread.join(PATIENCE)
    until(lambda: shelf.available)
    assert setting.borrowed(shelf, 0) == setting.image(0)


def test_server_that_is_not_there_is_to_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_module, "CONNECT_SECONDS", 0.1)
    for path in (tmp_path / "missing" / "node.sock", tmp_path / "node.sock"):
        tmp_path.chmod(0o700)
        with pytest.raises(UnavailableStorageError):
            open_served(f"ipc://{path}")


def test_what_is_no_server_of_this_user_is_refused_at_once(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_module, "CONNECT_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="expected ipc:///absolute/path"):
        open_served("tcp://127.0.0.1:5555")
    # Something else listens.
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(other / "node.sock.session"))
        listener.listen()
        threading.Thread(target=_greet, args=(listener, b"hello"), daemon=True).start()
        with pytest.raises(StorageError, match="is no node server of this version") as caught:
            open_served(f"ipc://{other}/node.sock")
        assert not caught.value.retryable
    # Others may enter the folder.
    other.chmod(0o755)
    with pytest.raises(ConfigError, match="other users may enter"):
        open_served(f"ipc://{other}/node.sock")
    # The server is another user's.
    monkeypatch.setattr(session, "peer_user", lambda connection: 4711)
    with pytest.raises(StorageError, match="runs as user 4711") as caught:
        open_served(setting.server.url)
    assert not caught.value.retryable


def _greet(listener: socket.socket, data: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(1 << 16)
            connection.send(data)
