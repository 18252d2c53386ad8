"""What a node does for its clients: it finds, fetches, lends, locks, stores and deletes."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvshelf.backends import Deadlines, Touched
from kvshelf.capacity.uses import Uses
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    ObjectMissingError,
    ObjectNameError,
    PermanentStorageError,
    ReadOnlyStorageError,
    TransientStorageError,
    UnavailableStorageError,
)
from kvshelf.format.namespace import Namespace
from kvshelf.metrics import Counters
from kvshelf.server import node as node_module
from kvshelf.server.namespaces import Namespaces
from kvshelf.server.protocol import IN_MEMORY, MISSING, NO_ROOM
from kvshelf.shelf.markers import marker_name
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.disk_tier import DiskTier
from tests.server.desk import Desk, name_of, put
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks, make_tail
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real

FMT = make_format(shards=1, chunk_size=64)
SIZE = FMT.object_size(0)
#: Bytes of a slot with one object.
SLOT = -(-SIZE // 4096) * 4096
CHUNKS = make_chunks(FMT, 64)
NAMES = [name_of(FMT, chunk) for chunk in CHUNKS]
MakeDesk: TypeAlias = Callable[..., Desk]


def image(number: int) -> bytes:
    return sealed(FMT, CHUNKS[number])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shelf"


@pytest.fixture
def make(root: Path) -> Iterator[MakeDesk]:
    with ExitStack() as stack:

        def make_desk(*args: Any, slots: int = 64, **options: Any) -> Desk:
            desk = Desk(posix(root), slots * SLOT, *args, **options)
            stack.enter_context(closing(desk))
            desk.register(FMT)
            stack.callback(desk.end)
            return desk

        yield make_desk


@pytest.fixture
def desk(make: MakeDesk) -> Desk:
    return make()


def fill(root: Path, count: int) -> None:
    for chunk in CHUNKS[:count]:
        put(root, FMT, chunk)


def errors_of(answers: list[Any]) -> list[type]:
    return [type(answer.error()) for answer in answers]


# ------------------------------------------------------------------------------ loads


def test_object_is_read_once_for_all_clients_and_lent_from_memory(desk: Desk, root: Path) -> None:
    fill(root, 2)
    gate = desk.hold("read")
    clients = [desk.connect() for _ in range(3)]
    fetches = [desk.begin(desk.node.fetch(client, NAMES[:2], False)) for client in clients]
    until(lambda: desk.stat("joined_fetches") == 4)
    gate.set()
    answers = [fetch.result(PATIENCE) for fetch in fetches]
    assert answers[0] == answers[1] == answers[2]
    for number, offset in enumerate(answers[0]):
        assert desk.bytes_at(offset, SIZE) == image(number)
    assert desk.stat("read_objects") == 2
    assert desk.fetch(clients[0], NAMES[:2]) == answers[0]
    assert desk.stat("memory_hits") == 2
    # Two clients have each object: it is counted once.
    assert desk.stat("lent_bytes") == 2 * SLOT
    for client in clients:
        desk.call(desk.node.give_back, client, [offset for offset in answers[0] if offset >= 0])
    assert desk.stat("lent_bytes") == 2 * SLOT  # The first one had them twice.
    desk.call(desk.node.give_back, clients[0], answers[0])
    assert desk.stat("lent_bytes") == desk.stat("pinned_bytes") == 0
    # What is not lent there does nothing.
    desk.call(desk.node.give_back, clients[0], [*answers[0], 12345])


def test_object_that_cannot_be_had_says_why(desk: Desk, root: Path) -> None:
    fill(root, 2)
    path = root / NAMES[1]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    client = desk.connect()
    other = make_format(weights="name:other")
    names = [NAMES[0], NAMES[1], NAMES[2], "no name", name_of(other, CHUNKS[0])]
    answers = desk.fetch(client, names)
    assert desk.bytes_at(answers[0], SIZE) == image(0)
    assert errors_of(answers[1:]) == [
        BadObjectError,
        ObjectMissingError,
        ObjectNameError,
        UnavailableStorageError,
    ]
    # The bad one was set aside.
    assert not path.exists()
    assert len(list(path.parent.glob(".*.tmp"))) == 1
    assert desk.stat("failed_fetches") == 4


def test_client_has_a_quarter_of_the_memory_at_most_and_all_together_a_half(
    make: MakeDesk, root: Path
) -> None:
    fill(root, 40)
    desk = make(slots=16)
    greedy, *others = (desk.connect() for _ in range(4))
    answers = [desk.fetch(greedy, [name])[0] for name in NAMES[:8]]
    assert [answer == NO_ROOM for answer in answers] == [False] * 4 + [True] * 4
    # It never gives anything back: others have what is left of the half, in turns.
    for start in range(8, 40, 4):
        first = desk.fetch(others[0], NAMES[start : start + 4])
        assert NO_ROOM not in first
        assert set(desk.fetch(others[1], NAMES[:1])) == set(answers[:1])
        assert desk.fetch(others[1], NAMES[start - 1 : start]) == [NO_ROOM]
        for number, offset in enumerate(first, start):
            assert desk.bytes_at(offset, SIZE) == image(number)
        desk.leave(others[0])
        others[0] = desk.connect()
    assert desk.stat("refused_loans") == 4 + 8
    # What is not lent comes by the stream.
    assert desk.run(desk.node.read(greedy, NAMES[7])) == image(7)
    assert desk.run(desk.node.read(greedy, NAMES[0])) == image(0)
    for number, offset in enumerate(answers[:4]):
        assert desk.bytes_at(offset, SIZE) == image(number)


def test_memory_that_stores_and_loans_fill_still_serves_the_streams(
    make: MakeDesk, root: Path
) -> None:
    fill(root, 8)
    desk = make(slots=1)
    client = desk.connect()
    (offset,) = desk.fetch(client, NAMES[:1])
    assert desk.bytes_at(offset, SIZE) == image(0)
    assert desk.fetch(client, NAMES[1:2]) == [NO_ROOM]
    assert desk.run(desk.node.read(client, NAMES[1])) == image(1)
    # A store is published all the same, and not kept.
    assert desk.store(NAMES[20], image(20)) == "created"
    assert (root / NAMES[20]).read_bytes() == image(20)
    with pytest.raises(ObjectMissingError):
        desk.run(desk.node.read(client, NAMES[30]))


def test_client_that_leaves_while_its_requests_are_served_leaves_nothing(
    desk: Desk, root: Path
) -> None:
    fill(root, 4)
    gate = desk.hold("read", "write")
    client, other = desk.connect(image(9)), desk.connect()
    fetch = desk.begin(desk.node.fetch(client, NAMES[:4], False))
    late = desk.begin(desk.node.fetch(client, NAMES[:4], False))
    shared = desk.begin(desk.node.fetch(other, NAMES[:1], False))
    store = desk.begin(desk.node.store(client, NAMES[9], 0, SIZE, False))
    desk.call(desk.node.lock, client, "s", NAMES[:4])
    until(lambda: desk.stat("reads") == 4 and desk.stat("stores") == 1)
    desk.leave(client)
    fetch.cancel()
    store.cancel()
    gate.set()
    assert late.result(PATIENCE) == [NO_ROOM] * 4
    # The read that another client waits for goes on, and so does the store.
    assert desk.bytes_at(shared.result(PATIENCE)[0], SIZE) == image(0)
    until((root / NAMES[9]).exists)
    desk.leave(other)
    until(lambda: not desk.stat("pinned_bytes"))
    assert desk.stat("lent_bytes") == 0


def test_read_that_hangs_fails_those_who_wait_and_holds_up_nobody_else(
    make: MakeDesk, root: Path
) -> None:
    fill(root, 4)
    counters = Counters()
    desk = make(deadlines=Deadlines(read=0.2, write=0.2), counters=counters)
    gate = threading.Event()
    desk.faults.add(Fault("read", NAMES[0], wait=gate))
    clients = [desk.connect() for _ in range(2)]
    fetches = [desk.begin(desk.node.fetch(client, NAMES[:1], False)) for client in clients]
    assert desk.bytes_at(desk.fetch(clients[0], NAMES[1:2])[0], SIZE) == image(1)
    for fetch in fetches:
        assert errors_of(fetch.result(PATIENCE)) == [TransientStorageError]
    # The memory belongs to the read until it returns.
    assert desk.stat("pinned_bytes") == 2 * SLOT
    gate.set()
    until(lambda: desk.stat("pinned_bytes") == SLOT)


def test_panic_of_a_thread_leaves_no_memory_taken(desk: Desk, root: Path) -> None:
    class PanicException(BaseException):
        """As Rust libraries raise it."""

    fill(root, 1)
    desk.faults.add(Fault("read", error=lambda: PanicException("no")))
    client = desk.connect()
    with pytest.raises(PanicException):
        desk.fetch(client, NAMES[:1])
    desk.faults.heal()
    assert desk.stat("pinned_bytes") == 0
    assert desk.bytes_at(desk.fetch(client, NAMES[:1])[0], SIZE) == image(0)


# ------------------------------------------------------------------------------ lookups


def test_find_asks_the_memory_first_and_the_storage_for_the_rest(desk: Desk, root: Path) -> None:
    fill(root, 3)
    client = desk.connect()
    desk.fetch(client, NAMES[:1])
    (root / NAMES[0]).unlink()
    desk.counts.clear()
    assert desk.run(desk.node.find(client, NAMES[:4])) == [IN_MEMORY, SIZE, SIZE, MISSING]
    assert desk.run(desk.node.find(client, NAMES[:1])) == [IN_MEMORY]
    assert desk.counts["stat"] == 1
    # A store asks the storage alone.
    assert desk.run(desk.node.stat(client, NAMES[:2])) == [MISSING, SIZE]
    desk.faults.add(Fault("stat", error=TransientStorageError("broken")))
    assert errors_of(desk.run(desk.node.find(client, NAMES[1:2]))) == [TransientStorageError]


def test_objects_are_found_in_all_folders_of_a_namespace(
    make: MakeDesk, root: Path, tmp_path: Path
) -> None:
    elsewhere = make_format(shards=1, chunk_size=64, slug="other")
    put(tmp_path / "copy", elsewhere, CHUNKS[1])
    shutil.copytree(tmp_path / "copy", root)
    put(root, FMT, CHUNKS[0])
    desk = make()
    client = desk.connect()
    assert desk.run(desk.node.find(client, NAMES[:3])) == [SIZE, SIZE, MISSING]
    answers = desk.fetch(client, NAMES[:3])
    assert [desk.bytes_at(answers[number], SIZE) for number in (0, 1)] == [image(0), image(1)]
    assert errors_of(answers[2:]) == [ObjectMissingError]
    assert desk.run(desk.node.delete(client, NAMES[:3])) == [True, True, False]
    assert not list(root.rglob("*.safetensors"))


def test_lock_keeps_objects_in_memory_until_the_session_ends(make: MakeDesk, root: Path) -> None:
    fill(root, 60)
    desk = make(slots=16)
    scheduler, worker = desk.connect(), desk.connect()

    def holds(*numbers: int) -> list[bool]:
        names = [NAMES[number] for number in numbers]
        return [answer == IN_MEMORY for answer in desk.run(desk.node.find(worker, names))]

    desk.fetch(worker, NAMES[:1])
    desk.call(desk.node.lock, scheduler, "r", NAMES[:3])
    # What is on the storage alone is read, and locked then.
    until(lambda: desk.stat("lent_bytes") == 3 * SLOT)
    desk.leave(worker)
    worker = desk.connect()
    for start in range(4, 60, 4):
        answers = desk.fetch(worker, NAMES[start : start + 4])
        desk.call(desk.node.give_back, worker, answers)
    assert holds(0, 1, 2, 4) == [True, True, True, False]
    desk.call(desk.node.end_session, scheduler, "r", NAMES[:1])
    assert desk.stat("lent_bytes") == 2 * SLOT
    desk.call(desk.node.end_session, scheduler, "r", [])
    desk.call(desk.node.end_session, scheduler, "unknown", [])
    assert desk.stat("lent_bytes") == 0


def test_lock_ends_after_its_time(
    make: MakeDesk, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "LOCK_SECONDS", 0.0)
    fill(root, 2)
    desk = make()
    scheduler = desk.connect()
    desk.call(desk.node.give_back, scheduler, desk.fetch(scheduler, NAMES[:2]))
    desk.call(desk.node.lock, scheduler, "r", NAMES[:2])
    until(lambda: desk.stat("lent_bytes") == 0)
    assert not scheduler.sessions


def test_lock_reads_no_more_than_its_share(make: MakeDesk, root: Path) -> None:
    fill(root, 64)
    desk = make(slots=16)
    scheduler = desk.connect()
    desk.call(desk.node.lock, scheduler, "r", NAMES)
    until(lambda: desk.stat("lent_bytes") == 4 * SLOT)
    assert desk.stat("read_objects") == 4
    assert desk.run(desk.node.find(scheduler, NAMES[:5])) == [IN_MEMORY] * 4 + [SIZE]


# ------------------------------------------------------------------------------ stores


def test_stored_object_is_published_and_lent_without_a_read(desk: Desk, root: Path) -> None:
    assert desk.store(NAMES[0], image(0)) == "created"
    assert (root / NAMES[0]).read_bytes() == image(0)
    assert (root / FMT.namespace.folder / "namespace.json").exists()
    client = desk.connect()
    assert desk.bytes_at(desk.fetch(client, NAMES[:1])[0], SIZE) == image(0)
    assert desk.stat("read_objects") == 0
    assert desk.store(NAMES[0], image(0)) == "existed"
    # It is gone from the shelf, and in memory: what lies there is published.
    (root / NAMES[0]).unlink()
    assert desk.store(NAMES[0], image(0)) == "created"
    assert (root / NAMES[0]).read_bytes() == image(0)


def test_bad_bytes_are_not_published_and_not_kept(desk: Desk, root: Path) -> None:
    bad = bytearray(image(0))
    bad[-1] ^= 1
    for data in (bad, image(1), bytes(SIZE)):
        with pytest.raises(BadObjectError):
            desk.store(NAMES[0], data)
    with pytest.raises(BadObjectError, match="expected"):
        desk.store(NAMES[0], image(0)[:-1])
    client = desk.connect(image(0))
    with pytest.raises(PermanentStorageError, match="a client's memory"):
        desk.run(desk.node.store(client, NAMES[0], 1, SIZE, False))
    assert desk.run(desk.node.find(client, NAMES[:1])) == [MISSING]
    assert not list(root.rglob("*.safetensors"))
    assert desk.stat("failed_stores") == 5


def test_bytes_that_were_verified_are_published_whatever_the_client_changes(
    desk: Desk, root: Path
) -> None:
    memory = bytearray(image(0))
    client = desk.connect(memory)
    gate = desk.hold("write")
    store = desk.begin(desk.node.store(client, NAMES[0], 0, SIZE, False))
    until(lambda: desk.counts["write"] > 0)
    memory[:] = bytes(SIZE)
    gate.set()
    assert store.result(PATIENCE) == "created"
    assert (root / NAMES[0]).read_bytes() == image(0)
    assert desk.bytes_at(desk.fetch(client, NAMES[:1])[0], SIZE) == image(0)


def test_stores_of_one_object_at_the_same_time_are_one(desk: Desk, root: Path) -> None:
    gate = desk.hold("write")
    bad = bytearray(image(0))
    bad[-1] ^= 1
    clients = [desk.connect(data) for data in (image(0), image(0), bad)]
    stores = [desk.begin(desk.node.store(client, NAMES[0], 0, SIZE, False)) for client in clients]
    until(lambda: desk.stat("joined_stores") == 2)
    gate.set()
    assert [store.result(PATIENCE) for store in stores] == ["created", "existed", "existed"]
    # Where the first one fails, the others have nothing of it.
    for client in clients:
        client.memory = memoryview(image(1))
    clients[0].memory = memoryview(bytes(SIZE))
    stores = [desk.begin(desk.node.store(client, NAMES[1], 0, SIZE, False)) for client in clients]
    outcomes = [store.exception(PATIENCE) for store in stores]
    assert isinstance(outcomes[0], BadObjectError) and outcomes[1:] == [None, None]
    assert sorted(store.result() for store in stores[1:]) == ["created", "existed"]


def test_object_that_the_shelf_did_not_take_is_not_kept(desk: Desk) -> None:
    desk.faults.add(Fault("write", error=ReadOnlyStorageError(errno.EROFS, "read-only")))
    with pytest.raises(ReadOnlyStorageError):
        desk.store(NAMES[0], image(0))
    client = desk.connect()
    assert desk.run(desk.node.find(client, NAMES[:1])) == [MISSING]


def test_suspect_object_is_verified_and_replaced(desk: Desk, root: Path) -> None:
    fill(root, 2)
    path = root / NAMES[0]
    path.write_bytes(image(0)[:-1] + b"?")
    assert desk.store(NAMES[0], image(0), is_suspect=True) in ("created", "replaced")
    assert path.read_bytes() == image(0)
    assert desk.store(NAMES[1], image(1), is_suspect=True) == "existed"


def test_object_that_is_deleted_while_it_is_read_or_stored_is_not_kept(
    desk: Desk, root: Path
) -> None:
    fill(root, 1)
    gate = desk.hold("read", "write")
    client = desk.connect(image(1))
    fetch = desk.begin(desk.node.fetch(client, NAMES[:1], False))
    store = desk.begin(desk.node.store(client, NAMES[1], 0, SIZE, False))
    until(lambda: desk.counts["write"] > 0 and desk.stat("reads") == 1)
    assert desk.run(desk.node.delete(client, NAMES[:2])) == [True, False]
    gate.set()
    fetch.result(PATIENCE)
    store.result(PATIENCE)
    desk.run(desk.node.delete(client, [NAMES[1]]))
    assert desk.run(desk.node.find(client, NAMES[:2])) == [MISSING, MISSING]


def test_deletion_reports_each_object_by_itself(desk: Desk, root: Path) -> None:
    fill(root, 2)
    client = desk.connect()
    desk.fetch(client, NAMES[:1])
    desk.faults.add(Fault("delete", NAMES[1], error=PermanentStorageError("no")))
    answers = desk.run(desk.node.delete(client, [*NAMES[:2], "x"]))
    assert answers[0] is True
    assert errors_of(answers[1:]) == [PermanentStorageError, ObjectNameError]
    # It is gone from memory as well, and what was lent of it stays as it was.
    assert desk.run(desk.node.find(client, NAMES[:1])) == [MISSING]
    assert desk.stat("lent_bytes") == SLOT


def test_tails_and_markers_are_reported_for_deletion_when_clients_write_them(
    make: MakeDesk, root: Path
) -> None:
    handed_over: list[None] = []
    desk = make(on_handover=lambda: handed_over.append(None))
    desk.store(NAMES[0], image(0))
    assert not handed_over
    tail = make_tail(FMT)
    data = sealed(FMT, tail)
    assert desk.store(name_of(FMT, tail), data) == "created"
    assert desk.store(name_of(FMT, tail), data) == "existed"
    assert len(handed_over) == 1
    marker = f"{FMT.namespace.folder}/{marker_name('ab' * 16)}"
    assert desk.store(marker, b"") == "created"
    assert (root / marker).read_bytes() == b""
    assert desk.run(desk.node.stat(desk.connect(), [marker])) == [0]
    assert len(handed_over) == 2
    # Nothing else is written.
    for name in ("x", f"{FMT.namespace.folder}/namespace.json", f"../{marker}"):
        with pytest.raises(ObjectNameError):
            desk.store(name, b"")


def test_drain_waits_for_stores_and_begins_nothing_more(desk: Desk, root: Path) -> None:
    fill(root, 1)
    gate = desk.hold("write")
    client = desk.connect(image(1))
    store = desk.begin(desk.node.store(client, NAMES[1], 0, SIZE, False))
    until(lambda: desk.counts["write"] > 0)
    assert desk.run(desk.node.drain(0.01)) == 1
    drain = desk.begin(desk.node.drain(PATIENCE))
    gate.set()
    assert drain.result(PATIENCE) == 0
    assert store.result(PATIENCE) == "created"
    assert errors_of(desk.fetch(client, NAMES[:1])) == [UnavailableStorageError]
    with pytest.raises(UnavailableStorageError, match="about to stop"):
        desk.store(NAMES[2], image(2))


# ------------------------------------------------------------------------------ volatile objects


def test_volatile_object_is_kept_in_memory_alone(make: MakeDesk, root: Path) -> None:
    fmt = make_format(shards=1, chunk_size=64, weights="name:volatile")
    chunk = make_chunks(fmt, 2)
    names = [name_of(fmt, one) for one in chunk]
    desk = make()
    desk.register(fmt, is_volatile=True)
    data = sealed(fmt, chunk[0])
    assert desk.store(names[0], data) == "created"
    assert desk.store(names[0], data) == "existed"
    assert not root.exists() or not list(root.rglob("*"))
    client = desk.connect()
    desk.counts.clear()
    assert desk.run(desk.node.find(client, names)) == [IN_MEMORY, MISSING]
    answers = desk.fetch(client, names)
    assert desk.bytes_at(answers[0], len(data)) == data
    assert errors_of(answers[1:]) == [ObjectMissingError]
    assert desk.run(desk.node.read(client, names[0])) == data
    with pytest.raises(ObjectMissingError):
        desk.run(desk.node.read(client, names[1]))
    with pytest.raises(BadObjectError):
        desk.store(names[1], data)
    assert desk.run(desk.node.delete(client, names)) == [True, False]
    assert not desk.counts
    # Nobody makes it a namespace that is published.
    with pytest.raises(ConfigError):
        desk.register(fmt)


# ------------------------------------------------------------------------------ namespaces


def test_record_that_is_none_is_refused(desk: Desk) -> None:
    for record in (b"", b"{}", b"\xff", b"x" * (2 << 20)):
        with pytest.raises((ConfigError, ValueError)):
            desk.call(desk.node.register, record, "slug", False)
    layers = [f"layers.{number}" for number in range(2000)]
    for change in ({"shards": 2000}, {"layer_names": layers}):
        record = Namespace({**FMT.namespace.record, **change}).encoded
        with pytest.raises(ConfigError, match="are served"):
            desk.call(desk.node.register, record, "slug", False)
    desk.register(FMT)


def test_namespaces_beyond_the_bound_are_forgotten_the_least_recently_used_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvshelf.server.namespaces._NAMESPACES", 2)
    formats = [
        make_format(shards=1, chunk_size=64, weights=f"name:{number}") for number in range(3)
    ]
    names = [name_of(fmt, make_chunks(fmt, 1)[0]) for fmt in formats]
    namespaces = Namespaces()
    for fmt in formats[:2]:
        namespaces.register(fmt.namespace.encoded, "slug")
    namespaces.object(names[0])
    namespaces.register(formats[2].namespace.encoded, "slug")
    namespaces.object(names[0])
    with pytest.raises(UnavailableStorageError, match="not registered"):
        namespaces.object(names[1])


# ------------------------------------------------------------------------------ uses and tiers


def test_locked_objects_and_those_that_clients_report_are_recorded_as_used(
    root: Path, make: MakeDesk
) -> None:
    fill(root, 3)
    touches = FaultyStorage(posix(root), touched=Touched.TOUCHED)
    with closing(Uses(Counters())) as uses, closing(Desk(touches, uses=uses)) as desk:
        desk.register(FMT)
        client = desk.connect()
        desk.call(desk.node.lock, client, "r", NAMES[:2])
        tail = name_of(FMT, make_tail(FMT))
        for name in (NAMES[2], tail) * 2:
            assert desk.run(desk.node.touch(client, name, 0.0)) == "touched"
        assert uses.flush(PATIENCE)
        assert touches.touches == [*NAMES[:3], tail]
        # Of other names the storage is asked.
        assert desk.run(desk.node.touch(client, "some/file", 0.0)) == "touched"
        assert touches.touches[-1] == "some/file"
        desk.end()


def test_disk_tier_stands_before_the_shelf(root: Path, tmp_path: Path) -> None:
    fill(root, 2)
    with (
        closing(DiskTier(tmp_path / "tier", 1 << 30, open_seconds=PATIENCE)) as tier,
        closing(Desk(posix(root), disk_tier=tier)) as desk,
    ):
        desk.register(FMT)
        client = desk.connect()
        desk.call(desk.node.give_back, client, desk.fetch(client, NAMES[:2]))
        refs = [ObjectRef(chunk, 0) for chunk in CHUNKS[:3]]
        until(lambda: tier.holds(FMT, refs) == [True, True, False])
        assert desk.store(NAMES[2], image(2)) == "created"
        until(lambda: all(tier.holds(FMT, refs)))
        until(lambda: not desk.stat("pinned_bytes"))
        # Memory forgets, and the shelf has lost them.
        for key in list(desk.node._ring._named):
            desk.node._ring.forget(key)
        shutil.rmtree(root / FMT.namespace.folder)
        assert desk.run(desk.node.find(client, NAMES[:4])) == [SIZE, SIZE, SIZE, MISSING]
        answers = desk.fetch(client, NAMES[:3])
        assert [desk.bytes_at(offset, SIZE) for offset in answers] == [
            image(number) for number in range(3)
        ]
        desk.run(desk.node.delete(client, NAMES[:1]))
        assert tier.holds(FMT, refs[:1]) == [False]
        desk.end()
