"""Messages that no client of ours sends: refused, without effect on others, in bounded memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvshelf.errors import ConfigError, UnavailableStorageError
from kvshelf.memory.arena import Arena
from kvshelf.server import answers, greetings, messages, session
from kvshelf.server.channel import Channel
from kvshelf.server.loop import Loop
from kvshelf.server.messages import (
    Call,
    Done,
    Fault,
    Fetch,
    Fetched,
    Find,
    FoundSizes,
    Hello,
    Ping,
    Ready,
    Release,
    Reply,
    Request,
)
from tests.server.serving import OBJECT_BYTES, MemoryService, serving
from tests.support.waiting import until

pytestmark = pytest.mark.real

SECONDS = 30.0


class RawClient:
    """Sends any bytes; in one thread."""

    def __init__(
        self, url: str, *, greet: bool = True, client: bytes | None = None, queue: int = 1000
    ) -> None:
        self.client = client or os.urandom(16)
        self.token = bytes(16)
        self.session: socket.socket | None = None
        if greet:
            hello = Hello(messages.PROTOCOL, self.client, 0)
            path = session.socket_path(url)
            self.session, welcome, _ = session.connect(path, hello, None, SECONDS)
            self.token = welcome.token
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, queue)
        self.socket.setsockopt(zmq.ROUTING_ID, self.client)
        self.socket.connect(url)

    def send(self, request: Request, number: int = 1, token: bytes | None = None) -> None:
        frame = messages.encode_request(self.token if token is None else token, number, request)
        self.socket.send(frame)

    def receive(self, seconds: float = SECONDS) -> tuple[int, Reply] | None:
        if not self.socket.poll(int(seconds * 1000)):
            return None
        return messages.decode_reply(memoryview(self.socket.recv()))

    def answer(self) -> tuple[int, Reply]:
        received = self.receive()
        assert received is not None
        return received

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
        self.context.destroy(linger=0)


@contextlib.contextmanager
def raw(
    url: str, *, greet: bool = True, client: bytes | None = None, queue: int = 1000
) -> Iterator[RawClient]:
    opened = RawClient(url, greet=greet, client=client, queue=queue)
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def neighbour(url: str) -> Iterator[Callable[[], None]]:
    """Give a function that shows that another client is served."""
    with contextlib.closing(Channel(url)) as client:
        assert client.wait_connected(SECONDS)

        def is_served() -> None:
            assert client.request(Find(["a"], [])).result(SECONDS) == FoundSizes([-1])

        is_served()
        yield is_served
        is_served()
        assert client.connected


def test_without_a_session_nothing_is_answered(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (url, loop, service),
        raw(url, greet=False) as stranger,
        neighbour(url),
    ):
        for token in (bytes(16), os.urandom(16)):
            stranger.send(Ping(), token=token)
        until(lambda: loop.stats()["refused"] == 2)
        assert stranger.receive(0) is None
        assert stranger.client not in service.clients


def test_a_wrong_token_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, loop, _), raw(url) as one, raw(url) as other:
        one.send(Ping(), token=bytes(16))
        one.send(Ping(), token=other.token)
        until(lambda: loop.stats()["refused"] == 2)
        one.send(Ping(), number=7)
        assert one.receive() == (7, Done())


def test_a_session_of_another_client_cannot_be_used(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, loop, service), raw(url) as mine:
        mine.send(Ping())
        assert mine.receive() == (1, Done())
        # With the same id, the second connection is refused by ZMQ.
        with raw(url, greet=False, client=mine.client) as thief:
            thief.send(Ping(), token=bytes(16))
            mine.send(Ping(), number=2)
            assert mine.receive() == (2, Done())
            assert thief.receive(0) is None
        assert loop.stats()["clients"] == 1
        assert not service.calls


def test_an_id_that_a_stranger_uses_gives_way_to_another(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, _), raw(url, greet=False) as stranger:
        stranger.send(Ping())
        with neighbour(url):
            pass


def test_leases_of_others_cannot_be_ended(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, service), raw(url) as one, raw(url) as other:
        service.put("x", b"hello")
        one.send(Fetch("r", ["x"], [OBJECT_BYTES]))
        received = one.answer()
        assert isinstance(received[1], Fetched)
        (ready,) = received[1].outcomes
        assert isinstance(ready, Ready)
        other.send(Release([ready.lease, 0, 2**64 - 1]))
        other.send(Ping())
        assert other.receive() == (1, Done())
        assert service.pins.total() == 1
        one.send(Release([ready.lease, ready.lease]))
        one.send(Ping())
        assert one.receive() == (1, Done())
        assert not service.pins


def test_malformed_requests_are_answered_by_a_fault(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, loop, service), neighbour(url), raw(url) as client:
        bodies = [
            b"",
            b"\xc1",
            msgspec.msgpack.encode(["no such message"]),
            msgspec.msgpack.encode(["find", ["a" * 1000], []]),
            msgspec.msgpack.encode(["find", ["a"] * 10_000, []]),
            b"\x93\xa4find\xdd\xff\xff\xff\xff",
            b"\x91" * 100_000,
            msgspec.msgpack.encode(["fetch", "r", ["a", "b"], [1]]),
            msgspec.msgpack.encode(["store", "a", 0, 1]),
            msgspec.msgpack.encode(["store", "a", 2**47, 2**47]),
        ]
        for number, body in enumerate(bodies):
            client.socket.send(client.token + number.to_bytes(8, "little") + body)
            answer = client.answer()
            assert answer[0] == number
            assert isinstance(answer[1], Fault)
        assert not service.objects
        assert loop.stats()["clients"] == 2


def test_what_is_no_request_at_all_is_dropped(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, loop, _), neighbour(url), raw(url) as client:
        frame = messages.encode_request(client.token, 1, Ping())
        client.socket.send(b"")
        client.socket.send(client.token)
        client.socket.send_multipart([frame, frame])
        client.socket.send_multipart([b""] * 1000)
        until(lambda: loop.stats()["refused"] == 4)
        client.send(Ping(), number=5)
        assert client.receive() == (5, Done())


def test_frames_over_the_limit_end_the_connection(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, loop, _), neighbour(url), raw(url) as client:
        monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        client.socket.send(client.token + bytes(messages.MAX_REQUEST))
        assert monitor.poll(int(SECONDS * 1000))
        monitor.close()
        assert loop.stats()["requests"] == 2


def test_requests_without_an_answer_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_OPEN", 10)
    with serving(tmp_path) as (url, _, service), neighbour(url), raw(url) as client:
        for number in range(1, 11):
            client.send(Call("read", ["never"]), number)
        client.send(Ping(), 11)
        answer = client.answer()
        assert answer[0] == 11
        assert isinstance(answer[1], Fault)
        assert "10 answers" in answer[1].text
        until(lambda: len(service.held_back) == 10)
        service.loop.post(service.held_back.pop())
        received = client.answer()
        assert received[1] == Done()
        client.send(Ping(), 12)
        assert client.receive() == (12, Done())
        # What is answered after the client is gone goes nowhere.
        client.close()
        assert service.gone.acquire(timeout=SECONDS)
        for answer_late in service.held_back:
            service.loop.post(answer_late)


def test_bytes_of_requests_without_an_answer_are_bounded(tmp_path: Path) -> None:
    call = Call("write", ["never"], bytes(messages.MAX_INLINE))
    with serving(tmp_path) as (url, loop, service), neighbour(url), raw(url) as client:
        # With what is around each, the 64th is more than 64 MiB.
        for number in range(1, 65):
            client.send(call, number)
        received = client.answer()
        assert received[0] == 64
        assert isinstance(received[1], Fault)
        assert received[1].kind == "TransientStorageError"
        assert len(service.held_back) == 63
        # An answer makes room for one more.
        loop.post(service.held_back.pop())
        received = client.answer()
        assert received[1] == Done()
        client.send(call, 65)
        until(lambda: len(service.held_back) == 63)


def test_a_fetch_counts_until_its_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as (url, _, service), neighbour(url), raw(url) as client:
        service.put("x", b"hello")
        fetch = Fetch("r", ["x"] * 10, [OBJECT_BYTES] * 10)
        most = len(messages.encode_request(client.token, 1, fetch))
        monkeypatch.setattr(answers, "MAX_OPEN_BYTES", most)
        # One of no objects has no answer.
        client.send(Fetch("r", [], []), 9)
        for number in range(1, 4):
            client.send(fetch, number)
            received = client.answer()
            assert isinstance(received[1], Fetched)
            assert len(received[1].outcomes) == 10


def test_a_client_that_does_not_read_loses_its_session_and_nothing_else_waits(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as (url, loop, service), neighbour(url) as is_served:
        service.put("x", b"hello")
        with raw(url, queue=1) as slow:
            slow.send(Fetch("r", ["x"], [OBJECT_BYTES]))
            frame = messages.encode_request(slow.token, 1, Call("read", ["large"]))

            def has_lost_its_session() -> bool:
                assert slow.session is not None
                for _ in range(20):
                    with contextlib.suppress(zmq.Again):
                        slow.socket.send(frame, zmq.NOBLOCK)
                is_served()
                return session.has_ended(slow.session)

            until(has_lost_its_session)
            # It may still be reading what it was lent.
            is_served()
            assert service.pins.total() == 1
            assert loop.stats()["clients"] == 2
            assert not service.gone.acquire(blocking=False)
        assert service.gone.acquire(timeout=SECONDS)
        assert not service.pins


def test_many_answers_at_once_reach_a_client_that_reads(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, _), contextlib.closing(Channel(url)) as client:
        assert client.wait_connected(SECONDS)
        # ZMQ keeps 64, and the loop 16 MiB more, however late the client reads.
        futures = [client.request(Call("read", ["large"])) for _ in range(75)]
        for future in futures:
            assert len(future.result(SECONDS).value) == 1 << 20  # type: ignore[union-attr]


def test_connections_that_say_nothing_are_bounded_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greetings, "_GREETING_SECONDS", 0.5)
    with serving(tmp_path) as (url, _, _), neighbour(url) as is_served:
        path = session.socket_path(url) + ".session"
        silent = []
        for _ in range(greetings._MAX_GREETING + 5):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(SECONDS)
            connection.connect(path)
            silent.append(connection)
        is_served()
        for connection in silent:
            connection.recv(4096)
            connection.close()
        with neighbour(url):
            pass


def test_sessions_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greetings, "MAX_SESSIONS", 2)
    with serving(tmp_path) as (url, _, _), neighbour(url), raw(url):
        hello = Hello(messages.PROTOCOL, os.urandom(16), 0)
        with pytest.raises(session.SessionError, match="2 clients already"):
            session.connect(session.socket_path(url), hello, None, SECONDS)


def test_descriptors_that_run_out_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as (url, loop, _), neighbour(url) as is_served:
        problems = [OSError(24, "Too many open files")] * 2
        accept = session.Listener.accept
        tried = threading.Event()

        def fails(self: session.Listener) -> socket.socket | None:
            tried.set()
            if problems:
                raise problems.pop()
            return accept(self)

        monkeypatch.setattr(session.Listener, "accept", fails)
        with raw(url) as client:
            assert tried.is_set()
            is_served()
            client.send(Ping())
            assert client.receive() == (1, Done())
        assert not problems
        assert loop.url == url


def test_a_fetch_that_fails_half_way_loses_no_lease(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, service), contextlib.closing(Channel(url)) as client:
        assert client.wait_connected(SECONDS)
        service.put("x", b"hello")
        futures = client.fetch("fails half-way", ["x"] * 4, [OBJECT_BYTES] * 4)
        for future in futures:
            with pytest.raises(OSError, match="broken"):
                future.result(SECONDS)
        service.loop.post(service.held_back.pop())
        until(lambda: not service.pins)
        assert client.request(Ping()).result(SECONDS) == Done()


def test_a_failure_while_a_client_is_greeted_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as (url, _, _), neighbour(url) as is_served:
        welcome = session.welcome
        failures = [RuntimeError("a mistake")]

        def fails(*args: object) -> None:
            if failures:
                raise failures.pop()
            welcome(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(session, "welcome", fails)
        hello = Hello(messages.PROTOCOL, os.urandom(16), 0)
        with pytest.raises(OSError, match="timed out"):
            session.connect(session.socket_path(url), hello, None, 0.2)
        is_served()
        with neighbour(url):
            pass


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@pytest.mark.parametrize("what", ["lock", "socket", "session", "all", "folder"])
def test_what_a_cleaner_deletes_at_the_socket_is_made_again(what: str, tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, _), raw(url) as old:
        path = Path(session.socket_path(url))
        names = {
            "lock": [".lock"],
            "socket": [""],
            "session": [".session"],
        }.get(what, ["", ".session", ".lock"])
        before = inodes(path.parent)
        gone = [path.with_name(path.name + name) for name in names]
        # No other file gets the inode of one that is linked elsewhere.
        for number, name in enumerate(gone):
            os.link(name, tmp_path / f"kept-{number}")
            name.unlink()
        if what == "folder":
            path.parent.rmdir()

        def is_there_again() -> bool:
            # A socket has a name a little before it listens.
            with contextlib.suppress(FileNotFoundError, UnavailableStorageError):
                after = inodes(path.parent)
                if before.keys() == after.keys() and all(
                    after[name.name] != before[name.name] for name in gone
                ):
                    RawClient(url).close()
                    return True
            return False

        until(is_there_again)
        with pytest.raises(ConfigError, match="runs already"):
            Loop(url)
        with raw(url) as new:
            for client in (old, new):
                client.send(Ping())
                assert client.receive() == (1, Done())
    assert os.listdir(path.parent) == [path.name + ".lock"]


def test_a_server_whose_place_was_taken_ends_and_leaves_it(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path / 'sockets' / 'server'}"
    first = Loop(url)
    # It is stopped meanwhile.
    for path in (tmp_path / "sockets").iterdir():
        path.unlink()
    arena = Arena(1 << 20, shared=True)
    second = Loop(url)
    with contextlib.closing(second), contextlib.closing(arena):
        before = inodes(tmp_path / "sockets")
        with contextlib.closing(first), pytest.raises(ConfigError, match="taken its place"):
            first.run(MemoryService(first, arena), arena, chunk_size=16)
        assert inodes(tmp_path / "sockets") == before
    assert os.listdir(tmp_path / "sockets") == ["server.lock"]


def test_a_server_whose_folder_cannot_be_made_serves_those_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError("the user's session is over")

    with serving(tmp_path) as (url, _, _), raw(url) as client:
        client.send(Ping())
        assert client.receive() == (1, Done())
        path = Path(session.socket_path(url))
        monkeypatch.setattr(os, "mkdir", refused)
        monkeypatch.setattr(os, "makedirs", refused)
        tried = threading.Semaphore(0)
        listener = session.Listener

        def count(path: str) -> session.Listener:
            tried.release()
            return listener(path)

        monkeypatch.setattr(session, "Listener", count)
        shutil.rmtree(path.parent)
        for _ in range(3):
            assert tried.acquire(timeout=SECONDS)
        client.send(Ping())
        assert client.receive() == (1, Done())
        monkeypatch.undo()
        until(path.with_name(path.name + ".session").exists)
        with raw(url) as new:
            new.send(Ping())
            assert new.receive() == (1, Done())
