"""Mounted filesystems that others change: the suite over FUSE, and two mounts of one directory.

The two mounts, with caches of names, attributes and misses that lie for 5 s, stand for two clients
of NFS. Mounts that cannot be had are skipped with the reason, see :mod:`faultfs`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvshelf.backends import Backend, BytesLike, Touched, WriteResult
from kvshelf.backends.base import WriteMode, delete_one
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.posix_mount import find_mount
from kvshelf.errors import (
    BadObjectError,
    ObjectMissingError,
    StorageError,
)
from kvshelf.format.keys import KeyChain
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.testing.backends import BackendSuite, Oracle, read_into
from tests.faults.faultfs import FaultMount, _unmount, mounted, skip, why_not
from tests.support import prompts
from tests.support.formats import make_format
from tests.support.oracles import FolderOracle
from tests.support.prompts import make_chunks
from tests.support.servers import command
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, PATIENT, until

pytestmark = pytest.mark.real

#: How long the caches of the mounts lie.
CACHE_SECONDS = 5.0
FMT = make_format(shards=2)


# ----------------------------------------------------------------------------------- the suite


class _OverMount(BackendSuite):
    one_creates = True

    examples = 5
    replaced_reads_fail = True

    @pytest.fixture
    def root(self, mount: FaultMount) -> Path:
        return mount.path / uuid.uuid4().hex / "shelf"

    @pytest.fixture
    def backend(self, root: Path) -> Iterator[Backend]:
        with closing(PosixBackend(root)) as backend:
            yield backend

    @pytest.fixture
    def reopen(self, root: Path) -> Callable[[], Backend] | None:
        return partial(PosixBackend, root)


class TestPosixOnFuse(_OverMount):
    """Looked at past the mount."""

    @pytest.fixture(scope="class")
    @classmethod
    def mount(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultMount]:
        with mounted(tmp_path_factory.mktemp("fuse")) as mount:
            yield mount

    @pytest.fixture
    def oracle(self, mount: FaultMount, root: Path) -> Oracle:
        return FolderOracle(mount.source / root.relative_to(mount.path))


class _NoFifos(FolderOracle):
    # The filesystems of these tests have none.
    specials = ("folder", "link")


@pytest.mark.slow
class TestPosixOnFuseWithCaches(_OverMount):
    """Looked at through the mount, whose caches say the same to everybody."""

    @pytest.fixture(scope="class")
    @classmethod
    def mount(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultMount]:
        with mounted(tmp_path_factory.mktemp("fuse"), cache_seconds=CACHE_SECONDS) as mount:
            yield mount

    @pytest.fixture
    def oracle(self, root: Path) -> Oracle:
        return _NoFifos(root)


class _FilesOnly(FolderOracle):
    specials = ("folder",)


class _ReadableAtOnce(PosixBackend):
    """Ends a write when the file can be read: rclone looks for it by its old name for a moment."""

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        result = super().write(name, buffers, mode)
        for turn in range(300):
            with contextlib.suppress(StorageError):
                read_into(self, name, memoryview(bytearray(1)))
                break
            time.sleep(0.0 if turn < 50 else 0.01)
        return result


@pytest.mark.slow
class TestPosixOnRclone(_OverMount):
    """A mount without hard links, of a program that knows of buckets, too."""

    # rclone makes an empty file when the kernel releases it, which is some time after close():
    # what was moved or deleted meanwhile comes back.
    empty_objects = False
    one_creates = False
    atomic = False

    @pytest.fixture(scope="class")
    @classmethod
    def mount(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_RcloneMount]:
        with _RcloneMount(tmp_path_factory.mktemp("rclone")) as mount:
            yield mount

    @pytest.fixture
    def backend(self, root: Path) -> Iterator[Backend]:
        with closing(_ReadableAtOnce(root)) as backend:
            yield backend

    @pytest.fixture
    def oracle(self, root: Path) -> Oracle:
        return _FilesOnly(root)

    def assert_gone(self, backend: Backend, name: str) -> None:
        # A listing that rclone began before a rename may end after it, and is believed for 1 ms.
        until(lambda: backend.stat([name]) == [None])


class _RcloneMount:
    """A folder, mounted by rclone."""

    def __init__(self, folder: Path) -> None:
        program, reason = command("rclone"), why_not()
        if reason is not None or program is None:
            skip(reason or "no FUSE by rclone: it is missing (pip install '.[test]')")
        source, self.path = folder / "source", folder / "mount"
        source.mkdir()
        self.path.mkdir()
        arguments = [program, "mount", "--config", "", str(source), str(self.path)]
        # With no cache of folders at all it hangs now and then.
        arguments += ["--dir-cache-time", "1ms", "--attr-timeout", "0s", "--links"]
        log = folder / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        deadline = time.monotonic() + PATIENCE
        while not os.path.ismount(self.path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                skip(f"no FUSE by rclone: {log.read_text()[-500:]}")
            threading.Event().wait(0.01)

    def __enter__(self) -> _RcloneMount:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        _unmount(self.path)


def test_mount_that_forgets_access_times_is_found_out(tmp_path: Path) -> None:
    with _RcloneMount(tmp_path) as mount, closing(PosixBackend(mount.path)) as backend:
        backend.write("a/x", [b"x"])
        path = tmp_path / "source/a/x"
        until(path.exists)
        # A file that was just written may have that access time for its own sake.
        assert backend.touch("a/x") is Touched.TOUCHED
        os.utime(path, (1e9, 1e9))
        until(lambda: (mount.path / "a/x").stat().st_mtime == 1e9)
        for _ in range(2):
            assert backend.touch("a/x") is Touched.REFUSED
        assert path.stat().st_atime == 1e9


# --------------------------------------------------------------------------- two clients of one


class Client:
    """An engine's view of the shelf: its own mount, its own look-ups."""

    def __init__(self, root: Path) -> None:
        self.backend = PosixBackend(root)
        self.rig = Rig(self.backend, fmt=FMT, deadlines=PATIENT)
        self.failed = FailedKeys()
        self.service = LookupService(
            self.rig.shelf.view(FMT), failed=self.failed, counters=Counters()
        )

    def hit(self, tokens: list[int]) -> int:
        lookup = self.service.submit(tokens, lambda: KeyChain(FMT.namespace.digest, FMT.chunk_size))
        assert lookup.wait(PATIENCE)
        return lookup.hit_chunks

    def close(self) -> None:
        self.service.close()
        self.rig.close()


@pytest.fixture(scope="module")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FaultMount, FaultMount]]:
    one = mounted(tmp_path_factory.mktemp("one"), cache_seconds=CACHE_SECONDS)
    with (
        one,
        mounted(
            tmp_path_factory.mktemp("other"), cache_seconds=CACHE_SECONDS, source=one.source
        ) as other,
    ):
        yield one, other


@pytest.fixture
def clients(mounts: tuple[FaultMount, FaultMount]) -> Iterator[tuple[Client, Client]]:
    name = uuid.uuid4().hex
    one, other = (Client(mount.path / name) for mount in mounts)
    yield one, other
    one.close()
    other.close()


prompt = functools.partial(prompts.prompt, unit=FMT.chunk_size)


def test_what_one_client_stores_the_other_finds_within_the_stated_time(
    clients: tuple[Client, Client],
) -> None:
    one, other = clients
    stated = other.backend.properties.cache_seconds
    assert stated >= CACHE_SECONDS
    chunks = make_chunks(FMT, 4)
    tokens = prompt(4)
    assert one.hit(tokens) == other.hit(tokens) == 0
    one.rig.put(chunks)
    assert one.hit(tokens) == 4, "the one who stores finds it at once"
    view = other.rig.shelf.view(FMT)
    refs = [ObjectRef(chunk, shard) for chunk in chunks for shard in range(FMT.shards)]
    paths = [Path(other.backend.url) / view.name(ref) for ref in refs]
    until(lambda: all(path.exists() for path in paths), "the caches of the mount have ended")
    assert other.hit(tokens) == 4
    load, loaded = other.rig.load(chunks, 20)
    assert load.failed_at is None
    assert loaded


def test_what_one_client_deletes_or_replaces_is_never_wrong_for_the_other(
    clients: tuple[Client, Client],
) -> None:
    one, other = clients
    chunks = make_chunks(FMT, 3)
    tokens = prompt(3)
    one.rig.put(chunks)
    until(lambda: other.hit(tokens) == 3)
    image = memoryview(bytearray(FMT.object_size(0)))
    names = [one.rig.shelf.view(FMT).name(ObjectRef(chunk, 0)) for chunk in chunks]
    other.rig.shelf.view(FMT).load(ObjectRef(chunks[0], 0), image)
    good = bytes(image)
    # A shorter and then a longer file in its place: the other's caches know the old size.
    for content in (good[: len(good) // 2], good + b"more"):
        one.backend.write(names[0], [content], "replace")
        with pytest.raises((BadObjectError, OSError)):
            _load_all(other.rig.shelf, FMT, chunks[0])
    assert one.backend.stat([names[0]]) == [len(good) + 4], "nobody moved what may be good"
    one.backend.write(names[0], [good], "replace")
    until(lambda: _loads(other.rig.shelf, chunks[0]))
    delete_one(one.backend, names[1])
    # It may still be announced, and is not loaded.
    load, _ = other.rig.load(chunks, 20)
    assert load.failed_at == 1
    for chunk, _ in load.failures:
        other.failed.add(chunk.key, bad=False)
    assert other.hit(tokens) <= 1


def _load_all(shelf: Shelf, fmt: ObjectFormat, chunk: Any) -> None:
    image = memoryview(bytearray(fmt.object_size(0)))
    shelf.view(fmt).load(ObjectRef(chunk, 0), image)


def _loads(shelf: Shelf, chunk: Any) -> bool:
    try:
        _load_all(shelf, FMT, chunk)
    except (BadObjectError, ObjectMissingError):
        return False
    return True


# ------------------------------------------------------------------------- what is known of them


def test_mount_that_does_not_answer_is_found_without_asking_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with mounted(tmp_path_factory.mktemp("frozen")) as mount:
        mount.freeze()
        try:
            assert find_mount(str(mount.path / "shelf")).kind.startswith("fuse")
        finally:
            mount.thaw()
