"""The way of KV between paged caches on a device and staging buffers in host memory.

Owns the buffers on the device, the streams and the events:

Gather: on the engine's own stream, all layers and shards of a chunk in one launch, into
one of a few device buffers; from there the copy engine carries each shard to its staging
buffer, on a stream beside the engine's. The engine's stream waits for nothing, so the
blocks need be neither pinned nor fenced: they have been read when the next step begins.
Scatter: on a stream of its own and of high priority, the copy engine carries a shard to
a device buffer, and a kernel from there into the caches, after whatever the engine had
enqueued when the load began. Where layers lie inside the blocks of the cache, and a block
holds what is copied of it in one piece, the copy engine carries page-locked staging into
the blocks themselves, without a buffer and without a kernel.

The device is a parameter: streams and events come from an object that also enqueues, and
where a device has none, :class:`InlineStreams` does at once what is enqueued.

Contracts
---------
* ``gather`` and ``fence`` are called on the step thread and never wait. When all device
  buffers are under way, ``gather`` refuses.
* ``scatter`` and :meth:`Copied.wait` wait, and belong on background threads. ``pause`` and
  ``close`` wait as well: for what is under way, which no storage can hold up.
* A device that fails is used no more: one line says so, and from then on gathers, scatters
  and fences raise :class:`~kvshelf.errors.DeviceUnavailableError` without asking it. Errors
  of CUDA last, so the next answer would be the same.
* A staging buffer belongs to a gather until its :class:`Copied` has ended, a device buffer
  until an event on the device says so. Staging should be page-locked: with ordinary memory
  all is right as well, but ``gather`` waits for its copy.
* Slot mappings are checked on the host before anything is enqueued, and travel with the
  launches: no copy to the device is made for them that could wait behind others.
* Nothing is allocated after construction but events: allocations are forbidden while
  somebody captures a CUDA graph, and memory is short later on.
* Background threads make the caches' device theirs only as long as they use it, and never
  touch another: that would take some hundred megabytes there.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from kvshelf import ops
from kvshelf.errors import ConfigError, DeviceUnavailableError
from kvshelf.layout import PagedLayout

logger = logging.getLogger(__name__)

#: Chunks that may be on their way from a device to the host.
DEFAULT_RING = 4
#: One part in so many of the free memory is taken for buffers: CUDA graphs, the libraries'
#: workspaces and communicators come after them.
_SHARE = 4


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

    def wait(self) -> None:
        """Wait until the staging buffers are filled.

        Raises
        ------
        DeviceUnavailableError
            What was gathered must not be used.
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
        """Make a stream and its device the calling thread's."""
        ...

    def here(self) -> AbstractContextManager[Any]:
        """Make the device the calling thread's."""
        ...

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        """Have `work` enqueue what it does on the calling thread's stream.

        int64 tensors on the host are read now, all others when the stream comes to it.
        """
        ...

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """Name what is done meanwhile, for profilers."""
        ...

    def free_bytes(self) -> int:
        """Return how much of the device's memory nobody has taken."""
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

    def here(self) -> AbstractContextManager[Any]:
        """See :meth:`Streams.here`."""
        return contextlib.nullcontext()

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        """See :meth:`Streams.enqueue`."""
        work(*arguments)

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """See :meth:`Streams.annotate`."""
        return contextlib.nullcontext()

    def free_bytes(self) -> int:
        """See :meth:`Streams.free_bytes`. Of the host's memory there is no end."""
        return sys.maxsize

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
        return _cuda.Event(blocking=True)

    def current(self) -> Any:
        """See :meth:`Streams.current`."""
        return _cuda.current_stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """See :meth:`Streams.use`."""
        return _used(self._device, stream)

    def here(self) -> AbstractContextManager[Any]:
        """See :meth:`Streams.here`."""
        return cast(AbstractContextManager[Any], _cuda.device(self._device))

    def enqueue(self, work: Callable[..., object], *arguments: Any) -> None:
        """See :meth:`Streams.enqueue`."""
        work(*arguments)

    def annotate(self, name: str) -> AbstractContextManager[Any]:
        """See :meth:`Streams.annotate`."""
        return _nvtx_range(name)

    def free_bytes(self) -> int:
        """See :meth:`Streams.free_bytes`."""
        free: int = _cuda.mem_get_info(self._device)[0]
        return free


@contextlib.contextmanager
def _used(device: torch.device, stream: Any) -> Iterator[None]:
    # The device first: at its end torch.cuda.stream sets the stream that was current before,
    # with its device, which on a new thread is device 0, and would make a context there.
    with _cuda.device(device), _cuda.stream(stream):
        yield


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

    def wait(self) -> None:
        buffer = self._buffer
        if buffer is not None:
            # Also on a device that failed: as long as it works, it writes into staging.
            with self._path._watched(to_end=True):
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
        Device buffers for gathers, each of a whole chunk.
    loads : int
        Device buffers for scatters, each of one shard: as many as threads that load. Both are
        fewer, but at least one, where a quarter of the free memory does not hold them.
    pinned : bool
        What is scattered comes from page-locked memory.
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
        pinned: bool = False,
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
        self._paused = False
        self._problem = ""
        #: Scatters that are under way.
        self._scattering = 0
        for call in calls:
            ops.prepare(call.caches, call.layout)
        self._direct = pinned and all(map(_in_blocks, calls))
        copy_stream = streams.stream(urgent=False)
        # Those for loads first: without one nothing is loaded, and they are small beside the ring.
        self._for_loads = [
            self._buffer(payload, streams.stream(urgent=True))
            for payload in self._allocate(loads, 0 if self._direct else 1)
        ]
        self._ring = _Ring(
            [self._buffer(payload, copy_stream) for payload in self._allocate(ring, shards)]
        )
        # Whoever had the memory before may still be using it on the calling thread's stream.
        born = self.fence()
        for buffer in (*self._ring.free, *self._for_loads):
            buffer.stream.wait_event(born)

    @property
    def problem(self) -> str:
        """How the device failed; empty while it works."""
        return self._problem

    @contextlib.contextmanager
    def _watched(self, *, to_end: bool = False) -> Iterator[None]:
        """Use the device; when it fails, never again but `to_end` what is under way."""
        if self._problem and not to_end:
            raise DeviceUnavailableError(self._problem)
        try:
            with self._streams.here():
                yield
        except (DeviceUnavailableError, torch.OutOfMemoryError):
            # Plain torch allocates; memory that is short now need not be so for ever.
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
                "%s. Nothing is stored or loaded any more; what was on its way is lost", problem
            )
        return DeviceUnavailableError(self._problem)

    def _allocate(self, count: int, shards: int) -> list[Tensor]:
        """Return up to `count` buffers, at least one."""
        buffers: list[Tensor] = []
        # Each shard's payload aligned, so that the widest vectors fit.
        room = -(-self._size // 256) * 256
        spared = self._streams.free_bytes() // _SHARE // max(1, shards * room)
        most = min(count, max(1, spared))
        try:
            # What is made in an engine's step, in inference mode, no other thread may write to.
            with torch.inference_mode(False):
                while len(buffers) < most:
                    whole = torch.empty(shards, room, dtype=torch.uint8, device=self._device)
                    buffers.append(whole[:, : self._size])
        except torch.OutOfMemoryError as error:
            if not buffers:
                raise ConfigError(
                    f"{self._device} has no memory for one buffer of {shards * self._size} bytes: "
                    "leave the engine less memory, or make chunk_size smaller"
                ) from error
        if len(buffers) < count:
            logger.warning(
                "%s has memory to spare for only %d of %d buffers of %d bytes",
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
        DeviceUnavailableError
            The staging buffers are free to be used.
        """
        if len(payloads) != self._shards:
            raise ValueError(f"{len(payloads)} payloads for {self._shards} shards")
        self._check(slots, payloads)
        with self._watched():
            return self._begin_gather(slots, payloads)

    def _begin_gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> Copied | None:
        self._reap()
        with self._lock:
            if self._closed or self._paused or not self._ring.free:
                return None
            buffer = self._ring.free.pop()
        streams = self._streams
        try:
            with streams.annotate("kvshelf gather"):
                for call in self._calls:
                    streams.enqueue(
                        ops.gather_kv,
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
                        streams.enqueue(payload.copy_, filled, True)
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
        """Note what the engine has enqueued so far. Step thread; never waits.

        Raises
        ------
        DeviceUnavailableError
        """
        with self._watched():
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
        DeviceUnavailableError
            The device failed, or the path is paused or closed; nothing on the device reads
            the payload or writes to the caches any more.
        """
        self._check(slots, [payload])
        with self._load_ended:
            while not (self._for_loads or self._closed or self._paused):
                self._load_ended.wait()
            if self._closed or self._paused:
                raise DeviceUnavailableError(
                    f"the KV caches on {self._device} are not to be used now: the engine sleeps, or"
                    " has given them up"
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
        self, buffer: _Buffer, shard: int, slots: Tensor, payload: Tensor, fence: Any
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
                for call in self._calls:
                    streams.enqueue(
                        ops.scatter_kv,
                        call.caches,
                        slots,
                        source[call.start : call.end],
                        call.layout,
                        shard * call.heads,
                        call.heads,
                    )
                buffer.done.record(buffer.stream)
            buffer.done.synchronize()
        except BaseException:
            self._abandon(buffer)
            raise

    # ------------------------------------------------------------- end

    def pause(self) -> None:
        """Wait for what is under way, and begin nothing more: the caches go away for a while."""
        self._stop(for_ever=False)

    def resume(self) -> None:
        """Go on after :meth:`pause`: the caches are there again, at the same place or another."""
        with self._load_ended:
            self._paused = False

    def close(self) -> None:
        """Wait for what is under way, and give the buffers up. Idempotent."""
        self._stop(for_ever=True)
        with self._lock:
            self._ring.free.clear()
            self._for_loads.clear()

    def _stop(self, *, for_ever: bool) -> None:
        with self._load_ended:
            self._paused = True
            self._closed = self._closed or for_ever
            self._load_ended.notify_all()
            while self._scattering:
                self._load_ended.wait()
            busy = list(self._ring.busy)
        # A device on which nothing can be waited for does nothing any more.
        with contextlib.suppress(DeviceUnavailableError), self._watched(to_end=True):
            for buffer in busy:
                buffer.done.synchronize()
            self._reap()


def _in_blocks(call: LayerCall) -> bool:
    """Whether layers lie inside blocks, and what is copied of a block of a layer in one piece."""
    if len(call.caches) < 2 or not ops.blocks_in_one_piece(call.layout, call.heads):
        return False
    starts = [cache.data_ptr() for cache in call.caches]
    return max(starts) - min(starts) < call.layout.block_stride
