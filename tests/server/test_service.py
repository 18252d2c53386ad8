"""The node server's service, over a directory: reads once, stores once, leases, memory, faults."""

from __future__ import annotations

import itertools
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest

from kvshelf.errors import BoundReachedError, ConfigError, TransientStorageError
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.server.messages import (
    MISSING,
    Call,
    Failed,
    Find,
    FoundSizes,
    LookedUp,
    Ready,
    Result,
    Stored,
)
from kvshelf.server.messages import Fault as Refusal
from kvshelf.tiers.disk_tier import DiskTier
from tests.server.desk import Desk, look_up_chunks, name_of, put
from tests.sim.storage import Fault, posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks, make_tail

FMT = make_format()
SIZE = FMT.object_size(0)
A, B, C, D = (letter * 16 for letter in (b"a", b"b", b"c", b"d"))


MakeDesk: TypeAlias = Callable[..., Desk]


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    return tmp_path / "shelf"


@pytest.fixture
def make_desk(shelf: Path) -> Iterator[MakeDesk]:
    desks: list[Desk] = []

    def make(*args: Any, **options: Any) -> Desk:
        desk = Desk(posix(shelf), *args, **options)
        desks.append(desk)
        desk.service.register(FMT.namespace.encoded)
        return desk

    yield make
    for desk in desks:
        desk.close()


@pytest.fixture
def desk(make_desk: MakeDesk) -> Desk:
    return make_desk()


def test_several_stores_of_one_object_are_one(desk: Desk) -> None:
    desk.describe(FMT)
    gate = desk.hold("write")
    (chunk,) = make_chunks(FMT, 1)
    name, data = name_of(FMT, chunk), sealed(FMT, chunk)
    replies: list[Any] = []
    for client in (A, B, C):
        desk.begin_store(client, name, data, replies=replies)
    gate.set()
    desk.run_until(lambda: len(replies) == 3)
    assert replies == [Stored("created"), Stored("existed"), Stored("existed")]
    assert desk.counts["write"] == 1


def test_store_that_replaces_an_object_does_not_join_one_that_creates_it(desk: Desk) -> None:
    gate = desk.hold("write")
    (chunk,) = make_chunks(FMT, 1)
    replies: list[Any] = []
    for mode in ("create", "replace"):
        desk.begin_store(A, name_of(FMT, chunk), sealed(FMT, chunk), mode, replies)
    gate.set()
    desk.run_until(lambda: len(replies) == 2)
    assert Stored("replaced") in replies or replies == [Stored("created")] * 2


def test_object_that_the_shelf_did_not_take_is_not_kept_in_memory(desk: Desk, shelf: Path) -> None:
    (chunk,) = make_chunks(FMT, 1)
    (shelf / put(shelf, FMT, chunk)).write_bytes(b"something else")
    assert desk.store(A, name_of(FMT, chunk), sealed(FMT, chunk)) == Stored("existed")
    desk.settle()
    assert desk.stat("objects") == 0


@pytest.mark.parametrize("way", ["fetch", "store", "keep"])
def test_beginnings_of_prompts_stay_longest_in_memory(
    make_desk: MakeDesk, shelf: Path, way: str
) -> None:
    desk = make_desk(16 * 8192)
    names, parent = [], ""
    for chunk in make_chunks(FMT, 5):
        name, data = name_of(FMT, chunk), sealed(FMT, chunk)
        if way == "fetch":
            (ready,) = desk.fetch(A, [put(shelf, FMT, chunk)], [SIZE])
            desk.service.release(A, [ready.lease])
        elif way == "store":
            desk.store(A, name, data)
        else:
            name = f"hash/{name}"
            desk.remember(A, name, data, parent=parent)
            parent = name
        names.append(name)
    desk.settle()
    for name in names:
        (shelf / name).unlink(missing_ok=True)
    answers = [SIZE] * 5
    for number in range(20):
        if MISSING in answers:
            break
        desk.remember(A, f"hash/{number}/0/0", bytes(SIZE))
        answers = desk.ask("find", A, names, [SIZE] * 5).answers
    assert answers == [SIZE] * 4 + [MISSING]


def test_bytes_that_a_store_has_verified_are_published_whatever_its_client_changes(
    desk: Desk, shelf: Path
) -> None:
    (chunk,) = make_chunks(FMT, 1)
    name, data = name_of(FMT, chunk), sealed(FMT, chunk)
    segment = bytearray(data)
    verify = ObjectFormat.read_named

    def change_afterwards(*args: Any) -> Any:
        verified = verify(*args)
        segment[:] = bytes(len(segment))
        return verified

    with mock.patch.object(ObjectFormat, "read_named", change_afterwards):
        assert desk.store(A, name, segment) == Stored("created")
    assert (shelf / name).read_bytes() == data
    assert desk.bytes_of(desk.fetch(B, [name], [SIZE])[0]) == data
    assert (shelf / FMT.namespace.folder / "namespace.json").read_bytes() == FMT.namespace.encoded


def test_find_asks_memory_first_and_the_shelf_for_the_rest(desk: Desk, shelf: Path) -> None:
    chunks = make_chunks(FMT, 3)
    names = [name_of(FMT, chunk) for chunk in chunks]
    desk.store(A, names[0], sealed(FMT, chunks[0]))
    put(shelf, FMT, chunks[1])
    desk.counts.clear()
    assert desk.ask("find", A, names, [SIZE] * 3) == FoundSizes([SIZE, SIZE, MISSING])
    assert desk.counts["stat"] == 1
    assert desk.counts["stat_names"] == 2


def test_lookup_counts_leading_chunks_and_reads_what_only_the_shelf_has(
    desk: Desk, shelf: Path
) -> None:
    chunks = make_chunks(FMT, 5)
    chains = [[name_of(FMT, chunk, shard) for shard in range(FMT.shards)] for chunk in chunks]
    for chunk in chunks[:2]:
        for shard in range(FMT.shards):
            desk.store(A, name_of(FMT, chunk, shard), sealed(FMT, chunk, shard))
    put(shelf, FMT, chunks[2], 0)
    put(shelf, FMT, chunks[2], 1)
    # One shard of the next is missing.
    put(shelf, FMT, chunks[3], 0)
    put(shelf, FMT, chunks[4], 0)
    put(shelf, FMT, chunks[4], 1)
    for _ in range(2):
        assert desk.ask("lookup", A, "request", chains) == LookedUp(3)
    desk.run_until(lambda: desk.stat("objects") == 3 * FMT.shards)
    desk.settle()
    assert desk.stat("pinned_bytes") == 3 * FMT.shards * SIZE
    desk.service.end_session(A, "request")
    assert desk.stat("pinned_bytes") == 0


def test_expired_lease_is_not_valid_and_its_memory_waits_for_its_client(desk: Desk) -> None:
    (chunk,) = make_chunks(FMT, 1)
    name, data = name_of(FMT, chunk), sealed(FMT, chunk)
    desk.store(A, name, data)
    (ready,) = desk.fetch(A, [name], [SIZE])
    assert isinstance(ready, Ready)
    assert desk.is_valid(ready)
    desk.now += 31.0
    desk.service.tick()
    assert not desk.is_valid(ready)
    # Others use it as before.
    (fresh,) = desk.fetch(B, [name], [SIZE])
    assert isinstance(fresh, Ready)
    assert desk.bytes_of(fresh) == data
    assert desk.is_valid(fresh)
    desk.service.release(B, [fresh.lease])
    assert desk.stat("pinned_bytes") == SIZE
    assert desk.bytes_of(ready) == data
    desk.service.release(A, [ready.lease])
    assert desk.stat("pinned_bytes") == 0


def test_what_a_dead_client_asked_for_and_nobody_has_begun_is_forgotten(desk: Desk) -> None:
    gate = desk.hold("stat", "write")
    replies: list[Any] = []
    kept: list[weakref.ref[Any]] = []
    for number in range(50):
        desk.service.find(A, Find([f"other-{number}"], [1]), replies.append)
        # Of arrays a test can see that nobody has them any more.
        data = array("B", b"data")
        call = Call("write", [f"name-{number}", "create"], data)
        desk.service.call(A, call, replies.append)
        (chunk,) = make_chunks(FMT, 1, seed=number)
        source, name = array("B", sealed(FMT, chunk)), name_of(FMT, chunk)
        view = memoryview(source)
        desk.begin_store(A, name, view, replies=replies)
        kept += [weakref.ref(data), weakref.ref(source)]
    del call, data, source, view
    last: list[Any] = []
    desk.service.call(B, Call("write", ["last", "create"], b""), last.append)
    desk.service.find(B, Find(["last"], [1]), last.append)
    desk.service.client_gone(A)
    # What was begun goes on; the rest has left the queues, and so has what it held.
    desk.run_until(lambda: sum(one() is not None for one in kept) <= 2 * 4)
    gate.set()
    desk.run_until(lambda: len(last) == 2)
    desk.settle()
    assert desk.counts["write"] <= 2 * 4 + 1
    assert desk.counts["stat"] <= 4 + 1
    assert desk.stat("pinned_bytes") == 0
    # All memory is free again.
    desk.run_until(lambda: desk.stat("stores") == 0)
    (chunk,) = make_chunks(FMT, 1, seed=49)
    assert desk.store(B, name_of(FMT, chunk), sealed(FMT, chunk)) == Stored("created")


def test_stores_of_a_dead_client_are_forgotten_or_end_once(make_desk: MakeDesk) -> None:
    desk = make_desk(16 * 16384)
    gate = desk.hold("write")
    chunks = make_chunks(FMT, 48)
    replies = [desk.begin_store(A, name_of(FMT, one), sealed(FMT, one)) for one in chunks]
    assert desk.stat("waiting") > 0
    joined = desk.begin_store(B, name_of(FMT, chunks[-1]), sealed(FMT, chunks[-1]))
    desk.service.client_gone(A)
    gate.set()
    desk.settle()
    assert {len(answers) for answers in replies} == {1}
    # Another client's store of an object that A had not begun to store goes on.
    assert joined == [Stored("created")]
    assert desk.stat("waiting") == desk.stat("pinned_bytes") == 0


@mock.patch("kvshelf.server.service._FEW_THREADS", 2)
def test_read_that_others_wait_for_outlives_the_client_that_asked_first(
    make_desk: MakeDesk, shelf: Path
) -> None:
    desk = make_desk()
    gate = desk.hold("read")
    chunks = make_chunks(FMT, 3)
    names = [put(shelf, FMT, chunk) for chunk in chunks]
    gone = desk.begin_fetch(A, names, [SIZE] * 3)
    outcomes = desk.begin_fetch(B, names[1:], [SIZE] * 2)
    assert desk.stat("joined_fetches") == 2
    desk.service.client_gone(A)
    gate.set()
    desk.run_until(lambda: len(outcomes) == 2)
    assert [desk.bytes_of(outcomes[at]) for at in range(2)] == [
        sealed(FMT, chunk) for chunk in chunks[1:]
    ]
    desk.settle()
    assert not gone
    assert desk.stat("failed_fetches") == 0
    assert desk.stat("pinned_bytes") == 2 * SIZE


def test_requests_that_find_no_room_wait_until_others_give_memory_back(
    make_desk: MakeDesk, shelf: Path
) -> None:
    chunks = make_chunks(FMT, 48)
    names = [put(shelf, FMT, chunk) for chunk in chunks]
    desk = make_desk(16 * 16384)
    outcomes = desk.begin_fetch(A, names, [SIZE] * len(names))
    used = 0
    while used < len(names):
        # Memory is for those that were asked for first.
        desk.run_until(lambda: used in outcomes)  # noqa: B023
        ready = outcomes[used]
        assert desk.bytes_of(ready) == sealed(FMT, chunks[used])
        assert desk.stat("pinned_bytes") <= desk.stat("capacity_bytes") / 2
        assert isinstance(ready, Ready)
        desk.service.release(A, [ready.lease])
        used += 1
    assert desk.stat("pinned_bytes") == desk.stat("waiting") == 0


def test_clients_wait_for_memory_each_for_its_own_share_and_in_turn(
    make_desk: MakeDesk, shelf: Path
) -> None:
    names = [put(shelf, FMT, chunk) for chunk in make_chunks(FMT, 64)]
    desk = make_desk(16 * 16384)

    def fetch(client: bytes, first: int, end: int, session: str = "s") -> dict[int, Any]:
        outcomes = desk.begin_fetch(client, names[first:end], [SIZE] * (end - first), session)
        desk.settle()
        return outcomes

    held = fetch(A, 0, 30)
    share = len(held)
    later = fetch(A, 30, 31, "another")
    assert share < 30 and not later
    # Who waits for its own share holds up nobody else.
    rest = fetch(B, 30, 40, "another")
    assert len(rest) == 31 - share
    # The end of a session ends its waits, and no others.
    desk.service.end_session(B, "s")
    desk.service.end_session(A, "s")
    desk.settle()
    assert len(held) == 30 and not later
    assert {outcome.fault.kind for outcome in list(held.values())[share:]} == {
        "UnavailableStorageError"
    }
    assert len(rest) == 31 - share
    desk.service.end_session(A, "another")
    assert len(rest) == 31 - share
    # Memory is full. A lookup counts what can be read later, and waits for nothing.
    waits = desk.stat("waiting")
    assert desk.ask("lookup", C, "s", [[names[61]]]) == LookedUp(1)
    assert desk.stat("waiting") == waits
    desk.service.end_session(B, "another")
    # What is given back goes to each in turn, however much one of them waits for.
    waiting = [fetch(C, 40, 60), fetch(D, 60, 61)]
    assert not any(waiting)
    desk.service.release(A, [held[0].lease, held[1].lease])
    desk.settle()
    assert [len(outcomes) for outcomes in waiting] == [1, 1]


def test_object_read_for_a_client_that_holds_its_share_by_then_waits(
    make_desk: MakeDesk, shelf: Path
) -> None:
    names = [put(shelf, FMT, chunk) for chunk in make_chunks(FMT, 31)]
    desk = make_desk(16 * 16384)
    for ready in desk.fetch(B, names[:26], [SIZE] * 26):
        desk.service.release(B, [ready.lease])
    gate = desk.hold("read")
    outcomes = desk.begin_fetch(A, names[26:27], [SIZE])
    held = desk.fetch(A, names[:26], [SIZE] * 26)
    gate.set()
    desk.settle()
    assert not outcomes
    desk.service.release(A, [held[0].lease])
    desk.settle()
    assert desk.bytes_of(outcomes[0])


def test_memory_that_a_lookup_keeps_until_its_answer_goes_to_those_who_wait(
    make_desk: MakeDesk, shelf: Path
) -> None:
    *names, new = [put(shelf, FMT, chunk) for chunk in make_chunks(FMT, 32)]
    desk = make_desk(16 * 16384)
    for first, end in ((0, 26), (26, 31)):
        for ready in desk.fetch(B, names[first:end], [SIZE] * (end - first)):
            desk.service.release(B, [ready.lease])
    (absent,) = make_chunks(FMT, 1, seed=1)
    chains = [[name_of(FMT, absent)], *[[name] for name in names]]
    # A hit is within its client's share.
    assert desk.ask("lookup", C, "s", [*chains[1:], chains[0]]) == LookedUp(26)
    assert desk.stat("leases") == 26
    desk.service.end_session(C, "s")
    gate = desk.hold("stat")
    replies: list[Any] = []
    desk.service.lookup(A, look_up_chunks("s", chains), replies.append)
    outcomes = desk.begin_fetch(B, [new], [SIZE])
    assert desk.stat("waiting") == 1
    gate.set()
    assert desk.reply(replies) == LookedUp(0)
    desk.settle()
    assert isinstance(outcomes[0], Ready)


def test_object_above_half_of_the_memory_is_refused_at_once(
    make_desk: MakeDesk, shelf: Path
) -> None:
    fmt = make_format(chunk_size=512)
    (chunk,) = make_chunks(fmt, 1)
    name, data = put(shelf, fmt, chunk), sealed(fmt, chunk)
    desk = make_desk(3 * len(data) // 2)
    desk.service.register(fmt.namespace.encoded)
    (failed,) = desk.fetch(A, [name], [len(data)])
    assert isinstance(failed, Failed)
    assert failed.fault.kind == desk.store(A, name, data).kind == "PermanentStorageError"


def test_requests_of_a_client_that_waits_are_served_in_their_order(
    make_desk: MakeDesk, shelf: Path
) -> None:
    fmt = make_format(chunk_size=128)
    size, tail = fmt.object_size(0), make_tail(fmt)
    names = [put(shelf, fmt, chunk) for chunk in (*make_chunks(fmt, 9), tail)]
    sizes = [*[size] * 9, fmt.object_size(0, tail.tokens)]
    desk = make_desk(16 * 16384)
    desk.service.register(fmt.namespace.encoded)
    # After the seventh there is room for the small one alone.
    outcomes = desk.begin_fetch(A, names, sizes)
    desk.settle()
    assert sorted(outcomes) == list(range(7))
    desk.service.release(A, [outcomes[0].lease])
    desk.settle()
    assert sorted(outcomes) == list(range(8))
    desk.service.release(A, [outcomes[1].lease])
    desk.settle()
    assert sorted(outcomes) == list(range(10))


def test_what_waits_too_long_for_memory_fails(make_desk: MakeDesk, shelf: Path) -> None:
    names = [put(shelf, FMT, chunk) for chunk in make_chunks(FMT, 48)]
    desk = make_desk(16 * 16384)
    outcomes = desk.begin_fetch(A, names, [SIZE] * len(names))
    desk.settle()
    assert len(outcomes) < len(names)
    desk.now += 31.0
    desk.service.tick()
    assert len(outcomes) == len(names)
    last = outcomes[len(names) - 1]
    assert isinstance(last, Failed)
    # Nothing that the client should blame the storage for.
    assert last.fault.kind == "NoSpaceStorageError"
    assert desk.stat("waiting") == 0


def test_client_that_asks_for_the_wrong_size_of_what_is_being_read_harms_nobody(
    desk: Desk, shelf: Path
) -> None:
    gate = desk.hold("read")
    (chunk,) = make_chunks(FMT, 1)
    name = put(shelf, FMT, chunk)
    outcomes = desk.begin_fetch(A, [name], [SIZE])

    def is_refused(size: int) -> bool:
        (outcome,) = desk.fetch(B, [name], [size])
        return isinstance(outcome, Failed) and outcome.fault.kind == "WrongSize"

    assert is_refused(0) and is_refused(SIZE + 1)
    gate.set()
    desk.run_until(lambda: bool(outcomes))
    assert desk.bytes_of(outcomes[0]) == sealed(FMT, chunk)
    assert is_refused(0) and is_refused(SIZE + 1)
    assert desk.stat("leases") == 1


def test_what_a_lookup_has_leased_can_be_fetched_whatever_else_waits(
    make_desk: MakeDesk, shelf: Path
) -> None:
    desk = make_desk(24 * 8192)
    chunks = make_chunks(FMT, 40)
    names = [put(shelf, FMT, chunk) for chunk in chunks]
    # Longer than the client's share, so it is cut there.
    reply = desk.ask("lookup", A, "request", [[name] for name in names])
    assert isinstance(reply, LookedUp)
    assert 5 < reply.chunks < 24
    desk.settle()
    assert desk.stat("waiting") == 0
    assert desk.stat("leases") == reply.chunks
    more = desk.begin_fetch(A, names[-4:], [SIZE] * 4, "other")
    assert not more
    found = names[: reply.chunks]
    for ready, chunk in zip(
        desk.fetch(A, found, [SIZE] * len(found), "request"), chunks, strict=False
    ):
        assert desk.bytes_of(ready) == sealed(FMT, chunk)
    assert desk.stat("leases") == reply.chunks


def test_lookup_ends_at_the_first_chunk_that_was_in_memory_only(desk: Desk) -> None:
    first, second = f"hash/{'0' * 64}/1/0", f"hash/{'0' * 64}/2/0"
    desk.remember(A, second, b"bytes")
    assert desk.ask("lookup", A, "request", [[first], [second]]) == LookedUp(0)


def test_lookup_of_a_scheduler_holds_no_memory_that_a_worker_has_fetched_and_released(
    desk: Desk,
) -> None:
    (chunk,) = make_chunks(FMT, 1)
    name = name_of(FMT, chunk)
    desk.store(A, name, sealed(FMT, chunk))
    assert desk.ask("lookup", A, "request", [[name]]) == LookedUp(1)
    (ready,) = desk.fetch(B, [name], [SIZE], "request")
    assert isinstance(ready, Ready)
    desk.service.release(B, [ready.lease])
    assert desk.stat("leases") == desk.stat("pinned_bytes") == 0


@pytest.mark.parametrize("is_here", [False, True])
def test_client_that_goes_while_its_requests_are_served_leaves_nothing(
    desk: Desk, shelf: Path, is_here: bool
) -> None:
    """Some of its objects are in memory, so that they are pinned meanwhile."""
    chunks = make_chunks(FMT, 4)
    names = [put(shelf, FMT, chunk) for chunk in chunks]
    if is_here:
        desk.fetch(A, names[:1], [SIZE])
    gate = desk.hold("stat", "write", "read")
    replies: list[Any] = []
    desk.service.lookup(A, look_up_chunks("s", [[name] for name in names]), replies.append)
    fetched = desk.begin_fetch(A, names[3:], [SIZE])
    data = sealed(FMT, chunks[2])
    first = desk.begin_store(B, names[2], data)
    joined = desk.begin_store(A, names[2], data)
    desk.run_until(lambda: desk.counts["open"] == 1 + is_here)
    desk.service.client_gone(A)
    gate.set()
    desk.settle()
    assert first == [Stored("existed")]
    assert not joined and not fetched
    assert desk.stat("leases") == desk.stat("pinned_bytes") == 0
    # What was read for it is there for others.
    assert desk.stat("read_objects") == 1 + is_here


def test_lookup_counts_what_is_in_memory_while_the_shelf_fails(desk: Desk) -> None:
    chunks = make_chunks(FMT, 3)
    for chunk in chunks[:2]:
        desk.store(A, name_of(FMT, chunk), sealed(FMT, chunk))
    desk.faults.add(Fault("stat", error=TransientStorageError(5, "broken")))
    chains = [[name_of(FMT, chunk)] for chunk in chunks]
    assert desk.ask("lookup", A, "request", chains) == LookedUp(2)


def test_overdue_client_takes_nothing_from_others(desk: Desk) -> None:
    name = f"hash/{'0' * 64}/some-hash/0"
    desk.remember(A, name, b"bytes")
    desk.fetch(B, [name], [5])
    desk.now += 20.0
    desk.ask("lookup", A, "request", [[name]])
    desk.now += 15.0
    desk.service.tick()
    assert desk.stat("overdue_leases") == 1
    (ready,) = desk.fetch(A, [name], [5], "request")
    assert desk.bytes_of(ready) == b"bytes"
    assert isinstance(ready, Ready)
    assert desk.is_valid(ready)


def test_what_is_deleted_while_it_is_read_or_stored_is_not_kept(desk: Desk, shelf: Path) -> None:
    desk.describe(FMT)
    gate = desk.hold("read", "publish")
    first, second = make_chunks(FMT, 2)
    names = [put(shelf, FMT, first), name_of(FMT, second)]
    outcomes = desk.begin_fetch(A, names[:1], [SIZE])
    replies: list[Any] = []
    data = sealed(FMT, second)
    desk.begin_store(A, names[1], data, replies=replies)
    desk.run_until((shelf / names[1]).exists)
    for name in names:
        assert desk.ask("call", B, "delete", [name], b"") == Result(True)
    gate.set()
    desk.run_until(lambda: bool(outcomes and replies))
    desk.settle()
    assert desk.ask("find", B, names, [SIZE] * 2) == FoundSizes([MISSING] * 2)


@mock.patch("kvshelf.server.service._FEW_THREADS", 2)
def test_clients_that_store_take_turns(make_desk: MakeDesk) -> None:
    steps = threading.Semaphore(0)
    desk = make_desk(32 * 8192)
    desk.describe(FMT)
    desk.faults.add(Fault("write", wait=steps))
    ended: list[Any] = []
    chunks = make_chunks(FMT, 41)
    for chunk in chunks[:40]:
        desk.begin_store(A, name_of(FMT, chunk), sealed(FMT, chunk), replies=ended)
    others = desk.begin_store(B, name_of(FMT, chunks[40]), sealed(FMT, chunks[40]))
    assert desk.stat("waiting") > 20
    for count in range(1, 42):
        steps.release()
        desk.run_until(lambda: len(ended) + len(others) == count)  # noqa: B023
        # One thread stores here. First ends what it has begun; with it the other client begins one
        # more, which is its turn; then the memory is there, and the turn at the thread comes.
        assert others or count < 6
    assert ended + others == [Stored("created")] * 41


def test_small_store_waits_behind_large_ones(make_desk: MakeDesk) -> None:
    fmt = make_format(chunk_size=128)
    desk = make_desk(32 * 8192)
    desk.service.register(fmt.namespace.encoded)
    gate = desk.hold("write")
    stores = [
        desk.begin_store(A, name_of(fmt, chunk), sealed(fmt, chunk))
        for chunk in (*make_chunks(fmt, 5), make_tail(fmt))
    ]
    # There is room for three, and for the small one.
    assert desk.stat("waiting") == 3
    gate.set()
    desk.run_until(lambda: all(stores))


def test_store_that_waits_too_long_for_memory_blames_no_storage(
    make_desk: MakeDesk, shelf: Path
) -> None:
    desk = make_desk(32 * 8192)
    gate = desk.hold("write")
    replies: list[Any] = []
    for chunk in make_chunks(FMT, 40):
        desk.begin_store(A, name_of(FMT, chunk), sealed(FMT, chunk), replies=replies)
    waiting = int(desk.stat("waiting"))
    assert waiting
    # Those that were begun leave memory to others.
    assert desk.stat("pinned_bytes") <= desk.stat("capacity_bytes") / 4
    desk.now += 31.0
    desk.service.tick()
    assert len(replies) == waiting
    # As where a bound of the shelf allows no store: the client's circuit breaker stays closed.
    assert {type(reply.error()) for reply in replies} == {BoundReachedError}
    assert desk.stat("waiting") == 0
    gate.set()
    desk.run_until(lambda: len(replies) == 40)
    assert replies[waiting:] == [Stored("created")] * (40 - waiting)


def test_read_that_hangs_fails_those_who_wait_and_holds_up_nobody_else(
    make_desk: MakeDesk, shelf: Path
) -> None:
    first, second = make_chunks(FMT, 2)
    names = [put(shelf, FMT, chunk) for chunk in (first, second)]
    desk = make_desk()
    gate = desk.faults.hang("read", names[0], times=1)
    (failed,) = desk.fetch(A, names[:1], [SIZE])
    assert isinstance(failed, Failed)
    assert failed.fault.kind == "TransientStorageError"
    # Its memory is not given to others while the read may still write to it.
    assert desk.stat("pinned_bytes") == SIZE
    (ready,) = desk.fetch(B, names[1:], [SIZE])
    assert desk.bytes_of(ready) == sealed(FMT, second)
    (again,) = desk.fetch(B, names[:1], [SIZE])
    assert desk.bytes_of(again) == sealed(FMT, first)
    gate.set()
    desk.run_until(lambda: desk.stat("pinned_bytes") == 2 * SIZE)


def test_what_is_in_memory_only_has_its_checksum_and_never_reaches_the_shelf(
    desk: Desk, shelf: Path
) -> None:
    name = f"hash/{'0' * 64}/some-hash/0"
    assert desk.remember(A, name, b"bytes" * 100) == Stored("created")
    assert desk.remember(B, name, b"bytes" * 100) == Stored("existed")
    (ready,) = desk.fetch(B, [name], [500])
    assert desk.bytes_of(ready) == b"bytes" * 100
    assert desk.ask("lookup", B, "r", [[name], [name + "1"]]) == LookedUp(1)
    wrong = desk.remember(A, name + "2", b"bytes", checksum=7)
    assert wrong.kind == "PayloadDamaged"
    (failed,) = desk.fetch(B, [name + "2"], [5])
    assert isinstance(failed, Failed)
    assert failed.fault.kind == "ObjectMissingError"
    assert not list((shelf).iterdir())


def test_what_is_in_memory_only_outlives_what_comes_after_it(desk: Desk) -> None:
    size = 64 << 10
    chain = [f"hash/chain/{number}" for number in range(3)]
    for number, name in enumerate(chain):
        parent = chain[number - 1] if number else ""
        assert desk.remember(A, name, bytes(size), parent=parent) == Stored("created")
    desk.settle()
    for number in itertools.count():
        if desk.stat("evicted_objects"):
            break
        desk.remember(A, f"hash/other/{number}", bytes(size))
    # The chain was used before all others, and its end goes first.
    found = [desk.ask("lookup", A, name, [[name]]) for name in chain]
    assert found == [LookedUp(1), LookedUp(1), LookedUp(0)]


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        ("../../etc/passwd", SIZE, "ObjectNameError"),
        (f"{FMT.namespace.folder}/namespace.json", SIZE, "ObjectNameError"),
        (name_of(FMT, make_chunks(FMT, 1)[0]), SIZE - 1, "WrongSize"),
        (name_of(make_format(shards=1), make_chunks(FMT, 1)[0]), SIZE, "UnavailableStorageError"),
        ("hash/" + "0" * 64, SIZE, "ObjectMissingError"),
        ("", SIZE, "ObjectNameError"),
    ],
)
def test_name_that_is_no_object_of_a_known_namespace_is_refused(
    desk: Desk, name: str, size: int, kind: str
) -> None:
    (failed,) = desk.fetch(A, [name], [size])
    assert isinstance(failed, Failed)
    assert failed.fault.kind == kind
    refused = desk.store(A, name, bytes(size))
    assert isinstance(refused, Refusal)
    assert desk.stat("pinned_bytes") == 0


def test_record_that_is_none_is_refused(desk: Desk) -> None:
    small = make_format(shards=1)
    desk.service.register(small.namespace.encoded)
    # Of digests only the beginning is in the name of a folder.
    known = desk.service._namespaces._known
    known[small.namespace.digest.hex()[:16]] = known[FMT.namespace.digest.hex()[:16]]
    with pytest.raises(ConfigError, match="has the folder of another one"):
        desk.service.register(small.namespace.encoded)
    record = FMT.namespace.record | {
        "shards": 4096,
        "kv_heads": 4096,
        "layer_shapes": ["2,*,4096,8"] * 3,
        "layouts": ["canonical"] * 3,
    }
    many = Namespace({**record, "data_offset": ObjectFormat.required_data_offset(record)})
    for large in (many, make_format(layers=1025).namespace):
        with pytest.raises(ConfigError, match="are served"):
            desk.service.register(large.encoded)
    for wrong in (b"", b"{}", b"[1]", FMT.namespace.encoded + b" ", b"{" * 2_000_000):
        with pytest.raises(ConfigError):
            desk.service.register(wrong)


@mock.patch("kvshelf.server.namespaces._NAMESPACES", 2)
def test_namespaces_beyond_the_bound_are_forgotten_those_unused_for_longest_first(
    desk: Desk, shelf: Path
) -> None:
    others = [make_format(chunk_size=size) for size in (16, 32)]
    desk.service.register(others[0].namespace.encoded)
    used = put(shelf, FMT, make_chunks(FMT, 1)[0])
    assert isinstance(desk.fetch(A, [used], [SIZE])[0], Ready)
    desk.service.register(others[1].namespace.encoded)
    faults = []
    for fmt in (FMT, *others):
        name = name_of(fmt, make_chunks(fmt, 2)[1])
        (failed,) = desk.fetch(A, [name], [fmt.object_size(0)])
        assert isinstance(failed, Failed)
        faults.append(failed.fault.kind)
    assert faults == ["ObjectMissingError", "UnavailableStorageError", "ObjectMissingError"]


@pytest.mark.parametrize("method", ["delete", "set_aside"])
def test_object_that_a_client_deletes_is_gone_from_memory_as_well(
    desk: Desk, shelf: Path, method: str
) -> None:
    name = put(shelf, FMT, make_chunks(FMT, 1)[0])
    desk.fetch(B, [name], [SIZE])
    for there in (True, False):
        assert desk.ask("call", A, method, [name], b"") == Result(there)
    assert not (shelf / name).exists()
    assert desk.ask("find", A, [name], [SIZE]) == FoundSizes([MISSING])


@pytest.mark.parametrize(
    ("method", "args", "kind"),
    [
        ("delete", ["../x"], "ObjectNameError"),
        ("read", ["/etc/passwd", 0, 10], "ObjectNameError"),
        ("read", ["a", 0, 1 << 30], "PermanentStorageError"),
        ("read", ["a", -1, 10], "PermanentStorageError"),
        ("stat", ["a"], "PermanentStorageError"),
        ("close", [], "PermanentStorageError"),
        ("perform", ["a"], "PermanentStorageError"),
        ("list", ["", 77, None, None, False], "PermanentStorageError"),
        ("write", [name_of(FMT, make_chunks(FMT, 1)[0]), "create"], "ObjectNameError"),
        ("watch", ["x"], "PermanentStorageError"),
    ],
)
def test_calls_of_strangers_are_refused(
    desk: Desk, method: str, args: list[Any], kind: str
) -> None:
    assert desk.ask("call", A, method, args, b"").kind == kind


def test_long_listing_comes_in_pages_and_ends_with_its_client(desk: Desk, shelf: Path) -> None:
    folder = shelf / "many"
    folder.mkdir(parents=True)
    for number in range(2500):
        (folder / f"{number}").touch()

    def page(number: int | None) -> Any:
        return desk.ask("call", A, "list", ["many", number, None, None, False], b"")

    rows, more = page(None).value
    names = {row[0] for row in rows}
    while more is not None:
        rows, more = page(more).value
        names |= {row[0] for row in rows}
    assert len(names) == 2500

    # The client goes between two pages, and while it waits for the first one.
    more = page(None).value[1]
    desk.service.client_gone(A)
    assert isinstance(page(more), Refusal)
    gate = desk.hold("list")
    replies: list[Any] = []
    desk.counts.clear()
    desk.service.call(A, Call("list", ["many", None, None, None, False]), replies.append)
    desk.run_until(lambda: desk.counts["list"] == 1)
    desk.service.client_gone(A)
    gate.set()
    assert isinstance(page(desk.reply(replies).value[1]), Refusal)


def test_drain_waits_for_stores_and_takes_no_more(desk: Desk) -> None:
    gate = desk.hold("write", "delete")
    first, second = make_chunks(FMT, 2)
    replies = desk.begin_store(A, name_of(FMT, first), sealed(FMT, first))
    changes: list[Any] = []
    desk.service.call(A, Call("delete", ["x"]), changes.append)
    # A store, and another change of the storage.
    assert desk.service.drain(0.0) == 2
    assert (
        desk.store(A, name_of(FMT, second), sealed(FMT, second)).kind == "UnavailableStorageError"
    )
    change = desk.ask("call", A, "delete", [name_of(FMT, second)], b"")
    (fetched,) = desk.fetch(A, [name_of(FMT, second)], [SIZE])
    assert isinstance(fetched, Failed)
    assert change.kind == fetched.fault.kind == "UnavailableStorageError"
    left: list[int] = []
    drainer = threading.Thread(target=lambda: left.append(desk.service.drain(20.0)))
    drainer.start()
    gate.set()
    desk.run_until(lambda: bool(left))
    drainer.join()
    assert left == [0]
    assert replies == [Stored("created")]
    assert changes == [Result(False)]


def test_tails_and_markers_are_named_for_deletion_when_clients_write_them(
    make_desk: MakeDesk,
) -> None:
    handed_over: list[None] = []
    desk = make_desk(hands_over=lambda: handed_over.append(None))
    (chunk,) = make_chunks(FMT, 1)
    tail, marker = make_tail(FMT), f"{FMT.namespace.folder}/.kvshelf/gave-up/m"
    counts = []
    for _ in range(2):
        for one in (chunk, tail):
            desk.store(A, name_of(FMT, one), sealed(FMT, one))
            desk.settle()
            counts.append(len(handed_over))
    desk.ask("call", A, "write", [marker, "create"], b"")
    desk.settle()
    assert [*counts, len(handed_over)] == [0, 1, 1, 1, 2]


def test_disk_tier_stands_before_the_shelf(
    make_desk: MakeDesk, tmp_path: Path, shelf: Path
) -> None:
    chunks = make_chunks(FMT, 2)
    names = [put(shelf, FMT, chunks[0]), name_of(FMT, chunks[1])]
    with closing(DiskTier(tmp_path / "tier", 1 << 30)) as tier:
        desk = make_desk(disk_tier=tier)
        # It gets what is read, and what is stored.
        desk.fetch(A, names[:1], [SIZE])
        desk.store(A, names[1], sealed(FMT, chunks[1]))
        assert tier.drain(20.0)
        desk.close()
        # After a restart the objects come from the tier.
        desk = make_desk(disk_tier=tier)
        assert desk.ask("find", A, names, [SIZE] * 2) == FoundSizes([SIZE] * 2)
        for ready, chunk in zip(desk.fetch(A, names, [SIZE] * 2), chunks, strict=True):
            assert desk.bytes_of(ready) == sealed(FMT, chunk)
        assert not desk.counts
        desk.ask("call", A, "delete", [names[0]], b"")
        desk.run_until(
            lambda: desk.ask("find", A, names, [SIZE] * 2) == FoundSizes([MISSING, SIZE])
        )
