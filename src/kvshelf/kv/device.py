"""The KV caches of a device: their device buffers, and when copies may run.

Owns the memory of the device buffers and the states of the caches: in use, paused, closed, failed.
:mod:`kvshelf.kv.copier` says how chunks are copied, and who may use what when.

Contracts
---------
* The step thread calls ``gather`` and ``fence``, which never wait. While all device buffers
  are in use, ``gather`` refuses.
* ``scatter`` and :meth:`PendingCopy.wait` wait, and belong on background threads. ``pause``
  and ``close`` wait as well, until a deadline, for copies between host and device.
* An error of the device ends the gather, scatter or fence that met it, which raises
  :class:`~kvshelf.errors.DeviceUnavailableError`. A device that reports it again when it is queried
  has failed for good, as has one that does not answer. It is not used again: one log line says so,
  and from then on all of these raise without a call to the device.
* A payload belongs to a gather until :meth:`PendingCopy.done`. Payloads should be page-locked:
  ordinary memory gives the same results, more slowly.
* Slot mappings are checked on the host before any work is enqueued, and travel as kernel
  arguments: they need no copy to the device that could queue behind others.
* Where an engine's buffers are taken when the caches are made, only events are allocated later.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

from kvshelf.errors import ConfigError, DeviceStuckError, DeviceUnavailableError
from kvshelf.kv import ops
from kvshelf.kv.caches import TAILS_KEPT, KVCache, KVMemory, LayerCall, PendingCopy
from kvshelf.kv.copier import Copier, CopyPlan
from kvshelf.kv.layout import PagedLayout
from kvshelf.kv.streams import Streams
from kvshelf.logs import RateLimitedLog
from kvshelf.traces import trace_range

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Device memory for the chunks of an engine that are on their way, and their most.
BUFFER_BYTES: Final = 256 << 20
MOST_BUFFERS: Final = 8
#: Buffers for loads among them: while one is filled, another is scattered.
LOAD_BUFFERS: Final = 2
#: At most one part in this many of the free memory is used for buffers: CUDA graphs, the
#: libraries' workspaces and communicators are allocated later.
_SHARE: Final = 4
_PAUSE_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 2.0


class _DeviceState:
    """Whether a device works, as far as its errors tell."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self.problem = ""
        self._device = device
        self._streams = streams
        self._lock = threading.Lock()
        self._log = RateLimitedLog(logger)

    def note(self, error: RuntimeError) -> RuntimeError:
        """Note an error of the device; return the one that callers get."""
        if isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, DeviceUnavailableError) and not isinstance(error, DeviceStuckError)
        ):
            # The copies in plain torch allocate; a shortage of memory may be temporary.
            return error
        text = str(error).strip().partition("\n")[0]
        problem = f"{self._device} failed: {text}"
        is_stuck = isinstance(error, DeviceStuckError)
        if not self.problem and not is_stuck and self._works():
            self._log.warning("%s. That chunk is not copied; the device still works", problem)
            return DeviceUnavailableError(problem)
        with self._lock:
            is_first, self.problem = not self.problem, self.problem or problem
        if is_first:
            logger.error(
                "%s. No chunks are stored or loaded any more; those in transit are lost", problem
            )
        return DeviceUnavailableError(self.problem)

    def _works(self) -> bool:
        try:
            with self._streams.here():
                self._streams.event().query()
        except RuntimeError:
            return False
        return True


class _DeviceMemory(KVMemory):
    """What is copied in one way, chunks or tails, in the caches of a device."""

    _plan: CopyPlan

    @property
    @abstractmethod
    def _cache(self) -> DeviceKVCache: ...

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy | None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.gather`. Step thread; never waits."""
        return self._cache._gather(self._plan, slots, payloads)

    def scatter(self, shard: int, slots: Tensor, payload: Tensor, fence: object = None) -> None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.scatter`.

        It also raises DeviceUnavailableError while the caches are paused, and once they are
        closed.
        """
        self.scatter_chunk([shard], slots, [payload], fence)

    def scatter_chunk(
        self,
        shards: Sequence[int],
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: object = None,
    ) -> None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.scatter_chunk`; as :meth:`scatter`."""
        known = list(self._plan.calls)
        first = known.index(shards[0]) if shards and shards[0] in known else len(known)
        places = range(first, first + len(payloads))
        if list(shards) != known[first : places.stop] or not payloads:
            raise ValueError(
                f"{len(payloads)} payloads for the shards {list(shards)}; expected one for each of"
                f" neighbours among {known}"
            )
        self._cache._scatter(self._plan, places, slots, payloads, fence)


class _Tails(_DeviceMemory):
    """Tails of one number of tokens in the caches of a device."""

    def __init__(self, cache: DeviceKVCache, plan: CopyPlan) -> None:
        self._of = cache
        self._plan = plan

    @property
    def _cache(self) -> DeviceKVCache:
        return self._of


class DeviceKVCache(_DeviceMemory, KVCache):
    """KV caches on a device, with buffers and streams of its own.

    Parameters
    ----------
    calls : Mapping[int, Sequence[LayerCall]]
        The copy calls of each shard, in the order of the shards. The caches are on one device.
    buffer_bytes : int
        Device memory for buffers, of which each holds a chunk: no more than :data:`MOST_BUFFERS`,
        but one for stores and one for loads in any case, and fewer where a quarter of the free
        memory is too small. 0: each copy allocates what it needs.
    streams : Streams, optional
        The device's own when absent.

    Raises
    ------
    ConfigError
        If the device has no memory for two buffers.
    UnsupportedError
        If the elements of a cache are permuted, which no kernel supports.
    """

    def __init__(
        self,
        calls: Mapping[int, Sequence[LayerCall]],
        *,
        buffer_bytes: int = 0,
        streams: Streams | None = None,
    ) -> None:
        self._device = next(iter(calls.values()))[0].caches[0].device
        self._streams = streams = Streams(self._device) if streams is None else streams
        self._state = _DeviceState(self._device, streams)
        self._calls = calls
        self._bind()
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        self._paused = False
        #: Number of calls that use the device.
        self._running = 0
        stores: Sequence[Tensor] | None = None
        loads: Sequence[Tensor | None] = (None, None)
        if buffer_bytes:
            buffers = self._allocate(buffer_bytes)
            of_loads = min(LOAD_BUFFERS, len(buffers) // 2)
            stores, loads = buffers[of_loads:], buffers[:of_loads]
        self._room = sys.maxsize if stores is None else len(stores)
        self._copier = copier = Copier(streams, self._state.note, stores, loads)
        # A program may drop its tensors while they are stored: what has been gathered is copied.
        weakref.finalize(self, copier.stop)

    def _bind(self) -> None:
        """Read where the caches lie now."""
        self._plan = plan = CopyPlan.of(self._calls)
        self._tail_plan = functools.lru_cache(TAILS_KEPT)(plan.of_tail)
        for _, _, runs in plan.groups:
            for run in runs:
                ops.prepare(run.caches, cast(PagedLayout, run.call.layout))

    @property
    def _cache(self) -> DeviceKVCache:
        return self

    @property
    def problem(self) -> str:
        """See :attr:`KVCache.problem`."""
        return self._state.problem

    @property
    def room(self) -> int:
        """See :attr:`KVCache.room`."""
        return self._room

    def _allocate(self, nbytes: int) -> list[Tensor]:
        """Return buffers that take so many bytes, at least two."""
        plan, shards = self._plan, len(self._plan.sizes)
        size = shards * max(plan.sizes)
        most = min(nbytes, self._streams.free_bytes() // _SHARE)
        count = max(2, min(MOST_BUFFERS, most // size))
        buffers: list[Tensor] = []
        try:
            while len(buffers) < count:
                buffers.append(plan.allocate(shards))
        except torch.OutOfMemoryError as error:
            if len(buffers) < 2:
                raise ConfigError(
                    f"{self._device} has no memory for two buffers of {size} bytes: give the"
                    " engine less memory, or make chunk_size smaller"
                ) from error
        if len(buffers) < min(MOST_BUFFERS, max(2, nbytes // size)):
            logger.warning(
                "%s has free memory for only %d buffers of %d bytes: if a step computes more chunks"
                " than that, some are stored later",
                self._device,
                len(buffers),
                size,
            )
        return buffers

    def _check(
        self, plan: CopyPlan, places: range, slots: Tensor, payloads: Sequence[Tensor]
    ) -> None:
        tokens, uint8 = plan.tokens, torch.uint8
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
        for place, payload in zip(places, payloads, strict=True):
            if payload.numel() != plan.sizes[place]:
                raise ValueError(
                    f"a payload has {payload.numel()} bytes; expected {plan.sizes[place]}"
                )
            if payload.dtype is not uint8 or not (payload.is_cpu and payload.is_contiguous()):
                raise ValueError(
                    f"a payload is {payload.dtype} on {payload.device} with strides"
                    f" {list(payload.stride())}; expected contiguous uint8 in host memory"
                )
        plan.check_slots(slots)

    def _use(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Use the device, unless it failed."""
        if self._state.problem:
            raise DeviceUnavailableError(self._state.problem)
        try:
            return work(*arguments)
        except RuntimeError as error:
            if (noted := self._state.note(error)) is error:
                raise
            raise noted from error

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

    def _gather(
        self, plan: CopyPlan, slots: Tensor, payloads: Sequence[Tensor]
    ) -> PendingCopy | None:
        if len(payloads) != len(plan.sizes):
            raise ValueError(f"{len(payloads)} payloads for {len(plan.sizes)} shards")
        self._check(plan, range(len(payloads)), slots, payloads)
        if not self._begin():
            return None
        try:
            with trace_range("kvshelf gather"):
                return self._use(self._copier.gather, plan, slots, payloads)
        finally:
            self._end()

    def fence(self) -> object:
        """See :meth:`~kvshelf.kv.caches.KVCache.fence`. Step thread; never waits."""

        def recorded() -> Any:
            with self._streams.here():
                event = self._streams.event()
                event.record(self._streams.current())
                return event

        return self._use(recorded)

    def _scatter(
        self,
        plan: CopyPlan,
        places: range,
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: object,
    ) -> None:
        self._check(plan, places, slots, payloads)
        if not self._begin():
            raise DeviceUnavailableError(
                f"the KV caches on {self._device} cannot be used now: the engine sleeps, or has"
                " released them"
            )
        try:
            with trace_range("kvshelf scatter"):
                self._use(self._copier.scatter, plan, places, slots, payloads, fence)
        finally:
            self._end()

    def of_tail(self, tokens: int) -> KVMemory:
        """See :meth:`~kvshelf.kv.caches.KVMemory.of_tail`."""
        return _Tails(self, self._tail_plan(tokens))

    # ------------------------------------------------------------- end

    def pause(self, deadline: float | None = None) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.pause`."""
        deadline = time.monotonic() + _PAUSE_SECONDS if deadline is None else deadline
        with self._changed:
            self._paused = True
            seconds = max(0.0, deadline - time.monotonic())
            is_idle = self._changed.wait_for(lambda: not self._running, seconds)
        if not (self._copier.drain(deadline) and is_idle):
            self._state.note(DeviceStuckError("copies have not ended in time"))

    def resume(self) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.resume`."""
        with self._changed:
            if not self._paused or self._closed:
                return
        self._bind()
        with self._changed:
            self._paused = False

    def close(self, deadline: float | None = None) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.close`."""
        deadline = time.monotonic() + _CLOSE_SECONDS if deadline is None else deadline
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self.pause(deadline)
        self._copier.close(deadline)
