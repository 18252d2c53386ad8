"""A filesystem that makes trouble on order: a pass-through over a folder, by FUSE.

Owns both ends. Run as a program, this file is the filesystem: a process of its own that passes
every call on to a folder, except where a rule says otherwise. Imported, it gives
:class:`FaultMount`, by which a test mounts such a filesystem, sends it rules over a socket, and
gets rid of it again.

Contracts
---------
* A rule names an operation of FUSE (``getattr``, ``open``, ``read``, ``create``, ``write``, …) and
  what happens to it, see :class:`Rule`. Rules are counted when they are met, so that a test can
  tell trouble that was survived from trouble that never came.
* An operation that is blocked occupies one thread of the filesystem, all others go on. A
  filesystem that was stopped (:meth:`FaultMount.freeze`) answers nothing at all.
* :meth:`FaultMount.kill` ends every call on the mount, however stuck, and :meth:`FaultMount.close`
  leaves neither process nor mount. Nor does the end of the tests' process, even by a signal.

Needs ``/dev/fuse``, ``fusermount3`` and mfusepy; :func:`why_not` says which of them is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

_START_SECONDS: Final = 60.0


@dataclasses.dataclass
class Rule:
    """What happens to some calls. Of what is given, in this order: wait, kill, fail, damage.

    Attributes
    ----------
    operation : str
        Name of an operation of FUSE, or several, separated by ``|``.
    pattern : str
        Paths below the mount that it concerns, as for :mod:`fnmatch`.
    block : bool
        Wait until the rules are cleared.
    seconds : float
        Wait for so long.
    rate : float
        All bytes of reads together flow at most so fast, in bytes per second.
    kill : bool
        The filesystem's process is killed.
    error : int
        An errno value to fail with.
    cut : bool
        A read returns half of what it should, a write stores half of what it says.
    flip : bool
        A read or a write changes one bit.
    times : int or None
        So often, then never again; None: always.
    """

    operation: str
    pattern: str = "*"
    block: bool = False
    seconds: float = 0.0
    rate: float = 0.0
    kill: bool = False
    error: int = 0
    cut: bool = False
    flip: bool = False
    times: int | None = None
    met: int = 0
    #: When what was read so far has flowed, in seconds of :func:`time.monotonic`.
    flowed: float = 0.0

    def concerns(self, operation: str, path: str) -> bool:
        """Whether the rule applies to this call."""
        return (
            operation in self.operation.split("|")
            and fnmatch.fnmatchcase(path.lstrip("/"), self.pattern)
            and (self.times is None or self.met < self.times)
        )

    def damage(self, data: bytes) -> bytes:
        """What becomes of the bytes of a read or write."""
        if self.cut:
            data = data[: len(data) // 2]
        if self.flip and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data


# --------------------------------------------------------------------------------- filesystem


class _Rules:
    """The rules in force, shared by the threads of the filesystem and of its socket."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rules: list[Rule] = []

    def meet(self, operation: str, path: str) -> list[Rule]:
        """Wait, die or fail as the rules say; return those that damage what is moved."""
        with self._changed:
            met = [rule for rule in self._rules if rule.concerns(operation, path)]
            for rule in met:
                rule.met += 1
            self._changed.notify_all()
        for rule in met:
            if rule.block:
                with self._changed:
                    self._changed.wait_for(lambda rule=rule: not self._holds(rule))
            if rule.seconds:
                with self._changed:
                    self._changed.wait_for(lambda rule=rule: not self._holds(rule), rule.seconds)
            if rule.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            if rule.error:
                raise OSError(rule.error, os.strerror(rule.error))
        return met

    def flow(self, rules: list[Rule], nbytes: int) -> None:
        """Wait until so many bytes have flowed, each rule at its rate."""
        for rule in rules:
            if rule.rate:
                with self._changed:
                    now = time.monotonic()
                    rule.flowed = max(now, rule.flowed) + nbytes / rule.rate
                    seconds = rule.flowed - now
                    self._changed.wait_for(lambda rule=rule: not self._holds(rule), seconds)

    def _holds(self, rule: Rule) -> bool:
        return any(rule is other for other in self._rules)

    def add(self, **fields: Any) -> int:
        with self._changed:
            self._rules.append(Rule(**fields))
            return len(self._rules)

    def clear(self) -> int:
        with self._changed:
            met = sum(rule.met for rule in self._rules)
            self._rules = []
            self._changed.notify_all()
            return met

    def met(self, at_least: int = 0, seconds: float = 0.0) -> int:
        with self._changed:
            count = lambda: sum(rule.met for rule in self._rules)  # noqa: E731
            self._changed.wait_for(lambda: count() >= at_least, seconds)
            return count()

    def serve(self, listener: socket.socket) -> None:
        """Answer requests, one connection at a time: lines of JSON. A thread of its own."""
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                for line in stream:
                    request = json.loads(line)
                    answer = getattr(self, request.pop("do"))(**request)
                    stream.write(json.dumps(answer) + "\n")
                    stream.flush()


def _leave_with_parent(mountpoint: str | Path) -> None:
    """Unmount when the process of the tests is gone, however it ended. A thread of its own."""
    sys.stdin.read()
    _unmount(mountpoint)
    os.kill(os.getpid(), signal.SIGKILL)


def _unmount(mountpoint: str | Path) -> None:
    subprocess.run(
        ["fusermount3", "-u", "-z", "-q", mountpoint],
        check=False,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _mounts_at(path: Path) -> int:
    """Return how many filesystems are mounted at `path`, one over the other."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sum(line.split(" ")[4] == str(path.resolve()) for line in lines)


def _serve_filesystem(source: str, mountpoint: str, socket_path: str, options: str) -> None:
    import mfusepy

    given = json.loads(options)
    rules = _Rules()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(socket_path)
    listener.listen()
    threading.Thread(target=rules.serve, args=(listener,), daemon=True).start()
    threading.Thread(target=_leave_with_parent, args=(mountpoint,), daemon=True).start()

    class PassThrough(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def _at(self, operation: str, path: str) -> str:
            rules.meet(operation, path)
            return source + path

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            rules.meet("getattr", path)
            info = os.lstat(source + path) if fh is None else os.fstat(fh)
            found = {
                name: getattr(info, name)
                for name in ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
            }
            return found | {f"st_{t}": getattr(info, f"st_{t}_ns") for t in _TIMES}

        def statfs(self, path: str) -> dict[str, int]:
            info = os.statvfs(self._at("statfs", path))
            return {name: getattr(info, name) for name in dir(info) if name.startswith("f_")}

        def opendir(self, path: str) -> int:
            self._at("opendir", path)
            return 0

        def releasedir(self, path: str, fh: int) -> int:
            return 0

        def readdir(self, path: str, fh: int) -> Iterator[tuple[str, dict[str, int], int]]:
            for entry in os.scandir(self._at("readdir", path)):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, {"st_mode": entry.stat(follow_symlinks=False).st_mode}, 0

        def readlink(self, path: str) -> str:
            return os.readlink(self._at("readlink", path))

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(self._at("mkdir", path), mode)
            return 0

        def rmdir(self, path: str) -> int:
            os.rmdir(self._at("rmdir", path))
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(self._at("unlink", path))
            return 0

        def symlink(self, target: str, source_: str) -> int:
            os.symlink(source_, self._at("symlink", target))
            return 0

        def link(self, target: str, source_: str) -> int:
            os.link(source + source_, self._at("link", target), follow_symlinks=False)
            return 0

        def rename(self, old: str, new: str) -> int:
            os.rename(self._at("rename", old), source + new)
            return 0

        def chmod(self, path: str, mode: int) -> int:
            os.chmod(self._at("chmod", path), mode)
            return 0

        def chown(self, path: str, uid: int, gid: int) -> int:
            os.chown(self._at("chown", path), uid, gid, follow_symlinks=False)
            return 0

        def truncate(self, path: str, length: int, fh: int | None = None) -> int:
            os.truncate(self._at("truncate", path), length)
            return 0

        def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
            os.utime(self._at("utimens", path), ns=times, follow_symlinks=False)
            return 0

        def open(self, path: str, flags: int) -> int:
            return os.open(self._at("open", path), flags)

        def create(self, path: str, mode: int, flags: Any = 0) -> int:
            at = self._at("create", path)
            return os.open(at, os.O_RDWR | os.O_CREAT | (flags & os.O_EXCL), mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            met = rules.meet("read", path)
            data = os.pread(fh, size, offset)
            rules.flow(met, len(data))
            for rule in met:
                data = rule.damage(data)
            return data

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            kept = data
            for rule in rules.meet("write", path):
                kept = rule.damage(kept)
            os.pwrite(fh, kept, offset)
            return len(data)

        def flush(self, path: str, fh: int) -> int:
            rules.meet("flush", path)
            return 0

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            rules.meet("fsync", path)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    if mfusepy.fuse_version_major == 2:
        # The third version mounts over other files without being asked.
        given["nonempty"] = True
    mfusepy.FUSE(
        PassThrough(),
        mountpoint,
        foreground=True,
        nothreads=False,
        hard_remove=True,
        **given,
    )


_TIMES = ("atime", "mtime", "ctime")


# -------------------------------------------------------------------------------------- tests


def why_not() -> str | None:
    """Say what is missing to mount such a filesystem; None when nothing is."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no FUSE: /dev/fuse is missing or may not be opened"
    if shutil.which("fusermount3") is None:
        return "no FUSE: fusermount3 is missing (on Debian: apt install fuse3)"
    if importlib.util.find_spec("mfusepy") is None:
        return "no FUSE: mfusepy is missing (pip install '.[test]')"
    return None


#: Environment variable, set where FUSE must be there: what would be skipped fails.
REQUIRED: Final = "REQUIRE_FUSE"


def mounted(folder: Path, **options: Any) -> FaultMount:
    """Mount a :class:`FaultMount`; where that is not possible skip the test with the reason."""
    reason = why_not()
    if reason is None:
        try:
            return FaultMount(folder, **options)
        except RuntimeError as error:
            reason = f"no FUSE: {error}"
    return skip(reason)


def skip(reason: str) -> NoReturn:
    """Skip the test, or fail where FUSE must be there."""
    import pytest

    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but there is {reason}")
    pytest.skip(reason)


class FaultMount:
    """A mounted fault-injecting filesystem, as a context manager.

    Parameters
    ----------
    folder : Path
        Made if missing; holds ``source`` (the files as they are), ``mount`` (the same with
        faults), the socket and the log.
    cache_seconds : float
        How long the kernel may answer names and attributes from its cache, right or wrong.
    source : Path, optional
        The files to show instead, such as those of another mount.
    """

    def __init__(
        self,
        folder: Path,
        *,
        cache_seconds: float = 0.0,
        source: Path | None = None,
    ) -> None:
        self.source = folder / "source" if source is None else source
        self.path = folder / "mount"
        self._socket_path = folder / "socket"
        self._log = folder / "log"
        timeouts = ("attr_timeout", "entry_timeout", "negative_timeout")
        self._options: dict[str, Any] = dict.fromkeys(timeouts, cache_seconds)
        self._options |= {"fsname": "faultfs"}
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: Any = None
        self._lock = threading.Lock()
        for path in (self.source, self.path):
            path.mkdir(parents=True, exist_ok=True)
        self.mount()

    def __enter__(self) -> FaultMount:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the filesystem's process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the filesystem's process."""
        assert self._process is not None
        return self._process.pid

    def died(self, seconds: float = _START_SECONDS / 2) -> bool:
        """Wait for a rule to have killed the process; whether it did."""
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def mount(self) -> None:
        """Mount it, again if it was killed.

        Raises
        ------
        RuntimeError
            If that failed, with what the filesystem said.
        """
        self._socket_path.unlink(missing_ok=True)
        before = _mounts_at(self.path)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    self.source,
                    self.path,
                    self._socket_path,
                    json.dumps(self._options),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not (self._socket_path.exists() and _mounts_at(self.path) > before):
            if not self.alive or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"could not mount: {self._log.read_text()[-500:]}")
            threading.Event().wait(0.01)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_START_SECONDS)
        connection.connect(str(self._socket_path))
        self._stream = connection.makefile("rw")
        connection.close()  # the stream keeps it open

    def _ask(self, **request: Any) -> int:
        with self._lock:
            self._stream.write(json.dumps(request) + "\n")
            self._stream.flush()
            answer: int = json.loads(self._stream.readline())
            return answer

    def add(self, operation: str, pattern: str = "*", **fields: Any) -> None:
        """Put a :class:`Rule` in force."""
        self._ask(do="add", operation=operation, pattern=pattern, **fields)

    def clear(self) -> int:
        """Drop all rules, let go what they hold; return how often they were met."""
        return self._ask(do="clear")

    def met(self, at_least: int = 0, seconds: float = _START_SECONDS / 2) -> int:
        """Return how often rules were met, waiting until it is `at_least` so often."""
        return self._ask(do="met", at_least=at_least, seconds=seconds)

    def freeze(self) -> None:
        """Stop the process: from now on nothing on the mount is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # Threads that run on other cores go on for a moment.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Let a frozen process go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process. Calls on the mount fail from now on, also those that are stuck."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
            self._stream = None

    def unmount(self) -> None:
        """Take the (dead) mount away; the folder beneath shows."""
        _unmount(self.path)

    def revive(self) -> None:
        """After :meth:`kill`, or a rule that killed: mount it again."""
        self.kill()
        self.unmount()
        self.mount()

    def close(self) -> None:
        """Kill the process and take the mount away. Idempotent."""
        self.kill()
        self.unmount()


if __name__ == "__main__":
    _serve_filesystem(*sys.argv[1:5])
