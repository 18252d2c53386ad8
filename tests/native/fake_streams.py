"""Streams and events of a device that is not there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kvshelf.kv.streams import Streams
from tests.native.emulation import emulation

Stream = TypeVar("Stream")


class StreamsOfThreads(Generic[Stream]):
    """What streams of any device have that is not there: one current stream for each thread."""

    engine: Stream
    _local: threading.local

    def current(self) -> Stream:
        return getattr(self._local, "stream", self.engine)

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def here(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @property
    def index(self) -> int:
        return emulation().index_of(self)

    def handle(self) -> int:
        return emulation().address_of(self.current())


class AtOnce(Streams):
    """Streams of the emulated device that does everything at once, without asking Python."""

    @property
    def index(self) -> int:
        return 0

    def handle(self) -> int:
        return 0


@dataclass(eq=False)
class FakeStream:
    name: str
    log: list[tuple[object, ...]]

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("wait", self, event))

    def finish(self) -> None:
        self.log.append(("finish", self))


@dataclass(eq=False)
class FakeEvent:
    log: list[tuple[object, ...]]
    held: threading.Event
    check: Callable[[str], None]
    recorded: bool = False

    def record(self, stream: FakeStream) -> None:
        self.recorded = True
        self.log.append(("record", self, stream))

    def query(self) -> bool:
        self.check("queries")
        return not self.recorded or self.held.is_set()

    def synchronize(self) -> None:
        assert not self.recorded or self.held.wait(30)


@dataclass(eq=False)
class FakeStreams(StreamsOfThreads[FakeStream]):
    """Streams that do at once what is enqueued on them, and events that end when told."""

    log: list[tuple[object, ...]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    made: list[FakeStream] = field(default_factory=list)
    free: int = 1 << 40
    #: What fails when it is enqueued: ``copies`` between host and device, ``kernels``; and
    #: ``queries``, as after an error for good.
    broken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._local = threading.local()
        self.engine = FakeStream("engine", self.log)
        self.ended.set()

    def stream(self, *, urgent: bool) -> FakeStream:
        stream = FakeStream("urgent" if urgent else "beside", self.log)
        self.made.append(stream)
        return stream

    def event(self) -> FakeEvent:
        return FakeEvent(self.log, self.ended, self._check)

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        is_copy = getattr(work, "__name__", "") == "copy_"
        self._check("copies" if is_copy else "kernels")
        work(*arguments)

    def _check(self, what: str) -> None:
        if what in self.broken:
            raise RuntimeError("CUDA error: launch failure\nCompile with TORCH_USE_CUDA_DSA")

    def free_bytes(self) -> int:
        return self.free

    # For the compiled library

    def nanoseconds(self, first: FakeEvent, second: FakeEvent) -> int:
        return 1000

    def work(self, stream: FakeStream, run: Callable[[], None], nbytes: int) -> None:
        self._check("copies" if nbytes else "kernels")
        run()
