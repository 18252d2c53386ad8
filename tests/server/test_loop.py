"""Messages that no client of ours sends: refused, without effect on others, in bounded memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import zmq

from kvshelf.errors import ConfigError, TransientStorageError, UnavailableStorageError
from kvshelf.memory.arena import Arena
from kvshelf.server import answers, greetings, messages, session
from kvshelf.server.channel import Channel
from kvshelf.server.loop import Loop
from kvshelf.server.messages import (
    Call,
    Done,
    Failed,
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
    Result,
)
from tests.server.node import LocalServer, serve
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real


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
            self.session, welcome, _ = session.connect(path, hello, None, PATIENCE)
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

    def receive(self, seconds: float = PATIENCE) -> tuple[int, Reply] | None:
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

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def neighbour(url: str) -> Iterator[Callable[[], None]]:
    """Give a function that shows that another client is served."""
    with contextlib.closing(Channel(url)) as client:
        assert client.wait_connected(PATIENCE)

        def is_served() -> None:
            assert client.request(Find(["a"], [1])).result(PATIENCE) == FoundSizes([-1])

        is_served()
        yield is_served
        is_served()
        assert client.connected


def hold_calls(node: LocalServer, monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., None]]:
    """Answer no call of the storage; return what takes their answers."""
    held: list[Callable[..., None]] = []
    monkeypatch.setattr(node.service, "call", lambda *call: held.append(call[-1]))
    return held


def answer_much(node: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer each call of the storage by a mebibyte."""
    large = Result(bytes(1 << 20))
    monkeypatch.setattr(node.service, "call", lambda *call: call[-1](large))


def test_without_a_session_nothing_is_answered(tmp_path: Path) -> None:
    with (
        serve(tmp_path) as node,
        RawClient(node.url, greet=False) as stranger,
        neighbour(node.url),
    ):
        for token in (bytes(16), os.urandom(16)):
            stranger.send(Ping(), token=token)
        until(lambda: node.loop.stats()["refused"] == 2)
        assert stranger.receive(0) is None
        assert node.loop.stats()["clients"] == 1


def test_wrong_token_is_refused(tmp_path: Path) -> None:
    with serve(tmp_path) as node, RawClient(node.url) as one, RawClient(node.url) as other:
        one.send(Ping(), token=bytes(16))
        one.send(Ping(), token=other.token)
        until(lambda: node.loop.stats()["refused"] == 2)
        one.send(Ping(), number=7)
        assert one.receive() == (7, Done())


def test_session_of_another_client_cannot_be_used(tmp_path: Path) -> None:
    with serve(tmp_path) as node, RawClient(node.url) as mine:
        mine.send(Ping())
        assert mine.receive() == (1, Done())
        # With the same id, the second connection is refused by ZMQ.
        with RawClient(node.url, greet=False, client=mine.client) as thief:
            thief.send(Ping(), token=bytes(16))
            mine.send(Ping(), number=2)
            assert mine.receive() == (2, Done())
            assert thief.receive(0) is None
        assert node.loop.stats()["clients"] == 1


def test_id_that_a_stranger_uses_gives_way_to_another(tmp_path: Path) -> None:
    with serve(tmp_path) as node, RawClient(node.url, greet=False) as stranger:
        stranger.send(Ping())
        with neighbour(node.url):
            pass


def test_leases_of_others_cannot_be_ended(tmp_path: Path) -> None:
    with serve(tmp_path) as node, RawClient(node.url) as one, RawClient(node.url) as other:
        node.put("hash/x", b"hello")
        one.send(Fetch("r", ["hash/x"], [5]))
        received = one.answer()
        assert isinstance(received[1], Fetched)
        (ready,) = received[1].outcomes
        assert isinstance(ready, Ready)
        other.send(Release([ready.lease, 0, 2**64 - 1]))
        other.send(Ping())
        assert other.receive() == (1, Done())
        assert node.leases == 1
        one.send(Release([ready.lease, ready.lease]))
        one.send(Ping())
        assert one.receive() == (1, Done())
        assert not node.leases


def test_malformed_requests_are_answered_by_a_fault(tmp_path: Path) -> None:
    with serve(tmp_path) as node, neighbour(node.url), RawClient(node.url) as client:
        bodies = [
            b"",
            b"\xc1",
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
        assert not node.service.stats()["objects"]
        assert node.loop.stats()["clients"] == 2


def test_what_is_no_request_at_all_is_dropped(tmp_path: Path) -> None:
    with serve(tmp_path) as node, neighbour(node.url), RawClient(node.url) as client:
        frame = messages.encode_request(client.token, 1, Ping())
        client.socket.send(b"")
        client.socket.send(client.token)
        client.socket.send_multipart([frame, frame])
        client.socket.send_multipart([b""] * 1000)
        until(lambda: node.loop.stats()["refused"] == 4)
        client.send(Ping(), number=5)
        assert client.receive() == (5, Done())


def test_frames_over_the_limit_end_the_connection(tmp_path: Path) -> None:
    with serve(tmp_path) as node, neighbour(node.url), RawClient(node.url) as client:
        monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        client.socket.send(client.token + bytes(messages.MAX_REQUEST))
        assert monitor.poll(int(PATIENCE * 1000))
        monitor.close()
        assert node.loop.stats()["requests"] == 2


def test_requests_without_an_answer_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_OPEN", 10)
    with serve(tmp_path) as node, neighbour(node.url), RawClient(node.url) as client:
        held = hold_calls(node, monkeypatch)
        for number in range(1, 11):
            client.send(Call("read", ["never"]), number)
        client.send(Ping(), 11)
        answer = client.answer()
        assert answer[0] == 11
        assert isinstance(answer[1], Fault)
        assert "10 answers" in answer[1].text
        until(lambda: len(held) == 10)
        node.loop.post(lambda: held.pop()(Done()))
        received = client.answer()
        assert received[1] == Done()
        client.send(Ping(), 12)
        assert client.receive() == (12, Done())
        # What is answered after the client is gone goes nowhere.
        client.close()
        until(lambda: node.loop.stats()["clients"] == 1)
        for answer_late in held:
            node.loop.post(partial(answer_late, Done()))


def test_bytes_of_requests_without_an_answer_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call("write", ["never"], bytes(messages.MAX_INLINE))
    with serve(tmp_path) as node, neighbour(node.url), RawClient(node.url) as client:
        held = hold_calls(node, monkeypatch)
        # With what is around each, the 64th is more than 64 MiB.
        for number in range(1, 65):
            client.send(call, number)
        received = client.answer()
        assert received[0] == 64
        assert isinstance(received[1], Fault)
        assert received[1].kind == "TransientStorageError"
        assert len(held) == 63
        # An answer makes room for one more.
        node.loop.post(lambda: held.pop()(Done()))
        received = client.answer()
        assert received[1] == Done()
        client.send(call, 65)
        until(lambda: len(held) == 63)


def test_fetch_counts_until_its_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path) as node, neighbour(node.url), RawClient(node.url) as client:
        node.put("hash/x", b"hello")
        fetch = Fetch("r", ["hash/x"] * 10, [5] * 10)
        most = len(messages.encode_request(client.token, 1, fetch))
        monkeypatch.setattr(answers, "MAX_OPEN_BYTES", most)
        # One of no objects has no answer.
        client.send(Fetch("r", [], []), 9)
        for number in range(1, 4):
            client.send(fetch, number)
            received = client.answer()
            assert isinstance(received[1], Fetched)
            assert len(received[1].outcomes) == 10


def test_fetch_that_is_answered_in_parts_counts_until_its_last_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answers, "MAX_OPEN", 3)
    monkeypatch.setattr(answers, "MAX_OPEN_BYTES", 10)
    client = answers.Answers(mock.Mock(), set(), mock.Mock(), mock.Mock())
    outcomes = [Failed(index, Fault("StorageError", "")) for index in range(3)]
    fetch = client.begin(1, 3, 10)
    fetch.each(outcomes[:1])
    with pytest.raises(TransientStorageError, match="2 answers"):
        client.begin(2, 1, 1)
    client.begin(3, 1, 0)
    with pytest.raises(TransientStorageError, match="3 answers"):
        client.begin(4, 1, 0)
    fetch.each(outcomes[1:])
    client.begin(5, 2, 10)


def test_client_that_does_not_read_loses_its_session_and_nothing_else_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path) as node, neighbour(node.url) as is_served:
        answer_much(node, monkeypatch)
        node.put("hash/x", b"hello")
        with RawClient(node.url, queue=1) as slow:
            slow.send(Fetch("r", ["hash/x"], [5]))
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
            assert node.leases == 1
            assert node.loop.stats()["clients"] == 2
        until(lambda: node.loop.stats()["clients"] == 1)
        assert not node.leases


def test_many_answers_at_once_reach_a_client_that_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path) as node, contextlib.closing(Channel(node.url)) as client:
        answer_much(node, monkeypatch)
        assert client.wait_connected(PATIENCE)
        # ZMQ keeps 64, and the loop 16 MiB more, however late the client reads.
        futures = [client.request(Call("read", ["large"])) for _ in range(75)]
        for future in futures:
            assert len(future.result(PATIENCE).value) == 1 << 20  # type: ignore[union-attr]


def test_connections_that_say_nothing_are_bounded_and_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greetings, "_GREETING_SECONDS", 0.5)
    with serve(tmp_path) as node, neighbour(node.url) as is_served:
        path = session.socket_path(node.url) + ".session"
        silent = []
        for _ in range(greetings._MAX_GREETING + 5):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(PATIENCE)
            connection.connect(path)
            silent.append(connection)
        is_served()
        for connection in silent:
            connection.recv(4096)
            connection.close()
        with neighbour(node.url):
            pass


def test_sessions_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greetings, "MAX_SESSIONS", 2)
    with serve(tmp_path) as node, neighbour(node.url), RawClient(node.url):
        hello = Hello(messages.PROTOCOL, os.urandom(16), 0)
        with pytest.raises(session.SessionError, match="2 clients already"):
            session.connect(session.socket_path(node.url), hello, None, PATIENCE)


def test_descriptors_that_run_out_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path) as node, neighbour(node.url) as is_served:
        problems = [OSError(24, "Too many open files")] * 2
        accept = session.Listener.accept
        tried = threading.Event()

        def fails(self: session.Listener) -> socket.socket | None:
            tried.set()
            if problems:
                raise problems.pop()
            return accept(self)

        monkeypatch.setattr(session.Listener, "accept", fails)
        with RawClient(node.url) as client:
            assert tried.is_set()
            is_served()
            client.send(Ping())
            assert client.receive() == (1, Done())
        assert not problems


def test_fetch_that_fails_half_way_loses_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path) as node, contextlib.closing(Channel(node.url)) as client:
        assert client.wait_connected(PATIENCE)
        node.put("hash/x", b"hello")
        fetch, rest = node.service.fetch, list[Callable[[], None]]()

        def fails(client: bytes, request: Fetch, each: Callable[..., None]) -> None:
            outcomes: list[Ready | Failed] = []
            fetch(client, request, outcomes.extend)
            rest.append(lambda: each(outcomes[2:]))
            each(outcomes[:2])
            raise RuntimeError("the service is broken")

        monkeypatch.setattr(node.service, "fetch", fails)
        for future in client.fetch("s", ["hash/x"] * 4, [5] * 4):
            with pytest.raises(OSError, match="broken"):
                future.result(PATIENCE)
        node.loop.post(rest.pop())
        until(lambda: not node.leases)
        assert client.request(Ping()).result(PATIENCE) == Done()


def test_failure_while_a_client_is_greeted_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(tmp_path) as node, neighbour(node.url) as is_served:
        welcome = session.welcome
        failures = [RuntimeError("a mistake")]

        def fails(*args: object) -> None:
            if failures:
                raise failures.pop()
            welcome(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(session, "welcome", fails)
        hello = Hello(messages.PROTOCOL, os.urandom(16), 0)
        with pytest.raises(OSError, match="timed out"):
            session.connect(session.socket_path(node.url), hello, None, 0.2)
        is_served()
        with neighbour(node.url):
            pass


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@pytest.mark.parametrize("what", ["lock", "socket", "session", "all", "folder"])
def test_what_a_cleaner_deletes_at_the_socket_is_made_again(what: str, tmp_path: Path) -> None:
    with serve(tmp_path) as node, RawClient(node.url) as old:
        path = Path(session.socket_path(node.url))
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
                    RawClient(node.url).close()
                    return True
            return False

        until(is_there_again)
        with pytest.raises(ConfigError, match="runs already"):
            Loop(node.url)
        with RawClient(node.url) as new:
            for client in (old, new):
                client.send(Ping())
                assert client.receive() == (1, Done())
    assert os.listdir(path.parent) == [path.name + ".lock"]


def test_server_whose_place_was_taken_ends_and_leaves_it(tmp_path: Path) -> None:
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
            first.run(mock.Mock(), arena, chunk_size=16)
        assert inodes(tmp_path / "sockets") == before
    assert os.listdir(tmp_path / "sockets") == ["server.lock"]


def test_server_whose_folder_cannot_be_made_serves_those_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError("the user's session is over")

    with serve(tmp_path) as node, RawClient(node.url) as client:
        client.send(Ping())
        assert client.receive() == (1, Done())
        path = Path(session.socket_path(node.url))
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
            assert tried.acquire(timeout=PATIENCE)
        client.send(Ping())
        assert client.receive() == (1, Done())
        monkeypatch.undo()
        until(path.with_name(path.name + ".session").exists)
        with RawClient(node.url) as new:
            new.send(Ping())
            assert new.receive() == (1, Done())
