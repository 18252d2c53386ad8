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

import contextlib
import functools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from kvshelf.background import trace_range
from kvshelf.errors import ConfigError, DeviceStuckError, DeviceUnavailableError
from kvshelf.kv.caches import TAILS_KEPT, KVCache, KVMemory, LayerCall, PendingCopy
from kvshelf.kv.copier import Copier
from kvshelf.kv.copy_plan import CopyPlan
from kvshelf.kv.streams import Streams
from kvshelf.logs import RateLimitedLog

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Device memory for the chunks of an engine that are on their way, and their most.
BUFFER_BYTES: Final = 256 << 20
MOST_BUFFERS: Final = 64
#: Buffers for loads among them: while one is filled, another is scattered.
LOAD_BUFFERS: Final = 2
#: At most one part in this many of the free memory is used for buffers: CUDA graphs, the
#: libraries' workspaces and communicators are allocated later.
_SHARE: Final = 4
_PAUSE_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 2.0
#: Beyond the deadline, for scatters that are under way: a few ms, unless the device hangs.
_REFUSE_SECONDS: Final = 0.1


class _Usage:
    """Who may use the caches of a device: whether it works, and whether the engine lends them.

    Attributes
    ----------
    problem : str
        How the device failed; empty while it works.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self.problem = ""
        self.device = device
        self._streams = streams
        self._log = RateLimitedLog(logger)
        #: Guards all below; notified when a call has ended.
        self.changed = threading.Condition()
        self.is_closed = self.is_paused = False
        self.calls = 0

    def note(self, error: Exception) -> RuntimeError:
        """Note an error of the device; return the one that callers get."""
        is_stuck = isinstance(error, DeviceStuckError)
        if isinstance(error, torch.OutOfMemoryError | DeviceUnavailableError) and not is_stuck:
            # The copies in plain torch allocate; a shortage of memory may be temporary.
            return error
        text = str(error).strip().partition("\n")[0] or type(error).__name__
        problem = f"{self.device} failed: {text}"
        if not (self.problem or is_stuck) and self._works():
            self._log.warning("%s. That chunk is not copied; the device still works", problem)
            return DeviceUnavailableError(problem)
        with self.changed:
            is_first, self.problem = not self.problem, self.problem or problem
        if is_first:
            logger.error(
                "%s. No chunks are stored or loaded any more; those in transit are lost", problem
            )
        return DeviceUnavailableError(self.problem)

    def _works(self) -> bool:
        try:
            with self._streams.here():
                event = self._streams.event()
                # CUDA answers for an event that was never recorded without a look at the device.
                event.record(self._streams.current())
                event.query()
        except Exception:  # noqa: BLE001 - it is asked because of an error
            return False
        return True

    def call(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Use the device, unless it failed."""
        if self.problem:
            raise DeviceUnavailableError(self.problem)
        try:
            return work(*arguments)
        except RuntimeError as error:
            if (noted := self.note(error)) is error:
                raise
            raise noted from error

    @contextlib.contextmanager
    def lent(self) -> Iterator[bool]:
        """Use the caches, if they may be used now: they stay so meanwhile."""
        with self.changed:
            usable = not (self.is_closed or self.is_paused)
            self.calls += usable
        try:
            yield usable
        finally:
            with self.changed:
                self.calls -= usable
                self.changed.notify_all()


class _DeviceMemory(KVMemory):
    """What is copied in one way, chunks or tails, in the caches of a device."""

    def __init__(self, plan: CopyPlan, copier: Copier, usage: _Usage) -> None:
        self._plan, self._copier, self._usage = plan, copier, usage

    def gather(self, slots: Tensor, payloads: Sequence[Tensor]) -> PendingCopy | None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.gather`. Step thread; never waits."""
        self._check(self._plan.sizes, slots, payloads)
        with self._usage.lent() as usable, trace_range("kvshelf gather"):
            if not usable:
                return None
            return self._usage.call(self._copier.gather, self._plan, slots, payloads)

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
        all_shards = list(self._plan.calls)
        first = all_shards.index(shards[0])
        places = range(first, first + len(shards))
        if list(shards) != all_shards[first : places.stop]:
            raise ValueError(f"the shards {list(shards)} are no neighbours among {all_shards}")
        self._check(self._plan.sizes[first : places.stop], slots, payloads)
        with self._usage.lent() as usable, trace_range("kvshelf scatter"):
            if not usable:
                raise DeviceUnavailableError(
                    f"the KV caches on {self._usage.device} cannot be used now: the engine sleeps,"
                    " or has released them"
                )
            self._usage.call(self._copier.scatter, self._plan, places, slots, payloads, fence)

    def close(self, deadline: float | None = None) -> None:
        """See :meth:`~kvshelf.kv.caches.KVMemory.close`."""
        deadline = time.monotonic() + _CLOSE_SECONDS if deadline is None else deadline
        with self._usage.changed:
            was_closed, self._usage.is_closed = self._usage.is_closed, True
        if not was_closed:
            self.pause(deadline)
            self._copier.close(deadline)

    def pause(self, deadline: float | None = None) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.pause`."""
        deadline = time.monotonic() + _PAUSE_SECONDS if deadline is None else deadline
        usage = self._usage
        with usage.changed:
            usage.is_paused = True
            seconds = max(0.0, deadline - time.monotonic())
            is_idle = usage.changed.wait_for(lambda: not usage.calls, seconds)
        if not is_idle:
            self._copier.refuse_loads(time.monotonic() + _REFUSE_SECONDS)
        if not (self._copier.drain(deadline) and is_idle):
            usage.note(DeviceStuckError("copies have not ended in time"))

    def _check(self, sizes: Sequence[int], slots: Tensor, payloads: Sequence[Tensor]) -> None:
        if len(payloads) != len(sizes):
            raise ValueError(f"{len(payloads)} payloads for {len(sizes)} shards")
        for payload, size in zip(payloads, sizes, strict=True):
            fits = payload.dtype == torch.uint8 and payload.shape == (size,)
            if not (fits and payload.is_cpu and payload.is_contiguous()):
                raise ValueError(
                    f"a payload is {payload.dtype} {list(payload.shape)} on {payload.device} with"
                    f" strides {list(payload.stride())}; expected contiguous uint8 [{size}] in host"
                    " memory"
                )
        self._plan.check_slots(slots)


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
        If the device has no memory for its buffers.
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
        device = next(iter(calls.values()))[0].caches[0].device
        self._streams = streams = Streams(device) if streams is None else streams
        plan, usage = CopyPlan.of(calls), _Usage(device, streams)
        buffers = _allocate(plan, buffer_bytes, streams) if buffer_bytes else []
        of_loads = min(LOAD_BUFFERS, len(buffers) // 2)
        stores = buffers[of_loads:] or None
        copier = Copier(streams, usage.note, stores, buffers[:of_loads] or (None,) * LOAD_BUFFERS)
        super().__init__(plan, copier, usage)
        self._room = sys.maxsize if stores is None else len(stores)
        self._bind(plan)
        # A program may drop its tensors while they are stored: what has been gathered is copied.
        weakref.finalize(self, copier.stop)

    def _bind(self, plan: CopyPlan) -> None:
        """Copy from and to where the caches of a plan lie."""
        plan.prepare()
        self._plan = plan
        self._tails = functools.lru_cache(TAILS_KEPT)(plan.of_tail)

    @property
    def problem(self) -> str:
        """See :attr:`KVCache.problem`."""
        return self._usage.problem

    @property
    def room(self) -> int:
        """See :attr:`KVCache.room`."""
        return self._room

    def fence(self) -> object:
        """See :meth:`~kvshelf.kv.caches.KVCache.fence`. Step thread; never waits."""

        def recorded() -> Any:
            with self._streams.here():
                event = self._streams.event()
                event.record(self._streams.current())
                return event

        return self._usage.call(recorded)

    def of_tail(self, tokens: int) -> KVMemory:
        """See :meth:`~kvshelf.kv.caches.KVMemory.of_tail`."""
        return _DeviceMemory(self._tails(tokens), self._copier, self._usage)

    # ------------------------------------------------------------- end

    def resume(self) -> None:
        """See :meth:`~kvshelf.kv.caches.KVCache.resume`."""
        usage = self._usage
        with usage.changed:
            if not usage.is_paused or usage.is_closed:
                return
        self._bind(CopyPlan.of(self._plan.calls))
        with usage.changed:
            usage.is_paused = False


def _allocate(plan: CopyPlan, nbytes: int, streams: Streams) -> list[Tensor]:
    """Return device buffers that take so many bytes, at least two."""
    shards = len(plan.sizes)
    size = shards * max(plan.sizes)
    wanted_buffers = max(2, min(MOST_BUFFERS, nbytes // size))
    count = max(2, min(wanted_buffers, streams.free_bytes() // _SHARE // size))
    try:
        buffers = [plan.allocate(shards) for _ in range(count)]
        # Their memory may have been another tensor's, with work on this stream that is not done.
        # They are used on other streams.
        streams.current().synchronize()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no memory for {count} buffers of {size} bytes: give the engine less"
            " memory, or make chunk_size smaller"
        ) from error
    if count < wanted_buffers:
        logger.warning(
            "the GPU has free memory for only %d of %d buffers of %d bytes: if a step computes more"
            " chunks, some are stored later",
            count,
            wanted_buffers,
            size,
        )
    return buffers
