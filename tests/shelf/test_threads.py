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
from tests.sim.storage import FaultyStorage, posix
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
        gate = self.faults.hang("stat", "hangs")
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


def test_stuck_thread_is_replaced_and_ends_when_it_comes_back(rig: Rig) -> None:
    gate = rig.hang(1)
    until(lambda: len(rig.stuck) == 1)
    for _ in range(20):
        rig.work.put("fine")
        assert rig.done.get(timeout=PATIENCE) == "fine"
    assert len(rig.threads._stuck) == 1
    until(lambda: len(rig.threads._working) == COUNT)
    assert rig.stuck[0] not in {one.ident for one in rig.threads._working}
    assert sorted(rig.started) == ["test-0", "test-1", "test-2"]
    assert rig.guard.reads.is_closed
    gate.set()
    until(lambda: len(rig.threads._stuck) == 0)
    assert len(rig.threads._working) == COUNT


def test_there_is_a_bound_and_threads_that_come_back_work_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STUCK", 1)
    gate = rig.hang(COUNT)
    until(lambda: len(rig.threads._stuck) == COUNT)
    assert not rig.threads.any
    assert len(rig.started) == COUNT
    gate.set()
    until(lambda: len(rig.threads._working) == COUNT)
    rig.work.put("fine")
    until(lambda: rig.done.get(timeout=PATIENCE) == "fine")
