"""A client's channel: requests, lent memory, and servers that hang, die and come back."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from kvshelf.errors import ConfigError, ObjectMissingError, UnavailableStorageError
from kvshelf.server import channel as channel_module
from kvshelf.server import messages
from kvshelf.server.channel import Channel
from kvshelf.server.connection import Leased
from kvshelf.server.messages import (
    Call,
    Done,
    Find,
    FoundSizes,
    LookedUp,
    LookUpChunks,
    Ping,
    Register,
    Result,
    Store,
    Stored,
)
from kvshelf.server.segment import Segment
from kvshelf.server.service import Service
from tests.server.node import LocalServer, serve
from tests.sim.storage import posix
from tests.support.fake_cudart import fake_cudart
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real

SIZE = 4096


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalServer]:
    with serve(tmp_path) as node:
        yield node


@contextlib.contextmanager
def connect(node: LocalServer, segment_bytes: int = 0) -> Iterator[Channel]:
    with contextlib.closing(Channel(node.url, segment_bytes=segment_bytes)) as channel:
        assert channel.wait_connected(PATIENCE)
        yield channel


def put(node: LocalServer, *words: str) -> list[str]:
    """Keep an object for each word in the server's memory; return their names."""
    names = [f"hash/{word}" for word in words]
    for word, name in zip(words, names, strict=True):
        node.put(name, word.encode().ljust(SIZE, b"\0"))
    return names


def fetch(channel: Channel, name: str) -> Leased:
    return channel.fetch("request", [name], [SIZE])[0].result(PATIENCE)


def word(leased: Leased) -> str:
    return bytes(leased.view).rstrip(b"\0").decode()


def ping(channel: Channel) -> None:
    assert channel.request(Ping()).result(PATIENCE) == Done()


def test_requests_get_their_answers(node: LocalServer) -> None:
    [name] = put(node, "hello")
    with connect(node, 1 << 20) as channel:
        found = channel.request(Find([name, "b"], [SIZE, 1])).result(PATIENCE)
        assert found == FoundSizes([SIZE, messages.MISSING])
        looked_up = channel.request(LookUpChunks("r", [name, "hash/b"], [1, 1]))
        assert looked_up.result(PATIENCE) == LookedUp(1)
        assert channel.welcome is not None
        assert channel.welcome.chunk_size == 256
        call = channel.request(Call("write", ["x", "create"], b"data"))
        assert call.result(PATIENCE) == Result("created")
        with pytest.raises(ConfigError):
            channel.request(Register(b"{}")).result(PATIENCE)


def test_lent_memory_is_the_servers_and_is_given_back(node: LocalServer) -> None:
    [name] = put(node, "hello")
    with connect(node) as channel:
        lent, missing = channel.fetch("r", [name, "hash/b"], [SIZE] * 2)
        with pytest.raises(ObjectMissingError, match="hash/b"):
            missing.result(PATIENCE)
        leased = lent.result(PATIENCE)
        assert word(leased) == "hello"
        assert len(leased.view) == SIZE
        assert leased.view.readonly
        assert leased.valid()
        assert node.leases == 1
        leased.release()
        leased.release()
        until(lambda: not node.leases)


def test_fetch_that_is_answered_in_parts_leaves_no_answer_open(tmp_path: Path) -> None:
    # A client may hold one of these.
    with (
        LocalServer(tmp_path / "node", posix(tmp_path / "shelf"), 3 * SIZE) as node,
        connect(node) as channel,
    ):
        parts = channel.fetch("r", put(node, "first", "second"), [SIZE] * 2)
        for part in parts:
            part.result(PATIENCE).release()
        connection = channel._connection
        until(lambda: connection is not None and connection.open == 0)


def test_stored_bytes_lie_in_the_segment(node: LocalServer) -> None:
    segment = Segment(64 << 10, regions=4096)
    region = segment.take_region(5)
    assert region is not None
    # It outlives channels.
    for name in ("hash/a", "hash/b"):
        with contextlib.closing(Channel(node.url, segment=segment)) as channel:
            assert channel.wait_connected(PATIENCE)
            region.view[:] = b"hello"
            checksum = xxhash.xxh3_64_intdigest(b"hello")
            store = Store(name, region.offset, 5, memory_only=True, checksum=checksum)
            assert channel.request(store).result(PATIENCE) == Stored("created")
            [lent] = channel.fetch("r", [name], [5])
            assert word(lent.result(PATIENCE)) == "hello"
            for offset, nbytes in ((0, (68 << 10) + 1), (68 << 10, 1), (1 << 40, 1)):
                with pytest.raises(OSError, match="segment of 69632"):
                    channel.request(Store("a", offset, nbytes)).result(PATIENCE)
    assert segment.fd is not None
    region.release()
    segment.close()
    assert segment.fd is None


def test_failure_of_the_service_ends_one_request(
    node: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the service is broken")

    monkeypatch.setattr(node.service, "find", fail)
    with connect(node) as channel:
        with pytest.raises(OSError, match="the service is broken"):
            channel.request(Find([], [])).result(PATIENCE)
        ping(channel)


def test_leases_that_nobody_wants_are_given_back(node: LocalServer) -> None:
    names = put(node, *map(str, range(64)))
    with connect(node) as channel:
        with node.hanging():
            cancelled = channel.fetch("r", names[:2], [SIZE] * 2)
            dropped = channel.fetch("r", names[2:3], [SIZE])
            assert cancelled[0].cancel()
        cancelled[1].result(PATIENCE).release()
        dropped[0].result(PATIENCE)
        del dropped
        gc.collect()
        # The quota of the service is not reached, however often this is done.
        for _ in range(40):
            futures = channel.fetch("r", names, [SIZE] * len(names))
            wait(futures, PATIENCE)
            del futures
        ping(channel)
        until(lambda: not node.leases)


def test_callbacks_at_a_connection_send_first(
    node: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[bytes] = []
    monkeypatch.setattr(node.service, "register", records.append)
    with contextlib.closing(Channel(node.url)) as channel:
        channel.on_connect(lambda _: channel.request(Register(b"first")) and None)
        assert channel.wait_connected(PATIENCE)
        channel.request(Register(b"second")).result(PATIENCE)
        late: list[object] = []
        channel.on_connect(late.append)
        assert late == [channel.welcome]
    assert records == [b"first", b"second"]


def test_server_after_a_restart_learns_the_namespaces_in_use_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [b"%d" % number for number in range(1500)]
    registered: list[bytes] = []
    monkeypatch.setattr(Service, "register", lambda _, record: registered.append(record))
    with contextlib.ExitStack() as stack:
        with serve(tmp_path) as node:
            channel = stack.enter_context(connect(node))
            # The second is in use until the end.
            for place, record in enumerate(records):
                channel.register(record)
                channel.register(records[1])
                if place % 100 == 99:
                    # Only so many messages may wait.
                    ping(channel)
            assert registered == records
        until(lambda: not channel.connected)
        registered.clear()
        with serve(tmp_path):
            assert channel.wait_connected(PATIENCE)
            ping(channel)
            assert registered == [records[1], *records[:-16:-1]]


def test_without_a_server_requests_fail_at_once(tmp_path: Path) -> None:
    with contextlib.closing(Channel(f"ipc://{tmp_path}/node/node.sock")) as channel:
        assert not channel.connected
        with pytest.raises(UnavailableStorageError, match="not connected"):
            channel.request(Ping()).result(0)
        with pytest.raises(UnavailableStorageError):
            channel.fetch("r", ["a"], [1])[0].result(0)
        with serve(tmp_path):
            assert channel.wait_connected(PATIENCE)
            ping(channel)
    with pytest.raises(UnavailableStorageError, match="closed"):
        channel.request(Ping()).result(0)
    with pytest.raises(ConfigError):
        Channel("tcp://127.0.0.1:1")


def test_server_that_dies_fails_what_waits_and_is_found_again(tmp_path: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:")

    connections: list[object] = []
    with contextlib.ExitStack() as stack:
        with serve(tmp_path) as node:
            [name] = put(node, "old")
            channel = stack.enter_context(connect(node))
            channel.on_connect(connections.append)
            lent = fetch(channel, name)
            with node.hanging():
                waits = channel.request(Ping())
                node.loop.stop()
        with pytest.raises(UnavailableStorageError, match="gone"):
            waits.result(PATIENCE)
        until(lambda: not channel.connected)
        # Its memory stays as long as somebody has it.
        before = mappings()
        assert word(lent) == "old"
        lent.release()
        del lent
        until(lambda: mappings() < before)
        with serve(tmp_path) as node:
            assert channel.wait_connected(PATIENCE)
            assert len(connections) == 2
            [name] = put(node, "new")
            again = fetch(channel, name)
            assert again.valid()
            assert word(again) == "new"
            again.release()
            del again


def test_memory_of_each_server_is_page_locked_as_long_as_anything_of_it_is_lent(
    tmp_path: Path,
) -> None:
    with fake_cudart() as runtime, contextlib.ExitStack() as stack, serve(tmp_path) as node:
        channel = stack.enter_context(connect(node))
        assert not channel.page_locked
        for _ in range(2):
            channel.page_lock(torch.device("cuda", 0))
        for server in (node, None):
            server = server or stack.enter_context(serve(tmp_path))
            until(lambda: channel.connected and channel.page_locked)
            lent = fetch(channel, put(server, "hello")[0])
            assert runtime.holds(lent.view)
            server.close()
            until(lambda: not channel.connected)
            assert not channel.page_locked
            assert runtime.holds(lent.view)
            lent.release()
            del lent
            until(lambda: not runtime.registered)


def test_memory_that_cannot_be_page_locked_is_lent_all_the_same(
    node: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    """As on GPUs that lock no memory which is mapped for reading only."""
    [name] = put(node, "hello")
    with fake_cudart() as runtime, connect(node) as channel:
        runtime.reads_only = False
        channel.page_lock(torch.device("cuda", 0))
        until(lambda: "operation not supported" in caplog.text)
        assert not channel.page_locked
        assert word(fetch(channel, name)) == "hello"


def test_page_locked_segment_is_unlocked_when_its_last_room_is_back() -> None:
    with fake_cudart() as runtime:
        segment = Segment(1 << 20)
        for _ in range(2):
            segment.page_lock(torch.device("cuda", 0))
        room = segment.reserve(5000)
        assert room is not None
        assert runtime.holds(room.view)
        segment.close()
        assert segment.reserve(1) is None
        # A GPU may still copy to it.
        assert runtime.holds(room.view)
        room.release()
        assert not runtime.registered


def test_server_that_hangs_blocks_nobody(node: LocalServer) -> None:
    with connect(node) as channel:
        with node.hanging():
            # Many more than are allowed, and large ones: none waits for the server.
            large = Find(["x" * 500] * 1000, [])
            futures: list[Future[Any]] = [channel.request(large) for _ in range(300)]
            for _ in range(5):
                futures += channel.fetch("r", ["1"] * messages.MAX_NAMES, [1] * messages.MAX_NAMES)
            assert not futures[0].done()
            with pytest.raises(UnavailableStorageError, match="has not answered"):
                futures[-1].result(0)
        wait(futures, PATIENCE)
        ping(channel)
        with node.hanging():
            waits = channel.request(Ping())
            channel.close()
            with pytest.raises(UnavailableStorageError, match="closed"):
                waits.result(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_uses_nothing_of_its_parents_channel(
    node: LocalServer, tmp_path: Path
) -> None:
    [name] = put(node, "hello")
    noted = tmp_path / "child"
    parent = multiprocessing.get_context("spawn").Process(
        target=_fork, args=(node.url, name, noted)
    )
    parent.start()
    try:
        until(lambda: parent.exitcode is not None)
        assert parent.exitcode == 0
        # The child still lives, and the server has seen the end of its parent.
        until(lambda: not node.leases)
        assert node.loop.stats()["clients"] == 0
    finally:
        os.kill(int(noted.read_text()), signal.SIGKILL)


def _fork(url: str, name: str, noted: Path) -> None:
    client = Channel(url, segment_bytes=4096)
    assert client.wait_connected(PATIENCE)
    lent = fetch(client, name)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        problem = 1
        with contextlib.suppress(BaseException):
            assert not client.connected
            assert not lent.valid()
            lent.release()
            assert client.segment is None
            with pytest.raises(UnavailableStorageError):
                client.request(Ping()).result(0)
            problem = 0
        os.write(write, bytes([problem]))
        os.close(write)
        signal.pause()
    noted.write_text(str(child))
    assert os.read(read, 1) == b"\0"
    # The child's release was none of this process.
    ping(client)
    assert lent.valid()
    assert word(lent) == "hello"
    os._exit(0)


def test_threads_that_share_channels_lose_no_lease(node: LocalServer) -> None:
    names = put(node, *map(str, range(64)))
    problems: list[BaseException] = []

    def work(channel: Channel, seed: int) -> None:
        chance = random.Random(seed)
        lent: list[Leased] = []
        try:
            for _ in range(300):
                session = str(chance.randrange(3))
                some = chance.sample(names, chance.randint(1, 8))
                match chance.choice(["fetch", "fetch", "release", "cancel", "look up", "end"]):
                    case "fetch":
                        futures = channel.fetch(session, some, [SIZE] * len(some))
                        for name, future in zip(some, futures, strict=True):
                            lent.append(future.result(PATIENCE))
                            assert word(lent[-1]) == name.removeprefix("hash/")
                    case "cancel":
                        channel.fetch(session, some[:1], [SIZE])[0].cancel()
                    case "look up":
                        request = LookUpChunks(session, some, [1] * len(some))
                        channel.request(request).result(PATIENCE)
                    case "end":
                        channel.end_session(session)
                chance.shuffle(lent)
                while len(lent) > 20:
                    assert lent[-1].valid()
                    lent.pop().release()
            for session in "012":
                channel.end_session(session)
        except BaseException as error:  # noqa: BLE001
            problems.append(error)
        for leased in lent:
            leased.release()

    with connect(node) as one, connect(node) as other:
        threads = [
            threading.Thread(target=work, args=(channel, seed))
            for seed in range(3)
            for channel in (one, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        until(lambda: not node.leases)
        assert node.service.stats()["pinned_bytes"] == 0


def test_descriptors_that_run_out_end_no_channel(
    node: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = channel_module.zmq.Context
    failures = [OSError(24, "Too many open files"), channel_module.zmq.ZMQError(24)]

    def fails() -> object:
        if failures:
            raise failures.pop()
        return context()

    monkeypatch.setattr(channel_module.zmq, "Context", fails)
    with connect(node) as channel:
        assert not failures
        ping(channel)
