"""A node server in this process; :mod:`tests.server.serve_process` has ``kvshelf serve``."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from kvshelf.backends import Backend, open_backend
from kvshelf.memory.arena import Arena
from kvshelf.server.loop import Loop
from kvshelf.server.service import Service
from kvshelf.shelf.shelf import Shelf


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
