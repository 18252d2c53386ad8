"""Fleets of keepers on one shelf in memory, in simulated time: who writes, sweeps and deletes when.

Nothing runs at the same time as another thing: after each step of the clock writers store, and the
keepers whose time has come do what is due. What that costs is added to the clock of the keeper.
A chunk without room waits in its writer's staging. It is dropped where that is full, or after
:data:`WAIT_SECONDS`.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvshelf import background
from kvshelf.backends import guard
from kvshelf.backends.guard import GuardedBackend
from kvshelf.capacity import evictor as evictor_module
from kvshelf.capacity import keepers, limits
from kvshelf.capacity.evictor import Evictor
from kvshelf.config import CapacityConfig
from kvshelf.metrics import Counters
from tests.sim import memory
from tests.sim.memory import MemoryStorage

NAMESPACE = "model-0123456789abcdef"
STEP = 0.05
#: Chunks for which a writer has staging, and seconds that each waits for room.
STAGING = 16
WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class Costs:
    """What a storage is like: processor seconds for a row, seconds for a listing."""

    row: float
    listing: float
    properties: dict[str, Any] = field(default_factory=dict)


#: A local one: in others each call has a thread, in case it hangs.
DIRECTORY = Costs(30e-6, 0.0, {"local_path": "/", "temporaries": True, "sets_aside": True})
S3 = Costs(10e-6, 0.05, {"renews": True, "deletes_at_once": 1000, "probe_cost": 0.0})


@dataclass
class Waiting:
    """A chunk in staging: the beginning of its objects' names, and how many were stored."""

    since: float
    start: str
    stored: int = 0


@dataclass
class Writer:
    """A process that stores chunks, each with some objects of equal size."""

    evictor: Evictor
    counters: Counters
    guard: GuardedBackend
    rate: float = 0.0
    objects: int = 1
    nbytes: int = 1 << 20
    group: str = "_"
    space: str = NAMESPACE
    owed: float = 0.0
    offered: int = 0
    dropped: int = 0
    busy_until: float = 0.0
    cpu: float = 0.0
    stopped: bool = False
    staging: deque[Waiting] = field(default_factory=deque)


class Fleet:
    """Writers, and their shelf."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, costs: Costs = DIRECTORY) -> None:
        self.now = 1e9
        self.costs = costs
        self.storage = MemoryStorage(**costs.properties)
        self.writers: list[Writer] = []
        self.most = 0
        self.fills: list[float] = []
        self._cpu = 0.0
        self._random = random.Random(1)
        clock = SimpleNamespace(
            monotonic=lambda: self.now,
            time=lambda: self.now,
            perf_counter=lambda: self.now,
            thread_time=self._thread_time,
            sleep=lambda seconds: None,
        )
        for module in (guard, evictor_module, keepers, memory, background):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(limits, "WAIT_SECONDS", 0.0)
        listed = self.storage._walk

        def walk(*arguments: Any) -> Any:
            for row in listed(*arguments):
                self._cpu += self.costs.row
                yield row

        self.storage._walk = walk  # type: ignore[method-assign]

    def _thread_time(self) -> float:
        return self._cpu

    def add(self, rate: float = 0.0, **options: Any) -> Writer:
        """Add a process; options are of its keeper, or fields of :class:`Writer`."""
        bounds = {
            name: options.pop(name) for name in CapacityConfig.model_fields if name in options
        }
        guarded, counters = GuardedBackend(self.storage), Counters()
        evictor = Evictor(guarded, CapacityConfig.model_validate(bounds), counters)
        guarded.bound, guarded.on_full = evictor, evictor.found_full
        writer = Writer(evictor, counters, guarded, rate, **options)
        self.writers.append(writer)
        return writer

    def store(self, writer: Writer) -> bool:
        """Store one new chunk now or later; return False if it was dropped at once."""
        writer.offered += 1
        room = writer.guard.allows(writer.objects * writer.nbytes)
        if not room or len(writer.staging) >= STAGING:
            writer.dropped += 1
            return False
        key = hashlib.sha256(self._random.randbytes(16)).hexdigest()
        index = self._random.randrange(64)
        start = f"{writer.space}/{writer.group}/{key[:2]}/{key}-{index}"
        writer.staging.append(Waiting(self.now, start))
        self.publish(writer)
        return True

    def publish(self, writer: Writer) -> None:
        """Store what is in staging, as far as there is room."""
        while writer.staging:
            chunk = writer.staging[0]
            while chunk.stored < writer.objects and writer.evictor.begin(writer.nbytes):
                name = f"{chunk.start}-{chunk.stored}of{writer.objects}.safetensors"
                self.storage.put(name, writer.nbytes)
                writer.guard.written.add(writer.space)
                writer.evictor.end(writer.nbytes, written=True)
                chunk.stored += 1
            if chunk.stored < writer.objects:
                if self.now < chunk.since + WAIT_SECONDS:
                    return
                writer.dropped += 1
            writer.staging.popleft()

    def run(self, seconds: float, each: Callable[[], object] = lambda: None) -> None:
        """Let time pass; `each` is called after each step of the clock."""
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            for writer in self.writers:
                if writer.stopped:
                    continue
                self.publish(writer)
                writer.owed += writer.rate * STEP
                while writer.owed >= 1:
                    writer.owed -= 1
                    self.store(writer)
                if self.now >= writer.busy_until:
                    before, lists = self._cpu, self.storage.lists
                    pause = writer.evictor._turn()
                    spent = self._cpu - before
                    writer.cpu += spent
                    wait = spent + (self.storage.lists - lists) * self.costs.listing
                    writer.busy_until = self.now + wait
                    assert pause is not None
            self.most = max(self.most, self.storage.nbytes)
            self.fills.append(self.storage.nbytes)
            each()

    @property
    def offered(self) -> int:
        return sum(writer.offered for writer in self.writers)

    @property
    def dropped(self) -> int:
        return sum(writer.dropped for writer in self.writers)

    def count(self, name: str) -> float:
        return sum(writer.counters.snapshot().get(name, 0) for writer in self.writers)

    def chunks(self) -> int:
        """Return how many chunks are on the shelf."""
        return len({row.name.split("-")[-3] for row in self.storage.list() if "of" in row.name})
