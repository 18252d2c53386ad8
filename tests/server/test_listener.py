"""Who may talk to the node server, and which memory each side maps."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.errors import ConfigError, UnavailableStorageError
from kvshelf.server import protocol
from kvshelf.server.connection import NodeClient
from kvshelf.server.listener import Listener, TakenError, check_folder, socket_path
from kvshelf.server.protocol import Hello, Message, Refused, Reply, Welcome
from tests.server.node import LocalServer, serve
from tests.support.memory import sealed_memory
from tests.support.waiting import until

pytestmark = pytest.mark.real


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    with serve(tmp_path) as server:
        yield server


@pytest.mark.parametrize(
    "url",
    [
        "tcp://127.0.0.1:5555",
        "ipc://relative",
        "ipc://",
        "ipc:///folder/",
        "ipc://@abstract",
        "ipc:///a\0b",
        "ipc:///" + "a" * 120,
        "/path",
    ],
)
def test_url_without_an_absolute_path_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        socket_path(url)
    with pytest.raises(ConfigError, match="URL"):
        NodeClient(url)


def test_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    with pytest.raises(UnavailableStorageError, match="no node server has run"):
        check_folder(str(folder / "server"))
    folder.mkdir(mode=0o700)
    check_folder(str(folder / "server"))
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 750"):
        check_folder(str(folder / "server"))
    with pytest.raises(ConfigError, match="mode 750"):
        Listener(str(folder / "server"))
    with contextlib.closing(NodeClient(f"ipc://{folder}/server")) as client:
        until(lambda: client.problem is not None)
        assert isinstance(client.problem, ConfigError)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="no folder"):
        check_folder(str(tmp_path / "link" / "server"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        check_folder(str(folder / "server"))


def test_folder_that_the_server_makes_is_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        listener = Listener(str(tmp_path / "new" / "sockets" / "server"))
    finally:
        os.umask(before)
    listener.close()
    assert (tmp_path / "new" / "sockets").stat().st_mode & 0o777 == 0o700


def test_second_server_is_refused_and_a_killed_one_followed(tmp_path: Path) -> None:
    path = str(tmp_path / "sockets" / "server")
    listener = Listener(path)
    with pytest.raises(TakenError, match="runs already"):
        Listener(path)
    listener.close()
    listener.close()
    # What a killed server leaves.
    leftover = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    leftover.bind(path)
    leftover.close()
    Listener(path).close()
    assert not os.path.exists(path)


def test_server_whose_lock_was_deleted_keeps_its_place(tmp_path: Path) -> None:
    path = str(tmp_path / "sockets" / "server")
    with contextlib.closing(Listener(path)) as listener:
        assert listener.in_place()
        os.unlink(path + ".lock")
        with pytest.raises(TakenError, match="runs already"):
            Listener(path)
        assert not listener.in_place()


def test_server_ends_without_harm_to_another_in_its_place(tmp_path: Path) -> None:
    path = str(tmp_path / "sockets" / "server")
    first = Listener(path)
    for name in (path, path + ".lock"):
        os.unlink(name)
    before = descriptors()
    second = Listener(path)
    assert not first.in_place()
    first.close()
    assert not first.in_place()
    assert second.in_place()
    with pytest.raises(TakenError, match="runs already"):
        Listener(path)
    assert descriptors() < before + 3
    second.close()
    assert os.listdir(tmp_path / "sockets") == ["server.lock"]


# ------------------------------------------------------------------------------ greetings


class Peer:
    """One end of a stream, which says what a test wants."""

    def __init__(self, server: LocalServer) -> None:
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.stream.settimeout(20)
        self.stream.connect(socket_path(server.url))
        self.received = bytearray()

    def say(self, data: bytes, passed: list[int] | None = None) -> None:
        if passed:
            socket.send_fds(self.stream, [data], passed)
        else:
            self.stream.sendall(data)

    def hear(self) -> bytes | None:
        """The body of the next message; None at the end of the stream."""
        while True:
            for body in protocol.take_frames(self.received):
                return body
            data = self.stream.recv(1 << 16)
            if not data:
                return None
            self.received += data

    def greet(self, passed: list[int] | None = None, nbytes: int = 0) -> Welcome:
        self.say(protocol.frame(Hello(protocol.PROTOCOL, nbytes)), passed)
        body = self.hear()
        assert body is not None
        answer = protocol.decode(protocol.ANSWER, body)
        assert isinstance(answer, Welcome)
        return answer

    def ask(self, request: Message) -> Reply | Refused | None:
        self.say(protocol.frame(request))
        body = self.hear()
        return None if body is None else protocol.decode(protocol.REPLIES, body)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()


def refusal(server: LocalServer, data: bytes, passed: list[int] | None = None) -> str:
    """Say something to the server first, and return why it refuses that."""
    with Peer(server) as peer:
        peer.say(data, passed)
        body = peer.hear()
        if body is None:
            return ""
        answer = protocol.decode(protocol.ANSWER, body)
        assert isinstance(answer, Refused)
        assert peer.hear() is None
        return answer.text


def test_memory_is_passed_both_ways_for_reading_only(server: LocalServer) -> None:
    before = descriptors()
    fd = sealed_memory(4096)
    with contextlib.closing(NodeClient(server.url)) as client, Peer(server) as peer:
        until(lambda: client.is_connected)
        assert peer.greet([fd], 4096).memory_bytes == server.arena.nbytes
        assert client._connection is not None
        server.arena.view[5000:5005] = b"hello"
        memory = client._connection.memory
        assert bytes(memory[5000:5005]) == b"hello"
        until(lambda: server.stat("clients") == 2)
        with pytest.raises(TypeError):
            memory[0] = 1
        with pytest.raises(PermissionError):
            mmap.mmap(server.arena.fd or -1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        del memory
    os.close(fd)
    until(lambda: not server.stat("clients"))
    until(lambda: descriptors() <= before)


def test_hostile_greetings_are_refused_and_cost_nothing(server: LocalServer) -> None:
    fd, unsealed = sealed_memory(4096), sealed_memory(4096, 0)
    pipe = os.pipe()

    def hello(nbytes: int = 0, version: int = protocol.PROTOCOL) -> bytes:
        return protocol.frame(Hello(version, nbytes))

    with contextlib.closing(NodeClient(server.url)) as good:
        until(lambda: good.is_connected)
        before = descriptors()

        def framed(body: bytes) -> bytes:
            return struct.pack("<I", len(body)) + body

        assert "no hello" in refusal(server, framed(b"\xff" * 100))
        assert "no hello" in refusal(server, framed(b"\xdd\xff\xff\xff\xff"), [fd])
        assert "no hello" in refusal(server, protocol.frame(Refused("x")))
        for version in (protocol.PROTOCOL - 1, protocol.PROTOCOL + 1):
            assert f"speaks version {version}" in refusal(server, hello(version=version))
        assert "0 descriptors" in refusal(server, hello(4096))
        assert "1 descriptors" in refusal(server, hello(), [fd])
        assert "2 descriptors" in refusal(server, hello(4096), [fd, fd])
        assert "too many descriptors" in refusal(server, hello(4096), [fd] * 100)
        assert "no shared memory" in refusal(server, hello(4096), [pipe[0]])
        # A file that may shrink would end the server by a signal.
        assert "not sealed" in refusal(server, hello(4096), [unsealed])
        assert "has 4096 bytes" in refusal(server, hello(8192), [fd])
        assert "has 4096 bytes" in refusal(server, hello(1 << 40), [fd])
        assert "no hello" in refusal(server, hello(1 << 47), [fd])
        assert "too long" in refusal(server, struct.pack("<I", 1 << 20))
        assert "more than a greeting" in refusal(server, hello() + b"\0")
        until(lambda: descriptors() <= before)
        assert server.stat("clients") == 1
        assert good.is_connected
    for descriptor in (fd, unsealed, *pipe):
        os.close(descriptor)


def test_greeting_that_comes_byte_by_byte_is_received(server: LocalServer) -> None:
    fd = sealed_memory(4096)
    data = protocol.frame(Hello(protocol.PROTOCOL, 4096))
    with Peer(server) as peer:
        for number in range(len(data)):
            peer.say(data[number : number + 1], [fd] if number == 2 else None)
        body = peer.hear()
        assert body is not None
        assert isinstance(protocol.decode(protocol.ANSWER, body), Welcome)
    os.close(fd)


OTHER_USER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
try:
    connection.connect(sys.argv[1])
except PermissionError:
    print("cannot enter")
    sys.exit()
connection.settimeout(10)
print(connection.recv(4096))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as server:
        os.chmod(folder, 0o755)
        path = socket_path(server.url)

        def as_other_user() -> str:
            command = [sys.executable, "-S", "-E", "-c", OTHER_USER, path]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            return done.stdout

        assert "cannot enter" in as_other_user()
        os.chmod(os.path.dirname(path), 0o777)
        os.chmod(path, 0o777)
        assert "own user only" in as_other_user()
        assert server.stat("clients") == 0
