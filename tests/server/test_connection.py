"""A client's connection: requests, loans, and servers that hang, die and come back."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.errors import ObjectMissingError, UnavailableStorageError
from kvshelf.memory.arena import Arena
from kvshelf.server import connection as connection_module
from kvshelf.server import protocol
from kvshelf.server.connection import Loan, NodeClient
from kvshelf.server.protocol import Fault, Find, Read, Stat
from tests.server.desk import name_of, put
from tests.server.node import LocalServer
from tests.sim.storage import posix
from tests.support.fake_cudart import fake_cudart
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real

FMT = make_format(shards=1)
SIZE = FMT.object_size(0)
CHUNKS = make_chunks(FMT, 64)
NAMES = [name_of(FMT, chunk) for chunk in CHUNKS]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for chunk in CHUNKS:
        put(tmp_path / "shelf", FMT, chunk)
    return tmp_path


def serve(root: Path) -> LocalServer:
    return LocalServer(root / "node", posix(root / "shelf"), 4 << 20)


@pytest.fixture
def server(root: Path) -> Iterator[LocalServer]:
    with serve(root) as server:
        yield server


@contextlib.contextmanager
def connect(server: LocalServer) -> Iterator[NodeClient]:
    with contextlib.closing(NodeClient(server.url)) as client:
        client.register(FMT.namespace)
        assert client.wait_connected(PATIENCE)
        yield client


def borrow(client: NodeClient, *numbers: int) -> list[Loan]:
    names = [NAMES[number] for number in numbers]
    outcomes = client.fetch(names, [SIZE] * len(names)).result(PATIENCE)
    assert all(isinstance(outcome, Loan) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, Loan)]


def image(number: int) -> bytes:
    return sealed(FMT, CHUNKS[number])


def answers(client: NodeClient) -> bool:
    return bool(client.request(Stat, NAMES[:1]).result(PATIENCE) == [SIZE])


def test_requests_get_their_answers(server: LocalServer) -> None:
    with connect(server) as client:
        sizes = client.request(Find, [NAMES[0], "x"]).result(PATIENCE)
        assert sizes == [SIZE, protocol.MISSING]
        assert client.request(Read, NAMES[1]).result(PATIENCE) == image(1)
        assert client.welcome is not None and client.welcome.chunk_size == 256
        with pytest.raises(ObjectMissingError):
            client.request(Read, NAMES[0].replace("-0-", "-9-")).result(PATIENCE)


def test_lent_memory_is_the_servers_and_is_given_back(server: LocalServer) -> None:
    with connect(server) as client:
        absent = NAMES[0].replace("-0-", "-9-")
        loan, fault = client.fetch([NAMES[0], absent], [SIZE] * 2).result(PATIENCE)
        assert isinstance(fault, Fault) and fault.kind == "ObjectMissingError"
        assert isinstance(loan, Loan) and bytes(loan.view) == image(0)
        assert loan.view.readonly
        assert server.stat("lent_bytes") > 0
        loan.release()
        loan.release()
        until(lambda: not server.stat("lent_bytes"))
        # One that nobody refers to any more is given back as well.
        (loan,) = borrow(client, 1)
        assert server.stat("lent_bytes") > 0
        del loan
        until(lambda: not server.stat("lent_bytes"))


def test_without_a_server_requests_fail_at_once(root: Path) -> None:
    with contextlib.closing(NodeClient(f"ipc://{root}/node/node.sock")) as client:
        assert not client.is_connected
        for request in (client.request(Stat, []), client.fetch(["a"], [1])):
            with pytest.raises(UnavailableStorageError, match="not connected"):
                request.result(0)
        client.lock("r", NAMES)
        client.end_session("r")
        with serve(root):
            assert client.wait_connected(PATIENCE)
            assert answers(client)
    with pytest.raises(UnavailableStorageError, match="closed"):
        client.request(Stat, []).result(0)


def test_server_that_dies_fails_what_waits_and_is_found_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:")

    connections: list[None] = []
    with contextlib.ExitStack() as stack:
        with serve(root) as server:
            monkeypatch.setattr(server.node, "stat", never)
            client = stack.enter_context(connect(server))
            client.on_connect(lambda: connections.append(None))
            (loan,) = borrow(client, 0)
            waits = client.request(Stat, NAMES[:1])
            server.server.stop()
        with pytest.raises(UnavailableStorageError, match="gone"):
            waits.result(PATIENCE)
        until(lambda: not client.is_connected)
        # Its memory stays as long as somebody has it.
        before = mappings()
        assert bytes(loan.view) == image(0)
        loan.release()
        until(lambda: mappings() < before)
        with serve(root) as server:
            assert client.wait_connected(PATIENCE)
            until(lambda: len(connections) == 1)
            # The new server knows the namespace.
            (loan,) = borrow(client, 1)
            assert bytes(loan.view) == image(1)
            loan.release()


def test_connection_stays_open_until_its_last_loan_has_ended(server: LocalServer) -> None:
    """A server must not lend the memory to anybody else meanwhile."""
    client = NodeClient(server.url)
    client.register(FMT.namespace)
    assert client.wait_connected(PATIENCE)
    loans = borrow(client, 0, 1)
    client.close()
    assert server.stat("clients") == 1 and server.stat("lent_bytes") > 0
    loans.pop().release()
    # The server has noted by then whatever the first client did.
    with connect(server):
        until(lambda: server.stat("clients") == 2)
    assert bytes(loans[0].view) == image(0)
    loans.pop().release()
    until(lambda: not server.stat("clients"))
    assert server.stat("lent_bytes") == 0


def test_loan_may_end_on_a_thread_that_sends(server: LocalServer) -> None:
    """The collector of garbage ends it there."""
    with connect(server) as client:
        (loan,) = borrow(client, 0)
        assert client._connection is not None
        with client._connection.lock:
            loan.release()
        until(lambda: server.stat("lent_bytes") == 0)


def test_memory_that_is_shared_later_is_read_after_a_new_greeting(server: LocalServer) -> None:
    with connect(server) as client, contextlib.closing(Arena(1 << 20, shared=True)) as arena:
        (loan,) = borrow(client, 0)
        part = arena.view[4096 : 4096 + SIZE]
        with pytest.raises(UnavailableStorageError, match="does not read this memory"):
            client.offset_of(part)
        client.share(arena)
        assert client.is_connected
        assert client.offset_of(part) == 4096
        # What was lent before is lent by the connection before.
        assert bytes(loan.view) == image(0)
        until(lambda: server.stat("clients") == 2)
        loan.release()
        until(lambda: server.stat("clients") == 1)
        with pytest.raises(UnavailableStorageError):
            client.offset_of(memoryview(bytearray(SIZE)))
        (Path(server.shelf.url) / NAMES[0]).unlink()
        part[:] = image(0)
        stored = client.request(protocol.Store, NAMES[0], 4096, SIZE, False)
        assert stored.result(PATIENCE) == "created"


def test_memory_of_each_server_is_page_locked_until_its_last_loan_has_ended(root: Path) -> None:
    with fake_cudart() as runtime, contextlib.ExitStack() as stack, serve(root) as server:
        client = stack.enter_context(connect(server))
        assert not client.is_page_locked
        for _ in range(2):
            client.page_lock(torch.device("cuda", 0))
        for node in (server, None):
            node = node or stack.enter_context(serve(root))
            until(lambda: client.is_connected and client.is_page_locked)
            (loan,) = borrow(client, 0)
            assert runtime.holds(loan.view)
            node.close()
            until(lambda: not client.is_connected)
            assert not client.is_page_locked
            assert runtime.holds(loan.view)
            loan.release()
            until(lambda: not runtime.registered)


def test_memory_that_cannot_be_page_locked_is_lent_with_one_warning(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    """As under RLIMIT_MEMLOCK, and on GPUs that lock no memory mapped for reading only."""
    with fake_cudart() as runtime, connect(server) as client:
        runtime.reads_only = False
        client.page_lock(torch.device("cuda", 0))
        until(lambda: "operation not supported" in caplog.text)
        assert not client.is_page_locked
        assert bytes(borrow(client, 0)[0].view) == image(0)
        assert caplog.text.count("could not pin") == 1


def test_server_that_hangs_blocks_nobody(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_BACKLOG_BYTES", 1 << 20)
    with connect(server) as client:
        with server.hanging():
            # Many more than it may take: none waits for the server.
            names = ["x" * 500] * 1000
            futures: list[Future[Any]] = [client.request(Find, names) for _ in range(300)]
            assert not futures[0].done()
            with pytest.raises(UnavailableStorageError, match="takes no requests"):
                futures[-1].result(0)
        wait(futures, PATIENCE)
        assert answers(client)
        with server.hanging():
            waits = client.request(Stat, NAMES[:1])
            client.close()
            with pytest.raises(UnavailableStorageError, match="closed"):
                waits.result(PATIENCE)


def test_client_that_is_served_no_further_connects_anew(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server) as client:
        (loan,) = borrow(client, 0)
        assert client._connection is not None
        client._connection.send(b"\3\0\0\0\xff\xff\xff")
        until(lambda: "served no further" in caplog.text)
        until(lambda: client.is_connected and server.stat("clients") == 2)
        assert bytes(loan.view) == image(0)
        assert answers(client)
        loan.release()
        until(lambda: server.stat("clients") == 1)


def test_program_that_is_no_server_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir(mode=0o700)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        contextlib.closing(NodeClient(f"ipc://{folder}/node.sock")) as client,
    ):
        listener.bind(str(folder / "node.sock"))
        listener.listen()

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.send(b"\5\0\0\0hello")

        threading.Thread(target=greet, daemon=True).start()
        until(lambda: "no node server of this version" in str(client.problem))
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_uses_nothing_of_its_parents_client(
    server: LocalServer, tmp_path: Path
) -> None:
    noted = tmp_path / "child"
    parent = multiprocessing.get_context("spawn").Process(target=_fork, args=(server.url, noted))
    parent.start()
    try:
        until(lambda: parent.exitcode is not None)
        assert parent.exitcode == 0
        # The child still lives, and the server has seen the end of its parent.
        until(lambda: not server.stat("clients"))
        assert server.stat("lent_bytes") == 0
    finally:
        os.kill(int(noted.read_text()), signal.SIGKILL)


def _fork(url: str, noted: Path) -> None:
    client = NodeClient(url)
    client.register(FMT.namespace)
    assert client.wait_connected(PATIENCE)
    (loan,) = borrow(client, 0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        problem = 1
        with contextlib.suppress(BaseException):
            assert not client.is_connected
            loan.release()
            with pytest.raises(UnavailableStorageError):
                client.request(Stat, []).result(0)
            problem = 0
        os.write(write, bytes([problem]))
        os.close(write)
        signal.pause()
    noted.write_text(str(child))
    assert os.read(read, 1) == b"\0"
    # The child's release was none of this process.
    assert answers(client)
    assert bytes(loan.view) == image(0)
    os._exit(0)


def test_threads_that_share_clients_lose_no_loan(server: LocalServer) -> None:
    problems: list[BaseException] = []

    def work(client: NodeClient, seed: int) -> None:
        chance = random.Random(seed)
        loans: list[tuple[int, Loan]] = []
        try:
            for _ in range(200):
                numbers = chance.sample(range(64), chance.randint(1, 8))
                if chance.random() < 0.2:
                    client.lock(str(seed), [NAMES[number] for number in numbers])
                elif chance.random() < 0.2:
                    client.end_session(str(seed))
                else:
                    loans += zip(numbers, borrow(client, *numbers), strict=True)
                chance.shuffle(loans)
                while len(loans) > 20:
                    number, loan = loans.pop()
                    assert bytes(loan.view) == image(number)
                    loan.release()
            client.end_session(str(seed))
        except BaseException as error:  # noqa: BLE001
            problems.append(error)
        for _, loan in loans:
            loan.release()

    with connect(server) as one, connect(server) as other:
        threads = [
            threading.Thread(target=work, args=(client, seed))
            for seed, client in enumerate([one, other] * 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        until(lambda: not server.stat("lent_bytes"))
        until(lambda: not server.stat("pinned_bytes"))


def test_descriptors_that_run_out_end_no_client(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(24, "Too many open files")] * 2
    check = connection_module.check_folder

    def fails(path: str) -> None:
        if failures:
            raise failures.pop()
        check(path)

    monkeypatch.setattr(connection_module, "check_folder", fails)
    with connect(server) as client:
        assert not failures
        assert answers(client)
