"""What only a directory can do to us: links, modes, errno, kills, vanishing roots."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvshelf.backends import (
    Touched,
    WriteResult,
    open_backend,
    posix,
    posix_folders,
    posix_mount,
    posix_publish,
)
from kvshelf.backends.base import Whole, delete_one, probe
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.posix_mount import READ_ONLY_MEMORY, Mount, find_mount
from kvshelf.cli.app import app
from kvshelf.errors import (
    ConfigError,
    NoSpaceStorageError,
    ObjectMissingError,
    PermanentStorageError,
    ProcessLimitError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
    UnavailableStorageError,
)

IS_ROOT = os.geteuid() == 0
WHOLE = Whole("x", b"", b"", b"", array("q", (9, 9)))


def lack_openat2(monkeypatch: Any) -> None:
    """Let backends that are made from now on open folder by folder."""
    monkeypatch.setattr(posix_folders, "has_openat2", lambda: False)


@pytest.fixture(params=["openat2", "walk"])
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> PosixBackend:
    """One backend for each way to open without following links."""
    if request.param == "walk":
        lack_openat2(monkeypatch)
    elif not posix_folders.has_openat2():
        pytest.skip("this kernel or sandbox has no openat2")
    return PosixBackend(tmp_path / "shelf")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shelf"


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def failing(code: int) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


# ------------------------------------------------------------------------------------------ links


@pytest.mark.parametrize("level", ["ns", "ns/_", "ns/_/ab"])
def test_no_folder_link_leads_outside(backend: PosixBackend, root: Path, level: str) -> None:
    name = "ns/_/ab/x"
    outside = root.parent / "outside"
    deeper = outside / Path(name).relative_to(level)
    deeper.parent.mkdir(parents=True)
    deeper.write_bytes(b"secret")
    (root / level).parent.mkdir(parents=True, exist_ok=True)
    (root / level).symlink_to(outside)
    before = everything(outside)

    answer, other = backend.stat([name, "none/x"])
    assert isinstance(answer, PermanentStorageError)
    assert other is None
    assert "symbolic link" in str(answer)
    assert str(root / level) in str(answer)
    for call in (
        lambda: backend.open(name),
        lambda: backend.info(name),
        lambda: backend.write(name, [b"x"]),
        lambda: backend.write(name, [b"x"], "replace"),
        lambda: backend.write("ns/_/ab/other", [b"x"]),
        lambda: delete_one(backend, name),
        lambda: backend.set_aside(name),
        lambda: list(backend.list("ns/_/ab")),
    ):
        with pytest.raises(PermanentStorageError):
            call()
    backend.touch(name)
    assert list(backend.list()) == []
    assert everything(outside) == before
    assert deeper.read_bytes() == b"secret"


def test_folder_that_is_a_link_when_it_is_made_is_not_followed(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    outside = root.parent / "outside"
    outside.mkdir()

    def put_link(part: str, *_: object, dir_fd: int) -> None:
        os.symlink(outside, part, dir_fd=dir_fd)
        raise FileExistsError(errno.EEXIST, "a link", part)

    monkeypatch.setattr(os, "mkdir", put_link)
    with pytest.raises(PermanentStorageError, match="symbolic link"):
        backend.write("a/x", [b"secret"])
    assert not everything(outside)


# -------------------------------------------------------------------------------- root and modes


def test_paths(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert PosixBackend("sub/shelf").url == str(tmp_path / "sub" / "shelf")
    assert PosixBackend("~/kv").url == str(tmp_path / "home" / "kv")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a directory"):
        PosixBackend(tmp_path / "file")
    with pytest.raises(ConfigError):
        PosixBackend("")


@pytest.mark.parametrize("mode", [0o2770, 0o750, 0o777])
def test_modes_and_group_come_from_the_root_whatever_the_umask(root: Path, mode: int) -> None:
    root.mkdir()
    if IS_ROOT:
        os.chown(root, -1, 54321)
    root.chmod(mode)
    with umask(0o077):
        backend = PosixBackend(root)
        backend.write("a/b/x", [b"1"])
        backend.write("a/b/y", [b"1"], "replace")
    assert backend.properties.shared is bool(mode & 0o022)
    for name in ("a", "a/b", "a/b/x", "a/b/y"):
        info = (root / name).stat()
        is_file = stat.S_ISREG(info.st_mode)
        assert stat.S_IMODE(info.st_mode) == (mode & 0o666 if is_file else mode)
        assert info.st_gid == root.stat().st_gid


@pytest.mark.parametrize(
    ("above", "mode"),
    [(0o2775, 0o2770), (0o770, 0o770), (0o775, 0o770), (0o1777, 0o700), (0o755, 0o700)],
)
def test_root_below_folder_of_a_group_is_made_for_the_group(
    tmp_path: Path, above: int, mode: int
) -> None:
    volume, root = tmp_path / "volume", tmp_path / "volume/shelf"
    volume.mkdir()
    if IS_ROOT:
        os.chown(volume, -1, 54321)
    volume.chmod(above)
    with umask(0o022):
        PosixBackend(root).write("a/x", [b"1"])
    for folder in (root, root / "a"):
        info = folder.stat()
        assert stat.S_IMODE(info.st_mode) == mode
        assert mode == 0o700 or info.st_gid == volume.stat().st_gid
    assert stat.S_IMODE((root / "a/x").stat().st_mode) == mode & 0o666


def test_root_of_another_user_is_named_once_at_the_start(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "shelf").mkdir(mode=0o700)
    monkeypatch.setattr(os, "access", lambda *args, **options: False)
    with pytest.raises(PermanentStorageError, match=r"opening the shelf failed") as caught:
        PosixBackend(tmp_path / "shelf")
    text = str(caught.value)
    assert f"{tmp_path}/shelf belongs to user {os.getuid()} and group {os.getgid()}" in text
    assert f"with mode 700, and this is user {os.geteuid()}" in text
    assert "chmod g+rwxs" in text


def test_shelf_deleted_while_running(backend: PosixBackend, root: Path) -> None:
    root.chmod(0o750)
    backend.write("a/b/x", [b"1"])
    with backend.open("a/b/x") as reader:
        shutil.rmtree(root)
        buffer = bytearray(1)
        assert reader.read_into(memoryview(buffer), 0) == 1
    assert backend.stat(["a/b/x"]) == [None]
    assert list(backend.list()) == []
    with pytest.raises(ObjectMissingError):
        backend.open("a/b/x")
    assert backend.write("a/b/x", [b"22"]) is WriteResult.CREATED
    assert (root / "a/b/x").read_bytes() == b"22"
    assert stat.S_IMODE(root.stat().st_mode) == 0o750
    # Another shelf takes its place.
    root.rename(root.parent / "old")
    (root / "a").mkdir(parents=True)
    (root / "a" / "y").write_bytes(b"333")
    assert backend.stat(["a/b/x", "a/y"]) == [None, 3]
    backend.write("a/z", [b"4444"])
    assert (files(root), files(root.parent / "old")) == ({"a/y", "a/z"}, {"a/b/x"})


def test_deleted_shelf_below_folders_that_may_not_be_looked_at(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    backend.write("a/x", [b"1"])
    shutil.rmtree(root)
    real, later = os.stat, time.monotonic() + 1.0

    def stat(path: Any, **options: Any) -> os.stat_result:
        if path in map(str, root.parents):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    # Past what the last check of the root is good for.
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert backend.stat(["a/x"]) == [None]
    assert list(backend.list()) == []
    assert backend.space() is None
    with pytest.raises(ObjectMissingError):
        backend.open("a/x")


def test_shelf_deleted_during_a_write(backend: PosixBackend, root: Path, monkeypatch: Any) -> None:
    backend.write("a/b/x", [b"1"])
    real = os.link
    calls = []

    def link(*args: Any, **kwargs: Any) -> None:
        if not calls:
            shutil.rmtree(root)
        calls.append(args)
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", link)
    assert backend.write("a/b/y", [b"22"]) is WriteResult.CREATED
    assert len(calls) == 2
    assert files(root) == {"a/b/y"}


def test_without_create_a_missing_root_stays_missing(tmp_path: Path) -> None:
    backend = PosixBackend(tmp_path / "unmounted", create=False)
    assert backend.stat(["a/x"]) == [None]
    assert list(backend.list()) == []
    with pytest.raises(PermanentStorageError, match="root is gone"):
        backend.write("a/x", [b"1"])
    assert not (tmp_path / "unmounted").exists()
    (tmp_path / "unmounted").mkdir()
    assert backend.write("a/x", [b"1"]) is WriteResult.CREATED


# ------------------------------------------------------------------------------------- read-only


def test_read_only_by_option(root: Path) -> None:
    PosixBackend(root).write("a/x", [b"1"])
    before = everything(root.parent)
    backend = open_backend(root, read_only=True)
    assert backend.properties.read_only
    assert backend.stat(["a/x"]) == [1]
    for call in (
        lambda: backend.write("a/y", [b"1"]),
        lambda: delete_one(backend, "a/x"),
        lambda: backend.set_aside("a/x"),
    ):
        with pytest.raises(ReadOnlyStorageError, match="read-only"):
            call()
    backend.touch("a/x")
    assert everything(root.parent) == before
    missing = open_backend(root.parent / "none", read_only=True)
    assert missing.stat(["a/x"]) == [None]
    assert open_backend("memory://read-only", read_only=True).properties.read_only
    assert not (root.parent / "none").exists()


@pytest.fixture
def read_only_mount(tmp_path: Path) -> Iterator[Path]:
    if not IS_ROOT or shutil.which("mount") is None:
        pytest.skip("only root can mount")
    place = tmp_path / "mounted"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "none", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


@pytest.mark.real
def test_mount_that_becomes_read_only_and_writable_again(
    read_only_mount: Path, monkeypatch: Any
) -> None:
    backend = PosixBackend(read_only_mount)
    assert backend.properties.filesystem == "tmpfs"
    backend.write("a/x", [b"1"])
    remount(read_only_mount, "ro")
    assert not backend.properties.read_only
    with pytest.raises(ReadOnlyStorageError):
        backend.write("a/y", [b"1"])
    assert backend.properties.read_only
    anew = PosixBackend(read_only_mount)
    assert anew.properties.read_only
    with pytest.raises(ReadOnlyStorageError, match="the filesystem is mounted read-only"):
        anew.write("a/y", [b"1"])
    remount(read_only_mount, "rw")
    with pytest.raises(ReadOnlyStorageError, match="within the last minute"):
        backend.write("a/y", [b"1"])
    later = time.monotonic() + READ_ONLY_MEMORY + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not backend.properties.read_only
    assert backend.write("a/y", [b"1"]) is WriteResult.CREATED
    assert files(read_only_mount) == {"a/x", "a/y"}


@pytest.mark.parametrize("is_root_closed", [True, False])
def test_write_without_permission_makes_the_shelf_read_only_if_its_root_is_closed(
    backend: PosixBackend, root: Path, monkeypatch: Any, is_root_closed: bool
) -> None:
    backend.write("a/x", [b"1"])
    monkeypatch.setattr(os, "access", lambda *_, **__: not is_root_closed)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(errno.EACCES))
        with pytest.raises(ReadOnlyStorageError, match="permissions") as caught:
            backend.write("a/y", [b"1"])
    assert isinstance(caught.value, PermissionError)
    assert backend.properties.read_only is is_root_closed
    assert files(root) == {"a/x"}
    if not is_root_closed:
        assert backend.write("b/y", [b"1"]) is WriteResult.CREATED


# ----------------------------------------------------------------------------------------- errors


KINDS: dict[str, type[StorageError]] = {
    **dict.fromkeys(("ENOSPC", "EDQUOT"), NoSpaceStorageError),
    **dict.fromkeys(("EROFS", "EACCES", "EPERM"), ReadOnlyStorageError),
    **dict.fromkeys(("EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN"), TransientStorageError),
    **dict.fromkeys(("EBUSY", "EKEYEXPIRED", "EREMOTEIO"), TransientStorageError),
    **dict.fromkeys(("EMFILE", "ENFILE", "ENOMEM"), ProcessLimitError),
    **dict.fromkeys(("EFBIG", "ENAMETOOLONG", "EUCLEAN"), PermanentStorageError),
}
#: A system call that fails, with what is done meanwhile. Errors of `link` have other ways behind.
FAILING: dict[str, Callable[[PosixBackend], object]] = {
    "writev": lambda backend: backend.write("a/y", [b"bytes"]),
    "close": lambda backend: backend.write("a/y", [b"bytes"]),
    "fstat": lambda backend: backend.write("a/y", [b"bytes"]),
    "fsync": lambda backend: backend.write("a/y", [b"bytes"]),
    "replace": lambda backend: backend.write("a/x", [b"bytes"], "replace"),
    "unlink": lambda backend: delete_one(backend, "a/x"),
    "rename": lambda backend: backend.set_aside("a/x"),
    "lstat": lambda backend: backend.info("a/x"),
    "statvfs": lambda backend: backend.space(),
}


@pytest.mark.parametrize(
    ("call", "code"),
    [("writev", code) for code in KINDS] + [(call, "EIO") for call in FAILING if call != "writev"]
    + [("lstat", "EACCES"), ("unlink", "EACCES")],
)  # fmt: skip
def test_error_of_the_system_has_its_class_and_changes_nothing(
    backend: PosixBackend, root: Path, monkeypatch: Any, call: str, code: str
) -> None:
    backend.write("a/x", [b"1"])
    flushing = PosixBackend(root, fsync=True)
    number, real_close = getattr(errno, code), os.close

    def close_badly(fd: int) -> None:
        writable = stat.S_ISREG(os.fstat(fd).st_mode)
        real_close(fd)
        if writable:
            raise OSError(number, os.strerror(number))

    changes = call not in ("lstat", "statvfs")
    kind = KINDS[code]
    if kind is ReadOnlyStorageError and not changes:
        kind = PermanentStorageError
    with monkeypatch.context() as patch:
        patch.setattr(os, call, close_badly if call == "close" else failing(number))
        with pytest.raises(kind) as caught:
            FAILING[call](flushing)
    assert type(caught.value) is kind and caught.value.errno == number
    assert isinstance(caught.value, PermissionError) is (kind is ReadOnlyStorageError)
    assert caught.value.retryable is issubclass(kind, TransientStorageError)
    assert str(root) in str(caught.value)
    assert files(root) == {"a/x"}
    assert (root / "a/x").read_bytes() == b"1"


def test_publication_with_fsync_flushes_the_file_and_then_its_folder(
    root: Path, monkeypatch: Any
) -> None:
    flushed: list[tuple[bool, bool]] = []

    def note(fd: int) -> None:
        flushed.append((stat.S_ISDIR(os.fstat(fd).st_mode), (root / "a/x").exists()))

    monkeypatch.setattr(os, "fsync", note)
    PosixBackend(root, fsync=True).write("a/x", [b"1"])
    assert flushed == [(False, False), (True, True)]


@pytest.mark.parametrize(
    ("kind", "late", "is_written"),
    [("nfs4", 3, True), ("nfs4", 4, False), ("ext4", 0, True), ("ext4", 1, False)],
)
def test_size_that_a_mount_shows_late_is_waited_for(
    root: Path, monkeypatch: Any, kind: str, late: int, is_written: bool
) -> None:
    """While it is open a file seems to be empty, and once it is closed for `late` looks."""
    monkeypatch.setattr(posix_mount, "find_mount", lambda _: Mount(kind))
    backend, real, looks = PosixBackend(root), os.lstat, list[str]()

    def lstat(path: str, **options: Any) -> Any:
        if not path.endswith(".tmp"):
            return real(path, **options)
        looks.append(path)
        return SimpleNamespace(st_size=0) if len(looks) <= late else real(path, **options)

    monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_size=0))
    monkeypatch.setattr(os, "lstat", lstat)
    if is_written:
        assert backend.write("a/x", [b"12345"]) is WriteResult.CREATED
    else:
        with pytest.raises(TransientStorageError, match="0 of 5 bytes"):
            backend.write("a/x", [b"12345"])
    assert files(root) == ({"a/x"} if is_written else set())


def test_storage_that_takes_few_bytes_at_a_time(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    real = os.writev
    sizes = iter([3, 1, 7, 2, 4, *[5] * 100])

    def writev(fd: int, views: list[memoryview]) -> int:
        data = b"".join(views)[: next(sizes)]
        return real(fd, [data])

    monkeypatch.setattr(os, "writev", writev)
    pieces = [b"0123", b"", b"45", b"6", b"789abcdefgh", b"ijk"]
    backend.write("a/x", pieces)
    assert (root / "a/x").read_bytes() == b"".join(pieces)
    monkeypatch.setattr(os, "writev", lambda fd, views: 0)
    with pytest.raises(TransientStorageError):
        backend.write("a/y", pieces)
    assert files(root) == {"a/x"}


def test_read_errors(backend: PosixBackend, root: Path, monkeypatch: Any) -> None:
    backend.write("a/x", [b"12345"])
    real = os.preadv
    with backend.open("a/x") as reader:
        monkeypatch.setattr(os, "preadv", failing(errno.EIO))
        with pytest.raises(TransientStorageError, match="EIO"):
            reader.read_into(memoryview(bytearray(5)), 0)
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:2]], at))
        buffer = bytearray(9)
        assert reader.read_into(memoryview(buffer), 1) == 4
        assert buffer[:4] == b"2345"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing(errno.ESTALE))
        with pytest.raises(TransientStorageError):
            backend.open("a/x")


def test_probe_errors_are_answers(backend: PosixBackend, monkeypatch: Any) -> None:
    backend.write("a/x", [b"12345"])
    backend.write("a/y", [b"1"])
    real = os.lstat

    def lstat(path: str, **kwargs: Any) -> os.stat_result:
        if path == "x":
            raise OSError(errno.EIO, "broken")
        return real(path, **kwargs)

    monkeypatch.setattr(os, "lstat", lstat)
    first, second, third = backend.stat(["a/x", "a/y", "b/z"])
    assert isinstance(first, TransientStorageError)
    assert (second, third) == (1, None)


@pytest.mark.parametrize(
    ("code", "files", "files_free", "bytes_free", "short_of", "hint"),
    [
        (errno.ENOSPC, 0, 0, 1 << 20, "bytes", "free some space"),
        (errno.ENOSPC, 100, 15, 1 << 30, "inodes", "no inodes are left"),
        (errno.ENOSPC, 100, 50, 1 << 30, "quota", "a quota is reached"),
        (errno.ENOSPC, 0, 0, 1 << 30, "quota", "a quota is reached"),
        (errno.EDQUOT, 100, 50, 0, "quota", "a quota is reached"),
    ],
)
def test_full_storage_names_what_it_lacks(
    backend: PosixBackend,
    monkeypatch: Any,
    code: int,
    files: int,
    files_free: int,
    bytes_free: int,
    short_of: str,
    hint: str,
) -> None:
    backend.write("a/x", [b"1"])
    found = SimpleNamespace(f_files=files, f_favail=files_free, f_bavail=bytes_free, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    monkeypatch.setattr(os, "writev", failing(code))
    with pytest.raises(NoSpaceStorageError, match=hint) as caught:
        backend.write("a/y", [b"1"])
    assert caught.value.short_of == short_of
    assert storage_error(caught.value, "other", "/y") is caught.value


@pytest.mark.real
def test_mount_with_no_inodes_left_says_so(read_only_mount: Path) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=8", str(read_only_mount)], check=True)
    backend = PosixBackend(read_only_mount)
    fill = (backend.write(f"a/{number}", [b"1"]) for number in range(8))
    with pytest.raises(NoSpaceStorageError, match="no inodes are left") as caught:
        list(fill)
    assert caught.value.short_of == "inodes"
    space = backend.space()
    # Of tmpfs a hard link takes one.
    assert space is not None and space.files == 1
    result = CliRunner().invoke(app, ["doctor", str(read_only_mount)])
    assert "1 more file can be made: its inodes run out" in result.stdout
    assert "no inodes are left" in result.stdout


def test_nothing_stays_open(backend: PosixBackend, root: Path, monkeypatch: Any) -> None:
    def use() -> None:
        backend.write("a/b/x", [b"1"], "replace")
        backend.write("a/b/x", [b"1"])
        backend.stat(["a/b/x", "a/b/y", "c/x", "x"])
        backend.open("a/b/x").close()
        (root / "a" / "fifo").exists() or os.mkfifo(root / "a" / "fifo")
        for name in ("a/fifo", "a/b", "none"):
            with pytest.raises(StorageError):
                backend.open(name)
        next(iter(backend.list()))
        list(backend.folders("a"))
        backend.set_aside("a/b/x")
        delete_one(backend, "a/b/x")
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", failing(errno.EIO))
            with pytest.raises(StorageError):
                backend.write("a/b/z", [b"1"])

    use()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        use()
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------------------------------- publish


@pytest.mark.parametrize(("call", "then"), [("link", "EIO"), ("replace", "EIO"), ("link", "again")])
def test_publication_with_error_after_the_fact_is_done(
    backend: PosixBackend, root: Path, monkeypatch: Any, call: str, then: str
) -> None:
    """NFS repeats a request whose answer was lost."""
    real = getattr(os, call)

    def do_and_fail(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        if then == "again":
            real(*args, **kwargs)
        raise OSError(errno.EIO, "stale")

    backend.write("a/y", [b"1"])
    monkeypatch.setattr(os, call, do_and_fail)
    assert backend.write("a/x", [b"1"]) is WriteResult.CREATED
    assert (root / "a/x").stat().st_nlink == 1
    assert backend.write("a/x", [b"22"], "replace") is WriteResult.REPLACED
    assert files(root) == {"a/x", "a/y"}
    assert (root / "a/x").read_bytes() == b"22"


def test_publication_with_temporary_taken_away_is_not_done(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    """An object of another size is there, which somebody else wrote."""

    def take_away(temporary: str, base: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.unlink(temporary, dir_fd=src_dir_fd)
        raise OSError(errno.EIO, "gone")

    backend.write("a/x", [b"1"])
    monkeypatch.setattr(os, "replace", take_away)
    with pytest.raises(TransientStorageError):
        backend.write("a/x", [b"22"], "replace")


@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EDQUOT"])
def test_link_with_error_that_may_pass_is_tried_again(
    backend: PosixBackend, root: Path, monkeypatch: Any, code: str
) -> None:
    backend.write("a/y", [b"1"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", failing(getattr(errno, code)))
        with pytest.raises(KINDS[code]):
            backend.write("a/x", [b"1"])
    monkeypatch.setattr(posix_publish, "_renameat2", None)
    monkeypatch.setattr(os, "rename", failing(errno.EIO))
    assert backend.write("a/x", [b"1"]) is WriteResult.CREATED
    assert files(root) == {"a/x", "a/y"}


@pytest.mark.parametrize(
    "code", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EXDEV, errno.EINVAL]
)
def test_way_to_publish_is_remembered(
    backend: PosixBackend, root: Path, monkeypatch: Any, code: int
) -> None:
    calls = []

    def link(*args: object, **kwargs: object) -> None:
        calls.append(args)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    assert backend.write("a/x", [b"1"]) is WriteResult.CREATED
    assert backend.write("a/y", [b"1"]) is WriteResult.CREATED
    assert len(calls) == 1
    assert not backend.properties.read_only
    assert files(root) == {"a/x", "a/y"}
    monkeypatch.setattr(posix_publish, "_renameat2", None)
    assert backend.write("a/z", [b"1"]) is WriteResult.CREATED
    assert backend.write("a/z", [b"1"]) is WriteResult.EXISTED
    assert files(root) == {"a/x", "a/y", "a/z"}
    monkeypatch.setattr(os, "rename", link)
    with pytest.raises(StorageError, match=r"neither links nor renames.*use s3://"):
        backend.write("a/new", [b"1"])


def test_writers_that_learn_at_the_same_time_how_a_mount_publishes_lose_no_way() -> None:
    others = [True]

    def refuses(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links")

    def renames(*arguments: Any) -> None:
        if others.pop():
            others.append(False)
            posix_publish._give_name(*arguments, ways, "")

    ways: list[Any] = [refuses, renames, refuses]
    assert posix_publish._give_name("t", "x", 0, ways, "") is renames
    assert ways == [renames, refuses]


# ------------------------------------------------------------------------------------------ other


def test_only_whoever_uses_an_object_sets_its_access_time(root: Path, monkeypatch: Any) -> None:
    """A relatime mount sets it at a read if it is not later than the modification time."""
    backend, looking = PosixBackend(root), PosixBackend(root, keep_atime=True)
    backend.write("a/x", [b"12345"])
    path = root / "a/x"

    def atime_after(read: Any) -> float:
        os.utime(path, (1000, 2000))
        read()
        return path.stat().st_atime

    def read(opened: PosixBackend) -> None:
        with opened.open("a/x") as reader:
            assert reader.read_into(memoryview(bytearray(5)), 0) == 5

    if atime_after(lambda: read(backend)) == 1000:
        pytest.skip("this filesystem is mounted with noatime")
    assert atime_after(lambda: read(looking)) == 1000
    # Another user's file: reading it is allowed, not doing so unseen.
    lack_openat2(monkeypatch)
    looking = PosixBackend(root, keep_atime=True)
    real = os.open

    def refused(path: str, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_NOATIME:
            raise PermissionError(errno.EPERM, "not the owner", path)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    assert atime_after(lambda: read(looking)) > 2000


def test_use_that_cannot_be_recorded_is_refused_unless_the_reason_passes(
    root: Path, monkeypatch: Any
) -> None:
    """A program of a mount is given both times, of which one is the old one."""
    monkeypatch.setattr(posix_mount, "find_mount", lambda path: Mount("fuse.some"))
    backend = PosixBackend(root)
    backend.write("a/x", [b"1"])
    os.utime(root / "a/x", (1000, 2000))
    assert backend.touch("a/x") is backend.touch("a/none") is Touched.TOUCHED
    found = (root / "a/x").stat()
    assert found.st_mtime == 2000 < found.st_atime
    for code in ("EPERM", "EACCES", "EROFS", "EIO", "ENOSPC"):
        monkeypatch.setattr(os, "utime", failing(getattr(errno, code)))
        passes = code in ("EIO", "ENOSPC")
        assert backend.touch("a/x") is (Touched.TOUCHED if passes else Touched.REFUSED)


@pytest.mark.parametrize(("mode", "is_recorded"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_use_of_another_user_s_file_is_a_link_to_it_where_others_may_write(
    root: Path, monkeypatch: Any, mode: int, is_recorded: bool
) -> None:
    root.mkdir()
    root.chmod(mode)
    backend = PosixBackend(root)
    backend.write("x", [b"1"])
    before = (root / "x").stat()
    monkeypatch.setattr(posix, "_set_access_time", failing(errno.EPERM))
    assert backend.touch("x") is (Touched.TOUCHED if is_recorded else Touched.REFUSED)
    after = (root / "x").stat()
    assert (after.st_ctime_ns > before.st_ctime_ns) is is_recorded
    assert files(root) == {"x"} and after.st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    ("mount", "free", "expected"),
    [
        (Mount("ext4", source="/dev/sda"), [5], 5),
        (Mount("fuse.juicefs", source="JuiceFS:kv"), [50], 50),
        # Little is free: is it true of the mount's program?
        (Mount("fuse.some"), [5, 4, 4], 4),
        (Mount("fuse.some"), [5, 5], None),
        (Mount("fuse.some"), [5, "full"], 5),
        # These show how much is free where they keep copies.
        (Mount("fuse", source="blobfuse2"), [50], None),
        (Mount("fuse.blobfuse", source="x"), [50], None),
        (Mount("fuse.rclone", source="remote:kv"), [50], None),
        # Some filesystems of programs know no size.
        (Mount("ext4", source="/dev/sda"), [], None),
    ],
)
def test_space_is_what_the_mount_says_unless_that_is_not_true(
    root: Path, monkeypatch: Any, mount: Mount, free: list[Any], expected: int | None
) -> None:
    monkeypatch.setattr(posix_mount, "find_mount", lambda _: mount)
    backend, answers = PosixBackend(root), iter(free)
    if "full" in free:
        monkeypatch.setattr(os, "writev", failing(errno.ENOSPC))
        answers = iter(free[:1] * 3)
    total = 100 if free else 0

    def statvfs(_: object) -> Any:
        found = next(answers, free[-1] if free else 0)
        more = {"f_flag": 0, "f_files": 0, "f_favail": 0}
        return SimpleNamespace(f_bavail=found, f_bfree=99, f_blocks=total, f_frsize=4096, **more)

    monkeypatch.setattr(os, "statvfs", statvfs)
    first, second = backend.space(), backend.space()
    assert (first is None) is (second is None) is (expected is None)
    if second is not None:
        assert (second.free, second.total) == (expected * 4096 if expected else 0, 100 * 4096)
        assert second.files is None and not second.memory
    assert not files(root)
    if expected is None:
        found = CliRunner().invoke(app, ["doctor", str(root)]).stdout
        assert ("never changes: not looked at" in found) is mount.kind.startswith("fuse")


def test_file_that_vanishes_during_a_listing_is_left_out(backend: PosixBackend, root: Path) -> None:
    names = {f"a/{number}" for number in range(9)}
    for name in names:
        backend.write(name, [b"1"])
    rows = backend.list()
    first = next(rows).name
    gone = sorted(names - {first})[::2]
    for name in gone:
        (root / name).unlink()
    assert {first, *(row.name for row in rows)} == names - {*gone}


def test_what_a_filesystem_has_at_its_root_is_left_alone(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    """Only root may open `lost+found`."""
    backend.write("a/x", [b"1"])
    (root / "lost+found").mkdir(mode=0)
    real = os.open
    opened: list[str] = []
    lack_openat2(monkeypatch)
    looking = PosixBackend(root)

    def noted(path: str, *args: Any, **options: Any) -> int:
        opened.append(path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", noted)
    assert [info.name for info in looking.list(hidden=True)] == ["a/x"]
    assert looking.folders() == ["a"]
    assert "lost+found" not in opened and "a" in opened


MOUNTS = r"""21 1 8:1 / / rw,relatime - ext4 /dev/sda rw
22 21 0:40 / /mnt/kv rw,relatime - nfs4 server:/below rw,vers=4.2
23 22 0:41 / /mnt/kv ro,noatime shared:1 - nfs4 server:/above rw,actimeo=5
24 21 0:42 / /mnt/with\040space rw - tmpfs none rw
"""


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/mnt/kv/shelf", "server:/above"),
        ("/mnt/kv", "server:/above"),
        ("/mnt/kv2/shelf", "/dev/sda"),
        ("/mnt/with space/x", "none"),
        ("/", "/dev/sda"),
    ],
)
def test_mount_of_path_is_the_topmost_that_holds_it(
    monkeypatch: Any, path: str, source: str
) -> None:
    assert find_mount("/proc/self").kind == "proc"
    monkeypatch.setattr(posix_mount, "open", lambda *_, **__: io.StringIO(MOUNTS), raising=False)
    found = find_mount(path)
    assert found.source == source
    assert found.cache_seconds == (5.0 if source == "server:/above" else 0.0)


@pytest.mark.parametrize(
    ("kind", "options", "seconds"),
    [
        ("ext4", "rw,relatime", 0.0),
        ("tmpfs", "rw", 0.0),
        ("nfs4", "rw,vers=4.2", 60.0),
        ("nfs4", "rw,acregmin=1,acregmax=3,acdirmin=1,acdirmax=10", 10.0),
        ("nfs", "rw,acregmax=3", 60.0),
        ("nfs", "rw,actimeo=2", 2.0),
        ("nfs", "rw,noac", 0.0),
        ("cifs", "rw", 1.0),
        ("cifs", "rw,actimeo=30", 30.0),
        ("lustre", "rw,flock", 0.0),
        ("fuse.rclone", "rw", 300.0),
        ("fuse", "rw,user_id=0", 60.0),
        ("unheardof", "rw", 60.0),
    ],
)
def test_seconds_for_which_caches_may_lie(kind: str, options: str, seconds: float) -> None:
    assert Mount(kind, frozenset(options.split(","))).cache_seconds == seconds


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "nfs4"])
def test_properties_depend_on_who_else_changes_files(
    tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    monkeypatch.setattr(posix_mount, "find_mount", lambda path: Mount(kind))
    backend = PosixBackend(tmp_path)
    properties, space, is_far = backend.properties, backend.space(), kind == "nfs4"
    assert (properties.cache_seconds > 0) is is_far
    # However fast the misses were that were measured.
    assert properties.high_latency is is_far
    assert properties.local_path == ("" if is_far else str(tmp_path))
    assert space is not None and space.memory is (kind == "tmpfs")
    assert space.total == shutil.disk_usage(tmp_path).total


KV = Mount("nfs4", point="/mnt/kv", source="server:/kv")
CHANGING: list[Callable[[PosixBackend], object]] = [
    lambda backend: backend.write("a/y", [b"1"]),
    lambda backend: backend.write("new/y", [b"1"]),
    lambda backend: backend.write("a/x", [b"2"], "replace"),
    lambda backend: delete_one(backend, "a/x"),
    lambda backend: backend.set_aside("a/x"),
    lambda backend: list(backend.list()),
    lambda backend: backend.folders(),
    lambda backend: backend.space(),
]
LOOKING: list[Callable[[PosixBackend], object]] = [
    lambda backend: backend.open("a/x"),
    lambda backend: backend.open("a/none"),
    lambda backend: backend.info("a/x"),
    lambda backend: probe(backend, "a/x"),
    lambda backend: probe(backend, "a/none"),
    lambda backend: probe(backend, "none/x"),
    lambda backend: backend.read_whole("a/", b"", [WHOLE], [memoryview(bytearray(9))]),
]


@pytest.mark.parametrize("number", ["other", "same"])
@pytest.mark.parametrize(
    ("mount", "is_same"),
    [
        (Mount("nfs4", point="/mnt/kv", source="server:/other"), False),
        (Mount("nfs4", point="/mnt", source="server:/kv"), False),
        (Mount("ext4", point="/", source="/dev/sda"), False),
        (KV, True),
    ],
)
def test_call_while_another_filesystem_is_at_the_root_fails(
    backend: PosixBackend, root: Path, monkeypatch: Any, number: str, mount: Mount, is_same: bool
) -> None:
    """It has another device number, or that of the one that was there."""
    shutil.rmtree(root)
    mounts = [KV]
    monkeypatch.setattr(posix_mount, "find_mount", lambda _: mounts[0])
    backend = PosixBackend(root)
    backend.write("a/x", [b"1"])
    real = os.stat

    def stat_of_other(path: Any, **options: Any) -> os.stat_result:
        found = real(path, **options)
        if path != str(root):
            return found
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:]))

    mounts[0] = mount
    if number == "other":
        monkeypatch.setattr(os, "stat", stat_of_other)
    elif mount.source == KV.source:
        # Nothing is wrong with it: where the number is the same, the source says enough.
        is_same = True
    # What changes something looks each time, at the number; else a look is good for a moment.
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 11.0)
    if number == "same":
        monkeypatch.setattr(posix_mount, "time", later)
    before = everything(root)
    for call in CHANGING if not is_same else ():
        with pytest.raises(UnavailableStorageError, match="another filesystem is at the root"):
            call(backend)
    time.sleep(0.1)
    for call in LOOKING if not is_same else ():
        if call is not LOOKING[-1] or backend.reads_whole:
            with pytest.raises(UnavailableStorageError, match="another filesystem is at the root"):
                call(backend)
    assert everything(root) == before
    if is_same:
        assert backend.write("new/y", [b"1"]) is WriteResult.CREATED
        assert backend.stat(["a/x", "new/y"]) == [1, 1]


def test_folder_that_is_not_made_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, gate, mkdir = PosixBackend(tmp_path), threading.Event(), os.mkdir

    def hangs(path: str, *arguments: Any, **options: Any) -> None:
        if path == "stuck":
            gate.wait()
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", hangs)
    stuck = threading.Thread(target=backend.write, args=("stuck/o", [b"x"]), daemon=True)
    stuck.start()
    assert backend.write("other/o", [b"x"]) is WriteResult.CREATED
    gate.set()
    stuck.join()
    assert backend.stat(["stuck/o", "other/o"]) == [1, 1]


@pytest.mark.parametrize("found", ["file", "nothing", "folder"])
def test_deletion_that_is_refused_ends_in_an_answer_or_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    """Some systems refuse to unlink a folder with EPERM."""
    backend = PosixBackend(tmp_path)
    backend.write("o", [b"x"])

    def refuse(name: str, dir_fd: int) -> None:
        if found != "file":
            (tmp_path / "o").rename(tmp_path / "elsewhere")
        if found == "folder":
            (tmp_path / "o").mkdir()
        raise PermissionError(errno.EPERM, "immutable")

    monkeypatch.setattr(os, "unlink", refuse)
    if found == "file":
        with pytest.raises(ReadOnlyStorageError, match="EPERM"):
            delete_one(backend, "o")
    else:
        assert delete_one(backend, "o") is (found == "folder")
    assert (tmp_path / "o").exists() is (found == "file")


def test_root_is_entered_before_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that mounts a direct map of autofs; what is seen before is another filesystem."""
    root = tmp_path / "auto"
    monkeypatch.setattr(posix_folders, "enter", lambda path: Path(path).mkdir(mode=0o750))
    assert PosixBackend(root).write("o", [b"x"]) is WriteResult.CREATED
    assert stat.S_IMODE((root / "o").stat().st_mode) == 0o640


@pytest.mark.parametrize("mount", ["ext4", "fuse.program"])
def test_sparse_and_linked_files_hold_fewer_bytes_than_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str
) -> None:
    """On FUSE blocks count once a file shows that its program reports them."""
    monkeypatch.setattr(posix_mount, "find_mount", lambda _: Mount(mount))
    backend = PosixBackend(tmp_path)

    def held(name: str) -> int:
        info = backend.info(name)
        assert info is not None
        return info.held

    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    assert (held("sparse") < 1 << 20) == (mount == "ext4")
    backend.write("whole", [bytes(1 << 20)])
    assert held("whole") == 1 << 20
    assert held("sparse") < 1 << 20
    os.link(tmp_path / "whole", tmp_path / "link")
    assert held("whole") == held("link") == 1 << 19
