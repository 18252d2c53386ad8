"""SFTP by sshfs on a real server: the suite, errors, a server that dies and comes back."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Backend, open_backend
from kvshelf.backends.base import WriteResult
from kvshelf.errors import PermanentStorageError, ReadOnlyStorageError, TransientStorageError
from kvshelf.testing.backends import BackendSuite, Oracle
from tests.backends.sftpserver import PASSWORD, SFTPServer, sftp_server
from tests.support.oracles import FolderOracle
from tests.support.servers import free_port

pytestmark = pytest.mark.real

for package in ("asyncssh", "sshfs"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[test]'", allow_module_level=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SFTPServer]:
    with sftp_server(tmp_path_factory.mktemp("sftp")) as server:
        yield server


def opened(server: SFTPServer, path: str, **options: Any) -> Backend:
    return open_backend(f"sftp://127.0.0.1/{path}", storage_options={**server.options(), **options})


class _FolderOnlyOracle(FolderOracle):
    # A link is followed by the server, and a FIFO blocks it.
    specials = ("folder",)


@pytest.mark.slow
class TestSFTP(BackendSuite):
    examples = 8

    @pytest.fixture
    def prefix(self) -> str:
        return f"suite-{uuid.uuid4().hex}/shelf"

    @pytest.fixture
    def reopen(self, server: SFTPServer, prefix: str) -> Callable[[], Backend] | None:
        return partial(open_backend, f"sftp://127.0.0.1/{prefix}", storage_options=server.options())

    @pytest.fixture
    def backend(self, reopen: Callable[[], Backend]) -> Iterator[Backend]:
        with closing(reopen()) as backend:
            yield backend

    @pytest.fixture
    def oracle(self, server: SFTPServer, prefix: str) -> Oracle:
        return _FolderOnlyOracle(server.folder / prefix)


def test_wrong_password_is_told_and_not_shown(server: SFTPServer) -> None:
    with pytest.raises(PermanentStorageError, match="opening the shelf failed") as caught:
        opened(server, "x", password="wrong-wrong-wrong")
    for secret in (PASSWORD, "wrong-wrong-wrong"):
        assert secret not in str(caught.value)


def test_dead_server_is_told_and_tried_again() -> None:
    options = {"port": free_port(), "username": "u", "password": "pass-word"}
    with pytest.raises(TransientStorageError):
        open_backend("sftp://127.0.0.1/x", storage_options=options)


def test_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    with sftp_server(tmp_path, port) as server:
        backend = opened(server, "kv")
        assert backend.write("a/x", [b"1"]) is WriteResult.CREATED
    with closing(backend):
        for _ in range(2):
            for answer in backend.stat(["a/x", "a/y"]):
                assert isinstance(answer, TransientStorageError)
            with pytest.raises(TransientStorageError):
                backend.open("a/x")
            with pytest.raises(TransientStorageError):
                backend.write("a/z", [b"1"])
        with sftp_server(tmp_path, port):
            assert backend.stat(["a/x", "a/y"]) == [1, None]
            assert backend.write("a/z", [b"12"]) is WriteResult.CREATED


def test_folder_that_takes_no_writes(server: SFTPServer, monkeypatch: Any) -> None:
    import asyncssh

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise asyncssh.SFTPPermissionDenied("no")

    with closing(opened(server, "refused")) as backend:
        monkeypatch.setattr(asyncssh.SFTPServer, "open", refuse)
        with pytest.raises(ReadOnlyStorageError):
            backend.write("x", [b"1"])
