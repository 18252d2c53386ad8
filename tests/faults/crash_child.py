"""Processes that are killed in the middle of a store or load: a program for test_crash.py.

Reads lines of JSON, each an order for a process (or several at once) to be forked, and answers with
a line when all have ended. A forked process does its job and kills itself with SIGKILL right before
its n-th call of the operating system, counting those that touch files: so every step of a protocol
is tried without any of them being named. Knows neither torch nor vLLM, so that a fork is cheap.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import sys
from typing import Any

from kvshelf.backends import posix, posix_folders
from kvshelf.capacity.evictor import Evictor
from kvshelf.config import CapacityConfig
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.shelf.view import ObjectRef
from tests.support import formats
from tests.support.formats import sealed
from tests.support.prompts import make_chunks

CHUNK = 16
_CHANGES = frozenset(
    ("mkdir", "writev", "link", "unlink", "rename", "replace", "rmdir")
) | frozenset(("utime", "fsync", "fchmod", "fchown", "chmod"))
_LOOKS = frozenset(("open", "close", "stat", "lstat", "fstat", "statvfs", "preadv", "scandir"))
_WATCHED = _CHANGES | _LOOKS

make_format = functools.partial(
    formats.make_format, 1, native=False, chunk_size=CHUNK, weights="user:crash", slug="crash"
)


class _Steps:
    """Counts calls; dies before the n-th that touches files."""

    def __init__(self, last: int, half: bool, no_links: bool) -> None:
        self.left = last
        self._half = half
        self._no_links = no_links

    def count(self, module: Any, name: str) -> None:
        """Count the calls of a function from now on."""
        call = getattr(module, name)

        def counting(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if self._half and name == "writev":
                    fd, views = args
                    os.write(fd, bytes(views[0])[: len(views[0]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "link" and self._no_links:
                raise OSError(errno.EPERM, "no hard links here")
            return call(*args, **options)

        setattr(module, name, counting)


def _run(
    root: str,
    job: str,
    last: int,
    *,
    half: bool = False,
    no_links: bool = False,
    fsync: bool = False,
) -> None:
    steps = _Steps(last, half, no_links)
    # A sweep looks at 256 folders: it dies before each of its changes.
    for name in _CHANGES if job == "sweep" else _WATCHED:
        steps.count(os, name)
    steps.count(posix, "rename_noreplace")
    if job != "sweep":
        steps.count(posix_folders, "openat2")
    fmt = make_format()
    with open_shelf(root, storage_options={"fsync": fsync}) as shelf:
        if job == "sweep":
            Evictor(shelf.backend, CapacityConfig(max_bytes=1), Counters()).sweep()
            return
        for chunk in make_chunks(fmt, 2):
            for shard in range(fmt.shards):
                _step(shelf, fmt, chunk, shard, job)


def _step(shelf: Shelf, fmt: ObjectFormat, chunk: Chunk, shard: int, job: str) -> None:
    image = sealed(fmt, chunk, shard)
    if job == "write":
        shelf.view(fmt).publish(ObjectRef(chunk, shard), image)
    elif job == "repair":
        shelf.view(fmt).publish(ObjectRef(chunk, shard), image, suspect=True)
    else:
        try:
            shelf.view(fmt).load(ObjectRef(chunk, shard), memoryview(image))
        except (OSError, ValueError):
            pass  # missing or bad: a miss


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _run(**order)
        code = 0
    finally:
        os._exit(code)


def main() -> None:
    """Serve orders; the answer is a list of exit codes, negative for signals."""
    for line in sys.stdin:
        pids = [_fork(order) for order in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
