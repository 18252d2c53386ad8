"""The streams of a node server: requests that are none, clients that do not read, lost files."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.errors import ConfigError
from kvshelf.memory.arena import Arena
from kvshelf.server import protocol
from kvshelf.server import session as session_module
from kvshelf.server.connection import NodeClient
from kvshelf.server.listener import Listener, socket_path
from kvshelf.server.node import Node
from kvshelf.server.protocol import Delete, Fetch, GiveBack, Read, Refused, Reply, Stat
from kvshelf.server.session import Server
from tests.server.desk import name_of, put
from tests.server.node import LocalServer
from tests.server.test_listener import Peer
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real

FMT = make_format(shards=1)
SIZE = FMT.object_size(0)
CHUNKS = make_chunks(FMT, 8)
NAMES = [name_of(FMT, chunk) for chunk in CHUNKS]


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    for chunk in CHUNKS:
        put(tmp_path / "shelf", FMT, chunk)
    return FaultyStorage(posix(tmp_path / "shelf"))


@pytest.fixture
def server(tmp_path: Path, storage: FaultyStorage) -> Iterator[LocalServer]:
    with LocalServer(tmp_path / "node", storage, 1 << 20) as server:
        namespace = FMT.namespace
        server.node.register(namespace.encoded, namespace.slug, False)
        yield server


def test_stream_that_is_no_message_ends_service_but_no_loan(server: LocalServer) -> None:
    garbage = [
        struct.pack("<I", protocol.MAX_REQUEST + 1),
        struct.pack("<I", 3) + b"\xff\xff\xff",
        protocol.frame(Refused("no request")),
    ]
    for data in garbage:
        with Peer(server) as peer:
            peer.greet()
            reply = peer.ask(Fetch(1, NAMES[:1]))
            assert isinstance(reply, Reply) and isinstance(reply.value, list)
            peer.say(data)
            body = peer.hear()
            assert body is not None
            assert isinstance(protocol.decode(protocol.REPLIES, body), Refused)
            # The server has ended its direction, and waits for the client's.
            assert peer.hear() is None
            peer.say(protocol.frame(GiveBack([reply.value[0]])))
            assert server.stat("lent_bytes") > 0
            offset = reply.value[0]
            assert isinstance(offset, int)
            assert bytes(server.arena.view[offset : offset + SIZE]) == sealed(FMT, CHUNKS[0])
        until(lambda: not server.stat("clients"))
        assert server.stat("lent_bytes") == 0
    assert server.server.stats()["refused"] == len(garbage)


def test_request_that_fails_is_answered_by_a_fault_and_ends_nothing(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Peer(server) as peer:
        peer.greet()
        reply = peer.ask(Read(1, "no name"))
        assert isinstance(reply, Reply) and reply.fault is not None
        assert reply.fault.kind == "ObjectNameError"

        def broken(*_: object) -> None:
            raise RuntimeError("a mistake")

        with monkeypatch.context() as patch:
            patch.setattr(Node, "stat", broken)
            reply = peer.ask(Stat(2, NAMES[:1]))
            assert isinstance(reply, Reply) and reply.fault is not None
            assert "a mistake" in reply.fault.text
        assert peer.ask(Stat(3, NAMES[:1])) == Reply(3, [SIZE])
        assert peer.ask(Delete(4, [])) == Reply(4, [])


def test_client_that_does_not_read_is_not_read_and_holds_up_nobody(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_REQUESTS", 8)
    with Peer(server) as peer, Peer(server) as other:
        peer.greet()
        other.greet()
        # Until the server reads no more of it.
        data = memoryview(protocol.frame(Read(1, NAMES[0])) * 20_000)
        peer.stream.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while data:
                data = data[peer.stream.send(data) :]
        assert data
        assert other.ask(Stat(9, NAMES[:1])) == Reply(9, [SIZE])
        # It goes on where the client reads again.
        peer.stream.setblocking(True)
        for _ in range(100):
            assert peer.hear() is not None
    until(lambda: not server.stat("clients"))


def test_objects_are_streamed_one_at_a_time_to_each_client(
    server: LocalServer, storage: FaultyStorage
) -> None:
    gate = threading.Event()
    storage.add(Fault("read", wait=gate))
    with Peer(server) as peer:
        peer.greet()
        for number, name in enumerate(NAMES):
            peer.say(protocol.frame(Read(number, name)))
        until(lambda: server.stat("streamed_objects") == 1)
        gate.set()
        for number, chunk in enumerate(CHUNKS):
            body = peer.hear()
            assert body is not None
            reply = protocol.decode(protocol.REPLIES, body)
            assert reply == Reply(number, data=sealed(FMT, chunk))


def test_connections_that_say_nothing_are_bounded_and_closed(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_MAX_GREETING", 3)
    silent = [Peer(server) for _ in range(3)]
    until(lambda: server.server._greeting_count == 3)
    with Peer(server) as peer:
        body = peer.hear()
        assert body is not None
        refused = protocol.decode(protocol.ANSWER, body)
        assert isinstance(refused, Refused) and "clients already" in refused.text
    monkeypatch.setattr(session_module, "_GREETING_SECONDS", 0.05)
    for peer in silent:
        peer.stream.close()
    until(lambda: server.server._greeting_count == 0)
    with Peer(server) as peer:
        body = peer.hear()
        assert body is not None
        refused = protocol.decode(protocol.ANSWER, body)
        assert isinstance(refused, Refused) and "said nothing" in refused.text


def test_connections_are_bounded(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_CONNECTIONS", 2)
    with Peer(server) as one, Peer(server) as two:
        one.greet()
        two.greet()
        with Peer(server) as third:
            body = third.hear()
            assert body is not None
            assert isinstance(protocol.decode(protocol.ANSWER, body), Refused)
        one.stream.close()
        until(lambda: server.stat("clients") == 1)
        with Peer(server) as third:
            third.greet()


def test_descriptors_that_run_out_end_nothing(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2
    accept = server.server._loop.sock_accept

    async def fails(listening: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accept(listening)

    with Peer(server) as peer:
        peer.greet()
        monkeypatch.setattr(server.server._loop, "sock_accept", fails)
        # The accept that is under way takes the first.
        with Peer(server) as first, Peer(server) as second:
            first.greet()
            second.greet()
        assert not failures
        assert peer.ask(Stat(1, NAMES[:1])) == Reply(1, [SIZE])


def test_files_that_a_cleaner_deletes_are_made_again(server: LocalServer) -> None:
    path = socket_path(server.url)
    with contextlib.closing(NodeClient(server.url)) as client:
        assert client.wait_connected(PATIENCE)
        for name in (path, path + ".lock"):
            os.unlink(name)
            until(lambda name=name: os.path.exists(name))
            with Peer(server) as peer:
                peer.greet()
        assert client.request(Stat, NAMES[:1]).result(PATIENCE) == [SIZE]


def test_server_whose_place_was_taken_ends_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "node" / "node.sock"
    server = Server(f"ipc://{path}")
    arena = Arena(1 << 20, shared=True)
    backend = posix(tmp_path / "shelf")
    failures: list[BaseException] = []
    with contextlib.ExitStack() as stack:
        from kvshelf.shelf.shelf import Shelf

        shelf = stack.enter_context(Shelf(backend))
        node = Node(shelf, arena)
        stack.callback(arena.close)
        stack.callback(node.close)

        def run() -> None:
            try:
                server.run(node, arena, chunk_size=256)
            except ConfigError as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        for name in (str(path), f"{path}.lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        # Between two looks another one may be quicker, or this one has its place again.
        try:
            other = Listener(str(path))
        except ConfigError:
            server.stop()
            thread.join(PATIENCE)
            server.close()
            return
        thread.join(PATIENCE)
        assert "taken its place" in str(failures[0])
        server.close()
        assert other.in_place()
        other.close()


def test_server_whose_folder_cannot_be_made_serves_its_clients(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(socket_path(server.url))
    with Peer(server) as peer:
        peer.greet()
        path.parent.rename(path.parent.with_name("elsewhere"))
        path.parent.write_text("in the way")
        until(lambda: "no client can connect" in caplog.text)
        assert peer.ask(Stat(1, NAMES[:1])) == Reply(1, [SIZE])
        path.parent.unlink()
        until(path.exists)
        with Peer(server) as other:
            other.greet()
