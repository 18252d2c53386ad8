"""A client that sends anything at all to ``kvshelf serve``, and changes its memory all the time."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from kvshelf.memory.arena import Arena
from kvshelf.server import protocol
from kvshelf.server.listener import socket_path
from kvshelf.server.protocol import (
    Delete,
    EndSession,
    Fetch,
    Find,
    GiveBack,
    Hello,
    Lock,
    Message,
    Read,
    Register,
    Reply,
    Stat,
    Store,
    Touch,
)
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
MEMORY_BYTES = 1 << 20


class Hostile:
    """Requests by chance: of the right form, of nearly the right form, and of none."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.offsets: list[int] = []

    def name(self) -> str:
        name = self.chance.choice(NAMES)
        kind = self.chance.randrange(5)
        if kind == 0:
            return self.chance.choice(UNSAFE)
        if kind == 1:
            place = self.chance.randrange(len(name))
            return name[:place] + self.chance.choice("/.-0aZ\n") + name[place + 1 :]
        return name

    def names(self) -> list[str]:
        return [self.name() for _ in range(self.chance.choice([0, 1, 1, 2, 5, 40]))]

    def request(self) -> Message:
        chance, number = self.chance, self.chance.randrange(1 << 40)
        size = chance.choice([SIZE, SIZE, SIZE, 0, 1, SIZE - 1, MEMORY_BYTES, 1 << 45])
        store = Store(
            number,
            self.name(),
            chance.choice([0, 4096, MEMORY_BYTES - 1, 1 << 45]),
            size,
            chance.random() < 0.2,
        )
        # What changes the shelf is a client's right; only names that are none are of interest.
        record = chance.choice([b"{}", b"null", b"\xff", chance.randbytes(100)])
        return chance.choice(
            [
                Find(number, self.names()),
                Fetch(number, self.names(), chance.random() < 0.5),
                GiveBack([chance.choice([0, 1, 1 << 45, *self.offsets[-9:]]) for _ in range(5)]),
                Lock(chance.choice("ab"), self.names()),
                EndSession(chance.choice("ab"), self.names()),
                Register(number, record, chance.choice(UNSAFE), chance.random() < 0.5),
                Read(number, self.name()),
                Stat(number, [chance.choice([*UNSAFE, self.name()])]),
                Delete(number, [chance.choice(UNSAFE)]),
                Touch(number, chance.choice(UNSAFE), chance.choice([0.0, -1.5, 1e300])),
                store,
            ]
        )

    def frame(self) -> bytes:
        """A frame that is one, though its body may not be a request."""
        body = bytearray(protocol.frame(self.request())[4:])
        if self.chance.randrange(200) == 0:
            body[self.chance.randrange(len(body))] = self.chance.randrange(256)
        return struct.pack("<I", len(body)) + body


class Stream:
    """The hostile client's stream, made anew whenever the server serves it no further."""

    def __init__(self, url: str, arena: Arena) -> None:
        self.path = socket_path(url)
        self.arena = arena
        self.connections = 0
        self.connect()

    def connect(self) -> None:
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.stream.settimeout(60)
        self.stream.connect(self.path)
        assert self.arena.fd is not None
        hello = protocol.frame(Hello(protocol.PROTOCOL, MEMORY_BYTES))
        socket.send_fds(self.stream, [hello], [self.arena.fd])
        self.received = bytearray()
        self.is_open = True
        self.connections += 1

    def send(self, data: bytes) -> None:
        try:
            self.stream.sendall(data)
        except (ConnectionError, TimeoutError):
            self.is_open = False

    def receive(self, hostile: Hostile) -> None:
        """Read what is there, and note what was lent."""
        self.stream.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while data := self.stream.recv(1 << 16):
                self.received += data
            self.is_open = False
        self.stream.settimeout(60)
        for body in protocol.take_frames(self.received):
            with contextlib.suppress(protocol.MalformedError):
                reply = protocol.decode(protocol.REPLIES, body)
                if isinstance(reply, Reply) and isinstance(reply.value, list):
                    hostile.offsets += [v for v in reply.value if type(v) is int and v > 0]


def anonymous_memory(pid: int) -> int:
    """Bytes of a process that are its own: neither files nor shared memory."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) << 10


@pytest.mark.parametrize(
    "seconds", [0.0, pytest.param(600.0, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_requests_of_a_hostile_client_change_nothing_for_another(
    seconds: float, tmp_path: Path
) -> None:
    """Ten thousand of them; as a slow test for ten minutes, or TEST_SECONDS."""
    if seconds:
        seconds = float(os.environ.get("TEST_SECONDS", seconds))
    shelf = tmp_path / "shelf"
    for chunk in CHUNKS[:COUNT]:
        put(shelf, FMT, chunk)
    with (
        ServeProcess(shelf, tmp_path / "sockets" / "node.sock", "4MiB") as server,
        contextlib.closing(Client(server.url, FMT)) as other,
        contextlib.closing(Arena(MEMORY_BYTES, shared=True)) as arena,
    ):

        def other_is_served() -> None:
            loans = other.fetch(NAMES[:COUNT], [SIZE] * COUNT)
            assert len(loans) == COUNT
            for loan, chunk in zip(loans, CHUNKS, strict=False):
                assert bytes(loan.view) == sealed(FMT, chunk)
                loan.release()

        other_is_served()
        before = anonymous_memory(server.process.pid)
        stream, hostile = Stream(server.url, arena), Hostile(random.Random(7))
        over = threading.Event()

        def change_memory() -> None:
            right = sealed(FMT, CHUNKS[COUNT])
            while not over.wait(0.0005):
                arena.view[: len(right)] = right
                arena.view[len(right) // 2] ^= 1

        changes = threading.Thread(target=change_memory)
        changes.start()
        end, count = time.monotonic() + seconds, 0
        try:
            while count < 10_000 or time.monotonic() < end:
                stream.send(hostile.frame())
                stream.receive(hostile)
                if not stream.is_open:
                    stream.stream.close()
                    stream.connect()
                count += 1
                if count % 2000 == 0:
                    other_is_served()
        finally:
            over.set()
            changes.join()
            stream.stream.close()
        assert hostile.offsets
        assert stream.connections > 1
        other_is_served()
        until(lambda: server.metrics()["clients"] == 1)
        until(lambda: server.metrics()["pinned_bytes"] == 0)
        assert server.metrics()["lent_bytes"] == 0
        assert anonymous_memory(server.process.pid) < before + (64 << 20)
        assert server.process.poll() is None
    for chunk, name in zip(CHUNKS[:COUNT], NAMES[:COUNT], strict=True):
        assert (shelf / name).read_bytes() == sealed(FMT, chunk)
    # One that is not right was never published, however often it nearly was.
    for chunk, name in zip(CHUNKS[COUNT:], NAMES[COUNT:], strict=True):
        if (shelf / name).exists():
            assert (shelf / name).read_bytes() == sealed(FMT, chunk)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["shelf", "sockets"]
