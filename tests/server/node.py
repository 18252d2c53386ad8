"""Node servers for tests: one in this process, and ``kvshelf serve`` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
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
        self.service = Service(
            self.shelf, self.arena, post=self.loop.post, tell=self.loop.tell, **options
        )
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


class NodeServer:
    """``kvshelf serve`` in a process of its own.

    Parameters
    ----------
    folder : Path
        For its socket and its log.
    shelf : Path
        The directory that it serves.
    memory_bytes : int
    started : bool
        Whether to start it at once.
    """

    def __init__(
        self, folder: Path, shelf: Path, memory_bytes: int = 256 << 20, *, started: bool = True
    ) -> None:
        self.url = f"ipc://{folder}/socket/node.sock"
        self.log = folder / "node.log"
        self._arguments = ["--url", str(shelf), "--memory", str(memory_bytes)]
        self._http = ""
        self._process: subprocess.Popen[str] | None = None
        if started:
            self.start()

    def start(self) -> None:
        """Start it, and wait until it takes clients."""
        command = [sys.executable, "-m", "kvshelf", "serve", *self._arguments]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--socket", self.url, "--http", "0"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                # What engines are told does not concern the server.
                env={**os.environ, "KVSHELF_SERVER": self.url},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "http://" in line, f"the server ended: {self.log.read_text()}"
        self._http = "http://" + line.rpartition("http://")[2].strip()

    def counts(self) -> dict[str, float]:
        """What the server has counted, and what it has at present."""
        with urllib.request.urlopen(f"{self._http}/metrics", timeout=30) as answer:
            rows = answer.read().decode().splitlines()
        found = dict(row.rsplit(" ", 1) for row in rows if row.startswith("kvshelf_server_"))
        return {
            name.removeprefix("kvshelf_server_").removesuffix("_total"): float(value)
            for name, value in found.items()
        }

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None, "it is not running"
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it in order."""
        assert self._end(signal.SIGTERM) == 0

    def restart(self) -> None:
        """Stop it in order, and start it anew."""
        self.stop()
        self.start()

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        with process:
            return process.wait(30)

    def __enter__(self) -> NodeServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
