"""``kvshelf serve`` and its clients as processes: start, end, crashes on both sides."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.errors import UnavailableStorageError
from kvshelf.server.connection import NodeClient
from kvshelf.server.view import open_served
from kvshelf.shelf.view import ObjectRef, Presence
from tests.server.client_child import FMT, SIZE
from tests.server.desk import name_of, put
from tests.server.serve_process import PATIENT, Client, ClientProcess, ServeProcess, command
from tests.sim.storage import posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.servers import BUCKET, moto_s3
from tests.support.servers import command as command_of
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real

CHUNKS = make_chunks(FMT, 256)
NAMES = [name_of(FMT, chunk) for chunk in CHUNKS]
#: Bytes of a slot with one object.
SLOT = -(-SIZE // 4096) * 4096


def fill(shelf: Path, count: int) -> None:
    """Publish the first chunks of the prompt as another machine would."""
    for chunk in CHUNKS[:count]:
        put(shelf, FMT, chunk)


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    folder = tmp_path / "shelf"
    folder.mkdir()
    return folder


@pytest.fixture
def server(tmp_path: Path, shelf: Path) -> Iterator[ServeProcess]:
    with ServeProcess(shelf, tmp_path / "sockets" / "node.sock", **PATIENT) as process:
        yield process


def test_it_says_when_it_is_ready_and_ends_when_it_is_told(server: ServeProcess) -> None:
    assert server.url in server.line
    assert server.get("/health")[0] == server.get("/ready")[0] == 200
    assert server.get("/anything")[0] == 404
    assert server.metrics()["capacity_bytes"] > 60 << 20
    assert server.stop() == (0, "")


def test_signal_that_any_of_its_threads_takes_ends_it(server: ServeProcess) -> None:
    others = {int(name) for name in os.listdir(f"/proc/{server.process.pid}/task")}
    others.remove(server.process.pid)
    ctypes.CDLL(None).tgkill(server.process.pid, min(others), signal.SIGTERM)
    server.process.communicate(timeout=PATIENCE)
    assert server.process.returncode == 0


def test_second_server_is_refused_and_a_killed_one_replaced(
    server: ServeProcess, tmp_path: Path, shelf: Path
) -> None:
    second = subprocess.run(
        command(shelf, tmp_path / "sockets" / "node.sock"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2
    assert "runs already" in second.stderr
    server.kill()
    server.start()
    assert server.get("/ready")[0] == 200


@pytest.mark.slow
def test_memory_that_is_not_there_is_refused_at_the_start(tmp_path: Path, shelf: Path) -> None:
    refused = subprocess.run(
        command(shelf, tmp_path / "sockets" / "node.sock", "64TiB"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "free" in refused.stderr


def test_server_that_is_killed_under_load_loses_nothing_that_it_confirmed(
    server: ServeProcess, shelf: Path
) -> None:
    with ClientProcess(server.url) as other:
        client = Client(server.url, FMT)
        other.send("store 100 200")
        stored = [
            client.store(name, sealed(FMT, chunk))
            for name, chunk in zip(NAMES[:20], CHUNKS, strict=False)
        ]
        assert set(stored) == {"created"}
        (lent,) = client.fetch(NAMES[:1], [SIZE])
        running = client.node.fetch(NAMES[:20], [SIZE] * 20)
        # So the other one has heard of its first object.
        until((shelf / NAMES[101]).exists)
        server.kill()
        with contextlib.suppress(UnavailableStorageError):
            running.result(PATIENCE)
        del running
        # What was lent stays readable: the memory is gone only with its last user.
        assert bytes(lent.view) == sealed(FMT, CHUNKS[0])
        until(lambda: not client.node.is_connected)
        server.start()
        assert client.node.wait_connected(PATIENCE)
        lent.release()
        loans = client.fetch(NAMES[:20], [SIZE] * 20)
        assert len(loans) == 20
        for loan, chunk in zip(loans, CHUNKS, strict=False):
            assert bytes(loan.view) == sealed(FMT, chunk)
            loan.release()
        assert "created" in other.answer()
        assert other.ask("connected") == "True"
        assert other.ask("store 200 210") == "{'created': 10}"
        client.close()


def test_loans_of_a_killed_client_end_at_once(server: ServeProcess, shelf: Path) -> None:
    fill(shelf, 64)
    with ClientProcess(server.url) as client:
        assert client.ask("fetch 0 64") == "64"
        assert server.metrics()["lent_bytes"] == 64 * SLOT
        client.signal(signal.SIGKILL)
        until(lambda: server.metrics()["lent_bytes"] == 0)
    metrics = server.metrics()
    assert metrics["pinned_bytes"] == metrics["clients"] == 0
    assert metrics["bytes"] == 64 * SIZE


@pytest.mark.slow
def test_client_that_is_stopped_in_a_copy_keeps_its_loans_and_no_other_client_waits(
    tmp_path: Path, shelf: Path
) -> None:
    fill(shelf, 256)
    # Room for 256 objects, of which one client may have a quarter, and all together a half.
    with contextlib.ExitStack() as stack:
        node = tmp_path / "sockets" / "node.sock"
        server = stack.enter_context(ServeProcess(shelf, node, f"{256 * SLOT}B"))
        stopped, *others = (stack.enter_context(ClientProcess(server.url)) for _ in range(64))
        held = int(stopped.ask("fetch 0 128"))
        assert 64 <= held < 128
        assert stopped.ask("slowly") == "begun"
        stopped.signal(signal.SIGSTOP)
        for _ in range(3):
            # More than there is room for: those that get none go on without.
            for number, other in enumerate(others):
                other.send(f"fetch {number} {number + 64}")
            assert sum(int(other.answer()) for other in others) >= 64
            for other in others:
                assert other.ask("check") == "good"
                assert other.ask("release") == "released"
        until(lambda: server.metrics()["lent_bytes"] == held * SLOT)
        stopped.signal(signal.SIGCONT)
        assert stopped.ask("go on") == "good"
        assert stopped.ask("release") == "released"
        until(lambda: server.metrics()["pinned_bytes"] == 0)


@pytest.mark.slow
def test_clients_and_servers_that_are_killed_again_and_again_leave_nothing(
    server: ServeProcess, shelf: Path
) -> None:
    """For TEST_SECONDS; 20 by default."""
    chance = random.Random(7)
    end = time.monotonic() + float(os.environ.get("TEST_SECONDS", "20"))
    files = set(os.listdir("/dev/shm"))
    with contextlib.ExitStack() as stack:

        def start() -> ClientProcess:
            client = stack.enter_context(ClientProcess(server.url))
            assert client.ask("mix 0 200") == "begun"
            return client

        clients = [start() for _ in range(3)]
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.05, 0.5))
            if chance.random() < 0.4:
                server.kill()
                server.start()
                continue
            client = clients.pop(0)
            if chance.random() < 0.5:
                client.signal(signal.SIGKILL)
            else:
                assert client.ask("stop") == "good"
            clients.append(start())
        for client in clients:
            assert client.ask("stop") == "good"
            assert client.ask("release") == "released"
            assert client.ask("connected") == "True"
            assert "Error" not in client.ask("store 0 8")
            assert client.ask("fetch 0 8") == "8"
            assert client.ask("check") == "good"
    until(lambda: server.metrics()["pinned_bytes"] == server.metrics()["clients"] == 0)
    assert set(os.listdir("/dev/shm")) == files
    for name, chunk in zip(NAMES, CHUNKS, strict=True):
        if (shelf / name).exists():
            assert (shelf / name).read_bytes() == sealed(FMT, chunk)


@pytest.mark.skipif(
    command_of("moto_server") is None or importlib.util.find_spec("obstore") is None,
    reason="moto or obstore is not installed: pip install 'moto[server]' obstore",
)
@pytest.mark.slow
def test_shelf_on_s3_is_read_once_for_two_clients(tmp_path: Path) -> None:
    with moto_s3() as storage:
        storage.client().create_bucket(Bucket=BUCKET)
        options = {"KVSHELF_STORAGE_OPTIONS": json.dumps(storage.options())}
        socket = tmp_path / "sockets" / "node.sock"
        with ServeProcess(f"s3://{BUCKET}/kv", socket, **options) as server:
            with ClientProcess(server.url) as client:
                assert client.ask("store 0 32") == "{'created': 32}"
            # Memory is empty after a restart, the storage is not.
            server.kill()
            server.start()
            with ClientProcess(server.url) as one, ClientProcess(server.url) as other:
                for client in (one, other):
                    client.send("fetch 0 32")
                for client in (one, other):
                    assert client.answer() == "32"
                    assert client.ask("check") == "good"
            assert server.metrics()["read_bytes"] == 32 * SIZE
            assert server.stop() == (0, "")


@pytest.mark.slow
def test_server_keeps_its_shelf_within_bounds(tmp_path: Path, shelf: Path) -> None:
    fill(shelf, 200)
    bound = f"{100 * SIZE}B"
    node = tmp_path / "sockets" / "node.sock"
    with ServeProcess(shelf, node, "64MiB", "--max-bytes", bound, "--max-age", "7d") as server:
        until(lambda: 0 < server.metrics().get("shelf_used_bytes", 0) <= 100 * SIZE)
        found = server.metrics()
        assert found["shelf_limit_bytes"] == 100 * SIZE
        assert found["shelf_used_bytes"] > 70 * SIZE
        left = list(shelf.rglob("*.safetensors"))
        assert len(left) == 200 - found["shelf_evicted_objects"]
        assert len(left) <= 100


@pytest.mark.slow
def test_what_is_being_stored_is_published_before_the_end(
    server: ServeProcess, shelf: Path
) -> None:
    with ClientProcess(server.url) as other:
        other.send("store 0 256")
        until(lambda: server.metrics()["stored_objects"] > 20)
        assert server.stop() == (0, "")
        outcomes = other.answer()
    created = int(outcomes.partition("'created': ")[2].partition(",")[0].rstrip("}"))
    published = [name for name in NAMES if (shelf / name).exists()]
    # The answer to the last one may be lost with the session.
    assert published in (NAMES[:created], NAMES[: created + 1])
    for name, chunk in zip(published, CHUNKS, strict=False):
        assert (shelf / name).read_bytes() == sealed(FMT, chunk)


@pytest.mark.slow
def test_stores_under_way_when_the_server_is_killed_are_dropped_and_stored_later(
    tmp_path: Path, server: ServeProcess
) -> None:
    """Chunks are gathered into the memory from which the server takes what is stored."""
    fmt = make_format()
    chunks = make_chunks(fmt, 20)
    refs = [ObjectRef(chunk, shard) for chunk in chunks for shard in range(fmt.shards)]
    with contextlib.ExitStack() as stack:
        shelf = stack.enter_context(open_served(NodeClient(server.url)))
        rig = Rig(
            posix(tmp_path / "unused"),
            fmt=fmt,
            blocks=512,
            in_front=lambda _: shelf,
            memory_chunks=64,
            options={"store_threads": 3},
            share=shelf.share,
        )
        stack.callback(rig.close)
        items = rig.items(chunks, 0)
        for item in items:
            rig.fill(item)

        def store() -> None:
            for item in items:
                rig.store(item)

        store()
        until(lambda: rig.count("stored_chunks") >= 2)
        server.kill()
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.chunks_in_use == 0
        server.start()
        view = shelf.view(fmt)

        def all_are_there() -> bool:
            store()
            assert rig.transfer.drain(PATIENCE) == 0
            return set(view.probe(refs)) == {Presence.PRESENT}

        until(all_are_there)
        load, loaded = rig.load(chunks, 256)
        assert not load.failures
        assert all(rig.holds(item) for item in loaded)
