"""What only a directory can do to us: links, modes, errno, kills, vanishing roots."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import threading
import time
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
    posix_folders,
    posix_mount,
    posix_publish,
)
from kvshelf.backends.base import delete_one
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
)

IS_ROOT = os.geteuid() == 0


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

    answer = backend.stat([name])[0]
    assert isinstance(answer, PermanentStorageError)
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


def test_modes_and_group_come_from_the_root_whatever_the_umask(root: Path) -> None:
    root.mkdir()
    if IS_ROOT:
        os.chown(root, -1, 54321)
    root.chmod(0o2770)
    with umask(0o077):
        backend = PosixBackend(root)
        backend.write("a/b/x", [b"1"])
        backend.write("a/b/y", [b"1"], "replace")
    for folder in ("a", "a/b"):
        info = (root / folder).stat()
        assert stat.S_IMODE(info.st_mode) == 0o2770
        assert info.st_gid == root.stat().st_gid
    for file in ("a/b/x", "a/b/y"):
        info = (root / file).stat()
        assert stat.S_IMODE(info.st_mode) == 0o660
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


def test_group_without_setgid(root: Path) -> None:
    if not IS_ROOT:
        pytest.skip("only root may give files to any group")
    root.mkdir(mode=0o750)
    os.chown(root, -1, 54321)
    PosixBackend(root).write("a/x", [b"1"])
    assert (root / "a").stat().st_gid == 54321
    assert (root / "a/x").stat().st_gid == 54321


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


def test_another_shelf_takes_the_place(backend: PosixBackend, root: Path) -> None:
    backend.write("a/x", [b"1"])
    root.rename(root.parent / "old")
    root.mkdir()
    (root / "a").mkdir()
    (root / "a" / "y").write_bytes(b"22")
    assert backend.stat(["a/x", "a/y"]) == [None, 2]
    backend.write("a/z", [b"333"])
    assert files(root) == {"a/y", "a/z"}
    assert files(root.parent / "old") == {"a/x"}


def test_a_deleted_shelf_below_folders_that_may_not_be_looked_at(
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


def test_missing_permission(backend: PosixBackend, root: Path, monkeypatch: Any) -> None:
    backend.write("a/x", [b"1"])
    monkeypatch.setattr(os, "access", lambda *args: False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(errno.EACCES))
        with pytest.raises(ReadOnlyStorageError) as caught:
            backend.write("a/y", [b"1"])
    assert isinstance(caught.value, PermissionError)
    assert "permissions" in str(caught.value)
    assert backend.properties.read_only
    assert files(root) == {"a/x"}


def test_one_folder_without_permission_does_not_make_the_shelf_read_only(
    backend: PosixBackend, monkeypatch: Any
) -> None:
    backend.write("a/x", [b"1"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", failing(errno.EACCES))
        patch.setattr(posix_publish, "_renameat2", None)
        patch.setattr(os, "rename", failing(errno.EACCES))
        with pytest.raises(ReadOnlyStorageError):
            backend.write("a/y", [b"1"])
    assert not backend.properties.read_only
    assert backend.write("b/y", [b"1"]) is WriteResult.CREATED


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("code", "kind", "builtin"),
    [
        (errno.ENOSPC, NoSpaceStorageError, OSError),
        (errno.EDQUOT, NoSpaceStorageError, OSError),
        (errno.EROFS, ReadOnlyStorageError, PermissionError),
        (errno.EACCES, ReadOnlyStorageError, PermissionError),
        (errno.EIO, TransientStorageError, OSError),
        (errno.ESTALE, TransientStorageError, OSError),
        (errno.ETIMEDOUT, TransientStorageError, OSError),
        (errno.ENOTCONN, TransientStorageError, OSError),
        (errno.EKEYEXPIRED, TransientStorageError, OSError),
        (errno.EMFILE, ProcessLimitError, OSError),
        (errno.ENFILE, ProcessLimitError, OSError),
        (errno.ENOMEM, ProcessLimitError, OSError),
        (errno.EFBIG, PermanentStorageError, OSError),
        (errno.ENAMETOOLONG, PermanentStorageError, OSError),
    ],
)
@pytest.mark.parametrize("call", ["writev", "close", "fstat"])
def test_failed_writes_publish_nothing_and_leave_nothing(
    backend: PosixBackend,
    root: Path,
    monkeypatch: Any,
    code: int,
    kind: type[StorageError],
    builtin: type[Exception],
    call: str,
) -> None:
    backend.write("a/x", [b"1"])
    real_close = os.close

    def close_badly(fd: int) -> None:
        writable = stat.S_ISREG(os.fstat(fd).st_mode)
        real_close(fd)
        if writable:
            raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, close_badly if call == "close" else failing(code))
        with pytest.raises(kind) as caught:
            backend.write("a/y", [b"bytes"])
    assert isinstance(caught.value, builtin)
    assert caught.value.errno == code
    assert caught.value.retryable == issubclass(kind, TransientStorageError)
    assert str(root / "a/y") in str(caught.value)
    assert files(root) == {"a/x"}


def test_failed_replace_keeps_the_old_object(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    backend.write("a/x", [b"1"])
    monkeypatch.setattr(os, "replace", failing(errno.EIO))
    with pytest.raises(TransientStorageError):
        backend.write("a/x", [b"22"], "replace")
    assert files(root) == {"a/x"}
    assert (root / "a/x").read_bytes() == b"1"


def test_lost_bytes_are_noticed_before_publishing(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    def writev(fd: int, views: list[memoryview]) -> int:
        os.write(fd, b"?")
        return sum(map(len, views))

    backend.write("a/x", [b"1"])
    monkeypatch.setattr(os, "writev", writev)
    with pytest.raises(TransientStorageError, match="1 of 5 bytes"):
        backend.write("a/y", [b"bytes"])
    assert files(root) == {"a/x"}


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
    with pytest.raises(TransientStorageError):
        backend.info("a/x")


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


def test_error_messages_name_what_to_do() -> None:
    error = storage_error(OSError(errno.ENOSPC, "No space"), "writing", "/s/x", writing=True)
    assert "ENOSPC" in str(error)
    assert "free some space" in str(error)
    assert "/s/x" in str(error)
    again = storage_error(error, "other", "/y")
    assert again is error


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


def test_link_that_was_made_but_reported_as_existing(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    """NFS repeats a request whose answer was lost."""
    real = os.link

    def link(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        real(*args, **kwargs)

    monkeypatch.setattr(os, "link", link)
    assert backend.write("a/x", [b"1"]) is WriteResult.CREATED
    assert files(root) == {"a/x"}
    assert (root / "a/x").stat().st_nlink == 1


def test_loser_of_a_race_leaves_the_winner(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    real = os.link

    def link(source: str, target: str, **kwargs: Any) -> None:
        if not (root / "a" / target).exists():
            (root / "a" / target).write_bytes(b"winner")
        real(source, target, **kwargs)

    backend.write("b/x", [b""])
    monkeypatch.setattr(os, "link", link)
    (root / "a").mkdir()
    assert backend.write("a/x", [b"loser"]) is WriteResult.EXISTED
    assert files(root) == {"b/x", "a/x"}
    assert (root / "a/x").read_bytes() == b"winner"


@pytest.mark.parametrize("call", ["link", "replace"])
def test_publication_with_error_after_the_fact_is_done(
    backend: PosixBackend, root: Path, monkeypatch: Any, call: str
) -> None:
    real = getattr(os, call)

    def done(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise OSError(errno.EIO, "stale")

    backend.write("a/y", [b"1"])
    monkeypatch.setattr(os, call, done)
    assert backend.write("a/x", [b"1"]) is WriteResult.CREATED
    assert backend.write("a/x", [b"22"], "replace") is WriteResult.REPLACED
    assert files(root) == {"a/x", "a/y"}
    assert (root / "a/x").read_bytes() == b"22"


def test_link_with_error_that_may_pass_is_tried_again(
    backend: PosixBackend, root: Path, monkeypatch: Any
) -> None:
    backend.write("a/y", [b"1"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", failing(errno.EIO))
        with pytest.raises(TransientStorageError):
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


def test_who_may_not_set_times_is_told(root: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(posix_mount, "find_mount", lambda path: Mount("fuse.some"))
    backend = PosixBackend(root)
    backend.write("a/x", [b"1"])
    assert backend.touch("a/x") is Touched.TOUCHED
    for code, answer in (
        (errno.EPERM, Touched.REFUSED),
        (errno.EACCES, Touched.REFUSED),
        (errno.EROFS, Touched.REFUSED),
        (errno.EIO, Touched.TOUCHED),
    ):
        monkeypatch.setattr(os, "utime", failing(code))
        assert backend.touch("a/x") is answer


def test_room_is_that_of_the_filesystem(root: Path, monkeypatch: Any) -> None:
    space = PosixBackend(root).space()
    assert space is not None
    assert space.total == shutil.disk_usage(root).total
    for kind in ("tmpfs", "ext4"):
        monkeypatch.setattr(posix_mount, "find_mount", lambda _, kind=kind: Mount(kind))
        found = PosixBackend(root).space()
        assert found is not None
        assert found.memory is (kind == "tmpfs")
    # Some filesystems of programs know no size.
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=0, f_flag=0))
    assert PosixBackend(root).space() is None


def test_foreign_names_are_not_listed(backend: PosixBackend, root: Path) -> None:
    backend.write("a/x", [b"1"])
    os.mkfifo(root / "a" / "fifo")
    (root / "a" / "link").symlink_to("x")
    (root / "a" / "naïve").write_bytes(b"")
    Path(os.fsdecode(bytes(root) + b"/a/\xff\xfe")).write_bytes(b"")
    assert [info.name for info in backend.list()] == ["a/x"]


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


def test_a_file_with_holes_holds_fewer_bytes(backend: PosixBackend, root: Path) -> None:
    backend.write("a/x", [b"1"])
    with (root / "a/x").open("ab") as file:
        file.truncate(1 << 30)
    (info,) = backend.list("a")
    assert info == backend.info("a/x")
    assert info.size == 1 << 30
    assert 0 < info.held < 1 << 20


def test_filesystem_type(tmp_path: Path) -> None:
    assert find_mount("/proc/self").kind == "proc"
    place = tmp_path / "with space"
    place.mkdir()
    assert find_mount(str(place)).kind == find_mount(str(tmp_path)).kind != "unknown"


def test_properties_of_network_filesystems(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(posix_mount, "find_mount", lambda path: Mount("nfs4"))
    properties = PosixBackend(tmp_path).properties
    assert properties.cache_seconds > 0
    # However fast the misses were that were measured.
    assert properties.high_latency


def test_a_folder_that_is_not_made_delays_no_other(
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


@pytest.mark.parametrize("vanishes", [True, False])
def test_a_deletion_that_is_refused_ends_in_an_answer_or_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vanishes: bool
) -> None:
    backend = PosixBackend(tmp_path)
    backend.write("o", [b"x"])

    def refuse(name: str, dir_fd: int) -> None:
        if vanishes:
            (tmp_path / "o").rename(tmp_path / "elsewhere")
        raise PermissionError(errno.EPERM, "immutable")

    monkeypatch.setattr(os, "unlink", refuse)
    if vanishes:
        assert delete_one(backend, "o") is False
    else:
        with pytest.raises(StorageError, match="EPERM"):
            delete_one(backend, "o")


def test_the_root_is_entered_before_it_is_looked_at(
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
