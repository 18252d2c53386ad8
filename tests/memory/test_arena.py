"""A range of host memory: really there, or refused; shared with others for reading only."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.memory import pages
from kvshelf.memory.arena import Arena
from tests.support.fake_cudart import fake_cudart
from tests.support.memory import resident, sealed_memory

MIB = 1 << 20


class Kernel:
    """What a system answers where it is asked to make memory be there.

    Attributes
    ----------
    error : int
        The number of the error that it answers with.
    asked : int
        How often it was asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.error = error
        self.asked = 0
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: self)

    def madvise(self, *_: object) -> int:
        self.asked += 1
        ctypes.set_errno(self.error)
        return -1 if self.error else 0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("populate", ["by the kernel", "by writing"])
def test_memory_is_there_from_the_start(
    shared: bool, populate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if populate == "by writing":
        Kernel(monkeypatch, errno.EINVAL)
    arena = Arena(4 * MIB, shared=shared)
    assert resident(arena.view) == 4 * MIB == len(arena.view) == arena.tensor.numel()
    assert pages.address_of(arena.view) % 4096 == 0
    assert not arena.tensor.any()
    arena.view[10] = 7
    assert int(arena.tensor[10]) == 7
    assert not arena.tensor.is_inference()
    arena.close()
    arena.close()


def test_memory_that_is_not_free_is_refused() -> None:
    expected = r"\d+ bytes have to be free, and \d+ are \(.+\). Ask for less"
    with pytest.raises(ConfigError, match=expected):
        Arena(1 << 50)


def test_memory_that_others_take_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    free = 2 << 30
    monkeypatch.setattr(
        pages, "free_memory", lambda: (MIB if kernel.asked else free, "what is left")
    )
    expected = r"(\d+) bytes have to be free, and 1048576 are \(what is left\)"
    with pytest.raises(ConfigError, match=expected) as caught:
        Arena(1 << 30)
    # Some of it was there already, and a sixteenth of all must be left to others.
    found = re.search(expected, str(caught.value))
    assert found is not None
    assert (1 << 30) // 16 < int(found[1]) < 1 << 30
    assert kernel.asked == 1


def test_arena_of_no_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        Arena(0)


# ---------------------------------------------------------------------- memory taken piece by piece


@pytest.mark.parametrize("populate", ["by the kernel", "by writing"])
def test_lazy_memory_is_there_where_it_was_taken(
    populate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "free_memory", lambda: (1 << 40, "what is left"))
    arena = Arena(8 * MIB, lazy=True)
    assert resident(arena.view) == 0
    with monkeypatch.context() as patch:
        if populate == "by writing":
            Kernel(patch, errno.EINVAL)
        arena.take(2 * MIB, 4 * MIB)
    assert resident(arena.view) == resident(arena.view[2 * MIB : 4 * MIB]) == 2 * MIB
    arena.view[3 * MIB] = 7
    arena.take(2 * MIB, 8 * MIB)
    # What was there keeps its bytes.
    assert resident(arena.view) == 6 * MIB
    assert arena.view[3 * MIB] == 7
    arena.close()


def test_lazy_memory_is_there_without_a_look_at_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "free_memory", lambda: (0, "what is left"))
    arena = Arena(8 * MIB, lazy=True)
    arena.view[0] = 7
    assert arena.view[0] == 7
    arena.close()


def test_piece_that_is_not_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "free_memory", lambda: (4 * MIB, "what is left"))
    arena = Arena(8 * MIB, lazy=True)
    arena.take(0, 2 * MIB)
    expected = r"4456448 bytes have to be free, and 4194304 are \(what is left\)"
    with pytest.raises(MemoryError, match=expected):
        arena.take(2 * MIB, 6 * MIB)
    arena.take(2 * MIB, 4 * MIB)
    assert resident(arena.view[: 6 * MIB]) == 4 * MIB
    arena.close()


def test_pieces_are_page_locked_until_the_arena_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LOCKED_AT_ONCE", 2 * MIB)
    device = torch.device("cuda", 0)
    with fake_cudart() as runtime:
        arena = Arena(8 * MIB, lazy=True, inherited=False)
        arena.take(0, MIB)
        arena.take(MIB, 2 * MIB, device)
        assert runtime.holds(arena.view[MIB : 2 * MIB])
        assert not runtime.holds(arena.view[:MIB])
        # A large piece is locked in several.
        arena.take(2 * MIB, 5 * MIB, device)
        assert list(runtime.registered.values()) == [MIB, 2 * MIB, MIB]
        runtime.most = 5 * MIB
        with pytest.raises(RuntimeError, match=r"after 0 of 3145728 bytes .* out of memory"):
            arena.take(5 * MIB, 8 * MIB, device)
        assert len(runtime.registered) == 3
        arena.close()
        assert runtime.registered == {}
        arena.close()


def test_bytes_have_an_offset_where_they_lie_in_the_arena_whole() -> None:
    arena, other = Arena(8192), bytearray(8192)
    assert arena.offset_of(arena.view) == 0
    assert arena.offset_of(arena.view[100:200]) == 100
    assert arena.offset_of(memoryview(other)) is None
    part = arena.view[8000:]
    arena.close()
    assert arena.offset_of(part) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shared", [False, True])
def test_memory_for_a_gpu(shared: bool) -> None:
    arena = Arena(64 * MIB, shared=shared, lazy=True, inherited=False)
    arena.take(0, 64 * MIB, torch.device("cuda"))
    assert arena.tensor.is_pinned()
    arena.tensor.fill_(3)
    copied = arena.tensor.to("cuda", non_blocking=True)
    assert int(copied.sum()) == 3 * 64 * MIB
    del copied
    arena.close()


# ---------------------------------------------------------------------------------- shared memory


@pytest.mark.real
def test_others_see_the_bytes_and_cannot_change_them() -> None:
    arena = Arena(MIB, shared=True)
    assert arena.fd is not None
    arena.view[:5] = b"bytes"
    here, there = socket.socketpair()
    socket.send_fds(here, [b"x"], [arena.fd])
    child = os.fork()
    if not child:
        os._exit(_is_read_only(socket.recv_fds(there, 1, 1)[1][0]))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    here.close()
    there.close()
    fd = arena.fd
    arena.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@pytest.mark.real
@pytest.mark.parametrize(
    ("options", "is_inherited"),
    [
        ({}, True),
        ({"lazy": True}, True),
        ({"inherited": False}, False),
        ({"lazy": True, "inherited": False}, False),
        ({"shared": True}, False),
        ({"shared": True, "inherited": True}, False),
    ],
)
def test_forked_process_has_memory_that_is_inherited_and_not_shared(
    options: dict[str, bool], is_inherited: bool
) -> None:
    arena = Arena(MIB, **options)
    address = pages.address_of(arena.view)

    def is_mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in lines]
        return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)

    assert is_mapped()
    child = os.fork()
    if not child:
        os._exit(is_mapped())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == is_inherited
    arena.close()


def _is_read_only(fd: int) -> int:
    """Return 0 if a descriptor can be read and nothing else."""
    refused = 0
    for attempt in (
        lambda: mmap.mmap(fd, MIB),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 2 * MIB),
        lambda: mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), MIB),
    ):
        try:
            attempt()
        except OSError:
            refused += 1
    seen = mmap.mmap(fd, MIB, prot=mmap.PROT_READ)
    return 0 if refused == 5 and seen[:5] == b"bytes" else 1


def test_system_without_seals_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    real = fcntl.fcntl

    def older(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_ADD_SEALS and argument & ~known:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", older)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnsupportedError, match=r"Linux 5\.1"):
        Arena(MIB, shared=True)
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------------- how much is free


GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has the system's files about memory, in the place of the root."""
    read = Path.read_text

    def read_there(path: Path) -> str:
        if str(path).startswith(("/proc/", "/sys/")):
            path = tmp_path / str(path).lstrip("/")
        return read(path)

    monkeypatch.setattr(Path, "read_text", read_there)
    return tmp_path


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_count(version: int, system: Path) -> None:
    if version == 1:
        top, names = GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        line, prefix = "4:cpu,memory:/pod/container", "total_"
    else:
        top, names = GROUPS, ("memory.max", "memory.current")
        line, prefix = "0::/pod/container", ""
    groups = {top: ("max" if version == 2 else str(2**63 - 4096), 10_000, 10_000)}
    groups[top / "pod"] = ("1000000", 900_000, 50_000)
    groups[top / "pod" / "container"] = ("500000", 110_000, 10_000)

    def write(path: Path, text: str) -> None:
        there = system / path.relative_to("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(f"{text}\n")

    for folder, (limit, used, file) in groups.items():
        write(folder / names[0], limit)
        write(folder / names[1], str(used))
        cached = f"{prefix}active_file {file - 10_000}\n{prefix}inactive_file 10000"
        write(folder / "memory.stat", f"anon 5\n{cached}")
    write(OWN_GROUPS, f"9:name=systemd:/\n{line}")
    free, says = pages.free_memory()
    assert free == 150_000
    assert says == str(top / "pod" / names[0])
    assert pages.memory_limit() == 500_000
    if version == 2:
        write(top / "pod" / "memory.high", "920000")
        assert pages.free_memory() == (70_000, str(top / "pod" / "memory.high"))
    # A container sees its own group at the root, under the name that it has outside.
    write(OWN_GROUPS, line.replace("/pod/container", "/unknown/here"))
    write(top / names[0], "70000")
    assert pages.free_memory() == (70_000, str(top / names[0]))


@pytest.mark.usefixtures("system")
def test_system_that_says_nothing_refuses_nothing() -> None:
    assert pages.free_memory()[0] > 1 << 60
    assert pages.memory_limit() > 1 << 60


@pytest.mark.real
def test_other_threads_run_while_memory_is_touched() -> None:
    count = 0
    end = threading.Event()

    def work() -> None:
        nonlocal count
        while not end.is_set():
            count += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        before = count
        Arena(128 * MIB).close()
        assert count > before
    finally:
        end.set()
        thread.join()


# ---------------------------------------------------------------------- memory of other processes


def file_descriptor(folder: Path) -> int:
    path = folder / "file"
    path.write_bytes(bytes(4096))
    return os.open(path, os.O_RDWR)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (file_descriptor, "no shared memory"),
        (lambda _: os.open("/dev/zero", os.O_RDWR), "no shared memory"),
        (lambda _: os.eventfd(0), "no shared memory"),
        (lambda _: sealed_memory(4096, 0, 0), "not sealed"),
        (lambda _: sealed_memory(4096, 0), "not sealed"),
        (lambda _: sealed_memory(4096, fcntl.F_SEAL_GROW), "not sealed"),
        (lambda _: sealed_memory(4095), "has 4095 bytes, not 4096"),
        (lambda _: sealed_memory(8192), "has 8192 bytes, not 4096"),
        (lambda _: sealed_memory(0), "has 0 bytes"),
    ],
    ids=range(9),
)
def test_memory_that_could_end_its_reader_is_refused(
    tmp_path: Path, make: Callable[[Path], int], problem: str
) -> None:
    fd = make(tmp_path)
    try:
        with pytest.raises(ValueError, match=problem):
            Arena.of(fd, 4096)
    finally:
        os.close(fd)


def test_memory_of_hugetlbfs_is_refused() -> None:
    try:
        fd = sealed_memory(2 << 20, flags=os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:
        pytest.skip("the system gives no memory of hugetlbfs")
    try:
        with pytest.raises(ValueError, match="huge pages"):
            Arena.of(fd, 2 << 20)
    finally:
        os.close(fd)


def test_mapped_memory_is_shared_and_can_never_become_shorter() -> None:
    fd = sealed_memory(8192)
    view = Arena.of(fd, 8192).view
    os.pwrite(fd, b"hello", 4096)
    assert bytes(view[4096:4101]) == b"hello"
    assert view.readonly
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    assert bytes(view[4096:4101]) == b"hello"
