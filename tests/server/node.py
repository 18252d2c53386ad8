"""A node server in this process; :mod:`tests.server.serve_process` has ``kvshelf serve``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from kvshelf.backends import Backend, open_backend
from kvshelf.memory.arena import Arena
from kvshelf.server.connection import NodeClient
from kvshelf.server.node import Node
from kvshelf.server.session import Server
from kvshelf.server.view import NodeShelf, open_served
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
    memory_bytes : int
    options
        Further arguments of the node; `chunk_size` is what the server tells its clients.
    """

    def __init__(
        self,
        folder: Path,
        storage: Backend | Path,
        memory_bytes: int = 64 << 20,
        *,
        chunk_size: int = 256,
        **options: object,
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.url = f"ipc://{folder}/node.sock"
        backend = storage if isinstance(storage, Backend) else open_backend(storage)
        self.shelf = Shelf(backend)
        self.arena = Arena(memory_bytes, shared=True)
        self.server = Server(self.url)
        self.node = Node(self.shelf, self.arena, **options)
        self._thread = threading.Thread(
            target=self.server.run,
            args=(self.node, self.arena),
            kwargs={"chunk_size": chunk_size},
            daemon=True,
        )
        self._thread.start()

    def open_shelf(self, **options: object) -> NodeShelf:
        """Return the shelf as a new client has it."""
        return open_served(NodeClient(self.url), **options)

    def stat(self, name: str) -> float:
        """A counter or a gauge of the node."""
        return self.node.stats()[name]

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Keep the loop from doing anything meanwhile."""
        hangs, goes_on = threading.Event(), threading.Event()

        def hang() -> None:
            hangs.set()
            goes_on.wait(PATIENCE)

        self.server.post(hang)
        assert hangs.wait(PATIENCE)
        try:
            yield
        finally:
            goes_on.set()

    def close(self) -> None:
        """Stop at once. Idempotent."""
        self.server.stop()
        self._thread.join(10)
        self.server.close()
        self.node.close()
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
