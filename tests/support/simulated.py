"""Many processes that keep one shelf within bounds, in simulated time; and their storage.

What runs is kvshelf's own code: each :class:`Writer` has a sweeper and what records uses, on
simulated threads. These are real threads of which only one runs at any time, the one that is due
next, so that each run is the same. Time passes when one of them sleeps, works or waits for the
storage; how long that takes are the storage's :class:`Costs`. What kvshelf computes beside takes no
time.

A simulation may be smaller than what it stands for: with a `scale` of 20 each object is 20 objects,
whose costs come together.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest

from kvshelf.backends import base
from kvshelf.backends.base import (
    Backend,
    BytesLike,
    DeleteResults,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResults,
    Touched,
    WriteMode,
    WriteResult,
    delete_one,
)
from kvshelf.backends.guard import GuardedBackend
from kvshelf.capacity.sweeper import Sweeper
from kvshelf.capacity.uses import Uses
from kvshelf.config import CapacityConfig
from kvshelf.errors import ObjectMissingError
from kvshelf.metrics import Counters

#: When simulations begin, seconds since the epoch.
EPOCH = 1.8e9
#: A namespace, and the bytes of one of its objects.
NAMESPACE = "simulated-0123456789abcdef"
OBJECT_BYTES = 4096
#: Seconds from one look at the work of a writer to the next.
_STORE_SECONDS = 0.05
#: Chunks of a prompt.
_PROMPT_CHUNKS = 40
#: One of so many objects is used when it was stored.
_USED = 20


class _OverError(BaseException):
    """Ends a simulated thread when the simulation is over."""


class SimulatedThread:
    """A thread that runs only while no other one does.

    Attributes
    ----------
    name : str
    processor : float
        Seconds of processor time that it took.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.processor = 0.0
        self.stopped_until = 0.0
        self.turn = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        #: Counts how often it went on: only the last event that names it counts.
        self.number = 0


class Clock:
    """Simulated time, in place of the module `time`; and the threads that live in it.

    Attributes
    ----------
    now : float
        Seconds since the simulation began.
    ahead : float
        Seconds that the clock of the machines is ahead.
    running : SimulatedThread
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.ahead = 0.0
        self._main = self.running = SimulatedThread("main")
        self._threads: list[SimulatedThread] = []
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None] | SimulatedThread, int]] = []
        #: Something is done at once, which takes no time.
        self._at_once = False
        self._error: BaseException | None = None
        self._over = False

    # ------------------------------------------------------------- the module `time`

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def time(self) -> float:
        return EPOCH + self.now + self.ahead

    def clock_gettime(self, _: int) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.running.processor

    def sleep(self, seconds: float) -> None:
        """Let time pass for the thread that calls."""
        if self._at_once:
            return
        if self._over:
            raise _OverError
        me, due = self.running, self.now + max(0.0, seconds)
        if self._events and due < self._events[0][0] and me.stopped_until <= due:
            self.now = due
            return
        self._due(due, me)
        self._pass_time()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    # ------------------------------------------------------------- threads and events

    def work(self, processor: float, waiting: float = 0.0) -> None:
        """Let the calling thread work, and then wait for something."""
        if not self._at_once:
            self.running.processor += processor
            self.sleep(processor + waiting)

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something at a time. That takes none."""
        heapq.heappush(self._events, (seconds, next(self._order), do, 0))

    def start(self, name: str, run: Callable[[], None]) -> SimulatedThread:
        """Start a thread."""
        started = SimulatedThread(name)

        def body() -> None:
            started.turn.acquire()
            try:
                if not self._over:
                    run()
            except _OverError:
                return
            except BaseException as error:  # noqa: BLE001  raised by the test
                self._error = error
            if not self._over:
                started.number += 1
                self._pass_time(ended=True)

        started.thread = threading.Thread(target=body, name=f"simulated {name}", daemon=True)
        started.thread.start()
        self._threads.append(started)
        self._due(self.now, started)
        return started

    def rouse(self, thread: SimulatedThread) -> None:
        """Let a thread that sleeps go on now."""
        self._due(self.now, thread)

    def stop(self, thread: SimulatedThread, seconds: float) -> None:
        """Stop a thread for some time, as SIGSTOP does."""
        thread.stopped_until = self.now + seconds

    def end(self) -> None:
        """End all threads."""
        self._over = True
        for thread in self._threads:
            assert thread.thread is not None
            thread.turn.release()
            thread.thread.join(30)

    def _due(self, due: float, thread: SimulatedThread) -> None:
        heapq.heappush(self._events, (due, next(self._order), thread, thread.number))

    def _pass_time(self, ended: bool = False) -> None:
        """Do what is due until the calling thread is, or for ever if it has ended."""
        me = self.running
        while self._error is None:
            due, _, what, number = heapq.heappop(self._events)
            if not isinstance(what, SimulatedThread):
                self.now = max(self.now, due)
                self._do(what)
            elif number != what.number:
                continue
            elif due < what.stopped_until:
                self._due(what.stopped_until, what)
            else:
                self.now = max(self.now, due)
                what.number += 1
                if what is not me:
                    self._give(what)
                    if not ended:
                        self._wait(me)
                return
        if me is not self._main:
            self._give(self._main)
            if not ended:
                self._wait(me)
        if self._error is not None and not ended:
            raise self._error

    def _give(self, thread: SimulatedThread) -> None:
        self.running = thread
        thread.turn.release()

    def _wait(self, me: SimulatedThread) -> None:
        me.turn.acquire()
        if self._over:
            raise _OverError
        if self._error is not None and me is self._main:
            raise self._error

    def _do(self, what: Callable[[], None]) -> None:
        self._at_once = True
        try:
            what()
        except BaseException as error:  # noqa: BLE001  raised by the test
            self._error = error
        finally:
            self._at_once = False


def background_of(clock: Clock) -> type:
    """Return what stands for :class:`kvshelf.background.Background` in simulated time."""

    class Background:
        def __init__(
            self,
            name: str,
            step: Callable[[], float | None],
            *,
            on_start: Callable[[], None] | None = None,
        ) -> None:
            self._name = name
            self._step = step
            self.thread: SimulatedThread | None = None
            self._woken = self._sleeps = False
            self.closed = False

        @property
        def running(self) -> bool:
            return self.thread is not None

        @property
        def is_current(self) -> bool:
            return self.thread is clock.running

        def start(self) -> bool:
            if self.thread is None and not self.closed:
                self.thread = clock.start(self._name, self._run)
            return True

        def wake(self) -> None:
            self._woken = True
            if self._sleeps and self.thread is not None:
                clock.rouse(self.thread)

        def close(self, seconds: float = 0.0) -> None:
            self.closed = True
            self.wake()

        def _run(self) -> None:
            while not self.closed:
                self._woken = False
                pause = self._step()
                # No loop without an end in no time.
                clock.sleep(1e-4)
                if not self._woken:
                    self._sleeps = True
                    clock.sleep(math.inf if pause is None else pause)
                    self._sleeps = False

    return Background


@dataclass(frozen=True, slots=True)
class Costs:
    """What a storage takes, each in seconds of processor time and of waiting.

    Attributes
    ----------
    row : pair of float
        An object of a listing.
    look, delete : pair of float
        An object that is looked at, or deleted, by itself; many at the same time where the latency
        is high.
    bulk : pair of float or None
        An object that is deleted with others in one call; None: there is no such call.
    call : pair of float
        Any other call.
    far : bool
        The storage tells neither free space nor access times, and its latency is high.
    """

    row: tuple[float, float]
    look: tuple[float, float]
    delete: tuple[float, float]
    bulk: tuple[float, float] | None
    call: tuple[float, float]
    far: bool

    def of(self, scale: float) -> Costs:
        """Return the same where each object stands for so many."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("row", "look", "delete", "bulk"):
            if found[name] is not None:
                found[name] = tuple(scale * seconds for seconds in found[name])
        return Costs(**found)


#: A directory of this machine.
DIRECTORY = Costs(
    row=(50e-6, 0.0),
    look=(8e-6, 0.0),
    delete=(40e-6, 0.0),
    bulk=None,
    call=(50e-6, 0.0),
    far=False,
)
#: A bucket: 50 ms for a LIST of 1000, 20 ms for HEAD and DELETE, of which 16 are under way at the
#: same time, 100 ms for a DeleteObjects of 1000.
S3 = Costs(
    row=(10e-6, 40e-6),
    look=(0.3e-3, 0.95e-3),
    delete=(0.3e-3, 0.95e-3),
    bulk=(5e-6, 95e-6),
    call=(0.3e-3, 20e-3),
    far=True,
)


@dataclass(slots=True)
class _File:
    size: int
    mtime: float
    atime: float
    data: bytes | None = None


class _FileReader(Reader):
    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def read_into(self, buffer: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


class SimulatedStorage(Backend):
    """A storage in memory whose calls take simulated time. Objects have no content.

    Attributes
    ----------
    nbytes, most : int
        Bytes of all files; the most that there were.
    ahead : float
        Seconds that its clock is ahead of that of the machines.
    calls : collections.Counter
        Calls by operation, objects of listings as ``row``.
    on_delete : Callable
        Called with the name of each object before it is deleted.
    """

    def __init__(self, clock: Clock, costs: Costs, total: int = 1 << 50) -> None:
        self.url = "simulated://s3" if costs.far else "simulated://directory"
        self.clock = clock
        self.costs = costs
        self.nbytes = self.most = 0
        self.ahead = 0.0
        self.calls: Counter[str] = Counter()
        self.on_delete: Callable[[str], None] = lambda name: None
        self._total = total
        self._folders: dict[str, dict[str, _File]] = {}

    @property
    def properties(self) -> Properties:
        # What 16 threads would do at the same time is in the costs.
        more = {"deletes_at_once": 1000} if "deletes_at_once" in Properties.__slots__ else {}
        return Properties(
            "simulated",
            concurrency=1,
            probe_cost=20e-3 if self.costs.far else 10e-6,
            temporaries=not self.costs.far,
            **(more if self.costs.bulk else {}),
        )

    @property
    def time(self) -> float:
        """Its time, seconds since the epoch."""
        return EPOCH + self.clock.now + self.ahead

    # ------------------------------------------------------------- for tests, without time

    def put(self, name: str, size: int, *, age: float = 0.0, used: float | None = None) -> None:
        """Store an object with an age."""
        now = self.time
        self._put(name, _File(size, now - age, now - (age if used is None else used)))

    def names(self) -> set[str]:
        """Return the names of all objects."""
        return {
            f"{folder}/{base}"
            for folder, files in self._folders.items()
            for base in files
            if base.endswith(".safetensors")
        }

    def _put(self, name: str, file: _File) -> None:
        folder, _, base = name.rpartition("/")
        files = self._folders.setdefault(folder, {})
        before = files.get(base)
        files[base] = file
        self.nbytes += file.size - (0 if before is None else before.size)
        self.most = max(self.most, self.nbytes)

    def _file(self, name: str) -> _File | None:
        folder, _, base = name.rpartition("/")
        return self._folders.get(folder, {}).get(base)

    def _info(self, name: str, file: _File) -> ObjectInfo:
        if self.costs.far:
            return ObjectInfo(name, file.size, file.mtime, held=file.size)
        return ObjectInfo(name, file.size, file.mtime, file.atime, file.mtime, file.size)

    # ------------------------------------------------------------- a backend

    def _call(
        self, operation: str, cost: tuple[float, float] | None = None, count: int = 1
    ) -> None:
        self.calls[operation] += count
        processor, waiting = self.costs.call if cost is None else cost
        self.clock.work(processor * count, waiting * count)

    def stat(self, names: Sequence[str]) -> StatResults:
        self._call("stat", self.costs.look, len(names))
        found = map(self._file, names)
        return [None if file is None else file.size for file in found]

    def info(self, name: str) -> ObjectInfo | None:
        self._call("info", self.costs.look)
        file = self._file(name)
        return None if file is None else self._info(name, file)

    def open(self, name: str) -> Reader:
        self._call("open")
        file = self._file(name)
        if file is None:
            raise ObjectMissingError(2, "missing", name)
        return _FileReader(bytes(file.size) if file.data is None else file.data)

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        self._call("write")
        there = self._file(name) is not None
        if there and mode == "create":
            return WriteResult.EXISTED
        data = b"".join(bytes(buffer) for buffer in buffers)
        now = self.time
        kept = None if name.endswith(".safetensors") else data
        self._put(name, _File(len(data), now, now, kept))
        return WriteResult.REPLACED if there else WriteResult.CREATED

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        between: tuple[str, str] | None = None,
    ) -> Iterator[ObjectInfo]:
        start = f"{prefix}/" if prefix else ""
        for folder in sorted(self._folders):
            below = f"{folder}/"[len(start) :]
            if not f"{folder}/".startswith(start) or (not hidden and "/." in f"/{below}"):
                continue
            part = below.partition("/")[0]
            if between is not None and not (part and between[0] <= part <= between[1]):
                continue
            for last in list(self._folders[folder]):
                if last.startswith(".") and not hidden:
                    continue
                self._call("row", self.costs.row)
                file = self._folders[folder].get(last)
                if file is not None:
                    yield self._info(f"{folder}/{last}", file)

    def folders(self, prefix: str = "") -> Sequence[str]:
        self._call("folders")
        start = f"{prefix}/" if prefix else ""
        found = {
            folder[len(start) :].partition("/")[0]
            for folder in self._folders
            if folder.startswith(start) and folder != prefix
        }
        return sorted(name for name in found if name and not name.startswith("."))

    def delete(self, names: Sequence[str]) -> DeleteResults:
        many = self.costs.bulk is not None and len(names) > 1
        cost = self.costs.bulk if many else self.costs.delete
        self._call("bulk" if many else "delete", cost, len(names))
        return [self._delete(name) for name in names]

    def _delete(self, name: str) -> bool:
        folder, _, base = name.rpartition("/")
        if base not in self._folders.get(folder, {}):
            return False
        self.on_delete(name)
        self.nbytes -= self._folders[folder].pop(base).size
        return True

    def set_aside(self, name: str) -> bool:
        return delete_one(self, name)

    def touch(self, name: str, before: float = math.inf) -> Touched:
        self._call("touch")
        file = self._file(name)
        if self.costs.far:
            return Touched.REFUSED
        if file is not None:
            file.atime = self.time
        return Touched.TOUCHED

    def space(self) -> Space | None:
        return None if self.costs.far else Space(self._total - self.nbytes, self._total)


class Writer:
    """A process that stores objects at a steady rate, as far as it may; and its sweeper.

    Attributes
    ----------
    offered, stored : int
        Objects.
    sweeper : Sweeper
    counters : Counters
    """

    def __init__(self, fleet: Fleet, rate: float, capacity: dict[str, Any], **options: Any) -> None:
        self.offered = self.stored = 0
        self.counters = Counters()
        self.guard = GuardedBackend(fleet.storage)
        config = CapacityConfig.model_validate(capacity)
        self.sweeper = Sweeper(
            SimpleNamespace(backend=self.guard), config, self.counters, **options
        )
        self._uses = Uses(self.counters, clock=fleet.clock.monotonic)
        self._fleet = fleet
        self._rate = 0.0
        self._owed = 0.0
        self.sweeper.start()
        self.store(rate)

    def store(self, rate: float) -> None:
        """Store so many objects a second from now on."""
        if rate and not self._rate:
            clock = self._fleet.clock
            clock.at(clock.now + _STORE_SECONDS * random.random(), self._store)
        self._rate = rate

    def _store(self) -> None:
        clock = self._fleet.clock
        self._owed += self._rate * _STORE_SECONDS
        while self._owed >= 1.0:
            self._owed -= 1.0
            self.offered += 1
            # As `GuardedBackend.write` does, without its own thread.
            bound = self.guard.bound
            if bound is None or (bound.allows(OBJECT_BYTES) and bound.begin(OBJECT_BYTES)):
                name = self._fleet.new_name()
                self._fleet.storage.put(name, OBJECT_BYTES)
                self.stored += 1
                if self.stored % _USED == 0:
                    self._uses.note_names(self.guard, [name])
                if bound is not None:
                    bound.end(OBJECT_BYTES, True)
        if self._rate:
            clock.at(clock.now + _STORE_SECONDS, self._store)


class Fleet:
    """Processes and their shelf.

    Parameters
    ----------
    patch : pytest.MonkeyPatch
    costs : Costs
    scale : float
        Each object stands for so many.
    """

    def __init__(self, patch: pytest.MonkeyPatch, costs: Costs, scale: float = 1.0) -> None:
        self.clock = Clock()
        self.storage = SimulatedStorage(self.clock, costs.of(scale))
        self.writers: list[Writer] = []
        self._random = random.Random(1)
        self._numbers = itertools.count()
        random.seed(1)
        _live_in(patch, self.clock)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.end()

    def new_name(self) -> str:
        """Return the name of a chunk that nobody has stored."""
        key, index = self._random.randbytes(32).hex(), next(self._numbers) % _PROMPT_CHUNKS
        return f"{NAMESPACE}/_/{key[:2]}/{key}-{index}-0of1.safetensors"

    def fill(self, count: int) -> list[str]:
        """Store objects of the last day, every fourth of which was used since; return them."""
        names = [self.new_name() for _ in range(count)]
        for number, name in enumerate(names):
            age = self._random.uniform(600.0, 86400.0)
            used = None if number % 4 else self._random.uniform(300.0, age)
            self.storage.put(name, OBJECT_BYTES, age=age, used=used)
        return names

    def add(self, rate: float = 0.0, **capacity: Any) -> Writer:
        """Start a process with these options of ``capacity``."""
        writer = Writer(self, rate, capacity)
        self.writers.append(writer)
        return writer

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.sleep(seconds)

    @property
    def offered(self) -> int:
        return sum(writer.offered for writer in self.writers)

    @property
    def dropped(self) -> int:
        return self.offered - sum(writer.stored for writer in self.writers)

    def count(self, name: str) -> float:
        """Return what all processes have counted."""
        return sum(writer.counters.snapshot().get(name, 0.0) for writer in self.writers)


def _live_in(patch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Let the parts of kvshelf that keep a shelf within bounds live in simulated time."""
    background = background_of(clock)
    for name, module in list(sys.modules.items()):
        if not name.startswith(("kvshelf.capacity.", "kvshelf.shelf.")):
            continue
        if getattr(module, "time", None) is time:
            patch.setattr(module, "time", clock)
        if hasattr(module, "Background"):
            patch.setattr(module, "Background", background)
        # Real threads would run beside the simulated one that waits for them. What they save is in
        # the costs.
        if hasattr(module, "threads_for_calls"):
            patch.setattr(module, "threads_for_calls", lambda backend: 0)
    # So that each run is the same.
    chance = random.Random(1)
    patch.setattr(random, "SystemRandom", lambda: chance)
    patch.setattr(base, "time", clock)
