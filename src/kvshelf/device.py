"""The way of KV between paged caches on a device and staging buffers in host memory.

Owns the buffers on the device, the streams and the events:

Gather: on the engine's own stream, all layers and shards of a chunk in one launch, into
one of a few device buffers; from there the copy engine carries each shard to its staging
buffer, on a stream beside the engine's. The engine's stream waits for nothing, so the
blocks need be neither pinned nor fenced: they have been read when the next step begins.
Scatter: on a stream of its own and of high priority, the copy engine carries a shard to
a device buffer, and a kernel from there into the caches, after whatever the engine had
enqueued when the load began.

The device is a parameter: streams and events come from an object, and where a device has
none, :class:`InlineStreams` does at once what is enqueued.

Contracts
---------
* ``gather`` and ``fence`` are called on the step thread and never wait. When all device
  buffers are under way, ``gather`` refuses.
* ``scatter``, :meth:`Copied.wait` and ``close`` wait, and belong on background threads or
  at the end.
* A staging buffer belongs to a gather until its :class:`Copied` has ended, a device buffer
  until an event on the device says so. Staging should be page-locked: with ordinary memory
  all is right as well, but ``gather`` waits for its copy.
* Slot mappings are checked on the host before anything is enqueued, and travel with the
  launches: no copy to the device is made for them that could wait behind others.
* Nothing is allocated after construction but events.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from kvshelf import ops
from kvshelf.errors import ConfigError
from kvshelf.layout import PagedLayout

logger = logging.getLogger(__name__)

#: Chunks that may be on their way from a device to the host.
DEFAULT_RING = 4


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Layers of one layout, and their part of every shard's payload.

    Attributes
    ----------
    caches : Sequence[Tensor]
        The paged cache of each layer.
    layout : PagedLayout
        How rows lie in each of them.
    start, end : int
        Their bytes in a payload.
    heads : int
        KV heads of each shard.
    """

    caches: Sequence[Tensor]
    layout: PagedLayout
    start: int
    end: int
    heads: int


class Copied:
    """A gather that has begun. This one has ended as well."""

    def done(self) -> bool:
        """Tell whether the staging buffers are filled. Never waits."""
        return True

    def wait(self) -> None:
        """Wait until the staging buffers are filled.

        Raises
        ------
        RuntimeError
            If the device failed: what was gathered must not be used.
        """


#: A gather that was over when it began.
ENDED: Final = Copied()


# --- streams -----------------------------------------------------------------------


class Streams(Protocol):
    """Streams and events of one device, as torch has them."""

    def stream(self, *, urgent: bool) -> Any:
        """Make a stream, with high priority if `urgent`."""
        ...

    def event(self) -> Any:
        """Make an event; threads that wait for it sleep."""
        ...

    def current(self) -> Any:
        """Return the calling thread's stream."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the calling thread's."""
        ...

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """Name what is done meanwhile, for profilers."""
        ...


_cuda: Final = cast(Any, torch.cuda)  # much of it has no types


class InlineStreams:
    """Streams of a device that has none: what is enqueued is done at once."""

    def stream(self, *, urgent: bool) -> Any:
        """See :meth:`Streams.stream`."""
        return self

    def event(self) -> Any:
        """See :meth:`Streams.event`."""
        return self

    def current(self) -> Any:
        """See :meth:`Streams.current`."""
        return self

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """See :meth:`Streams.use`."""
        return contextlib.nullcontext()

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """See :meth:`Streams.annotate`."""
        return contextlib.nullcontext()

    def wait_event(self, event: Any) -> None:
        """Return at once, as all methods of a stream or an event of this kind do."""

    def record(self, stream: Any) -> None:
        """See :meth:`wait_event`."""

    def synchronize(self) -> None:
        """See :meth:`wait_event`."""

    def query(self) -> bool:
        """Whether what was enqueued is done: always."""
        return True


class CudaStreams:
    """Streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, *, urgent: bool) -> Any:
        """See :meth:`Streams.stream`."""
        return _cuda.Stream(self._device, priority=-1 if urgent else 0)

    def event(self) -> Any:
        """See :meth:`Streams.event`."""
        with _cuda.device(self._device):
            return _cuda.Event(blocking=True)

    def current(self) -> Any:
        """See :meth:`Streams.current`."""
        return _cuda.current_stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """See :meth:`Streams.use`."""
        return cast(AbstractContextManager[Any], _cuda.stream(stream))

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """See :meth:`Streams.annotate`."""
        return _nvtx_range(name)


@contextlib.contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    _cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        _cuda.nvtx.range_pop()


# --- the path of a device ----------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Buffer:
    """A device buffer and what travels with it."""

    payload: Tensor  # uint8 [shards, bytes], on the device
    stream: Any
    ready: Any  # event: the payload may be copied on
    done: Any  # event: nothing on the device uses the buffer any more
    copied: _DeviceCopied | None = None


class _DeviceCopied(Copied):
    """A gather on a device."""

    def __init__(self, path: DevicePath, buffer: _Buffer) -> None:
        self._path = path
        self._buffer: _Buffer | None = buffer

    def done(self) -> bool:
        self._path._reap()
        return self._buffer is None

    def wait(self) -> None:
        buffer = self._buffer
        if buffer is not None:
            # Used again meanwhile, the buffer is waited for longer than needed, never shorter.
            buffer.done.synchronize()
            self._path._reap()


@dataclass(slots=True)
class _Ring:
    """Device buffers for gathers: free ones, and those under way in the order of their use."""

    free: list[_Buffer] = field(default_factory=list)
    busy: deque[_Buffer] = field(default_factory=deque)


class DevicePath:
    """Copies chunks between paged caches on a device and staging buffers.

    Parameters
    ----------
    calls : Sequence[LayerCall]
        All layers; their caches are on one device.
    shards : int
        Shards of a chunk.
    ring : int
        Device buffers for gathers, each of a whole chunk. Fewer where memory is short.
    loads : int
        Device buffers for scatters, each of one shard: as many as threads that load.
    streams : Streams, optional
        The device's own when absent.

    Raises
    ------
    ConfigError
        If the device has no memory for a single buffer.
    """

    def __init__(
        self,
        calls: Sequence[LayerCall],
        shards: int,
        *,
        ring: int = DEFAULT_RING,
        loads: int = 2,
        streams: Streams | None = None,
    ) -> None:
        device = calls[0].caches[0].device
        if streams is None:
            streams = CudaStreams(device) if device.type == "cuda" else InlineStreams()
        self._calls = calls
        self._shards = shards
        self._device = device
        self._streams = streams
        self._layouts = {call.layout for call in calls}
        self._size = max(call.end for call in calls)
        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._closed = False
        for call in calls:
            ops.prepare(call.caches, call.layout)
        copy_stream = streams.stream(urgent=False)
        self._ring = _Ring(
            [self._buffer(payload, copy_stream) for payload in self._allocate(ring, shards)]
        )
        self._for_loads = [
            self._buffer(payload, streams.stream(urgent=True))
            for payload in self._allocate(loads, 1)
        ]

    def _allocate(self, count: int, shards: int) -> list[Tensor]:
        """Return up to `count` buffers, at least one."""
        buffers: list[Tensor] = []
        try:
            while len(buffers) < count:
                # Each shard's payload aligned, so that the widest vectors fit.
                room = -(-self._size // 256) * 256
                whole = torch.empty(shards, room, dtype=torch.uint8, device=self._device)
                buffers.append(whole[:, : self._size])
        except torch.OutOfMemoryError as error:
            if not buffers:
                raise ConfigError(
                    f"{self._device} has no memory for one buffer of {shards * self._size} bytes: "
                    "leave the engine less memory, or make chunk_size smaller"
                ) from error
            logger.warning(
                "%s has memory for only %d of %d buffers of %d bytes",
                self._device,
                len(buffers),
                count,
                shards * self._size,
            )
        return buffers

    def _buffer(self, payload: Tensor, stream: Any) -> _Buffer:
        return _Buffer(payload, stream, self._streams.event(), self._streams.event())

    def _check(self, slots: Tensor, payloads: Sequence[Tensor]) -> None:
        for layout in self._layouts:
            ops.check_slots(slots, layout)
        for payload in payloads:
            if payload.numel() != self._size:
                raise ValueError(f"a payload has {payload.numel()} bytes; expected {self._size}")

    # ------------------------------------------------------------- gather

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> Copied | None:
        """Begin to copy one chunk into staging buffers. Step thread; never waits.

        Parameters
        ----------
        slots : Tensor
            int64 [tokens], CPU.
        payloads : Sequence[Tensor]
            uint8 [bytes] for each shard, in host memory.

        Returns
        -------
        Copied or None
            None when there is no room on the device now; nothing has happened then.

        Raises
        ------
        ValueError
            If an argument does not fit.
        RuntimeError
            If the device failed.
        """
        if len(payloads) != self._shards:
            raise ValueError(f"{len(payloads)} payloads for {self._shards} shards")
        self._check(slots, payloads)
        self._reap()
        with self._lock:
            if self._closed or not self._ring.free:
                return None
            buffer = self._ring.free.pop()
        streams = self._streams
        try:
            with streams.annotate("kvshelf gather"):
                for call in self._calls:
                    ops.gather_kv(
                        call.caches,
                        slots.unsqueeze(0),
                        buffer.payload[:, call.start : call.end].unsqueeze(0),
                        call.layout,
                        0,
                        call.heads,
                    )
                buffer.ready.record(streams.current())
                with streams.use(buffer.stream):
                    buffer.stream.wait_event(buffer.ready)
                    for payload, filled in zip(payloads, buffer.payload, strict=True):
                        payload.copy_(filled, non_blocking=True)
                    buffer.done.record(buffer.stream)
        except BaseException:
            self._abandon(buffer)
            with self._lock:
                self._ring.free.append(buffer)
            raise
        copied = _DeviceCopied(self, buffer)
        with self._lock:
            buffer.copied = copied
            self._ring.busy.append(buffer)
        return copied

    @staticmethod
    def _abandon(buffer: _Buffer) -> None:
        # The staging buffers are the caller's again, so nothing may still use them. A device
        # that has failed for good uses nothing.
        with contextlib.suppress(RuntimeError):
            buffer.done.record(buffer.stream)
            buffer.done.synchronize()

    def _reap(self) -> None:
        """Take back the buffers whose gathers have ended."""
        with self._lock:
            busy = self._ring.busy
            while busy and busy[0].done.query():
                buffer = busy.popleft()
                copied, buffer.copied = buffer.copied, None
                if copied is not None:
                    copied._buffer = None
                self._ring.free.append(buffer)

    # ------------------------------------------------------------- scatter

    def fence(self) -> Any:
        """Note what the engine has enqueued so far. Step thread; never waits."""
        event = self._streams.event()
        event.record(self._streams.current())
        return event

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: Any = None) -> None:
        """Copy one shard of a chunk into the paged caches, and wait until it is there.

        Parameters
        ----------
        shard : int
            Counted from the first one that the caches hold.
        slots : Tensor
            int64 [tokens], CPU; −1 = skip.
        payload : Tensor
            uint8 [bytes], in host memory.
        fence : object
            What :meth:`fence` returned when the load began.

        Raises
        ------
        ValueError
            If an argument does not fit.
        RuntimeError
            If the device failed, or the path was closed.
        """
        self._check(slots, [payload])
        with self._load_ended:
            while not self._for_loads and not self._closed:
                self._load_ended.wait()
            if self._closed:
                raise RuntimeError("the caches have been given up")
            buffer = self._for_loads.pop()
        streams = self._streams
        try:
            with streams.annotate("kvshelf scatter"), streams.use(buffer.stream):
                filled = buffer.payload[0]
                filled.copy_(payload, non_blocking=True)
                if fence is not None:
                    buffer.stream.wait_event(fence)
                for call in self._calls:
                    ops.scatter_kv(
                        call.caches,
                        slots,
                        filled[call.start : call.end],
                        call.layout,
                        shard * call.heads,
                        call.heads,
                    )
                buffer.done.record(buffer.stream)
            buffer.done.synchronize()
        except BaseException:
            self._abandon(buffer)
            raise
        finally:
            with self._load_ended:
                self._for_loads.append(buffer)
                self._load_ended.notify()

    # ------------------------------------------------------------- end

    def close(self) -> None:
        """Wait for what is under way, and give the buffers up. Idempotent."""
        with self._load_ended:
            self._closed = True
            busy = list(self._ring.busy)
            self._load_ended.notify_all()
        try:
            for buffer in busy:
                buffer.done.synchronize()
            self._reap()
        except RuntimeError as error:
            logger.warning(
                "chunks that were on their way from %s are lost: %s", self._device, error
            )
        with self._lock:
            self._ring.free.clear()
            self._for_loads.clear()
