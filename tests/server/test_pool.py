"""The threads of a node server: turns of clients, panics, jobs that hang."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvshelf.backends import Deadlines
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import TransientStorageError, UnavailableStorageError
from kvshelf.metrics import Counters
from kvshelf.server.pool import Pool
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.real


class Bench:
    """One thread that works, once `gate` is set."""

    def __init__(self, folder: Path) -> None:
        self.storage = FaultyStorage(posix(folder))
        self.guard = GuardedBackend(self.storage, Deadlines(probe=0.1))
        self.counters = Counters()
        self.pool = Pool(1, self.guard, self.counters)
        self.gate = threading.Event()
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.order: list[str] = []

    def submit(self, client: str, *, is_early: bool = False) -> asyncio.Future[str]:
        def work() -> str:
            self.begun.put(client)
            assert self.gate.wait(PATIENCE)
            self.order.append(client)
            return client

        return self.pool.run(client, work, is_early=is_early)

    def close(self) -> None:
        self.gate.set()
        self.pool.close()
        self.guard.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(tmp_path)) as made:
        yield made


def test_clients_take_turns_and_early_jobs_come_last(bench: Bench) -> None:
    async def run() -> None:
        futures = [bench.submit("a")]
        # It is begun before the others come.
        assert bench.begun.get(timeout=PATIENCE) == "a"
        futures += [bench.submit("early", is_early=True) for _ in range(2)]
        for client, count in (("a", 9), ("b", 3), ("c", 1)):
            futures += [bench.submit(client) for _ in range(count)]
        bench.gate.set()
        await asyncio.wait_for(asyncio.gather(*futures), PATIENCE)

    asyncio.run(run())
    assert bench.order[:8] == ["a", "a", "b", "c", "a", "b", "a", "b"]
    assert bench.order[-2:] == ["early"] * 2


def test_jobs_that_were_not_begun_fail_when_the_pool_is_closed(bench: Bench) -> None:
    async def run() -> list[object]:
        futures = [bench.submit(client) for client in "aab"]
        assert bench.begun.get(timeout=PATIENCE) == "a"
        closer = threading.Thread(target=bench.pool.close)
        closer.start()
        await asyncio.wait(futures[1:], timeout=PATIENCE)
        bench.gate.set()
        outcomes = await asyncio.gather(*futures, bench.submit("c"), return_exceptions=True)
        closer.join()
        return outcomes

    outcomes = asyncio.run(run())
    assert outcomes[0] == "a"
    assert [type(outcome) for outcome in outcomes[1:]] == [UnavailableStorageError] * 3


def test_panic_is_the_outcome_and_the_thread_goes_on(bench: Bench) -> None:
    class PanicException(BaseException):
        """As Rust libraries raise it."""

    def work() -> None:
        raise PanicException("index out of bounds")

    async def run() -> None:
        with pytest.raises(PanicException):
            await bench.pool.run("a", work)
        bench.gate.set()
        assert await bench.submit("b") == "b"

    asyncio.run(run())


def test_job_that_hangs_fails_and_its_late_result_is_discarded(bench: Bench) -> None:
    gate = threading.Event()
    bench.storage.add(Fault("stat", wait=gate))
    discarded: queue.SimpleQueue[object] = queue.SimpleQueue()

    async def run() -> None:
        hanging = bench.pool.run("a", lambda: bench.guard.stat(["x"]), discard=discarded.put)
        with pytest.raises(TransientStorageError, match="did not answer"):
            await asyncio.wait_for(hanging, PATIENCE)
        # Another thread has taken its place.
        bench.gate.set()
        assert await bench.submit("b") == "b"

    asyncio.run(run())
    assert bench.counters.snapshot()["stuck_threads"] == 1
    gate.set()
    assert discarded.get(timeout=PATIENCE) == [None]
