"""Processes that fingerprint one checkpoint at once: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvshelf.weights import fingerprints
from kvshelf.weights.claims import Watch, try_claim
from kvshelf.weights.fingerprints import (
    FingerprintCache,
    FingerprintCancelledError,
    weights_fingerprint,
)

SIZE = fingerprints._CLAIMED_BYTES
#: Fingerprints files when a line arrives. Says when it waits for another process, and at the end
#: the fingerprint and how many bytes it read. Its reads hang if it is told so.
ENGINE = r"""
import os, sys, threading
from kvshelf.weights import claims, fingerprints

hangs, patience, cache, *files = sys.argv[1:]
fingerprints._SETTLED_NS = 0
claims._STALLED_SECONDS = float(patience)
read, counts = os.readv, []

def readv(descriptor, buffers):
    counts.append(read(descriptor, buffers))
    if hangs == "hangs":
        print("reading", flush=True)
        threading.Event().wait()
    return counts[-1]

class Watch(claims.Watch):
    def __init__(self, path):
        super().__init__(path)
        # One write, since several threads say so.
        print("waiting\n", end="", flush=True)

os.readv, fingerprints.Watch = readv, Watch
sys.stdin.readline()
found = fingerprints.weights_fingerprint(files, cache=fingerprints.FingerprintCache(cache))
print(found, sum(counts), flush=True)
"""


class Process:
    """An engine's fingerprinting, in a process of its own."""

    def __init__(self, cache: Path, files: list[Path], *, hangs: bool, patience: float) -> None:
        arguments = ["hangs" if hangs else "reads", str(patience), str(cache), *map(str, files)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def result(self) -> tuple[str, int]:
        """The fingerprint, and how many bytes were read for it."""
        while (line := self.line()) == "waiting":
            pass
        fingerprint, count = line.split()
        return fingerprint, int(count)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[..., Process]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """The weight files of a model, large enough to be read once only."""
    paths = [tmp_path / f"model-{number}.safetensors" for number in range(3)]
    for path in paths:
        path.write_bytes(path.name.encode())
        os.truncate(path, SIZE + 1)
    return paths


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "fingerprints.json"


@pytest.fixture
def start(cache: Path, files: list[Path]) -> Iterator[Start]:
    started: list[Process] = []

    def make(count: int = len(files), *, hangs: bool = False, patience: float = 600.0) -> Process:
        started.append(Process(cache, files[:count], hangs=hangs, patience=patience))
        return started[-1]

    yield make
    for process in started:
        process.end()


@pytest.mark.real
def test_processes_that_start_together_read_each_file_once(
    start: Start, files: list[Path], cache: Path
) -> None:
    processes = [start() for _ in range(4)]
    for process in processes:
        process.go()
    results = [process.result() for process in processes]
    assert {fingerprint for fingerprint, _ in results} == {weights_fingerprint(files)}
    assert sum(count for _, count in results) == sum(path.stat().st_size for path in files)
    assert list((cache.parent / "hashing").iterdir()) == []


@pytest.mark.real
def test_when_the_process_that_reads_is_killed_one_that_waits_reads(
    start: Start, files: list[Path]
) -> None:
    first, second = start(1, hangs=True), start(1)
    first.go()
    assert first.line() == "reading"
    second.go()
    assert second.line() == "waiting"
    first.process.send_signal(signal.SIGKILL)
    assert second.result() == (weights_fingerprint(files[:1]), SIZE + 1)


@pytest.mark.real
def test_nobody_waits_for_a_process_that_is_stopped(start: Start, files: list[Path]) -> None:
    first, second = start(1, hangs=True), start(1, patience=0.2)
    first.go()
    assert first.line() == "reading"
    first.process.send_signal(signal.SIGSTOP)
    second.go()
    assert second.line() == "waiting"
    assert second.result() == (weights_fingerprint(files[:1]), SIZE + 1)
    assert first.process.poll() is None


@pytest.mark.real
def test_files_that_no_one_reads_come_before_those_to_wait_for(
    start: Start, files: list[Path], cache: Path
) -> None:
    taken = [FingerprintCache(cache).claim_path(path.stat()) for path in files[:2]]
    claims = [try_claim(path) for path in taken if path is not None]
    process = start()
    process.go()
    assert [process.line(), process.line()] == ["waiting", "waiting"]
    for claim in claims:
        assert claim is not None
        claim.release()
    assert process.result() == (weights_fingerprint(files), 3 * (SIZE + 1))


def test_waiting_ends_when_it_is_cancelled(
    files: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()

    class Noted(Watch):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            waits.set()

    monkeypatch.setattr(fingerprints, "Watch", Noted)
    known = FingerprintCache(cache)
    path = known.claim_path(files[0].stat())
    assert path is not None
    claim = try_claim(path)
    assert claim is not None and try_claim(path) is None
    cancel = threading.Event()
    ended: list[BaseException] = []

    def run() -> None:
        try:
            weights_fingerprint(files[:1], cache=known, cancel=cancel)
        except FingerprintCancelledError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    waits.wait()
    cancel.set()
    thread.join()
    assert len(ended) == 1
    claim.release()


def test_where_no_lock_can_be_taken_every_process_reads(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable = FingerprintCache(tmp_path / "file" / "fingerprints.json")
    assert weights_fingerprint(files, cache=unusable) == weights_fingerprint(files)
