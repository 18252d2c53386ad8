"""A client that sends anything at all to ``kvshelf serve``, and changes its memory all the time."""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
from pathlib import Path

import pytest
import zmq

from kvshelf.server import messages, session
from kvshelf.server.messages import (
    Call,
    EndSession,
    Fetch,
    Fetched,
    Find,
    Hello,
    LookUpChunks,
    Ping,
    Ready,
    Register,
    Release,
    Request,
    Store,
)
from kvshelf.server.segment import Segment
from tests.server.client_child import FMT, SIZE
from tests.server.desk import name_of, put
from tests.server.serve_process import Client, ServeProcess
from tests.support.formats import sealed
from tests.support.prompts import make_chunks
from tests.support.waiting import until

pytestmark = pytest.mark.real

COUNT = 32
CHUNKS = make_chunks(FMT, 2 * COUNT)
NAMES = [name_of(FMT, chunk) for chunk in CHUNKS]
UNSAFE = ["..", "../x", "/etc/passwd", "a/../../b", "a//b", "\0", "a\\b", "ü", "."]
SEGMENT_BYTES = 1 << 20


class Hostile:
    """Requests by chance: of the right form, of nearly the right form, and of none."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.leases: list[int] = []

    def name(self) -> str:
        name = self.chance.choice(NAMES)
        kind = self.chance.randrange(6)
        if kind == 0:
            return self.chance.choice(UNSAFE)
        if kind == 1:
            place = self.chance.randrange(len(name))
            return name[:place] + self.chance.choice("/.-0aZ\n") + name[place + 1 :]
        if kind == 2:
            return f"hash/{name}"
        return name

    def names(self) -> list[str]:
        return [self.name() for _ in range(self.chance.choice([0, 1, 1, 2, 5, 40]))]

    def size(self) -> int:
        return self.chance.choice([SIZE, SIZE, SIZE, 0, 1, SIZE - 1, SEGMENT_BYTES, 1 << 47])

    def request(self) -> Request:
        chance = self.chance
        names = self.names()
        sizes = [self.size() for _ in range(max(0, len(names) + chance.choice([0, 0, 0, -1, 1])))]
        store = Store(
            self.name(),
            chance.choice([0, 4096, SEGMENT_BYTES - 1, 1 << 47]),
            self.size(),
            chance.choice(["create", "replace"]),
            chance.random() < 0.2,
            chance.choice([None, 0, 2**64 - 1]),
        )
        # What changes the shelf is a client's right; only names that are none are of interest.
        unsafe = Call(
            chance.choice(["delete", "set_aside", "touch", "space"]),
            [chance.choice(UNSAFE), chance.choice([0, -1, 1.5, "x", None])],
        )
        call = Call(
            chance.choice(["stat", "info", "list", "read", "folders"]),
            [
                chance.choice([self.name(), names, None, -1, 2**62, 1e300, True, ""])
                for _ in range(chance.randrange(4))
            ],
        )
        leases = [chance.choice([0, 1, 2**64 - 1, *self.leases[-9:]]) for _ in range(5)]
        return chance.choice(
            [
                Find(names, sizes),
                Fetch(chance.choice("ab"), names, sizes),
                LookUpChunks(chance.choice("ab"), names, [chance.choice([0, 1, 9, 2**48])] * 3),
                Release(leases),
                EndSession(chance.choice("ab")),
                Register(chance.choice([b"{}", b"null", b"\xff", chance.randbytes(100)])),
                store,
                unsafe,
                call,
            ]
        )

    def frame(self, token: bytes) -> bytes:
        frame = bytearray(messages.encode_request(token, 1, self.request()))
        kind = self.chance.randrange(12)
        if kind == 0:
            del frame[self.chance.randrange(len(frame)) :]
        elif kind == 1:
            frame[self.chance.randrange(24, len(frame))] = self.chance.randrange(256)
        elif kind == 2:
            frame[self.chance.randrange(16)] ^= 1
        return bytes(frame)


def anonymous_memory(pid: int) -> int:
    """Bytes of a process that are its own: neither files nor shared memory."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


def test_ten_thousand_requests_of_a_hostile_client_change_nothing_for_another(
    tmp_path: Path,
) -> None:
    shelf = tmp_path / "shelf"
    for chunk in CHUNKS[:COUNT]:
        put(shelf, FMT, chunk)
    with (
        ServeProcess(shelf, tmp_path / "sockets" / "node.sock", "4MiB") as server,
        contextlib.closing(Client(server.url, FMT)) as other,
        contextlib.closing(Segment(SEGMENT_BYTES)) as segment,
    ):

        def other_is_served() -> None:
            lent = other.fetch(NAMES[:COUNT], [SIZE] * COUNT)
            for leased, chunk in zip(lent, CHUNKS, strict=False):
                assert bytes(leased.view) == sealed(FMT, chunk)
                assert leased.valid()
                leased.release()

        other_is_served()
        before = anonymous_memory(server.process.pid)
        hello = Hello(messages.PROTOCOL, os.urandom(16), SEGMENT_BYTES)
        path = session.socket_path(server.url)
        connection, welcome, _ = session.connect(path, hello, segment.fd, 30.0)
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, hello.client)
        dealer.connect(server.url)
        room = segment.reserve(SEGMENT_BYTES)
        assert room is not None
        over = threading.Event()

        def change_memory() -> None:
            right = sealed(FMT, CHUNKS[COUNT])
            while not over.wait(0.0005):
                room.view[: len(right)] = right
                room.view[len(right) // 2] ^= 1

        changes = threading.Thread(target=change_memory)
        changes.start()
        hostile = Hostile(random.Random(7))

        def read_answers(milliseconds: int) -> bool:
            while dealer.poll(milliseconds):
                number, reply = messages.decode_reply(memoryview(dealer.recv()))
                if isinstance(reply, Fetched):
                    hostile.leases += [o.lease for o in reply.outcomes if isinstance(o, Ready)]
                if number == 99:
                    return True
            return False

        try:
            for count in range(10_000):
                dealer.send(hostile.frame(welcome.token))
                read_answers(0)
                if count % 2000 == 0:
                    other_is_served()
            dealer.send(messages.encode_request(welcome.token, 99, Ping()))
            assert read_answers(60_000)
            assert not session.has_ended(connection)
        finally:
            over.set()
            changes.join()
            connection.close()
            context.destroy(linger=0)
        assert hostile.leases
        other_is_served()
        until(lambda: server.metrics()["clients"] == 1)
        until(lambda: server.metrics()["leases"] == 0)
        until(lambda: server.metrics()["pinned_bytes"] == 0)
        assert anonymous_memory(server.process.pid) < before + (64 << 20)
        assert server.process.poll() is None
    for chunk, name in zip(CHUNKS[:COUNT], NAMES[:COUNT], strict=True):
        assert (shelf / name).read_bytes() == sealed(FMT, chunk)
    # One that is not right was never published, however often it nearly was.
    for chunk, name in zip(CHUNKS[COUNT:], NAMES[COUNT:], strict=True):
        if (shelf / name).exists():
            assert (shelf / name).read_bytes() == sealed(FMT, chunk)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["shelf", "sockets"]
