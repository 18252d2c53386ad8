"""fsspec filesystems: errors, secrets, torn puts, filesystems that are asynchronous."""

from __future__ import annotations

import errno
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from kvshelf.backends import WriteResult, open_backend
from kvshelf.backends.base import delete_one
from kvshelf.backends.generic import GenericBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.errors import (
    ConfigError,
    NoSpaceStorageError,
    NotRegularError,
    ObjectMissingError,
    PermanentStorageError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.testing.backends import read_into

pytestmark = pytest.mark.real


@pytest.fixture
def backend() -> GenericBackend:
    return GenericBackend(f"memory://{uuid.uuid4().hex}")


def failing(error: BaseException) -> Any:
    def fail(*args: object, **kwargs: object) -> Any:
        raise error

    return fail


class ConnectTimeoutError(Exception):
    """Named like those of client libraries."""


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (PermissionError("denied"), ReadOnlyStorageError),
        (OSError(errno.EROFS, "read-only"), ReadOnlyStorageError),
        (OSError(errno.ENOSPC, "full"), NoSpaceStorageError),
        (OSError(errno.EIO, "broken"), TransientStorageError),
        (OSError("no number"), TransientStorageError),
        (TimeoutError("late"), TransientStorageError),
        (ConnectionResetError("gone"), TransientStorageError),
        (ConnectTimeoutError("late"), TransientStorageError),
        (FileNotFoundError("bucket"), TransientStorageError),
        (RuntimeError("what?"), PermanentStorageError),
    ],
)
def test_errors_are_typed(
    backend: GenericBackend, monkeypatch: Any, raised: Exception, kind: type[StorageError]
) -> None:
    backend.write("a/x", [b"1"])
    with monkeypatch.context() as patch:
        patch.setattr(backend._fs, "pipe_file", failing(raised))
        with pytest.raises(kind):
            backend.write("a/y", [b"1"])
    if isinstance(raised, FileNotFoundError):
        return
    reading = PermanentStorageError if kind is ReadOnlyStorageError else kind
    with monkeypatch.context() as patch:
        patch.setattr(backend._fs, "info", failing(raised))
        (answer,) = backend.stat(["a/x"])
        assert isinstance(answer, reading)
        for call in (lambda: backend.open("a/x"), lambda: backend.info("a/x")):
            with pytest.raises(reading):
                call()
    with monkeypatch.context() as patch:
        patch.setattr(backend._fs, "cat_file", failing(raised))
        with backend.open("a/x") as reader, pytest.raises(reading):
            reader.read_into(memoryview(bytearray(1)), 0)
    with monkeypatch.context() as patch:
        patch.setattr(backend._fs, "ls", failing(raised))
        with pytest.raises(reading):
            list(backend.list())


@pytest.mark.parametrize("other", [None, b"12", b"1234"])
def test_object_that_changes_after_it_was_opened_is_not_read(
    backend: GenericBackend, other: bytes | None
) -> None:
    backend.write("a/x", [b"123"])
    with backend.open("a/x") as reader:
        delete_one(backend, "a/x") if other is None else backend.write("a/x", [other], "replace")
        error = ObjectMissingError if other is None else TransientStorageError
        with pytest.raises(error):
            reader.read_into(memoryview(bytearray(3)), 0)


def test_failed_move_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    backend = GenericBackend(f"file://{tmp_path}")
    backend.write("a/x", [b"1"])
    assert backend.properties.temporaries, "a killed writer leaves one"
    for broken in ("mv", "pipe_file"):
        with monkeypatch.context() as patch:
            patch.setattr(backend._fs, broken, failing(OSError(errno.EIO, "broken")))
            for mode in ("create", "replace"):
                with pytest.raises(StorageError):
                    backend.write("a/y", [b"1"], mode)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["x"]


def test_lost_bytes_are_noticed_before_publishing(tmp_path: Path, monkeypatch: Any) -> None:
    backend = GenericBackend(f"file://{tmp_path}")
    real = backend._fs.pipe_file
    monkeypatch.setattr(backend._fs, "pipe_file", lambda path, data: real(path, data[:-1]))
    with pytest.raises(TransientStorageError, match="2 of 3 bytes"):
        backend.write("x", [b"123"])
    assert list(tmp_path.iterdir()) == []


class _LaterFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """memory:// behind the asynchronous interface of object stores."""

    protocol = "s3"
    cachable = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inner = MemoryFileSystem()
        self.asked = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/later/" + path.partition("://")[2] if "://" in path else path

    async def _info(self, path: str, **kwargs: Any) -> Any:
        self.asked += 1
        if path.endswith("broken"):
            raise ConnectTimeoutError("late")
        return self.inner.info(path)

    async def _pipe_file(self, path: str, value: bytes, mode: str = "", **kwargs: Any) -> None:
        self.inner.pipe_file(path, value)

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **kw: Any) -> bytes:
        data: bytes = self.inner.cat_file(path, start, end)
        return data

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self.inner.ls(path, detail=detail)

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        self.inner.rm_file(path)


@pytest.fixture
def later(monkeypatch: Any) -> GenericBackend:
    monkeypatch.setattr(
        fsspec.core, "get_filesystem_class", lambda protocol: _LaterFileSystem, raising=True
    )
    monkeypatch.setattr(
        fsspec.core, "filesystem", lambda protocol, **options: _LaterFileSystem(**options)
    )
    return GenericBackend(f"s3://{uuid.uuid4().hex}/prefix", {"secret": "hunter22"})


def test_asynchronous_filesystem(later: GenericBackend) -> None:
    for number in range(0, 100, 2):
        assert later.write(f"a/{number}", [b"." * number]) is WriteResult.CREATED
    names = [f"a/{number}" for number in range(100)]
    assert later.stat(names) == [n if n % 2 == 0 else None for n in range(100)]
    error, size = later.stat(["a/broken", "a/8"])
    assert isinstance(error, TransientStorageError)
    assert size == 8
    assert len(list(later.list())) == 50
    assert delete_one(later, "a/8") is True
    assert delete_one(later, "a/8") is False
    assert read_into(later, "a/10", memoryview(bytearray(20))) == 10


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EINVAL])
def test_put_that_does_not_replace(later: GenericBackend, monkeypatch: Any, code: int) -> None:
    """Another writer publishes between the probe and the put."""

    def pipe_file(path: str, data: bytes, mode: str = "overwrite") -> None:
        assert mode == "create"
        later._fs.inner.pipe_file(path, b"other")
        raise OSError(code, "precondition failed")

    monkeypatch.setattr(later._fs, "pipe_file", pipe_file)
    assert later.write("a/x", [b"mine!"]) is WriteResult.EXISTED
    assert read_into(later, "a/x", memoryview(bytearray(9))) == 5


def test_store_that_has_no_such_put(later: GenericBackend, monkeypatch: Any) -> None:
    modes = []

    def pipe_file(path: str, data: bytes, mode: str = "overwrite") -> None:
        modes.append(mode)
        if mode == "create":
            raise OSError(errno.ENOSYS, "not implemented")
        later._fs.inner.pipe_file(path, data)

    monkeypatch.setattr(later._fs, "pipe_file", pipe_file)
    for name in ("a/x", "a/y"):
        assert later.write(name, [b"1"]) is WriteResult.CREATED
    assert modes == ["create", "overwrite", "overwrite"]


def test_secrets_stay_secret(monkeypatch: Any) -> None:
    url = f"memory://user:pa55word@{uuid.uuid4().hex}/x?sig=abc%2Fdef"
    options = {"key": "AKIA1234", "client_kwargs": {"aws_secret": "hunter22"}, "region": "north"}
    backend = GenericBackend(url, options)
    leak = "AKIA1234 hunter22 pa55word abc%2Fdef abc/def north"
    monkeypatch.setattr(backend._fs, "info", failing(RuntimeError(leak)))
    monkeypatch.setattr(backend._fs, "ls", failing(OSError(errno.EIO, leak)))
    shown = [backend.url, repr(backend), str(backend.stat(["x"])[0])]
    with pytest.raises(StorageError) as caught:
        list(backend.list())
    shown.append(str(caught.value))
    for text in shown:
        for secret in ("AKIA1234", "hunter22", "pa55word", "abc%2Fdef", "abc/def"):
            assert secret not in text
    assert "north" in shown[-1]


# --------------------------------------------------------------------------- choice by URL


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}", "file://localhost{}"])
def test_directories(tmp_path: Path, form: str) -> None:
    for name in ("plain", "with space", "100%25", "a#b?c"):
        path = tmp_path / name
        text = str(path) if form == "{}" else str(path).replace("%", "%25")
        backend = open_backend(form.format(text))
        assert isinstance(backend, PosixBackend)
        assert backend.root == str(path)
    assert open_backend(tmp_path).url == str(tmp_path)


def test_directory_options(tmp_path: Path) -> None:
    backend = open_backend(tmp_path / "no", storage_options={"create": False, "fsync": True})
    assert not (tmp_path / "no").exists()
    assert backend.stat(["x"]) == [None]
    for options in ({"anon": True}, {"fsync": "yes"}):
        with pytest.raises(ConfigError):
            open_backend(tmp_path, storage_options=options)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "expected a directory or a URL"),
        ("  ", "expected a directory or a URL"),
        ("nope://x", "nope"),
        ("lm://host:65432", r"docs/which-store\.md"),
        ("redis://host:6379", r"docs/which-store\.md"),
        ("s3:/bucket/x", "expected s3://bucket/x"),
        ("simplecache::s3://bucket/x", "chained"),
        ("file://host/x", "three slashes"),
        ("file://", "absolute"),
    ],
)
def test_unusable_urls(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        open_backend(url)


@pytest.mark.parametrize(
    ("package", "client", "install"),
    [
        ("obstore", "obstore", "install obstore botocore"),
        ("botocore", "obstore", "install obstore botocore"),
        ("s3fs", "s3fs", "install s3fs"),
    ],
)
def test_missing_package_is_named(
    monkeypatch: Any, package: str, client: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs {package}: pip .*{install}"):
        open_backend("s3://bucket/x", storage_options={"client": client})


def test_folder_in_place_of_an_object(backend: GenericBackend) -> None:
    backend.write("a/x/y", [b"1"])
    with pytest.raises(NotRegularError):
        backend.open("a/x")
    with pytest.raises(NotRegularError):
        backend.set_aside("a/x")


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, kvshelf, kvshelf.backends, kvshelf.shelf.shelf;"
        "kvshelf.open_shelf('.', read_only=True).close();"
        "found = {'fsspec', 'torch', 'vllm', 'pytest', 'hypothesis', 'asyncio'} & set(sys.modules);"
        "sys.exit(repr(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
