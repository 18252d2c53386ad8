"""A node without sockets, on a loop of its own, and clients of it in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from kvshelf.backends import Backend, Deadlines
from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import Arena
from kvshelf.server.node import Loans, Node
from kvshelf.server.protocol import Fault as ProtocolFault
from kvshelf.shelf.shelf import Shelf
from tests.sim.storage import Fault, FaultyStorage
from tests.support.formats import sealed
from tests.support.waiting import PATIENCE, until

_T = TypeVar("_T")


def name_of(fmt: ObjectFormat, chunk: Chunk, shard: int = 0) -> str:
    """The name of an object on the storage."""
    return f"{fmt.namespace.folder}/{object_name(chunk, shard, fmt.shards, fmt.kind)}"


def put(shelf: Path, fmt: ObjectFormat, chunk: Chunk, shard: int = 0) -> str:
    """Publish an object as another machine would; return its name."""
    name = name_of(fmt, chunk, shard)
    path = shelf / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sealed(fmt, chunk, shard))
    return name


class Desk:
    """A node. Calls of the storage are counted (`counts`), and meet the faults of `faults`."""

    def __init__(
        self,
        backend: Backend,
        memory_bytes: int = 1 << 20,
        *,
        deadlines: Deadlines | None = None,
        **options: Any,
    ) -> None:
        self.faults = FaultyStorage(backend)
        self.counts = self.faults.counts
        self.shelf = Shelf(GuardedBackend(self.faults, deadlines), options.get("counters"))
        self.arena = Arena(memory_bytes, shared=True)
        self.node = Node(self.shelf, self.arena, **options)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., _T], *args: Any, **options: Any) -> _T:
        """Call a method of the node that is no coroutine, on its loop."""

        async def do() -> _T:
            return function(*args, **options)

        return self.begin(do()).result(PATIENCE)

    def begin(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for what a coroutine returns."""
        return self.begin(work).result(PATIENCE)

    def register(self, fmt: ObjectFormat, *, is_volatile: bool = False) -> None:
        namespace = fmt.namespace
        self.call(self.node.register, namespace.encoded, namespace.slug, is_volatile)

    def connect(self, data: bytes | bytearray = b"") -> Loans:
        """A new client, whose memory holds `data`."""
        return self.call(self.node.connect, memoryview(data))

    def leave(self, *clients: Loans) -> None:
        for client in clients:
            self.call(self.node.leave, client)

    def fetch(
        self, client: Loans, names: Sequence[str], *, is_early: bool = False
    ) -> list[int | bool | ProtocolFault]:
        return self.run(self.node.fetch(client, names, is_early))

    def store(self, name: str, data: bytes | bytearray, *, is_suspect: bool = False) -> str:
        """Store an object from the memory of a new client, which leaves."""
        client = self.connect(data)
        try:
            return self.run(self.node.store(client, name, 0, len(data), is_suspect))
        finally:
            self.leave(client)

    def bytes_at(self, offset: int | bool | ProtocolFault, nbytes: int) -> bytes:
        """What a client reads where an object lies."""
        assert type(offset) is int and offset >= 0, offset
        return bytes(self.arena.view[offset : offset + nbytes])

    def hold(self, *operations: str) -> threading.Event:
        """Let calls of the storage wait for the event."""
        gate = threading.Event()
        for operation in operations:
            self.faults.add(Fault(operation, wait=gate))
        return gate

    def stat(self, name: str) -> float:
        return self.node.stats()[name]

    def end(self) -> None:
        """Have all clients leave, and check that nothing of the memory is in use."""
        self.leave(*self.node._clients)
        until(lambda: not self.stat("reads") and not self.stat("stores"))
        until(lambda: not self.stat("pinned_bytes"), "something is pinned")
        assert self.stat("lent_bytes") == 0

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(PATIENCE)
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks))
            self.loop.close()
        self.node.close()
        self.shelf.close()
        self.arena.close()
