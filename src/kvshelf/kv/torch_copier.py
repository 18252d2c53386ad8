"""Stores and loads by :mod:`kvshelf.kv.ops` and torch's copies.

For devices without kernels of the compiled library. The pieces of a copy are enqueued in Python, so
the GIL is needed for each.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from kvshelf.kv import ops
from kvshelf.kv.copier import PIECES, QUEUED_SECONDS, ChunkCopy, Copier
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.streams import Streams

#: Bytes per second that are assumed until pieces are measured: less than any link carries.
_FIRST_RATE: Final = 1e9
_LEAST_RATE: Final = 0.1e9
_WEIGHT: Final = 0.25
#: Pieces start at multiples of it.
_PAGE: Final = 4096


class _Link:
    """The paced copies of one direction, one object at a time. Any thread may copy."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stream = streams.stream(urgent=False)
        self._events = deque(streams.event() for _ in range(PIECES))
        self._under_way: deque[tuple[Any, int]] = deque()
        self._rate = _FIRST_RATE
        self._lock = threading.Lock()
        self._ended_at = 0.0

    def follow(self, event: Any) -> None:
        """Begin all copies from now on behind an event."""
        self._stream.wait_event(event)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy to the first tensor of each pair from the second, and wait for it."""
        with self._lock, self._streams.use(self._stream):
            self._ended_at = 0.0
            try:
                for to, source in pairs:
                    begin = 0
                    while begin < to.numel():
                        begin = self._copy_piece(to, source, begin)
                while self._under_way:
                    self._end_oldest()
            finally:
                self._settle()

    def _copy_piece(self, to: Tensor, source: Tensor, begin: int) -> int:
        if len(self._under_way) == PIECES:
            self._end_oldest()
        most = int(QUEUED_SECONDS / PIECES * self._rate) // _PAGE * _PAGE
        end = min(to.numel(), begin + max(_PAGE, most))
        self._streams.enqueue(to[begin:end].copy_, source[begin:end], True)
        event = self._events.popleft()
        self._under_way.append((event, end - begin))
        event.record(self._stream)
        return end

    def _end_oldest(self) -> None:
        event, nbytes = self._under_way[0]
        event.synchronize()
        self._events.append(event)
        del self._under_way[0]
        now, before = time.perf_counter(), self._ended_at
        self._ended_at = now
        if before:
            rate = nbytes / max(now - before, 1e-6)
            self._rate = max(_LEAST_RATE, self._rate + _WEIGHT * (rate - self._rate))

    def _settle(self) -> None:
        """Wait for what is under way after an error: its memory is the caller's again."""
        while self._under_way:
            event, _ = self._under_way.popleft()
            self._events.append(event)
            # A device that cannot be waited for does no work any more.
            with contextlib.suppress(RuntimeError):
                event.record(self._stream)
                event.synchronize()


@dataclass(eq=False, slots=True)
class _Buffer:
    payloads: Tensor  # uint8 [shards, bytes], on the device
    stream: Any
    moved: Any  # event: gather or scatter has ended


@dataclass(eq=False, slots=True)
class _Job:
    """A chunk that was gathered."""

    buffer: _Buffer
    #: The part of the buffer that is filled: uint8 [shards, bytes].
    gathered: Tensor
    payloads: Sequence[Tensor]
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class TorchCopier(Copier):
    """See the module.

    Parameters
    ----------
    copy : ChunkCopy
    streams : Streams
    """

    def __init__(self, copy: ChunkCopy, streams: Streams) -> None:
        self._copy = copy
        self._checks = _checks_of(copy)
        self._streams = streams
        self._out = _Link(streams)
        self._in = _Link(streams)
        self._for_stores: deque[_Buffer] = deque()
        self._for_loads: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._running = 0

    def add_buffer(self, payloads: Tensor, *, for_loads: bool) -> None:
        """See :meth:`Copier.add_buffer`."""
        streams = self._streams
        buffer = _Buffer(payloads, streams.stream(urgent=for_loads), streams.event())
        # The memory's previous owner may still be using it on the calling thread's stream.
        buffer.moved.record(streams.current())
        self._asked = buffer.moved
        if for_loads:
            self._in.follow(buffer.moved)
        if for_loads:
            self._for_loads.put(buffer)
        else:
            self._for_stores.append(buffer)

    def store(self, copy: ChunkCopy, slots: Tensor, payloads: Sequence[Tensor]) -> _Job | None:
        """See :meth:`Copier.store`."""
        self._check(copy, slots)
        try:
            buffer = self._for_stores.popleft()
        except IndexError:
            return None
        streams = self._streams
        try:
            with streams.here():
                for call in copy.calls:
                    streams.enqueue(
                        ops.gather_kv,
                        call.caches,
                        call.own(slots).unsqueeze(0),
                        buffer.payloads[:, call.start : call.end].unsqueeze(0),
                        call.layout,
                        call.first_head,
                        call.heads,
                    )
                buffer.moved.record(streams.current())
        except BaseException:
            self._for_stores.append(buffer)
            raise
        job = _Job(buffer, buffer.payloads[:, : copy.payload_bytes], payloads)
        with self._changed:
            self._running += 1
        self._jobs.put(job)
        return job

    def wait(self, chunk: object) -> None:
        """See :meth:`Copier.wait`."""
        assert isinstance(chunk, _Job)
        chunk.ended.wait()
        if chunk.error is not None:
            raise chunk.error

    def forget(self, chunk: object, payloads: Sequence[Tensor]) -> None:
        """See :meth:`Copier.forget`: the queue keeps them."""

    def run(self) -> None:
        """See :meth:`Copier.run`."""
        while (job := self._jobs.get()) is not None:
            try:
                # Payloads may have been made in a step, which vLLM runs in inference mode.
                with torch.inference_mode(), self._streams.here():
                    # A copy that waits for the engine would keep others waiting.
                    job.buffer.moved.synchronize()
                    self._out.copy(zip(job.payloads, job.gathered, strict=True))
            except Exception as error:  # noqa: BLE001 - for the thread that waits
                job.error = error
            self._for_stores.append(job.buffer)
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
            job.ended.set()

    def drain(self) -> None:
        """See :meth:`Copier.drain`."""
        with self._changed:
            while self._running:
                self._changed.wait()

    def stop(self) -> None:
        """See :meth:`Copier.stop`."""
        self._jobs.put(None)
        self._for_stores.clear()
        while not self._for_loads.empty():
            self._for_loads.get()

    def load(
        self,
        copy: ChunkCopy,
        first: int,
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: object | None,
    ) -> None:
        """See :meth:`Copier.load`."""
        self._check(copy, slots)
        buffer = self._for_loads.get()
        try:
            with self._streams.here():
                parts = buffer.payloads[: len(payloads), : copy.payload_bytes]
                self._in.copy(zip(parts, payloads, strict=True))
                self._scatter(copy, buffer, first, len(payloads), slots, fence)
        finally:
            self._for_loads.put(buffer)

    def _scatter(
        self,
        copy: ChunkCopy,
        buffer: _Buffer,
        first: int,
        shards: int,
        slots: Tensor,
        fence: Any,
    ) -> None:
        streams = self._streams
        try:
            with streams.use(buffer.stream):
                if fence is not None:
                    buffer.stream.wait_event(fence)
                for call in copy.calls:
                    streams.enqueue(
                        ops.scatter_kv,
                        call.caches,
                        call.rows(slots).unsqueeze(0),
                        buffer.payloads[:shards, call.start : call.end].unsqueeze(0),
                        call.layout,
                        call.first_head + first * call.heads,
                        call.heads,
                    )
                buffer.moved.record(buffer.stream)
            buffer.moved.synchronize()
        except BaseException:
            # A device that has failed permanently does not touch the blocks any more.
            with contextlib.suppress(RuntimeError):
                buffer.moved.record(buffer.stream)
                buffer.moved.synchronize()
            raise

    def check(self) -> None:
        """See :meth:`Copier.check`."""
        with self._streams.here():
            self._asked.query()

    def fence(self) -> object:
        """See :meth:`Copier.fence`."""
        event = self._streams.event()
        event.record(self._streams.current())
        return event

    def rebind(self) -> None:
        """See :meth:`Copier.rebind`: every call looks."""

    def _check(self, copy: ChunkCopy, slots: Tensor) -> None:
        checks = self._checks if copy is self._copy else _checks_of(copy)
        for first, count, layout in checks:
            ops.check_slots(slots[first : first + count], layout)


def _checks_of(copy: ChunkCopy) -> set[tuple[int, int, PagedLayout]]:
    """Return each range of slots with each layout that it is used for, once."""
    return {
        (call.first_slot, call.count, layout)
        for call, layout in zip(copy.calls, copy.layouts, strict=True)
    }
