"""Two users share a directory: what one of them may do with what the other has stored.

Owns both sides. Imported by pytest, as root, it looks at what came of the calls. Run as a program,
it is one of the users: it becomes that user after its imports, so that neither Python nor the
checkout need to be readable for everybody, and prints the answer of each call.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends.base import delete_one
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import KVShelfError

pytestmark = [pytest.mark.real, pytest.mark.slow]

FIRST, SECOND = 61234, 61235


def _read(backend: GuardedBackend, name: str) -> int:
    data = memoryview(bytearray(16))
    with backend.open(name) as reader:
        return reader.read_into(data, 0)


CALLS: dict[str, Callable[[GuardedBackend], Any]] = {
    "read": lambda backend: _read(backend, "a/x"),
    "touch": lambda backend: backend.touch("a/x").value,
    "touch own": lambda backend: backend.touch("a/own").value,
    "write": lambda backend: backend.write("a/own", [b"mine"]).value,
    "entries": lambda backend: sorted(row.name for row in backend.list(hidden=True)),
    "space": lambda backend: backend.space() is not None,
    "delete left": lambda backend: delete_one(backend, "a/.x.0123456789abcdef.tmp"),
    "delete": lambda backend: delete_one(backend, "a/x"),
    "writes go on": lambda backend: backend.writes.is_closed,
}


def _be(user: int, root: str, calls: list[str]) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    backend = GuardedBackend(PosixBackend(root, keep_atime=True))
    answers = []
    for call in calls:
        try:
            answers.append(CALLS[call](backend))
        except KVShelfError as error:
            answers.append(type(error).__name__)
    sys.stdout.write(json.dumps(answers))


def as_user(user: int, root: Path, *calls: str) -> list[Any]:
    """Make calls as another user; return their answers, errors by the names of their classes."""
    command = [sys.executable, __file__, str(user), str(root), *calls]
    # The child may not read this checkout once it is another user.
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    answers: list[Any] = json.loads(found.stdout)
    return answers


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory of the first user's; pytest's own are closed to other users."""
    if os.geteuid() != 0:
        pytest.skip("only root can be several users")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    root = folder / "shelf"
    root.mkdir()
    os.chown(root, FIRST, FIRST)
    yield root
    shutil.rmtree(folder)


def test_shelf_for_everybody(root: Path) -> None:
    root.chmod(0o777)
    assert as_user(FIRST, root, "write", "touch own") == ["created", "touched"]
    (root / "a/own").rename(root / "a/x")
    left = root / "a/.x.0123456789abcdef.tmp"
    left.write_bytes(b"")
    os.utime(root / "a/x", (1000, 2000))
    before = (root / "a/x").stat().st_ctime
    assert as_user(SECOND, root, "read", "touch", "write", "touch own", "space") == [
        *(4, "touched", "created", "touched", True)
    ]
    found = (root / "a/x").stat()
    assert (found.st_uid, found.st_nlink) == (FIRST, 1)
    assert found.st_mtime == 2000
    assert found.st_ctime > before
    assert (root / "a/own").stat().st_uid == SECOND
    assert stat.S_IMODE((root / "a/own").stat().st_mode) == 0o666
    assert as_user(SECOND, root, "delete left", "delete", "entries") == [True, True, ["a/own"]]


def test_shelf_in_which_each_may_delete_only_their_own(root: Path) -> None:
    root.chmod(0o1777)
    assert as_user(FIRST, root, "write") == ["created"]
    (root / "a/own").rename(root / "a/x")
    assert as_user(SECOND, root, "read", "touch", "delete", "write", "writes go on") == [
        *(4, "refused", "ReadOnlyStorageError", "created", True)
    ]


def test_shelf_that_others_only_read(root: Path) -> None:
    root.chmod(0o755)
    assert as_user(FIRST, root, "write") == ["created"]
    (root / "a/own").rename(root / "a/x")
    assert as_user(SECOND, root, "read", "touch", "space", "entries", "write") == [
        *(4, "refused", True, ["a/x"], "ReadOnlyStorageError")
    ]


def test_shelf_that_only_its_maker_may_enter_is_refused_at_the_start(root: Path) -> None:
    root.chmod(0o700)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        as_user(SECOND, root, "read", "write")
    line = caught.value.stderr.splitlines()[-1]
    assert f"{root} belongs to user {FIRST} and group {FIRST}, with mode 700" in line
    assert f"this is user {SECOND} of group {SECOND}" in line


if __name__ == "__main__":
    _be(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
