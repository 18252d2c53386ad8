"""A node server in this process; :mod:`tests.server.serve_process` has ``kvshelf serve``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from kvshelf.backends import Backend, open_backend
from kvshelf.memory.arena import Arena
from kvshelf.server.loop import Loop
from kvshelf.server.messages import Store, Stored
from kvshelf.server.service import Service
from kvshelf.shelf.shelf import Shelf
from tests.sim.storage import FaultyStorage, posix
from tests.support.waiting import PATIENCE


class LocalServer:
    """A node server on a thread of this process.

    Parameters
    ----------
    folder : Path
        Where its socket lies; made for this user alone.
    storage : Backend or Path
        What it serves; closed with it.
    arena_bytes : int
    options
        Further arguments of the service.
    """

    def __init__(
        self, folder: Path, storage: Backend | Path, arena_bytes: int = 64 << 20, **options: object
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.url = f"ipc://{folder}/node.sock"
        backend = storage if isinstance(storage, Backend) else open_backend(storage)
        self.shelf = Shelf(backend)
        self.arena = Arena(arena_bytes, shared=True)
        self.loop = Loop(self.url)
        self.service = Service(self.shelf, self.arena, post=self.loop.post, **options)
        self._thread = threading.Thread(
            target=self.loop.run,
            args=(self.service, self.arena),
            kwargs={"chunk_size": 256},
            daemon=True,
        )
        self._thread.start()

    def put(self, name: str, data: bytes) -> None:
        """Keep an object in memory only."""
        stored: Future[Any] = Future()
        checksum = xxhash.xxh3_64_intdigest(data)
        request = Store(name, 0, len(data), memory_only=True, checksum=checksum)
        source = memoryview(data)
        self.loop.post(lambda: self.service.store(b"", request, source, stored.set_result))
        assert stored.result(PATIENCE) == Stored("created")

    @property
    def leases(self) -> int:
        """Leases of all clients."""
        return int(self.service.stats()["leases"])

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Keep the loop from doing anything meanwhile."""
        hangs, goes_on = threading.Event(), threading.Event()

        def hang() -> None:
            hangs.set()
            goes_on.wait(PATIENCE)

        self.loop.post(hang)
        assert hangs.wait(PATIENCE)
        try:
            yield
        finally:
            goes_on.set()

    def close(self) -> None:
        """Stop at once. Idempotent."""
        self.loop.stop()
        self._thread.join(10)
        self.loop.close()
        self.service.close()
        self.shelf.close()
        self.arena.close()

    def __enter__(self) -> LocalServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve(folder: Path) -> LocalServer:
    """Start a server on a small folder; its storage meets faults."""
    return LocalServer(folder / "node", FaultyStorage(posix(folder / "shelf")), 4 << 20)
