"""Node servers for tests: one in this process, and one in a process of its own.

Run as a script, ``node.py FOLDER SHELF ARENA_BYTES``, it serves until SIGTERM, and answers each
line on its standard input by a line with the server's counts as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

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
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run(
            self.service,
            self.arena,
            slots=self.service.slots,
            lease_seconds=self.service.lease_seconds,
            chunk_size=256,
            facts=lambda: self.service.facts,
        )

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
    """A node server in a process of its own.

    Parameters
    ----------
    folder : Path
        For its socket and its log.
    shelf : Path
        The directory that it serves.
    arena_bytes : int
    started : bool
        Whether to start it at once.
    """

    def __init__(
        self, folder: Path, shelf: Path, arena_bytes: int = 256 << 20, *, started: bool = True
    ) -> None:
        self.folder = folder / "socket"
        self.url = f"ipc://{self.folder}/node.sock"
        self.log = folder / "node.log"
        self._arguments = [str(self.folder), str(shelf), str(arena_bytes)]
        self._process: subprocess.Popen[str] | None = None
        if started:
            self.start()

    def start(self) -> None:
        """Start it, and wait until it takes clients."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.counts()

    def counts(self) -> dict[str, int]:
        """What the server has counted, and what it has at present."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, f"the server ended: {self.log.read_text()}"
        found: dict[str, int] = json.loads(line)
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._running().send_signal(number)

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop it in order."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Stop it in order, and start it anew."""
        self.stop()
        self.start()

    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "it is not running"
        return self._process

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        with process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait(30)

    def __enter__(self) -> NodeServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def main(folder: str, shelf: str, arena_bytes: str) -> None:
    """Serve, and answer questions for counts."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    with LocalServer(Path(folder), Path(shelf), int(arena_bytes)) as server:
        for _ in sys.stdin:
            counts: dict[str, Any] = {**server.service.stats(), **server.loop.stats()}
            sys.stdout.write(json.dumps(counts) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
