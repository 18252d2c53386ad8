"""10,000 random operations of several clients against a model of what must hold."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from kvshelf.server.messages import MISSING, Failed, Fault, LookedUp, Ready, Stored
from tests.server.desk import Desk, name_of
from tests.sim.storage import posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks

FMT = make_format()
SIZE = FMT.object_size(0)
CHUNKS = make_chunks(FMT, 40)
OBJECTS = {
    name_of(FMT, chunk, shard): sealed(FMT, chunk, shard)
    for chunk in CHUNKS
    for shard in range(FMT.shards)
}
HASHED = {f"hash/{FMT.namespace.digest.hex()}/{i}": bytes([i]) * (100 + 997 * i) for i in range(9)}
CONTENT = {**OBJECTS, **HASHED}
CLIENTS = [bytes([number]) * 16 for number in range(1, 5)]
#: Room for about half of all objects.
ARENA_BYTES = 48 * 8192
LEASE = 30.0
#: Objects of this size fill the memory.
PAGE = 4096
#: Leases that a client keeps: never so many that others find no room for long.
MOST_KEPT = 6
#: Part of the memory that may be in use before the sessions of lookups end. An object takes almost
#: twice its bytes, so little more would fill the memory, and no store would ever find room.
MOST_PINNED = 0.4


class Model:
    """What clients hold and what is on the shelf, beside the service that is tested."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.shelf = folder
        self.desk = Desk(posix(folder), ARENA_BYTES, lease_seconds=LEASE)
        self.desk.service.register(FMT.namespace.encoded)
        #: The leases of each client, with the name, and the time when each began.
        self.held: dict[bytes, list[tuple[Ready, str, float]]] = {c: [] for c in CLIENTS}
        #: What is on the shelf: whether it is good.
        self.stored: dict[str, bool] = {}

    # ------------------------------------------------------------------------------- operations

    def step(self) -> None:
        operations = {
            self.fetch: 30,
            self.fetch_many: 2,
            self.store: 15,
            self.store_together: 4,
            self.store_bad: 4,
            self.remember: 8,
            self.release: 25,
            self.find: 6,
            self.lookup: 8,
            self.end_session: 4,
            self.pass_time: 4,
            self.client_gone: 2,
            self.delete: 4,
            self.put: 6,
            self.damage: 3,
        }
        (operation,) = self.random.choices(list(operations), list(operations.values()))
        self.end_sessions_where_memory_is_full()
        operation()
        self.desk.settle()
        self.check()

    def some(self, names: dict[str, bytes], most: int = 3) -> list[str]:
        return self.random.sample(list(names), self.random.randint(1, most))

    def client(self) -> bytes:
        return self.random.choice(CLIENTS)

    def fetch(self) -> None:
        client = self.client()
        names = self.some(CONTENT)
        if len(self.held[client]) + len(names) > MOST_KEPT:
            return
        sizes = [len(CONTENT[name]) for name in names]
        for name, outcome in zip(names, self.desk.fetch(client, names, sizes), strict=True):
            if isinstance(outcome, Failed):
                # There was room, so it is neither in memory nor good on the shelf.
                assert not self.stored.get(name), outcome
            else:
                self.held[client].append((outcome, name, self.desk.now))

    def fetch_many(self) -> None:
        """More than one client may hold: in turns, as memory is given back."""
        client = self.client()
        names = self.random.sample(list(OBJECTS), 40)
        outcomes = self.desk.begin_fetch(client, names, [SIZE] * len(names), "many")
        told: set[int] = set()
        while len(told) < len(names):
            self.desk.run_until(lambda: bool(outcomes.keys() - told))
            for index in outcomes.keys() - told:
                told.add(index)
                outcome = outcomes[index]
                if isinstance(outcome, Ready):
                    assert self.desk.bytes_of(outcome) == CONTENT[names[index]]
                    self.desk.service.release(client, [outcome.lease])
                else:
                    assert not self.stored.get(names[index]), outcome

    def store(self) -> None:
        (name,) = self.some(OBJECTS, 1)
        mode = self.random.choice(["create", "create", "replace"])
        reply = self.desk.store(self.client(), name, OBJECTS[name], mode)
        there = name in self.stored
        expected = "created" if not there else "existed" if mode == "create" else "replaced"
        assert reply == Stored(expected)
        if mode == "replace" or not there:
            self.stored[name] = True

    def store_together(self) -> None:
        """Several clients store one object; the bytes of some may be bad."""
        (name,) = self.some(OBJECTS, 1)
        there, data = name in self.stored, OBJECTS[name]
        clients = self.random.sample(CLIENTS, 3)
        good = [self.random.random() < 0.7 for _ in clients]
        replies = [
            self.desk.begin_store(client, name, data if well else self.spoil(data))
            for client, well in zip(clients, good, strict=True)
        ]
        self.desk.run_until(lambda: all(replies))
        first = good.index(True) if any(good) else len(clients)
        for number, (reply,) in enumerate(replies):
            if number < first:
                assert isinstance(reply, Fault)
            else:
                # Whoever joins a good store has its outcome.
                assert reply == Stored("created" if number == first and not there else "existed")
        if any(good):
            self.stored.setdefault(name, True)

    def store_bad(self) -> None:
        (name,) = self.some(OBJECTS, 1)
        assert isinstance(self.desk.store(self.client(), name, self.spoil(OBJECTS[name])), Fault)

    def spoil(self, data: bytes) -> bytes:
        """Flip a bit of the payload. (A name does not tell the parent that a header names.)"""
        bad = bytearray(data)
        bad[self.random.randrange(FMT.data_offset, len(bad))] ^= 1 << self.random.randrange(8)
        return bytes(bad)

    def remember(self) -> None:
        (name,) = self.some(HASHED, 1)
        reply = self.desk.remember(self.client(), name, HASHED[name])
        assert reply in (Stored("created"), Stored("existed"))

    def release(self) -> None:
        client = self.client()
        leases = self.held[client]
        if leases:
            count = self.random.randint(1, len(leases))
            self.random.shuffle(leases)
            self.held[client], gone = leases[count:], leases[:count]
            # Numbers of others, and of nobody, do nothing.
            foreign = [ready.lease for other in CLIENTS for ready, *_ in self.held[other]][:2]
            own = {ready.lease for ready, *_ in self.held[client]}
            numbers = [ready.lease for ready, *_ in gone] + [n for n in foreign if n not in own]
            self.desk.service.release(client, [*numbers, 0, 1 << 60])

    def find(self) -> None:
        names = self.some(OBJECTS, 10)
        found = self.desk.ask("find", self.client(), names, [SIZE] * len(names))
        for name, answer in zip(names, found.answers, strict=True):
            assert answer in (SIZE, MISSING)
            if name in self.stored:
                assert answer == SIZE

    def lookup(self) -> None:
        first = self.random.randrange(len(CHUNKS) - 3)
        chains = [
            [name_of(FMT, chunk, shard) for shard in range(FMT.shards)]
            for chunk in CHUNKS[first : first + 3]
        ]
        client = self.client()
        stats = self.desk.service.stats()
        # A client may hold half of the memory, and holds no more than all clients do.
        room = stats["capacity_bytes"] / 2 - stats["leased_bytes"]
        reply = self.desk.ask("lookup", client, self.random.choice("xyz"), chains)
        on_shelf = [all(name in self.stored for name in names) for names in chains]
        assert isinstance(reply, LookedUp)
        # What there is no room for is no hit.
        if room >= len(chains) * FMT.shards * SIZE:
            assert reply.chunks >= [*on_shelf, False].index(False)

    def end_sessions_where_memory_is_full(self) -> None:
        stats = self.desk.service.stats()
        if stats["pinned_bytes"] > MOST_PINNED * stats["capacity_bytes"]:
            for client in CLIENTS:
                for session in "xyz":
                    self.desk.service.end_session(client, session)

    def end_session(self) -> None:
        self.desk.service.end_session(self.client(), self.random.choice("xyz"))

    def pass_time(self) -> None:
        self.desk.now += self.random.choice([1.0, 10.0, 20.0, 40.0])
        self.desk.service.tick()

    def client_gone(self) -> None:
        client = self.client()
        self.held[client].clear()
        self.desk.service.client_gone(client)

    def delete(self) -> None:
        (name,) = self.some(OBJECTS, 1)
        self.desk.ask("call", self.client(), "delete", [name], b"")
        self.stored.pop(name, None)

    def put(self) -> None:
        """Another machine stores an object."""
        (name,) = self.some(OBJECTS, 1)
        path = self.shelf / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(OBJECTS[name])
        self.stored[name] = True

    def damage(self) -> None:
        """The storage damages an object."""
        good = [name for name, well in self.stored.items() if well]
        if good:
            name = self.random.choice(good)
            (self.shelf / name).write_bytes(self.spoil(OBJECTS[name]))
            self.stored[name] = False

    # ------------------------------------------------------------------------------- what must hold

    def check(self) -> None:
        places: dict[int, str] = {}
        for leases in self.held.values():
            for ready, name, begun in leases:
                # Also where the lease is over: the client may still be reading.
                assert self.desk.bytes_of(ready) == CONTENT[name]
                assert places.setdefault(ready.offset, name) == name
                if self.desk.now - begun < LEASE:
                    assert self.desk.is_valid(ready)
        stats = self.desk.service.stats()
        assert stats["waiting"] == 0
        assert stats["pinned_bytes"] >= sum(len(CONTENT[name]) for name in places.values())

    def end(self) -> None:
        """All clients go: nothing is held, and all memory can be had again."""
        for client in CLIENTS:
            self.held[client].clear()
            self.desk.service.client_gone(client)
        self.desk.settle()
        stats = self.desk.service.stats()
        left = ("leases", "leased_bytes", "pinned_bytes", "clients", "reads", "stores", "waiting")
        assert not {name: stats[name] for name in left if stats[name]}
        pages = stats["capacity_bytes"] // PAGE
        for page in range(pages):
            name = f"hash/{FMT.namespace.digest.hex()}/page {page}"
            assert self.desk.remember(CLIENTS[0], name, bytes([page % 256]) * PAGE) == Stored(
                "created"
            )
        self.desk.settle()
        stats = self.desk.service.stats()
        assert (stats["objects"], stats["bytes"]) == (pages, stats["capacity_bytes"])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_operations_lose_no_memory_and_lend_no_wrong_bytes(
    seed: int, tmp_path: Path
) -> None:
    folder = tmp_path / "shelf"
    folder.mkdir()
    model = Model(folder, seed)
    with closing(model.desk):
        for _ in range(5000):
            model.step()
        assert model.desk.stat("evicted_objects") > 100
        assert model.desk.stat("overdue_leases") > 10
        model.end()
