"""A server with a simple service, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvshelf.errors import ObjectMissingError
from kvshelf.memory.arena import Arena
from kvshelf.memory.places import Slot
from kvshelf.server.leases import Leases
from kvshelf.server.loop import Loop
from kvshelf.server.messages import (
    MISSING,
    Call,
    Done,
    Facts,
    Failed,
    Fault,
    Fetch,
    Find,
    FoundSizes,
    LookedUp,
    LookUpChunks,
    Ready,
    Result,
    Store,
    Stored,
)

ARENA_BYTES = 4 << 20
SLOTS = 64
TABLE = 4096
OBJECT_BYTES = 4096


class MemoryService:
    """Objects by name in an arena, one in each slot; nothing behind it."""

    slots = SLOTS
    lease_seconds = 30.0
    facts = Facts("memory://", "memory")

    def __init__(self, loop: Loop, arena: Arena) -> None:
        self.loop = loop
        self.arena = arena
        self.generations = arena.view[: 8 * SLOTS].cast("Q")
        self.objects: dict[str, Slot] = {}
        self.leases = Leases(quota=ARENA_BYTES // 2)
        self.pins: Counter[Slot] = Counter()
        self.clients: set[bytes] = set()
        self.gone = threading.Semaphore(0)
        self.calls: list[tuple[Any, ...]] = []
        self.held_back: list[Callable[[], None]] = []

    def put(self, name: str, content: bytes) -> None:
        number = len(self.objects)
        new = Slot(name, None, TABLE + number * OBJECT_BYTES, OBJECT_BYTES, number, 0)
        start = self.objects.setdefault(name, new).offset
        self.arena.view[start : start + OBJECT_BYTES] = content.ljust(OBJECT_BYTES, b"\0")

    def register(self, record: bytes) -> None:
        self.calls.append(("register", record))

    def find(self, client: bytes, request: Find, done: Callable[..., None]) -> None:
        self.clients.add(client)
        done(
            FoundSizes(
                [OBJECT_BYTES if name in self.objects else MISSING for name in request.names]
            )
        )

    def lookup(self, client: bytes, request: LookUpChunks, done: Callable[..., None]) -> None:
        self.clients.add(client)
        count = 0
        for chain in request.chains:
            if not all(name in self.objects for name in chain):
                break
            count += 1
            for name in chain:
                self.lease(client, request.session, name, fetched=False)
        done(LookedUp(count))

    def lease(self, client: bytes, session: str, name: str, *, fetched: bool) -> int:
        slot = self.objects[name]
        granted = self.leases.grant(client, session, slot, fetched=fetched)
        assert granted is not None
        number, new = granted
        self.pins[slot] += new
        return number

    def fetch(self, client: bytes, request: Fetch, each: Callable[..., None]) -> None:
        self.clients.add(client)
        outcomes: list[Ready | Failed] = []
        for index, name in enumerate(request.names):
            slot = self.objects.get(name)
            if slot is None:
                outcomes.append(Failed(index, Fault.of(ObjectMissingError(name))))
                continue
            number = self.lease(client, request.session, name, fetched=True)
            generation = self.generations[slot.number]
            outcomes.append(
                Ready(index, slot.offset, OBJECT_BYTES, slot.number, generation, number)
            )
        if request.session == "fails half-way":
            half = len(outcomes) // 2
            self.held_back.append(lambda: each(outcomes[half:]))
            each(outcomes[:half])
            raise RuntimeError("the service is broken")
        if outcomes:
            each(outcomes)

    def store(
        self, client: bytes, request: Store, source: memoryview, done: Callable[..., None]
    ) -> None:
        self.put(request.name, bytes(source))
        done(Stored("created"))

    def call(self, client: bytes, request: Call, done: Callable[..., None]) -> None:
        """Answer by what the name says."""
        method, args, data = request.method, request.args, request.data
        name = args[0] if args and isinstance(args[0], str) else ""
        if name == "never":
            self.held_back.append(lambda: done(Done()))
        elif name == "raise":
            raise RuntimeError("the service is broken")
        elif name == "thread":
            answer = lambda: self.loop.post(lambda: done(Result("from a thread")))  # noqa: E731
            threading.Thread(target=answer).start()
        elif name == "large":
            done(Result(b"x" * (1 << 20)))
        else:
            done(Result([method, list(args), data]))

    def unpin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.pins[slot] -= 1
            assert self.pins[slot] >= 0
        self.pins = +self.pins

    def release(self, client: bytes, leases: Sequence[int]) -> None:
        self.unpin(self.leases.release(client, leases))

    def end_session(self, client: bytes, session: str) -> None:
        self.unpin(self.leases.end_session(client, session))

    def client_gone(self, client: bytes) -> None:
        self.clients.discard(client)
        self.unpin(self.leases.end_client(client))
        self.gone.release()

    def tick(self) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, Loop, MemoryService]]:
    """Run a server on a thread of this process."""
    url = f"ipc://{folder}/sockets/server"
    loop = Loop(url)
    arena = Arena(ARENA_BYTES, shared=True)
    service = MemoryService(loop, arena)
    thread = threading.Thread(target=loop.run, args=(service, arena), kwargs={"chunk_size": 256})
    thread.start()
    try:
        yield url, loop, service
    finally:
        loop.stop()
        thread.join()
        loop.close()
        arena.close()


@contextlib.contextmanager
def serving_process(folder: Path) -> Iterator[tuple[str, int]]:
    """Run a server, with objects named ``0`` to ``63``, in a process of its own."""
    import subprocess

    url = f"ipc://{folder}/sockets/server"
    process = subprocess.Popen(
        [sys.executable, __file__, url],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], 60)[0]
        assert process.stdout.readline() == b"ready\n"
        yield url, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    the_loop = Loop(sys.argv[1])
    the_service = MemoryService(the_loop, Arena(ARENA_BYTES, shared=True))
    for number in range(SLOTS):
        the_service.put(str(number), b"%d" % number)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    the_loop.run(the_service, the_service.arena, chunk_size=256)
