"""The KV caches of a device: their device buffers, and when copies may run.

Owns the memory of the device buffers, the choice of the copier, the thread that copies to the host
(``kvshelf-copy``), and the states of the caches: in use, paused, closed, failed.
:mod:`kvshelf.kv.copier` says how chunks are copied.

Gather: kernels on the engine's own stream copy all layers and shards of a chunk into one of a few
device buffers; from there it is copied to host memory, beside the engine's work. The engine's
stream waits for nothing, so the blocks need neither pins nor fences: they have been read when the
next step begins.
Scatter: the payloads of one or several shards are copied to a device buffer, and kernels on a
high-priority stream copy them from there into the caches, after all work that the engine had
enqueued when the load began. Where the layers lie inside the blocks of the cache, and a shard's
part of a block is contiguous and large, page-locked memory is copied directly into the blocks,
without a device buffer and without a kernel.

Contracts
---------
* The step thread calls ``gather`` and ``fence``, which never wait. While all device buffers
  are in use, ``gather`` refuses.
* ``scatter`` and :meth:`PendingCopy.wait` wait, and belong on background threads. ``pause``
  and ``close`` wait as well: for copies between host and device, which no storage can delay.
* An error of the device ends the gather, scatter or fence that met it, which raises
  :class:`~kvshelf.errors.DeviceUnavailableError`. A device that reports it again when it is queried
  has failed for good, and is not used again: one log line says so, and from then on all of these
  raise without a call to the device.
* A payload belongs to a gather until :meth:`PendingCopy.wait` has returned, a device buffer until
  its chunk is on the host. Payloads should be page-locked: ordinary memory gives the same results,
  more slowly.
* Slot mappings are checked on the host before any work is enqueued, and travel as kernel
  arguments: they need no copy to the device that could queue behind others.
* After construction only events are allocated: allocations are forbidden during the capture
  of a CUDA graph, and memory is short later on.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from kvshelf.errors import ConfigError, DeviceUnavailableError, UnsupportedError
from kvshelf.kv import ops
from kvshelf.kv.caches import (
    TAILS_KEPT,
    KVCache,
    KVMemory,
    LayerCall,
    PendingCopy,
    slot_count,
)
from kvshelf.kv.copier import ChunkCopy, Copier
from kvshelf.kv.layout import PagedLayout, PermutedLayout
from kvshelf.kv.native_copier import native_copier
from kvshelf.kv.streams import Streams, streams_of
from kvshelf.kv.tensor_copier import TensorCopier
from kvshelf.logs import RateLimitedLog
from kvshelf.traces import trace_range

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Chunks that may be in transit from a device to the host at once.
DEFAULT_RING = 4
#: Most device buffers for loads: while one is filled, another is scattered, and a third is handed
#: from thread to thread.
LOAD_BUFFERS: Final = 3
#: A copy from the host directly into a block is worth it from this size on. Smaller ones cost the
#: copy engine more than a kernel that distributes them: 18 KiB get a tenth of the bandwidth.
DIRECT_BYTES: Final = 64 << 10
#: At most one part in this many of the free memory is used for buffers: CUDA graphs, the
#: libraries' workspaces and communicators are allocated later.
_SHARE = 4
_END_SECONDS = 1.0


class _PendingGather(PendingCopy):
    """A gather on a device."""

    def __init__(self, cache: DeviceKVCache, chunk: object, payloads: Sequence[Tensor]) -> None:
        self._cache = cache
        self._chunk: object | None = chunk
        self._number = cache._gathers
        # The compiled library knows their addresses only.
        self._payloads = payloads
        self._lock = threading.Lock()
        self._error: DeviceUnavailableError | None = None

    @property
    def ended(self) -> bool:
        """See :meth:`PendingCopy.ended`.

        Chunks reach the host in the order of their gathers, and each needs a device buffer until
        then: when there were as many later gathers as there are buffers, this one has ended.
        """
        return self._cache._gathers - self._number >= self._cache._ring

    def wait(self) -> None:
        """See :meth:`PendingCopy.wait`."""
        with self._lock:
            chunk, self._chunk = self._chunk, None
            if chunk is not None:
                try:
                    # Also on a device that failed: while it still works, it writes to the host.
                    self._cache._use(self._cache._copier.wait, chunk, in_flight=True)
                except DeviceUnavailableError as error:
                    self._error = error
            if self._error is not None:
                raise self._error

    def __del__(self) -> None:
        if self._chunk is not None:
            self._cache._copier.forget(self._chunk, self._payloads)


class _DeviceMemory(KVMemory):
    """What is copied in one way, chunks or tails, in the caches of a device."""

    _copy: ChunkCopy

    @property
    @abstractmethod
    def _cache(self) -> DeviceKVCache: ...

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy | None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.gather`. Step thread; never waits."""
        return self._cache._gather(self._copy, slots, payloads)

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.scatter`.

        It also raises DeviceUnavailableError while the caches are paused, and once they are
        closed.
        """
        self._cache._scatter(self._copy, [shard], slots, [payload], fence)

    def scatter_chunk(
        self,
        shards: Sequence[int],
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: object = None,
    ) -> None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.scatter_chunk`; as :meth:`scatter`."""
        known = list(self._cache._places)
        if list(shards) != known or len(payloads) != len(shards):
            raise ValueError(
                f"{len(payloads)} payloads for the shards {list(shards)}; expected one for each of"
                f" {known}"
            )
        self._cache._scatter(self._copy, shards, slots, payloads, fence)


class _Tails(_DeviceMemory):
    """Tails of one number of tokens in the caches of a device."""

    def __init__(self, cache: DeviceKVCache, copy: ChunkCopy) -> None:
        self._of = cache
        self._copy = copy

    @property
    def _cache(self) -> DeviceKVCache:
        return self._of


class DeviceKVCache(_DeviceMemory, KVCache):
    """KV caches on a device, with buffers and streams of its own.

    Parameters
    ----------
    calls : Mapping[int, Sequence[LayerCall]]
        The copy calls of each shard, in the order of the shards. The caches are on one device,
        and the shards differ only in their heads: each has those after the one before it.
    ring : int
        Device buffers for gathers, each of a whole chunk.
    loads : int
        The number of threads that load: more device buffers for scatters, each of a whole chunk,
        are not made, nor more than :data:`LOAD_BUFFERS`. There are fewer of both, but at least
        one, where a quarter of the free memory is too small.
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
        #: The place of each shard among the shards of the caches.
        self._places = {shard: place for place, shard in enumerate(calls)}
        self._first = first = next(iter(calls.values()))
        self._device = first[0].caches[0].device
        self._streams = streams_of(self._device) if streams is None else streams
        self._copy = copy = _chunk_copy(first, len(calls))
        self._tail_copy = functools.lru_cache(TAILS_KEPT)(copy.of_tail)
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self._paused = False
        self._problem = ""
        self._log = RateLimitedLog(logger)
        #: Number of calls that use the device.
        self._running = 0
        for call, layout in zip(first, copy.layouts, strict=True):
            ops.prepare(call.caches, layout)
        direct = pinned and all(map(_in_blocks, first, copy.layouts))
        native = native_copier(copy, self._streams, direct=direct)
        self._copier: Copier = native or TensorCopier(calls, self._streams)
        #: So many gathers later, a gather has ended.
        self._ring = sys.maxsize
        if native is None:
            logger.warning(
                "kvshelf's compiled library does not store and load on %s (%s): %s gathers and"
                " scatters, and each store lengthens the engine's step",
                self._device,
                ops.kernel_problem(self._device) or "the caches have too many slots",
                ops.implementation(self._device),
            )
        else:
            # Buffers for loads first: loads need at least one, and they are small beside the ring.
            for payloads in self._allocate(
                loads if direct else min(loads, LOAD_BUFFERS), 0 if direct else copy.shards
            ):
                native.add_buffer(payloads, for_loads=True)
            buffers = self._allocate(ring, copy.shards)
            for payloads in buffers:
                native.add_buffer(payloads, for_loads=False)
            self._ring = len(buffers)
        #: Number of gathers that have begun.
        self._gathers = 0
        self._thread = threading.Thread(target=self._copier.run, name="kvshelf-copy", daemon=True)
        self._thread.start()
        # The thread of caches that were not closed ends with them, or before Python does.
        weakref.finalize(self, _end_thread, self._copier, self._thread)

    @property
    def _cache(self) -> DeviceKVCache:
        return self

    @property
    def problem(self) -> str:
        """See :attr:`KVCache.problem`."""
        return self._problem

    def _use(
        self, work: Callable[..., Result], *arguments: object, in_flight: bool = False
    ) -> Result:
        """Use the device; once it failed, only to wait for copies that are `in_flight`."""
        if self._problem and not in_flight:
            raise DeviceUnavailableError(self._problem)
        try:
            return work(*arguments)
        except (DeviceUnavailableError, torch.OutOfMemoryError):
            # The copies in plain torch allocate; a shortage of memory may be temporary.
            raise
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> DeviceUnavailableError:
        text = str(error).strip().partition("\n")[0]
        problem = f"{self._device} failed: {text}"
        if not self._problem and self._works():
            self._log.warning("%s. That chunk is not copied; the device still works", problem)
            return DeviceUnavailableError(problem)
        with self._changed:
            first, self._problem = not self._problem, self._problem or problem
        if first:
            logger.error(
                "%s. No chunks are stored or loaded any more; those in transit are lost", problem
            )
        return DeviceUnavailableError(self._problem)

    def _works(self) -> bool:
        try:
            self._copier.check()
        except RuntimeError:
            return False
        return True

    def _allocate(self, count: int, shards: int) -> list[Tensor]:
        """Return up to `count` buffers, at least one."""
        buffers: list[Tensor] = []
        # Each shard's payload is aligned, so that the kernels can use the widest vectors.
        size = self._copy.payload_bytes
        aligned = -(-size // 256) * 256
        spared = self._streams.free_bytes() // _SHARE // max(1, shards * aligned)
        most = min(count, max(1, spared))
        try:
            # vLLM's step runs under inference_mode. Other threads cannot write to tensors that
            # are created there, so leave it while allocating.
            with torch.inference_mode(False):
                while len(buffers) < most:
                    whole = torch.empty(shards, aligned, dtype=torch.uint8, device=self._device)
                    buffers.append(whole[:, :size])
        except torch.OutOfMemoryError as error:
            if not buffers:
                raise ConfigError(
                    f"{self._device} has no memory for one buffer of {shards * size} bytes: "
                    "give the engine less memory, or make chunk_size smaller"
                ) from error
        if len(buffers) < count:
            logger.warning(
                "%s has free memory for only %d of %d buffers of %d bytes",
                self._device,
                len(buffers),
                count,
                shards * size,
            )
        return buffers

    def _check(self, copy: ChunkCopy, slots: Tensor, payloads: Sequence[Tensor]) -> None:
        """Check all but the values of the slots, which the copiers check."""
        tokens, size = copy.tokens, copy.payload_bytes
        if not (
            slots.is_cpu
            and slots.dtype == torch.int64
            and slots.shape == (tokens,)
            and slots.is_contiguous()
        ):
            raise ValueError(
                f"slot_mapping is {slots.dtype} {list(slots.shape)} on {slots.device}; expected a"
                f" contiguous int64 CPU tensor [{tokens}]"
            )
        uint8 = torch.uint8
        for payload in payloads:
            if payload.numel() != size:
                raise ValueError(f"a payload has {payload.numel()} bytes; expected {size}")
            if payload.dtype is not uint8 or not (payload.is_cpu and payload.is_contiguous()):
                raise ValueError(
                    f"a payload is {payload.dtype} on {payload.device} with strides"
                    f" {list(payload.stride())}; expected contiguous uint8 in host memory"
                )

    def _begin(self) -> bool:
        """Whether the caches may be used: then they stay so until :meth:`_end`."""
        with self._changed:
            usable = not (self._closed or self._paused)
            self._running += usable
            return usable

    def _end(self) -> None:
        with self._changed:
            self._running -= 1
            if self._paused:
                self._changed.notify_all()

    # ------------------------------------------------------------- gather

    def _gather(
        self, copy: ChunkCopy, slots: Tensor, payloads: Sequence[Tensor]
    ) -> PendingCopy | None:
        if len(payloads) != copy.shards:
            raise ValueError(f"{len(payloads)} payloads for {copy.shards} shards")
        self._check(copy, slots, payloads)
        if not self._begin():
            return None
        try:
            with trace_range("kvshelf gather"):
                chunk = self._use(self._copier.store, copy, slots, payloads)
        finally:
            self._end()
        if chunk is None:
            return None
        self._gathers += 1
        return _PendingGather(self, chunk, payloads)

    # ------------------------------------------------------------- scatter

    def fence(self) -> object:
        """See :meth:`~kvshelf.kv.caches.KVCache.fence`. Step thread; never waits."""
        return self._use(self._copier.fence)

    def _scatter(
        self,
        copy: ChunkCopy,
        shards: Sequence[int],
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: object,
    ) -> None:
        first = self._places[shards[0]]
        self._check(copy, slots, payloads)
        if not self._begin():
            raise DeviceUnavailableError(
                f"the KV caches on {self._device} cannot be used now: the engine sleeps, or has"
                " released them"
            )
        try:
            with trace_range("kvshelf scatter"):
                self._use(self._copier.load, copy, first, slots, payloads, fence)
        finally:
            self._end()

    # ------------------------------------------------------------- tails

    def of_tail(self, tokens: int) -> KVMemory:
        """See :meth:`~kvshelf.kv.caches.KVMemory.of_tail`."""
        return _Tails(self, self._tail_copy(tokens))

    # ------------------------------------------------------------- end

    def pause(self) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.pause`."""
        with self._changed:
            self._paused = True
            while self._running:
                self._changed.wait()
        self._copier.drain()

    def resume(self) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.resume`."""
        with self._changed:
            if not self._paused or self._closed:
                return
        for call, layout in zip(self._first, self._copy.layouts, strict=True):
            ops.prepare(call.caches, layout)
        self._copier.rebind()
        with self._changed:
            self._paused = False

    def close(self) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.close`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self.pause()
        self._copier.stop()
        self._thread.join()


def _end_thread(copier: Copier, thread: threading.Thread) -> None:
    copier.stop()
    if thread is not threading.current_thread():
        thread.join(_END_SECONDS)


def _chunk_copy(first: Sequence[LayerCall], shards: int) -> ChunkCopy:
    layouts = [_strided(call) for call in first]
    return ChunkCopy(first, layouts, shards, max(call.end for call in first), slot_count(first))


def _strided(call: LayerCall) -> PagedLayout:
    if isinstance(call.layout, PermutedLayout):
        raise UnsupportedError(
            f"the KV caches on {call.caches[0].device} are permuted inside their blocks; gather and"
            " scatter of such caches exist for CPUs only"
        )
    return call.layout


def _in_blocks(call: LayerCall, layout: PagedLayout) -> bool:
    """Whether the layers lie inside blocks, each with a shard's part in one large piece."""
    one_piece = call.parts == 1 and ops.blocks_in_one_piece(layout, call.heads)
    if len(call.caches) < 2 or not one_piece:
        return False
    if layout.block_size * call.heads * layout.row_bytes < DIRECT_BYTES:
        return False
    starts = [cache.data_ptr() for cache in call.caches]
    return max(starts) - min(starts) < layout.block_stride
