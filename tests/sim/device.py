"""A device whose streams run behind the host, in every order that CUDA allows.

Its memory is host memory, but what is enqueued happens later, on a thread that is the device:
entries of one stream one after another, those of different streams in random order, some streams
much slower than others, and none before an event that its stream waits for. A test can hold the
device, and make it fail for good, as CUDA does: then everything raises that asks it for anything.

What the device's own work finds wrong (an engine's check of the KV it is about to use) is in
``problems``; :meth:`SimulatedStreams.close` raises it.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, int64

from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.streams import Streams

PATIENCE = 60.0


class SimulatedStream:
    """One queue of the device."""

    def __init__(self, streams: SimulatedStreams, name: str) -> None:
        self.streams = streams
        self.name = name
        self.entries: deque[tuple[str, Any]] = deque()

    def synchronize(self) -> None:
        event = SimulatedEvent(self.streams)
        with self.streams.changed:
            event.recorded = 1
            self.streams.put(self, ("record", (event, 1)))
            self.streams.wait_for(lambda: bool(self.streams.error) or event.reached > 0)

    def wait_event(self, event: SimulatedEvent) -> None:
        self.streams.put(self, ("wait", (event, event.recorded)))


class SimulatedEvent:
    """Like CUDA's: it stands for what it was recorded behind last."""

    def __init__(self, streams: SimulatedStreams) -> None:
        self.streams = streams
        self.recorded = 0
        self.reached = 0

    def record(self, stream: SimulatedStream) -> None:
        with self.streams.changed:
            self.streams.check("record")
            self.recorded += 1
            self.streams.put(stream, ("record", (self, self.recorded)))

    def query(self) -> bool:
        with self.streams.changed:
            if not getattr(self.streams._local, "is_relaxed", False):
                self.streams.unrelaxed.append(threading.current_thread().name)
            if self.recorded:
                self.streams.check("query")
            return self.reached >= self.recorded


class SimulatedStreams(Streams):
    """The streams of the device; see :class:`kvshelf.kv.streams.Streams`.

    Parameters
    ----------
    seed : int
        Decides what runs when.
    engine_at_once : bool
        What is enqueued on the engine's stream is done at once: for a real engine, whose own work
        is done on the host.

    Attributes
    ----------
    faults : set of str
        What fails when kvshelf asks for it, though the engine's own work goes on: ``event``,
        ``record``, ``query``, ``enqueue``, ``copy``. Once one has failed, queries fail
        too, as after an error for good.
    once : set of str
        What fails the next time only.
    free : int
        Bytes of its memory that are free.
    log : list of (str, str)
        What was enqueued, and the name of its stream: ``copy``, ``work``, ``wait``, ``record``.
    unrelaxed : list of str
        Threads that asked for an event in a way that would end another thread's capture.
    most_copies : dict of str to int
        The most copies to or from the host that were under way at once, by names of streams.
    """

    def __init__(self, seed: int = 0, *, engine_at_once: bool = False) -> None:
        self.free = 1 << 40
        self.log: list[tuple[str, str]] = []
        self.copies: Counter[str] = Counter()
        self.most_copies: dict[str, int] = {}
        self.faults: set[str] = set()
        self.once: set[str] = set()
        self._failed = ""
        self._engine_at_once = engine_at_once
        self.changed = threading.Condition(threading.RLock())
        self.error = ""
        self.problems: list[BaseException] = []
        self.ran: list[str] = []
        self.unrelaxed: list[str] = []
        self._chance = random.Random(seed)
        self.streams: list[SimulatedStream] = []
        self._speeds: list[float] = []
        self._held = 0
        self._closed = False
        self._executing = False
        self._local = threading.local()
        self.engine = self._new("engine")
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    # What kvshelf uses

    def stream(self, *, urgent: bool) -> SimulatedStream:
        return self._new("urgent" if urgent else "beside")

    def event(self) -> SimulatedEvent:
        self.check("event")
        return SimulatedEvent(self)

    def current(self) -> SimulatedStream:
        found: SimulatedStream = getattr(self._local, "stream", self.engine)
        return found

    @contextlib.contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        self._local.is_relaxed = True
        try:
            yield
        finally:
            self._local.is_relaxed = False

    def here(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        return self.free

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        self.check("enqueue")
        # Copies are between device and host: all else is the kernel's of kvshelf.kv.ops.
        if getattr(work, "__name__", "") == "copy_":
            self.check("copy")
            mode = torch.inference_mode(torch.is_inference_mode_enabled())
            self._copy(self.current(), mode(functools.partial(work, *arguments)))
        else:
            self.do(work, *arguments)

    def _copy(self, stream: SimulatedStream, run: Callable[[], object]) -> None:
        name = stream.name

        def done() -> None:
            run()
            self.copies[name] -= 1

        with self.changed:
            self.copies[name] += 1
            self.most_copies[name] = max(self.copies[name], self.most_copies.get(name, 0))
        self.put(stream, ("copy", (done, [])))

    # What tests use

    def do(self, work: Callable[..., object], *arguments: Any) -> None:
        """Enqueue the engine's own work."""
        taken = [
            argument.clone()
            if isinstance(argument, Tensor) and argument.dtype == int64
            else argument
            for argument in arguments
        ]
        self.put(self.current(), ("work", (work, taken)))

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing happens on the device meanwhile."""
        with self.changed:
            self._held += 1
            self.changed.wait_for(lambda: not self._executing, PATIENCE)
        try:
            yield
        finally:
            with self.changed:
                self._held -= 1
                self.changed.notify_all()

    def fail(self, error: str = "CUDA error: an illegal memory access was encountered") -> None:
        """Do nothing any more, and raise at every question."""
        with self.changed:
            self.error = error
            for stream in self.streams:
                stream.entries.clear()
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._executing, PATIENCE)

    def slow_down(self, stream: SimulatedStream) -> None:
        """Let all other streams overtake this one where they may."""
        self._speeds[self.streams.index(stream)] = 1e-6

    def let_all_be_as_fast(self) -> None:
        """Make no stream slower than others."""
        self._speeds = [1.0] * len(self.streams)

    def finish(self) -> None:
        """Wait until all is done that was enqueued."""
        with self.changed:
            done = self.wait_for(self._idle)
            assert done, "the device never came to an end"

    def close(self) -> None:
        """Finish, and raise what was found wrong on the way."""
        if not self._held:
            self.finish()
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._thread.join(PATIENCE)
        for problem in self.problems:
            raise problem

    # Inside

    def wait_for(self, reached: Callable[[], bool]) -> bool:
        """Wait for the device, with the lock; return whether it came so far."""
        self.changed.notify_all()
        return self.changed.wait_for(reached, PATIENCE)

    def _new(self, name: str) -> SimulatedStream:
        stream = SimulatedStream(self, name)
        with self.changed:
            self.streams.append(stream)
            self._speeds.append(self._chance.choice([0.05, 0.3, 1.0]))
        return stream

    def check(self, what: str = "") -> None:
        if what in self.once:
            self.once.discard(what)
            raise RuntimeError(f"CUDA error: {what} failed")
        if what in self.faults:
            self._failed = f"CUDA error: {what} failed"
        if what in self.faults or (what == "query" and self.faults and self._failed):
            raise RuntimeError(self._failed)
        if self.error:
            raise RuntimeError(f"{self.error}\nCUDA kernel errors might be reported elsewhere")

    def put(self, stream: SimulatedStream, entry: tuple[str, Any]) -> None:
        with self.changed:
            self.check()
            kind, what = entry
            self.log.append((kind, stream.name))
            if stream is self.engine and self._engine_at_once and kind == "record":
                what[0].reached = what[1]
            elif stream is self.engine and self._engine_at_once:
                assert kind in ("work", "copy"), "the engine's stream waits for nothing"
                what[0](*what[1])
            else:
                stream.entries.append(entry)
            self.changed.notify_all()

    def _idle(self) -> bool:
        return not self._executing and not any(stream.entries for stream in self.streams)

    def _ready(self) -> list[int]:
        if self._held:
            return []
        ready = []
        for number, stream in enumerate(self.streams):
            if stream.entries:
                kind, what = stream.entries[0]
                if kind != "wait" or what[0].reached >= what[1]:
                    ready.append(number)
        return ready

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._closed or bool(self._ready()))
                if self._closed:
                    return
                ready = self._ready()
                speeds = [self._speeds[number] for number in ready]
                (number,) = self._chance.choices(ready, speeds)
                kind, what = self.streams[number].entries.popleft()
                lazy = self._chance.random() < 0.05
                if kind == "record":
                    event, generation = what
                    event.reached = max(event.reached, generation)
                self._executing = kind in ("work", "copy")
                self.changed.notify_all()
            if lazy:
                threading.Event().wait(0.001)
            if kind in ("work", "copy"):
                self._work(number, *what)

    def _work(self, number: int, work: Callable[..., object], arguments: list[Any]) -> None:
        try:
            if not self.error:
                work(*arguments)
                self.ran.append(self.streams[number].name)
        except BaseException as problem:  # noqa: BLE001 - for the test
            self.problems.append(problem)
        finally:
            with self.changed:
                self._executing = False
                self.changed.notify_all()


def on_a_device(calls: Any, **options: Any) -> DeviceKVCache:
    """Caches on a device where all of the engine's own work is done at once."""
    return DeviceKVCache(calls, streams=SimulatedStreams(engine_at_once=True), **options)
