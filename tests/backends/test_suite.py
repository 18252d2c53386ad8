"""The suite over every backend, with oracles that do not use their code."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvshelf.backends import Backend, posix, posix_folders
from kvshelf.backends.generic import GenericBackend
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.testing.backends import BackendSuite, Oracle
from tests.support.oracles import FolderOracle, MemoryOracle


class _OverFolder(BackendSuite):
    one_creates = True

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "shelf"

    @pytest.fixture
    def oracle(self, root: Path) -> Oracle:
        return FolderOracle(root)


class TestPosix(_OverFolder):
    examples = 60

    @pytest.fixture
    def backend(self, root: Path) -> Iterator[Backend]:
        with closing(PosixBackend(root)) as backend:
            yield backend

    @pytest.fixture
    def reopen(self, root: Path) -> Callable[[], Backend] | None:
        return partial(PosixBackend, root)


class TestGuarded(_OverFolder):
    """A backend that is wrapped, and whose calls have deadlines, is a backend like any other."""

    examples = 20

    @pytest.fixture
    def backend(self, root: Path) -> Iterator[Backend]:
        with closing(GuardedBackend(WrappedBackend(PosixBackend(root)))) as backend:
            yield backend


class TestPosixWithoutLinks(_OverFolder):
    """What a FUSE filesystem without hard links gets: renameat2, still exclusive."""

    @pytest.fixture
    def backend(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        def link(*args: object, **kwargs: object) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(os, "link", link)
        with closing(PosixBackend(root)) as backend:
            yield backend


@pytest.mark.slow
class TestPosixWithoutNewSystemCalls(TestPosixWithoutLinks):
    """What a kernel or sandbox without openat2, hard links and renameat2 gets."""

    one_creates = False

    @pytest.fixture(autouse=True)
    def _old_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def rename(*args: object) -> None:
            raise OSError(errno.ENOSYS, "no such call here")

        monkeypatch.setattr(posix_folders, "has_openat2", lambda: False)
        monkeypatch.setattr(posix, "rename_noreplace", rename)


class TestMemory(BackendSuite):
    @pytest.fixture
    def root(self) -> str:
        return f"suite-{uuid.uuid4().hex}/shelf"

    @pytest.fixture
    def backend(self, root: str, oracle: Oracle) -> Iterator[Backend]:
        with closing(GenericBackend(f"memory://{root}")) as backend:
            yield backend
            oracle.clear()

    @pytest.fixture
    def oracle(self, root: str) -> Oracle:
        return MemoryOracle(root)
