"""Streams and events of a device that is not there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class FakeStream:
    name: str


@dataclass(eq=False)
class FakeEvent:
    log: list[tuple[object, ...]]
    held: threading.Event
    recorded: bool = False

    def record(self, stream: FakeStream) -> None:
        self.recorded = True
        self.log.append(("record", self, stream))

    def query(self) -> bool:
        return not self.recorded or self.held.is_set()

    def synchronize(self) -> None:
        assert not self.recorded or self.held.wait(30)


@dataclass
class FakeStreams:
    """Streams that do at once what is enqueued on them, and events that end when told."""

    log: list[tuple[object, ...]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    engine: FakeStream = field(default_factory=lambda: FakeStream("engine"))
    made: list[FakeStream] = field(default_factory=list)
    free: int = 1 << 40

    def __post_init__(self) -> None:
        self._local = threading.local()
        self.ended.set()

    def stream(self, *, urgent: bool) -> FakeStream:
        stream = FakeStream("urgent" if urgent else "beside")
        log = self.log

        def wait_event(event: FakeEvent) -> None:
            log.append(("wait", stream, event))

        stream.wait_event = wait_event  # type: ignore[attr-defined]
        self.made.append(stream)
        return stream

    def event(self) -> FakeEvent:
        return FakeEvent(self.log, self.ended)

    def current(self) -> FakeStream:
        return getattr(self._local, "stream", self.engine)

    @contextlib.contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before = self.current()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def here(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        work(*arguments)

    def annotate(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        return self.free
