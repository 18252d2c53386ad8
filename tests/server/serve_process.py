"""``kvshelf serve`` as a process, and a client of it as another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import Arena
from kvshelf.server.connection import Loan, NodeClient
from kvshelf.server.protocol import Store
from tests.support.constants import VARIABLE
from tests.support.waiting import PATIENCE

#: Deadlines of storage that a busy machine keeps; clients take theirs from the server.
PATIENT = {VARIABLE: json.dumps({"deadlines": dict.fromkeys(("probe", "read", "write"), 60.0)})}

CLIENT = Path(__file__).with_name("client_child.py")
_ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def command(shelf: str | Path, socket: Path, memory: str = "64MiB", *more: str) -> list[str]:
    """The command line of a server."""
    return [
        *(sys.executable, "-m", "tests.support.patient_command", "serve", str(shelf)),
        *("--memory", memory, "--socket", f"ipc://{socket}", "--http", "0"),
        *more,
    ]


class ServeProcess:
    """A server; started anew by :meth:`start` after it was killed."""

    def __init__(
        self,
        shelf: str | Path,
        socket: Path,
        memory: str = "64MiB",
        *more: str,
        started: bool = True,
        **environ: str,
    ) -> None:
        self.url = f"ipc://{socket}"
        self._command = command(shelf, socket, memory, *more)
        self._environ = _ENVIRONMENT | environ
        # A file never gets full, as a pipe does that nobody reads.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process: subprocess.Popen[str] | None = None
        if started:
            self.start()

    def start(self) -> None:
        """Start it, and wait until it takes clients."""
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=self._environ,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.line)
        assert found, self.line + self.errors()
        self.http = found[0]

    def errors(self) -> str:
        """What it wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def signal(self, which: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(which)

    def get(self, path: str) -> tuple[int, str]:
        """What it answers over HTTP."""
        try:
            with urllib.request.urlopen(self.http + path, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Its metrics without labels, without their prefix."""
        lines = self.get("/metrics")[1].splitlines()
        rows = [line.split() for line in lines if line.startswith("kvshelf_server_")]
        return {
            name.removeprefix("kvshelf_server_").removesuffix("_total"): float(value)
            for name, value in rows
            if "{" not in name
        }

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self.process.kill()
        self.process.communicate()

    def stop(self) -> tuple[int, str]:
        """End it (SIGTERM); return its exit code and what it wrote to standard error."""
        self.process.terminate()
        try:
            self.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)  # It writes where its threads are.
            self.process.communicate()
            raise AssertionError(f"the server does not end:\n{self.errors()}") from None
        return self.process.returncode, self.errors()

    def restart(self) -> None:
        """Stop it in order, and start it anew."""
        assert self.stop()[0] == 0
        self.start()

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self._errors.close()


class Client:
    """A client in this process, with memory for one object."""

    def __init__(self, url: str, fmt: ObjectFormat) -> None:
        self.node = NodeClient(url)
        self.node.register(fmt.namespace)
        assert self.node.wait_connected(PATIENCE)
        self._arena = Arena(4 << 20, shared=True)
        self.node.share(self._arena)

    def store(self, name: str, data: bytes) -> str:
        """Store an object; return how that ended."""
        self._arena.view[: len(data)] = data
        result: str = self.node.request(Store, name, 0, len(data)).result(PATIENCE)
        return result

    def fetch(self, names: Sequence[str], sizes: Sequence[int]) -> list[Loan]:
        """Have objects lent, those of them that can be."""
        outcomes = self.node.fetch(names, sizes).result(PATIENCE)
        return [outcome for outcome in outcomes if isinstance(outcome, Loan)]

    def close(self) -> None:
        self.node.close()
        self._arena.close()


class ClientProcess:
    """A client in a process of its own, told by lines what to do, see ``client_child.py``."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_ENVIRONMENT,
        )

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.send(line)
        return self.answer()

    def signal(self, which: signal.Signals) -> None:
        self.process.send_signal(which)
        if which is signal.SIGSTOP:
            self._wait_until_stopped()

    def _wait_until_stopped(self) -> None:
        deadline = time.monotonic() + PATIENCE
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def __enter__(self) -> ClientProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate()
