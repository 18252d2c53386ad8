"""Child processes that import vLLM, driven by JSON lines over a socket.

Owns the parent's side: start, one command at a time, and a stop that leaves no engine behind. The
child's side is :mod:`benchmarks.engine_process`. The child's output goes to a file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

#: Contains the package ``benchmarks``, which an engine's processes also import.
_CHECKOUT = str(Path(__file__).resolve().parents[1])
_START_SECONDS = 600.0
_CALL_SECONDS = 600.0
_STOP_SECONDS = 30.0


class ChildError(RuntimeError):
    """A child did not start, died, or replied with an error."""


class MissingEngineError(ChildError):
    """vLLM is not installed."""


def require_engine() -> None:
    """Raise MissingEngineError unless vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        raise MissingEngineError("vLLM is not installed")


class Child:
    """One child process.

    Parameters
    ----------
    mode : str
        ``engine``, ``stepped`` or ``scheduler``, see :mod:`benchmarks.engine_process`.
    log : Path
        File for the child's output.
    env : mapping, optional
        Environment variables added to the parent's.
    **arguments
        Passed to the child at its start.

    Raises
    ------
    MissingEngineError
        If vLLM is not installed.
    """

    def __init__(
        self, mode: str, log: Path, *, env: Mapping[str, str] | None = None, **arguments: Any
    ) -> None:
        require_engine()
        self._log = log
        ours, theirs = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVSHELF_")}
        # The user's choice of gather and scatter also applies to rows with engines.
        if "KVSHELF_OPS" in os.environ:
            environment["KVSHELF_OPS"] = os.environ["KVSHELF_OPS"]
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # As where kvshelf is installed: its modules are compiled once, not by each process.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _CHECKOUT))),
            **(env or {}),
        }
        self.started = time.monotonic()
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(  # noqa: S603  our own module
                [sys.executable, "-m", "benchmarks.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._socket = ours
        self._lines = ours.makefile("rb")
        self._ready = False
        self._send({"mode": mode, **arguments})

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the child has started; return its reply."""
        reply = self._receive(_START_SECONDS)
        self._ready = True
        return {**reply, "wall_seconds": time.monotonic() - self.started}

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its reply.

        Raises
        ------
        ChildError
            If the child replies with an error, dies, or needs more than ten minutes.
        """
        if not self._ready:
            self.wait_ready()
        self._send({"op": op, **arguments})
        return self._receive(_CALL_SECONDS)

    def said(self, text: str) -> bool:
        """Tell whether the child has written a text to its log."""
        return text in self._log.read_text(errors="replace")

    def cpu_seconds(self) -> float:
        """Return the processor time of the child and its children so far."""
        return sum(self.cpu_seconds_by_process().values())

    def cpu_seconds_by_process(self) -> dict[str, float]:
        """Return the processor time of the child and its children so far, by process title.

        Times of processes with the same title are added. A title is the first word of the command
        line, which vLLM's processes set.
        """
        ticks: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                title = (entry / "cmdline").read_text().partition("\0")[0].strip()
            except OSError:
                continue
            if int(fields[2]) == self._process.pid:
                ticks[title] = ticks.get(title, 0) + int(fields[11]) + int(fields[12])
        per_second = os.sysconf("SC_CLK_TCK")
        return {title: count / per_second for title, count in ticks.items()}

    def close(self) -> None:
        """Stop the child gracefully, then kill its remaining processes."""
        try:
            if self._ready and self._process.poll() is None:
                with contextlib.suppress(ChildError, OSError):
                    self._send({"op": "stop"})
                    self._receive(_STOP_SECONDS)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._lines.close()
            self._socket.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChildError(f"the child is gone ({error}); {self._tail()}") from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise ChildError(f"no answer within {seconds:g} s; {self._tail()}") from None
        except OSError as error:
            raise ChildError(f"the child is gone ({error}); {self._tail()}") from None
        if not line:
            raise ChildError(f"the child ended; {self._tail()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ChildError(f"{reply['error']}; {self._tail()}")
        return reply

    def _tail(self, lines: int = 15) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return f"end of its log:\n{chr(10).join(text.splitlines()[-lines:])}"
