"""Who may talk to the node server, and which memory it maps."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvshelf.errors import ConfigError, UnavailableStorageError
from kvshelf.server import messages, session
from kvshelf.server.messages import Hello
from tests.server.node import serve
from tests.support.memory import sealed_memory
from tests.support.waiting import until

pytestmark = pytest.mark.real


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def hello(segment_bytes: int = 0, **changes: object) -> Hello:
    values = {"protocol": messages.PROTOCOL, "client": os.urandom(16)}
    return Hello(**(values | changes), segment_bytes=segment_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        "tcp://127.0.0.1:5555",
        "ipc://relative",
        "ipc://",
        "ipc:///folder/",
        "ipc://@abstract",
        "ipc:///a\0b",
        "ipc:///" + "a" * 100,
        "/path",
    ],
)
def test_only_sockets_with_an_absolute_path_are_urls_of_a_server(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        session.socket_path(url)


def test_folder_must_be_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    with pytest.raises(UnavailableStorageError, match="no node server has run"):
        session.check_folder(str(folder / "server"))
    folder.mkdir(mode=0o700)
    session.check_folder(str(folder / "server"))
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 750"):
        session.check_folder(str(folder / "server"))
    with pytest.raises(ConfigError, match="mode 750"):
        session.Listener(str(folder / "server"))
    with pytest.raises(ConfigError, match="mode 750"):
        session.connect(str(folder / "server"), hello(), None, 1.0)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="no folder"):
        session.check_folder(str(tmp_path / "link" / "server"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_folder_must_be_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        session.check_folder(str(folder / "server"))


def test_folder_that_the_server_makes_is_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        listener = session.Listener(str(tmp_path / "new" / "sockets" / "server"))
    finally:
        os.umask(before)
    listener.close()
    assert (tmp_path / "new" / "sockets").stat().st_mode & 0o777 == 0o700


def test_one_server_runs_at_a_socket_and_a_killed_one_is_followed(tmp_path: Path) -> None:
    path = str(tmp_path / "sockets" / "server")
    listener = session.Listener(path)
    with pytest.raises(ConfigError, match="runs already"):
        session.Listener(path)
    listener.close()
    listener.close()
    # What a killed server leaves.
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(path + ".session")
    left.close()
    session.Listener(path).close()
    assert not os.path.exists(path + ".session")


def test_server_whose_lock_was_deleted_keeps_its_place(tmp_path: Path) -> None:
    path = str(tmp_path / "sockets" / "server")
    with contextlib.closing(session.Listener(path)) as listener:
        assert listener.in_place()
        for left in (path, path + ".session"):
            os.unlink(path + ".lock")
            with pytest.raises(session.TakenError, match="runs already"):
                session.Listener(path)
            assert not listener.in_place()
            # The next time one socket is there no more.
            os.unlink(left)
            if left == path:
                with pytest.raises(session.TakenError, match="runs already"):
                    session.Listener(path)


def test_server_ends_without_harm_to_another_in_its_place(tmp_path: Path) -> None:
    path = str(tmp_path / "sockets" / "server")
    first = session.Listener(path)
    for name in (path, path + ".session", path + ".lock"):
        os.unlink(name)
    before = descriptors()
    second = session.Listener(path)
    assert not first.in_place()
    first.close()
    assert not first.in_place()
    assert second.in_place()
    with pytest.raises(session.TakenError, match="runs already"):
        session.Listener(path)
    assert descriptors() == before
    second.close()
    assert os.listdir(tmp_path / "sockets") == ["server.lock"]


def test_session_passes_memory_both_ways(tmp_path: Path) -> None:
    with serve(tmp_path) as node:
        before = descriptors()
        path = session.socket_path(node.url)
        fd = sealed_memory(4096)
        connection, welcome, arena = session.connect(path, hello(4096), fd, 5.0)
        node.arena.view[5000:5005] = b"hello"
        assert bytes(arena[5000:5005]) == b"hello"
        assert welcome.arena_bytes == len(arena)
        assert node.loop.stats()["clients"] == 1
        # Read-only, whatever the client does with the memory.
        with pytest.raises(TypeError):
            arena[0] = 1
        with pytest.raises(PermissionError):
            mmap.mmap(node.arena.fd or -1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        connection.close()
        os.close(fd)
        until(lambda: not node.loop.stats()["clients"])
        del arena
        assert descriptors() <= before


def refusal(path: str, message: bytes, passed: list[int]) -> str:
    """Say something to the server, and return what it says to that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(path + ".session")
        session._send(connection, message, passed)
        data = connection.recv(1 << 16)
        if not data:
            return ""
        answer = messages.decode_answer(data)
        assert isinstance(answer, messages.Refused)
        assert connection.recv(1) == b""
        return answer.text


def test_hostile_greetings_are_refused_and_cost_nothing(tmp_path: Path) -> None:
    fd = sealed_memory(4096)
    unsealed = sealed_memory(4096, 0)
    with serve(tmp_path) as node:
        path = session.socket_path(node.url)
        good, _, _ = session.connect(path, hello(), None, 5.0)
        before = descriptors()
        encode = messages.encode_greeting
        assert "no hello" in refusal(path, b"\xff" * 100, [])
        assert "no hello" in refusal(path, b"\xdd\xff\xff\xff\xff", [fd])
        assert "no hello" in refusal(path, encode(messages.Refused("x")), [])
        assert "version 99" in refusal(path, encode(hello(protocol=99)), [])
        assert "no hello" in refusal(path, encode(hello(client=b"short")), [])
        assert "descriptors" in refusal(path, encode(hello(4096)), [])
        assert "descriptors" in refusal(path, encode(hello()), [fd])
        assert "descriptors" in refusal(path, encode(hello(4096)), [fd, fd])
        assert "descriptors" in refusal(path, encode(hello(4096)), [fd] * 100)
        assert "too long" in refusal(path, b"x" * (100 << 10), [])
        assert "not sealed" in refusal(path, encode(hello(4096)), [unsealed])
        assert "at most" in refusal(path, encode(hello(1 << 40)), [fd])
        assert "has 4096 bytes" in refusal(path, encode(hello(8192)), [fd])
        assert descriptors() <= before + 1
        assert node.loop.stats()["clients"] == 1
        assert not session.has_ended(good)
        good.close()
    os.close(fd)
    os.close(unsealed)


def test_id_that_is_taken_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as node:
        path = session.socket_path(node.url)
        mine = hello()
        connection, _, _ = session.connect(path, mine, None, 5.0)
        with pytest.raises(session.SessionError, match="same id"):
            session.connect(path, mine, None, 5.0)
        assert not session.has_ended(connection)
        connection.close()


def test_whoever_says_more_than_hello_loses_the_session(tmp_path: Path) -> None:
    with serve(tmp_path) as node:
        connection, _, _ = session.connect(session.socket_path(node.url), hello(), None, 5.0)
        connection.send(b"more")
        until(lambda: not node.loop.stats()["clients"])
        connection.close()


OTHER_USER = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(Path(folder)) as node,
    ):
        os.chmod(folder, 0o755)
        path = session.socket_path(node.url) + ".session"

        def as_other_user() -> str:
            command = [sys.executable, "-S", "-E", "-c", OTHER_USER, path]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            return done.stdout

        assert "cannot enter" in as_other_user()
        os.chmod(os.path.dirname(path), 0o777)
        os.chmod(path, 0o777)
        assert "own user only" in as_other_user()
        assert node.loop.stats()["clients"] == 0
