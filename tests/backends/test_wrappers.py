"""Counting and faults on order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from faulty import CountingBackend, Fault, FaultyBackend
from kvshelf.backends.posix import PosixBackend

from kvshelf.errors import TransientStorageError


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyBackend:
    backend = FaultyBackend(PosixBackend(tmp_path))
    backend.write("a/x", [b"12345"])
    return backend


def test_counts(tmp_path: Path) -> None:
    backend = CountingBackend(PosixBackend(tmp_path))
    backend.write("a/x", [b"123", b"45"])
    backend.stat(["a/x", "a/y", "a/z"])
    with backend.open("a/x") as reader:
        reader.read_into(memoryview(bytearray(3)), 0)
        reader.read_into(memoryview(bytearray(9)), 3)
    list(backend.list())
    assert backend.counts == {
        "write": 1,
        "write_bytes": 5,
        "stat": 1,
        "stat_names": 3,
        "open": 1,
        "read": 2,
        "read_bytes": 5,
        "list": 1,
    }


def test_errors_for_some_names_some_times(faulty: FaultyBackend) -> None:
    error = TransientStorageError(5, "broken")
    faulty.add(Fault("stat", "*/x", error=error, times=1))
    assert faulty.stat(["a/x", "a/y", "a/x"]) == [error, None, 5]
    faulty.add(Fault("*", "a/*", error=lambda: TransientStorageError(5, "broken")))
    for call in (
        lambda: faulty.open("a/x"),
        lambda: faulty.write("a/y", [b""]),
        lambda: faulty.delete("a/x"),
        lambda: faulty.info("a/x"),
        lambda: faulty.touch("a/x"),
        lambda: faulty.quarantine("a/x", "b"),
        lambda: list(faulty.list()),
    ):
        with pytest.raises(TransientStorageError):
            call()
    faulty.heal()
    assert faulty.stat(["a/x"]) == [5]


def test_damage(faulty: FaultyBackend) -> None:
    def flip(data: bytearray) -> None:
        data[-1] ^= 1

    faulty.add(Fault("read", damage=flip, times=1))
    buffer = bytearray(5)
    faulty.read_into("a/x", memoryview(buffer))
    assert buffer == b"12344"
    faulty.read_into("a/x", memoryview(buffer))
    assert buffer == b"12345"
    faulty.add(Fault("write", damage=lambda data: data.pop()))
    faulty.write("a/y", [b"12", b"34"])
    assert faulty.stat(["a/y"]) == [3]


def test_wait(faulty: FaultyBackend) -> None:
    gate = threading.Event()
    faulty.add(Fault("open", wait=gate))
    opened = threading.Event()

    def work() -> None:
        faulty.open("a/x").close()
        opened.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert not opened.wait(0.05)
    gate.set()
    assert opened.wait(10)
    thread.join()
