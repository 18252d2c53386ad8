"""Work on the storage for several clients: who is next, and what becomes of those that go."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvshelf.backends.guard import GuardedBackend
from kvshelf.metrics import Counters
from kvshelf.server.workers import ClientGoneError, Workers
from tests.sim.storage import posix
from tests.support.waiting import PATIENCE

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


class Bench:
    """One thread that works, once :attr:`gate` is set."""

    def __init__(self, folder: Path) -> None:
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        guard = GuardedBackend(posix(folder))
        self.workers = Workers("test", 1, guard, self.posted.put, Counters())
        self.gate = threading.Event()
        self.begun: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        #: Each client whose work has ended, with its outcome.
        self.ended: list[tuple[bytes, object]] = []
        self.returned: list[bytes] = []

    def submit(self, client: bytes) -> None:
        def work() -> str:
            self.begun.put(client)
            self.gate.wait()
            return "done"

        def done(outcome: object) -> None:
            self.ended.append((client, outcome))

        self.workers.submit(client, work, done, lambda _: self.returned.append(client))

    def run(self, count: int) -> None:
        """Run what is posted until so much has ended."""
        while len(self.returned) < count:
            self.posted.get(timeout=PATIENCE)()

    def close(self) -> None:
        self.gate.set()
        self.workers.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(tmp_path)) as made:
        yield made


def test_clients_take_turns(bench: Bench) -> None:
    for client, count in ((A, 100), (B, 3), (C, 1)):
        for _ in range(count):
            bench.submit(client)
        # The first one is begun before the others come.
        if client == A:
            assert bench.begun.get(timeout=PATIENCE) == A
    bench.gate.set()
    bench.run(104)
    order = [client for client, _ in bench.ended]
    assert order[:8] == [A, A, B, C, A, B, A, B]
    assert bench.returned == order


def test_work_of_a_client_that_is_gone_is_not_begun(bench: Bench) -> None:
    for client in (A, A, B, A):
        bench.submit(client)
    assert bench.begun.get(timeout=PATIENCE) == A
    bench.workers.forget(A)
    bench.workers.forget(C)
    bench.run(2)
    assert [client for client, _ in bench.ended] == [A, A]
    assert all(isinstance(outcome, ClientGoneError) for _, outcome in bench.ended)
    bench.gate.set()
    bench.run(4)
    assert bench.ended[2:] == [(A, "done"), (B, "done")]
    # One that comes back under the same id is served.
    bench.submit(A)
    bench.run(5)
    assert bench.ended[4:] == [(A, "done")]


def test_what_waits_fails_when_the_workers_are_closed(bench: Bench) -> None:
    for client in (A, A, B):
        bench.submit(client)
    assert bench.begun.get(timeout=PATIENCE) == A
    closer = threading.Thread(target=partial(bench.workers.close))
    closer.start()
    bench.run(2)
    assert sorted(client for client, _ in bench.ended) == [A, B]
    assert not any(outcome == "done" for _, outcome in bench.ended)
    bench.gate.set()
    closer.join()
    bench.run(3)
    assert bench.ended[2:] == [(A, "done")]


def test_panic_is_the_outcome_and_the_thread_goes_on(bench: Bench) -> None:
    class PanicException(BaseException):
        """As Rust libraries raise it."""

    panic = PanicException("index out of bounds")

    def work() -> None:
        raise panic

    ended: list[object] = []
    bench.workers.submit(A, work, ended.append, lambda _: bench.returned.append(A))
    bench.run(1)
    assert ended == [panic]
    bench.gate.set()
    bench.submit(B)
    bench.run(2)
    assert bench.ended == [(B, "done")]
