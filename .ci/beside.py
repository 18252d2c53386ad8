"""Run commands side by side, and leave no process behind: ``beside.py A … -- B … -- C …``.

The last command prints at once; what the others print follows it, in their order, and then once
more the end of what each failed command printed. The exit code is the first that is neither 0 nor
5, by which pytest says that it had nothing to run. After Ctrl-C or
SIGTERM the commands are interrupted, and killed where they do not end. Whatever they started and
that still runs when they have ended, even in sessions of its own, is killed: its parent is this
process then (``PR_SET_CHILD_SUBREAPER`` of Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

_SUBREAPER = 36
#: Seconds in which interrupted commands may clean up.
_END = 60
#: Bytes of what a failed command printed last that are printed again.
_TAIL = 1500


def descendants() -> list[int]:
    """Return the processes below this one, as far as they have not ended."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found[1:]


def end_all(commands: list[subprocess.Popen[bytes]]) -> None:
    """Interrupt commands that run, and kill what is left of them."""
    for command in commands:
        if command.poll() is None:
            command.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _END
    while time.monotonic() < deadline and any(one.poll() is None for one in commands):
        time.sleep(0.05)
    while left := descendants():
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def stop(number: int, _: object) -> None:
    """End this process, by way of ``finally``."""
    for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> int:
    """Run as a script."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    given = [list(part) for between, part in groupby(sys.argv[1:], "--".__eq__) if not between]
    commands: list[subprocess.Popen[bytes]] = []
    logs = [tempfile.TemporaryFile() for _ in given]  # noqa: SIM115  closed at the end
    printed = 0
    try:
        for command, log in zip(given, logs, strict=True):
            # A single command has the terminal to itself.
            output = log if len(given) > 1 else None
            commands.append(subprocess.Popen(command, stdout=output, stderr=output))
        while commands[-1].poll() is None:
            time.sleep(0.1)
            printed += os.write(1, os.pread(logs[-1].fileno(), 1 << 20, printed))
        codes = [command.wait() for command in commands]
    finally:
        end_all(commands)
        for log, start in zip([logs[-1], *logs[:-1]], [printed, *[0] * len(given)], strict=False):
            log.seek(start)
            sys.stdout.buffer.write(log.read())
    failed = [one for one, code in enumerate(codes) if code not in (0, 5)]
    for one in failed if len(given) > 1 else []:
        said = os.pread(logs[one].fileno(), 1 << 30, 0)[-_TAIL:].decode(errors="replace")
        print(f"\n{' '.join(given[one])} ended with {codes[one]}:\n{said}")
    return codes[failed[0]] if failed else 0


if __name__ == "__main__":
    sys.exit(main())
