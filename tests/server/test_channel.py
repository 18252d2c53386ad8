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
from tests.native.fake_cudart import fake_cudart
from tests.server.serving import (
    OBJECT_BYTES,
    SLOTS,
    serving,
    serving_process,
)
from tests.support.waiting import until

pytestmark = pytest.mark.real

SECONDS = 30.0


@contextlib.contextmanager
def channel(url: str, segment_bytes: int = 0) -> Iterator[Channel]:
    opened = Channel(url, segment_bytes=segment_bytes)
    try:
        assert opened.wait_connected(SECONDS)
        yield opened
    finally:
        opened.close()


def fetch(client: Channel, name: str) -> Leased:
    return client.fetch("request", [name], [OBJECT_BYTES])[0].result(SECONDS)


def ping(client: Channel) -> None:
    assert client.request(Ping()).result(SECONDS) == Done()


def test_requests_get_their_answers(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, service), channel(url, 1 << 20) as client:
        service.put("a", b"hello")
        assert client.request(Register(b"{}")).result(SECONDS) == Done()
        assert client.request(Find(["a", "b"], [])).result(SECONDS) == FoundSizes([4096, -1])
        assert client.request(LookUpChunks("r", ["a", "b"], [1, 1])).result(SECONDS) == LookedUp(1)
        assert client.welcome is not None
        assert client.welcome.chunk_size == 256
        call = client.request(Call("write", ["x", None, 1.5, ["y"]], b"data"))
        assert call.result(SECONDS) == Result(["write", ["x", None, 1.5, ["y"]], b"data"])
        thread = client.request(Call("read", ["thread"]))
        assert thread.result(SECONDS) == Result("from a thread")


def test_lent_memory_is_the_servers_and_is_given_back(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, service), channel(url) as client:
        service.put("a", b"hello")
        lent, missing = client.fetch("r", ["a", "b"], [OBJECT_BYTES] * 2)
        with pytest.raises(ObjectMissingError, match="b"):
            missing.result(SECONDS)
        leased = lent.result(SECONDS)
        assert bytes(leased.view[:5]) == b"hello"
        assert len(leased.view) == OBJECT_BYTES
        assert leased.view.readonly
        assert leased.valid()
        service.generations[0] += 1
        assert not leased.valid()
        assert service.pins.total() == 1
        leased.release()
        leased.release()
        until(lambda: not service.pins)


def test_stored_bytes_lie_in_the_segment(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, _), channel(url, 64 << 10) as client:
        assert client.segment is not None
        room = client.segment.reserve(5)
        assert room is not None
        room.view[:] = b"hello"
        stored = client.request(Store("a", room.offset, room.nbytes))
        assert stored.result(SECONDS) == Stored("created")
        room.release()
        room.release()
        assert bytes(fetch(client, "a").view[:5]) == b"hello"
        rooms = [client.segment.reserve(16 << 10) for _ in range(5)]
        assert [room is None for room in rooms] == [False] * 4 + [True]


def test_a_segment_is_bounded(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, _), channel(url, 4096) as client:
        for offset, nbytes in ((0, 4097), (4096, 1), (1 << 40, 1)):
            with pytest.raises(OSError, match="segment of 4096"):
                client.request(Store("a", offset, nbytes)).result(SECONDS)


def test_a_broken_service_fails_one_request(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, _), channel(url) as client:
        with pytest.raises(OSError, match="the service is broken"):
            client.request(Call("read", ["raise"])).result(SECONDS)
        ping(client)


def test_leases_that_nobody_wants_are_given_back(tmp_path: Path) -> None:
    with serving_process(tmp_path) as (url, pid), channel(url) as client:
        os.kill(pid, signal.SIGSTOP)
        cancelled = client.fetch("r", ["1", "2"], [OBJECT_BYTES] * 2)
        dropped = client.fetch("r", ["3"], [OBJECT_BYTES])
        assert cancelled[0].cancel()
        os.kill(pid, signal.SIGCONT)
        cancelled[1].result(SECONDS).release()
        dropped[0].result(SECONDS)
        del dropped
        gc.collect()
        # The quota of the service is not reached, however often this is done.
        for _ in range(40):
            futures = client.fetch("r", [str(n) for n in range(SLOTS)], [OBJECT_BYTES] * SLOTS)
            wait(futures, SECONDS)
            del futures
        ping(client)


def test_callbacks_at_a_connection_send_first(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, service):
        client = Channel(url)
        client.on_connect(lambda _: client.request(Register(b"first")) and None)
        with contextlib.closing(client):
            assert client.wait_connected(SECONDS)
            client.request(Register(b"second")).result(SECONDS)
            late: list[object] = []
            client.on_connect(late.append)
            assert late == [client.welcome]
        assert service.calls == [("register", b"first"), ("register", b"second")]


def test_server_after_a_restart_learns_the_namespaces_in_use_the_newest_first(
    tmp_path: Path,
) -> None:
    records = [b"%d" % number for number in range(1500)]
    with contextlib.ExitStack() as stack:
        with serving(tmp_path) as (url, _, service):
            client = stack.enter_context(channel(url))
            # The second is in use until the end.
            for place, record in enumerate(records):
                client.register(record)
                client.register(records[1])
                if place % 100 == 99:
                    # Only so many messages may wait.
                    ping(client)
            assert service.calls == [("register", record) for record in records]
        until(lambda: not client.connected)
        with serving(tmp_path) as (_, _, service):
            assert client.wait_connected(SECONDS)
            ping(client)
            in_use = [records[1], *records[:-16:-1]]
            assert service.calls == [("register", record) for record in in_use]


def test_without_a_server_requests_fail_at_once(tmp_path: Path) -> None:
    client = Channel(f"ipc://{tmp_path}/sockets/server")
    with contextlib.closing(client):
        assert not client.connected
        with pytest.raises(UnavailableStorageError, match="not connected"):
            client.request(Ping()).result(0)
        with pytest.raises(UnavailableStorageError):
            client.fetch("r", ["a"], [1])[0].result(0)
        with serving(tmp_path):
            assert client.wait_connected(SECONDS)
            ping(client)
    with pytest.raises(UnavailableStorageError, match="closed"):
        client.request(Ping()).result(0)
    with pytest.raises(ConfigError):
        Channel("tcp://127.0.0.1:1")


def test_a_killed_server_fails_what_waits_and_is_found_again(tmp_path: Path) -> None:
    connections: list[object] = []
    with serving_process(tmp_path) as (url, pid):
        client = Channel(url, segment_bytes=64 << 10)
        client.on_connect(connections.append)
        assert client.wait_connected(SECONDS)
        lent = fetch(client, "7")
        waits = client.request(Call("read", ["never"]))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(UnavailableStorageError, match="gone"):
            waits.result(SECONDS)
        assert not client.connected
        # Its memory stays as long as somebody has it.
        assert bytes(lent.view[:1]) == b"7"
    with serving_process(tmp_path) as (url, pid), contextlib.closing(client):
        assert client.wait_connected(SECONDS)
        assert len(connections) == 2
        assert bytes(lent.view[:1]) == b"7"
        lent.release()
        again = fetch(client, "7")
        assert again.valid()
        assert client.segment is not None
        room = client.segment.reserve(1)
        assert room is not None
        room.view[:] = b"x"
        client.request(Store("7", room.offset, 1)).result(SECONDS)
        assert bytes(again.view[:1]) == b"x"


def test_old_memory_is_unmapped_with_its_last_view(tmp_path: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:")

    with serving_process(tmp_path) as (url, pid):
        client = Channel(url)
        assert client.wait_connected(SECONDS)
        lent = fetch(client, "7")
        before = mappings()
        os.kill(pid, signal.SIGKILL)
        until(lambda: not client.connected)
        assert mappings() == before
    lent.release()
    del lent
    until(lambda: mappings() < before)
    client.close()


def test_a_servers_memory_is_page_locked_as_long_as_anything_of_it_is_lent(tmp_path: Path) -> None:
    with fake_cudart() as runtime:
        with serving(tmp_path) as (url, _, service), channel(url) as client:
            service.put("a", b"hello")
            assert not client.page_locked
            for _ in range(2):
                client.page_lock(torch.device("cuda", 0))
            until(lambda: client.page_locked)
            lent = fetch(client, "a")
            assert runtime.holds(lent.view)
        assert not client.page_locked
        assert runtime.holds(lent.view)
        lent.release()
        del lent


def test_the_memory_of_a_later_server_is_page_locked_too(tmp_path: Path) -> None:
    with fake_cudart() as runtime, contextlib.ExitStack() as stack:
        with serving(tmp_path) as (url, _, service):
            client = stack.enter_context(channel(url))
            client.page_lock(torch.device("cuda", 0))
            until(lambda: client.page_locked)
        until(lambda: not client.connected)
        assert not client.page_locked
        until(lambda: not runtime.registered)
        with serving(tmp_path) as (url, _, service):
            service.put("a", b"hello")
            until(lambda: client.connected and client.page_locked)
            lent = fetch(client, "a")
            assert runtime.holds(lent.view)
            lent.release()
            del lent
            client.close()


def test_memory_that_cannot_be_page_locked_is_lent_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on GPUs that lock no memory which is mapped for reading only."""
    with fake_cudart() as runtime, serving(tmp_path) as (url, _, service), channel(url) as client:
        runtime.reads_only = False
        service.put("a", b"hello")
        client.page_lock(torch.device("cuda", 0))
        until(lambda: "operation not supported" in caplog.text)
        assert not client.page_locked
        lent = fetch(client, "a")
        assert bytes(lent.view[:5]) == b"hello"
        lent.release()


def test_a_page_locked_segment_is_unlocked_when_its_last_room_is_back(tmp_path: Path) -> None:
    with fake_cudart() as runtime:
        segment = Segment(1 << 20)
        for _ in range(2):
            segment.page_lock(torch.device("cuda", 0))
        room = segment.reserve(5000)
        assert room is not None
        assert runtime.holds(room.view)
        segment.close()
        assert segment.fd is None
        assert segment.reserve(1) is None
        # A GPU may still copy to it.
        assert runtime.holds(room.view)
        room.release()
        assert not runtime.registered


def test_a_segment_of_the_caller_outlives_the_channel(tmp_path: Path) -> None:
    segment = Segment(4096, regions=4096)
    room = segment.take_region(5)
    assert room is not None
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        with serving(tmp_path / folder) as (url, _, _):
            client = Channel(url, segment=segment)
            assert client.wait_connected(SECONDS)
            room.view[:] = b"hello"
            stored = client.request(Store("a", room.offset, room.nbytes))
            assert stored.result(SECONDS) == Stored("created")
            client.close()
    assert segment.fd is not None
    room.release()
    segment.close()
    assert segment.fd is None


def test_a_server_that_hangs_blocks_nobody(tmp_path: Path) -> None:
    with serving_process(tmp_path) as (url, pid), channel(url) as client:
        os.kill(pid, signal.SIGSTOP)
        # Many more than are allowed, and large ones: none waits for the server.
        large = Find(["x" * 500] * 1000, [])
        futures: list[Future[Any]] = [client.request(large) for _ in range(300)]
        for _ in range(5):
            futures += client.fetch("r", ["1"] * messages.MAX_NAMES, [1] * messages.MAX_NAMES)
        assert not futures[0].done()
        with pytest.raises(UnavailableStorageError, match="has not answered"):
            futures[-1].result(0)
        os.kill(pid, signal.SIGCONT)
        assert isinstance(futures[0].result(SECONDS), FoundSizes)
        wait(futures, SECONDS)
        ping(client)


def test_closing_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    with serving_process(tmp_path) as (url, pid):
        with channel(url) as client:
            os.kill(pid, signal.SIGSTOP)
            waits = client.request(Ping())
        with pytest.raises(UnavailableStorageError, match="closed"):
            waits.result(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_uses_nothing_of_its_parents_channel(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _, service):
        service.put("a", b"hello")
        noted = tmp_path / "child"
        parent = multiprocessing.get_context("spawn").Process(target=_fork, args=(url, noted))
        parent.start()
        try:
            until(lambda: parent.exitcode is not None)
            assert parent.exitcode == 0
            # The child still lives, and the server has seen the end of its parent.
            assert service.gone.acquire(timeout=SECONDS)
            assert not service.pins
        finally:
            os.kill(int(noted.read_text()), signal.SIGKILL)


def _fork(url: str, noted: Path) -> None:
    client = Channel(url, segment_bytes=4096)
    assert client.wait_connected(SECONDS)
    lent = fetch(client, "a")
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
    assert bytes(lent.view[:5]) == b"hello"
    os._exit(0)


def test_many_threads_share_a_channel(tmp_path: Path) -> None:
    with serving_process(tmp_path) as (url, _), channel(url) as client:
        problems: list[BaseException] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                for _ in range(100):
                    names = [str(chance.randrange(SLOTS)) for _ in range(chance.randint(1, 20))]
                    futures = client.fetch(str(seed), names, [OBJECT_BYTES] * len(names))
                    for name, future in zip(names, futures, strict=True):
                        lent = future.result(SECONDS)
                        assert bytes(lent.view).rstrip(b"\0") == name.encode()
                        assert lent.valid()
                        lent.release()
            except BaseException as error:  # noqa: BLE001
                problems.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems


def test_random_operations_lose_no_lease(tmp_path: Path) -> None:
    chance = random.Random(11)
    with serving(tmp_path) as (url, _, service):
        for number in range(SLOTS):
            service.put(str(number), b"%d" % number)
        clients = [Channel(url) for _ in range(3)]
        lent: list[list[Leased]] = [[] for _ in clients]
        for client in clients:
            assert client.wait_connected(SECONDS)
        for _ in range(10_000):
            place = chance.randrange(len(clients))
            client, mine = clients[place], lent[place]
            action = chance.randrange(100)
            name = str(chance.randrange(SLOTS + 4))
            session = str(chance.randrange(3))
            if action < 35:
                future = client.fetch(session, [name], [OBJECT_BYTES])[0]
                if int(name) < SLOTS:
                    mine.append(future.result(SECONDS))
                else:
                    assert isinstance(future.exception(SECONDS), ObjectMissingError)
            elif action < 45:
                client.fetch(session, [name], [OBJECT_BYTES])[0].cancel()
            elif action < 80 and mine:
                mine.pop(chance.randrange(len(mine))).release()
            elif action < 90:
                client.request(LookUpChunks(session, [name], [1])).result(SECONDS)
            elif action < 99:
                client.end_session(session)
            else:
                client.close()
                mine.clear()
                clients[place] = Channel(url)
                assert clients[place].wait_connected(SECONDS)
        for client, mine in zip(clients, lent, strict=True):
            for session in "012":
                client.end_session(session)
            for leased in mine:
                assert leased.valid()
                leased.release()
        until(lambda: not service.pins)
        assert service.leases.stats() == (0, 0)
        for client in clients:
            client.close()


def test_descriptors_that_run_out_end_no_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as (url, _, _):
        context = channel_module.zmq.Context
        failures = [OSError(24, "Too many open files"), channel_module.zmq.ZMQError(24)]

        def fails() -> object:
            if failures:
                raise failures.pop()
            return context()

        monkeypatch.setattr(channel_module.zmq, "Context", fails)
        with channel(url) as client:
            assert not failures
            ping(client)
