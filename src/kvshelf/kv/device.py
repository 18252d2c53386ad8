"""Copies KV between paged caches on a device and staging buffers in host memory.

Owns the buffers on the device, the streams and the events:

Gather: one launch on the engine's own stream copies all layers and shards of a chunk into one
of a few device buffers; from there the copy engine transfers each shard to its staging
buffer, on a second stream. The engine's stream waits for nothing, so the blocks need neither
pins nor fences: they have been read when the next step begins.
Scatter: on a high-priority stream of its own, the copy engine transfers a shard to a device
buffer, and a kernel copies it from there into the caches, after all work that the engine had
enqueued when the load began. Where the layers lie inside the blocks of the cache, and a
shard's part of a block is contiguous, the copy engine transfers page-locked staging directly
into the blocks, without a device buffer and without a kernel.

The device is a parameter: streams and events come from an object that also enqueues the
work. For a device without streams, :class:`Streams` itself does the work at once.

Contracts
---------
* The step thread calls ``gather`` and ``fence``, which never wait. While all device buffers
  are in use, ``gather`` refuses.
* ``scatter`` and :meth:`PendingCopy.wait` wait, and belong on background threads. ``pause``
  and ``close`` wait as well: for copies between host and device, which no storage can delay.
* A device that failed is not used again: one log line says so, and from then on gathers,
  scatters and fences raise :class:`~kvshelf.errors.DeviceUnavailableError` without a call to
  the device. CUDA errors are permanent, so the next call would fail as well.
* A staging buffer belongs to a gather until its :class:`PendingCopy` has ended, a device
  buffer until an event on the device has occurred. Staging should be page-locked: ordinary
  memory gives the same results, but ``gather`` then waits for its copy.
* Slot mappings are checked on the host before any work is enqueued, and travel as kernel
  arguments: they need no copy to the device that could queue behind others.
* After construction only events are allocated: allocations are forbidden during the capture
  of a CUDA graph, and memory is short later on.
* Background threads make the caches' device current only while they use it, and never touch
  another device: a context there would take several hundred megabytes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor

from kvshelf.errors import ConfigError, DeviceUnavailableError, UnsupportedError
from kvshelf.kv import ops
from kvshelf.kv.caches import KVCache, LayerCall, PendingCopy
from kvshelf.kv.layout import PagedLayout, PermutedLayout

logger = logging.getLogger(__name__)

#: Chunks that may be in transit from a device to the host at once.
DEFAULT_RING = 4
#: At most one part in this many of the free memory is used for buffers: CUDA graphs, the
#: libraries' workspaces and communicators are allocated later.
_SHARE = 4


# --- streams -----------------------------------------------------------------------


class Streams:
    """Streams and events of one device.

    This class is for a device that has none: work is done when it is enqueued, and an object of
    the class is the only stream and the only event.
    """

    def stream(self, *, urgent: bool) -> Any:
        """Make a stream, with high priority if `urgent`."""
        return self

    def event(self) -> Any:
        """Make an event; a thread that waits for it sleeps."""
        return self

    def current(self) -> Any:
        """Return the calling thread's stream."""
        return self

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream and its device the calling thread's."""
        return contextlib.nullcontext()

    def here(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's."""
        return contextlib.nullcontext()

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call `work`, which enqueues its work on the calling thread's stream.

        int64 tensors on the host are read during the call, all others when the work runs.
        """
        work(*arguments)

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """Name the work in the context, for profilers."""
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        """Return the bytes of the device's memory that are free."""
        return sys.maxsize

    def wait_event(self, event: Any) -> None:
        """Return at once, as all methods of the stream and of the event do."""

    def record(self, stream: Any) -> None:
        """See :meth:`wait_event`."""

    def synchronize(self) -> None:
        """See :meth:`wait_event`."""

    def query(self) -> bool:
        """Whether the enqueued work is done: always."""
        return True


_cuda: Final = cast(Any, torch.cuda)  # much of it has no types


class _CudaStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, *, urgent: bool) -> Any:
        return _cuda.Stream(self._device, priority=-1 if urgent else 0)

    def event(self) -> Any:
        return _cuda.Event(blocking=True)

    def current(self) -> Any:
        return _cuda.current_stream(self._device)

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        # The device first: at its exit torch.cuda.stream restores the stream that was current
        # before with its device. On a new thread that is device 0, and would create a context
        # there.
        with _cuda.device(self._device), _cuda.stream(stream):
            yield

    def here(self) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], _cuda.device(self._device))

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        return cast(AbstractContextManager[Any], _cuda.nvtx.range(name))

    def free_bytes(self) -> int:
        return int(_cuda.mem_get_info(self._device)[0])


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return _CudaStreams(device) if device.type == "cuda" else Streams()


# --- the caches of a device --------------------------------------------------------


@dataclass(eq=False, slots=True)
class _DeviceBuffer:
    """A device buffer with its stream and events."""

    payload: Tensor  # uint8 [shards, bytes], on the device
    stream: Any
    ready: Any  # event: the payload is complete and may be copied to the host
    done: Any  # event: nothing on the device uses the buffer any more
    pending: _PendingGather | None = None


class _PendingGather(PendingCopy):
    """A gather on a device."""

    def __init__(self, cache: DeviceKVCache, buffer: _DeviceBuffer) -> None:
        self._cache = cache
        self._buffer: _DeviceBuffer | None = buffer

    def wait(self) -> None:
        buffer = self._buffer
        if buffer is not None:
            # Also on a device that failed: while it still works, it writes into staging.
            with self._cache._watched(in_flight=True):
                # If the buffer was reused meanwhile, this waits longer than needed, never shorter.
                buffer.done.synchronize()
                self._cache._reap()


@dataclass(slots=True)
class _Ring:
    """Device buffers for gathers: free ones, and those in use in the order of their use."""

    free: list[_DeviceBuffer] = field(default_factory=list)
    busy: deque[_DeviceBuffer] = field(default_factory=deque)


class DeviceKVCache(KVCache):
    """KV caches on a device, with buffers and streams of its own.

    Parameters
    ----------
    calls : Mapping[int, Sequence[LayerCall]]
        The copy calls of each shard, in the order of the shards. The caches are on one device,
        and the shards differ only in their heads: each has those after the one before it.
    ring : int
        Device buffers for gathers, each of a whole chunk.
    loads : int
        Device buffers for scatters, each of one shard: the number of threads that load. There
        are fewer of both, but at least one, where a quarter of the free memory is too small.
    pinned : bool
        The payloads of scatters are page-locked.
    streams : Streams, optional
        The device's own when absent.

    Raises
    ------
    ConfigError
        If the device has no memory for a single buffer.
    UnsupportedError
        If the elements of a cache are permuted, which no kernel supports.
    """

    def __init__(
        self,
        calls: Mapping[int, Sequence[LayerCall]],
        *,
        ring: int = DEFAULT_RING,
        loads: int = 2,
        pinned: bool = False,
        streams: Streams | None = None,
    ) -> None:
        self._calls = calls
        #: The calls of the first shard: a gather copies the heads of all shards from there on.
        self._first = first = next(iter(calls.values()))
        self._device = device = first[0].caches[0].device
        layouts = [_strided(call) for call in first]
        self._layouts = set(layouts)
        if streams is None:
            streams = streams_of(device)
        self._streams = streams
        self._size = max(call.end for call in first)
        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        self._closed = False
        self._paused = False
        self._problem = ""
        #: Number of scatters that run.
        self._scattering = 0
        for call, layout in zip(first, layouts, strict=True):
            ops.prepare(call.caches, layout)
        self._direct = pinned and all(map(_in_blocks, first, layouts))
        copy_stream = streams.stream(urgent=False)
        # Buffers for loads first: loads need at least one, and they are small beside the ring.
        self._for_loads = [
            self._buffer(payload, streams.stream(urgent=True))
            for payload in self._allocate(loads, 0 if self._direct else 1)
        ]
        self._ring = _Ring(
            [self._buffer(payload, copy_stream) for payload in self._allocate(ring, len(calls))]
        )
        # The memory's previous owner may still be using it on the calling thread's stream.
        born = self.fence()
        for buffer in (*self._ring.free, *self._for_loads):
            buffer.stream.wait_event(born)

    @property
    def problem(self) -> str:
        """See :attr:`KVCache.problem`."""
        return self._problem

    @contextlib.contextmanager
    def _watched(self, *, in_flight: bool = False) -> Iterator[None]:
        """Use the device; once it failed, only to wait for copies that are `in_flight`."""
        if self._problem and not in_flight:
            raise DeviceUnavailableError(self._problem)
        try:
            with self._streams.here():
                yield
        except (DeviceUnavailableError, torch.OutOfMemoryError):
            # The copies in plain torch allocate; a shortage of memory may be temporary.
            raise
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> DeviceUnavailableError:
        text = str(error).strip().partition("\n")[0]
        problem = f"{self._device} failed: {text}"
        with self._lock:
            first, self._problem = not self._problem, self._problem or problem
        if first:
            logger.error(
                "%s. No chunks are stored or loaded any more; those in transit are lost", problem
            )
        return DeviceUnavailableError(self._problem)

    def _allocate(self, count: int, shards: int) -> list[Tensor]:
        """Return up to `count` buffers, at least one."""
        buffers: list[Tensor] = []
        # Each shard's payload is aligned, so that the kernels can use the widest vectors.
        room = -(-self._size // 256) * 256
        spared = self._streams.free_bytes() // _SHARE // max(1, shards * room)
        most = min(count, max(1, spared))
        try:
            # vLLM's step runs under inference_mode. Other threads cannot write to tensors that
            # are created there, so leave it while allocating.
            with torch.inference_mode(False):
                while len(buffers) < most:
                    whole = torch.empty(shards, room, dtype=torch.uint8, device=self._device)
                    buffers.append(whole[:, : self._size])
        except torch.OutOfMemoryError as error:
            if not buffers:
                raise ConfigError(
                    f"{self._device} has no memory for one buffer of {shards * self._size} bytes: "
                    "give the engine less memory, or make chunk_size smaller"
                ) from error
        if len(buffers) < count:
            logger.warning(
                "%s has free memory for only %d of %d buffers of %d bytes",
                self._device,
                len(buffers),
                count,
                shards * self._size,
            )
        return buffers

    def _buffer(self, payload: Tensor, stream: Any) -> _DeviceBuffer:
        return _DeviceBuffer(payload, stream, self._streams.event(), self._streams.event())

    def _check(self, slots: Tensor, payloads: Sequence[Tensor]) -> None:
        for layout in self._layouts:
            ops.check_slots(slots, layout)
        for payload in payloads:
            if payload.numel() != self._size:
                raise ValueError(f"a payload has {payload.numel()} bytes; expected {self._size}")

    # ------------------------------------------------------------- gather

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy | None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.gather`. Step thread; never waits."""
        if len(payloads) != len(self._calls):
            raise ValueError(f"{len(payloads)} payloads for {len(self._calls)} shards")
        self._check(slots, payloads)
        with self._watched():
            return self._begin_gather(slots, payloads)

    def _begin_gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy | None:
        self._reap()
        with self._lock:
            if self._closed or self._paused or not self._ring.free:
                return None
            buffer = self._ring.free.pop()
        streams = self._streams
        try:
            with streams.annotate("kvshelf gather"):
                for call in self._first:
                    streams.enqueue(
                        ops.gather_kv,
                        call.caches,
                        slots.unsqueeze(0),
                        buffer.payload[:, call.start : call.end].unsqueeze(0),
                        call.layout,
                        call.first_head,
                        call.heads,
                    )
                buffer.ready.record(streams.current())
                with streams.use(buffer.stream):
                    buffer.stream.wait_event(buffer.ready)
                    for payload, filled in zip(payloads, buffer.payload, strict=True):
                        streams.enqueue(payload.copy_, filled, True)
                    buffer.done.record(buffer.stream)
        except BaseException:
            self._abandon(buffer)
            with self._lock:
                self._ring.free.append(buffer)
            raise
        pending = _PendingGather(self, buffer)
        with self._lock:
            buffer.pending = pending
            self._ring.busy.append(buffer)
        return pending

    @staticmethod
    def _abandon(buffer: _DeviceBuffer) -> None:
        # The staging buffers are the caller's again, so the device must not use them any more.
        # A device that has failed permanently does not.
        with contextlib.suppress(RuntimeError):
            buffer.done.record(buffer.stream)
            buffer.done.synchronize()

    def _reap(self) -> None:
        """Free the buffers whose gathers have ended."""
        with self._lock:
            busy = self._ring.busy
            while busy and busy[0].done.query():
                buffer = busy.popleft()
                pending, buffer.pending = buffer.pending, None
                if pending is not None:
                    pending._buffer = None
                self._ring.free.append(buffer)

    # ------------------------------------------------------------- scatter

    def fence(self) -> object:
        """See :meth:`~kvshelf.kv.caches.KVCache.fence`. Step thread; never waits."""
        with self._watched():
            event = self._streams.event()
            event.record(self._streams.current())
            return event

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.scatter`.

        It also raises DeviceUnavailableError while the caches are paused, and once they are
        closed.
        """
        self._check(slots, [payload])
        with self._load_ended:
            while not (self._for_loads or self._closed or self._paused):
                self._load_ended.wait()
            if self._closed or self._paused:
                raise DeviceUnavailableError(
                    f"the KV caches on {self._device} cannot be used now: the engine sleeps, or has"
                    " released them"
                )
            buffer = self._for_loads.pop()
            self._scattering += 1
        try:
            with self._watched():
                self._scatter_by(buffer, shard, slots, payload, fence)
        finally:
            with self._load_ended:
                self._for_loads.append(buffer)
                self._scattering -= 1
                self._load_ended.notify_all()

    def _scatter_by(
        self, buffer: _DeviceBuffer, shard: int, slots: Tensor, payload: Tensor, fence: object
    ) -> None:
        streams = self._streams
        try:
            with streams.annotate("kvshelf scatter"), streams.use(buffer.stream):
                source = payload
                if not self._direct:
                    source = buffer.payload[0]
                    streams.enqueue(source.copy_, payload, True)
                if fence is not None:
                    buffer.stream.wait_event(fence)
                for call in self._calls[shard]:
                    streams.enqueue(
                        ops.scatter_kv,
                        call.caches,
                        call.rows(slots),
                        source[call.start : call.end],
                        call.layout,
                        call.first_head,
                        call.heads,
                    )
                buffer.done.record(buffer.stream)
            buffer.done.synchronize()
        except BaseException:
            self._abandon(buffer)
            raise

    # ------------------------------------------------------------- end

    def pause(self) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.pause`."""
        self._stop(permanently=False)

    def resume(self) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.resume`."""
        with self._load_ended:
            self._paused = False

    def close(self) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.close`."""
        self._stop(permanently=True)
        with self._lock:
            self._ring.free.clear()
            self._for_loads.clear()

    def _stop(self, *, permanently: bool) -> None:
        with self._load_ended:
            self._paused = True
            self._closed = self._closed or permanently
            self._load_ended.notify_all()
            while self._scattering:
                self._load_ended.wait()
            busy = list(self._ring.busy)
        # A device on which no event can be waited for does no work any more.
        with contextlib.suppress(DeviceUnavailableError), self._watched(in_flight=True):
            for buffer in busy:
                buffer.done.synchronize()
            self._reap()


def _strided(call: LayerCall) -> PagedLayout:
    if isinstance(call.layout, PermutedLayout):
        raise UnsupportedError(
            f"the KV caches on {call.caches[0].device} are permuted inside their blocks; gather and"
            " scatter of such caches exist for CPUs only"
        )
    return call.layout


def _in_blocks(call: LayerCall, layout: PagedLayout) -> bool:
    """Whether the layers lie inside blocks, each with a shard's part in one piece."""
    one_piece = call.parts == 1 and ops.blocks_in_one_piece(layout, call.heads)
    if len(call.caches) < 2 or not one_piece:
        return False
    starts = [cache.data_ptr() for cache in call.caches]
    return max(starts) - min(starts) < layout.block_stride
