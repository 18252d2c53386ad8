"""Which process of a machine reads a file of which no digest is known yet.

Owns the claims: locks on small files in a folder that the processes share. Engines that start
together divide the files of a checkpoint among themselves, so that each file is read once.

Contracts
---------
* A claim ends with its process, however that ends: the kernel releases the lock.
* A claim is advice. Two processes that read one file both get the right digest.
* No process waits for one that makes no progress: one that is stopped, or whose read hangs.
* Where no lock can be taken, every process gets the claim.

Threads
-------
A claim belongs to one thread. No call waits.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_NOTE_SECONDS: Final = 0.5
_STALLED_SECONDS: Final = 5.0


class Claim:
    """The right to read one file, until :meth:`release`.

    Parameters
    ----------
    path : Path
        The lock file.
    descriptor : int or None
        The lock file, open and locked; None where no lock could be taken.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self._path = path
        self._descriptor = descriptor
        self._noted = 0.0
        self.note_progress()

    def note_progress(self) -> None:
        """Show waiting processes that the file is being read; call it after each read."""
        now = time.monotonic()
        if self._descriptor is not None and now - self._noted >= _NOTE_SECONDS:
            self._noted = now
            with suppress(OSError):
                os.utime(self._descriptor)

    def release(self) -> None:
        """End the claim. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):
            self._path.unlink()
        # A process that was forked meanwhile has the lock file open too: closing is not enough.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def try_claim(path: Path) -> Claim | None:
    """Claim the file for which `path` stands; None if another process or thread holds the claim.

    Parameters
    ----------
    path : Path
        The lock file; its folder is created (private).
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return Claim(path, None)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        return Claim(path, None)
    return Claim(path, descriptor)


class Watch:
    """Watches the progress of a process that holds a claim.

    Compares times of the lock file with each other only, because a server may have set them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._progress = self._read()
        self._since = time.monotonic()

    def _read(self) -> int:
        try:
            return os.stat(self._path).st_mtime_ns
        except OSError:
            return 0

    def stalled(self) -> bool:
        """Whether the process has shown no progress for five seconds."""
        progress, now = self._read(), time.monotonic()
        if progress != self._progress:
            self._progress, self._since = progress, now
        return now - self._since >= _STALLED_SECONDS
