"""A service without sockets: what a loop does for it, on the test's own thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from kvshelf.backends import Backend, Deadlines
from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import Arena
from kvshelf.server.messages import Call, Failed, Fetch, Find, LookUpChunks, Ready, Store
from kvshelf.server.service import Service
from kvshelf.shelf.shelf import Shelf
from tests.sim.storage import Fault, FaultyStorage
from tests.support.formats import sealed
from tests.support.waiting import PATIENCE


def name_of(fmt: ObjectFormat, chunk: Chunk, shard: int = 0) -> str:
    """The name of an object on the storage."""
    return f"{fmt.namespace.folder}/{object_name(chunk, shard, fmt.shards, fmt.kind)}"


def look_up_chunks(session: str, chains: Sequence[Sequence[str]]) -> LookUpChunks:
    """Return the request for the objects of some chunks."""
    names = [name for chain in chains for name in chain]
    return LookUpChunks(session, names, list(map(len, chains)))


def put(shelf: Path, fmt: ObjectFormat, chunk: Chunk, shard: int = 0) -> str:
    """Publish an object as another machine would; return its name."""
    name = name_of(fmt, chunk, shard)
    path = shelf / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sealed(fmt, chunk, shard))
    return name


class Desk:
    """A service, the answers that it gave, and a clock that only the test moves.

    Calls of the storage are counted (`counts`), and meet the faults of `faults`.
    """

    def __init__(
        self,
        backend: Backend,
        arena_bytes: int = 1 << 20,
        *,
        deadlines: Deadlines | None = None,
        **options: Any,
    ) -> None:
        self.now = 0.0
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.faults = FaultyStorage(backend)
        self.counts = self.faults.counts
        self.shelf = Shelf(GuardedBackend(self.faults, deadlines))
        self.arena = Arena(arena_bytes, shared=True)
        self.service = Service(
            self.shelf,
            self.arena,
            post=self.posted.put,
            clock=lambda: self.now,
            **options,
        )

    def describe(self, fmt: ObjectFormat) -> None:
        """Have the server describe a namespace, so that a store is one write."""
        known = self.service._namespaces._known[fmt.namespace.digest.hex()[:16]]
        self.shelf.view(known).describe(fmt.namespace.folder)
        self.counts.clear()

    def hold(self, *operations: str) -> threading.Event:
        """Let calls of the storage wait for the event."""
        gate = threading.Event()
        for operation in operations:
            self.faults.add(Fault(operation, wait=gate))
        return gate

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run what is posted until the condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, "it never came true"
            try:
                self.posted.get(timeout=min(left, 0.01))()
            except queue.Empty:
                continue

    def settle(self) -> None:
        """Run until the service has nothing under way, but what waits for memory."""

        def idle() -> bool:
            stats = self.service.stats()
            begun = stats["reads"] + stats["stores"]
            return not begun and self.posted.empty()

        self.run_until(idle)

    def end(self) -> None:
        """Have all clients leave, and compare what is held with nothing."""
        for client in list(self.service._clients):
            self.service.client_gone(client)
        self.settle()
        assert self.service._fetches.leases.stats() == (0, 0), "leases of clients that are gone"

    def ask(self, method: str, client: bytes, *args: Any) -> Any:
        """Ask what a message asks for, by the fields of this; return the reply."""
        make: dict[str, Callable[..., Any]]
        make = {"find": Find, "lookup": look_up_chunks, "call": Call}
        replies: list[Any] = []
        getattr(self.service, method)(client, make[method](*args), replies.append)
        return self.reply(replies)

    def reply(self, replies: list[Any]) -> Any:
        """Wait for the one reply to a request."""
        self.run_until(lambda: bool(replies))
        (reply,) = replies
        return reply

    def begin_fetch(
        self, client: bytes, names: Sequence[str], sizes: Sequence[int], session: str = "s"
    ) -> dict[int, Ready | Failed]:
        """Fetch objects; outcomes appear in the answer, by index."""
        outcomes: dict[int, Ready | Failed] = {}

        def each(some: list[Ready | Failed]) -> None:
            for outcome in some:
                assert outcome.index not in outcomes, "it was answered twice"
                outcomes[outcome.index] = outcome

        self.service.fetch(client, Fetch(session, names, sizes), each)
        return outcomes

    def fetch(
        self, client: bytes, names: Sequence[str], sizes: Sequence[int], session: str = "s"
    ) -> list[Ready | Failed]:
        """Fetch objects and wait for all outcomes."""
        outcomes = self.begin_fetch(client, names, sizes, session)
        self.run_until(lambda: len(outcomes) == len(names))
        return [outcomes[index] for index in range(len(names))]

    def begin_store(
        self,
        client: bytes,
        name: str,
        data: Any,
        mode: str = "create",
        replies: list[Any] | None = None,
        **fields: Any,
    ) -> list[Any]:
        """Store an object; the reply appears in the answer."""
        replies = [] if replies is None else replies
        source = memoryview(data)
        request = Store(name, 0, source.nbytes, mode, **fields)
        self.service.store(client, request, source, replies.append)
        return replies

    def store(self, client: bytes, name: str, data: bytes | bytearray, mode: str = "create") -> Any:
        """Store an object."""
        return self.reply(self.begin_store(client, name, data, mode))

    def remember(self, client: bytes, name: str, data: bytes | bytearray, **fields: Any) -> Any:
        """Store an object in memory only."""
        fields = {"checksum": xxhash.xxh3_64_intdigest(data), "memory_only": True} | fields
        return self.reply(self.begin_store(client, name, data, **fields))

    def bytes_of(self, ready: Ready | Failed) -> bytes:
        """What a client reads where an object lies."""
        assert isinstance(ready, Ready), ready
        return bytes(self.arena.view[ready.offset : ready.offset + ready.nbytes])

    def is_valid(self, ready: Ready) -> bool:
        """What a client finds out after its last look at the memory."""
        generations = self.arena.view[: 8 * self.service.slots].cast("Q")
        return bool(generations[ready.slot] == ready.generation)

    def stat(self, name: str) -> float:
        return self.service.stats()[name]

    def close(self) -> None:
        """Idempotent."""
        self.service.close()
        self.shelf.close()
        self.arena.close()
