"""Stuck threads are replaced, up to a bound, and end when their call returns."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshelf.backends.guard import GuardedBackend
from kvshelf.shelf import threads as module
from kvshelf.shelf.threads import StorageThreads
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.threads import none_can_be_started
from tests.support.waiting import PATIENCE, until

COUNT = 2


class Rig:
    """Threads that ask the storage for the names they are given."""

    def __init__(self, root: Path) -> None:
        self.faults = FaultyStorage(posix(root))
        self.guard = GuardedBackend(self.faults)
        self.work: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stuck: list[int] = []
        self.started: list[str] = []
        self.threads = StorageThreads(
            "test",
            COUNT,
            self.run,
            self.guard,
            count_stuck=lambda: None,
            on_stuck=self.stuck.append,
            on_thread_start=lambda: self.started.append(threading.current_thread().name),
        )
        self.threads.start()

    def hang(self, times: int) -> threading.Event:
        """Let so many threads hang until the event is set."""
        gate = threading.Event()
        self.faults.add(Fault("stat", "hangs", wait=gate))
        for _ in range(times):
            self.work.put("hangs")
        return gate

    def run(self) -> None:
        while not self.threads.replaced() and (name := self.work.get()) is not None:
            self.guard.stat([name])
            self.done.put(name)

    def close(self) -> None:
        self.faults.heal()
        self.threads.close()
        for _ in range(100):
            self.work.put(None)
        self.guard.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "shelf")
    yield rig
    rig.close()


def test_a_stuck_thread_is_replaced_and_ends_when_it_comes_back(rig: Rig) -> None:
    gate = rig.hang(1)
    until(lambda: len(rig.stuck) == 1)
    for _ in range(20):
        rig.work.put("fine")
        assert rig.done.get(timeout=PATIENCE) == "fine"
    assert rig.threads.stuck == 1
    until(lambda: len(rig.threads.working) == COUNT)
    assert rig.stuck[0] not in rig.threads.working
    assert sorted(rig.started) == ["test-0", "test-1", "test-2"]
    assert rig.guard.reads.opened == 0
    gate.set()
    until(lambda: rig.threads.stuck == 0)
    assert len(rig.threads.working) == COUNT


def test_when_too_many_are_stuck_the_storage_is_not_called(rig: Rig) -> None:
    # Others go well, so that only the number of threads speaks against the storage.
    gate = rig.hang(COUNT + 1)
    while not rig.guard.reads.opened:
        rig.guard.stat(["fine"])
    assert len(rig.stuck) <= 2 * COUNT
    gate.set()
    until(lambda: rig.threads.stuck == 0)
    until(lambda: len(rig.threads.working) == COUNT)


def test_there_is_a_bound_and_threads_that_come_back_work_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STUCK", 1)
    gate = rig.hang(COUNT)
    until(lambda: rig.threads.stuck == COUNT)
    assert not rig.threads.any
    assert len(rig.started) == COUNT
    gate.set()
    until(lambda: len(rig.threads.working) == COUNT)
    rig.work.put("fine")
    until(lambda: rig.done.get(timeout=PATIENCE) == "fine")


def test_without_a_thread_in_place_of_a_stuck_one_the_storage_is_not_called(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with none_can_be_started(monkeypatch, "test-"):
        gate = rig.hang(COUNT)
        until(lambda: rig.threads.stuck == COUNT)
        until(lambda: rig.guard.reads.opened > 0)
        assert not rig.threads.any
        assert not rig.threads.ready()
    gate.set()
    until(lambda: len(rig.threads.working) == COUNT)
    rig.work.put("fine")
    until(lambda: rig.done.get(timeout=PATIENCE) == "fine")


@pytest.mark.long
def test_a_thread_that_could_not_be_started_is_started_when_there_is_work(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with none_can_be_started(monkeypatch, "test-"):
        gate = rig.hang(COUNT)
        until(lambda: rig.threads.stuck == COUNT)
    assert rig.threads.ready()
    until(lambda: rig.guard.reads.closed > 0)
    for _ in range(20):
        assert rig.threads.ready()
        rig.work.put("fine")
        assert rig.done.get(timeout=PATIENCE) == "fine"
    # As many as there should be, however often it is asked for them.
    until(lambda: len(rig.started) == 2 * COUNT)
    assert len(rig.threads.working) == rig.threads.stuck == COUNT
    gate.set()
    until(lambda: rig.threads.stuck == 0)
    assert len(rig.threads.working) == COUNT


def test_a_thread_that_cannot_be_prepared_works_all_the_same(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError("no such processor")

    gate = threading.Event()
    threads = StorageThreads(
        "more", 1, gate.wait, rig.guard, count_stuck=lambda: None, on_thread_start=fail
    )
    threads.start()
    until(lambda: "continues without it" in caplog.text)
    assert threads.any
    gate.set()
    threads.close()
    threads.join(PATIENCE)
    assert not threads.any


def test_threads_of_which_none_can_be_started_say_why(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = StorageThreads("more", COUNT, rig.run, rig.guard, count_stuck=lambda: None)
    with (
        none_can_be_started(monkeypatch, "more"),
        pytest.raises(RuntimeError, match="no thread more could be started: the thread limit"),
    ):
        threads.start()
    assert not threads.any
